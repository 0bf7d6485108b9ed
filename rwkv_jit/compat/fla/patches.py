"""What stands in FLA's modules after `install`: each function that is replaced, with FLA's own behind it."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from rwkv_jit.compat import fla
from rwkv_jit.compat.fla import functions, layers
from rwkv_jit.errors import UnsupportedConfigError

_log = logging.getLogger("rwkv_jit")
_OURS, _DISPATCHED = "rwkv_jit", "chunk_dplr_delta_rule"
_calls: dict[str, Counter[str]] = defaultdict(Counter)
_replaced: dict[Any, Any] = {}  # FLA's own function by ours
_forwards: dict[Any, Any] = {}  # FLA's own, by the class


def apply(names: Sequence[str]) -> None:
    """Replace what these modules of FLA define, wherever it has been imported to."""
    ours: dict[int, Any] = {}
    for name in names:
        module = sys.modules[name]
        for function in fla.FUNCTIONS.get(name, ()):
            original = getattr(module, function, None)
            if original is None or original in _replaced:
                continue
            if function == _DISPATCHED and _register(original):
                continue
            made = _with_fallback(function, original, getattr(functions, function))
            _replaced[made], ours[id(original)] = original, made
        for layer in fla.LAYERS.get(name, ()):
            kind = getattr(module, layer, None)
            if kind is not None and kind not in _forwards:
                _forwards[kind] = kind.forward
                kind.forward = _with_fallback(layer, kind.forward, getattr(layers, layer).forward)
    _exchange(ours)


def take_back() -> None:
    """Put FLA's own functions and forwards back."""
    _exchange({id(made): original for made, original in _replaced.items()})
    _replaced.clear()
    while _forwards:
        kind, forward = _forwards.popitem()
        kind.forward = forward


def counted() -> dict[str, dict[str, int]]:
    """Return how often who ran what."""
    return {name: dict(calls) for name, calls in _calls.items()}


def _note(name: str, who: str) -> None:
    if torch.compiler.is_compiling():
        return
    _calls[name][who] += 1
    if _calls[name][who] == 1:
        _log.info("FLA's %s: %s", name, who)


def _with_fallback(name: str, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs ours, and FLA's own code where ours cannot do what is asked."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            result = ours(*arguments, **options)
        except UnsupportedConfigError as error:
            _note(name, f"FLA: {error}")
            return original(*arguments, **options)
        _note(name, _OURS)
        return result

    # Not what stands in its dict: there torch keeps that FLA wants it out of compiled code.
    return functools.update_wrapper(call, original, updated=())


def _exchange(new: Mapping[int, Any]) -> None:
    """Put other objects in the place of some, by their ids, in all modules there are."""
    if not new:
        return
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__ != __name__:
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def _register(original: Callable[..., Any]) -> bool:
    """Enter the delta rule in FLA's registry, and return whether this FLA has one."""
    try:
        from fla.backends import BaseBackend, register
    except ImportError:
        return False
    run = _with_fallback(_DISPATCHED, inspect.unwrap(original), functions.chunk_dplr_delta_rule)

    @register("generalized_delta_rule.dplr")
    class Backend(BaseBackend):  # type: ignore[misc]
        backend_type, priority = _OURS, 1

        def is_enabled(self) -> bool:
            return fla.is_installed

        def chunk_dplr_delta_rule(self, *arguments: Any, **options: Any) -> Any:
            return run(*arguments, **options)

    return True
