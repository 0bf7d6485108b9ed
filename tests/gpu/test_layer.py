"""The small work of a layer on the GPU against float64: values, pools, and what must be left alone."""

from itertools import accumulate, pairwise

import comparing
import plain_layer
import pytest
import torch

import rwkv_jit
from rwkv_jit.layers import calls
from rwkv_jit.schedules import layers as layer_steps

DTYPES = comparing.DTYPES
LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Of the rows, the parameters and the pool.
KINDS = [
    ("bf16", "bf16", "bf16"), ("fp32", "fp32", "fp32"), ("fp16", "fp16", "fp16"), ("bf16", "fp32", "fp32"),
    ("fp16", "fp32", "bf16"), ("fp32", "fp32", "fp16"),
]  # fmt: skip
CHANNELS = [1, 7, 33, 64, 100, 768, 1001, 2048, 4096, 5000, 8192, 20_000]
SIZES = [1, 3, 8, 33, 48, 64, 100, 128, 256, 500, 999, 1024]
SLOTS = 11
pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
KIND = pytest.mark.parametrize("kind", KINDS, ids="-".join)


def with_kinds(name, sizes):
    """Each size with two kinds, and each kind with several sizes."""
    pairs = [(size, KINDS[(place + shift) % len(KINDS)]) for place, size in enumerate(sizes) for shift in (0, 3)]
    return pytest.mark.parametrize((name, "kind"), pairs, ids=[f"{size}-{'-'.join(kind)}" for size, kind in pairs])


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def check(x, want):
    assert comparing.relative(x, want) < LIMITS[x.dtype]


class Texts:
    """Arguments of `shift_mix` for texts of some lengths, whose slots lie in a pool with room between them."""

    def __init__(self, channels, lengths, kind, mixes=6, has_add=True, spare=0, shape=None):
        io, parameters, kept = (DTYPES[name] for name in kind)
        self.bounds = [0, *accumulate(lengths)]
        shape = shape or (self.bounds[-1], channels)
        # A mean that is not zero shows a variance that is not that of what is left.
        self.given = {"x": random(*shape, dtype=io) + 16, "weight": 1 + random(channels) / 5, "bias": random(channels)}
        self.given["mixes"] = torch.rand((mixes, channels) if mixes else (channels,), device="cuda")
        self.given |= {name: self.given[name].to(parameters) for name in ("weight", "bias", "mixes")}
        if has_add:
            self.given["add"] = random(*shape, dtype=io)
        self.memory = torch.full((len(lengths) + SLOTS, channels + spare), float("nan"), device="cuda", dtype=kept)
        self.pool = self.memory[:, :channels]
        self.slots = torch.randperm(len(self.pool), device="cuda")[: len(lengths)].to(torch.int32)
        self.pool[self.slots.long()] = random(len(lengths), channels, dtype=kept)
        self.before = self.memory.clone()

    @property
    def packed(self):
        return torch.tensor(self.bounds, device="cuda")

    def run(self, **options):
        options = {"state_indices": self.slots} | options
        return rwkv_jit.shift_mix(**self.given, shift=self.pool, **options)

    def check(self, residual, mixed, null_index=-1, has_state=None, active=None):
        pool, slots = self.before[:, : self.pool.shape[1]], self.slots.tolist()
        given = self.given | {"pool": pool, "bounds": self.bounds, "slots": slots, "null_index": null_index}
        given |= {"has_state": has_state, "active": active}
        z, _, left = plain_layer.shift_mix(**given)
        # Where n lies by the error of float32 from the middle of two neighbours in 16 bits, either of them is right.
        off = 0.0 if self.pool.dtype == torch.float32 else 4 * LIMITS[torch.float32]
        ends = torch.stack([plain_layer.shift_mix(**given, off=sign * off)[1] for sign in (-1, 1)])
        found = mixed.view(ends.shape[1:])
        check(found, found.double().clamp(ends.amin(0), ends.amax(0)))
        if "add" in self.given:
            check(residual, z)
        else:
            assert residual is self.given["x"]
        kept = [
            slot for slot, (begin, end) in [*zip(slots, pairwise(self.bounds), strict=True)][:active]
            if begin < end and null_index < slot and 0 <= slot < len(pool)
        ]  # fmt: skip
        if kept:
            check(self.pool[kept], left[kept])
        others = torch.ones(len(pool), dtype=torch.bool, device="cuda")
        others[kept] = False
        assert torch.equal(self.memory.view(torch.uint8)[others], self.before.view(torch.uint8)[others])
        assert bool(self.memory[:, self.pool.shape[1] :].isnan().all())


