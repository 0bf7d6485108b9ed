"""Templates of one's own through NVRTC: parameters, rules, headers, where a kernel comes from, bundles, the example."""

import json
import os
import re
import subprocess

import pytest
import torch
import warm

import rwkv_jit
from rwkv_jit.kernels import cache, kernel
from rwkv_jit.kernels.cache import bundle
from rwkv_jit.kernels.errors import CompileError, UnsupportedConfigError

SCALE = """
#include "rule.cuh"

extern "C" __global__ void scale(const T_IO* x, T_IO* y, i64 count, float factor) {
    const i64 i = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (i < count) y[i] = from_float<T_IO>(FLIP ? -factor * to_float(x[i]) : factor * to_float(x[i]) + OFFSET);
}
"""
RULE = 'static_assert(NUM_THREADS % 32 == 0, "num_threads must be whole warps");\n'
PARAMETERS = {"T_IO": "bf16", "NUM_THREADS": 64, "FLIP": False, "OFFSET": 0.5}
SPECIALIZE = """
import json, sys, rwkv_jit
kernel = rwkv_jit.Template(sys.argv[1]).specialize(arch="sm_90", **json.loads(sys.argv[2]))
print(kernel.origin, kernel.registers, len(kernel.cubin), "cupy" in sys.modules)
"""


@pytest.fixture
def scale_path(tmp_path):
    (tmp_path / "rule.cuh").write_text(RULE, encoding="utf-8")
    path = tmp_path / "scale.cu"
    path.write_text(SCALE, encoding="utf-8")
    return path


@pytest.fixture
def scale(scale_path):
    return rwkv_jit.Template(scale_path)


def specialize(template, arch="sm_90", **changes):
    return template.specialize(arch=arch, **{**PARAMETERS, **changes})


# ---- parameters --------------------------------------------------------------------------------------------------


def test_kernel_has_everything_the_librarys_have(scale):
    made = specialize(scale)
    assert isinstance(made, kernel.Kernel)
    assert made.source.endswith(SCALE)
    assert "using T_IO = bf16;\n" in made.source
    assert "constexpr float OFFSET = 0.5f;\n" in made.source
    assert made.cubin[:4] == b"\x7fELF"
    assert ".visible .entry scale(" in made.ptx
    assert (made.origin, made.arch, made.name, made.parameters) == ("compiled", "sm_90", "scale", PARAMETERS)
    assert list(made.resources) == ["scale"]
    assert 0 < made.registers <= 255
    assert (made.spill_bytes, made.shared_bytes) == (0, 0)
    assert repr(made).startswith("Kernel(scale, sm_90, FLIP=False, NUM_THREADS=64, OFFSET=0.5, T_IO=bf16; compiled")


@pytest.mark.parametrize("change", [{"T_IO": "fp32"}, {"NUM_THREADS": 96}, {"FLIP": True}, {"OFFSET": 0.25}], ids=str)
def test_every_parameter_is_in_the_code(change, scale):
    assert specialize(scale).cubin != specialize(scale, **change).cubin
    assert len(cache.entries()) == 2


def test_one_as_int_as_bool_and_as_float_are_three_kernels(tmp_path):
    path = tmp_path / "half.cu"
    path.write_text('extern "C" __global__ void half(float* y) { *y = ONE / 2 + sizeof(ONE); }', encoding="utf-8")
    template = rwkv_jit.Template(path)
    made = [template.specialize(arch="sm_90", ONE=value) for value in (1, True, 1.0)]
    assert [each.origin for each in made] == ["compiled"] * 3
    assert len({each.source for each in made}) == 3


def test_parameter_the_template_does_not_have(scale):
    with pytest.raises(ValueError, match="template scale has no parameter HEAD_SIZE"):
        specialize(scale, HEAD_SIZE=64)


def test_parameter_that_is_left_out_is_named(scale):
    with pytest.raises(CompileError, match='identifier "NUM_THREADS" is undefined'):
        scale.specialize(arch="sm_90", T_IO="bf16")


