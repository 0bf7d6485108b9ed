"""Functions with the names of RWKV projects: against float64, and where those projects are wrong or narrow."""

import pytest
import torch
from compat_inputs import LIMITS, B, H, N, T, agree, by_token, channels, delta_inputs, near, rows, states

import rwkv_jit
from rwkv_jit import compat
from rwkv_jit.compat import (
    RUN_CUDA,
    RUN_CUDA_RWKV5,
    RUN_CUDA_RWKV6,
    RUN_CUDA_RWKV6_STATE,
    RWKV7_BATCH_OP,
    RWKV7_CLAMPW_CUDA,
    RWKV7_OP,
    RWKV7_STATE_CLAMPW_CUDA,
    RWKV7_STATE_PASSING_CLAMPW_CUDA,
    RUN_CUDA_RWKV7g,
    rwkvfla,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# (B, T, H, N): one token, a batch with an odd number, a head size that no kernel of theirs was built for.
SIZES = pytest.mark.parametrize("sizes", [(1, 1, 2, 8), (3, 19, 2, 5), (2, 16, 3, 32)], ids=str)


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


# ---- names -------------------------------------------------------------------------------------------------------


def test_every_name_can_be_had_and_is_listed():
    assert set(compat.__all__) == {*compat._MODULES, "install", "uninstall"}
    for name in compat.__all__:
        assert callable(getattr(compat, name)) or isinstance(getattr(compat, name), type)
        assert name in dir(compat)
    with pytest.raises(AttributeError, match=r"module 'rwkv_jit\.compat' has no attribute 'RUN_CUDA_RWKV9'"):
        compat.RUN_CUDA_RWKV9  # noqa: B018


# ---- RWKV-7 ------------------------------------------------------------------------------------------------------


def plain7(*inputs, **options):
    return rwkv_jit.wkv7_ref(*inputs, **options)[:1]


@DTYPES
@SIZES
def test_wkv7_of_rows_of_channels(sizes, dtype):
    size = sizes[-1]
    inputs = delta_inputs(sizes, dtype)
    y, *_ = agree(lambda *x: [RUN_CUDA_RWKV7g(*channels(*x), HEAD_SIZE=size, dot_prec="tf32")], plain7, inputs)
    assert (y.shape, y.dtype) == ((*sizes[:2], sizes[2] * size), dtype)
    agree(lambda *x: [compat.attn_chunked_cuda_wrap(*channels(*x), size)], plain7, inputs)
    agree(
        lambda *x: [RWKV7_CLAMPW_CUDA(*channels(*x), size)], lambda *x: plain7(*x, decay="sigmoid"), inputs
    )  # fmt: skip


def test_two_head_sizes_in_a_process_and_the_one_that_is_in_the_text():
    for size in (32, 64, 32):
        sizes = (1, 3, 128 // size, size)
        more = {} if size == 64 else {"HEAD_SIZE": size}
        agree(lambda *x, more=more: [RUN_CUDA_RWKV7g(*channels(*x), **more)], plain7, delta_inputs(sizes))
        agree(
            lambda *x, more=more: [RWKV7_CLAMPW_CUDA(*channels(*x), **more)],
            lambda *x: plain7(*x, decay="sigmoid"),
            delta_inputs(sizes),
        )


@DTYPES
@SIZES
@pytest.mark.parametrize("passes", [False, True])
def test_clampw_from_a_state(sizes, dtype, passes):
    """The state stays float32 beside rows of 16 bits."""
    inputs = (*delta_inputs(sizes, dtype), states(sizes))

    def function(*x):
        *x, s0 = x
        if passes:
            return RWKV7_STATE_PASSING_CLAMPW_CUDA(s0, *channels(*x))
        return [RWKV7_STATE_CLAMPW_CUDA(s0, *channels(*x))]

    def reference(*x):
        results = rwkv_jit.wkv7_ref(*x, output_final_state=passes, decay="sigmoid")
        return results if passes else results[:1]

    found = agree(function, reference, inputs)
    assert [x.dtype for x in found] == [dtype, torch.float32][: 1 + passes]


@pytest.mark.parametrize("own", [False, True], ids=["one state", "a state each"])
def test_peft_with_a_state_that_is_trained(own):
    """Its gradient is the sum over the batch where all sequences share it, and r, k, v, w is the order."""
    sizes = (B, T, H, N)
    inputs = (*delta_inputs(sizes), states(sizes) if own else states(sizes)[0])

    def function(r, w, k, v, a, b, s):
        r, w, k, v, a, b = channels(r, w, k, v, a, b)
        y, last = compat.RUN_RWKV7_STATE(r, k, v, w, a, b, s, N, "fp32")
        assert last is None
        assert y.shape == (B, T, H * N)
        return [y]

    agree(function, lambda *x: plain7(*x[:-1], x[-1].expand(B, H, N, N)), inputs)


@DTYPES
def test_peft_with_a_state_that_is_passed_on(dtype):
    sizes = (B, T, H, N)
    inputs = (*delta_inputs(sizes, dtype), states(sizes, dtype))

    def function(r, w, k, v, a, b, s):
        r, w, k, v, a, b = channels(r, w, k, v, a, b)
        return compat.RUN_RWKV7_INFCTX(r, k, v, w, a, b, s, HEAD_SIZE=N)

    y, last = agree(
        function, lambda *x: rwkv_jit.wkv7_ref(*x, output_final_state=True, state_layout="kv"), inputs
    )  # fmt: skip
    assert (y.shape, y.dtype, last.dtype) == (sizes, dtype, torch.float32)


@DTYPES
def test_triton_class_of_peft(dtype):
    sizes = (B, T, H, N)
    r, w, k, v, a, b = delta_inputs(sizes, dtype)

    def function(*x):
        w, q, k, v, z, b, *s0 = x
        return compat.TritonRWKV7.apply(w, q, k, v, z, b, s0[0] if s0 else None, "bf16")

    def reference(*x):
        w, q, k, v, z, b, *s0 = x
        return rwkv_jit.wkv7_ref(q, w, k, v, z, b, *s0, output_final_state=True)

    y, last = agree(function, reference, (w, r, k, v, a, b, states(sizes, dtype)))
    assert (y.dtype, last.dtype) == (dtype, dtype)
    assert agree(function, reference, (w, r, k, v, a, b))[1].dtype == dtype


@DTYPES
def test_ops_of_inference_move_their_states_on(dtype):
    sizes = (B, T, H, N)
    inputs, state = delta_inputs(sizes, dtype), states(sizes)
    want, last = rwkv_jit.wkv7_ref(*(x.double() for x in inputs), state.double(), True)
    moved = state.clone()
    y = RWKV7_BATCH_OP(moved, *channels(*inputs))
    assert (y.shape, y.dtype, moved.dtype) == ((B, T, H * N), dtype, torch.float32)
    near((y, moved), (want, last), LIMITS[dtype])
    alone = state[1].clone().requires_grad_()
    y = RWKV7_OP(alone, *(x[1] for x in channels(*inputs)))
    assert not y.requires_grad
    near((y, alone), (want[1], last[1]), LIMITS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
def test_rwkv7_hf_with_a_mask(dtype):
    """A token that is not read gives 0 and no gradients, and keeps the state, whatever it holds."""
    sizes = (B, T, H, N)
    r, w, k, v, a, b = delta_inputs(sizes)
    v = rows(B, T, H, N + 2)
    w, state = torch.sigmoid(w), rows(B, H, N, N + 2)
    is_read = torch.rand(B, T) < 0.6

    def reference(r, w, k, v, a, b, state):
        results = [[], []]
        for i, read in enumerate(is_read):
            y, last = rwkv_jit.wkv7_ref(
                *(x[i : i + 1, read] for x in (r, w, k, v, a, b)), state[i : i + 1], True, decay="direct",
                state_layout="kv",
            )  # fmt: skip
            results[0].append(torch.zeros_like(v[i]).index_put((read.nonzero()[:, 0],), y[0]))
            results[1].append(last[0])
        return [torch.stack(x) for x in results]

    function = compat.rwkv7_recurrent
    inputs = (r, w, k, v, a, b, state)
    y, _ = agree(lambda *x: function(*x, is_read.to(dtype)), reference, inputs)
    assert not y[~is_read].any()
    agree(function, lambda *x: rwkv_jit.wkv7_ref(*x, True, decay="direct", state_layout="kv"), inputs)
    broken = [torch.where(is_read[..., None, None], x, torch.nan) for x in inputs[:-1]]
    leaves = [x.requires_grad_() for x in (*broken, state.clone())]
    y, last = function(*leaves, attention_mask=is_read)
    assert y.isfinite().all()
    assert last.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum() + last.sum(), leaves))


# ---- RWKV-6, 5 and 4, TimeX --------------------------------------------------------------------------------------


@DTYPES
@SIZES
def test_rwkv6_by_both_ways_to_call_it(sizes, dtype):
    """w is the model's own in float32 too."""
    batch, tokens, heads, size = sizes
    inputs = (*by_token(sizes, dtype), rows(heads, size, dtype=dtype))
    says = (batch, tokens, heads * size, heads)

    def reference(*x):
        return rwkv_jit.wkv6_ref(*x)[:1]

    run = RUN_CUDA_RWKV6
    y, *_ = agree(lambda *x: [run(*channels(*x[:4]), x[4])], reference, inputs)
    assert (y.shape, y.dtype) == (says[:3], dtype)
    agree(lambda *x: [run(*says, *channels(*x[:4]), x[4])], reference, inputs)
    agree(lambda *x: [run(*says, *channels(*x[:4]), u=x[4])], reference, inputs)
    agree(lambda *x: [run(*channels(*x[:4]), u=x[4])], reference, inputs)


@pytest.mark.parametrize("own", [False, True], ids=["one state", "a state each"])
@DTYPES
def test_rwkv6_from_a_state(dtype, own):
    """Where a batch shares its state nothing behind it is read, and the gradient is summed."""
    sizes = (B, T, H, N)
    memory = torch.full((B + 2, H, N, N), torch.nan, dtype=dtype)  # around the state
    memory[1 : B + 1 if own else 2] = states(sizes, dtype) if own else states(sizes, dtype)[0]
    state = memory[1 : B + 1] if own else memory[1]
    inputs = (*by_token(sizes, dtype), rows(H, N, dtype=dtype), state)

    def function(r, k, v, w, u, s):
        return [RUN_CUDA_RWKV6_STATE(B, T, H * N, H, *channels(r, k, v, w), u, s)]

    agree(function, lambda *x: rwkv_jit.wkv6_ref(*x[:5], x[5].expand(B, H, N, N))[:1], inputs)


@DTYPES
@SIZES
def test_rwkv5(sizes, dtype):
    batch, tokens, heads, size = sizes
    inputs = (*by_token(sizes, dtype)[:3], rows(heads, size, dtype=dtype), rows(heads, size, dtype=dtype))
    says = (batch, tokens, heads * size, heads)
    y, *_ = agree(
        lambda *x: [RUN_CUDA_RWKV5(*says, *channels(*x[:3]), *x[3:])],
        lambda *x: rwkv_jit.wkv5_ref(*x)[:1],
        inputs,
    )
    assert (y.shape, y.dtype) == (says[:3], dtype)


@DTYPES
def test_rwkv4(dtype):
    inputs = (rows(7), rows(7), rows(B, T, 7, dtype=dtype), rows(B, T, 7, dtype=dtype))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    y, *_ = agree(
        lambda *x: [RUN_CUDA(B, T, 7, *x)], lambda *x: rwkv_jit.wkv4_ref(*x)[:1], inputs, limit
    )  # fmt: skip
    assert (y.shape, y.dtype) == ((B, T, 7), dtype)


def test_timex():
    inputs = (rows(6, T), rows(B, 6, T))
    agree(lambda w, k: [compat.TimeX.apply(w, k, B, 6, T, 0.25)], lambda *x: [rwkv_jit.timex_ref(*x, 0.25)], inputs)


# ---- flash-rwkv --------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("version", [5, 6])
def test_flash_rwkv(version, flat, dtype):
    """Every argument has a gradient, and a batch has states of its own."""
    sizes = (B, T, H, N)
    r, k, v, w = by_token(sizes, dtype)
    w, u = rows(H, N) if version == 5 else w, rows(H, N, dtype=dtype)

    def function(r, k, v, w, u, state):
        w = (w.flatten() if flat else w) if version == 5 else w.flatten(2)
        run = getattr(compat, f"rwkv{version}_cuda_linear_attention")
        return run(*channels(r, k, v), w, u.flatten() if flat else u, state)

    reference = getattr(rwkv_jit, f"wkv{version}_ref")
    state = states(sizes)
    before = state.clone()
    out, last = agree(function, lambda *x: reference(*x, True), (r, k, v, w, u, state))
    assert (out.shape, out.dtype) == ((B, T, H * N) if version == 5 else sizes, dtype)
    assert (last.shape, last.dtype) == (state.shape, torch.float32)
    assert torch.equal(state, before)


# ---- Wind RWKV ---------------------------------------------------------------------------------------------------


WIND = ["chunked_cuda", "backstepping_smallhead", "backstepping_longhead", "triton_bighead", "triton_bighead_bf16",
        "triton_bighead_fp16", "triton_bighead_fp32"]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("name", WIND)
def test_functions_of_wind(name, dtype):
    function = getattr(compat, f"attn_{name}")
    for sizes in ((B, T, H, N), (1, 1, 2, 8)):
        inputs = (*delta_inputs(sizes, dtype), states(sizes, dtype))

        def reference(*x):
            return rwkv_jit.wkv7_ref(*x, output_final_state=True)

        for given in (inputs, inputs[:-1]):
            y, last = agree(function, reference, given)
            assert (y.dtype, last.dtype) == (dtype, dtype)


def test_functions_of_wind_for_rows_of_channels():
    for name in ("chunked_cuda", "backstepping_smallhead", "backstepping_longhead"):
        for size in (5, 4):
            agree(
                lambda *x, name=name, size=size: [getattr(compat, f"attn_{name}_wrap")(*channels(*x), size)], plain7,
                delta_inputs((B, T, H, size)),
            )  # fmt: skip
    sizes = (B, T, H, N)
    inputs = (*delta_inputs(sizes), states(sizes))
    run = compat.attn_triton_bighead_wrap
    agree(
        lambda *x: run(*channels(*x[:-1]), x[-1], return_state=True, head_size=N),
        lambda *x: rwkv_jit.wkv7_ref(*x, True), inputs,
    )  # fmt: skip
    agree(lambda *x: [run(*channels(*x), head_size=N)], plain7, inputs[:-1])


@pytest.mark.parametrize("has_state", [True, False])
def test_packed_sequences_of_wind(has_state):
    """Lengths need not be multiples of 16, and a sequence may have no token."""
    lengths = torch.tensor([0, 4, 4, 11, T])
    inputs = delta_inputs((1, T, H, N))
    inputs = (*inputs, rows(4, H, N, N)) if has_state else inputs

    def function(*x):
        return compat.attn_chunked_cuda_varlen(*(x[0] for x in x[:6]), x[6] if has_state else None, lengths)

    y, last = agree(function, lambda *x: rwkv_jit.wkv7_ref(*x, output_final_state=True, cu_seqlens=lengths), inputs)
    assert (y.shape, last.shape) == ((T, H, N), (4, H, N, N))


def test_nothing_is_loaded_for_wind():
    for name in ("chunked_cuda", "chunked_cuda_varlen", "backstepping_smallhead", "backstepping_longhead"):
        load = getattr(compat, f"load_{name}")
        assert load(64) is None
        assert load(128) is None
    assert compat.load_backstepping_longhead(64, batchsz_times_heads_estimate=8) is None


# ---- TorchScript -------------------------------------------------------------------------------------------------


def script_7g(r, w, k, v, a, b):
    return RUN_CUDA_RWKV7g(r, w, k, v, a, b)


def script_clampw(r, w, k, v, a, b):
    return RWKV7_CLAMPW_CUDA(r, w, k, v, a, b, 64) + RWKV7_CLAMPW_CUDA(r, w, k, v, a, b)


def script_passing(s0, r, w, k, v, a, b):
    y, last = RWKV7_STATE_PASSING_CLAMPW_CUDA(s0, r, w, k, v, a, b)
    return y.sum() + last.sum() + RWKV7_STATE_CLAMPW_CUDA(s0, r, w, k, v, a, b).sum()


def script_batch(state, r, w, k, v, a, b):
    return RWKV7_BATCH_OP(state, r, w, k, v, a, b), RWKV7_OP(state[0], r[0], w[0], k[0], v[0], a[0], b[0])


def script_6(B: int, T: int, C: int, H: int, r, k, v, w, u, s):
    return (
        RUN_CUDA_RWKV6(r, k, v, w, u) + RUN_CUDA_RWKV6(B, T, C, H, r, k, v, w, u)
        + RUN_CUDA_RWKV6_STATE(B, T, C, H, r, k, v, w, u, s)
    )  # fmt: skip


def script_5_and_4(B: int, T: int, C: int, H: int, r, k, v, w, u):
    y = RUN_CUDA_RWKV5(B, T, C, H, r, k, v, w, u)
    return y + RUN_CUDA(B, T, C, w.flatten(), u.flatten(), k, v)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_call_the_functions():
    """With the arguments that callers give, defaults left out, and with gradients."""
    six = [x.flatten(2) for x in delta_inputs((2, 3, 2, 64))]
    state = rows(2, 2, 64, 64)
    of_6 = [*by_token((2, 3, 10), torch.float32), rows(2, 5)]
    for function, given in (
        (script_7g, six),
        (script_clampw, six),
        (script_passing, [state, *six]),
        (script_6, [2, 3, 10, 2, *of_6, rows(2, 5, 5)]),
        (script_5_and_4, [2, 3, 10, 2, *of_6[:3], rows(2, 5), rows(2, 5)]),
    ):
        leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in given]
        found, want = torch.jit.script(function)(*leaves), function(*leaves)
        assert torch.equal(found, want)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        for x, y in zip(*(torch.autograd.grad(y.sum(), tensors) for y in (found, want)), strict=True):
            assert torch.equal(x, y)
    one, two = state.detach().clone(), state.detach().clone()
    for x, y in zip(torch.jit.script(script_batch)(one, *six), script_batch(two, *six), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(one, two)
    assert not torch.equal(one, state)


# ---- wrong arguments ---------------------------------------------------------------------------------------------


def seven(size=8):
    return [torch.zeros(2, 3, size) for _ in range(6)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RUN_CUDA_RWKV7g(*seven()), ValueError,
         r"q: expected shape \[B, T, C\] with heads of 64 channels, got \[2, 3, 8\]"),
        (lambda: RUN_CUDA_RWKV7g(*seven(), HEAD_SIZE=0), ValueError, "HEAD_SIZE: expected at least 1, got 0"),
        (lambda: RWKV7_CLAMPW_CUDA(*seven()[:5], torch.zeros(2, 4, 8), 4), ValueError,
         r"b: expected shape \[2, 3, 8\] like r, got \[2, 4, 8\]"),
        (lambda: compat.RUN_RWKV7_STATE(*seven(), torch.zeros(3, 4, 4), 4), ValueError,
         r"s: expected shape \[2, 2, 4, 4\] or \[2, 4, 4\], got \[3, 4, 4\]"),
        (lambda: RWKV7_STATE_CLAMPW_CUDA(torch.zeros(2, 4, 4), *seven()), ValueError,
         r"s0: expected shape \[B, H, N, N\], got \[2, 4, 4\]"),
        (lambda: RWKV7_BATCH_OP(torch.zeros(1, 2, 4, 4), *seven()), ValueError,
         r"state: expected 2 states of 2 heads like r, got shape \[1, 2, 4, 4\]"),
        (lambda: RUN_CUDA_RWKV6(*seven()), TypeError, "got 6 arguments and none by name"),
        (lambda: RUN_CUDA_RWKV6(*seven()[:4], y=0), TypeError, "got 4 arguments and y by name"),
        (lambda: RUN_CUDA_RWKV6(*seven()[:5]), ValueError, r"u: expected shape \[H, N\], got \[2, 3, 8\]"),
        (lambda: RUN_CUDA_RWKV6(2, 3, 8, 3, *seven()[:5]), ValueError,
         "H: expected heads that divide the 8 channels, got 3"),
        (lambda: RUN_CUDA_RWKV5(2, 4, 8, 2, *seven()[:5]), ValueError,
         r"r: expected 64 elements, 2 x 4 x 2 x 4 by the other arguments, got shape \[2, 3, 8\]"),
        (lambda: RUN_CUDA_RWKV6(*seven()[:4], None), TypeError, r"u: expected a torch\.Tensor or an array"),
        (lambda: RUN_CUDA_RWKV7g(seven()[0].half(), *seven()[1:], 4), TypeError,
         r"k: expected torch\.float16 like q, got torch\.float32"),
        (lambda: compat.RUN_CUDA_RWKV6_STATE(2, 3, 8, 2, *seven()[:4], torch.zeros(2, 4), torch.zeros(3, 4, 4)),
         ValueError, r"^s: expected shape \[2, 2, 4, 4\] or \[2, 4, 4\], got \[3, 4, 4\]"),
        (lambda: RWKV7_STATE_CLAMPW_CUDA(torch.zeros(2, 2, 4, 4).int(), *seven()), TypeError, "^s0: expected torch"),
        (lambda: compat.rwkv5_cuda_linear_attention(seven()[0], seven()[0].half(), seven()[0], torch.zeros(8),
                                                    torch.zeros(8), torch.zeros(2, 2, 4, 4)), TypeError,
         r"^key: expected torch\.float32 like receptance, got torch\.float16"),
        (lambda: compat.rwkv6_cuda_linear_attention(*seven()[:3], seven()[0].int(), torch.zeros(8),
                                                    torch.zeros(2, 2, 4, 4)), TypeError, "^time_decay: expected torch"),
        (lambda: compat.attn_chunked_cuda(*(torch.zeros(1, 2, 2, 4) for _ in "rwk"), *[None] * 3), TypeError,
         r"^v: expected a torch\.Tensor or an array"),
        (lambda: RWKV7_OP(None, *(x[0] for x in seven())), TypeError, r"state: expected a torch\.Tensor or an array"),
        (lambda: RWKV7_OP(torch.zeros(2, 4, 4), *(x[0] for x in seven()[:5]), None), TypeError,
         r"^b: expected a torch\.Tensor or an array"),
        (lambda: compat.attn_chunked_cuda_varlen(*(torch.zeros(2, 2, 4) for _ in range(5)), None, None, [0, 2]),
         TypeError, r"^b: expected a torch\.Tensor or an array"),
        (lambda: compat.attn_chunked_cuda(*(torch.zeros(1, 2, 2, 4) for _ in "rwk"), *(torch.zeros(4) for _ in "vab")),
         ValueError, "^v: expected 4 dimensions"),
        (lambda: compat.RUN_RWKV7_INFCTX(*seven(), "s", 4), TypeError, r"^s: expected a torch\.Tensor or an array"),
        (lambda: rwkvfla.chunk_rwkv6(None, *seven()[:4]), TypeError, r"^r: expected a torch\.Tensor or an array"),
        (lambda: rwkvfla.chunk_rwkv7(None, *seven()[:5], head_first=True), TypeError, r"^r: expected a torch\.Tensor"),
        (lambda: rwkvfla.chunk_rwkv7(*seven()[:5], log_w=5), TypeError, r"^log_w: expected a torch\.Tensor"),
        (lambda: compat.TimeX.apply(torch.zeros(3, 4), torch.zeros(2, 3, 5), 2, 3, 4, 0.0), ValueError,
         "k: expected 24 elements, 2 x 3 x 4"),
        (lambda: compat.rwkv6_cuda_linear_attention(*seven()[:4], torch.zeros(9), torch.zeros(2, 2, 4, 4)), ValueError,
         r"time_first: expected 8 elements, 2 x 4 by the other arguments, got shape \[9\]"),
        (lambda: compat.rwkv7_recurrent(*(torch.zeros(2, 3, 2, 4) for _ in range(6)), torch.zeros(2, 2, 4, 4),
                                        torch.ones(2, 4)), ValueError,
         r"attention_mask: expected shape \[2, 3\] like receptance, got \[2, 4\]"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_wrong_call_leaves_the_state_as_it_is():
    state, inputs = torch.ones(2, 2, 4, 4), seven()
    inputs[3] = torch.zeros(2, 3, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"v: expected .*, got torch\.int32"):
        RWKV7_BATCH_OP(state, *inputs)
    assert torch.equal(state, torch.ones(2, 2, 4, 4))
