"""Rows of another type on the tensor cores: as float16 rows of another call, whose results have their type again.

float32 rows do so where `torch.set_float32_matmul_precision` allows products of numbers with eleven bits, summed in
float32; bfloat16 rows where `set_bfloat16_precision` says so. float16 ends at 65504 and has fewer digits below 6e-5, so
tensors pass times powers of two: v and dy always, q (or r) and k where their largest number is far from one. What is
linear in them is divided again. Decays and u keep their type, and states are float32. a and b of wkv7 pass as they are:
only their product could be scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step, Zero, aligned, renamed

_THREADS, _TOKENS = 256, 8  # of a block
Q, K, V, DY = 1, 2, 4, 8  # the tensors with a factor, as bits; q is r in some ops
# The powers of two that the largest numbers of v and dy are brought to. Smaller ones leave products of both too few
# digits where decays are strong; greater ones leave too little room for states that grow over tokens. Without decays
# states grow for longer, and there are no factors that take digits.
_EXPONENT, _EXPONENT_WITHOUT_DECAY = -4, -6
_LEAST_EXPONENT, _MOST_EXPONENT = -6, 2  # of the largest numbers of q and k that are not scaled


def applies(p: Problem) -> bool:
    """Return whether the rows of a problem become float16: its kernels are those of the tensor cores."""
    return p.is_narrow and p.backend in ("chunked", "segments", "large", "large_segments")


def narrowed(p: Problem) -> Problem:
    """Return the problem with float16 rows."""
    return p._replace(types={**p.types, **dict.fromkeys(_rows(p), "fp16")}, state_type="fp32")


def kept(p: Problem, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the forward keeps: the float16 rows and what they were scaled by, beside what their kernels do."""
    rows = {_narrow(name): aligned(2 * math.prod(p.shape(name))) for name in _rows(p)}
    return {**rows, "largest_of_rows": 16, **inner}


def forward(p: Problem, algorithm: Any) -> Schedule:
    """Return the forward."""
    inner: Schedule = algorithm.forward(narrowed(p))
    rows, names = _rows(p), {name: _narrow(name) for name in _rows(p)} | {"y": "y_narrow"}
    scratch: dict[str, Any] = {"y_narrow": 2 * p.B * p.T * p.H * p.V, **inner.scratch}
    before: list[Step | Zero] = [Zero("largest_of_rows")]
    scaled = {rows[0]: Q, "k": K}
    before += [_narrow_rows(p, name, factors, "narrow_as_they_are") for name, factors in scaled.items()]
    before.append(_find_largest(p, "v", "v", V))
    if p.has_initial_state:
        before.append(_find_largest(p, "initial_state", None, V, K))
        before.append(_copy(p, "initial_state", "scaled_state", None, (p.state_type, "fp32"), K | V))
        names["initial_state"], scratch["scaled_state"] = "scaled_state", p.state_bytes
    before += [_narrow_rows(p, name, factors, "narrow_again") for name, factors in scaled.items()]
    before += [_narrow_rows(p, name, V if name == "v" else 0) for name in rows if name not in scaled]
    after = [_copy(p, "y_narrow", "y", "y", ("fp16", p.types["v"]), Q | K | V, restores=True)]
    if p.has_final_state:
        after.append(_copy(p, "scaled_final", "final_state", None, ("fp32", p.state_type), K | V, restores=True))
        names["final_state"], scratch["scaled_final"] = "scaled_final", p.state_bytes
    left = kept(p, inner.kept)
    if not p.training:
        scratch |= left
        left = {}
    return _around(p, inner, before, after, names, left, scratch, common.forward_results(p))


