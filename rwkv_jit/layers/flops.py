"""What `FlopCounterMode` of torch counts of the loss of training: its matrix products, which torch does not see."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import flop_counter

from rwkv_jit.layers import registry


def _count(hidden: Tensor, weight: Tensor, bias: Any, targets: Any, *options: Any, **_: Any) -> int:
    """Count the logits, and what gradients of hidden and weight are made with them."""
    want_hidden, want_weight = options[3:5]
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


flop_counter.register_flop_formula(registry.find("linear_cross_entropy_fwd").overloadpacket, get_raw=True)(_count)
