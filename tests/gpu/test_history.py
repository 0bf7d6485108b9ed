"""The forms that kernels went through, on the GPU against the float64 recurrence on the same rounded inputs."""

import json

import comparing
import pytest
import torch

from bench import history
from bench.__main__ import main
from bench.history import Form
from rwkv_jit.call import tensors
from rwkv_jit.schedules import diagonal_chunked
from rwkv_jit.schedules.common import Case
from rwkv_jit.schedules.table import OPS

DTYPES, relative = comparing.DTYPES, comparing.relative
HEAD_SIZES = [7, 40, 64, 100, 128]
SHAPE = (2, 65, 3, 64)
STEPS = range(len(history.HISTORIES["wkv5"].steps(SHAPE, torch.float16)))
GATE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 3e-3}
CHUNKED_GATE = 6e-3


def has_chunks(dtype, head_size):
    case = Case(OPS["wkv5"], tensors.STORAGE[dtype], head_size, head_size, SHAPE[1], "raw", -1.0, None, training=False)
    return diagonal_chunked.why_not(case, lambda: tensors.gpu(0)) is None


def check(number, given):
    """One step against float64, twice: nothing of the first run may be left in the second."""
    of, dtype = history.HISTORIES["wkv5"], given[0].dtype
    step, form = history.prepare("wkv5", given)[number]
    if not isinstance(form, Form):
        assert step.backend == "chunked"
        assert not has_chunks(dtype, given[0].shape[3])
        return
    want = of.reference(*[x.double() for x in given])
    first = form.forward().clone()
    y = form.forward()
    assert y.dtype == (torch.float32 if number == 0 else dtype)
    assert torch.equal(first, y)
    gate = CHUNKED_GATE if step.backend == "chunked" else GATE[y.dtype]
    assert relative(y, want) <= gate, step.change


def make_inputs(shape, dtype):
    return history.HISTORIES["wkv5"].make_inputs(shape, dtype)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", STEPS)
def test_every_head_size(number, dtype, head_size):
    check(number, make_inputs((2, 37, 3, head_size), DTYPES[dtype]))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [1, 2, 31, 65, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", STEPS)
def test_every_length(number, dtype, tokens):
    check(number, make_inputs((1, tokens, 5, 64), DTYPES[dtype]))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("number", STEPS)
def test_heads_before_tokens(number):
    *streamed, w, u = make_inputs(SHAPE, torch.bfloat16)
    check(number, [*(comparing.strided(x, "heads first") for x in streamed), w, u])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_command(capsys, dtype):
    assert main(["history", "--op", "wkv5", "--shape", "1,54,4,40", "--dtype", dtype, "--json"]) == 0
    printed, said = capsys.readouterr()
    assert said == ""
    rows = json.loads(printed)["rows"]
    assert [row["step"] for row in rows] == [number + 1 for number in STEPS]
    done = [row for row in rows if row["obstacle"] is None]
    assert len(rows) - len(done) == (not has_chunks(DTYPES[dtype], 40))
    assert all(row["forward_ms"] > 0 and row["in_graph"] and row["registers"] > 0 for row in done)
    assert all(0 < row["error"] < CHUNKED_GATE for row in done)
    assert [row["forward_backward_ms"] is not None for row in rows[:6]] == [False] * 5 + [True]
