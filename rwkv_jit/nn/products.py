"""Products of tokens with the matrices of a layer: those of few rows by one launch of ours, others by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rwkv_jit.call import switches, tensors
from rwkv_jit.layers import products as of_layers
from rwkv_jit.layers.activate import activate
from rwkv_jit.layers.gated import gated
from rwkv_jit.nn.common import is_plain
from rwkv_jit.schedules.legal import Kind
from rwkv_jit.schedules.products import ROWS


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

    One launch makes those of one token of each of up to eight sequences, or of any number where bits may not depend on
    it: of 16 bits, on a GPU with tensor cores, without gradients, of linear layers that nobody has changed. All else is
    called one by one.
    """
    together = _together(several)
    return [_by_torch(each) for each in several] if together is None else of_layers.products(together)


def _together(several: Sequence[Product]) -> list[of_layers.Product] | None:
    """Return products as the kernel takes them, or None where it does not."""
    x = several[0].x
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype not in of_layers.DTYPES or not tensors.is_eager():
        return None
    if x.dim() > 2 and x.shape[-2] != 1:
        return None
    if x.numel() > ROWS * x.shape[-1] and not switches.is_batch_invariant():
        return None
    if tensors.autocast_dtype(x) not in (None, x.dtype) or not tensors.gpu(x.get_device()).has_tensor_cores:
        return None
    found: list[of_layers.Product] = []
    for own, matrix, bias, gate, add, function in several:
        if isinstance(matrix, Tensor):
            each = of_layers.Product(own, matrix, bias, gate, add, function, "deep")
        elif is_plain(matrix, nn.Linear):
            each = of_layers.Product(own, matrix.weight, matrix.bias, gate, add, function)
        else:
            return None
        if not each.weight.is_contiguous():  # it would be copied in every call
            return None
        of_each: list[Any] = [y for y in each[:5] if y is not None]
        if not tensors.are_plain(of_each) or any(y.dtype != x.dtype for y in of_each):
            return None
        found.append(each)
    return found


def _by_torch(given: Product) -> Tensor:
    """Return a product by calls of modules and functions, as compilers and gradients see them."""
    x, matrix, bias, gate, add, function = given
    if not isinstance(matrix, Tensor):
        y: Tensor = matrix(x)
    elif bias is not None and bias.dtype == x.dtype:
        y = nn.functional.linear(x, matrix.t(), bias)
    else:  # a bias of float32 is not rounded
        y = x @ matrix if bias is None else bias + x @ matrix
    y = y if function == "identity" else activate(y, function)
    y = y if gate is None else gated(y, gate)
    return y if add is None else add + y
