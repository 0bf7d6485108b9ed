"""The fused ops of RWKV-LM's trainer without a compiler: against formulas in float64, and in the ways it calls them."""

import re
from functools import partial

import pytest
import torch
from compat_inputs import LIMITS, calls, near  # noqa: F401
from stub_driver import called, frames
from torch.nn import functional as F
from torch.utils import cpp_extension

from rwkv_jit import compat
from rwkv_jit.compat import listed as lists
from rwkv_jit.compat.extensions import NAMES
from rwkv_jit.schedules.layers import OPS

MIX, KEYS, OUT = "rwkv7_tmix_mix6_bf16_v5", "rwkv7_tmix_kk_pre_bf16_v5", "rwkv7_tmix_lnx_rkvres_xg_bf16_v1"
RATE, VALUE, CHANNELS = "rwkv7_tmix_a_gate_bf16", "rwkv7_tmix_vres_gate_bf16_v3", "rwkv7_cmix_bf16_v5"
VALUE_IN_ROWS = "rwkv7_tmix_vres_gate_bf16_v1"
NAMESPACES = (MIX, KEYS, OUT, RATE, VALUE, VALUE_IN_ROWS, CHANNELS)
SIZES = [(2, 7, 3, 5), (1, 1, 2, 16), (3, 4, 1, 6), (2, 3, 5, 64)]  # B, T, H, N
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def installed():
    torch.manual_seed(0)
    compat.install()
    yield
    compat.uninstall()


def load(name):
    return cpp_extension.load(name=name, sources=["nowhere.cu"])


def rows(*shape, dtype=torch.float32, scale=0.7):
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)


# ---- what each op is, in plain torch -----------------------------------------------------------------------------


def mixes(x, *parameters):
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return [x + (before - x) * p.view(-1) for p in parameters]


def keys(k, k_k, a, k_a, head_size):
    kk = F.normalize((k * k_k.view(-1)).unflatten(-1, (-1, head_size)), dim=-1).flatten(-2)
    return [k * (1 + (a - 1) * k_a.view(-1)), -kk, kk * a]


