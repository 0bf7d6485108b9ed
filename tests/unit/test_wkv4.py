"""RWKV-4 without a GPU: the reference against the formula, the op on CPU tensors, its launches on a stub driver."""

import copy
import math

import numpy as np
import pytest
import torch
from problems import problem
from stub_driver import entered

import rwkv_jit
from rwkv_jit.ahead import warm
from rwkv_jit.call import checks, prepared
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import STORAGE_TYPES
from rwkv_jit.schedules import wkv4 as schedules

B, T, C = 2, 7, 5


def make(dtype=torch.float64, batch=B, tokens=T, channels=C, grad=True):
    w, u = torch.linspace(-3, 1, channels, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    k, v = torch.randn(2, batch, tokens, channels, dtype=torch.float64)
    return [x.to(dtype).requires_grad_(grad) for x in (w, u, k, v)]


def make_state(dtype=torch.float64, batch=B, channels=C):
    num, den, top = torch.randn(batch, channels), torch.rand(batch, channels) + 0.1, torch.randn(batch, channels)
    return torch.stack((num, den, top), 1).to(dtype)


def written_out(w, u, k, v, state, decay):
    """The sums as they stand in the formula, without a max."""
    w, u, k, v, state = (x.detach().numpy() for x in (w, u, k, v, state))
    d = -np.exp(w) if decay == "raw" else w
    num, den = np.exp(state[:, 2]) * state[:, 0], np.exp(state[:, 2]) * state[:, 1]
    y = np.empty_like(v)
    for t in range(k.shape[1]):
        now = np.exp(u + k[:, t])
        y[:, t] = (num + now * v[:, t]) / (den + now)
        num, den = np.exp(d) * num + np.exp(k[:, t]) * v[:, t], np.exp(d) * den + np.exp(k[:, t])
    return y, num, den


# ---- the reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["raw", "log"])
def test_reference_is_the_formula(decay):
    given, state = make(), make_state()
    if decay == "log":
        given[0] = -given[0].detach().exp()
    y, final = rwkv_jit.wkv4_ref(*given, state, True, decay)
    want_y, num, den = written_out(*given, state, decay)
    # Where values of both signs cancel, rounding is that of the values.
    np.testing.assert_allclose(y.detach(), want_y, rtol=1e-12, atol=1e-15)
    scale = final[:, 2].exp()
    np.testing.assert_allclose((scale * final[:, 0]).detach(), num, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose((scale * final[:, 1]).detach(), den, rtol=1e-12)


def test_final_max_is_the_largest_exponent():
    w, u, k, v = make()
    _, final = rwkv_jit.wkv4_ref(w, u, k, v, None, True)
    ages = torch.arange(T - 1, -1, -1, dtype=torch.float64).view(1, T, 1)
    torch.testing.assert_close(final[:, 2], (k - ages * w.exp()).amax(1))


def test_reference_gradients_by_finite_differences():
    given, state = make(tokens=5), make_state().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: rwkv_jit.wkv4_ref(*x, True), (*given, state))
    assert torch.autograd.gradgradcheck(lambda *x: rwkv_jit.wkv4_ref(*x)[0], tuple(given))


def test_keys_and_decays_of_any_size_stay_finite():
    w, u, k, v = make(grad=False)
    k, w = (k * 1e4).requires_grad_(), torch.linspace(-50, 50, C, dtype=torch.float64).requires_grad_()
    y, final = rwkv_jit.wkv4_ref(w, u, k, v, None, True)
    for x in (y, final, *torch.autograd.grad(y.sum(), [w, k])):
        assert torch.isfinite(x).all()
    assert (y.detach().abs() <= v.abs().amax(1, keepdim=True) + 1e-12).all()


def test_rounding_does_not_add_up_over_the_tokens():
    """Large keys and slow decays: 1e-4 where the max is the last one and a decay."""
    torch.manual_seed(0)
    (_, u, k, v), dy = make(tokens=500, grad=False), torch.randn(B, 500, C)
    leaves = [torch.linspace(-9, -4, C).double(), u, 30 * k, v]
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [x.float().to(dtype).requires_grad_() for x in leaves]
        y, _ = rwkv_jit.wkv4_ref(*given)
        found.append([y.detach(), *torch.autograd.grad(y, given, dy.to(dtype))])
    for x, want in zip(*found, strict=True):
        assert float((x.double() - want).norm() / want.norm()) < 5e-6


def test_states_carry_from_part_to_part():
    given, state = make(grad=False), make_state()
    whole, final = rwkv_jit.wkv4_ref(*given, state, True)
    w, u, k, v = given
    for begin, end in ((0, 3), (3, 3), (3, T)):
        y, state = rwkv_jit.wkv4_ref(w, u, k[:, begin:end], v[:, begin:end], state, True)
        torch.testing.assert_close(y, whole[:, begin:end])
    torch.testing.assert_close(state, final)


def test_reference_refuses_another_decay():
    with pytest.raises(ValueError, match="decay: expected raw or log, got 'sigmoid'"):
        rwkv_jit.wkv4_ref(*make(), decay="sigmoid")


# ---- the op on CPU tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_values_and_gradients_are_the_references(dtype, backend):
    given = make(dtype)
    state = make_state(torch.promote_types(dtype, torch.float32)).requires_grad_()
    results = [
        rwkv_jit.wkv4(*given, state, True, backend=backend),
        rwkv_jit.wkv4_ref(*given, state, True),
    ]
    for x, want in zip(*results, strict=True):
        assert (x.dtype, x.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(x, want, rtol=0, atol=0)
    weights = [torch.randn_like(x) for x in results[0]]
    grads = [torch.autograd.grad(each, [*given, state], weights) for each in results]
    for x, want in zip(*grads, strict=True):
        torch.testing.assert_close(x, want, rtol=0, atol=0)


def test_a_state_for_all_rows_gets_the_sum_of_their_gradients():
    given, state = make(), make_state()[0].requires_grad_()
    y, _ = rwkv_jit.wkv4(*given, state)
    of_each = torch.stack([state.detach()] * B).requires_grad_()
    same, _ = rwkv_jit.wkv4(*given, of_each)
    torch.testing.assert_close(y, same)
    (found,), (want,) = torch.autograd.grad(y.sum(), state), torch.autograd.grad(same.sum(), of_each)
    torch.testing.assert_close(found, want.sum(0))


@pytest.mark.parametrize(("batch", "tokens", "channels"), [(2, 0, 5), (0, 4, 5), (2, 4, 0)])
def test_nothing_to_do(batch, tokens, channels):
    given = make(torch.float32, batch, tokens, channels)
    state = make_state(torch.float32, batch, channels).requires_grad_()
    y, final = rwkv_jit.wkv4(*given, state, True)
    assert y.shape == (batch, tokens, channels)
    grads = torch.autograd.grad([y, final], [*given, state], [torch.ones_like(y), torch.full_like(final, 2.0)])
    assert [g.shape for g in grads] == [x.shape for x in (*given, state)]
    if tokens == 0:
        assert torch.equal(final, state)
        assert final.data_ptr() != state.data_ptr()
        assert torch.equal(grads[-1], torch.full_like(final, 2.0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic):
    given, state = make(torch.float32), make_state(torch.float32).requires_grad_()
    compiled = torch.compile(
        lambda *x: rwkv_jit.wkv4(*x, output_final_state=True), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    results = [function(*given, state) for function in (compiled, lambda *x: rwkv_jit.wkv4(*x, True))]
    grads = [torch.autograd.grad([y.sum(), final.sum()], [*given, state]) for y, final in results]
    for x, want in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        torch.testing.assert_close(x, want)


def test_torch_accepts_the_ops_with_a_state():
    given, state = make(torch.float32, grad=False), make_state(torch.float32)
    options = (1.0, "raw", "vk", 64, None, None, "auto", None, None, False, False, False)
    torch.library.opcheck(torch.ops.rwkv_jit.wkv4_fwd.default, (*given, state, None, *options, True, True))
    grads = torch.randn(B, T, C), make_state(torch.float32)
    torch.library.opcheck(torch.ops.rwkv_jit.wkv4_bwd.default, (*given, state, None, torch.empty(0), *grads, *options))


# ---- one token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["raw", "log"])
def test_update_walks_through_a_sequence(decay):
    w, u, k, v = make(torch.float32, grad=False)
    w = -w.exp() if decay == "log" else w
    state = make_state(torch.float32)
    want, final = rwkv_jit.wkv4(w, u, k, v, state, True, decay)
    for t in range(T):
        y = rwkv_jit.wkv4_update(state, w, u, k[:, t], v[:, t], decay)
        torch.testing.assert_close(y, want[:, t])
    torch.testing.assert_close(state, final)


def test_update_has_no_gradient():
    w, u, k, v = make(torch.float32)
    with pytest.raises(RuntimeError, match="wkv4_update: changes the states in place and has no gradient"):
        rwkv_jit.wkv4_update(make_state(torch.float32), w, u, k[:, 0], v[:, 0])


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"decay": "sigmoid"}, ValueError, "decay: expected one of raw, log, got 'sigmoid'"),
        ({"backend": "chunked"}, ValueError, "backend: expected one of auto, recurrent, split, reference, got 'chunk"),
        ({"backend": ["auto"]}, ValueError, "backend: expected one of"),
        ({"backend": "split"}, UnsupportedConfigError, "backend: 'split' runs on CUDA tensors, got cpu"),
        ({"k": torch.zeros(T, C)}, ValueError, r"k: expected 3 dimensions \[B, T, C\], got shape \(7, 5\)"),
        ({"k": torch.zeros(B, T, C).int()}, TypeError, "k: expected .*, got torch.int32"),
        ({"v": torch.zeros(B, T, C + 1)}, ValueError, r"v: expected shape \[2, 7, 5\] like k, got \[2, 7, 6\]"),
        ({"v": torch.zeros(B, T, C).half()}, TypeError, "v: expected torch.float32 like k, got torch.float16"),
        ({"w": torch.zeros(1, C)}, ValueError, r"w: expected shape \[5\] \[channels\], got \[1, 5\]"),
        ({"u": torch.zeros(C).half()}, TypeError, "u: expected torch.float32 like k, got torch.float16"),
        ({"initial_state": torch.zeros(B, C, 3)}, ValueError, r"initial_state: expected shape \[2, 3, 5\] or \[3, 5\]"),
        ({"initial_state": torch.zeros(B, 3, C).half()}, TypeError, "initial_state: expected torch.float32.*float16"),
        ({"w": torch.zeros(C, device="meta")}, ValueError, "w: expected device cpu like k, got meta"),
        ({"w": 3}, TypeError, "w: expected a torch.Tensor or an array with __dlpack__, got int"),
    ],
    ids=str,
)
def test_a_fault_names_the_argument(change, error, message):
    given = dict(zip("wukv", make(torch.float32, grad=False), strict=True))
    with pytest.raises(error, match=message):
        rwkv_jit.wkv4(**{**given, **change})


