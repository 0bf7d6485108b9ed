"""Extensions of RWKV projects without a compiler: each op that they define, against float64, and who answers for it."""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import warm
from compat_inputs import calls  # noqa: F401
from torch.utils import cpp_extension
from torch.utils.checkpoint import checkpoint

import rwkv_jit
from rwkv_jit import compat
from rwkv_jit.compat import buffers, extensions, listed, loading, recurrences
from rwkv_jit.desk import cli
from rwkv_jit.kernels.errors import RwkvJitError

B, T, H, N = 2, 19, 3, 8
C = H * N
torch_load = cpp_extension.load


@pytest.fixture(autouse=True)
def installed():
    compat.install()
    yield
    compat.uninstall()
    assert cpp_extension.load is torch_load


def load(name, **options):
    return cpp_extension.load(name=name, sources=[], is_python_module=False, **options)


def rows(*shape, dtype=torch.float32, scale=0.5):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def delta_inputs(dtype):
    r, k, v, w = (rows(B, T, H, N, dtype=dtype) for _ in range(4))
    direction = torch.nn.functional.normalize(rows(B, T, H, N, dtype=torch.float64), dim=-1)
    return r, w, k, v, (-direction).to(dtype), (direction * 0.5).to(dtype)


def exact(function, inputs, dy, dlast=None, **options):
    """Y, the last state and the gradients in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    y, last = function(*leaves, **options)
    y, dy = (y, dy.double().reshape(y.shape))
    results, grads = ([y], [dy]) if dlast is None else ([y, last], [dy, dlast.double()])
    return y.detach(), last, torch.autograd.grad(results, leaves, grads)


def check(found, want, dtype):
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for x, y in zip(found, want, strict=True):
        y = y.reshape(x.shape)
        assert (x.double() - y).norm() <= limit * y.norm()


def empty(*shapes, dtype=torch.float32):
    return [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]


def scratch():
    return torch.empty(B, H, T // 16, N, N), torch.empty(B, T, H, N)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("name", ["rwkv7_clampw", "rwkv7_clampw_v3", "rwkv7_clampw128_v2"])
def test_clampw(name, dtype, calls):  # noqa: F811
    load(name)
    ops = getattr(torch.ops, name)
    for _ in range(calls):
        inputs, dy = delta_inputs(dtype), rows(B, T, H, N, dtype=dtype)
        y, grads = empty(*[(B, T, H, N)], dtype=dtype)[0], empty(*[(B, T, H, N)] * 6, dtype=dtype)
        s, sa = scratch()
        ops.forward(*inputs, y, s, sa)
        ops.backward(*inputs, dy, s, sa, *grads)
    want, _, of = exact(rwkv_jit.wkv7_ref, inputs, dy, decay="sigmoid")
    check([y, *grads], [want, *of], dtype)


@DTYPES
def test_backstepping(dtype):
    load("wind_backstepping")
    r, w, k, v, a, b = delta_inputs(dtype)
    dy, y = rows(B, T, H, N, dtype=dtype), *empty((B, T, H, N), dtype=dtype)
    dw, dq, dk, dv, dz, da = grads = empty(*[(B, T, H, N)] * 6, dtype=dtype)
    s, sa = scratch()
    torch.ops.wind_backstepping.forward(w, r, k, v, a, b, y, s, sa)
    torch.ops.wind_backstepping.backward(w, r, k, v, a, b, dy, s, sa, *grads)
    want, _, of = exact(rwkv_jit.wkv7_ref, (r, w, k, v, a, b), dy)
    check([y, dq, dw, dk, dv, dz, da], [want, *of], dtype)


def test_an_input_that_changed_before_the_backward_is_refused(calls):  # noqa: F811
    name = "rwkv7_clampw"
    load(name)
    ops, (s, sa) = getattr(torch.ops, name), scratch()
    for place in [*range(6)] * calls:
        inputs = [x.requires_grad_() for x in delta_inputs(torch.float32)]
        dy, (y, *grads) = rows(B, T, H, N), empty(*[(B, T, H, N)] * 7)
        with torch.no_grad():
            ops.forward(*inputs, y, s, sa)
            inputs[place].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                ops.backward(*inputs, dy, s, sa, *grads)


def test_there_are_no_gradients_in_inference_mode(monkeypatch):
    name = "rwkv7_clampw"
    load(name)
    monkeypatch.setattr(listed, "devices", {"cpu"})
    inputs, (s, sa) = delta_inputs(torch.float32), scratch()
    dy, y, *grads = [torch.randn_like(inputs[0]) for _ in range(8)]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        getattr(torch.ops, name).backward(*inputs, dy, s, sa, *grads[:6])


def test_calls_that_take_turns_are_noted_once(monkeypatch):
    """Of inputs that want gradients or not, and of other strides."""
    name, noted, note = "rwkv7_clampw", [], listed._noted
    load(name)
    monkeypatch.setattr(listed, "devices", {"cpu"})
    monkeypatch.setattr(listed, "_noted", lambda *given: (noted.append(given), note(*given))[1])
    ops, tokens = getattr(torch.ops, name), 48  # which no other test has
    for turn in [*range(3)] * 2:
        inputs = [torch.randn(B, tokens, H, N) for _ in range(6)]
        inputs[0] = torch.randn(B, H, tokens, N).transpose(1, 2) if turn == 2 else inputs[0].requires_grad_(turn == 1)
        inputs[1].requires_grad_()
        dy, y, *grads = [torch.randn_like(x) for x in (inputs[1], *inputs, inputs[1])]
        s, sa = torch.empty(B, H, tokens // 16, N, N), torch.empty(B, tokens, H, N)
        with torch.no_grad():
            ops.forward(*inputs, y, s, sa)
            ops.backward(*inputs, dy, s, sa, *grads)
    assert len(noted) == 2


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("passes", [False, True])
def test_clampw_from_a_state(passes, is_recorded, calls):  # noqa: F811
    name = "rwkv7_statepassing_clampw" if passes else "rwkv7_state_clampw"
    load(name)
    ops = getattr(torch.ops, name)
    for _ in range(calls):
        inputs, s0, dy, dlast = (
            delta_inputs(torch.float32), rows(B, H, N, N), rows(B, T, H, N), rows(B, H, N, N) if passes else None
        )  # fmt: skip
        y, last, ds0, *grads = empty((B, T, H, N), (B, H, N, N), (B, H, N, N), *[(B, T, H, N)] * 6)
        s, sa = scratch()
        given = [x.detach().requires_grad_(is_recorded) for x in inputs]
        state = s0.clone()
        with torch.no_grad():
            ops.forward(state, *given, *([y, last] if passes else [y]), s, sa)
            assert len(buffers._recorded) == is_recorded
            state.zero_()
            ops.backward(*given, *([dy, dlast] if passes else [dy]), s, sa, ds0, *grads)
        assert not buffers._recorded

    def call(s0, *inputs):
        return rwkv_jit.wkv7_ref(*inputs, initial_state=s0, output_final_state=True, decay="sigmoid")

    want, final, of = exact(call, (s0, *inputs), dy, dlast)
    check([y, ds0, *grads], [want, *of], torch.float32)
    if passes:
        check([last], [final], torch.float32)


class Clampw(torch.autograd.Function):
    """As RWKV-LM calls its extension."""

    @staticmethod
    def forward(ctx, scratch, *inputs):
        y = torch.empty_like(inputs[3])
        s, sa = empty((B, H, 2, N, N), (B, T, H, N)) if scratch is None else scratch
        torch.ops.rwkv7_clampw.forward(*inputs, y, s, sa)
        ctx.save_for_backward(*inputs, s, sa)
        return y

    @staticmethod
    def backward(ctx, dy):
        *inputs, s, sa = ctx.saved_tensors
        grads = [torch.full_like(x, torch.nan) for x in inputs]
        torch.ops.rwkv7_clampw.backward(*inputs, dy, s, sa, *grads)
        return None, *grads


@pytest.fixture
def forwards(monkeypatch):
    """The calls of wkv7 below the extension."""
    load("rwkv7_clampw")
    seen = []

    def counted(*given, **options):
        seen.append(given)
        return rwkv_jit.wkv7(*given, **options)

    monkeypatch.setattr(recurrences, "wkv7", counted)
    return seen


def test_a_backward_takes_what_the_forward_has_recorded(forwards):
    several = [[x.requires_grad_() for x in delta_inputs(torch.float32)] for _ in range(2)]
    results = [Clampw.apply(None, *inputs) for inputs in several]
    for inputs, y in reversed([*zip(several, results, strict=True)]):
        dy = torch.randn_like(y)
        _, _, want = exact(rwkv_jit.wkv7_ref, inputs, dy, decay="sigmoid")
        check(torch.autograd.grad(y, inputs, dy, retain_graph=True), want, torch.float32)
    assert len(forwards) == 2
    assert not buffers._recorded
    check(torch.autograd.grad(y, inputs, dy), want, torch.float32)  # once more: of a call it has no more
    assert len(forwards) == 3


def test_scratch_that_several_calls_share_is_of_the_last_one(forwards):
    scratch = empty((B, H, 2, N, N), (B, T, H, N))
    first, second = ([x.requires_grad_() for x in delta_inputs(torch.float32)] for _ in range(2))
    y = Clampw.apply(scratch, *first)
    Clampw.apply(scratch, *second)
    dy = torch.randn_like(y)
    check(torch.autograd.grad(y, first, dy), exact(rwkv_jit.wkv7_ref, first, dy, decay="sigmoid")[2], torch.float32)
    assert len(forwards) == 3


def test_what_nobody_differentiates_is_not_kept(forwards):
    inputs = delta_inputs(torch.float32)
    Clampw.apply(None, *inputs)
    assert not buffers._recorded
    y = Clampw.apply(None, *(x.requires_grad_() for x in inputs))
    assert len(buffers._recorded) == 1
    del y
    gc.collect()
    assert not buffers._recorded


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_record_the_call_that_is_repeated(forwards, use_reentrant):
    inputs = [x.requires_grad_() for x in delta_inputs(torch.float32)]
    y = checkpoint(lambda *given: Clampw.apply(None, *(2 * x for x in given)) * 1, *inputs, use_reentrant=use_reentrant)
    y.sum().backward()
    doubled = [2 * x.detach() for x in inputs]
    want = exact(rwkv_jit.wkv7_ref, doubled, torch.ones_like(y), decay="sigmoid")[2]
    check([x.grad for x in inputs], [2 * x for x in want], torch.float32)
    assert len(forwards) == 2
    assert not buffers._recorded


def test_state_that_the_scratch_cannot_hold():
    load("rwkv7_state_clampw")
    inputs, y = delta_inputs(torch.float32), *empty((B, T, H, N))
    with pytest.raises(
        ValueError, match=r"s: expected a contiguous tensor of at least 384 elements.*\(2, 3, 0, 8, 8\)"
    ):
        torch.ops.rwkv7_state_clampw.forward(
            torch.zeros(B, H, N, N), *inputs, y, torch.empty(B, H, 0, N, N), torch.empty(B, T, H, N)
        )
    assert y.isnan().all()


@pytest.mark.parametrize(
    ("name", "op"), [("wkv7s", "forward"), ("wkv7s", "forward_bf16"), ("rwkv7_state_fwd_fp16", "forward")]
)
def test_rwkv7_in_place(name, op):
    load(name)
    inputs, state, y = delta_inputs(torch.float32), rows(B, H, N, N), *empty((B, T, C))
    want, last = rwkv_jit.wkv7_ref(*(x.double() for x in inputs), initial_state=state.double(), output_final_state=True)
    getattr(getattr(torch.ops, name), op)(B, T, C, H, state, *(x.reshape(B, T, C) for x in inputs), y)
    check([y, state], [want, last], torch.float32)


def test_rwkv7_from_no_state():
    load("wkv7")
    inputs, y = delta_inputs(torch.float32), *empty((B, T, C))
    torch.ops.wkv7.forward(B, T, C, H, *(x.reshape(B, T, C) for x in inputs), y)
    check([y], [rwkv_jit.wkv7_ref(*(x.double() for x in inputs))[0]], torch.float32)


def diagonal_inputs(dtype):
    return [*(rows(B, T, C, dtype=dtype) for _ in range(4)), rows(H, N, dtype=dtype)]


def by_heads(r, k, v, w, u):
    return [*(x.view(B, T, H, N) for x in (r, k, v, w)), u]


@DTYPES
def test_rwkv6(dtype):
    """In bfloat16 w is the model's own, in float32 the log-decay; the gradient is always that of the model's own."""
    load("wkv6")
    r, k, v, w, u = diagonal_inputs(dtype)
    given = -torch.exp(w) if dtype == torch.float32 else w
    dy, y = rows(B, T, C, dtype=dtype), *empty((B, T, C), dtype=dtype)
    grads = empty(*[(B, T, C)] * 4, (B, C), dtype=dtype)
    torch.ops.wkv6.forward(B, T, C, H, r, k, v, given, u, y)
    torch.ops.wkv6.backward(B, T, C, H, r, k, v, given, u, dy, *grads)
    want, _, of = exact(rwkv_jit.wkv6_ref, by_heads(r, k, v, w, u), dy)
    check([y, *grads[:4], grads[4].sum(0)], [want, *of], dtype)


@pytest.mark.parametrize("name", ["wkv6state", "wkv6b"])
@pytest.mark.parametrize("own", [False, True], ids=["one state", "a state each"])
def test_rwkv6_from_a_state(name, own):
    module = load(name)
    r, k, v, w, u = diagonal_inputs(torch.bfloat16)
    s = rows(*([B] if own else []), H, N, N, dtype=torch.bfloat16)
    dy, y = rows(B, T, C, dtype=torch.bfloat16), *empty((B, T, C), dtype=torch.bfloat16)
    grads = empty(*[(B, T, C)] * 4, (B, C), (B, H, N, N), dtype=torch.bfloat16)
    module.forward(B, T, C, H, r, k, v, w, u, s, y)
    module.backward(B, T, C, H, r, k, v, w, u, s, dy, *grads)

    def call(s, *inputs):
        return rwkv_jit.wkv6_ref(*inputs, initial_state=s if own else s.expand(B, H, N, N))

    want, _, of = exact(call, (s, *by_heads(r, k, v, w, u)), dy)
    of_state = grads[5] if own else grads[5].sum(0)
    check([y, of_state, *grads[:4], grads[4].sum(0)], [want, *of], torch.bfloat16)


@DTYPES
@pytest.mark.parametrize("name", ["wkv5", "wkv5_ref"])
def test_rwkv5(name, dtype):
    module = load(name)
    r, k, v = (rows(B, T, C, dtype=dtype) for _ in range(3))
    w, u = rows(H, N), rows(H, N, dtype=dtype)
    ew = -torch.exp(w)
    dy, y = rows(B, T, C, dtype=dtype), *empty((B, T, C), dtype=dtype)
    grads = empty(*[(B, T, C)] * 3, (B, C), (B, C), dtype=dtype)
    module.forward(B, T, C, H, r, k, v, torch.exp(ew), u, y)
    module.backward(B, T, C, H, r, k, v, torch.exp(ew), ew, u, dy, *grads)
    want, _, of = exact(rwkv_jit.wkv5_ref, [*(x.view(B, T, H, N) for x in (r, k, v)), w, u], dy)
    check([y, *grads[:3], grads[3].sum(0), grads[4].sum(0)], [want, *of], dtype)


def rwkv5a(r, k, v, w1, u1, w2, u2):
    """RWKV-CUDA's recurrence with decays and bonuses of values too, token by token."""
    state, y = torch.zeros(*r.shape[:1], *r.shape[2:], r.shape[3], dtype=r.dtype), []  # [B, H, values, keys]
    decay = torch.exp(-torch.exp(w1))[:, None] * torch.exp(-torch.exp(w2))[..., None]
    for t in range(r.shape[1]):
        new = v[:, t, :, :, None] * k[:, t, :, None]
        y.append((((u1[:, None] + u2[..., None]) * new + state) * r[:, t, :, None]).sum(-1))
        state = state * decay + new
    return torch.stack(y, 1), None


