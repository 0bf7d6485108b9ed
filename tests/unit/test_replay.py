"""Replay in plain torch: steps, drafts, commits and flushes in any order are the float64 recurrence."""

import ctypes
import random

import derived_cases
import pytest
import torch
from stub_driver import entered

import rwkv_jit
from rwkv_jit.ahead import warm
from rwkv_jit.call import tensors
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.schedules import replay
from rwkv_jit.schedules.table import OPS

NAMES = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
B, H, K, V, SLOTS, LENGTH, DRAFTS = 4, 2, 12, 20, 7, 3, 4


def tokens(name, count=1, rows=B, dtype=torch.float32):
    return {own: x.to(dtype) for own, x in make(name, count, {}, rows).items()}


def make_pool(name, dtype=torch.float32, slots=SLOTS):
    sizes = {"H": H, "K": K, "V": V}
    op = OPS[name]
    return torch.randn(slots, *(sizes[dim] for dim in op.state_dims(op.state_layout))).to(dtype)


def make_ring(name, length=LENGTH, drafts=DRAFTS, dtype=torch.float32, slots=SLOTS, size=K, value_size=V):
    return rwkv_jit.ReplayRing(slots, name, H, size, value_size, length, drafts, dtype, device="cpu")


def step(name, pool, ring, given, **options):
    return getattr(rwkv_jit, f"{name}_replay")(pool, ring, *given.values(), **options)


def make(name, tokens, fixed, rows=B):
    sizes = {"B": rows, "T": tokens, "H": H, "K": K, "V": V}
    given = {
        own: fixed.get(own, torch.randn([sizes[dim] for dim in dims]) * 0.3).double()
        for own, dims in OPS[name].inputs.items()
    }
    if name == "gla":
        given["w"] = -given["w"].abs()
    return given


def of_row(name, given, row, tokens):
    return [x[row : row + 1, :tokens] if "T" in OPS[name].inputs[own] else x for own, x in given.items()]


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_drafts_and_flushes_are_the_recurrence(name, layout):
    draw, op = random.Random(1), OPS[name]
    sizes = {"H": H, "K": K, "V": V}
    pool = torch.randn(SLOTS, *(sizes[dim] for dim in op.state_dims(layout)), dtype=torch.float64)
    ring = rwkv_jit.ReplayRing(
        SLOTS, name, H, K, V, length=LENGTH, drafts=DRAFTS, dtype=torch.float64, state_dtype=torch.float64, device="cpu"
    )
    fixed = {own: torch.randn(H, K) * 0.3 for own, dims in op.inputs.items() if "T" not in dims}
    reference, scale = getattr(rwkv_jit, f"{name}_ref"), op.scale or K**-0.5
    truth = pool.clone()
    for _ in range(40):
        slots, tokens = torch.randperm(SLOTS)[:B], draw.randint(1, DRAFTS)
        slots[draw.randrange(B)] = -1
        options = {"state_indices": slots, "state_layout": layout}
        kind = draw.choice(["replay", "verify", "flush"])
        if kind == "flush":
            rwkv_jit.replay_flush(pool, ring, **options)
            assert not ring.cursors[slots[slots >= 0]].any()
            torch.testing.assert_close(pool[slots[slots >= 0]], truth[slots[slots >= 0]])
            continue
        given, before = make(name, tokens, fixed), pool.clone()
        y = getattr(rwkv_jit, f"{name}_{kind}")(pool, ring, *given.values(), **options)
        counts = [tokens] * B
        if kind == "verify":
            assert torch.equal(pool, before)
            counts = [draw.randint(0, tokens) for _ in range(B)]
            rwkv_jit.replay_commit(pool, ring, torch.tensor(counts), **options)
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert not y[row].any()
                continue
            state = truth[slot : slot + 1]
            want, _ = reference(*of_row(name, given, row, tokens), state, True, scale=scale, state_layout=layout)
            torch.testing.assert_close(y[row : row + 1], want)
            if counts[row]:
                given_row = of_row(name, given, row, counts[row])
                truth[slot] = reference(*given_row, state, True, scale=scale, state_layout=layout)[1][0]
        assert int(ring.cursors.max()) <= LENGTH
    rwkv_jit.replay_flush(pool, ring, state_layout=layout)
    torch.testing.assert_close(pool, truth)


