"""Work that a fork waits for: a lock that another thread holds inside a library would be held in the child for ever."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rwkv_jit.kernels import stats

_PATIENCE_SECONDS = 1.0


class _Gate:
    """Threads go in and out; a fork shuts it, waits until they are out, and opens it again in parent and child."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.inside: Counter[int] = Counter()  # by thread: how often it has gone in
        self.forking: int | None = None  # the thread that has shut the gate

    def enter(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: self.forking in (None, me) or me in self.inside)
            self.inside[me] += 1

    def leave(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.inside[me] -= 1
            if not self.inside[me]:
                del self.inside[me]
            self.changed.notify_all()

    def shut(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: self.forking is None)
            self.forking = me
            is_free = self.changed.wait_for(lambda: not self.inside.keys() - {me}, _PATIENCE_SECONDS)
        if not is_free:
            stats.logger.warning("a fork waits for the kernels that are being compiled")
            with self.changed:
                self.changed.wait_for(lambda: not self.inside.keys() - {me})

    def open(self) -> None:
        with self.changed:
            self.forking = None
            self.changed.notify_all()


_gate = _Gate()


@contextmanager
def held_back() -> Iterator[None]:
    """Let forks of other threads wait for the work inside, and the work for a fork that has begun."""
    _gate.enter()
    try:
        yield
    finally:
        _gate.leave()  # in a child that the work itself has forked, another one


def _after_in_child() -> None:
    """Begin anew: whoever else waited at the gate or was inside does not exist here."""
    global _gate
    me, former = threading.get_ident(), _gate
    _gate = _Gate()
    if me in former.inside:
        _gate.inside[me] = former.inside[me]


if hasattr(os, "register_at_fork"):
    # The names are looked up at the fork: in a child there is another gate.
    os.register_at_fork(
        before=lambda: _gate.shut(), after_in_parent=lambda: _gate.open(), after_in_child=_after_in_child
    )
