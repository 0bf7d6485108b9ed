"""What `FlopCounterMode` of torch counts of the loss of training: its matrix products, which torch does not see."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rwkv_jit.call.flops import register


def _count(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Any, ignore_index: int, l2_wrap: float, chunk_rows: int,
    want_hidden: bool, want_weight: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count the logits, and the gradients of hidden and weight that are products of theirs."""
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


register("linear_cross_entropy_fwd", _count)
