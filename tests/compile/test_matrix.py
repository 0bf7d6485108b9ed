"""Kernels compile for every architecture: rows that hold every choice, and with --full those in which any two meet, and
the whole matrix.
"""

import contextlib
import itertools
import random
import re

import pytest
import torch
from problems import problem, requests

import rwkv_jit
from rwkv_jit.ahead import requests as ahead_requests
from rwkv_jit.kernels import cache, kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import common, directions
from rwkv_jit.schedules.table import OPS

pytestmark = pytest.mark.usefixtures("from_ledger")

DIAGONAL = ("wkv5", "wkv6", "gla", "linear_attention")
AXES = {
    "op": ("wkv5", "wkv6", "wkv7", "gla", "linear_attention"),
    "direction": ("forward", "backward"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "head_size": (1, 7, 24, 40, 64, 96, 100, 128, 256),
    "arch": ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"),
    "decay": ("raw", "sigmoid", "log", "direct"),
    "state_layout": ("vk", "kv"),
    "w_dtype": ("like the rest", "fp32"),
    "value_size": ("like K", 33, 160),
}
CHUNKED_AXES = {
    "op": ("wkv7",),
    "direction": ("forward", "backward"),
    "dtype": (torch.bfloat16, torch.float16),
    "head_size": (1, 7, 24, 40, 64, 96, 100, 128),
    "arch": ("sm_80", "sm_89", "sm_90", "sm_120"),
    "decay": ("raw", "sigmoid", "log", "direct"),
    "state_layout": ("vk", "kv"),
    "w_dtype": ("like the rest", "fp32"),
    "value_size": ("like K", 56),
    "chunk_len": ("default", 16),
    "state": ("fp32", "bf16", "fp16"),
}
SCAN_AXES = {
    **CHUNKED_AXES,
    "head_size": (1, 40, 129, 200, 256, 320, 512, 1000),
    "value_size": (129, 256),
    "chunk_len": ("default", 32),
}
GATED_AXES = {**CHUNKED_AXES, "op": DIAGONAL, "chunk_len": ("default", 16, 64)}
GATED_SCAN_AXES = {
    **CHUNKED_AXES,
    "op": DIAGONAL,
    "head_size": (1, 40, 129, 200, 256),
    "value_size": (129, 256, 1000),
    "chunk_len": ("default", 16, 32),
    "num_threads": ("default", 256, 384),
}
# Where warp groups take all of them, and keys that nothing else takes.
GATED_GROUP_AXES = {
    **GATED_SCAN_AXES,
    "head_size": (1, 40, 129, 256, 257, 512, 1000, 1024),
    "arch": ("sm_90",),
    "chunk_len": ("default", 64),
    "num_threads": ("default", 384),
}
# The two longest axes decide different things; their pairs alone would double the sample.
UNPAIRED = {"head_size", "arch"}


def sample(axes):
    """Rows in which any two values of different axes meet, but for UNPAIRED; the same rows every time."""
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(axes, 2)
        if {a, b} != UNPAIRED
        for x in axes[a]
        for y in axes[b]
    }
    rng, rows = random.Random(0), []
    while pairs:
        must = dict(min(pairs, key=str))
        candidates = [{axis: must.get(axis, rng.choice(x)) for axis, x in axes.items()} for _ in range(60)]
        best = max(candidates, key=lambda row: len(pairs.intersection(itertools.combinations(row.items(), 2))))
        pairs -= set(itertools.combinations(best.items(), 2))
        rows.append(best)
    return rows


def first_shown(rows):
    """In every run as few as show every choice, the others with --full."""
    chosen, unseen = [], {choice for row in rows for choice in row.items()}
    while unseen:
        chosen.append(max(rows, key=lambda row: len(unseen.intersection(row.items()))))  # the first of those with most
        unseen -= set(chosen[-1].items())
    return [pytest.param(row, marks=() if row in chosen else pytest.mark.full) for row in rows]


def in_turn(axes):
    """The rows of `sample`: each choice in every run, any two with --full."""
    return first_shown(sample(axes))


def in_two_types(rows):
    """Rows with each of the 16 bit types behind them: in every run one of both, by turns, and the other with --full."""
    return [
        pytest.param(*row, dtype, marks=() if (place + number) % 2 == 0 else pytest.mark.full)
        for place, row in enumerate(rows)
        for number, dtype in enumerate(("bf16", "fp16"))
    ]


