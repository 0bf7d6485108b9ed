"""What a call says of its part to the other processes, and what it makes of their answers."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_jit.parallel import summaries
from rwkv_jit.parallel.shard import Gathered, Shard


class Exchange:
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
        self._forward = shard.gather(torch.cat([
            bias_of_text if shard.is_to_be_continued else torch.zeros_like(bias),
            transition if shard.is_passed else torch.zeros_like(transition),
        ], -2))  # fmt: skip
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
        told = self._forward.wait()
        rows = bias.shape[-2]
        return list(zip(told[..., :rows, :], told[..., rows:, :], strict=True))

    def finish(self) -> None:
        """Let what comes later wait for messages that this process did not need."""
        for gathered in (self._forward, self._backward):
            if gathered is not None:
                gathered.wait()
