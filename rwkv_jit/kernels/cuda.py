"""The only importer of CuPy: NVRTC, the driver, modules, and what the machine has."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module, metadata
from typing import Any

from rwkv_jit.kernels import forks
from rwkv_jit.kernels.errors import NvrtcNotFoundError, RwkvJitError

CUPY_WHEELS = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
OLDEST_NVRTC = (12, 4)  # of which every kernel is known to compile: the bound of the extra cuda12
# The packages themselves, so that the command works for a checkout as well; the extras cuda12 and cuda13 name the same.
INSTALL = {
    12: 'pip install "cupy-cuda12x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc-cu12>=12.4"',
    13: 'pip install "cupy-cuda13x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc>=13"',
}


def installed_cupy() -> list[str]:
    """Return the CuPy distributions of this environment, e.g. ``["cupy-cuda12x 14.2.0"]``."""
    wheels = []
    for name in CUPY_WHEELS:
        with suppress(metadata.PackageNotFoundError):
            wheels.append(f"{name} {metadata.version(name)}")
    return wheels


@cache
def _layer(name: str) -> Any:
    """Import one of CuPy's thin layers over CUDA, or raise NvrtcNotFoundError with the command that installs them.

    CuPy as a whole takes ten times as long. Of two CuPy wheels each overwrites files of the other.
    """
    wheels = installed_cupy()
    if len(wheels) > 1:
        names = " ".join(wheel.split()[0] for wheel in wheels)
        raise NvrtcNotFoundError(
            f"{' and '.join(wheels)} are both installed and overwrite each other's files; keep one:\n"
            f"    pip uninstall -y {names} && {INSTALL[13 if 'cupy-cuda13x' in names else 12]}"
        )
    try:
        with forks.held_back():
            _spare_the_log()
            return import_module(f"cupy_backends.cuda.{name}")
    except (ImportError, OSError) as error:
        cause = "CuPy is not installed" if not wheels else f"{wheels[0]} cannot be imported ({error})"
        raise NvrtcNotFoundError(f"{cause}; CUDA kernels need it:\n    {INSTALL[12]}") from error


def _spare_the_log() -> None:
    """Keep CuPy's loader of libraries from importing all of CuPy for its log: 0.1 s, and a folder in the home."""
    if os.environ.get("CUPY_DEBUG_LIBRARY_LOAD") != "1":
        with suppress(ImportError):  # the layer's own import says what is missing
            loader: Any = import_module("cupy_backends.cuda._softlink")
            loader._log = lambda message: None


@cache
def nvrtc() -> Any:
    """Return CuPy's NVRTC module with the library loaded. Raises NvrtcNotFoundError where the library is not there."""
    module = _layer("libs.nvrtc")
    try:
        with forks.held_back():
            module.getVersion()
    except Exception as error:  # CuPy raises differently by version; each means that the library did not load
        raise NvrtcNotFoundError(
            f"CuPy is installed but NVRTC is not ({' '.join(str(error).split())}):\n    {INSTALL[_cuda_of_wheel()]}"
        ) from error
    return module


def _cuda_of_wheel() -> int:
    return next((13 if "cuda13x" in wheel else 12 for wheel in installed_cupy()), 12)


def nvrtc_library() -> str:
    """Return the path of the library behind `nvrtc`; torch may have loaded another one beside it.

    CuPy's finder takes a loaded library, else the newest that is installed, whatever CUDA CuPy is for, and remembers
    it. Raise NvrtcNotFoundError where there is none, or CuPy is older than the finder.
    """
    nvrtc()
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        wheel = next(iter(installed_cupy()), "CuPy")
        raise NvrtcNotFoundError(f"{wheel} is too old:\n    {INSTALL[_cuda_of_wheel()]}") from error

    with forks.held_back():
        path: str = os.path.realpath(load_nvidia_dynamic_lib("nvrtc").abs_path)
    return path


def driver() -> Any:
    """Return CuPy's thin layer over the CUDA driver."""
    return _layer("api.driver")


def _runtime() -> Any:
    return _layer("api.runtime")


def make_current(device: int) -> None:
    """Give this thread the context of a device, as the runtime does before its launches and the driver does not."""
    _runtime().setDevice(device)  # and nothing that a graph capture forbids


class SideStream:
    """A stream beside another one of the current device, with a higher priority.

    Each thread has an event for it: threads that share one would record theirs between those of others.
    """

    def __init__(self, main: int):
        self._main = main
        self.raw: int = _runtime().streamCreateWithPriority(_runtime().streamNonBlocking, -1)
        self._events = threading.local()

    def follow(self) -> list[Callable[[], None]]:
        """Return what lets this stream wait for what the other one has so far: two calls, for this thread alone."""
        return self._waiting(self.raw, self._main)

    def join(self) -> list[Callable[[], None]]:
        """Return what lets the other stream wait for what this one has so far."""
        return self._waiting(self._main, self.raw)

    def _waiting(self, stream: int, other: int) -> list[Callable[[], None]]:
        if not hasattr(self._events, "event"):
            self._events.event = _Event()
        event, runtime = self._events.event.raw, _runtime()
        return [partial(runtime.eventRecord, event, other), partial(runtime.streamWaitEvent, stream, event)]


class _Event:
    """An event, which lasts as long as this, or until nobody waits for it any more."""

    def __init__(self) -> None:
        self.raw: int = _runtime().eventCreateWithFlags(_runtime().eventDisableTiming)
        weakref.finalize(self, _runtime().eventDestroy, self.raw).atexit = False


