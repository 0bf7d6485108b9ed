"""Kernels before they are called for: warm, compile_async, and how many compile at once."""

import math
import os
import threading
from itertools import product

import pytest
import torch

import rwkv_jit
from rwkv_jit.ahead import requests as ahead_requests
from rwkv_jit.ahead import warm
from rwkv_jit.call import prepared, tensors, tuned
from rwkv_jit.call.plan import DTYPES
from rwkv_jit.kernels import cache, compiler, env, kernel, stats
from rwkv_jit.kernels.errors import CompileError, UnsupportedConfigError
from rwkv_jit.schedules.schedule import floats
from rwkv_jit.schedules.table import OPS


@pytest.fixture
def cores(monkeypatch):
    """A process that has started no workers yet, on a machine of 6 cores."""
    monkeypatch.setattr(kernel, "_process", kernel._Process())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)


@pytest.fixture
def at_once(monkeypatch):
    """How many compiles ran at the same time, each time one began; they wait for a second one and a moment."""
    running, most, compile, are_two = [], [], compiler.compile, threading.Event()

    def watched(*arguments):
        running.append(1)
        most.append(len(running))
        if len(running) > 1 or not are_two.wait(60 if env.workers() > 1 else 0):
            are_two.set()  # or there never will be: no other one waits for it again
        threading.Event().wait(0.05)
        try:
            return compile(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(compiler, "compile", watched)
    return most


# ---- in the background -------------------------------------------------------------------------------------------


def test_background_gives_the_kernel_that_the_foreground_gives():
    future = rwkv_jit.compile_async("wkv7", head_size=4, arch="sm_90")
    made = future.result()
    again = rwkv_jit.specialize("wkv7", head_size=4, arch="sm_90")
    assert (made.origin, again.origin) == ("compiled", "memory")
    assert made.cubin == again.cubin
    assert made.parameters == again.parameters
    assert stats.snapshot()["compiled"] == 1


def test_background_raises_what_the_foreground_raises():
    future = rwkv_jit.compile_async("wkv7", head_size=4, arch="sm_90", chunk_len=3)
    with pytest.raises(UnsupportedConfigError, match="chunk_len must be 1, 2, 4, 8 or 16; got .*CHUNK_LEN=3"):
        future.result()


@pytest.mark.parametrize(("ranks", "workers"), [(None, 6), ("2", 3), ("4", 1), ("100", 1)])
def test_no_more_compile_at_once_than_there_are_cores_for_each_rank(ranks, workers, cores, at_once, tiny, monkeypatch):
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    # Different first bytes of the keys, as two kernels that share one wait for each other.
    futures = [kernel.get_async(tiny(size)) for size in range(8)]
    assert [future.result().origin for future in futures] == ["compiled"] * 8
    assert max(at_once) <= workers == env.workers()
    assert max(at_once) >= min(workers, 2)


def test_several_kernels_of_one_call_compile_side_by_side(cores, at_once, tiny):
    found = kernel.get_all([tiny(size) for size in range(4)])
    assert [each.parameters["SIZE"] for each in found] == [0, 1, 2, 3]
    assert max(at_once) > 1
    assert [each.origin for each in kernel.get_all([tiny(2), tiny(9), tiny(0)])] == ["memory", "compiled", "memory"]


# ---- warm --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("listed_only")
def test_warm_compiles_what_calls_need_and_finds_it_the_next_time():
    progress = []
    made = rwkv_jit.warm(
        "wkv7", [4, 5], [torch.float32, torch.bfloat16], arch="sm_75", progress=lambda *done: progress.append(done)
    )
    about = ("HEAD_SIZE", "T_IO")
    assert {(each.name, each.arch, *(each.parameters[name] for name in about)) for each in made} == {
        (name, "sm_75", head_size, dtype)
        for name in ("wkv7_recurrent_forward", "wkv7_recurrent_backward", "update_states")
        for head_size in (4, 5)
        for dtype in ("fp32", "bf16")
    }
    assert progress == [(done, len(made)) for done in range(len(made) + 1)]
    assert {each.origin for each in made} == {"compiled"}
    assert len(cache.entries()) == len(made) == stats.snapshot()["compiled"]
    kernel.forget()
    again = rwkv_jit.warm("wkv7", [4, 5], [torch.float32, torch.bfloat16], arch="sm_75")
    assert [each.cubin for each in again] == [each.cubin for each in made]
    assert {each.origin for each in again} == {"disk"}


@pytest.mark.usefixtures("listed_only")
def test_warm_compiles_just_what_specialize_names():
    made = rwkv_jit.warm(
        "wkv6", 4, torch.float16, backward=False, arch="sm_80", decay="log", state_layout="kv",
        w_dtype=torch.float32, state_dtype=torch.bfloat16,
    )  # fmt: skip
    assert {each.name for each in made} == {
        "gla_scan", "gla_recurrent_forward", "gla_join", "gla_segment", "copy_states", "cut_sequences", "update_states",
    }  # fmt: skip
    for backend in ("chunked", "recurrent"):
        same = rwkv_jit.specialize(
            "wkv6", 4, None, torch.float16, "sm_80", "forward", backend, "log", state_layout="kv", t_w="fp32",
            t_u="fp32", t_state="bf16",
        )  # fmt: skip
        assert same.origin == "memory"
        assert same.cubin in [each.cubin for each in made]


def test_what_tells_ops_apart_is_no_choice():
    for op, parameter in (("gla", "bonus"), ("wkv5", "constant_decay"), ("linear_attention", "t_w"), ("gla", "t_u")):
        with pytest.raises(ValueError, match=f"parameter {parameter.upper()}: is no choice for {op}"):
            rwkv_jit.specialize(op, 8, arch="sm_80", **{parameter: "fp32"})
    with pytest.raises(ValueError, match="decay: expected one of none, got 'log'"):
        rwkv_jit.warm("linear_attention", 8, arch="sm_80", decay="log")


@pytest.mark.usefixtures("listed_only")
def test_warm_adds_the_forward_for_few_heads_where_that_is_another_kernel():
    made = rwkv_jit.warm("wkv7", 64, torch.float32, backward=False, arch="sm_90", state_layout="kv")
    assert {each.name for each in made} == {"wkv7_recurrent_forward", "update_states"}
    many, few = (each.parameters["ROWS_PER_THREAD"] for each in made if each.name == "wkv7_recurrent_forward")
    assert few < many
    # A few tokens are one or several, with a state before them or without.
    few_tokens = [each.parameters for each in made if each.name == "update_states"]
    found = {(each["ONE_TOKEN"], each["HAS_STATE"], each["KEY_WARPS"]) for each in few_tokens}
    assert found == {*product((False, True), (False, True), (2, 4))}
    assert len(few_tokens) == len(found)


OF_ALL = {"recurrent_forward", "recurrent_backward"}
OF_SEGMENTS = {"segment", "join"}
CHUNKED = {"chunked_forward", "chunked_backward", *OF_SEGMENTS}
OF_FEW_HEADS = {"prepare", "group_scan"}  # that kernels for large heads are faster for, on an sm_90
SCANNED = {"prepare", "scan", "join", "token_gradients", "key_gradients"}
# Short sequences of large heads have chunks that groups do not take.
OF_GROUPS = {"group_scan", *SCANNED, "key_gradients_by_halves"}
GATED = {"scan", "chunked_backward", *OF_SEGMENTS}
GATED_GROUPS = {"prepare", "group_scan", "group_key_gradients", "join"}


@pytest.mark.usefixtures("listed_only")
@pytest.mark.parametrize(
    ("op", "size", "arch", "options", "names", "looking", "looks"),
    [
        ("wkv7", 24, "sm_90", {"decay": "sigmoid"}, CHUNKED | OF_FEW_HEADS, "chunked_forward", 0),
        ("wkv7", 8, "sm_90", {}, CHUNKED | OF_FEW_HEADS, "chunked_forward", 64),
        ("wkv7", 8, "sm_80", {}, CHUNKED, "chunked_forward", 64),
        ("wkv5", 40, "sm_90", {}, GATED | OF_FEW_HEADS, "scan", 64),
        ("wkv7", 192, "sm_80", {"decay": "sigmoid"}, SCANNED, None, 0),
        ("wkv7", 136, "sm_90", {}, OF_GROUPS, "prepare", 64),
        ("wkv5", 40, "sm_80", {}, GATED, "scan", 64),
        ("gla", 40, "sm_80", {"decay_bound": -1.0}, GATED, "scan", 64),
        ("linear_attention", 40, "sm_80", {}, GATED, "scan", 0),
        ("wkv5", 136, "sm_80", {}, {"scan", "key_gradients", "join"}, "scan", 64),
        ("wkv6", 136, "sm_80", {"decay": "sigmoid"}, {"scan", "key_gradients", "join"}, "scan", 0),
        ("wkv5", 264, "sm_90", {}, GATED_GROUPS, "prepare", 64),
        ("gla", 136, "sm_90", {"decay_bound": -1.0}, GATED_GROUPS, "prepare", 64),
        ("wkv7", 4, "sm_75", {}, set(), None, 0),
        ("gla", 264, "sm_80", {"dtypes": torch.float32}, set(), None, 0),
    ],
)  # fmt: skip
def test_warm_makes_the_kernels_of_long_calls_and_of_short_ones(op, size, arch, options, names, looking, looks):
    made = rwkv_jit.warm(op, size, arch=arch, **options)
    stem = OPS[op].stem
    assert {each.name for each in made if each.name.startswith(stem)} == {f"{stem}_{name}" for name in OF_ALL | names}
    for each in made:
        is_group = "group" in each.name or (stem, arch, each.name) == ("gla", "sm_90", "gla_prepare")
        assert each.target == ("sm_90a" if is_group else arch)
    of_both_ways = OF_SEGMENTS | ({"scan", "group_scan"} if size > 128 else set())
    for name in of_both_ways & names:
        assert {each.parameters["BACKWARD"] for each in made if each.name == f"{stem}_{name}"} == {False, True}
    if looking:
        lookers = [each for each in made if each.name == f"{stem}_{looking}" and not each.parameters.get("BACKWARD")]
        assert {each.parameters["LARGEST_DECAY"] for each in lookers} == {looks}
    forward = rwkv_jit.warm(op, size, arch=arch, backward=False, **options)
    assert {each.origin for each in forward} == {"memory"}
    assert len(forward) < len(made)


def asked(requests):
    """The kernels of requests, however often each is there."""
    return {kernel.memory_key(request): (request.template.name, str(request.parameters)) for request in requests}


# Of 2100 tokens: sequences of one length that are not cut, one alone, and one that is far longer than the other.
EVEN, ALONE, UNEVEN = [*range(0, 2101, 300)], [0, 2100], [0, 52, 2100]


class Noted:
    """A plan that asks for its kernels and launches nothing; `kernels` are those of all of them."""

    kernels = {}

    def __init__(self, schedule, problem, arrays, kept=None, soon=()):
        self.problem = problem
        Noted.kernels |= asked([*schedule.requests(problem.gpu), *soon])
        self.results = [(result.shape, DTYPES[result.dtype]) for result in schedule.results.values()]
        if schedule.kept:
            self.results.append(((floats(schedule.kept),), torch.float32))

    def run(self, arrays):
        return [torch.empty(shape, dtype=dtype) for shape, dtype in self.results]


@pytest.fixture
def call_all_ways(on_gpu, monkeypatch):
    """Runs calls of every length, with many and few heads, packed and not, for all gradients, for that of the initial
    state alone and for none, on an sm_90 that launches nothing; returns the kernels that they asked for.
    """
    on_gpu.use("sm_90")
    monkeypatch.setattr(Noted, "kernels", {})
    monkeypatch.setattr(prepared, "Plan", Noted)
    monkeypatch.setattr(tuned, "SHIPPED", ())  # they are for some GPUs
    monkeypatch.setattr(tensors, "also", lambda device: ())

    def call(op, keys, values, w_dtype, state_dtype, layout, **options):
        function, sizes, of_head = getattr(rwkv_jit, op), {"K": keys, "V": values, "B": 1}, keys * values / 64**2
        # More than one head keeps busy, and enough for its segments; too few for all heads.
        on_gpu.multiprocessors = most = max(24, int(of_head) + 1, 8 * math.ceil(values / 64))
        many = max(most + 1, math.ceil(most / of_head))
        of_one_length = [*product((1, many), (1, 16, 32, 64)), (1, 600), (1, 2048), (1, 2100)]
        of_one_length += product((1, 4 * most), (1, 2))  # which fill the GPU with blocks of a few values
        if max(keys, values) > 64:  # which are cut from more tokens on
            of_one_length.append((1, 32768))
        ways = [*product(of_one_length, [None]), *product([(1, 2100)], [EVEN, ALONE, UNEVEN])]
        for (heads, tokens), bounds in ways:
            dims = {**sizes, "H": heads, "T": tokens}
            given = [
                torch.empty([dims[dim] for dim in shape], dtype=w_dtype if name in "wu" else torch.bfloat16)
                for name, shape in OPS[op].inputs.items()
            ]
            sequences = 1 if bounds is None else len(bounds) - 1
            of_state = (values, keys) if layout == "vk" else (keys, values)
            state = torch.empty(sequences, heads, *of_state, dtype=state_dtype)
            options |= {"initial_state": state, "output_final_state": True, "state_layout": layout}
            options["cu_seqlens"] = None if bounds is None else torch.tensor(bounds)
            function(*given, **options)
            for leaves in ([state], [*given, state], given):
                if leaves is given:  # whose final states are float32
                    if state_dtype != torch.float32:
                        continue
                    options["initial_state"] = None
                    with torch.no_grad():
                        function(*given, **options)
                for each in leaves:
                    each.requires_grad_()
                for used in (1, 2):  # y, and the final state too
                    results = function(*given, **options)[:used]
                    torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results])
        return Noted.kernels

    return call


