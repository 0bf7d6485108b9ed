"""Rows that the tensor cores take as float16: float32 by torch's switch, bfloat16 by ours."""

import comparing
import pytest
import torch

import rwkv_jit

OPS = tuple(comparing.NAMES)
GATE, GATES = 1e-3, {"da": 2e-3, "db": 2e-3, "dw": 2e-3}
PARTS_GATE = 1e-3  # of wkv5's dw, beside the size of its parts
ROUNDING = 1.5e-3  # of results in bfloat16, beside the gates above
FAST, EXACT = "high", "highest"


@pytest.fixture(autouse=True)
def precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(FAST)
    rwkv_jit.set_bfloat16_precision(FAST)
    yield
    rwkv_jit.set_bfloat16_precision("medium")
    torch.set_float32_matmul_precision(before)


def check(op, given, state=None, weights=None, rounding=0.0, **options):
    decays = {} if op == "linear_attention" else {"decay": options.pop("decay", "log")}
    exact = {n: x for n, x in options.items() if n in ("scale", "state_layout", "cu_seqlens")} | decays
    if weights is None:
        weights = comparing.run(op, given, state, **options, **decays)[3]
    errors, _, named = comparing.compare(op, given, state, {**options, **decays}, exact, weights)
    limits = {name: GATES.get(name, GATE) + rounding for name in errors}
    if op == "wkv5":
        errors["dw"] = comparing.error_of_constant_decay(named["dw"], given, state, weights, **exact)
        limits["dw"] = PARTS_GATE + rounding
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, (wrong, limits)


