"""Which kernels the small work of a layer will need: requests, before anything is compiled.

Those of one function of it, and all those that a layer of a model calls beside its op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import convolution, delta_operands, layer_gradients, layer_table, loss
from rwkv_jit.schedules import layers as steps
from rwkv_jit.schedules.layer_gradients import Options
from rwkv_jit.schedules.layers import Given, Sequences
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule


class _Layer(NamedTuple):
    """What a layer of a family calls."""

    shifts: tuple[tuple[int, bool], ...]  # the mixes of each `token_shift`, and whether tokens have amounts
    norms: tuple[tuple[int, bool], ...]  # the mixes of each `norm_shift`, and whether something is added
    steps: tuple[tuple[int, bool], ...]  # the mixes of each `shift_mix` of an update, and whether something is added
    gate: str  # of `gated_norm`, which has the bonus in RWKV-7 alone


LAYERS = {
    "wkv5": _Layer(((4, False), (2, False)), (), ((4, False), (2, True)), "silu"),
    "wkv6": _Layer(((1, False), (5, True), (2, False)), (), ((3, False), (2, True)), "silu"),
    "wkv7": _Layer((), ((6, False), (1, True)), ((6, False), (6, True), (1, True)), "identity"),
}
_COUNTS = (1, 2, 4, 8)  # of elements, by which neighbours that a thread takes at once differ
_COLUMNS = tuple(1 << power for power in range(7, 13))  # of logits, by which threads differ


_TEXTS = tuple(Sequences(1, bound_bytes=count) for count in (0, 4, 8))
_OVER_POOL = (Sequences(1), Sequences(1, 2), Sequences(1, bound_bytes=4), Sequences(1, bound_bytes=8))


# ---- one function ------------------------------------------------------------------------------------------------


def sizes_of(op: Op) -> tuple[str, ...]:
    """Return the names of the sizes that kernels of a function depend on."""
    if "H" not in "".join(op.inputs.values()):
        return ("width",)
    return ("head_size", "heads", *(["key_heads"] if op.name == "delta_operands" else []))


def requests_of(
    op: Op, gpu: Gpu, types: Mapping[str, str], sizes: Mapping[str, int], switches: Mapping[str, Any], direction: str,
    state_type: str, index_bytes: int,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels of one function in a direction: of packed sequences and of others, over pools in updates."""
    if op.name == "causal_conv1d":
        cut: tuple[int, ...] = sizes["width"], switches["taps"]
        if not convolution.LEAST_WIDTH <= cut[1] <= convolution.MOST_WIDTH:
            legal = f"{convolution.LEAST_WIDTH} to {convolution.MOST_WIDTH}"
            raise UnsupportedConfigError(f"taps: expected {legal}, got {cut[1]}")
        several = _convolutions(Given(gpu, types, 1, cut), switches, direction, state_type, index_bytes)
    else:
        if not 1 <= switches.get("mixes", 1) <= layer_table.MOST_MIXES:
            raise UnsupportedConfigError(f"mixes: expected 1 to {layer_table.MOST_MIXES}, got {switches['mixes']}")
        cut = _cut(op, sizes, switches)
        given = Given(gpu, types, 1, cut)
        is_backward = direction == "backward"
        if is_backward and op.name not in layer_gradients.BACKWARDS:
            return []
        several = (
            _backwards(op, given, switches) if is_backward else _forwards(op, given, switches, state_type, index_bytes)
        )
    return [request for each in several for request in each.requests(gpu)]


