"""`rwkv-jit bench --suite layers`: what is measured, how many bytes it has, and what is said without a GPU."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rwkv_jit import nn
from rwkv_jit.desk.bench import layers, timing
from rwkv_jit.desk.bench.layers import Sizes

SIZES = Sizes((2, 3, 128), torch.bfloat16, "cpu", 50)
B, T, C = SIZES.shape
TOKENS, CHANNELS = 2 * B * T * C, 2 * C  # bytes of something of every token, and of every channel
WORKS = {work.name: work for work in layers.WORKS}
# How many of each the inputs and the results of a forward have, and the gradients of both.
COUNTS = {
    "token_shift, 6 mixes": ((1, 6), (6, 0)), "token_shift, 1 mix": ((1, 1), (1, 0)), "prepare_keys": ((5, 4), (4, 0)),
    "gated_norm": ((5, 3), (1, 0)), "gated": ((2, 0), (1, 0)), "activate": ((1, 0), (1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_bytes_are_those_of_inputs_results_and_gradients(name):
    given, made = (tokens * TOKENS + channels * CHANNELS for tokens, channels in COUNTS[name])
    assert layers.call_of(WORKS[name], "forward", SIZES)[1] == given + made
    assert layers.call_of(WORKS[name], "backward", SIZES)[1] == 2 * given + made


def test_every_elementwise_op_goes_by_bandwidth_in_both_passes():
    of_memory = [work for work in layers.WORKS if work.has_bytes]
    assert [work.name for work in of_memory] == [*COUNTS, "cross_entropy"]
    assert all(work.phases == ("forward", "backward") for work in of_memory)


@pytest.mark.parametrize("name", WORKS)
def test_calls_do_what_their_phase_says(name):
    for phase in WORKS[name].phases:
        call, _ = layers.call_of(WORKS[name], phase, SIZES)
        for _ in range(2):
            made = [x for x in call() if x is not None]
            assert made
            assert all(bool(x.isfinite().all()) and not x.requires_grad for x in made)


@pytest.mark.parametrize("name", ["RWKV7TimeMix", "RWKV7Block"])
def test_products_are_those_of_the_module(name):
    module = getattr(nn, name)(C, 1, 24, 64)
    matrices = sum(x.numel() for own, x in module.named_parameters() if x.dim() == 2 and not own.endswith("r_k"))
    for phase, passes in (("forward", 1), ("forward+backward", 3)):
        call, _ = layers.call_of(WORKS[f"{name}, products"], phase, SIZES)
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == passes * 2 * B * T * matrices


@pytest.fixture
def bench(run):
    def bench(*arguments):
        return run("bench", "--suite", "layers", *arguments)

    return bench


def test_without_a_gpu_a_small_shape_is_measured(bench, monkeypatch):
    monkeypatch.setattr(timing, "cpu_ms", lambda call: [1.0, 2.0, 3.0])
    code, printed, _ = bench("--json")
    assert code == 0
    result = json.loads(printed)
    assert (result["device"], result["copy_tb_per_s"]) == ("cpu", None)
    assert [(row["op"], row["phase"]) for row in result["rows"]] == [
        (x.name, p) for x in layers.WORKS for p in x.phases
    ]
    assert all((row["skipped"], row["median_ms"], row["shape"]) == (None, 2.0, [2, 16, 128]) for row in result["rows"])
    code, printed, _ = bench("--shape", "1,5,64", "--dtype", "fp32")
    assert code == 0
    assert "\n(1, 5, 64) float32\n" in printed
    assert "CPU reference; not the speed of the kernels." in printed


def test_one_that_fails_hides_no_other(bench, monkeypatch):
    monkeypatch.setattr(timing, "cpu_ms", lambda call: [1.0, 2.0, 3.0])

    def fail(sizes):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(layers, "WORKS", (layers.Work("large", fail), WORKS["gated"]))
    code, printed, _ = bench()
    assert code == 0
    assert printed.count("skipped: large, ") == 2
    assert "RuntimeError: no memory\n" in printed
    assert "gated" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "wkv7"), "--op: cannot be combined with --suite layers"),
        (("--phase", "forward"), "--phase: cannot be combined with --suite layers"),
        (("--shape", "1,2,3"), "--shape: expected B,T,C with C a multiple of 64 for --suite layers, got '1,2,3'"),
        (("--shape", "1,64"), "--shape: expected B,T,C with C a multiple of 64 for --suite layers, got '1,64'"),
        (("--shape", "a,b,64"), "--shape: expected B,T,C with C a multiple of 64 for --suite layers, got 'a,b,64'"),
    ],
)
def test_what_does_not_go_with_the_suite(bench, arguments, message):
    code, _, said = bench(*arguments)
    assert code == 2
    assert message in said
