"""Of all ops, verbs and layer ops: a call that came before takes few functions and launches what the first one did.

So does a call under a mode of torch's dispatcher, which sees the torch ops as a compiler's graph has them.
"""

import launch_calls
import pytest
from stub_driver import frames
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_jit.kernels import signatures

MOST_FORWARD, MOST_BACKWARD = 12, 10
EACH = pytest.mark.parametrize(("op", "verb"), launch_calls.KINDS)


class Passes(TorchDispatchMode):
    """A mode that runs what it sees."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@EACH
def test_launches_and_functions_of_known_calls(op, verb, on_gpu, without_values):
    on_gpu.use("sm_90")
    signatures.forget()
    slow = {}
    for call in launch_calls.of(op, verb):
        launched = []
        for run in (call.run, call.run, lambda call=call: frames(call.run)):
            on_gpu.order.clear()
            result = run()
            launched.append(launch_calls.lines(on_gpu.order))
        count, _ = result
        on_gpu.order.clear()
        with Passes():
            call.run()
        seen = launch_calls.lines(on_gpu.order)
        assert launched[1:] == launched[:1] * 2, call.name
        assert seen == launched[0], call.name
        # Random calls have memory that kernels cannot take as it is, and copies of it.
        if "random" not in call.name and count > MOST_FORWARD + MOST_BACKWARD * call.has_backward:
            slow[call.name] = count
    assert not slow
