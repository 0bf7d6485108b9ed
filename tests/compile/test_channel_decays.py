"""The kernels of Kimi Delta Attention, for sm_90a: how they compile, and what they refuse."""

import dataclasses
import re

import pytest
from problems import ChannelCore, by_turns, channel_decays

from rwkv_jit.kernels import kernel, template
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import channel_decay, directions

pytestmark = pytest.mark.usefixtures("from_ledger")

FORWARD, BACKWARD, OF_KEYS = (f"channel_decay_group_{kind}" for kind in ("forward", "backward", "key_gradients"))
USUAL = ChannelCore("softplus", has_norm=True, has_bias=True, rate_map="sigmoid")
CORES = [
    USUAL, ChannelCore("bounded", rate_map="twice_sigmoid"), ChannelCore("softplus", has_norm=True),
    ChannelCore(has_norm=True), ChannelCore(),
]  # fmt: skip
TYPES = [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp16", "fp16")]


def steps_of(given):
    """The launches of a call by their templates: with gradients those of both directions."""
    schedules = [channel_decay.forward(given)]
    if given.training:
        schedules.append(directions.backward(given))
    return {step.template: step for schedule in schedules for step in schedule.launches}


def check(given):
    """Compile a call's kernels; return their names."""
    launches = steps_of(given)
    for step in launches.values():
        assert step.parameters.get("SHARED_BYTES", 0) <= given.gpu.shared_limit
        made = kernel.get(step.request(given.gpu))
        assert [*made.resources] == [step.entry]
    return [*launches]


@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize(("io", "wide"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_it_compiles(core, io, wide):
    assert check(channel_decays(core, io, wide)) == [FORWARD]


@pytest.mark.parametrize(("core", "types"), by_turns(CORES, TYPES), ids=str)
def test_states_in_a_pool_spill_no_more(core, types):
    for layout, state in (("kv", "fp32"), ("vk", "bf16")):
        given, spills = channel_decays(core, *types, layout=layout, state=state), []
        for is_pooled in (False, True):
            (step,) = channel_decay.forward(given._replace(is_packed=is_pooled, is_pooled=is_pooled)).launches
            assert step.parameters["POOLED"] == is_pooled
            spills.append(kernel.get(step.request(given.gpu)).spill_bytes)
        assert spills[1] <= spills[0]


@pytest.mark.parametrize(("core", "types"), by_turns(CORES, TYPES), ids=str)
def test_all_of_them_compile_in_training(core, types):
    sums = ["sum_buffers"] if core.gate != "given" else []
    assert check(channel_decays(core, *types, training=True)) == [FORWARD, BACKWARD, OF_KEYS, *sums]


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_what_lies_between_kernels_has_the_sizes_that_they_say(types):
    given = channel_decays(USUAL, *types, training=True)
    buffers = {**channel_decay.kept(given), **directions.backward(given).scratch}
    names = {FORWARD: ["states", "matrices"], BACKWARD: ["matrices", "slopes"], OF_KEYS: ["states", "slopes"]}
    launches = steps_of(given)
    for name, between in names.items():
        source, arguments = launches[name].source(), {x.name: x for x in launches[name].arguments()}
        checks = [
            f"static_assert(sizeof({arguments[buffer].type[:-1]}) * {given.slots(64) * given.H} == {buffers[buffer]});"
            for buffer in between
        ]
        checked = dataclasses.replace(source, body="\n".join([source.body, *checks]))
        kernel.get(launches[name]._replace(template=checked).request(given.gpu))


def rules(threads):
    return {
        "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
        "heads have 128 channels and values": {"HEAD_SIZE": 64},
        "chunk_len must be 64": {"CHUNK_LEN": 32},
        f"num_threads must be {threads}": {"NUM_THREADS": threads // 2},
        "shared_bytes is what the geometry says": {"SHARED_BYTES": 1024},
    }


RULES = {FORWARD: rules(512), BACKWARD: rules(512), OF_KEYS: rules(256)}
BROKEN = [(name, rule, change) for name, of_one in RULES.items() for rule, change in of_one.items()]
# What no parameter breaks but a change of the kernel: what is changed, into what, and by how much it is larger then.
OWN_RULES = {
    "a table has room in a state's place": ("ChannelTable = float[CHUNK_LEN]", "ChannelTable = float[8]", 0),
    "and in that of dY and dV": ("dv[SLABS]", "dv[SLABS + 1]", 64 * 128),
}


@pytest.mark.parametrize(("name", "rule", "change"), BROKEN, ids=str)
def test_what_does_not_fit_is_refused(name, rule, change):
    given = channel_decays(USUAL, training=True)
    step = steps_of(given)[name]
    wrong = step._replace(parameters={**step.parameters, **change})
    with pytest.raises(UnsupportedConfigError, match=f"^{name}: {rule}; got "):
        kernel.get(wrong.request(given.gpu))


@pytest.mark.parametrize("rule", OWN_RULES)
def test_what_the_kernel_of_keys_says_of_itself(rule):
    was, becomes, more = OWN_RULES[rule]
    given = channel_decays(USUAL, training=True)
    step = steps_of(given)[OF_KEYS]
    source = step.source()
    texts = {header: text.replace(was, becomes) for header, text in source.headers}
    changed = dataclasses.replace(source, body=source.body.replace(was, becomes), headers=tuple(texts.items()))
    assert changed != source
    parameters = {**step.parameters, "SHARED_BYTES": step.parameters["SHARED_BYTES"] + more}
    wrong = step._replace(parameters=parameters, template=changed)
    with pytest.raises(UnsupportedConfigError, match=f"^{OF_KEYS}: {rule}; got "):
        kernel.get(wrong.request(given.gpu))


def test_every_rule_is_provoked_above():
    assert RULES.keys() == {name for name in template.names() if name.startswith("channel_decay")}
    for name, provoked in RULES.items():
        source = template.library(name)
        own = [source.body, *(text for header, text in source.headers if header.startswith("channel_decay"))]
        written = re.findall(r'static_assert\([^;]*?"([^"]*)"\)', "".join(own))
        assert len(written) == "".join(own).count("static_assert(")
        assert set(written) == {*provoked, *(OWN_RULES if name == OF_KEYS else ())}
