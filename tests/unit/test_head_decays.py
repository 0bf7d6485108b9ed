"""Ops with one decay for a head in kernels of their own: who takes what, of calls and of schedules."""

import derived_cases
import pytest
import torch
from derived_cases import differentiate
from problems import Core, head_decays

import rwkv_jit
from rwkv_jit.call import plan, prepared
from rwkv_jit.schedules import head_decay as steps
from rwkv_jit.schedules.schedule import Zero, offsets

TRAINED = [
    *(Core(True, has_decay, has_norm=has_norm) for has_decay in (True, False) for has_norm in (True, False)),
    Core(False, has_rate=False), Core(False, has_step=True),
    Core(True, has_gate=True, has_bias=True, rate_map="sigmoid"),
]  # fmt: skip
CORES = pytest.mark.parametrize("core", TRAINED, ids=str)
ARCHS = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
KEPT = ("states", "matrices", "factors", "kept_u")
GRADIENTS = {"q": "dr", "k": "dk", "v": "dv", "g": "dw", "beta": "dbeta", "initial_state": "grad_initial_state"}
GRADIENTS |= {"C": "dr", "B": "dk"}
CASES = [("gated_delta_rule", "norm"), ("delta_rule", ""), ("simple_gla", "")]


# ---- schedules -----------------------------------------------------------------------------------------------------


def pointers(step):
    """What a launch's pointers are bound to, by the names of its arguments; None where that is nothing."""
    return {x.name: step.bind.get(x.name, x.name) for x in step.arguments() if x.type.endswith("*")}


@CORES
@ARCHS
def test_gradients_come_in_the_order_of_the_inputs(core, arch):
    given = head_decays(core, arch, training=True)
    backward = steps.backward(given)
    assert [*backward.results] == [*(f"d{name}" for name in core.names), "grad_initial_state"]
    for name, result in zip(core.names, backward.results.values(), strict=False):
        assert result == (given.shape(name), given.types[name])
    assert backward.results["grad_initial_state"] == (given.state_shape, given.state_type)
    without = steps.backward(given._replace(has_initial_state=False, has_final_state=False))
    assert [*without.results] == [f"d{name}" for name in core.names]
    first, of_keys, *_ = map(pointers, without.launches)
    assert (first["grad_final_state"], first["grad_initial_state"]) == (None, None)
    assert (of_keys["dw"] is not None, of_keys["dbeta"] is not None) == (
        core.has_decay and not core.has_step,
        core.has_rate,
    )


@CORES
@ARCHS
@pytest.mark.parametrize("chunk_len", [32, 16])
def test_what_a_call_keeps_is_what_its_forward_writes_and_its_backward_reads(core, arch, chunk_len):
    given = head_decays(core, arch, chunk_len=chunk_len, training=True)
    forward, backward = steps.forward(given), steps.backward(given)
    names = KEPT if core.has_delta else KEPT[:-1]
    assert (tuple(forward.kept), forward.kept) == (names, steps.kept(given))
    assert all(begin % 16 == 0 for begin in [*offsets(forward.kept.values()), sum(forward.kept.values())])
    assert forward.kept.get("kept_u") == (2 * given.B * given.T * given.H * given.V if core.has_delta else None)
    (step,) = forward.launches
    assert {name for name in KEPT if pointers(step)[name] is not None} == {*names}
    first, of_keys, *_ = map(pointers, backward.launches)
    assert {*first.values(), *of_keys.values()} >= {*names, *backward.scratch}
    without = steps.forward(given._replace(training=False))
    (step,) = without.launches
    assert (without.kept, step.parameters["KEPT_LEN"]) == ({}, 0)
    assert all(pointers(step)[name] is None for name in KEPT)


@CORES
@ARCHS
def test_what_is_written_is_the_value_where_nothing_is_erased(core, arch):
    given = head_decays(core, arch, training=True)
    _, of_keys, *_ = steps.backward(given).launches
    bound = pointers(of_keys)
    if core.has_delta:
        assert (bound["u"], bound["dv"]) == ("kept_u", "dv")
        assert of_keys.bind["u_strides"] == (given.T * given.H * given.V, given.H * given.V, given.V)
    else:
        assert (bound["u"], bound["dv"]) == ("v", None)
        assert "u_strides" not in of_keys.bind  # those of v


@ARCHS
def test_packed_sequences_have_room_for_a_piece_more_each(arch):
    given = head_decays(Core(True), arch, training=True)
    packed = given._replace(B=1, T=8 * 4096, N=8, is_packed=True)
    for name in ("states", "matrices", "factors"):
        size = steps.kept(given)[name] // (8 * 4096)
        length = 32 if name != "states" else 64
        assert steps.kept(packed)[name] - steps.kept(given)[name] == 8 * length * size
    assert steps.kept(packed)["kept_u"] == steps.kept(given)["kept_u"]


NORMED = Core(True, has_norm=True)


