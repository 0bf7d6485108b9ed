"""Choices of geometries: their file, who takes them, how they are measured, and the command."""

import argparse
import contextlib
import itertools
import json
import os
import re
import stat

import pytest
import torch
from problems import problem

import rwkv_jit
from rwkv_jit.ahead import requests as ahead_requests
from rwkv_jit.call import tensors, torch_op, tuned
from rwkv_jit.call.torch_op import Options
from rwkv_jit.call.tuned import CHUNKS, Geometry
from rwkv_jit.desk import figures, inputs, terminal, tune
from rwkv_jit.kernels import cuda, kernel, template
from rwkv_jit.kernels.errors import NvrtcNotFoundError, RwkvJitError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import diagonal_chunked
from rwkv_jit.schedules.common import Candidate
from rwkv_jit.schedules.problem import LARGEST_DECAY
from rwkv_jit.schedules.table import OPS

GPU, ARCH = "a GPU", "sm_90"
RULE = Geometry(32, None, None, None)
OTHERS = tuned.Choice(GPU, ARCH, "wkv7", 32, True, 16, 64, 6, 6, "set by the fixture")


def make(head_size=64, training=True, gpu=GPU, op="wkv7", **changes):
    """A choice that is legal and differs from the rule in everything."""
    geometry = {"chunk_len": 16, "num_threads": 256, "forward_blocks": 2, "backward_blocks": 3 if training else None}
    about = {"gpu": gpu, "arch": ARCH, "op": op, "head_size": head_size, "training": training}
    return tuned.Choice(**(about | geometry | {"templates": tuned.templates_of(op)} | changes))


def store(*several):
    tuned.store({each.key: each for each in several})


def write(data):
    tuned.path().parent.mkdir(mode=0o700, exist_ok=True)
    tuned.path().write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    tuned.path().chmod(0o600)


SHIPPED = tuned.SHIPPED
DIAGONAL = [name for name in CHUNKS if name != "wkv7"]


def forget():
    """Be as a process that has read neither the choices nor the templates."""
    for cached in (tuned._own, tuned._fault, tuned.templates_of, template.library):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def gpu(as_if_on_gpu, monkeypatch):
    """Nothing is shipped for it."""
    monkeypatch.setattr(tuned, "SHIPPED", ())
    forget()
    yield
    forget()


def given(head_size=64, value_size=None, dtype=torch.bfloat16, tokens=64):
    sizes = [head_size] * 3 + [value_size or head_size] + [head_size] * 2
    return [torch.zeros(1, tokens, 200, size, dtype=dtype) for size in sizes]


def of(op, head_size=64, dtype=torch.bfloat16):
    """The inputs of any op."""
    sizes = {name: (1, 64, 200, head_size) for name in OPS[op].streamed}
    sizes |= {name: (200, head_size) for name in OPS[op].fixed}
    return [torch.zeros(size, dtype=dtype) for size in sizes.values()]


def options_of(op="wkv7", inputs=None, decay_bound=None, training=True, **options):
    """The problem that a call is resolved to."""
    decay = "none" if op == "linear_attention" else "sigmoid"
    asked, arrays = Options(1.0, decay, "vk", 64, None, None, "auto", is_chosen=False), inputs or of(op)
    p = torch_op.problem_of(
        OPS[op], arrays, None, None, asked._replace(**options), False, training, decay_bound, is_direct=True
    )  # fmt: skip
    return torch_op.resolved(p, arrays, is_direct=True)


def resolved(*call, **options):
    """The backend and the geometry of a call."""
    found = options_of(*call, **options)
    return found.backend, Geometry(*(getattr(found, name) for name in Geometry._fields))


# ---- who takes a choice ------------------------------------------------------------------------------------------


def test_argument_goes_before_the_users_choice_before_the_shipped_one_before_the_rule(monkeypatch):
    assert resolved() == ("chunked", RULE)
    monkeypatch.setattr(tuned, "SHIPPED", (make(forward_blocks=1),))
    forget()
    assert resolved() == ("chunked", Geometry(16, 256, 1, 3))
    store(make())
    forget()
    for backend in ("auto", "chunked"):
        assert resolved(backend=backend) == ("chunked", Geometry(16, 256, 2, 3))
    assert resolved(chunk_len=32) == ("chunked", RULE)
    assert resolved(chunk_len=16) == ("chunked", Geometry(16, None, None, None))
    assert resolved(num_threads=128) == ("chunked", Geometry(32, 128, None, None))
    monkeypatch.setattr(tuned, "SHIPPED", (make(),))
    store(make(chunk_len=8))  # which cannot be used
    forget()
    assert resolved() == ("chunked", Geometry(16, 256, 2, 3))
    assert tuned.shipped(make().key) == make()
    assert tuned.shipped(make(training=False).key) is None
    monkeypatch.setattr(tuned, "SHIPPED", (make(chunk_len=8),))
    assert tuned.shipped(make().key) is None


