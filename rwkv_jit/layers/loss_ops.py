"""The torch ops of the loss: rows of logits with their gradients, and chunks of the rows of a linear layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from rwkv_jit.call import differentiable, recording, registry, tensors, torch_op
from rwkv_jit.call import plan as plans
from rwkv_jit.call.differentiable import Differentiable, Named, Values
from rwkv_jit.call.plan import Plan
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import loss as loss_steps
from rwkv_jit.schedules.loss import Given

_INSTEAD = "torch.nn.functional.cross_entropy"
_CHUNK_BYTES = 2**28  # of a chunk's logits, by default
_LEAST_ROWS = 256  # of a chunk, by default: matrix products take tiles of up to as many


def refuse_forward_mode(name: str, *_: Any) -> NoReturn:
    """Raise the error of a derivative in forward mode."""
    raise RuntimeError(f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors); take {_INSTEAD}")


def _check_classes(targets: Tensor, classes: int, ignore_index: int) -> None:
    if arguments.may_look_at([targets]):
        outside = targets[(targets != ignore_index) & ((targets < 0) | (targets >= classes))].tolist()
        if outside:
            raise ValueError(
                f"targets: expected 0 to {classes - 1}, or {ignore_index} for rows that do not count; got {outside[:8]}"
            )


# ---- rows --------------------------------------------------------------------------------------------------------


def _losses(logits: Tensor, targets: Tensor, ignore_index: int, l2_wrap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of rows, and lse and argmax for their gradient; argmax is empty without `l2_wrap`."""
    if not logits.numel():
        return _empty_losses(logits, l2_wrap)
    empty = logits.new_empty(0, dtype=torch.int32)
    if logits.is_cuda:
        loss, lse, *more = _run("forward", {"logits": logits, "targets": targets}, ignore_index, l2_wrap)
        return loss, lse, more[0].view(torch.int32) if more else empty
    x, is_ignored = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets == ignore_index
    top, argmax = x.max(-1)
    log_sum = (x - top.unsqueeze(-1)).exp_().sum(-1).log_()
    own = x.gather(-1, targets.masked_fill(is_ignored, 0).to(torch.int64).unsqueeze(-1)).squeeze(-1)
    # Both terms are small where the target is likely: lse has fewer digits behind the point.
    loss = (log_sum + (top - own)).masked_fill(is_ignored, 0)
    return loss, top + log_sum, argmax.to(torch.int32) if l2_wrap else empty


def _gradient(
    scale: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, argmax: Tensor, ignore_index: int, l2_wrap: float
) -> Tensor:  # fmt: skip
    """Return the gradient of logits from those of the losses of rows."""
    if not logits.numel():
        return torch.empty_like(logits)
    if logits.is_cuda:
        named = {"logits": logits, "targets": targets, "lse": lse, "argmax": argmax if l2_wrap else None}
        return _run("backward", {**named, "scale": scale}, ignore_index, l2_wrap)[0]
    x, is_ignored = logits.to(lse.dtype), targets == ignore_index
    y = (x - lse.unsqueeze(-1)).exp_()
    rows = torch.arange(len(x), device=x.device)
    y[rows, targets.masked_fill(is_ignored, 0).to(torch.int64)] -= 1
    if l2_wrap:
        y[rows, argmax.to(torch.int64)] += l2_wrap * x[rows, argmax.to(torch.int64)]
    y = (y * scale.unsqueeze(-1)).masked_fill_(is_ignored.unsqueeze(-1), 0)
    return y.to(logits.dtype)


def _differentiated(logits: Tensor, targets: Tensor, ignore_index: int, l2_wrap: float) -> Tensor:
    """Return the losses of rows; in the place of their logits stands the gradient of the sum of these."""
    if logits.is_cuda:
        return _run("in_place", {"logits": logits, "targets": targets}, ignore_index, l2_wrap)[0]
    loss, lse, argmax = _losses(logits, targets, ignore_index, l2_wrap)
    logits.copy_(_gradient(torch.ones_like(loss), logits, targets, lse, argmax, ignore_index, l2_wrap))
    return loss


