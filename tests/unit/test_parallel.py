"""One sequence over many processes: parts agree with the whole, and what does not fit is said."""

from types import SimpleNamespace

import derived_cases
import groups
import pytest
import shared_sequences
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import rwkv_jit
from rwkv_jit import parallel
from rwkv_jit.compat.fla import family, functions
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules.table import ALL as OPS_OF_ALL
from rwkv_jit.schedules.table import OPS


def check_parts(rank, size):
    for bounds, lengths in shared_sequences.LAYOUTS[size]:
        for name in shared_sequences.NAMES:
            shared_sequences.check(rank, size, name, bounds, lengths)
        for name, how in shared_sequences.FAMILY:
            shared_sequences.check(rank, size, name, bounds, lengths, how=how)
        shared_sequences.check_shift(rank, size, bounds, lengths)
        for width in (2, 4, 8):
            for activation in (None, "silu"):
                shared_sequences.check_convolution(rank, size, bounds, lengths, width, activation)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_the_whole(size):
    groups.run(check_parts, size)


def check_models(rank, size):
    for name in ("RWKV7", "RWKV6", "RWKV5"):
        for bounds, lengths in ((None, [10, 14]), ([0, 3, 3, 14, 24], [10, 14]), ([0, 24], [8, 16])):
            shared_sequences.check_model(rank, size, name, bounds, lengths)
    model = rwkv_jit.nn.RWKV7(11, 16, 1, 8)
    shard = parallel.Shard(None, [0, 8], [4, 4])
    with pytest.raises(ValueError, match="cu_seqlens: expected None with a shard, which has the bounds of all parts"):
        model(torch.zeros(1, 4, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4]), shard=shard)


def test_parts_of_a_model_are_the_whole():
    groups.run(check_models, 2)


def check_alone(rank, size):
    """Without gradients, of float32, under autocast, and alone in a group."""
    inputs = shared_sequences.make_inputs("wkv7", 1, 8, dtype=torch.float32)
    groups = [dist.new_group([each]) for each in range(size)]
    group = groups[rank]
    with torch.no_grad():
        y, none = parallel.wkv7(*inputs, parallel.Shard(group))
    whole, _ = rwkv_jit.wkv7(*inputs)
    assert none is None
    torch.testing.assert_close(y, whole)
    for again in (inputs, shared_sequences.make_inputs("wkv7", 1, 8, dtype=torch.float32)):  # known by now
        y, _ = parallel.wkv7(*again, group)
        torch.testing.assert_close(y, rwkv_jit.wkv7(*again)[0])
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = parallel.wkv7(*inputs, group)
        whole, _ = rwkv_jit.wkv7(*inputs)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, whole)
    case = derived_cases.make("ssd", "D z bias softplus", (1, 8, 1, 2, 4, 6), torch.float32, has_state=False)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = parallel.ssd(*case.inputs.values(), group, **case.parameters, **case.options)
        whole, _ = case.run()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, whole)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    assert parallel.Shard(mesh["cp"]).size == size
    with pytest.raises(ValueError, match=r"group: expected a mesh of one dimension, .* mesh\['cp'\]"):
        parallel.Shard(mesh)
    with pytest.raises(ValueError, match="group: expected one that this process belongs to"):
        parallel.Shard(groups[1 - rank])


def test_other_groups():
    groups.run(check_alone, 2)


def fail(rank, size):
    shard = parallel.Shard()
    if rank == 1:
        raise RuntimeError("the second process has failed")
    parallel.wkv7(*shared_sequences.make_inputs("wkv7", 1, 8), shard)


def test_a_process_that_fails_ends_the_others_with_its_message():
    with pytest.raises(Exception, match="the second process has failed|Connection (closed|reset) by peer"):
        groups.run(fail, 2)


