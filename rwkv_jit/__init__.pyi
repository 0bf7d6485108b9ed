"""CUDA kernels for RWKV and other linear attention, compiled for your GPU when they are first called."""

# tools/stubs.py has written this.
# ruff: noqa
# fmt: off

from math import inf
from rwkv_jit.call.options import CallOptions, DecayOptions
from rwkv_jit.call.tensors import SupportsDLPack
from torch import Tensor
from typing import Any, Literal, overload
from typing_extensions import Unpack
from rwkv_jit import compat as compat
from rwkv_jit import nn as nn
from rwkv_jit import parallel as parallel
from rwkv_jit.ahead.warm import compile_async as compile_async
from rwkv_jit.ahead.warm import specialize as specialize
from rwkv_jit.ahead.warm import warm as warm
from rwkv_jit.call.custom import Template as Template
from rwkv_jit.call.options import CallOptions as CallOptions
from rwkv_jit.call.options import DecayOptions as DecayOptions
from rwkv_jit.call.switches import get_bfloat16_precision as get_bfloat16_precision
from rwkv_jit.call.switches import is_batch_invariant as is_batch_invariant
from rwkv_jit.call.switches import set_batch_invariant as set_batch_invariant
from rwkv_jit.call.switches import set_bfloat16_precision as set_bfloat16_precision
from rwkv_jit.desk.versions import cache_info as cache_info
from rwkv_jit.desk.versions import clear_cache as clear_cache
from rwkv_jit.desk.versions import env_report as env_report
from rwkv_jit.desk.versions import is_available as is_available
from rwkv_jit.kernels.errors import CacheError as CacheError
from rwkv_jit.kernels.errors import CompileError as CompileError
from rwkv_jit.kernels.errors import NvrtcNotFoundError as NvrtcNotFoundError
from rwkv_jit.kernels.errors import RwkvJitError as RwkvJitError
from rwkv_jit.kernels.errors import UnsupportedConfigError as UnsupportedConfigError
from rwkv_jit.kernels.stats import add_hook as add_hook
from rwkv_jit.layers.activate import activate as activate
from rwkv_jit.layers.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from rwkv_jit.layers.gated import gated as gated
from rwkv_jit.layers.gated_norm import gated_norm as gated_norm
from rwkv_jit.layers.loss import cross_entropy as cross_entropy
from rwkv_jit.layers.loss import linear_cross_entropy as linear_cross_entropy
from rwkv_jit.layers.norm_shift import norm_shift as norm_shift
from rwkv_jit.layers.prepare_keys import prepare_keys as prepare_keys
from rwkv_jit.layers.shift_mix import shift_mix as shift_mix
from rwkv_jit.layers.token_shift import token_shift as token_shift
from rwkv_jit.ops.timex import timex as timex
from rwkv_jit.plain.layer_references import activate_ref as activate_ref
from rwkv_jit.plain.layer_references import gated_norm_ref as gated_norm_ref
from rwkv_jit.plain.layer_references import gated_ref as gated_ref
from rwkv_jit.plain.layer_references import norm_shift_ref as norm_shift_ref
from rwkv_jit.plain.layer_references import prepare_keys_ref as prepare_keys_ref
from rwkv_jit.plain.layer_references import token_shift_ref as token_shift_ref
from rwkv_jit.plain.reference import timex_ref as timex_ref
from rwkv_jit.pool.functions import delta_rule_replay as delta_rule_replay
from rwkv_jit.pool.functions import delta_rule_update as delta_rule_update
from rwkv_jit.pool.functions import delta_rule_varlen as delta_rule_varlen
from rwkv_jit.pool.functions import delta_rule_verify as delta_rule_verify
from rwkv_jit.pool.functions import gated_delta_rule2_replay as gated_delta_rule2_replay
from rwkv_jit.pool.functions import gated_delta_rule2_update as gated_delta_rule2_update
from rwkv_jit.pool.functions import gated_delta_rule2_varlen as gated_delta_rule2_varlen
from rwkv_jit.pool.functions import gated_delta_rule2_verify as gated_delta_rule2_verify
from rwkv_jit.pool.functions import gated_delta_rule_replay as gated_delta_rule_replay
from rwkv_jit.pool.functions import gated_delta_rule_update as gated_delta_rule_update
from rwkv_jit.pool.functions import gated_delta_rule_varlen as gated_delta_rule_varlen
from rwkv_jit.pool.functions import gated_delta_rule_verify as gated_delta_rule_verify
from rwkv_jit.pool.functions import gla_replay as gla_replay
from rwkv_jit.pool.functions import gla_update as gla_update
from rwkv_jit.pool.functions import gla_varlen as gla_varlen
from rwkv_jit.pool.functions import gla_verify as gla_verify
from rwkv_jit.pool.functions import hgrn2_replay as hgrn2_replay
from rwkv_jit.pool.functions import hgrn2_update as hgrn2_update
from rwkv_jit.pool.functions import hgrn2_varlen as hgrn2_varlen
from rwkv_jit.pool.functions import hgrn2_verify as hgrn2_verify
from rwkv_jit.pool.functions import kda_replay as kda_replay
from rwkv_jit.pool.functions import kda_update as kda_update
from rwkv_jit.pool.functions import kda_varlen as kda_varlen
from rwkv_jit.pool.functions import kda_verify as kda_verify
from rwkv_jit.pool.functions import linear_attention_replay as linear_attention_replay
from rwkv_jit.pool.functions import linear_attention_update as linear_attention_update
from rwkv_jit.pool.functions import linear_attention_varlen as linear_attention_varlen
from rwkv_jit.pool.functions import linear_attention_verify as linear_attention_verify
from rwkv_jit.pool.functions import simple_gla_replay as simple_gla_replay
from rwkv_jit.pool.functions import simple_gla_update as simple_gla_update
from rwkv_jit.pool.functions import simple_gla_varlen as simple_gla_varlen
from rwkv_jit.pool.functions import simple_gla_verify as simple_gla_verify
from rwkv_jit.pool.functions import ssd_replay as ssd_replay
from rwkv_jit.pool.functions import ssd_update as ssd_update
from rwkv_jit.pool.functions import ssd_varlen as ssd_varlen
from rwkv_jit.pool.functions import ssd_verify as ssd_verify
from rwkv_jit.pool.functions import wkv5_replay as wkv5_replay
from rwkv_jit.pool.functions import wkv5_update as wkv5_update
from rwkv_jit.pool.functions import wkv5_varlen as wkv5_varlen
from rwkv_jit.pool.functions import wkv5_verify as wkv5_verify
from rwkv_jit.pool.functions import wkv6_replay as wkv6_replay
from rwkv_jit.pool.functions import wkv6_update as wkv6_update
from rwkv_jit.pool.functions import wkv6_varlen as wkv6_varlen
from rwkv_jit.pool.functions import wkv6_verify as wkv6_verify
from rwkv_jit.pool.functions import wkv7_replay as wkv7_replay
from rwkv_jit.pool.functions import wkv7_update as wkv7_update
from rwkv_jit.pool.functions import wkv7_varlen as wkv7_varlen
from rwkv_jit.pool.functions import wkv7_verify as wkv7_verify
from rwkv_jit.pool.options import DecayUpdateOptions as DecayUpdateOptions
from rwkv_jit.pool.options import DecayVarlenOptions as DecayVarlenOptions
from rwkv_jit.pool.options import FlushOptions as FlushOptions
from rwkv_jit.pool.options import PoolOptions as PoolOptions
from rwkv_jit.pool.options import ReplayOptions as ReplayOptions
from rwkv_jit.pool.options import UpdateOptions as UpdateOptions
from rwkv_jit.pool.options import VarlenOptions as VarlenOptions
from rwkv_jit.pool.replay import replay_commit as replay_commit
from rwkv_jit.pool.replay import replay_flush as replay_flush
from rwkv_jit.pool.ring import ReplayRing as ReplayRing
from rwkv_jit.pool.state_pool import StatePool as StatePool
from rwkv_jit.pool.states import StateSpec as StateSpec
from rwkv_jit.pool.wkv4 import wkv4_update as wkv4_update

