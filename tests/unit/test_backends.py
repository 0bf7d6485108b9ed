"""The rule that picks a backend, what each says it can do, and the geometry of the kernels in chunks."""

import itertools
import re

import pytest
import torch

import rwkv_jit
from rwkv_jit import runtime, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import (
    backends,
    boundary,
    choices,
    chunked,
    gated,
    gated_groups,
    gated_scan,
    guarded,
    interface,
    layout,
    prepared,
    recurrent,
    scan,
    scan_geometry,
    split,
)

most_shared_bytes = chunked.most_shared_bytes
CASE = backends.Case("wkv7", torch.bfloat16, 64, 64, 4096, "sigmoid", None, None)
# What is changed in CASE, and the architecture.
CHUNKED = {
    "float16": ({"dtype": torch.float16}, "sm_90"),
    "least tokens": ({"tokens": backends.LEAST_TOKENS}, "sm_90"),
    "raw, bound at 32": ({"decay": "raw", "decay_bound": -4}, "sm_90"),
    "direct, bound at 16": ({"decay": "direct", "decay_bound": -8.0, "chunk_len": 16}, "sm_90"),
    "bound at the chunk of the GPU": (
        {"decay": "log", "decay_bound": -8.0, "head_size": 96, "value_size": 96},
        "sm_89",
    ),
    "sigmoid and a useless bound": ({"decay_bound": -50.0}, "sm_90"),
    "raw": ({"decay": "raw"}, "sm_90"),
    "log, useless bound": ({"decay": "log", "decay_bound": -8.1}, "sm_90"),
    "direct, bound too low at 16": ({"decay": "direct", "decay_bound": -8.5, "chunk_len": 16}, "sm_90"),
    "direct, bound too low at 32": ({"decay": "direct", "decay_bound": -4.5, "chunk_len": 32}, "sm_90"),
    "direct of Ada": ({"decay": "direct", "head_size": 96, "value_size": 96}, "sm_89"),
    "largest": ({"head_size": 128, "value_size": 128}, "sm_90"),
    "smallest": ({"head_size": 1, "value_size": 1}, "sm_90"),
    "keys twice the values": ({"head_size": 128, "value_size": 33}, "sm_90"),
    "values longer": ({"head_size": 7, "value_size": 128}, "sm_90"),
    "chunk 16": ({"chunk_len": 16}, "sm_90"),
    "Ampere": ({}, "sm_80"),
    "extended": ({}, "sm_90a"),
    "PTX": ({}, "compute_80"),
    "largest of Ada": ({"head_size": 96, "value_size": 96}, "sm_89"),
}
# And why not, where "chunked" is asked for.
RECURRENT = {
    "float32": ({"dtype": torch.float32}, "sm_90", "takes float16 and bfloat16, got torch.float32"),
    "float64": ({"dtype": torch.float64}, "sm_90", "takes float16 and bfloat16, got torch.float64"),
    "keys beside short values": (
        {"head_size": 65, "value_size": 32},
        "sm_90",
        "takes keys up to twice as long as values (in steps of 32), got 65 and 32 for v",
    ),
    "Turing": ({}, "sm_75", "needs an architecture from sm_80 on, got sm_75"),
    "older PTX": ({}, "compute_75", "needs an architecture from sm_80 on, got compute_75"),
    "chunk 8": ({"chunk_len": 8}, "sm_90", "takes chunk_len 16 or 32, got 8"),
    "chunk 64": ({"chunk_len": 64}, "sm_90", "takes chunk_len 16 or 32, got 64"),
    "shared memory": (
        {"head_size": 128, "value_size": 128},
        "sm_89",
        f"needs {most_shared_bytes(128, 128, 16)} bytes of shared memory at head sizes 128 and 128 and chunk_len=16, "
        "sm_89 has 101376",
    ),
    "shared memory of the chunk": (
        {"head_size": 96, "value_size": 96, "chunk_len": 32},
        "sm_120",
        f"needs {most_shared_bytes(96, 96, 32)} bytes of shared memory at head sizes 96 and 96 and chunk_len=32, "
        "sm_120 has 101376",
    ),
}


def choose(backend, changes, arch):
    return backends.choose(backend, CASE._replace(**changes), lambda: arch)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunked_kernels_are_taken_where_they_can_do_it(name, backend):
    changes, arch = CHUNKED[name]
    found, chunk_len = choose(backend, changes, arch)
    assert found == "chunked"
    assert chunk_len == changes.get("chunk_len", 32 if arch != "sm_89" else 16)
    assert choose("recurrent", changes, arch) == ("recurrent", changes.get("chunk_len"))


@pytest.mark.parametrize("name", RECURRENT)
def test_everything_else_is_recurrent_and_says_why_where_chunks_are_asked_for(name):
    changes, arch, message = RECURRENT[name]
    assert choose("auto", changes, arch) == ("recurrent", changes.get("chunk_len"))
    with pytest.raises(UnsupportedConfigError) as caught:
        choose("chunked", changes, arch)
    assert str(caught.value) == f"backend: 'chunked' {message}; use 'auto' or 'recurrent'"


def test_short_calls_are_recurrent_unless_chunks_are_asked_for():
    short = {"tokens": backends.LEAST_TOKENS - 1}
    assert choose("auto", short, "sm_90")[0] == "recurrent"
    assert choose("chunked", short, "sm_90")[0] == "chunked"


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "wkv6", "dtype": torch.float32},
        {"op": "gla", "head_size": 1025, "value_size": 512},
        {"dtype": torch.float32},
        {"tokens": 1},
        {"head_size": 256, "dtype": torch.float32},
        {"head_size": 1025},
    ],
    ids=str,
)
def test_architecture_is_not_asked_where_it_decides_nothing(changes):
    def arch():
        raise AssertionError("it was asked")

    assert backends.choose("auto", CASE._replace(**changes), arch)[0] == "recurrent"


