"""The ops made of wkv7 and gla, on CPU tensors: values, gradients, decoding, what torch does with them, and faults."""

import derived_cases
import pytest
import torch
from derived_cases import (
    DELTA,
    WAYS,
    differentiate,
    error_of,
    exactly,
    is_of_heads,
    limit_of,
    make,
    pooled,
    usual_sizes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ROWS as OPS
from torch._dynamo.testing import CompileCounterWithBackend

import rwkv_jit
from rwkv_jit.call import tensors
from rwkv_jit.schedules import channel_decay
from rwkv_jit.schedules import head_decay as head_steps

CASES = pytest.mark.parametrize(("op", "how"), derived_cases.ALL)
EACH = pytest.mark.parametrize(("op", "how"), [(op, several[-1]) for op, several in WAYS.items()])
DTYPES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DECAYS = ((-1e-4, -1e-4), (0.0, 0.0), (-1.0, -0.01), (-50.0, -50.0), (-50.0, 0.0))


def is_close(found, want, limit, what=""):
    assert found.shape == want.shape, what
    found, want = found.double(), want.double()
    assert bool(found.isfinite().all()), what
    # Beside what is next to nothing, as a gradient is where a decay of e^-50 stands before it.
    assert float((found - want).norm()) <= limit * float(want.norm()) + limit * 1e-6, what


def check(case, limit):
    """Compare results and all gradients with those of the reference in float64."""
    results, grads, weights = differentiate(case)
    want, want_grads = exactly(case, weights)
    lead = next(iter(case.inputs.values()))
    assert [x.dtype for x in results] == [lead.dtype, lead.dtype if case.state is None else case.state.dtype]
    for found, x, what in zip(results, want, ("y", "state"), strict=True):
        is_close(found, x, limit, what)
    for name, grad in grads.items():
        assert (grad.dtype, grad.shape) == (case.tensors[name].dtype, case.tensors[name].shape)
        if is_of_heads(case, name) and lead.dtype != torch.float64:
            assert error_of(case, name, grad, want_grads[name]) <= limit, name
        else:
            is_close(grad, want_grads[name], limit, name)


# ---- values and gradients ----------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 3, 9, 9]], ids=["batch", "packed"])
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_references_are_the_equations(op, how, bounds, layout):
    case = make(op, how, (2 if bounds is None else 1, 9, 2, 4, 5, 3), bounds=bounds, layout=layout)
    found = case.run(getattr(rwkv_jit, f"{op}_ref"))
    for x, want, what in zip(found, derived_cases.by_hand(case), ("y", "state"), strict=True):
        is_close(x, want, 1e-12, what)


@CASES
def test_gradients_are_those_of_finite_differences(op, how):
    case = make(op, how, (1, 4, 1, 2, 3, 2))
    names = list(case.tensors)

    def results(*given):
        return case.replaced(dict(zip(names, given, strict=True))).run()

    assert torch.autograd.gradcheck(results, [x.requires_grad_() for x in case.tensors.values()])


@CASES
@settings(max_examples=12)
@given(
    batch=st.integers(1, 2), tokens=st.sampled_from([0, 1, 3, 37]), key_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5, 8]), head_size=st.integers(1, 9), value_size=st.integers(1, 7),
    decays=st.sampled_from(DECAYS), layout=st.sampled_from(["kv", "vk"]), seed=st.integers(0, 999),
)  # fmt: skip
def test_values_and_gradients(
    op, how, batch, tokens, key_heads, group, head_size, value_size, decays, layout, seed
):  # fmt: skip
    torch.manual_seed(seed)
    sizes = batch, tokens, key_heads, key_heads * group, head_size, value_size
    check(make(op, how, sizes, decays=decays, layout=layout), 1e-9)


@CASES
@settings(max_examples=8)
@given(
    ends=st.lists(st.integers(0, 37), min_size=0, max_size=5), group=st.sampled_from([1, 2, 8]),
    decays=st.sampled_from(DECAYS), seed=st.integers(0, 999),
)  # fmt: skip
def test_packed_sequences(op, how, ends, group, decays, seed):
    torch.manual_seed(seed)
    check(make(op, how, (1, 37, 1, group, 5, 4), decays=decays, bounds=[0, *sorted(ends), 37]), 1e-9)


