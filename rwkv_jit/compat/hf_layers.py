"""Layers of transformers with KDA, the gated delta rule or Mamba-2: a decoded token of each is a step of `rwkv_jit.nn`.

A step has fewer launches than the functions that `hf_models` replaces: norms, gates and rates are within these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rwkv_jit.nn import common
from rwkv_jit.nn.delta import GatedDeltaNet, KimiDeltaAttention
from rwkv_jit.nn.mamba2 import Mamba2


class _Kimi(KimiDeltaAttention):
    """The layer with one convolution of queries, keys and values."""

    def __init__(self, *sizes: Any, **options: Any):
        super().__init__(*sizes, **options)
        place = {"device": self.A_log.device}
        self.conv1d = common.short_convolution(2 * self.key_width + self.value_width, self.conv_width, False, place)

    def _taps(self) -> dict[str, int]:
        return {"conv1d": self.conv1d.in_channels}


class Layer(NamedTuple):
    """What a layer of transformers is in `rwkv_jit.nn`: names of its attributes in our order, or beside ours."""

    kind: type[common.Decoding]
    sizes: str
    norm: str
    called: str  # modules that are called
    read: str  # parameters
    has_norm_groups: bool = False


_TAPS = "conv1d.weight conv1d.bias"
_MAMBA2 = Layer(
    Mamba2, "hidden_size num_heads head_dim ssm_state_size n_groups", "norm", "in_proj out_proj",
    f"{_TAPS} A_log dt_bias D norm.weight", has_norm_groups=True,
)  # fmt: skip
LAYERS = {
    **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), _MAMBA2),
    "Qwen3NextGatedDeltaNet": Layer(
        GatedDeltaNet, "hidden_size num_k_heads num_v_heads head_k_dim head_v_dim", "norm",
        "in_proj_qkvz in_proj_ba out_proj", f"{_TAPS} A_log dt_bias norm.weight",
    ),
    "KimiLinearDeltaAttention": Layer(
        _Kimi, "hidden_size num_heads num_heads head_dim head_dim", "o_norm",
        "q_proj k_proj v_proj b_proj f_proj.0=forget_gate.f_a_proj f_proj.1=forget_gate.f_b_proj g_proj.0=g_a_proj "
        "g_proj.1=g_b_proj o_proj",
        f"{_TAPS} A_log=forget_gate.A_log dt_bias=forget_gate.dt_bias o_norm.weight",
    ),
}  # fmt: skip
_OF_CACHE = "is_recording_past", "get_conv_state", "get_recurrent_state"
_twins: WeakKeyDictionary[nn.Module, common.Decoding] = WeakKeyDictionary()


def has_steps(layer: type[nn.Module]) -> bool:
    """Return whether a layer is called as transformers calls it now. Remote code has others of the same names."""
    return [*inspect.signature(layer.forward).parameters][1:4] == ["hidden_states", "cache_params", "attention_mask"]


def with_steps(name: str, theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the forward of a layer that decodes a token by ours, and does all else by theirs."""
    entry = LAYERS[name]

    @functools.wraps(theirs)
    def forward(
        layer: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **more: Any
    ) -> Tensor:  # fmt: skip
        states = _states(entry, layer, hidden_states, cache_params, attention_mask, more)
        if states is None:
            return theirs(layer, hidden_states, cache_params, attention_mask, **more)
        return _twin(entry, layer).step(hidden_states[:, 0], states).unsqueeze(1)  # [B, 1, C]

    return forward


def _states(
    entry: Layer, layer: Any, x: Tensor, cache: Any, mask: Tensor | None, more: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return the states of a call that ours can do, [B, channels, tokens] and [B, H, ...]."""
    is_token = cache is not None and x.dim() == 3 and x.shape[1] == 1 and (mask is None or mask.shape[1] == 1)
    if not is_token or torch.is_grad_enabled() or torch.compiler.is_compiling() or layer.activation != "silu":
        return None
    if not all(hasattr(cache, x) for x in _OF_CACHE) or cache.is_recording_past(layer.layer_idx):
        return None
    if any(more.get(x) is not None for x in ("cu_seq_lens_q", "seq_idx")):
        return None
    if not _are_known([getattr(layer, name) for name in _parents(entry)], layer, x.device):
        return None
    states = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    return None if any(each is None or each.device != x.device for each in states) else states


@functools.cache
def _parents(entry: Layer) -> list[str]:
    """Return the names of modules that a step reads and does not call."""
    places = [x.rpartition("=")[2].split(".") for x in f"{entry.called} {entry.read}".split()]
    return [*dict.fromkeys([place[0] for place in places if len(place) > 1])]


def _are_known(read: Sequence[nn.Module], layer: nn.Module, device: torch.device) -> bool:
    """Return whether modules that are read do what those of transformers do, without hooks, and lie on a device."""
    home = next(kind.__module__ for kind in type(layer).__mro__ if kind.__name__ in LAYERS)
    return all(
        common.is_plain(each, type(each)) and (type(each) is nn.Conv1d or type(each).__module__ == home)
        and all(x is None or x.device == device for x in each._parameters.values())
        for each in read
    )  # fmt: skip


def _twin(entry: Layer, theirs: Any) -> common.Decoding:
    """Return our layer with the modules and parameters that theirs has now."""
    twin = _twins.get(theirs)
    if twin is None:
        sizes = [getattr(theirs, name) for name in entry.sizes.split()]
        norm = getattr(theirs, entry.norm)
        more: dict[str, Any] = {"conv_width": theirs.conv_kernel_size, "eps": norm.variance_epsilon}
        if entry.has_norm_groups:
            more["norm_groups"] = norm.weight.numel() // getattr(norm, "group_size", norm.weight.numel())
        _twins[theirs] = twin = entry.kind(*sizes, **more, device="meta")
    for names, is_read in ((entry.called, False), (entry.read, True)):
        for each in names.split():
            own, _, other = each.partition("=")
            parent, _, name = own.rpartition(".")
            module, given = twin.get_submodule(parent), attrgetter(other or own)(theirs)
            if is_read:  # a view of a parameter is none
                module._parameters[name] = given.flatten() if name == "A_log" else given
            else:
                module._modules[name] = given
    return twin