@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(3, 8), (2, 11), (1, 1), (1, 17)])
def test_rwkv5a(heads, size, dtype):
    """Gradients of the decays are of the model's own, in parts by sequence."""
    load("wkv5a")
    C = heads * size
    r, k, v, dy = (rows(B, T, C, dtype=dtype) for _ in range(4))
    (w1, w2), (u1, u2) = (rows(2, heads, size, dtype=x) for x in (torch.float32, dtype))
    ew1, ew2 = -torch.exp(w1), -torch.exp(w2)
    (y,), grads = empty((B, T, C), dtype=dtype), empty(*[(B, T, C)] * 3, *[(B, C)] * 4, dtype=dtype)
    torch.ops.wkv5a.forward(B, T, C, heads, r, k, v, torch.exp(ew1), u1, torch.exp(ew2), u2, y)
    torch.ops.wkv5a.backward(
        B, T, C, heads, r, k, v, torch.exp(ew1), ew1, u1, torch.exp(ew2), ew2, u2, dy, *grads
    )  # fmt: skip
    want, _, of = exact(rwkv5a, [*(x.view(B, T, heads, size) for x in (r, k, v)), w1, u1, w2, u2], dy)
    check([y, *grads[:3], *(x.sum(0) for x in grads[3:])], [want, *of], dtype)


