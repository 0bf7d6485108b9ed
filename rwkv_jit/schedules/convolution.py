"""The kernels of the short causal convolution; a token has the same result in any batch, and sums a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common, layers
from rwkv_jit.schedules.layer_table import CONVOLUTION as OPS
from rwkv_jit.schedules.layers import GATES, Given, Sequences
from rwkv_jit.schedules.problem import BYTES
from rwkv_jit.schedules.schedule import Schedule, Step, without

_ACCESS_BYTES = 16
_HALF_ACCESS_BYTES = 8  # where sums take registers too
_MOST_TAPS, _MOST_SUMS = 32, 16  # of a thread
_NUM_THREADS = 128
_UPDATE_THREADS = 64
_MANY_THREADS, _FEW_THREADS = 512, 384  # of a multiprocessor, for texts: each has 128 registers, or 168
_USUAL_WIDTH = 4  # up to which 128 are enough where texts have no state
# Of a run: so many tokens that those read before it do not weigh, unless blocks are few.
_MOST_RUN, _LEAST_RUN, _MANY_BLOCKS = 32, 8, 1024
_LEAST_BACKWARD_RUN = 16
_MOST_BLOCKS = 16  # of a multiprocessor, of the smallest GPUs
LEAST_WIDTH, MOST_WIDTH, MOST_STATE_LEN = 2, 8, 16


def forward(given: Given, texts: Sequences, activation: str) -> Schedule:
    """Return the launch of whole sequences; with packed ones `tokens` is that of all together."""
    parameters, slices = _cut(given, _vector(given, _MOST_TAPS), _NUM_THREADS, activation)
    parameters |= _of_texts(given, texts, parameters)
    most = max(given.rows * slices // _MANY_BLOCKS, _LEAST_RUN)
    grid, bind = _runs(given, texts, min(most, _MOST_RUN), slices)
    name = "layer_convolution"
    step = Step(name, name, parameters, grid, bind, overlaps=_overlaps(given))
    return Schedule((step,), given.results, vectors=_vectors("forward", given, parameters))


def backward(given: Given, texts: Sequences, activation: str, wanted: Sequence[str]) -> Schedule:
    """Return the launches for these gradients, by the names of inputs; `given` has all results with a "d" before."""
    most = _HALF_ACCESS_BYTES // BYTES[given.types["x"]]
    parameters, slices = _cut(given, min(_vector(given, _MOST_SUMS), most), _NUM_THREADS, activation)
    parameters |= _of_texts(given, texts, parameters)
    run_len = layers.rows_of_block(given, parameters, slices, _LEAST_BACKWARD_RUN)
    grid, bind = _runs(given, texts, run_len, slices)
    channels, width = given.sizes
    sums, scratch, places = list[Step](), dict[str, Any](), {"x": "dx", "initial_state": "dinitial_state"}
    for x, columns in (("weight", channels * width), ("bias", channels)):
        places[x] = f"d{x}_rows"
        if x in given.types:
            scratch[places[x]] = 4 * grid[0] * columns
            sums.append(common.sum_rows(places[x], f"d{x}", 1, grid[0], columns, given.results[f"d{x}"].dtype))
    absent = {place: None for x, place in places.items() if x not in given.types}
    name = "layer_convolution_backward"
    step = Step(name, name, parameters, grid, {**absent, **bind}, optional=tuple(places.values()))
    vectors = _vectors("backward", given, parameters)
    schedule = Schedule((step, *sums), given.results, scratch=scratch, vectors=vectors)
    unwanted = [result for result in given.results if result.removeprefix("d") not in wanted]
    return without(schedule, unwanted) if unwanted else schedule


def update(
    given: Given, rows: Sequences, state_len: int, channels_last: bool, activation: str, ring: bool = False
) -> Schedule:
    """Return the launch of an update: the pool is bound to its first slot."""
    held = given.sizes[1] if ring else state_len
    vector = _vector(given, _MOST_TAPS, held + 1, given.types)
    parameters, slices = _cut(given, vector, _UPDATE_THREADS, activation)
    parameters |= {
        "STATE_LEN": state_len, "CHANNELS_LAST": channels_last, "RING": ring, "INDEX_BYTES": rows.index_bytes,
        "T_STATE": given.types["conv_state"],
    }  # fmt: skip
    bind = {
        "tokens": rows.tokens, "slots": rows.slots, "slot_stride": rows.slot_stride, "null_index": rows.null_index,
    }  # fmt: skip
    name = "layer_convolution_update"
    step = Step(name, name, parameters, (rows.number, slices, 1), bind, overlaps=_overlaps(given))
    return Schedule((step,), given.results, vectors=_vectors("update", given, parameters))


def _vector(given: Given, most: int, columns: int = 0, accessed: Iterable[str] = ("x",)) -> int:
    """Return how many channels a thread has: those of an access, or fewer where registers have more for each."""
    channels, width = given.sizes
    vector = layers.vector_of(channels, given, *accessed)
    while vector > 1 and vector * max(width, columns) > max(most, width):
        vector //= 2
    return vector


def _cut(given: Given, vector: int, most_threads: int, activation: str) -> tuple[dict[str, Parameter], int]:
    """Return what all kernels are compiled for, and how many blocks share a token."""
    channels, width = given.sizes
    threads = min(most_threads, 32 * ceil(channels / (32 * vector)))
    parameters: dict[str, Parameter] = {
        "CHANNELS": channels, "WIDTH": width, "VECTOR": vector, "NUM_THREADS": threads,
        "HAS_BIAS": "bias" in given.types, "GATE": GATES.index(activation), "T_IO": given.types["x"],
        **layers.types_of(given, ("weight", "bias")),
    }  # fmt: skip
    return parameters, ceil(channels / (vector * threads))


def _of_texts(given: Given, texts: Sequences, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return what kernels of whole sequences are compiled for beside that."""
    has_state = "initial_state" in given.types
    threads = _FEW_THREADS if has_state or given.sizes[1] > _USUAL_WIDTH else _MANY_THREADS
    return {
        "HAS_STATE": has_state, "PACKED": texts.bound_bytes > 0, "BOUND_BYTES": texts.bound_bytes or 4,
        "BLOCKS_PER_SM": min(threads // int(parameters["NUM_THREADS"]), _MOST_BLOCKS),
    }  # fmt: skip


def _runs(given: Given, texts: Sequences, run_len: int, slices: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the grid of blocks that have up to `run_len` tokens, and what tells a block which."""
    run_len = min(run_len, texts.tokens)
    runs = ceil(texts.tokens / run_len)
    bind = {"tokens": texts.tokens, "texts": texts.number, "runs": runs, "run_len": run_len}
    return (given.rows // texts.tokens * runs, slices, 1), bind


def _vectors(direction: str, given: Given, parameters: Mapping[str, Parameter]) -> dict[str, int]:
    """Return how many neighbours of each input are read at once; of a sequence's state they are single."""
    there = [x for x in OPS[direction].inputs if x in given.types and x != "initial_state"]
    return {x: min(int(parameters["VECTOR"]), _ACCESS_BYTES // BYTES[given.types[x]]) for x in there}


def _overlaps(given: Given) -> bool:
    return given.gpu.number >= common.OVERLAPS_SINCE
