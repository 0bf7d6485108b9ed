"""The cache of compiled kernels: the user's directory, imported bundles, RWKVJIT_CACHE_PATH, and what pip installed.

In this order. What does not read back as written, or may be someone else's, is a miss with one warning; the next
compile replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from rwkv_jit.kernels import env, stats
from rwkv_jit.kernels.cache import bundle, claim, entry, files, installed, lock, owned
from rwkv_jit.kernels.cache.bundle import Bundle
from rwkv_jit.kernels.cache.entry import Compiled, Resources, file_name, key, pack
from rwkv_jit.kernels.errors import CacheError, reason

__all__ = ["Compiled", "Resources", "file_name", "key", "pack"]
_BUNDLES = "bundles"  # imported ones; never evicted
_NOTE_BYTES = 1 << 20  # at most
_used: set[Path] = set()  # files that serve this process


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
        except OSError as error:
            text = f"cache entry {self.path / name} cannot be read: {reason(error)}"
            _say(error, self.path, "kernels are not read from the cache", text)
            return None
        if data is not None and self.is_users:
            _used.add(self.path / name)
        return data

    def names(self) -> list[str]:
        """Return the names of all entries, whether intact or not."""
        return owned.named(self.path, owned.ENTRY)

    def compilers(self) -> list[str]:
        """Return who compiled a directory's kernels that somebody filled for others; for the user's, NVRTC says it."""
        if self.is_users:
            return []
        notes = [read_note(self.path, path.name) for path in files.find(self.path, "nvrtc-*.json")]
        return [note["identity"] for note in notes if "identity" in note]


Layer = Directory | Bundle  # a place to read entries from


def layers() -> tuple[Layer, ...]:
    """Return the places to read from, in order."""
    return tuple(_in_turn())


def _in_turn() -> Iterator[Layer]:
    """Yield the places to read from; what pip installed is looked for only where all others lack the kernel."""
    if env.cache_is_on():
        yield from _layers(env.cache_dir(), tuple(env.cache_path()))
        yield from _installed()


@cache
def _layers(users: Path, more: tuple[Path, ...]) -> tuple[Layer, ...]:
    layers: list[Layer] = [Directory(users, is_users=True)]
    for path in (*_imported(users), *more):
        try:
            layers.append(_opened(path))
        except CacheError as error:
            stats.say_once(f"kernels are not read from a part of the cache: {error}")
    return tuple(layers)


def _opened(path: Path) -> Layer:
    return Directory(path, is_users=False) if os.path.isdir(path) else Bundle(path)


@cache
def _installed() -> tuple[Layer, ...]:
    bundles = []
    for distribution in installed.distributions():
        try:
            bundles.append(installed.bundle(distribution))
        except CacheError as error:
            stats.say_once(f"kernels of {distribution.name} are not read: {error}")
    return tuple(bundles)


def unreadable() -> dict[Path, str]:
    """Return the bundles and directories that should be read from but cannot be, and why."""
    openings: list[tuple[Path, Callable[[], Layer]]] = [
        *((wheel.path, partial(installed.bundle, wheel)) for wheel in installed.distributions()),
        *((path, partial(_opened, path)) for path in (*_imported(env.cache_dir()), *env.cache_path())),
    ]
    faults = {}
    for path, opening in openings:
        try:
            if isinstance(opening(), Directory):
                files.check_directory(path)
                os.listdir(path)
        except (CacheError, OSError) as error:
            faults[path] = str(error)
    return faults


def _imported(users: Path) -> list[Path]:
    """Return the bundles of the user's directory, if that is one to trust."""
    try:
        files.check_directory(users)
    except OSError:
        return []  # reading the first entry says why
    folder = users / _BUNDLES
    return files.find(folder, "*.bundle") if os.path.isdir(folder) else []  # matching costs more than a kernel's read


def compilers() -> Iterator[str]:
    """Yield the compilers that bundles and shared directories announce, each once."""
    seen: set[str] = set()
    for name in (name for layer in _in_turn() for name in layer.compilers()):
        if name not in seen:
            seen.add(name)
            yield name


