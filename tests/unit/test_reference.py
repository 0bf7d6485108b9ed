"""The references: gradients by finite differences, values against the formulas written out in NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit

OPS = ("wkv6", "wkv7")
DECAYS = ("raw", "sigmoid", "log", "direct")
LAYOUTS = ("vk", "kv")


def reference(op):
    return getattr(rwkv_jit, f"{op}_ref")


def factor(w, decay):
    if decay == "raw":
        return math.exp(-math.exp(w))
    if decay == "sigmoid":
        return math.exp(-math.exp(-0.5) / (1 + math.exp(-w)))
    return math.exp(w) if decay == "log" else w


def formula(op, given, state, bounds, scale, decay):
    """The recurrence, one number at a time. `state` [N, H, V, K]; `bounds` are (row, begin, end) of each sequence."""
    x = {name: t.detach().numpy() for name, t in given.items()}
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
                    if op == "wkv6":
                        total = 0.0
                        for j in range(head_size):
                            bonus = x["u"][h, j] * at["k"][j] * at["v"][i]
                            total += at["r"][j] * (before[i, j] + bonus)
                            s[i, j] = before[i, j] * d[j] + at["v"][i] * at["k"][j]
                        y[row, t, h, i] = scale * total
                    else:
                        removed = sum(before[i, j] * at["a"][j] for j in range(head_size))
                        for j in range(head_size):
                            s[i, j] = before[i, j] * d[j] + removed * at["b"][j] + at["v"][i] * at["k"][j]
                        y[row, t, h, i] = scale * sum(s[i, j] * at["r"][j] for j in range(head_size))
    return y, final


def close(x, want, rtol=1e-10):
    torch.testing.assert_close(x.detach(), torch.as_tensor(want), rtol=rtol, atol=1e-12)


# ---- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["packed without a state", "packed from states", "batch from one shared state"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("op", OPS)
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
        return reference(op)(*arguments, start, True, cu_seqlens, 0.7, decay, None, layout)

    leaves = [*given.values(), *([] if state is None else [state])]
    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("op", OPS)
def test_values_are_those_of_the_formula(op, decay, layout, make_inputs, make_state):
    given, state = make_inputs(op, decay=decay), make_state(2, layout=layout)
    y, final = reference(op)(*given.values(), state, True, scale=0.7, decay=decay, state_layout=layout)
    start = state.detach().transpose(-1, -2) if layout == "kv" else state.detach()
    want_y, want_final = formula(op, given, start.numpy(), [(0, 0, 5), (1, 0, 5)], 0.7, decay)
    close(y, want_y)
    close(final.transpose(-1, -2) if layout == "kv" else final, want_final)
    assert final.is_contiguous()


@pytest.mark.parametrize("op", OPS)
def test_defaults_are_raw_decay_value_key_layout_zero_state_and_no_scale(op, make_inputs):
    given = make_inputs(op, low=-1.0)
    y, final = reference(op)(*given.values())
    want_y, _ = formula(op, given, np.zeros((2, 2, 4, 3)), [(0, 0, 5), (1, 0, 5)], 1.0, "raw")
    close(y, want_y)
    assert final is None


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_values_for_any_shape_and_any_decay(op, data, make_inputs):
    sizes = {name: data.draw(st.integers(1, 4), name) for name in ("heads", "head_size", "value_size")}
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4), "lengths")
    least = data.draw(st.floats(-20.0, -1e-6), "least log-decay")
    decay = data.draw(st.sampled_from(["raw", "log", "direct"]), "decay")
    scale = data.draw(st.floats(-2.0, 2.0), "scale")
    given = make_inputs(op, batch=1, tokens=sum(lengths), decay=decay, low=least, high=least / 2, **sizes)
    ends = np.cumsum([0, *lengths])
    cu_seqlens = torch.from_numpy(ends)
    y, final = reference(op)(*given.values(), None, True, cu_seqlens, scale, decay)
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
    first = [x if name == "u" else x[:, :cut] for name, x in given.items()]
    second = [x if name == "u" else x[:, cut:] for name, x in given.items()]
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
        alone = [x if name == "u" else x[:, begin:end] for name, x in given.items()]
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


@pytest.mark.parametrize("op", OPS)
def test_unknown_decay_is_refused(op, make_inputs):
    with pytest.raises(ValueError, match="decay: expected raw, sigmoid, log or direct, got 'exp'"):
        reference(op)(*make_inputs(op).values(), decay="exp")
