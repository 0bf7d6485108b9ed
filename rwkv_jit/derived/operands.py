"""What `wkv7` takes for the delta rules, which one kernel makes, and `gla` for decays of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.derived import arguments
from rwkv_jit.layers import calls
from rwkv_jit.layers.gradients import record
from rwkv_jit.schedules.layers import BETA_MAPS, MOST_VALUE_HEADS


def of_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, a_log: Any = None, dt_bias: Any = None,
    lower_bound: float | None = None, qk_norm: Any = False, beta_map: str = "identity",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return r, w, k, v, a and b of `wkv7` with log-decays, from inputs whose shapes are right.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    checks.check_name("beta_map", beta_map, BETA_MAPS)
    if a_log is None:
        for name, x in (("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if x is not None:
                raise ValueError(f"{name}: needs A_log too")
    if lower_bound is not None:
        arguments.check_bound(lower_bound)
    gate = "none" if g is None else "log" if a_log is None else "softplus" if lower_bound is None else "bounded"
    kinds = (
        gate, _of(g, k), beta_map, _of(beta, k), "l2" if checks.check_flag("qk_norm", qk_norm) else "none",
    )  # fmt: skip
    group = v.shape[-2] // max(k.shape[-2], 1)
    if group > MOST_VALUE_HEADS:  # a part of them has copies of the key head
        part = next(n for n in range(MOST_VALUE_HEADS, 0, -1) if group % n == 0)
        q, k = (x.repeat_interleave(group // part, -2) for x in (q, k))
    is_made = kinds[-1] == "l2" or k.shape[-2] != v.shape[-2]  # else r is q
    inputs = k, q if is_made else None, beta, g, a_log, dt_bias
    made = iter(calls.call("delta_operands", inputs, (None,) * 5, (lower_bound or 0.0, *kinds), record))
    r = next(made) if is_made else q
    if g is None:
        w = torch.zeros_like(r, memory_format=torch.contiguous_format)
    else:
        w = next(made) if a_log is not None or kinds[1] == "head" else g
    return r, w, next(made), v, *made


def for_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """Return what `gla` takes, of decays for each head."""
    heads = v.shape[-2]
    keys = arguments.of_value_heads(k, heads)
    return [arguments.of_value_heads(q, heads), keys, v, g.unsqueeze(-1).expand(keys.shape)]


def _of(x: Tensor | None, k: Tensor) -> str:
    """Return whether a head has one of these, or each of its channels."""
    return "channel" if x is not None and x.dim() == k.dim() else "head"
