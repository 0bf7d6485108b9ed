"""The chunked backend of gated linear attention and its kin: wkv5, wkv6, gla and linear_attention on the tensor cores.

The forward is the template `gla_scan`, a block for some value rows of a head; `gated_scan` takes it for larger heads
too. The backward is `gla_chunked_backward`, a block for a head; `gla_group_backward` for linear attention on sm_90 with
heads of about 128.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import chunked, recurrent
from rwkv_jit.ops.chunked import padded
from rwkv_jit.ops.interface import Candidate, Inputs, Launch, Options, Saved
from rwkv_jit.template import Parameter

OPS = ("wkv5", "wkv6", "gla", "linear_attention")
CHUNK_LENS: tuple[int, ...] = (64, 32, 16)
_DEFAULT_CHUNK_LEN = 32
MOST_THREADS = 512
_MOST_ROWS = 128  # value rows that a block of the forward holds
# Threads that a multiprocessor shall have room for: with 255 registers each, or with 128 where the state leaves them.
_FEW_THREADS, _MANY_THREADS = 256, 512
_GROUP_CHUNK_LEN = 64  # of the backward with products of warp groups


# ---- what it can do ----------------------------------------------------------------------------------------------


def obstacle(
    op: str,
    dtype: torch.dtype,
    head_size: int,
    value_size: int,
    arch: Callable[[], str],
    chunk_len: int | None = None,
    training: bool = True,
) -> tuple[Any, ...] | None:
    """Return why these kernels cannot do a call, as `chunked.obstacle` does; None where they can."""
    if dtype not in chunked.DTYPES:
        return "takes float16 and bfloat16, got {}", dtype
    if max(head_size, value_size) > chunked.LARGEST_HEAD:
        return "takes head sizes up to {}, got {} and {} for v", chunked.LARGEST_HEAD, head_size, value_size
    if padded(head_size) > 2 * padded(value_size):
        return "takes keys up to twice as long as values (in steps of 32), got {} and {} for v", head_size, value_size
    if chunk_len is not None and chunk_len not in CHUNK_LENS:
        return "takes chunk_len 16, 32 or 64, got {}", chunk_len
    target = arch()
    if chunked.arch_number(target) < chunked.LEAST_ARCH:
        return "needs an architecture from sm_{} on, got {}", chunked.LEAST_ARCH, target
    length = chunk_len or default_chunk_len(head_size, value_size, target, training)
    wanted, there = most_shared_bytes(head_size, value_size, length), chunked.shared_limit(target)
    if wanted > there:
        needs = "needs {} bytes of shared memory at head sizes {} and {} and chunk_len={}, {} has {}"
        return needs, wanted, head_size, value_size, length, target, there
    return None


# ---- geometry ----------------------------------------------------------------------------------------------------


def rows(value_size: int) -> int:
    """Return how many value rows a block of the forward holds: equal shares, in steps of 32."""
    blocks = -(-value_size // _MOST_ROWS)
    return padded(-(-value_size // blocks))


def _tiles(value_size: int, threads: int) -> int:
    """Return how many times 16 value rows a warp of the forward holds."""
    return -(-rows(value_size) * 2 // threads)


def _least_threads(head_size: int, value_size: int) -> int:
    """Return the fewest threads of the forward: one for each channel, and a warp for 32 value rows."""
    return max(rows(value_size), padded(head_size), 64)


def _forward_threads(head_size: int, value_size: int) -> int:
    """Return the threads of the forward: a warp for 16 value rows.

    Or as few as can be, where these would not have registers enough: twice as many blocks hide as much waiting. With
    still larger heads the state of 32 rows would not have them.
    """
    is_crowded = 64 < padded(head_size) <= chunked.LARGEST_HEAD
    least = _least_threads(head_size, value_size)
    return least if is_crowded else max(2 * rows(value_size), least)


def _backward_threads(value_size: int) -> int:
    return 2 * padded(value_size)


def shared_bytes(direction: str, head_size: int, value_size: int, chunk_len: int, threads: int) -> int:
    """Return the size of a template's Smem. Rows of bfloat16 tiles are 8 elements longer than what they hold."""
    keys, values = padded(head_size), padded(value_size)
    key_tile, token_tile = 2 * chunk_len * (keys + 8), 2 * chunk_len * (chunk_len + 8)
    raw_keys, factor, own = 2 * 2 * chunk_len * keys, 4 * keys, 4 * keys // 32 * chunk_len
    totals = chunk_len // chunked.segment_len(head_size, chunk_len, threads) * 4 * keys
    common = 2 * key_tile + raw_keys + totals + factor + own
    if direction == "forward":
        behind = 4 * keys
        return common + behind + token_tile + 2 * 2 * chunk_len * (rows(value_size) + 8)
    state_tiles, growth = 2 * 2 * values * (keys + 8), 4 * (chunk_len + 1) * (keys + 4)
    state_terms, diagonal, sums = threads // 32 * 4 * keys, 4 * chunk_len, 2 * 4 * 4 * keys
    value_tiles = 3 * 2 * chunk_len * (values + 8)
    return common + 2 * token_tile + value_tiles + state_tiles + growth + state_terms + diagonal + sums


