"""Few heads without gradients, on GPUs where the kernels for large heads are faster for them: against float64."""

import comparing
import pytest
import torch

import rwkv_jit

make_inputs, relative = comparing.make_inputs, comparing.relative
GATE = 6e-3  # in bfloat16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

pytestmark = [
    pytest.mark.parametrize("op", comparing.NAMES),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="on an sm_90 alone"
    ),
]


def detached(given):
    return {name: x.detach() for name, x in given.items()}


def check(op, given, state=None, launched=None, **options):
    """Compare y and the final state of a call with float64."""
    given = detached(given)
    state = None if state is None else state.detach()
    y, final = getattr(rwkv_jit, op)(*given.values(), initial_state=state, output_final_state=True, **options)
    if launched is not None:
        assert {kernel.name.partition("_")[2] for kernel in launched} <= {"prepare", "group_scan", "scan"}
        assert any(kernel.name.endswith("prepare") for kernel in launched)
    exact = {name: x.double() for name, x in given.items()}
    exact_state = None if state is None else state.double()
    exact_options = {name: x for name, x in options.items() if name != "decay_bound"}
    want_y, want_final = getattr(rwkv_jit, f"{op}_ref")(
        *exact.values(), initial_state=exact_state, output_final_state=True, **exact_options
    )
    of_rows = comparing.digits(given["v"].dtype, y.dtype)
    assert relative(y, want_y) <= GATE / of_rows
    assert relative(final, want_final) <= GATE / comparing.digits(given["v"].dtype, final.dtype)
    return y, final


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [192, 200, 256, 333])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 40), (100, 72), (37, 128), (96, 33), (1, 8)], ids=str)
def test_every_size(op, sizes, tokens, dtype, launched):
    heads = 24 if sizes[0] == 1 else 3  # as many as few are: states of one key are few numbers, and errors average out
    given = make_inputs(op, DTYPES[dtype], 2, tokens, heads, *sizes)
    check(op, given, comparing.make_state(given, 2), launched, state_layout="vk")


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decays", ["none", "usual", "fast", "mixed", "-5 or 0", "-20 or 0"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_every_decay(op, head_size, decays, launched):
    given = make_inputs(op, torch.bfloat16, 1, 320, 5, head_size, decays=decays)
    check(op, given, comparing.make_state(given, 1), launched, state_layout="vk")


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_of_every_kind(op, state_dtype, layout, launched):
    given = make_inputs(op, torch.bfloat16, 2, 210, 3)
    check(op, given, comparing.make_state(given, 2, state_dtype, layout), launched, state_layout=layout)


@pytest.mark.parametrize("heads", [1, 16, 40])
def test_as_many_heads_as_take_them(op, heads, launched):
    given = make_inputs(op, torch.bfloat16, 1, 700, heads)
    check(op, given, None, launched)


@pytest.mark.parametrize("how", comparing.STRIDES)
def test_inputs_of_any_stride(op, how):
    given = make_inputs(op, torch.bfloat16, 2, 200, 3)
    fixed = comparing.FIXED.get(op, "")
    check(op, {name: x if name in fixed else comparing.strided(x, how) for name, x in given.items()})


@pytest.mark.parametrize("decays", ["usual", "mixed"])
def test_packed_sequences_are_the_sequences_one_by_one(op, decays, launched):
    """With empty ones and short ones among them."""
    bounds = [0, 0, 250, 251, 290, 800]
    given = detached(make_inputs(op, torch.bfloat16, 1, 800, 3, decays=decays))
    state = comparing.make_state(given, 5).detach()
    options = {} if op.startswith("wkv") else {"state_layout": "vk"}
    cu_seqlens = torch.tensor(bounds, device="cuda")
    check(op, given, state, launched, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("decays", ["usual", "mixed"])
def test_a_capture_replays_with_other_inputs(op, decays):
    given = detached(make_inputs(op, torch.bfloat16, 1, 320, 5))
    other = detached(make_inputs(op, torch.bfloat16, 1, 320, 5, decays=decays))
    function = getattr(rwkv_jit, op)
    function(*given.values(), output_final_state=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, final = function(*given.values(), output_final_state=True)
    for name, x in given.items():
        x.copy_(other[name])
    y.fill_(float("nan")), final.fill_(float("nan"))
    graph.replay()
    want_y, want_final = check(op, given)
    assert torch.equal(y, want_y)
    assert torch.equal(final, want_final)


def test_whoever_wants_gradients_keeps_less(op, launched):
    """The kernels for large heads would keep four times as much for the backward."""
    given = make_inputs(op, torch.bfloat16, 1, 320, 5)
    y, _ = getattr(rwkv_jit, op)(*given.values())
    y.float().sum().backward()
    assert not any(kernel.name.endswith("prepare") for kernel in launched)


def test_compiled_graphs_give_the_same(op):
    given = detached(make_inputs(op, torch.bfloat16, 1, 320, 5))
    function = getattr(rwkv_jit, op)

    def call(*arrays):
        y, final = function(*arrays, output_final_state=True)
        return y * 2, final

    want = call(*given.values())
    made = torch.compile(call, fullgraph=True)(*given.values())
    assert all(torch.equal(x, w) for x, w in zip(made, want, strict=True))