def get(name: str, arch: str, digest: str) -> tuple[Compiled, str] | None:
    """Return a stored kernel and the origin of the layer that has it, or None."""
    file = entry.file_name(name, arch, digest)
    for layer in _in_turn():
        data = layer.read(file)
        if data is None:
            continue
        try:
            compiled, manifest = entry.unpack(data, digest)
            entry.check_name(file, manifest)
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
    try:
        files.make_folder(_root() / path.parent.name)
        files.publish(path, data)
    except OSError as error:
        text = f"kernels are not kept: {path.parent} cannot be written ({reason(error)})"
        _say(error, env.cache_dir(), "kernels are not kept in the cache", text)
        return
    _used.add(path)
    stats.count("bytes_written", len(data))
    most = env.cache_max_bytes()
    try:
        prune(most)
    except CacheError as error:
        stats.say_once(f"the cache is larger than {most} bytes: {error}", key=str(error))


@contextlib.contextmanager
def one_at_a_time(digest: str, what: str) -> Iterator[None]:
    """Let one process of the node, or of all that share the cache, do the work inside; others find its result."""
    if not (env.cache_is_on() and _can_be_written()):
        yield
        return
    with lock.held(digest, what) as is_alone, claim.held(env.cache_dir(), digest, what, is_alone):
        yield


def _can_be_written() -> bool:
    try:
        return os.access(_root(), os.W_OK)
    except OSError:
        return False  # publishing says why


def _root() -> Path:
    """Return the user's directory for a write, marked as ours; OSError if it cannot be, or is not to be trusted."""
    root = env.cache_dir()
    files.make_directory(root)
    with contextlib.suppress(OSError):
        owned.adopt(root)  # else writing says what is wrong
    return root


def _say(error: OSError, root: Path, untrusted: str, otherwise: str) -> None:
    """Warn once of a directory that is not to be trusted, and once of every other trouble with it."""
    if isinstance(error, files.UntrustedError):
        stats.say_once(f"{untrusted}: {error}", key=str(error).split(";")[0])
    else:
        stats.say_once(otherwise, key=f"{root}: {reason(error)}")


def source_folder(kind: str) -> Path:
    """Return a folder for sources in the user's directory; raises OSError where none can be written to or trusted."""
    if not env.cache_is_on():
        raise FileNotFoundError("the cache is off")
    folder = _root() / kind
    files.make_folder(folder)
    return folder


# ---- notes on compilers ------------------------------------------------------------------------------------------


def read_note(root: Path, name: str) -> dict[str, Any]:
    """Return what a note says, or an empty one where there is none to trust or to understand."""
    try:
        data = files.read(root, name, most=_NOTE_BYTES)
    except files.UntrustedError:
        return {}  # reading an entry says what is wrong
    except OSError as error:
        stats.say_once(f"note {root / name} cannot be read: {reason(error)}", key=f"{root}: {error.strerror}")
        return {}
    try:
        note = {} if data is None else json.loads(data)
        _check_note(note)
    except (ValueError, RecursionError) as error:
        stats.say_once(f"note {root / name} is damaged ({error}): not used", key=str(root / name))
        return {}
    return dict(note)


def _check_note(note: Any) -> None:
    """Check that a note is an object with a compiler's name and, if any, its libraries' sizes and times."""
    if not isinstance(note, dict):
        raise ValueError("no object")
    name, libraries = note.get("identity", ""), note.get("libraries", {})
    if not isinstance(name, str) or not name.isprintable():
        raise ValueError("identity is no name")
    if not isinstance(libraries, dict):
        raise ValueError("libraries are no object")
    for path, stamp in libraries.items():
        if "\0" in path or not os.fsencode(path):
            raise ValueError("a library is no path")
        if not isinstance(stamp, list) or [type(number) for number in stamp] != [int, int]:
            raise ValueError("a library has no size and time")


