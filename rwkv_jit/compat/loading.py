"""`torch.utils.cpp_extension.load` in our hands: known names are defined as ops of torch, others go to torch's own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from rwkv_jit import compat
from rwkv_jit.compat import extensions, replacing
from rwkv_jit.kernels.errors import RwkvJitError, brief

_log = logging.getLogger("rwkv_jit")
_torch_load: Any = None
answered: dict[str, str] = {}  # who answered for an extension, by its name
_libraries: dict[str, torch.library.Library] = {}  # by namespace
# By namespace: without a kernel torch would free an op, and a call of one that a program holds would crash.
_kept: dict[str, torch.library.Library] = {}
_NEVER = "PrivateUse3"  # a device that nobody has
_held: dict[str, dict[int, tuple[Any, Any]]] = {}  # by namespace: objects of ops that programs may hold; what runs them


def load(name: str, *arguments: Any, **options: Any) -> Any:
    """Return the module of a known extension, whatever its sources and flags; build another one as torch does."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of an extension, got {brief(name)}")
    sources = extensions.base_names(arguments[0] if arguments else options.get("sources", ()))
    with replacing.LOCK:
        extension = extensions.find(name, sources) if compat.is_installed else None
        if extension and extension.namespace and extension.namespace not in _libraries:
            _libraries[extension.namespace] = _define(extension)
    answered[name] = "torch" if extension is None else "rwkv_jit"
    if extension is None:
        _log.info("%s is no extension that rwkv_jit knows: torch builds it", name)
        return _torch_load(name, *arguments, **options)
    if others := [source for source in sources if not extension.is_of(source)]:
        warnings.warn(
            f"rwkv_jit.compat answers for the extension {name} with its own ops and builds nothing, but does not know "
            f"the sources {', '.join(others)} of it; to build them, give the extension another name, or call "
            "rwkv_jit.compat.uninstall() before",
            RuntimeWarning,
            stacklevel=2,
        )
    _log.info("%s: rwkv_jit has its ops, and nothing is compiled", name)
    return SimpleNamespace(**{op: entry.run for op, entry in extension.ops.items()})


def _define(extension: extensions.Extension) -> torch.library.Library:
    """Define the ops of an extension: all of them, or none."""
    namespace = extension.namespace
    there = getattr(torch.ops, namespace)
    for op in extension.ops:
        if hasattr(there, op):
            raise RwkvJitError(
                f"torch.ops.{namespace}.{op} is defined already, by an extension that was loaded before "
                "rwkv_jit.compat.install(); call install() first"
            )
    library = torch.library.Library(namespace, "FRAGMENT")
    for op, entry in extension.ops.items():
        library.define(op + entry.schema)
        library.impl(op, entry.run, "CompositeExplicitAutograd")
    if namespace not in _kept:
        _kept[namespace] = torch.library.Library(namespace, "IMPL")
        for op in extension.ops:
            _kept[namespace].impl(op, _refusal(f"{namespace}.{op}"), _NEVER)
    for held, run in _held.get(namespace, {}).values():
        held._op = run
    return library


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RwkvJitError(
            f"torch.ops.{name} is not defined any more, since rwkv_jit.compat.uninstall(); load the extension again"
        )

    return refuse


def take_over(cpp_extension: ModuleType) -> None:
    """Put our `load` in the place of torch's."""
    global _torch_load
    if cpp_extension.load is not load:
        _torch_load = cpp_extension.load
        compat.put(cpp_extension, "load", load)


def give_back() -> None:
    """Remove the ops that were defined. Those that a program holds raise an error."""
    while _libraries:
        namespace, library = _libraries.popitem()
        there, held = vars(getattr(torch.ops, namespace)), _held.setdefault(namespace, {})
        # torch keeps what it has found once: an op, and in there its overloads.
        packets = [*filter(None, map(there.get, extensions.ops_of(namespace))), *(x for x, _ in held.values())]
        for x in [*packets, *(part for packet in packets for part in vars(packet).values())]:
            if isinstance(x, torch._ops.OpOverloadPacket | torch._ops.OpOverload) and id(x) not in held:
                held[id(x)] = x, x._op
        for x, _ in held.values():
            x._op = _refusal(str(x))
        library._destroy()
        for op in extensions.ops_of(namespace):
            there.pop(op, None)
