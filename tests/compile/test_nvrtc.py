"""The oldest and the newest NVRTC that are taken compile a kernel of every op, and read every template."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rwkv_jit.kernels import compiler, cuda
from rwkv_jit.kernels.errors import CompileError, UnsupportedConfigError

# The oldest of the extra cuda12, the newest of the extra cuda13.
WHEELS = {
    "oldest": "nvidia-cuda-nvrtc-cu12=={}.{}.*".format(*cuda.OLDEST_NVRTC),
    "newest": "nvidia-cuda-nvrtc",
}


@pytest.fixture
def unpacked(tmp_path):
    """Unpacks a wheel into a folder of its own, and returns the folder and the wheel's version."""

    def unpack(requirement):
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--target"]
        done = subprocess.run([*pip, tmp_path / "nvrtc", requirement], capture_output=True, text=True, timeout=300)
        if done.returncode:
            # It takes pip and a network. A run of CI has both.
            assert "CI" not in os.environ, done.stderr
            pytest.skip(f"pip cannot install {requirement} here: {done.stderr.strip().splitlines()[-1]}")
        (about,) = (tmp_path / "nvrtc").glob("nvidia_cuda_nvrtc*.dist-info")
        return tmp_path / "nvrtc", about.name.removesuffix(".dist-info").split("-")[1]

    return unpack


@pytest.mark.skipif(sys.platform != "linux", reason="the wheels of Linux are looked into")
@pytest.mark.parametrize("requirement", WHEELS.values(), ids=WHEELS)
def test_nvrtc_compiles_a_kernel_of_every_op_and_reads_every_template(requirement, unpacked, root):
    folder, version = unpacked(requirement)
    program, paths = Path(__file__).with_name("compile_with.py"), os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, program, folder, version],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert version.startswith(found["nvrtc"] + ".")
    assert list(found["registers"]) == ["wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex"]
    assert all(0 < registers <= 255 for registers in found["registers"].values())
    templates = {path.stem for path in (root / "kernel_templates").rglob("*.cu")}
    assert set(found["read"]) == templates


def test_kernel_that_an_old_nvrtc_refuses_is_its_fault(tiny, monkeypatch):
    from rwkv_jit.kernels import kernel

    broken = tiny(text="int x = SIZE; unknown words\n")
    with pytest.raises(CompileError, match="could not compile tiny for sm_90 with SIZE=1"):
        kernel.get(broken)
    kernel.forget()
    monkeypatch.setattr(cuda, "OLDEST_NVRTC", (99, 1))
    message = "is older than 99.1, the oldest that rwkv_jit supports, and could not compile tiny: `rwkv-jit doctor`"
    with pytest.raises(CompileError, match=re.escape(message)):
        kernel.get(broken)


@pytest.mark.parametrize(
    ("arch", "target"),
    [("sm_90a", "sm_90a"), ("sm_103", "compute_101"), ("sm_110", "compute_101"), ("sm_121", "compute_120")],
)
def test_nvrtc_that_knows_larger_numbers_may_be_older_than_the_gpu(arch, target, monkeypatch):
    known = (75, 80, 86, 89, 90, 100, 101, 120)  # by 12.8
    monkeypatch.setattr(cuda.nvrtc(), "getSupportedArchs", lambda: known)
    assert compiler.target_for(arch) == target
    if arch != target:
        with pytest.raises(UnsupportedConfigError, match=f"got {arch}"):
            compiler.target_for(arch, newer=False)


@pytest.mark.parametrize(
    ("version", "has_cache"), [((12, 4), False), ((12, 8), False), ((12, 9), True), ((13, 0), True)]
)
def test_options_are_those_that_an_nvrtc_knows(version, has_cache, monkeypatch):
    monkeypatch.setattr(cuda.nvrtc(), "getVersion", lambda: version)
    given = compiler.options("sm_90")
    assert ("--no-cache" in given) == has_cache
    assert tuple(option for option in given if option != "--no-cache") == compiler.key_options("sm_90")
