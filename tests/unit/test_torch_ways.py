"""What torch does with an op of its own, done with these: derivatives of every kind, export, autocast, counting."""

import json
from concurrent.futures import ThreadPoolExecutor

import differentiable
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.call import recording, tensors
from rwkv_jit.schedules import table

OPS = ("wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex")
SIZES = {"B": 2, "T": 5, "H": 2, "K": 3, "V": 4, "C": 6}
B, T, H, K, V, C = SIZES.values()
SHAPES = {
    name: dict(zip(op.public_names, (tuple(SIZES[dim] for dim in dims) for dims in op.inputs.values()), strict=True))
    for name, op in table.OPS.items()
}


def make(op, dtype=torch.float64, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator, dtype=torch.float64) / 3 for n, s in SHAPES[op].items()}
    if op == "gla":
        made["g"] = -made["g"].abs()
    return {n: x.to(dtype).requires_grad_(grad) for n, x in made.items()}


def output(op, *given, reference=False, **options):
    found = getattr(rwkv_jit, f"{op}_ref" if reference else op)(*given, **options)
    return found if op == "timex" else found[0]


def of_last(op, given, **options):
    """The output as a function of the last input."""
    others = [*given.values()][:-1]
    return lambda x: output(op, *others, x, **options)


def torch_op(op, direction):
    return getattr(torch.ops.rwkv_jit, f"{op}_{direction}").default


def asked(op, packed=None, state=None):
    """What the torch op takes behind the inputs."""
    if op == "timex":
        return (0.5, "auto")
    decay = {"linear_attention": "none", "gla": "log"}.get(op, "raw")
    return (state, packed, 1.0, decay, "vk", 64, None, None, "auto", None, None, False, False, False)


def ends(op):
    return (False,) if op == "timex" else (True, False)


# ---- registration ------------------------------------------------------------------------------------------------


# What names of torch ops need, and nothing of theirs imports torch.
LIGHT = [
    f"rwkv_jit.{name}"
    for name in (
        "call", "call.registry", "kernels", "kernels.errors", "kernels.gpu", "kernels.lazy", "kernels.on_import",
        "schedules",
        "schedules.layer_table", "schedules.legal", "schedules.problem", "schedules.table",
    )
]  # fmt: skip


def test_ops_are_registered_by_the_import_where_torch_is_there(child):
    code = """
import sys
import torch
before = list(sys.meta_path)
import rwkv_jit
print(sum(n.startswith("rwkv_jit::") for n in torch._C._dispatch_get_all_op_names()))
print(*sorted(n for n in sys.modules if n.startswith("rwkv_jit")))
assert not any(n.startswith(("triton", "sympy", "cupy")) for n in sys.modules)
from torch.utils.flop_counter import flop_registry
print(sum(str(op).startswith("rwkv_jit.") for op in flop_registry))
assert sys.meta_path[1:] == before  # behind the one finder that knows of reloads
"""
    done = child(code, after="torch")
    assert done.stdout.splitlines() == ["54", " ".join(["rwkv_jit", *LIGHT]), "32"]


def test_import_without_torch_at_hand_leaves_the_error_to_who_asks_for_it(child):
    done = child("""
import sys
import rwkv_jit
sys.path = []
for _ in range(2):
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error)
""")
    assert done.stdout.splitlines() == ["No module named 'torch'"] * 2


