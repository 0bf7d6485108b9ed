"""The fused ops of RWKV-LM's trainer of RWKV-7, beside its recurrence: they return tensors, and record nothing.

Rows are [B, T, C], parameters have C elements in any shape, and all have one dtype: 16 bits, float32, or float64 on a
CPU. Forwards ask a layer's kernels for what they return, and nothing else is written. What a forward makes for its
backward alone is right, but no backward here reads it where a kernel makes it again in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import gcd
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import registry, tensors
from rwkv_jit.compat.buffers import Call, Run
from rwkv_jit.layers import calls, loss
from rwkv_jit.layers.activate import activate
from rwkv_jit.layers.common import check_lead
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.plain.layers import wide
from rwkv_jit.pool import arguments
from rwkv_jit.schedules.layer_table import OPS, PACKED, RESULTS

_EPS_OF_HEADS = 64e-5
_L2_WRAP, _IGNORED = 1e-4, -100
_MEAN = {"ignore_index": _IGNORED, "reduction": "mean"}
_PARAMETERS = {
    "x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "r_k", "weight", "bias", "a0", "v0",
}  # fmt: skip


# ---- what the ops share ------------------------------------------------------------------------------------------


def alone(run: Run) -> Run:
    """Return what runs an op apart from autograd and autocast, as a compiled extension does."""

    def call(t: Call) -> Any:
        lead = next(iter(t.values()))
        without_autocast = nullcontext() if lead.is_meta else tensors.exactly(lead)  # fakes come as meta tensors
        with torch.no_grad(), without_autocast:
            return run(t)

    return call


def _check(t: Call, names: str) -> list[Tensor]:
    """Check tensors and return them: the first is [B, T, C], parameters have C elements, the others are like it."""
    (first, lead), *others = ((name, t[name]) for name in names.split())
    if lead.dim() != 3 or not lead.shape[-1]:
        raise ValueError(f"{first}: expected shape [batch, tokens, channels], got {list(lead.shape)}")
    check_lead(first, lead)
    for name, x in others:
        if name not in _PARAMETERS:
            arguments.check_shape(name, x, tuple(lead.shape))
        elif x.numel() != lead.shape[-1]:
            raise ValueError(f"{name}: expected {lead.shape[-1]} elements, got shape {list(x.shape)}")
        arguments.check_dtype(name, x, (lead.dtype,), lead)
    return [lead, *(x for _, x in others)]


def _check_matrix(name: str, x: Tensor, columns: int, lead: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{name}: expected shape [rows, {columns}], got {list(x.shape)}")
    arguments.check_dtype(name, x, (lead.dtype,), lead)


def _gradients(
    op: str, grads: Mapping[str, Tensor], inputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor], eps: float = 0.0,
    kinds: Sequence[str] = (),
) -> list[Tensor]:  # fmt: skip
    """Return gradients of a layer's op by the kernels of its backward, from those of its results by name.

    `wanted` has what they are of, in whose shapes they are.
    """
    names = [*OPS[op].inputs, *(["cu_seqlens"] if op in PACKED else [])]
    arrays = [*map(inputs.get, names), *map(grads.get, RESULTS[op])]
    found = registry.find(f"{op}_bwd")(*arrays, eps, kinds, wanted=" ".join(wanted))
    by_name = dict(zip(OPS[op].names, found if isinstance(found, (tuple, list)) else (found,), strict=True))
    return [by_name[name].reshape(x.shape) for name, x in wanted.items()]


def _any_heads(x: Tensor) -> Tensor:
    """Return rows as heads of any size, for ops whose results do not depend on heads."""
    heads: Tensor = x.unflatten(-1, (-1, gcd(x.shape[-1], 64)))
    return heads


# ---- time mixing -------------------------------------------------------------------------------------------------

SHARES = "x_r x_w x_k x_v x_a x_g"


def mix_forward(t: Call) -> list[Tensor]:
    """Return six mixes of every token with the one before it."""
    x, *shares = _check(t, f"x {SHARES}")
    return list(token_shift(x, _stacked(*shares)))


def mix_backward(t: Call) -> list[Tensor]:
    """Return the gradients of x and of the six parameters."""
    x, *arrays = _check(t, f"x {SHARES} grad_r grad_w grad_k grad_v grad_a grad_g")
    return _mix_gradients(arrays[6:], x, arrays[:6])


def _stacked(*parameters: Tensor) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].reshape(1, -1)  # (1, C), no copy
    return torch.stack([x.reshape(-1) for x in parameters])  # (mixes, C)


def _mix_gradients(grads: Sequence[Tensor], x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    inputs = {"x": x, "mixes": _stacked(*parameters)}
    of_x, of_mixes = _gradients("token_shift", {f"mixed{m}": grad for m, grad in enumerate(grads)}, inputs, inputs)
    several = [grad.clone() for grad in of_mixes] if len(parameters) > 1 else [of_mixes]  # each of its own memory
    return [of_x, *(grad.reshape(x.shape) for grad, x in zip(several, parameters, strict=True))]


def rate_forward(t: Call) -> Tensor:
    """Return sigmoid(a0 + a12), how much the state learns of a token; `prepare_keys` makes it, of any keys."""
    a12, a0 = _check(t, "a12 a0")
    heads, start = _any_heads(a12), a0.reshape(-1)
    inputs = {"k": heads, "v": heads, "rate": heads, "k_k": start, "k_a": start, "a0": start}
    (rate,) = calls.call_for(["new_rate"], "prepare_keys", inputs, ("sigmoid",))
    return rate.view(a12.shape)


def rate_backward(t: Call) -> list[Tensor]:
    """Return the gradients of a0 and a12: `prepare_keys` of keys of 1 returns the rate for them, at k_a 1 and k_k 0."""
    a12, a0, grad_out = _check(t, "a12 a0 grad_out")
    heads = _any_heads(a12)
    ones, rows = torch.ones_like(heads), torch.ones_like(a0).reshape(-1)
    grads = dict.fromkeys(("new_k", "a", "b"), grad_out.reshape(heads.shape))
    inputs = {"k": ones, "v": ones, "rate": heads, "k_k": torch.zeros_like(rows), "k_a": rows, "a0": a0.reshape(-1)}
    return _gradients("prepare_keys", grads, inputs, {"a0": a0, "rate": a12}, kinds=("sigmoid",))


def value_forward(t: Call) -> Tensor:
    """Return v + (v_first - v) sigmoid(v0 + v12): the value of a layer with a part of the first one's."""
    v, *others = _check(t, "v v_first v0 v12")
    (value,) = calls.call_for(["new_v"], "prepare_keys", _value_inputs(v, *others), ("sigmoid",))
    return value.view(v.shape)


