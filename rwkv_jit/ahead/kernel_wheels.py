"""The wheels of kernels in this environment, and how many of their kernels this library can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rwkv_jit.kernels import __version__, cache, compiler, template
from rwkv_jit.kernels.cache import entry, installed
from rwkv_jit.kernels.errors import CacheError


class Wheel(NamedTuple):
    """A wheel of kernels: how many it has, how many of them are of this library's sources, and what is wrong."""

    name: str
    version: str
    path: Path
    kernels: int
    usable: int
    fault: str

    @property
    def text(self) -> str:
        """Say what of it can be used."""
        if self.fault:
            return self.fault
        if not self.usable:
            return f"{self.version}, for other sources than those of this rwkv_jit {__version__}: not used"
        return f"{self.version}, {self.usable} of {self.kernels} kernels can be used"


def listed() -> list[Wheel]:
    """Return the wheels of this environment, with every kernel read and checked."""
    return [_read(distribution) for distribution in installed.distributions()]


def _read(distribution: installed.Distribution) -> Wheel:
    try:
        entries = installed.bundle(distribution).entries()
    except CacheError as error:
        return Wheel(*distribution, 0, 0, str(error))
    usable = sum(_is_usable(entry.unpack(data)[1]) for data in entries.values())
    return Wheel(*distribution, len(entries), usable, "")


def _is_usable(manifest: dict[str, Any]) -> bool:
    """Return whether this library asks for a kernel by the key that it was stored under."""
    arch, compiler_name = manifest["arch"], manifest["compiler"]
    try:
        rendered = template.library(manifest["name"]).render(manifest["parameters"])
    except (KeyError, TypeError, ValueError):
        return False  # of a template that is not there any more, or of parameters of another time
    return cache.key(rendered, compiler.key_options(arch), arch, compiler_name) == str(manifest["key"])