SIZES = ((7, 7), (64, 64), (128, 128), (64, 96), (64, 136), (129, 129), (192, 64), (300, 512), (512, 512))
BOUNDS = {
    "wkv5": [("raw", None)],
    "wkv6": [("sigmoid", None), ("log", -8.1)],
    "wkv7": [("raw", None), ("sigmoid", None), ("log", -3.0), ("direct", -9.0)],
    "gla": [("log", None), ("direct", -2.0), ("log", -3.0)],
    "linear_attention": [(None, None)],
}


@pytest.mark.parametrize(("keys", "values"), SIZES)
@pytest.mark.parametrize(
    ("op", "decay", "decay_bound"), [(op, *bound) for op, bounds in BOUNDS.items() for bound in bounds]
)
def test_calls_take_the_kernels_that_warm_has_made_and_no_others(op, decay, decay_bound, keys, values, call_all_ways):
    """The whole way of a call, up to where its kernels would be found."""
    place = SIZES.index((keys, values)) + len(op)
    w_dtype = (torch.bfloat16, torch.float32)[place % 2]
    state_dtype, layout = [*product((torch.float32, torch.float16), ("vk", "kv"))][place % 4]
    options = {} if decay is None else {"decay": decay, "decay_bound": decay_bound}
    wanted = call_all_ways(op, keys, values, w_dtype, state_dtype, layout, **options)
    made = [
        request
        for way in ahead_requests.DIRECTIONS
        for request in ahead_requests.call_requests(
            ahead_requests.Calls(
                op, keys, torch.bfloat16, "sm_90", way, decay, layout, w_dtype, state_dtype, decay_bound, values
            )
        )
    ]
    assert set(wanted.values()) == set(asked(made).values())
    assert wanted.keys() == asked(made).keys()


