"""The classes that vLLM knows: a layer with states, their backend, and the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rwkv7_slots import Rwkv7, Step, sizes_in
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from rwkv_jit_vllm import batch
from rwkv_jit_vllm.config import BACKEND


@dataclass
class Rwkv7Metadata(BaseMambaAttentionMetadata):
    """What vLLM says of a batch, and the same as arguments of rwkv_jit."""

    step: Step | None = None


class Rwkv7MetadataBuilder(BaseMambaAttentionMetadataBuilder[Rwkv7Metadata]):
    """Makes the metadata of a step once, for all layers."""

    metadata_cls = Rwkv7Metadata
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False  # `step` would keep the old slots
    needs_causal_conv1d_metadata = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False,
        **kwargs: Any,
    ) -> Rwkv7Metadata:  # fmt: skip
        """Return the metadata of a batch."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        common = common_attn_metadata
        given = made.state_indices_tensor_d, made.state_indices_tensor_p, made.has_initial_states_p
        made.step = batch.step_of(common.query_start_loc, common.max_query_len, *given)
        return made


class Rwkv7Backend(AttentionBackend):
    """Names the builder of the metadata."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[Rwkv7MetadataBuilder]:
        """Return the builder of the metadata."""
        return Rwkv7MetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Return that the cache holds states, and no keys and values."""
        return True


class Rwkv7States(MambaBase):
    """The states of one layer, which vLLM binds to `kv_cache`."""

    def __init__(self, name: str, vllm_config: VllmConfig):
        self.kinds = Rwkv7ForCausalLM.get_mamba_state_dtype_from_config(vllm_config)
        self.sizes = Rwkv7ForCausalLM.get_mamba_state_shape_from_config(vllm_config)
        self.kv_cache = ()
        context = vllm_config.compilation_config.static_forward_context
        if name in context:
            raise ValueError(f"layer {name}: expected no other one of this name")
        context[name] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The backend, as the plugin has registered it."""
        return MambaAttentionBackendEnum[BACKEND]

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        """Return the shapes of the states of a slot."""
        return self.sizes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return their dtypes."""
        return self.kinds


class Rwkv7ForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """RWKV-7 on one GPU.

    Raises
    ------
    ValueError
        vLLM is asked for what this example does not do: several ranks, drafts, or a quantized model.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        parallel = vllm_config.parallel_config
        for option, given, legal in (
            ("tensor_parallel_size", parallel.tensor_parallel_size, 1),
            ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
            ("num_speculative_tokens", vllm_config.num_speculative_tokens, 0),
            ("quantization", vllm_config.model_config.quantization, None),
        ):
            if given != legal:
                raise ValueError(f"{option}: expected {legal}, got {given}")
        self.model = Rwkv7(sizes_in(vllm_config.model_config.hf_config))
        names = [".".join(filter(None, (prefix, f"blocks.{i}"))) for i in range(self.model.sizes.layers)]
        self.first, self.layers = names[0], [Rwkv7States(name, vllm_config) for name in names]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return tokens [T] as vectors [T, C]."""
        return self.model.embed(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Read the tokens of a batch, and return the vectors behind each one."""
        x = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # there is no pool yet
            layer, count = self.layers[0], len(self.layers)
            step, states = batch.nothing_read(len(x), layer.sizes, layer.kinds, count, x.device)
        else:
            step, states = metadata[self.first].step, [batch.states_of(layer.kv_cache) for layer in self.layers]
        return self.model(x, states, step)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits behind the tokens that vLLM has chosen."""
        return self.model.head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters with BlinkDL's names, and return those of the modules."""
        return {f"model.{name}" for name in self.model.load(weights)}

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the states of a slot."""
        return batch.dtypes(vllm_config.cache_config.mamba_ssm_cache_dtype, vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the states of a slot."""
        sizes = sizes_in(vllm_config.model_config.hf_config)
        return batch.shapes(sizes.heads, sizes.width // sizes.heads, sizes.width)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """Return how the prefix cache copies each state to another slot: whole."""
        return (get_temporal_copy_spec,) * 3
