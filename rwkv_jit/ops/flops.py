"""What `torch.utils.flop_counter.FlopCounterMode` counts for the ops of this package.

Two for every multiply-add of the recurrence between matrices and vectors, or of the sum that defines the op, however
it is computed. Decays, exponentials and what a backward computes once more are not counted. Each product has two
gradients, so a backward counts twice its forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import flop_counter

# Products of a state with a vector, or outer products that it gains, by op.
_PRODUCTS = {"wkv5": 2, "wkv6": 2, "wkv7": 4, "gla": 2, "linear_attention": 2}


def register(inputs: Mapping[str, tuple[str, ...]]) -> None:
    """Register formulas for the ops of these names and inputs, and for wkv4 and timex."""
    for op, names in inputs.items():
        count = 2 * _PRODUCTS[op]
        _register(f"{op}_fwd", lambda *shapes, v=names.index("v"), n=count, **_: n * _of_states(shapes[0], shapes[v]))
        _register(
            f"{op}_bwd", lambda *shapes, v=names.index("v"), n=count, **_: 2 * n * _of_states(shapes[2], shapes[2 + v])
        )
    # The two sums gain a term each; the output is made of the sums and a term more of each.
    _register("wkv4_fwd", lambda w, u, k, *_, **__: 8 * k.numel())
    _register("wkv4_bwd", lambda dy, grad_final, w, u, k, *_, **__: 16 * k.numel())
    _register("wkv4_step", lambda state, w, u, k, *_, **__: 8 * k.numel())
    _register("timex_fwd", lambda w, k, *_, **__: _of_convolution(k))
    _register("timex_bwd", lambda g, w, k, backend, want_w, want_k, **_: (want_w + want_k) * _of_convolution(k))


def _register(name: str, formula: Any) -> None:
    flop_counter.register_flop_formula(getattr(torch.ops.rwkv_jit, name), get_raw=True)(formula)


def _of_states(q: torch.Tensor, v: torch.Tensor) -> int:
    """Return the elements of all states of all tokens."""
    return q.numel() * v.shape[3]


def _of_convolution(k: torch.Tensor) -> int:
    tokens = k.shape[2]
    return k.shape[0] * k.shape[1] * tokens * (tokens + 1)
