"""Names of a package that load their modules when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from rwkv_jit.kernels.errors import unexpected


def modules(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name, from the names of each module of `rwkv_jit`."""
    return {name: f"rwkv_jit.{module}" for module, several in names.items() for name in several.split()}


def members(package: dict[str, Any], rooms: Sequence[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__`, `__dir__` of a package with globals `_MODULES`, `__all__`; `rooms` are packages in it."""
    path: str = package["__name__"]

    def get(name: str) -> Any:
        if name in rooms:
            return import_module(f"{path}.{name}")
        if name not in package["_MODULES"]:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        package[name] = value = getattr(import_module(package["_MODULES"][name]), name)
        if isinstance(value, type):
            _check_names(value, f"{path}.{name}".partition(".")[2])
        return value

    def listed() -> list[str]:
        return [*(name for name in package if name.startswith("__")), *package["__all__"], *rooms]

    return get, listed


def _check_names(made: type, name: str) -> None:
    """Let a class say what it takes where it is called with a keyword argument that it does not have."""
    from inspect import signature  # not where only the package is imported

    initialize: Callable[..., None] = made.__init__  # type: ignore[misc]
    if not getattr(initialize, "__module__", "").startswith("rwkv_jit."):
        return  # errors, dictionaries, tuples
    legal = signature(made).parameters

    @wraps(initialize)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        for each in named:
            if each not in legal:
                raise unexpected(name, each)
        initialize(self, *given, **named)

    made.__init__ = checked  # type: ignore[misc]