@pytest.mark.parametrize("name", ["rwkv5", "rwkv6"])
def test_rwkv5_and_6_in_place(name):
    module = load(name)
    r, k, v, w, u = diagonal_inputs(torch.float32)
    w = torch.exp(-torch.exp(w))
    if name == "rwkv5":
        w = w[0, 0].view(H, N)
    state, y = rows(B, H, N, N), *empty((B, T, C))
    reference = getattr(rwkv_jit, name.replace("rw", "w") + "_ref")
    heads = [*(x.view(B, T, H, N) for x in (r, k, v)), w.view(B, T, H, N) if name == "rwkv6" else w, u]
    want, last = reference(
        *(x.double() for x in heads), initial_state=state.double(), output_final_state=True, decay="direct"
    )
    module.forward_fp32(B, T, C, H, state, r, k, v, w, u, y)
    check([y, state], [want, last], torch.float32)


@pytest.mark.parametrize("name", ["wkv", "wkv_1024", "wkv_4096_bf16"])
@pytest.mark.parametrize("with_y", [False, True])
def test_rwkv4(name, with_y):
    module = load(name)
    w, u, k, v, dy = rows(C), rows(C), rows(B, T, C), rows(B, T, C), rows(B, T, C)
    y, gw, gu, gk, gv = empty((B, T, C), (B, C), (B, C), (B, T, C), (B, T, C))
    module.forward(B, T, C, -torch.exp(w), u, k, v, y)
    module.backward(B, T, C, -torch.exp(w), u, k, v, *([y] if with_y else []), dy, gw, gu, gk, gv)
    want, _, of = exact(rwkv_jit.wkv4_ref, (w, u, k, v), dy)
    check([y, gw.sum(0), gu.sum(0), gk, gv], [want, *of], torch.float32)


