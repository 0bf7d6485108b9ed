"""Updates of pools without a GPU: values in plain torch, what is checked, what is launched, and how it is cut."""

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_driver import entered

import rwkv_jit
from rwkv_jit.call import switches
from rwkv_jit.kernels import signatures
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.plain import rounding
from rwkv_jit.schedules import update
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

B, T, H, K, V, SLOTS = 3, 2, 2, 12, 20, 7
NAMES = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
WITH_DECAY = NAMES[:4]
RECURRENCE = pytest.mark.parametrize("name", NAMES)
SIZES = {"B": B, "T": T, "H": H, "K": K, "V": V}


def make(name, dtype=torch.float32, **sizes):
    """Inputs in the order of the call; what has a gate has one that forgets a little."""
    sizes = SIZES | sizes
    inputs = {
        own: (torch.randn([sizes[dim] for dim in dims]) * 0.3).to(dtype) for own, dims in OPS[name].inputs.items()
    }
    if name == "gla":
        inputs["w"] = -inputs["w"].abs()
    return inputs


def make_pool(name, layout=None, slots=SLOTS, dtype=torch.float32, **sizes):
    sizes = SIZES | sizes
    dims = OPS[name].state_dims(layout or OPS[name].state_layout)
    return torch.randn(slots, *(sizes[dim] for dim in dims)).to(dtype)


def call(name, pool, inputs, **options):
    return getattr(rwkv_jit, f"{name}_update")(pool, *inputs.values(), **options)


def token(inputs):
    return {own: x[:, 0] if x.dim() == 4 else x for own, x in inputs.items()}


def reference(name, inputs, states, **options):
    scale = OPS[name].scale or K**-0.5
    function = getattr(rwkv_jit, f"{name}_ref")
    return function(*inputs.values(), states, True, **{"scale": scale, **options})


# ---- values ------------------------------------------------------------------------------------------------------


@RECURRENCE
@settings(max_examples=25)
@given(data=st.data())
def test_rows_of_a_pool(name, data):
    layout, null_index = data.draw(st.sampled_from(["vk", "kv"])), data.draw(st.integers(-2, 2))
    rows, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    slots = st.integers(-3, SLOTS + 1)
    read = data.draw(st.lists(slots, min_size=rows, max_size=rows))
    # What one row reads no other may write.
    written = data.draw(st.one_of(st.none(), st.lists(st.integers(-3, SLOTS - 1), min_size=rows, max_size=rows)))
    if written is not None:
        written = [slot if slot not in read else null_index for slot in written]
    places = [slot for slot in (written or read) if slot > null_index]
    in_pool = [slot for slot in (*read, *(written or ())) if slot > null_index]
    is_legal = len(set(places)) == len(places) and all(0 <= slot < SLOTS for slot in in_pool)
    inputs, pool = make(name, B=rows, T=tokens), make_pool(name, layout)
    before = pool.clone()
    options = {"state_indices": torch.tensor(read, dtype=torch.int32), "state_layout": layout, "null_index": null_index}
    if written is not None:
        options["write_indices"] = torch.tensor(written, dtype=torch.int32)
    if not is_legal:
        with pytest.raises(ValueError, match="_indices: expected"):
            call(name, pool, inputs, **options)
        assert torch.equal(pool, before)
        return
    y = call(name, pool, inputs, **options)
    left = before.clone()
    for row, slot in enumerate(read):
        if slot <= null_index:
            assert not y[row].any()
            continue
        own = {key: x[row : row + 1] if "B" in OPS[name].inputs[key] else x for key, x in inputs.items()}
        want, final = reference(name, own, before[slot : slot + 1], state_layout=layout)
        torch.testing.assert_close(y[row : row + 1], want)
        place = slot if written is None else written[row]
        if place > null_index:
            left[place] = final[0]
    torch.testing.assert_close(pool, left)


