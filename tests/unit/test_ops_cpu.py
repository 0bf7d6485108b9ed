"""The public ops on CPU tensors: the same torch ops as on a GPU, computed by the reference."""

import functools

import numpy as np
import pytest
import torch
from problems import by_turns

import rwkv_jit
from rwkv_jit.call import tensors

OPS = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
DECAYS = ("raw", "sigmoid", "log", "direct")
OPS_AND_DECAYS = [(op, decay) for op in OPS for decay in (DECAYS if op != "linear_attention" else ("none",))]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def public(op):
    """The op with states [.., V, K] by default, whatever its own default is."""
    return functools.partial(getattr(rwkv_jit, op), state_layout="vk")


def reference(op):
    return functools.partial(getattr(rwkv_jit, f"{op}_ref"), state_layout="vk")


def of_decay(decay):
    return {} if decay == "none" else {"decay": decay}


def loss(y, final):
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    total = (y.double() * weights).sum()
    return total if final is None else total + final.double().square().sum()


def assert_same(values, wanted, exact=False):
    """Values agree but for rounding: plain torch adds in another order than the reference does."""
    for x, want in zip(values, wanted, strict=True):
        assert x.dtype == want.dtype
        assert x.shape == want.shape
        most = 0.0 if exact else 4 * torch.finfo(x.dtype).eps
        assert (x.double() - want.double()).norm() <= most * want.double().norm()


# ---- values and gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "decay"), OPS_AND_DECAYS)
def test_values_and_gradients_are_the_references(op, decay, dtype, make_inputs, make_state):
    given, state = make_inputs(op, dtype=dtype, decay=decay), make_state(2, dtype=dtype)
    y, final = public(op)(*given.values(), state, True, scale=0.7, **of_decay(decay))
    want_y, want_final = reference(op)(*given.values(), state, True, scale=0.7, **of_decay(decay))
    assert_same((y, final), (want_y, want_final))
    leaves = [*given.values(), state]
    assert_same(torch.autograd.grad(loss(y, final), leaves), torch.autograd.grad(loss(want_y, want_final), leaves))


@pytest.mark.parametrize("op", [op for op in OPS if op != "linear_attention"])
def test_float32_decay_beside_half_inputs_keeps_its_precision(op, make_inputs):
    given, w = make_inputs(op, dtype=torch.bfloat16), "g" if op == "gla" else "w"
    given[w] = make_inputs(op, dtype=torch.float32)[w]
    y, final = public(op)(*given.values(), None, True)
    wanted = reference(op)(*given.values(), None, True)
    assert_same((y, final), wanted)
    assert torch.autograd.grad(final.sum(), given[w])[0].dtype == torch.float32
    rounded = {**given, w: given[w].bfloat16()}
    assert not torch.equal(public(op)(*rounded.values(), None, True)[1], final)


@pytest.mark.parametrize("op", OPS)
def test_gradients_when_only_the_final_state_is_used(op, make_inputs, make_state):
    given, state = make_inputs(op), make_state(2)
    leaves = [*given.values(), state]
    _, final = public(op)(*given.values(), state, True)
    _, want = reference(op)(*given.values(), state, True)
    grads = torch.autograd.grad(final.square().sum(), leaves)
    wanted = torch.autograd.grad(want.square().sum(), leaves, allow_unused=True)
    assert_same(grads, [torch.zeros_like(x) if g is None else g for g, x in zip(wanted, leaves, strict=True)])
    assert torch.count_nonzero(grads[0]) == 0  # r only makes y


@pytest.mark.parametrize("op", OPS)
def test_gradients_reach_exactly_the_inputs_that_want_one(op, make_inputs, make_state):
    wanted_y = reference(op)(*make_inputs(op).values())[0]
    for name in make_inputs(op):
        given = make_inputs(op, requires_grad=False)
        given[name].requires_grad_()
        y, _ = public(op)(*given.values())
        assert_same([y], [wanted_y])
        loss(y, None).backward()
        all_of_them = make_inputs(op)
        loss(reference(op)(*all_of_them.values())[0], None).backward()
        assert_same([given[name].grad], [all_of_them[name].grad])
        assert [n for n, x in given.items() if x.grad is not None] == [name]
    given, state = make_inputs(op, requires_grad=False), make_state(2)
    y, _ = public(op)(*given.values(), state)
    y.sum().backward()
    assert torch.count_nonzero(state.grad) > 0
    with torch.no_grad():
        y, final = public(op)(*make_inputs(op).values())
    assert (y.requires_grad, final) == (False, None)


