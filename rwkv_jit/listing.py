"""How commands list kernels: with what tells one from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from rwkv_jit import report, template

NAMED = ("direction", "head_size", "dtype", "threads", "chunk_len")
SPARE = ("origin", "shared_bytes", "bytes", "last_used", "spill_bytes", "registers")  # in a narrow terminal


def described(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the columns of NAMED say of a kernel, by its template; None for what it does not have."""
    sizes = [str(parameters[size]) for size in ("HEAD_SIZE", "VALUE_SIZE") if size in parameters]
    return {
        "direction": _direction(name, parameters) if parameters and name in _library() else None,
        "head_size": "x".join(dict.fromkeys(sizes)) or None,
        "dtype": parameters.get("T_IO"),
        "threads": parameters.get("NUM_THREADS"),
        "chunk_len": parameters.get("CHUNK_LEN"),
    }


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


def show(kernels: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a table of kernels, with a column for what else tells those apart whose rows are alike.

    Each kernel has its `parameters`, and everything that `columns` names.
    """
    telling = itemgetter(*(name for name in columns if name in ("layer", "arch", "name", *NAMED)))
    alike: dict[object, list[Mapping[str, Any]]] = {}
    for kernel in kernels:
        alike.setdefault(telling(kernel), []).append(kernel["parameters"])
    rows = [{**kernel, "with": _differences(kernel["parameters"], alike[telling(kernel)])} for kernel in kernels]
    if any(row["with"] for row in rows):
        columns = [*columns, "with"]
    report.records({_title(name): f"{{{name}}}" for name in columns}, rows, list(map(_title, SPARE)))


def _differences(own: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the parameters of a kernel that are not those of all others of the same row."""
    names = sorted({name for parameters in alike for name in parameters})
    differing = [name for name in names if any(own.get(name) != other.get(name) for other in alike)]
    return ", ".join(f"{name.lower()} {own.get(name)}" for name in differing) or None


def _title(column: str) -> str:
    return column.replace("_bytes", " B").replace("_", " ")
