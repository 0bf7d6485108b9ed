"""Replay of ops whose decays and values are computed of other inputs: values beside float64, and compilation."""

import random

import derived_cases
import pytest
import torch
from problems import by_turns

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 2e-6, FP16: 6e-4, BF16: 4e-3}
LAYOUTS, STATES, DTYPES = ("vk", "kv"), (FP32, BF16, FP16), (BF16, FP32, FP16)
# Heads of keys and of values, and their sizes: of all lanes, of some, and of odd ones.
SIZES = [(2, 4, 16, 24), (1, 3, 13, 33), (2, 2, 64, 64), (1, 4, 33, 13), (1, 2, 64, 20), (2, 6, 24, 16), (1, 1, 130, 8)]
ALL = derived_cases.ALL
# Errors of states are those of all tokens since the last flush, each with the rounding of a state that was written.
SEVERAL = 3


@pytest.mark.parametrize(("rule", "layout", "state_type"), by_turns(ALL, LAYOUTS, STATES))
def test_values_and_states(rule, layout, state_type, interpreted):
    """Steps, drafts, commits and flushes of rows with slots and without."""
    turn = ALL.index(rule) + 3 * LAYOUTS.index(layout) + 7 * STATES.index(state_type)
    torch.manual_seed(turn)
    interpreted.use("sm_90" if turn % 2 else "sm_80")
    interpreted.multiprocessors = (132, 1)[turn // 2 % 2]  # blocks are few or many
    dtype = DTYPES[turn // 3 % 3]
    more = {"sizes": SIZES[turn % len(SIZES)], "rows": 2, "slots": 3, "steps": 4, "drafts": 3, "length": 1 + turn % 4}
    of_y, of_states = derived_cases.replay_in_any_order(*rule, layout, dtype, state_type, random.Random(turn), **more)
    assert of_y <= max(LIMITS[dtype], SEVERAL * LIMITS[state_type])
    assert of_states <= SEVERAL * LIMITS[state_type]
    launched = {launch.template for launch in interpreted.launches}
    assert launched <= {"replay_rules", "replay_states"}
    assert "replay_rules" in launched
