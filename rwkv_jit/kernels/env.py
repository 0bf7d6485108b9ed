"""The environment variables, each read when it is used; none is ``RWKV_JIT_...``, as RWKV-LM has RWKV_JIT_ON."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from rwkv_jit.kernels.errors import brief

DESCRIPTIONS = {
    "RWKVJIT_CACHE_DIR": "directory of compiled kernels (default: the user's cache directory)",
    "RWKVJIT_CACHE_PATH": "more directories and bundles to read kernels from, separated as in PATH",
    "RWKVJIT_CACHE": "0: neither read nor write kernels on disk",
    "RWKVJIT_CACHE_MAX_MB": "size above which the least recently used kernels are deleted (default: 512)",
    "RWKVJIT_CACHE_SHARED": "1: trust cache directories and files that other users own or may write",
    "RWKVJIT_ARCH": "architecture to compile for instead of the GPU's own, e.g. sm_80 or compute_80 (PTX)",
    "RWKVJIT_CHECK": "1: check the slots of updates on a GPU, which waits for the GPU; set it before the first update",
    "RWKVJIT_FLA": "1: FLA's functions and layers run on these kernels, as after rwkv_jit.compat.fla.install()",
    "RWKVJIT_COMPAT": "1: replace extensions of RWKV projects, as after rwkv_jit.compat.install()",
    "RWKVJIT_ASSERT_CACHED": "1: a kernel that is not in the cache is an error instead of a compile",
    "RWKVJIT_LINEINFO": "1: compile with line numbers for profilers",
    "RWKVJIT_KEEP_SOURCE": "1: keep the source of every kernel that is compiled, in the cache directory",
    "RWKVJIT_LOG": "level of messages to standard error, e.g. info",
}
TEMPORARY = "rwkv_jit-temporary-"  # how the name of a directory begins whose kernels are deleted after the work

_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_LEVELS = ("debug", "info", "warning", "error", "critical")
_SAY_WHERE_THE_HOME_IS = ("XDG_CACHE_HOME", "HOME", "USERPROFILE", "LOCALAPPDATA")
_NOWHERE = Path(os.devnull) / "rwkv_jit"  # can neither be read nor made


def check() -> None:
    """Check the variables that are read after a kernel has been compiled, before one is; raises a ValueError of one."""
    for read in _readers():
        read()


def _readers() -> tuple[Callable[[], object], ...]:
    switches = cache_is_on, cache_is_shared, assert_cached, lineinfo, keep_source, runs_fla, runs_compat
    return *switches, cache_max_bytes, log_level


def faults() -> dict[str, str]:
    """Return the variables that are set to something they cannot be, and what is wrong with each."""
    found = {}
    readers: tuple[Callable[[], object], ...] = (*_readers(), checks_indices)
    for read in readers:
        try:
            read()
        except ValueError as error:
            found[str(error).partition(":")[0]] = str(error)
    return found


def _is_on(name: str, default: bool = False) -> bool:
    text = os.environ.get(name)
    if not text:
        return default
    is_on = _SWITCH.get(text.lower())
    if is_on is None:
        raise ValueError(f"{name}: expected 0 or 1 (or false, no, off; true, yes, on), got {brief(text)}")
    return is_on


# Whether directories and files that others own or may write are trusted, a compile is an error, slots on a GPU are
# looked at, kernels carry line numbers, the source of compiled kernels is kept, FLA runs on these kernels, and
# extensions of RWKV projects are there.
cache_is_shared = partial(_is_on, "RWKVJIT_CACHE_SHARED")
assert_cached = partial(_is_on, "RWKVJIT_ASSERT_CACHED")
checks_indices = partial(_is_on, "RWKVJIT_CHECK")
lineinfo = partial(_is_on, "RWKVJIT_LINEINFO")
keep_source = partial(_is_on, "RWKVJIT_KEEP_SOURCE")
runs_fla = partial(_is_on, "RWKVJIT_FLA")
runs_compat = partial(_is_on, "RWKVJIT_COMPAT")


def arch() -> str | None:
    """Return the architecture that replaces that of the GPU."""
    text = os.environ.get("RWKVJIT_ARCH") or None
    if text and not re.fullmatch(r"(sm|compute)_[1-9][0-9]{1,2}[af]?", text):
        raise ValueError(f"RWKVJIT_ARCH: expected sm_NN, sm_NNa or compute_NN, got {brief(text)}")
    return text


def cache_dir() -> Path:
    """Return the user's directory, a folder per architecture; where `cache_fault` says so, an unusable path."""
    return _cache_dir()[0]


