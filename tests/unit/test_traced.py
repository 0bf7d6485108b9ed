"""Layers under torch.compile: one op each, with the values and gradients of their parts, and parts where it must be."""

import copy

import nn_cases
import pytest
import torch
from test_node import KINDS, flat, layer_of
from torch._dynamo.utils import counters
from torch.export import Dim

import rwkv_jit
from rwkv_jit.nn import node, traced

WIDTH = 12


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(node, "devices", {"cpu"})
    torch._dynamo.reset()
    torch.manual_seed(0)


def _nodes(graph):
    return [x for each in graph.modules() if isinstance(each, torch.fx.GraphModule) for x in each.graph.nodes]


class Seen:
    """A backend that keeps the graphs of a compiler, and runs what autograd's backends do."""

    def __init__(self):
        self.graphs = []
        self.inner = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return self.inner(graph, inputs)

    @property
    def ops(self):
        """Those of each graph, and of graphs in it, as a checkpoint is one."""
        return [[str(x.target) for x in _nodes(graph) if x.op == "call_function"] for graph in self.graphs]

    @property
    def nodes(self):
        return [sum("rwkv_jit.node" in op for op in ops) for ops in self.ops]


def compiled(module, **options):
    seen = Seen()
    return torch.compile(module, backend=seen, fullgraph=True, **options), seen


def trained(run, layer, *given):
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in given]
    results = flat(run(*leaves))
    sources = [x for x in (*leaves, *layer.parameters()) if x.requires_grad]
    graded = [x for x in results if x.requires_grad]
    weights = [torch.cos(torch.arange(x.numel()).view(x.shape)).to(x) for x in graded]
    return [*results, *torch.autograd.grad(graded, sources, weights, allow_unused=True)]


def equal(found, want):
    for x, y in zip(found, want, strict=True):
        if y is None or not y.any():  # a compiler has zeros where nothing depends on an input
            assert x is None or not x.any()
        else:
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def x_of(*shape, grad=True):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_op_with_the_values_and_gradients_of_its_parts(kind, monkeypatch):
    layer, x = layer_of(kind, torch.float64), x_of(2, 7)
    run, seen = compiled(layer)
    found = [trained(run, layer, x) for _ in range(2)]
    with torch.no_grad():
        alone = flat(run(x))
    assert seen.nodes == [1, 1]
    assert [len([y for y in ops if "getitem" not in y]) for ops in seen.ops] == [1, 1]
    monkeypatch.setattr(node, "devices", set())
    want = trained(layer, layer, x)
    for each in found:
        equal(each, want)
    equal(alone, want[: len(alone)])


def test_layers_of_a_kind_share_their_code():
    several = [nn_cases.make(torch.float64, layers=4).blocks[i] for i in range(1, 4)]
    seen = Seen()
    for layer in several:
        given = [x_of(2, 7), x_of(2, 7)]
        run = torch.compile(layer, backend=seen, fullgraph=True)
        equal(trained(run, layer, *given), trained(layer, layer, *given))
    assert seen.nodes == [1]


CHANGES = {
    "eps": lambda layer: setattr(layer.ln1, "eps", 0.5),
    "norm": lambda layer: setattr(layer.att.ln_x, "eps", 0.3),
    "linear": lambda layer: setattr(layer.att, "key", torch.nn.Sequential(layer.att.key, torch.nn.Tanh())),
    "bias": lambda layer: setattr(layer.ln2, "bias", None),
    "frozen": lambda layer: [x.requires_grad_(False) for name, x in layer.named_parameters() if "2" in name],
    "dtype": lambda layer: layer.float(),
    "parameter": lambda layer: setattr(layer.att, "r_k", torch.nn.Parameter(layer.att.r_k.detach() * 2)),
    "hook": lambda layer: layer.att.value.register_forward_hook(lambda module, given, y: y * 2),
}