# ---- residual, norm, shift and mixes -----------------------------------------------------------------------------


@with_kinds("channels", CHANNELS)
@pytest.mark.parametrize("mixes", [0, 1, 5, 6])
def test_one_token_of_each_row(op, channels, mixes, kind, guarded_memory):
    texts = Texts(channels, [1] * 5, kind, mixes, has_add=mixes != 5)
    texts.check(*texts.run())


@with_kinds("channels", CHANNELS)
@pytest.mark.parametrize("lengths", [[4] * 3, [0, 3, 1, 0, 0, 9, 2, 0], [1], [70]])
@pytest.mark.parametrize("mixes", [1, 6])
def test_texts_of_any_lengths(op, channels, lengths, mixes, kind, guarded_memory):
    texts = Texts(channels, lengths, kind, mixes)
    texts.check(*texts.run(cu_seqlens=texts.packed.to(torch.int32)))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@KIND
def test_tokens_behind_the_last_text_have_no_slot(op, index, kind, guarded_memory):
    texts = Texts(100, [0, 3, 2, 0, 0], kind, shape=(9, 100))
    texts.check(*texts.run(cu_seqlens=texts.packed.to(index)))


@pytest.mark.parametrize("channels", [33, 2048])
@KIND
def test_tokens_of_rows(op, channels, kind, guarded_memory):
    texts = Texts(channels, [6] * 4, kind, shape=(4, 6, channels))
    texts.check(*texts.run())


