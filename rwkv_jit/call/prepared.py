"""Calls that have come before: they have passed all checks, and what they launch is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.call.plan import DTYPES, Plan
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.signatures import BySignature, forget_with
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.problem import STATE, Op, Problem
from rwkv_jit.schedules.schedule import Schedule

_MOST_BACKWARDS = 64  # of a call: they differ in the strides of the gradients of its results

Arrays = Sequence[Tensor | None]  # inputs, initial state, cu_seqlens


class _Backward(NamedTuple):
    """A prepared backward, and which arrays it is for."""

    plan: Plan
    length: int  # arrays that are there
    are_alike: Callable[..., bool]


class Known:
    """A call whose forward is prepared, and from its first backward on that too.

    `arrays` are its inputs, initial state and cu_seqlens, checked; `asked` the chunk_len and num_threads of the caller.
    """

    def __init__(self, problem: Problem, arrays: Arrays, asked: Mapping[str, int]):
        self.problem = problem
        self._backwards: dict[Any, _Backward] = {}
        self._latest: _Backward | None = None
        # The places of the gradients that nobody wants, among those of the inputs and an initial state.
        names = [*problem.op.names, *([STATE] if problem.has_initial_state else [])]
        wanted = problem.wanted or (*problem.types, STATE)
        self._unwanted = [i for i, name in enumerate(names) if name not in wanted]
        forget_with(self)
        schedules = [directions.forward(problem), *([directions.backward(problem)] if problem.training else [])]
        self.keeps = bool(schedules[0].kept)
        requests = [schedule.requests(problem.gpu) for schedule in schedules]
        named = dict(zip((*problem.op.names, "initial_state", "cu_seqlens"), _readable(arrays), strict=True))
        try:
            if asked:  # it may be illegal for the backward alone, which shall be said before a launch
                kernel.get_all(sum(requests, []))
            backward = [step for schedule in schedules[1:] for step in schedule.launches]
            backward.sort(key=lambda step: step.idle_at is not None)  # which may not be needed
            soon = [step.request(problem.gpu) for step in backward]
            self._forward = Plan(schedules[0], problem, named, soon=soon)
        except UnsupportedConfigError as error:
            raise with_nearest(error, problem, schedules[-1], asked) from error

    def forget(self) -> None:
        """Drop the prepared backwards; a graph may hold this call after a fork."""
        self._backwards.clear()
        self._latest = None

    def run(self, arrays: Sequence[Tensor], state: Tensor | None, cu_seqlens: Tensor | None) -> list[Tensor]:
        """Return y, the final state if it is wanted, and if gradients are what the backward needs."""
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, self.problem.T)
        return self._forward.run([*arrays, state, cu_seqlens])

    def differentiate(self, saved: Arrays, dy: Tensor | None, grad_final_state: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of the inputs and of an initial state, None where nobody wants one.

        `saved` are the arrays of the call, and behind them what the forward has kept.
        """
        *arrays, kept = saved
        if dy is None:
            dy = _zeros(self.problem, arrays[0])
        if arrays[-1] is not None:
            arrays = _readable(arrays)  # the forward has checked its values
        given = [*arrays, dy, grad_final_state, kept]
        present = [x for x in given if x is not None]
        latest = self._latest
        if latest is None or len(present) != latest.length or not latest.are_alike(*present):
            latest = self._prepare(given, present)
        grads: list[Any] = latest.plan.run(given)
        for place in self._unwanted:
            grads.insert(place, None)
        return grads

    def _prepare(self, given: Arrays, present: Sequence[Tensor]) -> _Backward:
        signature = tensors.signature(given)
        known = self._backwards.get(signature)
        if known is None:
            if len(self._backwards) >= _MOST_BACKWARDS:
                self._backwards.clear()
            plan = plan_backward(self.problem, given)
            known = self._backwards[signature] = _Backward(plan, len(present), tensors.likeness(present))
        self._latest = known
        return known


