"""The torch ops of this package: registered at once, run by modules that are imported when an op is first called.

torch must know them when it loads an exported program, so `rwkv_jit` imports this as soon as both are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from rwkv_jit.kernels import on_import
from rwkv_jit.schedules import derived_table as derived
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import OPS

_OPTIONS = (
    "float scale, str decay, str state_layout, int checkpoint_interval, int? chunk_len, int? num_threads, str backend, "
    "int? forward_blocks, int? backward_blocks, bool is_narrow, bool is_batch_invariant, bool is_chosen"
)
# The bound of the decays is asked for where nothing is chosen yet.
_BOUND = "*, float? decay_bound=None"
TYPES = {bool: "bool", str: "str", type(None): "float?"}  # of switches, by their defaults
# The names of what wants a gradient, where that is not all; of the others it is empty.
_WANTED = "str wanted=''"
_TIMEX = {
    "timex_fwd": "(Tensor w, Tensor k, float eps, str backend, bool save) -> Tensor",
    "timex_bwd": "(Tensor g, Tensor w, Tensor k, str backend, bool want_w, bool want_k) -> (Tensor, Tensor)",
}


class Runner(NamedTuple):
    """Who runs a torch op."""

    run: Callable[..., Any]  # with CPU and CUDA tensors
    fake: Callable[..., Any]  # with tensors that have no memory
    record: Callable[..., Any]  # above autograd, with torch's set of dispatch keys before the arguments
    cast: Callable[..., Any]  # under autocast: returns the arguments that shall be taken


_runners: dict[str, Runner] = {}
_modules: dict[str, str] = {}  # by torch op: the module that implements it, imported when the op is first called


def find(name: str) -> Any:
    """Return the torch op of a name."""
    return getattr(torch.ops.rwkv_jit, name).default


def implement(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    record: Callable[..., Any],
    cast: Callable[..., Any] = lambda *arguments: arguments,
) -> None:
    """Say who runs an op."""
    _runners[name] = Runner(run, fake, record, cast)


def _runner(name: str) -> Runner:
    if name not in _runners:
        import_module(f"rwkv_jit.{_modules[name]}")
    return _runners[name]


def _later(name: str, part: str) -> Callable[..., Any]:
    runner: list[Callable[..., Any]] = []

    def run(*arguments: Any, **named: Any) -> Any:
        if not runner:
            runner.append(getattr(_runner(name), part))
        return runner[0](*arguments, **named)

    return run


def _under_autocast(name: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """Run an op that was called under autocast, as an exported program calls it."""
    off = torch._C.DispatchKeySet(key)

    def run(*arguments: Any, **named: Any) -> Any:
        cast = _runner(name).cast(*arguments)  # with the key off, torch says that autocast is off
        with torch._C._ExcludeDispatchKeyGuard(off):
            return find(name)(*cast, **named)

    return run


def _one_by_one(name: str) -> Callable[..., Any]:
    """Run an op inside of `torch.vmap`: once for every element of the mapped dimension."""

    def run(info: Any, dims: tuple[int | None, ...], *arguments: Any, **named: Any) -> tuple[Any, Any]:
        is_mapped = [isinstance(dim, int) for dim in dims]
        mapped = [x.unbind(dim) if isinstance(dim, int) else x for x, dim in zip(arguments, dims, strict=True)]
        rows = [
            find(name)(*[x[i] if has_rows else x for x, has_rows in zip(mapped, is_mapped, strict=True)], **named)
            for i in range(info.batch_size)
        ]
        if isinstance(rows[0], torch.Tensor):
            return torch.stack(rows), 0
        results = tuple(torch.stack(result) for result in zip(*rows, strict=True))
        return results, (0,) * len(results)

    return run


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


def register_op(op: Op, module: str) -> None:
    """Register the torch ops of an op with states; `torch_op.define` says who runs them."""
    inputs = zip(op.names, op.public_names, strict=True)
    given = ", ".join(f"Tensor{'?' * (name in op.optional)} {public}" for name, public in inputs)
    given = f"{given}, Tensor? initial_state, Tensor? cu_seqlens, {_OPTIONS}"
    named = ", ".join([_BOUND, *(f"{TYPES[type(x)]} {trait}={x!r}" for trait, x in op.traits.items())])
    results = ", ".join(["Tensor"] * (len(op.inputs) + 1))
    forward = f"({given}, bool output_final_state, bool save, {named}) -> (Tensor, Tensor, Tensor)"
    backward = f"(Tensor? dy, Tensor? grad_final_state, {given}, Tensor saved, {named}, {_WANTED}) -> ({results})"
    register(f"{op.name}_fwd", forward, module, casts=True)
    register(f"{op.name}_bwd", backward, module)  # its inputs were cast for the forward


for _op in OPS.values():
    if _op.state:
        register_op(_op, f"ops.{_op.name}")
for _op in derived.OPS.values():
    register_op(_op, "ops.delta" if "beta" in _op.inputs else "ops.diagonal")
for _name, _schema in _TIMEX.items():
    register(_name, _schema, "ops.timex", casts=_name == "timex_fwd")
# It imports triton, which nobody but those who count needs.
on_import.imported(["torch.utils.flop_counter"], then="rwkv_jit.call.flops")
