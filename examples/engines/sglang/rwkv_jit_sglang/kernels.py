"""Kernels for the layers of SGLang's models: the gated delta rule of Qwen, Kimi's delta rule, and Mamba-2.

`--linear-attn-backend rwkv_jit` takes them for decodes and prompts. Kernels of SGLang verify speculative
tokens.
"""

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import delta_rules as rules
import state_space
import torch
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


# ---- Mamba-2 -----------------------------------------------------------------------------------------------------

_layer: ContextVar[tuple[Tensor, Any] | None] = ContextVar("_layer", default=None)  # states and metadata of who calls
_last: list[Any] = [None, None]  # the metadata of the last step of prompts, and what `_kept` says of it


def with_layer(original: Callable[..., Any], mixer: Any, **named: Any) -> Any:
    """Run a layer of Mamba-2, and tell `state_space_prompts` where its states are."""
    token = _layer.set((named["layer_cache"].temporal, named["metadata"]))
    try:
        return original(mixer, **named)
    finally:
        _layer.reset(token)


def state_space_decodes(original: Callable[..., Any], *arrays: Any, **named: Any) -> Any:
    """Compute a token of each row, in the place of Triton's `selective_state_update`."""
    return (_decodes(original) if _is_chosen("decode") else original)(*arrays, **named)


def state_space_prompts(original: Callable[..., Any], *arrays: Any, **named: Any) -> Any:
    """Compute prompts over the pool, in the place of `mamba_chunk_scan_combined`.

    Nothing is returned then: final states are in the pool, and those that the prefix cache wants are there too.
    """
    return (_prompts(original) if _is_chosen("prefill") else original)(*arrays, **named)


@functools.cache
def _decodes(original: Callable[..., Any]) -> Callable[..., Any]:
    def ours(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None, pad_slot_id: int = -1, out: Tensor | None = None,
        disable_state_update: bool = False, intermediate_states_buffer: Tensor | None = None,
        cache_steps: int | None = None, retrieve_parent_token: Tensor | None = None,
        intermediate_state_indices: Tensor | None = None, enable_stochastic_rounding: bool = False,
        cache_philox_rounds: int = 0,
    ) -> None:  # fmt: skip
        if disable_state_update or intermediate_states_buffer is not None or retrieve_parent_token is not None:
            raise rwkv_jit.UnsupportedConfigError("tokens that are verified are not supported")
        state_space.decode(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, pad_slot_id, out,
            is_random=enable_stochastic_rounding,
        )  # fmt: skip

    return state_space.with_fallback("SGLang's selective_state_update", ours, original)


@functools.cache
def _prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    def ours(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None, chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
        cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
        out: Tensor | None = None, return_final_states: bool = False, return_varlen_states: bool = False,
        return_intermediate_states: bool = False, state_dtype: torch.dtype | None = None,
        return_track_states: bool = False, track_seq_idx: Tensor | None = None, track_end_locs: Tensor | None = None,
    ) -> tuple[None, None, None]:  # fmt: skip
        layer = _layer.get()
        if layer is None or cu_seqlens is None or not return_track_states:
            raise rwkv_jit.UnsupportedConfigError("calls that no layer of Mamba-2 does are not supported")
        states, metadata = layer
        if _last[0] is not metadata:  # all layers of a step have one
            _last[:] = metadata, _kept(metadata, cu_seqlens, chunk_size)
        count = len(cu_seqlens) - 1
        slots = metadata.mamba_cache_indices[:count]
        state_space.extend(
            states, x[0], dt[0], A, B[0], C[0], D, z if z is None else z[0], dt_bias, dt_softplus, dt_limit, cu_seqlens,
            slots, metadata.mixed_metadata.has_initial_states[:count], out if out is None else out[0],
            _last[1],
        )  # fmt: skip
        if metadata.has_mamba_track_mask and metadata.track_ssm_final_src.numel():
            states[metadata.track_ssm_final_dst] = states[metadata.track_ssm_final_src]
        return None, None, None

    return state_space.with_fallback("SGLang's mamba_chunk_scan_combined", ours, original)


def _kept(metadata: Any, bounds: Tensor, chunk_size: int) -> tuple[Tensor, Tensor] | None:
    """Return after how many tokens of each prompt its state goes to which slot of the prefix cache, [N] each.

    SGLang tells places within all tokens of a batch: as multiples of `chunk_size`, and others with their prompts.
    """
    if not metadata.has_mamba_track_mask:
        return None
    begins, ends = bounds[:-1].long(), bounds[1:].long()
    offsets, places = torch.zeros_like(begins), torch.full_like(begins, state_space.NO_SLOT)
    on_grid = metadata.track_ssm_h_src.long() * chunk_size
    for rows, at, slots in (
        (torch.searchsorted(ends, on_grid), on_grid, metadata.track_ssm_h_dst),
        (metadata.track_ssm_seq_idx, metadata.track_ssm_end_locs, metadata.track_ssm_recompute_dst),
    ):
        if rows is not None:
            offsets[rows], places[rows] = at.long() - begins[rows], slots.long()
    return offsets, places


def _is_chosen(phase: str) -> bool:
    """Return whether SGLang's options name these kernels for decodes or prompts."""
    from sglang.srt.runtime_context import get_exec

    options = get_exec().mamba
    return bool((getattr(options, f"linear_attn_{phase}_backend") or options.linear_attn_backend) == NAME)


# ---- how SGLang finds them ---------------------------------------------------------------------------------------

_FUNCTIONS = "sglang.kernels.ops.mamba.triton_ops"
STATE_SPACE: dict[str, Callable[..., Any]] = {  # what is called around which function of SGLang
    f"{_FUNCTIONS}.mamba_ssm.selective_state_update": state_space_decodes,
    f"{_FUNCTIONS}.ssd_combined.mamba_chunk_scan_combined": state_space_prompts,
    "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward": with_layer,
}


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
    for place, around in STATE_SPACE.items():
        HookRegistry.register(place, around, HookType.AROUND)
