"""The short causal convolution without a GPU: values and gradients in plain torch, checks, and what is launched."""

import itertools

import plain_convolution
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import check_sums
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rwkv_jit
from rwkv_jit.desk import kernel_table
from rwkv_jit.kernels import signatures, template
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.layers import calls
from rwkv_jit.pool.arguments import INDEX_TYPES
from rwkv_jit.schedules import convolution as convolution_steps
from rwkv_jit.schedules.layers import Given, Options, Sequences
from rwkv_jit.schedules.problem import BYTES
from rwkv_jit.schedules.schedule import Result

B, T, C, W, SLOTS = 3, 7, 12, 4, 7
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
DTYPE = pytest.mark.parametrize("dtype", LIMITS)
OPS = torch.ops.rwkv_jit
BOUNDS = [0, 0, 2, 7, 7, 8, 13]


def check(x, want, times=1, size=None):
    """Compare with what is wanted, by its norm or by a `size`."""
    x, want = x.detach(), want.detach()
    assert x.shape == want.shape
    size = want.norm() if size is None else size
    assert float((x.double() - want).norm()) <= times * LIMITS[x.dtype] * max(float(size), 1e-3)


def make(shape=(B, T, C), width=W, dtype=torch.float32, parameters=None, texts=None, bias=True, state=True):
    """Arguments of `causal_conv1d` by name."""
    made = {"x": torch.randn(shape), "weight": torch.randn(shape[-1], width)}
    made |= {"bias": torch.randn(shape[-1])} if bias else {}
    made |= {"initial_state": torch.randn(texts or shape[0], shape[-1], width - 1)} if state else {}
    wide = parameters or dtype
    return {n: x.to(wide if n in ("weight", "bias") else dtype).requires_grad_() for n, x in made.items()}


def make_update(shape=(B, C), width=W, dtype=torch.float32, kept=None, bias=True, state_len=None):
    """Arguments of `causal_conv1d_update` by name."""
    made = {n: x.detach() for n, x in make((1, 1, shape[-1]), width, dtype, bias=bias, state=False).items()}
    pool = torch.randn(SLOTS, shape[-1], state_len or width - 1).to(kept or dtype)
    return made | {"x": torch.randn(shape).to(dtype), "conv_state": pool}


def run(arguments, function=None, weights=None, **options):
    """y, the final state, and the gradients of all arguments."""
    function = function or rwkv_jit.causal_conv1d
    y, final = function(**arguments, output_final_state=True, **options)
    weights = weights or [torch.randn(x.shape).to(x.dtype) for x in (y, final)]
    return y, final, torch.autograd.grad([y, final], [*arguments.values()], weights), weights


def reference(arguments, weights, **options):
    exact = {n: x.detach().double().requires_grad_() for n, x in arguments.items()}
    y, final = plain_convolution.causal_conv1d(**exact, **options)
    return y, final, torch.autograd.grad([y, final], [*exact.values()], [x.double() for x in weights])


# ---- values ------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(data=st.data())
def test_values_and_gradients(data):
    width, channels = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([1, 2, 5, 12]))
    dtype = data.draw(st.sampled_from(list(LIMITS)))
    parameters = data.draw(st.sampled_from([dtype, torch.float32]))
    options = {"activation": data.draw(st.sampled_from([None, "silu"]))}
    if data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any))
        bounds = [0, *itertools.accumulate(lengths)]
        options["cu_seqlens"] = torch.tensor(bounds, dtype=data.draw(st.sampled_from(INDEX_TYPES)))
        shape, texts = (1, bounds[-1], channels), len(lengths)
    else:
        shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), channels
        texts = shape[0]
    has_bias, has_state = data.draw(st.booleans()), data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    arguments = make(shape, width, dtype, parameters, texts, has_bias, has_state)
    y, final, grads, weights = run(arguments, **options)
    want, want_final, wanted = reference(arguments, weights, **options)
    assert y.dtype == final.dtype == dtype
    check(y, want)
    assert torch.equal(final.double(), want_final)
    # Sums whose terms cancel lose digits: what the terms add up to without their signs is the size of an error.
    options.pop("activation")
    terms = reference({n: x.abs() for n, x in arguments.items()}, [x.abs() for x in weights], **options)[2]
    for x, grad, own, sizes in zip(arguments.values(), grads, wanted, terms, strict=True):
        assert grad.dtype == x.dtype
        found = grad if dtype == torch.float64 and x.dtype != dtype else grad.to(dtype)
        check(found, own, 4, sizes.norm())  # a sum of two


