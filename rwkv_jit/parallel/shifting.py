"""Token shift over parts: the first token of a part is mixed with the last one of the part before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_jit.call import tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.layers import token_shift as layer
from rwkv_jit.parallel import shard as shards
from rwkv_jit.parallel.shard import Shard


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
        As `rwkv_jit.token_shift`, and where x is not the part that the shard says, or a part of a batch has no tokens.

    Notes
    -----
    One message of B C numbers goes in each direction. All processes of the group call it, forwards and backwards.

    Examples
    --------
    >>> r, w, k, v, a, g = rwkv_jit.parallel.token_shift(x, mixes, shard=shard)
    """
    x, shard = tensors.from_any("x", x), shards.of(shard)
    if x.dim() != 3:
        raise ValueError(f"x: expected shape [batch, tokens, channels], got {list(x.shape)}")
    shard.check("x", x)
    if shard.bounds is None and not x.shape[1]:
        raise ValueError(f"x: expected at least one token in every part, got shape {list(x.shape)}")
    x, last = with_last(x)
    cu_seqlens = None if shard.bounds is None else shard.cu_seqlens(x.device)
    return layer.token_shift(x, mixes, amounts, token_before(last, shard), cu_seqlens)


def with_last(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and its last token [B, C]; zeros where it has no tokens."""
    made: tuple[Tensor, Tensor] = _WithLast.apply(x)  # type: ignore[no-untyped-call]
    return made


def token_before(last: Tensor, shard: Shard, first: Tensor | None = None) -> Tensor:
    """Return the token before each sequence of this part; where one begins that of `first`, [B or N, C], or zeros."""
    before: Tensor = _TokenBefore.apply(last, shard)  # type: ignore[no-untyped-call]
    if first is None:
        first = before.new_zeros(before.shape[0] if shard.bounds is None else shard.texts, before.shape[1])
    if shard.bounds is None:
        return before if shard.is_continued else before + first
    # What is not awaited is zeros; it is added, so that all processes go backwards through the message.
    return torch.cat([before if shard.is_continued else before + first[:1], first[1:]])


class _WithLast(torch.autograd.Function):
    """The last token beside all: its gradient costs a copy, where that of a slice is filled with zeros and added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        last = x[:, -1].clone() if x.shape[1] else x.new_zeros(x.shape[0], x.shape[2])
        return x.view_as(x), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, grad_last: Tensor) -> Tensor:
        dx = dx.clone()  # others may have it too
        if dx.shape[1]:
            dx[:, -1] += grad_last
        return dx


class _TokenBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, last: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        shard.agree(f"token_shift of {last.dtype} with B {last.shape[0]}, C {last.shape[1]}", last.device)
        told = shard.gather(last).wait()
        return told[shard.rank_before].clone() if shard.is_continued else torch.zeros_like(last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        told = shard.gather(grad).wait()
        return told[shard.rank_behind].clone() if shard.is_to_be_continued else torch.zeros_like(grad), None