@pytest.mark.parametrize(
    ("sizes", "options", "is_taken"),
    [
        ({}, {}, True),
        ({"head_size": 40}, {}, True),  # as the kernels see it: 64
        ({"value_size": 40}, {}, True),
        ({"head_size": 32}, {}, False),
        ({"value_size": 96}, {}, False),
        ({"value_size": 32}, {}, False),
        ({}, {"training": False}, False),
        ({"dtype": torch.float16}, {}, True),
        ({}, {"decay": "raw", "decay_bound": -1.0}, True),
    ],
    ids=str,
)
def test_choice_is_for_its_head_size_and_purpose(sizes, options, is_taken):
    store(make())
    found = resolved(inputs=given(**sizes), **options)
    assert (found == ("chunked", Geometry(16, 256, 2, 3))) is is_taken
    assert found[0] == "chunked"


def test_calls_that_the_recurrent_kernels_serve_take_none():
    store(make())
    assert resolved(inputs=given(dtype=torch.float32)) == ("recurrent", Geometry())
    assert resolved(inputs=given(tokens=3)) == ("recurrent", Geometry())
    assert resolved(backend="recurrent", chunk_len=4, num_threads=64) == ("recurrent", Geometry(4, 64))


@pytest.mark.parametrize("changes", [{"gpu": "another GPU"}, {"arch": "sm_100"}])
def test_choice_is_for_its_gpu(changes):
    store(make(**changes))
    assert resolved() == ("chunked", RULE)


@pytest.mark.parametrize("op", DIAGONAL)
def test_choice_is_for_its_op(op):
    store(make(), make(op=op, num_threads=128), make(op=op, training=False, chunk_len=64, num_threads=128))
    others = [each for each in CHUNKS if each not in ("wkv7", op)]
    assert resolved(op) == ("chunked", Geometry(16, 128, 2, 3))
    assert resolved(op, of(op, 40, torch.float16)) == ("chunked", Geometry(16, 128, 2, 3))
    assert resolved(op, training=False) == ("chunked", Geometry(64, 128, 2, None))
    assert resolved(op, of(op, 96)) == resolved(op, chunk_len=32) == ("chunked", RULE)
    assert resolved(op, of(op, 256)) == ("large", RULE._replace(chunk_len=64))
    assert resolved() == ("chunked", Geometry(16, 256, 2, 3))
    assert {resolved(each) for each in others} == {("chunked", RULE)}


@pytest.mark.parametrize(
    ("call", "chunk_len"),
    [
        ({"decay": "sigmoid"}, 64),
        ({"decay": "raw"}, 64),
        ({"decay": "raw", "decay_bound": -2.0}, 64),
        ({"decay": "raw", "decay_bound": -2.1}, 32),  # of the rule: 64 would leave the range
        ({"decay": "raw", "decay_bound": -4.1}, 16),
        ({"decay": "raw", "decay_bound": -8.1}, 64),  # every chunk would
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["wkv5", "wkv6", "gla"])
def test_choice_whose_chunk_is_too_long_for_the_bound_is_left_for_the_rule(op, call, chunk_len):
    store(make(op=op, chunk_len=64, backward_blocks=1))
    found = options_of(op, **call)
    assert found.chunk_len == chunk_len
    assert (found.num_threads, found.forward_blocks) == ((256, 2) if chunk_len == 64 else (None, None))


def test_choice_does_not_decide_about_the_backend():
    store(make(96, training=False, chunk_len=32, num_threads=192))
    assert resolved(inputs=given(96), training=False)[1] == Geometry(32, 192, 2, None)
    bounded = {"decay": "raw", "decay_bound": -6.0, "training": False}  # too much for chunks of 32
    assert resolved(inputs=given(96), **bounded) == ("chunked", Geometry(16, None, None, None))


def test_segments_take_the_choice_too():
    store(make())
    long = [x[:, :, :4] for x in given(tokens=4096)]
    assert resolved(inputs=long) == ("segments", Geometry(16, 256, 2, 3))


@pytest.fixture
def asked_for(monkeypatch):
    """Runs a function up to its first kernels; returns what is asked for."""
    asked = []

    def get_most(requests, rest, soon=()):
        asked.extend((request.template.name, request.parameters) for request in (*requests, *rest, *soon))
        raise InterruptedError

    monkeypatch.setattr(kernel, "get_most", get_most)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "also", lambda device: ())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tensors, "capturing", lambda: False)

    def run(function):
        with pytest.raises(InterruptedError):
            function()
        names = ("CHUNK_LEN", "NUM_THREADS", "BLOCKS_PER_SM")
        return [(name, *(parameters[each] for each in names)) for name, parameters in asked]

    return run


