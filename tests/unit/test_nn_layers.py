"""The modules of `rwkv_jit.nn` against loops over tokens, cut and packed, and how torch treats them."""

import copy
import itertools
import math
import pickle
import re

import nn_layer_cases
import pytest
import torch
from nn_layer_cases import NAMES, WITH_STATE, differentiate, flat, make, pairs, run, summed, width_of
from plain_nn import STEPS

from rwkv_jit import nn

EVERY = pytest.mark.parametrize("name", NAMES)
STATEFUL = pytest.mark.parametrize("name", WITH_STATE)
TIME_MIXES = pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("TimeMix")])
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens_of(name, module, *lead, **place):
    return torch.randn(*lead, width_of(name, module), **place)


def close(found, want, limit=1e-10):
    assert found.shape == want.shape
    assert (found.double() - want.double()).abs().max() <= limit * (1 + want.double().abs().max())


def relative(found, want):
    return float((found.double() - want.double()).norm() / want.double().norm())


# ---- against loops, as the papers have the equations -------------------------------------------------------------


def plainly(name, module):
    """A module as a loop over rows and tokens."""
    p = dict(module.named_parameters())

    def loop(x, state, cu_seqlens):
        bounds = None if cu_seqlens is None else [*itertools.pairwise(cu_seqlens.tolist())]
        texts = list(x) if bounds is None else [x[0, begin:end] for begin, end in bounds]
        outputs, finals = [], []
        for text, own in zip(texts, zip(*flat(state), strict=True), strict=True):
            if name == "RWKV4TimeMix":
                own = own[0], own[1][0] * own[1][2].exp(), own[1][1] * own[1][2].exp()
            for token in text:
                y, own = STEPS[name](module, p, token, own)
                outputs.append(y)
            finals.append(own)
        several = [torch.stack(each) for each in zip(*finals, strict=True)]
        return torch.stack(outputs).view(x.shape), several

    def convolve(x):
        past = [[p["weight"][:, -1 - ago] * x[:, t - ago] for ago in range(t + 1)] for t in range(x.shape[1])]
        return torch.stack([0.25 + sum(terms) for terms in past], 1)

    return convolve if name == "TimeX" else loop


def check(name, module, x, state, cu_seqlens=None):
    found = differentiate(module, x, state, cu_seqlens, function=summed(module))
    want = differentiate(module, x, state, cu_seqlens, found[2], plainly(name, module))
    for own, (one, other) in pairs(found, want).items():
        assert one.abs().max() > 0, own
        close(one, other)


def state_of(name, module, texts):
    """A state, as after a few tokens."""
    return None if name == "TimeX" else module(tokens_of(name, module, texts, 3, **DOUBLE))[1]


@EVERY
def test_values_and_gradients(name):
    module = make(name, **DOUBLE)
    check(name, module, tokens_of(name, module, 2, 7, **DOUBLE), state_of(name, module, 2))


@STATEFUL
def test_values_and_gradients_of_packed_texts(name):
    module = make(name, **DOUBLE)
    bounds = torch.tensor([0, 0, 4, 5, 9, 9])
    check(name, module, tokens_of(name, module, 1, 9, **DOUBLE), state_of(name, module, 5), bounds)


@STATEFUL
def test_begins_with_zeros(name):
    module = make(name, **DOUBLE)
    x = tokens_of(name, module, 2, 5, **DOUBLE)
    zeros = [torch.zeros_like(each) for each in flat(state_of(name, module, 2))]
    if name == "RWKV4TimeMix":
        zeros[1][:, 2] = -1e38
    state = zeros[0] if len(zeros) == 1 else tuple(zeros)
    for one, other in zip(run(module, x), run(module, x, state), strict=True):
        close(one, other)


# ---- cut and packed ----------------------------------------------------------------------------------------------


