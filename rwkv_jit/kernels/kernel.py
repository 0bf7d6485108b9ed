"""Parameters to a kernel that can be launched: memory, then the cache on disk, then NVRTC."""

from __future__ import annotations

import _thread
import atexit
import copy
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from rwkv_jit.kernels import cache, compiler, cuda, env, identity, stats
from rwkv_jit.kernels.cache import Compiled, Resources
from rwkv_jit.kernels.errors import CompileError, NvrtcNotFoundError, RwkvJitError, UnsupportedConfigError
from rwkv_jit.kernels.template import Parameter, Rendered, Template

_PATIENCE_SECONDS = 5.0  # with a thread that does not begin


class Request(NamedTuple):
    """A kernel to find or compile. One stored for `also`, architectures that run on the same GPU, will do."""

    template: Template
    parameters: Mapping[str, Parameter]
    arch: str
    also: tuple[str, ...] = ()


class Kernel:
    """One compiled template: the kernels of one direction of one op, or of your template.

    Attributes
    ----------
    name, parameters, arch : the template, its parameters and the requested architecture
    source : str
        The rendered template.
    origin : str
        Where this request was served from: "compiled", "memory", "disk", "shared" (a directory of RWKVJIT_CACHE_PATH)
        or "bundle".
    compiler : str
        The NVRTC that compiled it: version and build-ids.
    registers, spill_bytes, shared_bytes : int
        Registers and bytes of spill stores and loads of a thread, shared memory of a block (static, or what a parameter
        SHARED_BYTES names): each the maximum over the kernels, 0 where the driver makes the machine code from PTX.
    """

    def __init__(self, request: Request, rendered: Rendered, compiled: Compiled, origin: str, compiler_name: str):
        self.name = rendered.name
        self.parameters = dict(request.parameters)
        self.arch = request.arch
        self.source = rendered.source
        self.origin = origin
        self.compiler = compiler_name
        self.resources = compiled.resources
        every = [Resources(), *compiled.resources.values()]
        self.registers = max(used.registers for used in every)
        self.spill_bytes = max(used.spill_bytes for used in every)
        self.shared_bytes = max(used.shared_bytes for used in every)
        self.target = compiled.target
        self.compile_seconds = compiled.seconds
        self._rendered = rendered
        self._options = compiler.key_options(request.arch)
        self._image = compiled.image
        self._modules: dict[int, Any] = {}

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

    def is_loaded(self, device: int) -> bool:
        """Return whether the kernel can be launched on a device without loading anything."""
        return device in self._modules

    def function(self, device: int, entry: str) -> int:
        """Return the driver's handle of a kernel. `device` must be current. Modules are never unloaded.

        Raise RwkvJitError if the driver cannot load it, there is none, or CUDA was in use before this process was
        forked.
        """
        check_not_forked()
        with _process.load_lock:
            if device not in self._modules:
                _process.has_used_cuda = True
                made_by = self.compiler.split(" ")[0]
                self._modules[device] = cuda.load_module(self._image, f"{self.name} for {self.target}", made_by)
        return cuda.function(self._modules[device], entry)

    def entry(self) -> tuple[str, bytes]:
        """Return the name and the bytes under which a cache directory or a bundle stores it."""
        digest = cache.key(self._rendered, self._options, self.arch, self.compiler)
        about = {"name": self.name, "arch": self.arch, "parameters": self.parameters, "compiler": self.compiler}
        compiled = Compiled(self._image, self.target, self.resources)
        return cache.file_name(self.name, self.arch, digest), cache.pack(digest, compiled, about)

    def __repr__(self) -> str:
        parameters = ", ".join(f"{k}={v}" for k, v in sorted(self.parameters.items()))
        return (
            f"Kernel({self.name}, {self.arch}, {parameters}; {self.origin}, {self.registers} registers, "
            f"{self.spill_bytes} B spilled, {self.shared_bytes} B shared)"
        )

    def _repr_html_(self) -> str:
        names = ("arch", "origin", "registers", "spill_bytes", "shared_bytes")
        about = {name.replace("_", " "): getattr(self, name) for name in names}
        rows = {**self.parameters, **about, "cubin bytes": len(self.cubin)}
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        return f"<table><caption>{self.name}</caption>{cells}</table>"


# ---- what this process holds -------------------------------------------------------------------------------------