def test_exported_program_is_loaded_by_a_process_that_imports_torch_last(child, tmp_path):
    class Model(torch.nn.Module):  # with names, as torch 2.9 cannot call what it exports of *given
        def forward(self, r, w, k, v, a, b):
            return rwkv_jit.wkv7(r, w, k, v, a, b, output_final_state=True)

    given = tuple(make("wkv7", torch.float32).values())
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(Model(), given, dynamic_shapes=tuple({1: tokens} for _ in given))
    torch.export.save(exported, tmp_path / "model.pt2")
    longer = [torch.cat([x, x], 1) for x in given]
    torch.save(longer, tmp_path / "given.pt")
    done = child(f"""
import sys, json
before = list(sys.meta_path)
import rwkv_jit
assert "torch" not in sys.modules
import torch
import torch.utils.flop_counter
assert sys.meta_path[1:] == before  # behind the one finder that knows of reloads
model = torch.export.load("{tmp_path}/model.pt2").module()
print(json.dumps([x.tolist() for x in model(*torch.load("{tmp_path}/given.pt"))]))
""")
    found = [torch.tensor(x) for x in json.loads(done.stdout)]
    for x, want in zip(found, rwkv_jit.wkv7_ref(*longer, output_final_state=True), strict=True):
        torch.testing.assert_close(x, want)


@pytest.mark.parametrize("op", OPS)
def test_export_keeps_what_was_asked_for_and_no_backend(op):
    class Model(torch.nn.Module):
        def forward(self, *given):
            return output(op, *given)

    given = tuple(make(op, torch.float32, grad=True).values())
    graph = torch.export.export(Model(), given).graph
    (call,) = [node for node in graph.nodes if f"{op}_fwd" in str(node.target)]
    assert "auto" in call.args
    assert "reference" not in call.args
    assert call.args[-1] is False  # nothing is kept for a backward unless one comes when it runs


def test_fakes_of_cuda_tensors_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensors._capability.cache_clear()
    with FakeTensorMode():
        for op in OPS:
            given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES[op].values()]
            assert output(op, *given).shape == given[-1 if op == "timex" else list(SHAPES[op]).index("v")].shape
        wide = [torch.empty(1, 64, 1, 400, dtype=torch.bfloat16, device="cuda")] * 4
        with pytest.raises(rwkv_jit.UnsupportedConfigError, match="arch: there is no GPU, .* set RWKVJIT_ARCH"):
            rwkv_jit.gla(*wide)
        monkeypatch.setenv("RWKVJIT_ARCH", "sm_80")
        assert rwkv_jit.gla(*wide)[0].shape == wide[0].shape


# ---- derivatives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_torch_accepts_the_ops_with_gradients(op):
    given = make(op, torch.float32, grad=True)
    torch.library.opcheck(torch_op(op, "fwd"), (*given.values(), *asked(op), *ends(op)))
    made = torch_op(op, "fwd")(*given.values(), *asked(op), *ends(op))
    if op == "timex":
        arguments = (*given.values(), torch.ones_like(made), 0.5, "auto")
    else:
        dy, grad_final, saved = (torch.ones_like(x).requires_grad_() for x in made)
        state, packed, *options = asked(op)
        arguments = (*given.values(), state, packed, saved, dy, grad_final, *options)
    torch.library.opcheck(torch_op(op, "bwd"), arguments)


@pytest.mark.parametrize("has_final_state", [True, False])
@pytest.mark.parametrize("op", [op for op in OPS if op != "timex"])
def test_what_a_forward_keeps_and_what_it_does_not_return_has_no_gradient(op, has_final_state):
    given = make(op, torch.float32, grad=True)
    made = torch_op(op, "fwd")(*given.values(), *asked(op), has_final_state, False)
    assert [x.requires_grad for x in made] == [True, has_final_state, False]


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("wkv4", "timex")])
def test_torch_accepts_states_and_packed_sequences_with_gradients(op):
    """And inputs whose heads come before their tokens in memory."""
    given = make(op, torch.float32)
    given = [x[:1].transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in given.values()]
    given = [x.requires_grad_() for x in given]
    state = torch.randn(2, H, V, K).bfloat16().requires_grad_()
    more = asked(op, torch.tensor([0, 2, T]), state)
    bound = {} if op == "linear_attention" else {"decay_bound": -3.0}
    torch.library.opcheck(torch_op(op, "fwd"), (*given, *more, True, False))
    torch.library.opcheck(torch_op(op, "fwd"), (*given, *more, False, True), bound)
    y, final, saved = torch_op(op, "fwd")(*given, *more, True, False)
    torch.library.opcheck(
        torch_op(op, "bwd"), (*given, *more[:2], saved, torch.ones_like(y), torch.ones_like(final), *more[2:])
    )


