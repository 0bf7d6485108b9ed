"""Products of a few rows with matrices: what a call launches, what it refuses, and which steps of models take them."""

from functools import partial

import nn_cases
import pytest
import torch
from stub_driver import frames
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rwkv_jit.call import switches
from rwkv_jit.layers.products import Product, products
from rwkv_jit.nn import products as of_nn
from rwkv_jit.plain import layers as plain

FP16 = torch.float16


def two(rows=2, **more):
    """A product of each layout."""
    x, wide, deep = torch.randn(rows, 64).half(), torch.randn(48, 64).half(), torch.randn(64, 40).half()
    return [Product(x, wide, function="tanh", **more), Product(x, deep, layout="deep")]


def test_one_launch(on_gpu):
    on_gpu.use("sm_90")
    parts = two(3, bias=torch.randn(48).half(), gate=torch.randn(3, 48).half(), add=torch.randn(3, 48).half())
    with torch.no_grad():
        made = products(parts)
    (launch,) = on_gpu.take()
    assert [(x.shape, x.dtype) for x in made] == [((3, 48), FP16), ((3, 40), FP16)]
    assert (launch.template, launch.overlaps) == ("layer_products", True)
    assert launch.grid == (5, 1, 1)
    assert launch.block == (128, 1, 1)
    # The deep part, whose blocks have most to read, is the first.
    absent = (0,) * 6
    places = [launch.named["places"][8 * n : 8 * n + 8] for n in range(6)]
    wide, deep = parts
    assert places == [
        (deep.x.data_ptr(), wide.x.data_ptr(), *absent), (deep.weight.data_ptr(), wide.weight.data_ptr(), *absent),
        *((0, x.data_ptr(), *absent) for x in (wide.bias, wide.gate, wide.add)),
        (made[1].data_ptr(), made[0].data_ptr(), *absent),
    ]  # fmt: skip
    assert launch.named["sizes"] == (64, 64, *absent, 40, 48, *absent, 8, 1, *absent)
    assert launch.named["firsts"] == (0, 2, *(2**31 - 1,) * 6)
    assert launch.named["rows"] == 3


def test_a_known_call_is_cheap(on_gpu):
    parts = two()
    with torch.no_grad():
        products(parts)
        count, _ = frames(lambda: products(parts))
    assert count <= 12
    assert len(on_gpu.take()) == 2


def test_on_the_cpu():
    parts = two()
    inputs = [x if x is None else x.double() for part in parts for x in part[:5]]
    exact = plain.products(inputs, 0.0, ("tanh", "wide", "identity", "deep"))
    for y, want in zip(products(parts), exact, strict=True):
        assert y.dtype == FP16
        torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=1e-3)


def test_fakes_have_the_same_shapes(on_gpu):
    with FakeTensorMode() as mode, torch.no_grad():
        x, weight = mode.from_tensor(torch.randn(2, 1, 64).half()), mode.from_tensor(torch.randn(48, 64).half())
        deep = mode.from_tensor(torch.randn(64, 40).half())
        made = products([Product(x, weight), Product(x, deep, layout="deep")])
    assert [(y.shape, y.dtype) for y in made] == [((2, 1, 48), FP16), ((2, 1, 40), FP16)]
    assert on_gpu.take() == []


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda part: [], ValueError, "products: expected 1 to 8, got 0"),
        (lambda part: [part] * 9, ValueError, "products: expected 1 to 8, got 9"),
        (
            lambda part: [part._replace(function="exp")],
            ValueError,
            "function of 0: expected one of identity, tanh",
        ),
        (lambda part: [part, part._replace(layout="tall")], ValueError, "layout of 1: expected one of wide, deep"),
        (lambda part: [part._replace(x=part.x.float())], TypeError, "x0: expected torch.float16 or torch.bfloat16"),
        (
            lambda part: [part, part._replace(weight=part.weight.bfloat16())],
            TypeError,
            "weight1: expected torch.float",
        ),
        (lambda part: [part, part._replace(x=part.x[:1])], ValueError, r"x1: expected shape \[2, 64\], got \[1, 64\]"),
        (lambda part: [part._replace(layout="deep")], ValueError, r"x0: expected shape \[2, 48\], got \[2, 64\]"),
        (lambda part: [part._replace(add=part.x)], ValueError, r"add0: expected shape \[2, 48\], got \[2, 64\]"),
        (lambda part: [part._replace(weight=part.weight[0])], ValueError, "weight0: expected two dimensions"),
    ],
)
def test_bad_arguments(change, error, text, on_gpu):
    with torch.no_grad(), pytest.raises(error, match=text):
        products(change(two()[0]))
    assert on_gpu.take() == []


def test_it_has_no_gradient(on_gpu):
    parts = two()
    parts[0].weight.requires_grad_()
    with pytest.raises(RuntimeError, match="products: is for inference and has no gradient"):
        products(parts)


# ---- steps of models ---------------------------------------------------------------------------------------------

