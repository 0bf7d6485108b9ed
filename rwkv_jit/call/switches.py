"""Switches of a process that calls read: of products, torch's for float32 and one for bfloat16; and of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch

from rwkv_jit.schedules.legal import Precision

# What a call goes by: the types of rows that the tensor cores take as float16, and whether results may not depend on
# the batch. A call looks at it once, as another thread may change it meanwhile.
Modes = tuple[tuple[str, ...], bool]
USUAL: Modes = (), False
HIGH: Modes = ("fp32", "bf16"), False  # both switches of precision at "high"

# There are two switches for products of float32 numbers on a GPU: the older one sets the newer one too, and refuses to
# answer where both were used.
products_of_float32: Callable[[], str] = (
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(torch._C, "_get_fp32_precision_getter")
    else torch._C._get_float32_matmul_precision
)
_FAST = "tf32", "high", "medium"  # what these answer where torch allows fewer digits

_bfloat16_precision: Precision = "medium"
_exact: Modes = USUAL  # where torch wants all digits of float32 products
_fast: Modes = ("fp32",), False  # where it does not


def current() -> Modes:
    """Return the switches of a call that begins now."""
    return _fast if products_of_float32() in _FAST else _exact


# As `tensors.arch`: a trace takes the answer, which has to be plain, and does not go into how it is found.
current._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def at(modes: Modes) -> Iterator[None]:
    """Run all calls with these switches."""
    global _exact, _fast
    before = _exact, _fast
    _exact = _fast = modes
    try:
        yield
    finally:
        _exact, _fast = before


def _set(precision: Precision, is_batch_invariant: bool) -> None:
    global _bfloat16_precision, _exact, _fast
    narrow: tuple[str, ...] = ("bf16",) if precision == "high" else ()
    several: tuple[Modes, Modes] = (narrow, False), (("fp32", *narrow), False)
    if is_batch_invariant:  # the scales of narrow rows are those of the whole batch
        several = (((), True),) * 2
    _bfloat16_precision, (_exact, _fast) = precision, several


def set_bfloat16_precision(precision: Precision) -> None:
    """Set the precision of bfloat16 tensors on the tensor cores, like `torch.set_float32_matmul_precision`.

    With "medium" products have bfloat16 factors, with 8 bits, and y and gradients are 2 to 5e-3 off. With "high" they
    have float16 factors, with 11 bits, and the error is that of rounding the results to bfloat16, 1.7e-3. With
    gradients that takes 2 to 3 times as long, forward alone up to 4 times, and float16 copies of the rows are kept for
    the backward. Tensors are scaled by powers of two, so that the range of float16 does not matter if sums stay within
    2^16 of the largest terms.

    Parameters
    ----------
    precision : {"medium", "high"}
        "medium" by default. It applies to all threads, and to calls on the tensor cores; `set_batch_invariant`
        overrides it. Code that `torch.compile` and `torch.export` have traced before does not change.

    Raises
    ------
    ValueError
        `precision` is neither.

    Examples
    --------
    >>> rwkv_jit.set_bfloat16_precision("high")
    >>> rwkv_jit.get_bfloat16_precision()
    'high'
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision: expected 'medium' or 'high', got {precision!r}")
    _set(precision, is_batch_invariant())


def get_bfloat16_precision() -> Precision:
    """Return how exact the tensor cores are on bfloat16 tensors.

    Returns
    -------
    str
        As `set_bfloat16_precision` has it.
    """
    return _bfloat16_precision


def set_batch_invariant(enabled: bool) -> None:
    """Give results the same bits whatever else is in the batch, or let calls be as fast as possible.

    While it is on, the y, the final state and the gradients of a sequence do not depend on the number of sequences, on
    their order and lengths, nor on whether `cu_seqlens` packs them. This excludes gradients of inputs that all
    sequences share, which are sums: u, w of wkv5, wkv4 and timex, an initial state without a batch.

    "auto" chooses kernels and their geometry as for many long sequences: short ones take longer, and few heads leave a
    part of the GPU idle. float32 goes token by token, and products of bfloat16 rows have bfloat16 factors, whatever the
    switches of precision say. Results still differ between GPUs, dtypes and chunk lengths, and with gradients and
    without. torch decides what the sums of timex's backend "fft" depend on.

    Parameters
    ----------
    enabled : bool
        Off by default. It applies to all threads. Code that `torch.compile` and `torch.export` have traced before does
        not change, except for timex, which reads the switch whenever it runs.

    Raises
    ------
    TypeError
        `enabled` is not a bool.

    Examples
    --------
    >>> rwkv_jit.set_batch_invariant(True)
    >>> rwkv_jit.is_batch_invariant()
    True
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {enabled!r}")
    _set(_bfloat16_precision, enabled)


def is_batch_invariant() -> bool:
    """Return whether results are the same whatever else is in the batch.

    Returns
    -------
    bool
        As `set_batch_invariant` has it.
    """
    return _exact[1]


is_batch_invariant._dynamo_marked_constant = True  # type: ignore[attr-defined]