def value_backward(t: Call, in_rows: bool = False) -> list[Tensor]:
    """Return the gradients of v, v_first, v0 and v12.

    With `in_rows` the last one, in float32, stands for both: the caller adds it up for v0.
    """
    v, v_first, v0, v12, grad_out = _check(t, "v v_first v0 v12 grad_out")
    v12 = wide(v12) if in_rows else v12
    inputs = _value_inputs(v, v_first, v0, v12)
    wanted = {"v": v, "v_first": v_first, **({} if in_rows else {"v0": v0}), "v_gate": v12}
    grads = dict.fromkeys(("new_k", "new_v", "a", "b"), grad_out.reshape(inputs["v"].shape))
    return _gradients("prepare_keys", grads, inputs, wanted, kinds=("sigmoid",))


def _value_inputs(v: Tensor, v_first: Tensor, v0: Tensor, v12: Tensor) -> dict[str, Tensor]:
    """Return inputs of `prepare_keys` for its value alone: keys and rates are any, and these are near by."""
    heads, start = _any_heads(v), v0.reshape(-1)
    return {
        "k": heads, "v": heads, "rate": v12, "v_first": v_first, "v_gate": v12, "k_k": start, "k_a": start, "v0": start,
    }  # fmt: skip


def keys_forward(t: Call) -> list[Tensor]:
    """Return k (1 + (a - 1) k_a), -kk, kk a and f, where kk = f k k_k has length 1 in every head."""
    inputs = _keys_inputs(t, "k k_k a k_a")
    *rows, factor = calls.call_for(["new_k", "a", "b", "factors"], "prepare_keys", inputs, ("identity",))
    return [*(x.reshape(t["k"].shape) for x in rows), factor]


