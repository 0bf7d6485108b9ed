"""An op that the library does not have, on a GPU: its own kernels, launched by the names of their arguments."""

import made_up
import pytest
import torch

GATES = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4.1e-3}  # the last two are one rounding
SIZES = (2, 37, 2, 6, 24, 40)  # batch, tokens, key heads, heads, head sizes of keys and values


def check(given, sequences, state_dtype, *more, **options):
    errors = made_up.errors_of_call(given, sequences, state_dtype, *more, **options)
    gate = max(GATES[x.dtype] for x in given.values())
    gate = max(gate, GATES[state_dtype or torch.float32])
    wrong = {name: error for name, error in errors.items() if not error <= gate}
    assert not wrong, (wrong, gate)


def make_inputs(sizes=SIZES, dtype=torch.float32, g_dtype=None):
    return made_up.make_inputs(sizes, dtype, g_dtype, "cuda", grad=True)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("g_dtype", [None, torch.float32])
@pytest.mark.parametrize("state_dtype", [None, *GATES])
@pytest.mark.parametrize("dtype", GATES)
def test_types(dtype, state_dtype, g_dtype):
    check(make_inputs(SIZES, dtype, g_dtype), SIZES[0], state_dtype)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 3, 12, 8, 8), (2, 0, 2, 4, 8, 8), (3, 5, 1, 3, 7, 100), (1, 300, 4, 4, 64, 64), (2, 9, 2, 8, 128, 33)],
)
def test_sizes(sizes, state_layout):
    check(make_inputs(sizes), sizes[0], torch.float32, state_layout=state_layout)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_packed_sequences(state_dtype):
    bounds = torch.tensor([0, 1, 1, 20, 37], device="cuda")
    check(make_inputs((1, *SIZES[1:])), len(bounds) - 1, state_dtype, bounds, state_layout="kv")


@pytest.mark.parametrize("num_threads", [32, 1024])
def test_inputs_are_read_where_they_lie(num_threads):
    given = make_inputs()
    of_heads = {n: x.detach().transpose(1, 2).contiguous().transpose(1, 2) for n, x in given.items() if x.dim() > 2}
    given |= {name: x.requires_grad_() for name, x in of_heads.items()}
    check(given, SIZES[0], torch.float32, num_threads=num_threads)


def test_compiled_call_and_graph_have_the_same_values():
    given = make_inputs(dtype=torch.bfloat16, g_dtype=torch.float32)
    leaves = [*given.values()]

    def gradients(call):
        return torch.autograd.grad(call(*leaves)[0].float().square().sum(), leaves)

    wanted = gradients(made_up.made_up)
    for x, want in zip(gradients(torch.compile(made_up.made_up, fullgraph=True)), wanted, strict=True):
        torch.testing.assert_close(x, want, rtol=2e-2, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        want, _ = made_up.made_up(*leaves)
        with torch.cuda.graph(graph):
            y, _ = made_up.made_up(*leaves)
        graph.replay()
    assert torch.equal(y, want)
