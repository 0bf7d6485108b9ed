"""Calls that another op runs, the op below: its schedule stands within launches that make its inputs of others.

An op may have dedicated kernels too, which the rule takes where they serve.
"""

from __future__ import annotations

from typing import Any

from rwkv_jit.schedules import delta_operands, diagonal_operands
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule

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