def _cut(op: Op, sizes: Mapping[str, int], switches: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of `Given`."""
    if "width" in sizes:
        return sizes["width"], *([switches["mixes"]] if "mixes" in switches else [])
    if "key_heads" in sizes:
        several = steps.times_shared(sizes["key_heads"], sizes["heads"])
        return sizes["key_heads"] * several, sizes["head_size"], sizes["heads"], several
    return sizes["heads"], sizes["head_size"]


def _kinds(op: Op, given: Given, switches: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the steps of a function are told by names."""
    if op.name == "delta_operands":
        gate, _, rate_map, _, norm = delta_operands.kinds(
            Op("", {"beta": "BTH"}), {_IN_OPERANDS.get(x, x) for x in given.types}, switches
        )
        return gate, switches["gate_of"], rate_map, switches["rate_of"], norm
    if op.name == "activate":
        return ("identity",)
    return tuple(switches[name] for name in op.traits if name in ("gate", "norm", "rate_map"))


_IN_OPERANDS = {"g": "w", "A_log": "a_log"}


def _forwards(op: Op, given: Given, switches: Mapping[str, Any], state_type: str, index_bytes: int) -> list[Schedule]:
    name, kinds = op.name, _kinds(op, given, switches)
    if name == "token_shift":
        return [steps.token_shift(given, texts) for texts in _TEXTS]
    if name == "norm_shift":
        given = given._replace(results={"mixed0": Result((1,), switches["mixed"] or given.types["x"])})
        return [steps.norm_shift(given, texts, 0.0) for texts in _TEXTS]
    if name == "shift_mix":
        given = given._replace(types={**given.types, "shift": state_type})
        return [steps.shift_mix(given, each._replace(index_bytes=index_bytes), 0.0) for each in _OVER_POOL]
    if name == "activate":
        return [steps.activate(given, kinds, False)]
    if name == "delta_operands":
        return [steps.delta_operands(given, 0.0, kinds)]
    if name == "gated_norm":
        return [steps.gated_norm(given, 0.0, *kinds)]
    return [steps.prepare_keys(given, *kinds) if name == "prepare_keys" else steps.gated(given, *kinds)]


def _backwards(op: Op, given: Given, switches: Mapping[str, Any]) -> list[Schedule]:
    mixed = switches.get("mixed") or given.types[op.names[0]]
    options = Options(kinds=_kinds(op, given, switches))
    texts = _TEXTS if op.name in layer_table.SHIFTS else _TEXTS[:1]
    return [_backward(op.name, given, options._replace(texts=each), mixed) for each in texts]


def _backward(name: str, given: Given, options: Options, grad_type: str) -> Schedule:
    """Return the backward for all gradients, from gradients of this type, which that of a residual need not have."""
    results = {f"d{x}": Result((1,), given.types[x]) for x in layer_table.OPS[name].inputs if x in given.types}
    grads = dict.fromkeys((f"grad_{x}" for x in _results(name, given)), grad_type)
    if name == "norm_shift":
        grads["grad_residual"] = given.types["x"]
    given = given._replace(types={**given.types, **grads}, results=results)
    return layer_gradients.backward(name, given, options, [*layer_table.OPS[name].inputs])


def _results(name: str, given: Given) -> Sequence[str]:
    """Return what a call returns."""
    names = [*layer_table.RESULTS[name]]
    if name in layer_table.SHIFTS:
        begin = names.index("mixed0")
        return names[: begin + given.sizes[1]] + names[begin + layer_table.MOST_MIXES :]
    return [x for x in names if x != "new_v" or "v_first" in given.types]


def _convolutions(
    given: Given, switches: Mapping[str, Any], direction: str, state_type: str, index_bytes: int
) -> list[Schedule]:
    activation = switches["activation"]
    if direction == "update":
        held = {**{x: own for x, own in given.types.items() if x != "initial_state"}, "conv_state": state_type}
        length = switches["state_len"] or switches["taps"] - 1
        given = given._replace(types=held)
        rows = Sequences(1, index_bytes=index_bytes)
        return [convolution.update(given, rows, length, switches["channels_last"], activation, switches["ring"])]
    if direction == "forward":
        return [convolution.forward(given, texts, activation) for texts in _TEXTS]
    results = {f"d{x}": Result((1,), storage) for x, storage in given.types.items()}
    given = given._replace(results=results)
    return [convolution.backward(given, texts, activation, [*given.types]) for texts in _TEXTS]


# ---- a layer of a model ------------------------------------------------------------------------------------------


def requests(p: Problem, width: int, w_type: str, direction: str) -> list[kernel.Request]:
    """Return the kernels of a layer of `width` channels in one direction, or in updates over a pool.

    Those of both directions are of training, with the loss; those of updates are of decode and of prompts. Parameters
    have the type of rows, or float32.
    """
    own, is_update = p.types["v"], direction == "update"
    sizes, requests = {"head_size": p.K, "heads": max(width // p.K, 1)}, list[kernel.Request]()
    for parameters in dict.fromkeys((own, "fp32")):
        several = [*_calls(p, parameters), *(_steps(p, w_type) if is_update else _of_training(p, parameters))]
        for name, chosen, switches in several:
            op, counts = layer_table.OPS[name], _COUNTS if name in ("activate", "gated") else (1,)
            types = op.types_of(own, parameters, chosen)
            for count, state_type in product(counts, dict.fromkeys((own, p.state_type))):
                of_all = {**sizes, "width": count if name == "activate" else width * count}
                cut = {x: of_all[x] for x in sizes_of(op)}
                pass_of = "forward" if is_update else direction
                requests += requests_of(op, p.gpu, types, cut, switches, pass_of, state_type, 4)
    return [*requests, *(request for each in _losses(p, direction) for request in each.requests(p.gpu))]


# A function, the types of its optional inputs and of others by name, where None is the default, and its switches.
_Call = tuple[str, dict[str, str | None], dict[str, Any]]


def _calls(p: Problem, parameters: str) -> Iterator[_Call]:
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
    return [loss.forward(each) if direction == "forward" else loss.backward(each, True) for each in several]
