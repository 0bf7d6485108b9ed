"""Layers that run as one node of autograd, against their parts: all bits of results and gradients."""

import collections
import copy
import gc
import subprocess
import sys
import threading
import weakref

import nn_cases
import nn_layer_cases
import numpy
import pytest
import torch
import warm
from stub_driver import in_fork
from torch.utils.checkpoint import checkpoint

import rwkv_jit
from rwkv_jit.call import lists, switches, tape, tensors
from rwkv_jit.nn import node, rwkv7

MORE = {
    "KimiDeltaAttention": lambda **place: rwkv_jit.nn.KimiDeltaAttention(12, 2, 4, 6, 5, conv_width=3, **place),
    "GatedDeltaNet": lambda **place: rwkv_jit.nn.GatedDeltaNet(12, 2, 4, 6, 5, **place),
    "Mamba2": lambda **place: rwkv_jit.nn.Mamba2(12, 6, 5, 7, 2, **place),
    **{f"RWKV{n}Block": lambda n=n, **place: nn_cases.make(name=f"RWKV{n}", **place).blocks[0] for n in (5, 6, 7)},
}
KINDS = [*nn_layer_cases.WITH_STATE, "RWKV7TimeMix", "RWKV7ChannelMix", *MORE]


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    """Layers as nodes, and how many ran."""
    monkeypatch.setattr(node, "devices", ("cpu",))
    monkeypatch.setattr(node, "_shared", {})

    ran, apply = [], tape._apply
    monkeypatch.setattr(tape, "_apply", lambda recorded, *arrays: (ran.append(recorded), apply(recorded, *arrays))[1])
    return ran


def block(dtype=torch.float64):
    return nn_cases.make(dtype).blocks[1]


def inputs(dtype=torch.float64, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 7, 12, generator=make, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]


def both(monkeypatch, use, nodes, count=1, equal=torch.equal):
    """What `use` returns of a layer as its parts and as one node, which ran `count` times."""
    monkeypatch.setattr(node, "devices", ())
    parts = use(block())
    assert not nodes
    monkeypatch.setattr(node, "devices", ("cpu",))
    one = use(block())
    assert len(nodes) == count
    for x, y in zip(parts, one, strict=True):
        assert (x is None) == (y is None)
        assert x is None or equal(x, y)


def trained(layer, given, run=None):
    y, v_first, state = (run or layer)(*given)
    (y * y).sum().backward()
    return [y, v_first, *state, *[x.grad for x in (*layer.parameters(), *given)]]


def frozen(layer):
    for name, x in layer.named_parameters():
        x.requires_grad_("2" in name)
    given = inputs()
    given[0].requires_grad_(False)
    return trained(layer, given)


def with_state(layer):
    given = inputs()
    *_, state = layer(*inputs(seed=1))
    state = type(state)(*[x.detach().requires_grad_() for x in state])
    y, _, after = layer(*given, state)
    nn_cases.weighted([y, *after]).backward()
    return [y, *after, *[x.grad for x in (*layer.parameters(), *given, *state)]]


def some_gradients(layer):
    given = inputs()
    y, v_first, state = layer(*given)
    return torch.autograd.grad((state.wkv * 2).sum(), [given[0], layer.att.key.weight], allow_unused=True)


def twice(layer):
    given = inputs()
    y, *_ = layer(*given)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return [x.grad for x in (*layer.parameters(), *given)]


def with_hooks(layer):
    seen = []
    layer.att.key.weight.register_hook(lambda grad: grad * 2)
    layer.att.r_k.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
    layer.register_forward_hook(lambda module, given, out: (out[0] * 2, *out[1:]))
    return trained(layer, inputs()) + seen


def by_functional_call(layer):
    given, other = inputs(), {name: (x * 2).detach().requires_grad_() for name, x in layer.named_parameters()}
    y, *_ = torch.func.functional_call(layer, other, tuple(given))
    y.sum().backward()
    return [y, *[x.grad for x in other.values()]]


def with_other_memory(layer):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT if x.dim() > 1 else x):
        return trained(layer, inputs())


def offloaded(layer):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return trained(layer, inputs())


@pytest.mark.parametrize(
    ("use", "count"),
    [
        (lambda layer: trained(layer, inputs()), 1), (frozen, 1), (with_state, 2), (some_gradients, 1), (twice, 1),
        (with_hooks, 1), (by_functional_call, 1), (offloaded, 1),

        (lambda layer: trained(layer, inputs(), lambda *x: checkpoint(layer, *x, use_reentrant=False)), 2),
        (lambda layer: trained(layer, inputs(), lambda *x: checkpoint(layer, *x, use_reentrant=True)), 1),
    ],
)  # fmt: skip
def test_a_node_does_what_its_parts_do(use, count, nodes, monkeypatch):
    both(monkeypatch, use, nodes, count)


