"""Parameters to a kernel that can be launched: memory, then disk, then NVRTC."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from rwkv_jit import cache, compiler, cuda, env, stats, template
from rwkv_jit.compiler import Compiled
from rwkv_jit.errors import CompileError, RwkvJitError
from rwkv_jit.template import Parameter, Rendered

Request = tuple[str, Mapping[str, Parameter], str]  # template, parameters, architecture
Source = Callable[[Any, str, Mapping[str, Parameter], str], "Kernel | None"]


class Kernel:
    """One compiled template: the kernels of one direction of one op.

    Attributes
    ----------
    name, parameters, arch : the template, its parameters and the architecture asked for
    source : str
        The rendered template.
    origin : str
        "compiled", "disk" or "memory": where this request was served from.
    """

    def __init__(
        self, rendered: Rendered, parameters: Mapping[str, Parameter], arch: str, compiled: Compiled, origin: str
    ):
        self.name = rendered.name
        self.parameters = dict(parameters)
        self.arch = arch
        self.source = rendered.source
        self.origin = origin
        self.resources = compiled.resources
        self.target = compiled.target
        self.compile_seconds = compiled.seconds
        self._rendered = rendered
        self._image = compiled.image
        self._modules: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def cubin(self) -> bytes:
        """The machine code; empty where the driver makes it from PTX."""
        return self._image if self.target.startswith("sm_") else b""

    @cached_property
    def ptx(self) -> str:
        """The PTX, compiled when it is first read."""
        if self.target.startswith("compute_"):
            return self._image.decode()
        return compiler.ptx(self._rendered, self.arch, self.parameters)

    def _most(self, resource: str) -> int:
        return max((getattr(used, resource) for used in self.resources.values()), default=0)

    @property
    def registers(self) -> int:
        """Registers per thread, the maximum over the kernels."""
        return self._most("registers")

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and loads, the maximum over the kernels."""
        return self._most("spill_bytes")

    @property
    def shared_bytes(self) -> int:
        """Static shared memory per block, the maximum over the kernels."""
        return self._most("shared_bytes")

    def function(self, device: int, entry: str) -> int:
        """Return the driver's handle of a kernel. `device` must be current. Modules are never unloaded."""
        with self._lock:
            if device not in self._modules:
                self._modules[device] = cuda.load_module(self._image)
        handle: int = self._modules[device].get_function(entry).ptr
        return handle

    def __repr__(self) -> str:
        parameters = ", ".join(f"{k}={v}" for k, v in sorted(self.parameters.items()))
        return (
            f"Kernel({self.name}, {self.arch}, {parameters}; {self.origin}, {self.registers} registers, "
            f"{self.spill_bytes} B spilled, {self.shared_bytes} B shared)"
        )

    def _repr_html_(self) -> str:
        rows = {
            **self.parameters,
            "arch": self.arch,
            "origin": self.origin,
            "registers": self.registers,
            "spill bytes": self.spill_bytes,
            "shared bytes": self.shared_bytes,
            "cubin bytes": len(self.cubin),
        }
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        return f"<table><caption>{self.name}</caption>{cells}</table>"


_memory: dict[Any, Kernel] = {}
_locks: dict[Any, threading.Lock] = {}
_registry_lock = threading.Lock()


def get(name: str, parameters: Mapping[str, Parameter], arch: str) -> Kernel:
    """Return the kernel for a template, its parameters and an architecture.

    Raises
    ------
    UnsupportedConfigError
        A constraint of the template does not hold.
    CompileError, NvrtcNotFoundError
        The kernel is nowhere and cannot be compiled.
    """
    kernel = _serve(name, parameters, arch, (_memory_hit, _disk_hit, _compile))
    assert kernel is not None
    return kernel


def get_all(requests: Iterable[Request]) -> list[Kernel]:
    """Return several kernels; those that are nowhere compile side by side, as NVRTC releases the interpreter lock."""
    wanted = list(requests)
    found: list[Kernel | None] = [_serve(*request, (_memory_hit, _disk_hit)) for request in wanted]
    missing = [request for request, kernel in zip(wanted, found, strict=True) if kernel is None]
    if len(missing) > 1:
        with ThreadPoolExecutor(len(missing)) as pool:
            compiled = iter(list(pool.map(lambda request: get(*request), missing)))
    else:
        compiled = iter([get(*request) for request in missing])
    return [next(compiled) if kernel is None else kernel for kernel in found]


