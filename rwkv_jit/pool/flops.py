"""What `FlopCounterMode` of torch counts over pools of states: as much as for the op over as many tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rwkv_jit.call.flops import products_of, register
from rwkv_jit.schedules.derived_table import ALL


def _count(op: str, state: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    of_head = state.shape[-2] * state.shape[-1]  # keys and values
    return 2 * products_of(ALL[op]) * y.numel() * of_head // y.shape[-1]


def _count_replay(op: str, phase: str, state: Tensor, y: Tensor | None, *_: Any, **__: Any) -> int:
    """Count the tokens; what commits and flushes do is counted of none."""
    return 0 if y is None else _count(op, state, y)


def _count_wkv4(op: str, state: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """Count two sums that gain a term each, and the output, of the sums and a term more of each."""
    return 8 * y.numel()


register("wkv4_states", _count_wkv4)
register("update_states", _count)
register("varlen_states", _count)
register("replay_states", _count_replay)
