"""Packed sequences in compiled graphs: lengths decide in each run whether they are cut, as they do in eager calls."""

import derived_cases
import launch_calls
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import rwkv_jit
from rwkv_jit.call import prepared
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import directions, segments
from rwkv_jit.schedules.table import OPS

LONG, EQUAL = [*range(0, 450, 50), 4096], [*range(0, 4096, 460), 4096]  # of which the first alone is cut
OTHER = [0, 1, 1, 1, 400, 500, 600, 3900, 4000, 4096]
WAYS = {op: ways[-1] for op, ways in derived_cases.WAYS.items()} | dict.fromkeys(
    ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
)
EACH = pytest.mark.parametrize("op", WAYS)


class Noted(TorchDispatchMode):
    """A mode that runs what it sees, as a compiled graph does, and notes this package's ops with their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if str(function).startswith("rwkv_jit."):
            self.seen.append((function, args, kwargs or {}, results))
        return results


def call(op, bounds, heads=2, **options):
    """Return a function that runs a call and its backward, and returns all gradients."""
    if op in derived_cases.WAYS:
        sizes = (1, bounds[-1], heads, heads, 64, 64)
        case = derived_cases.make(op, WAYS[op], sizes, torch.bfloat16, torch.float32, torch.float32, has_state=False)
        inputs, options = {**case.inputs, **case.parameters}, {**case.options, **options}
        options |= {"cu_seqlens": torch.tensor(bounds)}
        count = len(case.inputs)

        def run(leaves):
            more = dict(zip(case.parameters, leaves[count:], strict=True))
            return getattr(rwkv_jit, op)(*leaves[:count], **more, **options)[0]

        tensors = [x.detach() for x in inputs.values()]
    else:
        sizes, cu_seqlens = {"B": 1, "T": bounds[-1], "H": heads, "K": 64, "V": 64}, torch.tensor(bounds)
        shapes = [[sizes[dim] for dim in dims] for dims in OPS[op].inputs.values()]
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]

        def run(leaves):
            return getattr(rwkv_jit, op)(*leaves, cu_seqlens=cu_seqlens, **options)[0]

    def both():
        leaves = [x.requires_grad_() for x in tensors]
        y = run(leaves)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    return both


def launches_of(on_gpu, run):
    on_gpu.order.clear()
    run()
    return launch_calls.lines(on_gpu.order)


def is_cut(lines):
    return any(line.startswith("cut_sequences ") for line in lines)


def noted(run):
    """Return the ops of a call, forward and backward, with their arguments and results."""
    with Noted() as mode:
        run()
    return mode.seen


def kept_of(seen):
    (_, _, _, results), *_ = seen
    return results[2]


def size_that_compilers_know(seen):
    """Return how many numbers the fake of the forward says that it keeps, for sizes that are symbols."""
    function, given, named, _ = seen[0]
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
        return int(function(*fakes, **named)[2].numel())


@EACH
def test_lengths_decide_in_every_run(op, on_gpu):
    on_gpu.use("sm_90")
    several, sizes = [], set()
    for bounds in (LONG, EQUAL, OTHER, EQUAL, LONG):
        eager = launches_of(on_gpu, call(op, bounds))
        run = call(op, bounds)
        for _ in range(2):  # known from the second on
            on_gpu.order.clear()
            seen = noted(run)
            assert launch_calls.lines(on_gpu.order) == eager
        several.append(is_cut(eager))
        sizes.add(kept_of(seen).numel())
    assert several == [True, False, True, False, True]
    assert sizes == {size_that_compilers_know(seen)}


# Few heads and many, where a share is rounded down, for the shortest segments and longer ones.
@pytest.mark.parametrize(("heads", "tokens"), [(4, 512), (88, 513), (88, 1024), (89, 8192), (120, 5000)])
@pytest.mark.parametrize("op", ["wkv7", "gla"])
def test_there_is_room_wherever_lengths_decide(op, tokens, heads, on_gpu):
    on_gpu.use("sm_90")
    for bounds in ([0, tokens], [0, 0, tokens], [0, tokens // 2, tokens]):
        eager, run = launches_of(on_gpu, call(op, bounds, heads)), call(op, bounds, heads)
        on_gpu.order.clear()
        seen = noted(run)
        assert launch_calls.lines(on_gpu.order) == eager
        assert kept_of(seen).numel() == size_that_compilers_know(seen)
    for known in prepared.calls.values():
        assert min(directions.kept(known.problem).values()) >= 0


@pytest.mark.parametrize("bounds", [[0, 4096], [0, 4000, 8192]])
@pytest.mark.parametrize(("op", "heads"), [("gated_delta_rule", 30), ("kda", 32), ("ssd", 32)])
def test_split_keeps_what_its_fake_says(op, heads, bounds, on_gpu):
    """Also of ops whose dedicated kernels take such calls where nobody names a backend."""
    on_gpu.use("sm_90")
    seen = noted(call(op, bounds, heads, backend="split"))
    assert is_cut(launch_calls.lines(on_gpu.order)) or any("_segment " in x for x in launch_calls.lines(on_gpu.order))
    assert kept_of(seen).numel() == size_that_compilers_know(seen)


def backward_launches(on_gpu, seen, **changes):
    """Return what the backward of a graph launches; `changes` replace its cu_seqlens and what the forward kept."""
    function, given, named, _ = seen[1]
    names = [argument.name for argument in function._schema.arguments]
    given = list(given)
    for name, x in changes.items():
        given[names.index(name)] = x
    return launches_of(on_gpu, lambda: function(*given, **named))


@pytest.mark.parametrize("op", ["wkv7", "gla", "gated_delta_rule", "ssd"])
@pytest.mark.parametrize("bounds", [LONG, EQUAL])
def test_backward_runs_what_its_forward_chose(op, bounds, on_gpu):
    """Also of memory that was copied, and in a capture, where nothing can be read and bounds lie in another tensor."""
    on_gpu.use("sm_90")
    seen = noted(call(op, bounds))
    eager = backward_launches(on_gpu, seen)
    kept, other = kept_of(seen), torch.tensor({id(LONG): EQUAL, id(EQUAL): LONG}[id(bounds)])
    copied = backward_launches(on_gpu, seen, saved=kept.clone())
    assert copied == eager
    on_gpu.capturing = True
    assert backward_launches(on_gpu, seen, cu_seqlens=torch.tensor(bounds)) == eager
    on_gpu.capturing = False
    # The mark decides, not the values: a forward in a capture could not look at them.
    assert backward_launches(on_gpu, seen, cu_seqlens=other) == eager
    assert backward_launches(on_gpu, seen, cu_seqlens=other, saved=kept.clone()) != eager


def within(kept, behind, before=0):
    """Return what a forward kept as a part of larger memory, which says nothing of what ran."""
    larger = kept.new_zeros(before + kept.numel() + behind)
    return larger[before : before + kept.numel()].copy_(kept)


@pytest.mark.parametrize("op", ["wkv7", "gla", "gated_delta_rule"])
@pytest.mark.parametrize("bounds", [LONG, EQUAL])
def test_memory_that_was_rounded_up_says_nothing(op, bounds, on_gpu):
    on_gpu.use("sm_90")
    seen = noted(call(op, bounds))
    eager, kept = backward_launches(on_gpu, seen), kept_of(seen)
    for behind in range(1, 129):
        assert backward_launches(on_gpu, seen, saved=within(kept, behind)) == eager
    for mark in segments.MARKS.values():
        assert backward_launches(on_gpu, seen, saved=within(kept, 0, mark // 4)) == eager


@pytest.mark.parametrize(("op", "heads"), [("kda", 128), ("wkv7", 300)])
def test_marks_do_not_count_where_nothing_is_cut(op, heads, on_gpu):
    """Of dedicated kernels, and of so many heads that lengths decide nothing."""
    on_gpu.use("sm_90")
    seen = noted(call(op, [0, 512, 1024], heads))
    eager, kept = backward_launches(on_gpu, seen), kept_of(seen)
    for mark in segments.MARKS.values():
        assert backward_launches(on_gpu, seen, saved=within(kept, mark // 4)) == eager


def test_forward_in_a_capture_reads_nothing_and_cuts_what_was_cut_before(on_gpu, monkeypatch):
    on_gpu.use("sm_90")
    for bounds in (LONG, EQUAL):
        noted(call("wkv7", bounds))
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    on_gpu.capturing = True
    seen = noted(call("wkv7", LONG))
    on_gpu.capturing = False
    assert kept_of(seen).untyped_storage().nbytes() - kept_of(seen).nbytes == segments.MARKS["chunked"]
    monkeypatch.undo()


def test_split_cuts_packed_sequences_and_says_what_it_needs(on_gpu):
    on_gpu.use("sm_90")
    assert is_cut(launches_of(on_gpu, lambda: noted(call("gla", EQUAL, backend="split"))))
    with pytest.raises(UnsupportedConfigError, match="'split' needs 256 tokens a sequence on average, got 240"):
        noted(call("gla", [*range(0, 4096, 256), 4096, 4096], backend="split"))


@pytest.mark.parametrize("op", ["wkv7", "gla", "gated_delta_rule"])
def test_values_and_gradients_of_one_graph_with_several_lengths(op):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, backend=counter)
    for bounds in ([0, 1, 2, 3, 40], [0, 10, 20, 30, 40], [0, 0, 39, 40, 40]):
        sizes = {"B": 1, "T": 40, "H": 2, "K": 3, "V": 4}
        if op in derived_cases.WAYS:
            case = derived_cases.make(op, WAYS[op], (1, 40, 2, 2, 3, 4), has_state=False)
            given, options = {**case.inputs, **case.parameters}, case.options
        else:
            given = {name: -torch.rand([sizes[dim] for dim in dims]) / 3 for name, dims in OPS[op].inputs.items()}
            options = {}
        leaves = [x.detach().double().requires_grad_() for x in given.values()]
        weights, several = torch.randn(1, 40, 2, 4, dtype=torch.float64), []
        for function in (compiled, getattr(rwkv_jit, op)):
            count = len(leaves) if op not in derived_cases.WAYS else len(case.inputs)
            more = dict(zip([*given][count:], leaves[count:], strict=True))
            packed = [(None, torch.tensor(bounds))] if function is compiled else []
            packed = packed or [(slice(a, b), None) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
            ys = [
                function(
                    *(x if place is None else x[:, place] for x in leaves[:count]), cu_seqlens=cu_seqlens, **more,
                    **options,
                )[0]
                for place, cu_seqlens in packed
            ]  # fmt: skip
            y = torch.cat(ys, 1)
            several.append([y, *torch.autograd.grad(y, leaves, weights)])
        for found, want in zip(*several, strict=True):
            assert (found - want).abs().max() < 1e-12
            assert want.any()
    assert counter.frame_count == 1
