"""The functions of the package causal-conv1d: against float64, token by token."""

import itertools

import plain_convolution
import pytest
import torch

from rwkv_jit import compat
from rwkv_jit.kernels.errors import UnsupportedConfigError

B, C, T, W, SLOTS = 3, 6, 9, 4, 7
LIMITS = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
DTYPE = pytest.mark.parametrize("dtype", LIMITS)


def near(x, want, times=1):
    x, want = x.detach(), want.detach()
    assert x.shape == want.shape
    assert float((x.double() - want).norm()) <= times * LIMITS[x.dtype] * max(float(want.norm()), 1e-3)


def make(dtype=torch.float32, wide=None, width=W, tokens=T):
    """x [B, C, T], weight, bias and initial states."""
    made = torch.randn(B, C, tokens), torch.randn(C, width), torch.randn(C), torch.randn(B, C, width - 1)
    types = dtype, wide or dtype, wide or dtype, dtype
    return [x.to(own).requires_grad_() for x, own in zip(made, types, strict=True)]


def reference(x, weight, bias=None, initial_states=None, activation=None):
    y, final = plain_convolution.causal_conv1d(x.transpose(1, 2), weight, bias, initial_states, None, activation)
    return y.transpose(1, 2), final


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@DTYPE
def test_whole_texts(dtype, wide):
    """Parameters of another dtype too, with gradients in theirs."""
    given = make(dtype, wide)
    exact = [x.detach().double().requires_grad_() for x in given]
    y, final = compat.causal_conv1d_fn(*given[:3], None, given[3], True, None, "silu")
    want = reference(*exact, activation="silu")
    weights = [torch.randn(x.shape).to(dtype) for x in (y, final)]
    near(y, want[0])
    assert torch.equal(final.double(), want[1])
    grads = torch.autograd.grad([y, final], given, weights)
    wanted = torch.autograd.grad(want, exact, [x.double() for x in weights])
    coarser = max((dtype, wide), key=LIMITS.get)
    for x, grad, own in zip(given, grads, wanted, strict=True):
        assert grad.dtype == x.dtype
        near(grad.to(coarser), own, 4)
    for activation, kind in ((None, None), ("swish", "silu")):
        near(
            compat.causal_conv1d_fn(given[0], given[1], activation=activation),
            reference(*exact[:2], activation=kind)[0],
        )


def test_final_states_go_where_they_are_wanted():
    for tokens in (T, 2):
        given = make(tokens=tokens)
        target = torch.full((B, W - 1, C), torch.nan).transpose(1, 2)
        _, final = compat.causal_conv1d_fn(
            *given[:3], initial_states=given[3], return_final_states=True, final_states_out=target
        )
        assert final is target
        near(final, reference(*given)[1])
        grads = torch.autograd.grad(final.sum(), [given[0], given[3]], allow_unused=True, materialize_grads=True)
        assert [float(grad.sum()) for grad in grads] == [B * C * min(tokens, W - 1), B * C * max(W - 1 - tokens, 0)]


@DTYPE
def test_texts_that_have_numbers(dtype):
    x, weight, bias, _ = make(dtype)
    seq_idx = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2], [5, 5, 4, 4, 4, -1, -1, 7, 7], [0] * 9], dtype=torch.int32)
    y = compat.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")
    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    want = []
    for row, numbers in zip(exact[0], seq_idx.tolist(), strict=True):
        borders = [0, *(t for t in range(1, T) if numbers[t] != numbers[t - 1]), T]
        parts = []
        for begin, end in zip(borders, borders[1:], strict=False):
            part = reference(row[None, :, begin:end], *exact[1:], activation="silu")[0]
            parts.append(part * (numbers[begin] >= 0))
        want.append(torch.cat(parts, 2))
    want = torch.cat(want)
    near(y, want)
    weights = torch.randn(y.shape).to(dtype)
    grads = torch.autograd.grad(y, [x, weight, bias], weights)
    for grad, own in zip(grads, torch.autograd.grad(want, exact, weights.double()), strict=True):
        near(grad, own, 4)


def test_texts_that_have_numbers_go_without_states():
    x, weight, bias, states = make()
    seq_idx = torch.zeros(B, T, dtype=torch.int32)
    for more in ({"initial_states": states}, {"return_final_states": True}):
        with pytest.raises(
            UnsupportedConfigError, match=f"seq_idx: cannot be combined with {next(iter(more))}; pass cu_seqlens"
        ):
            compat.causal_conv1d_fn(x, weight, bias, seq_idx, **more)
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    nothing = compat.causal_conv1d_fn(given[0][..., :0], *given[1:], seq_idx[:, :0])
    assert nothing.shape == (B, C, 0)
    assert not any(grad.any() for grad in torch.autograd.grad(nothing.sum(), given))


@pytest.mark.parametrize("layout", ["channels", "tokens"])
@pytest.mark.parametrize("length", [W - 1, W, W + 3, 16])
@DTYPE
def test_update(dtype, length, layout):
    _, weight, bias, _ = make(dtype)
    for shape in ((B, C), (B, C, 1), (B, C, 5)):
        x, pool = torch.randn(shape).to(dtype), torch.randn(SLOTS, C, length).to(dtype)
        if layout == "tokens":  # those of a slot first in memory
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        slots = torch.tensor([4, -1, 2], dtype=torch.int32)
        had = torch.tensor([0, 11, 1023], dtype=torch.int32)
        for indices, seen in itertools.product((slots, None), (None, had)):
            before = pool.clone()
            y = compat.causal_conv1d_update(x, pool, weight, bias, "silu", seen, indices)
            rows = x.view(B, C, -1).transpose(1, 2)
            want, state = plain_convolution.update(
                rows, before, weight, bias, "silu", indices, cache_seqlens=seen
            )  # fmt: skip
            want = want.transpose(1, 2).reshape(shape)
            assert not y.requires_grad
            if indices is not None:
                assert not y[1].any()
                want[1] = 0
            near(y, want)
            assert torch.equal(pool, state)


