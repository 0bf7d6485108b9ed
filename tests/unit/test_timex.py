"""timex without a GPU: the reference, the torch op on CPU tensors, the transforms, the rules, and the launches."""

import itertools

import numpy as np
import pytest
import torch
from stub_driver import entered
from torch._subclasses.fake_tensor import FakeTensorMode

import rwkv_jit
from rwkv_jit.ahead import requests as ahead_requests
from rwkv_jit.call import tensors
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.ops import timex as op
from rwkv_jit.schedules import directions as whole
from rwkv_jit.schedules import timex_tiles
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

FP32, BF16 = (torch.float32,) * 2, (torch.bfloat16,) * 2
H200 = Gpu("sm_90")


def asked(backend, dtype, batch, tokens, gpu):
    """The problem of a call that has chosen nothing yet."""
    types = dict.fromkeys(("w", "k"), tensors.STORAGE[dtype])
    return Problem(OPS["timex"], gpu, types, B=batch, T=tokens, backend=backend)


def make(batch, channels, tokens, dtype=torch.float64, w_dtype=None):
    generator = torch.Generator().manual_seed(tokens)
    w, k, g = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((channels, tokens), (batch, channels, tokens), (batch, channels, tokens))
    )
    return w.to(w_dtype or dtype).requires_grad_(), k.to(dtype).requires_grad_(), g.to(dtype)


def one_by_one(w, k, g, eps):
    """Every output and gradient as its own sum, by the definition."""
    batch, channels, tokens = k.shape
    out, gw, gk = torch.full_like(k, eps), torch.zeros_like(w), torch.zeros_like(k)
    for t in range(tokens):
        for s in range(t + 1):
            weight = tokens - 1 - (t - s)
            out[:, :, t] += w[:, weight] * k[:, :, s]
            gk[:, :, s] += g[:, :, t] * w[:, weight]
            gw[:, weight] += (g[:, :, t] * k[:, :, s]).sum(0)
    return out, gw, gk


def relative(x, want):
    want = want.detach()
    return float((x.detach().double() - want).norm() / want.norm().clamp_min(1e-300))


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "channels", "tokens"), [(2, 3, 1), (1, 1, 2), (3, 2, 7), (2, 1, 33)])
@pytest.mark.parametrize("backend", ["auto", "fft", "reference"])
def test_values_and_gradients_are_those_of_the_definition(backend, batch, channels, tokens):
    dtype = torch.float32 if backend == "fft" else torch.float64
    w, k, g = make(batch, channels, tokens, dtype)
    out = rwkv_jit.timex(w, k, 0.25, backend=backend)
    found = (out.detach(), *torch.autograd.grad(out, (w, k), g))
    exact = one_by_one(w.detach().double(), k.detach().double(), g.double(), 0.25)
    limit = 2e-6 if backend == "fft" else 1e-14
    assert [x.dtype for x in found] == [dtype] * 3
    assert all(x.is_contiguous() for x in found)
    assert max(relative(x, want) for x, want in zip(found, exact, strict=True)) < limit


@pytest.mark.parametrize("tokens", [128, 129, 300])
def test_blocks_of_the_reference_meet(tokens):
    w, k, _ = make(2, 3, tokens)
    rows = torch.nn.functional.pad(k, (tokens - 1, 0))
    want = torch.nn.functional.conv1d(rows, w.unsqueeze(1), groups=3) + 1.5
    assert relative(rwkv_jit.timex_ref(w, k, 1.5), want) < 1e-14


def test_channels_of_the_reference_go_in_parts(monkeypatch):
    w, k, _ = make(2, 5, 300)
    whole = rwkv_jit.timex_ref(w, k)
    monkeypatch.setattr("rwkv_jit.plain.reference._BLOCK_ELEMENTS", 2 * 128 * 128)
    assert torch.equal(rwkv_jit.timex_ref(w, k), whole)


@pytest.mark.parametrize("spoilt", [0, 5, 130, 299])
def test_what_is_not_finite_spoils_nothing_before_it(spoilt):
    w, k, g = make(1, 2, 300)
    want = rwkv_jit.timex(w, k).detach()
    for bad in (float("nan"), float("inf")):
        changed = k.detach().clone()
        changed[..., spoilt] = bad
        out = rwkv_jit.timex(w, changed)
        assert torch.equal(out[..., :spoilt], want[..., :spoilt])
        assert not out[..., spoilt:].isfinite().any()
    filters = w.detach().clone()
    filters[:, -1 - spoilt] = float("nan")  # the weight of so many tokens ago
    out = rwkv_jit.timex(filters, k)
    assert torch.equal(out[..., :spoilt], want[..., :spoilt])
    assert out[..., spoilt:].isnan().all()
    g[..., spoilt] = float("nan")
    (gk,) = torch.autograd.grad(rwkv_jit.timex(w, k), k, g)
    assert gk[..., : spoilt + 1].isnan().all()
    assert gk[..., spoilt + 1 :].isfinite().all()


