"""The kernels of the small work of a layer: how each is cut, and its launch.

What a call does not have is null. The number of rows decides nothing: a row has the same result in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple, get_args

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules.common import ACCESS_BYTES, MOST_BLOCKS, MULTIPROCESSORS, OVERLAPS_SINCE
from rwkv_jit.schedules.layer_table import MOST_MIXES, OPS
from rwkv_jit.schedules.legal import BetaMap, Gate, Kind, Norm, RateMap
from rwkv_jit.schedules.problem import BYTES, Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step

_ROW_THREADS = 512  # at most of a row, so that a thread has registers for a piece of each mix
_HEAD_THREADS = 64
_ELEMENT_THREADS = 256
_SHIFT_THREADS = 128
_SHIFT_ROWS = 8  # tokens whose mixes a thread makes
# Of norms with mixes: so many tokens of a block that the one it norms in vain does not weigh, unless blocks are few.
_MOST_NORM_ROWS = 16
_LEAST_NORM_BLOCKS = 512
KINDS: tuple[str, ...] = get_args(Kind)
GATES: tuple[str, ...] = get_args(Gate)
NORMS: tuple[str, ...] = get_args(Norm)
BETA_MAPS: tuple[str, ...] = get_args(BetaMap)
RATE_MAPS: tuple[str, ...] = get_args(RateMap)
MOST_PARTS = 31  # whose kinds a number of 64 bits says


class Given(NamedTuple):
    """What a call has."""

    gpu: Gpu  # what kernels are chosen and compiled for
    types: Mapping[str, str]  # the storage types of the inputs that are given, and of the pool, by name
    rows: int  # tokens of all sequences together; of `activate` the parts
    # (channels, mixes), or (heads, head size), or of `activate` the elements of a part; of operands of delta rules
    # (heads of keys, head size, value heads, as how many such heads a key head stands in memory)
    sizes: tuple[int, ...]
    alignment: int = ACCESS_BYTES  # bytes that all addresses of what is written are a multiple of, up to 16
    results: Mapping[str, Result] = {}  # what the call makes


class Sequences(NamedTuple):
    """The sequences of ops that mix tokens, and the pool that has the tokens before each."""

    number: int
    tokens: int = 1  # of each sequence
    bound_bytes: int = 0  # of the numbers in cu_seqlens: 4 or 8; 0 where all sequences have as many tokens
    slots: int = 1  # of the pool
    slot_stride: int = 0  # elements from one slot to the next
    index_bytes: int = 4  # of the indices: 4 or 8
    null_index: int = -1  # a slot at or below it is none
    state_len: int | None = None  # tokens of a slot of a convolution; by default one less than there are taps
    channels_last: bool = False  # the channels of such a slot are neighbours in memory
    ring: bool = False  # such slots are ring buffers


class Options(NamedTuple):
    """What a call chooses beside its tensors."""

    eps: float = 0.0
    kinds: tuple[str, ...] = ()
    texts: Sequences = Sequences(0)
    in_place: bool = False


def problem_of(op: Op, given: Given) -> Problem:
    """Return the problem of a direction of an op, as plans want one."""
    forward = OPS.get(op.name.removesuffix("_backward"))
    if forward is None:  # a convolution, whose plans need no sizes
        return Problem(op, given.gpu, given.types)
    sizes: dict[str, Any] = {}
    letters = "HK" if "NHK" in forward.inputs.values() else "CG"
    sizes.update(zip(letters, given.sizes, strict=False))
    return Problem(op, given.gpu, given.types, **sizes)


# What switches are called as constants of kernels, and the values that these number; others are numbers and types.
_SWITCHES: tuple[tuple[str, str, Sequence[Any]], ...] = (
    ("mixes", "MIXES", ()), ("taps", "WIDTH", ()), ("mixed", "T_MIXED", ()), ("gate", "GATE", GATES),
    ("activation", "GATE", GATES), ("norm", "CENTERED", NORMS[::-1]), ("rate_map", "RATE_IS_GIVEN", RATE_MAPS),
    ("state_len", "STATE_LEN", ()), ("channels_last", "CHANNELS_LAST", ()), ("ring", "RING", ()),
)  # fmt: skip
LEGAL: dict[str, Sequence[Any]] = {  # values of switches that are names, those of delta rules among them
    **{name: values for name, _, values in _SWITCHES if values}, "mixed": tuple(BYTES)[:3],
    "activation": ("identity", "silu"), "beta_map": BETA_MAPS,
}  # fmt: skip


def switches_of(op: Op, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the switches of a call by the constants of its kernel."""
    return {
        name: values[int(parameters[constant])] if values else parameters[constant]
        for name, constant, values in _SWITCHES
        if constant in parameters and name in op.traits
    }