def in_a_graph(layer):
    given = inputs()
    y, *_ = layer(*given)
    grads = torch.autograd.grad((y * y).sum(), [*given, *layer.parameters()], create_graph=True)
    assert all(x.requires_grad for x in grads)
    return [x.detach() for x in grads]


def without_hooks(layer):
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return trained(layer, inputs())


@pytest.mark.parametrize("use", [in_a_graph, without_hooks])
def test_what_autograd_allows_parts(use, nodes, monkeypatch):
    both(monkeypatch, use, nodes)


def without_gradients(layer):
    with torch.no_grad():
        y, v_first, state = layer(*inputs())
    return [y, v_first, *state]


def hooked(layer):
    layer.att.key.register_forward_hook(lambda module, given, y: y * 2)
    return trained(layer, inputs())


def adapted(layer):
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, torch.nn.Linear(12, 12, dtype=torch.float64)
            torch.nn.init.ones_(self.down.weight)
            torch.nn.init.ones_(self.down.bias)

        def forward(self, x):
            return self.base(x) + self.down(x)

    trained(layer, inputs())
    layer.att.key = Adapter(layer.att.key)
    layer.zero_grad()
    return trained(layer, inputs())


def eps_changed(layer):
    trained(layer, inputs())
    layer.zero_grad()
    layer.ln1.eps = 0.5
    layer.att.ln_x.eps = 0.25
    return trained(layer, inputs())


def of_another_dtype(layer):
    first = trained(layer, inputs())
    layer.float()
    return first[:1] + trained(layer, inputs(torch.float32))[:1]


def with_a_bias(layer):
    """A layer that gets a bias between two calls, then has another in the place of that."""
    found = []
    bias = torch.nn.Parameter(torch.arange(12, dtype=torch.float64))
    for names in ((), ("key", "value"), ("key",), ("value",)):
        for name in ("key", "value"):
            getattr(layer.att, name).bias = bias if name == (names or " ")[0] else None
            if name in names[1:]:
                getattr(layer.att, name).bias = torch.nn.Parameter(bias.detach() * 2)
        layer.zero_grad()
        found += trained(layer, inputs())
    return found


def with_one_part_twice(layer):
    other = copy.deepcopy(layer)
    layer.att.key = layer.att.receptance
    other.att.value = other.att.key
    return trained(layer, inputs()) + trained(other, inputs())


def with_arrays(layer):
    layer.note = numpy.array([1, 2])
    trained(layer, inputs())
    layer.zero_grad()
    layer.note = numpy.array([3, 4])
    return trained(layer, inputs())


def with_a_method(layer):
    """A layer of which one part's method counts its calls, which are no tensors."""
    seen, own = [], layer.att.of_mixed
    layer.att.of_mixed = lambda *given: (seen.append(1.0), own(*given))[1]
    found = [layer(*inputs())[0] for _ in range(2)]
    return [*found, torch.tensor(seen)]


def below_a_mode(layer):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, given=(), named=None):
            found = function(*given, **(named or {}))
            return found * 2 if function is torch.nn.functional.linear else found

    with Mode():
        return trained(layer, inputs())


def at_a_default_device(layer):
    with torch.device("cpu"):
        return trained(layer, inputs())


@pytest.mark.parametrize(
    ("use", "count"),
    [
        (without_gradients, 0), (hooked, 0), (adapted, 1), (eps_changed, 2), (of_another_dtype, 2), (with_a_bias, 4),
        (with_one_part_twice, 0), (with_arrays, 2), (with_a_method, 0), (below_a_mode, 0), (at_a_default_device, 1),
    ],
)  # fmt: skip
def test_changed_layers_do_what_they_should(use, count, nodes, monkeypatch):
    both(monkeypatch, use, nodes, count)


def test_subclasses_run_as_their_parts(nodes):
    class Mine(rwkv7.RWKV7Block):
        pass

    layer = block()
    layer.__class__ = Mine
    trained(layer, inputs())
    assert not nodes or all(x.count < 30 for x in nodes)


def test_a_changed_parameter_is_an_error(nodes):
    layer = block()
    y, *_ = layer(*inputs())
    with torch.no_grad():
        layer.att.key.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert len(nodes) == 1


