"""Ops with one decay for a head, in kernels of their own, against float64; and which calls these are for."""

import comparing
import derived_cases
import pytest
import torch
from derived_cases import differentiate, error_of, exactly, limit_of
from torch.utils.checkpoint import checkpoint

import rwkv_jit
from rwkv_jit.kernels import signatures
from rwkv_jit.schedules import head_decay

pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
# Keys that are not normed make errors grow.
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAMES = ("gated_delta_rule", "delta_rule", "simple_gla", "ssd")
CASES = pytest.mark.parametrize(("name", "how"), [each for each in derived_cases.ALL if each[0] in NAMES])
# B, T, key heads, value heads, K and V.
SIZES = [
    (2, 200, 2, 4, 128, 128), (1, 130, 1, 3, 40, 24), (2, 70, 2, 2, 64, 64), (3, 9, 1, 1, 16, 32),
    (1, 133, 2, 6, 128, 64), (2, 33, 1, 2, 33, 65), (2, 97, 2, 4, 17, 128), (1, 64, 4, 4, 100, 96),
    (70, 33, 1, 2, 128, 128),
]  # fmt: skip
DECAYS = [(-1.0, -0.01), (-0.001, 0.0), (-80.0, 0.0), (-2000.0, -1000.0)]


@pytest.fixture(autouse=True)
def any_heads(monkeypatch):
    """Few heads go there too."""
    monkeypatch.setattr(head_decay, "LEAST_BLOCKS", 0)


def own(launched, kind="forward"):
    """How often a kernel of these ops was launched, of those that have several forms any."""
    return sum(seen.name.startswith("head_decay_") and seen.name.endswith(kind) for seen in launched)


def own_backwards(launched):
    """How often gradients were made by kernels of these ops, each of which launches two."""
    assert own(launched, "_backward") == own(launched, "_key_gradients")
    return own(launched, "_backward")