SIZES = {"width": 64, "head_size": 16, "hidden": 96, "layers": 2, "vocabulary": 40}
RANKS = {"ranks": {"w": 8, "a": 12, "v": 8, "g": 16}}
# The launches of a layer's step of few rows, and how many there are of each.
STEPS = {
    "RWKV7": ["layer_shift_mix", *["layer_products"] * 2, "layer_prepare_keys", "update_states", "layer_gated_norm",
              "layer_products", "layer_shift_mix", *["layer_products"] * 2],
    "RWKV6": ["layer_shift_mix", "layer_products", "layer_token_shift", *["layer_products"] * 2, "update_states",
              "layer_gated_norm", "layer_products", "layer_shift_mix", *["layer_products"] * 2],
    "RWKV5": ["layer_shift_mix", "layer_products", "update_states", "layer_gated_norm", "layer_products",
              "layer_shift_mix", *["layer_products"] * 2],
}  # fmt: skip


def make(name, dtype=FP16):
    return nn_cases.make(dtype, name=name, **SIZES, **(RANKS if name == "RWKV7" else {}))


def step(model, rows):
    """The logits of a step."""
    return model.step(nn_cases.make_tokens(model, rows), model.new_pool(rows))


def templates(on_gpu):
    return [launch.template for launch in on_gpu.take()]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", STEPS)
def test_steps_launch(name, rows, on_gpu):
    on_gpu.use("sm_90")
    step(make(name), rows)
    assert templates(on_gpu) == [*STEPS[name] * 2, "layer_products"]


def changed(model, change):
    change(model)
    return model


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_many_rows_are_of_torch(name, on_gpu, monkeypatch):
    """Low-rank matrices are not."""
    monkeypatch.setattr(of_nn, "LOW_RANK", 32)
    step(make(name), 33)
    parts = of_parts(on_gpu)
    assert all(min(sizes) <= 16 for sizes in parts)
    assert len(parts) == {"RWKV7": 2 * 8 - 2, "RWKV6": 0, "RWKV5": 0}[name]  # without those of v in the first layer
    switches.set_batch_invariant(True)
    try:
        step(make(name), 33)
    finally:
        switches.set_batch_invariant(False)
    of_layer = STEPS[name].count("layer_products") + (name == "RWKV6")  # whose batched product is one more
    assert templates(on_gpu).count("layer_products") == 1 + 2 * of_layer


def of_parts(on_gpu):
    """Depth and width of all that launches multiply."""
    several = [launch.named["sizes"] for launch in on_gpu.take() if launch.template == "layer_products"]
    return [(depth, width) for sizes in several for depth, width in zip(sizes[:8], sizes[8:16], strict=True) if depth]


class Cats(TorchDispatchMode):
    """How often torch concatenates."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += function is torch.ops.aten.cat.default
        return function(*arguments, **(named or {}))


def test_mixes_of_all_layers_are_made_at_once():
    model = nn_cases.make(torch.float32, name="RWKV7", **{**SIZES, "layers": 5}, **RANKS)
    with Cats() as cats:
        whole = step(model, 2)
    assert cats.count == 2  # of time mixing, and of channel mixing
    model.blocks[2].att.key.register_forward_hook(lambda *_: None)  # whose layer is not
    model.blocks[1].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(step(model, 2), whole)


class Adapted(nn.Linear):
    """An adapter's matrix."""


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.blocks[1].att.key.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.blocks[1].att, "key", Adapted(64, 64, bias=False, dtype=FP16)),
        lambda model: model.blocks[1].att.key.float(),
        lambda model: setattr(model.blocks[1].att, "w1", nn.Parameter(model.blocks[1].att.w1.t().contiguous().t())),
    ],
    ids=["hook", "another class", "another dtype", "strides"],
)
def test_changed_modules_are_called(change, on_gpu):
    """A changed matrix is multiplied by torch, and no other one."""
    model = make("RWKV7")
    step(model, 2)
    usual = len(of_parts(on_gpu))
    change(model)
    if model.blocks[1].att.key.weight.dtype == torch.float32:
        with pytest.raises(RuntimeError, match="dtype"):  # as torch says it
            step(model, 2)
        return
    step(model, 2)
    assert len(of_parts(on_gpu)) == usual - 1


@pytest.mark.parametrize(
    "around",
    [partial(torch.autocast, "cuda", torch.bfloat16), partial(FlopCounterMode, display=False)],
    ids=["autocast", "mode"],
)
def test_not_where_torch_looks_on(around, on_gpu):
    x, matrix = torch.randn(2, 64).half(), torch.randn(64, 8).half()
    with torch.no_grad():
        assert of_nn._together([of_nn.Product(x, matrix)]) != [None]
        with around():
            assert of_nn._together([of_nn.Product(x, matrix)]) == [None]
        switches.set_batch_invariant(True)
        try:
            assert of_nn._together([of_nn.Product(x.view(1, 2, 64), matrix)]) == [None]
            assert of_nn._together([of_nn.Product(x.view(2, 1, 64), matrix)]) != [None]
        finally:
            switches.set_batch_invariant(False)
        on_gpu.use("sm_75")
        assert of_nn._together([of_nn.Product(x, matrix)]) == [None]
    on_gpu.use("sm_90")
    assert of_nn._together([of_nn.Product(x, matrix)]) == [None]  # gradients are recorded
