"""What modules share: checks of sizes, files of states, how matrices begin, last tokens, and what autocast does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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


# ---- parts of sequences, of which other processes have the others ------------------------------------------------


def before_texts(
    x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, shard: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x, the token before each of its texts, and where these end: of a part, where there is a shard."""
    if shard is None:
        return x, first, cu_seqlens
    from rwkv_jit.parallel import shifting

    bounds = bounds_of(x, cu_seqlens, shard)
    x, last = shifting.with_last(x)
    return x, shifting.token_before(last, shard, first), bounds


def normed_before_texts(
    x: Tensor, add: Tensor | None, norm: nn.LayerNorm, first: Tensor | None, shard: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return x, what is added to it, and the token before each text of a part as `norm_shift` takes it: normed."""
    from rwkv_jit.parallel import shifting

    x, last = shifting.with_last(x)
    if add is not None:
        add, last_added = shifting.with_last(add)
        last = last + last_added
    normed = nn.functional.layer_norm(last, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return x, add, shifting.token_before(normed.to(dtype_under_autocast(x)), shard, first)


def bounds_of(x: Tensor, cu_seqlens: Tensor | None, shard: Any) -> Tensor | None:
    """Return where packed texts end: of a part, where there is a shard."""
    if shard is None:
        return cu_seqlens
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected none beside a shard, which has the bounds of all parts")
    shard.check("x", x)
    return None if shard.bounds is None else shard.cu_seqlens(x.device)


def recur(
    op: Callable[..., tuple[Tensor, Tensor | None]], inputs: Sequence[Tensor], state: Tensor | None,
    cu_seqlens: Tensor | None, shard: Any, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y of a recurrence and the states behind all texts: of a part, where there is a shard."""
    if shard is None:
        y, final = op(*inputs, state, True, cu_seqlens, **options)
    else:
        from rwkv_jit.parallel import recurrences

        y, final = getattr(recurrences, op.__name__)(*inputs, shard, state, True, **options)
    assert final is not None
    return y, final
