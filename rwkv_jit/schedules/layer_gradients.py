"""Gradients of a layer's small work: blocks add up a part of the rows, whose sums `common.with_sums` adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from rwkv_jit.schedules import layers
from rwkv_jit.schedules.layer_table import FUNCTIONS, KEPT, RESULTS
from rwkv_jit.schedules.layers import Given, Options
from rwkv_jit.schedules.problem import BYTES, Op
from rwkv_jit.schedules.schedule import Schedule, Step

_HEAD_THREADS = 128
_ELEMENT_THREADS = 128
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
        {**op.inputs, **KEPT.get(name, {}), **{f"grad_{result}": dims for result, dims in RESULTS[name].items()}},
        wide=op.wide,
        optional=op.optional,
        traits=op.traits,
    )
    for name, op in FUNCTIONS.items()
    if name in RESULTS
}


def prepare_keys(given: Given, options: Options) -> Schedule:
    """Return the launches of the gradients of `prepare_keys`."""
    blocks = 7
    if "v_first" in given.types:  # parameters of 32 bits beside rows of 16 take more registers
        blocks = 6 if given.types["k_k"] == given.types["k"] else 5
    if "r_k" in given.types:
        blocks = 4 if "v_first" in given.types else 5
    summed = ("k_k", "k_a", "a0", "v0", "r_k")
    return of_heads(
        BACKWARDS["prepare_keys"], "k", given, layers.keys_parameters(given, *options.kinds), summed, {}, blocks
    )


def gated_norm(given: Given, options: Options) -> Schedule:
    """Return the launches of the gradients of `gated_norm`."""
    gate, norm = options.kinds
    more = layers.gated_norm_parameters(given, gate, norm)
    blocks = 5 if "r_k" in given.types else 8
    return of_heads(BACKWARDS["gated_norm"], "y", given, more, ("weight", "bias", "r_k"), {"eps": options.eps}, blocks)


def of_heads(
    op: Op, lead: str, given: Given, more: Mapping[str, Any], summed: Sequence[str], bind: Mapping[str, Any],
    blocks: int,
) -> Schedule:  # fmt: skip
    """Return the launches of a kernel in which lanes share heads; `summed` are the parameters."""
    vector = _half_access(layers.vector_of(given.sizes[1], given, lead), given.types[lead])
    parameters, slices = layers.head_parameters(given, lead, vector, _HEAD_THREADS, blocks)
    bind = {"rows": given.rows, "heads": given.sizes[0], **bind}
    return _summing(op, given, vector, {**parameters, **more}, slices, bind, summed)


def token_shift(given: Given, options: Options) -> Schedule:
    """Return the launches of the gradients of `token_shift`."""
    vector = _half_access(layers.vector_of(given.sizes[0], given, "x"), given.types["x"])
    parameters, slices = layers.shift_parameters(given, options.texts, vector)
    bind = {"rows": given.rows, "tokens": options.texts.tokens, "texts": options.texts.number}
    blocks = 8 if given.sizes[1] <= _FEW_MIXES else 4 if "amounts" in given.types else 5
    parameters["BLOCKS_PER_SM"] = blocks
    return _summing(BACKWARDS["token_shift"], given, vector, parameters, slices, bind, ("mixes",))


def norm_shift(given: Given, options: Options) -> Schedule:
    """Return the launches of the gradients of `norm_shift`."""
    channels, mixes = given.sizes
    # So that a thread has registers for the sums of its channels.
    vector = min(layers.vector_of(channels, given, "x"), _NORM_VECTOR if mixes > _FEW_MIXES else 2 * _NORM_VECTOR)
    parameters = layers.norm_shift_parameters(given, options.texts, vector, given.types["grad_mixed0"], _NORM_THREADS)
    threads = int(parameters["NUM_THREADS"])
    has_room = (mixes + 2) * vector * ceil(channels / (vector * threads)) <= _MOST_SUMS
    bind = {"rows": given.rows, "tokens": options.texts.tokens, "texts": options.texts.number}

    def summing(summed: Sequence[str], **more: Any) -> Schedule:
        own = {**parameters, "SUMS_MIXES": has_room, "BLOCKS_PER_SM": max(_NORM_THREADS // threads, 1)}
        return _summing(BACKWARDS["norm_shift"], given, vector, own, 1, {**bind, **more}, summed)

    if has_room:
        return summing(("weight", "bias", "mixes"))
    own = summing(("weight", "bias"), dmixes_rows=None)
    parameters = {**parameters, "NUM_THREADS": _ELEMENT_THREADS, "BLOCKS_PER_SM": 5}
    del parameters["T_MIXES"]
    slices = ceil(channels / (vector * _ELEMENT_THREADS))
    of_mixes = _summing(
        BACKWARDS["norm_shift"], given, vector, parameters, slices, bind, ("mixes",), "layer_norm_shift_mixes"
    )
    return replace(own, steps=(*own.steps, *of_mixes.steps), scratch={**own.scratch, **of_mixes.scratch})


def activate(given: Given, options: Options) -> Schedule:
    """Return the launches of the gradients of `activate`."""
    vector, parameters, grid, bind = layers.parts_of(given, options, _ELEMENT_THREADS)
    step = _step(BACKWARDS["activate"], given, parameters, grid, bind)
    return Schedule((step,), given.results, vectors=_vectors(BACKWARDS["activate"], given, vector, parameters))


def gated(given: Given, options: Options) -> Schedule:
    """Return the launches of the gradients of `gated`."""
    vector = layers.vector_of(given.sizes[0], given, "x")
    parameters, grid = layers.elements(given, vector, *options.kinds)
    step = _step(BACKWARDS["gated"], given, parameters, grid, {"count": given.sizes[0]}, "layer_gated")
    return Schedule((step,), given.results, vectors=_vectors(BACKWARDS["gated"], given, vector, parameters))


def _half_access(vector: int, storage: str) -> int:
    """Return how many neighbours a thread takes at once in a kernel that lacks registers for more at once."""
    return max(min(vector, _HALF_ACCESS_BYTES // BYTES[storage]), 1)


def _summing(
    op: Op, given: Given, vector: int, parameters: Mapping[str, Any], slices: int, bind: Mapping[str, Any],
    summed: Sequence[str], entry: str = "",
) -> Schedule:  # fmt: skip
    """Return the launch of blocks with a part of the rows each, `slices` side by side; their sums are in scratch."""
    block_rows = layers.rows_of_block(given, parameters, slices, _LEAST_ROWS)
    groups = ceil(given.rows / block_rows)
    step = _step(op, given, parameters, (groups, slices, 1), {**bind, "block_rows": block_rows}, entry, summed, entry)
    widths = {x: prod(given.results[f"d{x}"].shape) for x in summed if x in given.types}
    scratch = {f"d{x}_rows": 4 * groups * width for x, width in widths.items()}
    vectors = _vectors(op, given, vector, parameters)
    return Schedule((step,), given.results, scratch=scratch, vectors=vectors)


def _step(
    op: Op, given: Given, parameters: Mapping[str, Any], grid: tuple[int, int, int], bind: Mapping[str, Any],
    template: str = "", summed: Sequence[str] = (), entry: str = "",
) -> Step:  # fmt: skip
    """Return the launch of a backward; what is not there is null."""
    entry = entry or f"layer_{op.name}"
    grads = [x for x in op.inputs if x.startswith("grad_")]
    places = {x: f"d{x}_rows" if x in summed else f"d{x}" for x in op.inputs if x not in grads}
    absent = {place: None for x, place in places.items() if x not in given.types}
    absent |= {x: None for x in grads if x not in given.types}
    return Step(template or entry, entry, parameters, grid, {**absent, **bind}, optional=tuple(places.values()))


def _vectors(op: Op, given: Given, vector: int, parameters: Mapping[str, Any]) -> dict[str, int]:
    present = [x for x in op.inputs if x in given.types]
    return layers.vectors_of(present, given, vector, parameters)
