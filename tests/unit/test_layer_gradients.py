"""Gradients of a layer's small work without a GPU: values, the torch ops, what is refused, what is launched."""

import layer_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import rwkv_jit
from rwkv_jit.schedules.layers import OPS

CASES = pytest.mark.parametrize(("name", "how"), layer_cases.ALL)
ENDS = [(name, how) for name, several in layer_cases.WAYS.items() for how in (several[0], several[-1])]
SOME = pytest.mark.parametrize(
    ("name", "how"), [pytest.param(*x, marks=() if x in ENDS else pytest.mark.full) for x in layer_cases.ALL]
)


def make(name, how, rows=7, heads=2, head_size=4, dtype=torch.float64, parameters=None):
    sizes = layer_cases.sizes_of(name, how, rows, heads, head_size)
    return layer_cases.make(name, how, sizes, dtype, parameters or dtype)


def check(case, limit):
    results, grads, weights = layer_cases.differentiate(case, case.run)
    want, want_grads = layer_cases.exactly(case, weights)
    for found, x in [*zip(results, want, strict=True), *((grad, want_grads[name]) for name, grad in grads.items())]:
        assert found.shape == x.shape
        scale = 1 + float(x.abs().max()) if x.numel() else 1
        assert bool(((found.double() - x).abs() <= limit * scale).all())
    for name, grad in grads.items():
        assert (grad.dtype, grad.shape) == (case.tensors[name].dtype, case.tensors[name].shape)


@CASES
@settings(max_examples=15)
@given(rows=st.integers(1, 12), heads=st.integers(1, 3), head_size=st.integers(1, 5), seed=st.integers(0, 999))
def test_values_and_gradients(name, how, rows, heads, head_size, seed):
    torch.manual_seed(seed)
    check(make(name, how, rows, heads, head_size), 1e-9)


@CASES
@pytest.mark.parametrize(("dtype", "parameters", "limit"), [
    (torch.float32, torch.float32, 1e-4), (torch.bfloat16, torch.bfloat16, 2e-2), (torch.bfloat16, torch.float32, 2e-2),
    (torch.float16, torch.float32, 4e-3),
])  # fmt: skip
def test_types(name, how, dtype, parameters, limit):
    case = make(name, how, dtype=dtype, parameters=parameters)
    if name in ("gated", "activate"):
        parameters = dtype
    check(case, limit)


@CASES
def test_each_gradient_alone_is_the_same(name, how):
    case = make(name, how)
    _, every, weights = layer_cases.differentiate(case, case.run)
    for own, grad in every.items():
        _, some, _ = layer_cases.differentiate(case, case.run, weights, {own})
        assert list(some) == [own]
        assert torch.equal(some[own], grad)