@pytest.mark.usefixtures("listed_only")
def test_specialize_takes_what_long_calls_take():
    assert rwkv_jit.specialize("wkv7", 4, 136, arch="sm_80", decay="sigmoid").name == "wkv7_scan"
    for threads, name in ((None, "wkv7_group_scan"), (384, "wkv7_group_scan"), (128, "wkv7_scan")):
        made = rwkv_jit.specialize("wkv7", 4, 136, arch="sm_90", decay="sigmoid", num_threads=threads)
        assert made.name == name
    for threads, name, chunk_len in ((None, "gla_group_scan", 64), (384, "gla_group_scan", 64), (128, "gla_scan", 32)):
        made = rwkv_jit.specialize("gla", 4, 136, arch="sm_90", num_threads=threads)
        assert (made.name, made.parameters["CHUNK_LEN"]) == (name, chunk_len)
    assert rwkv_jit.specialize("gla", 4, 136, arch="sm_80").name == "gla_scan"
    for dtype, arch, decay, backend in (
        (torch.bfloat16, "sm_80", "sigmoid", "chunked"),
        (torch.bfloat16, "sm_80", "raw", "chunked"),
        (torch.float32, "sm_80", "raw", "recurrent"),
        (torch.bfloat16, "sm_75", "sigmoid", "recurrent"),
        (torch.float32, "sm_80", "sigmoid", "recurrent"),
    ):
        assert rwkv_jit.specialize("wkv7", 4, dtype=dtype, arch=arch, decay=decay).name == f"wkv7_{backend}_forward"


