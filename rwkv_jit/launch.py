"""Launching one kernel: everything that does not change between two launches is prepared once."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from rwkv_jit import cuda
from rwkv_jit.errors import RwkvJitError
from rwkv_jit.kernel import Kernel

Extent = tuple[int, int, int]
_SLOT = 8  # every argument begins at a multiple of so many bytes, as the widest needs it
_INVALID_CONTEXT = 201  # of the driver's errors
# What arguments are passed as, by the type that the kernel declares: struct's letters.
LETTERS = {
    "i64": "q", "int": "i", "float": "f", "bool": "?", "double": "d", "unsigned": "I", "Strides": "3q",
    "RowStrides": "2q", "Walk": "2i",
}  # fmt: skip


class Value(NamedTuple):
    """The place of an argument among the values that a launch is given."""

    place: int


class Launch:
    """A kernel on a device with its grid and block, and room for its arguments.

    `arguments` are in the kernel's order, each with struct's letters and what is passed: a `Value`, or what is the same
    in every launch. The room is per thread, as a launch releases the interpreter lock. A kernel that `overlaps` may
    begin beside the one before it.
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
        given = [(letters, x.place) for letters, x in arguments if isinstance(x, Value)]
        self._pick: Callable[[Sequence[Any]], Sequence[Any]] = _picker([place for _, place in given])
        self._layout = struct.Struct("=" + "".join(_padded(letters) for letters, _ in given))
        # Values lie in front, one behind the other, so that one call writes all of them.
        self._memory, self._places, values = bytes(self._layout.size), [], 0
        for letters, x in arguments:
            if isinstance(x, Value):
                self._places.append(_SLOT * values)
                values += 1
            else:
                self._places.append(len(self._memory))
                self._memory += struct.pack("=" + _padded(letters), *(x if isinstance(x, tuple) else (x,)))
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


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes the values at these places out of others, in one call."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _check_sizes(entry: str, function: int, sizes: Sequence[int]) -> None:
    """Compare what is passed with what the driver says that a kernel takes, as far as it tells.

    Raises
    ------
    RwkvJitError
        The kernel takes other arguments.
    """
    taken = cuda.parameter_sizes(function, len(sizes))
    if taken is not None and list(taken) != list(sizes):
        raise RwkvJitError(f"{entry}: the kernel takes arguments of {taken} bytes, got {list(sizes)}")
