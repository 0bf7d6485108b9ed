"""Functions with the names of RWKV projects: against float64, and where those projects are wrong or narrow."""

import sys

import pytest
import torch
from torch.utils import cpp_extension

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
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# (B, T, H, N): one token, a batch with an odd number, a head size that no kernel of theirs was built for.
SIZES = pytest.mark.parametrize("sizes", [(1, 1, 2, 8), (3, 19, 2, 5), (2, 16, 3, 32)], ids=str)
B, T, H, N = 3, 19, 2, 5


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def rows(*shape, dtype=torch.float32):
    """Random numbers whose channels do not lie side by side."""
    return (torch.randn(*shape, 2, dtype=torch.float64) * 0.5).to(dtype)[..., 0]


def delta_inputs(sizes, dtype=torch.float32):
    """R, w, k, v, a and b of RWKV-7, [B, T, H, N]."""
    r, k, v, w = (rows(*sizes, dtype=dtype) for _ in range(4))
    direction = torch.nn.functional.normalize(rows(*sizes, dtype=torch.float64), dim=-1)
    return r, w, k, v, (-direction).to(dtype), (direction * 0.5).to(dtype)


def states(sizes, dtype=torch.float32):
    batch, _, heads, size = sizes
    return rows(batch, heads, size, size, dtype=dtype)


LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def near(found, want, limit=1e-5):
    for x, y in zip(found, want, strict=True):
        assert (x.double() - y.reshape(x.shape)).norm() <= limit * y.norm() + 1e-12


def agree(function, reference, inputs, limit=None):
    """Results and gradients of `function`, whatever shapes it gives them, are those of `reference` in float64."""
    ours = [x.detach().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    found, want = ([x for x in results if x is not None] for results in (function(*ours), reference(*theirs)))
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in want]
    grads = torch.autograd.grad(found, ours, [w.reshape(x.shape).to(x) for w, x in zip(weights, found, strict=True)])
    weights = [w.to(x.dtype).double() for w, x in zip(weights, found, strict=True)]
    exact = torch.autograd.grad(want, theirs, weights, materialize_grads=True)
    near((*found, *grads), (*want, *exact), limit or LIMITS[inputs[0].dtype])
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    return found


def channels(*xs):
    return [x.flatten(2) for x in xs]


# ---- names -------------------------------------------------------------------------------------------------------


def test_every_name_can_be_had_and_is_listed():
    assert set(compat.__all__) == {*compat._MODULES, "install", "uninstall"}
    for name in compat.__all__:
        assert callable(getattr(compat, name)) or isinstance(getattr(compat, name), type)
        assert name in dir(compat)
    with pytest.raises(AttributeError, match=r"module 'rwkv_jit\.compat' has no attribute 'RUN_CUDA_RWKV9'"):
        compat.RUN_CUDA_RWKV9  # noqa: B018


def test_names_import_nothing_before_one_is_used(child):
    child(
        "import sys, rwkv_jit.compat; assert 'torch' not in sys.modules\n"
        "from rwkv_jit.compat import RUN_CUDA_RWKV6; assert 'torch' in sys.modules"
    )


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


def by_token(sizes, dtype):
    return [rows(*sizes, dtype=dtype) for _ in range(4)]


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
         r"initial_state: expected shape \[2, 2, 4, 4\] or \[2, 4, 4\], got \[3, 4, 4\]"),
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


# ---- extensions --------------------------------------------------------------------------------------------------


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def load(name, *sources):
    return cpp_extension.load(name=name, sources=[f"a/b/{x}" for x in sources] or ["x.cu"], is_python_module=False)


