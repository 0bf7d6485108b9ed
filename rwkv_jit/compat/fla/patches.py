"""What stands in FLA's modules after `install`: each function that is replaced, with FLA's own behind it."""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from rwkv_jit.compat import fla
from rwkv_jit.compat.falling_back import with_fallback
from rwkv_jit.compat.fla import family, functions, layers
from rwkv_jit.kernels.errors import UnsupportedConfigError

_log = logging.getLogger("rwkv_jit")
_OURS = "rwkv_jit"
# What FLA's registry dispatches as a whole: the name of its operation, None where the function itself has an entry.
_DISPATCHED = {
    "chunk_dplr_delta_rule": "generalized_delta_rule.dplr",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kda": None,
    "fused_chunk_simple_gla": None,
    "fused_recurrent_simple_gla": None,
    "parallel_simple_gla": None,
}
_calls: dict[str, Counter[str]] = defaultdict(Counter)
_replaced: dict[Any, Any] = {}  # FLA's own function by ours
_forwards: dict[Any, Any] = {}  # FLA's own, by the class
_owners: weakref.WeakSet[ModuleType] = weakref.WeakSet()  # modules of FLA, also those that were imported anew since


def apply(names: Sequence[str]) -> None:
    """Replace what these modules of FLA define, wherever it has been imported to."""
    ours: dict[int, Any] = {}
    for name in names:
        module = sys.modules[name]
        _owners.add(module)
        for function in fla.FUNCTIONS.get(name, ()):
            original = getattr(module, function, None)
            if original is None or original in _replaced:
                continue
            if function in _DISPATCHED and _register(function, original):
                continue
            made = with_fallback(function, _ours(function), original, _note)
            _replaced[made], ours[id(original)] = original, made
        for layer in fla.LAYERS.get(name, ()):
            kind = getattr(module, layer, None)
            if kind is not None and kind not in _forwards:
                _forwards[kind] = kind.forward
                kind.forward = with_fallback(layer, getattr(layers, layer).forward, kind.forward, _note)
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


def _note(name: str, error: UnsupportedConfigError | None) -> None:
    if torch.compiler.is_compiling():
        return
    who = _OURS if error is None else f"FLA: {error}"
    _calls[name][who] += 1
    if _calls[name][who] == 1:
        _log.info("FLA's %s: %s", name, who)


def _exchange(new: Mapping[int, Any]) -> None:
    """Put other objects in the place of some, by their ids, in all modules there are."""
    if not new:
        return
    for module in (*sys.modules.values(), *_owners):
        if isinstance(module, ModuleType) and module.__name__ != __name__:
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def _register(name: str, original: Callable[..., Any]) -> bool:
    """Enter a function in FLA's registry, and return whether this FLA has one that is in use."""
    backends = sys.modules.get("fla.backends")  # and not an import, which may wait for who waits for this
    if backends is None or getattr(backends, "_DISPATCH_DISABLED", False):
        return False
    try:

        class Backend(backends.BaseBackend):  # type: ignore[misc, name-defined]
            backend_type, priority = _OURS, 1

            def is_enabled(self) -> bool:
                return fla.is_installed

        setattr(Backend, name, staticmethod(with_fallback(name, _ours(name), inspect.unwrap(original), _note)))
        backends.register(_DISPATCHED[name] or original)(Backend)
    except (AttributeError, KeyError):  # there is no registry, or none of this function
        return False
    return True


def _ours(name: str) -> Callable[..., Any]:
    """Return our function of this name."""
    return getattr(functions if hasattr(functions, name) else family, name)  # type: ignore[no-any-return]