@pytest.mark.parametrize("name", ["wkv7", "gla"])
def test_rows_without_slots_are_left_alone(name):
    """Nothing is read of them, nor of entries that do not count, and nothing is written."""
    pool, ring = make_pool(name), make_ring(name)
    for x in ring.tensors:
        if x.is_floating_point():
            x.fill_(float("nan"))
    before = [x.clone() for x in (pool, *ring.tensors)]
    slots = torch.tensor([-1, -9, -2, -3])
    y = step(name, pool, ring, tokens(name), state_indices=slots, null_index=-1)
    assert not y.any()
    rwkv_jit.replay_commit(pool, ring, torch.ones(B, dtype=torch.int32), state_indices=slots)
    rwkv_jit.replay_flush(pool, ring, state_indices=slots)
    for x, was in zip((pool, *ring.tensors), before, strict=True):
        assert torch.equal(x.nan_to_num(7), was.nan_to_num(7))


def test_states_are_rounded_at_random_when_they_are_written():
    found = []
    for seed in (3, 3, 4, None):
        torch.manual_seed(1)
        pool, ring = make_pool("wkv7", torch.bfloat16), make_ring("wkv7", length=1)
        options = {} if seed is None else {"rounding": "stochastic", "seed": seed}
        for _ in range(2):
            step("wkv7", pool, ring, tokens("wkv7"), **options)
        found.append(pool[:B])
    first, again, other, nearest = found
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first, nearest, rtol=2**-7, atol=0)


def test_slots_up_to_the_null_index_are_none():
    pool, ring, given = make_pool("wkv7"), make_ring("wkv7"), tokens("wkv7")
    slots = torch.tensor([1, 4, 2, 5])
    y = step("wkv7", pool, ring, given, state_indices=slots, null_index=2)
    assert [bool(row.any()) for row in y] == [False, True, False, True]
    assert ring.cursors.tolist() == [0, 0, 0, 0, 1, 1, 0]


def test_decays_and_sums_are_kept_in_float32():
    ring = make_ring("wkv7", dtype=torch.bfloat16)
    assert [x.dtype for x in (ring.d, ring.u)] == [torch.float32] * 2
    assert [x.dtype for x in (ring.b, ring.k, ring.v)] == [torch.bfloat16] * 3


def test_a_reset_forgets_entries():
    pool, ring = make_pool("wkv7"), make_ring("wkv7")
    ring.cursors[B:] = 3  # of the last slots, which nobody names
    given, slots = tokens("wkv7", 2), torch.arange(B)
    before = pool.clone()
    step("wkv7", pool, ring, given, state_indices=slots)
    assert ring.cursors[:B].tolist() == [2] * B
    for which, kept in (
        (torch.tensor([-1, -100]), [2] * B), (torch.tensor([], dtype=torch.int32), [2] * B), ([], [2] * B),
        (1, [2, 0, 2, 2]), (torch.tensor([[-1, 0], [0, -9]], dtype=torch.int32), [0, 0, 2, 2]), ([0, 3], [0, 0, 2, 0]),
        (torch.tensor(2), [0] * B), (None, [0] * B),
    ):  # fmt: skip
        ring.reset(which)
        assert ring.cursors.tolist() == [*kept, *([0 if which is None else 3] * (SLOTS - B))]
    assert torch.equal(pool, before)


