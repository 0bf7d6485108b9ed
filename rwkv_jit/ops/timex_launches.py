"""Launches of timex's kernels: prepared once for each signature of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rwkv_jit import kernel
from rwkv_jit.launch import Plan
from rwkv_jit.ops import prepared
from rwkv_jit.signatures import BySignature

# What else a call's first use compiles, from its w and k: the kernels of the backward.
Beside = Callable[[Tensor, Tensor], list[kernel.Request]]


class Launches(NamedTuple):
    """Launches of one signature, one after the other."""

    plans: tuple[Plan, ...]
    scratch: int = 0  # floats
    groups: int = 1  # of rows, each with a sum of its own


_known: BySignature[Launches] = BySignature()


def neighbours(x: Tensor) -> Tensor:
    """Return `x`, or a copy where its tokens are not neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def are_together(count: int, *arrays: Tensor) -> bool:
    """Return whether a thread can read so many tokens of these [.., T] tensors at once."""
    return not any(
        x.data_ptr() % (count * x.element_size()) or any(n % count for n in (x.shape[-1], *x.stride()[:-1]))
        for x in arrays
    )


def known(key: tuple[Any, ...], prepare: Callable[[], Launches]) -> Launches:
    """Return the launches of a signature, prepared if it is new."""
    found = _known.get(key)
    if found is None:
        kernel.check_not_forked()
        found = _known.keep(key, prepare())
    return found


def load(wanted: Sequence[kernel.Request], device: int) -> kernel.Kernel:
    """Return the first of these kernels; the others compile beside it.

    Raises
    ------
    RwkvJitError
        One is new, inside a CUDA graph capture.
    """
    prepared.check_capture("timex", wanted, device)
    first, *others = wanted
    return kernel.get_all([first, *[each for each in others if each != first]])[0]
