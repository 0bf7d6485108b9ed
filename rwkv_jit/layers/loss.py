"""The loss of training: cross entropy of logits, or of hidden states whose logits are never all there at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rwkv_jit.call import checks, registry, sharding, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import brief, unexpected
from rwkv_jit.layers import common
from rwkv_jit.layers.loss_ops import refuse_forward_mode
from rwkv_jit.pool import arguments
from rwkv_jit.schedules.legal import Reduction, Total
from rwkv_jit.schedules.loss import MOST_COLUMNS

_IGNORED = -100
_REDUCTIONS: tuple[str, ...] = get_args(Reduction)


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
    common.check_lead("logits", logits)
    _check_targets(targets, logits)
    _check_options(l2_wrap, ignore_index)
    checks.check_name("reduction", reduction, _REDUCTIONS)
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    flat = targets.reshape(-1).contiguous()
    loss, *_ = registry.find("cross_entropy_fwd")(rows, flat, ignore_index, float(l2_wrap), False)
    if reduction == "none":
        return loss.view(targets.shape)  # type: ignore[no-any-return]
    total: Tensor = loss.sum()
    # A row that does not count has no gradient even where that of the sum is infinite.
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


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
    common.check_lead("hidden", hidden)
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
            refuse_forward_mode(name)


def _check_targets(targets: Tensor, rows: Tensor) -> None:
    arguments.check_shape("targets", targets, tuple(rows.shape[:-1]))
    arguments.check_dtype("targets", targets, arguments.INDEX_TYPES, rows)


def _check_options(l2_wrap: Any, ignore_index: Any) -> None:
    checks.check_number("l2_wrap", l2_wrap)
    if l2_wrap < 0:
        raise ValueError(f"l2_wrap: expected at least 0, got {l2_wrap}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool) or not -(2**31) <= ignore_index < 2**31:
        raise TypeError(f"ignore_index: expected an int of 32 bits, got {brief(ignore_index)}")


# ---- DTensors ----------------------------------------------------------------------------------------------------


def _loss_of_logits(logits: Any, targets: Any, options: Mapping[str, Any]) -> Tensor:
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


def _loss_of_rows(hidden: Any, weight: Any, bias: Any, targets: Any, options: Mapping[str, Any]) -> Tensor:
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
