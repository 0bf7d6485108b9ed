"""The kernels of ops with one decay for a head, for every architecture that has tensor cores, at odd sizes too."""

import dataclasses
import itertools
import math
import re

import pytest
from problems import Core, by_turns, head_decays

from rwkv_jit.kernels import kernel, template
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import directions, head_decay

pytestmark = pytest.mark.usefixtures("from_ledger")

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
RAW = Core(True, has_norm=True, has_gate=True, has_bias=True, rate_map="sigmoid")
TRAINED = [
    *(Core(True, has_decay, has_norm=has_norm) for has_decay in (True, False) for has_norm in (True, False)),
    Core(False, has_rate=False), Core(False),
    RAW, Core(True, has_gate=True, rate_map="twice_sigmoid"), Core(False, has_step=True, has_bias=True),
]  # fmt: skip
CORES = [*TRAINED, Core(False, has_own=True), Core(False, has_own=True, has_step=True)]
SHARED = [Core(True, has_norm=True), Core(False, has_rate=False), Core(False), Core(False, has_own=True), RAW]
SIZES = [(128, 128), (128, 64), (64, 64), (40, 24), (16, 32), (33, 65), (100, 96)]
TYPES = list(itertools.product((32, 16), ("bf16", "fp16")))
# All pairs, and neighbours differ in both.
WAYS = [(CORES[i % len(CORES)], *TYPES[i % len(TYPES)]) for i in range(len(CORES) * len(TYPES))]
IN_TRAINING = {"head_decay_forward", "head_decay_backward", "head_decay_key_gradients"}


def steps_of(given):
    """The launches of a call by their kernels, without those of steps: with gradients those of both directions."""
    schedules = [head_decay.forward(given), *([directions.backward(given)] if given.training else [])]
    launches = [step for schedule in schedules for step in schedule.launches]
    return {step.entry: step for step in launches if step.template != "head_steps"}


def entries(given):
    """Compile a call's kernels; return their names."""
    made = {entry: kernel.get(step.request(given.gpu)) for entry, step in steps_of(given).items()}
    assert all([*each.resources] == [entry] for entry, each in made.items())
    return {*made}


@pytest.mark.parametrize(("core", "arch"), by_turns(CORES, ARCHS), ids=str)
def test_usual_sizes(core, arch):
    assert len(entries(head_decays(core, arch))) == 1


@pytest.mark.parametrize(("core", "arch"), by_turns(CORES, ARCHS), ids=str)
def test_states_in_a_pool_spill_no_more(core, arch):
    """Than those of a call, in either layout, and where blocks share sequences."""
    for layout, state, more in (("kv", "fp32", {}), ("vk", "bf16", {}), ("kv", "fp32", {"B": 1, "N": 1, "T": 32768})):
        given = head_decays(core, arch, layout=layout, state=state, **more)
        spills = []
        for is_pooled in (False, True):
            launches = steps_of(given._replace(is_packed=is_pooled, is_pooled=is_pooled))
            step = launches["head_decay_forward"]
            assert step.parameters["POOLED"] == is_pooled
            spills.append(kernel.get(step.request(given.gpu)).spill_bytes)
        assert spills[1] <= max(spills[0], 24)


@pytest.mark.parametrize(("core", "arch"), by_turns(TRAINED, ARCHS), ids=str)
def test_usual_sizes_in_training(core, arch):
    sums = {"sum_buffers"} if "a_log" in core.names else set()
    assert entries(head_decays(core, arch, training=True)) == IN_TRAINING | sums


@pytest.mark.parametrize(("training", "sizes", "way"), by_turns((False, True), SIZES, WAYS), ids=str)
def test_odd_sizes(training, sizes, way):
    core, chunk_len, io = way
    layout, state = ("vk", "bf16") if io == "fp16" else ("kv", "fp32")
    training = training and not core.has_own  # which calls with gradients add themselves
    entries(head_decays(core, "sm_90", sizes, chunk_len, io, 2, layout, state, training=training))


