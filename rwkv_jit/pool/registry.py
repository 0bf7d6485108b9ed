"""The torch ops of inference: registered at once, as an exported program names them, run by modules imported later."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from rwkv_jit.kernels import on_import

_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")
# By name: the schema, and the module that has `run`, `fake` and `record` of it. All of them change tensors in place.
_OPS = {
    "update_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor[] inputs, Tensor? w0, Tensor? state_indices, "
        "Tensor? write_indices, Tensor? seed, int null_index, float scale, str decay, str state_layout) -> ()",
        "rwkv_jit.pool.update",
    ),
    "wkv4_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? state_indices, "
        "Tensor? write_indices, int null_index, str decay) -> ()",
        "rwkv_jit.pool.wkv4",
    ),
    "replay_states": (
        "(str op, str phase, Tensor(a!) state, Tensor(b!)? y, Tensor(c!) cursors, Tensor(d!) arrivals, Tensor(e!)? d, "
        "Tensor(f!)? b, Tensor(g!) k, Tensor(h!) v, Tensor(i!)? u, int length, Tensor[] inputs, Tensor? w0, "
        "Tensor? state_indices, Tensor? accept_lens, Tensor? seed, int null_index, float scale, str decay, "
        "str state_layout) -> ()",
        "rwkv_jit.pool.replay_calls",
    ),
    "varlen_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor[] inputs, Tensor? w0, Tensor cu_seqlens, "
        "Tensor? state_indices, Tensor? write_indices, Tensor? has_initial_state, Tensor? num_active, "
        "Tensor? checkpoint_offsets, Tensor? checkpoint_indices, Tensor? seed, int null_index, int? max_seqlen, "
        "float scale, str decay, float? decay_bound, str state_layout) -> ()",
        "rwkv_jit.pool.varlen",
    ),
}


def find(name: str) -> Any:
    """Return the torch op of a name."""
    return getattr(torch.ops.rwkv_jit, name).default


def _later(module: str, part: str) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(module), part)(*arguments, **named)

    return run


for _name, (_schema, _module) in _OPS.items():
    _LIBRARY.define(_name + _schema)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _later(_module, "run"), _key)
    _LIBRARY.impl(_name, _later(_module, "record"), "Autograd", with_keyset=True)
    torch.library.register_fake(f"rwkv_jit::{_name}", _later(_module, "fake"), lib=_LIBRARY)
on_import.imported(["torch.utils.flop_counter"], then="rwkv_jit.pool.flops")  # which nobody but those who count needs
