"""What CPU tensors run: the recurrences by halves and chunks, against the references in float64."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit
from rwkv_jit.call import plain

OPS = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
STRONG = {"raw": [math.inf, 1e30, 100.0, 88.8, 5.0], "sigmoid": [math.inf, 50.0], "log": [-math.inf, -1e30, -90.0],
          "direct": [0.0, -0.0, -0.9, 1.1, 1e-30]}  # fmt: skip


def name_of_decay(op):
    return "g" if op == "gla" else "w"


def mixed(given, op, decay, seed=0):
    """The same inputs with some very strong decays, or factors that no other map gives."""
    generator = torch.Generator().manual_seed(seed)
    given = dict(given)
    w = given[name_of_decay(op)]
    strange = torch.tensor(STRONG[decay], dtype=w.dtype)
    strange = strange[torch.randint(len(strange), w.shape, generator=generator)]
    chosen = torch.rand(w.shape, generator=generator) < 0.3
    given[name_of_decay(op)] = torch.where(chosen, strange, w.detach()).requires_grad_()
    return given


def results(function, given, state, options, wide=False):
    """y, the final state, and all gradients of a loss with random weights."""
    leaves = [x.detach().to(torch.float64 if wide else x.dtype).requires_grad_() for x in (*given.values(), state)]
    outputs = function(*leaves, True, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    weights = [g.to(x.dtype) for g, x in zip(weights, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, leaves, weights, materialize_grads=True)
    return dict(zip(("y", "final", *given, "state"), (*(x.detach() for x in outputs), *grads), strict=True))


def assert_agree(found, wanted, most, terms=()):
    """Hold every result against its own size; a sum whose `terms` may cancel against theirs."""
    for name, want in wanted.items():
        assert found[name].isfinite().all(), name
        assert found[name].shape == want.shape, name
        want = want.to(found[name].dtype).double()  # float32 has no 1e-64, which strong decays leave of a gradient
        size = dict(terms).get(name, want).norm()
        assert (found[name].double() - want).norm() <= most * size, name


def terms_of_constant_decay(given, state, options):
    """What the gradient of wkv5's w adds up, in magnitude: the gradients of a w for each token, which wkv6 has."""
    by_token = given["w"].detach().expand(given["r"].shape)
    terms = results(rwkv_jit.wkv6_ref, {**given, "w": by_token}, state, options, wide=True)["w"]
    return {"w": terms.abs().sum((0, 1))}


# ---- values and gradients ----------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients_for_any_shape_and_decay(op, data, make_inputs, make_state):
    sizes = {name: data.draw(st.integers(1, 4), name) for name in ("heads", "head_size", "value_size")}
    is_packed = data.draw(st.booleans(), "packed")
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4), "lengths")
    decay = "none" if op == "linear_attention" else data.draw(st.sampled_from([*STRONG]), "decay")
    layout = data.draw(st.sampled_from(["vk", "kv"]), "layout")
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype")
    seed = data.draw(st.integers(0, 99), "seed")
    batch = 1 if is_packed else data.draw(st.integers(1, 2), "batch")
    given = make_inputs(op, batch=batch, tokens=sum(lengths), decay=decay, dtype=dtype, seed=seed, **sizes)
    if decay != "none" and data.draw(st.booleans(), "strong"):
        given = mixed(given, op, decay, seed)
    state = make_state(len(lengths) if is_packed else batch, layout=layout, dtype=dtype, **sizes)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    options = {"cu_seqlens": ends if is_packed else None, "scale": 0.7, "state_layout": layout}
    options.update({} if decay == "none" else {"decay": decay})
    # Small chunks and pieces, so that a few tokens have many; and the loop never runs.
    chunk_len, piece = data.draw(st.sampled_from([(4, 1), (2, 60), (32, 2**16)]), "chunk_len, piece")
    with mock.patch.multiple(plain, CHUNK_LEN=chunk_len, PIECE=piece, FEWEST_TOKENS=1):
        found = results(getattr(rwkv_jit, op), given, state, options)
    wanted = results(getattr(rwkv_jit, f"{op}_ref"), given, state, options, wide=True)
    # A gradient of one number may cancel: float32 has 1 - sigmoid(5) to 1e-5.
    terms = terms_of_constant_decay(given, state, options) if op == "wkv5" else {}
    assert_agree(found, wanted, 1e-13 if dtype == torch.float64 else 3e-5, terms)


