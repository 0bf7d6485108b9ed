"""What calls leave behind for later ones of the same signature."""

from __future__ import annotations

import os
from typing import Any, TypeVar

_V = TypeVar("_V")

MOST = 4096  # a server that meets every length there is must not grow without end
_all: list[BySignature[Any]] = []


class BySignature(dict[Any, _V]):
    """What was prepared for the first call of a signature: at most MOST of them, none in a forked child."""

    def __init__(self) -> None:
        super().__init__()
        _all.append(self)

    def keep(self, signature: Any, value: _V) -> _V:
        """Keep and return a value; where there is no room, without all that came before."""
        if len(self) >= MOST:
            self.clear()
        self[signature] = value
        return value


def forget() -> None:
    """Drop everything."""
    for each in _all:
        each.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # nothing of CUDA survives a fork
