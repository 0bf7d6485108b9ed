"""The chunked backend: 16 or 32 tokens at once on the tensor cores, for wkv7 in 16-bit dtypes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops.interface import LARGEST_DECAY, Candidate, Inputs, Launch, Options, Saved
from rwkv_jit.ops.layout import slots
from rwkv_jit.template import Parameter

OPS = ("wkv7",)
DTYPES = (torch.float16, torch.bfloat16)
CHUNK_LENS: tuple[int, ...] = (32, 16)
LEAST_ARCH = 80  # mma.sync of bfloat16, cp.async
LARGEST_HEAD = 128
MOST_HEADS = 65535  # of a grid's second extent
# What is worth measuring: threads of the forward's blocks, and threads that a multiprocessor shall have room for, which
# leaves them 255, 168 and 128 registers each.
FORWARD_THREADS = (64, 128, 256, 512)
RESIDENT_THREADS = (256, 384, 512)


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
    """Return why these kernels cannot do a call; None where they can.

    It is the end of a sentence and the values to format it with: a compiler that traces a call can compare sizes, but
    not print them. `arch` is asked only where nothing else is in the way.
    """
    if op not in OPS:
        return "has kernels for {}, got {}", ", ".join(OPS), op
    if dtype not in DTYPES:
        return "takes float16 and bfloat16, got {}", dtype
    if head_size > LARGEST_HEAD or value_size > LARGEST_HEAD:
        return "takes head sizes up to {}, got {} and {} for v", LARGEST_HEAD, head_size, value_size
    if padded(head_size) > 2 * padded(value_size):
        return "takes keys up to twice as long as values (in steps of 32), got {} and {} for v", head_size, value_size
    if chunk_len is not None and chunk_len not in CHUNK_LENS:
        return "takes chunk_len 16 or 32, got {}", chunk_len
    target = arch()
    if arch_number(target) < LEAST_ARCH:
        return "needs an architecture from sm_{} on, got {}", LEAST_ARCH, target
    length = chunk_len or default_chunk_len(head_size, value_size, target, training)
    wanted, there = most_shared_bytes(head_size, value_size, length), shared_limit(target)
    if wanted > there:
        needs = "needs {} bytes of shared memory at head sizes {} and {} and chunk_len={}, {} has {}"
        return needs, wanted, head_size, value_size, length, target, there
    return None


def is_bounded(decay: str, decay_bound: float | None, chunk_len: int) -> bool:
    """Return whether no decay leaves the range of chunks of this length; `guarded` takes calls where one may."""
    if decay in ("none", "sigmoid"):
        return True
    return decay_bound is not None and -decay_bound * chunk_len / 2 <= LARGEST_DECAY


# ---- geometry ----------------------------------------------------------------------------------------------------


def padded(size: int) -> int:
    """Return a head size as the kernels see it: the next multiple of 32."""
    return -(-size // 32) * 32


def arch_number(arch: str) -> int:
    """Return 90 for sm_90, sm_90a and compute_90."""
    return int(arch.split("_")[1].rstrip("a"))


def shared_per_multiprocessor(arch: str) -> int:
    """Return the bytes of shared memory of a multiprocessor."""
    number = arch_number(arch)
    if number in (80, 87):
        return 164 * 1024
    return 228 * 1024 if 90 <= number < 120 else 100 * 1024  # the least there is, where the GPU is not known


def shared_limit(arch: str) -> int:
    """Return the bytes of shared memory that a block may have: the system keeps 1 KB for each."""
    return shared_per_multiprocessor(arch) - 1024


def segment_len(head_size: int, chunk_len: int, threads: int) -> int:
    """Return for how many tokens a thread sums the decay of its two channels: a power of two."""
    share = -(-chunk_len * padded(head_size) // (2 * threads))
    return 1 << (share - 1).bit_length()


def shared_bytes(direction: str, head_size: int, value_size: int, chunk_len: int, threads: int) -> int:
    """Return the size of a template's Smem. Rows of bfloat16 tiles are 8 elements longer than what they hold."""
    keys, values = padded(head_size), padded(value_size)
    key_tile, value_tile, token_tile = (2 * chunk_len * (width + 8) for width in (keys, values, chunk_len))
    raw_keys, factor = 4 * 2 * chunk_len * keys, 4 * keys
    totals = chunk_len // segment_len(head_size, chunk_len, threads) * 4 * keys
    token_matrices = max(token_tile, chunk_len // 16 * 4 * 16 * 20) + 3 * token_tile
    common = 4 * key_tile + raw_keys + factor
    if direction == "forward":
        return common + token_matrices + 2 * value_tile + totals
    state_tiles, growth = 2 * 2 * values * (keys + 8), 4 * (chunk_len + 1) * (keys + 4)
    state_terms = threads // 32 * 4 * keys
    return common + token_matrices + 4 * value_tile + max(value_tile, totals) + state_tiles + growth + state_terms


def _has_groups(direction: str, head_size: int, value_size: int, chunk_len: int, arch: str) -> bool:
    """Return whether four warps multiply together: where there are such products, and tiles that they fit.

    Keys that are longer than values would take more registers than a thread has.
    """
    is_direction = direction == "backward" and chunk_len == 32 and arch in ("sm_90", "sm_90a")
    return is_direction and head_size % 64 == value_size % 64 == 0 and head_size <= value_size


def _group_shared_bytes(head_size: int, value_size: int) -> int:
    """Return the size of the Smem of wkv7_group_backward, whose tiles have no padding; it is a multiple of 1 KB."""
    keys, values, chunk_len = head_size, value_size, 32
    threads = 2 * values
    token_tile = 2 * chunk_len * (chunk_len + 8)
    token_matrices = max(token_tile, chunk_len // 16 * 4 * 16 * 20) + 3 * token_tile
    operands = raw = 4 * 2 * chunk_len * keys
    states = 2 * 2 * values * keys
    totals = chunk_len // segment_len(head_size, chunk_len, threads) * 4 * keys
    slopes, growth = 4 * chunk_len * keys, 4 * (chunk_len + 1) * (keys + 4)
    rest = max(2 * chunk_len * (values + 8), totals) + growth + (threads // 32 + 1) * 4 * keys
    size = operands + raw + 4 * 2 * chunk_len * values + states + token_matrices + slopes + rest
    return -(-size // 1024) * 1024


def _threads(direction: str, head_size: int, value_size: int, chunk_len: int, num_threads: int | None) -> int:
    """Return the threads of a block: a warp for 16 value rows, or for 32 where that leaves registers enough."""
    if direction == "backward":
        return 2 * padded(value_size)
    rows = 32 if chunk_len == 16 and padded(value_size) > 64 else 16
    return num_threads or max(32 * padded(value_size) // rows, padded(head_size))


def most_shared_bytes(head_size: int, value_size: int, chunk_len: int) -> int:
    """Return what the larger of the two directions takes."""
    return max(
        shared_bytes(way, head_size, value_size, chunk_len, _threads(way, head_size, value_size, chunk_len, None))
        for way in ("forward", "backward")
    )


def default_chunk_len(head_size: int, value_size: int, arch: str, training: bool = True) -> int:
    """Return the chunk length that is fastest on an H200, of those that fit in both directions.

    With large heads the forward alone prefers short chunks; a forward for gradients saves a state per chunk, and so
    does not. The forward's checkpoints are the backward's, hence one length for both.
    """
    prefers_long = training or max(padded(head_size), padded(value_size)) <= 64
    for chunk_len in CHUNK_LENS if prefers_long else CHUNK_LENS[::-1]:
        if most_shared_bytes(head_size, value_size, chunk_len) <= shared_limit(arch):
            return chunk_len
    return CHUNK_LENS[-1]


def _blocks_per_multiprocessor(
    direction: str, head_size: int, value_size: int, arch: str, threads: int, shared: int
) -> int:
    """Return how many blocks shall fit at once: as many as shared memory allows, with registers enough for the state.

    More blocks hide more waiting, until the registers of the state spill: with larger heads that takes 255 a thread.
    """
    is_small = max(head_size, value_size) <= 64
    is_roomy = direction == "forward" and is_small and 90 <= arch_number(arch) < 120
    most = (512 if is_roomy else 256) // threads
    return max(1, min(most, shared_per_multiprocessor(arch) // (shared + 1024)))


def candidates(direction: str, size: int, arch: str) -> list[Candidate]:
    """Return what one direction may be launched with, for keys and values of one size; the rule's is among it."""
    found = []
    for chunk_len in CHUNK_LENS:
        if most_shared_bytes(size, size, chunk_len) > shared_limit(arch):
            continue
        legal = {_threads(direction, size, size, chunk_len, None)}
        if direction == "forward":
            legal |= {threads for threads in FORWARD_THREADS if threads >= padded(size)}
        for threads in sorted(legal):
            shared = shared_bytes(direction, size, size, chunk_len, threads)
            if shared <= shared_limit(arch):
                found += with_blocks(direction, chunk_len, threads, shared, arch)
    return found


def with_blocks(direction: str, chunk_len: int, threads: int, shared: int, arch: str) -> list[Candidate]:
    """Return blocks of so many threads and so much shared memory, with each number of them that is worth measuring.

    It matters by the registers that it leaves to a thread, so it is what goes with RESIDENT_THREADS.
    """
    most = shared_per_multiprocessor(arch) // (shared + 1024)
    several = {max(1, min(resident // threads, most)) for resident in RESIDENT_THREADS}
    return [Candidate(direction, chunk_len, threads, blocks) for blocks in sorted(several)]


def templates(op: str) -> tuple[str, ...]:
    """Return the names of the templates, those of warp groups too."""
    return f"{op}_chunked_forward", f"{op}_chunked_backward", f"{op}_group_backward"


# ---- the answers to `prepared` -----------------------------------------------------------------------------------


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
    threads = _threads(direction, head_size, value_size, length, num_threads)
    shared, name = shared_bytes(direction, head_size, value_size, length, threads), f"{op}_chunked_{direction}"
    if _has_groups(direction, head_size, value_size, length, arch):
        shared, name, arch = _group_shared_bytes(head_size, value_size), f"{op}_group_backward", "sm_90a"
    blocks = _blocks_per_multiprocessor(direction, head_size, value_size, arch, threads, shared)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHUNK_LEN": length, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": blocks, "SHARED_BYTES": shared, **types, **(chosen or {}),
    }  # fmt: skip
    if direction == "backward":
        parameters.pop("T_STATE", None)  # states come as fp32 there
    else:
        parameters.setdefault("LARGEST_DECAY", 0)  # without a look at the decays
    return kernel.Request(template.library(name), parameters, arch, also)


def nearest(request: kernel.Request, argument: str, value: int) -> int | None:
    """Return the legal number of threads nearest to a refused one; `obstacle` has looked at the rest."""
    if argument != "num_threads":
        return None
    least = max(64, padded(int(request.parameters["HEAD_SIZE"])))
    legal = min(max(round(value / 32) * 32, least), 512)
    return None if legal == value else legal


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: a state per head and chunk, in bfloat16 with both sizes padded."""
    heads, value_size = inputs["v"].shape[2:]
    assert options.chunk_len is not None  # the rule that chose this backend has chosen it too
    states = slots(inputs, packed, options.chunk_len)
    return Saved(states * heads * (padded(value_size) * padded(inputs["r"].shape[3]) // 2))


def vector(x: Tensor) -> int:
    """Return how many elements of a row are read at once: 16 bytes or four elements, where rows consist of them."""
    size = x.shape[-1]
    return 16 // x.element_size() if size % 8 == 0 else 4 if size % 4 == 0 else 1


def readable(inputs: Inputs) -> Inputs:
    """Return tensors that kernels can read in place; of what has no tokens they read rows without gaps."""
    streamed = tuple([tensors.readable(x, vector(x)) for x in inputs.streamed])
    fixed = tuple([tensors.aligned(x.contiguous(), vector(x)) for x in inputs.fixed])
    return Inputs(inputs.op, inputs.names, streamed, fixed, inputs.sequences)


def launch(found: kernel.Kernel, direction: str, inputs: Inputs, options: Options) -> Launch:
    """Return how a kernel is launched: a block per sequence and head."""
    _, tokens, heads, _ = inputs["v"].shape
    if heads > MOST_HEADS:
        raise UnsupportedConfigError(f"backend: 'chunked' takes up to {MOST_HEADS} heads, got {heads}; use 'recurrent'")
    constants = [struct.pack("q", tokens), struct.pack("q", heads), struct.pack("f", options.scale)]
    shared = int(found.parameters["SHARED_BYTES"])
    entry = f"{inputs.op}_{direction}"
    return Launch(entry, (inputs.sequences, heads, 1), shared, constants, takes_flags=direction == "forward")
