"""The command line as a user types it, on a machine without a GPU."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def rwkv_jit_command(tmp_path):
    env = {**os.environ, "RWKVJIT_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments):
        command = [sys.executable, "-m", "rwkv_jit", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    return run


def test_demo_compiles_and_keeps_the_errors_small(rwkv_jit_command, tmp_path):
    done = rwkv_jit_command("demo", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    kernels, calls = data["kernels"], data["calls"]
    assert {(k["op"], k["direction"]) for k in kernels} == {
        (op, direction) for op in ("wkv6", "wkv7") for direction in ("forward", "backward")
    }
    assert all(k["registers"] > 0 for k in kernels)
    assert data["passed"]
    assert all(0 < c["error"] < 3e-3 and 0 < c["gradient_error"] < 3e-3 for c in calls)
    assert not list(tmp_path.glob("*/*.cubin"))


def test_info_is_a_bug_report(rwkv_jit_command, tmp_path):
    done = rwkv_jit_command("info", "--json")
    assert done.returncode == 0, done.stderr
    text = json.dumps(json.loads(done.stdout))
    for part in ("nvrtc", "torch", "cupy", str(tmp_path)):
        assert part in text


def test_bench_without_a_gpu_is_one_sentence(rwkv_jit_command):
    done = rwkv_jit_command("bench")
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unknown_command_names_the_known_ones(rwkv_jit_command):
    done = rwkv_jit_command("dance")
    assert done.returncode == 2
    assert "demo" in done.stderr