def test_timex():
    module = load("timex")
    w, k, dy = rows(C, T), rows(B, C, T), rows(B, C, T)
    out, gw, gk = empty((B, C, T), (B, C, T), (B, C, T))
    module.forward(w, k, out, 0.25, B, C, T)
    torch.ops.timex.backward(w, k, dy, gw, gk, B, C, T)
    leaves = [x.double().requires_grad_() for x in (w, k)]
    want = rwkv_jit.timex_ref(*leaves, 0.25)
    check([out, gw.sum(0), gk], [want.detach(), *torch.autograd.grad(want, leaves, dy.double())], torch.float32)


def test_ops_of_the_rwkv_package():
    load("wkv_cuda")
    w, u, k, v = -torch.exp(rows(C)), rows(C), rows(T, C), rows(T, C)
    state, y = [rows(C), rows(C).abs() + 1, rows(C)], *empty((T, C))
    want, last = rwkv_jit.wkv4_ref(
        *(x.double() for x in (w, u, k[None], v[None])), initial_state=torch.stack(state)[None].double(),
        output_final_state=True, decay="log",
    )  # fmt: skip
    torch.ops.rwkv.wkv_forward(1, T, C, w, u, k, v, y, *state)
    check([y, *state], [want, *last[0]], torch.float32)
    rows_, weights = rows(4, 6), torch.randint(256, (6, 5), dtype=torch.uint8)
    mx, rx, my, ry = rows(5), rows(5), rows(6, 1), rows(6, 1)
    many, one = empty((4, 5), (5,))
    torch.ops.rwkv.mm8_seq(4, 6, 5, rows_, weights, mx, rx, my, ry, many)
    torch.ops.rwkv.mm8_one(6, 5, rows_[0], weights, mx, rx, my, ry, one)
    product = rows_.double() @ ((weights.double() + 0.5) * ry * rx + my + mx)
    check([many, one], [product, product[0]], torch.float32)
    for dtype in (torch.float16, torch.float32):
        a, b, c = rows(1, 6).half(), rows(6, 5).half(), *empty((5,), dtype=dtype)
        torch.ops.rwkv.gemm_fp16_cublas(a, b, c)
        check([c], [(a.double() @ b.double())[0]], torch.float16)


# ---- who answers -------------------------------------------------------------------------------------------------


