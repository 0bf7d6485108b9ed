"""Calls that have come before: they have passed all checks, and what they launch is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import plan as plans
from rwkv_jit.call import tensors
from rwkv_jit.call.plan import DTYPES, Plan
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.launch import picker
from rwkv_jit.kernels.signatures import BySignature, forget_with
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.problem import STATE, Op, Problem
from rwkv_jit.schedules.schedule import Schedule

Arrays = Sequence[Tensor | None]  # inputs, initial state, cu_seqlens


class _Backward(NamedTuple):
    """A prepared backward, and which arrays it is for."""

    plan: Plan
    there: tuple[bool, ...]
    are_alike: Callable[..., bool]


class Gradients(NamedTuple):
    """How a prepared call is differentiated. A backward takes the saved arrays, and the gradients of the results."""

    results: int  # how many of those of the forward callers get; the backward takes the others, behind the arrays
    plan: Callable[[Arrays], Plan]  # of a backward, from what it takes
    by_op: Callable[[Arrays, Arrays], Sequence[Tensor | None]]  # the same gradients by the torch op
    places: Sequence[int]  # of the arrays whose gradients the plan makes, in its order
    length: int  # how many arrays there are
    # Gradients that kernels need, by their places among what a backward takes: zeros of a shape and dtype if need be.
    needed: Sequence[tuple[int, Sequence[int], torch.dtype]] = ()
    # Places of arrays that are not saved: the backward takes a result of the forward instead, or nothing.
    replaced: Sequence[tuple[int, int | None]] = ()
    shared: Sequence[tuple[int, int, torch.dtype]] = ()  # places whose gradient is that of another, but its dtype
    absent: tuple[None, ...] = ()  # behind the results
    unkept: tuple[None, ...] = ()  # behind what is saved


class Prepared:
    """A call whose forward is prepared, and with `gradients` from its first backward on that too.

    So many arrays that are None stand `behind` those of the caller. `bounds` are the place of cu_seqlens and what makes
    them readable, where there are any.
    """

    def __init__(
        self, forward: Plan, gradients: Gradients | None = None, behind: int = 0,
        bounds: tuple[int, Callable[[Any], Tensor]] | None = None,
    ):  # fmt: skip
        self.problem = forward.problem
        self._forward, self._bounds, self._behind = forward, bounds, [None] * behind
        self.is_recorded = gradients is not None
        if gradients is not None:
            self.gradients, self._empty = gradients, [None] * gradients.length
            self._latest: _Backward | None = None
            forget_with(self)

    def forget(self) -> None:
        """Drop the prepared backward; a graph may hold this call after a fork."""
        self._latest = None

    def run(self, arrays: Arrays) -> list[Tensor]:
        """Return what the forward makes: the results, and for gradients what the backward needs."""
        if self._bounds is not None:
            place, readable = self._bounds
            arrays = [*arrays[:place], readable(arrays[place]), *arrays[place + 1 :]]
        return self._forward.run([*arrays, *self._behind])

    def record(self, arrays: Arrays) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the forward; return its results, and what the backward takes."""
        gradients = self.gradients
        if self._bounds is not None:
            place, readable = self._bounds
            arrays = [*arrays[:place], readable(arrays[place]), *arrays[place + 1 :]]
        results = self._forward.run([*arrays, *self._behind])
        if gradients.replaced:
            arrays = [*arrays]
            for place, result in gradients.replaced:
                arrays[place] = None if result is None else results[result]
        count = gradients.results
        return (*results[:count], *gradients.absent), (*arrays, *results[count:], *gradients.unkept)

    def differentiate(self, saved: Arrays, grads: Arrays) -> Sequence[Tensor | None]:
        """Return the gradients of the arrays by prepared kernels, or by the op where tensors are not torch's own."""
        gradients, arrays = self.gradients, [*saved, *grads]
        for place, shape, dtype in gradients.needed:
            if arrays[place] is None:  # nothing depends on this result, and kernels need a tensor
                arrays[place] = arrays[0].new_zeros(shape, dtype=dtype)  # type: ignore[union-attr]
        there, latest = tuple(map(IS_THERE, arrays)), self._latest
        if latest is None or latest.there != there or not latest.are_alike(*compress(arrays, there)):
            if not tensors.are_plain(arrays) or any(tensors.is_batched(x) for x in arrays if x is not None):
                return gradients.by_op(saved, grads)
            are_alike = tensors.likeness([x for x in arrays if x is not None])
            latest = self._latest = _Backward(gradients.plan(arrays), there, are_alike)
        made: list[Any] = [*self._empty]
        for place, grad in zip(gradients.places, latest.plan.run(arrays), strict=True):
            made[place] = grad
        for place, other, dtype in gradients.shared:
            made[place] = made[other].to(dtype)
        return made


def of_problem(
    problem: Problem, arrays: Arrays, asked: Mapping[str, int], by_op: Callable[..., Sequence[Tensor | None]]
) -> Prepared:
    """Prepare a call from its checked inputs, initial state and cu_seqlens; `asked` has the caller's geometry.

    `by_op` returns gradients by the torch op, from the problem, what was saved and the gradients of the results.
    """
    schedules = [directions.forward(problem), *([directions.backward(problem)] if problem.training else [])]
    requests = [schedule.requests(problem.gpu) for schedule in schedules]
    names = (*problem.op.names, STATE, "cu_seqlens")
    place = names.index("cu_seqlens")
    named = dict(zip(names, arrays, strict=True))
    bounds = None
    if arrays[place] is not None:  # whoever finds the call has looked at the values
        bounds = place, tensors.readable_packing
        named["cu_seqlens"] = tensors.readable_packing(arrays[place])  # type: ignore[arg-type]
    try:
        if asked:  # it may be illegal for the backward alone, which shall be said before a launch
            kernel.get_all(sum(requests, []))
        backward = [step for schedule in schedules[1:] for step in schedule.launches]
        backward.sort(key=lambda step: step.idle_at is not None)  # which may not be needed
        soon = [step.request(problem.gpu) for step in backward]
        forward = Plan(schedules[0], problem, named, soon=soon)
    except UnsupportedConfigError as error:
        raise with_nearest(error, problem, schedules[-1], asked) from error
    if not problem.training:
        return Prepared(forward, bounds=bounds)
    return Prepared(forward, gradients_of(problem, by_op), bounds=bounds)


