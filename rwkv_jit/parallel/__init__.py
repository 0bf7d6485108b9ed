"""One sequence or one model over many GPUs: each name loads its module when it is used."""

from __future__ import annotations

from rwkv_jit.kernels import lazy

_MODULES = lazy.modules({
    "parallel.shard": "Shard",
    "parallel.summaries": "compose merge neutral",
    "parallel.functions": (
        "delta_rule gated_delta_rule gated_delta_rule2 gla hgrn2 kda linear_attention simple_gla ssd wkv5 wkv6 wkv7"
    ),
    "parallel.recurrences": "summary",
    "nn.tensor_parallel": "tensor_parallel",
    "parallel.shifting": "causal_conv1d token_shift",
})  # fmt: skip
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy.members(globals())
