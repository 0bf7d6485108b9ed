"""Templates of one's own: reading, parameters, and launches on a driver that takes notes."""

import inspect
import os
import struct
from types import SimpleNamespace

import numpy
import pytest
import torch
from stub_driver import cuda_tensor, in_fork, packed

import rwkv_jit
from rwkv_jit.call import custom, tensors
from rwkv_jit.kernels import kernel, signatures
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.template import Template


@pytest.fixture
def scale(gpus):
    """A kernel for the first GPU, `scale(pointer, int64, float)`."""
    gpus.sizes["scale"] = [8, 8, 4]
    return gpus.make_own()


@pytest.fixture
def given():
    """Arguments that fit it."""
    return cuda_tensor(), 5, numpy.float32(0.5)


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# ---- the template ------------------------------------------------------------------------------------------------


def test_template_is_a_public_name_and_says_everything():
    assert rwkv_jit.Template is custom.Template
    for documented in (custom.Template, custom.Template.specialize, custom.OwnKernel.launch):
        text = inspect.getdoc(documented)
        assert all(f"{section}\n---" in text for section in ("Parameters", "Raises", "Examples"))
    text = inspect.getdoc(custom.OwnKernel.launch)
    assert all(name in text for name in inspect.signature(custom.OwnKernel.launch).parameters if name != "self")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("none.cu", FileNotFoundError, "path: there is no file .*none.cu$"),
        ("folder.cu", FileNotFoundError, "path: there is no file .*folder.cu$"),
        ("mine.txt", ValueError, "path: expected a .cu file, got .*mine.txt"),
        ("cubin.cu", ValueError, "path: expected text in UTF-8, got .*cubin.cu"),
        ("direct.cu", FileNotFoundError, '"gone.cuh", which direct.cu includes, is neither beside .*direct.cu nor'),
        ("opens.cu", ValueError, "^path: opens.cu, line 2: '#include </x.cuh>' may read a file that"),
        ("y" * 300 + ".cu", OSError, r"^path: .*y... .* characters. cannot be read: File name too long"),
        ("nul\0.cu", FileNotFoundError, "^path: there is no file"),
        ("z" * 10**5, ValueError, r"^path: expected a .cu file, got .{200}\.\.\. .* characters.$"),
    ],
)
def test_file_that_is_no_template(path, error, message, tmp_path):
    (tmp_path / "folder.cu").mkdir()
    write(tmp_path / "mine.txt", "")
    write(tmp_path / "opens.cu", "\n#include </x.cuh>\n")
    (tmp_path / "cubin.cu").write_bytes(b"\x7fELF\xff\xfe")
    write(tmp_path / "direct.cu", '#include "types.cuh"\n#include "gone.cuh"\n')
    with pytest.raises(error, match=message):
        custom.Template(tmp_path / path)


# ---- parameters and architecture ---------------------------------------------------------------------------------


@pytest.fixture
def requests(gpus, monkeypatch):
    """What is asked of the service, which answers with a kernel for that architecture."""
    made = []

    def get(request):
        made.append(request)
        return gpus.make_kernel(request.arch)

    monkeypatch.setattr(kernel, "get", get)
    return made


@pytest.fixture
def mine(tmp_path):
    return custom.Template(write(tmp_path / "mine.cu", ""))


def test_dtypes_and_numpy_scalars_become_what_the_template_takes(mine, requests):
    mine.specialize(
        T_IO=torch.bfloat16, T_W="fp16", SIZE=numpy.int64(3), FLAG=numpy.bool_(True), RATE=numpy.float64(0.5), MAP="raw"
    )
    assert {name: (value, type(value)) for name, value in requests[0].parameters.items()} == {
        "T_IO": ("bf16", str),
        "T_W": ("fp16", str),
        "SIZE": (3, int),
        "FLAG": (True, bool),
        "RATE": (0.5, float),
        "MAP": ("raw", str),
    }


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"T_IO": torch.float64}, ValueError, "T_IO: expected one of fp16, bf16, fp32, got torch.float64"),
        ({"SIZE": torch.float16}, TypeError, "SIZE: expected an int, .*, got torch.float16"),
        ({"SIZE": [1]}, TypeError, r"SIZE: expected an int, .*, got \[1\]"),
        ({"arch": "h100"}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN, got 'h100'"),
        ({"SIZE": [0] * 10**5}, TypeError, r"SIZE: expected an int, .*, got \[0, 0, .{1,250} characters.$"),
        ({"arch": 90}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN, got 90"),
    ],
)
def test_value_that_cannot_be_a_parameter(parameters, error, message, mine, requests):
    with pytest.raises(error, match=message):
        mine.specialize(**parameters)
    assert requests == []


