"""Gradients of some inputs are those of a call that makes all of them, bit for bit."""

import comparing
import pytest
import torch

import rwkv_jit

OPS = tuple(comparing.NAMES)
STATE, SPLIT = "initial_state", {"backend": "split"}
# How calls are made, so that each algorithm takes them: the type of the rows, sizes, options, the backend that runs.
WAYS = {
    "recurrent": (torch.bfloat16, {"tokens": 70}, {"backend": "recurrent"}, "recurrent"),
    "recurrent, float32": (torch.float32, {"tokens": 70, "head_size": 40, "value_size": 72}, {}, "recurrent"),
    "chunked": (torch.bfloat16, {"tokens": 130}, {"backend": "chunked"}, "chunked"),
    "chunked, 128": (torch.float16, {"tokens": 130, "head_size": 128}, {"backend": "chunked"}, "chunked"),
    "segments": (torch.bfloat16, {"tokens": 2048}, SPLIT, "segments"),
    "segments, ragged": (torch.bfloat16, {"tokens": 2500}, SPLIT, "segments"),
    "large": (torch.bfloat16, {"tokens": 130, "head_size": 200, "value_size": 136}, SPLIT | {"chunk_len": 32}, "large"),
    "large, 256": (torch.bfloat16, {"tokens": 200, "head_size": 256}, SPLIT | {"chunk_len": 64}, "large"),
    "large, float16": (torch.float16, {"tokens": 130, "head_size": 256, "value_size": 320}, SPLIT, "large"),
    "narrow": (torch.float32, {"tokens": 130}, {}, "chunked"),
    "narrow, large": (torch.float32, {"tokens": 130, "head_size": 256}, {}, "large"),
}
BOUNDS = [0, 0, 1, 33, 97, 130]
DECAYS = {"mild": "usual", "strong": "mixed"}
CASES = [(op, how) for op in OPS for how in DECAYS if (op, how) != ("linear_attention", "strong")]


@pytest.fixture
def is_fast():
    """float32 rows take the tensor cores."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def make(op, way, how="mild", state_dtype=torch.float32, layout="vk", **more):
    """The inputs of a call with an initial state, and its options."""
    dtype, sizes, options, _ = WAYS[way]
    given = comparing.make_inputs(op, dtype, heads=2, decay="raw", decays=DECAYS[how], **{**sizes, **more})
    sequences = len(BOUNDS) - 1 if "batch" in more else 2
    given[STATE] = comparing.make_state(given, sequences, state_dtype, layout)
    decay = {} if op == "linear_attention" else {"decay": "raw"}
    return given, {**options, **decay, "state_layout": layout}


def algorithm_of(way):
    return "narrow" if way.startswith("narrow") else WAYS[way][3]


def subsets(op):
    """What may be wanted: each alone, all but each, values beside the state, and the keys' side."""
    names = (*comparing.NAMES[op], STATE)
    return [*({name} for name in names), *(set(names) - {name} for name in names), {"v", STATE}, set("rk")]


def differentiate(op, given, wanted, weights, function=None, **options):
    """y, and the gradients that are wanted, by name."""
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given.items()}
    *inputs, state = leaves.values()
    y, final = (function or getattr(rwkv_jit, op))(*inputs, state, True, **options)
    weights.extend([] if weights else map(torch.randn_like, (y, final)))
    asked = {name: x for name, x in leaves.items() if name in wanted}
    grads = torch.autograd.grad([y, final], [*asked.values()], weights)
    return y.detach(), dict(zip(asked, grads, strict=True))


def check(op, given, algorithm, several=None, function=None, **options):
    """Compare the gradients of each of `several` subsets with those of a call that makes all, which runs so."""
    weights = []
    want_y, every = differentiate(op, given, set(given), weights, **options)
    for wanted in several or subsets(op):
        y, some = differentiate(op, given, wanted, weights, function, **options)
        if wanted == {STATE} and algorithm in ("chunked", "segments"):  # which has kernels of its own
            assert comparing.relative(some[STATE], every[STATE]) < 2e-2
            continue
        assert torch.equal(y, want_y)
        for name in wanted:
            assert torch.equal(some[name], every[name]), (name, sorted(wanted))


@pytest.mark.usefixtures("guarded_memory", "is_fast")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("op", "how"), CASES)
def test_gradients_of_some_inputs_are_those_of_all(op, how, way, problems):
    if way == "recurrent, float32":
        torch.set_float32_matmul_precision("highest")
    given, options = make(op, way, how)
    check(op, given, algorithm_of(way), **options)
    assert {made.backend for made in problems()} == {WAYS[way][3]}


