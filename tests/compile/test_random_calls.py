"""Random calls of every op, verb and layer op without a GPU, as small as they can be: those of the GPU tests."""

import random
from functools import partial

import derived_cases
import pytest
import random_calls
import torch

import rwkv_jit
from rwkv_jit.kernels import signatures

# Sequences take most of the time, and no call of theirs changes a tensor in place.
KINDS = [pytest.param(op, verb, marks=[pytest.mark.full] * (verb == "sequences")) for op, verb in random_calls.KINDS]


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(("op", "verb"), KINDS)
def test_random_calls(op, verb, seed, interpreted, monkeypatch):
    monkeypatch.setattr(random_calls, "DEVICE", "cpu")  # where all say that they are on a GPU
    draw = random.Random(f"{op} {verb} {seed}")
    torch.manual_seed(draw.randrange(2**31))
    interpreted.use(draw.choice(["sm_80", "sm_90", "sm_120"]))
    profile = random_calls.profile(draw, op, verb, random_calls.SMALL)
    signatures.forget()
    random_calls.check(draw, random_calls.make(draw, op, verb, profile, most=20))


@pytest.mark.parametrize("dtype", [random_calls.FP16, random_calls.FP32])
@pytest.mark.parametrize("op", derived_cases.WAYS)
def test_each_gradient_alone(op, dtype, interpreted, monkeypatch):
    """What a backward reads, and what it has no place for, depends on the gradients that are wanted."""
    monkeypatch.setattr(random_calls, "DEVICE", "cpu")
    draw = random.Random(f"{op} {dtype}")
    torch.manual_seed(draw.randrange(2**31))
    interpreted.use("sm_90")
    case = derived_cases.make(op, derived_cases.WAYS[op][-1], (1, 20, 1, 2, 16, 16), dtype, has_state=False)

    def run(given, name=op):
        call = case.replaced(given)
        return [call.run(getattr(rwkv_jit, name))[0]]

    for name in case.tensors:
        call = random_calls.Call(f"{op} d{name}", case.tensors, run, partial(run, name=f"{op}_ref"), dtype)
        random_calls.check(draw, call, [name])