class Infctx(torch.autograd.Function):
    """As RWKV-PEFT has it: the saved state is the one that the forward overwrites."""

    @staticmethod
    def forward(ctx, module, r, k, v, w, u, s):
        ctx.module = module
        ctx.save_for_backward(r, k, v, w, u, s)
        y = torch.full_like(r, torch.nan)
        module.forward(*r.shape, u.shape[0], r, k, v, w, u, s, y)
        return y

    @staticmethod
    def backward(ctx, gy):
        r, k, v, w, u, s = ctx.saved_tensors
        gr, gk, gv, gw = (torch.full_like(r, torch.nan) for _ in range(4))
        gu, gs = torch.full_like(r[:, 0], torch.nan), torch.full_like(s, torch.nan)
        ctx.module.backward(*r.shape, u.shape[0], r, k, v, w, u, s, gy, gr, gk, gv, gw, gu, gs)
        return None, gr, gk, gv, gw, gu.sum(0).view_as(u), gs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infctx_moves_the_state_on_and_has_the_gradients_of_the_one_before(dtype, installed):
    module, sizes = load("wkv6infctx"), (B, T, H, N)
    r, k, v, own_w = by_token(sizes, dtype)
    w = -torch.exp(own_w) if dtype == torch.float32 else own_w  # as the extension wkv6 has it
    u, given = rows(H, N, dtype=dtype), states(sizes, dtype)
    leaves = [x.contiguous().requires_grad_() for x in (*channels(r, k, v, w), u, given)]
    state = leaves[-1].clone()
    y = Infctx.apply(module, *leaves[:-1], state)
    moved, gy = state.detach().clone(), rows(B, T, H * N, dtype=dtype)
    exact = [x.double().requires_grad_() for x in (r, k, v, own_w, u, given)]
    want, last = rwkv_jit.wkv6_ref(*exact, True)
    grads = torch.autograd.grad(y, leaves, gy)
    of = torch.autograd.grad(want, exact, gy.double().view_as(want))
    near((y, moved, *grads), (want, last, *of), LIMITS[dtype])
    assert torch.equal(state, moved)


def test_infctx_of_a_state_that_no_forward_overwrote(installed):
    module, sizes = load("wkv6infctx"), (B, T, H, N)
    rows_, u, s = [x.flatten(2).contiguous() for x in by_token(sizes, torch.bfloat16)], rows(H, N), states(sizes)
    rows_ = [x.float() for x in rows_]
    gy, says = rows(B, T, H * N), (B, T, H * N, H)
    results = []
    for name in ("wkv6infctx", "wkv6state"):
        buffers = [torch.full(x.shape, torch.nan) for x in (*rows_, rows_[0][:, 0], s)]
        load(name).backward(*says, *rows_, u, s, gy, *buffers)
        results.append(buffers)
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match=r"s: expected shape \[3, 2, 5, 5\], got \[2, 5, 5\]"):
        module.forward(*says, *rows_, u, s[0], torch.empty(B, T, H * N))


def test_both_modules_of_flash_rwkv_in_a_process(installed):
    """They are built under one name. w of 5 is the decay, of 6 its logarithm."""
    sizes, says = (B, T, H, N), (B, T, H * N, H)
    five, six = load("flash_rwkv_5", "wkv5_op.cpp", "wkv5_kernel.cu"), load("flash_rwkv_5", "wkv6_op.cpp", "wkv6.cu")
    assert not hasattr(six, "backward_fp32")
    r, k, v, w = (x.contiguous() for x in by_token(sizes, torch.float32))
    u, gy = rows(H, N), rows(*sizes)
    for module, reference, own in ((five, rwkv_jit.wkv5_ref, rows(H, N)), (six, rwkv_jit.wkv6_ref, w)):
        state, y = states(sizes), torch.full(sizes, torch.nan)
        given = torch.exp(-torch.exp(own)) if module is five else -torch.exp(own)
        want, last = reference(*(x.double() for x in (r, k, v, own, u, state)), True)
        module.forward_fp32(*says, state, r, k, v, given, u, y)
        near((y, state), (want, last))
    own = rows(H, N)
    grads = [torch.full(sizes, torch.nan) for _ in range(3)] + [torch.full((B, H * N), torch.nan) for _ in range(2)]
    log = -torch.exp(own)
    five.backward_fp32(*says, r, k, v, torch.exp(log), log, u, gy, *grads)
    exact = [x.double().requires_grad_() for x in (r, k, v, own, u)]
    of = torch.autograd.grad(rwkv_jit.wkv5_ref(*exact)[0], exact, gy.double())
    near((*grads[:3], *(x.sum(0) for x in grads[3:])), of)


