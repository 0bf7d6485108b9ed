"""Functions of mamba_ssm on these ops, against float64."""

import math

import pytest
import torch
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit.compat import mamba
from rwkv_jit.errors import UnsupportedConfigError

B, T, H, P, G, N = 2, 13, 4, 6, 2, 8
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


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


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("indexed", [False, True])
def test_update(dtype, indexed):
    """Of the views that models make of what heads have."""
    x, dt, A, b, c, D, z, dt_bias = inputs_of(dtype)
    pool = rows(7, H, P, N) if indexed else rows(B, H, P, N)
    slots = torch.tensor([5, 2]) if indexed else torch.arange(B)
    before, want_state = pool.clone(), pool[slots].double()
    for t in range(3):
        out = mamba.selective_state_update(
            pool, x[:, t], dt[:, t, :, None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), b[:, t], c[:, t],
            D[:, None].expand(-1, P), z[:, t], dt_bias[:, None].expand(-1, P), True, slots if indexed else None,
        )  # fmt: skip
        exact = [y[:, t : t + 1].double() if y.dim() > 1 else y.double() for y in (x, dt, A, b, c, D, z, dt_bias)]
        want, want_state = reference(*exact, initial_state=want_state, output_final_state=True)
        assert out.dtype == dtype
        same([out], [want[:, 0]], LIMITS[dtype])
    same([pool[slots]], [want_state], 1e-2 if dtype != torch.float32 else 1e-5)
    others = [i for i in range(len(pool)) if i not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


def test_update_without_more():
    x, dt, A, b, c, *_ = inputs_of()
    pool, dt = torch.zeros(B, H, P, N), F.softplus(dt)
    out = mamba.selective_state_update(
        pool, x[:, 0], dt[:, 0, :, None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), b[:, 0], c[:, 0]
    )
    want, _ = rwkv_jit.ssd_ref(x[:, :1], dt[:, :1], A, b[:, :1], c[:, :1])
    torch.testing.assert_close(out, want[:, 0])


def test_what_is_not_of_mamba2():
    x, dt, A, b, c, *_ = (y[:, 0] if y.dim() > 1 else y for y in inputs_of())
    pool, dt, A = torch.zeros(B, H, P, N), dt[..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N)
    update = mamba.selective_state_update
    with pytest.raises(UnsupportedConfigError, match="dt of each channel is not supported"):
        update(pool, x, dt.contiguous(), A, b, c)
    with pytest.raises(UnsupportedConfigError, match="A of each channel is not supported"):
        update(pool, x, dt, A.contiguous(), b, c)
    with pytest.raises(UnsupportedConfigError, match="dt_bias of each channel is not supported"):
        update(pool, x, dt, A, b, c, dt_bias=rows(H, P))
    with pytest.raises(UnsupportedConfigError, match="states of 3 dimensions and inputs of 2 are not supported"):
        update(pool[:, 0], x[:, 0], dt[:, 0], A[0], b[:, 0], c[:, 0])
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
    with pytest.raises(ValueError, match=r"dt: expected shape \[2, 4, 6\], got \[2, 4\]"):
        mamba.selective_state_update(torch.zeros(B, H, P, N), x, dt, A[:, None, None].expand(-1, P, N), b, c)
