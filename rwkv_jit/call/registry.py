"""The torch ops of this package: registered at once, run by modules that are imported when an op is first called.

torch must know them when it loads an exported program, so `rwkv_jit` imports this as soon as both are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from rwkv_jit.kernels import on_import
from rwkv_jit.schedules.layer_table import FUNCTIONS, KEPT, MOST_PRODUCTS, PACKED, PRODUCTS, RESULTS
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import ALL

_OPTIONS = (
    "float scale, str decay, str state_layout, int checkpoint_interval, int? chunk_len, int? num_threads, str backend, "
    "int? forward_blocks, int? backward_blocks, bool is_narrow, bool is_batch_invariant, bool is_chosen"
)
# The bound of the decays is asked for where nothing is chosen yet.
_BOUND = "float? decay_bound=None"
TYPES = {bool: "bool", str: "str", type(None): "float?"}  # of switches, by their defaults
# The names of what wants a gradient, where that is not all; of the others it is empty.
_WANTED = "str wanted=''"
_TRAITS = {trait: default for op in ALL.values() for trait, default in op.traits.items()}
_SWITCHES = ", ".join(f"{TYPES[type(default)]} {trait}={default!r}" for trait, default in _TRAITS.items())
# By name: the schema, and the module that implements it. All of them change tensors in place.
_POOL_OPS = {
    "update_states": (
        "(str op, Tensor(a!) state, Tensor(b!) y, Tensor?[] inputs, Tensor? w0, Tensor? state_indices, "
        "Tensor? write_indices, Tensor? seed, int null_index, float scale, str decay, str state_layout, "
        f"*, {_SWITCHES}) -> ()",
        "pool.update",
    ),
    "replay_states": (
        "(str op, str phase, Tensor(a!) state, Tensor(b!)? y, Tensor(c!) cursors, Tensor(d!) arrivals, Tensor(e!)? d, "
        "Tensor(f!)? b, Tensor(g!) k, Tensor(h!) v, Tensor(i!)? u, int length, Tensor?[] inputs, Tensor? w0, "
        "Tensor? state_indices, Tensor? accept_lens, Tensor? seed, int null_index, float scale, str decay, "
        f"str state_layout, *, {_SWITCHES}) -> ()",
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
_STEP = "(str step, Tensor?[] inputs, Tensor(a!)[] written, int null_index, float eps, str[] kinds) -> ()"
_PRODUCTS = ", ".join([f"Tensor{'?' * (x in PRODUCTS.optional)} {x}" for x in PRODUCTS.names])
_PRODUCTS = f"({_PRODUCTS}, float eps, str[] kinds, bool save) -> ({', '.join(['Tensor'] * MOST_PRODUCTS)})"
_LINEAR_LOSS = {
    "linear_cross_entropy_fwd":
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index, float l2_wrap, int chunk_rows, "
        "bool want_hidden, bool want_weight, bool want_bias, bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_cross_entropy_bwd":
        "(Tensor of_hidden, Tensor of_weight, Tensor of_bias, Tensor grad) -> (Tensor, Tensor, Tensor)",
}  # fmt: skip


# Who runs a torch op: "run" with CPU and CUDA tensors, "fake" with those that have no memory, "record" above autograd,
# with torch's set of dispatch keys before the arguments, and "cast" returns the arguments to take under autocast.
_runners: dict[str, dict[str, Callable[..., Any]]] = {}
_modules: dict[str, str] = {}  # by torch op: the module that implements it, imported when the op is first called


def find(name: str) -> Any:
    """Return the torch op of a name."""
    return getattr(torch.ops.rwkv_jit, name).default


def implement(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], record: Callable[..., Any],
    cast: Callable[..., Any] = lambda *arguments: arguments,
) -> None:  # fmt: skip
    """Say who runs an op."""
    _runners[name] = {"run": run, "fake": fake, "record": record, "cast": cast}


def _runner(name: str) -> dict[str, Callable[..., Any]]:
    if name not in _runners:
        import_module(f"rwkv_jit.{_modules[name]}")
    return _runners[name]


def _later(name: str, part: str) -> Callable[..., Any]:
    runner: list[Callable[..., Any]] = []

    def run(*arguments: Any, **named: Any) -> Any:
        if not runner:
            runner.append(_runner(name)[part])
        return runner[0](*arguments, **named)

    return run


def _under_autocast(name: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """Run an op that was called under autocast, as an exported program calls it."""
    off = torch._C.DispatchKeySet(key)

    def run(*arguments: Any, **named: Any) -> Any:
        cast = _runner(name)["cast"](*arguments)  # with the key off, torch says that autocast is off
        with torch._C._ExcludeDispatchKeyGuard(off):
            return find(name)(*cast, **named)

    return run


def _one_by_one(name: str) -> Callable[..., Any]:
    """Run an op inside of `torch.vmap`: once for every element of the mapped dimension."""

    def run(info: Any, dims: tuple[int | None, ...], *arguments: Any, **named: Any) -> tuple[Any, Any]:
        is_mapped, count = [isinstance(dim, int) for dim in dims], info.batch_size
        mapped = [_elements(x, dim) if isinstance(dim, int) else x for x, dim in zip(arguments, dims, strict=True)]
        rows = [
            find(name)(*[x[i] if has_rows else x for x, has_rows in zip(mapped, is_mapped, strict=True)], **named)
            for i in range(max(count, 1))
        ]
        if isinstance(rows[0], torch.Tensor):
            return _stacked(rows, count), 0
        results = tuple(_stacked(result, count) for result in zip(*rows, strict=True))
        return results, (0,) * len(results)

    return run


def _elements(x: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    """Return the elements of a mapped dimension; of an empty one zeros, which stand for what has its shapes."""
    return x.unbind(dim) or [x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]])]


def _stacked(rows: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the results of so many elements; of none, an empty tensor like the one that stands for them."""
    return torch.stack([*rows]) if count else rows[0].new_empty(0, *rows[0].shape)


