"""The loss of training: cross entropy of logits, or of hidden states whose logits are never all there at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rwkv_jit.call import checks, differentiable, recording, registry, sharding, tensors, torch_op
from rwkv_jit.call import plan as plans
from rwkv_jit.call.differentiable import Differentiable, Named, Values
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import brief, unexpected
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import loss as loss_steps
from rwkv_jit.schedules.legal import Reduction, Total
from rwkv_jit.schedules.loss import MOST_COLUMNS, Given

_IGNORED = -100
_REDUCTIONS: tuple[str, ...] = get_args(Reduction)
_CHUNK_BYTES = 2**28  # of a chunk's logits, by default
_LEAST_ROWS = 256  # of a chunk, by default: matrix products take tiles of up to as many


# ---- the public functions ----------------------------------------------------------------------------------------


def cross_entropy(
    logits: Array, targets: Array, *, l2_wrap: float = 0.0, ignore_index: int = _IGNORED, reduction: Reduction = "mean",
    **_unknown: NoReturn,
) -> Tensor:  # fmt: skip
    r"""Cross entropy of logits, with a gradient, and RWKV-LM's penalty on the largest logit.

        loss_i = log(sum_j e^logits_ij) - logits_i,targets_i

    V is the number of classes: the size of the vocabulary. Rows are all dimensions but the last.

    Parameters
    ----------
    logits : torch.Tensor, shape (..., V), float16, bfloat16 or float32
        Any strides; logits that are not contiguous are copied. On the CPU also float64.
    targets : torch.Tensor, shape (...), int64 or int32
        The right class of each row, 0 to V - 1, or `ignore_index`.
    l2_wrap : float, default 0.0
        c, not negative. The gradient, and not the loss, includes that of c / 2 max_j(logits_ij)^2 for every row that
        counts: c times the largest logit, at its first index. RWKV-LM has c = 1e-4.
    ignore_index : int, default -100
        Rows with this target do not count: their loss is 0, their gradient is zeros, also that of `l2_wrap`, and "mean"
        leaves them out.
    reduction : {"mean", "sum", "none"}, default "mean"
        "mean" is over the rows that count. Without any it is NaN, and gradients are zeros.

    Returns
    -------
    torch.Tensor, shape () or that of targets with "none", float32
        float64 where logits are.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been launched.
    RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    The gradient is

        dlogits_ij = g_i (e^(logits_ij - lse_i) - [j = targets_i] + [j = argmax_i] c logits_ij)

    in the dtype of logits, where lse is the logarithm above, and g_i the gradient of the row's loss. So `l2_wrap` has a
    share of a loss that is scaled, or summed over steps; and of a mean, it is over the rows that count. RWKV-LM's loss
    does not scale and is over all rows: both are the same where the mean is differentiated as it is, with no row
    ignored. The backward keeps logits, targets and 4 bytes of each row, 8 with `l2_wrap`. A second derivative is an
    error.

    Arithmetic is float32 whatever the dtype is, under autocast too. Against float64 on the same inputs a loss is off by
    less than 5e-6, of 1 or of itself where it is larger, and a gradient in L2 by 5e-6 and its rounding; with logits
    above 64 the gradient has fewer digits.

    A target that is neither a class nor `ignore_index` is an error on the CPU, and on a GPU with RWKVJIT_CHECK=1; else
    loss and gradient of that row are NaN. CPU tensors run plain torch, with one notice.

    DTensors may be replicated or sharded over the batch. The sum and the mean are those of all ranks, in a plain
    tensor.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892; `L2Wrap` is
    that of RWKV-LM, https://github.com/BlinkDL/RWKV-LM.

    Examples
    --------
    >>> logits = torch.randn(2, 5, 1000, device="cuda", requires_grad=True)
    >>> targets = torch.randint(1000, (2, 5), device="cuda")
    >>> loss = rwkv_jit.cross_entropy(logits, targets, l2_wrap=1e-4)
    >>> loss.backward()
    >>> loss.shape, logits.grad.shape
    (torch.Size([]), torch.Size([2, 5, 1000]))
    """
    if _unknown:
        raise unexpected("cross_entropy", next(iter(_unknown)))
    _refuse_tangents("cross_entropy", (logits, targets))
    if sharding.any_distributed((logits, targets)):
        options = {"l2_wrap": l2_wrap, "ignore_index": ignore_index, "reduction": reduction}
        return _loss_of_logits(logits, targets, options)
    logits, targets = tensors.from_any("logits", logits), tensors.from_any("targets", targets)
    if not logits.dim() or not 0 < logits.shape[-1] <= MOST_COLUMNS:
        raise ValueError(f"logits: expected shape [..., classes], got {list(logits.shape)}")
    _check_dtype("logits", logits)
    _check_targets(targets, logits)
    _check_options(l2_wrap, ignore_index)
    checks.check_name("reduction", reduction, _REDUCTIONS)
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    flat = targets.reshape(-1).contiguous()
    loss, *_ = registry.find("cross_entropy_fwd")(rows, flat, ignore_index, float(l2_wrap), False)
    if reduction == "none":
        return loss.view(targets.shape)  # type: ignore[no-any-return]
    return reduced(loss.sum(), targets, {"ignore_index": ignore_index, "reduction": reduction})


def linear_cross_entropy(
    hidden: Array, weight: Array, targets: Array, *, bias: Array | None = None, l2_wrap: float = 0.0,
    ignore_index: int = _IGNORED, reduction: Total = "mean", chunk_rows: int | None = None,
    **_unknown: NoReturn,
) -> Tensor:  # fmt: skip
    r"""Cross entropy of a linear layer's logits, of which only a chunk of rows is in memory at a time.

        loss = cross_entropy(hidden weight^T + bias, targets)

    V is the number of classes, C the channels. Rows are all dimensions of hidden but the last. The result is that of
    `cross_entropy` on the logits of `torch.nn.functional.linear`.

    Parameters
    ----------
    hidden : torch.Tensor, shape (..., C), float16, bfloat16 or float32
        The output of the last layer. On the CPU also float64.
    weight : torch.Tensor, shape (V, C), dtype of hidden
        The head's matrix. Under autocast hidden, weight and bias are cast, as torch's layer does.
    targets : torch.Tensor, shape (...), int64 or int32
        The right class of each row, 0 to V - 1, or `ignore_index`.
    bias : torch.Tensor, shape (V,), dtype of hidden, optional
        Is added to the logits.
    l2_wrap : float, default 0.0
        As in `cross_entropy`.
    ignore_index : int, default -100
        As there.
    reduction : {"mean", "sum"}, default "mean"
        As in `cross_entropy`.
    chunk_rows : int, optional
        Rows of a chunk. By default as many as have 256 MiB of logits, a multiple of 256 and at least 256: fewer leave
        tiles of the matrix products half empty, and more save few launches.

    Returns
    -------
    torch.Tensor, shape (), float32
        float64 where hidden is.

    Raises
    ------
    TypeError, ValueError, RwkvJitError, NvrtcNotFoundError
        As `cross_entropy`.

    Notes
    -----
    Gradients of hidden, weight and bias are computed in the forward, chunk by chunk while the logits are there, if they
    need any at the call. The backward multiplies them by the gradient of the loss, and no more. So a
    recomputation of the forward, as in activation checkpointing, takes the time of both again.

    Memory of the forward, beside its inputs: chunk_rows V numbers for logits. For gradients it is that of hidden once
    more, for weight 4 V C bytes and, in 16 bits where torch is older than 2.8, V C numbers. The gradients of weight and
    bias are sums over chunks in float32, rounded to the dtype of hidden in the backward; until then they are those of
    the sum of all losses, as those of a mean could be too small for float16. A second derivative is an error.

    Logits are rounded to the dtype of hidden, as those of torch's layer are. Precision and targets out of range are
    those of `cross_entropy`. A row's loss may differ in its last digits with `chunk_rows`, as matrix products do.

    DTensors: hidden and targets are replicated or sharded over the batch, weight and bias replicated. Where hidden is
    replicated, weight may be sharded over the classes: each rank then takes a part of the rows, with the whole matrix,
    which it gathers. Plain tensors beside a weight that is a DTensor are an error, as each rank may have other rows.
    With FSDP call the module that has the weight, and take `cross_entropy`. The result is as in `cross_entropy`.

    References
    ----------
    Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, arXiv:2410.10989, which makes the gradients of
    chunks in the forward too.

    Examples
    --------
    >>> hidden = torch.randn(2, 5, 64, device="cuda", requires_grad=True)
    >>> head = torch.nn.Linear(64, 1000, bias=False, device="cuda")
    >>> targets = torch.randint(1000, (2, 5), device="cuda")
    >>> loss = rwkv_jit.linear_cross_entropy(hidden, head.weight, targets, l2_wrap=1e-4)
    >>> loss.backward()
    >>> hidden.grad.shape, head.weight.grad.shape
    (torch.Size([2, 5, 64]), torch.Size([1000, 64]))
    """
    if _unknown:
        raise unexpected("linear_cross_entropy", next(iter(_unknown)))
    given = [hidden, weight, *([] if bias is None else [bias])]
    _refuse_tangents("linear_cross_entropy", (*given, targets))
    if sharding.any_distributed((*given, targets)):
        options = {"l2_wrap": l2_wrap, "ignore_index": ignore_index, "reduction": reduction, "chunk_rows": chunk_rows}
        return _loss_of_rows(hidden, weight, bias, targets, options)
    own = [tensors.from_any(each, x) for each, x in zip(("hidden", "weight", "bias"), given, strict=False)]
    targets = tensors.from_any("targets", targets)
    dtype = tensors.autocast_dtype(own[0])
    if dtype is not None:
        own = [tensors.under_autocast(x, dtype) for x in own]
    hidden, weight, *biases = own
    if not hidden.dim() or not hidden.shape[-1]:
        raise ValueError(f"hidden: expected shape [..., channels], got {list(hidden.shape)}")
    _check_dtype("hidden", hidden)
    channels = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != channels or not 0 < weight.shape[0] <= MOST_COLUMNS:
        raise ValueError(f"weight: expected shape [classes, {channels}], got {list(weight.shape)}")
    arguments.check_dtype("weight", weight, (hidden.dtype,), hidden)
    for x in biases:
        arguments.check_shape("bias", x, (weight.shape[0],))
        arguments.check_dtype("bias", x, (hidden.dtype,), hidden)
    _check_targets(targets, hidden)
    _check_options(l2_wrap, ignore_index)
    checks.check_name("reduction", reduction, _REDUCTIONS[:2])
    rows = 0 if chunk_rows is None else arguments.count("chunk_rows", chunk_rows, 1)
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in own]
    wanted += [False] * (3 - len(wanted))
    total, *_ = registry.find("linear_cross_entropy_fwd")(
        hidden.reshape(-1, channels), weight, biases[0] if biases else None, targets.reshape(-1).contiguous(),
        ignore_index, float(l2_wrap), rows, *wanted, False,
    )  # fmt: skip
    return reduced(total, targets, {"ignore_index": ignore_index, "reduction": reduction})


# ---- checks ------------------------------------------------------------------------------------------------------


def _refuse_tangents(name: str, arrays: tuple[Any, ...]) -> None:
    """Refuse tangents, which torch would drop without a word."""
    if not torch.compiler.is_compiling() and tensors.has_dual_level():
        given = (x for x in arrays if isinstance(x, Tensor))
        if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
            raise RuntimeError(_no_forward_mode(name))


def _no_forward_mode(name: str) -> str:
    return f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors); take {_INSTEAD}"


def _check_dtype(name: str, x: Tensor) -> None:
    dtypes = [*tensors.STORAGE] if x.is_cuda else [*tensors.STORAGE, torch.float64]
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")


def _check_targets(targets: Tensor, rows: Tensor) -> None:
    arguments.check_shape("targets", targets, tuple(rows.shape[:-1]))
    arguments.check_dtype("targets", targets, arguments.INDEX_TYPES, rows)


def _check_options(l2_wrap: Any, ignore_index: Any) -> None:
    checks.check_number("l2_wrap", l2_wrap)
    if l2_wrap < 0:
        raise ValueError(f"l2_wrap: expected at least 0, got {l2_wrap}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool) or not -(2**31) <= ignore_index < 2**31:
        raise TypeError(f"ignore_index: expected an int of 32 bits, got {brief(ignore_index)}")


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
    wide = torch.promote_types(logits.dtype, torch.float32)
    if not logits.numel():
        return _empty_losses(logits, l2_wrap)
    if logits.is_cuda:
        loss, lse, *more = _plan("forward", {"logits": logits, "targets": targets}, ignore_index, l2_wrap).run(
            (logits, targets)
        )
        return loss, lse, more[0].view(torch.int32) if more else _none(logits, torch.int32)
    x, is_ignored = logits.to(wide), targets == ignore_index
    top, argmax = x.max(-1)
    log_sum = (x - top.unsqueeze(-1)).exp_().sum(-1).log_()
    own = x.gather(-1, targets.masked_fill(is_ignored, 0).to(torch.int64).unsqueeze(-1)).squeeze(-1)
    # Both terms are small where the target is likely: lse has fewer digits behind the point.
    loss = (log_sum + (top - own)).masked_fill(is_ignored, 0)
    return loss, top + log_sum, argmax.to(torch.int32) if l2_wrap else _none(logits, torch.int32)


def _gradient(
    scale: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, argmax: Tensor, ignore_index: int, l2_wrap: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of logits from those of the losses of rows."""
    if not logits.numel():
        return torch.empty_like(logits)
    if logits.is_cuda:
        named = {"logits": logits, "targets": targets, "lse": lse, "argmax": argmax if l2_wrap else None}
        named["scale"] = scale
        return _plan("backward", named, ignore_index, l2_wrap).run([*named.values()])[0]
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
        named = {"logits": logits, "targets": targets}
        return _plan("in_place", named, ignore_index, l2_wrap).run([*named.values()])[0]
    loss, lse, argmax = _losses(logits, targets, ignore_index, l2_wrap)
    logits.copy_(_gradient(torch.ones_like(loss), logits, targets, lse, argmax, ignore_index, l2_wrap))
    return loss


