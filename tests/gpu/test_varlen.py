"""Sequences of any lengths over pools of states on the GPU, each against its float64 recurrence."""

from concurrent.futures import ThreadPoolExecutor

import comparing
import pytest
import torch

import rwkv_jit

DTYPES, NAMES, FIXED = comparing.DTYPES, comparing.NAMES, comparing.FIXED
NULL = -1
LENGTHS = [1, 1, 37, 8, 9, 300, 0, 64, 1, 33, 2]
pytestmark = pytest.mark.parametrize("op", ["inference"])  # the section of the record
RECURRENCE = pytest.mark.parametrize("recurrence", NAMES)
# Of y and states: those of the tensor cores have the dtype of the rows.
LIMITS = {"fp32": 5e-6, "fp16": 1.5e-3, "bf16": 7e-3}
STATE_LIMITS = {"fp32": 0, "fp16": 1e-3, "bf16": 5e-3}


class Setup:
    """Packed inputs, a pool with room between its slots, and what float64 makes of a sequence."""

    def __init__(
        self, recurrence, lengths=LENGTHS, heads=3, sizes=(64, 64), dtype="bf16", state="fp32", layout="vk",
        decays="usual", spare=0, tail=0, bound=torch.int32, index=torch.int32, **more,
    ):  # fmt: skip
        self.recurrence, self.layout, self.lengths, (head_size, value_size) = recurrence, layout, lengths, sizes
        tokens = sum(lengths) + tail
        given = comparing.make_inputs(
            recurrence, DTYPES[dtype], 1, tokens, heads, head_size, value_size, decays, **more
        )
        self.given = {name: x.detach() for name, x in given.items()}
        self.bounds = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=bound, device="cuda")
        of_head = (value_size, head_size) if layout == "vk" else (head_size, value_size)
        self.slots, size = 2 * len(lengths) + 7, heads * head_size * value_size
        self.memory = torch.full((self.slots, size + spare), float("nan"), device="cuda", dtype=DTYPES[state])
        self.pool = self.memory[:, :size].unflatten(1, (heads, *of_head))
        self.slot = torch.randperm(self.slots, device="cuda")[: len(lengths)].to(index)
        self.pool[self.slot.long()] = torch.randn(len(lengths), heads, *of_head, device="cuda").to(DTYPES[state])
        self.before = self.memory.clone()
        self.limit, self.state_limit = LIMITS[dtype], max(LIMITS[dtype], STATE_LIMITS[state])

    @property
    def scale(self):
        return 1.0 if self.recurrence.startswith("wkv") else self.given["r"].shape[-1] ** -0.5

    def tokens_of(self, i, begin=0, end=None):
        first, last = int(self.bounds[i]), int(self.bounds[i + 1])
        return slice(first + begin, last if end is None else first + end)

    def state_before(self, slot):
        return self.before[slot, : self.pool[0].numel()].view(1, *self.pool.shape[1:]).double()

    def exact(self, i, end=None, begins_empty=False, w0=None, **options):
        rows = self.tokens_of(i, 0, end)
        given = comparing.of_tokens(self.recurrence, self.given, (slice(None), rows))
        given = {name: x.double() for name, x in given.items()}
        if w0 is not None:
            given["w"] = given["w"] + w0.double()
        state = self.state_before(int(self.slot[i]))
        state = torch.zeros_like(state) if begins_empty else state
        options.setdefault("scale", self.scale)
        reference = getattr(rwkv_jit, f"{self.recurrence}_ref")
        y, final = reference(*given.values(), state, True, state_layout=self.layout, **options)
        return y[0], final[0]

    def run(self, **options):
        function = getattr(rwkv_jit, f"{self.recurrence}_varlen")
        options = {"cu_seqlens": self.bounds, "state_indices": self.slot, **options}
        self.out = torch.full_like(self.given["v"], float("nan"))
        y = function(self.pool, *self.given.values(), state_layout=self.layout, out=self.out, **options)
        assert y is self.out
        return y[0]

    def check(self, y, done=None, written=None, begins_empty=(), w0=None, **options):
        """The sequences that are `done` have y and states, all others zeros, and every other slot is as it was."""
        done = range(len(self.lengths)) if done is None else done
        written = self.slot if written is None else written
        touched = []
        for i in (i for i in range(len(self.lengths)) if self.lengths[i]):
            rows = self.tokens_of(i)
            if i not in done:
                assert bool((y[rows] == 0).all())
                continue
            want, final = self.exact(i, begins_empty=i in begins_empty, w0=w0, **options)
            assert comparing.relative(y[rows], want) < self.limit, (i, self.lengths[i])
            if int(written[i]) >= 0:
                touched.append(int(written[i]))
                assert comparing.relative(self.pool[touched[-1]], final) < self.state_limit, (i, self.lengths[i])
        assert bool((y[int(self.bounds[-1]) :] == 0).all())
        self.check_others(touched)

    def check_others(self, touched):
        others = torch.ones(self.slots, dtype=torch.bool, device="cuda")
        others[touched] = False
        assert torch.equal(self.memory.view(torch.uint8)[others], self.before.view(torch.uint8)[others])
        gap = self.pool[0].numel()
        assert torch.equal(self.memory[:, gap:].isnan(), self.before[:, gap:].isnan())