@pytest.mark.parametrize("op", OPS)
def test_options_of_the_kernels_change_nothing(op, make_inputs):
    given = make_inputs(op)
    options = {"decay_bound": -5.0, "checkpoint_interval": 1, "chunk_len": 3, "num_threads": 5, "backend": "reference"}
    if op == "linear_attention":
        del options["decay_bound"]
    plain = public(op)(*given.values(), None, True)
    assert_same(public(op)(*given.values(), None, True, **options), plain, exact=True)


@pytest.mark.parametrize("op", OPS)
def test_gradient_keeps_a_graph_whose_derivative_is_an_error(op, make_inputs):
    leaves = list(make_inputs(op).values())
    grads = torch.autograd.grad(loss(public(op)(*leaves)[0], None), leaves, create_graph=True)
    wanted = torch.autograd.grad(loss(reference(op)(*leaves)[0], None), leaves)
    assert_same([g.detach() for g in grads], wanted)
    with pytest.raises(RuntimeError, match=f"{op} has no second derivative; differentiate {op}_ref twice instead"):
        grads[0].sum().backward()


@pytest.mark.parametrize("op", ["wkv4", *OPS])
def test_no_tokens_and_no_initial_state_leave_nothing_to_differentiate(op, make_inputs):
    of_wkv4 = dict.fromkeys("wu", torch.randn(3)) | dict.fromkeys("kv", torch.randn(2, 0, 3))
    given = make_inputs(op, tokens=0) if op != "wkv4" else {n: x.clone().requires_grad_() for n, x in of_wkv4.items()}
    y, final = getattr(rwkv_jit, op)(*given.values(), output_final_state=True)
    (y.sum() + final.sum()).backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in given.values())
    assert op == "wkv4" or torch.count_nonzero(final) == 0


@pytest.mark.parametrize("op", OPS)
def test_empty_batch(op, make_inputs, make_state):
    given, state = make_inputs(op, batch=0), make_state(0)
    y, final = public(op)(*given.values(), state, True)
    assert y.shape == (0, 5, 2, 4)
    assert final.shape == (0, 2, 4, 3)
    grads = torch.autograd.grad(y.sum() + final.sum(), [*given.values(), state])
    assert [g.shape for g in grads] == [x.shape for x in [*given.values(), state]]
    assert all(torch.count_nonzero(g) == 0 for g in grads)


@pytest.mark.parametrize("op", OPS)
def test_non_contiguous_inputs(op, make_inputs, make_state):
    given, state = make_inputs(op), make_state(2)
    want_y, want_final = reference(op)(*given.values(), state, True)
    wanted = torch.autograd.grad(loss(want_y, want_final), [*given.values(), state])

    def scattered(x):
        """The same values: heads before tokens in memory, every second channel."""
        order = (0, 2, 1, 3) if x.dim() == 4 else tuple(range(x.dim()))
        x = x.detach().permute(order)
        x = torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
        return x.permute(order).requires_grad_()

    strange = [scattered(x) for x in [*given.values(), state]]
    assert not any(x.is_contiguous() for x in strange)
    y, final = public(op)(*strange[:-1], strange[-1], True)
    assert_same((y, final), (want_y, want_final))
    assert y.is_contiguous()
    assert final.is_contiguous()
    assert_same(torch.autograd.grad(loss(y, final), strange), wanted)


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_left_as_they_were(op, make_inputs, make_state):
    given, state = make_inputs(op, batch=1), make_state(2)
    cu_seqlens = torch.tensor([0, 2, 5])
    before = [x.detach().clone() for x in [*given.values(), state, cu_seqlens]]
    y, final = public(op)(*given.values(), state, True, cu_seqlens)
    loss(y, final).backward()
    for x, was in zip([*given.values(), state, cu_seqlens], before, strict=True):
        assert torch.equal(x, was)


