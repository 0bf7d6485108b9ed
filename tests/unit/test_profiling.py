"""The profile of an op: its ranges, what is read from a trace, what is printed, and NVIDIA's profilers."""

import contextlib
import json
import shlex
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rwkv_jit.desk import cli, inputs, profiling, versions


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

    real = inputs.given_for
    monkeypatch.setattr(inputs, "given_for", lambda case, backends: real(case, backends, "cpu"))
    monkeypatch.setattr(versions, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", watched)
    return said


def arguments(*given):
    return cli._parser().parse_args(["profile", *given])


@pytest.mark.parametrize(("op", "phase"), [(op, phase) for op in inputs.OPS for phase in inputs.phases_of(op)])
def test_calls_open_a_range_for_each_direction(op, phase, cpu):
    case = inputs.Case(op, inputs.shape_of(op, "2,3,2,4", phase), torch.float32, phase)
    call = profiling.prepare(case)
    cpu.clear()
    assert all(x is None or x.isfinite().all() for x in call())
    assert cpu == {"forward+backward": ["forward", "backward"]}.get(phase, [phase])


def test_a_function_beside_gets_logarithms_of_decays(cpu, monkeypatch):
    """It finds what ours finds, which reads them as sigmoids."""
    case = inputs.Case("wkv7", (1, 5, 2, 4, 4), torch.float32)
    torch.manual_seed(0)
    ours = profiling.prepare(case)()
    other = ModuleType("fla_made_up")
    other.chunk_rwkv7 = lambda *x: inputs.REFERENCES["wkv7"](*x, decay="log")
    monkeypatch.setitem(sys.modules, "fla_made_up", other)
    torch.manual_seed(0)
    theirs = profiling.prepare(case, beside="fla_made_up.chunk_rwkv7")()
    torch.testing.assert_close(theirs[0], ours[0])
    for name in ("fla_made_up.other", "no_such_module.x", "chunk_rwkv7"):
        with pytest.raises(ValueError, match="--beside: expected a function such as fla.ops.rwkv7.chunk_rwkv7, got"):
            profiling.prepare(case, beside=name)


# ---- traces ------------------------------------------------------------------------------------------------------


def event(key, count, us, device="CUDA", is_range=False):
    return SimpleNamespace(
        key=key, count=count, self_device_time_total=us, is_user_annotation=is_range,
        device_type=SimpleNamespace(name=device),
    )  # fmt: skip


EVENTS = [
    event("add", 4, 12.0), event("wkv7_forward", 2, 64.0), event("aten::add", 4, 0.0, "CPU"),
    event("forward", 2, 1e6, is_range=True), event("Memcpy DtoD", 1, 4.0),
]  # fmt: skip


@pytest.fixture
def profiled(cpu, monkeypatch):
    """The profiler has seen made-up events, and writes a trace of its own."""

    class Profiler:
        def __init__(self, **_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def key_averages(self):
            return EVENTS

        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                file.write("{}")

    monkeypatch.setattr(profiling, "RUNS", 2)
    monkeypatch.setattr(profiling, "profile", Profiler)
    environment = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}
    monkeypatch.setattr(versions, "env_report", lambda: environment)


def test_command_prints_a_table_and_where_the_trace_is(profiled, cpu, run, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "traces"
    asked = ("profile", "wkv7", "--shape", "2,3,2,4", "--dtype", "fp32")
    code, printed, said = run(*asked, "--trace", folder)
    assert (code, said) == (0, "")
    trace = folder / "wkv7_forward.pt.trace.json"
    assert printed == (
        "a GPU, torch 2.13, NVRTC 12.9\n\n"
        "wkv7 (2, 3, 2, 4, 4) fp32, forward, per run, of 2\n"
        "  kernel        launches  self us  share\n"
        "  wkv7_forward         1    32.00  80.0%\n"
        "  add                  2     6.00  15.0%\n"
        "  Memcpy DtoD        0.5     2.00  5.0%\n\n"
        f"{trace}: for chrome://tracing, ui.perfetto.dev and TensorBoard\n"
    )
    assert trace.read_text() == "{}"
    assert cpu == ["forward"] * (profiling.WARM_UP + 2)
    result = json.loads(run(*asked, "--json")[1])
    assert {name: result[name] for name in ("op", "shape", "dtype", "phase", "backend", "runs", "trace", "beside")} == {
        "op": "wkv7", "shape": [2, 3, 2, 4, 4], "dtype": "fp32", "phase": "forward", "backend": "auto", "runs": 2,
        "trace": None, "beside": None,
    }  # fmt: skip
    assert result["kernels"][0] == {"name": "wkv7_forward", "launches": 1.0, "self_us": 32.0, "share": 0.8}
    monkeypatch.setattr(sys.modules[__name__], "EVENTS", EVENTS[2:4])
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
        (["kda", "--phase", "update", "--ncu", "wkv7_scan"], "--ncu: expected one of update_rules, or regex: and an"),
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


@pytest.mark.parametrize("option", [[], ["--bare"], ["--trace", "folder"]])
def test_without_a_gpu_it_is_one_sentence(option, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "is_available", lambda: False)
    sentence = "kernels need a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing"
    assert run("profile", "wkv7", *option) == (2, "", f"rwkv-jit profile: {sentence}\n")
    assert not [*tmp_path.iterdir()]
