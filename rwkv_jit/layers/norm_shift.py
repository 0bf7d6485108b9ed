"""The norm with which a layer begins, and the mixes of every token with the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_table import MOST_MIXES, OPS

# Of the channels the norm takes all.
_ROLES = {"x": "BT", "add": "BT", "weight": "", "bias": "", "mixes": "", "first": "B", "cu_seqlens": ""}


def norm_shift(
    x: Array, weight: Array, bias: Array, mixes: Array, *, add: Array | None = None, first: Array | None = None,
    cu_seqlens: Array | None = None, eps: float = 1e-5, dtype: torch.dtype | None = None, **_unknown: NoReturn,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:  # fmt: skip
    r"""Add to the residual, normalize it, and mix every token with the previous one: `shift_mix` of whole sequences.

        z_t = x_t + add_t;   n_t = (z_t - mean) / sqrt(variance + eps) weight + bias
        mixed_m[t] = n_t + (n_{t-1} - n_t) mixes_m

    with the mean and the variance over the channels. The n before a sequence is `first`, or zeros. B is the batch, T
    the tokens, C the channels, M the mixes, N the sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, C), float16, bfloat16 or float32
        The residual.
    weight, bias : torch.Tensor, shape (C,), dtype of x or float32
        Of the layer norm.
    mixes : torch.Tensor, shape (M, C) with M up to 6, dtype of x or float32
        The share of the previous token in each mix.
    add : torch.Tensor, shape of x, dtype of the mixed tokens, optional
        Added to the residual first, such as the previous branch.
    first : torch.Tensor, shape (N, C), dtype of the mixed tokens, optional
        n of the token before the first of each sequence: what a call for the part before returned as `last`.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        As `token_shift` takes it.
    eps : float, default 1e-05
        Of the layer norm.
    dtype : torch.dtype, optional
        That of the mixed tokens, of `add`, `first` and `last`: of 16 bits beside a residual of float32, as autocast has
        it. By default it is that of x.

    Returns
    -------
    residual : torch.Tensor, shape and dtype of x
        z, which is x itself without `add` and without gradients. Pass on this one and not x: so its gradient is added
        in the same kernel.
    mixed : tuple of M torch.Tensor, shape of x
    last : torch.Tensor, shape (N, C)
        n of the last token of each sequence; of one without tokens, what came before it.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Precision and first calls are those of `shift_mix`. z is normed as it is rounded, and n of the token before is
    rounded as `last` is, so that a sequence may be cut into calls anywhere.

    All inputs have gradients, and so has `first`. The backward keeps z and two numbers of float32 for each token, and
    makes n again. Up to 4096 channels its sums over tokens fit the registers. A second derivative is an error.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456. Ba et al., Layer
    Normalization, arXiv:1607.06450.

    Examples
    --------
    >>> x, y = torch.randn(2, 3, 5, 256, device="cuda")
    >>> weight, bias, mixes = torch.randn(8, 256, device="cuda").split([1, 1, 6])
    >>> residual, mixed, last = rwkv_jit.norm_shift(x, weight[0], bias[0], mixes, add=y)
    >>> residual.shape, len(mixed), last.shape
    (torch.Size([3, 5, 256]), 6, torch.Size([3, 256]))
    """
    if _unknown:
        raise unexpected("norm_shift", next(iter(_unknown)))
    inputs = x, add, weight, bias, mixes, first, cu_seqlens
    *mixed, last = calls.call(KIND, inputs, (), (eps, dtype))
    if len(mixed) > mixes.shape[0]:  # type: ignore[union-attr]
        return mixed[0], tuple(mixed[1:]), last
    residual = x if isinstance(x, Tensor) else tensors.from_any("x", x)
    return residual.detach() if residual.requires_grad else residual, tuple(mixed), last


def _check(inputs: Sequence[Any], written: Sequence[Any], eps: float, dtype: Any) -> calls.Call:
    *arrays, cu_seqlens = inputs
    x, add, weight, bias, mixes, first = given = common.as_tensors("norm_shift", arrays)
    cu_seqlens, texts = common.check_shifted("norm_shift", x, mixes, cu_seqlens)
    checks.check_number("eps", eps)
    channels, dtype = x.shape[-1], x.dtype if dtype is None else dtype
    if dtype not in (legal := [x.dtype, *tensors.STORAGE]):
        raise TypeError(f"dtype: expected {' or '.join(map(str, dict.fromkeys(legal)))}, got {dtype}")
    for name, own in (("weight", weight), ("bias", bias)):
        common.check("norm_shift", name, own, [(channels,)], x)
    for name, own, shape in (("add", add, tuple(x.shape)), ("first", first, (texts, channels))):
        if own is not None:
            arguments.check_shape(name, own, shape)
            arguments.check_dtype(name, own, (dtype,), x)
    mixed = {f"mixed{m}": tuple(x.shape) for m in range(mixes.shape[0])}
    made = {"residual": tuple(x.shape), **mixed, "last": (texts, channels), "stats": (*x.shape[:2], 2)}
    dtypes = {**dict.fromkeys((*mixed, "last"), dtype), "stats": torch.promote_types(x.dtype, torch.float32)}
    kinds = (str(dtype).removeprefix("torch."),)
    return calls.Call(KIND, [*given, cu_seqlens], written, made, x, eps=float(eps), kinds=kinds, dtypes=dtypes)


KIND = calls.define(calls.Kind(
    OPS["norm_shift"], ("residual", *(f"mixed{m}" for m in range(MOST_MIXES)), "last", "stats"), _check,
    given=common.given_of_mixes, options=lambda eps, kinds: (eps, getattr(torch, kinds[0], None) if kinds else None),
    roles=lambda named, options: (common.roles_of_sequences(named, _ROLES), 2 + common.count_of_mixes(named)),
    forward=layers.norm_shift, plain=plain.norm_shift, backward=layer_gradients.norm_shift,
    beside=("cu_seqlens",), texts=common.sequences_of, stand_ins=common.PACKED_AND_NOT,
    spared=lambda named: ("residual", "stats") if named["add"] is None else ("stats",),
    replaced={"x": "residual"}, shared={"add": "x"},
))  # fmt: skip