def _has_groups(op: str, head_size: int, value_size: int, chunk_len: int, arch: str) -> bool:
    """Return whether four warps multiply together in the backward: where there are such products, and tiles they fit.

    Its own chunks are longer than those of the forward, which a caller may choose; who chooses others gets them.
    """
    if op != "linear_attention" or chunk_len != _DEFAULT_CHUNK_LEN or head_size % 8 or value_size % 8:
        return False
    return 64 < head_size <= 128 and padded(value_size) == 128 and arch in ("sm_90", "sm_90a")


def _group_shared_bytes(head_size: int) -> int:
    """Return the size of the Smem of gla_group_backward, a multiple of 1 KB."""
    length, columns = _GROUP_CHUNK_LEN, 128
    rows, f, state = 2 * 4 * 2 * length * columns, 2 * columns**2, 2 * padded(head_size) * columns
    pairs, staged = 2 * 2 * length**2, 2 * length * columns
    return -(-(rows + f + state + pairs + staged + 8) // 1024) * 1024


def most_shared_bytes(head_size: int, value_size: int, chunk_len: int) -> int:
    """Return what the larger of the two directions takes."""
    forward = shared_bytes("forward", head_size, value_size, chunk_len, MOST_THREADS)
    backward = shared_bytes("backward", head_size, value_size, chunk_len, _backward_threads(value_size))
    return max(forward, backward)


def default_chunk_len(head_size: int, value_size: int, arch: str, training: bool = True) -> int:
    """Return the chunk length that is fastest on an H200, with gradients and without, or a shorter one that fits."""
    del training
    limit = chunked.shared_limit(arch)
    legal = [length for length in CHUNK_LENS if length <= _DEFAULT_CHUNK_LEN]
    fitting = [length for length in legal if most_shared_bytes(head_size, value_size, length) <= limit]
    return (fitting or legal[-1:])[0]


def resident_blocks(threads: int, most_threads: int, shared: int, arch: str) -> int:
    """Return how many blocks shall fit on a multiprocessor at once: as many as registers and shared memory allow."""
    return max(1, min(most_threads // threads, chunked.shared_per_multiprocessor(arch) // (shared + 1024)))


def candidates(direction: str, size: int, arch: str) -> list[Candidate]:
    """Return what one direction may be launched with, as `chunked.candidates` does.

    The forward with its fewest threads, with twice and with four times as many: their warps hold fewer value rows, or
    none and prepare operands alone.
    """
    least = _least_threads(size, size)
    several = [n * least for n in (1, 2, 4)] if direction == "forward" else [_backward_threads(size)]
    found = []
    for chunk_len, threads in itertools.product(CHUNK_LENS, several):
        if most_shared_bytes(size, size, chunk_len) <= chunked.shared_limit(arch):
            shared = shared_bytes(direction, size, size, chunk_len, threads)
            found += chunked.with_blocks(direction, chunk_len, threads, shared, arch)
    return found


def templates(op: str) -> tuple[str, ...]:
    """Return the names of the templates, which are the same for all of these ops."""
    return "gla_scan", "gla_chunked_backward", "gla_group_backward"


# ---- the answers to `prepared` -----------------------------------------------------------------------------------


def scan_request(
    op: str,
    backward: bool,
    head_size: int,
    value_size: int,
    types: Mapping[str, Parameter],
    arch: str,
    chunk_len: int,
    num_threads: int | None,
    chosen: Mapping[str, Parameter] | None,
    also: tuple[str, ...],
    for_groups: bool = False,
) -> kernel.Request:
    """Return the kernel that walks over chunks with some value rows of a state, or backwards with its gradient.

    A forward `for_groups` leaves states for the backward with products of warp groups.

    Raises
    ------
    UnsupportedConfigError
        No block can have so many threads.
    """
    decay, least = types["DECAY"], _least_threads(head_size, value_size)
    threads = num_threads or _forward_threads(head_size, value_size)
    if threads % 32 or not least <= threads <= MOST_THREADS:
        raise UnsupportedConfigError(
            f"num_threads must be a multiple of 32 from {least} to {MOST_THREADS} at head sizes {head_size} and "
            f"{value_size}, got {num_threads}"
        )
    shared = shared_bytes("forward", head_size, value_size, chunk_len, threads)
    state_floats = _tiles(value_size, threads) * padded(head_size) // 2  # of a thread
    most_threads = _MANY_THREADS if state_floats <= (64 if decay == "none" else 32) else _FEW_THREADS
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHUNK_LEN": chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": resident_blocks(threads, most_threads, shared, arch), "SHARED_BYTES": shared,
        "ROWS": rows(value_size), "BACKWARD": backward, "FOR_GROUPS": for_groups,
        "LARGEST_DECAY": 0,  # without a look at the decays
        **types, **recurrent.OPS[op].constants,
    }  # fmt: skip
    return kernel.Request(template.library("gla_scan"), parameters | dict(chosen or {}), arch, also)


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
    """Return the template and parameters of one direction; `chosen` overrides the geometry, the same for few heads."""
    length = chunk_len or default_chunk_len(head_size, value_size, arch)
    in_groups = _has_groups(op, head_size, value_size, length, arch)
    if direction == "forward":
        return scan_request(
            op, False, head_size, value_size, types, arch, length, num_threads, chosen, also, in_groups
        )  # fmt: skip
    of, threads, name = recurrent.OPS[op], _backward_threads(value_size), "gla_chunked_backward"
    shared = shared_bytes(direction, head_size, value_size, length, threads)
    if in_groups:
        shared, name, arch = _group_shared_bytes(head_size), "gla_group_backward", "sm_90a"
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHUNK_LEN": length, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": resident_blocks(threads, _FEW_THREADS, shared, arch), "SHARED_BYTES": shared,
        **types, **of.constants, **of.of_backward, **(chosen or {}),
    }  # fmt: skip
    parameters.pop("T_STATE", None)  # states come as fp32 there
    return kernel.Request(template.library(name), parameters, arch, also)


def nearest(request: kernel.Request, argument: str, value: int) -> None:
    """Name nothing: `obstacle` and `specialize` have refused what is not legal."""


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: a state per head and chunk of the backward, as `chunked` does."""
    head_size, value_size, length = inputs["r"].shape[3], inputs["v"].shape[3], options.chunk_len
    assert length is not None  # the rule that chose this backend has chosen it too
    if _has_groups(inputs.op, head_size, value_size, length, tensors.arch(inputs["v"].device.index)):
        options = options._replace(chunk_len=_GROUP_CHUNK_LEN)
    return chunked.saved_for(inputs, packed, options)


def vector(x: Tensor) -> int:
    """Return how many elements of a row are read at once, which is what the chunked backend of wkv7 reads."""
    return chunked.vector(x)


def launch(found: kernel.Kernel, direction: str, inputs: Inputs, options: Options) -> Launch:
    """Return how a kernel is launched: a block per sequence and head, and in the forward for some of the value rows."""
    _, tokens, heads, value_size = inputs["v"].shape
    if heads > chunked.MOST_HEADS:
        name = "split" if options.backend == "scan" else options.backend  # as callers say
        raise UnsupportedConfigError(
            f"backend: {name!r} takes up to {chunked.MOST_HEADS} heads, got {heads}; use 'recurrent'"
        )
    forward = direction == "forward"
    constants = [struct.pack("q", tokens), struct.pack("q", heads), struct.pack("f", options.scale)]
    row_blocks = -(-value_size // int(found.parameters["ROWS"])) if forward else 1
    return Launch(
        "gla_scan" if forward else "gla_backward", (inputs.sequences, heads, row_blocks),
        int(found.parameters["SHARED_BYTES"]), constants, takes_flags=forward,
        takes_any_decay=forward and bool(options.guarded),  # it walks through chunks out of range
        nulls=recurrent.OPS[inputs.op].nulls, strides=recurrent.strides_of_missing(inputs),
    )  # fmt: skip