@pytest.mark.parametrize("op", OPS)
def test_input_changed_between_the_passes_is_an_error(op, make_inputs):
    given = make_inputs(op)
    scratch = given["k"].detach().clone()
    y, _ = public(op)(*{**given, "k": scratch}.values())
    scratch.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- arrays that are not torch's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_come_in_through_dlpack(op, writeable, make_inputs, make_state):
    given, state = make_inputs(op, batch=1, requires_grad=False), make_state(2)
    bounds = torch.tensor([0, 2, 5])
    arrays = [x.detach().numpy().copy() for x in [*given.values(), state, bounds]]
    for array in arrays:
        array.flags.writeable = writeable
    *inputs, start, cu_seqlens = arrays
    outputs = public(op)(*inputs, start, True, cu_seqlens)
    assert_same(outputs, [x.detach() for x in reference(op)(*given.values(), state, True, bounds)])


def test_numpy_arrays_are_viewed_or_copied_where_they_are_read_only_or_not_aligned():
    array = np.zeros(3, dtype=np.float32)
    tensors.from_any("r", array)[1] = 5
    assert array.tolist() == [0, 5, 0]
    array.flags.writeable = False
    tensors.from_any("r", array)[1] = 7
    assert array.tolist() == [0, 5, 0]
    packed = np.zeros(3, dtype=[("tag", "i1"), ("x", "f4")])
    packed["x"] = [1, 2, 3]
    assert tensors.from_any("r", packed["x"]).tolist() == [1, 2, 3]
    assert tensors.from_any("r", packed["x"][::-1]).tolist() == [3, 2, 1]


@pytest.mark.parametrize("name", ["r", "w", "v", "u", "initial_state", "cu_seqlens"])
def test_numpy_arrays_that_run_backwards_are_copied(name, make_inputs, make_state):
    """In torch.from_dlpack strides below zero end the process."""
    given = {n: x.detach() for n, x in make_inputs("wkv6", batch=1).items()}
    given |= {"initial_state": make_state(2).detach(), "cu_seqlens": torch.tensor([5, 3, 0])}
    arrays = {n: x.numpy() for n, x in given.items()}
    arrays["cu_seqlens"], given["cu_seqlens"] = arrays["cu_seqlens"][::-1].copy(), given["cu_seqlens"].flip(0)
    arrays[name] = np.flip(np.flip(arrays[name]).copy())
    assert min(arrays[name].strides) < 0
    assert_same(rwkv_jit.wkv6(**arrays, output_final_state=True), rwkv_jit.wkv6_ref(**given, output_final_state=True))


class Broken:
    dtype = "what"

    def __dlpack__(self, **_):
        raise RuntimeError("no such memory")

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize(
    ("strange", "message"),
    [
        (lambda x: x.numpy().astype(">f8"), "k: expected an array of numbers that torch can take .* got ndarray >f8"),
        (lambda x: x.numpy().astype("U"), "k: expected an array of numbers that torch can take .* got ndarray <U"),
        (lambda x: x.numpy().astype("O"), "k: expected an array of numbers that torch can take .* got ndarray object"),
        (lambda x: Broken(), "k: expected an array of numbers .* got Broken what: no such memory"),
        (lambda x: x.to_sparse(), "k: expected a dense tensor, got layout torch.sparse_coo"),
        (lambda x: x.float().to_mkldnn(), "k: expected a dense tensor, got layout torch._mkldnn"),
        (
            lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
            r"k: expected a dense tensor, got a nested one; pass its values\(\).unsqueeze\(0\), and its offsets\(\)",
        ),
        (lambda x: torch.nested.nested_tensor([*x]), "k: expected a dense tensor, got a nested one"),
    ],
    ids=["byte order", "strings", "objects", "broken", "sparse", "mkldnn", "jagged", "nested"],
)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
def test_arrays_that_torch_cannot_take_are_type_errors(strange, message, first, make_inputs):
    given = {n: x.detach() for n, x in make_inputs("wkv7").items()}
    odd = strange(given["k"])
    if first:
        with pytest.raises(TypeError, match=message.replace("k: ", "r: ", 1)):
            rwkv_jit.wkv7(**{**given, "r": odd})
    with pytest.raises(TypeError, match=message):
        rwkv_jit.wkv7(**{**given, "k": odd})


