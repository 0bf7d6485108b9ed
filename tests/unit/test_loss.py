"""The loss of training without a GPU: values and gradients in plain torch, what is checked, what is launched."""

import math

import plain_loss
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rwkv_jit
from rwkv_jit.desk import kernel_table
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.layers import loss_ops as loss_module
from rwkv_jit.schedules import loss as loss_steps
from rwkv_jit.schedules.loss import Given

B, T, C, V = 2, 3, 5, 11
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
DTYPE = pytest.mark.parametrize("dtype", LIMITS)
OPS = torch.ops.rwkv_jit


def check(x, want, times=1, least=1e-3):
    x, want = x.detach(), want.detach()
    assert x.shape == want.shape
    assert float((x.double() - want).norm()) <= times * LIMITS[x.dtype] * max(float(want.norm()), least)


def check_loss(loss, want, limit=0.0):
    """Each is a difference of numbers of about 1 or more."""
    assert loss.shape == want.shape
    off = (loss.detach().double() - want.detach()).abs() / want.detach().abs().clamp_min(1)
    assert bool((off <= max(limit, LIMITS[loss.dtype])).all())


def make_logits(shape=(B, T, V), dtype=torch.float32, requires_grad=True):
    return (3 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_(requires_grad)


def make_targets(shape=(B, T), classes=V, ignored=0):
    targets = torch.randint(classes, shape)
    targets.view(-1)[:ignored] = -100
    return targets


def make_linear(dtype=torch.float32, shape=(B, T), has_bias=True):
    """The inputs of `linear_cross_entropy` but for the targets, by name."""
    made = {"hidden": torch.randn(*shape, C), "weight": torch.randn(V, C)}
    made |= {"bias": torch.randn(V)} if has_bias else {}
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


# ---- values ------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(data=st.data())
def test_loss_and_gradient(data):
    shape = data.draw(st.sampled_from([(), (1,), (7,), (2, 3), (2, 1, 2)]))
    classes, dtype = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(list(LIMITS)))
    logits = make_logits((*shape, classes), dtype)
    ignore_index = data.draw(st.sampled_from([-100, -1, 0, 5, 2**31 - 1]))
    targets = make_targets(shape, classes).to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    if data.draw(st.booleans()) and targets.numel() > 1:
        targets.view(-1)[0] = ignore_index
    options = {"l2_wrap": data.draw(st.sampled_from([0.0, 1e-4, 1])), "ignore_index": ignore_index}
    options["reduction"] = data.draw(st.sampled_from(["mean", "sum", "none"]))
    loss = rwkv_jit.cross_entropy(logits, targets, **options)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    weights = torch.randn(loss.shape, dtype=loss.dtype)
    is_counted = (targets != ignore_index).any()
    if not is_counted and options["reduction"] == "mean":
        assert loss.isnan()
        loss.backward()
        assert not logits.grad.any()
        return
    want, gradient = plain_loss.cross_entropy(logits, targets, weights=weights, **options)
    check_loss(loss, want)
    scale = weights if options["reduction"] == "none" else torch.ones(())
    (loss * scale).sum().backward()
    assert logits.grad.dtype == dtype
    check(logits.grad, gradient, least=float(scale.abs().max()))  # a likely target's is 1 less a number near 1


@DTYPE
def test_as_torch_has_it_with_a_term_for_the_largest_logit(dtype):
    """The definition by another way: of a loss that torch differentiates, whose value is left as it is."""
    logits, targets = make_logits((9, V), dtype), make_targets((9,), ignored=2)
    other = logits.detach().double().requires_grad_()
    want = F.cross_entropy(other, targets)
    (5 * (want + 0.3 / 2 * other.max(-1).values[2:].square().mean())).backward()
    loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.3)
    check_loss(loss, want)
    (5 * loss).backward()
    check(logits.grad, other.grad)


def test_the_first_of_equal_logits_is_pulled():
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0]], requires_grad=True)
    for c in (0.0, 0.5):
        rwkv_jit.cross_entropy(logits, torch.tensor([0]), l2_wrap=c).backward()
    once = torch.autograd.grad(rwkv_jit.cross_entropy(logits, torch.tensor([0])), logits)[0]
    torch.testing.assert_close(logits.grad - 2 * once, torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]))