def inputs(op, **more):
    return comparing.make_inputs(op, torch.float32, decay="log", **more)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [7, 40, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("op", OPS)
def test_every_head_size(op, head_size, problems):
    given = inputs(op, tokens=130, heads=comparing.enough_heads(head_size), head_size=head_size)
    check(op, given, comparing.make_state(given, 2, layout="vk"), state_layout="vk")
    assert {made.backend for made in problems()} <= {"chunked", "large"}


@pytest.mark.parametrize("tokens", [4, 16, 33, 300])
@pytest.mark.parametrize("op", OPS)
def test_every_length_alone_and_packed(op, tokens):
    given = inputs(op, tokens=tokens)
    few = 2e-4 if op == "linear_attention" and tokens < 16 else 0.0  # as docs/guides/precision.md says
    check(op, given, comparing.make_state(given, 2, layout="vk"), rounding=few, state_layout="vk")
    given = inputs(op, tokens=tokens, batch=1)
    bounds = torch.tensor([0, tokens // 3, tokens // 3, tokens], device="cuda")
    state = comparing.make_state(given, 3, layout="vk")
    check(op, given, state, rounding=few, state_layout="vk", cu_seqlens=bounds)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [7, 64, 100, 128, 256])
@pytest.mark.parametrize("op", OPS)
def test_bfloat16_is_as_exact_as_its_results(op, head_size, state_dtype):
    heads = comparing.enough_heads(head_size)
    given = comparing.make_inputs(op, torch.bfloat16, decay="log", tokens=130, heads=heads, head_size=head_size)
    state = comparing.make_state(given, 2, state_dtype, layout="kv")
    check(op, given, state, rounding=ROUNDING, state_layout="kv")


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_states_of_16_bits_beside_float32(op, state_dtype, layout):
    """Their gradients are rounded to 16 bits, as the last states are."""
    given = inputs(op, tokens=70)
    state = comparing.make_state(given, 2, state_dtype, layout=layout)
    check(op, given, state, rounding=ROUNDING, state_layout=layout)


@pytest.mark.parametrize("op", OPS)
def test_keys_and_values_of_other_sizes(op):
    for head_size, value_size in ((40, 64), (64, 40), (96, 200), (200, 96)):
        given = inputs(op, tokens=70, heads=7, head_size=head_size, value_size=value_size)
        check(op, given, comparing.make_state(given, 2, layout="vk"), state_layout="vk")


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["r", "k", "v", "dy"])
@pytest.mark.parametrize("op", OPS)
def test_a_number_that_is_not_finite_spoils_its_sequence_alone(op, name, number):
    """Though the others are too large for float16 as they are; gradients of what all share are spoilt too."""
    given = inputs(op, tokens=70)
    given |= {n: (1e5 * given[n].detach()).requires_grad_() for n in ("r", "k", "v")}
    dy = 1e5 * torch.randn_like(given["v"])
    results = []
    for is_spoilt in (False, True):
        mine, weights = {n: x.detach().clone() for n, x in given.items()}, dy.clone()
        if is_spoilt:
            (weights if name == "dy" else mine[name])[0, 5, 1, 3] = number
        leaves = {n: x.requires_grad_() for n, x in mine.items()}
        y = getattr(rwkv_jit, op)(*leaves.values(), **decay_of(op))[0]
        grads = torch.autograd.grad(y, tuple(leaves.values()), weights)
        fixed = comparing.FIXED.get(op, "")
        results.append([x[1] for x in (y, *[x for n, x in zip(leaves, grads, strict=True) if n not in fixed])])
    for x, want in zip(*results, strict=True):
        assert want.isfinite().all()
        assert comparing.relative(x, want) <= 1e-3


@pytest.mark.parametrize("name", ["r", "k", "v", "dy"])
@pytest.mark.parametrize("op", OPS)
def test_zeros(op, name):
    given = inputs(op, tokens=70)
    y = getattr(rwkv_jit, op)(*given.values(), **decay_of(op))[0]
    dy = torch.randn_like(y)
    (dy if name == "dy" else given[name].data).zero_()
    y = getattr(rwkv_jit, op)(*given.values(), **decay_of(op))[0]
    grads = torch.autograd.grad(y, tuple(given.values()), dy)
    assert all(x.isfinite().all() for x in (y, *grads))
    assert name == "dy" or not y.any()


@pytest.mark.parametrize("op", OPS)
def test_call_in_a_cuda_graph_scales_by_what_comes(op):
    given = {n: x.detach() for n, x in inputs(op, tokens=70).items()}

    def call():
        return getattr(rwkv_jit, op)(*given.values(), **decay_of(op))[0]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for size in (1.0, 1e9, 1e-9):
        given["v"].copy_(size * torch.randn_like(given["v"]))
        graph.replay()
        assert torch.equal(y, call())
        assert y.isfinite().all()
        assert y.any()


@pytest.mark.parametrize("op", OPS)
def test_segments(op):
    given = inputs(op, batch=1, heads=1, tokens=4096)
    check(op, given, comparing.make_state(given, 1, layout="vk"), state_layout="vk")
    bounds = torch.tensor([0, 3500, 3600, 3600, 4096], device="cuda")  # which are ragged
    check(op, given, comparing.make_state(given, 4, layout="vk"), state_layout="vk", cu_seqlens=bounds)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("op", ["wkv7"])
def test_segments_of_large_heads(op):
    given = inputs(op, batch=1, heads=1, tokens=3072, head_size=160, value_size=160)
    check(op, given, comparing.make_state(given, 1, layout="vk"), state_layout="vk")


@pytest.mark.parametrize("size", [1e-9, 1e9])
@pytest.mark.parametrize("scaled", ["r", "k", "v"])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients_of_any_size(op, scaled, size):
    """Beyond the range of float16 on both sides; states and gradients have the sizes that go with it."""
    given = inputs(op, tokens=70)
    given[scaled] = (given[scaled].detach() * size).requires_grad_()
    state = comparing.make_state(given, 2, layout="vk").detach() * (1 if scaled == "r" else size)
    y, final, _, _ = comparing.run(op, given, state.requires_grad_(), state_layout="vk", **decay_of(op))
    weights = size * torch.randn_like(y), size * (size if scaled == "r" else 1) * torch.randn_like(final)
    check(op, given, state, weights, state_layout="vk")


@pytest.mark.parametrize("op", OPS)
def test_sums_that_grow_over_many_tokens(op):
    """All numbers of one sign, almost no decay, and y.sum() as the loss: no state or gradient leaves the range."""
    tokens, results = 20_000, []
    given = inputs(op, batch=1, tokens=tokens, decays=(-2e-4, -1e-4))
    given |= {n: torch.nn.functional.softplus(given[n].detach()).requires_grad_() for n in ("r", "k", "v")}
    for precision in (FAST, EXACT):
        torch.set_float32_matmul_precision(precision)
        y = getattr(rwkv_jit, op)(*given.values(), **decay_of(op))[0]
        results.append((y, *torch.autograd.grad(y.sum(), tuple(given.values()))))
    for fast, exact in zip(*results, strict=True):
        assert comparing.relative(fast, exact) <= 2e-3


def decay_of(op):
    return {} if op == "linear_attention" else {"decay": "log"}


@pytest.mark.parametrize("how", comparing.STRIDES)
@pytest.mark.parametrize("op", OPS)
def test_inputs_of_any_stride(op, how):
    given = inputs(op, tokens=70)
    check(op, {n: comparing.strided(x, how).requires_grad_() if x.dim() == 4 else x for n, x in given.items()})


@pytest.mark.parametrize("op", OPS)
def test_strong_decays(op):
    check(op, inputs(op, tokens=130, decays=(-40.0, -5.0)))


@pytest.mark.parametrize("op", OPS)
def test_switch_is_looked_at_in_every_call(op, problems):
    given = inputs(op, tokens=40)
    for precision in (FAST, EXACT, FAST, "medium"):
        torch.set_float32_matmul_precision(precision)
        getattr(rwkv_jit, op)(*given.values(), **decay_of(op))
    assert [made.backend for made in problems()] == ["chunked", "recurrent"]  # the others are known


@pytest.mark.parametrize("op", OPS)
def test_results_are_the_same_from_run_to_run_and_compiled(op):
    given = inputs(op, tokens=70)
    y, final, grads, weights = comparing.run(op, given, **decay_of(op))
    for function in (None, torch.compile(getattr(rwkv_jit, op), fullgraph=True)):
        again = comparing.run(op, given, None, weights, function, **decay_of(op))
        assert torch.equal(again[0], y)
        assert torch.equal(again[1], final)
        assert all(torch.equal(one, other) for one, other in zip(grads, again[2], strict=True))
