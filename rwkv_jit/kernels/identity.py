"""Which NVRTC this is: what the cache key calls the compiler, known without loading it where an earlier process was."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from rwkv_jit.kernels import cuda, env
from rwkv_jit.kernels.cache import files, read_note, write_note

_assumed: dict[Path, str] = {}  # by cache directory


def version() -> str:
    """Return NVRTC's version, e.g. "12.9"; builds of one version differ, so the cache key uses `identity`."""
    return ".".join(str(part) for part in cuda.nvrtc().getVersion())


@cache
def identity() -> str:
    """Return what tells compiler builds apart: version and build-ids of its libraries."""
    paths = libraries()
    name = " ".join([version(), *(_build_id(path) for path in paths)])
    write_note(_note_name(), {"identity": name, "libraries": {path: _stamp(path) for path in paths}})
    return name


def libraries() -> list[str]:
    """Return the library that compiles and, beside it, its builtins, which it loads at the first compile."""
    main = Path(cuda.nvrtc_library())
    builtins = sorted(str(path) for path in main.parent.glob("libnvrtc-builtins*") if ".alt." not in path.name)
    return [str(main), *builtins]


def assumed_identity() -> str | None:
    """Return the identity noted by an earlier process, without loading NVRTC, while its files are unchanged."""
    if not env.cache_is_on():
        return None
    root = env.cache_dir()
    if root not in _assumed:
        note = noted()
        if not note:
            return None
        _assumed[root] = note["identity"]
    return _assumed[root]


def noted() -> dict[str, Any]:
    """Return the identity and the libraries that an earlier process noted, while these are unchanged; else nothing."""
    note = read_note(env.cache_dir(), _note_name()) if env.cache_is_on() else {}
    libraries = note.get("libraries", {})
    try:
        is_current = bool(libraries) and all(_stamp(path) == stamp for path, stamp in libraries.items())
    except OSError:  # a library is gone
        is_current = False
    return note if is_current and note.get("identity") else {}


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _note_name() -> str:
    environment = sha256(os.path.realpath(sys.prefix).encode()).hexdigest()[:16]
    return f"nvrtc-{environment}.json"


def _build_id(path: str) -> str:
    """Return the GNU build-id of a 64-bit ELF library; where it carries none, the hash of the file."""
    with open(path, "rb") as file:
        for kind, name, text in _elf_notes(file):
            if kind == 3 and name == b"GNU\0":
                return text.hex()
        file.seek(0)
        return files.sha256_of(file)


def _elf_notes(file: BinaryIO) -> Iterator[tuple[int, bytes, bytes]]:
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        return
    table, entry_size, count = struct.unpack_from("<32xQ14xHH", header)
    for index in range(count):
        file.seek(table + index * entry_size)
        kind, offset, size = struct.unpack("<I4xQ16xQ", file.read(40))
        if kind != 4:  # PT_NOTE
            continue
        file.seek(offset)
        notes, at = file.read(size), 0
        while at + 12 <= len(notes):
            name_size, text_size, note_kind = struct.unpack_from("<III", notes, at)
            text_start = at + 12 + (name_size + 3) // 4 * 4
            yield note_kind, notes[at + 12 :][:name_size], notes[text_start:][:text_size]
            at = text_start + (text_size + 3) // 4 * 4