def name(row):
    return "-".join(str(value).removeprefix("torch.").replace(" ", "_") for value in row.values())


def whole_product(axes):
    """Op x direction x dtype x head size x architecture; the other choices take turns."""
    first = list(axes)[:5]
    rng = random.Random(0)
    return [
        {axis: values[first.index(axis)] if axis in first else rng.choice(x) for axis, x in axes.items()}
        for values in itertools.product(*(axes[axis] for axis in first))
    ]


def all_of(axes):
    """The rows of `in_turn`, and with --full the whole product."""
    return [*in_turn(axes), *(pytest.param(row, marks=pytest.mark.full) for row in whole_product(axes))]


def compile_row(row, backend="recurrent"):
    decay = row["decay"]
    more = {} if row["w_dtype"] == "like the rest" else {"t_w": "fp32"}
    if row["op"] == "linear_attention":
        decay, more = None, {}
    if row.get("chunk_len", "default") != "default":
        more["chunk_len"] = row["chunk_len"]
    if row.get("num_threads", "default") != "default":
        more["num_threads"] = row["num_threads"]
    if "state" in row and row["direction"] == "forward":
        more["t_state"] = row["state"]
    return rwkv_jit.specialize(
        row["op"], row["head_size"], None if row["value_size"] == "like K" else row["value_size"], row["dtype"],
        row["arch"], row["direction"], backend, decay, state_layout=row["state_layout"], **more,
    )  # fmt: skip


def problem_of(row, backend="large", **more):
    """The problem of a row whose chunk_len is resolved."""
    dtype, value_size = str(row["dtype"]).removeprefix("torch."), row["value_size"]
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    return problem(
        row["op"], dtype, row["head_size"], None if value_size == "like K" else value_size, row["arch"],
        backend=backend, decay="none" if row["op"] == "linear_attention" else row["decay"],
        state_layout=row["state_layout"], types={"w": "fp32"} if row["w_dtype"] == "fp32" else (),
        **{"state_type": row["state"], **more},
    )  # fmt: skip


def of_algorithm(direction, *given):
    """The kernels of the algorithm itself for some problems, each once."""
    schedules = [getattr(directions.algorithm(each), direction)(each).requests(each.gpu) for each in given]
    return {
        kernel.memory_key(request): request
        for request in itertools.chain(*schedules)
        if request.template.name not in ("sum_rows", "sum_buffers", "copy_states")
    }.values()


def check_all(made, row):
    """Kernels of a direction: what a launch asks for, of which a static_assert says that it is what the kernel has."""
    backward = row["direction"] == "backward"
    for request, found in zip(made, kernel.get_all([*made]), strict=True):
        assert (found.name, found.parameters) == (request.template.name, request.parameters)
        check(found, row, found.name, request.arch)
        assert found.shared_bytes == found.parameters["SHARED_BYTES"]
        assert found.parameters.get("BACKWARD", backward) == backward


def check(found, row, entry=None, arch=None):
    entry = entry or f"{OPS[row['op']].stem}_{row['direction']}"
    assert entry in found.resources
    assert 0 < found.registers <= 255
    limit = 48 * 1024 if "recurrent" in found.name else Gpu(row["arch"]).shared_limit
    assert 0 < found.shared_bytes <= limit
    assert (found.arch, found.target) == (arch or row["arch"],) * 2
    assert f"constexpr int HEAD_SIZE = {row['head_size']};" in found.source


# What tells apart the ops that share templates.
VARIANTS = {
    "wkv5": {"BONUS": "true", "CONSTANT_DECAY": "true"},
    "wkv6": {"BONUS": "true", "CONSTANT_DECAY": "false"},
    "gla": {"BONUS": "false", "CONSTANT_DECAY": "false"},
    "linear_attention": {"BONUS": "false", "CONSTANT_DECAY": "false", "DECAY": "Decay::none"},
}


def check_variant(found, op, has_constant_decay):
    """The source says which op it is, and as much of that as the kernel asks for."""
    for parameter, value in VARIANTS[op].items():
        line = f"constexpr {'auto' if '::' in value else 'bool'} {parameter} = {value};"
        assert (line in found.source) == (parameter != "CONSTANT_DECAY" or has_constant_decay)
    assert ("Decay::none;" in found.source) == (op == "linear_attention")


