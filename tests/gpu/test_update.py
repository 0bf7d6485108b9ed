"""Updates of pools on the GPU against the float64 recurrence: values, states, and what must be left alone."""

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.plain import rounding

DTYPES, NAMES, FIXED = comparing.DTYPES, comparing.NAMES, comparing.FIXED
LAYOUTS = ("vk", "kv")
NULL, SLOTS = -1, 11
# Rows, tokens, heads, K, V: multiples of an access and not, one block and several, few blocks and many.
SHAPES = [
    (5, 1, 3, 64, 64), (300, 1, 2, 64, 64), (5, 3, 2, 100, 100), (4, 8, 2, 48, 80), (3, 1, 2, 7, 13), (30, 2, 17, 1, 1),
    (5, 1, 2, 128, 128), (300, 2, 2, 128, 64), (3, 1, 2, 256, 256), (2, 2, 1, 300, 520), (2, 1, 1, 1024, 1024),
    (4, 2, 3, 54, 54), (3, 1, 2, 33, 128), (3, 1, 2, 128, 33),
]  # fmt: skip
pytestmark = pytest.mark.parametrize("op", ["inference"])  # the section of the record
RECURRENCE = pytest.mark.parametrize("recurrence", NAMES)


class Setup:
    """Inputs of a step, a pool with room between its slots, and what float64 makes of them."""

    def __init__(self, recurrence, shape, dtype="bf16", state="fp32", layout="vk", decays="usual", spare=0, **more):
        batch, tokens, heads, head_size, value_size = shape
        self.recurrence, self.layout = recurrence, layout
        given = comparing.make_inputs(
            recurrence, DTYPES[dtype], batch, tokens, heads, head_size, value_size, decays, **more
        )
        self.given = {name: x.detach() for name, x in given.items()}
        sizes = (value_size, head_size) if layout == "vk" else (head_size, value_size)
        self.slots = batch + SLOTS
        size = heads * head_size * value_size
        memory = torch.full((self.slots, size + spare), float("nan"), device="cuda", dtype=DTYPES[state])
        self.memory, self.pool = memory, memory[:, :size].unflatten(1, (heads, *sizes))
        self.slot = torch.randperm(self.slots, device="cuda")[:batch].to(torch.int32)
        self.pool[self.slot.long()] = torch.randn(batch, heads, *sizes, device="cuda").to(DTYPES[state])
        self.before = memory.clone()

    @property
    def default_scale(self):
        return 1.0 if self.recurrence.startswith("wkv") else self.given["r"].shape[-1] ** -0.5

    def exact(self, rows=slice(None), w0=None, **options):
        given = comparing.of_tokens(self.recurrence, self.given, rows)
        given = {name: x.double() for name, x in given.items()}
        if w0 is not None:
            given["w"] = given["w"] + w0.double()
        state = self.before[self.slot.long()][rows][:, : self.pool[0].numel()].view(-1, *self.pool.shape[1:]).double()
        options.setdefault("scale", self.default_scale)
        reference = getattr(rwkv_jit, f"{self.recurrence}_ref")
        return reference(*given.values(), state, True, state_layout=self.layout, **options)

    def update(self, **options):
        function = getattr(rwkv_jit, f"{self.recurrence}_update")
        options.setdefault("state_indices", self.slot)
        return function(self.pool, *self.given.values(), state_layout=self.layout, **options)

    def check(self, y, written, rows=slice(None), **options):
        """The y and the states of these rows are right, and everything else is as it was."""
        want, final = self.exact(rows, **options)
        assert comparing.relative(y[rows], want) < (5e-6 if y.dtype == torch.float32 else 3e-3)
        limit = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 5e-3}[self.pool.dtype]
        assert comparing.relative(self.pool[written.long()], final) < limit
        others = torch.ones(self.slots, dtype=torch.bool, device="cuda")
        others[written.long()] = False
        as_before = self.memory.view(torch.uint8)[others], self.before.view(torch.uint8)[others]
        assert torch.equal(*as_before)
        gap = self.pool[0].numel()
        assert torch.equal(self.memory[:, gap:].isnan(), self.before[:, gap:].isnan())


