"""Updates of RWKV-4 over a pool without a GPU: values in plain torch, what is checked, and what is launched."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_driver import entered

import rwkv_jit
from rwkv_jit.ahead import warm
from rwkv_jit.call import tensors
from rwkv_jit.kernels import kernel, signatures
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import wkv4
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

B, T, C, SLOTS = 3, 2, 5, 7


def make(dtype=torch.float32, batch=B, tokens=T, channels=C):
    """w, u, k and v."""
    w, u, k, v = torch.linspace(-3, 1, channels), *map(torch.randn, ([channels], *[[batch, tokens, channels]] * 2))
    return [x.to(dtype) for x in (w, u, k, v)]


def make_pool(slots=SLOTS, channels=C, dtype=torch.float32):
    num, den, top = torch.randn(slots, channels), torch.rand(slots, channels) + 0.1, torch.randn(slots, channels)
    return torch.stack((num, den, top), 1).to(dtype)


def exact(inputs, states, decay="raw"):
    return rwkv_jit.wkv4_ref(*(x.double() for x in (*inputs, states)), True, decay)


# ---- values ------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_rows_of_a_pool(data):
    null_index, decay = data.draw(st.integers(-2, 2)), data.draw(st.sampled_from(["raw", "log"]))
    rows, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    read = data.draw(st.lists(st.integers(-3, SLOTS + 1), min_size=rows, max_size=rows))
    # What one row reads no other may write.
    written = data.draw(st.one_of(st.none(), st.lists(st.integers(-3, SLOTS - 1), min_size=rows, max_size=rows)))
    if written is not None:
        written = [slot if slot not in read else null_index for slot in written]
    places = [slot for slot in (written or read) if slot > null_index]
    in_pool = [slot for slot in (*read, *(written or ())) if slot > null_index]
    is_legal = len(set(places)) == len(places) and all(0 <= slot < SLOTS for slot in in_pool)
    (w, u, k, v), pool = make(batch=rows, tokens=tokens), make_pool()
    w = -w.exp() if decay == "log" else w
    before = pool.clone()
    options = {"state_indices": torch.tensor(read, dtype=torch.int32), "null_index": null_index, "decay": decay}
    if written is not None:
        options["write_indices"] = torch.tensor(written, dtype=torch.int32)
    if not is_legal:
        with pytest.raises(ValueError, match="_indices: expected"):
            rwkv_jit.wkv4_update(pool, w, u, k, v, **options)
        assert torch.equal(pool, before)
        return
    y = rwkv_jit.wkv4_update(pool, w, u, k, v, **options)
    left = before.clone()
    for row, slot in enumerate(read):
        if slot <= null_index:
            assert not y[row].any()
            continue
        own = slice(row, row + 1)
        want, final = exact((w, u, k[own], v[own]), before[slot : slot + 1], decay)
        torch.testing.assert_close(y[own], want.float())
        place = slot if written is None else written[row]
        if place > null_index:
            left[place] = final[0]
    torch.testing.assert_close(pool, left)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_one_token_without_indices_in_other_dtypes(dtype):
    (w, u, k, v), pool = make(dtype, tokens=1), make_pool(B, dtype=torch.promote_types(dtype, torch.float32))
    want, final = exact((w, u, k, v), pool)
    out = torch.empty(B, C, dtype=dtype)
    assert rwkv_jit.wkv4_update(pool, w, u, k[:, 0], v[:, 0], out=out) is out
    torch.testing.assert_close(out, want[:, 0].to(dtype))
    torch.testing.assert_close(pool, final.to(pool.dtype))


def test_no_rows_and_no_tokens_change_nothing():
    for sizes in ({"batch": 0}, {"tokens": 0}, {"channels": 0}):
        inputs, pool = make(**sizes), make_pool(channels=sizes.get("channels", C))
        before = pool.clone()
        assert rwkv_jit.wkv4_update(pool, *inputs).numel() == 0
        assert torch.equal(pool, before)


def test_a_batch_may_have_more_rows_than_there_are_slots():
    inputs, pool = make(), make_pool(2)
    before = pool.clone()
    y = rwkv_jit.wkv4_update(pool, *inputs, state_indices=torch.tensor([-1, 1, -1]))
    assert y.any(-1).any(-1).tolist() == [False, True, False]
    assert (pool != before).any(-1).any(-1).tolist() == [False, True]


def test_states_of_a_pool_of_all_layers():
    pool = rwkv_jit.StatePool(4, {"wkv": rwkv_jit.StateSpec(2, (3, C), torch.float32)}, device="cpu", reserved=1)
    slots = pool.allocate(2)
    pool["wkv"][:, slots, 2] = -1e38
    w, u, k, v = make(batch=2, tokens=6)
    want, final = rwkv_jit.wkv4(w, u, k, v, output_final_state=True)
    for layer in range(2):
        states = pool["wkv"][layer]
        for begin in (0, 2, 4):
            some = (x[:, begin : begin + 2] for x in (k, v))
            y = rwkv_jit.wkv4_update(states, w, u, *some, state_indices=pool.indices(slots), null_index=0)
        torch.testing.assert_close(y, want[:, 4:])
        torch.testing.assert_close(states[slots], final)


def test_compiled_whole():
    inputs, pool, slots = make(), make_pool(), torch.tensor([5, -1, 0])
    before = pool.clone()

    def layer(pool, slots, *given):
        return 2 * rwkv_jit.wkv4_update(pool, *given, state_indices=slots)

    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(pool, slots, *inputs)
    assert torch.equal(y, 2 * rwkv_jit.wkv4_update(before, *inputs, state_indices=slots))
    assert torch.equal(pool, before)


def test_torch_accepts_the_op():
    w, u, k, v = make()
    slots = torch.tensor([5, 2, 0])
    given = [w, u, k, v], None, slots, None, None, -1, 1.0, "raw", "vk"
    torch.library.opcheck(torch.ops.rwkv_jit.update_states.default, ("wkv4", make_pool(), torch.empty(B, T, C), *given))


def test_flops_are_those_of_the_op():
    from torch.utils.flop_counter import FlopCounterMode

    w, u, k, v = make()
    counts = []
    for run in (lambda: rwkv_jit.wkv4(w, u, k, v), lambda: rwkv_jit.wkv4_update(make_pool(), w, u, k, v)):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts == [8 * B * T * C] * 2


# ---- faults ------------------------------------------------------------------------------------------------------

FAULTS = {
    "decay": (ValueError, "decay: expected one of raw, log, got 'sigmoid'", {"decay": "sigmoid"}),
    "no such option": (TypeError, "unexpected keyword argument 'scale'", {"scale": 1.0}),
    "null": (TypeError, "null_index: expected an int of 32 bits, got None", {"null_index": None}),
    "indices": (ValueError, r"state_indices: expected shape \[3\]", {"state_indices": torch.zeros(2).int()}),
    "index type": (TypeError, "state_indices: expected torch.int32 or", {"state_indices": torch.zeros(3)}),
    "past the pool": (ValueError, "state_indices: expected slots below 7", {"state_indices": torch.tensor([0, 1, 7])}),
    "twice": (ValueError, r"state_indices: .* got \[1\] twice", {"state_indices": torch.tensor([1, 0, 1])}),
    "two types": (
        TypeError, "write_indices: expected torch.int64 like state_indices",
        {"state_indices": torch.tensor([0, 1, 2]), "write_indices": torch.tensor([0, 1, 2]).int()},
    ),
    "read and written": (
        ValueError, "state_indices: expected slots that no other row writes, got 2 of rows 2 and 0",
        {"state_indices": torch.tensor([0, 1, 2]), "write_indices": torch.tensor([2, 3, 4])},
    ),
    "written twice": (
        ValueError, r"write_indices: .* got \[3\] twice",
        {"state_indices": torch.tensor([0, 1, 2]), "write_indices": torch.tensor([3, 3, -1])},
    ),
    "out": (ValueError, r"out: expected shape \[3, 2, 5\] like v", {"out": torch.zeros(B, T, C + 1)}),
    "out type": (TypeError, "out: expected torch.float32", {"out": torch.zeros(B, T, C).half()}),
    "out gaps": (ValueError, "out: expected memory without gaps", {"out": torch.zeros(B, T, 2 * C)[..., ::2]}),
    "gradient": (
        RuntimeError, "wkv4_update: changes the states in place and has no gradient; use wkv4, or torch.no_grad",
        {"v": torch.zeros(B, T, C, requires_grad=True)},
    ),
    "one of several": (ValueError, r"v: expected shape \[3, 2, 5\] like k, got \[3, 5\]", {"v": torch.zeros(B, C)}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_argument_and_changes_nothing(fault):
    kind, message, options = FAULTS[fault]
    named, pool = dict(zip("wukv", make(), strict=True)), make_pool()
    before = pool.clone()
    with pytest.raises(kind, match=message):
        rwkv_jit.wkv4_update(pool, **{**named, **options})
    assert torch.equal(pool, before)


POOLS = {
    "sizes": (ValueError, r"state: expected shape \[slots, 3, 5\], got \[7, 5, 3\]", lambda: torch.zeros(SLOTS, C, 3)),
    "type": (TypeError, "state: expected torch.float32, got torch.float16", lambda: make_pool().half()),
    "too few": (ValueError, "state: expected a slot for each of the 3 rows", lambda: make_pool(2)),
    "overlap": (
        ValueError, r"state: expected slots that do not overlap, got strides \(10, 5, 1\)",
        lambda: torch.zeros(SLOTS * 3 * C).as_strided((SLOTS, 3, C), (2 * C, C, 1)),
    ),
    "numbers overlap": (
        ValueError, "state: expected slots that do not overlap",
        lambda: torch.zeros(SLOTS * 3 * C).as_strided((SLOTS, 3, C), (3 * C, C - 1, 1)),
    ),
    "one for all": (ValueError, "state: is changed in place", lambda: make_pool(1).expand(SLOTS, 3, C)),
}  # fmt: skip


@pytest.mark.parametrize("fault", POOLS)
def test_a_pool_that_does_not_fit_is_refused(fault):
    kind, message, pool = POOLS[fault]
    with pytest.raises(kind, match=message):
        rwkv_jit.wkv4_update(pool(), *make())


def pool_of(how):
    """A pool at other strides than those of its shape, of the same shape."""
    return {
        "every second slot": lambda: make_pool(2 * SLOTS)[::2],
        "numbers first": lambda: make_pool().transpose(0, 1).contiguous().transpose(0, 1),
        "channels first": lambda: make_pool().permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "pages": lambda: torch.randn(SLOTS, 40).abs()[:, 2 : 2 + 3 * C].view(SLOTS, 3, C),
    }[how]()


LAYOUTS = pytest.mark.parametrize("how", ["every second slot", "numbers first", "channels first", "pages"])


@LAYOUTS
def test_a_pool_may_have_any_strides(how):
    pool, inputs, slots = pool_of(how), make(), torch.tensor([4, 0, 6])
    before = pool.clone()
    y = rwkv_jit.wkv4_update(pool, *inputs, state_indices=slots)
    assert torch.equal(y, rwkv_jit.wkv4_update(before, *inputs, state_indices=slots))
    assert torch.equal(pool, before)


# ---- what is launched --------------------------------------------------------------------------------------------


@LAYOUTS
def test_the_kernel_gets_the_pool_and_its_strides(on_gpu, how):
    (w, u, k, v), pool, slots = make(), pool_of(how), torch.tensor([5, 2, -1], dtype=torch.int32)
    for _ in range(2):
        y = rwkv_jit.wkv4_update(pool, w, u, k, v, state_indices=slots, null_index=0)
        (launch,) = on_gpu.take()
        names = ("w_raw", "bonus", "k", "v", "state", "state_indices", "y")
        addresses = {name: x.data_ptr() for name, x in zip(names, (w, u, k, v, pool, slots, y), strict=True)}
        assert launch.addresses == {**addresses, "write_indices": 0}
        slot_stride, number_stride, channel_stride = pool.stride()
        assert launch.numbers == {
            "k_strides": (T * C, C), "v_strides": (T * C, C), "tokens": T, "batch": B, "channels": C, "slots": SLOTS,
            "slot_stride": slot_stride, "number_stride": number_stride, "channel_stride": channel_stride,
            "null_index": 0,
        }  # fmt: skip
        assert launch.grid == (1, 1, 1)


def test_a_known_call_is_short(on_gpu):
    (w, u, k, v), pool, out = make(tokens=1), make_pool(), torch.empty(B, C)
    slots, others = torch.tensor([5, 2, 0], dtype=torch.int32), torch.tensor([1, 3, 4], dtype=torch.int32)

    def run(**more):
        return rwkv_jit.wkv4_update(pool, w, u, k[:, 0], v[:, 0], state_indices=slots, out=out, **more)

    assert run() is out
    assert len(entered(run)) <= 13
    on_gpu.take()
    for written, decay, null_index in itertools.product((None, others), ("raw", "log"), (-1, 0)):
        for _ in range(2):
            run(write_indices=written, decay=decay, null_index=null_index)
            (launch,) = on_gpu.take()
            assert launch.parameters["DECAY"] == decay
            assert launch.named["null_index"] == null_index
            assert launch.named["write_indices"] == (0 if written is None else written.data_ptr())
    rwkv_jit.wkv4_update(pool, w, u, k[:, 0], v[:, 0], state_indices=slots.long())
    (launch,) = on_gpu.take()
    assert (launch.parameters["INDEX_BYTES"], launch.parameters["CHUNK_LEN"]) == (8, 1)


def test_slots_on_a_gpu_are_looked_at_when_asked(on_gpu, monkeypatch):
    inputs, pool = make(), make_pool()
    slots = torch.tensor([5, 9, 0], dtype=torch.int32)
    rwkv_jit.wkv4_update(pool, *inputs, state_indices=slots)
    assert len(on_gpu.take()) == 1
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    signatures.forget()
    with pytest.raises(ValueError, match=r"state_indices: expected slots below 7, .* got \[9\]"):
        rwkv_jit.wkv4_update(pool, *inputs, state_indices=slots)
    assert not on_gpu.take()


def test_gradients_are_refused_before_a_launch(on_gpu):
    (w, u, k, v), pool = make(), make_pool()
    rwkv_jit.wkv4_update(pool, w, u, k, v)
    on_gpu.take()
    with pytest.raises(RuntimeError, match="changes the states in place and has no gradient"):
        rwkv_jit.wkv4_update(pool, w, u, k, v.requires_grad_())
    assert not on_gpu.take()


@pytest.mark.parametrize(("dtype", "w_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_every_kernel_of_a_call_is_made_ahead(dtype, w_dtype, on_gpu, monkeypatch):
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: requests)
    warmed = rwkv_jit.warm("wkv4", dtypes=dtype, backward=False, arch="sm_90", w_dtype=w_dtype, updates=True)
    made = {kernel.memory_key(request) for request in warmed}
    types = dict(zip("wukv", (*[tensors.STORAGE[w_dtype]] * 2, *[tensors.STORAGE[dtype]] * 2), strict=True))
    for batch, tokens in itertools.product((1, 700), (1, 5)):
        p = Problem(OPS["wkv4"], Gpu("sm_90"), types, B=batch, T=tokens, C=2048, decay="raw")
        for request in wkv4.update(p, {"slots": 9}).requests(p.gpu):
            assert kernel.memory_key(request) in made
    with pytest.raises(ValueError, match="rings: wkv4 has none"):
        rwkv_jit.warm("wkv4", arch="sm_90", updates=True, rings=[(8, 0)])