def _run(direction: str, named: Mapping[str, Any], ignore_index: int, l2_wrap: float) -> list[Tensor]:
    arrays = [*named.values()]

    def prepare() -> Plan:
        logits, targets = named["logits"], named["targets"]
        given = Given(
            tensors.gpu(logits.device.index), tensors.STORAGE[logits.dtype], logits.shape[0], logits.shape[1],
            targets.element_size(), ignore_index, l2_wrap,
        )  # fmt: skip
        return Plan(loss_steps.DIRECTIONS[direction](given), loss_steps.problem(direction, given), named)

    key = "cross_entropy", direction, ignore_index, l2_wrap, tensors.signature(arrays)
    return plans.find(key, prepare).run(arrays)


def _empty_losses(logits: Tensor, l2_wrap: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss, lse = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    return loss, lse, logits.new_empty(logits.shape[0] if l2_wrap else 0, dtype=torch.int32)


# ---- the torch ops of cross_entropy ------------------------------------------------------------------------------


def _forward(
    logits: Tensor, targets: Tensor, ignore_index: int, l2_wrap: float, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_classes(targets, logits.shape[1], ignore_index)
    torch_op.say_reference("cross_entropy", logits)
    with tensors.exactly(logits), torch.no_grad():
        return _losses(logits, targets, ignore_index, l2_wrap)


def _by_hand(arrays: Values, options: Values, _: Named, names: Sequence[str]) -> dict[str, Tensor]:
    (logits, targets, lse, argmax, grad), (ignore_index, l2_wrap) = arrays, options
    with tensors.exactly(logits), torch.no_grad():
        return {"logits": _gradient(grad, logits, targets, lse, argmax, ignore_index, l2_wrap)}


# ---- the torch ops of linear_cross_entropy -----------------------------------------------------------------------


def _linear_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, l2_wrap: float,
    chunk_rows: int, *flags: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the sum of all losses, and its gradients, those of weight and bias in float32 at least."""
    (rows, _), (classes, _), (want_hidden, want_weight, want_bias, _) = hidden.shape, weight.shape, flags
    _check_classes(targets, classes, ignore_index)
    torch_op.say_reference("linear_cross_entropy", hidden)
    wide, device = torch.promote_types(hidden.dtype, torch.float32), hidden.device
    if not chunk_rows:
        fitting = _CHUNK_BYTES // (classes * hidden.element_size())
        chunk_rows = max(_LEAST_ROWS, fitting // _LEAST_ROWS * _LEAST_ROWS)
    chunk_rows = min(chunk_rows, rows)
    with tensors.exactly(hidden), torch.no_grad():
        losses = torch.empty(rows, dtype=wide, device=device)
        of_hidden, of_weight, of_bias = _memory_of_gradients(hidden, weight, flags)
        of_bias.zero_()
        if not rows:
            of_weight.zero_()
        memory = torch.empty(chunk_rows, classes, dtype=hidden.dtype, device=device)
        for begin in range(0, rows, max(chunk_rows, 1)):
            chunk = slice(begin, min(begin + chunk_rows, rows))
            own, aims = hidden[chunk], targets[chunk]
            logits = memory[: len(own)]
            if bias is None:
                torch.mm(own, weight.T, out=logits)
            else:
                torch.addmm(bias, own, weight.T, out=logits)
            if not any(flags[:3]):
                losses[chunk] = _losses(logits, aims, ignore_index, l2_wrap)[0]
                continue
            losses[chunk] = _differentiated(logits, aims, ignore_index, l2_wrap)
            if want_hidden:
                torch.mm(logits, weight, out=of_hidden[chunk])
            if want_weight:
                _add_product(of_weight, logits, own, is_first=not begin)
            if want_bias:
                of_bias += logits.sum(0, dtype=wide)
        return losses.sum(), of_hidden, of_weight, of_bias


def _add_product(total: Tensor, gradient: Tensor, own: Tensor, is_first: bool) -> None:
    """Add a product to a sum, or write it there if it `is_first`."""
    if total.dtype == own.dtype:
        torch.addmm(total, gradient.T, own, beta=int(not is_first), out=total)
        return
    if total.is_cuda and _adds_in_float32(total.device, own.dtype):
        torch.addmm(total, gradient.T, own, total.dtype, beta=int(not is_first), out=total)
        return
    if is_first:
        total.zero_()
    if own.dtype == torch.float16:  # whose range a sum of many rows may leave: random ones grow with the root
        share = 2.0 ** (len(own).bit_length() // 2)
        total.add_(gradient.T @ (own / share), alpha=share)
    else:
        total += gradient.T @ own


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds products of a dtype to sums in float32: from 2.8 on, on GPUs."""
    total, x = (torch.zeros(8, 8, dtype=each, device=device) for each in (torch.float32, dtype))
    try:
        torch.addmm(total, x, x, torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def _memory_of_gradients(hidden: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Return memory for the gradients of hidden, weight and bias: empty for those that are not `wanted`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    several = (hidden.shape, hidden.dtype), (weight.shape, wide), (weight.shape[:1], wide)
    return [
        hidden.new_empty(shape if is_wanted else (0,), dtype=dtype)
        for (shape, dtype), is_wanted in zip(several, wanted, strict=False)
    ]


def _linear_forward_fake(hidden: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor, ...]:
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return total, *_memory_of_gradients(hidden, weight, more[-4:])


def _keep_gradients(ctx: Any, arguments: Sequence[Any], named: dict[str, Any], results: Sequence[Tensor]) -> None:
    ctx.wanted = arguments[-4:-1]
    made = results[1:]
    ctx.mark_non_differentiable(*made)
    ctx.save_for_backward(*made)


def _linear_in_context(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[2:]  # two inputs of the Function stand before these
    for name, is_needed, is_made in zip(("hidden", "weight", "bias"), needs, ctx.wanted, strict=False):
        if is_needed and not is_made:
            raise RuntimeError(
                f"linear_cross_entropy: the forward computes the gradient of {name}, and was traced or run while "
                f"{name} required none"
            )
    if torch.is_grad_enabled():  # what was made in the forward would be a constant to a second derivative
        grad = grad.detach().requires_grad_()
    made = _run_linear_backward(*ctx.saved_tensors, grad)
    return *(x if is_made else None for x, is_made in zip(made, ctx.wanted, strict=True)), *(None,) * 8


def _linear_backward(*arguments: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of the sum times that of the sum, which stands last, all in the dtype of hidden."""
    *made, grad = arguments
    return tuple([_times(x, grad, made[0].dtype) for x in made])


def _linear_backward_fake(*arguments: Tensor) -> tuple[Tensor, ...]:
    *made, _ = arguments
    return tuple([torch.empty_like(x, dtype=made[0].dtype) for x in made])


def _times(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times a number, which torch would round to the dtype of x."""
    if not x.is_cuda or not x.numel():
        with torch.no_grad():
            return (x * scale.expand_as(x)).to(dtype)

    def prepare() -> Plan:
        storages = tensors.STORAGE[x.dtype], x.shape, tensors.STORAGE[dtype]
        return Plan(*loss_steps.scale(tensors.gpu(x.device.index), *storages), {"x": x, "scale": scale})

    key = "linear_cross_entropy_bwd", dtype, tensors.signature([x, scale])
    return plans.find(key, prepare).run((x, scale))[0]


differentiable.define(
    Differentiable(
        "cross_entropy", recording.Leaves(("logits",)), 2, 1, _forward,
        lambda logits, targets, ignore_index, l2_wrap, save: _empty_losses(logits, l2_wrap),
        functools.partial(refuse_forward_mode, "cross_entropy"), lambda *_: None, _by_hand, instead=_INSTEAD,
    )
)  # fmt: skip
_op, _refuse = registry.find("linear_cross_entropy_fwd"), functools.partial(refuse_forward_mode, "linear_cross_entropy")
_record = recording.forward(_op, _keep_gradients, _linear_in_context, _refuse)
registry.implement("linear_cross_entropy_fwd", _linear_forward, _linear_forward_fake, _record)
_record, _run_linear_backward = recording.backward(
    registry.find("linear_cross_entropy_bwd"), "linear_cross_entropy", _INSTEAD
)
registry.implement("linear_cross_entropy_bwd", _linear_backward, _linear_backward_fake, _record)
