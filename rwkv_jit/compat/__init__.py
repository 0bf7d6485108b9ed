"""Existing code on these kernels, unchanged: the extensions that it would compile are here, and functions around them.

After `install`, `torch.utils.cpp_extension.load` of a known name compiles nothing. It defines the ops that the
extension would, with the same names and arguments, and returns a module of them. RWKV-4 of transformers finds its
kernel here too, its models with short convolutions, KDA, the gated delta rule or Mamba-2 their functions, deepspeed
its fused Adam, and the module `rwkvfla` is there where the package is not. Nothing of that is imported for it.

Functions of RWKV projects have their names and arguments here. Each loads its module when it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from rwkv_jit.compat import alias, replacing
from rwkv_jit.kernels import lazy, on_import

_MODULES = lazy.modules({
    "compat.causal_conv1d": "causal_conv1d_fn causal_conv1d_update",
    "compat.functions":
        "RUN_CUDA RUN_CUDA_RWKV5 RUN_CUDA_RWKV6 RUN_CUDA_RWKV6_STATE RUN_CUDA_RWKV7g RUN_RWKV7_INFCTX "
        "RUN_RWKV7_STATE RWKV7_BATCH_OP RWKV7_CLAMPW_CUDA RWKV7_OP RWKV7_STATE_CLAMPW_CUDA "
        "RWKV7_STATE_PASSING_CLAMPW_CUDA TimeX TritonRWKV7 rwkv5_cuda_linear_attention rwkv6_cuda_linear_attention "
        "rwkv7_recurrent",
    "compat.wind":
        "attn_backstepping_longhead attn_backstepping_longhead_wrap attn_backstepping_smallhead "
        "attn_backstepping_smallhead_wrap attn_chunked_cuda attn_chunked_cuda_varlen attn_chunked_cuda_wrap "
        "attn_triton_bighead attn_triton_bighead_bf16 attn_triton_bighead_fp16 attn_triton_bighead_fp32 "
        "attn_triton_bighead_wrap load_backstepping_longhead load_backstepping_smallhead load_chunked_cuda "
        "load_chunked_cuda_varlen",
})  # fmt: skip
_ROOMS = ("fla", "hf", "mamba", "megatron")
__all__ = sorted([*_MODULES, "install", "uninstall"])
__getattr__, __dir__ = lazy.members(globals(), _ROOMS)
is_installed = False
# Files of transformers with short convolutions, KDA, the gated delta rule or Mamba-2.
MODELS = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid", "inkling", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "qwen3_next", "qwen4_exp", "zamba", "zamba2",
    )
)  # fmt: skip
# Modules of others, and who takes over there as soon as they are imported.
_REPLACED = {
    "torch.utils.cpp_extension": "rwkv_jit.compat.loading",
    "deepspeed.ops.op_builder.builder": "rwkv_jit.compat.deepspeed",
    "transformers.models.rwkv.modeling_rwkv": "rwkv_jit.compat.hf_rwkv4",
    **dict.fromkeys(MODELS, "rwkv_jit.compat.hf_models"),
}


def install() -> None:
    """Replace extensions of RWKV projects, and those that transformers and deepspeed would build, from now on.

    A program calls it before it imports a module that says ``from torch.utils.cpp_extension import load``. A second
    call does nothing. `rwkv_jit.compat.extensions.NAMES` lists the known names; torch compiles all others. If the
    package rwkv-fla is not installed, `rwkvfla.ops.rwkv6.chunk_rwkv6` and `rwkvfla.ops.rwkv7.chunk_rwkv7` exist too.

    RWKV-4 of transformers gets its kernel. The models of `rwkv_jit.compat.MODELS`, with short convolutions, KDA,
    the gated delta rule or Mamba-2, run on these ops without FLA, mamba_ssm and causal-conv1d, and with them too.

    deepspeed's FusedAdam runs on the fused Adam of torch, unless deepspeed has loaded its op before.

    The environment variable RWKVJIT_COMPAT=1 does the same for a program that has no such line.
    """
    global is_installed
    with replacing.LOCK:
        is_installed = True
        alias.add()
    on_import.imported(_REPLACED, _take_over)


def uninstall() -> None:
    """Restore torch's `load`, remove the ops that were defined for it, and restore all other modules."""
    global is_installed
    with replacing.LOCK:
        is_installed = False
        on_import.forget(_take_over)
        alias.remove()
        replacing.undo()
        for name in ("deepspeed", "loading"):
            getattr(sys.modules.get(f"rwkv_jit.compat.{name}"), "give_back", lambda: None)()


def put(owner: Any, name: str, ours: Any) -> None:
    """Put ours in the place of what `owner` has there until `uninstall`, which may have been called meanwhile."""
    with replacing.LOCK:
        if is_installed:
            replacing.put(owner, name, ours)


def _take_over(names: list[str]) -> None:
    """Take over in modules of others that have been executed."""
    for name in names if is_installed else ():
        import_module(_REPLACED[name]).take_over(sys.modules[name])