@pytest.mark.parametrize("row", all_of(AXES), ids=name)
def test_recurrent_kernels(row):
    op, direction, found = row["op"], row["direction"], compile_row(row)
    check(found, row)
    assert found.name == f"{OPS[op].stem}_recurrent_{direction}"
    if op in VARIANTS:
        check_variant(found, op, direction == "backward")


@pytest.mark.anew
def test_forwards_of_a_constant_decay_and_of_one_a_token_are_one_kernel():
    five, six = (rwkv_jit.specialize(op, 8, dtype=torch.float32, arch="sm_80") for op in ("wkv5", "wkv6"))
    assert five.cubin == six.cubin
    assert six.origin == "memory"


def compile_if_it_fits(row):
    """Where an architecture has too little shared memory the rule says so, and there is nothing to compile."""
    try:
        return compile_row(row, "chunked")
    except UnsupportedConfigError as error:
        assert re.search("backend: 'chunked' needs .* bytes of shared memory", str(error))  # noqa: PT017
        assert Gpu(row["arch"]).shared_limit < 200_000
        return None


@pytest.mark.parametrize("row", all_of(CHUNKED_AXES), ids=name)
def test_chunked_kernels(row):
    keys, values = row["head_size"], row["head_size"] if row["value_size"] == "like K" else row["value_size"]
    if found := compile_if_it_fits(row):
        is_whole = keys % 64 == values % 64 == 0 and keys <= values
        of_groups = row["direction"] == "backward" and row["arch"] == "sm_90" and is_whole
        in_groups = of_groups and found.parameters["CHUNK_LEN"] == 32
        assert found.name == ("wkv7_group_backward" if in_groups else f"wkv7_chunked_{row['direction']}")
        check(found, row, arch="sm_90a" if in_groups else None)


@pytest.mark.parametrize("row", all_of(GATED_AXES), ids=name)
def test_chunked_kernels_that_ops_share(row):
    forward = row["direction"] == "forward"
    if found := compile_if_it_fits(row):
        in_groups = found.name == "gla_group_backward"
        check(found, row, "gla_scan" if forward else "gla_backward", "sm_90a" if in_groups else None)
        assert found.name in (("gla_scan",) if forward else ("gla_chunked_backward", "gla_group_backward"))
        assert not in_groups or (row["op"], row["arch"]) == ("linear_attention", "sm_90")
        assert found.shared_bytes == found.parameters["SHARED_BYTES"]
        check_variant(found, row["op"], not forward)


@pytest.mark.parametrize("row", [*all_of(GATED_SCAN_AXES), *all_of(GATED_GROUP_AXES)], ids=name)
def test_kernels_for_large_heads_that_ops_share(row):
    """All kernels of a direction, for many and few heads."""
    direction, arch = row["direction"], row["arch"]
    found, backward = compile_row(row, "split"), direction == "backward"
    threads = None if row["num_threads"] == "default" else row["num_threads"]
    length = found.parameters["CHUNK_LEN"]
    default = 64 if arch == "sm_90" and threads != 256 else 32
    assert length == (default if row["chunk_len"] == "default" else row["chunk_len"])
    in_groups = arch == "sm_90" and length == 64 and threads != 256
    made = of_algorithm(
        direction,
        *(problem_of(row, chunk_len=length, num_threads=threads, few_heads=few_heads) for few_heads in (False, True)),
    )
    if in_groups:
        names = {"gla_group_scan", "gla_group_key_gradients" if backward else "gla_prepare"}
    else:
        names = {"gla_scan", *["gla_key_gradients"] * backward}
    assert {request.template.name for request in made} == names
    assert found.parameters in [request.parameters for request in made]
    check_all(made, row)
    assert found.parameters["NUM_THREADS"] == (threads or found.parameters["NUM_THREADS"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_80"}, "takes keys above 256 on sm_90 with chunk_len=64 alone, got 512 on sm_80 with"),
        ({"chunk_len": 32}, "takes keys above 256 on sm_90 with chunk_len=64 alone, got 512 on sm_90 with"),
        ({"num_threads": 512}, "num_threads must be 384 at head sizes 512 and 256, got 512"),
    ],
)
def test_keys_that_only_warp_groups_take_are_refused_elsewhere(changes, message, direction):
    row = sample(GATED_GROUP_AXES)[0] | {"head_size": 512, "value_size": 256, "direction": direction}
    with pytest.raises(UnsupportedConfigError, match=message):
        compile_row(row | {"chunk_len": "default", "num_threads": "default"} | changes, "split")
    assert cache.entries() == []


