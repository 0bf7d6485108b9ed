"""RWKV-5: time mixing, channel mixing and a layer of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.nn.common import in_files
from rwkv_jit.nn.mixing import Block, ChannelMix, TimeMixOfHeads
from rwkv_jit.nn.node import as_node
from rwkv_jit.nn.products import Product, products
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.pool.functions import wkv5_update


@in_files
class RWKV5State(NamedTuple):
    """What a layer of RWKV-5 remembers of N sequences: as `RWKV7State`, with the state of `wkv5`."""

    wkv: Tensor
    time_shift: Tensor
    channel_shift: Tensor

    def detach(self) -> RWKV5State:
        """Return the same without its history: backpropagation through time ends there."""
        return RWKV5State(*(x.detach() for x in self))


@as_node
class RWKV5TimeMix(TimeMixOfHeads):
    r"""Time mixing of RWKV-5.2.

        x'_m = x_t time_mix_m + x_{t-1} (1 - time_mix_m)   for m = k, v, r, g
        y = output(norm(wkv(receptance(x'_r), key(x'_k), value(x'_v))) silu(gate(x'_g)))

    with wkv the recurrence of `wkv5`, and a norm of each head. The letters are those of `RWKV7TimeMix`.

    Parameters
    ----------
    width, layer, layers, head_size, device, dtype
        As `RWKV7TimeMix` takes them.

    Attributes
    ----------
    time_decay, time_faaaa : torch.nn.Parameter, shape (H, K)
        Decay and bonus, w and u of `wkv5`.
    time_mix_k, time_mix_v, time_mix_r, time_mix_g : torch.nn.Parameter, shape (1, 1, C)
        How much of the token itself is in each mix.
    receptance, key, value, output, gate : torch.nn.Linear, C to C
        The matrices.
    ln_x : torch.nn.GroupNorm
        The norm of the heads.

    Notes
    -----
    Names, shapes and initial values are those of x052 in RWKV-LM, with its head size divisor of 8, which is in the eps
    of `ln_x`.

    Examples
    --------
    >>> layer = rwkv_jit.nn.RWKV5TimeMix(96, layer=0, layers=12, head_size=32, device="cuda")
    >>> x = torch.randn(2, 10, 96, device="cuda")
    >>> y, state = layer(x[:, :7])
    >>> rest, state = layer(x[:, 7:], state)
    >>> rest.shape, [each.shape for each in state]
    (torch.Size([2, 3, 96]), [torch.Size([2, 96]), torch.Size([2, 3, 32, 32])])
    """

    _op = staticmethod(wkv5)

    def __init__(
        self, width: int, layer: int, layers: int, head_size: int = 64, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, layer, layers, "kvrg", head_size, place)
        self.time_decay = nn.Parameter(torch.empty(self.heads, head_size, **place))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all parameters to their official initial values."""
        super().reset_parameters()
        self.time_decay.copy_(self.decays(self.time_decay, -6, -1))

    def step(self, mixed: Tensor, states: Tensor, **where: Any) -> Tensor:
        """Mix one token of each sequence, by `mixes_of_steps` [M, B, C]; states in slots of a pool change in place."""
        inputs, g = self._of_mixed(mixed)
        return self.result(wkv5_update(states, *inputs, **where), g)

    def _inputs(
        self, x: Tensor, last: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        return self._of_mixed(token_shift(x, self.mixes(), first=last, cu_seqlens=cu_seqlens))

    def _of_mixed(self, mixed: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        matrices = self.key, self.value, self.receptance, self.gate
        k, v, r, g = products(*map(Product, mixed, matrices))
        return (*map(self.of_heads, (r, k, v)), self.time_decay, self.time_faaaa), g


@as_node
class RWKV5ChannelMix(ChannelMix):
    """Channel mixing of RWKV-5: that of `RWKV4ChannelMix` with another hidden size and initial value of `key`.

    Parameters
    ----------
    width, layer, layers, hidden, device, dtype
        As in `RWKV4ChannelMix`, but that F is by default the multiple of 32 at or below 3.5 C, 32 at least.

    Attributes
    ----------
    time_mix_k, time_mix_r : torch.nn.Parameter, shape (1, 1, C)
        As in `RWKV4ChannelMix`.
    key, receptance, value : torch.nn.Linear, C to F, C to C and F to C
        The matrices.

    Notes
    -----
    Names, shapes and initial values are those of x052 in RWKV-LM. The state is the last token of each sequence, [N, C].

    Examples
    --------
    >>> layer = rwkv_jit.nn.RWKV5ChannelMix(96, layer=0, layers=12, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, layer.key.out_features
    (torch.Size([2, 10, 96]), 320)
    """


@as_node
class RWKV5Block(Block):
    """A layer of RWKV-5: time mixing, then channel mixing, each behind a norm and added to the residual.

    Parameters
    ----------
    width, layer, layers, head_size, hidden, device, dtype
        As `RWKV7Block` takes them, but that `hidden` is by default the multiple of 32 at or below 3.5 times the width,
        32 at least.

    Attributes
    ----------
    att : RWKV5TimeMix
        Time mixing.
    ffn : RWKV5ChannelMix
        Channel mixing.
    ln0, ln1, ln2 : torch.nn.LayerNorm
        Of the embedding, in the first layer alone, and before each of both.

    Examples
    --------
    >>> block = rwkv_jit.nn.RWKV5Block(128, layer=0, layers=2, device="cuda")
    >>> x, state = block(torch.randn(2, 5, 128, device="cuda"))
    >>> x.shape, state.wkv.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 2, 64, 64]))
    """

    _State, _kinds = RWKV5State, (RWKV5TimeMix, RWKV5ChannelMix)
