"""How commands list kernels: a line for each, by the ops that take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from rwkv_jit.desk import terminal
from rwkv_jit.kernels import template
from rwkv_jit.schedules import table

_OF_NO_OP = ("layer_", "head_decay_", "channel_decay_")  # how names of templates begin
_COLUMNS = {"op": "{op}", "direction": "{direction}", "sizes": "{head_size}", "dtype": "{dtype}", "arch": "{arch}",
            "KB": "{kilobytes}"}  # fmt: skip
_DETAILS = {"threads": "{threads}", "chunk len": "{chunk_len}", "registers": "{registers}",
            "spill B": "{spill_bytes}", "shared B": "{shared_bytes}", "parameters": "{constants}"}  # fmt: skip


def described(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a list says of a kernel, by its template; None for what it does not have."""
    sizes = [str(parameters[size]) for size in ("HEAD_SIZE", "VALUE_SIZE") if size in parameters]
    return {
        "op": _called_by(name, parameters),
        "direction": _direction(name, parameters) if parameters and name in _library() else None,
        "head_size": "x".join(dict.fromkeys(sizes)) or None,
        "dtype": parameters.get("T_IO"),
        "threads": parameters.get("NUM_THREADS"),
        "chunk_len": parameters.get("CHUNK_LEN"),
    }


def is_of(op: str, name: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether calls of an op may take a kernel: its templates, which ops can share, with its parameters."""
    entry = table.OPS.get(op)
    if entry is None or name not in _library():
        return f"{name}_".startswith(f"{op}_")
    if "HEAD_SIZE" in parameters and not entry.has_heads:
        return False
    of_op = {**entry.constants, **entry.backward_constants, "DELTA": entry.family == "delta"}
    return table.takes(entry, name) and all(parameters.get(key, value) == value for key, value in of_op.items())


def _called_by(name: str, parameters: Mapping[str, Any]) -> str:
    """Return the ops that take a kernel; of one that is no op's its template."""
    ops = [op for op in table.OPS if is_of(op, name, parameters)] if parameters else []
    if not 0 < len(ops) < 5 or name.startswith(_OF_NO_OP):
        return name
    return ", ".join(ops) if len(ops) < 3 else f"{ops[0]} and {len(ops) - 1} more"


def _direction(name: str, parameters: Mapping[str, Any]) -> str:
    if name in ("timex_transform", "copy_states", "cut_sequences", "narrow_rows"):
        return "both"
    if name in ("update_states", "arrange_sequences") or (name.startswith("layer_") and "loss" not in name):
        return "update"
    is_backward = "backward" in name or "gradient" in name or name == "sum_rows"
    is_backward = parameters.get("BACKWARD", parameters.get("REVERSED", is_backward))
    return "backward" if is_backward else "forward"


@cache
def _library() -> frozenset[str]:
    return frozenset(template.names())


def show(kernels: Sequence[Mapping[str, Any]], more: Mapping[str, str], is_verbose: bool) -> None:
    """Print a line for each kernel, with the columns of `more` behind those of all lists; `is_verbose` adds details."""
    rows = [
        {
            **kernel,
            "kilobytes": -(-kernel["bytes"] // 1024),
            "age": _age(kernel["last_used"]) if kernel.get("last_used") else None,
            "constants": terminal.text(kernel["parameters"]),
        }
        for kernel in kernels
    ]
    columns = {**_COLUMNS, **more, "kernel": "{name}", **(_DETAILS if is_verbose else {})}
    terminal.records(columns, rows, ["kernel", *more])


def size(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Return the size of kernels together."""
    return f"{sum(kernel['bytes'] for kernel in kernels) / 2**20:.3g} MB"


def _age(since: str) -> str:
    minutes = max(0, int((datetime.now() - datetime.fromisoformat(since)).total_seconds()) // 60)
    units = (("d", 1440), ("h", 60), ("min", 1))
    return next(f"{minutes // one} {unit}" for unit, one in units if minutes >= one or one == 1)
