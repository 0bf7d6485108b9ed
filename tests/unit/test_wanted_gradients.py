"""Gradients that nobody asks for: which launches of a backward are left, and who says what is wanted."""

import itertools
from collections import Counter

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from problems import is_by_halves, problem
from stub_driver import called
from torch._subclasses.fake_tensor import FakeTensorMode

import rwkv_jit
from rwkv_jit.call import prepared, torch_op
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.problem import STATE
from rwkv_jit.schedules.table import OPS

RECURRENCES = ("wkv7", "wkv6", "wkv5", "gla", "linear_attention")
HALF = torch.bfloat16
# By the family: architecture, tokens, sizes of keys and values, options.
WAYS = {
    "delta": {
        "recurrent": ("sm_80", 40, 16, 24, {"backend": "recurrent"}),
        "chunked": ("sm_80", 40, 16, 24, {"backend": "chunked"}),
        "chunked groups": ("sm_90", 40, 64, 64, {"backend": "chunked"}),
        "large": ("sm_80", 70, 200, 136, {"backend": "split"}),
        "large groups": ("sm_90", 70, 200, 136, {"backend": "split"}),
        "large in parts": ("sm_90", 64 * 130, 256, 256, {"backend": "split", "chunk_len": 64}),
        "segments": ("sm_80", 2048, 16, 24, {"backend": "split"}),
        "segments ragged": ("sm_80", 2500, 16, 24, {"backend": "split"}),
        "large segments": ("sm_90", 2**15, 256, 256, {"backend": "split"}),
    },
    "diagonal": {
        "recurrent": ("sm_80", 40, 16, 24, {"backend": "recurrent"}),
        "chunked": ("sm_80", 40, 16, 24, {"backend": "chunked"}),
        "large": ("sm_80", 70, 200, 304, {"backend": "split"}),
        "large groups": ("sm_90", 70, 200, 304, {"backend": "split"}),
        "segments": ("sm_80", 1280, 16, 24, {"backend": "split"}),
        "segments ragged": ("sm_80", 2500, 16, 24, {"backend": "split"}),
        "large segments": ("sm_90", 2**15, 256, 256, {"backend": "split"}),
    },
}
EACH = pytest.mark.parametrize(("op", "way"), [(op, way) for op in RECURRENCES for way in WAYS[OPS[op].family]])


def make(op, tokens, size, value_size, dtype=HALF, state_dtype=torch.float32):
    """The inputs of a call by the names that kernels give them, and an initial state."""
    sizes = {"B": 1, "T": tokens, "H": 1, "K": size, "V": value_size}
    given = {name: torch.randn([sizes[dim] for dim in dims]).to(dtype) for name, dims in OPS[op].inputs.items()}
    return {**given, STATE: torch.randn(1, 1, value_size, size).to(state_dtype)}


def run(op, given, wanted, **options):
    """y of a call with a state in the vk layout, and its leaves."""
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given.items()}
    decay = {} if op == "linear_attention" else {"decay": "sigmoid"}
    y, _ = getattr(rwkv_jit, op)(*leaves.values(), **{"state_layout": "vk", **decay, **options})
    return y, leaves


def differentiate(on_gpu, op, given, wanted, **options):
    """The gradients by name, and the launches of the backward."""
    y, leaves = run(op, given, wanted, **options)
    on_gpu.take()
    y.backward(torch.ones_like(y))
    return {name: x.grad for name, x in leaves.items()}, on_gpu.take()


def subsets(op):
    """What may be wanted: each alone, all but each, and values beside the state."""
    names = (*OPS[op].names, STATE)
    others = [set(names) - {name} for name in names]
    return [*({name} for name in names), *others, {"v", STATE}, set(OPS[op].names) - {"v"}]


def names(launches):
    return Counter(x.template for x in launches if not is_by_halves(x.template, x.parameters))


def expected(op, way, every, wanted):
    """The launches that are left of those for all gradients."""
    fixed, is_large = set(OPS[op].fixed), way.startswith("large")
    left = Counter(every)
    if is_large and wanted <= {"v", STATE}:  # what makes those of the keys' side
        left = Counter({name: count for name, count in left.items() if "gradients" not in name})
    if STATE not in wanted:
        del left["copy_states"]
    if fixed:
        left["sum_rows"] = left["sum_rows"] // len(fixed) * len(fixed & wanted)
        left["sum_buffers"] = bool(fixed & wanted)
    return +left


