"""Replay of ops whose decays and values are computed of other inputs: values beside float64, and compilation."""

import random

import derived_cases
import pytest
import torch
from problems import by_turns, problem_of

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import replay, table, update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 2e-6, FP16: 6e-4, BF16: 4e-3}
LAYOUTS, STATES, DTYPES = ("vk", "kv"), (FP32, BF16, FP16), (BF16, FP32, FP16)
# Heads of keys and of values, and their sizes: of all lanes, of some, and of odd ones.
SIZES = [(2, 4, 16, 24), (1, 3, 13, 33), (2, 2, 64, 64), (1, 4, 33, 13), (1, 2, 64, 20), (2, 6, 24, 16), (1, 1, 130, 8)]
ALL = derived_cases.ALL
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "how"), [("kda", "norm twice_sigmoid"), ("ssd", "wide z limit")])
def test_values_of_several_blocks(op, how, layout, interpreted):
    """Blocks of a head have other values each, and the first one writes what they share."""
    torch.manual_seed(8)
    interpreted.use("sm_90")
    more = {"sizes": (1, 2, 130, 76), "rows": 2, "slots": 3, "steps": 5, "drafts": 2, "length": 4}
    found = derived_cases.replay_in_any_order(op, how, layout, FP32, FP32, random.Random(8), **more)
    assert all(x <= SEVERAL * LIMITS[FP32] for x in found)
    assert {launch.grid[0] > 2 for launch in interpreted.launches} == {True}


# ---- compilation -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("rule", "arch"), by_turns(ALL, ARCHS))
def test_compiles_everywhere(rule, arch):
    """For usual heads and odd ones, in both layouts: a step, drafts and a commit."""
    turn = ALL.index(rule)
    for place, sizes in enumerate(((128, 128), (64, 64), ((13, 33), (256, 64), (7, 7))[turn % 3])):
        layout, state = LAYOUTS[(turn + place) % 2], ("fp32", "bf16", "fp16")[(turn + place // 2) % 3]
        of_entry = replay.entry_bytes(table.ALL[rule[0]], {"H": 1, "G": 1, "K": sizes[0], "V": sizes[1]}, 2)
        length = min(replay.best_length(4 * sizes[0] * sizes[1], of_entry), 12)
        for tokens, drafts in ((1, 0), (4, 4), (0, 4)):
            given = problem_of(*rule, arch, sizes, tokens, layout, state, (turn + place) % 2 == 0)
            pool = update.Pool(5, 1 << 20, index_bytes=(4, 8)[turn % 2])
            ring = replay.Ring(length, length + drafts, length, is_draft=drafts > 0 and tokens > 0)
            (made,) = replay.schedule(given, pool, ring, tokens).requests(given.gpu)
            kernel.get(made)


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(
    ("change", "rule"),
    [({"ENTRIES": 4}, "drafts have room"), ({"SHARED_BYTES": 64}, "shared_bytes is what the geometry says")],
)
def test_rules(change, rule):
    given = problem_of("kda", "norm", "sm_90", (64, 64), 1, "kv", "fp32")
    (made,) = replay.schedule(given, update.Pool(1, 0), replay.Ring(5, 5, 5), 1).requests(given.gpu)
    with pytest.raises(UnsupportedConfigError, match=f"replay_rules: {rule}; got "):
        kernel.get(made._replace(parameters={**made.parameters, **change}))
