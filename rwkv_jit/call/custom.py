"""The door to the service for your CUDA templates: read, specialise, launch."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.kernels import cuda, kernel, template
from rwkv_jit.kernels.cache.files import path_of
from rwkv_jit.kernels.errors import RwkvJitError, brief, short
from rwkv_jit.kernels.launch import LETTERS, Extent, Launch, Launches, Value
from rwkv_jit.kernels.signatures import BySignature

_MOST_BLOCKS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
_MOST_THREADS = (1024, 1024, 64)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")

# What is passed by value, as struct's letters.
_LETTERS: dict[type, str] = {
    type(None): "Q", bool: "?", int: "q", float: "d",
    **{numpy.dtype(letter).type: letter for letter in "?bBhHiIqQefd"},
    numpy.int32: "i", numpy.uint32: "I", numpy.int64: "q", numpy.uint64: "Q",  # C's long is one of these
}  # fmt: skip

# By kernel, entry, grid, block, shared memory, device and kinds of arguments: a launch found here has been checked.
_launches: BySignature[Launches] = BySignature()


class Template:
    """Your CUDA template, which is compiled, cached and launched like those of the library.

    Parameters
    ----------
    path : str or pathlib.Path
        A .cu file. A header it includes in quotes is beside it or one of the library, like "types.cuh", which is
        always included: the storage types fp16, bf16 and fp32 with `to_float` and `from_float<T>`, `i64`, and
        `Pack<T, COUNT>` for wide loads. File and headers are read now; a later change needs a new Template.

    Raises
    ------
    FileNotFoundError, OSError
        There is no such file or header, with the file that includes it; or one of them cannot be read.
    ValueError
        It is not a .cu file, or not text in UTF-8, or it includes a file in a way that the notes exclude.

    Notes
    -----
    Include headers by their names in quotes: ``#include "NAME"``. Their content is part of a kernel's key in the cache,
    which cannot cover what NVRTC would open by itself. So ``#include MACRO``, ``#include_next``, ``__has_include`` and
    absolute names in angle brackets are errors that name file and line. Other names in angle brackets find headers that
    another line includes in quotes. NVRTC has no headers such as ``<cuda_fp16.h>``: put those that you need beside the
    file.

    What decides the code is a parameter: a name that the text uses and does not define, such as NUM_THREADS or T_IO.
    Rules between parameters are ``static_assert``s, whose messages users read. Kernels are ``extern "C" __global__``.

    Examples
    --------
    >>> template = rwkv_jit.Template("examples/token_shift.cu")
    >>> kernel = template.specialize(T_IO=torch.bfloat16, CHANNELS=768, WIDTH=8, NUM_THREADS=128)
    >>> batch, tokens, _ = x.shape
    >>> kernel.launch(math.ceil(x.numel() / (8 * 128)), 128, x=x, mu=mu, y=y, batch=batch, tokens=tokens)
    """

    def __init__(self, path: str | Path):
        path = path_of("path", path)
        if path.suffix != ".cu":
            raise ValueError(f"path: expected a .cu file, got {short(str(path))}")
        try:
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {short(str(path))}")
            self._template = template.read(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"path: expected text in UTF-8, got {path} ({error})") from error
        except ValueError as error:
            raise ValueError(f"path: {error}") from None
        except OSError as error:
            reason = f"{short(str(path))} cannot be read: {error.strerror}" if error.strerror else error
            raise type(error)(f"path: {reason}") from None

    def specialize(self, arch: str | None = None, **parameters: Any) -> OwnKernel:
        """Compile the template for these parameters, or find it in the cache; no GPU is needed.

        Parameters
        ----------
        arch : str, optional
            E.g. "sm_90a", or "compute_80" for PTX; RWKVJIT_ARCH or this machine's current GPU by default. GPUs of
            another architecture need another kernel.
        **parameters
            By the names that the template uses. T_... is a storage type: "fp16", "bf16", "fp32" or the torch.dtype.
            Others are an int (32 bits), a bool, a float (32 bits), or a str that names an enumerator: DECAY="raw" is
            `Decay::raw`.

        Returns
        -------
        OwnKernel
            A Kernel (`source`, `cubin`, `ptx`, `origin`, `registers`, `spill_bytes`, `shared_bytes`) with `launch`.

        Raises
        ------
        TypeError, ValueError
            A value that cannot be a parameter, a parameter that the template does not have, an `arch` that is none, or
            no `arch` on a machine without a GPU.
        UnsupportedConfigError, CompileError, NvrtcNotFoundError
            A ``static_assert`` of the template does not hold, NVRTC does not know `arch`, or the kernel cannot be
            compiled.

        Examples
        --------
        >>> kernel = template.specialize(arch="sm_90", T_IO="bf16", CHANNELS=768, WIDTH=8, NUM_THREADS=128)
        >>> kernel.origin, kernel.spill_bytes
        ('compiled', 0)
        """
        chosen = {name: _parameter(name, value) for name, value in parameters.items()}
        self._template.render(chosen)  # names a value that cannot be a parameter
        return OwnKernel(kernel.get(kernel.Request(self._template, chosen, *tensors.targets(arch))), self._template)


class OwnKernel(kernel.Kernel):
    """A kernel of your template: a Kernel that you launch."""

    def __init__(self, compiled: kernel.Kernel, own_template: template.Template):
        self.__dict__.update(vars(compiled))  # the modules it has loaded too
        self._template = own_template

    def launch(
        self, grid: int | tuple[int, ...], block: int | tuple[int, ...], *arguments: Any, entry: str | None = None,
        shared_bytes: int = 0, stream: Any = None, **named: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel; like all work on a GPU it may still run when this returns.

        Parameters
        ----------
        grid, block : int or tuple of one to three ints
            Blocks, and threads of a block, in x, y and z. With a 0 in the grid nothing is launched, but all is
            checked and loaded.
        *arguments
            One for each parameter of the kernel, in its order:

            - torch.Tensor on a GPU, all on the same: the address of its first element. Shape, strides and dtype are
              not looked at, and no gradient is recorded. Arrays of other libraries come in through DLPack.
            - None: a null pointer.
            - bool: bool, one byte. int: 64 bits (`i64`). float: 64 bits (`double`).
            - NumPy scalar: the same type; numpy.int32(n) is an `int`, numpy.float32(x) a `float`.
        entry : str, optional
            The kernel's name; may be left out where the template has one ``extern "C"`` kernel.
        shared_bytes : int, default 0
            Dynamic shared memory of a block, as much as the GPU has.
        **named
            The arguments by the names that the kernel gives them, instead of those in its order. An int or float
            then goes as what the kernel declares: `int`, `i64`, `unsigned`, `float`, `double` or `bool`.
        stream : torch.cuda.Stream, object with `cuda_stream` or `ptr`, or int, optional
            torch's current stream of the tensors' GPU by default. On another one, torch must be told that the
            tensors are in use: ``Tensor.record_stream``.

        Raises
        ------
        TypeError
            An argument that cannot be passed, or whose number or size is not what the kernel takes (as far as the
            driver tells: since CUDA 12.4; 4-byte ints and floats look the same). Arguments count from 1.
        ValueError
            A tensor that is not on a GPU or on another one than the rest, an int beyond 64 bits, sizes no GPU can
            launch, an `entry` that is not there, or missing among several.
        RwkvJitError, NvrtcNotFoundError
            The driver refuses: a GPU of another architecture, too much shared memory, too many threads for the kernel's
            registers. CuPy is missing. Or the first launch is inside the capture of a CUDA graph, where nothing can be
            loaded; one with an empty grid before it will do.

        Notes
        -----
        The GPU is that of the tensors, whichever is current; the current one where there is no tensor.

        Examples
        --------
        >>> kernel.launch((blocks, heads), 128, x=x, mask=None, y=y, tokens=x.shape[1], scale=0.5)
        >>> kernel.launch((blocks, heads), 128, x, None, y, x.shape[1], numpy.float32(0.5))
        """
        device: torch.device | None = None
        kinds: list[Any] = []
        values: list[Any] = []
        if named:
            if arguments:
                raise TypeError(f"arguments: expected all by position or all by name, got {len(arguments)} by position")
            arguments = tuple(named.values())
        names = tuple(named)
        for position, x in enumerate(arguments):
            kind: Any = type(x)
            if kind in _LETTERS:
                values.append(0 if x is None else x)
            else:
                tensor = x if isinstance(x, Tensor) else _as_tensor(_called(position, names), x)
                kind = device = tensor.device
                values.append(tensor.data_ptr())
            kinds.append(kind)
        if device is None:
            kernel.check_not_forked()
            device = torch.device("cuda", torch.cuda.current_device())
        key = (self, entry, grid, block, shared_bytes, device, names, *kinds)
        try:
            launch = _launches.get(key)
        except TypeError:  # a grid that cannot be one may have no hash
            launch = None
        if launch is None:
            launch = self._prepare(grid, block, kinds, arguments, device, entry, shared_bytes, names)
            launch = _launches.keep(key, launch)
        try:
            if stream is None:
                tensors.launch(launch, values)
            else:
                raw = _raw_stream(stream)
                with torch.cuda.device(launch.device):
                    launch.launch(raw, values)
        except (struct.error, OverflowError):
            raise self._out_of_range(entry, kinds, arguments, names) from None
        except cuda.driver().CUDADriverError as error:
            raise RwkvJitError(
                f"{self.name}: the driver refuses to launch grid {grid}, block {block}, {shared_bytes} bytes of shared "
                f"memory: {error}"
            ) from error

    def _prepare(
        self, grid: Any, block: Any, kinds: Sequence[Any], arguments: Sequence[Any], device: torch.device,
        entry: str | None, shared_bytes: Any, names: Sequence[str],
    ) -> Launches:  # fmt: skip
        """Check the first launch of its kind, load the kernel and return what all that follow take."""
        kernel.check_not_forked()
        blocks, threads = _extent("grid", grid, 0, _MOST_BLOCKS), _extent("block", block, 1, _MOST_THREADS)
        if math.prod(threads) > _MOST_THREADS[0]:
            raise ValueError(
                f"block: expected at most {_MOST_THREADS[0]} threads, got {math.prod(threads)} ({brief(block)})"
            )
        if not isinstance(shared_bytes, int) or shared_bytes < 0:
            raise ValueError(f"shared_bytes: expected an int of at least 0, got {brief(shared_bytes)}")
        _check_devices(kinds, names)
        entry = self._entry_named(entry)
        types = self._declared(entry, names) if names else {}
        places = [names.index(name) for name in types] if names else list(range(len(kinds)))
        letters = _letters(kinds, [types[name] for name in names])
        with torch.cuda.device(device):
            if tensors.capturing() and not self.is_loaded(device.index):
                raise RwkvJitError(
                    f"{self.name}: first launch on {device} inside a CUDA graph capture, where nothing can be "
                    "loaded; launch it once before the capture, an empty grid will do"
                )
            sizes = cuda.parameter_sizes(self.function(device.index, entry))
            in_order = [(letters[place], arguments[place], _called(place, names)) for place in places]
            _check_sizes(entry, sizes, in_order)
            values = [(letters[place], Value(place)) for place in places]
            launch = Launch(self, entry, device.index, blocks, threads, values, shared_bytes)
            return Launches(device.index, [launch])

    def _declared(self, entry: str, names: Sequence[str]) -> dict[str, str]:
        """Return the types of the kernel's arguments, in its order, by their names."""
        declared = self._template.arguments(entry)
        if declared is None:
            raise TypeError(f"{entry}: its arguments cannot be read from the template; pass them in the kernel's order")
        types = {argument.name: argument.type for argument in declared}
        faults = [f"{name} is missing" for name in types if name not in names]
        faults += [f"{name} is not one of them" for name in names if name not in types]
        if faults:
            listed = ", ".join(f"{kind} {name}" for name, kind in types.items())
            raise TypeError(f"{entry}: expected arguments named {listed}; {'; '.join(map(short, faults))}")
        return types

    def _out_of_range(
        self, entry: str | None, kinds: Sequence[Any], arguments: Sequence[Any], names: Sequence[str]
    ) -> ValueError:
        """Return the error for the first number that is too large for its argument."""
        types = self._declared(self._entry_named(entry), names) if names else {}
        letters = _letters(kinds, [types[name] for name in names])
        for place, (letter, x) in enumerate(zip(letters, arguments, strict=True)):
            try:
                struct.pack(f"={letter}", x if type(x) in (int, float) else 0)
            except (struct.error, OverflowError):
                kind = {"f": "a float", "d": "a float", "I": "an unsigned int"}.get(letter, "an int")
                expected = f"expected {kind} of {8 * struct.calcsize(letter)} bits"
                return ValueError(f"{_called(place, names)}: {expected}, got {brief(x)}")
        return ValueError(f"{self.name}: an argument is out of range")

    def _entry_named(self, entry: str | None) -> str:
        entries = list(self.resources) or _ENTRY.findall(self.ptx)  # the compiler tells no resources of PTX
        named = [name for name in entries if not name.startswith("_Z")]
        if entry is None and len(named) == 1:
            return named[0]
        if entry is not None and entry in entries:
            return entry
        got = "none is named" if entry is None else f"got {brief(entry)}"
        raise ValueError(f'entry: expected one of the extern "C" kernels of {self.name}, {", ".join(named)}; {got}')


