"""`torch.utils.cpp_extension.load` in our hands: known names are defined as ops of torch, others go to torch's own."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

from rwkv_jit.compat import extensions
from rwkv_jit.errors import RwkvJitError

_log = logging.getLogger("rwkv_jit")
_torch_load = cpp_extension.load
_libraries: dict[str, torch.library.Library] = {}  # by namespace


def load(name: str, *arguments: Any, **options: Any) -> Any:
    """Return the module of a known extension, whatever its sources and flags; build another one as torch does."""
    extension = extensions.find(name, arguments[0] if arguments else options.get("sources", ()))
    if extension is None:
        _log.info("%s is no extension that rwkv_jit knows: torch builds it", name)
        return _torch_load(name, *arguments, **options)
    _log.info("%s: rwkv_jit has its ops, and nothing is compiled", name)
    if extension.namespace and extension.namespace not in _libraries:
        _libraries[extension.namespace] = _define(extension)
    return SimpleNamespace(**{op: entry.run for op, entry in extension.ops.items()})


def _define(extension: extensions.Extension) -> torch.library.Library:
    """Define the ops of an extension: all of them, or none."""
    there = getattr(torch.ops, extension.namespace)
    for op in extension.ops:
        if hasattr(there, op):
            raise RwkvJitError(
                f"torch.ops.{extension.namespace}.{op} is defined already, by an extension that was loaded before "
                "rwkv_jit.compat.install(); call install() first"
            )
    library = torch.library.Library(extension.namespace, "FRAGMENT")
    for op, entry in extension.ops.items():
        library.define(op + entry.schema)
        library.impl(op, entry.run, "CompositeExplicitAutograd")
    return library


def take_over() -> None:
    """Put our `load` in the place of torch's."""
    cpp_extension.load = load


def give_back() -> None:
    """Put torch's `load` back, and remove the ops that were defined."""
    if cpp_extension.load is load:
        cpp_extension.load = _torch_load
    while _libraries:
        namespace, library = _libraries.popitem()
        library._destroy()
        for op in extensions.ops_of(namespace):
            getattr(torch.ops, namespace).__dict__.pop(op, None)  # torch keeps what it has found once