def test_a_fault_of_an_update_names_the_argument():
    w, u, k, v = make(torch.float32, grad=False)
    with pytest.raises(ValueError, match=r"k: expected 3 dimensions \[B, T, C\], got shape \(5,\)"):
        rwkv_jit.wkv4_update(make_state(torch.float32), w, u, k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match=r"state: expected shape \[slots, 3, 5\], got \[3, 5\]"):
        rwkv_jit.wkv4_update(make_state(torch.float32)[0], w, u, k[:, 0], v[:, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: np.frombuffer(x.numpy().tobytes(), "f4").reshape(x.shape), "expected an array that torch can view"),
        (lambda x: x.numpy()[:, :, ::-1], "expected .*, got one that runs backwards"),
        (lambda x: x[:1].expand(B, 3, C), r"expected separate memory for every element, got strides \(0, 5, 1\)"),
    ],
    ids=["read-only", "backwards", "expanded"],
)
def test_a_state_that_cannot_be_changed_is_an_error(change, message):
    w, u, k, v = make(torch.float32, grad=False)
    state = change(make_state(torch.float32))
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match=f"state: is changed in place; {message}"):
        rwkv_jit.wkv4_update(state, w, u, k[:, 0], v[:, 0])
    assert (state == before).all()


# ---- how a sequence is split -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "walks", "tokens", "length"),
    [
        ("auto", 8 * 4096, 4096, 4096),  # enough channels
        ("auto", 4096, 4096, 512),
        ("auto", 768, 32768, 752),
        ("auto", 4096, 255, 255),  # fewer than four parts of 64
        ("auto", 4096, 256, 64),
        ("recurrent", 1, 32768, 32768),
        ("split", 8 * 4096, 4096, 2048),
        ("split", 5, 17, 16),
        ("split", 5, 0, 0),
    ],
)
def test_length_of_a_part(backend, walks, tokens, length):
    p = problem("wkv4", B=1, T=tokens, C=walks, backend=backend, gpu=Gpu("sm_90", multiprocessors=132))
    assert schedules.part_length(p) == length
    assert length == tokens or length % schedules.CHUNK_LEN == 0
    if backend == "auto":
        name = schedules.backend_of(p)
        assert name == ("recurrent" if length == tokens else "split")