@EACH
def test_launches_that_serve_nothing_that_is_wanted_are_left_out(op, way, on_gpu):
    arch, tokens, size, value_size, options = WAYS[OPS[op].family][way]
    on_gpu.use(arch)
    for state_dtype in (torch.float32, HALF) if tokens < 2000 else (torch.float32,):
        given = make(op, tokens, size, value_size, state_dtype=state_dtype)
        _, in_all = differentiate(on_gpu, op, given, set(given), **options)
        kernels = [(launch.template, launch.parameters) for launch in in_all]
        for wanted in subsets(op):
            grads, launches = differentiate(on_gpu, op, given, wanted, **options)
            assert {name for name, grad in grads.items() if grad is not None} == wanted
            written = {address for launch in launches for address in launch.addresses.values()}
            assert {grads[name].data_ptr() for name in wanted} <= written
            if wanted == {STATE} and way.startswith(("chunked", "segments")):  # which has kernels of its own
                assert names(launches).keys() <= {f"{OPS[op].stem}_{x}" for x in ("segment", "join")} | {"copy_states"}
                continue
            assert names(launches) == expected(op, way, names(in_all), wanted), wanted
            assert all((launch.template, launch.parameters) in kernels for launch in launches)


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "linear_attention"])
def test_what_large_heads_leave_behind_for_other_gradients_is_not_written(op, on_gpu):
    on_gpu.use("sm_90")
    given = make(op, 70, 200, 304)
    for wanted in ({"v"}, {STATE}, {"k"}):
        grads, launches = differentiate(on_gpu, op, given, wanted, backend="split")
        walk = launches[0].named
        assert bool(walk["states"]) == ("k" in wanted)
        assert walk["last"] == (grads[STATE].data_ptr() if STATE in wanted else 0)
        assert walk["output"] != 0


def test_what_follows_a_walk_beside_the_call_waits_for_it():
    """Also where the launches that waited are left out."""
    p = problem(
        "wkv7", K=256, T=64 * 130, H=2, backend="large", chunk_len=64, training=True, has_initial_state=True,
        state_type="bf16",
    )  # fmt: skip
    p = p._replace(gpu=p.gpu._replace(multiprocessors=132))
    for wanted in ((), ("v", STATE)):
        *others, copy = directions.backward(p._replace(wanted=wanted)).launches
        assert (copy.template, copy.is_beside, copy.waits) == ("copy_states", False, bool(wanted))
        assert [step.template for step in others if step.is_beside] == ["wkv7_group_scan"] * 4
        assert len(others) == (4 if wanted else 4 * 4)
        assert any(step.waits and not step.is_beside for step in others) == (not wanted)


def test_of_launches_that_are_left_one_is_the_main_one():
    """Where it was that by halves, behind all that is left: a message about a geometry names what is legal for it."""
    p = problem(
        "wkv7", backend="segments", chunk_len=32, training=True, has_initial_state=True, is_narrow=True, few_heads=True
    )
    every, alone = directions.backward(p), directions.backward(p._replace(wanted=(STATE,)))
    assert every.launches[every.main].template == "wkv7_group_backward"
    assert every.main >= len(alone.launches)
    assert alone.launches[alone.main]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("op", "arch"), itertools.product(RECURRENCES, ("sm_80", "sm_90")))
def test_rows_are_widened_again_of_gradients_that_are_wanted_alone(op, arch, dtype, on_gpu):
    """A launch each, and for what has no tokens its sum too."""
    on_gpu.use(arch)
    torch.set_float32_matmul_precision("high")
    rwkv_jit.set_bfloat16_precision("high")
    try:
        for size in (40, 200):
            given = make(op, 70, size, size, dtype)
            _, in_all = differentiate(on_gpu, op, given, set(given))
            every = Counter(launch.entry for launch in in_all)
            assert every["narrow_rows"] == len(given) + 1  # dy too
            for wanted in subsets(op):
                _, launches = differentiate(on_gpu, op, given, wanted)
                left = Counter(launch.entry for launch in launches)
                assert left["narrow_rows"] == len(wanted) + 1, wanted
                has_keys = any("key_gradients" in launch.entry for launch in launches)
                assert has_keys == (size == 200 and not wanted <= {"v", STATE})
    finally:
        rwkv_jit.set_bfloat16_precision("medium")
        torch.set_float32_matmul_precision("highest")


