"""Random calls of every op, verb and layer op without a GPU, as small as they can be: those of the GPU tests."""

import random

import pytest
import random_calls
import torch

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
