"""Replay on the GPU: steps, drafts, commits and flushes in any order, against the float64 recurrence of each slot."""

import random

import comparing
import derived_cases
import pytest
import torch

import rwkv_jit
from rwkv_jit.plain import rounding
from rwkv_jit.schedules.table import OPS

DTYPES, NAMES, FIXED = comparing.DTYPES, comparing.NAMES, comparing.FIXED
SLOTS, ROWS, HEADS, NULL = 5, 3, 2, -1
# Of ops that go through another: heads of keys and of values, and their sizes.
SHARED = [(2, 4, 64, 64), (1, 3, 12, 20), (2, 2, 128, 128), (1, 2, 33, 40)]
# K and V: multiples of an access and not, one block of values and several, one entry for a group of lanes and many.
SIZES = [(64, 64), (12, 20), (7, 13), (100, 100), (128, 128), (1, 1), (33, 40), (48, 33)]
pytestmark = pytest.mark.parametrize("op", ["inference"])  # the section of the record
RECURRENCE = pytest.mark.parametrize("recurrence", NAMES)


class Texts:
    """A pool with its ring, and the state of each slot in float64: that of all tokens that count."""

    def __init__(
        self, recurrence, sizes=(64, 64), dtype="bf16", state="fp32", layout="vk", length=3, drafts=4, slots=SLOTS,
        heads=HEADS, spare=0, decay=None, index=torch.int32,
    ):  # fmt: skip
        self.recurrence, self.layout, self.sizes, self.index, self.decay = recurrence, layout, sizes, index, decay
        self.dtype, self.heads, self.length = DTYPES[dtype], heads, length
        (head_size, value_size), size = sizes, heads * sizes[0] * sizes[1]
        of_head = (value_size, head_size) if layout == "vk" else (head_size, value_size)
        self.memory = torch.full((slots, size + spare), float("nan"), device="cuda", dtype=DTYPES[state])
        self.pool = self.memory[:, :size].unflatten(1, (heads, *of_head))
        self.pool.copy_(torch.randn(slots, heads, *of_head, device="cuda"))
        self.ring = rwkv_jit.ReplayRing(
            slots, recurrence, heads, head_size, value_size, length, drafts, self.dtype, DTYPES[state]
        )
        for x in self.ring.tensors:
            if x.is_floating_point():
                x.fill_(float("nan"))
        self.state = self.pool.double()
        self.fixed = {}
        self.fixed = {name: x for name, x in self.tokens(1, 1).items() if name in FIXED.get(recurrence, "")}
        self.limit = 5e-6 if dtype == "fp32" else 4e-3
        # A draft is read from entries of 16 bits, as all others.
        self.state_limit = 5e-6 if state == "fp32" else 2e-2

    def tokens(self, rows, count, decays="usual"):
        made = comparing.make_inputs(
            self.recurrence, self.dtype, rows, count, self.heads, *self.sizes, decays, decay=self.decay
        )
        return {name: self.fixed.get(name, x.detach()) for name, x in made.items()}

    @property
    def options(self):
        return {"state_layout": self.layout, **({"decay": self.decay} if self.decay else {})}

    def call(self, kind, given, slots, **options):
        function = getattr(rwkv_jit, f"{self.recurrence}_{kind}")
        return function(self.pool, self.ring, *given.values(), state_indices=slots, **self.options, **options)

    def exact(self, given, slots, **options):
        """The y and the states of these slots with more tokens."""
        scale = OPS[self.recurrence].scale or self.sizes[0] ** -0.5
        reference = getattr(rwkv_jit, f"{self.recurrence}_ref")
        wide = [x.double() for x in given.values()]
        return reference(*wide, self.state[slots.long()], True, **{"scale": scale, **self.options, **options})

    def accept(self, given, slots, counts):
        """The first tokens of each row count from now on."""
        for row, (slot, count) in enumerate(zip(slots.tolist(), counts, strict=True)):
            if count:
                own = comparing.of_tokens(self.recurrence, given, (slice(row, row + 1), slice(0, count)))
                self.state[slot] = self.exact(own, slots[row : row + 1])[1][0]

    def check(self):
        """All entries in the states, these are right, and nothing else is written."""
        rwkv_jit.replay_flush(self.pool, self.ring, state_layout=self.layout)
        assert not self.ring.cursors.any()
        assert not self.ring.arrivals.any()
        assert comparing.relative(self.pool, self.state) < self.state_limit
        assert self.memory[:, self.pool[0].numel() :].isnan().all()