@pytest.mark.parametrize("spare", [0, 1, 4, 8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_index", [-1, 0, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_without_a_slot(op, spare, index, null_index, is_packed, guarded_memory):
    for kind in KINDS:
        lengths = [2, 0, 3, 1, 5, 1, 1] if is_packed else [1] * 7
        texts = Texts(256, lengths, kind, spare=spare)
        texts.slots[2], texts.slots[4], texts.slots[5] = null_index, -9, len(texts.pool)
        texts.slots = texts.slots.to(index)
        options = {"cu_seqlens": texts.packed} if is_packed else {}
        texts.check(*texts.run(null_index=null_index, **options), null_index=null_index)


@with_kinds("channels", [33, 100, 2048, 5000])
@pytest.mark.parametrize("tokens", [1, 3, None])
@pytest.mark.parametrize("flag", [torch.bool, torch.uint8])
def test_rows_and_texts_that_are_new_or_not_there(op, channels, kind, tokens, flag, guarded_memory):
    lengths, spare = [2, 0, 3, 1, 5, 1, 1] if tokens is None else [tokens] * 7, 0 if tokens else 4
    shape = {1: (7, channels), 3: (7, 3, channels)}.get(tokens, (sum(lengths) + spare, channels))
    has_state = [True, False, False, True, False, True, False]
    for active in (None, 0, 1, 4, 7):
        for has_add in (True, False):
            texts = Texts(channels, lengths, kind, has_add=has_add, shape=shape)
            texts.slots[0], texts.slots[1] = -1, len(texts.pool)
            options = {"has_initial_state": torch.tensor(has_state, device="cuda").to(flag)}
            bounds = texts.packed
            if active is not None:
                options["num_active"] = torch.tensor([active], dtype=torch.int32, device="cuda")
                bounds[active + 1 :] = -9  # nobody reads the bounds, the slots and the flags of what is not there
                options["state_indices"] = texts.slots.clone()
                options["state_indices"][active:] = texts.slots[:1] if active else 0
                for name in texts.given.keys() & {"x", "add"}:  # nor takes anything of its rows
                    texts.given[name].view(-1, channels)[texts.bounds[active] :] = float("nan")
            made = texts.run(**options, **({"cu_seqlens": bounds} if tokens is None else {}))
            if active is not None:
                assert not made[1].view(-1, sum(lengths) + spare, channels)[:, texts.bounds[active] :].any()
            texts.check(*made, has_state=has_state, active=active)


def test_a_count_above_all_texts_is_all_of_them(op):
    """And what lies behind the bounds in memory is not read."""
    texts = Texts(64, [2, 3, 1], KINDS[0], shape=(10, 64))
    behind = torch.tensor([*texts.bounds, 8, 10], device="cuda")
    active = torch.tensor([5], dtype=torch.int32, device="cuda")
    texts.check(*texts.run(cu_seqlens=behind[:4], num_active=active), active=3)


def test_a_graph_takes_any_number_of_texts(op):
    """One buffer of rows and of texts, of which each replay has others."""
    texts = Texts(256, [1] * 8, KINDS[0], shape=(40, 256))
    bounds = torch.zeros(9, dtype=torch.int32, device="cuda")
    active, flags = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.ones(8, dtype=torch.bool, device="cuda")
    options = {"cu_seqlens": bounds, "has_initial_state": flags, "num_active": active, "state_indices": texts.slots}
    texts.run(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual, mixed = texts.run(**options)
    for lengths, new in (([1] * 8, []), ([40], [0]), ([1, 17, 1, 1], [1]), ([], []), ([3, 0, 4, 2, 1, 9], [2, 5])):
        for name in ("x", "add"):
            texts.given[name].copy_(random(40, 256, dtype=texts.given[name].dtype))
        texts.memory.copy_(texts.before)
        texts.bounds = [*accumulate(lengths, initial=0), *[99] * (8 - len(lengths))]
        bounds.copy_(torch.tensor(texts.bounds))
        active.fill_(len(lengths))
        has_state = [place not in new for place in range(8)]
        flags.copy_(torch.tensor(has_state))
        for x in (residual, mixed):
            x.fill_(float("nan"))
        graph.replay()
        texts.check(residual, mixed, has_state=has_state, active=len(lengths))


def test_rows_without_indices_have_their_own_slots(op):
    texts = Texts(64, [1] * 5, KINDS[0])
    texts.slots = torch.arange(5, device="cuda")
    texts.memory[:] = random(*texts.memory.shape, dtype=texts.memory.dtype)
    texts.before = texts.memory.clone()
    texts.check(*texts.run(state_indices=None))


@KIND
def test_a_text_may_be_cut_anywhere(op, kind):
    whole, mixed = Texts(768, [9] * 3, kind, shape=(3, 9, 768)), []
    _, want = whole.run()
    left, whole.memory[:] = whole.memory.clone(), whole.before
    for begin, end in ((0, 1), (1, 2), (2, 7), (7, 9)):
        part = {name: whole.given[name][:, begin:end] for name in ("x", "add")}
        given = whole.given | part | {"shift": whole.pool, "state_indices": whole.slots}
        mixed.append(rwkv_jit.shift_mix(**given)[1])
    assert torch.equal(torch.cat(mixed, 2), want)
    assert torch.equal(whole.memory.view(torch.uint8), left.view(torch.uint8))


def test_wrong_bounds_touch_nothing_else(op):
    """Bounds that change after they were checked give wrong values, in the pool's slots and the results alone."""
    texts = Texts(64, [4, 3, 5], KINDS[1])
    for name in ("x", "add"):  # with rows before and behind that nobody may read
        wide = torch.full((3 * 12, 64), float("nan"), device="cuda")
        texts.given[name] = wide[12:24].copy_(texts.given[name])
    bounds = texts.packed
    texts.run(cu_seqlens=bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, mixed = texts.run(cu_seqlens=bounds)
    for wrong in ([0, 9, 2, 12], [7, 3, 1, 0], [-5, 100, 7, 3], [12, 12, 12, 12], [5, 5, 6, 6], [0, 0, 0, -3]):
        texts.memory.copy_(texts.before)
        bounds.copy_(torch.tensor(wrong))
        mixed.fill_(float("nan"))
        graph.replay()
        others = torch.ones(len(texts.pool), dtype=torch.bool, device="cuda")
        others[texts.slots.long()] = False
        assert bool(texts.memory[others].isnan().all())
        assert bool(texts.pool[texts.slots.long()].isfinite().all())
        assert bool(mixed.isfinite().all())


# ---- keys and values ---------------------------------------------------------------------------------------------


def make_keys(kind, size, lead=(5,), heads=3, has_first=True):
    io, parameters, _ = (DTYPES[name] for name in kind)
    given = {name: random(*lead, heads, size, dtype=io) for name in "kv"}
    given |= {"rate": random(*lead, heads * size, dtype=parameters)}
    given |= {name: random(heads * size, dtype=parameters) for name in ("k_k", "k_a", "a0")}
    if has_first:
        given |= {"v_first": random(*lead, heads, size, dtype=io), "v0": random(heads, size, dtype=parameters)}
        given |= {"v_gate": random(*lead, heads * size, dtype=parameters)}
    return given


@with_kinds("size", SIZES)
@pytest.mark.parametrize("without", [(), ("a0",), ("v0", "a0"), ("v_first", "v_gate", "v0")], ids=len)
def test_keys_and_values(op, size, without, kind, guarded_memory):
    for lead, heads in (((5,), 3), ((2, 3), 1), ((), 17)):
        given = {name: x for name, x in make_keys(kind, size, lead, heads).items() if name not in without}
        made = rwkv_jit.prepare_keys(**given)
        for x, want in zip(made, plain_layer.prepare_keys(**given), strict=True):
            check(x, want)
        assert (made[1] is given["v"]) == ("v_first" in without)


@with_kinds("size", SIZES)
def test_results_that_a_call_names(op, size, kind, guarded_memory):
    """They are those of a call that makes all, and nothing else is written."""
    for lead, heads in (((5,), 3), ((2, 3), 1), ((70,), 17)):
        given = make_keys(kind, size, lead, heads)
        for rate_map in layer_steps.RATE_MAPS:
            k, v, a, b = rwkv_jit.prepare_keys(**given, rate_map=rate_map)
            check(k, plain_layer.prepare_keys(**given, rate_map=rate_map)[0])
            (found,) = calls.call_for(["new_v"], "prepare_keys", given, (rate_map,))
            assert torch.equal(found, v)
            *found, factor = calls.call_for(["new_k", "a", "b", "factors"], "prepare_keys", given, (rate_map,))
            for x, want in zip(found, (k, a, b), strict=True):
                check(x, want)
            scaled = given["k"].double() * given["k_k"].double().view(heads, size)
            check(factor, 1 / scaled.norm(dim=-1))
            (rate,) = calls.call_for(["new_rate"], "prepare_keys", given, (rate_map,))
            raw = given["rate"].double() + given["a0"].double()
            check(rate.view(raw.shape), raw.sigmoid() if rate_map == "sigmoid" else raw)
        given = make_norm(kind, size, lead, heads)
        out, mean, factor = calls.call_for(["out", "means", "factors"], "gated_norm", given, (0.1, "identity", "layer"))
        check(out, rwkv_jit.gated_norm(**given, eps=0.1))
        y = given["y"].double()
        check(mean, y.mean(-1))
        check(factor, (y.var(-1, correction=0) + 0.1).rsqrt())


def test_keys_of_zero_have_no_direction(op):
    given = make_keys(KINDS[0], 64)
    given["k"][1, 2] = 0
    k, v, a, b = rwkv_jit.prepare_keys(**given)
    assert not any(bool(x[1, 2].any()) for x in (k, a, b))
    assert all(bool(x.isfinite().all()) for x in (k, v, a, b))


# ---- norm, bonus and gate ----------------------------------------------------------------------------------------


def make_norm(kind, size, lead=(5,), heads=3):
    io, parameters, _ = (DTYPES[name] for name in kind)
    given = {name: random(*lead, heads, size, dtype=io) for name in "yrkv"}
    # A mean that is not zero, as above, and values that differ: a difference of 0.05 at 16 has few of float32's digits.
    given["y"] = given["y"].sigmoid() + 16 + 2 * (torch.arange(size, device="cuda") % 2).to(io)
    given |= {"g": random(*lead, heads * size, dtype=io), "r_k": random(heads, size, dtype=parameters)}
    return given | {name: random(heads * size, dtype=parameters) for name in ("weight", "bias")}


@with_kinds("size", SIZES)
def test_norm_of_heads_with_bonus_and_gate(op, size, kind, guarded_memory):
    for lead, heads in (((5,), 3), ((2, 3), 1), ((), 17)):
        given = make_norm(kind, size, lead, heads)
        check(rwkv_jit.gated_norm(**given), plain_layer.gated_norm(**given))
        out = torch.full((*lead, heads * size), float("nan"), device="cuda", dtype=given["y"].dtype)
        assert rwkv_jit.gated_norm(**given, eps=0.1, out=out) is out
        check(out, plain_layer.gated_norm(**given, eps=0.1))


def test_inputs_are_read_where_they_lie(op):
    given = make_norm(KINDS[0], 64)
    want = rwkv_jit.gated_norm(**given)
    spread = {name: torch.stack((x, x), -1)[..., 0] for name, x in given.items()}
    odd = {}
    for name, x in given.items():
        odd[name] = torch.zeros(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)
    for others in (spread, odd):
        for _ in range(2):
            assert torch.equal(rwkv_jit.gated_norm(**others), want)


# ---- activations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 96, 1000, 4096, 5001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(op, count, dtype, guarded_memory):
    x, kinds = random(5, 3, count, dtype=DTYPES[dtype]) * 3, [*layer_steps.KINDS, "sigmoid"]
    want = torch.stack([plain_layer.ACTIVATIONS[kind](part.double()) for kind, part in zip(kinds, x, strict=True)])
    check(rwkv_jit.activate(x, kinds), want)
    check(rwkv_jit.activate(x, "tanh"), x.double().tanh())
    # In place, between memory that must stay.
    wide = torch.full((x.numel() + 17,), 7.0, device="cuda", dtype=x.dtype)
    own = wide[8:-9].view(x.shape).copy_(x)
    assert rwkv_jit.activate(own, kinds, out=own) is own
    check(own, want)
    assert bool((wide[:8] == 7).all())
    assert bool((wide[-9:] == 7).all())


def test_activations_far_out(op):
    x = torch.tensor([-1e30, -100.0, -0.0, 100.0, 1e18, float("inf"), float("-inf"), float("nan")], device="cuda")
    for kind, want in (
        ("tanh", torch.tanh(x)), ("sigmoid", torch.sigmoid(x)), ("relu_squared", torch.relu(x).square()),
        ("identity", x),
    ):  # fmt: skip
        torch.testing.assert_close(rwkv_jit.activate(x, kind), want, equal_nan=True)


# ---- many rows, graphs, overlap, compilers -----------------------------------------------------------------------


def test_many_rows(op):
    texts = Texts(8, [1] * 70_000, KINDS[1], has_add=False)
    _, mixed = texts.run()
    rows = [0, 1, 65_535, 65_536, 69_999]
    texts.given["x"], texts.bounds = texts.given["x"][rows], list(range(len(rows) + 1))
    texts.memory[:], texts.slots = texts.before, texts.slots[rows]
    assert torch.equal(texts.run()[1], mixed[:, rows])
    given = make_norm(KINDS[0], 8, (70_000,), 5)
    want = rwkv_jit.gated_norm(**given)
    few = {name: x[rows] if x.shape[0] == 70_000 else x for name, x in given.items()}
    assert torch.equal(rwkv_jit.gated_norm(**few), want[rows])
    given = make_keys(KINDS[0], 8, (70_000,), 5)
    want = rwkv_jit.prepare_keys(**given)
    few = {name: x[rows] if x.shape[0] == 70_000 else x for name, x in given.items()}
    for x, y in zip(rwkv_jit.prepare_keys(**few), want, strict=True):
        assert torch.equal(x, y[rows])


def test_a_graph_takes_other_inputs_and_slots(op):
    texts, keys, norms = Texts(256, [1] * 5, KINDS[0]), make_keys(KINDS[0], 64), make_norm(KINDS[0], 64)
    low, kinds = random(3, 5, 96), ("tanh", "identity", "sigmoid")

    def run():
        made = [*texts.run(), *rwkv_jit.prepare_keys(**keys), rwkv_jit.gated_norm(**norms)]
        return [*made, rwkv_jit.activate(low, kinds)]

    run()
    texts.memory.copy_(texts.before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(2):
        fresh = Texts(256, [1] * 5, KINDS[0]), make_keys(KINDS[0], 64), make_norm(KINDS[0], 64)
        for given, other in zip((texts.given, keys, norms), (fresh[0].given, *fresh[1:]), strict=True):
            for name, x in given.items():
                x.copy_(other[name])
        low.normal_()
        texts.memory.copy_(fresh[0].memory)
        texts.slots.copy_(fresh[0].slots)
        texts.slots[2] = -1
        texts.before = texts.memory.clone()
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        texts.check(*found[:2])
        for x, want in zip(found[2:6], plain_layer.prepare_keys(**keys), strict=True):
            check(x, want)
        check(found[6], plain_layer.gated_norm(**norms))
        parts = zip(kinds, low, strict=True)
        check(found[7], torch.stack([plain_layer.ACTIVATIONS[kind](part.double()) for kind, part in parts]))


@pytest.mark.parametrize("rows", [1, 40, 700])
def test_a_launch_reads_what_the_one_before_it_writes(op, rows):
    """Each begins beside the one before: rows, parameters, slots and states must not be those of before."""
    heads, size, steps = 4, 64, 6
    channels = heads * size
    pool, first = random(rows, channels), random(rows, channels)
    before, weights = pool.clone(), random(steps, channels)
    raw_mixes, mixes = random(6, channels), torch.empty(6, channels, device="cuda")
    k_k, k_a, r_k, bias = random(4, channels)
    slots, kinds = torch.arange(rows, dtype=torch.int32, device="cuda"), ("tanh", "sigmoid", "relu_squared", "tanh")

    def run(wait):
        x, add = first, first.clone()
        for step in range(steps):
            rwkv_jit.activate(raw_mixes, "sigmoid", out=mixes)
            wait()
            x, mixed = rwkv_jit.shift_mix(x, weights[step], bias, mixes, pool, add=add, state_indices=slots)
            wait()
            r, k, v, rate, g, y = (z.view(rows, heads, size) for z in mixed)
            k, v, a, b = rwkv_jit.prepare_keys(k, v, rate, k_k, k_a, v_first=r, v_gate=g, a0=mixes[0], v0=mixes[1])
            wait()
            add = rwkv_jit.gated_norm(a, g, mixes[2], bias, b, k, v, r_k)
            wait()
            part = add.view(rows, 4, size).transpose(0, 1).contiguous()
            part = rwkv_jit.activate(part, kinds, out=part)
            wait()
            part = part.view(rows, heads, size)
            add = rwkv_jit.gated_norm(y, g, mixes[3], bias, r, k, part, r_k)
            wait()
            raw_mixes.add_(0.1)
        return x, add

    start = raw_mixes.clone()
    want = [x.clone() for x in run(torch.cuda.synchronize)]
    left = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(5):
        pool.copy_(before)
        raw_mixes.copy_(start)
        mixes.fill_(float("nan"))
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
        assert torch.equal(pool, left)


def test_compiled_whole(op):
    texts, keys, norms = Texts(256, [1] * 5, KINDS[0]), make_keys(KINDS[0], 64), make_norm(KINDS[0], 64)

    def layer(given, pool, slots, keys, norms):
        residual, mixed = rwkv_jit.shift_mix(**given, shift=pool, state_indices=slots)
        made = [residual, mixed, *rwkv_jit.prepare_keys(**keys), rwkv_jit.gated_norm(**norms)]
        return [2 * x for x in made]

    found = torch.compile(layer, fullgraph=True)(texts.given, texts.pool, texts.slots, keys, norms)
    texts.check(*[x / 2 for x in found[:2]])
    for x, want in zip(found[2:6], plain_layer.prepare_keys(**keys), strict=True):
        check(x / 2, want)
    check(found[6] / 2, plain_layer.gated_norm(**norms))


def test_slots_are_looked_at_when_asked(op, nothing_known, monkeypatch):
    texts = Texts(64, [1] * 5, KINDS[0])
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    for slots, message in (([0, 1, 2, 3, 99], "state_indices: expected slots below"), ([0, 1, 2, 1, 4], "twice")):
        with pytest.raises(ValueError, match=message):
            texts.run(state_indices=torch.tensor(slots, device="cuda", dtype=torch.int32))
    assert torch.equal(texts.memory.view(torch.uint8), texts.before.view(torch.uint8))
