"""What calls of derived ops in kernels of their own have in common: which may go there, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import switches, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.rule import LEAST_TOKENS
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.kernels.signatures import BySignature, forget_with
from rwkv_jit.schedules.common import MOST_HEADS
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Schedule

_MOST_BACKWARDS = 16  # of a call: they differ in the strides of the gradients of its results


def may_take(call: Sequences, v: Tensor, parameters: Sequence[Tensor | None], least_blocks: float) -> bool:
    """Return whether a call that has been checked may go to such kernels at all; the kernels know the rest.

    `parameters` are those that are no inputs of the call. Fewer than `least_blocks` heads of all sequences for a
    multiprocessor would leave it idle.
    """
    state, cu_seqlens, tail = call.initial_state, call.cu_seqlens, call.tail
    given = (*call.inputs, state, cu_seqlens, *parameters)
    if not (v.is_cuda and v.numel() and tensors.is_eager() and tensors.are_plain(given)):
        return False
    if tail.backend != "auto" or tail.num_threads is not None:
        return False
    narrow, is_batch_invariant = switches.current()
    if tensors.STORAGE[v.dtype] in narrow:
        return False
    batch, tokens, heads, _ = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if batch * tokens < LEAST_TOKENS * sequences or heads > MOST_HEADS:
        return False
    return is_batch_invariant or sequences * heads >= least_blocks * tensors.multiprocessors(v.device.index)


def wants_gradients(call: Sequences, parameters: Sequence[Tensor | None]) -> bool:
    """Return whether a call wants gradients of its inputs, its state or its parameters."""
    given = (*call.inputs, call.initial_state, *parameters)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def given_to(call: Sequences, arrays: Sequence[Tensor]) -> list[Tensor | None]:
    """Return what a plan is given: inputs, a state for each sequence, and bounds that have been looked at."""
    v, state, bounds = arrays[2], call.initial_state, call.cu_seqlens
    if bounds is not None:
        bounds = tensors.packing(bounds, v.shape[1])
    if state is not None and state.dim() == 3:
        state = state.expand(v.shape[0] if bounds is None else bounds.shape[0] - 1, *state.shape)
    return [*arrays, state, bounds]


def problem_of(
    op: Op, given: Sequence[Tensor | None], call: Sequences, chunk_len: int, output_final_state: bool, training: bool
) -> Problem:
    """Return the problem of a call whose plan is `given` these."""
    *arrays, state, bounds = given
    tail, v = call.tail, arrays[2]
    assert v is not None
    options = torch_op.Options(
        tail.scale, op.decay, tail.state_layout, tail.checkpoint_interval, chunk_len, None, "chunked",
        is_batch_invariant=switches.is_batch_invariant(),
    )  # fmt: skip
    gpu = tensors.gpu(v.device.index)
    inputs = [x for x in arrays if x is not None]
    return torch_op.problem_of(op, inputs, state, bounds, options, output_final_state, training, gpu)


class Kernels(NamedTuple):
    """The kernels of a call: their schedules, what the forward keeps, and what runs the call elsewhere."""

    forward: Callable[[Problem], Schedule]
    backward: Callable[[Problem], Schedule]
    kept: Callable[[Problem], dict[str, Any]]
    elsewhere: Callable[[Sequence[Any]], tuple[Callable[..., Result], Sequence[Tensor]]]  # an op, and what it takes


class Known:
    """A call whose forward is prepared, and from its first backward on that too."""

    def __init__(self, kernels: Kernels, problem: Problem, call: Sequences, given: Sequence[Tensor | None]):
        self.kernels, self.problem = kernels, problem
        self.call = call._replace(inputs=[], initial_state=None, cu_seqlens=None)
        self.names = *problem.op.names, "initial_state", "cu_seqlens"
        self.forward = Plan(kernels.forward(problem), problem, dict(zip(self.names, given, strict=True)))
        self._backwards: dict[Any, Plan] = {}
        forget_with(self)

    def forget(self) -> None:
        """Drop the prepared backwards; a graph may hold this call after a fork."""
        self._backwards.clear()

    def differentiate(
        self, given: Sequence[Tensor | None], dy: Tensor | None, grad_final_state: Tensor | None, kept: Tensor
    ) -> list[Tensor]:
        """Return the gradients of the inputs, and of an initial state."""
        if dy is None:
            like = given[2]  # which has the shape of y
            assert like is not None
            dy = torch.zeros_like(like, memory_format=torch.contiguous_format)
        arrays = [*given, dy, grad_final_state, kept]
        signature = tensors.signature(arrays)
        plan = self._backwards.get(signature)
        if plan is None:
            if len(self._backwards) >= _MOST_BACKWARDS:
                self._backwards.clear()
            named = dict(zip((*self.names, "dy", "grad_final_state", "saved"), arrays, strict=True))
            problem = self.problem._replace(has_final_state=grad_final_state is not None)
            plan = self._backwards[signature] = Plan(
                self.kernels.backward(problem), problem, named, self.kernels.kept(problem)
            )
        return plan.run(arrays)

    def differentiate_elsewhere(
        self, given: Sequence[Tensor | None], dy: Tensor | None, grad_final_state: Tensor | None
    ) -> list[Tensor | None]:
        """Do the same by the ops of all calls, which transforms, modes and graphs of a backward know.

        The forward runs again there. Of what wants no gradient there is None.
        """
        is_recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            # One input may be made of another: as views no gradient passes from the one to the other here.
            *arrays, state, cu_seqlens = [x if x is None else x.view_as(x) for x in given]
            call = self.call._replace(initial_state=state, cu_seqlens=cu_seqlens)
            op, taken = self.kernels.elsewhere(arrays)
            results = call.run(op, taken, grad_final_state is not None)
            pairs = [(x, grad) for x, grad in zip(results, (dy, grad_final_state), strict=True) if grad is not None]
            wanted = [x for x in (*arrays, state) if x is not None and x.requires_grad]
            grads = torch.autograd.grad(
                [x for x, _ in pairs if x is not None], wanted, [grad for _, grad in pairs], create_graph=is_recorded,
                allow_unused=True,
            )  # fmt: skip
        several = iter(grads)
        return [next(several) if x is not None and x.requires_grad else None for x in (*arrays, state)]


class _Recorded(torch.autograd.Function):
    """A call with gradients."""

    @staticmethod
    def forward(ctx: Any, known: Known, *given: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, *finals, kept = known.forward.run(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, kept)
        ctx.known = known
        return y, finals[0] if finals else None

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None) -> tuple[Any, ...]:
        *given, kept = ctx.saved_tensors
        if not torch.is_grad_enabled() and tensors.is_eager((dy, grad_final_state), given):
            grads: Sequence[Any] = ctx.known.differentiate(given, dy, grad_final_state, kept)
        else:
            grads = ctx.known.differentiate_elsewhere(given, dy, grad_final_state)
        return None, *grads, *[None] * (len(given) - len(grads))


def run(
    calls: BySignature[Known], kernels: Kernels, op: Op, arrays: Sequence[Tensor], call: Sequences, chunk_len: int,
    training: bool, output_final_state: bool, *more: Any,
) -> Result:  # fmt: skip
    """Run a call, of whose prepared ones these are kept; `more` is what else tells them apart."""
    given = given_to(call, arrays)
    tail = call.tail, chunk_len, training, output_final_state, *more
    key = op.name, switches.is_batch_invariant(), tail, tensors.signature(given)
    known = calls.get(key)
    if known is None:
        problem = problem_of(op, given, call, chunk_len, output_final_state, training)
        known = calls.keep(key, Known(kernels, problem, call, given))
    if training:
        return _Recorded.apply(known, *given)  # type: ignore[no-any-return, no-untyped-call]
    y, *finals = known.forward.run(given)
    return y, finals[0] if output_final_state else None
