"""The modules of an RWKV-7 layer, with the parameters of the official model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rwkv_jit.kernels.errors import brief
from rwkv_jit.layers.norm_shift import norm_shift
from rwkv_jit.layers.prepare_keys import prepare_keys
from rwkv_jit.layers.token_shift import token_shift
from rwkv_jit.nn import common
from rwkv_jit.nn.mixing import Channels, Layer, Mix
from rwkv_jit.nn.node import as_node
from rwkv_jit.nn.products import Product, products
from rwkv_jit.ops.wkv7 import wkv7
from rwkv_jit.plain.layers import last_tokens
from rwkv_jit.pool import arguments
from rwkv_jit.pool.functions import wkv7_update

_EPS_OF_HEADS = 64e-5
# The ranks of the low-rank matrices are these times the square root of the width, in steps of 32.
_RANKS = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}
# How fast the share of the token before falls over the channels of a mix, in the first layer.
_SLOPES = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


@common.in_files
class RWKV7State(NamedTuple):
    """What a layer of RWKV-7 remembers of N sequences, by the names of `StatePool.rwkv7`.

    Attributes
    ----------
    wkv : torch.Tensor, shape (N, H, V, K)
        The state of `wkv7`.
    time_shift, channel_shift : torch.Tensor, shape (N, C)
        The last token that time mixing and channel mixing read.
    """

    wkv: Tensor
    time_shift: Tensor
    channel_shift: Tensor

    def detach(self) -> RWKV7State:
        """Return the same without its history: backpropagation through time ends there."""
        return RWKV7State(*(x.detach() for x in self))


@as_node
class RWKV7TimeMix(Mix):
    """Time mixing of RWKV-7, with the names, shapes and initial values of the official parameters.

    B is the batch, T the tokens, C the channels, H the heads, K and V the head size, N the number of sequences: B, or
    one less than the length of `cu_seqlens`.

    Parameters
    ----------
    width : int
        C, a multiple of the head size.
    layer : int
        Which layer this is, from 0. The first one has no v0, v1 and v2: its values are those that others mix in.
    layers : int
        How many the model has. Initial values depend on it.
    head_size : int, default 64
        K and V.
    ranks : mapping of str to int, optional
        The ranks of the low-rank matrices of "w", "a", "v" and "g". Those that it lacks are as in the official model:
        2.5 times the square root of the width for w and a, 1.7 for v and 5 for g, rounded to a multiple of 32, at
        least 32.
    device : torch.device or str, optional
        Where parameters are.
    dtype : torch.dtype, optional
        Of the parameters.

    Notes
    -----
    It consists of `token_shift`, `prepare_keys`, `wkv7`, `gated_norm` and `activate`, which say what their errors are,
    and of matrix products of torch. Under `torch.autocast` its input is cast as these cast theirs; w stays float32
    where w0 is.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456. Names, ranks and initial
    values are those of RWKV-LM's trainer, https://github.com/BlinkDL/RWKV-LM.

    Examples
    --------
    >>> mix = rwkv_jit.nn.RWKV7TimeMix(128, layer=0, layers=2, device="cuda")
    >>> y, v_first, state = mix(torch.randn(2, 5, 128, device="cuda"))
    >>> y.shape, v_first.shape, [x.shape for x in state]
    (torch.Size([2, 5, 128]), torch.Size([2, 5, 128]), [torch.Size([2, 128]), torch.Size([2, 2, 64, 64])])
    """

    _sizes, prefix = ("layer", "layers", "head_size"), "x"

    def __init__(
        self, width: int, layer: int, layers: int, head_size: int = 64, *, ranks: Mapping[str, int] | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, layer, layers, "".join(_SLOPES), place)
        self.is_first = layer == 0  # so that compiled code of one layer is that of others
        self.heads, self.head_size = common.check_heads(width, head_size), head_size
        self.ranks = _ranks(width, {} if ranks is None else ranks)

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **place))

        def low_rank(letter: str) -> tuple[nn.Parameter, nn.Parameter]:
            return new(width, self.ranks[letter]), new(self.ranks[letter], width)

        self.w0, (self.w1, self.w2) = new(1, 1, width), low_rank("w")
        self.a0, (self.a1, self.a2) = new(1, 1, width), low_rank("a")
        if not self.is_first:
            self.v0, (self.v1, self.v2) = new(1, 1, width), low_rank("v")
        self.g1, self.g2 = low_rank("g")
        self.k_k, self.k_a = new(1, 1, width), new(1, 1, width)
        self.r_k = new(self.heads, head_size)
        self.receptance, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False, **place) for _ in range(4)
        )
        self.ln_x = nn.GroupNorm(self.heads, width, eps=_EPS_OF_HEADS, **place)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give all parameters their initial values: those that the official trainer begins with."""
        falling = 1 - self.layer / self.layers
        place = torch.arange(self.width, dtype=torch.float32, device=self.k_k.device)
        along = place / max(self.width - 1, 1)
        in_head = 2 * (place % self.head_size) / max(self.head_size - 1, 1) - 1
        zigzag, linear = in_head * in_head.abs(), along - 0.5
        vectors = {f"x_{x}": 1 - (place / self.width) ** (slope * falling) for x, slope in _SLOPES.items()}
        vectors["w0"] = -5.5 + 6 * along ** (1 + self.height**0.3) + 2.5 * zigzag
        vectors["a0"] = -0.19 + 0.3 * zigzag + 0.4 * linear
        vectors["v0"] = 0.73 - 0.4 * linear
        vectors["k_k"] = 0.71 - 0.1 * linear
        for name, parameter in self.named_parameters(recurse=False):
            if name in vectors:
                parameter.copy_(vectors[name].expand_as(parameter))
            elif name.endswith("1"):
                parameter.zero_()
            elif name.endswith("2"):
                rows, columns = parameter.shape
                common.fill_orthogonal(parameter, 0.1 * max(rows / columns, 1) ** 0.5)
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        for matrix, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0)):
            common.fill_orthogonal(matrix.weight, gain)
        self.output.weight.zero_()
        self.ln_x.weight.fill_(((1 + self.layer) / self.layers) ** 0.7)
        self.ln_x.bias.zero_()

    def forward(
        self, x: Tensor, v_first: Tensor | None = None, state: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None, shard: Any = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Mix tokens over time.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C)
            The normed residual.
        v_first : torch.Tensor, shape (B, T, C), optional
            The values of the first layer, which that one makes and all others need.
        state : tuple of two torch.Tensor, shape (N, C) and (N, H, V, K), optional
            The last token of x before this part of the sequences, and the state of `wkv7`; zeros by default. Gradients
            reach both.
        cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
            Bounds of N packed sequences: where each begins, and where the last one ends. B is then 1.
        shard : rwkv_jit.parallel.Shard, optional
            The part of the sequences that this process has. It has their bounds if they are packed. States and tokens
            before them count only where sequences begin.

        Returns
        -------
        y : torch.Tensor, shape (B, T, C)
        v_first : torch.Tensor, shape (B, T, C)
        state : tuple of two torch.Tensor
            That after the last tokens. It is not detached.
        """
        first, before = common.tensors_of(state)
        x, first, cu_seqlens = common.before_texts(x, first, cu_seqlens, shard)
        mixed = token_shift(x, self.mixes(), first=first, cu_seqlens=cu_seqlens)
        y, v_first, after = self.of_mixed(mixed, v_first, before, cu_seqlens, shard)
        return y, v_first, (last_tokens(x, first, cu_seqlens), after)

    def of_mixed(
        self, mixed: Sequence[Tensor], v_first: Tensor | None, state: Tensor | None = None,
        cu_seqlens: Tensor | None = None, shard: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the results for tokens that have been mixed by `mixes`: six tensors [B, T, C]."""
        inputs, gate, v_first, (bonus,) = self._inputs(mixed, v_first, has_bonus=True)
        y, after = common.recur(wkv7, inputs, state, cu_seqlens, shard, decay="sigmoid")
        return self._output(y, gate, bonus=bonus), v_first, after

    def step(
        self, mixed: Tensor, v_first: Tensor | None, states: Tensor, slots: Tensor | None, null_index: int
    ) -> tuple[Tensor, Tensor]:
        """Mix one token of each sequence, by `mixes` [6, B, C]; states in slots of a pool change in place."""
        where: dict[str, Any] = {"state_indices": slots, "null_index": null_index, "decay": "sigmoid"}
        return self.with_recurrence(mixed, v_first, partial(wkv7_update, states, **where))

    def with_recurrence(
        self, mixed: Tensor, v_first: Tensor | None, recurrence: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return what the module makes of mixed tokens, by a recurrence of the caller's.

        Parameters
        ----------
        mixed : torch.Tensor, shape (6, ..., C)
            The tokens for r, w, k, v, a and g, mixed with those before them as `mixes` says.
        v_first : torch.Tensor, shape (..., C), or None
            The values of the first layer, which all others need.
        recurrence : callable
            Takes r, w, k, v, a and b, (..., H, N), and returns y in this shape; its decay is "sigmoid", with w0 in w.

        Returns
        -------
        y : torch.Tensor, shape (..., C)
        v_first : torch.Tensor, shape (..., C)
        """
        inputs, gate, v_first, _ = self._inputs(mixed.unbind(), v_first)
        r, _, k, v, *_ = inputs
        return self._output(recurrence(*inputs), gate, r=r, k=k, v=v, r_k=self.r_k), v_first

    def _inputs(
        self, mixed: Any, v_first: Tensor | None, has_bonus: bool = False
    ) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
        """Return what the recurrence reads, the gate of what it makes, the first layer's values, and a bonus if asked.

        The bonus is made with the keys where gradients may be wanted: so they have one source for k, and one for v.
        """
        xr, xw, xk, xv, xa, xg = mixed
        r, k, w, rate, gate, v, *v_gate = products(
            Product(xr, self.receptance), Product(xk, self.key), Product(xw, self.w1, function="tanh"),
            Product(xa, self.a1), Product(xg, self.g1, function="sigmoid"), Product(xv, self.value),
            *(() if self.is_first else (Product(xv, self.v1),)),
        )  # fmt: skip
        # Under autocast w0 stays float32, and so does w.
        w, rate, gate, *v_gate = products(
            Product(w, self.w2, self.w0.view(-1)), Product(rate, self.a2), Product(gate, self.g2),
            *(Product(x, self.v2) for x in v_gate),
        )  # fmt: skip
        r, w, k, by_head = (x.unflatten(-1, (self.heads, self.head_size)) for x in (r, w, k, v))
        more: dict[str, Any] = {"a0": self.a0.view(-1)}
        if has_bonus:
            more |= {"r": r, "r_k": self.r_k}
        if self.is_first:
            v_first = v
        elif v_first is None:
            raise ValueError(f"v_first: layer {self.layer} needs the values of the first layer, got None")
        else:
            more |= {"v_first": v_first, "v_gate": v_gate[0], "v0": self.v0.view(-1)}
        k, v, a, b, *bonus = prepare_keys(k, by_head, rate, self.k_k.view(-1), self.k_a.view(-1), **more)
        return [r, w, k, v, a, b], gate, v_first, bonus

    def _output(self, y: Tensor, gate: Tensor, **bonus: Any) -> Tensor:
        y = common.norm_heads(self.ln_x, nn.GroupNorm, y, gate, "identity", **bonus)
        return products(Product(y, self.output))[0]


@as_node
class RWKV7ChannelMix(Channels):
    """Channel mixing of RWKV-7, with the names, shapes and initial values of the official parameters.

    The letters are those of `RWKV7TimeMix`.

    Parameters
    ----------
    width, layer, layers
        As `RWKV7TimeMix` takes them.
    hidden : int, optional
        Channels between the two matrices; four times the width by default.
    device, dtype
        As `RWKV7TimeMix` takes them.

    Notes
    -----
    It consists of `token_shift`, `activate` and matrix products of torch.

    Examples
    --------
    >>> mix = rwkv_jit.nn.RWKV7ChannelMix(128, layer=0, layers=2, device="cuda")
    >>> y, state = mix(torch.randn(2, 5, 128, device="cuda"))
    >>> y.shape, state.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 128]))
    """

    prefix = "x"
    x_k: nn.Parameter

    def __init__(
        self, width: int, layer: int, layers: int, hidden: int | None = None, *, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, layer, layers, "k", place)
        hidden = 4 * width if hidden is None else arguments.count("hidden", hidden, 1)
        self.key = nn.Linear(width, hidden, bias=False, **place)
        self.value = nn.Linear(hidden, width, bias=False, **place)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give all parameters their initial values: those that the official trainer begins with."""
        place = torch.arange(self.width, dtype=torch.float32, device=self.x_k.device)
        self.x_k.copy_((1 - (place / self.width) ** (1 - self.layer / self.layers) ** 4).expand_as(self.x_k))
        common.fill_orthogonal(self.key.weight, 1.0)
        self.value.weight.zero_()

    def of_mixed(self, mixed: Tensor, add: Tensor | None = None) -> Tensor:
        """Return the results for tokens that have been mixed with those before them, added to something."""
        (hidden,) = products(Product(mixed, self.key, function="relu_squared"))
        return products(Product(hidden, self.value, add=add))[0]


