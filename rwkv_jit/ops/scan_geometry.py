"""The geometry of the scan: what its kernels can do, how their blocks are cut, and the requests of both directions.

All of it goes by sizes, types and the architecture alone: kernels that are made ahead of a call have no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rwkv_jit import kernel, template
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import chunked
from rwkv_jit.ops.interface import LARGEST_DECAY
from rwkv_jit.template import Parameter

CHUNK_LENS = (64, 32)
LARGEST_HEAD = 1024
SLAB = 64  # channels that are moved and prepared at once
ROWS = (64, 32)  # value rows that a block of the scan may hold
_STAGES = (3, 2)
_GROUP_CHUNK_LEN, _GROUP_THREADS = 64, 384  # of the scan with products of warp groups
_GROUP_STATE = 512 * 64  # channels times value rows that its registers hold
_MOST_THREADS = 256  # of a multiprocessor, with 255 registers each; twice as many have 128
_LOOK_THREADS = 256
_PARTS, _LEAST_CHUNKS = 4, 128  # of a scan beside which other kernels run


# ---- what it can do ----------------------------------------------------------------------------------------------


def obstacle(
    op: str,
    dtype: torch.dtype,
    head_size: int,
    value_size: int,
    arch: Callable[[], str],
    chunk_len: int | None = None,
) -> tuple[Any, ...] | None:
    """Return why these kernels cannot do a call, as `chunked.obstacle` does; None where they can."""
    if op not in chunked.OPS:
        return "has kernels for {}, got {}", ", ".join(chunked.OPS), op
    if dtype not in chunked.DTYPES:
        return "takes float16 and bfloat16, got {}", dtype
    if head_size > LARGEST_HEAD or value_size > LARGEST_HEAD:
        return "takes head sizes up to {}, got {} and {} for v", LARGEST_HEAD, head_size, value_size
    if chunk_len is not None and chunk_len not in CHUNK_LENS:
        return "takes chunk_len 32 or 64 at head sizes above {}, got {}", chunked.LARGEST_HEAD, chunk_len
    length = chunk_len or CHUNK_LENS[-1]
    target = arch()
    if chunked.arch_number(target) < chunked.LEAST_ARCH:
        return "needs an architecture from sm_{} on, got {}", chunked.LEAST_ARCH, target
    if not _fits(head_size, length, target):
        text = "needs more shared memory at head sizes {} and {} and chunk_len={} than the {} bytes of {}"
        return text, head_size, value_size, length, chunked.shared_limit(target), target
    return None


def default_chunk_len(
    head_size: int,
    arch: str,
    decay: str = "sigmoid",
    decay_bound: float | None = None,
    num_threads: int | None = None,
) -> int:
    """Return the longest chunk that shared memory allows, whatever the threads: what is left behind goes by the chunk.

    A shorter one where that keeps a promise about the decays.
    """
    del num_threads
    fitting = [length for length in CHUNK_LENS if _fits(head_size, length, arch)]
    bounded = [length for length in fitting if chunked.is_bounded(decay, decay_bound, length)]
    return (bounded or fitting or CHUNK_LENS[-1:])[0]


def _fits(head_size: int, chunk_len: int, arch: str) -> bool:
    others = max(_prepare_shared_bytes(chunk_len), _keys_shared_bytes(chunk_len))
    if others > chunked.shared_limit(arch):
        return False
    return _has_groups(chunk_len, arch) or bool(_scans(head_size, chunk_len, arch))


# ---- geometry ----------------------------------------------------------------------------------------------------


def channels(head_size: int) -> int:
    """Return a head's channels as the kernels see them, in slabs that the warps of a row can share evenly."""
    slabs = SLAB * (1 if head_size <= 4 * SLAB else 2 if head_size <= 8 * SLAB else 4)
    return -(-head_size // slabs) * slabs


def values(value_size: int) -> int:
    """Return the value rows of a state that is left behind."""
    return -(-value_size // max(ROWS)) * max(ROWS)


def _key_warps(head_size: int, few_heads: bool) -> int:
    """Return how many warps share the channels of the same rows: up to 256 channels each."""
    slabs = channels(head_size) // SLAB
    legal = [warps for warps in (1, 2, 4) if slabs % warps == 0 and slabs // warps <= 4]
    return max([warps for warps in legal if warps <= (4 if few_heads else 2)] or legal)


def triangle_bytes(chunk_len: int) -> int:
    """Return the bytes of a lower triangle of 16 x 16 blocks."""
    blocks = chunk_len // 16
    return 512 * (blocks * (blocks + 1) // 2)


def _prepare_shared_bytes(chunk_len: int) -> int:
    tiles, lower, totals = 8 * chunk_len * SLAB * 2, chunk_len // 16 * 4 * 16 * 20, 4 * chunk_len * 8
    return tiles + 6 * triangle_bytes(chunk_len) + lower + totals


def _scan_shared_bytes(
    head_size: int, chunk_len: int, backward: bool, key_warps: int, threads: int, stages: int
) -> int:
    row_warps = threads // 32 // key_warps
    ring = stages * key_warps * 2 * 2 * chunk_len * SLAB
    rows = 3 * 2 * chunk_len * (16 * row_warps + 8)
    matrices = 2 * (3 if backward else 2) * triangle_bytes(chunk_len)
    share = max(chunk_len // key_warps, 16) // 8 if key_warps > 1 else 1
    parts = row_warps * key_warps * max(key_warps - 1, 1) * 2 * share * 512
    solution = row_warps * (chunk_len // 16 if key_warps > 1 else 1) * 512
    return ring + matrices + rows + 4 * channels(head_size) + parts + solution


def _tokens_shared_bytes(chunk_len: int) -> int:
    return 2 * 4 * 2 * chunk_len * SLAB


def _keys_shared_bytes(chunk_len: int) -> int:
    operands = raw = 4 * 2 * chunk_len * SLAB
    stage = max(2 * 2 * chunk_len * SLAB + 2 * 2 * 32 * SLAB, 4 * triangle_bytes(chunk_len))
    sums, parts = 4 * 4 * chunk_len * (SLAB + 8), 4 * chunk_len * 8 + (chunk_len // 8 + chunk_len // 32) * 4 * SLAB
    return operands + max(stage + raw, 3 * stage, sums) + parts


def _has_groups(chunk_len: int, arch: str) -> bool:
    """Return whether warps can multiply in groups of four: where there are such products, and chunks that they fit."""
    return arch in ("sm_90", "sm_90a") and chunk_len == _GROUP_CHUNK_LEN


class _GroupCut(NamedTuple):
    """How a block of the scan with products of warp groups is cut."""

    value_rows: int
    cluster: int  # blocks that fetch operands for each other
    stages: int


def _group_scan(head_size: int, value_size: int, arch: str, few_heads: bool) -> _GroupCut:
    """Return what such a block is in both directions.

    Two blocks of a cluster halve what is read of the operands; more of them, and of small ones two, wait for each other
    longer than that saves.
    """
    rows = next(rows for rows in ROWS if channels(head_size) * rows <= _GROUP_STATE)
    rows = ROWS[-1] if few_heads else rows
    blocks = -(-value_size // rows)
    cluster = 2 if rows == ROWS[0] and blocks % 2 == 0 else 1
    fixed = _group_scan_shared_bytes(head_size, rows, 0)
    stage = _group_scan_shared_bytes(head_size, rows, 1) - fixed
    fitting = (chunked.shared_limit(arch) - fixed) // stage
    return _GroupCut(rows, cluster, min(fitting, 2 * channels(head_size) // SLAB + 1))


def _group_scan_shared_bytes(head_size: int, value_rows: int, stages: int) -> int:
    tile = 2 * _GROUP_CHUNK_LEN * SLAB
    image, outputs = 2 * channels(head_size) * value_rows, 8 * 16 * 2 * (value_rows + 8)
    return image + 3 * tile + outputs + stages * (2 * tile + 16)


class _Cut(NamedTuple):
    """How a block of the scan is cut."""

    key_warps: int
    num_threads: int
    stages: int


def _scans(head_size: int, chunk_len: int, arch: str, few_heads: bool = False) -> list[_Cut]:
    """Return what a block of the scan may be in both directions, the fastest on an H200 first.

    Many rows for a block read the operands least often, and few make more blocks; as do more warps for the same rows.
    """
    warps, limit = _key_warps(head_size, few_heads), chunked.shared_limit(arch)
    rows = ROWS[-1:] if few_heads else ROWS
    return [
        each
        for each in (_Cut(warps, 2 * count * warps, stages) for count in rows for stages in _STAGES)
        if each.num_threads <= _MOST_THREADS and _scan_shared_bytes(head_size, chunk_len, True, *each) <= limit
    ]


class Walk(NamedTuple):
    """How the scan of a call goes over its chunks."""

    few_heads: bool  # blocks of few rows, so that there are more of them
    parts: int  # launches, beside which the other kernels run


def walk(
    head_size: int, value_size: int, arch: str, chunk_len: int, num_threads: int | None, backward: bool, heads: int,
    chunks: int, multiprocessors: int,
) -> Walk:  # fmt: skip
    """Return how to go over `chunks` of each of `heads`, those of all sequences; 0 where their lengths are not known.

    A scan that leaves half of the GPU free goes on in parts, and the other kernels of a direction have the other half
    meanwhile: results are the same. Forwards that is worth it only where its blocks have few rows anyway.
    """
    few_heads = heads * (values(value_size) // max(ROWS)) < multiprocessors
    in_groups = _has_groups(chunk_len, arch) and num_threads is None
    if few_heads and in_groups and chunks >= _LEAST_CHUNKS:
        for few_rows in (True, False) if backward else (True,):
            rows = _group_scan(head_size, value_size, arch, few_rows).value_rows
            if 2 * heads * -(-value_size // rows) <= multiprocessors:
                return Walk(few_rows, _PARTS)
    return Walk(few_heads, 1)


def rows_of(parameters: Mapping[str, Parameter]) -> int:
    """Return the value rows of a block of a scan."""
    if "VALUE_ROWS" in parameters:
        return int(parameters["VALUE_ROWS"])
    return 16 * (int(parameters["NUM_THREADS"]) // 32 // int(parameters["KEY_WARPS"]))


def block_state(parameters: Mapping[str, Parameter]) -> int:
    """Return the floats of state that a block of the scan with products of warp groups has in registers."""
    slabs = -(-int(parameters["CHANNELS"]) // (2 * SLAB)) * 2  # two groups with equally many
    return slabs * SLAB * int(parameters["VALUE_ROWS"])


# ---- the kernels of a direction ----------------------------------------------------------------------------------


def requests(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
    chunk_len: int | None = None, num_threads: int | None = None, few_heads: bool = False,
    chosen: Mapping[str, Parameter] | None = None, also: tuple[str, ...] = (),
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels of one direction in the order of their launches; `chosen` overrides the scan's parameters."""
    length = chunk_len or default_chunk_len(head_size, arch)
    sizes: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHANNELS": channels(head_size), "CHUNK_LEN": length,
    }  # fmt: skip
    of_keys: dict[str, Parameter] = {name: types[name] for name in ("T_IO", "T_W", "DECAY")}
    backward, threads = direction == "backward", 4 * length

    def request(
        name: str, shared: int, threads: int, most_threads: int, more: Mapping[str, Parameter]
    ) -> kernel.Request:
        """With as many blocks at once as shared memory, and registers for so many threads, leave room for."""
        blocks = max(1, min(most_threads // threads, chunked.shared_per_multiprocessor(arch) // (shared + 1024)))
        own: dict[str, Parameter] = {"NUM_THREADS": threads, "BLOCKS_PER_SM": blocks, "SHARED_BYTES": shared}
        return kernel.Request(template.library(f"{op}_{name}"), {**sizes, **own, **more}, arch, also)

    kept: dict[str, Parameter] = {"VALUES": values(value_size)}
    of_scan = {**types, **kept, "BACKWARD": backward}
    in_groups = _has_groups(length, arch) and num_threads in (None, _GROUP_THREADS)
    if in_groups:
        groups = _group_scan(head_size, value_size, arch, few_heads and num_threads is None)
        shared = _group_scan_shared_bytes(head_size, groups.value_rows, groups.stages)
        cut: dict[str, Parameter] = {
            "VALUE_ROWS": groups.value_rows, "CLUSTER": groups.cluster, "STAGES": groups.stages,
            "NUM_THREADS": _GROUP_THREADS, "SHARED_BYTES": shared,
        }  # fmt: skip
        # Nothing but an sm_90 runs code for sm_90, and only with the extension has it these products.
        scan = kernel.Request(
            template.library(f"{op}_group_scan"), {**sizes, **of_scan, **cut, **(chosen or {})}, "sm_90a"
        )
    else:
        each = _scan(head_size, length, arch, few_heads, num_threads)
        cut = {"KEY_WARPS": each.key_warps, "STAGES": each.stages}
        shared = _scan_shared_bytes(head_size, length, backward, *each)
        scan = request("scan", shared, each.num_threads, _MOST_THREADS, {**of_scan, **cut, **(chosen or {})})
    if not backward:
        of_keys["BY_LANES"] = in_groups
        return [request("prepare", _prepare_shared_bytes(length), threads, 2 * _MOST_THREADS, of_keys), scan]
    return [
        scan,
        request("token_gradients", _tokens_shared_bytes(length), threads, 2 * _MOST_THREADS, of_keys),
        request("key_gradients", _keys_shared_bytes(length), threads, 2 * _MOST_THREADS, {**of_keys, **kept}),
    ]


def _scan(head_size: int, chunk_len: int, arch: str, few_heads: bool, num_threads: int | None) -> _Cut:
    """Return how a block of the scan is cut, `num_threads` alone deciding where it is given.

    Raises
    ------
    UnsupportedConfigError
        No block has so many threads.
    """
    many = _scans(head_size, chunk_len, arch)
    scans = (_scans(head_size, chunk_len, arch, True) or many) if few_heads and num_threads is None else many
    fitting = [each for each in scans if num_threads in (None, each.num_threads)]
    if not fitting:
        legal = {each.num_threads for each in scans}
        if _has_groups(chunk_len, arch):
            legal.add(_GROUP_THREADS)
        raise UnsupportedConfigError(
            f"num_threads must be {' or '.join(map(str, sorted(legal)))} at head size {head_size} and "
            f"chunk_len={chunk_len} on {arch}, got {num_threads}"
        )
    return fitting[0]


def look_request(
    op: str, head_size: int, like: Mapping[str, Parameter], chunk_len: int, arch: str, also: tuple[str, ...] = ()
) -> kernel.Request:
    """Return the kernel that looks at the decays of a call that is guarded; its types are `like` others of the call."""
    # Rows that are read element by element take a thread each.
    threads = _LOOK_THREADS if head_size % 4 == 0 else max(_LOOK_THREADS, 1 << (head_size - 1).bit_length())
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "CHUNK_LEN": chunk_len, "LARGEST_DECAY": LARGEST_DECAY,
        "NUM_THREADS": threads, **{name: like[name] for name in ("T_IO", "T_W", "DECAY")},
    }  # fmt: skip
    return kernel.Request(template.library(f"{op}_decay_range"), parameters, arch, also)


def specialize(
    op: str,
    direction: str,
    head_size: int,
    value_size: int,
    types: Mapping[str, Parameter],
    arch: str,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    few_heads: bool = False,
    chosen: Mapping[str, Parameter] | None = None,
    also: tuple[str, ...] = (),
) -> kernel.Request:
    """Return the template and parameters of the scan in one direction; `chosen` overrides the geometry."""
    found = requests(op, direction, head_size, value_size, types, arch, chunk_len, num_threads, few_heads, chosen, also)
    return found[direction == "forward"]


def companions(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
    chunk_len: int | None, also: tuple[str, ...] = (), guarded: bool = False,
) -> list[kernel.Request]:  # fmt: skip
    """Return the other kernels of a direction, for calls that ask for no number of threads.

    Of a guarded forward the last one looks at the decays.
    """
    found = requests(op, direction, head_size, value_size, types, arch, chunk_len, also=also)
    others = [request for request in found if not request.template.name.endswith("_scan")]
    if guarded and direction == "forward":
        length = chunk_len or default_chunk_len(head_size, arch)
        others.append(look_request(op, head_size, types, length, arch, also))
    return others


def nearest(request: kernel.Request, argument: str, value: int) -> None:
    """Name nothing: `obstacle` and `specialize` have refused what is not legal."""