@pytest.mark.parametrize("is_compiled_before", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_was_changed(change, is_compiled_before, monkeypatch):
    layer, given = nn_cases.make(torch.float64).blocks[1], [x_of(2, 7), x_of(2, 7)]
    run, _ = compiled(layer)
    if is_compiled_before:
        if change == "hook":
            pytest.skip("torch.compile looks at no hook twice")
        run(*given)
    CHANGES[change](layer)
    given = [x.to(layer.att.r_k.dtype).detach().requires_grad_() for x in given]
    found = trained(run, layer, *given)
    monkeypatch.setattr(node, "devices", set())
    for x, y in zip(found, trained(layer, layer, *given), strict=True):
        if y is not None and y.any():
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_other_sizes_run_the_parts():
    layer = nn_cases.make(torch.float64).blocks[1]
    run, seen = compiled(layer)
    for tokens in (7, 9, 11, 13):
        given = [x_of(2, tokens), x_of(2, tokens)]
        equal(trained(run, layer, *given), trained(layer, layer, *given))
    assert len(seen.graphs) == 2  # of 7 tokens, and of any number


def test_autocast_is_that_of_the_trace():
    layer = nn_cases.make(torch.float32).blocks[0]
    run, seen = compiled(layer)
    given = [torch.randn(2, 7, WIDTH, requires_grad=True)]
    for dtype in (torch.bfloat16, None, torch.float16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found, want = trained(run, layer, *given), trained(layer, layer, *given)
        assert [x.dtype for x in found] == [x.dtype for x in want]
        for x, y in zip(found, want, strict=True):
            assert (x - y).norm() <= (1e-5 if dtype is None else 0.05) * y.norm() + 1e-6
    assert seen.nodes == [1] * 3


def test_packed_sequences_and_states():
    layer = nn_cases.make(torch.float64).blocks[1]
    run, seen = compiled(layer)
    given, bounds = [x_of(1, 9), x_of(1, 9)], torch.tensor([0, 4, 9])
    state = type(layer(*given)[2])(*[torch.randn_like(x) for x in layer(*given, None, bounds)[2]])
    equal(flat(run(*given, state, bounds)), flat(layer(*given, state, bounds)))
    assert seen.nodes == [0]
    first = type(state)(*[x[:1] for x in state])
    equal(flat(run(*given, first)), flat(layer(*given, first)))
    assert seen.nodes == [0, 1]


def test_an_exported_program_has_parts():
    layer = nn_cases.make(torch.float64).blocks[1]
    shapes = {"x": {1: Dim("tokens")}, "v_first": {1: Dim("tokens")}}
    given = {"x": x_of(2, 7, grad=False), "v_first": x_of(2, 7, grad=False)}
    for strict in (False, True):
        exported = torch.export.export(layer, (), given, dynamic_shapes=shapes, strict=strict)
        ops = [str(x.target) for x in exported.graph.nodes]
        assert any("wkv7_fwd" in op for op in ops)
        assert not any("node" in op for op in ops)


def test_a_key_is_the_same_in_every_process(child):
    text = (
        "import torch; from rwkv_jit import nn; from rwkv_jit.nn import node, traced; node.devices = {'cpu'}\n"
        "layer = nn.RWKV7ChannelMix(8, layer=0, layers=2)\n"
        "torch.compile(layer, backend='aot_eager')(torch.zeros(1, 3, 8)); print(*traced._layers, *traced._lists)"
    )
    first, second = (child(text).stdout.split()[-2:] for _ in range(2))
    assert first == second


def test_whole_models(monkeypatch):
    model = nn_cases.make(torch.float64)
    tokens = nn_cases.make_tokens(model, 2, 9)

    def loss(model):
        logits, *_ = model(tokens)
        logits.square().sum().backward()
        grads = [x.grad.clone() for x in model.parameters()]
        model.zero_grad()
        return [logits.detach(), *grads]

    run, seen = compiled(model)
    found = loss(run)
    assert seen.nodes == [len(model.blocks)]
    monkeypatch.setattr(node, "devices", set())
    equal(found, loss(model))


@pytest.mark.parametrize(
    ("name", "how"),
    [("RWKV5", "plain"), ("RWKV6", "plain"), ("RWKV7", "plain"), ("RWKV7", "checkpointing"), ("RWKV7", "autocast")],
)
def test_a_loss_is_one_graph_for_each_length(name, how, monkeypatch):
    """Values and gradients are those of the parts, and each layer is one op."""
    model = nn_cases.make(torch.float32 if how == "autocast" else torch.float64, name=name, layers=2)
    model.checkpointing = how == "checkpointing"

    def trained_on(loss, tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found = loss(tokens[:, :-1], tokens[:, 1:])
        found.backward()
        grads = [x.grad.clone() for x in model.parameters()]
        model.zero_grad()
        return [found.detach(), *grads]

    run, seen = compiled(model.loss, dynamic=False)
    several = [nn_cases.make_tokens(model, 2, 1 + length, seed=length) for length in (9, 12, 9)]
    found = [trained_on(run, tokens) for tokens in several]
    assert seen.nodes == [len(model.blocks)] * 2
    monkeypatch.setattr(node, "devices", set())
    for tokens, each in zip(several, found, strict=True):
        want = trained_on(model.loss, tokens)
        if how != "autocast":
            equal(each, want)
        else:
            assert all((x - y).norm() <= 0.05 * y.norm() + 1e-4 for x, y in zip(each, want, strict=True))


def test_a_copy_and_a_subclass():
    class Mine(rwkv_jit.nn.RWKV7ChannelMix):
        def of_mixed(self, mixed, add=None):
            return super().of_mixed(mixed, add) * 2

    layer = rwkv_jit.nn.RWKV7ChannelMix(WIDTH, layer=0, layers=2, dtype=torch.float64)
    torch.nn.init.normal_(layer.value.weight)
    twin, mine = copy.deepcopy(layer), Mine(WIDTH, layer=0, layers=2, dtype=torch.float64)
    mine.load_state_dict(layer.state_dict())
    x = x_of(2, 5)
    for module, nodes in ((twin, [1]), (mine, [0])):
        run, seen = compiled(module)
        equal(flat(run(x)), flat(module(x)))
        assert seen.nodes == nodes
    counters.clear()


def test_what_a_list_cannot_do_is_done_by_parts(monkeypatch):
    monkeypatch.setattr(traced, "_written", lambda *_: None)
    layer, given = nn_cases.make(torch.float64).blocks[1], [x_of(2, 7), x_of(2, 7)]
    run, seen = compiled(layer)
    equal(trained(run, layer, *given), trained(layer, layer, *given))
    assert seen.nodes == [1]  # which becomes the parts