def scan_of_threads(sizes, threads, direction):
    given = problem("gla", K=sizes[0], V=sizes[1], backend="large", chunk_len=32, num_threads=threads)
    return requests(direction, given)["gla_scan"]


def has_scan(row):
    try:
        return scan_of_threads(**row)
    except UnsupportedConfigError:
        return None


THREADS_ROWS = [
    row
    for sizes in ((7, 20), (64, 64), (40, 100), (128, 128), (256, 512))
    for threads in (64, 96, 160, 256, 512)
    for direction in ("forward", "backward")
    if has_scan(row := {"sizes": sizes, "threads": threads, "direction": direction})
]


def get_scan_of_threads(**row):
    assert kernel.get(scan_of_threads(**row)).parameters["NUM_THREADS"] == row["threads"]


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize("row", THREADS_ROWS, ids=name)
def test_scan_admits_every_number_of_threads(row):
    """What the rule in Python admits the template admits too."""
    get_scan_of_threads(**row)


@pytest.mark.parametrize("row", first_shown(random.Random(0).sample(THREADS_ROWS, len(THREADS_ROWS))), ids=name)
def test_scan_has_a_kernel_for_every_number_of_threads(row):
    get_scan_of_threads(**row)


@pytest.mark.parametrize("row", all_of(SCAN_AXES), ids=name)
def test_kernels_for_large_heads(row):
    """All kernels of a direction, for many and few heads, and those of a number of threads."""
    try:
        found = compile_row(row, "split")
    except UnsupportedConfigError as error:
        assert "backend: 'split' needs more shared memory" in str(error)  # noqa: PT017
        assert (row["arch"], row["chunk_len"]) not in {(arch, 32) for arch in ("sm_80", "sm_90")}
        return
    length, direction = found.parameters["CHUNK_LEN"], row["direction"]
    in_groups = row["arch"] == "sm_90" and length == 64
    assert (found.name, found.arch) == (("wkv7_group_scan", "sm_90a") if in_groups else ("wkv7_scan", row["arch"]))
    few, many = (problem_of(row, chunk_len=length, few_heads=few_heads) for few_heads in (True, False))
    made = [*of_algorithm(direction, many, few)]
    others = {"forward": {"wkv7_prepare"}, "backward": {"wkv7_token_gradients", "wkv7_key_gradients"}}[direction]
    if direction == "backward" and row["decay"] != "sigmoid":
        others = {*others, "wkv7_key_gradients_by_halves"}
    assert {request.template.name for request in made} == {found.name, *others}
    assert found.parameters in [request.parameters for request in made]
    if in_groups:
        for threads in (256, 128, 64):
            with contextlib.suppress(UnsupportedConfigError):
                of_threads = of_algorithm(direction, many._replace(num_threads=threads))
                assert {request.arch for request in of_threads if request.template.name == "wkv7_scan"} == {"sm_90"}
                made += of_threads
                break
    check_all(made, row)


