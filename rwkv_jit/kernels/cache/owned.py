"""What this library wrote into a cache's directory, and may delete there: files of its names, in a marked root.

A user may name any directory as the cache, one with other files too. The marker says that it was created for the cache,
was empty, or held only what the cache writes. Only there is anything deleted, and only files of the names below in the
root itself or in folders of such names; nothing behind a symbolic link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rwkv_jit.kernels.cache import files

MARKER = ".rwkvjit-cache"
_TEXT = b"""\
rwkv_jit keeps compiled kernels in this directory, and deletes here what it wrote itself: old kernels above the limit,
and all of it by `rwkv-jit cache clear`. Without this file it deletes nothing here.
"""

_ARCH = r"(?:sm|compute)_[0-9]+[a-z]?"
_SOURCES = rf"(?:sources|failed)/[^/]+-{_ARCH}-[0-9a-f]{{16}}"
ENTRY = re.compile(rf"{_ARCH}/[^/]+-[0-9a-f]{{40}}\.cubin")
BUNDLE = re.compile(r"bundles/[0-9a-f]{40}\.bundle")
NOTE = re.compile(r"nvrtc-[0-9a-f]{16}\.json")
SOURCE = re.compile(rf"{_SOURCES}/(?:compile\.py|[^/]+\.(?:cu|cuh|h|hpp|inl|inc))")
_SOURCE_FOLDER = re.compile(rf"sources|failed|{_SOURCES}")
TRACE = re.compile(rf"(?:(?:{_ARCH}|bundles|claims)/)?{files.TEMPORARY}|claims/[0-9a-f]{{40}}\.claim")  # of work
_OTHERS = re.compile(rf"{re.escape(MARKER)}|tuned\.json|(?:(?:{_ARCH}|bundles)/)?\.[a-z0-9_]{{8}}\.tmp")  # stay
_FOLDER = re.compile(rf"{_ARCH}|bundles|claims|{_SOURCE_FOLDER.pattern}")
_OWN = (ENTRY, BUNDLE, NOTE, SOURCE, TRACE, _OTHERS)


def find(root: Path, *kinds: re.Pattern[str]) -> list[str]:
    """Return the names of the files of some kinds, sorted."""
    return sorted(name for name, what in _look(root) if what == "file" and _is(name, kinds))


def named(root: Path, kind: re.Pattern[str]) -> list[str]:
    """Return the names of one kind, sorted, whatever has them: what is no file is a fault to show."""
    return sorted(name for name, _ in _look(root) if _is(name, (kind,)))


def folders_of_sources(root: Path) -> list[str]:
    """Return the folders of sources, each after those that lie in it."""
    return [name for name, what in _look(root) if what == "folder" and _SOURCE_FOLDER.fullmatch(name)]


def links(root: Path) -> list[str]:
    """Return the symbolic links that lie where a folder belongs."""
    return [name for name, what in _look(root) if what == "link" and _FOLDER.fullmatch(name)]


def adopt(root: Path) -> bool:
    """Mark a directory that is empty or all ours; return whether it is marked; OSError if it is not ours to write."""
    if files.read(root, MARKER) is not None:
        return True
    if not all(what == "folder" or (what == "file" and _is(name, _OWN)) for name, what in _look(root)):
        return False
    files.write(root / MARKER, _TEXT)
    return True


def _is(name: str, kinds: tuple[re.Pattern[str], ...]) -> bool:
    return any(kind.fullmatch(name) for kind in kinds)


def _look(root: Path, folder: str = "") -> Iterator[tuple[str, str]]:
    """Yield what lies in a directory and in folders of our names, these last: a name and its kind."""
    try:
        with os.scandir(root / folder) as scanned:
            entries = list(scanned)
    except OSError:
        yield folder.rstrip("/"), "other"
        return
    for entry in entries:
        name = folder + entry.name
        if entry.is_symlink():
            yield name, "link"
        elif entry.is_file():
            yield name, "file"
        elif entry.is_dir() and _FOLDER.fullmatch(name):
            yield from _look(root, f"{name}/")
            yield name, "folder"
        else:
            yield name, "other"