@pytest.mark.parametrize("op", OPS)
def test_float32_errors_at_usual_sizes(op, make_inputs, make_state):
    sizes = {"heads": 1, "head_size": 64, "value_size": 64}
    given = make_inputs(op, batch=1, tokens=363, dtype=torch.float32, low=-3.0, high=-1e-3, **sizes)
    state = make_state(4, dtype=torch.float32, **sizes)
    # The first and the last one have a length in common, so they run before the others.
    options = {"cu_seqlens": torch.tensor([0, 30, 31, 331, 363]), "state_layout": "vk"}
    with mock.patch.object(plain, "PIECE", 2**13):
        found = results(getattr(rwkv_jit, op), given, state, options)
    assert_agree(found, results(getattr(rwkv_jit, f"{op}_ref"), given, state, options, wide=True), 5e-6)


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_is_computed_in_float32_and_rounded_once(op, make_inputs):
    given = make_inputs(op, tokens=40, dtype=torch.bfloat16, requires_grad=False)
    y, final = getattr(rwkv_jit, op)(*given.values(), None, True)
    want, want_final = getattr(rwkv_jit, f"{op}_ref")(*(x.double() for x in given.values()), None, True)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-4)
    assert (final.double() - want_final).norm() <= 5e-6 * want_final.norm()


@pytest.mark.parametrize("kind", ["op", "reference"])
@pytest.mark.parametrize("op", ["wkv5", "wkv6", "wkv7", "gla"])
@pytest.mark.parametrize("w", [88.0, 88.8, 100.0, math.inf])
def test_raw_decay_that_forgets_all_has_no_gradient(op, kind, w, make_inputs):
    given = make_inputs(op, dtype=torch.float32)
    name = name_of_decay(op)
    given[name] = torch.full_like(given[name], w).requires_grad_()
    function = getattr(rwkv_jit, op if kind == "op" else f"{op}_ref")
    y, final = function(*given.values(), None, True, decay="raw")
    grads = torch.autograd.grad(y.sum() + final.sum(), [*given.values()])
    assert all(g.isfinite().all() for g in grads)
    assert torch.count_nonzero(grads[list(given).index(name)]) == 0


@pytest.mark.parametrize("factor", [9.0, -9.0])
@pytest.mark.parametrize("op", ["wkv6", "wkv7", "gla"])
def test_factors_whose_products_overflow_while_the_state_is_zero(op, factor, make_inputs):
    given = make_inputs(op, tokens=64, decay="direct", dtype=torch.float32)
    name = name_of_decay(op)
    factors = torch.full_like(given[name], factor)
    factors[:, 48:] = 0.5
    keys = given["k"].detach().clone()
    keys[:, :48] = 0
    given = {**given, name: factors.requires_grad_(), "k": keys.requires_grad_()}
    state = torch.zeros(2, 2, 4, 3, requires_grad=True)
    options = {"decay": "direct", "state_layout": "vk"}
    found = results(getattr(rwkv_jit, op), given, state, options)
    wanted = results(getattr(rwkv_jit, f"{op}_ref"), given, state, options)
    for each, want in wanted.items():
        torch.testing.assert_close(found[each], want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found["y"].isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_finite_spoils_nothing_before_it(op, make_inputs, make_state):
    given, state = make_inputs(op, tokens=45), make_state(2)
    want = results(getattr(rwkv_jit, op), given, state, {"state_layout": "vk"})
    for name, at in zip(given, (0, 13, 31, 32, 40, 44), strict=False):
        if given[name].dim() != 4:
            continue
        changed = given[name].detach().clone()
        changed[:, at] = math.nan
        found = results(getattr(rwkv_jit, op), {**given, name: changed}, state, {"state_layout": "vk"})
        torch.testing.assert_close(found["y"][:, :at], want["y"][:, :at], rtol=1e-12, atol=1e-12)
        assert found["y"].isnan().any()


# ---- how it is computed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_autocast_rounds_the_inputs_and_nothing_else(op, make_inputs, make_state):
    given, state = make_inputs(op, dtype=torch.float32, tokens=40), make_state(2, dtype=torch.float32)
    cast = {name: x if name in ("w", "g", "u") else x.bfloat16() for name, x in given.items()}
    options = {"state_layout": "vk"}
    want = results(getattr(rwkv_jit, op), cast, state, options)
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(plain, "PIECE", 1):
        found = results(getattr(rwkv_jit, op), given, state, options)
    assert found["y"].dtype == torch.bfloat16
    assert {found[name].dtype for name in (*given, "final", "state")} == {torch.float32}
    assert_agree(found, {name: x.double() for name, x in want.items()}, 5e-6)


@pytest.mark.parametrize("op", OPS)
def test_blocks_run_without_the_autocast_around_them(op, make_inputs):
    """An exported program calls the torch op, and no function that ends autocast before."""
    given = make_inputs(op, tokens=40, dtype=torch.float32)
    decay = "none" if op == "linear_attention" else "log"

    def found():
        return plain.run(op, [*given.values()], None, None, 1.0, decay, "vk")

    want = found()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, found(), want))


