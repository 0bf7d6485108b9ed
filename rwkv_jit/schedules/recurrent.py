"""The recurrent kernels: fp32, token by token with the state in registers, on every GPU.

The geometry is which rectangle of the state each thread holds, and how many tokens a block stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule, Step

# What the templates accept. Tests compile a sample of the product; errors name the nearest value.
VARIANTS: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "fp16", "bf16"),
    "decay": ("raw", "sigmoid", "log", "direct"),
    "state_layout": ("vk", "kv"),
    "chunk_len": (1, 2, 4, 8, 16),
    "num_threads": (32, 64, 128, 256),
}
_SHARED_LIMIT = 48 * 1024  # what every GPU gives a block without asking


class _Staging(NamedTuple):
    """Floats of shared memory per token and key channel, per token and value row, per thread and column."""

    keys: int
    values: int
    sums: int


# By the stem of the templates, `<stem>_recurrent_<direction>.cu`.
_STAGING = {
    ("wkv7", "forward"): _Staging(5, 3, 0),
    ("wkv7", "backward"): _Staging(6, 5, 5),
    ("gla", "forward"): _Staging(3, 2, 0),
    ("gla", "backward"): _Staging(4, 3, 3),
}


def _columns(head_size: int, lanes: int) -> int:
    return 4 * math.ceil(head_size / (4 * lanes))


def _lanes(head_size: int, ideal_columns: int) -> int:
    """Return the lanes per row with the least padding; among equals the columns per thread nearest the ideal."""
    legal = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes == 32 or _columns(head_size, lanes) <= 16]
    return min(legal, key=lambda n: (n * _columns(head_size, n), abs(_columns(head_size, n) - ideal_columns)))


def geometry(
    stem: str, direction: str, head_size: int, value_size: int, chunk_len: int = 0, num_threads: int | None = None,
    few_heads: bool = False,
) -> dict[str, Parameter]:  # fmt: skip
    """Return CHUNK_LEN, NUM_THREADS, LANES_PER_ROW, ROWS_PER_THREAD and, for the backward, HELD_STATES.

    A large rectangle reads shared memory least; with `few_heads` small ones make enough blocks. The lanes depend on the
    head size alone: sums have one order whatever else is chosen.
    """
    forward = direction == "forward"
    lanes = _lanes(head_size, ideal_columns=8 if forward else 4)
    columns = _columns(head_size, lanes)
    # The backward keeps HELD_STATES + 1 rectangles in registers, the forward one.
    most_rows, most_elements = (2 if few_heads else 8, 64) if forward else (8, 32)
    most_rows = min(most_rows, 1 << (max(most_elements // columns, 1).bit_length() - 1))
    staging = _STAGING[stem, direction]

    def rows(threads: int) -> int:
        """Rows per thread: no more than a block of so many threads needs for all value rows."""
        return min(most_rows, common.power(value_size * lanes / threads))

    def shared_bytes(chunk: int, threads: int) -> int:
        staged = staging.keys * lanes * columns + staging.values * threads // lanes * rows(threads)
        return 4 * (chunk * staged + staging.sums * threads * columns)

    enough = common.power(value_size / most_rows) * lanes
    threads = num_threads or min(max(enough, 32), 256 if forward and not few_heads else 128)
    while num_threads is None and threads > 32 and shared_bytes(1, threads) > _SHARED_LIMIT:
        threads //= 2
    fitting = [chunk for chunk in (8, 4, 2, 1) if shared_bytes(chunk, threads) <= _SHARED_LIMIT]
    cut: dict[str, Parameter] = {
        "CHUNK_LEN": chunk_len or (fitting or [1])[0],
        "NUM_THREADS": threads,
        "LANES_PER_ROW": lanes,
        "ROWS_PER_THREAD": rows(threads),
    }
    if not forward:
        cut["HELD_STATES"] = min(int(cut["CHUNK_LEN"]), 4)
    return cut


def nearest(step: Step, argument: str, value: int) -> int:
    """Return the legal value nearest to a refused one; a listed value was refused because it asks too much."""
    legal = VARIANTS[argument]
    if value not in legal:
        return int(min(legal, key=lambda other: abs(other - value)))
    stem, _, direction = str(step.template).split("_")
    sizes = int(step.parameters["HEAD_SIZE"]), int(step.parameters["VALUE_SIZE"])
    return min(value, int(geometry(stem, direction, *sizes)[argument.upper()]))


def _block_rows(cut: Mapping[str, Parameter]) -> int:
    """Return how many value rows a block holds at once; one of too few threads for a row is refused by the template."""
    return max(int(cut["NUM_THREADS"]) // int(cut["LANES_PER_ROW"]), 1) * int(cut["ROWS_PER_THREAD"])


def _interval(p: Problem) -> Any:
    return min(p.checkpoint_interval, max(p.T, 1))  # none is longer than the tokens: scratch goes by it


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: a state per head and interval; of wkv7 the sums sa [B, T, H, V] too."""
    checkpoints = {"checkpoints": 4 * p.slots(p.checkpoint_interval) * p.H * p.V * p.K}
    return {**checkpoints, "sa": 4 * p.B * p.T * p.H * p.V} if p.op.family == "delta" else checkpoints


