"""Schedules: who writes and reads what, in every launch of every algorithm, and how their blocks are cut."""

import contextlib
import functools
import itertools
import math
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import problem, requests

from rwkv_jit.call import plan, rule
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.launch import Value
from rwkv_jit.schedules import common, delta_chunked, delta_large, directions, segments
from rwkv_jit.schedules.problem import BYTES, LARGEST_DECAY, STATE
from rwkv_jit.schedules.schedule import Pause, Step, Zero, offsets
from rwkv_jit.schedules.table import OPS

DIAGONAL = [name for name, op in OPS.items() if op.family == "diagonal"]
WITH_HEADS = ["wkv7", *DIAGONAL]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_80")


# ---- who writes and reads what -----------------------------------------------------------------------------------


class Bound(NamedTuple):
    """A launch: its step, and what its kernel reads alone and what it may write, by the names of the schedule."""

    step: Step | Zero
    reads: set
    writes: set


@pytest.fixture(scope="module")
def bind():
    """Bind a schedule to tensors that have no memory, as a call does; return its launches."""

    class Recorded(NamedTuple):
        kernel: object
        entry: str
        device: object
        grid: tuple
        block: tuple
        arguments: list
        shared_bytes: int
        overlaps: bool

    def load(*wanted):
        return tuple(
            [
                SimpleNamespace(
                    name=x.template.name, template=x.template, parameters=x.parameters, function=lambda *_: 0
                )
                for x in several
            ]
            for several in wanted[:2]
        )

    def bound(schedule, problem, arrays, kept=None):
        made = plan.Plan(schedule, problem, arrays, kept)
        names = {index: name for name, index in made._places.items()}
        launches = []
        steps = [
            step for step in schedule.steps
            if isinstance(step, Step) or (isinstance(step, Zero) and made._places.get(step.buffer))
        ]  # fmt: skip
        bound_steps = [x for part in made._launches for x in part.steps]
        for step, launch in zip(steps, bound_steps, strict=True):
            if isinstance(step, Zero):
                launches.append(Bound(step, set(), {step.buffer}))
                continue
            reads, writes = set(), set()
            declared = launch.kernel.template.arguments(launch.entry)
            for argument, (_, x) in zip(declared, launch.arguments, strict=True):
                if isinstance(x, Value):
                    is_read_alone = re.search(
                        rf"\bconst \w+\* __restrict__ {argument.name}\b", launch.kernel.template.body
                    )
                    (reads if is_read_alone else writes).add(names[x.place])
            there = {name for name in names.values() if arrays.get(name, 0) is not None}
            launches.append(Bound(step, reads & there, writes & there))
        return launches

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "Launch", Recorded)
        patched.setattr(plan.kernel, "get_most", load)
        occupancy = SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda *_: 2)
        patched.setattr(plan.cuda, "driver", lambda: occupancy)
        patched.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        for name, value in (("validate", None), ("capturing", False), ("multiprocessors", 132)):
            patched.setattr(plan.tensors, name, lambda *_, value=value: value)
        yield bound


