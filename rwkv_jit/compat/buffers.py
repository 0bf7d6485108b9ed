"""Calls as extensions make them: results go into tensors that the caller has, and a backward is a call of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.ops import recording


def heads(batch: int, tokens: int, number: int, *rows: Tensor) -> list[Tensor]:
    """Return rows of channels as (batch, tokens, heads, channels of a head)."""
    return [x.reshape(batch, tokens, number, -1) for x in rows]


def fill(buffer: Tensor, result: Tensor) -> None:
    """Write a result into the caller's tensor, in its dtype and shape."""
    buffer.copy_(result.reshape(buffer.shape))


def fill_sum(buffer: Tensor, total: Tensor) -> None:
    """Write a gradient into a tensor with a part for each sequence, which the caller adds up."""
    parts = buffer.view(-1, total.numel())
    parts.zero_()
    parts[0].copy_(total.reshape(-1))


def or_zeros(state: Tensor | None, rows: Tensor) -> Tensor:
    """Return a state, or where there is none one of zeros in the dtype of rows (..., H, N), for all sequences."""
    return rows.new_zeros(rows.shape[-2], rows.shape[-1], rows.shape[-1]) if state is None else state


def kept(s: Tensor, count: int) -> Tensor:
    """Return where the scratch of a forward holds the initial state for its backward, which is not given it."""
    if s.numel() < count or not s.is_contiguous():
        raise ValueError(
            f"s: expected a contiguous tensor of at least {count} elements, as of 16 tokens and more, "
            f"got shape {tuple(s.shape)}"
        )
    return s.view(-1)[:count]


def in_float32(state: Tensor | None) -> Tensor | None:
    """Return a state of 16 bits as one of 32, so that the state behind it has 32 as well."""
    return state.float() if state is not None and state.dtype.itemsize == 2 else state


def y_of(op: Any, inputs: Sequence[Any], state: Any = None, **options: Any) -> Tensor:
    """Return y."""
    y, _ = op(*inputs, initial_state=state, **options)
    return y  # type: ignore[no-any-return]


def with_final(op: Any, inputs: Sequence[Any], state: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Return y and the final state."""
    y, final = op(*inputs, initial_state=state, output_final_state=True, **options)
    return y, final


def run(op: Any, inputs: Sequence[Tensor], state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Return y and the final state, of which nothing is recorded."""
    with torch.no_grad():
        return with_final(op, inputs, state, **options)


def gradients(
    op: Any, inputs: Sequence[Tensor], state: Tensor | None, dy: Tensor, grad_final: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the inputs, and of the state where there is one.

    The forward runs again: the caller's scratch has the sizes of another algorithm.
    """
    with recording.plain_torch():
        leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if state is None else [state]))]
        count = len(inputs)
        y, final = op(
            *leaves[:count],
            initial_state=None if state is None else leaves[count],
            output_final_state=grad_final is not None,
            **options,
        )
        results, grads = [y], [dy.reshape(y.shape).to(y.dtype)]
        if grad_final is not None:
            results, grads = [y, final], [*grads, grad_final.reshape(final.shape).to(final.dtype)]
        return list(torch.autograd.grad(results, leaves, grads))
