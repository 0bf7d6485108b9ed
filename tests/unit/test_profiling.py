"""The profile of an op: its ranges, what is read from a trace, what is printed, and NVIDIA's profilers."""

import contextlib
import json
import shlex
import sys
from types import ModuleType

import pytest
import torch

from rwkv_jit.desk import bench, cli, profiling, versions


@pytest.fixture
def cpu(monkeypatch):
    """CPU tensors stand in for those of a GPU; returns the ranges that were opened and what else was called."""
    said = []

    @contextlib.contextmanager
    def nvtx(name):
        said.append(name)
        yield

    @contextlib.contextmanager
    def watched():
        said.append("start")
        yield
        said.append("stop")

    real = bench.given_for
    monkeypatch.setattr(bench, "given_for", lambda case, backends: real(case, backends, "cpu"))
    monkeypatch.setattr(versions, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", watched)
    return said


def arguments(*given):
    return cli._parser().parse_args(["profile", *given])


@pytest.mark.parametrize(("op", "phase"), [(op, phase) for op in bench.OPS for phase in bench.phases_of(op)])
def test_calls_open_a_range_for_each_direction(op, phase, cpu):
    case = bench.Case(op, bench.shape_of(op, "2,3,2,4", phase), torch.float32, phase)
    call, least = profiling.prepare(case)
    assert least > 0
    cpu.clear()
    assert all(x is None or x.isfinite().all() for x in call())
    assert cpu == {"forward+backward": ["forward", "backward"]}.get(phase, [phase])


def test_a_function_beside_gets_logarithms_of_decays(cpu, monkeypatch):
    """It finds what ours finds, which reads them as sigmoids."""
    case = bench.Case("wkv7", (1, 5, 2, 4, 4), torch.float32)
    torch.manual_seed(0)
    ours = profiling.prepare(case)[0]()
    other = ModuleType("fla_made_up")
    other.chunk_rwkv7 = lambda *x: bench.REFERENCES["wkv7"](*x, decay="log")
    monkeypatch.setitem(sys.modules, "fla_made_up", other)
    torch.manual_seed(0)
    theirs = profiling.prepare(case, beside="fla_made_up.chunk_rwkv7")[0]()
    torch.testing.assert_close(theirs[0], ours[0])
    for name in ("fla_made_up.other", "no_such_module.x", "chunk_rwkv7"):
        with pytest.raises(ValueError, match="--beside: expected a function such as fla.ops.rwkv7.chunk_rwkv7, got"):
            profiling.prepare(case, beside=name)


# ---- traces ------------------------------------------------------------------------------------------------------


def kernel(name, dur, registers=32, **more):
    about = {"registers per thread": registers, "shared memory": 1024, "grid": [4, 2, 1], "block": [128, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "dur": dur, "args": about | more}


EVENTS = [
    kernel("wkv7_forward", 30.0), kernel("wkv7_forward", 34.0), kernel("wkv7_forward", 5.0, registers=64),
    kernel("wkv7_forward", 7.0, registers=64), kernel("add", 1.0), kernel("add", 2.0), kernel("add", 3.0),
    kernel("add", 6.0),
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 12.0, "args": {"bytes": 4096}},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset", "dur": 0.0, "args": {"bytes": 8}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::add", "dur": 1e6},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "forward", "dur": 1e6},
    {"ph": "i", "cat": "kernel", "name": "a mark"}, {"ph": "M", "name": "process_name"},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of a profiler that finds no GPU
def test_trace_is_written_for_tensorboard_and_chrome(cpu, tmp_path):
    ran = []

    def run():
        ran.append(None)
        with torch.profiler.record_function("a phase of the op"):
            return [torch.ones(3) + 1]

    other = tmp_path / "wkv7_forward.1.pt.trace.json"
    other.write_text("of a run before")
    kernels, files = profiling.record(run, tmp_path, "wkv7_forward")
    assert (kernels, len(ran)) == ([], 1 + profiling.RUNS)
    assert files["chrome"] == str(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    with open(files["tensorboard"]) as file:
        assert file.read() == text
    ranges = [each for each in json.loads(text)["traceEvents"] if each.get("name") == "a phase of the op"]
    assert len([each for each in ranges if each.get("cat") == "user_annotation"]) == profiling.RUNS
    assert other.read_text() == "of a run before"
    assert profiling.record(run, None, "other")[1] is None


@pytest.fixture
def profiled(cpu, monkeypatch):
    """The profiler's trace is the made-up one."""
    monkeypatch.setattr(profiling, "RUNS", 2)

    def record(call, folder, name):
        call()
        files = folder and {"chrome": f"{folder}/trace.json", "tensorboard": f"{folder}/{name}.7.pt.trace.json"}
        return profiling.kernels_of(EVENTS), files

    monkeypatch.setattr(profiling, "record", record)
    environment = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}
    monkeypatch.setattr(versions, "env_report", lambda: environment)


