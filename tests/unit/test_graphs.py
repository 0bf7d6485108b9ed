"""Steps from graphs, on a CPU that repeats what was captured, against the same steps without: all bits."""

import contextlib
import copy
import ctypes
import doctest
import gc
import inspect
import sys
import types
import weakref

import fake_graphs
import nn_cases
import pytest
import torch
from stub_driver import in_fork
from torch import nn
from torch.nn.modules import module as of_modules
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.kernels import signatures, stats
from rwkv_jit.nn import graphs, language_model, node

FOREACH, FUSED = {"foreach": True, "capturable": True}, {"fused": True}
RATES = [ctypes.c_float(0.01 / (1 + 0.1 * i)).value for i in range(60)]


REAL = graphs.Graph


class Graph(fake_graphs.TapeGraph):
    """Counts its captures and replays."""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """A CPU has graphs, and its optimizers can be captured."""
    monkeypatch.setattr(graphs, "devices", {"cpu"})
    monkeypatch.setattr(graphs, "Graph", Graph)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])
    monkeypatch.setattr(stats, "_said", set())
    Graph.captured = Graph.replayed = 0


def make(name="RWKV7", dtype=torch.float32, **more):
    return nn_cases.make(dtype, name=name, **{"layers": 2, **more})


def texts(model, number, shape=(2, 5)):
    tokens = nn_cases.make_tokens(model, shape[0], shape[1] + 1, seed=number)
    return tokens[:, :-1], tokens[:, 1:]


class Plain:
    """The same step, written down."""

    def __init__(self, model, optimizer, *, max_norm=None, accumulate=1, autocast=None, loss=None):
        self.__dict__.update(locals(), turn=0, norm=None)

    def __call__(self, *inputs, **options):
        self.turn += 1
        with torch.autocast("cpu", self.autocast, self.autocast is not None, cache_enabled=False):
            loss = (self.loss or self.model.loss)(*inputs, **options)
        (loss / self.accumulate).backward()
        if self.turn % self.accumulate == 0:
            if self.max_norm is not None:
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def train(kind, steps, *, optimizer=FUSED, event=None, shapes=((2, 5),), make_optimizer=None, rates=RATES, **options):
    """Losses, norms, and all parameters after some steps; an event of (step, model, optimizer) may come before each."""
    model = make()
    make_it = make_optimizer or (
        lambda model: torch.optim.AdamW(model.param_groups(lr=1, weight_decay=0.1), **optimizer)
    )
    made = make_it(model)
    options = {name: x(model) if name == "loss" else x for name, x in options.items()}
    step, found = kind(model, made, **options), []
    for number in range(steps):
        for group in made.param_groups if rates else ():
            group["lr"] = rates[number]
        if event is not None:
            event(number, model, made)
        for turn in range(options.get("accumulate", 1)):
            found.append(step(*texts(model, 10 * number + turn, shapes[number % len(shapes)])))
        found += [] if step.norm is None else [step.norm]
    states = [x for own in made.state.values() for x in own.values() if isinstance(x, torch.Tensor)]
    return [*found, *(x.detach() for x in model.parameters()), *states]