def backward(p: Problem, algorithm: Any) -> Schedule:
    """Return the backward, from the rows that the forward has kept."""
    inner: Schedule = algorithm.backward(narrowed(p))
    names = {name: _narrow(name) for name in _rows(p)} | {"dy": "dy_narrow"}
    scratch: dict[str, Any] = {"dy_narrow": 2 * p.B * p.T * p.H * p.V, "largest_of_dy": 16, **inner.scratch}
    before: list[Step | Zero] = [Zero("largest_of_dy"), _find_largest(p, "dy", "y", DY)]
    if p.has_final_state:
        before.append(_find_largest(p, "grad_final_state", None, DY, Q))
        before.append(_copy(p, "grad_final_state", "scaled_grad", None, ("fp32", "fp32"), Q | DY))
        names["grad_final_state"], scratch["scaled_grad"] = "scaled_grad", p.state_bytes
    before.append(_copy(p, "dy", "dy_narrow", "y", (p.types["v"], "fp16"), DY))
    after: list[Step] = []
    factor_of = {_rows(p)[0]: Q, "k": K, "v": V}
    for name in p.op.inputs:
        # The loss is linear in each of the four; its gradient for one of them is not scaled by that one.
        factors = (Q | K | V | DY) - factor_of.get(name, 0)
        if name in p.op.fixed:
            rows = f"d{name}_rows"  # gradients that sequences have, whose scales are taken in their place
            after.append(_rows_step(p, rows, rows, inner.scratch[rows] // 4, p.K, "fp32", factors, restores=True))
        elif name in _rows(p):
            gradient = f"d{name}_narrow"
            names[f"d{name}"], scratch[gradient] = gradient, 2 * math.prod(p.shape(name))
            after.append(_copy(p, gradient, f"d{name}", name, ("fp16", p.types[name]), factors, restores=True))
        else:
            after.append(_copy(p, f"d{name}", f"d{name}", name, (p.types[name],) * 2, factors, restores=True))
    if p.has_initial_state:
        name = "grad_initial_state"
        after.append(_copy(p, name, name, None, ("fp32", "fp32"), Q | DY, restores=True))
    return _around(p, inner, before, after, names, {}, scratch, common.backward_results(p))


def _around(
    p: Problem, inner: Schedule, before: list[Step | Zero], after: list[Step], names: Mapping[str, str],
    left: Mapping[str, Any], scratch: Mapping[str, Any], results: Mapping[str, Result],
) -> Schedule:  # fmt: skip
    """Return the schedule of the other call with what comes before and after it."""
    last = after[0]._replace(waits=any(step.is_beside for step in inner.launches))
    steps = (*before, *renamed(inner.steps, names), last, *after[1:])
    rows = {_narrow(name): p.op.inputs[name] for name in _rows(p)} | {"dy_narrow": p.op.output}
    main = len([each for each in before if isinstance(each, Step)]) + inner.main
    return replace(
        inner, steps=steps, results=results, kept=left, scratch=scratch, vectors=common.vectors(p), main=main, rows=rows
    )


def widen(p: Problem, name: str, target: str) -> Step:
    """Return the step that copies an input without tokens to float32."""
    shape = p.shape(name)
    return _rows_step(p, name, target, math.prod(shape), shape[-1], p.types[name])


def _rows(p: Problem) -> list[str]:
    """Return the inputs that become float16, q or r first: those with tokens, but for decays."""
    return [name for name in p.op.streamed if name not in p.op.wide]


def _narrow(name: str) -> str:
    return f"{name}_narrow"


def _narrow_rows(p: Problem, name: str, factors: int, entry: str = "narrow_rows") -> Step:
    more = {"largest": "largest_of_rows"} if entry == "narrow_as_they_are" else {}
    return _step(p, entry, name, name, (p.types[name], "fp16"), factors, {"to": _narrow(name), **more})


def _find_largest(p: Problem, source: str, like: str | None, slot: int, factors: int = 0) -> Step:
    """Return the step that looks for the largest number of a tensor; `slot` says what it counts as."""
    storage = p.types["v"] if like is not None else p.state_type if slot == V else "fp32"
    bind = {"largest": "largest_of_dy" if slot == DY else "largest_of_rows"}
    return _step(p, "find_largest", source, like, (storage, "fp16"), factors, bind, slot)


def _copy(
    p: Problem, source: str, target: str, like: str | None, types: tuple[str, ...], factors: int, restores: bool = False
) -> Step:
    return _step(p, "narrow_rows", source, like, types, factors, {"to": target}, restores=restores)


def _rows_step(
    p: Problem, source: str, target: str, count: Any, size: Any, storage: str, factors: int = 0, restores: bool = False
) -> Step:
    """Return a step for so many numbers in rows of a size, which become float32."""
    parameters, tokens = _parameters(p, (storage, "fp32"), size, 1, factors, restores), count // max(size, 1)
    bind = {"from": source, "to": target, "from_strides": (count, size, size), "tokens": tokens, "heads": 1}
    return Step("narrow_rows", "narrow_rows", parameters, (-(-tokens // _TOKENS), 1, 1), {**_largest(factors), **bind})


def _step(
    p: Problem, entry: str, source: str, like: str | None, types: tuple[str, ...], factors: int,
    bind: Mapping[str, Any], slot: int = 0, restores: bool = False,
) -> Step:  # fmt: skip
    """Return a step for a tensor like an input, like y, or, without one of these, for states."""
    if like is None:  # states, in rows of K numbers whatever these are, so that blocks have no more than they can
        batch, tokens, heads, size = 1, p.N * p.H * p.V, 1, p.K
    else:
        batch, tokens, heads = p.B, p.T, p.H
        size = p.V if like == "y" else getattr(p, p.op.inputs[like][-1])
    # States may begin anywhere. Of others as many as the wider of both types has in 16 bytes.
    vector = 1 if like is None else min(common.vector(size, storage) for storage in types)
    has_gaps = like is not None and not restores
    strides: Any = source if has_gaps else (tokens * heads * size, heads * size, size)
    parameters = _parameters(p, types, size, vector, factors, restores, slot or factors)
    bind = {"from": source, "from_strides": strides, "tokens": tokens, "heads": heads, **_largest(factors), **bind}
    return Step("narrow_rows", entry, parameters, (batch * -(-tokens // _TOKENS), 1, 1), bind)


def _parameters(
    p: Problem, types: tuple[str, ...], size: int, vector: int, factors: int, restores: bool, slot: int = 0
) -> dict[str, Parameter]:
    return {
        "T_FROM": types[0], "T_TO": types[1], "SIZE": size, "VECTOR": vector, "TOKENS": _TOKENS,
        "NUM_THREADS": _THREADS, "RESTORES": restores, "FACTORS": factors, "SLOT": {Q: 0, K: 1, V: 2}.get(slot, 0),
        "EXPONENT": _EXPONENT if p.decay != "none" else _EXPONENT_WITHOUT_DECAY, "LEAST_EXPONENT": _LEAST_EXPONENT,
        "MOST_EXPONENT": _MOST_EXPONENT,
    }  # fmt: skip


def _largest(factors: int) -> dict[str, str | None]:
    """Return what the arguments with the largest sizes are bound to."""
    return {
        "largest_of_rows": "largest_of_rows" if factors & (Q | K | V) else None,
        "largest_of_dy": "largest_of_dy" if factors & DY else None,
    }