@RECURRENCE
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (50, 34)])
def test_values_states_and_all_other_slots(op, recurrence, layout, dtypes, sizes):
    setup = Setup(recurrence, LENGTHS, 3, sizes, *dtypes, layout, spare=8, tail=5)
    setup.check(setup.run())


@RECURRENCE
@pytest.mark.parametrize("sizes", [(256, 256), (200, 72), (64, 200)])
def test_large_heads(op, recurrence, sizes):
    setup = Setup(recurrence, LENGTHS, 2, sizes)
    setup.check(setup.run())


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6", "gla"])
@pytest.mark.parametrize("decays", ["none", "fast", "mixed", "-20 or 0"])
@pytest.mark.parametrize("size", [64, 256])
def test_any_decays(op, recurrence, decays, size):
    setup = Setup(recurrence, LENGTHS, 2, (size, size), decays=decays)
    setup.check(setup.run())


@RECURRENCE
@pytest.mark.parametrize(("lengths", "tail"), [([8000], 0), ([1, 3000, 2, 0, 5000, 9], 100), ([700, 9000], 3)])
@pytest.mark.parametrize(("layout", "state"), [("vk", "fp32"), ("kv", "bf16")])
def test_few_heads_go_in_segments(op, recurrence, lengths, tail, layout, state):
    setup = Setup(recurrence, lengths, 2, layout=layout, state=state, spare=8, tail=tail)
    slots, null = setup.slot.clone(), []
    if len(lengths) > 2:
        null, slots[4] = [4], NULL
    y = setup.run(state_indices=slots, max_seqlen=max(lengths))
    setup.check(y, [i for i in range(len(lengths)) if i not in null])


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
def test_segments_read_here_and_write_there(op, recurrence):
    setup = Setup(recurrence, [3000, 5, 2000, 4000], 2)
    free = [i for i in range(setup.slots) if i not in setup.slot.tolist()]
    written = torch.tensor([free[0], NULL, free[1], NULL], dtype=torch.int32, device="cuda")
    has_state = torch.tensor([True, True, False, True], device="cuda")
    setup.pool[int(setup.slot[2])] = float("nan")
    setup.before.copy_(setup.memory)
    y = setup.run(write_indices=written, has_initial_state=has_state, max_seqlen=4000)
    setup.check(y, written=written, begins_empty=[2])


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
@pytest.mark.parametrize(
    ("lengths", "tail", "active"), [([4000], 5000, 1), ([3000, 2000], 6000, 2), ([3000, 9000], 0, 1)]
)  # fmt: skip
def test_segments_leave_tokens_of_no_sequence_alone(op, recurrence, lengths, tail, active):
    setup = Setup(recurrence, lengths, 2, tail=tail)
    # Where nobody has written bounds, they would say that all tokens are a segment's.
    taken = torch.tensor([-1, 10**9], device="cuda").repeat(1 << 23)
    del taken
    y = setup.run(max_seqlen=max(lengths), num_active=torch.tensor([active], dtype=torch.int32, device="cuda"))
    setup.check(y, range(active))


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6"])
def test_sequences_of_many_chunks_leave_frames_to_a_second_launch(op, recurrence):
    setup = Setup(recurrence, [5000, 1, 4000, 0, 3, 2100], 2, decays="mixed")
    setup.check(setup.run())


@RECURRENCE
@pytest.mark.parametrize("null_index", [-1, 0, 2])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_sequences_without_a_slot(op, recurrence, null_index, index):
    setup = Setup(recurrence, index=index, bound=index)
    slots = setup.slot.clone()
    slots[1], slots[5], slots[7], slots[10] = null_index, -7, setup.slots, setup.slots + 5
    done = [i for i in range(len(LENGTHS)) if int(slots[i]) > null_index and int(slots[i]) < setup.slots]
    for i in set(range(len(LENGTHS))) - set(done):  # what belongs to no slot may be anything
        for name, x in setup.given.items():
            if name not in FIXED.get(recurrence, ""):
                x[:, setup.tokens_of(i)] = float("nan")
    setup.check(setup.run(state_indices=slots, null_index=null_index), done)


