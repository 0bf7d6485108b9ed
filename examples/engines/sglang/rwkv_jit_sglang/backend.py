"""The backend of the layers: it says once in a step what SGLang knows of the batch."""

from typing import Any, NoReturn

from rwkv7_slots import States, Step
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner

from rwkv_jit_sglang import batch


class Rwkv7Backend(MambaAttnBackendBase):
    """Holds `step` and the states of a layer for the model, which calls rwkv_jit itself.

    Raises
    ------
    ValueError
        SGLang is asked to verify drafts, which this example does not do.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        self.conv_states_shape = self.req_to_token_pool.mamba_pool.mamba_cache.conv[0].shape
        self.step: Step | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Take a batch of any kind, which is no part of a CUDA graph."""
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.logical_forward_mode
        if mode.is_decode_or_idle():
            self._take(mode)
            return
        lengths = forward_batch.extend_seq_lens_cpu
        longest = len(forward_batch.input_ids) if lengths is None else max(map(int, lengths))
        self._take(mode, forward_batch.extend_prefix_lens, longest)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Take a batch of decodes for a CUDA graph, which reads the slots from where they lie now."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._take(forward_batch.forward_mode)

    def _take(self, mode: ForwardMode, *prompts: Any) -> None:
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            raise ValueError(f"forward_mode: expected no speculative decoding, got {mode.name}")
        metadata = self.forward_metadata
        self.step = batch.step_of(metadata.mamba_cache_indices, metadata.query_start_loc, *prompts)

    def layer_states(self, layer_id: int) -> States:
        """Return the states of a layer, of all slots."""
        held = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        return batch.states_of(held.conv, held.temporal)

    def forward_decode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: layers take `step` and `layer_states` instead.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError("Rwkv7Backend has step and layer_states, and no forward")

    forward_extend = forward_decode
