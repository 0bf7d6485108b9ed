"""Files of a directory that may not be ours alone: what is read was checked on the open file, not on its name.

Cubins run on the GPU, so a file counts only where nobody but its user and root can have written it: no symbolic link
is followed, and file, folder and root must belong to the user or root and be writable for no one else. Windows has no
such modes; there the access rights of the user's profile do this work.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rwkv_jit import env

_HAS_MODES = hasattr(os, "getuid") and hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd


class UntrustedError(OSError):
    """A file or directory that someone else may have written: what is wrong, and how to mend it."""


def check(path: str | Path, status: os.stat_result, sticky_is_safe: bool = False) -> None:
    """Check owner and mode of what was opened.

    Raises
    ------
    UntrustedError
        Others own it or can write to it.
    """
    if not _HAS_MODES:
        return
    is_own = status.st_uid in (os.getuid(), 0)
    # In a directory like /tmp nobody can replace what another user put there.
    others_write = status.st_mode & 0o022 and not (sticky_is_safe and status.st_mode & stat.S_ISVTX)
    if (is_own and not others_write) or env.cache_is_shared():
        return
    if not is_own:
        raise UntrustedError(
            f"{path} belongs to user {status.st_uid}; use a directory of your own, or trust it: RWKVJIT_CACHE_SHARED=1"
        )
    raise UntrustedError(
        f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}); "
        f"mend it: chmod go-w '{path}', or trust it: RWKVJIT_CACHE_SHARED=1"
    )


def read(root: Path, name: str, used: float | None = None) -> bytes | None:
    """Return a file of a directory, or None where there is none.

    `name` is a file, or a folder and a file. With `used`, a time in seconds, the file is stamped as used then, at most
    once an hour.

    Raises
    ------
    UntrustedError
        It is there, but not to be trusted.
    OSError
        It is there and cannot be read.
    """
    if not _HAS_MODES:
        return _read_by_name(root / name, used)
    parts = (str(root), *name.split("/"))
    opened: list[int] = []
    try:
        for part in parts:
            # A pipe in the place of a file must not block.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            opened.append(os.open(part, flags, dir_fd=opened[-1] if opened else None))
            status = os.fstat(opened[-1])
            check(os.path.join(*parts[: len(opened)]), status)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{root / name} is not a file; delete it")
        data = os.read(opened[-1], status.st_size + 1)
        if used is not None and used - status.st_mtime > 3600 and status.st_uid == os.getuid():
            with contextlib.suppress(OSError):
                os.utime(opened[-1], (used, used))
        return data
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedError:
        raise
    except OSError as error:
        path = os.path.join(*parts[: len(opened) + 1])
        if os.path.islink(path):
            raise UntrustedError(f"{path} is a symbolic link; name what it leads to instead") from error
        raise
    finally:
        for handle in opened:
            os.close(handle)


def _read_by_name(path: Path, used: float | None) -> bytes | None:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.suppress(OSError):
        if used is not None and used - path.stat().st_mtime > 3600:
            os.utime(path, (used, used))
    return data


def check_directory(path: Path, sticky_is_safe: bool = False) -> None:
    """Check a directory by its name: one that is to be written to, or whose files must not be replaced.

    Raises
    ------
    UntrustedError
        It is a symbolic link, or others own it or can write to it.
    OSError
        It is not there, or not a directory.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedError(f"{path} is a symbolic link; name what it leads to instead")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    check(path, status, sticky_is_safe)


def make_directory(path: Path) -> None:
    """Make a directory for the user alone if it is not there, and check it; raises like `check_directory`."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Publish a file in a directory that is there: readers see the whole file or none.

    Raises
    ------
    OSError
        It cannot be written; nothing of it is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def find(root: Path, *patterns: str) -> list[Path]:
    """Return the paths of a directory that match, sorted; none where it cannot be looked into or changes meanwhile."""
    try:
        return sorted(path for pattern in patterns for path in root.glob(pattern))
    except OSError:
        return []


def abandoned(root: Path, before: float) -> Iterator[Path]:
    """Yield files that a killed process was writing, last touched before a time."""
    for path in find(root, ".*.tmp", "*/.*.tmp"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < before:
                yield path
