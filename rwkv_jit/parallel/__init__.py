"""One sequence or one model over many GPUs: each name loads its module when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "Shard": "rwkv_jit.parallel.shard",
    "compose": "rwkv_jit.parallel.summaries",
    "gla": "rwkv_jit.parallel.recurrences",
    "linear_attention": "rwkv_jit.parallel.recurrences",
    "merge": "rwkv_jit.parallel.summaries",
    "neutral": "rwkv_jit.parallel.summaries",
    "summary": "rwkv_jit.parallel.recurrences",
    "tensor_parallel": "rwkv_jit.parallel.tensor",
    "token_shift": "rwkv_jit.parallel.shifting",
    "wkv5": "rwkv_jit.parallel.recurrences",
    "wkv6": "rwkv_jit.parallel.recurrences",
    "wkv7": "rwkv_jit.parallel.recurrences",
}
__all__ = [
    "Shard",
    "compose",
    "gla",
    "linear_attention",
    "merge",
    "neutral",
    "summary",
    "tensor_parallel",
    "token_shift",
    "wkv5",
    "wkv6",
    "wkv7",
]

if TYPE_CHECKING:
    from rwkv_jit.parallel.recurrences import gla, linear_attention, summary, wkv5, wkv6, wkv7
    from rwkv_jit.parallel.shard import Shard
    from rwkv_jit.parallel.shifting import token_shift
    from rwkv_jit.parallel.summaries import compose, merge, neutral
    from rwkv_jit.parallel.tensor import tensor_parallel


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv_jit.parallel' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
