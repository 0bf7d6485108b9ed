"""Wheels of kernels: the same bytes from the same sources, and with one installed nothing is compiled."""

import importlib.util
import subprocess
import sys
import zipfile
from email import message_from_bytes

import pytest
import torch

import rwkv_jit
from rwkv_jit.ahead import requests
from rwkv_jit.kernels import identity, kernel
from rwkv_jit.kernels.cache import bundle, installed
from rwkv_jit.kernels.errors import CompileError

pytestmark = pytest.mark.usefixtures("compiled_once")

SERVED = """
import sys, torch
def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "nvrtc" in line}
of_torch = libraries()  # a build for CUDA loads its own
import rwkv_jit
from rwkv_jit.ahead import kernel_wheels
from rwkv_jit.kernels import stats
kernels = rwkv_jit.warm("wkv7", 8, torch.float32, arch="sm_80")
one = rwkv_jit.specialize("wkv7", 8, dtype=torch.float32, arch="sm_80", direction="backward")
print(sorted({each.origin for each in kernels}), one.origin, stats.snapshot()["bundle"], stats.snapshot()["compiled"])
print([(each.usable, each.kernels) for each in kernel_wheels.listed()])
print(libraries() - of_torch, "cupy" in sys.modules)
"""


@pytest.fixture
def tool(root, monkeypatch):
    """The program that builds wheels, as a module."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("kernels_wheel", root / "tools" / "kernels_wheel.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_wheel", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(tool):
    """Calls of few kernels, which compile fast."""
    return [tool.Calls("wkv7", ((8, 8),), (torch.float32,))]


@pytest.fixture
def wheel(tool, small, tmp_path):
    return tool.write("sm_80", tool.build("sm_80", small), tmp_path / "dist")


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_is_data_alone_and_says_what_it_is_for(wheel, tool, small, tmp_path):
    version = rwkv_jit.__version__
    info = f"rwkv_jit_kernels_sm_80-{version}.dist-info"
    assert wheel.name == f"rwkv_jit_kernels_sm_80-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    names = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"]
    assert sorted(found) == [*(f"{info}/{name}" for name in names), "rwkv_jit_kernels_sm_80/kernels.bundle"]
    metadata = message_from_bytes(found[f"{info}/METADATA"])
    wanted = ("rwkv-jit-kernels-sm-80", version, f"rwkv-jit=={version}")
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Dist"]) == wanted
    assert found[f"{info}/entry_points.txt"] == b"[rwkv_jit.kernels]\nsm_80 = rwkv_jit_kernels_sm_80\n"

    path = tmp_path / "kernels.bundle"
    path.write_bytes(found["rwkv_jit_kernels_sm_80/kernels.bundle"])
    path.chmod(0o644)
    warmed = rwkv_jit.warm("wkv7", 8, torch.float32, arch="sm_80")
    assert bundle.Bundle(path).entries() == dict(each.entry() for each in warmed)
    assert tool.write("sm_80", tool.build("sm_80", small), tmp_path / "again").read_bytes() == wheel.read_bytes()


def test_with_a_wheel_nothing_is_compiled_and_nvrtc_stays_away(wheel, child, tmp_path):
    site = tmp_path / "site"
    pip("install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    package = str(rwkv_jit.__path__[0]).removesuffix("rwkv_jit")
    variables = {
        "PYTHONPATH": f"{site}:{package}", "RWKVJIT_ASSERT_CACHED": "1", "RWKVJIT_CACHE_DIR": str(tmp_path / "empty")
    }  # fmt: skip
    done = child(SERVED, after="torch", env=variables)
    assert done.stdout == "['bundle'] memory 6 0\n[(6, 6)]\nset() False\n"
    assert not list((tmp_path / "empty").glob("**/*.cubin"))


def test_wheel_serves_what_doctor_and_demo_must_compile_to_nobody(wheel, tmp_path, monkeypatch):
    from rwkv_jit.desk import demo

    pip("install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(installed, "_left_aside", False)
    kernel.forget()
    ask = {"head_size": 8, "dtype": torch.float32, "arch": "sm_80"}
    assert rwkv_jit.specialize("wkv7", **ask).origin == "bundle"
    with demo.empty_cache():
        assert rwkv_jit.specialize("wkv7", **ask).origin == "compiled"
    assert rwkv_jit.specialize("wkv7", **ask).origin == "bundle"
    kernel.forget()
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    with pytest.raises(CompileError, match="RWKVJIT_ASSERT_CACHED is set and wkv7_recurrent_forward for sm_80"):
        rwkv_jit.specialize("wkv7", **ask)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_every_architecture_has_kernels_of_all_calls(arch, tool):
    assert arch in tool.ARCHS
    found = {kernel.memory_key(request) for request in tool.requests(arch)}
    for op, head_size, decay in (("wkv7", 64, None), ("wkv7", 64, "sigmoid"), ("wkv6", 64, None), ("gla", 128, None)):
        wanted = [
            request._replace(also=())
            for direction in requests.DIRECTIONS
            for request in requests.call_requests(requests.Calls(op, head_size, torch.bfloat16, arch, direction, decay))
        ]
        assert {kernel.memory_key(request) for request in wanted} <= found
    assert {request.arch for request in tool.requests(arch)} == {arch}
    assert len(found) > 150


def test_program_writes_a_wheel_of_each_architecture(tool, small, tmp_path, monkeypatch):
    build = tool.build
    monkeypatch.setenv("RWKVJIT_LINEINFO", "1")
    monkeypatch.setattr(tool, "build", lambda arch: build(arch, small))
    monkeypatch.setattr(identity, "version", lambda: "12.9")
    monkeypatch.setattr(sys, "argv", ["kernels_wheel.py", "--arch", "sm_80,sm_86", "-o", str(tmp_path / "made")])
    lines = list(tool._main())
    assert [line.split(",")[0] for line in lines] == [
        f"{path}: 6 kernels by NVRTC 12.9" for path in sorted((tmp_path / "made").glob("*.whl"))
    ]
    assert len(lines) == 2
    kernels = build("sm_80", small)
    assert tool.write("sm_80", kernels, tmp_path).read_bytes() == min((tmp_path / "made").iterdir()).read_bytes()


@pytest.mark.parametrize(
    ("arch", "nvrtc", "message"),
    [
        ("sm_80,sm_70", "12.9", "--arch: expected some of sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120, got 'sm_70'"),
        ("sm_80", "13.1", "expected NVRTC 12, whose kernels drivers for CUDA 12 and for later ones load, got 13.1"),
    ],
)
def test_program_refuses_what_would_serve_nobody(arch, nvrtc, message, tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels_wheel.py", "--arch", arch])
    monkeypatch.setattr(identity, "version", lambda: nvrtc)
    with pytest.raises(SystemExit):
        list(tool._main())
    assert message in capsys.readouterr().err


def test_wheel_of_sm_90a_has_what_a_gpu_asks_for_as_sm_90(tool):
    """Calls ask for their GPU's own architecture, and take code for its kind alone instead."""

    def asked(arch):
        return {kernel.memory_key(request._replace(arch="")) for request in tool.requests(arch)}

    assert asked("sm_90") == asked("sm_90a")