# ---- launches on a driver that takes notes -----------------------------------------------------------------------


def walks(gpus):
    """Launches of wkv4's own kernels since the last time."""
    return [launch for launch in gpus.take() if launch.entry != "sum_buffers"]


def asked(gpus):
    return [(each.template.name, each.parameters.get("RESULTS")) for each in gpus.asked]


def no_more_preparations(monkeypatch):
    """From now on calls are known."""
    for module, name in ((kernel, "get_most"), (checks, "check_inputs"), (prepared, "plan_backward")):
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was called"))


def test_a_call_launches_its_tensors_in_their_places(on_gpu):
    given, state = make(torch.float32, grad=False), make_state(torch.float32)
    for _ in range(2):
        y, final = rwkv_jit.wkv4(*given, state, True)
        (launch,) = on_gpu.take()
        names = ("w_raw", "bonus", "k", "v", "initial_state", "y", "final_state")
        addresses = {name: x.data_ptr() for name, x in zip(names, (*given, state, y, final), strict=True)}
        assert launch.addresses == {**addresses, "checkpoints": 0, "summaries": 0}
        assert launch.numbers == {
            "k_strides": (T * C, C), "v_strides": (T * C, C), "tokens": T, "batch": B, "channels": C, "part_len": T,
        }  # fmt: skip
        assert (launch.grid, launch.block) == ((1, 1, 1), (schedules.NUM_THREADS, 1, 1))
    assert asked(on_gpu) == [("wkv4_forward", True)]