@pytest.mark.parametrize("activation", [None, "silu"])
def test_as_torch_has_it(activation):
    arguments = make(dtype=torch.float64, state=False)
    x, weight, bias = arguments.values()
    want = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=W - 1, groups=C)[..., :T].transpose(1, 2)
    found, state = rwkv_jit.causal_conv1d(**arguments, activation=activation)
    check(found, F.silu(want) if activation else want)
    assert state is None


@DTYPE
def test_a_text_may_be_cut_anywhere(dtype):
    arguments = make((2, 9, C), dtype=dtype)
    whole, final = rwkv_jit.causal_conv1d(**arguments, output_final_state=True)
    for cuts in ([0, 4, 9], [0, 1, 2, 9], [0, 2, 2, 3, 9], range(10)):
        state, made = arguments["initial_state"], []
        for begin, end in itertools.pairwise(cuts):
            part = arguments | {"x": arguments["x"][:, begin:end], "initial_state": state}
            y, state = rwkv_jit.causal_conv1d(**part, output_final_state=True)
            made.append(y)
        assert torch.equal(torch.cat(made, 1), whole)
        assert torch.equal(state, final)
    grads = [torch.autograd.grad(x.float().square().sum(), [*arguments.values()]) for x in (whole, torch.cat(made, 1))]
    for grad, want in zip(*grads, strict=True):
        check(grad, want.double(), 4)


@DTYPE
def test_packed_texts_have_what_each_has_alone(dtype):
    arguments = make((1, BOUNDS[-1], C), dtype=dtype, texts=len(BOUNDS) - 1)
    whole = rwkv_jit.causal_conv1d(**arguments, cu_seqlens=torch.tensor(BOUNDS), output_final_state=True)
    for n, (begin, end) in enumerate(itertools.pairwise(BOUNDS)):
        own = {"x": arguments["x"][:, begin:end], "initial_state": arguments["initial_state"][n : n + 1]}
        y, state = rwkv_jit.causal_conv1d(**(arguments | own), output_final_state=True)
        assert torch.equal(y, whole[0][:, begin:end])
        assert torch.equal(state, whole[1][n : n + 1])


@pytest.mark.parametrize("tokens", [1, T])
def test_final_states_hold_no_other_memory(tokens):
    for width in (2, W):
        arguments = make((1, tokens, 1), width, state=False)
        _, state = rwkv_jit.causal_conv1d(**arguments, output_final_state=True)
        assert state.untyped_storage().nbytes() == 4 * (width - 1)
        assert state.is_contiguous()


def test_nothing_is_made_of_nothing():
    for shape, texts in (((0, T, C), 0), ((B, 0, C), B)):
        arguments = make(shape, texts=texts) | {"initial_state": torch.randn(texts, C, W - 1, requires_grad=True)}
        y, state, grads, _ = run(arguments)
        assert y.shape == shape
        assert torch.equal(state, arguments["initial_state"])
        assert [grad.shape for grad in grads] == [x.shape for x in arguments.values()]
        assert not grads[1].any()
    arguments = make((1, 0, C), texts=2)
    _, state = rwkv_jit.causal_conv1d(**arguments, cu_seqlens=torch.tensor([0, 0, 0]), output_final_state=True)
    assert torch.equal(state, arguments["initial_state"])
    pool = make_update((0, C))
    assert rwkv_jit.causal_conv1d_update(**pool).shape == (0, C)


