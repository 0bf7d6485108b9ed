"""The rule: which algorithm a call takes, with which geometry, and what it says where it cannot."""

import contextlib
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem
from torch._dynamo.backends.common import aot_autograd

import rwkv_jit
from rwkv_jit.call import rule, torch_op, tuned
from rwkv_jit.call.options import CallOptions
from rwkv_jit.call.tuned import Geometry
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import delta_chunked, diagonal_chunked, directions, segments
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS
from rwkv_jit.schedules.update import FEW_TOKENS

DIAGONAL = [name for name, op in OPS.items() if op.family == "diagonal"]
NOTHING_KNOWN = rule.Known((), lambda place: True)
CALL = problem("wkv7", decay="sigmoid", training=True, is_chosen=False)
# What tests call the numbers that they change; tokens are those of a sequence.
NUMBERS = {"head_size": "K", "value_size": "V", "tokens": "T", "blocks": "N"}
RAW = {"decay": "raw"}


def sizes(head_size, value_size=None):
    return {"head_size": head_size, "value_size": value_size or head_size}


def bound(least):
    return {"decay_bound": least}


def asked(backend, changes, arch="sm_90"):
    """The problem of a call that the rule has not seen, with these changes."""
    changes = {NUMBERS.get(name, name): value for name, value in changes.items()}
    op, dtype = OPS[changes.pop("op", "wkv7")], changes.pop("dtype", "bf16")
    gpu = Gpu(arch, multiprocessors=changes.pop("multiprocessors", None))
    p = CALL._replace(op=op, types=dict.fromkeys(op.names, dtype), gpu=gpu, backend=backend, **changes)
    return (
        p._replace(T=p.T * p.N, chunk_len=p.chunk_len or 0) if p.is_packed else p._replace(chunk_len=p.chunk_len or 0)
    )


def choose(backend, changes, arch="sm_90"):
    return rule.choose(asked(backend, changes, arch))


def check_refused(backend, changes, arch, message):
    with pytest.raises(UnsupportedConfigError) as caught:
        choose(backend, changes, arch)
    assert str(caught.value) == f"backend: {backend!r} {message}"


def check_recurrent(backend, changes, arch, message):
    """What the tensor cores cannot do is for the recurrent kernels; who asks for them is told why."""
    assert choose("auto", changes, arch) == ("recurrent", changes.get("chunk_len") or 0)
    check_refused(backend, changes, arch, f"{message}; use 'auto' or 'recurrent'")


LARGE, LARGEST, HALF = sizes(256), sizes(1024), {"dtype": "fp16"}