def test_logits_far_out():
    inf = math.inf
    logits = torch.tensor([[1e30, -1e30], [-inf, 2.0], [-3e38, 3e38], [0.0, -inf], [-inf, -inf], [inf, 0.0]])
    targets = torch.tensor([0, 1, 1, 1, 0, 1])
    loss = rwkv_jit.cross_entropy(logits, targets, reduction="none")
    assert loss[:4].tolist() == [0, 0, 0, inf]
    assert not loss[4].isfinite()
    assert not loss[5].isfinite()


def test_rows_that_do_not_count_are_not_looked_at():
    logits, targets = make_logits((4, V)), make_targets((4,), ignored=2)
    with torch.no_grad():
        logits[:2] = math.nan
    loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1)
    loss.backward()
    want, gradient = plain_loss.cross_entropy(logits[2:], targets[2:], l2_wrap=0.1)
    check_loss(loss, want)
    check(logits.grad[2:], gradient)
    assert not logits.grad[:2].any()


@DTYPE
@pytest.mark.parametrize("shape", [(0,), (B, T)], ids=["no rows", "no targets"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_without_rows_that_count(shape, dtype, is_compiled):
    """As torch has it: the mean is NaN, and its gradient zeros, so that such a micro-batch leaves a step as it is."""
    torch._dynamo.reset()
    targets = make_targets(shape, ignored=B * T)
    for name, inputs in (
        ("cross_entropy", {"logits": make_logits((*shape, V), dtype)}),
        ("linear_cross_entropy", make_linear(dtype, shape)),
    ):
        function = getattr(rwkv_jit, name)
        function = torch.compile(function, fullgraph=True, backend="aot_eager") if is_compiled else function
        for reduction, want in (("sum", 0.0), ("mean", math.nan)):
            loss = function(**inputs, targets=targets, reduction=reduction, l2_wrap=0.1)
            want = torch.tensor(want, dtype=torch.promote_types(dtype, torch.float32))
            torch.testing.assert_close(loss, want, equal_nan=True)
            for x, grad in zip(inputs.values(), torch.autograd.grad(loss, [*inputs.values()]), strict=True):
                assert torch.equal(grad, torch.zeros_like(x)), (name, reduction)
    assert rwkv_jit.cross_entropy(make_logits((0, V)), make_targets((0,)), reduction="none").shape == (0,)


def test_logits_that_lie_elsewhere():
    logits, targets = make_logits((V, T, B)), make_targets((B, T))
    rows = logits.permute(2, 1, 0)
    assert not rows.is_contiguous()
    loss = rwkv_jit.cross_entropy(rows, targets.T.contiguous().T)
    loss.backward()
    want, gradient = plain_loss.cross_entropy(rows, targets)
    check_loss(loss, want)
    check(logits.grad.permute(2, 1, 0), gradient)


# ---- hidden states -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_loss_of_hidden_states_by_chunks(data):
    shape, dtype = data.draw(st.sampled_from([(), (6,), (2, 5)])), data.draw(st.sampled_from(list(LIMITS)))
    linear = make_linear(dtype, shape, data.draw(st.booleans()))
    wanted = [name for name in linear if data.draw(st.booleans())]
    for name, x in linear.items():
        x.requires_grad_(name in wanted)
    targets = make_targets(shape, ignored=data.draw(st.integers(0, 1)) if shape else 0)
    options = {"l2_wrap": data.draw(st.sampled_from([0.0, 0.1])), "ignore_index": -100}
    options["reduction"] = data.draw(st.sampled_from(["mean", "sum"]))
    chunk_rows = data.draw(st.sampled_from([None, 1, 2, 4, 6, 100]))
    loss = rwkv_jit.linear_cross_entropy(**linear, targets=targets, chunk_rows=chunk_rows, **options)
    want, gradients = plain_loss.linear_cross_entropy(**linear, targets=targets, **options)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    check_loss(loss, want, LIMITS[dtype])
    assert loss.requires_grad == bool(wanted)
    if wanted:
        (3 * loss).backward()
    for (name, x), gradient in zip(linear.items(), gradients, strict=False):
        assert (x.grad is None) == (name not in wanted)
        if name in wanted:
            assert x.grad.dtype == dtype
            check(x.grad, 3 * gradient, 3)  # as the gradient of logits is rounded too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_chunks_give_the_same(dtype):
    linear, targets = make_linear(dtype, (64,)), make_targets((64,), ignored=3)
    found = []
    for chunk_rows in (None, 64, 7, 1):
        loss = rwkv_jit.linear_cross_entropy(**linear, targets=targets, l2_wrap=0.1, chunk_rows=chunk_rows)
        found.append((loss, *torch.autograd.grad(loss, [*linear.values()])))
    logits = F.linear(linear["hidden"], linear["weight"], linear["bias"])
    loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1)
    found.append((loss, *torch.autograd.grad(loss, [*linear.values()])))
    for other in found[1:]:
        for x, want in zip(other, found[0], strict=True):
            check(x, want.double(), 3)


def test_sums_over_chunks_keep_their_digits():
    """A sum of 16 bits loses what is below the 256th part of it; each chunk of one row adds about the 4096th."""
    rows = 4096
    hidden, weight = torch.ones(rows, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    bias = torch.zeros(2).bfloat16().requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64)
    rwkv_jit.linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="sum", chunk_rows=1).backward()
    assert weight.grad.flatten().tolist() == bias.grad.tolist() == [-rows / 2, rows / 2]