@RECURRENCE
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_sequences_that_begin_with_zeros_read_no_slot(op, recurrence, dtype):
    setup = Setup(recurrence)
    empty = [0, 3, 5, 9]
    has_state = torch.ones(len(LENGTHS), dtype=dtype, device="cuda")
    has_state[empty] = 0
    setup.pool[setup.slot[empty].long()] = float("nan")
    setup.check(setup.run(has_initial_state=has_state), begins_empty=empty)


@RECURRENCE
def test_states_are_read_here_and_written_there(op, recurrence):
    setup = Setup(recurrence)
    free = [i for i in range(setup.slots) if i not in setup.slot.tolist()]
    written = torch.tensor(free[: len(LENGTHS)], dtype=torch.int32, device="cuda")
    written[2], written[8] = NULL, NULL
    setup.check(setup.run(write_indices=written), written=written)


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
@pytest.mark.parametrize("active", [0, 1, 4, 7, 11])
def test_sequences_behind_the_active_ones_are_none(op, recurrence, active):
    setup = Setup(recurrence)
    y = setup.run(num_active=torch.tensor([active], dtype=torch.int32, device="cuda"))
    setup.check(y, range(active))


@RECURRENCE
@pytest.mark.parametrize("size", [64, 256])
def test_states_at_checkpoints(op, recurrence, size):
    setup = Setup(recurrence, [300, 1, 40, 8, 500], 2, (size, size))
    free = [i for i in range(setup.slots) if i not in setup.slot.tolist()]
    offsets = [[64, 200, 300], [1, 0, 0], [7, 0, 33], [9, 5, 5], [128, 64, 256]]
    places = [[free[0], free[1], free[2]], [free[3], NULL, NULL], [free[4], free[5], free[6]],
              [free[7], NULL, free[8]], [free[9], free[10], NULL]]  # fmt: skip
    # What ascends and is in the sequence: the others count as none.
    legal = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 2), (3, 2), (4, 0)]
    y = setup.run(
        checkpoint_offsets=torch.tensor(offsets, dtype=torch.int32, device="cuda"),
        checkpoint_indices=torch.tensor(places, dtype=torch.int32, device="cuda"),
    )
    kept = [places[i][j] for i, j in legal]
    for i, j in legal:
        _, state = setup.exact(i, end=offsets[i][j])
        assert comparing.relative(setup.pool[places[i][j]], state) < setup.state_limit, (i, j)
    for i in range(len(setup.lengths)):
        want, final = setup.exact(i)
        assert comparing.relative(y[setup.tokens_of(i)], want) < setup.limit, i
        assert comparing.relative(setup.pool[int(setup.slot[i])], final) < setup.state_limit, i
    setup.check_others([*kept, *setup.slot.tolist()])


@RECURRENCE
@pytest.mark.parametrize("cuts", [[1], [8, 9], [31, 64, 65], [100], [299, 300], [16, 17, 18, 200]])
def test_a_prompt_in_pieces_gives_the_same(op, recurrence, cuts):
    setup = Setup(recurrence, [333], 4)
    want, final = setup.exact(0)
    function, ends = getattr(rwkv_jit, f"{recurrence}_varlen"), [0, *cuts, 333]
    results = []
    for begin, end in zip(ends, ends[1:], strict=False):
        given = comparing.of_tokens(recurrence, setup.given, (slice(None), slice(begin, end)))
        bounds = torch.tensor([0, end - begin], device="cuda")
        results.append(
            function(setup.pool, *given.values(), cu_seqlens=bounds, state_indices=setup.slot.long(), state_layout="vk")
        )
    assert comparing.relative(torch.cat(results, 1)[0], want) < setup.limit
    assert comparing.relative(setup.pool[int(setup.slot[0])], final) < setup.state_limit


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6", "gla"])
@pytest.mark.parametrize("most", [None, 8])
def test_what_is_added_to_w(op, recurrence, most):
    setup = Setup(recurrence, [1, 8, 3, 1] if most else LENGTHS, w_dtype=torch.bfloat16)
    decay = {"gla": "log"}.get(recurrence, "raw")
    several = [-torch.rand(3, 64, device="cuda") for _ in range(2)]
    for w0 in several:  # a call that is known, too
        setup.pool.copy_(setup.before.view_as(setup.pool))
        setup.check(setup.run(w0=w0.flatten(), max_seqlen=most), w0=w0, decay=decay)


