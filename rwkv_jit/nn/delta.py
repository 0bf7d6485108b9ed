"""Kimi Delta Attention, and gated delta net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rwkv_jit.call.checks import check_lower_bound
from rwkv_jit.nn import common
from rwkv_jit.nn.node import as_node
from rwkv_jit.ops.delta import gated_delta_rule, kda
from rwkv_jit.pool.arguments import count


class _DeltaNet(common.Decoding):
    """Sizes, and what both have of their heads."""

    _sizes = "key_heads", "value_heads", "key_size", "value_size", "conv_width"

    def __init__(
        self, width: int, key_heads: int, value_heads: int, key_size: int, value_size: int, conv_width: int
    ):  # fmt: skip
        sizes = {"width": width, "key_heads": key_heads, "value_heads": value_heads}
        for name, size in {**sizes, "key_size": key_size, "value_size": value_size}.items():
            count(name, size, 1)
        if value_heads % key_heads:
            raise ValueError(f"value_heads: expected a multiple of key_heads {key_heads}, got {value_heads}")
        super().__init__()
        self.width, self.conv_width = width, conv_width
        self.key_heads, self.value_heads, self.key_size, self.value_size = key_heads, value_heads, key_size, value_size
        self.key_width, self.value_width = key_heads * key_size, value_heads * value_size

    def _states(
        self, state: Any, x: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        of_taps = 2 * self.key_width + self.value_width, self.conv_width - 1
        of_text = self.value_heads, self.key_size, self.value_size
        return common.check_both_states(state, x, cu_seqlens, of_taps, of_text)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = mixed.split([self.key_width, self.key_width, self.value_width], -1)
        q, k = (each.unflatten(-1, (self.key_heads, self.key_size)) for each in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_size))


@as_node
class KimiDeltaAttention(_DeltaNet):
    r"""Kimi Delta Attention: a short convolution, the delta rule with a decay of each channel, a norm and a gate.

        q, k, v = silu(conv(q_proj(x))), silu(conv(k_proj(x))), silu(conv(v_proj(x)))
        y = o_proj(norm(kda(q, k, v, f_proj(x), b_proj(x))) sigmoid(g_proj(x)))

    with the recurrence of `kda`, where g is -exp(A_log) softplus(f_proj(x) + dt_bias), beta is sigmoid(b_proj(x)) and q
    and k are divided by their lengths. The norm is the root mean square of a head. B is the batch, T the tokens, C the
    width, G the key heads, H the value heads, K and V the head sizes of keys and values, W the width of the
    convolution, N the sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    width : int
        C.
    key_heads, value_heads : int, key_heads 16 by default
        G and H, which is a multiple of G, and G by default.
    key_size, value_size : int, key_size 128 by default
        K and V, which is K by default.
    conv_width : int, default 4
        W, from 2 to 8.
    lower_bound : float, optional
        Below 0: the log-decay is lower_bound sigmoid(exp(A_log) (f_proj(x) + dt_bias)) then.
    allow_neg_eigval : bool, default False
        Whether beta is 2 sigmoid(b_proj(x)).
    eps : float, default 1e-5
        Of the norm.
    device, dtype : optional
        Of the parameters.

    Attributes
    ----------
    q_proj, k_proj, v_proj, b_proj, o_proj : torch.nn.Linear, weights (G K, C) for two, (H V, C), (H, C) and (C, H V)
        Make queries, keys, values, beta and what is added to the residual.
    q_conv1d, k_conv1d, v_conv1d : torch.nn.Conv1d, weight (G K, 1, W) for two, and (H V, 1, W)
        The taps of each channel, that of the token itself last.
    f_proj, g_proj : torch.nn.Sequential of two torch.nn.Linear, weights (V, C), and (H K, V) and (H V, V)
        Make the decay and the gate, whose second one has a bias (H V,).
    A_log, dt_bias : torch.nn.Parameter, shapes (H,) and (H K,)
        Logarithm of how fast a head decays, and what is added to f_proj(x).
    o_norm : torch.nn.RMSNorm, weight (V,)
        The norm, whose weight is the same for all heads.

    Notes
    -----
    Names, shapes and initial values are those of FLA's layer of this name. A_log and dt_bias may be float32 beside
    other parameters of 16 bits.

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> layer = rwkv_jit.nn.KimiDeltaAttention(96, key_heads=2, key_size=32, device="cuda")
    >>> x = torch.randn(2, 10, 96, device="cuda")
    >>> y, state = layer(x[:, :7])
    >>> rest, state = layer(x[:, 7:], state)
    >>> rest.shape, [each.shape for each in state]
    (torch.Size([2, 3, 96]), [torch.Size([2, 192, 3]), torch.Size([2, 2, 32, 32])])
    """

    def __init__(
        self, width: int, key_heads: int = 16, value_heads: int | None = None, key_size: int = 128,
        value_size: int | None = None, *, conv_width: int = 4, lower_bound: float | None = None,
        allow_neg_eigval: bool = False, eps: float = 1e-5, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        value_heads = key_heads if value_heads is None else value_heads
        value_size = key_size if value_size is None else value_size
        super().__init__(width, key_heads, value_heads, key_size, value_size, conv_width)
        if lower_bound is not None:
            check_lower_bound(lower_bound)
        self.lower_bound, self.allow_neg_eigval = lower_bound, allow_neg_eigval
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = self.key_width, self.value_width
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, size, bias=False, **place) for size in (keys, keys, values)
        )
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            common.short_convolution(size, conv_width, False, place) for size in (keys, keys, values)
        )
        self.f_proj = nn.Sequential(
            nn.Linear(width, value_size, bias=False, **place),
            nn.Linear(value_size, value_heads * key_size, bias=False, **place),
        )
        self.b_proj = nn.Linear(width, value_heads, bias=False, **place)
        self.A_log = nn.Parameter(torch.empty(value_heads, **place))
        self.dt_bias = nn.Parameter(torch.empty(value_heads * key_size, **place))
        self.g_proj = nn.Sequential(
            nn.Linear(width, value_size, bias=False, **place), nn.Linear(value_size, values, **place)
        )
        self.o_norm = nn.RMSNorm(value_size, eps=eps, **place)
        self.o_proj = nn.Linear(values, width, bias=False, **place)
        self._fill()

    def _taps(self) -> dict[str, int]:
        return {"q_conv1d": self.key_width, "k_conv1d": self.key_width, "v_conv1d": self.value_width}

    @torch.no_grad()
    def _fill(self) -> None:
        common.fill_steps(self.dt_bias)
        if self.lower_bound is None:
            common.fill_rates(self.A_log, 1)
        else:
            self.A_log.zero_()

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what is added to the residual, of the shape of x, and the state.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C)
            The normed residual.
        state : tuple of two torch.Tensor, shape (N, 2 G K + H V, W - 1) and (N, H, K, V), optional
            What the call for the part before returned: the last tokens that the convolution reads, of queries, keys and
            values, and the state of `kda`. Zeros by default. Gradients reach both, and what is returned is not
            detached.
        cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
            As `GatedLinearAttention.forward` takes it.
        """
        x = common.under_autocast(common.check_tokens(x, self.width))
        before, state_before = self._states(state, x, cu_seqlens)
        made = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        mixed, last = common.convolve(self, made, self._taps(), before, cu_seqlens)
        g = self.f_proj(x).unflatten(-1, (self.value_heads, self.key_size))
        y, final = common.recur(
            kda, (*self._heads(mixed), g, self.b_proj(x)), state_before, cu_seqlens, A_log=self.A_log,
            dt_bias=self.dt_bias, lower_bound=self.lower_bound, qk_norm=True,
            beta_map="twice_sigmoid" if self.allow_neg_eigval else "sigmoid",
        )  # fmt: skip
        return self.o_proj(common.norm_heads(self.o_norm, nn.RMSNorm, y, self.g_proj(x), "sigmoid")), (last, final)


