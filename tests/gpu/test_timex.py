"""timex on the GPU against float64 on the same rounded inputs."""

import pytest
import torch

import rwkv_jit
from rwkv_jit.call import tensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OWN = ["tiles", "transforms"]
GATES = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 257, 512, 513, 768, 1000]
BATCHES = [1, 3, 8, 9, 16, 17, 32, 33]
pytestmark = [pytest.mark.parametrize("op", ["timex"])]


def make(batch, channels, tokens, dtype, w_dtype=None, random=torch.randn):
    w = random(channels, tokens, device="cuda").to(w_dtype or dtype).requires_grad_()
    k, g = (random(batch, channels, tokens, device="cuda").to(dtype) for _ in range(2))
    return w, k.requires_grad_(), g


def run(w, k, g, eps=0.25, backend="tiles"):
    out = rwkv_jit.timex(w, k, eps, backend=backend)
    return out.detach(), *torch.autograd.grad(out, (w, k), g)


def exact(w, k, g, eps=0.25):
    leaves = [x.detach().double().requires_grad_() for x in (w, k)]
    out = rwkv_jit.timex_ref(*leaves, eps)
    return out.detach(), *torch.autograd.grad(out, leaves, g.double())


def check(given, backend="tiles"):
    found = run(*given, backend=backend)
    for name, x, want in zip(("out", "gw", "gk"), found, exact(*given), strict=True):
        error = float((x.double() - want).norm() / want.norm())
        assert error <= GATES[given[1].dtype], name
    assert [x.dtype for x in found] == [given[1].dtype, given[0].dtype, given[1].dtype]
    if backend != "fft":
        assert all(torch.equal(x, y) for x, y in zip(run(*given, backend=backend), found, strict=True))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(op, dtype, tokens):
    check(make(5, 3, tokens, DTYPES[dtype]))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_batch(op, dtype, batch):
    check(make(batch, 3, 100, DTYPES[dtype]))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [768, 2049, 4096, 8192, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(op, dtype, tokens):
    check(make(9 if tokens < 8192 else 3, 2, tokens, DTYPES[dtype]))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [40, 700, 5000])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("backend", OWN)
def test_filter_in_float32(op, backend, dtype, tokens):
    check(make(9, 3, tokens, DTYPES[dtype], torch.float32), backend)


@pytest.mark.parametrize("tokens", [768, 8192])
@pytest.mark.parametrize("backend", OWN)
def test_numbers_of_one_sign(op, backend, tokens):
    check(make(8, 2, tokens, torch.float32, random=torch.rand), backend)


