"""Existing code on these kernels, unchanged: the extensions that it would compile are here.

After `install`, `torch.utils.cpp_extension.load` of a known name compiles nothing. It defines the ops that the
extension would, with the same names and arguments, and returns a module of them. Torch is not imported for it.
"""

from __future__ import annotations

import sys

from rwkv_jit import after

__all__ = ["install", "uninstall"]

is_installed = False
_LOADER = "torch.utils.cpp_extension"
_is_awaited = False


def install() -> None:
    """Answer for the extensions of RWKV projects from now on.

    A program calls it before it imports a module that says ``from torch.utils.cpp_extension import load``. A second
    call does nothing. What is known stands in `rwkv_jit.compat.extensions.NAMES`; other names are compiled as ever.
    """
    global is_installed, _is_awaited
    is_installed = True
    if "rwkv_jit.compat.loading" in sys.modules:
        sys.modules["rwkv_jit.compat.loading"].take_over()
    elif not _is_awaited:
        _is_awaited = True
        after.imported(_LOADER, "rwkv_jit.compat.loading")


def uninstall() -> None:
    """Give `load` back to torch, and take the ops away that were defined for it."""
    global is_installed
    is_installed = False
    if "rwkv_jit.compat.loading" in sys.modules:
        sys.modules["rwkv_jit.compat.loading"].give_back()