@pytest.mark.parametrize(("core", "arch"), by_turns(SHARED, ARCHS), ids=str)
def test_sequences_that_blocks_share(core, arch):
    given = head_decays(core, arch, B=1, N=1, T=32768, training=True)
    assert head_decay.segments(given) == 8
    assert entries(given) - {"sum_buffers"} == IN_TRAINING | {"head_decay_walks"}


@pytest.mark.parametrize(("arch", "least"), [("sm_80", 32), ("sm_90", 64)])
def test_few_heads_have_blocks_of_fewer_rows(arch, least):
    for training in (False, True):
        many, few, whole = (
            steps_of(head_decays(Core(True), arch, heads=heads, training=training, is_batch_invariant=is_invariant))
            for heads, is_invariant in ((32, False), (2, False), (2, True))
        )
        rows = {"head_decay_forward": least} | ({"head_decay_backward": 32} if training else {})
        for entry, fewer in rows.items():
            assert (many[entry].grid, many[entry].parameters["ROWS"]) == ((8, 32, 1), 128)
            assert (few[entry].grid, few[entry].parameters["ROWS"]) == ((8, 2, 128 // fewer), fewer)
            assert (whole[entry].grid, whole[entry].parameters["ROWS"]) == ((8, 2, 1), 128)


@pytest.mark.parametrize(
    ("arch", "sizes", "chunk_len", "is_one"),
    [
        ("sm_90", (128, 128), 32, True), ("sm_90", (64, 64), 32, True), ("sm_90", (128, 64), 32, True),
        ("sm_90", (128, 128), 16, False), ("sm_90", (96, 128), 32, False), ("sm_80", (128, 128), 32, False),
        ("sm_120", (128, 128), 32, False),
    ],
)  # fmt: skip
def test_forwards_by_warp_groups(arch, sizes, chunk_len, is_one):
    (step,) = head_decay.forward(head_decays(Core(True), arch, sizes, chunk_len)).launches
    assert (step.template == "head_decay_group_forward", step.arch == "sm_90a") == (is_one, is_one)


@pytest.mark.parametrize(
    ("core", "heads_and_sizes"),
    by_turns(TRAINED, list(itertools.product((32, 16), ((128, 128), (64, 64), (128, 64))))), ids=str,
)  # fmt: skip
def test_products_of_warp_groups_overlap(core, heads_and_sizes):
    """The fixtures refuse what the compiler lets wait for the product before it."""
    key_heads, sizes = heads_and_sizes
    given = head_decays(core, sizes=sizes, training=True, G=key_heads)
    requests = [step.request(given.gpu) for step in steps_of(given).values()]
    in_groups = [request for request in requests if request.arch == "sm_90a"]
    assert [request.template.name for request in in_groups] == [
        "head_decay_group_forward", "head_decay_group_key_gradients"
    ]  # fmt: skip
    kernel.get_all(in_groups)


# The tokens that gradients of keys are made for at a time: of heads of 64 and of 128, with a delta and without.
LENGTHS = {
    "sm_80": (64, 64, 64, 64), "sm_86": (64, 32, 64, 64), "sm_90": (64, 64, 64, 64), "sm_100": (64, 64, 64, 64),
    "sm_120": (64, 32, 64, 64),
}  # fmt: skip


@pytest.mark.parametrize("arch", LENGTHS)
@pytest.mark.parametrize("chunk_len", [32, 16])
def test_gradients_of_keys_are_of_as_many_tokens_as_fit(arch, chunk_len):
    cases = itertools.product((True, False), (64, 128))
    for (has_delta, size), length in zip(cases, LENGTHS[arch], strict=True):
        given = head_decays(Core(has_delta), arch, (size, size), chunk_len, training=True)
        launches = steps_of(given)
        forward, backward, of_keys = several = [launches[name] for name in launches if name != "sum_buffers"]
        assert all(step.parameters["SHARED_BYTES"] <= given.gpu.shared_limit for step in several)
        assert forward.parameters["KEPT_LEN"] == backward.parameters["KEPT_LEN"] == length
        assert (of_keys.parameters["CHUNK_LEN"], of_keys.parameters["PART_LEN"]) == (length, chunk_len)
        assert math.prod(of_keys.grid) == 8 * 4096 // length * 16


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("core", TRAINED[:6], ids=str)
@pytest.mark.parametrize("chunk_len", [32, 16])
def test_what_lies_between_kernels_has_the_sizes_that_they_say(arch, core, chunk_len):
    for sizes in ((128, 128), (33, 65)):
        given = head_decays(core, arch, sizes, chunk_len, training=True)
        launches = steps_of(given)
        length = launches["head_decay_key_gradients"].parameters["CHUNK_LEN"]
        lengths = {"states": length, "slopes": length, "matrices": chunk_len, "factors": chunk_len}
        buffers = {**head_decay.kept(given), **directions.backward(given).scratch}
        for step in (step for step in launches.values() if step.entry != "sum_buffers"):
            source, checks = step.source(), []
            for argument in step.arguments():
                if argument.name in lengths:
                    size, rest = divmod(buffers[argument.name], given.slots(lengths[argument.name]) * given.H)
                    assert rest == 0
                    checks.append(f'static_assert(sizeof({argument.type[:-1]}) == {size}, "{argument.name}");')
            assert len(checks) == 3
            checked = dataclasses.replace(source, body="\n".join([source.body, *checks]))
            kernel.get(step._replace(template=checked).request(given.gpu))


OF_CHUNKS = {
    "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
    "chunk_len must be 16 or 32": {"CHUNK_LEN": 64},
    "num_threads must be a multiple of 32 from 64 to 512": {"NUM_THREADS": 544},
}
OF_ROWS = {
    "rows must be a multiple of 32": {"ROWS": 48},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 1024},
}
# By the template, with an architecture that takes it.
RULES = {
    ("head_decay_walks", "sm_80"): {
        "blocks have whole sequences where no decay lets them share one": {"SEGMENTED": False}
    },
    ("head_decay_forward", "sm_80"): OF_CHUNKS | OF_ROWS,
    ("head_decay_group_forward", "sm_90"): {
        **OF_CHUNKS,
        **OF_ROWS,
        "head sizes in steps of 64": {"HEAD_SIZE": 40},
        "rows must be 64 or 128": {"ROWS": 32},
        "chunk_len must be 32": {"CHUNK_LEN": 16},
        "num_threads must be four times the rows": {"NUM_THREADS": 256},
    },
    ("head_decay_backward", "sm_80"): OF_CHUNKS | OF_ROWS,
    ("head_decay_key_gradients", "sm_80"): {
        "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
        "chunk_len must be 32 or 64": {"CHUNK_LEN": 16},
        "shared_bytes is what the geometry says": {"SHARED_BYTES": 1024},
    },
    ("head_decay_group_key_gradients", "sm_90"): {
        "head sizes in steps of 64": {"HEAD_SIZE": 40},
        "chunk_len must be 64": {"CHUNK_LEN": 32},
        "num_threads must be 256": {"NUM_THREADS": 128},
        "shared_bytes is what the geometry says": {"SHARED_BYTES": 1024},
    },
}
BROKEN = [(*of, rule, change) for of, rules in RULES.items() for rule, change in rules.items()]


@pytest.mark.parametrize(("name", "arch", "rule", "change"), BROKEN, ids=str)
def test_what_does_not_fit_is_refused(name, arch, rule, change):
    given = head_decays(Core(True, has_norm=True), arch, B=1, N=1, T=32768, training=True)
    (step,) = (step for step in steps_of(given).values() if step.template == name)
    wrong = step._replace(parameters={**step.parameters, **change})
    with pytest.raises(UnsupportedConfigError, match=f"^{name}: {rule}; got "):
        kernel.get(wrong.request(given.gpu))


def test_every_rule_is_provoked_above():
    assert {name for name, _ in RULES} == {name for name in template.names() if name.startswith("head_decay")}
    for (name, _), rules in RULES.items():
        source = template.library(name)
        own = [source.body, *(text for header, text in source.headers if header.startswith("head_decay"))]
        assert set(re.findall(r'static_assert\([^;]*?"([^"]*)"\)', "".join(own))) == set(rules)
