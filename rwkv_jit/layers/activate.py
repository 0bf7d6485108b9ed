"""A function of every element: what a layer has between its matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_table import OPS
from rwkv_jit.schedules.legal import Kind


def activate(x: Array, kinds: Kind | Sequence[Kind], *, out: Array | None = None, **_unknown: NoReturn) -> Tensor:
    r"""Apply a function to every element, or one to each part: what a layer has between its matrices.

    The functions are tanh(x), sigmoid(x) = 1 / (1 + e^-x), relu_squared(x) = max(x, 0)^2 and identity(x) = x.

    Parameters
    ----------
    x : torch.Tensor, any shape, float16, bfloat16 or float32
        The product of the first matrix. Low-rank results of several gates, [gates, ..., R], take one launch together.
    kinds : str or sequence of str
        "tanh", "sigmoid", "relu_squared" or "identity"; or one of these for each of up to 31 x[i].
    out : torch.Tensor, shape and dtype of x, optional
        Where the result is written, without gaps. It may be x, whose parts of kind "identity" are not touched then.
        What is written there has no gradient.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
        `out`, if passed.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`; a RuntimeError if x needs a gradient and there is an `out`.

    Notes
    -----
    Precision and first calls are those of `shift_mix`. The backward keeps x. A second derivative is an error. DTensors
    may be replicated or sharded over any dimension but that of the parts; they go without `out`.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> low_rank = torch.randn(3, 5, 64, device="cuda")  # of w, a and g
    >>> y = rwkv_jit.activate(low_rank, ("tanh", "identity", "sigmoid"), out=low_rank)
    >>> y is low_rank
    True
    """
    if _unknown:
        raise unexpected("activate", next(iter(_unknown)))
    in_place = out is x
    given = tuple(kinds) if isinstance(kinds, Sequence) and not isinstance(kinds, (str, bytes, memoryview)) else kinds
    made = calls.call(KIND, (x,), () if in_place or out is None else (out,), (given, in_place))
    return made[0] if out is None else out  # type: ignore[return-value]


def _check(inputs: Sequence[Any], written: Sequence[Any], kinds: Any, in_place: bool) -> calls.Call:
    x = tensors.from_any("x", inputs[0], in_place)
    common.check_lead("x", x)
    if isinstance(kinds, str):
        each: tuple[str, ...] = (kinds,)
    elif not isinstance(kinds, tuple):
        raise TypeError(f"kinds: expected a str or a sequence of them, got {type(kinds).__name__}")
    else:
        each = kinds
        if not x.dim() or not 1 <= len(kinds) <= layers.MOST_PARTS or len(kinds) != x.shape[0]:
            parts = x.shape[0] if x.dim() else 0
            raise ValueError(
                f"kinds: expected one for each of the {parts} parts of x, up to {layers.MOST_PARTS}, got {len(kinds)}"
            )
    for kind in each:
        checks.check_name("kinds", kind, layers.KINDS)
    if in_place and not x.is_contiguous():
        raise ValueError(f"out: expected memory without gaps, got strides {x.stride()}")
    out = None if written[0] is None else arguments.out(written[0], tuple(x.shape), x)
    made = {} if in_place or out is not None else {"y": tuple(x.shape)}
    return calls.Call(KIND, [x], [out], made, x, kinds=each, in_place=in_place)


def _roles(named: Mapping[str, Any], options: Sequence[Any]) -> tuple[common.Roles, int]:
    """Return what ranks may share: all but parts with different functions."""
    first = int(not isinstance(options[0], str))
    return {"x": {f"dimension {dim}": dim for dim in range(first, named["x"].dim())}}, 1


KIND = calls.define(calls.Kind(
    OPS["activate"], ("y",), _check, roles=_roles,
    given=lambda call: common.given_of(call, len(call.kinds), (call.inputs[0].numel() // len(call.kinds),)),
    forward=layers.activate, plain=plain.activate, backward=layer_gradients.activate,
    options=lambda eps, kinds: (kinds[0] if len(kinds) == 1 else tuple(kinds), False),
))  # fmt: skip