def _parameter(name: str, value: Any) -> Any:
    """Return what the template takes for a dtype or a NumPy scalar; anything else as it is."""
    if name.startswith("T_") and isinstance(value, torch.dtype):
        return tensors.STORAGE.get(value, value)
    return value.item() if isinstance(value, numpy.generic) else value


def _letters(kinds: Sequence[Any], types: Sequence[str]) -> list[str]:
    """Return the letters that pass plain numbers as the types that the kernel declares, and all else as what it is."""
    legal, letters = {int: "qiIfd", float: "fd"}, [_LETTERS.get(kind, "Q") for kind in kinds]
    for place, (kind, declared) in enumerate(zip(kinds, map(LETTERS.get, types), strict=False)):
        letters[place] = declared if declared and declared in legal.get(kind, "") else letters[place]
    return letters


def _called(place: int, names: Sequence[str]) -> str:
    return names[place] if names else f"argument {place + 1}"


def _as_tensor(called: str, x: Any) -> Tensor:
    if not hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{called}: expected a CUDA tensor, None, a bool, int, float or NumPy scalar, or an array with "
            f"__dlpack__, got {type(x).__name__}"
        )
    return tensors.from_any(called, x)


def _extent(name: str, given: Any, least: int, most: Extent) -> Extent:
    sizes = given if isinstance(given, tuple) else (given,)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"{name}: expected an int or a tuple of one to three ints, got {brief(given)}")
    x, y, z = (*sizes, 1, 1)[:3]
    if not all(least <= size <= limit for size, limit in zip((x, y, z), most, strict=True)):
        raise ValueError(f"{name}: expected at least {least} and at most {most}, got {brief(given)}")
    return x, y, z


