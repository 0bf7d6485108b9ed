"""A plugin of vLLM: RWKV-7, whose time mixing runs on the kernels of rwkv_jit."""


def register() -> None:
    """Tell vLLM of the model. vLLM calls this in each of its processes, maybe more than once."""
    from rwkv7_slots import ARCHITECTURE, MODEL_TYPE
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    from rwkv_jit_vllm.config import BACKEND, Rwkv7Config

    AutoConfig.register(MODEL_TYPE, Rwkv7Config, exist_ok=True)
    if BACKEND not in MambaAttentionBackendEnum.__members__:
        register_backend(BACKEND, "rwkv_jit_vllm.model.Rwkv7Backend", is_mamba=True)
    MODELS_CONFIG_MAP[ARCHITECTURE] = MambaModelConfig  # the sizes of state blocks, and the mode of the prefix cache
    ModelRegistry.register_model(ARCHITECTURE, "rwkv_jit_vllm.model:Rwkv7ForCausalLM")
