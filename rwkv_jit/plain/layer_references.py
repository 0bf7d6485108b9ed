"""A layer's small work in plain torch, to compare with, to read, and to differentiate in every way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_jit.plain import layers
from rwkv_jit.schedules.legal import Activation, Gate, Kind, Norm, RateMap


def _rounded(made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [x.to(like.dtype) for x in made]


def prepare_keys_ref(
    k: Tensor, v: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor, a0: Tensor | None = None,
    v_first: Tensor | None = None, v_gate: Tensor | None = None, v0: Tensor | None = None, r: Tensor | None = None,
    r_k: Tensor | None = None, rate_map: RateMap = "sigmoid",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Make k, v, a and b in plain torch; see `rwkv_jit.prepare_keys` for the equations.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    k, v, rate : torch.Tensor, shape (..., H, N); v and rate (..., H * N) too
        As in the op, float64 too.
    k_k, k_a : torch.Tensor, shape (H, N) or (H * N,)
        Factor of the removal key, and how much the rate is in the key.
    a0, v0 : torch.Tensor, shape (H, N) or (H * N,), optional
        Are added to `rate` and to `v_gate`.
    v_first, v_gate : torch.Tensor, shape (..., H, N) or (..., H * N), optional
        The first layer's value, and its gate.
    r : torch.Tensor, shape (..., H, N) or (..., H * N), optional
        Receptance, for the bonus.
    r_k : torch.Tensor, shape (H, N) or (H * N,), optional
        How much of each channel is in the bonus; goes with `r`.
    rate_map : {"sigmoid", "identity"}, default "sigmoid"
        What `rate` goes through.

    Returns
    -------
    k, v, a, b : torch.Tensor, shape and dtype of k
        v itself where there is no `v_first`.
    bonus : torch.Tensor, shape and dtype of k
        Where r is given.
    """
    inputs = k, v, rate, v_first, v_gate, k_k, k_a, a0, v0, r, r_k
    made = _rounded(layers.prepare_keys(inputs, 0.0, (rate_map,)), k)
    return tuple(made) if v_first is not None else (made[0], v, *made[1:])


def gated_norm_ref(
    y: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None = None, r: Tensor | None = None,
    k: Tensor | None = None, v: Tensor | None = None, r_k: Tensor | None = None, bonus: Tensor | None = None,
    gate: Gate = "identity", norm: Norm = "layer", eps: float = 64e-5,
) -> Tensor:  # fmt: skip
    """Norm, add the bonus and gate in plain torch; see `rwkv_jit.gated_norm` for the equations.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    y : torch.Tensor, shape (..., H, N)
        As in the op, float64 too.
    g, r, k, v : torch.Tensor, shape (..., H, N) or (..., H * N), the last three optional
        Gate; receptance, key and value for the bonus.
    weight, bias, r_k : torch.Tensor, shape (H, N) or (H * N,), the last two optional
        Of the norm and the bonus.
    bonus : torch.Tensor, shape (..., H, N) or (..., H * N), optional
        The bonus, instead of r, k, v and r_k.
    gate : {"identity", "sigmoid", "silu"}, default "identity"
        What g goes through.
    norm : {"layer", "rms"}, default "layer"
        "rms" takes 0 for the mean.
    eps : float, default 0.00064
        Of the norm.

    Returns
    -------
    out : torch.Tensor, shape (..., H * N), dtype of y
    """
    return _rounded(layers.gated_norm((y, g, weight, bias, r, k, v, r_k, bonus), eps, (gate, norm)), y)[0]


def gated_ref(x: Tensor, g: Tensor, gate: Gate = "sigmoid") -> Tensor:
    """Gate something in plain torch; see `rwkv_jit.gated` for the equation.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    x, g : torch.Tensor, any shape
        What is gated, and the gate; float64 too.
    gate : {"identity", "sigmoid", "silu"}, default "sigmoid"
        What g goes through.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
    """
    return _rounded(layers.gated((x, g), 0.0, (gate,)), x)[0]


