"""wkv5, wkv6, gla and linear_attention on the tensor cores: up to 64 tokens at once, in blocks that hold a head.

The forward is `gla_scan`, a block for some value rows of a head, as in `diagonal_large`. The backward is
`gla_chunked_backward`, or `gla_group_backward` for linear attention on sm_90 with heads of about 128.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.common import LARGEST_HEAD, Candidate, Obstacle, candidates_of_blocks, padded
from rwkv_jit.schedules.delta_chunked import segment_len
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule, Step

CHUNK_LENS: tuple[int, ...] = (64, 32, 16)
TEMPLATES = ("gla_scan", "gla_chunked_backward", "gla_group_backward")
MOST_THREADS = 512
_DEFAULT_CHUNK_LEN = 32
_MOST_ROWS = 128  # value rows that a block of the forward holds
_FEW_THREADS = 256  # that a multiprocessor shall have room for, with 255 registers each
_GROUP_CHUNK_LEN = 64  # of the backward with products of warp groups


def why_not(p: Problem) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is looked at where all else is right."""
    return common.obstacle_of_blocks(p, CHUNK_LENS, default_chunk_len, partial(_most_shared_bytes, p.K, p.V))


def _rows(value_size: int) -> int:
    """Return how many value rows a block of the forward holds: equal shares, in steps of 32."""
    blocks = -(-value_size // _MOST_ROWS)
    return padded(-(-value_size // blocks))


def _least_threads(head_size: int, value_size: int) -> int:
    """Return the fewest threads of the forward: one for each channel, and a warp for 32 value rows."""
    return max(_rows(value_size), padded(head_size), 64)


def _forward_threads(p: Problem) -> int:
    """Return the threads of the forward: a warp for 16 value rows.

    Or the fewest, where these would lack registers: twice as many blocks hide as much waiting. Where every block has an
    SM for itself, twice as many threads, half of which prepare operands alone, take up to 13 % less time.
    """
    is_crowded = 64 < padded(p.K) <= LARGEST_HEAD
    least = _least_threads(p.K, p.V)
    threads = least if is_crowded else max(2 * _rows(p.V), least)
    has_room = p.multiprocessors is not None and p.all_heads * -(-p.V // _rows(p.V)) <= p.multiprocessors
    return 2 * threads if p.backend == "chunked" and has_room else threads


def _backward_threads(value_size: int) -> int:
    return 2 * padded(value_size)


def _key_tile_bytes(head_size: int, chunk_len: int) -> int:
    """Return the size of a tile of keys. Rows of tiles are 8 elements longer than what they hold."""
    return 2 * chunk_len * (padded(head_size) + 8)


def _common_shared_bytes(head_size: int, chunk_len: int, threads: int) -> int:
    keys, key_tile = padded(head_size), _key_tile_bytes(head_size, chunk_len)
    raw_keys, factor, own = 2 * chunk_len * keys, 4 * keys, 4 * keys // 32
    totals = chunk_len // segment_len(head_size, chunk_len, threads) * 4 * keys
    return 2 * key_tile + 2 * raw_keys + totals + factor + own * chunk_len


def forward_shared_bytes(head_size: int, value_size: int, chunk_len: int, threads: int) -> int:
    """Return the size of the Smem of gla_scan."""
    behind, token_tile = 4 * padded(head_size), 2 * chunk_len * (chunk_len + 8)
    value_tiles, heads = 2 * 2 * chunk_len * (_rows(value_size) + 8), threads // 32 * 136
    return _common_shared_bytes(head_size, chunk_len, threads) + behind + token_tile + value_tiles + heads


def _backward_shared_bytes(head_size: int, value_size: int, chunk_len: int) -> int:
    """Return the size of the Smem of gla_chunked_backward."""
    keys, values, threads = padded(head_size), padded(value_size), _backward_threads(value_size)
    key_tile, value_tile = _key_tile_bytes(head_size, chunk_len), 2 * chunk_len * (values + 8)
    levels = chunk_len.bit_length() - 1
    token_tiles = 2 * 2 * chunk_len * (chunk_len + 8)
    state_tiles, growth = 2 * 2 * values * (keys + 8), 4 * (chunk_len + 1) * (keys + 4)
    state_terms, diagonal, sums = threads // 32 * 4 * keys, 4 * chunk_len, 2 * 4 * 4 * keys
    more = max(value_tile + state_tiles, (levels - 2) * key_tile)  # by halves for the rows of levels
    own = token_tiles + 2 * value_tile + more + growth + state_terms + diagonal + sums
    return _common_shared_bytes(head_size, chunk_len, threads) + own


def _most_shared_bytes(head_size: int, value_size: int, chunk_len: int) -> int:
    forward_bytes = forward_shared_bytes(head_size, value_size, chunk_len, MOST_THREADS)
    return max(forward_bytes, _backward_shared_bytes(head_size, value_size, chunk_len))


def _takes_warp_groups(p: Problem) -> bool:
    """Return whether four warps multiply together in the backward; not where a caller names other chunks."""
    if "w" in p.op.inputs or p.chunk_len != _DEFAULT_CHUNK_LEN or p.K % 8 or p.V % 8:
        return False
    return 64 < p.K <= 128 and padded(p.V) == 128 and p.gpu.has_warp_groups


def _group_shared_bytes(head_size: int) -> int:
    """Return the size of the Smem of gla_group_backward, a multiple of 1 KB."""
    length, columns = _GROUP_CHUNK_LEN, 128
    rows, f, state = 2 * 4 * 2 * length * columns, 2 * columns**2, 2 * padded(head_size) * columns
    pairs, staged = 2 * 2 * length**2, 2 * length * columns
    return -(-(rows + f + state + pairs + staged + 8) // 1024) * 1024


def default_chunk_len(p: Problem) -> int:
    """Return the chunk length that is fastest on an H200, with gradients and without, or a shorter one that fits."""
    legal = [length for length in CHUNK_LENS if length <= _DEFAULT_CHUNK_LEN]
    return common.fitting(p, legal, partial(_most_shared_bytes, p.K, p.V))


def candidates(direction: str, size: int, gpu: Gpu) -> list[Candidate]:
    """Return blocks for keys and values of one size: the rule's, and forwards of 1, 2, 4 times the fewest threads."""
    least = _least_threads(size, size)
    legal = [n * least for n in (1, 2, 4)] if direction == "forward" else [_backward_threads(size)]
    several = []
    for chunk_len, threads in itertools.product(CHUNK_LENS, legal):
        if _most_shared_bytes(size, size, chunk_len) > gpu.shared_limit:
            continue
        if direction == "forward":
            shared = forward_shared_bytes(size, size, chunk_len, threads)
        else:
            shared = _backward_shared_bytes(size, size, chunk_len)
        several += candidates_of_blocks(direction, chunk_len, threads, shared, gpu)
    return several


def checkpoint_bytes(p: Problem, chunk_len: int) -> Any:
    """Return the size of a state per head and chunk, in the type of the rows, with both sizes padded."""
    return 2 * p.slots(chunk_len) * p.H * padded(p.V) * padded(p.K)


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: a state per head and chunk of the backward."""
    states = {"checkpoints": checkpoint_bytes(p, _GROUP_CHUNK_LEN if _takes_warp_groups(p) else p.chunk_len)}
    return {**states, **common.kept_frames(p)}


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    common.check_heads(p, "chunked")
    return scan_forward(p, kept(p), _takes_warp_groups(p))


def scan_forward(p: Problem, pieces: Mapping[str, Any], for_groups: bool = False) -> Schedule:
    """Return a forward of one scan, which keeps these pieces; `for_groups` those for products of warp groups."""
    left = pieces if p.training else {}
    bind = {"checkpoints": "checkpoints" if p.training else None, "framed": common.framed(p)}
    step = scan_step(p, "forward", bind, for_groups)
    return Schedule((step,), common.forward_results(p), left, vectors=common.vectors(p))


def scan_ends(p: Problem, direction: str) -> dict[str, str | None]:
    """Return what a walk over chunks reads and writes: rows of values, and the states at both ends."""
    if direction == "forward":
        last = "final_state" if p.has_final_state else None
        return {"input": "v", "output": "y", "first": "initial_state", "last": last}
    last = "grad_initial_state" if p.has_initial_state else None
    return {"input": "dy", "output": "dv", "first": "grad_final_state", "last": last}


def scan_step(p: Problem, direction: str, bind: Mapping[str, Any], for_groups: bool = False) -> Step:
    """Return the walk with some value rows of a state, or backwards with its gradient; it raises if no block fits."""
    least = _least_threads(p.K, p.V)
    threads = p.num_threads or _forward_threads(p)
    if threads % 32 or not least <= threads <= MOST_THREADS:
        raise UnsupportedConfigError(
            f"num_threads must be a multiple of 32 from {least} to {MOST_THREADS} at head sizes {p.K} and "
            f"{p.V}, got {p.num_threads}"
        )
    rows, shared = _rows(p.V), forward_shared_bytes(p.K, p.V, p.chunk_len, threads)
    tiles = -(-rows * 2 // threads)  # how many times 16 value rows a warp holds
    state_floats = tiles * padded(p.K) // 2  # of a thread
    most_threads = p.gpu.many_threads if state_floats <= (64 if p.decay == "none" else 32) else _FEW_THREADS
    blocks = common.blocks_of(p, direction, p.gpu.resident_blocks(threads, most_threads, shared))
    backward = direction == "backward"
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": p.chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": blocks, **common.level_tiles(p, _key_tile_bytes(p.K, p.chunk_len), shared, blocks),
        "ROWS": rows, "BACKWARD": backward, "FOR_GROUPS": for_groups, "POOLED": p.is_pooled,
        "LARGEST_DECAY": common.largest_decay(p), **common.types(p), "T_W0": p.w0_type,
    }  # fmt: skip
    if backward:
        parameters["T_STATE"] = "fp32"
    bind = {**common.given(p), "q": "r", **scan_ends(p, direction), **bind}
    grid = (*common.sequences_and_heads(p), -(-p.V // rows))
    return Step("gla_scan", "gla_scan", parameters, grid, bind, optional=("last", "checkpoints"))


def backward(p: Problem) -> Schedule:
    """Return the backward: a block per sequence and head."""
    common.check_heads(p, "chunked")
    threads, template, arch = _backward_threads(p.V), "gla_chunked_backward", None
    shared = _backward_shared_bytes(p.K, p.V, p.chunk_len)
    if _takes_warp_groups(p):
        shared, template, arch = _group_shared_bytes(p.K), "gla_group_backward", common.GROUP_ARCH
    blocks = p.gpu.resident_blocks(threads, _FEW_THREADS, shared)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": p.chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": common.blocks_of(p, "backward", blocks), "SHARED_BYTES": shared,
        **common.types(p, "T_STATE"), **p.op.backward_constants,  # states come as fp32 here
    }  # fmt: skip
    if template == "gla_chunked_backward":  # the other one is for no decay at all
        parameters["LARGEST_DECAY"] = common.largest_decay(p)
    bind = {**common.given(p), "q": "r", "dq": "dr", "framed": common.framed(p), **common.to_sequence_gradients(p)}
    step = Step(template, "gla_backward", parameters, (p.N, p.H, 1), bind, arch, optional=("grad_initial_state",))
    scratch = common.sequence_gradients(p)
    return Schedule((step,), common.backward_results(p), scratch=scratch, vectors=common.vectors(p))