def write_note(name: str, note: dict[str, Any]) -> None:
    """Write a note into the user's directory if that is possible; without a note the compiler says it."""
    if env.cache_is_on():
        with contextlib.suppress(OSError):
            files.publish(_root() / name, json.dumps(note, sort_keys=True).encode())


# ---- commands ----------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """An entry as the commands show it: where it is, and what is in it or what is wrong with it."""

    layer: Layer
    name: str
    bytes: int
    manifest: dict[str, Any]
    fault: str

    @property
    def path(self) -> Path:
        """Return its file, or where it would lie in a bundle."""
        return self.layer.path / self.name

    @property
    def state(self) -> str:
        """Return what is wrong with it, or "ok"."""
        return self.fault or "ok"


def stored() -> Iterator[Stored]:
    """Yield every entry of every layer, read and checked."""
    for layer in layers():
        for name in layer.names():
            manifest: dict[str, Any] = {}
            try:
                data = _bytes(layer, name)
                _, manifest = entry.unpack(data)
                entry.check_name(name, manifest)
            except (OSError, ValueError) as error:
                yield Stored(layer, name, _size(layer.path / name), manifest, str(error))
            else:
                yield Stored(layer, name, len(data), manifest, "")


def _bytes(layer: Layer, name: str) -> bytes:
    """Return what is stored, without counting that as a use; raises OSError or ValueError where it cannot be read."""
    data = files.read(layer.path, name) if isinstance(layer, Directory) else layer.read(name)
    if data is None:
        raise ValueError("unreadable")
    return data


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def entries() -> list[Path]:
    """Return the files of the kernels in the user's directory."""
    root = env.cache_dir()
    return [root / name for name in owned.find(root, owned.ENTRY)]


def size() -> int:
    """Return the bytes of the kernels in the user's directory."""
    return sum(map(_size, entries()))


def _refusal(root: Path) -> str:
    """Return why nothing may be deleted in a directory, or an empty string."""
    try:
        if owned.adopt(root):
            return ""
    except OSError as error:
        return f"nothing in {root} is deleted: {reason(error)}"
    return (
        f"{root} holds files that rwkv_jit did not write, so it deletes nothing there; name a directory for the cache "
        f"alone in RWKVJIT_CACHE_DIR, or let it delete its own files here: touch '{root / owned.MARKER}'"
    )


def prune(max_bytes: int) -> int:
    """Delete the least recently used kernels of the user's directory until it is small enough; return how many.

    Kernels that serve this process stay, and so do bundles. CacheError if nothing may be deleted there.
    """
    root, now = env.cache_dir(), time.time()
    if not os.path.lexists(root):
        return 0  # another process may make it from now on, and marks it then
    refusal = _refusal(root)
    if refusal:
        if size() > max_bytes:
            raise CacheError(refusal)
        return 0
    _sweep(root, now)
    aged = []
    for name in owned.find(root, owned.ENTRY):
        with contextlib.suppress(OSError):
            status = (root / name).lstat()
            # What is too large is never read. A stamp of the future says nothing of when a kernel was used.
            is_useless = status.st_size > files.MOST_BYTES or status.st_mtime > now + 3600
            aged.append((0.0 if is_useless else status.st_mtime, name, status.st_size))
    total, evicted = sum(file_size for _, _, file_size in aged), 0
    for _, name, file_size in sorted(aged):
        if total <= max_bytes:
            break
        if root / name in _used:
            continue
        try:
            files.delete(root, name)
            evicted += 1
        except FileNotFoundError:
            pass  # another process has deleted it
        except OSError:
            continue
        total -= file_size
    stats.count("evictions", evicted)
    return evicted


def _sweep(root: Path, now: float) -> None:
    """Delete what killed processes left of their work."""
    for name in owned.find(root, owned.TRACE):
        with contextlib.suppress(OSError):
            if files.is_stale((root / name).lstat(), now):
                files.delete(root, name)


