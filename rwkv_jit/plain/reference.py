"""The recurrences in plain torch, token after token, differentiable: what kernels and blocks are tested against.

Tokens are taken by `unbind`: the backward of a slice fills a tensor as large as the whole input, for every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.schedules.legal import BetaMap, Decay, StateLayout, Wkv4Decay

Result = tuple[Tensor, Tensor | None]
_Function = TypeVar("_Function", bound=Callable[..., Any])
SIGMOID_RATE = 0.6065306597126334  # e^(-1/2)
# Stronger raw decays give factors of 0 too. With w above it, e^w is infinite and the gradient 0 inf, which is NaN.
STRONGEST_RAW = 88.0


def documented(title: str, recurrence: str = "", returns: str = "y, final_state") -> Callable[[_Function], _Function]:
    """Give a reference its docstring: what it is of, and that its arguments and results are those of its op."""

    def give(function: _Function) -> _Function:
        op, names = function.__name__.removesuffix("_ref"), [*signature(function).parameters]
        unread = "; `decay_bound` changes nothing here" if "decay_bound" in names else ""
        parts = [
            f"{title}: `rwkv_jit.{op}` in plain torch, in float64 where the inputs are.",
            *([f"    {recurrence}"] if recurrence else []),
            f"Parameters\n----------\n{', '.join(names)}\n    As the op takes them{unread}.",
            f"Returns\n-------\n{returns} : as the op returns {'them' if ',' in returns else 'it'}\n",
        ]
        function.__doc__ = "\n\n".join(parts)
        return function

    return give


def decay_factor(w: Tensor, decay: str) -> Tensor:
    """Return the per-step factor d(w) that multiplies the state."""
    return w if decay == "direct" else torch.exp(log_decays(w, decay))


def log_decays(w: Tensor, decay: str) -> Tensor:
    """Return the logarithms of the factors d(w), of a map that has no factors below 0."""
    if decay == "raw":
        return -torch.exp(w.clamp(max=STRONGEST_RAW))
    if decay == "sigmoid":
        return -SIGMOID_RATE * torch.sigmoid(w)
    if decay == "log":
        return w
    raise ValueError(f"decay: expected raw, sigmoid, log or direct, got {decay!r}")


def gated_log_decays(x: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """Return log-decays, computed in float64: else a gradient times e^a_log may be infinite before it meets a slope."""
    wide, speed = x.double(), a_log.double().clamp(max=STRONGEST_RAW).exp().unsqueeze(-1)
    made = -speed * F.softplus(wide) if lower_bound is None else lower_bound * torch.sigmoid(speed * wide)
    return made.to(x.dtype)


def starting_states(
    initial_state: Tensor | None, sequences: int, heads: int, value_size: int, head_size: int, zero: Tensor, layout: str
) -> Tensor:
    """Return the states [sequences, heads, V, K] to start from, in the dtype of the arithmetic, that of `zero`."""
    if initial_state is None:
        return zero.new_zeros(sequences, heads, value_size, head_size)
    state = initial_state.to(zero.dtype)
    state = state.transpose(-1, -2) if layout == "kv" else state
    return state.expand(sequences, heads, value_size, head_size)


def final_states(states: Tensor, initial_state: Tensor | None, layout: str) -> Tensor:
    """Return states [sequences, heads, V, K] as callers get them."""
    final = states.transpose(-1, -2) if layout == "kv" else states
    dtype = initial_state.dtype if initial_state is not None else states.dtype
    return final.to(dtype).clone(memory_format=torch.contiguous_format)


Step = Callable[..., tuple[Tensor, Tensor]]  # state, inputs of a token [B, H, K or V] or None -> state, y [B, H, V]


def scan(
    step: Step, streams: Sequence[Tensor | None], v: Tensor, head_size: int, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, layout: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `step` over the tokens of every sequence; return y and the final states."""
    batch, count, heads, value_size = v.shape
    bounds = [0, count] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    starts = starting_states(
        initial_state, sequences, heads, value_size, head_size, v.new_empty(0, dtype=dtype), layout
    )
    of_tokens = ([None] * count if x is None else x.to(dtype).unbind(1) for x in streams)
    tokens = list(zip(*of_tokens, strict=True))
    outputs, finals = [], []
    # Packed sequences have a batch of 1: each runs with the state of its own.
    states = [starts] if cu_seqlens is None else starts.split(1)
    for state, begin, end in zip(states, bounds, bounds[1:], strict=False):
        for token in tokens[begin:end]:
            state, y_t = step(state, *token)
            outputs.append(y_t)
        finals.append(state)
    y = torch.stack(outputs, dim=1) if outputs else v * 0
    final = torch.cat(finals) if finals else starts
    return y.to(v.dtype), final_states(final, initial_state, layout)


