"""What `torch.utils.flop_counter.FlopCounterMode` counts for updates: as much as for the op over as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import flop_counter

from rwkv_jit.inference import registry
from rwkv_jit.ops.table import OPS


def _count(op: str, state: Tensor, y: Tensor, inputs: Sequence[Tensor], *_: Any, **__: Any) -> int:
    products = 4 if OPS[op].family == "delta" else 2
    return 2 * products * inputs[0].numel() * y.shape[-1]


flop_counter.register_flop_formula(registry.find("update_states").overloadpacket, get_raw=True)(_count)