# Op, head and value size, and the direction in every run: slabs of channels that two groups share evenly and not, rows
# that come in blocks of 64 and 32, value rows that end within a block and within a piece.
LARGE_IN_GROUPS = [
    ("wkv7", 1, 129, "backward"), ("wkv7", 129, 129, "backward"), ("wkv7", 256, 256, "forward"),
    ("wkv7", 300, 65, "backward"), ("wkv7", 512, 512, "forward"), ("wkv7", 700, 64, "backward"),
    ("wkv7", 1024, 1024, "backward"), ("wkv5", 256, 512, "forward"), ("wkv6", 256, 512, "forward"),
    ("gla", 256, 512, "backward"), ("gla", 300, 65, "backward"), ("gla", 512, 512, "forward"),
    ("linear_attention", 256, 512, "backward"), ("linear_attention", 700, 64, "forward"),
]  # fmt: skip
# What --full has beside them: the other directions, and sizes whose like the rows of GATED_GROUP_AXES have.
OTHERS_IN_GROUPS = [
    (*sizes, direction)
    for sizes in (
        *(row[:3] for row in LARGE_IN_GROUPS), ("wkv6", 129, 129), ("gla", 1, 129), ("gla", 1024, 1024)
    )
    for direction in ("forward", "backward")
    if (*sizes, direction) not in LARGE_IN_GROUPS
]  # fmt: skip
CHUNKED_IN_GROUPS = [
    ("wkv7", 64, 64), ("wkv7", 64, 128), ("wkv7", 128, 128), ("linear_attention", 128, 128),
    ("linear_attention", 72, 104), ("linear_attention", 96, 128), ("linear_attention", 120, 112),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "head_size", "value_size", "direction", "dtype"),
    [
        *in_two_types(LARGE_IN_GROUPS),
        *(
            pytest.param(*row, dtype, marks=pytest.mark.full)
            for row, dtype in itertools.product(OTHERS_IN_GROUPS, ("bf16", "fp16"))
        ),
    ],
)
def test_products_of_warp_groups_do_not_wait_for_each_other(op, head_size, value_size, direction, dtype):
    decay = {"wkv7": "sigmoid", "linear_attention": "none"}.get(op, "log")
    made = of_algorithm(
        direction,
        *(
            problem(
                op, dtype, head_size, value_size, backend="large", chunk_len=64, decay=decay, few_heads=few_heads,
                types={"w": "fp32"} if op == "wkv7" else (),
            )
            for few_heads in (False, True)
        ),
    )  # fmt: skip
    in_groups = [request for request in made if request.arch == "sm_90a"]
    if op == "wkv7":
        wanted = {"wkv7_group_scan"}
    else:
        wanted = {"gla_group_scan", "gla_prepare" if direction == "forward" else "gla_group_key_gradients"}
        assert len(in_groups) == len(made)
    assert {request.template.name for request in in_groups} == wanted
    kernel.get_all(in_groups)


@pytest.mark.parametrize(("op", "head_size", "value_size", "dtype"), in_two_types(CHUNKED_IN_GROUPS))
def test_products_of_the_chunked_backward_do_not_wait_for_each_other(op, head_size, value_size, dtype):
    given = problem(
        op, dtype, head_size, value_size, backend="chunked", chunk_len=32, types={"w": "fp32"} if op == "wkv7" else (),
        state_layout="kv" if dtype == "bf16" else "vk",
    )  # fmt: skip
    stem = OPS[op].stem
    backward = requests("backward", given)[f"{stem}_group_backward"]
    for found in kernel.get_all([backward, *requests("forward", given).values()]):
        assert found.shared_bytes == found.parameters["SHARED_BYTES"]


PRODUCTS = """
extern "C" __global__ void fill(float* x) {
    float s[4] = {};
    const unsigned long long tile = SIZE;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int i = 0; i < 2; ++i) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                     : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(tile));
        BETWEEN
    }
    asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    *x = s[0];
}
"""


@pytest.mark.parametrize("between", ["", "s[0] += 1.0f;"])
def test_products_that_wait_for_each_other_are_seen(tiny, between):
    request = tiny(arch="sm_90a", text=PRODUCTS.replace("BETWEEN", between))
    with pytest.raises(AssertionError, match="instructions are serialized") if between else contextlib.nullcontext():
        kernel.get(request)


def of_segments(template, op, row):
    """A kernel of segments, of a row with sizes, architecture and direction, and maybe types and decay."""
    keys, values = row["sizes"]
    given = problem(
        op, row.get("dtype", "bf16"), keys, values, row["arch"], backend="segments",
        decay="none" if op == "linear_attention" else row.get("decay"), chunk_len=row.get("chunk_len", 16),
        types={"w": row["w_dtype"]} if "w_dtype" in row else (), is_packed=row["ragged"],
    )  # fmt: skip
    return requests("backward" if row["backward"] else "forward", given)[template]


JOIN_AXES = {
    "sizes": ((1, 33), (40, 40), (64, 64), (100, 56), (128, 128)),
    "arch": CHUNKED_AXES["arch"],
    "backward": (False, True),
    "ragged": (False, True),
}


@pytest.mark.parametrize("row", in_turn(JOIN_AXES), ids=name)
@pytest.mark.parametrize("op", ["wkv7", "gla"])
def test_kernel_that_joins_segments(op, row):
    backward = row["backward"]
    found = kernel.get(of_segments(f"{op}_join", op, row))
    assert f"{op}_join" in found.resources
    assert (found.shared_bytes > 0) == (op == "wkv7")
    assert found.shared_bytes <= 48 * 1024
    assert f"constexpr bool BACKWARD = {str(backward).lower()};" in found.source


