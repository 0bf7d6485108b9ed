"""The function of rwkv7-hf that runs a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_jit.compat import buffers
from rwkv_jit.compat.naming import named
from rwkv_jit.ops.wkv7 import wkv7


@named(r="receptance", w="decay", k="key", v="value")
def rwkv7_recurrent(
    receptance: Tensor, decay: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, initial_state: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the last state of RWKV-7, as `wkv7` with decay="direct" and state_layout="kv"; decay is its w.

    Where `attention_mask` (B, T) is false or 0, y is 0 and the state stays as it is, whatever the token holds; no
    gradients go there. They go to every other argument, and through the last state, which has the dtype of the initial
    one. What does not fit raises TypeError or ValueError: the message has the argument, what was expected and what
    came.
    """
    if attention_mask is not None:
        if attention_mask.shape != receptance.shape[:2]:
            raise ValueError(
                f"attention_mask: expected shape {list(receptance.shape[:2])} like receptance, "
                f"got {list(attention_mask.shape)}"
            )
        is_read = attention_mask.to(receptance.device, torch.bool)[:, :, None, None]
        decay = torch.where(is_read, decay, torch.ones_like(decay))
        receptance, key, value, a, b = (
            torch.where(is_read, x, torch.zeros_like(x)) for x in (receptance, key, value, a, b)
        )
    inputs = (receptance, decay, key, value, a, b)
    return buffers.with_final(wkv7, inputs, initial_state, decay="direct", state_layout="kv")
