"""wkv7 on the tensor cores against the float64 recurrence on the same rounded inputs, values and gradients."""

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.call import prepared, rule, tensors

make_inputs, relative, run = comparing.make_inputs, comparing.relative, comparing.run

# A parameter, so that the record counts these tests.
pytestmark = pytest.mark.parametrize("op", ["wkv7"])

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GATE = 6e-3
ALL = ("y", "state", "dr", "dw", "dk", "dv", "da", "db", "dinitial_state")
GATES = {"da": 8e-3, "db": 8e-3}
CORRELATED = {"da": 2.5e-2, "db": 2.5e-2}
REPEATED = {"da": 3e-2, "db": 3e-2}
SLOW = (-1e-2, -1e-4)  # log-decay per step
BOUNDED = {"decay": "raw", "decay_bound": -1.0}


def inputs(dtype=torch.bfloat16, decay="sigmoid", **more):
    return make_inputs("wkv7", dtype, decay=decay, **more)


def check(given, state=None, gates=GATES, weights=None, **options):
    """Compare a call of the chunked kernels; the reference needs to know only how to read the inputs."""
    options = {"decay": "sigmoid", "backend": "chunked", **options}
    exact = {n: x for n, x in options.items() if n in ("decay", "scale", "state_layout", "cu_seqlens")}
    errors, final, named = comparing.compare("wkv7", given, state, options, exact, weights)
    limits = comparing.limits_of(errors, final, named, given, GATE, gates)
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, (wrong, limits)


# ---- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 31, 32, 33, 63, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", [16, 32])
def test_every_length(op, chunk_len, dtype, tokens):
    given = inputs(DTYPES[dtype], tokens=tokens)
    check(given, comparing.make_state(given, 2), chunk_len=chunk_len)


def test_a_long_sequence(op):
    given = inputs(batch=1, heads=2, tokens=4096)
    check(given, comparing.make_state(given, 1))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decays", [SLOW, "mixed"], ids=["slow", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("tokens", [2, 4, 16, 17, 32, 33, "packed"])
def test_short_sequences_without_states(op, tokens, chunk_len, dtype, decays):
    lengths = [1, 16, 17, 0, 40, 3, 30]
    sizes = {"batch": 1, "tokens": sum(lengths)} if tokens == "packed" else {"batch": 5, "tokens": tokens}
    given = inputs(DTYPES[dtype], "raw", **sizes, decays=decays)
    options = {"decay": "raw"}
    if tokens == "packed":
        options["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    how = {**options, "backend": "chunked", "chunk_len": chunk_len}
    check(given, **how)  # with a final state and its gradient
    y, none = rwkv_jit.wkv7(*given.values(), **how)
    weight = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(given.values()), weight)
    with torch.no_grad():
        again, final = rwkv_jit.wkv7(*given.values(), output_final_state=True, **how)
    assert none is None
    want = comparing.reference("wkv7", given, None, (weight, torch.zeros_like(final)), **options)
    named = {f"d{name}": grad for name, grad in zip(given, grads, strict=True)}
    limits = comparing.limits_of({"y": 0, "state": 0, **named}, final, named, given, GATE, GATES)
    for name, x, exact in zip(limits, (y, final, *grads), (want[0], want[1], *want[2]), strict=True):
        assert relative(x, exact) <= limits[name], name
    assert relative(again, want[0]) <= limits["y"]


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [1, 7, 8, 24, 32, 37, 40, 48, 64, 72, 96, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_size(op, dtype, head_size):
    given = inputs(DTYPES[dtype], tokens=70, heads=comparing.enough_heads(head_size), head_size=head_size)
    # Sums over a single channel average nothing.
    check(given, comparing.make_state(given, 2), gates=dict.fromkeys(ALL, 5e-2) if head_size == 1 else GATES)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    "sizes", [(64, 128), (128, 64), (40, 24), (24, 40), (100, 37), (37, 100), (7, 128), (128, 33), (36, 64)]
)
@pytest.mark.parametrize("chunk_len", [16, 32])
def test_keys_and_values_of_different_size(op, chunk_len, sizes):
    given = inputs(tokens=53, head_size=sizes[0], value_size=sizes[1])
    check(given, comparing.make_state(given, 2), chunk_len=chunk_len)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("num_threads", [64, 96, 128, 160, 256, 512])
