"""Functions of mamba_ssm on these ops, against float64."""

import math

import pytest
import torch
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit.compat import mamba
from rwkv_jit.kernels.errors import UnsupportedConfigError

B, T, H, P, G, N = 2, 13, 4, 6, 2, 8
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# dtypes of dt, A, B, C, D, z and dt_bias beside that of x; None is that
MIXES = {
    "one": [None, torch.float32, None, None, torch.float32, None, torch.float32],
    "wide B and C": [None, torch.float32, torch.float32, torch.float32, torch.float32, None, torch.float32],
    "all": [torch.bfloat16, torch.float16, torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16],
}


def rows(*shape, dtype=torch.float32):
    return (torch.randn(*shape, dtype=torch.float64) / 2).to(dtype)


def inputs_of(dtype=torch.float32, batch=B):
    """x, dt, A, B, C, D, z, dt_bias."""
    heads = -torch.rand(H) - 0.1, rows(H), rows(H)
    A, D, dt_bias = heads
    x, z = rows(batch, T, H, P, dtype=dtype), rows(batch, T, H, P, dtype=dtype)
    return [x, rows(batch, T, H, dtype=dtype), A, *rows(2, batch, T, G, N, dtype=dtype), D, z, dt_bias]


def same(found, want, limit):
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).norm() <= limit * y.norm()


def reference(x, dt, A, B, C, D, z, dt_bias, **options):
    return rwkv_jit.ssd_ref(x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=True, **options)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("from_state", [False, True])
def test_scan(dtype, from_state):
    leaves = [x.requires_grad_() for x in inputs_of(dtype)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    state = rows(B, H, P, N, dtype=dtype) if from_state else None
    x, dt, A, b, c, D, z, dt_bias = leaves
    found = mamba.mamba_chunk_scan_combined(
        x, dt, A, b, c, 4, D, z, dt_bias, state, dt_softplus=True, dt_limit=(0.01, 0.8), return_final_states=True
    )
    given = {"initial_state": state.double()} if from_state else {}
    want = reference(*exact, output_final_state=True, dt_limit=(0.01, 0.8), **given)
    assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)
    same(found, want, LIMITS[dtype])
    grads = [torch.randn_like(x) for x in found]
    of = torch.autograd.grad(want, exact, [x.double() for x in grads])
    same(torch.autograd.grad(found, leaves, grads), of, LIMITS[dtype])
    alone = mamba.mamba_chunk_scan_combined(x, dt, A, b, c, 4, D, z, dt_bias, state, dt_softplus=True,
                                            dt_limit=(0.01, 0.8))  # fmt: skip
    assert torch.equal(alone, found[0])


