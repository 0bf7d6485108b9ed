"""A few tokens of sequences by the kernels of updates: results beside float64, from one memory to another."""

import math

import derived_cases
import pytest
import torch
from comparing import make_inputs, make_state, relative
from problems import by_turns

import rwkv_jit
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions, through
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import ALL
from rwkv_jit.schedules.update import FEW_TOKENS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 3e-6, FP16: 6e-4, BF16: 4e-3}
BASE = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
DECAYS = {"wkv7": ("raw", "sigmoid", "log", "direct"), "linear_attention": (None,)}
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
LAYOUTS, STATES = ("vk", "kv"), (FP32, BF16, FP16)
# Of keys and of values: of all lanes, of some, and of odd ones.
SIZES = [(16, 24), (13, 9), (32, 32), (9, 13), (40, 8), (24, 16), (70, 4)]
# Of rows, and of what may be wider.
TYPES = [(BF16, FP32), (FP32, FP32), (FP16, FP16), (BF16, BF16), (FP16, FP32)]
CALLS = [(op, tokens) for op in (*BASE, *derived_cases.WAYS) for tokens in range(1, FEW_TOKENS + 1)]


def with_gaps(x, is_odd):
    """The same numbers between others that are none: each row is a part of a longer one."""
    if x is None or x.dim() < 3:
        return x
    memory = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
    view = memory[..., 1:-2] if is_odd else memory[..., :-3]
    return view.copy_(x)


def call_of(op, tokens, dtype, wide, layout, state_type, sizes, turn):
    """What runs a call by a function, its tensors by name, and its initial state."""
    if op in BASE:
        several = DECAYS.get(op, DECAYS["wkv7"])
        decay = several[turn % len(several)]
        options = {} if decay is None else {"decay": decay}
        given = make_inputs(op, dtype, 2, tokens, 2, *sizes, decay=decay, w_dtype=wide)
        given = {name: x.detach() for name, x in given.items()}
        state = make_state(given, 2, state_type, layout).detach()

        def run(function, inputs, state, **more):
            return function(*inputs.values(), initial_state=state, state_layout=layout, **options, **more)

        return run, given, state
    ways = derived_cases.WAYS[op]
    case = derived_cases.make(
        op, ways[turn % len(ways)], (2, tokens, 1 + turn % 2, 2, *sizes), dtype, wide, state_type, layout=layout
    )

    def run(function, tensors, state, **more):
        named = {"output_final_state": False, **more}
        inputs = [tensors[name] for name in case.inputs]
        parameters = {name: tensors[name] for name in case.parameters}
        return function(*inputs, initial_state=state, **parameters, **case.options, **named)

    return run, {**case.inputs, **case.parameters}, case.state


@pytest.mark.parametrize(("op", "tokens"), CALLS)
def test_results_are_those_of_the_recurrence(op, tokens, interpreted):
    """Both states, one of them or none; results are no numbers before, and nothing that is given changes."""
    turn = CALLS.index((op, tokens))
    torch.manual_seed(turn)
    interpreted.use(("sm_80", "sm_90", "sm_120")[turn % 3])
    interpreted.multiprocessors = (132, 1)[turn // 3 % 2]  # blocks are few or many
    for place, has_state in enumerate((True, False)):
        layout = LAYOUTS[(turn + place) % 2]
        turn += 7
        dtype, wide = TYPES[turn % len(TYPES)]
        state_type = STATES[turn % len(STATES)] if has_state else FP32
        has_final = turn % 4 != 0
        run, given, state = call_of(op, tokens, dtype, wide, layout, state_type, SIZES[turn % len(SIZES)], turn)
        given = {name: with_gaps(x, turn % 2) for name, x in given.items()}
        if has_state and turn % 3 == 0:  # which begins anywhere
            state = torch.cat([state.new_zeros(1), state.flatten()])[1:].view(state.shape)
        state = state if has_state else None
        before = None if state is None else state.clone()
        y, final = run(getattr(rwkv_jit, op), given, state, output_final_state=has_final)
        (launch,) = interpreted.take()
        assert launch.entry == ("update_rules" if op in derived_cases.WAYS else "update_states")
        exact = {name: x.double() for name, x in given.items()}
        exact_state = None if state is None else state.double()
        want, want_final = run(getattr(rwkv_jit, f"{op}_ref"), exact, exact_state, output_final_state=True)
        assert (final is not None) == has_final
        assert relative(y, want) <= LIMITS[dtype]
        if has_final:
            assert final.dtype == state_type
            assert relative(final, want_final) <= LIMITS[state_type]
        assert state is None or torch.equal(state, before)


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("op", "arch"), by_turns((*BASE, *derived_cases.WAYS), ARCHS))
def test_calls_without_an_initial_state_compile_without_spills(op, arch):
    turn = list(ALL).index(op)
    for layout, tokens in (("vk", 1), ("kv", 1), (LAYOUTS[turn % 2], 3)):
        sizes = {"B": 4, "T": tokens, "N": 4, "H": 4, "K": 64, "V": 64, "G": 2 if op in derived_cases.WAYS else 0}
        types = {x: "fp32" if x in ALL[op].wide else "bf16" for x in ALL[op].inputs}
        traits = tuple(ALL[op].traits.items())
        p = Problem(
            ALL[op], Gpu(arch), types, has_final_state=True, decay=ALL[op].decay, state_layout=layout,
            backend=through.UPDATE, traits=traits, **sizes,
        )  # fmt: skip
        (step,) = directions.forward(p).launches
        assert not step.parameters["HAS_STATE"]
        (used,) = kernel.get(step.request(p.gpu)).resources.values()
        assert used.spill_bytes == 0
