"""Products of a few rows with matrices in one launch: which columns blocks make, and of how many warps these are."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import ceil
from typing import Literal, NamedTuple, get_args

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules.common import MULTIPROCESSORS, OVERLAPS_SINCE
from rwkv_jit.schedules.layer_table import MOST_PRODUCTS
from rwkv_jit.schedules.layers import KINDS, Given, Options
from rwkv_jit.schedules.schedule import Schedule, Step

Layout = Literal["wide", "deep"]  # a matrix is [width, depth] in memory, as nn.Linear has it, or [depth, width]
FUNCTIONS = *KINDS, "silu"  # of sums, in the order of the numbers that kernels have for them
LAYOUTS: tuple[str, ...] = get_args(Layout)
ROWS = 32  # for which each weight is read once
LOW_RANK = 512  # a matrix with so few rows or columns is small enough to be read again for every 32 rows
_TILE_ROWS = 8  # of an instruction
_COLUMNS = {"wide": 16, "deep": 32}  # that a block makes of a matrix, of wide ones times its tiles
_STEP_DEPTH, _STEP_BYTES, _ROW_BYTES = 64, 2048, 1024  # of a step: of its weights of a tile, and of eight rows of x
_MOST_AHEAD = 4  # steps that a warp has under way
_LEAST_SHARES, _MOST_SHARES = 4, 16  # of the depth, as many warps
_LEAST_UNITS, _LEAST_LONG_UNITS = 0.8, 0.4  # for a multiprocessor; the latter where half of the depth is under way
_MOST_THREADS = {1: 1024, 2: 768}  # of a multiprocessor, by the tiles of columns and rows that registers are for
_NO_BLOCK = 2**31 - 1


class _Part(NamedTuple):
    """A product: its place in the call, the sizes of its matrix, and what is done with it."""

    place: int
    depth: int
    width: int
    function: str
    layout: str

    @property
    def is_whole(self) -> bool:
        """Return whether rows consist of whole accesses."""
        if self.layout == "wide":
            return self.depth % 8 == 0
        return self.depth % 4 == self.width % 4 == 0

    def blocks(self, tiles: int) -> int:
        """Return how many blocks make it."""
        return ceil(self.width / (_COLUMNS[self.layout] * (tiles if self.layout == "wide" else 1)))


def products(given: Given, options: Options) -> Schedule:
    """Return the launch of `products`: sizes are depth and width of each, kinds its function and its layout.

    How the depth is cut depends on the matrices alone, so that a row has the same result in any batch.
    """
    if not given.gpu.has_tensor_cores:
        raise UnsupportedConfigError(f"products: needs an architecture from sm_80 on, got {given.gpu.arch}")
    sizes, kinds = given.sizes, options.kinds
    count = len(kinds) // 2
    parts = [_Part(p, sizes[2 * p], sizes[2 * p + 1], kinds[2 * p], kinds[2 * p + 1]) for p in range(count)]
    # Blocks with much to read begin first.
    parts.sort(key=lambda part: part.depth * _COLUMNS[part.layout], reverse=True)
    row_tiles = min(1 << (ceil(given.rows / _TILE_ROWS) - 1).bit_length(), ROWS // _TILE_ROWS) if given.rows else 1
    cut = _cut(parts, given.rows, row_tiles, given.gpu)
    is_whole, threads = all(part.is_whole for part in parts), 32 * cut.warps
    most_threads = _most_threads(cut.tiles * row_tiles, given.gpu)
    shared_bytes = cut.ahead * cut.warps * _slot(cut.tiles, row_tiles)
    parameters: dict[str, Parameter] = {
        "T_IO": given.types["x0"], "TILES": cut.tiles, "ROW_TILES": row_tiles, "VECTOR": 8 if is_whole else 1,
        "NUM_THREADS": threads, "CLUSTER": cut.cluster, "AHEAD": cut.ahead, "SHARED_BYTES": shared_bytes,
        "BLOCKS_PER_SM": given.gpu.resident_blocks(threads, most_threads, shared_bytes),
    }  # fmt: skip
    firsts = [sum(part.blocks(cut.tiles) for part in parts[:p]) for p in range(count)]
    numbers = [FUNCTIONS.index(part.function) + 8 * LAYOUTS.index(part.layout) for part in parts]
    bind = {
        "places": _places([part.place for part in parts], given.types), "rows": given.rows,
        "sizes": (
            *_filled([part.depth for part in parts]), *_filled([part.width for part in parts]), *_filled(numbers),
        ),
        "firsts": (*_filled(firsts, _NO_BLOCK),),
    }  # fmt: skip
    blocks = cut.cluster * sum(part.blocks(cut.tiles) for part in parts)
    grid = blocks, ceil(given.rows / (_TILE_ROWS * row_tiles)), 1
    overlaps = given.gpu.number >= OVERLAPS_SINCE
    step = Step("layer_products", "layer_products", parameters, grid, bind, overlaps=overlaps)
    vectors = {f"{x}{part.place}": 4 + 4 * (part.layout == "wide") for part in parts for x in ("x", "weight")}
    return Schedule((step,), given.results, vectors=vectors if is_whole else {})


class _Cut(NamedTuple):
    """How blocks share a launch: tiles of columns of a unit, warps of a block, blocks of a unit, steps under way."""

    tiles: int
    warps: int
    cluster: int
    ahead: int


def _cut(parts: Sequence[_Part], rows: int, row_tiles: int, gpu: Gpu) -> _Cut:
    """Return how blocks share a launch. Among how many warps the depth is shared, matrices alone say."""
    multiprocessors = gpu.multiprocessors or MULTIPROCESSORS
    steps = ceil(max(part.depth for part in parts) / _STEP_DEPTH)
    shares = min(max(1 << (max(steps // _MOST_AHEAD, 1).bit_length() - 1), _LEAST_SHARES), _MOST_SHARES)
    is_wide = any(part.layout == "wide" for part in parts)

    def cut(tiles: int, cluster: int = 1) -> tuple[_Cut, float]:
        """Return one such cut, and how many units of it a multiprocessor has."""
        units, warps = sum(part.blocks(tiles) for part in parts) / multiprocessors, shares // cluster
        most = max(_most_threads(tiles * row_tiles, gpu) // (32 * warps), 1)
        together = most if rows > ROWS else min(max(ceil(units * cluster), 1), most)
        # An eighth is left to the L1 cache, through which columns of [depth, width] come.
        room = gpu.shared_per_multiprocessor * 7 // 8 // together
        ahead = 1 if rows > ROWS else min(max(room // (warps * _slot(tiles, row_tiles)), 1), _MOST_AHEAD)
        return _Cut(tiles, warps, cluster, ahead), units

    # Loads that are no whole accesses take more registers.
    for tiles in ((4, 2) if all(part.is_whole for part in parts) else (2,)) if is_wide else ():
        made, units = cut(tiles)
        has_room = shares * _slot(tiles, row_tiles) <= gpu.shared_limit
        least = _LEAST_LONG_UNITS if steps <= 2 * shares * made.ahead else _LEAST_UNITS
        if units >= least and has_room and 32 * shares <= _most_threads(tiles * row_tiles, gpu):
            return made
    if is_wide and row_tiles > 1 and shares == _MOST_SHARES and gpu.number >= OVERLAPS_SINCE:
        return cut(2, 2)[0]  # twice the columns read rows of x half as often
    return cut(1)[0]


def _slot(tiles: int, row_tiles: int) -> int:
    """Return the bytes of a step of a warp."""
    return tiles * _STEP_BYTES + row_tiles * _ROW_BYTES


def _most_threads(tiles: int, gpu: Gpu) -> int:
    """Return of how many threads a multiprocessor has the registers, by the tiles of columns and rows."""
    return _MOST_THREADS.get(tiles, gpu.many_threads)


def _places(order: Sequence[int], present: Container[str]) -> tuple[str, ...]:
    """Return the names of all tensors as the kernel takes their addresses, those of absent parts behind."""
    places = [*order, *range(len(order), MOST_PRODUCTS)]
    rows = [max(q for q in range(p + 1) if f"x{q}" in present) for p in order]  # of parts that share x, the first
    others = [f"{x}{p}" for x in ("weight", "bias", "gate", "add", "y") for p in places]
    return (*(f"x{p}" for p in (*rows, *places[len(order) :])), *others)


def _filled(numbers: Sequence[int], absent: int = 0) -> list[int]:
    return [*numbers, *([absent] * (MOST_PRODUCTS - len(numbers)))]
