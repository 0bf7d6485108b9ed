"""Derived ops launch the same in every kind of call, and a known call takes few functions of the package."""

import functools
import sys
from pathlib import Path

import derived_cases
import launch_calls
import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.kernels import signatures

PACKAGE = str(Path(rwkv_jit.__file__).parent)
EACH = pytest.mark.parametrize(("op", "how"), [(op, several[-1]) for op, several in derived_cases.WAYS.items()])
# Sequences, tokens, heads of keys and of values, head sizes; bounds of packed ones; whether heads fill the GPU.
SIZES = {
    "many heads": ((2, 128, 16, 16, 128, 128), None),
    "many heads that share keys": ((2, 128, 8, 32, 64, 64), None),
    "few heads": ((1, 128, 2, 2, 64, 64), None),
    "long": ((1, 2048, 2, 4, 64, 64), None),
    "packed": ((1, 150, 16, 16, 128, 128), [0, 1, 40, 150]),
    "few packed": ((1, 150, 2, 2, 64, 64), [0, 1, 40, 150]),
}
LAUNCHES = ("launch.py", "cuda.py")  # each launch takes one function, however many there are
MOST_FRAMES = {"forward": 11, "with gradients": 12, "backward": 8}


class Passes(TorchDispatchMode):
    """A mode that runs what it sees."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def under(mode):
    """Return what runs a call under a mode."""

    def run(call, inputs):
        with mode():
            return call(*inputs)

    return run


def with_selective_checkpoints(call, inputs):
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )  # fmt: skip
    return checkpoint(call, *inputs, use_reentrant=False, context_fn=contexts)


KINDS = {
    "mode": under(Passes), "flops": under(functools.partial(FlopCounterMode, display=False)),
    "selective checkpoints": with_selective_checkpoints,
}  # fmt: skip


def make(op, how, model):
    sizes, bounds = SIZES[model]
    return derived_cases.make(
        op, how, sizes, torch.bfloat16, torch.float32, torch.float32, bounds=bounds, has_state=False
    )  # fmt: skip


def launches(on_gpu, case, run, wants):
    """Return what one call launches, and its backward."""
    signatures.forget()
    on_gpu.take()
    names = list(case.tensors)
    leaves = [x.detach().clone().requires_grad_(wants) for x in case.tensors.values()]

    def call(*given):
        return case.replaced(dict(zip(names, given, strict=True))).run()

    with torch.set_grad_enabled(wants):
        y, final = run(call, leaves)
    if wants:
        torch.autograd.grad([y, final], leaves, [torch.ones_like(y), torch.ones_like(final)])
    return launch_calls.lines(on_gpu.take())


@EACH
@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("wants", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_those_of_an_eager_call(op, how, model, wants, kind, on_gpu):
    on_gpu.use("sm_90")
    case = make(op, how, model)
    want = launches(on_gpu, case, lambda call, inputs: call(*inputs), wants)
    assert want
    assert launches(on_gpu, case, KINDS[kind], wants) == want


class Notes(TorchDispatchMode):
    """A mode that notes which ops of the package it sees, with what they take and what they return."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if str(function).startswith("rwkv_jit."):
            self.calls.append((function, args, kwargs or {}, results))
        return results


@EACH
@pytest.mark.parametrize("model", SIZES)
def test_a_compiler_sees_one_op_that_keeps_what_it_promises(op, how, model, on_gpu):
    """So what it runs later launches what an eager call does."""
    on_gpu.use("sm_90")
    case = make(op, how, model)
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors.items()}
    with Notes() as notes:
        case.replaced(leaves).run()
    ((function, args, named, results),) = notes.calls
    assert str(function) == f"rwkv_jit.{op}_fwd.default"
    assert on_gpu.take()
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="cuda") if torch.is_tensor(x) else x for x in args]
        promised = function(*fakes, **named)
    assert [(x.shape, x.dtype) for x in promised] == [(x.shape, x.dtype) for x in results]
    assert not on_gpu.take()