def keys_backward(t: Call) -> list[Tensor]:
    """Return the gradients of k, k_k, a and k_a."""
    inputs = _keys_inputs(t, "k k_k a k_a grad_new_k grad_neg_kk grad_kka")
    named = {"new_k": "grad_new_k", "a": "grad_neg_kk", "b": "grad_kka"}
    grads = {name: t[of].unflatten(-1, (-1, t["head_size"])) for name, of in named.items()}
    wanted = {"k": t["k"], "k_k": t["k_k"], "rate": t["a"], "k_a": t["k_a"]}
    return _gradients("prepare_keys", grads, inputs, wanted, kinds=("identity",))


def _keys_inputs(t: Call, names: str) -> dict[str, Tensor]:
    """Check a call and return the inputs of `prepare_keys`."""
    (k, k_k, a, k_a, *_), head_size = _check(t, names), t["head_size"]
    if head_size < 1 or k.shape[-1] % head_size:
        raise ValueError(f"head_size: expected a divisor of the {k.shape[-1]} channels, got {head_size}")
    heads = k.unflatten(-1, (-1, head_size))
    return {"k": heads, "v": heads, "rate": a, "k_k": k_k.reshape(-1), "k_a": k_a.reshape(-1)}


OUT = "x r k v r_k weight bias g"


def out_forward(t: Call) -> list[Tensor]:
    """Return the norm of the heads with the bonus behind the gate, and the means and factors of the norm."""
    inputs = _out_inputs(t, OUT)
    return calls.call_for(["out", "means", "factors"], "gated_norm", inputs, (_EPS_OF_HEADS, "identity", "layer"))


def out_backward(t: Call) -> list[Tensor]:
    """Return the gradients of x, r, k, v, r_k, weight, bias and g."""
    inputs = _out_inputs(t, f"{OUT} grad_xg")
    wanted = {name: t["x" if name == "y" else name] for name in inputs}
    return _gradients("gated_norm", {"out": t["grad_xg"]}, inputs, wanted, _EPS_OF_HEADS, ("identity", "layer"))


def _out_inputs(t: Call, names: str) -> dict[str, Tensor]:
    """Check a call and return the inputs of `gated_norm`."""
    _check(t, names)
    if t["r_k"].dim() != 2:  # which says the head size
        raise ValueError(f"r_k: expected shape [heads, head size], got {list(t['r_k'].shape)}")
    inputs = {"y": t["x"].unflatten(-1, t["r_k"].shape), **{name: t[name] for name in ("r", "k", "v", "r_k")}}
    return {**inputs, "weight": t["weight"].reshape(-1), "bias": t["bias"].reshape(-1), "g": t["g"]}


# ---- channel mixing ----------------------------------------------------------------------------------------------


def channels_forward(t: Call) -> list[Tensor]:
    """Return channel mixing, what its first matrix reads, and what its second one reads as [B * T, hidden]."""
    x, x_k, key_weight, value_weight = _check_channels(t)
    (mixed,) = token_shift(x, _stacked(x_k))
    hidden = activate(mixed.flatten(0, 1) @ key_weight.T, "relu_squared")  # (B * T, hidden)
    return [(hidden @ value_weight.T).unflatten(0, x.shape[:2]), mixed, hidden]


def channels_backward(t: Call) -> list[Tensor]:
    """Return the gradients of x, x_k and the two matrices."""
    x, x_k, key_weight, value_weight = _check_channels(t)
    _, mixed = _check(t, "x mixed")
    grad_out, act = t["grad_out"], t["act"]
    rows, width = x.shape[0] * x.shape[1], key_weight.shape[0]
    for name, array, shape in (
        ("grad_out", grad_out, (*x.shape[:2], value_weight.shape[0])), ("act", act, (rows, width)),
    ):  # fmt: skip
        arguments.check_shape(name, array, shape)
        arguments.check_dtype(name, array, (x.dtype,), x)
    grad_out = grad_out.flatten(0, 1)
    hidden, grads = {"x": act.sqrt()}, {"y": grad_out @ value_weight}
    (of_hidden,) = _gradients("activate", grads, hidden, hidden, kinds=("relu_squared",))
    of_x, of_x_k = _mix_gradients([(of_hidden @ key_weight).view(x.shape)], x, [x_k])
    return [of_x, of_x_k, of_hidden.T @ mixed.flatten(0, 1), grad_out.T @ act]