def test_what_lies_elsewhere_is_read():
    arguments = make()
    want = run(arguments)
    spread = {n: torch.stack((x, x), -1).detach()[..., 0].requires_grad_() for n, x in arguments.items()}
    found = run(spread, weights=want[3])
    for x, y in zip((*found[:2], *found[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(x, y)
        assert x.is_contiguous()


# ---- a pool ------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(data=st.data())
def test_rows_of_a_pool(data):
    width, dtype = data.draw(st.integers(2, 8)), data.draw(st.sampled_from(list(LIMITS)))
    kept = data.draw(st.sampled_from([dtype, torch.float32, torch.bfloat16]))
    shape = (B, C) if data.draw(st.booleans()) else (B, data.draw(st.integers(1, 6)), C)
    state_len = data.draw(st.integers(width - 1, 10))
    arguments = make_update(shape, width, dtype, kept, data.draw(st.booleans()), state_len)
    options = {"activation": data.draw(st.sampled_from([None, "silu"]))}
    slots, null_index, active = None, -1, None
    if data.draw(st.booleans()):
        null_index = data.draw(st.integers(-2, 2))
        some = st.lists(st.integers(-3, SLOTS - 1), min_size=B, max_size=B)
        numbers = data.draw(some.filter(lambda x: len({n for n in x if n > null_index and n >= 0}) == B))
        slots = torch.tensor(numbers, dtype=data.draw(st.sampled_from(INDEX_TYPES)))
        slots[data.draw(st.integers(0, B - 1))] = null_index
    if data.draw(st.booleans()):
        active = data.draw(st.integers(0, B))
        options["num_active"] = torch.tensor([active], dtype=torch.int32)
    if data.draw(st.booleans()):
        options["cache_seqlens"] = torch.tensor(data.draw(st.lists(st.integers(0, 99), min_size=B, max_size=B))).int()
    pool = arguments["conv_state"]
    if data.draw(st.booleans()):
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    own = arguments | {"x": arguments["x"].view(B, -1, C)}
    names = {n: own[n] for n in ("x", "weight", "bias") if n in own}
    wanted = plain_convolution.update(
        **names, pool=pool, activation=options["activation"], slots=slots, null_index=null_index, active=active,
        cache_seqlens=options.get("cache_seqlens"),
    )  # fmt: skip
    out = torch.full(shape, torch.nan, dtype=dtype) if data.draw(st.booleans()) else None
    y = rwkv_jit.causal_conv1d_update(
        **(arguments | {"conv_state": pool}), state_indices=slots, null_index=null_index, out=out, **options
    )
    assert out is None or y is out
    check(y, wanted[0].view(shape))
    assert torch.equal(pool, wanted[1])


@DTYPE
def test_an_update_is_the_next_tokens_of_a_text(dtype):
    """Bit for bit, token by token and several at once."""
    arguments = {n: x.detach() for n, x in make((2, 9, C), dtype=dtype).items()}
    x, weight, bias, state = arguments.values()
    want, final = rwkv_jit.causal_conv1d(**arguments, output_final_state=True)
    for cuts in (range(10), [0, 4, 5, 9]):
        pool = torch.full((SLOTS, C, W - 1), torch.nan, dtype=dtype)
        slots = torch.tensor([5, 2])
        pool[slots] = state
        for begin, end in itertools.pairwise(cuts):
            part = x[:, begin] if end == begin + 1 else x[:, begin:end]
            y = rwkv_jit.causal_conv1d_update(part, pool, weight, bias, state_indices=slots)
            assert torch.equal(y.view(2, -1, C), want[:, begin:end])
        assert torch.equal(pool[slots], final)
        others = [slot for slot in range(SLOTS) if slot not in slots]
        assert pool[others].isnan().all()


def test_a_narrow_pool_does_not_care_where_a_text_is_cut():
    arguments = make_update((B, 5, C), kept=torch.bfloat16)
    pools = [arguments["conv_state"].clone() for _ in range(2)]
    whole = rwkv_jit.causal_conv1d_update(**(arguments | {"conv_state": pools[0]}))
    parts = [
        rwkv_jit.causal_conv1d_update(**(arguments | {"conv_state": pools[1], "x": x}))
        for x in arguments["x"].unbind(1)
    ]
    assert torch.equal(torch.stack(parts, 1), whole)
    assert torch.equal(*pools)


def test_what_changes_a_pool_has_no_gradient():
    arguments = make_update()
    for name in ("x", "weight", "bias"):
        with pytest.raises(RuntimeError, match=r"causal_conv1d_update: is for inference and has no gradient; use"):
            rwkv_jit.causal_conv1d_update(**(arguments | {name: arguments[name].clone().requires_grad_()}))


# ---- torch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_torch_accepts_the_ops(packed):
    bounds = torch.tensor([0, 2, 2, 5]) if packed else None
    for has_bias, has_state, activation in ((True, True, "silu"), (False, False, "identity")):
        arguments = make((1, 5, C), texts=3 if packed else 1, bias=has_bias, state=has_state)
        given = [arguments.get(n) for n in ("x", "weight", "bias", "initial_state")]
        torch.library.opcheck(OPS.causal_conv1d_fwd.default, (*given, bounds, 0.0, [activation], True))
        plain = [None if x is None else x.detach() for x in given]
        grad = torch.randn(1, 5, C)
        for wanted in ("", "x weight", "weight"):
            given = *plain, bounds, grad, 0.0, [activation]
            torch.library.opcheck(OPS.causal_conv1d_bwd.default, given, {"wanted": wanted})
    slots, active = torch.tensor([5, 0, -1]), torch.tensor([2], dtype=torch.int32)
    own = make_update((B, 2, C))
    for seen in (None, torch.tensor([7, 0, 2], dtype=torch.int32)):
        inputs, written = (
            [own["x"], own["weight"], own["bias"], seen, slots, active],
            [own["conv_state"], torch.empty(B, 2, C)],
        )
        given = "causal_conv1d_update", inputs, written, -1, 0.0, ["silu"]
        torch.library.opcheck(OPS.layer_step.default, given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic):
    def layer(arguments, pool, slots, **options):
        y, state = rwkv_jit.causal_conv1d(**arguments, activation="silu", output_final_state=True, **options)
        with torch.no_grad():
            x, weight = arguments["x"].detach()[:, -1], arguments["weight"].detach()
            new = rwkv_jit.causal_conv1d_update(x, pool, weight, state_indices=slots)
        return y, state, new

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (6, 9, 4) if dynamic else (6,):
        for options in ({}, {"cu_seqlens": torch.tensor([0, 2, tokens])}):
            texts = 2 if options else 1
            arguments, slots = make((1, tokens, C), texts=texts), torch.tensor([3])
            pools = [torch.zeros(SLOTS, C, W - 1) for _ in range(2)]
            several = [f(arguments, pool, slots, **options) for f, pool in zip((compiled, layer), pools, strict=True)]
            for x, y in zip(*several, strict=True):
                assert torch.equal(x, y)
            assert torch.equal(*pools)
            grads = [
                torch.autograd.grad(y.square().sum() + state.sum(), [*arguments.values()]) for y, state, _ in several
            ]
            for x, y in zip(*grads, strict=True):
                torch.testing.assert_close(x, y)


def test_checkpointed_and_under_autocast():
    arguments = make()
    want = run(arguments)

    def again(output_final_state, **named):
        return checkpoint(lambda: rwkv_jit.causal_conv1d(**named, output_final_state=True), use_reentrant=False)

    with torch.autocast("cpu", torch.bfloat16):
        found = run(arguments, again, want[3])
    for x, y in zip((*found[:2], *found[2]), (*want[:2], *want[2]), strict=True):
        assert torch.equal(x, y)


def test_each_gradient_alone_is_the_same():
    arguments = make()
    _, _, grads, (weights, _) = run(arguments)
    y, _ = rwkv_jit.causal_conv1d(**arguments)
    together = torch.autograd.grad(y, [*arguments.values()], weights)
    for name, want in zip(arguments, together, strict=True):
        alone = {n: own.detach().requires_grad_(n == name) for n, own in arguments.items()}
        y, _ = rwkv_jit.causal_conv1d(**alone)
        assert torch.equal(torch.autograd.grad(y, alone[name], weights)[0], want)


@pytest.mark.parametrize("packed", [False, True])
def test_derivatives_of_other_kinds(packed):
    """By torch.func, in forward mode and of the reference twice; a second one of the op is an error."""
    options = {"activation": "silu"} | ({"cu_seqlens": torch.tensor([0, 1, 1, T])} if packed else {})
    shape, texts = (1 if packed else B, T, C), 3 if packed else B
    arguments = make(shape, dtype=torch.float64, texts=texts)
    plain = [x.detach() for x in arguments.values()]

    def of(function):
        return lambda *given: function(*given[:3], initial_state=given[3], **options)[0]

    loss = of(rwkv_jit.causal_conv1d), of(rwkv_jit.causal_conv1d_ref)
    assert torch.equal(loss[0](*plain), loss[1](*plain))
    y = loss[0](*arguments.values())
    wanted = torch.autograd.grad(y.square().sum(), [*arguments.values()], create_graph=True)
    found = torch.func.grad(lambda *given: loss[0](*given).square().sum(), (0, 1, 2, 3))(*plain)
    tangents = [torch.randn_like(x) for x in plain]
    _, along = torch.func.jvp(lambda *given: loss[0](*given).square().sum(), tuple(plain), tuple(tangents))
    for x, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, want)
    torch.testing.assert_close(along, sum((x * own).sum() for x, own in zip(wanted, tangents, strict=True)))
    with pytest.raises(RuntimeError, match="causal_conv1d has no second derivative; differentiate causal_conv1d_ref"):
        wanted[0].sum().backward()
    torch.autograd.gradgradcheck(loss[1], [*arguments.values()], atol=1e-4, nondet_tol=0.0, fast_mode=True)


def test_reference_has_final_states():
    arguments = make()
    for x, want in zip(
        rwkv_jit.causal_conv1d_ref(**arguments, output_final_state=True),
        rwkv_jit.causal_conv1d(**arguments, output_final_state=True), strict=True,
    ):  # fmt: skip
        assert torch.equal(x, want)
    assert rwkv_jit.causal_conv1d_ref(**arguments)[1] is None


def test_tensors_without_memory():
    with FakeTensorMode():
        arguments = {n: torch.empty(x.shape, dtype=x.dtype) for n, x in make(dtype=torch.bfloat16).items()}
        y, state = rwkv_jit.causal_conv1d(**arguments, output_final_state=True)
        assert (y.shape, y.dtype, state.shape) == ((B, T, C), torch.bfloat16, (B, C, W - 1))


# ---- faults ------------------------------------------------------------------------------------------------------

FAULTS = [
    ({"x": torch.ones(T, C)}, ValueError, r"x: expected shape \[batch, tokens, channels\], got \[7, 12\]"),
    ({"x": torch.ones(B, T, C, dtype=torch.int32)}, TypeError, r"x: expected torch.float16 or .*, got torch.int32"),
    ({"x": 5}, TypeError, "x: expected a torch.Tensor or an array with __dlpack__, got int"),
    ({"weight": torch.ones(C, 9)}, ValueError, r"weight: expected shape \[12, 2 to 8\], got \[12, 9\]"),
    ({"weight": torch.ones(C, 1)}, ValueError, r"weight: expected shape \[12, 2 to 8\], got \[12, 1\]"),
    ({"weight": torch.ones(C, 1, W)}, ValueError, r"weight: expected shape \[12, 2 to 8\], got \[12, 1, 4\]"),
    ({"weight": torch.ones(C, W).half()}, TypeError, "weight: expected torch.float32, got torch.float16"),
    ({"bias": torch.ones(C, 1)}, ValueError, r"bias: expected shape \[12\], got \[12, 1\]"),
    ({"bias": torch.ones(C).bfloat16()}, TypeError, "bias: expected torch.float32, got torch.bfloat16"),
    ({"initial_state": torch.ones(B, C, W)}, ValueError, r"initial_state: expected shape \[3, 12, 3\], got"),
    ({"initial_state": torch.ones(B, C, W - 1).half()}, TypeError, "initial_state: expected torch.float32, got"),
    ({"activation": "gelu"}, ValueError, "activation: "),
    ({"activation": 5}, (TypeError, ValueError), "activation: "),
    ({"cu_seqlens": torch.tensor([0, T])}, ValueError, "cu_seqlens: expected a batch of 1 with packed sequences, got"),
]


@pytest.mark.parametrize(("change", "kind", "message"), FAULTS)
def test_a_fault_names_the_argument(change, kind, message):
    with pytest.raises(kind, match=message):
        rwkv_jit.causal_conv1d(**(make() | change))


def test_dtensors_are_refused(monkeypatch):
    monkeypatch.setattr(calls.sharding, "any_distributed", lambda arrays: None not in arrays)
    for name, arguments in (("causal_conv1d", make()), ("causal_conv1d_update", make_update())):
        with pytest.raises(TypeError, match=f"{name} takes no DTensors; pass to_local"):
            getattr(rwkv_jit, name)(**arguments)


def test_bounds_are_looked_at():
    arguments = make((1, 5, C), state=False)
    for bounds in ([0, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ValueError, match="cu_seqlens: expected values rising from 0 to 5"):
            rwkv_jit.causal_conv1d(**arguments, cu_seqlens=torch.tensor(bounds))


def test_a_compiled_call_checks_bounds_when_it_runs():
    torch._dynamo.reset()
    arguments = make((1, 5, C), state=False)
    compiled = torch.compile(rwkv_jit.causal_conv1d, fullgraph=True, backend="aot_eager")
    compiled(**arguments, cu_seqlens=torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match="cu_seqlens: expected values rising from 0 to 5"):
        compiled(**arguments, cu_seqlens=torch.tensor([0, 6, 5]))


POOL = torch.ones(SLOTS, C, W - 1)
FAULTS_OF_UPDATES = [
    ({"x": torch.ones(C)}, ValueError, r"x: expected shape \[rows, channels\] or \[rows, tokens, channels\], got"),
    ({"weight": torch.ones(C - 1, W)}, ValueError, r"weight: expected shape \[12, 2 to 8\], got \[11, 4\]"),
    ({"conv_state": POOL[..., 1:]}, ValueError, r"conv_state: expected shape \[slots, 12, 3 to 16\], got \[7, 12, 2\]"),
    ({"conv_state": torch.ones(SLOTS, C, 17)}, ValueError, "conv_state: expected shape .*, got .7, 12, 17."),
    ({"conv_state": torch.ones(SLOTS, C, W)[..., 1:]}, ValueError, "conv_state: expected slots without gaps, got"),
    ({"conv_state": POOL[:1].expand(B, -1, -1)}, ValueError, "conv_state: is changed in place; expected separate"),
    ({"conv_state": POOL.to(torch.int32)}, TypeError, "conv_state: expected torch.float16 or .*, got torch.int32"),
    ({"conv_state": POOL[:2]}, ValueError, "conv_state: expected a slot for each of the 3 rows, or state_indices"),
    ({"state_indices": torch.tensor([1, 2])}, ValueError, r"state_indices: expected shape \[3\], a slot for each row"),
    ({"state_indices": torch.tensor([1, 2, 7])}, ValueError, r"state_indices: expected slots below 7, .* got \[7\]"),
    ({"state_indices": torch.tensor([1, 2, 1])}, ValueError, r"state_indices: expected another .* got \[1\] twice"),
    ({"null_index": 0.5}, TypeError, "null_index: expected an int of 32 bits, got 0.5"),
    ({"num_active": torch.tensor([4], dtype=torch.int32)}, ValueError, "num_active: expected 0 to 3, got 4"),
    ({"num_active": torch.tensor([3])}, TypeError, "num_active: expected torch.int32, got torch.int64"),
    ({"activation": "tanh"}, ValueError, "activation: "),
    ({"out": torch.ones(B, 1, C)}, ValueError, r"out: expected shape \[3, 12\] like x, got \[3, 1, 12\]"),
    ({"out": torch.ones(C, B).T}, ValueError, "out: expected memory without gaps, got strides"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), FAULTS_OF_UPDATES)
def test_a_fault_of_an_update_changes_nothing(change, kind, message):
    arguments = make_update() | change
    before = arguments["conv_state"].clone()
    with pytest.raises(kind, match=message):
        rwkv_jit.causal_conv1d_update(**arguments)
    assert torch.equal(arguments["conv_state"], before)


# ---- what is launched --------------------------------------------------------------------------------------------


def test_the_kernels_get_what_is_given(on_gpu):
    wide = torch.randn(B, T, 3 * C)
    arguments = make() | {"x": wide[..., C : 2 * C].requires_grad_()}
    for _ in range(2):
        y, _ = rwkv_jit.causal_conv1d(**arguments, activation="silu")
        (launch,) = on_gpu.take()
        passed = launch.named
        assert {n: passed[n] for n in arguments} == {n: x.data_ptr() for n, x in arguments.items()}
        assert (passed["y"], passed["x_strides"]) == (y.data_ptr(), (3 * C * T, 3 * C))
        assert (passed["tokens"], passed["texts"], passed["runs"], passed["run_len"]) == (T, B, 1, T)
        assert launch.grid == (B, 1, 1)
        assert (launch.parameters["PACKED"], launch.parameters["GATE"], launch.parameters["WIDTH"]) == (False, 2, W)
        dy = torch.randn(B, T, C)
        grads = torch.autograd.grad(y, [*arguments.values()], dy)
        backward, *sums = on_gpu.take()
        passed = backward.named
        assert (passed["dx"], passed["dinitial_state"]) == (grads[0].data_ptr(), grads[3].data_ptr())
        check_sums(sums, backward, {"weight": grads[1], "bias": grads[2]})
        assert passed["grad_y"] == dy.data_ptr()


def test_packed_texts_have_bounds(on_gpu):
    arguments = {n: x.detach() for n, x in make((1, 5, C), state=False, bias=False).items()}
    for index, size in ((torch.int64, 8), (torch.int32, 8)):
        bounds = torch.tensor([0, 2, 2, 5], dtype=index)
        rwkv_jit.causal_conv1d(**arguments, cu_seqlens=bounds)
        (launch,) = on_gpu.take()
        assert (launch.parameters["PACKED"], launch.parameters["BOUND_BYTES"]) == (True, size)
        assert (launch.named["texts"], launch.named["tokens"]) == (3, 5)
        assert {n for n, x in launch.addresses.items() if not x} == {"bias", "initial_state"}


def test_gradients_that_nobody_wants_are_not_made(on_gpu):
    arguments = {n: x.detach() for n, x in make().items()}
    arguments["x"].requires_grad_()
    rwkv_jit.causal_conv1d(**arguments)[0].sum().backward()
    _, backward = on_gpu.take()
    absent = {"dweight_rows", "dbias_rows", "dinitial_state", "cu_seqlens"}
    assert {n for n, x in backward.addresses.items() if not x} == absent


def test_the_update_gets_the_pool(on_gpu):
    on_gpu.use("sm_90")
    memory, slots = torch.zeros(2 * SLOTS, C, W), torch.tensor([5, 2, -1])
    active = torch.tensor([2], dtype=torch.int32)
    for pool, is_last in ((memory[::2], False), (memory.view(2 * SLOTS, W, C)[::2].transpose(1, 2), True)):
        for _ in range(2):
            arguments = make_update() | {"conv_state": pool}
            y = rwkv_jit.causal_conv1d_update(**arguments, state_indices=slots, num_active=active, null_index=0)
            (launch,) = on_gpu.take()
            passed = launch.named
            assert (passed["conv_state"], passed["slot_stride"], passed["slots"]) == (pool.data_ptr(), 2 * C * W, SLOTS)
            assert (passed["state_indices"], passed["num_active"]) == (slots.data_ptr(), active.data_ptr())
            assert (passed["y"], passed["tokens"], passed["null_index"]) == (y.data_ptr(), 1, 0)
            assert (launch.parameters["STATE_LEN"], launch.parameters["CHANNELS_LAST"]) == (W, is_last)
            assert (launch.parameters["RING"], passed["cache_seqlens"]) == (False, 0)
            assert launch.grid == (B, 1, 1)
            assert launch.overlaps
            seen = torch.tensor([3, 0, 9], dtype=torch.int32)
            rwkv_jit.causal_conv1d_update(**arguments, state_indices=slots, cache_seqlens=seen)
            (launch,) = on_gpu.take()
            assert (launch.parameters["RING"], launch.named["cache_seqlens"]) == (True, seen.data_ptr())


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_the_pool_is_changed_in_place_whatever_lies_at_an_odd_address(on_gpu, name):
    """A slot has a gap behind it, so that a copy of the pool would be one that nobody sees."""
    memory = torch.zeros(2 * SLOTS, C, W - 1)
    arguments = make_update() | {"conv_state": memory[::2]}
    rwkv_jit.causal_conv1d_update(**arguments)
    x = arguments[name]
    arguments[name] = torch.zeros(x.numel() + 1)[1:].view(x.shape)
    rwkv_jit.causal_conv1d_update(**arguments)
    first, second = on_gpu.take()
    assert (first.parameters["VECTOR"], second.parameters["VECTOR"]) == (4, 1)
    assert second.named["conv_state"] == memory.data_ptr()
    assert second.named[name] == arguments[name].data_ptr()


def test_slots_on_a_gpu_are_looked_at_when_asked(on_gpu, monkeypatch):
    arguments, slots = make_update(), torch.tensor([5, 9, 0])
    rwkv_jit.causal_conv1d_update(**arguments, state_indices=slots)
    assert len(on_gpu.take()) == 1
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    signatures.forget()
    with pytest.raises(ValueError, match=r"state_indices: expected slots below 7, .* got \[9\]"):
        rwkv_jit.causal_conv1d_update(**arguments, state_indices=slots)
    assert not on_gpu.take()


@pytest.mark.parametrize("name", ["layer_convolution", "layer_convolution_update"])
def test_launches_that_may_begin_early_wait(name):
    assert "after_previous_launch(" in template.library(name).body
    assert kernel_table.described(name, {"T_IO": "bf16", "NUM_THREADS": 64})["threads"] == 64


@pytest.mark.parametrize("io", ["bf16", "fp32"])
@pytest.mark.parametrize("channels", [1, 7, 12, 100, 1000, 2048, 6144, 20_000])
@pytest.mark.parametrize("tokens", [1, 5, 77, 4096])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_blocks_have_all_channels_and_tokens(channels, tokens, io, width):
    batch, types = 3, dict.fromkeys(("x", "weight", "bias", "initial_state"), io)
    given = Given(Gpu("sm_90"), types, batch * tokens, (channels, width), results={"y": Result((), io)})
    grads = given._replace(
        types={**types, "grad_y": io}, results={f"d{n}": Result((channels,), io) for n in types}
    )  # fmt: skip
    for texts, rows in ((Sequences(batch, tokens), batch), (Sequences(5, batch * tokens, 8), 1)):
        options = Options(kinds=("silu",), texts=texts)
        for schedule in (convolution_steps.forward(given, options), convolution_steps.backward(grads, options)):
            step = schedule.launches[0]
            parameters, bind = step.parameters, step.bind
            vector = parameters["VECTOR"]
            assert channels % vector == 0
            assert vector * BYTES[io] <= 16
            assert (step.grid[1] - 1) * vector * parameters["NUM_THREADS"] < channels
            assert step.grid[1] * vector * parameters["NUM_THREADS"] >= channels
            assert step.grid[0] == rows * bind["runs"]
            assert (bind["runs"] - 1) * bind["run_len"] < bind["tokens"] <= bind["runs"] * bind["run_len"]