def test_what_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for function in ("wkv7_replay", "wkv7_update"):
        pool, ring = make_pool("wkv7"), make_ring("wkv7")
        with FlopCounterMode(display=False) as counter:
            extra = (ring,) if function == "wkv7_replay" else ()
            getattr(rwkv_jit, function)(pool, *extra, *tokens("wkv7").values())
            if extra:
                rwkv_jit.replay_flush(pool, ring)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_compiled_graph_has_all_calls_in_it():
    given, slots, accepted = tokens("wkv7", 2), torch.tensor([5, 2, 0, 1]), torch.tensor([1, 0, 2, 1])

    def run(pool, ring, *inputs):
        y = rwkv_jit.wkv7_replay(pool, ring, *inputs, state_indices=slots)
        y = y + rwkv_jit.wkv7_verify(pool, ring, *inputs, state_indices=slots)
        rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
        return y

    found = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(2)
        pool, ring = make_pool("wkv7"), make_ring("wkv7")
        found.append((function(pool, ring, *given.values()), pool, *ring.tensors))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


# ---- ops that go through another ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize(("op", "how"), derived_cases.ALL)
def test_ops_through_another_are_the_recurrence(op, how, layout):
    """Keys that heads share, gates, norms, steps, and rates are as in one update."""
    torch.manual_seed(derived_cases.ALL.index((op, how)))
    errors = derived_cases.replay_in_any_order(op, how, layout, torch.float64, torch.float64, random.Random(4))
    assert all(x < 1e-9 for x in errors)


@pytest.mark.parametrize("size", [1e-21, 1e-42, 0.0])
def test_keys_whose_squares_are_zero_are_entries_too(size):
    torch.manual_seed(0)
    case = derived_cases.make("simple_gla", sizes=(1, 1, 1, 1, 4, 4), dtype=torch.float32)
    keys, values = case.inputs["k"] * size, case.inputs["v"] * 1e21
    pool = torch.zeros(1, 1, 4, 4)
    ring = rwkv_jit.ReplayRing(1, "simple_gla", 1, 4, length=4, dtype=torch.float32, device="cpu")
    rwkv_jit.simple_gla_replay(pool, ring, case.inputs["q"], keys, values, case.inputs["g"])
    rwkv_jit.replay_flush(pool, ring)
    torch.testing.assert_close(pool[0, 0], keys[0, 0, 0, :, None] * values[0, 0, 0])  # [K, V]


# ---- what is checked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"op": "wkv8"}, ValueError, "op: expected one of wkv5, wkv6, .*, hgrn2, ssd, got 'wkv8'"),
        ({"slots": 0}, ValueError, "slots: expected at least 1, got 0"),
        ({"heads": 2.0}, TypeError, "heads: expected an int, got 2.0"),
        ({"length": 0}, ValueError, "length: expected at least 1, got 0"),
        ({"length": 13}, ValueError, "length: expected at most 16 with 4 speculative tokens, got 13"),
        ({"drafts": -1}, ValueError, "drafts: expected at least 0, got -1"),
        ({"key_heads": 1}, ValueError, "key_heads: expected 2 of wkv7, got 1"),
        ({"op": "kda", "key_heads": 3}, ValueError, "key_heads: expected a divisor of 2 heads, got 3"),
        ({"drafts": 16}, ValueError, "drafts: expected at most 15, got 16"),
        ({"dtype": torch.int8}, TypeError, "dtype: expected .*torch.float16.* got torch.int8"),
    ],
)
def test_rings_that_cannot_be(changes, error, message):
    given = {"slots": SLOTS, "op": "wkv7", "heads": H, "head_size": K, "drafts": DRAFTS, "device": "cpu"}
    with pytest.raises(error, match=message):
        rwkv_jit.ReplayRing(**{**given, **changes})


def test_usual_length_leaves_room_for_speculative_tokens():
    lengths = [rwkv_jit.ReplayRing(1, "wkv7", 1, 64, drafts=drafts, device="cpu").length for drafts in (0, 12, 14)]
    assert lengths == [4, 4, 2]