@CASES
@pytest.mark.parametrize(("dtype", "wide"), [
    (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(op, how, dtype, wide, state_type):
    limit = max(DTYPES[dtype], DTYPES[state_type])
    check(make(op, how, (2, 21, 2, 4, 8, 6), dtype, wide, state_type), limit)


def test_products_in_the_gradient_of_D_are_not_rounded():
    """It is a sum of both signs over all tokens, of which little may be left."""
    for _ in range(20):
        case = make("ssd", "D", (3, 1, 1, 3, 16, 64), torch.bfloat16, torch.bfloat16, torch.float32)
        _, grads, weights = differentiate(case)
        _, want = exactly(case, weights)
        assert torch.allclose(grads["D"].double(), want["D"], rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "how"), [(op, how) for op, how in derived_cases.ALL if "raw" in how or "bounded" in how]
)
@pytest.mark.parametrize(("dtype", "strong", "stronger"), [
    (torch.float64, 80.0, 800.0), (torch.float32, 80.0, 100.0), (torch.bfloat16, 80.0, 100.0),
])  # fmt: skip
@pytest.mark.parametrize("name", ["", "_ref"], ids=["op", "reference"])
def test_decays_of_an_infinite_speed_are_those_of_a_large_one(op, how, dtype, strong, stronger, name):
    """e^A_log is infinite, and times a gate of 0 no number."""
    case, function, weights = make(op, how, dtype=dtype), getattr(rwkv_jit, op + name), None
    case.inputs["g"][:, 4, 0] = -200.0
    made = []
    for a_log in (strong, stronger):
        case.parameters["A_log"][1] = a_log
        results, grads, weights = differentiate(case, function, weights)
        made.append([*results, *(grad for own, grad in grads.items() if own not in ("g", "dt_bias", "A_log"))])
        assert all(x.isfinite().all() for x in grads.values())
    for x, want in zip(*made, strict=True):
        is_close(x, want, 1e-6)


@pytest.mark.parametrize(("op", "how"), [(op, how) for op, how in derived_cases.ALL if "raw" in how])
@pytest.mark.parametrize("gate", [-1000.0, -95.0, -90.0])
@pytest.mark.parametrize("name", ["", "_ref"], ids=["op", "reference"])
def test_gradients_of_a_large_speed_behind_a_small_gate(op, how, gate, name):
    """A gradient times e^A_log is infinite in float32, and times the slope of the softplus it is not."""
    case, function = make(op, how, dtype=torch.float32), getattr(rwkv_jit, op + name)
    case.parameters["A_log"][:] = 88.0
    case.inputs["g"][:] = gate
    if "dt_bias" in case.parameters:
        case.parameters["dt_bias"].clamp_(-1, 1)
    weights = [100 * torch.randn_like(x) for x in case.run(function)]
    _, grads, _ = differentiate(case, function, weights)
    _, want = exactly(case, weights)
    for own, grad in grads.items():
        is_close(grad, want[own], 1e-4, own)


@CASES
def test_without_a_state_it_begins_with_zeros_and_ends_in_float32(op, how):
    case = make(op, how, dtype=torch.bfloat16, has_state=False)
    y, final = case.run()
    want, want_final = case._replace(state=torch.zeros_like(final)).run()
    assert final.dtype == torch.float32
    assert torch.equal(y, want)
    assert torch.equal(final, want_final)
    assert getattr(rwkv_jit, op)(*case.inputs.values(), **case.parameters, **case.options)[1] is None


@CASES
def test_one_state_for_all_sequences(op, how):
    case = make(op, how)
    one = case._replace(state=case.state[0])
    results, grads, weights = differentiate(one)
    want, each, _ = differentiate(case._replace(state=case.state[:1].expand_as(case.state)), weights=weights)
    for x, y in zip(results, want, strict=True):
        is_close(x, y, 1e-12)
    is_close(grads["initial_state"], each["initial_state"].sum(0), 1e-12)


@CASES
def test_parts_with_the_state_between_them_are_one_call(op, how):
    case = make(op, how, (2, 37, 1, 2, 6, 5))
    y, final = case.run()
    parts, state = [], case.state
    for begin, end in ((0, 1), (1, 20), (20, 20), (20, 37)):
        own, state = case.part((slice(None), slice(begin, end)))._replace(state=state).run()
        parts.append(own)
    is_close(torch.cat(parts, 1), y, 1e-12)
    is_close(state, final, 1e-12)


@EACH
def test_scale_is_a_factor_of_what_the_state_says(op, how):
    case = make(op, how)._replace(parameters={}) if op == "ssd" else make(op, how)
    usual = 1.0 if op in ("hgrn2", "ssd") else 6**-0.5
    is_close(case.run(scale=3.0)[0], case.run()[0] * 3 / usual, 1e-12)
    want = case.run(getattr(rwkv_jit, f"{op}_ref"), scale=3.0)[0]
    is_close(case.run(scale=3.0)[0], want, 1e-12)


def test_ops_that_are_others_with_a_part_of_their_inputs():
    case = make("kda", "norm")
    q, k, v, g, beta = case.inputs.values()
    y, _ = case.run()
    whole, _ = rwkv_jit.gated_delta_rule2(
        q, k, v, g, beta[..., None].expand_as(g), beta[..., None].expand_as(v), case.state, qk_norm=True
    )
    of_half, _ = rwkv_jit.kda(q, k, v, g, beta, case.state, qk_norm=True, beta_map="identity", decay_bound=-1.0)
    assert torch.equal(of_half, y)
    raw = torch.log(beta / (1 - beta))
    by_map, _ = rwkv_jit.kda(q, k, v, g, raw, case.state, qk_norm=True, beta_map="sigmoid")
    is_close(by_map, rwkv_jit.kda(q, k, v, g, beta, case.state, qk_norm=True)[0], 1e-12)
    is_close(whole, by_map, 1e-12)


def test_arrays_of_other_libraries():
    for op, how in (("kda", "raw bias norm"), ("simple_gla", "fixed"), ("ssd", "D z bias softplus")):
        case = make(op, how, dtype=torch.float32)
        arrays = case.replaced({name: x.numpy() for name, x in case.tensors.items()})
        assert torch.equal(arrays.run()[0], case.run()[0])


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("kda", "gated_delta_rule2")])
def test_references_take_values_wider_than_their_keys(op):
    lead = "x" if op == "ssd" else "v"
    exact = make(op, decays=(-1.0, -0.1))
    narrow = {name: x if name == lead else x.float() for name, x in exact.inputs.items()}
    same = exact.replaced({**exact.tensors, **{name: x.double() for name, x in narrow.items()}})
    given = exact.replaced({**exact.tensors, **narrow})
    reference = getattr(rwkv_jit, f"{op}_ref")
    for x, y in zip(given.run(reference), same.run(reference), strict=True):
        assert x.dtype == y.dtype == torch.float64
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12)


