"""wkv7 with large heads, taken apart, against the float64 recurrence on the same rounded inputs."""

import threading

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels import cuda, signatures
from rwkv_jit.schedules import delta_chunked, delta_large

relative, run = comparing.relative, comparing.run

# A parameter, so that the record counts these tests.
pytestmark = pytest.mark.parametrize("op", ["wkv7"])

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GATE = 6e-3
GATES = {"da": 8e-3, "db": 8e-3}
REPEATED = {"da": 3e-2, "db": 3e-2}
SLOW = (-1e-2, -1e-4)  # log-decay per step
PINNED = {"decay": "sigmoid", "backend": "split", "chunk_len": 64}  # with a number of threads
HAS_GROUPS = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_groups = pytest.mark.skipif(not HAS_GROUPS, reason="only an sm_90 has products of warp groups")
# Threads of the scan with products of warp groups; asked for, they have blocks of 64 rows however few heads there are.
OF_GROUPS = pytest.param(384, marks=needs_groups)


def inputs(dtype=torch.bfloat16, decay="sigmoid", head_size=256, heads=2, **more):
    return comparing.make_inputs("wkv7", dtype, decay=decay, head_size=head_size, heads=heads, **more)


def check(given, state=None, gates=GATES, weights=None, **options):
    options = {"decay": "sigmoid", "backend": "split", **options}
    exact = {n: x for n, x in options.items() if n in ("decay", "scale", "state_layout", "cu_seqlens")}
    errors, final, named = comparing.compare("wkv7", given, state, options, exact, weights)
    limits = comparing.limits_of(errors, final, named, given, GATE, gates)
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, (wrong, limits)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decay", ["sigmoid", "raw"])
@pytest.mark.parametrize("chunk_len", [32, 64])
@pytest.mark.parametrize("sizes", [(128, 128), (100, 100), (128, 1), (97, 33), (65, 20), (40, 7), (16, 16), (1, 1)])
def test_heads_that_a_block_has_no_room_for(op, sizes, chunk_len, decay, monkeypatch):
    """As on GPUs with less shared memory, or where keys are long beside values."""
    monkeypatch.setattr(delta_chunked, "why_not", lambda *_: ("has no room",))
    heads = comparing.enough_heads(sizes[0])
    given = inputs(tokens=100, head_size=sizes[0], value_size=sizes[1], heads=heads, decay=decay)
    names = ("y", "state", "dinitial_state", *(f"d{n}" for n in given))
    gates = dict.fromkeys(names, 5e-2) if sizes == (1, 1) else GATES  # sums over a single channel average nothing
    check(given, comparing.make_state(given, 2), gates, decay=decay, chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk_len", "threads"), [(32, None), (64, None), pytest.param(64, 384, marks=needs_groups)])
def test_every_length(op, chunk_len, threads, dtype, tokens):
    given = inputs(DTYPES[dtype], tokens=tokens, head_size=192)
    check(given, comparing.make_state(given, 2), chunk_len=chunk_len, num_threads=threads)


def test_no_tokens_copy_the_state(op):
    given = inputs(tokens=0)
    state = comparing.make_state(given, 2)
    y, final, grads, weights = run(op, given, state, decay="sigmoid", backend="split")
    assert y.numel() == 0
    assert torch.equal(final, state)
    assert torch.equal(grads[-1], weights[1])


LARGEST_OF_64 = 512  # head size for chunks of 64 tokens: beyond, shared memory ends without products of warp groups


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    ("chunk_len", "head_size"),
    [(64, n) for n in (129, 130, 132, 136, 160, 192, 256, 257, 320, 384, 448, LARGEST_OF_64)]
    + [pytest.param(64, n, marks=needs_groups) for n in (520, 768, 1024)]
    + [(32, n) for n in (129, 136, 192, 256, 257, 384, 512, 520, 768, 1024)],
)
def test_every_head_size(op, chunk_len, head_size):
    given = inputs(tokens=100, heads=1, head_size=head_size, value_size=min(head_size, 300))
    check(given, comparing.make_state(given, 2), chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    "sizes", [(256, 64), (40, 200), (137, 145), (512, 256), (256, 1024), (64, 136), (130, 5), (7, 129), (140, 36)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_of_different_size(op, dtype, sizes):
    given = inputs(DTYPES[dtype], tokens=90, head_size=sizes[0], value_size=sizes[1])
    check(given, comparing.make_state(given, 2))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(("head_size", "threads"), [(192, 64), (192, 128), (256, 128), (256, 256), (512, 256)])
@pytest.mark.parametrize("chunk_len", [32, 64])
def test_every_number_of_threads(op, chunk_len, head_size, threads):
    given = inputs(tokens=90, head_size=head_size)
    check(given, comparing.make_state(given, 2), num_threads=threads, chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    ("head_size", "threads", "name"),
    [
        (192, 128, "wkv7_scan"),
        (256, 256, "wkv7_scan"),
        *(pytest.param(n, 384, "wkv7_group_scan", marks=needs_groups) for n in (192, 256, 512, 1024)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_either_scan(op, dtype, head_size, threads, name, launched):
    tokens = 150 if head_size <= 256 else 70  # the reference keeps every token's state, in float64
    given = inputs(DTYPES[dtype], tokens=tokens, heads=1, head_size=head_size)
    check(given, comparing.make_state(given, 2), chunk_len=64, num_threads=threads)
    assert [made.name for made in launched if made.name.endswith("_scan")] == [name, name]


@pytest.mark.usefixtures("guarded_memory")
@needs_groups
@pytest.mark.parametrize("sizes", [(40, 200), (137, 145), (512, 66), (130, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_end_within_a_block_of_warp_groups(op, dtype, sizes):
    """Of a cluster of two, and alone."""
    given = inputs(DTYPES[dtype], tokens=90, head_size=sizes[0], value_size=sizes[1])
    check(given, comparing.make_state(given, 2), chunk_len=64, num_threads=384)


@pytest.mark.parametrize("threads", [None, 128, OF_GROUPS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_gradients(op, dtype, threads):
    given = {n: x.detach() for n, x in inputs(DTYPES[dtype], tokens=150).items()}
    state = comparing.make_state(given, 2).detach()
    y, final = rwkv_jit.wkv7(*given.values(), state, True, num_threads=threads, **PINNED)
    exact = [x.double() for x in (*given.values(), state)]
    want_y, want_final = rwkv_jit.wkv7_ref(*exact, output_final_state=True, decay="sigmoid")
    assert relative(y, want_y) < GATE
    assert relative(final, want_final) < GATE


def test_many_heads(op):
    given = inputs(batch=8, tokens=130, heads=16)
    check(given, comparing.make_state(given, 8))


def test_a_long_sequence(op):
    given = inputs(batch=1, heads=1, tokens=4096, decays=SLOW)
    check(given, comparing.make_state(given, 1))


@pytest.mark.parametrize(("chunk_len", "bound"), [(64, -2.0), (32, -4.0)])
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
def test_every_bounded_decay(op, w_dtype, decay, chunk_len, bound):
    """Down to the bound; a little less, as bfloat16 would round some decays below it."""
    given = inputs(tokens=130, decay=decay, decays=(0.98 * bound, -0.01), w_dtype=w_dtype)
    check(given, decay=decay, decay_bound=bound, chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_in_and_out(op, dtype, layout, state_dtype):
    given = inputs(DTYPES[dtype], head_size=150, value_size=200)
    check(given, comparing.make_state(given, 2, state_dtype, layout), state_layout=layout, scale=0.7)


def test_gradient_of_the_final_state_alone(op):
    given = inputs()
    check(given, weights=(torch.zeros_like(given["v"]), torch.randn(2, 2, 256, 256, device="cuda")))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("threads", [128, OF_GROUPS])
def test_packed_sequences_are_the_sequences_one_by_one(op, threads, index_dtype):
    options = {**PINNED, "num_threads": threads}
    bounds = [0, 0, 5, 69, 70, 70, 134, 298, 300]
    given = inputs(batch=1, tokens=300)
    state = comparing.make_state(given, len(bounds) - 1)
    cu_seqlens = comparing.check_one_by_one(op, given, state, bounds, index_dtype, **options)
    check(given, state, cu_seqlens=cu_seqlens)
    check(given, state, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("how", comparing.STRIDES)
@pytest.mark.parametrize("head_size", [136, 132, 131])
def test_inputs_of_any_stride(op, head_size, how):
    odd = {n: comparing.strided(x, how) for n, x in inputs(head_size=head_size).items()}
    assert not any(x.is_contiguous() for x in odd.values())
    check({n: x.requires_grad_() for n, x in odd.items()})


def test_known_signature_at_an_address_the_kernel_cannot_read(op):
    given = {n: x.detach() for n, x in inputs().items()}
    want, _ = rwkv_jit.wkv7(*given.values(), decay="sigmoid")
    for moved, x in given.items():
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        shifted = memory.as_strided(x.shape, x.stride(), 1).copy_(x)
        y, _ = rwkv_jit.wkv7(*{**given, moved: shifted}.values(), decay="sigmoid")
        assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decays", [SLOW, "usual"], ids=["slow", "usual"])
def test_a_repeated_token(op, decays, dtype):
    given = inputs(DTYPES[dtype], tokens=256, heads=4, decays=decays)
    kk = -given["a"][:, :1].detach().float().expand(-1, 256, -1, -1)
    own = {n: x.detach() for n, x in given.items()}
    own |= {"a": -kk.to(own["a"].dtype), "b": (kk * 0.95).to(own["a"].dtype)}
    check({n: x.contiguous().requires_grad_() for n, x in own.items()}, gates=REPEATED)


@pytest.mark.parametrize("threads", [128, OF_GROUPS])
def test_results_repeat_bit_for_bit_and_whatever_is_around(op, threads):
    options = {**PINNED, "num_threads": threads}
    given = inputs(batch=20, tokens=150, heads=8)
    y, final, grads, weights = run(op, given, **options)
    again = run(op, given, None, weights, **options)
    few = {n: x[5:6].detach().requires_grad_() for n, x in given.items()}
    one = run(op, few, None, [weight[5:6] for weight in weights], **options)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], final)
    assert torch.equal(one[0], y[5:6])
    assert torch.equal(one[1], final[5:6])
    for first, second, alone in zip(grads, again[2], one[2], strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[5:6], alone)


# ---- segments side by side -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory", "short_segments")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 3072), (1, 3500)])
@pytest.mark.parametrize("sizes", [(256, 256), (200, 136), (136, 200), (129, 33)])
def test_few_heads_in_segments(op, sizes, batch, tokens, layout, problems):
    given = inputs(batch=batch, heads=1, tokens=tokens, head_size=sizes[0], value_size=sizes[1], decays=SLOW)
    check(given, comparing.make_state(given, batch, layout=layout), state_layout=layout, backend="auto")
    assert {made.backend for made in problems()} == {"large_segments"}


@pytest.mark.usefixtures("guarded_memory", "short_segments")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", [32, 64])
def test_segments_with_any_decay(op, chunk_len, dtype, problems):
    given = inputs(DTYPES[dtype], batch=1, heads=2, tokens=3072, decay="raw", decays=SLOW)
    w = given["w"].detach().clone()
    w[:, ::97, :, :70], w[:, 1000:1100] = 4.0, 2.0  # log-decays of -55 and -7
    given["w"] = w.requires_grad_()
    check(given, comparing.make_state(given, 1), decay="raw", chunk_len=chunk_len)
    assert {made.backend for made in problems()} == {"large_segments"}


def test_segments_of_a_graph_are_those_of_a_call(op, problems):
    given = inputs(batch=1, heads=1, tokens=32800, decays=SLOW)
    y, _, grads, weights = run(op, given, decay="sigmoid")
    compiled = torch.compile(rwkv_jit.wkv7, fullgraph=True)
    again = run(op, given, None, weights, compiled, decay="sigmoid")
    assert {made.backend for made in problems()} == {"large_segments"}
    for one, other in zip((y, *grads), (again[0], *again[2]), strict=True):
        assert torch.equal(one, other)


# ---- parts of a scan -----------------------------------------------------------------------------------------------


@pytest.fixture
def parts(nothing_known, monkeypatch):
    """Called for whether short sequences are scanned in parts as well; `taken` are the streams beside the others."""
    taken, side_stream = [], cuda.side_stream

    def in_parts(wanted):
        signatures.forget()
        monkeypatch.setattr(delta_large, "_LEAST_CHUNKS", 4 if wanted else 1 << 30)

    monkeypatch.setattr(cuda, "side_stream", lambda *given: taken.append(side_stream(*given)) or taken[-1])
    in_parts.taken = taken
    return in_parts


@needs_groups
@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    ("batch", "heads", "head_size"), [(1, 2, 256), (2, 6, 256), (3, 1, 320), (2, 1, 512), (1, 2, 1024)]
)
def test_parts_of_a_scan_change_nothing(op, batch, heads, head_size, parts):
    given = inputs(batch=batch, tokens=64 * 17 - 5, heads=heads, head_size=head_size)
    state = comparing.make_state(given, batch)
    parts(False)
    y, final, grads, weights = run(op, given, state, decay="sigmoid", backend="split")
    assert parts.taken == []
    parts(True)
    again = run(op, given, state, weights, decay="sigmoid", backend="split")
    assert len(parts.taken) == (1 if heads == 6 else 2)  # forwards blocks of few rows would fill the GPU
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], final)
    assert all(torch.equal(a, b) for a, b in zip(again[2], grads, strict=True))
    with torch.no_grad():
        results = rwkv_jit.wkv7(*given.values(), state, True, decay="sigmoid", backend="split")
        at_once = [x.clone() for x in results]  # what comes next on the stream finds them done
    assert torch.equal(at_once[0], y)
    assert torch.equal(at_once[1], final)


@needs_groups
def test_training_in_parts_in_a_cuda_graph_and_beside_it(op, parts):
    parts(True)
    given = inputs(batch=1, tokens=640)
    leaves, weight = list(given.values()), torch.randn_like(given["v"])

    def both():
        y, _ = rwkv_jit.wkv7(*leaves, decay="sigmoid", backend="split")
        return [y, *torch.autograd.grad(y, leaves, weight)]

    torch.cuda.synchronize()  # the inputs are there
    with torch.cuda.stream(torch.cuda.Stream()):
        wants = both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    for x in found:
        x.detach().fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(x, want) for x, want in zip(found, wants, strict=True))
    assert all(torch.equal(x, want) for x, want in zip(both(), wants, strict=True))


@needs_groups
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts_on_a_device_that_is_not_current(op, parts):
    parts(True)
    given = inputs(batch=1, tokens=640)
    elsewhere = {n: x.detach().to("cuda:1").requires_grad_() for n, x in given.items()}
    y, final, grads, weights = run(op, given, decay="sigmoid", backend="split")
    other = run(op, elsewhere, None, [weight.to("cuda:1") for weight in weights], decay="sigmoid", backend="split")
    assert torch.cuda.current_device() == 0
    for one, x in zip((y, final, *grads), (*other[:2], *other[2]), strict=True):
        assert torch.equal(x.to("cuda:0"), one)


@needs_groups
@pytest.mark.parametrize("streams", [1, 4])
def test_threads_scan_in_parts(op, streams, parts):
    parts(True)
    given = {n: x.detach() for n, x in inputs(batch=1, tokens=640).items()}
    want, _ = rwkv_jit.wkv7(*given.values(), decay="sigmoid", backend="split")
    torch.cuda.synchronize()
    taken, found = [torch.cuda.Stream() for _ in range(streams)], []

    def work(stream):
        with torch.cuda.stream(stream):
            for _ in range(20):
                found.append(rwkv_jit.wkv7(*given.values(), decay="sigmoid", backend="split")[0])
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(taken[i % streams],)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 80
    assert all(torch.equal(y, want) for y in found)
    assert len({side.raw for side in parts.taken}) == 1 + streams  # beside the first call's stream and those


def test_gradients_of_tensors_that_were_inferred_before(op):
    given = inputs(tokens=100)
    with torch.no_grad():
        rwkv_jit.wkv7(*given.values(), decay="sigmoid", backend="split", output_final_state=True)
    check(given)


@pytest.mark.parametrize("split", [1, 63, 64, 65])
def test_a_prompt_continues_from_its_state(op, split):
    given = inputs(tokens=130)
    exact = {n: x.detach().double() for n, x in given.items()}
    want, last = rwkv_jit.wkv7_ref(*exact.values(), output_final_state=True, decay="sigmoid")
    options = {"output_final_state": True, "decay": "sigmoid"}
    head, state = rwkv_jit.wkv7(*[x[:, :split] for x in given.values()], **options)
    tail, final = rwkv_jit.wkv7(*[x[:, split:] for x in given.values()], initial_state=state, **options)
    assert relative(torch.cat([head, tail], 1), want) < GATE
    assert relative(final, last) < GATE


def test_the_rule_picks_these_kernels(op, problems):
    given = inputs()
    for options in ({"decay": "sigmoid"}, {"decay": "raw", "decay_bound": -2.0}, {"decay_bound": -3.0}, {}):
        rwkv_jit.wkv7(*given.values(), **options)
    chosen = [(made.backend, made.chunk_len) for made in problems()]
    assert chosen == [("large", 64), ("large", 64), ("large", 32), ("large", 64)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(op, dynamic):
    comparing.check_fullgraph(op, inputs(), dynamic, decay="sigmoid")


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(op, packed):
    given = [x.detach() for x in inputs(batch=1, tokens=70).values()]
    bounds = torch.tensor([0, 3, 70], device="cuda") if packed else None  # every slot is written
    state = torch.randn(2 if packed else 1, 2, 256, 256, device="cuda")
    options = (1.0, "sigmoid", "vk", 64, 64, None, "large", None, None, False, False, True)
    forward = (*given, state, bounds, *options, True, True)
    torch.library.opcheck(torch.ops.rwkv_jit.wkv7_fwd.default, forward)
    y, final, saved = torch.ops.rwkv_jit.wkv7_fwd(*forward)
    torch.library.opcheck(torch.ops.rwkv_jit.wkv7_bwd.default, (*given, state, bounds, saved, y, final, *options))


def test_code_of_ampere(op, launched, monkeypatch):
    """The code that sm_80 gets, as PTX that the driver makes run here."""
    monkeypatch.setenv("RWKVJIT_ARCH", "compute_80")
    for head_size in (192, 256):
        check(inputs(tokens=70, head_size=head_size))
    assert {made.target for made in launched} == {"compute_80"}
