"""Products of tokens with the matrices of a layer: those of few rows by one launch of ours, others by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rwkv_jit.call import switches, tape, tensors
from rwkv_jit.layers import products as of_layers
from rwkv_jit.layers.activate import activate
from rwkv_jit.layers.gated import gated
from rwkv_jit.nn.common import is_plain
from rwkv_jit.schedules.legal import Kind
from rwkv_jit.schedules.products import LOW_RANK, ROWS

_MOST_ROWS = 1024  # of low-rank products


class Product(NamedTuple):
    """y = function(x matrix + bias) sigmoid(gate) + add, of a linear layer or a matrix [depth, width]."""

    x: Tensor
    matrix: Any  # an nn.Linear, or what stands for one, or a tensor
    bias: Tensor | None = None  # of a matrix
    gate: Tensor | None = None
    add: Tensor | None = None
    function: Kind = "identity"


def products(*several: Product) -> list[Tensor]:
    """Return products.

    One launch makes those of up to 32 tokens in all, low-rank ones of more, and those of one token of each of any
    number of sequences where bits may not depend on it: of 16 bits, on a GPU with tensor cores, without gradients, of
    linear layers that nobody has changed. All else is called one by one.
    """
    together = _together(several)
    own = [each for each in together if each is not None]
    made = iter(of_layers.products(own) if own else ())
    return [_by_torch(each) if ours is None else next(made) for each, ours in zip(several, together, strict=True)]


def _together(several: Sequence[Product]) -> list[of_layers.Product | None]:
    """Return products as the kernel takes them, and None for those that it does not."""
    x = several[0].x
    is_invariant, has_one_token = switches.is_batch_invariant(), x.dim() <= 2 or x.shape[-2] == 1
    if (
        torch.is_grad_enabled() or not x.is_cuda or x.dtype not in of_layers.DTYPES
        or not (tensors.is_eager() or tape.is_recording()) or (is_invariant and not has_one_token)
        or tensors.autocast_dtype(x) not in (None, x.dtype) or not tensors.gpu(x.get_device()).has_tensor_cores
    ):  # fmt: skip
        return [None] * len(several)
    rows = 0 if is_invariant else x.numel() // max(x.shape[-1], 1)
    return [_taken(each, x.dtype, rows) for each in several]


def _taken(given: Product, dtype: torch.dtype, rows: int) -> of_layers.Product | None:
    own, matrix, bias, gate, add, function = given
    if isinstance(matrix, Tensor):
        each = of_layers.Product(own, matrix, bias, gate, add, function, "deep")
    elif is_plain(matrix, nn.Linear):
        each = of_layers.Product(own, matrix.weight, matrix.bias, gate, add, function)
    else:
        return None
    weight, of_each = each.weight, [x for x in each[:5] if x is not None]
    if rows > ROWS and (rows > _MOST_ROWS or min(weight.shape) > LOW_RANK):
        return None
    if not weight.is_contiguous():  # it would be copied in every call
        return None
    return each if tensors.are_plain(of_each) and all(x.dtype == dtype for x in of_each) else None


def _by_torch(given: Product) -> Tensor:
    """Return a product by calls of modules and functions, as compilers and gradients see them."""
    x, matrix, bias, gate, add, function = given
    if add is not None and gate is None and function == "identity" and _adds_within(x, matrix, add):
        own = torch.addmm(add.reshape(-1, add.shape[-1]), x.reshape(-1, x.shape[-1]), matrix.weight.t())
        return own.view(add.shape)
    if not isinstance(matrix, Tensor):
        y: Tensor = matrix(x)
    elif bias is not None and bias.dtype == x.dtype:
        y = nn.functional.linear(x, matrix.t(), bias)
    else:  # a bias of float32 is not rounded
        y = x @ matrix if bias is None else bias + x @ matrix
    y = y if function == "identity" else activate(y, function)
    y = y if gate is None else gated(y, gate)
    return y if add is None else add + y


def _adds_within(x: Tensor, matrix: Any, add: Tensor) -> bool:
    """Return whether torch adds something to a product before that is rounded, by one kernel."""
    if isinstance(matrix, Tensor) or not is_plain(matrix, nn.Linear) or matrix.bias is not None:
        return False
    is_alike = x.dtype == add.dtype == matrix.weight.dtype and tensors.autocast_dtype(x) is None
    return is_alike and tensors.are_plain([x, matrix.weight, add])