def arrays_of(p, direction):
    """The tensors of a call, as `Known` passes them."""

    def empty(shape, storage="fp32"):
        return torch.empty(shape, dtype=plan.DTYPES[storage], device="meta")

    named = {name: empty(p.shape(name), p.types[name]) for name in p.op.names}
    named["initial_state"] = empty(p.state_shape, p.state_type) if p.has_initial_state else None
    named["cu_seqlens"] = torch.empty(p.N + 1, dtype=torch.int64, device="meta") if p.is_packed else None
    if direction == "backward":
        named["dy"] = empty([getattr(p, dim) for dim in p.op.output], p.types[p.op.names[-1]])
        named["grad_final_state"] = empty(p.state_shape, p.state_type) if p.has_final_state else None
        named["saved"] = empty([sum(directions.kept(p).values()) // 4])
    return named


def check_flow(launches, p, schedule, before, results):
    """Nothing is read before it is written, nothing is written in vain, and all results are.

    But what nobody wants may be written in vain beside what is wanted.
    """
    written, read = set(before), set()
    for step, reads, writes in launches:
        assert reads <= written, (step, reads - written)
        read |= reads | (writes & written)  # what is written again may be read by that kernel
        written |= writes
    assert set(results) <= written
    assert set(schedule.results) == set(results)
    own = {step.per_block[0] for step, *_ in launches if isinstance(step, Step) and step.per_block}
    passed = {name for name, size in schedule.scratch.items() if size} - own
    assert passed <= read or p.wanted, passed - read
    assert passed <= written
    assert not schedule.kept or set(schedule.kept) <= written
    return read


# Threads of a multiprocessor, as the registers of a kernel allow: 65536 are 128 for each of 512 threads.
MOST_THREADS = {"wkv7_scan": 256, "wkv7_group_scan": 384, "gla_prepare": 768}


def check_blocks(p, schedule):
    """All blocks have the threads, the registers and the shared memory that they need."""
    for step in schedule.launches:
        threads, blocks = int(step.parameters["NUM_THREADS"]), int(step.parameters.get("BLOCKS_PER_SM", 1))
        shared = int(step.parameters.get("SHARED_BYTES", 0))
        assert min(step.grid) > 0, step
        assert 32 <= threads <= 1024
        assert shared <= p.gpu.shared_limit
        assert blocks * (shared + 1024) <= p.gpu.shared_per_multiprocessor
        assert blocks == 1 or 1 < blocks * threads <= MOST_THREADS.get(step.template, 512)
    assert schedule.launches[schedule.main]


@functools.cache
def check_names(template, names):
    """Check that a template has parameters of these names; thousands of launches ask for the same ones."""
    template.check(dict.fromkeys(names))


def check_problem(p, bind):
    forward, backward = directions.forward(p), directions.backward(p)
    assert forward.kept == (directions.kept(p) if p.training else {})
    assert all(size % 4 == 0 for size in forward.kept.values())
    if p.backend != "recurrent":  # the others read 16 bytes at once
        assert all(begin % 16 == 0 for begin in offsets(forward.kept.values()))
    given = {"cu_seqlens"} if p.is_packed else set()
    inputs = {*p.op.names, *given}
    check_blocks(p, forward)
    said = {
        "T_IO": p.types["v"], "T_W": p.types.get("w", "fp32"), "T_U": p.types.get("u", "fp32"), "DECAY": p.decay,
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "BONUS": "u" in p.op.names, "CONSTANT_DECAY": p.op.name == "wkv5",
    }  # fmt: skip
    if p.is_shard:
        del said["VALUE_SIZE"]  # what it does to unit states has as many rows as these
    for step in (*forward.launches, *backward.launches):
        made = step.request(p.gpu)
        check_names(made.template, tuple(made.parameters))
        made.template.render(made.parameters)
        assert made.parameters.items() >= {name: x for name, x in said.items() if name in made.parameters}.items()
    results = {"y"} | ({"final_state"} if p.has_final_state else set())
    results |= {"bias", "transition"} if p.is_shard else set()
    first = {"initial_state"} if p.has_initial_state else set()
    read = check_flow(bind(forward, p, arrays_of(p, "forward")), p, forward, inputs | first, results)
    assert inputs | first <= read
    if not p.training:
        return
    check_blocks(p, backward)
    last = {"dy"} | ({"grad_final_state"} if p.has_final_state else set())
    wanted = p.wanted or (*p.op.names, *first)
    results = {GRADIENT_OF_STATE if name == STATE else f"d{name}" for name in wanted}
    results |= {"bias"} if p.is_shard else set()
    kept = directions.kept(p)
    launches = bind(backward, p, arrays_of(p, "backward"), kept)
    read = check_flow(launches, p, backward, inputs | first | last | set(kept), results)
    if not p.wanted:
        assert given | last | set(kept) <= read  # the inputs themselves may be among what is kept
    elif kept or p.backend not in ("chunked", "segments"):  # else there are other kernels for the state alone
        every = p._replace(wanted=())
        in_all = bind(directions.backward(every), every, arrays_of(every, "backward"), kept)
        check_left(in_all, launches, directions.backward(every), backward, results)


GRADIENT_OF_STATE = "grad_initial_state"


def check_left(launches, left, full, partial, results):
    """Those launches of all gradients are left that the results depend on, and they take the same but for nothing."""
    needed, expected = set(results), []
    for step, reads, writes in reversed(launches):
        if writes & needed:
            expected.insert(0, step)
            if getattr(step, "template", "") == "sum_buffers":  # of which as many buffers are left as results
                several = {step.bind[f"rows{place}"] for place in range(5) if step.bind[f"sums{place}"] in results}
                reads, writes = reads & several, writes & results
            needed |= reads | writes
    assert [type(step) for step, *_ in left] == [type(step) for step in expected]
    places = [index for index, (step, *_) in enumerate(launches) if any(step is each for each in expected)]
    for (one, _, writes), other, place, before in zip(left, expected, places, [-1, *places], strict=False):
        assert before == place - 1 or not getattr(one, "overlaps", False)  # with the launch it was made for
        if isinstance(one, Zero):
            assert one == other
            continue
        if one.template == "sum_buffers":  # of the results that are left alone
            assert one.parameters == other.parameters
            assert writes == {x for place in range(5) if (x := other.bind[f"sums{place}"]) in results}
            continue
        same = {"bind": {}, "waits": False}
        assert one._replace(**same) == other._replace(**same)
        assert one.waits >= other.waits
        changed = {name for name in one.bind.keys() | other.bind.keys() if one.bind.get(name) != other.bind.get(name)}
        assert changed <= set(one.optional)
        assert all(one.bind[name] is None for name in changed)
        assert writes & (needed | set(results))
    main = full.launches[full.main]
    is_left = any(
        step.template == main.template and step.grid == main.grid for step, *_ in left if isinstance(step, Step)
    )
    assert partial.launches[partial.main].template == main.template or not is_left
    assert {step.buffer for step in partial.steps if isinstance(step, Zero)} <= partial.scratch.keys()
    assert partial.scratch.keys() - full.scratch.keys() <= full.results.keys() - set(results)
    # A result that is none any more has as many bytes as it had.
    sizes = {name: math.prod(x.shape) * BYTES[x.dtype] for name, x in full.results.items()} | dict(full.scratch)
    assert dict(partial.scratch).items() <= sizes.items()
    in_use = set().union(*(reads | writes for _, reads, writes in left))
    assert {name for name, size in partial.scratch.items() if size} <= in_use
    # The stream beside the call's is waited for before anything that followed it.
    owed = False
    for step in partial.launches:
        owed = (owed or step.is_beside) and not (step.waits and not step.is_beside)
        assert not owed or step.is_beside


# By the algorithm: sizes of heads, tokens, heads, and what a caller may have asked for.
SMALL, LARGE = st.integers(1, 128), st.sampled_from((1, 40, 129, 200, 256, 500, 1000, 1024))
CALLS = {
    "recurrent": (SMALL, st.integers(1, 70), ("recurrent",), ARCHS),
    "recurrent, large": (LARGE, st.integers(1, 70), ("recurrent", "auto"), ARCHS),
    "chunked": (SMALL, st.integers(1, 200), ("chunked", "auto"), ARCHS[1:]),
    "chunked, whole tiles": (st.sampled_from((64, 128)), st.just(96), ("chunked",), ("sm_90",)),
    "segments": (SMALL, st.sampled_from((2048, 4096)), ("split",), ("sm_80", "sm_90")),
    "segments, ragged": (SMALL, st.sampled_from((2049, 5001)), ("split",), ("sm_80", "sm_90")),
    "segments, packed": (SMALL, st.integers(2000, 5000), ("split",), ("sm_80", "sm_90")),
    "large": (LARGE, st.integers(1, 200), ("split",), ARCHS[1:]),
    "large, in parts": (LARGE, st.just(64 * 130), ("split",), ("sm_90",)),
}  # fmt: skip


@st.composite
def problems(draw, op, name):
    """The problem of a call that the rule lets through."""
    sizes, tokens, backends, archs = CALLS[name]
    named = OPS[op]
    K, V, T = draw(sizes), draw(sizes), draw(tokens)
    in_segments, backend = name.startswith("segments"), draw(st.sampled_from(backends))
    is_packed = name == "segments, packed" if in_segments else draw(st.booleans())
    multiprocessors = 132 if in_segments else draw(st.sampled_from((None, 132)))
    gpu = Gpu(draw(st.sampled_from(archs)), multiprocessors=multiprocessors)
    dtype = draw(st.sampled_from(("fp32", "bf16"))) if "recurrent" in name else draw(st.sampled_from(("fp16", "bf16")))
    B, N = (1, draw(st.sampled_from((1, 3)))) if is_packed else (draw(st.sampled_from((1, 2))),) * 2
    H, training = draw(st.sampled_from((1, 2, 5))), draw(st.booleans())
    decay = "none" if named.decay == "none" else draw(st.sampled_from(("raw", "sigmoid", "log", "direct")))
    bound = draw(st.sampled_from((None, -0.6, -8.0)))
    types = {name: draw(st.sampled_from((dtype, "fp32"))) for name in named.wide if name in named.names}
    given = problem(
        op, dtype, K, V, B=B, T=T, H=H, N=N, decay=decay, types=types, training=training, is_packed=is_packed,
        state_type=draw(st.sampled_from(("fp32", dtype))), state_layout=draw(st.sampled_from(("vk", "kv"))),
        has_initial_state=draw(st.booleans()), has_final_state=draw(st.booleans()), backend=backend,
        checkpoint_interval=draw(st.sampled_from((1, 16, 64, 1000))), decay_bound=bound, longest=T, is_chosen=False,
    )  # fmt: skip
    try:
        given = rule.resolved(given._replace(gpu=gpu), lambda: rule.Known((), lambda place: True))
    except UnsupportedConfigError:
        assume(False)
    assert (given.backend == "segments") == in_segments or "large" in (name[:5], given.backend)
    if training and draw(st.booleans()):
        names = (*named.names, *([STATE] if given.has_initial_state else []))
        wanted = draw(st.one_of(st.just({names[-1]}), st.sets(st.sampled_from(names), min_size=1)))
        given = given._replace(
            wanted=tuple(name for name in names if name in wanted) if len(wanted) < len(names) else ()
        )
    return given


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("op", WITH_HEADS)
def test_all_that_is_read_is_written_before_and_all_that_is_written_is_read(op, name, bind):
    @settings(max_examples=8, derandomize=True, database=None)
    @given(problems(op, name))
    def check(p):
        check_problem(p, bind)

    check()


# ---- geometry ----------------------------------------------------------------------------------------------------

LIMITS = {"sm_80": 166912, "sm_86": 101376, "sm_87": 166912, "sm_89": 101376, "sm_90": 232448, "sm_90a": 232448,
          "sm_100": 232448, "sm_103": 232448, "sm_120": 101376, "sm_121": 101376, "compute_80": 166912}  # fmt: skip
SIZES = (1, 33, 64, 96, 128, 129, 200, 256, 500, 1024)


def of(direction, op, keys, values=None, arch="sm_90", backend="chunked", chunk_len=32, **more):
    """The kernels of a direction by the names of their templates."""
    return requests(direction, problem(op, "bf16", keys, values, arch, backend=backend, chunk_len=chunk_len, **more))


def the(direction, template, *given, **more):
    """The parameters of one of them."""
    return of(direction, *given, **more)[template].parameters


def call_of(op, keys, values, arch, **changes):
    """The problem of calls with gradients."""
    return problem(op, "bf16", keys, values, arch, **{"training": True, **changes})


@pytest.mark.parametrize("arch", LIMITS)
def test_shared_memory_that_a_block_may_have(arch):
    assert Gpu(arch).shared_limit == LIMITS[arch]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100"])
def test_blocks_have_what_they_need_at_every_size_that_is_taken(arch):
    seen = set()
    for op, keys, values in itertools.product(("wkv7", "wkv6"), SIZES, SIZES):
        for name, algorithm in directions.ALGORITHMS[OPS[op].family].items():
            for length in getattr(algorithm, "CHUNK_LENS", ()):
                if algorithm.why_not(call_of(op, keys, values, arch, chunk_len=length)) is not None:
                    continue
                for few_heads in (False, True):
                    p = problem(op, K=keys, V=values, few_heads=few_heads, backend=name, chunk_len=length)
                    p = p._replace(gpu=p.gpu._replace(arch=arch))
                    for schedule in (directions.forward(p), directions.backward(p)):
                        check_blocks(p, schedule)
                        seen |= {step.template for step in schedule.launches}
    in_groups = {"wkv7_group_backward", "wkv7_group_scan", "gla_group_scan", "gla_prepare", "gla_group_key_gradients"}
    assert {"wkv7_chunked_backward", "wkv7_scan", "wkv7_prepare", "gla_chunked_backward"} <= seen
    assert seen & in_groups == (in_groups if arch == "sm_90" else set())


@pytest.mark.parametrize("arch", LIMITS)
def test_default_chunk_is_the_longest_that_fits_in_both_directions(arch):
    for sizes in itertools.product((1, 7, 33, 64, 72, 96, 120, 128), repeat=2):
        chosen = delta_chunked.default_chunk_len(call_of("wkv7", *sizes, arch))
        fits = {length: delta_chunked.most_shared_bytes(*sizes, length) <= LIMITS[arch] for length in (16, 32)}
        assert chosen == (32 if fits[32] else 16)
        alone = delta_chunked.default_chunk_len(call_of("wkv7", *sizes, arch, training=False))
        assert alone == (chosen if max(sizes) <= 64 else 16)
        obstacle = delta_chunked.why_not(call_of("wkv7", *sizes, arch))
        assert (obstacle is None) == (fits[chosen] and -(-sizes[0] // 32) <= 2 * -(-sizes[1] // 32))


def test_threads_that_are_asked_for_are_those_of_the_forward():
    threads = [the(way, f"wkv7_chunked_{way}", "wkv7", 40, 64, num_threads=256)["NUM_THREADS"]
               for way in ("forward", "backward")]  # fmt: skip
    assert threads == [256, 128]


@pytest.mark.parametrize(("asked", "nearest"), [(1, 96), (32, 96), (100, 96), (120, 128), (511, 512), (5000, 512)])
def test_nearest_number_of_threads(asked, nearest):
    step, _ = directions.forward(problem("wkv7", K=80, backend="chunked", chunk_len=32, num_threads=asked)).launches
    assert delta_chunked.nearest(step, "num_threads", asked) == nearest
    assert delta_chunked.nearest(step, "num_threads", nearest) is None
    assert delta_chunked.nearest(step, "chunk_len", 32) is None


@pytest.mark.parametrize(
    ("op", "sizes", "forward", "backward"),
    [
        ("wkv6", (32, 32), (32, 64, 8), (64, 4)),
        ("wkv6", (64, 64), (64, 128, 4), (128, 2)),
        ("wkv6", (96, 96), (96, 96, 2), (192, 1)),
        ("wkv6", (128, 128), (128, 128, 2), (256, 1)),
        ("gla", (20, 33), (64, 128, 4), (128, 2)),
        ("linear_attention", (64, 64), (64, 128, 4), (128, 2)),
    ],
)
def test_geometry_of_the_diagonal_kernels_is_what_was_fastest(op, sizes, forward, backward):
    made = the("forward", "gla_scan", op, *sizes)
    assert (made["ROWS"], made["NUM_THREADS"], made["BLOCKS_PER_SM"]) == forward
    assert (made["CHUNK_LEN"], made["BACKWARD"]) == (32, False)
    made = the("backward", "gla_chunked_backward", op, *sizes)
    assert (made["NUM_THREADS"], made["BLOCKS_PER_SM"]) == backward
    assert "T_STATE" not in made


@pytest.mark.parametrize(("value_size", "rows"), [(1, 32), (33, 64), (128, 128), (129, 96), (257, 96), (512, 128)])
def test_value_rows_are_shared_evenly_between_blocks(value_size, rows):
    made = the("forward", "gla_scan", "gla", 64, value_size, arch="sm_80", backend="large")
    assert made["ROWS"] == rows
    assert made["NUM_THREADS"] >= 64


def test_threads_of_the_diagonal_forward_that_may_be_asked_for():
    for backend, sizes, least in (("chunked", (40, 40), 64), ("chunked", (128, 33), 128), ("large", (256, 512), 256)):
        for threads in (least, least + 32, 512):
            made = the("forward", "gla_scan", "wkv6", *sizes, backend=backend, num_threads=threads)
            assert made["NUM_THREADS"] == threads
        for threads in (32, least - 32, least + 16, 544):
            message = (
                f"num_threads must be a multiple of 32 from {least} to 512 at head sizes {sizes[0]} and {sizes[1]}"
            )
            with pytest.raises(UnsupportedConfigError, match=f"^{message}, got {threads}$"):
                of("forward", "wkv6", *sizes, backend=backend, num_threads=threads)


def test_what_was_tuned_goes_before_the_rule():
    tuned = {"forward_blocks": 3, "backward_blocks": 7}
    for op, names in (("wkv7", "wkv7_chunked_{}"), ("gla", "gla_{}")):
        for direction, blocks in (("forward", 3), ("backward", 7)):
            made = of(direction, op, 40, 64, **tuned)
            (main,) = [x for name, x in made.items() if name.startswith(names[:4])]
            assert main.parameters["BLOCKS_PER_SM"] == blocks
    assert the("forward", "wkv7_prepare", "wkv7", 256, backend="large", **tuned)["BLOCKS_PER_SM"] != 3


# ---- products of warp groups in the chunked backward -------------------------------------------------------------


IN_GROUPS = [
    ("wkv7", (64, 64), "sm_90", 32), ("wkv7", (64, 64), "sm_90a", 32), ("wkv7", (128, 128), "sm_90", 32),
    ("wkv7", (64, 128), "sm_90", 32), ("linear_attention", (128, 128), "sm_90", 32),
    ("linear_attention", (128, 128), "sm_90a", 32), ("linear_attention", (72, 104), "sm_90", 32),
]  # fmt: skip
NOT_IN_GROUPS = [
    ("wkv7", (128, 64), "sm_90", 32), ("wkv7", (64, 64), "sm_90", 16), ("wkv7", (64, 64), "sm_100", 32),
    ("wkv7", (64, 64), "compute_90", 32), ("wkv7", (64, 64), "sm_80", 32), ("wkv7", (40, 64), "sm_90", 32),
    ("wkv7", (64, 96), "sm_90", 32), ("wkv7", (32, 32), "sm_90", 32), ("linear_attention", (128, 128), "sm_90", 16),
    ("linear_attention", (128, 128), "sm_100", 32), ("linear_attention", (128, 128), "compute_90", 32),
    ("linear_attention", (128, 128), "sm_80", 32), ("linear_attention", (64, 128), "sm_90", 32),
    ("linear_attention", (128, 96), "sm_90", 32), ("linear_attention", (124, 128), "sm_90", 32),
    ("linear_attention", (128, 124), "sm_90", 32), ("gla", (128, 128), "sm_90", 32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "sizes", "arch", "chunk_len", "is_of_groups"),
    [*((*row, True) for row in IN_GROUPS), *((*row, False) for row in NOT_IN_GROUPS)],
)
def test_warp_groups_multiply_where_rows_fill_their_tiles(op, sizes, arch, chunk_len, is_of_groups):
    """Both directions agree; without a decay the backward's chunks are longer, and so the forward keeps less."""
    p = problem(op, K=sizes[0], V=sizes[1], arch=arch, B=3, T=100, H=2, backend="chunked", chunk_len=chunk_len)
    (backward,), (forward,) = requests("backward", p).values(), requests("forward", p).values()
    assert ("group" in backward.template.name) == is_of_groups
    assert (forward.arch, backward.arch) == (arch, "sm_90a" if is_of_groups else arch)
    assert forward.parameters["CHUNK_LEN"] == backward.parameters["CHUNK_LEN"] == chunk_len
    longest = 64 if is_of_groups and op == "linear_attention" else chunk_len
    assert forward.parameters.get("FOR_GROUPS", False) == (longest == 64)
    states = 3 * 2 * -(-100 // longest)
    assert directions.kept(p)["checkpoints"] == 2 * states * common.padded(sizes[0]) * common.padded(sizes[1])
    if is_of_groups:
        assert backward.parameters["SHARED_BYTES"] % 1024 == 0
        assert backward.parameters["NUM_THREADS"] == 2 * common.padded(sizes[1])
        assert backward.parameters["BLOCKS_PER_SM"] == (2 if sizes == (64, 64) else 1)


# ---- segments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "chunk_len", "threads", "blocks"),
    [
        ((64, 64), 32, 128, 4),
        ((128, 128), 16, 256, 2),
        ((96, 96), 16, 192, 2),
        ((1, 1), 32, 64, 8),
        ((7, 100), 32, 256, 2),
        ((128, 64), 16, 128, 3),
        ((64, 20), 16, 64, 6),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", DIAGONAL)
def test_kernels_of_diagonal_segments_have_chunks_of_their_own(op, direction, sizes, chunk_len, threads, blocks):
    made = of(direction, op, *sizes, backend="segments", chunk_len=64, T=4096)
    segment = made["gla_segment"]
    cut = [segment.parameters[name] for name in ("CHUNK_LEN", "NUM_THREADS", "BLOCKS_PER_SM")]
    assert cut == [chunk_len, threads, blocks]
    assert segment.parameters["BACKWARD"] == (direction == "backward")
    joins = made["gla_join"].parameters
    assert joins["NUM_THREADS"] - sizes[0] < joins["ROWS"] * sizes[0] <= joins["NUM_THREADS"]


@pytest.mark.parametrize("op", WITH_HEADS)
def test_chunked_kernels_that_run_over_segments_have_states_of_their_own(op):
    given = {"T": 4096, "state_type": "fp16", "state_layout": "kv", "has_initial_state": True}
    for direction in ("forward", "backward"):
        chunked, made = (of(direction, op, 40, 64, backend=name, **given) for name in ("chunked", "segments"))
        (name,) = chunked.keys() - {"sum_buffers", "copy_states"}
        state = {"T_STATE": "fp32"} if direction == "forward" else {}
        assert made[name].parameters == {**chunked[name].parameters, **state, "STATE_LAYOUT": "vk"}


@pytest.mark.parametrize("wanted", [(), ("k", STATE), ("r",), (STATE,)])
@pytest.mark.parametrize(("tokens", "heads", "count"), [(64, 2, 1), (4096, 2, 8), (4096, 300, 1), (64 * 9, 300, 1)])
@pytest.mark.parametrize("op", WITH_HEADS)
def test_shards_pause_once_it_is_known_what_they_do_to_any_state(op, tokens, heads, count, wanted, bind):
    p = problem(
        op, K=40, V=64, backend="segments", chunk_len=32, T=tokens, H=heads, B=2, training=True, is_shard=True,
        has_initial_state=True, has_final_state=True, state_layout="vk", wanted=wanted,
    )  # fmt: skip
    p = p._replace(gpu=p.gpu._replace(multiprocessors=132))
    assert segments.takes_shard(p)
    check_problem(p, bind)
    for schedule, known in ((directions.forward(p), ("bias", "transition")), (directions.backward(p), ("bias",))):
        place = [isinstance(step, Pause) for step in schedule.steps].index(True)
        before, after = schedule.steps[:place], schedule.steps[place + 1 :]
        assert {step.bind["last"] for step in before if "last" in getattr(step, "bind", {})} == set(known)
        assert after
        (cut,) = {step.grid[0] for step in schedule.launches if step.template.endswith("_segment")}
        assert cut == 2 * count * (1 if op == "wkv7" or count == 1 else 2)  # of 512 or 256 tokens and more
    assert not segments.takes_shard(p._replace(T=tokens + 16))
    assert not segments.takes_shard(p._replace(is_packed=True))


# ---- large heads with a delta term -------------------------------------------------------------------------------


def of_delta(direction, keys, values=None, arch="sm_90", chunk_len=64, **more):
    """The parameters of the scan, and its request."""
    made = of(direction, "wkv7", keys, values, arch, "large", chunk_len, **more)
    (request,) = [x for name, x in made.items() if name in ("wkv7_scan", "wkv7_group_scan")]
    return request.parameters, request


def legal_threads(keys, values, arch, chunk_len):
    legal = []
    for threads in range(16, 1040, 16):
        with contextlib.suppress(UnsupportedConfigError):
            of_delta("forward", keys, values, arch, chunk_len, num_threads=threads)
            legal.append(threads)
    return legal


@pytest.mark.parametrize(
    ("head_size", "channels"),
    [(1, 64), (64, 64), (65, 128), (129, 192), (193, 256), (257, 384), (385, 512), (512, 512), (513, 768), (769, 1024)],
)
def test_channels_are_slabs_that_warps_of_the_same_rows_share(head_size, channels):
    for few_heads in (False, True):
        made, _ = of_delta("forward", head_size, 200, "sm_80", 32, few_heads=few_heads)
        assert made["CHANNELS"] == channels
        assert made["VALUES"] == 256
        assert channels % (64 * made["KEY_WARPS"]) == 0
        assert channels // made["KEY_WARPS"] <= 256
        assert made["NUM_THREADS"] // 2 // made["KEY_WARPS"] in (32, 64)
        assert 2 <= made["STAGES"] <= 2 * (channels // 64 // made["KEY_WARPS"]) + 1


@pytest.mark.parametrize(
    ("direction", "heads", "changes", "few_rows", "count"),
    [
        ("forward", 8, {}, True, 4), ("backward", 8, {}, True, 4),
        ("forward", 9, {}, True, 1), ("backward", 9, {}, False, 4),  # 72 blocks of 32 rows, 36 of 64
        ("backward", 16, {}, False, 4), ("backward", 17, {}, True, 1), ("backward", 32, {}, True, 1),
        ("backward", 33, {}, False, 1), ("backward", 8, {"T": 64 * 127}, True, 1), ("backward", 8, {"T": 64}, True, 1),
        ("backward", 8, {"is_packed": True}, True, 1), ("backward", 4, {"K": 1024, "V": 1024}, True, 1),
        ("backward", 2, {"K": 1024, "V": 1024}, True, 4),
    ],
)  # fmt: skip
def test_scan_that_leaves_half_of_the_gpu_free_goes_on_in_parts(direction, heads, changes, few_rows, count):
    p = problem("wkv7", K=256, T=64 * 128, H=heads, backend="large", chunk_len=64)._replace(**changes)
    p = p._replace(gpu=Gpu("sm_90", multiprocessors=132))
    schedule = directions.forward(p) if direction == "forward" else directions.backward(p)
    scans = [step for step in schedule.launches if step.template == "wkv7_group_scan"]
    assert {step.parameters["VALUE_ROWS"] for step in scans} == {32 if few_rows or p.K > 512 else 64}
    assert len(scans) == count
    walks = [step.bind["walk"] for step in scans]
    assert [end for _, end in walks[:-1]] == [begin for begin, _ in walks[1:]]
    assert (walks[0][0], walks[-1][1]) == (0, p.slots(64))
    of_a_chunk = {"wkv7_prepare": 1, "wkv7_token_gradients": 1, "wkv7_key_gradients": p.K // 64}
    for template, blocks in of_a_chunk.items():
        of_template = [step for step in schedule.launches if step.template == template and not step.is_resident]
        parts_of_all = [(step.bind["first_chunk"], step.grid[0] // blocks) for step in of_template]
        covered = itertools.chain(*(range(first, first + length) for first, length in parts_of_all))
        assert not parts_of_all or sorted(covered) == [*range(p.slots(64))]


@pytest.mark.parametrize(("arch", "chunk_len"), [("sm_80", 32), ("sm_90", 32), ("sm_100", 64)])
def test_few_heads_make_smaller_blocks_or_more_warps_for_the_same_rows(arch, chunk_len):
    for size in (129, 192, 256, 384, 512):
        many, few = (of_delta("forward", size, None, arch, chunk_len, few_heads=x)[0] for x in (False, True))
        assert few["NUM_THREADS"] // few["KEY_WARPS"] < many["NUM_THREADS"] // many["KEY_WARPS"]
        assert few["KEY_WARPS"] >= many["KEY_WARPS"]


@pytest.mark.parametrize(
    ("head_size", "arch", "chunk_len", "legal"),
    [
        (192, "sm_90", 64, [64, 128, 384]),
        (256, "sm_90", 64, [128, 256, 384]),
        (256, "sm_90a", 64, [128, 256, 384]),
        (513, "sm_90", 64, [384]),
        (256, "sm_90", 32, [128, 256]),
        (1024, "sm_90", 32, [256]),
        (256, "sm_100", 64, [128, 256]),
        (256, "compute_90", 64, [128, 256]),
        (256, "sm_86", 32, [128, 256]),
    ],
)
def test_threads_of_the_scan_decide_alone_and_others_are_refused(head_size, arch, chunk_len, legal):
    assert legal_threads(head_size, head_size, arch, chunk_len) == legal
    message = (
        f"num_threads must be {' or '.join(map(str, legal))} at head size {head_size} and chunk_len={chunk_len} "
        f"on {arch}, got 96"
    )
    for direction in ("forward", "backward"):
        for threads in legal:
            one, other = (
                of_delta(direction, head_size, None, arch, chunk_len, num_threads=threads, few_heads=x)[0]
                for x in (False, True)
            )
            assert one == other
            assert one["NUM_THREADS"] == threads
        with pytest.raises(UnsupportedConfigError, match=f"^{message}$"):
            of_delta(direction, head_size, None, arch, chunk_len, num_threads=96)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "compute_90"])
@pytest.mark.parametrize("chunk_len", delta_large.CHUNK_LENS)
def test_which_scan_it_is_goes_by_architecture_chunk_and_threads(chunk_len, arch):
    """It is the same one in both directions, and all kernels of a call agree about what passes between them."""
    for sizes in ((256, 256), (500, 77), (40, 300)):
        for threads in (None, *legal_threads(*sizes, arch, chunk_len)):
            in_groups = arch in ("sm_90", "sm_90a") and chunk_len == 64 and threads in (None, 384)
            ways = [of(way, "wkv7", *sizes, arch, "large", chunk_len, num_threads=threads)
                    for way in ("forward", "backward")]  # fmt: skip
            name = "wkv7_group_scan" if in_groups else "wkv7_scan"
            assert [set(way) for way in ways] == [
                {"wkv7_prepare", name}, {name, "wkv7_token_gradients", "wkv7_key_gradients"}
            ]  # fmt: skip
            assert [way[name].parameters["BACKWARD"] for way in ways] == [False, True]
            assert {way[name].arch for way in ways} == {"sm_90a" if in_groups else arch}
            assert ways[0]["wkv7_prepare"].parameters["BY_LANES"] is in_groups
            several = [request.parameters for way in ways for request in way.values()]
            for shared in ("CHANNELS", "CHUNK_LEN", "HEAD_SIZE", "VALUE_SIZE", "VALUES"):
                assert len({x[shared] for x in several if shared in x}) == 1


@pytest.mark.parametrize(
    ("head_size", "value_size", "few_heads", "cut"),
    [
        (192, 192, False, (64, 1, 7)),
        (256, 256, False, (64, 2, 9)),
        (256, 256, True, (32, 1, 9)),
        (256, 64, False, (64, 1, 9)),
        (256, 65, False, (64, 2, 9)),
        (512, 512, False, (64, 2, 7)),
        (512, 512, True, (32, 1, 10)),
        (513, 513, False, (32, 1, 9)),
        (1024, 1024, False, (32, 1, 8)),
    ],
)
def test_value_rows_cluster_and_stages_of_warp_groups(head_size, value_size, few_heads, cut):
    for direction in ("forward", "backward"):
        made, _ = of_delta(direction, head_size, value_size, few_heads=few_heads)
        assert (made["VALUE_ROWS"], made["CLUSTER"], made["STAGES"]) == cut
        assert made["CHANNELS"] * made["VALUE_ROWS"] <= 512 * 64  # 128 registers of a thread, of two groups of warps
        assert -(-value_size // made["VALUE_ROWS"]) % made["CLUSTER"] == 0
        # The image of the state; the solution, values twice, and outputs; a stage has two tiles and two barriers.
        fixed = 2 * made["CHANNELS"] * made["VALUE_ROWS"] + 3 * 8192 + 8 * 16 * 2 * (made["VALUE_ROWS"] + 8)
        assert made["SHARED_BYTES"] == fixed + made["STAGES"] * (2 * 8192 + 16)


# ---- large heads without a delta term ----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("sizes", "arch", "chunk_len", "threads", "is_of_groups"),
    [
        ((256, 512), "sm_90", 64, None, True),
        ((256, 512), "sm_90a", 64, 384, True),
        ((40, 130), "sm_90", 64, None, True),
        ((1024, 1024), "sm_90", 64, 384, True),
        ((128, 130), "sm_90", 64, 128, False),
        ((256, 512), "sm_90", 64, 256, False),
        ((256, 512), "sm_90", 32, 384, False),
        ((256, 512), "sm_90", 16, None, False),
        ((256, 512), "sm_80", 64, None, False),
        ((256, 512), "sm_100", 64, None, False),
        ((256, 512), "compute_90", 64, None, False),
    ],
)
def test_which_kernel_walks_over_the_chunks(sizes, arch, chunk_len, threads, is_of_groups, direction):
    made = of(direction, "wkv6", *sizes, arch, "large", chunk_len, num_threads=threads)
    scan = made["gla_group_scan" if is_of_groups else "gla_scan"]
    assert scan.arch == ("sm_90a" if is_of_groups else arch)
    assert (scan.parameters["BACKWARD"], scan.parameters["T_STATE"]) == (direction == "backward", "fp32")
    others = {
        ("forward", True): {"gla_prepare"}, ("forward", False): set(), ("backward", False): {"gla_key_gradients"},
        ("backward", True): {"gla_group_key_gradients"},
    }  # fmt: skip
    assert made.keys() - {"sum_rows", "sum_buffers", scan.template.name} == others[direction, is_of_groups]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("threads", [128, 385, 512])
def test_keys_above_256_have_blocks_of_one_size(threads, direction):
    with pytest.raises(
        UnsupportedConfigError, match=f"^num_threads must be 384 at head sizes 257 and 64, got {threads}$"
    ):
        of(direction, "gla", 257, 64, backend="large", chunk_len=64, num_threads=threads)
    for legal in (None, 384):
        made = the(direction, "gla_group_scan", "gla", 257, 64, backend="large", chunk_len=64, num_threads=legal)
        assert made["NUM_THREADS"] == 384


@pytest.mark.parametrize(
    ("head_size", "few_heads", "cut"),
    [
        (1, False, (64, 8, 174208)),
        (64, True, (32, 8, 161920)),
        (256, False, (64, 8, 223360)),
        (256, True, (32, 8, 186496)),
        (257, False, (64, 7, 223344)),
        (512, False, (64, 4, 223296)),
        (512, True, (32, 8, 219264)),
        (513, False, (32, 8, 227456)),
        (1024, False, (32, 4, 219200)),
        (1024, True, (32, 4, 219200)),
    ],
)
def test_value_rows_and_stages_of_diagonal_warp_groups(head_size, few_heads, cut):
    for direction in ("forward", "backward"):
        given = {"backend": "large", "chunk_len": 64, "few_heads": few_heads}
        made = the(direction, "gla_group_scan", "wkv6", head_size, 300, **given)
        assert (made["VALUE_ROWS"], made["STAGES"], made["SHARED_BYTES"]) == cut


@pytest.mark.parametrize(
    ("op", "t_w", "blocks"),
    [("gla", "bf16", 3), ("gla", "fp32", 2), ("wkv6", "bf16", 2), ("wkv6", "fp32", 2), ("wkv5", "bf16", 2)],
)
def test_blocks_that_prepare_are_three_where_registers_allow_it(op, t_w, blocks):
    made = the("forward", "gla_prepare", op, 256, backend="large", chunk_len=64, types={"w": t_w})
    assert made["BLOCKS_PER_SM"] == blocks


# ---- what all have in common -------------------------------------------------------------------------------------

# What meets decays in chunks forwards, backwards, and what tells the backward which chunks were taken by halves; and
# the kernels of launches that take these, where they are others.
HALVES = [
    ("wkv7", "sm_80", 40, 64, "chunked", {"chunked_forward"}, {"chunked_backward"}, "framed",
     {"chunked_forward"}, {"chunked_backward"}),
    ("wkv7", "sm_90", 64, 64, "chunked", {"chunked_forward"}, {"group_backward"}, "framed",
     {"chunked_forward"}, {"chunked_backward"}),
    ("wkv7", "sm_80", 40, 64, "segments", {"segment", "chunked_forward"}, {"segment", "chunked_backward"}, "framed",
     {"chunked_forward"}, {"chunked_backward"}),
    ("wkv7", "sm_80", 40, 256, "large", {"prepare", "scan"}, {"scan", "key_gradients"}, "halved",
     {"prepare"}, {"key_gradients_by_halves"}),
    ("wkv7", "sm_90", 40, 256, "large", {"prepare", "group_scan"}, {"group_scan", "key_gradients"}, "halved",
     {"prepare"}, {"key_gradients_by_halves"}),
    ("wkv6", "sm_90", 40, 64, "chunked", {"scan"}, {"chunked_backward"}, "framed",
     set(), set()),
    ("gla", "sm_90", 40, 64, "segments", {"scan"}, {"chunked_backward"}, "framed",
     set(), set()),
    ("gla", "sm_80", 40, 256, "large", {"scan"}, {"scan", "key_gradients"}, "framed",
     set(), set()),
    ("wkv5", "sm_90", 40, 256, "large", {"prepare", "group_scan"}, {"group_scan", "group_key_gradients"}, "halved",
     {"prepare"}, {"group_key_gradients"}),
]  # fmt: skip


@pytest.mark.parametrize("decay", ["raw", "log", "direct", "sigmoid"])
@pytest.mark.parametrize(
    ("op", "arch", "keys", "values", "backend", "forward", "backward", "told", "again", "back_again"), HALVES
)
def test_kernels_take_chunks_by_halves_where_the_map_allows_strong_decays(
    op, arch, keys, values, backend, forward, backward, told, again, back_again, decay
):
    has_halves = decay != "sigmoid"
    given = {"backend": backend, "chunk_len": 64 if backend == "large" else 32, "T": 4096, "decay": decay}
    p = problem(op, K=keys, V=values, arch=arch, training=True, **given)
    assert (told in directions.kept(p)) == has_halves
    assert "recurrent" not in " ".join(requests("forward", p) | requests("backward", p))
    for direction, names, by_halves in (("forward", forward, again), ("backward", backward, back_again)):
        rest = {f"{OPS[op].stem}_{name}" for name in by_halves} if has_halves else set()
        assert requests(direction, p, by_halves=True).keys() == rest
        made = {name: request.parameters.get("LARGEST_DECAY") for name, request in requests(direction, p).items()}
        wanted = dict.fromkeys((f"{OPS[op].stem}_{name}" for name in names), LARGEST_DECAY["bf16"] if has_halves else 0)
        assert {name: x for name, x in made.items() if x is not None} == wanted


@pytest.mark.parametrize("chunk_len", [16, 32, 64])
def test_packed_sequences_have_a_place_for_each_chunk_whatever_their_lengths_are(chunk_len):
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(0, 150, (5,), generator=generator).tolist()
        p = problem("wkv7", T=sum(lengths), N=len(lengths), is_packed=True)
        begin, taken = 0, []
        for sequence, length in enumerate(lengths):
            first = begin // chunk_len + sequence  # as span.cuh counts
            taken += range(first, first + -(-length // chunk_len))
            begin += length
        assert len(set(taken)) == len(taken)
        assert max(taken, default=-1) < p.slots(chunk_len)


@pytest.mark.parametrize(
    ("size", "dtype", "vectors"),
    [(64, "bf16", (8, 4)), (64, "fp32", (4, 4)), (36, "bf16", (4, 4)), (36, "fp32", (4, 4)), (34, "bf16", (1, 1)),
     (37, "fp32", (1, 1))],
)  # fmt: skip
def test_elements_that_are_read_at_once(size, dtype, vectors):
    p = problem("wkv6", dtype, 64, size, types={"w": "fp32"}, chunk_len=32)
    schedules = [directions.forward(p._replace(backend=name)).vectors for name in ("chunked", "recurrent")]
    assert tuple(x["v"] for x in schedules) == tuple(x["dy"] for x in schedules) == vectors
    assert [x["w"] for x in schedules] == [4, 4]


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({"T": 257, "training": True}, 256),
        ({"T": 256, "training": True}, 128),
        ({"T": 257}, 128),
        ({"T": 257, "training": True, "chunk_len": 32}, 128),
        ({"T": 257, "training": True, "num_threads": 64}, 64),
        ({"T": 257, "training": True, "K": 128, "V": 128}, 128),
        ({"T": 514, "N": 2, "is_packed": True, "training": True}, 256),
        ({"T": 4096, "N": 256, "is_packed": True, "training": True}, 128),
    ],
    ids=str,
)
def test_forward_that_keeps_many_states_has_more_warps(changes, threads):
    p = problem("wkv7", backend="chunked", chunk_len=16, decay="sigmoid")._replace(**changes)
    (step,) = directions.forward(p).launches
    assert step.parameters["NUM_THREADS"] == threads


@pytest.mark.parametrize("op", WITH_HEADS)
def test_more_heads_than_a_grid_has_room_for_are_for_the_recurrent_kernels(op):
    for backend, size, name in (("chunked", 64, "chunked"), ("segments", 64, "chunked"), ("large", 256, "split")):
        p = problem(op, K=size, T=4096, H=65536, backend=backend, chunk_len=32)
        message = f"backend: '{name}' takes up to 65535 heads, got 65536; use 'recurrent'"
        for direction in (directions.forward, directions.backward):
            with pytest.raises(UnsupportedConfigError, match=f"^{message}$"):
                direction(p)


def test_diagonal_kernels_without_warp_groups_keep_states_alone():
    p = problem("gla", K=256, T=100, arch="sm_80", backend="large", chunk_len=32)
    assert set(directions.kept(p)) == {"checkpoints", "framed"}
    in_groups = directions.kept(p._replace(gpu=Gpu("sm_90"), chunk_len=64))
    assert set(in_groups) == {"operands", "pairs", "frames", "states", "halved"}