def test_second_derivatives_are_refused(nodes):
    layer, given = block(), inputs()
    y, *_ = layer(*given)
    (grad,) = torch.autograd.grad(y.sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_a_layer_can_be_copied(nodes):
    layer = block()
    first = trained(layer, inputs())
    other = copy.deepcopy(layer)
    other.zero_grad()
    assert all(torch.equal(x, y) for x, y in zip(first[:4], trained(other, inputs())[:4], strict=True))
    assert len(nodes) == 2


def test_a_shallow_copy_has_parameters_of_its_own(nodes, monkeypatch):
    layer, given = block().att, inputs()
    layer(*given)
    other = copy.copy(layer)
    other._parameters = {name: torch.nn.Parameter(x * 2) for name, x in layer._parameters.items()}
    found = other(*given)[0]
    assert len(nodes) == 2
    monkeypatch.setattr(node, "devices", ())
    assert torch.equal(found, other(*given)[0])


def layer_of(kind, dtype=torch.float64):
    torch.manual_seed(0)
    if kind.startswith("RWKV7") and kind not in MORE:
        return getattr(nn_cases.make(dtype).blocks[0], "att" if "Time" in kind else "ffn")
    if kind in nn_layer_cases.MAKERS:
        return nn_layer_cases.make(kind, dtype=dtype)
    module = MORE[kind](dtype=dtype)
    with torch.no_grad():
        for x in module.parameters():
            x.add_(0.2 * torch.randn(x.shape).to(x))
    return module


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else [x for each in results for x in flat(each)]


def run_twice(kind, packed, cast):
    """A layer's results and gradients, of a text and of the text behind it."""
    layer = layer_of(kind, torch.float32 if cast else torch.float64)
    make = torch.Generator().manual_seed(1)
    x = [torch.randn(1 if packed else 2, 9, 12, generator=make, dtype=torch.float64) for _ in range(2)]
    x = [each.to(next(layer.parameters()).dtype).requires_grad_() for each in x]
    bounds = {"cu_seqlens": torch.tensor([0, 4, 9], dtype=packed)} if packed else {}
    with torch.autocast("cpu", torch.bfloat16, cast, cache_enabled=False):  # a node casts its weights itself
        first = layer(x[0], **bounds)
        several = flat(layer(x[1], state=first[-1], **bounds))
    leaves = [*layer.parameters(), *x]
    grads = torch.autograd.grad(nn_cases.weighted(several), leaves, allow_unused=True)
    return [*several, *[grad for grad in grads if grad is not None]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("packed", [None, torch.int64, torch.int32])
def test_every_layer(kind, packed, cast, nodes, monkeypatch):
    one = run_twice(kind, packed, cast)
    assert len(nodes) == (0 if packed else 2)  # on the CPU torch does not tell who looks at the bounds of sequences
    monkeypatch.setattr(node, "devices", ())
    for x, y in zip(one, run_twice(kind, packed, cast), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def batched(layer):
    given = inputs()
    y, *_ = layer(*given)
    weights = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(4), dtype=y.dtype)
    return torch.autograd.grad(y, [layer.att.key.weight, given[1]], weights, is_grads_batched=True)


def in_memory_of_gradients_with_gaps(layer):
    given = inputs()
    y, *_ = layer(*given)
    return torch.autograd.grad(y.transpose(0, 1).square().sum(), [layer.ffn.value.weight, given[0]])


def test_gradients_with_gaps(nodes, monkeypatch):
    both(monkeypatch, in_memory_of_gradients_with_gaps, nodes)


def test_batched_gradients(nodes, monkeypatch):
    both(monkeypatch, batched, nodes, equal=torch.allclose)


def in_a_vmap(layer):
    given = inputs()
    y, *_ = layer(*given)
    weights = torch.randn(3, 2, *y.shape, generator=torch.Generator().manual_seed(4), dtype=y.dtype)

    def grads(several):
        return torch.autograd.grad(y, [given[0], layer.att.key.weight], several, retain_graph=True)

    return [*grads(weights[0, 0]), *torch.vmap(grads, 1, 1)(weights[0]), *torch.vmap(torch.vmap(grads))(weights)]


def in_a_batch_in_a_graph(layer):
    given = inputs()
    y, *_ = layer(*given)
    weights = torch.stack([torch.ones_like(y), y.detach()])
    return torch.autograd.grad(y, given, weights, is_grads_batched=True, create_graph=True)


@pytest.mark.parametrize("use", [in_a_vmap, in_a_batch_in_a_graph])
def test_rows_of_gradients(use, nodes, monkeypatch):
    both(monkeypatch, use, nodes, equal=torch.allclose)


def test_saved_tensors_of_other_strides(nodes, monkeypatch):
    both(monkeypatch, with_other_memory, nodes, equal=torch.allclose)


@pytest.mark.parametrize(("kind", "is_packed"), [("RWKV5", False), ("RWKV6", False), ("RWKV7", False), ("RWKV7", True)])
def test_no_more_is_saved_than_by_the_parts(kind, is_packed, on_gpu, monkeypatch):
    """Bytes that a backward of kernels keeps, whose algorithm may cut segments."""
    on_gpu.use("sm_90")
    layer = nn_cases.make(torch.bfloat16, name=kind, width=128, head_size=64, hidden=128, layers=2).blocks[0]
    x = torch.randn(1, 4096, 128).bfloat16().requires_grad_()
    bounds = torch.tensor([0, 100, 4096]) if is_packed else None

    def kept(devices):
        monkeypatch.setattr(node, "devices", devices)
        found = {}
        for _ in range(3):  # the second one is a known call
            found.clear()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: found.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
            ):
                y = layer(x, cu_seqlens=bounds)[0]
        y.float().sum().backward()
        return sum(each.untyped_storage().nbytes() for each in found.values())

    parts = kept(())
    assert kept(("cuda",)) <= parts


@pytest.mark.parametrize("is_graded", [False, True])
def test_no_result_shares_memory(is_graded):
    def function(x):
        y = x * 2
        return [y, y[:, -1], x[:, 0], y.view(-1), (x * 3)[:, 1:]]

    x = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    with torch.set_grad_enabled(is_graded):
        found = tape.Recorded(function, [x], "it").run([x])
    assert len({y.untyped_storage().data_ptr() for y in (x, *found)}) == 6
    assert all(torch.equal(y, want) for y, want in zip(found, function(x), strict=True))
    if is_graded:
        weights = [torch.randn_like(y) for y in found]
        grads = [torch.autograd.grad(several, x, weights)[0] for several in (found, function(x))]
        assert torch.allclose(*grads)


def test_one_tensor_twice(nodes, monkeypatch):
    x = inputs()[0]
    found = [block()(x, x)[0] for _ in range(2)]
    assert not nodes
    monkeypatch.setattr(node, "devices", ())
    assert all(torch.equal(each, block()(x, x)[0]) for each in found)


def recordings(monkeypatch):
    """The layers that are noted from here on, with the backwards of other gradients than the usual ones."""
    noted, record = [], tape.Recorded._record
    monkeypatch.setattr(tape.Recorded, "_record", lambda self, key: (noted.append(key is None), record(self, key))[1])
    return noted


def test_equal_layers_share_their_lists(nodes, monkeypatch):
    noted, model = recordings(monkeypatch), nn_cases.make()
    tokens = nn_cases.make_tokens(model, 2, 7)
    for _ in range(2):
        nn_cases.weighted([model(tokens)]).backward()
    # The first layer, and all others; nothing is made of the last one's state.
    assert sorted(noted) == [False, False, True, True]
    assert len(nodes) == 6
    model.blocks[2].ln1.eps = 0.5
    model(tokens)
    model.eval()
    model(tokens)
    assert sum(noted) == 6


def test_first_backward_notes_nothing(nodes, monkeypatch):
    noted, model = recordings(monkeypatch), nn_cases.make()
    model.blocks[-1].att.key.register_forward_hook(lambda *_: None)  # so that its gradients are no others
    logits = model(nn_cases.make_tokens(model, 2, 7))
    count = len(noted)
    nn_cases.weighted([logits]).backward()
    assert len(noted) == count == 4


def test_switches_of_the_forward_count(nodes, monkeypatch):
    seen = []
    monkeypatch.setattr(tape, "Tape", lambda inputs, own=tape.Tape: (seen.append(switches.current()), own(inputs))[1])
    y, *_ = block()(*inputs())
    with switches.at(switches.HIGH):
        y.sum().backward()  # whose gradient has other strides, so that it is noted anew
    assert seen == [switches.USUAL] * 3


def test_threads_that_note_one_layer(nodes):
    layer, want = block(), None
    found = []

    def work():
        given = inputs()
        y, *_ = layer(*given)
        found.append([y.detach(), *torch.autograd.grad(nn_cases.weighted([y]), given)])

    several = [threading.Thread(target=work) for _ in range(4)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    want = found[0]
    assert len(found) == 4
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, want, strict=True))
    assert all(x is not None for x in layer.parameters())


