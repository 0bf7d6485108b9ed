"""RWKV-4 on a GPU: values, states and gradients against float64, updates of pools, and that nothing else is written."""

import pytest
import torch
from comparing import relative
from problems import problem

import rwkv_jit
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import wkv4 as room

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LIMITS = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 3e-3}
OP = pytest.mark.parametrize("op", ["wkv4"])
BACKENDS = pytest.mark.parametrize("backend", ["recurrent", "split"])


def make(dtype=torch.float32, batch=2, tokens=65, channels=96, kind="usual"):
    k, v, dy = (torch.randn(batch, tokens, channels, device="cuda") for _ in range(3))
    w, u = torch.linspace(-6, 1, channels, device="cuda"), torch.randn(channels, device="cuda") * 0.5
    if kind == "large keys":
        k = k * 30
    if kind == "large keys, slow decay":
        k, w = k * 30, torch.linspace(-9, -4, channels, device="cuda")
    if kind == "strong decay":
        w = torch.linspace(1, 6, channels, device="cuda")
    if kind == "decay beyond floats":
        w = torch.linspace(80, 100, channels, device="cuda")
    if kind == "large bonus":
        u = u + 12
    leaves = [x.requires_grad_() for x in (w, u, k.to(dtype), v.to(dtype))]
    return leaves, dy.to(dtype)


def make_state(batch=2, channels=96):
    num, top = torch.randn(2, batch, channels, device="cuda")
    return torch.stack((num, torch.rand_like(num) * 3 + 0.1, top), 1).requires_grad_()


def run(function, leaves, dy, state=None, grad_final=None, **options):
    y, final = function(*leaves, state, True, **options)
    given = [*leaves, *([state] if state is not None else [])]
    outputs, grads = [y], [dy]
    if grad_final is not None:
        outputs, grads = [y, final], [dy, grad_final]
    found = torch.autograd.grad(outputs, given, grads, materialize_grads=True)
    return dict(zip(("y", "state", "dw", "du", "dk", "dv", "dstate"), (y, final, *found), strict=False))


def exact(leaves, dy, state=None, grad_final=None, **options):
    doubles = [None if x is None else x.detach().double() for x in (*leaves, state, grad_final)]
    *given, start, grad = [None if x is None else x.requires_grad_() for x in doubles]
    return run(rwkv_jit.wkv4_ref, given, dy.double(), start, grad, **options)


def check(found, wanted, limit):
    for name, x in found.items():
        assert relative(x, wanted[name]) <= (limit if name in ("y", "dk", "dv") else 1e-5), name


@OP
@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 300])
def test_any_length(op, tokens, dtype, backend, guarded_memory):
    leaves, dy = make(DTYPES[dtype], tokens=tokens)
    state, grad_final = make_state(), torch.randn(2, 3, 96, device="cuda")
    found = run(rwkv_jit.wkv4, leaves, dy, state, grad_final, backend=backend)
    check(found, exact(leaves, dy, state, grad_final), LIMITS[dtype])


@OP
@BACKENDS
@pytest.mark.parametrize(
    "kind", ["large keys", "large keys, slow decay", "strong decay", "decay beyond floats", "large bonus"]
)
@pytest.mark.parametrize("from_state", [False, True])
def test_any_data(op, kind, from_state, backend):
    leaves, dy = make(tokens=700, kind=kind)
    state = make_state() if from_state else None
    check(run(rwkv_jit.wkv4, leaves, dy, state, backend=backend), exact(leaves, dy, state), 1e-5)


@OP
@pytest.mark.parametrize(("batch", "channels"), [(1, 1), (3, 31), (5, 129), (300, 40)])
def test_any_number_of_rows_and_channels(op, batch, channels, guarded_memory):
    leaves, dy = make(batch=batch, tokens=40, channels=channels)
    state = make_state(batch, channels)
    check(run(rwkv_jit.wkv4, leaves, dy, state), exact(leaves, dy, state), 1e-5)


