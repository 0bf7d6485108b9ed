"""timex's kernels compile for every architecture they are for, without spills, and refuse what they cannot do."""

import pytest
import torch

from rwkv_jit import kernel
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import timex_tiles, timex_transforms

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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


@pytest.mark.parametrize(
    ("arch", "sample"), [(arch, sample) for arch, samples in SAMPLES.items() for sample in samples], ids=str
)
def test_kernels_of_a_call_compile_and_hold_their_sums_in_registers(arch, sample):
    w_dtype, dtype, batch, tokens = sample
    types = (DTYPES[w_dtype], DTYPES[dtype])
    for found in kernel.get_all(timex_tiles.requests(batch, tokens, types, arch, vector=1 if tokens % 4 else 4)):
        assert found.spill_bytes <= (8 if arch in ("sm_80", "sm_90") else 128)
        assert found.registers <= 128  # two blocks of 256 threads


@pytest.mark.parametrize(
    ("direction", "change", "message"),
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
    ],
)
def test_every_rule_is_told(direction, change, message):
    request = timex_tiles.requests(32, 768, (torch.float32,) * 2, "sm_90")[0 if direction == "forward" else -1]
    with pytest.raises(UnsupportedConfigError, match=message):
        kernel.get(request._replace(parameters={**request.parameters, **change}))


@pytest.mark.parametrize(
    ("arch", "tokens", "dtype", "is_paired"),
    [
        ("sm_75", 1000, "bf16", True),
        ("sm_80", 8192, "fp32", True),
        ("sm_86", 4096, "bf16", False),
        pytest.param("sm_90", 768, "fp32", True, marks=pytest.mark.full),
        ("sm_90", 2000, "fp32", False),
        ("sm_90", 16384, "fp32", True),
        ("sm_100", 3000, "fp16", True),
    ],
)
def test_transforms_compile(arch, tokens, dtype, is_paired):
    request = timex_transforms.request(tokens, (torch.float32, DTYPES[dtype]), arch, is_paired=is_paired)
    found = kernel.get(request)
    assert set(found.resources) == {"timex_factors", "timex_transform", "timex_transform_gradient"}
    assert max(found.resources[f"timex_{name}"].spill_bytes for name in ("factors", "transform")) <= 112
    threads = int(request.parameters["NUM_THREADS"])
    for name, resources in found.resources.items():
        blocks = int(request.parameters["GRADIENT_BLOCKS_PER_SM" if name.endswith("gradient") else "BLOCKS_PER_SM"])
        assert resources.registers * threads * blocks <= 2**16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LENGTH": 1536}, "length must be a power of two, 1024 at least"),
        ({"LENGTH": 512}, "length must be a power of two, 1024 at least"),
        ({"NUM_THREADS": 64}, "num_threads must be the transform's length over a thread's elements"),
        ({"SHARED_BYTES": 16}, "shared_bytes is what the geometry says"),
    ],
)
def test_every_rule_of_the_transforms_is_told(change, message):
    request = timex_transforms.request(768, (torch.float32,) * 2, "sm_90")
    with pytest.raises(UnsupportedConfigError, match=message):
        kernel.get(request._replace(parameters={**request.parameters, **change}))
