"""Templates of one's own on the GPU: what a kernel receives, streams, shared memory, graphs, and what is refused."""

import os
import subprocess
import sys
from types import SimpleNamespace

import cupy
import numpy
import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels import kernel as service
from rwkv_jit.kernels.errors import RwkvJitError

TEMPLATE = """
extern "C" __global__ void __launch_bounds__(256) affine(
    const T_IO* x, T_IO* y, i64 count, float factor, double offset, bool negate) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float sum = factor * to_float(x[i]) + static_cast<float>(offset);
    y[i] = from_float<T_IO>(negate ? -sum : sum);
}

extern "C" __global__ void scalars(
    double* y, const void* nothing, bool flag, signed char i8, unsigned char u8, short i16, unsigned short u16, int i32,
    unsigned u32, i64 wide, unsigned long long u64, fp16 half, float single, double twice) {
    const double seen[] = {double(nothing == nullptr), double(flag), double(i8), double(u8), double(i16), double(u16),
                           double(i32), double(u32), double(wide), double(u64), double(to_float(half)), double(single),
                           twice};
    for (int i = 0; i < 13; ++i) y[i] = seen[i];
}

// y[i] = i, by way of the whole dynamic shared memory.
extern "C" __global__ void through_shared(float* y, int floats) {
    extern __shared__ float staged[];
    for (int i = threadIdx.x; i < floats; i += blockDim.x) staged[floats - 1 - i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < floats; i += blockDim.x) y[i] = staged[floats - 1 - i];
}
"""


@pytest.fixture
def template(tmp_path):
    (tmp_path / "mine.cu").write_text(TEMPLATE, encoding="utf-8")
    return rwkv_jit.Template(tmp_path / "mine.cu")


@pytest.fixture
def kernel(template):
    return template.specialize(T_IO="fp32")