@RECURRENCE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_one_token_without_indices_in_other_dtypes(name, dtype):
    inputs, pool = make(name, dtype, T=1), make_pool(name, slots=B, dtype=dtype)
    before = pool.clone()
    out = torch.empty_like(token(inputs)["v"])
    assert call(name, pool, token(inputs), out=out) is out
    want, final = reference(name, inputs, before)
    torch.testing.assert_close(out, want[:, 0])
    torch.testing.assert_close(pool, final)


@pytest.mark.parametrize("name", WITH_DECAY)
def test_something_is_added_to_w_in_float32(name):
    inputs, pool, w0 = make(name, torch.bfloat16), make_pool(name, slots=B), torch.randn(H, K) * 0.1
    before = pool.clone()
    y = call(name, pool, inputs, w0=w0.flatten(), decay="sigmoid", scale=0.5)
    inputs["w"] = inputs["w"].float() + w0
    want, final = reference(name, inputs, before, decay="sigmoid", scale=0.5)
    torch.testing.assert_close(y, want.to(y.dtype))
    torch.testing.assert_close(pool, final)


@RECURRENCE
def test_no_rows_and_no_tokens_change_nothing(name):
    for sizes in ({"B": 0}, {"T": 0}):
        inputs, pool = make(name, **sizes), make_pool(name)
        before = pool.clone()
        assert call(name, pool, inputs).numel() == 0
        assert torch.equal(pool, before)


def test_autocast_casts_the_inputs():
    inputs, pools = make("wkv7"), [make_pool("wkv7", slots=B)]
    pools.append(pools[0].clone())
    with torch.autocast("cpu", torch.bfloat16):
        y = call("wkv7", pools[0], inputs)
    assert y.dtype == torch.bfloat16
    narrow = {own: x if own == "w" else x.bfloat16() for own, x in inputs.items()}
    assert torch.equal(call("wkv7", pools[1], narrow), y)
    assert torch.equal(*pools)


@RECURRENCE
def test_compiled_whole(name):
    inputs, pool = make(name), make_pool(name)
    before, slots = pool.clone(), torch.tensor([5, -1, 0])

    def layer(pool, slots, *given):
        return 2 * getattr(rwkv_jit, f"{name}_update")(pool, *given, state_indices=slots)

    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(pool, slots, *inputs.values())
    assert torch.equal(y, 2 * call(name, before, inputs, state_indices=slots))
    assert torch.equal(pool, before)


def test_flops_are_those_of_the_op():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for run in (
        lambda inputs: rwkv_jit.wkv7(*inputs.values()),
        lambda inputs: call("wkv7", make_pool("wkv7", slots=B), inputs),
    ):
        with FlopCounterMode(display=False) as counter:
            run(make("wkv7"))
        counts.append(counter.get_total_flops())
    assert counts == [8 * B * T * H * K * V] * 2


# ---- rounding ----------------------------------------------------------------------------------------------------


def philox(counter, seed):
    """As the paper has it, in integers of Python."""
    x, key, word = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32], 2**32 - 1
    for _ in range(10):
        first, second = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [second >> 32 ^ x[1] ^ key[0], second & word, first >> 32 ^ x[3] ^ key[1], first & word]
        key = [key[0] + 0x9E3779B9 & word, key[1] + 0xBB67AE85 & word]
    return x


def test_random_bits_are_those_of_philox():
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # the authors' own answer
    for counter, seed in ((0, 0), (1, 5), (2**40 + 3, 2**62 + 9)):
        assert rounding.philox(torch.tensor([counter]), seed)[0].tolist() == philox(counter, seed)
    bits = rounding.random_bits(torch.tensor([2, 5]), heads=3, size=20, seed=7)
    assert bits.shape == (2, 3, 20)
    words = philox((5 * 3 + 1) * 3 + 1, 7)  # head 1 of slot 5: draws of 8 elements, three for 20
    assert bits[1, 1, 8:16].tolist() == [half for word in words for half in (word & 0xFFFF, word >> 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-5, 3e-8, 300.0])