@pytest.mark.parametrize(
    ("ring", "error", "message"),
    [
        (4, TypeError, "rings: expected a length and a number of speculative tokens for each, got 4"),
        ((4,), TypeError, r"rings: expected a length and a number of speculative tokens for each, got \(4,\)"),
        ((4, -1), ValueError, "rings: expected at least 0, got -1"),
        ((0, 2), ValueError, "rings: expected at least 1, got 0"),
        ((4, 2.0), TypeError, "rings: expected an int, got 2.0"),
        ((17, 0), ValueError, "rings: expected at most 16, got 17"),
        ((12, 8), ValueError, "rings: expected at most 4, got 8"),
    ],
)
def test_kernels_of_rings_that_cannot_be(ring, error, message):
    with pytest.raises(error, match=message):
        rwkv_jit.warm("wkv7", 64, arch="sm_90", backward=False, updates=True, rings=[(4, 0), ring])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"write_indices": torch.arange(B)}, TypeError, "unexpected keyword argument 'write_indices'"),
        ({"state_indices": torch.tensor([0, 1, 2, SLOTS])}, ValueError, f"state_indices: expected slots below {SLOTS}"),
        ({"state_indices": torch.tensor([0, 1, 1, 2])}, ValueError, "state_indices: .* got \\[1\\] twice"),
        ({"out": torch.empty(1)}, ValueError, "out: expected shape"),
        ({"decay": "none"}, ValueError, "decay: expected"),
        ({"seed": 1}, ValueError, "seed: needs rounding='stochastic'"),
        ({"null_index": 1.5}, TypeError, "null_index: expected an int"),
    ],
)
def test_steps_that_do_not_fit(options, error, message):
    pool, ring = make_pool("wkv7"), make_ring("wkv7")
    before = [x.clone() for x in (pool, *ring.tensors)]
    with pytest.raises(error, match=message):
        step("wkv7", pool, ring, tokens("wkv7"), **options)
    for x, was in zip((pool, *ring.tensors), before, strict=True):
        assert torch.equal(x, was)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "wkv6"}, ValueError, "ring: expected one of wkv7, got one of wkv6"),
        ({"slots": SLOTS + 1}, ValueError, "ring: expected one of states"),
        ({"dtype": torch.bfloat16}, TypeError, "ring: expected entries of torch.float32 like the inputs"),
    ],
)
def test_rings_of_something_else(changes, error, message):
    pool, ring = make_pool("wkv7"), make_ring(**{"name": "wkv7", **changes})
    with pytest.raises(error, match=message):
        step("wkv7", pool, ring, tokens("wkv7"))


def test_what_is_no_ring():
    with pytest.raises(TypeError, match="ring: expected a ReplayRing, got 3"):
        step("wkv7", make_pool("wkv7"), 3, tokens("wkv7"))
    with pytest.raises(TypeError, match="ring: expected a ReplayRing, got None"):
        rwkv_jit.replay_flush(make_pool("wkv7"), None)
    case = derived_cases.make("kda", sizes=(B, 1, H, H, K, V))
    with pytest.raises(TypeError, match="ring: expected a ReplayRing, got None"):
        rwkv_jit.kda_replay(torch.zeros(SLOTS, H, K, V).double(), None, *case.inputs.values())


@pytest.mark.parametrize("drafts", [1, 2])
def test_drafts_need_room(drafts):
    ring = make_ring("wkv7", drafts=drafts)
    message = f"r: expected at most {drafts} tokens, as the ring was created for {drafts} speculative tokens, got 3"
    with pytest.raises(ValueError, match=message):
        rwkv_jit.wkv7_verify(make_pool("wkv7"), ring, *tokens("wkv7", 3).values())


def test_steps_have_eight_tokens_at_most():
    with pytest.raises(ValueError, match="r: expected at most 8 tokens, got 9"):
        step("wkv7", make_pool("wkv7"), make_ring("wkv7"), tokens("wkv7", 9))


def test_drafts_are_rounded_by_nobody():
    with pytest.raises(TypeError, match="unexpected keyword argument 'rounding'"):
        rwkv_jit.wkv7_verify(
            make_pool("wkv7"), make_ring("wkv7"), *tokens("wkv7").values(), rounding="stochastic", seed=1
        )


