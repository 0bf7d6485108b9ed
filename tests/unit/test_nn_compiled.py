"""Layers and whole models under torch.compile and torch.export: any batch and length, and no copies of their own."""

import io
from collections import Counter

import nn_cases
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

MODELS = pytest.mark.parametrize("name", ["RWKV5", "RWKV6", "RWKV7"])
COPIES = ("clone", "copy_", "copy", "_to_copy", "contiguous")
WIDTH = nn_cases.SIZES["width"]
B, T = 2, 9


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    torch.manual_seed(0)


def make(name, layers=2):
    return nn_cases.make(torch.float32, 0, name, layers=layers)


def make_short(name):
    """A model whose layers are alike has one; the second one of RWKV-7 takes values of the first."""
    return make(name, layers=2 if name == "RWKV7" else 1)


def close(found, want):
    for x, y in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# ---- export ------------------------------------------------------------------------------------------------------


def reloaded(exported):
    """What another process makes of a program in a file."""
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


@pytest.mark.parametrize(("name", "strict"), [("RWKV5", False), ("RWKV6", False), ("RWKV7", True)])
def test_model_is_exported_with_any_batch_and_length(name, strict):
    model = make_short(name)
    shapes = {"tokens": {0: Dim("batch"), 1: Dim("tokens")}}
    exported = torch.export.export(model, (nn_cases.make_tokens(model, B, T),), dynamic_shapes=shapes, strict=strict)
    assert any(f"{name.lower().replace('rwkv', 'wkv')}_fwd" in str(node.target) for node in exported.graph.nodes)
    program = reloaded(exported)
    for shape in ((1, 1), (3, 70), (B, T)):
        tokens = nn_cases.make_tokens(model, *shape)
        close(program(tokens), model(tokens))


@MODELS
def test_block_is_exported_with_its_state(name):
    """What it is given and returns goes through a file."""
    model = make(name)
    block, batch = model.blocks[0], Dim("batch")
    given = {"x": torch.randn(B, T, WIDTH), "state": nn_cases.make_state(model, B)[0].detach()}
    shapes = {"x": {0: batch, 1: Dim("tokens")}, "state": type(given["state"])(*[{0: batch}] * 3)}
    exported = torch.export.export(block, (), given, dynamic_shapes=shapes, strict=True)
    program = reloaded(exported)
    for rows, tokens in ((1, 1), (5, 40)):
        state = nn_cases.make_state(model, rows)[0].detach()
        x = torch.randn(rows, tokens, WIDTH)
        close(program(x=x, state=state), block(x=x, state=state))


@MODELS
def test_states_are_saved_and_loaded(name):
    """By a loader that takes no foreign types."""
    state, buffer = nn_cases.make_state(make(name), B), io.BytesIO()
    torch.save([each.detach() for each in state], buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=True)
    assert [type(each) for each in again] == [type(each) for each in state]
    close(again, state)


@MODELS
def test_packed_texts_are_exported(name):
    model, texts = make_short(name), Dim("texts", min=2, max=64)
    shapes = {"tokens": {1: Dim("tokens", min=2, max=4096)}, "cu_seqlens": {0: texts + 1}}
    given = {"tokens": nn_cases.make_tokens(model, 1, T), "cu_seqlens": torch.tensor([0, 2, 5, T])}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    for bounds in ([0, 1, 40], [0, 3, 3, 7, 21]):
        given = {"tokens": nn_cases.make_tokens(model, 1, bounds[-1]), "cu_seqlens": torch.tensor(bounds)}
        close(program(**given), model(**given))


# ---- compile -----------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Counts what is asked of torch in eager mode; what our ops ask for inside is their own."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[name_of(function)] += 1
        return function(*args, **(kwargs or {}))


def name_of(function):
    return f"{function.namespace}.{function._opname}" if hasattr(function, "_opname") else str(function)


def counted(graphs):
    """What the nodes of graphs call."""
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(name_of(node.target) for node in nodes)


def around(counts):
    """Our ops, and copies of any kind."""
    ours = {op: n for op, n in counts.items() if op.startswith("rwkv_jit.")}
    return ours, sum(counts[f"aten.{op}"] for op in COPIES)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("RWKV5", 1), ("RWKV6", 0), ("RWKV7", 0), ("RWKV7", 1), pytest.param("RWKV5", 0, marks=pytest.mark.full),
        pytest.param("RWKV6", 1, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_compiled_block_copies_nothing_that_eager_does_not(name, layer):
    model = make(name)
    block, graphs = model.blocks[layer], []
    x = torch.randn(B, T, WIDTH, requires_grad=True)
    between = (torch.randn(B, T, WIDTH, requires_grad=True),) if name == "RWKV7" and layer else ()
    weights = torch.randn(B, T, WIDTH)

    def step(function):
        y, *_ = function(x, *between)
        return torch.autograd.grad(y, [x, *between, *block.parameters()], weights)

    def keep(graph, given):
        graphs.append(graph)
        return make_boxed_func(graph)

    with Ops() as eager:
        want = step(block)
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    close(step(compiled), want)
    assert len(graphs) == 2  # a forward and a backward
    (ours, copies), (ours_eager, copies_eager) = around(counted(graphs)), around(eager.counts)
    assert ours == ours_eager
    shift = "norm_shift" if name == "RWKV7" else "token_shift"
    assert {f"rwkv_jit.{op}" for op in (f"{shift}_fwd", f"{shift}_bwd", "gated_norm_bwd")} <= ours.keys()
    assert copies == copies_eager


@MODELS
def test_other_batches_and_lengths_take_the_same_graph(name):
    model, graphs = make(name), []

    def count(graph, given):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model.blocks[0], fullgraph=True, dynamic=True, backend=count)
    for shape in ((2, 9), (3, 40), (5, 17)):
        x = torch.randn(*shape, WIDTH)
        close(compiled(x), model.blocks[0](x))
    assert len(graphs) == 1