@pytest.mark.parametrize("op", OPS)
def test_only_the_last_block_is_not_computed_again(op, make_inputs):
    given = make_inputs(op, tokens=96)
    with mock.patch.object(plain, "PIECE", 1), mock.patch.object(plain, "_block", wraps=plain._block) as block:
        y = getattr(rwkv_jit, op)(*given.values())[0]
        assert block.call_count == 3
        block.reset_mock()
        y.sum().backward()
    assert block.call_count == 3 + 2


@pytest.mark.parametrize("op", OPS)
def test_intermediates_are_not_kept_until_the_backward(op, make_inputs):
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    given = make_inputs(op, tokens=320, head_size=16, value_size=16)
    w = {} if op == "linear_attention" else {"decay": "log"}
    with mock.patch.object(plain, "PIECE", 1), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y, _ = plain.run(op, [*given.values()], None, None, 1.0, *w.values() or ["none"], "vk")
    assert y.requires_grad
    # The inputs, a state every 32 tokens, and one block in ten.
    assert sum(kept.values()) < 5 * sum(x.untyped_storage().nbytes() for x in given.values())


class CountWrites(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of new tensors."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out._base is None:
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("op", [*OPS, "wkv4"])
def test_work_of_the_references_is_linear_in_tokens(op, make_inputs):
    def work(tokens):
        if op == "wkv4":
            inputs = [torch.rand(2), torch.rand(2), *torch.rand(2, 1, tokens, 2)]
            inputs = [x.requires_grad_() for x in inputs]
        else:
            inputs = [*make_inputs(op, batch=1, tokens=tokens, heads=1, head_size=2, value_size=2).values()]
        with CountWrites() as written:
            torch.autograd.grad(getattr(rwkv_jit, f"{op}_ref")(*inputs)[0].sum(), inputs)
        return written.elements

    assert work(80) < 2.2 * work(40)


@pytest.mark.parametrize("op", OPS)
def test_forward_derivative(op, make_inputs):
    given = make_inputs(op, tokens=40, requires_grad=False)
    decay = {"linear_attention": "none", "gla": "log"}.get(op, "raw")
    function = getattr(rwkv_jit, f"{op}_ref")

    def by_blocks(*inputs):
        return plain.run(op, inputs, None, None, 1.0, decay, "vk")

    def by_loop(*inputs):
        return function(*inputs, None, True, scale=1.0, state_layout="vk")

    inputs = tuple(given.values())
    tangents = tuple(torch.randn_like(x) for x in inputs)
    for found, want in zip(
        torch.func.jvp(by_blocks, inputs, tangents), torch.func.jvp(by_loop, inputs, tangents), strict=True
    ):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
