"""Sequences of any lengths over a pool, of ops that have kernels of their own for long ones, beside float64.

Short ones, long ones, empty ones and those without a slot come in one call, and its launches are named.
"""

import itertools
import math

import derived_cases
import pytest
import torch
from comparing import relative
from problems import by_turns

import rwkv_jit
from rwkv_jit.schedules import head_decay

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 2e-6, FP16: 2e-3, BF16: 1e-2}
BESIDE = {
    "gated_delta_rule": ("", "norm twice_sigmoid", "raw bias sigmoid norm", "raw"),
    "delta_rule": ("", "norm sigmoid"),
    "simple_gla": ("", "fixed"),
    "ssd": ("", "D z bias softplus", "wide bias limit", "z softplus limit"),
}  # fmt: skip
ALL = [(op, how) for op, several in BESIDE.items() for how in several]
# Heads of keys and of values, and their sizes; those of 64 and 128 go by warp groups on sm_90.
SIZES = [(1, 2, 16, 24), (2, 2, 24, 16), (1, 3, 40, 33)]
IN_GROUPS = (1, 2, 64, 64)
LAYOUTS, STATES = ("vk", "kv"), (FP32, BF16, FP16)


class Calls:
    """Sequences of some lengths, of which some have no slot, begin with zeros or leave states behind some tokens."""

    def __init__(self, op, how, lengths, sizes, turn, layout, state_type, checkpoints=0, types=None):
        dtype, wide = types or [(BF16, FP32), (FP16, FP16), (BF16, BF16), (FP16, FP32)][turn % 4]
        self.dtype, self.lengths, count = dtype, lengths, len(lengths)
        self.begins = [0, *itertools.accumulate(lengths)]
        tail = turn % 3  # tokens of no sequence
        sizes = 1, self.begins[-1] + tail, *sizes
        self.case = derived_cases.make(op, how, sizes, dtype, wide, FP32, layout=layout, has_state=False)
        heads, head_size, value_size = sizes[3:]
        of_slot = (heads, value_size, head_size) if layout == "vk" else (heads, head_size, value_size)
        slots, size = (checkpoints + 2) * count + 2, math.prod(of_slot)
        gap = 16 * (turn % 2)
        self.memory = torch.randn(slots, size + gap).to(state_type)
        self.pool = self.memory[:, :size].view(slots, *of_slot)
        self.before = self.memory.clone()
        free = torch.randperm(slots - 1).add(1).tolist()
        self.null_index = turn % 2 - 1
        self.read = [free.pop() for _ in lengths]
        self.read[turn % count] = (-1, slots + 3, -5)[turn % 3]  # which is none
        self.written = self.read if turn % 2 else [free.pop() for _ in lengths]
        if turn % 2 == 0:
            self.written[(turn + 1) % count] = self.null_index
        self.are_begun = [(turn + i) % 3 > 0 for i in range(count)]
        self.active = count - (turn % 4 == 3)
        bounds, index = ((torch.int32, torch.int64), (torch.int64, torch.int32))[turn % 2]
        self.options = {
            "cu_seqlens": torch.tensor(self.begins, dtype=bounds), "null_index": self.null_index,
            "state_indices": torch.tensor(self.read, dtype=index),
            "has_initial_state": torch.tensor(self.are_begun),
            "num_active": torch.tensor([self.active], dtype=torch.int32),
        }  # fmt: skip
        if turn % 2 == 0:
            self.options["write_indices"] = torch.tensor(self.written, dtype=index)
        self.checkpoints = [[] for _ in lengths]
        if checkpoints:
            offsets = [sorted(torch.randint(0, length + 6, [checkpoints]).tolist()) for length in lengths]
            places = [[free.pop() for _ in range(checkpoints)] for _ in lengths]
            self.options["checkpoint_offsets"] = torch.tensor(offsets, dtype=bounds)
            self.options["checkpoint_indices"] = torch.tensor(places, dtype=index)
            self.checkpoints = [list(zip(*pair, strict=True)) for pair in zip(offsets, places, strict=True)]

    def run(self, **options):
        """y; new memory of the pool is there for each call."""
        return derived_cases.pooled(self.case, "varlen", self.pool, **self.options, **options)

    def check(self, y):
        """Everything that is written, beside float64, and that nothing else is."""
        wanted, states = torch.zeros_like(y, dtype=torch.float64), {}
        reference = getattr(rwkv_jit, f"{self.case.op}_ref")
        slots = len(self.pool)
        for row in range(self.active):
            begin, end, slot = self.begins[row], self.begins[row + 1], self.read[row]
            if not self.null_index < slot < slots or slot < 0 or begin == end:
                continue
            old = self.before[slot, : self.pool[0].numel()].view(1, *self.pool[0].shape)
            state = old.double() if self.are_begun[row] else torch.zeros_like(old).double()
            done = begin
            cuts = [(begin + offset, place) for offset, place in self.checkpoints[row]]
            for cut, place in [*cuts, (end, self.written[row])]:
                if (place is not self.written[row] and not done < cut <= end) or done > end:
                    continue
                if cut > done:
                    some = self.case.part((slice(None), slice(done, cut)))._replace(state=state).reference()
                    wanted[:, done:cut], state = some.run(reference)
                    done = cut
                if place > self.null_index and 0 <= place < slots:
                    states[place] = state[0]
        assert relative(y, wanted) <= LIMITS[self.dtype]
        assert not y[wanted == 0].any()
        limit = max(LIMITS[self.dtype], {FP32: 0, FP16: 6e-4, BF16: 4e-3}[self.memory.dtype])
        for slot, state in states.items():
            assert relative(self.pool[slot], state) <= limit, slot
            self.pool[slot] = self.before[slot, : state.numel()].view(state.shape)
        assert torch.equal(self.memory, self.before)  # not even what lies between slots