@CASES
def test_results_that_nothing_is_made_of(name, how):
    case = make(name, how)
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in case.tensors.items()}
    first, *others = case.run(leaves)
    want = case.plainly(leaves)[0]
    asked = [x for x in leaves.values() if x.requires_grad]
    found = torch.autograd.grad(first.sum(), asked, allow_unused=True, materialize_grads=True)
    plainly = torch.autograd.grad(want.sum(), asked, allow_unused=True, materialize_grads=True)
    for x, y in zip(found, plainly, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert all(x.requires_grad for x in others)


@CASES
def test_torch_ops_are_what_torch_expects(name, how, pytestconfig):
    """The forward, and under a compiler with its gradients; and the backward of all gradients, of one or of none, in
    turn. Each of these, and each under a compiler, with --full.
    """
    case = make(name, how, dtype=torch.float32)
    inputs = [case.tensors.get(x) for x in OPS[name].inputs]
    inputs = [x if x is None else x.requires_grad_() for x in inputs]
    if name in layer_cases.SHIFTS:
        inputs.append(case.tensors.get("cu_seqlens"))
    kinds = [case.options["gate"], case.options["norm"]] if name == "gated_norm" else case.options.get("kinds", [])
    kinds = [case.options["gate"]] if name == "gated" else list(kinds)
    kinds = ["float32"] if name == "norm_shift" else kinds
    kinds = [case.options.get("rate_map", "sigmoid")] if name == "prepare_keys" else kinds
    given = (*inputs, 64e-5, kinds, True)
    torch.library.opcheck(getattr(torch.ops.rwkv_jit, f"{name}_fwd").default, given)
    results = getattr(torch.ops.rwkv_jit, f"{name}_fwd")(*given)
    places = [torch.randn_like(x) for x in (results if isinstance(results, tuple) else (results,))]
    wanted = [x for x, y in zip(OPS[name].inputs, inputs, strict=False) if y is not None]
    plain = [x if x is None else x.detach() for x in inputs]
    if name == "norm_shift":  # whose backward takes the residual for x, and what the forward made for it
        wanted, plain[:2] = [x for x in wanted if x != "add"], [results[0].detach(), None]
        places[-1:] = []
        plain.append(results[-1])
    backward = getattr(torch.ops.rwkv_jit, f"{name}_bwd").default
    every = (" ".join(wanted), wanted[0], "")
    place = layer_cases.ALL.index((name, how)) % len(every)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if is_full := pytestconfig.getoption("--full"):
        checks.append("test_aot_dispatch_dynamic")
    for names in every if is_full else every[place : place + 1]:
        torch.library.opcheck(backward, (*plain, *places, 64e-5, kinds), {"wanted": names}, test_utils=checks)


@SOME
def test_compiled_calls_of_any_length(name, how):
    torch._dynamo.reset()
    counter, first = CompileCounterWithBackend("aot_eager"), make(name, how)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(given):
        return first.run(given)

    counts = []
    for rows in (11, 12, 13):
        case = make(name, how, rows=rows if "packed" in how or name not in layer_cases.SHIFTS else 3 * rows)
        results, grads, weights = layer_cases.differentiate(case, case.run)
        own, own_grads, _ = layer_cases.differentiate(case, compiled, weights)
        for x, y in zip([*results, *grads.values()], [*own, *own_grads.values()], strict=True):
            assert torch.equal(x, y)
        counts.append(counter.frame_count)
    assert counts[-1] - counts[0] <= ("packed" in how)  # texts are as many as something else once


@CASES
def test_second_derivatives_are_refused(name, how):
    case = make(name, how)
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in case.tensors.items()}
    first = next(x for x in leaves.values() if x.requires_grad)
    (grad,) = torch.autograd.grad(case.run(leaves)[0].square().sum(), first, create_graph=True)
    message = f"{name} has no second derivative; differentiate {name}_ref twice instead"
    with pytest.raises(RuntimeError, match=message):
        grad.sum().backward()


@CASES
def test_torch_func(name, how):
    case = make(name, how)
    names = [n for n, x in case.tensors.items() if x.is_floating_point()]

    def total(*given):
        return sum(x.square().sum() for x in case.run(case.tensors | dict(zip(names, given, strict=True))))

    given = [case.tensors[n] for n in names]
    found = torch.func.grad(total, argnums=tuple(range(len(names))))(*given)
    leaves = [x.detach().requires_grad_() for x in given]
    want = torch.autograd.grad(total(*leaves), leaves, allow_unused=True, materialize_grads=True)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)


def test_checkpointed_and_under_autocast():
    case = make("gated_norm", "bias bonus", dtype=torch.bfloat16, parameters=torch.float32)
    _, want, weights = layer_cases.differentiate(case, case.run)
    with torch.autocast("cpu", torch.bfloat16):
        _, found, _ = layer_cases.differentiate(
            case, lambda leaves: torch.utils.checkpoint.checkpoint(case.run, leaves, use_reentrant=False), weights
        )
    for name, grad in want.items():
        assert torch.equal(found[name], grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_text_may_be_cut_before_its_norm_too(dtype):
    case = make("norm_shift", "6 add", dtype=dtype)
    given = case.tensors | {"x": torch.randn(2, 9, 8).to(dtype), "add": torch.randn(2, 9, 8).to(dtype)}
    leaves = {own: x.detach().requires_grad_() for own, x in given.items()}
    residual, mixed, last = rwkv_jit.norm_shift(**leaves)
    parts, before = [], None
    for part in (slice(0, 4), slice(4, 4), slice(4, 9)):
        own = leaves | {"x": leaves["x"][:, part], "add": leaves["add"][:, part]}
        *made, before = rwkv_jit.norm_shift(**own, first=before)
        parts.append([made[0], *made[1]])
    joined = [torch.cat(several, 1) for several in zip(*parts, strict=True)]
    for x, y in zip([*joined, before], [residual, *mixed, last], strict=True):
        assert torch.equal(x, y)
    weights = [torch.randn_like(x) for x in [*joined, before]]
    found = torch.autograd.grad([*joined, before], [*leaves.values()], weights)
    want = torch.autograd.grad([residual, *mixed, last], [*leaves.values()], weights)
    limit = 1e-9 if dtype == torch.float64 else 0.1
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=limit, atol=limit)