@pytest.mark.parametrize("head_size", [40, 64])
def test_every_number_of_threads_of_the_forward(op, head_size, num_threads):
    check(inputs(tokens=70, head_size=head_size), num_threads=num_threads)


# ---- decays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slow", "usual", "fastest"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sigmoid_decay(op, dtype, kind):
    given = inputs(DTYPES[dtype], tokens=130, decays=SLOW if kind == "slow" else "usual")
    if kind == "fastest":
        given["w"] = torch.full_like(given["w"], 8.0, requires_grad=True)
    check(given)


@pytest.mark.parametrize(("chunk_len", "bound"), [(32, -4.0), (16, -8.0)])
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
def test_every_bounded_decay(op, w_dtype, decay, chunk_len, bound):
    """Down to the bound; a little less, as bfloat16 would round some decays below it."""
    given = inputs(tokens=130, decay=decay, decays=(0.98 * bound, -0.01), w_dtype=w_dtype)
    check(given, decay=decay, decay_bound=bound, chunk_len=chunk_len)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_decay_beside_half_inputs(op, dtype):
    given = inputs(DTYPES[dtype], w_dtype=torch.float32)
    check(given)
    y, _ = rwkv_jit.wkv7(*given.values(), decay="sigmoid", backend="chunked")
    assert torch.autograd.grad(y.float().sum(), given["w"])[0].dtype == torch.float32


# ---- states, packing, strides ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_in_and_out(op, dtype, layout, state_dtype):
    given = inputs(DTYPES[dtype], head_size=24, value_size=40)
    check(given, comparing.make_state(given, 2, state_dtype, layout), state_layout=layout)


def test_state_shared_by_all_sequences(op):
    given = inputs(batch=3)
    state = torch.randn(3, 64, 64, device="cuda", requires_grad=True)
    check(given, state)


def test_no_tokens_copy_the_state(op):
    given = inputs(tokens=0)
    state = comparing.make_state(given, 2)
    y, final, grads, weights = run(op, given, state, decay="sigmoid", backend="chunked")
    assert y.numel() == 0
    assert torch.equal(final, state)
    assert torch.equal(grads[-1], weights[1])


def test_gradient_of_the_final_state_alone(op):
    given = inputs()
    zeros = torch.zeros_like(given["v"])
    weight = torch.randn(2, 3, 64, 64, device="cuda")
    check(given, weights=(zeros, weight))


@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_the_sequences_one_by_one(op, index_dtype, chunk_len):
    bounds = [0, 0, 5, 69, 70, 70, 102, 198, 200]
    given = inputs(batch=1, tokens=200, head_size=40)
    state = comparing.make_state(given, len(bounds) - 1)
    options = {"decay": "sigmoid", "backend": "chunked", "chunk_len": chunk_len}
    cu_seqlens = comparing.check_one_by_one(op, given, state, bounds, index_dtype, **options)
    check(given, state, cu_seqlens=cu_seqlens, chunk_len=chunk_len)


@pytest.mark.parametrize("how", [*comparing.STRIDES, "expanded"])
@pytest.mark.parametrize("head_size", [24, 36, 37])
def test_inputs_of_any_stride(op, head_size, how):
    """Rows that are read 16 bytes, four elements and one element at a time."""
    given = inputs(heads=comparing.HEADS_OF_ONE_TOKEN, head_size=head_size)
    odd = {n: comparing.strided(x, how) for n, x in given.items()}
    assert not any(x.is_contiguous() for x in odd.values())
    # An expanded tensor has the same keys everywhere.
    check({n: x.requires_grad_() for n, x in odd.items()}, gates=CORRELATED if how == "expanded" else GATES)


