"""Functions of mamba_ssm on these ops, with its arguments."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.call import tensors
from rwkv_jit.compat.naming import named
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.ops.diagonal import ssd
from rwkv_jit.plain.operands import of_value_heads, skip_gate
from rwkv_jit.pool import arguments
from rwkv_jit.pool.functions import gla_update, ssd_update

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]


@named(initial_state="initial_states")
def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba-2 over sequences as mamba_ssm has it, on `ssd`, with gradients to every tensor but `seq_idx`.

        S <- e^(dt A) S + dt x B^T;   out = S C + D x        per head, S [p, n]

    b is the batch, l the tokens, h the heads, p their size, g the groups, n the size of the state.

    Parameters
    ----------
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit
        As in `ssd`: x and z (b, l, h, p), dt (b, l, h), B and C (b, l, g, n), D (h,) or (h, p). Each may have another
        dtype: if those of x, B, C and z differ, arithmetic is that of float32 inputs, and `out` is rounded once.
    chunk_size, cu_seqlens
        Not read.
    initial_states : torch.Tensor, shape (b, h, p, n), optional
        States before the first tokens; zeros by default.
    seq_idx : torch.Tensor, shape (b, l), int32 or int64, optional
        Which sequence of its row a token belongs to: where it changes, the state begins with zeros. The host reads it,
        and waits for the GPU.
    return_final_states : bool, default False
        Whether to return the states after the last tokens too, (b, h, p, n) in float32.
    return_varlen_states : bool, default False
        Must be False.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        `return_varlen_states` is True.
    """
    if return_varlen_states:
        raise UnsupportedConfigError("return_varlen_states is not supported: ssd takes packed sequences by cu_seqlens")
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    _check_dtypes({**given, "initial_states": initial_states})
    state = _wide(initial_states)
    dtype, (x, B, C, z) = x.dtype, _as_one(x, B, C, z)
    small: list[Any] = [dt, A, D, dt_bias]
    dt, A, D, dt_bias = (t if t is None or t.dtype == x.dtype else _wide(t) for t in small)
    options: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if seq_idx is not None:
        arguments.check_shape("seq_idx", seq_idx, tuple(x.shape[:2]))
        arguments.check_dtype("seq_idx", seq_idx, arguments.INDEX_TYPES, x)
        for name in ("dt", "B", "C", "z"):
            if (t := given[name]) is not None:
                arguments.check_shape(name, t, (*x.shape[:2], *t.shape[2:]))
    if seq_idx is None or not seq_idx.numel():
        out, final = ssd(x, dt, A, B, C, state, return_final_states, D=D, z=z, **options)
    else:
        bounds, first, last = _sequences(seq_idx)
        if state is not None:
            if state.dim() != 4 or state.shape[0] != len(first):
                raise ValueError(
                    f"initial_states: expected shape [{len(first)}, heads, head size, state size], "
                    f"got {list(state.shape)}"
                )
            state = state.new_zeros(len(bounds) - 1, *state.shape[1:]).index_copy(0, first, state)
        x1, dt1, B1, C1 = (t.flatten(0, 1).unsqueeze(0) for t in (x, dt, B, C))
        z1 = None if z is None else z.flatten(0, 1).unsqueeze(0)
        out, final = ssd(x1, dt1, A, B1, C1, state, return_final_states, bounds, D=D, z=z1, **options)
        out, final = out.view(x.shape), None if final is None else final.index_select(0, last)
    out = out.to(dtype)
    return out if final is None else (out, final)


