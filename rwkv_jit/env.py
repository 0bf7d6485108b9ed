"""The environment variables, each read when it is used.

No variable starts with ``RWKV_JIT_``: ``RWKV_JIT_ON`` belongs to RWKV-LM.
"""

from __future__ import annotations

import os
from pathlib import Path

DESCRIPTIONS = {
    "RWKVJIT_CACHE_DIR": "where compiled kernels are kept (default: the user's cache directory)",
    "RWKVJIT_CACHE_PATH": "more directories and bundles to read kernels from, separated as in PATH",
    "RWKVJIT_CACHE": "0: neither read nor write kernels on disk",
    "RWKVJIT_CACHE_MAX_MB": "size above which the least recently used kernels are deleted (default: 512)",
    "RWKVJIT_CACHE_SHARED": "1: trust cache directories and files that other users own or may write",
    "RWKVJIT_ARCH": "architecture to compile for instead of the GPU's own, e.g. sm_80 or compute_80 (PTX)",
    "RWKVJIT_ASSERT_CACHED": "1: a kernel that is not in the cache is an error instead of a compile",
    "RWKVJIT_LINEINFO": "1: compile with line numbers for profilers",
    "RWKVJIT_KEEP_SOURCE": "1: keep the source of every kernel that is compiled, in the cache directory",
    "RWKVJIT_LOG": "level of messages to standard error, e.g. info",
}


def _is_on(name: str, default: str = "0") -> bool:
    return (os.environ.get(name) or default) != "0"


def cache_dir() -> Path:
    """Return the user's directory, which holds one folder of kernels per architecture."""
    chosen = os.environ.get("RWKVJIT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("rwkv_jit", appauthor=False)


def cache_path() -> list[Path]:
    """Return the directories and bundles that kernels are read from after the user's directory."""
    parts = os.environ.get("RWKVJIT_CACHE_PATH", "").split(os.pathsep)
    return [Path(part).expanduser() for part in parts if part]


def cache_is_on() -> bool:
    """Return whether kernels are read from and written to the disk."""
    return _is_on("RWKVJIT_CACHE", "1")


def cache_max_bytes() -> int:
    """Return the size that the user's directory is kept below.

    Raises
    ------
    ValueError
        It is set to something else than a number of at least 0.
    """
    text = os.environ.get("RWKVJIT_CACHE_MAX_MB") or "512"
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < float("inf"):
        raise ValueError(f"RWKVJIT_CACHE_MAX_MB: expected a number of at least 0, got {text!r}")
    return int(megabytes * 2**20)


def cache_is_shared() -> bool:
    """Return whether directories and files that others own or may write are trusted."""
    return _is_on("RWKVJIT_CACHE_SHARED")


def arch() -> str | None:
    """Return the architecture that replaces the GPU's own."""
    return os.environ.get("RWKVJIT_ARCH") or None


def assert_cached() -> bool:
    """Return whether a compile is an error."""
    return _is_on("RWKVJIT_ASSERT_CACHED")


def lineinfo() -> bool:
    """Return whether kernels carry line numbers."""
    return _is_on("RWKVJIT_LINEINFO")


def keep_source() -> bool:
    """Return whether the source of compiled kernels is kept."""
    return _is_on("RWKVJIT_KEEP_SOURCE")


def log_level() -> str | None:
    """Return the level asked for."""
    return os.environ.get("RWKVJIT_LOG") or None


def workers() -> int:
    """Return how many kernels to compile at once: this process's cores, shared with the ranks of the node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = 1
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            ranks = int(text)
            break
    return max(1, cores // ranks)


def set_variables() -> dict[str, str]:
    """Return the variables of this package that are set."""
    return {name: os.environ[name] for name in DESCRIPTIONS if name in os.environ}


def spans_nodes() -> bool:
    """Return whether torchrun, which sets these two variables, has started ranks on other nodes too."""
    try:
        return int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return False


def place_among_ranks() -> float:
    """Return where this process stands among those that torchrun started on its node, from 0 to less than 1."""
    try:
        rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0.0
    return rank / ranks if 0 <= rank < ranks else 0.0