# ---- how the errors of sums over tokens are measured -------------------------------------------------------------

OF_HEADS = pytest.mark.parametrize(("op", "how", "name"), [
    ("ssd", "D z bias softplus", "A"), ("ssd", "D z bias softplus", "dt_bias"), ("ssd", "D z bias softplus", "D"),
    ("simple_gla", "fixed", "g"), ("kda", "raw", "A_log"), ("gated_delta_rule", "raw bias sigmoid norm", "dt_bias"),
])  # fmt: skip


@OF_HEADS
@pytest.mark.parametrize("of", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 9]], ids=["batch", "packed"])
def test_usual_sizes_are_those_over_many_weights(op, how, name, of, bounds):
    case = make(op, how, (1, 9, 2, 4, 5, 3), bounds=bounds)
    leaf = case.tensors[name].clone().requires_grad_()
    results = case.replaced({**case.tensors, name: leaf}).run(getattr(rwkv_jit, f"{op}_ref"))
    results = [results[place] for place in of]
    usual = usual_sizes(case, name, of)
    if not any(x.requires_grad for x in results):  # D has no part in the final state
        assert not usual.any()
        return
    results = [x for x in results if x.requires_grad]
    weights = [torch.randn(4000, *x.shape, dtype=x.dtype) for x in results]
    (grads,) = torch.autograd.grad(results, leaf, weights, is_grads_batched=True)
    assert torch.allclose(grads.square().mean(0).sqrt(), usual, rtol=0.1)


