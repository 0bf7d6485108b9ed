"""A schedule bound to tensors: what the first call of a signature works out, and every later one runs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.kernels import cuda, env, kernel
from rwkv_jit.kernels.errors import CompileError, RwkvJitError
from rwkv_jit.kernels.launch import LETTERS, Launch, Launches, Value, Zeros, picker
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.kernels.template import Argument
from rwkv_jit.schedules import build_command
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Pause, Schedule, Step, Stride, aligned, offsets

DTYPES = {name: dtype for dtype, name in tensors.STORAGE.items()}
_address = torch.Tensor.data_ptr
# The dimensions that kernels take strides of, by the type of the argument. Key heads stand in the place of heads.
_STRIDES = {"Strides": ("B", "T", "HG"), "DecayStrides": ("B", "T", "HG"), "RowStrides": ("B", "T")}


_watch = threading.local()
_watching: list[bool] = []  # one for each thread's list that is filled now


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Plan, Sequence[Tensor | None], list[Tensor]]]]:
    """Give a list that gets each plan that this thread runs meanwhile, with its arrays and its results."""
    before, _watch.runs = getattr(_watch, "runs", None), list[Any]()
    _watching.append(True)
    try:
        yield _watch.runs
    finally:
        _watching.pop()
        _watch.runs = before


class _Later:
    """A launch whose kernel still compiles, and that has nothing to do in most calls.

    Until it is there each call looks whether it is needed, which waits for the GPU. Graphs have to have it.
    """

    def __init__(
        self, made: Future[kernel.Kernel], bind: Callable[[kernel.Kernel], Launch],
        arguments: Sequence[tuple[str, Any]], place: int, count: int, least: int,
    ):  # fmt: skip
        self._made, self._bind = made, bind
        self.arguments = (*arguments, ("Q", Value(place)))  # of the integers that say so
        self._count, self._least = count, least
        self.replace: Callable[[Launch], None]  # puts the launch in the place of this

    def prepared(self, addresses: Sequence[int], stream: int) -> tuple[Callable[[], Any], Any]:
        """Return what launches it if it is needed."""
        return partial(self._launch, addresses, stream), None

    def _launch(self, addresses: Sequence[int], stream: int) -> Any:
        if not self._made.done() and not tensors.capturing():
            counts = cuda.read_integers(ctypes.c_uint64.from_address(addresses[-1]).value, self._count, stream)
            if all(count >= self._least for count in counts):
                return 0
        launch = self._bind(self._made.result())
        self.replace(launch)
        run, _kept = launch.prepared(addresses[:-1], stream)
        return run()


class Plan:
    """A direction of a call, ready to be run with any tensors of a signature.

    `arrays` are the tensors by name, in the order in which `run` takes them, None for those that are not there; what
    the forward kept is one of floats, "saved", with the bytes of its buffers in `kept`. Kernels that will be needed
    `soon` compile beside those of the schedule. `copies` are the places of tensors that every run copies, by default
    those that kernels cannot read in place, as the tensors here show: of a pool, pass one slot, which has no gaps.
    """

    def __init__(
        self, schedule: Schedule, problem: Problem, arrays: Mapping[str, Tensor | None],
        kept: Mapping[str, int] | None = None, soon: Sequence[kernel.Request] = (), copies: Sequence[int] | None = None,
    ):  # fmt: skip
        kernel.check_not_forked()
        self._schedule, self.problem, self._kept = schedule, problem, kept or {}
        self._names = tuple(arrays)
        self.device = next(x for x in arrays.values() if x is not None).device
        self.index: int = self.device.index
        self._dims = {**problem.op.inputs, "dy": problem.op.output}
        segments = max((step.segments for step in schedule.launches), default=1)
        inputs = [(i, name, x) for i, (name, x) in enumerate(arrays.items()) if x is not None and name in self._dims]
        vectors = {name: schedule.vectors.get(name, 1) for name in self._dims}
        if copies is None:
            copies = [
                index for index, (name, x) in enumerate(arrays.items())
                if x is not None and (
                    _needs_copy(x, self._dims.get(name, ""), vectors.get(name, 1), segments)
                    or (name in schedule.dense and not x.is_contiguous())
                )
            ]  # fmt: skip
        self._copies = tuple(copies)
        written = schedule.written()
        self._written = {index for index, name in enumerate(self._names) if name in written}
        # What addresses must be multiples of, and the largest of that: of inputs, and of what a caller wants written.
        placed = [(i, name, x) for i, (name, x) in enumerate(arrays.items()) if x is not None]
        placed = [each for each in placed if each[1] in self._dims or each[1] in schedule.vectors]
        self._alignments = tuple((i, tensors.alignment(x, schedule.vectors.get(name, 1))) for i, name, x in placed)
        self._shapes = {i: x.shape for i, _, x in placed}
        self._alignment = max((multiple for _, multiple in self._alignments), default=1)
        there = [i for i, x in enumerate(arrays.values()) if x is not None]
        self._present = picker(there)
        self._multiples = [(there.index(i), multiple) for i, multiple in self._alignments]  # by places of addresses
        self._first, self._last = there.index(placed[0][0]), there.index(placed[-1][0]) + 1
        self._results = [tensors.memory(x.shape, DTYPES[x.dtype]) for x in schedule.results.values()]
        if schedule.kept:
            self._results.append(tensors.memory((sum(schedule.kept.values()) // 4,), torch.float32))
        self._plan_of_copies: Plan | None = None
        with torch.cuda.device(self.device.index):
            if not self._kept:  # the backward sees what the forward saw
                for _, name, x in inputs:
                    tensors.validate(name, x)
            self._bind(arrays, soon)

    # ---- run ----

    def run(
        self, arrays: Sequence[Tensor | None], at_pause: Callable[[list[Tensor]], None] | None = None
    ) -> list[Tensor]:
        """Return the results in order, then what the schedule keeps; `at_pause` gets results that are there."""
        index = self.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(arrays, at_pause)
        given = arrays
        if self._copies:
            arrays = list(arrays)
            for place in self._copies:
                arrays[place] = arrays[place].contiguous()  # type: ignore[union-attr]
        values = [*map(_address, self._present(arrays))]
        if math.gcd(*values[self._first : self._last]) % self._alignment and any(
            [values[place] % multiple for place, multiple in self._multiples]
        ):
            results = self._run_copies(arrays, at_pause)
            if self._copies:
                self._write_back(given, arrays)
            return results
        results, new = [], tensors.new
        for shape, strides, dtype in self._results:
            made = new(shape, strides, dtype)
            results.append(made)
            values.append(made.data_ptr())
        if self._kept_places:
            begin = values[self._saved] if self._kept else values.pop()
            for offset in self._kept_places:
                values.append(begin + offset)
        if self._scratch_bytes:
            scratch = new((self._scratch_bytes,), (1,), torch.uint8)
            begin = scratch.data_ptr()
            for offset in self._scratch_places:
                values.append(begin + offset)
        stream = torch._C._cuda_getCurrentRawStream(index)
        self._launches[0].launch(stream, values)
        if at_pause is not None:
            at_pause(results)
            self._launches[1].launch(stream, values)
        if self._copies:
            self._write_back(given, arrays)
        if _watching:
            runs = getattr(_watch, "runs", None)
            if runs is not None:
                runs.append((self, given, results))
        return results

    def with_results(self, results: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> Plan:
        """Return the same plan, whose results have other dimensions of the same memory."""
        plan = copy.copy(self)
        plan._results = [tensors.Memory(*x) for x in results]
        return plan

    def _write_back(self, given: Sequence[Tensor | None], copies: Sequence[Tensor | None]) -> None:
        for place in self._written:
            x, copy = given[place], copies[place]
            if x is not None and copy is not None and x is not copy:
                x.data.copy_(copy)

    def _run_copies(
        self, arrays: Sequence[Tensor | None], at_pause: Callable[[list[Tensor]], None] | None
    ) -> list[Tensor]:
        """Run with copies of all inputs, as some begin at addresses that the kernels cannot take.

        Which tensors need a copy where they lie is as it was when the kernels were chosen.
        """
        own, copies = set(), list(arrays)
        for index, multiple in self._alignments:
            x = arrays[index]
            if x is not None and (index not in self._written or x.data_ptr() % multiple):
                own.add(index)
                copy = x.clone(memory_format=torch.contiguous_format)
                copies[index] = copy.view(self._shapes[index])  # of a known call it may be without a dimension of 1
        if self._plan_of_copies is None:
            named = dict(zip(self._names, copies, strict=True))
            others = [index for index in self._copies if index not in own]
            self._plan_of_copies = Plan(self._schedule, self.problem, named, self._kept, copies=others)
        results = self._plan_of_copies.run(copies, at_pause)
        self._write_back(arrays, copies)
        return results

    # ---- bind ----

    def _bind(self, arrays: Mapping[str, Tensor | None], soon: Sequence[kernel.Request]) -> None:
        """Load the kernels, and find a place for every argument of theirs."""
        schedule, device = self._schedule, self.device.index
        check_capture(self.problem.op.name, schedule.requests(self.problem.gpu), device)
        kernels = self._kernels(soon)
        grids = [_grid(step, own, device) for step, own in zip(schedule.launches, kernels, strict=True)]

        scratch = dict(schedule.scratch)
        for step, grid in zip(schedule.launches, grids, strict=True):
            if step.per_block is not None:
                scratch[step.per_block[0]] = step.per_block[1] * grid[0]
        pieces = schedule.kept or self._kept
        self._kept_places = offsets(pieces.values())
        self._empty = {name for name, size in scratch.items() if not size}
        scratch = {name: size for name, size in scratch.items() if size}
        nothing = self._empty | {name for name, size in pieces.items() if not size}
        self._scratch_places = offsets(map(aligned, scratch.values()))
        self._scratch_bytes = sum(map(aligned, scratch.values()))
        present = [name for name, x in arrays.items() if x is not None]
        names = [*present, *schedule.results, *pieces, *scratch]
        self._places = {name: index for index, name in enumerate(names)}
        self._saved = self._places["saved"] if self._kept else -1
        self._empty |= arrays.keys() - self._places.keys()
        sizes = {**pieces, **scratch}

        # In two parts where there is a pause.
        parts, sides = [list[Any]()], [list[tuple[bool, bool]]()]
        bound = iter(zip(kernels, grids, strict=True))
        for item in schedule.steps:
            if isinstance(item, Step):
                own, grid = next(bound)
                if item.idle_at is not None and item.idle_at[0] in nothing:
                    continue  # a call without rows never needs it
                arguments = [self._argument(item, argument, arrays) for argument in item.arguments()]
                bind = self._launch_of(item, grid, arguments)
                if isinstance(own, Future):
                    assert item.idle_at is not None
                    buffer, least = item.idle_at
                    place, count = self._places[buffer], sizes[buffer] // 4
                    parts[-1].append(_Later(own, bind, arguments, place, count, least))
                else:
                    parts[-1].append(bind(own))
                sides[-1].append((item.is_beside, item.waits))
            elif isinstance(item, Pause):
                parts.append([])
                sides.append([])
            elif sizes.get(item.buffer):
                parts[-1].append(Zeros(self._places[item.buffer], sizes[item.buffer]))
                sides[-1].append((False, False))
        self._launches = [Launches(device, *each) for each in zip(parts, sides, strict=True)]
        for launches in self._launches:
            for each in launches.steps:
                if isinstance(each, _Later):
                    each.replace = partial(launches.replace, each)

    def _kernels(self, soon: Sequence[kernel.Request]) -> list[kernel.Kernel | Future[kernel.Kernel]]:
        """Return the kernels of the launches, and of those that may be idle, while they compile, the futures."""
        gpu, launches = self.problem.gpu, self._schedule.launches
        needed = [step.request(gpu) for step in launches if step.idle_at is None]
        rest = [step.request(gpu) for step in launches if step.idle_at is not None]
        try:
            made, others = kernel.get_most(needed, rest, soon)
        except CompileError as error:
            if not env.assert_cached():
                raise
            command = build_command.text(self.problem, launches)
            what = f"to compile it: {command}" if command else f"call {self.problem.op.name} once without that variable"
            raise CompileError(f"{error}; {what}") from None
        return [(made if step.idle_at is None else others).pop(0) for step in launches]

    def _launch_of(
        self, step: Step, grid: tuple[int, int, int], arguments: Sequence[tuple[str, Any]]
    ) -> Callable[[kernel.Kernel], Launch]:
        block = (int(step.parameters["NUM_THREADS"]), 1, 1)
        shared_bytes = int(step.parameters.get("SHARED_BYTES", step.shared_bytes))
        return lambda own: Launch(
            own, step.entry, self.device.index, grid, block, arguments, shared_bytes, step.overlaps
        )  # fmt: skip

    def _argument(self, step: Step, argument: Argument, arrays: Mapping[str, Tensor | None]) -> tuple[str, Any]:
        """Return the letters of an argument, and what is passed: a place among the values, or a constant."""
        name, kind, _ = argument
        source = step.bind.get(name, name)
        if kind.endswith("*"):
            if source is None:
                return "Q", 0
            if source in self._empty or source in self._places:
                return "Q", self._pointer(source)
        elif kind in _STRIDES:
            if name not in step.bind:
                owner = name.removesuffix("_strides")
                source = step.bind.get(owner, owner)
            if isinstance(source, tuple):
                return LETTERS[kind], source
            strides = tuple(self._stride(source, dim, step, arrays) for dim in _STRIDES[kind])
            if kind == "DecayStrides" and step.parameters["T_W0"] != "void":  # behind them w0 stands
                return len(strides) * "q" + "Q", (*strides, self._pointer("w0"))
            return LETTERS[kind], strides
        elif kind == "Places":  # the addresses of several tensors, which may be absent
            return len(source) * "Q", tuple(map(self._pointer, source))
        elif isinstance(source, Stride):
            return LETTERS[kind], self._stride(source.name, source.dim, step, arrays)
        elif source is not None and not isinstance(source, str):
            return LETTERS[kind], source
        raise RwkvJitError(f"{step.entry}: nothing is bound to its argument {kind} {name}")

    def _pointer(self, name: str) -> Value | int:
        """Return what passes the address of a tensor or a buffer, 0 for one that is absent."""
        return 0 if name in self._empty else Value(self._places[name])

    def _stride(self, name: str | None, dim: str, step: Step, arrays: Mapping[str, Tensor | None]) -> int:
        """Return the stride of an input in a dimension, of several in the one it has; 0 without any, or without it."""
        if name is None:
            return 0
        x, is_buffer = arrays.get(name), name in self._schedule.rows
        if x is None and not is_buffer:
            return 0
        dims = self._schedule.rows[name] if is_buffer else self._dims[name]
        dim = next((letter for letter in dim if letter in dims), "")
        if not dim:
            return 0
        shape = tuple(getattr(self.problem, letter) for letter in dims) if x is None or is_buffer else x.shape
        is_dense = x is None or is_buffer or self._names.index(name) in self._copies
        strides = tensors.memory(shape, torch.uint8).strides if x is None or is_dense else x.stride()
        if dim == "B" and step.segments > 1 and "T" in dims:  # segments of all sequences follow each other
            token = dims.index("T")
            return int(strides[token] * (shape[token] // step.segments))
        return int(strides[dims.index(dim)])


_plans: BySignature[Plan] = BySignature()


def find(key: tuple[Any, ...], prepare: Callable[[], Plan]) -> Plan:
    """Return the plan of a key, which has all that a plan depends on; `prepare` returns that of the first call."""
    plan = _plans.get(key)
    return _plans.keep(key, prepare()) if plan is None else plan


def check_capture(op: str, requests: Sequence[kernel.Request], device: int) -> None:
    """Raise RwkvJitError if a capture is going on and the call would have to compile or load."""
    if tensors.capturing() and not all(kernel.is_loaded(request, device) for request in requests):
        raise RwkvJitError(
            f"{op}: first use inside a CUDA graph capture, where nothing can be compiled or loaded; "
            "call it once with these sizes, dtypes and options before the capture"
        )


def _grid(step: Step, own: kernel.Kernel | Future[kernel.Kernel], device: int) -> tuple[int, int, int]:
    if not step.is_resident:
        return step.grid
    if isinstance(own, Future):
        own = own.result()
    # As many as its registers were given out for; where nobody has said that, as the driver finds.
    per_multiprocessor = own.parameters.get("BLOCKS_PER_SM") or cuda.driver().occupancyMaxActiveBlocksPerMultiprocessor(
        own.function(device, step.entry), int(own.parameters["NUM_THREADS"]), 0
    )
    return min(step.grid[0], int(per_multiprocessor) * tensors.multiprocessors(device)), *step.grid[1:]


def _needs_copy(x: Tensor, dims: str, vector: int, segments: int) -> bool:
    """Return whether kernels cannot read a tensor in place: what has no tokens they read without gaps."""
    if "T" not in dims:
        return not x.is_contiguous()
    if tensors.needs_copy(x, vector):
        return True
    # Segments of all sequences have to follow each other with one stride.
    token = dims.index("T")
    return segments > 1 and x.shape[0] > 1 and x.stride(0) != x.stride(token) * x.shape[token]
