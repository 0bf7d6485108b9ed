"""What config.json says, as vLLM passes it between its processes."""

from rwkv7_slots import MODEL_TYPE
from transformers import PretrainedConfig

BACKEND = "RWKV_JIT_RWKV7"  # among vLLM's mamba backends


class Rwkv7Config(PretrainedConfig):
    """The entries of `rwkv7_slots.config_of`, as attributes."""

    model_type = MODEL_TYPE