def test_gradients_of_a_mean_stay_in_the_range_of_float16():
    """A row's part is below it; the sum of many rows is above."""
    rows = 2**16
    targets = torch.zeros(rows, dtype=torch.int64)
    for size, values in ((1.0, [5.0, -3.0]), (60.0, [0.0, 0.0])):
        hidden = torch.full((rows, 1), size).half().requires_grad_()
        weight = torch.tensor(values).half()[:, None].requires_grad_()
        loss = rwkv_jit.linear_cross_entropy(hidden, weight, targets)
        (256 * loss).backward()
        want = 256 * size * torch.sigmoid(torch.tensor(size * (values[1] - values[0])).double())
        assert float(want) > 0.08
        check(weight.grad, torch.stack([-want, want])[:, None], 2)


@pytest.fixture
def wide_products(monkeypatch, on_gpu):
    """Products of 16 bits that are added up in float32, as torch has them on GPUs from 2.8 on: what they added to."""
    real, betas = torch.addmm, []

    def addmm(total, a, b, out_dtype=None, *, beta=1, out=None):
        if out_dtype is None:
            return real(total, a, b, beta=beta, out=out)
        assert (out_dtype, total.dtype) == (torch.float32,) * 2
        betas.append(int(beta))
        return real(total, a.float(), b.float(), beta=beta, out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    loss_module._adds_in_float32.cache_clear()
    yield betas
    loss_module._adds_in_float32.cache_clear()


def summed(chunks, dtype, size=1.0):
    """The sum of products over chunks of rows, where NaN stood before, and the same in float64."""
    gradient, own = (torch.randn(12 * chunks, n, dtype=torch.float64).mul(size).to(dtype) for n in (V, C))
    total = torch.full((V, C), math.nan)
    for i in range(chunks):
        chunk = slice(12 * i, 12 * i + 12)
        loss_module._add_product(total, gradient[chunk], own[chunk], is_first=not i)
    return total, gradient.double().T @ own.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunks", [1, 3])
def test_products_are_added_up_in_float32(chunks, dtype, wide_products):
    """One that is rounded to 16 bits first is off by a thousand times as much; float16 has no number above 65504."""
    total, want = summed(chunks, dtype, 100.0)
    torch.testing.assert_close(total.double(), want, rtol=0, atol=1e-6 * float(want.abs().max()))
    is_narrow = dtype != torch.float32
    assert wide_products == [1, 0, *[1] * (chunks - 1)] * is_narrow  # with the product that shows whether torch does
    summed(1, dtype)
    assert wide_products[chunks + 1 :] == [0] * is_narrow  # which is looked at once


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_products_where_torch_does_not_add_in_float32(dtype, error, on_gpu, monkeypatch):
    def addmm(*_, **__):
        raise error

    monkeypatch.setattr(torch, "addmm", addmm)
    loss_module._adds_in_float32.cache_clear()
    for chunks in (1, 3):
        total, want = summed(chunks, dtype)
        torch.testing.assert_close(total.double(), want, rtol=0, atol=LIMITS[dtype] * float(want.abs().max()))
    loss_module._adds_in_float32.cache_clear()


def test_chunks_have_256_mib_of_logits_and_256_rows_at_least(monkeypatch):
    seen, losses = [], loss_module._losses

    def note(logits, *rest):
        seen.append(len(logits))
        return losses(logits, *rest)

    monkeypatch.setattr(loss_module, "_losses", note)
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", 4 * V * 600)
    linear, targets = make_linear(shape=(1100,)), make_targets((1100,))
    rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    assert seen == [512, 512, 76]
    seen.clear()
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", 1)
    rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    assert seen == [256, 256, 256, 256, 76]
    monkeypatch.undo()
    assert loss_module._CHUNK_BYTES == 256 * 2**20


def test_nothing_is_differentiated_without_gradients(monkeypatch):
    monkeypatch.setattr(loss_module, "_gradient", None)
    linear, targets = make_linear(), make_targets()
    with torch.no_grad():
        loss = rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    detached = {name: x.detach() for name, x in linear.items()}
    assert torch.equal(rwkv_jit.linear_cross_entropy(**detached, targets=targets), loss)
    with pytest.raises(TypeError, match="not callable"):
        rwkv_jit.linear_cross_entropy(**linear, targets=targets)


# ---- torch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2_wrap", [0.0, 0.1])
def test_torch_accepts_the_ops(l2_wrap):
    logits, targets = make_logits((6, V)), make_targets((6,), ignored=1)
    torch.library.opcheck(OPS.cross_entropy_fwd.default, (logits, targets, -100, l2_wrap, False))
    _, lse, argmax = OPS.cross_entropy_fwd(logits, targets, -100, l2_wrap, False)
    arguments = logits.detach(), targets, lse, argmax, torch.ones(6), -100, l2_wrap
    torch.library.opcheck(OPS.cross_entropy_bwd.default, arguments)
    linear = make_linear(shape=(6,))
    hidden, weight, bias = linear.values()
    for own, *wanted in ((bias, True, True, True), (None, True, False, False), (None, False, True, False)):
        given = hidden.detach().requires_grad_(wanted[0]), weight.detach().requires_grad_(wanted[1]), own
        torch.library.opcheck(OPS.linear_cross_entropy_fwd.default, (*given, targets, -100, l2_wrap, 4, *wanted, False))
        _, *made = OPS.linear_cross_entropy_fwd(*given, targets, -100, l2_wrap, 0, *wanted, False)
        made = [x.detach() for x in made]
        torch.library.opcheck(OPS.linear_cross_entropy_bwd.default, (*made, torch.tensor(2.0)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic):
    def losses(hidden, weight, bias, targets):
        by_chunks = rwkv_jit.linear_cross_entropy(hidden, weight, targets, bias=bias, l2_wrap=0.1, chunk_rows=4)
        logits = F.linear(hidden, weight, bias)
        rows = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.2, reduction="none")
        return by_chunks * 2 + rwkv_jit.cross_entropy(logits, targets) + rows.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (6, 9, 3) if dynamic else (6,):
        linear, targets = make_linear(shape=(rows,)), make_targets((rows,), ignored=1)
        found, want = (f(*linear.values(), targets) for f in (compiled, losses))
        assert torch.equal(found, want)
        gradients = [torch.autograd.grad(loss, [*linear.values()]) for loss in (found, want)]
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y)


