"""Models of transformers with short convolutions, KDA, the gated delta rule or Mamba-2: their functions on these ops.

A file of such a model has its functions as globals, which fall back to slow code where FLA, mamba_ssm or causal-conv1d
is missing. Older files give them to each layer. Both are found by their names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from rwkv_jit import compat
from rwkv_jit.compat import hf_layers, replacing
from rwkv_jit.compat.falling_back import with_fallback
from rwkv_jit.kernels.errors import UnsupportedConfigError


class Function(NamedTuple):
    """A function of such models."""

    module: str  # of ours
    called: tuple[str, ...]  # what files of models, and layers, call it
    arguments: str  # those that files of models have
    has_gradients: bool = True
    ours: str = ""  # where ours has another name


_DELTA = "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel **kwargs"
_CHUNKED = _DELTA.replace("beta ", "beta chunk_size ")
_FAMILY, _MAMBA, _CONVOLUTION = (f"rwkv_jit.compat.{name}" for name in ("fla.family", "mamba", "causal_conv1d"))
# By the names that `kernels` knows them by.
FUNCTIONS = {
    "chunk_gated_delta_rule": Function(_FAMILY, ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"), _CHUNKED),
    "fused_recurrent_gated_delta_rule": Function(
        _FAMILY,
        ("torch_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule"),
        _DELTA,
    ),
    "chunk_kda": Function(_FAMILY, ("chunk_kimi_delta_attention", "chunk_kda"), _CHUNKED),
    "fused_recurrent_kda": Function(_FAMILY, ("recurrent_kimi_delta_attention", "fused_recurrent_kda"), _DELTA),
    "mamba_chunk_scan_combined": Function(
        _MAMBA,
        ("mamba2_chunk_scan", "mamba_chunk_scan_combined"),
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states **kwargs",
    ),
    "selective_state_update": Function(
        _MAMBA,
        ("mamba2_selective_state_update", "selective_state_update"),
        "state hidden_states dt A B C D dt_bias dt_softplus z **kwargs",
        ours="update_of_heads",
    ),
    "causal_conv1d_fn": Function(_CONVOLUTION, ("causal_conv1d_fn",), "hidden_states weight bias activation **kwargs"),
    "causal_conv1d_update": Function(
        _CONVOLUTION, ("causal_conv1d_update",), "hidden_states conv_state weight bias activation", has_gradients=False
    ),
}
_NAMES = {called: name for name, function in FUNCTIONS.items() for called in function.called}


@functools.cache
def find(name: str) -> Callable[..., Any]:
    """Return our function of this name, with the arguments of transformers: what ours does not know is not read."""
    entry, kind = FUNCTIONS[name], inspect.Parameter
    ours = getattr(import_module(entry.module), entry.ours or name)
    known = inspect.signature(ours).parameters
    reads_any = any(x.kind == kind.VAR_KEYWORD for x in known.values())

    def call(*arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values()) if torch.is_grad_enabled() and not entry.has_gradients else ()
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            raise UnsupportedConfigError("a gradient through states that change in place is not supported")
        return ours(*arguments, **{option: x for option, x in options.items() if reads_any or option in known})

    named = (x.removeprefix("**") for x in entry.arguments.split())
    kinds = (kind.VAR_KEYWORD if x.startswith("**") else kind.POSITIONAL_OR_KEYWORD for x in entry.arguments.split())
    call.__signature__ = inspect.Signature(list(map(kind, named, kinds)))  # type: ignore[attr-defined]
    call.__name__ = name
    return call


def put_into(owners: Iterable[tuple[str, Any]], put: Callable[[Any, str, Any], None] = replacing.put) -> list[str]:
    """Put ours into modules and layers, by their names, with their own behind it; return what stands for ours now."""
    found = []
    for where, owner in owners:
        for called in _NAMES:
            theirs = vars(owner).get(called)
            if callable(theirs) and not isinstance(theirs, type):
                found.append(f"{where}.{called}")
                if not replacing.has(owner, called):
                    put(owner, called, with_fallback(found[-1], find(_NAMES[called]), theirs))
        for name in hf_layers.LAYERS:
            layer = vars(owner).get(name)
            if isinstance(layer, type) and issubclass(layer, torch.nn.Module) and hf_layers.has_steps(layer):
                found.append(f"{where}.{name}.forward")
                if not replacing.has(layer, "forward"):
                    put(layer, "forward", hf_layers.with_steps(name, layer.forward))
    return found


def take_over(model: ModuleType) -> None:
    """Put ours into the file of a model."""
    put_into([(model.__name__, model)], compat.put)
