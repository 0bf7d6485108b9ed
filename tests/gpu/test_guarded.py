"""wkv7 without a promise about its decays: fast where they are usual, exact where they are not."""

from functools import partial

import comparing
import pytest
import torch
from comparing import BOUND, GATE, PLACES, STRONG, STRONG_HEADS, USUAL, places, relative, run

import rwkv_jit

# A parameter, so that the record counts these tests.
pytestmark = pytest.mark.parametrize("op", ["wkv7"])

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_SIZES = [40, 64, 128, 192, 256]
results = partial(comparing.results, "wkv7")
check_heads = partial(comparing.check_heads, "wkv7", walked=False, gates={"da": 8e-3, "db": 8e-3})


def inputs(dtype="bf16", decay="raw", batch=2, tokens=130, heads=3, head_size=64, **more):
    return comparing.make_inputs(
        "wkv7", DTYPES[dtype], batch, tokens, heads, head_size, decays=USUAL, decay=decay, **more
    )


def strengthen(given, places, strong):
    """Set w at some (row, tokens, head), a different strong value at each.

    Where nothing outlives its token, all that is left of the initial state's gradient is (r . b) dy a^T of the first
    one. As r . b may cancel, and lose what digits it likes, r gets as much of b there as it has of itself.
    """
    w, r = given["w"].detach().clone(), given["r"].detach().clone()
    for index, (row, tokens, head) in enumerate(places):
        w[row, tokens, head] = strong[index % len(strong)]
        if isinstance(tokens, slice):
            first = r[row, tokens.start or 0, head]
            first += first.norm() * torch.nn.functional.normalize(
                given["b"].detach()[row, tokens.start or 0, head], dim=0
            )
    return given | {"w": w.requires_grad_(), "r": r.requires_grad_()}


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("decay", STRONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_usual_decays_leave_nothing_to_do(op, dtype, decay, head_size, seen_flags):
    given = inputs(dtype, decay, head_size=head_size)
    state = comparing.make_state(given, 2)
    found, want, _ = results(given, state, decay=decay)
    check_heads(found, want, 2, 3, ())
    (flags,) = seen_flags
    assert flags.shape == (2, 3)
    assert not flags.any()


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("decay", STRONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_with_strong_decays_are_exact(op, dtype, decay, head_size, seen_flags):
    given = strengthen(inputs(dtype, decay, head_size=head_size), PLACES, STRONG[decay])
    found, want, _ = results(given, comparing.make_state(given, 2), decay=decay)
    check_heads(found, want, 2, 3, STRONG_HEADS)
    assert {(row, head) for row, head in seen_flags[0].nonzero().tolist()} == STRONG_HEADS


@pytest.mark.parametrize("head_size", [33, 64, 70, 192])
def test_one_channel_of_one_token_is_enough(op, head_size, seen_flags):
    for channel in (0, 1, head_size - 2, head_size - 1):
        given = inputs(head_size=head_size)
        w = given["w"].detach().clone()
        w[1, 100, 2, channel] = 9.0
        given |= {"w": w.requires_grad_()}
        found, want, _ = results(given, None)
        check_heads(found, want, 2, 3, {(1, 2)})
        assert seen_flags[-1].nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("chunk_len", [16, 32])
def test_limit_is_that_of_half_a_chunk(op, chunk_len, seen_flags):
    half = chunk_len // 2
    for step, leaves in ((63.0 / half, False), (65.0 / half, True)):
        given = inputs(decay="log", dtype="fp16", w_dtype=torch.float32)
        w = given["w"].detach().clone()
        w[0, 2 * half : 3 * half, 1] = -step
        given |= {"w": w.requires_grad_()}
        found, want, _ = results(given, None, decay="log", backend="chunked", chunk_len=chunk_len)
        check_heads(found, want, 2, 3, {(0, 1)} if leaves else ())
        assert bool(seen_flags[-1].any()) == leaves


@pytest.mark.parametrize("head_size", [64, 192])
def test_growth_does_not_hide_decay(op, head_size, seen_flags):
    given = inputs(decay="log", tokens=64, head_size=head_size, w_dtype=torch.float32)
    w = given["w"].detach().clone()
    w[0, 4:8, 1] = torch.tensor([50.0, -60.0, 50.0, -60.0], device="cuda")[:, None]
    rwkv_jit.wkv7(*(given | {"w": w}).values(), decay="log")
    assert seen_flags[-1].nonzero().tolist() == [[0, 1]]


def check_kinds(found, exact, fast, strong):
    """Heads with strong decays are bit for bit those of `exact`, the others those of `fast`: all that `run` returns."""
    different = []
    of_all = zip(*([y, final, *grads] for y, final, grads, _ in (found, exact, fast)), strict=True)
    for index, each in enumerate(of_all):
        # Heads first: states [N, H, ..] are the second result and the last gradient, all others are [B, T, H, ..].
        is_state = index in (1, len(found[2]) + 1)
        x, of_exact, of_fast = each if is_state else (one.transpose(1, 2) for one in each)
        if not torch.equal(x[strong], of_exact[strong]) or not torch.equal(x[~strong], of_fast[~strong]):
            different.append(index)
    assert not different


@pytest.mark.parametrize(("layout", "state_dtype"), [("vk", torch.float32), ("kv", torch.bfloat16)])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_those_of_the_recurrent_kernels_or_of_a_call_with_a_bound(
    op, dtype, head_size, layout, state_dtype, seen_flags
):
    usual = inputs(dtype, head_size=head_size)
    state = comparing.make_state(usual, 2, state_dtype, layout)
    options = {"state_layout": layout, "scale": 0.7}
    fast = run(op, usual, state, decay_bound=BOUND, **options)
    for given, heads in ((usual, ()), (strengthen(usual, PLACES, STRONG["raw"]), STRONG_HEADS)):
        exact = run(op, given, state, fast[3], backend="recurrent", **options)
        check_kinds(run(op, given, state, fast[3], **options), exact, fast, places(heads))
        assert torch.equal(seen_flags[-1] != 0, places(heads))


@pytest.mark.parametrize("head_size", [64, 192])
def test_heads_of_packed_sequences_are_of_either_kind(op, head_size, seen_flags):
    bounds = [0, 0, 70, 134, 135, 135, 300, 300]
    usual = inputs(batch=1, tokens=300, head_size=head_size)
    given = strengthen(usual, [(0, 69, 0), (0, 70, 1), (0, 134, 2), (0, slice(135, 300), 0)], STRONG["raw"])
    strong = places({(1, 0), (2, 1), (3, 2), (5, 0)}, len(bounds) - 1)
    state = comparing.make_state(given, len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, device="cuda")
    fast = run(op, usual, state, decay_bound=BOUND, cu_seqlens=cu_seqlens)
    exact = run(op, given, state, fast[3], backend="recurrent", cu_seqlens=cu_seqlens)
    found = run(op, given, state, fast[3], cu_seqlens=cu_seqlens)
    assert torch.equal(seen_flags[-1] != 0, strong)
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        parts = [
            (y[:, begin:end], final[i : i + 1], [*(x[:, begin:end] for x in grads[:-1]), grads[-1][i : i + 1]], None)
            for y, final, grads, _ in (found, exact, fast)
        ]
        check_kinds(*parts, strong[i : i + 1])


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_heads_cut_into_segments_are_of_either_kind(op, head_size, layout, seen_flags):
    usual = inputs(tokens=2048, batch=1, head_size=head_size)
    given = strengthen(usual, [(0, 511, 0), (0, 1024, 1)], STRONG["raw"])
    state = comparing.make_state(given, 1, layout=layout)
    fast = run(op, usual, state, decay_bound=BOUND, backend="split", state_layout=layout)
    exact = run(op, given, state, fast[3], backend="recurrent", state_layout=layout)
    found = run(op, given, state, fast[3], backend="split", state_layout=layout)
    check_kinds(found, exact, fast, places({(0, 0), (0, 1)}, 1))
    assert torch.equal(seen_flags[-1] != 0, places({(0, 0), (0, 1)}, 1))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [40, 192])
def test_states_of_every_kind(op, head_size, state_dtype, layout):
    given = strengthen(inputs(head_size=head_size, value_size=head_size + 8), PLACES, STRONG["raw"])
    state = comparing.make_state(given, 2, state_dtype, layout)
    found, want, _ = results(given, state, state_layout=layout, scale=0.7)
    names = {name: x for name, x in found.items() if not (state_dtype != torch.float32 and "state" in name)}
    check_heads(names, want, 2, 3, STRONG_HEADS)
    for name in found.keys() - names.keys():
        assert relative(found[name], want[name]) < GATE


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("head_size", [64, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences_are_the_sequences_one_by_one(op, dtype, head_size, index_dtype):
    bounds = [0, 0, 70, 134, 135, 135, 300, 300]
    given = inputs(dtype, batch=1, tokens=300, head_size=head_size)
    # The last token of one sequence, the first of the next, one that is alone.
    given = strengthen(given, [(0, 69, 0), (0, 70, 1), (0, 134, 2), (0, slice(135, 300), 0)], STRONG["raw"])
    strong = {(1, 0), (2, 1), (3, 2), (5, 0)}
    state = comparing.make_state(given, len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, device="cuda", dtype=index_dtype)
    found, want, _ = results(given, state, cu_seqlens=cu_seqlens)
    of_states = {name for name in found if name in ("state", "dinitial_state")}
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        parts = [
            {n: x[i : i + 1] if n in of_states else x[:, begin:end] for n, x in every.items()}
            for every in (found, want)
        ]
        # Of a single token the roundings of one vector are the whole error.
        one_token = end - begin <= 1
        if one_token:
            for name in of_states:
                assert relative(parts[0][name], parts[1][name]) < GATE
        else:
            check_heads(*parts, 1, 3, {(0, head) for sequence, head in strong if sequence == i})


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_segments(op, head_size, layout, problems):
    given = inputs(tokens=2048, batch=1, head_size=head_size)
    places = [(0, 511, 0), (0, 1024, 1)]
    given = strengthen(given, places, STRONG["raw"])
    state = comparing.make_state(given, 1, layout=layout)
    found, want, _ = results(given, state, state_layout=layout)
    check_heads(found, want, 1, 3, {(0, 0), (0, 1)})
    assert [(made.backend, made.has_fallback) for made in problems()] == [("segments", True)]


def test_no_tokens_copy_the_state(op):
    for head_size, backend in ((64, "chunked"), (192, "split")):
        given = inputs(tokens=0, head_size=head_size)
        state = comparing.make_state(given, 2)
        y, final, grads, weights = run(op, given, state, backend=backend)
        assert y.numel() == 0
        assert torch.equal(final, state)
        assert torch.equal(grads[-1], weights[1])


@pytest.mark.parametrize("how", comparing.STRIDES)
@pytest.mark.parametrize("head_size", [64, 36, 35, 192])
def test_decays_of_any_stride(op, head_size, how):
    given = strengthen(inputs(head_size=head_size), PLACES, STRONG["raw"])
    odd = {n: comparing.strided(x, how).requires_grad_() for n, x in given.items()}
    found, want, _ = results(odd, None)
    check_heads(found, want, 2, 3, STRONG_HEADS)


@pytest.mark.parametrize("head_size", [64, 192])
def test_without_gradients(op, head_size):
    given = strengthen(inputs(head_size=head_size), PLACES, STRONG["raw"])
    with torch.no_grad():
        y, final = rwkv_jit.wkv7(*given.values(), output_final_state=True)
        want_y, want_final = rwkv_jit.wkv7_ref(*[x.double() for x in given.values()], output_final_state=True)
    check_heads({"y": y, "state": final}, {"y": want_y, "state": want_final}, 2, 3, STRONG_HEADS)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_results_repeat_bit_for_bit(op, head_size):
    given = strengthen(inputs(tokens=300, batch=4, head_size=head_size), PLACES, STRONG["raw"])
    state = comparing.make_state(given, 4)
    y, final, grads, weights = run(op, given, state)
    again = run(op, given, state, weights)
    for one, other in zip((y, final, *grads), (*again[:2], *again[2]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("head_size", [64, 192])
def test_a_cuda_graph_replays(op, head_size):
    """With other decays than it was captured with: which heads leave is found on the device."""
    given = {n: x.detach() for n, x in inputs(head_size=head_size).items()}
    strong = strengthen(given, PLACES, STRONG["raw"])["w"].detach()
    usual = given["w"].clone()
    wants = [rwkv_jit.wkv7(*(given | {"w": w}).values())[0] for w in (strong, usual)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = rwkv_jit.wkv7(*given.values())
    for w, want in zip((strong, usual), wants, strict=True):
        given["w"].copy_(w)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("head_size", [64, 192])
def test_fullgraph_compile(op, head_size, dynamic):
    given = strengthen(inputs(head_size=head_size), PLACES, STRONG["raw"])
    y, final, grads, weights = run(op, given)
    compiled = torch.compile(rwkv_jit.wkv7, fullgraph=True, dynamic=dynamic)
    again = run(op, given, None, weights, compiled)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], final)
    assert all(torch.equal(a, b) for a, b in zip(again[2], grads, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("tokens", "head_size"), [(70, 64), (2048, 64), (70, 192)])
def test_tensors_of_a_device_that_is_not_current(op, tokens, head_size):
    given = inputs(tokens=tokens, batch=1, head_size=head_size)
    given = strengthen(given, [(0, 50, 1)], STRONG["raw"])
    elsewhere = {n: x.detach().to("cuda:1").requires_grad_() for n, x in given.items()}
    for _ in range(2):  # prepared, then known
        y, final, grads, weights = run(op, given)
        other = run(op, elsewhere, None, [weight.to("cuda:1") for weight in weights])
        assert torch.cuda.current_device() == 0
        for one, x in zip((y, final, *grads), (*other[:2], *other[2]), strict=True):
            assert x.device == torch.device("cuda:1")
            assert torch.equal(x.to("cuda:0"), one)
