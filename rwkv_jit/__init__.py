"""CUDA kernels for RWKV and other linear attention, compiled for your GPU when they are first called.

Importing this package touches neither CUDA nor CuPy nor the disk; each public name loads its module when it is used.
The torch ops are registered as soon as both this package and torch are imported, in either order, so that exported
programs load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rwkv_jit import after

__version__ = "0.1.0"

_MODULES = {
    "gla": "rwkv_jit.ops.gla",
    "linear_attention": "rwkv_jit.ops.linear_attention",
    "timex": "rwkv_jit.ops.timex",
    "wkv4": "rwkv_jit.ops.wkv4",
    "wkv4_update": "rwkv_jit.inference.wkv4",
    "wkv5": "rwkv_jit.ops.wkv5",
    "wkv6": "rwkv_jit.ops.wkv6",
    "wkv7": "rwkv_jit.ops.wkv7",
    "gla_update": "rwkv_jit.inference.update",
    "linear_attention_update": "rwkv_jit.inference.update",
    "wkv5_update": "rwkv_jit.inference.update",
    "wkv6_update": "rwkv_jit.inference.update",
    "wkv7_update": "rwkv_jit.inference.update",
    "gla_varlen": "rwkv_jit.inference.varlen",
    "linear_attention_varlen": "rwkv_jit.inference.varlen",
    "wkv5_varlen": "rwkv_jit.inference.varlen",
    "wkv6_varlen": "rwkv_jit.inference.varlen",
    "wkv7_varlen": "rwkv_jit.inference.varlen",
    "kda": "rwkv_jit.derived.delta",
    "gated_delta_rule": "rwkv_jit.derived.delta",
    "delta_rule": "rwkv_jit.derived.delta",
    "gated_delta_rule2": "rwkv_jit.derived.delta",
    "simple_gla": "rwkv_jit.derived.diagonal",
    "hgrn2": "rwkv_jit.derived.diagonal",
    "ssd": "rwkv_jit.derived.diagonal",
    "kda_update": "rwkv_jit.derived.delta_pooled",
    "gated_delta_rule_update": "rwkv_jit.derived.delta_pooled",
    "delta_rule_update": "rwkv_jit.derived.delta_pooled",
    "gated_delta_rule2_update": "rwkv_jit.derived.delta_pooled",
    "simple_gla_update": "rwkv_jit.derived.diagonal_pooled",
    "hgrn2_update": "rwkv_jit.derived.diagonal_pooled",
    "ssd_update": "rwkv_jit.derived.diagonal_pooled",
    "kda_varlen": "rwkv_jit.derived.delta_pooled",
    "gated_delta_rule_varlen": "rwkv_jit.derived.delta_pooled",
    "delta_rule_varlen": "rwkv_jit.derived.delta_pooled",
    "gated_delta_rule2_varlen": "rwkv_jit.derived.delta_pooled",
    "simple_gla_varlen": "rwkv_jit.derived.diagonal_pooled",
    "hgrn2_varlen": "rwkv_jit.derived.diagonal_pooled",
    "ssd_varlen": "rwkv_jit.derived.diagonal_pooled",
    "kda_ref": "rwkv_jit.derived.reference",
    "gated_delta_rule_ref": "rwkv_jit.derived.reference",
    "delta_rule_ref": "rwkv_jit.derived.reference",
    "gated_delta_rule2_ref": "rwkv_jit.derived.reference",
    "simple_gla_ref": "rwkv_jit.derived.reference",
    "hgrn2_ref": "rwkv_jit.derived.reference",
    "ssd_ref": "rwkv_jit.derived.reference",
    "activate": "rwkv_jit.layers.functions",
    "gated": "rwkv_jit.layers.functions",
    "gated_norm": "rwkv_jit.layers.functions",
    "norm_shift": "rwkv_jit.layers.functions",
    "prepare_keys": "rwkv_jit.layers.functions",
    "shift_mix": "rwkv_jit.layers.functions",
    "token_shift": "rwkv_jit.layers.functions",
    "activate_ref": "rwkv_jit.layers.reference",
    "causal_conv1d_ref": "rwkv_jit.layers.reference",
    "gated_ref": "rwkv_jit.layers.reference",
    "gated_norm_ref": "rwkv_jit.layers.reference",
    "norm_shift_ref": "rwkv_jit.layers.reference",
    "prepare_keys_ref": "rwkv_jit.layers.reference",
    "token_shift_ref": "rwkv_jit.layers.reference",
    "causal_conv1d": "rwkv_jit.layers.convolution",
    "causal_conv1d_update": "rwkv_jit.layers.convolution",
    "cross_entropy": "rwkv_jit.layers.loss",
    "linear_cross_entropy": "rwkv_jit.layers.loss",
    "gla_ref": "rwkv_jit.reference",
    "linear_attention_ref": "rwkv_jit.reference",
    "timex_ref": "rwkv_jit.reference",
    "wkv4_ref": "rwkv_jit.reference",
    "wkv5_ref": "rwkv_jit.reference",
    "wkv6_ref": "rwkv_jit.reference",
    "wkv7_ref": "rwkv_jit.reference",
    "CallOptions": "rwkv_jit.ops.options",
    "DecayOptions": "rwkv_jit.ops.options",
    "PoolOptions": "rwkv_jit.inference.options",
    "UpdateOptions": "rwkv_jit.inference.options",
    "DecayUpdateOptions": "rwkv_jit.inference.options",
    "VarlenOptions": "rwkv_jit.inference.options",
    "DecayVarlenOptions": "rwkv_jit.inference.options",
    "ReplayOptions": "rwkv_jit.inference.options",
    "FlushOptions": "rwkv_jit.inference.options",
    "gla_replay": "rwkv_jit.inference.replay",
    "gla_verify": "rwkv_jit.inference.replay",
    "linear_attention_replay": "rwkv_jit.inference.replay",
    "linear_attention_verify": "rwkv_jit.inference.replay",
    "wkv5_replay": "rwkv_jit.inference.replay",
    "wkv5_verify": "rwkv_jit.inference.replay",
    "wkv6_replay": "rwkv_jit.inference.replay",
    "wkv6_verify": "rwkv_jit.inference.replay",
    "wkv7_replay": "rwkv_jit.inference.replay",
    "wkv7_verify": "rwkv_jit.inference.replay",
    "replay_commit": "rwkv_jit.inference.replay",
    "replay_flush": "rwkv_jit.inference.replay",
    "ReplayRing": "rwkv_jit.inference.ring",
    "Template": "rwkv_jit.custom",
    "StatePool": "rwkv_jit.inference.pool",
    "StateSpec": "rwkv_jit.inference.states",
    "specialize": "rwkv_jit.ahead",
    "compile_async": "rwkv_jit.ahead",
    "warm": "rwkv_jit.ahead",
    "is_available": "rwkv_jit.machine",
    "env_report": "rwkv_jit.machine",
    "cache_info": "rwkv_jit.machine",
    "clear_cache": "rwkv_jit.machine",
    "add_hook": "rwkv_jit.stats",
    "set_batch_invariant": "rwkv_jit.modes",
    "set_bfloat16_precision": "rwkv_jit.modes",
    "get_bfloat16_precision": "rwkv_jit.modes",
    "is_batch_invariant": "rwkv_jit.modes",
    "RwkvJitError": "rwkv_jit.errors",
    "CompileError": "rwkv_jit.errors",
    "NvrtcNotFoundError": "rwkv_jit.errors",
    "UnsupportedConfigError": "rwkv_jit.errors",
    "CacheError": "rwkv_jit.errors",
}
__all__ = [
    "CacheError",
    "CallOptions",
    "CompileError",
    "DecayOptions",
    "DecayUpdateOptions",
    "DecayVarlenOptions",
    "FlushOptions",
    "NvrtcNotFoundError",
    "PoolOptions",
    "ReplayOptions",
    "ReplayRing",
    "RwkvJitError",
    "StatePool",
    "StateSpec",
    "Template",
    "UnsupportedConfigError",
    "UpdateOptions",
    "VarlenOptions",
    "activate",
    "activate_ref",
    "add_hook",
    "cache_info",
    "causal_conv1d",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "clear_cache",
    "compile_async",
    "cross_entropy",
    "delta_rule",
    "delta_rule_ref",
    "delta_rule_update",
    "delta_rule_varlen",
    "env_report",
    "gated",
    "gated_delta_rule",
    "gated_delta_rule2",
    "gated_delta_rule2_ref",
    "gated_delta_rule2_update",
    "gated_delta_rule2_varlen",
    "gated_delta_rule_ref",
    "gated_delta_rule_update",
    "gated_delta_rule_varlen",
    "gated_norm",
    "gated_norm_ref",
    "gated_ref",
    "get_bfloat16_precision",
    "gla",
    "gla_ref",
    "gla_replay",
    "gla_update",
    "gla_varlen",
    "gla_verify",
    "hgrn2",
    "hgrn2_ref",
    "hgrn2_update",
    "hgrn2_varlen",
    "is_available",
    "is_batch_invariant",
    "kda",
    "kda_ref",
    "kda_update",
    "kda_varlen",
    "linear_attention",
    "linear_attention_ref",
    "linear_attention_replay",
    "linear_attention_update",
    "linear_attention_varlen",
    "linear_attention_verify",
    "linear_cross_entropy",
    "norm_shift",
    "norm_shift_ref",
    "prepare_keys",
    "prepare_keys_ref",
    "replay_commit",
    "replay_flush",
    "set_batch_invariant",
    "set_bfloat16_precision",
    "shift_mix",
    "simple_gla",
    "simple_gla_ref",
    "simple_gla_update",
    "simple_gla_varlen",
    "specialize",
    "ssd",
    "ssd_ref",
    "ssd_update",
    "ssd_varlen",
    "timex",
    "timex_ref",
    "token_shift",
    "token_shift_ref",
    "warm",
    "wkv4",
    "wkv4_ref",
    "wkv4_update",
    "wkv5",
    "wkv5_ref",
    "wkv5_replay",
    "wkv5_update",
    "wkv5_varlen",
    "wkv5_verify",
    "wkv6",
    "wkv6_ref",
    "wkv6_replay",
    "wkv6_update",
    "wkv6_varlen",
    "wkv6_verify",
    "wkv7",
    "wkv7_ref",
    "wkv7_replay",
    "wkv7_update",
    "wkv7_varlen",
    "wkv7_verify",
]

if TYPE_CHECKING:
    from rwkv_jit import nn as nn
    from rwkv_jit import parallel as parallel
    from rwkv_jit.ahead import compile_async, specialize, warm
    from rwkv_jit.custom import Template
    from rwkv_jit.derived.delta import delta_rule, gated_delta_rule, gated_delta_rule2, kda
    from rwkv_jit.derived.delta_pooled import (
        delta_rule_update,
        delta_rule_varlen,
        gated_delta_rule2_update,
        gated_delta_rule2_varlen,
        gated_delta_rule_update,
        gated_delta_rule_varlen,
        kda_update,
        kda_varlen,
    )
    from rwkv_jit.derived.diagonal import hgrn2, simple_gla, ssd
    from rwkv_jit.derived.diagonal_pooled import (
        hgrn2_update,
        hgrn2_varlen,
        simple_gla_update,
        simple_gla_varlen,
        ssd_update,
        ssd_varlen,
    )
    from rwkv_jit.derived.reference import (
        delta_rule_ref,
        gated_delta_rule2_ref,
        gated_delta_rule_ref,
        hgrn2_ref,
        kda_ref,
        simple_gla_ref,
        ssd_ref,
    )
    from rwkv_jit.errors import CacheError, CompileError, NvrtcNotFoundError, RwkvJitError, UnsupportedConfigError
    from rwkv_jit.inference.options import (
        DecayUpdateOptions,
        DecayVarlenOptions,
        FlushOptions,
        PoolOptions,
        ReplayOptions,
        UpdateOptions,
        VarlenOptions,
    )
    from rwkv_jit.inference.pool import StatePool
    from rwkv_jit.inference.replay import (
        gla_replay,
        gla_verify,
        linear_attention_replay,
        linear_attention_verify,
        replay_commit,
        replay_flush,
        wkv5_replay,
        wkv5_verify,
        wkv6_replay,
        wkv6_verify,
        wkv7_replay,
        wkv7_verify,
    )
    from rwkv_jit.inference.ring import ReplayRing
    from rwkv_jit.inference.states import StateSpec
    from rwkv_jit.inference.update import (
        gla_update,
        linear_attention_update,
        wkv5_update,
        wkv6_update,
        wkv7_update,
    )
    from rwkv_jit.inference.varlen import (
        gla_varlen,
        linear_attention_varlen,
        wkv5_varlen,
        wkv6_varlen,
        wkv7_varlen,
    )
    from rwkv_jit.inference.wkv4 import wkv4_update
    from rwkv_jit.layers.convolution import causal_conv1d, causal_conv1d_update
    from rwkv_jit.layers.functions import activate, gated, gated_norm, norm_shift, prepare_keys, shift_mix, token_shift
    from rwkv_jit.layers.loss import cross_entropy, linear_cross_entropy
    from rwkv_jit.layers.reference import (
        activate_ref,
        causal_conv1d_ref,
        gated_norm_ref,
        gated_ref,
        norm_shift_ref,
        prepare_keys_ref,
        token_shift_ref,
    )
    from rwkv_jit.machine import cache_info, clear_cache, env_report, is_available
    from rwkv_jit.modes import (
        get_bfloat16_precision,
        is_batch_invariant,
        set_batch_invariant,
        set_bfloat16_precision,
    )
    from rwkv_jit.ops.gla import gla
    from rwkv_jit.ops.linear_attention import linear_attention
    from rwkv_jit.ops.options import CallOptions, DecayOptions
    from rwkv_jit.ops.timex import timex
    from rwkv_jit.ops.wkv4 import wkv4
    from rwkv_jit.ops.wkv5 import wkv5
    from rwkv_jit.ops.wkv6 import wkv6
    from rwkv_jit.ops.wkv7 import wkv7
    from rwkv_jit.reference import gla_ref, linear_attention_ref, timex_ref, wkv4_ref, wkv5_ref, wkv6_ref, wkv7_ref
    from rwkv_jit.stats import add_hook


_ROOMS = ("nn", "parallel")  # with names of their own


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"rwkv_jit.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv_jit' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_ROOMS]


for _ops in ("ops", "inference", "layers"):
    after.imported("torch", then=f"rwkv_jit.{_ops}.registry")
