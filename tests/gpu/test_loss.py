"""The loss of training on the GPU against float64: values, gradients, and what must be left alone."""

import comparing
import plain_loss
import pytest
import torch
from torch.nn import functional as F

import rwkv_jit

DTYPES = comparing.DTYPES
LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Odd ones have rows that begin anywhere; some are of one thread, of a part of a block, and of several rounds of it.
CLASSES = [1, 2, 3, 7, 8, 9, 31, 257, 1000, 1001, 4095, 5003, 16_392, 50_277, 65_529, 65_536, 65_537]
pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def make_logits(*shape, dtype="fp32", size=4.0):
    return (size * torch.randn(shape, device="cuda")).to(DTYPES[dtype]).requires_grad_()


def make_targets(*shape, classes, ignored=0, index=torch.int64):
    targets = torch.randint(classes, shape, device="cuda").to(index)
    targets.view(-1)[:ignored] = -100
    return targets


def make_linear(dtype, rows, channels, classes):
    """Logits of about 1, whose error from rounding is that of the products."""
    made = {"hidden": torch.randn(rows, channels), "weight": torch.randn(classes, channels) / channels**0.5}
    made["bias"] = torch.randn(classes)
    return {name: x.cuda().to(DTYPES[dtype]).requires_grad_() for name, x in made.items()}


def check_loss(loss, want, limit=5e-6):
    assert loss.shape == want.shape
    assert loss.dtype == torch.float32
    off = (loss.detach().double() - want).abs() / want.abs().clamp_min(1)
    assert bool((off < limit).all())


def check(x, want, times=1):
    if bool((want == 0).all()):  # of one class there is nothing to choose
        assert not x.any()
        return
    assert comparing.relative(x, want) < times * LIMITS[x.dtype]


# ---- logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@DTYPE
def test_loss_and_gradient(op, classes, index, dtype, guarded_memory):
    rows = 64 if classes < 32 else 9  # few classes: among few rows all targets may be as good as sure
    for l2_wrap, reduction, ignored in ((0.0, "mean", 2), (0.01, "none", 2), (0.01, "sum", 0)):
        logits = make_logits(rows, classes, dtype=dtype)
        targets = make_targets(rows, classes=classes, ignored=ignored, index=index)
        options = {"l2_wrap": l2_wrap, "reduction": reduction}
        loss = rwkv_jit.cross_entropy(logits, targets, **options)
        weights = 1 + torch.rand(loss.shape, device="cuda")  # small ones would leave float16 no digits
        (gradient,) = torch.autograd.grad((loss * weights).sum(), logits)
        factors = weights if reduction == "none" else None
        want, wanted = plain_loss.cross_entropy(logits, targets, weights=factors, **options)
        check_loss(loss, want)
        assert gradient.dtype == logits.dtype
        check(gradient, wanted * (1 if reduction == "none" else weights.double()))
        assert not gradient[:ignored].any()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1, 2, 2)])
@DTYPE
def test_rows_of_any_dimensions(op, shape, dtype):
    logits, targets = make_logits(*shape, 100, dtype=dtype), make_targets(*shape, classes=100)
    loss = rwkv_jit.cross_entropy(logits, targets, reduction="none", l2_wrap=0.1)
    loss.sum().backward()
    want, gradient = plain_loss.cross_entropy(
        logits, targets, reduction="none", l2_wrap=0.1, weights=torch.ones(shape, device="cuda")
    )
    check_loss(loss, want)
    check(logits.grad, gradient)


@pytest.mark.parametrize("classes", [9, 1001, 4096])
@DTYPE
def test_the_first_of_equal_logits_is_pulled(op, classes, dtype):
    """Wherever they lie: in one access, in one thread, in several, before and behind whole accesses."""
    rows = 4 * classes
    with torch.no_grad():
        logits = make_logits(rows, classes, dtype=dtype).clamp_(max=6)
        first = torch.randint(classes, (rows,), device="cuda")
        for _ in range(3):
            other = first + torch.randint(classes, (rows,), device="cuda") % (classes - first)
            logits[torch.arange(rows, device="cuda"), other] = 7.0
        logits[torch.arange(rows, device="cuda"), first] = 7.0
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    # Beside 1000 times the largest logit all else of the gradient is small.
    logits.requires_grad_()
    rwkv_jit.cross_entropy(logits, targets, l2_wrap=1000.0, reduction="sum").backward()
    pulled = logits.grad > 3500
    assert torch.equal(pulled.sum(-1), torch.ones(rows, dtype=torch.int64, device="cuda"))
    assert torch.equal(pulled.to(torch.int8).argmax(-1), first)