@STATEFUL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_text_may_be_cut_anywhere(name, dtype):
    module, limit = make(name, dtype=dtype), 1e-12 if dtype == torch.float64 else 1e-5
    x = tokens_of(name, module, 2, 7, dtype=dtype)
    want = run(module, x)
    for cut in range(8):
        begun, state = module(x[:, :cut])
        y, *finals = run(module, x[:, cut:], state)
        for one, other in zip([torch.cat([begun, y], 1), *finals], want, strict=True):
            assert one.dtype == dtype
            close(one, other, limit)


@STATEFUL
def test_token_by_token_is_the_same(name):
    module, state, outputs = make(name, **DOUBLE), None, []
    x = tokens_of(name, module, 2, 6, **DOUBLE)
    for token in x.split(1, 1):
        y, state = module(token, state)
        outputs.append(y)
    for one, other in zip([torch.cat(outputs, 1), *flat(state)], run(module, x), strict=True):
        close(one, other, 1e-12)


@STATEFUL
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", [(0, 4, 9), (0, 0, 3, 3, 9, 9), (0, 9)], ids=str)
def test_packed_texts_are_as_one_by_one(name, bounds, index_dtype):
    module = make(name, **DOUBLE)
    x = tokens_of(name, module, 1, 9, **DOUBLE)
    for state in (None, state_of(name, module, len(bounds) - 1)):
        y, *finals = run(module, x, state, torch.tensor(bounds, dtype=index_dtype))
        for text, (begin, end) in enumerate(itertools.pairwise(bounds)):
            own = None if state is None else [each[text : text + 1] for each in flat(state)]
            own = own[0] if own and len(own) == 1 else own
            found = y[:, begin:end], *(final[text : text + 1] for final in finals)
            for one, other in zip(found, run(module, x[:, begin:end], own), strict=True):
                if other.numel():
                    close(one, other, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_module_is_called_where_it_has_a_hook(name):
    """Norms too, which are run by functions of their parameters where they have none."""
    module = make(name, dtype=torch.float64)
    x = torch.randn(2, 7, width_of(name, module), dtype=torch.float64)
    *plain, weights = differentiate(module, x)
    seen = set()
    for own in module.modules():
        own.register_forward_hook(lambda own, given, made: seen.add(own))
    found = differentiate(module, x, weights=weights)
    assert seen == {*module.modules()}
    for path, (one, other) in pairs(found, plain).items():
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=path)


@STATEFUL
def test_state_is_no_part_of_the_tokens(name):
    """A state that is kept holds no memory of them, and does not change with them."""
    module = make(name)
    x = tokens_of(name, module, 2, 5)
    with torch.no_grad():
        _, state = module(x)
        before = [each.clone() for each in flat(state)]
        for each in flat(state):
            assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
        x.zero_()
    assert all(torch.equal(*pair) for pair in zip(before, flat(state), strict=True))


# ---- names, shapes, initial values -------------------------------------------------------------------------------