def test_architecture_is_the_given_one_then_the_variables_then_the_current_gpus(mine, requests, gpus, monkeypatch):
    gpus.exchange(1)
    mine.specialize()
    monkeypatch.setenv("RWKVJIT_ARCH", "compute_75")
    mine.specialize()
    mine.specialize(arch="sm_100")
    assert [request[2:] for request in requests] == [("sm_90", ("sm_90a",)), ("compute_75", ()), ("sm_100", ())]
    monkeypatch.delenv("RWKVJIT_ARCH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="arch: there is no GPU; pass an architecture, e.g. arch='sm_90'"):
        mine.specialize()


# ---- arguments ---------------------------------------------------------------------------------------------------


def test_every_kind_of_argument_reaches_the_driver_in_its_own_bytes(gpus):
    x, y = cuda_tensor(), torch.nn.Parameter(cuda_tensor(), requires_grad=False)
    passed = [
        (x, "Q", x.data_ptr()), (None, "Q", 0), (y, "Q", y.data_ptr()), (True, "?", True), (False, "?", False),
        (-(2**63), "q", -(2**63)), (2**63 - 1, "q", 2**63 - 1), (0.1, "d", 0.1), (float("inf"), "d", float("inf")),
        (numpy.bool_(True), "?", True), (numpy.int8(-5), "b", -5), (numpy.uint8(250), "B", 250),
        (numpy.int16(-3), "h", -3), (numpy.uint16(60000), "H", 60000), (numpy.int32(-7), "i", -7),
        (numpy.uint32(2**32 - 1), "I", 2**32 - 1), (numpy.int64(-9), "q", -9), (numpy.uint64(2**63), "Q", 2**63),
        (numpy.longlong(-11), "q", -11), (numpy.ulonglong(12), "Q", 12), (numpy.intc(13), "i", 13),
        (numpy.float16(0.5), "e", 0.5), (numpy.float32(0.1), "f", numpy.float32(0.1)), (numpy.float64(0.1), "d", 0.1),
    ]  # fmt: skip
    arguments, letters, values = zip(*passed, strict=True)
    gpus.sizes["scale"] = [struct.calcsize(f"={letter}") for letter in letters]
    made = gpus.make_own()
    for _ in range(2):
        made.launch(1, 32, *arguments)
    assert [launch.arguments for launch in gpus.launches] == [packed(letters, *values)] * 2


def test_array_of_another_library_is_the_address_of_its_first_element(scale, gpus, monkeypatch):
    class Foreign:
        __dlpack__ = None

    x = cuda_tensor()
    monkeypatch.setattr(tensors, "from_any", lambda name, array: x)
    for _ in range(2):
        scale.launch(1, 32, Foreign(), 5, numpy.float32(0.5))
    assert [launch.arguments[0] for launch in gpus.launches] == list(packed("QQ", x.data_ptr(), x.data_ptr()))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.zeros(3), ValueError, "argument 2: expected a CUDA tensor, got one on cpu"),
        (numpy.zeros(3), ValueError, "argument 2: expected a CUDA tensor, got one on cpu"),
        (torch.zeros(3, device="meta"), ValueError, "argument 2: expected a CUDA tensor, got one on meta"),
        (cuda_tensor(1), ValueError, "argument 2: expected cuda:0 like argument 1, got cuda:1"),
        ("text", TypeError, "argument 2: expected a CUDA tensor, None, a bool, int, float or NumPy scalar, .*got str"),
        ([1, 2], TypeError, "argument 2: expected a CUDA tensor, .*, got list"),
        (1j, TypeError, "argument 2: expected a CUDA tensor, .*, got complex"),
        (numpy.complex64(1j), TypeError, "argument 2: expected a CUDA tensor, .*, got complex64"),
        (numpy.longdouble(1), TypeError, "argument 2: expected a CUDA tensor, .*, got longdouble"),
        (2**63, ValueError, "argument 2: expected an int of 64 bits, got 9223372036854775808"),
        (-(2**63) - 1, ValueError, "argument 2: expected an int of 64 bits, got -9223372036854775809"),
        (1 << 20000, ValueError, "argument 2: expected an int of 64 bits, got a value of type int that cannot be"),
    ],
    ids=range(12),
)
def test_argument_that_cannot_be_passed_is_named_and_nothing_is_launched(wrong, error, message, scale, gpus):
    arguments = cuda_tensor(), wrong, numpy.float32(0.5)
    for _ in range(2):  # at first sight, and once more
        with pytest.raises(error, match=message):
            scale.launch(1, 32, *arguments)
    assert gpus.launches == []