def test_warm_for_several_architectures_or_that_of_the_environment(monkeypatch):
    made = rwkv_jit.warm("wkv7", 4, torch.float32, backward=False, arch=["sm_80", "compute_80"])
    assert {(each.arch, bool(each.cubin)) for each in made} == {("sm_80", True), ("compute_80", False)}
    monkeypatch.setenv("RWKVJIT_ARCH", "sm_89")
    archs = {each.arch for each in rwkv_jit.warm("wkv7", 4, torch.float32, backward=False)}
    assert archs == {rwkv_jit.compile_async("wkv7", 4, dtype=torch.float32).result().arch} == {"sm_89"}
    assert rwkv_jit.warm("wkv7", [], arch="sm_90") == []


def test_warm_raises_the_error_of_a_kernel(monkeypatch):
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    calls = [
        ahead_requests.Calls("wkv7", size, torch.bfloat16, "sm_90", direction)
        for size, direction in product([4, 5], ["forward", "backward"])
    ]
    # Kernels compile side by side: any of them may be the first one that is missing.
    names = {request.template.name for call in calls for request in ahead_requests.call_requests(call)}
    missing = rf"RWKVJIT_ASSERT_CACHED is set and ({'|'.join(names)}) for sm_90 is not in the cache"
    with pytest.raises(CompileError, match=missing):
        rwkv_jit.warm("wkv7", [4, 5], arch="sm_90")