# ---- the call ----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors are taken for those of an sm_90; a trace could not go into the question which one it is."""

    def capability(device):
        torch._dynamo.graph_break()
        return "sm_90"

    monkeypatch.setattr(tensors, "_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(boundary, "_is_for_kernels", lambda backend, like: backend != "reference")


def resolved(given, cu_seqlens=None, decay_bound=None, training=True, **options):
    plain = interface.Options(1.0, "sigmoid", "vk", 64, None, None, "auto")
    op = rwkv_jit.wkv7.__globals__["OP"]
    return boundary._check(op, given, None, cu_seqlens, decay_bound, plain._replace(**options), training)[-1]


def bf16(tokens, batch=1, head_size=64):
    return [torch.zeros(batch, tokens, 2, head_size, dtype=torch.bfloat16) for _ in range(6)]


def test_call_is_resolved_with_its_chunk(on_gpu):
    assert resolved(bf16(32)) == (1.0, "sigmoid", "vk", 64, 32, None, "chunked", None, None, False)
    assert resolved(bf16(32), decay="raw", decay_bound=-1.0)[4:7] == (32, None, "chunked")
    assert resolved(bf16(32, head_size=96))[4:7] == (32, None, "chunked")
    assert resolved(bf16(32, head_size=256)) == (1.0, "sigmoid", "vk", 64, 64, None, "scan", None, None, False)
    assert resolved(bf16(32, head_size=256), decay="raw", decay_bound=-3.0)[4:7] == (32, None, "scan")
    assert resolved(bf16(32, head_size=1024))[4:7] == (64, None, "scan")
    assert resolved(bf16(1, head_size=256), backend="split", num_threads=128)[4:7] == (64, 128, "scan")
    assert resolved(bf16(31, head_size=256))[4:7] == (None, None, "recurrent")
    assert resolved(bf16(32, head_size=96), training=False)[4:7] == (16, None, "chunked")
    assert resolved(bf16(31))[4:7] == (None, None, "recurrent")
    assert resolved(bf16(32), decay="raw", backend="recurrent")[4:7] == (None, None, "recurrent")
    assert resolved(bf16(32), chunk_len=4, num_threads=64)[4:7] == (4, 64, "recurrent")
    assert resolved(bf16(32), backend="reference")[4:7] == (None, None, "reference")


@pytest.mark.parametrize(
    ("head_size", "bound", "asked", "chunk_len", "guarded"),
    [
        (64, None, None, 32, True),
        (64, -4.0, None, 32, False),
        (64, -4.1, None, 16, False),
        (64, -8.0, None, 16, False),
        (64, -8.1, None, 32, True),
        (64, -4.1, 32, 32, True),
        (64, -4.1, 16, 16, False),
        (64, -8.1, 16, 16, True),
        (256, None, None, 64, True),
        (256, -2.0, None, 64, False),
        (256, -2.1, None, 32, False),
        (256, -4.1, None, 64, True),
        (256, -2.1, 64, 64, True),
        (256, -4.1, 32, 32, True),
    ],
)
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
def test_call_is_guarded_where_no_bound_is_kept_by_its_chunk(
    decay, head_size, bound, asked, chunk_len, guarded, on_gpu
):
    """A shorter chunk is taken where that keeps a bound, and the longest there is where none does."""
    found = resolved(bf16(64, head_size=head_size), decay_bound=bound, decay=decay, chunk_len=asked)
    assert (found.backend, found.chunk_len, found.guarded) == (
        "chunked" if head_size <= 128 else "scan", chunk_len, guarded
    )  # fmt: skip
    # Nothing of this is so in the others, and where the map itself is a bound.
    assert not resolved(bf16(64, head_size=head_size), decay_bound=bound, chunk_len=asked).guarded
    for backend in ("recurrent", "reference"):
        options = {"decay": decay, "backend": backend}
        assert resolved(bf16(64, head_size=head_size), decay_bound=bound, **options)[6:] == (backend, None, None, False)


def test_segments_and_named_kernels_are_guarded_too(on_gpu):
    few_heads = bf16(4096)
    assert resolved(few_heads, decay="raw")[4:] == (32, None, "split", None, None, True)
    assert resolved(few_heads, decay="raw", decay_bound=-8.0)[4:] == (16, None, "split", None, None, False)
    assert resolved(bf16(5), decay="raw", backend="chunked")[4:] == (32, None, "chunked", None, None, True)
    assert resolved(bf16(5, head_size=256), decay="raw", backend="split")[4:] == (64, None, "scan", None, None, True)
    # Inference of large heads prefers the short chunk, and so keeps more.
    given = bf16(64, head_size=128)
    assert resolved(given, decay="raw", decay_bound=-8.0, training=False)[4:] == (
        16,
        None,
        "chunked",
        None,
        None,
        False,
    )
    assert resolved(given, decay="raw", decay_bound=-8.1, training=False)[4:] == (16, None, "chunked", None, None, True)


def test_packed_sequences_count_by_their_mean_length(on_gpu):
    for sequences, backend in ((1, "chunked"), (4, "chunked"), (5, "recurrent"), (128, "recurrent")):
        bounds = torch.linspace(0, 128, sequences + 1).to(torch.int64)
        assert resolved(bf16(128), bounds).backend == backend


def fixed_and_free(rows):
    """Rows with sizes that the compiler may take for fixed, or must not, in turn; each with both only with --full."""
    return [
        pytest.param(*row, dynamic, marks=() if dynamic == bool(place % 2) else pytest.mark.full)
        for place, row in enumerate(rows)
        for dynamic in (False, True)
    ]


@pytest.mark.parametrize(
    ("tokens", "head_size", "options", "backend", "chunk_len", "guarded", "dynamic"),
    fixed_and_free([
        (64, 64, {"decay": "sigmoid"}, "chunked", 32, False),
        (64, 64, {"decay_bound": -0.7}, "chunked", 32, False),
        (64, 64, {"decay_bound": -7.0}, "chunked", 16, False),
        (64, 64, {"decay_bound": -9.0}, "chunked", 32, True),
        (20, 64, {"decay": "sigmoid"}, "recurrent", None, False),
        (64, 64, {}, "chunked", 32, True),
        (20, 64, {}, "recurrent", None, False),
        (64, 64, {"decay": "sigmoid", "backend": "recurrent"}, "recurrent", None, False),
        (64, 192, {"decay": "sigmoid"}, "scan", 64, False),
        (64, 192, {"decay_bound": -2.1}, "scan", 32, False),
        (20, 192, {"decay": "sigmoid", "backend": "split"}, "scan", 64, False),
        (64, 192, {"decay_bound": -4.1}, "scan", 64, True),
    ]),
    ids=str,
)  # fmt: skip
def test_compiler_sees_the_backend_that_will_run(
    tokens, head_size, options, backend, chunk_len, guarded, dynamic, on_gpu
):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *_: (torch.zeros(1),) * 2

    torch._dynamo.reset()
    torch.compile(rwkv_jit.wkv7, fullgraph=True, backend=keep, dynamic=dynamic)(*bf16(tokens, 2, head_size), **options)
    (call,) = [node for node in graphs[0].graph.nodes if "wkv7_fwd" in str(node.target)]
    assert call.args[-8:-2] == (chunk_len, None, backend, None, None, guarded)


@pytest.mark.parametrize(
    ("head_size", "options", "backend", "chunk_len", "guarded", "dynamic"),
    fixed_and_free([
        (64, {"decay": "sigmoid"}, "chunked", 32, False),
        (64, {}, "chunked", 32, True),
        (64, {"decay_bound": -7.0}, "chunked", 16, False),
        (192, {"decay": "sigmoid"}, "scan", 64, False),
        (192, {"decay_bound": -2.1}, "scan", 32, False),
        (192, {"decay_bound": -4.1}, "scan", 16, False),
        (192, {}, "scan", 64, True),
        (300, {"decay_bound": -2.0}, "scan", 64, False),
        (300, {"decay_bound": -2.1}, "scan", 64, True),
        (1025, {}, "recurrent", None, False),
    ]),
    ids=str,
)  # fmt: skip
def test_compiler_sees_the_backend_of_the_other_ops(head_size, options, backend, chunk_len, guarded, dynamic, on_gpu):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *_: (torch.zeros(1),) * 2

    torch._dynamo.reset()
    given = bf16(64, 2, head_size)[:4]
    torch.compile(rwkv_jit.gla, fullgraph=True, backend=keep, dynamic=dynamic)(*given, **options)
    (call,) = [node for node in graphs[0].graph.nodes if "gla_fwd" in str(node.target)]
    assert call.args[-8:-2] == (chunk_len, None, backend, None, None, guarded)


# ---- segments ------------------------------------------------------------------------------------------------------


def few(blocks, tokens, **changes):
    return {"blocks": blocks, "tokens": tokens, "multiprocessors": lambda: 132, **changes}


@pytest.mark.parametrize(
    ("blocks", "tokens", "count"),
    [(16, 32768, 16), (16, 8192, 16), (16, 4096, 8), (66, 32768, 4), (67, 32768, 1), (16, 32768 + 16, 1), (1, 2048, 4),
     (1, 2047, 1), (1, 1, 1), (16, 5 * 544, 5), (1, 512 * 264, 264), (1, 512 * 266, 224)],
)  # fmt: skip
def test_segments_are_equal_and_end_where_chunks_do(blocks, tokens, count):
    assert split.segments("wkv7", blocks, tokens, 132) == count
    assert tokens % count == 0


@pytest.mark.parametrize(
    ("blocks", "tokens", "count"),
    [(32, 4096, 8), (16, 4096, 16), (8, 4096, 16), (66, 32768, 4), (67, 32768, 1), (16, 32768 + 32, 1), (1, 1024, 4),
     (1, 1023, 1), (1, 1, 1), (16, 5 * 320, 5), (16, 5 * 288, 1), (1, 256 * 264, 264)],
)  # fmt: skip
@pytest.mark.parametrize("op", gated.OPS)
def test_segments_of_the_other_ops_are_shorter_and_end_where_longer_chunks_do(op, blocks, tokens, count):
    assert split.segments(op, blocks, tokens, 132) == count
    assert count == 1 or tokens % (count * max(gated.CHUNK_LENS)) == 0


def test_segments_that_are_asked_for_are_made_with_many_heads_too():
    for op in ("wkv7", "gla"):
        assert split.segments(op, 1000, 4096, 132) == 1
        assert split.segments(op, 1000, 4096, 132, split.LEAST_SEGMENTS) == 4


@pytest.mark.parametrize("op", gated.OPS)
def test_few_heads_of_the_other_ops_are_split(op):
    assert choose("auto", few(32, 4096, op=op), "sm_90") == ("split", 32)
    assert choose("auto", few(32, 4096, op=op, chunk_len=64), "sm_90") == ("split", 64)
    assert choose("auto", few(32, 4096, op=op, decay="raw", decay_bound=-8.0), "sm_90") == ("split", 16)
    assert choose("chunked", few(32, 4096, op=op), "sm_90") == ("chunked", 32)
    assert choose("auto", few(67, 32768, op=op), "sm_90")[0] == "chunked"
    assert choose("split", few(67, 32768, op=op), "sm_90")[0] == "split"
    for changes in ({"packed": True}, {"multiprocessors": None}, {"tokens": 1000}):
        assert choose("auto", few(32, 4096, op=op) | changes, "sm_90")[0] == "chunked"
    # Heads that chunked kernels have no room for.
    assert choose("auto", few(32, 4096, op=op, head_size=128, value_size=128), "sm_89")[0] == "scan"
    assert choose("split", few(32, 4096, op=op, head_size=128, value_size=32), "sm_90")[0] == "scan"


def test_few_heads_with_many_tokens_are_split():
    assert choose("auto", few(16, 32768), "sm_90") == ("split", 32)
    assert choose("auto", few(16, 32768, head_size=96, value_size=96, training=False), "sm_90") == ("split", 16)
    assert choose("chunked", few(16, 32768), "sm_90") == ("chunked", 32)
    assert choose("recurrent", few(16, 32768), "sm_90") == ("recurrent", None)
    assert choose("auto", few(67, 32768), "sm_90")[0] == "chunked"
    assert choose("split", few(67, 32768), "sm_90")[0] == "split"
    assert choose("auto", few(16, 32768, packed=True), "sm_90")[0] == "chunked"
    assert choose("auto", few(16, 32768, multiprocessors=None), "sm_90")[0] == "chunked"
    assert choose("auto", few(16, 32768, dtype=torch.float32), "sm_90")[0] == "recurrent"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": True}, "takes no cu_seqlens"),
        ({"multiprocessors": None}, "runs outside of traces and compiled graphs"),
        ({"tokens": 1000}, "needs tokens for 4 equal segments of 512 or more, multiples of 32, got 1000"),
        (
            {"op": "gla", "tokens": 1000},
            "needs tokens for 4 equal segments of 256 or more, multiples of 64, got 1000",
        ),
        ({"op": "wkv5", "packed": True}, "takes no cu_seqlens"),
        ({"dtype": torch.float32}, "takes float16 and bfloat16, got torch.float32"),
    ],
)
def test_split_says_why_it_cannot(changes, message):
    with pytest.raises(UnsupportedConfigError, match=re.escape(f"backend: 'split' {message}; use 'auto'")):
        choose("split", few(16, 32768) | changes, "sm_90")


# ---- large heads ---------------------------------------------------------------------------------------------------

