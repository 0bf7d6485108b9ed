"""Calls that have come before: they have passed all checks, and what they launch is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rwkv_jit.call import plan as plans
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

    `arrays` are its checked inputs, initial state and cu_seqlens; `asked` the caller's chunk_len and num_threads.
    `by_op` returns gradients by the torch op, from the problem, what was saved and the gradients of the results.
    """

    def __init__(
        self, problem: Problem, arrays: Arrays, asked: Mapping[str, int], by_op: Callable[..., Sequence[Tensor | None]]
    ):
        self.problem = problem
        self._by_op = by_op
        self._backwards: dict[Any, _Backward] = {}
        self._latest: _Backward | None = None
        # The places of the gradients that nobody wants, among those of the inputs and an initial state.
        names = [*problem.op.names, *([STATE] if problem.has_initial_state else [])]
        wanted = problem.wanted or (*problem.types, STATE)
        self._behind = (None,) if problem.has_initial_state else (None, None)
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
        """Return y, the final state or None, and for gradients what the backward needs."""
        if cu_seqlens is not None:  # what found this call has looked at its values
            cu_seqlens = tensors.readable_packing(cu_seqlens)
        return self._forward.run([*arrays, state, cu_seqlens])

    def record(self, arrays: Arrays) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the forward; return y and the final state, and what the backward takes."""
        given = arrays
        if arrays[-1] is not None:
            given = [*arrays[:-1], tensors.readable_packing(arrays[-1])]
        results = self._forward.run(given)
        final = results[1] if self.problem.has_final_state else None
        return (results[0], final), (*given, results[-1] if self.keeps else None)

    def differentiate(self, saved: Arrays, grads: Arrays) -> list[Tensor | None]:
        """Return the gradients of all inputs, or None, from the arrays and what the forward kept."""
        *arrays, kept = saved
        dy, grad_final_state = grads
        if dy is None:
            dy = _zeros(self.problem, arrays[0])
        given = [*arrays, dy, grad_final_state, kept]
        present = [x for x in given if x is not None]
        latest = self._latest
        if latest is None or len(present) != latest.length or not latest.are_alike(*present):
            if not tensors.are_own(present):
                return [*self.differentiate_by_op(saved, grads)]
            latest = self._prepare(given, present)
        made: list[Any] = latest.plan.run(given)
        for place in self._unwanted:
            made.insert(place, None)
        made.extend(self._behind)
        return made

    def differentiate_by_op(self, saved: Arrays, grads: Arrays) -> Sequence[Tensor | None]:
        """Return the same by the torch op."""
        return *self._by_op(self.problem, saved, *grads), *self._behind

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


class Differentiable(Protocol):
    """A prepared call with gradients."""

    def record(self, arrays: Arrays) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the forward; return its results, and what the backward takes."""

    def differentiate(self, saved: Sequence[Any], grads: Arrays) -> Sequence[Tensor | None]:
        """Return the gradients of the arrays by prepared kernels, or by the op where tensors are not torch's own."""

    def differentiate_by_op(self, saved: Sequence[Any], grads: Arrays) -> Sequence[Tensor | None]:
        """Return the same by the torch op, which compilers and modes can see."""


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Differentiable, *arrays: Any) -> tuple[Any, ...]:
        results, saved = call.record(arrays)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.call = call
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        if not torch.is_grad_enabled() and tensors.is_eager():
            return None, *call.differentiate(saved, grads)
        return None, *call.differentiate_by_op(saved, grads)


# Function.apply looks for transforms first; a prepared call has none, and saves that time.
record: Callable[..., tuple[Any, ...]] = super(torch.autograd.Function, _Recorded).apply


class Backward:
    """The backward of a call that a torch op ran, for the call's arrays, what was kept, and gradients."""

    def __init__(self, problem: Problem, arrays: Arrays):
        self._problem = problem
        types = tuple(problem.types.items())  # which have a hash
        given = self._in_order(arrays)
        key = (*problem[:2], types, *problem[3:], tensors.signature(given))
        self._plan = plans.find(key, lambda: plan_backward(problem, given))

    def run(self, arrays: Arrays) -> list[Tensor]:
        """Return the gradients that are needed."""
        return self._plan.run(self._in_order(arrays))

    def _in_order(self, arrays: Arrays) -> list[Tensor | None]:
        *given, kept, dy, grad_final_state = arrays
        if given[-1] is not None:
            given = _readable(given)
        return [*given, _zeros(self._problem, given[0]) if dy is None else dy, grad_final_state, kept]


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
    """Return the gradient of a y that nothing depends on, on the device of an input."""
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

