"""Launching one kernel: everything that does not change between two launches is prepared once."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from rwkv_jit.kernels import cuda
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.kernel import Kernel

Extent = tuple[int, int, int]
_SLOT = 8  # every argument begins at a multiple of so many bytes, as the widest needs it
_INVALID_CONTEXT = 201  # of the driver's errors
# What arguments are passed as, by the type that the kernel declares: struct's letters.
LETTERS = {
    "i64": "q", "int": "i", "float": "f", "bool": "?", "double": "d", "unsigned": "I", "Strides": "3q",
    "DecayStrides": "3q", "RowStrides": "2q", "Walk": "2i", "Sizes": "24i", "Firsts": "8i",
}  # fmt: skip


class Value(NamedTuple):
    """The place of an argument among the values that a launch takes."""

    place: int


class Launch:
    """A kernel on a device with its grid and block, and memory for its arguments.

    `arguments` are in the kernel's order, each with struct's letters and what is passed: a `Value`, or what is the same
    in every launch; or a tuple of both, in which each has a letter of eight bytes. They are per thread, as a launch
    releases the interpreter lock. A kernel that `overlaps` may begin beside the one before it.
    """

    def __init__(
        self,
        kernel: Kernel,
        entry: str,
        device: int,
        grid: Extent,
        block: Extent,
        arguments: Sequence[tuple[str, Any]],
        shared_bytes: int = 0,
        overlaps: bool = False,
    ):
        cuda.make_current(device)
        self.kernel = kernel  # keeps the module alive
        self.device = device
        self.function = kernel.function(device, entry)
        _check_sizes(entry, self.function, [struct.calcsize("=" + letters) for letters, _ in arguments])
        self._shape, self._overlaps = (*grid, *block, shared_bytes), overlaps
        self._is_empty = 0 in grid
        given = [each for letters, x in arguments if _has_value(x) for each in zip(letters, _fields(x), strict=True)]
        self._pick: Callable[[Sequence[Any]], Sequence[Any]] = _picker([x for _, x in given])
        self._layout = struct.Struct("=" + "".join(_padded(letters) for letters, _ in given))
        # Values lie in front, one behind the other, so that one call writes all of them.
        self._memory, self._places, values = bytes(self._layout.size), [], 0
        for letters, x in arguments:
            if _has_value(x):
                self._places.append(_SLOT * values)
                values += len(_fields(x))
            else:
                self._places.append(len(self._memory))
                self._memory += struct.pack("=" + _padded(letters), *_fields(x))
        self._rooms = threading.local()
        if shared_bytes:
            cuda.allow_shared_bytes(self.function, shared_bytes)

    def _room(self) -> tuple[Any, ...]:
        """Return this thread's arguments (a buffer to write to), and its launch as `cuda.prepared_launch` does."""
        memory = ctypes.create_string_buffer(self._memory, max(len(self._memory), 1))
        first = ctypes.addressof(memory)
        table = (ctypes.c_void_p * len(self._places))(*[first + place for place in self._places])
        self._rooms.made = made = memory, *cuda.prepared_launch(self.function, self._shape, table, self._overlaps)
        return made

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        """Launch on a raw stream; the device must be current. An empty grid launches nothing."""
        if self._is_empty:
            return
        # The driver is called from here: for a launch there is this frame of Python and no other.
        try:
            memory, config, run, _ = self._rooms.made
        except AttributeError:
            memory, config, run, _ = self._room()
        self._layout.pack_into(memory, 0, *self._pick(values))
        config.stream = stream
        status = run()
        if status == _INVALID_CONTEXT:
            cuda.make_current(self.device)  # this thread has used no GPU yet
            status = run()
        if status:
            raise cuda.driver().CUDADriverError(status)


def _padded(letters: str) -> str:
    """Return letters that fill up to the place of the next argument."""
    return f"{letters}{-struct.calcsize('=' + letters) % _SLOT}x"


def _fields(x: Any) -> tuple[Any, ...]:
    """Return what an argument consists of."""
    return x if isinstance(x, tuple) and not isinstance(x, Value) else (x,)


def _has_value(x: Any) -> bool:
    """Return whether any of that is another thing in every launch."""
    return any(isinstance(each, Value) for each in _fields(x))


def _picker(given: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes the values of these places out of others, in one call; the rest of `given` it has by itself."""
    own = [x for x in given if not isinstance(x, Value)]
    if own:
        numbers = iter(range(-len(own), 0))
        pick = _picker([x if isinstance(x, Value) else Value(next(numbers)) for x in given])
        return lambda values: pick([*values, *own])
    places = [x.place for x in given]
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _check_sizes(entry: str, function: int, sizes: Sequence[int]) -> None:
    """Compare what is passed with what a kernel takes, as far as the driver tells; RwkvJitError if they differ."""
    taken = cuda.parameter_sizes(function, len(sizes))
    if taken is not None and list(taken) != list(sizes):
        raise RwkvJitError(f"{entry}: the kernel takes arguments of {taken} bytes, got {list(sizes)}")
