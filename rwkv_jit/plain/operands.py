"""What `wkv7` and `gla` take for the ops that go through them, and what stands behind these, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.plain.layers import wide
from rwkv_jit.plain.reference import gated_log_decays, log_decays
from rwkv_jit.schedules import delta_operands
from rwkv_jit.schedules.problem import Op

_NORM_EPS = 1e-6
_RATES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x, "sigmoid": torch.sigmoid, "twice_sigmoid": lambda x: 2 * torch.sigmoid(x),
}  # fmt: skip


def operands(op: Op, arrays: Sequence[Any], traits: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return what the op below takes, from the inputs of a call and its switches."""
    named: dict[str, Any] = {name: x for name, x in zip(op.names, arrays, strict=True) if x is not None}
    assert op.through is not None
    if op.through.family == "delta":
        return _of_delta_rule(op, named, traits)
    if "k" not in named:  # forget gates are decays, and keys too
        return [named["r"], -torch.expm1(named["w"]).to(named["r"].dtype), named["v"], named["w"]]
    v, decays = named["v"], named.get("w")
    if decays is None:
        steps = _steps(named, traits)
        v, decays = (v * steps.unsqueeze(-1)).to(v.dtype), steps * named["a_log"]
    q, k = (of_value_heads(named[name], v.shape[-2]) for name in "rk")
    return [q, k, v, decays.unsqueeze(-1).expand(k.shape)]


def behind(op: Op, y: Tensor, arrays: Sequence[Any]) -> Tensor:
    """Return the outputs of a call, of what the op below returns and of the inputs."""
    named = dict(zip(op.names, arrays, strict=True))
    return skip_gate(y, named["v"], named.get("own"), named.get("z"))


def skip_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Return (y + D x) silu(z), without the parts that are None."""
    whole = y
    if D is not None:  # in float32 at least, as the gradient of D is a sum of products that must not be rounded
        whole = y + x * wide(D).view(x.shape[-2], -1)
    return (whole if z is None else whole * F.silu(z.to(whole.dtype))).to(y.dtype)


def of_value_heads(x: Tensor, heads: int) -> Tensor:
    """Return what key heads have, for the value heads that each is for; without a copy where there is one key head."""
    if x.shape[-2] == heads:
        return x
    if x.shape[-2] == 1:
        return x.expand(*x.shape[:-2], heads, x.shape[-1])
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _of_delta_rule(op: Op, named: Mapping[str, Tensor], traits: Mapping[str, Any]) -> Sequence[Tensor]:
    r, k, v, w = named["r"], named["k"], named["v"], named.get("w")
    gate, gate_of, rate_map, rate_of, norm = delta_operands.kinds(op, named, traits)
    storage, heads = k.dtype, v.shape[-2]

    def of_heads(x: Tensor) -> Tensor:  # [..., G, K] to [..., H, K]
        x = wide(x)
        if norm == "l2":
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
        return of_value_heads(x, heads)

    def of_channels(x: Tensor, of: str) -> Tensor:
        return wide(x) if of == "channel" else wide(x).unsqueeze(-1)

    key, rate = of_heads(k), _RATES[rate_map](of_channels(named["beta"], rate_of))
    if norm == "l2" or k.shape[-2] != heads:  # else r is q
        r = of_heads(r).to(storage)
    factor: Any = 1.0
    if w is None:
        w = torch.zeros_like(r, memory_format=torch.contiguous_format)
    else:
        decays = of_channels(w, gate_of)
        if "dt_bias" in named:
            decays = decays + wide(named["dt_bias"]).view(heads, -1)
        if "a_log" in named:
            decays = gated_log_decays(decays, named["a_log"], traits["lower_bound"] if gate == "bounded" else None)
        if "a_log" in named or gate_of == "head":
            w = decays.expand(key.shape).contiguous()
        factor = decays.exp()
    erased, written = (key * factor * rate, key) if rate_of == "channel" else (key * factor, key * rate)
    if "write_gate" in named:
        v = v * named["write_gate"]
    return r, w, written.to(storage), v, erased.to(storage), -written.to(storage)


def remaining(op: Op, arrays: Sequence[Any], traits: Mapping[str, Any], decay: str) -> Tensor:
    """Return what all tokens leave of a state without a delta term, [B, H, 1, K], or [B, H, 1, 1] where heads decay."""
    named = {name: x for name, x in zip(op.names, arrays, strict=True) if x is not None}
    v, w = named["v"], named.get("w")
    if "a_log" in named:
        w = _steps(named, traits) * wide(named["a_log"])
    elif w is None:
        w = v.new_zeros(v.shape[2])
    each = log_decays(wide(w), decay) if decay in ("raw", "sigmoid") else w  # else factors, or logarithms
    each = each.expand(*v.shape[:3], *each.shape[each.dim() - (op.transition[1] == "K") :])  # [B, T, H] or [B, T, H, K]
    dtype = torch.promote_types(each.dtype, torch.float32)
    whole = each.prod(1, dtype=dtype) if decay == "direct" else each.sum(1, dtype=dtype).exp()
    return whole.view(*whole.shape[:2], 1, -1)


def _steps(named: Mapping[str, Tensor], traits: Mapping[str, Any]) -> Tensor:
    """Return the steps of a state space, in float32 at least."""
    steps = wide(named["beta"])
    steps = steps + named["dt_bias"] if "dt_bias" in named else steps
    steps = F.softplus(steps) if traits["dt_softplus"] else steps
    least, most = traits["least_step"], traits["most_step"]
    if (least, most) == (None, None) and traits["dt_softplus"]:
        return steps
    return steps.clamp(0.0 if least is None else least, math.inf if most is None else most)