@pytest.mark.parametrize("tokens", [1, 77, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_fft(op, dtype, tokens):
    check(make(3, 4, tokens, DTYPES[dtype]), backend="fft")


def test_each_direction_takes_what_is_faster(op):
    given = make(8, 3, 768, torch.float32)
    out, *gradients = run(*given, backend="auto")
    assert torch.equal(out, run(*given, backend="transforms")[0])
    assert all(torch.equal(x, y) for x, y in zip(gradients, run(*given, backend="tiles")[1:], strict=True))


@pytest.mark.parametrize("change", [
    lambda k: k.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    lambda k: k.transpose(0, 1).contiguous().transpose(0, 1),
    lambda k: torch.cat([k.new_zeros(1), k.flatten()])[1:].view(k.shape),
    lambda k: torch.cat([k, k[:, :, :3]], 2)[:, :, :-3],
])  # fmt: skip
@pytest.mark.parametrize("backend", OWN)
def test_any_strides_and_addresses(op, backend, change):
    w, k, g = make(5, 6, 200, torch.float32)
    want = run(w, k, g, backend=backend)
    found = run(w, change(k.detach()).requires_grad_(), change(g), backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("backend", OWN)
def test_a_row_that_is_not_finite_spoils_no_other(op, backend):
    w, k, g = make(5, 6, 200, torch.float32)
    sick = k.detach().clone()
    sick[1, 2, 77], sick[2, 3, 5] = float("inf"), float("nan")
    out, want = rwkv_jit.timex(w, sick, backend=backend), rwkv_jit.timex(w, k, backend=backend)
    well = sick.isfinite().all(-1)
    assert torch.equal(out[well], want[well])
    assert not out[1, 2, 77:].isfinite().any()
    assert not out[2, 3, 5:].isfinite().any()


@pytest.mark.parametrize("backend", OWN)
def test_an_infinite_weight_is_never_a_finite_number_that_is_wrong(op, backend):
    w, k, g = make(5, 6, 200, torch.float32)
    sick = w.detach().clone()
    sick[3, 50] = float("inf")
    out, want = rwkv_jit.timex(sick, k, backend=backend), rwkv_jit.timex(w, k, backend=backend)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(out[:, others], want[:, others])
    assert not out[:, 3].isfinite().any()


@pytest.mark.parametrize("scales", [(1e-30, 1e30), (1e30, 1e-30), (1e-20, 1e-10), (1e15, 1e18)])
@pytest.mark.parametrize("backend", OWN)
def test_any_scale(op, backend, scales):
    w, k, g = make(3, 4, 300, torch.float32)
    given = [(x.detach() * scale).requires_grad_() for x, scale in zip((w, k), scales, strict=True)]
    want = exact(*given, g, eps=0.0)[0]
    out = rwkv_jit.timex(*given, backend=backend).detach()
    assert float((out.double() - want).norm() / want.norm()) <= GATES[torch.float32]


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("backend", OWN)
def test_nothing_to_compute(op, backend, shape):
    w, k, g = make(*shape, torch.float32)
    out, gw, gk = run(w, k, g, backend=backend)
    assert (out.shape, gw.shape, gk.shape) == (shape, shape[1:], shape)
    assert not gw.any()


@pytest.mark.parametrize("backend", OWN)
def test_in_a_graph_on_another_stream(op, backend):
    w, k, g = make(3, 4, 300, torch.bfloat16)
    want = run(w, k, g, backend=backend)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run(w, k, g, backend=backend)
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("backend", OWN)
def test_compiles_into_one_graph(op, backend):
    w, k, g = make(3, 4, 300, torch.float32)
    step = torch.compile(lambda w, k: rwkv_jit.timex(w, k, 0.25, backend=backend), fullgraph=True, backend="aot_eager")
    out = step(w, k)
    found = (out.detach(), *torch.autograd.grad(out, (w, k), g))
    assert all(torch.equal(x, y) for x, y in zip(found, run(w, k, g, backend=backend), strict=True))


@pytest.mark.parametrize("backend", [*OWN, "fft"])
def test_torch_ops_pass_opcheck(op, backend):
    w, k, g = (x.detach() for x in make(2, 3, 40, torch.float32))
    torch.library.opcheck(torch.ops.rwkv_jit.timex_fwd.default, (w, k, 0.5, backend, True))
    torch.library.opcheck(torch.ops.rwkv_jit.timex_bwd.default, (w, k, g, 0.0, backend))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("sizes", [(1, 1), (5, 3), (33, 2)])
@pytest.mark.parametrize("tokens", [1, 2, 768, 1000, 1501, 2048, 3000, 4096, 6001, 8192, 12000, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_of_a_transform(op, dtype, tokens, sizes):
    check(make(*sizes, tokens, DTYPES[dtype]), backend="transforms")


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("multiprocessors", [1, 25])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transforms_of_many_channels_and_of_rows_of_very_different_size(
    op, dtype, multiprocessors, launched, monkeypatch
):
    """Each row is as precise as alone. Gradients of the filter sum all six rows on such a GPU, or two."""
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: multiprocessors)
    w, k, g = make(6, 300, 1000, DTYPES[dtype])
    with torch.no_grad():
        k[::2] *= 2.0**-10
    for x, want in zip(run(w, k, g, backend="transforms"), exact(w, k, g), strict=True):
        of_rows = (x.double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert float(of_rows.max()) <= 2 * GATES[k.dtype]
    has_groups = multiprocessors > 1 or dtype != "fp32"  # whose sums are added up, and rounded
    assert ("sum_rows" in {made.name for made in launched}) == has_groups
