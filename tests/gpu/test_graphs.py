"""Steps of training and of decoding from CUDA graphs, beside the same steps without: all bits."""

import ctypes
import gc
import re

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rwkv_jit
from rwkv_jit.kernels import stats
from rwkv_jit.nn import graphs

pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record
OPTIMIZERS = {"fused": {"fused": True}, "foreach": {"capturable": True}}


@pytest.fixture
def counts(monkeypatch):
    """How many captures and replays there were."""
    found, make = {"captured": 0, "replayed": 0}, graphs.Graph.__init__

    def captured(self, *arguments):
        make(self, *arguments)
        found["captured"] += 1
        replay = self.replay

        def replayed():
            found["replayed"] += 1
            replay()

        self.replay = replayed

    monkeypatch.setattr(graphs.Graph, "__init__", captured)
    monkeypatch.setattr(stats, "_said", set())
    return found


def make(name="RWKV7", dtype=torch.float32, layers=3, seed=0):
    torch.manual_seed(seed)
    model = getattr(rwkv_jit.nn, name)(512, 256, layers, device="cuda", dtype=dtype)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.05 * torch.randn_like(x))
    return model


def texts(number, shape=(2, 65)):
    tokens = torch.randint(512, shape, generator=torch.Generator().manual_seed(number)).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def plain_step(model, optimizer, max_norm, accumulate, autocast, turn, given):
    with torch.autocast("cuda", autocast, autocast is not None, cache_enabled=False):
        loss = model.loss(*given)
    (loss / accumulate).backward()
    if turn == accumulate - 1:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def train(is_graphed, kind, steps, optimizer, accumulate, autocast, shapes=((2, 65),), load_at=None):
    model = make(kind)
    made = torch.optim.AdamW(model.param_groups(lr=1, weight_decay=0.1), betas=(0.9, 0.99), **OPTIMIZERS[optimizer])
    step = rwkv_jit.nn.graphed_step(model, made, max_norm=0.5, accumulate=accumulate, autocast=autocast)
    losses = []
    for number in range(steps):
        for i, group in enumerate(made.param_groups):
            turn_of_rate = number if optimizer == "fused" else number // 25  # else graphs are captured anew
            group["lr"] = ctypes.c_float(1e-3 * (1 + i) / (1 + 0.1 * turn_of_rate)).value
        if number == load_at:
            made.load_state_dict(made.state_dict())
        for turn in range(accumulate):
            given = texts(10 * number + turn, shapes[number % len(shapes)])
            if is_graphed:
                losses.append(step(*given))
            else:
                losses.append(plain_step(model, made, 0.5, accumulate, autocast, turn, given))
    return [torch.stack(losses), *(x.detach() for x in model.parameters())]


def equal(found, want):
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fifty_steps_have_the_bits_of_those_without(op, accumulate, optimizer, autocast, counts):
    options = ("RWKV7", 50, optimizer, accumulate, autocast)
    want = train(False, *options)
    equal(train(True, *options), want)
    assert counts["captured"] == (1 if accumulate == 1 else 3) * (1 if optimizer == "fused" else 2)
    assert counts["replayed"] >= (45 if optimizer == "fused" else 43) * accumulate
    assert len(want[0].unique()) > 40


@pytest.mark.parametrize("kind", ["RWKV5", "RWKV6", "RWKV7"])
def test_shapes_and_loaded_states(op, kind, counts):
    options = (kind, 20, "fused", 1, torch.bfloat16, ((2, 65), (1, 129)), 10)
    equal(train(True, *options), train(False, *options))
    assert counts["captured"] == 4


