"""The references: gradients by finite differences, values against the formulas written out in NumPy."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit

OPS = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
DECAYS = ("raw", "sigmoid", "log", "direct")
OPS_AND_DECAYS = [(op, decay) for op in OPS for decay in (DECAYS if op != "linear_attention" else ("none",))]
LAYOUTS = ("vk", "kv")


def reference(op):
    """The reference with states [.., V, K] by default, whatever its own default is."""
    return functools.partial(getattr(rwkv_jit, f"{op}_ref"), state_layout="vk")


def of_decay(decay):
    return {} if decay == "none" else {"decay": decay}


def factor(w, decay):
    if decay == "raw":
        return math.exp(-math.exp(w))
    if decay == "sigmoid":
        return math.exp(-math.exp(-0.5) / (1 + math.exp(-w)))
    return math.exp(w) if decay == "log" else w


def formula(op, given, state, bounds, scale, decay):
    """The recurrence, one number at a time. `state` [N, H, V, K]; `bounds` are (row, begin, end) of each sequence."""
    x = {{"q": "r", "g": "w"}.get(name, name): t.detach().numpy() for name, t in given.items()}
    if op == "wkv5":
        x["w"] = np.broadcast_to(x["w"], x["r"].shape)
    if op == "linear_attention":
        x["w"], decay = np.ones_like(x["r"]), "direct"
    _, _, heads, head_size = x["r"].shape
    value_size = x["v"].shape[3]
    y, final = np.zeros_like(x["v"]), np.array(state)
    for sequence, (row, begin, end) in enumerate(bounds):
        for h in range(heads):
            s = final[sequence, h]
            for t in range(begin, end):
                at = {name: t_[row, t, h] for name, t_ in x.items() if name != "u"}
                d = [factor(w, decay) for w in at["w"]]
                before = s.copy()
                for i in range(value_size):
                    if op in ("wkv5", "wkv6"):
                        total = 0.0
                        for j in range(head_size):
                            bonus = x["u"][h, j] * at["k"][j] * at["v"][i]
                            total += at["r"][j] * (before[i, j] + bonus)
                            s[i, j] = before[i, j] * d[j] + at["v"][i] * at["k"][j]
                        y[row, t, h, i] = scale * total
                    else:
                        removed = sum(before[i, j] * at["a"][j] for j in range(head_size)) if op == "wkv7" else 0.0
                        for j in range(head_size):
                            put = removed * at["b"][j] if op == "wkv7" else 0.0
                            s[i, j] = before[i, j] * d[j] + put + at["v"][i] * at["k"][j]
                        y[row, t, h, i] = scale * sum(s[i, j] * at["r"][j] for j in range(head_size))
    return y, final


def close(x, want, rtol=1e-10):
    torch.testing.assert_close(x.detach(), torch.as_tensor(want), rtol=rtol, atol=1e-12)


# ---- gradients ---------------------------------------------------------------------------------------------------


CASES = ("packed without a state", "packed from states", "batch from one shared state")


@pytest.mark.parametrize(
    ("op", "decay", "layout", "case"),
    [
        # Every op and decay in each layout; the cases take turns, and meet all of them with --full.
        pytest.param(op, decay, layout, case, marks=() if (place + turn) % len(CASES) == 0 else pytest.mark.full)
        for place, ((op, decay), layout) in enumerate(itertools.product(OPS_AND_DECAYS, LAYOUTS))
        for turn, case in enumerate(CASES)
    ],
)
def test_gradients_agree_with_finite_differences(op, decay, layout, case, make_inputs, make_state):
    packed = case.startswith("packed")
    given = make_inputs(op, batch=1 if packed else 2, tokens=4 if packed else 2, heads=1, head_size=2, decay=decay,
                        value_size=3, seed=len(case))  # fmt: skip
    cu_seqlens = torch.tensor([0, 1, 1, 4]) if packed else None  # the second sequence is empty
    state = None
    if "state" in case and "without" not in case:
        state = make_state(3 if packed else None, heads=1, head_size=2, value_size=3, layout=layout)

    def call(*leaves):
        arguments, start = (leaves[:-1], leaves[-1]) if state is not None else (leaves, None)
        return reference(op)(*arguments, start, True, cu_seqlens, 0.7, state_layout=layout, **of_decay(decay))

    leaves = [*given.values(), *([] if state is None else [state])]
    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_defaults_are_the_conventions_of_the_op(op, make_inputs):
    """Raw decays, [V, K] and no scale for RWKV; log decays, [K, V] and the scale of attention for the others."""
    is_rwkv = op.startswith("wkv")
    given = make_inputs(op, low=-1.0)
    y, final = getattr(rwkv_jit, f"{op}_ref")(*given.values(), None, True)
    scale, decay = (1.0, "raw") if is_rwkv else (3**-0.5, "log")
    want_y, want_final = formula(op, given, np.zeros((2, 2, 4, 3)), [(0, 0, 5), (1, 0, 5)], scale, decay)
    close(y, want_y)
    close(final if is_rwkv else final.mT, want_final)
    assert getattr(rwkv_jit, f"{op}_ref")(*given.values())[1] is None


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_values_are_those_of_the_formula(op, data, make_inputs, make_state):
    """For any shape, decay, layout and state, also one for all sequences; rows, and packed sequences."""
    sizes = {name: data.draw(st.integers(1, 4), name) for name in ("heads", "head_size", "value_size")}
    is_packed = data.draw(st.booleans(), "packed")
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4), "lengths")
    lengths = lengths if is_packed else [lengths[0]] * len(lengths)
    least = data.draw(st.floats(-20.0, -1e-6), "least log-decay")
    decay = "none" if op == "linear_attention" else data.draw(st.sampled_from(DECAYS), "decay")
    layout, scale = data.draw(st.sampled_from(LAYOUTS), "layout"), data.draw(st.floats(-2.0, 2.0), "scale")
    batch, tokens = (1, sum(lengths)) if is_packed else (len(lengths), lengths[0])
    given = make_inputs(op, batch=batch, tokens=tokens, decay=decay, low=least, high=least / 2, **sizes)
    state = data.draw(st.sampled_from([None, make_state(len(lengths), layout=layout, **sizes),
                                       make_state(None, layout=layout, **sizes)]), "state")  # fmt: skip
    ends = np.cumsum([0, *lengths])
    cu_seqlens = torch.from_numpy(ends) if is_packed else None
    y, final = reference(op)(*given.values(), state, True, cu_seqlens, scale, state_layout=layout, **of_decay(decay))
    starts = np.zeros((len(lengths), sizes["heads"], sizes["value_size"], sizes["head_size"]))
    if state is not None:
        starts += (state.detach().mT if layout == "kv" else state.detach()).numpy()
    bounds = [(0, *pair) for pair in itertools.pairwise(ends)] if is_packed else [(i, 0, tokens) for i in range(batch)]
    want_y, want_final = formula(op, given, starts, bounds, scale, decay)
    close(y, want_y)
    close(final.mT if layout == "kv" else final, want_final)
    assert final.is_contiguous()


@pytest.mark.parametrize("function", ["", "_ref"])
@pytest.mark.parametrize("op", OPS)
def test_one_state_for_all_sequences_gets_the_summed_gradient(op, function, make_inputs, make_state):
    given, shared = make_inputs(op), make_state(None)
    repeated = shared.detach().expand(2, 2, 4, 3).clone().requires_grad_()
    results, grads = [], []
    for state in (shared, repeated):
        y, final = getattr(rwkv_jit, op + function)(*given.values(), state, True, state_layout="vk")
        results.append([y, final])
        grads += torch.autograd.grad(y.sum() + final.square().sum(), state)
    for x, want in zip(*results, strict=True):
        close(x, want.detach(), rtol=0)
    close(grads[0], grads[1].sum(0))


@pytest.mark.parametrize("function", ["", "_ref"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_no_tokens_give_an_empty_y_and_a_differentiable_copy_of_the_state(
    op, layout, packed, function, make_inputs, make_state
):
    given, state = make_inputs(op, batch=1, tokens=0), make_state(1, layout=layout)
    cu_seqlens = torch.tensor([0, 0]) if packed else None
    y, final = getattr(rwkv_jit, op + function)(*given.values(), state, True, cu_seqlens, state_layout=layout)
    assert y.shape == (1, 0, 2, 4)
    assert torch.equal(final, state)
    assert final.data_ptr() != state.data_ptr()
    weights, leaves = torch.rand_like(final), [*given.values(), state]
    *grads, grad_state = torch.autograd.grad((final * weights).sum() + y.sum(), leaves, materialize_grads=True)
    assert torch.equal(grad_state, weights)
    assert not any(torch.count_nonzero(grad) for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_narrow_inputs_are_computed_in_float32(op, dtype, make_inputs, make_state):
    given = make_inputs(op, dtype=dtype)
    y, final = reference(op)(*given.values(), None, True)
    exact = [x.detach().double() for x in given.values()]
    want_y, want_final = reference(op)(*exact, None, True)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(final.double(), want_final, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, want_y.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert reference(op)(*given.values(), make_state(2, dtype=torch.float16), True)[1].dtype == torch.float16


@pytest.mark.parametrize("op", OPS[:-1])
def test_unknown_decay_is_refused(op, make_inputs):
    with pytest.raises(ValueError, match="decay: expected raw, sigmoid, log or direct, got 'exp'"):
        reference(op)(*make_inputs(op).values(), decay="exp")


# ---- the normalizer of linear attention --------------------------------------------------------------------------


def normalized(q, k, v, state, z, scale):
    """The quotient, one token after another: S [N, H, V, K], z [N, H, K]."""
    outputs = []
    for t in range(q.shape[1]):
        state, z = state + v[:, t, :, :, None] * k[:, t, :, None, :], z + k[:, t]
        total = scale * (z * q[:, t]).sum(-1, keepdim=True) + 1e-10
        outputs.append(scale * (state * q[:, t, :, None, :]).sum(-1) / total)
    return torch.stack(outputs, 1), state, z


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [rwkv_jit.linear_attention, rwkv_jit.linear_attention_ref])
@pytest.mark.parametrize("value_size", [1, 4, 7, 8])
def test_normalized_values_and_gradients_are_those_of_the_quotient(value_size, function, layout, make_inputs):
    given = {n: x.detach().abs().requires_grad_() for n, x in make_inputs("linear_attention", tokens=6).items()}
    v = torch.linspace(-1, 1, 2 * 6 * 2 * value_size, dtype=torch.float64).view(2, 6, 2, value_size).requires_grad_()
    state = torch.rand(2, 2, value_size, 3, dtype=torch.float64, requires_grad=True)
    z = torch.rand(2, 2, 3, dtype=torch.float64, requires_grad=True)
    start = state.transpose(-1, -2) if layout == "kv" else state
    q, k = given["q"], given["k"]
    y, (final, last) = function(q, k, v, (start, z), True, scale=0.7, state_layout=layout, normalize=True)
    want_y, want_final, want_last = normalized(q, k, v, state, z, 0.7)
    close(y, want_y.detach())
    close(final.transpose(-1, -2) if layout == "kv" else final, want_final.detach())
    close(last, want_last.detach())
    assert final.is_contiguous()
    weights = [torch.rand_like(x) for x in (want_y, want_final, want_last)]
    final = final.transpose(-1, -2) if layout == "kv" else final
    leaves = [q, k, v, state, z]
    grads = torch.autograd.grad([y, final, last], leaves, weights)
    wanted = torch.autograd.grad([want_y, want_final, want_last], leaves, weights)
    for grad, want in zip(grads, wanted, strict=True):
        close(grad, want)


def test_gradients_of_the_normalized_reference_agree_with_finite_differences(make_inputs):
    given = {n: x.detach().abs().requires_grad_() for n, x in make_inputs("linear_attention", 1, 3).items()}
    state, z = (torch.rand(2, *size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (3,)))

    def call(q, k, v, state, z):
        y, final = rwkv_jit.linear_attention_ref(q, k, v, (state, z), True, normalize=True)
        return y, *final

    assert torch.autograd.gradcheck(call, [*given.values(), state, z], eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "roundings"),
    [(rwkv_jit.linear_attention_ref, 1), (rwkv_jit.linear_attention, 3)],  # the op rounds both sums too
)
def test_normalized_values_of_narrow_inputs_are_as_precise_as_said(function, roundings, dtype, make_inputs):
    narrow = [x.detach().abs().to(dtype) for x in make_inputs("linear_attention", tokens=40).values()]
    y, sums = function(*narrow, None, True, normalize=True)
    want_y, want_sums = rwkv_jit.linear_attention_ref(*[x.double() for x in narrow], None, True, normalize=True)
    assert [y.dtype, *(x.dtype for x in sums)] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close(y.double(), want_y, rtol=0.55 * roundings * torch.finfo(dtype).eps, atol=1e-6)
    for x, want in zip(sums, want_sums, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [rwkv_jit.linear_attention, rwkv_jit.linear_attention_ref])
def test_normalized_sequences_packed_and_in_parts(function, make_inputs):
    q, k, v = (x.detach().abs() for x in make_inputs("linear_attention", batch=1, tokens=7).values())
    y, (final, z) = function(q, k, v, None, True, torch.tensor([0, 3, 3, 7]), normalize=True)
    for i, (begin, end) in enumerate(((0, 3), (3, 3), (3, 7))):
        part = [x[:, begin:end] for x in (q, k, v)]
        want_y, (want_final, want_z) = function(*part, None, True, normalize=True)
        close(y[:, begin:end], want_y)
        close(final[i : i + 1], want_final)
        close(z[i : i + 1], want_z)
    whole, _ = function(q, k, v, normalize=True)
    _, middle = function(q[:, :4], k[:, :4], v[:, :4], None, True, normalize=True)
    rest, none = function(q[:, 4:], k[:, 4:], v[:, 4:], middle, normalize=True)
    close(rest, whole[:, 4:])
    assert none is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [rwkv_jit.linear_attention, rwkv_jit.linear_attention_ref])
def test_normalized_outputs_have_the_dtype_of_the_values_and_no_nan_where_nothing_was_asked(function, dtype):
    q, k, v = torch.zeros(3, 1, 4, 1, 3).to(dtype)
    y, (final, z) = function(q, k, v + 1, None, True, normalize=True)
    assert (y.dtype, final.dtype, z.dtype) == (dtype, torch.float32, torch.float32)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("name", ["wkv4", "wkv4_ref"])
@pytest.mark.parametrize(("decay", "w"), [("raw", 88.0), ("raw", 88.8), ("raw", math.inf), ("log", -math.inf)])
def test_wkv4_that_forgets_all_has_no_gradient_of_its_decay(name, decay, w):
    generator = torch.Generator().manual_seed(0)
    u, k, v, state = (torch.randn(size, generator=generator) for size in (3, (2, 5, 3), (2, 5, 3), (2, 3, 3)))
    state[:, 1].abs_()
    leaves = [x.requires_grad_() for x in (torch.full((3,), w), u, k, v, state)]
    y, final = getattr(rwkv_jit, name)(*leaves, True, decay=decay)
    grads = torch.autograd.grad(y.sum() + final[:, :2].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert torch.count_nonzero(grads[0]) == 0
    # Only the token before is left: y of the third one has nothing of the first.
    changed = torch.cat([v[:, :1] + 1, v[:, 1:]], 1)
    torch.testing.assert_close(getattr(rwkv_jit, name)(*leaves[:3], changed, state, decay=decay)[0][:, 2:], y[:, 2:])