@pytest.mark.parametrize(
    ("counts", "options", "error", "message"),
    [
        (None, {}, TypeError, "accept_lens: expected a torch.Tensor or .*, got NoneType"),
        (torch.tensor([1, 5]), {}, ValueError, "accept_lens: expected 0 to 4, the ring's speculative tokens, got .5."),
        (torch.tensor([-1]), {}, ValueError, "accept_lens: expected 0 to 4, the ring's speculative tokens, got .-1."),
        (torch.tensor([[1]]), {}, ValueError, "accept_lens: expected shape .rows., a number for each row"),
        (torch.tensor([1.0]), {}, TypeError, "accept_lens: expected torch.int32 or torch.int64, got torch.float32"),
        (torch.ones(SLOTS + 1, dtype=torch.int32), {}, ValueError, "state: expected a slot for each of the 8 rows"),
        (torch.tensor([1]), {"state_indices": torch.tensor([1, 2])}, ValueError, "state_indices: expected shape .1."),
        (torch.tensor([1]), {"scale": 1.0}, TypeError, "unexpected keyword argument 'scale'"),
    ],
)
def test_commits_that_do_not_fit(counts, options, error, message):
    pool, ring = make_pool("wkv7"), make_ring("wkv7")
    rwkv_jit.wkv7_verify(pool, ring, *tokens("wkv7", 4).values())
    before = [x.clone() for x in (pool, *ring.tensors)]
    with pytest.raises(error, match=message):
        rwkv_jit.replay_commit(pool, ring, counts, **options)
    for x, was in zip((pool, *ring.tensors), before, strict=True):
        assert torch.equal(x, was)


