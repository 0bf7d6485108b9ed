"""The fused ops of RWKV-LM's trainer of RWKV-7, beside its recurrence: they return tensors, and record nothing.

Rows are [B, T, C], parameters have C elements in any shape, and all have one dtype: 16 bits, float32, or float64 on a
CPU. Forwards ask a layer's kernels for what they return, and nothing else is written. What a forward makes for its
backward alone is right, but no backward here reads it where a kernel makes it again in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor

from rwkv_jit.call import registry, tensors
from rwkv_jit.layers import calls, loss
from rwkv_jit.layers.activate import activate
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.pool import arguments
from rwkv_jit.schedules.layer_table import OPS, RESULTS, SHIFTS

_EPS_OF_HEADS = 64e-5
_L2_WRAP, _IGNORED = 1e-4, -100
_MEAN = {"ignore_index": _IGNORED, "reduction": "mean"}
_PARAMETERS = {
    "x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "r_k", "weight", "bias", "a0", "v0",
}  # fmt: skip
_Made = TypeVar("_Made")


# ---- what the ops share ------------------------------------------------------------------------------------------


def _alone(run: Callable[..., _Made]) -> Callable[..., _Made]:
    """Return what runs an op apart from autograd and autocast, as a compiled extension does."""

    @wraps(run)
    def alone(lead: Tensor, *others: Any) -> _Made:
        without_autocast = nullcontext() if lead.is_meta else tensors.exactly(lead)  # fakes come as meta tensors
        with torch.no_grad(), without_autocast:
            return run(lead, *others)

    return alone


def _check(**arrays: Tensor) -> None:
    """Check tensors by their names: the first is [B, T, C], parameters have C elements, the others are like it."""
    (first, lead), *others = arrays.items()
    if lead.dim() != 3 or not lead.shape[-1]:
        raise ValueError(f"{first}: expected shape [batch, tokens, channels], got {list(lead.shape)}")
    _check_dtype(first, lead)
    for name, x in others:
        if name not in _PARAMETERS:
            arguments.check_shape(name, x, tuple(lead.shape))
        elif x.numel() != lead.shape[-1]:
            raise ValueError(f"{name}: expected {lead.shape[-1]} elements, got shape {list(x.shape)}")
        arguments.check_dtype(name, x, (lead.dtype,), lead)


def _check_dtype(name: str, x: Tensor) -> None:
    """Check the dtype that an op goes by."""
    dtypes = [*tensors.STORAGE] if x.is_cuda else [*tensors.STORAGE, torch.float64]
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")


def _check_matrix(name: str, x: Tensor, columns: int, lead: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{name}: expected shape [rows, {columns}], got {list(x.shape)}")
    arguments.check_dtype(name, x, (lead.dtype,), lead)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gradients(
    op: str, grads: Mapping[str, Tensor], inputs: Mapping[str, Tensor], wanted: Sequence[str], eps: float = 0.0,
    kinds: Sequence[str] = (),
) -> list[Tensor]:  # fmt: skip
    """Return gradients of a layer's op by the kernels of its backward, from those of its results by name."""
    names = [*OPS[op].inputs, *(["cu_seqlens"] if op in SHIFTS else [])]
    arrays = [*map(grads.get, RESULTS[op]), *map(inputs.get, names)]
    made = registry.find(f"{op}_bwd")(*arrays, eps, kinds, wanted=" ".join(wanted))
    by_name = dict(zip(OPS[op].names, made if isinstance(made, (tuple, list)) else (made,), strict=True))
    return [by_name[name] for name in wanted]


