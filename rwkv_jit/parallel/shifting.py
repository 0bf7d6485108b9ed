"""Layers that look at tokens before each: the first ones of a part at the last ones of the parts before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rwkv_jit.call import tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.layers import causal_conv1d as convolution
from rwkv_jit.layers import token_shift as layer
from rwkv_jit.parallel import shard as shards
from rwkv_jit.parallel.shard import Shard
from rwkv_jit.schedules.legal import Activation


def token_shift(x: Array, mixes: Array, amounts: Array | None = None, *, shard: Shard) -> tuple[Tensor, ...]:
    r"""Mix every token with the one before it, which another process may have.

        mixed_m[t] = x_t + (x_{t-1} - x_t) (mixes_m + amounts_m[t])

    The token before a sequence is zeros. B is the batch, T the tokens of this process's part, C the
    channels, M the mixes.

    Parameters
    ----------
    x, mixes, amounts : x a torch.Tensor, shape (B, T, C)
        As `rwkv_jit.token_shift` takes them; of x and amounts this part.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part it is.

    Returns
    -------
    mixed : tuple of M torch.Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `rwkv_jit.token_shift`, and where x is not the part that the shard says.

    Notes
    -----
    One message of B C numbers goes in each direction. All processes of the group call it, forwards and backwards.

    Examples
    --------
    >>> r, w, k, v, a, g = rwkv_jit.parallel.token_shift(x, mixes, shard=shard)
    """
    x, shard = _checked(x, shard)
    x, last = with_last(x)
    return layer.token_shift(x, mixes, amounts, token_before(last, shard), shard.packing(x.device))


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, *, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Convolve every channel with a few tokens before, which other processes may have.

        y_t = activation(bias + sum_j weight_j x_{t-W+1+j}),   j = 0 ... W - 1

    B is the batch, T the tokens of this process's part, C the channels, W the width, N the sequences that have tokens
    in it: B, or the packed sequences of this part.

    Parameters
    ----------
    x, weight, bias : x a torch.Tensor, shape (B, T, C)
        As `rwkv_jit.causal_conv1d` takes them; of x this part.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part it is.
    initial_state : torch.Tensor, shape (N, C, W - 1), dtype of x, optional
        The tokens before the first of each sequence. Where a sequence began in another part, these do not count and
        have no gradient.
    output_final_state : bool, default False
        Also return the last tokens of each sequence in this part.
    activation : {"silu"}, optional
        The function of the sum.

    Returns
    -------
    y, final_state
        As `rwkv_jit.causal_conv1d` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.causal_conv1d`, and where x is not the part that the shard says. Nothing has been sent.

    Notes
    -----
    One message of B C (W - 1) numbers goes in each direction. All processes of the group call it, forwards and
    backwards. Parts may have fewer tokens than W - 1, and none. Gradients of weight and bias are those of this part.

    Examples
    --------
    >>> y, _ = rwkv_jit.parallel.causal_conv1d(x, weight, shard=shard, activation="silu")
    """
    x, shard = _checked(x, shard)
    packing = shard.packing(x.device)
    given: Sequence[Any] = x, weight, bias, initial_state, packing
    _, taps, bias, first, _ = convolution.KIND.check(given, (), activation).inputs  # before anything is sent
    x, last = with_last(x, taps.shape[1] - 1)
    before = tokens_before(last, shard, first, taps.shape[1] - 1)
    return convolution.causal_conv1d(
        x, taps, bias, initial_state=before, output_final_state=output_final_state, cu_seqlens=packing,
        activation=activation,
    )  # fmt: skip


def _checked(x: Any, shard: Any) -> tuple[Tensor, Shard]:
    x, shard = tensors.from_any("x", x), shards.of(shard)
    if x.dim() != 3:
        raise ValueError(f"x: expected shape [batch, tokens, channels], got {list(x.shape)}")
    shard.check("x", x)
    return x, shard


def with_last(x: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
    """Return x and its last tokens, [B, up to count, C]."""
    made: tuple[Tensor, Tensor] = _WithLast.apply(x, count)  # type: ignore[no-untyped-call]
    return made


def token_before(last: Tensor, shard: Shard, first: Tensor | None = None) -> Tensor:
    """Return the token before each sequence of this part; where one begins that of `first`, [B or N, C], or zeros."""
    return tokens_before(last, shard, None if first is None else first.unsqueeze(-1), 1).squeeze(-1)


def tokens_before(last: Tensor, shard: Shard, first: Tensor | None, count: int) -> Tensor:
    """Return the tokens before each sequence of this part, [B or N, C, count], from the last ones of the part.

    Where a sequence begins, they are those of `first`, or zeros.
    """
    rows = last.shape[0] if shard.bounds is None else shard.texts
    if first is None:
        first = last.new_zeros(rows, last.shape[2], count)
    here = last.shape[1] if shard.bounds is None else min(last.shape[1], shard.bounds[-1] - shard.bounds[-2])
    behind = first if shard.bounds is None else first[-1:]
    is_open = shard.is_continued and shard.texts == 1  # what comes before the tokens of this part is not known yet
    if is_open:
        behind = torch.zeros_like(behind)
    window = torch.cat([behind[..., here:], last[:, last.shape[1] - here :].mT], -1)  # [B, C, count]
    before: Tensor = _Before.apply(window, here if is_open else count, shard)  # type: ignore[no-untyped-call]
    # What is not awaited is zeros; it is added, so that all processes go backwards through the message.
    if shard.bounds is None:
        return before if shard.is_continued else before + first
    return torch.cat([before if shard.is_continued else before + first[:1], first[1:]])


class _WithLast(torch.autograd.Function):
    """The last tokens beside all: their gradient costs a copy, where that of a slice is filled with zeros and added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x[:, max(x.shape[1] - count, 0) :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, grad_last: Tensor) -> tuple[Tensor, None]:
        dx = dx.clone()  # others may have it too
        dx[:, dx.shape[1] - grad_last.shape[1] :] += grad_last
        return dx, None


class _Before(torch.autograd.Function):
    """The tokens before a part: the last window behind another is that one, moved by as many tokens as are new."""

    @staticmethod
    def forward(ctx: Any, window: Tensor, new: int, shard: Shard) -> Tensor:
        batch, channels, count = window.shape
        shard.agree(f"tokens of {window.dtype} with B {batch}, C {channels}, W {count + 1}", window.device)
        told = shard.gather(torch.cat([window.flatten(), window.new_tensor([new])])).wait()  # [ranks, B C count + 1]
        # By how many tokens each rank moves a window: numbers on the GPU, which the host does not wait for.
        ctx.moves, ctx.shard = told[:, -1].to(torch.int64), shard
        before = torch.zeros_like(window)
        if shard.is_continued:
            for rank, other in enumerate(told[: shard.rank, :-1]):
                before = other.view_as(window) + _moved(before, ctx.moves[rank])
        return before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shard, behind = ctx.shard, torch.zeros_like(grad)
        told = shard.gather(grad if shard.is_continued else behind).wait()  # [ranks, B, C, count]
        for rank in range(shard.size - 1, shard.rank, -1):
            behind = told[rank] + _moved(behind, -ctx.moves[rank])
        return behind, None, None


def _moved(x: Tensor, by: Tensor) -> Tensor:
    """Return windows [..., count] moved to the front by a number of tokens, or below zero to the back."""
    count = x.shape[-1]
    return F.pad(x, (count, count)).index_select(-1, torch.arange(count, 2 * count, device=x.device) + by)