def test_update_goes_on_from_final_states():
    x, weight, bias, states = make()
    want, final = compat.causal_conv1d_fn(x, weight, bias, None, states, True)
    _, state = compat.causal_conv1d_fn(x[..., :4], weight, bias, None, states, True)
    state = state.detach()
    for t in range(4, T):
        near(compat.causal_conv1d_update(x[..., t], state, weight, bias), want[..., t].double(), 4)
    assert torch.equal(state, final)


@pytest.mark.parametrize("length", [3, 5, 40])
def test_ring_buffers_go_on(length):
    """However far a sequence is, and however many tokens come at once."""
    x, weight, bias, states = (each.detach() for each in make(tokens=30))
    want = compat.causal_conv1d_fn(x, weight, bias, None, states)
    ring, had = torch.zeros(B, C, length), torch.tensor([length, 7 * length - 1, 2**20], dtype=torch.int32)
    for i in range(W - 1):
        ring[range(B), :, (had - W + 1 + i).long() % length] = states[..., i]
    for begin, end in itertools.pairwise([0, 1, 2, 9, 10, 30]):
        y = compat.causal_conv1d_update(x[..., begin:end], ring, weight, bias, cache_seqlens=had + begin)
        torch.testing.assert_close(y, want[..., begin:end])


FAULTS = [
    (lambda f, g, x, w: f(x[0], w), ValueError, r"x: expected shape \[batch, channels, tokens\], got \[6, 9\]"),
    (lambda f, g, x, w: f(x, w[:5]), ValueError, r"weight: expected shape \[6, 2 to 8\], got \[5, 4\]"),
    (lambda f, g, x, w: f(x, w, activation="gelu"), ValueError, "activation: "),
    (lambda f, g, x, w: f(x, w, seq_idx=torch.zeros(B, 2, dtype=torch.int32)), ValueError, "seq_idx: expected shape"),
    (lambda f, g, x, w: f(x, w, seq_idx=torch.zeros(B, T)), TypeError, "seq_idx: expected torch.int32 or torch.int64"),
    (
        lambda f, g, x, w: f(x, w, return_final_states=True, final_states_out=torch.zeros(B, C, W)), ValueError,
        "final_states_out: expected shape",
    ),
    (lambda f, g, x, w: g(x[0, 0], w, w), ValueError, r"x: expected shape \[batch, channels\] or \[batch, c"),
    (lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 17), w), UnsupportedConfigError, "conv_state: keeps up to 16"),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 3), w, cache_seqlens=torch.zeros(B)), TypeError,
        "cache_seqlens: expected torch.int32, got torch.float32",
    ),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 3), w, cache_seqlens=torch.zeros(1).int()), ValueError,
        r"cache_seqlens: expected shape \[3\], got \[1\]",
    ),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 2), w, cache_seqlens=torch.zeros(B).int()), ValueError,
        r"conv_state: expected shape \[slots, 6, at least 3\], got \[3, 6, 2\]",
    ),
    (lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 2), w), ValueError, "conv_state: expected shape"),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 3), w, conv_state_indices=torch.zeros(2).int()), ValueError,
        "conv_state_indices: expected shape",
    ),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 3), w, conv_state_indices=torch.tensor([0, 1, 1])),
        ValueError, "^conv_state_indices: expected another slot for each state that is written",
    ),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(B, C, 3), w, conv_state_indices=torch.tensor([0, 1, 3])),
        ValueError, "^conv_state_indices: expected slots below 3",
    ),
    (
        lambda f, g, x, w: g(x[..., 0], torch.zeros(1, C, 3), w), ValueError,
        "^conv_state: expected a slot for each of the 3 rows, or conv_state_indices",
    ),
    (lambda f, g, x, w: f(x, w, initial_states=2.0), TypeError, "^initial_states: expected a torch.Tensor"),
    (lambda f, g, x, w: f(x, w, initial_states=x), ValueError, r"^initial_states: expected shape \[3, 6, 3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), FAULTS)
def test_a_fault_names_the_argument(call, kind, message):
    x, weight, _, _ = (each.detach() for each in make())
    with pytest.raises(kind, match=message):
        call(compat.causal_conv1d_fn, compat.causal_conv1d_update, x, weight)


@pytest.mark.parametrize("call", ["texts", "numbers", "slots", "rings"])
def test_compiled_in_one_graph(call):
    x, weight, bias, states = (each.detach() for each in make())
    if call in ("texts", "numbers"):
        numbers = (torch.arange(T) // 4).int().expand(B, T) if call == "numbers" else None
        function, given = compat.causal_conv1d_fn, [x, weight, bias, numbers]
        given += [] if call == "numbers" else [states, True, None, "silu"]
    else:
        had, slots = (None, torch.tensor([4, -1, 2])) if call == "slots" else (torch.tensor([0, 11, 7]).int(), None)
        function, given = compat.causal_conv1d_update, [x, torch.randn(SLOTS, C, 5), weight, bias, "silu", had, slots]
    plain = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
    want, found = function(*plain), torch.compile(function, fullgraph=True, backend="eager")(*given)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(given[1], plain[1])
