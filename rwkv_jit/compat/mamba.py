"""Functions of mamba_ssm for Mamba-2 on these ops, with its arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.derived.diagonal import ssd
from rwkv_jit.derived.diagonal_pooled import ssd_update
from rwkv_jit.errors import UnsupportedConfigError

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2 over sequences as mamba_ssm has it, on `ssd`, with gradients to every tensor but `seq_idx`.

        S <- e^(dt A) S + dt x B^T;   out = S C + D x

    per head, with S [p, n]. b is the batch, l the tokens, h the heads, p their size, g the groups, n the size of the
    state.

    Parameters
    ----------
    x : torch.Tensor, shape (b, l, h, p), float16, bfloat16 or float32
        Input.
    dt : torch.Tensor, shape (b, l, h), dtype of x or float32
        Step, or what it is made of.
    A : torch.Tensor, shape (h,), dtype of x or float32
        Rate, which is negative.
    B, C : torch.Tensor, shape (b, l, g, n), dtype of x
        What the state takes an input by, and what outputs read the state by. Head i has those of group i // (h // g).
    chunk_size : int
        Not read: chunks are chosen by the sizes.
    D : torch.Tensor, shape (h,) or (h, p), dtype of x or float32, optional
        How much of the input `out` has itself.
    z : torch.Tensor, shape and dtype of x, optional
        `out` is multiplied by silu(z).
    dt_bias : torch.Tensor, shape (h,), dtype of x or float32, optional
        Is added to dt.
    initial_states : torch.Tensor, shape (b, h, p, n), optional
        States before the first tokens; zeros by default.
    seq_idx : torch.Tensor, shape (b, l), int32 or int64, optional
        Which sequence of its row a token belongs to: where it changes, the state begins with zeros.
    cu_seqlens : torch.Tensor, optional
        Not read: it is for `return_varlen_states`.
    dt_softplus : bool, default False
        Whether the step is the softplus of dt.
    dt_limit : pair of float, default (0.0, inf)
        The step is brought between these at last.
    return_final_states : bool, default False
        Whether to return the states after the last tokens.
    return_varlen_states : bool, default False
        Must be False.

    Returns
    -------
    out : torch.Tensor, shape (b, l, h, p), dtype of x
    final_states : torch.Tensor, shape (b, h, p, n), float32
        With `return_final_states` alone.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        `return_varlen_states` is given.

    Notes
    -----
    `seq_idx` is read by the host, which waits for the GPU.
    """
    if return_varlen_states:
        raise UnsupportedConfigError("return_varlen_states is not supported: ssd takes packed sequences by cu_seqlens")
    options: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    state = None if initial_states is None else initial_states.to(_wide(initial_states))
    if seq_idx is not None and seq_idx.shape != x.shape[:2]:
        raise ValueError(f"seq_idx: expected shape {list(x.shape[:2])}, got {list(seq_idx.shape)}")
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
    return out if final is None else (out, final)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token of Mamba-2 as mamba_ssm has it, on `ssd_update`: for decoding.

        S <- e^(dt A) S + dt x B^T;   out = S C + D x

    per row and head, with S [p, n]. b is the batch, h the heads, p their size, g the groups, n the size of the state.
    What Mamba-2 has for each head lies in views here, which `expand` made for each channel.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, h, p, n), float16, bfloat16 or float32
        The states, which are changed; there are b without `state_batch_indices`.
    x : torch.Tensor, shape (b, h, p), float16, bfloat16 or float32
        Input.
    dt : torch.Tensor, shape (b, h, p), expanded from (b, h, 1), dtype of x or float32
        Step, or what it is made of.
    A : torch.Tensor, shape (h, p, n), expanded from (h, 1, 1), dtype of x or float32
        Rate, which is negative.
    B, C : torch.Tensor, shape (b, g, n), dtype of x
        What the state takes an input by, and what outputs read the state by.
    D : torch.Tensor, shape (h, p), dtype of x or float32, optional
        How much of the input `out` has itself.
    z : torch.Tensor, shape and dtype of x, optional
        `out` is multiplied by silu(z).
    dt_bias : torch.Tensor, shape (h, p), expanded from (h, 1), dtype of x or float32, optional
        Is added to dt.
    dt_softplus : bool, default False
        Whether the step is the softplus of dt.
    state_batch_indices : torch.Tensor, shape (b,), int32 or int64, optional
        The slot of each row; a row below 0 has none, and gets zeros.

    Returns
    -------
    out : torch.Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. The states are as they were.
    UnsupportedConfigError
        Steps or rates are those of each channel, as in Mamba-1, or a gradient is wanted.
    """
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    if state.dim() != 4 or x.dim() != 3:
        raise UnsupportedConfigError(f"states of {state.dim()} dimensions and inputs of {x.dim()} are not supported")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given.values()):
        raise UnsupportedConfigError("a gradient through states that change in place is not supported")
    step, rate = _of_heads("dt", dt, (*x.shape,)), _of_heads("A", A, (*state.shape[1:],), 2)
    bias = None if dt_bias is None else _of_heads("dt_bias", dt_bias, (*x.shape[1:],))
    options = {} if state_batch_indices is None else {"state_indices": state_batch_indices}
    return ssd_update(
        state, x, step, rate, B, C, D=D, z=z, dt_bias=bias, dt_softplus=dt_softplus, **options  # type: ignore[arg-type]
    )  # fmt: skip


def _of_heads(name: str, x: Tensor, shape: tuple[int, ...], channels: int = 1) -> Tensor:
    """Return what heads have, of a view that has it for each of their channels."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    for _ in range(channels):
        if x.shape[-1] > 1 and x.stride(-1) != 0:
            raise UnsupportedConfigError(f"{name} of each channel is not supported")
        x = x[..., 0]
    return x


def _sequences(seq_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of the sequences of all rows, one row behind another, and which are a row's first and last."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    number = begins.flatten().cumsum(0).view(seq_idx.shape) - 1
    bounds = torch.cat([begins.flatten().nonzero().flatten(), number.new_full((1,), seq_idx.numel())])
    return bounds, number[:, 0].contiguous(), number[:, -1].contiguous()


def _wide(state: Tensor) -> torch.dtype:
    return torch.promote_types(state.dtype, torch.float32)
