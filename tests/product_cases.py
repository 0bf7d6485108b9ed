"""Products of a few rows with matrices, and the same in float64."""

import torch
from comparing import relative

from rwkv_jit.layers.products import Product, products
from rwkv_jit.plain import layers as plain

LIMITS = {torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of rounding the results


def make(dtype, rows, depth, width, layout="wide", function="identity", has=(), device="cpu"):
    """A product whose sums are about as large as what is added; x is made behind the weights."""
    weight = torch.randn((width, depth) if layout == "wide" else (depth, width), device=device) / depth**0.5
    weight, more = weight.to(dtype), {"bias": (width,), "gate": (rows, width), "add": (rows, width)}
    several = {x: torch.randn(more[x], device=device).to(dtype) for x in has}
    x = torch.randn(rows, depth, device=device).to(dtype)
    return Product(x, weight, **several, function=function, layout=layout)


def check(parts):
    """Return what one call makes, once it is compared."""
    with torch.no_grad():
        made = products(parts)
    for y, part in zip(made, parts, strict=True):
        (exact,) = plain.products([x if x is None else x.double() for x in part[:5]], 0.0, part[5:])
        assert y.shape == exact.shape
        assert relative(y, exact) < LIMITS[y.dtype]
    return made


def group(dtype, rows):
    """A group of both layouts, in which each function and each other thing stands; two parts share x."""
    parts = [
        make(dtype, rows, 192, 80), make(dtype, rows, 192, 40, "deep", "tanh"),
        make(dtype, rows, 136, 24, "wide", "relu_squared", ("bias",)),
        make(dtype, rows, 24, 100, "deep", "sigmoid", ("bias", "gate", "add")),
        make(dtype, rows, 8, 16, "wide", "silu", ("gate",)), make(dtype, rows, 192, 33, "wide", has=("add",)),
    ]  # fmt: skip
    return [*parts, make(dtype, rows, 192, 48)._replace(x=parts[-1].x)]
