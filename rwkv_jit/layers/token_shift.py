"""The mixes of every token with the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_table import OPS, RESULTS

_ROLES = {"x": "BTC", "mixes": "MC", "amounts": "MBTC", "first": "BC", "cu_seqlens": ""}


def token_shift(
    x: Array, mixes: Array, amounts: Array | None = None, first: Array | None = None, cu_seqlens: Array | None = None,
    **_unknown: NoReturn,
) -> tuple[Tensor, ...]:  # fmt: skip
    r"""Mix every token with the previous one: how time and channel mixing begin.

        mixed_m[t] = x_t + (x_{t-1} - x_t) (mixes_m + amounts_m[t])

    The token before a sequence is `first`, or zeros. B is the batch, T the tokens, C the channels, M the
    mixes. RWKV-6 has amounts by the token; RWKV-4 and 5 keep 1 - mixes, the share of the token itself.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, C), float16, bfloat16 or float32
        The input, such as a normalized residual.
    mixes : torch.Tensor, shape (M, C) with M up to 6, dtype of x or float32
        The share of the previous token in each mix.
    amounts : torch.Tensor, shape (M, B, T, C), dtype of x, optional
        Added to that, token by token.
    first : torch.Tensor, shape (B, C), or (N, C) for packed sequences, dtype of x, optional
        The token before each sequence: the last one of an earlier part.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Bounds of N packed sequences: where each begins, and where the last one ends. B is then 1.

    Returns
    -------
    mixed : tuple of M torch.Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Precision and first calls are those of `shift_mix`; nothing is rounded but the results. Gradients and the memory of
    the backward are those of `prepare_keys`: `first` has one too, of what is carried into a sequence. DTensors may be
    replicated or sharded over the channels, and over the batch where no sequences are packed.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> x, mixes = torch.randn(2, 5, 256, device="cuda"), torch.rand(6, 256, device="cuda")
    >>> r, w, k, v, a, g = rwkv_jit.token_shift(x, mixes)
    >>> r.shape
    torch.Size([2, 5, 256])
    """
    if _unknown:
        raise unexpected("token_shift", next(iter(_unknown)))
    return tuple(calls.call(KIND, (x, mixes, amounts, first, cu_seqlens), (), ()))


def _check(inputs: Sequence[Any], written: Sequence[Any]) -> calls.Call:
    *arrays, cu_seqlens = inputs
    x, mixes, amounts, first = given = common.as_tensors("token_shift", arrays)
    cu_seqlens, texts = common.check_shifted("token_shift", x, mixes, cu_seqlens)
    if amounts is not None:
        common.check("token_shift", "amounts", amounts, [(mixes.shape[0], *x.shape)], x)
    if first is not None:
        common.check("token_shift", "first", first, [(texts, x.shape[-1])], x)
    made = {f"mixed{m}": tuple(x.shape) for m in range(mixes.shape[0])}
    return calls.Call(KIND, [*given, cu_seqlens], written, made, x)


KIND = calls.define(calls.Kind(
    OPS["token_shift"], tuple(RESULTS["token_shift"]), _check, given=common.given_of_mixes,
    forward=layers.token_shift, plain=plain.token_shift, backward=layer_gradients.token_shift,
    beside=("cu_seqlens",), texts=common.sequences_of, stand_ins=common.PACKED_AND_NOT,
    options=lambda eps, kinds: (),
    roles=lambda named, options: (common.roles_of_sequences(named, _ROLES), common.count_of_mixes(named)),
))  # fmt: skip
