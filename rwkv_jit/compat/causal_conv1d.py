"""Functions with the names and arguments of the package causal-conv1d, of which Mamba-2 and others import them.

B is the batch, C the channels, T the tokens, W the width. Channels stand before tokens, as in the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.compat.naming import named
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.layers import causal_conv1d as convolution
from rwkv_jit.pool import arguments
from rwkv_jit.schedules.convolution import MOST_STATE_LEN
from rwkv_jit.schedules.legal import Activation


@named(initial_state="initial_states")
def causal_conv1d_fn(
    x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
    return_final_states: bool = False, final_states_out: Any = None, activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return a causal convolution of each channel, as `rwkv_jit.causal_conv1d`; those of y are neighbours in memory.

    x is (B, C, T), weight (C, W) with W from 2 to 8, states are (B, C, W - 1). With `return_final_states` the last
    tokens are returned too, and written to `final_states_out`. "swish" is "silu".

    `seq_idx` (B, T), int32, numbers each token's sequence, whose tokens are neighbours; where it is negative, y is
    zeros. `cu_seqlens` of `rwkv_jit.causal_conv1d` says the same with less work.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    UnsupportedConfigError
        `seq_idx` with initial states or final ones.
    """
    x = _channels_of(x, (3,))
    weight, bias = _taps(x, weight, bias)
    chosen = _activation(activation)
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            other = "initial_states" if initial_states is not None else "return_final_states"
            raise UnsupportedConfigError(
                f"seq_idx: cannot be combined with {other}; pass cu_seqlens to rwkv_jit.causal_conv1d"
            )
        return _of_texts(x, weight, bias, seq_idx, chosen)
    y, state = convolution.causal_conv1d(
        x.transpose(1, 2), weight, bias, initial_state=initial_states, output_final_state=return_final_states,
        activation=chosen,
    )  # fmt: skip
    if state is None:
        return y.transpose(1, 2)
    if final_states_out is not None:
        target = tensors.from_any("final_states_out", final_states_out, in_place=True)
        arguments.check_shape("final_states_out", target, tuple(state.shape))
        arguments.check_dtype("final_states_out", target, (x.dtype,), x)
        target.copy_(state)
        state = final_states_out
    return y.transpose(1, 2), state


@named(state_indices="conv_state_indices")
def causal_conv1d_update(
    x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None, cache_seqlens: Any = None,
    conv_state_indices: Any = None,
) -> Tensor:  # fmt: skip
    """Return a causal convolution of the next tokens and move its states on, as `rwkv_jit.causal_conv1d_update`.

    x is (B, C) or (B, C, T), weight (C, W), conv_state (B, C, L) or (slots, C, L), L from W - 1 to 16, the last token
    last. With `cache_seqlens` (B,), int32, how many tokens each row has had, states are ring buffers of any L: token i
    is at i modulo L. A row whose slot of `conv_state_indices` is below 0 gets zeros. Nothing is recorded for gradients.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The states are as before.
    UnsupportedConfigError
        States keep more than 16 tokens, and there are no `cache_seqlens`.
    """
    x = _channels_of(x, (2, 3))
    weight, bias = _taps(x, weight, bias)
    chosen = _activation(activation)
    conv_state = tensors.from_any("conv_state", conv_state, in_place=True)
    if cache_seqlens is None and conv_state.dim() == 3 and conv_state.shape[2] > MOST_STATE_LEN:
        raise UnsupportedConfigError(f"conv_state: keeps up to {MOST_STATE_LEN} tokens, got {conv_state.shape[2]}")
    indices = arguments.indices("conv_state_indices", conv_state_indices, x.shape[0], x)
    rows = x if x.dim() == 2 else x.transpose(1, 2)
    with torch.no_grad():
        y = convolution.causal_conv1d_update(
            rows, conv_state, weight, bias, activation=chosen, cache_seqlens=cache_seqlens, state_indices=indices
        )
        if indices is not None:
            y.masked_fill_((indices < 0).view(-1, *[1] * (y.dim() - 1)), 0)
    return y if x.dim() == 2 else y.transpose(1, 2)


def _channels_of(given: Any, dims: tuple[int, ...]) -> Tensor:
    """Return x, whose second dimension is that of the channels."""
    x = tensors.from_any("x", given)
    if x.dim() not in dims:
        legal = " or ".join(["[batch, channels]"] * (2 in dims) + ["[batch, channels, tokens]"])
        raise ValueError(f"x: expected shape {legal}, got {list(x.shape)}")
    return x


def _taps(x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
    """Return taps in a dtype that goes with that of x; the package takes any two."""
    given = [tensors.from_any("weight", weight), None if bias is None else tensors.from_any("bias", bias)]
    several = [y.float() if y is not None and y.dtype in tensors.STORAGE and y.dtype != x.dtype else y for y in given]
    return several[0], several[1]  # type: ignore[return-value]


def _activation(activation: Any) -> Activation | None:
    if activation is None:
        return None
    checks.check_name("activation", activation, ("silu", "swish"))
    return "silu"


def _of_texts(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Any, activation: Activation | None) -> Tensor:
    """Return y of texts that stand one behind another in each row."""
    batch, channels, tokens = x.shape
    seq_idx = tensors.from_any("seq_idx", seq_idx)
    arguments.check_shape("seq_idx", seq_idx, (batch, tokens))
    arguments.check_dtype("seq_idx", seq_idx, arguments.INDEX_TYPES, x)
    if not x.numel():
        return convolution.causal_conv1d(x.transpose(1, 2), weight, bias)[0].transpose(1, 2)
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    # As many bounds as there could be, so that nobody has to know how many there are: the last texts have no tokens.
    places = torch.arange(batch * tokens + 1, device=x.device)
    bounds = torch.where(torch.cat([begins.flatten(), begins.new_zeros(1)]), places, batch * tokens).sort().values
    rows = x.transpose(1, 2).reshape(1, batch * tokens, channels)
    y, _ = convolution.causal_conv1d(rows, weight, bias, cu_seqlens=bounds, activation=activation)
    return y.view(batch, tokens, channels).masked_fill((seq_idx < 0).unsqueeze(2), 0).transpose(1, 2)