@pytest.mark.parametrize(("op", "how"), derived_cases.ALL)
def test_usual_norms_are_those_over_many_weights(op, how):
    case = make(op, how, (1, 9, 2, 4, 5, 3))
    several, many = (derived_cases.usual_norms(case, draws) for draws in (400, 4000))
    for name in case.tensors:
        assert several[name] == pytest.approx(float(many[name]), rel=0.15), name
    _, want, _ = differentiate(case, getattr(rwkv_jit, f"{op}_ref"))
    name = next(iter(case.inputs))
    wrong = want[name] + 0.03 * many[name] * want[name] / want[name].norm()
    assert error_of(case, name, wrong, want[name], norm=many[name]) == pytest.approx(0.03)


@OF_HEADS
def test_an_error_of_one_head_is_seen(op, how, name):
    case = make(op, how, (1, 50, 2, 4, 16, 16), torch.bfloat16, torch.float32, torch.float32)
    _, grads, weights = differentiate(case)
    want, limit = exactly(case, weights)[1][name], limit_of(case, name, "bf16")
    usual = usual_sizes(case, name)
    assert error_of(case, name, grads[name], want) < limit
    for head in (usual.argmax(), usual.argmin()):
        share = max(1.0, derived_cases.LEAST_SHARE * float(usual.square().mean().sqrt() / usual[head]))
        wrong = want.clone()
        wrong[head] += 0.06 * share * usual[head]
        assert error_of(case, name, wrong, want) > limit


def test_one_token_less_of_fifty_is_seen():
    case = make("ssd", "bias softplus", (1, 50, 2, 4, 16, 16))
    _, want, _ = differentiate(case)
    of_tokens = want["dt"][0]
    for head in range(4):
        parts = of_tokens[:, head].abs()
        usual_part = parts.square().mean().sqrt()
        found = want["dt_bias"].clone()
        found[head] += parts[parts >= usual_part].min()
        assert error_of(case, "dt_bias", found, want["dt_bias"]) > limit_of(case, "dt_bias", "bf16")


def test_what_is_left_of_a_sum_changes_no_limit():
    """Weights for which the gradient of A is exactly nothing."""
    case = make("ssd", "", (1, 50, 1, 1, 16, 16), torch.bfloat16, torch.float32, torch.float32)
    several = [[x.double() for x in differentiate(case)[2]] for _ in range(2)]
    one, other = (float(exactly(case, weights)[1]["A"]) for weights in several)
    size = (one**2 + other**2) ** 0.5
    weights = [(x * other - y * one) / size for x, y in zip(*several, strict=True)]
    case = case._replace(inputs={name: x.float() for name, x in case.inputs.items()})
    _, grads, _ = differentiate(case, weights=weights)
    want = exactly(case, weights)[1]["A"]
    assert float(want.abs()) < 1e-6 * float(usual_sizes(case, "A"))
    assert error_of(case, "A", grads["A"], want) < limit_of(case, "A", "fp32")


# ---- over a pool -------------------------------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("state_type", [torch.float64, torch.float32])
def test_updates_token_by_token_are_the_op(op, how, state_type):
    case = make(op, how, state_type=state_type)
    y, final = case.run()
    limit = 1e-10 if state_type == torch.float64 else 1e-5
    pool, slots = torch.randn(5, *case.state.shape[1:]).to(state_type), torch.tensor([3, 1])
    before = pool.clone()
    pool[slots] = case.state
    for token in range(y.shape[1]):
        own = pooled(case.part((slice(None), token)), "update", pool, state_indices=slots)
        is_close(own, y[:, token], limit)
    is_close(pool[slots], final, limit)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


@CASES
def test_updates_of_several_tokens_are_the_op(op, how):
    case = make(op, how)
    y, final = case.run()
    pool, out = case.state.clone(), torch.full_like(y, float("nan"))
    found = pooled(case, "update", pool, out=out)
    assert found is out
    is_close(found, y, 1e-10)
    is_close(pool, final, 1e-10)


