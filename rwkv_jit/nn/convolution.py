"""TimeX: a causal convolution of each channel."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rwkv_jit.nn.common import check_tokens
from rwkv_jit.ops.timex import timex
from rwkv_jit.pool.arguments import count


class TimeX(nn.Module):
    r"""A causal convolution of every channel with a separate filter, as long as a sequence may be.

        y[b, t, c] = eps + sum_{s <= t} weight[c, length-1-(t-s)] x[b, s, c]

    B is the batch, T the tokens, C the channels.

    Parameters
    ----------
    channels : int
        C.
    length : int
        The most tokens of a sequence, from 1.
    eps : float, default 0.0
        Added to every output.
    device, dtype : optional
        Of the parameter.

    Attributes
    ----------
    weight : torch.nn.Parameter, shape (C, length)
        The filters: the last element is for the current token, the first for length - 1 tokens ago.

    Raises
    ------
    TypeError, ValueError
        A size does not fit, or a sequence is longer than the filters: the name, what was expected and what came.

    Notes
    -----
    Initial values are those of a depthwise torch.nn.Conv1d of that length. Outputs for a part of a sequence need all
    tokens before it: there is no state, and sequences are not packed.

    References
    ----------
    Peng, RWKV-CUDA, depthwise_conv_1d: the operator; nothing of its code.

    Examples
    --------
    >>> layer = rwkv_jit.nn.TimeX(96, 1000, device="cuda")
    >>> y = layer(torch.randn(4, 700, 96, device="cuda"))
    >>> y.shape
    torch.Size([4, 700, 96])
    """

    def __init__(
        self, channels: int, length: int, eps: float = 0.0, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.eps = eps
        sizes = count("channels", channels, 1), count("length", length, 1)
        self.weight = nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the filters to their initial values."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of each sequence.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C), T up to `length`
            The tokens. The result is in the memory of a [B, C, T].
        """
        channels, length = self.weight.shape
        tokens = check_tokens(x, channels).shape[1]
        if tokens > length:
            raise ValueError(f"x: expected up to {length} tokens, got {tokens}")
        return timex(self.weight[:, length - tokens :], x.transpose(1, 2), self.eps).transpose(1, 2)
