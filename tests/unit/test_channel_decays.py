"""Kimi Delta Attention in kernels of its own: which calls go there, and what they launch in both directions."""

from functools import partial

import derived_cases
import pytest
import torch
from derived_cases import differentiate
from problems import ChannelCore, channel_decays

import rwkv_jit
from rwkv_jit.schedules import channel_decay
from rwkv_jit.schedules.schedule import offsets

SIZES = (2, 70, 2, 4, 128, 128)
TRAINED = (2, 70, 3, 3, 128, 128)  # which has as many key heads as value heads
KERNELS = ["channel_decay_forward", "channel_decay_backward", "channel_decay_key_gradients"]
GRADIENTS = {"q": "dr", "k": "dk", "v": "dv", "g": "dw", "beta": "dbeta", "initial_state": "grad_initial_state"}


@pytest.fixture
def here(on_gpu, monkeypatch):
    """A GPU that takes notes, where few heads go to these kernels too."""
    monkeypatch.setattr(channel_decay, "LEAST_BLOCKS", 0)
    on_gpu.use("sm_90")
    return on_gpu


def make(how="raw norm", sizes=SIZES, dtype=torch.bfloat16, **more):
    return derived_cases.make("kda", how, sizes, dtype, torch.float32, torch.float32, **more)


def is_own(launch):
    return launch.entry.startswith("channel_decay")


# ---- calls without gradients ---------------------------------------------------------------------------------------


def test_one_launch_has_all_of_a_call(here):
    case = make("bounded bias sigmoid norm")
    for _ in range(2):
        with torch.no_grad():
            case.run()
        (launch,) = here.take()
        assert (launch.template, launch.grid) == ("channel_decay_group_forward", (2, 4, 1))
        flags = "GROUP", "GATE", "HAS_NORM", "HAS_BIAS", "BETA_MAP"
        assert [launch.parameters[name] for name in flags] == [2, 2, True, True, 1]
        assert launch.named["lower_bound"] == -5.0
        assert launch.addresses["r"] == case.inputs["q"].data_ptr()
        assert launch.addresses["w"] == case.inputs["g"].data_ptr()


@pytest.mark.parametrize(
    ("how", "changes", "options", "is_here"),
    [
        ("raw", {}, {}, True), ("raw flat bias", {"dtype": torch.float16}, {}, True),
        ("raw", {}, {"chunk_len": 64}, True), ("norm", {}, {}, True),
        ("raw", {"sizes": (2, 70, 2, 4, 64, 128)}, {}, False), ("raw", {"sizes": (2, 3, 2, 4, 128, 128)}, {}, False),
        ("raw", {"dtype": torch.float32}, {}, False),
        ("raw", {}, {"chunk_len": 32}, False), ("raw", {}, {"backend": "recurrent"}, False),
    ],
)  # fmt: skip
def test_calls_that_go_there_and_others(here, how, changes, options, is_here):
    with torch.no_grad():
        make(how, **changes).run(**options)
    assert [x.template == "channel_decay_group_forward" for x in here.take()].count(True) == is_here


def test_few_heads_and_other_gpus_go_elsewhere(here, monkeypatch):
    with torch.no_grad():
        monkeypatch.setattr(channel_decay, "LEAST_BLOCKS", 1)
        make().run()
        rwkv_jit.set_batch_invariant(True)
        try:
            first = here.take()
            make().run()
        finally:
            rwkv_jit.set_batch_invariant(False)
        own = here.take()
        monkeypatch.setattr(channel_decay, "LEAST_BLOCKS", 0)
        here.use("sm_80")
        make().run()
    assert not any(map(is_own, (*first, *here.take())))
    assert [x.template for x in own] == ["channel_decay_group_forward"]


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "core", [ChannelCore("softplus", has_norm=True, has_bias=True), ChannelCore("bounded"), ChannelCore()], ids=str
)
def test_gradients_come_in_the_order_of_the_inputs(core):
    given = channel_decays(core, wide="fp32", training=True)
    results = channel_decay.backward(given).results
    assert [*results] == [*(f"d{name}" for name in core.names), "grad_initial_state"]
    for name, result in zip(core.names, results.values(), strict=False):
        assert result == (given.shape(name), given.types[name])
    assert results["grad_initial_state"] == (given.state_shape, given.state_type)
    without = channel_decay.backward(given._replace(has_initial_state=False))
    assert [*without.results] == [*results][:-1]


