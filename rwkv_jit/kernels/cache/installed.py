"""Bundles that pip installed: the wheels of kernels that need no compile.

Such a distribution is data: its entry point of the group `rwkv_jit.kernels` names the folder of the bundle. Nothing of
it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rwkv_jit.kernels import stats
from rwkv_jit.kernels.cache.bundle import Bundle

GROUP = "rwkv_jit.kernels"
FILE = "kernels.bundle"
_left_aside = False


class Distribution(NamedTuple):
    """A distribution of kernels: its name, the rwkv_jit that it is for, and its bundle."""

    name: str
    version: str
    path: Path


def distributions() -> list[Distribution]:
    """Return those of this environment, sorted by name. Finding them takes milliseconds."""
    if _left_aside:
        return []
    try:
        points = metadata.entry_points(group=GROUP)
        return sorted({wheel for point in points if (wheel := _distribution(point)) is not None})
    except Exception as error:  # whatever is wrong with a distribution that has nothing to do with this one
        stats.say_once(f"kernels that pip installed are not read: {type(error).__name__}: {error}", key=GROUP)
        return []


@contextmanager
def left_aside() -> Iterator[None]:
    """Find none meanwhile: for work that must compile."""
    global _left_aside
    before, _left_aside = _left_aside, True
    try:
        yield
    finally:
        _left_aside = before


def _distribution(point: metadata.EntryPoint) -> Distribution | None:
    if point.dist is None or not point.value.isidentifier():
        return None
    path = Path(str(point.dist.locate_file(point.value))) / FILE
    return Distribution(point.dist.metadata["Name"], point.dist.version, path)


def bundle(distribution: Distribution) -> Bundle:
    """Open the bundle of a distribution, which is trusted as this library; CacheError if it is not intact."""
    return Bundle(distribution.path, trusted=os.stat(Path(__file__).parent))