@pytest.mark.parametrize("how", layer_cases.WAYS["norm_shift"])
def test_mixes_of_16_bits_beside_a_residual_of_float32(how):
    case = make("norm_shift", how, dtype=torch.float32)
    narrow = {own: x.bfloat16() if own in ("add", "first") else x for own, x in case.tensors.items()}
    case = case._replace(tensors=narrow, options={"dtype": torch.bfloat16})
    results, grads, weights = layer_cases.differentiate(case, case.run)
    want, want_grads = layer_cases.exactly(case, weights)
    assert [x.dtype for x in results] == [torch.float32, *[torch.bfloat16] * (len(results) - 1)]
    for x, y in [*zip(results, want, strict=True), *((grad, want_grads[own]) for own, grad in grads.items())]:
        torch.testing.assert_close(x.double(), y.double(), rtol=3e-2, atol=3e-2)


def test_a_text_may_be_cut_anywhere():
    x, mixes = torch.randn(2, 9, 6, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)
    x.requires_grad_(), mixes.requires_grad_()
    whole = rwkv_jit.token_shift(x, mixes)
    parts = rwkv_jit.token_shift(x[:, :4], mixes), rwkv_jit.token_shift(x[:, 4:], mixes, first=x[:, 3])
    weights = torch.randn(3, 2, 9, 6, dtype=torch.float64)
    joined = torch.stack([torch.cat(two, 1) for two in zip(*parts, strict=True)])
    assert torch.equal(joined, torch.stack(whole))
    for found, want in zip(
        torch.autograd.grad(joined, [x, mixes], weights),
        torch.autograd.grad(torch.stack(whole), [x, mixes], weights),
        strict=True,
    ):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize(("name", "how"), layer_cases.ALL)
def test_references(name, how):
    """They are what CPU tensors run, and may be differentiated twice."""
    case = make(name, how)
    reference = getattr(rwkv_jit, f"{name}_ref")
    results, grads, weights = layer_cases.differentiate(case, case.run)
    want, want_grads, _ = layer_cases.differentiate(case, lambda leaves: case.run(leaves, reference), weights)
    for x, y in zip([*results, *grads.values()], [*want, *want_grads.values()], strict=True):
        torch.testing.assert_close(x, y)
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in case.tensors.items()}
    first = next(iter(leaves.values()))
    (grad,) = torch.autograd.grad(case.run(leaves, reference)[0].square().sum(), first, create_graph=True)
    grad.square().sum().backward()
    assert bool(first.grad.isfinite().all())


# ---- faults ------------------------------------------------------------------------------------------------------

