"""Launch plans on a driver that takes notes: what the driver reads, where it is launched, and what is loaded when."""

import contextlib
import ctypes
import importlib.util
import os
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rwkv_jit import cuda, kernel, tensors
from rwkv_jit.errors import RwkvJitError
from rwkv_jit.launch import Plan

_spec = importlib.util.spec_from_file_location("stub_driver", Path(__file__).with_name("stub_driver.py"))
stub_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_driver)
gpus, packed = stub_driver.gpus, stub_driver.packed


def make_plan(gpus, layout, constants=(), grid=(2, 1, 1), device=0, **more):
    gpus.sizes["scale"] = [*map(struct.calcsize, [f"={letter}" for letter in layout]), *map(len, constants)]
    gpus.exchange(device)
    made = gpus.make_kernel(gpus.archs[device])
    return Plan(made, "scale", device, grid, (64, 2, 1), layout, constants, **more)


# ---- what the driver reads ---------------------------------------------------------------------------------------


def test_driver_reads_every_value_in_its_own_bytes(gpus):
    letters = "?bBhHiIqQefdQ?"
    values = (True, -5, 250, -30000, 60000, -(2**31), 2**32 - 1, -(2**63), 2**64 - 1, 0.5, -1.25, 1e300, 0, False)
    make_plan(gpus, letters).launch(7, values)
    (launch,) = gpus.launches
    assert launch.arguments == packed(letters, *values)


def test_constants_follow_the_values(gpus):
    constants = [struct.pack("3q", 1, 2, 3), struct.pack("i", 4), b"", struct.pack("f", 0.5)]
    make_plan(gpus, "QQ", constants).launch(7, (11, 22))
    (launch,) = gpus.launches
    assert launch.arguments == (*packed("QQ", 11, 22), *constants)


@pytest.mark.parametrize("constants", [(), [b"12345678"]])
def test_kernel_without_values(gpus, constants):
    make_plan(gpus, "", constants).launch(7, ())
    (launch,) = gpus.launches
    assert launch.arguments == tuple(constants)


def test_every_value_lies_where_its_type_may_lie(gpus, monkeypatch):
    letters, found = "?d?qbi", []
    plan = make_plan(gpus, letters)
    read = ctypes.string_at
    monkeypatch.setattr(ctypes, "string_at", lambda address, size: found.append(address % size) or read(address, size))
    plan.launch(7, (True, 1.0, True, 1, 1, 1))
    assert found == [0] * len(letters)


def test_shape_shared_memory_and_stream_reach_the_driver(gpus):
    make_plan(gpus, "q", grid=(5, 6, 7), shared_bytes=1024).launch(77, (1,))
    (launch,) = gpus.launches
    assert (launch.grid, launch.block, launch.shared_bytes) == ((5, 6, 7), (64, 2, 1), 1024)
    assert (launch.stream, launch.entry) == (77, "scale")


def test_second_launch_has_the_second_values(gpus):
    plan = make_plan(gpus, "qf")
    plan.launch(1, (1, 0.25))
    plan.launch(2, (2, 0.5))
    assert [launch.arguments for launch in gpus.launches] == [packed("qf", 1, 0.25), packed("qf", 2, 0.5)]


@pytest.mark.parametrize("grid", [(0, 1, 1), (3, 0, 1), (3, 1, 0)])
def test_empty_grid_launches_nothing(gpus, grid):
    make_plan(gpus, "q", grid=grid).launch(7, (1,))
    assert gpus.launches == []


@pytest.mark.parametrize(("layout", "value"), [("q", 2**63), ("i", 2**31), ("B", -1), ("q", 0.5)])
def test_value_that_does_not_fit_is_never_launched(gpus, layout, value):
    plan = make_plan(gpus, layout)
    with pytest.raises(struct.error):
        plan.launch(7, (value,))
    assert gpus.launches == []