SEGMENT_AXES = {
    "op": ("wkv7",),
    "sizes": ((1, 33), (7, 7), (40, 40), (64, 64), (64, 96), (100, 56), (96, 96), (128, 128)),
    "arch": CHUNKED_AXES["arch"],
    "dtype": ("bf16", "fp16"),
    "w_dtype": ("bf16", "fp32"),
    "decay": ("raw", "sigmoid", "log", "direct"),
    "chunk_len": (16, 32),
    "backward": (False, True),
    "ragged": (False, True),
}
GATED_SEGMENT_AXES = SEGMENT_AXES | {
    "op": DIAGONAL,
    "sizes": (*SEGMENT_AXES["sizes"], (128, 64), (64, 20)),
    "chunk_len": (16,),  # they have one of their own
}


@pytest.mark.parametrize("row", [*in_turn(SEGMENT_AXES), *in_turn(GATED_SEGMENT_AXES)], ids=name)
def test_kernel_of_segments(row):
    template = f"{OPS[row['op']].stem}_segment"
    found = kernel.get(of_segments(template, row["op"], row))
    assert template in found.resources
    assert 0 < found.registers <= 255
    if row["op"] == "wkv7":
        assert found.parameters["SHARED_BYTES"] <= Gpu(row["arch"]).shared_limit
    else:
        assert 0 < found.shared_bytes <= 48 * 1024
        check_variant(found, row["op"], has_constant_decay=False)


# ---- what is around the kernels of an algorithm ------------------------------------------------------------------

TYPES = ("fp32", "bf16", "fp16")
NARROWING = "find_largest", "narrow_again", "narrow_as_they_are", "narrow_rows"
ARCHS = [pytest.param(arch, marks=() if arch == "sm_80" else pytest.mark.full) for arch in CHUNKED_AXES["arch"]]


def check_small(steps, arch):
    made = kernel.get_all([step.request(Gpu(arch)) for step in steps])
    for step, found in zip(steps, made, strict=True):
        assert list(found.resources) == [step.entry]
        assert found.parameters == step.parameters
    return made


@pytest.mark.parametrize("arch", ["sm_75", *ARCHS])
def test_kernel_that_sums_rows(arch):
    made = check_small([common.sum_rows("rows", "sums", 1, 1, 1, storage) for storage in TYPES], arch)
    assert len({found.source for found in made}) == len(TYPES)


@pytest.mark.parametrize("sizes", [(64, 64), (1, 33), (1000, 136)])
@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_that_copies_states_of_every_kind_to_every_other(arch, sizes):
    given = problem("wkv7", K=sizes[0], V=sizes[1])
    kinds = [*itertools.product(TYPES, ("vk", "kv"))]
    pairs = [*itertools.product(kinds, kinds)]
    if sizes != (64, 64):  # the others in turn
        pairs = [(kinds[place], kinds[-1 - place]) for place in range(len(kinds))]
    check_small(
        [common.copy_states(given, "a", "b", a_type, b_type, a, b) for (a_type, a), (b_type, b) in pairs], arch
    )  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_75", *ARCHS])
def test_kernels_around_ragged_segments(arch):
    given = problem(
        "wkv7", "bf16", K=64, arch=arch, backend="segments", chunk_len=16, is_packed=True, has_final_state=True,
    )  # fmt: skip
    steps = [step for step in directions.forward(given).launches if step.template in ("cut_sequences", "copy_states")]
    _, copying = steps
    assert copying.parameters["RAGGED"]
    check_small(steps, arch)


NARROW_AXES = {"sizes": (("wkv7", 64), ("wkv5", 7), ("linear_attention", 100)), "dtype": ("fp32", "bf16")}


@pytest.mark.parametrize("row", in_turn(NARROW_AXES), ids=name)
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_that_narrow_rows(arch, row):
    """Of inputs, results, states of two types and sums of sequences, in both directions."""
    op, size = row["sizes"]
    given = problem(
        op, row["dtype"], K=size, arch=arch, backend="chunked", chunk_len=16, state_type="bf16", training=True,
        has_initial_state=True, has_final_state=True, is_narrow=True,
    )  # fmt: skip
    steps = [step for way in (directions.forward, directions.backward) for step in way(given).launches]
    around = [step for step in steps if step.template == "narrow_rows"]
    made = kernel.get_all([step.request(Gpu(arch)) for step in around])
    assert {step.entry for step in around} == set(NARROWING)
    for found in made:
        assert set(found.resources) == set(NARROWING)
    assert len({found.source for found in made}) > 8


