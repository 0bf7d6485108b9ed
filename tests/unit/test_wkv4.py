"""RWKV-4 without a GPU: the reference against the formula, the op on CPU tensors, its launches on a stub driver."""

import importlib.util
import logging
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import rwkv_jit
from rwkv_jit import kernel, runtime, stats, tensors
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.ops import wkv4 as room
from rwkv_jit.ops import wkv4_walk

_spec = importlib.util.spec_from_file_location("stub_driver", Path(__file__).with_name("stub_driver.py"))
stub_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_driver)
gpus = stub_driver.gpus

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
    np.testing.assert_allclose(y.detach(), want_y, rtol=1e-12)
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


def test_without_a_wish_for_it_there_is_no_final_state():
    assert rwkv_jit.wkv4(*make())[1] is None


def test_a_second_derivative_is_an_error():
    given = make(torch.float32)
    y, _ = rwkv_jit.wkv4(*given)
    (grad,) = torch.autograd.grad(y.sum(), given[2], create_graph=True)
    with pytest.raises(RuntimeError, match="wkv4 has no second derivative; differentiate wkv4_ref twice instead"):
        grad.sum().backward()


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


@pytest.mark.parametrize("with_state", [False, True])
def test_torch_accepts_the_ops(with_state):
    given = make(torch.float32, grad=False)
    state = make_state(torch.float32) if with_state else None
    for options in ((True, True), (False, False)):
        torch.library.opcheck(torch.ops.rwkv_jit.wkv4_fwd.default, (*given, state, "raw", "auto", *options))
    grads = torch.randn(B, T, C), make_state(torch.float32)
    arguments = (*grads, *given, state, "raw", "auto", torch.empty(0))
    torch.library.opcheck(torch.ops.rwkv_jit.wkv4_bwd.default, arguments)
    of_token = make_state(torch.float32), *given[:2], *(x[:, 0].contiguous() for x in given[2:]), "raw"
    torch.library.opcheck(torch.ops.rwkv_jit.wkv4_step.default, of_token)


def test_arrays_of_numpy_come_in():
    given = make(torch.float32, grad=False)
    y, _ = rwkv_jit.wkv4(*(x.numpy() for x in given))
    assert torch.equal(y, rwkv_jit.wkv4_ref(*given)[0])


def test_one_notice_on_the_cpu(caplog, monkeypatch):
    monkeypatch.setattr(stats, "_said", set())
    with caplog.at_level(logging.WARNING, logger="rwkv_jit"):
        for _ in range(2):
            rwkv_jit.wkv4(*make())
    assert [record.message for record in caplog.records] == ["wkv4: CPU tensors run the reference in plain torch"]


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
    with pytest.raises(RuntimeError, match="wkv4_update: changes the state in place and has no gradient"):
        rwkv_jit.wkv4_update(make_state(torch.float32), w, u, k[:, 0], v[:, 0])


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"decay": "sigmoid"}, ValueError, "decay: expected one of raw, log, got 'sigmoid'"),
        ({"backend": "chunked"}, ValueError, "backend: expected one of auto, recurrent, split, reference, got 'chunk"),
        ({"backend": ["auto"]}, ValueError, "backend: expected one of"),
        ({"backend": "split"}, UnsupportedConfigError, "backend: 'split' runs on CUDA tensors, got cpu"),
        ({"k": torch.zeros(T, C)}, ValueError, r"k: expected 3 dimensions \[B, T, C\], got shape \[7, 5\]"),
        ({"k": torch.zeros(B, T, C).int()}, TypeError, "k: expected .*, got torch.int32"),
        ({"v": torch.zeros(B, T, C + 1)}, ValueError, r"v: expected shape \[2, 7, 5\] like k, got \[2, 7, 6\]"),
        ({"v": torch.zeros(B, T, C).half()}, TypeError, "v: expected torch.float32 like k, got torch.float16"),
        ({"w": torch.zeros(1, C)}, ValueError, r"w: expected shape \[5\] \(channels\), got \[1, 5\]"),
        ({"u": torch.zeros(C).half()}, TypeError, "u: expected torch.float32 like k or torch.float32, got torch.flo"),
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
    with pytest.raises(ValueError, match=r"k: expected 2 dimensions \[B, C\], got shape \[2, 7, 5\]"):
        rwkv_jit.wkv4_update(make_state(torch.float32), w, u, k, v)
    with pytest.raises(ValueError, match=r"state: expected shape \[2, 3, 5\], got \[3, 5\]"):
        rwkv_jit.wkv4_update(make_state(torch.float32)[0], w, u, k[:, 0], v[:, 0])


