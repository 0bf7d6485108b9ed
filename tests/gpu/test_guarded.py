"""Any decay on the tensor cores: values and gradients against the float64 recurrence, whatever the decays are."""

import comparing
import pytest
import torch
from comparing import relative, run

import rwkv_jit
from rwkv_jit.schedules import table
from rwkv_jit.schedules.problem import LARGEST_DECAY

DECAYS = {"wkv5": "raw", "wkv6": "raw", "wkv7": "raw", "gla": "log"}  # the ops' own maps
OPS = [*DECAYS]
BY_TOKEN = [op for op in OPS if "w" not in comparing.FIXED.get(op, "")]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_SIZES = [40, 64, 128, 192, 256]
LIMIT, LIMITS = 8e-3, {"da": 1.2e-2, "db": 1.2e-2}
NOTHING = 1e-12  # of dy: a gradient that is smaller may be lost, as it is with float32 states
BROKEN_BOUND = -0.1  # by almost every decay here; chunks are as long as without one

MAPS = {"raw": lambda g: (-g).log(), "log": lambda g: g, "direct": torch.exp}  # from log-decays to w


# ---- log-decays, of tokens or of channels alone --------------------------------------------------------------------


def mild(g):
    """Leave them as they are."""


def lognormal(scale):
    """Many of them slow and some so fast that a chunk of them is out of range; all mixed."""
    return lambda g: g.copy_(-torch.exp(scale * torch.randn_like(g)))


def filled(value, *index):
    """One value in some places, by their index from the first or the last dimension."""

    def change(g):
        g[index] = value

    return change


def fast(*index):
    """Some places fast, each to a different degree."""

    def change(g):
        g[index] = -5 - 15 * torch.rand_like(g[index])

    return change


OF_CHANNELS = {
    "mild": mild, "lognormal of scale 1": lognormal(1.0), "lognormal of scale 2": lognormal(2.0),
    "lognormal of scale 5": lognormal(5.0), "a channel forgets at once": filled(-100.0, ..., 5),
    "all forget": filled(-40.0, ...), "a head is fast": fast(..., 1, slice(None)),
}  # fmt: skip
# Of the rest [batch, tokens, heads, channels]. A token is the first, within a chunk, at the end of one, and the last.
TOKENS = [0, 45, 63, -1]
OF_TOKENS = {
    "tokens forget": filled(-80.0, slice(None), TOKENS), "tokens forget all": filled(-float("inf"), 1, TOKENS),
    "the first chunk is fast": fast(slice(None), slice(0, 32)), "the second chunk is fast": fast(0, slice(64, 128)),
    "the second short chunk is fast": fast(1, slice(32, 64)),
}  # fmt: skip
KINDS = OF_CHANNELS | OF_TOKENS
CASES = [
    *[(op, kind, DECAYS[op]) for op in OPS for kind in (KINDS if op in BY_TOKEN else OF_CHANNELS)],
    *[(op, kind, "direct") for op in BY_TOKEN for kind in ("tokens forget", "tokens forget all")],
    *[(op, kind, "log") for op in ("wkv6", "wkv7") for kind in ("tokens forget", "tokens forget all")],
]


def make(op, kind, decay=None, dtype="bf16", head_size=64, batch=2, tokens=130, w_dtype=None, heads=None):
    """The inputs of a call: as a model's but for the decays."""
    heads = heads or max(3, comparing.enough_heads(head_size))
    given = comparing.make_inputs(op, DTYPES[dtype], batch, tokens, heads, head_size)
    g = -0.01 - 0.6 * torch.rand(given["w"].shape, device="cuda", dtype=torch.float64)
    KINDS.get(kind, kind)(g)
    given["w"] = MAPS[decay or DECAYS[op]](g).to(w_dtype or DTYPES[dtype]).requires_grad_()
    return given


def check(op, given, state=None, weights=None, **options):
    """Compare a call with the recurrence, and return what it returned."""
    options = {"decay": DECAYS[op], **options}
    exact = {n: x for n, x in options.items() if n in ("decay", "scale", "state_layout", "cu_seqlens")}
    y, final, grads, weights = run(op, given, state, weights, **options)
    want_y, want_final, wanted, _ = comparing.reference(op, given, state, weights, **exact)
    found = {"y": (y, want_y), "state": (final, want_final)}
    names = [f"d{name}" for name in (*given, "initial_state")]
    found |= {name: pair for name, *pair in zip(names, grads, wanted, strict=False)}
    least, wrong = NOTHING * float(weights[0].double().norm()), {}
    for name, (x, want) in found.items():
        assert torch.isfinite(x).all(), name
        limit = LIMITS.get(name, LIMIT) / comparing.digits(y.dtype, x.dtype)
        if name[0] == "d" and want.norm() < least:
            error, limit = float((x.double() - want).norm()), least
        elif (op, name) == ("wkv5", "dw"):
            error = comparing.error_of_constant_decay(x, given, state, weights, **exact)
        else:
            error = relative(x, want)
        if not error <= limit:
            wrong[name] = error, limit
    assert not wrong
    return y, final, grads, weights


