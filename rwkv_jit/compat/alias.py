"""The module `rwkvfla` where the package rwkv-fla is not installed. It imports nothing before somebody imports it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES: dict[str, tuple[str, ...]] = {  # what the modules have, from `rwkv_jit.compat.rwkvfla`
    "rwkvfla": (),
    "rwkvfla.ops": (),
    "rwkvfla.ops.rwkv6": ("chunk_rwkv6",),
    "rwkvfla.ops.rwkv7": ("chunk_rwkv7",),
}


class _Alias:
    """Finds and loads these modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(name.rpartition(".")[0])
        if name not in _NAMES or (parent is not None and not _is_ours(parent)):
            return None
        return ModuleSpec(name, self, origin=__name__, is_package=_submodules(name) != [])  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name in _NAMES[module.__name__]:
            setattr(module, name, getattr(import_module("rwkv_jit.compat.rwkvfla"), name))
        for name in _submodules(module.__name__):
            import_module(name)


_ALIAS = _Alias()


def _submodules(name: str) -> list[str]:
    return [other for other in _NAMES if other.rpartition(".")[0] == name]


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "__loader__", None) is _ALIAS


def add() -> None:
    """Let `rwkvfla` be found, behind all other finders, so that the package itself is where it is installed."""
    if _ALIAS not in sys.meta_path:
        sys.meta_path.append(_ALIAS)


def remove() -> None:
    """Let it be found no more, and forget what was."""
    if _ALIAS in sys.meta_path:
        sys.meta_path.remove(_ALIAS)
    for name in _NAMES:
        if name in sys.modules and _is_ours(sys.modules[name]):
            del sys.modules[name]