def test_other_names_are_built_by_torch(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_torch_load", lambda *given, **named: (given, named))
        assert cpp_extension.load("mine", ["a.cpp"], verbose=True) == (("mine", ["a.cpp"]), {"verbose": True})
        assert cpp_extension.load(name="wkv_x", sources=[]) == (("wkv_x",), {"sources": []})


def test_flags_are_ignored_and_a_second_head_size_is_right():
    for _ in range(2):
        load("wkv7s", extra_cuda_cflags=["-D_N_=64", "-Xptxas -O3"], extra_include_paths=["é 中"])
    for size in (4, 12):
        inputs = [x[..., :4].repeat(1, 1, 1, size // 4).contiguous() / 2 for x in delta_inputs(torch.float32)]
        state, y = torch.zeros(B, H, size, size), *empty((B, T, H * size))
        torch.ops.wkv7s.forward(B, T, H * size, H, state, *(x.flatten(2) for x in inputs), y)
        check([y], [rwkv_jit.wkv7_ref(*(x.double() for x in inputs))[0]], torch.float32)


def test_uninstall_takes_the_ops_away_and_install_brings_them_back():
    load("wkv7")
    assert hasattr(torch.ops.wkv7, "forward")
    compat.uninstall()
    assert cpp_extension.load is torch_load
    assert not hasattr(torch.ops.wkv7, "forward")
    compat.install()
    compat.install()
    test_rwkv7_from_no_state()


def test_ops_that_another_extension_defined_are_an_error_and_stay():
    library = torch.library.Library("wkv5", "FRAGMENT")
    library.define("backward(Tensor x) -> Tensor")
    with pytest.raises(RwkvJitError, match=r"torch\.ops\.wkv5\.backward is defined already.*call install\(\) first"):
        load("wkv5")
    assert not hasattr(torch.ops.wkv5, "forward")
    library._destroy()
    torch.ops.wkv5.__dict__.pop("backward", None)


HELD = """
import torch, rwkv_jit
from rwkv_jit.compat import extensions
from torch.utils import cpp_extension

rwkv_jit.compat.install()
held, modules = {}, {}
for name, extension in extensions.NAMES.items():
    modules[name] = cpp_extension.load(name, [])
    for op in extension.ops if extension.namespace else ():
        packet = getattr(getattr(torch.ops, extension.namespace), op)
        held[f"torch.ops.{extension.namespace}.{op}"] = packet, packet.default

script = torch.jit.CompilationUnit('''
def script(r, y):
    torch.ops.wkv7.forward(1, 3, 4, 2, r, r, r, r, r, r, y)
    return y
''').script
ones = torch.ones(1, 3, 4)
want = script(ones, torch.empty(1, 3, 4))
for _ in range(2):
    rwkv_jit.compat.uninstall()
    rwkv_jit.compat.uninstall()
    for name, calls in held.items():
        for call in calls:
            for arguments in ((), (torch.zeros(1),)):
                try:
                    call(*arguments)
                except rwkv_jit.RwkvJitError as error:
                    assert name in str(error) and "uninstall" in str(error), error
                else:
                    raise AssertionError(name)
    try:
        script(ones, torch.empty(1, 3, 4))
    except RuntimeError:
        pass
    else:
        raise AssertionError
    rwkv_jit.compat.install()
    for name in extensions.NAMES:
        cpp_extension.load(name, [])
    for call in held["torch.ops.wkv7.forward"]:
        y = torch.empty(1, 3, 4)
        call(1, 3, 4, 2, *[ones] * 6, y)
        assert torch.equal(y, want)
    assert torch.equal(script(ones, torch.empty(1, 3, 4)), want)
rwkv_jit.compat.uninstall()
own = torch.library.Library("wkv7", "DEF")  # as a built extension has it
own.define("forward(Tensor x) -> Tensor")
own.impl("forward", lambda x: x + 1, "CPU")
assert torch.ops.wkv7.forward(torch.zeros(1)) == 1
"""


def test_ops_that_a_program_holds_raise_after_uninstall_and_run_once_they_are_loaded_again(child):
    child(HELD, after="torch")


THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch, rwkv_jit
from torch.utils import cpp_extension
from rwkv_jit import compat
from rwkv_jit.compat import fla

sys.setswitchinterval(1e-5)
theirs, start = cpp_extension.load, threading.Barrier(16)

def load(number):
    start.wait()
    for name in ("wkv6", "wkv7s", "wind_backstepping", "rwkv7_cmix_bf16_v5", "wkv_cuda"):
        module = cpp_extension.load(name=name, sources=[])
    y = torch.empty(1, 2, 4)
    torch.ops.wkv6.forward(1, 2, 4, 1, *[torch.ones(1, 2, 4)] * 4, torch.ones(1, 4), y)
    return y

def toggle(number):
    start.wait()
    for _ in range(30):
        (compat, fla)[number % 2].install()
        (compat, fla)[number % 2].uninstall()

for work in (toggle, load, toggle):
    if work is load:
        compat.install()
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    compat.uninstall()
    assert cpp_extension.load is theirs
    assert work is toggle or all(torch.equal(y, results[0]) for y in results)
"""


def test_many_threads_load_and_install(child):
    child(THREADS, after="torch")


@pytest.mark.parametrize(
    ("name", "sources", "strange"),
    [
        ("wkv6", ["my.cpp"], "my.cpp"),
        ("wkv6", [Path("a/wkv6_op.cpp"), "b/mine.cu"], "mine.cu"),
        ("wkv7", ["cuda/wkv7state_op.cpp", "cuda/wkv7.cu"], "wkv7state_op.cpp"),
        ("wkv_1024_bf16", ["wkv_op_state_bf16.cpp"], "wkv_op_state_bf16.cpp"),
        ("wkv6", "cuda/wkv6_op.cpp", None),
        ("wkv6", ("cuda/wkv6_op.cpp", "cuda/wkv6_cuda_v1a.cu"), None),
        ("wkv_4096_bf16", ["wkv_op_bf16.cpp", "wkv_cuda_bf16.cu"], None),
        ("wkv5", ["wkv5_op.cpp", "wkv5_cuda_v1b2.cu"], None),
        ("wkv5_ref", ["wkv5_ref.cpp", "wkv5_cuda_ref.cu"], None),
        ("wind_backstepping", ["wkv7_cuda.cu", "wkv7_op.cpp"], None),
        ("wind_backstepping", ["backstepping_f32_1.cu", "backstepping_f32.cpp"], None),
        ("wind_chunked_cuda_varlen", ["chunked_cuda_varlen.cu", "chunked_cuda_varlen.cpp"], None),
        ("rwkv7_clampw_v3", ["rwkv7_clampw_v3_for_h100_alt.cu", "rwkv7_clampw_v3.cpp"], None),
        ("rwkv7_state_fwd_fp16", ["rwkv7_state_fwd_fp16_op.hip", "rwkv7_state_fwd_fp16.hip"], None),
        ("wkv_cuda", ["wrapper.cpp", "operators.cu", "gemm_fp16_cublas.cpp"], None),
        ("wkv_cuda", ["wkv_op.cpp", "wkv_cuda.cu"], None),
        ("timex", ["timex_op.cpp", "timex_cuda_v3.cu"], None),
        ("wind_backstepping", ["cuda/wkv7_cuda_fp32.cu", "cuda/wkv7_op_fp32.cpp"], None),
        ("wkv6", ["wkv6_op.cpp", "wkv6_cuda_fp32.cu"], None),
        ("wkv5", ["wkv5_op.cpp", "wkv5_cuda_vcoll.cu"], None),
        ("rwkv7_head_l2wrap_ce_bf16_v4", ["rwkv7_head_l2wrap_ce_bf16_v4.cpp"], None),
    ],
)
def test_sources_that_are_not_those_of_a_known_extension_are_warned_of(name, sources, strange):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = cpp_extension.load(name, sources)
    assert vars(module)
    if strange is None:
        assert said == []
    else:
        (warning,) = said
        assert warning.filename == __file__
        assert warning.category is RuntimeWarning
        text = str(warning.message)
        assert f"the extension {name} " in text
        assert f" {strange} of it" in text
        assert "another name, or call rwkv_jit.compat.uninstall() before" in text


def test_a_build_of_rwkv4_is_one_whatever_it_is_called():
    assert set(vars(cpp_extension.load("wkv_cuda", ["a/wkv_op.cpp", "wkv_cuda.cu"]))) == {"forward", "backward"}


@pytest.mark.parametrize("name", [None, 3, b"wkv6"])
def test_a_name_that_is_none(name):
    with pytest.raises(TypeError, match=f"^name: expected the name of an extension, got {name!r}$"):
        cpp_extension.load(name, ["a.cpp"])


@pytest.mark.parametrize("sources", [None, 3, [None], [b"a.cpp"], iter(["a.cpp"])])
@pytest.mark.parametrize("name", ["wkv6", "mine"])
def test_sources_that_are_none(name, sources):
    with pytest.raises(TypeError, match=r"^sources: expected a path or a list of paths, got "):
        cpp_extension.load(name=name, sources=sources)


def test_a_load_that_a_program_holds_is_that_of_torch_after_uninstall(monkeypatch):
    held = cpp_extension.load
    monkeypatch.setattr(loading, "_torch_load", lambda *given, **named: "built")
    assert held("mine", ["a.cpp"]) == "built"
    assert vars(held("wkv6", []))
    compat.uninstall()
    assert held("wkv6", []) == "built"


@pytest.mark.parametrize("name", ["compat", "nn", "parallel"])
def test_a_subpackage_needs_no_line_of_its_own(name, child):
    child(f"""
import sys, rwkv_jit
assert "{name}" in dir(rwkv_jit) and "torch" not in sys.modules
assert rwkv_jit.{name}.__name__ == "rwkv_jit.{name}" and rwkv_jit.{name} is rwkv_jit.{name}
""")


def test_rooms_of_compat_need_no_line_of_their_own_and_import_nothing_before_a_name_is_used(child):
    child("""
import sys, rwkv_jit.compat as compat
for name in ("fla", "hf", "mamba", "megatron"):
    assert name in dir(compat)
for module in (compat, compat.fla):
    module.install()
assert not {"torch", "transformers", "fla"} & set(sys.modules)
for module in (compat, compat.fla):
    module.uninstall()
from rwkv_jit.compat import RUN_CUDA_RWKV6
assert "torch" in sys.modules
from torch.utils.cpp_extension import load
assert load.__module__ == "torch.utils.cpp_extension"
compat.install()
from torch.utils.cpp_extension import load
assert load.__module__ == "rwkv_jit.compat.loading"
assert compat.hf.patch and compat.mamba.selective_state_update and compat.megatron.patch
try:
    compat.nothing
except AttributeError as error:
    assert "nothing" in str(error)
""")


def test_scripts_of_torch_find_the_ops():
    load("wkv7s")

    @torch.jit.script
    def run(T: int, C: int, H: int, state, r, w, k, v, a, b):
        y = torch.empty_like(r)
        torch.ops.wkv7s.forward(1, T, C, H, state, r, w, k, v, a, b, y)
        return y

    inputs = [x[:1] for x in delta_inputs(torch.float32)]
    state = torch.zeros(H, N, N)
    y = run(T, C, H, state, *(x.reshape(T, C) for x in inputs))
    want, last = rwkv_jit.wkv7_ref(*(x.double() for x in inputs), output_final_state=True)
    check([y, state], [want, last], torch.float32)


def test_every_op_has_a_schema_that_torch_takes():
    for name, extension in extensions.NAMES.items():
        module = load(name)
        for op in extension.ops:
            assert callable(getattr(module, op))
            if extension.namespace:
                schema = getattr(getattr(torch.ops, extension.namespace), op).default._schema
                assert schema.is_mutable != bool(schema.returns)


@pytest.mark.parametrize("wrong", [[0.0] * C, None, 3])
def test_what_is_no_tensor_is_named(wrong):
    x = torch.zeros(B, T, C)
    with pytest.raises(TypeError, match="w: expected a torch.Tensor, got"):
        extensions.find("wkv").ops["forward"].run(B, T, C, wrong, torch.zeros(C), x, x, x)


@pytest.mark.parametrize(
    ("name", "op", "wrong", "said"),
    [
        ("wkv7s", "forward", "r", r"r: expected 912 elements, B 2 x T 19 x C 24, got shape \[2, 3\]"),
        ("wkv7s", "forward", "state", r"state: expected 384 elements, B 2 x C 24 x N 8, got shape"),
        ("wkv6", "backward", "gu", r"gu: expected 48 elements, B 2 x C 24, got shape"),
        ("wkv6state", "backward", "gs", r"gs: expected 384 elements, B 2 x C 24 x N 8, got shape"),
        ("wkv5", "forward", "w", r"w: expected 24 elements, C 24, got shape"),
        ("wkv5a", "forward", "u2", r"u2: expected 24 elements, C 24, got shape"),
        ("wkv5a", "backward", "gw2", r"gw2: expected 48 elements, B 2 x C 24, got shape"),
        ("wkv5", "backward", "gw", r"gw: expected 48 elements, B 2 x C 24, got shape"),
        ("rwkv5", "forward_bf16", "y", r"y: expected 912 elements"),
        ("wkv", "backward", "gk", r"gk: expected 912 elements"),
        ("wkv_cuda", "wkv_forward", "bb", r"bb: expected 48 elements, B 2 x C 24, got shape"),
        ("timex", "forward", "w", r"w: expected 456 elements, C 24 x T 19, got shape"),
        ("rwkv7_clampw", "backward", "dk", r"dk: expected 912 elements, R 912, got shape"),
        ("wind_backstepping", "forward", "z", r"z: expected 912 elements, R 912, got shape"),
    ],
)
def test_wrong_sizes_are_named_and_nothing_is_written(name, op, wrong, said):
    load(name)
    entry = extensions.find(name).ops[op]
    sizes = {"B": B, "T": T, "C": C, "H": H, "eps": 0.5, "R": B * T * C, "N": N}
    counted = {
        "": extensions.ALIKE,
        "int B, int T, int C, int H": extensions.OF_HEADS,
        "int B, int T, int C": extensions.OF_CHANNELS,
    }
    given = entry.schema[1:].split(") ->")[0]
    begin = ", ".join(x for x in given.split(", ") if x.startswith("int "))
    words = {x: w for several, w in counted.get(begin, extensions.OF_FILTERS).items() for x in several.split()}
    if name in ("wkv5", "rwkv5"):
        words |= {"w": "C", "ww": "C", "gw": "BC"}
    if name == "wkv5a":
        words |= dict.fromkeys(("w1", "ww1", "u1", "w2", "ww2", "u2"), "C")
        words |= dict.fromkeys(("gw1", "gu1", "gw2", "gu2"), "BC")
    arguments, tensors = [], []
    for argument in given.split(", "):
        kind, _, x = argument.rpartition(" ")
        if not kind.startswith("Tensor"):
            arguments.append(sizes[x])
            continue
        count = math.prod(sizes[letter] for letter in words.get(x, "R").split()[-1])
        arguments.append(torch.zeros(2, 3) if x == wrong else torch.full((count,), 7.0))
        tensors.append(arguments[-1])
    with pytest.raises(ValueError, match=said):
        getattr(getattr(torch.ops, extensions.find(name).namespace), op)(*arguments)
    assert all((x == x.flatten()[0]).all() for x in tensors)


SCRIPT = """
import sys
from torch.utils.cpp_extension import load
load(name="wkv7", sources=["wkv7.cu"], is_python_module=False)
import torch
y = torch.empty(1, 3, 4)
torch.ops.wkv7.forward(1, 3, 4, 2, *(torch.ones(1, 3, 4) for _ in range(6)), y)
print(sys.argv[1:], __name__, bool(y.isfinite().all()))
"""


def test_run_a_script(tmp_path):
    script = tmp_path / "train é.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = [sys.executable, "-m", "rwkv_jit", "run", str(script), "--json", "x"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['--json', 'x'] __main__ True"


def test_run_a_module(tmp_path):
    """As `python -m` does, with the working directory first; a package by its __main__."""
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("__main__", "train"):
        (package / f"{name}.py").write_text(f"from . import __name__ as package, __file__ as own\n{SCRIPT}", "utf-8")

    def run(*arguments, check=True):
        command = [*warm.python("torch"), "-m", "rwkv_jit", "run", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=check, cwd=tmp_path)

    assert run("-m", "trainer.train", "-m", "--json", "x").stdout.splitlines() == [
        "['-m', '--json', 'x'] __main__ True"
    ]
    printed = run("--json", "-m", "trainer").stdout.splitlines()
    assert printed[0] == "[] __main__ True"
    told = json.loads(printed[1])
    assert told["extensions"] == {"wkv7": "rwkv_jit"}
    assert told["kernels"]["compiled"] == 0
    assert told["fla"] == {}
    for name in ("nowhere", "trainer.nowhere", "nowhere.train", "tests..x"):
        done = run("-m", name, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"rwkv-jit run: -m: expected a module that can be run, got '{name}'\n"


@pytest.mark.parametrize("is_safe", [False, pytest.param(True, marks=pytest.mark.skipif("sys.version_info < (3, 11)"))])
def test_run_finds_what_python_would(tmp_path, root, monkeypatch, is_safe):
    """The folder of the script comes first, or with -P not at all; those of PYTHONPATH stay."""
    first = tmp_path / "first"
    first.mkdir()
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.path[:2])", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(first), str(root))))
    run = [sys.executable, *(["-P"] if is_safe else []), "-m", "rwkv_jit", "run", str(script)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    paths = [str(first), str(root)] if is_safe else [str(tmp_path), str(first)]
    assert done.stdout.splitlines()[-1] == str(paths)


AGAIN = """
import subprocess, sys
from torch.utils.cpp_extension import load
print(load.__module__, sys.argv[1:], flush=True)
if not sys.argv[1:]:
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""


def install_into(folder, root):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / "rwkv_jit" / "compat" / "rwkv_jit.pth", folder)
    (folder / "rwkv_jit").symlink_to(Path(rwkv_jit.__file__).parent, target_is_directory=True)


@pytest.fixture
def as_installed(root, tmp_path, monkeypatch):
    """Lets Python begin as where a wheel is installed: with the line that stands beside the package there."""
    folder = tmp_path / "packages"
    install_into(folder, root)
    begin = (Path(__file__).parent / "without_cupy" / "sitecustomize.py").read_text(encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(f"{begin}\nimport site\nsite.addsitedir({str(folder)!r})\n", "utf-8")
    paths = map(str, (tmp_path, Path(rwkv_jit.__file__).parents[1]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths), prepend=os.pathsep)


def test_run_a_script_that_starts_itself_again(tmp_path, as_installed):
    """As Lightning starts its other ranks."""
    script = tmp_path / "train.py"
    script.write_text(AGAIN, encoding="utf-8")
    for run, owner in (("-m", "rwkv_jit", "run"), "rwkv_jit.compat.loading"), ((), "torch.utils.cpp_extension"):
        command = [*warm.python("torch"), *run, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [f"{owner} []", f"{owner} ['again']"]


@pytest.mark.parametrize(
    ("variables", "loaded", "installed"),
    [
        ({}, False, (False, False)),
        ({"RWKVJIT_COMPAT": "1"}, True, (True, False)),
        ({"RWKVJIT_FLA": "1"}, True, (False, True)),
        ({"RWKVJIT_COMPAT": "on", "RWKVJIT_FLA": "on"}, True, (True, True)),
        ({"RWKVJIT_COMPAT": "off", "RWKVJIT_FLA": "0"}, False, (False, False)),
        ({"RWKVJIT_COMPAT": "", "RWKVJIT_FLA": ""}, False, (False, False)),
        ({"RWKVJIT_COMPAT": "", "RWKVJIT_FLA": "TRUE"}, True, (False, True)),
    ],
)
def test_variables_are_enough(variables, loaded, installed, child, as_installed):
    code = f"import sys; assert ('rwkv_jit' in sys.modules) is {loaded}; assert 'torch' not in sys.modules;"
    code += "from rwkv_jit import compat; from rwkv_jit.compat import fla;"
    code += f"assert (compat.is_installed, fla.is_installed) == {installed}"
    child(code, env=variables)


@pytest.fixture
def python(root, tmp_path, monkeypatch):
    """Runs the Python of an environment that has nothing but this package; returns what is printed, and errors."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site_packages,) = (tmp_path / "venv").glob("[lL]ib/**/site-packages")
    install_into(site_packages, root)
    (program,) = (tmp_path / "venv").glob("[bS]*/python*[3e]")
    monkeypatch.delenv("PYTHONPATH")

    def run(code, *flags, **variables):
        options = {"env": os.environ | variables, "capture_output": True, "text": True, "cwd": tmp_path}
        done = subprocess.run([str(program), "-W", "error", *flags, "-c", code], check=True, **options)
        return done.stdout.strip(), done.stderr.strip()

    return run


IS_INSTALLED = "import sys; c = sys.modules.get('rwkv_jit.compat'); print(c and (c.is_installed, c.__file__))"


@pytest.mark.parametrize("flag", ["-E", "-I"])
def test_a_variable_is_not_read_where_python_reads_none(python, flag):
    assert python(IS_INSTALLED, flag, RWKVJIT_COMPAT="1") == ("None", "")


def test_a_wrong_variable_is_one_line_and_python_goes_on(python):
    out, said = python(IS_INSTALLED, RWKVJIT_COMPAT="banana", RWKVJIT_FLA="1")
    assert out.startswith("(False, ")
    assert said == "rwkv_jit: RWKVJIT_COMPAT: expected 0 or 1 (or false, no, off; true, yes, on), got 'banana'"
    assert python("from rwkv_jit.compat import fla; print(fla.is_installed)", RWKVJIT_FLA="1") == ("True", "")


@pytest.mark.parametrize("path", [".", "", os.pathsep, "x" + os.pathsep])
def test_a_package_in_the_working_directory_is_not_the_one_that_begins(python, tmp_path, path):
    planted = tmp_path / "rwkv_jit"
    planted.mkdir()
    (planted / "__init__.py").write_text("raise SystemExit('planted')")
    found, said = python(IS_INSTALLED, PYTHONPATH=path, RWKVJIT_COMPAT="1")
    assert (found.startswith("(True, "), str(planted) in found, said) == (True, False, "")
    assert python("print(1)", PYTHONPATH=path, RWKVJIT_COMPAT="0") == ("1", "")


def test_a_line_without_its_package_does_nothing(python, tmp_path):
    (link,) = (tmp_path / "venv").glob("[lL]ib/**/rwkv_jit")
    link.unlink()
    assert python(IS_INSTALLED, RWKVJIT_COMPAT="1") == ("None", "")


def test_run_what_is_no_file(capsys):
    assert cli.main(["run", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "rwkv-jit run: script: expected a Python file, got 'nowhere.py'\n"