FEW = {"blocks": 16, "tokens": 32768, "multiprocessors": 132}  # heads, for segments
NO_GRAD = FEW | RAW | {"tokens": 512, "training": False}
MIXED = sizes(256, 512)
EVERY_OP, DELTA = ("wkv7", *DIAGONAL), ("wkv7",)
# What is changed in CALL, the architecture, the algorithm and its chunk.
TAKEN = {
    EVERY_OP: [
        ({}, "sm_90", "chunked", 32),
        ({}, "sm_80", "chunked", 32),
        ({}, "sm_90a", "chunked", 32),
        ({}, "compute_80", "chunked", 32),
        (HALF, "sm_90", "chunked", 16),  # whose range no decay of a sigmoid leaves
        (HALF | RAW, "sm_90", "chunked", 32),
        (HALF | RAW | bound(-0.43), "sm_90", "chunked", 32),
        (HALF | RAW | bound(-0.87), "sm_90", "chunked", 16),
        (HALF | RAW | bound(-0.88), "sm_90", "chunked", 32),
        (HALF | FEW, "sm_90", "segments", 16),
        ({"tokens": rule.LEAST_TOKENS}, "sm_90", "chunked", 16),
        ({"tokens": 16}, "sm_90", "chunked", 16),
        ({"tokens": 17}, "sm_90", "chunked", 32),
        ({"tokens": 16, "chunk_len": 32}, "sm_90", "chunked", 32),
        ({"chunk_len": 16}, "sm_90", "chunked", 16),
        (bound(-50.0), "sm_90", "chunked", 32),
        (RAW, "sm_90", "chunked", 32),
        (RAW | bound(-8.0), "sm_90", "chunked", 16),
        (FEW, "sm_90", "segments", 32),
        (FEW | {"is_packed": True}, "sm_90", "chunked", 32),
        (FEW | {"blocks": 67}, "sm_90", "chunked", 32),
        (FEW | {"multiprocessors": None}, "sm_90", "chunked", 32),
        (FEW | {"tokens": 1000}, "sm_90", "chunked", 32),
        (FEW | RAW | bound(-8.0), "sm_90", "segments", 16),
        (FEW | {"chunk_len": 16}, "sm_90", "segments", 16),
        (FEW | sizes(1), "sm_90", "segments", 32),
        (FEW | sizes(128), "sm_90", "segments", 32),
        (FEW | sizes(129), "sm_90", "large", 64),
        (sizes(1), "sm_90", "chunked", 32),
        (sizes(128), "sm_90", "chunked", 32),
        (sizes(128, 33), "sm_90", "chunked", 32),
        (sizes(7, 128), "sm_90", "chunked", 32),
        (sizes(96), "sm_89", "chunked", 16),
        (sizes(96) | RAW, "sm_89", "chunked", 16),
        ({"head_size": 129}, "sm_90", "large", 64),
        ({"head_size": 257}, "sm_90", "large", 64),
        ({"value_size": 200}, "sm_90", "large", 64),
        (sizes(1, 129), "sm_90", "large", 64),
        (sizes(1024, 1), "sm_90", "large", 64),
        (LARGE, "sm_90", "large", 64),
        (LARGE, "sm_86", "large", 32),
        (LARGE, "sm_120", "large", 32),
        (LARGE | RAW, "sm_89", "large", 32),
        (LARGE | {"chunk_len": 32}, "sm_90", "large", 32),
        (LARGE | {"is_packed": True}, "sm_90", "large", 64),
        (LARGE | {"training": False}, "sm_90", "large", 64),
        (LARGE | FEW | {"tokens": 100}, "sm_90", "large", 64),
        (LARGEST, "sm_90", "large", 64),
        (LARGEST | {"chunk_len": 64}, "sm_90a", "large", 64),
        (MIXED, "sm_90a", "large", 64),
        (MIXED, "sm_89", "large", 32),
    ],
    DELTA: [
        (sizes(96) | {"training": False}, "sm_90", "chunked", 16),
        (FEW | sizes(96) | {"training": False}, "sm_90", "segments", 16),
        (LARGE, "sm_80", "large", 64),
        # Few heads, whose segments are worth two more walks.
        (LARGE | FEW | {"blocks": 4}, "sm_90", "large_segments", 64),
        (LARGE | FEW | {"blocks": 5}, "sm_90", "large", 64),
        (LARGE | FEW | {"blocks": 1, "tokens": 32768}, "sm_80", "large_segments", 64),
        (LARGE | FEW | {"blocks": 1, "tokens": 32767}, "sm_90", "large", 64),
        (LARGE | FEW | {"blocks": 1, "is_packed": True, "longest": 32768}, "sm_90", "large", 64),
        (LARGE | FEW | sizes(257) | {"blocks": 1}, "sm_90", "large", 64),
        (FEW | sizes(128, 32) | {"blocks": 16}, "sm_90", "large_segments", 64),
        (LARGE | HALF, "sm_90", "large", 32),
        (LARGE | HALF | RAW | bound(-0.4), "sm_90", "large", 32),
        (LARGE | HALF | RAW | bound(-0.2), "sm_90", "large", 64),
        (LARGE | {"tokens": 32}, "sm_90", "large", 32),
        (LARGE | {"tokens": 33}, "sm_90", "large", 64),
        (LARGE, "compute_80", "large", 64),
        (LARGE | {"num_threads": 128}, "sm_90", "large", 64),
        (LARGEST, "sm_80", "large", 32),
        (LARGEST, "compute_90", "large", 32),
        (LARGEST, "sm_100", "large", 32),
        (LARGEST | RAW | bound(-4.0), "sm_90", "large", 32),
    ],
    tuple(DIAGONAL): [
        ({"chunk_len": 64}, "sm_90", "chunked", 64),
        (sizes(128), "sm_80", "chunked", 32),
        (sizes(128) | {"training": False}, "sm_90", "chunked", 32),
        (FEW | {"chunk_len": 64}, "sm_90", "segments", 64),
        (FEW | sizes(128, 32) | {"blocks": 16}, "sm_90", "large_segments", 64),
        (FEW | sizes(128, 32) | {"blocks": 17}, "sm_90", "large", 64),
        (FEW | sizes(128), "sm_89", "large", 32),
        (sizes(128), "sm_89", "large", 32),  # for which chunked kernels have no room
        (sizes(128) | {"chunk_len": 64}, "sm_90", "large", 64),
        (sizes(128, 32), "sm_90", "large", 64),
        (sizes(128, 32), "sm_80", "large", 32),
        ({"head_size": 256}, "sm_80", "large", 32),
        # Few heads, whose segments are worth two more walks.
        (LARGE | FEW | {"blocks": 4}, "sm_90", "large_segments", 64),
        (LARGE | FEW | {"blocks": 5}, "sm_90", "large", 64),
        (LARGE | FEW | {"blocks": 1, "tokens": 32768}, "sm_80", "large_segments", 32),
        (LARGE | FEW | {"blocks": 1, "tokens": 32767}, "sm_90", "large", 64),
        (LARGE | FEW | {"blocks": 1, "is_packed": True, "longest": 32768}, "sm_90", "large", 64),
        (LARGE | FEW | sizes(512) | {"blocks": 1}, "sm_90", "large_segments", 64),
        ({"value_size": 1024}, "sm_80", "large", 32),
        (MIXED, "sm_100", "large", 32),
        (MIXED, "compute_90", "large", 32),
        (LARGEST | RAW | bound(-4.0), "sm_90", "large", 64),
        # The chunk of warp groups, or one that the bound asks for.
        (MIXED | RAW | bound(-2.0), "sm_90a", "large", 64),
        (MIXED | RAW | bound(-2.1), "sm_90", "large", 32),
        (MIXED | RAW | bound(-4.1), "sm_90", "large", 16),
        (MIXED | RAW | bound(-8.0), "sm_90", "large", 16),
        (MIXED | RAW | bound(-8.1), "sm_90", "large", 64),
        (MIXED | HALF, "sm_90", "large", 16),
        (MIXED | HALF | RAW, "sm_90", "large", 64),
        (LARGE | {"tokens": rule.LEAST_TOKENS}, "sm_90", "large", 64),
        (MIXED | RAW | bound(-1.0), "sm_80", "large", 32),
        (MIXED | RAW | bound(-4.1), "sm_80", "large", 16),
        (sizes(257, 512) | RAW | bound(-2.1), "sm_90", "large", 64),  # nothing else takes these keys
        # With threads that warp groups do not have the state would spill in chunks of 64.
        (MIXED | {"num_threads": 384}, "sm_90", "large", 64),
        (MIXED | {"num_threads": 256}, "sm_90", "large", 32),
        (MIXED | {"num_threads": 512} | RAW | bound(-2.0), "sm_90", "large", 32),
        (MIXED | {"num_threads": 512} | RAW | bound(-4.1), "sm_100", "large", 16),
        (MIXED | {"num_threads": 256, "chunk_len": 64}, "sm_90", "large", 64),
        (LARGE | {"chunk_len": 16}, "sm_90", "large", 16),
    ],
}
# The same of few heads that blocks could hold, without gradients, where nobody asks for an algorithm.
OF_FEW_HEADS = {
    EVERY_OP: [
        (NO_GRAD, "sm_90", "large", 64),
        (NO_GRAD, "sm_90a", "large", 64),
        (NO_GRAD | {"training": True}, "sm_90", "chunked", 32),
        (NO_GRAD | {"multiprocessors": None}, "sm_90", "chunked", 32),
        (NO_GRAD | {"multiprocessors": 32}, "sm_90", "chunked", 32),
        (NO_GRAD | {"chunk_len": 32}, "sm_90", "chunked", 32),
        (NO_GRAD | {"num_threads": 128}, "sm_90", "chunked", 32),
        (NO_GRAD | {"tokens": 191}, "sm_90", "chunked", 32),
        (NO_GRAD | {"tokens": 192, "blocks": 49}, "sm_90", "large", 64),
        (NO_GRAD | {"blocks": 49, "tokens": 1034}, "sm_90", "large", 64),
        (NO_GRAD | {"blocks": 67}, "sm_90", "chunked", 32),
        (NO_GRAD | {"is_packed": True}, "sm_90", "chunked", 32),  # whose longest sequence is not known
        (NO_GRAD | {"is_packed": True, "tokens": 100, "longest": 192}, "sm_90", "large", 64),
        (NO_GRAD | {"is_packed": True, "longest": 191}, "sm_90", "chunked", 32),
        (NO_GRAD | sizes(128) | {"blocks": 65}, "sm_90", "large", 64),
        (NO_GRAD | sizes(64, 65) | {"blocks": 65}, "sm_90", "large", 64),
        (NO_GRAD | sizes(65, 64) | {"blocks": 65}, "sm_90", "large", 64),
    ],
    DELTA: [
        (NO_GRAD | {"blocks": 50, "tokens": 192}, "sm_90", "chunked", 32),
        (NO_GRAD | {"blocks": 49, "tokens": 1035}, "sm_90", "chunked", 32),
        (NO_GRAD | {"tokens": 2560}, "sm_90", "large", 64),
        (NO_GRAD | {"tokens": 2561}, "sm_90", "segments", 32),
        (NO_GRAD | sizes(128) | {"blocks": 65, "tokens": 128}, "sm_90", "large", 64),
        (NO_GRAD | sizes(128) | {"blocks": 65, "tokens": 127}, "sm_90", "chunked", 16),
        (NO_GRAD | sizes(128) | {"blocks": 65, "tokens": 12288}, "sm_90", "large", 64),
        (NO_GRAD | sizes(128) | {"blocks": 65, "tokens": 12289}, "sm_90", "segments", 16),
        (NO_GRAD | sizes(128) | {"blocks": 66}, "sm_90", "chunked", 16),
        (NO_GRAD | HALF, "sm_90", "large", 32),
        (NO_GRAD | bound(-4.0), "sm_90", "large", 32),
        (NO_GRAD, "sm_80", "chunked", 32),  # where nobody has measured it
    ],
    tuple(DIAGONAL): [
        (NO_GRAD | {"tokens": 1280}, "sm_90", "large", 64),
        (NO_GRAD | {"tokens": 1281}, "sm_90", "segments", 32),
        (NO_GRAD | {"blocks": 50, "tokens": 1013}, "sm_90", "large", 64),
        (NO_GRAD | {"blocks": 50, "tokens": 1014}, "sm_90", "chunked", 32),
        (NO_GRAD | sizes(128) | {"tokens": 191}, "sm_90", "chunked", 32),
        (NO_GRAD | sizes(128) | {"tokens": 3072}, "sm_90", "large", 64),
        (NO_GRAD | sizes(128) | {"tokens": 3073}, "sm_90", "segments", 32),
        (NO_GRAD | sizes(128) | {"blocks": 65, "tokens": 1559}, "sm_90", "large", 64),
        (NO_GRAD | sizes(128) | {"blocks": 65, "tokens": 1560}, "sm_90", "segments", 32),
        (NO_GRAD | HALF, "sm_90", "large", 64),
        (NO_GRAD | bound(-4.0), "sm_90", "chunked", 32),  # no warp groups have such short chunks
        (NO_GRAD, "sm_80", "chunked", 32),
    ],
}
WANTED = {length: delta_chunked.most_shared_bytes(128, 128, length) for length in (16, 32)}
OLD = "needs an architecture from sm_80 on, got"
HALVES = "takes float16 and bfloat16, got torch."
ROOM = "needs more shared memory at head sizes"
# What is changed in CALL, the architecture, the chunk of the kernels for large heads, and what is in the way of the
# others.
LARGE_INSTEAD = [
    ({"chunk_len": 64}, "sm_90", 64, "takes chunk_len 16 or 32, got 64"),
    (sizes(129, 64), "sm_90", 64, "takes head sizes up to 128, got 129 and 64 for v"),
    (sizes(64, 200), "sm_90", 64, "takes head sizes up to 128, got 64 and 200 for v"),
    (
        sizes(65, 32), "sm_90", 64,
        "takes keys up to twice as long as values (in steps of 32), got 65 and 32 for v",
    ),
    *[
        (
            sizes(128) | changes, arch, 32,
            f"needs {WANTED[n]} bytes of shared memory at head sizes 128 and 128 and chunk_len={n}, {arch} has 101376",
        )
        for changes, arch, n in (({}, "sm_89", 16), ({"chunk_len": 32}, "sm_120", 32))
    ],
]  # fmt: skip
# The backend that is asked for, what is changed in CALL, the architecture, and what is in the way.
NOT_TAKEN = [
    ("chunked", {"dtype": "fp32"}, "sm_90", HALVES + "float32"),
    ("chunked", {"dtype": "fp64"}, "sm_90", HALVES + "float64"),
    ("chunked", {}, "sm_75", f"{OLD} sm_75"),
    ("chunked", {}, "compute_75", f"{OLD} compute_75"),
    ("chunked", {"chunk_len": 8}, "sm_90", "takes chunk_len 16 or 32, got 8"),
    ("chunked", sizes(2000, 64), "sm_90", "takes head sizes up to 128, got 2000 and 64 for v"),
    (
        "chunked", sizes(128) | {"chunk_len": 16}, "sm_89",
        f"needs {WANTED[16]} bytes of shared memory at head sizes 128 and 128 and chunk_len=16, sm_89 has 101376",
    ),
    ("split", LARGE | {"dtype": "fp32"}, "sm_90", HALVES + "float32"),
    ("split", LARGE, "sm_75", f"{OLD} sm_75"),
    ("split", LARGE | {"head_size": 1025}, "sm_90", "takes head sizes up to 1024, got 1025 and 256 for v"),
    ("split", LARGE | {"value_size": 1025}, "sm_90", "takes head sizes up to 1024, got 256 and 1025 for v"),
    ("split", LARGE | {"chunk_len": 16}, "sm_90", "takes chunk_len 32 or 64 at head sizes above 128, got 16"),
    ("split", LARGEST, "sm_89", f"{ROOM} 1024 and 1024 and chunk_len=32 than the 101376 bytes of sm_89"),
    (
        "split", LARGEST | {"chunk_len": 64}, "sm_100",
        f"{ROOM} 1024 and 1024 and chunk_len=64 than the 232448 bytes of sm_100",
    ),
    (
        "split", LARGE | {"chunk_len": 64}, "sm_120",
        f"{ROOM} 256 and 256 and chunk_len=64 than the 101376 bytes of sm_120",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ops", "changes", "arch", "algorithm", "chunk_len"), [(ops, *row) for ops in TAKEN for row in TAKEN[ops]], ids=str
)
def test_tensor_cores_are_taken_where_they_can_do_it(ops, changes, arch, algorithm, chunk_len):
    backend = "chunked" if algorithm == "chunked" else "split"
    for op in ops:
        call = {"op": op} | changes
        assert choose("auto", call, arch) == choose(backend, call, arch) == (algorithm, chunk_len)
        assert choose("recurrent", call, arch) == ("recurrent", changes.get("chunk_len", 0))


@pytest.mark.parametrize(
    ("ops", "changes", "arch", "algorithm", "chunk_len"),
    [(ops, *row) for ops in OF_FEW_HEADS for row in OF_FEW_HEADS[ops]],
    ids=str,
)
def test_few_heads_take_the_kernels_of_large_ones_where_these_are_faster(ops, changes, arch, algorithm, chunk_len):
    for op in ops:
        call = {"op": op} | changes
        assert choose("auto", call, arch) == (algorithm, chunk_len)
        assert choose("chunked", call, arch)[0] == "chunked"


@pytest.mark.parametrize(("backend", "changes", "arch", "message"), NOT_TAKEN, ids=str)
def test_everything_else_is_recurrent_and_says_why_where_others_are_asked_for(backend, changes, arch, message):
    check_recurrent(backend, changes, arch, message)


@pytest.mark.parametrize(("changes", "arch", "chunk_len", "message"), LARGE_INSTEAD, ids=str)
def test_heads_that_no_block_holds_are_for_the_kernels_of_large_ones(changes, arch, chunk_len, message):
    assert choose("auto", changes, arch) == choose("split", changes, arch) == ("large", chunk_len)
    check_refused("chunked", changes, arch, f"{message}; use 'auto' or 'recurrent'")


@pytest.mark.parametrize(
    ("changes", "backend", "algorithm"), [({}, "chunked", "chunked"), (LARGE, "split", "large")], ids=str
)
def test_short_calls_are_recurrent_unless_others_are_asked_for(changes, backend, algorithm):
    short = changes | {"tokens": rule.LEAST_TOKENS - 1}
    assert choose("auto", short)[0] == "recurrent"
    assert choose(backend, short)[0] == algorithm


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "wkv6", "dtype": "fp32"},
        {"op": "gla"} | sizes(1025, 512),
        {"dtype": "fp32"},
        {"tokens": 1},
        {"head_size": 256, "dtype": "fp32"},
        {"head_size": 1025},
    ],
    ids=str,
)
def test_gpu_is_not_asked_where_it_decides_nothing(changes):
    """Without a GPU, as of tensors without memory, its architecture is an error."""
    assert choose("auto", changes, arch="")[0] == "recurrent"
    with pytest.raises(UnsupportedConfigError, match="there is no GPU, whose architecture decides"):
        choose("auto", {}, arch="")