LARGE = {"head_size": 256, "value_size": 256}
LARGEST = {"head_size": 1024, "value_size": 1024}
# What is changed in CASE, the architecture, and the tokens of a chunk.
SCANNED = {
    "keys": ({"head_size": 129}, "sm_90", 64),
    "values": ({"value_size": 200}, "sm_90", 64),
    "both": (LARGE, "sm_90", 64),
    "keys of one channel": ({"head_size": 1, "value_size": 129}, "sm_90", 64),
    "values of one row": ({"head_size": 1024, "value_size": 1}, "sm_90", 64),
    "largest": (LARGEST, "sm_90", 64),
    "largest, bound at 32": ({**LARGEST, "decay": "raw", "decay_bound": -4.0}, "sm_90", 32),
    "largest, 32 asked for": ({**LARGEST, "chunk_len": 32}, "sm_90", 32),
    "float16": ({**LARGE, "dtype": torch.float16}, "sm_90", 64),
    "least tokens": ({**LARGE, "tokens": backends.LEAST_TOKENS}, "sm_90", 64),
    "few heads": ({**LARGE, "blocks": 1, "multiprocessors": lambda: 132}, "sm_90", 64),
    "packed": ({**LARGE, "packed": True}, "sm_90", 64),
    "without gradients": ({**LARGE, "training": False}, "sm_90", 64),
    "bound at 64": ({**LARGE, "decay": "raw", "decay_bound": -2}, "sm_90", 64),
    "64 asked for with its bound": ({**LARGE, "decay": "log", "decay_bound": -2.0, "chunk_len": 64}, "sm_90", 64),
    "bound below that at 64": ({**LARGE, "decay": "direct", "decay_bound": -2.001}, "sm_90", 32),
    "bound at 32": ({**LARGE, "decay": "raw", "decay_bound": -4.0}, "sm_90", 32),
    "32 asked for with its bound": ({**LARGE, "decay": "log", "decay_bound": -4, "chunk_len": 32}, "sm_90", 32),
    "32 asked for": ({**LARGE, "chunk_len": 32}, "sm_90", 32),
    "sigmoid and a useless bound": ({**LARGE, "decay_bound": -50.0}, "sm_90", 64),
    "raw": ({**LARGE, "decay": "raw"}, "sm_90", 64),
    "raw of Ada": ({**LARGE, "decay": "raw"}, "sm_89", 32),
    "bound that no chunk keeps": ({**LARGE, "decay": "log", "decay_bound": -4.1}, "sm_90", 64),
    "bound too low at 64": ({**LARGE, "decay": "direct", "decay_bound": -2.1, "chunk_len": 64}, "sm_90", 64),
    "Ampere": (LARGE, "sm_80", 64),
    "extended": (LARGE, "sm_90a", 64),
    "PTX": (LARGE, "compute_80", 64),
    "largest of Ampere": (LARGEST, "sm_80", 32),
    "largest, extended": (LARGEST, "sm_90a", 64),
    "largest as PTX": (LARGEST, "compute_90", 32),
    "largest of Blackwell": (LARGEST, "sm_100", 32),
    "Ampere with less shared memory": (LARGE, "sm_86", 32),
    "Ada": (LARGE, "sm_89", 32),
    "Blackwell with less shared memory": (LARGE, "sm_120", 32),
}
# And why not, where "split" asks for it.
NOT_SCANNED = {
    "float32": ({"dtype": torch.float32}, "sm_90", "takes float16 and bfloat16, got torch.float32"),
    "keys": ({"head_size": 1025}, "sm_90", "takes head sizes up to 1024, got 1025 and 256 for v"),
    "values": ({"value_size": 1025}, "sm_90", "takes head sizes up to 1024, got 256 and 1025 for v"),
    "chunk 16": ({"chunk_len": 16}, "sm_90", "takes chunk_len 32 or 64 at head sizes above 128, got 16"),
    "chunk 128": ({"chunk_len": 128}, "sm_90", "takes chunk_len 32 or 64 at head sizes above 128, got 128"),
    "Turing": ({}, "sm_75", "needs an architecture from sm_80 on, got sm_75"),
    "older PTX": ({}, "compute_75", "needs an architecture from sm_80 on, got compute_75"),
    "shared memory": (
        LARGEST,
        "sm_89",
        "needs more shared memory at head sizes 1024 and 1024 and chunk_len=32 than the 101376 bytes of sm_89",
    ),
    "shared memory without products of warp groups": (
        {**LARGEST, "chunk_len": 64},
        "sm_100",
        "needs more shared memory at head sizes 1024 and 1024 and chunk_len=64 than the 232448 bytes of sm_100",
    ),
    "shared memory of the chunk": (
        {"chunk_len": 64},
        "sm_120",
        "needs more shared memory at head sizes 256 and 256 and chunk_len=64 than the 101376 bytes of sm_120",
    ),
}


@pytest.mark.parametrize("backend", ["auto", "split"])
@pytest.mark.parametrize("name", SCANNED)
def test_large_heads_are_scanned(name, backend):
    changes, arch, chunk_len = SCANNED[name]
    assert choose(backend, changes, arch) == ("scan", chunk_len)
    assert choose("recurrent", changes, arch) == ("recurrent", changes.get("chunk_len"))


@pytest.mark.parametrize("name", NOT_SCANNED)
def test_other_large_heads_are_recurrent_and_say_why_where_the_scan_is_asked_for(name):
    changes, arch, message = NOT_SCANNED[name]
    assert choose("auto", LARGE | changes, arch) == ("recurrent", changes.get("chunk_len"))
    with pytest.raises(UnsupportedConfigError) as caught:
        choose("split", LARGE | changes, arch)
    assert str(caught.value) == f"backend: 'split' {message}; use 'auto' or 'recurrent'"


@pytest.mark.parametrize(("head_size", "value_size"), [(129, 64), (64, 200), (256, 256), (2000, 64)])
def test_chunked_kernels_refuse_large_heads(head_size, value_size):
    message = f"backend: 'chunked' takes head sizes up to 128, got {head_size} and {value_size} for v; use 'auto'"
    with pytest.raises(UnsupportedConfigError, match=message):
        choose("chunked", {"head_size": head_size, "value_size": value_size}, "sm_90")


@pytest.mark.parametrize(
    ("arch", "largest_of_64"), [("sm_80", 512), ("sm_90", 1024), ("sm_90a", 1024), ("sm_100", 512)]
)
def test_every_size_of_large_heads_has_the_longest_chunk_there_is_for_it(arch, largest_of_64):
    for size in range(129, 1025):
        sizes = {"head_size": size, "value_size": size}
        lengths = [each for each in (64, 32) if choose("auto", {**sizes, "chunk_len": each}, arch)[0] == "scan"]
        assert choose("auto", sizes, arch) == ("scan", lengths[0])
        assert lengths == ([64, 32] if size <= largest_of_64 else [32])
    assert choose("auto", {"head_size": 1025}, arch) == choose("auto", {"value_size": 1025}, arch)
    assert choose("auto", {"head_size": 1025}, arch) == ("recurrent", None)


def test_split_means_segments_up_to_head_sizes_of_128_and_the_scan_above():
    for size, backend in ((1, "split"), (64, "split"), (128, "split"), (129, "scan"), (256, "scan")):
        assert choose("split", few(16, 32768, head_size=size, value_size=size), "sm_90")[0] == backend
    with pytest.raises(UnsupportedConfigError, match="needs tokens for 4 equal segments"):
        choose("split", few(16, 100), "sm_90")
    assert choose("split", few(16, 100, **LARGE), "sm_90") == ("scan", 64)


def test_short_calls_with_large_heads_are_recurrent_unless_the_scan_is_asked_for():
    short = {**LARGE, "tokens": backends.LEAST_TOKENS - 1}
    assert choose("auto", short, "sm_90") == ("recurrent", None)
    assert choose("split", short, "sm_90") == ("scan", 64)


def test_measured_geometries_are_of_the_chunked_kernels_alone():
    def known():
        raise AssertionError("it was asked")

    case = CASE._replace(**LARGE)
    assert backends.geometry("scan", 64, case, lambda: "sm_90", known) == interface.Geometry(64, None)


@pytest.mark.parametrize("op", ["wkv7", *gated.OPS])
def test_measured_geometry_is_taken_where_the_kernels_of_its_op_can_do_it(op):
    """Chunks of 64 are none of wkv7's, and have no shared memory at head sizes above 96."""
    for size, length in itertools.product((64, 128), (16, 32, 64)):
        choice = choices.Choice("a GPU", "sm_90", op, size, True, length, 128, 2, 1, "")
        case = CASE._replace(op=op, head_size=size, value_size=size)
        found = backends.geometry("chunked", 32, case, lambda: "sm_90", lambda choice=choice: [choice])
        taken = length < 64 or (op != "wkv7" and size == 64)
        assert found == (choice.geometry if taken else interface.Geometry(32, None))


# ---- the geometry of the chunked kernels -------------------------------------------------------------------------

SIZES = [n for n in range(1, 129) if n % 8 in (0, 1, 7)]
LIMITS = {"sm_80": 166912, "sm_86": 101376, "sm_87": 166912, "sm_89": 101376, "sm_90": 232448, "sm_90a": 232448,
          "sm_100": 232448, "sm_103": 232448, "sm_120": 101376, "sm_121": 101376, "compute_80": 166912}  # fmt: skip


