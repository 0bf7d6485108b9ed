"""The small work of a layer beside its matrix products and its recurrence: a launch each, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls
from rwkv_jit.layers.gradients import record
from rwkv_jit.schedules.legal import Gate, Kind, Norm, RateMap

_EPS, _EPS_OF_HEADS = 1e-5, 64e-5


def shift_mix(
    x: Array,
    weight: Array,
    bias: Array,
    mixes: Array,
    shift: Array,
    *,
    add: Array | None = None,
    state_indices: Array | None = None,
    cu_seqlens: Array | None = None,
    has_initial_state: Array | None = None,
    null_index: int = -1,
    num_active: Array | None = None,
    eps: float = _EPS,
    out: Array | None = None,
    **_unknown: NoReturn,
) -> tuple[Tensor, Tensor]:
    r"""Add to the residual, normalize it, and mix every token with the previous one: how time and channel mixing begin.

        z_t = x_t + add_t;   n_t = (z_t - mean) / sqrt(variance + eps) weight + bias
        mixed_m = n_t + (n_{t-1} - n_t) mixes_m

    with the mean and the variance over the channels. The n before a sequence is read from a pool, and replaced by that
    of its last token. C is the channels, B the rows, T the tokens, M the mixes.

    Parameters
    ----------
    x : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        The residual.
    weight, bias : torch.Tensor, shape (C,), dtype of x or float32
        Of the layer norm.
    mixes : torch.Tensor, shape (M, C) with M up to 6, or (C,), dtype of x or float32
        The share of the previous token in each mix: x_r, x_w, x_k, x_v, x_a and x_g of time mixing in any order, or x_k
        of channel mixing.
    shift : torch.Tensor, shape (slots, C), float16, bfloat16 or float32
        The pool of the last tokens, which changes in place. A slot has no gaps; between slots there may be some.
    add : torch.Tensor, shape and dtype of x, optional
        Added to the residual first, such as the previous branch.
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Bounds of N sequences in x, which is then [T, C] or [1, T, C]; `state_indices` has N. Tokens after the last
        sequence count as sequences without a slot.
    has_initial_state : torch.Tensor, shape (B,) or (N,), bool or uint8, optional
        If false, the row or sequence begins as with zeros in the pool, whatever its slot holds; its last token is still
        written there. Without it all begin with their slots.
    null_index : int, default -1
        Slots at or below it are padding. Such a row begins as with zeros in the pool, and no slot is read or written.
        The same holds for a slot beyond the pool.
    num_active : torch.Tensor of one int32, optional
        How many rows or sequences are computed: of later ones no slot is read or written, so that a CUDA graph serves
        any number. With it, tokens of later ones get zeros for all results.
    eps : float, default 1e-05
        Of the layer norm.
    out : torch.Tensor, shape and dtype of the mixed tokens, optional
        Memory for these, without gaps; that of x or add costs a copy.

    Returns
    -------
    residual : torch.Tensor, shape and dtype of x
        z; x itself without `add`.
    mixed : torch.Tensor, shape (M, *x.shape), or that of x for mixes of shape (C,), dtype of x
        `out`, if passed.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The pool is as it was.
    RuntimeError
        An input wants a gradient: it is for inference. `token_shift` has one.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are, and z is rounded only where it is written. Relative L2 error against
    float64 on the same inputs: below 5e-6, and that of rounding to 16 bits. n of the token before is rounded as the
    pool has it within a call too, so that a sequence may be cut into calls anywhere. A row's result does not depend on
    the others.

    The first call with new C, M, dtypes and addresses compiles for this GPU and stores the result on disk; in a CUDA
    graph it must have come before. On a GPU nobody looks at the values of slots and of `cu_seqlens` unless
    RWKVJIT_CHECK=1; kernels touch no other memory whatever they are. CPU tensors run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool, x = torch.zeros(16, 256, device="cuda"), torch.randn(3, 256, device="cuda")
    >>> weight, bias, mixes = torch.ones(256), torch.zeros(256), torch.rand(6, 256)
    >>> weight, bias, mixes = (p.to(x.device) for p in (weight, bias, mixes))
    >>> residual, mixed = rwkv_jit.shift_mix(x, weight, bias, mixes, pool, add=x)
    >>> residual.shape, mixed.shape
    (torch.Size([3, 256]), torch.Size([6, 3, 256]))
    """
    if _unknown:
        raise unexpected("shift_mix", next(iter(_unknown)))
    inputs = x, add, weight, bias, mixes, state_indices, cu_seqlens, has_initial_state, num_active
    mixed = tensors.apart(out, (x, add))
    made = calls.call("shift_mix", inputs, (shift, mixed, None), (null_index, eps))
    if mixed is not out:
        out.copy_(mixed)  # type: ignore[union-attr]
    return x if add is None else made[-1], made[0] if out is None else out  # type: ignore[return-value]


def prepare_keys(
    k: Array,
    v: Array,
    rate: Array,
    k_k: Array,
    k_a: Array,
    *,
    a0: Array | None = None,
    v_first: Array | None = None,
    v_gate: Array | None = None,
    v0: Array | None = None,
    r: Array | None = None,
    r_k: Array | None = None,
    rate_map: RateMap = "sigmoid",
    **_unknown: NoReturn,
) -> tuple[Tensor, ...]:
    r"""Make k, v, a and b of `wkv7` and `wkv7_update` from an RWKV-7 layer's keys, values and gates; and the bonus.

        kk = k k_k / |k k_k|;   rate <- f(rate + a0);   a = -kk;   b = kk rate
        k <- k (1 + (rate - 1) k_a);   v <- v + (v_first - v) sigmoid(v_gate + v0)
        bonus = (sum_j r_j k_j r_k_j) v

    per token and head, with the norm over a head. H is the heads, N the head size.

    Parameters
    ----------
    k : torch.Tensor, shape (..., H, N), float16, bfloat16 or float32
        Key, of any number of tokens.
    v : torch.Tensor, shape of k or (..., H * N), dtype of k
        Value.
    rate : torch.Tensor, shape of k or (..., H * N), dtype of k or float32
        What the low-rank matrices make of the in-context learning rate, before a0 and the sigmoid; or with
        `rate_map="identity"` the rate itself.
    k_k, k_a : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32
        Factor of the removal key, and how much the rate is in the key.
    a0 : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        Is added to `rate`.
    v_first : torch.Tensor, shape of k or (..., H * N), dtype of k, optional
        The first layer's value. Without it, as in that layer, v is returned as it is.
    v_gate : torch.Tensor, shape of k or (..., H * N), dtype of k or float32, optional
        What the low-rank matrices make of the value's gate; goes with `v_first`.
    v0 : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        Is added to `v_gate`.
    r : torch.Tensor, shape of k or (..., H * N), dtype of k, optional
        Receptance: for the bonus, which `gated_norm` takes. Where gradients are wanted this is faster than to give it
        r, k, v and r_k: those of k and v come from one kernel, and need not be added up.
    r_k : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        How much of each channel is in the bonus; goes with `r`.
    rate_map : {"sigmoid", "identity"}, default "sigmoid"
        f: 1 / (1 + e^-x), or x itself, for rates that have been through a sigmoid, or may be anything.

    Returns
    -------
    k, v, a, b : torch.Tensor, shape and dtype of k
        v itself where there is no `v_first`.
    bonus : torch.Tensor, shape and dtype of k
        That of the new k and v, where r is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Where k k_k is zero, so are a and b. w of the layer goes to `wkv7_update` as it is, with `w0` and `decay="sigmoid"`.
    Precision and first calls are those of `shift_mix`.

    DTensors may be replicated or sharded over the batch or the heads.

    All inputs have gradients. The backward keeps the inputs and nothing else, and makes norms and gates again; while it
    runs it has sums of k_k, k_a, a0, v0 and r_k for some hundred groups of rows in float32. Gradients of these are
    added up in float32. A second derivative is an error.

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
    made = calls.call("prepare_keys", inputs, (None,) * 7, (rate_map,), record)
    return tuple(made) if v_first is not None else (made[0], v, *made[1:])  # type: ignore[arg-type]