def shift_mix(given: Given, options: Options) -> Schedule:
    """Return the launch of `shift_mix`: the pool is bound to its first slot."""
    (channels, mixes), sequences = given.sizes, options.texts
    vector, is_packed = vector_of(channels, given, "x", "shift"), sequences.bound_bytes > 0
    threads = min(_ROW_THREADS, 32 * ceil(channels / (32 * vector)))
    parameters: dict[str, Parameter] = {
        "CHANNELS": channels, "MIXES": mixes, "VECTOR": vector, "NUM_THREADS": threads, "HAS_ADD": "add" in given.types,
        "PACKED": is_packed, "ONE_TOKEN": sequences.tokens == 1 and not is_packed,
        "BOUND_BYTES": sequences.bound_bytes or 4, "INDEX_BYTES": sequences.index_bytes,
        "T_IO": given.types["x"], **types_of(given, ("weight", "bias", "mixes", "shift")),
    }  # fmt: skip
    bind = {
        "rows": given.rows, "tokens": sequences.tokens, "sequences": sequences.number, "slots": sequences.slots,
        "slot_stride": sequences.slot_stride, "null_index": sequences.null_index, "eps": options.eps,
    }  # fmt: skip
    return _schedule(OPS["shift_mix"], given, vector, parameters, (given.rows, 1, 1), bind)


def prepare_keys(given: Given, options: Options) -> Schedule:
    """Return the launch of `prepare_keys`; the results of a call that names them stand behind its rate_map."""
    rate_map, *asked = options.kinds
    blocks = (12, 8, 6)[("v_first" in given.types) + ("r_k" in given.types)]
    more = keys_parameters(given, rate_map) | _asked_for(asked, ("new_rate", "factors"))
    return of_heads(OPS["prepare_keys"], "k", given, more, {}, blocks)


def keys_parameters(given: Given, rate_map: str) -> dict[str, Parameter]:
    """Return the parameters that tell what makes keys apart."""
    flags = {f"HAS_{x.upper()}": x in given.types for x in ("v_first", "a0", "v0")}
    flags |= {"HAS_BONUS": "r_k" in given.types, "RATE_IS_GIVEN": rate_map == "identity"}
    return {**flags, **types_of(given, ("rate", "v_gate", "k_k", "k_a", "a0", "v0", "r_k"))}


def gated_norm(given: Given, options: Options) -> Schedule:
    """Return the launch of `gated_norm`; the results of a call that names them stand behind its gate and norm."""
    gate, norm, *asked = options.kinds
    blocks = 10 if "r_k" in given.types else 16
    more = gated_norm_parameters(given, gate, norm) | _asked_for(asked, ("means", "factors"))
    return of_heads(OPS["gated_norm"], "y", given, more, {"eps": options.eps}, blocks)


def gated_norm_parameters(given: Given, gate: str, norm: str) -> dict[str, Parameter]:
    """Return the parameters that tell norms apart."""
    return {
        "HAS_BONUS": "r_k" in given.types, "TAKES_BONUS": "bonus" in given.types, "HAS_BIAS": "bias" in given.types,
        "CENTERED": norm == "layer", "GATE": GATES.index(gate), **types_of(given, ("r_k", "weight", "bias")),
    }  # fmt: skip


def gated(given: Given, options: Options) -> Schedule:
    """Return the launch of `gated`."""
    (count,) = given.sizes
    vector = vector_of(count, given, "x")
    return _schedule(OPS["gated"], given, vector, *elements(given, vector, *options.kinds), {"count": count})


def elements(given: Given, vector: int, gate: str) -> tuple[dict[str, Parameter], tuple[int, int, int]]:
    """Return the parameters and the grid of a kernel for elements behind a gate."""
    parameters: dict[str, Parameter] = {
        "T_IO": given.types["x"], "VECTOR": vector, "NUM_THREADS": _ELEMENT_THREADS, "GATE": GATES.index(gate),
    }  # fmt: skip
    return parameters, (ceil(given.sizes[0] / (vector * _ELEMENT_THREADS)), 1, 1)


