"""Existing code on these kernels, unchanged: the extensions that it would compile are here, and functions around them.

After `install`, `torch.utils.cpp_extension.load` of a known name compiles nothing. It defines the ops that the
extension would, with the same names and arguments, and returns a module of them. Torch is not imported for it. The
module `rwkvfla` is there as well, where the package is not.

Functions of RWKV projects have their names and arguments here. Each loads its module when it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rwkv_jit import after
from rwkv_jit.compat import alias

_MODULES = {
    "RUN_CUDA": "rwkv_jit.compat.functions",
    "RUN_CUDA_RWKV5": "rwkv_jit.compat.functions",
    "RUN_CUDA_RWKV6": "rwkv_jit.compat.functions",
    "RUN_CUDA_RWKV6_STATE": "rwkv_jit.compat.functions",
    "RUN_CUDA_RWKV7g": "rwkv_jit.compat.functions",
    "RUN_RWKV7_INFCTX": "rwkv_jit.compat.functions",
    "RUN_RWKV7_STATE": "rwkv_jit.compat.functions",
    "RWKV7_BATCH_OP": "rwkv_jit.compat.functions",
    "RWKV7_CLAMPW_CUDA": "rwkv_jit.compat.functions",
    "RWKV7_OP": "rwkv_jit.compat.functions",
    "RWKV7_STATE_CLAMPW_CUDA": "rwkv_jit.compat.functions",
    "RWKV7_STATE_PASSING_CLAMPW_CUDA": "rwkv_jit.compat.functions",
    "TimeX": "rwkv_jit.compat.functions",
    "TritonRWKV7": "rwkv_jit.compat.functions",
    "rwkv5_cuda_linear_attention": "rwkv_jit.compat.flash_rwkv",
    "rwkv6_cuda_linear_attention": "rwkv_jit.compat.flash_rwkv",
    "rwkv7_recurrent": "rwkv_jit.compat.rwkv7_hf",
    "attn_backstepping_longhead": "rwkv_jit.compat.wind",
    "attn_backstepping_longhead_wrap": "rwkv_jit.compat.wind",
    "attn_backstepping_smallhead": "rwkv_jit.compat.wind",
    "attn_backstepping_smallhead_wrap": "rwkv_jit.compat.wind",
    "attn_chunked_cuda": "rwkv_jit.compat.wind",
    "attn_chunked_cuda_varlen": "rwkv_jit.compat.wind",
    "attn_chunked_cuda_wrap": "rwkv_jit.compat.wind",
    "attn_triton_bighead": "rwkv_jit.compat.wind",
    "attn_triton_bighead_bf16": "rwkv_jit.compat.wind",
    "attn_triton_bighead_fp16": "rwkv_jit.compat.wind",
    "attn_triton_bighead_fp32": "rwkv_jit.compat.wind",
    "attn_triton_bighead_wrap": "rwkv_jit.compat.wind",
    "load_backstepping_longhead": "rwkv_jit.compat.wind",
    "load_backstepping_smallhead": "rwkv_jit.compat.wind",
    "load_chunked_cuda": "rwkv_jit.compat.wind",
    "load_chunked_cuda_varlen": "rwkv_jit.compat.wind",
}
__all__ = [
    "RUN_CUDA",
    "RUN_CUDA_RWKV5",
    "RUN_CUDA_RWKV6",
    "RUN_CUDA_RWKV6_STATE",
    "RUN_CUDA_RWKV7g",
    "RUN_RWKV7_INFCTX",
    "RUN_RWKV7_STATE",
    "RWKV7_BATCH_OP",
    "RWKV7_CLAMPW_CUDA",
    "RWKV7_OP",
    "RWKV7_STATE_CLAMPW_CUDA",
    "RWKV7_STATE_PASSING_CLAMPW_CUDA",
    "TimeX",
    "TritonRWKV7",
    "attn_backstepping_longhead",
    "attn_backstepping_longhead_wrap",
    "attn_backstepping_smallhead",
    "attn_backstepping_smallhead_wrap",
    "attn_chunked_cuda",
    "attn_chunked_cuda_varlen",
    "attn_chunked_cuda_wrap",
    "attn_triton_bighead",
    "attn_triton_bighead_bf16",
    "attn_triton_bighead_fp16",
    "attn_triton_bighead_fp32",
    "attn_triton_bighead_wrap",
    "install",
    "load_backstepping_longhead",
    "load_backstepping_smallhead",
    "load_chunked_cuda",
    "load_chunked_cuda_varlen",
    "rwkv5_cuda_linear_attention",
    "rwkv6_cuda_linear_attention",
    "rwkv7_recurrent",
    "uninstall",
]

if TYPE_CHECKING:
    from rwkv_jit.compat.flash_rwkv import (
        rwkv5_cuda_linear_attention,
        rwkv6_cuda_linear_attention,
    )
    from rwkv_jit.compat.functions import (
        RUN_CUDA,
        RUN_CUDA_RWKV5,
        RUN_CUDA_RWKV6,
        RUN_CUDA_RWKV6_STATE,
        RUN_RWKV7_INFCTX,
        RUN_RWKV7_STATE,
        RWKV7_BATCH_OP,
        RWKV7_CLAMPW_CUDA,
        RWKV7_OP,
        RWKV7_STATE_CLAMPW_CUDA,
        RWKV7_STATE_PASSING_CLAMPW_CUDA,
        RUN_CUDA_RWKV7g,
        TimeX,
        TritonRWKV7,
    )
    from rwkv_jit.compat.rwkv7_hf import (
        rwkv7_recurrent,
    )
    from rwkv_jit.compat.wind import (
        attn_backstepping_longhead,
        attn_backstepping_longhead_wrap,
        attn_backstepping_smallhead,
        attn_backstepping_smallhead_wrap,
        attn_chunked_cuda,
        attn_chunked_cuda_varlen,
        attn_chunked_cuda_wrap,
        attn_triton_bighead,
        attn_triton_bighead_bf16,
        attn_triton_bighead_fp16,
        attn_triton_bighead_fp32,
        attn_triton_bighead_wrap,
        load_backstepping_longhead,
        load_backstepping_smallhead,
        load_chunked_cuda,
        load_chunked_cuda_varlen,
    )

is_installed = False
_LOADER = "torch.utils.cpp_extension"
_is_awaited = False


def install() -> None:
    """Answer for the extensions of RWKV projects from now on.

    A program calls it before it imports a module that says ``from torch.utils.cpp_extension import load``. A second
    call does nothing. What is known stands in `rwkv_jit.compat.extensions.NAMES`; other names are compiled as ever.
    Where the package rwkv-fla is not installed, its `rwkvfla.ops.rwkv6.chunk_rwkv6` and `rwkvfla.ops.rwkv7.chunk_rwkv7`
    are here.
    """
    global is_installed, _is_awaited
    is_installed = True
    alias.add()
    if "rwkv_jit.compat.loading" in sys.modules:
        sys.modules["rwkv_jit.compat.loading"].take_over()
    elif not _is_awaited:
        _is_awaited = True
        after.imported(_LOADER, "rwkv_jit.compat.loading")


def uninstall() -> None:
    """Give `load` back to torch, and take the ops away that were defined for it, and `rwkvfla`."""
    global is_installed
    is_installed = False
    alias.remove()
    if "rwkv_jit.compat.loading" in sys.modules:
        sys.modules["rwkv_jit.compat.loading"].give_back()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv_jit.compat' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
