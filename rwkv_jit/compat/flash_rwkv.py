"""Functions with the names and arguments of those in flash-rwkv. B, T, H, N and C = H N as in `compat.functions`.

receptance, key and value are (B, T, C), and time_decay of RWKV-6 too. The state (B, H, N, N), [V, K], tells the head
size and stays as it is; the last one has its dtype. Gradients go through it and to every argument. What does not fit
raises TypeError or ValueError with the name of the argument, what was expected and what came.
"""

from __future__ import annotations

from torch import Tensor

from rwkv_jit.compat import buffers, rows
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6


def rwkv5_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, C) and the last state of RWKV-5, as `wkv5` with the decay exp(-exp(w)); w, u (H, N) or (C,)."""
    state, inputs = rows.by_state(state, "state", receptance=receptance, key=key, value=value)
    by_head = rows.by_shape(tuple(state.shape[1:3]), time_decay=time_decay, time_first=time_first)
    out, last = buffers.with_final(wkv5, [*inputs, *by_head], state)
    return out.flatten(2), last


def rwkv6_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H, N) and the last state of RWKV-6, as `wkv6` with the decay exp(-exp(w)); u (C,) or (H, N)."""
    state, inputs = rows.by_state(
        state, "state", receptance=receptance, key=key, value=value, time_decay=time_decay
    )  # fmt: skip
    by_head = rows.by_shape(tuple(state.shape[1:3]), time_first=time_first)
    return buffers.with_final(wkv6, [*inputs, *by_head], state)
