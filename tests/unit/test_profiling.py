"""The profile of an op: its phases, what is read from a trace, what is printed, and NVIDIA's profilers."""

import contextlib
import json
import shlex
import sys

import pytest
import torch

from rwkv_jit.desk import bench, cli, profiling, versions
from rwkv_jit.desk.bench import cases


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

    real = cases.given_for
    monkeypatch.setattr(cases, "given_for", lambda case: real(case, "cpu"))
    monkeypatch.setattr(versions, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", watched)
    return said


def arguments(*given):
    return cli._parser().parse_args(["profile", *given])


# ---- the phases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", bench.PHASES)
@pytest.mark.parametrize("op", bench.OPS)
def test_phases_are_those_of_the_op(op, phase, cpu, monkeypatch):
    if phase not in cases.phases_of(op):
        return
    case = profiling.case_of(arguments(op, "--shape", "2,3,2,4", "--dtype", "fp32", "--phase", phase))
    assert case.shape == (2, 1 if phase in ("decode", "update") else 3, 2, 4, 4)
    given = cases.given_for(case)
    monkeypatch.setattr(cases, "given_for", lambda case: given)
    if phase == "update":
        call = profiling.prepare(case)
        cpu.clear()
        for _ in range(2):  # the states go on
            y, final = bench.OPS[op](
                *given.inputs, initial_state=given.states(), output_final_state=True, **case.options
            )
            made = call()
            torch.testing.assert_close(made[0], y.detach())
            torch.testing.assert_close(made[1][given.slots], final.detach())
            given = given._replace(state=made[1].clone())
        assert cpu == ["update"] * 2
        with pytest.raises(ValueError, match="^--backend: expected auto for an update, got recurrent$"):
            profiling.prepare(case, "recurrent")
        return
    state = {} if given.state is None else {"initial_state": given.state}
    y, final = bench.OPS[op](*given.inputs, **case.options, **state)
    call = profiling.prepare(case)
    cpu.clear()
    for _ in range(2):  # it can be repeated
        made = call()
        wanted = torch.autograd.grad(y, given.inputs, given.dy, retain_graph=True) if case.has_gradients else [y]
        assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=False))
        assert case.has_gradients or not made[0].requires_grad
        assert (made[1] is not None) or phase == "forward"
    assert cpu == 2 * {"forward+backward": ["forward", "backward"]}.get(phase, [phase])


def test_backend_and_inputs_go_to_the_op(cpu, monkeypatch):
    asked = []
    monkeypatch.setitem(bench.OPS, "wkv7", lambda *given, **options: asked.append(options) or (given[0], None))
    for kind in ("usual", "strong"):
        given = arguments("wkv7", "--shape", "2,3,2,4", "--dtype", "fp32", "--inputs", kind)
        profiling.prepare(profiling.case_of(given), "recurrent")()
    assert asked == [{"backend": "recurrent", "decay": decay} for decay in ("sigmoid", "raw")]


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
    written = profiling.record(run, tmp_path, "wkv7_forward")
    assert len(ran) == profiling.RUNS + 1
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "trace.json", other, written])
    assert written.read_bytes() == (tmp_path / "trace.json").read_bytes()
    events = json.loads(written.read_text())["traceEvents"]
    ranges = [each for each in events if each.get("cat") == "user_annotation" and each["name"] == "a phase of the op"]
    assert len(ranges) == profiling.RUNS  # the first run was not kept
    assert other.read_text() == "of a run before"


@pytest.fixture
def profiled(cpu, monkeypatch):
    """The profiler's trace is the made-up one; returns the folders that traces were asked for in."""
    folders = []

    def record(call, folder, name):
        call()
        folders.append(folder)
        path = folder / f"{name}.7.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": EVENTS}))
        return path

    monkeypatch.setattr(profiling, "record", record)
    monkeypatch.setattr(profiling, "RUNS", 2)
    environment = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}
    monkeypatch.setattr(versions, "env_report", lambda: environment)
    return folders


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
    assert profiled == [folder]
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
    assert profiling.kernels_of(EVENTS[-4:], 2) == []
    assert not profiled[1].exists()
    monkeypatch.setattr(profiling, "kernels_of", lambda events, runs: [])
    code, _, said = run(*asked)
    assert (code, "torch.profiler saw no kernel" in said) == (2, True)


# ---- NVIDIA's profilers ------------------------------------------------------------------------------------------


def test_bare_run_is_watched_after_the_warm_up(cpu, run):
    code, printed, said = run("profile", "gla", "--bare", "--shape", "2,3,2,4", "--phase", "forward+backward")
    assert (code, said) == (0, "")
    assert printed == (
        "gla [2, 3, 2, 4, 4] bf16, forward+backward: ran once between cudaProfilerStart and cudaProfilerStop\n"
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
    monkeypatch.setattr(profiling, "_warm_call", lambda *_: pytest.fail("the folder is checked first"))
    code, printed, said = run("profile", "wkv7", "--trace", tmp_path / "file")
    assert (code, printed) == (2, "")
    assert f"--trace: expected a folder that can be written, got {tmp_path / 'file'} (File exists)" in said


@pytest.mark.parametrize("option", [[], ["--bare"]])
def test_without_a_gpu_it_is_one_sentence(option, run, monkeypatch):
    monkeypatch.setattr(versions, "is_available", lambda: False)
    sentence = "kernels need a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing"
    assert run("profile", "wkv7", *option) == (2, "", f"rwkv-jit profile: {sentence}\n")