class _Workers:
    """Threads that find or compile what waits. Where no thread can be had, whoever needs a kernel compiles it.

    Where memory is short a thread may end before it begins, and threading.Thread waits for its begin for ever.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Kernel], Request]] = deque()
        self.count = 0  # of those that work
        self.changed = threading.Condition()

    def submit(self, request: Request) -> Future[Kernel]:
        """Let a thread serve a request, where fewer work than may."""
        future: Future[Kernel] = Future()
        with self.changed:
            self.waiting.append((future, request))
            if self.count >= env.workers():
                return future
            self.count += 1
        place, begun = threading.Lock(), threading.Event()
        with suppress(RuntimeError, MemoryError):  # as many as there may be, or the interpreter is about to end
            _thread.start_new_thread(self._begin, (place, begun))
            begun.wait(_PATIENCE_SECONDS)
        if place.acquire(blocking=False):
            self._work()
        return future

    def _begin(self, place: threading.Lock, begun: threading.Event) -> None:
        if place.acquire(blocking=False):  # else another thread works here already
            try:
                begun.set()
            finally:
                self._work()

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.waiting:
                    self.count -= 1
                    self.changed.notify_all()
                    return
                future, request = self.waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(get(request))
                except BaseException as error:
                    future.set_exception(error)

    def finish(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.count)


class _Process:
    def __init__(self, forked_from_cuda: bool = False):
        self.kernels: dict[Any, Kernel] = {}
        self.failures: dict[str, Exception] = {}  # by the digest of the request; never on disk
        self.locks: dict[Any, threading.Lock] = {}  # one thread at a time finds or compiles one kernel
        self.registry_lock = threading.Lock()
        self.load_lock = threading.Lock()
        self.workers = _Workers()
        self.has_used_cuda = False
        self.forked_from_cuda = forked_from_cuda


_process = _Process()


def _reset_after_fork() -> None:
    global _process
    _process = _Process(_process.has_used_cuda or _process.forked_from_cuda)
    stats.reset_after_fork()
    cache.reset_after_fork()


atexit.register(lambda: _process.workers.finish())  # a thread that is stopped inside NVRTC would end the process badly
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def check_not_forked() -> None:
    """Check that CUDA can be used here. Raises RwkvJitError where the process was forked from one that had used it."""
    if _process.forked_from_cuda:
        raise RwkvJitError(
            "CUDA was in use before this process was forked, and does not survive a fork; start processes with "
            "multiprocessing's 'spawn' method"
        )


def forget() -> None:
    """Drop the kernels and failures this process remembers; what is loaded on a device stays loaded."""
    with _process.registry_lock:
        _process.kernels.clear()
        _process.failures.clear()
    cache.forget()


# ---- finding and compiling ---------------------------------------------------------------------------------------


def get(request: Request) -> Kernel:
    """Return the kernel for a request.

    Raise UnsupportedConfigError for a constraint of the template, CompileError or NvrtcNotFoundError if it is nowhere
    and cannot be compiled, and ValueError for a variable of the environment.
    """
    served = _serve(request, may_compile=True)
    assert served is not None
    return served


def get_all(requests: Sequence[Request], soon: Sequence[Request] = ()) -> list[Kernel]:
    """Return several kernels, which compile side by side, and behind them, with nobody waiting, those needed `soon`."""
    if len(requests) == 1 and not soon:
        return [get(*requests)]  # in this thread
    return _wait(requests, _begin([*requests, *soon]))


def get_most(
    requests: Sequence[Request], rest: Sequence[Request], soon: Sequence[Request] = ()
) -> tuple[list[Kernel], list[Kernel | Future[Kernel]]]:
    """Return several kernels as `get_all` does, and futures of the rest; if nothing may compile, all are waited for."""
    count = len(requests)
    if env.assert_cached():
        kernels = get_all([*requests, *rest], soon)
        return kernels[:count], [*kernels[count:]]
    served = _begin([*requests, *soon, *rest])
    later = [x or get_async(request) for request, x in zip(rest, served[count + len(soon) :], strict=True)]
    return _wait(requests, served), later


def _begin(requests: Sequence[Request]) -> list[Kernel | Future[Kernel] | None]:
    """Return stored kernels, futures, which have the errors, of those that nobody compiles, and None for others."""
    stored = [_serve(request, may_compile=False) for request in requests]
    return [
        known or (None if _lock(memory_key(request)).locked() else get_async(request))
        for request, known in zip(requests, stored, strict=True)
    ]


def _wait(requests: Sequence[Request], served: Sequence[Kernel | Future[Kernel] | None]) -> list[Kernel]:
    """Return the kernels of requests, which come first among those that were begun."""
    own = served[: len(requests)]
    try:
        # What another thread compiles is waited for here: behind its lock, and not behind all that the pool has to do.
        return [
            get(request) if x is None else x.result() if isinstance(x, Future) else x
            for request, x in zip(requests, own, strict=True)
        ]
    finally:
        for x in own:
            if isinstance(x, Future):
                x.cancel()  # where one has failed


def get_async(request: Request) -> Future[Kernel]:
    """Find or compile a kernel in the background; in this thread where none can be started."""
    return _process.workers.submit(request)


def is_loaded(request: Request, device: int) -> bool:
    """Return whether a request can be launched on a device without compiling or loading anything."""
    kernel = _process.kernels.get(memory_key(request))
    return kernel is not None and kernel.is_loaded(device)


def memory_key(request: Request) -> Any:
    """Return what tells requests of this process apart; 1, True and 1.0 are equal, but not one parameter."""
    parameters = tuple(sorted((name, repr(value)) for name, value in request.parameters.items()))
    return request.template, parameters, request.arch, env.lineinfo()


def _serve(request: Request, may_compile: bool) -> Kernel | None:
    """Find a kernel, and compile it where it is nowhere and may be compiled; else do not wait for who compiles it."""
    key = memory_key(request)
    lock = _lock(key)
    if not lock.acquire(blocking=may_compile):
        return None
    try:
        served = _process.kernels.get(key)
        if served is not None:
            served = copy.copy(served)  # the same module; only where this request was served from differs
            served.origin = "memory"
        else:
            env.check()  # every time, also where nothing is compiled
            rendered = request.template.render(request.parameters)
            served = _stored(request, rendered, _known_compilers())
            if served is None and may_compile:
                served = _compile_once(request, rendered)
            if served is not None:
                _process.kernels[key] = served
    finally:
        lock.release()
    if served is not None:
        event = {name: getattr(served, name) for name in ("origin", "name", "arch", "parameters", "compile_seconds")}
        stats.tell(event)
    return served


def _lock(key: Any) -> threading.Lock:
    with _process.registry_lock:
        return _process.locks.setdefault(key, threading.Lock())


def _known_compilers() -> Iterator[str]:
    """Yield the compilers whose kernels may serve, without loading NVRTC: this machine's, and those of bundles."""
    own = identity.assumed_identity()
    if own is not None:
        yield own
    yield from (name for name in cache.compilers() if name != own)


