"""Bundles: many kernels in one read-only file, for machines that must not or cannot compile.

It is an uncompressed zip file with the entries of a cache directory under the same names, and their compilers in
`bundle.json`. Equal kernels make equal bundles, byte for byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
import struct
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from rwkv_jit.kernels import stats
from rwkv_jit.kernels.cache import entry, files
from rwkv_jit.kernels.errors import CacheError, reason

_ABOUT = "bundle.json"
_FORMAT = "rwkv_jit bundle 1"
_MOST_BYTES = 1 << 30
_MOST_BYTES_OF_ABOUT = 1 << 20
_MOST_BYTES_OF_TABLE = 4 << 20  # of names and places: some 30,000 kernels
_END = struct.Struct("<4s8xII2x")  # the last bytes of a zip file without a comment: the size of its table


def pack(entries: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a bundle of entries, by their names."""
    compilers = sorted({entry.unpack(data)[1]["compiler"] for data in entries.values()})
    about = json.dumps({"format": _FORMAT, "compilers": compilers}, indent=1).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [(_ABOUT, about), *sorted(entries.items())]:
            member = zipfile.ZipInfo(name)  # dated 1980, the same on every machine
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, data)
    return made.getvalue()


class Bundle:
    """One bundle as a layer of the cache, with the content that it has when it is opened.

    Those who may write what is `trusted` are trusted with it too. With a `digest` no other content is read.
    """

    origin = "bundle"

    def __init__(self, path: Path, trusted: os.stat_result | None = None, digest: str | None = None):
        self.path = path
        try:
            file = self._open(trusted)
            own = digest and files.sha256_of(file)
            if own != digest:
                raise CacheError(f"{path} is another bundle: expected one of SHA-256 {digest}, it has {own}")
            _check_table(file)
            self._archive = zipfile.ZipFile(file)
            for member in self._archive.infolist():
                _check_member(member)
            about = json.loads(self._archive.read(_ABOUT))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']!r}, not {_FORMAT!r}")
            self._compilers = [str(name) for name in about["compilers"]]
        except CacheError:
            raise
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {reason(error)}") from error
        except Exception as error:  # zipfile raises a dozen kinds on damaged files
            raise CacheError(f"{path} is not an intact rwkv_jit bundle: {str(error).strip(chr(34))}") from error

    def _open(self, trusted: os.stat_result | None) -> io.BufferedReader:
        names = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # as far as the system has them
        flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in names)
        if self.path.is_symlink():
            raise files.UntrustedError(f"{self.path} is a symbolic link; name its target instead")
        files.check_directory(self.path.parent, sticky_is_safe=True, trusted=trusted)
        handle = os.open(self.path, flags)
        try:
            status = os.fstat(handle)
            files.check(self.path, status, trusted=trusted)
            if not stat.S_ISREG(status.st_mode):
                raise files.UntrustedError(f"{self.path} is not a file")
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise

    def names(self) -> list[str]:
        """Return the names of its entries."""
        return [name for name in self._archive.namelist() if name != _ABOUT]

    def read(self, name: str) -> bytes | None:
        """Return an entry, or None."""
        try:
            return self._archive.read(name)
        except KeyError:
            return None
        except Exception as error:  # zipfile raises a dozen kinds on damaged files
            stats.say_once(f"cache entry {self.path}/{name} is damaged ({error})", key=f"{self.path}/{name}")
            return None

    def compilers(self) -> list[str]:
        """Return the identities of the compilers whose kernels it holds."""
        return self._compilers

    def entries(self) -> dict[str, bytes]:
        """Return all entries, each checked. Raises CacheError where one of them is not intact."""
        entries = {}
        for name in self.names():
            data = self.read(name)
            try:
                if data is None:
                    raise ValueError("damaged")
                entry.check_name(name, entry.unpack(data)[1])
            except ValueError as error:
                raise CacheError(f"{self.path} is not an intact rwkv_jit bundle: {name} is {error}") from error
            entries[name] = data
        return entries


def digest(path: Path) -> str:
    """Return the SHA-256 of a bundle, by which others can tell it from all others."""
    with path.open("rb") as file:
        return files.sha256_of(file)


def _check_table(file: BinaryIO) -> None:
    """Check how long a zip file and its table of members are, before zipfile reads all of that table."""
    size = file.seek(0, os.SEEK_END)
    if size > _MOST_BYTES:
        raise ValueError(f"its {size} bytes are more than the {_MOST_BYTES} that are read")
    before = 20  # where a file with too many members for this format says so
    file.seek(max(0, size - before - _END.size))
    tail = file.read()
    signature, table, _ = _END.unpack(tail[-_END.size :].rjust(_END.size, b"\0"))
    if signature != b"PK\5\6":
        raise ValueError("it does not end as one")
    if table > _MOST_BYTES_OF_TABLE or tail.startswith(b"PK\6\7"):
        raise ValueError("it has more kernels than are read")
    file.seek(0)


def _check_member(member: zipfile.ZipInfo) -> None:
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"{member.filename} is compressed")
    most = _MOST_BYTES_OF_ABOUT if member.filename == _ABOUT else files.MOST_BYTES
    if member.file_size > most:
        raise ValueError(f"{member.filename} has {member.file_size} bytes, more than the {most} that are read")


def write(path: Path, entries: Iterable[tuple[str, bytes]]) -> int:
    """Write a bundle, all at once, and return its size; raises CacheError where it cannot be written."""
    data = pack(dict(entries))
    try:
        _check_table(io.BytesIO(data))
    except ValueError as error:
        raise CacheError(f"{path} is not written: {error}; choose fewer kernels") from error
    try:
        _sweep(path.parent)
        files.write(path, data, mode=0o644)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {reason(error)}") from error
    return len(data)


def _sweep(folder: Path) -> None:
    """Delete what killed processes left beside a bundle that they were writing."""
    now = time.time()
    for path in files.find(folder, ".rwkvjit-*.tmp"):
        with contextlib.suppress(OSError):
            status, is_ours = path.lstat(), re.fullmatch(files.TEMPORARY, path.name)
            if is_ours and stat.S_ISREG(status.st_mode) and files.is_stale(status, now):
                path.unlink()
