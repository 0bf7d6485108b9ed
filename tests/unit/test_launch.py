"""Launches of one kernel on a driver that takes notes: what the driver reads, where, and what is loaded when."""

import ctypes
import os
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stub_driver import in_fork, packed

from rwkv_jit.kernels import cuda, kernel
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.launch import Launch, Launches, Value


def make_launch(gpus, letters, constants=(), grid=(2, 1, 1), device=0, arguments=None, shared_bytes=0, sizes=None):
    """A launch of values in their order, with constants (letters and what is passed) behind them."""
    arguments = arguments or [*((letter, Value(place)) for place, letter in enumerate(letters)), *constants]
    own = [struct.calcsize(f"={letters}") for letters, _ in arguments]
    gpus.sizes["scale"] = own if sizes is None else sizes
    gpus.exchange(device)
    kernel = gpus.make_kernel(gpus.archs[device])
    return Launches(device, [Launch(kernel, "scale", device, grid, (64, 2, 1), arguments, shared_bytes)])


# ---- what the driver reads ---------------------------------------------------------------------------------------


def test_arguments_are_in_the_kernels_order_wherever_their_values_are(gpus):
    """Constants between values, one value in two places, and values that the kernel does not take."""
    arguments = [
        ("3q", (1, 2, 3)), ("Q", Value(4)), ("i", 4), ("?", Value(1)), ("Q", 0), ("2i", (8, 9)), ("Q", Value(4)),
        ("f", 0.5),
    ]  # fmt: skip
    made = make_launch(gpus, "", arguments=arguments)
    for values in ((10, True, 12, 13, 14), (20, False, 22, 23, 24)):
        made.launch(7, values)
        assert gpus.launches[-1].arguments == (
            struct.pack("3q", 1, 2, 3), *packed("Qi?Q", values[4], 4, values[1], 0), struct.pack("2i", 8, 9),
            *packed("Qf", values[4], 0.5),
        )  # fmt: skip


def test_an_argument_may_consist_of_constants_and_values(gpus):
    arguments = [
        ("Q", Value(1)), ("qqQ", (-1, 2, Value(2))), ("i", 3), ("Qq", (Value(0), 4)), ("3q", (5, 6, 7)),
        ("?", Value(3)),
    ]  # fmt: skip
    made = make_launch(gpus, "", arguments=arguments)
    for values in ((10, 11, 12, True), [20, 21, 22, False]):
        made.launch(7, values)
        assert gpus.launches[-1].arguments == (
            *packed("Q", values[1]), struct.pack("qqQ", -1, 2, values[2]), *packed("i", 3),
            struct.pack("Qq", values[0], 4), struct.pack("3q", 5, 6, 7), *packed("?", values[3]),
        )  # fmt: skip


@pytest.mark.parametrize("constants", [[], [("q", 12345678)]])
@pytest.mark.parametrize("letters", ["", "q"])
def test_kernel_with_few_arguments(gpus, letters, constants):
    make_launch(gpus, letters, constants).launch(7, (5, 6))
    (launch,) = gpus.launches
    assert launch.arguments == (*packed(letters, *[5][: len(letters)]), *(packed("q", x)[0] for _, x in constants))


def test_every_value_lies_where_its_type_may_lie(gpus, monkeypatch):
    letters, offsets = "?d?qbi", []
    made = make_launch(gpus, letters, [("3q", (1, 2, 3)), ("i", 1), ("d", 1.0)])
    read = ctypes.string_at
    monkeypatch.setattr(
        ctypes, "string_at", lambda at, size: offsets.append(at % min(size, 8)) or read(at, size)
    )  # fmt: skip
    made.launch(7, (True, 1.0, True, 1, 1, 1))
    assert offsets == [0] * (len(letters) + 3)


