"""The history of a kernel: its steps, its launches on a driver that takes notes, and its table."""

import argparse
import importlib.util
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import history
from bench.__main__ import main
from bench.history import Form, Step
from rwkv_jit import bench, cuda, kernel, machine, tensors, tuned
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import torch_op

_spec = importlib.util.spec_from_file_location("stub_driver", Path(__file__).with_name("stub_driver.py"))
stub_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_driver)
gpus = stub_driver.gpus

SHAPE = (2, 5, 3, 40)


# ---- the steps ---------------------------------------------------------------------------------------------------


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


# ---- launches ----------------------------------------------------------------------------------------------------


def make_inputs(dtype=torch.float16, shape=SHAPE):
    *_, heads, head_size = shape
    r, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    return [r, k, v, torch.randn(heads, head_size), torch.randn(heads, head_size).to(dtype)]


@pytest.fixture
def driver(gpus, nothing_known, monkeypatch):
    """CPU tensors stand in for those of an sm_80."""

    def get_all(requests, soon=()):
        made = [gpus.make_kernel(entries=(request.template.name,)) for request in requests]
        for each, request in zip(made, requests, strict=True):
            each.name, each.parameters = request.template.name, dict(request.parameters)
        return made

    monkeypatch.setattr(kernel, "get_all", get_all)
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_80")
    monkeypatch.setattr(tensors, "also", lambda device: ())
    monkeypatch.setattr(tuned, "on_device", lambda device: ())
    monkeypatch.setattr(torch_op, "is_for_kernels", lambda backend, like: True)
    monkeypatch.setattr(cuda, "make_current", lambda device: gpus.make_current(gpus.current))  # of CPU tensors
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    gpus.sizes.update({
        "wkv5_history": [8] * 6 + [24] * 3 + [8, 8, 4],
        "gla_forward": [8] * 11 + [24] * 4 + [8, 8, 4, 4],
        "gla_scan": [8] * 11 + [24] * 4 + [8, 8, 4],
    })  # fmt: skip
    return gpus


def test_forms_are_launched_with_their_threads_on_the_inputs_as_they_are(driver):
    given = make_inputs()
    given[0] = given[0].transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens
    batch, tokens, heads, head_size = SHAPE
    found = history.prepare("wkv5", given)
    ys = [form.forward() for _, form in found[:5]]
    assert [y.dtype for y in ys] == [torch.float32] + [torch.float16] * 4
    assert all(y.shape == SHAPE and y.is_contiguous() for y in ys)
    assert [form.both for _, form in found[:5]] == [None] * 5
    assert [(each.grid, each.block) for each in driver.launches] == [
        ((batch * heads, 2, 1), (32, 1, 1)),
        ((batch * heads, 2, 1), (32, 1, 1)),
        ((batch * heads, 2, 1), (32, 1, 1)),
        ((batch * heads, 1, 1), (40, 1, 1)),
        ((batch * heads, 1, 1), (40, 1, 1)),
    ]
    r, k, v, w, u = given
    for launch, y in zip(driver.launches, ys, strict=True):
        assert (launch.entry, launch.stream, launch.shared_bytes) == ("wkv5_history", 7, 0)
        addresses = [struct.unpack("=Q", each)[0] for each in launch.arguments[:6]]
        assert addresses[:3] + addresses[4:] == [x.data_ptr() for x in (r, k, v, u, y)]
        assert addresses[3] != w.data_ptr()  # the factors of a step, mapped beforehand
        assert [struct.unpack("=3q", each) for each in launch.arguments[6:9]] == [x.stride()[:3] for x in (r, k, v)]
        assert launch.arguments[9:] == stub_driver.packed("qqf", tokens, heads, 1.0)
    assert r.stride() != v.stride()


def test_last_steps_are_kernels_of_the_op(driver, monkeypatch):
    def wkv5(*given, **options):
        called.append(options)
        return bench.REFERENCES["wkv5"](*given)

    called, shape = [], (1, 64, 2, 32)
    monkeypatch.setitem(bench.OPS, "wkv5", wkv5)
    given = make_inputs(torch.bfloat16, shape)
    _, recurrent, chunked = (form for _, form in history.prepare("wkv5", given)[4:])
    assert [form.kernel.name for form in (recurrent, chunked)] == ["gla_recurrent_forward", "gla_scan"]
    assert chunked.kernel.parameters["LARGEST_DECAY"] == 0  # one kernel, which does not look at the decays
    for form, entry in ((recurrent, "gla_forward"), (chunked, "gla_scan")):
        assert form.forward().shape == shape
        assert driver.launches[-1].entry == entry
        addresses = [struct.unpack("=Q", each)[0] for each in driver.launches[-1].arguments[:5]]
        assert addresses == [x.data_ptr() for x in given]
        assert [grad.shape for grad in form.both()] == [x.shape for x in given]
    assert called == [{"backend": name, "decay_bound": -1.0} for name in ("recurrent", "chunked")]


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [
        (torch.float32, 40, "takes float16 and bfloat16, got torch.float32"),
        (torch.float16, 160, "head sizes up to 128"),
    ],
)
def test_a_step_that_cannot_be_done_is_told_with_the_reason(driver, dtype, size, reason):
    *others, (_, chunked) = history.prepare("wkv5", make_inputs(dtype, (1, 5, 2, size)))
    assert all(isinstance(form, Form) for _, form in others)
    assert isinstance(chunked, UnsupportedConfigError)
    assert reason in str(chunked)


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
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("speedup") for row in rows] == [1.0, 4.0, None, 0.5]
    assert [row.get("speedup_to_first") for row in rows] == [1.0, 4.0, None, 2.0]
    assert [row.get("error") for row in rows] == [0.5, 0.0, None, 0.0]
    assert [row.get("forward_backward_ms") for row in rows] == [None, None, None, 9.0]
    assert [row["obstacle"] for row in rows] == [None, None, "backend: cannot", None]
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
    monkeypatch.setattr(machine, "env_report", lambda: {"gpus": ["a GPU"]})
    assert main(["history", "--op", "wkv5", "--shape", "2,7,3,40", "--dtype", "fp16", "--json"]) == 0
    assert '"rows": []' in capsys.readouterr().out
    assert main(["history", "--json"]) == 0
    shapes = [("wkv5", (1, 54, 32, 64)), ("wkv5", (8, 4096, 32, 64)), ("timex", (32, 768, 12, 64))]
    assert measured == [("wkv5", (2, 7, 3, 40), torch.float16), *((*case, torch.bfloat16) for case in shapes)]
    assert main(["history", "--shape", "1,2,3"]) == 2
    assert "shape: expected four positive numbers B,T,H,N, got '1,2,3'" in capsys.readouterr().err