def test_no_forward_waits_for_a_backward(nodes):
    """A thread of the device may note a backward, and is what a forward that is noted waits for."""
    is_held, is_done, found = threading.Event(), threading.Event(), []

    def hold():
        with tape._lock:
            is_held.set()
            is_done.wait(60)

    threads = [threading.Thread(target=hold), threading.Thread(target=lambda: found.append(block()(*inputs())))]
    threads[0].start()
    is_held.wait()
    threads[1].start()
    threads[1].join(20)
    try:
        assert found
    finally:
        is_done.set()
        for thread in threads:
            thread.join()


def test_a_fork_notes_anew(nodes):
    layer = block()
    layer(*inputs())
    (snapshot,) = layer.__dict__[node._MEMO].snapshots.values()
    assert snapshot.calls.by_key

    def look():
        assert not snapshot.calls.by_key

    assert in_fork(look) == "done"


def test_without_memory_a_layer_runs_as_its_parts(nodes, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("no memory")

    record = tape.Recorded._record
    monkeypatch.setattr(tape.Recorded, "_record", refuse)
    layer, given = block(), inputs()
    y, *_ = layer(*given)
    y.sum().backward()
    assert not nodes
    monkeypatch.setattr(tape.Recorded, "_record", record)
    layer(*given)
    assert not nodes  # as before, which a checkpoint relies on


def test_many_signatures(nodes):
    layer = block()
    for tokens in range(1, node._MOST + 4):
        layer(*[x[:, :1].expand(2, tokens, 12) for x in inputs()])
    assert len(nodes) == node._MOST


@pytest.mark.parametrize("wrong", ["names", "shape", "kind", "nested", "sparse"])
def test_errors_are_those_of_the_parts(wrong, nodes, monkeypatch):
    layer, (x, v_first) = block(), inputs()
    call = {
        "names": lambda: layer(x, v_first, states=None),
        "shape": lambda: layer(x[..., :5], v_first),
        "kind": lambda: layer(x, v_first, state=[1, 2, 3]),
        "nested": lambda: layer(torch.nested.nested_tensor([*x.detach()]), v_first),
        "sparse": lambda: layer(x.detach().to_sparse(), v_first),
    }[wrong]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as found:
        call()
    monkeypatch.setattr(node, "devices", ())
    with pytest.raises(found.type) as want:
        call()
    assert str(found.value) == str(want.value)


@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_those_of_the_parts(kind, on_gpu, nodes, monkeypatch):
    on_gpu.use("sm_90")

    def launched(devices):
        monkeypatch.setattr(node, "devices", devices)
        layer, several = layer_of(kind, torch.bfloat16), []
        x = torch.randn(2, 64, 12).bfloat16().requires_grad_()
        for _ in range(2):
            on_gpu.take()
            results = flat(layer(x))
            several.append(on_gpu.take())
            torch.autograd.grad(results[0], [x, *layer.parameters()], torch.ones_like(results[0]), allow_unused=True)
            several.append(on_gpu.take())
        return [collections.Counter((x.template, x.entry, x.grid, x.block) for x in each) for each in several[2:]]

    found = launched(("cuda",))
    assert nodes
    assert found == launched(())
    assert all(found)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("kind", ["GatedLinearAttention", "LinearAttention", "KimiDeltaAttention", "RWKV7Block"])
def test_a_list_does_not_see_that_a_packing_is_read(kind, is_inference, on_gpu, monkeypatch):
    longest, run = tensors._longest, []

    def read(values, tokens):
        values.to("meta")  # as a copy to the host, which a list refuses
        return longest(values, tokens)

    monkeypatch.setattr(tensors, "_longest", read)
    monkeypatch.setattr(node, "devices", ("cuda",))
    with torch.inference_mode(is_inference):
        layer = layer_of(kind, torch.bfloat16)
        monkeypatch.setattr(tape.Recorded, "run", lambda self, arrays: (run.append(self), self.forward(arrays)[0])[1])
        layer(torch.randn(1, 9, 12).bfloat16(), cu_seqlens=torch.tensor([0, 2, 9]))
    assert len(run) == 1


def test_a_layer_that_is_gone_leaves_nothing(nodes):
    """At once: whoever drops a model wants its memory."""
    layer, given = block(), inputs()
    gc.collect()
    gc.disable()
    try:
        y, *_ = layer(*given)
        y.sum().backward()
        gone, weight, lists = weakref.ref(layer), weakref.ref(layer.att.key.weight), weakref.ref(nodes.pop())
        del layer, y, _
        assert gone() is None
        assert weight() is None
        node._shared.clear()
        assert lists() is None
    finally:
        gc.enable()


def test_lists_outlive_no_layer(nodes):
    """Those of the first layer, which another one shares."""
    first, second = block(), block()
    for layer in (first, second):
        trained(layer, inputs())
    assert nodes[0] is nodes[1]
    gone = weakref.ref(first.att.key.weight)
    nodes.clear()
    del first, layer
    gc.collect()
    assert gone() is None


def test_a_layer_is_saved_without_its_lists(nodes, tmp_path):
    layer, given = block(), inputs()
    want = layer(*given)[0]
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(*given)[0], want)
    assert len(nodes) == 2


