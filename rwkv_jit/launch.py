"""Launching: everything that does not change between two launches is prepared once, in a plan."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from rwkv_jit import cuda
from rwkv_jit.kernel import Kernel

Extent = tuple[int, int, int]
_SLOT = 8  # every argument begins at a multiple of so many bytes, as the widest needs it
_INVALID_CONTEXT = 201  # of the driver's errors
_PADDING = {1: "7x", 2: "6x", 4: "4x", 8: ""}


class Plan:
    """A kernel on a device with its grid and block, and room for its arguments.

    The arguments are `values`, packed as `layout` says (struct's letters, one argument each), followed by `constants`,
    packed already. The room is per thread, as a launch releases the interpreter lock.
    """

    def __init__(
        self,
        kernel: Kernel,
        entry: str,
        device: int,
        grid: Extent,
        block: Extent,
        layout: str,
        constants: Iterable[bytes] = (),
        shared_bytes: int = 0,
    ):
        cuda.make_current(device)
        self.kernel = kernel  # keeps the module alive
        self.device = device
        self.function = kernel.function(device, entry)
        self._shape = (*grid, *block, shared_bytes)
        self._is_empty = 0 in grid
        padded = [letter + _PADDING[struct.calcsize("=" + letter)] for letter in layout]
        self._layout = struct.Struct("=" + "".join(padded))
        self._arguments = bytes(self._layout.size)
        self._places = list(range(0, self._layout.size, _SLOT))
        for constant in constants:
            self._places.append(len(self._arguments))
            self._arguments += constant.ljust(-(-len(constant) // _SLOT) * _SLOT, b"\0")
        self._driver_launch = cuda.driver().launchKernel
        self._rooms = threading.local()
        if shared_bytes:
            cuda.allow_shared_bytes(self.function, shared_bytes)

    def _room(self) -> tuple[Any, int, Any]:
        """Return this thread's arguments (a buffer to write to), the table of them, and what keeps it alive."""
        arguments = ctypes.create_string_buffer(self._arguments, max(len(self._arguments), 1))
        first = ctypes.addressof(arguments)
        table = (ctypes.c_void_p * len(self._places))(*[first + place for place in self._places])
        self._rooms.made = made = (arguments, ctypes.addressof(table), table)
        return made

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        """Launch on a raw stream; the device must be current. An empty grid launches nothing."""
        if self._is_empty:
            return
        try:
            arguments, table, _ = self._rooms.made
        except AttributeError:
            arguments, table, _ = self._room()
        self._layout.pack_into(arguments, 0, *values)
        try:
            self._driver_launch(self.function, *self._shape, stream, table, 0)
        except Exception as error:
            if getattr(error, "status", None) != _INVALID_CONTEXT:
                raise
            cuda.make_current(self.device)  # this thread has used no GPU yet
            self._driver_launch(self.function, *self._shape, stream, table, 0)