@pytest.mark.parametrize(("letter", "value"), [("q", 2**63), ("i", 2**31), ("B", -1), ("q", 0.5)])
def test_value_that_does_not_fit_is_never_launched(gpus, letter, value):
    made = make_launch(gpus, letter)
    with pytest.raises(struct.error):
        made.launch(7, (value,))
    assert gpus.launches == []


@pytest.mark.parametrize("sizes", [[8], [8, 4], [24, 8], []])
def test_kernel_whose_arguments_the_driver_disputes_is_never_launched(gpus, sizes):
    with pytest.raises(RwkvJitError, match=f"^scale: the kernel takes arguments of {re.escape(str(sizes))} bytes, got"):
        make_launch(gpus, "QQ", sizes=sizes)


def test_gpu_that_has_less_shared_memory_says_so(gpus, monkeypatch):
    def refuse(*_):
        raise gpus.CUDADriverError(1)

    monkeypatch.setattr(gpus, "funcSetAttribute", refuse)
    with pytest.raises(RwkvJitError, match="shared_bytes: this GPU does not give a block 999999 bytes"):
        make_launch(gpus, "q", shared_bytes=999_999)


# ---- beside the kernel before -------------------------------------------------------------------------------------


def overlapping_launch_of(gpus, letters="qf"):
    gpus.sizes["scale"] = [struct.calcsize(f"={letter}") for letter in letters]
    arguments = [(letter, Value(place)) for place, letter in enumerate(letters)]
    launch = Launch(gpus.make_kernel("sm_80"), "scale", 0, (2, 3, 4), (64, 2, 1), arguments, 512, overlaps=True)
    return Launches(0, [launch])


def test_overlapping_launch_passes_the_same(gpus):
    overlapping_launch_of(gpus).launch(7, (5, 0.5))
    (launch,) = gpus.launches
    assert launch.overlaps
    assert (launch.grid, launch.block, launch.shared_bytes, launch.stream) == ((2, 3, 4), (64, 2, 1), 512, 7)
    assert launch.arguments == packed("qf", 5, 0.5)


@pytest.mark.parametrize("version", [12_030, 11_080])
def test_older_driver_launches_one_after_the_other(gpus, version):
    gpus.version = version
    overlapping_launch_of(gpus).launch(7, (5, 0.5))
    (launch,) = gpus.launches
    assert not launch.overlaps
    assert launch.arguments == packed("qf", 5, 0.5)


def test_driver_that_is_too_old_says_so(gpus, monkeypatch):
    monkeypatch.setattr(cuda, "_driver_function", lambda name: None)
    with pytest.raises(RwkvJitError, match=r"^the driver \(CUDA 12.4\) is too old: kernels need one of CUDA 11.8"):
        overlapping_launch_of(gpus).launch(7, (5, 0.5))
    assert gpus.launches == []


def test_overlapping_launch_that_is_refused_raises(gpus):
    made = overlapping_launch_of(gpus)
    gpus.refuses = True
    with pytest.raises(gpus.CUDADriverError):
        made.launch(7, (5, 0.5))
    assert gpus.launches == []


def test_overlapping_launch_in_a_thread_that_has_used_no_gpu(gpus):
    made = overlapping_launch_of(gpus)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(made.launch, 7, (5, 0.5)).result()
    assert gpus.launches[0].overlaps


# ---- devices and modules -----------------------------------------------------------------------------------------


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
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: made.function(0, "scale"), range(8)))
    assert len(gpus.modules) == 1


# ---- fork --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_process_that_left_cuda_alone_may_use_it(gpus):
    assert in_fork(lambda: gpus.make_kernel().function(0, "scale")) == "done"


# ---- a stream beside another one ---------------------------------------------------------------------------------


def test_every_stream_has_one_beside_it(gpus):
    first = cuda.side_stream(0, 7)
    assert cuda.side_stream(0, 7) is first
    assert cuda.side_stream(0, 9) is not first
    with torch.cuda.device(1):
        assert cuda.side_stream(1, 7) is not first
    assert gpus.streams == [0, 0, 1]  # each on its device
