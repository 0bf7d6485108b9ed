"""Which kernels the small work of a layer will need: requests, before anything is compiled.

Those of one function of it, and all those that a layer of a model calls beside its op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.layers.calls import POOLS, Kind, kind_of
from rwkv_jit.schedules import convolution, layer_table, loss, products
from rwkv_jit.schedules.layers import Given, Options, Sequences
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule


class _Layer(NamedTuple):
    """What a layer of a family calls."""

    shifts: tuple[tuple[int, bool], ...]  # the mixes of each `token_shift`, and whether tokens have amounts
    norms: tuple[tuple[int, bool], ...]  # the mixes of each `norm_shift`, and whether something is added
    steps: tuple[tuple[int, bool], ...]  # the mixes of each `shift_mix` of an update, and whether something is added
    gate: str  # of `gated_norm`, which has the bonus in RWKV-7 alone
    # Depths and widths of the matrices of each launch of products of an update: C channels, H hidden ones, a rank R.
    products: tuple[str, ...]
    hidden: float  # channels, as a share of the width


LAYERS = {
    "wkv5": _Layer(
        ((4, False), (2, False)), (), ((4, False), (2, True)), "silu", ("CC CC CC CC", "CC", "CH CC", "HC"), 3.5
    ),
    "wkv6": _Layer(
        ((1, False), (5, True), (2, False)), (), ((3, False), (2, True)), "silu",
        ("CR", "RC RC RC RC RC", "CC CC CC CC CR", "RC", "CC", "CH CC", "HC"), 3.5,
    ),
    "wkv7": _Layer(
        (), ((6, False), (1, True)), ((6, False), (6, True), (1, True)), "identity",
        ("CC CC CC CR CR CR", "CC CC CC CR CR CR CR", "RC RC RC", "RC RC RC RC", "CC", "CH", "HC"), 4,
    ),
}  # fmt: skip
_COUNTS = (1, 2, 4, 8)  # of elements, by which neighbours that a thread takes at once differ
_COLUMNS = tuple(1 << power for power in range(7, 14))  # of logits, by which threads differ


# What calls have as many of as they like, within these limits, and kernels depend on.
_COUNTED = {
    "mixes": (1, layer_table.MOST_MIXES), "taps": (convolution.LEAST_WIDTH, convolution.MOST_WIDTH),
}  # fmt: skip


# ---- one function ------------------------------------------------------------------------------------------------


def sizes_of(op: Op) -> tuple[str, ...]:
    """Return the names of the sizes that kernels of a function depend on."""
    return ("head_size", "heads") if "H" in "".join(op.inputs.values()) else ("width",)


def requests_of(
    op: Op, gpu: Gpu, types: Mapping[str, str], sizes: Mapping[str, int], switches: Mapping[str, Any], direction: str,
    state_type: str, index_bytes: int,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels of one function in a direction: of packed sequences and of others, over pools in updates."""
    counts = {name: switches[name] for name in _COUNTED if name in switches}
    for name, count in counts.items():
        least, most = _COUNTED[name]
        if not least <= count <= most:
            raise UnsupportedConfigError(f"{name}: expected {least} to {most}, got {count}")
    kind = kind_of(f"{op.name}_update" if direction == "update" and op.name in _UPDATES else op.name)
    if direction == "backward" and kind.backward is None:
        return []
    cut = (sizes["width"], *counts.values()) if "width" in sizes else (sizes["heads"], sizes["head_size"])
    lead, pools = types[op.names[0]], {name: state_type for name in kind.written if name in POOLS}
    types = {**{x: own for x, own in types.items() if x in kind.op.names}, **pools}
    given = Given(gpu, types, 1, cut, results=_results(kind, types, switches.get("mixed") or lead))
    choices = tuple(switches[name] for name in kind.choices)
    of_pool = {name: switches[name] for name in Sequences._fields if name in switches}
    several = [
        Options(kinds=choices, texts=texts._replace(index_bytes=index_bytes, **of_pool)) for texts in kind.stand_ins
    ]
    if direction == "backward":
        grads = {f"grad_{name}": result.dtype for name, result in given.results.items()}
        results = {f"d{x}": Result((1,), own) for x, own in types.items()}
        given = given._replace(types={**types, **grads}, results=results)
        schedules = [kind.gradients(given, options, [*types]) for options in several]
    else:
        schedules = [kind.forward(given, options) for options in several]
    return [request for each in schedules for request in each.requests(gpu)]


_UPDATES = ("causal_conv1d",)  # whose updates are a function of their own


def _results(kind: Kind, types: Mapping[str, str], mixed: str) -> dict[str, Result]:
    """Return what a call returns: what stands for an input has its type, and all else that of the mixes."""
    replaced = {result: types[x] for x, result in kind.replaced.items()}
    return {name: Result((1,), replaced.get(name, mixed)) for name in kind.results if name not in kind.kept}


# ---- a layer of a model ------------------------------------------------------------------------------------------


