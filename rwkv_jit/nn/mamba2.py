"""Mamba-2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rwkv_jit.nn import common
from rwkv_jit.nn.node import as_node
from rwkv_jit.ops.diagonal import ssd
from rwkv_jit.plain.reference import STRONGEST_RAW
from rwkv_jit.pool.arguments import count


@as_node
class Mamba2(common.Decoding):
    r"""Mamba-2: a short convolution, a state space, a gate and a norm behind it.

        z, xBC, dt = in_proj(u);   x, B, C = silu(conv1d(xBC))
        y = out_proj(norm(ssd(x, softplus(dt + dt_bias), -exp(A_log), B, C, D) silu(z)))

    with the recurrence of `ssd`, and the root mean square for a norm; u is the input. Of the shapes below B is the
    batch, T the tokens, C the width, H the heads, V the head size, K the size of the state for each channel, G the
    groups, W the width of the convolution, N the sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    width, heads : int, heads optional
        C, and H, a multiple of G; 2 C / V by default.
    head_size, state_size, groups : int, default 64, 128 and 1
        V, K and G: how many B and C there are, which neighbouring heads share.
    norm_groups : int, optional
        How many parts of H V channels have separate norms; G by default, as in mamba_ssm. transformers has 1.
    conv_width : int, default 4
        W, from 2 to 8.
    dt_limit : pair of float, default (0.0, inf)
        The least and the largest step: others are clamped to these.
    eps : float, default 1e-5
        Of the norm.
    device, dtype : optional
        Of the parameters.

    Attributes
    ----------
    in_proj : torch.nn.Linear, weight (2 H V + 2 G K + H, C)
        Makes z, then x, B and C, then dt.
    conv1d : torch.nn.Conv1d, weight (H V + 2 G K, 1, W), bias (H V + 2 G K,)
        The taps of x, B and C, that of the token itself last.
    dt_bias, A_log, D : torch.nn.Parameter, shape (H,)
        What is added to dt; the logarithm of how fast a head decays, where above 88 is as 88; how much of x is added to
        what is read.
    norm : torch.nn.RMSNorm, weight (H V,)
        The weight and the eps of the norm. With several groups it is not called, and hooks of it neither.
    out_proj : torch.nn.Linear, weight (C, H V)
        Makes what is added to the residual.

    Notes
    -----
    Names, shapes and initial values are those of mamba_ssm. A_log, D and dt_bias may be float32 beside other parameters
    of 16 bits. The gate and the norm are float32.

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> layer = rwkv_jit.nn.Mamba2(96, head_size=32, state_size=16, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> y.shape, [each.shape for each in state]
    (torch.Size([2, 10, 96]), [torch.Size([2, 224, 3]), torch.Size([2, 6, 32, 16])])
    """

    _sizes = "heads", "head_size", "state_size", "groups", "norm_groups", "conv_width"

    def __init__(
        self, width: int, heads: int | None = None, head_size: int = 64, state_size: int = 128, groups: int = 1, *,
        norm_groups: int | None = None, conv_width: int = 4, dt_limit: tuple[float, float] = (0.0, math.inf),
        eps: float = 1e-5, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        count("width", width, 1), count("state_size", state_size, 1), count("groups", groups, 1)
        if heads is None:
            if 2 * width % count("head_size", head_size, 1):
                raise ValueError(f"head_size: expected a divisor of 2 * width {2 * width}, got {head_size}")
            heads = 2 * width // head_size
        inner = count("heads", heads, 1) * count("head_size", head_size, 1)
        if heads % groups:
            raise ValueError(f"groups: expected a divisor of heads {heads}, got {groups}")
        norm_groups = groups if norm_groups is None else norm_groups
        if inner % count("norm_groups", norm_groups, 1):
            raise ValueError(f"norm_groups: expected a divisor of heads * head_size {inner}, got {norm_groups}")
        super().__init__()
        self.width, self.heads, self.head_size, self.state_size = width, heads, head_size, state_size
        self.groups, self.norm_groups, self.conv_width = groups, norm_groups, conv_width
        self.dt_limit = dt_limit
        self.sizes = inner, inner + 2 * groups * state_size, heads
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(width, sum(self.sizes), bias=False, **place)
        self.conv1d = common.short_convolution(self.sizes[1], conv_width, True, place)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(heads, **place)) for _ in range(3))
        self.norm = nn.RMSNorm(inner, eps=eps, **place)
        self.out_proj = nn.Linear(inner, width, bias=False, **place)
        self._fill()

    def _taps(self) -> dict[str, int]:
        return {"conv1d": self.sizes[1]}

    @torch.no_grad()
    def _fill(self) -> None:
        common.fill_steps(self.dt_bias)
        common.fill_rates(self.A_log, 1)
        self.D.fill_(1)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what is added to the residual, and the state.

        Parameters
        ----------
        x : torch.Tensor, shape (B, T, C)
            The normed residual, u above.
        state : tuple of two torch.Tensor, shape (N, H V + 2 G K, W - 1) and (N, H, V, K), optional
            As `KimiDeltaAttention.forward` takes and returns it: the last tokens that the convolution reads, and the
            state of `ssd`.
        cu_seqlens : torch.Tensor, optional
            As there.
        """
        x = common.under_autocast(common.check_tokens(x, self.width))
        inner, channels, _ = self.sizes
        of_taps, of_text = (channels, self.conv_width - 1), (self.heads, self.head_size, self.state_size)
        before, state_before = common.check_both_states(state, x, cu_seqlens, of_taps, of_text)
        z, mixed, dt = self.in_proj(x).split(self.sizes, -1)
        mixed, last = common.convolve(self, mixed, self._taps(), before, cu_seqlens)
        keys = self.groups * self.state_size
        values, B, C = mixed.split([inner, keys, keys], -1)
        B, C = (each.unflatten(-1, (self.groups, self.state_size)) for each in (B, C))
        values, z = (each.unflatten(-1, (self.heads, self.head_size)) for each in (values, z))
        rates = self._rates(isinstance(state_before, common.Pooled))
        y, final = common.recur(
            ssd, (values, dt, rates, B, C), state_before, cu_seqlens, D=self.D, z=z, dt_bias=self.dt_bias,
            dt_softplus=True, dt_limit=self.dt_limit,
        )  # fmt: skip
        return self.out_proj(self._normed(y.flatten(2))), (last, final)

    def _rates(self, is_step: bool) -> Tensor:
        """Return -exp(A_log), [H], at least in float32."""
        wide = torch.promote_types(self.A_log.dtype, torch.float32)
        if not is_step:
            return -self.A_log.to(wide).clamp(max=STRONGEST_RAW).exp()
        # Without gradients one launch clamps and casts.
        most = torch.tensor(STRONGEST_RAW, dtype=self.A_log.dtype, device="cpu")  # []
        capped = torch.minimum(self.A_log, most, out=torch.empty_like(self.A_log, dtype=wide))  # [H]
        return capped.exp_().neg_()

    def _normed(self, y: Tensor) -> Tensor:
        """Return the norms of what is behind the gate, [B, T, H V]. `gated_norm` has the gate behind the norm."""
        if self.norm_groups == 1:
            return self.norm(y).to(y.dtype)  # type: ignore[no-any-return]
        grouped = y.unflatten(-1, (self.norm_groups, -1))  # [B, T, groups, H V / groups]
        normed = F.rms_norm(grouped, grouped.shape[-1:], None, self.norm.eps).flatten(2)
        return (normed if self.norm.weight is None else normed * self.norm.weight).to(y.dtype)