def launched(interpreted):
    return [launch.template for launch in interpreted.launches]


def around(op, how):
    """The launches before and behind a forward."""
    steps = ["head_steps"] if op == "ssd" and ("limit" in how or "softplus" not in how) else []
    return steps, ["skip_gate_slots"] if "z" in how.split() else []


@pytest.mark.parametrize(("rule", "layout", "state_type"), by_turns(ALL, LAYOUTS, STATES))
def test_values_and_states(rule, layout, state_type, interpreted):
    turn = ALL.index(rule) + 5 * LAYOUTS.index(layout) + 7 * STATES.index(state_type)
    torch.manual_seed(turn)
    in_groups = turn % 4 == 0
    interpreted.use("sm_90" if in_groups else "sm_80")
    interpreted.multiprocessors = (132, 1)[turn // 2 % 2]
    sizes = IN_GROUPS if in_groups else SIZES[turn % len(SIZES)]
    calls = Calls(*rule, [1, 41, 0, 8, 9, 3][turn % 2 :], sizes, turn, layout, state_type)
    calls.check(calls.run())
    before, behind = around(*rule)
    forward = "head_decay_group_forward" if in_groups else "head_decay_forward"
    found = [x for x in launched(interpreted) if x != "narrow_rows"]
    assert found == ["arrange_sequences", *before, forward, "update_rules", *behind]


@pytest.mark.parametrize(("rule", "layout"), by_turns([rule for rule in ALL if "z" not in rule[1]], LAYOUTS))
def test_states_behind_some_tokens(rule, layout, interpreted):
    """Waves come one after another; what goes over all tokens comes once."""
    turn = ALL.index(rule) + LAYOUTS.index(layout)
    torch.manual_seed(turn)
    interpreted.use(("sm_80", "sm_90")[turn % 2])
    sizes = IN_GROUPS if turn % 2 else SIZES[turn % len(SIZES)]
    calls = Calls(*rule, [33, 1, 12, 40][turn % 2 :], sizes, turn, layout, STATES[turn % 3], checkpoints=2)
    calls.check(calls.run())
    before, _ = around(*rule)
    forwards = [x for x in launched(interpreted) if x.endswith("forward")]
    assert len({*forwards}) == 1
    assert [x for x in launched(interpreted) if x != "narrow_rows"] == [
        "arrange_sequences", *before, *forwards, "update_rules"
    ]  # fmt: skip
    assert [launch.named["wave"] for launch in interpreted.launches if launch.template in forwards] == [0, 1, 2]


@pytest.mark.parametrize("state_type", STATES)
def test_a_gate_is_behind_all_waves(state_type, interpreted):
    torch.manual_seed(9)
    interpreted.use("sm_80")
    calls = Calls("ssd", "D z bias softplus", [20, 3, 35, 2], SIZES[0], 4, "vk", state_type, checkpoints=1)
    calls.check(calls.run())
    assert launched(interpreted) == [
        "arrange_sequences", "head_decay_forward", "head_decay_forward", "update_rules", "skip_gate_slots"
    ]  # fmt: skip


SHORT = [*ALL, ("kda", "bounded flat bias norm"), ("kda", ""), ("gated_delta_rule2", "raw bias"), ("hgrn2", "")]


@pytest.mark.parametrize(("rule", "layout", "state_type"), by_turns(SHORT, LAYOUTS, STATES))
def test_short_sequences_take_one_launch(rule, layout, state_type, interpreted):
    """Behind the one that looks at the lengths, with gates and D and all else."""
    turn = SHORT.index(rule) + LAYOUTS.index(layout) + STATES.index(state_type)
    torch.manual_seed(turn)
    interpreted.use(("sm_80", "sm_90")[turn % 2])
    op, how = rule
    key_heads, *sizes = SIZES[turn % len(SIZES)]
    key_heads = sizes[0] if op == "hgrn2" else key_heads
    calls = Calls(op, how, [1, 8, 0, 3, 1], (key_heads, *sizes), turn, layout, state_type, types=(BF16, FP32))
    calls.check(calls.run(max_seqlen=8))
    assert launched(interpreted) == ["arrange_sequences", "update_rules"]


@pytest.mark.parametrize("op", ["gated_delta_rule", "ssd"])
def test_inputs_that_are_parts_of_others(op, interpreted):
    torch.manual_seed(3)
    interpreted.use("sm_80")
    calls = Calls(op, BESIDE[op][-1] if op != "ssd" else "D", [20, 9, 12, 2], SIZES[0], 1, "vk", FP32)
    inputs = {}
    for name, x in calls.case.inputs.items():
        memory = torch.full((*x.shape[:-1], x.shape[-1] + 5), math.nan, dtype=x.dtype)
        memory[..., 1:-4] = x
        inputs[name] = x if x.dim() < 3 else memory[..., 1:-4]
    whole, calls.case = calls.case, calls.case._replace(inputs=inputs)
    y = calls.run()
    calls.case = whole
    calls.check(y)


KDA = ("", "norm twice_sigmoid", "raw bias sigmoid norm", "bounded flat bias norm")


@pytest.mark.parametrize("how", KDA)
def test_decays_of_channels(how, interpreted):
    turn = KDA.index(how)
    torch.manual_seed(turn)
    interpreted.use("sm_90")
    lengths, checkpoints = ([1, 70, 0, 9], 0) if turn % 2 else ([2, 66, 3], 1)
    types = (BF16, FP32) if turn < 2 else (FP16, FP16)
    calls = Calls("kda", how, lengths, (1, 2, 128, 128), turn, LAYOUTS[turn % 2], STATES[turn % 3], checkpoints, types)
    calls.check(calls.run())
    found = [x for x in launched(interpreted) if x != "narrow_rows"]
    assert found == ["arrange_sequences", *["channel_decay_group_forward"] * (checkpoints + 1), "update_rules"]


@pytest.mark.parametrize(("arch", "sizes"), [("sm_80", (1, 1, 16, 24)), ("sm_90", (1, 1, 64, 64))])
@pytest.mark.parametrize(("op", "decays"), [("gated_delta_rule", (-9.0, -8.0)), ("simple_gla", (-1e-4, 0.0))])
def test_blocks_share_long_sequences(op, decays, arch, sizes, monkeypatch, interpreted):
    """They begin with copies of states, as the last of a sequence may write its slot before the first one reads it."""
    torch.manual_seed(2)
    monkeypatch.setattr(head_decay, "_LEAST_SEGMENT", 32)
    interpreted.use(arch)
    interpreted.multiprocessors = 16
    calls = Calls(op, "norm" if op == "gated_delta_rule" else "", [130, 3, 200], sizes, 1, "kv", BF16)
    g = calls.case.inputs["g"]
    g.copy_(decays[0] + (decays[1] - decays[0]) * torch.rand(g.shape))
    calls.check(calls.run())
    assert launched(interpreted)[1:3] == ["head_decay_walks", "copy_states"]
    forward = interpreted.launches[3]
    assert forward.parameters["SEGMENTED"]
    assert forward.addresses["final_state"] == calls.pool.data_ptr() != forward.addresses["initial_state"]


def test_states_of_short_sequences_are_rounded_at_random(interpreted):
    torch.manual_seed(6)
    interpreted.use("sm_80")
    pools = []
    for seed in (1, 1, 2):
        torch.manual_seed(6)
        calls = Calls("simple_gla", "", [3, 40, 9], (1, 1, 16, 24), 5, "kv", BF16, types=(BF16, FP32))
        calls.options["state_indices"] = torch.tensor([1, 2, 3])
        del calls.options["has_initial_state"]
        calls.run(rounding="stochastic", seed=seed)
        pools.append(calls.pool)
    assert torch.equal(pools[0], pools[1])
    assert [bool((pools[0][slot] != pools[2][slot]).any()) for slot in (1, 2, 3)] == [True, False, False]
