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
_WORD = re.compile(r"\w+")
_CONSTANT = re.compile(r"\bconstexpr \w+ (\w+) =")
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
def _load(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the text of a template, and the names and texts of all headers it includes, itself or through others."""
    folder = directory()
    body = (folder / f"{name}.cu").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    wanted = ["types.cuh", *_INCLUDE.findall(body)]
    while wanted:
        header = wanted.pop()
        if header not in found:
            found[header] = (folder / header).read_text(encoding="utf-8")
            wanted += _INCLUDE.findall(found[header])
    return body, tuple(sorted(found.items()))


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
        A value that cannot be a parameter.
    """
    try:
        body, headers = _load(name)
    except FileNotFoundError:
        known = ", ".join(names())
        raise UnsupportedConfigError(f"no kernel template {name!r}; there are: {known}") from None
    lines = [_line(parameter, parameters[parameter]) for parameter in sorted(parameters)]
    head = "\n".join(['#include "types.cuh"', *lines, f'#line 1 "{name}.cu"'])
    return Rendered(name, f"{head}\n{body}", headers)


def check_parameters(name: str, parameters: Mapping[str, Parameter]) -> None:
    """Check that a template has all these parameters: words it uses and does not define itself.

    Not part of `render`, as a kernel that is found in the cache has passed it.

    Raises
    ------
    ValueError
        Naming the parameter it does not have.
    """
    body, headers = _load(name)
    text = body + "".join(text for _, text in headers)
    known = set(_WORD.findall(text)) - set(_CONSTANT.findall(text))
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(f"template {name} has no parameter {parameter}")