@pytest.mark.parametrize("classes", [7, 100, 5003])
@DTYPE
def test_targets_that_are_no_class(op, classes, dtype, guarded_memory):
    """NaN in their rows alone; nobody reads where they point."""
    for index in (torch.int32, torch.int64):
        logits = make_logits(8, classes, dtype=dtype)
        targets = make_targets(8, classes=classes, index=index)
        wrong = [-1, classes, 2**31 - 1, -(2**31)]
        wrong += [] if index == torch.int32 else [2**62, -(2**63)]
        targets[: len(wrong)] = torch.tensor(wrong, device="cuda").to(index)
        loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1, reduction="none")
        loss.sum().backward()
        right = slice(len(wrong), None)
        want, gradient = plain_loss.cross_entropy(
            logits[right], targets[right], 0.1, reduction="none", weights=torch.ones(8 - len(wrong), device="cuda")
        )
        assert bool(loss[: len(wrong)].isnan().all())
        assert bool(logits.grad[: len(wrong)].isnan().all())
        check_loss(loss[right], want)
        check(logits.grad[right], gradient)


@pytest.mark.parametrize("classes", [33, 4096])
@DTYPE
def test_rows_that_do_not_count_are_not_read(op, classes, dtype, guarded_memory):
    for ignore_index in (-100, 3, 2**31 - 1):
        logits, targets = make_logits(7, classes, dtype=dtype), make_targets(7, classes=classes)
        targets[targets == ignore_index] = 0
        targets[2:5] = ignore_index
        with torch.no_grad():
            logits[2:5] = float("nan")
        loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1, ignore_index=ignore_index)
        loss.backward()
        counts = targets != ignore_index
        want, gradient = plain_loss.cross_entropy(logits[counts], targets[counts], 0.1, ignore_index=-1)
        check_loss(loss, want)
        check(logits.grad[counts], gradient)
        assert not logits.grad[2:5].any()
    targets[:] = ignore_index
    logits.grad = None
    loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1, ignore_index=ignore_index)
    loss.backward()
    assert bool(loss.isnan())
    assert not logits.grad.any()


def test_logits_far_out(op):
    inf = float("inf")
    rows = [[1e30, -1e30], [-inf, 2.0], [-3e38, 3e38], [0.0, -inf], [-inf, -inf], [inf, 0.0], [float("nan"), 0.0]]
    logits, targets = torch.tensor(rows, device="cuda"), torch.tensor([0, 1, 1, 1, 0, 1, 1], device="cuda")
    for width in (2, 1000, 1001):
        wide = torch.full((len(rows), width), -inf, device="cuda")
        wide[:, -2:] = logits
        loss = rwkv_jit.cross_entropy(wide, targets + width - 2, reduction="none")
        assert loss[:4].tolist() == [0, 0, 0, inf]
        assert not bool(loss[4:].isfinite().any())


def test_logits_that_are_large_have_a_loss_with_all_digits(op):
    """lse alone has none behind the point of a million."""
    logits, targets = make_logits(16, 1001).detach() + 1e6, make_targets(16, classes=1001)
    loss = rwkv_jit.cross_entropy(logits, targets, reduction="none")
    want, _ = plain_loss.cross_entropy(logits, targets, reduction="none", weights=torch.ones(16, device="cuda"))
    check_loss(loss, want)


@DTYPE
def test_logits_that_lie_elsewhere(op, dtype):
    memory = make_logits(6 * 300 + 1, dtype=dtype).detach()
    for logits in (memory[1:].view(6, 300), memory[:-1].view(300, 6).T, memory[:-1].view(6, 300)[:, 1:-1]):
        leaf = logits.detach().requires_grad_()
        assert leaf.stride() == logits.stride()
        targets = make_targets(12, classes=leaf.shape[1])[::2]
        loss = rwkv_jit.cross_entropy(leaf, targets, l2_wrap=0.1)
        loss.backward()
        want, gradient = plain_loss.cross_entropy(leaf, targets, 0.1)
        check_loss(loss, want)
        check(leaf.grad, gradient)