@OP
@pytest.mark.parametrize("with_grad", [False, True])
def test_state_of_zeros_that_is_trained(op, with_grad):
    """num and den of zero, with a max that makes them count: their gradients are not zero."""
    leaves, dy = make(tokens=33)
    state = torch.zeros(2, 3, 96, device="cuda", requires_grad=True)
    grad_final = torch.randn(2, 3, 96, device="cuda") if with_grad else None
    wanted = exact(leaves, dy, state, grad_final)
    assert wanted["dstate"][:, :2].abs().sum() > 0
    check(run(rwkv_jit.wkv4, leaves, dy, state, grad_final), wanted, 1e-5)


@OP
def test_nothing_to_walk_over(op):
    leaves, dy = make(tokens=0)
    state, grad_final = make_state(), torch.randn(2, 3, 96, device="cuda")
    found = run(rwkv_jit.wkv4, leaves, dy, state, grad_final)
    assert torch.equal(found["state"], state)
    assert torch.equal(found["dstate"], grad_final)
    assert all(not found[name].any() for name in ("dw", "du"))


@OP
@BACKENDS
def test_the_same_bit_for_bit(op, backend):
    leaves, dy = make(torch.bfloat16, tokens=500, channels=300)
    state = make_state(channels=300)
    first, second = (run(rwkv_jit.wkv4, leaves, dy, state, backend=backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@OP
@pytest.mark.parametrize("how", ["tokens first", "channels last but one", "a slice"])
def test_any_strides(op, how):
    leaves, dy = make(torch.bfloat16)
    for index in (2, 3):
        x = leaves[index].detach()
        other = {
            "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
            "channels last but one": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "a slice": lambda x: torch.cat((x[..., :3], x), -1)[..., 3:],
        }[how](x)
        leaves[index] = other.requires_grad_()
    check(run(rwkv_jit.wkv4, leaves, dy), exact(leaves, dy), 3e-3)


@OP
def test_a_state_for_all_rows_and_a_log_decay(op):
    (w, *rest), dy = make()
    leaves, state = [-w.detach().exp(), *rest], make_state()[0].detach().requires_grad_()
    leaves[0].requires_grad_()
    check(run(rwkv_jit.wkv4, leaves, dy, state, decay="log"), exact(leaves, dy, state, decay="log"), 1e-5)


@OP
def test_parts_of_a_text_are_the_whole(op):
    leaves, dy = make(tokens=200)
    w, u, k, v = leaves
    whole = run(rwkv_jit.wkv4, leaves, dy)
    state, outputs = None, []
    for begin, end in ((0, 77), (77, 78), (78, 200)):
        y, state = rwkv_jit.wkv4(w, u, k[:, begin:end], v[:, begin:end], state, True)
        outputs.append(y)
    grads = torch.autograd.grad(torch.cat(outputs, 1), leaves, dy)
    for x, want in zip((state, *grads), [whole[n] for n in ("state", "dw", "du", "dk", "dv")], strict=True):
        assert relative(x, want) < 1e-5


@OP
def test_updates_are_the_sequence(op):
    (w, u, k, v), _ = make(torch.bfloat16, tokens=50)
    start = make_state().detach()
    want, final = rwkv_jit.wkv4(w.detach(), u.detach(), k.detach(), v.detach(), start, True)
    states = [start.clone(), start.transpose(0, 1).contiguous().transpose(0, 1)]
    for state in states:
        with torch.no_grad():
            found = [rwkv_jit.wkv4_update(state, w, u, k[:, t], v[:, t]) for t in range(50)]
        assert relative(torch.stack(found, 1), want) < 3e-3
        assert relative(state, final) < 1e-5


@OP
def test_states_between_parts_and_chunks_lose_nothing_to_rounding(op):
    leaves, dy = make(batch=16, tokens=700, kind="large keys, slow decay")
    found, wanted = run(rwkv_jit.wkv4, leaves, dy, backend="split"), exact(leaves, dy)
    assert relative(found["dw"], wanted["dw"]) < 3e-6  # 7e-6 if the max of a state is rounded and nothing else


@OP
@BACKENDS
def test_states_that_are_saved_are_as_precise_as_their_sums(op, backend):
    (w, u, k, v), _ = make(tokens=640, kind="large keys, slow decay")
    with torch.no_grad():
        options = 1.0, "raw", "vk", 64, None, None, backend, None, None, False, False, False
        *_, saved = torch.ops.rwkv_jit.wkv4_fwd(w, u, k, v, None, None, *options, False, True)
    saved = saved.view(len(k), -1, 3, k.shape[-1])  # before every chunk
    (w, u, k, v), exact = (x.detach().double() for x in (w, u, k, v)), None
    for chunk in range(1, saved.shape[1]):
        now = slice(room.CHUNK_LEN * (chunk - 1), room.CHUNK_LEN * chunk)
        _, exact = rwkv_jit.wkv4_ref(w, u, k[:, now], v[:, now], exact, True)
        off = [x[:, 1].double().log() + x[:, 2].double() for x in (saved[:, chunk], exact)]
        assert float((off[0] - off[1]).detach().abs().max()) < 1.5e-6  # 4e-6 if the max is rounded and nothing else


@OP
def test_rounding_does_not_add_up_from_step_to_step(op):
    """A max of 100 that loses 1e-4 a step rounds in every step, always the same way: 8e-4 of y after 1000 of them."""
    w, u = torch.linspace(-2e-4, -5e-5, 96, device="cuda"), torch.randn(96, device="cuda")
    k, v = torch.randn(2, 2, 1000, 96, device="cuda")
    k, state = k + 96, make_state().detach()
    state[:, 2] = 100
    want, _ = rwkv_jit.wkv4_ref(*(x.double() for x in (w, u, k, v, state)), decay="log")
    for t in range(1000):
        y = rwkv_jit.wkv4_update(state, w, u, k[:, t], v[:, t], "log")
    assert relative(y, want[:, -1]) < 2e-5


@OP
@BACKENDS
def test_both_directions_are_replayed_from_a_graph(op, backend):
    leaves, dy = make(tokens=300)
    given = leaves, dy, make_state(), torch.randn(2, 3, 96, device="cuda")
    torch.cuda.synchronize()  # the inputs are there
    with torch.cuda.stream(torch.cuda.Stream()):
        wanted = run(rwkv_jit.wkv4, *given, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(rwkv_jit.wkv4, *given, backend=backend)
    for x in found.values():
        x.detach().fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())


@OP
def test_compiled_whole(op):
    leaves, dy = make(tokens=70)
    compiled = torch.compile(rwkv_jit.wkv4, fullgraph=True)
    state = make_state()
    found, wanted = run(compiled, leaves, dy, state), run(rwkv_jit.wkv4, leaves, dy, state)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@OP
def test_both_backends_are_chosen(op):
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    p = problem("wkv4", T=4096, C=96, backend="auto", gpu=Gpu("sm_90", multiprocessors=multiprocessors))
    assert room.backend_of(p) == "split"
    assert room.backend_of(p._replace(C=256 * multiprocessors)) == "recurrent"


# ---- updates of a pool -------------------------------------------------------------------------------------------

# Rows, tokens and channels: a block and several, tokens that are loaded at once and more.
POOL_SHAPES = [(5, 1, 96), (300, 1, 40), (3, 2, 31), (2, 8, 129), (4, 21, 96), (1, 1, 1), (1, 9, 2048)]
# How the strides of a pool follow from its sizes, and from what lies between its slots.
POOL_STRIDES = {
    "of its shape": lambda slots, channels: (3 * channels, channels, 1),
    "pages": lambda slots, channels: (3 * channels + 13, channels, 1),
    "numbers first": lambda slots, channels: (channels, slots * channels, 1),
    "channels first": lambda slots, channels: (1, slots, 3 * slots),
}


class Pool:
    """Tokens of rows, and a pool of NaN but in the slots of the rows."""

    def __init__(self, shape, dtype=torch.float32, strides="of its shape", decay="raw"):
        batch, tokens, channels = shape
        (w, u, *rows), _ = make(dtype, batch, tokens, channels)
        self.inputs = [x.detach() for x in (-w.exp() if decay == "log" else w, u, *rows)]
        self.slots, self.decay = batch + 11, decay
        self.strides = POOL_STRIDES[strides](self.slots, channels)
        self.memory = torch.full(((3 * channels + 13) * self.slots,), float("nan"), device="cuda")
        self.slot = torch.randperm(self.slots, device="cuda")[:batch].to(torch.int32)
        self.states[self.slot.long()] = make_state(batch, channels).detach()
        self.before = self.memory.clone()

    @property
    def states(self):
        return self.memory.as_strided((self.slots, 3, self.inputs[0].shape[0]), self.strides)

    def update(self, **options):
        options.setdefault("state_indices", self.slot)
        return rwkv_jit.wkv4_update(self.states, *self.inputs, self.decay, **options)

    def check(self, y, there=None, written=None):
        """y of the rows that are `there` is right and that of others zero; `written` is where their states went."""
        there = torch.arange(len(y), device="cuda") if there is None else there
        read = self.slot[there].long()
        written = read if written is None else written
        before = self.before.as_strided(self.states.shape, self.strides)
        w, u, k, v = (x.double() for x in self.inputs)
        want, final = rwkv_jit.wkv4_ref(w, u, k[there], v[there], before[read].double(), True, self.decay)
        if want.numel() > 1:  # one value alone may be as far off as its rounding
            assert relative(y[there], want) <= LIMITS[{x: n for n, x in DTYPES.items()}[y.dtype]]
        rounding = torch.finfo(y.dtype).eps / 2 + 1e-5
        assert bool(((y[there] - want).abs() <= rounding * want.abs() + 1e-5 * want.square().mean().sqrt()).all())
        others = torch.ones(len(y), dtype=torch.bool, device="cuda")
        others[there] = False
        assert bool((y[others] == 0).all())
        kept = written >= 0
        assert relative(self.states[written[kept]], final[kept]) <= 1e-5
        left = self.before.clone()  # all but the states that were written is as it was
        left.as_strided(self.states.shape, self.strides)[written[kept]] = self.states[written[kept]]
        assert torch.equal(left.view(torch.int32), self.memory.view(torch.int32))


@OP
@pytest.mark.parametrize("decay", ["raw", "log"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", POOL_SHAPES)
def test_a_pool_is_updated_and_all_other_slots_are_as_they_were(op, shape, dtype, decay):
    pool = Pool(shape, DTYPES[dtype], decay=decay)
    out = torch.full_like(pool.inputs[3], float("nan"))
    assert pool.update(out=out) is out
    pool.check(out)


@OP
@pytest.mark.parametrize("strides", POOL_STRIDES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_slots_at_any_strides_and_rows_without_one(op, strides, tokens, guarded_memory):
    pool = Pool((9, tokens, 70), torch.bfloat16, strides)
    slots = pool.slot.clone()
    slots[1], slots[4], slots[7] = -1, -5, pool.slots
    for x in pool.inputs[2:]:  # what belongs to no slot may be anything
        x[[1, 4, 7]] = float("nan")
    for _ in range(2):
        pool.memory.copy_(pool.before)
        pool.check(pool.update(state_indices=slots), torch.tensor([0, 2, 3, 5, 6, 8], device="cuda"))


@OP
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_index", [-1, 0, 3])
def test_states_are_read_here_and_written_there(op, index, null_index):
    pool = Pool((6, 2, 96))
    free = torch.ones(pool.slots, dtype=torch.bool, device="cuda")
    free[: null_index + 1] = False
    free[pool.slot.long()] = False
    written = free.nonzero().flatten()[:6].to(index)
    written[2], written[4] = null_index, pool.slots + 3
    options = {"state_indices": pool.slot.to(index), "write_indices": written, "null_index": null_index}
    places = written.clone()
    places[[2, 4]] = -1
    there = (pool.slot > null_index).nonzero().flatten()
    out = torch.full_like(pool.inputs[3], float("nan"))
    pool.check(pool.update(out=out, **options), there, places[there].long())


@OP
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["usual", "large keys", "strong decay", "decay beyond floats", "large bonus"])
def test_an_update_of_one_token_is_the_sequence_bit_for_bit(op, dtype, kind):
    """As it was when the kernel of sequences did it."""
    (w, u, k, v), _ = make(DTYPES[dtype], batch=7, tokens=30, channels=200, kind=kind)
    w, u, k, v = (x.detach() for x in (w, u, k, v))
    state = make_state(7, 200).detach()
    want = state.clone()
    for t in range(30):
        y = rwkv_jit.wkv4_update(state, w, u, k[:, t], v[:, t])
        now, want = rwkv_jit.wkv4(w, u, k[:, t : t + 1], v[:, t : t + 1], want, True, backend="recurrent")
        assert torch.equal(y, now[:, 0])
        assert torch.equal(state, want)


@OP
@pytest.mark.parametrize("kind", ["large keys", "large keys, slow decay", "strong decay", "large bonus"])
def test_several_tokens_of_any_data(op, kind):
    pool = Pool((5, 40, 96))
    (w, u, k, v), _ = make(batch=5, tokens=40, kind=kind)
    pool.inputs = [x.detach() for x in (w, u, k, v)]
    pool.check(pool.update())


@OP
@pytest.mark.parametrize("how", ["tokens first", "channels last but one", "a slice"])
@pytest.mark.parametrize("places", [(2,), (3,), (2, 3)], ids=["k", "v", "both"])
def test_tokens_of_an_update_may_have_any_strides(op, how, places):
    pool = Pool((5, 40, 96), torch.bfloat16)
    for index in places:
        x = pool.inputs[index]
        pool.inputs[index] = {
            "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
            "channels last but one": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "a slice": lambda x: torch.cat((x[..., :3], x), -1)[..., 3:],
        }[how](x)
    pool.check(pool.update())


@OP
def test_more_rows_than_a_grid_has_in_its_second_extent(op):
    pool = Pool((70000, 1, 3))
    pool.check(pool.update())


@OP
def test_an_update_of_a_graph_takes_other_tokens_and_slots(op):
    pool, fresh = (Pool((5, 2, 96), torch.bfloat16) for _ in range(2))
    out = torch.full_like(pool.inputs[3], float("nan"))
    pool.update(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.update(out=out)
    for x, other in zip(pool.inputs, fresh.inputs, strict=True):
        x.copy_(other)
    pool.memory.copy_(fresh.memory)
    pool.before, wanted = fresh.before, fresh.update()
    pool.slot.copy_(fresh.slot)
    pool.slot[2] = -1
    out.fill_(float("nan"))
    graph.replay()
    kept = torch.tensor([0, 1, 3, 4], device="cuda")
    pool.check(out, kept)
    assert torch.equal(out[kept], wanted[kept])


@OP
def test_an_update_is_compiled_whole(op):
    pool = Pool((5, 2, 96), torch.bfloat16)

    def layer(states, slot, *given):
        return 2 * rwkv_jit.wkv4_update(states, *given, state_indices=slot)

    y = torch.compile(layer, fullgraph=True)(pool.states, pool.slot, *pool.inputs)
    pool.check(y / 2)


@OP
def test_slots_of_an_update_are_looked_at_when_asked(op, nothing_known, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    pool = Pool((4, 1, 96))
    pool.slot[1] = pool.slots
    with pytest.raises(ValueError, match="state_indices: expected slots below"):
        pool.update()
    pool.slot[1] = pool.slot[0]
    with pytest.raises(ValueError, match="state_indices: expected another slot for each state"):
        pool.update()
    assert torch.equal(pool.memory.view(torch.int32), pool.before.view(torch.int32))
