"""Kernel templates: find one, and write typed parameters above its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rwkv_jit.errors import UnsupportedConfigError

Parameter = int | bool | str
STORAGE_TYPES = ("fp16", "bf16", "fp32")
_INCLUDE = re.compile(r'^\s*#include "([\w.]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Rendered:
    """A template with its parameters: everything the compiler reads."""

    name: str
    source: str
    headers: tuple[tuple[str, str], ...]


def directory() -> Path:
    """Return the templates' folder: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "kernel_templates"
    return inside if inside.is_dir() else package.parent / "kernel_templates"


def names() -> list[str]:
    """Return the names of all templates."""
    return sorted(path.stem for path in directory().glob("*.cu"))


@cache
def _read(file_name: str) -> str:
    return (directory() / file_name).read_text(encoding="utf-8")


def _headers(text: str, found: dict[str, str]) -> dict[str, str]:
    for name in _INCLUDE.findall(text):
        if name not in found:
            found[name] = _read(name)
            _headers(found[name], found)
    return found


def _line(name: str, value: Parameter) -> str:
    """`using T_IO = bf16;`, `constexpr int HEAD_SIZE = 48;` or `constexpr auto DECAY = Decay::raw;`."""
    if name.startswith("T_"):
        if value not in STORAGE_TYPES:
            raise ValueError(f"parameter {name}: expected one of {', '.join(STORAGE_TYPES)}, got {value!r}")
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"parameter {name}: expected a 32-bit integer, got {value}")
        return f"constexpr int {name} = {value};"
    if not isinstance(value, str) or not value.isidentifier():
        raise TypeError(f"parameter {name}: expected an int, a bool or an identifier, got {value!r}")
    return f"constexpr auto {name} = {name.title().replace('_', '')}::{value};"


def render(name: str, parameters: Mapping[str, Parameter]) -> Rendered:
    """Write `parameters` as typed constants above the text of template `name`.

    Raises
    ------
    UnsupportedConfigError
        There is no such template.
    ValueError, TypeError
        A parameter the template does not have, or a value that cannot be one.
    """
    if name not in names():
        raise UnsupportedConfigError(f"no kernel template {name!r}; there are: {', '.join(names())}")
    body = _read(f"{name}.cu")
    headers = tuple(sorted(_headers(body, {"types.cuh": _read("types.cuh")}).items()))
    everything = body + "".join(text for _, text in headers)
    for parameter in parameters:
        if not re.search(rf"\b{re.escape(parameter)}\b", everything):
            raise ValueError(f"template {name} has no parameter {parameter}")
    lines = [_line(parameter, parameters[parameter]) for parameter in sorted(parameters)]
    head = "\n".join(['#include "types.cuh"', *lines, f'#line 1 "{name}.cu"'])
    return Rendered(name, f"{head}\n{body}", headers)