def strange_states():
    state = make_state(torch.float32).numpy()
    read_only = state.copy()
    read_only.flags.writeable = False
    return {
        "read-only": (read_only, "state: is changed in place; expected an array that torch can view, got one that is"),
        "backwards": (state[:, :, ::-1], "state: is changed in place; expected .*, got one that runs backwards"),
        "expanded": (
            make_state(torch.float32)[:1].expand(B, 3, C),
            r"state: is changed in place; expected memory of its own for every element, got strides \(0, 5, 1\)",
        ),
    }


@pytest.mark.parametrize("kind", ["read-only", "backwards", "expanded"])
def test_a_state_that_cannot_be_changed_is_an_error(kind):
    state, message = strange_states()[kind]
    w, u, k, v = make(torch.float32, grad=False)
    before = state.copy() if kind != "expanded" else state.clone()
    with pytest.raises(ValueError, match=message):
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
    assert wkv4_walk.part_length(backend, walks, tokens, 132) == length
    assert length == tokens or length % wkv4_walk.CHUNK_LEN == 0
    if backend == "auto":
        name = wkv4_walk.backend_of(backend, walks, tokens, 132)
        assert name == ("recurrent" if length == tokens else "split")


# ---- launches on a driver that takes notes -----------------------------------------------------------------------

SIZES = {"wkv4_forward": [8] * 9 + [16] * 2 + [8] * 4, "wkv4_backward": [8] * 13 + [16] * 3 + [8] * 4}


@pytest.fixture
def calls(gpus, nothing_known, monkeypatch):
    """CPU tensors take the way of CUDA tensors; returns the driver."""

    def get_all(requests):
        gpus.compiled.append([(each.template.name, each.parameters["RESULTS"]) for each in requests])
        return [gpus.make_kernel(entries=(request.template.name,)) for request in requests]

    gpus.compiled = []
    monkeypatch.setattr(kernel, "get_all", get_all)
    monkeypatch.setattr(room, "_is_for_kernels", lambda backend, like: backend != "reference")
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_80")
    monkeypatch.setattr(tensors, "also", lambda device: ())
    # The index of the CPU is None.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    gpus.sizes.update(SIZES)
    return gpus


def numbers(launch, first, count, letter="Q"):
    return [struct.unpack(f"={letter}", argument)[0] for argument in launch.arguments[first : first + count]]


def test_a_call_launches_its_tensors_in_their_places(calls):
    given, state = make(torch.float32, grad=False), make_state(torch.float32)
    for _ in range(2):
        y, final = rwkv_jit.wkv4(*given, state, True)
        (launch,) = calls.launches[-1:]
        addresses = [x.data_ptr() for x in (*given, state, y, final)]
        assert numbers(launch, 0, 9) == [*addresses, 0, 0]
        assert struct.unpack("=4q", b"".join(launch.arguments[9:11])) == (T * C, C, T * C, C)
        assert numbers(launch, 11, 4, "q") == [T, B, C, T]
        assert (launch.grid, launch.block) == ((1, 1, 1), (wkv4_walk.NUM_THREADS, 1, 1))
    assert calls.compiled == [[("wkv4_forward", True)]]
    assert len(calls.launches) == 2


