"""Which rectangle of the state each thread of a recurrent kernel holds, and how many tokens a block stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rwkv_jit.template import Parameter

# What the templates accept. Tests compile a sample of the product; errors name the nearest value.
VARIANTS: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "fp16", "bf16"),
    "decay": ("raw", "sigmoid", "log", "direct"),
    "state_layout": ("vk", "kv"),
    "chunk_len": (1, 2, 4, 8, 16),
    "num_threads": (32, 64, 128, 256),
}
SHARED_LIMIT = 48 * 1024  # what every GPU gives a block without asking


class Staging(NamedTuple):
    """Floats of shared memory per token and key channel, per token and value row, per thread and column."""

    keys: int
    values: int
    sums: int


STAGING = {
    ("wkv7", "forward"): Staging(5, 3, 0),
    ("wkv7", "backward"): Staging(6, 5, 5),
    ("wkv6", "forward"): Staging(3, 2, 0),
    ("wkv6", "backward"): Staging(4, 3, 3),
}


def _columns(head_size: int, lanes: int) -> int:
    return 4 * math.ceil(head_size / (4 * lanes))


def _lanes(head_size: int, ideal_columns: int) -> int:
    """Return the lanes per row with the least padding; among equals the columns per thread nearest the ideal."""
    choices = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes == 32 or _columns(head_size, lanes) <= 16]
    return min(choices, key=lambda n: (n * _columns(head_size, n), abs(_columns(head_size, n) - ideal_columns)))


def _floor_power(value: float) -> int:
    return 1 << (max(int(value), 1).bit_length() - 1)


def _ceil_power(value: float) -> int:
    return 1 << (max(math.ceil(value), 1) - 1).bit_length()


def geometry(
    op: str,
    direction: str,
    head_size: int,
    value_size: int,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    few_heads: bool = False,
) -> dict[str, Parameter]:
    """Return CHUNK_LEN, NUM_THREADS, LANES_PER_ROW, ROWS_PER_THREAD and, for the backward, HELD_STATES.

    A large rectangle reads shared memory least per multiply-add. With `few_heads` the forward takes small ones
    instead, so that there are blocks enough. The lanes depend on the head size alone: sums are added in the same
    order whatever else is chosen.
    """
    forward = direction == "forward"
    lanes = _lanes(head_size, ideal_columns=8 if forward else 4)
    columns = _columns(head_size, lanes)
    # The backward keeps HELD_STATES + 1 rectangles in registers, the forward one.
    most_rows, most_elements = (2 if few_heads else 8, 64) if forward else (8, 32)
    most_rows = min(most_rows, _floor_power(most_elements / columns))
    staging = STAGING[op, direction]

    def rows(threads: int) -> int:
        """Rows per thread: no more than a block of so many threads needs for all value rows."""
        return min(most_rows, _ceil_power(value_size * lanes / threads))

    def shared_bytes(chunk: int, threads: int) -> int:
        staged = staging.keys * lanes * columns + staging.values * threads // lanes * rows(threads)
        return 4 * (chunk * staged + staging.sums * threads * columns)

    enough = _ceil_power(value_size / most_rows) * lanes
    threads = num_threads or min(max(enough, 32), 256 if forward and not few_heads else 128)
    while num_threads is None and threads > 32 and shared_bytes(1, threads) > SHARED_LIMIT:
        threads //= 2
    fitting = [chunk for chunk in (8, 4, 2, 1) if shared_bytes(chunk, threads) <= SHARED_LIMIT]
    chosen: dict[str, Parameter] = {
        "CHUNK_LEN": chunk_len or (fitting or [1])[0],
        "NUM_THREADS": threads,
        "LANES_PER_ROW": lanes,
        "ROWS_PER_THREAD": rows(threads),
    }
    if not forward:
        chosen["HELD_STATES"] = min(int(chosen["CHUNK_LEN"]), 4)
    return chosen


def block_rows(parameters: Mapping[str, Parameter]) -> int:
    """Return how many value rows a block holds at once."""
    return int(parameters["NUM_THREADS"]) // int(parameters["LANES_PER_ROW"]) * int(parameters["ROWS_PER_THREAD"])


def nearest(name: str, value: int, default: int) -> int:
    """Return the legal value nearest to a refused one; a listed value was refused because it asks too much."""
    legal = VARIANTS[name]
    if value in legal:
        return min(value, default)
    return int(min(legal, key=lambda each: abs(each - value)))