def test_another_extension_of_that_name_is_built_by_torch(installed, monkeypatch):
    from rwkv_jit.compat import loading

    monkeypatch.setattr(loading, "_torch_load", lambda *given, **named: "built")
    assert load("flash_rwkv_5", "mine.cpp") == "built"
    assert cpp_extension.load("flash_rwkv_5", "mine.cpp") == "built"
    assert hasattr(cpp_extension.load("flash_rwkv_5", "a/wkv6_op.cpp"), "forward_bf16")


@pytest.mark.parametrize(
    "name", ["chunked_cuda", "chunked_cuda_varlen", "backstepping_smallhead", "backstepping_longhead"]
)
def test_extensions_of_wind(name, installed):
    """With and without scratch, in two head sizes, and gradients in the dtype of their tensors."""
    load(f"wind_{name}")
    ops, packed = getattr(torch.ops, f"wind_{name}"), name.endswith("varlen")
    for size in (5, 8):
        sizes = (1 if packed else B, 35, H, size)
        r, w, k, v, a, b = delta_inputs(sizes)
        lengths = torch.tensor([0, 16, 35]) if packed else None
        count = 2 if packed else B
        s0, dlast, dy = rows(count, H, size, size), rows(count, H, size, size), rows(*sizes)
        inputs, more = [w, r, k, v, a, b], [lengths] if packed else []
        if packed:
            inputs, dy = [x[0] for x in inputs], dy[0]
        s = torch.empty(*(() if packed else (B,)), H, 2, size, size)
        scratch = [s, torch.empty(dy.shape)] if "backstepping" in name else [s]
        exact = [x.double().requires_grad_() for x in (r, w, k, v, a, b, s0)]
        want, final = rwkv_jit.wkv7_ref(*exact, True, lengths)
        of = torch.autograd.grad([want, final], exact, [dy.double().view_as(want), dlast.double()])
        can_be_none = name != "backstepping_smallhead"
        for given in ([None] * len(scratch) if can_be_none else scratch, scratch):
            y, last = torch.full(dy.shape, torch.nan), torch.full(s0.shape, torch.nan)
            ops.forward(*inputs, s0, y, *given, last, *more)
            near((y, last), (want, final))
        wide = torch.float64
        dw, dq, *others = [torch.full(dy.shape, torch.nan, dtype=wide) for _ in range(6)]
        ds0 = torch.full(s0.shape, torch.nan)
        ops.backward(*inputs, dy, *scratch, dlast, dw, dq, *others, ds0, *more)
        near((dq, dw, *others, ds0), of)


def test_schemas_of_wind(installed):
    for name in ("chunked_cuda", "chunked_cuda_varlen", "backstepping_smallhead", "backstepping_longhead"):
        load(f"wind_{name}")
    forward = torch.ops.wind_chunked_cuda_varlen.forward.default._schema
    assert " ".join(x.name for x in forward.arguments) == "w q k v a b s0 y s sT cu_seqlens"
    forward = torch.ops.wind_backstepping_longhead.forward.default._schema
    assert " ".join(x.name for x in forward.arguments if isinstance(x.type, torch.OptionalType)) == "s sa"
    backward = torch.ops.wind_backstepping_longhead.backward.default._schema
    assert " ".join(x.name for x in backward.arguments) == "w q k v a b dy s sa dsT dw dq dk dv da db ds0"
    assert " ".join(x.name for x in backward.arguments if x.alias_info) == "dw dq dk dv da db ds0"


# ---- rwkvfla -----------------------------------------------------------------------------------------------------


@pytest.fixture
def rwkvfla(installed):
    from rwkvfla.ops import rwkv6, rwkv7

    return rwkv6.chunk_rwkv6, rwkv7.chunk_rwkv7


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunk_rwkv7(rwkvfla, is_log, head_first, dtype):
    sizes = (B, T, H, N)
    r, w, k, v, a, b = delta_inputs(sizes, dtype)
    inputs = (r, -torch.exp(w) if is_log else w, k, v, a, b, states(sizes, dtype))

    def function(r, w, k, v, a, b, s):
        r, w, k, v, a, b = (x.transpose(1, 2) if head_first else x for x in (r, w, k, v, a, b))
        decay = {"log_w": w} if is_log else {"w": w}
        y, last = rwkvfla[1](
            r=r, k=k, v=v, a=a, b=b, **decay, scale=0.5, initial_state=s, output_final_state=True,
            head_first=head_first,
        )  # fmt: skip
        return (y.transpose(1, 2) if head_first else y), last

    options = {"state_layout": "kv", "scale": 0.5, "decay": "log" if is_log else "raw"}
    _, last = agree(function, lambda *x: rwkv_jit.wkv7_ref(*x, True, **options), inputs)
    assert last.dtype == torch.float32
    with pytest.raises(ValueError, match="w: expected w or log_w, got neither"):
        rwkvfla[1](*inputs[:5])
    assert rwkvfla[1](r, k, v, a, b, w, output_final_state=False)[1] is None