def test_a_loss_that_waits_runs_without_and_the_gpu_goes_on(op, counts, caplog):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    waiting = rwkv_jit.nn.graphed_step(
        model, optimizer, loss=lambda *x: model.loss(*x) * (1 + 0 * model.emb.weight[0, 0].item())
    )
    stream = torch.cuda.current_stream()
    losses = [waiting(*texts(0)).item() for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert counts == {"captured": 0, "replayed": 0}
    assert torch.cuda.current_stream() == stream
    assert [x for x in caplog.messages if "it cannot be captured" in x]
    assert torch.randn(9, device="cuda").unique().numel() > 1
    step = rwkv_jit.nn.graphed_step(model, optimizer)  # another one can be
    assert [step(*texts(0)).item() for _ in range(5)][-1] < losses[-1]
    assert counts["captured"] == 1


def test_garbage_with_graphs_is_kept_during_a_capture(op, counts):
    x, several, is_enabled = torch.randn(2, 8, device="cuda"), [torch.cuda.CUDAGraph()], gc.isenabled()
    with torch.cuda.graph(several[0]):
        x * 2
    several[0].replay()

    def step(x, state):
        if torch.cuda.is_current_stream_capturing():
            garbage = [several.pop()]
            garbage.append(garbage)
            del garbage
            assert len([[] for _ in range(10_000)]) > 0  # so many begin a collection
        return x * 2, state + 1

    decode = rwkv_jit.nn.graphed_decode(nn.Linear(1, 1, device="cuda"), x[0], step)
    equal([decode(x) for _ in range(4)], [x * 2] * 4)
    assert counts == {"captured": 1, "replayed": 3}
    assert gc.isenabled() == is_enabled


def test_memory_is_about_that_of_steps_without(op, counts):
    def peak(is_graphed):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        train(is_graphed, "RWKV7", 6, "fused", 1, torch.bfloat16, ((8, 1025),))
        return torch.cuda.max_memory_reserved() - before

    want = peak(False)
    assert peak(True) < 2.5 * want  # the first steps run as they are, in memory of their own


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["RWKV5", "RWKV6", "RWKV7"])
def test_decoding_has_the_bits_of_steps_without(op, kind, dtype, counts, monkeypatch):
    model = make(kind, dtype)

    def run():
        pool = model.new_pool(9, reserved=1)
        found = []
        for number in range(8):
            tokens = torch.randint(512, (4,), generator=torch.Generator().manual_seed(number)).cuda()
            slots = torch.tensor([[1, 2, 3, 4], [8, 2, 0, 5], [0, 7, 1, 2]][number % 3], device="cuda")
            found += [model.step(tokens, pool, slots), model.step(tokens, pool)]
        return [*found, *(pool[name].clone() for name in model._State._fields)]

    found = run()
    assert counts == {"captured": 2, "replayed": 14}
    monkeypatch.setattr(graphs, "devices", set())
    equal(found, run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["RWKV5", "RWKV6", "RWKV7"])
def test_prompts_have_the_bits_of_those_without(op, kind, dtype, counts, monkeypatch):
    def read(is_graphed):
        monkeypatch.setattr(graphs, "devices", {"cuda"} if is_graphed else set())
        model, found = make(kind, dtype), []
        pool = model.new_pool(5, reserved=1)
        for number in range(8):
            tokens = torch.randint(512, (2, 100), generator=torch.Generator().manual_seed(number)).cuda()
            found.append(model.prefill(tokens, pool, [[1, 2], [3, 1], [4, 2]][number % 3]))
        found += [model.prefill(tokens[:, :number], pool) for number in (70, 70, 70)]
        return [*found, *(pool[x] for x in model._State._fields)]

    want = read(False)
    assert not counts["captured"]
    equal(read(True), want)
    assert counts == {"captured": 2, "replayed": 9}


def test_parameters_and_hooks_take_effect(op, counts, monkeypatch):
    model = make()

    def run():
        pool, found = model.new_pool(2), []
        tokens = torch.tensor([1, 2], device="cuda")
        for number in range(9):
            if number == 3:
                model.load_state_dict(make(seed=1).state_dict())
            if number == 5:
                for x in model.parameters():
                    x.data = x.data * 1.1
            hook = model.head.register_forward_hook(lambda module, given, y: y * 2) if number == 7 else None
            found.append(model.step(tokens, pool))
            if hook is not None:
                hook.remove()
        model.load_state_dict(make().state_dict())
        return found

    found = run()
    assert counts["replayed"] >= 4
    monkeypatch.setattr(graphs, "devices", set())
    equal(found, run())


@pytest.mark.parametrize("kind", ["RWKV5", "RWKV6", "RWKV7"])
def test_generated_tokens_are_those_without_graphs(op, kind, counts, monkeypatch):
    model = make(kind, torch.bfloat16)
    prompts = [torch.arange(n, device="cuda") for n in (5, 17, 1)]
    options = {"top_k": 20, "top_p": 0.9, "stop": [3], "presence_penalty": 0.3, "repetition_penalty": 1.2}

    def run():
        return model.generate(prompts, 40, generator=torch.Generator("cuda").manual_seed(1), **options)

    found = [run() for _ in range(3)]
    assert counts["captured"] <= 3
    assert counts["replayed"] > 60
    monkeypatch.setattr(graphs, "devices", set())
    want = run()
    assert all(torch.equal(x, want) for x in found)


