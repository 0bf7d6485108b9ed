"""The modules of RWKV-7 on a CPU: values and gradients, states, decoding, files, and what torch does with modules."""

import copy
import doctest
import inspect
import io
import math
import os
import pickle
import re

import nn_cases
import plain_layer
import pytest
import torch
from nn_cases import RANKS, SIZES, flat, make, weighted
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.nn import checkpoints

nn = rwkv_jit.nn
VOCABULARY, WIDTH, LAYERS, HEAD_SIZE, _ = SIZES.values()
B, T = 2, 9
MODULES = ["RWKV7", "RWKV7Block", "RWKV7ChannelMix", "RWKV7TimeMix"]


def make_tokens(*shape, seed=1):
    return nn_cases.make_tokens(make(), *(shape or (B, T)), seed=seed)


def make_state(model, texts=B):
    return nn_cases.make_state(model, texts)


def gradients(model, results, state=()):
    asked = [*model.parameters(), *(x for each in state for x in each)]
    return torch.autograd.grad(weighted(results), asked)


def all_close(found, want, **limits):
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, **limits)


def plainly(model, tokens, state):
    """The same model token by token, as the paper has it."""
    p = {name: x.reshape(-1) if x.shape[:2] == (1, 1) else x for name, x in model.named_parameters()}
    state, logits = [list(each) for each in state], []
    for token in tokens.T:
        x = plain_layer.norm(p["emb.weight"][token], p["blocks.0.ln0.weight"], p["blocks.0.ln0.bias"], 1e-5)
        v_first = None
        for layer, (wkv, time_shift, channel_shift) in enumerate(state):
            prefix = f"blocks.{layer}."
            own = {name.removeprefix(prefix): each for name, each in p.items() if name.startswith(prefix)}
            x, v_first, n, m, wkv = plain_layer.decode(own, x, time_shift, channel_shift, wkv, v_first)
            state[layer] = [wkv, n, m]
        logits.append(plain_layer.norm(x, p["ln_out.weight"], p["ln_out.bias"], 1e-5) @ p["head.weight"].T)
    return flat(torch.stack(logits, 1), state)


# ---- values and gradients ----------------------------------------------------------------------------------------


def test_values_and_every_gradient_are_those_of_the_equations():
    model, tokens = make(), make_tokens()
    state = make_state(model)
    found, want = flat(*model(tokens, state, return_state=True)), plainly(model, tokens, state)
    all_close(found, want, rtol=1e-10, atol=1e-12)
    grads = gradients(model, found, state)
    all_close(grads, gradients(model, want, state), rtol=1e-8, atol=1e-11)
    assert all(torch.count_nonzero(x) for x in grads)


def test_a_text_begins_with_zeros():
    model, tokens = make(), make_tokens()
    zeros = [nn.RWKV7State(*(torch.zeros_like(x) for x in each)) for each in make_state(model)]
    all_close(flat(*model(tokens, return_state=True)), plainly(model, tokens, zeros), rtol=1e-10, atol=1e-12)


def test_loss_is_that_of_the_logits_with_the_pull_on_the_largest():
    model, tokens, targets = make(), make_tokens(), make_tokens(seed=5)
    targets[0, :4] = -100
    parameters = [*model.parameters()]
    for l2_wrap in (1e-4, 0.5):
        want = rwkv_jit.cross_entropy(model(tokens), targets, l2_wrap=l2_wrap)
        found = model.loss(tokens, targets, l2_wrap)
        torch.testing.assert_close(found, want)
        all_close(torch.autograd.grad(found, parameters), torch.autograd.grad(want, parameters))
    torch.testing.assert_close(
        model.loss(tokens, targets), F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    )
    (grad,) = torch.autograd.grad(model.loss(tokens, targets), model.head.weight)
    torch.testing.assert_close(
        grad, torch.autograd.grad(model.loss(tokens, targets, l2_wrap=1e-4), model.head.weight)[0], rtol=0, atol=0
    )


