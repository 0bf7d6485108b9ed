"""CUDA kernels for RWKV and other linear attention, compiled for your GPU when they are first called.

Importing this package touches neither CUDA nor CuPy nor the disk; each public name loads its module when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "wkv6": "rwkv_jit.ops.wkv6",
    "wkv7": "rwkv_jit.ops.wkv7",
    "wkv6_ref": "rwkv_jit.reference",
    "wkv7_ref": "rwkv_jit.reference",
    "Template": "rwkv_jit.custom",
    "specialize": "rwkv_jit.runtime",
    "compile_async": "rwkv_jit.runtime",
    "warm": "rwkv_jit.runtime",
    "is_available": "rwkv_jit.runtime",
    "env_report": "rwkv_jit.runtime",
    "cache_info": "rwkv_jit.runtime",
    "clear_cache": "rwkv_jit.runtime",
    "add_hook": "rwkv_jit.stats",
    "RwkvJitError": "rwkv_jit.errors",
    "CompileError": "rwkv_jit.errors",
    "NvrtcNotFoundError": "rwkv_jit.errors",
    "UnsupportedConfigError": "rwkv_jit.errors",
    "CacheError": "rwkv_jit.errors",
}
__all__ = [
    "CacheError",
    "CompileError",
    "NvrtcNotFoundError",
    "RwkvJitError",
    "Template",
    "UnsupportedConfigError",
    "add_hook",
    "cache_info",
    "clear_cache",
    "compile_async",
    "env_report",
    "is_available",
    "specialize",
    "warm",
    "wkv6",
    "wkv6_ref",
    "wkv7",
    "wkv7_ref",
]

if TYPE_CHECKING:
    from rwkv_jit.custom import Template
    from rwkv_jit.errors import CacheError, CompileError, NvrtcNotFoundError, RwkvJitError, UnsupportedConfigError
    from rwkv_jit.ops.wkv6 import wkv6
    from rwkv_jit.ops.wkv7 import wkv7
    from rwkv_jit.reference import wkv6_ref, wkv7_ref
    from rwkv_jit.runtime import cache_info, clear_cache, compile_async, env_report, is_available, specialize, warm
    from rwkv_jit.stats import add_hook


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv_jit' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