def test_jagged_sequences_go_in_as_the_message_says(make_inputs):
    lengths = (2, 3)
    parts = [make_inputs("wkv7", batch=1, tokens=n, requires_grad=False, seed=n) for n in lengths]
    jagged = {n: torch.nested.nested_tensor([part[n][0] for part in parts], layout=torch.jagged) for n in parts[0]}
    y, _ = rwkv_jit.wkv7(**{n: x.values().unsqueeze(0) for n, x in jagged.items()}, cu_seqlens=jagged["r"].offsets())
    assert_same(y.split(lengths, 1), [rwkv_jit.wkv7_ref(**part)[0] for part in parts])


@pytest.mark.parametrize("dtype", ["i4", "i8"])
@pytest.mark.parametrize("through", ["torch", "numpy", "data"])
def test_changed_packing_is_read_again_where_torch_cannot_see_the_change_too(dtype, through, make_inputs):
    given, memory = make_inputs("wkv7", batch=1), np.array([0, 2, 5], dtype)
    cu_seqlens = torch.from_numpy(memory)

    def change(value):
        array = {"torch": cu_seqlens, "numpy": memory, "data": cu_seqlens.data}[through]
        array[1] = value

    def final():
        return rwkv_jit.wkv7(*given.values(), output_final_state=True, cu_seqlens=cu_seqlens)[1]

    before, version = final(), cu_seqlens._version
    change(3)
    assert (cu_seqlens._version == version) == (through != "torch")
    assert not torch.equal(final(), before)
    assert_same([final()], [rwkv_jit.wkv7_ref(*given.values(), None, True, cu_seqlens)[1]])
    change(9)
    with pytest.raises(
        ValueError, match=r"cu_seqlens: expected values rising from 0 to 5 \(the tokens\), got \[0, 9, 5\]"
    ):
        final()


# ---- the torch op ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "kind"), by_turns(OPS, ("static", "dynamic", "packed")))
def test_compiles_into_one_graph_forward_and_backward(op, kind, make_inputs, make_state):
    torch._dynamo.reset()  # all these tests compile one function, which may be done a few times only

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=kind == "dynamic")
    def step(state, cu_seqlens, *arguments):
        y, final = public(op)(*arguments, state, True, cu_seqlens)
        return y * 2, final

    bounds = {"packed": ([0, 2, 5], [0, 4, 5]), "dynamic": (None, None), "static": (None,)}[kind]
    for turn, ends in enumerate(bounds):
        cu_seqlens, batch = (None, 2) if ends is None else (torch.tensor(ends), 1)
        tokens = 7 if kind == "dynamic" and turn else 5
        given = make_inputs(op, batch, tokens, dtype=torch.float32)
        state = make_state(2, dtype=torch.float32)
        y, final = step(state, cu_seqlens, *given.values())
        want_y, want_final = reference(op)(*given.values(), state, True, cu_seqlens)
        assert_same((y, final), (want_y * 2, want_final))
        leaves = [*given.values(), state]
        assert_same(
            torch.autograd.grad(loss(y, final), leaves), torch.autograd.grad(loss(want_y * 2, want_final), leaves)
        )


# ---- what it says ------------------------------------------------------------------------------------------------


def test_notice_is_one_line_of_standard_error_in_a_bare_program(child):
    code = """
import torch, rwkv_jit
x = torch.zeros(1, 2, 1, 4)
for _ in range(3):
    rwkv_jit.wkv7(x, x, x, x, x, x)
    rwkv_jit.wkv6(x, x, x, x, x[0, 0])
"""
    done = child(code, after="torch")
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["wkv7: CPU tensors run the reference in plain torch"]