def run_in_any_order(texts, tokens, draw, steps=24, decays="usual"):
    """Random rows do random things; a row without a slot, or of one that there is not, is left alone."""
    slots = len(texts.pool)
    for _ in range(steps):
        slot = torch.randperm(slots, device="cuda")[:ROWS].to(texts.index)
        if draw.random() < 0.3:
            slot[draw.randrange(ROWS)] = draw.choice([NULL, -7, slots])
        there = (slot >= 0) & (slot < slots)
        kind, count = draw.choice(["replay", "replay", "verify", "verify", "flush"]), draw.choice([1, tokens])
        if kind == "flush":
            rwkv_jit.replay_flush(texts.pool, texts.ring, state_indices=slot, state_layout=texts.layout)
            assert not texts.ring.cursors[slot[there].long()].any()
            continue
        given = texts.tokens(ROWS, count, decays)
        out = torch.full_like(given["v"], float("nan"))
        assert texts.call(kind, given, slot, out=out) is out
        own = comparing.of_tokens(texts.recurrence, given, there)
        want, _ = texts.exact(own, slot[there])
        assert comparing.relative(out[there], want) < max(texts.limit, texts.state_limit)
        assert not out[~there].any()
        counts = [count] * ROWS
        if kind == "verify":
            counts = [draw.randint(0, count) for _ in range(ROWS)]
            accepted = torch.tensor(counts, dtype=texts.index, device="cuda")
            options = {"state_indices": slot, "state_layout": texts.layout}
            rwkv_jit.replay_commit(texts.pool, texts.ring, accepted, **options)
        kept = [n for n, is_there in zip(counts, there.tolist(), strict=True) if is_there]
        texts.accept(own, slot[there], kept)
        assert int(texts.ring.cursors.max()) <= texts.length
        assert not texts.ring.arrivals.any()


@RECURRENCE
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("sizes", SIZES[:4])
@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("fp16", "fp16")])
def test_calls_in_any_order(op, recurrence, layout, sizes, dtypes, request):
    run_one_order(recurrence, layout, sizes, dtypes, request)


@pytest.mark.parametrize("recurrence", ["wkv7"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "bf16")])
def test_calls_in_any_order_of_every_type(op, recurrence, layout, sizes, dtypes, request):
    run_one_order(recurrence, layout, sizes, dtypes, request)