def wrapped_in_its_forward(layer):
    forward = layer.forward
    layer.forward = lambda *given: forward(*given)
    return trained(layer, inputs())


def as_a_replica(layer):
    """A layer whose parameters are attributes, as `nn.DataParallel` makes them."""
    for module in layer.modules():
        for name, x in [*module._parameters.items()]:
            module.__dict__[name] = x
    return trained(layer, inputs())


@pytest.mark.parametrize(("use", "count"), [(wrapped_in_its_forward, 1), (as_a_replica, 0)])
def test_layers_that_others_wrap(use, count, nodes, monkeypatch):
    noted = recordings(monkeypatch)
    both(monkeypatch, use, nodes, count)
    assert sum(noted) == count


def test_nobody_waits_for_the_compiler():
    code = """
import sys, torch, rwkv_jit
from rwkv_jit.nn import node
node.devices = {"cpu"}
layer = rwkv_jit.nn.RWKV7ChannelMix(12, 0, 2)
layer(torch.ones(1, 2, 12))[0].sum().backward()
assert layer.__dict__[node._MEMO].snapshots[True].calls.by_key
assert "torch._dynamo.symbolic_convert" not in sys.modules
"""
    subprocess.run([*warm.python("torch"), "-c", code], check=True)


def test_sums_of_gradients_are_in_place(nodes, monkeypatch):
    ran = []
    for op, run in [*lists.ENTRIES.items()]:
        monkeypatch.setitem(lists.ENTRIES, op, lambda *given, op=op, run=run: (ran.append(op), run(*given))[1])
    layer, given = block(), inputs()
    y, *_ = layer(*given)
    ran.clear()
    y.sum().backward()
    add = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor
    assert [ran.count(each) > 0 for each in add] == [True, False]


