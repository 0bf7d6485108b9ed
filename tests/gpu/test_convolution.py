"""The short causal convolution on the GPU against float64: values, gradients, pools, and what must be left alone."""

import itertools

import comparing
import plain_convolution
import pytest
import torch

import rwkv_jit
from rwkv_jit import compat

DTYPES = comparing.DTYPES
LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Of the tokens, the parameters and the pool.
KINDS = [
    ("bf16", "bf16", "bf16"), ("fp32", "fp32", "fp32"), ("fp16", "fp16", "fp16"), ("bf16", "fp32", "fp32"),
    ("fp16", "fp32", "bf16"), ("fp32", "fp32", "fp16"),
]  # fmt: skip
CHANNELS = [1, 6, 33, 100, 256, 1001, 2048, 5000]
# Runs of tokens end within texts, at their ends and behind them.
LENGTHS = [[1], [2, 2, 2], [7] * 3, [0, 3, 1, 0, 0, 9, 2, 0], [70], [33, 0, 1, 100, 2, 64, 0]]
SLOTS = 11
pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
KIND = pytest.mark.parametrize("kind", KINDS, ids="-".join)


def with_kinds(name, sizes):
    """Each size with two kinds, and each kind with several sizes."""
    pairs = [(size, KINDS[(place + shift) % len(KINDS)]) for place, size in enumerate(sizes) for shift in (0, 3)]
    return pytest.mark.parametrize((name, "kind"), pairs, ids=[f"{size}-{'-'.join(kind)}" for size, kind in pairs])


def make(shape, kind, width=4, texts=None, bias=True, state=True):
    """Arguments of `causal_conv1d` by name."""
    made = {"x": torch.randn(shape), "weight": torch.randn(shape[-1], width)}
    made |= {"bias": torch.randn(shape[-1])} if bias else {}
    made |= {"initial_state": torch.randn(texts or shape[0], shape[-1], width - 1)} if state else {}
    io, wide, _ = (DTYPES[name] for name in kind)
    types = {"weight": wide, "bias": wide}
    return {n: x.cuda().to(types.get(n, io)).requires_grad_() for n, x in made.items()}


def run(arguments, weights=None, function=rwkv_jit.causal_conv1d, **options):
    """y, the final state, the gradients of all arguments, and what those of y and the final state were."""
    y, final = function(**arguments, output_final_state=True, **options)
    weights = weights or [torch.randn(x.shape, device=x.device).to(x.dtype) for x in (y, final)]
    return y, final, torch.autograd.grad([y, final], [*arguments.values()], weights), weights


def compare(arguments, **options):
    """Check a call against float64."""
    y, final, grads, weights = run(arguments, **options)
    exact = {n: x.detach().double().requires_grad_() for n, x in arguments.items()}
    want = plain_convolution.causal_conv1d(**exact, **options)
    check(y, want[0].detach())
    assert torch.equal(final.double(), want[1])
    of_y, of_final = (
        torch.autograd.grad(x, [*exact.values()], weight.double(), retain_graph=True, materialize_grads=True)
        for x, weight in zip(want, weights, strict=True)
    )
    for x, grad, one, other in zip(arguments.values(), grads, of_y, of_final, strict=True):
        assert grad.dtype == x.dtype
        # A sum of what comes of y and of the final state, each rounded, which may cancel where they are few.
        check(grad, one + other, 4, max(float(one.norm()), float(other.norm())))


def check(x, want, times=1, size=0.0):
    """Check against float64, beside the size of the result, or of its parts."""
    assert x.shape == want.shape
    assert bool(x.isfinite().all())
    allowed = times * LIMITS[x.dtype] * max(float(want.norm()), size, 1e-3)
    assert float((x.detach().double() - want).norm()) <= allowed


# ---- whole texts -------------------------------------------------------------------------------------------------


