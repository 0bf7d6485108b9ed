"""Values and gradients of whole calls, without a GPU: their kernels run on the CPU, and float64 says what is right.

The calls are as small as the kernels allow, and together they launch every template.
"""

import math
import random
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import comparing
import derived_cases
import layer_cases
import operand_cases
import plain_convolution
import plain_layer
import product_cases
import pytest
import torch
from comparing import relative

import rwkv_jit
from rwkv_jit.call.options import complete
from rwkv_jit.kernels import signatures, template
from rwkv_jit.layers import loss_ops as loss_steps
from rwkv_jit.parallel import paused, summaries
from rwkv_jit.schedules import channel_decay, head_decay, layer_gradients, segments
from rwkv_jit.schedules.table import OPS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 2e-6, FP16: 2e-3, BF16: 1e-2}


def is_close(errors, limit):
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    assert not wrong, f"more than {limit} from float64: {wrong}"


# ---- the calls ---------------------------------------------------------------------------------------------------


def op(name, sizes, dtype=BF16, bounds=None, decays="usual", limit=None, **options):
    """A call of `sizes` B, T, H, K and V from a state, packed where it has `bounds`."""
    given = comparing.make_inputs(name, dtype, *sizes, decays, options.get("decay"))
    exact = {"scale": OPS[name].scale or sizes[3] ** -0.5, **options}
    exact = {name: x for name, x in exact.items() if name in ("scale", "decay", "state_layout")}
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    state = comparing.make_state(given, len(bounds) - 1 if bounds else sizes[0], layout=OPS[name].state_layout)
    errors, _, _ = comparing.compare(name, given, state, {**options, **packed}, {**exact, **packed})
    is_close(errors, limit or LIMITS[dtype])


def in_segments(*sizes, **options):
    """The same, cut into segments that are shorter than they would be on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        shorter = {kind: lengths._replace(least=16) for kind, lengths in segments._LENGTHS.items()}
        patch.setattr(segments, "_LENGTHS", shorter)
        patch.setattr(segments, "_LEAST_MEAN", 16)
        op(*sizes, **options, backend="split")


def narrow(*sizes, **options):
    """The same of float32 rows on the tensor cores."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        op(*sizes, dtype=FP32, limit=LIMITS[FP16], **options)
    finally:
        torch.set_float32_matmul_precision(before)


def shard(name, sizes):
    """What a part of a text does to any state: a sum, and what is left of the state."""
    given = comparing.make_inputs(name, BF16, *sizes)
    inputs = [x.detach() for x in given.values()]
    state = comparing.make_state(given, sizes[0]).detach()
    call = paused.Call(OPS[name], complete(OPS[name], {}, inputs[0]))
    bias, transition = paused.way_of(call, inputs, [False] * (len(inputs) + 1)).summary(inputs)
    final = getattr(rwkv_jit, f"{name}_ref")(*(x.double() for x in inputs), state.double(), True)[1]
    is_close({"state": relative(summaries.after(state, bias, transition), final)}, LIMITS[BF16])