LAYERS = {
    "KimiDeltaAttention": (4, 8, 64, 64), "GatedDeltaNet": (4, 8, 64, 64), "Mamba2": (8, 64, 32),
    "GatedLinearAttention": (4,), "RWKV4TimeMix": (0, 2), "RWKV5TimeMix": (0, 2), "RWKV6TimeMix": (0, 2),
}  # fmt: skip


def begun(name, dtype):
    """A layer, tokens of three sequences, and the state behind others of them."""
    torch.manual_seed(0)
    layer = getattr(rwkv_jit.nn, name)(256, *LAYERS[name], device="cuda", dtype=dtype)
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.05 * torch.randn_like(x))
        prompt, *inputs = torch.randn(9, 3, 1, 256, device="cuda", dtype=dtype)
        return layer, inputs, layer(prompt)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_layers_that_return_states(op, name, dtype, counts):
    layer, inputs, state = begun(name, dtype)
    with torch.no_grad():
        decode, want = rwkv_jit.nn.graphed_decode(layer, state), []
        for x in inputs:
            y, state = layer(x, state)
            want.append(y)
    found = [decode(x) for x in inputs]
    assert counts == {"captured": 1, "replayed": 7}
    equal([*found, *pytree.tree_leaves(decode.state)], [*want, *pytree.tree_leaves(state)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["KimiDeltaAttention", "GatedDeltaNet", "Mamba2", "GatedLinearAttention"])
def test_steps_over_a_pool(op, name, dtype, counts):
    """As calls with a state, but for rounding; and of the same bits from graphs."""
    layer, inputs, state = begun(name, dtype)
    with torch.no_grad():
        slots = torch.tensor([5, 1, 2], device="cuda")
        pool = [torch.randn(7, *x.shape[1:], device="cuda").to(x.dtype) for x in pytree.tree_leaves(state)]
        for x, own in zip(pool, pytree.tree_leaves(state), strict=True):
            x[slots] = own

        def step(pool, x):
            return layer.step(x.squeeze(1), pool[0] if len(pool) == 1 else tuple(pool), slots)

        other = [x.clone() for x in pool]
        decode = rwkv_jit.nn.graphed_decode(layer, (), lambda x, _: (step(other, x), ()))
        for x in inputs:
            y, state = layer(x, state)
            found = step(pool, x)
            error = (found.float() - y.squeeze(1).float()).norm() / y.float().norm()
            assert error < {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype]
            assert torch.equal(decode(x), found)
        equal(other, pool)
    assert counts == {"captured": 1, "replayed": 7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "launches"), [("KimiDeltaAttention", 5), ("GatedDeltaNet", 6), ("Mamba2", 6)]
)  # fmt: skip
def test_a_step_is_at_most_six_kernels_beside_products(op, name, launches, dtype):
    """As tests/unit counts them, where one op of torch is one kernel."""
    layer, inputs, state = begun(name, dtype)
    slots = torch.tensor([5, 1, 2], device="cuda")
    with torch.no_grad():
        pool = tuple(torch.zeros(7, *x.shape[1:], device="cuda", dtype=x.dtype) for x in state)
        for _ in range(3):
            layer.step(inputs[0].squeeze(1), pool, slots)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layer.step(inputs[0].squeeze(1), pool, slots)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    others = [x for x in names if not re.search("gemm|gemv|nvjet|cutlass|cublas|splitk|memset", x, re.IGNORECASE)]
    assert len(names) > len(others) > 0
    assert len(others) <= launches, "\n".join(others)


def test_streams_wait_for_each_other(op, counts):
    model = make()
    pool, tokens = model.new_pool(2), torch.tensor([1, 2], device="cuda")
    want = [model.step(tokens, pool) for _ in range(12)]
    pool.wkv.zero_(), pool.time_shift.zero_(), pool.channel_shift.zero_()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for number in range(12):
        with torch.cuda.stream(streams[number % 2]):
            found.append(model.step(tokens, pool))
    torch.cuda.synchronize()
    equal(found, want)