@with_kinds("channels", CHANNELS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}x{max(x)}")
def test_packed_texts(op, channels, width, lengths, kind, guarded_memory):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
    arguments = make((1, sum(lengths), channels), kind, width, len(lengths), bias=width != 3, state=width != 2)
    compare(arguments, cu_seqlens=bounds, activation="silu" if channels % 2 else None)


@with_kinds("channels", CHANNELS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 37), (1, 300)], ids=str)
def test_texts_of_one_length(op, channels, shape, kind, guarded_memory):
    for width, has_state in ((4, False), (4, True), (3, True), (2, False)):
        compare(make((*shape, channels), kind, width, state=has_state), activation="silu")


@pytest.mark.parametrize("width", [5, 6, 7, 8])
@KIND
def test_wide_kernels(op, width, kind, guarded_memory):
    bounds = torch.tensor([0, 3, 3, 12, 80], device="cuda")
    compare(make((1, 80, 100), kind, width, 4), cu_seqlens=bounds, activation="silu")
    compare(make((2, 21, 72), kind, width, bias=False))


@KIND
def test_many_tokens(op, kind):
    """Blocks of the backward have long runs, and add up many tokens."""
    compare(make((2, 5000, 256), kind), activation="silu")
    bounds = torch.tensor([0, 1, 4095, 4097, 10_000], device="cuda")
    compare(make((1, 10_000, 200), kind, texts=4), activation="silu", cu_seqlens=bounds)


@KIND
def test_a_text_may_be_cut_anywhere(op, kind):
    arguments = {n: x.detach() for n, x in make((2, 50, 96), kind).items()}
    whole, final = rwkv_jit.causal_conv1d(**arguments, activation="silu", output_final_state=True)
    for cuts in ([0, 25, 50], [0, 1, 2, 50], [0, 2, 2, 35, 50]):
        state, made = arguments["initial_state"], []
        for begin, end in itertools.pairwise(cuts):
            part = arguments | {"x": arguments["x"][:, begin:end], "initial_state": state}
            y, state = rwkv_jit.causal_conv1d(**part, activation="silu", output_final_state=True)
            made.append(y)
        assert torch.equal(torch.cat(made, 1), whole)
        assert torch.equal(state, final)