@pytest.mark.parametrize(
    ("core", "changes", "count"),
    [
        (NORMED, {"B": 8, "N": 8, "T": 4096}, 1),  # which fills the GPU
        (NORMED, {"B": 4, "N": 4, "T": 4096}, 2),
        (NORMED, {"T": 32768}, 8),
        (NORMED, {"T": 32768, "N": 4, "is_packed": True}, 2),
        (NORMED, {"T": 2500}, 2),  # of no less than 1024 tokens
        (NORMED, {"T": 2000}, 1),
        (NORMED, {"T": 32768, "H": 300, "G": 300}, 1),
        (NORMED, {"T": 32768, "is_batch_invariant": True}, 1),
        (Core(False), {"T": 32768}, 8),
        (Core(True), {"T": 32768}, 1),  # whose keys may be of any length
        (Core(True, has_decay=False, has_norm=True), {"T": 32768}, 1),
    ],
)  # fmt: skip
def test_sequences_are_cut_where_they_are_few_and_their_decays_can_let_them(core, changes, count):
    given = head_decays(core, **{"B": 1, "N": 1, "training": True, **changes})
    assert steps.segments(given) == count
    for schedule in (steps.forward(given), steps.backward(given)):
        (step,) = (x for x in schedule.launches if x.entry in ("head_decay_forward", "head_decay_backward"))
        assert (step.grid[:2], step.bind["segments"]) == ((given.N * count, given.H), count)
        assert step.parameters["SEGMENTED"] == (count > 1)
        assert (pointers(step)["walks"] is None) == (count == 1)


def test_blocks_that_share_a_sequence_find_their_chunks_first():
    given = head_decays(NORMED, B=1, N=1, T=32768, training=True)
    forward = steps.forward(given)
    assert [step.entry for step in forward.launches] == ["head_decay_walks", "head_decay_forward"]
    assert forward.main == 1
    assert forward.launches[0].grid == (8, 32, 2)
    assert forward.kept == steps.kept(given)
    assert (forward.kept["walks"], dict(forward.scratch)) == (8 * 32 * 2 * 16, {})
    alone = steps.forward(given._replace(training=False))
    assert (alone.launches[0].grid, dict(alone.kept)) == ((8, 32, 1), {})
    assert dict(alone.scratch) == {"walks": 8 * 32 * 16}


def test_sums_over_slots_that_belong_to_no_chunk_begin_with_zeros():
    for has_own in (True, False):
        p = head_decays(Core(False, has_own=has_own), "sm_90", (128, 64), training=True)
        firsts = [steps.backward(p._replace(is_packed=is_packed)).steps[0] for is_packed in (False, True)]
        assert [first == Zero("down_rows") for first in firsts] == [False, has_own]


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(on_gpu, monkeypatch):
    """A GPU that takes notes, where few heads go to these kernels too."""
    monkeypatch.setattr(steps, "LEAST_BLOCKS", 0)
    on_gpu.use("sm_90")
    return on_gpu


def make(name, how="", sizes=(2, 70, 2, 4, 64, 32), dtype=torch.bfloat16, **more):
    return derived_cases.make(name, how, sizes, dtype, torch.float32, torch.float32, **more)


def launches_of(here):
    """The launches of one call in both directions, by their kernels."""
    taken = here.take()
    assert [x.entry for x in taken] == ["head_decay_forward", "head_decay_backward", "head_decay_key_gradients"]
    return (x.named for x in taken)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_each_direction_gets_what_it_asks_for(here, name, how):
    case = make(name, how)
    for _ in range(2):
        leaves = {own: x.detach().requires_grad_() for own, x in case.tensors.items()}
        y, final = case.replaced(leaves).run()
        dy, last = torch.randn_like(y), torch.randn_like(final)
        grads = dict(zip(leaves, torch.autograd.grad([y, final], [*leaves.values()], [dy, last]), strict=True))
        forward, backward, of_keys = launches_of(here)
        assert (forward["y"], forward["final_state"]) == (y.data_ptr(), final.data_ptr())
        assert (backward["dy"], backward["grad_final_state"]) == (dy.data_ptr(), last.data_ptr())
        assert of_keys["dy"] == dy.data_ptr()
        made = {**of_keys, **backward}  # dv is what one of them writes and the other may read
        assert {own: grad.data_ptr() for own, grad in grads.items()} == {own: made[GRADIENTS[own]] for own in grads}
        for kept in ("matrices", "factors"):
            assert forward[kept] == backward[kept] != 0
        assert (forward["states"], forward["factors"]) == (of_keys["states"], of_keys["factors"])
        assert backward["slopes"] == of_keys["slopes"] != 0
        v, heads, size = leaves["v"], 4, 32
        has_delta = name != "simple_gla"
        of_u = (
            (forward["kept_u"], (70 * heads * size, heads * size, size))
            if has_delta
            else (v.data_ptr(), v.stride()[:3])
        )
        assert (of_keys["u"], of_keys["u_strides"]) == of_u
        assert of_keys["dv"] == (backward["dv"] if has_delta else 0)


