"""What `FlopCounterMode` of torch counts of the loss of training: its matrix products, which torch does not see."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import flop_counter

from rwkv_jit.layers import registry


def _count(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Any, ignore_index: int, l2_wrap: float, chunk_rows: int,
    want_hidden: bool, want_weight: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count the logits, and the gradients of hidden and weight that are made of theirs."""
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


flop_counter.register_flop_formula(registry.find("linear_cross_entropy_fwd").overloadpacket, get_raw=True)(_count)
