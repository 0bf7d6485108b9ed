"""How the next tokens of sequences are drawn from logits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.kernels.errors import brief
from rwkv_jit.nn import common
from rwkv_jit.pool import arguments


class Sampler:
    """Draws tokens, one of each sequence at a time: `draw` returns them, `has_ended` says whether all have stopped.

    The options are those of `LanguageModel.generate`.
    """

    def __init__(
        self, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None, stop: Any = None,
        repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        penalties = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
        several = {"temperature": temperature, "top_p": top_p, "repetition_penalty": repetition_penalty, **penalties}
        for name, value in several.items():
            checks.check_number(name, value)
        if temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: expected more than 0 and at most 1, got {top_p}")
        if repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty: expected more than 0, got {repetition_penalty}")
        self.temperature, self.top_p, self.generator = temperature, top_p, generator
        self.top_k = None if top_k is None else arguments.count("top_k", top_k, 1)
        self.repetition, self.presence, self.frequency = repetition_penalty, presence_penalty, frequency_penalty
        self.stop = [] if stop is None else stop.tolist() if isinstance(stop, Tensor) else stop
        self.stop = arguments.listed("stop", self.stop)
        self._of_prompt: Tensor | None = None
        self._counts: Tensor | None = None
        self._last: Tensor | None = None
        self._has_stopped: Tensor | None = None

    def begin(self, logits: Tensor, prompts: Sequence[Tensor]) -> None:
        """Begin sequences whose next token has these logits, [B, vocabulary]."""
        if self.stop:
            self._stops = torch.tensor(self.stop, device=logits.device)
            self._has_stopped = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if self.repetition != 1:
            self._of_prompt = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in zip(self._of_prompt, prompts, strict=True):
                row[prompt.long()] = True
        if self.repetition != 1 or self.presence or self.frequency:
            self._counts = torch.zeros_like(logits, dtype=torch.float32)  # of what was drawn

    def draw(self, logits: Tensor) -> Tensor:
        """Return the next token of every sequence, [B]; one that has stopped repeats its stop token."""
        if self._counts is not None:
            logits = self._penalized(logits.float())
        drawn = logits.argmax(-1) if self.temperature == 0 else self._drawn(logits)
        if self._has_stopped is not None:
            drawn = drawn if self._last is None else torch.where(self._has_stopped, self._last, drawn)
            self._has_stopped, self._last = torch.isin(drawn, self._stops), drawn
        if self._counts is not None:
            self._counts.scatter_add_(1, drawn.unsqueeze(1), torch.ones_like(self._counts[:, :1]))
        return drawn

    def has_ended(self) -> bool:
        """Return whether all sequences have stopped; this waits for the GPU."""
        return self._has_stopped is not None and bool(self._has_stopped.all())

    def _penalized(self, logits: Tensor) -> Tensor:
        assert self._counts is not None
        if self._of_prompt is not None:
            less = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(self._of_prompt | (self._counts > 0), less, logits)
        return logits - self.frequency * self._counts - self.presence * (self._counts > 0)

    def _drawn(self, logits: Tensor) -> Tensor:
        if self.top_k is None and self.top_p == 1:
            return self._one_of(logits, self.temperature)
        logits, order = (
            (logits.float() / self.temperature)
            .log_softmax(-1)
            .topk(min(self.top_k or logits.shape[-1], logits.shape[-1]))
        )
        chances = logits.exp()
        if self.top_k is not None:
            chances = chances / chances.sum(-1, keepdim=True)
        is_past = chances.cumsum(-1) - chances >= self.top_p  # the most likely token never is
        return order.gather(-1, self._one_of(logits.masked_fill(is_past, -torch.inf), 1).unsqueeze(-1)).squeeze(-1)

    def _one_of(self, logits: Tensor, temperature: float) -> Tensor:
        """Draw by the chances that logits stand for: the largest of them with a Gumbel number each."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        less = torch.empty_like(logits, dtype=dtype).exponential_(generator=self.generator).log_()  # [B, choices]
        return logits.sub(less, alpha=temperature).argmax(-1)


def check_tokens(tokens: Any, *dims: str) -> None:
    """Check tokens of these dimensions."""
    if common.tensor_of("tokens", tokens).dim() != len(dims):
        raise ValueError(f"tokens: expected shape [{', '.join(dims)}], got {list(tokens.shape)}")
    if tokens.dtype not in arguments.INDEX_TYPES:
        raise TypeError(f"tokens: expected torch.int64 or torch.int32, got {tokens.dtype}")


def check_prompts(tokens: Any, cu_seqlens: Any = None) -> None:
    """Check prompts of one length, or packed ones: the last token of each is read."""
    check_tokens(tokens, "batch", "tokens")
    if not tokens.numel():
        raise ValueError(f"tokens: expected at least one token, got shape {list(tokens.shape)}")
    if cu_seqlens is not None and arguments.may_look_at([common.tensor_of("cu_seqlens", cu_seqlens)]):
        bounds = cu_seqlens.tolist()
        if cu_seqlens.dim() == 1 and any(map(operator.ge, bounds, bounds[1:])):
            raise ValueError(f"cu_seqlens: expected at least one token in each sequence, got {brief(bounds)}")


def prompts_of(tokens: Any, count: Any, lengths: Any) -> list[Tensor]:
    """Return prompts once they are checked: one tensor [B, T], or several [1, T] of different lengths.

    They are a sequence of tensors, or the first tokens of each row, as `lengths` says.
    """
    arguments.count("count", count)
    if isinstance(tokens, (list, tuple)) and tokens and all(isinstance(x, Tensor) for x in tokens):
        if lengths is not None:
            raise ValueError("lengths: expected None with several prompts")
        several = list(tokens)
    else:
        check_prompts(tokens)
        if lengths is None:
            return [tokens]
        counts = arguments.listed("lengths", lengths.tolist() if isinstance(lengths, Tensor) else lengths)
        if len(counts) != len(tokens) or not all(0 <= x <= tokens.shape[1] for x in counts):
            raise ValueError(f"lengths: expected {len(tokens)} of up to {tokens.shape[1]}, got {brief(counts)}")
        several = [row[:count] for row, count in zip(tokens, counts, strict=True)]
    for x in several:
        if x.dim() != 1 or x.dtype not in arguments.INDEX_TYPES:
            raise ValueError(f"tokens: expected prompts [tokens] of int64 or int32, got {list(x.shape)} of {x.dtype}")
        if not x.numel():
            raise ValueError("tokens: expected at least one token in every prompt, got none")
    if len({(x.dtype, x.device) for x in several}) > 1:
        raise ValueError("tokens: expected prompts of one dtype on one device")
    if len({*map(len, several)}) > 1:
        return [x.unsqueeze(0) for x in several]
    return [torch.stack(several)]