ZEROS = torch.zeros
FAULTS = [
    (
        "token_shift",
        "6",
        ValueError,
        r"x: expected shape \[batch, tokens, channels\], got \[3, 8\]",
        {"x": ZEROS(3, 8)},
    ),
    ("token_shift", "6", TypeError, "x: expected torch.float16 or", {"x": ZEROS(3, 3, 8).int()}),
    ("token_shift", "6", ValueError, r"mixes: expected shape \[1 to 6, 8\], got \[7, 8\]", {"mixes": ZEROS(7, 8)}),
    ("token_shift", "6", ValueError, r"mixes: expected shape \[1 to 6, 8\], got \[8\]", {"mixes": ZEROS(8)}),
    ("token_shift", "6", TypeError, "mixes: expected torch.float32, got", {"mixes": ZEROS(6, 8).bfloat16()}),
    ("token_shift", "5 amounts", ValueError, r"amounts: expected shape \[5, 3, 3, 8\]", {"amounts": ZEROS(5, 3, 3, 1)}),
    ("token_shift", "6", ValueError, r"first: expected shape \[3, 8\], got \[2, 8\]", {"first": ZEROS(2, 8)}),
    ("token_shift", "6", ValueError, "cu_seqlens: .* batch of 1", {"cu_seqlens": torch.tensor([0, 3])}),
    ("token_shift", "6 packed", ValueError, "cu_seqlens: expected", {"cu_seqlens": torch.tensor([0, 3, 2, 7])}),
    ("token_shift", "6 packed", ValueError, "cu_seqlens: expected", {"cu_seqlens": torch.tensor([0, 99])}),
    ("norm_shift", "6", ValueError, r"x: expected shape \[batch, tokens, channels\], got", {"x": ZEROS(3, 8)}),
    ("norm_shift", "6", ValueError, r"weight: expected shape \[8\], got \[3\]", {"weight": ZEROS(3)}),
    ("norm_shift", "6", TypeError, "bias: expected a torch.Tensor", {"bias": None}),
    ("norm_shift", "6", ValueError, r"mixes: expected shape \[1 to 6, 8\], got \[7, 8\]", {"mixes": ZEROS(7, 8)}),
    ("norm_shift", "6", ValueError, r"add: expected shape \[3, 3, 8\], got \[3, 8\]", {"add": ZEROS(3, 8)}),
    ("norm_shift", "6", TypeError, "add: expected torch.float32, got", {"add": ZEROS(3, 3, 8).half()}),
    ("norm_shift", "6", ValueError, r"first: expected shape \[3, 8\], got \[2, 8\]", {"first": ZEROS(2, 8)}),
    ("norm_shift", "6", TypeError, "dtype: expected torch.float32 or", {"dtype": torch.int32}),
    ("norm_shift", "6", ValueError, "eps: expected a finite number", {"eps": "small"}),
    ("norm_shift", "6 add packed first", ValueError, "cu_seqlens: expected", {"cu_seqlens": torch.tensor([0, 9])}),
    ("gated_norm", "bias bonus", ValueError, "r: the bonus needs r, k, v and r_k, got None", {"r": None}),
    (
        "gated_norm",
        "bias bonus",
        ValueError,
        "bonus: expected None together with r, k, v and r_k",
        {"bonus": ZEROS(7, 2, 4)},
    ),
    ("gated_norm", "bias ready bonus", ValueError, r"bonus: expected shape \[7, 2, 4\]", {"bonus": ZEROS(7, 4)}),
    ("prepare_keys", "a0 bonus", ValueError, "r: expected a tensor beside r_k, got None", {"r": None}),
    ("prepare_keys", "a0 bonus", ValueError, "r_k: expected a tensor beside r, got None", {"r_k": None}),
    ("prepare_keys", "a0 bonus", ValueError, r"r_k: expected shape \[2, 4\] or \[8\]", {"r_k": ZEROS(4)}),
    ("prepare_keys", "", ValueError, "rate_map: expected", {"rate_map": "tanh"}),
    ("gated_norm", "", ValueError, "r: the bonus needs r, k, v and r_k", {"k": ZEROS(7, 2, 4)}),
    ("gated_norm", "", ValueError, "gate: expected", {"gate": "relu"}),
    ("gated_norm", "", ValueError, "norm: expected", {"norm": "batch"}),
    ("gated_norm", "", TypeError, "weight: expected a torch.Tensor", {"weight": None}),
    ("gated", "silu", ValueError, r"g: expected shape \[7, 2, 4\], got \[7, 8\]", {"g": ZEROS(7, 8)}),
    ("gated", "silu", TypeError, "g: expected torch.float32, got torch.float16", {"g": ZEROS(7, 2, 4).half()}),
    ("gated", "silu", ValueError, "gate: expected", {"gate": "tanh"}),
]