@as_node
class RWKV7Block(Layer):
    """A layer of RWKV-7: time mixing, then channel mixing, each behind a norm and added to the residual.

    The letters are those of `RWKV7TimeMix`.

    Parameters
    ----------
    width, layer, layers, head_size
        As `RWKV7TimeMix` takes them. The first layer has the norm of the embedding, ln0, too.
    hidden : int, optional
        Of channel mixing; four times the width by default.
    ranks, device, dtype
        As `RWKV7TimeMix` takes them.

    Examples
    --------
    >>> block = rwkv_jit.nn.RWKV7Block(128, layer=0, layers=2, device="cuda")
    >>> x, v_first, state = block(torch.randn(2, 5, 128, device="cuda"))
    >>> x.shape, state.wkv.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 2, 64, 64]))
    """

    _kinds = RWKV7TimeMix, RWKV7ChannelMix

    def __init__(
        self, width: int, layer: int, layers: int, head_size: int = 64, *, hidden: int | None = None,
        ranks: Mapping[str, int] | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self._make(width, layer, layers, head_size, hidden, {"device": device, "dtype": dtype}, ranks=ranks)

    def forward(
        self, x: Tensor, v_first: Tensor | None = None, state: RWKV7State | None = None,
        cu_seqlens: Tensor | None = None, shard: Any = None,
    ) -> tuple[Tensor, Tensor, RWKV7State]:  # fmt: skip
        """Return what the next layer reads.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C)
            The residual; of the first layer the embedding.
        state : RWKV7State, optional
            The state before this part of the sequences; zeros by default.
        v_first, cu_seqlens, shard
            As `RWKV7TimeMix.forward` takes them.

        Returns
        -------
        x, v_first : torch.Tensor, shape (B, T, C)
        state : RWKV7State
            That after the last tokens. It is not detached.
        """
        if self.ln0 is not None:
            x = self.ln0(x)
        wkv, time_shift, channel_shift = common.tensors_of(state, 3)
        if not common.is_plain_block(self):
            of_time = None if state is None else (time_shift, wkv)
            y, v_first, (time_shift, wkv) = self.att(self.ln1(x), v_first, of_time, cu_seqlens, shard)
            x = x + y
            y, channel_shift = self.ffn(self.ln2(x), channel_shift, cu_seqlens, shard)
            return x + y, v_first, RWKV7State(wkv, time_shift, channel_shift)
        cu_seqlens = common.bounds_of(x, cu_seqlens, shard)
        x, mixed, time_shift = self._begin(x, None, self.ln1, self.att.mixes(), time_shift, cu_seqlens, shard)
        y, v_first, wkv = self.att.of_mixed(mixed, v_first, wkv, cu_seqlens, shard)
        x, mixed, channel_shift = self._begin(x, y, self.ln2, self.ffn.mixes(), channel_shift, cu_seqlens, shard)
        return self.ffn.of_mixed(mixed[0], x), v_first, RWKV7State(wkv, time_shift, channel_shift)

    @staticmethod
    def _begin(
        x: Tensor, add: Tensor | None, norm: nn.LayerNorm, mixes: Tensor, first: Tensor | None,
        cu_seqlens: Tensor | None, shard: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:  # fmt: skip
        """Return the residual, what a half of the layer reads of its norm, and the last token of that."""
        dtype = common.dtype_under_autocast(x)
        first = None if first is None else first.to(dtype)
        if shard is not None:
            x, add, first = common.normed_before_texts(x, add, norm, first, shard)
        more: dict[str, Any] = {"add": add, "first": first, "cu_seqlens": cu_seqlens, "eps": norm.eps, "dtype": dtype}
        return norm_shift(x, norm.weight, norm.bias, mixes, **more)

    def step(
        self, x: Tensor, v_first: Tensor | None, states: RWKV7State, slots: Tensor | None, null_index: int,
        mixes: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the input of the next layer for one token of each sequence; states change in place.

        x is [B, C], states are the layer's part of a pool, and a slot at or below `null_index` is none. `mixes` are
        those of both halves, where a model has made those of all its layers together.
        """
        where: dict[str, Any] = {"state_indices": slots, "null_index": null_index}
        return self.stepped(
            x, states, where, lambda mixed: self.att.step(mixed, v_first, states.wkv, slots, null_index), mixes
        )


def _ranks(width: int, given: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise TypeError(f"ranks: expected a mapping of w, a, v and g to ints, got {brief(given)}")
    unknown = [name for name in given if name not in _RANKS]
    if unknown:
        raise ValueError(f"ranks: expected w, a, v and g, got {', '.join(map(str, unknown))}")
    own = {letter: max(32, 32 * round(times * width**0.5 / 32)) for letter, times in _RANKS.items()}
    return own | {letter: arguments.count(f"ranks of {letter}", rank, 1) for letter, rank in given.items()}