def derived(
    name, how, sizes, dtype=BF16, bounds=None, segment=None, decays=(-1.0, -0.01), of_own=True, whole=False, wide=FP32,
    **options,
):  # fmt: skip
    """A call of `sizes` B, T, heads of keys and of values, K and V; `segment` tokens or more are in one.

    Where it is `whole`, a block has all value rows of a head, however few heads there are.
    """
    case = derived_cases.make(name, how, sizes, dtype, wide, FP32, bounds=bounds, decays=decays)
    with pytest.MonkeyPatch.context() as patch:
        if of_own:
            patch.setattr(head_decay, "LEAST_BLOCKS", 0)
        if whole:
            patch.setattr(head_decay, "rows_of_block", lambda value_size, *_: value_size)
        if segment:
            patch.setattr(head_decay, "_LEAST_SEGMENT", segment)
            g = case.inputs["g"]  # a head forgets at once, one hardly, others in between; and all do at one place
            g *= torch.tensor([2.0, 0.001, 0.6, 0.05])[: g.shape[2]]
            g[:, sizes[1] // 2 : sizes[1] // 2 + 20] *= 30
        results, grads, weights = derived_cases.differentiate(case, **options)
        if segment:  # what a block leaves out of the state before it is nothing to a float
            patch.setattr(head_decay, "_LEAST_SEGMENT", 1 << 20)
            signatures.forget()
            alone, alone_grads, _ = derived_cases.differentiate(case, weights=weights, **options)
            pairs = zip((*results, *grads.values()), (*alone, *alone_grads.values()), strict=True)
            is_close({i: relative(*pair) for i, pair in enumerate(pairs)}, 1e-5)
    are_close(case, results, grads, weights)


def are_close(case, results, grads, weights):
    """Values and gradients of a derived call, to those of its reference."""
    wanted, wanted_grads = derived_cases.exactly(case, weights)
    dtype = results[0].dtype
    kind = {BF16: "bf16", FP16: "fp16"}[dtype]
    for name, grad in grads.items():
        error = derived_cases.error_of(case, name, grad, wanted_grads[name])
        is_close({name: error}, derived_cases.limit_of(case, name, kind))
    is_close({i: relative(*pair) for i, pair in enumerate(zip(results, wanted, strict=True))}, LIMITS[dtype])


def derived_shard(name, how, sizes, dtype=BF16, of_own=False):
    """A part of a text, whose kernels wait for the state before it if they are those of the op below."""
    case = derived_cases.make(name, how, sizes, dtype, FP32, FP32)
    with pytest.MonkeyPatch.context() as patch:
        if of_own:
            patch.setattr(head_decay, "LEAST_BLOCKS", 0)
            patch.setattr(channel_decay, "LEAST_BLOCKS", 0)
        are_close(case, *derived_cases.in_two_phases(case, pauses=not of_own))


def around(name, words, sizes, **options):
    """What stands before a recurrence or behind it, alone."""
    operand_cases.check(name, words, sizes, **options)


def own_parts(*sizes, dtype=BF16, **options):
    """What a token has of itself is rounded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_decay, "LEAST_BLOCKS", 0)
        is_close(derived_cases.roundings_of_own_parts(sizes, dtype, **options), 1.1)


def of_channels(
    how, sizes, dtype=BF16, bounds=None, decays=(), of_blocks=None, wide=FP32, state=FP32, layout=None, training=False
):  # fmt: skip
    """A call of kda in kernels of its own, with gradients where it is `training`.

    Half of the log-decays are none, and others down to one of `decays`: for 64 tokens the first, for 64 the next. Or
    blocks of 16 tokens have `of_blocks` together, by turns, all of it in the eight in their middle.
    """
    given = derived_cases.make("kda", how, sizes, dtype, wide, state, bounds=bounds, layout=layout)
    if decays:
        shape = given.inputs["g"].shape
        largest = torch.tensor(decays)[torch.arange(shape[1]) // 64 % len(decays)].view(-1, 1, 1)
        given = derived_cases.with_decays(given, largest * torch.rand(shape) * (torch.rand(shape) < 0.5))
    if of_blocks:
        token = torch.arange(sizes[1])
        of_tokens = torch.tensor(of_blocks)[token // 16 % len(of_blocks)] / 8 * ((token % 16 >= 4) & (token % 16 < 12))
        given.inputs["g"].copy_(of_tokens.view(-1, 1, 1).expand_as(given.inputs["g"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_decay, "LEAST_BLOCKS", 0)
        if training:
            found, grads, weights = derived_cases.differentiate(given)
        else:
            found = given.run()
    if training:
        are_close(given, found, grads, weights)
        return
    wanted = given.reference().run(rwkv_jit.kda_ref)
    is_close({i: relative(*pair) for i, pair in enumerate(zip(found, wanted, strict=True))}, LIMITS[dtype])


def of_far_tokens():
    """A call of kda where the last block reads the first one alone, over two blocks that lose little.

    In float16 what both ends lose and what lies between are more together than one power holds.
    """
    given = derived_cases.make("kda", "norm", (1, 64, 1, 1, 128, 128), FP16, FP32, FP32)
    token = torch.arange(64)
    of_blocks = torch.tensor([-13.2, -2.2, -2.2, -13.2])[token // 16] / 8 * ((token % 16 >= 4) & (token % 16 < 12))
    given.inputs["g"].copy_(of_blocks.view(-1, 1, 1).expand_as(given.inputs["g"]))
    given.inputs["beta"][:, (token < 12) | (token >= 16)] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_decay, "LEAST_BLOCKS", 0)
        found, _ = given.run()
    wanted, _ = given.reference().run(rwkv_jit.kda_ref)
    assert relative(found[:, 48:52], wanted[:, 48:52]) < 0.05  # operands have six digits there


def forgetting(name, how, sizes, of_own=True, dtype=BF16, **filled):
    """A call whose decays are all 0 to a float, as some inputs are `filled` with one number."""
    case = derived_cases.make(name, how, sizes, dtype, FP32, FP32)
    for own, number in filled.items():
        case.tensors[own].fill_(number)
    with pytest.MonkeyPatch.context() as patch:
        if of_own:
            patch.setattr(head_decay, "LEAST_BLOCKS", 0)
            patch.setattr(channel_decay, "LEAST_BLOCKS", 0)
        results, grads, weights = derived_cases.differentiate(case)
    are_close(case, results, grads, weights)  # and what makes the decays has no gradient, not even that of roundings


def long_ago(name, how, is_batch_invariant=False):
    """What is not a number reaches as far as docs/ops.md says, in segments of 128 tokens.

    Tokens of heads leave e^-1, e^-0.35, e^-0.25 and e^-0.01. The second segment's block sets out 32, 96 or 128 tokens
    before it: there the first two heads have forgotten what was before. The gradient of a state comes back over 32 or
    72 tokens, which are enough for the first head alone.
    """
    case = derived_cases.make(name, how, (1, 200, 4, 4, 16, 16), BF16, FP32, FP32)
    case.inputs["g"].copy_(torch.tensor([-1.0, -0.35, -0.25, -0.01]))
    leaves = {own: x.requires_grad_() for own, x in case.tensors.items()}
    weights = torch.randn_like(case.inputs["v"])

    def run(dy):
        y, final = case.replaced(leaves).run()
        return y.detach(), final.detach(), torch.autograd.grad(y, leaves["v"], dy)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_decay, "LEAST_BLOCKS", 0)
        patch.setattr(head_decay, "_LEAST_SEGMENT", 64)
        rwkv_jit.set_batch_invariant(is_batch_invariant)
        try:
            wanted = run(weights)
            with torch.no_grad():
                leaves["v"][:, 5] = math.nan
                weights[:, 194] = math.nan
            y, final, dv = run(weights)
        finally:
            rwkv_jit.set_batch_invariant(False)
    forget, forget_back = (0, 0) if is_batch_invariant else (2, 1)  # so many heads
    assert y[:, 5:128].isnan().all()
    assert y[:, 128:, forget:].isnan().all()
    assert final[:, forget:].isnan().all()
    assert torch.equal(y[:, 128:, :forget], wanted[0][:, 128:, :forget])
    assert torch.equal(final[:, :forget], wanted[1][:, :forget])
    assert dv[:, 128:194].isnan().all()
    assert dv[:, :128, forget_back:].isnan().all()
    assert torch.equal(dv[:, :128, :forget_back], wanted[2][:, :128, :forget_back])


def layer(name, how, rows=(7, 2, 16), dtype=BF16, few_sums=False, narrow=()):
    """The small work of a layer in both directions, and without gradients, where kernels may write less."""
    case = layer_cases.make(name, how, layer_cases.sizes_of(name, how, *rows), dtype, FP32)
    case.tensors.update({x: case.tensors[x].to(dtype) for x in narrow})
    with pytest.MonkeyPatch.context() as patch:
        if few_sums:  # a thread has no room for those of the mixes
            patch.setattr(layer_gradients, "_MOST_SUMS", 0)
        results, grads, weights = layer_cases.differentiate(case, case.run)
    assert all(torch.equal(*pair) for pair in zip(case.run(case.tensors), results, strict=True))
    wanted, wanted_grads = layer_cases.exactly(case, weights)
    errors = {name: relative(x, wanted_grads[name]) for name, x in grads.items()}
    errors |= {place: relative(x, want) for place, (x, want) in enumerate(zip(results, wanted, strict=True))}
    is_close(errors, {**LIMITS, FP32: 5e-6}[dtype])


def shift_mix():
    """For packed texts, one of which has no slot."""
    x, add, weight, bias = torch.randn(7, 24).to(BF16), torch.randn(7, 24).to(BF16), torch.randn(24), torch.randn(24)
    mixes, pool, bounds, slots = torch.rand(3, 24), torch.randn(4, 24), [0, 1, 1, 5, 7], [2, 1, -1, 3]
    wanted = plain_layer.shift_mix(x, weight, bias, mixes, pool, bounds, slots, add)
    indices = {"state_indices": torch.tensor(slots), "cu_seqlens": torch.tensor(bounds)}
    found = [*rwkv_jit.shift_mix(x, weight, bias, mixes, pool, add=add, **indices), pool]
    errors = {i: relative(x.view(want.shape), want) for i, (x, want) in enumerate(zip(found, wanted, strict=True))}
    is_close(errors, LIMITS[BF16])


def compare(function, reference, leaves, **more):
    """A function against another one, which takes the same in float64; `more` are tensors without gradients."""
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    results, wanted = function(*leaves, **more), reference(*exact, **more)
    weights = [torch.randn(x.shape).to(x.dtype) for x in results]
    found = [*results, *torch.autograd.grad(results, leaves, weights)]
    wanted = [*wanted, *torch.autograd.grad(wanted, exact, [x.double() for x in weights])]
    is_close({i: relative(*pair) for i, pair in enumerate(zip(found, wanted, strict=True))}, LIMITS[leaves[0].dtype])


def wkv4(sizes, dtype, **options):
    """From a state, which some tokens left."""
    channels = sizes[-1]
    leaves = [torch.linspace(-6, 1, channels), *(torch.randn(x) for x in (channels, sizes, sizes))]
    state = rwkv_jit.wkv4_ref(*leaves, output_final_state=True)[1]
    function = partial(rwkv_jit.wkv4, output_final_state=True, **options)
    leaves = [*(x.to(dtype) for x in leaves), state]
    compare(function, partial(rwkv_jit.wkv4_ref, output_final_state=True), leaves)


def timex(sizes, dtype, backend):
    def each(function, **options):
        return lambda *given: (function(*given, **options),)

    leaves = [torch.randn(x).to(dtype) for x in (sizes[1:], sizes)]
    compare(each(rwkv_jit.timex, backend=backend), each(rwkv_jit.timex_ref), leaves)


def convolution(sizes, width, dtype, bounds=None):
    texts = len(bounds) - 1 if bounds else sizes[0]
    of_leaves = sizes, (sizes[2], width), sizes[2:], (texts, sizes[2], width - 1)
    leaves = [torch.randn(x).to(dtype) for x in of_leaves]
    packed = {"cu_seqlens": torch.tensor(bounds)} if bounds else {}

    def call(x, weight, bias, state, **packed):
        given = {"initial_state": state, "output_final_state": True, "activation": "silu", **packed}
        return rwkv_jit.causal_conv1d(x, weight, bias, **given)

    compare(call, partial(plain_convolution.causal_conv1d, activation="silu"), leaves, **packed)


def convolution_update(sizes, width, dtype, seen=None):
    batch, _, channels = sizes
    x, weight, pool = (torch.randn(x).to(dtype) for x in (sizes, (channels, width), (batch + 3, channels, width)))
    slots = torch.arange(batch) - 1  # one has none
    seen = None if seen is None else torch.tensor(seen, dtype=torch.int32)
    wanted = plain_convolution.update(x, pool, weight, None, "silu", slots, cache_seqlens=seen)
    y = rwkv_jit.causal_conv1d_update(x, pool, weight, state_indices=slots, activation="silu", cache_seqlens=seen)
    is_close({"y": relative(y, wanted[0]), "pool": relative(pool, wanted[1])}, LIMITS[dtype])


def loss(classes, dtype):
    targets = torch.randint(classes, (5,))
    targets[1] = -100
    ours, torchs = rwkv_jit.cross_entropy, torch.nn.functional.cross_entropy
    leaves = [torch.randn(5, classes).to(dtype)]
    compare(lambda x: (ours(x, targets),), lambda x: (torchs(x, targets),), leaves)


def loss_in_place(classes, dtype):
    """As the two kernels above have it bit for bit, of rows that do not count and of no class too."""
    targets, logits = torch.randint(classes, (7,)), 3 * torch.randn(7, classes)
    targets[1], targets[2], logits[3] = -100, classes, 0
    for l2_wrap in (0.0, 0.5):
        leaf = logits.to(dtype).requires_grad_()
        want = rwkv_jit.cross_entropy(leaf, targets, l2_wrap=l2_wrap, reduction="none")
        (gradient,) = torch.autograd.grad(want, leaf, torch.ones_like(want))
        held = leaf.detach().clone()
        found = loss_steps._differentiated(held, targets, -100, l2_wrap)
        torch.testing.assert_close(found, want.detach(), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(held, gradient, rtol=0, atol=0, equal_nan=True)


def times_a_number(dtype):
    """Gradients of a sum of losses, in accesses of one size and another: times a number that 16 bits do not have."""
    given, scale = [torch.randn(50, 48).to(dtype), torch.randn(11, 4), torch.randn(7)], torch.tensor(1 / 1003)
    found = torch.ops.rwkv_jit.linear_cross_entropy_bwd(*given, scale)
    assert all(torch.equal(x, (y * scale.expand_as(y)).to(dtype)) for x, y in zip(found, given, strict=True))


class Pool:
    """A pool of states for packed or equal texts, and what float64 makes of these."""

    def __init__(self, name, texts, tokens, K, V, bounds=None):
        self.name, self.layout = name, OPS[name].state_layout
        batch = texts if bounds is None else 1
        self.given = {n: x.detach() for n, x in comparing.make_inputs(name, BF16, batch, tokens, 2, K, V).items()}
        self.pool = torch.randn(texts + 3, 2, *((V, K) if self.layout == "vk" else (K, V)))
        self.slots = torch.arange(texts).flip(0) + 1
        self.before = self.pool.clone()
        reference = partial(getattr(rwkv_jit, f"{name}_ref"), scale=OPS[name].scale or K**-0.5)
        exact, state = [x.double() for x in self.given.values()], self.pool[self.slots].double()
        self.wanted = reference(*exact, state, True, cu_seqlens=bounds)

    def check(self, y):
        final = self.pool[self.slots]
        is_close({"y": relative(y, self.wanted[0]), "states": relative(final, self.wanted[1])}, LIMITS[BF16])
        self.pool[self.slots] = self.before[self.slots]
        assert torch.equal(self.pool, self.before)  # nothing else is written


def update(name, tokens, K, V):
    pool = Pool(name, 3, tokens, K, V)
    function = getattr(rwkv_jit, f"{name}_update")
    pool.check(function(pool.pool, *pool.given.values(), state_indices=pool.slots))


def varlen(name, lengths, K, V):
    bounds = torch.tensor([0, *accumulate(lengths)])
    pool = Pool(name, len(lengths), sum(lengths), K, V, bounds)
    function = getattr(rwkv_jit, f"{name}_varlen")
    pool.check(function(pool.pool, *pool.given.values(), cu_seqlens=bounds, state_indices=pool.slots))


def derived_pool(name, how, sizes, bounds=None, index=torch.int64):
    """A derived call over a pool, of rows or of packed sequences, whose second row has no slot."""
    given = derived_cases.make(name, how, sizes, BF16, FP32, FP32, bounds=bounds)
    count = len(given.state)
    slots = 2 * torch.arange(count, dtype=index) + 1
    slots[1] = -4
    there = slots >= 0
    pool = torch.randn(2 * count, *given.state.shape[1:])
    pool[slots[there].long()] = given.state[there]
    before = pool.clone()
    options = {"state_indices": slots}
    rows = there
    if bounds:
        options["cu_seqlens"] = given.cu_seqlens.to(index)
        rows = (slice(None), there.repeat_interleave(given.cu_seqlens.diff()))
    y = derived_cases.pooled(given, "varlen" if bounds else "update", pool, **options)
    wanted, final = given.reference().run(getattr(rwkv_jit, f"{name}_ref"))
    is_close({"y": relative(y[rows], wanted[rows])}, LIMITS[BF16])
    is_close({"states": relative(pool[slots[there].long()], final[there])}, LIMITS[BF16])
    assert torch.equal(pool[::2], before[::2])
    y[rows] = 0
    assert not y.any()


def replay(name, tokens, K, V):
    """Token after token, of which a state takes two at a time."""
    pool = Pool(name, 3, tokens, K, V)
    ring = rwkv_jit.ReplayRing(len(pool.pool), name, 2, K, V, 2, 0, BF16, FP32)
    function, made = getattr(rwkv_jit, f"{name}_replay"), []
    for token in range(tokens):
        given = comparing.of_tokens(name, pool.given, (slice(None), slice(token, token + 1)))
        made.append(function(pool.pool, ring, *given.values(), state_indices=pool.slots))
    rwkv_jit.replay_flush(pool.pool, ring)
    pool.check(torch.cat(made, 1))


def replay_rules(name, how):
    """Steps, drafts that are accepted in part, and a flush."""
    more = {"sizes": (1, 2, 16, 24), "rows": 2, "slots": 3, "steps": 4, "drafts": 2, "length": 2}
    found = derived_cases.replay_in_any_order(name, how, "kv", BF16, FP32, random.Random(2), **more)
    is_close(dict(zip(("y", "states"), found, strict=True)), LIMITS[BF16])


def wkv4_update(tokens, channels):
    w, u, k, v = (torch.randn(x) for x in (channels, channels, (2, tokens, channels), (2, tokens, channels)))
    pool, slots = torch.rand(5, 3, channels), torch.tensor([3, 1])
    wanted = rwkv_jit.wkv4_ref(*(x.double() for x in (w, u, k, v)), pool[slots].double(), True)
    y = rwkv_jit.wkv4_update(pool, w, u, k, v, state_indices=slots)
    is_close({"y": relative(y, wanted[0]), "states": relative(pool[slots], wanted[1])}, LIMITS[FP32])


# ---- which of them -----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A call on a GPU, and the templates that it launches.

    With one multiprocessor, blocks that stay take several chunks each, one after another.
    """

    arch: str
    templates: tuple[str, ...]
    call: Any
    multiprocessors: int

    def __str__(self):
        given = [*self.call.args, *(f"{name}={x}" for name, x in self.call.keywords.items())]
        given += ["on one multiprocessor"] * (self.multiprocessors == 1)
        return " ".join([self.arch, self.call.func.__name__, *map(str, given)])


def case(arch, templates, function, *arguments, multiprocessors=132, **options):
    return Case(arch, tuple(templates.split()), partial(function, *arguments, **options), multiprocessors)


CASES = [
    case("sm_80", "gla_recurrent_forward gla_recurrent_backward sum_buffers", op, "wkv6", (2, 9, 2, 20, 12), FP32),
    case("sm_90", "wkv7_recurrent_forward wkv7_recurrent_backward", op, "wkv7", (2, 9, 2, 12, 20), FP32),
    # Heads that a block holds.
    case(
        "sm_80", "wkv7_chunked_forward wkv7_chunked_backward", op, "wkv7", (1, 40, 2, 16, 16), bounds=[0, 0, 7, 40],
        decays="mixed",
    ),
    case("sm_90", "wkv7_chunked_forward wkv7_group_backward", op, "wkv7", (1, 70, 1, 64, 64), decay="sigmoid"),
    case(
        "sm_80", "gla_scan gla_chunked_backward sum_buffers",
        op, "wkv5", (1, 40, 2, 16, 20), bounds=[0, 0, 7, 40], chunk_len=16,
    ),
    case("sm_90", "gla_scan gla_chunked_backward", op, "gla", (1, 40, 2, 16, 12), FP16, decays="mixed", chunk_len=16),
    case("sm_90", "gla_scan gla_group_backward", op, "linear_attention", (1, 70, 1, 72, 120)),
    case("sm_80", "narrow_rows gla_scan gla_chunked_backward", narrow, "linear_attention", (1, 40, 1, 16, 16)),
    # Larger ones.
    case(
        "sm_80",
        "wkv7_prepare wkv7_scan wkv7_token_gradients wkv7_key_gradients wkv7_key_gradients_by_halves",
        op, "wkv7", (1, 20, 1, 136, 16), decays="mixed", chunk_len=32,
    ),
    case(
        "sm_90", "wkv7_prepare wkv7_group_scan wkv7_token_gradients wkv7_key_gradients",
        op, "wkv7", (1, 70, 1, 136, 128), decay="sigmoid",
    ),
    case("sm_80", "gla_scan gla_key_gradients", op, "gla", (1, 40, 1, 136, 16), decays="mixed", chunk_len=16),
    case("sm_90", "gla_prepare gla_group_scan gla_group_key_gradients", op, "gla", (1, 40, 1, 136, 16)),
    # Segments.
    case(
        "sm_80", "wkv7_segment wkv7_join wkv7_chunked_forward wkv7_chunked_backward",
        in_segments, "wkv7", (1, 256, 1, 16, 16), decay="sigmoid",
    ),
    case(
        "sm_90", "cut_sequences gla_segment gla_join copy_states gla_scan gla_chunked_backward",
        in_segments, "gla", (1, 200, 2, 16, 16), bounds=[0, 0, 30, 200], chunk_len=16,
    ),
    case("sm_80", "unit_states wkv7_segment wkv7_join", shard, "wkv7", (1, 64, 1, 16, 16)),
    case(
        "sm_80", "layer_delta_operands layer_delta_operands_backward layer_gated unit_states wkv7_segment wkv7_join "
        "wkv7_chunked_forward wkv7_chunked_backward sum_buffers",
        derived_shard, "gated_delta_rule2", "raw bias", (1, 64, 1, 2, 16, 16),
    ),
    case(
        "sm_80", "diagonal_operands diagonal_operands_backward unit_states gla_segment gla_join gla_scan "
        "gla_chunked_backward", derived_shard, "hgrn2", "", (1, 64, 2, 2, 16, 24),
    ),
    case(
        "sm_80", "diagonal_operands diagonal_operands_backward unit_states gla_segment gla_join gla_scan "
        "gla_chunked_backward skip_gate skip_gate_backward sum_buffers",
        derived_shard, "ssd", "wide z bias softplus", (1, 64, 1, 2, 16, 24),
    ),
    case(
        "sm_80", "head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers", derived_shard,
        "gated_delta_rule", "raw bias sigmoid norm", (1, 40, 1, 2, 16, 24), of_own=True,
    ),
    case(
        "sm_80", "head_decay_forward head_decay_backward head_decay_key_gradients", derived_shard, "simple_gla", "",
        (1, 40, 1, 2, 16, 24), of_own=True,
    ),
    # One decay for a head.
    case(
        "sm_80", "head_decay_walks head_decay_forward head_decay_backward head_decay_key_gradients",
        derived, "gated_delta_rule", "norm", (1, 400, 1, 4, 16, 16), bounds=[0, 90, 90, 400], segment=64,
    ),
    case(
        "sm_80", "head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers",
        derived, "gated_delta_rule", "raw bias sigmoid norm", (1, 75, 2, 4, 16, 32), FP16,
    ),
    case(
        "sm_80", "head_decay_walks head_decay_forward head_decay_backward head_decay_key_gradients",
        derived, "simple_gla", "", (1, 260, 4, 4, 16, 16), segment=64,
    ),
    case(
        "sm_80", "head_decay_forward head_decay_backward head_decay_key_gradients", own_parts, 1, 75, 1, 2, 32, 16,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients",
        own_parts, 1, 75, 1, 2, 64, 64, dtype=FP16,
    ),
    case(
        "sm_90", "head_decay_forward head_decay_backward head_decay_group_key_gradients sum_buffers",
        derived, "gated_delta_rule", "raw bias twice_sigmoid", (1, 70, 1, 2, 64, 64), bounds=[0, 30, 70], chunk_len=16,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients sum_buffers",
        derived, "gated_delta_rule", "raw sigmoid norm", (1, 170, 1, 2, 128, 128), bounds=[0, 0, 1, 170], whole=True,
    ),
    case(
        "sm_90", "head_decay_walks head_decay_group_forward head_decay_backward head_decay_group_key_gradients",
        derived, "gated_delta_rule", "norm", (1, 300, 1, 2, 64, 128), FP16, segment=64,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients sum_buffers",
        derived, "ssd", "D bias softplus", (1, 75, 1, 2, 128, 64),
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients",
        derived, "simple_gla", "", (1, 270, 1, 1, 64, 128), bounds=[0, 0, 70, 270], multiprocessors=1,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients",
        derived, "gated_delta_rule", "norm", (2, 130, 1, 2, 64, 64), FP16, multiprocessors=1,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients",
        derived, "delta_rule", "norm", (1, 200, 2, 2, 64, 128), multiprocessors=1,
    ),
    case(
        "sm_90", "head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers",
        derived, "ssd", "D softplus", (1, 40, 1, 2, 32, 16), chunk_len=16,
    ),
    case(
        "sm_80", "head_decay_walks head_decay_forward head_decay_backward head_decay_key_gradients",
        long_ago, "simple_gla", "",
    ),
    case(
        "sm_80", "head_decay_walks head_decay_forward head_decay_backward head_decay_key_gradients",
        long_ago, "gated_delta_rule", "norm",
    ),
    case(
        "sm_80", "head_decay_forward head_decay_backward head_decay_key_gradients",
        long_ago, "simple_gla", "", is_batch_invariant=True,
    ),
    case(
        "sm_80", "head_steps head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers",
        forgetting, "ssd", "D", (1, 40, 1, 2, 32, 16), dt=1000.0, A=-1.0,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients sum_buffers",
        forgetting, "ssd", "softplus", (1, 70, 1, 2, 64, 64), dt=1000.0, A=-1.0,
    ),
    case(
        "sm_80", "head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers",
        forgetting, "gated_delta_rule", "raw bias norm", (1, 40, 1, 2, 32, 16), A_log=100.0,
    ),
    case(
        "sm_90", "head_decay_group_forward head_decay_backward head_decay_group_key_gradients sum_buffers",
        forgetting, "gated_delta_rule", "raw bias norm", (1, 70, 1, 2, 64, 64), A_log=100.0,
    ),
    case(
        "sm_90",
        "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients sum_buffers",
        forgetting, "kda", "raw bias norm", (1, 70, 1, 1, 128, 128), A_log=100.0,
    ),
    case(
        "sm_90",
        "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients sum_buffers",
        forgetting, "kda", "bounded bias norm", (1, 70, 1, 1, 128, 128), A_log=100.0,
    ),
    case(
        "sm_90",
        "layer_delta_operands layer_delta_operands_backward wkv7_chunked_forward wkv7_chunked_backward sum_buffers",
        forgetting, "kda", "raw bias norm", (1, 20, 1, 2, 16, 16), of_own=False, A_log=100.0,
    ),
    case(
        "sm_80", "diagonal_operands gla_scan gla_chunked_backward diagonal_operands_backward sum_buffers",
        forgetting, "ssd", "", (1, 40, 1, 2, 32, 16), of_own=False, dt=1000.0, A=-1.0,
    ),
    case(
        "sm_90",
        "layer_delta_operands layer_delta_operands_backward wkv7_chunked_forward wkv7_chunked_backward sum_buffers",
        derived, "kda", "bounded bias norm", (1, 20, 1, 2, 16, 16), of_own=False,
    ),
    # By the op below.
    case(
        "sm_80", "layer_delta_operands wkv7_chunked_forward wkv7_chunked_backward layer_delta_operands_backward",
        derived, "kda", "", (1, 20, 1, 2, 16, 16), of_own=False, wide=BF16,
    ),
    case(
        "sm_80", "layer_delta_operands wkv7_chunked_forward wkv7_chunked_backward layer_delta_operands_backward",
        derived, "kda", "", (1, 20, 2, 2, 16, 16), of_own=False,
    ),
    case(
        "sm_90",
        "layer_delta_operands layer_gated wkv7_chunked_forward "
        "wkv7_chunked_backward layer_delta_operands_backward sum_buffers",
        derived, "gated_delta_rule2", "raw bias", (1, 20, 1, 2, 16, 24), FP16, of_own=False,
    ),
    case(
        "sm_80",
        "layer_delta_operands wkv7_chunked_forward "
        "wkv7_chunked_backward layer_delta_operands_backward diagonal_operands_backward",
        derived, "delta_rule", "norm sigmoid", (1, 20, 1, 10, 16, 16), of_own=False,
    ),
    case(
        "sm_80",
        "layer_delta_operands wkv7_recurrent_forward wkv7_recurrent_backward layer_delta_operands_backward sum_buffers",
        derived, "gated_delta_rule", "raw", (1, 9, 2, 2, 12, 12), FP16, [0, 0, 4, 9], of_own=False,
    ),
    case(
        "sm_90", "diagonal_operands gla_scan gla_chunked_backward diagonal_operands_backward",
        derived, "simple_gla", "", (1, 20, 1, 6, 16, 16), of_own=False,
    ),
    case(
        "sm_80", "diagonal_operands gla_scan gla_chunked_backward diagonal_operands_backward",
        derived, "hgrn2", "", (1, 20, 2, 2, 16, 24), of_own=False,
    ),
    case(
        "sm_90",
        "diagonal_operands gla_scan skip_gate "
        "skip_gate_backward sum_buffers gla_chunked_backward diagonal_operands_backward",
        derived, "ssd", "wide z limit", (1, 40, 2, 4, 16, 24), FP16, [0, 0, 13, 40], of_own=False,
    ),
    case(
        "sm_80",
        "diagonal_operands gla_scan skip_gate "
        "skip_gate_backward sum_buffers gla_chunked_backward diagonal_operands_backward",
        derived, "ssd", "D z bias softplus", (2, 20, 2, 2, 16, 24), of_own=False, wide=BF16,
    ),
    # Dedicated kernels, with launches around them.
    case(
        "sm_80", "narrow_rows head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers",
        derived, "gated_delta_rule", "raw bias", (1, 40, 2, 2, 16, 16), wide=BF16,
    ),
    case(
        "sm_90", "head_steps head_decay_forward head_decay_backward head_decay_key_gradients sum_buffers",
        derived, "ssd", "bias D softplus limit", (1, 40, 1, 2, 32, 16),
    ),
    case(
        "sm_80",
        "head_decay_forward skip_gate skip_gate_backward head_decay_backward head_decay_key_gradients sum_buffers",
        derived, "ssd", "D z bias softplus", (1, 40, 1, 2, 32, 16), bounds=[0, 13, 13, 40],
    ),
    case(
        "sm_80",
        "head_steps head_decay_forward skip_gate "
        "skip_gate_backward head_decay_backward head_decay_key_gradients sum_buffers",
        derived, "ssd", "wide z limit", (1, 40, 2, 2, 32, 16), FP16,
    ),
    # One decay for a channel.
    case(
        "sm_90", "channel_decay_group_forward narrow_rows",
        of_channels, "raw bias sigmoid norm", (1, 70, 1, 2, 128, 128), wide=BF16,
    ),
    case(
        "sm_90", "channel_decay_group_forward",
        of_channels, "bounded bias norm", (1, 150, 2, 2, 128, 128), FP16, [0, 0, 20, 150], layout="vk", state=FP16,
    ),
    case("sm_90", "channel_decay_group_forward", of_channels, "norm", (1, 130, 1, 1, 128, 128)),
    # In frames, by halves, and one behind the other.
    case("sm_90", "channel_decay_group_forward", of_channels, "raw norm", (1, 130, 1, 1, 128, 128), decays=[-4.0]),
    case(
        "sm_90", "channel_decay_group_forward",
        of_channels, "raw norm", (1, 330, 1, 1, 128, 128), decays=[-2000.0, -0.1, -4.0, -2000.0, -2000.0],
    ),
    case(
        "sm_90",
        "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients narrow_rows "
        "sum_buffers",
        of_channels, "raw bias norm", (1, 70, 1, 1, 128, 128), wide=BF16, training=True,
    ),
    case(
        "sm_90",
        "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients sum_buffers",
        of_channels, "bounded flat bias norm", (1, 150, 2, 2, 128, 128), FP16, [0, 0, 20, 150], training=True,
        multiprocessors=1,
    ),
    case(
        "sm_90",
        "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients sum_buffers",
        of_channels, "raw norm", (1, 200, 1, 1, 128, 128), decays=[-2000.0, -0.1, -4.0], training=True,
    ),
    case(
        "sm_90",
        "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients sum_buffers",
        of_channels, "raw norm", (1, 130, 1, 1, 128, 128), FP16, decays=[-0.8], training=True,
    ),
    case(
        "sm_90", "channel_decay_group_forward channel_decay_group_backward channel_decay_group_key_gradients",
        of_channels, "norm twice_sigmoid", (1, 130, 2, 2, 128, 128), wide=BF16, training=True,
    ),
    # Tokens that hardly forget each other where two blocks meet that decay by all that a frame has room for; and with
    # blocks between them that do not.
    case("sm_90", "channel_decay_group_forward", of_channels, "norm", (1, 70, 1, 1, 128, 128), of_blocks=[-86.0]),
    case(
        "sm_90", "channel_decay_group_forward",
        of_channels, "norm", (1, 64, 1, 1, 128, 128), of_blocks=[-120.0, -79.0],
    ),
    case(
        "sm_90", "channel_decay_group_forward",
        of_channels, "norm", (1, 128, 1, 1, 128, 128), FP16, of_blocks=[-13.2, -2.2, -2.2],
    ),
    case("sm_90", "channel_decay_group_forward", of_channels, "norm", (1, 64, 1, 1, 128, 128), FP16, of_blocks=[-13.2]),
    case("sm_90", "channel_decay_group_forward", of_far_tokens),
    # What stands before a recurrence and behind it.
    case(
        "sm_80", "diagonal_operands diagonal_operands_backward sum_buffers",
        around, "operands", "steps keys softplus bias limit D", (2, 9, 2, 6, 16, 24), layout="strided",
    ),
    case(
        "sm_90", "diagonal_operands diagonal_operands_backward",
        around, "operands", "heads keys", (1, 9, 2, 10, 16, 16), dtype=FP16, layout="heads first",
    ),
    case("sm_90", "diagonal_operands diagonal_operands_backward", around, "operands", "gates", (1, 9, 2, 2, 16, 16)),
    case("sm_80", "skip_gate skip_gate_backward sum_buffers", around, "behind", "D channels z", (2, 9, 2, 2, 8, 16)),
    case("sm_90", "head_steps sum_buffers", around, "head_steps", "softplus bias", (2, 9, 5, 5, 8, 8)),
    # A layer's small work.
    case(
        "sm_80", "layer_prepare_keys layer_prepare_keys_backward sum_buffers",
        layer, "prepare_keys", "a0 first v0 bonus",
    ),
    case(
        "sm_80", "layer_gated_norm layer_gated_norm_backward sum_buffers",
        layer, "gated_norm", "bias bonus", narrow=("bias",),
    ),
    case(
        "sm_90", "layer_gated_norm layer_gated_norm_backward sum_buffers",
        layer, "gated_norm", "rms silu", dtype=FP32,
    ),
    case("sm_80", "layer_gated", layer, "gated", "silu"),
    case("sm_90", "layer_activate layer_activate_backward", layer, "activate", ""),
    case("sm_80", "layer_products", lambda: product_cases.check(product_cases.group(FP16, 3))),
    case(
        "sm_80", "layer_token_shift layer_token_shift_backward sum_buffers",
        layer, "token_shift", "5 packed amounts first",
    ),
    case("sm_90", "layer_norm_shift layer_norm_shift_backward sum_buffers", layer, "norm_shift", "6 add packed first"),
    case(
        "sm_80", "layer_norm_shift layer_norm_shift_backward layer_norm_shift_mixes sum_buffers",
        layer, "norm_shift", "2 packed", few_sums=True,
    ),
    case("sm_90", "layer_shift_mix", shift_mix),
    case("sm_80", "layer_convolution layer_convolution_backward sum_buffers", convolution, (2, 20, 24), 4, BF16),
    case(
        "sm_90", "layer_convolution layer_convolution_backward sum_buffers",
        convolution, (1, 20, 7), 3, FP32, bounds=[0, 0, 2, 20],
    ),
    case("sm_80", "layer_convolution_update", convolution_update, (3, 2, 24), 4, BF16),
    case("sm_80", "layer_convolution_update", convolution_update, (3, 6, 24), 4, BF16, seen=(7, 0, 1023)),
    case("sm_90", "layer_loss_forward layer_loss_backward", loss, 100, BF16),
    *[
        case("sm_90", "layer_loss_forward layer_loss_backward layer_loss_in_place", loss_in_place, *each)
        for each in ((100, BF16), (37, FP16), (300, FP32))
    ],
    *[case("sm_80", "layer_loss_gradients", times_a_number, dtype) for dtype in LIMITS],
    # Pools of states.
    case("sm_80", "update_states", update, "wkv7", 3, 32, 16),
    case("sm_90", "update_states", update, "gla", 1, 12, 20),
    case("sm_80", "arrange_sequences gla_scan update_states", varlen, "wkv6", [1, 20, 0, 3, 1], 16, 16),
    case("sm_90", "arrange_sequences wkv7_chunked_forward update_states", varlen, "wkv7", [1, 20, 0, 3, 1], 16, 16),
    case(
        "sm_90", "update_rules",
        derived_pool, "kda", "bounded flat bias norm", (3, 2, 2, 4, 16, 16), index=torch.int32,
    ),
    case("sm_80", "update_rules", derived_pool, "delta_rule", "norm", (3, 1, 2, 2, 16, 8)),
    case("sm_80", "update_rules", derived_pool, "gated_delta_rule2", "raw bias", (3, 1, 1, 2, 12, 20)),
    case("sm_90", "update_rules", derived_pool, "simple_gla", "fixed", (3, 3, 2, 4, 16, 24)),
    case("sm_90", "update_rules", derived_pool, "ssd", "D z bias softplus", (3, 2, 2, 4, 16, 24)),
    case(
        "sm_80", "layer_delta_operands layer_gated arrange_sequences wkv7_chunked_forward update_states",
        derived_pool, "gated_delta_rule2", "raw bias", (1, 32, 2, 4, 16, 16), [0, 4, 9, 9, 32],
    ),
    case(
        "sm_80", "diagonal_operands arrange_sequences gla_scan update_states",
        derived_pool, "hgrn2", "", (1, 32, 2, 2, 16, 24), [0, 4, 9, 9, 32], index=torch.int32,
    ),
    case(
        "sm_80", "update_rules",
        derived_cases.check_without_slots, "ssd", "bias D softplus limit", "update", False, 0, BF16,
    ),
    case(
        "sm_90", "diagonal_operands arrange_sequences gla_prepare gla_group_scan update_states skip_gate_slots",
        derived_pool, "ssd", "wide z limit", (1, 32, 1, 2, 140, 8), [0, 4, 9, 9, 32],
    ),
    case(
        "sm_90", "arrange_sequences narrow_rows head_decay_forward update_rules skip_gate_slots",
        derived_cases.check_without_slots, "ssd", "D z bias softplus", "varlen", True, 0, BF16,
    ),
    case("sm_80", "replay_states", replay, "wkv7", 5, 32, 16),
    case("sm_90", "replay_states", replay, "gla", 3, 12, 20),
    case("sm_90", "replay_rules replay_states", replay_rules, "kda", "raw bias sigmoid norm"),
    case("sm_80", "replay_rules replay_states", replay_rules, "ssd", "D z bias softplus"),
    # Ops without heads.
    case("sm_80", "wkv4_forward wkv4_backward sum_buffers", wkv4, (2, 20, 33), FP32),
    case("sm_90", "wkv4_forward wkv4_backward sum_buffers", wkv4, (1, 256, 8), BF16, backend="split"),
    case("sm_80", "wkv4_update", wkv4_update, 3, 33),
    case("sm_80", "timex_convolve timex_filter_gradient", timex, (3, 2, 77), BF16, "tiles"),
    case("sm_90", "timex_transform sum_rows", timex, (3, 2, 40), FP32, "transforms"),
]  # fmt: skip


@pytest.mark.parametrize("given", CASES, ids=str)
def test_results(given, interpreted):
    torch.manual_seed(0)
    interpreted.use(given.arch)
    interpreted.multiprocessors = given.multiprocessors
    given.call()
    assert {launch.template for launch in interpreted.launches} == {*given.templates}


def test_every_template_runs():
    assert {name for given in CASES for name in given.templates} == {*template.names()}