@CASES
def test_sequences_of_any_lengths_are_the_op(op, how):
    case = make(op, how, (1, 23, 2, 4, 6, 5), bounds=[0, 1, 1, 3, 23])
    y, final = case.run()
    flat = case.part(0)
    pool, slots = torch.randn(6, *case.state.shape[1:], dtype=torch.float64), torch.tensor([5, 0, 2, 3])
    pool[slots] = case.state
    begun = torch.tensor([True, False, True, False])
    again = pool.clone()
    options = {"cu_seqlens": case.cu_seqlens, "state_indices": slots}
    is_close(pooled(flat, "varlen", pool, **options), y[0], 1e-10)
    is_close(pool[slots], final, 1e-10)
    out = torch.full_like(y, float("nan"))
    found = pooled(case, "varlen", again, **options, has_initial_state=begun, out=out)
    zeros = torch.where(begun[:, None, None, None], case.state, torch.zeros(()))
    want, want_final = case._replace(state=zeros).run()
    assert found is out
    is_close(found, want, 1e-10)
    is_close(again[slots[2:]], want_final[2:], 1e-10)


@CASES
@pytest.mark.parametrize("kind", ["update", "varlen"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["all dimensions", "without T or B"])
@pytest.mark.parametrize(("null_index", "dtype"), [(-1, torch.float64), (0, torch.bfloat16)])
def test_what_has_no_slot_gets_zeros(op, how, kind, is_whole, null_index, dtype):
    derived_cases.check_without_slots(op, how, kind, is_whole, null_index, dtype)


@EACH
@pytest.mark.parametrize("kind", ["update", "varlen"])
def test_bfloat16_over_a_pool_of_another_dtype(op, how, kind):
    case = make(op, how, (1, 9, 1, 2, 8, 6), torch.bfloat16, torch.float32, torch.float32)
    want, want_final = case.reference().run(getattr(rwkv_jit, f"{op}_ref"))
    pool = case.state.clone()
    options = {"cu_seqlens": torch.tensor([0, 9])} if kind == "varlen" else {}
    found = pooled(case, kind, pool, **options)
    assert found.dtype == torch.bfloat16
    is_close(found, want, 3e-2)
    is_close(pool, want_final, 3e-2)


@CASES
@pytest.mark.parametrize("kind", ["update", "varlen"])
def test_over_a_pool_nothing_has_a_gradient(op, how, kind):
    """Nor have parameters, which the op below does not see."""
    case = make(op, how, (1, 3, 1, 2, 4, 3))
    options = {"cu_seqlens": torch.tensor([0, 3])} if kind == "varlen" else {}
    for name in [*case.inputs, *case.parameters]:
        wanting = case.replaced({n: x.detach().requires_grad_(n == name) for n, x in case.tensors.items()})
        pool, function = case.state.clone(), getattr(rwkv_jit, f"{op}_{kind}")
        with pytest.raises(RuntimeError, match=rf"^{op}_{kind}: changes the states in place and has no gradient; use"):
            function(pool, *wanting.inputs.values(), **wanting.parameters, **case.options, **options)
        assert torch.equal(pool, case.state)


# ---- what torch does with them -----------------------------------------------------------------------------------


@EACH
def test_autocast_casts_as_the_ops_below_do(op, how):
    case = make(op, how, dtype=torch.float32)
    narrow = {
        name: x if name in (*derived_cases.WIDE, "initial_state", "z") else x.bfloat16()
        for name, x in case.tensors.items()
    }
    want, want_final = case.replaced(narrow).run()
    with torch.autocast("cpu", torch.bfloat16):
        (y, final), grads, _ = differentiate(case)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want)
    assert torch.equal(final, want_final)
    assert {grad.dtype for grad in grads.values()} == {torch.float32}


@EACH
def test_compiled_calls_of_any_length(op, how):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for tokens in (11, 12, 19):
        case = make(op, how, (2, tokens, 2, 4, 6, 5))
        results, grads, weights = differentiate(case)
        own, own_grads, _ = differentiate(case, compiled, weights)
        for x, y in zip([*own, *own_grads.values()], [*results, *grads.values()], strict=True):
            is_close(x, y, 1e-12)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0]


@CASES
def test_torch_func_grad(op, how):
    case = make(op, how)
    names = list(case.tensors)
    _, grads, weights = differentiate(case)

    def total(*given):
        results = case.replaced(dict(zip(names, given, strict=True))).run()
        return sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))

    found = torch.func.grad(total, argnums=tuple(range(len(names))))(*case.tensors.values())
    for name, grad in zip(names, found, strict=True):
        is_close(grad, grads[name], 1e-12, name)


