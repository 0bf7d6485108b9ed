"""The environment variables, each read when it is used.

No variable starts with ``RWKV_JIT_``: ``RWKV_JIT_ON`` belongs to RWKV-LM.
"""

from __future__ import annotations

import os
from pathlib import Path

DESCRIPTIONS = {
    "RWKVJIT_CACHE_DIR": "where compiled kernels are kept (default: the user's cache directory)",
    "RWKVJIT_ARCH": "architecture to compile for instead of the GPU's own, e.g. sm_80 or compute_80 (PTX)",
    "RWKVJIT_ASSERT_CACHED": "1: a kernel that is not in the cache is an error instead of a compile",
    "RWKVJIT_LOG": "level of messages to standard error, e.g. info",
}


def cache_dir() -> Path:
    """Return the directory that holds one folder of kernels per architecture."""
    chosen = os.environ.get("RWKVJIT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("rwkv_jit", appauthor=False)


def arch() -> str | None:
    """Return the architecture that replaces the GPU's own."""
    return os.environ.get("RWKVJIT_ARCH") or None


def assert_cached() -> bool:
    """Return whether a compile is an error."""
    return os.environ.get("RWKVJIT_ASSERT_CACHED", "0") not in ("", "0")


def log_level() -> str | None:
    """Return the level asked for."""
    return os.environ.get("RWKVJIT_LOG") or None


def set_variables() -> dict[str, str]:
    """Return the variables of this package that are set."""
    return {name: os.environ[name] for name in DESCRIPTIONS if name in os.environ}
