"""Products of a few rows with matrices, several in one launch: what a step of decode has between its other kernels.

It is for inference, and nobody outside of the package calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import products as schedules
from rwkv_jit.schedules.layer_table import MOST_PRODUCTS, PRODUCTS
from rwkv_jit.schedules.layers import Given
from rwkv_jit.schedules.products import FUNCTIONS, LAYOUTS, Layout

DTYPES = torch.float16, torch.bfloat16
_ABSENT = (None,) * 5  # the tensors of a part that a call does not have


class Product(NamedTuple):
    """y = function(x weight + bias) sigmoid(gate) + add, rounded once.

    x is [..., depth]; the weight is [width, depth] ("wide", as nn.Linear has it) or [depth, width] ("deep"); bias is
    [width], gate and add are [..., width].
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    gate: Tensor | None = None
    add: Tensor | None = None
    function: str = "identity"
    layout: Layout = "wide"


def products(parts: Sequence[Product]) -> list[Tensor]:
    """Return the y of up to eight products, by one launch; rows of all are as many, 16 bits each, without gradients.

    Weights are read once for eight rows, by tensor cores, and sums are float32. Bits of a row depend neither on other
    rows nor on their number. Weights may be read before the launch before has ended: what writes them may not be that
    one. Parameters are never written so.
    """
    inputs: list[Any] = []
    kinds: list[str] = []
    x = None
    for part in parts:
        inputs += (None if part.x is x else part.x), *part[1:5]
        kinds += part[5:]
        x = part.x
    return [*calls.call(KIND, (*inputs, *(_ABSENT * (MOST_PRODUCTS - len(parts)))), (), (tuple(kinds),))]


def _check(inputs: Sequence[Any], written: Sequence[Any], kinds: tuple[str, ...]) -> calls.Call:
    count = len(kinds) // 2
    if not 1 <= count <= MOST_PRODUCTS or len(kinds) % 2:
        raise ValueError(f"products: expected 1 to {MOST_PRODUCTS}, got {len(kinds) / 2:g}")
    lead = tensors.from_any("x0", inputs[0])
    if lead.dtype not in DTYPES and (lead.is_cuda or lead.dtype != torch.float32):
        raise TypeError(f"x0: expected {' or '.join(map(str, DTYPES))}, got {lead.dtype}")
    named: dict[str, Any] = dict.fromkeys(PRODUCTS.names)
    made: dict[str, tuple[int, ...]] = {}
    shared = lead
    for p in range(count):
        checks.check_name(f"function of {p}", kinds[2 * p], FUNCTIONS)
        checks.check_name(f"layout of {p}", kinds[2 * p + 1], LAYOUTS)
        own = dict(zip(("x", "weight", "bias", "gate", "add"), inputs[5 * p : 5 * p + 5], strict=True))
        tensor = {x: tensors.from_any(f"{x}{p}", y) for x, y in own.items() if y is not None or x == "weight"}
        weight = tensor["weight"]
        if weight.dim() != 2 or not weight.numel():
            raise ValueError(f"weight{p}: expected two dimensions, got {list(weight.shape)}")
        width, depth = weight.shape if kinds[2 * p + 1] == "wide" else weight.shape[::-1]
        made[f"y{p}"] = (*lead.shape[:-1], width)
        shapes = {"x": (*lead.shape[:-1], depth), "bias": (width,), "gate": made[f"y{p}"], "add": made[f"y{p}"]}
        shared = tensor.get("x", shared)  # with the product before
        arguments.check_shape(f"x{p}", shared, shapes["x"])
        for x, y in tensor.items():
            if x in shapes:
                arguments.check_shape(f"{x}{p}", y, shapes[x])
            arguments.check_dtype(f"{x}{p}", y, (lead.dtype,), lead)
            named[f"{x}{p}"] = y
    results = {name: shape for (name, shape), y in zip(made.items(), written, strict=False) if y is None}
    return calls.Call(KIND, [*named.values()], written, results, lead, kinds=kinds)


def _given(call: calls.Call) -> Given:
    """Return what schedules depend on: depth and width of each matrix."""
    named = dict(zip(PRODUCTS.names, call.inputs, strict=True))
    sizes: list[int] = []
    for p, layout in enumerate(call.kinds[1::2]):
        width, depth = named[f"weight{p}"].shape[:: 1 if layout == "wide" else -1]
        sizes += depth, width
    return common.given_of(call, prod(call.lead.shape[:-1]), tuple(sizes))


KIND = calls.define(calls.Kind(
    PRODUCTS, tuple(f"y{p}" for p in range(MOST_PRODUCTS)), _check, given=_given,
    forward=schedules.products, plain=plain.products, options=lambda eps, kinds: (tuple(kinds),), is_function=True,
))  # fmt: skip
