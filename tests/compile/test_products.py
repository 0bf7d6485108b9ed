"""Products of a few rows: their values on the PTX machine beside float64, whatever matrices, rows and addresses are."""

import itertools
from collections import Counter

import nn_cases
import pytest
import torch
from comparing import relative
from product_cases import LIMITS, check, group, make

from rwkv_jit.call import switches
from rwkv_jit.kernels import kernel, signatures
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.layers.products import products
from rwkv_jit.nn import node
from rwkv_jit.nn import products as of_nn
from rwkv_jit.nn.model import RWKV5, RWKV6, RWKV7  # so that the ledger knows what steps are made of
from rwkv_jit.schedules import products as schedules
from rwkv_jit.schedules.layers import Given, Options

DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "multiprocessors", "tiles"),
    [(1, 132, 1), (2, 4, 4), (3, 132, 1), (8, 32, 2), (9, 132, 1), (20, 8, 4), (35, 32, 2)],
)
def test_a_group(dtype, rows, multiprocessors, tiles, interpreted):
    torch.manual_seed(rows)
    interpreted.use("sm_90")
    interpreted.multiprocessors = multiprocessors  # where there are few, blocks make more columns
    check(group(dtype, rows))
    (launch,) = interpreted.take()
    assert (launch.template, launch.parameters["VECTOR"]) == ("layer_products", 8)
    assert launch.parameters["TILES"] == tiles


def among(x, offset, gaps):
    """The same numbers in memory that holds none elsewhere: from an odd address on, with gaps between rows."""
    held = torch.full((*x.shape[:-1], x.shape[-1] + gaps), torch.nan).to(x.dtype)
    room = torch.full((held.numel() + offset,), torch.nan).to(x.dtype)
    own = room[offset:].view(held.shape)[..., : x.shape[-1]]
    own.copy_(x)
    return own


@DTYPES
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize(("offset", "gaps", "odd"), [(0, 0, 1), (1, 0, 0), (8, 0, 0), (0, 3, 0), (3, 5, 3)])
def test_odd_sizes_and_places(offset, gaps, odd, arch, dtype, interpreted):
    torch.manual_seed(offset + gaps)
    interpreted.use(arch)
    parts = [
        make(dtype, 2, 72 + odd, 19, has=("bias", "add")), make(dtype, 2, 20 + odd, 36 - odd, "deep", has=("gate",)),
        make(dtype, 2, 1, 1, "deep"),
    ]  # fmt: skip
    parts = [part._replace(x=among(part.x, offset, gaps), weight=among(part.weight, offset, gaps)) for part in parts]
    check(parts)
    assert interpreted.take()[0].parameters["VECTOR"] == 1


def test_misaligned_rows_of_whole_accesses(interpreted):
    part = make(torch.float16, 2, 64, 16)
    check([part])
    check([part._replace(x=among(part.x, 1, 0), weight=among(part.weight, 3, 0))])
    assert [launch.parameters["VECTOR"] for launch in interpreted.take()] == [8, 8]


@DTYPES
@pytest.mark.parametrize("layout", ["wide", "deep"])
@pytest.mark.parametrize("multiprocessors", [3, 132])
def test_rows_have_the_same_bits_in_any_batch(multiprocessors, layout, dtype, interpreted):
    """Depths are of several rounds of all warps, with a rest that is no whole step."""
    torch.manual_seed(7)
    interpreted.multiprocessors = multiprocessors
    part = make(dtype, 35, 2120, 128, layout, has=("add",))
    (whole,) = check([part])
    for first, end in ((0, 1), (3, 5), (2, 10), (10, 11), (0, 11), (4, 30)):
        (some,) = check([part._replace(x=part.x[first:end], add=part.add[first:end])])
        assert torch.equal(some, whole[first:end])
    first, *others = launches = interpreted.take()
    assert first.grid[1] == 2
    assert {launch.grid[1] for launch in others} == {1}

    def all_of(name):
        return {launch.parameters[name] for launch in launches}

    assert all_of("ROW_TILES") == {1, 2, 4}
    assert all_of("TILES") == ({2} if multiprocessors == 3 and layout == "wide" else {1})
    assert all_of("NUM_THREADS") == {256}


@DTYPES
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_blocks_that_share_the_depth_make_the_same_bits(arch, dtype, interpreted):
    """Of one row one block has the whole depth; of more two blocks have it, where they can read each other's sums."""
    torch.manual_seed(8)
    interpreted.use(arch)
    parts = [make(dtype, 19, 4168, 64, has=("bias", "gate")), make(dtype, 19, 4100, 36, "deep", "silu", ("add",))]

    check(parts)
    for part in parts:  # sums of large numbers that cancel: in another order they have other last bits
        along, half = (1, 2624) if part.layout == "wide" else (0, 2336)  # of warps 0 and 9 of 16, or of the next ones
        x, weight = 32 * part.x[:, :64].abs(), 32 * part.weight.narrow(along, 0, 64).abs()
        for begin, sign in ((0, 1), (half, -1)):
            part.x[:, begin : begin + 64] = x
            part.weight.narrow(along, begin, 64).copy_(sign * weight)
    with torch.no_grad():
        whole = products(parts)
        for which in (slice(0, 1), slice(7, 16), slice(2, 19)):
            several = [(part, {x: getattr(part, x) for x in ("x", "gate", "add")}) for part in parts]
            some = products(
                [part._replace(**{x: y if y is None else y[which] for x, y in by.items()}) for part, by in several]
            )
            assert all(torch.equal(x, y[which]) for x, y in zip(some, whole, strict=True))
    clusters = [launch.parameters["CLUSTER"] for launch in interpreted.take()]
    assert clusters == ([1] * 5 if arch == "sm_80" else [2, 2, 1, 2, 2])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("kind", "dtype"), [(RWKV7, torch.float16), (RWKV6, torch.bfloat16), (RWKV5, torch.float16)])