def forward(p: Problem) -> Schedule:
    """Return the forward: a block per sequence, head and block of value rows."""
    left = kept(p) if p.training else {}
    # Measured on an H200: below one state of 64 x 64 per multiprocessor, more and smaller blocks are faster.
    multiprocessors = p.multiprocessors
    states = p.N * p.H * p.K * p.V // 64**2
    few_heads = multiprocessors is not None and states < multiprocessors
    cut = geometry(p.op.stem, "forward", p.K, p.V, p.chunk_len, p.num_threads, few_heads)
    parameters = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, **cut, "POOLED": p.is_pooled, **common.types(p), "T_W0": p.w0_type,
    }  # fmt: skip
    grid = (common.launched(p) * p.H, -(-p.V // _block_rows(cut)), 1)
    name = p.op.stem
    bind = {"checkpoints": None, "sa": None, **{piece: piece for piece in left}}
    step = Step(
        f"{name}_recurrent_forward", f"{name}_forward", parameters, grid,
        {**common.given(p), "interval": _interval(p), **bind},
    )  # fmt: skip
    return Schedule((step,), common.forward_results(p), left, vectors=_vectors(p))


def backward(p: Problem) -> Schedule:
    """Return the backward: a block takes row blocks of a head in turn, with a piece of scratch while resident."""
    name = p.op.stem
    cut = geometry(name, "backward", p.K, p.V, p.chunk_len, p.num_threads)
    # States come as fp32 here.
    parameters = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, **cut, **common.types(p, "T_STATE"), **p.op.backward_constants
    }  # fmt: skip
    interval = _interval(p)
    floats = _scratch_per_block(p, cut, interval)
    given = {**common.given(p), **common.to_sequence_gradients(p)}
    # What a block does not read is called by the name of all heads.
    names = [f"{prefix}{name}" for prefix in ("", "d") for name in sorted({*p.op.inputs, "w", "u"})]
    whole = {f"{x}_all": given.get(x, x) for x in (*names, "dy", "sa", "scratch")}
    numbers = {"interval": interval, "scratch_stride": floats}
    step = Step(
        f"{name}_recurrent_backward", f"{name}_backward", parameters, (p.N * p.H, 1, 1),
        {**given, **whole, **numbers}, is_resident=True, per_block=("scratch", 4 * floats),
        optional=("grad_initial_state",),
    )  # fmt: skip
    return Schedule((step,), common.backward_results(p), scratch=common.sequence_gradients(p), vectors=_vectors(p))


def _vectors(p: Problem) -> dict[str, int]:
    """Return how many elements of a row are read at once: four, where rows consist of fours."""
    widths = {name: 4 if getattr(p, dims[-1]) % 4 == 0 else 1 for name, dims in p.op.inputs.items()}
    return {**widths, "dy": widths["v"]}


def _scratch_per_block(p: Problem, cut: Mapping[str, Parameter], interval: int) -> Any:
    """Floats for E of every row block, the states at piece starts and the running sums over row blocks."""
    chunk_len, lanes, rows = int(cut["CHUNK_LEN"]), int(cut["LANES_PER_ROW"]), _block_rows(cut)
    padded_head = 4 * lanes * math.ceil(p.K / (4 * lanes))
    chunks = math.ceil(interval / chunk_len)
    pieces = chunks * (chunk_len // int(cut["HELD_STATES"]))
    row_blocks = math.ceil(p.V / rows)
    sums = len(p.op.streamed) - 1 if row_blocks > 1 else 0
    return (row_blocks + pieces) * rows * padded_head + chunks * chunk_len * sums * padded_head
