"""Kimi Delta Attention in a kernel of its own: which calls go there, and what they launch."""

import derived_cases
import pytest
import torch

import rwkv_jit
from rwkv_jit.derived import channel_decays as calls

SIZES = (2, 70, 2, 4, 128, 128)


@pytest.fixture
def here(on_gpu, monkeypatch):
    """A GPU that takes notes, where few heads go to this kernel too."""
    monkeypatch.setattr(calls, "LEAST_BLOCKS", 0)
    on_gpu.use("sm_90")
    return on_gpu


def make(how="raw norm", sizes=SIZES, dtype=torch.bfloat16, **more):
    return derived_cases.make("kda", how, sizes, dtype, torch.float32, torch.float32, **more)


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
    ("how", "changes", "options", "is_own"),
    [
        ("raw", {}, {}, True), ("raw flat bias", {"dtype": torch.float16}, {}, True),
        ("raw", {}, {"chunk_len": 64}, True), ("norm", {}, {}, True),
        ("raw", {"sizes": (2, 70, 2, 4, 64, 128)}, {}, False), ("raw", {"sizes": (2, 3, 2, 4, 128, 128)}, {}, False),
        ("raw", {"dtype": torch.float32}, {}, False),
        ("raw", {}, {"chunk_len": 32}, False), ("raw", {}, {"backend": "recurrent"}, False),
    ],
)  # fmt: skip
def test_calls_that_go_there_and_others(here, how, changes, options, is_own):
    with torch.no_grad():
        make(how, **changes).run(**options)
    assert [x.template == "channel_decay_group_forward" for x in here.take()].count(True) == is_own


def test_gradients_few_heads_and_other_gpus_go_elsewhere(here, monkeypatch):
    derived_cases.differentiate(make())
    with torch.no_grad():
        monkeypatch.setattr(calls, "LEAST_BLOCKS", 1)
        make().run()
        rwkv_jit.set_batch_invariant(True)
        try:
            first = here.take()
            make().run()
        finally:
            rwkv_jit.set_batch_invariant(False)
        own = here.take()
        monkeypatch.setattr(calls, "LEAST_BLOCKS", 0)
        here.use("sm_80")
        make().run()
    assert not any(x.template.startswith("channel_decay") for x in (*first, *here.take()))
    assert [x.template for x in own] == ["channel_decay_group_forward"]
