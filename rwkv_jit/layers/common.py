"""What the small ops of layers check of their inputs, and how these are described to schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import checks, sharding, tensors
from rwkv_jit.layers.calls import Call
from rwkv_jit.pool import arguments
from rwkv_jit.schedules.layer_table import MOST_MIXES, OPS
from rwkv_jit.schedules.layers import Given, Sequences

# ---- checks ------------------------------------------------------------------------------------------------------


def as_tensors(op: str, arrays: Sequence[Any]) -> list[Any]:
    """Return the inputs as tensors, those that are there."""
    names = OPS[op].inputs
    return [None if x is None else tensors.from_any(name, x) for name, x in zip(names, arrays, strict=True)]


def dtypes_of(lead: Tensor) -> list[torch.dtype]:
    """Return the dtypes that inputs and pools may have, by where they are."""
    return [*tensors.STORAGE] if lead.is_cuda else [*tensors.STORAGE, torch.float64]


def check_lead(name: str, x: Tensor) -> None:
    """Check the input that the others are compared with."""
    dtypes = dtypes_of(x)
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")


def check(op: str, name: str, x: Tensor | None, shapes: Sequence[tuple[int, ...]], lead: Tensor) -> None:
    """Check an input that may have any of these shapes."""
    if x is None:
        raise TypeError(f"{name}: expected a torch.Tensor or an array with __dlpack__, got NoneType")
    arguments.check_shape(name, x, *shapes)
    may_be_float32 = name in OPS[op].wide and lead.dtype != torch.float32
    arguments.check_dtype(name, x, (lead.dtype, torch.float32) if may_be_float32 else (lead.dtype,), lead)


def check_heads(op: str, named: dict[str, Any], needed: Sequence[str]) -> Tensor:
    """Check the inputs of an op over heads, and return the first one, which says their sizes."""
    lead_name = next(iter(named))
    lead: Tensor | None = named[lead_name]
    if lead is None or lead.dim() < 2 or not lead.shape[-1]:
        got = None if lead is None else list(lead.shape)
        raise ValueError(f"{lead_name}: expected shape [..., heads, head size], got {got}")
    check_lead(lead_name, lead)
    for name, dims in OPS[op].inputs.items():
        if named[name] is not None or name in needed:
            own = tuple(lead.shape if "N" in dims else lead.shape[-2:])
            check(op, name, named[name], [own, (*own[:-2], own[-2] * own[-1])], lead)
    return lead


def check_shifted(op: str, x: Any, mixes: Any, cu_seqlens: Any) -> tuple[Any, int]:
    """Check what ops have that mix tokens with those before them, and return the bounds and the number of sequences."""
    if x is None or x.dim() != 3 or not x.shape[-1]:
        got = None if x is None else list(x.shape)
        raise ValueError(f"x: expected shape [batch, tokens, channels], got {got}")
    check_lead("x", x)
    channels = x.shape[-1]
    if mixes is None or mixes.shape not in [(count, channels) for count in range(1, MOST_MIXES + 1)]:
        got = None if mixes is None else list(mixes.shape)
        raise ValueError(f"mixes: expected shape [1 to {MOST_MIXES}, {channels}], got {got}")
    check(op, "mixes", mixes, [tuple(mixes.shape)], x)
    return packing_of(cu_seqlens, x)


def packing_of(cu_seqlens: Any, x: Tensor) -> tuple[Any, int]:
    """Check the bounds of packed sequences [batch, tokens, channels], and return these and how many there are."""
    if cu_seqlens is None:
        return None, x.shape[0]
    cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
    checks.check_packing(cu_seqlens, x)
    if tensors.is_eager() and tensors.are_plain([cu_seqlens]):
        cu_seqlens = tensors.packing(cu_seqlens, x.shape[1])
    return cu_seqlens, cu_seqlens.shape[0] - 1


# ---- descriptions ------------------------------------------------------------------------------------------------


def given_of_mixes(call: Call) -> Given:
    """Return what schedules depend on, of inputs with mixes [M, C] or [C]."""
    x, mixes = call.inputs[0], call.inputs[call.kind.op.names.index("mixes")]
    channels = x.shape[-1]
    return given_of(call, x.numel() // channels, (channels, mixes.numel() // channels))


def given_of_heads(call: Call) -> Given:
    """Return what schedules depend on, of inputs with heads, [..., H, N]."""
    *_, heads, head_size = sizes = call.inputs[0].shape
    return given_of(call, sizes.numel() // (heads * head_size), (heads, head_size))


def given_of(call: Call, rows: int, sizes: tuple[int, ...]) -> Given:
    """Return what schedules depend on."""
    named = zip(call.kind.op.names, call.inputs, strict=False)
    types = {name: tensors.STORAGE[x.dtype] for name, x in named if x is not None}
    return Given(tensors.gpu(call.inputs[0].device.index), types, rows, sizes)


def with_pool(given: Given, name: str, pool: Tensor) -> Given:
    """Return the same of a call over a pool, whose slots have to be as far apart as addresses are."""
    step = 16 | (pool.stride(0) * pool.element_size() if pool.shape[0] > 1 else 0)
    return given._replace(types={**given.types, name: tensors.STORAGE[pool.dtype]}, alignment=step & -step)


PACKED_AND_NOT = tuple(Sequences(1, bound_bytes=count) for count in (0, 4, 8))


def sequences_of(call: Call) -> Sequences:
    """Return the sequences of an op whose first input is x and whose last one cu_seqlens."""
    x, cu_seqlens = call.inputs[0], call.inputs[-1]
    if cu_seqlens is None:
        return Sequences(*x.shape[:2])
    return Sequences(cu_seqlens.shape[0] - 1, bound_bytes=cu_seqlens.element_size())


def rows_of(call: Call, indices: Tensor | None, cu_seqlens: Tensor | None = None) -> Sequences:
    """Return the rows [rows, channels] or [rows, tokens, channels] of a call over a pool, or its packed sequences."""
    x, pool = call.inputs[0], call.written[0]
    slots, index_bytes = pool.shape[0], 4 if indices is None else indices.element_size()
    if cu_seqlens is None:
        cut = x.shape[0], x.shape[1] if x.dim() == 3 else 1, 0
    else:
        cut = cu_seqlens.shape[0] - 1, 1, cu_seqlens.element_size()
    return Sequences(*cut, slots, pool.stride(0) if slots > 1 else 0, index_bytes, call.null_index)


# ---- DTensors: which dimensions ranks may share ------------------------------------------------------------------

Roles = dict[str, dict[str, int]]


def roles_of_heads(named: Mapping[str, Any], dims: Mapping[str, str]) -> Roles:
    """Return them for inputs with heads."""
    count = next(iter(named.values())).dim()
    of_rows = {"batch": 0, "heads": count - 2} if count > 2 else {"heads": 0}
    return {name: of_rows if "N" in letters else {"heads": 0} for name, letters in dims.items()}


def roles_of_sequences(named: Mapping[str, Any], dims: Mapping[str, str]) -> Roles:
    """Return them for inputs of these dimensions, which may be packed."""
    roles = {name: sharding.roles(letters) for name, letters in dims.items()}
    if named["cu_seqlens"] is not None:
        for each in roles.values():
            each.pop("batch", None)
    return roles


def count_of_mixes(named: Mapping[str, Any]) -> int:
    """Return the number of mixes."""
    mixes = named["mixes"]
    return int(mixes.shape[0]) if isinstance(mixes, Tensor) and mixes.dim() else 1