def check(case, **options):
    """Compare a call without gradients with the reference."""
    with torch.no_grad():
        y, final = case.run(**options)
        want, want_final = case.reference().run(getattr(rwkv_jit, f"{case.op}_ref"))
    limit = LIMITS[y.dtype]
    assert (y.dtype, final.dtype) == (next(iter(case.inputs.values())).dtype, case.state.dtype)
    assert comparing.relative(y, want) < limit
    rounding = {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(case.state.dtype, 0.0)
    assert comparing.relative(final, want_final) < limit + rounding


@CASES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(op, name, how, sizes, launched, guarded_memory):
    for dtype in LIMITS:
        check(derived_cases.make(name, how, sizes, dtype, torch.float32, torch.float32, device="cuda"))
    assert own(launched) == len(LIMITS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decays", DECAYS, ids=str)
@pytest.mark.parametrize("chunk_len", [16, 32])
def test_any_decay(op, name, decays, chunk_len, launched):
    case = derived_cases.make(
        name, "", (2, 130, 2, 4, 64, 64), torch.bfloat16, torch.float32, torch.float32, decays, device="cuda"
    )  # fmt: skip
    check(case, chunk_len=chunk_len)
    assert own(launched) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_sequences_and_states(op, name, layout, state_type, launched, guarded_memory):
    bounds = [0, 0, 1, 40, 105, 105, 130]
    case = derived_cases.make(
        name, "", (1, 130, 1, 2, 64, 96), torch.bfloat16, torch.float32, state_type, bounds=bounds, device="cuda",
        layout=layout,
    )  # fmt: skip
    check(case)
    assert own(launched) == 1


@pytest.mark.parametrize("name", NAMES)
def test_one_state_for_all_sequences_and_none(op, name, launched):
    case = derived_cases.make(
        name, "", (3, 40, 2, 2, 32, 32), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )
    alike = case._replace(state=case.state[:1].expand_as(case.state))
    with torch.no_grad():
        want, of_one = alike.run(), alike._replace(state=case.state[0]).run()
        zeros, without = case._replace(state=torch.zeros_like(case.state)).run(), case._replace(state=None).run()
    for found, x in zip((*of_one, *without), (*want, *zeros), strict=True):
        assert torch.equal(found, x)
    assert own(launched) == 4


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_blocks_change_no_result(op, name, launched):
    """Few heads share their value rows between blocks; where results may not depend on the batch, they do not."""
    case = derived_cases.make(
        name, "", (2, 100, 1, 2, 128, 128), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )  # fmt: skip
    with torch.no_grad():
        shared = case.run()
        rwkv_jit.set_batch_invariant(True)
        try:
            whole = case.run()
            first = case.part(slice(0, 1))._replace(state=case.state[:1]).run()
        finally:
            rwkv_jit.set_batch_invariant(False)
    for x, y, z in zip(shared, whole, first, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(y[:1], z)


@pytest.mark.parametrize("name", NAMES)
def test_strided_inputs_and_a_graph(op, name, launched):
    case = derived_cases.make(
        name, "", (2, 66, 2, 4, 64, 64), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )
    apart = {n: x if x.dim() < 3 else torch.stack([x, x + 1], 2)[:, :, 0] for n, x in case.inputs.items()}
    with torch.no_grad():
        want = case.run()
        for found, x in zip(case._replace(inputs=apart).run(), want, strict=True):
            assert torch.equal(found, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case.run()
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
    for found, x in zip(captured, want, strict=True):
        assert torch.equal(found, x)


def test_other_calls_go_to_other_kernels(op, launched):
    case = derived_cases.make(
        "gated_delta_rule", "norm", (2, 40, 2, 4, 64, 64), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )  # fmt: skip
    differentiate(case, backend="recurrent")
    differentiate(case, num_threads=128)
    with torch.no_grad():
        case.run(backend="recurrent")
        case.run(backend="reference")
        case.run(num_threads=128)
        case.reference().replaced({n: x.float() for n, x in case.tensors.items()}).run()
        short = case.part((slice(None), slice(0, 3)))
        short.run()
        large = derived_cases.make(
            "gated_delta_rule", "norm", (1, 40, 1, 1, 192, 192), torch.bfloat16, torch.float32, torch.float32,
            device="cuda",
        )  # fmt: skip
        large.run()
    assert own(launched) == own_backwards(launched) == 0
    with torch.no_grad():
        case.run()
    assert (own(launched), own_backwards(launched)) == (1, 0)
    differentiate(case)
    assert (own(launched), own_backwards(launched)) == (2, 1)


def test_few_heads_go_in_segments(op, launched, monkeypatch):
    monkeypatch.setattr(head_decay, "LEAST_BLOCKS", 1 / 5)
    case = derived_cases.make(
        "simple_gla", "", (1, 64, 1, 1, 64, 64), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )  # fmt: skip
    with torch.no_grad():
        case.run()
    differentiate(case)
    assert own(launched) == own_backwards(launched) == 0


# ---- gradients -----------------------------------------------------------------------------------------------------

EACH = pytest.mark.parametrize("name", NAMES)
KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
TRAINED_SIZES = [
    (2, 200, 2, 4, 128, 128), (1, 130, 1, 3, 40, 24), (2, 70, 4, 4, 64, 64), (1, 70, 1, 4, 33, 65),
    (3, 40, 2, 6, 16, 32), (1, 133, 2, 6, 128, 64),
]  # fmt: skip
BOUNDS = [0, 0, 1, 40, 105, 105, 130, 130]


def make(name, how, sizes, dtype=torch.bfloat16, wide=torch.float32, state_type=torch.float32, **more):
    return derived_cases.make(name, how, sizes, dtype, wide, state_type, device="cuda", **more)


def check_gradients(case, kind, of=(0, 1), **options):
    """Compare results and gradients of all tensors of a call with the reference; return the gradients of both."""
    results, grads, weights = differentiate(case, None, None, of, **options)
    want, want_grads = exactly(case, weights, of)
    for found, x in zip(results, want, strict=True):
        assert comparing.relative(found, x) < derived_cases.LIMITS[kind]
    for own_name, grad in grads.items():
        assert (grad.dtype, grad.shape) == (case.tensors[own_name].dtype, case.tensors[own_name].shape)
        assert error_of(case, own_name, grad, want_grads[own_name], of) < limit_of(case, own_name, kind), own_name
    return grads, want_grads


def are_equal(found, want):
    return all(torch.equal(x, want[own_name]) for own_name, x in found.items())


@CASES
@pytest.mark.parametrize("sizes", TRAINED_SIZES, ids=str)
def test_gradients(op, name, how, sizes, launched, guarded_memory):
    for dtype, kind in KINDS.items():
        check_gradients(make(name, how, sizes, dtype), kind)
    assert own(launched) == own_backwards(launched) == len(KINDS)


@EACH
@pytest.mark.parametrize("kept_lens", [(64, 32), (32,)], ids=str)
def test_gradients_by_the_kernels_of_other_architectures(op, name, kept_lens, launched, guarded_memory, monkeypatch):
    """By products of single warps, and with the shorter chunks of those with less shared memory."""
    monkeypatch.setattr(head_decay, "takes_warp_groups", lambda *_: False)
    monkeypatch.setattr(head_decay, "KEPT_LENS", kept_lens)
    signatures.forget()
    for sizes in ((2, 130, 2, 4, 128, 128), (1, 150, 1, 2, 64, 128), (1, 70, 2, 2, 128, 64)):
        for bounds in (None, [0, 0, 1, 66, sizes[1]]) if sizes[0] == 1 else (None,):
            check_gradients(make(name, "", sizes, bounds=bounds), "bf16")
    assert own_backwards(launched) == 5
    assert not any("_group_" in seen.name for seen in launched)


@CASES
@pytest.mark.parametrize("chunk_len", [16, 32])
def test_gradients_with_gates_of_16_bits(op, name, how, chunk_len, launched, guarded_memory):
    check_gradients(make(name, how, (2, 85, 2, 4, 64, 64), wide=torch.bfloat16), "bf16", chunk_len=chunk_len)
    assert own(launched) == own_backwards(launched) == 1


@EACH
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_packed_sequences_and_states(op, name, layout, state_type, launched, guarded_memory):
    for sizes in ((1, 130, 1, 3, 64, 96), (1, 130, 3, 3, 33, 24)):
        case = make(name, "", sizes, state_type=state_type, bounds=BOUNDS, layout=layout)
        check_gradients(case, "bf16")
        check_gradients(case, "bf16", chunk_len=16)
    assert own(launched) == own_backwards(launched) == 4


@EACH
@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_gradients_with_decays_of_any_strength(op, name, chunk_len, dtype, launched, guarded_memory):
    for decays in ((-20.0, 0.0), (0.0, 0.0)):
        case = make(name, "", (2, 150, 2, 4, 64, 64), dtype, decays=decays)
        check_gradients(case, KINDS[dtype], chunk_len=chunk_len)
    assert own(launched) == own_backwards(launched) == 2


@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla", "ssd"])
@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_gradients_where_some_tokens_forget_all(op, name, chunk_len, dtype, launched, guarded_memory):
    """The first of a chunk, the last, those of one and others between them; of a state space those of one head."""
    case = make(name, "", (2, 150, 2, 4, 64, 64), dtype)
    if name == "ssd":
        case.inputs["A"][1] = -400.0
    else:
        g = case.inputs["g"]
        g[:, 5::7], g[:, [15, 31, 32, 63, 64, 127, 149]], g[:, 70:72] = -200.0, -120.0, -30.0
        g[1, 0] = -200.0  # in the other row the initial state has gradients
    check_gradients(case, KINDS[dtype], chunk_len=chunk_len)
    assert own_backwards(launched) == 1


@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla"])
def test_gradients_where_all_tokens_forget_all(op, name, launched, guarded_memory):
    """The gradient of a decay is next to nothing there: so is what is found, beside what it is a difference of."""
    case = make(name, "", (2, 150, 2, 4, 64, 64), decays=(-200.0, -100.0))
    results, grads, weights = differentiate(case)
    want, want_grads = exactly(case, weights)
    of_g, of_state = grads.pop("g").double(), grads.pop("initial_state")
    assert float(of_state.norm()) < 1e-30
    parts = (case.inputs["q"].double() * want_grads["q"]).sum(-1)
    assert float((of_g - want_grads["g"]).norm()) < derived_cases.LIMITS["bf16"] * float(parts.norm())
    for found, x in (*zip(results, want, strict=True), *((grad, want_grads[n]) for n, grad in grads.items())):
        assert comparing.relative(found, x) < derived_cases.LIMITS["bf16"]
    assert own_backwards(launched) == 1


@pytest.mark.parametrize("sizes", [(2, 150, 2, 2, 64, 64), (2, 150, 1, 4, 128, 128), (1, 70, 1, 2, 40, 24)], ids=str)
@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_what_a_token_has_of_itself_is_rounded_once(op, sizes, chunk_len, dtype, launched, guarded_memory):
    errors = derived_cases.roundings_of_own_parts(sizes, dtype, "cuda", chunk_len=chunk_len)
    assert all(error < 1.1 for error in errors.values()), errors
    assert own(launched) == own_backwards(launched) == 1


@pytest.mark.parametrize("name", ["gated_delta_rule", "delta_rule"])
@pytest.mark.parametrize("how", ["", "norm"])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_gradients_of_rates_of_nothing_and_of_all(op, name, how, dtype, launched, guarded_memory):
    case = make(name, how, (2, 100, 2, 4, 64, 64), dtype)
    beta = case.inputs["beta"]
    beta[:, ::3], beta[:, 1::3], beta[:, 32:50] = 0.0, 1.0, 0.0
    grads, want = check_gradients(case, KINDS[dtype])
    for value in (0.0, 1.0):
        found, x = (several["beta"][beta == value] for several in (grads, want))
        assert comparing.relative(found, x) < limit_of(case, "beta", KINDS[dtype])
    assert own_backwards(launched) == 1


@CASES
@pytest.mark.parametrize("of", [(0,), (1,)], ids=["y", "state"])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "packed"])
def test_gradients_of_one_result(op, name, how, of, bounds, launched, guarded_memory):
    case = make(name, how, (1, 130, 2, 4, 64, 64), bounds=bounds)
    if "A_log" in case.parameters:
        case.parameters["A_log"][0] = -3.0  # a head that keeps some of its initial state: others may keep under 1e-45
    check_gradients(case, "bf16", of)
    assert own(launched) == own_backwards(launched) == 1


@EACH
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "packed"])
def test_gradients_without_states(op, name, bounds, launched, guarded_memory):
    case = make(name, "", (1, 130, 2, 4, 64, 64), bounds=bounds, has_state=False)
    check_gradients(case, "bf16")

    def without_final(*given, **options):
        y, final = getattr(rwkv_jit, name)(*given[:-2], False, given[-1], **options)
        assert final is None
        return y, y.new_zeros(())

    (y, _), want, weights = differentiate(case, of=(0,))
    (again, _), found, _ = differentiate(case, without_final, (weights[0], torch.zeros(())), (0,))
    assert torch.equal(y, again)
    assert are_equal(found, want)
    assert own(launched) == own_backwards(launched) == 3