# Architectures, decays, state types and geometries that the rows above show of other templates only.
# Template, op, head size, architecture, decay.
LEFT_OUT = [
    ("gla_group_key_gradients", "wkv5", 136, "sm_90", "raw"),
    ("gla_join", "gla", 8, "compute_80", "log"),
    ("gla_key_gradients", "gla", 136, "compute_80", "log"),
    ("gla_recurrent_backward", "linear_attention", 40, "sm_80", None),
    ("gla_recurrent_backward", "linear_attention", 264, "sm_90", None),
    ("gla_recurrent_forward", "linear_attention", 40, "sm_80", None),
    ("gla_recurrent_forward", "gla", 264, "sm_80", "log"),
    ("gla_recurrent_forward", "wkv6", 8, "compute_80", "direct"),
    ("gla_scan", "wkv6", 8, "compute_80", "direct"),
    ("gla_segment", "gla", 8, "compute_80", "log"),
    ("wkv7_chunked_backward", "wkv7", 8, "compute_80", "raw"),
    ("wkv7_chunked_forward", "wkv7", 8, "sm_90", "log"),
    ("wkv7_group_scan", "wkv7", 136, "sm_90", "direct"),
    ("wkv7_group_scan", "wkv7", 136, "sm_90", "log"),
    ("wkv7_join", "wkv7", 8, "compute_80", "raw"),
    ("wkv7_key_gradients", "wkv7", 136, "compute_80", "raw"),
    ("wkv7_prepare", "wkv7", 136, "compute_80", "raw"),
    ("wkv7_recurrent_backward", "wkv7", 4, "sm_75", "sigmoid"),
    ("wkv7_recurrent_backward", "wkv7", 8, "sm_80", "log"),
    ("wkv7_recurrent_backward", "wkv7", 136, "sm_90", "direct"),
    ("wkv7_recurrent_forward", "wkv7", 4, "sm_75", "sigmoid"),
    ("wkv7_recurrent_forward", "wkv7", 8, "sm_80", "raw"),
    ("wkv7_recurrent_forward", "wkv7", 136, "compute_80", "raw"),
    ("wkv7_scan", "wkv7", 136, "compute_80", "raw"),
    ("wkv7_segment", "wkv7", 8, "compute_80", "raw"),
    ("wkv7_token_gradients", "wkv7", 136, "compute_80", "raw"),
]


@pytest.mark.parametrize(("template", "op", "head_size", "arch", "decay"), LEFT_OUT)
def test_kernel_of_a_call(template, op, head_size, arch, decay):
    """The last one of that template: those of few heads and of the backward come after the others."""
    of_call = torch.bfloat16, arch
    more = decay, None, None, torch.float16, None
    *_, request = [
        request
        for direction in ("forward", "backward")
        for request in ahead_requests.call_requests(ahead_requests.Calls(op, head_size, *of_call, direction, *more))
        if request.template.name == template
    ]
    found = kernel.get(request)
    assert found.name == template
    if arch.startswith("compute_"):
        assert f".target {arch.replace('compute', 'sm')}" in found.ptx
    else:
        assert 0 < found.registers <= 255


@pytest.mark.parametrize(
    ("axes", "least", "most"),
    [
        (AXES, 40, 80),
        (CHUNKED_AXES, 24, 40),
        (SCAN_AXES, 24, 40),
        (GATED_AXES, 32, 48),
        (GATED_SCAN_AXES, 20, 40),
        (GATED_GROUP_AXES, 20, 40),
    ],
)
def test_sample_is_the_same_every_time_and_holds_every_value(axes, least, most):
    rows = sample(axes)
    assert rows == sample(axes)
    assert least <= len(rows) <= most
    assert [each.values[0] for each in in_turn(axes)] == rows
    always = [each.values[0] for each in in_turn(axes) if not each.marks]
    assert 2 * len(always) <= len(rows)
    for axis, values in axes.items():
        assert {row[axis] for row in always} == set(values)
