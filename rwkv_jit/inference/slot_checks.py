"""Which slots of a pool the rows of a call have: what is checked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import env, tensors

_INDEX_TYPES = (torch.int32, torch.int64)


def check_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype], lead: Tensor) -> None:
    """Check the dtype of a tensor, and that it lies where `lead` does."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != lead.device:
        raise ValueError(f"{name}: expected device {lead.device}, got {x.device}")


def check_indices(name: str, given: Any, batch: int, lead: Tensor) -> Tensor | None:
    """Return slots of rows as a tensor; None without any."""
    if given is None:
        return None
    x = tensors.from_any(name, given)
    if tuple(x.shape) != (batch,):
        raise ValueError(f"{name}: expected shape [{batch}], a slot for each row, got {list(x.shape)}")
    check_dtype(name, x, _INDEX_TYPES, lead)
    return x


def check_slots(read: Tensor | None, written: Tensor | None, slots: int, null_index: int) -> None:
    """Check the values of indices where that costs nothing, on the CPU, or where the user has asked for it."""
    given = {"state_indices": read, "write_indices": written}
    present = {name: x for name, x in given.items() if x is not None}
    if not present or torch.compiler.is_compiling() or not tensors.are_plain(present.values()):
        return
    first = next(iter(present.values()))
    if first.is_cuda and (not env.checks_indices() or tensors.capturing()):
        return
    values = {name: x.tolist() for name, x in present.items()}
    for name, numbers in values.items():
        outside = [number for number in numbers if number > null_index and not 0 <= number < slots]
        if outside:
            raise ValueError(f"{name}: expected slots below {slots}, or up to {null_index} for none; got {outside[:8]}")
    places = [number for number in list(values.values())[-1] if number > null_index]
    if len(set(places)) < len(places):
        twice = sorted({place for place in places if places.count(place) > 1})
        raise ValueError(
            f"{list(values)[-1]}: expected another slot for each row that is written, got {twice[:8]} twice"
        )