@EACH
def test_gradient_of_one_state_for_all_sequences(op, name, launched):
    case = make(name, "", (3, 70, 2, 4, 64, 64))
    alike = case._replace(state=case.state[0])
    _, want, weights = differentiate(alike._replace(state=alike.state.expand(3, -1, -1, -1)))
    _, found, _ = differentiate(alike, weights=weights)
    assert comparing.relative(found.pop("initial_state"), want["initial_state"].sum(0)) < 1e-6
    assert are_equal(found, want)
    assert own_backwards(launched) == 2


@CASES
def test_gradients_of_one_tensor_are_those_of_all(op, name, how, launched):
    case = make(name, how, (2, 70, 2, 4, 64, 64))
    _, _, weights = differentiate(case)
    _, want = exactly(case, weights)
    for own_name, x in case.tensors.items():
        leaf = x.detach().requires_grad_()
        y, final = case.replaced(case.tensors | {own_name: leaf}).run()
        results = {x: weight for x, weight in zip((y, final), weights, strict=True) if x.requires_grad}
        (grad,) = torch.autograd.grad([*results], leaf, [*results.values()])
        assert error_of(case, own_name, grad, want[own_name]) < limit_of(case, own_name, "bf16"), own_name
    assert own(launched) == 1 + len(case.tensors)