def delete_damaged() -> tuple[int, int]:
    """Delete readable entries and bundles that are not intact; return how many of each. Untrusted ones stay."""
    root, damaged = env.cache_dir(), []
    for kernel in stored():
        if kernel.layer.origin == "disk" and kernel.fault:
            try:
                is_there = files.read(kernel.layer.path, kernel.name) is not None
            except OSError as error:
                is_there = error.errno == errno.EFBIG
            if is_there:
                damaged.append(kernel.name)
    bundles = [name for name in owned.find(root, owned.BUNDLE) if _is_damaged(root / name)]
    _delete(root, [*damaged, *bundles])
    return len(damaged), len(bundles)


def _is_damaged(path: Path) -> bool:
    try:
        Bundle(path)
    except CacheError as error:  # its name is the start of its digest
        return not isinstance(error.__cause__, OSError) and not bundle.digest(path).startswith(path.stem)
    return False


def clear() -> int:
    """Delete what this library wrote into the user's directory, but choices; return how many kernels.

    CacheError if one of them cannot be deleted, or it is not a directory to delete in.
    """
    root = env.cache_dir()
    kernels = owned.find(root, owned.ENTRY)
    bundles = owned.find(root, owned.BUNDLE)
    paths = {root / name for name in bundles}
    count = len(kernels) + sum(len(layer.names()) for layer in layers() if layer.path in paths)
    try:
        _delete(root, [*kernels, *bundles, *owned.find(root, owned.NOTE, owned.SOURCE)])
        if not _refusal(root):
            _sweep(root, time.time())
            for name in owned.folders_of_sources(root):
                with contextlib.suppress(OSError):  # it holds something else
                    files.delete(root, name, os.rmdir)
            for name in owned.links(root):
                raise CacheError(f"{root / name} is a symbolic link: its target is not deleted")
    finally:
        forget()
    return count


def _delete(root: Path, names: list[str]) -> None:
    """Delete files that this library wrote; raises like `clear`."""
    refusal = _refusal(root) if names else ""
    if refusal:
        raise CacheError(refusal)
    for name in names:
        try:
            files.delete(root, name)
        except FileNotFoundError:
            pass  # another process has deleted it
        except OSError as error:
            raise CacheError(f"{root / name} cannot be deleted: {reason(error)}") from error


def export(path: Path, chosen: Iterable[Stored]) -> tuple[int, int]:
    """Write entries that are still there into a bundle; return how many, and its bytes; CacheError if it cannot."""
    entries: dict[str, bytes] = {}
    gone = 0
    for kernel in chosen:
        if not kernel.fault and kernel.name not in entries:
            try:
                data = _bytes(kernel.layer, kernel.name)
                entry.unpack(data)
            except (OSError, ValueError):
                gone += 1
            else:
                entries[kernel.name] = data
    if gone:
        stats.say_once(f"{gone} kernels were deleted while they were exported and are not in {path}")
    if not entries:
        raise CacheError(f"{path} is not written: there is no intact kernel to export; `rwkv-jit build` compiles some")
    return len(entries), bundle.write(path, entries.items())


def import_bundle(path: Path, digest: str | None = None) -> int:
    """Copy a bundle into the user's directory once all of it has been checked; return how many kernels it holds.

    With a `digest`, its SHA-256, no other one is read. CacheError if it is not intact, or the directory not writable.
    """
    entries = Bundle(path, digest=digest).entries()
    if not env.cache_is_on():
        raise CacheError("RWKVJIT_CACHE=0 turns the cache off: unset it to import a bundle")
    data = bundle.pack(entries)
    target = env.cache_dir() / _BUNDLES / f"{sha256(data).hexdigest()[:40]}.bundle"
    try:
        files.make_folder(_root() / _BUNDLES)
        files.publish(target, data)
    except OSError as error:
        raise CacheError(f"{target.parent} cannot be written: {reason(error)}") from error
    forget()
    return len(entries)


def forget() -> None:
    """Look at directories and bundles anew."""
    _layers.cache_clear()
    _installed.cache_clear()
    _used.clear()


def reset_after_fork() -> None:
    """Let go of what a forked child shares with its parent: positions in open bundles, and locks."""
    forget()
    lock.reset_after_fork()