def gated_norm(
    y: Array,
    g: Array,
    weight: Array,
    bias: Array | None = None,
    r: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    r_k: Array | None = None,
    *,
    bonus: Array | None = None,
    gate: Gate = "identity",
    norm: Norm = "layer",
    eps: float = _EPS_OF_HEADS,
    out: Array | None = None,
    **_unknown: NoReturn,
) -> Tensor:
    r"""Norm the heads of y, add the bonus and gate all of it: what the output matrix of time mixing reads.

        out = ((y - mean) / sqrt(variance + eps) weight + bias + (sum_j r_j k_j r_k_j) v) f(g)

    per token and head, with the mean and the variance over a head. H is the heads, N the head size. RWKV-7 has all of
    it. RWKV-5 and 6 have no bonus, `gate="silu"`, and for a head size divisor of 8 the same eps; gated linear attention
    has `norm="rms"` too.

    Parameters
    ----------
    y : torch.Tensor, shape (..., H, N), float16, bfloat16 or float32
        What the recurrence returns, of any number of tokens.
    g : torch.Tensor, shape of y or (..., H * N), dtype of y
        Gate.
    weight : torch.Tensor, shape (H * N,) or (H, N), dtype of y or float32
        Of the norm.
    bias : torch.Tensor, shape (H * N,) or (H, N), dtype of y or float32, optional
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
        As `shift_mix`; a RuntimeError too where `out` is given and an input wants a gradient.

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
    inputs, written = (y, g, weight, bias, r, k, v, r_k, bonus), (out, None, None)
    made = calls.call("gated_norm", inputs, written, (eps, gate, norm), record)
    return made[0] if out is None else out  # type: ignore[return-value]


def gated(x: Array, g: Array, gate: Gate = "sigmoid", **_unknown: NoReturn) -> Tensor:
    r"""Gate something:   y = x f(g).

    Receptance gates the values of channel mixing so in RWKV-4, 5 and 6, and those of time mixing in RWKV-4.

    Parameters
    ----------
    x : torch.Tensor, any shape, float16, bfloat16 or float32
        What is gated.
    g : torch.Tensor, shape and dtype of x
        Gate.
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
    return calls.call("gated", (x, g), (None,), (gate,), record)[0]


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
    return tuple(calls.call("token_shift", (x, mixes, amounts, first, cu_seqlens), (None,) * 6, (), record))


