"""What modules share: checks of sizes, files of states, how matrices begin, last tokens, and what autocast does."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rwkv_jit import tensors
from rwkv_jit.inference.arguments import count

_State = TypeVar("_State", bound=type)


def in_files(state: _State) -> _State:
    """Let files of `torch.export` and of `torch.save` hold states of a type, which is a named tuple."""
    torch.serialization.add_safe_globals([state])
    pytree._register_namedtuple(state, serialized_type_name=f"rwkv_jit.nn.{state.__name__}")
    return state


def check_place(layer: int, layers: int) -> tuple[int, int]:
    """Return the place of a layer and how many there are, once both are checked."""
    if count("layer", layer) >= count("layers", layers, 1):
        raise ValueError(f"layer: expected less than the {layers} layers, got {layer}")
    return layer, layers


def check_heads(width: int, head_size: int) -> int:
    """Return how many heads of a size a width has, once both are checked."""
    if count("width", width, 1) % count("head_size", head_size, 1):
        raise ValueError(f"width: expected a multiple of the head size, {head_size}, got {width}")
    return width // head_size


def fill_orthogonal(matrix: Tensor, gain: float) -> None:
    """Fill a matrix with orthogonal rows or columns. A matrix of 16 bits is rounded from one of float32."""
    made = torch.empty_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32), requires_grad=False)
    nn.init.orthogonal_(made, gain)
    with torch.no_grad():
        matrix.copy_(made)


def under_autocast(x: Tensor) -> Tensor:
    """Return the input of a layer in the dtype of autocast: norms before it leave float32, twice the memory."""
    return x.to(dtype_under_autocast(x))


def dtype_under_autocast(x: Tensor) -> torch.dtype:
    """Return the dtype in which a layer takes what is normed of a residual: that of autocast, but for float64."""
    dtype = tensors.autocast_dtype(x)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype
