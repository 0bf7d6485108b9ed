"""Derived ops launch the same in every kind of call, and a known call takes few functions of the package.

Sequences first, then calls over a pool of states.
"""

import functools

import derived_cases
import launch_calls
import pytest
import torch
from stub_driver import frames
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.kernels import signatures

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
MOST_FRAMES = {"forward": 11, "with gradients": 12, "backward": 8}
MOST_FRAMES_OVER_A_POOL = 12


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


@EACH
@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 20])
def test_no_launch_reads_more_at_once_than_an_address_allows(op, how, tokens, offset, on_gpu):
    """Whatever gradients are wanted: launches that remain read what those of other gradients may not."""
    on_gpu.use("sm_90")
    case = derived_cases.make(op, how, (1, tokens, 2, 2, 96, 96), torch.float16, has_state=False)
    moved = {}
    for name, x in case.tensors.items():
        memory = torch.zeros(x.numel() + offset, dtype=x.dtype)
        moved[name] = memory[offset:].view(x.shape)
    rows = {x.data_ptr(): name for name, x in moved.items() if x.dim() > 1 and x.shape[-1] == 96}
    for wanted in moved:
        leaves = {name: x.detach().requires_grad_(name == wanted) for name, x in moved.items()}
        y, _ = case.replaced(leaves).run()
        torch.autograd.grad(y, leaves[wanted], torch.ones_like(y), allow_unused=True)
        for launch in on_gpu.take():
            read = [x for x in launch.named.values() if isinstance(x, int) and x in rows]
            for address in read:
                width = 2 * launch.parameters.get("VECTOR", 1)
                assert address % width == 0, (wanted, launch.template, rows[address])


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


# ---- over a pool of states ---------------------------------------------------------------------------------------

CASES = pytest.mark.parametrize(("op", "how"), derived_cases.ALL)
# Sequences, tokens, heads of keys and of values, head sizes; bounds of packed ones. One token is without T, and packed
# ones are without B.
POOLS = {
    "one token": ((3, 1, 2, 4, 64, 64), None),
    "several tokens": ((3, 4, 1, 8, 64, 64), None),
    "varlen": ((1, 40, 2, 4, 64, 64), [0, 2, 10, 40]),
    "short varlen": ((1, 6, 2, 4, 64, 64), [0, 2, 2, 6]),
}


def over_pool(op, how, model, has_indices=True, dtype=torch.bfloat16, wide=torch.float32):
    """Return a case, and what runs it over a pool."""
    sizes, bounds = POOLS[model]
    case = derived_cases.make(op, how, sizes, dtype, wide, torch.float32, has_state=False)
    case = case.part((slice(None), 0)) if sizes[1] == 1 else case.part(0) if bounds else case
    pool = torch.zeros(5, *((4, 64, 64) if sizes[3] == 4 else (8, 64, 64)))
    options = {"state_indices": torch.tensor([4, 0, 2])} if has_indices else {}
    verb = "varlen" if bounds else "update"
    options |= {"cu_seqlens": torch.tensor(bounds)} if bounds else {}
    return case, functools.partial(derived_cases.pooled, kind=verb, pool=pool, **options)


@CASES
@pytest.mark.parametrize("model", POOLS)
@pytest.mark.parametrize("has_indices", [True, False], ids=["slots", "rows"])
def test_launches_over_a_pool_are_those_of_the_first_call(op, how, model, has_indices, on_gpu):
    on_gpu.use("sm_90")
    case, run = over_pool(op, how, model, has_indices)
    found = []
    for mode in (None, None, Passes, functools.partial(FlopCounterMode, display=False)):
        on_gpu.take()
        if mode is None:
            run(case)
        else:
            signatures.forget()
            with mode():
                run(case)
        found.append(launch_calls.lines(on_gpu.take()))
    launches = [line.split()[0].partition(":")[0] for line in found[0]]
    assert found == [found[0]] * len(found)
    if model != "varlen":
        assert launches == [*(["arrange_sequences"] if POOLS[model][1] else []), "update_rules"]
    elif op in ("kda", "gated_delta_rule2", "hgrn2"):  # of heads of 64, for which they have no dedicated kernels
        operands = "diagonal_operands" if op == "hgrn2" else "layer_delta_operands"
        assert (launches[0], launches[-1]) == (operands, "update_states")
        assert "arrange_sequences" in launches
    else:
        steps = ["head_steps"] if op == "ssd" and ("limit" in how or "softplus" not in how) else []
        gate = ["skip_gate_slots"] if "z" in case.parameters else []
        assert launches == ["arrange_sequences", *steps, "head_decay_group_forward", "update_rules", *gate]


@pytest.mark.parametrize(
    ("op", "how", "forward"),
    [
        ("kda", "raw bias sigmoid norm", "channel_decay_group_forward"),
        ("gated_delta_rule", "raw bias sigmoid norm", "head_decay_group_forward"),
        ("ssd", "D bias softplus", "head_decay_group_forward"),
    ],
)
def test_prompts_beside_decodes_are_three_launches(op, how, forward, on_gpu):
    """Over the pool: the forward reads inputs, and reads and writes slots, beside the launch for short sequences."""
    on_gpu.use("sm_90")
    bounds = torch.tensor([0, 1, 2, 902, 2000])
    sizes = (1, 2000, 16, 32, 128, 128 if op != "ssd" else 64)
    case = derived_cases.make(op, how, sizes, torch.bfloat16, torch.float32, torch.float32, has_state=False)
    pool = torch.zeros(6, 32, 128, sizes[-1]) if op != "ssd" else torch.zeros(6, 32, 64, 128)
    slots = torch.tensor([5, 2, 0, 3])
    for _ in range(2):
        y = derived_cases.pooled(case, "varlen", pool, cu_seqlens=bounds, state_indices=slots)
        arrange, chunks, few = on_gpu.take()
        assert [x.template for x in (arrange, chunks, few)] == ["arrange_sequences", forward, "update_rules"]
        assert arrange.stream == few.stream != chunks.stream
        assert (chunks.grid[:2], few.grid[1]) == ((4, 32), 4)
        assert (chunks.parameters["POOLED"], few.parameters["PACKED"]) == (True, True)
        assert chunks.addresses["initial_state"] == chunks.addresses["final_state"] == pool.data_ptr()
        assert chunks.named["slot_stride"] == pool.stride(0)
        assert chunks.addresses["pieces"] == arrange.addresses["pieces"] == few.addresses["pieces"]
        assert chunks.addresses["cu_seqlens"] == arrange.addresses["bounds"] == few.addresses["bounds"]
        for launch in (chunks, few):
            assert launch.addresses["y"] == y.data_ptr()
            assert launch.addresses["v"] == case.inputs["x" if op == "ssd" else "v"].data_ptr()


def test_one_long_prompt_is_shared_between_blocks(on_gpu):
    on_gpu.use("sm_90")
    sizes = (1, 16384, 16, 32, 128, 128)
    case = derived_cases.make("gated_delta_rule", "norm", sizes, torch.bfloat16, torch.float32, has_state=False)
    pool = torch.zeros(2, 32, 128, 128)
    derived_cases.pooled(case, "varlen", pool, cu_seqlens=torch.tensor([0, 16384]))
    arrange, walks, copy, forward, few = on_gpu.take()
    assert [x.template for x in (walks, copy, few)] == ["head_decay_walks", "copy_states", "update_rules"]
    assert forward.grid == (8, 32, 1)
    assert copy.addresses["from"] == forward.addresses["final_state"] == pool.data_ptr()
    assert copy.addresses["to"] == forward.addresses["initial_state"]
    assert walks.addresses["cu_seqlens"] == arrange.addresses["bounds"]


@pytest.mark.parametrize("longest", [None, 16384])
def test_few_heads_of_long_prompts_go_in_segments_of_the_op_below(longest, on_gpu):
    on_gpu.use("sm_90")
    sizes = (1, 16384, 2, 2, 128, 128)
    case = derived_cases.make("gated_delta_rule", "norm", sizes, torch.bfloat16, torch.float32, has_state=False)
    bounds = torch.tensor([0, 16380, 16384])
    derived_cases.pooled(case, "varlen", torch.zeros(2, 2, 128, 128), cu_seqlens=bounds, max_seqlen=longest)
    templates = [x.template for x in on_gpu.take()]
    assert ("wkv7_segment" in templates, "head_decay_group_forward" in templates) == (bool(longest), not longest)


# What each op may have beside its inputs, by words: alone, and all together.
GATES = ("raw", "raw bias", "bounded", "bounded bias", "bounded flat bias")
BESIDE = {
    "kda": ("norm", "sigmoid", "twice_sigmoid", *GATES, "norm sigmoid bounded bias"),
    "gated_delta_rule": ("norm", "sigmoid", "twice_sigmoid", "raw", "raw bias", "norm sigmoid raw bias"),
    "delta_rule": ("norm", "sigmoid", "twice_sigmoid", "norm sigmoid"),
    "gated_delta_rule2": ("norm", *GATES, "norm bounded bias"),
    "simple_gla": ("fixed",),
    "hgrn2": (),
    "ssd": ("D", "wide", "z", "bias", "softplus", "limit", "wide z bias softplus limit"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "how"), [(op, how) for op, several in BESIDE.items() for how in ("", *several)])
@pytest.mark.parametrize("model", ["one token", "several tokens"])
@pytest.mark.parametrize("has_indices", [True, False], ids=["slots", "rows"])
def test_an_update_is_one_launch(op, how, model, has_indices, on_gpu):
    """Of all that a call has, and of nothing else; of other strides, types and layouts too."""
    on_gpu.use("sm_90")
    case, run = over_pool(op, how, model, has_indices)
    apart = case.replaced({name: torch.stack([x, x], -2)[..., 0, :] for name, x in case.tensors.items()})
    streamed = {name for name in case.tensors if case.tensors[name].shape[:1] == (3,)}
    apart = case.replaced({name: (apart if name in streamed else case).tensors[name] for name in case.tensors})
    layout = "kv" if rwkv_jit.schedules.table.ALL[op].state_layout == "vk" else "vk"
    for each, options in (
        (case, {}), (apart, {}), (case, {"pool": run.keywords["pool"].half()}), (case, {"state_layout": layout}),
    ):  # fmt: skip
        y = run(each, **options)
        (launch,) = on_gpu.take()
        assert launch.template == "update_rules"
        given = {x.data_ptr() for x in (*each.tensors.values(), y)}
        given |= {x.data_ptr() for x in ({**run.keywords, **options}[name] for name in ("pool", "state_indices")
                                         if name in {**run.keywords, **options})}  # fmt: skip
        assert {x for x in launch.addresses.values() if x} == given


@CASES
@pytest.mark.parametrize("model", POOLS)
def test_a_known_call_over_a_pool_enters_few_functions_and_runs_no_op_of_torch(op, how, model, on_gpu):
    on_gpu.use("sm_90")
    case, run = over_pool(op, how, model)
    for _ in range(3):
        count, _ = frames(lambda: run(case))
    assert count <= MOST_FRAMES_OVER_A_POOL
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(case)
    ops = {event.name for event in profile.events() if event.name.startswith("aten::")}
    assert ops <= {"aten::empty", "aten::empty_strided"}


@CASES
@pytest.mark.parametrize("model", POOLS)
def test_a_known_call_over_a_pool_launches_what_is_its_own(op, how, model, on_gpu):
    on_gpu.use("sm_90")
    case, run = over_pool(op, how, model)
    run(case)
    on_gpu.take()
    other = case.replaced({name: x.clone() for name, x in case.tensors.items()})
    y = run(other)
    used = {address for launch in on_gpu.take() for address in launch.addresses.values()}
    inputs = {name: x.data_ptr() for name, x in {**other.tensors, "y": y}.items()}
    assert {name for name, address in inputs.items() if address not in used} == set()
    assert not used & {x.data_ptr() for x in case.tensors.values()}


OTHER_CALLS = [
    ("kda", "raw bias sigmoid norm", "qk_norm", False), ("kda", "raw bias sigmoid norm", "beta_map", "identity"),
    ("kda", "bounded flat bias norm", "lower_bound", -3.0), ("kda", "raw bias sigmoid norm", "dt_bias", None),
    ("gated_delta_rule", "raw bias sigmoid norm", "A_log dt_bias", None), ("ssd", "D z bias softplus", "D", None),
    ("ssd", "D z bias softplus", "z", None), ("ssd", "D z bias softplus", "dt_softplus", False),
    ("ssd", "D z bias softplus", "dt_bias", None), ("ssd", "wide z limit", "dt_limit", (0.1, 0.5)),
    ("ssd", "wide z limit", "D", "of heads"), ("simple_gla", "", "g", "fixed"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "how", "names", "value"), OTHER_CALLS)
