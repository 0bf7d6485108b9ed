"""Functions of tensors that run as lists on a GPU: what one does with tensors of a kind is noted once, and run again.

A list has the launches and matrix products of a function without its checks, beside which an op of an extension is
short. Where somebody looks on, or a list cannot repeat what a function does, the function itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import prepared, switches, tape, tensors
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.errors import printable

devices = {"cuda"}  # on others a function runs itself: what the host does matters on a GPU alone
Function = Callable[..., Sequence[Tensor]]


class Listed:
    """A function of tensors and other values without gradients, which returns new tensors, or one `is_alone`."""

    def __init__(self, function: Callable[..., Any], is_alone: bool):
        self._function, self._is_alone = function, is_alone

    def __call__(self, *values: Any) -> Any:
        """Return what the function does."""
        arrays = [x for x in values if isinstance(x, Tensor)]
        form = tuple([Tensor if isinstance(x, Tensor) else x for x in values])
        try:
            found = find((self, form), partial(self._of_arrays, form), arrays, False) if arrays else None
        except TypeError:  # of a value that has no hash: the function says what is wrong with it
            found = None
        if found is None:
            return self._function(*values)
        results, _ = found.forward(arrays)
        return results[0] if self._is_alone else [*results]

    def _of_arrays(self, form: Sequence[Any], *arrays: Tensor) -> Sequence[Tensor]:
        """Return the results of the function of values with these tensors among them."""
        rest = iter(arrays)
        results = self._function(*[next(rest) if x is Tensor else x for x in form])
        return [results] if self._is_alone else results


def find(
    key: tuple[Any, ...], function: Function, arrays: Sequence[Tensor], has_gradients: bool
) -> tape.Recorded | None:
    """Return the list of a function of arrays, with that of its gradients or without; None where it runs itself.

    `key` is all else that it depends on. The list keeps the function, which shall hold no tensor.
    """
    lead = arrays[0]
    if not tensors.is_eager() or lead.device.type not in devices:
        return None
    key = *key, has_gradients, switches.current()
    # Under checkpointing the same calls come in turn with tensors that want gradients and with those that do not.
    turn = *key, tuple([x.requires_grad for x in arrays])
    found: tape.Recorded | bool | None = prepared.latest(turn, arrays)
    # A check of likeness knows no tensor that is there twice.
    if found is None and len({*map(id, arrays)}) == len(arrays) and not (lead.is_cuda and tensors.capturing()):
        # Calls that take turns, as those of layers of which some are frozen, have come before too.
        modes = torch.is_inference_mode_enabled(), tensors.autocast_dtype(lead)
        signature = find, key, modes, tensors.signature(arrays)
        found = prepared.calls.get(signature)
        if found is None:
            found = prepared.calls.keep(signature, _noted(function, arrays, has_gradients) or False)
        prepared.keep_latest(turn, arrays, found)
    return found or None  # type: ignore[return-value]


def _noted(function: Function, arrays: Sequence[Tensor], has_gradients: bool) -> tape.Recorded | None:
    # Of integers a function may go by the values.
    if not tensors.are_plain(arrays) or not all(x.is_floating_point() for x in arrays):
        return None
    if has_gradients and torch.is_inference_mode_enabled():  # in which there are none
        return None
    leaves = [x.detach().requires_grad_(has_gradients) for x in arrays]
    try:
        with torch.set_grad_enabled(has_gradients):
            return tape.Recorded(function, leaves, "an op of an extension")
    except (tape.CannotRecord, torch.OutOfMemoryError) as error:
        stats.logger.info(printable(f"an op of an extension runs without a list: {error}"))
    except Exception:  # the function says what is wrong, as to those who call it
        pass
    return None
