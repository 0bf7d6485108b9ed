"""Linear attention, and gated linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rwkv_jit.nn.common import Decoding, check_tokens, is_plain_norm, norm_heads, recur, under_autocast
from rwkv_jit.nn.node import as_node
from rwkv_jit.ops.gla import gla
from rwkv_jit.ops.linear_attention import linear_attention
from rwkv_jit.pool.arguments import count

_EPS, _GATE_RANK, _GATE_DIVISOR = 1e-5, 16, 16


class _Attention(Decoding):
    """Queries, keys and values of heads, and the matrix behind them."""

    _sizes = ("heads",)

    def __init__(self, width: int, heads: int, key_width: int, value_width: int, place: dict[str, Any]):
        count("width", width, 1), count("heads", heads, 1)
        for name, size in (("key_width", key_width), ("value_width", value_width)):
            if count(name, size, 1) % heads:
                raise ValueError(f"{name}: expected a multiple of heads {heads}, got {size}")
        super().__init__()
        self.width, self.heads = width, heads
        self.q_proj = nn.Linear(width, key_width, bias=False, **place)
        self.k_proj = nn.Linear(width, key_width, bias=False, **place)
        self.v_proj = nn.Linear(width, value_width, bias=False, **place)
        self.o_proj = nn.Linear(value_width, width, bias=False, **place)

    def _of_heads(self, x: Tensor) -> Tensor:
        """Return [B, T, H, N] of [B, T, H N]."""
        return x.view(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)


@as_node
class GatedLinearAttention(_Attention):
    r"""Gated linear attention, with a norm of each head and a gate behind it.

        y = o_proj(norm(gla(q_proj(x), k_proj(x), v_proj(x), g)) silu(g_proj(x)));   g = logsigmoid(gk_proj(x)) / 16

    with the recurrence of `gla`, and the root mean square for a norm. B is the batch, T the tokens, C the width, H the
    heads, K and V the head sizes of keys and values, N the sequences.

    Parameters
    ----------
    width, heads : int, heads 4 by default
        C and H.
    key_width, value_width : int, optional
        H K and H V; C / 2 and C by default.
    device, dtype : optional
        Of the parameters.

    Attributes
    ----------
    q_proj, k_proj, v_proj, g_proj, o_proj : torch.nn.Linear, C to H K for two, C to H V for two, and H V to C
        Make queries, keys, values, the gate and what is added to the residual.
    gk_proj : torch.nn.Sequential of two torch.nn.Linear, C to 16 to H K
        Make the decay; the second one has a bias.
    g_norm_swish_gate : torch.nn.RMSNorm of V
        The norm, whose weight is the same for all heads.

    Notes
    -----
    Names, shapes and initial values are those of FLA's layer of this name, with its defaults.

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> layer = rwkv_jit.nn.GatedLinearAttention(96, device="cuda")
    >>> x = torch.randn(2, 10, 96, device="cuda")
    >>> y, state = layer(x[:, :7])
    >>> rest, state = layer(x[:, 7:], state)
    >>> rest.shape, state.shape
    (torch.Size([2, 3, 96]), torch.Size([2, 4, 12, 24]))
    """

    def __init__(
        self, width: int, heads: int = 4, key_width: int | None = None, value_width: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        key_width = count("width", width, 1) // 2 if key_width is None else key_width
        value_width = width if value_width is None else value_width
        super().__init__(width, heads, key_width, value_width, place)
        self.g_proj = nn.Linear(width, value_width, bias=False, **place)
        self.gk_proj = nn.Sequential(
            nn.Linear(width, _GATE_RANK, bias=False, **place), nn.Linear(_GATE_RANK, key_width, **place)
        )
        self.g_norm_swish_gate = nn.RMSNorm(value_width // heads, eps=_EPS, **place)

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what is added to the residual, of the shape of x, and the state of `gla`.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C)
            The normed residual.
        state : torch.Tensor, shape (N, H, K, V), optional
            What the call for the part before returned; zeros by default. Gradients reach it, and what is returned is
            not detached. N is B where no sequences are packed.
        cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
            Bounds of N packed sequences: where each begins, and where the last one ends. B is then 1.
        """
        x = under_autocast(check_tokens(x, self.width))
        made = self.q_proj(x), self.k_proj(x), self.v_proj(x), F.logsigmoid(self.gk_proj(x)) / _GATE_DIVISOR
        q, k, v, g = map(self._of_heads, made)
        y, final = recur(gla, (q, k, v, g), state, cu_seqlens)
        return self.o_proj(norm_heads(self.g_norm_swish_gate, nn.RMSNorm, y, self.g_proj(x), "silu")), final


@as_node
class LinearAttention(_Attention):
    r"""Linear attention, with a norm of each head behind it.

        y = o_proj(norm(linear_attention(f(q_proj(x)), f(k_proj(x)), v_proj(x))));   f(x) = elu(x) + 1

    with the recurrence of `linear_attention`, and the root mean square for a norm, which makes up for the sum of the
    weights. The letters are those of `GatedLinearAttention`.

    Parameters
    ----------
    width, heads, key_width, value_width, device, dtype
        As `GatedLinearAttention` takes them, with 8 heads by default, and H K and H V of C.

    Attributes
    ----------
    q_proj, k_proj, v_proj, o_proj : torch.nn.Linear, C to H K for two, C to H V and H V to C
        Make queries, keys, values, and what is added to the residual.
    norm : torch.nn.RMSNorm of V
        The norm, whose weight is the same for all heads.

    Notes
    -----
    Names, shapes and initial values are those of FLA's layer of this name, with its feature map "elu".

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> layer = rwkv_jit.nn.LinearAttention(96, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, state.shape
    (torch.Size([2, 10, 96]), torch.Size([2, 8, 12, 12]))
    """

    def __init__(
        self, width: int, heads: int = 8, key_width: int | None = None, value_width: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        key_width = width if key_width is None else key_width
        value_width = width if value_width is None else value_width
        super().__init__(width, heads, key_width, value_width, place)
        self.norm = nn.RMSNorm(value_width // heads, eps=_EPS, **place)

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what is added to the residual, and the state of `linear_attention`.

        Parameters
        ----------
        x, state, cu_seqlens
            As `GatedLinearAttention.forward` takes them, the state of the same shape.
        """
        x = under_autocast(check_tokens(x, self.width))
        q, k, v = map(self._of_heads, (F.elu(self.q_proj(x)) + 1, F.elu(self.k_proj(x)) + 1, self.v_proj(x)))
        y, final = recur(linear_attention, (q, k, v), state, cu_seqlens)
        if is_plain_norm(self.norm, nn.RMSNorm, v.shape[3]):  # whose weight autocast has left as it is
            y = F.rms_norm(y, v.shape[3:], self.norm.weight.to(y.dtype), self.norm.eps)
        else:
            y = self.norm(y)
        return self.o_proj(y.flatten(2)), final