def test_no_sum_is_in_memory_that_is_read_again():
    def function(x, z, w):
        last = x.sin()  # whose backward runs last, and reads what a sum before has read
        y = x.exp()
        return [((y.cos() + y) + last) * 3, ((z + w.cos()) + w) * 3]  # the gradient of z is a term of that of w

    given = [torch.randn(5, dtype=torch.float64).requires_grad_() for _ in range(3)]
    recorded, weights = tape.Recorded(function, given, "it"), [torch.randn_like(x) for x in given[:2]]
    for run in (lambda *x: recorded.run(x), function):
        assert all(map(torch.equal, run(*given), function(*given)))
        grads = [torch.autograd.grad(each(*given), given, weights) for each in (run, function)]
        assert all(map(torch.equal, *grads))


def test_a_gradient_that_nobody_wants_within_a_layer(nodes, monkeypatch):
    """The backward of the first layer's own norm returns None for it."""
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(node, "devices", devices)
        layer = nn_cases.make().blocks[0]
        y, *_ = layer(inputs()[0].detach())
        found.append([y, *torch.autograd.grad(y.square().sum(), [*layer.parameters()], allow_unused=True)])
    assert len(nodes) == 1
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_list_alone_holds_what_it_reads(monkeypatch):
    """So that each value is gone when it was read for the last time."""
    x = torch.randn(5, requires_grad=True)
    recorded, counts = tape.Recorded(lambda x: [x.exp().exp().exp() * 2], [x], "it"), []
    (key, run), = recorded._backwards.items()  # fmt: skip

    def counted(values):
        counts.extend([sys.getrefcount(values[i]) for i in range(len(recorded.saved))])
        return run(values)

    monkeypatch.setitem(recorded._backwards, key, counted)
    torch.autograd.grad(recorded.run([x]), x, [torch.ones(5)])
    assert counts == [2] * 3
