"""Calls that have come before: they have passed all checks, and their forward is prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rwkv_jit import tensors
from rwkv_jit.ops.interface import Forward
from rwkv_jit.signatures import BySignature

forwards: BySignature[Forward] = BySignature()
# The last of those that differ in nothing but tensors behind the first: a check whether these are alike, the forward,
# and whether gradients are wanted. To ask every tensor for its signature takes as long as half a launch.
_latest: BySignature[tuple[Callable[..., bool], Forward, bool]] = BySignature()


def find(
    asked: tuple[Any, ...], arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any
) -> tuple[Forward | None, bool]:
    """Return the forward of a call that has come before, None for others, and whether gradients are wanted.

    `asked` is all of a call but its arrays, and at its end whether gradients are recorded.
    """
    if not tensors.is_eager():
        return None, asked[-1] and _any_requires_grad(arrays, initial_state)
    try:
        latest = _latest.get((asked, arrays[0].shape, initial_state is None, cu_seqlens is None))
        if latest is not None:
            are_alike, forward, training = latest
            if are_alike(*_present(arrays, initial_state, cu_seqlens)):
                return forward, training
    except (AttributeError, TypeError, RuntimeError):  # no dense array, or an option that cannot be one and has no hash
        pass
    training = asked[-1] and _any_requires_grad(arrays, initial_state)
    # What is kept was made with autocast off, which `_latest` sees and a signature does not.
    if isinstance(arrays[0], Tensor) and tensors.autocast_dtype(arrays[0]) is not None:
        return None, training
    try:
        return forwards.get((asked, training, tensors.signature((*arrays, initial_state, cu_seqlens)))), training
    except TypeError:
        return None, training


def find_or_keep(
    asked: tuple[Any, ...],
    training: bool,
    given: Sequence[Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    prepare: Callable[[], Forward],
) -> Forward:
    """Return the forward for tensors that have been checked: prepared and kept, where they come for the first time."""
    signature = asked, training, tensors.signature((*given, initial_state, cu_seqlens))
    known = forwards.get(signature)
    if known is None:
        known = forwards.keep(signature, prepare())
        are_alike = tensors.likeness(_present(given, initial_state, cu_seqlens))
        alike = asked, given[0].shape, initial_state is None, cu_seqlens is None
        _latest.keep(alike, (are_alike, known, training))
    return known


def _present(arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any) -> Sequence[Any]:
    if initial_state is None and cu_seqlens is None:
        return arrays
    return [x for x in (*arrays, initial_state, cu_seqlens) if x is not None]


def _any_requires_grad(given: Sequence[Any], initial_state: Any) -> bool:
    """Return whether one of these wants a gradient; arrays of other libraries never do."""
    try:
        for x in given:
            if x.requires_grad:
                return True
        return initial_state is not None and bool(initial_state.requires_grad)
    except AttributeError:
        return any([getattr(x, "requires_grad", False) for x in (*given, initial_state)])