SHAPES = {
    "RWKV4TimeMix": {
        "time_decay": "C", "time_first": "C", "time_mix_k": "11C", "time_mix_v": "11C", "time_mix_r": "11C",
        "key.weight": "CC", "value.weight": "CC", "receptance.weight": "CC", "output.weight": "CC",
    },
    "RWKV4ChannelMix": {
        "time_mix_k": "11C", "time_mix_r": "11C", "key.weight": "4C", "receptance.weight": "CC", "value.weight": "C4",
    },
    "RWKV5TimeMix": {
        "time_mix_k": "11C", "time_mix_v": "11C", "time_mix_r": "11C", "time_mix_g": "11C", "time_decay": "HN",
        "time_faaaa": "HN", "receptance.weight": "CC", "key.weight": "CC", "value.weight": "CC", "output.weight": "CC",
        "gate.weight": "CC", "ln_x.weight": "C", "ln_x.bias": "C",
    },
    "RWKV5ChannelMix": {
        "time_mix_k": "11C", "time_mix_r": "11C", "key.weight": "3C", "receptance.weight": "CC", "value.weight": "C3",
    },
    "RWKV6TimeMix": {
        "time_maa_x": "11C", "time_maa_w": "11C", "time_maa_k": "11C", "time_maa_v": "11C", "time_maa_r": "11C",
        "time_maa_g": "11C", "time_maa_w1": "CP", "time_maa_w2": "5RC", "time_decay": "11C", "time_decay_w1": "CD",
        "time_decay_w2": "DC", "time_faaaa": "HN", "receptance.weight": "CC", "key.weight": "CC", "value.weight": "CC",
        "output.weight": "CC", "gate.weight": "CC", "ln_x.weight": "C", "ln_x.bias": "C",
    },
    "RWKV6ChannelMix": {
        "time_maa_k": "11C", "time_maa_r": "11C", "key.weight": "3C", "receptance.weight": "CC", "value.weight": "C3",
    },
    "GatedLinearAttention": {
        "q_proj.weight": "BC", "k_proj.weight": "BC", "v_proj.weight": "CC", "g_proj.weight": "CC",
        "gk_proj.0.weight": "GC", "gk_proj.1.weight": "BG", "gk_proj.1.bias": "B", "o_proj.weight": "CC",
        "g_norm_swish_gate.weight": "V",
    },
    "LinearAttention": {
        "q_proj.weight": "CC", "k_proj.weight": "CC", "v_proj.weight": "CC", "o_proj.weight": "CC", "norm.weight": "W",
    },
    "TimeX": {"weight": "CT"},
}  # fmt: skip
SIZES = {"1": 1, "C": 128, "4": 512, "3": 448, "H": 2, "N": 64, "P": 160, "5": 5, "R": 32, "D": 64, "B": 64, "G": 16,
         "V": 32, "W": 16, "T": 40}  # fmt: skip


def official(name, width=128, layer=1, layers=3, **place):
    if name == "TimeX":
        return nn.TimeX(width, 40, **place)
    return getattr(nn, name)(width, *(() if "A" in name else (layer, layers)), **place)


@EVERY
def test_names_and_shapes(name):
    found = {own: tuple(x.shape) for own, x in official(name).named_parameters()}
    assert found == {own: tuple(SIZES[letter] for letter in shape) for own, shape in SHAPES[name].items()}
    assert official(name).state_dict().keys() == found.keys()


def test_ranks_of_wide_layers():
    module = nn.RWKV6TimeMix(4096, 0, 2, device="meta")
    assert (module.time_maa_w1.shape, module.time_decay_w1.shape) == ((4096, 320), (4096, 128))
    assert nn.RWKV6ChannelMix(100, 0, 2, device="meta").key.weight.shape == (320, 100)


PLACES = pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 4), (2, 4), (3, 4)])


@PLACES
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("RWKV")])
def test_initial_mixes(name, layer, layers):
    module = official(name, 128, layer, layers)
    up, down = layer / (layers - 1 or 1), 1 - layer / layers
    for own, parameter in module.named_parameters():
        if len(parameter.shape) != 3 or "time_m" not in own or own.endswith("w2"):
            continue
        letter = own[-1]
        power = 0.5 * down if letter in "rg" and "Time" in name else down
        want = [(channel / 128) ** power + (0.3 * up if letter == "v" else 0) for channel in range(128)]
        want = [1 - x for x in want] if "maa" in own else want
        close(parameter.flatten(), torch.tensor(want), 1e-6)


@PLACES
@TIME_MIXES
def test_initial_decay_and_bonus(name, layer, layers):
    module, up = official(name, 128, layer, layers), layer / (layers - 1 or 1)
    low, range_ = (-5, 8) if name == "RWKV4TimeMix" else (-6, 5)
    want = [low + range_ * (channel / 127) ** (0.7 + 1.3 * up) for channel in range(128)]
    close(module.time_decay.flatten(), torch.tensor(want), 1e-6)
    zigzag = [(channel + 1) % 3 - 1 for channel in range(128)]
    if name == "RWKV4TimeMix":
        bonus, found = [math.log(0.3) + 0.5 * x for x in zigzag], module.time_first
    else:
        bonus = [up * (1 - channel / 127) + 0.1 * x for channel, x in enumerate(zigzag)]
        found = module.time_faaaa.flatten()
        assert (module.ln_x.weight - ((1 + layer) / layers) ** 0.7).abs().max() < 1e-6
        assert not module.ln_x.bias.any()
    close(found, torch.tensor(bonus), 1e-6)


