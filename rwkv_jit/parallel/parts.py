"""A call over one part of its sequences, with autograd: a part of one text, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_jit.parallel import two_phases
from rwkv_jit.parallel.exchange import Exchange
from rwkv_jit.parallel.shard import Shard
from rwkv_jit.parallel.two_phases import Call, Way


def of_one_text(way: Way, shard: Shard, initial: Tensor | None, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return y and the states behind a part that belongs to one text, or to as many as a batch has."""
    made: tuple[Tensor, Tensor] = _OneText.apply(way, shard, initial, *inputs)  # type: ignore[no-untyped-call]
    return made


def of_texts(
    call: Call, shard: Shard, wants: Sequence[bool], initial: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return y and the states behind all texts of a part with the end of one and the beginning of another.

    What begins here runs first, for its state is awaited. The rest of a text that began elsewhere runs when all
    processes have got so far. `wants` says of which inputs, and last whether of the states, gradients are wanted.
    """
    made: tuple[Tensor, Tensor] = _Texts.apply(call, shard, wants, initial, *inputs)  # type: ignore[no-untyped-call]
    return made


class _OneText(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, shard: Shard, initial: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.way, ctx.exchange = way, Exchange(shard)
        y, final, saved, ctx.graph = way.forward(
            inputs, lambda bias, transition: ctx.exchange.state(bias, transition, initial)
        )
        ctx.exchange.finish()
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.like, ctx.has_own_state = (y.shape, y.dtype, y.device), initial is not None and not shard.is_continued
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        dy = torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
        *grads, grad_state = ctx.way.backward(
            ctx.saved_tensors, ctx.graph, dy, lambda bias: ctx.exchange.gradient(bias, grad_final)
        )
        ctx.exchange.finish()
        return (None, None, grad_state if ctx.has_own_state else None, *grads)


class _Texts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, shard: Shard, wants: Sequence[bool], initial: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert shard.bounds is not None
        op, first = call.op, int(shard.is_continued)
        cut = shard.bounds[first]

        def leaves_of(part: slice) -> list[Tensor]:
            return [
                (x[:, part] if "T" in dims else x).detach().requires_grad_(is_wanted)
                for dims, x, is_wanted in zip(op.inputs.values(), inputs, wants, strict=False)
            ]

        ctx.exchange = Exchange(shard)
        with torch.enable_grad():
            new = leaves_of(slice(cut, None))
            states = None if initial is None else initial[first:].detach().requires_grad_(wants[-1])
            y, final = call.run(new, states, shard.cu_seqlens(new[0].device, first))
            graphs = [((y, final), [*new, *([] if states is None else [states])])]
            bias = final.detach()[-1:]
            rows = bias.shape[-1] if op.family == "delta" else 1
            before = ctx.exchange.state(bias, bias.new_zeros(1, bias.shape[1], rows, bias.shape[-1]), None)
            if first:
                rest = [*leaves_of(slice(0, cut)), before.detach().requires_grad_(any(wants))]
                graphs.append((call.run(rest[:-1], rest[-1]), rest))
        ctx.exchange.finish()
        ctx.graphs = graphs if any(wants) else None
        ctx.set_materialize_grads(False)
        ctx.op, ctx.first, ctx.cut, ctx.has_states = op, first, cut, states is not None
        results = [made for made, _ in reversed(graphs)]
        return torch.cat([y for y, _ in results], 1).detach(), torch.cat([final for _, final in results]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        op, first, cut = ctx.op, ctx.first, ctx.cut
        (y, final), new = ctx.graphs[0]
        bias: Tensor | None = torch.zeros_like(final[-1:])
        of_rest: list[Tensor | None] | None = None
        if first:
            made, rest = ctx.graphs[1]
            given = _given(made[0], dy, slice(0, cut)), None if grad_final is None else grad_final[:1]
            *of_rest, bias = two_phases.gradients(made, rest, given)
        behind = ctx.exchange.gradient(bias, None)
        of_states = torch.zeros_like(final) if grad_final is None else grad_final[first:].clone()
        of_states[-1:] += behind
        of_new = two_phases.gradients((y, final), new, (_given(y, dy, slice(cut, None)), of_states))
        ctx.exchange.finish()
        grad_states = of_new.pop() if ctx.has_states else None
        if of_rest is not None:
            pairs = zip(op.inputs.values(), of_rest, of_new, strict=True)
            of_new = [
                b if a is None or b is None else torch.cat([a, b], 1) if "T" in dims else a + b for dims, a, b in pairs
            ]
            if grad_states is not None:
                grad_states = torch.cat([torch.zeros_like(grad_states[:1]), grad_states])
        return (None, None, None, grad_states, *of_new)


def _given(y: Tensor, dy: Tensor | None, part: slice) -> Tensor:
    """Return the gradient of some tokens' y."""
    return torch.zeros_like(y) if dy is None else dy[:, part]


def _joined(dims: str, first: Tensor, second: Tensor) -> Tensor:
    """Return the gradient of an input from those of its two pieces."""
    return torch.cat([first, second], 1) if "T" in dims else first + second