def check_same(op, given, state, done, **options):
    """A call again, with these options: bit for bit the same."""
    y, final, grads, weights = done
    again = run(op, given, state, weights, **{"decay": DECAYS[op], **options})
    for one, other in zip((y, final, *grads), (*again[:2], *again[2]), strict=True):
        assert torch.equal(one, other)


# ---- values and gradients ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "kind", "decay"), CASES)
def test_every_decay(op, kind, decay, dtype, head_size):
    given = make(op, kind, decay, dtype, head_size)
    check(op, given, comparing.make_state(given, 2, layout="kv"), decay=decay, state_layout="kv", scale=0.7)


@pytest.mark.parametrize("decay", ["log", "direct"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("op", ["gla"])
def test_every_decay_of_another_type(op, head_size, decay):
    """A w of float32 has log-decays that the ones of 16 bits are rounded to."""
    for kind in ("lognormal of scale 2", "tokens forget all"):
        check(op, make(op, kind, decay, head_size=head_size, w_dtype=torch.float32), decay=decay)


CHUNKS = {  # of the families: head sizes and lengths
    "delta": [(64, 16), (64, 32), (160, 32), (160, 64)],
    "diagonal": [(size, length) for size in (64, 160) for length in (16, 32, 64)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "head_size", "chunk_len"), [(op, *chunk) for op in BY_TOKEN for chunk in CHUNKS[table.OPS[op].family]]
)
def test_limit_is_that_of_half_a_chunk(op, head_size, chunk_len, dtype):
    """Both ways through a chunk are right on both sides of it."""
    half = chunk_len // 2
    for total in (LARGEST_DECAY[dtype] - 1.0, LARGEST_DECAY[dtype] + 1.0):
        kind = filled(-total / half, 0, slice(2 * half, 3 * half), 1)
        given = make(op, kind, "log", dtype, head_size, w_dtype=torch.float32)
        backend = "chunked" if head_size == 64 else "split"
        check(op, given, decay="log", backend=backend, chunk_len=chunk_len)


@pytest.mark.parametrize("head_size", [33, 64, 70, 160])
@pytest.mark.parametrize("op", BY_TOKEN)
def test_one_channel_of_one_token_is_enough(op, head_size):
    """Whichever it is: an output that went on from a wrong factor would be far off."""
    for channel in (0, 1, head_size - 2, head_size - 1):
        check(op, make(op, filled(-8000.0, 1, 100, 2, channel), head_size=head_size))


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", ["wkv6", "gla"])
def test_growth_does_not_hide_decay(op, head_size):
    """Between the two nothing is looked at, as the sums over both are small; what comes behind them must be right."""

    def grow(g):
        g[:, 4:8] = torch.tensor([50.0, -60.0, 50.0, -60.0], device="cuda", dtype=g.dtype)[:, None, None]

    given = make(op, grow, "log", head_size=head_size, w_dtype=torch.float32)
    exact = [x.detach().double() for x in given.values()]
    with torch.no_grad():
        y, final = getattr(rwkv_jit, op)(*given.values(), decay="log", output_final_state=True)
        want, want_final = getattr(rwkv_jit, f"{op}_ref")(*exact, decay="log", output_final_state=True)
    assert relative(y[:, 8:], want[:, 8:]) < LIMIT
    assert relative(final, want_final) < LIMIT


# ---- how it is called ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lognormal of scale 2", "all forget"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("op", OPS)
def test_bound_that_is_broken_changes_nothing(op, head_size, kind):
    """But the chunk, where the bound asks for shorter ones."""
    given = make(op, kind, head_size=head_size)
    state = comparing.make_state(given, 2)
    done = check(op, given, state)
    check_same(op, given, state, done, decay_bound=BROKEN_BOUND)
    check(op, given, state, done[3], decay_bound=-4.0)
    check(op, given, state, done[3], decay_bound=-8.0)


@pytest.mark.parametrize("kind", ["lognormal of scale 2", "all forget"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("op", OPS)
def test_results_repeat_bit_for_bit(op, head_size, kind):
    given = make(op, kind, batch=4, tokens=300, head_size=head_size)
    state = comparing.make_state(given, 4)
    done = run(op, given, state, decay=DECAYS[op])
    for _ in range(3):
        check_same(op, given, state, done)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences(op, head_size, index_dtype):
    """Decays that reset a state are at the end of a sequence, at the begin of the next, and in one of a token."""
    bounds = torch.tensor([0, 0, 70, 134, 135, 135, 300, 300], device="cuda", dtype=index_dtype)
    kind = filled(-80.0, 0, [69, 70, 134, 200]) if op in BY_TOKEN else fast(1)
    for each in (kind, "lognormal of scale 2"):
        given = make(op, each, batch=1, tokens=300, head_size=head_size)
        check(op, given, comparing.make_state(given, len(bounds) - 1), cu_seqlens=bounds)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("head_size", [40, 64, 128])
@pytest.mark.parametrize("op", OPS)
def test_segments(op, head_size, layout, problems):
    """Strong at the end of a segment, at the begin of one, and over more than one."""

    def change(g):
        g[0, [511, 1024], 1] = -80.0
        g[0, 200:1400, 2] = -40.0

    for kind in (change if op in BY_TOKEN else fast(1), "lognormal of scale 2"):
        given = make(op, kind, batch=1, tokens=2048, head_size=head_size)
        state = comparing.make_state(given, 1, layout=layout)
        check(op, given, state, state_layout=layout, backend="split")
    assert {made.backend for made in problems()} == {"segments"}


@pytest.mark.parametrize("how", comparing.STRIDES)
@pytest.mark.parametrize("head_size", [35, 36, 64, 192])
@pytest.mark.parametrize("op", BY_TOKEN)
def test_decays_of_any_stride(op, head_size, how):
    given = make(op, "lognormal of scale 2", head_size=head_size)
    odd = {n: x if n in comparing.FIXED.get(op, "") else comparing.strided(x, how) for n, x in given.items()}
    check(op, {n: x.detach().requires_grad_() for n, x in odd.items()})


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("op", OPS)
def test_without_gradients(op, head_size):
    """Nothing is left to a backward, and the results are the same bit for bit, where the chunks are."""
    given = make(op, "lognormal of scale 2", head_size=head_size)
    exact = [x.detach().double() for x in given.values()]
    with torch.no_grad():
        y, final = getattr(rwkv_jit, op)(*given.values(), decay=DECAYS[op], output_final_state=True)
        want, want_final = getattr(rwkv_jit, f"{op}_ref")(*exact, decay=DECAYS[op], output_final_state=True)
    assert relative(y, want) < LIMIT
    assert relative(final, want_final) < LIMIT


@pytest.mark.parametrize("head_size", [64, 192])
@pytest.mark.parametrize("op", OPS)
def test_a_cuda_graph_replays_with_other_decays(op, head_size):
    """Which chunks are out of range is found on the device."""
    given = {n: x.detach() for n, x in make(op, "mild", head_size=head_size).items()}
    several = [make(op, kind, head_size=head_size)["w"].detach() for kind in ("all forget", "lognormal of scale 2")]
    several.append(given["w"].clone())
    function = getattr(rwkv_jit, op)
    wants = [function(*(given | {"w": w}).values(), decay=DECAYS[op])[0] for w in several]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = function(*given.values(), decay=DECAYS[op])
    for w, want in zip(several, wants, strict=True):
        given["w"].copy_(w)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)


def strong(heads, begin=0, end=None):
    """Some of many heads out of range, from a token on."""

    def change(g):
        g[:, begin:end, heads] = -40.0

    return change


MANY = {
    "none": mild, "the first head": strong(0), "the last head": strong(-1), "a third": strong(slice(None, None, 3)),
    "two heads late": strong([3, 50], 500), "two heads early": strong([3, 50], 0, 500), "all": strong(slice(None)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("op", ["wkv7"])
def test_launches_side_by_side(op, head_size, kind):
    """Of more heads than the GPU has room for, each comes out as among few; in a graph and with other decays too."""
    given = make(op, MANY[kind], batch=256 // head_size, tokens=1040, head_size=head_size, heads=100)
    options = {"decay": "raw", "backend": "chunked"}
    y, final, grads, weights = run(op, given, **options)
    few = torch.tensor([0, 3, 4, 50, 51, 98, 99], device="cuda")
    part = {n: x.detach()[:, :, few].requires_grad_() for n, x in given.items()}
    alone = run(op, part, None, (weights[0][:, :, few], weights[1][:, few]), **options)
    for one, other in zip((y, *grads), (alone[0], *alone[2]), strict=True):
        assert relative(one[:, :, few], other) < LIMIT
    assert relative(final[:, few], alone[1]) < LIMIT
    decays, graph = given["w"].detach().clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}  # of the stream that is captured
        captured = run(op, leaves, None, weights, **options)
    for w in (torch.full_like(decays, -3.0), decays):
        with torch.no_grad():
            given["w"].copy_(w)
        for x in (*captured[:2], *captured[2]):
            x.detach().fill_(float("nan"))
        graph.replay()
    for one, other in zip((y, final, *grads), (*captured[:2], *captured[2]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("op", OPS)
def test_code_of_ampere(op, head_size, launched, monkeypatch):
    """The code that sm_80 gets, as PTX that the driver makes run here."""
    monkeypatch.setenv("RWKVJIT_ARCH", "compute_80")
    for kind in ("lognormal of scale 2", "all forget"):
        check(op, make(op, kind, tokens=70, head_size=head_size))
    assert {made.target for made in launched} == {"compute_80"}