@as_node
class GatedDeltaNet(_DeltaNet):
    r"""Gated delta net: a short convolution, the delta rule with a decay of each head, a norm and a gate.

        q, k, v, z = in_proj_qkvz(x);   b, a = in_proj_ba(x);   q, k, v = silu(conv1d([q, k, v]))
        y = out_proj(norm(gated_delta_rule(q, k, v, a, b)) silu(z))

    with the recurrence of `gated_delta_rule`, where g is -exp(A_log) softplus(a + dt_bias), beta is sigmoid(b) and q
    and k are divided by their lengths. The norm is the root mean square of a head. The letters are those of
    `KimiDeltaAttention`.

    Parameters
    ----------
    width, key_heads, value_heads, key_size, value_size, conv_width, eps, device, dtype
        As `KimiDeltaAttention` takes them. By default H is 32, V is 128, and eps 1e-6.

    Attributes
    ----------
    in_proj_qkvz, in_proj_ba : torch.nn.Linear, weights (2 G K + 2 H V, C) and (2 H, C)
        Make, for one key head after the other, its query and key, then values and gates of its H / G value heads; and b
        and a of these.
    conv1d : torch.nn.Conv1d, weight (2 G K + H V, 1, W)
        The taps of all queries, all keys and all values, that of the token itself last.
    dt_bias, A_log : torch.nn.Parameter, shape (H,)
        What is added to a, and the logarithm of how fast a head decays.
    norm : torch.nn.RMSNorm, weight (V,)
        The norm, whose weight is the same for all heads.
    out_proj : torch.nn.Linear, weight (C, H V)
        Makes what is added to the residual.

    Notes
    -----
    Names, shapes, initial values and defaults are those of Qwen3-Next. A_log and dt_bias may be float32 beside other
    parameters of 16 bits.

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> layer = rwkv_jit.nn.GatedDeltaNet(96, 2, 4, 32, 32, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, [each.shape for each in state]
    (torch.Size([2, 10, 96]), [torch.Size([2, 256, 3]), torch.Size([2, 4, 32, 32])])
    """

    def __init__(
        self, width: int, key_heads: int = 16, value_heads: int = 32, key_size: int = 128, value_size: int = 128, *,
        conv_width: int = 4, eps: float = 1e-6, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(width, key_heads, value_heads, key_size, value_size, conv_width)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = self.key_width, self.value_width
        self.conv1d = common.short_convolution(2 * keys + values, conv_width, False, place)
        self.in_proj_qkvz = nn.Linear(width, 2 * (keys + values), bias=False, **place)
        self.in_proj_ba = nn.Linear(width, 2 * value_heads, bias=False, **place)
        self.dt_bias = nn.Parameter(torch.empty(value_heads, **place))
        self.A_log = nn.Parameter(torch.empty(value_heads, **place))
        self.norm = nn.RMSNorm(value_size, eps=eps, **place)
        self.out_proj = nn.Linear(values, width, bias=False, **place)
        self._fill()

    def _taps(self) -> dict[str, int]:
        return {"conv1d": 2 * self.key_width + self.value_width}

    @torch.no_grad()
    def _fill(self) -> None:
        self.dt_bias.fill_(1)
        common.fill_rates(self.A_log, 0.01)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what is added to the residual, and the state.

        Parameters
        ----------
        x, state, cu_seqlens
            As `KimiDeltaAttention.forward` takes them, with the state of `gated_delta_rule`.
        """
        x = common.under_autocast(common.check_tokens(x, self.width))
        before, state_before = self._states(state, x, cu_seqlens)
        shared = self.value_heads // self.key_heads
        sizes = [self.key_size, self.key_size, shared * self.value_size, shared * self.value_size]
        *made, z = self.in_proj_qkvz(x).unflatten(-1, (self.key_heads, sum(sizes))).split(sizes, -1)
        of_heads = self.in_proj_ba(x).unflatten(-1, (self.key_heads, 2 * shared)).split([shared, shared], -1)
        mixed, (b, a) = self._joined(made, state_before), self._joined(of_heads, state_before).chunk(2, -1)
        mixed, last = common.convolve(self, mixed, self._taps(), before, cu_seqlens)
        y, final = common.recur(
            gated_delta_rule, (*self._heads(mixed), a, b), state_before, cu_seqlens, A_log=self.A_log,
            dt_bias=self.dt_bias, qk_norm=True, beta_map="sigmoid",
        )  # fmt: skip
        return self.out_proj(common.norm_heads(self.norm, nn.RMSNorm, y, z.flatten(2), "silu")), (last, final)

    def _joined(self, parts: Sequence[Tensor], state: Any) -> Tensor:
        """Return what the key heads have of each part, [B, T, G, size], one part behind another, [B, T, G sizes]."""
        if isinstance(state, common.Pooled):  # one launch copies all of a token
            return torch.cat([each for part in parts for each in part.unbind(2)], -1)
        return torch.cat([part.flatten(2) for part in parts], -1)