_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")


def register(name: str, schema: str, module: str, casts: bool = False, maps: bool = True) -> None:
    """Register a torch op: whether autocast `casts` its inputs, and `torch.vmap` `maps` it over elements."""
    _modules[name] = module
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _later(name, "run"), key)
    _LIBRARY.impl(name, _later(name, "record"), "Autograd", with_keyset=True)
    torch.library.register_fake(f"rwkv_jit::{name}", _later(name, "fake"), lib=_LIBRARY)
    if casts:
        for autocast in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA):
            _LIBRARY.impl(name, _under_autocast(name, autocast), autocast.name)
    if maps:
        torch.library.register_vmap(f"rwkv_jit::{name}", _one_by_one(name), lib=_LIBRARY)


def register_both(
    name: str, inputs: Mapping[str, bool], leaves: int, results: Sequence[str], kept: Sequence[str], options: str,
    module: str, flags: str = "bool save", named: str = "", casts: bool = False,
) -> None:  # fmt: skip
    """Register both torch ops of one with gradients; `differentiable.define` says who runs them.

    `inputs` are its tensors, and whether one may be None; the first are its `leaves`. In the place of a result or
    gradient that a call does not have, an op returns an empty tensor: torch.func knows no lists of what has gradients.
    """
    given = ", ".join(f"Tensor{'?' * is_optional} {x}" for x, is_optional in inputs.items())
    seen = ", ".join(f"Tensor? {x}" for x in (*kept, *(f"grad_{x}" for x in results)))
    made, gradients = (", ".join(["Tensor"] * count) for count in (len(results) + len(kept), leaves))
    by_name = f", {named}" if named else ""
    register(f"{name}_fwd", f"({given}, {options}, {flags}{', *' * bool(named)}{by_name}) -> ({made})", module, casts)
    # Its inputs were cast for the forward.
    register(f"{name}_bwd", f"({given}, {seen}, {options}, *{by_name}, {_WANTED}) -> ({gradients})", module)


def register_op(op: Op, module: str) -> None:
    """Register the torch ops of an op with states; `torch_op.define` says who runs them."""
    inputs = {public: name in op.optional for name, public in zip(op.names, op.public_names, strict=True)}
    inputs |= {"initial_state": True, "cu_seqlens": True}
    named = ", ".join([_BOUND, *(f"{TYPES[type(x)]} {trait}={x!r}" for trait, x in op.traits.items())])
    register_both(
        op.name, inputs, len(op.inputs) + 1, ("y", "final_state"), ("saved",), _OPTIONS, module,
        "bool output_final_state, bool save", named, casts=True,
    )  # fmt: skip


for _op in ALL.values():
    if _op.state:
        register_op(_op, "ops.delta" if "beta" in _op.inputs else "ops.diagonal" if _op.through else f"ops.{_op.name}")
register_both("timex", {"w": False, "k": False}, 2, ("y",), (), "float eps, str backend", "ops.timex", casts=True)
for _name, (_schema, _module) in _POOL_OPS.items():
    register(_name, _schema, _module, maps=False)
for _name, _results in RESULTS.items():
    _kind = FUNCTIONS[_name]
    _inputs = {x: x in _kind.optional for x in _kind.names} | dict.fromkeys(("cu_seqlens",) * (_name in PACKED), True)
    register_both(
        _name, _inputs, len(_kind.names), tuple(_results), tuple(KEPT.get(_name, ())), "float eps, str[] kinds",
        f"layers.{_name}",
    )  # fmt: skip
register("layer_step", _STEP, "layers.calls", maps=False)
register("products_fwd", _PRODUCTS, "layers.products", maps=False)
register_both(
    "cross_entropy", {"logits": False, "targets": False}, 1, ("loss",), ("lse", "argmax"),
    "int ignore_index, float l2_wrap", "layers.loss_ops",
)  # fmt: skip
for _name, _schema in _LINEAR_LOSS.items():
    register(_name, _schema, "layers.loss_ops")
# Layers under a compiler: `node` is what it sees, and becomes the others or the parts of the layer.
_LIBRARY.define("node(Tensor?[] arrays, str key) -> Tensor[]")
_LIBRARY.impl("node", _later("node", "run"), "CompositeImplicitAutograd")
_modules["node"] = "nn.traced"
register("node_fwd", "(Tensor?[] arrays, str name) -> Tensor[]", "nn.traced", maps=False)
register(
    "node_bwd", "(Tensor[] values, Tensor?[] grads, str name, bool[] wants) -> Tensor[]", "nn.traced", maps=False
)  # fmt: skip
# It imports triton, which nobody but those who count needs.
on_import.imported(["torch.utils.flop_counter"], then="rwkv_jit.call.flops")
