"""The recurrences in plain torch: one token after another, differentiable, in float64 when the inputs are.

What CPU tensors get, and what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SIGMOID_RATE = 0.6065306597126334  # e^(-1/2)


def decay_factor(w: Tensor, decay: str) -> Tensor:
    """Return the per-step factor d(w) that multiplies the state."""
    if decay == "raw":
        return torch.exp(-torch.exp(w))
    if decay == "sigmoid":
        return torch.exp(-SIGMOID_RATE * torch.sigmoid(w))
    if decay == "log":
        return torch.exp(w)
    if decay == "direct":
        return w
    raise ValueError(f"decay: expected raw, sigmoid, log or direct, got {decay!r}")


def _spans(tokens: int, batch: int, cu_seqlens: Tensor | None) -> list[tuple[slice, slice]]:
    """Return (rows of the batch, tokens) of each group of sequences that runs together."""
    if cu_seqlens is None:
        return [(slice(0, batch), slice(0, tokens))]
    bounds = cu_seqlens.tolist()
    return [(slice(0, 1), slice(begin, end)) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _states(
    initial_state: Tensor | None, sequences: int, heads: int, value_size: int, head_size: int, like: Tensor, layout: str
) -> Tensor:
    """Return the states [sequences, heads, V, K] to start from, in the dtype of the arithmetic."""
    if initial_state is None:
        return like.new_zeros(sequences, heads, value_size, head_size)
    state = initial_state.to(like.dtype)
    state = state.transpose(-1, -2) if layout == "kv" else state
    return state.expand(sequences, heads, value_size, head_size)


Step = Callable[[Tensor, slice, int], tuple[Tensor, Tensor]]  # state, batch rows, token -> state, y [N, H, V]


def _scan(
    step: Step,
    v: Tensor,
    head_size: int,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: str,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run `step` over the tokens of every sequence; return y and the final states."""
    batch, tokens, heads, value_size = v.shape
    spans = _spans(tokens, batch, cu_seqlens)
    sequences = batch if cu_seqlens is None else len(spans)
    starts = _states(initial_state, sequences, heads, value_size, head_size, like, layout)
    outputs, finals = [], []
    for index, (rows, span) in enumerate(spans):
        state = starts if cu_seqlens is None else starts[index : index + 1]
        for t in range(span.start, span.stop):
            state, y_t = step(state, rows, t)
            outputs.append(y_t)
        finals.append(state)
    y = torch.stack(outputs, dim=1) if outputs else v * 0
    final = torch.cat(finals) if finals else starts
    final = final.transpose(-1, -2) if layout == "kv" else final
    dtype = initial_state.dtype if initial_state is not None else like.dtype
    return y.to(v.dtype), final.to(dtype).clone(memory_format=torch.contiguous_format)


def wkv7_ref(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    decay: str = "raw",
    decay_bound: float | None = None,
    state_layout: str = "vk",
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7 time mixing in plain torch; see `rwkv_jit.wkv7` for the arguments.

        sa = S a;  S = S diag(d(w)) + sa b^T + v k^T;  y = scale S r        per head, S [V, K]

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    r, w, k, a, b : torch.Tensor, shape (B, T, H, K)
        As in the op, float64 too.
    v : torch.Tensor, shape (B, T, H, V)
        Value.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token; zeros by default.
    output_final_state : bool, default False
        Whether to return the state after the last token.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Bounds of sequences packed along T with B = 1.
    scale : float, default 1.0
        Factor of y.
    decay : {"raw", "sigmoid", "log", "direct"}, default "raw"
        The map from w to the per-step factor.
    decay_bound : float, optional
        Changes nothing here.
    state_layout : {"vk", "kv"}, default "vk"
        Order of the last two dimensions of the states.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor or None, shape (N, H, V, K) or (N, H, K, V)
    """
    dtype = torch.promote_types(r.dtype, torch.float32)
    rf, kf, vf, af, bf = (x.to(dtype) for x in (r, k, v, a, b))
    d = decay_factor(w.to(dtype), decay)

    def step(state: Tensor, rows: slice, t: int) -> tuple[Tensor, Tensor]:
        sa = state @ af[rows, t].unsqueeze(-1)
        outer = vf[rows, t].unsqueeze(-1) * kf[rows, t].unsqueeze(-2)
        state = state * d[rows, t].unsqueeze(-2) + sa * bf[rows, t].unsqueeze(-2) + outer
        return state, scale * (state @ rf[rows, t].unsqueeze(-1)).squeeze(-1)

    y, final = _scan(step, v, r.shape[-1], initial_state, cu_seqlens, state_layout, rf)
    return y, final if output_final_state else None


def wkv6_ref(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    decay: str = "raw",
    decay_bound: float | None = None,
    state_layout: str = "vk",
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6 time mixing in plain torch; see `rwkv_jit.wkv6` for the arguments.

        y = scale (S r + (sum_j u_j r_j k_j) v);  S = S diag(d(w)) + v k^T        per head, S [V, K]

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    r, k, w : torch.Tensor, shape (B, T, H, K)
        As in the op, float64 too.
    v : torch.Tensor, shape (B, T, H, V)
        Value.
    u : torch.Tensor, shape (H, K)
        Bonus of the current token.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token; zeros by default.
    output_final_state : bool, default False
        Whether to return the state after the last token.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Bounds of sequences packed along T with B = 1.
    scale : float, default 1.0
        Factor of y.
    decay : {"raw", "sigmoid", "log", "direct"}, default "raw"
        The map from w to the per-step factor.
    decay_bound : float, optional
        Changes nothing here.
    state_layout : {"vk", "kv"}, default "vk"
        Order of the last two dimensions of the states.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor or None, shape (N, H, V, K) or (N, H, K, V)
    """
    dtype = torch.promote_types(r.dtype, torch.float32)
    rf, kf, vf, uf = (x.to(dtype) for x in (r, k, v, u))
    d = decay_factor(w.to(dtype), decay)
    bonus = (rf * uf * kf).sum(-1, keepdim=True) * vf

    def step(state: Tensor, rows: slice, t: int) -> tuple[Tensor, Tensor]:
        y_t = scale * ((state @ rf[rows, t].unsqueeze(-1)).squeeze(-1) + bonus[rows, t])
        outer = vf[rows, t].unsqueeze(-1) * kf[rows, t].unsqueeze(-2)
        return state * d[rows, t].unsqueeze(-2) + outer, y_t

    y, final = _scan(step, v, r.shape[-1], initial_state, cu_seqlens, state_layout, rf)
    return y, final if output_final_state else None
