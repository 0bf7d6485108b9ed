"""Existing code on these kernels, unchanged: the extensions that it would compile are here, and functions around them."""

# tools/stubs.py has written this.
# ruff: noqa
# fmt: off

from rwkv_jit.compat import fla as fla
from rwkv_jit.compat import hf as hf
from rwkv_jit.compat import mamba as mamba
from rwkv_jit.compat import megatron as megatron
from rwkv_jit.compat.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
from rwkv_jit.compat.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from rwkv_jit.compat.functions import RUN_CUDA as RUN_CUDA
from rwkv_jit.compat.functions import RUN_CUDA_RWKV5 as RUN_CUDA_RWKV5
from rwkv_jit.compat.functions import RUN_CUDA_RWKV6 as RUN_CUDA_RWKV6
from rwkv_jit.compat.functions import RUN_CUDA_RWKV6_STATE as RUN_CUDA_RWKV6_STATE
from rwkv_jit.compat.functions import RUN_CUDA_RWKV7g as RUN_CUDA_RWKV7g
from rwkv_jit.compat.functions import RUN_RWKV7_INFCTX as RUN_RWKV7_INFCTX
from rwkv_jit.compat.functions import RUN_RWKV7_STATE as RUN_RWKV7_STATE
from rwkv_jit.compat.functions import RWKV7_BATCH_OP as RWKV7_BATCH_OP
from rwkv_jit.compat.functions import RWKV7_CLAMPW_CUDA as RWKV7_CLAMPW_CUDA
from rwkv_jit.compat.functions import RWKV7_OP as RWKV7_OP
from rwkv_jit.compat.functions import RWKV7_STATE_CLAMPW_CUDA as RWKV7_STATE_CLAMPW_CUDA
from rwkv_jit.compat.functions import RWKV7_STATE_PASSING_CLAMPW_CUDA as RWKV7_STATE_PASSING_CLAMPW_CUDA
from rwkv_jit.compat.functions import TimeX as TimeX
from rwkv_jit.compat.functions import TritonRWKV7 as TritonRWKV7
from rwkv_jit.compat.functions import rwkv5_cuda_linear_attention as rwkv5_cuda_linear_attention
from rwkv_jit.compat.functions import rwkv6_cuda_linear_attention as rwkv6_cuda_linear_attention
from rwkv_jit.compat.functions import rwkv7_recurrent as rwkv7_recurrent
from rwkv_jit.compat.wind import attn_backstepping_longhead as attn_backstepping_longhead
from rwkv_jit.compat.wind import attn_backstepping_longhead_wrap as attn_backstepping_longhead_wrap
from rwkv_jit.compat.wind import attn_backstepping_smallhead as attn_backstepping_smallhead
from rwkv_jit.compat.wind import attn_backstepping_smallhead_wrap as attn_backstepping_smallhead_wrap
from rwkv_jit.compat.wind import attn_chunked_cuda as attn_chunked_cuda
from rwkv_jit.compat.wind import attn_chunked_cuda_varlen as attn_chunked_cuda_varlen
from rwkv_jit.compat.wind import attn_chunked_cuda_wrap as attn_chunked_cuda_wrap
from rwkv_jit.compat.wind import attn_triton_bighead as attn_triton_bighead
from rwkv_jit.compat.wind import attn_triton_bighead_bf16 as attn_triton_bighead_bf16
from rwkv_jit.compat.wind import attn_triton_bighead_fp16 as attn_triton_bighead_fp16
from rwkv_jit.compat.wind import attn_triton_bighead_fp32 as attn_triton_bighead_fp32
from rwkv_jit.compat.wind import attn_triton_bighead_wrap as attn_triton_bighead_wrap
from rwkv_jit.compat.wind import load_backstepping_longhead as load_backstepping_longhead
from rwkv_jit.compat.wind import load_backstepping_smallhead as load_backstepping_smallhead
from rwkv_jit.compat.wind import load_chunked_cuda as load_chunked_cuda
from rwkv_jit.compat.wind import load_chunked_cuda_varlen as load_chunked_cuda_varlen

MODELS: tuple[str, ...]
is_installed: bool

def install() -> None: ...
def put(owner: object, name: str, ours: object) -> None: ...
def uninstall() -> None: ...

__all__ = [
    "RUN_CUDA", "RUN_CUDA_RWKV5", "RUN_CUDA_RWKV6", "RUN_CUDA_RWKV6_STATE", "RUN_CUDA_RWKV7g", "RUN_RWKV7_INFCTX",
    "RUN_RWKV7_STATE", "RWKV7_BATCH_OP", "RWKV7_CLAMPW_CUDA", "RWKV7_OP", "RWKV7_STATE_CLAMPW_CUDA",
    "RWKV7_STATE_PASSING_CLAMPW_CUDA", "TimeX", "TritonRWKV7", "attn_backstepping_longhead",
    "attn_backstepping_longhead_wrap", "attn_backstepping_smallhead", "attn_backstepping_smallhead_wrap",
    "attn_chunked_cuda", "attn_chunked_cuda_varlen", "attn_chunked_cuda_wrap", "attn_triton_bighead",
    "attn_triton_bighead_bf16", "attn_triton_bighead_fp16", "attn_triton_bighead_fp32", "attn_triton_bighead_wrap",
    "causal_conv1d_fn", "causal_conv1d_update", "install", "load_backstepping_longhead", "load_backstepping_smallhead",
    "load_chunked_cuda", "load_chunked_cuda_varlen", "rwkv5_cuda_linear_attention", "rwkv6_cuda_linear_attention",
    "rwkv7_recurrent", "uninstall"
]
