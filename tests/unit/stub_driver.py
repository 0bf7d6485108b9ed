"""GPUs that only take notes: a driver, and torch's view of the devices, for machines that have neither."""

import contextlib
import ctypes
import functools
import gc
import os
import re
import struct
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch._dynamo  # which takes the functions of torch for those that it finds when it is imported
from torch._subclasses import fake_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rwkv_jit
from rwkv_jit.call import custom, tensors
from rwkv_jit.kernels import cuda, kernel
from rwkv_jit.kernels.cache import Compiled, Resources
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.template import Rendered, Template

_LETTERS = {"i64": "q", "int": "i", "unsigned": "I", "float": "f", "double": "d", "bool": "?"}
_STRUCT = r"struct (\w+) \{ (i64|int) ([\w, \[\]]+); \};"  # of numbers, as kernels take them


@functools.cache
def letters_of(template, entry, has_w0=False):
    """Struct's letters for the arguments of a kernel by their names, from the text of its template."""
    text = "\n".join([template.body, *(header for _, header in template.headers)])
    several = {name: f"{_count(members)}{_LETTERS[kind]}" for name, kind, members in re.findall(_STRUCT, text)}
    letters = {**_LETTERS, **several}
    letters["DecayStrides"] = "3qQ" if has_w0 else "3q"  # as decay_bias.cuh chooses
    return {x.name: "Q" if x.type.endswith("*") else letters[x.type] for x in template.arguments(entry)}


def _count(members):
    """How many numbers members of a struct are, of which some are arrays."""
    return sum(int(re.search(r"\[(\d+)\]", x)[1]) if "[" in x else 1 for x in members.split(","))


class Launch(NamedTuple):
    """What the driver was asked for; `arguments` are the bytes at the addresses of its table."""

    current_device: int
    device: int
    entry: str
    grid: tuple
    block: tuple
    shared_bytes: int
    stream: int
    arguments: tuple
    # Of kernels of the library:
    request: kernel.Request | None
    letters: dict  # struct's, by the names of the arguments
    overlaps: bool = False

    @property
    def template(self):
        """The name of the template, as kernels of several have one entry."""
        return self.request.template.name

    @property
    def parameters(self):
        """Those of the template."""
        return self.request.parameters

    @property
    def named(self):
        """The arguments by the names of the template: addresses and numbers, and tuples of several numbers."""
        given = zip(self.letters.items(), self.arguments, strict=True)
        numbers = {name: struct.unpack(f"={letters}", packed) for (name, letters), packed in given}
        return {name: x if len(x) > 1 else x[0] for name, x in numbers.items()}

    @property
    def addresses(self):
        """The pointers by their names."""
        return {name: x for name, x in self.named.items() if self.letters[name] == "Q"}

    @property
    def numbers(self):
        """The other arguments by their names."""
        return {name: x for name, x in self.named.items() if self.letters[name] != "Q"}


class Module(NamedTuple):
    """A loaded image."""

    device: int
    image: bytes