def test_many_rows(op):
    logits, targets = make_logits(70_000, 9), make_targets(70_000, classes=9)
    loss = rwkv_jit.cross_entropy(logits, targets, reduction="none", l2_wrap=0.1)
    loss.sum().backward()
    ones = torch.ones(70_000, device="cuda")
    want, gradient = plain_loss.cross_entropy(logits, targets, 0.1, reduction="none", weights=ones)
    check_loss(loss, want)
    check(logits.grad, gradient)
    # Results do not depend on other rows; each row keeps its place between two whole accesses.
    rows = [0, 1, 65_534, 65_535, 65_536, 69_997]
    few = logits.detach()[rows].requires_grad_()
    again = rwkv_jit.cross_entropy(few, targets[rows], reduction="none", l2_wrap=0.1)
    again.sum().backward()
    assert torch.equal(again, loss[rows])
    assert torch.equal(few.grad, logits.grad[rows])


def test_logits_past_two_gibi(op, most_of_the_memory):
    """Offsets of rows have 64 bits."""
    rows, classes = 40_000, 65_537
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device="cuda")
    last = make_logits(3, classes, dtype="bf16").detach()
    logits[-3:] = last
    logits.requires_grad_()
    targets = make_targets(rows, classes=classes)
    loss = rwkv_jit.cross_entropy(logits, targets, reduction="none", l2_wrap=0.1)
    weights = torch.ones(rows, device="cuda")
    (gradient,) = torch.autograd.grad(loss, logits, weights)
    want, wanted = plain_loss.cross_entropy(last, targets[-3:], 0.1, reduction="none", weights=weights[-3:])
    check_loss(loss[-3:], want)
    check(gradient[-3:], wanted)


# ---- hidden states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [3, 64, 1001, 5003])
@pytest.mark.parametrize("chunk_rows", [None, 1, 16, 40])
@DTYPE
def test_loss_of_hidden_states_by_chunks(op, classes, chunk_rows, dtype, guarded_memory):
    for l2_wrap, has_bias, ignored in ((0.0, True, 0), (0.0, False, 3)):
        given = make_linear(dtype, 40, 64, classes)
        given = {name: x for name, x in given.items() if has_bias or name != "bias"}
        targets = make_targets(40, classes=classes, ignored=ignored)
        loss = rwkv_jit.linear_cross_entropy(**given, targets=targets, l2_wrap=l2_wrap, chunk_rows=chunk_rows)
        (3 * loss).backward()
        want, gradients = plain_loss.linear_cross_entropy(**given, targets=targets, l2_wrap=l2_wrap)
        check_loss(loss, want, max(5e-6, LIMITS[DTYPES[dtype]]))
        for x, gradient in zip(given.values(), gradients, strict=False):
            assert x.grad.dtype == x.dtype
            check(x.grad, 3 * gradient, 3)  # logits, their gradient and sums are rounded each


def test_gradients_of_a_mean_stay_in_the_range_of_float16(op):
    """A row's part is below it; the sum of many rows is above."""
    rows = 2**16
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    for size, values in ((1.0, [5.0, -3.0]), (60.0, [0.0, 0.0])):
        hidden = torch.full((rows, 1), size, device="cuda").half()
        weight = torch.tensor(values, device="cuda").half()[:, None].requires_grad_()
        loss = rwkv_jit.linear_cross_entropy(hidden, weight, targets)
        (256 * loss).backward()
        want = 256 * size * torch.sigmoid(torch.tensor(size * (values[1] - values[0])).double())
        check(weight.grad, torch.stack([-want, want])[:, None].cuda(), 2)


@pytest.mark.parametrize("rows", [0, 40])
@DTYPE
def test_hidden_states_without_any_target(op, rows, dtype, guarded_memory):
    given, targets = make_linear(dtype, rows, 64, 999), make_targets(rows, classes=999, ignored=rows)
    loss = rwkv_jit.linear_cross_entropy(**given, targets=targets, l2_wrap=0.1, chunk_rows=16)
    loss.backward()
    assert bool(loss.isnan())
    assert not any(x.grad.any() for x in given.values())