def activate_ref(x: Tensor, kinds: Kind | Sequence[Kind]) -> Tensor:
    """Apply a function to every element, or one to each part, in plain torch; see `rwkv_jit.activate`.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    x : torch.Tensor, any shape
        As in the op, float64 too.
    kinds : str or sequence of str
        "tanh", "sigmoid", "relu_squared" or "identity"; or one of these for each x[i].

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
    """
    return _rounded(layers.activate((x,), 0.0, (kinds,) if isinstance(kinds, str) else kinds), x)[0]


def token_shift_ref(
    x: Tensor, mixes: Tensor, amounts: Tensor | None = None, first: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Mix every token with the one before it in plain torch; see `rwkv_jit.token_shift` for the equation.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, C)
        As in the op, float64 too.
    mixes : torch.Tensor, shape (M, C)
        The share of the previous token in each mix.
    amounts : torch.Tensor, shape (M, B, T, C), optional
        Added to that, token by token.
    first : torch.Tensor, shape (B, C), or (N, C) for packed sequences, optional
        The token before the first of each sequence; zeros by default.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Bounds of sequences packed along T with B = 1.

    Returns
    -------
    mixed : tuple of M torch.Tensor, shape and dtype of x
    """
    return tuple(_rounded(layers.token_shift((x, mixes, amounts, first, cu_seqlens), 0.0, ()), x))


def norm_shift_ref(
    x: Tensor, weight: Tensor, bias: Tensor, mixes: Tensor, add: Tensor | None = None, first: Tensor | None = None,
    cu_seqlens: Tensor | None = None, eps: float = 1e-5, dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:  # fmt: skip
    """Add, norm and mix every token with the one before it in plain torch; see `rwkv_jit.norm_shift` for the equations.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, C)
        As in the op, float64 too.
    weight, bias : torch.Tensor, shape (C,)
        Of the layer norm.
    mixes : torch.Tensor, shape (M, C)
        The share of the previous token in each mix.
    add : torch.Tensor, shape of x, optional
        What is added to the residual first.
    first : torch.Tensor, shape (B, C), or (N, C) for packed sequences, optional
        n of the token before the first of each sequence; zeros by default.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Bounds of sequences packed along T with B = 1.
    eps : float, default 1e-05
        Of the norm.
    dtype : torch.dtype, optional
        That of the mixed tokens and of `last`; by default that of x.

    Returns
    -------
    residual : torch.Tensor, shape and dtype of x
    mixed : tuple of M torch.Tensor, shape of x
    last : torch.Tensor, shape (B, C) or (N, C)
    """
    kinds = (str(dtype or x.dtype).removeprefix("torch."),)
    residual, *mixed, last, _ = layers.norm_shift((x, add, weight, bias, mixes, first, cu_seqlens), eps, kinds)
    return residual, tuple(mixed), last


def causal_conv1d_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Convolve every channel with a few tokens before in plain torch; see `rwkv_jit.causal_conv1d` for the equation.

    Arithmetic is float64 for float64 inputs and float32 otherwise.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, C)
        As in the op, float64 too.
    weight : torch.Tensor, shape (C, W)
        The taps, that of the token itself last.
    bias : torch.Tensor, shape (C,), optional
        Is added before the activation.
    initial_state : torch.Tensor, shape (N, C, W - 1), optional
        The tokens before the first of each sequence.
    output_final_state : bool, default False
        Also return the last tokens of each sequence.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Bounds of sequences packed along T with B = 1.
    activation : {"silu"}, optional
        The function of the sum.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
    final_state : torch.Tensor, shape (N, C, W - 1), or None
    """
    y = layers.causal_conv1d(x, weight, bias, initial_state, cu_seqlens, activation or "identity")
    count = weight.shape[1] - 1
    return y, layers.last_windows(x, initial_state, cu_seqlens, count) if output_final_state else None