def cache_fault() -> str:
    """Return why kernels should be kept on the disk and cannot be, as there is no directory; empty where there is."""
    return _cache_dir()[1] if _is_on("RWKVJIT_CACHE", default=True) else ""


def _cache_dir() -> tuple[Path, str]:
    chosen = os.environ.get("RWKVJIT_CACHE_DIR", "")
    needs_a_home = not chosen or chosen.startswith("~")
    return _found_dir(chosen, *(map(os.environ.get, _SAY_WHERE_THE_HOME_IS) if needs_a_home else ()))


@cache
def _found_dir(chosen: str, *_: str | None) -> tuple[Path, str]:
    if chosen:
        with suppress(RuntimeError):  # nobody's home
            return Path(chosen).expanduser(), ""
        return _NOWHERE, f"RWKVJIT_CACHE_DIR={brief(chosen)} names a home directory that there is not"
    import platformdirs

    with suppress(RuntimeError):
        path = platformdirs.user_cache_path("rwkv_jit", appauthor=False)
        # Below a relative path every working directory would get a cache of its own.
        if path.is_absolute():
            return path, ""
    return _NOWHERE, "the home directory is not known; set RWKVJIT_CACHE_DIR to a directory that you own"


def cache_is_lasting() -> bool:
    """Return whether later processes find what is written into the user's directory now."""
    return cache_is_on() and not any(part.startswith(TEMPORARY) for part in cache_dir().parts)


def cache_path() -> list[Path]:
    """Return the directories and bundles that kernels are read from after the user's directory."""
    # Of a user that there is not, "~name" stays as it is: reading it says that it is not there.
    parts = os.environ.get("RWKVJIT_CACHE_PATH", "").split(os.pathsep)
    return [Path(os.path.expanduser(part)) for part in parts if part]


def cache_is_on() -> bool:
    """Return whether kernels are read from and written to the disk."""
    return _is_on("RWKVJIT_CACHE", default=True) and cache_dir() != _NOWHERE


def cache_max_bytes() -> int:
    """Return the bytes that the user's directory is kept below; raises ValueError where that is no number from 0."""
    text = os.environ.get("RWKVJIT_CACHE_MAX_MB") or "512"
    try:
        size = float(text) * 2**20
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise ValueError(f"RWKVJIT_CACHE_MAX_MB: expected a number of at least 0, got {brief(text)}")
    return int(size)


def log_level() -> str | None:
    """Return the level that is set, in logging's capitals; raises ValueError where it is no level."""
    text = os.environ.get("RWKVJIT_LOG")
    if not text:
        return None
    if text.lower() not in _LEVELS:
        raise ValueError(f"RWKVJIT_LOG: expected debug, info, warning or error, got {brief(text)}")
    return text.upper()


def workers() -> int:
    """Return how many kernels to compile at once: this process's cores, shared with the ranks of the node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = 1
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        text = os.environ.get(name, "")
        if re.fullmatch("0*[1-9][0-9]{0,8}", text):  # not our variables: what is no number of ranks counts for nothing
            ranks = int(text)
            break
    return max(1, cores // ranks)


def set_variables() -> dict[str, str]:
    """Return the variables of this package that are set."""
    return {name: os.environ[name] for name in DESCRIPTIONS if name in os.environ}


def spans_nodes() -> bool:
    """Return whether torchrun, which sets these two variables, has started ranks on other nodes too."""
    ranks, of_node = _numbers("WORLD_SIZE", "LOCAL_WORLD_SIZE") or (0, 0)
    return ranks > of_node


def place_among_ranks() -> float:
    """Return where this process stands among those that torchrun started on its node, from 0 to less than 1."""
    rank, ranks = _numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE") or (0, 0)
    return rank / ranks if 0 <= rank < ranks else 0.0


def _numbers(*names: str) -> list[int] | None:
    """Return what variables that are not ours hold, or None where one of them is no number."""
    try:
        return [int(os.environ[name]) for name in names]
    except (KeyError, ValueError):
        return None