__version__: str

__all__ = [
    "CacheError", "CallOptions", "CompileError", "DecayOptions", "DecayUpdateOptions", "DecayVarlenOptions",
    "FlushOptions", "NvrtcNotFoundError", "PoolOptions", "ReplayOptions", "ReplayRing", "RwkvJitError", "StatePool",
    "StateSpec", "Template", "UnsupportedConfigError", "UpdateOptions", "VarlenOptions", "activate", "activate_ref",
    "add_hook", "cache_info", "causal_conv1d", "causal_conv1d_ref", "causal_conv1d_update", "clear_cache",
    "compile_async", "cross_entropy", "delta_rule", "delta_rule_ref", "delta_rule_replay", "delta_rule_update",
    "delta_rule_varlen", "delta_rule_verify", "env_report", "gated", "gated_delta_rule", "gated_delta_rule2",
    "gated_delta_rule2_ref", "gated_delta_rule2_replay", "gated_delta_rule2_update", "gated_delta_rule2_varlen",
    "gated_delta_rule2_verify", "gated_delta_rule_ref", "gated_delta_rule_replay", "gated_delta_rule_update",
    "gated_delta_rule_varlen", "gated_delta_rule_verify", "gated_norm", "gated_norm_ref", "gated_ref",
    "get_bfloat16_precision", "gla", "gla_ref", "gla_replay", "gla_update", "gla_varlen", "gla_verify", "hgrn2",
    "hgrn2_ref", "hgrn2_replay", "hgrn2_update", "hgrn2_varlen", "hgrn2_verify", "is_available", "is_batch_invariant",
    "kda", "kda_ref", "kda_replay", "kda_update", "kda_varlen", "kda_verify", "linear_attention",
    "linear_attention_ref", "linear_attention_replay", "linear_attention_update", "linear_attention_varlen",
    "linear_attention_verify", "linear_cross_entropy", "norm_shift", "norm_shift_ref", "prepare_keys",
    "prepare_keys_ref", "replay_commit", "replay_flush", "set_batch_invariant", "set_bfloat16_precision", "shift_mix",
    "simple_gla", "simple_gla_ref", "simple_gla_replay", "simple_gla_update", "simple_gla_varlen", "simple_gla_verify",
    "specialize", "ssd", "ssd_ref", "ssd_replay", "ssd_update", "ssd_varlen", "ssd_verify", "timex", "timex_ref",
    "token_shift", "token_shift_ref", "warm", "wkv4", "wkv4_ref", "wkv4_update", "wkv5", "wkv5_ref", "wkv5_replay",
    "wkv5_update", "wkv5_varlen", "wkv5_verify", "wkv6", "wkv6_ref", "wkv6_replay", "wkv6_update", "wkv6_varlen",
    "wkv6_verify", "wkv7", "wkv7_ref", "wkv7_replay", "wkv7_update", "wkv7_varlen", "wkv7_verify"
]