def test_gradients_compile_beside_the_forward_and_take_what_it_saves(on_gpu):
    given = make(torch.float32)
    y, _ = rwkv_jit.wkv4(*given)
    compiled = sorted(asked(on_gpu)[:3], key=str)
    assert compiled == [("sum_buffers", None), ("wkv4_backward", True), ("wkv4_forward", True)]
    dy = torch.randn_like(y)
    dw, du, dk, dv = torch.autograd.grad(y, given, dy)
    assert len(on_gpu.asked) == 3
    forward, backward, sums = on_gpu.take()
    assert forward.named["checkpoints"]
    found = backward.addresses
    rows = [found.pop("dw"), found.pop("du")]
    assert 0 not in rows
    names = ("w_raw", "bonus", "k", "v", "dy", "dk", "dv")
    addresses = {name: x.data_ptr() for name, x in zip(names, (*given, dy, dk, dv), strict=True)}
    assert found == {
        **addresses, "checkpoints": forward.named["checkpoints"], "grad_final": 0, "grad_initial": 0, "summaries": 0,
    }  # fmt: skip
    for place, (row, grad) in enumerate(zip(rows, (dw, du), strict=True)):
        wanted = {"rows": row, "sums": grad.data_ptr(), "group_rows": B, "width": C}
        assert {name: sums.named[f"{name}{place}"] for name in wanted} == wanted


@pytest.mark.parametrize("with_w", ["float32", "bfloat16"])
def test_gradients_of_w_and_u_have_their_dtypes(on_gpu, with_w):
    w, u, k, v = make(torch.bfloat16)
    w = w.detach().to(getattr(torch, with_w)).requires_grad_()
    y, _ = rwkv_jit.wkv4(w, u, k, v)
    assert [x.dtype for x in torch.autograd.grad(y.sum(), (w, u))] == [w.dtype, u.dtype]
    *_, sums = on_gpu.take()
    storage = [STORAGE_TYPES[sums.named[f"storage{place}"]] for place in range(2)]
    assert storage == [{"float32": "fp32", "bfloat16": "bf16"}[with_w], "bf16"]