# ---- headers -----------------------------------------------------------------------------------------------------


def test_header_beside_the_file_goes_before_the_librarys(scale_path):
    (scale_path.parent / "types.cuh").write_text("#error this is mine\n", encoding="utf-8")
    with pytest.raises(CompileError, match="this is mine"):
        specialize(rwkv_jit.Template(scale_path))


def test_changed_header_is_another_kernel(scale, scale_path):
    specialize(scale)
    assert specialize(rwkv_jit.Template(scale_path)).origin == "memory"
    (scale_path.parent / "rule.cuh").write_text(RULE + "// more\n", encoding="utf-8")
    assert specialize(scale).origin == "memory"  # it was read with the template
    assert specialize(rwkv_jit.Template(scale_path)).origin == "compiled"


def test_bundle_serves_it_where_nothing_may_be_compiled(scale, scale_path, child, tmp_path):
    made = specialize(scale)
    bundle.write(tmp_path / "mine.bundle", [made.entry()])
    env = {
        "RWKVJIT_CACHE_DIR": str(tmp_path / "empty"),
        "RWKVJIT_CACHE_PATH": str(tmp_path / "mine.bundle"),
        "RWKVJIT_ASSERT_CACHED": "1",
    }
    done = child(SPECIALIZE, scale_path, json.dumps(PARAMETERS), after="torch", env=env)
    assert done.stdout == f"bundle {made.registers} {len(made.cubin)} False\n"
    other = json.dumps({**PARAMETERS, "OFFSET": 1.5})
    refused = child(SPECIALIZE, scale_path, other, after="torch", env=env, check=False)
    assert "scale for sm_90" in refused.stderr
    assert "is not in the cache" in refused.stderr


# ---- kernels of a template ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90", "compute_80"])
def test_kernels_of_a_template_are_known_from_machine_code_and_from_ptx(arch, tmp_path):
    path = tmp_path / "two.cu"
    path.write_text(
        "__device__ __noinline__ float twice(float x) { return 2 * x; }\n"
        'extern "C" __global__ void __launch_bounds__(64) one(float* y) { *y = twice(*y); }\n'
        'extern "C" __global__ void two() {}\n__global__ void mangled() {}\n',
        encoding="utf-8",
    )
    made = rwkv_jit.Template(path).specialize(arch=arch)
    for name in ("one", "two", "_Z7mangledv"):
        assert made._entry_named(name) == name
    with pytest.raises(ValueError, match=r'extern "C" kernels of two, (one, two|two, one); none is named'):
        made._entry_named(None)


def test_template_without_kernels_says_so(tmp_path):
    (tmp_path / "none.cu").write_text("__device__ int x;\n", encoding="utf-8")
    made = rwkv_jit.Template(tmp_path / "none.cu").specialize(arch="sm_90")
    with pytest.raises(ValueError, match='entry: expected one of the extern "C" kernels of none'):
        made._entry_named(None)


# ---- the example -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for sm_90 only where there is no GPU")
def test_example_compiles_without_a_gpu(root, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(root), "RWKVJIT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*warm.python("torch"), str(root / "examples" / "own_kernel.py")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(torch\.(float32|bfloat16): \d+ registers, 0 bytes spilled, compiled\n){2}", done.stdout)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        ({"WIDTH": 6}, "width must divide channels"),
        ({"WIDTH": 16}, "width must be a power of two, of at most 16 bytes together"),
        ({"WIDTH": 12, "CHANNELS": 96}, "width must be a power of two, of at most 16 bytes together"),
    ],
    ids=str,
)
def test_rules_of_the_example(broken, rule, root):
    template = rwkv_jit.Template(root / "examples" / "token_shift.cu")
    fitting = {"T_IO": "bf16", "CHANNELS": 64, "WIDTH": 8, "NUM_THREADS": 128}
    with pytest.raises(UnsupportedConfigError, match=f"token_shift: {rule}; got "):
        template.specialize(arch="sm_90", **{**fitting, **broken})