@pytest.mark.parametrize(("backend", "sizes"), [("chunked", {}), ("split", {"batch": 1, "tokens": 2048})])
def test_known_signature_at_an_address_the_kernel_cannot_read(op, backend, sizes):
    given = {n: x.detach().transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs(**sizes).items()}
    options = {"decay": "sigmoid", "backend": backend}
    want, _ = rwkv_jit.wkv7(*given.values(), **options)
    known = len(prepared.calls)
    for moved, x in given.items():
        for shift in (1, 4):
            memory = torch.empty(x.numel() + shift, dtype=x.dtype, device="cuda")
            shifted = memory.as_strided(x.shape, x.stride(), shift).copy_(x)
            y, _ = rwkv_jit.wkv7(*{**given, moved: shifted}.values(), **options)
            assert torch.equal(y, want)
    assert len(prepared.calls) == known


def test_an_expanded_output_gradient(op):
    given = inputs()
    ones = torch.ones(1, dtype=torch.bfloat16, device="cuda").expand_as(given["v"])
    check(given, weights=(ones, torch.zeros(2, 3, 64, 64, device="cuda")))


@pytest.mark.parametrize("scale", [0.37, -2.0])
def test_scale(op, scale):
    check(inputs(), scale=scale)


def test_checkpoint_interval_changes_nothing(op):
    given = inputs(tokens=100)
    options = {"decay": "sigmoid", "backend": "chunked"}
    y, final, grads, weights = run(op, given, **options)
    again = run(op, given, None, weights, checkpoint_interval=3, **options)
    assert torch.equal(again[0], y)
    assert all(torch.equal(a, b) for a, b in zip(again[2], grads, strict=True))


# ---- hard inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["r", "k", "v", "ab", "rkvab"])
def test_zero_rows(op, names):
    given = inputs(tokens=100)
    zeroed = {n: x.detach().clone() for n, x in given.items()}
    for name in names:
        zeroed[name][:, 10:50] = 0
        zeroed[name][:, :, 1] = 0  # a whole head
    check({n: x.requires_grad_() for n, x in zeroed.items()})


def with_keys(given, kk, rate):
    """The inputs with other keys in the state's correction."""
    dtype = given["a"].dtype
    own = {n: x.detach() for n, x in given.items()} | {"a": -kk.to(dtype), "b": (kk * rate).to(dtype)}
    return {n: x.contiguous().requires_grad_() for n, x in own.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decays", [SLOW, "usual"], ids=["slow", "usual"])
def test_correlated_keys(op, decays, dtype):
    given = inputs(DTYPES[dtype], tokens=256, decays=decays)
    common = torch.randn(2, 1, 3, 64, device="cuda")
    kk = torch.nn.functional.normalize(common + 0.5 * torch.randn(2, 256, 3, 64, device="cuda"), dim=-1)
    check(with_keys(given, kk, torch.rand(2, 256, 3, 64, device="cuda")), gates=CORRELATED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decays", [SLOW, "usual"], ids=["slow", "usual"])
def test_a_repeated_token(op, decays, dtype):
    """Powers of one rank-one correction: the inverse has entries of many sizes."""
    given = inputs(DTYPES[dtype], tokens=256, heads=16, decays=decays)
    kk = -given["a"][:, :1].detach().float()
    check(with_keys(given, kk.expand(-1, 256, -1, -1), 0.95), gates=REPEATED)


@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_gradients_of_any_size(op, size):
    given = inputs(tokens=100)
    weights = (
        (size * torch.randn(given["v"].shape, device="cuda")).to(torch.bfloat16),
        size * torch.randn(2, 3, 64, 64, device="cuda"),
    )
    check(given, comparing.make_state(given, 2), weights=weights)


# ---- segments side by side -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 40), (64, 32), (37, 50), (64, 96), (96, 96), (100, 56)])
def test_split_sequences(op, sizes, layout):
    given = inputs(tokens=2048, heads=2, head_size=sizes[0], value_size=sizes[1], decays=SLOW)
    check(given, comparing.make_state(given, 2, layout=layout), backend="split", state_layout=layout, scale=0.7)


@pytest.mark.parametrize("chunk_len", [16, 32])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
def test_split_decays(op, decay, head_size, chunk_len):
    given = inputs(tokens=2048, heads=2, head_size=head_size, decay=decay, decays=(-0.6, -1e-3))
    check(given, comparing.make_state(given, 2), backend="split", decay=decay, decay_bound=-0.7, chunk_len=chunk_len)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_split_dtypes(op, dtype, state_dtype):
    given = inputs(DTYPES[dtype], tokens=2560, w_dtype=torch.float32)
    check(given, comparing.make_state(given, 2, state_dtype), backend="split")


def test_few_heads_are_split_and_agree_with_the_whole(op, problems, launched):
    given = inputs(batch=1, tokens=8192, heads=2, decays=SLOW)
    y, final = rwkv_jit.wkv7(*given.values(), output_final_state=True, decay="sigmoid")
    assert [made.backend for made in problems()] == ["segments"]
    assert {made.name for made in launched} >= {"wkv7_segment", "wkv7_join", "wkv7_chunked_forward"}
    grads = torch.autograd.grad(y.float().sum() + final.sum(), list(given.values()))
    whole, end = rwkv_jit.wkv7(*given.values(), output_final_state=True, decay="sigmoid", backend="chunked")
    wanted = torch.autograd.grad(whole.float().sum() + end.sum(), list(given.values()))
    for one, other in zip((y, final, *grads), (whole, end, *wanted), strict=True):
        assert relative(one, other) < GATES["da"]


def test_split_inputs_with_memory_between_sequences(op):
    given = inputs(batch=2, tokens=2048, heads=2)
    apart = {n: torch.cat([x.detach(), x.detach()], 1)[:, :2048].requires_grad_() for n, x in given.items()}
    check(apart, backend="split")


def test_split_results_repeat_bit_for_bit(op):
    given = inputs(batch=1, tokens=4096, heads=2)
    weight = torch.randn_like(given["v"])
    results = []
    for _ in range(3):
        y, _ = rwkv_jit.wkv7(*given.values(), decay="sigmoid", backend="split")
        results.append([y, *torch.autograd.grad(y, list(given.values()), weight)])
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))