@pytest.mark.parametrize(("name", "how", "error", "match", "change"), FAULTS)
def test_faults(name, how, error, match, change):
    case = make(name, how, dtype=torch.float32)
    for needs in (False, True):
        given = {n: x.requires_grad_(needs and x.is_floating_point()) for n, x in case.tensors.items()}
        with pytest.raises(error, match=match):
            getattr(rwkv_jit, name)(**(given | case.options | change))


@pytest.mark.parametrize("name", ["gated_norm", "activate"])
def test_what_is_written_to_out_has_no_gradient(name):
    case = make(name, layer_cases.WAYS[name][0], dtype=torch.float32)
    out = case.run(case.tensors)[0]
    first = next(iter(case.tensors.values())).requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}: results in out have no gradient"):
        getattr(rwkv_jit, name)(**case.tensors, **case.options, out=out)
    if name == "activate":
        with pytest.raises(RuntimeError, match="activate: results in out"):
            rwkv_jit.activate(first, case.options["kinds"], out=first)
    with torch.no_grad():
        assert getattr(rwkv_jit, name)(**case.tensors, **case.options, out=out) is out


def test_nothing_is_made_of_no_rows():
    for name, how in layer_cases.ALL:
        if "packed" not in how:
            check(make(name, how, rows=0), 0)


# ---- torch.vmap --------------------------------------------------------------------------------------------------


def mapped(name, how, count=3):
    """A call for each of several, and one whose rows are theirs, side by side in a dimension of its own."""
    several = [make(name, how) for _ in range(count)]
    letters = OPS[name].inputs
    shared = {n: x for n, x in several[0].tensors.items() if "N" not in letters[n] and "S" not in letters[n]}
    several = [case._replace(tensors=case.tensors | shared) for case in several]
    rows = {n: torch.stack([case.tensors[n] for case in several], 1) for n in several[0].tensors if n not in shared}
    return several, shared, rows


@pytest.mark.parametrize(("name", "how"), [x for x in layer_cases.ALL if "packed" not in x[1]])
def test_rows_may_be_mapped(name, how):
    several, shared, rows = mapped(name, how)
    found = torch.vmap(lambda own: several[0].run(shared | own), in_dims=1)(rows)
    for i, case in enumerate(several):
        for x, y in zip(found, case.run(case.tensors), strict=True):
            torch.testing.assert_close(x[i], y)


@pytest.mark.parametrize(("name", "how"), [x for x in layer_cases.ALL if "packed" not in x[1]])
def test_gradients_of_parameters_for_each_of_those_that_are_mapped(name, how):
    several, shared, rows = mapped(name, how)

    def total(shared, own):
        return sum(x.square().sum() for x in several[0].run(shared | own))

    found = torch.vmap(torch.func.grad(total, argnums=(0, 1)), in_dims=(None, 1))(shared, rows)
    for i, case in enumerate(several):
        leaves = {n: x.detach().requires_grad_() for n, x in case.tensors.items()}
        grads = torch.autograd.grad(
            sum(x.square().sum() for x in case.run(leaves)), [*leaves.values()], allow_unused=True,
            materialize_grads=True,
        )  # fmt: skip
        for own, grad in zip(leaves, grads, strict=True):
            torch.testing.assert_close((found[0] if own in shared else found[1])[own][i], grad)


def test_parameters_and_packed_sequences_may_be_mapped():
    case = make("gated_norm", "bias silu")
    weights = torch.stack([case.tensors["weight"], 2 * case.tensors["weight"]])
    found = torch.vmap(lambda weight: case.run(case.tensors | {"weight": weight})[0])(weights)
    for x, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(x, case.run(case.tensors | {"weight": weight})[0])
    for name in layer_cases.SHIFTS:
        packed = make(name, "2 packed")
        several = torch.stack([packed.tensors["x"], 2 * packed.tensors["x"]])
        found = torch.vmap(lambda x, packed=packed: packed.run(packed.tensors | {"x": x})[0])(several)
        for x, rows in zip(found, several, strict=True):
            torch.testing.assert_close(x, packed.run(packed.tensors | {"x": rows})[0])