@pytest.mark.parametrize("arch", LIMITS)
def test_default_chunk_fits_in_both_directions(arch):
    for sizes in itertools.product(SIZES[::3], SIZES[::3]):
        chosen = chunked.default_chunk_len(*sizes, arch)
        fits = {each: chunked.most_shared_bytes(*sizes, each) <= LIMITS[arch] for each in (16, 32)}
        assert chosen == (32 if fits[32] else 16)
        assert chunked.default_chunk_len(*sizes, arch, training=False) == (chosen if max(sizes) <= 64 else 16)
        reason = chunked.obstacle("wkv7", torch.bfloat16, *sizes, lambda: arch)
        assert (reason is None) == (fits[chosen] and -(-sizes[0] // 32) <= 2 * -(-sizes[1] // 32))


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_of_a_multiprocessor_have_the_shared_memory_and_registers_they_need(direction, arch):
    per_multiprocessor = LIMITS[arch] + 1024
    for size in SIZES:
        for threads in (None, 64, 512):
            found = chunked.specialize("wkv7", direction, size, size, {}, arch, num_threads=threads).parameters
            blocks = found["BLOCKS_PER_SM"]
            assert 1 <= blocks <= 8
            if found["SHARED_BYTES"] <= LIMITS[arch]:
                assert blocks * (found["SHARED_BYTES"] + 1024) <= per_multiprocessor
            assert blocks == 1 or blocks * found["NUM_THREADS"] <= 512


def test_threads_given_are_those_of_the_forward():
    parameters = [
        chunked.specialize("wkv7", way, 64, 64, {}, "sm_90", num_threads=256).parameters
        for way in ("forward", "backward")
    ]
    assert [each["NUM_THREADS"] for each in parameters] == [256, 128]


@pytest.mark.parametrize(("given", "nearest"), [(1, 96), (32, 96), (100, 96), (120, 128), (511, 512), (5000, 512)])
def test_nearest_number_of_threads(given, nearest):
    request = chunked.specialize("wkv7", "forward", 80, 80, {}, "sm_90", num_threads=given)
    assert chunked.nearest(request, "num_threads", given) == nearest
    assert chunked.nearest(request, "num_threads", nearest) is None
    assert chunked.nearest(request, "chunk_len", 32) is None


# ---- the geometry of the scan --------------------------------------------------------------------------------------

LARGE_SIZES = [*range(1, 1025, 61), 128, 129, 192, 256, 257, 320, 384, 512, 513, 640, 768, 1024]
VALUE_SIZES = (1, 64, 65, 200, 256, 1024)
SCAN_LIMITS = {arch: LIMITS[arch] for arch in ("sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_80")}
WITH_GROUPS = ("sm_90", "sm_90a")  # whose warps can multiply in groups of four, in chunks of 64 tokens
TYPES = {"T_IO": "bf16", "T_W": "bf16", "T_STATE": "fp32", "DECAY": "sigmoid", "STATE_LAYOUT": "vk"}


def of_scan(direction, head_size, value_size, arch, **more):
    return scan_geometry.specialize("wkv7", direction, head_size, value_size, TYPES, arch, **more).parameters


def requests(direction, head_size, value_size, arch, chunk_len=None, num_threads=None, few_heads=False, also=()):
    """The kernels of a direction in the order of their launches."""
    return scan_geometry.requests(
        "wkv7", direction, head_size, value_size, TYPES, arch, chunk_len, num_threads, few_heads, None, also
    )


def legal_threads(head_size, value_size, arch, chunk_len=None):
    """What may be asked for, as far as the kernels are concerned that it is asked of."""
    legal = []
    for threads in range(16, 1040, 16):
        try:
            of_scan("forward", head_size, value_size, arch, chunk_len=chunk_len, num_threads=threads)
        except UnsupportedConfigError:
            continue
        legal.append(threads)
    return legal


@pytest.mark.parametrize(
    ("head_size", "channels"),
    [(1, 64), (64, 64), (65, 128), (129, 192), (193, 256), (256, 256), (257, 384), (384, 384), (385, 512), (512, 512),
     (513, 768), (768, 768), (769, 1024), (1024, 1024)],
)  # fmt: skip
def test_channels_are_slabs_that_warps_can_share(head_size, channels):
    assert scan_geometry.channels(head_size) == channels


@pytest.mark.parametrize("few_heads", [False, True])
def test_warps_of_the_same_rows_have_as_many_channels_each_and_registers_for_them(few_heads):
    for size in range(1, 1025):
        channels, warps = scan_geometry.channels(size), scan_geometry._key_warps(size, few_heads)
        assert channels >= size
        assert channels % (scan_geometry.SLAB * warps) == 0
        assert channels // warps <= 256
        assert warps in (1, 2, 4)


@pytest.mark.parametrize(
    ("backward", "heads", "changes", "few_heads", "parts"),
    [
        (False, 8, {}, True, 4), (True, 8, {}, True, 4),
        (False, 9, {}, True, 1), (True, 9, {}, False, 4),  # 72 blocks of 32 rows, 36 of 64
        (True, 16, {}, False, 4), (True, 17, {}, True, 1), (True, 32, {}, True, 1), (True, 33, {}, False, 1),
        (True, 8, {"chunks": 127}, True, 1), (True, 8, {"chunks": 0}, True, 1),
        (True, 8, {"arch": "sm_100"}, True, 1), (True, 8, {"num_threads": 384}, True, 1),
        (True, 8, {"chunk_len": 32}, True, 1), (True, 4, {"head_size": 1024, "value_size": 1024}, True, 1),
        (True, 2, {"head_size": 1024, "value_size": 1024}, True, 4),
    ],
)  # fmt: skip
def test_scan_that_leaves_half_of_the_gpu_free_goes_on_in_parts(backward, heads, changes, few_heads, parts):
    given = {"head_size": 256, "value_size": 256, "arch": "sm_90", "chunk_len": 64, "num_threads": None, "chunks": 128}
    walk = scan_geometry.walk(**{**given, **changes}, backward=backward, heads=heads, multiprocessors=132)
    assert walk == (few_heads, parts)


@pytest.mark.parametrize(("value_size", "values"), [(1, 64), (64, 64), (65, 128), (200, 256), (1024, 1024)])
def test_value_rows_are_those_of_the_largest_blocks(value_size, values):
    assert scan_geometry.values(value_size) == values
    assert values % max(scan_geometry.ROWS) == 0


@pytest.mark.parametrize("arch", SCAN_LIMITS)
def test_geometry_that_is_offered_fits_in_both_directions(arch):
    limit = SCAN_LIMITS[arch]
    assert chunked.shared_limit(arch) == limit
    seen = set()
    for head_size, value_size, length in itertools.product(LARGE_SIZES, VALUE_SIZES, scan_geometry.CHUNK_LENS):
        channels = scan_geometry.channels(head_size)
        if scan_geometry.obstacle("wkv7", torch.bfloat16, head_size, value_size, lambda: arch, length) is not None:
            continue
        for each in (
            *scan_geometry._scans(head_size, length, arch, False),
            *scan_geometry._scans(head_size, length, arch, True),
        ):
            for backward in (False, True):
                assert scan_geometry._scan_shared_bytes(head_size, length, backward, *each) <= limit
            rows = each.num_threads // 2 // each.key_warps
            assert rows in scan_geometry.ROWS
            assert scan_geometry.values(value_size) % rows == 0
            assert 2 <= each.stages <= 2 * (channels // scan_geometry.SLAB // each.key_warps) + 1
            seen.add(each)
    assert len(seen) > 1


# 65536 registers: 255 for a thread that holds states, or 168 where some leave theirs to others, and half of them else.
MOST_THREADS = {"wkv7_scan": 256, "wkv7_group_scan": 384}


@pytest.mark.parametrize("arch", SCAN_LIMITS)
def test_kernels_of_the_scan_have_the_shared_memory_and_registers_they_need(arch):
    limit, found = SCAN_LIMITS[arch], 0
    for head_size, value_size in itertools.product(LARGE_SIZES, VALUE_SIZES):
        if scan_geometry.obstacle("wkv7", torch.bfloat16, head_size, value_size, lambda: arch) is not None:
            continue
        for direction, few_heads in itertools.product(("forward", "backward"), (False, True)):
            for request in requests(direction, head_size, value_size, arch, few_heads=few_heads):
                shared, threads = (request.parameters[name] for name in ("SHARED_BYTES", "NUM_THREADS"))
                blocks = request.parameters.get("BLOCKS_PER_SM", 1)
                assert shared <= limit
                assert blocks * (shared + 1024) <= limit + 1024
                assert blocks >= 1
                assert blocks * threads <= MOST_THREADS.get(request.template.name, 512)
                found += 1
    assert found > 100


@pytest.mark.parametrize(("arch", "chunk_len"), [("sm_80", 32), ("sm_90", 32), ("sm_100", 64)])
def test_few_heads_make_more_and_smaller_blocks_or_more_warps_for_the_same_rows(arch, chunk_len):
    for size in (129, 192, 256, 384, 512):
        many, few_heads = (
            of_scan("forward", size, size, arch, chunk_len=chunk_len, few_heads=each) for each in (False, True)
        )
        rows, fewer = (each["NUM_THREADS"] // 2 // each["KEY_WARPS"] for each in (many, few_heads))
        assert fewer < rows
        assert few_heads["KEY_WARPS"] >= many["KEY_WARPS"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("head_size", [129, 256, 320, 512])
def test_threads_asked_for_decide_alone(head_size, arch):
    legal = legal_threads(head_size, 256, arch)
    assert legal
    for threads, direction in itertools.product(legal, ("forward", "backward")):
        one, other = (
            of_scan(direction, head_size, 256, arch, num_threads=threads, few_heads=each) for each in (False, True)
        )
        assert one == other
        assert one["NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("head_size", "arch", "chunk_len", "legal"),
    [
        (192, "sm_90", 64, [64, 128, 384]),
        (256, "sm_90", 64, [128, 256, 384]),
        (256, "sm_90a", 64, [128, 256, 384]),
        (512, "sm_90", 64, [128, 256, 384]),
        (513, "sm_90", 64, [384]),
        (1024, "sm_90", 64, [384]),
        (256, "sm_90", 32, [128, 256]),
        (1024, "sm_90", 32, [256]),
        (256, "sm_100", 64, [128, 256]),
        (256, "compute_90", 64, [128, 256]),
        (256, "sm_80", 64, [128, 256]),
        (256, "sm_86", 32, [128, 256]),
    ],
)
def test_threads_that_may_be_asked_for(head_size, arch, chunk_len, legal):
    assert legal_threads(head_size, head_size, arch, chunk_len) == legal


@pytest.mark.parametrize("few_heads", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_threads_that_no_block_has_are_refused_with_those_there_are(direction, few_heads):
    for size, arch in ((192, "sm_90"), (256, "sm_90"), (256, "sm_86"), (1024, "sm_90")):
        legal = legal_threads(size, size, arch)
        length = scan_geometry.default_chunk_len(size, arch)
        message = (
            f"num_threads must be {' or '.join(map(str, legal))} at head size {size} and chunk_len={length} on {arch}, "
            "got 96"
        )
        with pytest.raises(UnsupportedConfigError) as caught:
            of_scan(direction, size, size, arch, num_threads=96, few_heads=few_heads)
        assert str(caught.value) == message


def test_geometry_that_is_chosen_overrides_that_of_the_scan_alone():
    request = scan_geometry.specialize(
        "wkv7", "forward", 256, 256, TYPES, "sm_86", chosen={"BLOCKS_PER_SM": 7}, also=("sm_80",)
    )
    assert request.parameters["BLOCKS_PER_SM"] == 7
    assert (request.template.name, request.arch, request.also) == ("wkv7_scan", "sm_86", ("sm_80",))
    (other,) = scan_geometry.companions("wkv7", "forward", 256, 256, TYPES, "sm_86", None, ("sm_80",))
    assert (other.template.name, other.arch, other.also) == ("wkv7_prepare", "sm_86", ("sm_80",))
    assert other.parameters["BLOCKS_PER_SM"] != 7
    of_groups = scan_geometry.specialize("wkv7", "forward", 256, 256, TYPES, "sm_90", chosen={"STAGES": 2})
    assert of_groups.parameters == of_scan("forward", 256, 256, "sm_90") | {"STAGES": 2}


def test_kernels_of_one_call_agree_about_what_passes_between_them():
    for head_size, value_size, arch, length, of_states in (
        (256, 256, "sm_90", 32, "wkv7_scan"),
        (1000, 77, "sm_80", 32, "wkv7_scan"),
        (40, 300, "sm_86", 32, "wkv7_scan"),
        (256, 256, "sm_90", 64, "wkv7_group_scan"),
        (1000, 77, "sm_90", 64, "wkv7_group_scan"),
    ):
        found = []
        for direction in ("forward", "backward"):
            given = ("wkv7", direction, head_size, value_size, TYPES, arch, length)
            found += [scan_geometry.specialize(*given), *scan_geometry.companions(*given)]
        names = [request.template.name for request in found]
        assert names == [of_states, "wkv7_prepare", of_states, "wkv7_token_gradients", "wkv7_key_gradients"]
        for name in ("CHANNELS", "CHUNK_LEN", "HEAD_SIZE", "VALUE_SIZE"):
            assert len({request.parameters[name] for request in found}) == 1
        assert len({request.parameters["VALUES"] for request in found if "VALUES" in request.parameters}) == 1
        assert [request.parameters.get("BACKWARD") for request in found] == [False, None, True, None, None]


# ---- the backward with products of warp groups -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "arch", "chunk_len", "direction", "is_of_groups"),
    [
        ((64, 64), "sm_90", 32, "backward", True),
        ((64, 64), "sm_90a", 32, "backward", True),
        ((128, 128), "sm_90", 32, "backward", True),
        ((64, 128), "sm_90", 32, "backward", True),
        ((128, 64), "sm_90", 32, "backward", False),
        ((64, 64), "sm_90", 16, "backward", False),
        ((64, 64), "sm_90", 32, "forward", False),
        ((64, 64), "sm_100", 32, "backward", False),
        ((64, 64), "compute_90", 32, "backward", False),
        ((64, 64), "sm_80", 32, "backward", False),
        ((40, 64), "sm_90", 32, "backward", False),
        ((64, 96), "sm_90", 32, "backward", False),
        ((32, 32), "sm_90", 32, "backward", False),
    ],
)
def test_products_of_warp_groups_are_for_rows_that_fill_their_tiles(sizes, arch, chunk_len, direction, is_of_groups):
    found = chunked.specialize("wkv7", direction, *sizes, TYPES, arch, chunk_len)
    assert (found.template.name == "wkv7_group_backward") == is_of_groups
    assert found.arch == ("sm_90a" if is_of_groups else arch)
    if is_of_groups:
        assert found.parameters["NUM_THREADS"] == 2 * sizes[1]
        assert found.parameters["SHARED_BYTES"] % 1024 == 0
        blocks = int(found.parameters["BLOCKS_PER_SM"])
        assert blocks == (2 if sizes == (64, 64) else 1)
        assert blocks * (int(found.parameters["SHARED_BYTES"]) + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("op", "sizes", "arch", "chunk_len", "is_of_groups"),
    [
        ("linear_attention", (128, 128), "sm_90", None, True),
        ("linear_attention", (128, 128), "sm_90a", 32, True),
        ("linear_attention", (72, 104), "sm_90", 32, True),
        ("linear_attention", (128, 128), "sm_90", 16, False),
        ("linear_attention", (128, 128), "sm_100", 32, False),
        ("linear_attention", (128, 128), "compute_90", 32, False),
        ("linear_attention", (128, 128), "sm_80", 32, False),
        ("linear_attention", (64, 128), "sm_90", 32, False),
        ("linear_attention", (128, 96), "sm_90", 32, False),
        ("linear_attention", (124, 128), "sm_90", 32, False),
        ("linear_attention", (128, 124), "sm_90", 32, False),
        ("gla", (128, 128), "sm_90", 32, False),
    ],
)
def test_products_of_warp_groups_are_for_linear_attention_with_heads_of_about_128(
    op, sizes, arch, chunk_len, is_of_groups, monkeypatch
):
    """Both directions agree, and so does what the forward saves: a state for every 64 tokens."""
    forward, found = (gated_request(way, *sizes, arch, op, chunk_len=chunk_len) for way in ("forward", "backward"))
    assert (found.template.name == "gla_group_backward") == forward.parameters["FOR_GROUPS"] == is_of_groups
    assert (forward.arch, found.arch) == (arch, "sm_90a" if is_of_groups else arch)
    assert forward.parameters["CHUNK_LEN"] == found.parameters["CHUNK_LEN"] == (chunk_len or 32)
    if is_of_groups:
        assert (found.parameters["NUM_THREADS"], found.parameters["BLOCKS_PER_SM"]) == (256, 1)
        assert found.parameters["SHARED_BYTES"] % 1024 == 0
        assert int(found.parameters["SHARED_BYTES"]) <= chunked.shared_limit(arch)
    monkeypatch.setattr(tensors, "arch", lambda device: arch)
    r, v = torch.empty(3, 100, 2, sizes[0], device="meta"), torch.empty(3, 100, 2, sizes[1], device="meta")
    inputs = prepared.Inputs(op, ("r", "k", "v"), (r, r, v), (), 3)
    options = prepared.Options(1.0, "none", "kv", 64, chunk_len or 32, None, "chunked")
    slots = 3 * 2 if is_of_groups else 3 * -(-100 // (chunk_len or 32))
    padded = chunked.padded(sizes[0]) * chunked.padded(sizes[1])
    assert gated.saved_for(inputs, False, options).floats == slots * 2 * padded // 2


# ---- the scan with products of warp groups -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "compute_80", "compute_90"])
@pytest.mark.parametrize("chunk_len", scan_geometry.CHUNK_LENS)
def test_which_scan_it_is_goes_by_architecture_chunk_and_threads(chunk_len, arch):
    """It is the same one in both directions, as the operands and states that they share are in its order."""
    seen = set()
    for head_size in LARGE_SIZES:
        if scan_geometry.obstacle("wkv7", torch.bfloat16, head_size, 200, lambda: arch, chunk_len) is not None:
            continue
        for threads, few_heads in itertools.product(
            (None, *legal_threads(head_size, 200, arch, chunk_len)), (False, True)
        ):
            in_groups = arch in WITH_GROUPS and chunk_len == 64 and threads in (None, 384)
            given = (head_size, 200, arch, chunk_len, threads, few_heads)
            prepare, forward = requests("forward", *given, also=("sm_80",))
            backward, *_ = requests("backward", *given, also=("sm_80",))
            for request in (forward, backward):
                assert request.template.name == ("wkv7_group_scan" if in_groups else "wkv7_scan")
                assert (request.arch, request.also) == (("sm_90a", ()) if in_groups else (arch, ("sm_80",)))
            assert prepare.parameters["BY_LANES"] is in_groups
            assert (prepare.arch, prepare.also) == (arch, ("sm_80",))
            if threads is None:
                assert [prepare] == scan_geometry.companions(
                    "wkv7", "forward", head_size, 200, TYPES, arch, chunk_len, ("sm_80",)
                )
            seen.add(in_groups)
    assert seen == ({True, False} if arch in WITH_GROUPS and chunk_len == 64 else {False})


@pytest.mark.parametrize("arch", WITH_GROUPS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_of_warp_groups_fit(direction, arch):
    seen = set()
    for head_size, value_size, few_heads in itertools.product(LARGE_SIZES, VALUE_SIZES, (False, True)):
        found = of_scan(direction, head_size, value_size, arch, chunk_len=64, few_heads=few_heads)
        rows, cluster, stages, shared = (found[name] for name in ("VALUE_ROWS", "CLUSTER", "STAGES", "SHARED_BYTES"))
        channels = scan_geometry.channels(head_size)
        assert rows in scan_geometry.ROWS
        assert scan_geometry.values(value_size) % rows == 0
        assert channels * rows <= 512 * 64  # 128 registers of a thread, of two groups of four warps
        assert -(-value_size // rows) % cluster == 0
        assert 2 <= stages <= 2 * (channels // 64) + 1
        assert shared <= LIMITS[arch]
        # The image of the state; the solution, values twice, and outputs; a stage has two tiles and two barriers.
        outputs = 8 * 16 * 2 * (rows + 8)
        assert shared == 2 * channels * rows + 3 * 8192 + outputs + stages * (2 * 8192 + 16)
        seen.add((rows, cluster))
    assert seen == {(64, 1), (64, 2), (32, 1)}


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
        (1024, 1024, True, (32, 1, 8)),
    ],
)
def test_value_rows_cluster_and_stages_of_warp_groups(head_size, value_size, few_heads, cut):
    for direction in ("forward", "backward"):
        found = of_scan(direction, head_size, value_size, "sm_90", few_heads=few_heads)
        assert (found["VALUE_ROWS"], found["CLUSTER"], found["STAGES"]) == cut
        assert scan_geometry.rows_of(found) == cut[0]


def test_few_heads_make_smaller_blocks_of_warp_groups_where_these_can_be_smaller():
    for size in range(129, 1025):
        many, few_heads = (of_scan("forward", size, size, "sm_90", few_heads=each) for each in (False, True))
        assert few_heads["VALUE_ROWS"] == 32
        assert many["VALUE_ROWS"] == (64 if size <= 512 else 32)


def test_packed_sequences_have_a_place_for_each_chunk_whatever_their_lengths_are():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(0, 150, (5,), generator=generator).tolist()
        v = torch.zeros(1, sum(lengths), 1, 1)
        for chunk_len in scan_geometry.CHUNK_LENS:
            slots = layout.slots(interface.Inputs("wkv7", ("v",), (v,), (), len(lengths)), True, chunk_len)
            begin, taken = 0, []
            for sequence, length in enumerate(lengths):
                first = begin // chunk_len + sequence  # as sequence.cuh counts
                taken += range(first, first + -(-length // chunk_len))
                begin += length
            assert len(set(taken)) == len(taken)
            assert max(taken, default=-1) < slots


@pytest.mark.parametrize(
    ("size", "dtype", "vectors"),
    [
        (64, torch.bfloat16, (8, 4)),
        (64, torch.float32, (4, 4)),
        (36, torch.bfloat16, (4, 4)),
        (36, torch.float32, (4, 4)),
        (34, torch.bfloat16, (1, 1)),
        (37, torch.float32, (1, 1)),
    ],
)
def test_elements_that_are_read_at_once(size, dtype, vectors):
    x = torch.zeros(2, 3, 4, size, dtype=dtype)
    assert (chunked.vector(x), recurrent.vector(x)) == vectors


# ---- gated linear attention and its kin ------------------------------------------------------------------------------

# What is changed in CASE, the architecture, the backend and the tokens of a chunk.
GATED = {
    "usual": ({}, "sm_90", "chunked", 32),
    "float16": ({"dtype": torch.float16}, "sm_90", "chunked", 32),
    "least tokens": ({"tokens": backends.LEAST_TOKENS}, "sm_90", "chunked", 32),
    "without gradients": ({"head_size": 128, "value_size": 128, "training": False}, "sm_90", "chunked", 32),
    "few heads": (few(16, 32768), "sm_90", "split", 32),
    "few heads, packed": (few(16, 32768, packed=True), "sm_90", "chunked", 32),
    "largest": ({"head_size": 128, "value_size": 128}, "sm_90", "chunked", 32),
    "largest of Ampere": ({"head_size": 128, "value_size": 128}, "sm_80", "chunked", 32),
    "smallest": ({"head_size": 1, "value_size": 1}, "sm_90", "chunked", 32),
    "keys twice the values": ({"head_size": 128, "value_size": 33}, "sm_90", "chunked", 32),
    "raw, a bound of 64": ({"decay": "raw", "decay_bound": -2.0}, "sm_90", "chunked", 32),
    "raw, a bound of 16": ({"decay": "raw", "decay_bound": -8.0}, "sm_90", "chunked", 16),
    "raw, no bound": ({"decay": "raw"}, "sm_90", "chunked", 32),
    "64 asked for": ({"chunk_len": 64}, "sm_90", "chunked", 64),
    "16 asked for": ({"chunk_len": 16}, "sm_90", "chunked", 16),
    "keys beside short values": ({"head_size": 128, "value_size": 32}, "sm_90", "scan", 64),
    "keys beside short values of Ampere": ({"head_size": 128, "value_size": 32}, "sm_80", "scan", 32),
    "heads that Ada has no room for": ({"head_size": 128, "value_size": 128}, "sm_89", "scan", 32),
    "chunk that Hopper has no room for": (
        {"head_size": 128, "value_size": 128, "chunk_len": 64},
        "sm_90",
        "scan",
        64,
    ),
    "keys": ({"head_size": 256}, "sm_90", "scan", 64),
    "values": ({"value_size": 1024}, "sm_90", "scan", 64),
    "both": ({"head_size": 256, "value_size": 512}, "sm_90", "scan", 64),
    "both, extended": ({"head_size": 256, "value_size": 512}, "sm_90a", "scan", 64),
    "keys of Ampere": ({"head_size": 256}, "sm_80", "scan", 32),
    "values of Ampere": ({"value_size": 1024}, "sm_80", "scan", 32),
    "both of Ada": ({"head_size": 256, "value_size": 512}, "sm_89", "scan", 32),
    "both of Blackwell": ({"head_size": 256, "value_size": 512}, "sm_100", "scan", 32),
    "both as PTX": ({"head_size": 256, "value_size": 512}, "compute_90", "scan", 32),
    "keys that only warp groups take": ({"head_size": 257}, "sm_90", "scan", 64),
    "largest of the scan": (LARGEST, "sm_90", "scan", 64),
    "largest of the scan, extended, 64 asked for": ({**LARGEST, "chunk_len": 64}, "sm_90a", "scan", 64),
    "largest of the scan, raw, a bound of 32": ({**LARGEST, "decay": "raw", "decay_bound": -4.0}, "sm_90", "scan", 64),
    "large, raw, a bound of 32": ({**LARGE, "decay": "raw", "decay_bound": -4.0}, "sm_90", "scan", 32),
    "large, raw, a bound of 16": ({**LARGE, "decay": "raw", "decay_bound": -8.0}, "sm_90", "scan", 16),
    "large, raw, a bound of 64": ({**LARGE, "decay": "raw", "decay_bound": -2.0}, "sm_90", "scan", 64),
    "large, raw, a bound that no chunk keeps": ({**LARGE, "decay": "raw", "decay_bound": -8.1}, "sm_90", "scan", 64),
    "large, raw, no bound": ({**LARGE, "decay": "raw"}, "sm_90", "scan", 64),
    "large, raw, no bound, of Ampere": ({**LARGE, "decay": "raw"}, "sm_80", "scan", 32),
    "large, 16 asked for": ({**LARGE, "chunk_len": 16}, "sm_90", "scan", 16),
    "large, 32 asked for": ({**LARGE, "chunk_len": 32}, "sm_90", "scan", 32),
}
# Where "chunked" and "split" are asked for, and why not.
NOT_GATED = {
    "float32": (
        {"dtype": torch.float32},
        "sm_90",
        ("takes float16 and bfloat16, got torch.float32",) * 2,
    ),
    "Turing": ({}, "sm_75", ("needs an architecture from sm_80 on, got sm_75",) * 2),
    "chunk 8": ({"chunk_len": 8}, "sm_90", ("takes chunk_len 16, 32 or 64, got 8",) * 2),
    **{
        f"keys of {arch} in chunks of {length}": (
            {"head_size": 257, "value_size": 512, "chunk_len": asked},
            arch,
            (
                "takes head sizes up to 128, got 257 and 512 for v",
                f"takes keys above 256 on sm_90 with chunk_len=64 alone, got 257 on {arch} with chunk_len={length}",
            ),
        )
        for arch, asked, length in (
            ("sm_80", None, 16),
            ("sm_100", 64, 64),
            ("compute_90", 64, 64),
            ("sm_90", 32, 32),
            ("sm_90a", 16, 16),
        )
    },
    "keys": (
        {"head_size": 1025, "value_size": 512},
        "sm_90",
        (
            "takes head sizes up to 128, got 1025 and 512 for v",
            "takes head sizes up to 1024, got 1025 and 512 for v",
        ),
    ),
    "values": (
        {"value_size": 1025},
        "sm_90",
        (
            "takes head sizes up to 128, got 64 and 1025 for v",
            "takes head sizes up to 1024, got 64 and 1025 for v",
        ),
    ),
}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("op", gated.OPS)
def test_tensor_cores_of_the_other_ops_are_taken_where_they_can_do_it(op, name):
    changes, arch, backend, chunk_len = GATED[name]
    assert choose("auto", {"op": op, **changes}, arch) == (backend, chunk_len)
    assert choose({"scan": "split"}.get(backend, backend), {"op": op, **changes}, arch) == (backend, chunk_len)
    assert choose("recurrent", {"op": op, **changes}, arch) == ("recurrent", changes.get("chunk_len"))
    short = {"op": op, **changes, "tokens": backends.LEAST_TOKENS - 1}
    assert choose("auto", short, arch)[0] == "recurrent"


@pytest.mark.parametrize("name", NOT_GATED)
@pytest.mark.parametrize("op", gated.OPS)
def test_other_calls_of_the_other_ops_are_recurrent_and_say_why(op, name):
    changes, arch, messages = NOT_GATED[name]
    assert choose("auto", {"op": op, **changes}, arch) == ("recurrent", changes.get("chunk_len"))
    for backend, message in zip(("chunked", "split"), messages, strict=True):
        with pytest.raises(UnsupportedConfigError) as caught:
            choose(backend, {"op": op, **changes}, arch)
        assert str(caught.value) == f"backend: {backend!r} {message}; use 'auto' or 'recurrent'"


def test_chunks_of_the_other_ops_say_what_they_have_no_room_for():
    changes = {"op": "gla", "head_size": 128, "value_size": 128}
    for arch, length, there in (("sm_89", 16, 101376), ("sm_90", 64, 232448)):
        needs = gated.most_shared_bytes(128, 128, length)
        assert needs > there
        message = (
            f"backend: 'chunked' needs {needs} bytes of shared memory at head sizes 128 and 128 and "
            f"chunk_len={length}, {arch} has {there}; use 'auto'"
        )
        with pytest.raises(UnsupportedConfigError, match=re.escape(message)):
            choose("chunked", {**changes, "chunk_len": length}, arch)
    with pytest.raises(UnsupportedConfigError, match="takes keys up to twice as long as values .* got 65 and 32 for v"):
        choose("chunked", {"op": "gla", "head_size": 65, "value_size": 32}, "sm_90")
    with pytest.raises(
        UnsupportedConfigError, match="'split' needs more shared memory .* chunk_len=64 than the 101376"
    ):
        choose("split", {"op": "gla", **LARGE, "chunk_len": 64}, "sm_86")


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
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", gated.OPS)
def test_kernels_of_segments_of_the_other_ops(op, backward, sizes, chunk_len, threads, blocks):
    """They have chunks of their own, whatever those of the call are."""
    like = gated_request("forward", *sizes, op=op, chunk_len=64).parameters
    found = split.segment_request(op, like, backward, "sm_90", ("sm_80",))
    assert (found.template.name, found.arch, found.also) == ("gla_segment", "sm_90", ("sm_80",))
    bonus, w = op in ("wkv5", "wkv6"), ("fp32", "none") if op == "linear_attention" else ("bf16", "log")
    assert found.parameters == {
        "HEAD_SIZE": sizes[0], "VALUE_SIZE": sizes[1], "CHUNK_LEN": chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": blocks, "BACKWARD": backward, "T_IO": "bf16", "T_W": w[0], "DECAY": w[1], "BONUS": bonus,
    }  # fmt: skip
    joins = split.join_request(op, *sizes, backward, "sm_90").parameters
    assert joins["NUM_THREADS"] - sizes[0] < joins["ROWS"] * sizes[0] <= joins["NUM_THREADS"]


def test_chunked_kernels_that_run_over_segments_have_states_of_their_own():
    for direction, state in (("forward", {"T_STATE": "fp32"}), ("backward", {})):
        types = {**GATED_TYPES, "T_STATE": "fp16", "STATE_LAYOUT": "kv"}
        like = gated.specialize("gla", direction, 64, 64, types, "sm_90")
        found = split.chunked_request(like)
        assert found.parameters == {**like.parameters, **state, "STATE_LAYOUT": "vk"}
        assert found[::2] == like[::2]


@pytest.mark.parametrize(
    ("op", "size", "arch", "backend"),
    [
        ("gla", 64, "sm_90", "chunked"),
        ("wkv5", 128, "sm_90", "chunked"),
        ("wkv7", 128, "sm_90", "chunked"),
        ("gla", 128, "sm_89", "scan"),
        ("gla", 192, "sm_90", "scan"),
        ("wkv7", 192, "sm_90", "scan"),
    ],
)
def test_split_that_is_compiled_ahead_is_the_chunked_kernels_where_these_hold_a_head(op, size, arch, backend):
    given = (size, None, torch.bfloat16, arch, "forward", "split", None, None, None, {})
    assert runtime.call_request(op, *given)[0] == backend


def test_chunked_kernels_of_segments_are_those_of_the_op():
    for op, name in (("wkv7", "wkv7_chunked_forward"), ("gla", "gla_scan")):
        assert split.specialize(op, "forward", 64, 64, GATED_TYPES, "sm_90").template.name == name


def test_call_without_a_decay_is_never_guarded():
    for backend, length in (("chunked", 64), ("scan", 64), ("recurrent", None)):
        assert not backends.is_guarded(backend, length, "none", None)
    assert backends.is_guarded("scan", 64, "log", None)


GATED_TYPES = {"T_IO": "bf16", "T_W": "bf16", "T_U": "bf16", "T_STATE": "fp32", "DECAY": "log", "STATE_LAYOUT": "vk"}


def gated_request(direction, head_size, value_size, arch="sm_90", op="wkv6", of=gated, **more):
    decay = {"DECAY": "none"} if op == "linear_attention" else {}
    return of.specialize(op, direction, head_size, value_size, GATED_TYPES | decay, arch, **more)


@pytest.mark.parametrize(
    ("op", "size", "forward", "backward"),
    [
        ("wkv6", 32, (32, 64, 8), (64, 4)),
        ("wkv6", 64, (64, 128, 4), (128, 2)),
        ("wkv6", 96, (96, 96, 2), (192, 1)),
        ("wkv6", 128, (128, 128, 2), (256, 1)),
        ("linear_attention", 64, (64, 128, 4), (128, 2)),
        ("linear_attention", 128, (128, 128, 2), (256, 1)),
    ],
)
def test_geometry_of_the_gated_kernels_is_what_was_fastest(op, size, forward, backward):
    found = gated_request("forward", size, size, op=op).parameters
    assert (found["ROWS"], found["NUM_THREADS"], found["BLOCKS_PER_SM"]) == forward
    assert (found["CHUNK_LEN"], found["BACKWARD"], found["LARGEST_DECAY"]) == (32, False, 0)
    found = gated_request("backward", size, size, op=op).parameters
    assert (found["NUM_THREADS"], found["BLOCKS_PER_SM"]) == backward
    assert "T_STATE" not in found


@pytest.mark.parametrize(("value_size", "rows"), [(1, 32), (33, 64), (128, 128), (129, 96), (257, 96), (512, 128)])
def test_value_rows_are_shared_evenly_between_blocks(value_size, rows):
    assert gated.rows(value_size) == rows


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_gated_kernels_have_the_shared_memory_and_threads_they_need(arch):
    limit, seen = chunked.shared_limit(arch), set()
    sizes = (1, 32, 40, 64, 96, 128, 200, 256)
    for op, keys, values in itertools.product(gated.OPS, sizes, (*sizes, 512, 1000, 1024)):
        for of, lengths in ((gated, gated.CHUNK_LENS), (gated_scan, gated_scan.CHUNK_LENS)):
            for length in (None, *lengths):
                if of.obstacle(op, torch.bfloat16, keys, values, lambda: arch, length) is not None:
                    continue
                default = gated_scan.default_chunk_len(keys, arch)
                if of is gated_scan and gated_groups.can(arch, length or default, None):
                    continue  # these have tests of their own
                requests = [
                    gated_request(way, keys, values, arch, op, of, chunk_len=length) for way in ("forward", "backward")
                ]
                if of is gated_scan:
                    given = (keys, values, GATED_TYPES, arch, length)
                    assert gated_scan.companions(op, "forward", *given) == []
                    requests += gated_scan.companions(op, "backward", *given)
                for request in requests:
                    found, name = request.parameters, request.template.name
                    shared, blocks, threads = (found[n] for n in ("SHARED_BYTES", "BLOCKS_PER_SM", "NUM_THREADS"))
                    assert shared <= limit
                    assert blocks * (shared + 1024) <= limit + 1024
                    assert 64 <= threads <= 512
                    assert blocks * threads <= 512
                    if name == "gla_scan":
                        tiles = -(-found["ROWS"] * 2 // threads)
                        assert threads >= chunked.padded(keys)
                        assert found["ROWS"] % (16 * tiles) == 0
                        assert tiles * chunked.padded(keys) // 2 <= 128  # floats of a thread's state
                    elif name == "gla_chunked_backward":
                        assert threads == 2 * chunked.padded(values) >= chunked.padded(keys)
                    seen.add(name)
                assert {request.parameters["CHUNK_LEN"] for request in requests} == {
                    requests[0].parameters["CHUNK_LEN"]
                }
    groups = {"gla_group_backward"} if arch == "sm_90" else set()
    assert seen == {"gla_scan", "gla_chunked_backward", "gla_key_gradients"} | groups


def test_threads_of_the_gated_forward_that_may_be_asked_for():
    for of, sizes, least in ((gated, (40, 40), 64), (gated, (128, 33), 128), (gated_scan, (256, 512), 256)):
        for threads in (least, least + 32, 512):
            assert gated_request("forward", *sizes, of=of, num_threads=threads).parameters["NUM_THREADS"] == threads
        for threads in (32, least - 32, least + 16, 544):
            message = (
                f"num_threads must be a multiple of 32 from {least} to 512 at head sizes {sizes[0]} and {sizes[1]}, "
                f"got {threads}"
            )
            with pytest.raises(UnsupportedConfigError) as caught:
                gated_request("forward", *sizes, of=of, num_threads=threads)
            assert str(caught.value) == message


def test_what_is_chosen_and_what_ops_are_made_of_overrides_the_geometry():
    found = gated_request("forward", 64, 64, chosen={"BLOCKS_PER_SM": 3, "LARGEST_DECAY": 64}, also=("sm_80",))
    assert (found.parameters["BLOCKS_PER_SM"], found.parameters["LARGEST_DECAY"]) == (3, 64)
    assert (found.template.name, found.arch, found.also) == ("gla_scan", "sm_90", ("sm_80",))
    for op, bonus, constant in (("wkv5", True, True), ("wkv6", True, False), ("gla", False, False)):
        of_keys = [
            gated_scan.companions(op, "backward", 256, 256, GATED_TYPES, "sm_90", length)[0].parameters
            for length in (None, 32)
        ]
        for found in (gated_request("backward", 64, 64, op=op).parameters, *of_keys):
            assert (found["BONUS"], found["CONSTANT_DECAY"]) == (bonus, constant)
    back = gated_request("backward", 256, 256, of=gated_scan).parameters
    assert (back["BACKWARD"], back["T_STATE"]) == (True, "fp32")


@pytest.mark.parametrize("chunk_len", [16, 32, 64])
def test_chunks_of_packed_sequences_are_summed_one_sequence_at_a_time(chunk_len):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(0, 150, (5,), generator=generator).tolist()
        bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        slots = layout.slots(
            interface.Inputs("gla", ("v",), (torch.zeros(1, sum(lengths), 1, 1),), (), 5), True, chunk_len
        )
        parts, want = torch.zeros(slots, 3, 4), torch.zeros(5, 3, 4)
        for sequence, (begin, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
            for chunk in range(-(-length // chunk_len)):
                rows = torch.randint(-9, 9, (3, 4), generator=generator).float()
                parts[begin // chunk_len + sequence + chunk] = rows  # as sequence.cuh counts
                want[sequence] += rows
        assert torch.equal(gated_scan._of_sequences(parts, bounds, 5, sum(lengths), chunk_len), want)


def test_chunks_of_rows_are_summed_row_by_row():
    parts = torch.arange(24.0).view(6, 2, 2)
    want = torch.stack([parts[:3].sum(0), parts[3:].sum(0)])
    assert torch.equal(gated_scan._of_sequences(parts, None, 2, 70, 32), want)
    for sequences in (0, 2):  # without sequences or tokens
        assert gated_scan._of_sequences(parts[:0], None, sequences, 0, 32).shape == (sequences, 2, 2)


# ---- the other ops' large heads with products of warp groups ---------------------------------------------------------

GROUP_NAMES = {"gla_prepare", "gla_group_scan", "gla_group_key_gradients"}


@pytest.mark.parametrize("threads", [None, 384, 128, 256, 512])
@pytest.mark.parametrize("chunk_len", gated_scan.CHUNK_LENS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_90"])
def test_warp_groups_take_calls_by_architecture_chunk_and_threads(arch, chunk_len, threads):
    expected = arch in WITH_GROUPS and chunk_len == 64 and threads in (None, 384)
    assert gated_groups.can(arch, chunk_len, threads) is expected


@pytest.mark.parametrize(
    ("arch", "head_size", "decay", "bound", "chunk_len"),
    [
        ("sm_90", 256, "none", None, 64),
        ("sm_90", 256, "sigmoid", None, 64),
        ("sm_90", 256, "log", None, 64),
        ("sm_90", 256, "log", -2.0, 64),
        ("sm_90a", 256, "log", -2.0, 64),
        ("sm_90", 256, "log", -2.1, 32),
        ("sm_90", 256, "raw", -4.0, 32),
        ("sm_90", 256, "raw", -4.1, 16),
        ("sm_90", 256, "direct", -8.0, 16),
        ("sm_90", 256, "direct", -8.1, 64),
        ("sm_90", 257, "log", -2.1, 64),  # nothing else takes these keys
        ("sm_90", 1024, "log", -8.0, 64),
        ("sm_80", 256, "log", -1.0, 32),
        ("sm_80", 256, "log", -4.1, 16),
        ("sm_80", 256, "log", None, 32),
        ("sm_100", 256, "sigmoid", None, 32),
        ("compute_90", 256, "sigmoid", None, 32),
    ],
)
def test_chunk_of_large_heads_is_that_of_warp_groups_or_one_that_keeps_a_bound(
    arch, head_size, decay, bound, chunk_len
):
    assert gated_scan.default_chunk_len(head_size, arch, decay, bound) == chunk_len
    assert gated_scan.default_chunk_len(head_size, arch, decay, bound, 384) == chunk_len


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "gla"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100"])
def test_threads_that_warp_groups_do_not_have_take_the_chunk_of_other_architectures(arch, op):
    """Where the state would spill in chunks of 64."""
    sizes = {"op": op, "head_size": 256, "value_size": 512}
    for threads in (256, 288, 512):
        for decay, bound, chunk_len in (("sigmoid", None, 32), ("log", None, 32), ("log", -2.0, 32), ("log", -4.1, 16)):
            case = {**sizes, "decay": decay, "decay_bound": bound, "num_threads": threads}
            assert choose("auto", case, arch) == choose("split", case, arch) == ("scan", chunk_len)
            assert choose("auto", case | {"chunk_len": 64}, arch) == ("scan", 64)
            _, request = runtime.call_request(
                op, 256, 512, torch.bfloat16, arch, "forward", "auto", decay, None, threads, {}, bound
            )
            assert (request.template.name, request.parameters["CHUNK_LEN"]) == ("gla_scan", chunk_len)
        for direction in ("forward", "backward"):
            found = gated_request(direction, 256, 512, arch, op, gated_scan, num_threads=threads).parameters
            assert (found["CHUNK_LEN"], found["NUM_THREADS"]) == (32, threads)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("sizes", "chunk_len", "threads", "is_of_groups"),
    [
        ((256, 512), None, None, True),
        ((256, 512), 64, 384, True),
        ((40, 130), 64, None, True),
        ((1024, 1024), 64, 384, True),
        ((128, 130), 64, 128, False),
        ((256, 512), 64, 256, False),
        ((256, 512), None, 256, False),
        ((256, 512), 32, None, False),
        ((256, 512), 32, 384, False),
        ((256, 512), 16, None, False),
    ],
)
def test_which_kernel_walks_over_the_chunks_of_the_other_ops(sizes, chunk_len, threads, is_of_groups, direction):
    found = gated_request(direction, *sizes, of=gated_scan, chunk_len=chunk_len, num_threads=threads, also=("sm_80",))
    assert found.template.name == ("gla_group_scan" if is_of_groups else "gla_scan")
    assert (found.arch, found.also) == (("sm_90a", ()) if is_of_groups else ("sm_90", ("sm_80",)))
    assert (found.parameters["BACKWARD"], found.parameters["T_STATE"]) == (direction == "backward", "fp32")
    for other in ("sm_80", "sm_100"):
        if max(sizes) <= 512 and sizes[0] <= 256:
            given = {"chunk_len": chunk_len, "num_threads": None}
            assert gated_request(direction, *sizes, other, of=gated_scan, **given).template.name == "gla_scan"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("threads", [128, 256, 385, 512])
@pytest.mark.parametrize("sizes", [(257, 64), (512, 512), (1024, 1024)])
def test_keys_above_256_have_blocks_of_one_size(sizes, threads, direction):
    message = f"num_threads must be 384 at head sizes {sizes[0]} and {sizes[1]}, got {threads}"
    with pytest.raises(UnsupportedConfigError) as caught:
        gated_request(direction, *sizes, of=gated_scan, num_threads=threads)
    assert str(caught.value) == message
    for threads in (None, 384):
        found = gated_request(direction, *sizes, of=gated_scan, num_threads=threads)
        assert (found.template.name, found.parameters["NUM_THREADS"]) == ("gla_group_scan", 384)


def slabs(size):
    return -(-size // 64)


@pytest.mark.parametrize("few_heads", [False, True])
def test_blocks_of_the_other_ops_warp_groups_fit(few_heads):
    for head_size, value_size in itertools.product(range(1, 1025), (1, 512)):
        found = gated_request("forward", head_size, value_size, of=gated_scan, chunk_len=64, few_heads=few_heads)
        rows, stages, shared = (found.parameters[name] for name in ("VALUE_ROWS", "STAGES", "SHARED_BYTES"))
        assert rows == (32 if few_heads or head_size > 512 else 64)
        assert slabs(head_size) * 64 * rows <= 512 * 64  # 128 registers of a thread, of two groups of four warps
        # Two images of the state, the values of two chunks, outputs; a stage has two tiles and two barriers.
        fixed = 2 * slabs(head_size) * rows * 128 + 2 * 8192 + 8 * 16 * 2 * (rows // 2 + 8)
        assert shared == fixed + stages * (2 * 8192 + 16)
        assert shared <= LIMITS["sm_90"]
        assert 4 <= stages <= 8  # two pairs of slabs are held at once
        assert stages == 8 or shared + 2 * 8192 + 16 > LIMITS["sm_90"]


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
def test_value_rows_and_stages_of_the_other_ops_warp_groups(head_size, few_heads, cut):
    for direction in ("forward", "backward"):
        found = gated_request(direction, head_size, 300, of=gated_scan, chunk_len=64, few_heads=few_heads).parameters
        assert (found["VALUE_ROWS"], found["STAGES"], found["SHARED_BYTES"]) == cut


def other_of_groups(op, direction, types=GATED_TYPES, guarded=False, sizes=(200, 300)):
    """The one kernel beside the walk over the chunks."""
    decay = {"DECAY": "none"} if op == "linear_attention" else {}
    (found,) = gated_scan.companions(op, direction, *sizes, types | decay, "sm_90", 64, ("sm_80",), guarded)
    return found


@pytest.mark.parametrize("op", gated.OPS)
def test_parameters_of_the_other_ops_warp_groups(op):
    bonus, constant, decay = op in ("wkv5", "wkv6"), op == "wkv5", "none" if op == "linear_attention" else "log"
    types = {**GATED_TYPES, "T_IO": "fp16", "T_W": "fp32", "T_U": "bf16"}
    of_inputs = {
        "T_IO": "fp16", "T_W": "fp32", "T_U": "bf16" if bonus else "fp32", "DECAY": decay, "BONUS": bonus,
        "HEAD_SIZE": 200, "CHUNK_LEN": 64,
    }  # fmt: skip
    prepare = other_of_groups(op, "forward", types)
    assert (prepare.template.name, prepare.arch, prepare.also) == ("gla_prepare", "sm_90a", ())
    assert prepare.parameters == of_inputs | {
        "NUM_THREADS": 256, "BLOCKS_PER_SM": 3 if decay == "none" else 2, "LARGEST_DECAY": 0, "SHARED_BYTES": 51456
    }  # fmt: skip
    keys = other_of_groups(op, "backward", types)
    assert (keys.template.name, keys.arch, keys.also) == ("gla_group_key_gradients", "sm_90a", ())
    assert keys.parameters == of_inputs | {
        "VALUE_SIZE": 300, "NUM_THREADS": 128, "BLOCKS_PER_SM": 2, "STAGES": 3, "CONSTANT_DECAY": constant,
        "SHARED_BYTES": 68608,
    }  # fmt: skip
    for direction in ("forward", "backward"):
        request = gated_scan.specialize(op, direction, 200, 300, types | {"DECAY": decay, "T_STATE": "bf16"}, "sm_90")
        assert request.parameters == {
            "T_IO": "fp16", "T_STATE": "bf16" if direction == "forward" else "fp32", "DECAY": decay,
            "STATE_LAYOUT": "vk", "HEAD_SIZE": 200, "VALUE_SIZE": 300, "CHUNK_LEN": 64, "NUM_THREADS": 384,
            "VALUE_ROWS": 64, "STAGES": 8, "BACKWARD": direction == "backward", "SHARED_BYTES": 223360,
        }  # fmt: skip
        for each in (request, prepare, keys):
            each.template.check(each.parameters)


@pytest.mark.parametrize(
    ("op", "t_w", "blocks"),
    [("gla", "bf16", 3), ("gla", "fp32", 2), ("linear_attention", "fp32", 3), ("wkv6", "bf16", 2), ("wkv6", "fp32", 2),
     ("wkv5", "bf16", 2)],
)  # fmt: skip
def test_blocks_that_prepare_are_three_where_registers_allow_it(op, t_w, blocks):
    assert other_of_groups(op, "forward", GATED_TYPES | {"T_W": t_w}).parameters["BLOCKS_PER_SM"] == blocks


def test_what_prepares_looks_at_decays_where_no_bound_is_kept():
    for is_guarded, largest in ((False, 0), (True, interface.LARGEST_DECAY)):
        assert other_of_groups("gla", "forward", guarded=is_guarded).parameters["LARGEST_DECAY"] == largest
        assert "LARGEST_DECAY" not in other_of_groups("gla", "backward", guarded=is_guarded).parameters
    # The walk over the chunks reads no decays.
    chosen = {"LARGEST_DECAY": interface.LARGEST_DECAY, "STAGES": 5}
    found = gated_request("forward", 200, 300, of=gated_scan, chosen=chosen).parameters
    assert "LARGEST_DECAY" not in found
    assert found["STAGES"] == 5


@pytest.mark.parametrize(("guarded", "looks"), [(False, []), (True, ["wkv7_decay_range"])])
def test_companions_of_a_guarded_wkv7_look_at_decays(guarded, looks):
    for direction, others in (
        ("forward", ["wkv7_prepare", *looks]), ("backward", ["wkv7_token_gradients", "wkv7_key_gradients"])
    ):  # fmt: skip
        found = scan_geometry.companions("wkv7", direction, 256, 256, TYPES, "sm_90", 64, guarded=guarded)
        assert [request.template.name for request in found] == others


@pytest.mark.parametrize("size", [1, 64, 200, 512, 1024])
def test_all_three_kernels_of_warp_groups_have_room_for_their_blocks(size):
    seen = set()
    for op, t_w, direction in itertools.product(gated.OPS, ("bf16", "fp32"), ("forward", "backward")):
        types = GATED_TYPES | {"T_W": t_w}
        for request in (
            gated_scan.specialize(op, direction, size, size, types, "sm_90", 64),
            other_of_groups(op, direction, types, sizes=(size, size)),
        ):
            blocks, threads, shared = (
                request.parameters.get(name, 1) for name in ("BLOCKS_PER_SM", "NUM_THREADS", "SHARED_BYTES")
            )
            assert blocks * (shared + 1024) <= LIMITS["sm_90"] + 1024
            assert blocks * threads * 80 <= 65536  # registers
            seen.add(request.template.name)
    assert seen == GROUP_NAMES


# ---- what the backends answer ----------------------------------------------------------------------------------------


def asked_of(protocol):
    return {name for name in dir(protocol) if not name.startswith("_")}


def test_backends_answer_everything():
    assert asked_of(interface.Kernels) == {"specialize", "nearest", "saved_for"}
    assert asked_of(interface.Backend) == asked_of(interface.Kernels) | {"vector", "launch"}
    of_chunks = {"CHUNK_LENS", "obstacle", "default_chunk_len", "candidates", "templates"}
    assert asked_of(interface.Chunks) | {"CHUNK_LENS"} == asked_of(interface.Backend) | of_chunks
    assert asked_of(interface.Several) == asked_of(interface.Kernels) | {"prepare_forward", "backward"}
    assert set(backends.KERNELS) == set(backends.SCANS) == set(choices.CHUNKS) == set(runtime.OPS)
    for op, kernels in backends.KERNELS.items():
        assert asked_of(interface.Chunks) | {"CHUNK_LENS"} <= set(vars(choices.CHUNKS[op]))
        assert kernels["chunked"] is choices.CHUNKS[op]
        for module in backends._OF_ONE_KERNEL[op].values():
            assert asked_of(interface.Backend) <= set(vars(module))
        for module in backends._OF_SEVERAL[op].values():
            assert asked_of(interface.Several) <= set(vars(module))
        assert kernels == backends._OF_ONE_KERNEL[op] | backends._OF_SEVERAL[op]


def test_prepared_forwards_answer_everything():
    for module in (prepared, split, scan, gated_groups):
        assert asked_of(interface.Guardable) <= set(dir(module.Forward))
    assert asked_of(interface.Guardable) == {"options", "run", "takes_any_decay"}
    assert asked_of(interface.Forward) <= set(dir(guarded.Forward))


def test_names_are_those_of_the_docstring():
    quoted = re.search(r"backend : \{(.*)\}", rwkv_jit.wkv7.__doc__)[1]
    assert tuple(name.strip(' "') for name in quoted.split(",")) == backends.NAMES
