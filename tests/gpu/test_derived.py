"""The ops made of wkv7 and gla on the GPU against float64: values, gradients, decoding, and what must be left alone."""

import comparing
import derived_cases
import differentiable
import pytest
import torch
from derived_cases import LIMITS, differentiate, error_of, exactly, limit_of, make, pooled

import rwkv_jit

pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
CASES = pytest.mark.parametrize(("name", "how"), derived_cases.ALL)
EACH = pytest.mark.parametrize(("name", "how"), [(op, several[-1]) for op, several in derived_cases.WAYS.items()])
KINDS = [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")]
SIZES = [
    (2, 150, 2, 4, 64, 64), (1, 70, 1, 3, 40, 24), (2, 33, 1, 2, 128, 128), (1, 65, 1, 8, 64, 64),
    (2, 17, 2, 10, 7, 13), (3, 1, 2, 2, 64, 64), (1, 90, 1, 2, 256, 192), (1, 1100, 1, 4, 64, 128),
]  # fmt: skip
MIXED = (-20.0, 0.0)


def of_kind(name, how, sizes, kind, **more):
    dtype, wide = (comparing.DTYPES[x] for x in kind)
    return make(name, how, sizes, dtype, wide, torch.float32, device="cuda", **more)


def check(case, kind, function=None, norms=None):
    results, grads, weights = differentiate(case, function)
    want, want_grads = exactly(case, weights)
    limit = LIMITS[kind[0]]
    for found, x, what in zip(results, want, ("y", "state"), strict=True):
        assert comparing.relative(found, x) < limit, what
    for own, grad in grads.items():
        assert (grad.dtype, grad.shape) == (case.tensors[own].dtype, case.tensors[own].shape)
        norm = None if norms is None else norms[own]
        assert error_of(case, own, grad, want_grads[own], norm=norm) < limit_of(case, own, kind[0]), own


@CASES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_values_and_gradients(op, name, how, sizes, kind, guarded_memory):
    check(of_kind(name, how, sizes, kind), kind)


@CASES
@pytest.mark.parametrize("kind", KINDS[::3], ids="-".join)
def test_decays_of_any_strength(op, name, how, kind, guarded_memory):
    case = of_kind(name, how, (2, 150, 2, 4, 64, 64), kind, decays=MIXED)
    check(case, kind, norms=derived_cases.usual_norms(case))


@CASES
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_packed_sequences(op, name, how, layout, guarded_memory):
    bounds = [0, 0, 1, 40, 40, 200, 203, 203]
    for kind in KINDS[::3]:
        check(of_kind(name, how, (1, 203, 2, 4, 64, 64), kind, bounds=bounds, layout=layout), kind)


@pytest.mark.parametrize(("heads", "size"), [((16, 32), 128), ((16, 64), 128), ((2, 12), 64)])
def test_many_value_heads_of_a_key_head(op, heads, size, guarded_memory):
    check(of_kind("gated_delta_rule", "raw bias sigmoid norm", (1, 130, *heads, size, size), KINDS[0]), KINDS[0])


@EACH
def test_without_tokens_the_state_is_handed_on(op, name, how):
    case = of_kind(name, how, (2, 0, 2, 4, 64, 64), KINDS[0])
    results, grads, weights = differentiate(case)
    assert results[0].shape[1] == 0
    assert torch.equal(results[1], case.state)
    assert torch.equal(grads["initial_state"], weights[1])


@EACH
@pytest.mark.parametrize("how_given", ["wider", "elsewhere", "of another order"])
def test_any_strides_and_addresses(op, name, how, how_given):
    case, moved = of_kind(name, how, (2, 40, 2, 4, 64, 64), KINDS[0]), {}
    for own, x in case.tensors.items():
        if how_given == "wider":
            moved[own] = torch.cat([x, x], -1)[..., : x.shape[-1]]
        elif how_given == "elsewhere":
            moved[own] = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
        else:
            moved[own] = x.movedim(0, -1).contiguous().movedim(-1, 0)
    check(case.replaced(moved), KINDS[0])


@CASES
def test_one_result_from_run_to_run(op, name, how):
    case = of_kind(name, how, (2, 1500, 2, 4, 64, 64), KINDS[0])
    results, grads, weights = differentiate(case)
    for _ in range(3):
        again, others, _ = differentiate(case, weights=weights)
        for x, y in zip([*results, *grads.values()], [*again, *others.values()], strict=True):
            assert torch.equal(x, y)


@EACH
def test_a_graph_of_both_directions(op, name, how):
    case = of_kind(name, how, (2, 70, 2, 4, 64, 64), KINDS[0])
    _, _, weights = differentiate(case)
    leaves = {own: x.detach().requires_grad_() for own, x in case.tensors.items()}

    def step():
        y, final = case.replaced(leaves).run()
        return torch.autograd.grad([y, final], [*leaves.values()], weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    other = of_kind(name, how, (2, 70, 2, 4, 64, 64), KINDS[0])
    with torch.no_grad():
        for own, x in leaves.items():
            x.copy_(other.tensors[own])
    graph.replay()
    for x, y in zip(made, step(), strict=True):
        assert torch.equal(x, y)


@EACH
def test_compiled(op, name, how):
    case = of_kind(name, how, (2, 70, 2, 4, 64, 64), KINDS[0])
    results, grads, weights = differentiate(case)
    found, own, _ = differentiate(case, torch.compile(getattr(rwkv_jit, name), fullgraph=True), weights)
    for x, y in zip([*found, *own.values()], [*results, *grads.values()], strict=True):
        assert comparing.relative(x, y) < LIMITS["bf16"]  # torch fuses what stands around the kernels


@EACH
def test_under_autocast(op, name, how):
    case = of_kind(name, how, (2, 70, 2, 4, 64, 64), ("fp32", "fp32"))
    with torch.autocast("cuda", torch.bfloat16):
        check(case, ("bf16", "fp32"))


# ---- over a pool -------------------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("sizes", [(5, 1, 2, 4, 64, 64), (3, 4, 1, 3, 40, 24), (2, 3, 2, 4, 128, 128)], ids=str)
def test_updates(op, name, how, sizes, guarded_memory):
    for kind in KINDS[::3]:
        case = of_kind(name, how, sizes, kind)
        (want, want_final) = case.reference().run(getattr(rwkv_jit, f"{name}_ref"))
        pool = torch.randn(sizes[0] + 3, *case.state.shape[1:], device="cuda")
        slots = torch.randperm(sizes[0] + 3, device="cuda")[: sizes[0]].to(torch.int32)
        pool[slots.long()] = case.state
        asked = case.part((slice(None), 0)) if sizes[1] == 1 else case
        y = pooled(asked, "update", pool, state_indices=slots)
        assert comparing.relative(y.view(want.shape), want) < LIMITS[kind[0]]
        assert comparing.relative(pool[slots.long()], want_final) < LIMITS[kind[0]]


@CASES
@pytest.mark.parametrize("kind", ["update", "varlen"])
def test_what_has_no_slot_gets_zeros(op, name, how, kind, guarded_memory):
    for is_whole, null_index, dtype in ((True, -1, torch.float32), (False, 0, torch.bfloat16)):
        derived_cases.check_without_slots(name, how, kind, is_whole, null_index, dtype, "cuda")


@CASES
def test_sequences_of_any_lengths(op, name, how, guarded_memory):
    bounds = [0, 1, 2, 2, 7, 150]
    for kind in KINDS[::3]:
        case = of_kind(name, how, (1, 150, 2, 4, 64, 64), kind, bounds=bounds)
        want, want_final = case.reference().run(getattr(rwkv_jit, f"{name}_ref"))
        pool, out = case.state.clone(), torch.full_like(want, float("nan"), dtype=comparing.DTYPES[kind[0]])
        assert pooled(case, "varlen", pool, cu_seqlens=case.cu_seqlens, out=out) is out
        assert comparing.relative(out, want) < LIMITS[kind[0]]
        assert comparing.relative(pool, want_final) < LIMITS[kind[0]]


@EACH
@pytest.mark.parametrize("kind", ["update", "varlen"])
def test_a_graph_over_a_pool_replays_the_call(op, name, how, kind):
    case = of_kind(name, how, (1, 40, 2, 4, 64, 64) if kind == "varlen" else (5, 1, 2, 4, 64, 64), KINDS[0])
    options = {"state_indices": torch.tensor([3, 0, -1, 4, 1], device="cuda")}
    if kind == "varlen":
        options["cu_seqlens"] = torch.tensor([0, 1, 9, 12, 12, 40], device="cuda")
    pool = torch.randn(6, *case.state.shape[1:], device="cuda")
    want_pool, used, graph = pool.clone(), pool.clone(), torch.cuda.CUDAGraph()
    want = pooled(case, kind, want_pool, **options)
    with torch.cuda.graph(graph):
        y = pooled(case, kind, used, **options)
    assert torch.equal(used, pool)
    graph.replay()
    assert torch.equal(y, want)
    assert torch.equal(used, want_pool)


def test_faults_launch_nothing(op):
    case = of_kind("ssd", "D z bias softplus", (2, 3, 1, 2, 64, 64), KINDS[0])
    pool = case.state.clone()
    for change in ({"D": torch.zeros(3, device="cuda")}, {"z": torch.zeros(2, device="cuda")}):
        with pytest.raises(ValueError, match=f"^{next(iter(change))}: expected shape"):
            pooled(case._replace(parameters=case.parameters | change), "update", pool)
        assert torch.equal(pool, case.state)
    with pytest.raises(ValueError, match="A_log: expected device"):
        rwkv_jit.kda(*make("kda", device="cuda", dtype=torch.float32).inputs.values(), A_log=torch.zeros(4))


@pytest.mark.parametrize("name", differentiable.ALL)
def test_gradients_of_several_gradients_at_once_are_those_one_by_one(op, name, guarded_memory):
    function, given = differentiable.make(name, torch.float32, "cuda")
    given = [x.requires_grad_() for x in given]
    results = function(*given)
    several = [torch.randn(3, *x.shape, device="cuda") for x in results]
    together = torch.autograd.grad(results, given, several, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(results, given, [x[i] for x in several], retain_graph=True)
        for found, want in zip(together, alone, strict=True):
            assert comparing.relative(found[i], want) < 1e-5