calls: BySignature[Any] = BySignature()
# The last of those that differ in nothing but tensors behind the first: a check whether these are alike, and the call.
# To ask every tensor for its signature takes as long as half a launch.
_latest: BySignature[tuple[Callable[..., bool], Any]] = BySignature()
IS_THERE = partial(is_not, None)  # a call of C, as every known call takes it for each of its tensors


def latest(key: tuple[Any, ...], arrays: Sequence[Any], lead: int = 0, cu_seqlens: Any = None) -> Any:
    """Return the call that came last with such arrays; None where there is none.

    `key` is all of a call but its arrays, of which one is the lead. No compiler or mode may look on.
    """
    try:
        if cu_seqlens is not None:
            key = tensors.longest(cu_seqlens, arrays[lead].shape[1]), *key
        there = tuple(map(IS_THERE, arrays))
        found = _latest.get((key, arrays[lead].shape, there))
        if found is not None and found[0](*compress(arrays, there)):
            return found[1]
    except (AttributeError, IndexError, TypeError, RuntimeError):  # no dense array, or an option that has no hash
        pass
    return None


def keep_latest(
    key: tuple[Any, ...], arrays: Sequence[Any], call: Any, lead: int = 0, cu_seqlens: Any = None
) -> None:  # fmt: skip
    """Keep a call, which `latest` returns."""
    if cu_seqlens is not None:
        key = _longest(arrays[lead], cu_seqlens), *key
    there = tuple(map(IS_THERE, arrays))
    are_alike = tensors.likeness([x for x in arrays if x is not None])
    _latest.keep((key, arrays[lead].shape, there), (are_alike, call))


def find(
    asked: tuple[Any, ...], arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, lead: int = 0
) -> tuple[Known | None, bool]:
    """Return a call that has come before, by its signature, or None, and whether gradients are needed.

    `asked` is all of a call but its arrays, and at its end whether gradients are recorded; `lead` is `Op.lead`.
    """
    training = asked[-1] and _any_requires_grad(arrays, initial_state)
    if not tensors.is_eager():
        return None, training
    # What is kept was made with autocast off, which `latest` sees and a signature does not.
    if isinstance(arrays[0], Tensor) and tensors.autocast_dtype(arrays[0]) is not None:
        return None, training
    try:
        if cu_seqlens is not None:
            asked = _longest(arrays[lead], cu_seqlens), *asked
        signature = tensors.signature((*arrays, initial_state, cu_seqlens))
        return calls.get((asked, training, _wants(arrays, initial_state, training), signature)), training
    except (AttributeError, TypeError, RuntimeError):
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
    """Return the call of checked tensors, kept from its first time on; a private one may need all gradients."""
    key = asked if cu_seqlens is None else (_longest(arrays[lead], cu_seqlens), *asked)
    given = *arrays, initial_state, cu_seqlens
    signature = key, training, _wants(arrays, initial_state, training and is_public), tensors.signature(given)
    known: Known | None = calls.get(signature)
    if known is None:
        known = prepare()
        calls.keep(signature, known)
        keep_latest(asked, given, known, lead, cu_seqlens)
    return known


def _wants(arrays: Sequence[Any], initial_state: Any, training: bool) -> tuple[bool, ...]:
    """Return which gradients are needed, of a call with gradients; else it does not matter."""
    return tuple([getattr(x, "requires_grad", False) for x in (*arrays, initial_state)]) if training else ()


def wanted(op: Op, wants: Sequence[bool], given: Sequence[Any]) -> tuple[str, ...]:
    """Return `Problem.wanted`: of which `given` inputs and initial state, None apart, a gradient is needed."""
    names = tuple([name for name, is_wanted in zip((*op.names, STATE), wants, strict=True) if is_wanted])
    return () if len(names) == sum(map(IS_THERE, given)) else names


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