@documented(
    "RWKV-7 time mixing", "sa = S a;  S = S diag(d(w)) + sa b^T + v k^T;  y = scale S r        per head, S [V, K]"
)
def wkv7_ref(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float = 1.0, decay: Decay = "raw",
    decay_bound: float | None = None, state_layout: StateLayout = "vk",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    dtype = torch.promote_types(r.dtype, torch.float32)
    d = decay_factor(w.to(dtype), decay)

    def step(state: Tensor, r: Tensor, d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        sa = state @ a.unsqueeze(-1)
        outer = v.unsqueeze(-1) * k.unsqueeze(-2)
        state = state * d.unsqueeze(-2) + sa * b.unsqueeze(-2) + outer
        return state, scale * (state @ r.unsqueeze(-1)).squeeze(-1)

    y, final = scan(step, (r, d, k, v, a, b), v, r.shape[-1], initial_state, cu_seqlens, state_layout, dtype)
    return y, final if output_final_state else None


def _gated(
    r: Tensor, k: Tensor, v: Tensor, d: Tensor | None, u: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run gated linear attention; with a bonus u, y sees the state before the update, else the one after it.

    `d` are the factors of the state, [B, T, H, K], or [H, K] for every token; None where nothing decays.
    """
    dtype = torch.promote_types(r.dtype, torch.float32)
    bonus = None if u is None else (r.to(dtype) * u.to(dtype) * k.to(dtype)).sum(-1, keepdim=True) * v.to(dtype)
    factors = None if d is None else d.expand(r.shape)

    def step(
        state: Tensor, r: Tensor, k: Tensor, v: Tensor, d: Tensor | None, bonus: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kept = state if d is None else state * d.unsqueeze(-2)
        after = kept + v.unsqueeze(-1) * k.unsqueeze(-2)
        seen = after if bonus is None else state
        y_t = (seen @ r.unsqueeze(-1)).squeeze(-1)
        return after, scale * (y_t if bonus is None else y_t + bonus)

    return scan(step, (r, k, v, factors, bonus), v, r.shape[-1], initial_state, cu_seqlens, layout, dtype)


@documented(
    "RWKV-6 time mixing", "y = scale (S r + (sum_j u_j r_j k_j) v);  S = S diag(d(w)) + v k^T        per head, S [V, K]"
)
def wkv6_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float = 1.0, decay: Decay = "raw",
    decay_bound: float | None = None, state_layout: StateLayout = "vk",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    dtype = torch.promote_types(r.dtype, torch.float32)
    d = decay_factor(w.to(dtype), decay)
    y, final = _gated(r, k, v, d, u, initial_state, cu_seqlens, scale, state_layout)
    return y, final if output_final_state else None


@documented(
    "RWKV-5 time mixing", "y = scale (S r + (sum_j u_j r_j k_j) v);  S = S diag(d(w)) + v k^T        per head, S [V, K]"
)
def wkv5_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float = 1.0, decay: Decay = "raw",
    decay_bound: float | None = None, state_layout: StateLayout = "vk",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return wkv6_ref(
        r, k, v, w, u, initial_state, output_final_state, cu_seqlens, scale, decay, decay_bound, state_layout
    )


@documented("Gated linear attention", "S = S diag(d(g)) + v k^T;  y = scale S q        per head, S [V, K]")
def gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, decay: Decay = "log",
    decay_bound: float | None = None, state_layout: StateLayout = "kv",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    d = decay_factor(g.to(torch.promote_types(q.dtype, torch.float32)), decay)
    y, final = _gated(q, k, v, d, None, initial_state, cu_seqlens, scale, state_layout)
    return y, final if output_final_state else None


@documented(
    "Linear attention",
    "S = S + v k^T;  z = z + k;  y = scale S q,  normalized y = scale S q / (scale z . q + 1e-10)        S [V, K]",
)
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: StateLayout = "kv",
    normalize: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not normalize:
        y, final = _gated(q, k, v, None, None, initial_state, cu_seqlens, scale, state_layout)
        return y, final if output_final_state else None
    # z is the state of a value that is always 1.
    state, z = (None, None) if initial_state is None else initial_state
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    start = None if z is None else z.unsqueeze(-1)
    y, final = _gated(q, k, wide, None, None, state, cu_seqlens, scale, state_layout)
    ones = torch.ones_like(wide[..., :1])
    total, last = _gated(q, k, ones, None, None, start, cu_seqlens, scale, "kv")
    return (y / (total + 1e-10)).to(v.dtype), (final, last.squeeze(-1)) if output_final_state else None


@documented(
    "RWKV-4 time mixing",
    "y = (e^max num + e^(u + k) v) / (e^max den + e^(u + k));  the sums decay by e^w and gain e^k v, e^k",
)
def wkv4_ref(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    decay: Wkv4Decay = "raw",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if decay not in ("raw", "log"):
        raise ValueError(f"decay: expected raw or log, got {decay!r}")
    dtype = torch.promote_types(k.dtype, torch.float32)
    wf, uf, kf, vf = (x.to(dtype) for x in (w, u, k, v))
    wf = -torch.exp(wf.clamp(max=STRONGEST_RAW)) if decay == "raw" else wf
    batch, _, channels = k.shape
    if initial_state is None:
        start = kf.new_zeros(batch, 3, channels)
        start[:, 2] = -1e38
    else:
        start = initial_state.to(dtype).expand(batch, 3, channels)
    num, den, top = start.unbind(1)
    key, age = top, torch.zeros_like(top)  # the max is a key and so many w: adding w in every step would round in each
    outputs = []
    for k_t, v_t in zip(kf.unbind(1), vf.unbind(1), strict=True):
        here = torch.maximum(top, uf + k_t)
        past, now = torch.exp(top - here), torch.exp(uf + k_t - here)
        outputs.append((past * num + now * v_t) / (past * den + now))
        age = age + 1
        decayed = key + age * wf
        is_larger = k_t > decayed  # not `maximum`, which shares the gradient of a tie
        top, key = torch.where(is_larger, k_t, decayed), torch.where(is_larger, k_t, key)
        age = torch.where(is_larger, 0.0, age)
        past, now = torch.exp(decayed - top), torch.exp(k_t - top)
        num, den = past * num + now * v_t, past * den + now
    y = torch.stack(outputs, dim=1) if outputs else v * 0
    final = torch.stack((num, den, top), dim=1).to(dtype if initial_state is None else initial_state.dtype)
    return y.to(v.dtype), final if output_final_state else None


_BLOCK_LEN, _BLOCK_ELEMENTS = 128, 2**24  # tokens of a block, and elements of the matrices of some channels


def _from_before(before: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return what `count` tokens get from those right before them, [C, rows, count].

    `before` are these tokens, [C, rows, length], and `weights` those of 1 token ago and more, [C, length + count - 1].
    """
    most = max(1, _BLOCK_ELEMENTS // (before.shape[2] * count))
    parts = [
        torch.bmm(x.flip(-1), of_x.unfold(1, x.shape[2], 1).transpose(1, 2))
        for x, of_x in zip(before.split(most), weights.split(most), strict=True)
    ]
    return torch.cat(parts)


@documented("TimeX", "out[b, c, t] = eps + sum_{s <= t} w[c, T-1-(t-s)] k[b, c, s]", returns="out")
def timex_ref(w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
    # Tokens get what tokens before them give as products with Toeplitz matrices: within a block, which is split in two
    # again and again, and from all blocks before. No product holds a later token: one that is not finite spoils nothing
    # before it.
    batch, channels, tokens = k.shape
    wide = torch.promote_types(torch.promote_types(w.dtype, k.dtype), torch.float32)
    if k.numel() == 0:
        return k + (w * 0).sum().to(k.dtype)
    length = min(_BLOCK_LEN, 1 << (tokens - 1).bit_length())
    blocks = -(-tokens // length)
    # Of 0, 1, 2, ... tokens ago; zeros are for the tokens that fill the last block, and read by no other.
    weights = torch.nn.functional.pad(w.to(wide).flip(-1), (0, blocks * length - tokens))
    inputs = torch.nn.functional.pad(k.to(wide), (0, blocks * length - tokens)).transpose(0, 1)
    outputs, size = inputs * weights[:, None, :1], 1
    while size < length:
        pairs = (channels, batch * blocks * length // (2 * size), 2, size)
        first, (out1, out2) = inputs.reshape(pairs).select(2, 0), outputs.reshape(pairs).unbind(2)
        outputs = torch.cat((out1, out2 + _from_before(first, weights[:, 1 : 2 * size], size)), 2)
        size *= 2
    parts = list(outputs.reshape(channels, batch, blocks, length).unbind(2))
    inputs = inputs.reshape(channels, batch, blocks * length)
    for index in range(1, blocks):
        begin = index * length
        parts[index] = parts[index] + _from_before(inputs[:, :, :begin], weights[:, 1 : begin + length], length)
    return (torch.cat(parts, 2)[:, :, :tokens].transpose(0, 1) + eps).to(k.dtype)


# ---- the ops that other ops run ----------------------------------------------------------------------------------


@documented("Kimi Delta Attention")
def kda_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", scale: float | None = None, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    rates = _rates(beta.to(torch.promote_types(v.dtype, torch.float32)), beta_map).unsqueeze(-1)  # [B, T, HV, 1]
    return gated_delta_rule2_ref(
        q, k, v, g, rates, rates, initial_state, output_final_state, cu_seqlens, A_log, dt_bias, lower_bound, qk_norm,
        scale, state_layout,
    )  # fmt: skip


@documented("The gated delta rule")
def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity", scale: float | None = None,
    state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    g = g.unsqueeze(-1)
    dt_bias = None if dt_bias is None else dt_bias.unsqueeze(-1)
    return kda_ref(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, A_log, dt_bias, None, qk_norm, beta_map,
        scale, state_layout,
    )  # fmt: skip


@documented("The delta rule")
def delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", scale: float | None = None, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    return gated_delta_rule_ref(
        q, k, v, torch.zeros_like(beta), beta, initial_state, output_final_state, cu_seqlens, qk_norm=qk_norm,
        beta_map=beta_map, scale=scale, state_layout=state_layout,
    )  # fmt: skip


@documented("The gated delta rule by channels")
def gated_delta_rule2_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    qk_norm: bool = False, scale: float | None = None, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    dtype, heads = torch.promote_types(v.dtype, torch.float32), v.shape[-2]
    decays = _log_decays(g.to(dtype), A_log, dt_bias, lower_bound)
    q, k = (_of_value_heads(x.to(dtype), heads, qk_norm) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = state * g.exp().unsqueeze(-2)
        u = gate * v - (state @ (beta * k).unsqueeze(-1)).squeeze(-1)
        state = state + u.unsqueeze(-1) * k.unsqueeze(-2)
        return state, (state @ q.unsqueeze(-1)).squeeze(-1)

    streams = q, k, v, decays, beta, write_gate
    y, final = scan(step, streams, v, q.shape[-1], initial_state, cu_seqlens, state_layout, dtype)
    return y, final if output_final_state else None


@documented("Scalar-gated linear attention")
def simple_gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float | None = None,
    state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (_of_value_heads(x.to(dtype), v.shape[-2]) for x in (q, k))
    decays = g.to(dtype).expand(v.shape[:-1]).unsqueeze(-1)  # [B, T, HV, 1]
    return gla_ref(q, k, v, decays, initial_state, output_final_state, cu_seqlens, scale, state_layout=state_layout)


@documented("HGRN2")
def hgrn2_ref(
    q: Tensor, g: Tensor, v: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float = 1.0, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    q, g = (x.to(torch.promote_types(v.dtype, torch.float32)) for x in (q, g))
    return gla_ref(
        q, 1 - g.exp(), v, g, initial_state, output_final_state, cu_seqlens, scale, state_layout=state_layout
    )


@documented("The state space of Mamba-2")
def ssd_ref(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), scale: float = 1.0, state_layout: StateLayout = "vk",
) -> Result:  # fmt: skip
    dtype, heads = torch.promote_types(x.dtype, torch.float32), x.shape[-2]
    step = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit).unsqueeze(-1)
    keys, queries = (_of_value_heads(each.to(dtype), heads) for each in (B, C))
    inputs = queries, keys, x.to(dtype) * step, step * A.to(dtype).view(-1, 1)
    y, final = gla_ref(*inputs, initial_state, output_final_state, cu_seqlens, scale, state_layout=state_layout)
    if D is not None:
        y = y + x * D.to(dtype).view(heads, -1)
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype), final


def _of_value_heads(x: Tensor, heads: int, norm: bool = False) -> Tensor:
    if norm:
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _rates(beta: Tensor, beta_map: str) -> Tensor:
    if beta_map == "identity":
        return beta
    return torch.sigmoid(beta) * (2 if beta_map == "twice_sigmoid" else 1)


def _log_decays(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    if a_log is None:
        return g
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).view(g.shape[-2:])
    return gated_log_decays(x, a_log, lower_bound)
