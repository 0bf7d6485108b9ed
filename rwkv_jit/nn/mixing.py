"""What the modules of RWKV-4, 5, 6 and 7 share: mixes, initial values, channel mixing, heads, layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rwkv_jit.layers.shift_mix import shift_mix
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.nn.common import Sized, before_texts, check_heads, fill_orthogonal, norm_heads, recur, tensors_of
from rwkv_jit.nn.products import Product, products
from rwkv_jit.plain.layers import last_tokens
from rwkv_jit.pool.arguments import count

_HEAD_SIZE_DIVISOR = 8  # of the official models, which divide what the recurrence returns by it before its norm


class Mix(Sized):
    """A module of layer `layer` of `layers`, whose mixes have the names `prefix_` and each of `letters`."""

    _sizes: ClassVar[tuple[str, ...]] = ("layer", "layers")
    prefix = "time_mix"  # the share of the token itself, of RWKV-4 and 5; time_maa and x are that of the one before

    def __init__(self, width: int, layer: int, layers: int, letters: str, place: dict[str, Any]):
        super().__init__()
        if count("layer", layer) >= count("layers", layers, 1):
            raise ValueError(f"layer: expected less than the {layers} layers, got {layer}")
        self.layer, self.layers = layer, layers
        self.width, self.letters = count("width", width, 1), letters
        self.height = layer / max(layers - 1, 1)  # 0 in the first layer, 1 in the last one
        for letter in letters:
            self.register_parameter(f"{self.prefix}_{letter}", nn.Parameter(torch.empty(1, 1, width, **place)))

    def mixes(self) -> Tensor:
        """Return how much of the token before is in each mix, [M, C]."""
        return mixes_of([self]).squeeze(0)

    def several(self, letters: str) -> list[Tensor]:
        """Return the parameters of some mixes."""
        return [getattr(self, f"{self.prefix}_{letter}") for letter in letters]

    def shares(self, stacked: Tensor) -> Tensor:
        """Return how much of the token before is in mixes of these parameters, not rounded where it is computed."""
        if self.prefix == "x":
            return stacked
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        return 1 - stacked if self.prefix == "time_mix" else stacked

    def parts_of_step(self) -> list[Tensor]:
        """Return the parameters of the mixes that `step` reads."""
        return self.several(self.letters)

    def mixes_of_steps(self, stacked: Tensor) -> Tensor:
        """Return the mixes that `step` reads of some layers, [L, M, C], of their parameters [L, P, C]."""
        return self.shares(stacked)

    @torch.no_grad()
    def reset_mixes(self, of_gates: float = 1.0) -> None:
        """Set mixes to powers of the channel, less in later layers; those of r and g to `of_gates` times the power."""
        for letter in self.letters:
            parameter = getattr(self, f"{self.prefix}_{letter}")
            power = (of_gates if letter in "rg" else 1) * (1 - self.layer / self.layers)
            share = (torch.arange(self.width, device=parameter.device) / self.width) ** power
            share = share + 0.3 * self.height if letter == "v" else share
            parameter.copy_(share if self.prefix == "time_mix" else 1 - share)

    def ramp(self, like: Tensor) -> Tensor:
        """Return 0 to 1 over the channels."""
        return torch.arange(self.width, device=like.device) / max(self.width - 1, 1)

    def decays(self, like: Tensor, low: float, high: float) -> Tensor:
        """Return the initial decays, from `low` to `high` over the channels."""
        return (low + (high - low) * self.ramp(like) ** (0.7 + 1.3 * self.height)).view_as(like)

    def zigzag(self, like: Tensor) -> Tensor:
        """Return 0, 1, -1 and so on, by which the bonus of neighbours differs at first."""
        return (torch.arange(self.width, device=like.device) + 1) % 3 - 1


class Channels(Mix):
    """What channel mixing of every RWKV does with tokens: they are mixed, and `of_mixed` does the rest."""

    of_mixed: Callable[..., Tensor]

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None, shard: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return what is added to the residual, and the last token of each sequence, which is not detached.

        Parameters
        ----------
        x, state, cu_seqlens, shard
            As `RWKV7TimeMix.forward` takes them; the state is the last token, (N, C), zeros by default. It has a
            gradient.
        """
        x, last, cu_seqlens = before_texts(x, state, cu_seqlens, shard)
        mixed = token_shift(x, self.mixes(), first=last, cu_seqlens=cu_seqlens)
        return self.of_mixed(*mixed), last_tokens(x, last, cu_seqlens)