def test_loss_carries_the_state_that_the_caller_may_detach():
    model, tokens, targets = make(), make_tokens(), make_tokens(seed=5)
    whole = model.loss(tokens, targets)
    first, state = model.loss(tokens[:, :4], targets[:, :4], return_state=True)
    second = model.loss(tokens[:, 4:], targets[:, 4:], state=state)
    torch.testing.assert_close((4 * first + 5 * second) / 9, whole)
    assert all(x.requires_grad for each in state for x in each)
    cut = [each.detach() for each in state]
    assert not any(x.requires_grad for each in cut for x in each)
    alone = model.loss(tokens[:, 4:], targets[:, 4:], state=cut)
    torch.testing.assert_close(alone, second)
    own, through = (torch.autograd.grad(x, model.blocks[0].att.key.weight)[0] for x in (alone, second))
    assert not torch.allclose(own, through)


def test_state_keeps_no_other_tokens_in_memory():
    model, tokens = make(), make_tokens(1, T)
    for bounds in (None, torch.tensor([0, 4, T])):
        for x in (x for each in model(tokens, None, bounds, return_state=True)[1] for x in each):
            assert x.untyped_storage().nbytes() == x.nbytes


# ---- parts of texts, and packed texts ----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(T + 1))
def test_text_that_is_cut_anywhere_is_as_the_whole(cut):
    model, tokens = make(), make_tokens()
    state = make_state(model)
    whole = flat(*model(tokens, state, return_state=True))
    before, middle = model(tokens[:, :cut], state, return_state=True)
    behind, after = model(tokens[:, cut:], middle, return_state=True)
    parts = flat(torch.cat([before, behind], 1), after)
    all_close(parts, whole, rtol=1e-10, atol=1e-12)
    all_close(gradients(model, parts, state), gradients(model, whole, state), rtol=1e-8, atol=1e-11)


