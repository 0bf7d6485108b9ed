"""The torch ops of layers: registered at once, as an exported program names them, run by modules imported later."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from rwkv_jit.kernels import on_import


class Entry(NamedTuple):
    """A torch op."""

    schema: str  # what it takes and returns
    # Has what runs it: functions whose names begin with that of the op, or with `prefix`, and end with those below.
    module: str
    prefix: str = ""  # with it the functions take the name that the op begins with before all else
    has_gradient: bool = False  # whether `..._setup` keeps what `..._backward` takes; else `..._record` is at Autograd


_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")
_OPS = {
    "layer_step": Entry(
        "(str step, Tensor?[] inputs, Tensor(a!)[] written, int null_index, float eps, str[] kinds) -> ()",
        "rwkv_jit.layers.calls",
    ),
    "cross_entropy_fwd": Entry(
        "(Tensor logits, Tensor targets, int ignore_index, float l2_wrap) -> (Tensor, Tensor, Tensor)",
        "rwkv_jit.layers.loss", has_gradient=True,
    ),
    "cross_entropy_bwd": Entry(
        "(Tensor grad, Tensor logits, Tensor targets, Tensor lse, Tensor argmax, int ignore_index, float l2_wrap) -> "
        "Tensor",
        "rwkv_jit.layers.loss", has_gradient=True,
    ),
    "linear_cross_entropy_fwd": Entry(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index, float l2_wrap, int chunk_rows, "
        "bool want_hidden, bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor, Tensor)",
        "rwkv_jit.layers.loss", has_gradient=True,
    ),
    "linear_cross_entropy_bwd": Entry(
        "(Tensor grad, Tensor of_hidden, Tensor of_weight, Tensor of_bias) -> (Tensor, Tensor, Tensor)",
        "rwkv_jit.layers.loss", has_gradient=True,
    ),
    "causal_conv1d_fwd": Entry(
        "(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, str activation, bool save) "
        "-> Tensor",
        "rwkv_jit.layers.convolution",
    ),
    "causal_conv1d_bwd": Entry(
        "(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, "
        "str activation, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
        "rwkv_jit.layers.convolution",
    ),
    "causal_conv1d_update": Entry(
        "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens, Tensor? state_indices, "
        "Tensor? num_active, Tensor(b!) y, int null_index, str activation) -> ()",
        "rwkv_jit.layers.convolution",
    ),
}  # fmt: skip
# The inputs of the ops that have gradients, those in brackets optional, and their results. In the place of one that a
# call does not have, an op returns an empty tensor: torch.func knows no lists of what has gradients.
_DIFFERENTIABLE = {
    "prepare_keys": ("k v rate [v_first] [v_gate] k_k k_a [a0] [v0] [r] [r_k]", "new_k new_v a b bonus"),
    "delta_operands": ("k [q] beta [g] [A_log] [dt_bias]", "r w new_k a b"),
    "gated_norm": ("y g weight [bias] [r] [k] [v] [r_k] [bonus]", "out"),
    "activate": ("x", "y"),
    "gated": ("x g", "y"),
    "token_shift": ("x mixes [amounts] [first] [cu_seqlens]", "mixed0 mixed1 mixed2 mixed3 mixed4 mixed5"),
    "norm_shift": (
        "x [add] weight bias mixes [first] [cu_seqlens]",
        "residual mixed0 mixed1 mixed2 mixed3 mixed4 mixed5 last",
    ),
}
_KEPT = {"norm_shift": "stats"}  # what a forward makes for the backward alone
for _name, (_inputs, _results) in _DIFFERENTIABLE.items():
    _given = ", ".join(f"Tensor? {x[1:-1]}" if x.startswith("[") else f"Tensor {x}" for x in _inputs.split())
    _grads = ", ".join(f"Tensor? grad_{x}" for x in _results.split())
    _given, _module = f"{_given}, float eps, str[] kinds", "rwkv_jit.layers.gradients"
    _kept = _KEPT.get(_name, "").split()
    _made = ", ".join("Tensor" for _ in (*_results.split(), *_kept))
    _seen = "".join(f"Tensor {x}, " for x in _kept)
    _OPS |= {
        f"{_name}_fwd": Entry(f"({_given}, bool save) -> ({_made})", _module, "forward"),
        f"{_name}_bwd": Entry(f"({_grads}, {_seen}{_given}, str[] wanted) -> Tensor[]", _module, "backward"),
    }


def find(name: str) -> Any:
    """Return the torch op of a name."""
    return getattr(torch.ops.rwkv_jit, name).default


def _later(name: str, part: str) -> Callable[..., Any]:
    entry = _OPS[name]

    def run(*arguments: Any, **named: Any) -> Any:
        shared = (name.rpartition("_")[0],) if entry.prefix else ()
        return getattr(import_module(entry.module), f"{entry.prefix or name}_{part}")(*shared, *arguments, **named)

    return run


def _register(name: str, entry: Entry) -> None:
    _LIBRARY.define(name + entry.schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _later(name, "run"), key)
    torch.library.register_fake(f"rwkv_jit::{name}", _later(name, "fake"), lib=_LIBRARY)
    if entry.has_gradient:
        torch.library.register_autograd(
            f"rwkv_jit::{name}", _later(name, "backward"), setup_context=_later(name, "setup"), lib=_LIBRARY
        )
    else:
        _LIBRARY.impl(name, _later(name, "record"), "Autograd", with_keyset=True)
    if entry.prefix:
        torch.library.register_vmap(f"rwkv_jit::{name}", _later(name, "vmap"), lib=_LIBRARY)


for _name, _entry in _OPS.items():
    _register(_name, _entry)
on_import.imported(["torch.utils.flop_counter"], then="rwkv_jit.layers.flops")  # which nobody but those who count needs