def token_shift(given: Given, options: Options) -> Schedule:
    """Return the launch of `token_shift`."""
    (channels, mixes), texts = given.sizes, options.texts
    vector = vector_of(channels, given, "x")
    parameters, slices = shift_parameters(given, texts, vector)
    grid = ceil(given.rows / _SHIFT_ROWS), slices, 1
    bind: dict[str, Any] = {"rows": given.rows, "tokens": texts.tokens, "texts": texts.number}
    bind |= {f"mixed{m}": None for m in range(mixes, MOST_MIXES)}
    return _schedule(OPS["token_shift"], given, vector, parameters | {"ROWS": _SHIFT_ROWS}, grid, bind)


def norm_shift(given: Given, options: Options) -> Schedule:
    """Return the launch of `norm_shift`."""
    vector, texts = vector_of(given.sizes[0], given, "x"), options.texts
    parameters = norm_shift_parameters(given, texts, vector, given.results["mixed0"].dtype, _ROW_THREADS)
    block_rows = min(max(given.rows // _LEAST_NORM_BLOCKS, 1), _MOST_NORM_ROWS)
    bind: dict[str, Any] = {
        "rows": given.rows, "tokens": texts.tokens, "texts": texts.number, "block_rows": block_rows, "eps": options.eps,
    }  # fmt: skip
    bind |= {f"mixed{m}": None for m in range(given.sizes[1], MOST_MIXES)}
    bind |= {x: None for x in ("residual", "stats") if x not in given.results}
    grid = ceil(given.rows / block_rows), 1, 1
    return _schedule(OPS["norm_shift"], given, vector, parameters | {"HAS_ADD": "add" in given.types}, grid, bind)


def norm_shift_parameters(
    given: Given, texts: Sequences, vector: int, mixed: str, most_threads: int
) -> dict[str, Parameter]:
    """Return the parameters that both directions of `norm_shift` have, of mixes of a type."""
    channels, mixes = given.sizes
    pieces = ceil(channels / (vector * most_threads))  # of a thread
    return {
        "CHANNELS": channels, "MIXES": mixes, "VECTOR": vector, "HAS_FIRST": "first" in given.types,
        "NUM_THREADS": 32 * ceil(channels / (32 * vector * pieces)),
        "PACKED": texts.bound_bytes > 0, "BOUND_BYTES": texts.bound_bytes or 4,
        "T_IO": given.types["x"], "T_MIXED": mixed, **types_of(given, ("weight", "bias", "mixes")),
    }  # fmt: skip


def shift_parameters(given: Given, texts: Sequences, vector: int) -> tuple[dict[str, Parameter], int]:
    """Return the parameters that both directions of `token_shift` have, and how many blocks share a row."""
    channels, mixes = given.sizes
    threads = min(_SHIFT_THREADS, 32 * ceil(channels / (32 * vector)))
    parameters: dict[str, Parameter] = {
        "CHANNELS": channels, "MIXES": mixes, "VECTOR": vector, "NUM_THREADS": threads,
        "HAS_AMOUNTS": "amounts" in given.types, "HAS_FIRST": "first" in given.types,
        "PACKED": texts.bound_bytes > 0, "BOUND_BYTES": texts.bound_bytes or 4, "T_IO": given.types["x"],
        **types_of(given, ("mixes",)),
    }  # fmt: skip
    return parameters, ceil(channels / (vector * threads))


def activate(given: Given, options: Options) -> Schedule:
    """Return the launch of `activate`, whose y is x where it is in place."""
    vector, parameters, grid, bind = parts_of(given, options, _ELEMENT_THREADS)
    bind["y"] = "x" if options.in_place else "y"
    return _schedule(OPS["activate"], given, vector, parameters, grid, bind)


def parts_of(
    given: Given, options: Options, threads: int
) -> tuple[int, dict[str, Parameter], tuple[int, int, int], dict[str, Any]]:
    """Return what both directions of `activate` have: the vector, the parameters, the grid, and numbers of the call."""
    (count,) = given.sizes
    vector = vector_of(count, given, "x")
    parameters: dict[str, Parameter] = {"T_IO": given.types["x"], "VECTOR": vector, "NUM_THREADS": threads}
    kinds = sum(KINDS.index(kind) << 2 * part for part, kind in enumerate(options.kinds))
    return vector, parameters, (ceil(count / (vector * threads)), given.rows, 1), {"count": count, "kinds": kinds}


def of_heads(
    op: Op, lead: str, given: Given, more: dict[str, Parameter], bind: Mapping[str, Any], blocks: int
) -> Schedule:
    """Return the launch of a kernel in which lanes share heads: as many blocks as run at once, if rows are many."""
    vector = vector_of(given.sizes[1], given, lead)
    parameters, slices = head_parameters(given, lead, vector, _HEAD_THREADS, blocks)
    block_rows = rows_of_block(given, parameters, slices)
    bind = {"rows": given.rows, "heads": given.sizes[0], "block_rows": block_rows, **bind}
    grid = ceil(given.rows / block_rows), slices, 1
    return _schedule(op, given, vector, parameters | more, grid, bind)


def head_parameters(
    given: Given, lead: str, vector: int, most_threads: int, blocks: int
) -> tuple[dict[str, Parameter], int]:
    """Return the parameters of a kernel whose lanes share heads, `blocks` of at most `most_threads` on an SM."""
    heads, head_size = given.sizes
    lanes = min(32, 1 << (ceil(head_size / vector) - 1).bit_length())
    threads = min(most_threads, 32 * ceil(heads * lanes / 32))
    blocks = max(blocks * most_threads // (threads * ceil(head_size / (vector * lanes))), 1)
    parameters: dict[str, Parameter] = {
        "T_IO": given.types[lead], "HEAD_SIZE": head_size, "VECTOR": vector, "LANES": lanes, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": min(blocks, MOST_BLOCKS),
    }  # fmt: skip
    return parameters, ceil(heads * lanes / threads)


def rows_of_block(given: Given, parameters: Mapping[str, Parameter], slices: int, least: int = 1) -> int:
    """Return how many rows a block has where as many blocks are launched as run at once, or fewer with `least` rows."""
    most = max(int(parameters["BLOCKS_PER_SM"]) * (given.gpu.multiprocessors or MULTIPROCESSORS) // slices, 1)
    return max(ceil(given.rows / most), min(least, given.rows))


def _schedule(
    op: Op, given: Given, vector: int, parameters: Mapping[str, Parameter], grid: tuple[int, int, int],
    bind: Mapping[str, Any],
) -> Schedule:  # fmt: skip
    template = f"layer_{op.name}"
    step = Step(template, template, parameters, grid, bind, overlaps=given.gpu.number >= OVERLAPS_SINCE)
    inputs = [x for x in op.inputs if x in given.types]
    return Schedule((step,), given.results, vectors=vectors_of(inputs, given, vector, parameters))


def vectors_of(names: Sequence[str], given: Given, vector: int, parameters: Mapping[str, Parameter]) -> dict[str, int]:
    """Return how many neighbours of each tensor are read at once; what heads have one of is read alone."""
    alone = [x for x in ("beta", "g") if not parameters.get(f"{x.upper()}_PER_CHANNEL", True)]
    return {x: 1 if x in alone else min(vector, ACCESS_BYTES // BYTES[given.types[x]]) for x in names}


def vector_of(size: int, given: Given, *written: str) -> int:
    """Return how many neighbours a thread takes at once: as many as divide a row, and can be written at once."""
    sizes = [BYTES[given.types[name]] for name in written]

    def is_possible(vector: int) -> bool:
        fits = size % vector == 0 and vector * sizes[0] <= ACCESS_BYTES
        return fits and all(min(ACCESS_BYTES, vector * each) <= given.alignment for each in sizes)

    return next((vector for vector in (8, 4, 2) if is_possible(vector)), 1)


def _asked_for(asked: Sequence[str], names: Sequence[str]) -> dict[str, Parameter]:
    """Return the parameters that tell which of these results a call computes."""
    return {f"MAKES_{name.upper()}": name in asked for name in names}


def types_of(given: Given, names: Sequence[str]) -> dict[str, Parameter]:
    """Return the types of these as templates name them; what is absent has one too."""
    return {f"T_{name.upper()}": given.types.get(name, "fp32") for name in names}