def test_the_first_error_ends_a_warming(cores, tiny, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with pytest.raises(CompileError):
        warm.compile_all([tiny(0, text="int broken = SIZE + missing;"), *(tiny(size) for size in range(1, 6))])
    kernel._process.workers.finish()
    assert stats.snapshot()["compiled"] <= 1  # what had begun


def test_progress_is_told_as_it_is_made(cores, tiny, monkeypatch):
    """One worker, whose every compile waits until all that is before it has been told."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    told, compile, in_time = [threading.Event() for _ in range(4)], compiler.compile, []

    def patient(*arguments):
        in_time.append(all(in_time) and told[len(in_time)].wait(60))
        return compile(*arguments)

    monkeypatch.setattr(compiler, "compile", patient)
    warm.compile_all([tiny(size) for size in range(3)], lambda done, of: told[done].set())
    assert in_time == [True, True, True]


def test_progress_that_raises_stops_what_has_not_begun(cores, tiny, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")

    def stop(done, of):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        go, compile = threading.Event(), compiler.compile
        patch.setattr(compiler, "compile", lambda *arguments: go.wait(60) and compile(*arguments))
        with pytest.raises(KeyboardInterrupt):
            warm.compile_all([tiny(size) for size in range(3)], stop)
        go.set()
        kernel._process.workers.finish()
    assert stats.snapshot()["compiled"] <= 1
