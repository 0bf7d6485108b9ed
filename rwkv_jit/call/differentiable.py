"""Torch ops with gradients, as data: what runs their backward, its fake, and what autograd and autocast do with both.

The tensors of an op stand first among its arguments, and of these the leaves, which may have gradients; then come the
options, and flags of the forward alone. Its backward takes the tensors, what the forward has kept, the gradients of
the other results and the options, in the order in which plans take tensors; `registry.register_both` says it to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import prepared, recording, registry, tensors
from rwkv_jit.call.prepared import Gradients

Values = Sequence[Any]  # tensors or None, or options
Named = Mapping[str, Any]  # options by name


@dataclass(frozen=True, eq=False)
class Differentiable:
    """A torch op with gradients: all that the engine must know of it."""

    name: str
    leaves: recording.Leaves
    tensors: int  # how many it takes
    results: int  # that may have gradients; behind them stands what the backward takes
    forward: Callable[..., Any]
    fake: Callable[..., Any]  # the forward of tensors without memory
    plainly: Callable[..., Any]  # the forward in plain torch, for forward-mode derivatives; or an error
    # How prepared kernels differentiate what a backward takes: its arrays, options, options by name, and the names of
    # the leaves whose gradients are wanted. None where `by_hand` returns these, of the same arguments.
    gradients: Callable[[Values, Values, Named, Sequence[str]], Gradients | None]
    by_hand: Callable[[Values, Values, Named, Sequence[str]], Mapping[str, Tensor]]
    cast: Callable[..., Any] = lambda *arguments: arguments  # of the forward under autocast
    flags: int = 1  # arguments of the forward behind the options, of which the last says whether it keeps anything
    lead: int = 0  # of the arrays, as `prepared.latest` takes it
    bounds: int | None = None  # the place of cu_seqlens that kernels read as int64
    # Of what a backward takes: what tells plans apart beside the options, and bounds whose values do.
    told: Callable[[Values, Values], tuple[Any, Tensor | None]] = lambda arrays, options: (None, None)
    present: Callable[[Values], Sequence[bool]] = lambda arguments: (True,) * len(arguments)  # of the results
    unused: Callable[[Values], Collection[str]] = lambda arrays: ()  # leaves that no result depends on
    # What the backward takes for the tensors, from these and all results of the forward.
    seen: Callable[[Values, Sequence[Tensor]], Values] = lambda arrays, results: arrays
    # Leaves whose gradient is that of another one in a dtype, by the options.
    shared: Callable[[Values], Mapping[str, tuple[str, torch.dtype]]] = lambda options: {}
    instead: str = ""  # what the error of a second derivative names; by default the reference


def define(op: Differentiable) -> Callable[..., list[Tensor | None]]:
    """Say who runs both torch ops of this, and return `differentiate`.

    It returns the gradients of all tensors by the torch op of the backward, from what that takes: of the leaves that
    are wanted, and None of the others; no names stand for all.
    """
    name, leaves = op.name, op.leaves
    forward_op, backward_op = registry.find(f"{name}_fwd"), registry.find(f"{name}_bwd")
    record_backward, run_backward = recording.backward(backward_op, name, op.instead)
    end = sum(not x.kwarg_only for x in forward_op._schema.arguments) - op.flags  # of the options

    def backward(*arguments: Any, wanted: str = "", **named: Any) -> Any:
        count = len(arguments) - (end - op.tensors)
        arrays, options = arguments[:count], arguments[count:]
        told, bounds = op.told(arrays, options)
        chosen = tuple([tuple(x) if isinstance(x, list) else x for x in options])  # which has a hash
        key = f"{name}_bwd", chosen, wanted, told, tuple(named.items())
        known = prepared.latest(key, arrays, op.lead, bounds)
        if known is None:
            names = leaves.wanted(arrays, wanted.split())
            gradients = op.gradients(arrays, options, named, names)
            if gradients is None:
                return leaves.in_places(op.by_hand(arrays, options, named, names), names, arrays)
            known = names, gradients, gradients.plan(readable(arrays, gradients))
            prepared.keep_latest(key, arrays, known, op.lead, bounds)
        names, gradients, plan = known
        found = zip(gradients.places, plan.run(readable(arrays, gradients)), strict=True)
        return leaves.in_places({leaves.names[place]: x for place, x in found}, names, arrays)

    def readable(arrays: Values, gradients: Gradients) -> list[Any]:
        """Return arrays as kernels take them: with zeros for gradients that they need, and bounds as int64."""
        several: list[Any] = [*arrays]
        for place, shape, dtype in gradients.needed:
            if several[place] is None:
                several[place] = several[0].new_zeros(shape, dtype=dtype)
        if op.bounds is not None and several[op.bounds] is not None:
            several[op.bounds] = tensors.readable_packing(several[op.bounds])
        return several

    def backward_fake(*arguments: Any, wanted: str = "", **_: Any) -> Any:
        return leaves.without_memory(arguments, wanted.split())

    def keep(ctx: Any, arguments: Values, named: dict[str, Any], results: Any) -> None:
        several = results if isinstance(results, tuple) else (results,)
        ctx.present, kept = op.present(arguments), several[op.results :]
        absent = [x for x, is_there in zip(several, ctx.present, strict=False) if not is_there]
        ctx.mark_non_differentiable(*absent, *kept)
        ctx.save_for_backward(*op.seen(arguments[: op.tensors], several), *kept)
        ctx.options, ctx.named = arguments[op.tensors : end], named

    def in_context(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # A compiled graph passes zeros for a result that has no gradient, here for an empty one.
        there = [grad if is_there else None for grad, is_there in zip(grads[: op.results], ctx.present, strict=False)]
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]  # of a Function with two inputs before these
        unused = op.unused(saved)
        wanted = [x for x, is_needed in zip(leaves.names, needs, strict=False) if is_needed and x not in unused]
        found = differentiate(saved, there, ctx.options, wanted, **ctx.named) if wanted else []
        return *found, *[None] * (len(needs) - len(found))

    def differentiate(
        saved: Values, grads: Values, options: Values, wanted: Sequence[str], **named: Any
    ) -> list[Tensor | None]:  # fmt: skip
        shared = {x: of for x, of in op.shared(options).items() if x in wanted}
        needed = leaves.wanted(saved, [shared[x][0] if x in shared else x for x in wanted])
        text = " ".join(needed) if len(needed) < len(leaves.wanted(saved, ())) else ""
        found = dict(zip(leaves.names, run_backward(*saved, *grads, *options, wanted=text, **named), strict=True))
        made: dict[str, Tensor] = {x: found[x] for x in needed if not wanted or x in wanted}
        made |= {x: found[other].to(dtype) for x, (other, dtype) in shared.items()}
        return [*map(made.get, leaves.names), *[None] * (op.tensors - len(leaves.names))]

    record = recording.forward(forward_op, keep, in_context, op.plainly)
    registry.implement(f"{name}_fwd", op.forward, op.fake, record, op.cast)
    registry.implement(f"{name}_bwd", backward, backward_fake, record_backward)
    return differentiate
