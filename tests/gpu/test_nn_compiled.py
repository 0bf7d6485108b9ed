"""Layers on the GPU under torch.compile, with CUDA graphs too, and torch.export: as eager, and no more launches."""

import collections
import copy
import re

import comparing
import nn_cases
import pytest
import torch
from torch._dynamo.utils import counters
from torch.export import Dim

from rwkv_jit.nn import traced

MODELS = pytest.mark.parametrize("name", ["RWKV5", "RWKV6", "RWKV7"])
SIZES = {"vocabulary": 500, "width": 256, "head_size": 64, "hidden": 512, "layers": 2}
RANKS = {"RWKV7": {"ranks": {}}}
B, T = 3, 70
OURS = (
    "layer_",
    "wkv",
    "gla_",
    "sum_rows",
    "sum_buffers",
    "narrow_rows",
    "copy_states",
    "unit_states",
    "cut_sequences",
)
# What torch and a compiler call kernels that do nothing but copy.
COPY = re.compile(r"direct_copy|Memcpy|CatArrayBatchedCopy|triton_\w+?_fused_(clone|_to_copy|copy)_\d+$")
pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    counters.clear()


def make(name, dtype):
    return nn_cases.make(dtype, int(torch.randint(2**31, ())), name, **SIZES, **RANKS.get(name, {})).cuda()


def close(found, want, limit=1e-4):
    for x, y in zip(found, want, strict=True):
        assert comparing.relative(x, y) < limit


class Layer(torch.nn.Module):
    """A layer behind the first one, with what it is given beside the residual."""

    def __init__(self, name, block):
        super().__init__()
        self.block, self.has_first = block, name == "RWKV7"

    def forward(self, x, first):
        return self.block(x, first)[0] if self.has_first else self.block(x)[0]


def make_layer(name, dtype=torch.float32):
    return Layer(name, make(name, dtype).blocks[1])


def given(dtype=torch.float32, tokens=T):
    return tuple(torch.randn(B, tokens, SIZES["width"], device="cuda", dtype=dtype) for _ in range(2))


@MODELS
def test_inference_in_cuda_graphs(op, name):
    layer = make_layer(name).requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):  # the first ones warm up and capture
            inputs = given()
            torch.compiler.cudagraph_mark_step_begin()
            close([compiled(*inputs).clone()], [layer(*inputs)])
    assert counters["inductor"]["cudagraph_skips"] == 0


@MODELS
def test_training_in_cuda_graphs(op, name):
    layer = make_layer(name)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            inputs, (weights, _) = given(), given()
            results = []
            for module, run in ((layer, compiled), (eager, eager)):
                x, first = (x.clone().requires_grad_() for x in inputs)
                torch.compiler.cudagraph_mark_step_begin()
                y = run(x, first)
                y.backward(weights)
                grads = [x.grad, *(p.grad for p in module.parameters())]
                results.append([y.detach().clone(), *(grad.clone() for grad in grads)])
                module.zero_grad()
            close(results[0][:1], results[1][:1])
            close(results[0][1:], results[1][1:], 1e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0


def launches(function, x, first, weights):
    """How many kernels run, by what they are: ours by their names, and copies; and the names of all others."""

    def step():
        y = function(x, first)
        torch.autograd.grad(y, [x, first, *function.parameters()], weights, allow_unused=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    counts, others = collections.Counter(), collections.Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "copy" if COPY.search(event.name) else "other"
            counts[event.name if event.name.startswith(OURS) else kind] += 1
            others[event.name[:60]] += not event.name.startswith(OURS)
    return counts, others


@MODELS
def test_a_compiled_layer_launches_no_more_than_eager(op, name):
    layer = make_layer(name, torch.bfloat16)
    # With other numbers of rows the compiler may pad matrices for their products, as it measures.
    x, first = (each.requires_grad_() for each in given(torch.bfloat16, tokens=72))
    weights = torch.randn_like(x)
    want, known = launches(layer, x, first, weights)
    found, others = launches(torch.compile(layer, fullgraph=True), x, first, weights)
    assert None not in traced._lists.values()
    assert traced._lists
    ours = {kernel: n for kernel, n in want.items() if kernel not in ("copy", "other")}
    assert sum(ours.values()) >= 10
    assert {kernel: n for kernel, n in found.items() if kernel not in ("copy", "other")} == ours
    assert found["copy"] <= want["copy"]
    # One launch copies the gradients that share memory; a long sum of torch's own is two kernels where it is compiled.
    halves = 1 + sum(n for kernel, n in others.items() if re.match(r"triton_red_fused_\w*sum", kernel))
    assert found.total() <= want.total() + halves, (others - known, known - others)


@MODELS
def test_exported_model_takes_any_batch_and_length(op, name):
    model = make(name, torch.float32)
    shapes = {"tokens": {0: Dim("batch"), 1: Dim("tokens")}}
    tokens = nn_cases.make_tokens(model, B, T).cuda()
    with torch.no_grad():  # with gradients, what a forward keeps goes by whether texts are short
        program = torch.export.export(model, (tokens,), dynamic_shapes=shapes, strict=False).module()
        for shape in ((1, 1), (5, 130), (B, T)):
            tokens = nn_cases.make_tokens(model, *shape).cuda()
            close([program(tokens)], [model(tokens)], 1e-4)