def same(*arguments, **options):
    """Train both ways, with the same bits; nothing that a step returned has changed since."""
    want = train(Plain, *arguments, **options)
    found = train(rwkv_jit.nn.graphed_step, *arguments, **options)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, want, strict=True))
    assert len({x.item() for x in found if not x.dim()}) > 3
    return Graph.captured, Graph.replayed


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [FOREACH, FUSED], ids=["foreach", "fused"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fifty_steps_have_the_bits_of_those_without_graphs(accumulate, optimizer):
    """Where it is not fused, a graph holds for as long as the rate stays: here 25 steps."""
    is_fused = optimizer == FUSED
    rates = RATES if is_fused else [RATES[i // 25] for i in range(50)]
    counts = same(50, optimizer=optimizer, max_norm=0.5, accumulate=accumulate, rates=rates)
    if is_fused:
        assert counts == ((1, 48) if accumulate == 1 else (3, 47 + 46 + 46))
    else:
        assert counts == ((2, 47) if accumulate == 1 else (6, 131))


def test_a_fused_optimizer_has_rates_of_float32_in_every_step(monkeypatch):
    rates = [0.01 / (1 + 0.1 * i) for i in range(20)]
    found = train(rwkv_jit.nn.graphed_step, 20, optimizer=FUSED, rates=rates)
    monkeypatch.setattr(graphs, "devices", set())
    want = train(rwkv_jit.nn.graphed_step, 20, optimizer=FUSED, rates=rates)
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_are_tied(accumulate):
    def make_it(model):
        model.head.weight = model.emb.weight
        return torch.optim.AdamW(model.parameters(), **FUSED)

    assert same(8, make_optimizer=make_it, accumulate=accumulate) == ((1, 6) if accumulate == 1 else (2, 5 + 4))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_and_no_clipping(kind):
    assert same(8, make_optimizer=lambda model: kind(model.parameters(), weight_decay=0.01, amsgrad=True, **FUSED)) == (
        1,
        6,
    )


def test_other_optimizers_are_captured_where_numbers_stay():
    def make_it(model):
        return torch.optim.RMSprop(model.parameters(), foreach=False, capturable=False)

    same(5, make_optimizer=make_it)
    assert Graph.captured == 0


def test_autocast():
    assert same(6, autocast=torch.bfloat16, max_norm=1.0) == (1, 4)


def test_a_loss_of_tensors_and_numbers():
    def of(model):
        return lambda tokens, targets: model.loss(tokens, targets, l2_wrap=0.5) * 2

    assert same(5, loss=of) == (1, 3)


def test_options_are_part_of_the_call():
    model = make()
    step = rwkv_jit.nn.graphed_step(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0, **FOREACH))
    given = texts(model, 0)
    found = [step(*given, l2_wrap=x) for x in (0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5)]
    assert Graph.captured == 2
    assert len({x.item() for x in found}) == 1  # l2_wrap changes gradients alone


def test_every_shape_has_a_graph():
    assert same(12, shapes=((2, 5), (1, 3), (2, 4)), max_norm=1.0)[0] == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_shapes_change_within_an_update(accumulate):
    captured, replayed = same(14, shapes=((2, 5), (1, 3), (1, 3)), accumulate=accumulate)
    assert captured == 2 * accumulate
    assert replayed >= 8


REPLACED = {
    "a matrix": lambda norm, linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach().clone())),
    "a number": lambda norm, linear: setattr(linear, "bias", nn.Parameter(linear.bias.detach().clone())),
    "a buffer of a number": lambda norm, linear: setattr(norm, "num_batches_tracked", norm.num_batches_tracked.clone()),
    "a buffer": lambda norm, linear: setattr(norm, "running_mean", norm.running_mean.clone()),
    "none": lambda norm, linear: setattr(linear, "bias", None),
    "another name": lambda norm, linear: linear.register_parameter("more", nn.Parameter(torch.ones(1))),
    "memory": lambda norm, linear: setattr(linear.weight, "data", linear.weight.data.clone()),
    "a setting": lambda norm, linear: setattr(norm, "momentum", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_what_has_equal_values_is_told_apart(name):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    held = graphs.Held(model)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.add_(1)
    assert held.is_same(model)
    assert graphs.Held.of(model, held) is held
    REPLACED[name](*model)
    assert not held.is_same(model)
    assert graphs.Held.of(model, held) is not held


def test_first_calls_as_nodes_change_nothing(monkeypatch):
    monkeypatch.setattr(node, "devices", {"cpu"})
    model = make()
    held = graphs.Held(model)
    model(texts(model, 0)[0])
    assert held.is_same(model)


def test_there_are_at_most_so_many_graphs(caplog, monkeypatch):
    calls = graphs.Calls("these", most=2)
    x = torch.ones(2)
    for turn in range(4):
        for key in range(3):
            found = calls.run(key, lambda own, key=key: [own + key], [x * turn])
            assert (found is None) == (turn == 0 or (turn > 1 and key == 0)), (turn, key)
            assert found is None or torch.equal(found[0], x * turn + key)
    assert list(calls.graphs) == [1, 2]
    assert [x for x in caplog.messages if "more than 2 kinds" in x]


def at(when, do):
    return lambda number, *rest: do(*rest) if number == when else None


def set_group(**values):
    return lambda model, optimizer: [group.update(values) for group in optimizer.param_groups]


def load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own in optimizer.state.values():
        own["exp_avg"].mul_(2)


def replace(model, optimizer):
    for own in optimizer.state.values():
        own["exp_avg"] = own["exp_avg"] * 2


def load_model(model, optimizer):
    model.load_state_dict({name: x * 1.5 for name, x in model.state_dict().items()})


def assign(model, optimizer):
    head = nn.Parameter(model.head.weight.detach() * 1.5)
    group = next(x for x in optimizer.param_groups if any(y is model.head.weight for y in x["params"]))
    group["params"] = [head if x is model.head.weight else x for x in group["params"]]
    optimizer.state[head] = optimizer.state.pop(model.head.weight)
    model.head.weight = head


def move(model, optimizer):
    for x in model.parameters():
        x.data = x.data * 1.5


def freeze(model, optimizer):
    model.blocks[0].requires_grad_(False)


def no_dropout(model, optimizer):
    model.eval()


def change(model, optimizer):
    model.blocks[1].ln1.eps = 0.1


def regroup(model, optimizer):
    first, *_, last = optimizer.param_groups
    last["params"] += first["params"]
    first["params"] = []


CHANGES = {
    "weight_decay": set_group(weight_decay=0.3), "betas": set_group(betas=(0.5, 0.6)), "eps": set_group(eps=0.1),
    "maximize": set_group(maximize=True), "states": load, "states in place": replace, "parameters": load_model,
    "another parameter": assign, "memory": move, "frozen": freeze, "eval": no_dropout, "eps of a norm": change,
    "groups": regroup,
}  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_takes_effect(name, accumulate):
    """And graphs of what there is then are captured."""
    captured, replayed = same(9, event=at(5, CHANGES[name]), accumulate=accumulate)
    keeps = name == "parameters"
    assert captured == (1 if keeps else 2) * accumulate
    assert replayed >= (5 if keeps else 4)


def test_a_number_that_changes_in_each_step_is_never_captured():
    def event(number, model, optimizer):
        optimizer.param_groups[-1]["weight_decay"] = 0.1 / (1 + number)

    assert same(8, event=event) == (0, 0)


def test_gradients_of_the_caller_count():
    def event(number, model, optimizer):
        if number in (3, 6):
            model.loss(*texts(model, 99)).backward()

    assert same(9, event=event, max_norm=1.0) == (1, 5)


def test_a_rate_that_is_a_tensor_is_read_where_it_is():
    def event(number, model, optimizer):
        for group in optimizer.param_groups:
            if number == 0:
                group["lr"] = torch.tensor(0.01)
            group["lr"].mul_(0.9)

    assert same(8, rates=None, event=event) == (1, 6)


def test_gradients_are_seen_between_the_calls_of_an_update():
    model = make()
    step = rwkv_jit.nn.graphed_step(model, torch.optim.AdamW(model.parameters(), **FOREACH), accumulate=2)
    for number in range(6):
        step(*texts(model, number))
        step(*texts(model, number))
        assert all(x.grad is None for x in model.parameters())
    before = [x._version for x in model.parameters()]
    step(*texts(model, 7))
    found = [x.grad.clone() for x in model.parameters()]
    assert Graph.replayed > 4
    want = torch.autograd.grad(model.loss(*texts(model, 7)) / 2, [*model.parameters()])
    assert all(map(torch.equal, found, want))
    step(*texts(model, 7))
    assert all(x._version > old for x, old in zip(model.parameters(), before, strict=True))


def hooked(model, optimizer):
    model.blocks[0].att.key.register_forward_hook(lambda module, given, y: y * 1.1)


def hooked_parameter(model, optimizer):
    model.head.weight.register_hook(lambda grad: grad * 1.1)


def hooked_accumulation(model, optimizer):
    model.head.weight.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", x.grad * 1.1))


def hooked_optimizer(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: [x.data.mul_(0.99) for x in model.parameters()] and None)


def scaled(model, optimizer):
    optimizer.grad_scale = None


def unoptimized(model, optimizer):
    optimizer.param_groups[-1]["params"].pop()


def not_capturable(model, optimizer):
    set_group(fused=False, capturable=False)(model, optimizer)


OBSTACLES = {
    "Linear has hooks": hooked, "a parameter has hooks": hooked_parameter, "AdamW has hooks": hooked_optimizer,
    "a parameter has hooks ": hooked_accumulation, "a GradScaler has changed AdamW": scaled,
    "AdamW has not the model's parameters": unoptimized, "AdamW is neither capturable nor fused": not_capturable,
}  # fmt: skip


@pytest.mark.parametrize("when", [0, 5])
@pytest.mark.parametrize("why", OBSTACLES)
def test_what_no_graph_can_hold_runs_without_and_says_why_once(why, when, caplog):
    counts = same(9, event=at(when, OBSTACLES[why]))
    assert counts == ((0, 0) if when == 0 else (1, 3))
    assert caplog.messages.count(f"graphed_step runs without CUDA graphs: {why.strip()}") == 1


def test_global_hooks(caplog):
    removed = []

    def event(number, model, optimizer):
        if number == 4:
            removed.append(of_modules.register_module_forward_hook(lambda module, given, y: None))
        if number == 6:
            removed.pop().remove()

    assert same(10, event=event) == (2, 5)
    assert [x for x in caplog.messages if "there are global hooks" in x]


def test_a_loss_that_waits_for_the_gpu_runs_without(caplog):
    def of(model):
        return lambda *given: model.loss(*given) * (2 if model.loss(*given).item() > 0 else 1)

    assert same(6, loss=of, max_norm=1.0) == (0, 0)
    said = (
        "graphed_step runs without CUDA graphs: it cannot be captured: operation not permitted when stream is capturing"
    )
    assert [x for x in caplog.messages if "without" in x] == [said]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_backward_that_waits_for_the_gpu_leaves_everything_as_it_was(accumulate):
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (2 if grad.item() > 0 else 1)

    assert same(6, loss=lambda model: lambda *given: Waits.apply(model.loss(*given)), accumulate=accumulate) == (0, 0)


def test_modes_and_inputs_that_no_graph_holds(caplog):
    model = make()
    step = rwkv_jit.nn.graphed_step(model, torch.optim.AdamW(model.parameters(), **FOREACH))
    plain = [step(*texts(model, 0)) for _ in range(4)]
    assert Graph.replayed == 2
    with FlopCounterMode(display=False):
        plain.append(step(*texts(model, 0)))
    state = nn_cases.make_state(model, 2)
    step(*texts(model, 0), state=state)
    assert state[0].wkv.grad is not None
    for _ in range(4):
        step(*texts(model, 0), state=[type(x)(*(y.detach() for y in x)) for x in state])
    assert Graph.replayed == 2 + 3
    assert len({x.item() for x in plain}) == 5
    said = [x.rpartition(": ")[2] for x in caplog.messages if "without CUDA graphs" in x]
    assert said == ["a mode, a trace or a compiler looks on", "expected inputs on cpu without gradients"]


def test_wrapped_models_run_without(caplog):
    class DistributedDataParallel(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    model = DistributedDataParallel(make())
    step = rwkv_jit.nn.graphed_step(
        model, torch.optim.AdamW(model.parameters(), **FOREACH), loss=lambda *given: model.model.loss(*given)
    )
    for number in range(4):
        step(*texts(model.model, number))
    assert not Graph.captured
    assert "DistributedDataParallel talks to other processes" in caplog.text


def test_a_model_elsewhere_runs_without(monkeypatch, caplog):
    monkeypatch.setattr(graphs, "devices", {"cuda"})
    assert same(4, optimizer={"foreach": True}) == (0, 0)
    assert "the model is not on one GPU" in caplog.text


def test_checks_of_values_run_without(monkeypatch):
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    assert same(4) == (0, 0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": 1}, "model: expected a torch.nn.Module, got int"),
        ({"optimizer": 1}, "optimizer: expected a torch.optim.Optimizer, got int"),
        ({"accumulate": 0}, "accumulate: expected at least 1, got 0"),
        ({"max_norm": "1"}, "max_norm: expected a finite number, got '1'"),
        ({"autocast": "bf16"}, "autocast: expected a torch.dtype, got 'bf16'"),
        ({"model": nn.Linear(1, 1)}, "loss: expected a function, as Linear has no method loss"),
    ],
)
def test_wrong_arguments(options, error):
    model = make()
    given = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), **options}
    with pytest.raises((TypeError, ValueError), match=error):
        rwkv_jit.nn.graphed_step(given.pop("model"), given.pop("optimizer"), **given)


