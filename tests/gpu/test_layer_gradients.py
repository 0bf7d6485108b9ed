"""Gradients of a layer's small work on the GPU against float64, at odd sizes, and what must be left alone."""

import comparing
import layer_cases
import pytest
import torch

import rwkv_jit

LIMITS = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}  # a rounding may take so much of one number
# Sums over rows of both signs lose digits of what is left.
KINDS = [("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")]
SIZES = [
    (17, 1, 3), (3, 2, 7), (9, 3, 33), (40, 4, 64), (7, 3, 100), (65, 5, 128), (4, 2, 256), (3, 2, 500), (2, 1, 999),
    (700, 32, 64),
]  # fmt: skip
pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
CASES = pytest.mark.parametrize(("name", "how"), layer_cases.ALL)


def make(name, how, sizes, kind=("bf16", "fp32")):
    dtype, parameters = (comparing.DTYPES[x] for x in kind)
    return layer_cases.make(name, how, layer_cases.sizes_of(name, how, *sizes), dtype, parameters, "cuda")


def limit_of(case, grad):
    """What norm_shift norms and carries is rounded to 16 bits, which sums of parameters show; and a number between two
    others may be rounded to either.
    """
    is_rounded = case.name == "norm_shift" and next(iter(case.tensors.values())).dtype != torch.float32
    return max(3e-4, 1.5 * LIMITS[grad.dtype]) if is_rounded else LIMITS[grad.dtype]


def check(case, function=None):
    results, grads, weights = layer_cases.differentiate(case, function or case.run)
    want, want_grads = layer_cases.exactly(case, weights)
    for found, x in zip(results, want, strict=True):
        assert comparing.relative(found, x) < LIMITS[found.dtype]
    for name, grad in grads.items():
        own = case.tensors[name]
        assert (grad.dtype, grad.shape) == (own.dtype, own.shape)
        # Where results are rounded, nothing else is.
        assert comparing.relative(grad, want_grads[name]) < limit_of(case, grad) if grad.numel() else True, name
    return grads


@CASES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(op, name, how, sizes, guarded_memory):
    for kind in KINDS:
        check(make(name, how, sizes, kind))


@CASES
def test_heads_of_one_channel(op, name, how):
    """Where many gradients are 0, as the norm of a number does not depend on it."""
    case = make(name, how, (5, 2, 1), ("fp32", "fp32"))
    results, grads, weights = layer_cases.differentiate(case, case.run)
    want, want_grads = layer_cases.exactly(case, weights)
    for found, x in [*zip(results, want, strict=True), *((grad, want_grads[own]) for own, grad in grads.items())]:
        torch.testing.assert_close(found.double(), x.double(), rtol=1e-3, atol=1e-3)


@CASES
def test_each_gradient_alone_is_the_same(op, name, how, guarded_memory):
    case = make(name, how, (130, 3, 64))
    _, every, weights = layer_cases.differentiate(case, case.run)
    for own, grad in every.items():
        _, some, _ = layer_cases.differentiate(case, case.run, weights, {own})
        assert torch.equal(some[own], grad)


