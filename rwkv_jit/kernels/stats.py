"""Counters, hooks and messages of the kernel service."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rwkv_jit.kernels import env
from rwkv_jit.kernels.errors import printable

logger = logging.getLogger("rwkv_jit")
_lock = threading.Lock()
_said: set[str] = set()
_hooks: dict[object, Callable[[dict[str, Any]], None]] = {}
_QUIET_SECONDS = 1.0
# Kernels by where they came from, and what they cost.
COUNTERS = {
    "memory": 0, "disk": 0, "shared": 0, "bundle": 0, "compiled": 0, "compile_seconds": 0.0, "wait_seconds": 0.0,
    "bytes_read": 0, "bytes_written": 0, "evictions": 0,
}  # fmt: skip
_counters = dict(COUNTERS)


def count(name: str, amount: float = 1) -> None:
    """Add to a counter."""
    with _lock:
        _counters[name] += amount


def snapshot() -> dict[str, float]:
    """Return the counters of this process."""
    with _lock:
        return dict(_counters)


def add_hook(hook: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Call a function whenever a kernel has been found or compiled.

    Parameters
    ----------
    hook : callable
        Gets a dict with origin ("memory", "disk", "shared", "bundle" or "compiled"), name, arch, parameters and
        compile_seconds. The thread that needs the kernel runs it, and gets what it raises once the kernel is stored.

    Returns
    -------
    callable
        Takes the hook off again.
    """
    added = object()
    _hooks[added] = hook

    def remove() -> None:
        _hooks.pop(added, None)

    return remove


def tell(event: dict[str, Any]) -> None:
    """Count a kernel by its origin and call the hooks."""
    count(event["origin"])
    for hook in tuple(_hooks.values()):
        hook(event)


def say_once(message: str, *, key: str | None = None) -> None:
    """Warn, the first time only."""
    with _lock:
        if (key or message) in _said:
            return
        configure_logging()  # which may raise, and does so again the next time
        _said.add(key or message)
    logger.warning(printable(message))


@contextmanager
def say_if_slow(message: str) -> Iterator[None]:
    """Warn with one line when the work inside has taken a second: a silent program looks hung."""
    configure_logging()
    works = threading.Lock()
    with works:
        # threading.Thread waits until a thread runs, for ever where memory was too short for it.
        with suppress(RuntimeError, MemoryError):  # no thread can be had: then without the message
            _thread.start_new_thread(_say_if_held, (works, message))
        yield


def _say_if_held(works: threading.Lock, message: str) -> None:
    if not works.acquire(timeout=_QUIET_SECONDS):
        logger.warning(printable(message))


def configure_logging() -> None:
    """Send messages to standard error if RWKVJIT_LOG names a level; ValueError for anything else."""
    level = env.log_level()
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("rwkv_jit: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


def reset_after_fork() -> None:
    """Give a forked child a lock that no thread of its parent holds."""
    global _lock
    _lock = threading.Lock()