@pytest.mark.parametrize("named", [None, False, True])
def test_chunk_rwkv6(rwkvfla, named):
    """RWKV-PEFT gives heads before tokens and does not say so; the heads of u tell."""
    sizes = (B, T, H, N)
    for head_first in (False, True) if named is None else (named,):
        inputs = (*by_token(sizes, torch.float32)[:3], -rows(*sizes).abs(), rows(H, N), states(sizes))

        def function(r, k, v, w, u, s, head_first=head_first):
            r, k, v, w = (x.transpose(1, 2) if head_first else x for x in (r, k, v, w))
            y, last = rwkvfla[0](
                r, k, v, w, u=u, scale=1.0, initial_state=s, output_final_state=True,
                **({} if named is None else {"head_first": named}),
            )  # fmt: skip
            return (y.transpose(1, 2) if head_first else y), last

        agree(function, lambda *x: rwkv_jit.wkv6_ref(*x, True, decay="log", state_layout="kv"), inputs)
    r, k, v, w, u, _ = inputs
    if not head_first:
        y = rwkvfla[0](r, k, v, w, u)[0]
        torch.testing.assert_close(y, rwkv_jit.wkv6(r, k, v, w, u, scale=N**-0.5, decay="log")[0])
    square = [x[:, :H] for x in (r, k, v, w)] if not head_first else [torch.zeros(1, H, H, N)] * 4
    with pytest.raises(ValueError, match="head_first: expected True or False where there are as many tokens as heads"):
        rwkvfla[0](*square, u)
    assert rwkvfla[0](*square, u, head_first=False)[0].shape == square[0].shape


def test_rwkvfla_is_there_between_install_and_uninstall():
    compat.install()
    compat.install()
    import rwkvfla

    assert rwkvfla.ops.rwkv6.chunk_rwkv6.__module__ == "rwkv_jit.compat.rwkvfla"
    with pytest.raises(ImportError, match="fused_k_rwkv7"):
        from rwkvfla.ops.rwkv7 import fused_k_rwkv7  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"rwkvfla\.layers"):
        import rwkvfla.layers  # noqa: F401
    compat.uninstall()
    assert not [name for name in sys.modules if name.startswith("rwkvfla")]
    with pytest.raises(ModuleNotFoundError, match="rwkvfla"):
        import rwkvfla  # noqa: F811


def test_rwkvfla_imports_torch_when_it_is_imported(child):
    child(
        "import sys, rwkv_jit.compat as c; c.install(); assert 'torch' not in sys.modules\n"
        "from rwkvfla.ops.rwkv7 import chunk_rwkv7; assert 'torch' in sys.modules"
    )


def test_the_package_itself_is_taken_where_it_is_installed(child, tmp_path):
    """Also for a module that this version of it has not."""
    (tmp_path / "rwkvfla" / "ops").mkdir(parents=True)
    for folder in ("rwkvfla", "rwkvfla/ops"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "rwkvfla" / "ops" / "rwkv6.py").write_text("chunk_rwkv6 = 'own'")
    child(f"""
import sys, rwkv_jit.compat as c
sys.path.append({str(tmp_path)!r})
c.install()
from rwkvfla.ops.rwkv6 import chunk_rwkv6
assert chunk_rwkv6 == "own"
try:
    import rwkvfla.ops.rwkv7
except ModuleNotFoundError:
    c.uninstall()
    assert "rwkvfla.ops.rwkv6" in sys.modules
else:
    raise AssertionError
""")