@EACH
@pytest.mark.parametrize("how", [*comparing.STRIDES, "of a sum", "the same in every row"])
def test_gradients_of_results_with_any_strides(op, name, how, launched):
    case = make(name, "", (2, 70, 2, 4, 64, 64))
    _, _, (dy, last) = differentiate(case)
    if how == "of a sum":
        moved = dy[:1, :1, :1, :1].expand_as(dy)
    elif how == "the same in every row":
        moved = dy[:1].expand_as(dy)
    else:
        moved = comparing.strided(dy, how)
    of_state = last.mT.contiguous().mT
    _, want, _ = differentiate(case, weights=(moved.contiguous(), last))
    _, found, _ = differentiate(case, weights=(moved, of_state))
    assert are_equal(found, want)
    assert own_backwards(launched) == 3


@EACH
def test_gradients_are_the_same_from_run_to_run(op, name, launched):
    case = make(name, "", (2, 1500, 2, 4, 64, 64))
    results, grads, weights = differentiate(case)
    for _ in range(3):
        again, others, _ = differentiate(case, weights=weights)
        assert all(torch.equal(x, y) for x, y in zip(results, again, strict=True))
        assert are_equal(others, grads)
    assert own_backwards(launched) == 4


@EACH
@pytest.mark.parametrize("sizes", [(1, 250, 2, 4, 64, 64), (1, 250, 1, 2, 128, 128)], ids=str)
def test_gradients_whatever_the_batch(op, name, sizes, launched):
    """Alone, packed and among others a sequence has the same results and gradients, where that is asked for."""
    bounds = [0, 64, 65, 130, 250]
    packed = make(name, "", sizes, bounds=bounds)
    shared = [own_name for own_name, x in packed.inputs.items() if x.dim() < 3]  # by all tokens
    rwkv_jit.set_batch_invariant(True)
    try:
        results, grads, (dy, last) = differentiate(packed)
        for place, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if end - begin < 4:
                continue  # too few tokens for these kernels, alone
            tokens, row = (slice(0, 1), slice(begin, end)), slice(place, place + 1)
            alone = packed.part(tokens)._replace(state=packed.state[row], cu_seqlens=None)
            rows = {n: x if n in shared else torch.cat([x, x.flip(1)]) for n, x in alone.tensors.items()}
            for case in (alone, alone.replaced(rows)):
                weights = [torch.cat([x] * len(case.state)) for x in (dy[tokens], last[row])]
                found, own_grads, _ = differentiate(case, weights=weights)
                assert torch.equal(found[0][:1], results[0][tokens])
                assert torch.equal(found[1][:1], results[1][row])
                for own_name, grad in own_grads.items():
                    index = row if own_name == "initial_state" else tokens
                    assert own_name in shared or torch.equal(grad[:1], grads[own_name][index]), own_name
    finally:
        rwkv_jit.set_batch_invariant(False)
    assert own_backwards(launched) == 7