def gradients_of(problem: Problem, by_op: Callable[..., Sequence[Tensor | None]]) -> Gradients:
    """Return how a call with gradients is differentiated; `by_op` is as in `of_problem`."""
    names = (*problem.op.names, STATE, "cu_seqlens")
    wanted = problem.wanted or (*problem.types, *([STATE] if problem.has_initial_state else []))
    shape = [getattr(problem, dim) for dim in problem.op.output]
    return Gradients(
        1 + problem.has_final_state, partial(plan_backward, problem), partial(by_op, problem),
        [i for i, name in enumerate(names) if name in wanted], len(names),
        needed=[(len(names) + 1, shape, DTYPES[problem.types[problem.op.names[problem.op.lead]]])],
        absent=() if problem.has_final_state else (None,), unkept=() if directions.kept(problem) else (None,),
    )  # fmt: skip


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Prepared, *arrays: Any) -> tuple[Any, ...]:
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
        return None, *call.gradients.by_op(saved, grads)  # which compilers and modes can see


# Function.apply looks for transforms first; a prepared call has none, and saves that time.
record: Callable[..., tuple[Any, ...]] = super(torch.autograd.Function, _Recorded).apply


def plan_backward(problem: Problem, arrays: Arrays) -> Plan:
    """Return the plan of a backward, from a call's arrays, what was kept, dy and the gradient of the final state."""
    named = dict(zip((*problem.op.names, STATE, "cu_seqlens", "saved", "dy", "grad_final_state"), arrays, strict=True))
    problem = problem._replace(
        has_initial_state=named[STATE] is not None, has_final_state=named["grad_final_state"] is not None
    )
    types = tuple(problem.types.items())  # which have a hash
    key = (*problem[:2], types, *problem[3:], tensors.signature(arrays))
    return plans.find(key, lambda: Plan(directions.backward(problem), problem, named, directions.kept(problem)))


def with_nearest(
    error: UnsupportedConfigError, problem: Problem, schedule: Schedule, asked: Mapping[str, int]
) -> UnsupportedConfigError:
    """Return an error that names the nearest legal values of what the caller chose."""
    # Algorithms without such a function have said what is legal.
    nearest = getattr(directions.algorithm(problem), "nearest", lambda *_: None)
    legal = {argument: nearest(schedule.launches[schedule.main], argument, value) for argument, value in asked.items()}
    near = [f"{argument}={value}" for argument, value in legal.items() if value is not None]
    return UnsupportedConfigError(f"{error}; nearest legal: {', '.join(near)}") if near else error


# ---- finding them ------------------------------------------------------------------------------------------------

calls: BySignature[Any] = BySignature()
# The last of those that differ in nothing but tensors behind the first: a check whether these are alike, and the call.
# To ask every tensor for its signature takes as long as half a launch.
_latest: BySignature[tuple[Callable[[Sequence[Any]], Sequence[Any]], Callable[..., bool], Any]] = BySignature()
IS_THERE = partial(is_not, None)  # a call of C, as every known call takes it for each of its tensors


def latest(key: tuple[Any, ...], arrays: Sequence[Any], lead: int = 0, cu_seqlens: Any = None) -> Any:
    """Return the call that came last with such arrays; None where there is none.

    `key` is all of a call but its arrays, of which one is the lead. No compiler or mode may look on.
    """
    try:
        if cu_seqlens is not None:
            key = tensors.longest(cu_seqlens, arrays[lead].shape[1]), *key
        found = _latest.get((*key, arrays[lead].shape, *map(type, arrays)))
        if found is not None:
            pick, are_alike, call = found
            if are_alike(*pick(arrays)):
                return call
    except (AttributeError, IndexError, TypeError, RuntimeError):  # no dense array, or an option that has no hash
        pass
    return None


def keep_latest(
    key: tuple[Any, ...], arrays: Sequence[Any], call: Any, lead: int = 0, cu_seqlens: Any = None
) -> None:  # fmt: skip
    """Keep a call, which `latest` returns."""
    if cu_seqlens is not None:
        key = _longest(arrays[lead], cu_seqlens), *key
    pick = picker([place for place, x in enumerate(arrays) if x is not None])
    _latest.keep((*key, arrays[lead].shape, *map(type, arrays)), (pick, tensors.likeness(pick(arrays)), call))


def find(
    asked: tuple[Any, ...], arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, lead: int = 0
) -> tuple[Prepared | None, bool]:
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
    asked: tuple[Any, ...], training: bool, arrays: Sequence[Tensor], initial_state: Tensor | None,
    cu_seqlens: Tensor | None, prepare: Callable[[], Prepared], lead: int = 0, is_public: bool = True,
) -> Prepared:  # fmt: skip
    """Return the call of checked tensors, kept from its first time on; a private one may need all gradients."""
    key = asked if cu_seqlens is None else (_longest(arrays[lead], cu_seqlens), *asked)
    given = *arrays, initial_state, cu_seqlens
    signature = key, training, _wants(arrays, initial_state, training and is_public), tensors.signature(given)
    known: Prepared | None = calls.get(signature)
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
