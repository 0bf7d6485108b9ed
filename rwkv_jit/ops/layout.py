"""How the memory of a call is laid out: addresses, strides, and the sizes of what kernels leave behind."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from rwkv_jit.ops.interface import Inputs, Options


def address(x: Tensor | None) -> int:
    """Return where a tensor begins; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def addresses(buffer: Tensor, sizes: Iterable[int]) -> list[int]:
    """Return where each of these begins in a buffer of floats."""
    found, begin = [], buffer.data_ptr()
    for size in sizes:
        found.append(begin)
        begin += 4 * size
    return found


def strides(x: Tensor) -> bytes:
    """Return those between sequences, tokens and heads, as a kernel takes them."""
    return struct.pack("3q", *x.stride()[:3])


def slots(inputs: Inputs, packed: bool, length: int) -> Any:
    """Return how many pieces of so many tokens there can be; packed sequences fit whatever their lengths are."""
    batch, tokens = inputs["v"].shape[:2]
    return tokens // length + inputs.sequences if packed else batch * ((tokens + length - 1) // length)


def state_shape(inputs: Inputs, options: Options) -> tuple[int, ...]:
    """Return the shape of a call's states."""
    heads, value_size = inputs["v"].shape[2:]
    head_size = inputs["r"].shape[3]
    sizes = (value_size, head_size) if options.state_layout == "vk" else (head_size, value_size)
    return (inputs.sequences, heads, *sizes)