def test_reference_is_differentiable_twice():
    w, k, _ = make(2, 2, 5)
    assert torch.autograd.gradcheck(rwkv_jit.timex_ref, (w, k))
    assert torch.autograd.gradgradcheck(rwkv_jit.timex_ref, (w, k))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("backend", ["fft", "reference"])
def test_nothing_to_compute(backend, shape):
    w, k, g = make(*shape, torch.float32)
    out = rwkv_jit.timex(w, k, 1.0, backend=backend)
    gw, gk = torch.autograd.grad(out, (w, k), g)
    assert (out.shape, gk.shape, gw.shape) == (shape, shape, shape[1:])
    assert not gw.any()


@pytest.mark.parametrize("w_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["fft", "reference"])
def test_dtypes_of_results_are_those_of_the_inputs(backend, dtype, w_dtype):
    w, k, g = make(2, 3, 40, dtype, w_dtype)
    out = rwkv_jit.timex(w, k, backend=backend)
    gw, gk = torch.autograd.grad(out, (w, k), g)
    assert (out.dtype, gk.dtype, gw.dtype) == (dtype, dtype, w_dtype or dtype)
    want = one_by_one(w.detach().double(), k.detach().double(), g.double(), 0.0)
    assert max(relative(x.detach(), y) for x, y in zip((out, gw, gk), want, strict=True)) < 4e-3


@pytest.mark.parametrize("wanted", ["w", "k"])
@pytest.mark.parametrize("backend", ["fft", "reference"])
def test_only_the_gradient_that_is_wanted(backend, wanted):
    w, k, g = make(2, 3, 9, torch.float32)
    both = torch.autograd.grad(rwkv_jit.timex(w, k, backend=backend), (w, k), g)
    given = {"w": w.detach(), "k": k.detach()}
    given[wanted].requires_grad_()
    (one,) = torch.autograd.grad(rwkv_jit.timex(**given, backend=backend), [given[wanted]], g)
    assert torch.equal(one, both["wk".index(wanted)])


def test_any_strides_and_arrays_of_other_libraries():
    w, k, _ = make(2, 3, 9)
    want = rwkv_jit.timex(w.detach(), k.detach())
    turned = k.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(rwkv_jit.timex(w.detach(), turned), want)
    assert torch.equal(rwkv_jit.timex(w.detach().numpy(), k.detach().numpy()), want)


# ---- the torch op ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["fft", "reference"])
def test_torch_ops_pass_opcheck(backend):
    w, k, g = (x.detach() for x in make(2, 3, 6, torch.float32))
    torch.library.opcheck(torch.ops.rwkv_jit.timex_fwd.default, (w, k, 0.5, backend, True))
    for wanted in ("", "w", "k"):
        torch.library.opcheck(torch.ops.rwkv_jit.timex_bwd.default, (w, k, g, 0.5, backend), {"wanted": wanted})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph_forward_and_backward(dynamic):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def step(w, k):
        return rwkv_jit.timex(w, k, 0.5) * 2

    for tokens in (6, 8) if dynamic else (6,):
        w, k, g = make(2, 3, tokens)
        y, want = step(w, k), rwkv_jit.timex_ref(w, k, 0.5) * 2
        torch.testing.assert_close(y, want)
        for found, exact in zip(torch.autograd.grad(y, (w, k), g), torch.autograd.grad(want, (w, k), g), strict=True):
            torch.testing.assert_close(found, exact)


# ---- arguments ---------------------------------------------------------------------------------------------------

X, W = torch.zeros(2, 3, 4), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"backend": "fast"}, ValueError, "backend: expected one of auto, tiles, transforms, fft, ref.*got 'fast'"),
        *(
            ({"backend": name}, UnsupportedConfigError, f"backend: '{name}' runs on CUDA tensors, got cpu; use 'auto'")
            for name in ("tiles", "transforms")
        ),
        ({"eps": float("nan")}, ValueError, "eps: expected a finite number, got nan"),
        ({"eps": 10**400}, ValueError, "eps: expected a finite number, got an integer too large for a float"),
        ({"backend": np.ones(2)}, ValueError, "backend: expected one of auto, tiles"),
        ({"eps": True}, ValueError, "eps: expected a finite number, got True"),
        ({"k": None}, TypeError, "k: expected a torch.Tensor or an array with __dlpack__, got NoneType"),
        ({"k": W}, ValueError, r"k: expected 3 dimensions \[B, C, T\], got shape \(3, 4\)"),
        ({"w": X}, ValueError, r"w: expected shape \[3, 4\] \[channels, T\], got \[2, 3, 4\]"),
        ({"w": W.bfloat16()}, TypeError, "w: expected torch.float32 like k, got torch.bfloat16"),
        (
            {"k": X.half(), "w": W.bfloat16()}, TypeError,
            "w: expected torch.float16 like k or torch.float32, got torch.bfloat16",
        ),
        ({"k": X.double(), "w": W.half()}, TypeError, "w: expected torch.float64 like k or torch.float32, got torch.f"),
        ({"k": X.int()}, TypeError, "or torch.float32 or torch.float64, got torch.int32"),
        (
            {"k": X.double(), "w": W.double(), "backend": "fft"}, TypeError,
            "k: expected torch.float16 or torch.bfloat16 or torch.float32, got torch.float64",
        ),
        ({"w": W.to("meta")}, ValueError, "w: expected device cpu like k, got meta"),
    ],
)  # fmt: skip
def test_wrong_arguments(given, error, message):
    with pytest.raises(error, match=message):
        rwkv_jit.timex(**{"w": W, "k": X, **given})