@pytest.mark.usefixtures("guarded_memory", "is_fast")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("way", ["recurrent", "chunked", "segments", "segments, ragged", "large", "large, 256"])
@pytest.mark.parametrize("op", OPS)
def test_states_of_16_bits(op, way, layout):
    given, options = make(op, way, "mild", torch.bfloat16, layout)
    names = set(given)
    several = [{"v"}, {STATE}, names - {STATE}, names - {"v"}, {"v", STATE}]
    check(op, given, algorithm_of(way), several, **options)


@pytest.mark.usefixtures("guarded_memory", "is_fast")
@pytest.mark.parametrize("way", ["recurrent", "chunked", "large", "large, 256", "narrow, large"])
@pytest.mark.parametrize(("op", "how"), CASES)
def test_packed_sequences(op, how, way):
    given, options = make(op, way, how, batch=1, tokens=BOUNDS[-1])
    bounds = torch.tensor(BOUNDS, device="cuda")
    check(op, given, algorithm_of(way), cu_seqlens=bounds, **options)


@pytest.mark.usefixtures("guarded_memory", "short_segments")
@pytest.mark.parametrize("op", ["wkv7"])
def test_segments_of_large_heads(op, problems):
    given = comparing.make_inputs(op, torch.bfloat16, batch=1, tokens=3300, heads=1, head_size=256, decay="sigmoid")
    given[STATE] = comparing.make_state(given, 1)
    check(op, given, "large_segments", decay="sigmoid")
    assert {made.backend for made in problems()} == {"large_segments"}


@pytest.mark.parametrize("op", ["wkv7"])
def test_a_walk_in_parts_beside_which_nothing_runs(op):
    """Its launches are on the other stream; what comes behind them waits."""
    given = comparing.make_inputs(
        op, torch.bfloat16, batch=1, tokens=64 * 130, heads=2, head_size=256, decay="sigmoid", decays="usual"
    )
    for dtype in (torch.float32, torch.bfloat16):
        given[STATE] = comparing.make_state(given, 1, dtype)
        options = {"decay": "sigmoid", "backend": "split", "chunk_len": 64}
        check(op, given, "large", [{"v"}, {STATE}, {"v", STATE}, {"r"}], **options)


@pytest.mark.usefixtures("is_fast")
@pytest.mark.parametrize("way", ["chunked", "segments", "large, 256", "narrow"])
@pytest.mark.parametrize("op", OPS)
def test_in_a_compiled_graph(op, way):
    given, options = make(op, way)
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True)
    check(op, given, algorithm_of(way), [{"v"}, {STATE}, {"r", STATE}, set(given) - {STATE}], compiled, **options)


@pytest.mark.parametrize("way", ["chunked", "large, 256"])
@pytest.mark.parametrize("op", OPS)
def test_in_a_capture(op, way):
    given, options = make(op, way)
    weights = []
    for wanted in ({"v"}, {STATE}, {"k"}):
        want = differentiate(op, given, wanted, weights, **options)[1]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            differentiate(op, given, wanted, weights, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            some = differentiate(op, given, wanted, weights, **options)[1]
        for name in wanted:
            some[name].fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(some[name], want[name]) for name in wanted)


@pytest.mark.parametrize("op", OPS)
def test_values_alone_of_large_heads_take_less_memory(op):
    """Nothing is left behind for gradients of the keys' side."""
    given, options = make(op, "large, 256", tokens=4096)

    def peak(wanted):
        leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given.items()}
        y, _ = getattr(rwkv_jit, op)(*leaves.values(), **options)
        dy = torch.ones_like(y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    wanted = {name: peak({name}) for name in "vk"}
    state_bytes = 2 * 2 * (4096 // 64) * 2 * 256**2  # of all chunks
    assert wanted["v"] + state_bytes <= wanted["k"]


@pytest.mark.parametrize("op", ["wkv4"])
def test_wkv4(op):
    shapes = {"w": (40,), "u": (40,), "k": (2, 300, 40), "v": (2, 300, 40), STATE: (2, 3, 40)}
    given = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    dy, every = torch.randn(2, 300, 40, device="cuda"), {}
    for wanted in (set(given), {"w"}, {"u"}, {"k"}, {STATE}, {"k", "v"}, set(given) - {STATE}):
        leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given.items()}
        rwkv_jit.wkv4(*leaves.values())[0].backward(dy)
        every = every or {name: x.grad for name, x in leaves.items()}
        for name, x in leaves.items():
            assert (x.grad is not None) == (name in wanted)
            assert x.grad is None or torch.equal(x.grad, every[name]), (op, name)