@pytest.mark.parametrize("op", OPS)
def test_transforms_of_torch_func(op):
    given = make(op)
    *_, x = given.values()
    f, exact = of_last(op, given), of_last(op, given, reference=True)
    generator = torch.Generator().manual_seed(1)
    dx = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    weights = torch.randn(f(x).shape, generator=generator, dtype=x.dtype)
    several = torch.stack([x, x / 2, -x.abs()])

    def weighted(f):
        return lambda x: (f(x) * weights).sum()

    for transformed, at in (
        (lambda f: torch.func.grad(weighted(f)), x),
        (lambda f: torch.vmap(torch.func.grad(weighted(f))), several),
        (lambda f: torch.func.grad(lambda xs: (torch.vmap(f)(xs) * weights).sum()), several),
        (lambda f: lambda x: torch.func.jvp(f, (x,), (dx,))[1], x),
        (lambda f: torch.func.grad(lambda x: torch.func.jvp(lambda x: f(x) ** 2, (x,), (dx,))[1].sum()), x),
    ):
        found = transformed(f)(at)
        torch.testing.assert_close(found, transformed(exact)(at))
        assert torch.count_nonzero(found) > 0
    jacobian = torch.func.jacrev(exact)(x)
    torch.testing.assert_close(torch.func.jacrev(f)(x), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(f)(x), jacobian)
    for second in (torch.func.hessian, lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())):
        with pytest.raises(RuntimeError, match=f"{op} has no second derivative; differentiate {op}_ref twice instead"):
            second(lambda x: (f(x) ** 2).sum())(x)


@pytest.mark.parametrize("name", differentiable.ALL)
def test_gradcheck(name):
    """Of all gradients, also where results have none, and of several gradients at once."""
    function, given = differentiable.make(name)
    given = [x.requires_grad_() for x in given]
    torch.autograd.gradcheck(lambda *x: tuple(function(*x)), given, check_batched_grad=True, fast_mode=True)


@pytest.mark.parametrize("name", [name for name in differentiable.ALL if "cross_entropy" not in name])
def test_vmap_over_nothing(name):
    """Of losses, as of torch's own, rows are counted by what there is: torch itself raises."""
    function, given = differentiable.make(name)
    empty = [x.new_zeros(0, *x.shape) for x in given]
    results = torch.vmap(lambda *x: tuple(function(*x)))(*empty)
    assert [x.shape for x in results] == [(0, *x.shape) for x in function(*given)]
    total = torch.func.grad(lambda *x: function(*x)[0].sum(), argnums=tuple(range(len(given))))
    assert [x.shape for x in torch.vmap(total)(*empty)] == [x.shape for x in empty]