def test_sums_of_wkv4_that_nobody_wants_are_left_out(on_gpu):
    shapes = {"w": (3,), "u": (3,), "k": (2, 70, 3), "v": (2, 70, 3), STATE: (2, 3, 3)}
    for wanted in ({"w"}, {"u"}, {"k", "v"}, {STATE}, {"w", "u", "k", "v"}, set(shapes)):
        leaves = {name: torch.randn(shape).requires_grad_(name in wanted) for name, shape in shapes.items()}
        y, _ = rwkv_jit.wkv4(*leaves.values())
        on_gpu.take()
        y.backward(torch.ones_like(y))
        walk, *sums = on_gpu.take()
        written = [launch.named[f"sums{place}"] for launch in sums for place in range(5)]
        assert [x for x in written if x] == [leaves[x].grad.data_ptr() for x in "wu" if x in wanted]
        assert len(sums) == bool({"w", "u"} & wanted)
        assert walk.named["grad_initial"] == (leaves[STATE].grad.data_ptr() if STATE in wanted else 0)
        assert {name for name, x in leaves.items() if x.grad is not None} == wanted


# ---- calls that are known ----------------------------------------------------------------------------------------


@EACH
def test_known_backward_of_some_gradients_runs_as_little_python_as_that_of_all(op, way, on_gpu):
    arch, tokens, size, value_size, options = WAYS[OPS[op].family][way]
    on_gpu.use(arch)
    given, counts = make(op, tokens, size, value_size), []
    for wanted in (set(given), {"v"}, {"v"} | {"r"}):
        y, leaves = run(op, given, wanted, **options)
        asked, dy = [x for x in leaves.values() if x.requires_grad], torch.ones_like(y)

        def backward(y=y, asked=asked, dy=dy):
            torch.autograd.grad(y, asked, dy, retain_graph=True)

        backward()
        counts.append(len(called(backward)))
    assert max(counts) <= counts[0]
    assert counts[0] <= 8 or way == "large in parts"  # which are on two streams


@pytest.mark.parametrize("op", RECURRENCES)
def test_a_call_with_other_wishes_is_another_one(op, on_gpu, monkeypatch):
    """By the latest call and by the signature too; a forward asks for the kernels of its own backward alone."""
    on_gpu.use("sm_90")
    given, expecting = make(op, 70, 200, 200), {}
    run(op, given, {"v"}, backend="split")
    assert not any("key_gradients" in request.template.name for request in on_gpu.asked)
    for wanted in subsets(op):
        expecting[tuple(sorted(wanted))] = names(differentiate(on_gpu, op, given, wanted, backend="split")[1])
    monkeypatch.setattr(torch_op, "check_tensors", lambda *_: pytest.fail("it was checked again"))
    for forgets_latest in (False, True):
        if forgets_latest:
            monkeypatch.setattr(prepared._latest, "get", lambda _: None)
        for wanted in subsets(op):
            grads, launches = differentiate(on_gpu, op, given, wanted, backend="split")
            assert names(launches) == expecting[tuple(sorted(wanted))]
            assert {name for name, grad in grads.items() if grad is not None} == wanted


# ---- by way of the torch op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", RECURRENCES)
def test_torch_op_makes_what_it_is_asked_for(op, on_gpu):
    """As a graph of gradients does; its fake says the same."""
    on_gpu.use("sm_90")
    given = make(op, 70, 200, 200)
    for wanted in subsets(op):
        y, leaves = run(op, given, wanted, backend="split")
        asked = {name: x for name, x in leaves.items() if x.requires_grad}
        on_gpu.take()
        torch.autograd.grad(y, [*asked.values()], torch.ones_like(y), retain_graph=True)
        direct = names(on_gpu.take())
        grads = torch.autograd.grad(y, [*asked.values()], torch.ones_like(y), create_graph=True)
        assert names(on_gpu.take()) == direct
        assert [x.shape for x in grads] == [x.shape for x in asked.values()]
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(grads[0].sum(), [*asked.values()])


