"""A product behind a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_table import OPS
from rwkv_jit.schedules.legal import Gate


def gated(x: Array, g: Array, gate: Gate = "sigmoid", **_unknown: NoReturn) -> Tensor:
    r"""Gate something, y = x f(g): channel mixing of RWKV-4, 5 and 6 by receptance, and time mixing of RWKV-4.

    Parameters
    ----------
    x, g : torch.Tensor, any shape, both the same, float16, bfloat16 or float32
        What is gated, and the gate.
    gate : {"identity", "sigmoid", "silu"}, default "sigmoid"
        f: g itself, 1 / (1 + e^-g), or g / (1 + e^-g).

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Precision and first calls are those of `shift_mix`. The backward keeps x and g. A second derivative is an error.
    DTensors may be replicated or sharded over any dimension.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> x, receptance = torch.randn(2, 5, 256, device="cuda")
    >>> y = rwkv_jit.gated(x, receptance)
    >>> y.shape
    torch.Size([5, 256])
    """
    if _unknown:
        raise unexpected("gated", next(iter(_unknown)))
    return calls.call(KIND, (x, g), (), (gate,))[0]


def _check(inputs: Sequence[Any], written: Sequence[Any], gate: Any) -> calls.Call:
    x, g = common.as_tensors("gated", inputs)
    common.check_lead("x", tensors.from_any("x", x))
    common.check("gated", "g", g, [tuple(x.shape)], x)
    checks.check_name("gate", gate, layers.GATES)
    return calls.Call(KIND, [x, g], [None], {"y": tuple(x.shape)}, x, kinds=(gate,))


KIND = calls.define(calls.Kind(
    OPS["gated"], ("y",), _check, given=lambda call: common.given_of(call, 1, (call.lead.numel(),)),
    forward=layers.gated, plain=plain.gated, backward=layer_gradients.gated, choices=("gate",),
    roles=lambda named, options: (dict.fromkeys(named, {f"dimension {i}": i for i in range(named["x"].dim())}), 1),
))  # fmt: skip