def test_parts_are_launched_on_their_own_first(on_gpu):
    on_gpu.multiprocessors = 1
    given = make(torch.float32, tokens=300)
    y, _ = rwkv_jit.wkv4(*given, backend="split")
    torch.autograd.grad(y.sum(), given)
    *launches, sums = on_gpu.take()
    length = schedules.part_length(problem("wkv4", B=B, C=C, T=300, backend="split", gpu=Gpu("", multiprocessors=1)))
    parts = math.ceil(300 / length)
    assert parts == 4
    assert {launch.named["part_len"] for launch in launches} == {length}
    ways = ("wkv4_forward", "wkv4_backward")
    assert [(launch.entry, launch.parameters["RESULTS"], launch.grid) for launch in launches] == [
        (way, results, (1, parts - 1 + results, 1)) for way in ways for results in (False, True)
    ]
    one, other = (launch.named["summaries"] for launch in launches[:2])
    assert one == other != 0
    assert [sums.named[f"group_rows{place}"] for place in range(2)] == [parts * B] * 2


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_the_rule_splits_calls_of_few_channels(on_gpu, multiprocessors):
    on_gpu.multiprocessors = multiprocessors
    given = make(torch.float32, tokens=600, channels=128, grad=False)
    rwkv_jit.wkv4(*given)
    assert len(on_gpu.take()) == (1 if multiprocessors == 1 else 2)


@pytest.mark.parametrize("with_state", [None, "of each", "of all"])
def test_known_calls_are_prepared_forward_and_backward(on_gpu, with_state, monkeypatch):
    for number in range(3):
        given = make(torch.float32)
        state = make_state(torch.float32) if with_state else None
        state = state[0].clone() if with_state == "of all" else state
        leaves = [*given, *([state.requires_grad_()] if with_state else [])]
        y, final = rwkv_jit.wkv4(*given, state, True)
        dy, grad_final = torch.randn_like(y), torch.randn_like(final)
        found = torch.autograd.grad([y, final], leaves, [dy, grad_final])
        forward, backward = walks(on_gpu)
        at = forward.named
        assert (at["y"], at["final_state"], at["k"]) == (y.data_ptr(), final.data_ptr(), given[2].data_ptr())
        assert bool(at["initial_state"]) == bool(backward.named["grad_initial"]) == bool(with_state)
        if with_state == "of each":
            assert at["initial_state"] == state.data_ptr()
            assert backward.named["grad_initial"] == found[4].data_ptr()
        assert (backward.named["dy"], backward.named["grad_final"]) == (dy.data_ptr(), grad_final.data_ptr())
        assert backward.named["dk"] == found[2].data_ptr()
        if number == 0:
            no_more_preparations(monkeypatch)


def test_a_gradient_of_the_final_state_alone(on_gpu):
    given = make(torch.float32)
    _, final = rwkv_jit.wkv4(*given, output_final_state=True)
    torch.autograd.grad(final.sum(), given)
    _, backward = walks(on_gpu)
    assert 0 not in (backward.named["dy"], backward.named["grad_final"])


def test_a_known_call_takes_few_frames(on_gpu):
    given = make(torch.float32)
    y, _ = rwkv_jit.wkv4(*given)
    dy = torch.ones_like(y)
    backward = entered(lambda: torch.autograd.grad(y, given, dy, retain_graph=True))
    assert 0 < len(backward) <= 12, backward
    with torch.no_grad():
        forward = entered(lambda: rwkv_jit.wkv4(*given))
    assert 0 < len(forward) <= 9, forward


