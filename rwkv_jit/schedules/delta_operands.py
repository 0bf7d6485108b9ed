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

from rwkv_jit.schedules import common, layer_gradients, layers
from rwkv_jit.schedules import operands as operand_steps
from rwkv_jit.schedules.layers import Given
from rwkv_jit.schedules.operands import Operands
from rwkv_jit.schedules.problem import BYTES, STATE, Op, Problem
from rwkv_jit.schedules.schedule import Item, Result, Schedule, Step, Zero, aligned, renamed

_DIMS = "BTHK"  # the dimensions of operands
# What the kernels of operands call the inputs.
_NAMES = {"k": "k", "q": "r", "beta": "beta", "g": "w", "A_log": "a_log", "dt_bias": "dt_bias"}
_RESULTS = {"r": "r", "w": "w", "new_k": "k", "a": "a", "b": "b"}


def below(p: Problem) -> Problem:
    """Return the problem of the op below."""
    assert p.op.through is not None
    return p._replace(op=p.op.through, types=_types(p), decay="log", G=0, traits=(), wanted=_wanted(p))


# ---- operands ----------------------------------------------------------------------------------------------------


def kinds(op: Op, present: Collection[str], traits: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return what the kernels of operands are told of a call, by its inputs and the switches of its op."""
    gate = "log" if "w" in present else "none"
    if "a_log" in present:
        gate = "softplus" if traits.get("lower_bound") is None else "bounded"
    of = {"BTH": "head", _DIMS: "channel"}
    norm, rate_map = "l2" if traits.get("qk_norm") else "none", traits.get("beta_map", "identity")
    return gate, of[op.inputs.get("w", "BTH")], rate_map, of[op.inputs["beta"]], norm


def _kinds(p: Problem) -> tuple[str, str, str, str, str]:
    return kinds(p.op, p.types, dict(p.traits))


def _has_gradient_of_decays_added(p: Problem) -> bool:
    """Return whether log-decays are an input of wkv7, and a is computed with them too."""
    gate, gate_of, *_ = _kinds(p)
    return gate == "log" and gate_of == "channel"


def _computes_decays(p: Problem) -> bool:
    gate, gate_of, *_ = _kinds(p)
    is_narrow = p.training and _has_gradient_of_decays_added(p) and p.types["w"] != "fp32"
    return layers.makes_decays(gate, gate_of) or is_narrow


def _computes_queries(p: Problem) -> bool:
    return bool(p.trait("qk_norm") or p.G != p.H)


def _operands(p: Problem) -> dict[str, str]:
    """Return what the kernel makes: the inputs of wkv7, and their types."""
    storage = p.types["v"]
    computed = {"r": storage} if _computes_queries(p) else {}
    computed |= {"w": "fp32"} if _computes_decays(p) else {}
    return computed | dict.fromkeys("kab", storage)


def _types(p: Problem) -> dict[str, str]:
    inputs = {"r": p.types["r"], "w": p.types.get("w", p.types["v"]), "v": p.types["v"]}
    types = inputs | _operands(p)
    assert p.op.through is not None
    return {name: types[name] for name in p.op.through.inputs}


def _buffer(name: str) -> str:
    return f"operand_{name}"


def _gradient(name: str) -> str:
    return f"d{_buffer(name)}"


def _sources(p: Problem) -> set[str]:
    return {"k", "beta", "w", "a_log", "dt_bias", *(["r"] if _computes_queries(p) else [])} & set(p.types)


def _wanted(p: Problem) -> tuple[str, ...]:
    """Return `Problem.wanted` of wkv7: what is computed wants a gradient where one of its sources does."""
    wanted = set(p.wanted or (*p.types, STATE))
    there = {"v"} if wanted & {"v", "write_gate"} else set()
    if wanted & _sources(p):
        there |= set(_operands(p))
    there |= {name for name in ("r", "w") if name in p.types} & wanted
    there |= {STATE} & wanted
    assert p.op.through is not None
    names = (*p.op.through.inputs, STATE)
    return () if there.issuperset(names) else tuple(name for name in names if name in there)


def _sizes(p: Problem) -> dict[str, Any]:
    rows = p.B * p.T * p.H
    sizes = {_buffer(name): aligned(BYTES[storage] * rows * p.K) for name, storage in _operands(p).items()}
    return sizes | ({_buffer("v"): aligned(BYTES[p.types["v"]] * rows * p.V)} if "write_gate" in p.types else {})


def _is_empty(p: Problem) -> bool:
    return 0 in (p.B, p.T, p.H)


def _is_without_decays(p: Problem) -> bool:
    return "w" not in p.types


def _inputs(p: Problem) -> dict[str, str | None]:
    absent = set() if _computes_queries(p) else {"q"}
    return {name: source if source in p.types and name not in absent else None for name, source in _NAMES.items()}


def _call(p: Problem) -> Given:
    types = {name: p.types[source] for name, source in _inputs(p).items() if source is not None}
    several = layers.times_shared(p.G, p.H)
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


def kept(p: Problem, inner: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward keeps: what was computed, and what the op below does."""
    return {**_sizes(p), **inner}


def forward(p: Problem, inner: Schedule) -> Schedule:
    """Return the forward, around that of the op below."""
    computed = _operands(p)
    names: dict[str, Any] = {name: _buffer(name) for name in computed}
    results = {operand: _buffer(operand) if operand in computed else None for operand in _RESULTS.values()}
    targets = {name: results[operand] for name, operand in _RESULTS.items()}
    before: list[Item] = []
    vectors = dict(inner.vectors)
    if "write_gate" in p.types:
        names["v"] = _buffer("v")
    if not _is_empty(p):
        operands = layers.delta_operands(_call(p), _bound(p), _kinds(p))
        before += renamed(_with_decays(operands.steps, "w" in computed), {**_inputs(p), **targets})
        vectors = _vectors(p, operands, vectors)
    if "write_gate" in p.types and not _is_empty(p):
        gated = layers.gated(_of_gate(p), "identity")
        before += renamed(gated.steps, {"x": "v", "g": "write_gate", "y": _buffer("v")})
        vectors |= {"v": gated.vectors["x"], "write_gate": gated.vectors["g"]}
    scratch = dict(inner.scratch)
    if _is_without_decays(p):
        names["w"] = _buffer("w")
        before.append(Zero(names["w"]))
        scratch[names["w"]] = _bytes_of_zeros(p)
    left = {**_sizes(p), **inner.kept} if p.training else {}
    scratch |= {} if p.training else _sizes(p)
    return replace(
        inner, steps=(*before, *renamed(inner.steps, names)), results=common.forward_results(p), kept=left,
        scratch=scratch, vectors=vectors, main=_launches(before) + inner.main,
        rows=_rows(p, inner), dense=_dense(p),
    )  # fmt: skip


def backward(p: Problem, inner: Schedule) -> Schedule:
    """Return the backward, around that of the op below."""
    computed, scratch, vectors = _operands(p), dict(inner.scratch), dict(inner.vectors)
    flows = dict(computed)  # what has a gradient that goes on to the sources
    if _has_gradient_of_decays_added(p) and "dw" in inner.results:
        flows["w"] = "fp32"
    names: dict[str, Any] = {name: _buffer(name) for name in computed}
    before, after = list[Item](), list[Item]()
    fixed = [name for name in p.op.fixed if name in p.types]
    if _is_without_decays(p):
        names["w"] = _buffer("w")
        before.append(Zero(names["w"]))
        scratch[names["w"]] = _bytes_of_zeros(p)
    if _is_empty(p):
        flows = dict.fromkeys(flows, "fp32")
        after += [
            common.sum_rows(f"d{name}_rows", f"d{name}", 1, 0, prod(p.shape(name)), p.types[name]) for name in fixed
        ]
        scratch |= {f"d{name}_rows": 0 for name in fixed}
    elif "dk" in inner.results:
        of_operands = _operand_gradients(p, flows)
        after += of_operands.steps
        scratch |= of_operands.scratch
        vectors = _vectors(p, of_operands, vectors)
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
        gated = layer_gradients.backward("gated", call, layer_gradients.Options(kinds=("identity",)), ("x", "g"))
        sources = {"x": "v", "g": "write_gate", "grad_y": _gradient("v"), "dx": "dv", "dg": "dwrite_gate"}
        after += renamed(gated.steps, sources)
        vectors |= {"v": gated.vectors["x"], "write_gate": gated.vectors["g"]}
    if after and isinstance(after[0], Step):
        after[0] = after[0]._replace(waits=any(step.is_beside for step in inner.launches))
    return replace(
        inner, steps=(*before, *renamed(inner.steps, names), *after), results=common.backward_results(p),
        scratch=scratch, vectors=vectors, main=inner.main, rows=_rows(p, inner), dense=_dense(p),
    )  # fmt: skip


def _operand_gradients(p: Problem, flows: dict[str, str]) -> Schedule:
    """Return the schedule of the gradients of what operands were computed from, with the names of this op."""
    call, inputs = _call(p), _inputs(p)
    there = {name: source for name, source in inputs.items() if source is not None}
    of_results = {name: operand for name, operand in _RESULTS.items() if operand in flows}
    types = {**call.types, **{f"grad_{name}": flows[operand] for name, operand in of_results.items()}}
    results = {f"d{name}": Result(p.shape(source), p.types[source]) for name, source in there.items()}
    options = layer_gradients.Options(_bound(p), _kinds(p))
    schedule = layer_gradients.backward(
        "delta_operands", call._replace(types=types, results=results), options, [*there]
    )
    names = {**inputs, **{f"d{name}": f"d{source}" for name, source in there.items()}}
    names |= {f"grad_{name}": _gradient(operand) for name, operand in of_results.items()}
    several, scratch, sums = layers.times_shared(p.G, p.H), dict(schedule.scratch), list[Item]()
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


def _vectors(p: Problem, operands: Schedule, others: dict[str, int]) -> dict[str, int]:
    """Return how many neighbours of each input are read at once, by one kernel or another."""
    named = {_NAMES.get(name, name): width for name, width in operands.vectors.items()}
    several = {name: max(named.get(name, 1), others.get(name, 1)) for name in {*named, *others}}
    return {name: width for name, width in several.items() if name in p.types or name == "dy"}


def _rows(p: Problem, inner: Schedule) -> dict[str, str]:
    computed = dict.fromkeys(map(_buffer, (*_operands(p), "w")), _DIMS)
    return {**inner.rows, **computed, _buffer("v"): "BTHV"}


def _dense(p: Problem) -> tuple[str, ...]:
    gated = ("v", "write_gate") if "write_gate" in p.types else ()
    return (*sorted(_sources(p)), *gated)


def _bytes_of_zeros(p: Problem) -> Any:
    return BYTES[p.types["v"]] * p.B * p.T * p.H * p.K


def _launches(several: Sequence[Item]) -> int:
    return sum(isinstance(each, Step) for each in several)