@RECURRENCE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_values_states_and_all_other_slots(op, recurrence, layout, shape, dtypes):
    setup = Setup(recurrence, shape, *dtypes, layout)
    out = torch.full_like(setup.given["v"], float("nan"))
    assert setup.update(out=out) is out
    setup.check(out, setup.slot)


@RECURRENCE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("spare", "state"), [(4, "fp32"), (1, "fp32"), (3, "bf16"), (8, "bf16"), (2, "fp16")])
def test_slots_at_any_stride_and_rows_without_one(op, recurrence, layout, spare, state):
    setup = Setup(recurrence, (9, 2, 2, 64, 64), "bf16", state, layout, spare=spare)
    slots = setup.slot.clone()
    slots[1], slots[4], slots[7] = NULL, -5, setup.slots
    there = torch.tensor([0, 2, 3, 5, 6, 8], device="cuda")
    # What belongs to no slot may be anything.
    for name, x in setup.given.items():
        if name not in FIXED.get(recurrence, ""):
            x[[1, 4, 7]] = float("nan")
    y = setup.update(state_indices=slots)
    assert bool((y[[1, 4, 7]] == 0).all())
    setup.check(y, setup.slot[there], there)


@RECURRENCE
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_index", [-1, 0, 3])
def test_states_are_read_here_and_written_there(op, recurrence, index, null_index):
    setup = Setup(recurrence, (6, 1, 2, 64, 64))
    setup.memory = torch.cat((setup.memory, torch.full_like(setup.memory, float("nan"))))
    setup.pool = setup.memory.view(-1, *setup.pool.shape[1:])
    setup.before, moved = setup.memory.clone(), setup.slot + setup.slots
    setup.slots *= 2
    written = moved.clone()
    written[2] = null_index
    there = setup.slot > null_index
    y = setup.update(state_indices=setup.slot.to(index), write_indices=written.to(index), null_index=null_index)
    want, final = setup.exact()
    assert comparing.relative(y[there], want[there]) < 3e-3
    assert bool((y[~there] == 0).all())
    kept = there.clone()
    kept[2] = False
    assert comparing.relative(setup.pool[moved.long()][kept], final[kept]) < 5e-6
    others = torch.ones(setup.slots, dtype=torch.bool, device="cuda")
    others[moved.long()[kept]] = False
    assert torch.equal(setup.memory.view(torch.uint8)[others], setup.before.view(torch.uint8)[others])


@RECURRENCE
def test_rows_without_indices_have_their_own_slots(op, recurrence):
    setup = Setup(recurrence, (5, 1, 2, 64, 64))
    setup.slot = torch.arange(5, device="cuda", dtype=torch.int32)
    setup.memory[:] = torch.randn_like(setup.memory)
    setup.before = setup.memory.clone()
    token = {n: x if n in FIXED.get(recurrence, "") else x[:, 0] for n, x in setup.given.items()}
    y = getattr(rwkv_jit, f"{recurrence}_update")(setup.pool, *token.values(), state_layout="vk")
    assert y.shape == token["v"].shape
    setup.check(y.unsqueeze(1), setup.slot)


@pytest.mark.parametrize("recurrence", [name for name in NAMES if "w" in NAMES[name]])
@pytest.mark.parametrize("decay", ["raw", "sigmoid", "log", "direct"])
@pytest.mark.parametrize("w_dtype", ["bf16", "fp32"])
def test_every_decay_with_something_added_to_w(op, recurrence, decay, w_dtype):
    setup = Setup(recurrence, (5, 2, 3, 64, 64), decay=decay, w_dtype=DTYPES[w_dtype], decays="mixed")
    w0 = torch.randn(3, 64, device="cuda") * 0.1
    y = setup.update(decay=decay, w0=w0.flatten(), scale=0.7)
    setup.check(y, setup.slot, w0=w0, decay=decay, scale=0.7)


