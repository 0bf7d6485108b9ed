"""How commands list kernels: by the ops that take them and by head sizes, or a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from rwkv_jit.desk import terminal
from rwkv_jit.kernels import template
from rwkv_jit.schedules import table
from rwkv_jit.schedules.build_command import LAYER_OPS
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import ALL

_OF_OPERANDS = {
    "delta": ("layer_delta_operands", "update_rules", "replay_rules"),
    "diagonal": ("diagonal_operands", "head_steps", "skip_gate", "update_rules", "replay_rules"),
}
_OF_OTHERS = (
    *(f"{op.stem}_" for op in ALL.values() if op.through is not None and op.stem != op.through.stem),
    *(name for names in _OF_OPERANDS.values() for name in names),
)  # fmt: skip
_GROUPS = {"op": "{op}", "sizes": "{head_size}", "dtype": "{dtype}", "arch": "{arch}", "kernels": "{count}",
           "MB": "{megabytes:.2f}"}  # fmt: skip
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
    entry = ALL.get(op)
    if op in LAYER_OPS:
        return _function_of(name) == op
    if entry is None or name not in _library():
        return f"{name}_".startswith(f"{op}_")
    if entry.through is not None:
        is_delta = entry.through.family == "delta"
        is_around = name.startswith(_OF_OPERANDS[entry.through.family])
        is_around = is_around and parameters.get("DELTA", is_delta) == is_delta
        return is_around or _is_dedicated(entry, name, parameters) or is_of(entry.through.name, name, parameters)
    if name.startswith(_OF_OTHERS) or ("HEAD_SIZE" in parameters and not entry.has_heads):
        return False
    of_op = {**entry.constants, **entry.backward_constants, "DELTA": entry.family == "delta"}
    return table.takes(entry, name) and all(parameters.get(key, value) == value for key, value in of_op.items())


def _is_dedicated(op: Op, name: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a kernel is one of those that an op which goes through another has for itself."""
    if op.through is None or op.stem == op.through.stem or not name.startswith(f"{op.stem}_"):
        return False
    decay = "log" if {"w", "a_log"} & {*op.inputs} else "none"
    of_op = {"HAS_DELTA": op.through.family == "delta", "DECAY": decay}
    return all(parameters.get(key, value) == value for key, value in of_op.items())


def _function_of(name: str) -> str:
    """Return the function of a layer whose kernel this is; "" where it is none's."""
    function = name.removeprefix("layer_").removesuffix("_backward").removesuffix("_mixes")
    function = "causal_conv1d" if function in ("convolution", "convolution_update") else function
    return function if name.startswith("layer_") and function in LAYER_OPS else ""


def _called_by(name: str, parameters: Mapping[str, Any]) -> str:
    """Return the ops that take a kernel, without those that go through them; of one that is no op's its template."""
    if function := _function_of(name):
        return function
    ops = [op for op, own in ALL.items() if _is_dedicated(own, name, parameters)]
    ops = ops or [op for op in table.OPS if parameters and is_of(op, name, parameters)]
    if not 0 < len(ops) < 5 or name.startswith("layer_"):
        return name
    return ", ".join(ops) if len(ops) < 3 else f"{ops[0]} and {len(ops) - 1} more"


def _direction(name: str, parameters: Mapping[str, Any]) -> str:
    if name in ("timex_transform", "copy_states", "cut_sequences", "narrow_rows"):
        return "both"
    if name in ("update_states", "update_rules", "arrange_sequences") or (
        name.startswith("layer_") and "loss" not in name
    ):
        return "update"
    is_backward = "backward" in name or "gradient" in name or name in ("sum_rows", "sum_buffers")
    is_backward = parameters.get("BACKWARD", parameters.get("REVERSED", is_backward))
    return "backward" if is_backward else "forward"


@cache
def _library() -> frozenset[str]:
    return frozenset(template.names())


def show(kernels: Sequence[Mapping[str, Any]], more: Mapping[str, str], is_verbose: bool) -> None:
    """Print kernels by op and sizes, or with `is_verbose` a line for each; `more` are columns behind those of both."""
    rows = [
        {
            **kernel,
            "kilobytes": -(-kernel["bytes"] // 1024),
            "age": _age(kernel["last_used"]) if kernel.get("last_used") else None,
            "constants": terminal.text(kernel["parameters"]),
        }
        for kernel in kernels
    ]
    if is_verbose:
        terminal.records({**_COLUMNS, **more, "kernel": "{name}", **_DETAILS}, rows, ["kernel", *more])
    else:
        terminal.records({**_GROUPS, **more}, _grouped(rows, more), [*more])


def _grouped(rows: Sequence[Mapping[str, Any]], more: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for all kernels of the same ops and sizes, of which the one that was used last says the age."""
    shared = ("op", "head_size", "dtype", "arch", *(form.strip("{}") for form in more.values() if form != "{age}"))
    groups = dict[tuple[Any, ...], list[Mapping[str, Any]]]()
    for row in rows:
        groups.setdefault(tuple(row[name] for name in shared), []).append(row)
    made = []
    for key, several in groups.items():
        latest = max(several, key=lambda row: row.get("last_used") or "")
        about = {"count": len(several), "megabytes": sum(row["bytes"] for row in several) / 2**20, "age": latest["age"]}
        made.append(dict(zip(shared, key, strict=True)) | about)
    # Sizes by their digits: a template of the user's may have any words there.
    return sorted(made, key=lambda row: (str(row["op"]), [(len(x), x) for x in (row["head_size"] or "").split("x")]))


def size(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Return the size of kernels together."""
    return f"{sum(kernel['bytes'] for kernel in kernels) / 2**20:.3g} MB"


def _age(since: str) -> str:
    minutes = max(0, int((datetime.now() - datetime.fromisoformat(since)).total_seconds()) // 60)
    units = (("d", 1440), ("h", 60), ("min", 1))
    return next(f"{minutes // one} {unit}" for unit, one in units if minutes >= one or one == 1)
