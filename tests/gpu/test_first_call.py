"""Calls of wkv7 while the kernels for strong decays still compile: they go on without them, where nothing is left."""

import threading
import time

import comparing
import pytest
import torch

from rwkv_jit.kernels import kernel, signatures

# A parameter, so that the record counts these tests.
pytestmark = pytest.mark.parametrize("op", ["wkv7"])

GATES = dict.fromkeys(("da", "db"), 8e-3)
SIZES = ({}, {"head_size": 40, "tokens": 96}, {"head_size": 128}, {"heads": 80, "tokens": 1056})


@pytest.fixture
def held_back(monkeypatch, tmp_path):
    """No kernel is there yet, nor compiles elsewhere, and those by halves compile when the event is set."""
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path))
    may_compile, really_compile = threading.Event(), kernel.compiler.compile

    def compile(rendered, arch, parameters):
        if parameters.get("BY_HALVES"):
            assert may_compile.wait(600)
        return really_compile(rendered, arch, parameters)

    monkeypatch.setattr(kernel.compiler, "compile", compile)
    kernel.forget()
    signatures.forget()
    yield may_compile
    may_compile.set()
    signatures.forget()


def kernels_by_halves():
    return [each for each in list(kernel._process.kernels.values()) if each.parameters.get("BY_HALVES")]


def check(given, state, weights=None):
    """Compare with float64; return the weights of the results."""
    results = comparing.run("wkv7", given, state, weights)
    y, final, grads, weights = results
    want_y, want_final, want_grads, _ = comparing.reference("wkv7", given, state, weights)
    assert comparing.relative(y, want_y) <= 6e-3
    assert comparing.relative(final, want_final) <= 6e-3
    for name, grad, want in zip([*given, "state"], grads, want_grads, strict=True):
        assert comparing.relative(grad, want) <= GATES.get(f"d{name}", 6e-3), name
    return weights


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_mild_decays_need_no_kernel_by_halves(op, sizes, held_back):
    """Now, and with another call's gradients, and with the kernel when it is there; bit for bit the same."""
    given = comparing.make_inputs("wkv7", torch.bfloat16, decays=(-0.6, -0.01), **sizes)
    state = comparing.make_state(given, 2)
    weights = check(given, state)
    assert not kernels_by_halves()
    without = comparing.run("wkv7", given, state, weights)
    held_back.set()
    while len(kernels_by_halves()) < 2:
        time.sleep(0.01)
    for _ in range(2):
        beside = comparing.run("wkv7", given, state, weights)
        pairs = zip((*without[:2], *without[2]), (*beside[:2], *beside[2]), strict=True)
        assert all(torch.equal(one, same) for one, same in pairs)


@pytest.mark.parametrize("decays", ["fast", "mixed", "-20 or 0"])
def test_strong_decays_wait_for_it(op, decays, held_back):
    given = comparing.make_inputs("wkv7", torch.bfloat16, decays=decays)
    timer = threading.Timer(0.3, held_back.set)
    timer.start()
    check(given, comparing.make_state(given, 2))
    timer.join()


def test_one_strong_head_waits_for_it(op, held_back):
    given = comparing.make_inputs("wkv7", torch.bfloat16, tokens=130)
    with torch.no_grad():
        given["w"][1, 129, 2, 3] = 4.0
    timer = threading.Timer(0.3, held_back.set)
    timer.start()
    check(given, comparing.make_state(given, 2))
    timer.join()


def test_a_graph_captured_meanwhile_has_it(op, held_back):
    """And its replays take it, where inputs come that need it."""
    given = comparing.make_inputs("wkv7", torch.bfloat16, tokens=96)
    strong = comparing.make_inputs("wkv7", torch.bfloat16, tokens=96, decays="mixed")
    state = comparing.make_state(given, 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        weights = comparing.run("wkv7", given, state)[3]
    torch.cuda.synchronize()
    timer = threading.Timer(0.3, held_back.set)
    graph = torch.cuda.CUDAGraph()
    timer.start()
    with torch.cuda.graph(graph):
        y, final, grads, _ = comparing.run("wkv7", given, state, weights)
    timer.join()
    results = [y, final, *grads]
    for other in (given, strong):
        with torch.no_grad():
            for name, x in given.items():
                x.copy_(other[name])
        for x in results:
            x.detach().fill_(float("nan"))
        graph.replay()
        again = comparing.run("wkv7", given, state, weights)
        pairs = zip(results, (*again[:2], *again[2]), strict=True)
        assert all(torch.equal(one, same) for one, same in pairs)
    check(given, state, weights)
