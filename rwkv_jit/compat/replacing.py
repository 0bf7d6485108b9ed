"""What others have in their modules, replaced by ours, and put back."""

from __future__ import annotations

import weakref
from typing import Any


class Replacements:
    """Attributes that are ours for a while, of modules of Python or of torch, which this does not keep alive."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Any], str, Any, Any]] = []

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Put ours in the place of what `owner` has there."""
        self._made.append((weakref.ref(owner), name, ours, getattr(owner, name)))
        setattr(owner, name, ours)

    def has(self, owner: Any, name: str) -> bool:
        """Return whether what `owner` has there is ours."""
        there = getattr(owner, name, None)
        return any(kept() is owner and (other, ours) == (name, there) for kept, other, ours, _ in self._made)

    def undo(self) -> None:
        """Put everything back, but for what somebody else has replaced since."""
        while self._made:
            kept, name, ours, theirs = self._made.pop()
            owner = kept()
            if owner is not None and getattr(owner, name, None) is ours:
                setattr(owner, name, theirs)
