"""Ops with one decay for a head on the tensor cores: 16 or 32 tokens at once, in a block that holds a head.

Key heads may be fewer than value heads. Nothing leaves a range whatever the decays are: they stand between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from rwkv_jit.algorithms import parts
from rwkv_jit.algorithms.parts import LARGEST_HEAD, Case, Obstacle, padded
from rwkv_jit.gpu import Gpu
from rwkv_jit.problem import Problem
from rwkv_jit.schedule import Schedule, Step
from rwkv_jit.template import Parameter

CHUNK_LENS: tuple[int, ...] = (32, 16)
_LEAST_ROWS = 32  # of a block
_THREADS = 256  # that registers shall leave room for on a multiprocessor


def why_not(case: Case, gpu: Callable[[], Gpu]) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is asked for where all else is right."""
    obstacle = parts.obstacle(case, gpu, LARGEST_HEAD, CHUNK_LENS, "16 or 32", holds_heads=True)
    if obstacle is not None:
        return obstacle
    there = gpu()
    chunk_len = case.chunk_len or default_chunk_len(case, there)
    return parts.shared_obstacle(
        case, there, chunk_len, shared_bytes(case.head_size, padded(case.value_size), chunk_len)
    )


def shared_bytes(head_size: int, rows: int, chunk_len: int) -> int:
    """Return the size of the forward's Smem, of a block of value rows. Rows of tiles are 8 elements longer."""
    key_tile, value_tile, token_tile = (2 * chunk_len * (width + 8) for width in (padded(head_size), rows, chunk_len))
    solver = max(token_tile, chunk_len // 16 * 4 * 16 * 20)
    work = solver + token_tile + 4 * (7 * chunk_len + 1)
    return 3 * (2 * key_tile + value_tile) + 2 * (-(-work // 16) * 16)


def default_chunk_len(case: Case, gpu: Gpu) -> int:
    """Return the longest chunk that fits."""
    sizes = case.head_size, padded(case.value_size)
    fitting = [each for each in CHUNK_LENS if shared_bytes(*sizes, each) <= gpu.shared_limit]
    return fitting[0] if fitting else CHUNK_LENS[-1]


def rows_of_block(value_size: int, blocks: int, multiprocessors: int | None) -> int:
    """Return the value rows of a block: all of a head's, or fewer where there are few heads."""
    rows = padded(value_size)
    if multiprocessors is not None:
        while rows % (2 * _LEAST_ROWS) == 0 and 2 * blocks * padded(value_size) // rows <= multiprocessors:
            rows //= 2
    return rows


def forward(p: Problem) -> Schedule:
    """Return the forward: a block for each sequence, value head and part of its rows."""
    rows = rows_of_block(p.V, p.N * p.H, p.multiprocessors)
    threads = max(rows, 128 if p.K > 64 else 64)
    shared = shared_bytes(p.K, rows, p.chunk_len)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "ROWS": rows, "CHUNK_LEN": p.chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": p.gpu.resident_blocks(threads, _THREADS, shared), "SHARED_BYTES": shared,
        "GROUP": p.H // p.G, **parts.types(p),
    }  # fmt: skip
    absent = {name: None for name in ("w", "beta", "own") if name not in p.op.inputs}
    name, grid = "head_decay_forward", (*parts.sequences_and_heads(p), -(-p.V // rows))
    step = Step(name, name, parameters, grid, {**parts.given(p), **absent})
    return Schedule((step,), parts.forward_results(p), vectors=vectors(p))


def vectors(p: Problem) -> dict[str, int]:
    """Return how many neighbours of each input are read at once; what heads have one of is read alone."""
    return {**parts.vectors(p), "w": 1, "beta": 1}
