"""Rows of channels, (B, T, C), cut into the heads that the ops take."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from rwkv_jit.call import checks, tensors


def by_size(size: Any, **rows: Any) -> list[Tensor]:
    """Return rows (B, T, C) as (B, T, C / size, size).

    Raises TypeError, ValueError that names the row, what was expected and what came.
    """
    checks.check_count("HEAD_SIZE", size)
    given = _tensors(rows)
    first, lead = next(iter(given.items()))
    if lead.dim() != 3 or lead.shape[-1] % size:
        raise ValueError(f"{first}: expected shape [B, T, C] with heads of {size} channels, got {list(lead.shape)}")
    for name, x in given.items():
        if x.shape != lead.shape:
            raise ValueError(f"{name}: expected shape {list(lead.shape)} like {first}, got {list(x.shape)}")
    return [x.unflatten(-1, (lead.shape[-1] // size, size)) for x in given.values()]


def by_state(state: Any, name: str, **rows: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the state (B, H, N, N) of a name, and rows (B, T, H N) as (B, T, H, N)."""
    state = tensors.from_any(name, state)
    if state.dim() != 4 or state.shape[2] != state.shape[3]:
        raise ValueError(f"{name}: expected shape [B, H, N, N], got {list(state.shape)}")
    given = by_size(state.shape[-1], **rows)
    batch, _, heads, _ = given[0].shape
    if state.shape[:2] != (batch, heads):
        raise ValueError(
            f"{name}: expected {batch} states of {heads} heads like {next(iter(rows))}, got shape {list(state.shape)}"
        )
    return state, given


def by_shape(shape: tuple[int, ...], **rows: Any) -> list[Tensor]:
    """Return tensors in a shape that the other arguments of a call say.

    Raises ValueError where a tensor has another number of elements.
    """
    given, count = _tensors(rows), math.prod(shape)
    for name, x in given.items():
        if x.numel() != count:
            raise ValueError(
                f"{name}: expected {count} elements, {' x '.join(map(str, shape))} by the other arguments, "
                f"got shape {list(x.shape)}"
            )
    return [x.reshape(shape) for x in given.values()]


def of_batch_1(**arrays: Any) -> list[Tensor]:
    """Return tensors of no batch with one of 1 before their dimensions; TypeError where one is no tensor."""
    return [x[None] for x in _tensors(arrays).values()]


def head_size(channels: int, heads: int) -> int:
    """Return C / H.

    Raises ValueError where H does not divide C.
    """
    if heads < 1 or channels % heads:
        raise ValueError(f"H: expected heads that divide the {channels} channels, got {heads}")
    return channels // heads


def _tensors(rows: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensors.from_any(name, x) for name, x in rows.items()}
