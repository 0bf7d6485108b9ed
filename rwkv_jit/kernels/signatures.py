"""What calls leave behind for later ones of the same signature."""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

_V = TypeVar("_V")

MOST = 4096  # a server that meets every length there is must not grow without end
_all: list[BySignature[Any]] = []


# What outlives its signature, as a graph holds it until it is differentiated.
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


class BySignature(dict[Any, _V]):
    """What was prepared for the first call of a signature: at most MOST of them, none in a forked child."""

    def __init__(self) -> None:
        super().__init__()
        _all.append(self)

    def keep(self, signature: Any, value: _V) -> _V:
        """Keep and return a value; if there are too many, without all that came before."""
        if len(self) >= MOST:
            self.clear()
        self[signature] = value
        return value


def forget_with(holder: Any) -> None:
    """Call a holder's `forget`, which drops what was prepared, whenever everything is dropped."""
    _holders.add(holder)


def forget() -> None:
    """Drop everything."""
    for known in _all:
        known.clear()
    for holder in list(_holders):
        holder.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # nothing of CUDA survives a fork