def test_what_a_call_keeps():
    """Of every 64 tokens of a head a state and two matrices, and U of every token; all of 16 bits."""
    given = channel_decays(ChannelCore(), training=True)
    kept, chunks = channel_decay.kept(given), 8 * 64 * 32
    assert kept == {
        "states": 2 * chunks * 128 * 128, "matrices": 2 * chunks * 2 * 64 * 64, "kept_u": 2 * 8 * 4096 * 32 * 128,
    }  # fmt: skip
    forward = channel_decay.forward(given)
    assert (forward.kept, forward.launches[0].parameters["KEEPS"]) == (kept, True)
    assert all(begin % 16 == 0 for begin in [*offsets(kept.values()), sum(kept.values())])
    packed = channel_decay.kept(given._replace(B=1, T=8 * 4096, N=8, is_packed=True))  # with a chunk more each
    assert {name: packed[name] - size for name, size in kept.items()} == {
        "states": 2 * 8 * 32 * 128 * 128, "matrices": 2 * 8 * 32 * 2 * 64 * 64, "kept_u": 0,
    }  # fmt: skip
    without = channel_decay.forward(given._replace(training=False))
    assert (without.kept, without.launches[0].parameters["KEEPS"]) == ({}, False)


@pytest.mark.parametrize(("how", "summed"), [("raw bias norm", 2), ("bounded", 1), ("norm sigmoid", 0)])
@pytest.mark.parametrize("bounds", [None, [0, 30, 70]], ids=["batch", "packed"])
def test_each_direction_gets_what_it_asks_for(here, how, summed, bounds):
    case = make(how, (2 if bounds is None else 1, *TRAINED[1:]), bounds=bounds)
    sums = [("A_log", "a_log_chunks", 3), ("dt_bias", "bias_chunks", 3 * 128)][:summed]
    for _ in range(2):
        leaves = {own: x.detach().requires_grad_() for own, x in case.tensors.items()}
        y, final = case.replaced(leaves).run()
        dy, last = torch.randn_like(y), torch.randn_like(final)
        found = torch.autograd.grad([y, final], [*leaves.values()], [dy, last])
        grads = {own: grad.data_ptr() for own, grad in zip(leaves, found, strict=True)}
        order = ["zero" if x[0] == "zero" else x.entry for x in here.order]
        zeros = [x[1] for x in here.order if x[0] == "zero"]
        assert order == [KERNELS[0], *["zero"] * len(zeros), *KERNELS[1:], *["sum_buffers"] * (summed > 0)]
        forward, backward, of_keys, *of_sums = (x.named for x in here.take())
        assert (forward["y"], forward["final_state"]) == (y.data_ptr(), final.data_ptr())
        assert backward["dy"] == of_keys["dy"] == dy.data_ptr()
        assert backward["grad_final_state"] == last.data_ptr()
        made = {**of_keys, **backward}  # dv is what one of them writes and the other reads
        assert {own: grads[own] for own in GRADIENTS} == {own: made[name] for own, name in GRADIENTS.items()}
        passed = [
            (forward["states"], of_keys["states"]), (forward["kept_u"], of_keys["kept_u"]),
            (forward["matrices"], backward["matrices"]), (backward["slopes"], of_keys["slopes"]),
            (backward["dv"], of_keys["dv"]),
        ]  # fmt: skip
        assert all(written == read != 0 for written, read in passed)
        slots = 4 if bounds is None else 3
        assert of_keys["slots"] == slots
        # Of packed sequences some slots belong to no chunk.
        assert {*zeros} == ({of_keys[buffer] for _, buffer, _ in sums} if bounds else set())
        for place, (own, buffer, width) in enumerate(sums):
            (x,) = of_sums
            assert (x[f"rows{place}"], x[f"sums{place}"]) == (of_keys[buffer], grads[own])
            assert (x[f"group_rows{place}"], x[f"width{place}"]) == (slots, width)
        assert [of_keys[buffer] for buffer in ("a_log_chunks", "bias_chunks")[summed:]] == [0] * (2 - summed)


@pytest.mark.parametrize("of", [(0,), (1,)], ids=["y", "state"])
def test_results_that_nobody_differentiates_have_no_gradient(here, of):
    differentiate(make("norm", TRAINED), of=of)
    _, backward, of_keys = (x.named for x in here.take())
    assert bool(backward["grad_final_state"]) == (of == (1,))
    assert backward["dy"] == of_keys["dy"] != 0
    differentiate(make("norm", TRAINED, has_state=False))
    forward, backward, _ = (x.named for x in here.take())
    assert (forward["initial_state"], backward["grad_initial_state"]) == (0, 0)


