"""What `FlopCounterMode` of torch counts over pools of states: as much as for the op over as many tokens."""

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


for _name in ("update_states", "varlen_states"):
    flop_counter.register_flop_formula(registry.find(_name).overloadpacket, get_raw=True)(_count)