def check_that_all_refuse(rank, size):
    """Every process says the same of calls that are not the same, and the next call is as ever."""
    inputs = shared_sequences.make_inputs("wkv6", 1, 8)
    wide, narrow = (shared_sequences.make_inputs("wkv6", 1, 8, each) for each in ((8, 6), (4, 4)))
    x = torch.randn(1, 8, 6)
    odd, whole = rank == size - 1, parallel.Shard()
    packed = [parallel.Shard(None, bounds, lengths) for bounds, lengths in (
        ([0, 3, 8 * size], None), ([0, 4, 8 * size], None), ([0, 3, 8 * size], [8] * (size - 1) + [8]),
    )]  # fmt: skip

    def calls(x, *given, op="wkv6", shard=whole, **options):
        return lambda: getattr(parallel, op)(x, *given, shard, **options)

    for one, other, said in (
        (calls(*inputs), calls(*(each.float() for each in inputs)), "wkv6 of torch.float32"),
        (calls(*inputs), calls(*inputs[:4], op="gla"), "gla of torch.float64"),
        (calls(*inputs), calls(*wide), "K 8, V 6"),
        (calls(*inputs), calls(*narrow), "K 4, V 4"),
        (calls(*inputs), calls(*(each[:, :, :1] if each.dim() == 4 else each[:1] for each in inputs)), "H 1"),
        (calls(*inputs), calls(*inputs, decay="log"), "decay log"),
        (calls(*inputs), calls(*inputs, scale=2.0), "scale 2.0"),
        (calls(*inputs), calls(*inputs, shard=packed[0]), "cu_seqlens=[0, 3, "),
        (calls(*inputs, shard=packed[0]), calls(*inputs, shard=packed[1]), "cu_seqlens=[0, 4, "),
        (lambda: parallel.token_shift(x, x[0, :1], shard=whole), calls(*inputs), "wkv6 of torch.float64"),
        (lambda: parallel.token_shift(x, x[0, :1], shard=whole),
         lambda: parallel.token_shift(x[..., :4], x[0, :1, :4], shard=whole), "of torch.float32 with B 1, C 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="shard: expected the same call on all ranks, got ") as raised:
            (other if odd else one)()
        messages = [None] * size
        dist.all_gather_object(messages, str(raised.value))
        assert len(set(messages)) == 1
        assert said in messages[0]
        assert messages[0].endswith(f" on rank {size - 1}")
        one()  # which is right on all of them
    parallel.wkv6(*inputs, packed[2] if odd else packed[0])  # lengths that are said, and the same


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_do_not_agree_all_say_so(size):
    groups.run(check_that_all_refuse, size)


# ---- contexts of FLA ---------------------------------------------------------------------------------------------


def check_contexts(rank, size):
    """FLA's functions of the tokens of a rank are those of all tokens, with gradients."""
    from fla.ops.cp import build_cp_context

    torch.manual_seed(5)
    heads, tokens = 2, 8 * size
    begin, end = 8 * rank, 8 * rank + 8

    def rows(*shape):
        return torch.randn(1, tokens, heads, *shape, dtype=torch.float64) / 2

    q, k, v, g, a, b = rows(4), rows(4), rows(6), -rows(4).abs(), rows(4), rows(4)
    rate, write = rows().sigmoid(), rows(6).sigmoid()
    gate = {"A_log": torch.randn(heads, dtype=torch.float64), "use_gate_in_kernel": True}
    norm = {"use_qk_l2norm_in_kernel": True}
    for bounds in ([0, tokens], [0, 3, 11, tokens], [0, 8, tokens]):
        bounds = torch.tensor(bounds)
        context = build_cp_context(bounds, group=dist.group.WORLD)
        for function, inputs, options in (
            (family.chunk_kda, (q, k, v, rows(4), rate), {**gate, **norm}),
            (family.chunk_gated_delta_rule, (q, k, v, g[..., 0], rate), norm),
            (family.chunk_gdn2, (q, k, v, g, b.sigmoid(), write), norm),
            (functions.chunk_rwkv7, (q, g, k, v, a, b), {"scale": 1.0}),
            (functions.chunk_dplr_delta_rule, (q, k, v, a, b, g), {}),
        ):
            whole = [x.clone().requires_grad_() for x in inputs]
            y, _ = function(*whole, cu_seqlens=bounds, **options)
            dy = torch.randn_like(y)
            own = [x[:, begin:end].clone().requires_grad_() for x in inputs]
            part, none = function(*own, cp_context=context, **options)
            assert none is None
            torch.testing.assert_close(part, y[:, begin:end])
            wanted = torch.autograd.grad(y, whole, dy)
            for x, want in zip(torch.autograd.grad(part, own, dy[:, begin:end]), wanted, strict=True):
                torch.testing.assert_close(x, want[:, begin:end])
        with pytest.raises(UnsupportedConfigError, match="cp_context is not supported"):
            family.chunk_kda(q, k, v, g, rate, cp_context=context, return_intermediate_states=True)
    zigzag = build_cp_context(torch.tensor([0, tokens]), group=dist.group.WORLD, layout="zigzag")
    with pytest.raises(UnsupportedConfigError, match="cp_context of FLACPContext is not supported"):
        family.chunk_kda(q, k, v, g, rate, cp_context=zigzag)


@pytest.mark.parametrize("size", [2, 3])
def test_contexts_of_fla(size):
    pytest.importorskip("fla", exc_type=ImportError)
    groups.run(check_contexts, size)


# ---- without messages --------------------------------------------------------------------------------------------


@pytest.fixture
def as_rank():
    """Pretend to be one of some processes, which never answer."""

    def begin(rank, size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="group: there is no process group; call torch.distributed.init_process"):
        parallel.Shard()


@pytest.mark.parametrize("packing", [None, [0, 344, 600, 768]])
@pytest.mark.parametrize(
    ("op", "how", "stem"),
    [
        ("kda", "raw bias sigmoid norm", "channel_decay"), ("gated_delta_rule", "raw bias sigmoid norm", "head_decay"),
        ("delta_rule", "norm", "head_decay"), ("simple_gla", "", "head_decay"),
        ("ssd", "D z bias softplus", "head_decay"),
    ],
)  # fmt: skip
def test_parts_run_on_the_kernels_of_the_op(op, how, stem, packing, as_rank, on_gpu, monkeypatch):
    """A part in the middle launches what a call of its tokens launches, and nothing of the op below."""
    as_rank(1, 3)
    on_gpu.use("sm_90")
    told = []

    def gather(shard, x):
        told.append(x.numel())
        return SimpleNamespace(wait=lambda: torch.stack([x] * shard.size))

    monkeypatch.setattr(parallel.Shard, "gather", gather)
    monkeypatch.setattr(parallel.Shard, "agree", lambda *_: None)
    heads, texts = 32, 1 if packing is None else 2
    case = derived_cases.make(
        op, how, (1, 256, heads, heads, 128, 128), torch.bfloat16, torch.float32, torch.float32,
        bounds=None if packing is None else [0, 344 - 256, 256],
    )  # fmt: skip
    shard = parallel.Shard(None, packing)

    def of_part(*given, **more):
        *inputs, state, wants_final, _ = given
        return getattr(parallel, op)(*inputs, shard, state, wants_final, **more)

    def kernels(function=None):
        leaves = shared_sequences.leaves_of(case)
        results = leaves.run(function)
        forward = [launch.template for launch in on_gpu.take()]
        torch.autograd.grad(results, [*leaves.tensors.values()], [*map(torch.ones_like, results)], allow_unused=True)
        return forward, [launch.template for launch in on_gpu.take()]

    (forward, backward), (of_part_forward, of_part_backward) = kernels(), kernels(of_part)
    names = {name for name in of_part_forward if not name.startswith(("fill", "sum"))}
    assert any(name.startswith(stem) for name in names)
    assert names <= {*forward}
    assert {*of_part_backward} <= {*backward}
    is_delta = op in derived_cases.DELTA
    runs = [name for name in of_part_forward if name.endswith("_forward")]
    assert len(runs) == (2 + is_delta if packing is None else texts)
    # P is a matrix of a head where there is a delta term, else one number.
    assert told == [heads * (128 * 128 + (128 * 128 if is_delta else 1)), heads * 128 * 128]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((3,), TypeError, "group: expected a ProcessGroup or a DeviceMesh, got int"),
        ((None, [0]), ValueError, r"cu_seqlens: expected shape \[sequences \+ 1\], got \[1\]"),
        ((None, [0.0, 4.0]), TypeError, "cu_seqlens: expected torch.int32 or torch.int64, got torch.float32"),
        ((None, [1, 4]), ValueError, r"cu_seqlens: expected numbers from 0 that do not fall, got \[1, 4\]"),
        ((None, [0, 5, 4]), ValueError, r"cu_seqlens: expected numbers from 0 that do not fall, got \[0, 5, 4\]"),
        ((None, [0, 5]), ValueError, "lengths: expected a list, as 2 ranks cannot share 5 tokens equally"),
        ((None, [0, 5], [5]), ValueError, r"lengths: expected 2 of them with 5 tokens in all, got \[5\]"),
        ((None, [0, 5], [6, -1]), ValueError, r"lengths: expected 2 of them with 5 tokens in all, got \[6, -1\]"),
        ((None, [0, 5], [2, 2]), ValueError, r"lengths: expected 2 of them with 5 tokens in all, got \[2, 2\]"),
        ((None, None, [2, 3]), ValueError, "lengths: expected none without cu_seqlens"),
        ((None, [0, 8], [4.0, 4.0]), TypeError, r"lengths: expected a sequence of int, got \[4.0, 4.0\]"),
        ((None, [0, 8], 5), TypeError, "lengths: expected a sequence of int, got 5"),
        ((None, "x"), TypeError, "cu_seqlens: expected a tensor or a sequence of int, got 'x'"),
        ((None, {}), TypeError, "cu_seqlens: expected a tensor or a sequence of int, got {}"),
        ((None, [[0], [1, 2]]), TypeError, "cu_seqlens: expected a tensor or a sequence of int, got "),
    ],
)
def test_shards_that_cannot_be(given, error, message, as_rank):
    as_rank(0, 2)
    with pytest.raises(error, match=message):
        parallel.Shard(*given)