GAINS = {
    "RWKV4TimeMix": {"key": 0, "value": 1, "receptance": 0, "output": 0},
    "RWKV4ChannelMix": {"key": 2, "value": 0, "receptance": 0},
    "RWKV5TimeMix": {"key": 0.1, "value": 1, "receptance": 1, "gate": 0.1, "output": 0},
    "RWKV5ChannelMix": {"key": 1, "value": 0, "receptance": 0},
    "RWKV6TimeMix": {"key": 0.1, "value": 1, "receptance": 1, "gate": 0.1, "output": 0},
    "RWKV6ChannelMix": {"key": 1, "value": 0, "receptance": 0},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GAINS)
def test_initial_matrices_are_orthogonal(name, dtype):
    module = official(name, dtype=dtype)
    for own, gain in GAINS[name].items():
        weight = getattr(module, own).weight.double()
        close(weight.T @ weight, gain**2 * torch.eye(weight.shape[1]), 1e-6 if dtype == torch.float32 else 1e-2)


def test_initial_low_rank_matrices():
    module = official("RWKV6TimeMix")
    for first, second in ((module.time_maa_w1, module.time_maa_w2), (module.time_decay_w1, module.time_decay_w2)):
        assert not first.any()
        assert 0.0099 < second.abs().max() <= 0.01
        assert abs(second.mean()) < 2e-4


def test_initial_values_of_the_others():
    for matrix in (official("GatedLinearAttention").g_proj, official("LinearAttention").v_proj, official("TimeX")):
        bound = matrix.weight.shape[1] ** -0.5
        assert 0.99 * bound < matrix.weight.abs().max() <= bound
    assert bool((official("GatedLinearAttention").g_norm_swish_gate.weight == 1).all())
    assert bool((official("LinearAttention").norm.weight == 1).all())


@EVERY
def test_reset_sets_every_parameter(name):
    module, other = official(name), official(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    for each in (module, other):
        torch.manual_seed(1)
        each.reset_parameters()
    for own, parameter in module.named_parameters():
        assert torch.equal(parameter, other.get_parameter(own)), own


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda: nn.RWKV4ChannelMix(8, 3, 3), ValueError, "layer: expected less than the 3 layers, got 3"),
        (lambda: nn.RWKV4TimeMix(8, -1, 3), ValueError, "layer: expected at least 0, got -1"),
        (lambda: nn.RWKV5ChannelMix(8, 0, 0), ValueError, "layers: expected at least 1, got 0"),
        (lambda: nn.RWKV4TimeMix(0, 0, 1), ValueError, "width: expected at least 1, got 0"),
        (lambda: nn.RWKV6ChannelMix(8.0, 0, 1), TypeError, "width: expected an int, got 8.0"),
        (lambda: nn.RWKV6ChannelMix(64, 0, 1, 0), ValueError, "hidden: expected at least 1, got 0"),
        (lambda: nn.RWKV5TimeMix(96, 0, 1), ValueError, "width: expected a multiple of the head size, 64, got 96"),
        (lambda: nn.RWKV6TimeMix(96, 0, 1, 0), ValueError, "head_size: expected at least 1, got 0"),
        (lambda: nn.GatedLinearAttention(12), ValueError, "key_width: expected a multiple of heads 4, got 6"),
        (lambda: nn.GatedLinearAttention(12, 0), ValueError, "heads: expected at least 1, got 0"),
        (lambda: nn.LinearAttention(12, 2, 0), ValueError, "key_width: expected at least 1, got 0"),
        (lambda: nn.TimeX(0, 5), ValueError, "channels: expected at least 1, got 0"),
        (lambda: nn.TimeX(3, "5"), TypeError, "length: expected an int, got '5'"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(make_it, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make_it()


def test_texts_longer_than_the_filters_are_errors():
    with pytest.raises(ValueError, match="^x: expected up to 5 tokens, got 6$"):
        nn.TimeX(3, 5)(torch.zeros(1, 6, 3))


# ---- what torch does with modules --------------------------------------------------------------------------------


@EVERY
def test_module_without_memory(name):
    module = official(name, device="meta", dtype=torch.float64)
    assert {(x.is_meta, x.dtype) for x in module.parameters()} == {(True, torch.float64)}
    module.to_empty(device="cpu").reset_parameters()
    x = tokens_of(name, module, 1, 3, **DOUBLE)
    assert all(bool(each.isfinite().all()) for each in run(module, x))


@EVERY
def test_copies_are_the_same_and_apart(name):
    module = make(name)
    x = tokens_of(name, module, 2, 5)
    want = run(module, x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(*pair) for pair in zip(want, run(other, x), strict=True))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.1)
        assert not torch.equal(run(other, x)[0], want[0])
    assert torch.equal(run(module, x)[0], want[0])


WAYS = [*((name, False) for name in NAMES), *((name, True) for name in WITH_STATE)]


# Packed texts of RWKV-4 go one by one. Every second module compiles packed texts, and the others those of one length.
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        pytest.param(name, packed, marks=() if is_shown else pytest.mark.full)
        for name, packed in WAYS
        if (name, packed) != ("RWKV4TimeMix", True)
        for is_shown in [name in ("RWKV4TimeMix", "TimeX") or packed == NAMES.index(name) % 2]
    ],
)
def test_compiles_into_one_graph(name, packed):
    torch._dynamo.reset()  # modules share functions, and one may be compiled a few times only
    module = make(name)
    x = tokens_of(name, module, 1 if packed else 2, 6)
    bounds = torch.tensor([0, 2, 6]) if packed else None
    state = None if name == "TimeX" else module(x[:, :2].expand(2, -1, -1))[1]
    found = differentiate(module, x, state, bounds)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for one, other in pairs(differentiate(module, x, state, bounds, found[2], compiled), found).values():
        close(one, other, 1e-6)


