"""Ops with one decay for a head, or with none, in kernels of their own: calls of many heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rwkv_jit import modes, tensors
from rwkv_jit.algorithms.parts import Case
from rwkv_jit.derived import arguments, operands, own_kernels, steps
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.derived.table import Core
from rwkv_jit.layers import plain
from rwkv_jit.ops import checks
from rwkv_jit.ops.gla import gla
from rwkv_jit.ops.wkv7 import wkv7
from rwkv_jit.plan import Plan
from rwkv_jit.problem import Problem
from rwkv_jit.signatures import BySignature, forget_with

LEAST_BLOCKS = 1 / 5  # heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments elsewhere
_MOST_BACKWARDS = 16  # of a call: they differ in the strides of the gradients of its results


class Way(NamedTuple):
    """How a call runs here."""

    chunk_len: int
    training: bool  # gradients are wanted


def way(call: Sequences, q: Tensor, v: Tensor, has_delta: bool, *parameters: Any) -> Way | None:
    """Return how a call that has been checked runs; None where it is for other kernels.

    `parameters` are those that are no inputs of the call, and may want a gradient.
    """
    if not own_kernels.may_take(call, v, parameters, LEAST_BLOCKS):
        return None
    training = own_kernels.wants_gradients(call, parameters)
    op, gpu, chunk_len = Core(has_delta).op, tensors.gpu(v.device.index), call.tail.chunk_len
    sizes = q.shape[-1], v.shape[-1], v.shape[1]
    case = Case(op, tensors.STORAGE[v.dtype], *sizes, op.decay, None, chunk_len, training=training)
    if steps.why_not(case, lambda: gpu) is not None:
        return None
    return Way(chunk_len or steps.default_chunk_len(case, gpu), training)


class _Known:
    """A call whose forward is prepared, and from its first backward on that too."""

    def __init__(self, core: Core, problem: Problem, call: Sequences, given: Sequence[Tensor | None]):
        self.core, self.problem = core, problem
        self.call = call._replace(inputs=[], initial_state=None, cu_seqlens=None)
        self.names = *problem.op.names, "initial_state", "cu_seqlens"
        self.forward = Plan(steps.forward(problem), problem, dict(zip(self.names, given, strict=True)))
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
            plan = self._backwards[signature] = Plan(steps.backward(problem), problem, named, steps.kept(problem))
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
            op, taken = _of_other_kernels(self.core, arrays)  # type: ignore[arg-type]
            results = call.run(op, taken, grad_final_state is not None)
            pairs = [(x, grad) for x, grad in zip(results, (dy, grad_final_state), strict=True) if grad is not None]
            wanted = [x for x in (*arrays, state) if x is not None and x.requires_grad]
            grads = torch.autograd.grad(
                [x for x, _ in pairs if x is not None], wanted, [grad for _, grad in pairs], create_graph=is_recorded,
                allow_unused=True,
            )  # fmt: skip
        several = iter(grads)
        return [next(several) if x is not None and x.requires_grad else None for x in (*arrays, state)]


def _of_other_kernels(core: Core, arrays: Sequence[Tensor]) -> tuple[Callable[..., Result], Sequence[Tensor]]:
    """Return the op that runs a core elsewhere, and what it takes."""
    q, k, v, *gates = arrays
    if core.has_step:
        step, *others = gates
        step = step.to(torch.promote_types(step.dtype, torch.float32))
        if core.has_bias:
            step = step + others.pop()
        step, rates = F.softplus(step), others.pop()
        made = core._replace(has_step=False, has_bias=False)
        return _of_other_kernels(made, [q, k, v, step * rates, step, *others])
    if core.has_own:
        own = gates.pop()

        def with_own(*taken: Tensor, **options: Any) -> Result:
            y, state = gla(*taken, **options)  # type: ignore[arg-type]
            return (y + v * own).to(y.dtype), state

        return with_own, _of_other_kernels(core._replace(has_own=False), [q, k, v, *gates])[1]
    if core.has_delta:
        named = dict(zip(core.op.names[3:], gates, strict=True))
        return wkv7, operands.of_delta_rule(
            q, k, v, named.get("w"), named["beta"], named.get("a_log"), named.get("dt_bias"), qk_norm=core.has_norm,
            beta_map=core.rate_map,
        )  # fmt: skip
    if core.has_rate:
        v = (v * gates[-1].unsqueeze(-1)).to(v.dtype)
    return gla, operands.for_heads(q, k, v, gates[0])


class _Recorded(torch.autograd.Function):
    """A call with gradients."""

    @staticmethod
    def forward(ctx: Any, known: _Known, *given: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, *finals, kept = known.forward.run(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, kept)
        ctx.known = known
        return y, finals[0] if finals else None

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_final_state: Tensor | None) -> tuple[Any, ...]:
        *given, kept = ctx.saved_tensors
        is_direct = not torch.is_grad_enabled() and tensors.is_eager()
        if is_direct and tensors.PLAIN.issuperset(map(type, (dy, grad_final_state, *given))):
            grads: Sequence[Any] = ctx.known.differentiate(given, dy, grad_final_state, kept)
        else:
            grads = ctx.known.differentiate_elsewhere(given, dy, grad_final_state)
        return None, *grads, *[None] * (len(given) - len(grads))


_calls: BySignature[_Known] = BySignature()


def run(core: Core, arrays: Sequence[Tensor], call: Sequences, how: Way, output_final_state: bool) -> Result:
    """Run a call as `way` says; `arrays` are the inputs of the core."""
    given = own_kernels.given_to(call, arrays)
    key = core, modes.is_batch_invariant(), call.tail, how, output_final_state, tensors.signature(given)
    known = _calls.get(key)
    if known is None:
        problem = own_kernels.problem_of(core.op, given, call, how.chunk_len, output_final_state, how.training)
        known = _calls.keep(key, _Known(core, problem, call, given))
    if how.training:
        return _Recorded.apply(known, *given)  # type: ignore[no-any-return, no-untyped-call]
    y, *finals = known.forward.run(given)
    return y, finals[0] if output_final_state else None


def of_delta_rule(
    call: Sequences, output_final_state: bool, a_log: Any, dt_bias: Any, qk_norm: Any, beta_map: str
) -> Result | None:
    """Run a delta rule whose shapes have been checked; None where it is for other kernels."""
    q, k, v, *gates = call.inputs
    if beta_map not in plain.RATES or (a_log is None and dt_bias is not None):
        return None  # which the checks there refuse
    heads = v.shape[-2]
    parameters = [
        None if x is None else arguments.check_fixed(name, x, [(heads,)], v)
        for name, x in (("A_log", a_log), ("dt_bias", dt_bias))
    ]
    how = way(call, q, v, True, *parameters)
    if how is None:
        return None
    raw = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in parameters if x is not None]
    core = Core(
        True, has_decay=len(gates) > 1, has_norm=checks.check_flag("qk_norm", qk_norm), has_gate=len(raw) > 0,
        has_bias=len(raw) > 1, rate_map=beta_map,
    )  # fmt: skip
    return run(core, (q, k, v, *gates, *raw), call, how, output_final_state)