class Gpus:
    """A driver with one GPU per architecture. It knows how many bytes each argument of a kernel has."""

    class CUDADriverError(Exception):
        """What CuPy raises, made of the driver's number."""

        def __init__(self, status):
            super().__init__({1: "CUDA_ERROR_INVALID_VALUE", 201: "CUDA_ERROR_INVALID_CONTEXT"}[status])
            self.status = status

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self, archs=("sm_80", "sm_90")):
        self.archs = archs
        self.current = 0
        self.capturing = False
        self.sizes = {}  # bytes of the arguments by entry; those of the library's kernels are read from templates
        self.modules = []
        self.functions = []
        self.order = []  # launches, ("zero", address, bytes, stream) and ("wait", stream, the one it waits for)
        self.streams = []
        self.events = []
        self.shared_bytes = {}
        self.before_reading = lambda: None
        self.refuses = False
        self.version = 12_040
        self.with_context = set()  # threads that have one; those that make a plan get it
        # Of `on_gpu` alone:
        self.home = 0  # the device of all tensors
        self.multiprocessors = 132
        self.resident_blocks = 2  # of a multiprocessor
        self.requests = {}  # those that were served, by image
        self.while_running = lambda launch: None  # what kernels do
        self.reading = ()  # what is read when its stream is waited for

    @property
    def launches(self):
        """All launches in their order."""
        return [x for x in self.order if isinstance(x, Launch)]

    @property
    def asked(self):
        """The library's kernels that were found, each at its first time."""
        return list(self.requests.values())

    def use(self, arch):
        """Let all GPUs be of an architecture."""
        self.archs = (arch,) * len(self.archs)

    def take(self):
        """Return the launches since the last time."""
        taken, self.order = self.launches, []
        return taken

    def exchange(self, device):
        before, self.current = self.current, device if device >= 0 else self.current
        return before

    def make_current(self, device):
        assert device == self.current
        self.with_context.add(threading.get_ident())

    def load_module(self, image, what, made_by):
        if self.archs[self.current].encode() not in image:
            raise RwkvJitError(f"the driver cannot load {what}")
        self.modules.append(Module(self.current, image))
        return self.modules[-1]

    def function(self, module, entry):
        assert self.current == module.device
        request = self.requests.get(module.image)
        letters = {}
        if request is not None:
            letters = letters_of(request.template, entry, request.parameters.get("T_W0", "void") != "void")
        self.functions.append((module, entry, letters))
        return len(self.functions) - 1

    def parameter_sizes(self, function, most=None):
        _, entry, letters = self.functions[function]
        own = [struct.calcsize(f"={x}") for x in letters.values()] or None
        sizes = self.sizes.get(entry, own)
        return None if sizes is None else sizes[:most]

    def driver_function(self, name):
        """Functions that are called without CuPy; they take attributes, like those of ctypes."""
        known = {"cuLaunchKernelEx": self.launch_by_config, "cuMemsetD8Async": self.fill}
        return functools.partial(known[name]) if name in known else None

    def launch_by_config(self, config, function, table, extra):
        """A launch, which says in an attribute if it overlaps; returns what the driver refuses with."""
        config = cuda._LaunchConfig.from_address(config)
        if config.attribute_count:
            attribute = (ctypes.c_int * 3).from_address(config.attributes)
            assert (config.attribute_count, attribute[0], attribute[2]) == (1, 6, 1)
        shape = [getattr(config, name) for name, _ in config._fields_[:7]]
        try:
            overlaps = bool(config.attribute_count)
            self.launchKernel(function, *shape, config.stream, table, extra, overlaps=overlaps)
        except self.CUDADriverError as error:
            return error.status
        return 0

    def launchKernel(self, function, *rest, overlaps=False):  # noqa: N802
        if self.refuses:
            raise self.CUDADriverError(1)
        if threading.get_ident() not in self.with_context:
            raise self.CUDADriverError(201)
        module, entry, letters = self.functions[function]
        self.before_reading()
        sizes = self.parameter_sizes(function)
        table = (ctypes.c_void_p * len(sizes)).from_address(rest[8]) if sizes else ()
        arguments = tuple(ctypes.string_at(address, size) for address, size in zip(table, sizes, strict=True))
        launch = Launch(
            self.current, module.device, entry, rest[:3], rest[3:6], rest[6], rest[7], arguments,
            self.requests.get(module.image), letters, overlaps,
        )  # fmt: skip
        self.order.append(launch)
        self.while_running(launch)

    def funcSetAttribute(self, function, attribute, value):  # noqa: N802
        self.shared_bytes[function] = value

    def funcGetAttribute(self, attribute, function):  # noqa: N802
        return self.shared_bytes.get(function, 48 * 1024)

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared_bytes):  # noqa: N802
        return self.resident_blocks

    # Of the runtime:
    def driverGetVersion(self):  # noqa: N802
        return self.version

    streamNonBlocking = eventDisableTiming = 1  # noqa: N815
    setDevice = make_current  # noqa: N815

    memcpyDeviceToHost = 2  # noqa: N815

    def memcpyAsync(self, target, source, count, kind, stream):  # noqa: N802
        assert kind == self.memcpyDeviceToHost
        self.reading = stream, target, source, count

    def streamSynchronize(self, stream):  # noqa: N802
        assert self.reading[0] == stream
        ctypes.memmove(*self.reading[1:])

    def fill(self, address, value, count, stream):
        """Write zeros, and return a status."""
        ctypes.memset(address.value, value, count)
        self.order.append(("zero", address.value, count, stream))
        return 0

    def streamCreateWithPriority(self, flags, priority):  # noqa: N802
        assert (flags, priority) == (self.streamNonBlocking, -1)
        self.streams.append(self.current)
        return 1000 + len(self.streams)

    def eventCreateWithFlags(self, flags):  # noqa: N802
        assert flags == self.eventDisableTiming
        self.events.append(None)
        return len(self.events) - 1

    def eventRecord(self, event, stream):  # noqa: N802
        assert self.events[event] != "destroyed"
        self.events[event] = stream

    def streamWaitEvent(self, stream, event):  # noqa: N802
        self.order.append(("wait", stream, self.events[event]))

    def eventDestroy(self, event):  # noqa: N802
        self.events[event] = "destroyed"

    def serve(self, request, rendered, _):
        """A kernel of the library, as if it lay in the cache."""
        image = f"{request.arch} {request.template.name} {len(self.requests)}".encode()
        self.requests[image] = request
        return kernel.Kernel(request, rendered, Compiled(image, request.arch, {}), "disk", "12.9 0123")

    def make_kernel(self, arch="sm_80", entries=("scale",), target=None, image=None):
        """A kernel as the service returns it; its image can be loaded where the architecture is the same."""
        request = kernel.Request(Template("mine", "", ()), {}, arch)
        compiled = Compiled(
            image or f"{arch} code".encode(), target or arch, {entry: Resources(16) for entry in entries}
        )
        return kernel.Kernel(request, Rendered("mine", "", ()), compiled, "compiled", "12.9 0123")

    def make_own(self, text="", **given):
        """A kernel of a template of one's own, with this text."""
        return custom.OwnKernel(self.make_kernel(**given), Template("mine", text, ()))


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, an sm_80 and an sm_90, in the place of CuPy's driver and torch's devices."""
    made = Gpus()
    monkeypatch.setattr(kernel, "_process", kernel._Process())
    for layer in ("driver", "_runtime"):
        monkeypatch.setattr(cuda, layer, lambda: made)
    for name in ("load_module", "function", "parameter_sizes"):
        monkeypatch.setattr(cuda, name, getattr(made, name))
    monkeypatch.setattr(cuda, "_driver_function", made.driver_function)
    monkeypatch.setattr(cuda, "_sides", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(int(made.archs[device][3:]), 10))
    monkeypatch.setattr(torch.cuda, "_exchange_device", made.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", made.exchange)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    with contextlib.ExitStack() as cleared:
        for clear in (tensors._capability.cache_clear, custom._launches.clear):
            clear()
            cleared.callback(clear)
        yield made


@pytest.fixture
def on_gpu(gpus, nothing_known, monkeypatch):
    """Every tensor in the memory of this machine says that it is on a GPU: that of `home`, by default an sm_80.

    All calls go their whole way from there, but that kernels come from nowhere and do nothing: `archs` says which GPUs
    there are, and `while_running` what kernels do. New tensors are made in the same memory, and zeros are written.
    """
    cpu, real_device = torch.device("cpu"), torch._C.TensorBase.device.__get__

    # Where torch is built for CUDA, the first tensor without memory would make a real one.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)

    def device(x):
        real = real_device(x)
        return torch.device("cuda", gpus.home) if real == cpu else real

    def in_memory(make):
        def made(*arguments, device=None, **more):
            # Fakes have the device that is asked for.
            is_watched = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
            return make(*arguments, device=device if is_watched or str(device) == "meta" else None, **more)

        return made

    def new(shape, strides, dtype):
        assert gpus.current == gpus.home
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(torch.Tensor, "device", property(device), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.device.type == "cuda"), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: x.device.index, raising=False)
    for name in ("empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange", "linspace", "rand", "randn"):
        monkeypatch.setattr(torch, name, in_memory(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(tensors, "_capability", lambda device: gpus.archs[device])
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: gpus.multiprocessors)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "new", new)
    monkeypatch.setattr(kernel, "_stored", gpus.serve)
    return gpus


PACKAGE = str(Path(rwkv_jit.__file__).parent)
LAUNCHES = ("launch.py", "cuda.py")  # each launch takes one function, however many there are


def profiled(function):
    """Run a function; return the codes of the package's functions that it enters, and its result."""
    codes = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            codes.append(frame.f_code)

    before = sys.getprofile()
    gc.disable()  # callbacks of tensors of calls before are no part of this one
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return codes, result