_sides: dict[tuple[int, int], SideStream] = {}


def side_stream(device: int, stream: int) -> SideStream:
    """Return the stream beside one of the current device: one for each, so that a capture of one ends there."""
    key = device, stream
    if key not in _sides:
        _sides.setdefault(key, SideStream(stream))
    return _sides[key]


def load_module(image: bytes, what: str, made_by: str) -> int:
    """Load a cubin or PTX into the current context; RwkvJitError if the driver is too old or the GPU another one."""
    try:
        module: int = driver().moduleLoadData(image)
    except driver().CUDADriverError as error:
        raise RwkvJitError(
            f"the driver (CUDA {driver_version()}) cannot load {what}, compiled by NVRTC {made_by}: {error}; "
            "`rwkv-jit doctor` compares driver, GPU and compiler"
        ) from error
    return module


def function(module: int, entry: str) -> int:
    """Return the driver's handle of a kernel in a module. Raises RwkvJitError where there is no kernel of that name."""
    try:
        handle: int = driver().moduleGetFunction(module, entry)
    except driver().CUDADriverError as error:
        raise RwkvJitError(f'entry: there is no kernel {entry!r} in this template (extern "C"): {error}') from error
    return handle


def allow_shared_bytes(function: int, count: int) -> None:
    """Allow a kernel so much dynamic shared memory, or more as before; raises RwkvJitError where a GPU has less."""
    api = driver()
    try:
        if api.funcGetAttribute(api.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function) < count:
            api.funcSetAttribute(function, api.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, count)
    except api.CUDADriverError as error:
        raise RwkvJitError(f"shared_bytes: this GPU does not give a block {count} bytes ({error})") from error


def driver_version() -> str:
    """Return the newest CUDA that the driver supports, e.g. "13.0"; "none" where there is no driver."""
    try:
        version = int(_runtime().driverGetVersion())
    except _runtime().CUDARuntimeError:
        version = 0
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def parameter_sizes(function: int, most: int | None = None) -> list[int] | None:
    """Return the bytes of each of a kernel's parameters, or of the first `most`; None before CUDA 12.4.

    One too many is an error of the driver, harmless but reported by compute-sanitizer.
    """
    get_info = _driver_function("cuFuncGetParamInfo")
    if get_info is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    arguments = ctypes.byref(offset), ctypes.byref(size)
    while len(sizes) != most and get_info(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *arguments) == 0:
        sizes.append(size.value)
    return sizes


@cache
def _driver_function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


def devices() -> list[str]:
    """Return name, architecture and memory of each GPU that the driver shows, e.g. "NVIDIA H200, sm_90, 139 GiB"."""
    begin, count = _driver_function("cuInit"), ctypes.c_int()
    if begin is None or begin(0) or _driver_function("cuDeviceGetCount")(ctypes.byref(count)):
        return []
    return list(map(_device, range(count.value)))


def _device(index: int) -> str:
    device, name, memory, number = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
    _driver_function("cuDeviceGet")(ctypes.byref(device), index)
    _driver_function("cuDeviceGetName")(name, len(name), device)
    _driver_function("cuDeviceTotalMem_v2")(ctypes.byref(memory), device)
    capability = ""
    for attribute in (75, 76):  # of the driver's CUdevice_attribute: major and minor
        _driver_function("cuDeviceGetAttribute")(ctypes.byref(number), attribute, device)
        capability += str(number.value)
    return f"{name.value.decode()}, sm_{capability}, {memory.value >> 30} GiB"


class _LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("__", ctypes.c_int * 15))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of the driver's CUlaunchAttributeID
_OVERLAPPING_SINCE = 12040  # CUDA of drivers that take such launches into a graph too


def prepared_launch(
    function: int, shape: Sequence[int], table: Any, overlaps: bool, stream: int
) -> tuple[Callable[[], int], Any]:
    """Return what launches on a stream, for one thread at a time, and what must be kept beside it.

    It returns the driver's status. `shape` is the grid, the block and the shared bytes, `table` the addresses of the
    arguments. A kernel that `overlaps` may begin beside the one before it, where the driver is not too old.
    """
    launch_ex = _driver_function("cuLaunchKernelEx")
    if launch_ex is None:
        raise RwkvJitError(f"the driver (CUDA {driver_version()}) is too old: kernels need one of CUDA 11.8 or later")
    launch_ex.argtypes = [ctypes.c_void_p] * 4
    attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
    config = _LaunchConfig(*shape, stream)
    if overlaps and _runtime().driverGetVersion() >= _OVERLAPPING_SINCE:
        config.attributes, config.attribute_count = ctypes.addressof(attribute), 1
    run = partial(launch_ex, ctypes.addressof(config), function, ctypes.addressof(table), 0)
    return run, (config, attribute, table)


def prepared_zero(address: ctypes.c_uint64, count: int, stream: int) -> Callable[[], int]:
    """Return what fills so many bytes with zeros in the order of a stream, where `address` says by then."""
    fill = _driver_function("cuMemsetD8Async")
    fill.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    return partial(fill, address, 0, count, stream)


def read_integers(address: int, count: int, stream: int) -> list[int]:
    """Return so many integers of 32 bits, when all that is on a raw stream has run."""
    integers = (ctypes.c_int * count)()
    runtime = _runtime()
    runtime.memcpyAsync(ctypes.addressof(integers), address, 4 * count, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)
    return list(integers)