def _serve(name: str, parameters: Mapping[str, Parameter], arch: str, sources: Sequence[Source]) -> Kernel | None:
    """Ask the sources in turn; one thread at a time for one kernel."""
    memory_key = (name, tuple(sorted(parameters.items())), arch)
    with _registry_lock:
        lock = _locks.setdefault(memory_key, threading.Lock())
    with lock:
        for source in sources:
            kernel = source(memory_key, name, parameters, arch)
            if kernel is not None:
                return kernel
    return None


def _memory_hit(memory_key: Any, name: str, parameters: Mapping[str, Parameter], arch: str) -> Kernel | None:
    found = _memory.get(memory_key)
    if found is None:
        return None
    stats.count("memory")
    served = copy.copy(found)  # the same module; only where this request was served from differs
    served.origin = "memory"
    return served


def _disk_hit(memory_key: Any, name: str, parameters: Mapping[str, Parameter], arch: str) -> Kernel | None:
    """Look under the compiler that an earlier process noted, as a hit then loads no NVRTC; then under the true one."""
    rendered = template.render(name, parameters)
    looked_for = None
    for identity in (compiler.assumed_identity, compiler.identity):
        compiler_name = identity()
        if compiler_name is None or compiler_name == looked_for:
            continue
        looked_for = compiler_name
        digest = cache.key(rendered, compiler.options(arch), compiler.check_arch(arch), compiler_name)
        compiled = cache.get(name, arch, digest)
        if compiled is not None:
            stats.count("disk")
            _memory[memory_key] = kernel = Kernel(rendered, parameters, arch, compiled, "disk")
            return kernel
    return None


def _compile(memory_key: Any, name: str, parameters: Mapping[str, Parameter], arch: str) -> Kernel:
    if env.assert_cached():
        raise CompileError(
            f"RWKVJIT_ASSERT_CACHED is set and {name} for {arch} with {dict(parameters)} is not in the cache"
        )
    stats.configure_logging()
    template.check_parameters(name, parameters)
    rendered = template.render(name, parameters)
    compiled = compiler.compile(rendered, arch, parameters)
    stats.count("compiled", compiled.seconds)
    stats.logger.info("compiled %s for %s in %.0f ms", name, arch, 1e3 * compiled.seconds)
    digest = cache.key(rendered, compiler.options(arch), arch, compiler.identity())
    about = {"name": name, "arch": arch, "parameters": dict(parameters), "compiler": compiler.identity()}
    cache.put(name, arch, digest, compiled, about)
    _memory[memory_key] = kernel = Kernel(rendered, parameters, arch, compiled, "compiled")
    return kernel


def forget() -> None:
    """Drop the kernels this process remembers; what is loaded on a device stays loaded."""
    with _registry_lock:
        _memory.clear()


class Plan:
    """Everything of a launch that does not change between calls with one signature.

    The kernel's arguments are `pointers` addresses followed by `constants`, already packed. A launch writes the
    addresses and calls the driver. The argument block is per thread, as the launch releases the interpreter lock.
    """

    def __init__(
        self,
        kernel: Kernel,
        entry: str,
        device: int,
        grid: tuple[int, int],
        num_threads: int,
        pointers: int,
        constants: Sequence[bytes],
    ):
        self.kernel = kernel  # keeps the module alive
        self.function = kernel.function(device, entry)
        self.grid = grid
        self.num_threads = num_threads
        self.pointers = pointers
        self.constants = tuple(constants)
        self._launch = cuda.driver().launchKernel
        self._blocks = threading.local()

    def _block(self) -> tuple[Any, int]:
        """Return this thread's addresses (an array to write to) and the driver's table of arguments."""
        try:
            made: tuple[Any, int, Any] = self._blocks.made
        except AttributeError:
            addresses = (ctypes.c_uint64 * self.pointers)()
            packed = [ctypes.create_string_buffer(constant, len(constant)) for constant in self.constants]
            first = ctypes.addressof(addresses)
            places = [first + 8 * i for i in range(self.pointers)] + [ctypes.addressof(p) for p in packed]
            table = (ctypes.c_void_p * len(places))(*places)
            made = self._blocks.made = (addresses, ctypes.addressof(table), (table, packed))
        return made[0], made[1]

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a raw stream; an empty grid launches nothing."""
        if len(addresses) != self.pointers:
            raise RwkvJitError(f"{self.kernel.name} takes {self.pointers} addresses, got {len(addresses)}")
        if 0 in self.grid:
            return
        array, table = self._block()
        array[:] = addresses
        self._launch(self.function, self.grid[0], self.grid[1], 1, self.num_threads, 1, 1, 0, stream, table, 0)