@overload
def causal_conv1d(
    x: Tensor | SupportsDLPack, weight: Tensor | SupportsDLPack, bias: Tensor | SupportsDLPack | None = None, *,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, activation: Literal['silu'] | None = None,
) -> tuple[Tensor, None]:
    """Convolve every channel with a few tokens before: what KDA, gated delta net and Mamba-2 do before a recurrence."""
@overload
def causal_conv1d(
    x: Tensor | SupportsDLPack, weight: Tensor | SupportsDLPack, bias: Tensor | SupportsDLPack | None = None, *,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor | SupportsDLPack, weight: Tensor | SupportsDLPack, bias: Tensor | SupportsDLPack | None = None, *,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def causal_conv1d_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None,
    activation: Literal['silu'] | None = None,
) -> tuple[Tensor, None]:
    """A short causal convolution: `rwkv_jit.causal_conv1d` in plain torch, in float64 where the inputs are."""
@overload
def causal_conv1d_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """The delta rule over sequences, with gradients to every input and to the initial state."""
@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """The delta rule: `rwkv_jit.delta_rule` in plain torch, in float64 where the inputs are."""
@overload
def delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """The gated delta rule over sequences, with gradients to every input and to the initial state."""
@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """The gated delta rule by channels over sequences, with gradients to every input and to the initial state."""
@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gated_delta_rule2_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False, scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """The gated delta rule by channels: `rwkv_jit.gated_delta_rule2` in plain torch, in float64 where the inputs are."""
@overload
def gated_delta_rule2_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False, scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule2_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor, initial_state: Tensor | None = None,
    *, output_final_state: Literal[True], cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False, scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule2_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False, scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """The gated delta rule: `rwkv_jit.gated_delta_rule` in plain torch, in float64 where the inputs are."""
@overload
def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """Gated linear attention over sequences, with gradients to every input and to the initial state."""
@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, scale: float | None = None,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'log', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """Gated linear attention: `rwkv_jit.gla` in plain torch, in float64 where the inputs are."""
@overload
def gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float | None = None,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'log', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float | None = None,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'log', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'log', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """HGRN2 over sequences, with gradients to every input and to the initial state."""
@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def hgrn2_ref(
    q: Tensor, g: Tensor, v: Tensor, initial_state: Tensor | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None, scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """HGRN2: `rwkv_jit.hgrn2` in plain torch, in float64 where the inputs are."""
@overload
def hgrn2_ref(
    q: Tensor, g: Tensor, v: Tensor, initial_state: Tensor | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn2_ref(
    q: Tensor, g: Tensor, v: Tensor, initial_state: Tensor | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn2_ref(
    q: Tensor, g: Tensor, v: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """Kimi Delta Attention over sequences, with gradients to every input and to the initial state."""
@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def kda_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """Kimi Delta Attention: `rwkv_jit.kda` in plain torch, in float64 where the inputs are."""
@overload
def kda_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def kda_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def kda_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: tuple[Tensor | SupportsDLPack, Tensor | SupportsDLPack] | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    normalize: Literal[True], **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """Linear attention over sequences, with gradients to every input and to the initial state."""
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: tuple[Tensor | SupportsDLPack, Tensor | SupportsDLPack] | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None, normalize: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, normalize: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, None]: ...
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, normalize: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, normalize: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | tuple[Tensor | SupportsDLPack, Tensor | SupportsDLPack] | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | SupportsDLPack | None = None, normalize: bool = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Any]: ...


@overload
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv', *,
    normalize: Literal[True],
) -> tuple[Tensor, None]:
    """Linear attention: `rwkv_jit.linear_attention` in plain torch, in float64 where the inputs are."""
@overload
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
    normalize: Literal[True],
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...
@overload
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
    normalize: Literal[False] = False,
) -> tuple[Tensor, None]: ...
@overload
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
    normalize: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
    normalize: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Any = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
    normalize: bool = False,
) -> tuple[Tensor, Any]: ...


