"""Calls of delta rules that wkv7 runs: a kernel makes its inputs first, and another takes their gradients back.

The delta rules share a key between reading, erasing and writing. `layer_delta_operands` makes r, w, k, a and b of
`wkv7` from that key, the query, the rates and the gates: in scratch, or in training kept for the backward of `wkv7`.

    forward   operands; [v times write_gate]; all launches of wkv7
    backward  all launches of wkv7; gradients of what operands are computed from; [those of v and write_gate]

Queries without norms, of as many heads as values, and log-decays of channels are inputs themselves. A gradient of such
a log-decay has two parts, as a is computed with it too, added up in float32: in training log-decays of 16 bits are
computed too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules import operands as operand_steps
from rwkv_jit.schedules.layers import BETA_MAPS, Given, Options
from rwkv_jit.schedules.operands import Around, Operands
from rwkv_jit.schedules.problem import BYTES, Op, Problem
from rwkv_jit.schedules.schedule import Item, Result, Schedule, Step, Zero, aligned, renamed

_DIMS = "BTHK"  # the dimensions of operands
# What the kernels of operands call the inputs.
_NAMES = {"k": "k", "q": "r", "beta": "beta", "g": "w", "A_log": "a_log", "dt_bias": "dt_bias"}
_RESULTS = {"r": "r", "w": "w", "new_k": "k", "a": "a", "b": "b"}
# What the kernels read, of N rows, H heads of keys and K channels; and with the gradients of the results.
_OP = Op("delta_operands", dict(k="NHK", q="NHK", beta="NHK", g="NHK", A_log="H", dt_bias="HK"))
_BACKWARD = Op("delta_operands_backward", {**_OP.inputs, **{f"grad_{name}": "NHK" for name in _RESULTS}})
_GATES = ("none", "log", "softplus", "bounded")  # by their numbers in the kernels
_BLOCKS, _FEW_BLOCKS = (12, 5), (8, 4)  # of an SM, forward and backward
_OF_WRITES = Options(kinds=("identity",))  # of `gated`, for v times write_gate
_MOST_VALUE_HEADS = 4  # of a key head, for which a thread has registers


# ---- operands ----------------------------------------------------------------------------------------------------


def kinds(op: Op, present: Collection[str], traits: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return what the kernels of operands are told of a call, by its inputs and the switches of its op."""
    gate = "log" if "w" in present else "none"
    if "a_log" in present:
        gate = "softplus" if traits.get("lower_bound") is None else "bounded"
    of = {"BTH": "head", _DIMS: "channel"}
    norm, rate_map = "l2" if traits.get("qk_norm") else "none", traits.get("beta_map", "identity")
    return gate, of[op.inputs.get("w", "BTH")], rate_map, of[op.inputs["beta"]], norm


def operands(given: Given, lower_bound: float, kinds: Sequence[str]) -> Schedule:
    """Return the launch of the operands."""
    parameters, given = _parameters(given, kinds), given._replace(sizes=given.sizes[:2])
    return layers.of_heads(_OP, "k", given, parameters, {"lower_bound": lower_bound}, _blocks(parameters)[0])


def operand_gradients(given: Given, lower_bound: float, kinds: Sequence[str]) -> Schedule:
    """Return the launch of the gradients of what operands are computed from, but sums."""
    parameters, given = _parameters(given, kinds), given._replace(sizes=given.sizes[:2])
    bind, blocks = {"lower_bound": lower_bound}, _blocks(parameters)[1]
    summed = ("A_log", "dt_bias")
    return layer_gradients.of_heads(_BACKWARD, "k", given, parameters, summed, bind, blocks)


def _parameters(given: Given, kinds: Sequence[str]) -> dict[str, Parameter]:
    gate, gate_of, rate_map, rate_of, norm = kinds
    heads, _, value_heads, shared = given.sizes
    return {
        "GROUP": value_heads // heads, "SHARED": shared, "GATE": _GATES.index(gate),
        "G_PER_CHANNEL": gate_of == "channel",
        "BETA_MAP": BETA_MAPS.index(rate_map), "BETA_PER_CHANNEL": rate_of == "channel", "HAS_NORM": norm == "l2",
        "HAS_Q": "q" in given.types, "HAS_DT_BIAS": "dt_bias" in given.types,
        "HAS_W": _makes_decays(gate, gate_of), **layers.types_of(given, ("beta", "g", "A_log", "dt_bias")),
    }  # fmt: skip


def _blocks(parameters: Mapping[str, Parameter]) -> tuple[int, int]:
    """Return how many blocks an SM has: few where a thread has much of several value heads."""
    has_much = int(parameters["GROUP"]) > (1 if parameters["BETA_PER_CHANNEL"] else 2)
    return _FEW_BLOCKS if has_much else _BLOCKS


def _makes_decays(gate: str, gate_of: str) -> bool:
    """Return whether log-decays are computed for all channels, where g is not that itself."""
    return gate in ("softplus", "bounded") or (gate == "log" and gate_of == "head")


