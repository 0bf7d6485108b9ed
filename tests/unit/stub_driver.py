"""GPUs that only take notes: a driver, and torch's view of the devices, for machines that have neither."""

import contextlib
import ctypes
import os
import struct
import threading
from typing import NamedTuple

import pytest
import torch

from rwkv_jit import cuda, custom, kernel, tensors
from rwkv_jit.cache import Compiled, Resources
from rwkv_jit.errors import RwkvJitError
from rwkv_jit.template import Rendered, Template


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


class Module(NamedTuple):
    """A loaded image."""

    device: int
    image: bytes


class Gpus:
    """A driver with one GPU per architecture. It knows how many bytes each argument of a kernel has."""

    class CUDADriverError(Exception):
        """What CuPy raises."""

        def __init__(self, text, status=1):
            super().__init__(text)
            self.status = status

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self, archs=("sm_80", "sm_90")):
        self.archs = archs
        self.current = 0
        self.capturing = False
        self.sizes = {}  # bytes of the arguments, by entry
        self.modules = []
        self.functions = []
        self.launches = []
        self.shared_bytes = {}
        self.before_reading = lambda: None
        self.refuses = False
        self.with_context = set()  # threads that have one; those that make a plan get it

    def exchange(self, device):
        before, self.current = self.current, device if device >= 0 else self.current
        return before

    def make_current(self, device):
        assert device in (self.current, None)  # None: of a CPU tensor that is taken for one of a GPU
        self.with_context.add(threading.get_ident())

    def load_module(self, image, what, made_by):
        if self.archs[self.current].encode() not in image:
            raise RwkvJitError(f"the driver cannot load {what}")
        self.modules.append(Module(self.current, image))
        return self.modules[-1]

    def function(self, module, entry):
        self.functions.append((module, entry))
        return len(self.functions) - 1

    def parameter_sizes(self, function):
        return self.sizes.get(self.functions[function][1])

    def launchKernel(self, function, *rest):  # noqa: N802
        if self.refuses:
            raise self.CUDADriverError("CUDA_ERROR_INVALID_VALUE")
        if threading.get_ident() not in self.with_context:
            raise self.CUDADriverError("CUDA_ERROR_INVALID_CONTEXT", 201)
        module, entry = self.functions[function]
        self.before_reading()
        sizes = self.sizes[entry]
        table = (ctypes.c_void_p * len(sizes)).from_address(rest[8]) if sizes else ()
        arguments = tuple(ctypes.string_at(address, size) for address, size in zip(table, sizes, strict=True))
        self.launches.append(
            Launch(self.current, module.device, entry, rest[:3], rest[3:6], rest[6], rest[7], arguments)
        )

    def funcSetAttribute(self, function, attribute, value):  # noqa: N802
        self.shared_bytes[function] = value

    def funcGetAttribute(self, attribute, function):  # noqa: N802
        return self.shared_bytes.get(function, 48 * 1024)

    def make_kernel(self, arch="sm_80", entries=("scale",), target=None, image=None):
        """A kernel as the service returns it; its image can be loaded where the architecture is the same."""
        request = kernel.Request(Template("mine", "", ()), {}, arch)
        compiled = Compiled(
            image or f"{arch} code".encode(), target or arch, {entry: Resources(16) for entry in entries}
        )
        return kernel.Kernel(request, Rendered("mine", "", ()), compiled, "compiled", "12.9 0123")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, an sm_80 and an sm_90, in the place of CuPy's driver and torch's devices."""
    made = Gpus()
    monkeypatch.setattr(kernel, "_process", kernel._Process())
    monkeypatch.setattr(cuda, "driver", lambda: made)
    for name in ("make_current", "load_module", "function", "parameter_sizes"):
        monkeypatch.setattr(cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(int(made.archs[device][3:]), 10))
    monkeypatch.setattr(torch.cuda, "_exchange_device", made.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", made.exchange)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    with contextlib.ExitStack() as cleared:
        for clear in (tensors._capability.cache_clear, custom._plans.clear):
            clear()
            cleared.callback(clear)
        yield made


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
