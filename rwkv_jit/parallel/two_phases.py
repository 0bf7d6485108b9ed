"""An op over one part of its sequences, in two phases: what the part does to any state is known before all else.

Both directions call `at_summary` once with that, and go on from the state, or its gradient, that it returns. Kernels
pause for it where they cut sequences into segments. For all other calls the op itself runs more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import modes, tensors
from rwkv_jit.algorithms import segments, whole
from rwkv_jit.ops import known_calls, torch_op
from rwkv_jit.ops.checks import is_for_kernels
from rwkv_jit.ops.options import Tail
from rwkv_jit.plan import Plan
from rwkv_jit.problem import STATE, Op, Problem
from rwkv_jit.schedule import without
from rwkv_jit.signatures import forget_with

ForState = Callable[[Tensor, Tensor], Tensor]  # from Q and P to the state before the part
ForGradient = Callable[[Tensor], Tensor]  # from Q of gradients to the gradient of the state behind it


class Call(NamedTuple):
    """What is called: an op, its public function, and the options as they came and complete."""

    op: Op
    function: Callable[..., tuple[Tensor, Tensor | None]]
    options: tuple[tuple[str, Any], ...]
    tail: Tail

    def run(
        self, inputs: Sequence[Tensor], state: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return y and the states behind all sequences, which are [V, K] here."""
        options = {**dict(self.options), "scale": self.tail.scale, "state_layout": "vk"}
        y, final = self.function(
            *inputs, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **options
        )  # fmt: skip
        assert final is not None
        return y, final

    def states(self, inputs: Sequence[Tensor], sequences: int, rows: int | None = None) -> Tensor:
        """Return states of zeros; by default with as many rows as those of the call."""
        sizes = torch_op.sizes_of(self.op, inputs)
        lead = inputs[self.op.lead]
        dtype = torch.float64 if lead.dtype == torch.float64 else torch.float32
        return lead.new_zeros(sequences, sizes["H"], sizes["V"] if rows is None else rows, sizes["K"], dtype=dtype)


class Way(NamedTuple):
    """How a call runs in both directions. The forward leaves tensors to the backward, or a graph of torch's."""

    summary: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    forward: Callable[[Sequence[Tensor], ForState], tuple[Tensor, Tensor, Sequence[Tensor], Any]]
    backward: Callable[[Sequence[Tensor], Any, Tensor, ForGradient], list[Tensor | None]]  # the state's is the last


def way_of(call: Call, inputs: Sequence[Tensor], wants: Sequence[bool]) -> Way:
    """Return how calls run with inputs of this signature.

    `wants` says of which inputs, and last whether of the state, gradients are wanted.
    """
    problem = _problem(call, inputs, any(wants))
    if problem is None:
        return _by_calls(call, wants)
    wanted = known_calls.wanted(call.op, wants, True) if problem.training else ()
    kernels = _Kernels(problem._replace(wanted=wanted))
    return Way(kernels.summary, kernels.forward, kernels.backward)


# ---- kernels that pause ------------------------------------------------------------------------------------------


def _problem(call: Call, inputs: Sequence[Tensor], training: bool) -> Problem | None:
    """Return the problem of kernels that pause, None where a call takes others."""
    op, tail = call.op, call.tail
    if not (is_for_kernels(tail.backend, inputs[0]) and tensors.is_eager() and tensors.are_plain(inputs)):
        return None
    options = torch_op.asked_options(tail, inputs[0].dtype, modes.current())
    # Whatever is wanted, as for a call with gradients: kernels for few heads without them do not pause.
    options = torch_op.chosen(op, inputs, None, tail.decay_bound, options, True, is_direct=True)
    gpu = tensors.gpu(inputs[0].device.index)
    problem = torch_op.problem_of(op, inputs, call.states(inputs, 0), None, options, True, training, gpu)
    if not segments.takes_shard(problem):
        return None
    return problem._replace(backend="segments", state_layout="vk", is_shard=True)