class ChannelMix(Channels):
    """Channel mixing behind a receptance."""

    def __init__(
        self, width: int, layer: int, layers: int, hidden: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, layer, layers, "kr", place)
        hidden = max(int(3.5 * width) // 32, 1) * 32 if hidden is None else count("hidden", hidden, 1)
        self.key = nn.Linear(width, hidden, bias=False, **place)
        self.receptance = nn.Linear(width, width, bias=False, **place)
        self.value = nn.Linear(hidden, width, bias=False, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to their official initial values."""
        self.reset_mixes()
        fill_orthogonal(self.key.weight, 1.0)
        nn.init.zeros_(self.receptance.weight)
        nn.init.zeros_(self.value.weight)

    def of_mixed(self, for_key: Tensor, for_receptance: Tensor, add: Tensor | None = None) -> Tensor:
        """Return the results for tokens that have been mixed with those before them, added to something."""
        hidden, receptance = products(
            Product(for_key, self.key, function="relu_squared"), Product(for_receptance, self.receptance)
        )
        return products(Product(hidden, self.value, gate=receptance, add=add))[0]


def mixes_of(halves: Sequence[Any]) -> Tensor:
    """Return the mixes that `step` reads of a half of each of some layers, [L, M, C], by as few launches as of one."""
    parts = [x for half in halves for x in half.parts_of_step()]
    stacked = (torch.cat(parts) if len(parts) > 1 else parts[0]).view(len(halves), len(parts) // len(halves), -1)
    return halves[0].mixes_of_steps(stacked)  # type: ignore[no-any-return]


class TimeMixOfHeads(Mix):
    """What the time mixing of RWKV-5 and that of RWKV-6 have in common."""

    _sizes = "layer", "layers", "head_size"
    _op: ClassVar[Any]  # the recurrence
    _inputs: Callable[..., tuple[tuple[Tensor, ...], Tensor]]  # what it reads, and the gate

    def __init__(
        self, width: int, layer: int, layers: int, letters: str, head_size: int, place: dict[str, Any]
    ):  # fmt: skip
        super().__init__(width, layer, layers, letters, place)
        self.heads, self.head_size = check_heads(width, head_size), head_size
        self.time_faaaa = nn.Parameter(torch.empty(self.heads, head_size, **place))
        self.receptance, self.key, self.value, self.output, self.gate = (
            nn.Linear(width, width, bias=False, **place) for _ in range(5)
        )
        # Dividing by the divisor before the norm is the same as an eps so much larger.
        eps = 1e-5 * _HEAD_SIZE_DIVISOR**2
        self.ln_x = nn.GroupNorm(self.heads, width, eps, **place)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all of these to their official initial values."""
        self.reset_mixes(of_gates=0.5)
        bonus = self.height * (1 - self.ramp(self.time_faaaa)) + 0.1 * self.zigzag(self.time_faaaa)
        self.time_faaaa.copy_(bonus.view_as(self.time_faaaa))
        fill_orthogonal(self.receptance.weight, 1.0)
        fill_orthogonal(self.key.weight, 0.1)
        fill_orthogonal(self.value.weight, 1.0)
        fill_orthogonal(self.gate.weight, 0.1)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.ln_x.weight, ((1 + self.layer) / self.layers) ** 0.7)
        nn.init.zeros_(self.ln_x.bias)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None,
        shard: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Return what is added to the residual, and the state.

        Parameters
        ----------
        x, state, cu_seqlens, shard
            As `RWKV7TimeMix.forward` takes them, with the state of the recurrence, (N, H, K, K).
        """
        last, before = tensors_of(state)
        x, last, cu_seqlens = before_texts(x, last, cu_seqlens, shard)
        inputs, g = self._inputs(x, last, cu_seqlens)
        y, final = recur(self._op, inputs, before, cu_seqlens, shard)
        return self.result(y, g), (last_tokens(x, last, cu_seqlens), final)

    def of_heads(self, x: Tensor) -> Tensor:
        """Return [..., H, N] of [..., C]."""
        return x.view(*x.shape[:-1], self.heads, self.head_size)

    def result(self, y: Tensor, g: Tensor) -> Tensor:
        """Return what is added to the residual, of what the recurrence returns and of the gate."""
        return products(Product(norm_heads(self.ln_x, nn.GroupNorm, y, g, "silu"), self.output))[0]


class Layer(nn.Module):
    """What a layer consists of: time mixing and channel mixing, each behind a norm."""

    _kinds: ClassVar[tuple[Any, Any]]  # of its time mixing and its channel mixing

    def __init__(
        self, width: int, layer: int, layers: int, head_size: int = 64, *, hidden: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self._make(width, layer, layers, head_size, hidden, {"device": device, "dtype": dtype})

    def _make(
        self, width: int, layer: int, layers: int, head_size: int, hidden: int | None, place: dict[str, Any],
        **of_time: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        time_mix, channel_mix = self._kinds
        self.att: Any = time_mix(width, layer, layers, head_size, **of_time, **place)
        self.ffn: Any = channel_mix(width, layer, layers, hidden, **place)
        self.ln0 = None if layer else nn.LayerNorm(width, **place)
        self.ln1, self.ln2 = (nn.LayerNorm(width, **place) for _ in range(2))

    def stepped(
        self, x: Tensor, states: Any, where: dict[str, Any], mix: Callable[[Tensor], tuple[Tensor, Any]],
        mixes: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Return the next layer's input of tokens whose last ones are in a pool, and what else `mix` returns.

        `mix` is the time mixing. `where` says to `shift_mix` which tokens are whose, and which slots they have. `mixes`
        are those of both halves, where they were made before.
        """
        of_time, of_channels = mixes or (mixes_of([half]).squeeze(0) for half in (self.att, self.ffn))
        if self.ln0 is not None:
            x = self.ln0(x)
        norm = self.ln1.weight, self.ln1.bias
        _, mixed = shift_mix(x, *norm, of_time, states.time_shift, eps=self.ln1.eps, **where)
        y, other = mix(mixed)
        norm = self.ln2.weight, self.ln2.bias
        x, mixed = shift_mix(x, *norm, of_channels, states.channel_shift, add=y.to(x.dtype), eps=self.ln2.eps, **where)
        return self.ffn.of_mixed(*mixed, add=x), other

    def reset_parameters(self) -> None:
        """Set all parameters to their official initial values."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]


class Block(Layer):
    """A layer of RWKV-5 or 6, whose mixes are added to the residual."""

    _State: ClassVar[Any]  # the type of what it remembers

    def forward(
        self, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None, shard: Any = None
    ) -> tuple[Tensor, Any]:
        """Return what the next layer reads, and the state after the last tokens, which is not detached.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C)
            The residual; of the first layer the embedding.
        state : RWKV5State or RWKV6State, optional
            The state before this part of the sequences; zeros by default.
        cu_seqlens, shard
            As `RWKV7TimeMix.forward` takes them.
        """
        if self.ln0 is not None:
            x = self.ln0(x)
        wkv, time_shift, of_channels = tensors_of(state, 3)
        of_time = None if state is None else (time_shift, wkv)
        y, (time_shift, wkv) = self.att(self.ln1(x), of_time, cu_seqlens, shard)
        x = x + y
        y, channel_shift = self.ffn(self.ln2(x), of_channels, cu_seqlens, shard)
        return x + y, self._State(wkv, time_shift, channel_shift)

    def step(
        self, x: Tensor, states: Any, slots: Tensor | None, null_index: int, mixes: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return the next layer's input, [B, C], of a token each; pool `states` change at slots above `null_index`."""
        where: dict[str, Any] = {"state_indices": slots, "null_index": null_index}
        x, _ = self.stepped(x, states, where, lambda mixed: (self.att.step(mixed, states.wkv, **where), None), mixes)
        return x
