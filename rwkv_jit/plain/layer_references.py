"""A layer's small work in plain torch, to compare with, to read, and to differentiate any number of times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_jit.plain import layers
from rwkv_jit.plain.reference import documented
from rwkv_jit.schedules.legal import Activation, Gate, Kind, Norm, RateMap


def _rounded(made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [x.to(like.dtype) for x in made]


@documented("k, v, a and b of `wkv7`", returns="k, v, a, b, bonus")
def prepare_keys_ref(
    k: Tensor, v: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor, a0: Tensor | None = None,
    v_first: Tensor | None = None, v_gate: Tensor | None = None, v0: Tensor | None = None, r: Tensor | None = None,
    r_k: Tensor | None = None, rate_map: RateMap = "sigmoid",
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = k, v, rate, v_first, v_gate, k_k, k_a, a0, v0, r, r_k
    made = _rounded(layers.prepare_keys(inputs, 0.0, (rate_map,)), k)
    return tuple(made) if v_first is not None else (made[0], v, *made[1:])


@documented("The norm, bonus and gate of heads", returns="out")
def gated_norm_ref(
    y: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None = None, r: Tensor | None = None,
    k: Tensor | None = None, v: Tensor | None = None, r_k: Tensor | None = None, bonus: Tensor | None = None,
    gate: Gate = "identity", norm: Norm = "layer", eps: float = 64e-5,
) -> Tensor:  # fmt: skip
    return _rounded(layers.gated_norm((y, g, weight, bias, r, k, v, r_k, bonus), eps, (gate, norm)), y)[0]


@documented("A gate, x f(g)", returns="y")
def gated_ref(x: Tensor, g: Tensor, gate: Gate = "sigmoid") -> Tensor:
    return _rounded(layers.gated((x, g), 0.0, (gate,)), x)[0]


@documented("A function of every element", returns="y")
def activate_ref(x: Tensor, kinds: Kind | Sequence[Kind]) -> Tensor:
    return _rounded(layers.activate((x,), 0.0, (kinds,) if isinstance(kinds, str) else kinds), x)[0]


@documented("Every token mixed with the one before it", returns="mixed")
def token_shift_ref(
    x: Tensor, mixes: Tensor, amounts: Tensor | None = None, first: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(_rounded(layers.token_shift((x, mixes, amounts, first, cu_seqlens), 0.0, ()), x))


@documented("Norm and token shift", returns="residual, mixed, last")
def norm_shift_ref(
    x: Tensor, weight: Tensor, bias: Tensor, mixes: Tensor, add: Tensor | None = None, first: Tensor | None = None,
    cu_seqlens: Tensor | None = None, eps: float = 1e-5, dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:  # fmt: skip
    kinds = (str(dtype or x.dtype).removeprefix("torch."),)
    residual, *mixed, last, _ = layers.norm_shift((x, add, weight, bias, mixes, first, cu_seqlens), eps, kinds)
    return residual, tuple(mixed), last


@documented("A short causal convolution")
def causal_conv1d_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y = layers.causal_conv1d(x, weight, bias, initial_state, cu_seqlens, activation or "identity")
    count = weight.shape[1] - 1
    return y, layers.last_windows(x, initial_state, cu_seqlens, count) if output_final_state else None