@CASES
def test_results_that_nothing_is_made_of(op, name, how):
    case = make(name, how, (33, 3, 64), ("fp32", "fp32"))
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in case.tensors.items()}
    asked = [x for x in leaves.values() if x.requires_grad]
    found, plainly = (
        torch.autograd.grad(results[0].square().sum(), asked, allow_unused=True, materialize_grads=True)
        for results in (case.run(leaves), case.plainly(leaves))
    )
    for x, y in zip(found, plainly, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


@CASES
@pytest.mark.parametrize("how_given", ["wider", "elsewhere", "expanded"])
def test_any_strides_and_addresses(op, name, how, how_given):
    case = make(name, how, (24, 4, 64))
    moved = {}
    for own, x in case.tensors.items():
        if not x.is_floating_point():
            moved[own] = x
        elif how_given == "wider":
            moved[own] = torch.cat([x, x], -1)[..., : x.shape[-1]]
        elif how_given == "elsewhere":
            moved[own] = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
        else:
            moved[own] = x[:1].expand_as(x)
    check(case._replace(tensors=moved))


@CASES
def test_gradients_of_any_strides(op, name, how):
    case = make(name, how, (24, 4, 64))
    results, grads, weights = layer_cases.differentiate(case, case.run)
    wide = [torch.stack([w, w], -1)[..., 0] for w in weights]
    _, found, _ = layer_cases.differentiate(case, case.run, wide)
    for own, grad in grads.items():
        assert torch.equal(found[own], grad)
    ones = [torch.ones((), device="cuda", dtype=w.dtype).expand_as(w) for w in weights]
    check(case, lambda leaves: [x * one for x, one in zip(case.run(leaves), ones, strict=True)])


@CASES
def test_a_graph_of_both_directions(op, name, how):
    case = make(name, how, (24, 4, 64))
    leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in case.tensors.items()}
    asked = {n: x for n, x in leaves.items() if x.requires_grad}
    weights = [torch.randn_like(x) for x in case.run(leaves)]

    def step():
        return torch.autograd.grad(case.run(leaves), list(asked.values()), weights, allow_unused=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        for x in asked.values():
            x.copy_(torch.randn_like(x))
    graph.replay()
    for x, y in zip(made, step(), strict=True):
        assert torch.equal(x, y) if x is not None else y is None


@pytest.mark.parametrize("bounds", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_bounds_of_either_type_that_change(op, bounds, is_recorded, guarded_memory):
    case = make("token_shift", "3 packed first", (40, 2, 64))
    case = case._replace(tensors=case.tensors | {"cu_seqlens": torch.tensor([0, 9, 9, 40]).to("cuda", bounds)})
    case.tensors["first"] = case.tensors["first"][:3]
    for second in (9, 2, 30):
        case.tensors["cu_seqlens"][1] = min(second, 9)
        case.tensors["cu_seqlens"][2] = max(second, 9)
        if is_recorded:
            check(case)
        else:
            for found, x in zip(case.run(case.tensors), case.plainly(case.tensors), strict=True):
                assert comparing.relative(found, x) < LIMITS[found.dtype]


@pytest.mark.parametrize("name", ["prepare_keys", "gated_norm", "token_shift", "norm_shift"])
def test_one_result_from_run_to_run(op, name):
    case = make(name, layer_cases.WAYS[name][-1], (3000, 4, 64))
    _, first, weights = layer_cases.differentiate(case, case.run)
    for _ in range(3):
        _, again, _ = layer_cases.differentiate(case, case.run, weights)
        for own, grad in first.items():
            assert torch.equal(again[own], grad)


def test_keys_of_zeros(op):
    """Their length counts as 1e-12, in gradients too, which are those of torch on the CPU."""
    case = make("prepare_keys", "a0", (9, 3, 64), ("fp32", "fp32"))
    case.tensors["k"][4] = 0
    _, grads, weights = layer_cases.differentiate(case, case.run)
    on_cpu = case._replace(tensors={own: x.cpu() for own, x in case.tensors.items()})
    _, want, _ = layer_cases.differentiate(on_cpu, on_cpu.run, [w.cpu() for w in weights])
    for own, grad in grads.items():
        # Of a sum of numbers near 1e12 next to nothing may be left, but not of their roundings: for such a row alone
        # 1e-6 of its largest number is nothing.
        largest = want[own].abs().amax(-1, keepdim=True)
        size = torch.where(largest > 1e6, largest / 100, torch.ones_like(largest))
        torch.testing.assert_close(grad.cpu() / size, want[own] / size, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_far_out(op, dtype):
    x = torch.tensor([-1e30, -100.0, -0.0, 0.0, 100.0, 1e15], device="cuda", dtype=dtype).requires_grad_()
    for kind in ("tanh", "sigmoid", "relu_squared", "identity"):
        y = rwkv_jit.activate(x, kind)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert not bool(grad.isnan().any())
    for gate in ("sigmoid", "silu"):
        y = rwkv_jit.gated(torch.ones_like(x), x, gate)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert not bool(grad.isnan().any())


@pytest.mark.parametrize("how", layer_cases.WAYS["norm_shift"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixes_of_16_bits_beside_a_residual_of_float32(op, how, dtype, guarded_memory):
    case = make("norm_shift", how, (130, 3, 64), ("fp32", "fp32"))
    narrow = {own: x.to(dtype) if own in ("add", "first") else x for own, x in case.tensors.items()}
    case = case._replace(tensors=narrow, options={"dtype": dtype})
    results, grads, weights = layer_cases.differentiate(case, case.run)
    want, want_grads = layer_cases.exactly(case, weights)
    assert [x.dtype for x in results] == [torch.float32, *[dtype] * (len(results) - 1)]
    for found, x in zip(results, want, strict=True):
        assert comparing.relative(found, x) < LIMITS[found.dtype]
    for own, grad in grads.items():
        assert grad.dtype == case.tensors[own].dtype
        assert comparing.relative(grad, want_grads[own]) < LIMITS[dtype], own


@pytest.mark.parametrize("channels", [1000, 2560, 8192])
@pytest.mark.parametrize("how", ["6", "1 add first", "6 add packed first"])
def test_rows_that_are_too_wide_for_the_registers(op, channels, how, guarded_memory):
    for kind in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")):
        check(make("norm_shift", how, (50, 1, channels), kind))


def test_norm_of_values_far_from_zero(op):
    """The variance is that of what is left without the mean."""
    x = (1000 + torch.randn(3, 40, 2048, device="cuda")).requires_grad_()
    weight, bias, mixes = (torch.randn(*shape, 2048, device="cuda") for shape in ((), (), (2,)))
    found = rwkv_jit.norm_shift(x, weight, bias, mixes)
    want = rwkv_jit.norm_shift_ref(*(y.double() for y in (x, weight, bias, mixes)))
    for y, exact in zip((*found[1], found[2]), (*want[1], want[2]), strict=True):
        assert comparing.relative(y, exact) < 1e-3


def test_texts_without_tokens_keep_their_last_one(op):
    weight, bias, mixes = (torch.randn(*shape, 64, device="cuda") for shape in ((), (), (3,)))
    first = torch.randn(2, 64, device="cuda", requires_grad=True)
    last = rwkv_jit.norm_shift(torch.zeros(2, 0, 64, device="cuda"), weight, bias, mixes, first=first)[2]
    assert torch.equal(last, first)
    (grad,) = torch.autograd.grad(last.sum(), first)
    assert torch.equal(grad, torch.ones_like(first))


@pytest.mark.parametrize(
    ("name", "how"),
    [("token_shift", "6 packed first"), ("gated_norm", "bias bonus"), ("norm_shift", "6 add packed first")],
)  # fmt: skip
def test_compiled(op, name, how):
    case = make(name, how, (33, 3, 64))
    compiled = torch.compile(lambda given: case.run(given), fullgraph=True)
    want, grads, weights = layer_cases.differentiate(case, case.run)
    found, own, _ = layer_cases.differentiate(case, compiled, weights)
    for x, y in zip([*want, *grads.values()], [*found, *own.values()], strict=True):
        assert torch.equal(x, y)