class _Kernels:
    """A call whose kernels pause, with what its first runs have prepared for inputs of the same signature."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._plans: dict[Any, Plan] = {}
        forget_with(self)

    def forget(self) -> None:
        """Drop what was prepared; a graph may hold this call after a fork."""
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
                schedule = without(whole.forward(problem._replace(training=False)), ("y", "final_state"))
                return Plan(schedule, problem, named)
            soon = whole.backward(problem).requests(problem.gpu) if problem.training else ()
            return Plan(whole.forward(problem), problem, named, soon=soon)

        return self._plan(is_summary, make)

    def summary(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        given = [*inputs, None, None]
        bias, transition = self._plan_forward(given).run(given, lambda _: None)
        return bias, transition

    def forward(self, inputs: Sequence[Tensor], at_summary: ForState) -> tuple[Tensor, Tensor, Sequence[Tensor], Any]:
        state = inputs[0].new_empty(self.problem.state_shape, dtype=torch.float32)
        given = [*inputs, state, None]

        def fill(results: list[Tensor]) -> None:
            state.copy_(at_summary(results[2], results[3]))

        y, final, _, _, *kept = self._plan_forward(given).run(given, fill)
        return y, final, [*inputs, state, *kept], None

    def backward(
        self, saved: Sequence[Tensor], _: Any, dy: Tensor, at_summary: ForGradient
    ) -> list[Tensor | None]:  # fmt: skip
        *inputs, state, kept = saved
        grad_final = torch.empty_like(state)
        given = [*inputs, state, None, dy, grad_final, kept]

        def fill(results: list[Tensor]) -> None:
            grad_final.copy_(at_summary(results[-1]))

        plan = self._plan(tensors.signature([dy]), lambda: known_calls.plan_backward(self.problem, given))
        *grads, _ = plan.run(given, fill)
        found, wanted = iter(grads), self.problem.wanted
        return [next(found) if not wanted or name in wanted else None for name in (*self.problem.op.names, STATE)]


# ---- the op itself -----------------------------------------------------------------------------------------------


def _by_calls(call: Call, wants: Sequence[bool]) -> Way:
    op = call.op
    values = op.names.index("v")

    @torch.no_grad()
    def summary(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        v, sequences = inputs[values], inputs[op.lead].shape[0]
        zeros = call.states(inputs, sequences)
        rows = zeros.shape[-1] if op.family == "delta" else 1
        units = call.states(inputs, sequences, rows)
        units += torch.eye(rows, dtype=units.dtype, device=units.device) if rows > 1 else 1
        no_values = v.new_zeros(*v.shape[:-1], rows)
        _, transition = call.run([*inputs[:values], no_values, *inputs[values + 1 :]], units)
        return call.run(inputs, zeros)[1], transition

    def forward(inputs: Sequence[Tensor], at_summary: ForState) -> tuple[Tensor, Tensor, Sequence[Tensor], Any]:
        state = at_summary(*summary(inputs))
        if not any(wants):
            return *call.run(inputs, state), (), None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(inputs, wants, strict=False)]
            leaves.append(state.detach().requires_grad_())
            y, final = call.run(leaves[:-1], leaves[-1])
        return y.detach(), final.detach(), (), (leaves, y, final)

    def backward(_: Sequence[Tensor], graph: Any, dy: Tensor, at_summary: ForGradient) -> list[Tensor | None]:
        leaves, y, final = graph
        (bias,) = torch.autograd.grad(y, leaves[-1], dy, retain_graph=True)
        return gradients((y, final), leaves, (dy, at_summary(bias)))

    return Way(summary, forward, backward)


def gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of the leaves that want one, None of the others."""
    pairs = [(y, dy) for y, dy in zip(outputs, given, strict=True) if dy is not None]
    wanted = [x for x in leaves if x.requires_grad]
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], materialize_grads=True))
    return [next(found) if x.requires_grad else None for x in leaves]
