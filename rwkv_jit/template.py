"""Kernel templates: read one, and write typed parameters above its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rwkv_jit.errors import UnsupportedConfigError

Parameter = int | bool | float | str
STORAGE_TYPES = ("fp16", "bf16", "fp32")
_LARGEST_FLOAT = 3.4028234663852886e38
_WORD = re.compile(r"\w+")
_CONSTANT = re.compile(r"\bconstexpr \w+ (\w+) =")
_INCLUDE = re.compile(r'#[ \t]*include "([^"\n]+)"')  # not anchored to a line: that would be ten times slower


@dataclass(frozen=True)
class Rendered:
    """A template with its parameters: everything the compiler reads."""

    name: str
    source: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Template:
    """The text of a kernel file, and name and text of every header it includes, itself or through others."""

    name: str
    body: str
    headers: tuple[tuple[str, str], ...]

    def render(self, parameters: Mapping[str, Parameter]) -> Rendered:
        """Write `parameters` as typed constants above the text.

        Raises
        ------
        ValueError, TypeError
            A value that cannot be a parameter.
        """
        lines = [_line(parameter, parameters[parameter]) for parameter in sorted(parameters)]
        head = "\n".join(['#include "types.cuh"', *lines, f'#line 1 "{self.name}.cu"'])
        return Rendered(self.name, f"{head}\n{self.body}", self.headers)

    def check(self, parameters: Mapping[str, Parameter]) -> None:
        """Check that the template has all these parameters: words it uses and does not define itself.

        Not part of `render`, as a kernel that is found in the cache has passed it.

        Raises
        ------
        ValueError
            Naming the parameter it does not have.
        """
        text = self.body + "".join(text for _, text in self.headers)
        known = set(_WORD.findall(text)) - set(_CONSTANT.findall(text))
        for parameter in parameters:
            if parameter not in known:
                raise ValueError(f"template {self.name} has no parameter {parameter}")


def directory() -> Path:
    """Return the library's own templates: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "kernel_templates"
    return inside if inside.is_dir() else package.parent / "kernel_templates"


def names() -> list[str]:
    """Return the names of the library's own templates."""
    return sorted(path.stem for path in directory().glob("*.cu"))


@cache
def library(name: str) -> Template:
    """Return one of the library's own templates.

    Raises
    ------
    UnsupportedConfigError
        There is no such template.
    """
    path = directory() / f"{name}.cu"
    if not path.is_file():
        raise UnsupportedConfigError(f"no kernel template {name!r}; there are: {', '.join(names())}")
    return read(path)


def read(path: Path) -> Template:
    """Read any template; its headers lie beside it or are the library's own.

    Raises
    ------
    OSError
        The file or one of its headers cannot be read.
    """
    body = path.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    wanted = [("types.cuh", path.name), *_includes(body, path.name)]
    while wanted:
        header, includer = wanted.pop()
        if header not in found:
            beside = path.parent / header
            try:
                found[header] = (beside if beside.is_file() else directory() / header).read_text(encoding="utf-8")
            except FileNotFoundError:
                where = f"neither beside {path} nor among the library's own headers"
                raise FileNotFoundError(f'"{header}", which {includer} includes, lies {where}') from None
            wanted += _includes(found[header], header)
    return Template(path.stem, body, tuple(sorted(found.items())))


def _includes(text: str, name: str) -> list[tuple[str, str]]:
    """Return the headers that a text includes in quotes, each with the name of the text; comments do not count."""
    lines = (
        (text[text.rfind("\n", 0, match.start()) + 1 : match.start()], match[1]) for match in _INCLUDE.finditer(text)
    )
    return [(header, name) for before, header in lines if not before.strip()]


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
        return f"constexpr int {name} = {int(value)};"
    if isinstance(value, float):
        if not abs(value) <= _LARGEST_FLOAT:
            raise ValueError(f"parameter {name}: expected a finite 32-bit float, got {value}")
        return f"constexpr float {name} = {float(value)!r}f;"
    if not isinstance(value, str) or not value.isidentifier():
        raise TypeError(f"parameter {name}: expected an int, a float, a bool or an identifier, got {value!r}")
    return f"constexpr auto {name} = {name.title().replace('_', '')}::{value};"