def recorded(by_op: Callable[..., Sequence[Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return what runs a known call with gradients, from the call, its inputs, its initial state and cu_seqlens.

    `by_op` does the same as `Known.differentiate` by way of the torch op, which compilers and modes can see.
    """

    class KnownCall(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, known: Known, *given: Any) -> tuple[Tensor, Tensor | None]:
            *arrays, state, cu_seqlens = given
            results = known.run(arrays, state, cu_seqlens)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*given, results[-1] if known.keeps else None)
            ctx.known = known
            return results[0], results[1] if known.problem.has_final_state else None

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None) -> tuple[Any, ...]:
            saved, known = ctx.saved_tensors, ctx.known
            if not torch.is_grad_enabled() and tensors.is_eager((dy, grad_final_state), saved):
                grads: Sequence[Any] = known.differentiate(saved, dy, grad_final_state)
            else:
                grads = by_op(known.problem, saved, dy, grad_final_state)
            return (None, *grads, None) if known.problem.has_initial_state else (None, *grads, None, None)

    # Function.apply looks for transforms first; a known call has none, and saves that time.
    apply: Callable[..., tuple[Tensor, Tensor | None]] = super(torch.autograd.Function, KnownCall).apply
    return apply


def differentiate(problem: Problem, saved: Arrays, dy: Tensor | None, grad_final_state: Tensor | None) -> list[Tensor]:
    """Return the gradients of a call that has run elsewhere, as `Known.differentiate` does."""
    *arrays, kept = saved
    given = [*_readable(arrays), _zeros(problem, arrays[0]) if dy is None else dy, grad_final_state, kept]
    types = tuple(problem.types.items())  # which have a hash
    key = (*problem[:2], types, *problem[3:], tensors.signature(given))
    plan = _backwards.get(key)
    if plan is None:
        plan = _backwards.keep(key, plan_backward(problem, given))
    return plan.run(given)


_backwards: BySignature[Plan] = BySignature()


def plan_backward(problem: Problem, given: Arrays) -> Plan:
    """Prepare the backward of a call, from its arrays, dy, the gradient of the final state and what was kept."""
    names = (*problem.op.names, "initial_state", "cu_seqlens", "dy", "grad_final_state", "saved")
    named = dict(zip(names, given, strict=True))
    problem = problem._replace(
        has_initial_state=named["initial_state"] is not None, has_final_state=named["grad_final_state"] is not None
    )
    return Plan(directions.backward(problem), problem, named, directions.kept(problem))


def _readable(arrays: Arrays) -> list[Tensor | None]:
    *others, cu_seqlens = arrays
    return [*others, None if cu_seqlens is None else tensors.readable_packing(cu_seqlens)]


def _zeros(problem: Problem, x: Tensor | None) -> Tensor:
    """Return the gradient of a y that nothing was made of, on the device of an input."""
    assert x is not None
    shape = tuple(getattr(problem, dim) for dim in problem.op.output)
    return torch.zeros(shape, dtype=DTYPES[problem.types[problem.op.names[problem.op.lead]]], device=x.device)


def with_nearest(
    error: UnsupportedConfigError, problem: Problem, schedule: Schedule, asked: Mapping[str, int]
) -> UnsupportedConfigError:
    """Return an error that names the nearest legal values of what the caller chose."""
    algorithm, step = directions.algorithm(problem), schedule.launches[schedule.main]
    legal = {argument: algorithm.nearest(step, argument, value) for argument, value in asked.items()}
    near = [f"{argument}={value}" for argument, value in legal.items() if value is not None]
    return UnsupportedConfigError(f"{error}; nearest legal: {', '.join(near)}") if near else error


# ---- finding them ------------------------------------------------------------------------------------------------

calls: BySignature[Known] = BySignature()
# The last of those that differ in nothing but tensors behind the first: a check whether these are alike, the call, and
# whether gradients are wanted. To ask every tensor for its signature takes as long as half a launch.
_latest: BySignature[tuple[Callable[..., bool], Known, bool]] = BySignature()
_IS_THERE = partial(is_not, None)  # a call of C, as every known call takes it for each of its tensors


def find(
    asked: tuple[Any, ...], arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, lead: int = 0
) -> tuple[Known | None, bool]:
    """Return a call that has come before, None for others, and whether gradients are wanted.

    `asked` is all of a call but its arrays, and at its end whether gradients are recorded; `lead` is `Op.lead`.
    """
    if not tensors.is_eager():
        return None, asked[-1] and _any_requires_grad(arrays, initial_state)
    given = *arrays, initial_state, cu_seqlens
    try:
        asked = cu_seqlens is not None and _longest(arrays[lead], cu_seqlens), *asked
        there = tuple(map(_IS_THERE, given))
        latest = _latest.get((asked, arrays[lead].shape, there))
        if latest is not None:
            are_alike, known, training = latest
            if are_alike(*compress(given, there)):
                return known, training
    except (AttributeError, TypeError, RuntimeError):  # no dense array, or an option that cannot be one and has no hash
        pass
    training = asked[-1] and _any_requires_grad(arrays, initial_state)
    # What is kept was made with autocast off, which `_latest` sees and a signature does not.
    if isinstance(arrays[0], Tensor) and tensors.autocast_dtype(arrays[0]) is not None:
        return None, training
    try:
        signature = tensors.signature(given)
        return calls.get((asked, training, _wants(arrays, initial_state, training), signature)), training
    except TypeError:
        return None, training


def find_or_keep(
    asked: tuple[Any, ...],
    training: bool,
    arrays: Sequence[Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    prepare: Callable[[], Known],
    lead: int = 0,
    is_public: bool = True,
) -> Known:
    """Return the call of tensors that have been checked: prepared and kept, where it comes for the first time.

    Of a call that is not public nobody knows whose gradients are wanted.
    """
    asked = cu_seqlens is not None and _longest(arrays[lead], cu_seqlens), *asked
    wants = _wants(arrays, initial_state, training and is_public)
    signature = asked, training, wants, tensors.signature((*arrays, initial_state, cu_seqlens))
    known = calls.get(signature)
    if known is None:
        known = calls.keep(signature, prepare())
        given = *arrays, initial_state, cu_seqlens
        there = tuple(map(_IS_THERE, given))
        are_alike = tensors.likeness([x for x in given if x is not None])
        _latest.keep((asked, arrays[lead].shape, there), (are_alike, known, training))
    return known


def _wants(arrays: Sequence[Any], initial_state: Any, training: bool) -> tuple[bool, ...]:
    """Return which gradients are wanted, of a call with gradients; else it does not matter."""
    return tuple([getattr(x, "requires_grad", False) for x in (*arrays, initial_state)]) if training else ()


def wanted(op: Op, wants: Sequence[bool], given: Sequence[Any]) -> tuple[str, ...]:
    """Return `Problem.wanted`, of whether a gradient is wanted of each input and of an initial state.

    `given` are the inputs and an initial state; of those that are None nobody wants a gradient.
    """
    names = tuple([name for name, is_wanted in zip((*op.names, STATE), wants, strict=True) if is_wanted])
    return () if len(names) == sum(map(_IS_THERE, given)) else names


def _longest(lead: Any, cu_seqlens: Any) -> int:
    """Return what tells packed calls apart beside their shapes."""
    return tensors.longest(cu_seqlens, lead.shape[1]) if len(lead.shape) > 1 else 0


def _any_requires_grad(arrays: Sequence[Any], initial_state: Any) -> bool:
    """Return whether one of these wants a gradient; arrays of other libraries never do."""
    try:
        for x in arrays:
            if x is not None and x.requires_grad:
                return True
        return initial_state is not None and bool(initial_state.requires_grad)
    except AttributeError:
        return any([getattr(x, "requires_grad", False) for x in (*arrays, initial_state)])