def test_calls_that_do_not_fit_send_nothing(as_rank, monkeypatch):
    as_rank(1, 2)
    monkeypatch.setattr(parallel.Shard, "gather", lambda *_: pytest.fail("a message was sent"))
    inputs = shared_sequences.make_inputs("wkv7", 1, 8)
    shard = parallel.Shard(None, [0, 5, 20], [10, 10])
    with pytest.raises(ValueError, match=r"r: expected a batch of 1 and the 10 tokens of rank 1's part, got \[1, 8\]"):
        parallel.wkv7(*inputs, shard)
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[1, 2, 6, 4\] or \[2, 6, 4\], got \[3\]"):
        parallel.wkv7(*inputs, parallel.Shard(), torch.zeros(3))
    with pytest.raises(ValueError, match=r"k: expected shape \[1, 8, 2, 4\] like r, got \[1, 8, 2, 6\]"):
        parallel.wkv7(*inputs[:2], inputs[3], *inputs[3:], parallel.Shard())
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalize'"):
        parallel.linear_attention(*inputs[:3], parallel.Shard(), normalize=True)
    x = torch.zeros(1, 10, 4)
    for call, message in (
        ((x[:, 1:], x[0, :4]), r"x: expected a batch of 1 and the 10 tokens of rank 1's part, got \[1, 9\]"),
        ((x, x[0, :4, :1]), r"weight: expected shape \[4, 2 to 8\], got \[4, 1\]"),
        ((x, x[0, :4], x[0]), r"bias: expected shape \[4\], got \[10, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel.causal_conv1d(*call, shard=shard)
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[1, 4, 3\], got \[1, 10, 4\]"):
        parallel.causal_conv1d(x, x[0, :4], shard=shard, initial_state=x)
    with pytest.raises(ValueError, match="activation: expected one of silu, got 'relu'"):
        parallel.causal_conv1d(x, x[0, :4], shard=shard, activation="relu")
    with pytest.raises(TypeError, match=r"parallel.kda\(\) got an unexpected keyword argument 'zzzz'"):
        parallel.kda(x, x, x, x, x, shard, zzzz=1)
    q, g = torch.zeros(1, 10, 2, 4), torch.zeros(1, 10, 2)
    with pytest.raises(ValueError, match="dt_bias: needs A_log too"):
        parallel.gated_delta_rule(q, q, q, g, g, shard, dt_bias=g[0, 0])
    with pytest.raises(ValueError, match=r"beta: expected shape \[1, 10, 2\] like q, got \[1, 9, 2\]"):
        parallel.delta_rule(q, q, q, g[:, 1:], shard)
    with pytest.raises(ValueError, match=r"dt_limit: expected a pair of numbers that does not fall, got \(2, 1\)"):
        parallel.ssd(q, g, g[0, 0], q, q, shard, dt_limit=(2, 1))
    with pytest.raises(ValueError, match=r"x: expected shape \[batch, tokens, channels\], got \[4\]"):
        parallel.token_shift(torch.zeros(4), torch.zeros(1, 4), shard=parallel.Shard())


@given(
    texts=st.lists(st.integers(0, 6), min_size=1, max_size=6), cuts=st.lists(st.integers(0, 40), min_size=0, max_size=4)
)
def test_parts_have_all_texts(texts, cuts):
    """Each token is in its text, each text begins once and ends once, and is continued in between."""
    bounds = [sum(texts[:i]) for i in range(len(texts) + 1)]
    places = sorted(min(cut, bounds[-1]) for cut in cuts)
    lengths = [b - a for a, b in zip([0, *places], [*places, bounds[-1]], strict=True)]
    found, begun = [], 0
    for rank in range(len(lengths)):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(lengths))
        try:
            shard = parallel.Shard(None, bounds, lengths)
        finally:
            dist.destroy_process_group()
        own = [b - a for a, b in zip(shard.bounds, shard.bounds[1:], strict=False)]
        assert sum(own) == lengths[rank]
        assert shard.bounds[0] == 0
        is_open = begun > 0
        assert shard.is_continued == is_open
        if not sum(own) and not any(x == 0 for x in texts):
            continue  # no tokens, and no text that has none
        for place, length in enumerate(own):
            begun += length
            is_last = place + 1 == len(own)
            if not (is_last and shard.is_to_be_continued):
                found.append(begun)
                begun = 0
    assert begun == 0
    assert [x for x in found if x] == [x for x in texts if x]


# ---- summaries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shared_sequences.NAMES)
def test_summaries_say_what_tokens_do_to_any_state(name):
    inputs = shared_sequences.make_inputs(name, 2, 9)
    state = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    _, final = getattr(rwkv_jit, name)(*inputs, state, True, state_layout="vk")
    rows = list(zip(OPS[name].inputs.values(), inputs, strict=True))
    parts = [
        parallel.summary(name, *(x[:, begin:end] if "T" in dims else x for dims, x in rows))
        for begin, end in ((0, 4), (4, 4), (4, 9))
    ]
    assert parts[0].shape == (2, 2, 10, 4)
    assert parts[0].dtype == torch.float64
    neutral = parallel.neutral(2, 2, head_size=4, value_size=6, dtype=torch.float64)
    torch.testing.assert_close(parts[1], neutral)
    whole = parallel.compose(*parts)
    torch.testing.assert_close(whole, parallel.summary(name, *inputs))
    torch.testing.assert_close(parallel.merge(state, whole), final)
    torch.testing.assert_close(parallel.compose(neutral, whole), whole)


@pytest.mark.parametrize(("name", "how"), shared_sequences.FAMILY)
def test_summaries_of_other_ops(name, how):
    case = derived_cases.make(name, how, (2, 9, 1, 2, 4, 6))
    final = case.run()[1]
    state, final = (x.mT if OPS_OF_ALL[name].state_layout == "kv" else x for x in (case.state, final))

    def summary(index):
        part = case.part((slice(None), index))
        return parallel.summary(name, *part.inputs.values(), **part.parameters, **part.options)

    first, none, second = (summary(slice(*each)) for each in ((0, 4), (4, 4), (4, 9)))
    torch.testing.assert_close(none, parallel.neutral(2, 2, head_size=4, value_size=6, dtype=torch.float64))
    whole = parallel.compose(first, none, second)
    torch.testing.assert_close(whole, summary(slice(None)))
    torch.testing.assert_close(parallel.merge(state, whole), final)


def test_summaries_of_a_head_size_of_one():
    inputs = shared_sequences.make_inputs("gla", 1, 5, (1, 1))
    state = torch.randn(1, 2, 1, 1, dtype=torch.float64)
    _, final = rwkv_jit.gla(*inputs, state, True)
    torch.testing.assert_close(parallel.merge(state, parallel.summary("gla", *inputs)), final)


def test_summaries_that_do_not_fit():
    whole = parallel.neutral(2, head_size=4, value_size=6)
    with pytest.raises(ValueError, match=r"others: expected shape \[2, 10, 4\] like the first, got \[2, 9, 4\]"):
        parallel.compose(whole, whole[:, 1:])
    with pytest.raises(ValueError, match=r"first: expected shape \[..., V \+ K, K\], got \[2, 4, 4\]"):
        parallel.compose(whole[:, :4])
    with pytest.raises(ValueError, match=r"state: expected shape \[..., 6, 4\], got \[2, 5, 4\]"):
        parallel.merge(torch.zeros(2, 5, 4), whole)
    with pytest.raises(ValueError, match=r"summary: expected shape \[..., V \+ K, K\], got \[2, 4, 4\]"):
        parallel.merge(torch.zeros(2, 4, 4), whole[:, :4])
    with pytest.raises(ValueError, match="op: expected one of wkv5, wkv6, wkv7, gla, .*, hgrn2, ssd, got 'wkv4'"):
        parallel.summary("wkv4", whole)
    with pytest.raises(TypeError, match="inputs: expected q, k, v, g of gla, got 1 of them"):
        parallel.summary("gla", whole)
    case = derived_cases.make("kda", "raw bias norm")
    for option in ("initial_state", "output_final_state", "cu_seqlens"):  # which summaries have not
        with pytest.raises(TypeError, match=rf"summary\(\) got an unexpected keyword argument '{option}'"):
            parallel.summary("kda", *case.inputs.values(), **case.parameters, **case.options, **{option: 3})
