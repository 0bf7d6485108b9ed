"""Ragged segments on the tensor cores: of packed sequences, and of lengths that have no equal segments."""

import comparing
import pytest
import torch

import rwkv_jit

OPS = tuple(comparing.NAMES)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GATE, GATES = 6e-3, {"da": 8e-3, "db": 8e-3, "dw": 8e-3}
PARTS_GATE = 5e-3  # of wkv5's dw, beside the size of its parts
# Without tokens, shorter than a chunk, with a rest that is no chunk, of one segment exactly, and of less than one.
LENGTHS = [7, 0, 1300, 512, 281]
BOUNDS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]


def inputs(op, dtype=torch.bfloat16, **more):
    return comparing.make_inputs(op, dtype, **{"batch": 1, "tokens": BOUNDS[-1], "decay": "raw", **more})


def packed(bounds=BOUNDS):
    return torch.tensor(bounds, device="cuda")


def of(op, **options):
    """Those options that an op has."""
    return {n: x for n, x in options.items() if n != "decay" or op != "linear_attention"}


def check(op, given, state=None, **options):
    options = of(op, **{"decay": "raw", "backend": "split", "state_layout": "vk", **options})
    exact = {n: x for n, x in options.items() if n in ("decay", "scale", "state_layout", "cu_seqlens")}
    weights = comparing.run(op, given, state, **options)[3]
    errors, final, named = comparing.compare(op, given, state, options, exact, weights)
    gates = GATES
    if op == "wkv5":
        gates = {**GATES, "dw": PARTS_GATE}
        errors["dw"] = comparing.error_of_constant_decay(named["dw"], given, state, weights, **exact)
    limits = comparing.limits_of(errors, final, named, given, GATE, gates)
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, (wrong, limits)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 24), (37, 100)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences(op, dtype, sizes, layout, problems):
    heads = comparing.enough_heads(sizes[0])
    given = inputs(op, DTYPES[dtype], heads=heads, head_size=sizes[0], value_size=sizes[1])
    state = comparing.make_state(given, len(LENGTHS), layout=layout)
    check(op, given, state, cu_seqlens=packed(), state_layout=layout, scale=0.7)
    assert {made.backend for made in problems()} == {"segments"}


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decays", ["mixed", "-20 or 0", (-40.0, -5.0)])
@pytest.mark.parametrize("op", [op for op in OPS if op != "linear_attention"])
def test_strong_decays(op, decays):
    given = inputs(op, decays=decays)
    check(op, given, comparing.make_state(given, len(LENGTHS)), cu_seqlens=packed())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2049, 2500])
@pytest.mark.parametrize("op", OPS)
def test_lengths_without_equal_segments(op, tokens, state_dtype):
    given = inputs(op, batch=2, tokens=tokens, heads=2)
    check(op, given, comparing.make_state(given, 2, state_dtype))
    apart = {n: torch.cat([x.detach()] * 2, 1)[:, :tokens].requires_grad_() if x.dim() == 4 else x
             for n, x in given.items()}  # fmt: skip
    check(op, apart)


@pytest.mark.parametrize("op", OPS)
def test_auto_cuts_what_would_be_late_and_repeats_bit_for_bit(op, problems):
    bounds = [0, 50, 6000, 6100, 6144]
    given = inputs(op, tokens=bounds[-1], heads=2, decays=(-1e-2, -1e-4))
    options = of(op, decay="raw", cu_seqlens=packed(bounds))
    y, final, grads, weights = comparing.run(op, given, **options)
    again = comparing.run(op, given, None, weights, **options)
    whole = comparing.run(op, given, None, weights, backend="chunked", **options)
    assert [made.backend for made in problems()] == ["segments", "chunked"]
    for one, same, other in zip((y, final, *grads), (*again[:2], *again[2]), (*whole[:2], *whole[2]), strict=True):
        assert torch.equal(one, same)
        assert comparing.relative(one, other) < GATES["dw"]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("op", OPS)
