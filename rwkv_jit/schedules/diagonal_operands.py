"""Calls that gla runs, with decays of heads, with forget gates, or with the steps of a state space.

`diagonal_operands` makes r, k, w and v of `gla`: it repeats key heads for their value heads, spreads decays of heads
over channels, and makes keys of forget gates, and decays and values of steps. `skip_gate` behind the recurrence adds D
x and multiplies by the gate. The backward makes the operands again, which costs less than to keep them.

    forward   operands; all launches of gla; [what stands behind]
    backward  [gradients of what stands behind]; operands; all launches of gla; gradients of inputs
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rwkv_jit.schedules import operands
from rwkv_jit.schedules.operands import Around, Behind, Operands
from rwkv_jit.schedules.problem import BYTES, Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step, aligned

_BUFFERS = {"r": "operand_r", "new_k": "operand_k", "w": "operand_w", "new_v": "operand_v"}
_INNER = {"r": "r", "new_k": "k", "w": "w", "new_v": "v"}  # what the op below calls them
# What stands behind a recurrence reads its y, and makes its dy.
INNER_Y, INNER_DY = "y_inner", "dy_inner"
_ROWS = {
    **dict.fromkeys(("operand_r", "operand_k", "operand_w"), "BTHK"),
    **dict.fromkeys(("operand_v", INNER_DY, INNER_Y), "BTHV"),
}


def steps_of(p: Problem) -> Operands:
    """Return how the steps of a state space are computed."""
    least, most = p.trait("least_step"), p.trait("most_step")
    has_limits = not p.trait("dt_softplus") or (least, most) != (None, None)
    limits = (least or 0.0, math.inf if most is None else most) if has_limits else None
    return Operands(
        "steps", g="beta", A="a_log", dt_bias="dt_bias" if "dt_bias" in p.types else "",
        has_softplus=bool(p.trait("dt_softplus")), limits=limits,
    )  # fmt: skip


def _operands(p: Problem) -> Operands:
    if "k" not in p.op.inputs:
        return Operands("gates", g="w")
    how = steps_of(p)._replace(v="v") if "a_log" in p.op.inputs else Operands("heads", g="w")
    return how._replace(q="r", k="k") if p.G and p.G != p.H else how


def behind(p: Problem) -> Behind | None:
    """Return what stands behind the recurrence; None where nothing does."""
    share = {"x": "v", "D": "own"} if "own" in p.types else {}
    if not share and "z" not in p.types:
        return None
    return Behind(**share, z="z" if "z" in p.types else "")


def _sizes(p: Problem) -> dict[str, Any]:
    return {_BUFFERS[name]: aligned(size) for name, size in operands.operand_bytes(p, _operands(p)).items()}


def _inner_names(p: Problem) -> dict[str, str]:
    """Return the inputs of gla that are computed, and their buffers."""
    return {_INNER[name]: _BUFFERS[name] for name in operands.operand_bytes(p, _operands(p))}


def types(p: Problem) -> dict[str, str]:
    """Return the storage types of the inputs of gla."""
    storage = p.types[p.op.names[p.op.lead]]
    return {"r": storage, "k": storage, "v": storage, "w": _decay_type(p)}


def sources(p: Problem) -> dict[str, set[str]]:
    """Return the inputs of which those of gla are computed: where one gradient of these goes on, all do."""
    how = _operands(p)
    flows = {*_inner_names(p), *(["w"] if how.source == "gates" else [])}
    return dict.fromkeys(flows, {how.q, how.k, how.v, how.g, how.A, how.dt_bias})


def _bytes_of_y(p: Problem) -> Any:
    return aligned(BYTES[p.types["v"]] * p.B * p.T * p.H * p.V)


def kept(p: Problem) -> dict[str, Any]:
    """Return the bytes of y as the recurrence leaves it, which the gradient of a gate takes."""
    return {INNER_Y: _bytes_of_y(p)} if "z" in p.types else {}


def forward(p: Problem, inner: Schedule) -> Around:
    """Return what stands around the forward of the op below."""
    how, last = _operands(p), behind(p)
    names, scratch = _inner_names(p), _sizes(p)
    vectors, after = _joined(inner.vectors, operands.operand_vectors(p, how)), list[Step]()
    if last is not None:
        names["y"] = INNER_Y
        after, more = forward_behind(p, last)
        vectors = _joined(vectors, more)
        scratch |= {} if last.z else {INNER_Y: _bytes_of_y(p)}
    return Around([operands.operands(p, how, _BUFFERS)], after, names, vectors, scratch, _ROWS)


def backward(p: Problem, inner: Schedule) -> Around:
    """Return what stands around the backward of the op below."""
    how, last = _operands(p), behind(p)
    vectors, scratch, names, dy = dict(inner.vectors), _sizes(p), _inner_names(p), "dy"
    before, after = list[Item](), list[Item]()
    if last is not None:
        first, sizes, more = backward_behind(p, last)
        before += first
        scratch |= sizes
        vectors = _joined(vectors, more)
        if last.z:
            dy = names["dy"] = INNER_DY
    before.append(operands.operands(p, how, _BUFFERS))
    vectors = _joined(vectors, operands.operand_vectors(p, how))
    # Operands whose gradients go on; gates are decays themselves.
    computed = {*operands.operand_bytes(p, how), *(["w"] if how.source == "gates" else [])}
    flows = {x: y for x, y in _BUFFERS.items() if x in computed and f"d{_INNER[x]}" in inner.results}
    if flows:
        share = last if last is not None and last.D and how.source == "steps" else None
        gradients = {f"grad_{name}": f"d{buffer}" for name, buffer in flows.items()}
        part = operands.operand_gradients(p, how, share, dy, gradients)
        after += part.steps
        scratch |= part.scratch
        sizes = {**operands.operand_bytes(p, how), "w": BYTES[_decay_type(p)] * p.B * p.T * p.H * p.K}
        for name, buffer in flows.items():
            names[f"d{_INNER[name]}"] = f"d{buffer}"
            scratch[f"d{buffer}"] = sizes[name]
        vectors = _joined(vectors, operands.operand_vectors(p, how, share, dy))
    return Around(before, after, names, vectors, scratch, _ROWS)


def _decay_type(p: Problem) -> str:
    return "fp32" if _operands(p).source == "steps" else p.types["w"]


# ---- what stands behind, of this and of dedicated kernels ----------------------------------------------------------


def forward_behind(p: Problem, last: Behind) -> tuple[list[Step], dict[str, int]]:
    """Return the launch behind a recurrence that leaves its y in a buffer, and what it reads at once."""
    return [operands.skip_gate(p, last, INNER_Y)], operands.behind_vectors(p, last, INNER_Y)


def backward_behind(p: Problem, last: Behind) -> tuple[list[Step], dict[str, Any], dict[str, int]]:
    """Return the launches of the gradients behind a recurrence, their buffers, and what they read at once."""
    y = INNER_Y if last.z else None
    part = operands.skip_gate_gradients(p, last, INNER_Y, names={"dx": None, "y": y})
    scratch = {**part.scratch, **({INNER_DY: _bytes_of_y(p)} if last.z else {})}
    return [*part.launches], scratch, operands.behind_vectors(p, last, INNER_Y, "dy")


def _joined(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 1), second.get(name, 1)) for name in {*first, *second}}