def test_int_that_does_not_fit_is_named_in_a_known_launch_too(scale, given, gpus):
    scale.launch(1, 32, *given)
    with pytest.raises(ValueError, match="argument 2: expected an int of 64 bits, got 18446744073709551616"):
        scale.launch(1, 32, given[0], 2**64, given[2])
    assert len(gpus.launches) == 1


@pytest.mark.parametrize(
    ("size", "wrong", "message"),
    [
        (4, 5, "argument 2: the kernel takes 4 bytes, got an int as int64; wrap it: numpy.int32(5)"),
        (2, 5, "argument 2: the kernel takes 2 bytes, got an int as int64; wrap it: numpy.int16(5)"),
        (4, 0.5, "argument 2: the kernel takes 4 bytes, got a float as float64; wrap it: numpy.float32(0.5)"),
        (1, 5, "argument 2: the kernel takes 1 bytes, got an int as int64"),
        (4, True, "argument 2: the kernel takes 4 bytes, got a bool"),
        (8, numpy.int32(5), "argument 2: the kernel takes 8 bytes, got numpy.int32"),
        (4, None, "argument 2: the kernel takes 4 bytes, got None as a null pointer"),
        (24, cuda_tensor(), "argument 2: the kernel takes 24 bytes, got the address of a tensor"),
    ],
)
def test_argument_of_another_size_than_the_kernel_takes(size, wrong, message, scale, given, gpus):
    gpus.sizes["scale"][1] = size
    with pytest.raises(TypeError) as caught:
        scale.launch(1, 32, given[0], wrong, given[2])
    assert str(caught.value) == message
    assert gpus.launches == []


@pytest.mark.parametrize("count", [0, 2, 4])
def test_number_of_arguments_is_compared_with_the_kernels(count, scale, given, gpus):
    with pytest.raises(TypeError, match=f"scale: the kernel takes 3 arguments, got {count}"):
        scale.launch(1, 32, *(*given, None)[:count])
    assert gpus.launches == []


def test_what_an_old_driver_does_not_tell_is_not_compared(scale, given, gpus, monkeypatch):
    monkeypatch.setattr(custom.cuda, "parameter_sizes", lambda function, most=None: None)
    scale.launch(1, 32, *given)
    assert len(gpus.launches) == 1