def test_gradients_compile_beside_the_forward_and_take_what_it_saves(calls):
    given = make(torch.float32)
    y, _ = rwkv_jit.wkv4(*given)
    assert calls.compiled == [[("wkv4_forward", True), ("wkv4_backward", True)]]
    dy = torch.randn_like(y)
    _, _, dk, dv = torch.autograd.grad(y, given, dy)
    forward, backward = calls.launches
    saved = numbers(forward, 7, 1)
    assert saved != [0]
    addresses = [x.data_ptr() for x in (*given, dy)]
    assert numbers(backward, 0, 10) == [*addresses, *saved, 0, 0, dk.data_ptr(), dv.data_ptr()]
    assert numbers(backward, 12, 1) == [0]


def test_parts_are_launched_on_their_own_first(calls):
    given = make(torch.float32, tokens=300)
    y, _ = rwkv_jit.wkv4(*given, backend="split")
    torch.autograd.grad(y.sum(), given)
    names = [(launch.entry, launch.grid) for launch in calls.launches]
    parts = math.ceil(300 / wkv4_walk.part_length("split", B * C, 300, 1))
    assert parts == 4
    ways = ("wkv4_forward", "wkv4_backward")
    assert names == [(way, (1, rows, 1)) for way in ways for rows in (parts - 1, parts)]
    one, other = (numbers(launch, 8, 1) for launch in calls.launches[:2])
    assert one == other != [0]


def test_other_strides_are_read_in_place_and_only_the_last_one_makes_a_copy(calls):
    w, u, k, v = make(torch.float32, grad=False)
    rows_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    channels_apart = v.transpose(1, 2).contiguous().transpose(1, 2)
    rwkv_jit.wkv4(w, u, rows_first, channels_apart)
    (launch,) = calls.launches
    assert numbers(launch, 2, 1) == [rows_first.data_ptr()]
    assert numbers(launch, 3, 1) != [channels_apart.data_ptr()]
    assert struct.unpack("=4q", b"".join(launch.arguments[9:11])) == (C, B * C, T * C, C)


def test_nothing_is_launched_for_no_channels(calls):
    given = make(torch.float32, channels=0)
    y, _ = rwkv_jit.wkv4(*given)
    torch.autograd.grad(y.sum(), given)
    assert calls.launches == []


def test_first_use_inside_a_capture_is_refused(calls):
    calls.capturing = True
    with pytest.raises(RwkvJitError, match="wkv4: first use inside a CUDA graph capture"):
        rwkv_jit.wkv4(*make(torch.float32, grad=False))
    assert calls.launches == []


# ---- compiling without a call ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_size": 64}, ValueError, "head_size: wkv4 has none, got 64"),
        ({"chunk_len": 16}, ValueError, "chunk_len: wkv4 has none, got 16"),
        ({"decay": "sigmoid"}, ValueError, "decay: expected one of raw, log, got 'sigmoid'"),
        ({"backend": "chunked"}, ValueError, "backend: expected one of auto, recurrent, split, got 'chunked'"),
        ({"dtype": torch.float64}, ValueError, "dtype: expected one of .*, got torch.float64"),
        ({"direction": "both"}, ValueError, "direction: expected one of forward, backward, got 'both'"),
    ],
    ids=str,
)
def test_what_wkv4_has_not_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        rwkv_jit.specialize("wkv4", **{"arch": "sm_90", **change})


def test_what_calls_need_is_warmed(monkeypatch):
    wanted = []
    monkeypatch.setattr(runtime, "compile_all", lambda requests, progress: wanted.extend(requests))
    rwkv_jit.warm("wkv4", dtypes=[torch.float16], arch="sm_80", w_dtype=torch.float32, decay="log")
    assert [(each.template.name, each.parameters["RESULTS"]) for each in wanted] == [
        (f"wkv4_{way}", results) for way in ("forward", "backward") for results in (True, False)
    ]
    types = {"T_IO": "fp16", "T_W": "fp32", "T_U": "fp32", "DECAY": "log"}
    assert all(types.items() <= each.parameters.items() for each in wanted)
    with pytest.raises(TypeError, match="head_sizes: wkv7 needs some, got None"):
        rwkv_jit.warm("wkv7", arch="sm_80")