def norm_shift(
    x: Array,
    weight: Array,
    bias: Array,
    mixes: Array,
    *,
    add: Array | None = None,
    first: Array | None = None,
    cu_seqlens: Array | None = None,
    eps: float = _EPS,
    dtype: torch.dtype | None = None,
    **_unknown: NoReturn,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
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
        Bounds of N packed sequences: where each begins, and where the last one ends. B is then 1.
    eps : float, default 1e-05
        Of the layer norm.
    dtype : torch.dtype, optional
        That of the mixed tokens, of `add`, `first` and `last`: of 16 bits beside a residual of float32, as autocast has
        it. By default it is that of x.

    Returns
    -------
    residual : torch.Tensor, shape and dtype of x
        z. Pass on this one and not x: so its gradient is added in the same kernel.
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
    >>> weight, bias, mixes = torch.ones(256), torch.zeros(256), torch.rand(6, 256)
    >>> weight, bias, mixes = (p.to(x.device) for p in (weight, bias, mixes))
    >>> residual, mixed, last = rwkv_jit.norm_shift(x, weight, bias, mixes, add=y)
    >>> residual.shape, len(mixed), last.shape
    (torch.Size([3, 5, 256]), 6, torch.Size([3, 256]))
    """
    if _unknown:
        raise unexpected("norm_shift", next(iter(_unknown)))
    inputs = x, add, weight, bias, mixes, first, cu_seqlens
    residual, *mixed, last, _ = calls.call("norm_shift", inputs, (None,) * 9, (eps, dtype), record)
    return residual, tuple(mixed), last


def activate(x: Array, kinds: Kind | Sequence[Kind], *, out: Array | None = None, **_unknown: NoReturn) -> Tensor:
    r"""Apply a function to every element, or one to each part: what a layer has between its matrices.

    The functions are tanh(x), sigmoid(x) = 1 / (1 + e^-x), relu_squared(x) = max(x, 0)^2 and identity(x) = x.

    Parameters
    ----------
    x : torch.Tensor, any shape, float16, bfloat16 or float32
        What the first matrix made. Low-rank results of several gates, [gates, ..., R], take one launch together.
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
        As `shift_mix`; a RuntimeError too where `out` is given and x wants a gradient.

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
    made = calls.call("activate", (x,), (None if in_place else out,), (given, in_place), record)
    return made[0] if out is None else out  # type: ignore[return-value]