def _stored(request: Request, rendered: Rendered, compilers: Iterator[str] | tuple[str, ...]) -> Kernel | None:
    for compiler_name in compilers:
        for arch in (request.arch, *request.also):
            digest = cache.key(rendered, compiler.key_options(arch), compiler.check_arch(arch), compiler_name)
            stored = cache.get(rendered.name, arch, digest)
            if stored is not None:
                return Kernel(request._replace(arch=arch), rendered, *stored, compiler_name)
    return None


def _compile_once(request: Request, rendered: Rendered) -> Kernel:
    """Compile, or wait for the process of this node that does; its lock is for all compilers: waiters load none."""
    digest, what = cache.key(rendered, compiler.key_options(request.arch), request.arch, ""), _called(request)
    failure = _process.failures.get(digest)
    if failure is not None:
        raise failure.with_traceback(None)
    with cache.one_at_a_time(digest, what):
        stored = _stored(request, rendered, _known_compilers()) or _stored_by_loaded_compiler(request, rendered)
        if stored is not None:
            return stored
        if env.assert_cached():
            raise CompileError(f"RWKVJIT_ASSERT_CACHED is set and {what} is not in the cache")
        try:
            compiled = _compile(request, rendered)
        except (CompileError, UnsupportedConfigError) as error:
            if not isinstance(error, CompileError) or error.is_lasting:
                _process.failures[digest] = error
            raise
        return _keep(request, rendered, compiled)


def _called(request: Request) -> str:
    return f"{request.template.name} for {request.arch}"


def _stored_by_loaded_compiler(request: Request, rendered: Rendered) -> Kernel | None:
    try:
        return _stored(request, rendered, (identity.identity(),))
    except NvrtcNotFoundError:
        if not env.assert_cached():
            raise
        return None


def _compile(request: Request, rendered: Rendered) -> Compiled:
    request.template.check(request.parameters)
    where = "" if env.cache_is_on() else "; the cache on disk is off"
    if env.cache_is_lasting():
        where = f"; later processes find it in {env.cache_dir()}"
    with stats.say_if_slow(f"compiling {_called(request)}{where}"):
        compiled = compiler.compile(rendered, request.arch, request.parameters)
    stats.count("compile_seconds", compiled.seconds)
    stats.logger.info("compiled %s in %.0f ms", _called(request), 1e3 * compiled.seconds)
    return compiled


def _keep(request: Request, rendered: Rendered, compiled: Compiled) -> Kernel:
    """Publish a kernel that was compiled, and if a variable says so its source."""
    if env.cache_fault():
        stats.say_once(f"kernels are kept in memory only: {env.cache_fault()}", key="no directory")
    kernel = Kernel(request, rendered, compiled, "compiled", identity.identity())
    cache.put(*kernel.entry())
    if env.keep_source():
        try:
            compiler.save_source(cache.source_folder("sources"), rendered, compiled.target)
        except OSError as error:
            stats.say_once(f"sources are not kept: {error}", key="sources")
    return kernel