@settings(max_examples=400, derandomize=True, database=None)
@given(
    op=st.sampled_from(["wkv7", *DIAGONAL]), dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    head_size=st.integers(1, 1100), value_size=st.integers(1, 1100), tokens=st.integers(0, 40000),
    decay=st.sampled_from(["raw", "sigmoid", "log", "direct"]), decay_bound=st.none() | st.floats(-20, 0),
    chunk_len=st.none() | st.sampled_from([1, 8, 16, 32, 64, 128]), training=st.booleans(), heads=st.integers(1, 300),
    arch=st.sampled_from(["sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_90"]),
    multiprocessors=st.sampled_from([None, 132]),
)  # fmt: skip
def test_some_algorithm_takes_every_call(
    op, dtype, head_size, value_size, tokens, decay, decay_bound, chunk_len, training, heads, arch, multiprocessors
):
    decay, gpu = "none" if op == "linear_attention" else decay, Gpu(arch, multiprocessors=multiprocessors)
    p = problem(op, dtype, head_size, value_size, T=tokens, H=heads, decay=decay, training=training, backend="auto")
    p = p._replace(gpu=gpu, decay_bound=decay_bound, chunk_len=chunk_len or 0, is_chosen=False)
    made = rule.resolved(p, lambda: NOTHING_KNOWN)
    assert chunk_len in (None, made.chunk_len)
    assert directions.forward(made).launches
    if made.backend == "update":
        assert (training, tokens in range(1, FEW_TOKENS + 1)) == (False, True)
        return
    if made.backend != "recurrent":
        lengths = directions.ALGORITHMS[OPS[op].family]["large" if "large" in made.backend else "chunked"].CHUNK_LENS
        assert made.chunk_len in lengths
    assert directions.backward(made).launches


