"""Calls of a few tokens without gradients on the GPU: beside float64, one behind another, and in graphs."""

from functools import partial

import comparing
import derived_cases
import pytest
import torch

import rwkv_jit
from rwkv_jit.schedules.update import FEW_TOKENS

pytestmark = pytest.mark.parametrize("op", ["inference"])  # the section of the record
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EACH = pytest.mark.parametrize("name", [*comparing.NAMES, *derived_cases.WAYS])
LIMITS = {FP32: 5e-6, FP16: 3e-3, BF16: 5e-3}
# Rows, tokens, heads, K, V: few blocks and many, one token and several, multiples of an access and not.
SHAPES = [(1, 1, 32, 64, 64), (64, 1, 32, 128, 128), (512, 1, 2, 64, 128), (3, 8, 4, 128, 64), (5, 4, 2, 100, 36),
          (2, 2, 2, 300, 520)]  # fmt: skip
STEPS = 12


def call_of(name, shape, dtype, layout, state_type=FP32):
    """What runs a call by a function, its tensors by name, and its initial state."""
    batch, tokens, heads, *sizes = shape
    if name in comparing.NAMES:
        given = comparing.make_inputs(name, dtype, batch, tokens, heads, *sizes)
        given = {x: tensor.detach() for x, tensor in given.items()}
        state = comparing.make_state(given, batch, state_type, layout).detach()
        inputs, options = list(given), {"state_layout": layout}
        options["scale"] = 1.0 if name.startswith("wkv") else sizes[0] ** -0.5
    else:
        key_heads, how = heads if name == "hgrn2" else heads // 2, derived_cases.WAYS[name][-1]
        case = derived_cases.make(
            name, how, (batch, tokens, key_heads, heads, *sizes), dtype, FP32, state_type, device="cuda", layout=layout
        )
        given, state, inputs, options = {**case.inputs, **case.parameters}, case.state, list(case.inputs), case.options

    def run(function, tensors, **more):
        named = {x: tensor for x, tensor in tensors.items() if x not in inputs}
        return function(*[tensors[x] for x in inputs], **named, **options, **more)

    return run, given, state


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EACH
def test_results_are_those_of_the_recurrence(op, name, shape):
    for turn, (dtype, layout) in enumerate(((BF16, "vk"), (FP32, "kv"), (FP16, "kv"), (BF16, "kv"))):
        state_type = (FP32, BF16, FP16)[turn % 3]
        run, given, state = call_of(name, shape, dtype, layout, state_type)
        before = state.clone()
        y, final = run(getattr(rwkv_jit, name), given, initial_state=state, output_final_state=True)
        exact = {x: tensor.double() for x, tensor in given.items()}
        want, want_final = run(
            getattr(rwkv_jit, f"{name}_ref"), exact, initial_state=state.double(), output_final_state=True
        )
        assert comparing.relative(y, want) < LIMITS[dtype]
        assert final.dtype == state_type
        assert comparing.relative(final, want_final) < LIMITS[state_type]
        assert torch.equal(state, before)
        alone, nothing = run(getattr(rwkv_jit, name), given, initial_state=state)
        assert nothing is None
        assert torch.equal(alone, y)


@pytest.mark.parametrize("layout", ["vk", "kv"])
@EACH
def test_without_an_initial_state_it_is_zeros(op, name, layout):
    for tokens in (1, FEW_TOKENS):
        run, given, state = call_of(name, (3, tokens, 4, 64, 64), BF16, layout)
        function = partial(getattr(rwkv_jit, name), output_final_state=True)
        found, want = run(function, given), run(function, given, initial_state=torch.zeros_like(state))
        for x, y in zip(found, want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("batch", [1, 48])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@EACH
def test_each_call_waits_for_the_one_that_left_its_state(op, name, layout, batch):
    """They begin side by side; what they leave is what updates of one memory do, bit for bit, in a graph too."""
    run, given, state = call_of(name, (batch, 1, 8, 64, 64), BF16, layout)
    pool, update = state.clone(), getattr(rwkv_jit, f"{name}_update")
    want = [run(partial(update, pool), given) for _ in range(STEPS)]

    def chain():
        results, now = [], state
        for _ in range(STEPS):
            y, now = run(getattr(rwkv_jit, name), given, initial_state=now, output_final_state=True)
            results.append(y)
        return results, now

    for _ in range(3):
        found, final = chain()
        assert torch.equal(final, pool)
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, final = chain()
    for _ in range(3):
        final.fill_(float("nan"))
        graph.replay()
        assert torch.equal(final, pool)
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
