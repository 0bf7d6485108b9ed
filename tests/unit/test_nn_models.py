"""The whole models of RWKV-5 and 6 on a CPU; what they share with that of RWKV-7 is tested there too."""

import copy
import doctest
import inspect
import math
import pickle
import re

import nn_cases
import pytest
import torch
from nn_cases import SIZES, flat, weighted
from plain_layer import norm
from plain_nn import STEPS

import rwkv_jit

nn = rwkv_jit.nn
VOCABULARY, WIDTH, LAYERS, HEAD_SIZE, HIDDEN = SIZES.values()
B, T = 2, 7
MODELS = pytest.mark.parametrize("name", ["RWKV5", "RWKV6"])


def make(name, dtype=torch.float64, seed=0, **more):
    return nn_cases.make(dtype, seed, name, **more)


def make_tokens(*shape, seed=1):
    return torch.randint(VOCABULARY, shape or (B, T), generator=torch.Generator().manual_seed(seed))


def float_state(model):
    """A state of large numbers in float32: the norm of what a first token alone makes may have any error."""
    return [type(each)(*(x.detach().float() for x in each)) for each in nn_cases.make_state(model, B)]


def gradients(model, results, state=()):
    asked = [*model.parameters(), *(x for each in state for x in each)]
    return torch.autograd.grad(weighted(results), asked)


def all_close(found, want, **limits):
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, **limits)


def plainly(model, tokens, state):
    """The same model token by token, as the papers have it."""
    name, p = type(model).__name__, dict(model.named_parameters())

    def normed(x, place):
        return norm(x, p[f"{place}.weight"], p[f"{place}.bias"], 1e-5)

    def mixed(kind, x, place, *own):
        parameters = {each.removeprefix(f"{place}."): y for each, y in p.items() if each.startswith(f"{place}.")}
        return STEPS[f"{name}{kind}"](None, parameters, x, own)

    logits, finals = [], []
    for row, text in enumerate(tokens):
        held = [[x[row] for x in each] for each in state]
        for token in text:
            x = normed(p["emb.weight"][token], "blocks.0.ln0")
            for layer, (wkv, time_shift, channel_shift) in enumerate(held):
                place = f"blocks.{layer}"
                y, (time_shift, wkv) = mixed("TimeMix", normed(x, f"{place}.ln1"), f"{place}.att", time_shift, wkv)
                x = x + y
                y, (channel_shift,) = mixed("ChannelMix", normed(x, f"{place}.ln2"), f"{place}.ffn", channel_shift)
                x = x + y
                held[layer] = [wkv, time_shift, channel_shift]
            logits.append(p["head.weight"] @ normed(x, "ln_out"))
        finals.append(held)
    made = [[torch.stack(each) for each in zip(*layer, strict=True)] for layer in zip(*finals, strict=True)]
    return flat(torch.stack(logits).view(*tokens.shape, VOCABULARY), made)


# ---- values and gradients ----------------------------------------------------------------------------------------


@MODELS
def test_values_and_every_gradient_are_those_of_the_equations(name):
    model, tokens = make(name), make_tokens()
    state = nn_cases.make_state(model, B)
    found, want = flat(*model(tokens, state, return_state=True)), plainly(model, tokens, state)
    all_close(found, want, rtol=1e-10, atol=1e-12)
    grads = gradients(model, found, state)
    all_close(grads, gradients(model, want, state), rtol=1e-8, atol=1e-11)
    assert all(torch.count_nonzero(x) for x in grads)


@MODELS
def test_a_text_begins_with_zeros(name):
    model, tokens = make(name), make_tokens()
    zeros = [[torch.zeros_like(x) for x in each] for each in nn_cases.make_state(model, B)]
    found = model(tokens, return_state=True)
    all_close(flat(*found), plainly(model, tokens, zeros), rtol=1e-10, atol=1e-12)
    assert {type(each) for each in found[1]} == {getattr(nn, f"{name}State")}


@MODELS
@pytest.mark.parametrize("cut", [0, 1, 4, T])
def test_text_that_is_cut_anywhere_is_as_the_whole(name, cut):
    model, tokens = make(name), make_tokens()
    state = nn_cases.make_state(model, B)
    whole = flat(*model(tokens, state, return_state=True))
    before, middle = model(tokens[:, :cut], state, return_state=True)
    behind, after = model(tokens[:, cut:], middle, return_state=True)
    parts = flat(torch.cat([before, behind], 1), after)
    all_close(parts, whole, rtol=1e-10, atol=1e-12)
    all_close(gradients(model, parts, state), gradients(model, whole, state), rtol=1e-8, atol=1e-11)
    assert not any(x.requires_grad for each in middle for x in each.detach())