def times_shared(key_heads: int, value_heads: int) -> int:
    """Return for how many heads a key head stands, as registers allow; its gradient is the sum of theirs."""
    group = max(value_heads // max(key_heads, 1), 1)
    return group // next(n for n in range(min(_MOST_VALUE_HEADS, group), 0, -1) if group % n == 0)


def _kinds(p: Problem) -> tuple[str, str, str, str, str]:
    return kinds(p.op, p.types, dict(p.traits))


def _has_gradient_of_decays_added(p: Problem) -> bool:
    """Return whether log-decays are an input of wkv7, and a is computed with them too."""
    gate, gate_of, *_ = _kinds(p)
    return gate == "log" and gate_of == "channel"


def _computes_decays(p: Problem) -> bool:
    gate, gate_of, *_ = _kinds(p)
    is_narrow = p.training and _has_gradient_of_decays_added(p) and p.types["w"] != "fp32"
    return _makes_decays(gate, gate_of) or is_narrow


def _computes_queries(p: Problem) -> bool:
    return bool(p.trait("qk_norm") or p.G != p.H)


def _operands(p: Problem) -> dict[str, str]:
    """Return what the kernel makes: the inputs of wkv7, and their types."""
    storage = p.types["v"]
    computed = {"r": storage} if _computes_queries(p) else {}
    computed |= {"w": "fp32"} if _computes_decays(p) else {}
    return computed | dict.fromkeys("kab", storage)


def types(p: Problem) -> dict[str, str]:
    """Return the storage types of the inputs of wkv7."""
    given = {"r": p.types["r"], "w": p.types.get("w", p.types["v"]), "v": p.types["v"]}
    return given | _operands(p)


def _buffer(name: str) -> str:
    return f"operand_{name}"


def _gradient(name: str) -> str:
    return f"d{_buffer(name)}"


def _sources(p: Problem) -> set[str]:
    return {"k", "beta", "w", "a_log", "dt_bias", *(["r"] if _computes_queries(p) else [])} & set(p.types)


def sources(p: Problem) -> dict[str, set[str]]:
    """Return the inputs of which those of wkv7 are computed."""
    decays = {"w": {"w"} & set(p.types)}
    return {**decays, **dict.fromkeys(_operands(p), _sources(p)), "v": {"v", "write_gate"}}


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: what was computed."""
    rows = p.B * p.T * p.H
    sizes = {_buffer(name): aligned(BYTES[storage] * rows * p.K) for name, storage in _operands(p).items()}
    return sizes | ({_buffer("v"): aligned(BYTES[p.types["v"]] * rows * p.V)} if "write_gate" in p.types else {})


def _is_empty(p: Problem) -> bool:
    return 0 in (p.B, p.T, p.H)


def _inputs(p: Problem) -> dict[str, str | None]:
    absent = set() if _computes_queries(p) else {"q"}
    return {name: source if source in p.types and name not in absent else None for name, source in _NAMES.items()}


def _call(p: Problem) -> Given:
    types = {name: p.types[source] for name, source in _inputs(p).items() if source is not None}
    several = times_shared(p.G, p.H)
    return Given(p.gpu, types, p.B * p.T, (p.G * several, p.K, p.H, several))


def _of_gate(p: Problem) -> Given:
    """Return what the kernel of v times write_gate takes."""
    storage = p.types["v"]
    return Given(p.gpu, dict.fromkeys(("x", "g", "grad_y"), storage), 1, (p.B * p.T * p.H * p.V,))


def _bound(p: Problem) -> float:
    return float(p.trait("lower_bound") or 0.0)


def _with_decays(several: Sequence[Item], has_decays: bool) -> list[Item]:
    """Return the steps of operands, where log-decays are read or written if they are."""
    return [
        step._replace(parameters={**step.parameters, "HAS_W": has_decays})
        if isinstance(step, Step) and "HAS_W" in step.parameters else step
        for step in several
    ]  # fmt: skip


# ---- schedules ---------------------------------------------------------------------------------------------------


def forward(p: Problem, inner: Schedule) -> Around:
    """Return what stands around the forward of the op below."""
    computed = _operands(p)
    names: dict[str, Any] = {name: _buffer(name) for name in computed}
    results = {operand: _buffer(operand) if operand in computed else None for operand in _RESULTS.values()}
    targets = {name: results[operand] for name, operand in _RESULTS.items()}
    before: list[Item] = []
    vectors = dict(inner.vectors)
    if "write_gate" in p.types:
        names["v"] = _buffer("v")
    if not _is_empty(p):
        launch = operands(_call(p), _bound(p), _kinds(p))
        before += renamed(_with_decays(launch.steps, "w" in computed), {**_inputs(p), **targets})
        vectors = _vectors(launch, vectors)
    if "write_gate" in p.types and not _is_empty(p):
        gated = layers.gated(_of_gate(p), _OF_WRITES)
        before += renamed(gated.steps, {"x": "v", "g": "write_gate", "y": _buffer("v")})
        vectors |= {"v": gated.vectors["x"], "write_gate": gated.vectors["g"]}
    zeros, scratch = _zero_decays(p, names)
    return Around([*before, *zeros], [], names, vectors, scratch, _rows(p), _dense(p))


def backward(p: Problem, inner: Schedule) -> Around:
    """Return what stands around the backward of the op below."""
    computed, vectors = _operands(p), dict(inner.vectors)
    flows = dict(computed)  # what has a gradient that goes on to the sources
    if _has_gradient_of_decays_added(p) and "dw" in inner.results:
        flows["w"] = "fp32"
    names: dict[str, Any] = {name: _buffer(name) for name in computed}
    after = list[Item]()
    before, scratch = _zero_decays(p, names)
    if _is_empty(p):
        flows = dict.fromkeys(flows, "fp32")
        scratch |= {f"d{name}_rows": 0 for name in p.op.fixed if name in p.types}
    elif "dk" in inner.results:
        of_operands = _operand_gradients(p, flows)
        after += of_operands.steps
        scratch |= of_operands.scratch
        vectors = _vectors(of_operands, vectors)
    else:
        flows = {}
    for name, storage in flows.items():
        names[f"d{name}"] = _gradient(name)
        scratch[_gradient(name)] = BYTES[storage] * p.B * p.T * p.H * p.K
    if "write_gate" in p.types:
        names["v"], names["dv"] = _buffer("v"), _gradient("v")
        scratch[_gradient("v")] = BYTES[p.types["v"]] * p.B * p.T * p.H * p.V
    if "write_gate" in p.types and not _is_empty(p):
        results = {"dx": Result(p.shape("v"), p.types["v"]), "dg": Result(p.shape("v"), p.types["v"])}
        call = _of_gate(p)._replace(results=results)
        gated = layer_gradients.gated(call, _OF_WRITES)
        sources = {"x": "v", "g": "write_gate", "grad_y": _gradient("v"), "dx": "dv", "dg": "dwrite_gate"}
        after += renamed(gated.steps, sources)
        vectors |= {"v": gated.vectors["x"], "write_gate": gated.vectors["g"]}
    return Around(before, after, names, vectors, scratch, _rows(p), _dense(p))


def _zero_decays(p: Problem, names: dict[str, Any]) -> tuple[list[Item], dict[str, Any]]:
    """Return what makes the log-decays of an op without any, zeros under one of these names, and their bytes."""
    if "w" in p.types:
        return [], {}
    names["w"] = _buffer("w")
    return [Zero(names["w"])], {names["w"]: BYTES[p.types["v"]] * p.B * p.T * p.H * p.K}


def _operand_gradients(p: Problem, flows: dict[str, str]) -> Schedule:
    """Return the schedule of the gradients of what operands were computed from, with the names of this op."""
    call, inputs = _call(p), _inputs(p)
    there = {name: source for name, source in inputs.items() if source is not None}
    of_results = {name: operand for name, operand in _RESULTS.items() if operand in flows}
    types = {**call.types, **{f"grad_{name}": flows[operand] for name, operand in of_results.items()}}
    results = {f"d{name}": Result(p.shape(source), p.types[source]) for name, source in there.items()}
    schedule = operand_gradients(call._replace(types=types, results=results), _bound(p), _kinds(p))
    rows = {f"d{name}_rows": f"d{source}_rows" for name, source in there.items()}
    names = {**inputs, **rows, **{f"d{name}": f"d{source}" for name, source in there.items()}}
    names |= {f"grad_{name}": _gradient(operand) for name, operand in of_results.items()}
    several, sums = times_shared(p.G, p.H), list[Item]()
    scratch = {rows[name]: size for name, size in schedule.scratch.items()}
    if several > 1:  # each of the heads that one key head stands as has a gradient of it
        names |= {"dk": "dk_parts", "dq": "dq_parts"}
        scratch |= dict.fromkeys(("dk_parts", "dq_parts"), several * BYTES[p.types["v"]] * prod(p.shape("k")))
        part = operand_steps.operand_gradients(
            p._replace(H=p.G * several), Operands(q="r", k="k"), names={"grad_r": "dq_parts", "grad_new_k": "dk_parts"}
        )  # fmt: skip
        sums += part.steps
        scratch |= part.scratch
    computed = renamed(_with_decays(schedule.steps, "w" in flows), names)
    return replace(schedule, steps=(*computed, *sums), scratch=scratch)


def _vectors(of_operands: Schedule, others: Mapping[str, int]) -> dict[str, int]:
    """Return how many neighbours of each input are read at once, by one kernel or another."""
    named = {_NAMES.get(name, name): width for name, width in of_operands.vectors.items()}
    return {name: max(named.get(name, 1), others.get(name, 1)) for name in {*named, *others}}


def _rows(p: Problem) -> dict[str, str]:
    return {**dict.fromkeys(map(_buffer, (*_operands(p), "w")), _DIMS), _buffer("v"): "BTHV"}


def _dense(p: Problem) -> tuple[str, ...]:
    gated = ("v", "write_gate") if "write_gate" in p.types else ()
    return (*sorted(_sources(p)), *gated)