def test_steps_of_models(kind, dtype, rows, interpreted, monkeypatch):
    """Logits and states of two steps are those by products of torch, but for rounding."""
    interpreted.use("sm_90")
    sizes = {"width": 64, "head_size": 32, "hidden": 96, "layers": 2, "vocabulary": 40}
    ranks = {"ranks": {"w": 8, "a": 12, "v": 8, "g": 16}} if kind is RWKV7 else {}
    model = nn_cases.make(dtype, name=kind.__name__, **sizes, **ranks)

    def run():
        pool = model.new_pool(rows)
        logits = [model._step(nn_cases.make_tokens(model, rows, seed=seed), pool, None, False) for seed in (1, 2)]
        return [*logits, *(pool[x].clone() for x in model._State._fields)]

    with torch.no_grad():
        ours = run()
        assert "layer_products" in {launch.template for launch in interpreted.take()}
        monkeypatch.setattr(of_nn, "_together", lambda several: [None] * len(several))
        of_torch = run()
        assert "layer_products" not in {launch.template for launch in interpreted.take()}
    errors = [relative(x, y) for x, y in zip(ours, of_torch, strict=True)]
    assert max(errors) < 8 * LIMITS[dtype], errors


@pytest.mark.parametrize("kind", [RWKV7, RWKV6])
@pytest.mark.parametrize("has_nodes", [False, True])
def test_prompts_of_models(has_nodes, kind, interpreted, monkeypatch):
    """Low-rank products of prompts are ours, in lists of nodes too; logits are those by products of torch."""
    interpreted.use("sm_90")
    monkeypatch.setattr(node, "devices", {"cuda"} if has_nodes else set())
    monkeypatch.setattr(of_nn, "ROWS", 4)
    sizes = {"width": 64, "head_size": 32, "hidden": 96, "layers": 2, "vocabulary": 40}
    model = nn_cases.make(torch.float16, name=kind.__name__, **sizes)
    tokens = nn_cases.make_tokens(model, 1, 9)

    def run():
        with torch.no_grad():
            made = [model(tokens) for _ in range(3)]  # the first one is noted
        assert all(torch.equal(x, made[0]) for x in made)
        return made[0], Counter(launch.template for launch in interpreted.take())["layer_products"]

    ours, count = run()
    assert count == (3 + has_nodes) * {RWKV7: 5, RWKV6: 6}[kind] * len(model.blocks)
    monkeypatch.setattr(of_nn, "_together", lambda several: [None] * len(several))
    signatures.forget()
    of_torch, count = run()
    assert count == 0
    assert relative(ours, of_torch) < 8 * LIMITS[torch.float16]


@pytest.mark.parametrize("kind", [RWKV7, RWKV6, RWKV5])
def test_steps_have_the_same_bits_in_any_batch(kind, interpreted):
    """Where bits may not depend on the batch: of nine sequences, and of two of them."""
    interpreted.use("sm_90")
    model = nn_cases.make(
        torch.bfloat16, name=kind.__name__, width=64, head_size=32, hidden=96, layers=2, vocabulary=40
    )
    tokens = nn_cases.make_tokens(model, 9)
    switches.set_batch_invariant(True)
    try:
        with torch.no_grad():
            whole = model._step(tokens, model.new_pool(9), None, False)
            some = model._step(tokens[3:5], model.new_pool(2), None, False)
    finally:
        switches.set_batch_invariant(False)
    assert torch.equal(some, whole[3:5])


WIDTHS = 64, 768, 2048, 4096


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@DTYPES
def test_resources(dtype, arch, from_ledger):
    """A multiprocessor has the registers and the shared memory for the blocks that are counted on; nothing spills."""
    gpu, storage = Gpu(arch), {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    requests = {}
    for width, rows, is_odd in itertools.product(WIDTHS, (1, 9, 32, 33), (0, 1)):
        low, wide = (128, "deep"), (width, "wide")
        for depth, matrices in (
            (width + is_odd, [wide] * 3 + [low] * 4), (width, [low] * 3), (low[0], [(width, "deep")] * 3),
            (width, [wide]), (width, [(4 * width, "wide")]), (4 * width, [wide]), (width, [(2**16, "wide")]),
        ):  # fmt: skip
            sizes = tuple(x for columns, _ in matrices for x in (depth, columns))
            types = {f"{x}{p}": storage for p in range(len(matrices)) for x in ("x", "weight")}
            given = Given(gpu, types, rows, sizes)
            options = Options(kinds=tuple(x for _, layout in matrices for x in ("identity", layout)))
            requests |= {kernel.memory_key(x): x for x in schedules.products(given, options).requests(gpu)}
    assert len(requests) > 30
    for request in requests.values():
        parameters, used = request.parameters, kernel.get(request).resources["layer_products"]
        threads, blocks = parameters["NUM_THREADS"], parameters["BLOCKS_PER_SM"]
        assert used.spill_bytes == 0, parameters
        assert threads * blocks * -(-used.registers // 8) * 8 <= 65536
        assert gpu.has_room(blocks, parameters["SHARED_BYTES"])
