"""The kernel of Kimi Delta Attention, for sm_90a: how it compiles, and what it refuses."""

import re

import pytest
from problems import channel_decays

from rwkv_jit import kernel, template
from rwkv_jit.derived import channel_steps
from rwkv_jit.derived.table import ChannelCore
from rwkv_jit.errors import UnsupportedConfigError

pytestmark = pytest.mark.usefixtures("compiled_once")

NAME = "channel_decay_group_forward"
USUAL = ChannelCore("softplus", has_norm=True, has_bias=True, rate_map="sigmoid")
CORES = [
    USUAL, ChannelCore("bounded", rate_map="twice_sigmoid"), ChannelCore("softplus", has_norm=True),
    ChannelCore(has_norm=True), ChannelCore(),
]  # fmt: skip
MOST_SPILLED = 2560  # bytes of a thread, nearly all where 16 tokens of a pair of channels are taken by halves


def step_of(given):
    (step,) = channel_steps.forward(given, -5.0).launches
    return step


@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize(("io", "wide"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_it_compiles(core, io, wide):
    given = channel_decays(core, io, wide)
    step = step_of(given)
    assert step.parameters["SHARED_BYTES"] <= given.gpu.shared_limit
    made = kernel.get(step.request(given.gpu))
    assert [*made.resources] == [step.entry]
    assert made.spill_bytes <= MOST_SPILLED


RULES = {
    "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
    "heads have 128 channels and values": {"HEAD_SIZE": 64},
    "chunk_len must be 64": {"CHUNK_LEN": 32},
    "num_threads must be 512": {"NUM_THREADS": 256},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 1024},
}


@pytest.mark.parametrize(("rule", "change"), RULES.items(), ids=str)
def test_what_does_not_fit_is_refused(rule, change):
    given = channel_decays(USUAL)
    step = step_of(given)
    wrong = step._replace(parameters={**step.parameters, **change})
    with pytest.raises(UnsupportedConfigError, match=f"^{NAME}: {rule}; got "):
        kernel.get(wrong.request(given.gpu))


def test_every_rule_is_provoked_above():
    source = template.library(NAME)
    own = [source.body, *(text for header, text in source.headers if header.startswith("channel_decay"))]
    assert set(re.findall(r'static_assert\([^;]*?"([^"]*)"\)', "".join(own))) == set(RULES)
