"""A direction of a call as data: its launches by the names of their arguments, and the memory between them.

It follows from a `Problem` alone, without tensors, CUDA or torch: calls, fakes and those who compile ahead share it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rwkv_jit.kernels import kernel, template
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Argument, Parameter, Template
from rwkv_jit.schedules.problem import BYTES

Extent = tuple[Any, Any, Any]


class Stride(NamedTuple):
    """The stride of a dimension of an input, for a kernel that takes strides one by one."""

    name: str
    dim: str


class Step(NamedTuple):
    """One launch. An argument of the kernel takes the tensor, buffer or stride of its name, or what `bind` says.

    `bind` gives a name, a number, a tuple of numbers, a `Stride`, or None for a null pointer; other names do not
    matter.
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
    optional: tuple[str, ...] = ()  # arguments that may be null: what the kernel does not write then

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of the kernel, as its template declares them, else RwkvJitError."""
        source = self.source()
        declared = source.arguments(self.entry)
        if declared is None:
            raise RwkvJitError(f"{source.name}: there is no kernel {self.entry!r} whose arguments can be read")
        return declared

    def request(self, gpu: Gpu) -> kernel.Request:
        """Return the kernel to find or compile."""
        if self.arch is not None:
            return kernel.Request(self.source(), self.parameters, self.arch)
        return kernel.Request(self.source(), self.parameters, gpu.arch, gpu.compatible)

    def source(self) -> Template:
        """Return the template."""
        return template.library(self.template) if isinstance(self.template, str) else self.template


class Zero(NamedTuple):
    """Fill a buffer with zeros."""

    buffer: str


class Pause(NamedTuple):
    """Wait for whoever runs the schedule: it reads results, and fills tensors that the next steps read."""


Item = Step | Zero | Pause


class Result(NamedTuple):
    """A tensor that a direction returns."""

    shape: tuple[Any, ...]
    dtype: str


@dataclass(frozen=True)
class Schedule:
    """A direction of a call."""

    steps: tuple[Item, ...]  # the launches in their order
    results: Mapping[str, Result] = field(default_factory=dict)  # what the direction returns, by name
    # Bytes of what the forward leaves to the backward, in the order of memory. Where kernels read 16 bytes at once,
    # what lies before is a multiple of 16.
    kept: Mapping[str, Any] = field(default_factory=dict)
    scratch: Mapping[str, Any] = field(default_factory=dict)  # bytes of what passes from step to step
    # How many neighbouring elements of an input are read at once, where it is more than one.
    vectors: Mapping[str, int] = field(default_factory=dict)
    main: int = 0  # the step that does most of the work, which `specialize` compiles
    # The dimensions of buffers that kernels take strides of, by their letters; the buffers have no gaps.
    rows: Mapping[str, str] = field(default_factory=dict)
    dense: tuple[str, ...] = ()  # inputs that kernels read without gaps

    @property
    def launches(self) -> tuple[Step, ...]:
        """Return the steps that are kernels."""
        return tuple(step for step in self.steps if isinstance(step, Step))

    def written(self) -> set[Any]:
        """Return the names of what launches may write: what they take through pointers that are not const."""
        return {
            step.bind.get(argument.name, argument.name)
            for step in self.launches for argument in step.arguments()
            if argument.type.endswith("*") and not argument.is_read_alone
        }  # fmt: skip

    def requests(self, gpu: Gpu) -> list[kernel.Request]:
        """Return the kernels of all steps."""
        return [step.request(gpu) for step in self.launches]


def aligned(size: Any) -> int:
    """Return a size in bytes, rounded up so that what follows can be read 16 bytes at once."""
    return (size + 15) // 16 * 16  # type: ignore[no-any-return]


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


def renamed(steps: Sequence[Item], names: Mapping[str, Any]) -> list[Item]:
    """Return steps that take other tensors or buffers for some of theirs."""
    changed: list[Item] = []
    for step in steps:
        if isinstance(step, Zero):
            step = Zero(names.get(step.buffer, step.buffer))
        elif isinstance(step, Step):
            bound = {
                x: names.get(source, source) if isinstance(source, str) else source for x, source in step.bind.items()
            }
            idle_at = step.idle_at and (names.get(step.idle_at[0], step.idle_at[0]), step.idle_at[1])
            step = step._replace(bind={**names, **bound}, idle_at=idle_at)
        changed.append(step)
    return changed


# ---- what nobody wants -------------------------------------------------------------------------------------------


def without(schedule: Schedule, unwanted: Collection[str]) -> Schedule:
    """Return a schedule without some results, and without launches and buffers that serve these alone."""
    needed = {name for name in schedule.results if name not in unwanted}  # by a result, or by a launch that is left
    left: list[Item | None] = []
    for step in reversed(schedule.steps):
        if not isinstance(step, Step):
            left.append(step if isinstance(step, Pause) or step.buffer in needed else None)
            continue
        read, written = _pointers(step)
        if needed.isdisjoint(written.values()):
            left.append(None)
            continue
        spared = {argument: None for argument in step.optional if written.get(argument) not in needed}
        left.append(step._replace(bind={**step.bind, **spared}))
        # A launch may read what it writes, and leave parts of it as they are.
        needed.update(read.values(), (name for argument, name in written.items() if argument not in spared))
    left.reverse()
    in_vain = {name: result for name, result in schedule.results.items() if name in unwanted and name in needed}
    scratch = {name: size for name, size in schedule.scratch.items() if name in needed}
    scratch |= {name: math.prod(result.shape) * BYTES[result.dtype] for name, result in in_vain.items()}
    results = {name: result for name, result in schedule.results.items() if name not in unwanted}
    steps = _closed_up(schedule.steps, left)
    # What comes before the launch that does most of the work serves it.
    main = schedule.main if schedule.main < sum(isinstance(step, Step) for step in steps) else 0
    return replace(schedule, steps=steps, results=results, scratch=scratch, main=main)


def _pointers(step: Step) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a launch reads alone and what it may write, by its arguments."""
    read, written = dict[str, str](), dict[str, str]()
    for argument in step.arguments():
        source = step.bind.get(argument.name, argument.name)
        if argument.type.endswith("*") and source is not None:
            (read if argument.is_read_alone else written)[argument.name] = source
    return read, written


def _closed_up(steps: Sequence[Item], left: Sequence[Item | None]) -> tuple[Item, ...]:
    """Return the steps that are left, which wait for the other stream where those did that stood before them."""
    closed: list[Item] = []
    owing: set[bool] = set()  # the streams, the call's or the one beside it, on which the next launch has to wait
    for before, after in zip(steps, left, strict=True):
        if isinstance(after, Step):
            closed.append(after._replace(waits=after.waits or after.is_beside in owing))
            owing.discard(after.is_beside)
        elif after is not None:
            closed.append(after)
        elif isinstance(before, Step) and before.waits:
            owing.add(before.is_beside)
    return tuple(closed)