# ---- the rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "batch", "tokens", "arch", "forward", "backward"),
    [
        (torch.float32, 32, 704, "sm_90", "tiles", "tiles"),
        (torch.float32, 32, 768, "sm_90", "transforms", "tiles"),
        (torch.float32, 8, 1024, "sm_90", "transforms", "transforms"),
        (torch.float32, 8, 1025, "sm_90", "tiles", "tiles"),  # twice the length
        (torch.float32, 8, 1409, "sm_90", "transforms", "transforms"),
        (torch.float32, 1, 512, "sm_90", "transforms", "transforms"),  # of a tile's rows seven are none
        (torch.float32, 1, 240, "sm_90", "tiles", "tiles"),
        (torch.bfloat16, 1, 512, "sm_90", "tiles", "tiles"),
        (torch.bfloat16, 1, 513, "sm_90", "transforms", "transforms"),
        (torch.bfloat16, 8, 2816, "sm_80", "tiles", "tiles"),
        (torch.float16, 8, 2817, "sm_80", "transforms", "tiles"),
        (torch.bfloat16, 32, 3072, "sm_90", "transforms", "tiles"),
        (torch.float16, 8, 3073, "sm_80", "transforms", "transforms"),
        (torch.bfloat16, 8, 16384, "sm_90", "transforms", "transforms"),
        (torch.bfloat16, 8, 16385, "sm_90", "fft", "fft"),
        (torch.float16, 8, 8192, "sm_120", "transforms", "transforms"),
        (torch.float16, 8, 8193, "sm_120", "fft", "fft"),  # more than its shared memory
        (torch.float16, 8, 64, "sm_75", "transforms", "transforms"),  # no products of bfloat16
    ],
)
def test_auto(dtype, batch, tokens, arch, forward, backward):
    directions = ("forward", "backward")
    p = asked("auto", dtype, batch, tokens, Gpu(arch))
    found = [op.choose(p, direction) for direction in directions]
    assert found == [forward, backward]
    assert op.choose(p._replace(backend="fft")) == "fft"


def test_directions_of_a_call_are_chosen_apart(monkeypatch):
    monkeypatch.setattr(tensors, "gpu", lambda device: H200)
    with FakeTensorMode():
        w, k = torch.empty(3, 768, device="cuda"), torch.empty(8, 3, 768, device="cuda")
        assert op._taken("auto", w, k, "forward") == "transforms"
        assert op._taken("auto", w, k, "backward") == "tiles"
        assert op._taken("fft", w, k, "backward") == "fft"


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_follows_the_rule(dynamic):
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True, dynamic=dynamic)
    def chosen(k):
        directions, backends = ("forward", "backward"), OPS["timex"].backends
        p = asked("auto", torch.float32, k.shape[0], k.shape[2], Gpu("sm_90"))
        found = [op.choose(p, each) for each in directions]
        return k + 10 * backends.index(found[0]) + backends.index(found[1])

    for tokens, want in ((700, 11), (768, 21), (2000, 22), (20000, 33)):
        assert int(chosen(torch.zeros(8, 1, tokens))[0, 0, 0]) == want