@pytest.mark.parametrize("recurrence", [name for name in NAMES if "w" in NAMES[name]])
@pytest.mark.parametrize("decay", ["raw", "sigmoid", "log", "direct"])
@pytest.mark.parametrize(
    ("lengths", "sizes", "w0_dtype", "more"),
    [
        pytest.param(LENGTHS, (64, 64), "bf16", {}, id="a block holds a head"),
        pytest.param(LENGTHS, (128, 128), "fp32", {"dtype": "fp16"}, id="a large block"),
        pytest.param(LENGTHS, (50, 34), "fp16", {}, id="odd sizes"),
        pytest.param(LENGTHS, (256, 256), "bf16", {}, id="large heads"),
        pytest.param([1, 3000, 2, 5003], (64, 64), "fp32", {}, id="segments"),
        pytest.param(LENGTHS, (64, 64), "bf16", {"dtype": "fp32"}, id="token by token"),
    ],
)
def test_all_kernels_add_in_float32_and_before_the_map(op, recurrence, decay, lengths, sizes, w0_dtype, more):
    setup = Setup(recurrence, lengths, 2, sizes, decay=decay, **more)
    # States would grow where a factor were above 1.
    w0 = -torch.rand(2, sizes[0], device="cuda") * {"direct": 0.05}.get(decay, 1.0)
    options = {"decay": decay, "max_seqlen": max(lengths)}
    y = setup.run(w0=w0.to(DTYPES[w0_dtype]), **options)
    w0 = w0.to(DTYPES[w0_dtype]).float()
    setup.check(y, w0=w0, decay=decay)
    found = y.clone(), setup.pool.clone()
    setup.memory.copy_(setup.before)
    setup.given["w"] = setup.given["w"].float() + w0
    others = setup.run(**options), setup.pool
    slots = setup.slot.long()
    # A sum that were rounded to the type of w would be off by more.
    assert comparing.relative(found[0], others[0]) < 1e-4
    assert comparing.relative(found[1][slots], others[1][slots]) < 1e-4


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6", "gla"])
@pytest.mark.parametrize("decays", ["fast", "mixed"])
@pytest.mark.parametrize(("lengths", "size"), [(LENGTHS, 64), (LENGTHS, 256), ([1, 4000, 2100], 64)], ids=str)
def test_what_is_added_to_w_takes_chunks_out_of_their_frames(op, recurrence, decays, lengths, size):
    setup = Setup(recurrence, lengths, 2, (size, size), decays=decays, w_dtype=torch.bfloat16)
    w0 = -torch.rand(2, size, device="cuda")
    y = setup.run(w0=w0, max_seqlen=max(lengths))
    setup.check(y, w0=w0, decay={"gla": "log"}.get(recurrence, "raw"))