def _plan(direction: str, named: Mapping[str, Tensor | None], ignore_index: int, l2_wrap: float) -> Plan:
    def prepare() -> Plan:
        logits, targets = named["logits"], named["targets"]
        assert logits is not None
        assert targets is not None
        given = Given(
            tensors.gpu(logits.device.index), tensors.STORAGE[logits.dtype], logits.shape[0], logits.shape[1],
            targets.element_size(), ignore_index, l2_wrap,
        )  # fmt: skip
        return Plan(loss_steps.DIRECTIONS[direction](given), loss_steps.problem(direction, given), named)

    key = "cross_entropy", direction, ignore_index, l2_wrap, tensors.signature([*named.values()])
    return plans.find(key, prepare)


def _none(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what stands for a tensor that nobody wants."""
    return like.new_empty(0, dtype=dtype)


def _empty_losses(logits: Tensor, l2_wrap: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss, lse = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    return loss, lse, logits.new_empty(logits.shape[0] if l2_wrap else 0, dtype=torch.int32)


# ---- DTensors ----------------------------------------------------------------------------------------------------


def _loss_of_logits(logits: Any, targets: Any, options: Mapping[str, Any]) -> Tensor:
    """Return the loss of DTensors: each rank's rows, of which a reduction is whole on every rank."""
    checks.check_name("reduction", options["reduction"], _REDUCTIONS)
    roles = {"batch": 0} if logits.dim() > 1 else {}

    def of_rank(logits: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (cross_entropy(logits, targets, **{**options, "reduction": "none"}),)

    (rows,) = sharding.run(of_rank, {"logits": (logits, roles), "targets": (targets, roles)}, "logits", (roles,))
    if options["reduction"] == "none":
        return rows  # type: ignore[no-any-return]
    return reduced(rows.sum().full_tensor(), targets, options)


def reduced(total: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return a sum of losses, or the mean of rows that count: NaN where there are none, with a gradient of zeros."""
    if options["reduction"] == "sum":
        return total
    count: Any = (targets != options["ignore_index"]).sum()
    count = getattr(count, "full_tensor", lambda: count)()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def _loss_of_rows(
    hidden: Any, weight: Any, bias: Any, targets: Any,
    options: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Return the loss where the matrix is a DTensor: each rank takes a part of the rows, and gathers the matrix."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    checks.check_name("reduction", options["reduction"], _REDUCTIONS[:2])
    if not isinstance(weight, DTensor):
        raise TypeError(f"weight: expected a DTensor like another argument, got {type(weight).__name__}")
    mesh, whole = weight.device_mesh, [Replicate()] * weight.device_mesh.ndim
    given = {"hidden": hidden, "targets": targets, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, x in given.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor like weight, got {type(x).__name__}. Where FSDP has cut weight, call the "
                "module that has it and take cross_entropy; rows that are the same on every rank are "
                "DTensor.from_local(x, mesh, [Replicate()])"
            )
        like = {"targets": hidden, "bias": weight}.get(name)
        is_known = all(placement in (Replicate(), Shard(0)) for placement in x.placements)
        if x.device_mesh != mesh or not is_known or (like is not None and x.placements != like.placements):
            legal = "by Replicate() or Shard(0)" if like is None else f"by {list(like.placements)}"
            raise ValueError(
                f"{name}: expected a DTensor placed {legal} of {mesh}, got {list(x.placements)} of {x.device_mesh}"
            )
    pairs = [*zip(hidden.placements, weight.placements, strict=True)]
    if any(x.is_shard() and y.is_shard() for x, y in pairs):
        raise ValueError(
            f"weight: expected Replicate() where hidden is cut, by {list(hidden.placements)}, "
            f"got {list(weight.placements)}"
        )
    cuts = [y if y.is_shard() else x for x, y in pairs]  # of the rows that a rank takes
    summed = [Partial() if cut.is_shard() else cut for cut in cuts]
    local = {"hidden": hidden.flatten(0, -2), "targets": targets.flatten()}
    local = {name: x.redistribute(placements=cuts).to_local() for name, x in local.items()}
    for name in [name for name in given if name not in local]:  # in one order on all ranks, as they wait for each other
        local[name] = given[name].redistribute(placements=whole).to_local(grad_placements=summed)
    total = linear_cross_entropy(**local, **{**options, "reduction": "sum"})
    return reduced(DTensor.from_local(total, mesh, summed, run_check=False).full_tensor(), targets, options)


# ---- the torch ops of cross_entropy ------------------------------------------------------------------------------


def _forward(
    logits: Tensor, targets: Tensor, ignore_index: int, l2_wrap: float, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_classes(targets, logits.shape[1], ignore_index)
    torch_op.say_reference("cross_entropy", logits)
    with tensors.exactly(logits), torch.no_grad():
        return _losses(logits, targets, ignore_index, l2_wrap)


def _forward_fake(
    logits: Tensor, targets: Tensor, ignore_index: int, l2_wrap: float, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_losses(logits, l2_wrap)


def _by_hand(arrays: Values, options: Values, _: Named, names: Sequence[str]) -> dict[str, Tensor]:
    (logits, targets, lse, argmax, grad), (ignore_index, l2_wrap) = arrays, options
    with tensors.exactly(logits), torch.no_grad():
        return {"logits": _gradient(grad, logits, targets, lse, argmax, ignore_index, l2_wrap)}


# ---- the torch ops of linear_cross_entropy -----------------------------------------------------------------------


def _linear_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, l2_wrap: float,
    chunk_rows: int, want_hidden: bool, want_weight: bool, want_bias: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of all losses, and its gradients, those of weight and bias in float32 at least."""
    (rows, _), (classes, _) = hidden.shape, weight.shape
    _check_classes(targets, classes, ignore_index)
    torch_op.say_reference("linear_cross_entropy", hidden)
    wide, device = torch.promote_types(hidden.dtype, torch.float32), hidden.device
    if not chunk_rows:
        fitting = _CHUNK_BYTES // (classes * hidden.element_size())
        chunk_rows = max(_LEAST_ROWS, fitting // _LEAST_ROWS * _LEAST_ROWS)
    chunk_rows = min(chunk_rows, rows)
    with tensors.exactly(hidden), torch.no_grad():
        losses = torch.empty(rows, dtype=wide, device=device)
        of_hidden, of_weight, of_bias = _memory_of_gradients(hidden, weight, want_hidden, want_weight, want_bias)
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
            if not (want_hidden or want_weight or want_bias):
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


def _memory_of_gradients(
    hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide, device = torch.promote_types(hidden.dtype, torch.float32), hidden.device
    return (
        torch.empty(hidden.shape if want_hidden else (0,), dtype=hidden.dtype, device=device),
        torch.empty(weight.shape if want_weight else (0,), dtype=wide, device=device),
        torch.empty(weight.shape[:1] if want_bias else (0,), dtype=wide, device=device),
    )


def _linear_forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, l2_wrap: float,
    chunk_rows: int, want_hidden: bool, want_weight: bool, want_bias: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return total, *_memory_of_gradients(hidden, weight, want_hidden, want_weight, want_bias)


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


def _linear_backward(
    of_hidden: Tensor, of_weight: Tensor, of_bias: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the sum times that of the sum, all in the dtype of hidden."""
    made = [_times(x, grad, of_hidden.dtype) for x in (of_hidden, of_weight, of_bias)]
    return made[0], made[1], made[2]


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


def _linear_backward_fake(
    of_hidden: Tensor, of_weight: Tensor, of_bias: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = of_hidden.dtype
    return torch.empty_like(of_hidden), torch.empty_like(of_weight, dtype=dtype), torch.empty_like(of_bias, dtype=dtype)


def _refuse_forward_mode(name: str) -> Any:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError(_no_forward_mode(name))

    return refuse


_INSTEAD = "torch.nn.functional.cross_entropy"
differentiable.define(
    Differentiable(
        "cross_entropy", recording.Leaves(("logits",)), 2, 1, _forward, _forward_fake,
        _refuse_forward_mode("cross_entropy"), lambda *_: None, _by_hand, instead=_INSTEAD,
    )
)  # fmt: skip
_op = registry.find("linear_cross_entropy_fwd")
_record = recording.forward(_op, _keep_gradients, _linear_in_context, _refuse_forward_mode("linear_cross_entropy"))
registry.implement("linear_cross_entropy_fwd", _linear_forward, _linear_forward_fake, _record)
_record, _run_linear_backward = recording.backward(
    registry.find("linear_cross_entropy_bwd"), "linear_cross_entropy", _INSTEAD
)
registry.implement("linear_cross_entropy_bwd", _linear_backward, _linear_backward_fake, _record)