@pytest.mark.parametrize(
    ("backend", "batch", "tokens", "arch", "obstacle"),
    [
        ("tiles", 8, 64, "sm_75", "needs an architecture from sm_80 on, got sm_75"),
        ("tiles", 8, 16776961, "sm_90", "takes at most 16776960 tokens, got 16776961"),
        ("tiles", 524281, 64, "sm_90", "takes at most 524280 sequences, got 524281"),
        ("transforms", 8, 16385, "sm_90", "takes at most 16384 tokens, got 16385"),
        ("transforms", 8, 8193, "sm_86", "needs 139264 bytes of shared memory, sm_86 has 101376"),
    ],
)
def test_backends_say_what_they_cannot_do(backend, batch, tokens, arch, obstacle):
    with pytest.raises(UnsupportedConfigError, match=f"backend: '{backend}' {obstacle}; use 'auto' or 'fft'"):
        op.choose(asked(backend, torch.float32, batch, tokens, Gpu(arch)))
    assert op.choose(asked("auto", torch.float32, batch, tokens, Gpu(arch))) != backend
    assert op.choose(asked(backend, torch.float32, 8, 8192, H200)) == backend


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("types", [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "fp16")])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_fit_and_cover_the_rows(direction, types, arch):
    for tokens in (1, 16, 17, 768, 1000, 4096, 16384):
        for batch in (1, 8, 9, 16, 17, 64):
            cut = timex_tiles.geometry(direction, batch, tokens, types, Gpu(arch))
            assert cut.shared_bytes <= Gpu(arch).shared_limit
            assert cut.tiles * 16 >= tokens > (cut.tiles - 32) * 16
            assert cut.tiles % (32 if cut.streamed else 4) == 0
            assert cut.batch in ((8, 16, 32) if direction == "forward" else (8, 16))
            assert cut.batch == 8 or cut.batch < 2 * batch
            assert not (cut.streamed and cut.batch == 32)


def test_blocks_of_the_usual_call():
    assert timex_tiles.geometry("forward", 32, 768, ("fp32", "fp32"), H200) == (16, False, 48, 57088)
    assert timex_tiles.geometry("backward", 32, 768, ("fp32", "fp32"), H200) == (16, False, 48, 108224)
    assert timex_tiles.geometry("forward", 8, 8192, ("bf16", "bf16"), H200)[:3] == (8, True, 512)


@pytest.mark.parametrize("tokens", range(1, 200))
def test_transforms_are_long_enough_and_of_few_factors(tokens):
    length = op._transform_length(tokens)
    assert 2 * tokens - 1 <= length <= max(1, 4 * tokens)
    while length % 2 == 0:
        length //= 2
    assert length in (1, 3, 5)


# ---- launches ----------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(on_gpu):
    """Every tensor is one of an sm_90."""
    on_gpu.use("sm_90")
    return on_gpu


def leaves(*shape, dtype=torch.float32, w_dtype=None):
    w, k = torch.zeros(shape[1:], dtype=w_dtype or dtype), torch.zeros(shape, dtype=dtype)
    return w.requires_grad_(), k.requires_grad_()


def addresses(**tensors):
    return {name: x.data_ptr() for name, x in tensors.items()}


def test_tiles_are_launched_on_the_inputs_as_they_are(driver):
    w, k = torch.zeros(3, 2000)[:, :1000].requires_grad_(), torch.zeros(3, 40, 1000).transpose(0, 1).requires_grad_()
    g = torch.ones(40, 3, 1000)
    out = rwkv_jit.timex(w, k, 0.5, backend="tiles")
    (forward,) = driver.take()
    gw, gk = torch.autograd.grad(out, (w, k), g)
    matrices, sums, backward = driver.take()
    cut = timex_tiles.geometry("forward", 40, 1000, ("fp32", "fp32"), H200)
    assert cut.batch == 16
    for launch, source, result in ((forward, k, out), (backward, g, gk)):
        assert (launch.entry, launch.grid, launch.block) == ("timex_convolve", (3, 3, 1), (256, 1, 1))
        assert launch.shared_bytes == cut.shared_bytes
        assert launch.addresses == addresses(w=w, k=source, out=result)
        is_forward = launch is forward
        assert launch.numbers == {
            "w_stride": 2000, "k_batch": source.stride(0), "k_channel": source.stride(1), "batch": 40, "channels": 3,
            "length": 1000, "tiles": cut.tiles, "eps": 0.5 if is_forward else 0.0,
        }  # fmt: skip
        assert launch.parameters == {
            "T_IO": "fp32", "T_W": "fp32", "BATCH": 16, "STREAMED": False, "ROWS": 4, "NUM_THREADS": 256, "VECTOR": 4,
            "BLOCKS_PER_SM": 2, "REVERSED": not is_forward,
        }  # fmt: skip
        launch.request.template.check(launch.parameters)
    assert (matrices.entry, sums.entry) == ("timex_filter_gradient", "timex_filter_gradient_sum")
    assert sums.named["gw"] == gw.data_ptr()