# ---- grid, block, shared memory, entry ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "shape"),
    [
        (7, 64, ((7, 1, 1), (64, 1, 1))),
        ((7,), (64,), ((7, 1, 1), (64, 1, 1))),
        ((2**31 - 1, 65535), (16, 64), ((2**31 - 1, 65535, 1), (16, 64, 1))),
        (torch.Size([1, 2, 3]), (1, 2, 64), ((1, 2, 3), (1, 2, 64))),
    ],
)
def test_grid_and_block_are_an_int_or_up_to_three(grid, block, shape, scale, given, gpus):
    scale.launch(grid, block, *given, shared_bytes=512)
    (launch,) = gpus.launches
    assert (launch.grid, launch.block) == shape
    assert launch.shared_bytes == 512


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({"grid": ()}, TypeError, r"grid: expected an int or a tuple of one to three ints, got \(\)"),
        ({"grid": (1, 1, 1, 1)}, TypeError, "grid: expected an int or a tuple of one to three ints, got"),
        ({"grid": [1, 2]}, TypeError, r"grid: expected an int or a tuple of one to three ints, got \[1, 2\]"),
        ({"grid": 1.5}, TypeError, "grid: expected an int or a tuple of one to three ints, got 1.5"),
        ({"grid": (1, "2")}, TypeError, "grid: expected an int or a tuple"),
        ({"grid": -1}, ValueError, "grid: expected at least 0 and at most .*, got -1"),
        ({"grid": 2**31}, ValueError, "grid: expected at least 0 and at most .*, got 2147483648"),
        ({"grid": (1, 65536)}, ValueError, "grid: expected at least 0 and at most .*65535.*, got"),
        ({"block": 0}, ValueError, "block: expected at least 1 and at most .*, got 0"),
        ({"block": (32, 1, 65)}, ValueError, "block: expected at least 1 and at most .*64.*, got"),
        ({"block": (64, 32)}, ValueError, r"block: expected at most 1024 threads, got 2048 \(\(64, 32\)\)"),
        ({"block": None}, TypeError, "block: expected an int or a tuple"),
        ({"shared_bytes": -1}, ValueError, "shared_bytes: expected an int of at least 0, got -1"),
        ({"shared_bytes": [1]}, ValueError, r"shared_bytes: expected an int of at least 0, got \[1\]"),
    ],
    ids=str,
)
def test_shape_that_no_gpu_can_launch(choice, error, message, scale, given, gpus):
    shape = {"grid": 1, "block": 32, "shared_bytes": 0} | choice
    with pytest.raises(error, match=message):
        scale.launch(shape["grid"], shape["block"], *given, shared_bytes=shape["shared_bytes"])
    assert gpus.modules == []


def test_empty_grid_loads_and_checks_and_launches_nothing(scale, given, gpus):
    for grid in (0, (4, 0), (4, 1, 0)):
        scale.launch(grid, 32, *given)
    assert scale.is_loaded(0)
    with pytest.raises(TypeError, match="takes 3 arguments, got 1"):
        scale.launch(0, 32, given[0])
    assert gpus.launches == []


def test_one_of_several_kernels_must_be_named(gpus):
    gpus.sizes.update(first=[], second=[])
    made = gpus.make_own(entries=("first", "second", "_Z5helperv"))
    with pytest.raises(ValueError, match='one of the extern "C" kernels of mine, first, second; none is named'):
        made.launch(1, 32)
    with pytest.raises(ValueError, match="first, second; got 'third'"):
        made.launch(1, 32, entry="third")
    made.launch(1, 32, entry="second")
    made.launch(1, 32, entry="first")
    assert [launch.entry for launch in gpus.launches] == ["second", "first"]


def test_entries_of_ptx_are_read_from_its_text(gpus):
    gpus.sizes.update(first=[])
    text = b"// sm_80\n.visible .func (.param .b32 r) helper(\n.visible .entry first(\n\t.param .u64 first_param_0\n)"
    made = gpus.make_kernel("compute_80", entries=(), target="compute_80", image=text)
    custom.OwnKernel(made, Template("mine", "", ())).launch(1, 32)
    assert [launch.entry for launch in gpus.launches] == ["first"]


# ---- devices and streams -----------------------------------------------------------------------------------------


def test_every_gpu_gets_the_module_of_its_own_architecture(mine, requests, gpus):
    gpus.sizes["scale"] = [8]
    made = {}
    for device in (0, 1):
        gpus.exchange(device)
        made[device] = mine.specialize()
    for current in (0, 1):
        for device in (1, 0):
            gpus.exchange(current)
            made[device].launch(1, 32, cuda_tensor(device))
            assert gpus.current == current
    assert [(launch.device, launch.current_device, launch.stream) for launch in gpus.launches] == [
        (1, 1, 101), (0, 0, 100), (1, 1, 101), (0, 0, 100),
    ]  # fmt: skip
    assert sorted(gpus.modules) == [(0, b"sm_80 code"), (1, b"sm_90 code")]


def test_gpu_that_cannot_run_the_kernel_refuses_it(scale, gpus):
    with pytest.raises(RwkvJitError, match="the driver cannot load mine for sm_80"):
        scale.launch(1, 32, cuda_tensor(1), 5, numpy.float32(0.5))
    assert gpus.current == 0


