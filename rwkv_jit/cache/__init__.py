"""The cache of compiled kernels: the user's directory, bundles imported there, and what RWKVJIT_CACHE_PATH names.

Layers are asked in this order. Whatever does not read back exactly as it was written, or may have been written by
someone else, is a miss with one warning; the next compile replaces it in the user's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rwkv_jit import env, stats
from rwkv_jit.cache import bundle, entry, files, lock
from rwkv_jit.cache.bundle import Bundle
from rwkv_jit.cache.entry import Compiled, Resources, file_name, key, pack
from rwkv_jit.errors import CacheError

__all__ = ["Compiled", "Resources", "file_name", "key", "pack"]
_BUNDLES = "bundles"  # imported ones; never evicted
_NOTES = "nvrtc-*.json"  # who compiles in this environment
_SOURCES = ("sources", "failed")  # what RWKVJIT_KEEP_SOURCE keeps, and what did not compile
_used: set[Path] = set()  # files that serve this process


class Layer(Protocol):
    """A place to read entries from."""

    path: Path
    origin: str

    def read(self, name: str) -> bytes | None:
        """Return an entry's bytes, or None."""

    def names(self) -> list[str]:
        """Return the names of all entries."""

    def compilers(self) -> list[str]:
        """Return identities of compilers whose kernels may be served without having that compiler."""


class Directory:
    """The user's directory, or another one that is only read."""

    def __init__(self, path: Path, is_users: bool):
        self.path = path
        self.is_users = is_users
        self.origin = "disk" if is_users else "shared"

    def read(self, name: str) -> bytes | None:
        """Return an entry's bytes; it counts as used now."""
        try:
            data = files.read(self.path, name, used=time.time() if self.is_users else None)
        except files.UntrustedError as error:
            stats.say_once(f"kernels are not read from the cache: {error}", key=str(error).split(";")[0])
            return None
        except OSError as error:
            reason = error.strerror or error
            stats.say_once(f"cache entry {self.path / name} cannot be read: {reason}", key=f"{self.path}: {reason}")
            return None
        if data is not None and self.is_users:
            _used.add(self.path / name)
        return data

    def names(self) -> list[str]:
        """Return the names of all entries, whether intact or not."""
        return [path.relative_to(self.path).as_posix() for path in files.find(self.path, "*/*.cubin")]

    def compilers(self) -> list[str]:
        """Return who made the kernels of a directory that somebody filled for others; the user's own asks NVRTC."""
        if self.is_users:
            return []
        notes = [read_note(self.path, path.name) for path in files.find(self.path, _NOTES)]
        return [str(note["identity"]) for note in notes if "identity" in note]


def layers() -> tuple[Layer, ...]:
    """Return the places to read from, in order."""
    if not env.cache_is_on():
        return ()
    return _layers(env.cache_dir(), tuple(env.cache_path()))


@cache
def _layers(users: Path, more: tuple[Path, ...]) -> tuple[Layer, ...]:
    found: list[Layer] = [Directory(users, is_users=True)]
    for path in (*_imported(users), *more):
        if os.path.isdir(path):
            found.append(Directory(path, is_users=False))
            continue
        try:
            found.append(Bundle(path))
        except CacheError as error:
            stats.say_once(f"kernels are not read from a part of the cache: {error}")
    return tuple(found)


def unreadable() -> dict[Path, str]:
    """Return the bundles and directories that should be read from but cannot be, and why."""
    found = {}
    for path in (*_imported(env.cache_dir()), *env.cache_path()):
        try:
            if os.path.isdir(path):
                files.check_directory(path)
                os.listdir(path)
            else:
                Bundle(path)
        except (CacheError, OSError) as error:
            found[path] = str(error)
    return found


def _imported(users: Path) -> list[Path]:
    """Return the bundles of the user's directory, if that is one to trust."""
    try:
        files.check_directory(users)
    except OSError:
        return []  # reading the first entry says why
    folder = users / _BUNDLES
    return files.find(folder, "*.bundle") if os.path.isdir(folder) else []  # matching costs more than a kernel's read


