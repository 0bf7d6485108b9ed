"""One compile for all nodes that share the cache's directory: a claim there says that a node is at work on a kernel.

Network file systems do not keep locks well. A claim is a small file, created only where there is none. It outlives a
node that dies: others wait for half a minute at most and take it over; two nodes publish the same bytes.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from rwkv_jit.kernels import env, stats
from rwkv_jit.kernels.cache import files, lock

# Less than processes of one node wait for each other, or all of them would compile when another node dies.
MAX_WAIT_SECONDS = lock.MAX_WAIT_SECONDS / 2
_LONGEST_WORK_SECONDS = 120.0  # by the clocks of two nodes, which may differ by a minute
_PAUSE_SECONDS = 0.05
_FOLDER = "claims"
_MOST_BYTES = 4096


@contextlib.contextmanager
def held(root: Path, digest: str, what: str, has_lock: bool) -> Iterator[None]:
    """Hold a kernel's claim, or wait until another node has let it go; for the process that has the node's lock.

    Where no other node sees the directory nobody waits; where claims cannot be files every node compiles.
    """
    name, own = f"{_FOLDER}/{digest[:40]}.claim", None
    if has_lock and (env.spans_nodes() or lock.network_file_system(root) is not None):
        with contextlib.suppress(OSError):
            files.make_folder(root / _FOLDER)
            own = _take(root, name, what)
    try:
        yield
    finally:
        if own is not None:
            with contextlib.suppress(OSError):
                if files.read(root, name, most=_MOST_BYTES) == own:  # another node may have taken it over
                    files.delete(root, name)


def _take(root: Path, name: str, what: str) -> bytes | None:
    """Return what our claim holds; or None once another node has let its claim go: nothing is left to do."""
    own = f"{lock.domain()} {secrets.token_hex(8)}\n".encode()
    if _make(root / name, own):
        return own
    started = time.monotonic()
    with stats.say_if_slow(f"waiting for another node that compiles {what}"):
        is_ours = _wait(root, name, own)
    stats.count("wait_seconds", time.monotonic() - started)
    return own if is_ours else None


def _make(path: Path, own: bytes) -> bool:
    try:
        files.create(path, own)
    except FileExistsError:
        return False
    return True


def _wait(root: Path, name: str, own: bytes) -> bool:
    """Wait until another node lets its claim go, or seems to be dead; return whether the claim is ours now."""
    holder, since = None, 0.0
    while True:
        # Opening folder and file asks the server anew. Their mere status would come from this node's memory.
        seen = files.read(root, name, most=_MOST_BYTES)
        if seen is None:
            return False
        if seen != holder:
            holder, since = seen, time.monotonic()
        if _is_dead(root / name, seen, own) or time.monotonic() - since > MAX_WAIT_SECONDS:
            with contextlib.suppress(FileNotFoundError):
                files.delete(root, name)
            if _make(root / name, own):
                return True
        else:
            time.sleep(_PAUSE_SECONDS)


def _is_dead(path: Path, seen: bytes, own: bytes) -> bool:
    """Return whether nobody can be at work any more for a claim."""
    # This node's lock is ours, so its process that left a claim has ended.
    is_of_this_node = seen.rpartition(b" ")[0] == own.rpartition(b" ")[0]
    return is_of_this_node or abs(time.time() - path.stat().st_mtime) > _LONGEST_WORK_SECONDS
