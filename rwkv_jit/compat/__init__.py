"""Existing code on these kernels, unchanged: the extensions that it would compile are here.

After `install`, `torch.utils.cpp_extension.load` of a known name compiles nothing. It defines the ops that the
extension would, with the same names and arguments, and returns a module of them. RWKV-4 of transformers finds its
kernel here too. Neither torch nor transformers is imported for it.
"""

from __future__ import annotations

import sys

from rwkv_jit import after

__all__ = ["install", "uninstall"]

is_installed = False
# Modules of others, and who takes over there as soon as they are imported.
_ROOMS = {
    "torch.utils.cpp_extension": "rwkv_jit.compat.loading",
    "transformers.models.rwkv.modeling_rwkv": "rwkv_jit.compat.hf_rwkv4",
}
_awaited: set[str] = set()


def install() -> None:
    """Answer for the extensions of RWKV projects and for the kernel of transformers' RWKV-4 from now on.

    A program calls it before it imports a module that says ``from torch.utils.cpp_extension import load``. A second
    call does nothing. What is known stands in `rwkv_jit.compat.extensions.NAMES`; other names are compiled as ever.
    """
    global is_installed
    is_installed = True
    for name, room in _ROOMS.items():
        if room in sys.modules:
            sys.modules[room].take_over()
        elif name not in _awaited:
            _awaited.add(name)
            after.imported(name, room)


def uninstall() -> None:
    """Give everything back: torch its `load`, without the ops that were defined for it, and others what they had."""
    global is_installed
    is_installed = False
    for room in (*_ROOMS.values(), "rwkv_jit.compat.hf"):
        if room in sys.modules:
            sys.modules[room].give_back()