@pytest.mark.parametrize("name", differentiable.ALL)
def test_gradients_of_several_gradients_at_once_on_a_gpu(name, on_gpu, monkeypatch):
    """Backwards of a GPU run in a thread of its own, which knows of no vmap."""
    row_by_row = recording._row_by_row

    def in_another_thread(*given):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(row_by_row), *given).result()

    monkeypatch.setattr(recording, "_row_by_row", in_another_thread)
    function, given = differentiable.make(name, torch.float32)
    given = [x.requires_grad_() for x in given]
    results = function(*given)
    on_gpu.take()
    several = [torch.randn(3, *x.shape) for x in results]
    for _ in range(2):
        grads = torch.autograd.grad(results, given, several, is_grads_batched=True, retain_graph=True)
        assert [x.shape for x in grads] == [(3, *x.shape) for x in given]
    together = len(on_gpu.take())
    torch.autograd.grad(results, given, [x[0] for x in several])
    assert together >= 6 * len(on_gpu.take())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_tangents_of_dual_tensors(op, grad):
    given = make(op)
    x = [*given.values()][-1].clone().requires_grad_(grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found, want = (
            forward_ad.unpack_dual(of_last(op, given, reference=reference)(dual)) for reference in (False, True)
        )
        torch.testing.assert_close(found.primal, want.primal)
        torch.testing.assert_close(found.tangent, want.tangent)
        assert torch.count_nonzero(found.tangent) > 0
        assert forward_ad.unpack_dual(of_last(op, given)(x.detach())).tangent is None


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_update_in_place_refuses_derivatives(transform):
    def step(k):
        state = torch.zeros(B, 3, C)
        return rwkv_jit.wkv4_update(state, torch.zeros(C), torch.zeros(C), k, k)

    k = torch.ones(B, C)
    run = {
        "grad": lambda: torch.func.grad(lambda k: step(k).sum())(k),
        "jvp": lambda: torch.func.jvp(step, (k,), (k,)),
    }[transform]
    with pytest.raises(RuntimeError, match="wkv4_update: changes the states in place and has no gradient"):
        run()


# ---- autocast ----------------------------------------------------------------------------------------------------


def mixed(op):
    """What layers make under autocast: bfloat16 and float32 in turn."""
    given = make(op, torch.float32)
    return {n: x.bfloat16() if i % 2 else x for i, (n, x) in enumerate(given.items())}


def cast(op, given, dtype):
    keep = [n for n, s in SHAPES[op].items() if n in "wug"]
    return {n: x if n in keep and x.dtype == torch.float32 else x.to(dtype) for n, x in given.items()}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torch_does(op, dtype):
    given = {n: x.requires_grad_() for n, x in mixed(op).items()}
    want = output(op, *cast(op, given, dtype).values())
    wanted = torch.autograd.grad(want.float().square().sum(), [*given.values()])
    with torch.autocast("cpu", dtype):
        found = output(op, *given.values())
        grads = torch.autograd.grad(found.float().square().sum(), [*given.values()])
    assert found.dtype == dtype
    assert torch.equal(found, want)
    for x, grad, exact in zip(given.values(), grads, wanted, strict=True):
        assert grad.dtype == x.dtype
        torch.testing.assert_close(grad, exact, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("op", OPS)
def test_autocast_under_compilers_and_for_the_op_of_an_exported_program(op):
    given = mixed(op)
    want = output(op, *cast(op, given, torch.bfloat16).values())
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: output(op, *given), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*given.values()), want)
        bare = torch_op(op, "fwd")(*given.values(), *(0.0 if x == 0.5 else x for x in asked(op)), *ends(op))
    bare = bare if op == "timex" else bare[0]
    scale = {"gla": K**-0.5, "linear_attention": K**-0.5}.get(op, 1.0)
    torch.testing.assert_close(bare.float() * scale, want.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("op", OPS)
def test_autocast_leaves_float64_alone_and_the_reference_exact(op):
    given = make(op)
    want = output(op, *given.values())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output(op, *given.values()), want)
    single = make(op, torch.float32)
    y = output(op, *single.values())
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(output(op, *single.values()), y)


def test_autocast_casts_tokens_of_an_update_and_the_values_of_a_normalized_call():
    given = mixed("wkv4")
    w, u, k, v = (*[given[n] for n in "wu"], given["k"][:, 0], given["v"][:, 0])
    states = [torch.randn(B, 3, C).abs() for _ in range(1)] * 2
    states = [x.clone() for x in states]
    want = rwkv_jit.wkv4_update(states[0], w, u.float(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rwkv_jit.wkv4_update(states[1], w, u.float(), k, v), want)
    assert torch.equal(*states)
    q, k, v = (x.abs() for x in mixed("linear_attention").values())
    want = rwkv_jit.linear_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), normalize=True, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = rwkv_jit.linear_attention(q, k, v, normalize=True, output_final_state=True)
    for x, exact in zip((found[0], *found[1]), (want[0], *want[1]), strict=True):
        assert torch.equal(x, exact)