def test_without_tensors_the_kernel_runs_on_the_current_gpu(gpus, monkeypatch):
    monkeypatch.setattr(gpus, "archs", ("sm_80", "sm_80"))
    gpus.sizes["scale"] = [8, 8]
    made = gpus.make_own()
    for device in (1, 0):
        gpus.exchange(device)
        made.launch(1, 32, None, 5)
    assert [launch.device for launch in gpus.launches] == [1, 0]


@pytest.mark.parametrize("stream", [55, SimpleNamespace(cuda_stream=55), SimpleNamespace(ptr=55)])
def test_stream_is_torchs_an_object_with_ptr_or_an_int(stream, scale, given, gpus):
    gpus.exchange(1)
    scale.launch(1, 32, *given, stream=stream)
    (launch,) = gpus.launches
    assert (launch.stream, launch.device, launch.current_device) == (55, 0, 0)
    assert gpus.current == 1


def test_what_is_no_stream_is_refused(scale, given, gpus):
    with pytest.raises(TypeError, match="stream: expected a torch.cuda.Stream, .*, got str"):
        scale.launch(1, 32, *given, stream="side")
    assert gpus.launches == []


def test_what_the_driver_refuses_is_said_with_the_sizes(scale, given, gpus):
    gpus.refuses = True
    with pytest.raises(RwkvJitError, match="mine: the driver refuses to launch grid 1, block 1024, 0 bytes .*INVALID"):
        scale.launch(1, 1024, *given)


# ---- the first launch and the next -------------------------------------------------------------------------------


def test_only_the_first_launch_of_a_kind_is_prepared(scale, given, gpus, monkeypatch):
    scale.launch(1, 32, *given)
    monkeypatch.setattr(custom, "Launch", None)
    scale.launch(1, 32, cuda_tensor(size=9), 7, numpy.float32(2))
    assert gpus.launches[1].arguments[1:] == packed("qf", 7, 2)
    with pytest.raises(TypeError, match="not callable"):
        scale.launch(2, 32, *given)


def test_launch_that_differs_in_anything_is_another(scale, given, gpus):
    other = gpus.make_own(entries=("shift",))
    gpus.sizes["shift"] = gpus.sizes["scale"]
    for made in (scale, other):
        for grid, block, shared_bytes in ((1, 32, 0), (2, 32, 0), (1, 64, 0), (1, 32, 512)):
            made.launch(grid, block, *given, shared_bytes=shared_bytes)
    assert [(launch.entry, launch.grid[0], launch.block[0], launch.shared_bytes) for launch in gpus.launches] == [
        (entry, *shape) for entry in ("scale", "shift") for shape in ((1, 32, 0), (2, 32, 0), (1, 64, 0), (1, 32, 512))
    ]
    with pytest.raises(TypeError, match="argument 3: the kernel takes 4 bytes, got a float as float64"):
        scale.launch(1, 32, *given[:2], 0.5)


def test_plans_do_not_grow_without_end(scale, given, gpus, monkeypatch):
    monkeypatch.setattr(signatures, "MOST", 4)
    for blocks in range(1, 11):
        scale.launch(blocks, 32, *given)
        assert len(custom._launches) <= 4
    assert [launch.grid[0] for launch in gpus.launches] == list(range(1, 11))


def test_first_launch_inside_a_capture_is_refused_and_a_later_one_captured(scale, given, gpus):
    gpus.capturing = True
    with pytest.raises(RwkvJitError, match="mine: first launch on cuda:0 inside a CUDA graph capture.*empty grid"):
        scale.launch(1, 32, *given)
    gpus.capturing = False
    scale.launch(0, 32, *given)
    gpus.capturing = True
    scale.launch(1, 32, *given)
    scale.launch(2, 32, *given)
    assert [launch.grid[0] for launch in gpus.launches] == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("has_tensors", [True, False])
