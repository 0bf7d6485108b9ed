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
FIXED = {"wkv5": "wu", "wkv6": "u"}  # inputs without tokens
LAYOUTS = ("vk", "kv")


def reference(op):
    """The reference with states [.., V, K] by default, whatever its own default is."""
    return functools.partial(getattr(rwkv_jit, f"{op}_ref"), state_layout="vk")


def of_decay(decay):
    return {} if decay == "none" else {"decay": decay}


def of_tokens(op, given, begin, end):
    """The inputs of some tokens."""
    return [x if name in FIXED.get(op, "") else x[:, begin:end] for name, x in given.items()]


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "decay"), OPS_AND_DECAYS)
def test_values_are_those_of_the_formula(op, decay, layout, make_inputs, make_state):
    given, state = make_inputs(op, decay=decay), make_state(2, layout=layout)
    y, final = reference(op)(*given.values(), state, True, scale=0.7, state_layout=layout, **of_decay(decay))
    start = state.detach().transpose(-1, -2) if layout == "kv" else state.detach()
    want_y, want_final = formula(op, given, start.numpy(), [(0, 0, 5), (1, 0, 5)], 0.7, decay)
    close(y, want_y)
    close(final.transpose(-1, -2) if layout == "kv" else final, want_final)
    assert final.is_contiguous()


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "wkv7"])
def test_defaults_are_raw_decay_value_key_layout_zero_state_and_no_scale(op, make_inputs):
    given = make_inputs(op, low=-1.0)
    y, final = getattr(rwkv_jit, f"{op}_ref")(*given.values())
    want_y, want_final = formula(op, given, np.zeros((2, 2, 4, 3)), [(0, 0, 5), (1, 0, 5)], 1.0, "raw")
    close(y, want_y)
    assert final is None
    close(getattr(rwkv_jit, f"{op}_ref")(*given.values(), None, True)[1], want_final)


