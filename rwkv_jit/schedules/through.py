"""Calls that another op runs, the op below: its schedule stands within launches that make its inputs of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rwkv_jit.schedules import common, delta_operands, diagonal_operands, operands
from rwkv_jit.schedules.operands import Around, Slots
from rwkv_jit.schedules.problem import STATE, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step, renamed

# The backends of kernels that take the inputs of an op as they are: those that it has for itself, those of updates.
DEDICATED, UPDATE = "dedicated", "update"
_MODULES: dict[str, Any] = {"delta": delta_operands, "diagonal": diagonal_operands}


def applies(p: Problem) -> bool:
    """Return whether another op runs a problem."""
    return p.op.through is not None and p.backend not in (DEDICATED, UPDATE)


def _module(p: Problem) -> Any:
    assert p.op.through is not None
    return _MODULES[p.op.through.family]


def below(p: Problem) -> Problem:
    """Return the problem of the op below: an input that is computed wants a gradient where one of its sources does."""
    op = p.op.through
    assert op is not None
    wanted, sources = set(p.wanted or (*p.types, STATE)), _module(p).sources(p)
    types = _module(p).types(p)
    names = tuple(name for name in (*op.inputs, STATE) if wanted & sources.get(name, {name}))
    return p._replace(
        op=op, types={name: types[name] for name in op.inputs}, decay="log", G=0, traits=(),
        wanted=() if len(names) > len(op.inputs) else names,
    )  # fmt: skip


def kept(p: Problem, inner: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward keeps, with what the op below does."""
    return {**_module(p).kept(p), **inner}


def forward(p: Problem, inner: Schedule) -> Schedule:
    """Return the forward, around that of the op below."""
    pieces, schedule = _module(p).kept(p), _around(p, inner, _module(p).forward(p, inner))
    results = {**common.forward_results(p), **_of_shard(inner)}
    if p.training:
        return replace(schedule, results=results, kept={**pieces, **inner.kept})
    return replace(schedule, results=results, scratch={**schedule.scratch, **pieces})


def backward(p: Problem, inner: Schedule) -> Schedule:
    """Return the backward, around that of the op below."""
    results = {**common.backward_results(p), **_of_shard(inner)}
    return replace(_around(p, inner, _module(p).backward(p, inner)), results=results)


def _of_shard(inner: Schedule) -> dict[str, Result]:
    """Return what a shard does to any state, which its kernels find before a pause."""
    return {name: inner.results[name] for name in ("bias", "transition") if name in inner.results}


def _around(p: Problem, inner: Schedule, around: Around) -> Schedule:
    """Return the schedule of the op below with what stands before and behind it."""
    after = list(around.after)
    # A gradient of the op below that nobody wants may be a buffer, with the name of a result here of another size.
    in_vain = {name: f"{name}_in_vain" for name in inner.scratch if name in {f"d{x}" for x in p.op.names}}
    scratch = {in_vain.get(name, name): size for name, size in inner.scratch.items()}
    if after and isinstance(after[0], Step):
        after[0] = after[0]._replace(waits=any(step.is_beside for step in inner.launches))
    vectors = {name: width for name, width in around.vectors.items() if name in p.types or name == "dy"}
    return replace(
        inner, steps=(*around.before, *renamed(inner.steps, {**in_vain, **around.names}), *after), vectors=vectors,
        scratch={**scratch, **around.scratch}, rows={**inner.rows, **around.rows}, dense=around.dense,
        main=inner.main + sum(isinstance(each, Step) for each in around.before),
    )  # fmt: skip


def over_pool(schedule: Schedule, slots: Slots, y: int) -> Schedule:
    """Return launches over a pool; rows without a slot get zeros for y, of which so many are written at once."""
    several = [operands.over_slots(x, slots) if isinstance(x, Step) else x for x in schedule.steps]
    last = schedule.launches[-1]
    y = int(last.parameters["VECTOR"]) if operands.is_behind(last) else y
    return replace(schedule, steps=tuple(several), results={}, vectors={**schedule.vectors, "y": y})