@EACH
def test_vmap_over_inputs(op, how):
    case = make(op, how)
    streamed = [name for name in OPS[op].inputs if case.inputs[name].dim() > 1]
    streamed += [name for name in ("z",) if name in case.parameters]
    several = [make(op, how) for _ in range(3)]
    mapped = {name: torch.stack([(x.inputs | x.parameters)[name] for x in several]) for name in streamed}

    def y_of(own):
        return case.replaced(case.tensors | own).run()[0]

    found = torch.vmap(y_of)(mapped)
    for i, y in enumerate(found):
        is_close(y, y_of({name: x[i] for name, x in mapped.items()}), 1e-12)


@EACH
def test_checkpointing_repeats_the_call(op, how):
    case = make(op, how)
    _, want, weights = differentiate(case)

    def again(*given, **options):
        return torch.utils.checkpoint.checkpoint(getattr(rwkv_jit, op), *given, use_reentrant=False, **options)

    _, found, _ = differentiate(case, again, weights)
    for name, grad in want.items():
        assert torch.equal(found[name], grad)


@pytest.mark.parametrize("op", ["kda", "simple_gla", "ssd"])
def test_second_derivatives_are_refused(op):
    case = make(op)
    leaves = {name: x.requires_grad_() for name, x in case.tensors.items()}
    y, _ = case.replaced(leaves).run()
    first = next(iter(leaves.values()))
    (grad,) = torch.autograd.grad(y.square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative; differentiate .*_ref.* twice instead"):
        grad.sum().backward()


# ---- faults ------------------------------------------------------------------------------------------------------

ZEROS = torch.zeros
OF_SIZES = (2, 13, 2, 4, 6, 5)
FAULTS = [
    ("kda", "", ValueError, r"q: expected 4 dimensions", {"q": ZEROS(2, 13)}),
    ("kda", "", TypeError, "q: expected torch.float16 or", {"q": ZEROS(2, 13, 2, 6).int()}),
    ("kda", "", ValueError, r"k: expected shape \[2, 13, 2, 6\] like q, got", {"k": ZEROS(2, 13, 4, 6)}),
    ("kda", "", ValueError, r"v: expected shape", {"v": ZEROS(2, 12, 4, 5)}),
    ("kda", "", ValueError, r"q: expected key heads that divide the 3 heads, got 2",
     {"v": ZEROS(2, 13, 3, 5), "g": ZEROS(2, 13, 3, 6), "beta": ZEROS(2, 13, 3)}),
    ("ssd", "", ValueError, r"B: expected key heads that divide the 4 heads, got 3",
     {"B": ZEROS(2, 13, 3, 6), "C": ZEROS(2, 13, 3, 6)}),
    ("kda", "", ValueError, r"g: expected shape \[2, 13, 4, 6\] like v, got", {"g": ZEROS(2, 13, 2, 6)}),
    ("kda", "", TypeError, "g: expected torch.float32 like q, got torch.float16", {"g": ZEROS(2, 13, 4, 6).half()}),
    ("kda", "", ValueError, "g: expected 4 dimensions|g: expected shape", {"g": ZEROS(2, 13, 4)}),
    ("kda", "", ValueError, r"beta: expected shape \[2, 13, 4\]", {"beta": ZEROS(2, 13, 4, 6)}),
    ("kda", "", ValueError, "beta_map: expected one of identity, sigmoid, twice_sigmoid", {"beta_map": "tanh"}),
    ("kda", "", ValueError, "dt_bias: needs A_log too", {"dt_bias": ZEROS(4, 6)}),
    ("kda", "", ValueError, "dt_bias: needs A_log too", {"dt_bias": ZEROS(4, 6).numpy()}),
    ("kda", "", ValueError, "lower_bound: needs A_log too", {"lower_bound": -5.0}),
    ("kda", "raw", ValueError, "lower_bound: expected a negative number, got 5.0", {"lower_bound": 5.0}),
    ("kda", "raw", ValueError, "lower_bound: expected a negative number, got 0", {"lower_bound": 0}),
    ("kda", "raw", ValueError, "lower_bound: expected a finite number", {"lower_bound": "low"}),
    ("kda", "raw", ValueError, r"A_log: expected shape \[4\]", {"A_log": ZEROS(2)}),
    ("kda", "raw", TypeError, "A_log: expected torch.float32", {"A_log": ZEROS(4).half()}),
    ("kda", "raw", ValueError, r"dt_bias: expected shape \[4, 6\] or \[24\], got \[4\]", {"dt_bias": ZEROS(4)}),
    ("kda", "", ValueError, "initial_state: expected shape", {"initial_state": ZEROS(2, 4, 5, 6)}),
    ("kda", "", TypeError, "initial_state: expected", {"initial_state": ZEROS(2, 4, 6, 5).int()}),
    ("kda", "", ValueError, "cu_seqlens: expected a batch of 1", {"cu_seqlens": torch.tensor([0, 13])}),
    ("kda", "", TypeError, "cu_seqlens: expected torch.int32", {"cu_seqlens": ZEROS(3)}),
    ("kda", "", ValueError, "decay: expected one of log, got 'raw'", {"decay": "raw"}),
    ("kda", "", ValueError, "decay_bound: expected a negative number", {"decay_bound": 1.0}),
    ("kda", "", ValueError, "state_layout: expected one of", {"state_layout": "hk"}),
    ("kda", "", TypeError, r"kda\(\) got an unexpected keyword argument 'chunk'", {"chunk": 1}),
    ("gated_delta_rule", "", ValueError, r"g: expected shape \[2, 13, 4\]", {"g": ZEROS(2, 13, 4, 6)}),
    ("gated_delta_rule", "raw", ValueError, r"dt_bias: expected shape \[4\]", {"dt_bias": ZEROS(4, 6)}),
    ("gated_delta_rule", "", TypeError, "unexpected keyword argument 'decay_bound'", {"decay_bound": -1.0}),
    ("delta_rule", "", ValueError, r"beta: expected shape \[2, 13, 4\]", {"beta": ZEROS(2, 13, 2)}),
    ("delta_rule", "", ValueError, "beta_map: expected one of", {"beta_map": None}),
    ("gated_delta_rule2", "norm", ValueError, r"beta: expected shape \[2, 13, 4, 6\]", {"beta": ZEROS(2, 13, 4, 5)}),
    ("gated_delta_rule2", "norm", ValueError, r"write_gate: expected shape \[2, 13, 4, 5\]",
     {"write_gate": ZEROS(2, 13, 4, 6)}),
    ("gated_delta_rule2", "norm", TypeError, "write_gate: expected torch.float32",
     {"write_gate": ZEROS(2, 13, 4, 5).half()}),
    ("simple_gla", "", ValueError, r"g: expected .*dimensions|g: expected shape", {"g": ZEROS(3)}),
    ("simple_gla", "", ValueError, r"g: expected shape \[2, 13, 4\]", {"g": ZEROS(2, 13, 2)}),
    ("hgrn2", "", ValueError, r"v: expected shape", {"v": ZEROS(2, 13, 2, 5)}),
    ("ssd", "", ValueError, r"A: expected shape \[4\]", {"A": ZEROS(2)}),
    ("ssd", "", TypeError, "A: expected torch.float32", {"A": ZEROS(4).half()}),
    ("ssd", "", ValueError, r"dt: expected shape \[2, 13, 4\]", {"dt": ZEROS(2, 13, 2)}),
    ("ssd", "", ValueError, r"C: expected shape \[2, 13, 2, 6\]", {"C": ZEROS(2, 13, 1, 6)}),
    ("ssd", "", ValueError, r"D: expected shape \[4(, 5)?\] or \[4(, 5)?\], got \[4, 6\]", {"D": ZEROS(4, 6)}),
    ("ssd", "", TypeError, "D: expected torch.float32", {"D": ZEROS(4).double()}),
    ("ssd", "", ValueError, r"z: expected shape \[2, 13, 4, 5\]", {"z": ZEROS(2, 13, 20)}),
    ("ssd", "", ValueError, r"dt_bias: expected shape \[4\]", {"dt_bias": ZEROS(4, 5)}),
    ("ssd", "", ValueError, "dt_limit: expected a pair of numbers that does not fall", {"dt_limit": (1.0, 0.5)}),
    ("ssd", "", ValueError, "dt_limit: expected a pair", {"dt_limit": 0.5}),
    ("ssd", "", ValueError, "dt_limit: expected a pair", {"dt_limit": (0.0, float("nan"))}),
    ("ssd", "", ValueError, "initial_state: expected shape", {"initial_state": ZEROS(2, 4, 6, 5)}),
]  # fmt: skip
OF_SEQUENCES_ALONE = ("initial_state", "cu_seqlens", "decay", "decay_bound", "chunk")


@pytest.mark.parametrize(("op", "how", "error", "match", "change"), FAULTS)
def test_faults(op, how, error, match, change, monkeypatch):
    """Each names its argument, before anything has run: over a pool too, whose states are as they were."""
    case = make(op, how, OF_SIZES, torch.float32)
    ran = []
    for runs in ("run", "loop"):
        monkeypatch.setattr(f"rwkv_jit.call.plain.{runs}", lambda *_, **__: ran.append(1))
    named = {**case.inputs, "initial_state": case.state, **case.parameters, **case.options, **change}
    with pytest.raises(error, match=f"^(?:{match})" if "unexpected" not in match else match):
        getattr(rwkv_jit, op)(**named)
    assert ran == []
    if not change.keys() & {*OF_SEQUENCES_ALONE}:
        pool = case.state.clone()
        del named["initial_state"]
        with torch.no_grad(), pytest.raises(error, match=match):
            getattr(rwkv_jit, f"{op}_update")(pool, **named)
        assert torch.equal(pool, case.state)


@pytest.mark.parametrize("op", list(WAYS))
def test_faults_of_a_pool(op):
    case = make(op, WAYS[op][-1], dtype=torch.float32)
    for error, match, options in (
        (ValueError, "state_indices: expected shape", {"state_indices": torch.tensor([0])}),
        (ValueError, "out: expected shape", {"out": ZEROS(3)}),
        (TypeError, f"{op}_update.. got an unexpected keyword argument 'decay'", {"decay": "log"}),
        (ValueError, "scale: expected a finite number", {"scale": "large"}),
        (ValueError, "state_layout: expected one of", {"state_layout": "hk"}),
    ):
        pool = case.state.clone()
        with pytest.raises(error, match=match):
            pooled(case, "update", pool, **options)
        assert torch.equal(pool, case.state)
    with pytest.raises(ValueError, match="state: expected shape"):
        pooled(case, "update", case.state[:, :, :-1])


@pytest.mark.parametrize("op", DELTA)
def test_a_flag_may_be_anything_that_is_true_or_false(op):
    case = make(op, "norm")
    want = case.run()[0]
    assert torch.equal(case._replace(options={**case.options, "qk_norm": 1}).run()[0], want)
    assert torch.equal(case._replace(options={**case.options, "qk_norm": torch.tensor(True)}).run()[0], want)
    with pytest.raises(TypeError, match="qk_norm: expected True or False"):
        case._replace(options={**case.options, "qk_norm": ZEROS(2)}).run()


# ---- several GPUs --------------------------------------------------------------------------------------------------


@CASES
def test_kernels_run_on_the_gpu_of_the_inputs_whichever_is_current(op, how, on_gpu, monkeypatch):
    """The same call on one GPU after the other, of other architectures."""
    for module in (channel_decay, head_steps):
        monkeypatch.setattr(module, "LEAST_BLOCKS", 0)
    monkeypatch.setattr(tensors, "_Guards", None)  # torch's own check sees that the memory is this machine's
    for home in (1, 0, 1):
        on_gpu.home, on_gpu.current = home, 1 - home
        differentiate(make(op, how, (2, 70, 2, 2, 128, 128), torch.bfloat16, torch.float32, torch.float32))
        launches = on_gpu.take()
        assert launches
        assert on_gpu.current == 1 - home
        found = {(launch.current_device, launch.device, launch.stream) for launch in launches}
        assert found == {(home, home, 100 + home)}
        assert {launch.request.arch.removesuffix("a") for launch in launches} == {on_gpu.archs[home]}
