"""The kernels of the short causal convolution; a token has the same result in any batch, and sums a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import layers
from rwkv_jit.schedules.common import ACCESS_BYTES, MOST_BLOCKS, OVERLAPS_SINCE
from rwkv_jit.schedules.layer_gradients import BACKWARDS
from rwkv_jit.schedules.layer_table import CONVOLUTION, CONVOLUTION_UPDATE
from rwkv_jit.schedules.layers import GATES, Given, Options, Sequences
from rwkv_jit.schedules.problem import BYTES, Op
from rwkv_jit.schedules.schedule import Schedule, Step

_HALF_ACCESS_BYTES = 8  # where sums take registers too
_MOST_TAPS, _MOST_SUMS = 32, 16  # of a thread
_NUM_THREADS = 128
_UPDATE_THREADS = 64
_MANY_THREADS, _FEW_THREADS = 512, 384  # of a multiprocessor, for texts: each has 128 registers, or 168
_USUAL_WIDTH = 4  # up to which 128 are enough where texts have no state
# Of a run: so many tokens that those read before it do not weigh, unless blocks are few.
_MOST_RUN, _LEAST_RUN, _MANY_BLOCKS = 32, 8, 1024
_LEAST_BACKWARD_RUN = 16
LEAST_WIDTH, MOST_WIDTH, MOST_STATE_LEN = 2, 8, 16


def forward(given: Given, options: Options) -> Schedule:
    """Return the launch of whole sequences; with packed ones `tokens` is that of all together."""
    (activation,), texts = options.kinds, options.texts
    parameters, slices = _cut(given, _vector(given, _MOST_TAPS), _NUM_THREADS, activation)
    parameters |= _of_texts(given, texts, parameters)
    most = max(given.rows * slices // _MANY_BLOCKS, _LEAST_RUN)
    grid, bind = _runs(given, texts, min(most, _MOST_RUN), slices)
    name = "layer_convolution"
    step = Step(name, name, parameters, grid, bind, overlaps=given.gpu.number >= OVERLAPS_SINCE)
    return Schedule((step,), given.results, vectors=_vectors(CONVOLUTION, given, parameters))


def backward(given: Given, options: Options) -> Schedule:
    """Return the launch of all gradients; `given` has all results with a "d" before."""
    (activation,), texts = options.kinds, options.texts
    most = _HALF_ACCESS_BYTES // BYTES[given.types["x"]]
    parameters, slices = _cut(given, min(_vector(given, _MOST_SUMS), most), _NUM_THREADS, activation)
    parameters |= _of_texts(given, texts, parameters)
    run_len = layers.rows_of_block(given, parameters, slices, _LEAST_BACKWARD_RUN)
    grid, bind = _runs(given, texts, run_len, slices)
    channels, width = given.sizes
    columns, places = {"weight": channels * width, "bias": channels}, {"x": "dx", "initial_state": "dinitial_state"}
    scratch = {f"d{x}_rows": 4 * grid[0] * count for x, count in columns.items() if x in given.types}
    places |= {x: f"d{x}_rows" for x in columns}
    absent = {place: None for x, place in places.items() if x not in given.types}
    name = "layer_convolution_backward"
    step = Step(name, name, parameters, grid, {**absent, **bind}, optional=tuple(places.values()))
    vectors = _vectors(BACKWARDS[CONVOLUTION.name], given, parameters)
    return Schedule((step,), given.results, scratch=scratch, vectors=vectors)


def update(given: Given, options: Options) -> Schedule:
    """Return the launch of an update: the pool is bound to its first slot."""
    (activation,), rows, width = options.kinds, options.texts, given.sizes[1]
    state_len = rows.state_len or width - 1
    held = width if rows.ring else state_len
    vector = _vector(given, _MOST_TAPS, held + 1, given.types)
    parameters, slices = _cut(given, vector, _UPDATE_THREADS, activation)
    parameters |= {
        "STATE_LEN": state_len, "CHANNELS_LAST": rows.channels_last, "RING": rows.ring,
        "INDEX_BYTES": rows.index_bytes, "T_STATE": given.types["conv_state"],
    }  # fmt: skip
    bind = {
        "tokens": rows.tokens, "slots": rows.slots, "slot_stride": rows.slot_stride, "null_index": rows.null_index,
    }  # fmt: skip
    name, grid = "layer_convolution_update", (rows.number, slices, 1)
    step = Step(name, name, parameters, grid, bind, overlaps=given.gpu.number >= OVERLAPS_SINCE)
    return Schedule((step,), given.results, vectors=_vectors(CONVOLUTION_UPDATE, given, parameters))


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
        "BLOCKS_PER_SM": min(threads // int(parameters["NUM_THREADS"]), MOST_BLOCKS),
    }  # fmt: skip


def _runs(given: Given, texts: Sequences, run_len: int, slices: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the grid of blocks that have up to `run_len` tokens, and what tells a block which."""
    run_len = min(run_len, texts.tokens)
    runs = ceil(texts.tokens / run_len)
    bind = {"tokens": texts.tokens, "texts": texts.number, "runs": runs, "run_len": run_len}
    return (given.rows // texts.tokens * runs, slices, 1), bind


def _vectors(op: Op, given: Given, parameters: Mapping[str, Parameter]) -> dict[str, int]:
    """Return how many neighbours of each input are read at once; of a sequence's state they are single."""
    there = [x for x in op.inputs if x in given.types and x != "initial_state"]
    return {x: min(int(parameters["VECTOR"]), ACCESS_BYTES // BYTES[given.types[x]]) for x in there}
