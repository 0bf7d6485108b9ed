"""wkv7 on the tensor cores: 16 or 32 tokens at once, in a block that holds a head."""

from __future__ import annotations

from functools import partial
from typing import Any

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common as parts
from rwkv_jit.schedules.common import Candidate, Obstacle, candidates_of_blocks, padded
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule, Step, Zero, aligned

CHUNK_LENS: tuple[int, ...] = (32, 16)
TEMPLATES = ("wkv7_chunked_forward", "wkv7_chunked_backward", "wkv7_group_backward")
_HALVES_THREADS = 256  # that a multiprocessor has room for by halves, which takes all registers there are
_FEW_CHUNKS = 16  # of a sequence: with fewer, blocks are many and it counts that more of them fit
_MANY_CHUNKS = 32  # of a sequence, so that what may leave frames is looked at while others are walked over
_TUNED_THREADS = (64, 128, 256, 512)  # of the forward's blocks, that are worth measuring


def why_not(p: Problem) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is looked at where all else is right."""
    return parts.obstacle_of_blocks(p, CHUNK_LENS, default_chunk_len, partial(most_shared_bytes, p.K, p.V))


def segment_len(head_size: int, chunk_len: int, threads: int) -> int:
    """Return for how many tokens a thread sums the decay of its two channels: a power of two."""
    share = -(-chunk_len * padded(head_size) // (2 * threads))
    return 1 << (share - 1).bit_length()


def shared_bytes(direction: str, head_size: int, value_size: int, chunk_len: int, threads: int) -> int:
    """Return the size of a template's Smem. Rows of tiles are 8 elements longer than what they hold."""
    keys, values = padded(head_size), padded(value_size)
    key_tile, value_tile, token_tile = (2 * chunk_len * (width + 8) for width in (keys, values, chunk_len))
    raw_keys, factor, levels = 4 * 2 * chunk_len * keys, 4 * keys, chunk_len.bit_length() - 1
    totals = chunk_len // segment_len(head_size, chunk_len, threads) * 4 * keys
    token_matrices = max(token_tile, chunk_len // 16 * 4 * 16 * 20) + 3 * token_tile
    common = 4 * key_tile + raw_keys + factor
    if direction == "forward":
        return common + token_matrices + 2 * value_tile + totals
    state_tiles, growth = 2 * 2 * values * (keys + 8), 4 * (chunk_len + 1) * (keys + 4)
    state_terms = threads // 32 * 4 * keys
    more = max(2 * value_tile + state_tiles, 2 * (levels - 2) * key_tile)  # by halves for the rows of levels
    return common + token_matrices + 2 * value_tile + max(value_tile, totals) + more + growth + state_terms


def _takes_warp_groups(direction: str, head_size: int, value_size: int, chunk_len: int, gpu: Gpu) -> bool:
    """Return whether four warps multiply together; for keys longer than values a thread has too few registers."""
    fits = head_size % 64 == value_size % 64 == 0 and head_size <= value_size
    return direction == "backward" and chunk_len == 32 and gpu.has_warp_groups and fits


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


def _threads(
    direction: str, head_size: int, value_size: int, chunk_len: int, num_threads: int | None, keeps_many: bool = True
) -> int:
    """Return the threads of a block: a warp for 16 value rows, or for 32 where that leaves registers enough.

    Where a forward keeps the states of many short chunks, as many warps again make matrices beside those that write.
    """
    if direction == "backward":
        return 2 * padded(value_size)
    values, rows = padded(value_size), 16
    if chunk_len == 16 and values > 32:
        rows = 32 if values > 64 else 8 if keeps_many else 16
    return num_threads or max(32 * values // rows, padded(head_size))


def most_shared_bytes(head_size: int, value_size: int, chunk_len: int) -> int:
    """Return what the larger of the two directions takes."""
    return max(
        shared_bytes(way, head_size, value_size, chunk_len, _threads(way, head_size, value_size, chunk_len, None))
        for way in ("forward", "backward")
    )


def default_chunk_len(p: Problem) -> int:
    """Return the chunk length that is fastest on an H200, of those that fit in both directions.

    A forward alone prefers short chunks with large heads; one for gradients saves a state per chunk, which the backward
    reads: hence one length for both.
    """
    prefers_long = p.training or max(padded(p.K), padded(p.V)) <= 64
    lengths = CHUNK_LENS if prefers_long else CHUNK_LENS[::-1]
    return parts.fitting(p, lengths, partial(most_shared_bytes, p.K, p.V))


def _most_threads(direction: str, head_size: int, value_size: int, gpu: Gpu) -> int:
    """Return the most threads on an SM: more blocks hide more waiting, until the registers of the state spill."""
    is_small = max(head_size, value_size) <= 64
    return gpu.many_threads if direction == "forward" and is_small and 90 <= gpu.number < 120 else 256


def candidates(direction: str, size: int, gpu: Gpu) -> list[Candidate]:
    """Return what one direction may be launched with, for keys and values of one size; the rule's is among it."""
    several = []
    for chunk_len in CHUNK_LENS:
        if most_shared_bytes(size, size, chunk_len) > gpu.shared_limit:
            continue
        legal = {_threads(direction, size, size, chunk_len, None)}
        if direction == "forward":
            legal |= {threads for threads in _TUNED_THREADS if threads >= padded(size)}
        for threads in sorted(legal):
            shared = shared_bytes(direction, size, size, chunk_len, threads)
            if shared <= gpu.shared_limit:
                several += candidates_of_blocks(direction, chunk_len, threads, shared, gpu)
    return several


def nearest(step: Step, argument: str, value: int) -> int | None:
    """Return the legal number of threads nearest to a refused one; `why_not` has looked at the rest."""
    if argument != "num_threads":
        return None
    least = max(64, padded(int(step.parameters["HEAD_SIZE"])))
    legal = min(max(round(value / 32) * 32, least), 512)
    return None if legal == value else legal


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: a state per head and chunk, in the type of the rows, with both sizes padded."""
    states = {"checkpoints": 2 * p.slots(p.chunk_len) * p.H * padded(p.V) * padded(p.K)}
    return {**states, **parts.kept_frames(p)}


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    board = {}  # short sequences are over before another launch could begin beside them
    if p.has_halves and p.gpu.number >= parts.OVERLAPS_SINCE and p.tokens >= _MANY_CHUNKS * p.chunk_len:
        board = {"board": aligned(4 * (2 + p.N * p.H))}
    bind = {"checkpoints": "checkpoints" if p.training else None, "board": "board" if board else None}
    in_frames, *by_halves = (_step(p, "forward", bind, by_halves) for by_halves in parts.ways(p))
    zeros = (Zero(buffer) for buffer in board)
    steps: tuple[Step | Zero, ...] = (*zeros, in_frames, *(step._replace(overlaps=bool(board)) for step in by_halves))
    left, scratch = kept(p), _carried(p) | board
    if not p.training:
        left, scratch = {}, scratch | parts.kept_frames(p)
    return Schedule(steps, parts.forward_results(p), left, scratch, parts.vectors(p))


def backward(p: Problem) -> Schedule:
    """Return the backward: what a head has behind its chunks in frames comes first, and the other heads beside it."""
    *by_halves, in_frames = (_step(p, "backward", {}, by_halves) for by_halves in reversed(parts.ways(p)))
    steps = (*by_halves, in_frames._replace(overlaps=bool(by_halves) and p.gpu.number >= parts.OVERLAPS_SINCE))
    return Schedule(
        steps, parts.backward_results(p), scratch=_carried(p), vectors=parts.vectors(p), main=len(steps) - 1
    )  # fmt: skip


def _skips_zeros(p: Problem) -> bool:
    """Return whether zero states have a kernel, in both directions: for a chunk or two, not in warp groups."""
    is_short = not (p.is_batch_invariant or p.has_initial_state) and p.tokens <= 2 * p.chunk_len
    return is_short and (p.chunk_len == min(CHUNK_LENS) or not p.training)


def _carried(p: Problem) -> dict[str, Any]:
    """Return the bytes of the states that pass from chunks in frames to halved ones, or back."""
    return {"carried": p.state_bytes} if p.has_halves else {}


def _step(p: Problem, direction: str, bind: dict[str, Any], by_halves: bool) -> Step:
    """Return a launch: a block per sequence and head, for chunks in frames or for halved ones."""
    parts.check_heads(p, "chunked")
    keeps_many = p.training and (p.is_batch_invariant or p.tokens > _FEW_CHUNKS * p.chunk_len)
    threads = _threads(direction, p.K, p.V, p.chunk_len, p.num_threads, keeps_many)
    shared, template, arch = shared_bytes(direction, p.K, p.V, p.chunk_len, threads), f"wkv7_chunked_{direction}", None
    if not by_halves and _takes_warp_groups(direction, p.K, p.V, p.chunk_len, p.gpu):
        shared, template, arch = _group_shared_bytes(p.K, p.V), "wkv7_group_backward", parts.GROUP_ARCH
    most = _HALVES_THREADS if by_halves else _most_threads(direction, p.K, p.V, p.gpu)
    blocks = p.gpu.resident_blocks(threads, most, shared)
    if not by_halves:
        blocks = parts.blocks_of(p, direction, blocks)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": p.chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": blocks, "SHARED_BYTES": shared, "LARGEST_DECAY": parts.largest_decay(p),
    }  # fmt: skip
    if template != "wkv7_group_backward":
        parameters |= {"BY_HALVES": by_halves, "SKIPS_ZEROS": _skips_zeros(p)}
    if direction == "forward":
        parameters |= {"LEVEL_TILES": 2, "POOLED": p.is_pooled, "T_W0": p.w0_type}
        if by_halves:
            parameters |= parts.level_tiles(p, 2 * 2 * p.chunk_len * (padded(p.K) + 8), shared, blocks)
    parameters |= parts.types(p) if direction == "forward" else parts.types(p, "T_STATE")  # states come as fp32 there
    passed = {name: name if p.has_halves else None for name in ("framed", "carried")}
    # Of sequences of one length it is known how many chunks are all.
    is_known = by_halves and not (p.is_packed or p.is_pooled)
    return Step(
        template, f"wkv7_{direction}", parameters, (*parts.sequences_and_heads(p), 1),
        {**parts.given(p), **passed, **bind}, arch, idle_at=("framed", -(-p.T // p.chunk_len)) if is_known else None,
        optional=("grad_initial_state",),
    )  # fmt: skip