@EACH
@pytest.mark.parametrize("model", ["many heads", "few heads", "long"])
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "tokens"])
def test_what_is_kept_may_be_symbolic(op, how, model, dim, on_gpu):
    on_gpu.use("sm_90")
    (batch, *sizes), bounds = SIZES[model]
    case = derived_cases.make(
        op, how, (max(batch, 2), *sizes), torch.bfloat16, torch.float32, torch.float32, bounds=bounds, has_state=False
    )  # fmt: skip
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors.items()}
    with Notes() as notes:
        case.replaced(leaves).run()
    ((function, args, named, results),) = notes.calls
    args = [x.detach() if torch.is_tensor(x) else x for x in args]
    kinds = {True: DimDynamic.DYNAMIC, False: DimDynamic.STATIC}
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = []
        for place, x in enumerate(args):
            if torch.is_tensor(x):
                dims = [kinds[each == dim and x.dim() > 2] for each in range(x.dim())]
                x = mode.from_tensor(
                    x, symbolic_context=StatelessSymbolicContext(dims), source=ConstantSource(f"x{place}")
                )  # fmt: skip
            fakes.append(x)
        promised = function(*fakes, **named)[-1].shape[0]
        assert int(promised) == results[-1].shape[0]


@EACH
def test_a_graph_has_one_op_of_the_package(op, how):
    case = derived_cases.make(op, how, (1, 12, 2, 4, 8, 8), torch.float32, has_state=False)
    names = list(case.tensors)
    graph = make_fx(lambda *given: case.replaced(dict(zip(names, given, strict=True))).run())(*case.tensors.values())
    ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "rwkv" in str(node.target)]
    assert ops == [f"rwkv_jit.{op}_fwd.default"]


def frames(run):
    """Return how many functions of the package a call enters, but for launches."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        path = frame.f_code.co_filename
        count += event == "call" and path.startswith(PACKAGE) and Path(path).name not in LAUNCHES

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(before)
    return count, result


@EACH
@pytest.mark.parametrize("model", ["many heads", "few heads"])
def test_a_known_call_enters_few_functions(op, how, model, on_gpu):
    on_gpu.use("sm_90")
    case = make(op, how, model)
    found = {}
    for _ in range(3):
        found["forward"], _ = frames(case.run)
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors.items()}
    wanting = case.replaced(leaves)
    for _ in range(3):
        found["with gradients"], (y, final) = frames(wanting.run)
        weights = [torch.ones_like(y), torch.ones_like(final)]
        backward = functools.partial(torch.autograd.grad, [y, final], [*leaves.values()], weights)
        found["backward"], _ = frames(backward)
    assert all(found[name] <= most for name, most in MOST_FRAMES.items()), found


@pytest.mark.parametrize(("op", "how"), [("simple_gla", ""), ("hgrn2", ""), ("ssd", "D z bias softplus")])
def test_long_keys_are_cut_into_parts(op, how, on_gpu):
    on_gpu.use("sm_80")
    case = derived_cases.make(
        op, how, (1, 128, 2, 4, 300, 64), torch.bfloat16, torch.float32, torch.float32, has_state=False
    )  # fmt: skip
    y, final = case.run()
    assert y.shape == (1, 128, 4, 64)
    assert sorted(final.shape[-2:]) == [64, 300]
    made = [x.parameters["HEAD_SIZE"] for x in on_gpu.take() if x.template.startswith("diagonal_operands")]
    assert made == [152, 148]


@EACH
@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ((0, 70, 32, 32, 128, 128), None), ((2, 0, 32, 32, 128, 128), None), ((2, 70, 0, 0, 128, 128), None),
        ((1, 0, 32, 32, 128, 128), [0, 0, 0]),
    ],
    ids=["sequences", "tokens", "heads", "packed"],
)  # fmt: skip
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_calls_without_rows(op, how, sizes, bounds, is_batch_invariant, on_gpu):
    on_gpu.use("sm_90")
    rwkv_jit.set_batch_invariant(is_batch_invariant)
    try:
        case = derived_cases.make(op, how, sizes, torch.bfloat16, torch.float32, torch.float32, bounds=bounds)
        (y, final), grads, _ = derived_cases.differentiate(case)
    finally:
        rwkv_jit.set_batch_invariant(False)
    assert y.numel() == 0
    assert final.shape == case.state.shape
    assert {name: x.shape for name, x in grads.items()} == {name: x.shape for name, x in case.tensors.items()}
