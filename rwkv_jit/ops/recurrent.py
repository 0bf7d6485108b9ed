"""The recurrent backend: fp32 kernels that walk over the tokens with the state in registers, on every GPU.

The geometry is which rectangle of the state each thread holds, and how many tokens a block stages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rwkv_jit import cuda, kernel, template, tensors
from rwkv_jit.ops.interface import Inputs, Launch, Options, Saved
from rwkv_jit.ops.layout import slots
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


# By the stem of the templates, `<stem>_recurrent_<direction>.cu`.
STAGING = {
    ("wkv7", "forward"): Staging(5, 3, 0),
    ("wkv7", "backward"): Staging(6, 5, 5),
    ("gla", "forward"): Staging(3, 2, 0),
    ("gla", "backward"): Staging(4, 3, 3),
}


class Variant(NamedTuple):
    """The templates of an op: their stem, what tells the op from others that take them, and what it does without."""

    stem: str
    constants: dict[str, Parameter] = {}
    of_backward: dict[str, Parameter] = {}  # those that only this direction has
    nulls: int = 0  # inputs that the templates take behind those that the op has

    @property
    def all_constants(self) -> dict[str, Parameter]:
        """Return the parameters that nobody can choose."""
        return self.constants | self.of_backward


# An input that an op does not have still has a type in the templates.
_NO_U: dict[str, Parameter] = {"BONUS": False, "T_U": "fp32"}
_NO_W: dict[str, Parameter] = {"DECAY": "none", "T_W": "fp32"}
OPS = {
    "wkv7": Variant("wkv7"),
    "wkv6": Variant("gla", {"BONUS": True}, {"CONSTANT_DECAY": False}),
    "wkv5": Variant("gla", {"BONUS": True}, {"CONSTANT_DECAY": True}),
    "gla": Variant("gla", _NO_U, {"CONSTANT_DECAY": False}, nulls=1),
    "linear_attention": Variant("gla", _NO_U | _NO_W, {"CONSTANT_DECAY": False}, nulls=2),
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
    staging = STAGING[OPS[op].stem, direction]

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
    """Return the template and parameters of one direction; `chosen` overrides the geometry."""
    of = OPS[op]
    parameters = geometry(op, direction, head_size, value_size, chunk_len, num_threads, few_heads)
    parameters.update({"HEAD_SIZE": head_size, "VALUE_SIZE": value_size, **types, **of.constants, **(chosen or {})})
    if direction == "backward":
        parameters.update(of.of_backward)
        parameters.pop("T_STATE", None)  # states come as fp32 there
    return kernel.Request(template.library(f"{of.stem}_recurrent_{direction}"), parameters, arch, also)


def nearest(request: kernel.Request, argument: str, value: int) -> int:
    """Return the legal value nearest to a refused one; a listed value was refused because it asks too much."""
    legal = VARIANTS[argument]
    if value not in legal:
        return int(min(legal, key=lambda each: abs(each - value)))
    stem, _, direction = request.template.name.split("_")  # which is the name of an op too
    sizes = int(request.parameters["HEAD_SIZE"]), int(request.parameters["VALUE_SIZE"])
    return min(value, int(geometry(stem, direction, *sizes)[argument.upper()]))


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: a state per head and interval, and for wkv7 sa_t = S_{t-1} a_t [B, T, H, V].

    Packed sequences fit whatever their lengths are. The backward would have to repeat the sums of sa.
    """
    batch, tokens, heads, value_size = inputs["v"].shape
    checkpoints = slots(inputs, packed, options.checkpoint_interval) * heads * value_size * inputs["r"].shape[3]
    if inputs.op != "wkv7":
        return Saved(checkpoints)
    return Saved(checkpoints + batch * tokens * heads * value_size, checkpoints)


def vector(x: Tensor) -> int:
    """Return how many elements of a row are read at once: four, where rows consist of fours."""
    return 4 if x.shape[-1] % 4 == 0 else 1


def strides_of_missing(inputs: Inputs) -> list[tuple[int, int, int]]:
    """Return strides for a decay that has no tokens: between heads alone, for one that is not there never used."""
    return [] if "w" in inputs.names[: len(inputs.streamed)] else [(0, 0, inputs["r"].shape[3])]


def launch(found: kernel.Kernel, direction: str, inputs: Inputs, options: Options) -> Launch:
    """Return how a kernel is launched: a block per sequence, head and block of value rows.

    The backward takes the row blocks one after another. A resident block owns a piece of scratch there, so there are
    no more blocks than fit on the device at once.
    """
    of, device, (tokens, heads, value_size) = OPS[inputs.op], inputs["v"].device.index, inputs["v"].shape[1:]
    entry = f"{of.stem}_{direction}"
    sizes, blocks = [tokens, heads], inputs.sequences * heads
    interval = min(options.checkpoint_interval, max(tokens, 1))  # none is longer than the tokens: scratch goes by it
    grid, scratch = (blocks, math.ceil(value_size / block_rows(found.parameters)), 1), None
    if direction == "backward":
        per_multiprocessor = cuda.driver().occupancyMaxActiveBlocksPerMultiprocessor(
            found.function(device, entry), int(found.parameters["NUM_THREADS"]), 0
        )
        blocks = min(blocks, per_multiprocessor * tensors.multiprocessors(device))
        per_block = _scratch_per_block(inputs, found.parameters, interval)
        sizes += [inputs.sequences, per_block]
        grid, scratch = (blocks, 1, 1), blocks * per_block
    constants = [*[struct.pack("q", size) for size in sizes], struct.pack("i", interval)]
    return Launch(
        entry, grid, 0, [*constants, struct.pack("f", options.scale)], scratch, takes_flags=True,
        takes_any_decay=True, nulls=of.nulls, strides=strides_of_missing(inputs),
    )  # fmt: skip


def _scratch_per_block(inputs: Inputs, parameters: Mapping[str, Parameter], interval: int) -> int:
    """Floats for E of every row block, the states at piece starts and the running sums over row blocks."""
    chunk_len, lanes = int(parameters["CHUNK_LEN"]), int(parameters["LANES_PER_ROW"])
    rows = block_rows(parameters)
    padded_head = 4 * lanes * math.ceil(inputs["r"].shape[3] / (4 * lanes))
    chunks = math.ceil(interval / chunk_len)
    pieces = chunks * (chunk_len // int(parameters["HELD_STATES"]))
    row_blocks = math.ceil(inputs["v"].shape[3] / rows)
    sums = len(inputs.streamed) - 1 if row_blocks > 1 else 0
    return (row_blocks + pieces) * rows * padded_head + chunks * chunk_len * sums * padded_head