# ---- what the rule returns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "unseen", "changes"),
    [
        ("segments", "chunked", FEW),
        ("large", "chunked", NO_GRAD),
        ("large_segments", "large", LARGE | FEW | {"blocks": 4}),
    ],
    ids=str,
)
def test_heads_are_many_where_the_load_is_not_seen_or_may_decide_nothing(seen, unseen, changes):
    p = asked("auto", changes)
    found = [
        rule.resolved(p, lambda: NOTHING_KNOWN),
        rule.resolved(p, lambda: NOTHING_KNOWN, sees_load=False),
        rule.resolved(p._replace(is_batch_invariant=True), lambda: NOTHING_KNOWN),
    ]
    assert [made.backend for made in found] == [seen, unseen, unseen]
    for made in found:  # nothing else of the call is another
        geometry = {name: getattr(p, name) for name in Geometry._fields}
        assert made._replace(backend="auto", is_chosen=False, is_batch_invariant=False, **geometry) == p


@pytest.mark.parametrize(
    ("seen", "unseen", "changes"),
    [
        ("segments", "chunked", FEW), ("segments", "chunked", FEW | {"is_packed": True, "longest": 32768}),
        ("large_segments", "large", LARGE | FEW | {"blocks": 4}), ("large", "large", LARGE | FEW | {"tokens": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_split_is_taken_at_its_word_where_the_load_is_not_seen_too(seen, unseen, changes):
    p = asked("split", changes)
    found = [rule.resolved(p, lambda: NOTHING_KNOWN, sees_load) for sees_load in (True, False)]
    assert [made.backend for made in found] == [seen, unseen]


def test_what_is_chosen_stays_and_ops_without_heads_leave_the_choice_to_their_schedules():
    p = asked("chunked", FEW)._replace(is_chosen=True)
    assert rule.resolved(p, lambda: NOTHING_KNOWN) is p
    p = problem("wkv4", backend="auto", is_chosen=False)
    assert rule.resolved(p, lambda: NOTHING_KNOWN) == p._replace(is_chosen=True)


def test_float16_rows_are_not_made_narrow():
    """As autocast makes rows of others float16 behind the public call."""
    p = asked("auto", HALF)._replace(is_narrow=True)
    assert not rule.resolved(p, lambda: NOTHING_KNOWN).is_narrow
    assert rule.resolved(p._replace(types=CALL.types), lambda: NOTHING_KNOWN).is_narrow


# ---- bounds of decays --------------------------------------------------------------------------------------------


def chosen(changes, arch="sm_90", backend="auto", known=NOTHING_KNOWN):
    made = rule.resolved(asked(backend, changes, arch), lambda: known)
    return made.backend, *(getattr(made, name) for name in Geometry._fields)


@pytest.mark.parametrize(
    ("size", "least", "length", "chunk_len"),
    [
        (64, None, None, 32),
        (64, -4.0, None, 32),
        (64, -4.1, None, 16),
        (64, -8.0, None, 16),
        (64, -8.1, None, 32),
        (64, -4.1, 32, 32),
        (64, -4.1, 16, 16),
        (256, None, None, 64),
        (256, -2.0, None, 64),
        (256, -2.1, None, 32),
        (256, -4.0, None, 32),
        (256, -4.1, None, 64),
        (256, -2.1, 64, 64),
    ],
)
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
def test_bound_makes_chunks_shorter_where_that_keeps_them_in_range(decay, size, least, length, chunk_len):
    """Where no chunk is short enough, the longest there is is taken."""
    changes = sizes(size) | {"decay": decay, "chunk_len": length} | bound(least)
    algorithm = "chunked" if size <= 128 else "large"
    assert chosen(changes) == (algorithm, chunk_len, None, None, None)
    # Nothing of this is so where the map itself is bounded, and in the recurrent kernels.
    usual = 32 if size <= 128 else 64
    assert chosen(changes | {"decay": "sigmoid"}) == (algorithm, length or usual, None, None, None)
    assert chosen(changes, backend="recurrent") == ("recurrent", length or 0, None, None, None)


@pytest.mark.parametrize(
    ("changes", "backend", "algorithm", "chunk_len"),
    [
        (RAW | FEW, "auto", "segments", 32),
        (RAW | FEW | bound(-8.0), "auto", "segments", 16),
        (RAW | {"tokens": 5}, "chunked", "chunked", 16),
        (RAW | {"tokens": 5} | LARGE, "split", "large", 32),
        # Inference of large heads prefers the short chunk, whatever the bound.
        (RAW | sizes(128) | {"training": False} | bound(-8.0), "auto", "chunked", 16),
        (RAW | sizes(128) | {"training": False} | bound(-8.1), "auto", "chunked", 16),
        ({"op": "linear_attention", "decay": "none"}, "auto", "chunked", 32),
        ({"op": "linear_attention", "decay": "none"} | LARGE, "auto", "large", 64),
    ],
    ids=str,
)
def test_chunks_of_segments_and_of_named_kernels_go_by_the_bound_too(changes, backend, algorithm, chunk_len):
    assert chosen(changes, backend=backend) == (algorithm, chunk_len, None, None, None)


# ---- segments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "blocks", "tokens", "count"),
    [
        ("delta", 16, 32768, 16), ("delta", 16, 8192, 16), ("delta", 16, 4096, 8), ("delta", 66, 32768, 4),
        ("delta", 67, 32768, 3), ("delta", 16, 32768 + 16, 16), ("delta", 1, 2048, 4), ("delta", 1, 2047, 3),
        ("delta", 1, 1, 0), ("delta", 16, 5 * 544, 5), ("delta", 1, 512 * 264, 264), ("delta", 1, 512 * 266, 224),
        ("diagonal", 32, 4096, 8), ("diagonal", 16, 4096, 16), ("diagonal", 66, 32768, 4), ("diagonal", 67, 32768, 3),
        ("diagonal", 16, 32768 + 32, 16), ("diagonal", 1, 1024, 4), ("diagonal", 1, 1023, 3),
        ("diagonal", 16, 5 * 320, 5), ("diagonal", 16, 5 * 288, 5), ("diagonal", 1, 256 * 264, 264),
    ],
)  # fmt: skip
def test_segments_are_equal_where_they_can_end_where_chunks_do(family, blocks, tokens, count):
    assert segments.segments(family, blocks, tokens, 132) == count
    lengths = {"delta": delta_chunked, "diagonal": diagonal_chunked}[family].CHUNK_LENS
    equal = [n for n in range(4, count + 1) if tokens % (n * max(lengths)) == 0]
    assert not equal or count == max(equal)
    # Those that are asked for are made with many heads too.
    assert [segments.segments(family, 1000, 4096, 132, least) for least in (1, 4)] == [1, 4]


@pytest.mark.parametrize("op", EVERY_OP)
def test_segments_are_cut_where_they_are_asked_for_and_nowhere_else(op):
    call = {"op": op} | FEW
    assert choose("split", call | {"blocks": 67}) == ("segments", 32)
    assert choose("chunked", call) == ("chunked", 32)
    assert choose("auto", call | {"dtype": "fp32"}) == ("recurrent", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_packed": True, "longest": 512}, "needs a sequence of 513 tokens, got 512"),
        ({"op": "wkv5", "is_packed": True, "longest": 512}, "needs a sequence of 513 tokens, got 512"),
        ({"is_packed": True, "longest": 4096, "tokens": 255}, "needs 256 tokens a sequence on average, got 255"),
        ({"is_batch_invariant": True}, "cuts nothing under `set_batch_invariant`"),
        ({"tokens": 2047}, "needs tokens for 4 segments of 512 or more, got 2047"),
        ({"op": "gla", "tokens": 1023}, "needs tokens for 4 segments of 256 or more, got 1023"),
    ],
    ids=str,
)
def test_split_says_why_it_cannot(changes, message):
    check_refused("split", FEW | changes, "sm_90", f"{message}; use 'auto' or 'chunked'")
    check_refused(
        "split", FEW | {"dtype": "fp32"}, "sm_90",
        HALVES + "float32; use 'auto' or 'recurrent'",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "heads", "backend"),
    [
        ([16384] + [1024] * 16, 32, "segments"), ([24832] + [256] * 31, 32, "segments"), ([4096] * 8, 32, "chunked"),
        ([8192] * 4, 16, "segments"), ([32768], 32, "segments"), ([500] * 4, 4, "chunked"), ([2000], 2, "segments"),
        ([8192] + [4096] * 6, 32, "chunked"), ([32768] + [16] * 2048, 32, "chunked"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", ["wkv7", "gla"])
def test_packed_sequences_are_cut_where_the_longest_one_would_be_late(op, lengths, heads, backend):
    call = {
        "op": op, "is_packed": True, "longest": max(lengths), "tokens": sum(lengths) // len(lengths),
        "blocks": heads * len(lengths), "multiprocessors": 132,
    }  # fmt: skip
    assert choose("auto", call)[0] == backend
    assert choose("auto", {**call, "longest": 0})[0] == "chunked"


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=12).filter(any), heads=st.integers(1, 40),
    family=st.sampled_from(["delta", "diagonal"]),
)  # fmt: skip
def test_places_of_ragged_segments_are_enough_and_apart(lengths, heads, family):
    """Those that span.cuh gives them, of as many as the problem says."""
    op = OPS["wkv7" if family == "delta" else "gla"]
    types, tokens = dict.fromkeys(op.names, "bf16"), sum(lengths)
    call = Problem(op, Gpu("sm_90", (), 132), types, T=tokens, H=heads, N=len(lengths), is_packed=True, K=64, V=64)
    cut = segments._cut(call)
    assert cut.is_ragged
    assert cut.length % 64 == 0
    begins = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    firsts = [begin // cut.length + i for i, begin in enumerate(begins)]
    for length, first, following in zip(lengths, firsts, firsts[1:], strict=False):
        assert 0 <= following - first - max(-(-length // cut.length), 1) <= 1
    assert firsts[-1] == cut.problem.N


# ---- large heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "largest_of_64"), [("sm_80", 512), ("sm_90", 1024), ("sm_90a", 1024), ("sm_100", 512)]
)
def test_every_size_of_large_heads_has_the_longest_chunk_there_is_for_it(arch, largest_of_64):
    for size in range(129, 1025):
        lengths = [n for n in (64, 32) if choose("auto", sizes(size) | {"chunk_len": n}, arch)[0] == "large"]
        assert lengths == ([64, 32] if size <= largest_of_64 else [32])
        assert choose("auto", sizes(size), arch) == ("large", lengths[0])
    assert choose("auto", {"head_size": 1025}, arch) == choose("auto", {"value_size": 1025}, arch)
    assert choose("auto", {"head_size": 1025}, arch) == ("recurrent", 0)


# ---- ops without a delta term --------------------------------------------------------------------------------------


def of_keys(arch, length):
    return f"takes keys above 256 on sm_90 with chunk_len=64 alone, got 257 on {arch} with chunk_len={length}"


# And why not, where "chunked" and "split" are asked for.
_KEYS = "takes head sizes up to 128, got 257 and 512 for v"
NOT_IN_DIAGONAL = [
    ({"dtype": "fp32"}, "sm_90", *(HALVES + "float32",) * 2),
    ({}, "sm_75", *(f"{OLD} sm_75",) * 2),
    ({"chunk_len": 8}, "sm_90", *("takes chunk_len 16, 32 or 64, got 8",) * 2),
    (sizes(257, 512), "sm_80", _KEYS, of_keys("sm_80", 16)),
    (sizes(257, 512) | {"chunk_len": 64}, "sm_100", _KEYS, of_keys("sm_100", 64)),
    (sizes(257, 512) | {"chunk_len": 64}, "compute_90", _KEYS, of_keys("compute_90", 64)),
    (sizes(257, 512) | {"chunk_len": 32}, "sm_90", _KEYS, of_keys("sm_90", 32)),
    (sizes(257, 512) | {"chunk_len": 16}, "sm_90a", _KEYS, of_keys("sm_90a", 16)),
    (sizes(1025, 512), "sm_90", *(f"takes head sizes up to {most}, got 1025 and 512 for v" for most in (128, 1024))),
    (sizes(64, 1025), "sm_90", *(f"takes head sizes up to {most}, got 64 and 1025 for v" for most in (128, 1024))),
]


@pytest.mark.parametrize(("changes", "arch", "of_chunked", "of_split"), NOT_IN_DIAGONAL, ids=str)
def test_other_calls_of_the_other_ops_are_recurrent_and_say_why(changes, arch, of_chunked, of_split):
    for op in DIAGONAL:
        check_recurrent("chunked", {"op": op} | changes, arch, of_chunked)
        check_recurrent("split", {"op": op} | changes, arch, of_split)


@pytest.mark.parametrize(
    ("backend", "changes", "arch", "message"),
    [
        ("chunked", sizes(128) | {"chunk_len": 16}, "sm_89", "'chunked' needs .* and chunk_len=16, sm_89 has 101376"),
        ("chunked", sizes(128) | {"chunk_len": 64}, "sm_90", "'chunked' needs .* and chunk_len=64, sm_90 has 232448"),
        ("chunked", sizes(65, 32), "sm_90", "takes keys up to twice as long as values .* got 65 and 32 for v"),
        ("split", LARGE | {"chunk_len": 64}, "sm_86", "'split' needs more shared memory .* than the 101376"),
    ],
)  # fmt: skip
def test_chunks_of_the_other_ops_say_what_they_have_no_room_for(backend, changes, arch, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        choose(backend, {"op": "gla"} | changes, arch)


# ---- measured geometries -------------------------------------------------------------------------------------------


def test_measured_geometries_are_of_the_chunked_kernels_alone():
    def known():
        raise AssertionError("it was asked")

    for algorithm, changes in (("large", LARGE), ("recurrent", {}), ("chunked", {"chunk_len": 64})):
        made = rule.geometry(algorithm, 64, asked("auto", changes), known)
        assert made == Geometry(64, None)


@pytest.mark.parametrize("op", EVERY_OP)
def test_measured_geometry_is_taken_where_it_is_sound_and_the_kernels_of_its_op_can_do_it(op):
    """Chunks of 64 are none of wkv7's, and have no shared memory at head sizes above 96."""
    for size, length, is_sound in itertools.product((64, 128), (16, 32, 64), (False, True)):
        choice = tuned.Choice("a GPU", "sm_90", op, size, True, length, 128, 2, 1, "")
        known = rule.Known([choice], lambda place, is_sound=is_sound: is_sound)
        made = chosen({"op": op} | sizes(size), known=known)
        is_taken = is_sound and (length < 64 or (op != "wkv7" and size == 64))
        assert made[1:5] == (choice.geometry if is_taken else Geometry(32, None))


def bf16(tokens, batch=1, head_size=64, count=6):
    return [torch.zeros(batch, tokens, 2, head_size, dtype=torch.bfloat16) for _ in range(count)]


def resolved(arrays, cu_seqlens=None, decay_bound=None, training=True, **options):
    given = torch_op.Options(1.0, "sigmoid", "vk", 64, None, None, "auto", is_chosen=False)._replace(**options)
    p = torch_op.problem_of(
        OPS["wkv7"], arrays, None, cu_seqlens, given, False, training, decay_bound, is_direct=True
    )  # fmt: skip
    return torch_op.options_of(torch_op.resolved(p, arrays, is_direct=True))[4:]


def test_call_is_resolved_with_its_chunk(as_if_on_gpu):
    assert resolved(bf16(32), decay="raw") == (32, None, "chunked", None, None, False, False, True)
    assert resolved(bf16(32), decay="raw", decay_bound=-8.0) == (16, None, "chunked", None, None, False, False, True)
    assert resolved(bf16(32, head_size=96), training=False) == (16, None, "chunked", None, None, False, False, True)
    assert resolved(bf16(4096)) == (32, None, "segments", None, None, False, False, True)
    assert resolved(bf16(33, head_size=256), backend="split", num_threads=128)[:3] == (64, 128, "large")
    assert resolved(bf16(32), chunk_len=4, num_threads=64) == (4, 64, "recurrent", None, None, False, False, True)
    chosen = resolved(bf16(4096), backend="chunked", chunk_len=16, is_chosen=True)
    assert chosen == (16, None, "chunked", None, None, False, False, True)


def test_packed_sequences_count_by_their_mean_length(as_if_on_gpu):
    for sequences, backend in ((1, "chunked"), (32, "chunked"), (33, "recurrent"), (128, "recurrent")):
        bounds = torch.linspace(0, 128, sequences + 1).to(torch.int64)
        assert resolved(bf16(128), bounds)[2] == backend


class NothingRuns(Exception):
    """A graph is made and not run."""


@pytest.mark.parametrize(
    ("op", "tokens", "head_size", "options", "chosen"),
    [
        ("wkv7", 64, 64, {"decay": "sigmoid"}, ("chunked", 32)),
        ("wkv7", 3, 64, {}, ("recurrent", 0)),
        ("gla", 64, 300, {"decay_bound": -2.1}, ("large", 64)),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("wkv7", 4, 64, {}, ("chunked", 16)),
                ("wkv7", 20, 192, {"decay": "sigmoid", "backend": "split"}, ("large", 32)),
                ("gla", 64, 192, {"decay_bound": -4.1}, ("large", 16)),
                ("gla", 64, 1025, {}, ("recurrent", 0)),
            )
        ),
    ],
    ids=str,
)
def test_compiler_sees_the_algorithm_that_will_run(op, tokens, head_size, options, chosen, as_if_on_gpu, monkeypatch):
    """The fakes choose, of a call with gradients."""
    seen, kept = [], directions.kept

    def watched(p):
        seen.append((p.backend, p.chunk_len))
        return kept(p)

    def refuse(*_, **__):
        raise NothingRuns

    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in bf16(tokens, 2, head_size, len(OPS[op].names))]
    compiler = aot_autograd(fw_compiler=lambda graph, _: graph.forward)
    monkeypatch.setattr(torch_op, "_prepare", refuse)
    monkeypatch.setattr(directions, "kept", watched)
    with contextlib.suppress(NothingRuns):
        torch.compile(getattr(rwkv_jit, op), fullgraph=True, backend=compiler, dynamic=True)(*leaves, **options)
    assert set(seen) == {chosen}


def test_names_of_backends_are_those_of_the_docstring():
    (quoted,) = re.findall(r"backend : \{(.*)\}", CallOptions.__doc__)
    assert tuple(name.strip(' "') for name in quoted.split(",")) == OPS["wkv7"].backends