@pytest.mark.parametrize(("name", "packed"), WAYS)
def test_autocast(name, packed):
    """Parameters stay float32, and so do their gradients; what is between is bfloat16."""
    module = make(name, 3, 17)
    x = tokens_of(name, module, 1 if packed else 2, 20)
    bounds = torch.tensor([0, 2, 20]) if packed else None
    state = None if name == "TimeX" else module(x[:, :2].expand(2, -1, -1))[1]
    want = differentiate(module, x, state, bounds, function=summed(module))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differentiate(module, x, state, bounds, want[2], summed(module))
    tokens = 2 if name.startswith("RWKV") else 1  # y, and the last tokens
    assert {each.dtype for each in found[0][:tokens]} == {torch.bfloat16}
    assert {each.dtype for each in (*found[0][tokens:], *found[1].values())} == {torch.float32}
    for own, (one, other) in pairs(found, want).items():
        assert relative(one, other) < 0.05, own


@EVERY
def test_sixteen_bits(name):
    module = make(name, 3, 17, dtype=torch.bfloat16)
    x = tokens_of(name, module, 2, 20, dtype=torch.bfloat16)
    exact = copy.deepcopy(module).double()
    found = differentiate(module, x, function=summed(module))
    want = differentiate(exact, x.double(), weights=found[2], function=summed(exact))
    assert (found[0][0].dtype, {each.dtype for each in found[1].values()}) == (torch.bfloat16, {torch.bfloat16})
    for own, (one, other) in pairs(found, want).items():
        assert relative(one, other) < 0.05, own


def test_every_module_is_listed_and_has_a_case():
    assert sorted(nn.__all__) == sorted(nn._MODULES) == sorted({*nn.__all__, *nn_layer_cases.NAMES})
    assert {getattr(nn, name).__name__ for name in nn.__all__} == set(nn.__all__)
    assert set(nn.__all__) <= set(dir(nn))
    with pytest.raises(AttributeError, match="module 'rwkv_jit.nn' has no attribute 'RWKV3TimeMix'"):
        nn.RWKV3TimeMix  # noqa: B018
