"""Kimi Delta Attention on the tensor cores: 64 tokens at once, in blocks of warp groups that hold a head each.

Key heads may be fewer than value heads. Any decay is right.
"""

from __future__ import annotations

from collections.abc import Callable

from rwkv_jit.algorithms import parts
from rwkv_jit.algorithms.parts import Case, Obstacle
from rwkv_jit.gpu import Gpu
from rwkv_jit.problem import BYTES, LARGEST_DECAY, Problem
from rwkv_jit.schedule import Schedule, Step
from rwkv_jit.template import Parameter

CHUNK_LEN = 64
HEAD_SIZE = 128
_THREADS = 512
_TILE = 2 * 64 * 64  # bytes


def why_not(case: Case, gpu: Callable[[], Gpu]) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is asked for where all else is right."""
    obstacle = parts.obstacle(case, gpu, HEAD_SIZE, (CHUNK_LEN,), str(CHUNK_LEN), holds_heads=True)
    if obstacle is not None:
        return obstacle
    if (case.head_size, case.value_size) != (HEAD_SIZE, HEAD_SIZE):
        return "takes head sizes of 128, got {} and {} for v", case.head_size, case.value_size
    there = gpu()
    return None if there.has_warp_groups else ("needs sm_90, got {}", there.arch)


def shared_bytes(storage: str) -> int:
    """Return the size of the forward's Smem where g has this type; a multiple of 1 KB."""
    operands, matrices, values, rows = 4 * 2 * _TILE, 2 * _TILE, 4 * _TILE, 4 * _TILE
    gates = BYTES[storage] * CHUNK_LEN * HEAD_SIZE
    work = 4 * 2 * 128 * (16 + 8)  # tiles of levels in a block of 16 tokens; as much as for blocks and halves
    factors = 2 * (4 * CHUNK_LEN + 2 * HEAD_SIZE) + HEAD_SIZE
    rest = 4 * (4 * 10 * 32 * 4 + 4 * HEAD_SIZE + factors) + 3 * 8
    size = operands + matrices + values + rows + gates + work + rest
    return -(-size // 1024) * 1024


def forward(p: Problem, lower_bound: float) -> Schedule:
    """Return the forward; a bound of log-decays counts where there is one."""
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": _THREADS, "GROUP": p.H // p.G,
        "SHARED_BYTES": shared_bytes(p.types["w"]), "LARGEST_DECAY": LARGEST_DECAY[p.types["v"]], **parts.types(p),
    }  # fmt: skip
    absent = {name: None for name in ("a_log", "dt_bias") if name not in p.op.inputs}
    given = {**parts.given(p), "lower_bound": lower_bound, **absent}
    step = Step("channel_decay_group_forward", "channel_decay_forward", parameters, (p.N, p.H, 1), given, "sm_90a")
    return Schedule((step,), parts.forward_results(p), {}, vectors=vectors(p))


def vectors(p: Problem) -> dict[str, int]:
    """Return how many neighbours of each input are read at once; what heads have one of is read alone."""
    streamed = {name: 16 // BYTES[p.types[name]] for name in ("r", "k", "v", "w")}
    return {**dict.fromkeys(p.op.inputs, 1), **streamed}