@pytest.mark.parametrize("op", ["gla", "linear_attention"])
def test_defaults_are_log_decay_key_value_layout_zero_state_and_the_scale_of_attention(op, make_inputs):
    given = make_inputs(op)
    y, final = getattr(rwkv_jit, f"{op}_ref")(*given.values(), None, True)
    want_y, want_final = formula(op, given, np.zeros((2, 2, 4, 3)), [(0, 0, 5), (1, 0, 5)], 3**-0.5, "log")
    close(y, want_y)
    close(final.transpose(-1, -2), want_final)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_values_for_any_shape_and_any_decay(op, data, make_inputs):
    sizes = {name: data.draw(st.integers(1, 4), name) for name in ("heads", "head_size", "value_size")}
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4), "lengths")
    least = data.draw(st.floats(-20.0, -1e-6), "least log-decay")
    decay = "none" if op == "linear_attention" else data.draw(st.sampled_from(["raw", "log", "direct"]), "decay")
    scale = data.draw(st.floats(-2.0, 2.0), "scale")
    given = make_inputs(op, batch=1, tokens=sum(lengths), decay=decay, low=least, high=least / 2, **sizes)
    ends = np.cumsum([0, *lengths])
    cu_seqlens = torch.from_numpy(ends)
    y, final = reference(op)(*given.values(), None, True, cu_seqlens, scale, **of_decay(decay))
    zeros = np.zeros((len(lengths), sizes["heads"], sizes["value_size"], sizes["head_size"]))
    bounds = [(0, begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
    want_y, want_final = formula(op, given, zeros, bounds, scale, decay)
    close(y, want_y)
    close(final, want_final)


@pytest.mark.parametrize("op", OPS)
def test_one_state_for_all_sequences_is_that_state_repeated(op, make_inputs, make_state):
    given, shared = make_inputs(op), make_state(None)
    y, final = reference(op)(*given.values(), shared, True)
    repeated = shared.detach().expand(2, 2, 4, 3).clone().requires_grad_()
    want_y, want_final = reference(op)(*given.values(), repeated, True)
    close(y, want_y.detach(), rtol=0)
    close(final, want_final.detach(), rtol=0)
    (grad,) = torch.autograd.grad(y.sum() + final.square().sum(), shared)
    (want_grad,) = torch.autograd.grad(want_y.sum() + want_final.square().sum(), repeated)
    close(grad, want_grad.sum(0))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_no_tokens_give_an_empty_y_and_a_differentiable_copy_of_the_state(op, layout, packed, make_inputs, make_state):
    given, state = make_inputs(op, batch=1, tokens=0), make_state(1, layout=layout)
    cu_seqlens = torch.tensor([0, 0]) if packed else None
    y, final = reference(op)(*given.values(), state, True, cu_seqlens, state_layout=layout)
    assert y.shape == (1, 0, 2, 4)
    assert torch.equal(final, state)
    assert final.data_ptr() != state.data_ptr()
    weights = torch.rand_like(final)
    assert torch.equal(torch.autograd.grad((final * weights).sum(), state)[0], weights)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_and_no_state_give_zeros(op, make_inputs):
    _, final = reference(op)(*make_inputs(op, tokens=0).values(), None, True)
    assert torch.equal(final, torch.zeros(2, 2, 4, 3, dtype=torch.float64))


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
@pytest.mark.parametrize("op", OPS)
def test_sequence_in_two_parts_is_the_whole_sequence(op, cut, make_inputs, make_state):
    given, state = make_inputs(op), make_state(2)
    whole_y, whole_final = reference(op)(*given.values(), state, True, scale=0.7)
    first, second = of_tokens(op, given, 0, cut), of_tokens(op, given, cut, 5)
    y1, middle = reference(op)(*first, state, True, scale=0.7)
    y2, final = reference(op)(*second, middle, True, scale=0.7)
    close(torch.cat([y1, y2], 1), whole_y.detach())
    close(final, whole_final.detach())
    leaves = [*given.values(), state]
    wanted = torch.autograd.grad(whole_y.square().sum() + whole_final.sum(), leaves)
    for grad, want in zip(
        torch.autograd.grad(y1.square().sum() + y2.square().sum() + final.sum(), leaves), wanted, strict=True
    ):
        close(grad, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_each_sequence_alone(op, layout, make_inputs, make_state):
    bounds = [0, 2, 2, 5, 9, 9]
    given, state = make_inputs(op, batch=1, tokens=9), make_state(5, layout=layout)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    y, final = reference(op)(*given.values(), state, True, cu_seqlens, state_layout=layout)
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        alone = of_tokens(op, given, begin, end)
        want_y, want_final = reference(op)(*alone, state[i : i + 1], True, state_layout=layout)
        close(y[:, begin:end], want_y.detach())
        close(final[i : i + 1], want_final.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_narrow_inputs_are_computed_in_float32(op, dtype, make_inputs):
    given = make_inputs(op, dtype=dtype)
    y, final = reference(op)(*given.values(), None, True)
    exact = [x.detach().double() for x in given.values()]
    want_y, want_final = reference(op)(*exact, None, True)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(final.double(), want_final, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, want_y.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_final_state_has_the_dtype_of_the_initial_one(op, dtype, make_inputs, make_state):
    given, state = make_inputs(op, dtype=torch.bfloat16), make_state(2, dtype=dtype)
    assert reference(op)(*given.values(), state, True)[1].dtype == dtype


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


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_public_ops_are_their_references_for_any_shape(op, data, make_inputs):
    sizes = {n: data.draw(st.integers(1, 9), n) for n in ("tokens", "heads", "head_size", "value_size")}
    given = make_inputs(op, batch=1, **sizes)
    more = data.draw(st.sampled_from([{}, {"normalize": True}])) if op == "linear_attention" else {}
    y, _ = getattr(rwkv_jit, op)(*given.values(), **more)
    want, _ = getattr(rwkv_jit, f"{op}_ref")(*given.values(), **more)
    close(y, want.detach(), rtol=1e-8)