@RECURRENCE
@pytest.mark.parametrize("decays", ["none", "fast"])
def test_steps_are_the_sequence(op, recurrence, decays):
    tokens = 40
    setup = Setup(recurrence, (3, tokens, 2, 64, 64), "fp32", decays=decays)
    want, final = setup.exact()
    found, begin = [], 0
    while begin < tokens:
        end = min(begin + 1 + begin % 8, tokens)
        part = comparing.of_tokens(recurrence, setup.given, (slice(None), slice(begin, end)))
        update = getattr(rwkv_jit, f"{recurrence}_update")
        found.append(update(setup.pool, *part.values(), state_indices=setup.slot, state_layout="vk"))
        begin = end
    assert comparing.relative(torch.cat(found, 1), want) < 5e-6
    assert comparing.relative(setup.pool[setup.slot.long()], final) < 5e-6


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
@pytest.mark.parametrize("how", ["heads first", "channels last but one", "a slice at an odd address"])
def test_inputs_are_read_where_they_lie(op, recurrence, how):
    setup = Setup(recurrence, (5, 3, 2, 64, 48))
    for name, x in setup.given.items():
        setup.given[name] = comparing.strided(x, how) if x.dim() == 4 else x
    setup.check(setup.update(), setup.slot)


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6"])
def test_more_rows_than_a_grid_has_places(op, recurrence):
    setup = Setup(recurrence, (70000, 1, 1, 8, 8))
    setup.check(setup.update(), setup.slot)


@RECURRENCE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state", ["bf16", "fp16"])
@pytest.mark.parametrize("head_size", [64, 50])
def test_states_are_rounded_at_random(op, recurrence, layout, state, head_size):
    size = (7, 2, 3, head_size, head_size)
    setups = []
    for seed in (3, 3, 4):
        torch.manual_seed(5)
        setup = Setup(recurrence, size, "bf16", state, layout)
        # Values below the normal numbers of float16, so that their rows of the state stay there.
        size_of_value = torch.tensor([1.0, 1e-6, 1e-7, 0.0], device="cuda").repeat(head_size)[:head_size]
        setup.given["v"] *= size_of_value.to(setup.given["v"].dtype)
        setup.pool[setup.slot.long()] *= (size_of_value[:, None] if layout == "vk" else size_of_value).to(DTYPES[state])
        setup.before = setup.memory.clone()
        setup.update(rounding="stochastic", seed=torch.tensor([seed], device="cuda"))
        setups.append(setup)
    first, again, other = (setup.pool[setup.slot.long()] for setup in setups)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    _, final = setups[0].exact()
    heads, elements = 3, head_size * head_size
    bits = rounding.random_bits(setups[0].slot, heads, elements, 3).view(final.shape)
    want = rounding.round_at_random(final.float(), DTYPES[state], bits)
    # Sums of float32 differ in their last bits, which decides few of the draws.
    assert float((first == want).float().mean()) > 0.99
    other_want = rounding.round_at_random(final.float(), DTYPES[state], bits + 1 << 15 & 0xFFFF)
    assert float((first == other_want).float().mean()) < 0.9


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
def test_rounding_at_random_keeps_the_mean(op, recurrence):
    """A state that hardly changes stands still when it is rounded to the nearest."""
    pool = torch.ones(1, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.full((1, 64, 64), 0.01, device="cuda")
    given = dict.fromkeys("rkvab", x) | {"w": torch.zeros_like(x), "a": torch.zeros_like(x)}
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    more = {"decay": "log"}
    update = getattr(rwkv_jit, f"{recurrence}_update")
    for _ in range(100):
        seed += 1
        update(pool, *[given[n] for n in NAMES[recurrence]], rounding="stochastic", seed=seed, **more)
    assert float(pool.float().mean()) == pytest.approx(1 + 100 * 1e-4, abs=1e-4)


@RECURRENCE
def test_a_graph_takes_other_inputs_slots_and_seeds(op, recurrence):
    setup = Setup(recurrence, (5, 1, 2, 64, 64), "bf16", "bf16")
    seed, out = torch.tensor([1], device="cuda"), torch.empty_like(setup.given["v"])
    options = {"rounding": "stochastic", "seed": seed, "out": out}
    setup.update(**options)
    setup.memory.copy_(setup.before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        setup.update(**options)
    torch.manual_seed(123)
    fresh = Setup(recurrence, (5, 1, 2, 64, 64), "bf16", "bf16")
    for name, x in setup.given.items():
        x.copy_(fresh.given[name])
    setup.memory.copy_(fresh.memory)
    setup.slot.copy_(fresh.slot)
    setup.before = setup.memory.clone()
    setup.slot[2] = NULL
    seed.fill_(9)
    graph.replay()
    kept = torch.tensor([0, 1, 3, 4], device="cuda")
    assert bool((out[2] == 0).all())
    setup.slot = fresh.slot
    setup.check(out, setup.slot[kept], kept)
    wanted = fresh.update(rounding="stochastic", seed=9)
    assert torch.equal(fresh.pool[fresh.slot.long()][kept], setup.pool[setup.slot.long()][kept])
    assert torch.equal(wanted[kept], out[kept])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 40, 700])