def _shaped(made: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in the shapes of what they are of."""
    return [x.reshape(own.shape) for x, own in zip(made, like, strict=True)]


# ---- time mixing -------------------------------------------------------------------------------------------------


@_alone
def mix_forward(
    x: Tensor, x_r: Tensor, x_w: Tensor, x_k: Tensor, x_v: Tensor, x_a: Tensor, x_g: Tensor
) -> list[Tensor]:
    """Return six mixes of every token with the one before it."""
    _check(x=x, x_r=x_r, x_w=x_w, x_k=x_k, x_v=x_v, x_a=x_a, x_g=x_g)
    return list(token_shift(x, _stacked(x_r, x_w, x_k, x_v, x_a, x_g)))


@_alone
def mix_backward(
    grad_r: Tensor, grad_w: Tensor, grad_k: Tensor, grad_v: Tensor, grad_a: Tensor, grad_g: Tensor, x: Tensor,
    x_r: Tensor, x_w: Tensor, x_k: Tensor, x_v: Tensor, x_a: Tensor, x_g: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x and of the six parameters."""
    _check(
        x=x, x_r=x_r, x_w=x_w, x_k=x_k, x_v=x_v, x_a=x_a, x_g=x_g, grad_r=grad_r, grad_w=grad_w, grad_k=grad_k,
        grad_v=grad_v, grad_a=grad_a, grad_g=grad_g,
    )  # fmt: skip
    parameters = [x_r, x_w, x_k, x_v, x_a, x_g]
    return _mix_gradients([grad_r, grad_w, grad_k, grad_v, grad_a, grad_g], x, parameters)


def _stacked(*parameters: Tensor) -> Tensor:
    return torch.stack([x.reshape(-1) for x in parameters])


def _mix_gradients(grads: Sequence[Tensor], x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    named = {f"mixed{m}": grad for m, grad in enumerate(grads)}
    inputs = {"x": x, "mixes": _stacked(*parameters)}
    of_x, of_mixes = _gradients("token_shift", named, inputs, ("x", "mixes"))
    return [of_x, *_shaped([own.clone() for own in of_mixes], parameters)]


@_alone
def rate_forward(a0: Tensor, a12: Tensor) -> Tensor:
    """Return sigmoid(a0 + a12), how much the state learns of a token; `prepare_keys` makes it, of any keys."""
    _check(a12=a12, a0=a0)
    heads, start = _any_heads(a12), a0.reshape(-1)
    inputs = {"k": heads, "v": heads, "rate": heads, "k_k": start, "k_a": start, "a0": start}
    (rate,) = calls.call_for(["new_rate"], "prepare_keys", inputs, ("sigmoid",))
    return rate.view(a12.shape)


@_alone
def rate_backward(grad_out: Tensor, a0: Tensor, a12: Tensor) -> list[Tensor]:
    """Return the gradients of a0 and a12: `prepare_keys` of keys of 1 returns the rate for them, at k_a 1 and k_k 0."""
    _check(a12=a12, a0=a0, grad_out=grad_out)
    heads = _any_heads(a12)
    ones, rows = torch.ones_like(heads), torch.ones_like(a0).reshape(-1)
    grads = dict.fromkeys(("new_k", "a", "b"), grad_out.reshape(heads.shape))
    inputs = {
        "k": ones, "v": ones, "rate": heads, "k_k": torch.zeros_like(rows), "k_a": rows, "a0": a0.reshape(-1),
    }  # fmt: skip
    return _shaped(_gradients("prepare_keys", grads, inputs, ("a0", "rate"), kinds=("sigmoid",)), [a0, a12])


@_alone
def value_forward(v: Tensor, v_first: Tensor, v0: Tensor, v12: Tensor) -> Tensor:
    """Return v + (v_first - v) sigmoid(v0 + v12): the value of a layer with a part of the first one's."""
    _check(v=v, v_first=v_first, v12=v12, v0=v0)
    (value,) = calls.call_for(["new_v"], "prepare_keys", _value_inputs(v, v_first, v0, v12), ("sigmoid",))
    return value.view(v.shape)


@_alone
def value_backward(grad_out: Tensor, v: Tensor, v_first: Tensor, v0: Tensor, v12: Tensor) -> list[Tensor]:
    """Return the gradients of v, v_first, v0 and v12."""
    _check(v=v, v_first=v_first, v12=v12, v0=v0, grad_out=grad_out)
    return _value_gradients(grad_out, v, v_first, v0, v12, ("v", "v_first", "v0", "v_gate"))


@_alone
def value_backward_in_rows(grad_out: Tensor, v: Tensor, v_first: Tensor, v0: Tensor, v12: Tensor) -> list[Tensor]:
    """Return the gradients of v, v_first and v0 + v12, the last in float32, which the caller adds up for v0."""
    _check(v=v, v_first=v_first, v12=v12, v0=v0, grad_out=grad_out)
    return _value_gradients(grad_out, v, v_first, v0, _wide(v12), ("v", "v_first", "v_gate"))


def _value_gradients(
    grad_out: Tensor, v: Tensor, v_first: Tensor, v0: Tensor, v12: Tensor, wanted: Sequence[str]
) -> list[Tensor]:
    inputs = _value_inputs(v, v_first, v0, v12)
    grads = dict.fromkeys(("new_k", "new_v", "a", "b"), grad_out.reshape(inputs["v"].shape))
    shapes = {"v": v, "v_first": v_first, "v0": v0, "v_gate": v12}
    made = _gradients("prepare_keys", grads, inputs, wanted, kinds=("sigmoid",))
    return _shaped(made, [shapes[x] for x in wanted])


def _value_inputs(v: Tensor, v_first: Tensor, v0: Tensor, v12: Tensor) -> dict[str, Tensor]:
    """Return inputs of `prepare_keys` for its value alone: keys and rates are any, and these are near by."""
    heads, start = _any_heads(v), v0.reshape(-1)
    return {
        "k": heads, "v": heads, "rate": v12, "v_first": v_first, "v_gate": v12, "k_k": start, "k_a": start, "v0": start,
    }  # fmt: skip


def _any_heads(x: Tensor) -> Tensor:
    """Return rows as heads of any size, for what does not go by heads."""
    heads: Tensor = x.unflatten(-1, (-1, gcd(x.shape[-1], 64)))
    return heads


@_alone
def keys_forward(k: Tensor, k_k: Tensor, a: Tensor, k_a: Tensor, head_size: int) -> list[Tensor]:
    """Return k (1 + (a - 1) k_a), -kk, kk a and f, where kk = f k k_k has length 1 in every head."""
    _check_keys(head_size, k=k, k_k=k_k, a=a, k_a=k_a)
    inputs = _keys_inputs(k, k_k, a, k_a, head_size)
    *made, factor = calls.call_for(["new_k", "a", "b", "factors"], "prepare_keys", inputs, ("identity",))
    return [*_shaped(made, [k] * 3), factor]


@_alone
def keys_backward(
    grad_new_k: Tensor, grad_neg_kk: Tensor, grad_kka: Tensor, k: Tensor, k_k: Tensor, a: Tensor, k_a: Tensor,
    inv_d: Tensor, head_size: int,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of k, k_k, a and k_a."""
    _check_keys(
        head_size, k=k, k_k=k_k, a=a, k_a=k_a, grad_new_k=grad_new_k, grad_neg_kk=grad_neg_kk, grad_kka=grad_kka
    )
    inputs = _keys_inputs(k, k_k, a, k_a, head_size)
    named = {"new_k": grad_new_k, "a": grad_neg_kk, "b": grad_kka}
    grads = {name: x.unflatten(-1, (-1, head_size)) for name, x in named.items()}
    made = _gradients("prepare_keys", grads, inputs, ("k", "k_k", "rate", "k_a"), kinds=("identity",))
    return _shaped(made, [k, k_k, a, k_a])


def _keys_inputs(k: Tensor, k_k: Tensor, a: Tensor, k_a: Tensor, head_size: int) -> dict[str, Tensor]:
    heads = k.unflatten(-1, (-1, head_size))
    return {"k": heads, "v": heads, "rate": a, "k_k": k_k.reshape(-1), "k_a": k_a.reshape(-1)}


def _check_keys(head_size: int, **arrays: Tensor) -> None:
    _check(**arrays)
    channels = arrays["k"].shape[-1]
    if head_size < 1 or channels % head_size:
        raise ValueError(f"head_size: expected a divisor of the {channels} channels, got {head_size}")


@_alone
def out_forward(
    x: Tensor, r: Tensor, k: Tensor, v: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, g: Tensor
) -> list[Tensor]:
    """Return the norm of the heads with the bonus behind the gate, and the means and factors of the norm."""
    _check_out(x=x, r=r, k=k, v=v, r_k=r_k, weight=weight, bias=bias, g=g)
    inputs = _out_inputs(x, r, k, v, r_k, weight, bias, g)
    return calls.call_for(["out", "means", "factors"], "gated_norm", inputs, (_EPS_OF_HEADS, "identity", "layer"))


@_alone
def out_backward(
    grad_xg: Tensor, x: Tensor, r: Tensor, k: Tensor, v: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, g: Tensor,
    mean: Tensor, rstd: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x, r, k, v, r_k, weight, bias and g."""
    _check_out(x=x, r=r, k=k, v=v, r_k=r_k, weight=weight, bias=bias, g=g, grad_xg=grad_xg)
    inputs, grads = _out_inputs(x, r, k, v, r_k, weight, bias, g), {"out": grad_xg}
    made = _gradients("gated_norm", grads, inputs, list(inputs), _EPS_OF_HEADS, ("identity", "layer"))
    return _shaped(made, [x, r, k, v, r_k, weight, bias, g])


def _out_inputs(
    x: Tensor, r: Tensor, k: Tensor, v: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, g: Tensor
) -> dict[str, Tensor]:
    return {
        "y": x.unflatten(-1, r_k.shape), "r": r, "k": k, "v": v, "r_k": r_k, "weight": weight.reshape(-1),
        "bias": bias.reshape(-1), "g": g,
    }  # fmt: skip


def _check_out(**arrays: Tensor) -> None:
    _check(**arrays)
    if arrays["r_k"].dim() != 2:  # which says the head size
        raise ValueError(f"r_k: expected shape [heads, head size], got {list(arrays['r_k'].shape)}")


# ---- channel mixing ----------------------------------------------------------------------------------------------


@_alone
def channels_forward(x: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor) -> list[Tensor]:
    """Return channel mixing, what its first matrix reads, and what its second one reads as [B * T, hidden]."""
    _check_channels(x, x_k, key_weight, value_weight)
    (mixed,) = token_shift(x, _stacked(x_k))
    hidden = mixed.flatten(0, 1) @ key_weight.T
    activate(hidden, "relu_squared", out=hidden)
    return [(hidden @ value_weight.T).unflatten(0, x.shape[:2]), mixed, hidden]


@_alone
def channels_backward(
    grad_out: Tensor, x: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor, mixed: Tensor, act: Tensor
) -> list[Tensor]:
    """Return the gradients of x, x_k and the two matrices."""
    _check_channels(x, x_k, key_weight, value_weight)
    _check(x=x, mixed=mixed)
    rows, width = x.shape[0] * x.shape[1], key_weight.shape[0]
    for name, array, shape in (
        ("grad_out", grad_out, (*x.shape[:2], value_weight.shape[0])), ("act", act, (rows, width)),
    ):  # fmt: skip
        arguments.check_shape(name, array, shape)
        arguments.check_dtype(name, array, (x.dtype,), x)
    grad_out = grad_out.flatten(0, 1)
    (of_hidden,) = _gradients(
        "activate", {"y": grad_out @ value_weight}, {"x": act.sqrt()}, ("x",), kinds=("relu_squared",)
    )
    of_x, of_x_k = _mix_gradients([(of_hidden @ key_weight).view(x.shape)], x, [x_k])
    return [of_x, of_x_k, of_hidden.T @ mixed.flatten(0, 1), grad_out.T @ act]


def _check_channels(x: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor) -> None:
    _check(x=x, x_k=x_k)
    _check_matrix("key_weight", key_weight, x.shape[-1], x)
    _check_matrix("value_weight", value_weight, key_weight.shape[0], x)


# ---- losses ------------------------------------------------------------------------------------------------------


@_alone
def loss_forward(logits: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the mean cross entropy, and of each row lse, the largest logit and where it is."""
    _check_dtype("logits", logits)
    rows, aims = _loss_rows("logits", logits, targets)
    losses, lse, argmax = registry.find("cross_entropy_fwd")(rows, aims, _IGNORED, _L2_WRAP, False)
    most = rows.gather(1, argmax.to(torch.int64).unsqueeze(1)).squeeze(1).to(lse.dtype)
    return [loss.reduced(losses.sum(), aims, _MEAN), lse, most, argmax]


@_alone
def loss_backward(
    grad_loss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, max_vals: Tensor, argmax: Tensor
) -> Tensor:
    """Return the gradient of the logits, with that of 1e-4 / 2 of the square of the largest one of each row."""
    _check_dtype("logits", logits)
    rows, aims = _loss_rows("logits", logits, targets)
    if grad_loss.numel() != 1:
        raise ValueError(f"grad_loss: expected one number, got shape {list(grad_loss.shape)}")
    wide = torch.promote_types(logits.dtype, torch.float32)
    for name, x, dtype in (("lse", lse, wide), ("argmax", argmax, torch.int32)):
        arguments.check_shape(name, x, (rows.shape[0],))
        arguments.check_dtype(name, x, (dtype,), logits)
    scale = (grad_loss.reshape(1).to(wide) / _count(aims)).expand(rows.shape[0]).contiguous()
    backward = registry.find("cross_entropy_bwd")
    made: Tensor = backward(scale, rows, aims, lse.contiguous(), argmax.contiguous(), _IGNORED, _L2_WRAP)
    return made.view(logits.shape)


@_alone
def head_forward(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int) -> list[Tensor]:
    """Return the same loss of hidden weight^T, and its gradients of hidden and weight, from chunks of rows."""
    _check_dtype("hidden", hidden)
    rows, aims = _loss_rows("hidden", hidden, targets)
    _check_matrix("weight", weight, rows.shape[1], hidden)
    total, of_hidden, of_weight, _ = registry.find("linear_cross_entropy_fwd")(
        rows, weight, None, aims, _IGNORED, _L2_WRAP, max(chunk_rows, 0), True, True, False, False
    )
    count, mean = _count(aims), loss.reduced(total, aims, _MEAN)
    return [mean, of_hidden.div_(count).view(hidden.shape), of_weight.div_(count).to(weight.dtype)]


def _loss_rows(name: str, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and their targets, each without gaps."""
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"{name}: expected shape [..., channels], got {list(x.shape)}")
    if targets.numel() != x.shape[:-1].numel():
        raise ValueError(f"targets: expected {x.shape[:-1].numel()} elements, got shape {list(targets.shape)}")
    arguments.check_dtype("targets", targets, arguments.INDEX_TYPES, x)
    return x.reshape(-1, x.shape[-1]).contiguous(), targets.reshape(-1).contiguous()


def _count(targets: Tensor) -> Tensor:
    """Return what sums over rows are divided by: gradients are zeros where no row counts, and not NaN."""
    return (targets != _IGNORED).sum().clamp(min=1)