def test_gradient_of_the_filter_is_two_launches(driver):
    w, k = leaves(20, 3, 8200, dtype=torch.bfloat16, w_dtype=torch.float32)
    out = rwkv_jit.timex(w, k, backend="tiles")
    g = torch.zeros(20, 3, 8200).bfloat16()
    driver.take()
    (gw,) = torch.autograd.grad(out, [w], g)
    matrices, sums = driver.take()[:2]
    cut = timex_tiles.geometry("backward", 20, 8200, ("fp32", "bf16"), H200)
    assert cut.streamed
    groups = -(-20 // cut.batch)
    assert (matrices.grid, sums.grid) == ((3, groups, cut.tiles // 32), (3, 33, 1))
    assert (matrices.shared_bytes, sums.shared_bytes) == (cut.shared_bytes, 0)
    scratch = matrices.named["sums"]
    assert matrices.addresses == {**addresses(g=g, k=k), "sums": scratch}
    assert sums.addresses == {**addresses(gw=gw), "sums": scratch}
    sizes = {"length": 8200, "tiles": cut.tiles}
    strides = {f"{name}_{dim}": x for name in "gk" for dim, x in (("batch", 3 * 8200), ("channel", 8200))}
    assert matrices.numbers == {**strides, "batch": 20, "channels": 3, **sizes}
    assert sums.numbers == {"groups": groups, "channels": 3, **sizes}
    assert (gw.shape, gw.dtype) == ((3, 8200), torch.float32)
    assert matrices.parameters == sums.parameters
    assert matrices.parameters["T_W"] == "fp32"
    matrices.request.template.check(matrices.parameters)


def test_training_compiles_the_backward_beside_the_forward(driver, monkeypatch):
    wanted = []
    monkeypatch.setattr(kernel, "get_async", lambda request: wanted.append(request))
    monkeypatch.setattr(kernel, "_stored", lambda *_: None)
    monkeypatch.setattr(kernel, "_begin", lambda requests: wanted.extend(requests) or 1 / 0)
    monkeypatch.setattr(kernel, "_compile_once", lambda request, _: wanted.append(request) or 1 / 0)
    tiles = {("timex_convolve", True), ("timex_filter_gradient", None)}

    def compiled(batch, tokens, training, backend):
        wanted.clear()
        w, k = leaves(batch, 3, tokens)
        with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(training):
            rwkv_jit.timex(w, k, backend=backend)
        return {(each.template.name, each.parameters.get("REVERSED")) for each in wanted}

    forward = {("timex_convolve", False)}
    assert compiled(2, 64, True, "tiles") == forward | tiles
    assert compiled(2, 64, False, "tiles") == forward
    transforms = {("timex_transform", None)}  # which has its backward too
    assert compiled(8, 768, True, "auto") == transforms | tiles
    assert compiled(8, 2000, True, "transforms") - {("sum_rows", None)} == transforms
    assert compiled(8, 2000, False, "transforms") == transforms


def misaligned(k):
    return torch.cat([k.new_zeros(1), k.flatten()])[1:].view(k.shape)


@pytest.mark.parametrize(
    ("change", "vector", "is_paired", "copied"),
    [
        (lambda k: k, 4, True, False),
        (lambda k: k.transpose(1, 2).contiguous().transpose(1, 2), 4, True, True),
        (misaligned, 1, False, False),
        (lambda k: torch.cat([k, k[:, :, :1]], 2)[:, :, :-1], 1, False, False),
        (lambda k: torch.cat([k, k[:, :, :2]], 2)[:, :, :-2], 1, True, False),
        (lambda k: k[:, :, 1:].contiguous(), 1, False, False),
        (lambda k: k[:, :, :-1], 1, False, False),  # strides that would do, and a last token alone
        (lambda k: k[:1, :1].expand(2, 3, 64), 4, True, False),
    ],
)
def test_what_a_thread_reads_at_once_goes_by_strides_and_address(driver, change, vector, is_paired, copied):
    k = change(torch.zeros(2, 3, 64))
    w = torch.zeros(3, 64)[:, : k.shape[2]]
    rwkv_jit.timex(w, k, backend="transforms")
    assert {launch.parameters["PAIRED"] for launch in driver.take()} == {is_paired}
    w = torch.zeros(3, k.shape[2])
    for _ in range(2):
        rwkv_jit.timex(w, k, backend="tiles")
        (launch,) = driver.take()
        assert launch.parameters["VECTOR"] == vector
        assert (launch.named["k"] != k.data_ptr()) == copied
    leaf = k.detach().requires_grad_()
    out = rwkv_jit.timex(w, leaf, backend="tiles")
    driver.take()
    torch.autograd.grad(out, [leaf], change(torch.zeros(2, 3, 64)))
    (launch,) = driver.take()
    assert (launch.parameters["VECTOR"], launch.parameters["REVERSED"]) == (vector, True)


@pytest.mark.parametrize("backend", ["tiles", "transforms"])
def test_known_calls_take_the_kernels_of_their_addresses(driver, backend):
    name, of_aligned, of_others = ("VECTOR", 4, 1) if backend == "tiles" else ("PAIRED", True, False)
    for change in (lambda x: x, misaligned) * 2:
        w, _ = leaves(2, 3, 64)
        k = change(torch.zeros(2, 3, 64)).requires_grad_()
        out = rwkv_jit.timex(w, k, backend=backend)
        wanted = of_aligned if k.data_ptr() % 16 == 0 else of_others
        assert {launch.parameters[name] for launch in driver.take()} == {wanted}
        for change_of_g in (lambda x: x, misaligned):
            g = change_of_g(torch.zeros(2, 3, 64))
            torch.autograd.grad(out, [w, k], g, retain_graph=True)
            of_filter, *_, of_k = driver.take()
            of_g = of_aligned if g.data_ptr() % 16 == 0 else of_others
            assert (of_filter.parameters[name], of_k.parameters[name]) == (min(wanted, of_g), of_g)
            assert (of_filter.named["g"], of_k.named["k"]) == (g.data_ptr(), g.data_ptr())


@pytest.mark.parametrize("backend", ["tiles", "transforms"])
def test_known_calls_are_not_prepared_again(driver, backend, monkeypatch):
    def train(eps):
        w, k = leaves(2, 3, 64)
        out = rwkv_jit.timex(w, k, eps, backend)
        gw, gk = torch.autograd.grad(out, (w, k), torch.ones_like(out))
        launches = driver.take()
        assert launches[-1].addresses["out"] == gk.data_ptr()
        assert gw.data_ptr() in {x for launch in launches for x in launch.addresses.values()}
        return launches

    count = len(train(0.0))
    with monkeypatch.context() as known:
        for module, name in ((kernel, "get_most"), (op, "_check"), (op, "_plan_backward")):
            known.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
        assert len(train(0.0)) == count
        with pytest.raises(pytest.fail.Exception, match="_check was called"):
            train(1.0)
    assert [launch.named["eps"] for launch in train(1.0) if "eps" in launch.named] == [1.0, 0.0]


def test_backward_of_a_known_call_takes_few_frames(driver):
    w, k = leaves(2, 3, 64)
    out = rwkv_jit.timex(w, k, backend="tiles")
    g = torch.ones_like(out)
    names = entered(lambda: torch.autograd.grad(out, (w, k), g, retain_graph=True))
    assert 0 < len(names) <= 20, names


@pytest.mark.parametrize("wanted", ["w", "k"])
@pytest.mark.parametrize(("backend", "entries"), [
    ("tiles", {"w": ["timex_filter_gradient", "timex_filter_gradient_sum"], "k": ["timex_convolve"]}),
    ("transforms", {"w": ["timex_transform_gradient", "sum_rows"], "k": ["timex_factors", "timex_transform"]}),
])  # fmt: skip
def test_kernels_of_a_gradient_that_is_not_wanted_are_not_launched(driver, backend, entries, wanted):
    given = dict(zip("wk", (x.detach() for x in leaves(2, 3, 64)), strict=True))
    given[wanted].requires_grad_()
    out = rwkv_jit.timex(**given, backend=backend)
    driver.take()
    torch.autograd.grad(out.sum(), [given[wanted]])
    assert [launch.entry for launch in driver.take()] == entries[wanted]


def test_torch_op_launches_the_same(driver):
    w, k = leaves(2, 3, 64)
    for run in (
        lambda: rwkv_jit.timex(w, k, 0.5, "tiles"),
        lambda: torch.ops.rwkv_jit.timex_fwd.default(w, k, 0.5, "tiles", False),
    ):
        out = run()
        grads = torch.autograd.grad(out, (w, k), torch.ones_like(out))
        assert [launch.entry for launch in driver.take()] == [
            "timex_convolve", "timex_filter_gradient", "timex_filter_gradient_sum", "timex_convolve",
        ]  # fmt: skip
        assert [x.shape for x in grads] == [w.shape, k.shape]


@pytest.mark.parametrize("backend", ["tiles", "transforms"])
def test_first_use_inside_a_capture_is_an_error(driver, backend):
    driver.capturing = True
    for _ in range(2):
        with pytest.raises(RwkvJitError, match="timex: first use inside a CUDA graph capture"):
            rwkv_jit.timex(torch.zeros(3, 64), torch.zeros(2, 3, 64), backend=backend)
    driver.capturing = False
    rwkv_jit.timex(torch.zeros(3, 64), torch.zeros(2, 3, 64), backend=backend)
    assert driver.launches


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("backend", ["tiles", "transforms"])
def test_nothing_is_launched_for_nothing(driver, backend, shape):
    w, k = leaves(*shape)
    out = rwkv_jit.timex(w, k, 1.0, backend=backend)
    gw, gk = torch.autograd.grad(out, (w, k), torch.ones_like(out))
    assert (out.shape, gk.shape) == (shape, shape)
    assert not gw.any()
    assert (driver.launches, driver.asked) == ([], [])


# ---- launches of transforms --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "length", "threads"),
    [((1, 3, 1), 1024, 32), ((5, 3, 1025), 2048, 128), ((9, 30, 4096), 4096, 256), ((2, 5, 16384), 16384, 512)],
)
def test_rows_of_a_channel_follow_each_other(driver, sizes, length, threads):
    batch, channels, tokens = sizes
    w, k = torch.ones(channels, tokens), torch.ones(channels, batch, tokens).transpose(0, 1).requires_grad_()
    g = torch.ones(sizes)
    out = rwkv_jit.timex(w, k, 0.5, "transforms")
    assert out.shape == sizes
    (gk,) = torch.autograd.grad(out, [k], g)
    launches = driver.take()
    assert {(each.block, each.shared_bytes) for each in launches} == {((threads, 1, 1), length // 16 * 17 * 8)}
    for (of_filter, rows), source, result in ((launches[:2], k, out), (launches[2:], g, gk)):
        assert (of_filter.entry, of_filter.grid) == ("timex_factors", (channels, 1, 1))
        assert (rows.entry, rows.grid) == ("timex_transform", (batch * channels, 1, 1))
        factors = of_filter.named["factors"]
        assert of_filter.named == {**addresses(w=w), "factors": factors, "w_stride": tokens, "tokens": tokens}
        assert rows.addresses == {**addresses(k=source, out=result), "factors": factors}
        assert rows.numbers == {
            "k_batch_stride": source.stride(0), "k_stride": source.stride(1), "batch": batch, "channels": channels,
            "tokens": tokens, "eps": 0.5 if source is k else 0.0, "conjugates": int(source is g),
        }  # fmt: skip
        assert rows.parameters["LENGTH"] == length
        rows.request.template.check(rows.parameters)


@pytest.mark.parametrize(
    ("sizes", "rows", "groups", "blocks"),
    [
        ((1, 3, 1), 1, 1, 3),
        ((5, 3, 1024), 1, 5, 15),  # the channels are few: as many groups as there are rows
        ((64, 768, 8192), 32, 2, 264),
        ((64, 1100, 8192), 64, 1, 264),
        ((7, 300, 4096), 2, 4, 264),
    ],
)
@pytest.mark.parametrize("w_type", ["fp32", "fp16"])
def test_gradient_of_a_filter_in_groups_of_rows(sizes, rows, groups, blocks, w_type):
    batch, channels, tokens = sizes
    p = Problem(
        OPS["timex"], H200._replace(multiprocessors=132), {"w": w_type, "k": "fp32"}, B=batch, C=channels, T=tokens,
        backend="transforms", wanted=("w",),
    )  # fmt: skip
    schedule = whole.backward(p)
    step, *sums = schedule.launches
    assert (step.entry, step.grid) == ("timex_transform_gradient", (blocks, 1, 1))
    assert {"batch": batch, "channels": channels, "group_rows": rows, "groups": groups, "tokens": tokens}.items() <= (
        step.bind.items()
    )
    # One sum is the gradient, where it has its type.
    is_sum = groups == 1 and w_type == "fp32"
    assert (step.bind["sums"] == "dw") == is_sum == (not sums)
    if sums:
        assert (sums[0].bind["group_rows"], sums[0].bind["width"]) == (groups, channels * tokens)
        assert (sums[0].parameters["T_OUT"], sums[0].bind["sums"]) == (w_type, "dw")
        assert schedule.scratch["sums"] == 4 * groups * channels * tokens


def test_more_rows_than_a_launch_has_blocks(driver):
    w, k = torch.zeros(1, 1), torch.zeros(1, 1, 1).expand(2**31, 1, 1)
    with pytest.raises(UnsupportedConfigError, match="k: 'transforms' take at most 2147483647 rows, got 2147483648"):
        rwkv_jit.timex(w, k, backend="transforms")


# ---- kernels before they are called for --------------------------------------------------------------------------


def kernels(tokens, dtype=torch.float32, batch=None, direction="forward", w_dtype=None, arch="sm_90"):
    options = (None, None, w_dtype, torch.float32, None, None, tokens, batch)
    return ahead_requests.call_requests(ahead_requests.Calls("timex", None, dtype, arch, direction, *options))


def shown(requests):
    return {(each.template.name, *sorted(each.parameters.items())) for each in requests}


@pytest.mark.parametrize("dtypes", [FP32, BF16, (torch.bfloat16, torch.float32), (torch.float16, torch.float32)])
@pytest.mark.parametrize("tokens", [1, 63, 250, 512, 767, 1024, 2816, 4096, 16384, 16385])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_calls_ask_for_no_kernel_that_warm_has_not_made(driver, arch, tokens, dtypes):
    driver.use(arch)
    driver.multiprocessors = 8
    dtype, w_dtype = dtypes

    def made(*batches):
        several = itertools.product(ahead_requests.DIRECTIONS, batches)
        return shown(x for way, batch in several for x in kernels(tokens, dtype, batch, way, w_dtype, arch))

    taken = set()
    for batch in (1, 2, 5, 8, 9, 16, 17, 33):
        w, k = leaves(batch, 1, tokens, dtype=dtype, w_dtype=w_dtype)
        out = rwkv_jit.timex(w, k)
        torch.autograd.grad(out, (w, k), torch.ones_like(out))
        launched = shown(launch.request for launch in driver.take())
        assert launched <= made(batch)
        taken |= launched
    # Nothing is made that no call takes.
    assert taken <= made(None) <= taken | made(3, 4, 6, 7)


def test_a_batch_has_its_kernels_alone():
    assert [each.parameters["BATCH"] for each in kernels(512, batch=9)] == [16]
    names = {each.template.name for each in kernels(512, batch=9, direction="backward")}
    assert names == {"timex_convolve", "timex_filter_gradient"}
    assert {each.parameters.get("BATCH") for each in kernels(512)} == {8, 16, None}
    assert kernels(16385) == []


def test_one_kernel_is_named_by_tokens_and_batch(monkeypatch):
    monkeypatch.setattr(kernel, "get", lambda request: request)

    def specialize(*given, **more):
        made = rwkv_jit.specialize("timex", arch="sm_90", **dict(given), **more)
        return made.template.name, made.parameters

    name, parameters = specialize(tokens=512, dtype=torch.float16, t_w="fp32", vector=1)
    assert (name, parameters["BATCH"], parameters["T_W"], parameters["VECTOR"]) == ("timex_convolve", 32, "fp32", 1)
    assert specialize(tokens=512, batch=8)[1]["BATCH"] == 8
    assert specialize(tokens=512, direction="backward")[0] == "timex_filter_gradient"
    assert specialize(tokens=4096)[0] == specialize(tokens=512, backend="transforms")[0] == "timex_transform"


NOT_COMPILED = [
    ({}, TypeError, "tokens: expected a number for timex, got None"),
    ({"tokens": 0}, ValueError, "tokens: expected an int of at least 1, got 0"),
    ({"tokens": 64, "batch": True}, ValueError, "batch: expected an int of at least 1, got True"),
    ({"tokens": 64, "head_size": 8}, ValueError, "head_size: timex has none, got 8"),
    ({"tokens": 64, "decay": "raw"}, ValueError, "decay: timex has none, got 'raw'"),
    ({"tokens": 64, "backend": "split"}, ValueError, "backend: expected one of auto, tiles, transforms, fft"),
    ({"tokens": 64, "t_w": "fp8"}, ValueError, "t_w: expected one of fp16, bf16, fp32, got 'fp8'"),
    ({"tokens": 16385}, UnsupportedConfigError, "backend: 'fft' has no kernel, and calls of 16385 tokens take it"),
    ({"tokens": 64, "backend": "fft"}, UnsupportedConfigError, "backend: 'fft' has no kernel"),
    ({"op": "wkv7", "head_size": 8, "tokens": 64}, ValueError, "tokens: is only for timex, the kernels of"),
    ({"op": "wkv4", "batch": 8}, ValueError, "batch: is only for timex, the kernels of wkv4 take any; got 8"),
]
NOT_WARMED = [
    ({}, TypeError, "tokens: expected a number for timex, got None"),
    ({"tokens": 64, "head_sizes": 8}, ValueError, "head_size: timex has none, got 8"),
    ({"tokens": 64, "state_dtype": torch.float16}, TypeError, "state_dtype: timex has no states"),
    ({"op": "wkv4", "value_sizes": 8}, ValueError, "value_size: wkv4 has none, got 8"),
    ({"op": "wkv7", "head_sizes": 8, "tokens": 8}, ValueError, "tokens: is only for timex"),
]


@pytest.mark.parametrize(
    ("compile", "given", "error", "message"),
    [("specialize", *case) for case in NOT_COMPILED] + [("warm", *case) for case in NOT_WARMED],
    ids=str,
)
def test_what_cannot_be_compiled_ahead(compile, given, error, message, monkeypatch):
    monkeypatch.setattr(kernel, "get_async", lambda _: pytest.fail("it compiled"))
    with pytest.raises(error, match=message):
        getattr(rwkv_jit, compile)(**{"op": "timex", "arch": "sm_90", **given})


@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 1, 5), (1, 1, 5), (2, 3, 1)])
@pytest.mark.parametrize("backend", ["auto", "fft"])
def test_results_have_the_strides_of_their_shapes(shape, backend):
    k = torch.randn(shape, requires_grad=True)
    w = torch.randn(shape[1:], requires_grad=True)
    out = rwkv_jit.timex(w, k, backend=backend)
    for x in (out, *torch.autograd.grad(out.square().sum(), (w, k))):
        assert x.stride() == torch.empty(x.shape).stride()