class Module(torch.nn.Module):
    """A call of an op without gradients."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *inputs):
        return getattr(rwkv_jit, self.op)(*inputs, decay="sigmoid")[0]


def compiled(module, inputs):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="eager", dynamic=True)


def exported(module, inputs):
    return torch.export.export(module, tuple(inputs)).module()


@pytest.mark.parametrize(
    ("way", "op", "name"),
    [(compiled, "wkv7", "wkv7_chunked_forward"), (compiled, "wkv6", "gla_scan"),
     (exported, "wkv7", "wkv7_chunked_forward")],
)  # fmt: skip
def test_traced_call_takes_the_choice_when_it_runs(way, op, name, asked_for):
    store(make(training=False, op=op))
    function = way(Module(op), of(op))
    assert asked_for(lambda: function(*of(op))) == [(name, 16, 256, 2)]


def test_both_kernels_of_a_call_are_those_of_the_choice(asked_for):
    store(make())
    assert asked_for(lambda: rwkv_jit.wkv7(*[x.requires_grad_() for x in given()], decay="sigmoid")) == [
        ("wkv7_chunked_forward", 16, 256, 2),
        ("wkv7_chunked_backward", 16, 128, 3),
    ]


def geometries(requests):
    return {
        tuple(each.parameters[name] for name in ("CHUNK_LEN", "NUM_THREADS", "BLOCKS_PER_SM"))
        for each in requests
        if each.template.name.split("_")[1] in ("chunked", "group", "scan") and "BLOCKS_PER_SM" in each.parameters
    }


def requests(arch, op="wkv7"):
    options = ("sigmoid", "vk", None, torch.float32, None)
    return [
        ahead_requests.call_requests(ahead_requests.Calls(op, 64, torch.bfloat16, arch, way, *options))
        for way in ("forward", "backward")
    ]


def test_what_is_compiled_ahead_is_what_calls_take(monkeypatch):
    """For this GPU its choices alone; for a named architecture those of every GPU of it, and for those without."""
    store(make(), make(gpu="another GPU", forward_blocks=1), make(op="wkv6", chunk_len=64, backward_blocks=1))
    rule, back = {(32, 128, 4), (16, 128, 4)}, {(32, 128, 2), (16, 128, 2)}  # of long calls and of short ones
    few = rule | {(32, 256, 2), (16, 256, 2)}  # of few heads too
    assert [geometries(each) for each in requests("sm_90", "wkv6")] == [few | {(64, 256, 2)}, back | {(64, 128, 1)}]
    assert [geometries(each) for each in requests("sm_90", "wkv5")] == [few, back]
    assert geometries(requests("sm_90")[0]) == geometries(requests("sm_90a")[0]) == rule | {(16, 256, 2), (16, 256, 1)}
    assert geometries(requests("sm_90")[1]) == back | {(16, 128, 3)}
    assert geometries(requests("sm_100")[0]) == {(32, 128, 3), (16, 128, 3)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert geometries(requests(None)[0]) == rule | {(16, 256, 2)}  # by the rule a forward alone
    assert geometries(requests(None)[1]) == {(16, 128, 2), (16, 128, 3)}
    monkeypatch.setattr(kernel, "get", lambda request: geometries([request]))
    ask = {"head_size": 64, "backend": "chunked"}
    assert rwkv_jit.specialize("wkv7", **ask) == {(16, 256, 2)}
    assert rwkv_jit.specialize("wkv7", **ask, blocks_per_sm=1) == {(16, 256, 1)}
    assert rwkv_jit.specialize("wkv7", **ask, arch="sm_90") == {(32, 128, 4)}


# ---- the file ----------------------------------------------------------------------------------------------------


def test_choices_are_read_as_they_were_stored():
    store(make(), make(training=False))
    assert [each.choice for each in tuned.listed()] == [make(), make(training=False)]
    assert {(each.origin, each.fault) for each in tuned.listed()} == {("tuned", "")}
    assert tuned.on_device(0) == (make(), make(training=False))
    assert stat.S_IMODE(tuned.path().stat().st_mode) == 0o600
    assert not list(tuned.path().parent.glob(".*.tmp"))


def test_what_was_measured_replaces_its_own_and_nothing_else():
    store(make(), make(training=False), make(gpu="another GPU"))
    tuned.store({make().key: make(forward_blocks=1), make(training=False).key: None})
    assert [each.choice for each in tuned.listed()] == [make(gpu="another GPU"), make(forward_blocks=1)]


def test_choices_are_read_once_in_a_process():
    assert tuned.on_device(0) == ()
    store(make())
    assert tuned.on_device(0) == ()


def test_cache_that_is_off_has_no_choices(monkeypatch):
    store(make())
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    assert tuned.on_device(0) == ()
    assert tuned.listed() == []


WRONG_FIELDS = [
    {"more": 1}, {"gpu": 1}, {"chunk_len": "16"}, {"chunk_len": 16.0}, {"forward_blocks": True}, {"training": 1},
    {"arch": "hopper"}, {"templates": None},
]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"7", b"null", b"[" * 100_000, b"\0" * 64, {"gpu": GPU}, [7], [{}], [OTHERS._asdict(), 7]]
    + [[OTHERS._asdict() | change] for change in WRONG_FIELDS],
    ids=lambda data: str(data)[:40],
)
def test_file_that_cannot_be_understood_is_as_none_with_one_notice(data, caplog):
    write(data)
    assert resolved() == resolved(inputs=given(32)) == ("chunked", RULE)
    assert tuned.listed() == []
    (said,) = caplog.messages
    assert said.startswith(f"tuned choices in {tuned.path()} are not used: ")
    store(make())
    assert [each.choice for each in tuned.listed()] == [make()]


def test_file_of_wkv7_alone_is_read_and_keeps_its_choices_beside_those_of_other_ops():
    """As it is on disk since there is a tuner."""
    record = {
        "gpu": "a GPU", "arch": "sm_90", "op": "wkv7", "head_size": 64, "training": True, "chunk_len": 16,
        "num_threads": 256, "forward_blocks": 2, "backward_blocks": 3, "templates": tuned.templates_of("wkv7"),
    }  # fmt: skip
    write([record])
    assert resolved() == ("chunked", Geometry(16, 256, 2, 3))
    store(make(op="wkv6"))
    assert json.loads(tuned.path().read_bytes()) == [record, make(op="wkv6")._asdict()]


@pytest.mark.parametrize("place", ["file", "folder"])
def test_choices_that_others_may_have_written_are_not_used(place, caplog):
    store(make())
    path = tuned.path() if place == "file" else tuned.path().parent
    path.chmod(0o777)
    assert resolved() == ("chunked", RULE)
    (message,) = caplog.messages
    assert f"chmod go-w '{path}'" in message


# Of all ops, of wkv7 and of the others.
ILLEGAL = [
    {"chunk_len": 8}, {"num_threads": 32}, {"forward_blocks": 0}, {"backward_blocks": None}, {"head_size": 160},
    {"training": False, "backward_blocks": 3}, {"arch": "sm_75"},
]  # fmt: skip
ILLEGAL_OF_WKV7 = [
    {"chunk_len": 64}, {"num_threads": 100}, {"num_threads": 1024}, {"forward_blocks": -1}, {"forward_blocks": 9},
    {"backward_blocks": 9}, {"head_size": 63}, {"head_size": 0}, {"head_size": -64}, {"op": "../wkv7"}, {"op": "wkv4"},
]  # fmt: skip
ILLEGAL_OF_OTHERS = [
    {"head_size": 128, "chunk_len": 64},  # for which there is no shared memory
    {"num_threads": 96}, {"num_threads": 512}, {"forward_blocks": 3}, {"backward_blocks": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "changes"),
    [(op, changes) for op in CHUNKS for changes in ILLEGAL]
    + [("wkv7", changes) for changes in ILLEGAL_OF_WKV7]
    + [(op, changes) for op in DIAGONAL for changes in ILLEGAL_OF_OTHERS],
    ids=str,
)
def test_illegal_choice_is_listed_and_not_used(op, changes, monkeypatch, caplog):
    store(make(op=op)._replace(**changes), make(32, num_threads=64, forward_blocks=4, backward_blocks=6))
    monkeypatch.setattr(tuned, "gpu", lambda device: (GPU, changes.get("arch", ARCH)))
    assert sorted(listed.fault for listed in tuned.listed()) == ["", "not legal"]
    assert resolved(op) == resolved(op, training=False) == ("chunked", RULE)
    # Of one that no call here would take nothing is said.
    is_told = changes.keys().isdisjoint(("op", "head_size", "chunk_len"))
    assert caplog.messages == ["a tuned geometry is not legal and not used; `rwkv-jit tune` measures anew"] * is_told
    if "arch" not in changes:
        assert resolved(inputs=given(32)) == ("chunked", Geometry(16, 64, 4, 6))


@pytest.mark.parametrize("op", CHUNKS)
def test_choice_for_a_gpu_without_these_kernels_is_not_legal(op):
    """It would have the threads and the shared memory."""
    forward = CHUNKS[op].candidates("forward", 32, Gpu("sm_75"))[0]
    for arch in ("sm_75", "sm_86"):
        choice = tuned.Choice(GPU, arch, op, 32, False, *forward[1:], None, tuned.templates_of(op))
        assert tuned._fault(choice) == ("not legal" if arch == "sm_75" else "")


@pytest.mark.parametrize(
    ("op", "file", "is_used"),
    [("wkv7", file, False) for file in ("wkv7_chunked_forward.cu", "wkv7_chunked_backward.cu", "wkv7_chunk.cuh")]
    + [(op, file, False) for op in DIAGONAL for file in ("gla_scan.cu", "gla_chunked_backward.cu", "gla_key_side.cuh")]
    + [(op, "wkv7_chunk.cuh", True) for op in DIAGONAL],
)
def test_choice_that_was_measured_with_other_kernels_of_its_op_is_not_used(op, file, is_used, own_templates, caplog):
    store(make(op=op))
    assert resolved(op) == ("chunked", Geometry(16, 256, 2, 3))
    path = template.path_of(file)
    path.write_text(path.read_text(encoding="utf-8") + "\nconstexpr int MORE = 1;\n", encoding="utf-8")
    forget()
    fault = "" if is_used else "measured with other kernels"
    assert resolved(op) == ("chunked", Geometry(16, 256, 2, 3) if is_used else RULE)
    assert [listed.fault for listed in tuned.listed()] == [fault]
    assert bool(caplog.text) != is_used
    assert fault in caplog.text


def test_shipped_choices_can_be_used():
    assert [each for each in SHIPPED if tuned._fault(each)] == []
    assert len({each.key for each in SHIPPED}) == len(SHIPPED)


def test_writers_at_once_lose_nothing():
    children = []
    for name in "abc":
        children.append(os.fork())
        if children[-1] == 0:
            try:
                for number in range(25):
                    choice = tuned.Choice(f"{name} {number}", "sm_90", "wkv7", 64, True, 16, 256, 2, 3, "x")
                    tuned.store({choice.key: choice})
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    written = {f"{name} {number}" for name in "abc" for number in range(25)}
    assert {each.choice.gpu for each in tuned.listed()} == written


# ---- what is measured --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_80"])
@pytest.mark.parametrize("op", CHUNKS)
def test_candidates_fit_and_the_rule_is_one_of_them(op, arch):
    there, chunked = Gpu(arch), CHUNKS[op]
    for size, training in itertools.product(range(8, 129, 24), (True, False)):
        call = problem(op, K=size, arch=arch, T=64, decay="none", training=training)
        if chunked.why_not(call) is not None:
            assert [chunked.candidates(way, size, there) for way in ("forward", "backward")] == [[], []]
            continue
        for default in tune._default(tuned.key(GPU, arch, op, size, training), size):
            made = chunked.candidates(default.direction, size, there)
            assert default in made
            assert len(set(made)) == len(made)
            for direction, chunk_len, threads, blocks in made:
                p = problem(
                    op, K=size, arch=arch, decay="none", backend="chunked", chunk_len=chunk_len, num_threads=threads,
                    forward_blocks=blocks, backward_blocks=blocks,
                )  # fmt: skip
                (step,) = getattr(chunked, direction)(p).launches
                shared = step.parameters["SHARED_BYTES"]
                assert (step.parameters["NUM_THREADS"], step.parameters["BLOCKS_PER_SM"]) == (threads, blocks)
                assert blocks * (shared + 1024) <= there.shared_per_multiprocessor or "group" in step.template
                assert chunked.why_not(call._replace(chunk_len=chunk_len)) is None
                assert threads <= 512
                assert blocks * threads <= 1024


class Measured:
    """Stands in for the kernels and the clock: times and results by candidate."""

    def __init__(self):
        self.ms, self.found, self.made = {}, {}, []

    def __call__(self, op, shape, training):
        self.made.append((op, shape, training))
        return self

    def results(self, each):
        return {"y": torch.ones(4), "dw": torch.full((4,), self.found.get(each, 1.0))}

    def launch(self, each):
        raise AssertionError("it is timed here")

    def median_ms(self, function, repeats):
        times = self.ms.get(function.args[0], [2.0])
        times.append(times.pop(0))
        return times[-1]


@pytest.fixture
def measuring(monkeypatch):
    """A GPU on which everything takes 2 ms and finds the same."""
    fake = Measured()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "nvrtc", lambda: None)
    monkeypatch.setattr(tune, "_Kernels", fake)
    monkeypatch.setattr(tune, "_compile", lambda op, candidates, size, progress: None)
    monkeypatch.setattr(figures, "median_ms", fake.median_ms)
    return fake


def measure(*shapes, ops=("wkv7",), dry_run=False):
    return tune.run(argparse.Namespace(op=ops, shape=list(shapes) or ["8,4096,64,64"], dry_run=dry_run))


def stored():
    return [each.choice for each in tuned.listed()]


FORWARD, BACKWARD = Candidate("forward", 16, 256, 2), Candidate("backward", 16, 128, 3)


def test_fastest_pair_of_one_chunk_is_stored(measuring):
    measuring.ms[FORWARD], measuring.ms[BACKWARD] = [1.0], [1.5]
    measuring.ms[Candidate("forward", 32, 128, 3)] = [0.9]  # with 2 ms of a backward: 2.9
    result = measure()
    assert stored() == [make(), make(training=False, chunk_len=32, num_threads=128, forward_blocks=3)]
    training, alone = result["rows"]
    assert training["default"] == {
        "chunk_len": 32, "num_threads": 128, "forward_blocks": 4, "backward_blocks": 2, "ms": 4.0, "spread": 0.0,
    }  # fmt: skip
    assert training["fastest"] == make().geometry._asdict() | {"ms": 2.5, "spread": 0.0}
    assert (training["training"], training["chosen"], training["shape"]) == (True, True, [8, 4096, 64, 64])
    assert (training["op"], alone["op"]) == ("wkv7", "wkv7")
    assert (alone["training"], alone["chosen"], alone["fastest"]["ms"]) == (False, True, 0.9)
    assert FORWARD._asdict() | {"ms": 1.0, "spread": 0.0} in training["measured"]
    assert (result["gpu"], result["arch"], result["path"]) == (GPU, ARCH, str(tuned.path()))
    forget()
    assert resolved() == ("chunked", make().geometry)


def test_every_op_is_measured_with_its_own_candidates_and_has_its_own_choice(measuring):
    """What is fast here is none of wkv7's kernels: it has no chunks of 64."""
    store(make())
    forward, backward = Candidate("forward", 64, 128, 3), Candidate("backward", 64, 128, 1)
    measuring.ms[forward], measuring.ms[backward] = [1.0], [1.5]
    result = measure(ops=["wkv7", "gla", "linear_attention", "gla"])
    assert [(row["op"], row["training"]) for row in result["rows"]] == [
        (op, training) for op in ("wkv7", "gla", "linear_attention") for training in (True, False)
    ]
    assert measuring.made == [(row["op"], (8, 4096, 64, 64), row["training"]) for row in result["rows"]]
    geometry = {"chunk_len": 64, "num_threads": 128, "forward_blocks": 3}
    assert stored() == [
        make(op=op, training=training, **geometry, backward_blocks=1 if training else None)
        for op in ("gla", "linear_attention")
        for training in (True, False)
    ]
    forget()
    assert resolved("gla", decay="log") == ("chunked", Geometry(64, 128, 3, 1))
    assert resolved("wkv6") == resolved() == ("chunked", RULE)


