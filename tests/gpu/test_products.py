"""Products of a few rows on the GPU: values, the same bits in any batch, steps of models, launches beside others."""

from functools import partial

import comparing
import nn_cases
import product_cases
import pytest
import torch
from product_cases import LIMITS, check

from rwkv_jit.layers.products import products
from rwkv_jit.nn import products as of_nn

pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record
DTYPE = pytest.mark.parametrize("dtype", LIMITS, ids=str)


make = partial(product_cases.make, device="cuda")


@DTYPE
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 21, 32])
@pytest.mark.parametrize("width", [64, 768, 2048, 4096])
def test_the_groups_of_a_layer(width, rows, dtype, op):
    ranks = [max(32, width // each) for each in (16, 24, 8, 24)]
    functions = ("tanh", "identity", "sigmoid", "identity")
    downs = [make(dtype, rows, width, r, "deep", f) for r, f in zip(ranks, functions, strict=True)]
    *_, r, k, v = check([*downs, *(make(dtype, rows, width, width) for _ in range(3))])
    assert r.shape == k.shape == v.shape == (rows, width)
    check([make(dtype, rows, rank, width, "deep", has=("bias",)) for rank in ranks])
    check([make(dtype, rows, width, 4 * width, function="relu_squared")])
    check([make(dtype, rows, 4 * width, width, has=("gate", "add"))])


@DTYPE
def test_odd_sizes(dtype, op):
    for depth, width in ((1, 1), (7, 33), (65, 100), (1001, 65), (2056, 19)):
        check([make(dtype, 3, depth, width), make(dtype, 3, depth, width, "deep", "silu", ("bias", "gate", "add"))])


@DTYPE
@pytest.mark.parametrize("layout", ["wide", "deep"])
def test_rows_have_the_same_bits_in_any_batch_and_run(layout, dtype, op):
    part = make(dtype, 41, 2120, 8192, layout, "tanh")
    with torch.no_grad():
        (whole,) = products([part])
        for first, end in ((0, 41), (0, 1), (3, 5), (2, 10), (25, 41), (5, 37)):
            (some,) = products([part._replace(x=part.x[first:end])])
            assert torch.equal(some, whole[first:end])


def test_behind_launches_that_write_what_it_reads(op):
    """x, gate and what is added are written by the launch right before, over and over."""
    part = make(torch.float16, 8, 2048, 2048, has=("gate", "add"))
    unit = make(torch.float16, 8, 2048, 2048)._replace(weight=torch.eye(2048, device="cuda", dtype=torch.float16))
    with torch.no_grad():
        (want,) = products([part])
        for _ in range(50):
            x, gate, add = products([unit._replace(x=part.x), unit._replace(x=part.gate), unit._replace(x=part.add)])
            (y,) = products([part._replace(x=x, gate=gate, add=add)])
            assert torch.equal(y, want)
            del x, gate, add, y


@DTYPE
@pytest.mark.parametrize("rows", [1, 5, 8, 27])
@pytest.mark.parametrize("name", ["RWKV7", "RWKV6", "RWKV5"])
def test_steps(name, rows, dtype, op, monkeypatch):
    """Three steps: as they are, and twice from a graph; logits and states are those by products of torch."""
    sizes = {"width": 256, "head_size": 64, "hidden": 512, "layers": 3, "vocabulary": 400}
    ranks = {"ranks": {"w": 32, "a": 48, "v": 32, "g": 64}} if name == "RWKV7" else {}
    model = nn_cases.make(dtype, name=name, **sizes, **ranks).cuda()

    def run():
        pool = model.new_pool(rows)
        torch.manual_seed(0)
        pool["wkv"].normal_(std=16)  # of a first token r.k may be near 0, and the norm behind makes any rounding large
        logits = [model.step(nn_cases.make_tokens(model, rows, seed=seed).cuda(), pool) for seed in range(3)]
        return [*(x.clone() for x in logits), *(pool[x].clone() for x in model._State._fields)]

    taken = []
    together = of_nn._together
    monkeypatch.setattr(of_nn, "_together", lambda several: taken.append(together(several)) or taken[-1])
    ours = run()
    assert taken
    assert not any(None in several for several in taken)
    monkeypatch.setattr(of_nn, "_together", lambda several: [None] * len(several))
    model = nn_cases.make(dtype, name=name, **sizes, **ranks).cuda()
    for x, y in zip(ours, run(), strict=True):
        assert comparing.relative(x, y) < 10 * LIMITS[dtype]
