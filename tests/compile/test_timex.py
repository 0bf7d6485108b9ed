"""timex's kernels compile for every architecture they are for, and refuse what they cannot do."""

import pytest

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

pytestmark = pytest.mark.usefixtures("from_ledger")

# Of w and k; rows and tokens so that blocks have 8, 16 or 32 rows, and inputs are streamed or not.
SAMPLES = {
    "sm_80": [("fp32", "fp32", 32, 768), ("bf16", "bf16", 8, 16384)],
    "sm_86": [("fp32", "fp32", 16, 1024), ("fp32", "fp16", 32, 768)],
    "sm_89": [("fp32", "bf16", 8, 8192)],
    "sm_90": [
        ("fp32", "fp32", 32, 768),
        ("fp32", "fp32", 8, 4096),
        ("fp16", "fp16", 32, 767),
        ("fp32", "bf16", 16, 513),
    ],
    "sm_100": [("bf16", "bf16", 32, 768)],
    "sm_120": [("fp32", "fp32", 17, 100)],
}


def requests(backend, arch, batch, tokens, w_type="fp32", k_type="fp32", vectors=()):
    """The kernels of a call: the convolution, the gradient of w, and that of k."""
    types = {"w": w_type, "k": k_type}
    p = Problem(OPS["timex"], Gpu(arch), types, B=batch, T=tokens, C=1, backend=backend, vectors=vectors)
    found = [each for way in (directions.forward, directions.backward) for each in way(p).requests(p.gpu)]
    return [each for i, each in enumerate(found) if each not in found[:i] and each.template.name != "sum_rows"]


@pytest.mark.parametrize(
    ("arch", "sample"), [(arch, sample) for arch, samples in SAMPLES.items() for sample in samples], ids=str
)
def test_kernels_of_a_call_compile_and_hold_their_sums_in_registers(arch, sample):
    *types, batch, tokens = sample
    wanted = requests("tiles", arch, batch, tokens, *types)
    assert [each.template.name for each in wanted] == ["timex_convolve", "timex_filter_gradient", "timex_convolve"]
    kernel.get_all(wanted)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("forward", {"BATCH": 24}, "batch must be 8, 16 or 32"),
        ("forward", {"ROWS": 3}, "rows must be 2, 4, 6 or 8"),
        ("forward", {"NUM_THREADS": 96}, "num_threads must be a multiple of 128 up to 512"),
        ("forward", {"VECTOR": 2}, "vector must be 1 or 4"),
        ("forward", {"STREAMED": True, "BATCH": 32}, "streamed inputs need a batch of 8 or 16"),
        ("forward", {"T_W": "fp16"}, "w must be fp32 beside k in fp32"),
        ("backward", {"BATCH": 32}, "batch must be 8 or 16"),
        ("backward", {"ROWS": 5}, "rows must be 2, 4, 6 or 8"),
        ("backward", {"NUM_THREADS": 1024}, "num_threads must be a multiple of 128 up to 512"),
        ("backward", {"VECTOR": 8}, "vector must be 1 or 4"),
        ("transforms", {"LENGTH": 1536}, "length must be a power of two, 1024 at least"),
        ("transforms", {"LENGTH": 512}, "length must be a power of two, 1024 at least"),
        ("transforms", {"NUM_THREADS": 64}, "num_threads must be the transform's length over a thread's elements"),
        ("transforms", {"SHARED_BYTES": 16}, "shared_bytes is what the geometry says"),
    ],
)
def test_every_rule_is_told(name, change, message):
    backend = "transforms" if name == "transforms" else "tiles"
    request = requests(backend, "sm_90", 32, 768)[name == "backward"]
    with pytest.raises(UnsupportedConfigError, match=message):
        kernel.get(request._replace(parameters={**request.parameters, **change}))


@pytest.mark.parametrize(
    ("arch", "tokens", "dtype", "is_paired"),
    [
        ("sm_75", 1000, "bf16", True),
        pytest.param("sm_80", 8192, "fp32", True, marks=pytest.mark.full),
        ("sm_80", 2000, "fp32", False),
        ("sm_86", 4096, "bf16", False),
        pytest.param("sm_90", 768, "fp32", True, marks=pytest.mark.full),
        pytest.param("sm_90", 2000, "fp32", False, marks=pytest.mark.full),
        ("sm_90", 16384, "fp32", True),
        ("sm_100", 3000, "fp16", True),
    ],
)
def test_transforms_compile(arch, tokens, dtype, is_paired):
    (request,) = requests("transforms", arch, 8, tokens, "fp32", dtype, (4, 4, 4) if is_paired else (1, 1, 1))
    assert request.parameters["PAIRED"] == is_paired
    found = kernel.get(request)
    assert set(found.resources) == {"timex_factors", "timex_transform", "timex_transform_gradient"}
    threads = int(request.parameters["NUM_THREADS"])
    for name, resources in found.resources.items():
        blocks = int(request.parameters["GRADIENT_BLOCKS_PER_SM" if name.endswith("gradient") else "BLOCKS_PER_SM"])
        assert resources.registers * threads * blocks <= 2**16
