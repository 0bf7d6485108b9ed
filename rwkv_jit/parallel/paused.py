"""An op over one part of its sequences, in two phases: what the part does to any state is known before all else.

Both directions call `at_summary` once with that, and go on from the state, or its gradient, that it returns. Kernels
pause for it if they cut sequences into segments; other calls run more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import prepared, registry, switches, tensors, torch_op
from rwkv_jit.call.checks import is_for_kernels
from rwkv_jit.call.options import DecayOptions
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.torch_op import Options
from rwkv_jit.kernels.signatures import forget_with
from rwkv_jit.plain.operands import remaining
from rwkv_jit.schedules import directions, segments
from rwkv_jit.schedules.problem import STATE, Op, Problem
from rwkv_jit.schedules.schedule import without

ForState = Callable[[Tensor, Tensor], Tensor]  # from Q and P to the state before the part
ForGradient = Callable[[Tensor], Tensor]  # from Q of gradients to the gradient of the state behind it


class Call(NamedTuple):
    """What is called: an op, its options, complete, and all its switches."""

    op: Op
    whole: DecayOptions
    traits: tuple[tuple[str, Any], ...] = ()

    def problem(self, inputs: Sequence[Tensor], cu_seqlens: Tensor | None) -> Problem | None:
        """Return the problem of a call with gradients on a GPU, with its algorithm; states are [V, K] here."""
        if not is_for_kernels(self.whole["backend"], inputs[0]):
            return None
        is_direct = tensors.is_eager() and tensors.are_plain(inputs)
        problem = torch_op.problem_of(
            self.op, inputs, self.states(inputs, 0), cu_seqlens, self._open_options(inputs), True, True,
            self.whole["decay_bound"], self.traits, is_direct,
        )  # fmt: skip
        return torch_op.resolved(problem, inputs, is_direct)

    def options(self, inputs: Sequence[Tensor], cu_seqlens: Tensor | None) -> Options:
        """Return the options with which the torch op runs a call with gradients."""
        problem = self.problem(inputs, cu_seqlens)
        if problem is None:
            return self._open_options(inputs)._replace(backend="reference", is_chosen=True)
        return torch_op.options_of(problem)

    def _open_options(self, inputs: Sequence[Tensor]) -> Options:
        options = torch_op.asked_options(self.whole, inputs[0].dtype, switches.current())
        return options._replace(state_layout="vk")

    def forward(
        self, inputs: Sequence[Tensor], state: Tensor, cu_seqlens: Tensor | None, options: Options, training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, the states behind all sequences, and what the backward takes."""
        run = registry.find(f"{self.op.name}_fwd")
        y, final, kept = run(*inputs, state, cu_seqlens, *options, True, training, **dict(self.traits))
        return y, final, kept

    def backward(
        self, saved: Sequence[Tensor | None], options: Options, dy: Tensor, grad_final: Tensor | None,
        wanted: Sequence[str],
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of the inputs and of the state, by name, from what the forward has `saved`, and dy."""
        run, names = registry.find(f"{self.op.name}_bwd"), (*self.op.names, STATE)
        if not wanted:
            return [None] * len(names)
        made = run(*saved, dy, grad_final, *options, wanted=" ".join(wanted), **dict(self.traits))
        return [x if name in wanted else None for name, x in zip(names, made, strict=True)]

    def states(self, inputs: Sequence[Tensor], sequences: int, dims: Sequence[str] = ("V", "K")) -> Tensor:
        """Return zeros for the heads of sequences: states, or what has other dimensions."""
        sizes = {"1": 1, **torch_op.sizes_of(self.op, inputs)}
        lead = inputs[self.op.lead]
        dtype = torch.promote_types(lead.dtype, torch.float32)
        return lead.new_zeros(sequences, sizes["H"], *(sizes[dim] for dim in dims), dtype=dtype)

    def wanted(self, wants: Sequence[bool]) -> tuple[str, ...]:
        """Return the names of those whose gradients are needed: inputs, and last the state."""
        return tuple(name for name, is_wanted in zip((*self.op.names, STATE), wants, strict=True) if is_wanted)


def way_of(call: Call, inputs: Sequence[Tensor], wants: Sequence[bool], needs_transition: bool = True) -> Way:
    """Return how calls of this signature run; `wants` says which inputs need gradients, and last if the state does.

    Calls that run more than once leave P out, as zeros, where it is not needed.
    """
    problem = _problem(call, inputs, any(wants))
    if problem is None:
        return _Calls(call, inputs, wants, needs_transition)
    wanted = prepared.wanted(call.op, wants, (*inputs, True)) if problem.training else ()
    return _Kernels(problem._replace(wanted=wanted))


# ---- kernels that pause ------------------------------------------------------------------------------------------


def _problem(call: Call, inputs: Sequence[Tensor], training: bool) -> Problem | None:
    """Return the problem of kernels that pause, None where a call takes others."""
    problem = call.problem(inputs, None) if tensors.is_eager() and tensors.are_plain(inputs) else None
    if problem is None or not segments.takes_shard(directions.running(problem)):
        return None
    return problem._replace(backend="segments", is_shard=True, training=training)


class _Kernels:
    """A call whose kernels pause, with what its first runs have prepared for inputs of the same signature."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._plans: dict[Any, Plan] = {}
        forget_with(self)

    def forget(self) -> None:
        self._plans.clear()

    def _plan(self, direction: Any, make: Callable[[], Plan]) -> Plan:
        plan = self._plans.get(direction)
        if plan is None:
            plan = self._plans[direction] = make()
        return plan

    def _plan_forward(self, given: Sequence[Tensor | None]) -> Plan:
        problem, is_summary = self.problem, given[-2] is None

        def make() -> Plan:
            named = dict(zip((*problem.op.names, "initial_state", "cu_seqlens"), given, strict=True))
            if is_summary:
                schedule = without(directions.forward(problem._replace(training=False)), ("y", "final_state"))
                return Plan(schedule, problem, named)
            soon = directions.backward(problem).requests(problem.gpu) if problem.training else ()
            return Plan(directions.forward(problem), problem, named, soon=soon)

        return self._plan(is_summary, make)

    def summary(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        given = [*inputs, None, None]
        bias, transition = self._plan_forward(given).run(given, lambda _: None)
        return bias, transition

    def forward(self, inputs: Sequence[Tensor], at_summary: ForState) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        state = inputs[0].new_empty(self.problem.state_shape, dtype=torch.float32)
        given = [*inputs, state, None]

        def fill(results: list[Tensor]) -> None:
            state.copy_(at_summary(results[2], results[3]))

        y, final, _, _, *kept = self._plan_forward(given).run(given, fill)
        return y, final, [*inputs, state, *kept]

    def backward(self, saved: Sequence[Tensor], dy: Tensor, at_summary: ForGradient) -> list[Tensor | None]:
        *inputs, state, kept = saved
        grad_final = torch.empty_like(state)
        given = [*inputs, state, None, kept, dy, grad_final]

        def fill(results: list[Tensor]) -> None:
            grad_final.copy_(at_summary(results[-1]))

        plan = self._plan(tensors.signature([dy]), lambda: prepared.plan_backward(self.problem, given))
        *grads, _ = plan.run(given, fill)
        found, wanted = iter(grads), self.problem.wanted or (*self.problem.types, STATE)
        return [next(found) if name in wanted else None for name in (*self.problem.op.names, STATE)]


# ---- the op itself -----------------------------------------------------------------------------------------------


class _Calls:
    """A call that runs more than once."""

    def __init__(self, call: Call, like: Sequence[Tensor], wants: Sequence[bool], needs_transition: bool):
        self.call, self.wanted, self.needs_transition = call, call.wanted(wants), needs_transition
        self.options = call.options(like, None)  # the switches of precision may be others when gradients are made

    def summary(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        call, sequences = self.call, inputs[self.call.op.lead].shape[0]
        _, bias, _ = call.forward(inputs, call.states(inputs, sequences), None, self.options, False)
        if call.op.transition[0] == "1":
            return bias, remaining(call.op, inputs, dict(call.traits), call.whole["decay"])
        units = call.states(inputs, sequences, call.op.transition)
        if not self.needs_transition:
            return bias, units
        # What becomes of unit states where no values are written.
        units.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        rows = zip(call.op.inputs.values(), inputs, strict=True)
        alone = [x.new_zeros(*x.shape[:-1], units.shape[-1]) if dims[-1] == "V" else x for dims, x in rows]
        _, transition, _ = call.forward(alone, units, None, call.options(alone, None), False)
        return bias, transition

    def forward(self, inputs: Sequence[Tensor], at_summary: ForState) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        state = at_summary(*self.summary(inputs))
        y, final, kept = self.call.forward(inputs, state, None, self.options, bool(self.wanted))
        return y, final, [*inputs, state, kept]

    def backward(self, saved: Sequence[Tensor], dy: Tensor, at_summary: ForGradient) -> list[Tensor | None]:
        *inputs, state, kept = saved
        given = (*inputs, state, None, kept)
        *_, bias = self.call.backward(given, self.options, dy, None, (STATE,))
        assert bias is not None
        return self.call.backward(given, self.options, dy, at_summary(bias), self.wanted)


# How a call runs. A forward returns last what its backward takes, and the last gradient of a backward is the state's.
Way = _Kernels | _Calls