@DTYPE
def test_chunks_give_what_all_logits_do(op, dtype):
    """With the largest logits pulled, which the rounding of products may have elsewhere in float64."""
    given, targets = make_linear(dtype, 64, 128, 999), make_targets(64, classes=999, ignored=2)
    options = {"l2_wrap": 0.1}
    logits = F.linear(given["hidden"], given["weight"], given["bias"])
    want = rwkv_jit.cross_entropy(logits, targets, **options)
    wanted = torch.autograd.grad(want, [*given.values()])
    with torch.no_grad():
        check_loss(rwkv_jit.linear_cross_entropy(**given, targets=targets, **options), want.double(), 1e-3)
    loss = rwkv_jit.linear_cross_entropy(**given, targets=targets, **options, chunk_rows=64)
    check_loss(loss, want.detach().double(), 1e-3)
    for x, y in zip(torch.autograd.grad(loss, [*given.values()]), wanted, strict=True):
        check(x, y.double(), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(op, dtype):
    given, targets = make_linear("fp32", 40, 64, 999), make_targets(40, classes=999)
    narrow = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
    want = rwkv_jit.linear_cross_entropy(**narrow, targets=targets)
    wanted = torch.autograd.grad(want, [*narrow.values()])
    with torch.autocast("cuda", dtype):
        loss = rwkv_jit.linear_cross_entropy(**given, targets=targets)
    assert torch.equal(loss, want)
    for x, y in zip(torch.autograd.grad(loss, [*given.values()]), wanted, strict=True):
        assert torch.equal(x, y.float())


def test_memory_is_that_of_a_chunk(op, most_of_the_memory):
    rows, channels, classes, chunk_rows = 4096, 256, 32_768, 256
    given, targets = make_linear("bf16", rows, channels, classes), make_targets(rows, classes=classes)
    rwkv_jit.linear_cross_entropy(**given, targets=targets, chunk_rows=chunk_rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rwkv_jit.linear_cross_entropy(**given, targets=targets, chunk_rows=chunk_rows)
    most = torch.cuda.max_memory_allocated() - before
    said = 2 * chunk_rows * classes + 2 * rows * channels + (4 + 2) * classes * channels
    assert most < said + 2**22  # and small things, as bias and losses
    assert most < rows * classes  # half of what all logits take


# ---- graphs and compilers ----------------------------------------------------------------------------------------


def test_a_graph_takes_other_logits_and_targets(op):
    logits, targets = make_logits(12, 1001, dtype="bf16"), make_targets(12, classes=1001, ignored=1)
    given = make_linear("bf16", 12, 64, 1001)

    def run():
        loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=0.1)
        other = rwkv_jit.linear_cross_entropy(**given, targets=targets, chunk_rows=5)
        return [loss, other, *torch.autograd.grad(loss, logits), *torch.autograd.grad(other, [*given.values()])]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for ignored in (0, 3):
        with torch.no_grad():
            logits.copy_(make_logits(12, 1001, dtype="bf16"))
            targets.copy_(make_targets(12, classes=1001, ignored=ignored))
            for x, other in zip(given.values(), make_linear("bf16", 12, 64, 1001).values(), strict=True):
                x.copy_(other)
        for x in found:
            x.detach().fill_(float("nan"))
        graph.replay()
        want, gradient = plain_loss.cross_entropy(logits, targets, 0.1)
        check_loss(found[0], want)
        check(found[2], gradient)
        want, gradients = plain_loss.linear_cross_entropy(**given, targets=targets)
        check_loss(found[1], want, LIMITS[torch.bfloat16])
        for x, gradient in zip(found[3:], gradients, strict=True):
            check(x, gradient, 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(op, dynamic):
    def losses(hidden, weight, bias, targets):
        loss = rwkv_jit.linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_rows=16)
        return loss + rwkv_jit.cross_entropy(F.linear(hidden, weight, bias), targets, l2_wrap=0.1)

    compiled = torch.compile(losses, fullgraph=True, dynamic=dynamic)
    for rows in (40, 24) if dynamic else (40,):
        given, targets = make_linear("fp32", rows, 64, 1001), make_targets(rows, classes=1001)
        found, want = (f(*given.values(), targets) for f in (compiled, losses))
        check_loss(found, want.detach().double())
        gradients = [torch.autograd.grad(loss, [*given.values()]) for loss in (found, want)]
        for x, y in zip(*gradients, strict=True):
            check(x, y.double())


def test_targets_are_looked_at_when_asked(op, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    targets = torch.tensor([0, 77, -100], device="cuda")
    with pytest.raises(ValueError, match=r"targets: expected 0 to 76, .* got \[77\]"):
        rwkv_jit.cross_entropy(make_logits(3, 77), targets)
    with pytest.raises(ValueError, match=r"targets: expected 0 to 76, .* got \[77\]"):
        rwkv_jit.linear_cross_entropy(**make_linear("fp32", 3, 5, 77), targets=targets)