# ---- decoding ----------------------------------------------------------------------------------------------------


def decoded(monkeypatch, has_graphs, steps=7, event=None, name="RWKV7", slots=None, dtype=torch.float32, pool=None):
    """Logits of some steps, and the states behind them."""
    monkeypatch.setattr(graphs, "devices", {"cpu"} if has_graphs else set())
    model = make(name, dtype)
    pool = model.new_pool(4, reserved=1) if pool is None else pool(model)
    pool.wkv.copy_(torch.randn(pool.wkv.shape, generator=torch.Generator().manual_seed(3)))
    found = []
    for number in range(steps):
        if event is not None:
            event(number, model)
        tokens = nn_cases.make_tokens(model, 2, seed=number)
        found.append(model.step(tokens, pool, slots(number) if slots else None))
    return [*found, *(pool[name].clone() for name in model._State._fields)]


def same_decoded(monkeypatch, **options):
    want = decoded(monkeypatch, False, **options)
    assert not Graph.captured
    found = decoded(monkeypatch, True, **options)
    assert all(map(torch.equal, found, want))
    return Graph.captured, Graph.replayed


@pytest.mark.parametrize("slots", [False, True], ids=["in order", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["RWKV5", "RWKV6", "RWKV7"])
def test_steps_of_decoding_have_the_bits_of_those_without_graphs(name, dtype, slots, monkeypatch):
    def of(number):
        return torch.tensor([[1, 2], [3, 1], [0, 2]][number % 3])

    assert same_decoded(monkeypatch, name=name, dtype=dtype, slots=of if slots else None) == (1, 6)


def test_slots_are_checked_before_a_replay(monkeypatch):
    def of(number):
        return [1, 4] if number == 5 else [1, 2]

    with pytest.raises(ValueError, match=r"slots: expected slots below 4, or up to 0 for none; got \[4\]"):
        decoded(monkeypatch, True, slots=of)
    assert Graph.replayed == 4


def once(when, do):
    return lambda number, model: do(model) if number == when else None


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scales = inner, [1.5]

    def forward(self, x):
        return self.inner(x) * self.scales[0]


def adapt(model):
    model.blocks[0].att.key = Adapter(model.blocks[0].att.key)


def put_forward(model):
    key = model.blocks[0].att.key
    key.forward = lambda x: 2 * nn.functional.linear(x, key.weight)


DECODING_CHANGES = {
    "in place": (lambda model: [x.data.mul_(1.5) for x in model.parameters()], 1, 6),
    "memory": (lambda model: [setattr(x, "data", x.data * 1.5) for x in model.parameters()], 2, 5),
    "a parameter": (lambda model: setattr(model.head, "weight", nn.Parameter(model.head.weight * 2)), 2, 5),
    "an adapter": (adapt, 2, 5),
    "a hook": (lambda model: model.head.register_forward_hook(lambda module, given, y: y * 2), 1, 3),
    "a forward": (put_forward, 2, 5),
    "eps": (lambda model: setattr(model.blocks[0].ln1, "eps", 0.1), 2, 5),
    "eval": (lambda model: model.eval(), 2, 5),
    "assigned": (lambda model: model.load_state_dict(make().state_dict(), assign=True), 2, 5),
}


@pytest.mark.parametrize("name", DECODING_CHANGES)
def test_what_changes_between_steps_of_decoding_takes_effect(name, monkeypatch):
    do, captured, replayed = DECODING_CHANGES[name]
    assert same_decoded(monkeypatch, event=once(4, do)) == (captured, replayed)


def test_a_list_in_an_adapter_takes_effect(monkeypatch):
    def event(number, model):
        if number == 0:
            adapt(model)
        if number == 4:
            model.blocks[0].att.key.scales[0] = 3.0

    assert same_decoded(monkeypatch, event=event) == (2, 5)


def test_a_layer_that_waits_for_the_gpu_is_never_captured(monkeypatch, caplog):
    """It comes first, as this capture has done what came before it."""

    class Waits(Adapter):
        weight = property(lambda self: self.inner.weight)

        def forward(self, x):
            return self.inner(x) * (2 if x.sum().item() > 0 else 1)

    def event(number, model):
        if number == 0:
            model.emb = Waits(model.emb)

    assert same_decoded(monkeypatch, event=event) == (0, 0)
    assert [x for x in caplog.messages if "decoding runs without CUDA graphs: it cannot be captured" in x]


def test_pools_and_batches_have_graphs_also_where_a_pool_lay_that_is_gone():
    model = make()
    found = []
    for _ in range(2):
        for slots in (2, 3):
            pool = model.new_pool(slots)
            for number in range(3):
                tokens = nn_cases.make_tokens(model, slots, seed=number)
                found.append(model.step(tokens, pool))
            del pool
            gc.collect()
    assert Graph.captured >= 2
    assert all(map(torch.equal, found[:6], found[6:]))


def test_a_model_that_is_gone_leaves_nothing():
    model, tokens = make(), torch.tensor([[1, 2]])
    gc.collect()
    gc.disable()
    try:
        model.generate(tokens, 5)
        assert Graph.captured
        gone, weight = weakref.ref(model), weakref.ref(model.emb.weight)
        del model
        assert gone() is None
        assert weight() is None
    finally:
        gc.enable()


def test_modes_autocast_and_inference_mode_of_decoding():
    model = make()
    pool = model.new_pool(2)
    tokens = nn_cases.make_tokens(model, 2)
    with torch.inference_mode():
        for _ in range(3):
            model.step(tokens, pool)
    assert (Graph.captured, Graph.replayed) == (1, 2)
    model.step(tokens, pool)
    assert Graph.replayed == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert model.step(tokens, pool).dtype == torch.bfloat16
    with FlopCounterMode(display=False):
        model.step(tokens, pool)
    assert (Graph.captured, Graph.replayed) == (1, 3)


READ = {
    "in order": (lambda number: {"slots": None}, 1),
    "slots": (lambda number: {"slots": [[1, 2], [3, 1], [0, 2]][number % 3]}, 1),
    "a row without a slot": (lambda number: {"slots": [[-1, 2], [3, 1]][number % 2]}, 1),
    "packed": (lambda number: {"cu_seqlens": torch.tensor([0, 3, 10])}, 0),
    "lengths": (lambda number: {"length": [3, 4, 5, 4, 3, 5][number]}, 3),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["RWKV5", "RWKV6", "RWKV7"])
def test_prompts_have_the_bits_of_those_without_graphs(kind, name, monkeypatch):
    of, captured = READ[name]

    def read(is_graphed):
        monkeypatch.setattr(graphs, "devices", {"cpu"} if is_graphed else set())
        model, found = make(kind), []
        pool = model.new_pool(4)
        for number in range(6):
            given = of(number)
            tokens = nn_cases.make_tokens(model, 2, given.pop("length", 5), seed=number)
            if "cu_seqlens" in given:
                tokens = tokens.view(1, 10)
            found.append(model.prefill(tokens, pool, **given))
        return [*found, *(pool[x] for x in model._State._fields)]

    want = read(False)
    assert not Graph.captured
    assert all(map(torch.equal, read(True), want))
    assert Graph.captured == captured
    assert Graph.replayed == {"lengths": 3, "packed": 0, "a row without a slot": 2}.get(name, 5)


def test_long_prompts_have_no_graphs_and_others_few(monkeypatch, caplog):
    model = make()
    pool = model.new_pool(1)
    for _ in range(3):
        model.prefill(nn_cases.make_tokens(model, 1, language_model.MOST_READ + 1), pool)
    assert not Graph.captured
    for tokens in range(1, 40):
        for _ in range(2):
            model.prefill(nn_cases.make_tokens(model, 1, tokens), pool)
    assert Graph.captured == 32
    assert len(model._decoder.prompts.graphs) == 8
    assert [x for x in caplog.messages if "reading prompts: more than 8 kinds of calls" in x]
    model.head.register_forward_hook(lambda module, given, y: y * 2)
    want = model.prefill(nn_cases.make_tokens(model, 1, 5), copy.deepcopy(pool))
    assert not model._decoder.prompts.graphs
    assert torch.equal(model.prefill(nn_cases.make_tokens(model, 1, 5), copy.deepcopy(pool)), want)


def test_copies_of_a_model_and_forks_begin_anew():
    model = make()
    pool = model.new_pool(2)
    tokens = nn_cases.make_tokens(model, 2)
    for _ in range(3):
        model.step(tokens, pool)
    kept = model._decoder.steps.graphs
    assert len(kept) == 1
    other = copy.deepcopy(model)
    assert not other._decoder.steps.graphs
    with torch.no_grad():
        other.head.weight.mul_(2)
    assert not torch.equal(other.step(tokens, copy.deepcopy(pool)), model.step(tokens, copy.deepcopy(pool)))

    def in_child():
        assert not model._decoder.steps.graphs

    assert in_fork(in_child) == "done"
    assert len(model._decoder.steps.graphs) == 1
    signatures.forget()
    assert not model._decoder.steps.graphs


# ---- generate ----------------------------------------------------------------------------------------------------


def by_loop(model, prompts, count, generator=None, temperature=1.0, top_p=1.0, top_k=None, stop=(), **penalties):
    """The same, each sequence by itself but for the draw, and each token by a whole forward."""
    texts = [list(x) for x in prompts]
    starts = [len(x) for x in texts]
    done = [None] * len(texts)
    for _ in range(count):
        rows = []
        for text, start in zip(texts, starts, strict=True):
            logits = model(torch.tensor([text]))[0, -1].detach().float()
            for token in range(len(logits)):
                if token in text and "repetition_penalty" in penalties:
                    factor = penalties["repetition_penalty"]
                    logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
                written = text[start:].count(token)
                logits[token] -= penalties.get("frequency_penalty", 0) * written
                logits[token] -= penalties.get("presence_penalty", 0) * (written > 0)
            rows.append(logits)
        logits = torch.stack(rows)
        if temperature == 0:
            drawn = logits.argmax(-1).tolist()
        elif top_k is None and top_p == 1:
            chances = torch.softmax(logits / temperature, -1)
            drawn = torch.multinomial(chances, 1, generator=generator).flatten().tolist()
        else:
            chances, order = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
            if top_k is not None:
                chances[:, top_k:] = 0
                chances /= chances.sum(-1, keepdim=True)
                chances, order = chances[:, :top_k], order[:, :top_k]
            kept = torch.where(chances.cumsum(-1) - chances < top_p, chances, 0.0)
            drawn = order.gather(-1, torch.multinomial(kept, 1, generator=generator)).flatten().tolist()
        for row, token in enumerate(drawn):
            token = token if done[row] is None else done[row]
            texts[row].append(token)
            if token in stop:
                done[row] = token
    return [text[start:] for text, start in zip(texts, starts, strict=True)]


OPTIONS = {
    "greedy": {"temperature": 0}, "warm": {"temperature": 1.7}, "drawn": {"temperature": 1.2, "top_p": 0.8},
    "top_k": {"top_k": 4, "top_p": 0.6}, "stop": {"stop": [3, 5]},
    "repetition": {"temperature": 0, "repetition_penalty": 1.7},
    "presence": {"temperature": 0, "presence_penalty": 0.6}, "frequency": {"temperature": 0, "frequency_penalty": 0.4},
    "all": {"top_k": 8, "stop": [2], "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_generated_tokens_are_those_of_a_plain_loop(options, has_graphs, monkeypatch):
    monkeypatch.setattr(graphs, "devices", {"cpu"} if has_graphs else set())
    model, options = make(dtype=torch.float64), OPTIONS[options]
    prompts = [[1, 4, 2], [7], [3, 3, 9, 1, 0]]
    want = by_loop(model, prompts, 12, torch.Generator().manual_seed(2), **options)
    more = {**options, "generator": torch.Generator().manual_seed(2)}
    streamed = []
    found = model.generate([torch.tensor(x) for x in prompts], 12, stream=streamed.append, **more)
    assert found.tolist() == want
    assert torch.equal(torch.stack(streamed, 1), found[:, : len(streamed)])
    assert len({tuple(x) for x in want}) == 3
    assert Graph.replayed == (len(streamed) - 2 if has_graphs else 0)
    padded = nn.utils.rnn.pad_sequence([torch.tensor(x) for x in prompts], True, padding_value=5).int()
    more["generator"] = torch.Generator().manual_seed(2)
    found = model.generate(padded, 12, lengths=[3, 1, 5], **more)
    assert (found.tolist(), found.dtype) == (want, torch.int32)
    more["generator"] = torch.Generator().manual_seed(2)
    found = torch.stack([*model.generate_stream([torch.tensor(x) for x in prompts], 12, **more)], 1)
    assert found.tolist() == [row[: found.shape[1]] for row in want]


@pytest.mark.parametrize("name", ["RWKV5", "RWKV6"])
def test_other_families_continue_prompts_of_different_lengths(name):
    model, prompts = make(name, torch.float64), [[1, 4, 2], [7, 2], [3]]
    found = model.generate([torch.tensor(x) for x in prompts], 6, temperature=0)
    assert found.tolist() == by_loop(model, prompts, 6, temperature=0)


def test_all_sequences_that_have_stopped_end_it():
    model = make()
    steps = []
    found = model.generate(torch.tensor([[1, 2], [3, 4]]), 40, stop=[*range(11)], stream=steps.append)
    assert len(steps) == 1
    assert torch.equal(found, steps[0].unsqueeze(1).expand(2, 40))
    assert len([*model.generate_stream(torch.tensor([[1, 2]]), 40, stop=range(11))]) == 1
    assert torch.equal(found, found[:, :1].expand(2, 40))
    assert model.generate(torch.tensor([[1, 2]]), 40, stop=torch.arange(11)).unique().numel() == 1


def test_a_stream_may_change_the_model():
    model = make(dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3]])
    first = [*model.generate_stream(tokens, 9, temperature=0)]
    stream = model.generate_stream(tokens, 9, temperature=0)
    again = [next(stream) for _ in range(5)]
    assert Graph.replayed
    assert torch.is_grad_enabled()
    model.head.register_forward_hook(lambda module, given, y: -y)
    again += [*stream]
    assert torch.equal(torch.stack(first[:5]), torch.stack(again[:5]))
    assert not torch.equal(torch.stack(first), torch.stack(again))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected more than 0, got 0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty: expected a finite number, got nan"),
        ({"stop": ["x"]}, "stop: expected an int or several, got \\['x'\\]"),
        ({"lengths": [1]}, r"lengths: expected 2 of up to 3, got \[1\]"),
        ({"lengths": [1, 4]}, r"lengths: expected 2 of up to 3, got \[1, 4\]"),
        ({"lengths": [0, 1]}, "tokens: expected at least one token in every prompt, got none"),
        (
            {"tokens": [torch.ones(1, dtype=torch.int64), torch.ones(2)]},
            r"tokens: expected prompts \[tokens\] of int64",
        ),
    ],
)
def test_wrong_options_of_generate(options, message):
    given = {"tokens": torch.ones(2, 3, dtype=torch.int64), "count": 2, **options}
    with pytest.raises((TypeError, ValueError), match=message):
        make().generate(**given)
    with pytest.raises((TypeError, ValueError), match=message):
        make().generate_stream(**given)


