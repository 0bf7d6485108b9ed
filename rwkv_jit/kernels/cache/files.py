"""Files of a directory that may not be ours alone: what is read was checked on the open file, not on its name.

Cubins run on the GPU, so a file counts only if nobody but its user and root can have written it: no symbolic link is
followed, and file, folder and root belong to the user or root and are writable for no one else. On Windows the rights
of the user's profile do this. A group that shares its cache (RWKVJIT_CACHE_SHARED) trusts all who may write there, and
new files are for the group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from rwkv_jit.kernels import env
from rwkv_jit.kernels.errors import brief

MOST_BYTES = 64 << 20  # of one file; the largest kernels have some hundred kilobytes
TEMPORARY = r"\.rwkvjit-[a-z0-9_]{8}\.tmp"  # names of files that are being written
_HAS_MODES = hasattr(os, "getuid") and hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd


def path_of(name: str, given: Any) -> Path:
    """Return an argument that is a path."""
    try:
        return Path(given)
    except TypeError:
        raise TypeError(f"{name}: expected a str or a path, got {brief(given)}") from None


class UntrustedError(OSError):
    """A file or directory that someone else may have written: what is wrong, and how to fix it."""


def check(
    path: str | Path, status: os.stat_result, sticky_is_safe: bool = False, is_private: bool = False,
    trusted: os.stat_result | None = None,
) -> None:  # fmt: skip
    """Check owner and mode of what was opened; UntrustedError if others own it or can write to it.

    Those who may write what is `trusted` count as the user. RWKVJIT_CACHE_SHARED does not reach what `is_private`.
    """
    if not _HAS_MODES:
        return
    is_own = status.st_uid in (os.getuid(), 0) or (trusted is not None and status.st_uid == trusted.st_uid)
    known_writers = trusted.st_mode if trusted is not None and status.st_gid == trusted.st_gid else 0
    # In a directory like /tmp nobody can replace what another user put there.
    others_write = status.st_mode & ~known_writers & 0o022 and not (sticky_is_safe and status.st_mode & stat.S_ISVTX)
    if (is_own and not others_write) or (env.cache_is_shared() and not is_private):
        return
    otherwise = "" if is_private else ", or trust it: RWKVJIT_CACHE_SHARED=1"
    if not is_own:
        raise UntrustedError(f"{path} belongs to user {status.st_uid}; use a directory that you own{otherwise}")
    mode = stat.S_IMODE(status.st_mode)
    raise UntrustedError(f"{path} can be written by others (mode {mode:o}); fix it: chmod go-w '{path}'{otherwise}")


@contextlib.contextmanager
def _opened(parts: Sequence[str]) -> Iterator[tuple[int, os.stat_result]]:
    """Open a path part by part, none of them a link, check each, and yield the handle and the status of the last."""
    handles: list[int] = []
    try:
        for part in parts:
            # A pipe in the place of a file must not block.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            handles.append(os.open(part, flags, dir_fd=handles[-1] if handles else None))
            status = os.fstat(handles[-1])
            check(os.path.join(*parts[: len(handles)]), status)
        yield handles[-1], status
    except (FileNotFoundError, NotADirectoryError, UntrustedError):
        raise
    except OSError as error:
        path = os.path.join(*parts[: len(handles) + 1])
        if os.path.islink(path):
            raise UntrustedError(f"{path} is a symbolic link; name its target instead") from error
        raise
    finally:
        for handle in handles:
            os.close(handle)


def read(root: Path, name: str, used: float | None = None, most: int = MOST_BYTES) -> bytes | None:
    """Return a file of a directory, or None where there is none, or an empty folder, which `publish` replaces.

    `name` is a file, or a folder and a file. `used` is the time to stamp it with, at most once an hour. UntrustedError
    if it is not to be trusted; OSError if it cannot be read, or has more bytes than `most`.
    """
    if not _HAS_MODES:
        return _read_by_name(root / name, used, most)
    try:
        with _opened((str(root), *name.split("/"))) as (handle, status):
            if stat.S_ISDIR(status.st_mode) and not os.listdir(handle):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedError(f"{root / name} is not a file; fix it: rm -r '{root / name}'")
            _check_size(status, most)
            data = os.read(handle, status.st_size + 1)
            if used is not None and is_stale(status, used):
                with contextlib.suppress(OSError):  # of another's file a writer may say "now", and nothing else
                    os.utime(handle, (used, used) if status.st_uid == os.getuid() else None)
            return data
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_size(status: os.stat_result, most: int) -> None:
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"its {status.st_size} bytes are more than the {most} that are read")


def _read_by_name(path: Path, used: float | None, most: int) -> bytes | None:
    try:
        status = path.stat()
        _check_size(status, most)
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if used is not None and is_stale(status, used):
        with contextlib.suppress(OSError):
            os.utime(path, (used, used))
    return data


def delete(root: Path, name: str, how: Callable[..., None] = os.unlink) -> None:
    """Delete a file, or with `os.rmdir` an empty folder; no link and nothing through one.

    FileNotFoundError, or OSError if it is not to be trusted.
    """
    if not _HAS_MODES:
        how(root / name)
        return
    *folders, last = str(root), *name.split("/")
    with _opened(folders) as (folder, _):
        if stat.S_ISLNK(os.lstat(last, dir_fd=folder).st_mode):
            raise UntrustedError(f"{root / name} is a symbolic link; delete it yourself")
        how(last, dir_fd=folder)


def check_directory(
    path: Path, sticky_is_safe: bool = False, is_private: bool = False, trusted: os.stat_result | None = None
) -> None:
    """Check a directory by its name: one that is to be written to, or whose files must not be replaced.

    UntrustedError if it is a link, or others own it or can write to it; OSError if it is no directory.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedError(f"{path} is a symbolic link; name its target instead")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    check(path, status, sticky_is_safe, is_private, trusted)