def affine(kernel, x, y, factor=2.0, offset=0.5, negate=False, grid=None, **options):
    grid = -(-x.numel() // 256) if grid is None else grid
    kernel.launch(grid, 256, x, y, x.numel(), numpy.float32(factor), offset, negate, entry="affine", **options)


def shared(kernel, count, **options):
    y = torch.full((count,), -1.0, device="cuda")
    kernel.launch(1, 128, y, numpy.int32(count), entry="through_shared", shared_bytes=4 * count, **options)
    return y


# ---- what a kernel receives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(dtype, negate, template):
    x = torch.randn(1000, device="cuda").to(dtype)
    y = torch.empty_like(x)
    affine(template.specialize(T_IO=dtype), x, y, factor=1.5, offset=-0.25, negate=negate)
    exact = (1.5 * x.float() - 0.25) * (-1 if negate else 1)
    torch.testing.assert_close(y, exact.to(dtype))


def test_arguments_by_name_are_those_in_the_kernels_order(kernel):
    x = torch.randn(1000, device="cuda")
    y, want = torch.empty_like(x), torch.empty_like(x)
    affine(kernel, x, want, factor=1.5, offset=-0.25, negate=True)
    given = {"negate": True, "offset": -0.25, "factor": 1.5, "count": x.numel(), "y": y, "x": x}
    for _ in range(2):  # prepared, then known
        y.fill_(0)
        kernel.launch(4, 256, entry="affine", **given)
        assert torch.equal(y, want)
    kernel.launch(1, 128, entry="through_shared", shared_bytes=4 * 500, floats=500, y=y)
    assert torch.equal(y[:500], torch.arange(500.0, device="cuda"))


@pytest.mark.parametrize("largest", [False, True])
def test_scalars_of_every_kind_arrive_unchanged(largest, kernel):
    integers = (numpy.int8, numpy.uint8, numpy.int16, numpy.uint16, numpy.int32, numpy.uint32)
    limits = [kind(numpy.iinfo(kind).max if largest else numpy.iinfo(kind).min) for kind in integers]
    wide = (2**62, numpy.uint64(2**63)) if largest else (-(2**63), numpy.uint64(0))
    passed = [True, *limits, *wide, numpy.float16(0.1), numpy.float32(0.1), 0.1]
    y = torch.zeros(13, dtype=torch.float64, device="cuda")
    kernel.launch(1, 1, y, None, *passed, entry="scalars")
    assert y.tolist() == [1.0, *map(float, passed)]


def test_array_of_another_library(kernel):
    x, y = cupy.arange(300, dtype=cupy.float32), torch.empty(300, device="cuda")
    kernel.launch(2, 256, x, y, y.numel(), numpy.float32(2), 0.5, numpy.bool_(False), entry="affine")
    assert y.tolist() == [2 * i + 0.5 for i in range(300)]


def test_ptx_is_launched_too(template):
    x, y = torch.arange(10.0, device="cuda"), torch.empty(10, device="cuda")
    affine(template.specialize(arch="compute_75", T_IO="fp32"), x, y)
    assert torch.equal(y, 2 * x + 0.5)


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_and_nothing_is_launched(kernel):
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    fitting = [x, y, 8, numpy.float32(2), 0.5, False]
    for position, wrong, message in (
        (4, 2.0, r"argument 4: the kernel takes 4 bytes, got a float as float64; wrap it: numpy.float32\(2.0\)"),
        (3, numpy.int32(8), "argument 3: the kernel takes 8 bytes, got numpy.int32"),
        (6, 1, "argument 6: the kernel takes 1 bytes, got an int as int64"),
    ):
        arguments = [*fitting[: position - 1], wrong, *fitting[position:]]
        with pytest.raises(TypeError, match=message):
            kernel.launch(1, 256, *arguments, entry="affine")
    for arguments in (fitting[:-1], [*fitting, None]):
        with pytest.raises(TypeError, match=f"affine: the kernel takes 6 arguments, got {len(arguments)}"):
            kernel.launch(1, 256, *arguments, entry="affine")
    with pytest.raises(ValueError, match="argument 1: expected a CUDA tensor, got one on cpu"):
        kernel.launch(1, 256, x.cpu(), *fitting[1:], entry="affine")
    assert not y.any()


def test_kernel_for_another_gpu_is_refused(template):
    other = "sm_75" if torch.cuda.get_device_capability() >= (10, 0) else "sm_100"
    with pytest.raises(RwkvJitError, match="cannot load mine for sm_"):
        affine(template.specialize(arch=other, T_IO="fp32"), *torch.ones(2, 8, device="cuda"))


def test_more_threads_than_the_kernel_allows_are_refused(kernel):
    x, y = torch.ones(2, 8, device="cuda")
    with pytest.raises(RwkvJitError, match="mine: the driver refuses to launch grid 1, block 1024"):
        kernel.launch(1, 1024, x, y, 8, numpy.float32(2), 0.5, False, entry="affine")
    affine(kernel, x, y)
    assert (y == 2.5).all()


# ---- grid, shared memory, streams, devices -----------------------------------------------------------------------


@pytest.mark.parametrize("grid", [0, (1, 0)])
def test_empty_grid_launches_nothing(grid, kernel):
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    affine(kernel, x, y, grid=grid)
    assert not y.any()


@pytest.mark.parametrize("counts", [(1000,), (16 * 1024,), (16 * 1024, 14 * 1024, 1000, 16 * 1024, 14 * 1024)], ids=str)
def test_dynamic_shared_memory_below_and_above_48_kb_in_any_order(counts, kernel):
    for count in counts:
        assert torch.equal(shared(kernel, count), torch.arange(count, dtype=torch.float32, device="cuda"))


def test_more_shared_memory_than_there_is_is_refused(kernel):
    with pytest.raises(RwkvJitError, match="shared_bytes: this GPU does not give a block 4194304 bytes"):
        shared(kernel, 2**20)
    assert shared(kernel, 100)[-1] == 99


@pytest.mark.parametrize("kind", ["current", "torch", "ptr", "int"])
def test_side_stream(kind, kernel):
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    affine(kernel, x, y, grid=0)
    assert not y.any()  # loads the kernels of the check below; doing that then would wait for the other stream
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        if kind == "current":
            affine(kernel, x, y)
    if kind != "current":
        stream = {"torch": side, "ptr": SimpleNamespace(ptr=side.cuda_stream), "int": side.cuda_stream}[kind]
        affine(kernel, x, y, stream=stream)
    assert not y.any()  # read on the main stream, which waits for nobody
    side.synchronize()
    assert (y == 2.5).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current(template):
    with torch.cuda.device(1):
        kernel = template.specialize(T_IO="fp32")
    for device in (1, 0, 1):
        x, y = torch.ones(2, 8, device=f"cuda:{device}")
        affine(kernel, x, y)
        assert (y == 2.5).all()
        assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="argument 2: expected cuda:0 like argument 1, got cuda:1"):
        affine(kernel, torch.ones(8, device="cuda:0"), torch.ones(8, device="cuda:1"))


# ---- CUDA graphs -------------------------------------------------------------------------------------------------


def test_launches_are_captured_and_replayed(kernel):
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    affine(kernel, x, y, grid=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        affine(kernel, x, y)
        staged = shared(kernel, 15 * 1024)  # another kernel of the same module, for the first time
    assert not y.any()
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert (y == 2 * value + 0.5).all()
        assert staged[-1] == 15 * 1024 - 1


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_first_launch_inside_a_capture_is_refused_with_what_to_do(template):
    service.forget()
    kernel = template.specialize(T_IO="fp32")
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    message = "first launch on cuda:0 inside a CUDA graph capture.*empty grid will do"
    with pytest.raises(RwkvJitError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        affine(kernel, x, y)
    torch.cuda.synchronize()
    affine(kernel, x, y)
    assert (y == 2.5).all()


# ---- the example -------------------------------------------------------------------------------------------------


def test_example_is_as_exact_as_its_dtypes(root):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, str(root / "examples" / "own_kernel.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if "relative L2 error" in line]
    assert len(errors) == 2
    assert errors[0] < 5e-6
    assert errors[1] < 3e-3
