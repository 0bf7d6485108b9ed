"""RWKV-6: time mixing, channel mixing and a layer of both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rwkv_jit.call import switches
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.nn.common import in_files, under_autocast
from rwkv_jit.nn.mixing import Block, ChannelMix, TimeMixOfHeads
from rwkv_jit.nn.node import as_node
from rwkv_jit.nn.products import Product, products
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.pool.functions import wkv6_update

_WIDE = 4096  # from which width on the low-rank matrices have twice the rank


@in_files
class RWKV6State(NamedTuple):
    """What a layer of RWKV-6 remembers of N sequences: as `RWKV7State`, with the state of `wkv6`."""

    wkv: Tensor
    time_shift: Tensor
    channel_shift: Tensor

    def detach(self) -> RWKV6State:
        """Return the same without its history: backpropagation through time ends there."""
        return RWKV6State(*(x.detach() for x in self))


@as_node
class RWKV6TimeMix(TimeMixOfHeads):
    r"""Time mixing of RWKV-6.

        x' = x_t + (x_{t-1} - x_t) time_maa_x;   a_m = tanh(x' time_maa_w1)_m time_maa_w2_m
        x'_m = x_t + (x_{t-1} - x_t) (time_maa_m + a_m)   for m = w, k, v, r, g
        w = time_decay + tanh(x'_w time_decay_w1) time_decay_w2
        y = output(norm(wkv(receptance(x'_r), key(x'_k), value(x'_v), w)) silu(gate(x'_g)))

    with wkv the recurrence of `wkv6`, and a norm of each head. The letters are those of `RWKV7TimeMix`, R and D ranks.

    Parameters
    ----------
    width, layer, layers, head_size, device, dtype
        As `RWKV7TimeMix` takes them.

    Attributes
    ----------
    time_maa_x, time_maa_w, time_maa_k, time_maa_v, time_maa_r, time_maa_g : torch.nn.Parameter, shape (1, 1, C)
        The share of the previous token in each mix, whatever the token is.
    time_maa_w1, time_maa_w2 : torch.nn.Parameter, shapes (C, 5 R) and (5, R, C)
        Make what the token adds to that; R is 32, and 64 from a width of 4096 on.
    time_decay : torch.nn.Parameter, shape (1, 1, C)
        Decay, whatever the token is.
    time_decay_w1, time_decay_w2 : torch.nn.Parameter, shapes (C, D) and (D, C)
        Make what the token adds to that; D is 64, and 128 from a width of 4096 on.
    time_faaaa : torch.nn.Parameter, shape (H, K)
        Bonus, u of `wkv6`.
    receptance, key, value, output, gate : torch.nn.Linear, C to C
        The matrices.
    ln_x : torch.nn.GroupNorm
        The norm of the heads.

    Notes
    -----
    Names, shapes and initial values are those of x060 in RWKV-LM, with its head size divisor of 8, which is in the eps
    of `ln_x`.

    Examples
    --------
    >>> layer = rwkv_jit.nn.RWKV6TimeMix(96, layer=0, layers=12, head_size=32, device="cuda")
    >>> x = torch.randn(2, 10, 96, device="cuda")
    >>> y, state = layer(x[:, :7])
    >>> rest, state = layer(x[:, 7:], state)
    >>> rest.shape, [each.shape for each in state]
    (torch.Size([2, 3, 96]), [torch.Size([2, 96]), torch.Size([2, 3, 32, 32])])
    """

    prefix, _op = "time_maa", staticmethod(wkv6)
    time_maa_x: nn.Parameter

    def __init__(
        self, width: int, layer: int, layers: int, head_size: int = 64, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, layer, layers, "xwkvrg", head_size, place)
        rank, decay_rank = (32, 64) if width < _WIDE else (64, 128)
        self.time_maa_w1 = nn.Parameter(torch.empty(width, 5 * rank, **place))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, rank, width, **place))
        self.time_decay = nn.Parameter(torch.empty(1, 1, width, **place))
        self.time_decay_w1 = nn.Parameter(torch.empty(width, decay_rank, **place))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, width, **place))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all parameters to their official initial values."""
        super().reset_parameters()
        self.time_decay.copy_(self.decays(self.time_decay, -6, -1))
        for first, second in ((self.time_maa_w1, self.time_maa_w2), (self.time_decay_w1, self.time_decay_w2)):
            nn.init.zeros_(first)
            nn.init.uniform_(second, -0.01, 0.01)

    def parts_of_step(self) -> list[Tensor]:
        """Return the parameters of the mixes that `step` reads."""
        return self.several("x")

    def mixes_of_steps(self, stacked: Tensor) -> Tensor:
        """Return the mixes that `step` reads of some layers, [L, 3, C]: the token, that before it, and x'."""
        mix = self.shares(stacked)  # [L, 1, C]
        return torch.cat([torch.zeros_like(mix), torch.ones_like(mix), mix], 1)

    def step(self, mixed: Tensor, states: Tensor, **where: Any) -> Tensor:
        """Mix one token of each sequence, by `mixes_of_steps` [M, B, C]; states in slots of a pool change in place."""
        x, before, mixed = under_autocast(mixed)
        inputs, g = self._of_mixed(x.unsqueeze(1), mixed.unsqueeze(1), before)
        return self.result(wkv6_update(states, *inputs, **where), g).squeeze(1)

    def _inputs(
        self, x: Tensor, last: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        (mixed,) = token_shift(x, self.shares(self.time_maa_x.flatten(1)), first=last, cu_seqlens=cu_seqlens)
        return self._of_mixed(x, mixed, last, cu_seqlens)

    def _of_mixed(
        self, x: Tensor, mixed: Tensor, last: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        mixes = self.shares(torch.cat(self.several("wkvrg")).flatten(1))
        for_decay, *others = token_shift(x, mixes, self._amounts(mixed), last, cu_seqlens)
        matrices = self.key, self.value, self.receptance, self.gate
        k, v, r, g, hidden = products(
            *map(Product, others, matrices), Product(for_decay, self.time_decay_w1, function="tanh")
        )
        (w,) = products(Product(hidden, self.time_decay_w2, self.time_decay.view(-1)))
        return (*map(self.of_heads, (r, k, v, w)), self.time_faaaa), g

    def _amounts(self, mixed: Tensor) -> Tensor:
        """Return what a token adds to the mixes w, k, v, r and g, [5, B, T, C]."""
        parts, rank, width = self.time_maa_w2.shape
        (low_rank,) = products(Product(mixed, self.time_maa_w1, function="tanh"))
        if switches.is_batch_invariant():  # as results of torch.bmm may depend on the batch
            several = low_rank.unflatten(-1, (parts, rank)).unbind(-2)
            return torch.stack(products(*map(Product, several, self.time_maa_w2.unbind())))
        low_rank = low_rank.view(-1, parts, rank).transpose(0, 1)
        return torch.bmm(low_rank, self.time_maa_w2).view(parts, *mixed.shape)


@as_node
class RWKV6ChannelMix(ChannelMix):
    r"""Channel mixing of RWKV-6.

        x'_m = x_t + (x_{t-1} - x_t) time_maa_m   for m = k, r
        y = sigmoid(receptance(x'_r)) value(max(key(x'_k), 0)^2)

    The letters are those of `RWKV4ChannelMix`.

    Parameters
    ----------
    width, layer, layers, hidden, device, dtype
        As in `RWKV5ChannelMix`.

    Attributes
    ----------
    time_maa_k, time_maa_r : torch.nn.Parameter, shape (1, 1, C)
        The share of the previous token in each mix.
    key, receptance, value : torch.nn.Linear, C to F, C to C and F to C
        The matrices.

    Notes
    -----
    Names, shapes and initial values are those of x060 in RWKV-LM. The state is the last token of each sequence, [N, C].

    Examples
    --------
    >>> layer = rwkv_jit.nn.RWKV6ChannelMix(96, layer=0, layers=12, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, state.shape
    (torch.Size([2, 10, 96]), torch.Size([2, 96]))
    """

    prefix = "time_maa"


@as_node
class RWKV6Block(Block):
    """A layer of RWKV-6: time mixing, then channel mixing, each behind a norm and added to the residual.

    Parameters
    ----------
    width, layer, layers, head_size, hidden, device, dtype
        As in `RWKV5Block`.

    Attributes
    ----------
    att, ffn, ln0, ln1, ln2
        As in `RWKV5Block`, of RWKV-6.

    Examples
    --------
    >>> block = rwkv_jit.nn.RWKV6Block(128, layer=0, layers=2, device="cuda")
    >>> x, state = block(torch.randn(2, 5, 128, device="cuda"))
    >>> x.shape, state.wkv.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 2, 64, 64]))
    """

    _State, _kinds = RWKV6State, (RWKV6TimeMix, RWKV6ChannelMix)