@MODELS
def test_packed_texts_are_as_each_alone(name):
    model, bounds = make(name), [0, 0, 3, 4, T, T]
    tokens, state = make_tokens(1, T), nn_cases.make_state(model, len(bounds) - 1)
    packed = flat(*model(tokens, state, torch.tensor(bounds), return_state=True))
    alone = [
        model(tokens[:, begin:end], [type(each)(*(x[i : i + 1] for x in each)) for each in state], return_state=True)
        for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    states = [map(torch.cat, zip(*layer, strict=True)) for layer in zip(*(s for _, s in alone), strict=True)]
    one_by_one = flat(torch.cat([each for each, _ in alone], 1), states)
    all_close(packed, one_by_one, rtol=1e-10, atol=1e-12)
    all_close(gradients(model, packed, state), gradients(model, one_by_one, state), rtol=1e-8, atol=1e-11)


@MODELS
def test_loss_is_that_of_the_logits_and_checkpointing_keeps_less(name):
    model, tokens, targets = make(name), make_tokens(), make_tokens(seed=5)
    targets[0, :3] = -100
    parameters = [*model.parameters()]
    want = rwkv_jit.cross_entropy(model(tokens), targets, l2_wrap=0.5)

    def run():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss = model.loss(tokens, targets, 0.5)
        torch.testing.assert_close(loss, want)
        return sum(kept), torch.autograd.grad(loss, parameters)

    kept, found = run()
    all_close(found, torch.autograd.grad(want, parameters))
    model.checkpointing = True
    less, again = run()
    assert less < kept / 3
    all_close(again, found, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["RWKV5", "RWKV6", "RWKV7"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_without_any_target_change_no_gradient(name, checkpointing):
    model = make(name, checkpointing=checkpointing)
    tokens, targets = make_tokens(), make_tokens(seed=5)
    model.loss(tokens, targets).backward()
    before = [x.grad.clone() for x in model.parameters()]
    loss = model.loss(tokens, torch.full_like(targets, -100))
    loss.backward()
    assert loss.isnan()
    assert all(torch.equal(x.grad, y) for x, y in zip(model.parameters(), before, strict=True))


# ---- hooks and adapters ------------------------------------------------------------------------------------------

EVERY_MODEL = pytest.mark.parametrize("name", ["RWKV5", "RWKV6", "RWKV7"])


class Adapter(torch.nn.Module):
    """A matrix of a low rank beside that of a layer, which stays as it is."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = torch.nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def in_place_of_forward(head):
    forward = head.forward
    head.forward = lambda x: 2 * forward(x)


def parametrized(head):
    torch.nn.utils.parametrizations.weight_norm(head)
    head.parametrizations.weight.original0.data.mul_(2)


HEADS = {
    "adapter": lambda model: setattr(model, "head", Adapter(model.head)),
    "bias": lambda model: setattr(model.head, "bias", torch.nn.Parameter(torch.arange(11.0).double())),
    "forward hook": lambda model: model.head.register_forward_hook(lambda module, given, made: 2 * made),
    "forward pre-hook": lambda model: model.head.register_forward_pre_hook(lambda module, given: 2 * given[0]),
    "backward hook": lambda model: model.head.register_full_backward_hook(lambda module, made, given: (2 * made[0],)),
    "backward pre-hook": lambda model: model.head.register_full_backward_pre_hook(lambda module, made: (2 * made[0],)),
    "in place of forward": lambda model: in_place_of_forward(model.head),
    "parametrized": lambda model: parametrized(model.head),
    "a sequence": lambda model: setattr(model, "head", torch.nn.Sequential(model.head, torch.nn.Tanh())),
}  # fmt: skip


@EVERY_MODEL
@pytest.mark.parametrize("kind", HEADS)
def test_loss_is_that_of_the_head_that_is_called(name, kind):
    model, tokens, targets = make(name), make_tokens(), make_tokens(seed=5)
    plain = model.loss(tokens, targets, 0.5)
    plain = [plain, *torch.autograd.grad(plain, [model.emb.weight])]
    HEADS[kind](model)
    wanted = [x for x in model.parameters() if x.requires_grad]
    found, want = model.loss(tokens, targets, 0.5), rwkv_jit.cross_entropy(model(tokens), targets, l2_wrap=0.5)
    results = [[loss, *torch.autograd.grad(loss, wanted)] for loss in (found, want)]
    all_close(*results)
    assert not torch.allclose(results[0][1], plain[1])


@EVERY_MODEL
def test_every_module_is_called_where_it_has_a_hook(name):
    """Alone, so that the others may be run as functions; whatever it does is as where all are called."""
    model, tokens, targets = make(name, layers=2), make_tokens(B, 3), make_tokens(B, 3, seed=5)
    parameters = [*model.parameters()]

    def run():
        loss, state = model.loss(tokens, targets, 0.5, return_state=True)
        gradients = torch.autograd.grad(loss, parameters)
        pool = model.new_pool(4, 1)
        slots = [[2, 1], [2, 0], [2, 1]]  # slot 0 is none
        steps = [model.step(*given, pool, own)[: 1 + own[1]] for *given, own in zip(tokens.T, slots, strict=True)]
        return [[loss, *gradients, *flat(loss, state)], [*steps, pool.wkv, pool.time_shift, pool.channel_shift]]

    plain = run()
    everywhere = [x.register_forward_hook(lambda *_: None) for x in model.modules()]
    for found, want in zip(run(), plain, strict=True):
        all_close(found, want, rtol=1e-6, atol=1e-9)
    for path in ("", ".ln1", ".att", ".att.ln_x", ".att.key", ".ln2", ".ffn", "head"):
        module, calls = model.get_submodule(path if path == "head" else f"blocks.1{path}"), []

        def changing(module, given, made, calls=calls):
            calls.append(1)
            return (made[0] * 1.1, *made[1:]) if isinstance(made, tuple) else made * 1.1

        own = module.register_forward_hook(changing)
        want = run()
        for hook in everywhere:
            hook.remove()
        found = run()
        assert len(calls) == 2 * (1 + 3), path
        for each, other in zip(found, want, strict=True):
            all_close(each, other, rtol=1e-6, atol=1e-9)
        own.remove()
        everywhere = [x.register_forward_hook(lambda *_: None) for x in model.modules()]


@EVERY_MODEL
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "autocast"])
@pytest.mark.parametrize(
    ("path", "norm"),
    [
        ("ln1", torch.nn.LayerNorm(WIDTH, bias=False)),
        ("ln2", torch.nn.LayerNorm(WIDTH, elementwise_affine=False)),
        ("ln1", torch.nn.LayerNorm((WIDTH,), eps=0.5)),
        ("ln2", torch.nn.RMSNorm(WIDTH)),
        ("att.ln_x", torch.nn.GroupNorm(3, WIDTH, affine=False)),
        ("att.ln_x", torch.nn.GroupNorm(1, WIDTH, eps=0.5)),
        ("att.ln_x", torch.nn.GroupNorm(6, WIDTH)),
    ],
    ids=str,
)
def test_norms_of_other_settings_are_as_where_they_are_called(name, path, norm, dtype):
    own = torch.float64 if dtype == torch.float64 else torch.float32
    model, tokens, targets = make(name, own, layers=2), make_tokens(B, 3), make_tokens(B, 3, seed=5)
    norm = copy.deepcopy(norm)
    before = model(tokens)
    owner, _, last = f"blocks.1.{path}".rpartition(".")
    setattr(model.get_submodule(owner), last, norm.to(own))
    for x in norm.parameters():
        torch.nn.init.normal_(x, generator=torch.Generator().manual_seed(6))
    parameters = [*model.parameters()]

    def run():
        with torch.autocast("cpu", dtype, enabled=own != dtype):
            loss, pool = model.loss(tokens, targets), model.new_pool(B)
            steps = [model.step(token, pool) for token in tokens.T]
        return [loss, *torch.autograd.grad(loss, parameters), *steps]

    found = run()
    norm.register_forward_hook(lambda *_: None)
    limits = {"rtol": 1e-6, "atol": 1e-9} if own == dtype else {"rtol": 0.05, "atol": 0.02}
    all_close(found, run(), **limits)
    if own == dtype:
        assert not torch.allclose(model(tokens), before)
        all_close(found[-3:], model(tokens).detach().unbind(1), rtol=1e-4, atol=1e-5)


@EVERY_MODEL
def test_hooks_of_all_modules_see_every_call(name):
    model, tokens, seen = make(name), make_tokens(), set()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, given, made: seen.add(module))
    try:
        model.loss(tokens, tokens)
    finally:
        hook.remove()
    assert {x for path, x in model.named_modules() if path not in ("", "blocks")} == seen


# ---- decoding ----------------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("slots", [None, [1, 0], torch.tensor([3, 2])])
def test_step_by_step_is_as_forward(name, slots):
    model, tokens = make(name, torch.float32), make_tokens()
    want, state = model(tokens, return_state=True)
    pool = model.new_pool(4)
    found = torch.stack([model.step(token, pool, slots) for token in tokens.T], 1)
    torch.testing.assert_close(found, want.detach(), rtol=1e-4, atol=1e-5)
    assert not found.requires_grad
    rows = [0, 1] if slots is None else [int(x) for x in slots]
    for own in state[0]._fields:
        torch.testing.assert_close(
            pool[own][:, rows], torch.stack([getattr(each, own) for each in state]).detach(), rtol=1e-4, atol=1e-5
        )
        assert not pool[own][:, [x for x in range(4) if x not in rows]].any()


@MODELS
def test_rows_of_reserved_slots_are_padding(name):
    model, tokens = make(name, torch.float32), make_tokens(3)
    pool = model.new_pool(3, reserved=1)
    (slot,) = pool.allocate()
    found = model.step(tokens, pool, [0, slot, 0])
    torch.testing.assert_close(found[1], model(tokens.unsqueeze(1))[1, 0].detach(), rtol=1e-4, atol=1e-5)
    for states in (pool.wkv, pool.time_shift, pool.channel_shift):
        assert states[:, slot].any()
        assert not states[:, 0].any()


@EVERY_MODEL
@pytest.mark.parametrize("is_called", [False, True])
def test_prompts_in_parts_are_as_forward(name, is_called):
    """Packed and not, in slots and not; a row with a reserved slot is padding, and other slots stay as they are."""
    model, tokens = make(name, torch.float32), make_tokens()
    want, state = model(tokens, return_state=True)
    if is_called:
        model.blocks[0].register_forward_hook(lambda *_: None)
    row, packed = model.new_pool(len(tokens)), model.new_pool(4, reserved=1)
    packed.wkv[:, 1].fill_(7)
    bounds = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    for begin in (0, 2):
        part = tokens[:, begin : begin + 2]
        found = model.prefill(part, row)
        text = torch.cat([part[1], tokens[0, :1], part[0]]).unsqueeze(0)
        in_slots = model.prefill(text, packed, [3, 0, 2], bounds)[[2, 0]]
        for each in (found, in_slots):
            torch.testing.assert_close(each, want[:, begin + 1].detach(), rtol=1e-4, atol=1e-5)
    found = torch.stack([model.step(token, row) for token in tokens.T[4:]], 1)
    torch.testing.assert_close(found, want[:, 4:].detach(), rtol=1e-4, atol=1e-5)
    for own in state[0]._fields:
        kept = torch.stack([getattr(each, own) for each in state]).detach()
        torch.testing.assert_close(row[own], kept, rtol=1e-4, atol=1e-5)
        assert not packed[own][:, 0].any()
    assert (packed.wkv[:, 1] == 7).all()
    assert packed.wkv[:, 2:].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": [1]}, "slots: expected shape [2], a slot for each row, got [1]"),
        ({"slots": [1, 4]}, "slots: expected slots below 4, or up to 0 for none; got [4]"),
        ({"tokens": make_tokens(2)}, "tokens: expected shape [batch, tokens], got [2]"),
        ({"tokens": make_tokens(2, 0)}, "tokens: expected at least one token, got shape [2, 0]"),
        ({"tokens": make_tokens(5, 1)}, "pool: expected a slot for each of the 5 rows, or state_indices; got 4"),
        ({"slots": [1, 2], "cu_seqlens": torch.tensor([0, 2])}, "slots: expected shape [1], a slot for each row, got"),
        (
            {"tokens": make_tokens(1, 4), "cu_seqlens": torch.tensor([0, 2, 2, 4])},
            "cu_seqlens: expected at least one token in each sequence, got [0, 2, 2, 4]",
        ),
        (
            {"tokens": make_tokens(1, 4), "cu_seqlens": torch.tensor([0, 0, 4])},
            "cu_seqlens: expected at least one token in each sequence, got [0, 0, 4]",
        ),
    ],
)
def test_prompts_that_do_not_fit_are_errors(given, message):
    model = make("RWKV7", torch.float32)
    pool = model.new_pool(4, 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.prefill(**{"tokens": make_tokens(2, 3), "pool": pool, **given})
    assert not any(pool[each].any() for each in ("wkv", "time_shift", "channel_shift"))


@pytest.mark.parametrize("read", ["step", "prefill"])
def test_a_pool_that_is_none_is_named(read):
    with pytest.raises(TypeError, match="pool: expected a StatePool, got NoneType"):
        getattr(make("RWKV7", torch.float32), read)(make_tokens(*((2,) if read == "step" else (2, 3))), None)


@EVERY_MODEL
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([0.9, 1.9], TypeError, "slots: expected an int or several, got [0.9, 1.9]"),
        ([1], ValueError, "slots: expected shape [2], a slot for each row, got [1]"),
        ([1, 2**40], ValueError, "slots: expected slots below 4, or up to 0 for none; got [1099511627776]"),
        (torch.tensor([1, 4]), ValueError, "slots: expected slots below 4, or up to 0 for none; got [4]"),
        (torch.tensor([3, 3]), ValueError, "slots: expected another slot for each state that is written, got [3]"),
        (torch.tensor([1.0, 2.0]), TypeError, "slots: expected torch.int32 or torch.int64, got torch.float32"),
    ],
)
def test_slots_of_a_step_are_looked_at(name, is_called, slots, error, message):
    model = make(name, torch.float32)
    pool = model.new_pool(4, 1)
    if is_called:
        model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(error, match=re.escape(message)):
        model.step(make_tokens(2), pool, slots)
    assert not any(pool[each].any() for each in ("wkv", "time_shift", "channel_shift"))
    with pytest.raises(ValueError, match="expected a slot for each of the 5 rows, or state_indices; got 4"):
        model.step(make_tokens(5), pool)


@EVERY_MODEL
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize(
    ("tokens", "layers", "error", "message"),
    [
        (make_tokens(2, 3), LAYERS, ValueError, "tokens: expected shape [batch], got [2, 3]"),
        (torch.tensor(1), LAYERS, ValueError, "tokens: expected shape [batch], got []"),
        (torch.ones(2), LAYERS, TypeError, "tokens: expected torch.int64 or torch.int32, got torch.float32"),
        ([1, 2], LAYERS, TypeError, "tokens: expected a torch.Tensor, got list"),
        (make_tokens(2), LAYERS - 1, ValueError, f"pool: expected wkv of {LAYERS} layers, got {LAYERS - 1}"),
        (make_tokens(2), LAYERS + 1, ValueError, f"pool: expected wkv of {LAYERS} layers, got {LAYERS + 1}"),
    ],
)
def test_tokens_and_pool_of_a_step_are_looked_at(name, is_called, tokens, layers, error, message):
    model, pool = make(name, torch.float32), make(name, torch.float32, layers=layers).new_pool(4, 1)
    if is_called:
        model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        model.step(tokens, pool, [1, 2])
    assert not any(pool[each].any() for each in ("wkv", "time_shift", "channel_shift"))


@MODELS
def test_pool_has_the_types_of_the_model(name):
    pool = make(name, torch.bfloat16).new_pool(5, reserved=2)
    assert (len(pool), pool.reserved, pool.wkv.dtype, pool.time_shift.dtype) == (5, 2, torch.float32, torch.bfloat16)
    assert pool.wkv.shape == (LAYERS, 5, WIDTH // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE)
    assert pool.channel_shift.shape == (LAYERS, 5, WIDTH)


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generated_tokens_are_the_best_ones_of_forward(name, dtype):
    model, text = make(name, dtype, seed=3), make_tokens()
    found = model.generate(text, 8, temperature=0)
    for _ in range(8):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, text[:, T:])
    assert len(set(found.flatten().tolist())) > 3


# ---- files -------------------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_both_ways(name, suffix, dtype, tmp_path):
    model, path = make(name, dtype), tmp_path / f"model{suffix}"
    model.save_checkpoint(path)
    again, want = getattr(nn, name).from_checkpoint(path), model.state_dict()
    assert type(again) is type(model)
    assert all(torch.equal(x, want[own]) and x.dtype == dtype for own, x in again.state_dict().items())
    assert again.state_dict().keys() == want.keys()
    assert torch.equal(again(make_tokens()), model(make_tokens()))
    assert torch.equal(again.generate(make_tokens(), 3, temperature=0), model.generate(make_tokens(), 3, temperature=0))
    wide = getattr(nn, name).from_checkpoint(path, dtype=torch.float64, device="cpu")
    assert {x.dtype for x in wide.parameters()} == {torch.float64}


def write(path, held):
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(held, path)
    else:
        torch.save(held, path)


@EVERY_MODEL
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_other_dtypes_are_all_in_one_error(name, suffix, tmp_path):
    path, held = tmp_path / f"held{suffix}", make(name, torch.float32).state_dict()
    others = {"emb.weight": torch.float8_e4m3fn, "head.weight": torch.complex64, "blocks.1.ln1.bias": torch.int32}
    write(path, {own: x.to(others.get(own, x.dtype)) for own, x in held.items()})
    with pytest.raises(ValueError, match="^path: expected weights of torch.float32, torch.bfloat16, .* got ") as caught:
        getattr(nn, name).from_checkpoint(path, dtype=torch.float32)
    assert {*str(caught.value).partition(", got ")[2].split(", ")} == {f"{own} of {x}" for own, x in others.items()}
    write(path, held)
    for dtype in (torch.float8_e5m2, torch.int8, "float32"):
        with pytest.raises(TypeError, match=r"dtype: expected torch.float32 or .*, got "):
            getattr(nn, name).from_checkpoint(path, dtype=dtype)


@EVERY_MODEL
@pytest.mark.parametrize("layer", [300000, 10**20])
def test_layers_are_no_more_than_there_are_tensors(name, layer, tmp_path):
    path = tmp_path / "held.pth"
    torch.save({"emb.weight": torch.zeros(2, 4), f"blocks.{layer}.ln1.weight": torch.zeros(4)}, path)
    said = "expected tensors of 300001 layers in .*, got 2 in all" if layer < 10**9 else "it also has blocks.1000"
    with pytest.raises(ValueError, match=said):
        getattr(nn, name).from_checkpoint(path)


@EVERY_MODEL
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_tied_weights_are_written_by_each_name_and_read_apart(name, suffix, tmp_path):
    model, path = make(name, torch.float32), tmp_path / f"model{suffix}"
    model.head.weight = model.emb.weight
    model.blocks[1].ln1.weight = model.blocks[0].ln1.weight
    model.blocks[2].ln1.weight.data = model.blocks[0].ln1.weight.data[:]
    model.save_checkpoint(path)
    again, want = getattr(nn, name).from_checkpoint(path), model.state_dict()
    assert again.state_dict().keys() == want.keys()
    assert all(torch.equal(x, want[own]) for own, x in again.state_dict().items())
    assert len({x.untyped_storage().data_ptr() for x in again.parameters()}) == len(want)


@MODELS
def test_missing_and_foreign_names_are_all_in_one_error(name, tmp_path):
    path, held = tmp_path / "held.pth", make(name, torch.float32).state_dict()
    gone = ["emb.weight", "blocks.1.att.time_decay", "blocks.2.ffn.receptance.weight"]
    new = ["blocks.0.att.time_first", "blocks.2.att.r_k"]
    torch.save({own: x for own, x in held.items() if own not in gone} | dict.fromkeys(new, torch.zeros(1)), path)
    with pytest.raises(ValueError, match="^path: expected the parameters of the model in ") as caught:
        getattr(nn, name).from_checkpoint(path)
    lacking, _, foreign = str(caught.value).partition("it lacks ")[2].partition("; it also has ")
    assert (sorted(lacking.split(", ")), sorted(foreign.split(", "))) == (sorted(gone), sorted(new))


@MODELS
def test_checkpoint_of_another_family_is_an_error(name, tmp_path):
    for other in {"RWKV5", "RWKV6", "RWKV7"} - {name}:
        make(other, torch.float32).save_checkpoint(tmp_path / "other.pth")
        with pytest.raises(ValueError, match="it lacks .*; it also has "):
            getattr(nn, name).from_checkpoint(tmp_path / "other.pth")


@MODELS
def test_other_shapes_are_all_in_one_error(name, tmp_path):
    path, held = tmp_path / "held.pth", make(name, torch.float32).state_dict()
    torch.save(held | {"blocks.1.att.gate.weight": torch.zeros(WIDTH, 7), "ln_out.bias": torch.zeros(3)}, path)
    with pytest.raises(
        ValueError, match=r"ln_out.bias \[3\] and not \[12\]|gate.weight \[12, 7\] and not \[12, 12\]"
    ) as caught:
        getattr(nn, name).from_checkpoint(path)
    assert str(caught.value).count(" and not ") == 2
    torch.save(held | {"blocks.0.att.time_faaaa": torch.zeros(WIDTH)}, path)  # as in RWKV-5.1 and before
    with pytest.raises(ValueError, match=r"expected a matrix for blocks.0.att.time_faaaa in .*, got shape \[12\]"):
        getattr(nn, name).from_checkpoint(path)


# ---- what the official models are --------------------------------------------------------------------------------


def official_shapes(name, layers, vocabulary, width, hidden, rank, decay_rank):
    """Every name and shape of a checkpoint of heads of 64."""
    one, square, heads = (1, 1, width), (width, width), (width // 64, 64)
    block = {f"att.{own}.weight": square for own in ("receptance", "key", "value", "gate", "output")}
    block |= {"ffn.receptance.weight": square, "ffn.key.weight": (hidden, width), "ffn.value.weight": (width, hidden)}
    block |= {f"{own}.{part}": (width,) for own in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")}
    block["att.time_faaaa"] = heads
    if name == "RWKV5":
        block |= {f"att.time_mix_{letter}": one for letter in "kvrg"} | {"att.time_decay": heads}
        block |= {f"ffn.time_mix_{letter}": one for letter in "kr"}
    else:
        block |= {f"att.time_maa_{letter}": one for letter in "xwkvrg"} | {"att.time_decay": one}
        block |= {f"ffn.time_maa_{letter}": one for letter in "kr"}
        block |= {"att.time_maa_w1": (width, 5 * rank), "att.time_maa_w2": (5, rank, width)}
        block |= {"att.time_decay_w1": (width, decay_rank), "att.time_decay_w2": (decay_rank, width)}
    shapes = {f"blocks.{layer}.{own}": shape for layer in range(layers) for own, shape in block.items()}
    shapes |= {f"{own}.{part}": (width,) for own in ("blocks.0.ln0", "ln_out") for part in ("weight", "bias")}
    return shapes | {"emb.weight": (vocabulary, width), "head.weight": (vocabulary, width)}


@pytest.mark.parametrize(
    ("name", "width", "layers", "hidden", "ranks"),
    [
        ("RWKV5", 768, 12, 2688, (0, 0)), ("RWKV5", 2560, 32, 8960, (0, 0)),
        ("RWKV6", 2048, 24, 7168, (32, 64)), ("RWKV6", 4096, 32, 14336, (64, 128)),
    ],
)  # fmt: skip
def test_names_and_shapes_are_those_of_released_models(name, width, layers, hidden, ranks):
    model = getattr(nn, name)(65536, width, layers, device="meta")
    found = {own: tuple(x.shape) for own, x in model.state_dict().items()}
    assert found == official_shapes(name, layers, 65536, width, hidden, *ranks)
    assert found == {own: tuple(x.shape) for own, x in model.named_parameters()}


@MODELS
def test_initial_values_are_those_of_the_modules(name):
    def begun(module):
        torch.manual_seed(4)
        module.reset_parameters()
        return module.parameters()

    model = getattr(nn, name)(300, 64, 3, 32)
    for layer, block in enumerate(model.blocks):
        for own, kind, more in (("att", "TimeMix", (32,)), ("ffn", "ChannelMix", ())):
            alone = getattr(nn, f"{name}{kind}")(64, layer, 3, *more)
            all_close(begun(getattr(block, own)), begun(alone), rtol=0, atol=0)
        for norm_of in [block.ln1, block.ln2, *([model.blocks[0].ln0] if layer == 0 else [])]:
            assert bool((norm_of.weight == 1).all())
            assert not norm_of.bias.any()
        assert (block.ln0 is None) == (layer > 0)
    matrix = model.head.weight.detach().double()
    gram = matrix.T @ matrix / (0.25 * 300 / 64)
    torch.testing.assert_close(gram, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-4)
    assert 0.9e-4 < float(model.emb.weight.detach().abs().max()) <= 1e-4


@MODELS
def test_groups_of_the_optimizer_have_every_parameter_once(name):
    model = make(name, torch.float32)
    groups = model.param_groups(lr=0.01, weight_decay=0.2)
    names = {id(x): own for own, x in model.named_parameters()}
    found = [(names[id(x)], group["lr"], group["weight_decay"]) for group in groups for x in group["params"]]
    assert sorted(own for own, *_ in found) == sorted(names.values())
    for own, lr, decay in found:
        is_matrix = re.search(r"(receptance|key|value|gate|output|emb|head)\.weight$", own) is not None
        assert (lr, decay) == (0.02 if own.endswith("att.time_decay") else 0.01, 0.2 if is_matrix else 0.0), own
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-18)
    tokens, losses = make_tokens(), []
    for _ in range(20):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


# ---- what torch does with modules --------------------------------------------------------------------------------


@MODELS
def test_model_without_memory_gets_some_and_its_values(name):
    model = getattr(nn, name)(**SIZES, device="meta")
    assert all(x.is_meta for x in model.parameters())
    model.to_empty(device="cpu")
    for x in model.parameters():
        torch.nn.init.constant_(x, math.nan)
    fresh = getattr(nn, name)(**SIZES)
    for each in (model, fresh):
        torch.manual_seed(4)
        each.reset_parameters()
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), fresh.parameters(), strict=True))
    assert torch.isfinite(model(make_tokens())).all()


@MODELS
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_models_of_their_own(name, again):
    model, tokens = make(name), make_tokens()
    want, made = model(tokens), again(model)
    assert torch.equal(made(tokens), want)
    with torch.no_grad():
        made.head.weight.zero_()
    assert torch.equal(model(tokens), want)


@MODELS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_model_has_one_dtype(name, dtype):
    model = make(name, dtype)
    begun = float_state(model)
    with torch.no_grad():
        logits, state = model(make_tokens(), begun, return_state=True)
    assert {x.dtype for x in model.parameters()} == {dtype} == {logits.dtype}
    assert {each.time_shift.dtype for each in state} == {dtype}
    exact = make(name)
    exact.load_state_dict({own: x.double() for own, x in model.state_dict().items()})
    want = exact(make_tokens(), [type(each)(*(x.double() for x in each)) for each in begun]).detach()
    assert float((logits.double() - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("RWKV5", False), ("RWKV6", True), pytest.param("RWKV5", True, marks=pytest.mark.full),
        pytest.param("RWKV6", False, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_block_is_compiled_in_one_graph(name, packed):
    model = make(name, torch.float32)
    block, state = model.blocks[1], nn_cases.make_state(model, 2 if packed else 1)[0]
    x = torch.randn(1, T, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bounds = torch.tensor([0, 2, T]) if packed else None
    torch._dynamo.reset()

    def run(function):
        y, after = function(x, state, bounds)
        return [y, *after], torch.autograd.grad(weighted([y, *after]), [x, *state, *block.parameters()])

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for found, want in zip(run(compiled), run(block), strict=True):
        all_close(found, want)


@MODELS
def test_model_is_compiled_in_one_graph(name):
    model, tokens = make(name, torch.float32, checkpointing=True, layers=2), make_tokens(B, 3)
    torch._dynamo.reset()
    found, want = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens), model(tokens)
    torch.testing.assert_close(found, want)
    all_close(gradients(model, [found]), gradients(model, [want]))


@MODELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_parameters_and_their_gradients_in_float32(name, dtype):
    model, tokens, targets = make(name, torch.float32), make_tokens(), make_tokens(seed=5)
    parameters, state = [*model.parameters()], float_state(model)
    exact = model.loss(tokens, targets, state=state)
    want = torch.autograd.grad(exact, parameters)
    with torch.autocast("cpu", dtype):
        seen = []
        linear = model.blocks[1].att.output, model.blocks[1].att.receptance, model.blocks[1].ffn.key
        hooks = [x.register_forward_hook(lambda _, given, out: seen.extend([given[0], out])) for x in linear]
        loss = model.loss(tokens, targets, state=state)
        for hook in hooks:
            hook.remove()
        stepped = model.step(tokens[:, 0], model.new_pool(B))
    found = torch.autograd.grad(loss, parameters)
    assert {x.dtype for x in seen} == {dtype}
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    torch.testing.assert_close(stepped.float(), model(tokens)[:, 0].detach(), rtol=0.1, atol=0.1)
    x, y = (torch.cat([each.flatten() for each in grads]) for grads in (found, want))
    assert float((x - y).norm() / y.norm()) < 0.05


# ---- errors, docstrings ------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocabulary": 0}, "vocabulary: expected at least 1, got 0"),
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"width": 13}, "width: expected a multiple of the head size, 4, got 13"),
        ({"hidden": 0}, "hidden: expected at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(name, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(nn, name)(**{**SIZES, **sizes})


@MODELS
def test_a_small_model_has_hidden_channels(name):
    model = getattr(nn, name)(VOCABULARY, 8, 1, head_size=4)
    assert model.blocks[0].ffn.key.out_features == 32


@MODELS
def test_calls_that_do_not_fit_are_errors(name):
    with pytest.raises(ValueError, match=re.escape("state: expected one of each of the 3 layers, got 0")):
        make(name)(make_tokens(), [])
    with pytest.raises(ValueError, match=re.escape("tokens: expected shape [batch, tokens], got [3]")):
        make(name)(make_tokens(3))
    with pytest.raises(TypeError, match="^stream: expected a function of the tokens of a step, got 3$"):
        make(name).generate(make_tokens(), 2, stream=3)


@MODELS
@pytest.mark.parametrize("kind", ["", "Block"])
def test_docstring_describes_every_parameter_and_its_examples_are_right(name, kind):
    module = getattr(nn, name + kind)
    text = inspect.getdoc(module)
    shown = text.partition("Parameters\n----------\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^(\S.*?)(?: : .*)?$", shown, flags=re.MULTILINE)
    assert [x for line in lines for x in line.split(", ")] == list(inspect.signature(module).parameters)
    names = {"torch": torch, "rwkv_jit": rwkv_jit}
    example = doctest.DocTestParser().get_doctest(text.replace('"cuda"', '"cpu"'), names, name, None, None)
    assert len(example.examples) >= 3
    assert doctest.DocTestRunner().run(example).failed == 0