def compilers() -> list[str]:
    """Return the compilers that bundles and shared directories announce."""
    return list(dict.fromkeys(name for layer in layers() for name in layer.compilers()))


def get(name: str, arch: str, digest: str) -> tuple[Compiled, str] | None:
    """Return a stored kernel and the origin of the layer that has it, or None."""
    file = entry.file_name(name, arch, digest)
    for layer in layers():
        data = layer.read(file)
        if data is None:
            continue
        try:
            compiled, _ = entry.unpack(data, digest)
        except ValueError as error:
            path = layer.path / file
            stats.say_once(f"cache entry {path} is {error}: not used", key=str(path))
            continue
        stats.count("bytes_read", len(data))
        return compiled, layer.origin
    return None


def put(name: str, data: bytes) -> None:
    """Publish an entry in the user's directory. One that cannot be written costs one warning."""
    if not env.cache_is_on():
        return
    path = env.cache_dir() / name
    if _publish(path, data):
        _used.add(path)
        stats.count("bytes_written", len(data))
        prune(env.cache_max_bytes())


def one_at_a_time(digest: str, what: str) -> AbstractContextManager[None]:
    """Let one process of the node do the work inside; those that waited find its result in the cache.

    Where nothing can be kept there is nothing to wait for.
    """
    return lock.held(digest, what) if env.cache_is_on() and _can_be_written() else contextlib.nullcontext()


def _can_be_written() -> bool:
    try:
        files.make_directory(env.cache_dir())
    except OSError:
        return False  # publishing says why
    return os.access(env.cache_dir(), os.W_OK)


def _publish(path: Path, data: bytes) -> bool:
    root = env.cache_dir()
    try:
        files.make_directory(root)
        files.make_directory(path.parent)
        files.write(path, data)
    except files.UntrustedError as error:
        stats.say_once(f"kernels are not kept in the cache: {error}", key=str(error).split(";")[0])
    except OSError as error:
        reason = error.strerror or error
        stats.say_once(f"kernels are not kept: {path.parent} cannot be written ({reason})", key=f"{root}: {reason}")
    else:
        return True
    return False


def source_folder(kind: str) -> Path:
    """Return a folder for sources in the user's directory.

    Raises
    ------
    OSError
        There is none to write to, or not to be trusted.
    """
    if not env.cache_is_on():
        raise FileNotFoundError("the cache is off")
    files.make_directory(env.cache_dir())
    files.make_directory(env.cache_dir() / kind)
    return env.cache_dir() / kind


# ---- notes on compilers ------------------------------------------------------------------------------------------


def read_note(root: Path, name: str) -> dict[str, Any]:
    """Return a small JSON object that lies beside the kernels, or an empty one where there is none to trust."""
    try:
        note = json.loads(files.read(root, name) or b"{}")
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(name: str, note: dict[str, Any]) -> None:
    """Write a note into the user's directory if that is possible; without a note the compiler is asked."""
    if env.cache_is_on():
        with contextlib.suppress(OSError):
            files.make_directory(env.cache_dir())
            files.write(env.cache_dir() / name, json.dumps(note, sort_keys=True).encode())


# ---- commands ----------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """An entry as the commands show it: where it is, and what is in it or what is wrong with it."""

    layer: Layer
    name: str
    bytes: int
    manifest: dict[str, Any]
    fault: str


def stored() -> Iterator[Stored]:
    """Yield every entry of every layer, read and checked."""
    for layer in layers():
        for name in layer.names():
            yield _look(layer, name)


def _bytes(layer: Layer, name: str) -> bytes:
    """Return what is stored, without counting that as a use.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or is not to be trusted.
    """
    data = files.read(layer.path, name) if isinstance(layer, Directory) else layer.read(name)
    if data is None:
        raise ValueError("unreadable")
    return data


