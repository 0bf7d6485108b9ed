"""The small work of a layer in plain torch, which CPU tensors run, in float32 or in float64 where the inputs are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """Return numbers in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _plus(x: Tensor, y: Tensor | None) -> Tensor:
    return x if y is None else x + wide(y).reshape(x.shape[-2:])


def shift_mix(inputs: Sequence[Any], written: Sequence[Tensor], null_index: int, eps: float) -> None:
    """Run `shift_mix`; written are the pool, the mixes, and the residual where something is added."""
    x, add, weight, bias, mixes, state_indices, cu_seqlens, has_initial_state, num_active = inputs
    shift, mixed = written[:2]
    channels = x.shape[-1]
    z = wide(x) if add is None else wide(x) + wide(add)
    if add is not None:
        written[2].copy_(z)
    n = F.layer_norm(z, (channels,), weight.to(z.dtype), bias.to(z.dtype), eps).reshape(-1, channels)
    if cu_seqlens is None:
        bounds = torch.arange(x.shape[0] + 1, device=x.device) * (len(n) // x.shape[0])
    else:
        bounds = cu_seqlens.to(torch.int64).clamp(0, len(n))
    active = len(bounds) - 1 if num_active is None else min(max(int(num_active), 0), len(bounds) - 1)
    bounds = bounds[: active + 1]
    has_tokens = bounds[1:] > bounds[:-1]
    slots = torch.arange(active, device=x.device) if state_indices is None else state_indices[:active].to(torch.int64)
    is_null = slots <= null_index if state_indices is not None else torch.zeros_like(has_tokens)
    is_kept = has_tokens & ~is_null & (slots >= 0) & (slots < len(shift))
    kept = n.to(shift.dtype)
    before = kept.roll(1, 0)
    before[bounds[:-1][has_tokens]] = before[bounds[-1] :] = 0
    begun = is_kept if has_initial_state is None else is_kept & has_initial_state[:active].bool()
    before[bounds[:-1][begun]] = shift[slots[begun]]
    shift[slots[is_kept]] = kept[bounds[1:][is_kept] - 1]
    mixed.copy_((n + (before.to(n.dtype) - n) * mixes.to(n.dtype).view(-1, 1, channels)).view(mixed.shape))
    if num_active is not None:
        for made in (mixed, *written[2:]):
            made.view(-1, len(n), channels)[:, bounds[-1] :] = 0


def prepare_keys(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return k, v where there is a first one, a and b, and the bonus where there is r; or some of these by name."""
    k, v, rate, v_first, v_gate, k_k, k_a, a0, v0, r, r_k = inputs
    rate_map, *asked = kinds
    shape, heads = k.shape, k.shape[-2:]
    k, rate = wide(k), _GATES[rate_map](_plus(wide(rate).reshape(shape), a0))
    scaled = k * wide(k_k).reshape(heads)
    kk = F.normalize(scaled, dim=-1, eps=1e-12)
    made, v = {"new_k": k * (1 + (rate - 1) * wide(k_a).reshape(heads))}, wide(v).reshape(shape)
    if v_first is not None:
        share = torch.sigmoid(_plus(wide(v_gate).reshape(shape), v0))
        v = v + (wide(v_first).reshape(shape) - v) * share
        made["new_v"] = v
    made |= {"a": -kk, "b": kk * rate}
    if r is not None:
        made["bonus"] = _bonus(r, made["new_k"], v, r_k)
    if asked:
        made |= {"new_rate": rate, "factors": 1 / torch.linalg.vector_norm(scaled, dim=-1).clamp_min(1e-12)}
    return [made[x] for x in asked or made]


def _bonus(r: Tensor, k: Tensor, v: Tensor, r_k: Tensor) -> Tensor:
    """Return what a token gets of itself, of k and v that are wide."""
    return (wide(r).reshape(k.shape) * k * wide(r_k).reshape(k.shape[-2:])).sum(-1, keepdim=True) * v


def _statistics(x: Tensor, mean: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return mean, torch.rsqrt((x - mean.unsqueeze(-1)).square().mean(-1) + eps)


def gated_norm(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return the norm of the heads behind its gate; or some of these by name."""
    several: list[Any] = [None if x is None else wide(x) for x in inputs]
    y, g, weight, bias, r, k, v, r_k, bonus = several
    gate, norm, *asked = kinds
    heads = y.shape[-2:]
    z = F.layer_norm(y, heads[1:], eps=eps) if norm == "layer" else F.rms_norm(y, heads[1:], eps=eps)
    z = z * weight.reshape(heads)
    if bias is not None:
        z = z + bias.reshape(heads)
    if r_k is not None:
        bonus = _bonus(r, k.reshape(y.shape), v.reshape(y.shape), r_k)
    if bonus is not None:
        z = z + bonus.reshape(y.shape)
    made = {"out": (z * _GATES[gate](g.reshape(y.shape))).flatten(-2)}
    if asked:
        made["means"], made["factors"] = _statistics(
            y, y.mean(-1) if norm == "layer" else torch.zeros_like(y[..., 0]), eps
        )
    return [made[x] for x in asked or made]


def gated(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return x behind a gate."""
    x, g = map(wide, inputs)
    return [x * _GATES[kinds[0]](g)]


def activate(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return a function of every element, another one in each part."""
    (x,) = inputs
    parts = zip(x.reshape(len(kinds), -1), kinds, strict=True)
    return [torch.stack([_FUNCTIONS[kind](wide(part)) for part, kind in parts]).view(x.shape)]


def products(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return functions of products with a bias each, behind gates, and with something added."""
    made, x = list[Tensor](), inputs[0]
    for p, (function, layout) in enumerate(zip(kinds[::2], kinds[1::2], strict=True)):
        own, weight, bias, gate, add = inputs[5 * p : 5 * p + 5]
        x = x if own is None else own  # that of the product before
        weight = wide(weight if layout == "wide" else weight.t())
        y = _FUNCTIONS[function](F.linear(wide(x), weight, None if bias is None else wide(bias)))
        y = y if gate is None else y * torch.sigmoid(wide(gate))
        made.append(y if add is None else y + wide(add))
    return made


def token_shift(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return the mixes of every token with the one before it."""
    x, mixes, amounts, first, cu_seqlens = inputs
    x = wide(x)
    before = _tokens_before(x, first, cu_seqlens)
    shares = list(wide(mixes).unbind())
    if amounts is not None:
        shares = [share + wide(amount) for share, amount in zip(shares, amounts, strict=True)]
    return [x + (before - x) * share for share in shares]


def norm_shift(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return the residual, the mixes of its norm, the last tokens of this, and means and factors, in their dtypes."""
    x, add, weight, bias, mixes, first, cu_seqlens = inputs
    residual = x.clone() if add is None else (wide(x) + wide(add)).to(x.dtype)
    z, dtype = wide(residual), getattr(torch, kinds[0])
    n = F.layer_norm(z, z.shape[-1:], weight.to(z.dtype), bias.to(z.dtype), eps)
    kept = n.to(dtype)
    before = _tokens_before(kept, first, cu_seqlens).to(z.dtype)
    mixed = [(n + (before - n) * share).to(dtype) for share in wide(mixes).unbind()]
    with torch.no_grad():
        stats = torch.stack(_statistics(z, z.mean(-1), eps), -1)
    return [residual, *mixed, last_tokens(kept, first, cu_seqlens), stats]


def _tokens_before(x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the token before each of x [B, T, C]: `first` or zeros where a sequence begins."""
    before = F.pad(x, (0, 0, 1, 0))[..., :-1, :]
    starts = torch.zeros(1, dtype=torch.int64, device=x.device)
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1][cu_seqlens[1:] > cu_seqlens[:-1]].to(torch.int64)
        before = before.index_fill(-2, starts, 0)
    if first is not None and x.numel():
        first = first.to(x.dtype)
        first = first.unsqueeze(1) if cu_seqlens is None else first[cu_seqlens[1:] > cu_seqlens[:-1]].unsqueeze(0)
        before = before.index_copy(-2, starts, first)
    return before


def last_tokens(x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return a copy of each sequence's last token of x [B, T, C]; without tokens, what came before, or zeros."""
    if cu_seqlens is None:
        if x.shape[1]:
            return x[:, -1].clone()
        return x.new_zeros(x.shape[0], x.shape[2]) if first is None else first.clone()
    bounds = cu_seqlens.to(x.device, torch.int64)
    count = bounds.shape[0] - 1
    before = x.new_zeros(count, x.shape[2]) if first is None else first
    if not x.shape[1]:
        return before.clone()
    last = x[0, (bounds[1:] - 1).clamp_min(0)]
    return torch.where((bounds[1:] > bounds[:-1]).unsqueeze(1), last, before)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    activation: str,
) -> Tensor:  # fmt: skip
    """Return what a causal convolution makes of sequences, in the dtype of x."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        texts = [
            causal_conv1d(
                x[:, begin:end], weight, bias, None if initial_state is None else initial_state[n : n + 1], None,
                activation,
            )
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False))
            if begin < end
        ]  # fmt: skip
        return torch.cat(texts, 1)
    own, width = wide(x), weight.shape[1]
    if initial_state is None:
        seen = F.pad(own, (0, 0, width - 1, 0))
    else:
        seen = torch.cat([initial_state.transpose(1, 2).to(own.dtype), own], 1)
    return _GATES[activation](_convolved(own, seen, weight, bias)).to(x.dtype)


def _convolved(own: Tensor, seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sums of tokens [B, T, C], which see W - 1 before the first of them too."""
    *earlier, last = weight.to(own.dtype).unbind(1)
    z = torch.zeros_like(last) if bias is None else bias.to(own.dtype)
    for j, taps in enumerate(earlier):
        z = z + taps * seen[:, j : j + own.shape[1]]
    return z + last * own


def last_windows(x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, count: int) -> Tensor:
    """Return each sequence's last `count` tokens, those before it too, as a new [N, C, count]."""
    tokens = x.shape[1]
    if cu_seqlens is None:
        if tokens >= count:
            return x[:, tokens - count :].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        before = x.new_zeros(x.shape[0], x.shape[2], count) if initial_state is None else initial_state
        return torch.cat([before[..., tokens:], x.transpose(1, 2)], -1)
    begins, ends = cu_seqlens[:-1, None].to(torch.int64), cu_seqlens[1:, None].to(torch.int64)
    before = x.new_zeros(len(ends), x.shape[2], count) if initial_state is None else initial_state
    if not tokens:
        return before.clone(memory_format=torch.contiguous_format)
    order = torch.arange(count, device=x.device)
    places = ends - count + order
    own = x[0, places.clamp_min(0)].transpose(1, 2)
    earlier = (order + ends - begins).clamp_max(count - 1).unsqueeze(1).expand_as(before)
    return torch.where((places >= begins).unsqueeze(1), own, before.gather(2, earlier)).contiguous()


def causal_conv1d_update(
    x: Tensor, pool: Tensor, weight: Tensor, bias: Tensor | None, cache_seqlens: Tensor | None,
    state_indices: Tensor | None, num_active: Tensor | None, y: Tensor, null_index: int, activation: str,
) -> None:  # fmt: skip
    """Run `causal_conv1d_update`, which writes to the pool and to y."""
    rows = x.shape[0] if num_active is None else min(max(int(num_active), 0), x.shape[0])
    y[rows:] = 0
    slots = torch.arange(rows) if state_indices is None else state_indices[:rows].to(torch.int64)
    is_null = torch.zeros_like(slots, dtype=torch.bool) if state_indices is None else slots <= null_index
    is_kept = ~is_null & (slots >= 0) & (slots < pool.shape[0])
    own, count = wide(x[:rows]), pool.shape[2]
    before = pool.new_zeros(rows, *pool.shape[1:])
    before[is_kept] = pool[slots[is_kept]]
    order = torch.arange(count).expand(rows, 1, count)  # of a slot, the oldest token first
    if cache_seqlens is not None:
        order = (order + cache_seqlens[:rows, None, None]) % count
        before = before.gather(2, order.expand_as(before))
    kept = torch.cat([before, own.transpose(1, 2).to(pool.dtype)], -1)
    seen = kept.transpose(1, 2)[:, count - weight.shape[1] + 1 :].to(own.dtype)
    y[:rows] = _GATES[activation](_convolved(own, seen, weight, bias))
    order = order if cache_seqlens is None else (order + x.shape[1]) % count
    pool[slots[is_kept]] = before.scatter(2, order.expand_as(before), kept[..., -count:])[is_kept]


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x, "sigmoid": torch.sigmoid, "silu": F.silu,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
}  # fmt: skip
