"""What calls of every op have around the kernels of their algorithm: sums of gradients, copies of states, flags of
segments, kernels that compile behind a call, and captures of both directions.
"""

import threading

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels import compiler

relative, run, FIXED = comparing.relative, comparing.run, comparing.FIXED
OPS = tuple(comparing.NAMES)
# How calls are made, so that each algorithm takes them.
WAYS = {
    "recurrent": ({"tokens": 70}, {"backend": "recurrent"}),
    "chunked": ({"tokens": 130}, {"backend": "chunked"}),
    "segments": ({"tokens": 2048}, {"backend": "split"}),
    "large": ({"tokens": 130, "head_size": 200, "value_size": 136}, {"backend": "split", "chunk_len": 32}),
    "groups": ({"tokens": 130, "head_size": 200, "value_size": 136}, {"backend": "split", "chunk_len": 64}),
}
GATE = 8e-3
BOUNDS = [0, 0, 1, 33, 97, 97, 100, 130, 180, 181, 250]  # of more sequences than a block has threads for a column
CASES = [(op, decay) for op in OPS for decay in ("sigmoid", "raw") if (op, decay) != ("linear_attention", "raw")]


def make(op, way, decay="sigmoid", **more):
    """The inputs of a call, and its options; raw decays leave the range in head 1 of row 0."""
    sizes, options = WAYS[way]
    given = comparing.make_inputs(op, torch.bfloat16, decay=decay, **{**sizes, **more})
    if op != "linear_attention":
        options = {**options, "decay": decay}
        if decay == "raw":
            w = given["w"].detach().clone()
            w[(1, slice(3)) if w.dim() == 2 else (0, 20, 1)] = 5.0
            given["w"] = w.requires_grad_()
    return given, options


def exact_options(options):
    return {name: x for name, x in options.items() if name in ("decay", "state_layout", "cu_seqlens")}


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decay", ["sigmoid", "raw"])
@pytest.mark.parametrize(
    ("way", "bounds"), [*((way, None) for way in WAYS), *((way, BOUNDS) for way in WAYS if way != "segments")]
)
@pytest.mark.parametrize("op", FIXED)
def test_sums_of_gradients_that_have_no_tokens(op, way, decay, bounds):
    """Of u, and of wkv5's w: over chunks or segments, and over more sequences than a block has threads for a column."""
    more = {"batch": 1, "tokens": bounds[-1]} if bounds else {"batch": 10}
    given, options = make(op, way, decay, heads=4, **more)
    if bounds:
        options = {**options, "cu_seqlens": torch.tensor(bounds, device="cuda")}
    exact = exact_options(options)
    _, _, grads, weights = run(op, given, **options)
    wanted = comparing.reference(op, given, None, weights, **exact)[2]
    for name, grad, want in zip(given, grads, wanted, strict=True):
        if name in FIXED[op] and name == "w":
            assert comparing.error_of_constant_decay(grad, given, None, weights, **exact) < GATE
        elif name in FIXED[op]:
            assert relative(grad, want) < GATE
    again = run(op, given, None, weights, **options)[2]
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("op", "decay"), CASES)
def test_states_of_16_bits_are_those_of_float32_rounded(op, way, decay, dtype, layout):
    """The results are the same bit for bit, and the states and their gradients but for one rounding."""
    given, options = make(op, way, decay)
    state = comparing.make_state(given, 2, dtype, layout)
    wide = state.detach().float().requires_grad_()
    y, final, grads, weights = run(op, given, state, state_layout=layout, **options)
    assert (final.dtype, grads[-1].dtype) == (dtype, dtype)
    want_y, want_final, wanted, _ = run(op, given, wide, weights, state_layout=layout, **options)
    assert torch.equal(y, want_y)
    assert torch.equal(final, want_final.to(dtype))
    assert all(torch.equal(one, other) for one, other in zip(grads[:-1], wanted, strict=False))
    assert torch.equal(grads[-1], wanted[-1].to(dtype))
    exact = {"state_layout": layout, **exact_options(options)}
    assert relative(wanted[-1], comparing.reference(op, given, wide, weights, **exact)[2][-1]) < GATE


@pytest.mark.usefixtures("fresh_service", "nothing_known")
@pytest.mark.parametrize("op", OPS)
def test_first_call_does_not_wait_for_the_kernels_of_its_backward(op, monkeypatch):
    """And the backward finds them: it waits for what still compiles."""
    compile, may_go, waited = compiler.compile, threading.Event(), []

    def patient(rendered, *more):
        if rendered.name.endswith("backward"):
            waited.append(may_go.wait(60))
        return compile(rendered, *more)

    monkeypatch.setattr(compiler, "compile", patient)
    given, options = make(op, "chunked")
    y, _ = getattr(rwkv_jit, op)(*given.values(), **options)
    torch.cuda.synchronize()
    assert waited == []
    threading.Timer(0.5, may_go.set).start()
    grads = torch.autograd.grad(y, [*given.values()], torch.ones_like(y))
    assert waited == [True]
    for name, grad, want in zip(given, grads, gradients_again(op, given, options), strict=True):
        assert torch.equal(grad, want), name


def gradients_again(op, given, options):
    y, _ = getattr(rwkv_jit, op)(*given.values(), **options)
    return torch.autograd.grad(y, [*given.values()], torch.ones_like(y))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("op", "decay"), CASES)
def test_both_directions_in_a_capture(op, way, decay, state_dtype):
    """Replayed with other inputs too: all that is between the two directions lies in the graph."""
    given, options = make(op, way, decay)
    state = comparing.make_state(given, 2, state_dtype)
    if not op.startswith("wkv"):
        options = {**options, "state_layout": "vk"}
    weights = run(op, given, state, **options)[3]

    def both():
        y, final, grads, _ = run(op, given, state, weights, **options)
        return [y, final, *grads]

    torch.cuda.synchronize()  # the inputs are there
    with torch.cuda.stream(torch.cuda.Stream()):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    for factor in (1.0, 0.5):
        with torch.no_grad():
            given["v"].mul_(factor)
        wants = both()
        for x in results:
            x.detach().fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(x, want) for x, want in zip(results, wants, strict=True))