def _look(layer: Layer, name: str) -> Stored:
    manifest: dict[str, Any] = {}
    try:
        data = _bytes(layer, name)
        _, manifest = entry.unpack(data)
        entry.check_name(name, manifest)
    except (OSError, ValueError) as error:
        return Stored(layer, name, _size(layer.path / name), manifest, str(error))
    return Stored(layer, name, len(data), manifest, "")


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def entries() -> list[Path]:
    """Return the files of the kernels in the user's directory."""
    root = env.cache_dir()
    return [root / name for name in Directory(root, is_users=True).names()]


def size() -> int:
    """Return the bytes of the kernels in the user's directory."""
    return sum(map(_size, entries()))


def prune(max_bytes: int) -> int:
    """Delete the least recently used kernels of the user's directory until it is small enough; return how many.

    Kernels that serve this process stay, and so do bundles. A reader that has opened a file keeps what it reads.
    """
    now = time.time()
    for path in files.abandoned(env.cache_dir(), before=now - 3600):
        with contextlib.suppress(OSError):
            path.unlink()
    aged = []
    for path in entries():
        with contextlib.suppress(OSError):
            status = path.lstat()
            aged.append((status.st_mtime, path, status.st_size))
    total, evicted = sum(file_size for _, _, file_size in aged), 0
    for _, path, file_size in sorted(aged):
        if total <= max_bytes:
            break
        if path in _used:
            continue
        try:
            path.unlink()
            evicted += 1
        except FileNotFoundError:
            pass  # another process has deleted it
        except OSError:
            continue
        total -= file_size
    stats.count("evictions", evicted)
    return evicted


def clear() -> int:
    """Delete kernels, imported bundles, notes and sources of the user's directory; return how many kernels there were.

    Raises
    ------
    CacheError
        One of them cannot be deleted.
    """
    root = env.cache_dir()
    found = entries()
    bundles = files.find(root / _BUNDLES, "*.bundle")
    count = len(found) + sum(len(layer.names()) for layer in layers() if layer.path in bundles)
    try:
        for path in (*found, *bundles, *files.find(root, _NOTES)):
            path.unlink(missing_ok=True)
        for folder in _SOURCES:
            if (root / folder).is_dir():
                shutil.rmtree(root / folder)
    except OSError as error:
        raise CacheError(f"{error.filename or root} cannot be deleted: {error.strerror or error}") from error
    finally:
        forget()
    return count


def export(path: Path, chosen: Iterable[Stored]) -> tuple[int, int]:
    """Write entries into a bundle; return how many and its bytes.

    Raises
    ------
    CacheError
        There is none, or the file cannot be written.
    """
    found: dict[str, bytes] = {}
    for each in chosen:
        if not each.fault and each.name not in found:
            found[each.name] = _bytes(each.layer, each.name)
    if not found:
        raise CacheError(f"{path} is not written: there is no intact kernel to export; `rwkv-jit build` compiles some")
    return len(found), bundle.write(path, found.items())


def import_bundle(path: Path) -> int:
    """Copy a bundle into the user's directory once all of it has been checked; return how many kernels it holds.

    Raises
    ------
    CacheError
        It is not an intact bundle, or the directory cannot be written.
    """
    found = Bundle(path).entries()
    if not env.cache_is_on():
        raise CacheError("RWKVJIT_CACHE=0 turns the cache off: unset it to import a bundle")
    data = bundle.pack(found)
    target = env.cache_dir() / _BUNDLES / f"{sha256(data).hexdigest()[:40]}.bundle"
    try:
        files.make_directory(env.cache_dir())
        files.make_directory(target.parent)
        files.write(target, data)
    except OSError as error:
        raise CacheError(f"{target.parent} cannot be written: {error.strerror or error}") from error
    forget()
    return len(found)


def forget() -> None:
    """Look at directories and bundles anew."""
    _layers.cache_clear()
    _used.clear()


def reset_after_fork() -> None:
    """Let go of what a forked child shares with its parent: positions in open bundles, and locks."""
    forget()
    lock.reset_after_fork()
