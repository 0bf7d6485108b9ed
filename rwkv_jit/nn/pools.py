"""Rows of a pool of states: which of them sequences read and write, and a step of a layer by a call of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.pool import arguments
from rwkv_jit.pool.state_pool import StatePool


def slots_of(
    pool: StatePool, names: Sequence[str], layers: int, slots: Any, like: Tensor, count: int
) -> Tensor | None:  # fmt: skip
    """Return the slots of so many sequences, once they and the pool of so many layers are checked."""
    if not isinstance(pool, StatePool):
        raise TypeError(f"pool: expected a StatePool, got {type(pool).__name__}")
    for name in names:
        if len(pool[name]) != layers:
            raise ValueError(f"pool: expected {name} of {layers} layers, got {len(pool[name])}")
    if slots is not None and not isinstance(slots, Tensor):
        slots = arguments.on_device(arguments.listed("slots", slots), like.device)
    rows = arguments.indices("slots", slots, count, like)
    if arguments.may_look_at([rows]):
        arguments.check_slots({"slots": rows}, len(pool), pool.reserved - 1)
    return rows


def step(block: Any, *given: Any) -> tuple[Tensor, ...]:
    """Return what `step` of a layer does, by a call of it for one token: hooks, adapters and wrappers are in that."""
    *between, states, slots, null_index = given
    arguments.check_room("pool", states[0], slots, len(between[0]))
    rows, written = rows_of(slots, null_index, len(between[0]))
    before = read(rows, states, between[0])
    *made, after = block(*(None if x is None else x.unsqueeze(1) for x in between), before)
    write(states, written, after)
    return tuple(x.squeeze(1) for x in made)


def rows_of(slots: Tensor | None, null_index: int, count: int, listed: Any = None) -> tuple[Any, Any]:
    """Return the rows of a pool that sequences read, and those that they write, with the sequences that do.

    `listed` are the slots where the host has them.
    """
    if slots is None:
        return slice(count), slice(count)
    rows = slots.long()
    if isinstance(listed, (list, tuple)):
        used = arguments.on_device([place for place, slot in enumerate(listed) if slot > null_index], rows.device)
    else:
        used = (rows > null_index).nonzero().squeeze(1)  # which waits for the GPU
    return rows.clamp(min=0), (rows[used], used)


def read(rows: Any, states: Any, like: Tensor) -> Any:
    """Return states of a layer, in dtypes that are no narrower than what is computed."""
    several = [x[rows].to(torch.promote_types(x.dtype, like.dtype)) for x in states]
    return states._make(several) if hasattr(states, "_make") else tuple(several)


def write(states: Any, written: Any, after: Any) -> None:
    """Write the states of a layer where they lie in a pool, by what `rows_of` returns."""
    rows, used = written if isinstance(written, tuple) else (written, slice(None))
    for x, y in zip(states, after, strict=True):
        x[rows] = y[used].to(x.dtype)
