"""wkv5, wkv6, gla, linear_attention on the tensor cores against the float64 recurrence on the same rounded inputs."""

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.call import prepared, rule
from rwkv_jit.schedules import diagonal_chunked, diagonal_large

relative, run, FIXED, NAMES = comparing.relative, comparing.run, comparing.FIXED, comparing.NAMES

OPS = ("wkv5", "wkv6", "gla", "linear_attention")
WITH_DECAY = [op for op in OPS if "w" in NAMES[op]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GATE, GATES = 6e-3, {"dw": 8e-3}
PARTS_GATE = 5e-3  # of wkv5's dw, beside the size of its parts
SLOW = (-1e-2, -1e-4)  # log-decay per step
SCANNED = [(200, 136), (256, 512), (40, 300)]  # heads that no block holds


def inputs(op, dtype=torch.bfloat16, decay="sigmoid", **more):
    return comparing.make_inputs(op, dtype, decay=decay, **more)


def either(n):
    """One of the dtypes, so that tests of many sizes take each of them for half."""
    return list(DTYPES.values())[n % 2]


def of(op, options):
    """Those options that an op has."""
    return {n: x for n, x in options.items() if n not in ("decay", "decay_bound") or op in WITH_DECAY}


def backend_of(given):
    """What callers call the kernels for these sizes."""
    return "chunked" if max(given["r"].shape[3], given["v"].shape[3]) <= 128 else "split"


def check(op, given, state=None, gates=GATES, weights=None, **options):
    """Compare a call of these kernels; the reference needs to know only how to read the inputs."""
    options = of(op, {"decay": "sigmoid", "backend": backend_of(given), **options})
    exact = {n: x for n, x in options.items() if n in ("decay", "scale", "state_layout", "cu_seqlens")}
    cancels = op == "wkv5" and options["decay"] != "sigmoid"
    if cancels and weights is None:
        weights = comparing.run(op, given, state, **options)[3]
    errors, final, named = comparing.compare(op, given, state, options, exact, weights)
    if cancels:
        gates = {**gates, "dw": PARTS_GATE}
        errors["dw"] = comparing.error_of_constant_decay(named["dw"], given, state, weights, **exact)
    limits = comparing.limits_of(errors, final, named, given, GATE, gates)
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, (wrong, limits)


def make_state(op, given, sequences, dtype=torch.float32, layout=None):
    return comparing.make_state(given, sequences, dtype, layout or ("vk" if op.startswith("wkv") else "kv"))


# ---- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 31, 32, 64, 65, 200])
@pytest.mark.parametrize("chunk_len", diagonal_chunked.CHUNK_LENS)
@pytest.mark.parametrize("op", OPS)
def test_every_length(op, chunk_len, tokens):
    # Of a single token du has a factor dy . v, a number a head.
    given = inputs(op, either(tokens + chunk_len), tokens=tokens, heads=48 if tokens == 1 else 3)
    check(op, given, make_state(op, given, 2), chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [0, 1, 33, 64, 130])
@pytest.mark.parametrize("chunk_len", diagonal_large.CHUNK_LENS)
@pytest.mark.parametrize("op", OPS)
def test_every_length_of_large_heads(op, chunk_len, tokens):
    given = inputs(op, tokens=tokens, heads=2, head_size=136, value_size=200)
    check(op, given, make_state(op, given, 2), chunk_len=chunk_len)


@pytest.mark.parametrize("op", OPS)
def test_a_long_sequence(op):
    given = inputs(op, batch=1, heads=2, tokens=4096)
    check(op, given, make_state(op, given, 1))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [1, 7, 8, 16, 24, 32, 37, 40, 48, 64, 72, 96, 100, 128])