def test_the_batch_around_a_split_sequence_changes_nothing(op):
    given = inputs(batch=5, tokens=2048, heads=2)
    options = {"decay": "sigmoid", "backend": "split", "chunk_len": 32, "num_threads": 128}
    many = run(op, given, **options)
    one_given = {n: x[3:4].detach().requires_grad_() for n, x in given.items()}
    one = run(op, one_given, None, [weight[3:4] for weight in many[3]], **options)
    assert torch.equal(many[0][3:4], one[0])
    assert torch.equal(many[1][3:4], one[1])
    assert all(torch.equal(a[3:4], b) for a, b in zip(many[2], one[2], strict=True))


# ---- the same results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", [64, 128])
def test_results_repeat_bit_for_bit(op, head_size):
    given = inputs(batch=4, tokens=300, heads=8, head_size=head_size)
    comparing.check_repeats(op, given, decay="sigmoid", backend="chunked")


def test_the_batch_around_a_sequence_changes_nothing(op):
    given = inputs(batch=64, tokens=40, heads=8)
    many = run(op, given, decay="sigmoid")
    few_given = {n: x[5:6].detach().requires_grad_() for n, x in given.items()}
    few = run(op, few_given, None, [weight[5:6] for weight in many[3]], decay="sigmoid")
    assert torch.equal(many[0][5:6], few[0])
    assert all(torch.equal(a[5:6], b) for a, b in zip(many[2], few[2], strict=True))


@pytest.mark.parametrize("split", [1, 15, 16, 31, 32, 33, 64, 77, 99])
def test_a_prompt_continues_from_its_state(op, split):
    """Short parts take the recurrent kernels; the whole stays as exact as one call."""
    given = inputs(tokens=100)
    exact = {n: x.detach().double() for n, x in given.items()}
    want, last = rwkv_jit.wkv7_ref(*exact.values(), output_final_state=True, decay="sigmoid")
    for backend in ("auto", "chunked"):
        options = {"output_final_state": True, "decay": "sigmoid", "backend": backend}
        head, state = rwkv_jit.wkv7(*[x[:, :split] for x in given.values()], **options)
        tail, final = rwkv_jit.wkv7(*[x[:, split:] for x in given.values()], initial_state=state, **options)
        assert relative(torch.cat([head, tail], 1), want) < GATE
        assert relative(final, last) < GATE


