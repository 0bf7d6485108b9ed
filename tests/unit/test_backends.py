"""The rule that picks a backend, what each says it can do, and the geometry of the chunked kernels."""

import itertools
import re

import pytest
import torch

import rwkv_jit
from rwkv_jit import tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import backends, boundary, chunked, prepared, recurrent, split

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
    "wkv6": ({"op": "wkv6"}, "sm_90", "has kernels for wkv7, got wkv6"),
    "float32": ({"dtype": torch.float32}, "sm_90", "takes float16 and bfloat16, got torch.float32"),
    "float64": ({"dtype": torch.float64}, "sm_90", "takes float16 and bfloat16, got torch.float64"),
    "keys": ({"head_size": 129}, "sm_90", "takes head sizes up to 128, got 129 and 64 for v"),
    "values": ({"value_size": 200}, "sm_90", "takes head sizes up to 128, got 64 and 200 for v"),
    "keys beside short values": (
        {"head_size": 65, "value_size": 32},
        "sm_90",
        "takes keys up to twice as long as values (in steps of 32), got 65 and 32 for v",
    ),
    "Turing": ({}, "sm_75", "needs an architecture from sm_80 on, got sm_75"),
    "older PTX": ({}, "compute_75", "needs an architecture from sm_80 on, got compute_75"),
    "chunk 8": ({"chunk_len": 8}, "sm_90", "takes chunk_len 16 or 32, got 8"),
    "chunk 64": ({"chunk_len": 64}, "sm_90", "takes chunk_len 16 or 32, got 64"),
    "no bound": (
        {"decay": "raw"},
        "sm_90",
        "needs a bounded decay: decay='sigmoid' or decay_bound of at least -4 at chunk_len=32, got decay='raw', "
        "decay_bound=None",
    ),
    "bound too low": (
        {"decay": "log", "decay_bound": -4.1},
        "sm_90",
        "needs a bounded decay: decay='sigmoid' or decay_bound of at least -4 at chunk_len=32, got decay='log', "
        "decay_bound=-4.1",
    ),
    "bound too low at 16": (
        {"decay": "direct", "decay_bound": -8.5, "chunk_len": 16},
        "sm_90",
        "needs a bounded decay: decay='sigmoid' or decay_bound of at least -8 at chunk_len=16, got decay='direct', "
        "decay_bound=-8.5",
    ),
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


@pytest.mark.parametrize("changes", [{"op": "wkv6"}, {"dtype": torch.float32}, {"decay": "raw"}, {"tokens": 1}])
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
    plain = prepared.Options(1.0, "sigmoid", "vk", 64, None, None, "auto")
    op = rwkv_jit.wkv7.__globals__["OP"]
    return boundary._check(op, given, None, cu_seqlens, decay_bound, plain._replace(**options), training)[-1]


def bf16(tokens, batch=1, head_size=64):
    return [torch.zeros(batch, tokens, 2, head_size, dtype=torch.bfloat16) for _ in range(6)]


def test_call_is_resolved_with_its_chunk(on_gpu):
    assert resolved(bf16(32)) == (1.0, "sigmoid", "vk", 64, 32, None, "chunked", None, None)
    assert resolved(bf16(32), decay="raw", decay_bound=-1.0)[4:7] == (32, None, "chunked")
    assert resolved(bf16(32, head_size=96))[4:7] == (32, None, "chunked")
    assert resolved(bf16(32, head_size=96), training=False)[4:7] == (16, None, "chunked")
    assert resolved(bf16(31))[4:7] == (None, None, "recurrent")
    assert resolved(bf16(32), decay="raw")[4:7] == (None, None, "recurrent")
    assert resolved(bf16(32), chunk_len=4, num_threads=64)[4:7] == (4, 64, "recurrent")
    assert resolved(bf16(32), backend="reference")[4:7] == (None, None, "reference")


def test_packed_sequences_count_by_their_mean_length(on_gpu):
    for sequences, backend in ((1, "chunked"), (4, "chunked"), (5, "recurrent"), (128, "recurrent")):
        bounds = torch.linspace(0, 128, sequences + 1).to(torch.int64)
        assert resolved(bf16(128), bounds).backend == backend


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("tokens", "options", "backend"),
    [
        (64, {"decay": "sigmoid"}, "chunked"),
        (64, {"decay_bound": -0.7}, "chunked"),
        (64, {"decay_bound": -7.0}, "recurrent"),
        (20, {"decay": "sigmoid"}, "recurrent"),
        (64, {}, "recurrent"),
        (64, {"decay": "sigmoid", "backend": "recurrent"}, "recurrent"),
    ],
    ids=str,
)
def test_compiler_sees_the_backend_that_will_run(tokens, options, backend, dynamic, on_gpu):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *_: (torch.zeros(1),) * 2

    torch._dynamo.reset()
    torch.compile(rwkv_jit.wkv7, fullgraph=True, backend=keep, dynamic=dynamic)(*bf16(tokens, 2), **options)
    (call,) = [node for node in graphs[0].graph.nodes if "wkv7_fwd" in str(node.target)]
    assert call.args[-5] == backend
    assert call.args[-7] == (32 if backend == "chunked" else None)


# ---- segments ------------------------------------------------------------------------------------------------------


def few(blocks, tokens, **changes):
    return {"blocks": blocks, "tokens": tokens, "multiprocessors": lambda: 132, **changes}


@pytest.mark.parametrize(
    ("blocks", "tokens", "count"),
    [(16, 32768, 16), (16, 8192, 16), (16, 4096, 8), (66, 32768, 4), (67, 32768, 1), (16, 32768 + 16, 1), (1, 2048, 4),
     (1, 2047, 1), (1, 1, 1), (16, 5 * 544, 5), (1, 512 * 264, 264), (1, 512 * 266, 224)],
)  # fmt: skip
def test_segments_are_equal_and_end_where_chunks_do(blocks, tokens, count):
    assert split.segments(blocks, tokens, 132) == count
    assert tokens % count == 0


def test_segments_that_are_asked_for_are_made_with_many_heads_too():
    assert split.segments(1000, 4096, 132) == 1
    assert split.segments(1000, 4096, 132, split.LEAST_SEGMENTS) == 4


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
        ({"dtype": torch.float32}, "takes float16 and bfloat16, got torch.float32"),
    ],
)
def test_split_says_why_it_cannot(changes, message):
    with pytest.raises(UnsupportedConfigError, match=re.escape(f"backend: 'split' {message}; use 'auto'")):
        choose("split", few(16, 32768) | changes, "sm_90")


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


@pytest.mark.parametrize("name", backends.KERNELS)
def test_backend_answers_everything(name):
    module = backends.KERNELS[name]
    wanted = {each for each in vars(prepared.Backend) if not each.startswith("_")}
    assert len(wanted) == 5
    assert wanted <= set(vars(module))


def test_names_are_those_of_the_docstring():
    quoted = re.search(r"backend : \{(.*)\}", rwkv_jit.wkv7.__doc__)[1]
    assert tuple(name.strip(' "') for name in quoted.split(",")) == backends.NAMES