@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """Scalar-gated linear attention over sequences, with gradients to every input and to the initial state."""
@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def simple_gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, None]:
    """Scalar-gated linear attention: `rwkv_jit.simple_gla` in plain torch, in float64 where the inputs are."""
@overload
def simple_gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def simple_gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor]: ...
@overload
def simple_gla_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_layout: Literal['vk', 'kv'] = 'kv',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None, *,
    D: Tensor | SupportsDLPack | None = None, z: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """The state space of Mamba-2 over sequences, with gradients to every input and to the initial state."""
@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, D: Tensor | SupportsDLPack | None = None,
    z: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    D: Tensor | SupportsDLPack | None = None, z: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, *, D: Tensor | SupportsDLPack | None = None,
    z: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def ssd_ref(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, None]:
    """The state space of Mamba-2: `rwkv_jit.ssd` in plain torch, in float64 where the inputs are."""
@overload
def ssd_ref(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_ref(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_ref(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), scale: float = 1.0, state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv4(
    w: Tensor | SupportsDLPack, u: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    decay: Literal['raw', 'log'] = 'raw', backend: Literal['auto', 'recurrent', 'split', 'reference'] = 'auto',
) -> tuple[Tensor, None]:
    """RWKV-4 time mixing over sequences, with gradients to every input and to the initial state."""
@overload
def wkv4(
    w: Tensor | SupportsDLPack, u: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    decay: Literal['raw', 'log'] = 'raw', backend: Literal['auto', 'recurrent', 'split', 'reference'] = 'auto',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv4(
    w: Tensor | SupportsDLPack, u: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    decay: Literal['raw', 'log'] = 'raw', backend: Literal['auto', 'recurrent', 'split', 'reference'] = 'auto',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv4(
    w: Tensor | SupportsDLPack, u: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    decay: Literal['raw', 'log'] = 'raw', backend: Literal['auto', 'recurrent', 'split', 'reference'] = 'auto',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv4_ref(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, decay: Literal['raw', 'log'] = 'raw',
) -> tuple[Tensor, None]:
    """RWKV-4 time mixing: `rwkv_jit.wkv4` in plain torch, in float64 where the inputs are."""
@overload
def wkv4_ref(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, output_final_state: Literal[True],
    decay: Literal['raw', 'log'] = 'raw',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv4_ref(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], decay: Literal['raw', 'log'] = 'raw',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv4_ref(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    decay: Literal['raw', 'log'] = 'raw',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """RWKV-5 time mixing over sequences, with gradients to every input and to the initial state."""
@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv5_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, None]:
    """RWKV-5 time mixing: `rwkv_jit.wkv5` in plain torch, in float64 where the inputs are."""
@overload
def wkv5_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv5_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv5_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """RWKV-6 time mixing over sequences, with gradients to every input and to the initial state."""
@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | SupportsDLPack | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv6_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, None]:
    """RWKV-6 time mixing: `rwkv_jit.wkv6` in plain torch, in float64 where the inputs are."""
@overload
def wkv6_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6_ref(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """RWKV-7 time mixing over sequences, with gradients to every input and to the initial state."""
@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | SupportsDLPack | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv7_ref(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, None]:
    """RWKV-7 time mixing: `rwkv_jit.wkv7` in plain torch, in float64 where the inputs are."""
@overload
def wkv7_ref(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv7_ref(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv7_ref(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, scale: float = 1.0,
    decay: Literal['raw', 'sigmoid', 'log', 'direct'] = 'raw', decay_bound: float | None = None,
    state_layout: Literal['vk', 'kv'] = 'vk',
) -> tuple[Tensor, Tensor | None]: ...
