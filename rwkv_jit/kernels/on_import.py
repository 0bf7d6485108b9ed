"""What waits for imports: torch learns of the ops once it is imported, in whichever order that happens.

One finder stands in front of `sys.meta_path`, and finds what others find. Its loader calls who waits whenever the
module has been executed, by an import or a reload, and not when somebody looks whether it is there.
"""

from __future__ import annotations

import copy
import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Then = str | Callable[[list[str]], object]
_waiting: dict[str, dict[Then, None]] = {}  # by the module that they wait for
_unfinished: dict[str, None] = {}  # modules whose import, by the very thread, had begun when somebody came to wait


class _Loader:
    """Loads a module as another loader does, and calls who waits for it."""

    def __init__(self, name: str, loader: Any):
        self._name, self._loader = name, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for those who only look
        return type(self._loader)

    __dict__: Any = property(lambda self: self._loader.__dict__)  # by which loaders compare themselves

    def __eq__(self, other: object) -> bool:
        return bool(self._loader == other)

    def __hash__(self) -> int:
        return hash(self._loader)

    def __reduce__(self) -> Any:
        return _Loader, (self._name, self._loader)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        finished = [name for name in tuple(_unfinished) if not _is_half_there(name)]
        for name in dict.fromkeys((self._name, *finished)):
            _unfinished.pop(name, None)
            for then in tuple(_waiting.get(name, ()) if sys.modules.get(name) is not None else ()):
                try:
                    _call(then, [name])
                except Exception:  # which is no fault of the import
                    import logging

                    logging.getLogger("rwkv_jit").warning("a step after the import of %s failed", name, exc_info=True)


class _Finder(threading.local):
    """Finds modules as the other finders do. A finder that asks all others meanwhile does not find it here again."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # that this thread looks for

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self._names or not (_waiting.get(name) or _unfinished):
            return None
        self._names.add(name)
        try:
            others = [find for x in sys.meta_path if x is not self and (find := getattr(x, "find_spec", None))]
            spec = next((found for find in others if (found := find(name, path, target)) is not None), None)
        finally:
            self._names.remove(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec = copy.copy(spec)  # the finder may keep its own
            spec.loader = _Loader(name, spec.loader)
        return spec


_FINDER: Any = _Finder()


def imported(names: Iterable[str], then: Then) -> None:
    """Call `then` with names of modules, or execute the module `then`, each time that one of them has been executed.

    For those that are there that is now. Where another thread is importing one, this waits for it.
    """
    names = list(names)
    for name in names:
        _waiting.setdefault(name, {})[then] = None
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)  # and not a new list, which others may hold
    for name in names:
        importlib._bootstrap._lock_unlock_module(name)  # type: ignore[attr-defined]  # as an import statement waits
    _unfinished.update(dict.fromkeys(name for name in names if _is_half_there(name)))
    there = [name for name in names if sys.modules.get(name) is not None and name not in _unfinished]
    if there and not (isinstance(then, str) and then in sys.modules):
        _call(then, there)


def forget(then: Then) -> None:
    """Let `then` wait no more."""
    for acts in tuple(_waiting.values()):
        acts.pop(then, None)


def _is_half_there(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _call(then: Then, names: list[str]) -> None:
    if not isinstance(then, str):
        then(names)
    elif then not in sys.modules:
        importlib.import_module(then)
    elif not _is_half_there(then):
        importlib.reload(sys.modules[then])
