"""What `torch.utils.flop_counter.FlopCounterMode` counts for the ops of this package.

Two for every multiply-add of the recurrence between matrices and vectors, or of the sum that defines the op, however it
is computed; a backward has twice its forward. Decays, exponentials and what a backward computes again do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import ALL

Formula = Callable[..., int]


def _products_of(op: Op) -> int:
    """Return the products of a state with a vector, and the outer products that it gains."""
    return 4 if (op.through or op).family == "delta" else 2


def _register_all() -> None:
    for op in ALL.values():
        if op.has_heads:
            _register_both(op.name, partial(_of_recurrence, _products_of(op), *map(op.names.index, "vr")))
    _register_both("wkv4", lambda w, u, k, *_, **__: _of_channels(k))
    register("timex_fwd", _of_convolution)
    register("timex_bwd", lambda w, k, *_, wanted="", **__: len((wanted or "w k").split()) * _of_convolution(w, k))
    register("update_states", _of_pool)
    register("varlen_states", _of_pool)
    register("replay_states", _of_replay)
    register("linear_cross_entropy_fwd", _of_linear_loss)


def _of_channels(y: Tensor) -> int:
    """Return what wkv4 counts: the two sums gain a term each; y is made of the sums and a term more of each."""
    return 8 * y.numel()


def _register_both(name: str, formula: Formula) -> None:
    """Say what both torch ops of a recurrence count: the backward twice as much."""
    register(f"{name}_fwd", formula)
    register(f"{name}_bwd", lambda *given, **named: 2 * formula(*given, **named))


def register(name: str, formula: Formula) -> None:
    """Say what a torch op of this package counts, unless that is known."""
    op, counter = getattr(torch.ops.rwkv_jit, name), sys.modules["torch.utils.flop_counter"]  # the newest one
    if op not in counter.flop_registry:
        counter.register_flop_formula(op, get_raw=True)(formula)


def _of_recurrence(products: int, v: int, r: int, *given: Any, **_: Any) -> int:
    """Count a call of an op whose v and r are its inputs of these numbers."""
    return int(2 * products * given[v].numel() * given[r].shape[3])


def _of_convolution(w: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    tokens = k.shape[2]
    return k.shape[0] * k.shape[1] * tokens * (tokens + 1)


def _of_pool(op: str, state: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    if not ALL[op].has_heads:
        return _of_channels(y)
    of_head = state.shape[-2] * state.shape[-1]  # keys and values
    return 2 * _products_of(ALL[op]) * y.numel() * of_head // y.shape[-1]


def _of_replay(op: str, phase: str, state: Tensor, y: Tensor | None, *_: Any, **__: Any) -> int:
    """Count the tokens; what commits and flushes do is counted of none."""
    return 0 if y is None else _of_pool(op, state, y)


def _of_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Any, ignore_index: int, l2_wrap: float, chunk_rows: int,
    want_hidden: bool, want_weight: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count the logits, and the gradients of hidden and weight that are products of theirs."""
    return 2 * hidden.numel() * weight.shape[0] * (1 + want_hidden + want_weight)


_register_all()