MEMORY = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


@pytest.mark.skipif(MEMORY < 100 * 2**30, reason="needs 100 GB of GPU memory")
@pytest.mark.usefixtures("most_of_the_memory")
def test_more_than_two_billion_elements(op):
    batch, first = 132, inputs(batch=1, tokens=4096, heads=64)
    assert batch * first["v"].numel() > 2**31
    comparing.check_rows(op, first, batch, (0, 65, batch - 1), decay="sigmoid", backend="chunked")


# ---- how it is called --------------------------------------------------------------------------------------------


def test_the_rule_picks_these_kernels(op, problems):
    given = inputs()
    for options in ({"decay": "sigmoid"}, BOUNDED, {}, {"decay": "sigmoid", "chunk_len": 8}):
        rwkv_jit.wkv7(*given.values(), **options)
    for tokens in (rule.LEAST_TOKENS - 1, rule.LEAST_TOKENS):
        rwkv_jit.wkv7(*[x[:, :tokens] for x in given.values()], decay="sigmoid")
    backends = ["chunked", "chunked", "chunked", "recurrent", "recurrent", "chunked"]
    assert [made.backend for made in problems()] == backends


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [40, 64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_sequences(op, dtype, head_size):
    """As the rule has them: alone and packed, by one chunk that they fill or not."""
    for tokens in (rule.LEAST_TOKENS, 7, 16, 17, 31):
        given = inputs(DTYPES[dtype], tokens=tokens, head_size=head_size, batch=5)
        check(given, comparing.make_state(given, 5), backend="auto")
    lengths = torch.tensor([0, 4, 20, 20, 23, 39, 48], device="cuda")
    given = inputs(DTYPES[dtype], batch=1, tokens=48, head_size=head_size)
    check(given, comparing.make_state(given, 6), backend="auto", cu_seqlens=lengths)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(op, dynamic):
    comparing.check_fullgraph(op, inputs(), dynamic, decay="sigmoid")


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(op, packed):
    given = [x.detach() for x in inputs(batch=1, tokens=70, head_size=40).values()]
    bounds = torch.tensor([0, 3, 70], device="cuda") if packed else None  # every slot is written
    state = torch.randn(2 if packed else 1, 3, 40, 40, device="cuda")
    options = (1.0, "sigmoid", "vk", 64, 32, None, "chunked", None, None, False, False, True)
    forward = (*given, state, bounds, *options, True, True)
    torch.library.opcheck(torch.ops.rwkv_jit.wkv7_fwd.default, forward)
    y, final, saved = torch.ops.rwkv_jit.wkv7_fwd(*forward)
    torch.library.opcheck(torch.ops.rwkv_jit.wkv7_bwd.default, (*given, state, bounds, saved, y, final, *options))


NATIVE = (
    [f"sm_{major}{minor}a" for major, minor in [torch.cuda.get_device_capability()] if major >= 9] if MEMORY else []
)


@pytest.mark.parametrize("arch", ["compute_80", *NATIVE])
def test_other_architectures(op, arch, launched, monkeypatch):
    """The code that sm_80 gets, as PTX that the driver makes run here, and this GPU's own extended target."""
    monkeypatch.setenv("RWKVJIT_ARCH", arch)
    for head_size in (40, 128):
        check(inputs(tokens=70, head_size=head_size))
    assert {made.target for made in launched} == {arch}
    assert {made.name.rsplit("_", 1)[1] for made in launched} == {"forward", "backward"}


def test_shared_memory_of_the_geometry_is_what_this_gpu_gives(op):
    properties = torch.cuda.get_device_properties(0)
    assert tensors.gpu(0).shared_limit <= properties.shared_memory_per_block_optin
