"""The torch ops over pools: registered at once, as an exported program names them, run by modules imported later."""

from __future__ import annotations

from rwkv_jit.call.registry import TYPES, register
from rwkv_jit.kernels import on_import
from rwkv_jit.schedules import derived_table as derived

_TRAITS = {trait: default for op in derived.OPS.values() for trait, default in op.traits.items()}
_SWITCHES = ", ".join(f"{TYPES[type(default)]} {trait}={default!r}" for trait, default in _TRAITS.items())
# By name: the schema, and the module that implements it. All of them change tensors in place.
_OPS = {
    "update_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor?[] inputs, Tensor? w0, Tensor? state_indices, "
        "Tensor? write_indices, Tensor? seed, int null_index, float scale, str decay, str state_layout, "
        f"*, {_SWITCHES}) -> ()",
        "pool.update",
    ),
    "wkv4_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? state_indices, "
        "Tensor? write_indices, int null_index, str decay) -> ()",
        "pool.wkv4",
    ),
    "replay_states": (
        "(str op, str phase, Tensor(a!) state, Tensor(b!)? y, Tensor(c!) cursors, Tensor(d!) arrivals, Tensor(e!)? d, "
        "Tensor(f!)? b, Tensor(g!) k, Tensor(h!) v, Tensor(i!)? u, int length, Tensor[] inputs, Tensor? w0, "
        "Tensor? state_indices, Tensor? accept_lens, Tensor? seed, int null_index, float scale, str decay, "
        "str state_layout) -> ()",
        "pool.replay",
    ),
    "varlen_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor?[] inputs, Tensor? w0, Tensor cu_seqlens, "
        "Tensor? state_indices, Tensor? write_indices, Tensor? has_initial_state, Tensor? num_active, "
        "Tensor? checkpoint_offsets, Tensor? checkpoint_indices, Tensor? seed, int null_index, int? max_seqlen, "
        f"float scale, str decay, float? decay_bound, str state_layout, *, {_SWITCHES}) -> ()",
        "pool.varlen",
    ),
}
for _name, (_schema, _module) in _OPS.items():
    register(_name, _schema, _module, maps=False)
on_import.imported(["torch.utils.flop_counter"], then="rwkv_jit.pool.flops")  # which nobody but those who count needs