def test_rounding_at_random_takes_neighbours_and_keeps_the_mean(dtype, size):
    x = torch.randn(16) * size
    bits = torch.arange(2**16)[:, None].expand(-1, 16)
    found = rounding.round_at_random(x.expand(len(bits), 16).contiguous(), dtype, bits)
    assert found.dtype == dtype
    lower, upper = found.float().min(0).values, found.float().max(0).values
    near = x.to(dtype)
    assert bool(((lower == near.float()) | (upper == near.float())).all())
    assert bool(((lower <= x) & (x <= upper)).all())
    assert bool(((found.float() == lower) | (found.float() == upper)).all())
    torch.testing.assert_close(found.double().mean(0), x.double(), rtol=0, atol=float((upper - lower).max()) / 1000)


def test_numbers_without_neighbours_are_rounded_as_usual():
    x = torch.tensor([math.inf, -math.inf, math.nan, 70000.0, 65519.0, 0.0, -0.0, 3.39e38])
    bits = torch.full((8,), 0xFFFF)
    for dtype in (torch.float16, torch.bfloat16):
        found, want = rounding.round_at_random(x, dtype, bits), x.to(dtype)
        keep = [0, 1, 2, 5, 6, 7] + ([3, 4] if dtype == torch.float16 else [])
        assert torch.equal(found[keep].view(torch.int16), want[keep].view(torch.int16))


@RECURRENCE
def test_states_of_16_bits_are_rounded_at_random(name):
    inputs, pool, wide = make(name), make_pool(name, dtype=torch.bfloat16), None
    wide, slots = pool.float(), torch.tensor([4, 1, 6])
    pools = [pool.clone() for _ in range(3)]
    for own, seed in zip(pools, (3, torch.tensor([3]), 4), strict=True):
        call(name, own, inputs, state_indices=slots, rounding="stochastic", seed=seed)
    call(name, wide, inputs, state_indices=slots)
    assert torch.equal(pools[0], pools[1])
    assert not torch.equal(pools[0], pools[2])
    shape = wide[slots].shape
    bits = rounding.random_bits(slots, H, K * V, 3).view(shape)
    assert torch.equal(pools[0][slots], rounding.round_at_random(wide[slots], torch.bfloat16, bits))


# ---- faults ------------------------------------------------------------------------------------------------------