def test_one_compiled_graph_cuts_what_eager_calls_cut(op, mode, problems):
    """In CUDA graphs what was captured stays, and results are right for any bounds."""
    torch._dynamo.reset()
    given = inputs(op, tokens=4096, heads=2, decays=(-1e-2, -1e-4))
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, mode=mode)
    for bounds in ([*range(0, 450, 50), 4096], [*range(0, 4096, 460), 4096]) * 3:
        options = of(op, decay="raw", cu_seqlens=packed(bounds))
        y, _, grads, weights = comparing.run(op, given, **options)
        again = comparing.run(op, given, None, weights, compiled, **options)
        for one, other in zip((again[0], *again[2]), (y, *grads), strict=True):
            assert comparing.relative(one, other) < GATES["dw"]
            assert mode is not None or torch.equal(one, other)
    assert {made.backend for made in problems()} == {"segments", "chunked"}


@pytest.mark.parametrize("op", OPS)
def test_graph_follows_the_bounds(op):
    """Those that were captured, and others that come into their place."""
    given = {n: x.detach() for n, x in inputs(op, heads=2).items()}
    bounds, others = packed(), packed([0, 1600, 1600, 1601, 1603, BOUNDS[-1]])
    options = of(op, decay="raw", backend="split", output_final_state=True)

    def call(cu_seqlens):
        return getattr(rwkv_jit, op)(*given.values(), cu_seqlens=cu_seqlens, **options)

    wanted = [call(each.clone()) for each in (bounds, others)]
    call(bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(bounds)
    for each, want in zip((bounds.clone(), others), wanted, strict=True):
        bounds.copy_(each)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(results, want, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tokens", [2048, 2500])
@pytest.mark.parametrize("op", OPS)
def test_compiled_graph_cuts_sequences_as_a_call_does(op, tokens, dynamic, problems):
    given, options = inputs(op, batch=2, tokens=tokens, heads=2), of(op, decay="raw")
    y, _, grads, weights = comparing.run(op, given, **options)
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, dynamic=dynamic)
    again = comparing.run(op, given, None, weights, compiled, **options)
    assert {made.backend for made in problems()} == {"segments"}
    for one, other in zip((y, *grads), (again[0], *again[2]), strict=True):
        assert torch.equal(one, other)


# ---- the gradient of the initial state alone ---------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("uses_final", [False, True])
@pytest.mark.parametrize("how", ["rows", "packed", "segments", "strong", "empty"])
@pytest.mark.parametrize("op", OPS)
def test_gradient_of_the_state_alone(op, how, uses_final):
    sizes = {"tokens": {"segments": 4096, "empty": 0}.get(how, 130), "heads": 2, "head_size": 40, "value_size": 24}
    decays = {"decays": (-40.0, -5.0)} if how == "strong" else {"decays": (-1e-2, -1e-3)}
    bounds = {"cu_seqlens": packed([0, 33, 33, 130])} if how == "packed" else {}
    batch = 1 if how == "packed" else 2
    given = {n: x.detach() for n, x in inputs(op, batch=batch, **sizes, **decays).items()}
    layout = "kv" if uses_final else "vk"
    options = of(op, decay="raw", state_layout=layout, **bounds)
    state = comparing.make_state(given, 3 if bounds else 2, layout=layout)
    backend = "split" if how == "segments" else "chunked"
    weights = []

    def gradient(function, given, state, **more):
        outputs = function(*given.values(), state, True, **options, **more)[: 1 + uses_final]
        weights.extend([] if weights else map(torch.randn_like, outputs))
        loss = 0 * state.sum()  # without tokens nothing else may depend on it
        for x, weight in zip(outputs, weights, strict=True):
            loss = loss + (x.double() * weight.double()).sum()
        return outputs[0], torch.autograd.grad(loss, state)[0]

    y, grad = gradient(getattr(rwkv_jit, op), given, state, backend=backend)
    exact = state.detach().double().requires_grad_()
    want_y, want = gradient(getattr(rwkv_jit, f"{op}_ref"), {n: x.double() for n, x in given.items()}, exact)
    assert comparing.relative(grad, want) < GATE
    assert comparing.relative(y, want_y) < GATE
