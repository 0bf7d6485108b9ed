"""RWKV-4: time mixing and channel mixing."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rwkv_jit.layers.gated import gated
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.nn.common import before_texts, fill_orthogonal, tensors_of
from rwkv_jit.nn.mixing import ChannelMix, Mix
from rwkv_jit.nn.node import as_node
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.plain.layers import last_tokens
from rwkv_jit.pool.arguments import count


@as_node
class RWKV4TimeMix(Mix):
    r"""Time mixing of RWKV-4.

        x'_m = x_t time_mix_m + x_{t-1} (1 - time_mix_m)   for m = k, v, r
        y = output(sigmoid(receptance(x'_r)) wkv(key(x'_k), value(x'_v)))

    with wkv the recurrence of `wkv4`. The letters are those of `RWKV7TimeMix`.

    Parameters
    ----------
    width, layer, layers, device, dtype
        As `RWKV7TimeMix` takes them.

    Attributes
    ----------
    time_decay, time_first : torch.nn.Parameter, shape (C,)
        Decay and bonus, w and u of `wkv4`.
    time_mix_k, time_mix_v, time_mix_r : torch.nn.Parameter, shape (1, 1, C)
        How much of the token itself is in each mix.
    key, value, receptance, output : torch.nn.Linear, C to C

    Notes
    -----
    Names, shapes and initial values are those of RWKV-4-neo in RWKV-LM. `wkv4` has no packed sequences: they go one
    after another, and the host waits for `cu_seqlens`.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> layer = rwkv_jit.nn.RWKV4TimeMix(96, layer=0, layers=12, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, [each.shape for each in state]
    (torch.Size([2, 10, 96]), [torch.Size([2, 96]), torch.Size([2, 3, 96])])
    """

    def __init__(
        self, width: int, layer: int, layers: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, layer, layers, "kvr", place)
        self.time_decay = nn.Parameter(torch.empty(width, **place))
        self.time_first = nn.Parameter(torch.empty(width, **place))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(width, width, bias=False, **place) for _ in range(4)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all parameters to their official initial values."""
        self.reset_mixes(of_gates=0.5)
        self.time_decay.copy_(self.decays(self.time_decay, -5, 3))
        self.time_first.copy_(math.log(0.3) + 0.5 * self.zigzag(self.time_first))
        fill_orthogonal(self.value.weight, 1.0)
        for matrix in (self.key, self.receptance, self.output):
            nn.init.zeros_(matrix.weight)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what is added to the residual, and the state.

        Parameters
        ----------
        x, state, cu_seqlens
            As `RWKV7TimeMix.forward` takes them, with the state of `wkv4`, (N, 3, C).
        """
        last, recurrent = tensors_of(state)
        x, last, _ = before_texts(x, last, cu_seqlens, None)
        mixed = token_shift(x, self.mixes(), first=last, cu_seqlens=cu_seqlens)
        for_key, for_value, for_receptance = mixed
        y, recurrent = self._recur(self.key(for_key), self.value(for_value), recurrent, cu_seqlens)
        y = self.output(gated(y, self.receptance(for_receptance)))
        return y, (last_tokens(x, last, cu_seqlens), recurrent)

    def _recur(
        self, k: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if cu_seqlens is None:
            y, final = wkv4(self.time_decay, self.time_first, k, v, state, output_final_state=True)
            assert final is not None
            return y, final
        made = []
        for text, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            own = None if state is None else state[text : text + 1]
            made.append(self._recur(k[:, begin:end], v[:, begin:end], own, None))
        outputs, finals = zip(*made, strict=True)
        return torch.cat(outputs, 1), torch.cat(finals)


@as_node
class RWKV4ChannelMix(ChannelMix):
    r"""Channel mixing of RWKV-4.

        x'_m = x_t time_mix_m + x_{t-1} (1 - time_mix_m)   for m = k, r
        y = sigmoid(receptance(x'_r)) value(max(key(x'_k), 0)^2)

    F is the hidden size; the other letters are those of `RWKV7TimeMix`.

    Parameters
    ----------
    width, layer, layers, hidden, device, dtype
        As `RWKV7ChannelMix` takes them.

    Attributes
    ----------
    time_mix_k, time_mix_r : torch.nn.Parameter, shape (1, 1, C)
        How much of the token itself is in each mix.
    key, receptance, value : torch.nn.Linear, C to F, C to C and F to C

    Notes
    -----
    Names, shapes and initial values are those of RWKV-4-neo in RWKV-LM. The state is the last token of each sequence,
    [N, C].

    Examples
    --------
    >>> layer = rwkv_jit.nn.RWKV4ChannelMix(96, layer=0, layers=12, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, state.shape
    (torch.Size([2, 10, 96]), torch.Size([2, 96]))
    """

    def __init__(
        self, width: int, layer: int, layers: int, hidden: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        hidden = 4 * count("width", width, 1) if hidden is None else hidden
        super().__init__(width, layer, layers, hidden, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set all parameters to their official initial values."""
        super().reset_parameters()
        hidden, width = self.key.weight.shape
        fill_orthogonal(self.key.weight, math.sqrt(max(hidden / width, 1)))
