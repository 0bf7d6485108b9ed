"""The modules of `rwkv_jit.nn` on the GPU against the same modules in float64 on the CPU, forward and gradients."""

import copy

import comparing
import nn_layer_cases
import pytest
import torch
from nn_layer_cases import NAMES, WITH_STATE

# Products, sums over tokens and what is between are rounded to the dtype: gradients through the norm of heads most.
LIMITS = {"fp32": 5e-5, "bf16": 4e-2}
SIZES = [(2, 64), (3, 33)]
BOUNDS = (0, 0, 5, 70, 70, 131)
pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record


def moved(each, **place):
    if each is None or isinstance(each, torch.Tensor):
        return None if each is None else each.to(**place)
    return tuple(x.to(**place) for x in each)


def begun(name, module, texts):
    """Return a state, as after a few tokens: the norm of what a first token alone makes may have any error."""
    if name == "TimeX":
        return None
    parameter = next(module.parameters())
    with torch.no_grad():
        return module(torch.randn(texts, 9, nn_layer_cases.width_of(name, module)).to(parameter))[1]


def check(module, x, state, bounds=None):
    """Compare with a copy that has the same numbers; all lie on the GPU."""
    found = nn_layer_cases.differentiate(module, x, state, bounds, function=nn_layer_cases.summed(module))
    exact = copy.deepcopy(module).to(device="cpu", dtype=torch.float64)
    place = {"device": "cpu", "dtype": torch.float64}
    on_cpu = None if bounds is None else bounds.cpu()
    given = exact, x.to(**place), moved(state, **place), on_cpu
    want = nn_layer_cases.differentiate(*given, found[2], nn_layer_cases.summed(exact))
    for own, (one, other) in nn_layer_cases.pairs(found, want).items():
        limit = LIMITS["bf16" if x.dtype == torch.bfloat16 else "fp32"]
        assert comparing.relative(one.cpu(), other) < limit, own


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(op, name, kind, sizes):
    place = {"device": "cuda", "dtype": comparing.DTYPES[kind]}
    module = nn_layer_cases.make(name, *sizes, **place)
    tokens = 40 if name == "TimeX" else 131
    x = torch.randn(2, tokens, sizes[0] * sizes[1], **place)
    check(module, x, begun(name, module, 2))


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_packed_texts(op, name, kind, sizes):
    place = {"device": "cuda", "dtype": comparing.DTYPES[kind]}
    module = nn_layer_cases.make(name, *sizes, **place)
    x = torch.randn(1, BOUNDS[-1], sizes[0] * sizes[1], **place)
    state = begun(name, module, len(BOUNDS) - 1)
    check(module, x, state, torch.tensor(BOUNDS, device="cuda"))


@pytest.mark.parametrize("name", WITH_STATE)
def test_text_cut_in_two(op, name):
    module = nn_layer_cases.make(name, 2, 64, device="cuda")
    x = torch.randn(2, 131, 128, device="cuda")
    with torch.no_grad():
        want = nn_layer_cases.run(module, x)
        begun, state = module(x[:, :50])
        y, *finals = nn_layer_cases.run(module, x[:, 50:], state)
    for one, other in zip([torch.cat([begun, y], 1), *finals], want, strict=True):
        assert comparing.relative(one, other) < LIMITS["fp32"]


@pytest.mark.parametrize("name", NAMES)
def test_autocast(op, name):
    module = nn_layer_cases.make(name, 2, 64, device="cuda")
    x = torch.randn(2, 40, 128, device="cuda")
    state, function = begun(name, module, 2), nn_layer_cases.summed(module)
    want = nn_layer_cases.differentiate(module, x, state, function=function)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = nn_layer_cases.differentiate(module, x, state, None, want[2], function)
    assert found[0][0].dtype == torch.bfloat16
    for own, (one, other) in nn_layer_cases.pairs(found, want).items():
        assert comparing.relative(one, other) < LIMITS["bf16"], own