def called(function):
    """The functions of the package that are called, by name."""
    return [code.co_name for code in profiled(function)[0]]


def frames(function):
    """Return how many functions of the package a call enters, but for launches, and its result."""
    codes, result = profiled(function)
    return sum(Path(code.co_filename).name not in LAUNCHES and code.co_name != "launch" for code in codes), result


def entered(function):
    """The same of a call that is known, without the check of tensors that is no Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "likeness", lambda arrays: lambda *_: True)
        function()  # what later calls find is kept
        return called(function)


class Launching(TorchDispatchMode):
    """Notes ops of torch that launch a kernel on a GPU: neither views nor memory, nor ours, which the driver has."""

    FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "promote_types"}
    OURS = {"layer_step", "update_states", "gated_norm_fwd"}
    PRODUCTS = {"mm", "addmm"}

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        norm = F.rms_norm
        monkeypatch.setattr(F, "rms_norm", lambda *given: self.names.append("rms_norm") or self.unnoted(norm, *given))

    def unnoted(self, norm, *given):
        """One kernel on a GPU, and several here."""
        before = len(self.names)
        y = norm(*given)
        del self.names[before:]
        return y

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        is_view = any(x.alias_info and not x.alias_info.is_write for x in op._schema.returns)
        name = op.__name__.partition(".")[0]
        if not is_view and name not in self.FREE | self.OURS:
            self.names.append(name)
        return op(*args, **(kwargs or {}))

    @property
    def others(self):
        """All but products."""
        return [name for name in self.names if name not in self.PRODUCTS]

    @property
    def products(self):
        """How many products there are."""
        return len(self.names) - len(self.others)


def cuda_tensor(device=0, size=3):
    """A tensor in the memory of this machine that says it is on a GPU."""

    class CudaTensor(torch.Tensor):
        pass

    CudaTensor.device = torch.device("cuda", device)
    return torch.zeros(size).as_subclass(CudaTensor)


def packed(letters, *values):
    """The bytes of each value by its struct letter."""
    return tuple(struct.pack(f"={letter}", value) for letter, value in zip(letters, values, strict=True))


def in_fork(function):
    """Run a function in a forked child; returns "done", or what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            os.write(writer, b"done")
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text