@pytest.mark.parametrize("op", OPS)
def test_every_head_size(op, head_size):
    heads = comparing.enough_heads(head_size)
    given = inputs(op, either(head_size // 8), tokens=70, heads=heads, head_size=head_size)
    # Sums over a single channel average nothing.
    names = ("y", "state", "dr", "dk", "dv", "dw", "du", "dinitial_state")
    check(op, given, make_state(op, given, 2), gates=dict.fromkeys(names, 5e-2) if head_size == 1 else GATES)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    "sizes", [(64, 128), (128, 64), (40, 24), (24, 40), (100, 37), (37, 100), (7, 128), (128, 33), (36, 64)]
)
@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("op", OPS)
def test_keys_and_values_of_different_size(op, chunk_len, sizes):
    heads = comparing.enough_heads(sizes[0])
    given = inputs(op, tokens=53, heads=heads, head_size=sizes[0], value_size=sizes[1])
    check(op, given, make_state(op, given, 2), chunk_len=chunk_len)


LARGE = [
    *SCANNED, (129, 64), (130, 5), (137, 145), (64, 136), (7, 129), (256, 256), (192, 192), (96, 1024), (264, 70),
    (512, 256), (1024, 100),
]  # fmt: skip


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(("sizes", "chunk_len"), [(sizes, n) for sizes in LARGE for n in (32, 64)])
@pytest.mark.parametrize("op", OPS)
def test_large_heads(op, sizes, chunk_len):
    """With mma.sync, there in parts where keys are longer than 256, and with products of warp groups."""
    heads = comparing.enough_heads(sizes[0])
    given = inputs(op, either(sum(sizes) // 8), tokens=90, heads=heads, head_size=sizes[0], value_size=sizes[1])
    check(op, given, make_state(op, given, 2), chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("sizes", [(64, 64), (40, 40), (128, 32)])
@pytest.mark.parametrize("op", OPS)
def test_smaller_heads_that_are_scanned(op, sizes, problems, monkeypatch):
    """As where a block has no room for them."""
    monkeypatch.setattr(diagonal_chunked, "why_not", lambda *_: ("has no room",))
    given = inputs(op, tokens=70, head_size=sizes[0], value_size=sizes[1])
    check(op, given, make_state(op, given, 2), backend="split")
    assert [made.backend for made in problems()] == ["large"]


LEGAL_THREADS = [
    (sizes, threads)
    for sizes in ((40, 40), (64, 64), (40, 100), (128, 128), (200, 300))
    for threads in (64, 96, 128, 160, 256, 384, 512)
    if threads >= diagonal_chunked._least_threads(*sizes)
]


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(("sizes", "num_threads"), LEGAL_THREADS)
@pytest.mark.parametrize("op", ["wkv6", "linear_attention"])
def test_every_number_of_threads_of_the_forward(op, sizes, num_threads):
    given = inputs(op, tokens=70, heads=2, head_size=sizes[0], value_size=sizes[1])
    check(op, given, num_threads=num_threads)


# ---- decays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 300)])
@pytest.mark.parametrize("kind", ["slow", "usual", "fastest"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", WITH_DECAY)
def test_every_sigmoid_decay(op, dtype, kind, sizes):
    more = {"tokens": 130, "heads": 2, "head_size": sizes[0], "value_size": sizes[1]}
    given = inputs(op, DTYPES[dtype], decays=SLOW if kind == "slow" else "usual", **more)
    if kind == "fastest":
        given["w"] = torch.full_like(given["w"], 8.0, requires_grad=True)
    check(op, given)


@pytest.mark.parametrize(("chunk_len", "bound"), [(64, -2.0), (32, -4.0), (16, -8.0)])
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", WITH_DECAY)
def test_every_bounded_decay(op, head_size, w_dtype, decay, chunk_len, bound):
    """Down to the bound; a little less, as bfloat16 would round some decays below it."""
    more = {"tokens": 130, "heads": 2, "head_size": head_size}
    given = inputs(op, decay=decay, decays=(0.98 * bound, -0.01), w_dtype=w_dtype, **more)
    check(op, given, decay=decay, decay_bound=bound, chunk_len=chunk_len)


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", WITH_DECAY)
def test_float32_decay_beside_half_inputs(op, dtype, head_size):
    given = inputs(op, DTYPES[dtype], w_dtype=torch.float32, head_size=head_size)
    check(op, given)
    y, _ = getattr(rwkv_jit, op)(*given.values(), decay="sigmoid", backend=backend_of(given))
    assert torch.autograd.grad(y.float().sum(), given["w"])[0].dtype == torch.float32


# ---- states, packing, strides ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("sizes", [(24, 40), (200, 136)])
@pytest.mark.parametrize("op", OPS)
def test_state_in_and_out(op, sizes, layout, state_dtype):
    given = inputs(op, head_size=sizes[0], value_size=sizes[1])
    check(op, given, make_state(op, given, 2, state_dtype, layout), state_layout=layout)


@pytest.mark.parametrize("op", OPS)
def test_state_shared_by_all_sequences(op):
    given = inputs(op, batch=3)
    check(op, given, torch.randn(3, 64, 64, device="cuda", requires_grad=True))


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_no_tokens_copy_the_state(op, head_size):
    given = inputs(op, tokens=0, head_size=head_size)
    state = make_state(op, given, 2)
    options = of(op, {"decay": "sigmoid", "backend": backend_of(given)})
    y, final, grads, weights = run(op, given, state, **options)
    assert y.numel() == 0
    assert torch.equal(final, state)
    assert torch.equal(grads[-1], weights[1])
    for name, grad in zip(given, grads, strict=False):
        assert not grad.any(), name  # of u and of a constant w too


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_gradient_of_the_final_state_alone(op, head_size):
    given = inputs(op, head_size=head_size)
    y, final = getattr(rwkv_jit, op)(*given.values(), output_final_state=True, **of(op, {"decay": "sigmoid"}))
    weights = torch.zeros_like(y), torch.randn_like(final)
    _, _, grads, _ = run(op, given, None, weights, **of(op, {"decay": "sigmoid", "backend": backend_of(given)}))
    _, _, wants, _ = comparing.reference(op, given, None, weights, **of(op, {"decay": "sigmoid"}))
    for name, grad, want in zip(given, grads, wants, strict=True):
        # Nothing of it goes to the receptance and the bonus.
        error = relative(grad, want) if want.norm() > 0 else float(grad.norm())
        assert error < GATES.get(f"d{name}", GATE), name


@pytest.mark.parametrize("chunk_len", diagonal_chunked.CHUNK_LENS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("head_size", [40, 160])
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_the_sequences_one_by_one(op, head_size, index_dtype, chunk_len):
    bounds = [0, 0, 5, 69, 70, 70, 102, 198, 200]
    given = inputs(op, batch=1, tokens=200, head_size=head_size)
    state = make_state(op, given, len(bounds) - 1)
    options = of(op, {"decay": "sigmoid", "backend": backend_of(given), "chunk_len": chunk_len})
    cu_seqlens = comparing.check_one_by_one(op, given, state, bounds, index_dtype, **options)
    check(op, given, state, cu_seqlens=cu_seqlens, chunk_len=chunk_len)


@pytest.mark.parametrize("how", [*comparing.STRIDES, "expanded"])
@pytest.mark.parametrize("head_size", [24, 36, 37, 160])
@pytest.mark.parametrize("op", OPS)
def test_inputs_of_any_stride(op, head_size, how):
    """Rows that are read 16 bytes, four elements and one element at a time."""
    given = inputs(op, heads=comparing.HEADS_OF_ONE_TOKEN, head_size=head_size)
    odd = {
        n: x.detach().t().contiguous().t() if x.dim() == 2 else comparing.strided(x, how) for n, x in given.items()
    }  # fmt: skip
    assert not any(x.is_contiguous() for x in odd.values())
    check(op, {n: x.requires_grad_() for n, x in odd.items()})


@pytest.mark.parametrize("sizes", [{"head_size": 64}, {"head_size": 160}, {"batch": 1, "tokens": 1024}])
@pytest.mark.parametrize("op", OPS)
def test_known_signature_at_an_address_the_kernel_cannot_read(op, sizes):
    given = {n: x.detach() for n, x in inputs(op, **sizes).items()}
    given = {n: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for n, x in given.items()}
    backend = "split" if "tokens" in sizes else "auto"
    function, options = getattr(rwkv_jit, op), of(op, {"decay": "sigmoid", "backend": backend})
    want, _ = function(*given.values(), **options)
    known = len(prepared.calls)
    for moved, x in given.items():
        for shift in (1, 4):
            memory = torch.empty(x.numel() + shift, dtype=x.dtype, device="cuda")
            shifted = memory.as_strided(x.shape, x.stride(), shift).copy_(x)
            y, _ = function(*{**given, moved: shifted}.values(), **options)
            assert torch.equal(y, want)
    assert len(prepared.calls) == known


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_an_expanded_output_gradient(op, head_size):
    given = inputs(op, head_size=head_size)
    ones = torch.ones(1, dtype=torch.bfloat16, device="cuda").expand_as(given["v"])
    check(op, given, weights=(ones, torch.zeros(2, 3, head_size, head_size, device="cuda")))


@pytest.mark.parametrize("scale", [0.37, -2.0])
@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_scale(op, head_size, scale):
    check(op, inputs(op, head_size=head_size), scale=scale)


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", ["wkv5", "wkv6"])
def test_scale_of_zero(op, head_size):
    given = inputs(op, head_size=head_size)
    options = {"decay": "sigmoid", "scale": 0.0, "backend": backend_of(given)}
    y, final, grads, weights = run(op, given, **options)
    assert not y.any()
    _, _, wants, _ = comparing.reference(op, given, None, weights, decay="sigmoid", scale=0.0)
    for name, grad, want in zip(given, grads, wants, strict=True):
        error = relative(grad, want) if want.norm() > 0 else float(grad.norm())
        assert error < GATES.get(f"d{name}", GATE), name


@pytest.mark.parametrize("names", ["r", "k", "v", "rkv"])
@pytest.mark.parametrize("op", OPS)
def test_zero_rows(op, names):
    given = inputs(op, tokens=100)
    zeroed = {n: x.detach().clone() for n, x in given.items()}
    for name in names:
        zeroed[name][:, 10:50] = 0
        zeroed[name][:, :, 1] = 0  # a whole head
    check(op, {n: x.requires_grad_() for n, x in zeroed.items()}, make_state(op, given, 2))


@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_any_size(op, head_size, size):
    given = inputs(op, tokens=100, head_size=head_size)
    weights = (
        (size * torch.randn(given["v"].shape, device="cuda")).to(torch.bfloat16),
        size * torch.randn(2, 3, head_size, head_size, device="cuda"),
    )
    check(op, given, make_state(op, given, 2), weights=weights)


# ---- linear attention with products of warp groups, where the GPU has them -------------------------------------------

LINEAR = "linear_attention"
GROUP_SIZES = [(128, 128), (72, 104), (96, 128), (128, 112)]


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [0, 1, 40, 63, 64, 65, 128, 200, 333])
@pytest.mark.parametrize("sizes", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_with_warp_groups(dtype, sizes, tokens):
    heads = 48 if tokens == 1 else 3  # of a single token y has a factor q . k, a number a head
    given = inputs(LINEAR, DTYPES[dtype], tokens=tokens, heads=heads, head_size=sizes[0], value_size=sizes[1])
    for layout in ("kv", "vk"):
        check(LINEAR, given, make_state(LINEAR, given, 2, layout=layout), state_layout=layout)
    if tokens:
        check(LINEAR, given)


@pytest.mark.parametrize("how", [*comparing.STRIDES, "expanded"])
def test_inputs_of_any_stride_with_warp_groups(how):
    given = inputs(LINEAR, tokens=130, head_size=128)
    odd = {n: comparing.strided(x, how).requires_grad_() for n, x in given.items()}
    check(LINEAR, odd)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", GROUP_SIZES)
def test_packed_sequences_with_warp_groups_are_the_sequences_one_by_one(sizes, dtype):
    bounds = [0, 0, 5, 69, 70, 70, 198, 327, 500]
    given = inputs(LINEAR, DTYPES[dtype], batch=1, tokens=500, head_size=sizes[0], value_size=sizes[1])
    state, cu_seqlens = make_state(LINEAR, given, len(bounds) - 1), torch.tensor(bounds, device="cuda")
    options = {"backend": "chunked", "chunk_len": 32}  # short sequences alone would take shorter chunks
    _, _, grads, weights = run(LINEAR, given, state, cu_seqlens=cu_seqlens, **options)
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = {n: x[:, begin:end].detach().requires_grad_() for n, x in given.items()}
        own_state = state[i : i + 1].detach().requires_grad_()
        own = run(LINEAR, part, own_state, (weights[0][:, begin:end], weights[1][i : i + 1]), **options)[2]
        assert torch.equal(own[-1], grads[-1][i : i + 1])
        for name, one, whole in zip(given, own, grads, strict=False):
            assert torch.equal(one, whole[:, begin:end]), name
    check(LINEAR, given, state, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("scale", [0.37, -2.0, 0.0])
def test_scale_with_warp_groups(scale):
    """Where it is zero, too, keys and values still have what comes from the final state."""
    given = inputs(LINEAR, tokens=130, head_size=128)
    state = make_state(LINEAR, given, 2)
    _, _, grads, weights = run(LINEAR, given, state, scale=scale, backend="chunked")
    wants = comparing.reference(LINEAR, given, state, weights, scale=scale)[2]
    for name, grad, want in zip([*given, "initial_state"], grads, wants, strict=True):
        assert (relative(grad, want) if want.norm() > 0 else float(grad.norm())) < GATE, name


def test_chunks_that_a_caller_chooses_are_those_of_both_directions():
    """The two backwards agree with each other as with the reference."""
    given = inputs(LINEAR, tokens=200, head_size=128)
    state = make_state(LINEAR, given, 2)
    for chunk_len in (16, 32):
        check(LINEAR, given, state, chunk_len=chunk_len)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_with_warp_groups(dtype):
    given = inputs(LINEAR, DTYPES[dtype], batch=1, tokens=1280, heads=2, head_size=128)
    check(LINEAR, given, make_state(LINEAR, given, 1), backend="split")


# ---- the normalizer of linear attention --------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize(("head_size", "value_size"), [(40, 24), (64, 64), (128, 128), (192, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["linear_attention"])
def test_normalized(op, dtype, head_size, value_size, layout):
    """Keys and queries are positive, as a feature map makes them: their products are then far from 0."""
    given = inputs(op, DTYPES[dtype], tokens=130, head_size=head_size, value_size=value_size)
    given = {n: (x if n == "v" else x.abs() + 0.1).detach().requires_grad_() for n, x in given.items()}
    state = make_state(op, given, 2, layout=layout)
    z = (torch.rand(2, 3, head_size, device="cuda") + 0.1).requires_grad_()

    def results(function, leaves, weights=None):
        *given, state, z = leaves
        y, (final, last) = function(*given, (state, z), True, state_layout=layout, normalize=True)
        outputs = (y, final, last)
        weights = weights or [torch.randn_like(x) for x in outputs]
        weighted = [w.to(x.dtype) for w, x in zip(weights, outputs, strict=True)]
        return [*outputs, *torch.autograd.grad(outputs, leaves, weighted)], weights

    leaves = [*given.values(), state, z]
    found, weights = results(rwkv_jit.linear_attention, leaves)
    exact, _ = results(rwkv_jit.linear_attention_ref, [x.detach().double().requires_grad_() for x in leaves], weights)
    names = ("y", "S", "z", "dq", "dk", "dv", "dS", "dz")
    errors = {n: relative(x, want) for n, x, want in zip(names, found, exact, strict=True)}
    assert all(error <= 2 * GATE for error in errors.values()), errors


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("sizes", [(40, 40), (192, 136)])
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
@pytest.mark.parametrize("kind", ["none", "usual", "fast", "mixed", *comparing.DECAY_PAIRS])
@pytest.mark.parametrize("op", WITH_DECAY)
def test_every_decay_without_a_bound(op, kind, decay, sizes):
    more = {"tokens": 130, "w_dtype": torch.float32, "head_size": sizes[0], "value_size": sizes[1]}
    given = inputs(op, decay=decay, decays=kind, **more)
    check(op, given, make_state(op, given, 2), decay=decay)


# ---- segments side by side -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize(
    "sizes", [(64, 64), (128, 128), (40, 40), (64, 32), (128, 64), (37, 50), (64, 96), (96, 96), (100, 56), (7, 128)]
)
@pytest.mark.parametrize("op", OPS)
def test_segments(op, sizes, layout):
    more = {"heads": comparing.enough_heads(sizes[0]), "head_size": sizes[0], "value_size": sizes[1], "decays": SLOW}
    given = inputs(op, either(sum(sizes) // 4), tokens=1024, **more)
    check(op, given, make_state(op, given, 2, layout=layout), backend="split", state_layout=layout, scale=0.7)


@pytest.mark.parametrize("tokens", [1024, 1280, 4352])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_segments_of_every_dtype(op, state_dtype, dtype, tokens):
    """Of 4, 5 and 17 segments: the kernel that joins them reads eight at once."""
    given = inputs(op, DTYPES[dtype], tokens=tokens, heads=2, w_dtype=torch.float32)
    check(op, given, make_state(op, given, 2, state_dtype), backend="split")


@pytest.mark.parametrize(
    ("head_size", "chunk_len", "bound"),
    [(64, 64, -2.0), (64, 32, -4.0), (64, 16, -8.0), (64, 32, -0.7), (128, 32, -4.0), (128, 16, -8.0)],
)
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", WITH_DECAY)
def test_segments_with_bounded_decays(op, head_size, w_dtype, decay, chunk_len, bound):
    """Down to the bound: what a segment leaves of a state may be less than a float has."""
    given = inputs(
        op, decay=decay, decays=(0.98 * bound, -1e-3), w_dtype=w_dtype, tokens=1024, heads=2, head_size=head_size
    )
    state = make_state(op, given, 2)
    check(op, given, state, backend="split", decay=decay, decay_bound=bound, chunk_len=chunk_len)


@pytest.mark.parametrize("op", WITH_DECAY)
def test_segments_with_the_fastest_sigmoid_decay(op):
    given = inputs(op, tokens=1024, heads=2)
    given["w"] = torch.full_like(given["w"], 8.0, requires_grad=True)
    check(op, given, make_state(op, given, 2), backend="split")


@pytest.mark.parametrize("op", OPS)
def test_few_heads_are_split_and_agree_with_the_whole(op, problems, launched):
    given, options = inputs(op, batch=1, tokens=4096, heads=2, decays=SLOW), of(op, {"decay": "sigmoid"})
    y, final, grads, weights = run(op, given, **options)
    assert [made.backend for made in problems()] == ["segments"]
    assert {made.name for made in launched} >= {"gla_segment", "gla_join", "gla_scan"}
    whole = run(op, given, None, weights, backend="chunked", **options)
    for one, other in zip((y, final, *grads), (*whole[:2], *whole[2]), strict=True):
        assert relative(one, other) < GATES["dw"]


@pytest.mark.usefixtures("guarded_memory", "short_segments")
@pytest.mark.parametrize(("batch", "tokens", "layout"), [(2, 3072, "vk"), (1, 3500, "kv")])
@pytest.mark.parametrize("sizes", [*SCANNED, (300, 1), (129, 33)])
@pytest.mark.parametrize("op", OPS)
def test_few_large_heads_in_segments(op, sizes, batch, tokens, layout, problems):
    given = inputs(op, batch=batch, heads=1, tokens=tokens, head_size=sizes[0], value_size=sizes[1], decays=SLOW)
    check(op, given, make_state(op, given, batch, layout=layout), state_layout=layout, backend="auto")
    assert {made.backend for made in problems()} == {"large_segments"}


@pytest.mark.usefixtures("guarded_memory", "short_segments")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", diagonal_large.CHUNK_LENS)
@pytest.mark.parametrize("op", ["wkv6", "gla"])
def test_segments_of_large_heads_with_any_decay(op, chunk_len, dtype, problems):
    sizes = {"batch": 1, "heads": 2, "tokens": 3072, "head_size": 200, "value_size": 136}
    given = inputs(op, DTYPES[dtype], "log", **sizes, decays=SLOW)
    w = given["w"].detach().clone()
    w[:, ::97, :, :70], w[:, 1000:1100] = -55.0, -7.0
    given["w"] = w.requires_grad_()
    check(op, given, make_state(op, given, 1), decay="log", chunk_len=chunk_len)
    assert {made.backend for made in problems()} == {"large_segments"}


@pytest.mark.parametrize("op", ["wkv6", "linear_attention"])
def test_segments_of_large_heads_in_a_graph_are_those_of_a_call(op, problems):
    given = inputs(op, batch=1, heads=1, tokens=32800, head_size=200, value_size=136, decays=SLOW)
    options = of(op, {"decay": "sigmoid"})
    y, _, grads, weights = run(op, given, **options)
    again = run(op, given, None, weights, torch.compile(getattr(rwkv_jit, op), fullgraph=True), **options)
    assert {made.backend for made in problems()} == {"large_segments"}
    for one, other in zip((y, *grads), (again[0], *again[2]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", [*comparing.STRIDES, "expanded"])
@pytest.mark.parametrize("head_size", [24, 36, 37])
@pytest.mark.parametrize("op", OPS)
def test_segments_of_inputs_of_any_stride(op, head_size, how):
    given = inputs(op, tokens=1024, heads=comparing.HEADS_OF_ONE_TOKEN, head_size=head_size)
    odd = {
        n: torch.cat([x.detach(), x.detach()], 1)[:, :head_size] if x.dim() == 2 else comparing.strided(x, how)
        for n, x in given.items()
    }
    check(op, {n: x.requires_grad_() for n, x in odd.items()}, backend="split")


@pytest.mark.parametrize("op", OPS)
def test_segments_of_inputs_with_memory_between_sequences(op):
    given = inputs(op, tokens=1024, heads=2)
    apart = {n: x if x.dim() == 2 else torch.cat([x.detach()] * 2, 1)[:, :1024] for n, x in given.items()}
    check(op, {n: x.detach().requires_grad_() for n, x in apart.items()}, backend="split")


@pytest.mark.parametrize("decay", ["sigmoid", "raw"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("op", OPS)
def test_segments_repeat_bit_for_bit(op, head_size, decay):
    given = inputs(op, tokens=2048, heads=4, head_size=head_size, decay="raw", decays=(-20.0, 0.0))
    comparing.check_repeats(op, given, **of(op, {"decay": decay, "backend": "split"}))


@pytest.mark.parametrize("op", OPS)
def test_the_batch_around_a_sequence_in_segments_changes_nothing(op):
    given, options = inputs(op, batch=5, tokens=1024, heads=2), of(op, {"decay": "sigmoid", "backend": "split"})
    many = run(op, given, **options)
    one_given = {n: x.detach().requires_grad_() for n, x in comparing.of_tokens(op, given, slice(3, 4)).items()}
    one = run(op, one_given, None, [weight[3:4] for weight in many[3]], **options)
    assert torch.equal(many[0][3:4], one[0])
    assert torch.equal(many[1][3:4], one[1])
    for name, few, all_of_them in zip(given, one[2], many[2], strict=True):
        assert name in FIXED.get(op, "") or torch.equal(all_of_them[3:4], few), name


# ---- the same results, and how it is called --------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["sigmoid", "raw"])
@pytest.mark.parametrize("head_size", [64, 128, 160])
@pytest.mark.parametrize("op", OPS)
def test_results_repeat_bit_for_bit(op, head_size, decay):
    given = inputs(op, batch=4, tokens=300, heads=4, head_size=head_size, decay="raw", decays=(-20.0, 0.0))
    comparing.check_repeats(op, given, **of(op, {"decay": decay, "backend": backend_of(given)}))


@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_the_batch_around_a_sequence_changes_nothing(op, head_size):
    given = inputs(op, batch=16, tokens=40, heads=4, head_size=head_size)
    options = of(op, {"decay": "sigmoid"})
    many = run(op, given, **options)
    few_given = {n: x.detach().requires_grad_() for n, x in comparing.of_tokens(op, given, slice(5, 6)).items()}
    few = run(op, few_given, None, [weight[5:6] for weight in many[3]], **options)
    assert torch.equal(many[0][5:6], few[0])
    for name, one, all_of_them in zip(given, few[2], many[2], strict=True):
        assert name in FIXED.get(op, "") or torch.equal(all_of_them[5:6], one), name


@pytest.mark.parametrize("split", [1, 15, 16, 31, 32, 33, 64, 77, 99])
@pytest.mark.parametrize("op", OPS)
def test_a_prompt_continues_from_its_state(op, split):
    """Short parts take the recurrent kernels; the whole stays as exact as one call."""
    given = inputs(op, tokens=100)
    exact = {n: x.detach().double() for n, x in given.items()}
    map_of_w, function = of(op, {"decay": "sigmoid"}), getattr(rwkv_jit, op)
    want, last = getattr(rwkv_jit, f"{op}_ref")(*exact.values(), output_final_state=True, **map_of_w)
    for backend in ("auto", "chunked"):
        options = {"output_final_state": True, "backend": backend, **map_of_w}
        parts = [comparing.of_tokens(op, given, (slice(None), each)) for each in (slice(split), slice(split, None))]
        head, state = function(*parts[0].values(), **options)
        tail, final = function(*parts[1].values(), initial_state=state, **options)
        assert relative(torch.cat([head, tail], 1), want) < GATE
        assert relative(final, last) < GATE


@pytest.mark.parametrize("op", OPS)
def test_the_rule_picks_these_kernels(op, problems):
    function, options = getattr(rwkv_jit, op), of(op, {"decay": "sigmoid"})
    short = [{"tokens": tokens} for tokens in (rule.LEAST_TOKENS - 1, rule.LEAST_TOKENS)]
    for more in ({}, {"head_size": 160}, {"head_size": 1032, "heads": 1}, *short):
        function(*inputs(op, **more).values(), **options)
    function(*inputs(op).values(), chunk_len=8, **options)
    backends = ["chunked", "large", "recurrent", "recurrent", "chunked", "recurrent"]
    assert [made.backend for made in problems()] == backends


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [40, 64, 128, 192])
@pytest.mark.parametrize("op", OPS)
def test_short_sequences(op, head_size):
    """As the rule has them: alone and packed, by one chunk that they fill or not."""
    for tokens in (rule.LEAST_TOKENS, 7, 16, 17, 31):
        given = inputs(op, either(tokens // 2), tokens=tokens, head_size=head_size, batch=5)
        check(op, given, make_state(op, given, 5), backend="auto")
    lengths = torch.tensor([0, 4, 20, 20, 23, 39, 48], device="cuda")
    given = inputs(op, batch=1, tokens=48, head_size=head_size)
    check(op, given, make_state(op, given, 6), backend="auto", cu_seqlens=lengths)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_fullgraph_compile(op, head_size, dynamic):
    comparing.check_fullgraph(op, inputs(op, head_size=head_size), dynamic, **of(op, {"decay": "sigmoid"}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("backend", "head_size", "chunk_len"), [("chunked", 40, 32), ("large", 160, 32), ("large", 160, 64)]
)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, backend, head_size, chunk_len, packed):
    given = [x.detach() for x in inputs(op, batch=1, tokens=70, head_size=head_size).values()]
    bounds = torch.tensor([0, 3, 70], device="cuda") if packed else None  # every slot is written
    state = torch.randn(2 if packed else 1, 3, head_size, head_size, device="cuda")
    decay = "sigmoid" if op in WITH_DECAY else "none"
    options = (1.0, decay, "vk", 64, chunk_len, None, backend, None, None, False, False, True)
    forward = (*given, state, bounds, *options, True, True)
    torch.library.opcheck(getattr(torch.ops.rwkv_jit, f"{op}_fwd").default, forward)
    y, final, saved = getattr(torch.ops.rwkv_jit, f"{op}_fwd")(*forward)
    backward = (*given, state, bounds, saved, y, final, *options)
    torch.library.opcheck(getattr(torch.ops.rwkv_jit, f"{op}_bwd").default, backward)


@pytest.mark.parametrize("arch", ["compute_80"])
@pytest.mark.parametrize("op", OPS)
def test_other_architectures(op, arch, launched, monkeypatch):
    """The code that sm_80 gets, as PTX that the driver makes run here."""
    monkeypatch.setenv("RWKVJIT_ARCH", arch)
    for head_size in (40, 128, 256):
        check(op, inputs(op, tokens=70, head_size=head_size))
    assert {made.target for made in launched} == {arch}
    assert {made.name for made in launched} >= {"gla_scan", "gla_chunked_backward", "gla_key_gradients"}


MEMORY = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


@pytest.mark.skipif(MEMORY < 100 * 2**30, reason="needs 100 GB of GPU memory")
@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("op", OPS)
def test_more_than_two_billion_elements(op):
    batch, first = 132, inputs(op, batch=1, tokens=4096, heads=64)
    assert batch * first["v"].numel() > 2**31
    options = of(op, {"decay": "sigmoid", "backend": "chunked"})
    comparing.check_rows(op, first, batch, (0, 65, batch - 1), **options)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("head_size", [64, 160])
@pytest.mark.parametrize("op", OPS)
def test_tensors_of_a_device_that_is_not_current(op, head_size):
    given = inputs(op, decay="raw", head_size=head_size)
    elsewhere = {n: x.detach().to("cuda:1").requires_grad_() for n, x in given.items()}
    options = of(op, {"decay": "raw"})
    for _ in range(2):  # prepared, then known
        y, final, grads, weights = run(op, given, **options)
        other = run(op, elsewhere, None, [weight.to("cuda:1") for weight in weights], **options)
        assert torch.cuda.current_device() == 0
        for one, x in zip((y, final, *grads), (*other[:2], *other[2]), strict=True):
            assert x.device == torch.device("cuda:1")
            assert torch.equal(x.to("cuda:0"), one)
