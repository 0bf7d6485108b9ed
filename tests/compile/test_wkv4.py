"""RWKV-4's templates for every architecture, and what they refuse."""

import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions, wkv4
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

pytestmark = pytest.mark.usefixtures("from_ledger")

TYPES = {"w": "fp32", "u": "fp32", "k": "bf16", "v": "bf16"}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles_everywhere(direction, arch):
    rwkv_jit.specialize("wkv4", dtype=torch.float16, arch=arch, direction=direction)


@pytest.mark.parametrize("parameters", [{"t_w": "fp32", "t_u": "bf16"}, {"t_w": "bf16", "t_u": "fp32"}])
@pytest.mark.parametrize("backend", ["recurrent", "split"])
def test_w_and_u_of_other_types(backend, parameters):
    for direction in ("forward", "backward"):
        rwkv_jit.specialize("wkv4", arch="sm_90", direction=direction, decay="log", backend=backend, **parameters)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_updates_compile_everywhere(arch, dtype):
    gpu = Gpu(arch)
    for number, (tokens, decay, index_bytes) in enumerate(((1, "raw", 4), (1, "log", 8), (5, "log", 4), (5, "raw", 8))):
        types = {"w": ("fp32", dtype)[number % 2], "u": (dtype, "fp32")[number // 2], "k": dtype, "v": dtype}
        p = Problem(OPS["wkv4"], gpu, types, B=3, T=tokens, C=5, decay=decay)
        (request,) = wkv4.update(p, {}, index_bytes).requests(gpu)
        kernel.get(request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DECAY": "sigmoid"}, "decay must be raw or log"),
        ({"CHUNK_LEN": 33}, "chunk_len must be 1 to 32"),
        ({"NUM_THREADS": 48}, "num_threads must be 32, 64, ... 1024"),
    ],
)
def test_rules(change, message):
    gpu = Gpu("sm_80")
    (request,) = directions.forward(Problem(OPS["wkv4"], gpu, TYPES, C=1, decay="raw")).requests(gpu)
    with pytest.raises(UnsupportedConfigError, match=message):
        kernel.get(request._replace(parameters={**request.parameters, **change}))
