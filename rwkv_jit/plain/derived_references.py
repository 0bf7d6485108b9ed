"""The derived ops in plain torch: one token after another, differentiable, in float64 when the inputs are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.plain.reference import gated_log_decays, scan
from rwkv_jit.schedules.legal import BetaMap, StateLayout

Result = tuple[Tensor, Tensor | None]


def kda_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", scale: float | None = None, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    """Kimi Delta Attention: `rwkv_jit.kda` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    q, k, v, g, beta, initial_state, output_final_state, cu_seqlens
        As the op takes them.
    A_log, dt_bias, lower_bound, qk_norm, beta_map, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    dtype, heads = torch.promote_types(v.dtype, torch.float32), v.shape[-2]
    decays = _log_decays(g.to(dtype), A_log, dt_bias, lower_bound)
    rates = _rates(beta.to(dtype), beta_map).unsqueeze(-1)
    q, k = (_of_value_heads(x.to(dtype), heads, qk_norm) for x in (q, k))

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        state = state * g.exp().unsqueeze(-2)
        u = rate * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
        state = state + u.unsqueeze(-1) * k.unsqueeze(-2)
        return state, (state @ q.unsqueeze(-1)).squeeze(-1)

    return _run(step, (q, k, v, decays, rates), v, initial_state, output_final_state, cu_seqlens, scale, state_layout)


def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity", scale: float | None = None,
    state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    """The gated delta rule: `rwkv_jit.gated_delta_rule` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    q, k, v, g, beta, initial_state, output_final_state, cu_seqlens
        As the op takes them.
    A_log, dt_bias, qk_norm, beta_map, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    g = g.unsqueeze(-1)
    dt_bias = None if dt_bias is None else dt_bias.unsqueeze(-1)
    return kda_ref(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, A_log, dt_bias, None, qk_norm, beta_map,
        scale, state_layout,
    )  # fmt: skip


def delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", scale: float | None = None, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    """The delta rule: `rwkv_jit.delta_rule` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    q, k, v, beta, initial_state, output_final_state, cu_seqlens, qk_norm, beta_map, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    return gated_delta_rule_ref(
        q, k, v, torch.zeros_like(beta), beta, initial_state, output_final_state, cu_seqlens, qk_norm=qk_norm,
        beta_map=beta_map, scale=scale, state_layout=state_layout,
    )  # fmt: skip


def gated_delta_rule2_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    qk_norm: bool = False, scale: float | None = None, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    """The gated delta rule by channels: `rwkv_jit.gated_delta_rule2` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    q, k, v, g, beta, write_gate, initial_state, output_final_state, cu_seqlens
        As the op takes them.
    A_log, dt_bias, lower_bound, qk_norm, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    dtype, heads = torch.promote_types(v.dtype, torch.float32), v.shape[-2]
    decays = _log_decays(g.to(dtype), A_log, dt_bias, lower_bound)
    q, k = (_of_value_heads(x.to(dtype), heads, qk_norm) for x in (q, k))

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = state * g.exp().unsqueeze(-2)
        u = gate * v - (state @ (beta * k).unsqueeze(-1)).squeeze(-1)
        state = state + u.unsqueeze(-1) * k.unsqueeze(-2)
        return state, (state @ q.unsqueeze(-1)).squeeze(-1)

    streams = q, k, v, decays, beta, write_gate
    return _run(step, streams, v, initial_state, output_final_state, cu_seqlens, scale, state_layout)


def simple_gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float | None = None,
    state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    """Scalar-gated linear attention: `rwkv_jit.simple_gla` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    q, k, v, g, initial_state, output_final_state, cu_seqlens, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    dtype, heads = torch.promote_types(v.dtype, torch.float32), v.shape[-2]
    q, k = (_of_value_heads(x.to(dtype), heads) for x in (q, k))
    decays = g.to(dtype).expand(v.shape[:-1]).unsqueeze(-1)
    return _run(_write, (q, k, v, decays), v, initial_state, output_final_state, cu_seqlens, scale, state_layout)


def hgrn2_ref(
    q: Tensor, g: Tensor, v: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float = 1.0, state_layout: StateLayout = "kv",
) -> Result:  # fmt: skip
    """HGRN2: `rwkv_jit.hgrn2` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    q, g, v, initial_state, output_final_state, cu_seqlens, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    decays = g.to(torch.promote_types(v.dtype, torch.float32))
    streams = q, 1 - decays.exp(), v, decays
    return _run(_write, streams, v, initial_state, output_final_state, cu_seqlens, scale, state_layout)


def ssd_ref(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), scale: float = 1.0, state_layout: StateLayout = "vk",
) -> Result:  # fmt: skip
    """The state space of Mamba-2: `rwkv_jit.ssd` in plain torch, in float64 where the inputs are.

    Parameters
    ----------
    x, dt, A, B, C, initial_state, output_final_state, cu_seqlens
        As the op takes them.
    D, z, dt_bias, dt_softplus, dt_limit, scale, state_layout
        As the op takes them.

    Returns
    -------
    y, final_state : as the op returns them
    """
    dtype, heads = torch.promote_types(x.dtype, torch.float32), x.shape[-2]
    step = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit).unsqueeze(-1)
    keys, queries = (_of_value_heads(each.to(dtype), heads) for each in (B, C))
    streams = queries, keys, x.to(dtype) * step, step * A.to(dtype).view(-1, 1)
    y, final = _run(_write, streams, x.to(dtype), initial_state, output_final_state, cu_seqlens, scale, state_layout)
    if D is not None:
        y = y + x * D.to(dtype).view(heads, -1)
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype), final


# ---- what they share ---------------------------------------------------------------------------------------------


def _write(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Let a state decay, write a value, and read."""
    state = state * g.exp().unsqueeze(-2) + v.unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state @ q.unsqueeze(-1)).squeeze(-1)


def _run(
    step: Any, streams: tuple[Tensor, ...], v: Tensor, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, scale: float | None, state_layout: str,
) -> Result:  # fmt: skip
    head_size, dtype = streams[0].shape[-1], torch.promote_types(v.dtype, torch.float32)
    scale = head_size**-0.5 if scale is None else scale
    streams = streams[0] * scale, *streams[1:]
    y, final = scan(step, streams, v, head_size, initial_state, cu_seqlens, state_layout, dtype)
    return y, final if output_final_state else None


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
    heads, size = g.shape[-2:]
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).view(heads, size)
    return gated_log_decays(x, a_log, lower_bound)