def test_threads_that_launch_at_once_do_not_mix_values(gpus):
    """Every thread has written its values before the driver reads those of any."""
    count = 8
    plan = make_plan(gpus, "qd", [b"constant"])
    all_written = threading.Barrier(count, timeout=30)
    gpus.before_reading = all_written.wait
    threads = [threading.Thread(target=plan.launch, args=(n, (n, n / 2))) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {launch.stream: launch.arguments for launch in gpus.launches} == {
        n: (*packed("qd", n, n / 2), b"constant") for n in range(count)
    }


# ---- shared memory -----------------------------------------------------------------------------------------------


def test_thread_that_has_used_no_gpu_gets_a_context(gpus):
    plan = make_plan(gpus, "Q")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(plan.launch, 0, (5,)).result()
    assert [launch.arguments for launch in gpus.launches] == [packed("Q", 5)]


def test_other_errors_of_the_driver_are_raised(gpus):
    plan = make_plan(gpus, "")
    gpus.refuses = True
    with pytest.raises(gpus.CUDADriverError, match="INVALID_VALUE"):
        plan.launch(0, ())


def test_more_shared_memory_than_every_gpu_gives_is_asked_for_once(gpus):
    plan = make_plan(gpus, "q", shared_bytes=100_000)
    for _ in range(3):
        plan.launch(7, (1,))
    assert gpus.shared_bytes == {plan.function: 100_000}


def test_gpu_that_has_less_shared_memory_says_so(gpus, monkeypatch):
    def refuse(*_):
        raise gpus.CUDADriverError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(gpus, "funcSetAttribute", refuse)
    with pytest.raises(RwkvJitError, match="shared_bytes: this GPU does not give a block 999999 bytes"):
        make_plan(gpus, "q", shared_bytes=999_999)


# ---- devices and modules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_plan_is_launched_on_its_device_whichever_is_current(gpus, device, current):
    plan = make_plan(gpus, "q", device=device)
    gpus.exchange(current)
    tensors.launch(plan, (5,))
    (launch,) = gpus.launches
    assert (launch.device, launch.current_device, launch.stream) == (device, device, 100 + device)
    assert gpus.current == current


def test_module_is_loaded_once_per_device_and_kept(gpus, monkeypatch):
    monkeypatch.setattr(gpus, "archs", ("sm_80", "sm_80"))
    made = gpus.make_kernel("sm_80", entries=("scale", "shift"))
    for device in (0, 1, 0, 1):
        with torch.cuda.device(device):
            for entry in ("scale", "shift"):
                made.function(device, entry)
        assert made.is_loaded(device)
    assert [module.device for module in gpus.modules] == [0, 1]
    kernel.forget()
    assert made.is_loaded(0)
    assert made.is_loaded(1)


def test_threads_that_launch_first_at_once_load_one_module(gpus, monkeypatch):
    made, load = gpus.make_kernel(), gpus.load_module
    monkeypatch.setattr(cuda, "load_module", lambda *image: time.sleep(0.05) or load(*image))
    threads = [threading.Thread(target=made.function, args=(0, "scale")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpus.modules) == 1


def test_kernel_of_another_architecture_is_refused_where_it_is_loaded(gpus):
    gpus.exchange(1)
    with pytest.raises(RwkvJitError, match="the driver cannot load mine for sm_80"):
        gpus.make_kernel("sm_80").function(1, "scale")


# ---- fork --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_is_told_and_its_parent_goes_on(gpus):
    made = gpus.make_kernel()
    made.function(0, "scale")

    def use_in_child():
        with pytest.raises(RwkvJitError, match="CUDA was in use before this process was forked.*'spawn'"):
            made.function(0, "scale")

    assert stub_driver.in_fork(use_in_child) == "done"
    made.function(0, "scale")
    assert len(gpus.modules) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_process_that_left_cuda_alone_may_use_it(gpus):
    assert stub_driver.in_fork(lambda: gpus.make_kernel().function(0, "scale")) == "done"


# ---- a stream beside another one ---------------------------------------------------------------------------------


def test_stream_beside_another_waits_for_it_and_is_waited_for(monkeypatch):
    said = []

    class Device:
        def __enter__(self):
            said.append("device")

        def __exit__(self, *_):
            said.append("device again")

    class Event:
        made = 0

        def __init__(self, disable_timing):
            assert disable_timing
            Event.made += 1
            self.ptr = 100 + Event.made

    class Stream:
        ptr = 8

        def __init__(self, non_blocking, priority):
            assert (non_blocking, priority) == (True, -1)

    runtime = SimpleNamespace(
        eventRecord=lambda event, stream: said.append(("record", event, stream)),
        streamWaitEvent=lambda stream, event: said.append(("wait", stream, event)),
    )
    of_cuda = SimpleNamespace(Device=Device, Event=Event, Stream=Stream, runtime=runtime)
    monkeypatch.setattr(cuda, "installed_cupy", lambda: ["cupy-cuda12x 14.2.0"])
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=of_cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", of_cuda)
    side = cuda.SideStream(7)
    assert side.raw == 8
    side.follow()
    side.join()
    assert said == [
        "device", ("record", 101, 7), ("wait", 8, 101), "device again",
        "device", ("record", 102, 8), ("wait", 7, 102), "device again",
    ]  # fmt: skip


def test_every_stream_has_one_beside_it(monkeypatch):
    current = [7]
    monkeypatch.setattr(tensors, "_sides", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "SideStream", lambda main: ["beside", main])
    first = tensors.side_stream(0)
    assert first == ["beside", 7]
    assert tensors.side_stream(0) is first
    assert tensors.side_stream(1) is not first
    current[0] = 9
    assert tensors.side_stream(0) == ["beside", 9]