def test_slots_of_a_reset_are_looked_at():
    ring = make_ring("wkv7")
    ring.cursors += 2
    for slots, error in (
        ([0, SLOTS], ValueError), (-1, ValueError), ([1.0], TypeError), (torch.tensor([0, SLOTS]), ValueError),
        (torch.tensor([-1, 2**40]), ValueError), (torch.tensor([1.0]), TypeError), (torch.tensor([True]), TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match="slots: expected"):
            ring.reset(slots)
        assert ring.cursors.tolist() == [2] * SLOTS


def test_linear_attention_has_no_decay():
    for option in ({"decay": "raw"}, {"w0": torch.zeros(H, K)}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            step("linear_attention", make_pool("linear_attention"), make_ring("linear_attention"),
                 tokens("linear_attention"), **option)  # fmt: skip


def test_a_ring_elsewhere_is_refused():
    ring = rwkv_jit.ReplayRing(SLOTS, "wkv7", H, K, V, LENGTH, DRAFTS, torch.float32, device="meta")
    with pytest.raises(ValueError, match="ring: expected device cpu, got meta"):
        step("wkv7", make_pool("wkv7"), ring, tokens("wkv7"))


def test_slots_of_a_flush_are_looked_at():
    with pytest.raises(ValueError, match=f"state_indices: expected slots below {SLOTS}"):
        rwkv_jit.replay_flush(make_pool("wkv7"), make_ring("wkv7"), state_indices=torch.tensor([0, SLOTS]))


def test_gradients_of_a_pool_are_refused():
    with pytest.raises(RuntimeError, match="replay_flush: changes the states in place and has no gradient"):
        rwkv_jit.replay_flush(make_pool("wkv7").requires_grad_(), make_ring("wkv7"))


def test_gradients_are_refused():
    given = tokens("wkv7")
    given["k"].requires_grad_()
    with pytest.raises(RuntimeError, match="wkv7_replay: changes the states in place and has no gradient; use wkv7"):
        step("wkv7", make_pool("wkv7"), make_ring("wkv7"), given)


# ---- what is launched --------------------------------------------------------------------------------------------


def test_each_call_is_one_launch(on_gpu):
    pool, ring, given = make_pool("wkv7"), make_ring("wkv7"), tokens("wkv7", 4)
    slots, accepted = torch.tensor([5, 2, 0, 1], dtype=torch.int32), torch.ones(B, dtype=torch.int64)
    rwkv_jit.wkv7_verify(pool, ring, *given.values(), state_indices=slots)
    rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    rwkv_jit.replay_flush(pool, ring)
    verify, commit, flush = on_gpu.take()
    assert {launch.template for launch in (verify, commit, flush)} == {"replay_states"}
    fields = ("cursors", "arrivals", "entry_d", "entry_b", "entry_k", "entry_v", "entry_u")
    for launch in (verify, commit, flush):
        assert [launch.named[name] for name in fields] == [x.data_ptr() for x in ring.fields]
        assert (launch.named["state"], launch.named["slots"]) == (pool.data_ptr(), SLOTS)
    assert [verify.parameters[x] for x in ("TOKENS", "DRAFT", "LENGTH", "ENTRIES")] == [4, True, LENGTH, 7]
    assert [verify.named[name] for name in given] == [x.data_ptr() for x in given.values()]
    assert (verify.named["state_indices"], verify.named["batch"]) == (slots.data_ptr(), B)
    assert [commit.parameters[x] for x in ("TOKENS", "DRAFT", "ACCEPT_BYTES")] == [0, False, 8]
    assert (commit.named["accept_lens"], commit.named["kept"]) == (accepted.data_ptr(), LENGTH)
    assert (flush.named["accept_lens"], flush.named["kept"], flush.named["batch"]) == (0, 0, SLOTS)


def test_a_known_call_is_short(on_gpu):
    pool, ring, given, out = make_pool("wkv7"), make_ring("wkv7"), tokens("wkv7"), torch.empty(B, 1, H, V)
    slots, accepted = torch.tensor([5, 2, 0, 1], dtype=torch.int32), torch.ones(B, dtype=torch.int32)

    def run():
        return step("wkv7", pool, ring, given, state_indices=slots, out=out)

    assert run() is out
    assert len(entered(run)) <= 13
    rwkv_jit.replay_commit(pool, ring, accepted)
    assert len(entered(lambda: rwkv_jit.replay_commit(pool, ring, accepted))) <= 12
    on_gpu.take()
    # A ring elsewhere is as good; another length is another call.
    for length in (LENGTH, LENGTH, 2):
        other = make_ring("wkv7", length=length)
        step("wkv7", pool, other, given, state_indices=slots, out=out)
        (launch,) = on_gpu.take()
        assert (launch.named["entry_k"], launch.parameters["LENGTH"]) == (other.k.data_ptr(), length)


@pytest.mark.parametrize("is_known", [True, False])
def test_calls_of_the_same_tensors_are_told_apart(on_gpu, is_known, monkeypatch):
    if not is_known:  # what calls find instead are plans
        monkeypatch.setattr(tensors, "likeness", lambda arrays: lambda *_: False)
    pool, given = make_pool("wkv7"), tokens("wkv7", 2)
    for length, drafts in ((2, 4), (4, 2)):  # as much memory
        ring = make_ring("wkv7", length=length, drafts=drafts)
        for kind in ("replay", "verify", "replay"):
            getattr(rwkv_jit, f"wkv7_{kind}")(pool, ring, *given.values())
            (launch,) = on_gpu.take()
            assert [launch.parameters[x] for x in ("LENGTH", "DRAFT")] == [length, kind == "verify"]


def test_what_has_gaps_is_copied(on_gpu):
    pool, ring = make_pool("wkv7"), make_ring("wkv7")
    apart = torch.tensor([5, 9, 2, 9, 0, 9, 1, 9], dtype=torch.int32)[::2]
    seen = []
    on_gpu.while_running = lambda launch: seen.append(
        [(ctypes.c_int32 * B).from_address(launch.named[name])[:] for name in ("state_indices", "accept_lens")]
    )
    rwkv_jit.replay_commit(pool, ring, apart, state_indices=apart)
    rwkv_jit.replay_commit(pool, ring, apart, state_indices=apart)
    assert seen == [[[5, 2, 0, 1]] * 2] * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_every_kernel_is_made_ahead(name, state, on_gpu, monkeypatch):
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: requests)
    given = {"state_dtype": state, "value_sizes": V, "rings": [(LENGTH, DRAFTS)]}
    made = rwkv_jit.warm(name, K, torch.bfloat16, backward=False, arch="sm_80", updates=True, **given)
    keys = {kernel.memory_key(request) for request in made}
    for batch in (B, 5000):
        pool = make_pool(name, state, slots=batch)
        ring = make_ring(name, dtype=torch.bfloat16, slots=batch)
        accepted = torch.ones(batch, dtype=torch.int32)
        w0 = {} if name == "linear_attention" else {"w0": torch.zeros(H, K)}
        for more in ({}, w0):
            for count, kind in ((1, "replay"), (1, "verify"), (DRAFTS, "verify")):
                inputs = tokens(name, count, batch, torch.bfloat16)
                getattr(rwkv_jit, f"{name}_{kind}")(pool, ring, *inputs.values(), **more)
            rwkv_jit.replay_commit(pool, ring, accepted)
            rwkv_jit.replay_flush(pool, ring)
    launches = on_gpu.take()
    assert len(launches) == 20
    for launch in launches:
        assert kernel.memory_key(launch.request) in keys, launch.parameters


@pytest.mark.parametrize(("op", "how"), [(op, several[-1]) for op, several in derived_cases.WAYS.items()])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_every_kernel_of_ops_through_another_is_made_ahead(op, how, state, on_gpu, monkeypatch):
    """Each call is one launch, of kernels that `warm` names."""
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: requests)
    case = derived_cases.make(op, how, (B, 1, 1, 2, K, V), torch.bfloat16, torch.float32, state)
    switches = {name: x for name, x in case.options.items() if name not in ("state_layout", "dt_limit")}
    if "dt_limit" in case.options:
        switches |= {"least_step": derived_cases.LIMIT[0], "most_step": derived_cases.LIMIT[1]}
    made = rwkv_jit.warm(
        op, K, torch.bfloat16, backward=False, arch="sm_80", updates=True, state_dtype=state, value_sizes=V,
        rings=[(LENGTH, DRAFTS)], w_dtype=torch.float32, inputs=[*case.parameters], **switches,
    )  # fmt: skip
    keys = {kernel.memory_key(request) for request in made}
    for batch in (B, 5000):
        key_heads = 2 if op == "hgrn2" else 1
        case = derived_cases.make(op, how, (batch, 1, 1, 2, K, V), torch.bfloat16, torch.float32, state)
        ring = rwkv_jit.ReplayRing(batch, op, 2, K, V, LENGTH, DRAFTS, torch.bfloat16, state, "cpu", key_heads)
        for count, kind in ((1, "replay"), (1, "verify"), (DRAFTS, "verify")):
            given = derived_cases.make(op, how, (batch, count, 1, 2, K, V), torch.bfloat16, torch.float32, state)
            derived_cases.pooled(given, kind, case.state, ring=ring)
        rwkv_jit.replay_commit(case.state, ring, torch.ones(batch, dtype=torch.int32))
        rwkv_jit.replay_flush(case.state, ring)
    launches = on_gpu.take()
    assert [launch.template for launch in launches] == [*["replay_rules"] * 3, *["replay_states"] * 2] * 2
    for launch in launches:
        assert kernel.memory_key(launch.request) in keys, launch.parameters
        if launch.template == "replay_rules":
            fields = ("cursors", "arrivals", "entry_d", "entry_k", "entry_v")
            found = {name: launch.named[name] for name in fields}
            assert launch.named["group"] == (1 if op == "hgrn2" else 2)
    of_ring = [0 if x is None else x.data_ptr() for x in (ring.cursors, ring.arrivals, ring.d, ring.k, ring.v)]
    assert [*found.values()] == of_ring


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "log"}, "unexpected keyword argument 'decay'"),
        ({"w0": torch.zeros(2, K)}, "unexpected keyword argument 'w0'"),
        ({"write_indices": torch.arange(B)}, "unexpected keyword argument 'write_indices'"),
    ],
)
def test_options_that_ops_through_another_have_not(options, message):
    case = derived_cases.make("kda", "", (B, 1, 2, 2, K, V), torch.float32)
    ring = rwkv_jit.ReplayRing(B, "kda", 2, K, V, LENGTH, DRAFTS, torch.float32, device="cpu")
    with pytest.raises(TypeError, match=message):
        derived_cases.pooled(case, "replay", case.state, ring=ring, **options)
    with pytest.raises(ValueError, match="dt_bias: needs A_log too"):
        rwkv_jit.kda_verify(case.state, ring, *case.inputs.values(), dt_bias=torch.zeros(2, K))
    assert not ring.cursors.any()


