"""What `torch.utils.flop_counter.FlopCounterMode` counts for the ops of this package.

Two for every multiply-add of the recurrence between matrices and vectors, or of the sum that defines the op, however it
is computed; a backward has twice its forward. Decays, exponentials and what a backward computes again do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from rwkv_jit.schedules.derived_table import ALL
from rwkv_jit.schedules.problem import Op

Formula = Callable[..., int]


def products_of(op: Op) -> int:
    """Return the products of a state with a vector, and the outer products that it gains."""
    return 4 if (op.through or op).family == "delta" else 2


def _register_all() -> None:
    for op in ALL.values():
        if op.has_heads:
            forward, backward = _of_recurrence(products_of(op), *map(op.names.index, "vr"))
            register(f"{op.name}_fwd", forward)
            register(f"{op.name}_bwd", backward)
    # The two sums gain a term each; the output is made of the sums and a term more of each.
    register("wkv4_fwd", lambda w, u, k, *_, **__: 8 * k.numel())
    register("wkv4_bwd", lambda dy, grad_final, w, u, k, *_, **__: 16 * k.numel())
    register("timex_fwd", lambda w, k, *_, **__: _of_convolution(k))
    register("timex_bwd", lambda g, w, k, backend, want_w, want_k, **_: (want_w + want_k) * _of_convolution(k))


def register(name: str, formula: Formula) -> None:
    """Say what a torch op of this package counts, unless that is known."""
    op, counter = getattr(torch.ops.rwkv_jit, name), sys.modules["torch.utils.flop_counter"]  # the newest one
    if op not in counter.flop_registry:
        counter.register_flop_formula(op, get_raw=True)(formula)


def _of_recurrence(products: int, v: int, r: int) -> tuple[Formula, Formula]:
    """Return the formulas of both directions of an op whose v and r are its inputs of these numbers."""

    def count(given: Sequence[Tensor]) -> int:
        return 2 * products * given[v].numel() * given[r].shape[3]

    def forward(*given: Any, **_: Any) -> int:
        return count(given)

    def backward(dy: Tensor | None, grad_final_state: Tensor | None, *given: Any, **_: Any) -> int:
        return 2 * count(given)

    return forward, backward


def _of_convolution(k: Tensor) -> int:
    tokens = k.shape[2]
    return k.shape[0] * k.shape[1] * tokens * (tokens + 1)


_register_all()
