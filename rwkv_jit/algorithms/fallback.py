"""Decays without a promise: the tensor cores for all heads, the recurrent kernels for heads outside their range.

The forward of the first finds out which heads of which sequences these are, on the device, so nothing waits for the
host; then the recurrent kernels compute them once more, exactly, in place of what is not right there. Where no head
leaves the range, that is a kernel that returns at once. Forwards that walk through such chunks by themselves need no
second one: there the flags are for the backward alone.

What is kept for the backward is what the first forward keeps, and a flag per sequence and head: the backward repeats
the forward of the recurrent kernels for the heads with a flag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rwkv_jit.algorithms import recurrent
from rwkv_jit.problem import Problem
from rwkv_jit.schedule import Schedule, aligned


def kept(p: Problem, fast: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward keeps beside what the fast one does."""
    return {**fast, "flags": _flags(p)}


def _flags(p: Problem) -> Any:
    return 4 * p.N * p.H


def _recurrent(p: Problem) -> Problem:
    return p._replace(backend="recurrent", chunk_len=0, num_threads=None, training=True)


def forward(p: Problem, fast: Schedule, fast_is_exact: bool) -> Schedule:
    """Return the fast forward, and the recurrent one of the heads that it has flagged, where it is not exact there."""
    if fast_is_exact and not p.training:
        return fast  # with nothing to keep, no flags either
    flags = {"flags": _flags(p)}
    left, scratch = ({**fast.kept, **flags}, fast.scratch) if p.training else (fast.kept, {**fast.scratch, **flags})
    if fast_is_exact:
        return replace(fast, kept=left, scratch=scratch)
    repeat = recurrent.forward_step(_recurrent(p), {"checkpoints": None, "sa": None, "leaves": "flags"})
    # Both write y: what the fast one has on the other stream comes first.
    return replace(fast, steps=(*fast.steps, repeat._replace(waits=True)), kept=left, scratch=scratch)


def backward(p: Problem, fast: Schedule) -> Schedule:
    """Return the fast backward, and the recurrent forward and backward of the heads with a flag."""
    exact = _recurrent(p)
    # What the fast backward may know by the same names.
    pieces = {name: f"exact_{name}" for name in recurrent.kept(exact)}
    bind = {**dict.fromkeys(("checkpoints", "sa")), **pieces, "leaves": "flags"}
    again = recurrent.forward_step(exact, {**bind, "y": None, "final_state": None})
    gradients = recurrent.backward_step(exact, {**bind, "sa_all": pieces.get("sa")})._replace(waits=True)
    sizes = {pieces[name]: aligned(size) for name, size in recurrent.kept(exact).items()}
    return replace(fast, steps=(*fast.steps, again, gradients), scratch={**fast.scratch, **sizes})