def _check_channels(t: Call) -> tuple[Tensor, ...]:
    x, x_k = _check(t, "x x_k")
    key_weight, value_weight = t["key_weight"], t["value_weight"]
    _check_matrix("key_weight", key_weight, x.shape[-1], x)
    _check_matrix("value_weight", value_weight, key_weight.shape[0], x)
    return x, x_k, key_weight, value_weight


# ---- losses ------------------------------------------------------------------------------------------------------


def loss_forward(t: Call) -> list[Tensor]:
    """Return the mean cross entropy, and of each row lse, the largest logit and where it is."""
    rows, aims = _loss_rows(t, "logits")
    losses, lse, argmax = registry.find("cross_entropy_fwd")(rows, aims, _IGNORED, _L2_WRAP, False)
    most = rows.gather(1, argmax.to(torch.int64).unsqueeze(1)).squeeze(1).to(lse.dtype)
    return [loss.reduced(losses.sum(), aims, _MEAN), lse, most, argmax]


def loss_backward(t: Call) -> Tensor:
    """Return the gradient of the logits, with that of 1e-4 / 2 of the square of the largest one of each row."""
    rows, aims = _loss_rows(t, "logits")
    logits, grad_loss, lse, argmax = (t[name] for name in ("logits", "grad_loss", "lse", "argmax"))
    if grad_loss.numel() != 1:
        raise ValueError(f"grad_loss: expected one number, got shape {list(grad_loss.shape)}")
    of_sums = torch.promote_types(logits.dtype, torch.float32)
    for name, x, dtype in (("lse", lse, of_sums), ("argmax", argmax, torch.int32)):
        arguments.check_shape(name, x, (rows.shape[0],))
        arguments.check_dtype(name, x, (dtype,), logits)
    scale = (grad_loss.reshape(1).to(of_sums) / _count(aims)).expand(rows.shape[0]).contiguous()
    backward = registry.find("cross_entropy_bwd")
    grad: Tensor = backward(rows, aims, lse.contiguous(), argmax.contiguous(), scale, _IGNORED, _L2_WRAP)
    return grad.view(logits.shape)


def head_forward(t: Call) -> list[Tensor]:
    """Return the same loss of hidden weight^T, and its gradients of hidden and weight, from chunks of rows."""
    rows, aims = _loss_rows(t, "hidden")
    hidden, weight, chunk_rows = t["hidden"], t["weight"], t["chunk_rows"]
    _check_matrix("weight", weight, rows.shape[1], hidden)
    total, of_hidden, of_weight, _ = registry.find("linear_cross_entropy_fwd")(
        rows, weight, None, aims, _IGNORED, _L2_WRAP, max(chunk_rows, 0), True, True, False, False
    )
    count, mean = _count(aims), loss.reduced(total, aims, _MEAN)
    return [mean, of_hidden.div_(count).view(hidden.shape), of_weight.div_(count).to(weight.dtype)]


def _loss_rows(t: Call, name: str) -> tuple[Tensor, Tensor]:
    """Return rows and their targets, each without gaps."""
    x, targets = t[name], t["targets"]
    check_lead(name, x)
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"{name}: expected shape [..., channels], got {list(x.shape)}")
    if targets.numel() != x.shape[:-1].numel():
        raise ValueError(f"targets: expected {x.shape[:-1].numel()} elements, got shape {list(targets.shape)}")
    arguments.check_dtype("targets", targets, arguments.INDEX_TYPES, x)
    return x.reshape(-1, x.shape[-1]).contiguous(), targets.reshape(-1).contiguous()


def _count(targets: Tensor) -> Tensor:
    """Return what sums over rows are divided by: gradients are zeros where no row counts, and not NaN."""
    return (targets != _IGNORED).sum().clamp(min=1)
