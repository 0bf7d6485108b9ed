"""A call over one part of its sequences, with autograd: a part of one sequence, or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_jit.parallel import summaries
from rwkv_jit.parallel.paused import Call, Way
from rwkv_jit.parallel.shard import Gathered, Shard
from rwkv_jit.schedules.problem import STATE, Op


class _Exchange:
    """What a call says of its part to the other processes, and what it makes of their answers."""

    def __init__(self, shard: Shard):
        self.shard = shard
        self._forward: Gathered | None = None
        self._backward: Gathered | None = None
        self._transition: Tensor | None = None

    def state(self, bias: Tensor, transition: Tensor, initial: Tensor | None) -> Tensor:
        """Return the state before this part, whose Q and P are told to the others."""
        shard, self._transition = self.shard, transition
        if initial is not None and not shard.is_continued:
            bias_of_text = summaries.after(initial, bias, transition)
        else:
            bias_of_text = bias
        of_text = bias_of_text if shard.is_to_be_continued else torch.zeros_like(bias)
        passed = transition if shard.is_passed else torch.zeros_like(transition)
        self._forward = shard.gather(
            torch.cat([of_text.flatten(-2), passed.flatten(-2)], -1)
        )  # [N, H, numbers of both]
        if shard.is_continued:
            return summaries.joined(self._parts(bias)[: shard.rank])
        return torch.zeros_like(bias) if initial is None else initial.to(bias.dtype)

    def gradient(self, bias: Tensor, grad_final: Tensor | None) -> Tensor:
        """Return the gradient of the state behind this part; what it leaves of gradients is told to the others."""
        shard = self.shard
        if grad_final is not None:
            assert self._transition is not None
            bias = summaries.after(grad_final, bias, self._transition, backward=True)
        self._backward = shard.gather(bias if shard.is_continued else torch.zeros_like(bias))
        if not shard.is_to_be_continued:
            return torch.zeros_like(bias) if grad_final is None else grad_final
        transitions = [transition for _, transition in self._parts(bias)]
        behind = list(zip(self._backward.wait(), transitions, strict=True))[: shard.rank : -1]
        grad = summaries.joined(behind, backward=True)
        return grad if grad_final is None else grad + grad_final

    def _parts(self, bias: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return Q and P of every process, from the forward."""
        assert self._forward is not None
        assert self._transition is not None
        like = bias, self._transition
        told = self._forward.wait().split([x.shape[-2:].numel() for x in like], -1)
        return list(zip(*(x.unflatten(-1, y.shape[-2:]) for x, y in zip(told, like, strict=True)), strict=True))

    def finish(self) -> None:
        """Let what comes later wait for messages that this process did not need."""
        for gathered in (self._forward, self._backward):
            if gathered is not None:
                gathered.wait()


class _OneText(torch.autograd.Function):
    """y and the states behind a part that belongs to one sequence, or to as many as a batch has."""

    @staticmethod
    def forward(ctx: Any, way: Way, shard: Shard, initial: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.way, ctx.exchange = way, _Exchange(shard)
        y, final, saved = way.forward(inputs, lambda bias, transition: ctx.exchange.state(bias, transition, initial))
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
            ctx.saved_tensors, dy, lambda bias: ctx.exchange.gradient(bias, grad_final)
        )
        ctx.exchange.finish()
        return (None, None, grad_state if ctx.has_own_state else None, *grads)


class _Texts(torch.autograd.Function):
    """y and the states behind all sequences of a part with the end of one and the beginning of another.

    What begins here runs first, as others wait for its state, and the rest when its state is there. `wants` says of
    which inputs, and last whether of the states, there are gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, shard: Shard, wants: Sequence[bool], initial: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert shard.bounds is not None
        first, training = int(shard.is_continued), any(wants)
        cut = shard.bounds[first]
        new, rest = (_tokens(call.op, inputs, part) for part in (slice(cut, None), slice(0, cut)))
        bounds = shard.cu_seqlens(inputs[0].device, first)
        states = call.states(inputs, shard.texts - first) if initial is None else initial[first:].contiguous()
        # The switches of precision may be others when gradients are made.
        ctx.options, ctx.options_of_rest = call.options(new, bounds), call.options(rest, None) if first else None
        y, final, kept = call.forward(new, states, bounds, ctx.options, training)
        exchange = _Exchange(shard)
        before = exchange.state(final[-1:], call.states(inputs, 1, call.op.transition), None)
        kept_of_rest = None
        if first:
            y_of_rest, final_of_rest, kept_of_rest = call.forward(rest, before, None, ctx.options_of_rest, training)
            y, final = torch.cat([y_of_rest, y], 1), torch.cat([final_of_rest, final])
        exchange.finish()
        ctx.save_for_backward(*inputs, states, kept, before, kept_of_rest)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.exchange, ctx.wants, ctx.first, ctx.cut, ctx.bounds = call, exchange, wants, first, cut, bounds
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        call, first, cut = ctx.call, ctx.first, ctx.cut
        *inputs, states, kept, before, kept_of_rest = ctx.saved_tensors
        new, rest = (_tokens(call.op, inputs, part) for part in (slice(cut, None), slice(0, cut)))
        if dy is None:
            v = inputs[call.op.names.index("v")]
            dy = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        wanted = call.wanted(ctx.wants)
        bias, of_rest = torch.zeros_like(states[-1:]), None
        if first:
            grad = None if grad_final is None else grad_final[:1].contiguous()
            given = (*rest, before, None, kept_of_rest)
            also_of_state = dict.fromkeys((*wanted, STATE))
            *of_rest, bias = call.backward(given, ctx.options_of_rest, dy[:, :cut], grad, [*also_of_state])
        behind = ctx.exchange.gradient(bias, None)
        of_states = torch.zeros_like(states) if grad_final is None else grad_final[first:].clone()
        of_states[-1:] += behind
        given = (*new, states, ctx.bounds, kept)
        *grads, grad_states = call.backward(given, ctx.options, dy[:, cut:], of_states, wanted)
        ctx.exchange.finish()
        if of_rest is not None:
            pairs = zip(call.op.inputs.values(), of_rest, grads, strict=True)
            grads = [None if a is None or b is None else _joined(dims, a, b) for dims, a, b in pairs]
            if grad_states is not None:
                grad_states = torch.cat([torch.zeros_like(grad_states[:1]), grad_states])
        return (None, None, None, grad_states, *grads)


of_one_text: Callable[..., tuple[Tensor, Tensor]] = _OneText.apply
of_texts: Callable[..., tuple[Tensor, Tensor]] = _Texts.apply


def _tokens(op: Op, inputs: Sequence[Tensor], part: slice) -> list[Tensor]:
    """Return some tokens of all inputs that have any."""
    rows = zip(op.inputs.values(), inputs, strict=True)
    return [x[:, part] if x is not None and "T" in dims else x for dims, x in rows]


def _joined(dims: str, first: Tensor, second: Tensor) -> Tensor:
    """Return the gradient of an input from those of its two pieces."""
    return torch.cat([first, second], 1) if "T" in dims else first + second
