"""What others have in their modules, replaced by ours, and put back."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

# Held while what is installed changes. Nothing is imported under it: whoever imports may wait for it in a hook.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
# Attributes that are ours for a while, of modules of Python or of torch, which this does not keep alive.
_made: list[tuple[weakref.ref[Any], str, Any, Any]] = []


def put(owner: Any, name: str, ours: Any) -> None:
    """Put ours in the place of what `owner` has there."""
    with LOCK:
        theirs = getattr(owner, name)
        if theirs is not ours:
            _made.append((weakref.ref(owner), name, ours, theirs))
            setattr(owner, name, ours)


def has(owner: Any, name: str) -> bool:
    """Return whether what `owner` has there is ours."""
    there = getattr(owner, name, None)
    return any(kept() is owner and (other, ours) == (name, there) for kept, other, ours, _ in tuple(_made))


def undo() -> None:
    """Put everything back, but for what somebody else has replaced since."""
    with LOCK:
        while _made:
            kept, name, ours, theirs = _made.pop()
            owner = kept()
            if owner is not None and getattr(owner, name, None) is ours:
                setattr(owner, name, theirs)