@pytest.mark.parametrize("mix", list(MIXES)[1:])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_scan_of_several_dtypes(dtype, mix):
    x, *more = inputs_of(dtype)
    leaves = [x, *(t.to(own or dtype) for t, own in zip(more, MIXES[mix], strict=True))]
    leaves = [t.requires_grad_() for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = mamba.mamba_chunk_scan_combined(*leaves[:5], 4, *leaves[5:], dt_softplus=True)
    want, _ = reference(*exact)
    assert out.dtype == dtype
    same([out], [want], LIMITS[dtype])
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    assert [t.dtype for t in found] == [t.dtype for t in leaves]
    same(found, torch.autograd.grad(want, exact, grad.double()), max(LIMITS[t.dtype] for t in leaves))


def test_sequences_in_rows_are_sequences_alone():
    inputs = inputs_of()
    state = rows(B, H, P, N)
    seq_idx = torch.tensor([[0] * 4 + [1] * 9, [2] * 3 + [5] * 3 + [0] * 7], dtype=torch.int32)
    out, final = mamba.mamba_chunk_scan_combined(
        *inputs[:5], 4, *inputs[5:], state, seq_idx, dt_softplus=True, return_final_states=True
    )
    for row, bounds in enumerate(((0, 4, T), (0, 3, 6, T))):
        for first, last in zip(bounds, bounds[1:], strict=False):
            part = [x[row : row + 1, first:last] if x.dim() > 1 else x for x in inputs]
            options = {"initial_state": state[row : row + 1].double()} if first == 0 else {}
            want = reference(*(x.double() for x in part), output_final_state=True, **options)
            same([out[row : row + 1, first:last]], want[:1], 1e-5)
        same([final[row : row + 1]], want[1:], 1e-5)


@pytest.mark.parametrize(("batch", "tokens"), [(B, 0), (0, T), (0, 0)])
@pytest.mark.parametrize("has_state", [False, True])
def test_rows_without_tokens(batch, tokens, has_state):
    x, dt, A, b, c, D, z, dt_bias = inputs_of()
    streamed = [y[:batch, :tokens] for y in (x, dt, b, c, z)]
    state = rows(batch, H, P, N) if has_state else None
    out, final = mamba.mamba_chunk_scan_combined(
        *streamed[:2], A, *streamed[2:4], 4, D, streamed[4], dt_bias, state,
        torch.zeros(batch, tokens, dtype=torch.int32), return_final_states=True,
    )  # fmt: skip
    assert out.shape == (batch, tokens, H, P)
    assert torch.equal(final, torch.zeros(batch, H, P, N) if state is None else state)


def one_token(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """Mamba's equation in float64: what is put out, and the states [b, h, p, n] behind it."""
    state, x, dt, A, B, C, D, z, dt_bias = (
        t if t is None else t.double() for t in (state, x, dt, A, B, C, D, z, dt_bias)
    )  # fmt: skip
    steps = dt if dt_bias is None else dt + dt_bias
    steps = (1 + steps.exp()).log() if dt_softplus else steps
    b, c = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))  # [b, h, n]
    state = (steps[..., None] * A).exp() * state + (steps * x)[..., None] * b[:, :, None]
    out = (state * c[:, :, None]).sum(-1)
    out = out if D is None else out + D * x
    return out if z is None else out * z / (1 + (-z).exp()), state


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("of", ["heads", "channels", "channels of one head"])
@pytest.mark.parametrize("indexed", [False, True])
def test_update(dtype, mix, of, indexed):
    """Of the views that models make of what heads have, and of what each channel has."""
    groups, size = (1, H * P) if of == "channels of one head" else (G, P)
    heads = H * P // size
    pool = rows(7, heads, size, N) if indexed else rows(B, heads, size, N)
    slots = torch.tensor([5, -1 if mix == "one" else 2]) if indexed else torch.arange(B)
    before, there = pool.clone(), slots >= 0
    wanted = pool[slots].double()
    is_bare = of == "channels of one head"
    for _ in range(3):
        x, z = rows(2, B, size, heads, dtype=dtype).transpose(2, 3)
        b, c = rows(2, B, N, groups, dtype=dtype).transpose(2, 3)
        D = rows(heads, size)
        if of == "heads":
            dt, A = rows(B, heads, 1).expand(-1, -1, size), (-torch.rand(heads, 1, 1) - 0.1).expand(-1, size, N)
            dt_bias = rows(heads, 1).expand(-1, size)
        else:
            dt, A, dt_bias = rows(B, heads, size), -torch.rand(heads, size, N) - 0.1, rows(heads, size)
        several = (
            t.to(own or dtype) for t, own in zip((dt, A, b, c, D, z, dt_bias), MIXES[mix], strict=True)
        )  # fmt: skip
        given = [x, *several]
        if of == "heads":  # a conversion has made copies of the views
            given[1], given[2], given[7] = (
                given[1][..., :1].expand(-1, -1, size), given[2][..., :1, :1].expand(-1, size, N),
                given[7][..., :1].expand(-1, size),
            )  # fmt: skip
        want, wanted = one_token(wanted, *given, dt_softplus=True)
        bare = [t.squeeze(0 if i in (2, 5, 7) else 1) if is_bare else t for i, t in enumerate(given)]
        if indexed and not there.all():
            bare[0] = bare[0].clone()
            bare[0][~there] = torch.nan  # padding
        out = mamba.selective_state_update(
            pool.squeeze(1) if is_bare else pool, *bare, True, slots.int() if indexed else None
        )
        assert (out.dtype, out.shape) == (dtype, bare[0].shape)
        same([out.reshape(x.shape)[there]], [want[there]], LIMITS[dtype])
        assert not out[~there].any()
    same([pool[slots][there]], [wanted[there]], 1e-2 if dtype != torch.float32 else 1e-5)
    others = [i for i in range(len(pool)) if i not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("of", ["heads", "channels"])
def test_steps_without_softplus_are_as_they_are(of):
    """Those below 0 too, as mamba_ssm has them."""
    x, dt, A, b, c = rows(B, H, P), rows(B, H, 1), -torch.rand(H, 1, 1), *rows(2, B, G, N)
    dt, A = dt.expand(-1, -1, P), A.expand(-1, P, N)
    assert (dt < 0).any()
    pool = rows(B, H, P, N)
    want, state = one_token(pool, x, dt, A, b, c)
    given = (dt, A) if of == "heads" else (dt.contiguous(), A.contiguous())
    same([mamba.selective_state_update(pool, x, *given, b, c), pool], [want, state], 1e-5)


def test_update_without_more():
    x, dt, A, b, c, *_ = inputs_of()
    pool, dt = torch.zeros(B, H, P, N), F.softplus(dt)
    out = mamba.selective_state_update(
        pool, x[:, 0], dt[:, 0, :, None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), b[:, 0], c[:, 0]
    )
    want, _ = rwkv_jit.ssd_ref(x[:, :1], dt[:, :1], A, b[:, :1], c[:, :1])
    torch.testing.assert_close(out, want[:, 0])


def test_what_is_not_supported():
    x, dt, A, b, c, *_ = (y[:, 0] if y.dim() > 1 else y for y in inputs_of())
    pool, dt, A = torch.zeros(B, H, P, N), dt[..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N)
    update = mamba.selective_state_update
    with pytest.raises(UnsupportedConfigError, match="states with gaps in a slot are not supported"):
        update(torch.zeros(B, H, N, P).transpose(2, 3), x, dt, A, b, c)
    with pytest.raises(UnsupportedConfigError, match="a gradient through states that change in place"):
        update(pool, x.clone().requires_grad_(), dt, A, b, c)
    with pytest.raises(UnsupportedConfigError, match="return_varlen_states is not supported"):
        mamba.mamba_chunk_scan_combined(*inputs_of()[:5], 4, return_varlen_states=True)
    assert not pool.any()


def test_bad_input_is_named():
    inputs = inputs_of()[:5]
    scan = mamba.mamba_chunk_scan_combined
    with pytest.raises(ValueError, match=r"seq_idx: expected shape \[2, 13\], got \[2, 12\]"):
        scan(*inputs, 4, seq_idx=torch.zeros(2, 12, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"initial_states: expected shape \[2, heads, head size, state size\]"):
        scan(*inputs, 4, seq_idx=torch.zeros(2, 13, dtype=torch.int32), initial_states=torch.zeros(3, H, P, N))
    with pytest.raises(ValueError, match="D: expected shape"):
        scan(*inputs, 4, torch.zeros(H + 1))
    with pytest.raises(ValueError, match="dt_limit: expected a pair of numbers that does not fall"):
        scan(*inputs, 4, dt_limit=(1.0, -math.inf))
    x, dt, A, b, c = (y[:, 0] if y.dim() > 1 else y for y in inputs)
    pool, dt, A = torch.zeros(B, H, P, N), dt[..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N)
    for change, message in (
        ({"dt": dt[..., :5]}, r"dt: expected shape \[2, 4, 6\], got \[2, 4, 5\]"),
        ({"A": A[:3]}, r"A: expected shape \[4, 6, 8\], got \[3, 6, 8\]"),
        ({"B": b[:1]}, r"B: expected shape \[2, 2, 8\], got \[1, 2, 8\]"),
        ({"B": b[:, :1].expand(-1, 3, -1), "C": c[:, :1].expand(-1, 3, -1)}, "B: expected groups that divide the 4"),
        ({"D": x}, r"D: expected shape \[4, 6\], got \[2, 4, 6\]"),
        ({"state": pool[0, 0]}, r"state: expected shape \[slots, heads, head size, state size\], got \[6, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mamba.selective_state_update(**{"state": pool, "x": x, "dt": dt, "A": A, "B": b, "C": c} | change)
        assert not pool.any()


def of_one_token(of):
    """State, x, dt, A, B and C, with views of what heads have or with what channels have."""
    x, dt, A, b, c = rows(B, H, P), rows(B, H, 1), -torch.rand(H, 1, 1) - 0.1, *rows(2, B, G, N)
    dt, A = dt.expand(-1, -1, P), A.expand(-1, P, N)
    return [rows(B, H, P, N), x, *((dt, A) if of == "heads" else (dt.contiguous(), A.contiguous())), b, c]


@pytest.mark.parametrize("call", ["scan", "heads", "channels", "slots"])
def test_compiled_in_one_graph(call):
    if call == "scan":
        function, (x, dt, A, b, c, D, z, dt_bias) = mamba.mamba_chunk_scan_combined, inputs_of()
        given = [x, dt, A, b, c, 4, D, z, dt_bias, rows(B, H, P, N)]
        options = {"dt_softplus": True, "return_final_states": True}
    else:
        function, given = mamba.selective_state_update, of_one_token(call)
        options = {"dt_softplus": True, "state_batch_indices": torch.tensor([1, -1]) if call == "slots" else None}
    plain = [x.clone() if i == 0 else x for i, x in enumerate(given)]
    want = function(*plain, **options)
    found = torch.compile(function, fullgraph=True, backend="eager")(*given, **options)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(given[0], plain[0])


ALL_OF_SCAN = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx")
ALL_OF_UPDATE = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices")
OPTIONAL = ("D", "z", "dt_bias", "initial_states", "seq_idx", "state_batch_indices")


def scan_with(**changes):
    x, dt, A, b, c, D, z, dt_bias = inputs_of()
    given = {"x": x, "dt": dt, "A": A, "B": b, "C": c, "chunk_size": 4, "D": D, "z": z, "dt_bias": dt_bias}
    given |= {"initial_states": rows(B, H, P, N), "seq_idx": torch.zeros(B, T, dtype=torch.int32)}
    return mamba.mamba_chunk_scan_combined(**given | changes)


def update_with(of="heads", **changes):
    given = dict(zip(("state", "x", "dt", "A", "B", "C"), of_one_token(of), strict=True))
    given |= {"D": rows(H, P), "z": rows(B, H, P), "dt_bias": rows(H, P), "state_batch_indices": torch.tensor([0, 1])}
    return mamba.selective_state_update(**given | changes)


@pytest.mark.parametrize("wrong", [None, 2.0, [0, 1], "x"], ids=str)
@pytest.mark.parametrize(
    ("call", "name"), [*((scan_with, x) for x in ALL_OF_SCAN), *((update_with, x) for x in ALL_OF_UPDATE)]
)
def test_what_is_no_tensor_is_named(call, name, wrong):
    if wrong is None and name in OPTIONAL:
        call(**{name: None})
        return
    with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got {type(wrong).__name__}$"):
        call(**{name: wrong})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize(
    ("call", "name", "shape"),
    [
        (scan_with, "dt", (B, T, H)), (scan_with, "A", (H,)), (scan_with, "B", (B, T, G, N)),
        (scan_with, "C", (B, T, G, N)), (scan_with, "D", (H,)), (scan_with, "z", (B, T, H, P)),
        (scan_with, "initial_states", (B, H, P, N)), (update_with, "dt", (B, H, P)), (update_with, "A", (H, P, N)),
        (update_with, "B", (B, G, N)), (update_with, "C", (B, G, N)), (update_with, "D", (H, P)),
        (update_with, "z", (B, H, P)), (update_with, "dt_bias", (H, P)),
    ],
)  # fmt: skip
def test_a_wrong_dtype_is_named(call, name, shape, dtype):
    with pytest.raises(TypeError, match=f"^{name}: expected torch.float16 or .*, got {dtype}$"):
        call(**{name: torch.ones(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("call", "name", "value", "kind", "message"),
    [
        (scan_with, "seq_idx", torch.zeros(B, T), TypeError, "expected torch.int32 or torch.int64, got torch.float32"),
        (scan_with, "B", torch.zeros(B, T + 1, G, N), ValueError, r"expected shape \[2, 13, 2, 8\], got"),
        (scan_with, "z", torch.zeros(()), ValueError, r"expected shape \[2, 13\], got \[\]"),
        (update_with, "state_batch_indices", torch.zeros(B), TypeError, "expected torch.int32 or torch.int64, got"),
        (update_with, "state_batch_indices", torch.zeros(3).int(), ValueError, r"expected shape \[2\]"),
        (update_with, "state_batch_indices", torch.tensor([1, 1]), ValueError, "expected another slot for each state"),
        (update_with, "state_batch_indices", torch.tensor([0, 5]), ValueError, "expected slots below 2"),
    ],
)  # fmt: skip
def test_other_faults_are_named(call, name, value, kind, message):
    with pytest.raises(kind, match=f"^{name}: {message}"):
        call(**{name: value})
    if call is update_with:
        with pytest.raises(kind, match=f"^{name}: {message}"):
            call("channels", **{name: value})
