"""Functions with the names and arguments of those in flash-rwkv. B, T, H, N and C = H N as in `compat.functions`."""

from __future__ import annotations

from torch import Tensor

from rwkv_jit.compat import buffers, rows
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6


def rwkv5_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-5, as `wkv5` with the decay exp(-exp(w)).

    Parameters
    ----------
    receptance, key, value : torch.Tensor, shape (B, T, C)
        r, k and v, in rows of channels.
    time_decay, time_first : torch.Tensor, shape (H, N) or (C,)
        w as in the model, and u.
    state : torch.Tensor, shape (B, H, N, N), float32
        State before the first token, [V, K], which stays as it is. It tells the head size.

    Returns
    -------
    out : torch.Tensor, shape (B, T, C), dtype of value
    state : torch.Tensor, shape (B, H, N, N), dtype of state
        State after the last token. Gradients go through it and to every argument.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    state, inputs = rows.by_state(state, "state", receptance=receptance, key=key, value=value)
    by_head = rows.by_shape(tuple(state.shape[1:3]), time_decay=time_decay, time_first=time_first)
    out, last = buffers.with_final(wkv5, [*inputs, *by_head], state)
    return out.flatten(2), last


def rwkv6_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-6, as `wkv6` with the decay exp(-exp(w)).

    Parameters
    ----------
    receptance, key, value, time_decay : torch.Tensor, shape (B, T, C)
        r, k, v and w as in the model, in rows of channels.
    time_first : torch.Tensor, shape (C,) or (H, N)
        u.
    state : torch.Tensor, shape (B, H, N, N), float32
        State before the first token, [V, K], which stays as it is. It tells the head size.

    Returns
    -------
    out : torch.Tensor, shape (B, T, H, N), dtype of value
    state : torch.Tensor, shape (B, H, N, N), dtype of state
        State after the last token. Gradients go through it and to every argument; flash-rwkv itself has none.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    state, inputs = rows.by_state(
        state, "state", receptance=receptance, key=key, value=value, time_decay=time_decay
    )  # fmt: skip
    by_head = rows.by_shape(tuple(state.shape[1:3]), time_first=time_first)
    return buffers.with_final(wkv6, [*inputs, *by_head], state)