def options_of(op):
    decay = OPS[op].decay if OPS[op].decay == "none" else "sigmoid"
    return (1.0, decay, "vk", 64, None, None, "auto", None, None, False, False, False)


@pytest.mark.parametrize("op", RECURRENCES)
def test_fake_of_the_torch_op_promises_what_it_returns(op):
    back = getattr(torch.ops.rwkv_jit, f"{op}_bwd")
    given = make(op, 40, 8, 12, torch.float32)
    for state, wanted in itertools.product((given[STATE], None), ("", "v", f"r {STATE}", "k v")):
        arguments = *[*given.values()][:-1], state, None, torch.empty(0), torch.randn(1, 40, 1, 12), None
        found = back(*arguments, *options_of(op), wanted=wanted)
        with FakeTensorMode() as mode:
            of_fakes = [None if x is None else mode.from_tensor(x) for x in arguments]
            fakes = back(*of_fakes, *options_of(op), wanted=wanted)
        asked = wanted.split() or [*given]
        there = {name: x for name, x in given.items() if name in asked and (name != STATE or state is not None)}
        assert [x.shape for x in found] == [x.shape for x in fakes]
        assert [x.shape for x in found] == [there[name].shape if name in there else (0,) for name in given]


@pytest.mark.parametrize("op", RECURRENCES)
def test_graph_of_a_compiler_asks_for_what_is_wanted(op):
    seen = []

    def note(graph, _):
        nodes = [x for x in graph.graph.nodes if x.op == "call_function" and str(x.target).endswith("_bwd.default")]
        seen.extend(x.kwargs.get("wanted", "") for x in nodes)
        return make_boxed_func(graph.forward)

    def call(*given):
        return getattr(rwkv_jit, op)(*given, state_layout="vk")[0]

    given = make(op, 40, 8, 12, torch.float32)
    given["w"] = -given["w"].abs() if "w" in given else None
    given = {name: x for name, x in given.items() if x is not None}
    for wanted in ({"v"}, {"v", "k"}, set(given)):
        leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given.items()}
        asked = [x for x in leaves.values() if x.requires_grad]
        y = aot_function(call, make_boxed_func_of, note)(*leaves.values())
        grads = torch.autograd.grad(y, asked, torch.ones_like(y))
        want = torch.autograd.grad(call(*leaves.values()), asked, torch.ones_like(y))
        assert all(torch.equal(one, other) for one, other in zip(grads, want, strict=True))
        assert seen.pop() == ("" if len(wanted) == len(given) else " ".join(x for x in given if x in wanted))


def make_boxed_func_of(graph, _):
    return make_boxed_func(graph.forward)


# ---- in plain torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("op", RECURRENCES)
def test_gradients_in_plain_torch_are_those_of_all(op, tokens):
    given = make(op, tokens, 8, 12, torch.float32)
    dy = torch.randn(1, tokens, 1, 12)
    every = {}
    for wanted in (set(given), *subsets(op)):
        y, leaves = run(op, given, wanted)
        y.backward(dy)
        every = every or {name: x.grad for name, x in leaves.items()}
        for name, x in leaves.items():
            assert (x.grad is not None) == (name in wanted)
            assert x.grad is None or torch.equal(x.grad, every[name])


def test_torch_func_asks_for_one_gradient(on_gpu):
    on_gpu.use("sm_90")
    given = make("wkv6", 70, 200, 200)

    def loss(v):
        return run_as_they_are("wkv6", {**given, "v": v}).float().sum()

    grad = torch.func.grad(loss)(given["v"])
    assert grad.shape == given["v"].shape
    assert not any("gradients" in launch.template for launch in on_gpu.take())


def run_as_they_are(op, given):
    return getattr(rwkv_jit, op)(*given.values(), decay="sigmoid", state_layout="vk", backend="split")[0]