@pytest.mark.parametrize("model", ["one token", "varlen"])
def test_switches_and_absent_tensors_tell_calls_apart(op, how, names, value, model, on_gpu):
    """Each launches what it does alone, in turns too; both stay known, but where a tensor alone has another shape."""
    on_gpu.use("sm_90")
    one, run = over_pool(op, how, model)
    other = one
    for name in names.split():
        if value == "fixed":
            other = other._replace(inputs=other.inputs | {name: -torch.rand(4)})
        elif name in other.parameters:
            left = {key: x for key, x in other.parameters.items() if key != name}
            other = other._replace(parameters=left if value is None else left | {name: torch.randn(4)})
        else:
            other = other._replace(options=other.options | {name: value})
    alone = []
    for case in (one, other):
        signatures.forget()
        on_gpu.take()
        run(case)
        alone.append(launch_calls.lines(on_gpu.take()))
    assert alone[0] != alone[1]
    for turn in range(3):
        for case, want in ((one, alone[0]), (other, alone[1])):
            count, _ = frames(lambda case=case: run(case))
            assert launch_calls.lines(on_gpu.take()) == want
            assert turn == 0 or value in ("fixed", "of heads") or count <= MOST_FRAMES_OVER_A_POOL


@EACH
@pytest.mark.parametrize("model", POOLS)
def test_memory_that_kernels_cannot_read_at_once_is_copied(op, how, model, on_gpu):
    """In known calls too, whose tensors may be without a dimension of 1."""
    on_gpu.use("sm_90")
    case, run = over_pool(op, how, model)

    def moved(x):
        memory = torch.empty(x.numel() + 1, dtype=x.dtype)
        return memory[1:].view(x.shape).copy_(x)

    shifted = case.replaced({name: moved(x) for name, x in case.tensors.items()})
    found = []
    for several in ((case,), (shifted,), (case, shifted)):
        signatures.forget()
        for each in several:
            on_gpu.take()
            run(each)
        found.append(launch_calls.lines(on_gpu.take()))
    assert found[1:] == [found[0]] * 2


@CASES
@pytest.mark.parametrize("model", POOLS)
def test_a_graph_over_a_pool_has_one_op_of_the_package(op, how, model):
    case, run = over_pool(op, how, model, dtype=torch.float32)
    names = list(case.tensors)
    graph = make_fx(lambda *given: run(case.replaced(dict(zip(names, given, strict=True)))))(*case.tensors.values())
    ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "rwkv" in str(node.target)]
    assert ops == [f"rwkv_jit.{'varlen' if 'varlen' in model else 'update'}_states.default"]


@EACH
@pytest.mark.parametrize("model", ["one token", "varlen"])
def test_compiled_calls_over_a_pool_are_the_call(op, how, model):
    torch._dynamo.reset()
    case, run = over_pool(op, how, model, dtype=torch.float32)
    eager, compiled = run.keywords["pool"].clone(), run.keywords["pool"].clone()
    want = run(case, pool=eager)
    function = getattr(rwkv_jit, f"{op}_{run.keywords['kind']}")
    rest = {name: x for name, x in run.keywords.items() if name not in ("kind", "pool")}
    with torch.no_grad():
        found = torch.compile(function, fullgraph=True, backend="aot_eager")(
            compiled, *case.inputs.values(), **case.parameters, **case.options, **rest
        )
    assert torch.equal(found, want)
    assert torch.equal(compiled, eager)
    assert eager.any()


@EACH
@pytest.mark.parametrize("model", POOLS)
def test_operations_over_a_pool_are_those_of_the_op(op, how, model, on_gpu):
    on_gpu.use("sm_90")
    sizes, _ = POOLS[model]
    case, run = over_pool(op, how, model)
    whole = derived_cases.make(op, how, sizes, torch.bfloat16, torch.float32, torch.float32, has_state=False)
    counts = []
    for call in (lambda: run(case), whole.run):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