def test_keys_are_of_as_many_heads_as_the_ring_has():
    case = derived_cases.make("kda", "", (B, 1, 1, 2, K, V), torch.float32)
    ring = rwkv_jit.ReplayRing(B, "kda", 2, K, V, LENGTH, DRAFTS, torch.float32, device="cpu")
    with pytest.raises(ValueError, match="ring: expected one of 1 key heads, got one of 2"):
        derived_cases.pooled(case, "replay", case.state, ring=ring)
    assert not ring.cursors.any()


@pytest.mark.parametrize(("op", "how"), [("kda", "raw bias sigmoid norm"), ("ssd", "D z bias softplus")])
def test_a_compiled_graph_of_ops_through_another_has_all_calls_in_it(op, how):
    def run(case, pool, ring):
        y = derived_cases.pooled(case, "replay", pool, ring=ring)
        y = y + derived_cases.pooled(case, "verify", pool, ring=ring)
        rwkv_jit.replay_commit(pool, ring, torch.tensor([1, 0, 2, 1]))
        return y

    found = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(2)
        case = derived_cases.make(op, how, (B, 2, 1, 2, K, V), torch.float32)
        ring = rwkv_jit.ReplayRing(B, op, 2, K, V, LENGTH, DRAFTS, torch.float32, device="cpu", key_heads=1)
        found.append((function(case, case.state, ring), case.state, *ring.tensors))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_first_use_in_a_capture_says_so(on_gpu):
    on_gpu.capturing = True
    with pytest.raises(RwkvJitError, match="first use inside a CUDA graph capture"):
        rwkv_jit.replay_flush(make_pool("wkv7"), make_ring("wkv7"))


