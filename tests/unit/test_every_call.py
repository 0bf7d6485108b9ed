"""Of all ops, verbs and layer ops: a call that came before takes few functions and launches what the first one did.

So does a call under a mode of torch's dispatcher, which sees the torch ops as a compiler's graph has them.
"""

import sys
from pathlib import Path

import launch_calls
import pytest
import random_calls
from torch.utils._python_dispatch import TorchDispatchMode

import rwkv_jit
from rwkv_jit.kernels import signatures

PACKAGE = str(Path(rwkv_jit.__file__).parent)
LAUNCHES = ("launch.py", "cuda.py")  # each launch takes one function, however many there are
MOST_FORWARD, MOST_BACKWARD = 12, 10
EACH = pytest.mark.parametrize(("op", "verb"), launch_calls.KINDS)


class Passes(TorchDispatchMode):
    """A mode that runs what it sees."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def frames(run):
    """Return how many functions of the package a call enters, but for launches, and its result."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        path = frame.f_code.co_filename
        is_launch = Path(path).name in LAUNCHES or frame.f_code.co_name == "launch"
        count += event == "call" and path.startswith(PACKAGE) and not is_launch

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(before)
    return count, result


@EACH
def test_launches_and_functions_of_known_calls(op, verb, on_gpu, monkeypatch):
    monkeypatch.setattr(random_calls, "DEVICE", "cpu")  # where all say that they are on a GPU
    on_gpu.use("sm_90")
    signatures.forget()
    slow = {}
    for call in launch_calls.of(op, verb):
        launched, count = [], 0
        for _ in range(3):
            on_gpu.order.clear()
            count, _ = frames(call.run)
            launched.append(launch_calls.lines(on_gpu.order))
        on_gpu.order.clear()
        with Passes():
            call.run()
        seen = launch_calls.lines(on_gpu.order)
        assert launched[1:] == launched[:1] * 2, call.name
        # Compiled graphs cut no packed sequences: what the backward takes has one size for any lengths.
        assert seen == launched[0] or any(line.startswith("cut_sequences ") for line in launched[0]), call.name
        # Random calls have memory that kernels cannot take as it is, and copies of it.
        if "random" not in call.name and count > MOST_FORWARD + MOST_BACKWARD * call.has_backward:
            slow[call.name] = count
    assert not slow
