"""Calls that another op runs, the op below: its schedule stands within launches that make its inputs of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rwkv_jit.schedules import delta_operands, diagonal_operands, operands
from rwkv_jit.schedules.operands import Slots
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule, Step

DEDICATED = "dedicated"  # the backend of kernels that an op has for itself
_MODULES: dict[str, Any] = {"delta": delta_operands, "diagonal": diagonal_operands}


def applies(p: Problem) -> bool:
    """Return whether another op runs a problem."""
    return p.op.through is not None and p.backend != DEDICATED


def _module(p: Problem) -> Any:
    assert p.op.through is not None
    return _MODULES[p.op.through.family]


def below(p: Problem) -> Problem:
    """Return the problem of the op below."""
    problem: Problem = _module(p).below(p)
    return problem


def kept(p: Problem, inner: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward keeps, with what the op below does."""
    sizes: dict[str, Any] = _module(p).kept(p, inner)
    return sizes


def forward(p: Problem, inner: Schedule) -> Schedule:
    """Return the forward, around that of the op below."""
    schedule: Schedule = _module(p).forward(p, inner)
    return schedule


def backward(p: Problem, inner: Schedule) -> Schedule:
    """Return the backward, around that of the op below."""
    schedule: Schedule = _module(p).backward(p, inner)
    return schedule


def over_pool(p: Problem, inner: Schedule, slots: Slots) -> Schedule:
    """Return the launches over a pool, around those of the op below; rows without a slot get zeros for y."""
    schedule = forward(p, inner)
    several = [operands.over_slots(x, slots) if isinstance(x, Step) else x for x in schedule.steps]
    last = schedule.launches[-1]
    y = int(last.parameters["VECTOR"]) if operands.is_behind(last) else inner.vectors.get("y", 1)
    return replace(schedule, steps=tuple(several), results={}, vectors={**schedule.vectors, "y": y})