# ---- steps of other layers ---------------------------------------------------------------------------------------


LAYERS = {
    "KimiDeltaAttention": (2, 4, 8, 8), "GatedDeltaNet": (2, 4, 8, 8), "Mamba2": (2, 16, 8),
    "GatedLinearAttention": (2,), "RWKV4TimeMix": (0, 2), "RWKV5TimeMix": (0, 2, 8), "RWKV6TimeMix": (0, 2, 8),
}  # fmt: skip


class Model(nn.Module):
    """Two layers, each of which returns its state; a token is [B, 1]."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layers = nn.ModuleList(getattr(rwkv_jit.nn, name)(16, *LAYERS[name]) for _ in range(2))
        with torch.no_grad():
            for x in self.parameters():
                x.add_(0.05 * torch.randn_like(x))

    def forward(self, tokens, state=(None, None)):
        x, after = self.emb(tokens), []
        for layer, before in zip(self.layers, state, strict=True):
            y, own = layer(x, before)
            x = x + y
            after.append(own)
        return self.head(x[:, -1]), after


def by_calls(model, prompt, tokens, event=None):
    found, (_, state) = [], model(prompt)
    for number, token in enumerate(tokens):
        if event is not None:
            event(number, model)
        logits, state = model(token, state)
        found.append(logits)
    return [x.detach() for x in (*found, *torch.utils._pytree.tree_leaves(state))]


@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_layers_that_return_states_have_the_bits_of_their_calls(name):
    model = Model(name)
    prompt, *tokens = torch.randint(11, (9, 3, 1), generator=torch.Generator().manual_seed(1))
    prompt = prompt.expand(3, 4)
    want = by_calls(model, prompt, tokens)
    decode = rwkv_jit.nn.graphed_decode(model, model(prompt)[1])
    found = [decode(token) for token in tokens]
    assert (Graph.captured, Graph.replayed) == (1, 7)
    leaves = torch.utils._pytree.tree_leaves(decode.state)
    assert all(map(torch.equal, [*found, *leaves], want))
    assert len({x.sum().item() for x in found}) == 8
    decode.state = model(prompt)[1]  # the same again, from the same graph
    assert all(map(torch.equal, [decode(token) for token in tokens], want))
    assert Graph.captured == 1
    assert [x.data_ptr() for x in torch.utils._pytree.tree_leaves(decode.state)] == [x.data_ptr() for x in leaves]


@pytest.mark.parametrize("name", LAYERS)
def test_a_known_step_of_layers_reads_nothing_on_the_host(name, on_gpu, monkeypatch):
    """A capture ends where the host waits for a value."""
    layer, x = getattr(rwkv_jit.nn, name)(16, *LAYERS[name]), torch.randn(2, 1, 16)
    read = []
    with torch.no_grad():
        _, state = layer(torch.randn(2, 9, 16))
        layer(x, state)
        on_gpu.take()
        for method in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            monkeypatch.setattr(torch.Tensor, method, lambda *_, method=method: read.append(method))
        layer(x, state)
    assert on_gpu.take()
    assert read == []


def test_a_step_may_return_what_was_in_its_state():
    """As one that shifts its last tokens by one place: each is read before another one is written there."""

    def step(x, state):
        first, second = state
        return second, (x, first)

    decode = rwkv_jit.nn.graphed_decode(nn.Linear(1, 1), (torch.zeros(1), torch.zeros(1)), step)
    found = [decode(torch.full((1,), float(i))) for i in range(1, 7)]
    assert [x.item() for x in found] == [0, 0, 1, 2, 3, 4]
    assert [x.item() for x in decode.state] == [6, 5]
    assert Graph.captured == 1
    decode.state = decode.state[::-1]
    assert [x.item() for x in decode.state] == [5, 6]


def test_what_changes_between_steps_of_layers_takes_effect():
    def event(number, model):
        if number == 3:
            model.head.weight = nn.Parameter(model.head.weight * 2)
        if number == 6:
            model.emb.register_forward_hook(lambda module, given, y: y * 2)

    prompt, *tokens = torch.randint(11, (10, 3, 1), generator=torch.Generator().manual_seed(1))
    want = by_calls(Model("Mamba2"), prompt, tokens, event)
    model = Model("Mamba2")
    decode, found = rwkv_jit.nn.graphed_decode(model, model(prompt)[1], lambda *given: model(*given)), []
    for number, token in enumerate(tokens):
        event(number, model)
        found.append(decode(token))
    assert all(map(torch.equal, found, want))
    assert (Graph.captured, Graph.replayed) == (2, 4)


def test_examples_of_graphed_decode_are_right():
    names = {"torch": torch, "rwkv_jit": rwkv_jit}
    text = inspect.getdoc(rwkv_jit.nn.graphed_decode).replace('"cuda"', '"cpu"')
    example = doctest.DocTestParser().get_doctest(text, names, "graphed_decode", None, None)
    assert len(example.examples) == 5
    assert doctest.DocTestRunner().run(example).failed == 0
    assert (Graph.captured, Graph.replayed) == (1, 4)


def test_wrong_states_and_results_of_a_step():
    layer = rwkv_jit.nn.LinearAttention(16, 2)
    y, state = layer(torch.ones(2, 3, 16))
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got function"):
        rwkv_jit.nn.graphed_decode(lambda x, state: (x, state), state)
    with pytest.raises(TypeError, match="state: expected a torch.Tensor, got int"):
        rwkv_jit.nn.graphed_decode(layer, [state, 1])
    decode = rwkv_jit.nn.graphed_decode(layer, state)
    with pytest.raises(
        ValueError, match=r"state: expected tensors of shapes \[\[2, 2, 8, 8\]\], got \[\[1, 2, 8, 8\]\]"
    ):
        decode.state = state[:1]
    with pytest.raises(TypeError, match="state: expected a torch.Tensor, got NoneType"):
        decode.state = None
    with pytest.raises(TypeError, match="inputs: expected a torch.Tensor, got int"):
        decode(1)
    with pytest.raises(TypeError, match="the first result: expected a torch.Tensor, got NoneType"):
        rwkv_jit.nn.graphed_decode(layer, state, lambda x, state: (None, state))(y)


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_collects_no_garbage(fails, is_enabled, monkeypatch):
    """A graph that is destroyed with it would end the capture."""
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=None))
    seen = []

    def function():
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("a capture that fails")

    raised = pytest.raises(RuntimeError, match="a capture that fails") if fails else contextlib.nullcontext()
    try:
        if not is_enabled:
            gc.disable()
        with raised:
            REAL(function, torch.device("cpu"), None, None)
        assert (seen, gc.isenabled()) == ([False], is_enabled)
    finally:
        gc.enable()