def test_a_compiled_function_checks_targets_when_it_runs():
    torch._dynamo.reset()
    compiled = torch.compile(rwkv_jit.cross_entropy, fullgraph=True, backend="aot_eager")
    compiled(make_logits((4, V)), make_targets((4,)))
    with pytest.raises(ValueError, match=r"targets: expected 0 to 10, or -100 for rows that do not count; got \[11\]"):
        compiled(make_logits((4, V)), torch.tensor([0, 11, -100, 2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    linear, targets = make_linear(), make_targets()
    narrow = {name: x.detach().to(dtype).requires_grad_() for name, x in linear.items()}
    want = rwkv_jit.linear_cross_entropy(**narrow, targets=targets)
    wanted = torch.autograd.grad(want, [*narrow.values()])
    with torch.autocast("cpu", dtype):
        found = rwkv_jit.linear_cross_entropy(**linear, targets=targets)
        logits = F.linear(linear["hidden"], linear["weight"], linear["bias"])
        assert logits.dtype == dtype
        torch.testing.assert_close(rwkv_jit.cross_entropy(logits, targets), want)
        wide = make_logits()
        loss = rwkv_jit.cross_entropy(wide, targets)
    assert torch.equal(found, want)
    assert torch.equal(loss, rwkv_jit.cross_entropy(wide, targets))
    gradients = torch.autograd.grad(found, [*linear.values()])
    for x, y in zip(gradients, wanted, strict=True):
        assert (x.dtype, y.dtype) == (torch.float32, dtype)
        assert torch.equal(x, y.float())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    linear, targets = make_linear(), make_targets()

    def losses(hidden, weight, bias):
        logits = F.linear(hidden, weight, bias)
        loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1)
        return loss + rwkv_jit.linear_cross_entropy(hidden, weight, targets, bias=bias, l2_wrap=0.1)

    wanted = torch.autograd.grad(losses(*linear.values()), [*linear.values()])
    checkpoint(losses, *linear.values(), use_reentrant=use_reentrant).backward()
    for x, want in zip(linear.values(), wanted, strict=True):
        assert torch.equal(x.grad, want)


def test_a_graph_is_differentiated_twice():
    """What the forward has made is still there."""
    linear, targets = make_linear(), make_targets()
    loss = rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    first, second = (torch.autograd.grad(loss, [*linear.values()], retain_graph=True) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_second_derivative_is_an_error(name):
    linear, targets = make_linear(torch.float64), make_targets()
    if name == "cross_entropy":
        loss = rwkv_jit.cross_entropy(linear["hidden"], make_targets(classes=C))
    else:
        loss = rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    loss = loss + linear["hidden"].square().sum()
    (gradient,) = torch.autograd.grad(loss, linear["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{name} has no second derivative"):
        gradient.sum().backward()


def test_derivatives_in_forward_mode_are_errors():
    hidden, weight = (x.detach() for x in make_linear(shape=(6,), has_bias=False).values())
    targets = make_targets((6,), classes=C)
    for name, loss in (
        ("cross_entropy", lambda hidden: rwkv_jit.cross_entropy(hidden, targets)),
        ("linear_cross_entropy", lambda hidden: rwkv_jit.linear_cross_entropy(hidden, weight, targets)),
    ):
        with pytest.raises(RuntimeError, match=f"^{name} has no forward-mode derivative"):
            torch.func.jvp(loss, (hidden,), (hidden,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(hidden, hidden)
            with pytest.raises(RuntimeError, match=f"^{name} has no forward-mode derivative"):
                loss(dual)
            assert torch.equal(loss(hidden), loss(hidden.clone()))


def test_fakes_of_cuda_tensors():
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, C, dtype=torch.bfloat16, device="cuda") for n in (6, V))
        targets = torch.empty(6, dtype=torch.int64, device="cuda")
        for loss in (
            rwkv_jit.linear_cross_entropy(hidden, weight, targets),
            rwkv_jit.cross_entropy(hidden, targets, l2_wrap=0.1),
        ):
            assert (loss.shape, loss.dtype, loss.device.type) == ((), torch.float32, "cuda")


def test_a_gradient_that_the_forward_did_not_make_is_an_error():
    hidden, weight, bias = make_linear(shape=(6,)).values()
    total, *_ = OPS.linear_cross_entropy_fwd(
        hidden, weight, bias, make_targets((6,)), -100, 0.0, 0, True, False, True, True
    )
    with pytest.raises(RuntimeError, match="linear_cross_entropy: the forward computes the gradient of weight"):
        total.backward()


def test_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    linear, targets = make_linear(), make_targets()
    counts = []
    for wanted in (("hidden", "weight", "bias"), ("weight",), ()):
        for name, x in linear.items():
            x.requires_grad_(name in wanted)
        with FlopCounterMode(display=False) as counter:
            rwkv_jit.linear_cross_entropy(**linear, targets=targets)
        counts.append(counter.get_total_flops())
    product = 2 * B * T * C * V
    assert counts == [3 * product, 2 * product, product]


def test_arrays_of_other_libraries():
    logits, targets = make_logits(requires_grad=False), make_targets()
    want = rwkv_jit.cross_entropy(logits, targets)
    assert torch.equal(rwkv_jit.cross_entropy(logits.numpy(), targets.numpy()), want)
    linear = {name: x.detach() for name, x in make_linear().items()}
    want = rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    arrays = {name: x.numpy() for name, x in linear.items()}
    assert torch.equal(rwkv_jit.linear_cross_entropy(**arrays, targets=targets.numpy()), want)


# ---- faults ------------------------------------------------------------------------------------------------------

ZEROS = torch.zeros
FAULTS = [
    ("both", TypeError, r"targets: expected torch.int32 or torch.int64, got torch.float32", {"targets": ZEROS(B, T)}),
    ("both", ValueError, r"targets: expected shape \[2, 3\], got \[6\]", {"targets": ZEROS(B * T).long()}),
    ("both", ValueError, r"targets: expected 0 to 10, or -100 .* got \[-1, 11\]",
     {"targets": torch.tensor([[0, -1, 2], [11, -100, 10]])}),
    ("both", ValueError, "targets: expected 0 to 10, or 5 for",
     {"targets": ZEROS(B, T).int() - 100, "ignore_index": 5}),
    ("both", TypeError, "targets: expected a torch.Tensor or an array", {"targets": None}),
    ("both", ValueError, "l2_wrap: expected a finite number, got nan", {"l2_wrap": math.nan}),
    ("both", ValueError, "l2_wrap: expected a finite number, got None", {"l2_wrap": None}),
    ("both", ValueError, "l2_wrap: expected at least 0, got -0.1", {"l2_wrap": -0.1}),
    ("both", TypeError, "ignore_index: expected an int of 32 bits, got None", {"ignore_index": None}),
    ("both", TypeError, "ignore_index: expected an int of 32 bits, got 2147483648", {"ignore_index": 2**31}),
    ("both", TypeError, "ignore_index: expected an int of 32 bits, got True", {"ignore_index": True}),
    ("cross_entropy", ValueError, "reduction: expected one of mean, sum, none, got 'max'", {"reduction": "max"}),
    ("linear_cross_entropy", ValueError, "reduction: expected one of mean, sum, got 'none'", {"reduction": "none"}),
    ("cross_entropy", ValueError, r"logits: expected shape \[..., classes\], got \[\]", {"logits": ZEROS(())}),
    ("cross_entropy", ValueError, r"logits: expected shape \[..., classes\], got \[2, 0\]", {"logits": ZEROS(2, 0)}),
    ("cross_entropy", TypeError, "logits: expected torch.float16 or .*, got torch.int64", {"logits": ZEROS(2).long()}),
    ("cross_entropy", TypeError, "logits: expected a torch.Tensor or an array", {"logits": [1.0]}),
    ("linear_cross_entropy", ValueError, r"hidden: expected shape \[..., channels\], got \[2, 0\]",
     {"hidden": ZEROS(2, 0)}),
    ("linear_cross_entropy", TypeError, "hidden: expected torch.float16 or .*, got torch.int64",
     {"hidden": ZEROS(B, T, C).long()}),
    ("linear_cross_entropy", ValueError, r"weight: expected shape \[classes, 5\], got \[5, 11\]",
     {"weight": ZEROS(C, V)}),
    ("linear_cross_entropy", ValueError, r"weight: expected shape \[classes, 5\], got \[0, 5\]",
     {"weight": ZEROS(0, C)}),
    ("linear_cross_entropy", TypeError, "weight: expected torch.float32, got torch.bfloat16",
     {"weight": ZEROS(V, C).bfloat16()}),
    ("linear_cross_entropy", ValueError, r"bias: expected shape \[11\], got \[5\]", {"bias": ZEROS(C)}),
    ("linear_cross_entropy", TypeError, "bias: expected torch.float32, got torch.float16", {"bias": ZEROS(V).half()}),
    ("linear_cross_entropy", TypeError, "chunk_rows: expected an int, got 2.0", {"chunk_rows": 2.0}),
    ("linear_cross_entropy", ValueError, "chunk_rows: expected at least 1, got 0", {"chunk_rows": 0}),
]  # fmt: skip
CALLS = {
    "cross_entropy": lambda: {"logits": make_logits(), "targets": make_targets()},
    "linear_cross_entropy": lambda: {**make_linear(), "targets": make_targets()},
}


@pytest.mark.parametrize(("name", "error", "message", "change"), FAULTS, ids=[f"{x[0]}-{x[2][:30]}" for x in FAULTS])
def test_what_does_not_fit(name, error, message, change):
    for each in CALLS if name == "both" else [name]:
        with pytest.raises(error, match=f"^{message}"):
            getattr(rwkv_jit, each)(**(CALLS[each]() | change))


# ---- launches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2_wrap", [0.0, 0.5])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_launch_for_each_direction(on_gpu, l2_wrap, index):
    logits, targets = make_logits((B, T, V), torch.bfloat16), make_targets().to(index)
    for _ in range(2):
        loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=l2_wrap, ignore_index=7, reduction="none")
        (forward,) = on_gpu.take()
        assert (forward.template, forward.grid) == ("layer_loss_forward", (B * T, 1, 1))
        passed = forward.named
        assert (passed["logits"], passed["targets"]) == (logits.data_ptr(), targets.data_ptr())
        assert (passed["loss"], passed["columns"], passed["ignore_index"]) == (loss.data_ptr(), V, 7)
        assert bool(passed["argmax"]) == bool(l2_wrap)
        expected = {"TARGET_BYTES": index.itemsize, "HAS_ARGMAX": bool(l2_wrap), "T_IO": "bf16"}
        assert {name: forward.parameters[name] for name in expected} == expected
        weights = torch.rand(B, T)
        (gradient,) = torch.autograd.grad(loss, logits, weights)
        (backward,) = on_gpu.take()
        assert (backward.template, backward.grid) == ("layer_loss_backward", (B * T, 1, 1))
        same = ("logits", "targets", "lse", "argmax", "columns", "ignore_index")
        assert {name: backward.named[name] for name in same} == {name: passed[name] for name in same}
        assert (backward.named["scale"], backward.named["dlogits"]) == (weights.data_ptr(), gradient.data_ptr())
        assert backward.named["l2_wrap"] == l2_wrap
        assert {name: backward.parameters[name] for name in expected} == expected


def test_chunks_are_differentiated_where_they_are(on_gpu):
    """With a buffer of logits and the kernel of two signatures; without gradients that of losses alone."""
    linear, targets = make_linear(torch.float16, (10,)), make_targets((10,))
    for _ in range(2):
        rwkv_jit.linear_cross_entropy(**linear, targets=targets, chunk_rows=4, l2_wrap=0.5)
        launches = on_gpu.take()
        assert [x.template for x in launches] == ["layer_loss_in_place"] * 3
        assert [x.grid[0] for x in launches] == [4, 4, 2]
        assert len({x.named["logits"] for x in launches}) == 1
        begins = [(x.named["targets"] - targets.data_ptr()) // 8 for x in launches]
        assert begins == [0, 4, 8]
        assert {x.named["l2_wrap"] for x in launches} == {0.5}
    assert len(on_gpu.asked) == 1
    with torch.no_grad():
        rwkv_jit.linear_cross_entropy(**linear, targets=targets, chunk_rows=4)
    assert [x.template for x in on_gpu.take()] == ["layer_loss_forward"] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_backward_is_a_launch_for_each_gradient(dtype, on_gpu):
    linear, targets = make_linear(dtype, (16,)), make_targets((16,))
    loss = rwkv_jit.linear_cross_entropy(**linear, targets=targets)
    on_gpu.take()
    scale = torch.tensor(0.3)
    grads = torch.autograd.grad(loss, [*linear.values()], scale)
    launches = on_gpu.take()
    assert {x.template for x in launches} == {"layer_loss_gradients"}
    storage = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    for launch, grad, types in zip(launches, grads, [storage, "fp32", "fp32"], strict=True):
        assert grad.dtype == dtype
        assert (launch.named["y"], launch.named["count"]) == (grad.data_ptr(), grad.numel())
        assert [launch.parameters[x] for x in ("T_X", "T_IO")] == [types, storage]
        vector = launch.parameters["VECTOR"]
        assert grad.numel() % vector == 0
        assert launch.grid[0] * launch.parameters["NUM_THREADS"] * vector >= grad.numel()


def test_nothing_is_launched_for_nothing(on_gpu):
    logits, linear, targets = make_logits((0, V)), make_linear(shape=(0,)), make_targets((0,))
    rwkv_jit.cross_entropy(logits, targets, reduction="sum", l2_wrap=0.1).backward()
    assert not on_gpu.take()
    assert not on_gpu.asked
    rwkv_jit.linear_cross_entropy(**linear, targets=targets, reduction="sum").backward()
    assert [x.named["count"] for x in on_gpu.take()] == [V * C, V]  # zeros of weight and bias


def test_logits_that_begin_elsewhere_are_copied(on_gpu):
    logits, targets = torch.zeros(6 * V + 1)[1:].view(6, V), make_targets((6,))
    read = []
    on_gpu.while_running = lambda launch: read.append(launch.named["logits"])
    rwkv_jit.cross_entropy(logits, targets)
    assert read[0] % 16 == 0
    assert read[0] != logits.data_ptr()


def test_targets_on_a_gpu_are_looked_at_when_asked(on_gpu, monkeypatch):
    wrong = torch.tensor([0, V, -100])
    linear = make_linear(shape=(3,))
    rwkv_jit.cross_entropy(make_logits((3, V)), wrong)
    rwkv_jit.linear_cross_entropy(**linear, targets=wrong)
    assert len(on_gpu.take()) == 2
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    for call in (
        lambda: rwkv_jit.cross_entropy(make_logits((3, V)), wrong),
        lambda: rwkv_jit.linear_cross_entropy(**linear, targets=wrong),
    ):
        with pytest.raises(ValueError, match=r"targets: expected 0 to 10, .* got \[11\]"):
            call()
    assert not on_gpu.take()


def test_float64_is_for_the_cpu(on_gpu):
    with pytest.raises(TypeError, match="logits: expected torch.float16 or .*, got torch.float64"):
        rwkv_jit.cross_entropy(make_logits(dtype=torch.float64), make_targets())
    with pytest.raises(TypeError, match="hidden: expected torch.float16 or .*, got torch.float64"):
        rwkv_jit.linear_cross_entropy(**make_linear(torch.float64), targets=make_targets())


def test_first_call_in_a_capture_is_an_error(on_gpu):
    on_gpu.capturing = True
    with pytest.raises(rwkv_jit.RwkvJitError, match="cross_entropy: first use inside a CUDA graph capture"):
        rwkv_jit.cross_entropy(make_logits(), make_targets())
    on_gpu.capturing = False
    rwkv_jit.cross_entropy(make_logits(), make_targets())
    on_gpu.capturing = True
    rwkv_jit.cross_entropy(make_logits(), make_targets())


@settings(max_examples=200)
@given(st.integers(1, 200_000), st.sampled_from(["bf16", "fp16", "fp32"]))
def test_accesses_have_16_bytes_and_threads_a_row(columns, storage):
    for direction, most in (("forward", 512), ("backward", 512), ("in_place", 1024)):
        schedule = loss_steps.DIRECTIONS[direction](Given(Gpu("sm_90"), storage, 3, columns))
        (step,) = schedule.launches
        vector, threads = step.parameters["VECTOR"], step.parameters["NUM_THREADS"]
        assert vector * (4 if storage == "fp32" else 2) == 16
        assert schedule.vectors == {"logits": vector}
        assert threads in (32, 64, 128, 256, 512, most)
        assert threads == most or threads * vector >= columns  # no thread has two pieces while others have none
        assert threads == 32 or threads * vector < 2 * (columns + vector)
        assert step.grid == (3, 1, 1)


def test_lists_say_the_direction():
    for name, direction in (("forward", "forward"), ("backward", "backward"), ("gradients", "backward")):
        assert kernel_table.described(f"layer_loss_{name}", {"T_IO": "bf16"})["direction"] == direction
