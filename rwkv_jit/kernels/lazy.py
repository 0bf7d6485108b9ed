"""Names of a package that load their modules when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from rwkv_jit.kernels.errors import unexpected

UNKNOWN = "_unknown"  # the parameter that takes the keyword arguments that a function does not have


def modules(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name, from the names of each module of `rwkv_jit`."""
    return {name: f"rwkv_jit.{module}" for module, several in names.items() for name in several.split()}


def members(package: dict[str, Any], rooms: Sequence[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__`, `__dir__` of a package with globals `_MODULES`, `__all__`; `rooms` are packages in it."""
    path: str = package["__name__"]

    def get(name: str) -> Any:
        from inspect import isfunction, signature  # not where only the package is imported

        if name in rooms:
            return import_module(f"{path}.{name}")
        if name not in package["_MODULES"]:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        module = import_module(package["_MODULES"][name])
        package[name] = value = getattr(module, name)
        public = f"{path}.{name}".partition(".")[2]
        if isinstance(value, type):
            initialize: Callable[..., None] = value.__init__  # type: ignore[misc]
            if getattr(initialize, "__module__", "").startswith("rwkv_jit."):  # no error, dictionary or tuple
                value.__init__ = _with_checked_names(initialize, value, public)  # type: ignore[misc]
        elif isfunction(value) and not hasattr(value, "__signature__"):
            parameters = signature(value).parameters
            if UNKNOWN in parameters:  # the function itself says so where it gets one; callers need not see it
                legal = [x for x in parameters.values() if x.name != UNKNOWN]
                value.__signature__ = signature(value).replace(parameters=legal)  # type: ignore[attr-defined]
            elif not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
                package[name] = value = _with_checked_names(value, value, public)
                setattr(module, name, value)
        return value

    def listed() -> list[str]:
        return [*(name for name in package if name.startswith("__")), *package["__all__"], *rooms]

    return get, listed


def _with_checked_names(function: Callable[..., Any], public: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function whose error of a keyword argument that `public` does not have says what there is."""
    from inspect import signature

    legal = signature(public).parameters

    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        for each in named:
            if each not in legal:
                raise unexpected(name, each)
        return function(*args, **named)

    return checked