def test_no_tokens_at_all_leave_the_state_as_it_is():
    model = make()
    state = make_state(model)
    logits, after = model(make_tokens(B, 0), state, return_state=True)
    assert logits.shape == (B, 0, VOCABULARY)
    all_close(flat(logits, after)[1:], flat(logits, state)[1:])
    assert all(not x.any() for each in model(make_tokens(B, 0), return_state=True)[1] for x in each)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_texts_are_as_each_alone(with_state, dtype):
    model, bounds = make(), [0, 0, 3, 4, 4, 9, 9]
    tokens, count = make_tokens(1, T), len(bounds) - 1
    state = make_state(model, count)
    given = state if with_state else None
    packed = flat(*model(tokens, given, torch.tensor(bounds, dtype=dtype), return_state=True))
    alone = [
        model(
            tokens[:, begin:end],
            [nn.RWKV7State(*(x[text : text + 1] for x in each)) for each in state] if with_state else None,
            return_state=True,
        )
        for text, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    logits = torch.cat([each for each, _ in alone], 1)
    states = [
        nn.RWKV7State(*map(torch.cat, zip(*layer, strict=True))) for layer in zip(*(s for _, s in alone), strict=True)
    ]
    one_by_one = flat(logits, states)
    all_close(packed, one_by_one, rtol=1e-10, atol=1e-12)
    asked = state if with_state else ()
    all_close(gradients(model, packed, asked), gradients(model, one_by_one, asked), rtol=1e-8, atol=1e-11)
    loss = model.loss(tokens, tokens, 0.0, given, torch.tensor(bounds, dtype=dtype))
    torch.testing.assert_close(loss, F.cross_entropy(logits[0], tokens[0]))


# ---- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, [1, 0], torch.tensor([3, 2])])
def test_step_by_step_is_as_forward(slots):
    model, tokens = make(torch.float32), make_tokens()
    want, state = model(tokens, return_state=True)
    pool = model.new_pool(4)
    found = torch.stack([model.step(token, pool, slots) for token in tokens.T], 1)
    torch.testing.assert_close(found, want.detach(), rtol=1e-4, atol=1e-5)
    assert not found.requires_grad
    rows = [0, 1] if slots is None else [int(x) for x in slots]
    for name in nn.RWKV7State._fields:
        torch.testing.assert_close(
            pool[name][:, rows], torch.stack([getattr(each, name) for each in state]).detach(), rtol=1e-4, atol=1e-5
        )
        assert not pool[name][:, [x for x in range(4) if x not in rows]].any()


def test_rows_of_reserved_slots_are_padding():
    model, tokens = make(torch.float32), make_tokens(3)
    pool = model.new_pool(3, reserved=1)
    (slot,) = pool.allocate()
    found = model.step(tokens, pool, [0, slot, 0])
    torch.testing.assert_close(found[1], model(tokens.unsqueeze(1))[1, 0].detach(), rtol=1e-4, atol=1e-5)
    assert pool.wkv[:, slot].any()
    assert not pool.wkv[:, 0].any()
    assert not pool.time_shift[:, 0].any()


def test_pool_has_the_types_of_the_model():
    pool = make(torch.bfloat16).new_pool(5, reserved=2)
    assert (len(pool), pool.reserved, pool.wkv.dtype, pool.time_shift.dtype) == (5, 2, torch.float32, torch.bfloat16)
    assert pool.wkv.shape == (LAYERS, 5, WIDTH // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE)
    assert pool.channel_shift.shape == (LAYERS, 5, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_generated_tokens_are_the_best_ones_of_forward(count, dtype):
    model, tokens = make(dtype, seed=8), make_tokens()  # of which texts do not repeat one token
    found = model.generate(tokens, count, temperature=0)
    text = tokens
    for _ in range(count):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    assert found.dtype == tokens.dtype
    assert torch.equal(found, text[:, T:])
    assert count < 8 or len(set(found.flatten().tolist())) > 4


def test_drawn_tokens_follow_the_chances():
    model, count = make(torch.float32), 2500
    prompt = make_tokens(1, 2)
    chances = torch.softmax(model(prompt)[0, -1].detach() / 1.5, -1)
    several = prompt.expand(count, 2)

    def drawn(**options):
        made = model.generate(several, 1, temperature=1.5, generator=torch.Generator().manual_seed(7), **options)
        return torch.bincount(made.flatten(), minlength=VOCABULARY) / count

    found = drawn()
    assert torch.equal(found, drawn())
    torch.testing.assert_close(found, chances, rtol=0, atol=0.04)
    order = chances.argsort(descending=True)
    sums = chances[order].cumsum(0)
    some = float(sums[2]) - 1e-3  # the third one makes it full
    kept = torch.zeros(VOCABULARY).index_fill(0, order[:3], 1) * chances
    torch.testing.assert_close(drawn(top_p=some), kept / kept.sum(), rtol=0, atol=0.04)
    assert not (drawn(top_p=some) * (kept == 0)).any()
    assert drawn(top_p=1e-6)[order[0]] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected at least 0, got -1.0"),
        ({"temperature": math.nan}, "temperature: expected a finite number, got nan"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected more than 0 and at most 1, got 1.1"),
        ({"count": -1}, "count: expected at least 0, got -1"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make().generate(make_tokens(), **{"count": 1, **options})


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (3,)])
def test_prompts_without_tokens_are_errors(shape):
    expected = "at least one token, got shape" if len(shape) == 2 else "shape [batch, tokens], got"
    said = f"tokens: expected {expected} {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(said)):
        make().generate(torch.zeros(shape, dtype=torch.int64), 1)


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_both_ways(suffix, dtype, tmp_path):
    model, path = make(dtype), tmp_path / f"model{suffix}"
    model.save_checkpoint(path)
    again = nn.RWKV7.from_checkpoint(path)
    want = model.state_dict()
    assert list(again.state_dict()) == list(want)
    assert all(torch.equal(x, want[name]) and x.dtype == dtype for name, x in again.state_dict().items())
    assert all(x.requires_grad for x in again.parameters())
    assert torch.equal(again(make_tokens()), model(make_tokens()))
    assert torch.equal(again.generate(make_tokens(), 3, temperature=0), model.generate(make_tokens(), 3, temperature=0))
    wide = nn.RWKV7.from_checkpoint(str(path), dtype=torch.float64, device="cpu")
    assert {x.dtype for x in wide.parameters()} == {torch.float64}
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    again.save_checkpoint(path)  # over the old one
    assert torch.equal(checkpoints.read(path)["head.weight"], want["head.weight"])


def test_checkpoint_of_one_layer(tmp_path):
    model = nn.RWKV7(5, 8, 1, 4)
    model.save_checkpoint(tmp_path / "one.pth")
    assert torch.equal(nn.RWKV7.from_checkpoint(tmp_path / "one.pth")(make_tokens() % 5), model(make_tokens() % 5))


def test_checkpoint_of_the_official_trainer(tmp_path):
    """It has values of the first layer that nobody reads, and vectors may come without their dimensions of one."""
    held = make(torch.float32).state_dict()
    want = nn.RWKV7.from_checkpoint(save(tmp_path, held))
    more = {"v0": (1, 1, WIDTH), "v1": (WIDTH, RANKS["v"]), "v2": (RANKS["v"], WIDTH)}
    unused = {f"blocks.0.att.{name}": torch.zeros(shape) for name, shape in more.items()}
    for form in (held | unused, {name: x.squeeze() for name, x in held.items()}):
        found = nn.RWKV7.from_checkpoint(save(tmp_path, form))
        assert torch.equal(found(make_tokens()), want(make_tokens()))
        assert {n: x.shape for n, x in found.state_dict().items()} == {n: x.shape for n, x in held.items()}


def save(folder, held):
    path = folder / "held.pth"
    torch.save(held, path)
    return path


def test_missing_and_foreign_names_are_all_in_one_error(tmp_path):
    held = make(torch.float32).state_dict()
    gone = ["emb.weight", "blocks.1.att.w0", "blocks.2.ffn.value.weight", "ln_out.bias"]
    held = {name: x for name, x in held.items() if name not in gone}
    new = ["blocks.0.att.gate.weight", "blocks.2.att.v3", "lm_head.weight"]
    held |= {name: torch.zeros(1) for name in new}
    path = save(tmp_path, held)
    with pytest.raises(ValueError, match="^path: expected the parameters of the model in ") as caught:
        nn.RWKV7.from_checkpoint(path)
    lacking, _, foreign = str(caught.value).partition("it lacks ")[2].partition("; it also has ")
    assert (sorted(lacking.split(", ")), sorted(foreign.split(", "))) == (sorted(gone), sorted(new))
    with pytest.raises(ValueError, match="it lacks emb.weight, blocks.0.att.x_r, .*; it also has weight$"):
        nn.RWKV7.from_checkpoint(save(tmp_path, {"weight": torch.zeros(2)}))
    without = {name: x for name, x in make().state_dict().items() if not name.startswith("blocks.1.")}
    with pytest.raises(ValueError, match="it lacks blocks.1.att.x_r, .*blocks.1.ln2.bias$"):
        nn.RWKV7.from_checkpoint(save(tmp_path, without))


def test_other_shapes_are_all_in_one_error(tmp_path):
    held = make(torch.float32).state_dict()
    held["blocks.1.att.w1"], held["ln_out.bias"] = torch.zeros(WIDTH, 7), torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"got blocks.1.att.w1 \[12, 7\] and not \[12, 2\], ln_out.bias \[3\] and not \["
    ):
        nn.RWKV7.from_checkpoint(save(tmp_path, held))
    held = make().state_dict() | {"blocks.0.att.r_k": torch.zeros(12)}
    with pytest.raises(ValueError, match=r"expected a matrix for blocks.0.att.r_k in .*, got shape \[12\]"):
        nn.RWKV7.from_checkpoint(save(tmp_path, held))


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_what_is_no_checkpoint_is_an_error(name, tmp_path):
    with pytest.raises(FileNotFoundError):
        nn.RWKV7.from_checkpoint(tmp_path / name)
    (tmp_path / name).write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="path: expected a checkpoint that torch or safetensors can read"):
        nn.RWKV7.from_checkpoint(tmp_path / name)
    for held in ({"emb.weight": 3}, {3: torch.zeros(1)}):
        with pytest.raises(ValueError, match="path: expected a dict of tensors"):
            nn.RWKV7.from_checkpoint(save(tmp_path, held))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_only_files_are_read(suffix, tmp_path):
    """A pipe, where a read would wait for ever, and a folder."""
    pipe, folder = tmp_path / f"pipe{suffix}", tmp_path / f"folder{suffix}"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(ValueError, match=f"^path: expected a file, got {re.escape(str(path))}$"):
            nn.RWKV7.from_checkpoint(path)


def test_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    model, path = make(torch.float32), tmp_path / "model.pth"
    model.save_checkpoint(path)
    old = path.read_bytes()

    def fail(held, place):
        with open(place, "wb") as file:
            file.write(b"some of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        make(torch.float32, seed=9).save_checkpoint(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


# ---- what the official model is ----------------------------------------------------------------------------------


def official_shapes(layers, vocabulary, width, head_size, hidden, w, a, v, g):
    """Every name and shape of a checkpoint."""
    vectors = [
        "att.x_r",
        "att.x_w",
        "att.x_k",
        "att.x_v",
        "att.x_a",
        "att.x_g",
        "att.w0",
        "att.a0",
        "att.k_k",
        "att.k_a",
    ]
    norms = [f"{name}.{part}" for name in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")]
    block = {name: (1, 1, width) for name in [*vectors, "ffn.x_k"]} | {name: (width,) for name in norms}
    block |= {"att.r_k": (width // head_size, head_size)}
    block |= {f"att.{name}.weight": (width, width) for name in ("receptance", "key", "value", "output")}
    block |= {"ffn.key.weight": (hidden, width), "ffn.value.weight": (width, hidden)}
    for letter, rank in {"w": w, "a": a, "g": g}.items():
        block |= {f"att.{letter}1": (width, rank), f"att.{letter}2": (rank, width)}
    shapes = {f"blocks.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    later = {"att.v0": (1, 1, width), "att.v1": (width, v), "att.v2": (v, width)}
    shapes |= {f"blocks.{layer}.{name}": shape for layer in range(1, layers) for name, shape in later.items()}
    shapes |= {f"{name}.{part}": (width,) for name in ("blocks.0.ln0", "ln_out") for part in ("weight", "bias")}
    return shapes | {"emb.weight": (vocabulary, width), "head.weight": (vocabulary, width)}


@pytest.mark.parametrize(
    ("width", "layers", "ranks"),
    [
        (64, 1, (32, 32, 32, 32)), (768, 12, (64, 64, 32, 128)), (2048, 24, (128, 128, 64, 224)),
        (4096, 32, (160, 160, 96, 320)),
    ],
)  # fmt: skip
def test_names_and_shapes_are_the_official_ones(width, layers, ranks):
    model = nn.RWKV7(65536, width, layers, device="meta")
    found = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert found == official_shapes(layers, 65536, width, 64, 4 * width, *ranks)
    assert found == {name: tuple(x.shape) for name, x in model.named_parameters()}


def test_initial_values_are_the_official_ones():
    width, layers, head_size = 128, 4, 32
    model = nn.RWKV7(300, width, layers, head_size)
    for layer, block in enumerate(model.blocks):
        depth, falling, p = layer / (layers - 1), 1 - layer / layers, block.att
        for name, slope in {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}.items():
            want = [1 - (n / width) ** (slope * falling) for n in range(width)]
            torch.testing.assert_close(getattr(p, name).flatten(), torch.tensor(want))
        want = [1 - (n / width) ** falling**4 for n in range(width)]
        torch.testing.assert_close(block.ffn.x_k.flatten(), torch.tensor(want))
        zigzag, half = [], (head_size - 1) / 2
        for n in range(width):
            place = (n % head_size - half) / half
            zigzag.append(place * abs(place))
        linear = [n / (width - 1) - 0.5 for n in range(width)]
        decay = [-6 + 6 * (n / (width - 1)) ** (1 + depth**0.3) + 0.5 + 2.5 * z for n, z in enumerate(zigzag)]
        torch.testing.assert_close(p.w0.flatten(), torch.tensor(decay), rtol=1e-5, atol=1e-5)
        rate = [-0.19 + 0.3 * z + 0.4 * x for z, x in zip(zigzag, linear, strict=True)]
        torch.testing.assert_close(p.a0.flatten(), torch.tensor(rate))
        if layer:
            torch.testing.assert_close(p.v0.flatten(), torch.tensor([0.73 - 0.4 * x for x in linear]))
        torch.testing.assert_close(p.k_k.flatten(), torch.tensor([0.71 - 0.1 * x for x in linear]))
        assert set(p.k_a.flatten().tolist()) == {float(torch.tensor(1.02))}
        assert set(p.r_k.flatten().tolist()) == {float(torch.tensor(-0.04))}
        torch.testing.assert_close(p.ln_x.weight, torch.full((width,), ((1 + layer) / layers) ** 0.7))
        for name, x in block.named_parameters():
            if re.search(r"att\.[wavg]1$|output|ffn\.value|ln.*bias", name):
                assert not x.any(), name
            elif re.search(r"ln[012]\.weight", name):
                assert bool((x == 1).all()), name
        for letter in "wavg" if layer else "wag":
            check_orthogonal(getattr(p, f"{letter}2"), 0.1)
        for matrix, gain in ((p.receptance, 1), (p.key, 0.1), (p.value, 1), (block.ffn.key, 1)):
            check_orthogonal(matrix.weight, gain)
        assert (p.ln_x.eps, block.ln1.eps) == (64e-5, 1e-5)
    check_orthogonal(model.head.weight, 0.5 * (300 / width) ** 0.5)
    check_orthogonal(nn.RWKV7(100, width, 1).head.weight, 0.5)
    assert 0.9e-4 < float(model.emb.weight.detach().abs().max()) <= 1e-4


def check_orthogonal(matrix, gain):
    """Rows, or columns where these are fewer, are orthogonal and have this length."""
    matrix = matrix.detach().double()
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    torch.testing.assert_close(
        matrix @ matrix.T / gain**2, torch.eye(len(matrix), dtype=torch.float64), rtol=0, atol=1e-4
    )


def test_tall_low_rank_matrices_are_longer():
    made = nn.RWKV7TimeMix(16, 0, 2, 16, ranks={"w": 64})
    check_orthogonal(made.w2, 0.1 * 2)


def test_groups_of_the_optimizer_have_every_parameter_once():
    model = make(torch.float32)
    groups = model.param_groups(lr=0.01, weight_decay=0.2)
    names = {id(x): name for name, x in model.named_parameters()}
    found = [(names[id(x)], group["lr"], group["weight_decay"]) for group in groups for x in group["params"]]
    assert sorted(name for name, *_ in found) == sorted(names.values())
    for name, lr, decay in found:
        is_matrix = re.search(r"(receptance|key|value|output|emb|head)\.weight$", name) is not None
        assert (lr, decay) == (0.02 if name.endswith("att.w0") else 0.01, 0.2 if is_matrix else 0.0), name
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-18)
    tokens = make_tokens()
    losses = []
    for _ in range(20):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


# ---- what torch does with modules --------------------------------------------------------------------------------


def test_model_without_memory_gets_some_and_its_values():
    model = nn.RWKV7(**SIZES, device="meta")
    assert all(x.is_meta for x in model.parameters())
    model.to_empty(device="cpu")
    for x in model.parameters():
        torch.nn.init.constant_(x, math.nan)
    fresh = nn.RWKV7(**SIZES)
    for each in (model, fresh):
        torch.manual_seed(4)
        each.reset_parameters()
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), fresh.parameters(), strict=True))
    assert torch.isfinite(model(make_tokens())).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_model_of_any_dtype_begins_alike(dtype):
    torch.manual_seed(4)
    model = nn.RWKV7(**SIZES, dtype=dtype)
    assert {x.dtype for x in model.parameters()} == {dtype}
    check = model.blocks[1].att.receptance.weight.double()
    torch.testing.assert_close(check @ check.T, torch.eye(WIDTH).double(), rtol=0, atol=2e-2)
    logits = model(make_tokens())
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_models_of_their_own(again):
    model, tokens = make(), make_tokens()
    want = model(tokens)
    made = again(model)
    assert torch.equal(made(tokens), want)
    with torch.no_grad():
        made.head.weight.zero_()
    assert torch.equal(model(tokens), want)


def test_state_dict_goes_through_a_file():
    model, other, buffer = make(), make(seed=8), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert not torch.equal(model(make_tokens()), other(make_tokens()))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(model(make_tokens()), other(make_tokens()))


@pytest.mark.parametrize(
    ("layer", "packed"),
    [
        (0, True), (1, False), pytest.param(0, False, marks=pytest.mark.full),
        pytest.param(1, True, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_block_is_compiled_in_one_graph(layer, packed):
    model = make(torch.float32)
    block, state = model.blocks[layer], make_state(model, 2 if packed else 1)[0]
    state = nn.RWKV7State(*(x.detach().float().requires_grad_() for x in state))
    x, v_first = (torch.randn(1, T, WIDTH, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (1, 2))
    bounds = torch.tensor([0, 2, T]) if packed else None
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")

    def run(function):
        y, v, after = function(x, v_first if layer else None, state, bounds)
        asked = [x, *state, *block.parameters(), *([v_first] if layer else [])]
        return [y, v, *after], torch.autograd.grad(weighted([y, v, *after]), asked)

    for found, want in zip(run(compiled), run(block), strict=True):
        all_close(found, want)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("how", ["float64", "packed", "autocast"])
def test_block_is_made_of_its_parts(layer, how):
    """Its norms, time mixing and channel mixing, each called alone, make the same."""
    model = make(torch.float32 if how == "autocast" else torch.float64)
    bounds = torch.tensor([0, 2, 2, T]) if how == "packed" else None
    block, state = model.blocks[layer], make_state(model, 3 if how == "packed" else 1)[0]
    generator = torch.Generator().manual_seed(6)
    x, v_first = torch.randn(2, 1, T, WIDTH, generator=generator).to(block.ln1.weight).requires_grad_().unbind()
    v_first = v_first.bfloat16() if how == "autocast" else v_first

    def apart():
        z = x if layer else block.ln0(x)
        y, v, (time_shift, wkv) = block.att(block.ln1(z), v_first, (state.time_shift, state.wkv), bounds)
        z = z + y
        y, channel_shift = block.ffn(block.ln2(z), state.channel_shift, bounds)
        return [z + y, v, wkv, time_shift, channel_shift]

    def whole():
        z, v, after = block(x, v_first, state, bounds)
        return [z, v, *after]

    asked = [x, *state, *block.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found, want = whole(), apart()
    assert [y.dtype for y in found] == [y.dtype for y in want]
    for results in (found, want):
        results.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(weighted(results), asked)]))
    for a, b in zip(found, want, strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) < (0.1 if how == "autocast" else 1e-9)


def test_model_is_compiled_in_one_graph():
    model, tokens = make(torch.float32, checkpointing=True, layers=2), make_tokens(B, 3)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, want = compiled(tokens), model(tokens)
    torch.testing.assert_close(found, want)
    all_close(gradients(model, [found]), gradients(model, [want]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_parameters_and_their_gradients_in_float32(dtype):
    model, tokens, targets = make(torch.float32), make_tokens(), make_tokens(seed=5)
    parameters = [*model.parameters()]
    exact = model.loss(tokens, targets)
    want = torch.autograd.grad(exact, parameters)
    with torch.autocast("cpu", dtype):
        seen = []
        linear = model.blocks[1].att.output, model.blocks[1].att.receptance, model.blocks[1].ffn.key
        hooks = [x.register_forward_hook(lambda _, given, out: seen.extend([given[0], out])) for x in linear]
        loss = model.loss(tokens, targets)
        for hook in hooks:
            hook.remove()
        stepped = model.step(tokens[:, 0], model.new_pool(B))
    found = torch.autograd.grad(loss, parameters)
    assert {x.dtype for x in seen} == {dtype}
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    torch.testing.assert_close(stepped.float(), model(tokens)[:, 0].detach(), rtol=0.1, atol=0.1)
    assert all(torch.count_nonzero(x) for x in found)
    x, y = (torch.cat([each.flatten() for each in grads]) for grads in (found, want))
    assert float((x - y).norm() / y.norm()) < 0.05


def test_checkpointing_changes_no_gradient_and_keeps_less():
    model, tokens, targets = make(), make_tokens(), make_tokens(seed=5)
    state = make_state(model)

    def run():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss, after = model.loss(tokens, targets, state=state, return_state=True)
        return sum(kept), torch.autograd.grad(loss + weighted(flat(loss, after)), [*model.parameters(), *state[1]])

    kept, want = run()
    model.checkpointing = True
    less, found = run()
    assert less < kept / 3
    all_close(found, want, rtol=0, atol=0)
    assert make(checkpointing=True).checkpointing
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.loss(tokens, targets)
    assert counter.get_total_flops() > 0


def test_gradients_add_up_over_parts_of_a_batch():
    model, tokens, targets = make(), make_tokens(4, T), make_tokens(4, T, seed=5)
    want = torch.autograd.grad(model.loss(tokens, targets), [*model.parameters()])
    for part in (slice(0, 1), slice(1, 4)):
        (model.loss(tokens[part], targets[part]) * len(tokens[part]) / 4).backward()
    all_close([x.grad for x in model.parameters()], want)


# ---- errors, names, docstrings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: nn.RWKV7TimeMix(100, 0, 2), "width: expected a multiple of the head size, 64, got 100"),
        (lambda: nn.RWKV7TimeMix(0, 0, 2), "width: expected at least 1, got 0"),
        (lambda: nn.RWKV7TimeMix(64, 2, 2), "layer: expected less than the 2 layers, got 2"),
        (lambda: nn.RWKV7ChannelMix(64, 0, 0), "layers: expected at least 1, got 0"),
        (lambda: nn.RWKV7ChannelMix(64, 0, 1, 0), "hidden: expected at least 1, got 0"),
        (lambda: nn.RWKV7TimeMix(64, 0, 2, ranks={"x": 3}), "ranks: expected w, a, v and g, got x"),
        (lambda: nn.RWKV7TimeMix(64, 0, 2, ranks={"w": 0}), "ranks of w: expected at least 1, got 0"),
        (lambda: nn.RWKV7(0, 64, 1), "vocabulary: expected at least 1, got 0"),
        (lambda: nn.RWKV7(5, 64, 0), "layers: expected at least 1, got 0"),
        (lambda: nn.RWKV7(vocab_size=5), "'vocab_size' (here it is vocabulary=); there are vocabulary, width, "),
        (lambda: nn.RWKV7(5, n_embd=64), "'n_embd' (here it is width=)"),
        (lambda: nn.RWKV7(5, n_layer=1), "'n_layer' (here it is layers=)"),
        (lambda: make()(make_tokens(3)), "tokens: expected shape [batch, tokens], got [3]"),
        (lambda: make().generate([1, 2], 1), "tokens: expected a torch.Tensor, got list"),
        (lambda: make().generate(make_tokens(2, 0), 1), "at least one token, got shape [2, 0]"),
        (lambda: make()(make_tokens(), []), "state: expected one of each of the 3 layers, got 0"),
        (lambda: make().blocks[1](torch.zeros(1, 2, WIDTH).double()), "layer 1 needs the values of the first layer"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(make_it, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make_it()


def test_modules_are_loaded_when_they_are_used(child):
    done = child("""
import sys
import rwkv_jit
assert "rwkv_jit.nn" not in sys.modules and "nn" in dir(rwkv_jit)
import rwkv_jit.nn
assert sorted(rwkv_jit.nn.__all__) == sorted(rwkv_jit.nn._MODULES)
assert set(rwkv_jit.nn.__all__) <= set(dir(rwkv_jit.nn))
assert "torch" not in sys.modules
assert rwkv_jit.nn.RWKV7.__module__ == "rwkv_jit.nn.model"
try:
    rwkv_jit.nn.RWKV8
except AttributeError as error:
    print(error)
""")
    assert done.stdout == "module 'rwkv_jit.nn' has no attribute 'RWKV8'\n"


def test_repr_says_the_sizes():
    assert "RWKV7TimeMix(\n  12, layer=1, layers=3, head_size=4\n" in repr(make().blocks[1].att)
    assert "RWKV7ChannelMix(\n  12, layer=1, layers=3\n" in repr(make().blocks[1].ffn)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_describes_every_parameter_and_its_examples_are_right(name):
    module = getattr(nn, name)
    text = inspect.getdoc(module)
    shown = text.partition("Parameters\n----------\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^(\S.*?)(?: : .*)?$", shown, flags=re.MULTILINE)
    assert [x for line in lines for x in line.split(", ")] == list(inspect.signature(module).parameters)
    example = doctest.DocTestParser().get_doctest(
        text.replace('"cuda"', '"cpu"'), {"torch": torch, "rwkv_jit": rwkv_jit}, name, None, None
    )
    assert len(example.examples) >= 3
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", ["param_groups", "prefill", "step"])
def test_examples_of_methods_are_right(name):
    text = inspect.getdoc(getattr(nn.RWKV7, name)).replace('"cuda"', '"cpu"')
    names = {"torch": torch, "model": nn.RWKV7(256, 64, 2)}
    assert doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(text, names, name, None, None)).failed == 0
