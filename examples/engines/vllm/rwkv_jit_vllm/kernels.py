"""Kernels for the layers of vLLM's models: the gated delta rule of Qwen and OLMo, Kimi's delta rule, and Mamba-2.

They take the place of functions that the layers call, once the first layer is made. What they do not do, as tokens
that are verified, goes to vLLM's functions. It imports no engine before that.
"""

import functools
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import delta_rules as rules
import state_space
import torch
from torch import Tensor

import rwkv_jit

_MAMBA = "vllm.model_executor.layers.mamba"
_LAYERS = f"{_MAMBA}.gdn"
Function = Callable[..., Any]


def prompts(original: Function) -> Function:
    """Return what computes prompts, from states beside the pool, in the place of `chunk_gated_delta_rule`."""

    @functools.wraps(original)
    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False, core_attn_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        options = {"qk_norm": use_qk_l2norm_in_kernel, "scale": scale, "state_layout": "vk"}
        y, final = rwkv_jit.gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, **options,
        )  # fmt: skip
        if core_attn_out is not None:
            core_attn_out.view(-1)[: y.numel()].copy_(y.view(-1))
        return y, final

    return run


def kimi_prompts(original: Function) -> Function:
    """Return the same in the place of `chunk_kda_with_fused_gate`, from raw gates and rates."""

    @functools.wraps(original)
    def run(
        q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, g_bias: Tensor | None,
        scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
        lower_bound: float | None = None, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
        out: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if kwargs:
            return original(
                q, k, v, raw_g, raw_beta, A_log, g_bias, scale, initial_state, output_final_state, lower_bound,
                use_qk_l2norm_in_kernel, cu_seqlens, out, **kwargs,
            )  # fmt: skip
        y, final = rwkv_jit.kda(
            q, k, v, raw_g, raw_beta, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, A_log=A_log.reshape(-1), lower_bound=lower_bound, scale=scale,
            dt_bias=None if g_bias is None else g_bias.reshape(-1), qk_norm=use_qk_l2norm_in_kernel,
            beta_map="sigmoid", state_layout="vk",
        )  # fmt: skip
        return (y if out is None else out.copy_(y)), final

    return run


def decodes(original: Function) -> Function:
    """Return what computes a token of each row, in the place of `fused_sigmoid_gating_delta_rule_update`."""

    @functools.wraps(original)
    def run(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        slots, pool = named.get("ssm_state_indices"), named.get("initial_state")
        is_decode = (
            pool is not None and slots is not None and slots.dim() == 1 and len(slots) >= q.shape[1]
            and named.get("cu_seqlens") is not None and len(named["cu_seqlens"]) == q.shape[1] + 1
            and {**_USUAL, **named}.items() >= _USUAL.items()
        )  # fmt: skip
        if not is_decode:
            return original(A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, **named)
        rows, heads = q.shape[1], v.shape[2]
        a, b = rules.gates_of(a, b, rows, heads, None)
        update, options = rwkv_jit.gated_delta_rule_update, {"scale": named.get("scale")}
        return rules.decode(update, q[0], k[0], v[0], a, b, pool, slots[:rows], A_log, dt_bias, **options), pool

    return run


# Of the arguments of decodes, those that change what is computed, as layers have them.
_USUAL: dict[str, Any] = {
    "num_accepted_tokens": None, "inplace_final_state": True, "use_qk_l2norm_in_kernel": True, "is_kda": False,
    "beta": 1.0, "threshold": 20.0,
}  # fmt: skip


def packed_decodes(original: Function) -> Function:
    """Return the same in the place of `fused_recurrent_gated_delta_rule_packed_decode`, which writes to `out`."""

    @functools.wraps(original)
    def run(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
        out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not use_qk_l2norm_in_kernel or ssm_state_indices.dim() != 1:
            return original(
                mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
            )
        _, heads, value_size, key_size = initial_state.shape
        rows = rules.heads_of(mixed_qkv, heads, value_size, key_size)
        rules.decode(
            rwkv_jit.gated_delta_rule_update, *rows, a, b, initial_state, ssm_state_indices, A_log, dt_bias,
            scale=scale, out=out[:, 0],
        )  # fmt: skip
        return out, initial_state

    return run


def kimi_decodes(original: Function) -> Function:
    """Return the same in the place of `fused_recurrent_kda_packed_decode`."""

    @functools.wraps(original)
    def run(
        mixed_qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
        initial_state: Tensor, state_indices: Tensor, scale: float | None = None, out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _, heads, value_size, key_size = initial_state.shape
        rows = rules.heads_of(mixed_qkv, heads, value_size, key_size)
        y = rules.decode(
            rwkv_jit.kda_update, *rows, raw_g[0], raw_beta[0], initial_state, state_indices, A_log, dt_bias,
            scale=scale, lower_bound=lower_bound,
        )  # fmt: skip
        return (y if out is None else out.copy_(y.view(out.shape))), initial_state

    return run


def state_space_decodes(original: Function) -> Function:
    """Return what computes a token of each row of Mamba-2, in the place of Triton's `selective_state_update`."""

    def ours(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
        z: Tensor | None = None, dt_softplus: bool = False, state_batch_indices: Tensor | None = None,
        dst_state_batch_indices: Tensor | None = None, null_block_id: int = 0, out: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None, cu_seqlens: Tensor | None = None, is_blackwell: bool = False,
        enable_stochastic_rounding: bool = False, cache_philox_rounds: int = 0,
    ) -> None:  # fmt: skip
        if num_accepted_tokens is not None or cu_seqlens is not None:
            raise rwkv_jit.UnsupportedConfigError("tokens that are verified are not supported")
        state_space.decode(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, null_block_id, out,
            dst_state_batch_indices, enable_stochastic_rounding,
        )  # fmt: skip

    return state_space.with_fallback("vLLM's selective_state_update", ours, original)


def state_space_prompts(original: Function) -> Function:
    """Return what computes prompts of Mamba-2, in the place of `mamba_chunk_scan_combined_varlen`."""

    def ours(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, cu_seqlens: Tensor,
        cu_chunk_seqlens: Tensor, last_chunk_indices: Tensor, seq_idx: Tensor, out: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
        return_intermediate_states: bool = False, state_dtype: torch.dtype | None = None,
        final_states_out: Tensor | None = None, final_state_indices: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        count, kept = len(cu_seqlens) - 1, None
        if final_states_out is not None and final_state_indices is not None:
            states, slots = final_states_out, final_state_indices
        else:
            # The result is the pool: a state for each chunk, or for each sequence.
            slots = last_chunk_indices if return_intermediate_states else torch.arange(count, device=x.device)
            rows = len(seq_idx) if return_intermediate_states else count
            states = x.new_empty(rows, *x.shape[1:], B.shape[-1], dtype=state_dtype or C.dtype)  # [rows, H, V, K]
        if return_intermediate_states:
            chunks = _kept_chunks(last_chunk_indices)  # [N]
            kept = (cu_chunk_seqlens[chunks + 1] - cu_seqlens[:-1]).clamp(min=0), chunks
        has_state = None
        if initial_states is None:
            has_state = torch.zeros(count, dtype=torch.bool, device=x.device)
        else:
            states[slots] = initial_states.to(states.dtype)
        state_space.extend(
            states, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, cu_seqlens, slots, has_state, out, kept
        )
        return None if final_states_out is not None else states

    return state_space.with_fallback("vLLM's mamba_chunk_scan_combined_varlen", ours, original)


def _kept_chunks(last_chunks: Tensor) -> Tensor:
    """Return the chunk of each prompt after which its state goes to the prefix cache, as the step's metadata says.

    A prompt without one has chunk 0, whose state nobody reads.
    """
    metadata = importlib.import_module("vllm.forward_context").get_forward_context().attn_metadata
    for each in metadata.values() if isinstance(metadata, dict) else ():
        if getattr(each, "last_chunk_indices_p", None) is last_chunks:
            chunks: Tensor = each.checkpoint_chunk_idx
            return chunks
    raise rwkv_jit.UnsupportedConfigError("the states of all chunks are not supported")


_KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"  # in which Kimi's layer looks functions up in each call
PLACES: dict[str, dict[str, Callable[[Function], Function]]] = {  # what calls which functions
    f"{_LAYERS}.qwen_gdn_linear_attn": {
        "fla_chunk_gated_delta_rule": prompts,
        "fused_sigmoid_gating_delta_rule_update": decodes,
        "fused_recurrent_gated_delta_rule_packed_decode": packed_decodes,
    },
    f"{_LAYERS}.olmo_gdn_linear_attn": {"chunk_gated_delta_rule": prompts},
    f"{_MAMBA}.ops.mamba_ssm": {"selective_state_update": state_space_decodes},  # where Triton's backend looks it up
    f"{_MAMBA}.mamba_mixer2": {"mamba_chunk_scan_combined_varlen": state_space_prompts},
    _KIMI: {"chunk_kda_with_fused_gate": kimi_prompts, "fused_recurrent_kda_packed_decode": kimi_decodes},
}
_BEGINNINGS = {f"{_LAYERS}.base": "GatedDeltaNetAttention", f"{_MAMBA}.mamba_mixer2": "MambaMixer2"}
_ours: list[Any] = []  # functions that are in their places


def put() -> None:
    """Put the kernels into the modules that are there."""
    if f"{_LAYERS}.kimi_gdn_linear_attn" in sys.modules and torch.version.hip is None:
        importlib.import_module(_KIMI)
    for name, functions in PLACES.items():
        module = sys.modules.get(name)
        for function, wrap in functions.items() if module is not None else ():
            original = getattr(module, function)
            if original not in _ours:
                _ours.append(wrap(original))
                setattr(module, function, _ours[-1])


def register() -> None:
    """Let layers take the kernels. vLLM calls this in each of its processes, maybe more than once."""
    for module, layer in _BEGINNINGS.items():
        kind: Any = getattr(importlib.import_module(module), layer)
        if kind.__init__ not in _ours:
            _ours.append(_with_kernels(kind.__init__))
            kind.__init__ = _ours[-1]


def _with_kernels(begin: Callable[..., None]) -> Callable[..., None]:
    """Return the beginning of a layer, which puts the kernels into their places first."""

    @functools.wraps(begin)
    def with_kernels(self: Any, *given: Any, **named: Any) -> None:
        put()
        begin(self, *given, **named)

    return with_kernels
