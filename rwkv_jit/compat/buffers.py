"""Calls as extensions make them: results go into tensors that the caller has, and a backward is a call of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.call import recording, tensors
from rwkv_jit.compat import listed

Call = Mapping[str, Any]  # the tensors and sizes of a call, by what its extension calls them
Run = Callable[[Call], Any]


def fill(buffer: Tensor, result: Tensor) -> None:
    """Write a result into the caller's tensor, in its dtype and shape."""
    buffer.copy_(result.reshape(buffer.shape))


def fill_each(into: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Write results into as many tensors."""
    for buffer, result in zip(into, results, strict=True):
        fill(buffer, result)


def fill_sum(buffer: Tensor, total: Tensor) -> None:
    """Write a gradient into a tensor with a part for each sequence, which the caller adds up."""
    parts = buffer.view(-1, total.numel())
    parts.zero_()
    parts[0].copy_(total.reshape(-1))


def or_zeros(state: Any, name: str, rows: Any) -> Any:
    """Return a state, or where there is none one of zeros in the dtype of rows (..., H, N), for all sequences."""
    if state is None and (rows := tensors.from_any(name, rows)).dim() > 1:  # else the op says what is wrong with it
        state = rows.new_zeros(rows.shape[-2], rows.shape[-1], rows.shape[-1])
    return state


def kept(s: Tensor, count: int) -> Tensor:
    """Return where the scratch of a forward holds the initial state for its backward, which is not given it."""
    if s.numel() < count or not s.is_contiguous():
        raise ValueError(
            f"s: expected a contiguous tensor of at least {count} elements, as of 16 tokens and more, "
            f"got shape {tuple(s.shape)}"
        )
    return s.view(-1)[:count]


def in_float32(state: Any) -> Any:
    """Return a state of 16 bits as one of 32, so that the state behind it has 32 as well."""
    return state.float() if isinstance(state, Tensor) and state.dtype.itemsize < 4 else state


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


def fill_recorded(
    op: Any, inputs: Sequence[Tensor], state: Tensor | None, scratch: Tensor, y: Tensor, last: Tensor | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Fill y, and the final state where its tensor is given, of a call whose backward is given the same scratch.

    Where an input wants a gradient, what the op keeps for it stays as long as there is the scratch.
    """
    is_recorded = any(x.requires_grad for x in (*inputs, state) if x is not None)
    if is_recorded:
        # The caller may write to its state before the backward, which is not given it.
        initial = None if state is None else state.detach().clone()
        call = _recorded[scratch] = _Recorded(op, inputs, initial, last is not None, options)
        results: Sequence[Tensor | None] = call.results
    else:
        results = run(op, inputs, state, **options)
    for buffer, result in zip((y, last), results, strict=True):
        if buffer is not None and result is not None:
            fill(buffer, result.detach())
    if is_recorded:
        call.release()


class _Recorded:
    """A call of an op with gradients, until its backward: as a list, or else as a graph of autograd."""

    def __init__(
        self, op: Any, inputs: Sequence[Tensor], state: Tensor | None, has_final: bool, options: Mapping[str, Any]
    ):
        self._arrays = [*inputs, *([] if state is None else [state])]
        function = partial(_recurrence, op, len(inputs), has_final, options)
        key = op, len(inputs), has_final, tuple(options.items())
        has_tensors = any(isinstance(x, Tensor) for x in options.values())
        self._list = None if has_tensors else listed.find(key, function, self._arrays, True)
        self.results: Sequence[Tensor | None] = ()
        if self._list is not None:
            outputs, self._values = self._list.forward(self._arrays)
            self._versions = _versions(self._arrays)
            results: Sequence[Tensor] = outputs
        else:
            with recording.plain_torch():
                self._leaves = [x.detach().requires_grad_() for x in self._arrays]
                self._graph = results = function(*self._leaves)
        self._likes = [(x.shape, x.dtype) for x in results]
        self.results = (*results, None) if len(results) == 1 else results

    def release(self) -> None:
        """Drop the results: a kernel's backward does not read them."""
        for x in self.results:
            if self._list is None and x is not None and x.is_cuda:
                x.untyped_storage().resize_(0)
        self.results = ()

    def is_of(self, inputs: Sequence[Tensor], state: Tensor | None, has_final: bool) -> bool:
        """Return whether it is the call of these, of which a state may be a copy."""
        count = len(inputs)
        if len(self._arrays) != count + (state is not None) or (has_final and len(self._likes) == 1):
            return False
        pairs = zip(self._arrays[:count], inputs, strict=True)
        return all(x.data_ptr() == y.data_ptr() and x.shape == y.shape for x, y in pairs)

    def differentiate(self, dy: Tensor, grad_final: Tensor | None) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs and of a state, once."""
        grads = [
            None if grad is None else grad.reshape(shape).to(dtype)
            for grad, (shape, dtype) in zip((dy, grad_final), self._likes, strict=False)
        ]
        if self._list is not None:
            if _versions(self._arrays) != self._versions:
                raise RuntimeError("an input that the backward reads has been modified by an inplace operation")
            return self._list.backward([*self._values], grads, (True,) * len(self._arrays))
        there = [(x, grad) for x, grad in zip(self._graph, grads, strict=True) if grad is not None]
        with recording.plain_torch():
            return torch.autograd.grad([x for x, _ in there], self._leaves, [grad for _, grad in there])


def _versions(arrays: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor has changed, where torch counts that."""
    return [0 if x.is_inference() else x._version for x in arrays]


def _recurrence(
    op: Any, count: int, has_final: bool, options: Mapping[str, Any], *arrays: Tensor
) -> Sequence[Tensor]:  # fmt: skip
    """Return y, and a final state that is wanted, of so many inputs and an initial state behind them, if any."""
    state = arrays[count] if len(arrays) > count else None
    y, final = op(*arrays[:count], initial_state=state, output_final_state=has_final, **options)
    return [y, final] if has_final else [y]


# By the scratch that a caller passes to a forward and to its backward.
_recorded: Any = WeakTensorKeyDictionary()


def gradients(
    op: Any, inputs: Sequence[Tensor], state: Tensor | None, dy: Tensor, grad_final: Tensor | None = None,
    scratch: Tensor | None = None, **options: Any,
) -> Sequence[Any]:  # fmt: skip
    """Return the gradients of the inputs, and of the state where there is one.

    The forward runs again, unless it has recorded what the backward needs under the same scratch: of this the content
    is nobody's, as it has the sizes of another algorithm.
    """
    recorded = None if scratch is None else _recorded.pop(scratch, None)
    if recorded is None or not recorded.is_of(inputs, state, grad_final is not None):
        recorded = _Recorded(op, inputs, state, grad_final is not None, options)
    return recorded.differentiate(dy, grad_final)
