"""The keys of RWKV-7's time mixing."""

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
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_table import OPS, RESULTS
from rwkv_jit.schedules.legal import RateMap

_OP = OPS["prepare_keys"]
_WRITTEN = (*RESULTS["prepare_keys"], "new_rate", "factors")


def prepare_keys(
    k: Array, v: Array, rate: Array, k_k: Array, k_a: Array, *, a0: Array | None = None, v_first: Array | None = None,
    v_gate: Array | None = None, v0: Array | None = None, r: Array | None = None, r_k: Array | None = None,
    rate_map: RateMap = "sigmoid", **_unknown: NoReturn,
) -> tuple[Tensor, ...]:  # fmt: skip
    r"""Make k, v, a and b of `wkv7` and `wkv7_update` from an RWKV-7 layer's keys, values and gates; and the bonus.

        kk = k k_k / |k k_k|;   rate <- f(rate + a0);   a = -kk;   b = kk rate
        k <- k (1 + (rate - 1) k_a);   v <- v + (v_first - v) sigmoid(v_gate + v0)
        bonus = (sum_j r_j k_j r_k_j) v

    per token and head, with the norm over a head. H is the heads, N the head size.

    Parameters
    ----------
    k, v : torch.Tensor, shape (..., H, N), or (..., H * N) of v, float16, bfloat16 or float32
        Key and value, of any number of tokens.
    rate : torch.Tensor, shape of k or (..., H * N), dtype of k or float32
        What the low-rank matrices make of the in-context learning rate, before a0 and the sigmoid; or with
        `rate_map="identity"` the rate itself.
    k_k, k_a : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32
        Factor of the removal key, and how much the rate is in the key.
    a0, v0 : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        Are added to `rate` and to `v_gate`.
    v_first : torch.Tensor, shape of k or (..., H * N), dtype of k, optional
        The first layer's value. Without it, as in that layer, v is returned as it is.
    v_gate : torch.Tensor, shape of k or (..., H * N), dtype of k or float32, optional
        What the low-rank matrices make of the value's gate; goes with `v_first`.
    r : torch.Tensor, shape of k or (..., H * N), dtype of k, optional
        Receptance: for the bonus, which `gated_norm` takes. With gradients this is faster than to pass it
        r, k, v and r_k: those of k and v come from one kernel, and need not be added up.
    r_k : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        How much of each channel is in the bonus; goes with `r`.
    rate_map : {"sigmoid", "identity"}, default "sigmoid"
        f: 1 / (1 + e^-x), or x itself, for rates that have been through a sigmoid, or may be anything.

    Returns
    -------
    k, v, a, b, bonus : torch.Tensor, shape and dtype of k
        v itself where there is no `v_first`. The bonus is that of the new k and v, if r is passed.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Where k k_k is zero, so are a and b. w of the layer goes to `wkv7_update` as it is, with `w0` and `decay="sigmoid"`.
    Precision and first calls are those of `shift_mix`.

    All inputs have gradients. The backward keeps the inputs and nothing else, and makes norms and gates again; while it
    runs it has sums of k_k, k_a, a0, v0 and r_k for some hundred groups of rows in float32. Gradients of these are
    added up in float32. A second derivative is an error. DTensors may be replicated or sharded over the batch or the
    heads.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> k, v, rate = torch.randn(3, 5, 4, 64, device="cuda")
    >>> k_k, k_a = torch.rand(2, 256, device="cuda")
    >>> k, v, a, b = rwkv_jit.prepare_keys(k, v, rate, k_k, k_a)
    >>> a.shape
    torch.Size([5, 4, 64])
    """
    if _unknown:
        raise unexpected("prepare_keys", next(iter(_unknown)))
    inputs = k, v, rate, v_first, v_gate, k_k, k_a, a0, v0, r, r_k
    made = calls.call(KIND, inputs, (), (rate_map,))
    return tuple(made) if v_first is not None else (made[0], v, *made[1:])  # type: ignore[arg-type]


def _check(inputs: Sequence[Any], written: Sequence[Any], rate_map: Any, *asked: str) -> calls.Call:
    given = common.as_tensors("prepare_keys", inputs)
    named = dict(zip(OPS["prepare_keys"].inputs, given, strict=True))
    k = common.check_heads("prepare_keys", named, ("v", "rate", "k_k", "k_a"))
    for pair in (("v_first", "v_gate"), ("r", "r_k")):
        missing, other = pair if named[pair[0]] is None else pair[::-1]
        if named[missing] is None and named[other] is not None:
            raise ValueError(f"{missing}: expected a tensor beside {other}, got None")
    if named["v0"] is not None and named["v_first"] is None:
        raise ValueError("v0: needs v_first and v_gate too")
    checks.check_name("rate_map", rate_map, layers.RATE_MAPS)
    absent = {"new_v": named["v_first"] is None, "bonus": named["r"] is None, "new_rate": True, "factors": True}
    shapes = {**dict.fromkeys(_WRITTEN, tuple(k.shape)), "factors": tuple(k.shape[:-1])}
    made = {x: shapes[x] for x in asked or shapes if asked or not absent.get(x)}
    dtypes = {"factors": torch.promote_types(k.dtype, torch.float32)}
    return calls.Call(KIND, given, written, made, k, kinds=(rate_map, *asked), dtypes=dtypes)


KIND = calls.define(calls.Kind(
    _OP, _WRITTEN, _check, given=common.given_of_heads,
    forward=layers.prepare_keys, plain=plain.prepare_keys, backward=layer_gradients.prepare_keys,
    choices=("rate_map",), names_results=True,
    roles=lambda named, options: (
        common.roles_of_heads(named, _OP.inputs), 3 + sum(named[x] is not None for x in ("v_first", "r"))
    ),
    unused=lambda named: ("v",) if named["v_first"] is None and named["r"] is None else (),
))  # fmt: skip
