"""The norm of heads behind a gate, with which time mixing ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_table import OPS
from rwkv_jit.schedules.legal import Gate, Norm

_OP = OPS["gated_norm"]


def gated_norm(
    y: Array, g: Array, weight: Array, bias: Array | None = None, r: Array | None = None, k: Array | None = None,
    v: Array | None = None, r_k: Array | None = None, *, bonus: Array | None = None, gate: Gate = "identity",
    norm: Norm = "layer", eps: float = 64e-5, out: Array | None = None, **_unknown: NoReturn,
) -> Tensor:  # fmt: skip
    r"""Norm the heads of y, add the bonus and gate all of it: what the output matrix of time mixing reads.

        out = ((y - mean) / sqrt(variance + eps) weight + bias + (sum_j r_j k_j r_k_j) v) f(g)

    per token and head, with the mean and the variance over a head. H is the heads, N the head size. RWKV-5 and 6 have
    no bonus, `gate="silu"`, and for a head size divisor of 8 the same eps; gated linear attention has `norm="rms"` too.

    Parameters
    ----------
    y : torch.Tensor, shape (..., H, N), float16, bfloat16 or float32
        What the recurrence returns, of any number of tokens.
    g : torch.Tensor, shape of y or (..., H * N), dtype of y
        Gate.
    weight, bias : torch.Tensor, shape (H * N,) or (H, N), dtype of y or float32, bias optional
        Of the norm.
    r, k, v : torch.Tensor, shape of y or (..., H * N), dtype of y, optional
        Receptance, key and value as the recurrence had them: for the bonus, all or none.
    r_k : torch.Tensor, shape (H, N) or (H * N,), dtype of y or float32, optional
        How much of each channel is in the bonus; goes with r, k and v.
    bonus : torch.Tensor, shape of y or (..., H * N), dtype of y, optional
        The bonus as `prepare_keys` makes it, instead of r, k, v and r_k.
    gate : {"identity", "sigmoid", "silu"}, default "identity"
        f: g itself, 1 / (1 + e^-g), or g / (1 + e^-g).
    norm : {"layer", "rms"}, default "layer"
        "rms" takes 0 for the mean.
    eps : float, default 0.00064
        Of the norm.
    out : torch.Tensor, shape (..., H * N), dtype of y, optional
        Where the result is written, without gaps. What is written there has no gradient.

    Returns
    -------
    out : torch.Tensor, shape (..., H * N), dtype of y

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`; a RuntimeError if an input needs a gradient and there is an `out`.

    Notes
    -----
    Precision and first calls are those of `shift_mix`, gradients, the memory of the backward and DTensors those of
    `prepare_keys`; its sums are those of weight, bias and r_k.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456. Wu and He, Group
    Normalization, arXiv:1803.08494. Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Examples
    --------
    >>> y, r, k, v, g = torch.randn(5, 3, 4, 64, device="cuda")
    >>> r_k, weight, bias = torch.randn(3, 256, device="cuda")
    >>> rwkv_jit.gated_norm(y, g, weight, bias, r, k, v, r_k).shape
    torch.Size([3, 256])
    """
    if _unknown:
        raise unexpected("gated_norm", next(iter(_unknown)))
    inputs = y, g, weight, bias, r, k, v, r_k, bonus
    written = () if out is None else (out, None, None)
    made = calls.call(KIND, inputs, written, (eps, gate, norm))
    return made[0] if out is None else out  # type: ignore[return-value]


def _check(inputs: Sequence[Any], written: Sequence[Any], eps: float, gate: Any, norm: Any, *asked: str) -> calls.Call:
    given = common.as_tensors("gated_norm", inputs)
    named = dict(zip(OPS["gated_norm"].inputs, given, strict=True))
    y = common.check_heads("gated_norm", named, ("y", "g", "weight"))
    absent = [name for name in ("r", "k", "v", "r_k") if named[name] is None]
    if 0 < len(absent) < 4:
        raise ValueError(f"{absent[0]}: the bonus needs r, k, v and r_k, got None")
    if not absent and named["bonus"] is not None:
        raise ValueError("bonus: expected None together with r, k, v and r_k")
    checks.check_number("eps", eps)
    checks.check_name("gate", gate, layers.GATES)
    checks.check_name("norm", norm, layers.NORMS)
    shape = (*y.shape[:-2], y.shape[-2] * y.shape[-1])
    out = None if written[0] is None else arguments.out(written[0], shape, y)
    shapes = {"out": shape, **dict.fromkeys(("means", "factors"), tuple(y.shape[:-1]))}
    made = {} if out is not None else {x: shapes[x] for x in asked or ("out",)}
    dtypes = dict.fromkeys(("means", "factors"), torch.promote_types(y.dtype, torch.float32))
    kinds = (gate, norm, *asked)
    return calls.Call(KIND, given, [out, None, None], made, y, eps=float(eps), kinds=kinds, dtypes=dtypes)


KIND = calls.define(calls.Kind(
    _OP, ("out", "means", "factors"), _check, given=common.given_of_heads,
    forward=layers.gated_norm, plain=plain.gated_norm, backward=layer_gradients.gated_norm,
    options=lambda eps, kinds: (eps, *kinds), choices=("gate", "norm"), names_results=True,
    roles=lambda named, options: (common.roles_of_heads(named, _OP.inputs), 1), has_flat_heads=True,
))  # fmt: skip