def make_directory(path: Path, is_private: bool = False) -> None:
    """Create a directory if it is not there, for the user, or the group of a cache not `is_private`, and check it."""
    _make(path, 0o2770 if env.cache_is_shared() and not is_private else 0o700)
    check_directory(path, is_private=is_private)


def check_writable(folder: Path) -> None:
    """Write a small file into a directory, and delete it. Raises OSError where it cannot be written."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"rwkv_jit")


def make_folder(path: Path) -> None:
    """Make a folder of a directory, as `make_directory` does; in a shared one with the modes of that directory."""
    _make(path, stat.S_IMODE(path.parent.stat().st_mode) | 0o700 if env.cache_is_shared() else 0o700)
    check_directory(path)


def _make(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if mode != 0o700:
        with contextlib.suppress(OSError):  # a file system without modes
            path.chmod(mode)  # mkdir would take away what the umask says, and the group's rights with it


def _file_mode(folder: Path) -> int:
    """Return the mode of a new file: who may write to a shared folder may read and replace what is in it."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o666 | 0o600 if env.cache_is_shared() else 0o600


def write(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file, at once or not at all, into a directory there is; raises OSError where it cannot be written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".rwkvjit-", suffix=".tmp")
    with _removed_after_an_error(temporary):
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, _file_mode(path.parent) if mode is None else mode)
        os.replace(temporary, path)


def publish(path: Path, data: bytes) -> None:
    """Write a file into the cache as `write` does, with its OSError; an empty directory of this name is removed."""
    if path.is_dir() and not path.is_symlink():
        try:
            path.rmdir()
        except OSError as error:
            raise OSError(error.errno, f"there is a directory with this name; fix it: rm -r '{path}'") from error
    write(path, data)


def create(path: Path, data: bytes) -> None:
    """Write a file where there is none, which one process does; raises FileExistsError, or OSError where it cannot."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with _removed_after_an_error(path):
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(path, _file_mode(path.parent))


@contextlib.contextmanager
def _removed_after_an_error(path: str | Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of a file from where it stands."""
    digest = sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def find(root: Path, *patterns: str) -> list[Path]:
    """Return the paths of a directory that match, sorted; none where it cannot be looked into or changes meanwhile."""
    try:
        return sorted(path for pattern in patterns for path in root.glob(pattern))
    except OSError:
        return []


def is_stale(status: os.stat_result, now: float) -> bool:
    """Return whether a file is untouched for an hour, or has a stamp of the future, which would keep it for ever."""
    return not -3600 <= now - status.st_mtime <= 3600