@pytest.mark.parametrize("bounds", [None, [0, 30, 70]], ids=["batch", "packed"])
def test_what_outputs_have_of_values_is_summed_over_chunks(here, bounds):
    case = make("ssd", "D softplus", (2 if bounds is None else 1, 70, 2, 4, 64, 32), bounds=bounds)
    differentiate(case)
    taken = here.take()
    of_keys = taken[2]
    assert [x.parameters["HAS_OWN"] for x in taken[:3]] == [True] * 3
    assert [x.entry for x in taken[3:]] == ["sum_buffers"]
    sums = taken[3].named
    (place,) = (place for place in range(5) if sums[f"rows{place}"] == of_keys.named["own_chunks"] != 0)
    assert (sums[f"group_rows{place}"], sums[f"width{place}"]) == (4 if bounds is None else 3, 4 * 32)
    assert sorted(sums[f"width{place}"] for place in range(5)) == [0, 0, 0, 4, 4 * 32]
    alone = case.parameters["D"].requires_grad_()
    y, _ = case.run()
    assert torch.autograd.grad(y.sum(), alone)[0].shape == alone.shape
    assert len(here.take()) == 4  # nobody wants the gradient of A


@pytest.mark.parametrize(
    ("how", "is_raw", "has_bias"),
    [("D softplus", True, False), ("bias softplus", True, True), ("", False, False), ("softplus limit", False, False)],
)
def test_raw_steps_go_through_their_map_in_the_kernels(here, how, is_raw, has_bias):
    """Others are made before, and so are those between limits."""
    case = make("ssd", how, (2, 70, 2, 4, 64, 32))
    differentiate(case)
    forward, _, of_keys = taken = [x for x in here.take() if x.entry.startswith("head_decay")]
    assert [(x.parameters["HAS_STEP"], x.parameters["HAS_BIAS"]) for x in taken] == [(is_raw, has_bias)] * 3
    steps = case.inputs["dt"].data_ptr()
    assert ((forward.named["w"], forward.named["w_strides"]) == (steps, forward.named["beta_strides"])) == is_raw
    assert (of_keys.named["dw"] == 0) == is_raw
    assert (forward.named["dt_bias"] != 0) == has_bias


@pytest.mark.parametrize("of", [(0,), (1,)], ids=["y", "state"])
def test_results_that_nobody_differentiates_have_no_gradient(here, of):
    differentiate(make("gated_delta_rule"), of=of)
    _, backward, of_keys = launches_of(here)
    assert bool(backward["grad_final_state"]) == (of == (1,))
    assert backward["dy"] == of_keys["dy"] != 0
    differentiate(make("gated_delta_rule", has_state=False))
    forward, backward, _ = launches_of(here)
    assert (forward["initial_state"], backward["grad_initial_state"]) == (0, 0)


def test_gradients_are_read_where_they_are(here):
    """Not copied, where their channels are neighbours; one backward is prepared for each of their strides."""
    case = make("gated_delta_rule")
    dy = torch.randn(2, 4, 70, 32, dtype=torch.bfloat16).transpose(1, 2)
    last = torch.randn_like(case.state)
    for weight in (dy, dy[:1].expand(2, -1, -1, -1), dy.contiguous()):
        differentiate(case, weights=(weight, last))
        _, backward, of_keys = launches_of(here)
        for passed in (backward, of_keys):
            assert (passed["dy"], passed["dy_strides"]) == (weight.data_ptr(), weight.stride()[:3])
    differentiate(case, weights=(dy[..., :1].expand(2, 70, 4, 32), last))
    _, backward, _ = launches_of(here)
    assert backward["dy_strides"] == (70 * 4 * 32, 4 * 32, 32)  # a copy's
    assert len(prepared.calls) == 1
    assert len(plan._plans) == 4


def test_which_calls_are_trained_here(here):
    def asked(case, **options):
        differentiate(case, **options)
        return any(x.entry.startswith("head_decay") for x in here.take())

    case = make("gated_delta_rule")
    assert asked(case)
    assert not asked(case, backend="recurrent")
    assert not asked(make("gated_delta_rule", dtype=torch.float32))
    assert not asked(make("gated_delta_rule", sizes=(2, 70, 2, 4, 136, 136)))
    assert not asked(make("gated_delta_rule", sizes=(2, 3, 2, 4, 64, 32)))
    rwkv_jit.set_bfloat16_precision("high")
    try:
        assert not asked(case)
    finally:
        rwkv_jit.set_bfloat16_precision("medium")


def test_few_heads_are_trained_in_other_kernels(on_gpu):
    for batch, is_here in ((6, False), (7, True)):  # of 132 multiprocessors a fifth
        differentiate(make("simple_gla", sizes=(batch, 70, 2, 4, 64, 64)))
        assert any(x.entry.startswith("head_decay") for x in on_gpu.take()) == is_here
