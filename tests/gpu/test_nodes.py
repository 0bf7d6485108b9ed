"""Layers that run as one node of autograd, beside their parts: all bits of results and gradients, and their memory."""

import nn_cases
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rwkv_jit
from rwkv_jit.call import tape
from rwkv_jit.nn import node

pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record
WIDTH = 256
MAKERS = {
    "KimiDeltaAttention": lambda **place: rwkv_jit.nn.KimiDeltaAttention(WIDTH, 2, 4, 64, 64, **place),
    "GatedDeltaNet": lambda **place: rwkv_jit.nn.GatedDeltaNet(WIDTH, 2, 4, 64, 64, **place),
    "Mamba2": lambda **place: rwkv_jit.nn.Mamba2(WIDTH, 8, 64, 64, 2, **place),
    "GatedLinearAttention": lambda **place: rwkv_jit.nn.GatedLinearAttention(WIDTH, 4, WIDTH, **place),
    "RWKV4TimeMix": lambda **place: rwkv_jit.nn.RWKV4TimeMix(WIDTH, 1, 3, **place),
    **{
        f"RWKV{n}Block": lambda n=n, **place: getattr(rwkv_jit.nn, f"RWKV{n}Block")(WIDTH, 0, 2, 64, **place)
        for n in (5, 6, 7)
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    """How many nodes ran, with none that was noted before."""
    monkeypatch.setattr(node, "_shared", {})
    ran, apply = [], tape._apply
    monkeypatch.setattr(tape, "_apply", lambda recorded, *arrays: (ran.append(recorded), apply(recorded, *arrays))[1])
    return ran


def make(kind, dtype):
    layer = MAKERS[kind](device="cuda", dtype=dtype)
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.1 * torch.randn_like(x))
    return layer


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else [x for each in results for x in flat(each)]


def equal(found, want):
    for x, y in zip(found, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.dtype == y.dtype and torch.equal(x, y))


def run(layer, x, dtype, cu_seqlens=None):
    """Results and gradients of a text and of the text behind it."""
    with torch.autocast("cuda", dtype, dtype != x.dtype, cache_enabled=False):
        first = layer(x, cu_seqlens=cu_seqlens)
        results = flat(layer(x.detach() * 0.5, state=first[-1], cu_seqlens=cu_seqlens))
    grads = torch.autograd.grad(nn_cases.weighted(results), [*layer.parameters(), x], allow_unused=True)
    return [*results, *grads]


@pytest.mark.parametrize(
    "types", [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.float32,) * 2], ids=str
)
@pytest.mark.parametrize("packed", [None, torch.int64, torch.int32])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_layer(op, kind, packed, types, nodes, monkeypatch):
    layer = make(kind, types[0])
    x = torch.randn(1 if packed else 3, 333, WIDTH, device="cuda", dtype=types[0]).requires_grad_()
    bounds = None if packed is None else torch.tensor([0, 100, 101, 333], device="cuda", dtype=packed)
    found = [run(layer, x, types[1], bounds) for _ in range(2)]
    assert len(nodes) == (0 if kind == "RWKV4TimeMix" and packed else 4)
    monkeypatch.setattr(node, "devices", ())
    want = run(layer, x, types[1], bounds)
    for each in found:
        equal(each, want)


def step(model, tokens, checkpointing=False, **options):
    model.checkpointing = checkpointing
    model.zero_grad()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:], **options)
    loss.backward()
    return [loss.detach(), *[x.grad.clone() for x in model.parameters()]]


@pytest.fixture
def model():
    model = rwkv_jit.nn.RWKV7(1000, WIDTH, 4, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.05 * torch.randn_like(x))
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_whole_model(op, checkpointing, model, nodes, monkeypatch):
    tokens = torch.randint(1000, (4, 513), device="cuda")
    found = [step(model, tokens, checkpointing) for _ in range(3)]
    assert len(nodes) == 12 * (1 + checkpointing)
    monkeypatch.setattr(node, "devices", ())
    for each in found:
        equal(each, step(model, tokens, checkpointing))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(op, reentrant, nodes, monkeypatch):
    layer, x = make("RWKV7Block", torch.bfloat16), torch.randn(2, 300, WIDTH, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()

    def both():
        y, *_ = checkpoint(layer, x, use_reentrant=reentrant)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x])] if not reentrant else backward(y)

    def backward(y):
        x.grad = None
        y.float().square().sum().backward()
        return [y.detach(), x.grad]

    found = [both() for _ in range(2)]
    assert nodes
    monkeypatch.setattr(node, "devices", ())
    for each in found:
        equal(each, both())


def test_captured_after_one_step(op, model, nodes, monkeypatch):
    tokens = torch.randint(1000, (2, 257), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(model, tokens)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    count = len(nodes)
    with torch.cuda.graph(graph):
        found = step(model, tokens)
    assert len(nodes) == count + 4
    tokens.copy_(torch.randint(1000, (2, 257), device="cuda"))
    graph.replay()
    monkeypatch.setattr(node, "devices", ())
    equal([x.clone() for x in found], step(model, tokens))


def test_memory_is_that_of_the_parts(op, nodes, monkeypatch):
    model = rwkv_jit.nn.RWKV7(1000, 512, 6, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(1000, (4, 2049), device="cuda")

    def peak(checkpointing):
        for _ in range(2):
            step(model, tokens, checkpointing)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, tokens, checkpointing)
        return torch.cuda.max_memory_allocated()

    found = [peak(each) for each in (False, True)]
    assert nodes
    monkeypatch.setattr(node, "devices", ())
    for x, want in zip(found, [peak(each) for each in (False, True)], strict=True):
        assert x <= 1.01 * want
