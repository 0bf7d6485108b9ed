"""Counters and messages of the kernel service."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass

from rwkv_jit import env

logger = logging.getLogger("rwkv_jit")
_lock = threading.Lock()
_said: set[str] = set()


@dataclass
class Counters:
    """Kernels by where they came from, and what compiling cost."""

    memory: int = 0
    disk: int = 0
    compiled: int = 0
    compile_seconds: float = 0.0


_counters = Counters()


def count(origin: str, seconds: float = 0.0) -> None:
    """Add one kernel from "memory", "disk" or "compiled"."""
    with _lock:
        setattr(_counters, origin, getattr(_counters, origin) + 1)
        _counters.compile_seconds += seconds


def snapshot() -> dict[str, float]:
    """Return the counters of this process."""
    with _lock:
        return asdict(_counters)


def say_once(message: str, *, key: str | None = None) -> None:
    """Warn, the first time only."""
    with _lock:
        if (key or message) in _said:
            return
        _said.add(key or message)
    configure_logging()
    logger.warning(message)


def configure_logging() -> None:
    """Send messages to standard error where RWKVJIT_LOG asks for it; otherwise the application decides."""
    level = env.log_level()
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("rwkv_jit: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