def test_forked_child_is_told_and_its_parent_goes_on(has_tensors, gpus):
    gpus.sizes["scale"] = [8]
    made, argument = gpus.make_own(), cuda_tensor() if has_tensors else 5
    made.launch(1, 32, argument)

    def use_in_child():
        with pytest.raises(RwkvJitError, match="CUDA was in use before this process was forked"):
            made.launch(1, 32, argument)

    assert in_fork(use_in_child) == "done"
    made.launch(1, 32, argument)
    assert (len(gpus.modules), len(gpus.launches)) == (1, 2)


# ---- by name -----------------------------------------------------------------------------------------------------

SCALE = """extern "C" __global__ void scale(
    const float* __restrict__ x, int count, float factor, i64 stride, unsigned seed, double shift, bool is_on) {"""
SIZES = [8, 4, 4, 8, 4, 8, 1]


@pytest.fixture
def named(gpus):
    """A kernel whose template says the names of its arguments."""
    gpus.sizes["scale"] = SIZES
    return gpus.make_own(SCALE)


def test_named_arguments_go_as_what_the_kernel_declares(named, gpus):
    """In any order, also where the types of the arguments come in the same order."""
    x = cuda_tensor()
    given = {"x": x, "count": -3, "factor": 0.5, "stride": 2**30, "seed": 7, "shift": 2, "is_on": True}
    swapped = {name: given[name] for name in ("x", "stride", "factor", "count", "seed", "shift", "is_on")}
    want = packed("QifqId?", x.data_ptr(), -3, 0.5, 2**30, 7, 2.0, True)
    for _ in range(2):
        for arguments in (given, dict(reversed(given.items())), swapped):
            named.launch(1, 32, **arguments)
    assert [launch.arguments for launch in gpus.launches] == [want] * 6
    named.launch(1, 32, **{**given, "factor": 1, "stride": 2**40})
    assert gpus.launches[-1].arguments == (*want[:2], *packed("fq", 1.0, 2**40), *want[4:])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"count": "missing"}, TypeError, r"scale: expected arguments named float\* x, .*; count is missing"),
        ({"counts": 1}, TypeError, "counts is not one of them"),
        ({"x": torch.zeros(3)}, ValueError, "x: expected a CUDA tensor, got one on cpu"),
        ({"x": [1]}, TypeError, "x: expected a CUDA tensor, None, .*, got list"),
        ({"count": 2**31}, ValueError, "count: expected an int of 32 bits, got 2147483648"),
        ({"stride": 2**63}, ValueError, "stride: expected an int of 64 bits, got 9223372036854775808"),
        ({"stride": 2**40, "seed": 2**32}, ValueError, "seed: expected an unsigned int of 32 bits, got 4294967296"),
        ({"seed": -1}, ValueError, "seed: expected an unsigned int of 32 bits, got -1"),
        ({"factor": 1e39}, ValueError, r"factor: expected a float of 32 bits, got 1e\+39"),
        ({"factor": 10**400}, ValueError, "factor: expected a float of 32 bits, got 1000000000"),
        ({"count": 0.5}, TypeError, "count: the kernel takes 4 bytes, got a float as float64"),
        ({"factor": numpy.float64(0.5)}, TypeError, "factor: the kernel takes 4 bytes, got numpy.float64"),
        ({"is_on": 1}, TypeError, "is_on: the kernel takes 1 bytes, got an int as int64"),
    ],
)
def test_named_argument_that_cannot_be_passed_is_named(changes, error, message, named, gpus):
    given = {"x": cuda_tensor(), "count": 1, "factor": 0.5, "stride": 2, "seed": 3, "shift": 4.0, "is_on": False}
    given = {name: value for name, value in {**given, **changes}.items() if value != "missing"}
    for _ in range(2):
        with pytest.raises(error, match=message):
            named.launch(1, 32, **given)
    assert gpus.launches == []


def test_arguments_come_by_position_or_by_name(named, gpus):
    with pytest.raises(TypeError, match="arguments: expected all by position or all by name, got 1 by position"):
        named.launch(1, 32, cuda_tensor(), count=1)
    assert gpus.launches == []


def test_names_of_a_kernel_that_does_not_show_them(gpus):
    made = gpus.make_own("#define KERNEL scale(float* x)\n")
    with pytest.raises(TypeError, match="scale: its arguments cannot be read from the template; pass them in"):
        made.launch(1, 32, x=cuda_tensor())