FAULTS = {
    "no such option": (
        TypeError, "unexpected keyword argument 'slots'; there are state, r, .*, state_indices, ", {"slots": 1},
    ),
    "layout": (ValueError, "state_layout: expected one of vk, kv, got 'hkv'", {"state_layout": "hkv"}),
    "rounding": (ValueError, "rounding: expected one of nearest, stochastic, got 'up'", {"rounding": "up"}),
    "no seed": (ValueError, "seed: rounding='stochastic' needs an int", {"rounding": "stochastic"}),
    "seed alone": (ValueError, "seed: needs rounding='stochastic'", {"seed": 3}),
    "seeds": (ValueError, "seed: expected one number", {"rounding": "stochastic", "seed": torch.zeros(2).long()}),
    "seed type": (TypeError, "seed: expected torch.int64", {"rounding": "stochastic", "seed": torch.zeros(1)}),
    "seed size": (TypeError, "seed: expected an int of 64 bits", {"rounding": "stochastic", "seed": 2**70}),
    "null": (TypeError, "null_index: expected an int of 32 bits, got None", {"null_index": None}),
    "scale": (ValueError, "scale: expected a finite number, got nan", {"scale": math.nan}),
    "indices": (ValueError, r"state_indices: expected shape \[3\]", {"state_indices": torch.zeros(2).int()}),
    "index type": (TypeError, "state_indices: expected torch.int32 or", {"state_indices": torch.zeros(3)}),
    "past the pool": (ValueError, "state_indices: expected slots below 7", {"state_indices": torch.tensor([0, 1, 7])}),
    "twice": (ValueError, r"state_indices: .* got \[1\] twice", {"state_indices": torch.tensor([1, 0, 1])}),
    "two types": (
        TypeError, "write_indices: expected torch.int64 like state_indices",
        {"state_indices": torch.tensor([0, 1, 2]), "write_indices": torch.tensor([0, 1, 2]).int()},
    ),
    "written twice": (
        ValueError, r"write_indices: .* got \[3\] twice",
        {"state_indices": torch.tensor([0, 1, 2]), "write_indices": torch.tensor([3, 3, -1])},
    ),
    "read and written": (
        ValueError, "state_indices: expected slots that no other row writes, got 2 of rows 2 and 0",
        {"state_indices": torch.tensor([0, 1, 2]), "write_indices": torch.tensor([2, 3, 4])},
    ),
    "own slots read and written": (
        ValueError, "state_indices: expected slots that no other row writes, got 1 of rows 1 and 2",
        {"write_indices": torch.tensor([3, -1, 1])},
    ),
    "out": (ValueError, "out: expected shape", {"out": torch.zeros(B, T, H, V + 1)}),
    "out type": (TypeError, "out: expected torch.float32", {"out": torch.zeros(B, T, H, V).half()}),
    "out gaps": (ValueError, "out: expected memory without gaps", {"out": torch.zeros(B, T, H, 2 * V)[..., ::2]}),
    "w0": (ValueError, r"w0: expected shape \[2, 12\] or \[24\]", {"w0": torch.zeros(H, K + 1)}),
    "w0 type": (TypeError, "w0: expected torch.float16", {"w0": torch.zeros(H, K).double()}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_argument_and_changes_nothing(fault):
    kind, message, options = FAULTS[fault]
    inputs, pool = make("wkv7"), make_pool("wkv7")
    before = pool.clone()
    with pytest.raises(kind, match=message):
        call("wkv7", pool, inputs, **options)
    assert torch.equal(pool, before)


POOLS = {
    "sizes": (ValueError, r"state: expected shape \[slots, 2, 20, 12\]", lambda: torch.zeros(SLOTS, H, K, V)),
    "type": (TypeError, "state: expected torch.float16", lambda: torch.zeros(SLOTS, H, V, K).int()),
    "too few": (ValueError, "state: expected a slot for each of the 3 rows", lambda: torch.zeros(2, H, V, K)),
    "gaps": (ValueError, "state: expected slots without gaps", lambda: torch.zeros(SLOTS, V, H, K).transpose(1, 2)),
    "overlap": (
        ValueError, "state: expected slots that do not overlap",
        lambda: torch.zeros(SLOTS * H * V * K).as_strided((SLOTS, H, V, K), (K, V * K, K, 1)),
    ),
    "one for all": (
        ValueError, "state: is changed in place", lambda: torch.zeros(1, H, V, K).expand(SLOTS, H, V, K)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", POOLS)
def test_a_pool_that_does_not_fit_is_refused(fault):
    kind, message, pool = POOLS[fault]
    with pytest.raises(kind, match=message):
        call("wkv7", pool(), make("wkv7"))


def test_linear_attention_has_no_decay():
    with pytest.raises(TypeError, match="unexpected keyword argument 'w0'"):
        call("linear_attention", make_pool("linear_attention"), make("linear_attention"), w0=torch.zeros(H, K))


@RECURRENCE
def test_gradients_are_refused(name):
    inputs, pool = make(name), make_pool(name)
    inputs["v"].requires_grad_()
    message = f"{name}_update: changes the states in place and has no gradient; use {name}, or torch.no_grad"
    with pytest.raises(RuntimeError, match=message):
        call(name, pool, inputs)
    arguments = name, pool, torch.empty(B, T, H, V), list(inputs.values()), *[None] * 4, -1, 1.0
    with pytest.raises(RuntimeError, match=message):
        torch.ops.rwkv_jit.update_states(*arguments, OPS[name].decay, "vk")
    with torch.no_grad():
        call(name, pool, inputs)


@RECURRENCE
def test_tangents_are_refused(name):
    """They would be lost, also where nothing is recorded for gradients."""
    inputs, pool = make(name), make_pool(name)
    before = pool.clone()
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        inputs["v"] = torch.autograd.forward_ad.make_dual(inputs["v"], torch.ones_like(inputs["v"]))
        with pytest.raises(RuntimeError, match=f"^{name}_update: changes the states in place and has no gradient"):
            call(name, pool, inputs)
    assert torch.equal(pool, before)


# ---- what is launched --------------------------------------------------------------------------------------------


@RECURRENCE
@pytest.mark.parametrize("has_gaps", [False, True])
def test_the_kernel_gets_the_pool_and_its_strides(on_gpu, name, has_gaps):
    inputs = make(name)
    wide = make_pool(name, slots=2 * SLOTS)
    pool = wide[::2] if has_gaps else wide
    slots = torch.tensor([5, 2, -1], dtype=torch.int32)
    for _ in range(2):
        y = call(name, pool, inputs, state_indices=slots, null_index=0)
        (launch,) = on_gpu.take()
        passed = launch.named
        assert passed["initial_state"] == passed["final_state"] == pool.data_ptr()
        assert passed["slot_stride"] == H * K * V * (1 + has_gaps)
        assert (passed["slots"], passed["null_index"], passed["batch"], passed["tokens"]) == (len(pool), 0, B, T)
        assert (passed["state_indices"], passed["write_indices"], passed["seed"]) == (slots.data_ptr(), 0, 0)
        assert (passed["y"], passed["v"]) == (y.data_ptr(), inputs["v"].data_ptr())
        assert passed["v_strides"] == inputs["v"].stride()[:3]
        for absent in {"w", "u", "a", "b"} - set(inputs):
            assert passed[absent] == 0
        assert passed["scale"] == pytest.approx(OPS[name].scale or K**-0.5)


def test_a_known_call_is_short(on_gpu):
    inputs, pool = make("wkv7"), make_pool("wkv7")
    out, slots = torch.empty(B, T, H, V), torch.tensor([5, 2, 0], dtype=torch.int32)

    def run():
        return call("wkv7", pool, inputs, state_indices=slots, out=out)

    assert run() is out
    assert len(entered(run)) <= 12
    on_gpu.take()
    # A pool that begins elsewhere, other strides and another option are other calls.
    moved = torch.zeros(pool.numel() + 1)[1:].view(pool.shape)
    call("wkv7", moved, inputs, state_indices=slots, out=out)
    (launch,) = on_gpu.take()
    assert (launch.named["initial_state"], launch.parameters["VECTOR"]) == (moved.data_ptr(), 1)
    for scale in (2.0, 2.0, 3.0):
        call("wkv7", pool, inputs, state_indices=slots, out=out, scale=scale)
        (launch,) = on_gpu.take()
        assert (launch.named["scale"], launch.parameters["VECTOR"]) == (scale, 4)


def test_what_another_library_holds_is_read_in_every_call(on_gpu):
    inputs, pool = make("wkv7"), make_pool("wkv7")
    slots = torch.tensor([5, 2, 0]).numpy()
    for number in range(3):
        slots[0] = 3 + number
        call("wkv7", pool, inputs, state_indices=slots, rounding="nearest")
        (launch,) = on_gpu.take()
        assert launch.named["state_indices"] == slots.__array_interface__["data"][0]
    with pytest.raises(ValueError, match="rounding"):
        call("wkv7", pool, inputs, state_indices=slots, rounding=slots)


def test_seeds_are_passed_in_every_call(on_gpu):
    inputs, pool, seeds = make("wkv7"), make_pool("wkv7", dtype=torch.bfloat16), []
    on_gpu.while_running = lambda launch: seeds.append(ctypes.c_int64.from_address(launch.named["seed"]).value)
    for seed in (5, 5, 6, torch.tensor([7]), torch.tensor([8])):
        call("wkv7", pool, inputs, rounding="stochastic", seed=seed)
    assert seeds == [5, 5, 6, 7, 8]


def test_gradients_are_refused_before_a_launch(on_gpu):
    inputs, pool = make("wkv7"), make_pool("wkv7")
    call("wkv7", pool, inputs)
    on_gpu.take()
    inputs["v"].requires_grad_()
    with pytest.raises(RuntimeError, match="changes the states in place and has no gradient"):
        call("wkv7", pool, inputs)
    assert not on_gpu.take()


def test_slots_on_a_gpu_are_looked_at_when_asked(on_gpu, monkeypatch):
    inputs, pool = make("wkv7"), make_pool("wkv7")
    slots = torch.tensor([5, 9, 0], dtype=torch.int32)
    call("wkv7", pool, inputs, state_indices=slots)
    assert len(on_gpu.take()) == 1
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    signatures.forget()
    with pytest.raises(ValueError, match=r"state_indices: expected slots below 7, .* got \[9\]"):
        call("wkv7", pool, inputs, state_indices=slots)
    assert not on_gpu.take()


# ---- how it is cut -----------------------------------------------------------------------------------------------


def problem(name, layout, state_type, batch=B, tokens=1, arch="sm_90", multiprocessors=132, **sizes):
    op, sizes = OPS[name], {"H": H, "K": K, "V": V} | sizes
    return Problem(
        op, Gpu(arch, (), multiprocessors), dict.fromkeys(op.names, "bf16"), B=batch, T=tokens, N=batch,
        state_type=state_type, decay=op.decay, state_layout=layout, **sizes,
    )  # fmt: skip


@settings(max_examples=300)
@given(
    st.sampled_from(NAMES), st.sampled_from(["vk", "kv"]), st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 1100), st.integers(1, 1100), st.integers(1, 600) | st.integers(65_000, 200_000), st.integers(1, 70),
    st.integers(1, 3),
    st.sampled_from([2, 4, 8, 16]),
)  # fmt: skip
def test_blocks_hold_all_of_a_head(name, layout, state_type, head_size, value_size, batch, heads, tokens, alignment):
    p = problem(name, layout, state_type, batch, tokens, K=head_size, V=value_size, H=heads)
    size = 4 if state_type == "fp32" else 2
    alignment = max(alignment, size)
    cut = update.geometry(p, update.Pool(batch, heads * head_size * value_size, alignment))
    vector, key_lanes, key_warps, rows, threads = (cut[name] for name in update.SPREAD)
    row = head_size if layout == "vk" else value_size
    assert row % vector == 0
    assert vector * size <= alignment
    assert vector * size == 16 or row % (2 * vector) or 2 * vector * size > alignment
    keys = vector * math.ceil(head_size / (vector * key_lanes)) if layout == "vk" else rows
    assert keys * key_lanes * key_warps >= head_size
    assert 32 % key_lanes == 0
    assert threads % (32 * key_warps) == 0
    assert 32 <= threads <= 1024
    values = (rows if layout == "vk" else vector) * 32 // key_lanes * threads // (32 * key_warps)
    (step,) = update.schedule(p, update.Pool(batch, 1, alignment)).launches
    assert step.grid[0] == heads * math.ceil(value_size / values)
    assert step.grid[1] * step.grid[2] >= batch
    assert cut["BLOCKS_PER_SM"] * threads <= 1024


def test_the_order_of_sums_goes_by_no_batch_where_that_is_asked():
    cuts = {
        is_invariant: {
            str(update.geometry(problem("gla", "kv", "fp32", n, K=128, V=128)._replace(is_batch_invariant=is_invariant),
                               update.Pool(n, 1)))
            for n in (1, 10, 1000)
        }
        for is_invariant in (False, True)
    }  # fmt: skip
    assert [len(cuts[False]), len(cuts[True])] == [2, 1]


def test_the_switch_makes_another_call(on_gpu):
    inputs, pool = make("gla", B=1, T=1, K=128, V=128), make_pool("gla", K=128, V=128)
    taken = []
    try:
        for enabled in (False, True, False):
            switches.set_batch_invariant(enabled)
            call("gla", pool, inputs)
            taken.append(on_gpu.take()[0].parameters["KEY_WARPS"])
    finally:
        switches.set_batch_invariant(False)
    assert taken[0] == taken[2] != taken[1]


def test_there_are_no_updates_without_states():
    with pytest.raises(ValueError, match="updates: timex has no calls over a pool"):
        rwkv_jit.warm("timex", arch="sm_90", updates=True, tokens=64)
