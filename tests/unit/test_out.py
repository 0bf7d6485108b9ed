"""Calls over a pool whose results go to memory of the caller, also where that is the memory of an input."""

import derived_cases
import pytest
import torch
from derived_cases import WAYS

import rwkv_jit
from rwkv_jit.schedules.table import OPS

BASE = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
CASES = [*((op, "") for op in BASE), *((op, how) for op, several in WAYS.items() for how in several)]
BOUNDS = torch.tensor([0, 2, 2, 5])


@pytest.fixture
def make(make_inputs):
    """Makes a function of a pool, inputs and `out`, and the inputs by their names."""

    def make(op, how, verb):
        tokens, batch = (5, 1) if verb == "varlen" else (2, 3)
        more = {"cu_seqlens": BOUNDS} if verb == "varlen" else {}
        function = getattr(rwkv_jit, f"{op}_{verb}")
        if op in BASE:
            given = make_inputs(op, batch, tokens, 2, 4, 4, requires_grad=False)
            return lambda pool, given, **out: function(pool, *given.values(), **more, **out), given
        case = derived_cases.make(op, how, (batch, tokens, 2, 2, 4, 4), has_state=False)
        given = {**case.inputs, **case.parameters}

        def run(pool, given, **out):
            inputs, parameters = ({name: given[name] for name in part} for part in (case.inputs, case.parameters))
            return function(pool, *inputs.values(), **parameters, **case.options, **more, **out)

        return run, given

    return make


@pytest.mark.parametrize("verb", ["update", "varlen"])
@pytest.mark.parametrize(("op", "how"), CASES)
def test_y_may_go_to_the_memory_of_an_input(op, how, verb, make):
    run, given = make(op, how, verb)
    pool = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    want_pool = pool.clone()
    want = run(want_pool, given)
    several = [name for name, x in given.items() if x.shape == want.shape and x.dtype == want.dtype]
    assert several
    for name in several:
        copies, own = {name: x.clone() for name, x in given.items()}, pool.clone()
        y = run(own, copies, out=copies[name])
        assert y is copies[name]
        assert torch.equal(y, want)
        assert torch.equal(own, want_pool)


def test_a_part_of_a_buffer_beside_the_input_takes_y_as_it_is(on_gpu):
    for shift, is_apart in ((0, False), (1, False), (8, True), (12, True)):
        buffer = torch.randn(64)
        q, k, g = torch.randn(3, 1, 2, 4)
        v, out = (buffer[begin : begin + 8].view(1, 2, 4) for begin in (0, shift))
        for _ in range(2):  # the second one is known
            assert rwkv_jit.gla_update(torch.zeros(1, 2, 4, 4), q, k, v, g, out=out) is out
            (launch,) = on_gpu.take()
            assert (launch.named["y"] == out.data_ptr()) == is_apart
            assert launch.named["v"] == v.data_ptr()


def test_mixed_tokens_may_go_to_the_memory_of_the_tokens():
    x, shift = torch.randn(4, 8), torch.randn(4, 8)
    weight, bias, mixes = torch.randn(8), torch.randn(8), torch.rand(8)
    bounds = torch.tensor([0, 4])
    for name in ("x", "add"):
        given = {"x": x.clone(), "add": x.clone()}
        pools = shift.clone(), shift.clone()
        want = rwkv_jit.shift_mix(given["x"], weight, bias, mixes, pools[0], add=given["add"], cu_seqlens=bounds)
        out = given[name]
        found = rwkv_jit.shift_mix(
            **given, weight=weight, bias=bias, mixes=mixes, shift=pools[1], cu_seqlens=bounds, out=out
        )
        assert found[1] is out
        assert all(map(torch.equal, found, want))
        assert torch.equal(*pools)


def test_ops_are_all_here():
    assert {op for op, _ in CASES} == {*OPS, *derived_cases.WAYS} - {"wkv4", "timex"}