@pytest.mark.parametrize(("arch", "sizes"), [("sm_90", {64, 128}), ("sm_89", {64})])
def test_by_default_all_ops_are_measured_at_the_shapes_that_this_gpu_has_kernels_for(
    arch, sizes, measuring, monkeypatch, run
):
    monkeypatch.setattr(tensors, "_capability", lambda device: arch)
    assert run("tune", "--dry-run")[0] == 0
    shapes = [shape for shape in tune.SHAPES if shape[3] in sizes]
    assert measuring.made == [(op, shape, training) for op in CHUNKS for shape in shapes for training in (True, False)]


def test_progress_says_what_is_measured(measuring, monkeypatch):
    told = []

    @contextlib.contextmanager
    def progress(what):
        yield lambda done, total: told.append((what, done, total))

    monkeypatch.setattr(terminal, "progress", progress)
    monkeypatch.setattr(tune, "_compile", lambda op, candidates, size, progress: progress(len(candidates), size))
    measure(ops=["wkv6"])
    parts = [
        [(f"wkv6 (8, 4096, 64, 64), {purpose}: compiling", count, 64)]
        + [(f"wkv6 (8, 4096, 64, 64), {purpose}: measuring", done + 1, tune.ROUNDS) for done in range(tune.ROUNDS)]
        for purpose, count in (("gradients", 27), ("forward alone", 21))
    ]
    assert told == [*parts[0], *parts[1]]


