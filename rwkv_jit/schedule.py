"""A direction of a call as data: its launches by the names of their arguments, and the memory between them.

A schedule is made from a `Problem` alone. It holds no tensors and needs neither CUDA nor torch, so that calls, fakes
and those who compile ahead of calls read the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rwkv_jit import kernel, template
from rwkv_jit.gpu import Gpu
from rwkv_jit.template import Parameter, Template

Extent = tuple[Any, Any, Any]


class Stride(NamedTuple):
    """The stride of a dimension of an input, for a kernel that takes strides one by one."""

    name: str
    dim: str


class Step(NamedTuple):
    """One launch. An argument of the kernel takes the tensor, buffer or stride of its own name, or what `bind` says.

    `bind` gives a name, a number, a tuple of numbers, a `Stride`, or None for a null pointer. Names that the kernel
    does not have do not matter.
    """

    template: str | Template
    entry: str
    parameters: Mapping[str, Parameter]
    grid: Extent
    bind: Mapping[str, Any] = {}
    arch: str | None = None  # where it is not the GPU's
    shared_bytes: int = 0  # dynamic ones of a block, where no parameter SHARED_BYTES says so
    segments: Any = 1  # as how many rows of the batch, side by side, a sequence is read
    # Blocks take one piece of work after another: no more of them than there is room for at once.
    is_resident: bool = False
    per_block: tuple[str, int] | None = None  # a buffer, and the bytes of it that each of them has
    is_beside: bool = False  # on the stream beside the call's
    waits: bool = False  # for what the other stream has so far
    overlaps: bool = False  # may begin beside the launch before it, for whose results it waits itself (overlap.cuh)
    # A buffer of int32 and a number: where none of them is smaller there is nothing to do. So a call need not wait
    # until the kernel is compiled.
    idle_at: tuple[str, Any] | None = None

    def request(self, gpu: Gpu) -> kernel.Request:
        """Return the kernel to find or compile."""
        source = template.library(self.template) if isinstance(self.template, str) else self.template
        if self.arch is not None:
            return kernel.Request(source, self.parameters, self.arch)
        return kernel.Request(source, self.parameters, gpu.arch, gpu.compatible)


class Zero(NamedTuple):
    """Fill a buffer with zeros."""

    buffer: str


class Result(NamedTuple):
    """A tensor that a direction returns."""

    shape: tuple[Any, ...]
    dtype: str


@dataclass(frozen=True)
class Schedule:
    """A direction of a call.

    Attributes
    ----------
    steps : tuple
        The launches in their order.
    results : mapping
        What the direction returns, by name.
    kept : mapping
        Bytes of what the forward leaves to the backward, in the order of memory. Where kernels read 16 bytes at once,
        what lies before is a multiple of 16.
    scratch : mapping
        Bytes of what passes from step to step.
    vectors : mapping
        How many neighbouring elements of an input are read at once, where it is more than one.
    main : int
        The step that does most of the work, which `specialize` compiles.
    rows : mapping
        Buffers that are an input (or dy) without gaps, by the name of the input.
    """

    steps: tuple[Step | Zero, ...]
    results: Mapping[str, Result] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    scratch: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    main: int = 0
    rows: Mapping[str, str] = field(default_factory=dict)

    @property
    def launches(self) -> tuple[Step, ...]:
        """Return the steps that are kernels."""
        return tuple(step for step in self.steps if isinstance(step, Step))

    def requests(self, gpu: Gpu) -> list[kernel.Request]:
        """Return the kernels of all steps."""
        return [step.request(gpu) for step in self.launches]


def aligned(size: Any) -> Any:
    """Return a size in bytes, rounded up so that what follows can be read 16 bytes at once."""
    return (size + 15) // 16 * 16


def offsets(sizes: Iterable[Any]) -> list[Any]:
    """Return where each of these begins, one behind the other."""
    begin, places = 0, []
    for size in sizes:
        places.append(begin)
        begin = begin + size
    return places


def floats(kept: Mapping[str, Any]) -> Any:
    """Return how many floats the forward keeps."""
    return sum(kept.values()) // 4


def renamed(steps: Sequence[Step | Zero], names: Mapping[str, Any]) -> list[Step | Zero]:
    """Return steps that take other tensors or buffers for some of theirs."""
    changed: list[Step | Zero] = []
    for step in steps:
        if isinstance(step, Zero):
            changed.append(Zero(names.get(step.buffer, step.buffer)))
            continue
        bound = {
            argument: names.get(source, source) if isinstance(source, str) else source
            for argument, source in step.bind.items()
        }
        idle_at = step.idle_at and (names.get(step.idle_at[0], step.idle_at[0]), step.idle_at[1])
        changed.append(step._replace(bind={**names, **bound}, idle_at=idle_at))
    return changed