@pytest.mark.parametrize("with_grad", [False, True])
def test_without_tokens_the_gradient_of_the_final_state_passes_through(on_gpu, with_grad):
    given, state = make(torch.float32, tokens=0), make_state(torch.float32).requires_grad_()
    y, final = rwkv_jit.wkv4(*given, state, True)
    outputs = [y, final] if with_grad else [y]
    grads = [torch.ones_like(x) for x in outputs]
    found = torch.autograd.grad(outputs, [*given, state], grads)
    forward, of_state, sums = on_gpu.take()
    assert (forward.named["initial_state"], forward.named["final_state"]) == (state.data_ptr(), final.data_ptr())
    assert (of_state.entry, sums.entry) == ("sum_rows", "sum_buffers")
    assert of_state.named["rows"] == (grads[1].data_ptr() if with_grad else 0)
    assert of_state.named["sums"] == found[4].data_ptr()
    assert [sums.named[f"sums{place}"] for place in range(3)] == [*(x.data_ptr() for x in found[:2]), 0]
    # A sum of one row, or of none: a copy, or zeros.
    assert (of_state.named["group_rows"], of_state.named["width"]) == (int(with_grad), B * 3 * C)
    assert [(sums.named[f"group_rows{place}"], sums.named[f"width{place}"]) for place in range(2)] == [(0, C)] * 2


def test_other_strides_are_read_in_place_and_only_the_last_one_makes_a_copy(on_gpu):
    w, u, k, v = make(torch.float32, grad=False)
    rows_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    channels_apart = v.transpose(1, 2).contiguous().transpose(1, 2)
    rwkv_jit.wkv4(w, u, rows_first, channels_apart)
    (launch,) = on_gpu.take()
    assert launch.named["k"] == rows_first.data_ptr()
    assert launch.named["v"] != channels_apart.data_ptr()
    assert (launch.named["k_strides"], launch.named["v_strides"]) == ((C, B * C), (T * C, C))


def test_results_have_the_strides_of_their_shapes(on_gpu):
    leaves = [x.detach() for x in make(torch.float32, batch=1)]
    leaves[2:] = [x.as_strided(x.shape, (2 * T * C, C, 1)).requires_grad_() for x in leaves[2:]]
    y, _ = rwkv_jit.wkv4(*leaves)
    for x in (y, *torch.autograd.grad(y.sum(), leaves[2:])):
        assert x.stride() == (T * C, C, 1)


@pytest.mark.parametrize(("sizes", "launched"), [({"channels": 0}, []), ({"batch": 0}, [("sum_buffers", 0, 0)])])
def test_without_channels_nothing_is_launched_and_without_rows_sums_of_nothing(on_gpu, sizes, launched):
    given = make(torch.float32, **sizes)
    y, _ = rwkv_jit.wkv4(*given)
    torch.autograd.grad(y.sum(), given)
    found = [(each.entry, each.named["group_rows0"], each.named["group_rows1"]) for each in on_gpu.take()]
    assert found == launched


# ---- compiling without a call ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_size": 64}, ValueError, "head_size: wkv4 has none, got 64"),
        ({"chunk_len": 16}, ValueError, "chunk_len: wkv4 has none, got 16"),
        ({"decay": "sigmoid"}, ValueError, "decay: expected one of raw, log, got 'sigmoid'"),
        ({"backend": "chunked"}, ValueError, "backend: expected one of auto, recurrent, split, got 'chunked'"),
        ({"dtype": torch.float64}, TypeError, "dtype: expected .*, got torch.float64"),
        ({"direction": "both"}, ValueError, "direction: expected one of forward, backward, got 'both'"),
    ],
    ids=str,
)
def test_what_wkv4_has_not_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        rwkv_jit.specialize("wkv4", **{"arch": "sm_90", **change})


def test_what_calls_need_is_warmed(monkeypatch):
    wanted = []
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: wanted.extend(requests))
    rwkv_jit.warm("wkv4", dtypes=[torch.float16], arch="sm_80", w_dtype=torch.float32, decay="log")
    walks = [each for each in wanted if "RESULTS" in each.parameters]
    assert {(each.template.name, each.parameters["RESULTS"]) for each in walks} == {
        (f"wkv4_{way}", results) for way in ("forward", "backward") for results in (True, False)
    }
    types = {"T_IO": "fp16", "T_W": "fp32", "T_U": "fp32", "DECAY": "log"}
    assert all(types.items() <= each.parameters.items() for each in walks)
    # Of dw and du, and of a state's gradient that passes through.
    assert {each.template.name for each in wanted if each not in walks} == {"sum_buffers", "sum_rows"}
    with pytest.raises(TypeError, match="head_sizes: wkv7 needs some, got None"):
        rwkv_jit.warm("wkv7", arch="sm_80")