def out(x, r, k, v, r_k, weight, bias, g):
    y = F.group_norm(x.flatten(0, 1), len(r_k), weight, bias, 64e-5).view(x.shape)
    r, k, v = (each.unflatten(-1, r_k.shape) for each in (r, k, v))
    return [(y + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g]


def rate(a0, a12):
    return [torch.sigmoid(a0 + a12)]


def value(v, v_first, v0, v12):
    return [v + (v_first - v) * torch.sigmoid(v0 + v12)]


def channel_mixing(x, x_k, key_weight, value_weight):
    (mixed,) = mixes(x, x_k)
    return [torch.relu(mixed @ key_weight.T).square() @ value_weight.T]


def inputs_of(name, sizes, dtype=torch.float32):
    """The tensors of a call, its numbers, its formula, and how many of its results have gradients."""
    batch, tokens, heads, size = sizes
    shape, width = (batch, tokens, heads * size), heads * size
    if name == MIX:
        return [rows(*shape, dtype=dtype), *(rows(width, dtype=dtype) for _ in range(6))], (), mixes, 6
    if name == KEYS:
        k, a = rows(*shape, dtype=dtype), torch.sigmoid(rows(*shape, scale=2)).to(dtype)
        return [k, rows(width, dtype=dtype), a, rows(width, dtype=dtype)], (size,), keys, 3
    if name == OUT:
        x, r, k, v, g = (rows(*shape, dtype=dtype) for _ in range(5))
        return [
            x, r, k, v, rows(heads, size, dtype=dtype), rows(width, dtype=dtype), rows(width, dtype=dtype), g
        ], (), out, 1  # fmt: skip
    if name == RATE:
        return [rows(1, 1, width, dtype=dtype), rows(*shape, dtype=dtype)], (), rate, 1
    if name == CHANNELS:
        matrices = rows(4 * width, width, dtype=dtype), rows(width + 1, 4 * width, dtype=dtype)
        return [rows(*shape, dtype=dtype), rows(width, dtype=dtype), *matrices], (), channel_mixing, 1
    v, v_first, v12 = (rows(*shape, dtype=dtype) for _ in range(3))
    return [v, v_first, rows(1, 1, width, dtype=dtype), v12], (), value, 1


def kept(name, inputs, results):
    """What a backward takes behind the gradients: the inputs, and what the forward made for it."""
    behind = {KEYS: 3, OUT: 1, CHANNELS: 1}
    return [*inputs, *(results[behind[name] :] if name in behind else [])]


def listed(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def exact(formula, inputs, grads, numbers=()):
    """Results and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    results = formula(*leaves, *numbers)
    made = torch.autograd.grad(results, leaves, [g.double() for g in grads], materialize_grads=True)
    return [x.detach() for x in results], list(made)


# ---- values and gradients ----------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMESPACES)
def test_values_and_gradients(name, sizes, dtype, calls):  # noqa: F811
    load(name)
    ops = getattr(torch.ops, name)
    for _ in range(calls):
        inputs, numbers, formula, count = inputs_of(name, sizes, dtype)
        results = listed(ops.forward(*inputs, *numbers))
        grads = [rows(*x.shape, dtype=dtype) for x in results[:count]]
        made = ops.backward(*grads, *kept(name, inputs, results), *numbers)
    want, of = exact(formula, inputs, grads, numbers)
    if name == VALUE_IN_ROWS:  # whose caller adds up the gradient of v0
        assert made[2].dtype == torch.float32
        made = [*made[:2], made[2].sum((0, 1), keepdim=True).to(dtype), made[2].to(dtype)]
    near([*results[:count], *made], [*want, *of], LIMITS[dtype])
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in inputs]
    assert [(x.shape, x.dtype) for x in results[:count]] == [(x.shape, dtype) for x in want]


@DTYPES
@pytest.mark.parametrize("sizes", SIZES[::3], ids=str)
def test_what_forwards_make_for_backwards(sizes, dtype):
    batch, tokens, heads, size = sizes
    for name in (KEYS, OUT, CHANNELS):
        load(name)
    (k, k_k, *rest), _, _, _ = inputs_of(KEYS, sizes, dtype)
    k[0, 0] = 0
    inv_d = getattr(torch.ops, KEYS).forward(k, k_k, *rest, size)[3]
    lengths = (k.double() * k_k.double()).unflatten(-1, (heads, size)).norm(dim=-1)
    near([inv_d[0, 1:], inv_d[1:]], [1 / lengths[0, 1:], 1 / lengths[1:]], 1e-5)
    assert (inv_d[0, 0] - 1e12).abs().max() < 1e6
    assert (inv_d.shape, inv_d.dtype) == ((batch, tokens, heads), torch.float32)

    inputs = inputs_of(OUT, sizes, dtype)[0]
    _, mean, rstd = getattr(torch.ops, OUT).forward(*inputs)
    x = inputs[0].double().unflatten(-1, (heads, size))
    near([mean, rstd], [x.mean(-1), (x.var(-1, correction=0) + 64e-5).rsqrt()], 1e-5)
    assert (mean.shape, mean.dtype, rstd.dtype) == ((batch, tokens, heads), torch.float32, torch.float32)

    inputs = inputs_of(CHANNELS, sizes, dtype)[0]
    _, mixed, act = getattr(torch.ops, CHANNELS).forward(*inputs)
    want = mixes(inputs[0].double(), inputs[1].double())[0]
    near([mixed, act], [want, torch.relu(want @ inputs[2].double().T).square().flatten(0, 1)], LIMITS[dtype])


def test_keys_of_zeros_have_the_gradient_of_a_division_by_the_least_length():
    """Where the length is below 1e-12 there is nothing to project out; such a gradient is large, and stays alone."""
    load(KEYS)
    ops = getattr(torch.ops, KEYS)
    inputs, (size,), formula, _ = inputs_of(KEYS, SIZES[0])
    inputs[0][1, 2] = 0
    grads = [rows(*inputs[0].shape) for _ in range(3)]
    made = ops.backward(*grads, *inputs, ops.forward(*inputs, size)[3], size)
    _, of = exact(formula, inputs, grads, (size,))
    near([made[0][1, 2], made[0][0], made[2]], [of[0][1, 2], of[0][0], of[2]])
    assert of[0][1, 2].norm() > 1e11


def test_rates_may_be_anything():
    """At 0 and 1 a logit has no number, and some models learn at twice the rate."""
    load(KEYS)
    ops = getattr(torch.ops, KEYS)
    inputs, (size,), formula, _ = inputs_of(KEYS, SIZES[0])
    inputs[2] = torch.where(inputs[2] > 0.7, 1.0, torch.where(inputs[2] < 0.3, 0.0, inputs[2] * 3 - 1))
    grads, results = [rows(*inputs[0].shape) for _ in range(3)], ops.forward(*inputs, size)
    want, of = exact(formula, inputs, grads, (size,))
    near([*results[:3], *ops.backward(*grads, *inputs, results[3], size)], [*want, *of])


# What the kernel of a forward writes, and that of a backward, in the order in which ops return it.
LAUNCHES = {
    KEYS: ("prepare_keys", "new_k a b factors", "dk dk_k_rows drate dk_a_rows"),
    RATE: ("prepare_keys", "new_rate", "da0_rows drate"),
    VALUE: ("prepare_keys", "new_v", "dv dv_first dv0_rows dv_gate"),
    OUT: ("gated_norm", "out means factors", "dy dr dk dv dr_k_rows dweight_rows dbias_rows dg"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_writes_what_ops_return_and_nothing_else(name, on_gpu):
    load(name)
    ops, (op, makes, gradients) = getattr(torch.ops, name), LAUNCHES[name]
    inputs, numbers, _, count = inputs_of(name, SIZES[3], torch.bfloat16)
    for number in range(3):
        results = listed(ops.forward(*inputs, *numbers))
        *first, launch = on_gpu.take()
        assert len(first) == (number == 0)  # which notes the list
        made = {x: address for x, address in launch.addresses.items() if address}
        assert launch.template == f"layer_{op}"
        assert [made.pop(x) for x in makes.split()] == [x.data_ptr() for x in results]
        assert made.keys() <= set(OPS[op].inputs)

        found = ops.backward(*[torch.ones_like(x) for x in results[:count]], *kept(name, inputs, results), *numbers)
        launches = on_gpu.take()
        launch, *sums = launches[len(launches) // 2 * (number == 0) :]
        made = {x: address for x, address in launch.addresses.items() if address}
        assert launch.template == f"layer_{op}_backward"
        several = {x: made.pop(x) for x in gradients.split()}
        for x, grad in zip(several, found, strict=True):
            assert x.endswith("_rows") or several[x] == grad.data_ptr()
        assert {x for x in made if not x.startswith("grad_")} <= set(OPS[op].inputs)
        assert [x.template for x in sums] == ["sum_buffers"] * ("_rows" in gradients)
    grads, arrays = [torch.ones_like(x) for x in results[:count]], kept(name, inputs, results)
    assert frames(lambda: ops.forward(*inputs, *numbers))[0] <= 12
    assert frames(lambda: ops.backward(*grads, *arrays, *numbers))[0] <= 12


def test_known_calls_with_gradients_and_without_take_turns(on_gpu):
    """As under checkpointing, whose first forwards have none: each finds its call at once."""
    for name in NAMESPACES:
        load(name)
        inputs, numbers, _, _ = inputs_of(name, SIZES[3], torch.bfloat16)
        others = [x.clone().requires_grad_() for x in inputs]
        forward = getattr(torch.ops, name).forward
        with torch.no_grad():
            for _ in range(2):
                forward(*inputs, *numbers), forward(*others, *numbers)
            for given in (inputs, others) * 2:
                assert "keep_latest" not in called(partial(forward, *given, *numbers)), name


def test_channel_mixing_copies_neither_its_share_nor_the_gradient_of_it(on_gpu):
    load(CHANNELS)
    ops, (inputs, _, _, _) = getattr(torch.ops, CHANNELS), inputs_of(CHANNELS, SIZES[3], torch.bfloat16)
    for _ in range(2):
        results = ops.forward(*inputs)
        (shift,) = [x for x in on_gpu.take() if x.template == "layer_token_shift"][-1:]
        assert inputs[1].data_ptr() in shift.addresses.values()
        found = ops.backward(torch.ones_like(results[0]), *inputs, *results[1:])
        written = {x for launch in on_gpu.take() for x in launch.addresses.values()}
        assert found[1].data_ptr() in written
        assert found[1].shape == inputs[1].shape


@pytest.mark.parametrize("name", NAMESPACES)
def test_ops_are_what_their_schemas_say_with_and_without_memory(name):
    load(name)
    inputs, numbers, _, count = inputs_of(name, SIZES[0])
    ops = getattr(torch.ops, name)
    results = listed(ops.forward(*inputs, *numbers))
    backward = (*map(torch.ones_like, results[:count]), *kept(name, inputs, results), *numbers)
    for op, given in ((ops.forward, (*inputs, *numbers)), (ops.backward, backward)):
        torch.library.opcheck(op.default, given, test_utils=("test_schema", "test_faketensor"))


def test_strides_and_autocast_change_nothing_and_nothing_is_recorded():
    for name in NAMESPACES:
        module = load(name)
        inputs, numbers, _, _ = inputs_of(name, SIZES[0])
        spaced = [x.movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_() for x in inputs]
        want = listed(getattr(torch.ops, name).forward(*inputs, *numbers))
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            found = listed(module.forward(*spaced, *numbers))
        assert [(x.dtype, x.requires_grad) for x in found] == [(x.dtype, False) for x in want]
        near(found, [x.double() for x in want], 1e-6)


# ---- a user's autograd, TorchScript and compiler -----------------------------------------------------------------


@pytest.fixture
def differentiable(installed):
    """What registers a backward for an op as the trainer does, and takes it back when a test ends."""
    libraries = []

    def register(name):
        load(name)
        ops, library = getattr(torch.ops, name), torch.library.Library(name, "FRAGMENT")
        libraries.append(library)

        def setup(ctx, inputs, output):
            numbers = [x for x in inputs if isinstance(x, int)]
            ctx.numbers, arrays = numbers, [x for x in inputs if not isinstance(x, int)]
            ctx.save_for_backward(*kept(name, arrays, listed(output)))

        def backward(ctx, grads):
            count = {MIX: 6, KEYS: 3}.get(name, 1)
            given = [g.contiguous() for g in listed(grads)[:count]]
            return *ops.backward(*given, *ctx.saved_tensors, *ctx.numbers), *[None] * len(ctx.numbers)

        torch.library.register_autograd(f"{name}::forward", backward, setup_context=setup, lib=library)
        return ops.forward

    yield register
    for library in libraries:
        library._destroy()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [MIX, KEYS, OUT, RATE, VALUE])
def test_autograd_that_a_user_registers(name, compiled, differentiable):
    forward = differentiable(name)
    inputs, numbers, formula, count = inputs_of(name, SIZES[0])
    leaves = [x.requires_grad_() for x in inputs]

    def run(*leaves):
        return [x * 1 for x in listed(forward(*leaves, *numbers))[:count]]

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = run(*leaves)
    grads = [rows(*x.shape) for x in results]
    torch.autograd.backward(results, grads)
    want, of = exact(formula, inputs, grads, numbers)
    near([*results, *(x.grad for x in leaves)], [*want, *of])


def test_scripts_call_the_ops_and_have_gradients(differentiable):
    for name in (MIX, KEYS, RATE):
        differentiable(name)

    @torch.jit.script
    def run(x, x_r, x_w, x_k, x_v, x_a, x_g, a0, k_k, k_a):
        several = torch.ops.rwkv7_tmix_mix6_bf16_v5.forward(x, x_r, x_w, x_k.contiguous(), x_v, x_a, x_g)
        a = torch.ops.rwkv7_tmix_a_gate_bf16.forward(a0, several[4])
        k, neg_kk, kka = torch.ops.rwkv7_tmix_kk_pre_bf16_v5.forward(several[2], k_k, a, k_a, 5)[:3]
        return several[0] + k, neg_kk, kka

    def formula(x, x_r, x_w, x_k, x_v, x_a, x_g, a0, k_k, k_a):
        several = mixes(x, x_r, x_w, x_k, x_v, x_a, x_g)
        k, neg_kk, kka = keys(several[2], k_k, rate(a0, several[4])[0], k_a, 5)
        return several[0] + k, neg_kk, kka

    inputs = [*inputs_of(MIX, SIZES[0])[0], rows(1, 1, 15), rows(15), rows(15)]
    for _ in range(3):  # the first calls are profiled, the third is optimized
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = run(*leaves)
        grads = [rows(*x.shape) for x in results]
        made = torch.autograd.grad(results, leaves, grads, materialize_grads=True)
        want, of = exact(formula, inputs, grads)
        near([*results, *made], [*want, *of])


# ---- losses ------------------------------------------------------------------------------------------------------


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, logits, targets):
        loss, *made = module.forward(logits, targets)
        ctx.module = module
        ctx.save_for_backward(logits, targets.view(-1), *made)
        return loss

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.module.backward(grad.float(), *ctx.saved_tensors), None


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, hidden, weight, targets, chunk_rows):
        loss, *made = module.forward(hidden, weight, targets, chunk_rows)
        ctx.save_for_backward(*made)
        return loss

    @staticmethod
    def backward(ctx, grad):
        of_hidden, of_weight = ctx.saved_tensors
        return None, of_hidden * grad.to(of_hidden), of_weight * grad.to(of_weight), None, None


def exact_loss(logits, targets):
    """The loss, and what has the gradient of it and of the square of the largest logits."""
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    largest = logits.amax(-1)[targets != -100]
    pull = 0.5e-4 * largest.square().mean()
    return loss.detach(), loss + pull


def aims(batch, tokens, classes, ignored):
    targets = torch.randint(classes, (batch, tokens))
    if ignored:
        targets[0, 1:] = -100
    return targets


@DTYPES
@pytest.mark.parametrize("ignored", [False, True])
def test_loss_of_logits(ignored, dtype):
    """Its gradient is in proportion to that of the loss, with that of the largest logits; these are large here."""
    module = load("rwkv7_l2wrap_ce_bf16_v2")
    logits, targets = rows(2, 7, 11, dtype=dtype, scale=20).requires_grad_(), aims(2, 7, 11, ignored)
    loss = Loss.apply(module, logits, targets)
    (loss * 3).backward()
    leaf = logits.detach().double().requires_grad_()
    want, whole = exact_loss(leaf, targets)
    (whole * 3).backward()
    near([loss.detach(), logits.grad], [want, leaf.grad], LIMITS[dtype])
    assert loss.dtype == torch.float32

    _, lse, max_vals, argmax = module.forward(logits.detach(), targets)
    counted = (targets != -100).flatten()
    flat = logits.detach().double().flatten(0, 1)[counted]
    near([lse[counted], max_vals[counted]], [flat.logsumexp(-1), flat.amax(-1)])
    assert (argmax[counted] == flat.argmax(-1)).all()
    assert [x.dtype for x in (lse, max_vals, argmax)] == [torch.float32, torch.float32, torch.int32]


@DTYPES
@pytest.mark.parametrize("chunk_rows", [0, 4, 4096])
def test_loss_of_a_head(chunk_rows, dtype):
    module = load("rwkv7_head_l2wrap_ce_bf16_v4")
    hidden, weight = rows(2, 7, 6, dtype=dtype).requires_grad_(), rows(11, 6, dtype=dtype, scale=3).requires_grad_()
    targets = aims(2, 7, 11, True)
    loss = HeadLoss.apply(module, hidden, weight, targets, chunk_rows)
    (loss * 3).backward()
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want, whole = exact_loss((leaves[0] @ leaves[1].T).to(dtype).double(), targets)
    (whole * 3).backward()
    near([loss.detach(), hidden.grad, weight.grad], [want, *(x.grad for x in leaves)], LIMITS[dtype])
    made = module.forward(hidden, weight, targets, chunk_rows)
    assert [(x.dtype, x.requires_grad) for x in made] == [(x, False) for x in (torch.float32, dtype, dtype)]


def test_losses_without_any_target():
    """Their mean is NaN, and gradients are zeros."""
    logits, hidden, weight = (rows(*shape).requires_grad_() for shape in ((2, 7, 11), (2, 7, 6), (11, 6)))
    targets = torch.full((2, 7), -100)
    for loss in (
        Loss.apply(load("rwkv7_l2wrap_ce_bf16_v2"), logits, targets),
        HeadLoss.apply(load("rwkv7_head_l2wrap_ce_bf16_v4"), hidden, weight, targets, 4),
    ):
        assert loss.isnan()
        loss.backward()
    for x in (logits, hidden, weight):
        assert torch.equal(x.grad, torch.zeros_like(x))


# ---- a block -----------------------------------------------------------------------------------------------------


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        batch, tokens, heads, size = inputs[0].shape
        y = torch.empty_like(inputs[3])
        s, sa = torch.empty(batch, heads, tokens // 16, size, size), torch.empty(batch, tokens, heads, size)
        torch.ops.rwkv7_clampw.forward(*inputs, y, s, sa)
        ctx.save_for_backward(*inputs, s, sa)
        return y

    @staticmethod
    def backward(ctx, dy):
        *inputs, s, sa = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in inputs]
        torch.ops.rwkv7_clampw.backward(*inputs, dy.contiguous(), s, sa, *grads)
        return tuple(grads)


class ChannelMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        y, mixed, act = torch.ops.rwkv7_cmix_bf16_v5.forward(*inputs)
        ctx.save_for_backward(*inputs, mixed, act)
        return y

    @staticmethod
    def backward(ctx, dy):
        return tuple(torch.ops.rwkv7_cmix_bf16_v5.backward(dy.contiguous(), *ctx.saved_tensors))


def by_token(*inputs):
    """The recurrence token by token, of [B, T, H, N]."""
    r, w, k, v, a, b = inputs
    state, made = torch.zeros(*v[:, 0].shape, v.shape[-1], dtype=v.dtype, device=v.device), []
    decays = torch.exp(-torch.exp(-0.5 - F.softplus(-w)))
    for t in range(v.shape[1]):
        removed = (state @ a[:, t].unsqueeze(-1)) @ b[:, t].unsqueeze(-2)
        state = state * decays[:, t].unsqueeze(-2) + removed + v[:, t].unsqueeze(-1) @ k[:, t].unsqueeze(-2)
        made.append((state @ r[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(made, 1)


PLAIN = {
    "mix": mixes, "rate": lambda *x: rate(*x)[0], "value": lambda *x: value(*x)[0], "keys": keys,
    "out": lambda *x: out(*x)[0], "recurrence": by_token, "channels": lambda *x: channel_mixing(*x)[0],
    "loss": exact_loss,
}  # fmt: skip


def layer(ops, p, x, v_first, size):
    """One layer, of the parts that `ops` has."""
    normed = F.layer_norm(x, x.shape[-1:], p["ln1.weight"], p["ln1.bias"])
    xr, xw, xk, xv, xa, xg = ops["mix"](normed, *(p[f"x_{letter}"] for letter in "rwkvag"))
    r, k, v = xr @ p["receptance"].T, xk @ p["key"].T, xv @ p["value"].T
    w = p["w0"] + torch.tanh(xw @ p["w1"]) @ p["w2"]
    if v_first is None:
        v_first = v
    else:
        v = ops["value"](v, v_first, p["v0"], xv @ p["v1"] @ p["v2"])
    a, g = ops["rate"](p["a0"], xa @ p["a1"] @ p["a2"]), torch.sigmoid(xg @ p["g1"]) @ p["g2"]
    k, removal, learned = ops["keys"](k, p["k_k"], a, p["k_a"], size)[:3]
    heads = [each.unflatten(-1, (-1, size)) for each in (r, w, k, v, removal, learned)]
    y = ops["recurrence"](*heads).flatten(-2)
    x = x + ops["out"](y, r, k, v, p["r_k"], p["ln_x.weight"], p["ln_x.bias"], g) @ p["output"].T
    normed = F.layer_norm(x, x.shape[-1:], p["ln2.weight"], p["ln2.bias"])
    return x + ops["channels"](normed, p["ffn.x_k"], p["ffn.key"], p["ffn.value"]), v_first


def parameters(heads, size, rank=4):
    width = heads * size
    shapes = {f"x_{letter}": (width,) for letter in "rwkvag"}
    shapes |= {name: (width, width) for name in ("receptance", "key", "value", "output")}
    shapes |= {f"{letter}0": (1, 1, width) for letter in "wav"}
    shapes |= {f"{letter}1": (width, rank) for letter in "wavg"} | {f"{letter}2": (rank, width) for letter in "wavg"}
    shapes |= {f"{name}.{part}": (width,) for name in ("ln1", "ln2", "ln_x") for part in ("weight", "bias")}
    shapes |= {"k_k": (width,), "k_a": (width,), "r_k": (heads, size), "ffn.x_k": (width,)}
    shapes |= {"ffn.key": (3 * width, width), "ffn.value": (width, 3 * width)}
    scales = {2: (1.2 / width) ** 0.5, 1: 0.7, 3: 0.7}
    return {name: rows(*shape, dtype=torch.float64, scale=scales[len(shape)]) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_made_of_the_ops(dtype, differentiable):
    """Two layers and the loss, as the trainer puts them together, and as plain torch does in float64."""
    mix, key, rated, valued, norm = (differentiable(name) for name in (MIX, KEYS, RATE, VALUE, OUT))
    load("rwkv7_clampw"), load(CHANNELS)
    module = load("rwkv7_l2wrap_ce_bf16_v2")
    ours = {
        "mix": mix, "rate": rated, "value": valued, "keys": key, "out": lambda *x: norm(*x)[0],
        "recurrence": lambda *x: Recurrence.apply(*[each.contiguous() for each in x]), "channels": ChannelMixing.apply,
        "loss": lambda logits, targets: [Loss.apply(module, logits, targets)] * 2,
    }  # fmt: skip
    heads, size, classes = 2, 8, 13
    torch.manual_seed(1)  # of numbers whose heads all have a length: the norm of one without has no digits in 16 bits
    device = torch.empty(0).device
    with torch.device("cpu"):
        own = {"emb": rows(classes, heads * size, scale=1), "head": rows(classes, heads * size, scale=0.1)}
        own |= {f"{i}.{name}": x for i in range(2) for name, x in parameters(heads, size).items()}
        tokens, targets = torch.randint(classes, (2, 19)), torch.randint(classes, (2, 19))
    own = {name: x.to(device, dtype) for name, x in own.items()}
    tokens, targets = tokens.to(device), targets.to(device)

    def train(ops, dtype):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in own.items()}
        x, v_first = leaves["emb"][tokens], None
        for i in "01":
            x, v_first = layer(ops, {n[2:]: p for n, p in leaves.items() if n[:2] == f"{i}."}, x, v_first, size)
        loss, whole = ops["loss"](x @ leaves["head"].T, targets)
        used = {name: x for name, x in leaves.items() if name not in ("0.v0", "0.v1", "0.v2")}
        return loss.detach(), dict(zip(used, torch.autograd.grad(whole, list(used.values())), strict=True))

    (loss, grads), (want, exact_grads) = train(ours, dtype), train(PLAIN, torch.float64)
    assert abs(loss - want) < LIMITS[dtype] * want
    off = {name: float((x - exact_grads[name]).norm() / exact_grads[name].norm()) for name, x in grads.items()}
    assert max(off.values()) < 10 * LIMITS[dtype], off


# ---- what does not fit -------------------------------------------------------------------------------------------

X, P = torch.zeros(2, 3, 8), torch.zeros(8)
WRONG = [
    (MIX, "forward", (X[0], *[P] * 6), "x: expected shape [batch, tokens, channels], got [3, 8]"),
    (MIX, "forward", (X.long(), *[P] * 6), "x: expected torch.float16 or torch.bfloat16 or torch.float32"),
    (MIX, "forward", (X, P, P, P[1:], P, P, P), "x_k: expected 8 elements, got shape [7]"),
    (MIX, "forward", (X, P, P.half(), P, P, P, P), "x_w: expected torch.float32, got torch.float16"),
    (MIX, "backward", (*[X] * 5, X[:, 1:], X, *[P] * 6), "grad_g: expected shape [2, 3, 8], got [2, 2, 8]"),
    (KEYS, "forward", (X, P, X, P, 3), "head_size: expected a divisor of the 8 channels, got 3"),
    (KEYS, "forward", (X, P, X, P, 0), "head_size: expected a divisor of the 8 channels, got 0"),
    (KEYS, "forward", (X, P, P, P, 4), "a: expected shape [2, 3, 8], got [8]"),
    (KEYS, "backward", (X, X.half(), X, X, P, X, P, X[..., :2], 4), "grad_neg_kk: expected torch.float32, got torch"),
    (OUT, "forward", (X, X, X, X, P, P, P, X), "r_k: expected shape [heads, head size], got [8]"),
    (OUT, "forward", (X, X, X, X, P.view(2, 4), P, P[2:], X), "bias: expected 8 elements, got shape [6]"),
    (RATE, "forward", (P[1:], X), "a0: expected 8 elements, got shape [7]"),
    (RATE, "backward", (X[1:], P, X), "grad_out: expected shape [2, 3, 8], got [1, 3, 8]"),
    (VALUE, "forward", (X, X[..., 1:], P, X), "v_first: expected shape [2, 3, 8], got [2, 3, 7]"),
    (CHANNELS, "forward", (X, P, X[0], X[0]), "value_weight: expected shape [rows, 3], got [3, 8]"),
    (CHANNELS, "forward", (X, P, X[0, :, 1:], X[0]), "key_weight: expected shape [rows, 8], got [3, 7]"),
    (CHANNELS, "backward", (X, X, P, X[0], X[0].T, X, X[0]), "act: expected shape [6, 3], got [3, 8]"),
]


@pytest.mark.parametrize(("name", "op", "given", "text"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_arguments_that_do_not_fit(name, op, given, text):
    load(name)
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        getattr(getattr(torch.ops, name), op)(*given)


def test_losses_of_arguments_that_do_not_fit():
    losses, head = load("rwkv7_l2wrap_ce_bf16_v2"), load("rwkv7_head_l2wrap_ce_bf16_v4")
    logits, targets, lse = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6)
    for call, text in (
        (lambda: losses.forward(logits.long(), targets), "logits: expected torch.float16"),
        (lambda: losses.forward(logits, targets[1:]), "targets: expected 6 elements, got shape [1, 3]"),
        (lambda: losses.forward(logits, targets.float()), "targets: expected torch.int32 or torch.int64"),
        (lambda: losses.forward(logits, targets + 5), "targets: expected 0 to 4, or -100"),
        (lambda: losses.backward(lse, logits, targets, lse, lse, lse.int()), "grad_loss: expected one number"),
        (lambda: losses.backward(lse[0], logits, targets, lse[1:], lse, lse.int()), "lse: expected shape [6], got [5]"),
        (lambda: losses.backward(lse[0], logits, targets, lse, lse, lse), "argmax: expected torch.int32, got torch"),
        (lambda: head.forward(logits, logits[0, :, 1:], targets, 0), "weight: expected shape [rows, 5], got [3, 4]"),
        (lambda: head.forward(logits, logits[0].half(), targets, 0), "weight: expected torch.float32, got torch"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            call()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_no_tensor_is_named(monkeypatch, device):
    """With lists, as on a GPU, and without."""
    monkeypatch.setattr(lists, "devices", {"cpu"} if device == "cuda" else {"cuda"})
    for name in NAMESPACES:
        ops, (inputs, numbers, _, _) = load(name), inputs_of(name, SIZES[0])
        ops.forward(*inputs, *numbers)
        names = [x.split()[-1] for x in NAMES[name].ops["forward"].schema.split(")")[0][1:].split(", ")]
        for place in range(len(inputs)):
            for other in (None, 3, [inputs[place]]):
                given = [*inputs[:place], other, *inputs[place + 1 :], *numbers]
                with pytest.raises(TypeError, match=f"^{names[place]}: expected a torch.Tensor, got "):
                    ops.forward(*given)
        if name == RATE:
            with pytest.raises(TypeError, match="^a0: expected a torch.Tensor, got None"):
                ops.forward(None, None)
