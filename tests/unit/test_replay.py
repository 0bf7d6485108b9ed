"""Replay in plain torch: steps, drafts, commits and flushes in any order are the float64 recurrence."""

import random

import pytest
import torch

import rwkv_jit
from rwkv_jit.ops.table import OPS

NAMES = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
B, H, K, V, SLOTS, LENGTH, DRAFTS = 4, 2, 12, 20, 7, 3, 4


def make(name, tokens, fixed):
    sizes = {"B": B, "T": tokens, "H": H, "K": K, "V": V}
    given = {
        own: fixed.get(own, torch.randn([sizes[dim] for dim in dims]) * 0.3).double()
        for own, dims in OPS[name].inputs.items()
    }
    if name == "gla":
        given["w"] = -given["w"].abs()
    return given


def of_row(name, given, row, tokens):
    return [x[row : row + 1, :tokens] if "T" in OPS[name].inputs[own] else x for own, x in given.items()]


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_drafts_and_flushes_are_the_recurrence(name, layout):
    draw, op = random.Random(1), OPS[name]
    sizes = {"H": H, "K": K, "V": V}
    pool = torch.randn(SLOTS, *(sizes[dim] for dim in op.state_dims(layout)), dtype=torch.float64)
    ring = rwkv_jit.ReplayRing(
        SLOTS, name, H, K, V, length=LENGTH, drafts=DRAFTS, dtype=torch.float64, state_dtype=torch.float64, device="cpu"
    )
    fixed = {own: torch.randn(H, K) * 0.3 for own, dims in op.inputs.items() if "T" not in dims}
    reference, scale = getattr(rwkv_jit, f"{name}_ref"), op.scale or K**-0.5
    truth = pool.clone()
    for _ in range(40):
        slots, tokens = torch.randperm(SLOTS)[:B], draw.randint(1, DRAFTS)
        slots[draw.randrange(B)] = -1
        options = {"state_indices": slots, "state_layout": layout}
        kind = draw.choice(["replay", "verify", "flush"])
        if kind == "flush":
            rwkv_jit.replay_flush(pool, ring, **options)
            assert not ring.cursors[slots[slots >= 0]].any()
            torch.testing.assert_close(pool[slots[slots >= 0]], truth[slots[slots >= 0]])
            continue
        given, before = make(name, tokens, fixed), pool.clone()
        y = getattr(rwkv_jit, f"{name}_{kind}")(pool, ring, *given.values(), **options)
        counts = [tokens] * B
        if kind == "verify":
            assert torch.equal(pool, before)
            counts = [draw.randint(0, tokens) for _ in range(B)]
            rwkv_jit.replay_commit(pool, ring, torch.tensor(counts), **options)
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert not y[row].any()
                continue
            state = truth[slot : slot + 1]
            want, _ = reference(*of_row(name, given, row, tokens), state, True, scale=scale, state_layout=layout)
            torch.testing.assert_close(y[row : row + 1], want)
            if counts[row]:
                given_row = of_row(name, given, row, counts[row])
                truth[slot] = reference(*given_row, state, True, scale=scale, state_layout=layout)[1][0]
        assert int(ring.cursors.max()) <= LENGTH
    rwkv_jit.replay_flush(pool, ring, state_layout=layout)
    torch.testing.assert_close(pool, truth)


def test_drafts_need_room():
    pool = torch.zeros(B, H, V, K)
    ring = rwkv_jit.ReplayRing(B, "wkv7", H, K, V, drafts=1, dtype=torch.float32, device="cpu")
    given = [torch.zeros(B, 2, H, V if own == "v" else K) for own in OPS["wkv7"].inputs]
    with pytest.raises(ValueError, match="r: expected at most 1 tokens, as the ring has room for 1 drafts, got 2"):
        rwkv_jit.wkv7_verify(pool, ring, *given)