def test_an_update_reads_what_the_one_before_it_writes(op, layout, batch):
    """The second begins beside the first: its rows, slots and states must not be those of before."""
    shape, steps = (batch, 2, 64), 12
    made = comparing.make_inputs("wkv7", torch.float32, batch, 1, 2, 64)
    _, w, k, v, a, b = (x.detach()[:, 0] for x in made.values())
    pool = torch.randn(batch, 2, 64, 64, device="cuda")
    before, outs = pool.clone(), torch.full((steps + 1, *shape), float("nan"), device="cuda")
    first = torch.randn(shape, device="cuda")
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")

    def run():
        outs[0].copy_(first)
        for step in range(steps):
            options = {"state_indices": slots, "out": outs[step + 1], "scale": 0.1, "state_layout": layout}
            rwkv_jit.wkv7_update(pool, outs[step], w, k, v, a, b, **options)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        pool.copy_(before)
        outs.fill_(float("nan"))
        graph.replay()
        state, x = before.double(), first.double()
        exact = [y.double().unsqueeze(1) for y in (w, k, v, a, b)]
        for step in range(steps):
            y, state = rwkv_jit.wkv7_ref(x.unsqueeze(1), *exact, state, True, scale=0.1, state_layout=layout)
            x = y[:, 0]
            assert comparing.relative(outs[step + 1], x) < 1e-4
        assert comparing.relative(pool, state) < 1e-4