@pytest.mark.parametrize(("value", "is_dropped"), [(1.05, False), (1.07, True), (float("nan"), True)])
def test_gradient_that_sums_both_signs_is_held_against_the_size_of_what_it_sums(value, is_dropped, measuring):
    """dw of wkv5, whose decay is the same for all tokens; the same error is too large in any other op."""
    measuring.found[FORWARD] = value
    rows = measure(ops=["wkv5", "wkv6"])["rows"]
    assert [len(row["dropped"]) for row in rows] == [is_dropped, is_dropped, True, True]


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "gla"])
def test_inputs_of_a_model_keep_the_range_of_every_chunk(op, monkeypatch):
    """Else it would be the recurrent kernels that are measured."""
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, device: randn(*sizes))
    torch.manual_seed(0)
    given = dict(zip(OPS[op].names, inputs.make_inputs(op, (1, 4096, 16, 64), torch.bfloat16), strict=True))
    w = given["w"].detach().float().expand(1, 4096, 16, 64)
    decays = {"raw": w.exp(), "log": -w}[inputs.decay_of(op)]
    longest = max(diagonal_chunked.CHUNK_LENS)
    assert decays.unflatten(1, (-1, longest // 2)).sum(2).max() < LARGEST_DECAY["bf16"] / 2


@pytest.mark.parametrize("times", [[1.97], [1.0, 1.0, 2.1], [2.0]], ids=str)
def test_what_does_not_beat_the_default_beyond_doubt_leaves_no_choice(times, measuring):
    store(make(training=False), make(32))
    measuring.ms[FORWARD] = times
    result = measure()
    assert [row["chosen"] for row in result["rows"]] == [False, False]
    assert stored() == [make(32)]


@pytest.mark.parametrize("value", [1.1, float("nan"), float("inf")])
def test_what_disagrees_with_the_default_is_dropped(value, measuring):
    measuring.ms[FORWARD] = [0.5]
    measuring.found[FORWARD] = value
    rows = measure()["rows"]
    for row in rows:
        (dropped,) = row["dropped"]
        assert Candidate(*[dropped[name] for name in Candidate._fields]) == FORWARD
        assert FORWARD.num_threads not in [each["num_threads"] for each in row["measured"] if each["blocks"] == 2
                                           and each["chunk_len"] == 16]  # fmt: skip
    assert stored() == []
    measuring.found[FORWARD] = 1.01  # as roundings differ
    measure()
    assert len(stored()) == 2


def test_default_that_is_no_number_is_an_error_and_nothing_is_stored(measuring):
    measuring.found[Candidate("forward", 32, 128, 4)] = float("nan")
    with pytest.raises(
        RwkvJitError, match=re.escape("the default's results of wkv7 are not finite at (8, 4096, 64, 64)")
    ):
        measure()
    assert not tuned.path().exists()


def test_default_is_what_is_shipped_and_the_users_choice_is_not(measuring, monkeypatch):
    monkeypatch.setattr(tuned, "SHIPPED", (make(),))
    store(make(forward_blocks=1))
    row, _ = measure()["rows"]
    assert row["default"] == make().geometry._asdict() | {"ms": 4.0, "spread": 0.0}
    assert [each.origin for each in tuned.listed()] == ["shipped"]


def test_dry_run_measures_and_stores_nothing(measuring, run):
    measuring.ms[FORWARD] = [1.0]
    code, printed, said = run("tune", "--op", "wkv7", "--dry-run", "--shape", "8,4096,64,64")
    assert (code, said) == (0, "")
    assert printed.splitlines()[-1] == "2 choices, not stored."
    assert not tuned.path().exists()
    assert measure(dry_run=True)["path"] is None


def test_measurement_is_printed_and_as_json_it_is_data(measuring, run):
    measuring.ms[FORWARD], measuring.found[Candidate("forward", 16, 128, 3)] = [1.0, 1.1], 2.0
    code, printed, said = run("tune", "--op", "wkv7")
    assert (code, said) == (0, "")
    lines = printed.splitlines()
    assert lines[0] == f"{GPU}, {ARCH}"
    assert re.search(
        r"wkv7 +\(8, 4096, 64, 64\) +gradients +32, 128, 4, 2 +4\.0000 +0\.0% +16, 256, 2, 2 +3\.\d+ ", printed
    )
    assert "Dropped: wkv7 at [8, 4096, 64, 64]: forward 16, 128, 3, 7.1e-01 from the default." not in printed
    assert "Dropped: wkv7 at [8, 4096, 64, 64]: forward 16, 128, 3, 1.0e+00 from the default." in lines
    assert lines[-1] == f"4 choices, stored in {tuned.path()}, for processes that start from now."
    code, printed, _ = run("tune", "--op", "wkv7", "--json")
    assert json.loads(printed)["rows"][0]["fastest"]["num_threads"] == 256


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def refuse(monkeypatch):
    """Nothing may be compiled."""

    def refuse(*_, **__):
        raise AssertionError("it compiles")

    monkeypatch.setattr(kernel, "get_async", refuse)
    monkeypatch.setattr(kernel, "get_all", refuse)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("8,4096,64", "--shape: expected positive numbers B,T,H,N, got '8,4096,64'"),
        ("8,4096,64,0", "--shape: expected positive numbers B,T,H,N, got '8,4096,64,0'"),
        ("8,4096,-1,64", "--shape: expected positive numbers B,T,H,N, got '8,4096,-1,64'"),
        ("a,b,c,d", "--shape: expected positive numbers B,T,H,N, got 'a,b,c,d'"),
        ("1,64,1,160", "--shape: the chunked backend of wkv5 takes head sizes up to 128, got 160 and 160 for v"),
    ],
)
def test_shape_that_does_not_fit_is_told_before_anything_is_compiled(shape, message, measuring, refuse, run):
    assert run("tune", "--shape", "1,64,1,64", "--shape", shape) == (2, "", f"rwkv-jit tune: {message}\n")


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("sm_90", ["--op", "wkv4"], "--op: kernels of wkv4 have one geometry\n"),
        ("sm_90", ["--op", "kda"], "--op: kernels of kda have one geometry; tune wkv7, which runs its calls without "),
        ("sm_90", ["--shape", "1,64,1,64", "--shape", "2,64,1,40"],
         "--shape: expected one for each head size in steps of 32, got (1, 64, 1, 64) and (2, 64, 1, 40)\n"),
        ("sm_89", ["--op", "wkv7", "--shape", "1,64,1,128"], "shape: the chunked backend of wkv7 needs "),
        ("sm_89", ["--op", "gla", "--shape", "1,64,1,128"], "shape: the chunked backend of gla needs "),
        ("sm_75", [], "needs an architecture from sm_80 on, got sm_75\n"),
        ("sm_75", ["--shape", "1,64,1,64"], "needs an architecture from sm_80 on, got sm_75\n"),
    ],
)  # fmt: skip
def test_what_there_are_no_kernels_for_is_told(arch, options, message, measuring, refuse, monkeypatch, run):
    monkeypatch.setattr(tensors, "_capability", lambda device: arch)
    code, printed, said = run("tune", *options)
    assert (code, printed) == (2, "")
    assert message in said


