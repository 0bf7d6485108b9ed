"""The kernels of an op that the library does not have compile like its own."""

import made_up
import pytest

from rwkv_jit.call import prepared
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.problem import Problem

pytestmark = pytest.mark.usefixtures("from_ledger")


def problem(dtype, arch="sm_90", size=64, g_type="fp32", **changes):
    types = {**dict.fromkeys(made_up.MADE_UP.inputs, dtype), "g": g_type}
    return Problem(
        made_up.MADE_UP, Gpu(arch), types, B=2, T=8, G=2, H=4, K=size, V=size, N=2, training=True,
        has_initial_state=True, has_final_state=True, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "arch", "size", "g_type", "changes"),
    [
        ("fp32", "sm_75", 64, "fp32", {}),
        ("fp16", "sm_80", 128, "fp16", {"state_type": "fp16"}),
        ("bf16", "sm_90", 100, "fp32", {"state_type": "bf16", "state_layout": "kv"}),
        ("bf16", "sm_120", 1, "bf16", {"num_threads": 256}),
    ],
)
def test_kernels_compile(dtype, arch, size, g_type, changes):
    p = problem(dtype, arch, size, g_type, **changes)
    kernels = kernel.get_all([*directions.forward(p).requests(p.gpu), *directions.backward(p).requests(p.gpu)])
    own = {one.name: one for one in kernels}
    assert {"made_up", "sum_rows"} <= set(own)
    assert set(own["made_up"].resources) == {"made_up_forward", "made_up_backward"}


def test_illegal_block_is_refused_with_the_nearest_legal_one():
    p = problem("fp32", num_threads=100)
    schedule = directions.forward(p)
    with pytest.raises(UnsupportedConfigError, match="num_threads must be a multiple of 32 up to 1024") as refused:
        kernel.get_all(schedule.requests(p.gpu))
    error = prepared.with_nearest(refused.value, p, schedule, {"num_threads": 100, "chunk_len": 16})
    assert str(error).endswith("; nearest legal: num_threads=96")