def _check_devices(kinds: Sequence[Any], names: Sequence[str]) -> None:
    devices = [(_called(place, names), kind) for place, kind in enumerate(kinds) if isinstance(kind, torch.device)]
    for called, device in devices:
        first_called, first = devices[0]
        if device.type != "cuda":
            raise ValueError(f"{called}: expected a CUDA tensor, got one on {device}")
        if device != first:
            raise ValueError(f"{called}: expected {first} like {first_called}, got {device}")


def _check_sizes(entry: str, sizes: Sequence[int] | None, arguments: Sequence[tuple[str, Any, str]]) -> None:
    """Compare what a kernel takes, as far as the driver tells, with what came."""
    if sizes is None:
        return
    if len(sizes) != len(arguments):
        raise TypeError(f"{entry}: the kernel takes {len(sizes)} arguments, got {len(arguments)}")
    for size, (letter, x, called) in zip(sizes, arguments, strict=True):
        if size != struct.calcsize("=" + letter):
            wrapper = f"; wrap it: numpy.{type(x).__name__}{8 * size}({x})"
            hint = wrapper if type(x) in (int, float) and size in (2, 4) else ""
            raise TypeError(f"{called}: the kernel takes {size} bytes, got {_passed_as(x)}{hint}")


def _passed_as(x: Any) -> str:
    plain = {bool: "a bool", int: "an int as int64", float: "a float as float64", type(None): "None as a null pointer"}
    if isinstance(x, numpy.generic):
        return f"numpy.{x.dtype}"
    return plain.get(type(x), "the address of a tensor")


def _raw_stream(stream: Any) -> int:
    raw = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if raw is stream and not isinstance(stream, int):
        got = type(stream).__name__
        raise TypeError(
            f"stream: expected a torch.cuda.Stream, an object with cuda_stream or ptr, or an int, got {got}"
        )
    return int(raw)