@pytest.mark.parametrize(
    ("how", "changes", "options", "is_here"),
    [
        ("raw", {}, {}, True), ("bounded flat bias", {"dtype": torch.float16}, {}, True),
        ("norm", {"sizes": (1, *TRAINED[1:]), "bounds": [0, 0, 30, 70]}, {"chunk_len": 64}, True),
        ("raw", {"sizes": SIZES}, {}, False), ("norm", {"dtype": torch.float32}, {}, False),
        ("raw", {"sizes": (2, 70, 3, 3, 64, 64)}, {}, False), ("raw", {"sizes": (2, 70, 3, 3, 128, 64)}, {}, False),
        ("raw", {"sizes": (2, 3, 3, 3, 128, 128)}, {}, False), ("raw", {}, {"chunk_len": 32}, False),
        ("raw", {}, {"backend": "recurrent"}, False),
    ],
)  # fmt: skip
def test_which_calls_are_trained_here(here, how, changes, options, is_here):
    differentiate(make(how, **{"sizes": TRAINED, **changes}), **options)
    taken = here.take()
    assert [x.entry for x in taken if is_own(x)] == (KERNELS if is_here else [])
    assert any(x.entry.startswith("wkv7") for x in taken) != is_here


def test_one_parameter_alone_is_trained_here(here):
    case = make("raw bias", TRAINED)
    for name in ("A_log", "dt_bias"):
        leaf = case.parameters[name].detach().requires_grad_()
        y, _ = case._replace(parameters={**case.parameters, name: leaf}).run()
        (grad,) = torch.autograd.grad(y.sum(), leaf)
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        assert [x.entry for x in here.take() if is_own(x)] == KERNELS


def test_few_heads_are_trained_in_other_kernels(on_gpu):
    on_gpu.use("sm_90")
    for heads, is_here in ((13, False), (14, True)):  # of 132 multiprocessors a fifth
        differentiate(make("norm", (2, 70, heads, heads, 128, 128)))
        assert any(map(is_own, on_gpu.take())) == is_here


def test_transforms_and_graphs_of_a_backward_take_these_kernels_too(here):
    case = make("norm", TRAINED)
    leaf = case.inputs["q"].requires_grad_()
    y, _ = case.run()
    (forward,) = here.take()
    assert forward.entry == KERNELS[0]
    several = torch.randn(2, *y.shape, dtype=y.dtype)
    for run in (
        lambda: torch.autograd.grad(y, leaf, several[0], create_graph=True),
        lambda: torch.func.vmap(lambda dy: torch.autograd.grad(y, leaf, dy, retain_graph=True))(several),
        lambda: torch.autograd.grad(y, leaf, several, retain_graph=True, is_grads_batched=True),
        lambda: torch.func.grad(lambda q: case.replaced({**case.tensors, "q": q}).run()[0].sum())(leaf.detach()),
    ):
        run()
        taken = here.take()
        assert taken
        assert all(map(is_own, taken))


@pytest.mark.parametrize("how", derived_cases.WAYS["kda"])
@pytest.mark.parametrize("bounds", [None, [0, 0, 8, 20]], ids=["batch", "packed"])
def test_transforms_and_graphs_of_a_backward_find_right_gradients(how, bounds):
    case = derived_cases.make("kda", how, (2 if bounds is None else 1, 20, 3, 3, 16, 8), bounds=bounds)
    leaves = {own: x.detach().requires_grad_() for own, x in case.tensors.items()}
    results = case.replaced(leaves).run()
    several = [torch.randn(2, *x.shape, dtype=x.dtype) for x in results]
    differentiated = partial(torch.autograd.grad, results, [*leaves.values()])
    together = torch.func.vmap(lambda *weights: differentiated(weights, retain_graph=True))(*several)
    for i in range(2):
        weights = [x[i] for x in several]
        _, wanted = derived_cases.exactly(case, weights)
        recorded = differentiated(weights, create_graph=True)
        for own, a, b in zip(leaves, recorded, together, strict=True):
            for found in (a, b[i]):
                assert derived_cases.error_of(case, own, found, wanted[own]) < 1e-6, own
    with pytest.raises(RuntimeError, match="has no second derivative"):
        recorded[0].sum().backward()
