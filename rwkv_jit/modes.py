"""Switches of a process that calls go by: of products, torch's for float32 and one for bfloat16; and of batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

_PRECISIONS = "medium", "high"


class Modes(NamedTuple):
    """The switches that are ours."""

    bfloat16_precision: str = "medium"
    is_batch_invariant: bool = False


# What tells calls apart, beside what products of float32 numbers on a GPU are made of. There are two switches for that:
# the older one sets the newer one too, and refuses to answer where both were used.
own = Modes()
products_of_float32: Callable[[], str] = (
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(torch._C, "_get_fp32_precision_getter")
    else torch._C._get_float32_matmul_precision
)
_FAST = "tf32", "high", "medium"  # what these answer where torch allows fewer digits


def set_bfloat16_precision(precision: str) -> None:
    """Say how exact the tensor cores are on bfloat16 tensors, in the words of `torch.set_float32_matmul_precision`.

    With "medium" products are made of bfloat16 numbers, with 8 bits, and y and gradients are 2 to 5e-3 off. With "high"
    they are made of float16 numbers, with 11 bits, and the error is that of rounding the results to bfloat16, 1.7e-3.
    That takes 1.5 to 2.5 times as long, and float16 copies of the rows are kept for the backward. Tensors are scaled by
    powers of two, so that the range of float16 does not matter where sums stay within 2^16 of the largest terms.

    Parameters
    ----------
    precision : {"medium", "high"}
        "medium" by default. It holds for all threads, and for heads and lengths that the tensor cores take. What
        `torch.compile` has traced before stays as it was.

    Raises
    ------
    ValueError
        `precision` is neither.
    """
    global own
    if precision not in _PRECISIONS:
        raise ValueError(f"precision: expected 'medium' or 'high', got {precision!r}")
    own = own._replace(bfloat16_precision=precision)


def get_bfloat16_precision() -> str:
    """Return "medium" or "high": see `set_bfloat16_precision`."""
    return own.bfloat16_precision


def set_batch_invariant(enabled: bool) -> None:
    """Make results the same bit for bit whatever else is in the batch, or let calls be as fast as they can.

    While it is on, the y, the final state and the gradients of a sequence do not depend on the number of sequences, on
    their order and lengths, nor on whether `cu_seqlens` packs them. That leaves out gradients of what all sequences
    share, which are sums: u, w of wkv5, wkv4 and timex, an initial state without a batch.

    "auto" chooses kernels and their geometry as for many long sequences: short ones take longer, and few heads leave a
    part of the GPU idle. float32 is exact and bfloat16 is
    not, whatever the switches of precision say. Results still differ between GPUs, dtypes and
    chunk lengths, and with gradients and without. What the sums of timex's backend "fft" go by is up to torch.

    Parameters
    ----------
    enabled : bool
        Off by default. It holds for all threads. What `torch.compile` has traced before stays as it was.

    Raises
    ------
    TypeError
        `enabled` is not a bool.
    """
    global own
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {enabled!r}")
    own = own._replace(is_batch_invariant=enabled)


def is_batch_invariant() -> bool:
    """Return whether results do not depend on the batch: see `set_batch_invariant`."""
    return own.is_batch_invariant


def storage_of_products(storage: str) -> str:
    """Return the type of operands on the tensor cores, by that of the rows."""
    return "fp16" if storage in _narrow_types() else storage


def _narrow_types() -> tuple[str, ...]:
    """Return the types of rows that the tensor cores take as float16."""
    if own.is_batch_invariant:  # the scales of such rows are those of the whole batch
        return ()
    float32 = ("fp32",) if products_of_float32() in _FAST else ()
    return (*float32, "bf16") if own.bfloat16_precision == "high" else float32


# As `tensors.arch`: a trace takes the answer, and does not go into how it is found.
is_batch_invariant._dynamo_marked_constant = _narrow_types._dynamo_marked_constant = True  # type: ignore[attr-defined]