def test_command_prints_a_table_and_where_the_traces_are(profiled, cpu, run, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "traces"
    asked = ("profile", "wkv7", "--shape", "2,3,2,4", "--dtype", "fp32")
    code, printed, said = run(*asked, "--trace", folder)
    assert (code, said) == (0, "")
    assert printed == (
        "a GPU, torch 2.13, NVRTC 12.9\n\n"
        "wkv7 (2, 3, 2, 4, 4) fp32, forward\n"
        "  kernel        launches  self us  share %  median us  bytes  registers  shared B  grid   block\n"
        "  wkv7_forward         1    32.00     64.0      32.00      -         32      1024  4x2x1  128x1x1\n"
        "  wkv7_forward         1     6.00     12.0       6.00      -         64      1024  4x2x1  128x1x1\n"
        "  add                  2     6.00     12.0       2.50      -         32      1024  4x2x1  128x1x1\n"
        "  Memcpy DtoD        0.5     6.00     12.0      12.00   2048          -         -  -      -\n"
        "  Memset             0.5     0.00      0.0       0.00      4          -         -  -      -\n\n"
        "Per run, of 2: 50.00 us of kernels, copies and fills; inputs and results have 0.0 MB, 0.00 TB/s over that "
        "time.\n"
        "Bytes are known only for copies and fills; `--ncu KERNEL` prints how to count those of a kernel.\n"
        f"{folder}/trace.json: for chrome://tracing or ui.perfetto.dev\n"
        f"{folder}/wkv7_forward.7.pt.trace.json: for TensorBoard, with --logdir and its folder\n"
    )
    assert folder.is_dir()
    assert cpu == ["forward"] * (profiling.WARM_UP + 1)
    result = json.loads(run(*asked, "--json")[1])
    assert {name: result[name] for name in ("op", "shape", "dtype", "phase", "backend", "runs", "trace")} == {
        "op": "wkv7", "shape": [2, 3, 2, 4, 4], "dtype": "fp32", "phase": "forward", "backend": "auto", "runs": 2,
        "trace": None,
    }  # fmt: skip
    assert result["least_bytes"] == 7 * 4 * 2 * 3 * 2 * 4  # six inputs and y
    assert result["total_us"] == 50.0
    assert result["kernels"][0] == {
        "name": "wkv7_forward", "launches": 1.0, "self_us": 32.0, "median_us": 32.0, "share": 0.64, "bytes": None,
        "registers": 32, "shared_bytes": 1024, "grid": [4, 2, 1], "block": [128, 1, 1],
    }  # fmt: skip
    assert sum(kernel["share"] for kernel in result["kernels"]) == pytest.approx(1.0)
    assert result["beside"] is None
    assert profiling.kernels_of(EVENTS[-4:]) == []
    monkeypatch.setattr(profiling, "kernels_of", lambda events: [])
    code, _, said = run(*asked)
    assert (code, "torch.profiler saw no kernel" in said) == (2, True)


# ---- NVIDIA's profilers ------------------------------------------------------------------------------------------


def test_bare_run_is_watched_after_the_warm_up(cpu, run):
    code, printed, said = run("profile", "gla", "--bare", "--shape", "2,3,2,4", "--phase", "forward+backward")
    assert (code, said) == (0, "")
    assert printed == (
        "gla (2, 3, 2, 4, 4) bf16, forward+backward: ran once between cudaProfilerStart and cudaProfilerStop\n"
    )
    once = ["forward", "backward"]
    assert cpu == [*once * profiling.WARM_UP, "start", *once, "stop"]


@pytest.mark.parametrize(
    ("kernels", "file"), [("wkv7_backward", "wkv7_backward"), ("regex:wkv7|add; rm x", "wkv7_add_rm_x")]
)
def test_ncu_line_runs_the_same_phase_without_torch_profiler(kernels, file, run):
    """It quotes what a shell would read."""
    given = ("profile", "wkv7", "--shape", "1,54,32,64", "--dtype", "fp16", "--phase", "forward+backward")
    code, printed, said = run(*given, "--backend", "recurrent", "--ncu", kernels)
    assert (code, said) == (0, "")
    assert json.loads(run(*given, "--backend", "recurrent", "--ncu", kernels, "--json")[1])["command"] == printed[:-1]
    words = shlex.split(printed)
    assert words[:2] == ["RWKVJIT_LINEINFO=1", "ncu"]
    at = words.index(sys.executable)
    ncu, own = words[2:at], words[at + 1 :]
    flags = dict(zip(ncu, ncu[1:], strict=False))
    assert flags["--profile-from-start"] == "off"
    assert flags["--kernel-name"] == kernels
    assert flags["--clock-control"] == "none"
    assert flags["--export"] == f"wkv7_forward_backward_{file}"
    assert own[:2] == ["-m", "rwkv_jit"]
    parsed = cli._parser().parse_args(own[2:])
    assert vars(parsed) == vars(arguments(*given[1:], "--backend", "recurrent", "--bare"))


# ---- bad input ---------------------------------------------------------------------------------------------------

WRONG_SHAPE = "expected positive numbers B,T,H,N or B,T,H,K,V for wkv7, got '1,2,3'"
WKV4_KERNELS = "expected one of wkv4_backward, wkv4_forward, wkv4_update, or regex: and an expression"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["wkv9"], "op: invalid choice: 'wkv9'"),
        (["wkv7", "--shape", "1,2,3"], f"rwkv-jit profile: --shape: {WRONG_SHAPE}"),
        (["wkv7", "--shape", "1,2,3", "--ncu", "wkv7_scan"], f"--shape: {WRONG_SHAPE}"),
        (["wkv7", "--shape", "1,2,3", "--bare"], f"--shape: {WRONG_SHAPE}"),
        (["wkv7", "--phase", "up"], "--phase: invalid choice: 'up'"),
        (["wkv7", "--dtype", "fp8"], "--dtype: invalid choice: 'fp8'"),
        (
            ["wkv7", "--ncu", "gla_scan"],
            "wkv7_scan, wkv7_segment, wkv7_token_gradients, or regex: and an expression, got",
        ),
        (["wkv5", "--ncu", "nope"], "--ncu: expected one of gla_backward, gla_forward, gla_group_key_gradients, "),
        (["wkv7", "--phase", "update", "--ncu", "wkv7_scan"], "--ncu: expected one of update_states, or regex: and an"),
        (["wkv4", "--ncu", ""], f"--ncu: {WKV4_KERNELS}, got ''"),
        (["wkv4", "--ncu", "regex:("], f"--ncu: {WKV4_KERNELS}, got"),
        (["wkv7", "--bare", "--ncu", "x"], "--ncu: not allowed with argument --bare"),
        (["wkv7", "--trace", "x", "--bare"], "--bare: not allowed with argument --trace"),
    ],
)
def test_bad_input_is_told_in_one_line(given, message, run):
    code, printed, said = run("profile", *given)
    assert (code, printed) == (2, "")
    assert message in said.splitlines()[-1]


def test_trace_that_cannot_be_written_is_told_before_anything_runs(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(profiling, "prepare", lambda *_: pytest.fail("the folder is checked first"))
    code, printed, said = run("profile", "wkv7", "--trace", tmp_path / "file")
    assert (code, printed) == (2, "")
    assert f"--trace: expected a folder that can be written, got {tmp_path / 'file'} (File exists)" in said


@pytest.mark.parametrize("option", [[], ["--bare"]])
def test_without_a_gpu_it_is_one_sentence(option, run, monkeypatch):
    monkeypatch.setattr(versions, "is_available", lambda: False)
    sentence = "kernels need a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing"
    assert run("profile", "wkv7", *option) == (2, "", f"rwkv-jit profile: {sentence}\n")