@pytest.mark.parametrize("recurrence", ["wkv7", "linear_attention"])
def test_compiled_whole(op, recurrence):
    setup, update = Setup(recurrence, (5, 1, 2, 64, 64)), getattr(rwkv_jit, f"{recurrence}_update")

    def layer(pool, slot, *given):
        return 2 * update(pool, *given, state_indices=slot, state_layout="vk")

    compiled = torch.compile(layer, fullgraph=True)
    y = compiled(setup.pool, setup.slot, *setup.given.values())
    setup.check(y / 2, setup.slot)


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6"])
def test_slots_are_looked_at_when_asked(op, recurrence, nothing_known, monkeypatch):
    setup = Setup(recurrence, (5, 1, 2, 64, 64))
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    for slots, message in (
        ([0, 1, 2, 3, setup.slots], "state_indices: expected slots below"),
        ([0, 1, 2, 1, 4], "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            setup.update(state_indices=torch.tensor(slots, device="cuda", dtype=torch.int32))
    assert torch.equal(setup.memory.view(torch.uint8), setup.before.view(torch.uint8))
    setup.check(setup.update(), setup.slot)


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_blocks_and_many_take_other_shapes(op, recurrence, layout, launched):
    for batch in (1, 600):
        setup = Setup(recurrence, (batch, 1, 2, 128, 128), layout=layout)
        setup.check(setup.update(), setup.slot)
    few, many = ({n: x for n, x in k.parameters.items() if n in ("ROWS", "VECTOR")} for k in launched)
    assert few != many


def test_a_pool_of_states_waits_for_no_gpu(op):
    pool = rwkv_jit.StatePool.rwkv7(8, layers=2, heads=4, head_size=64, width=256, reserved=1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = pool.allocate(2)
        pool.wkv[:, first].fill_(1.0)
        pool.time_shift[:, second].fill_(2.0)
        third, fourth = pool.fork(first, 2)
        pool.copy([first, second], [second, first])
        pool.reset(third)
        rows = pool.indices([0, first, second, third, fourth])
        pool.free(fourth)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.tolist() == [0, first, second, third, fourth]
    means = [float(pool.wkv[:, slot].mean()) for slot in (first, second, third, fourth)]
    assert means == [0.0, 1.0, 0.0, 1.0]
    assert float(pool.time_shift[:, first].float().mean()) == 2.0


def test_texts_come_and_go_in_a_pool(op):
    """Random steps of a server, in a graph for each batch size: states are those of every text on its own."""
    layers, heads, size, slots = 2, 2, 64, 12
    pool = rwkv_jit.StatePool.rwkv7(slots, layers, heads, size, heads * size)
    shape, graphs = (heads, size), {}
    texts, steps = {}, torch.Generator().manual_seed(1)
    bytes_before = None

    def draw(limit):
        return int(torch.randint(limit, (1,), generator=steps))

    def graph_of(batch):
        if batch not in graphs:
            given = [torch.zeros(batch, *shape, device="cuda") for _ in range(6)]
            rows, outputs = torch.zeros(batch, dtype=torch.int32, device="cuda"), []

            def run():
                return [rwkv_jit.wkv7_update(pool.wkv[layer], *given, state_indices=rows) for layer in range(layers)]

            held = pool.wkv.clone()
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs += run()
            pool.wkv.copy_(held)
            graphs[batch] = graph, given, rows, outputs
        return graphs[batch]

    for step in range(400):
        if pool.free_count and draw(3) == 0:
            (slot,) = pool.allocate()
            texts[slot] = torch.zeros(layers, heads, size, size, device="cuda", dtype=torch.float64)
        elif pool.free_count and texts and draw(3) == 0:
            source = sorted(texts)[draw(len(texts))]
            (slot,) = pool.fork(source)
            texts[slot] = texts[source].clone()
        elif len(texts) > 3 and draw(3) == 0:
            slot = sorted(texts)[draw(len(texts))]
            pool.free(slot)
            del texts[slot]
        if not texts:
            continue
        batch = [slot for slot in texts if draw(4)]
        padded = 4 * -(-len(batch) // 4)
        if not padded:
            continue
        graph, given, rows, outputs = graph_of(padded)
        made = comparing.make_inputs("wkv7", torch.float32, padded, 1, heads, size)
        for held, x in zip(given, made.values(), strict=True):
            held.copy_(x.detach()[:, 0])
        rows.copy_(torch.tensor([*batch, *[-1] * (padded - len(batch))], dtype=torch.int32))
        graph.replay()
        exact = [x.detach()[: len(batch)].double() for x in made.values()]
        for layer in range(layers):
            before = torch.stack([texts[slot][layer] for slot in batch])
            want, after = rwkv_jit.wkv7_ref(*exact, before, True)
            assert comparing.relative(outputs[layer][: len(batch)], want[:, 0]) < 1e-5
            for slot, state in zip(batch, after, strict=True):
                texts[slot][layer] = state
        if step == 200:
            torch.cuda.synchronize()
            bytes_before = torch.cuda.memory_allocated()
    for slot, state in texts.items():
        assert comparing.relative(pool.wkv[:, slot], state) < 1e-5
    del before, want, after, exact, made
    texts_bytes = sum(x.numel() * 8 for x in texts.values())
    assert torch.cuda.memory_allocated() <= bytes_before + texts_bytes + 2**20
