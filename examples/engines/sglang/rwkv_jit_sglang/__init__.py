"""A plugin of SGLang: RWKV-7 on the kernels of rwkv_jit, and these for the delta rules of SGLang's models."""


def register() -> None:
    """Tell SGLang of the model, its backend and the kernels. SGLang calls this in each of its processes."""
    from rwkv7_slots import ARCHITECTURE, MODEL_TYPE
    from sglang.srt.configs.linear_attn_model_registry import (
        LinearAttnModelSpec,
        get_linear_attn_spec_by_arch,
        register_linear_attn_model,
    )
    from sglang.srt.models.registry import ModelRegistry
    from transformers import AutoConfig

    from rwkv_jit_sglang import kernels
    from rwkv_jit_sglang.config import Rwkv7Config
    from rwkv_jit_sglang.model import RwkvJitRwkv7ForCausalLM

    AutoConfig.register(MODEL_TYPE, Rwkv7Config, exist_ok=True)
    ModelRegistry.models[ARCHITECTURE] = RwkvJitRwkv7ForCausalLM
    if get_linear_attn_spec_by_arch(ARCHITECTURE) is None:
        backend = "rwkv_jit_sglang.backend.Rwkv7Backend"
        register_linear_attn_model(LinearAttnModelSpec(Rwkv7Config, backend, [ARCHITECTURE]))
    kernels.register()
