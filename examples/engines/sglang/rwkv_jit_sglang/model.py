"""The model, as SGLang calls it."""

from collections.abc import Iterable
from typing import Any

import torch
from rwkv7_slots import Rwkv7, sizes_in
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn


class RwkvJitRwkv7ForCausalLM(nn.Module):
    """RWKV-7 on one GPU.

    Raises
    ------
    ValueError
        SGLang is asked for what this example does not do: several ranks, or a quantized model.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        for option, given, legal in (
            ("tp_size", get_parallel().tp_size, 1),
            ("pp_size", get_parallel().pp_size, 1),
            ("quant_config", quant_config, None),
        ):
            if given != legal:
                raise ValueError(f"{option}: expected {legal}, got {given}")
        self.config = config
        self.model = Rwkv7(sizes_in(config))
        self.logits_processor = LogitsProcessor(config)

    def get_input_embeddings(self) -> nn.Module:
        """Return the vectors of tokens."""
        return self.model.emb

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, input_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Read the tokens of a batch, and return what SGLang samples from."""
        x = self.model.embed(input_ids) if input_embeds is None else input_embeds
        if not forward_batch.forward_mode.is_idle():
            backend = get_attn_backend().linear_attn_backend
            states = [backend.layer_states(layer) for layer in range(self.model.sizes.layers)]
            x = self.model(x, states, backend.step)
        return self.logits_processor(input_ids, x, self.model.head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load parameters with BlinkDL's names."""
        self.model.load(weights)