def run_one_order(recurrence, layout, sizes, dtypes, request):
    draw = random.Random(request.config.option.seed)
    length, tokens = ((2, 4), (5, 8))[SIZES.index(sizes) % 2]
    index = (torch.int32, torch.int64)[SIZES.index(sizes) // 2 % 2]
    spare = draw.choice([0, 1, 3, 4])
    texts = Texts(recurrence, sizes, *dtypes, layout, length, tokens, spare=spare, index=index)
    run_in_any_order(texts, tokens, draw)
    texts.check()


@pytest.mark.parametrize(("recurrence", "how"), derived_cases.ALL)
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_ops_through_another_in_any_order(op, recurrence, how, layout, dtypes, request):
    """Inputs are read as they come, and nothing is rounded before it is written."""
    draw = random.Random(request.config.option.seed)
    for sizes in draw.sample(SHARED, 2):
        length, drafts = draw.choice([(1, 1), (3, 4), (7, 8), (12, 4)])
        of_y, of_states = derived_cases.replay_in_any_order(
            recurrence, how, layout, *(DTYPES[x] for x in dtypes), draw, sizes, length, drafts, 24, "cuda"
        )
        # A state of 16 bits is rounded each time that it is written, and what is read of it is as near.
        assert of_states < (5e-6 if dtypes[1] == "fp32" else 2e-2)
        assert of_y < max(5e-6 if dtypes[0] == "fp32" else 8e-3, 0 if dtypes[1] == "fp32" else 2e-2)


@pytest.mark.parametrize(("recurrence", "how"), [("kda", "raw bias sigmoid norm"), ("ssd", "D z bias softplus")])
def test_a_graph_of_ops_through_another_goes_on(op, recurrence, how):
    """Each replay of a graph has more entries, and a state that is written in between."""
    rows, sizes = 150, (1, 2, 64, 64)
    dtypes = torch.bfloat16, torch.float32, torch.float32
    case = derived_cases.make(recurrence, how, (rows, 1, *sizes), *dtypes, device="cuda")
    pool = case.state.clone()
    ring = rwkv_jit.ReplayRing(rows, recurrence, 2, 64, 64, 2, 4, key_heads=1)
    outs = [torch.full_like(case.inputs["x" if recurrence == "ssd" else "v"], float("nan")) for _ in range(2)]

    def run():
        derived_cases.pooled(case, "replay", pool, ring=ring, out=outs[0])
        derived_cases.pooled(case, "verify", pool, ring=ring, out=outs[1])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    pool.copy_(case.state)
    ring.reset()
    wanted = case.reference()
    for _ in range(5):
        graph.replay()
        for out in outs:  # the verified token is the one of the next step, as inputs stay
            y, final = wanted.run(getattr(rwkv_jit, f"{recurrence}_ref"))
            if out is outs[0]:
                wanted = wanted._replace(state=final)
            assert comparing.relative(out, y) < 8e-3
    rwkv_jit.replay_flush(pool, ring)
    assert comparing.relative(pool, wanted.state) < 5e-6


@pytest.mark.parametrize("recurrence", [name for name in NAMES if "w" in NAMES[name]])
@pytest.mark.parametrize("decay", ["raw", "sigmoid", "log", "direct"])
@pytest.mark.parametrize("decays", ["fast", "-20 or 0"])
def test_any_decays(op, recurrence, decay, decays, request):
    texts = Texts(recurrence, dtype="fp32", length=5, decay=decay)
    run_in_any_order(texts, 4, random.Random(request.config.option.seed), decays=decays)
    texts.check()


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
def test_decays_of_zero_and_below_zero(op, recurrence):
    texts = Texts(recurrence, dtype="fp32", length=5, decay="direct")
    slots = torch.tensor([4, 0, 3], dtype=torch.int32, device="cuda")
    for _ in range(8):
        given = texts.tokens(ROWS, 2)
        w = torch.rand_like(given["w"])
        given["w"] = torch.where(w < 0.2, 0.0, torch.where(w > 0.9, -0.5, torch.where(w > 0.8, 1e-30, w)))
        want, final = texts.exact(given, slots)
        assert comparing.relative(texts.call("replay", given, slots), want) < 5e-6
        texts.state[slots.long()] = final
    texts.check()


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6"])
def test_something_is_added_to_w(op, recurrence):
    texts = Texts(recurrence, dtype="fp32")
    slots = torch.tensor([4, 0, 3], dtype=torch.int32, device="cuda")
    w0 = torch.randn(HEADS, 64, device="cuda") * 0.1
    for _ in range(5):
        given = texts.tokens(ROWS, 1)
        y = texts.call("replay", given, slots, w0=w0.flatten(), scale=0.7)
        want, final = texts.exact({**given, "w": given["w"] + w0}, slots, scale=0.7)
        assert comparing.relative(y, want) < 5e-6
        texts.state[slots.long()] = final
    texts.check()


@RECURRENCE
def test_one_token_has_no_dimension_of_its_own(op, recurrence):
    texts = Texts(recurrence)
    slots = torch.tensor([1, 4, 0], dtype=torch.int32, device="cuda")
    given = texts.tokens(ROWS, 1)
    want, final = texts.exact(given, slots)
    y = texts.call("replay", {n: x if n in texts.fixed else x[:, 0] for n, x in given.items()}, slots)
    assert comparing.relative(y, want[:, 0]) < 4e-3
    texts.state[slots.long()] = final
    texts.check()


def test_more_rows_than_a_grid_has_places(op):
    texts = Texts("wkv7", (8, 8), "fp32", length=1, drafts=0, slots=70000, heads=1)
    slots = torch.randperm(70000, device="cuda").to(torch.int32)
    for _ in range(3):
        given = texts.tokens(70000, 1)
        want, final = texts.exact(given, slots)
        assert comparing.relative(texts.call("replay", given, slots), want) < 5e-6
        texts.state[slots.long()] = final
    texts.check()


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state", ["bf16", "fp16"])
def test_states_are_rounded_at_random(op, layout, state):
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(5)
        texts = Texts("wkv7", (50, 50), "bf16", state, layout, length=2)
        slots = torch.tensor([4, 0, 3], dtype=torch.int32, device="cuda")
        for _ in range(3):  # the third writes the state
            given = texts.tokens(ROWS, 1)
            number = torch.tensor([seed], device="cuda")
            texts.call("replay", given, slots, rounding="stochastic", seed=number)
            texts.accept(given, slots, [1] * ROWS)
        assert not texts.ring.cursors[slots.long()].any()
        found.append(texts.pool[slots.long()])
    first, again, other = found
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    final = texts.state[slots.long()].float()
    bits = rounding.random_bits(slots, HEADS, 50 * 50, 3).view(final.shape)
    # Sums of float32 differ in their last bits, and u is one of them: that decides few of the draws.
    assert float((first == rounding.round_at_random(final, DTYPES[state], bits)).float().mean()) > 0.98
    other_bits = bits + 1 << 15 & 0xFFFF
    assert float((first == rounding.round_at_random(final, DTYPES[state], other_bits)).float().mean()) < 0.9


@RECURRENCE
@pytest.mark.parametrize("batch", [3, 150])
def test_a_graph_goes_on_where_it_ended(op, recurrence, batch):
    """Steps that begin beside those before them: cursors, entries and states must not be those of before."""
    texts, steps = Texts(recurrence, dtype="fp32", slots=batch + 2), 9
    slots = torch.randperm(batch + 2, device="cuda")[:batch].to(torch.int32)
    given = [texts.tokens(batch, 1) for _ in range(steps)]
    outs = [torch.full_like(given[0]["v"], float("nan")) for _ in range(steps)]
    accepted = torch.ones(batch, dtype=torch.int32, device="cuda")

    def run():
        for step in range(steps):
            kind = "verify" if step % 3 == 2 else "replay"
            texts.call(kind, given[step], slots, out=outs[step])
            if kind == "verify":
                options = {"state_indices": slots, "state_layout": texts.layout}
                rwkv_jit.replay_commit(texts.pool, texts.ring, accepted, **options)

    before = texts.pool.clone()
    run()
    texts.pool.copy_(before)
    texts.ring.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(4):
        fresh = texts.tokens(batch, 1)
        for name, x in given[0].items():
            x.copy_(fresh[name])
        slots.copy_(torch.randperm(batch + 2, device="cuda")[:batch])
        graph.replay()
        for step in range(steps):
            want, final = texts.exact(given[step], slots)
            assert comparing.relative(outs[step], want) < 1e-5
            texts.state[slots.long()] = final
    texts.check()


@pytest.mark.parametrize("recurrence", ["wkv7", "linear_attention"])
def test_compiled_whole(op, recurrence):
    texts = Texts(recurrence)
    slots = torch.tensor([1, 4, 0], dtype=torch.int32, device="cuda")

    def layer(*given):
        return 2 * texts.call("replay", dict(zip(names, given, strict=True)), slots)

    given = texts.tokens(ROWS, 1)
    names = list(given)
    want, final = texts.exact(given, slots)
    y = torch.compile(layer, fullgraph=True)(*given.values())
    assert comparing.relative(y / 2, want) < 4e-3
    texts.state[slots.long()] = final
    texts.check()


def test_counts_and_slots_are_looked_at_when_asked(op, nothing_known, monkeypatch):
    texts = Texts("wkv7")
    slots = torch.tensor([1, 4, 0], dtype=torch.int32, device="cuda")
    given = texts.tokens(ROWS, 4)
    texts.call("verify", given, slots)
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    options = {"state_indices": slots, "state_layout": "vk"}
    for counts in ([0, 5, 1], [-1, 0, 0]):
        with pytest.raises(ValueError, match="accept_lens: expected 0 to 4, the ring's speculative tokens"):
            rwkv_jit.replay_commit(texts.pool, texts.ring, torch.tensor(counts, device="cuda"), **options)
    with pytest.raises(ValueError, match="twice"):
        texts.call("replay", given, torch.tensor([1, 4, 1], dtype=torch.int32, device="cuda"))
    rwkv_jit.replay_commit(texts.pool, texts.ring, torch.tensor([4, 0, 2], device="cuda"), **options)
    texts.accept(given, slots, [4, 0, 2])
    texts.check()


def test_no_call_waits_for_the_gpu(op):
    texts = Texts("wkv7")
    slots = torch.tensor([1, 4, 0], dtype=torch.int32, device="cuda")
    given, accepted = texts.tokens(ROWS, 4), torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda")
    options = {"state_indices": slots, "state_layout": "vk"}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        texts.call("verify", given, slots)
        rwkv_jit.replay_commit(texts.pool, texts.ring, accepted, **options)
        rwkv_jit.replay_flush(texts.pool, texts.ring, **options)
        texts.ring.reset([0, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_reset_leaves_out_what_is_no_slot(op, index, monkeypatch):
    ring = Texts("wkv7").ring
    ring.cursors.fill_(2)
    slots = torch.tensor([-1, 1, SLOTS, -100, 2**31 - 1, 1], dtype=index, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ring.reset(slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ring.cursors.tolist() == [2, 0, 2, 2, 2]
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    with pytest.raises(ValueError, match=f"slots: expected slots below {SLOTS}, or below 0 for none; got "):
        ring.reset(slots)
    assert ring.cursors.tolist() == [2, 0, 2, 2, 2]


def test_slots_up_to_the_null_index_are_none(op):
    texts = Texts("wkv7", dtype="fp32")
    slots, there = torch.tensor([1, 4, 2], dtype=torch.int32, device="cuda"), torch.tensor([1], device="cuda")
    options = {"state_indices": slots, "null_index": 2, "state_layout": "vk"}
    for kind in ("replay", "verify"):
        given = texts.tokens(ROWS, 2)
        y = texts.call(kind, given, slots, null_index=2)
        own = comparing.of_tokens("wkv7", given, there)
        want, final = texts.exact(own, slots[there])
        assert comparing.relative(y[there], want) < 5e-6
        assert not y[[0, 2]].any()
        texts.state[slots[there].long()] = final
    rwkv_jit.replay_commit(texts.pool, texts.ring, torch.full((ROWS,), 2, device="cuda"), **options)
    rwkv_jit.replay_flush(texts.pool, texts.ring, **options)
    assert not texts.ring.cursors.any()
    texts.check()


def test_more_heads_than_run_at_once(op):
    """A cursor stays until the last block of its row has read it."""
    texts = Texts("wkv7", dtype="fp32", length=2, slots=2, heads=4000)
    slots = torch.tensor([1], dtype=torch.int32, device="cuda")
    for _ in range(4):
        given = texts.tokens(1, 1)
        want, final = texts.exact(given, slots)
        assert comparing.relative(texts.call("replay", given, slots), want) < 5e-6
        texts.state[slots.long()] = final
    texts.check()
