"""Switches of the process: results whatever the batch, and products of float32."""

import pytest
import torch

import rwkv_jit
from rwkv_jit import modes
from rwkv_jit.ops import timex
from rwkv_jit.ops.table import OPS

HALF = torch.bfloat16
GATED = "wkv6", "wkv5", "gla", "linear_attention"
SHAPES = {"short": (64, 2, 4, 64), "one chunk": (64, 16, 4, 64), "usual": (64, 300, 4, 64), "few": (1, 4096, 1, 64)}


@pytest.fixture(autouse=True)
def usual_modes():
    yield
    rwkv_jit.set_batch_invariant(False)
    rwkv_jit.set_bfloat16_precision("medium")
    torch.set_float32_matmul_precision("highest")


def make(op, shape, dtype, grad=False):
    sizes = {**dict(zip("BTHK", shape, strict=True)), "V": shape[-1]}
    shapes = [[sizes[dim] for dim in dims] for dims in OPS[op].inputs.values()]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def run(op, given, **options):
    return getattr(rwkv_jit, op)(*given, **options)


def kernels(gpu):
    """What was launched since the last look, without what tells calls apart in their arguments."""
    return [(launch.template, sorted(launch.parameters.items()), launch.block) for launch in gpu.take()]


def call(op, shape, grad, bounds=None, dtype=HALF):
    given = make(op, shape, dtype, grad)
    more = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    y, _ = run(op, given, **more)
    if grad:
        torch.autograd.grad(y.float().sum(), given)


@pytest.mark.parametrize("enabled", [1, None, "on"])
def test_switch_takes_a_bool(enabled):
    with pytest.raises(TypeError, match="enabled: expected a bool, got"):
        rwkv_jit.set_batch_invariant(enabled)
    assert rwkv_jit.is_batch_invariant() is False


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("op", ["wkv7", *GATED])
def test_kernels_are_the_same_for_every_batch_and_length(op, head_size, grad, on_gpu):
    """With the switch; without it they differ, so that there is something to switch."""
    on_gpu.home = 1  # an sm_90
    several = {}
    for enabled in (False, True):
        rwkv_jit.set_batch_invariant(enabled)
        several[enabled] = []
        for shape in SHAPES.values():
            call(op, (*shape[:3], head_size), grad)
            several[enabled].append(kernels(on_gpu))
        call(op, (1, 300, 4, head_size), grad, bounds=[0, 1, 1, 60, 300])
        several[enabled].append(kernels(on_gpu))
    assert all(one == several[True][0] for one in several[True])
    assert any(one != several[False][0] for one in several[False])


def test_threads_of_short_chunks_are_the_same_for_every_length(on_gpu):
    """Those of wkv7's forward say in which order decays are summed."""
    rwkv_jit.set_batch_invariant(True)
    several = []
    for tokens in (40, 400):
        run("wkv7", make("wkv7", (4, tokens, 4, 64), HALF, grad=True), chunk_len=16)
        several.append(kernels(on_gpu))
    assert several[0] == several[1]


@pytest.mark.parametrize("op", ["wkv4", "timex"])
def test_kernels_of_ops_without_heads_are_the_same_for_every_batch(op, on_gpu):
    on_gpu.home = 1
    rwkv_jit.set_batch_invariant(True)
    several = []
    for batch in (1, 3, 8, 200):
        if op == "wkv4":
            k = torch.randn(batch, 700, 8)
            rwkv_jit.wkv4(torch.randn(8), torch.randn(8), k, torch.randn(batch, 700, 8))
        else:
            rwkv_jit.timex(torch.randn(8, 400), torch.randn(batch, 8, 400))
        several.append(kernels(on_gpu))
    assert all(one == several[0] for one in several)


def test_switch_is_looked_at_in_every_call(on_gpu):
    seen = []
    for enabled in (False, True, False, True):
        rwkv_jit.set_batch_invariant(enabled)
        call("wkv6", (4, 2, 4, 64), grad=False)
        seen.append(kernels(on_gpu)[0][0])
    assert seen == ["gla_recurrent_forward", "gla_scan"] * 2


def test_segments_that_are_asked_for_are_refused(on_gpu):
    rwkv_jit.set_batch_invariant(True)
    with pytest.raises(rwkv_jit.UnsupportedConfigError, match="without `set_batch_invariant`"):
        run("wkv6", make("wkv6", (1, 4096, 1, 64), HALF), backend="split")


@pytest.mark.parametrize("op", GATED)
def test_float32_takes_tensor_cores_where_torch_allows_it_and_batches_do_not_matter(op, on_gpu):
    seen = []
    for precision, enabled in (("highest", False), ("high", False), ("medium", False), ("high", True)):
        torch.set_float32_matmul_precision(precision)
        rwkv_jit.set_batch_invariant(enabled)
        call(op, (4, 64, 4, 64), grad=True, dtype=torch.float32)
        seen.append({template for template, _, _ in kernels(on_gpu)})
    exact = {"gla_recurrent_forward", "gla_recurrent_backward"}
    assert exact <= seen[0]
    assert exact <= seen[3]
    for fast in seen[1:3]:
        assert {"narrow_rows", "gla_scan"} <= fast
        assert not exact & fast


def test_timex_chooses_as_for_a_large_batch(on_gpu):
    """A row alone takes other kernels than eight of them, but with the switch."""
    k = {batch: torch.randn(batch, 8, 400) for batch in (1, 8)}
    for enabled, same in ((False, False), (True, True)):
        rwkv_jit.set_batch_invariant(enabled)
        taken = {timex._taken("auto", x, "forward") for x in k.values()}
        assert (len(taken) == 1) == same


@pytest.mark.parametrize("precision", ["highest", None, "bf16"])
def test_precision_of_bfloat16_is_one_of_two(precision):
    with pytest.raises(ValueError, match="precision: expected 'medium' or 'high', got"):
        rwkv_jit.set_bfloat16_precision(precision)
    assert rwkv_jit.get_bfloat16_precision() == "medium"


def test_older_torch_says_it_in_other_words(monkeypatch):
    for said, expected in (("highest", ()), ("high", ("fp32",)), ("medium", ("fp32",))):
        monkeypatch.setattr(modes, "products_of_float32", lambda said=said: said)
        assert modes.current() == (expected, False)


@pytest.mark.parametrize("op", ["wkv7", *GATED])
def test_bfloat16_is_as_exact_as_is_asked_for(op, on_gpu):
    seen = []
    for precision in ("medium", "high", "medium", "high"):
        rwkv_jit.set_bfloat16_precision(precision)
        assert rwkv_jit.get_bfloat16_precision() == precision
        call(op, (4, 64, 4, 64), grad=True)
        taken = {template: dict(parameters) for template, parameters, _ in kernels(on_gpu) if template != "sum_rows"}
        products = {parameters["T_IO"] for parameters in taken.values() if "T_IO" in parameters}
        seen.append(("narrow_rows" in taken, products))
    assert seen == [(False, {"bf16"}), (True, {"fp16"})] * 2