@pytest.mark.parametrize(
    ("name", "state", "rows", "pays"),
    [
        ("wkv7", torch.float32, 16, True),
        ("wkv7", torch.float32, 15, False),
        ("gla", torch.bfloat16, 32, True),
        ("gla", torch.bfloat16, 31, False),
        ("wkv7", torch.bfloat16, 512, False),
        ("kda", torch.bfloat16, 512, True),
    ],
)
def test_where_replay_pays(name, state, rows, pays):
    ring = rwkv_jit.ReplayRing(1, name, 64, 64, state_dtype=state, device="cpu")
    assert ring.pays(rows) == pays


@pytest.mark.parametrize(
    ("state_bytes", "entry", "length"),
    [(16384, 896, 4), (8192, 896, 3), (65536, 1792, 6), (64, 4096, 1), (65536, 1280, 7), (32768, 268, 12)],
)
def test_the_length_takes_the_least_time(state_bytes, entry, length):
    assert replay.best_length(state_bytes, entry) == length


def test_entries_that_no_block_can_hold_are_refused(on_gpu):
    ring = make_ring("wkv7", size=1024, value_size=1024, length=15, drafts=1)
    pool = torch.zeros(SLOTS, H, 1024, 1024)
    given = [torch.zeros(1, H, 1024) for _ in range(6)]
    with pytest.raises(UnsupportedConfigError, match="length: 16 entries of head sizes 1024, 1024 and 1 tokens need"):
        rwkv_jit.wkv7_replay(pool, ring, *given)
