"""Sequences of any lengths over pools of states without a GPU: values in plain torch, checks, what is launched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit
from rwkv_jit.call import tensors
from rwkv_jit.kernels import signatures
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.schedules import varlen
from rwkv_jit.schedules.table import OPS

H, K, V, SLOTS = 2, 8, 12, 9
NAMES = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
RECURRENCE = pytest.mark.parametrize("name", NAMES)


def make(name, tokens, dtype=torch.float64, size=K, value_size=V, heads=H, fill=torch.randn):
    sizes = {"B": 1, "T": tokens, "H": heads, "K": size, "V": value_size}
    inputs = {own: (fill([sizes[dim] for dim in dims]) * 0.3).to(dtype) for own, dims in OPS[name].inputs.items()}
    if name == "gla":
        inputs["w"] = -inputs["w"].abs()
    return inputs


def make_pool(name, slots=SLOTS, dtype=torch.float64, size=K, value_size=V, heads=H):
    sizes = {"H": heads, "K": size, "V": value_size}
    return torch.randn(slots, *(sizes[dim] for dim in OPS[name].state)).to(dtype)


def call(name, pool, inputs, **options):
    return getattr(rwkv_jit, f"{name}_varlen")(pool, *inputs.values(), **options)


def bounds_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def reference(name, inputs, begin, end, state):
    """y and the state behind these tokens of a sequence, and their y."""
    some = [
        x[:, begin:end] if "T" in dims else x
        for x, dims in zip(inputs.values(), OPS[name].inputs.values(), strict=True)
    ]
    y, final = getattr(rwkv_jit, f"{name}_ref")(*some, state[None], True)
    return y[0], final[0]


# ---- values ------------------------------------------------------------------------------------------------------


@RECURRENCE
@settings(max_examples=20)
@given(data=st.data())
def test_every_sequence_is_as_alone(name, data):
    count = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    tail, null_index = data.draw(st.integers(0, 2)), data.draw(st.integers(-1, 1))
    read = data.draw(st.lists(st.integers(-3, SLOTS - 1), min_size=count, max_size=count, unique=True))
    writes = data.draw(st.booleans())
    free = [slot for slot in range(SLOTS) if slot not in read]
    written = [data.draw(st.sampled_from([null_index, free[i]])) for i in range(count)] if writes else read
    is_begun = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    active = data.draw(st.integers(0, count))
    inputs, pool = make(name, sum(lengths) + tail), make_pool(name)
    bounds, before = bounds_of(lengths), pool.clone()
    options = {"write_indices": torch.tensor(written)} if writes else {}
    y = call(
        name, pool, inputs, cu_seqlens=bounds, state_indices=torch.tensor(read), null_index=null_index,
        has_initial_state=torch.tensor(is_begun), num_active=torch.tensor([active], dtype=torch.int32), **options,
    )  # fmt: skip
    want, states = torch.zeros_like(y), before.clone()
    for i in range(active):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end or read[i] <= null_index or read[i] < 0:
            continue
        state = before[read[i]] if is_begun[i] else torch.zeros_like(before[0])
        want[0, begin:end], final = reference(name, inputs, begin, end, state)
        if written[i] > null_index and written[i] >= 0:
            states[written[i]] = final
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(pool, states)


@RECURRENCE
def test_states_at_checkpoints_that_ascend(name):
    inputs, pool = make(name, 30), make_pool(name)
    before = pool.clone()
    offsets, places = torch.tensor([[5, 3, 10], [20, 7, 0]]), torch.tensor([[2, 3, 4], [5, 6, 7]])
    call(name, pool, inputs, cu_seqlens=bounds_of([10, 20]), checkpoint_offsets=offsets, checkpoint_indices=places)
    kept = {(0, 5): 2, (0, 10): 4, (10, 30): 5}
    for (begin, end), place in kept.items():
        torch.testing.assert_close(pool[place], reference(name, inputs, begin, end, before[begin // 10])[1])
    assert torch.equal(pool[[3, 6, 7, 8]], before[[3, 6, 7, 8]])


@RECURRENCE
def test_tokens_without_a_batch_and_what_is_added_to_w(name):
    inputs, pool = make(name, 7), make_pool(name)
    flat = {own: x[0] if x.dim() == 4 else x for own, x in inputs.items()}
    w0 = torch.randn(H, K, dtype=torch.float32)
    options = {} if name == "linear_attention" else {"w0": w0.flatten()}
    other = pool.clone()
    y = call(name, pool, flat, cu_seqlens=bounds_of([3, 4]), **options)
    if options:
        inputs["w"] = inputs["w"] + w0
    assert y.shape == (7, H, V)
    torch.testing.assert_close(y, call(name, other, inputs, cu_seqlens=bounds_of([3, 4]))[0])
    torch.testing.assert_close(pool, other)


def test_few_tokens_alone_round_at_random():
    inputs, pool = make("wkv7", 30, torch.float32), make_pool("wkv7", dtype=torch.bfloat16)
    other, few = pool.clone(), varlen.FEW_TOKENS
    bounds = bounds_of([few, 30 - few])
    call("wkv7", pool, inputs, cu_seqlens=bounds)
    call("wkv7", other, inputs, cu_seqlens=bounds, rounding="stochastic", seed=5)
    assert not torch.equal(pool[0], other[0])
    assert torch.equal(pool[1], other[1])


# ---- what is checked ---------------------------------------------------------------------------------------------

INT = torch.int32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cu_seqlens": None}, TypeError, "cu_seqlens: expected where each sequence begins and ends, got None"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens: expected shape \[sequences \+ 1\], got \[1\]"),
        ({"cu_seqlens": torch.tensor([0.0, 7])}, TypeError, "cu_seqlens: expected torch.int32 or torch.int64, got"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 7])}, ValueError, "cu_seqlens: expected to begin at 0, never fall and"),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, ValueError, r"end at 7 at most, got \[0, 4, 8\]"),
        ({"state_indices": torch.tensor([1])}, ValueError, r"state_indices: expected shape \[2\]"),
        ({"state_indices": torch.tensor([1, SLOTS])}, ValueError, f"state_indices: expected slots below {SLOTS}"),
        ({"state_indices": torch.tensor([1, 1])}, ValueError, r"state_indices: .* that is written, got \[1\]"),
        ({"state_indices": torch.tensor([1, 2]), "write_indices": torch.tensor([3, 4], dtype=INT)}, TypeError,
         "write_indices: expected torch.int64 like state_indices, got torch.int32"),
        ({"has_initial_state": torch.ones(2)}, TypeError, "has_initial_state: expected torch.bool or torch.uint8, got"),
        ({"has_initial_state": torch.ones(3, dtype=torch.bool)}, ValueError,
         r"has_initial_state: expected shape \[2\]"),
        ({"num_active": torch.tensor([1])}, TypeError, "num_active: expected torch.int32, got torch.int64"),
        ({"num_active": torch.tensor([3], dtype=INT)}, ValueError, "num_active: expected 0 to 2, got 3"),
        ({"max_seqlen": 0}, ValueError, "max_seqlen: expected at least 1, got 0"),
        ({"max_seqlen": 2.0}, TypeError, "max_seqlen: expected an int, got 2.0"),
        ({"checkpoint_offsets": torch.ones(2, 1, dtype=torch.int64)}, ValueError,
         "checkpoint_offsets: expected together with checkpoint_indices, got one of the two"),
        ({"checkpoint_offsets": torch.ones(3, 1, dtype=torch.int64), "checkpoint_indices": torch.ones(3, 1)},
         ValueError,
         r"checkpoint_offsets: expected shape \[2, checkpoints\], got \[3, 1\]"),
        ({"checkpoint_offsets": torch.ones(2, 1, dtype=torch.int64),
          "checkpoint_indices": torch.tensor([[2], [2]])}, ValueError, r"checkpoint_indices: .* got \[2\] twice"),
        ({"checkpoint_offsets": torch.ones(2, 1, dtype=INT), "checkpoint_indices": torch.tensor([[2], [3]])}, TypeError,
         "checkpoint_offsets: expected torch.int64, got torch.int32"),
        ({"state_indices": torch.tensor([2, 5]), "checkpoint_offsets": torch.ones(2, 2, dtype=torch.int64),
          "checkpoint_indices": torch.tensor([[3, -1], [4, 2]]), "write_indices": torch.tensor([6, 1])}, ValueError,
         "state_indices: expected slots that no other row writes, got 2 of rows 0 and 1"),
        ({"decay_bound": 1.0}, ValueError, "decay_bound: expected a negative number"),
        ({"decay": "some"}, ValueError, "decay: expected one of raw"),
        ({"rounding": "stochastic"}, ValueError, "seed: rounding='stochastic' needs"),
        ({"out": torch.empty(1, 7, H, K, dtype=torch.float64)}, ValueError, "out: expected shape"),
        ({"token": 1}, TypeError, r"wkv7_varlen\(\) got an unexpected keyword argument 'token'; .* cu_seqlens, "),
    ],
)  # fmt: skip
def test_what_does_not_fit(options, error, message):
    pool = make_pool("wkv7")
    before = pool.clone()
    with pytest.raises(error, match=message):
        call("wkv7", pool, make("wkv7", 7), **{"cu_seqlens": bounds_of([3, 4]), **options})
    assert torch.equal(pool, before)


def test_slots_that_are_read_twice_or_that_nobody_reads_may_be_written():
    slots, bounds = torch.tensor([2, 2, 5, -1]), bounds_of([2, 2, 2, 1])
    begun = torch.tensor([True, True, False, True])
    options = {"state_indices": slots, "has_initial_state": begun, "cu_seqlens": bounds}
    pool, inputs = make_pool("wkv7"), make("wkv7", 7)
    want = pool.clone()
    call("wkv7", pool, inputs, **options, write_indices=torch.tensor([5, 3, 4, 2]))
    call("wkv7", want, inputs, **options | {"state_indices": torch.tensor([2, -1, 5, -1])})
    assert torch.equal(pool[5], want[2])


def test_other_pools_and_batches_are_refused():
    with pytest.raises(ValueError, match="state: expected a slot for each of the 2 sequences, or state_indices; got 1"):
        call("wkv7", make_pool("wkv7", 1), make("wkv7", 7), cu_seqlens=bounds_of([3, 4]))
    inputs = {own: x.expand(2, *x.shape[1:]) for own, x in make("wkv7", 7).items()}
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1 with packed sequences, got a batch of 2"):
        call("wkv7", make_pool("wkv7"), inputs, cu_seqlens=bounds_of([3, 4]))


@RECURRENCE
def test_gradients_are_refused(name):
    inputs, pool = make(name, 7), make_pool(name)
    inputs["v"].requires_grad_()
    message = f"{name}_varlen: changes the states in place and has no gradient; use {name}, or torch.no_grad"
    with pytest.raises(RuntimeError, match=message):
        call(name, pool, inputs, cu_seqlens=bounds_of([3, 4]))
    with torch.no_grad():
        call(name, pool, inputs, cu_seqlens=bounds_of([3, 4]))


def test_a_compiled_graph_has_the_call_in_it():
    inputs, pool = make("wkv7", 7, torch.float32), make_pool("wkv7", dtype=torch.float32)
    other, bounds = pool.clone(), bounds_of([3, 4])

    def step(pool, *arrays):
        return rwkv_jit.wkv7_varlen(pool, *arrays, cu_seqlens=bounds) + 1

    y = torch.compile(step, fullgraph=True, backend="aot_eager")(pool, *inputs.values())
    torch.testing.assert_close(y, step(other, *inputs.values()))
    torch.testing.assert_close(pool, other)


# ---- what is launched --------------------------------------------------------------------------------------------

BIG = {"size": 64, "value_size": 64}


def on(gpu, name="wkv7", lengths=(1, 1, 40), heads=H, dtype=torch.bfloat16, size=64, **options):
    sizes = {"heads": heads, "size": size, "value_size": size}
    inputs = make(name, sum(lengths), dtype, fill=torch.zeros, **sizes)  # nothing is computed of them
    pool = make_pool(name, dtype=torch.float32, **sizes)
    if name != "linear_attention":
        options.setdefault("decay", "sigmoid")
    call(name, pool, inputs, cu_seqlens=bounds_of(lengths), **options)
    return pool, inputs, gpu.take()


def test_each_length_has_a_launch_and_chunks_go_beside(on_gpu):
    pool, inputs, (arrange, chunks, few) = on(on_gpu)
    assert [x.template for x in (arrange, chunks, few)] == [
        "arrange_sequences",
        "wkv7_chunked_forward",
        "update_states",
    ]
    assert chunks.stream != few.stream == arrange.stream
    assert (chunks.parameters["POOLED"], few.parameters["PACKED"]) == (True, True)
    assert (chunks.grid, few.grid[1]) == ((H, 3, 1), 3)
    assert chunks.named["pieces"] == few.named["pieces"] == arrange.named["pieces"]
    assert chunks.named["cu_seqlens"] == few.named["bounds"] == arrange.named["bounds"]
    assert arrange.named["pieces"] - arrange.named["bounds"] == 8 * 4  # a bound more than there are pieces
    states = {launch.named[x] for launch in (chunks, few) for x in ("initial_state", "final_state")}
    assert states == {pool.data_ptr()}
    assert chunks.named["slot_stride"] == few.named["slot_stride"] == pool.stride(0)
    assert arrange.named["few_tokens"] == varlen.FEW_TOKENS
    assert [few.named[x] for x in inputs] == [x.data_ptr() for x in inputs.values()]


@pytest.mark.parametrize(("lengths", "most"), [((1, 2, 5), None), ((1, 2, 5), 100), ((1, 2, 40), 8), ((1, 2, 40), 1)])
def test_few_tokens_need_no_chunks(on_gpu, lengths, most):
    *_, (arrange, few) = on(on_gpu, lengths=lengths, max_seqlen=most)
    assert few.template == "update_states"
    assert arrange.named["few_tokens"] > 10**9  # more than was said are right, too


def test_checkpoints_come_in_waves(on_gpu):
    places = torch.tensor([[3, 4], [5, 6], [7, 8]])
    *_, (arrange, *waves, few) = on(on_gpu, checkpoint_offsets=places, checkpoint_indices=places)
    assert [x.named["wave"] for x in waves] == [0, 1, 2]
    assert {x.template for x in waves} == {"wkv7_chunked_forward"}
    assert {x.stream for x in (arrange, *waves, few)} == {few.stream}
    assert (arrange.named["checkpoints"], few.grid[1], waves[0].grid) == (2, 9, (H, 3, 1))


@pytest.mark.parametrize("name", ["wkv7", "gla"])
def test_few_heads_and_long_prompts_go_in_segments(on_gpu, name):
    *_, launches = on(on_gpu, name, (1, 9000), heads=1, max_seqlen=9000)
    templates = [x.template for x in launches]
    assert templates[:3] == ["arrange_sequences", "cut_sequences", "copy_states"]
    assert templates[-2:] == ["copy_states", "update_states"]
    assert launches[0].named["few_tokens"] == 0
    copies = [x.parameters for x in launches if x.template == "copy_states"]
    assert [(x["FROM_POOL"], x["TO_POOL"]) for x in copies] == [(True, False), (False, True)]
    assert "cut_sequences" not in [x.template for x in on(on_gpu, name, (1, 9000), heads=1)[2]]


OF_DECAYS = {  # by the sizes and lengths with which calls take them
    "wkv7_chunked_forward": ("wkv7", {"lengths": (1, 2, 40)}),
    "wkv7_prepare": ("wkv7", {"lengths": (1, 2, 400), "size": 256}),
    "wkv7_segment": ("wkv7", {"lengths": (1, 9000), "heads": 1, "max_seqlen": 9000}),
    "wkv7_recurrent_forward": ("wkv7", {"lengths": (1, 40), "size": 1100}),
    "gla_scan": ("wkv5", {"lengths": (1, 2, 40)}),
    "gla_prepare": ("wkv6", {"lengths": (1, 2, 400), "size": 256}),
    "gla_segment": ("gla", {"lengths": (1, 9000), "heads": 1, "max_seqlen": 9000}),
    "gla_recurrent_forward": ("gla", {"lengths": (1, 40), "size": 1100}),
}


@pytest.mark.parametrize("w0_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("template", OF_DECAYS)
def test_all_kernels_that_map_decays_add_to_w(on_gpu, template, w0_dtype):
    on_gpu.use("sm_90")
    name, options = OF_DECAYS[template]
    w0 = torch.randn(options.get("heads", H), options.get("size", 64)).to(w0_dtype)
    for _ in range(2):  # a call that is known, too
        _, inputs, launches = on(on_gpu, name, w0=w0, **options)
        of_w = [x for x in launches if "w" in x.named]
        *others, few = of_w
        assert few.template == "update_states"
        assert template in {x.template for x in others}
        for launch in of_w:
            assert launch.named["w"] == inputs["w"].data_ptr()
            types = launch.parameters["T_W"], launch.parameters["T_W0"]
            assert types == ("bf16", tensors.STORAGE[w0_dtype])
        assert few.named["w0"] == w0.data_ptr()
        assert {x.named["w_strides"][3] for x in others} == {w0.data_ptr()}
        assert {x.named["w_strides"][:3] for x in others} == {few.named["w_strides"]}
    *_, launches = on(on_gpu, name, **options)
    assert {x.parameters["T_W0"] for x in launches if "w" in x.named and x.template != "update_states"} == {"void"}


def test_a_known_call_is_checked_no_more(on_gpu, monkeypatch):
    inputs, pool = make("wkv7", 42, torch.bfloat16, **BIG), make_pool("wkv7", dtype=torch.float32, **BIG)
    options = {"cu_seqlens": bounds_of([1, 1, 40]), "state_indices": torch.tensor([3, 1, 2]), "decay": "sigmoid"}
    call("wkv7", pool, inputs, **options)
    first = on_gpu.take()
    monkeypatch.setattr("rwkv_jit.pool.varlen._check", None)
    monkeypatch.setattr("rwkv_jit.pool.calls._checked_call", None)
    other = torch.tensor([0, 1, 2])
    call("wkv7", pool, inputs, **{**options, "state_indices": other})
    again = on_gpu.take()
    assert [x.template for x in again] == [x.template for x in first]
    assert again[0].named["state_indices"] == other.data_ptr()


def test_more_sequences_than_a_grid_has_places_go_token_by_token(on_gpu):
    inputs = make("wkv7", 9, torch.bfloat16, **BIG)
    count = 70_000
    pool = torch.zeros(1, H, 64, 64).expand(count, H, 64, 64)[:1]
    bounds, slots = torch.zeros(count + 1, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    call("wkv7", pool, inputs, cu_seqlens=bounds, state_indices=slots, decay="sigmoid")
    assert [x.template for x in on_gpu.take()] == ["arrange_sequences", "wkv7_recurrent_forward", "update_states"]


def test_wrong_values_on_a_gpu_are_found_when_asked(on_gpu, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    inputs, pool = make("wkv7", 4, torch.bfloat16, **BIG), make_pool("wkv7", dtype=torch.float32, **BIG)
    with pytest.raises(ValueError, match="cu_seqlens: expected to begin at 0"):
        call("wkv7", pool, inputs, cu_seqlens=torch.tensor([1, 4]))
    assert not on_gpu.take()


def test_first_use_in_a_capture_says_so(on_gpu):
    on_gpu.capturing = True
    with pytest.raises(RwkvJitError, match="first use inside a CUDA graph capture"):
        on(on_gpu)
    assert tensors.capturing()


def test_a_known_call_copies_what_begins_at_an_odd_address(on_gpu):
    """And reads the copies of inputs without B by the strides that they have with it."""
    on_gpu.use("sm_90")
    given = [torch.randn(40, 4, 64, dtype=torch.bfloat16) for _ in range(6)]
    pool, bounds = torch.zeros(5, 4, 64, 64), torch.tensor([0, 10, 40])
    memory = [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in given]
    found = []
    for several in ((memory,), (given, memory)):
        signatures.forget()
        for inputs in several:
            on_gpu.take()
            rwkv_jit.wkv7_varlen(pool, *inputs, cu_seqlens=bounds)
        found.append([(x.template, x.grid, x.numbers) for x in on_gpu.take()])
    assert found[0] == found[1]