def test_without_a_gpu_the_error_says_so(refuse, monkeypatch, run):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "needs a GPU, and torch sees none; `rwkv-jit doctor` says why"
    assert run("tune") == (2, "", f"rwkv-jit tune: {message}\n")


def test_without_nvrtc_the_error_says_so(measuring, refuse, monkeypatch, run):
    def missing():
        raise NvrtcNotFoundError("CuPy is not installed")

    monkeypatch.setattr(cuda, "nvrtc", missing)
    assert run("tune", "--json") == (2, "", "rwkv-jit tune: CuPy is not installed\n")


def test_cache_that_is_off_or_cannot_be_written_is_told_before_measuring(measuring, refuse, monkeypatch, tmp_path, run):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tune, "run", lambda parsed: pytest.fail("it measures"))
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / "file"))
    code, _, said = run("tune")
    assert code == 2
    assert "RWKVJIT_CACHE_DIR: expected a place that can be written" in said
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    message = "RWKVJIT_CACHE=0 turns the cache off: unset it, or store nothing with --dry-run"
    assert run("tune") == (2, "", f"rwkv-jit tune: {message}\n")


def test_choices_are_shown(run, monkeypatch):
    assert run("tune", "--show") == (0, "no choices: every call takes the default\n", "")
    assert json.loads(run("tune", "--show", "--json")[1]) == {"path": str(tuned.path()), "choices": []}
    monkeypatch.setattr(
        tuned, "SHIPPED", (make(32, num_threads=64, forward_blocks=4, backward_blocks=6), make(training=False))
    )
    store(make(), make(training=False, forward_blocks=1), make(96, chunk_len=8))
    code, printed, said = run("tune", "--show")
    assert (code, said) == (0, "")
    head, *rows = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    assert head == [
        "GPU", "arch", "op", "head size", "for", "chunk_len", "threads", "blocks", "origin", "state",
    ]  # fmt: skip
    assert sorted(rows) == [
        [GPU, ARCH, "wkv7", "32", "gradients", "16", "64", "4, 6", "shipped", "ok"],
        [GPU, ARCH, "wkv7", "64", "forward alone", "16", "256", "1", "tuned", "ok"],
        [GPU, ARCH, "wkv7", "64", "gradients", "16", "256", "2, 3", "tuned", "ok"],
        [GPU, ARCH, "wkv7", "96", "gradients", "8", "256", "2, 3", "tuned", "not legal"],
    ]
    data = json.loads(run("tune", "--show", "--json")[1])
    assert make()._asdict() | {"origin": "tuned", "state": "ok"} in data["choices"]


def test_choices_are_forgotten(run):
    path = tuned.path()
    store(make())
    assert run("tune", "--forget") == (0, f"{path} deleted\n", "")
    assert not path.exists()
    assert run("tune", "--forget") == (0, f"there is no {path}\n", "")
    assert json.loads(run("tune", "--forget", "--json")[1]) == {"path": str(path), "deleted": False}
    os.makedirs(path)
    code, _, said = run("tune", "--forget")
    assert code == 2
    assert said.startswith(f"rwkv-jit tune: {path} cannot be deleted: ")


def test_choices_behind_a_link_are_left_alone(run, tmp_path, monkeypatch):
    store(make())
    path = tuned.path()
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(link))
    code, _, said = run("tune", "--forget")
    assert (code, "is a symbolic link" in said) == (2, True)
    assert path.exists()


@pytest.mark.parametrize("options", [("--show", "--forget"), ("--forget", "--dry-run"), ("--show", "--dry-run")])
def test_only_one_of_show_forget_and_dry_run(options, run):
    code, _, said = run("tune", *options)
    assert code == 2
    assert "not allowed with argument" in said
