"""Every test of this tier has a cache of its own."""

import gc
import os
import pickle
from dataclasses import astuple, replace
from functools import partial
from hashlib import sha256

import images
import ledger
import ptx_machine
import pytest
import torch
from stub_driver import gpus, on_gpu  # noqa: F401, fixtures that take notes of launches

from rwkv_jit.call import plan, tensors
from rwkv_jit.kernels import cache, compiler, cuda, kernel


@pytest.fixture(autouse=True)
def _fresh_service(fresh_service):
    """Nothing is shared with the test before."""


@pytest.fixture
def compiled_once(request, monkeypatch, tmp_path_factory):
    """What NVRTC made of a source in this run, it need not make again: for tests that are not about NVRTC itself.

    Everything above it runs as ever: requests, the cache, the counters. All that it makes is checked. A test marked
    anew compiles all the same.
    """
    if request.node.get_closest_marker("anew"):
        return
    root = tmp_path_factory.getbasetemp()
    made = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "compiled"  # which the workers share
    made.mkdir(exist_ok=True)
    run = compiler._run

    def remembered(rendered, target, parameters):
        file = made / sha256(repr((rendered, target, compiler.options(target))).encode()).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        found = run(rendered, target, parameters)
        ledger.check_code(*found[:2], target)
        part = file.with_suffix(f".{os.urandom(8).hex()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(file)
        return found

    monkeypatch.setattr(compiler, "_run", remembered)


@pytest.fixture
def from_ledger(request, compiled_once, pytestconfig, monkeypatch):
    """Kernels that the ledger knows are not compiled: for tests that look at resources alone, or that all compiles.

    Nobody can read machine code then. What the ledger does not know is compiled, and PTX always is, and all that a test
    marked anew takes.
    """
    if request.node.get_closest_marker("anew"):
        return
    known, compile = pytestconfig.pluginmanager.get_plugin("ledger"), compiler.compile

    def found(rendered, arch, parameters):
        target = compiler.target_for(arch)
        if target.startswith("compute_"):
            return compile(rendered, arch, parameters)

        def find():
            return {entry: list(astuple(x)) for entry, x in compile(rendered, arch, parameters).resources.items()}

        used = known.resources(ledger.line_of(rendered, target, parameters), find)
        made_up = _made_up(rendered, arch)
        return replace(made_up, resources={entry: cache.Resources(*x) for entry, x in used.items()})

    @property
    def cubin(_):
        raise AssertionError("from_ledger has no machine code")

    monkeypatch.setattr(compiler, "compile", found)
    monkeypatch.setattr(kernel.Kernel, "cubin", cubin)


def _made_up(rendered, arch):
    """An image and resources that no compiler has made."""
    target = compiler.target_for(arch)
    used = {rendered.name: cache.Resources(32, 0, 0)} if target.startswith("sm_") else {}
    return cache.Compiled(images.image(sha256(rendered.source.encode()).digest(), target), target, used)


@pytest.fixture
def listed_only(monkeypatch):
    """Nothing is compiled, and images are made up: for tests that are about which kernels."""
    monkeypatch.setattr(compiler, "compile", lambda rendered, arch, _: _made_up(rendered, arch))


_read = set()  # digests of what this process has read without a fault


@pytest.fixture
def checked_only(monkeypatch):
    """NVRTC reads a source and checks its rules, but makes no machine code: for tests that are about which are legal.

    That takes a twentieth of the time, and a source need not be read again. `test_matrix` compiles every choice. Image
    and resources are made up.
    """

    def checked(rendered, arch, parameters):
        target = compiler.target_for(arch)
        digest = sha256(repr((rendered, target)).encode()).digest()
        if digest not in _read:
            read(rendered, target, parameters)
            _read.add(digest)
        return _made_up(rendered, arch)

    def read(rendered, target, parameters):
        nvrtc = cuda.nvrtc()
        names = [name.encode() for name, _ in rendered.headers]
        texts = [text.encode() for _, text in rendered.headers]
        program = nvrtc.createProgram(rendered.source, f"{rendered.name}.cu", texts, names)
        try:
            nvrtc.compileProgram(program, [f"-arch={target}", "-std=c++17", "--fdevice-syntax-only"])
        except nvrtc.NVRTCError as error:
            raise compiler._explain(rendered, target, parameters, nvrtc.getProgramLog(program)) from error
        finally:
            nvrtc.destroyProgram(program)

    monkeypatch.setattr(compiler, "compile", checked)


@pytest.fixture
def verdict(request, compiled_once, pytestconfig, monkeypatch):
    """The test does not run where the ledger knows that it passes: for tests that run kernels on the PTX machine."""
    templates, ptx, run = set(), compiler.ptx, request.node.obj

    def noted(rendered, *given):
        templates.add(rendered.name)
        return ptx(rendered, *given)

    def once(**given):
        run(**given)
        return templates

    def run_unless_known(**given):
        name = f"{request.path.name}::{request.node.name}"
        pytestconfig.pluginmanager.get_plugin("ledger").passes(name, request.path, partial(once, **given))

    monkeypatch.setattr(compiler, "ptx", noted)
    monkeypatch.setattr(request.node, "obj", run_unless_known)


@pytest.fixture
def interpreted(on_gpu, verdict, monkeypatch):  # noqa: F811
    """Like `on_gpu`, but kernels run: their PTX, on the CPU. New tensors are no numbers until a kernel writes them.

    A kernel may touch the tensors alone whose addresses it has. Architectures and the rest are set as with `on_gpu`.
    """
    seen = {}  # begin and end of the memory of a tensor, by its address
    new, data_ptr = tensors.new, torch.Tensor.data_ptr

    def poisoned(shape, strides, dtype):
        made = new(shape, strides, dtype)
        torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(0xFF)
        return made

    def noted(x):
        address = data_ptr(x)
        storage = x.untyped_storage()
        seen[address] = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return address

    machines = {}

    def run(launch):
        request = launch.request
        machine, _ = machines.get((id(request), launch.entry), (None, None))
        if machine is None:
            text = compiler.ptx(request.template.render(request.parameters), request.arch, request.parameters)
            machine = ptx_machine.Machine(text, launch.entry)
            machines[id(request), launch.entry] = machine, request  # which no other one takes the place of
        machine.launch(launch.grid, launch.block, launch.shared_bytes, launch.arguments, memory_of(launch))

    def memory_of(launch):
        """The memory of the tensors whose addresses are among the arguments, or lie in which these do."""
        addresses = [x for each in launch.named.values() for x in (each if isinstance(each, tuple) else (each,))]
        exactly = [seen[x] for x in addresses if x in seen]
        within = [span for x in addresses if x not in seen for span in seen.values() if span[0] <= x < span[1]]
        return exactly + within

    monkeypatch.setattr(tensors, "new", poisoned)
    monkeypatch.setattr(torch.Tensor, "data_ptr", noted, raising=False)
    monkeypatch.setattr(plan, "_address", noted)
    on_gpu.while_running = run
    gc.disable()  # instructions are many, and none is garbage before the test ends
    yield on_gpu
    for machine, _ in machines.values():
        vars(machine).clear()  # its instructions know it
    gc.enable()
