"""Launching kernels: everything that does not change between two launches is prepared once."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from rwkv_jit.kernels import cuda
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.kernel import Kernel

Extent = tuple[int, int, int]
_SLOT = 8  # every argument begins at a multiple of so many bytes, as the widest needs it
_INVALID_CONTEXT = 201  # of the driver's errors
_MOST_STREAMS = 64  # for which a thread keeps memory
# What arguments are passed as, by the type that the kernel declares: struct's letters.
LETTERS = {
    "i64": "q", "int": "i", "float": "f", "bool": "?", "double": "d", "unsigned": "I", "Strides": "3q",
    "DecayStrides": "3q", "RowStrides": "2q", "Walk": "2i", "Sizes": "24i", "Firsts": "8i",
}  # fmt: skip


class Value(NamedTuple):
    """The place of an argument among the values that a launch takes."""

    place: int


class Step(Protocol):
    """What a sequence of launches consists of; `arguments` are in the kernel's order.

    Each has struct's letters and what is passed: a `Value`, or what is the same in every launch; or a tuple of both, in
    which each has a letter of eight bytes.
    """

    arguments: Sequence[tuple[str, Any]]

    def prepared(self, addresses: Sequence[int], stream: int) -> tuple[Callable[[], Any], Any]:
        """Return what runs it on a stream with the arguments at these addresses, and what must be kept beside that.

        It returns the driver's status, and is for one thread at a time.
        """


class Launch:
    """A kernel on a device with its grid, its block and its arguments.

    A kernel that `overlaps` may begin beside the one before it. An empty grid launches nothing.
    """

    def __init__(
        self, kernel: Kernel, entry: str, device: int, grid: Extent, block: Extent,
        arguments: Sequence[tuple[str, Any]], shared_bytes: int = 0, overlaps: bool = False,
    ):  # fmt: skip
        cuda.make_current(device)
        self.kernel = kernel  # keeps the module alive
        self.arguments = arguments
        self._function = kernel.function(device, entry)
        _check_sizes(entry, self._function, [struct.calcsize("=" + letters) for letters, _ in arguments])
        self._shape, self._overlaps = (*grid, *block, shared_bytes), overlaps
        if shared_bytes:
            cuda.allow_shared_bytes(self._function, shared_bytes)

    def prepared(self, addresses: Sequence[int], stream: int) -> tuple[Callable[[], Any], Any]:
        """Return what launches it, as `Step` says."""
        if 0 in self._shape[:3]:
            return int, None
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        return cuda.prepared_launch(self._function, self._shape, table, self._overlaps, stream)


class Zeros:
    """A buffer to be filled with zeros: the place of its address among the values, and its bytes."""

    def __init__(self, place: int, count: int):
        self.arguments = (("Q", Value(place)),)
        self._count = count

    def prepared(self, addresses: Sequence[int], stream: int) -> tuple[Callable[[], Any], Any]:
        """Return what fills it, as `Step` says."""
        return cuda.prepared_zero(ctypes.c_uint64.from_address(addresses[0]), self._count, stream), None


class Launches:
    """Launches of a device, one behind the other, that read the same values: these are written once for all of them.

    `sides` says of each whether it is on the stream beside, and whether it waits for what the other stream has so far.
    What follows on the stream waits for the one beside it. Each thread has memory for the values, by streams, as a
    launch releases the interpreter lock.
    """

    def __init__(self, device: int, steps: Sequence[Step], sides: Sequence[tuple[bool, bool]] = ()):
        self.device, self.steps = device, list(steps)
        self._sides = sides if any(is_beside for is_beside, _ in sides) else ()
        fields: list[tuple[str, Any]] = []
        alone, constants = dict[tuple[str, Value], int](), b""
        places: list[list[tuple[bool, int]]] = []  # of each argument: whether it is constant, and where it lies there
        for step in steps:
            places.append([])
            for letters, x in step.arguments:
                if not any(isinstance(each, Value) for each in _fields(x)):
                    places[-1].append((True, len(constants)))
                    constants += struct.pack("=" + _padded(letters), *_fields(x))
                elif isinstance(x, Value):
                    if (letters, x) not in alone:
                        alone[letters, x] = _SLOT * len(fields)
                        fields.append((letters, x))
                    places[-1].append((False, alone[letters, x]))
                else:
                    places[-1].append((False, _SLOT * len(fields)))
                    fields += zip(letters, x, strict=True)
        # Values lie in front, one behind the other, so that one call writes all of them.
        self._layout = struct.Struct("=" + "".join(_padded(letters) for letters, _ in fields))
        self._places = [[place + is_constant * self._layout.size for is_constant, place in each] for each in places]
        self._memory = bytes(self._layout.size) + constants
        self._numbers = [x for _, x in fields if not isinstance(x, Value)]
        behind = iter(range(-len(self._numbers), 0))
        self._pick = picker([x.place if isinstance(x, Value) else next(behind) for _, x in fields])
        self._rooms = threading.local()

    def replace(self, step: Step, other: Step) -> None:
        """Take another step of the same first arguments for one, if no other thread has."""
        self.steps = [other if each is step else each for each in self.steps]
        self._rooms = threading.local()

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        """Launch on a raw stream; the device must be current."""
        # The driver is called from here: for all launches there is this frame of Python and no other.
        try:
            memory, runs, join, _ = self._rooms.by_stream[stream]
        except (AttributeError, KeyError):
            memory, runs, join, _ = self._room(stream)
        if self._numbers:
            values = [*values, *self._numbers]
        self._layout.pack_into(memory, 0, *self._pick(values))
        try:
            for run in runs:
                status = run()
                if status:
                    self._run_again(run, status)
        except BaseException:
            for run in join:
                run()
            raise

    def _room(self, stream: int) -> tuple[Any, list[Callable[[], Any]], Sequence[Callable[[], Any]], Any]:
        """Return this thread's arguments on a stream (a buffer to write to), its launches, and what these need.

        What follows on this stream may take the memory that the kernels beside still use: it waits for them, which has
        to be done even where a launch fails, and is what the third of these does.
        """
        memory = ctypes.create_string_buffer(self._memory, max(len(self._memory), 1))
        first = ctypes.addressof(memory)
        side = cuda.side_stream(self.device, stream) if self._sides else None
        follow, join = (side.follow(), side.join()) if side else ([], [])
        runs, kept, owes = list[Callable[[], Any]](), list[Any](), False
        for number, (step, places) in enumerate(zip(self.steps, self._places, strict=True)):
            is_beside, waits = self._sides[number] if side else (False, False)
            if waits and (is_beside or owes):
                runs += follow if is_beside else join
            run, beside = step.prepared([first + place for place in places], side.raw if side and is_beside else stream)
            runs.append(run)
            kept.append(beside)
            owes = is_beside or (owes and not waits)
        runs += join if owes else []
        by_stream = self._rooms.__dict__.setdefault("by_stream", {})
        if len(by_stream) >= _MOST_STREAMS:
            by_stream.clear()
        by_stream[stream] = room = memory, runs, join, kept
        return room

    def _run_again(self, run: Callable[[], Any], status: int) -> None:
        """Run what the driver has refused once more, if this thread has used no GPU yet; raise what it says."""
        if status == _INVALID_CONTEXT:
            cuda.make_current(self.device)
            status = run()
        if status:
            raise cuda.driver().CUDADriverError(status)


def _padded(letters: str) -> str:
    """Return letters that fill up to the place of the next argument."""
    return f"{letters}{-struct.calcsize('=' + letters) % _SLOT}x"


def _fields(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) and not isinstance(x, Value) else (x,)


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes these places out of a list or a tuple, in one call."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1 or None) if places else slice(0))


def _check_sizes(entry: str, function: int, sizes: Sequence[int]) -> None:
    """Compare what is passed with what a kernel takes, as far as the driver tells; RwkvJitError if they differ."""
    taken = cuda.parameter_sizes(function, len(sizes))
    if taken is not None and list(taken) != list(sizes):
        raise RwkvJitError(f"{entry}: the kernel takes arguments of {taken} bytes, got {list(sizes)}")
