"""What config.json says, and how large the states are that SGLang has to hold for it."""

from typing import Any

import torch
from rwkv7_slots import MODEL_TYPE, sizes_in
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape, mamba2_state_dtype
from transformers import PretrainedConfig

from rwkv_jit_sglang import batch


class Rwkv7Config(PretrainedConfig):
    """The entries of `rwkv7_slots.config_of`, as attributes."""

    model_type = MODEL_TYPE

    @property
    def full_attention_layer_ids(self) -> list[int]:
        """The layers with keys and values: none."""
        return []

    @property
    def linear_layer_ids(self) -> list[int]:
        """The layers with states: all."""
        return list(range(self.num_hidden_layers))

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """The states of a slot. SGLang asks for the sizes of a convolution too: it has a window of one token."""
        sizes = sizes_in(self)
        head_size = sizes.width // sizes.heads
        conv, temporal = batch.shapes(sizes.heads, head_size, sizes.width)
        of_mamba: dict[str, Any] = {
            "intermediate_size": sizes.width, "conv_dim": sizes.width, "ssm_state_size": head_size,
            "num_heads": sizes.heads, "head_dim": head_size, "state_size": head_size, "conv_kernel": 2,
        }  # fmt: skip
        shape = Mamba2StateShape(conv=conv, temporal=temporal, **of_mamba)
        own = self.dtype if isinstance(self.dtype, torch.dtype) else getattr(torch, self.dtype)
        dtype = Mamba2StateDType(conv=own, temporal=mamba2_state_dtype(self).temporal)
        return Mamba2CacheParams(shape=shape, dtype=dtype, layers=self.linear_layer_ids)