def requests(p: Problem, width: int, w_type: str, direction: str) -> list[kernel.Request]:
    """Return the kernels of a layer of `width` channels in one direction, or in updates over a pool.

    Those of both directions are of training, with the loss; those of updates are of decode and of prompts. Parameters
    have the type of rows, or float32.
    """
    own, is_update = p.types["v"], direction == "update"
    sizes, requests = {"head_size": p.K, "heads": max(width // p.K, 1)}, list[kernel.Request]()
    for parameters in dict.fromkeys((own, "fp32")):
        several = [*_calls(p), *(_steps(p, w_type) if is_update else _of_training(p, parameters))]
        for name, chosen, switches in several:
            op, counts = layer_table.OPS[name], _COUNTS if name in ("activate", "gated") else (1,)
            types = op.types_of(own, parameters, chosen)
            for count, state_type in product(counts, dict.fromkeys((own, p.state_type))):
                of_all = {**sizes, "width": count if name == "activate" else width * count}
                cut = {x: of_all[x] for x in sizes_of(op)}
                pass_of = "forward" if is_update else direction
                requests += requests_of(op, p.gpu, types, cut, switches, pass_of, state_type, 4)
    beside = [*_losses(p, direction), *(_products(p, width) if is_update else [])]
    return [*requests, *(request for each in beside for request in each.requests(p.gpu))]


# A function, the types of its optional inputs and of others by name, where None is the default, and its switches.
_Call = tuple[str, dict[str, str | None], dict[str, Any]]


def _calls(p: Problem) -> Iterator[_Call]:
    """Yield what a layer calls behind its recurrence and between matrices, in decode too."""
    yield "activate", {}, {}
    if p.op.name != "wkv7":
        yield "gated_norm", {"bias": None}, {"gate": LAYERS[p.op.name].gate, "norm": "layer"}
        yield "gated", {}, {"gate": "sigmoid"}


def _of_training(p: Problem, parameters: str) -> Iterator[_Call]:
    """Yield what else it calls in training. RWKV-7 makes its bonus with the keys."""
    layer, own = LAYERS[p.op.name], p.types["v"]
    for (mixes, has_amounts), has_first in product(layer.shifts, (False, True)):
        yield "token_shift", {"mixes": "fp32", **_there(amounts=has_amounts, first=has_first)}, {"mixes": mixes}
    for (mixes, has_add), has_first in product(layer.norms, (False, True)):
        chosen = {"x": parameters, **_there(add=has_add, first=has_first)}
        yield "norm_shift", chosen, {"mixes": mixes, "mixed": own}
    if p.op.name == "wkv7":
        yield "gated_norm", dict.fromkeys(("bias", "bonus")), {"gate": layer.gate, "norm": "layer"}
        first: dict[str, str | None] = {"rate": own, "a0": None, "r": None, "r_k": None}
        yield "prepare_keys", first, {"rate_map": "sigmoid"}
        yield "prepare_keys", {**first, "v_gate": own, "v_first": None, "v0": None}, {"rate_map": "sigmoid"}


def _steps(p: Problem, w_type: str) -> Iterator[_Call]:
    """Yield what else it calls in updates."""
    layer, fixed = LAYERS[p.op.name], dict[str, str | None]() if p.op.name == "wkv7" else {"mixes": "fp32"}
    for mixes, has_add in layer.steps:
        yield "shift_mix", {**fixed, **_there(add=has_add)}, {"mixes": mixes}
    for mixes, has_amounts in layer.shifts:
        if has_amounts:  # of RWKV-6, behind what `shift_mix` makes
            yield "token_shift", {**fixed, **_there(amounts=True, first=True)}, {"mixes": mixes}
    if p.op.name == "wkv7":
        several = dict.fromkeys(("bias", "r", "k", "v", "r_k"))
        yield "gated_norm", several, {"gate": layer.gate, "norm": "layer"}
        for has_values, has_biases in product((False, True), (False, True)):  # which may be absent
            chosen: dict[str, str | None] = {"rate": w_type, **({"v_gate": w_type} if has_values else {})}
            there = _there(a0=has_biases, v_first=has_values, v0=has_values and has_biases)
            yield "prepare_keys", chosen | there, {"rate_map": "sigmoid"}


def _products(p: Problem, width: int) -> Iterator[Schedule]:
    """Yield the schedules of products of an update, and of the logits: of few rows, and low-rank ones of many."""
    own, layer = p.types["v"], LAYERS[p.op.name]
    if own == "fp32" or not p.gpu.has_tensor_cores:
        return
    # Of a rank all that matters is that it is small. V are logits.
    sizes = {"C": width, "H": int(layer.hidden * width), "R": 64, "V": 65536}
    for launch, rows in product((*layer.products, "CV"), (1, 9, 17, 33)):
        matrices = [(sizes[x[0]], sizes[x[1]], "deep" if "R" in x else "wide") for x in launch.split()]
        if rows > products.ROWS:
            matrices = [x for x in matrices if min(x[:2]) <= products.LOW_RANK]
        if matrices:
            names, cut = range(len(matrices)), tuple(size for x in matrices for size in x[:2])
            types = {f"{x}{i}": own for i in names for x in ("x", "weight")}
            given = Given(p.gpu, types, rows, cut, results={f"y{i}": Result((1,), own) for i in names})
            yield products.products(given, Options(kinds=tuple(y for x in matrices for y in ("identity", x[2]))))


def _there(**has: bool) -> dict[str, str | None]:
    return {name: None for name, is_there in has.items() if is_there}


def _losses(p: Problem, direction: str) -> list[Schedule]:
    """Return the schedules of the loss: of any vocabulary, with a pull on the largest logit and without."""
    if direction == "update":
        return []
    several: list[Any] = [
        loss.Given(p.gpu, p.types["v"], 1, columns, target_bytes, l2_wrap=l2_wrap)
        for columns, target_bytes, l2_wrap in product(_COLUMNS, (4, 8), (0.0, 1.0))
    ]
    if direction == "forward":
        return [*map(loss.forward, several)]
    storage = p.types["v"]
    scales = [loss.scale(p.gpu, each, (8,), storage)[0] for each in {storage, "fp32"}]
    return [*map(loss.backward, several), *map(loss.in_place, several), *scales]
