"""Products of a few rows with matrices in one launch: which columns blocks make, and of how many warps these are."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import ceil
from typing import Literal, NamedTuple, get_args

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules.common import MULTIPROCESSORS, OVERLAPS_SINCE
from rwkv_jit.schedules.layer_table import MOST_PRODUCTS
from rwkv_jit.schedules.layers import KINDS, Given, Options
from rwkv_jit.schedules.schedule import Schedule, Step

Layout = Literal["wide", "deep"]  # a matrix is [width, depth] in memory, as nn.Linear has it, or [depth, width]
FUNCTIONS = *KINDS, "silu"  # of sums, in the order of the numbers that kernels have for them
LAYOUTS: tuple[str, ...] = get_args(Layout)
ROWS = 32  # for which each weight is read once
_TILE_ROWS = 8  # of an instruction
# Columns that a block makes: of wide matrices twice as many where rows are several, or blocks many.
_COLUMNS = {"wide": 16, "deep": 32}
_FEW_ROWS = 2
_WARP_DEPTH = 128  # that a warp reads at once
_RESIDENT = 3  # blocks of the usual warps that a multiprocessor has room for
_LEAST_WARPS, _USUAL_WARPS, _MOST_WARPS = 4, 8, 16
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
    count, multiprocessors = len(kinds) // 2, given.gpu.multiprocessors or MULTIPROCESSORS
    parts = [_Part(p, sizes[2 * p], sizes[2 * p + 1], kinds[2 * p], kinds[2 * p + 1]) for p in range(count)]
    # Blocks with much to read begin first.
    parts.sort(key=lambda part: part.depth * _COLUMNS[part.layout], reverse=True)
    narrow, wide = (sum(part.blocks(tiles) for part in parts) for tiles in (1, 2))
    # So that blocks run all at once, as the last ones alone would not keep the memory busy.
    are_many = given.rows > _FEW_ROWS or narrow > _RESIDENT * multiprocessors
    tiles = 2 if are_many and wide >= multiprocessors else 1
    # Where a multiprocessor has one block, that has to have enough under way alone.
    most = _MOST_WARPS if narrow <= multiprocessors else _USUAL_WARPS
    depth = max(part.depth for part in parts)
    warps = min(max(1 << (ceil(depth / _WARP_DEPTH).bit_length() - 1), _LEAST_WARPS), most)
    is_whole = all(part.is_whole for part in parts)
    row_tiles = min(1 << (ceil(given.rows / _TILE_ROWS) - 1).bit_length(), ROWS // _TILE_ROWS) if given.rows else 1
    parameters: dict[str, Parameter] = {
        "T_IO": given.types["x0"], "TILES": tiles, "ROW_TILES": row_tiles, "VECTOR": 8 if is_whole else 1,
        "NUM_THREADS": 32 * warps,
    }  # fmt: skip
    firsts = [sum(part.blocks(tiles) for part in parts[:p]) for p in range(count)]
    numbers = [FUNCTIONS.index(part.function) + 8 * LAYOUTS.index(part.layout) for part in parts]
    bind = {
        "places": _places([part.place for part in parts], given.types), "rows": given.rows,
        "sizes": (
            *_filled([part.depth for part in parts]), *_filled([part.width for part in parts]), *_filled(numbers),
        ),
        "firsts": (*_filled(firsts, _NO_BLOCK),),
    }  # fmt: skip
    grid = wide if tiles == 2 else narrow, ceil(given.rows / (_TILE_ROWS * row_tiles)), 1
    overlaps = given.gpu.number >= OVERLAPS_SINCE
    step = Step("layer_products", "layer_products", parameters, grid, bind, overlaps=overlaps)
    vectors = {f"{x}{part.place}": 4 + 4 * (part.layout == "wide") for part in parts for x in ("x", "weight")}
    return Schedule((step,), given.results, vectors=vectors if is_whole else {})


def _places(order: Sequence[int], present: Container[str]) -> tuple[str, ...]:
    """Return the names of all tensors as the kernel takes their addresses, those of absent parts behind."""
    places = [*order, *range(len(order), MOST_PRODUCTS)]
    rows = [max(q for q in range(p + 1) if f"x{q}" in present) for p in order]  # of parts that share x, the first
    others = [f"{x}{p}" for x in ("weight", "bias", "gate", "add", "y") for p in places]
    return (*(f"x{p}" for p in (*rows, *places[len(order) :])), *others)


def _filled(numbers: Sequence[int], absent: int = 0) -> list[int]:
    return [*numbers, *([absent] * (MOST_PRODUCTS - len(numbers)))]
