"""CUDA kernels for RWKV and other linear attention, compiled for your GPU when they are first called.

Importing this package touches neither CUDA nor CuPy nor the disk; each public name loads its module when it is used.
The torch ops are registered as soon as both this package and torch are imported, in either order, so that exported
programs load.
"""

from __future__ import annotations

from rwkv_jit.kernels import __version__ as __version__
from rwkv_jit.kernels import lazy, on_import

# The public names of each module. Type checkers read __init__.pyi, which tools/stubs.py makes of these.
_MODULES = lazy.modules({
    "ops.gla": "gla",
    "ops.linear_attention": "linear_attention",
    "ops.timex": "timex",
    "ops.wkv4": "wkv4",
    "pool.wkv4": "wkv4_update",
    "ops.wkv5": "wkv5",
    "ops.wkv6": "wkv6",
    "ops.wkv7": "wkv7",
    "ops.delta": "kda gated_delta_rule delta_rule gated_delta_rule2",
    "ops.diagonal": "simple_gla hgrn2 ssd",
    "pool.functions":
        "delta_rule_replay delta_rule_update delta_rule_varlen delta_rule_verify gated_delta_rule2_replay "
        "gated_delta_rule2_update gated_delta_rule2_varlen gated_delta_rule2_verify gated_delta_rule_replay "
        "gated_delta_rule_update gated_delta_rule_varlen gated_delta_rule_verify gla_replay gla_update gla_varlen "
        "gla_verify hgrn2_replay hgrn2_update hgrn2_varlen hgrn2_verify kda_replay kda_update kda_varlen "
        "kda_verify linear_attention_replay linear_attention_update linear_attention_varlen "
        "linear_attention_verify simple_gla_replay simple_gla_update simple_gla_varlen simple_gla_verify "
        "ssd_replay ssd_update ssd_varlen ssd_verify wkv5_replay wkv5_update wkv5_varlen wkv5_verify wkv6_replay "
        "wkv6_update wkv6_varlen wkv6_verify wkv7_replay wkv7_update wkv7_varlen wkv7_verify",
    "layers.activate": "activate",
    "layers.gated": "gated",
    "layers.gated_norm": "gated_norm",
    "layers.norm_shift": "norm_shift",
    "layers.prepare_keys": "prepare_keys",
    "layers.shift_mix": "shift_mix",
    "layers.token_shift": "token_shift",
    "plain.layer_references":
        "activate_ref causal_conv1d_ref gated_ref gated_norm_ref norm_shift_ref prepare_keys_ref token_shift_ref",
    "layers.causal_conv1d": "causal_conv1d causal_conv1d_update",
    "layers.loss": "cross_entropy linear_cross_entropy",
    "plain.reference":
        "delta_rule_ref gated_delta_rule2_ref gated_delta_rule_ref gla_ref hgrn2_ref kda_ref linear_attention_ref "
        "simple_gla_ref ssd_ref timex_ref wkv4_ref wkv5_ref wkv6_ref wkv7_ref",
    "call.options": "CallOptions DecayOptions",
    "pool.options":
        "PoolOptions UpdateOptions DecayUpdateOptions VarlenOptions DecayVarlenOptions ReplayOptions FlushOptions",
    "pool.replay": "replay_commit replay_flush",
    "pool.ring": "ReplayRing",
    "call.custom": "Template",
    "pool.state_pool": "StatePool",
    "pool.states": "StateSpec",
    "ahead.warm": "specialize compile_async warm",
    "desk.versions": "is_available env_report cache_info clear_cache",
    "kernels.stats": "add_hook",
    "call.switches": "set_batch_invariant set_bfloat16_precision get_bfloat16_precision is_batch_invariant",
    "kernels.errors": "RwkvJitError CompileError NvrtcNotFoundError UnsupportedConfigError CacheError",
})  # fmt: skip
_ROOMS = ("compat", "nn", "parallel")  # with names of their own
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy.members(globals(), _ROOMS)

on_import.imported(["torch"], then="rwkv_jit.call.registry")