def test_a_graph_reads_what_is_added_to_w_anew(op):
    setup, w0 = Setup("wkv7", w_dtype=torch.bfloat16), -torch.rand(3, 64, device="cuda")
    setup.run(w0=w0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = setup.run(w0=w0)
    w0.copy_(-torch.rand_like(w0))
    setup.memory.copy_(setup.before)
    graph.replay()
    setup.check(y, w0=w0)


@pytest.mark.parametrize("recurrence", ["wkv7", "linear_attention"])
def test_more_tokens_than_was_said_are_right_too(op, recurrence):
    setup = Setup(recurrence)
    setup.check(setup.run(max_seqlen=8))


@pytest.mark.parametrize("recurrence", ["wkv7", "gla"])
def test_few_tokens_round_as_updates_do(op, recurrence):
    setup = Setup(recurrence, [1, 1, 8, 5, 40], dtype="bf16", state="bf16")
    setup.run(rounding="stochastic", seed=17)
    by_varlen = setup.memory.clone()
    setup.memory.copy_(setup.before)
    update = getattr(rwkv_jit, f"{recurrence}_update")
    for i in range(4):
        given = comparing.of_tokens(recurrence, setup.given, (slice(None), setup.tokens_of(i)))
        update(
            setup.pool,
            *given.values(),
            state_indices=setup.slot[i : i + 1],
            rounding="stochastic",
            seed=17,
            state_layout="vk",
        )
        assert torch.equal(
            by_varlen[int(setup.slot[i])].view(torch.int16), setup.memory[int(setup.slot[i])].view(torch.int16)
        )


@pytest.mark.parametrize("recurrence", ["wkv7", "wkv6", "gla"])
@pytest.mark.parametrize("decays", ["usual", "mixed"])
def test_a_graph_replays_with_other_sequences(op, recurrence, decays):
    setup = Setup(recurrence, [1] * 6 + [90, 30], 2, decays=decays)
    has_state = torch.ones(8, dtype=torch.bool, device="cuda")
    active = torch.tensor([8], dtype=torch.int32, device="cuda")
    options = {"has_initial_state": has_state, "num_active": active}
    setup.run(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = setup.run(**options)
    for lengths, count, empty in (
        ([1] * 6 + [90, 30], 8, []), ([40, 1, 2, 3, 50, 8, 9, 1], 8, [0, 4]), ([126, 0, 0, 0, 0, 0, 0, 0], 1, [0]),
        ([1, 1, 1, 1, 1, 1, 1, 1], 8, []), ([1, 60, 1, 0, 0, 0, 0, 0], 3, [2]),
    ):  # fmt: skip
        setup.lengths = lengths
        setup.bounds.copy_(torch.tensor([sum(lengths[:i]) for i in range(9)]))
        setup.slot.copy_(torch.randperm(setup.slots)[:8])
        setup.pool.copy_(torch.randn_like(setup.pool))
        for x in setup.given.values():
            x.copy_(x.flip(1) if x.dim() == 4 else x)
        setup.before.copy_(setup.memory)
        active.fill_(count)
        has_state.fill_(1)
        has_state[empty] = 0
        graph.replay()
        setup.check(y, range(count), begins_empty=empty)


def test_threads_and_captures_share_two_streams(op):
    """Long and short sequences wait for each other by an event that a thread keeps, and that a capture records too."""
    setups = [Setup("wkv7", [1, 400, 1, 300, 2], 8) for _ in range(4)]

    def work(setup):
        for _ in range(30):
            setup.memory.copy_(setup.before)
            y = setup.run()
        return y

    def check(ys):
        for setup, y in zip(setups, ys, strict=True):
            setup.check(y)

    work(setups[0])
    with ThreadPoolExecutor(4) as pool:
        check(pool.map(work, setups))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = setups[0].run()
        check(pool.map(work, setups))
    setups[0].memory.copy_(setups[0].before)
    graph.replay()
    setups[0].check(y)
    check(map(work, setups))


def test_a_prompt_of_100000_tokens_beside_decodes(op):
    setup = Setup("wkv7", [1, 1, 100_000, 1, 7], 1)
    y = setup.run()
    for i in (0, 1, 3, 4):
        want, final = setup.exact(i)
        assert comparing.relative(y[setup.tokens_of(i)], want) < setup.limit
        assert comparing.relative(setup.pool[int(setup.slot[i])], final) < setup.state_limit
    given = comparing.of_tokens("wkv7", setup.given, (slice(None), setup.tokens_of(2)))
    want, final = rwkv_jit.wkv7(*given.values(), setup.state_before(int(setup.slot[2])).float(), True)
    assert comparing.relative(y[setup.tokens_of(2)], want[0]) < 1e-2
    assert comparing.relative(setup.pool[int(setup.slot[2])], final[0]) < 1e-2


@pytest.mark.parametrize("heads", [1, 40])
def test_many_sequences(op, heads):
    lengths = [1] * 300 + [20, 200] + [2] * 50
    setup = Setup("wkv7", lengths, heads)
    y = setup.run()
    for i in (0, 1, 150, 299, 300, 301, 302, 351):
        want, final = setup.exact(i)
        assert comparing.relative(y[setup.tokens_of(i)], want) < setup.limit
        assert comparing.relative(setup.pool[int(setup.slot[i])], final) < setup.state_limit
    setup.check_others(setup.slot.tolist())


def test_wrong_bounds_and_slots_stray_nowhere(op):
    setup = Setup("wkv7")
    bounds = setup.bounds.clone()
    bounds[3], bounds[5], bounds[-1] = -100, 10**6, 10**9
    slots = setup.slot.clone()
    slots[0], slots[2] = 10**6, -(10**6)
    setup.run(cu_seqlens=bounds, state_indices=slots)
    setup.check_others(setup.slot.tolist())
    torch.cuda.synchronize()


@RECURRENCE
@pytest.mark.parametrize("lengths", [[320], [500, 1], [200, 0, 230]], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("decays", ["usual", "mixed"])
def test_few_heads_of_prompts_take_the_kernels_of_large_ones(op, recurrence, lengths, sizes, decays, launched):
    setup = Setup(recurrence, lengths, sizes=sizes, decays=decays, spare=5)
    setup.check(setup.run(max_seqlen=max(lengths)))
    if torch.cuda.get_device_capability()[0] == 9:
        assert any(kernel.name.endswith("prepare") for kernel in launched)