@KIND
def test_a_part_of_a_wider_product(op, kind):
    """In place where accesses fit, else by a copy."""
    io = DTYPES[kind[0]]
    wide = torch.randn(2, 40, 3 * 64 + 8, device="cuda").to(io)
    for begin in (0, 64, 8, 3):
        arguments = make((2, 40, 64), kind) | {"x": wide[..., begin : begin + 64].detach().requires_grad_()}
        compare(arguments, activation="silu")
    arguments = make((2, 40, 64), kind)
    arguments["x"] = arguments["x"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    compare(arguments)


def test_gradients_repeat(op):
    arguments = make((3, 3000, 512), KINDS[0])
    y, final, grads, weights = run(arguments, activation="silu")
    for _ in range(3):
        again = run(arguments, weights, activation="silu")
        for x, want in zip((*again[:2], *again[2]), (y, final, *grads), strict=True):
            assert torch.equal(x, want)


def test_each_gradient_alone_is_the_same(op, guarded_memory):
    arguments = make((2, 70, 96), KINDS[0])
    y, _ = rwkv_jit.causal_conv1d(**arguments, activation="silu")
    dy = torch.randn(y.shape, device="cuda").to(y.dtype)
    together = torch.autograd.grad(y, [*arguments.values()], dy)
    for name, want in zip(arguments, together, strict=True):
        alone = {n: own.detach().requires_grad_(n == name) for n, own in arguments.items()}
        y, _ = rwkv_jit.causal_conv1d(**alone, activation="silu")
        assert torch.equal(torch.autograd.grad(y, alone[name], dy)[0], want)


def test_wrong_bounds_in_a_graph_stay_in_memory(op):
    """Values that change behind a check are read all the same: bounds are clamped."""
    arguments = {n: x.detach() for n, x in make((1, 64, 96), KINDS[0], texts=3).items()}
    bounds = torch.tensor([0, 10, 30, 64], device="cuda")
    rwkv_jit.causal_conv1d(**arguments, cu_seqlens=bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = rwkv_jit.causal_conv1d(**arguments, cu_seqlens=bounds)
    for wrong in ([0, 100, -5, 64], [7, 3, 2, 1], [0, 10**9, 10**9, 10**9]):
        bounds.copy_(torch.tensor(wrong))
        graph.replay()
        torch.cuda.synchronize()
        assert bool(y.isfinite().all())
    bounds.copy_(torch.tensor([0, 20, 20, 64]))
    graph.replay()
    want, _ = rwkv_jit.causal_conv1d(**arguments, cu_seqlens=bounds.clone())
    assert torch.equal(y, want)


def test_offsets_have_64_bits(op, most_of_the_memory):
    channels = 2**16
    tokens = 2**31 // channels + 40
    x = torch.zeros(1, tokens, channels, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(channels, 4, device="cuda", dtype=torch.bfloat16)
    x[:, -9:] = torch.randn(9, channels, device="cuda", dtype=torch.bfloat16)
    y, _ = rwkv_jit.causal_conv1d(x, weight)
    want, _ = rwkv_jit.causal_conv1d(x[:, -12:].clone(), weight)
    assert torch.equal(y[:, -9:], want[:, -9:])
    assert not y[:, :-9].any()


def test_more_blocks_than_a_dimension_of_16_bits_has(op):
    x, weight = torch.randn(70_000, 2, 8, device="cuda"), torch.randn(8, 4, device="cuda")
    y, _ = rwkv_jit.causal_conv1d(x, weight)
    check(y[-3:], plain_convolution.causal_conv1d(x[-3:], weight)[0])
    pool = torch.randn(70_000, 8, 3, device="cuda")
    want, state = plain_convolution.update(x[-3:], pool[-3:], weight)
    check(rwkv_jit.causal_conv1d_update(x, pool, weight)[-3:], want)
    assert torch.equal(pool[-3:], state)


# ---- a pool ------------------------------------------------------------------------------------------------------


@with_kinds("channels", CHANNELS)
@pytest.mark.parametrize("tokens", [None, 1, 2, 9])
def test_rows_of_a_pool(op, channels, tokens, kind, guarded_memory):
    """Slots with room between them, which stays as it is, in both orders of their dimensions."""
    io, _, kept = (DTYPES[name] for name in kind)
    for width, length, is_last in (
        (4, 3, False),
        (4, 4, True),
        (2, 1, False),
        (3, 5, False),
        (3, 2, True),
        (4, 16, False),
    ):
        arguments = {n: x.detach() for n, x in make((5, tokens or 1, channels), kind, width, state=False).items()}
        x, weight, bias = arguments.values()
        memory = torch.full((SLOTS, channels * length + 8), torch.nan, device="cuda", dtype=kept)
        flat = memory[:, : channels * length]
        flat.copy_(torch.randn(flat.shape))
        pool = flat.view(SLOTS, length, channels).transpose(1, 2) if is_last else flat.view(SLOTS, channels, length)
        slots = torch.randperm(SLOTS, device="cuda")[:5]
        slots[1], slots[2] = -1, SLOTS
        seen = torch.randint(2**20, (5,), device="cuda", dtype=torch.int32)
        for (indices, active), had in itertools.product(
            ((slots, None), (slots.to(torch.int32), 4), (None, None)), (None, seen)
        ):
            given = None if active is None else torch.tensor([active], device="cuda", dtype=torch.int32)
            want, state = plain_convolution.update(x, pool, weight, bias, "silu", indices, -1, active, had)
            y = rwkv_jit.causal_conv1d_update(
                x if tokens else x[:, 0], pool, weight, bias, activation="silu", cache_seqlens=had,
                state_indices=indices, num_active=given,
            )  # fmt: skip
            assert y.dtype == io
            check(y.view(x.shape), want)
            assert torch.equal(pool, state)
            assert bool(memory[:, channels * length :].isnan().all())


@KIND
def test_an_update_is_the_next_tokens_of_a_text(op, kind):
    """Bit for bit, token by token and several at once."""
    kind = (*kind[:2], kind[0])
    arguments = {n: x.detach() for n, x in make((2, 20, 96), kind).items()}
    x, weight, bias, state = arguments.values()
    want, final = rwkv_jit.causal_conv1d(**arguments, activation="silu", output_final_state=True)
    slots = torch.tensor([5, 2], device="cuda")
    for cuts in (range(21), [0, 4, 5, 20]):
        pool = torch.full((SLOTS, 96, 3), torch.nan, device="cuda", dtype=x.dtype)
        pool[slots] = state
        for begin, end in itertools.pairwise(cuts):
            y = rwkv_jit.causal_conv1d_update(
                x[:, begin:end], pool, weight, bias, activation="silu", state_indices=slots
            )
            assert torch.equal(y, want[:, begin:end])
        assert torch.equal(pool[slots], final)
        assert int(pool.isnan().any(2).any(1).sum()) == SLOTS - 2


def test_updates_in_a_graph(op):
    arguments = {n: x.detach() for n, x in make((3, 4, 96), KINDS[0], state=False).items()}
    x, weight, bias = arguments.values()
    pool, slots = torch.zeros(SLOTS, 96, 3, device="cuda"), torch.tensor([5, 2, 0], device="cuda")
    active, token = torch.tensor([3], device="cuda", dtype=torch.int32), torch.empty_like(x[:, 0])
    options = {"activation": "silu", "state_indices": slots, "num_active": active}
    rwkv_jit.causal_conv1d_update(token, pool.clone(), weight, bias, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rwkv_jit.causal_conv1d_update(token, pool, weight, bias, **options)
    want, _ = plain_convolution.causal_conv1d(x, weight, bias, activation="silu")
    for t in range(4):
        token.copy_(x[:, t])
        active.fill_(3 if t < 3 else 2)
        graph.replay()
        check(y[: int(active)], want[: int(active), t])
    assert not y[2].any()
    assert torch.equal(pool[0, :, -1], x[2, 2].float())


# ---- torch, and the package's names ------------------------------------------------------------------------------


def test_compiled(op):
    arguments = make((2, 40, 96), KINDS[0])
    want = run(arguments, activation="silu")
    compiled = torch.compile(rwkv_jit.causal_conv1d, fullgraph=True)
    found = run(arguments, want[3], compiled, activation="silu")
    for x, y in zip((*found[:2], *found[2]), (*want[:2], *want[2]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["channels", "tokens"])
def test_the_names_of_the_package(op, layout):
    x, weight = torch.randn(2, 96, 30, device="cuda"), torch.randn(96, 4, device="cuda")
    if layout == "tokens":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    y, state = compat.causal_conv1d_fn(x, weight, return_final_states=True, activation="silu")
    want, final = plain_convolution.causal_conv1d(x.transpose(1, 2), weight, activation="silu")
    check(y, want.transpose(1, 2))
    assert torch.equal(state.double(), final)
    indices = torch.tensor([1, -1], device="cuda", dtype=torch.int32)
    before = state.clone()
    y = compat.causal_conv1d_update(x[..., 0], state, weight, conv_state_indices=indices)
    want, left = plain_convolution.update(x[..., :1].transpose(1, 2), before, weight, slots=indices)
    check(y[0], want[0, 0])
    assert not y[1].any()
    assert torch.equal(state, left)
    seq_idx = torch.tensor([[0] * 11 + [1] * 19, [3] * 30], device="cuda", dtype=torch.int32)
    y = compat.causal_conv1d_fn(x, weight, seq_idx=seq_idx)
    parts = [x[:1, :, :11], x[:1, :, 11:], x[1:]]
    wants = [plain_convolution.causal_conv1d(part.transpose(1, 2), weight)[0][0] for part in parts]
    check(y.transpose(1, 2).flatten(0, 1), torch.cat(wants))
