"""What waits for an import: torch learns of the ops once it is imported, in whichever order that happens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds one module as others do, and does something behind its import."""

    def __init__(self, name: str, then: Callable[[str], object]):
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        # A new list each time, as another thread may be going through the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path = [self, *sys.meta_path]
            return None
        execute = spec.loader.exec_module

        def execute_both(module: ModuleType) -> None:
            execute(module)
            self._then(self._name)

        spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec


def imported(name: str, then: str | Callable[[str], object]) -> None:
    """Import the module `then`, or call it with `name`, as soon as that module is imported, which may be now."""
    act = (lambda _: import_module(then)) if isinstance(then, str) else then
    if name in sys.modules:
        act(name)
    else:
        sys.meta_path = [_Finder(name, act), *sys.meta_path]  # asked first
