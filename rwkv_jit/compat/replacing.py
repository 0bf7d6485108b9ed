"""What others have in their modules, replaced by ours, and put back."""

from __future__ import annotations

from typing import Any


class Replacements:
    """Attributes of modules that are ours for a while."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Put ours in the place of what `owner` has there."""
        self._made.append((owner, name, ours, getattr(owner, name)))
        setattr(owner, name, ours)

    def undo(self) -> None:
        """Put everything back, but for what somebody else has replaced since."""
        while self._made:
            owner, name, ours, theirs = self._made.pop()
            if getattr(owner, name, None) is ours:
                setattr(owner, name, theirs)