@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla", "ssd"])
@pytest.mark.parametrize("bounds", [None, [0, 150, 150, 170, 650, 700]], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_blocks_share_a_sequence_where_its_decays_let_them(
    op, name, bounds, dtype, launched, guarded_memory, monkeypatch
):  # fmt: skip
    """Of four heads one forgets at once and one never, one here and there; and rates past 2 let some of it grow."""
    monkeypatch.setattr(head_decay, "_LEAST_SEGMENT", 64)
    case = make(name, "norm" if name == "gated_delta_rule" else "", (1, 700, 2, 4, 64, 32), dtype, bounds=bounds)
    speeds = torch.tensor([8.0, 1e-4, 1.0, 0.1], device="cuda")
    case.inputs["dt" if name == "ssd" else "g"].mul_(speeds)[:, 350:370].mul_(20)
    if name == "gated_delta_rule":  # a head that grows and never forgets blows up what is rounded, with segments or not
        case.inputs["beta"][..., [0, 2, 3]] *= 2.5
    check_gradients(case, KINDS[dtype])
    if name == "gated_delta_rule":
        case.inputs["beta"][..., 1] *= 2.5
    shared = differentiate(case)
    assert own(launched, "_walks") == 2
    monkeypatch.setattr(head_decay, "_LEAST_SEGMENT", 1 << 20)
    signatures.forget()
    results, grads, _ = differentiate(case, weights=shared[2])
    assert own(launched, "_walks") == 2
    for found, x in zip((*shared[0], *shared[1].values()), (*results, *grads.values()), strict=True):
        assert comparing.relative(found, x) < 1e-5


@EACH
def test_rows_in_blocks_change_no_gradient(op, name, launched):
    case = make(name, "", (2, 100, 1, 2, 128, 128))
    _, shared, weights = differentiate(case)
    rwkv_jit.set_batch_invariant(True)
    try:
        _, whole, _ = differentiate(case, weights=weights)
    finally:
        rwkv_jit.set_batch_invariant(False)
    assert are_equal(shared, whole)
    assert own_backwards(launched) == 2


@EACH
def test_second_derivatives_are_refused(op, name, launched):
    case = make(name, "", (2, 40, 2, 4, 64, 64))
    leaves = {own_name: x.requires_grad_() for own_name, x in case.tensors.items()}
    for map_of_y in (torch.clone, torch.square):
        y, _ = case.replaced(leaves).run()
        first = next(iter(leaves.values()))
        (grad,) = torch.autograd.grad(map_of_y(y.float()).sum(), first, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            (grad.float().sum() + first.float().sum()).backward()
    assert own(launched) == 2


@EACH
def test_gradients_under_vmap_are_those_one_by_one(op, name, launched):
    case = make(name, "", (2, 40, 2, 8, 64, 64))
    leaves = [x.requires_grad_() for x in case.tensors.values()]
    results = case.replaced(dict(zip(case.tensors, leaves, strict=True))).run()

    def differentiated(*weights):
        return torch.autograd.grad(results, leaves, weights, retain_graph=True)

    several = [torch.randn(3, *x.shape, dtype=x.dtype, device="cuda") for x in results]
    found = torch.func.vmap(differentiated)(*several)
    one_by_one = [differentiated(*(x[i] for x in several)) for i in range(3)]
    for x, wanted in zip(found, zip(*one_by_one, strict=True), strict=True):
        assert comparing.relative(x, torch.stack(wanted)) < 2 * LIMITS[results[0].dtype]
    assert own_backwards(launched) == 6  # those of three calls, twice


@CASES
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_call(op, name, how, use_reentrant, launched):
    case = make(name, how, (2, 70, 2, 4, 64, 64))
    _, want, weights = differentiate(case)
    leaves = {own_name: x.detach().requires_grad_() for own_name, x in case.tensors.items()}

    def call(*given):
        return case.replaced(dict(zip(leaves, given, strict=True))).run()

    results = checkpoint(call, *leaves.values(), use_reentrant=use_reentrant)
    torch.autograd.backward(results, weights)
    assert are_equal({own_name: x.grad for own_name, x in leaves.items()}, want)
    assert own_backwards(launched) == 2


@CASES
def test_gradients_under_autocast(op, name, how, launched):
    case = make(name, how, (2, 70, 2, 4, 64, 64), torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        check_gradients(case, "bf16")
    assert own(launched) == own_backwards(launched) == 1


@CASES
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "packed"])
def test_a_graph_of_both_directions(op, name, how, bounds, launched):
    case, other = (make(name, how, (1, 130, 2, 4, 64, 64), bounds=bounds) for _ in range(2))
    leaves = {own_name: x.detach().requires_grad_() for own_name, x in case.tensors.items()}
    _, _, weights = differentiate(case)

    def step():
        y, final = case.replaced(leaves).run()
        return y, *torch.autograd.grad([y, final], [*leaves.values()], weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        for own_name, x in leaves.items():
            x.copy_(other.tensors[own_name])
    graph.replay()
    for x, y in zip(made, step(), strict=True):
        assert torch.equal(x, y)
    assert own_backwards(launched) == 4
