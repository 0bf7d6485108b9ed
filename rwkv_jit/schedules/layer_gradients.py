"""Gradients of a layer's small work: blocks add up a part of the rows, and a second launch adds up the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any, NamedTuple

from rwkv_jit.schedules import common, layers
from rwkv_jit.schedules.layer_table import KEPT, OPS, RESULTS
from rwkv_jit.schedules.layers import KINDS, Given, Sequences
from rwkv_jit.schedules.problem import BYTES, Op
from rwkv_jit.schedules.schedule import Schedule, Step, without

_HEAD_THREADS = 128
_DELTA_BLOCKS, _FEW_DELTA_BLOCKS = 5, 4
_ELEMENT_THREADS = 128
_ACCESS_BYTES = 16
_HALF_ACCESS_BYTES = 8
_NORM_VECTOR, _MOST_SUMS = 4, 40  # of a thread
_NORM_THREADS = 512  # of a multiprocessor, so that each has 128 registers
_FEW_MIXES = 2  # which leave registers for more blocks
_LEAST_ROWS = 16  # of a block, so that the sums that it writes do not weigh
# The gradients that may be null.
OPTIONAL = ("residual", "last")
BACKWARDS = {
    name: Op(
        f"{name}_backward",
        {**OPS[name].inputs, **KEPT.get(name, {}), **{f"grad_{result}": dims for result, dims in results.items()}},
        wide=OPS[name].wide,
        optional=OPS[name].optional,
        traits=OPS[name].traits,
    )  # fmt: skip
    for name, results in RESULTS.items()
}


class Options(NamedTuple):
    """What a call chooses beside its tensors."""

    eps: float = 0.0
    kinds: tuple[str, ...] = ()
    texts: Sequences = Sequences(0)


def backward(name: str, given: Given, options: Options, wanted: Sequence[str]) -> Schedule:
    """Return the backward of an op, for these gradients by input names; `given` is as in `convolution`."""
    schedule = _SCHEDULES[name](given, options)
    unwanted = [result for result in given.results if result.removeprefix("d") not in wanted]
    return without(schedule, unwanted) if unwanted else schedule


def _prepare_keys(given: Given, options: Options) -> Schedule:
    blocks = 7
    if "v_first" in given.types:  # parameters of 32 bits beside rows of 16 take more registers
        blocks = 6 if given.types["k_k"] == given.types["k"] else 5
    if "r_k" in given.types:
        blocks = 4 if "v_first" in given.types else 5
    summed = ("k_k", "k_a", "a0", "v0", "r_k")
    return _of_heads("prepare_keys", "k", given, layers.keys_parameters(given, *options.kinds), summed, {}, blocks)


def _gated_norm(given: Given, options: Options) -> Schedule:
    gate, norm = options.kinds
    more = layers.gated_norm_parameters(given, gate, norm)
    blocks = 5 if "r_k" in given.types else 8
    return _of_heads("gated_norm", "y", given, more, ("weight", "bias", "r_k"), {"eps": options.eps}, blocks)


def _of_heads(
    name: str, lead: str, given: Given, more: Mapping[str, Any], summed: Sequence[str], bind: Mapping[str, Any],
    blocks: int,
) -> Schedule:  # fmt: skip
    """Return the launches of a kernel in which lanes share heads; `summed` are the parameters."""
    vector = _half_access(layers.vector_of(given.sizes[1], given, lead), given.types[lead])
    parameters, slices = layers.head_parameters(given, lead, vector, _HEAD_THREADS, blocks)
    bind = {"rows": given.rows, "heads": given.sizes[0], **bind}
    return _summing(name, given, vector, {**parameters, **more}, slices, bind, summed)


def _delta_operands(given: Given, options: Options) -> Schedule:
    parameters, given = layers.delta_parameters(given, options.kinds), given._replace(sizes=given.sizes[:2])
    blocks = _FEW_DELTA_BLOCKS if layers.has_much(parameters) else _DELTA_BLOCKS
    bind = {"lower_bound": options.eps}
    return _of_heads("delta_operands", "k", given, parameters, ("A_log", "dt_bias"), bind, blocks)


def _token_shift(given: Given, options: Options) -> Schedule:
    vector = _half_access(layers.vector_of(given.sizes[0], given, "x"), given.types["x"])
    parameters, slices = layers.shift_parameters(given, options.texts, vector)
    bind = {"rows": given.rows, "tokens": options.texts.tokens, "texts": options.texts.number}
    blocks = 8 if given.sizes[1] <= _FEW_MIXES else 4 if "amounts" in given.types else 5
    parameters["BLOCKS_PER_SM"] = blocks
    return _summing("token_shift", given, vector, parameters, slices, bind, ("mixes",))


def _norm_shift(given: Given, options: Options) -> Schedule:
    channels, mixes = given.sizes
    # So that a thread has registers for the sums of its channels.
    vector = min(layers.vector_of(channels, given, "x"), _NORM_VECTOR if mixes > _FEW_MIXES else 2 * _NORM_VECTOR)
    parameters = layers.norm_shift_parameters(given, options.texts, vector, given.types["grad_mixed0"], _NORM_THREADS)
    threads = int(parameters["NUM_THREADS"])
    has_room = (mixes + 2) * vector * ceil(channels / (vector * threads)) <= _MOST_SUMS
    bind = {"rows": given.rows, "tokens": options.texts.tokens, "texts": options.texts.number}

    def summing(summed: Sequence[str], **more: Any) -> Schedule:
        own = {**parameters, "SUMS_MIXES": has_room, "BLOCKS_PER_SM": max(_NORM_THREADS // threads, 1)}
        return _summing("norm_shift", given, vector, own, 1, {**bind, **more}, summed)

    if has_room:
        return summing(("weight", "bias", "mixes"))
    own = summing(("weight", "bias"), dmixes_rows=None)
    parameters = {**parameters, "NUM_THREADS": _ELEMENT_THREADS, "BLOCKS_PER_SM": 5}
    del parameters["T_MIXES"]
    slices = ceil(channels / (vector * _ELEMENT_THREADS))
    of_mixes = _summing("norm_shift", given, vector, parameters, slices, bind, ("mixes",), "layer_norm_shift_mixes")
    return replace(own, steps=(*own.steps, *of_mixes.steps), scratch={**own.scratch, **of_mixes.scratch})


def _activate(given: Given, options: Options) -> Schedule:
    (count,) = given.sizes
    vector = layers.vector_of(count, given, "x")
    parameters = {"T_IO": given.types["x"], "VECTOR": vector, "NUM_THREADS": _ELEMENT_THREADS}
    grid = ceil(count / (vector * _ELEMENT_THREADS)), given.rows, 1
    numbers = sum(KINDS.index(kind) << 2 * part for part, kind in enumerate(options.kinds))
    step = _step("activate", given, parameters, grid, {"count": count, "kinds": numbers})
    return Schedule((step,), given.results, vectors=_vectors("activate", given, vector, parameters))


def _gated(given: Given, options: Options) -> Schedule:
    vector = layers.vector_of(given.sizes[0], given, "x")
    parameters, grid = layers.elements(given, vector, *options.kinds)
    step = _step("gated", given, parameters, grid, {"count": given.sizes[0]}, "layer_gated")
    return Schedule((step,), given.results, vectors=_vectors("gated", given, vector, parameters))


_SCHEDULES: dict[str, Callable[[Given, Options], Schedule]] = {
    "prepare_keys": _prepare_keys, "delta_operands": _delta_operands, "gated_norm": _gated_norm,
    "token_shift": _token_shift, "activate": _activate,
    "gated": _gated, "norm_shift": _norm_shift,
}  # fmt: skip


def _half_access(vector: int, storage: str) -> int:
    """Return how many neighbours a thread takes at once in a kernel that lacks registers for more at once."""
    return max(min(vector, _HALF_ACCESS_BYTES // BYTES[storage]), 1)


def _summing(
    name: str, given: Given, vector: int, parameters: Mapping[str, Any], slices: int, bind: Mapping[str, Any],
    summed: Sequence[str], entry: str = "",
) -> Schedule:  # fmt: skip
    """Return the launch of blocks with a part of the rows each, `slices` side by side, and those that add them up."""
    block_rows = layers.rows_of_block(given, parameters, slices, _LEAST_ROWS)
    groups = ceil(given.rows / block_rows)
    step = _step(name, given, parameters, (groups, slices, 1), {**bind, "block_rows": block_rows}, entry, summed, entry)
    sums, scratch = list[Step](), dict[str, Any]()
    for x in summed:
        if x in given.types:
            result = given.results[f"d{x}"]
            width = prod(result.shape)
            scratch[f"d{x}_rows"] = 4 * groups * width
            sums.append(common.sum_rows(f"d{x}_rows", f"d{x}", 1, groups, width, result.dtype))
    vectors = _vectors(name, given, vector, parameters)
    return Schedule((step, *sums), given.results, scratch=scratch, vectors=vectors)


def _step(
    name: str, given: Given, parameters: Mapping[str, Any], grid: tuple[int, int, int], bind: Mapping[str, Any],
    template: str = "", summed: Sequence[str] = (), entry: str = "",
) -> Step:  # fmt: skip
    """Return the launch of a backward; what is not there is null."""
    entry = entry or f"layer_{name}_backward"
    places = {x: f"d{x}_rows" if x in summed else f"d{x}" for x in OPS[name].inputs}
    absent = {place: None for x, place in places.items() if x not in given.types}
    absent |= {f"grad_{x}": None for x in RESULTS[name] if f"grad_{x}" not in given.types}
    return Step(template or entry, entry, parameters, grid, {**absent, **bind}, optional=tuple(places.values()))


def _vectors(name: str, given: Given, vector: int, parameters: Mapping[str, Any]) -> dict[str, int]:
    present = [x for x in BACKWARDS[name].inputs if x in given.types]
    return layers.vectors_of(present, given, vector, parameters)
