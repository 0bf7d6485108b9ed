"""Calls that gla runs, with decays of heads, with forget gates, or with the steps of a state space.

`diagonal_operands` makes r, k, w and v of `gla`: it repeats key heads for their value heads, spreads decays of heads
over channels, and makes keys of forget gates, and decays and values of steps. `skip_gate` behind the recurrence adds D
x and multiplies by the gate. The backward makes the operands again, which costs less than to keep them.

    forward   operands; all launches of gla; [what stands behind]
    backward  [gradients of what stands behind]; operands; all launches of gla; gradients of inputs
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rwkv_jit.schedules import common, operands
from rwkv_jit.schedules.operands import Behind, Operands
from rwkv_jit.schedules.problem import BYTES, STATE, Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step, aligned, renamed

_BUFFERS = {"r": "operand_r", "new_k": "operand_k", "w": "operand_w", "new_v": "operand_v"}
_INNER = {"r": "r", "new_k": "k", "w": "w", "new_v": "v"}  # what the op below calls them
_DIMS = {"operand_r": "BTHK", "operand_k": "BTHK", "operand_w": "BTHK", "operand_v": "BTHV"}
# What stands behind a recurrence reads its y, and makes its dy.
INNER_Y, INNER_DY = "y_inner", "dy_inner"


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
    computed = operands.operand_bytes(p, _operands(p))
    return {_INNER[name]: _BUFFERS[name] for name in computed}


def below(p: Problem) -> Problem:
    """Return the problem of gla."""
    assert p.op.through is not None
    storage = p.types[p.op.names[p.op.lead]]
    how = _operands(p)
    w = "fp32" if how.source == "steps" else p.types["w"]
    types = {"r": storage, "k": storage, "v": storage, "w": w}
    return p._replace(op=p.op.through, types=types, decay="log", G=0, traits=(), wanted=_wanted(p))


def _wanted(p: Problem) -> tuple[str, ...]:
    """Return `Problem.wanted` of gla: where one gradient of an operand goes on, all do."""
    wanted, how = set(p.wanted or (*p.types, STATE)), _operands(p)
    flows = set(_inner_names(p)) | ({"w"} if how.source == "gates" else set())
    sources = {how.q, how.k, how.v, how.g, how.A, how.dt_bias} - {""}
    there = {name for name in ("r", "k", "v", "w", STATE) if name in wanted and name not in flows}
    there |= flows if wanted & sources else set()
    assert p.op.through is not None
    names = (*p.op.through.inputs, STATE)
    return () if there.issuperset(names) else tuple(name for name in names if name in there)


def _bytes_of_y(p: Problem) -> Any:
    return aligned(BYTES[p.types["v"]] * p.B * p.T * p.H * p.V)


def kept_behind(p: Problem) -> dict[str, Any]:
    """Return the bytes of y as the recurrence leaves it, which the gradient of a gate takes."""
    return {INNER_Y: _bytes_of_y(p)} if "z" in p.types else {}


def kept(p: Problem, inner: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward keeps: what the op below does, and y before its gate."""
    return {**kept_behind(p), **inner}


def forward(p: Problem, inner: Schedule) -> Schedule:
    """Return the forward, around that of the op below."""
    how, last = _operands(p), behind(p)
    before = operands.operands(p, how, _BUFFERS)
    names: dict[str, Any] = {**_inner_names(p), **({} if last is None else {"y": INNER_Y})}
    vectors = _joined(dict(inner.vectors), operands.operand_vectors(p, how))
    scratch, left = {**inner.scratch, **_sizes(p)}, {**inner.kept}
    after = list[Step]()
    if last is not None:
        after, more = forward_behind(p, last, inner)
        vectors = _joined(vectors, more)
        if p.training and last.z:
            left = kept(p, left)
        else:
            scratch[INNER_Y] = _bytes_of_y(p)
    return replace(
        inner, steps=(before, *renamed(inner.steps, names), *after), results=common.forward_results(p), kept=left,
        scratch=scratch, vectors=_of_inputs(p, vectors), main=1 + inner.main, rows=_rows(inner),
    )  # fmt: skip


def backward(p: Problem, inner: Schedule) -> Schedule:
    """Return the backward, around that of the op below."""
    how, last = _operands(p), behind(p)
    vectors, scratch = dict(inner.vectors), {**inner.scratch, **_sizes(p)}
    before, after = list[Item](), list[Item]()
    names: dict[str, Any] = dict(_inner_names(p))
    dy = "dy"
    if last is not None:
        first, sizes, more = backward_behind(p, last)
        before += first
        scratch |= sizes
        vectors = _joined(vectors, more)
        if last.z:
            dy = names["dy"] = INNER_DY
    before.append(operands.operands(p, how, _BUFFERS))
    flows = {name: buffer for name, buffer in _flows(p).items() if f"d{_INNER[name]}" in inner.results}
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
        after[0] = part.steps[0]._replace(waits=any(step.is_beside for step in inner.launches))
    launches = sum(isinstance(each, Step) for each in before)
    return replace(
        inner, steps=(*before, *renamed(inner.steps, names), *after), results=common.backward_results(p),
        scratch=scratch, vectors=_of_inputs(p, vectors), main=launches + inner.main, rows=_rows(inner),
    )  # fmt: skip


def _decay_type(p: Problem) -> str:
    return below(p).types["w"]


def _flows(p: Problem) -> dict[str, str]:
    """Return the operands whose gradients go on, by their names in launches; gates are decays themselves."""
    computed = operands.operand_bytes(p, _operands(p))
    gates = {"w"} if _operands(p).source == "gates" else set[str]()
    return {name: buffer for name, buffer in _BUFFERS.items() if name in {*computed, *gates}}


# ---- what stands behind, of this and of dedicated kernels ----------------------------------------------------------


def forward_behind(p: Problem, last: Behind, inner: Schedule) -> tuple[list[Step], dict[str, int]]:
    """Return the launch behind a recurrence that leaves its y in a buffer, and what it reads at once."""
    step = operands.skip_gate(p, last, INNER_Y)
    waits = any(each.is_beside for each in inner.launches)
    return [step._replace(waits=waits)], operands.behind_vectors(p, last, INNER_Y)


def backward_behind(p: Problem, last: Behind) -> tuple[list[Step], dict[str, Any], dict[str, int]]:
    """Return the launches of the gradients behind a recurrence, their buffers, and what they read at once."""
    y = INNER_Y if last.z else None
    part = operands.skip_gate_gradients(p, last, INNER_Y, names={"dx": None, "y": y})
    scratch = {**part.scratch, **({INNER_DY: _bytes_of_y(p)} if last.z else {})}
    return [*part.steps], scratch, operands.behind_vectors(p, last, INNER_Y, "dy")


def _joined(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 1), second.get(name, 1)) for name in {*first, *second}}


def _of_inputs(p: Problem, vectors: dict[str, int]) -> dict[str, int]:
    """Return how many neighbours of each input are read at once, without what are no inputs."""
    return {name: width for name, width in vectors.items() if name in p.types or name == "dy"}


def _rows(inner: Schedule) -> dict[str, str]:
    return {**inner.rows, **_DIMS, INNER_DY: "BTHV", INNER_Y: "BTHV"}
