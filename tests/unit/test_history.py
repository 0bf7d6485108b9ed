"""The history of a kernel: its steps and its table."""

import argparse
import re
from types import SimpleNamespace

import torch

from bench import history
from bench.__main__ import main
from bench.history import Form, Step
from rwkv_jit.desk import bench, versions
from rwkv_jit.kernels.errors import UnsupportedConfigError

SHAPE = (2, 5, 3, 40)


# ---- the steps, which tests/gpu compares with the reference -------------------------------------------------------


def make_inputs(dtype=torch.float16, shape=SHAPE):
    *_, heads, head_size = shape
    r, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    return [r, k, v, torch.randn(heads, head_size), torch.randn(heads, head_size).to(dtype)]


def test_steps_of_wkv5_at_the_head_size_that_was_studied():
    common = {"HEAD_SIZE": 64, "T_IO": "fp16"}
    wanted = [
        {"ATOMICS": True, "T_Y": "fp32", "VECTOR": 1, "NUM_THREADS": 32, "STAGED": False},
        {"ATOMICS": False, "T_Y": "fp16", "VECTOR": 1, "NUM_THREADS": 32, "STAGED": False},
        {"ATOMICS": False, "T_Y": "fp16", "VECTOR": 4, "NUM_THREADS": 32, "STAGED": False},
        {"ATOMICS": False, "T_Y": "fp16", "VECTOR": 4, "NUM_THREADS": 64, "STAGED": False},
        {"ATOMICS": False, "T_Y": "fp16", "VECTOR": 4, "NUM_THREADS": 64, "STAGED": True},
    ]
    found = history.requests("wkv5", (1, 54, 32, 64), torch.float16, "sm_90")
    assert [request.parameters for request in found] == [common | each for each in wanted]
    assert {request.template.name for request in found} == {"wkv5_history"}
    steps = history.HISTORIES["wkv5"].steps((1, 54, 32, 64), torch.float16)
    assert [step.backend for step in steps] == [None] * 5 + ["recurrent", "chunked"]


def test_decays_are_those_that_the_calls_promise(monkeypatch):
    monkeypatch.setattr(bench, "make_inputs", lambda op, shape, dtype: make_inputs(dtype))
    *_, w, u = history._wkv5_inputs(SHAPE, torch.float16)
    assert (w.dtype, w.shape, u.dtype) == (torch.float32, u.shape, torch.float16)
    log_decay = -w.exp()
    assert history._LEAST_LOG_DECAY < log_decay.min() < log_decay.max() < 0


def test_no_op_finds_a_history():
    """Their templates lie outside of the library."""
    assert not any("history" in name for name in history.template.names())


# ---- measuring ---------------------------------------------------------------------------------------------------

USED = {"registers": 96, "spill_bytes": 0, "shared_bytes": 1024}


def made_up_form(y, has_backward=False):
    of = SimpleNamespace(name="made_up", parameters={"VECTOR": 4}, **USED)
    return Form(of, lambda: y, (lambda: None) if has_backward else None)


def test_rows_compare_each_step_with_the_last_that_ran_and_with_the_first(monkeypatch, capsys):
    given, exact = make_inputs(), torch.ones(SHAPE, dtype=torch.float64)
    forms = [
        (Step("first"), made_up_form(exact * 1.5)),
        (Step("second", {"VECTOR": 4}), made_up_form(exact.half())),
        (Step("third", backend="chunked"), UnsupportedConfigError("backend: cannot")),
        (Step("fourth", backend="recurrent"), made_up_form(exact, has_backward=True)),
    ]
    shapes, times = [], iter([8.0, 2.0, 4.0])
    made_up = history.History(
        ((8, 46, 3, 40),), lambda shape, dtype: shapes.append((shape, dtype)) or given, None, None, None,
        lambda *inputs: exact[:1],
    )  # fmt: skip
    monkeypatch.setattr(history, "HISTORIES", {"wkv5": made_up})
    monkeypatch.setattr(history, "prepare", lambda op, inputs: forms)
    monkeypatch.setattr(bench, "check_gpu", lambda: None)
    monkeypatch.setattr(history, "_time", lambda call, in_graph: (next(times) if call() is not None else 9.0, in_graph))
    rows = history.run(argparse.Namespace(op=None, shape=None, dtype="fp32"))["rows"]
    assert shapes == [((8, 46, 3, 40), torch.float32)]
    assert len(rows) == 4
    assert rows[1] == {
        "op": "wkv5", "shape": [8, 46, 3, 40], "dtype": "float32", "step": 2, "change": "second", "obstacle": None,
        "kernel": "made_up", "parameters": {"VECTOR": 4}, **USED, "forward_ms": 2.0, "in_graph": True, "speedup": 4.0,
        "speedup_to_first": 4.0, "forward_backward_ms": None, "error": 0.0,
    }  # fmt: skip
    history.show({"env": {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}, "rows": rows})
    head, _, about, *lines = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert (head, about) == (["a GPU, torch 2.13, NVRTC 12.9"], ["wkv5 (8, 46, 3, 40) float32"])
    numbers = ["96", "0", "1024"]
    assert lines == [
        ["step", "what is new", "forward ms", "in a graph", "speedup", "to the first", "fwd + bwd ms", "error",
         "registers", "spill B", "shared B"],
        ["1", "first", "8.0000", "yes", "1.00", "1.00", "-", "5.0e-01", *numbers],
        ["2", "second", "2.0000", "yes", "4.00", "4.00", "-", "0.0e+00", *numbers],
        ["4", "fourth", "4.0000", "yes", "0.50", "2.00", "9.0000", "0.0e+00", *numbers],
        ["Left out: 3, third: backend: cannot"],
        [""],
        ["Speedup of the forward to the step before, and to the first. Error of y: relative L2 against float64."],
    ]  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------------


def test_command_takes_shape_and_dtype(capsys, monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "check_gpu", lambda: None)
    monkeypatch.setattr(history, "_measure", lambda *given: measured.append(given) or [])
    monkeypatch.setattr(versions, "env_report", lambda: {"gpus": ["a GPU"]})
    assert main(["history", "--op", "wkv5", "--shape", "2,7,3,40", "--dtype", "fp16", "--json"]) == 0
    assert '"rows": []' in capsys.readouterr().out
    assert main(["history", "--json"]) == 0
    shapes = [("wkv5", (1, 54, 32, 64)), ("wkv5", (8, 4096, 32, 64)), ("timex", (32, 768, 12, 64))]
    assert measured == [("wkv5", (2, 7, 3, 40), torch.float16), *((*case, torch.bfloat16) for case in shapes)]
    assert main(["history", "--shape", "1,2,3"]) == 2
    assert "shape: expected four positive numbers B,T,H,N, got '1,2,3'" in capsys.readouterr().err
