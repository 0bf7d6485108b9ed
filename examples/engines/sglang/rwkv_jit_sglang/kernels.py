"""Kernels for the layers of SGLang's models: the gated delta rule of Qwen, and Kimi's delta rule.

`--linear-attn-backend rwkv_jit` takes them for decodes and prompts. Kernels of SGLang verify speculative
tokens.
"""

from collections.abc import Callable
from typing import Any

import delta_rules as rules
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from torch import Tensor

import rwkv_jit

NAME = "rwkv_jit"  # among the choices of --linear-attn-backend


class _Kernel(LinearAttnKernelBase):
    """What both have. `own` is the kernel of SGLang in its place."""

    supports_packed_decode = True
    supports_track_state_snapshot = True
    has_channels = False  # whether gates are of channels
    update: Callable[..., Tensor]  # of one token of each row

    def __init__(self, own: Any):
        self._own = own

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return y [1, B, H, V] of rows that hold queries, keys and values side by side."""
        if kwargs.get("replayssm_d") is not None:
            raise ValueError(f"--enable-linear-replayssm: --linear-attn-decode-backend {NAME} has no such ring")
        q, k, v = rules.heads_of(mixed_qkv, num_v_heads, head_v_dim, ssm_states.shape[-1])
        return self._decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, kwargs, scale=scale)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return y [1, B, H, V] of one token of each row; q, k and v are [1, B, heads, size]."""
        return self._decode(q[0], k[0], v[0], a, b, A_log, dt_bias, ssm_states, cache_indices, kwargs)

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, states: Tensor,
        slots: Tensor, given: dict[str, Any], **options: Any,
    ) -> Tensor:  # fmt: skip
        heads, key_size = v.shape[1], states.shape[-1] if self.has_channels else None
        if self.has_channels:
            options["lower_bound"] = given.get("lower_bound")
        a, b = rules.gates_of(a, b, len(v), heads, key_size)
        return rules.decode(self.update, q, k, v, a, b, states, slots, A_log, dt_bias, **options)


class GatedDeltaRuleKernel(_Kernel):
    """The gated delta rule: one log-decay of a head, which SGLang has made before prompts and not before decodes."""

    update = staticmethod(rwkv_jit.gated_delta_rule_update)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
        query_start_loc: Tensor, inplace_update: bool = True, **kwargs: Any,
    ) -> tuple[Tensor, None, None]:  # fmt: skip
        """Return y [1, T, H, V], and nothing beside it: final states are in the pool, others in `track_state`."""
        if not inplace_update:
            raise ValueError(f"--enable-mis: --linear-attn-prefill-backend {NAME} changes states; take triton")
        y = rules.extend(
            rwkv_jit.gated_delta_rule_varlen, q, k, v, g, beta, ssm_states, cache_indices, query_start_loc,
            kwargs.get("track_state"), kwargs.get("track_chunk_idx"),
        )  # fmt: skip
        return y, None, None


class KimiKernel(_Kernel):
    """Kimi Delta Attention: log-decays of channels, from raw gates."""

    has_channels = True
    update = staticmethod(rwkv_jit.kda_update)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
        query_start_loc: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
        lower_bound: float | None = None, beta_is_raw: bool = False, return_intermediate_states: bool = False,
        is_spec_decode: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return y [1, T, H, V], and None beside it where states of chunks are wanted: they are in `track_state`."""
        if is_spec_decode:  # whose states SGLang takes back
            return self._own.extend(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                beta_is_raw=beta_is_raw, return_intermediate_states=return_intermediate_states, **kwargs,
            )  # fmt: skip
        options: dict[str, Any] = {"beta_map": "sigmoid" if beta_is_raw else "identity"}
        if A_log is not None:
            options |= {"A_log": A_log.reshape(-1), "lower_bound": lower_bound}
            options |= {} if dt_bias is None else {"dt_bias": dt_bias.reshape(-1)}
        y = rules.extend(
            rwkv_jit.kda_varlen, q, k, v, g.view(*v.shape[:-1], -1), beta.view(v.shape[:-1]), ssm_states, cache_indices,
            query_start_loc, kwargs.get("track_state"), kwargs.get("track_chunk_idx"), **options,
        )  # fmt: skip
        return (y, None) if return_intermediate_states else y


def dispatching(kind: type[_Kernel], triton: Any) -> Callable[..., None]:
    """Return what SGLang calls around the beginning of a dispatcher, so that it takes a kernel of ours by name.

    SGLang knows a name of a plugin as `CUSTOM`, which its dispatchers refuse: they begin as with `triton`.
    """

    def begin(
        original: Callable[..., None], self: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None
    ) -> None:  # fmt: skip
        is_ours = [x.is_custom() for x in (decode_backend, prefill_backend)]
        others = [triton if ours else x for ours, x in zip(is_ours, (decode_backend, prefill_backend), strict=True)]
        original(self, *others, verify_backend)
        if is_ours[1]:
            self.extend_kernel = kind(self.extend_kernel)
        if is_ours[0]:
            self.decode_kernel = kind(self.decode_kernel)
            self.supports_packed_decode = True
            self.supports_packed_decode_safe_gate = kind.has_channels

    return begin


def register() -> None:
    """Let SGLang's dispatchers take the kernels."""
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import LINEAR_ATTN_KERNEL_BACKEND_CHOICES, add_linear_attn_kernel_backend_choices

    if NAME in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:  # registered before
        return
    add_linear_attn_kernel_backend_choices([NAME])
    linear = "sglang.srt.layers.attention.linear"
    for place, kind in (
        (f"{linear}.gdn_backend.GDNKernelDispatcher", GatedDeltaRuleKernel),
        (f"{linear}.kda_backend.KDAKernelDispatcher", KimiKernel),
    ):
        HookRegistry.register(f"{place}.__init__", dispatching(kind, LinearAttnKernelBackend.TRITON), HookType.AROUND)