# ---- counting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_flops_are_two_for_each_multiply_add_of_the_definition(op):
    products = {"wkv4": 4 * B * T * C, "timex": B * C * T * (T + 1) // 2}
    products |= {each: (4 if each == "wkv7" else 2) * B * T * H * K * V for each in OPS if each not in products}
    given = make(op, torch.float32, grad=True)
    with FlopCounterMode(display=False) as forward:
        y = output(op, *given.values())
    assert forward.get_total_flops() == 2 * products[op]
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == 4 * products[op]


# ---- DTensors ----------------------------------------------------------------------------------------------------

RANK = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import rwkv_jit

def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for op, shapes in {
        "wkv5": [(3, 5, 3, 4)] * 3 + [(3, 4)] * 2,
        "wkv4": [(3,), (3,), (3, 5, 3), (3, 5, 3)],
        "timex": [(3, 5), (3, 3, 5)],
    }.items():
        full = [torch.randn(s, dtype=torch.float64) / 3 for s in shapes]
        state = {"wkv5": torch.randn(3, 3, 4, 4).double(), "wkv4": torch.rand(3, 3, 3).double()}.get(op)
        dims = {  # of the batch, and of heads or channels
            "wkv5": [(0, 2)] * 3 + [(None, 0)] * 2 + [(0, 1)],
            "wkv4": [(None, 0), (None, 0), (0, 2), (0, 2), (0, 2)],
            "timex": [(None, 0), (0, 1)],
        }[op]
        given = [x.requires_grad_() for x in [*full, *([] if state is None else [state])]]
        more = () if op == "timex" else (True,)
        want = getattr(rwkv_jit, op + "_ref")(*given, *more)
        want = [want] if op == "timex" else [*want]
        exact = torch.autograd.grad(sum(x.square().sum() for x in want), given)
        for role in (None, 0, 1):
            placed = [
                distribute_tensor(
                    x.detach(), mesh, [Replicate() if role is None or d[role] is None else Shard(d[role])]
                ).requires_grad_()
                for x, d in zip(given, dims)
            ]
            found = getattr(rwkv_jit, op)(*placed, *more)
            found = [found] if op == "timex" else [*found]
            for x, y in zip(found, want):
                assert isinstance(x, DTensor) and x.shape == y.shape, (op, role)
                torch.testing.assert_close(x.full_tensor(), y)
            sum(x.square().sum() for x in found).backward()
            for x, grad in zip(placed, exact):
                torch.testing.assert_close(x.grad.full_tensor(), grad)
    x = distribute_tensor(torch.zeros(2, 4, 2, 4), mesh, [Shard(1)])
    ok = distribute_tensor(torch.zeros(2, 4, 2, 4), mesh, [Shard(2)])
    flat = distribute_tensor(torch.zeros(2, 4), mesh, [Replicate()])
    plain = torch.zeros(2, 4, 2, 4)
    for case in ((x, x, x), (ok, plain, ok), (plain, ok, ok), (ok, x, ok)):
        try:
            rwkv_jit.linear_attention(*case)
        except (TypeError, ValueError) as error:
            if rank == 0:
                print(type(error).__name__, str(error)[:100])
    if rank == 0:
        print("done")
    dist.destroy_process_group()

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # threads of torch that still wait for the interpreter when that ends can abort the process
"""


def test_dtensors_are_computed_where_they_are(start, tmp_path):
    """Replicated, cut along the batch, and cut along heads or channels; three of them on two ranks."""
    ranks = [start(RANK, rank, tmp_path / "meeting", after="torch") for rank in range(2)]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    said = [line for line in outputs[0][0].splitlines() if not line.startswith("[Gloo]")]
    for line, start in zip(
        said,
        (
            "ValueError q: expected DTensors placed by Replicate() or Shard(0) (batch) or Shard(2) (heads), got S",
            "TypeError k: expected a DTensor like q, got Tensor",
            "TypeError q: expected a DTensor like another argument, got Tensor",
            "ValueError k: expected a DTensor placed by [",
            "done",
        ),
        strict=True,
    ):
        assert line.startswith(start)