@named(state_indices="state_batch_indices", q="C", k="B", v="x")
def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One token of Mamba-2 or Mamba-1 as mamba_ssm has it, on `ssd_update`: for decoding.

        S <- e^(dt A) S + dt x B^T;   out = S C + D x        per row and head, S [p, n]

    What Mamba-2 has for each head lies in views here, which `expand` made for each channel. Where dt, A or `dt_bias`
    differs from channel to channel, as in Mamba-1, each channel is a head of one value to the kernel. A tensor without
    the dimension of h or g has 1 of them. Dtypes as in `mamba_chunk_scan_combined`.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, h, p, n), float16, bfloat16 or float32
        The states, which are changed; there are b without `state_batch_indices`.
    x, dt, A, B, C, D, z, dt_bias, dt_softplus
        As in `ssd_update`, but x, dt and z (b, h, p), A (h, p, n), B and C (b, g, n), D and dt_bias (h, p).
    state_batch_indices : torch.Tensor, shape (b,), int32 or int64, optional
        The slot of each row; a row below 0 has none, and gets zeros.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The states are as before.
    UnsupportedConfigError
        A gradient is needed, or a slot has gaps.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    _check_dtypes(given)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (state, *given.values())):
        raise UnsupportedConfigError("a gradient through states that change in place is not supported")
    pool = state.unsqueeze(1) if state.dim() == 3 else state
    if pool.dim() != 4:
        raise ValueError(f"state: expected shape [slots, heads, head size, state size], got {list(state.shape)}")
    if not pool[:1].is_contiguous():
        raise UnsupportedConfigError("states with gaps in a slot are not supported")
    heads, size, keys = pool.shape[1:]
    groups = B.shape[1] if B.dim() == 3 else 1
    of_rows, of_groups = (*x.shape[:1], heads, size), (*x.shape[:1], groups, keys)
    shapes = of_rows, of_rows, (heads, size, keys), of_groups, of_groups, (heads, size), of_rows, (heads, size)
    several: list[Any] = []
    for (name, t), shape in zip(given.items(), shapes, strict=True):
        if t is not None:
            t = t.unsqueeze(int(len(shape) > 2 and name != "A")) if t.dim() == len(shape) - 1 else t
            arguments.check_shape(name, t, shape)
        several.append(t)
    x1, dt, A, B, C, D, z, dt_bias = several
    if heads % groups:
        raise ValueError(f"B: expected groups that divide the {heads} heads, got {groups}")
    x1, B, C, z = _as_one(x1, B, C, z)
    of_heads = all(_is_of_heads(t, dims) for t, dims in ((dt, 1), (A, 2), (dt_bias, 1)))
    if of_heads:
        dt, A, dt_bias = dt[..., 0], A[..., 0, 0], None if dt_bias is None else dt_bias[..., 0]
        D = D if D is None or not _is_of_heads(D, 1) else D[..., 0]
    dt, A, D, dt_bias = map(_wide, (dt, A, D, dt_bias))
    indices: dict[str, Any] = {} if state_batch_indices is None else {"state_indices": state_batch_indices}
    if of_heads:
        limit = (0.0 if dt_softplus else -math.inf, math.inf)  # steps as they are
        out = ssd_update(
            pool, x1, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=limit, **indices
        )
    else:
        steps = dt if dt_bias is None else dt + dt_bias
        steps = F.softplus(steps) if dt_softplus else steps  # [b, h, p]
        decays = (steps.unsqueeze(-1) * A).flatten(1, 2)  # [b, h p, n]
        q, k = (of_value_heads(t, heads * size) for t in (C, B))
        v = (x1 * steps).to(x1.dtype).flatten(1).unsqueeze(2)  # [b, h p, 1]
        channels = pool.view(-1, heads * size, 1, keys)
        y = gla_update(channels, q, k, v, decays, scale=1.0, state_layout="vk", **indices)
        out = skip_gate(y.view(x1.shape), x1, D, z)
        if state_batch_indices is not None:
            has_slot = (state_batch_indices >= 0) & (state_batch_indices < pool.shape[0])  # [b]
            out = out.masked_fill(~has_slot.view(-1, 1, 1), 0)
    return out.reshape(x.shape).to(x.dtype)


@wraps(selective_state_update)
def update_of_heads(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, *more: Any, **named: Any) -> Tensor:
    """Run `selective_state_update`, but leave steps and rates of each channel to mamba_ssm, which is faster there."""
    if not (_is_of_heads(dt, 1) and _is_of_heads(A, 2)):
        raise UnsupportedConfigError("steps or rates of each channel are not supported")
    return selective_state_update(state, x, dt, A, *more, **named)


def _is_of_heads(x: Tensor | None, dims: int) -> bool:
    """Return whether the last dimensions of a tensor are those of a view that has each number for all of them."""
    return x is None or all(n == 1 or step == 0 for n, step in zip(x.shape[-dims:], x.stride()[-dims:], strict=True))


def _sequences(seq_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of the sequences of all rows, one row behind another, and which are a row's first and last."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    number = begins.flatten().cumsum(0).view(seq_idx.shape) - 1
    bounds = torch.cat([begins.flatten().nonzero().flatten(), number.new_full((1,), seq_idx.numel())])
    return bounds, number[:, 0].contiguous(), number[:, -1].contiguous()


def _check_dtypes(given: dict[str, Any]) -> None:
    """Check that tensors have numbers that there are kernels for, or float64 beside one, and where the first one is."""
    x = given["x"]
    legal = (*tensors.STORAGE, torch.float64)[: None if x.dtype == torch.float64 else -1]
    for name, t in given.items():
        if t is not None:
            arguments.check_dtype(name, t, legal, x)


def _as_one(*rows: Any) -> tuple[Any, ...]:
    """Return what there is of inputs in one dtype: float32 where they have several."""
    if len({x.dtype for x in rows if x is not None}) > 1:
        return tuple(map(_wide, rows))
    return rows


def _wide(x: Any) -> Any:
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))
