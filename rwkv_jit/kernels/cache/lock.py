"""One compile per kernel and node: the others wait for the first, and then find its result in the cache.

Locks are `flock`s, which end with their process, on a few lasting files in a directory of the user on a disk of the
node. Without such a directory each process compiles for itself.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rwkv_jit.kernels import stats
from rwkv_jit.kernels.cache import files
from rwkv_jit.kernels.errors import reason

MAX_WAIT_SECONDS = 60.0
_PAUSE_SECONDS = 0.004
_NETWORK = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "wekafs", "panfs", "pvfs2", "fuse.sshfs",
    "fuse.glusterfs", "fuse.ceph", "fuse.juicefs",
)  # fmt: skip
_held: set[int] = set()


def directory() -> Path:
    """Return the directory of the locks."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"rwkv_jit-{user}"


def domain() -> str:
    """Return a name that is the same for all processes that these locks keep apart, and for no others."""
    status = os.stat(directory())
    return f"{platform.node()} {status.st_dev} {status.st_ino}"


def network_file_system(path: Path) -> str | None:
    """Return the kind of network file system a path lies on, or None for a disk of this node (or where unknown)."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
            mounts = [line.split()[1:3] for line in table]
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    # The last of equal mount points hides the others.
    longest = max(
        ((len(point), at, kind) for at, (point, kind) in enumerate(mounts) if real.is_relative_to(_unescaped(point))),
        default=(0, 0, ""),
    )
    return longest[2] if longest[2].startswith(_NETWORK) else None


def _unescaped(point: str) -> str:
    for code in ("\\040", "\\011", "\\012", "\\134"):
        point = point.replace(code, chr(int(code[1:], 8)))
    return point


@contextmanager
def held(digest: str, what: str) -> Iterator[bool]:
    """Hold a kernel's lock, yield True; False after a bounded wait, or, with one warning, where locks do not work."""
    try:
        handle = _wait(digest, what)
    except OSError as error:
        stats.say_once(f"every process compiles for itself, as there is no directory for locks: {error}", key="locks")
        handle = None
    try:
        yield handle is not None
    finally:
        if handle is not None:
            try:
                _release(handle)
            except OSError as error:  # what the lock was for is done
                stats.say_once(f"a lock in {directory()} could not be let go: {reason(error)}", key="unlock")


def _wait(digest: str, what: str) -> Any:
    folder = directory()
    files.make_directory(folder, is_private=True)
    _check_local(folder)
    # The first byte of the digest: 256 files at most, and two kernels that share one merely wait for each other.
    path = folder / f"{digest[:2]}.lock"
    handle = _try(path)
    if handle is None:
        started = time.monotonic()
        with stats.say_if_slow(f"waiting for another process that compiles {what}"):
            while handle is None and time.monotonic() - started < MAX_WAIT_SECONDS:
                time.sleep(_PAUSE_SECONDS)
                handle = _try(path)
        waited = time.monotonic() - started
        stats.count("wait_seconds", waited)
        if handle is None:
            stats.say_once(f"waited {waited:.0f} s for the process that compiles {what}: compiling it here too")
    return handle


@cache
def _check_local(folder: Path) -> None:
    kind = network_file_system(folder)
    if kind:
        raise OSError(f"{folder} is on a network file system ({kind}); name a disk of this node in TMPDIR")


def _try(path: Path) -> Any:
    """Return a handle of the lock, or None while another holds it."""
    try:
        import fcntl
    except ImportError:
        return _try_without_flock(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    _held.add(handle)
    return handle


def _try_without_flock(path: Path) -> Any:
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return None
    return lock


def _release(handle: Any) -> None:
    if not isinstance(handle, int):
        handle.release()
    elif handle in _held:  # else this is a forked child, which has closed its copy
        import fcntl

        _held.discard(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a copy in a process that was forked meanwhile would keep it
        finally:
            os.close(handle)


def reset_after_fork() -> None:
    """Close a forked child's copies of its parent's locks: they would outlive the parent."""
    for handle in tuple(_held):
        os.close(handle)
    _held.clear()
