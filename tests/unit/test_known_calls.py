"""Calls that are known by their signature, on a driver that takes notes; CPU tensors stand in for CUDA ones."""

import contextlib
import ctypes
import importlib.util
import itertools
import re
import struct
import weakref
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rwkv_jit
from rwkv_jit import bench, cuda, kernel, signatures, template, tensors, tune
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.ops import boundary, chunked, gated, gated_groups, gated_scan, known_calls, prepared, scan_geometry
from rwkv_jit.ops.choices import CHUNKS
from rwkv_jit.ops.interface import LARGEST_DECAY, Candidate

_spec = importlib.util.spec_from_file_location("stub_driver", Path(__file__).with_name("stub_driver.py"))
stub_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_driver)
gpus, in_fork = stub_driver.gpus, stub_driver.in_fork

B, T, H, N = 2, 5, 3, 8
# Addresses; strides of the inputs that have tokens; tokens, heads and more; interval and scale.
SIZES = {
    "gla_forward": [8] * 11 + [24] * 4 + [8] * 2 + [4, 4],
    "gla_backward": [8] * 17 + [24] * 5 + [8] * 4 + [4, 4],
    "wkv7_forward": [8] * 13 + [24] * 6 + [8] * 2 + [4, 4],
    "wkv7_backward": [8] * 20 + [24] * 7 + [8] * 4 + [4, 4],
}


# Addresses; strides; tokens and heads; scale.
CHUNKED_SIZES = {
    "wkv7_forward": [8] * 12 + [24] * 6 + [8] * 2 + [4],
    "wkv7_backward": [8] * 17 + [24] * 7 + [8] * 2 + [4],
}
# Addresses; strides; tokens, heads and sequences; scale; whether the backward's matrices are wanted; the first chunk,
# or where a walk begins and ends.
SCAN_SIZES = {
    "wkv7_prepare": [8] * 9 + [24] * 5 + [8] * 3 + [4, 4, 4],
    "wkv7_scan": [8] * 10 + [24] + [8] * 2,
    "wkv7_group_scan": [8] * 11 + [24] + [8] * 2 + [8],
    "wkv7_token_gradients": [8] * 6 + [24] * 2 + [8] * 3 + [4],
    "wkv7_key_gradients": [8] * 18 + [24] * 7 + [8] * 3 + [4, 4],
}


@pytest.fixture
def calls(gpus, nothing_known, monkeypatch):
    """wkv7 on CPU tensors takes the way of CUDA tensors; returns the driver."""

    def get_all(requests):
        made = [gpus.make_kernel(entries=(request.template.name,)) for request in requests]
        for each, request in zip(made, requests, strict=True):
            each.parameters = dict(request.parameters)
        return made

    monkeypatch.setattr(kernel, "get_all", get_all)
    monkeypatch.setattr(prepared, "get_kernels", lambda nearest, requests, *chosen: get_all(requests))
    monkeypatch.setattr(boundary, "_is_for_kernels", lambda backend, like: True)
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_80")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tensors, "also", lambda device: ())
    monkeypatch.setattr(gpus, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 2, raising=False)
    # The index of the CPU is None.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    gpus.sizes.update(SIZES)
    return gpus


TYPES = {"T_IO": "bf16", "T_W": "bf16", "T_STATE": "fp32", "DECAY": "sigmoid", "STATE_LAYOUT": "vk"}


def make(dtype=torch.float32, shape=(B, T, H, N), grad=False):
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for _ in range(6)]


def addresses(launch, count):
    return [struct.unpack("=Q", argument)[0] for argument in launch.arguments[:count]]


def refuse(*_):
    raise AssertionError("it was checked again")


def test_known_call_is_not_checked_again_and_launches_its_own_tensors(calls, monkeypatch):
    first, second = make(), make()
    rwkv_jit.wkv7(*first)
    monkeypatch.setattr(boundary, "check_tensors", refuse)
    y, final = rwkv_jit.wkv7(*second)
    one, other = calls.launches
    assert final is None
    assert (y.shape, y.dtype) == ((B, T, H, N), torch.float32)
    assert addresses(one, 6) == [x.data_ptr() for x in first]
    assert addresses(other, 13) == [*[x.data_ptr() for x in second], 0, 0, y.data_ptr(), 0, 0, 0, 0]
    assert (one.grid, one.block, one.stream) == (other.grid, other.block, other.stream)
    assert one.arguments[13:] == other.arguments[13:]


def test_y_is_contiguous_whatever_v_is(calls):
    given = make()
    given[3] = torch.randn(B, H, T, N).transpose(1, 2)
    for _ in range(2):
        y, _ = rwkv_jit.wkv7(*given)
        assert y.is_contiguous()


def test_state_and_final_state_are_launched_in_their_places(calls):
    state = torch.randn(B, H, N, N)
    for _ in range(2):
        y, final = rwkv_jit.wkv7(*make(), state, True)
        assert addresses(calls.launches[-1], 12)[6:] == [state.data_ptr(), 0, y.data_ptr(), final.data_ptr(), 0, 0]
        assert final.shape == state.shape


def test_one_state_for_all_sequences_is_repeated(calls):
    state = torch.randn(H, N, N)
    for _ in range(2):
        _, final = rwkv_jit.wkv7(*make(), state, True)
        assert final.shape == (B, H, N, N)
        assert addresses(calls.launches[-1], 7)[6] not in (0, state.data_ptr())


OTHERS = {
    "tokens": lambda: (make(shape=(B, T + 1, H, N)), {}),
    "dtype": lambda: (make(dtype=torch.bfloat16), {}),
    "strides": lambda: ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in make()], {}),
    "scale": lambda: (make(), {"scale": 0.5}),
    "decay": lambda: (make(), {"decay": "log"}),
    "bound": lambda: (make(), {"decay_bound": -1.0}),
    "state": lambda: (make(), {"initial_state": torch.zeros(B, H, N, N)}),
    "state's dtype": lambda: (make(), {"initial_state": torch.zeros(B, H, N, N, dtype=torch.bfloat16)}),
    "class": lambda: ([*make()[:5], make()[5].as_subclass(torch.nn.Parameter)], {}),
    "gradients": lambda: (make(grad=True), {}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("can_compare", [True, False])
def test_everything_that_a_check_looks_at_is_a_signature_of_its_own(other, can_compare, calls, monkeypatch):
    """And calls in turn launch what is theirs, also where torch has nothing to compare tensors with."""
    if not can_compare:
        monkeypatch.setattr(tensors, "_Guards", None)
    given, options = other()
    for _ in range(2):
        rwkv_jit.wkv7(*make())
        rwkv_jit.wkv7(*given, **options)
    assert len(known_calls.forwards) == 2
    one, another, *again = [(launch.grid, launch.arguments[13:]) for launch in calls.launches]
    assert again == [one, another]
    saved = [any(addresses(launch, 12)[10:]) for launch in calls.launches]
    assert saved == [False, given[0].requires_grad] * 2
    monkeypatch.setattr(boundary, "check_tensors", refuse)
    rwkv_jit.wkv7(*make())
    rwkv_jit.wkv7(*given, **options)


@pytest.mark.parametrize(
    ("grad", "options"),
    [(False, {}), (True, {}), (False, {"initial_state": torch.zeros(B, H, N, N)}), (True, {"cu_seqlens": [0, 2, T]})],
)
def test_tensors_like_those_of_the_last_preparation_are_not_asked_one_by_one(grad, options, calls, monkeypatch):
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor(options["cu_seqlens"])}
    shape = (1 if "cu_seqlens" in options else B, T, H, N)
    rwkv_jit.wkv7(*make(shape=shape, grad=grad), **options)
    monkeypatch.setattr(tensors, "signature", refuse)
    y, _ = rwkv_jit.wkv7(*make(shape=shape, grad=grad), **options)
    assert y.requires_grad == grad
    assert len(calls.launches) == 2


@pytest.mark.parametrize("changed", range(6))
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.bfloat16(),
        lambda x: x[:, :-1],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.detach().requires_grad_(),
        lambda x: x.as_subclass(Watched),
        lambda x: x.to("meta"),
        lambda x: x.numpy(),
        lambda x: None,
    ],
    ids=["dtype", "shape", "strides", "gradient", "class", "device", "library", "nothing"],
)
def test_likeness_sees_every_change_of_every_tensor(change, changed):
    given = make()
    check = tensors.likeness(given)
    assert check(*make())
    others = make()
    others[changed] = change(others[changed])
    assert not check(*others)
    others[changed] = others[changed - 1]
    assert not check(*others)  # one tensor twice is left to those who look closer


@pytest.mark.parametrize("elsewhere", range(6))
def test_likeness_tells_one_gpu_from_another(elsewhere):
    with FakeTensorMode():
        here, others, there = ([torch.empty(B, T, H, N, device=f"cuda:{gpu}") for _ in range(6)] for gpu in (0, 0, 1))
    check = tensors.likeness(here)
    assert check(*others)
    others[elsewhere] = there[elsewhere]
    assert not check(*others)


def test_likeness_keeps_no_tensor(calls):
    given = make()
    rwkv_jit.wkv7(*given)
    alive = [weakref.ref(x) for x in given]
    del given
    assert not any(x() is not None for x in alive)


def test_wrong_call_after_a_known_one_is_an_error(calls):
    given = make()
    rwkv_jit.wkv7(*given)
    with pytest.raises(ValueError, match="k: expected shape"):
        rwkv_jit.wkv7(*given[:2], given[2][:, :4], *given[3:])
    with pytest.raises(TypeError, match="v: expected torch.float16 or torch.bfloat16 or torch.float32"):
        rwkv_jit.wkv7(*given[:3], given[3].double(), *given[4:])
    with pytest.raises(TypeError, match="chunk_len: expected an int, got \\[8\\]"):
        rwkv_jit.wkv7(*given, chunk_len=[8])
    assert len(calls.launches) == 1


def test_address_that_cannot_be_read_is_copied_for_a_known_call(calls):
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in make()]  # heads before tokens
    rwkv_jit.wkv7(*given)
    strides = calls.launches[0].arguments[13:19]
    assert strides == (struct.pack("3q", *given[0].stride()[:3]),) * 6
    storage = torch.randn(given[3].numel() + 1)[1:]
    shifted = storage.as_strided(given[3].shape, given[3].stride(), storage.storage_offset())
    assert shifted.data_ptr() % 16
    rwkv_jit.wkv7(*given[:3], shifted, *given[4:])
    assert len(known_calls.forwards) == 1
    launch = calls.launches[1]
    assert not any(address % 16 for address in addresses(launch, 6))
    assert launch.arguments[13:19] == (struct.pack("3q", T * H * N, H * N, N),) * 6


def test_known_call_with_gradients_saves_and_goes_back(calls, monkeypatch):
    for _ in range(2):
        given = make(grad=True)
        y, _ = rwkv_jit.wkv7(*given)
        checkpoints, sa = addresses(calls.launches[-1], 12)[10:]
        assert sa - checkpoints == 4 * B * H * N * N  # one interval
        grads = torch.autograd.grad(y, given, torch.ones_like(y))
        back = addresses(calls.launches[-1], 19)
        assert back[:6] == [x.data_ptr() for x in given]
        assert back[8:10] == [checkpoints, sa]
        assert back[11:17] == [grad.data_ptr() for grad in grads]
        monkeypatch.setattr(boundary, "check_tensors", refuse)
    assert [launch.entry for launch in calls.launches] == ["wkv7_forward", "wkv7_backward"] * 2


def test_without_gradients_nothing_is_saved(calls):
    given = make(grad=True)
    with torch.no_grad():
        y, _ = rwkv_jit.wkv7(*given)
    assert not y.requires_grad
    assert addresses(calls.launches[0], 12)[10:] == [0, 0]


@pytest.mark.filterwarnings("ignore:.*jit.trace.* is deprecated")
def test_whoever_watches_torch_sees_the_op(calls):
    class Recorder(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(function))
            return function(*args, **(kwargs or {}))

    given = make()
    rwkv_jit.wkv7(*given)
    assert tensors.is_eager()
    with Recorder() as recorder:
        assert not tensors.is_eager()
        rwkv_jit.wkv7(*given)
    assert recorder.seen == ("rwkv_jit.wkv7_fwd.default",)
    seen = []
    torch.func.vmap(lambda x: seen.append(tensors.is_eager()) or x)(torch.ones(2))
    torch.jit.trace(lambda x: seen.append(tensors.is_eager()) or x + 1, torch.ones(2), check_trace=False)
    assert seen == [False, False]


# ---- autocast, derivatives, and ops that have chosen nothing yet -----------------------------------------------------


def test_known_call_is_another_under_another_autocast(calls, monkeypatch):
    """The same tensors each time; what is launched is read from the strides and the dtype of y."""
    given = make()

    def dtype(*context):
        with contextlib.ExitStack() as stack:
            for each in context:
                stack.enter_context(each)
            return rwkv_jit.wkv7(*given)[0].dtype

    def autocast(dtype, device="cpu"):
        return torch.autocast(device, dtype)

    def run():
        return [
            dtype(),
            dtype(autocast(torch.bfloat16)),
            dtype(autocast(torch.float16)),
            dtype(autocast(torch.bfloat16), torch.autocast("cpu", enabled=False)),
            dtype(autocast(torch.bfloat16), autocast(torch.float16)),
            dtype(),
        ]

    wanted = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float16, torch.float32]
    for can_compare in (True, False):
        monkeypatch.setattr(tensors, "_Guards", tensors._Guards if can_compare else None)
        signatures.forget()
        assert run() == wanted
        assert len(known_calls.forwards) == 3
        with monkeypatch.context() as patched:
            patched.setattr(boundary, "check_tensors", refuse)
            assert run() == wanted
        del calls.launches[:]


def test_half_a_call_that_is_known_without_autocast_is_cast_under_it(calls):
    """bfloat16 inputs are what the kernels of autocast take, and still another dtype may be in force."""
    given = make(dtype=torch.bfloat16)
    assert rwkv_jit.wkv7(*given)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert rwkv_jit.wkv7(*given)[0].dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert rwkv_jit.wkv7(*given)[0].dtype == torch.bfloat16
    given[1] = given[1].float()  # the decay
    with torch.autocast("cpu", torch.bfloat16):
        rwkv_jit.wkv7(*given)
    assert addresses(calls.launches[-1], 2) == [given[0].data_ptr(), given[1].data_ptr()]  # nothing was copied


def test_kernels_have_no_forward_mode(calls):
    given = make()
    rwkv_jit.wkv7(*given)
    message = "wkv7: the kernels have no forward-mode derivative .* take backend='reference', or wkv7_ref"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(lambda v: rwkv_jit.wkv7(*given[:3], v, *given[4:])[0], (given[3],), (given[3],))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        rwkv_jit.wkv7(*given[:3], forward_ad.make_dual(given[3], given[3]), *given[4:])
    assert len(calls.launches) == 1


def test_torch_func_takes_the_kernels_backwards(calls):
    given = make()
    grad = torch.func.grad(lambda v: rwkv_jit.wkv7(*given[:3], v, *given[4:])[0].sum())(given[3])
    assert grad.shape == given[3].shape
    forward, backward = calls.launches
    assert (forward.entry, backward.entry) == ("wkv7_forward", "wkv7_backward")
    assert addresses(forward, 12)[10:] == addresses(backward, 10)[8:] != [0, 0]


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, T), (torch.bfloat16, 64)])
def test_op_that_has_chosen_nothing_chooses_when_it_runs(dtype, tokens, calls):
    """As an exported program calls it: the fake, the forward and the backward choose the same."""
    is_chunked, shape = dtype == torch.bfloat16, (B, tokens, H, 16)
    if is_chunked:
        calls.sizes.update(CHUNKED_SIZES)
    options = (1.0, "raw", "vk", 64, None, None, "auto", None, None, None)
    run, back = torch.ops.rwkv_jit.wkv7_fwd, torch.ops.rwkv_jit.wkv7_bwd
    given, promise = make(dtype=dtype, shape=shape), {"decay_bound": -3.0}
    y, _, saved = run(*given, None, None, *options, False, True, **promise)
    with FakeTensorMode() as mode:
        fake = run(*[mode.from_tensor(x) for x in given], None, None, *options, False, True, **promise)
    assert fake[2].shape == saved.shape
    assert saved.numel() > 0
    back(torch.ones_like(y), None, *given, None, None, *options, saved, **promise)
    wanted = [len(calls.sizes[f"wkv7_{direction}"]) for direction in ("forward", "backward")]
    assert [len(launch.arguments) for launch in calls.launches] == wanted
    assert (wanted[0] == len(CHUNKED_SIZES["wkv7_forward"])) == is_chunked
    with pytest.raises(RwkvJitError, match=r"wkv7: the backward takes \d+ numbers of what the forward saved, got 1"):
        back(torch.ones_like(y), None, *given, None, None, *options, saved[:1], **promise)
    leaves = [x.requires_grad_() for x in given]
    torch.autograd.grad(run(*leaves, None, None, *options, False, False, **promise)[0].sum(), leaves)
    assert [len(launch.arguments) for launch in calls.launches[2:]] == wanted


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and counts how often it is copied to the host."""

    is_cuda = True
    reads = 0

    def cpu(self):
        OnGpu.reads += 1
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_packing_on_a_gpu_is_checked_once_and_read_each_time(dtype, gpus):
    memory = np.array([0, 2, 5], dtype)
    bounds, OnGpu.reads = torch.from_numpy(memory).as_subclass(OnGpu), 0
    assert tensors.packing(bounds, 5).tolist() == [0, 2, 5]
    memory[1] = 3  # which torch cannot see
    assert tensors.packing(bounds, 5).tolist() == [0, 3, 5]
    assert OnGpu.reads == 1
    with pytest.raises(ValueError, match="rising from 0 to 6"):
        tensors.packing(bounds, 6)
    bounds[1] = 9
    with pytest.raises(ValueError, match="rising from 0 to 5"):
        tensors.packing(bounds, 5)
    gpus.capturing = True
    assert tensors.packing(bounds, 5).tolist() == [0, 9, 5]
    assert OnGpu.reads == 3


class Watched(torch.Tensor):
    """A tensor that sees every op done to it."""

    seen = ()
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen = (*cls.seen, str(function))
        with torch._C._DisableTorchDispatch():
            plain = [x.as_subclass(torch.Tensor) if isinstance(x, cls) else x for x in args]
            return function(*plain, **(kwargs or {}))


def test_tensor_that_watches_sees_the_op_every_time(calls):
    given = make()
    rwkv_jit.wkv7(*given)
    watched = [x.as_subclass(Watched) for x in given]
    for _ in range(2):
        Watched.seen = ()
        rwkv_jit.wkv7(*watched)
        assert "rwkv_jit.wkv7_fwd.default" in Watched.seen


def test_forked_child_forgets_what_is_known(calls):
    given = make()
    rwkv_jit.wkv7(*given)
    assert kernel._process.has_used_cuda
    assert "forked" in in_fork(lambda: rwkv_jit.wkv7(*given))
    rwkv_jit.wkv7(*given)
    assert len(calls.launches) == 2


def test_first_use_in_a_capture_is_refused_and_later_shapes_are_not(calls, monkeypatch):
    calls.capturing = True
    monkeypatch.setattr(tensors, "capturing", lambda: calls.capturing)
    with pytest.raises(RwkvJitError, match="first use inside a CUDA graph capture"):
        rwkv_jit.wkv7(*make())
    monkeypatch.setattr(kernel, "is_loaded", lambda request, device: True)
    rwkv_jit.wkv7(*make())
    assert len(calls.launches) == 1


def test_signatures_are_not_kept_without_end(calls, monkeypatch):
    monkeypatch.setattr(signatures, "MOST", 3)
    for tokens in range(1, 9):
        rwkv_jit.wkv7(*make(shape=(1, tokens, 1, N)))
        assert len(known_calls.forwards) <= 3
        assert len(known_calls._latest) <= 3


# ---- ops that share templates ------------------------------------------------------------------------------------

# Which of r k v w u an op has, and which of these have tokens.
SHARED = {
    "wkv5": ("rkvwu", "rkv"),
    "wkv6": ("rkvwu", "rkvw"),
    "gla": ("rkvw", "rkvw"),
    "linear_attention": ("rkv",) * 2,
}


def make_shared(op, grad=False):
    names, with_tokens = SHARED[op]
    shapes = {n: (B, T, H, N if n != "v" else 12) if n in with_tokens else (H, N) for n in names}
    return {n: torch.randn(shape).requires_grad_(grad) for n, shape in shapes.items()}


def strides_of(size):
    return struct.pack("3q", T * H * size, H * size, size)


# A w without tokens has a stride between heads alone; where there is none its strides are never used.
STRIDE_OF_CONSTANT = struct.pack("3q", 0, 0, N)


@pytest.mark.parametrize("op", SHARED)
def test_what_an_op_does_not_have_is_null_in_the_forward(op, calls, monkeypatch):
    _, with_tokens = SHARED[op]
    state = torch.randn(B, H, N, 12)
    for _ in range(2):
        given = make_shared(op)
        y, final = getattr(rwkv_jit, op)(*given.values(), state, True, scale=0.5, state_layout="kv")
        launch = calls.launches[-1]
        assert launch.entry == "gla_forward"
        places = [given[n].data_ptr() if n in given else 0 for n in "rkvwu"]
        assert addresses(launch, 11) == [*places, state.data_ptr(), 0, y.data_ptr(), final.data_ptr(), 0, 0]
        of_w = strides_of(N) if "w" in with_tokens else STRIDE_OF_CONSTANT
        assert launch.arguments[11:15] == (strides_of(N), strides_of(N), strides_of(12), of_w)
        assert launch.arguments[15:17] == (struct.pack("q", T), struct.pack("q", H))
        assert launch.arguments[17:] == (struct.pack("i", T), struct.pack("f", 0.5))
        monkeypatch.setattr(boundary, "check_tensors", refuse)


@pytest.mark.parametrize("op", SHARED)
def test_what_an_op_does_not_have_is_null_in_the_backward(op, calls, monkeypatch):
    names, with_tokens = SHARED[op]
    for _ in range(2):
        given, state = make_shared(op, grad=True), torch.randn(B, H, 12, N, requires_grad=True)
        y, final = getattr(rwkv_jit, op)(*given.values(), state, True, state_layout="vk")
        (checkpoints,) = addresses(calls.launches[-1], 10)[9:]
        dy, grad_final = torch.randn_like(y), torch.randn_like(final)
        grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, grad_final])
        launch = calls.launches[-1]
        assert launch.entry == "gla_backward"
        found = addresses(launch, 17)
        places = [given[n].data_ptr() if n in given else 0 for n in "rkvwu"]
        assert found[:9] == [*places, dy.data_ptr(), 0, checkpoints, grad_final.data_ptr()]
        of_inputs = dict(zip(names, grads, strict=False))
        for name, address in zip("rkvwu", found[9:14], strict=True):
            if name not in names:
                assert address == 0
            elif name in with_tokens:
                assert address == of_inputs[name].data_ptr()
            else:  # one for each sequence, which torch adds up
                assert address not in (0, of_inputs[name].data_ptr())
        assert (found[14], found[15]) == (grads[-1].data_ptr(), 0)
        assert found[16]
        of_w = strides_of(N) if "w" in with_tokens else STRIDE_OF_CONSTANT
        assert launch.arguments[17:22] == (strides_of(N), strides_of(N), strides_of(12), of_w, strides_of(12))
        assert launch.arguments[22:24] == (struct.pack("q", T), struct.pack("q", H))
        monkeypatch.setattr(boundary, "check_tensors", refuse)


@pytest.mark.parametrize("op", ["gla", "linear_attention"])
def test_scale_that_is_not_given_is_that_of_attention(op, calls):
    getattr(rwkv_jit, op)(*make_shared(op).values())
    assert calls.launches[-1].arguments[-1] == struct.pack("f", N**-0.5)


def test_constant_decay_at_an_address_that_cannot_be_read_is_copied(calls):
    given = make_shared("wkv5")
    rwkv_jit.wkv5(*given.values())
    shifted = torch.randn(H * N + 1)[1:].view(H, N)
    assert shifted.data_ptr() % 16
    rwkv_jit.wkv5(*{**given, "w": shifted}.values())
    assert len(known_calls.forwards) == 1
    assert addresses(calls.launches[1], 4)[3] % 16 == 0


def test_gradients_of_inputs_without_tokens_are_added_over_the_sequences(calls, monkeypatch):
    empty = torch.empty

    def ones(*size, **more):
        return empty(*size, **more).fill_(1.0)

    given = make_shared("wkv5", grad=True)
    y, _ = rwkv_jit.wkv5(*given.values())
    monkeypatch.setattr(torch, "empty", ones)  # the stub writes nothing: results are what they were made with
    _, _, _, dw, du = torch.autograd.grad(y, list(given.values()), torch.ones_like(y))
    assert torch.equal(dw, torch.full((H, N), float(B)))
    assert torch.equal(du, dw)


@pytest.mark.parametrize("value_size", [5, 8])
def test_normalized_attention_runs_on_values_with_a_column_of_ones(value_size, calls, monkeypatch):
    seen = []
    launch = calls.launchKernel

    def note(*arguments):
        launch(*arguments)
        address = addresses(calls.launches[-1], 3)[2]
        size = 8 if value_size == 5 else 16
        floats = (ctypes.c_float * (B * T * H * size)).from_address(address)
        seen.append(torch.tensor(list(floats)).view(B, T, H, size))

    monkeypatch.setattr(calls, "launchKernel", note)
    q, k, v = torch.randn(B, T, H, N), torch.randn(B, T, H, N), torch.randn(B, T, H, value_size)
    y, (final, z) = rwkv_jit.linear_attention(q, k, v, None, True, normalize=True)
    assert (y.shape, final.shape, z.shape) == (v.shape, (B, H, N, value_size), (B, H, N))
    (wide,) = seen
    assert torch.equal(wide[..., :value_size], v)
    assert torch.equal(wide[..., value_size], torch.ones(B, T, H))
    assert not wide[..., value_size + 1 :].any()


# ---- the chunked backend -----------------------------------------------------------------------------------------


LONG = (B, 40, H, 16)


@pytest.fixture
def chunked_calls(calls):
    """The driver knows what the chunked kernels take."""
    calls.sizes.update(CHUNKED_SIZES)
    return calls


def test_long_call_with_a_bounded_decay_takes_the_chunked_kernels_from_then_on(chunked_calls, monkeypatch):
    options = {"decay": "sigmoid", "scale": 0.5}
    for _ in range(2):
        given = make(torch.bfloat16, LONG)
        y, _ = rwkv_jit.wkv7(*given, **options)
        launch = chunked_calls.launches[-1]
        assert addresses(launch, 12) == [*[x.data_ptr() for x in given], 0, 0, y.data_ptr(), 0, 0, 0]
        assert launch.arguments[12:18] == (struct.pack("3q", 40 * H * 16, H * 16, 16),) * 6
        assert launch.arguments[18:] == (struct.pack("q", 40), struct.pack("q", H), struct.pack("f", 0.5))
        assert (launch.grid, launch.block) == ((B, H, 1), (64, 1, 1))
        assert launch.shared_bytes == chunked.shared_bytes("forward", 16, 16, 32, 64) > 0
        monkeypatch.setattr(boundary, "check_tensors", refuse)


@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    [
        (torch.bfloat16, (B, 31, H, 16), {"decay": "sigmoid"}),
        (torch.float32, LONG, {"decay": "sigmoid"}),
        (torch.bfloat16, LONG, {"decay": "sigmoid", "backend": "recurrent"}),
        (torch.bfloat16, LONG, {"decay": "raw", "backend": "recurrent"}),
    ],
    ids=["tokens", "dtype", "asked", "asked, no bound"],
)
def test_other_calls_take_the_recurrent_kernels(dtype, shape, options, calls):
    rwkv_jit.wkv7(*make(dtype, shape), **options)
    assert len(calls.launches[0].arguments) == len(SIZES["wkv7_forward"])


def test_backward_of_a_chunked_call(chunked_calls):
    state = torch.randn(B, H, 16, 16, requires_grad=True)
    for _ in range(2):
        given = make(torch.bfloat16, LONG, grad=True)
        y, final = rwkv_jit.wkv7(*given, state, True, decay="sigmoid")
        (checkpoints,) = addresses(chunked_calls.launches[-1], 11)[10:]
        assert checkpoints
        grads = torch.autograd.grad([y, final], [*given, state], [torch.ones_like(y), torch.ones_like(final)])
        launch = chunked_calls.launches[-1]
        back = addresses(launch, 17)
        assert back[:6] == [x.data_ptr() for x in given]
        assert 0 not in (back[6], back[9])
        assert back[7:9] == [0, checkpoints]
        assert back[10:] == [grad.data_ptr() for grad in grads]
        assert launch.arguments[24:] == (struct.pack("q", 40), struct.pack("q", H), struct.pack("f", 1.0))
        assert launch.shared_bytes == chunked.shared_bytes("backward", 16, 16, 32, 64)
    assert [launch.entry for launch in chunked_calls.launches] == ["wkv7_forward", "wkv7_backward"] * 2


@pytest.mark.parametrize(("shift", "is_copied"), [(1, True), (4, True), (8, False)])
def test_gradient_of_y_at_an_address_the_backward_cannot_read_is_copied(shift, is_copied, chunked_calls):
    given = make(torch.bfloat16, LONG, grad=True)
    y, _ = rwkv_jit.wkv7(*given, decay="sigmoid")
    dy = torch.randn(y.numel() + 8).to(y.dtype)[shift : shift + y.numel()].view(y.shape)
    torch.autograd.grad(y, given, dy)
    (address,) = addresses(chunked_calls.launches[-1], 7)[6:]
    assert address % 16 == 0
    assert (address != dy.data_ptr()) == is_copied


def test_training_asks_for_both_chunked_kernels_at_once(chunked_calls, monkeypatch):
    asked, get_kernels = [], prepared.get_kernels

    def watched(backend, requests, *chosen):
        asked.append([(request.template.name, request.parameters["CHUNK_LEN"]) for request in requests])
        return get_kernels(backend, requests, *chosen)

    monkeypatch.setattr(prepared, "get_kernels", watched)
    rwkv_jit.wkv7(*make(torch.bfloat16, LONG, grad=True), decay="sigmoid", chunk_len=16)
    assert asked == [[("wkv7_chunked_forward", 16), ("wkv7_chunked_backward", 16)]]


@pytest.mark.parametrize(("size", "shift", "is_copied"), [(16, 4, True), (16, 8, False), (12, 4, False), (12, 2, True),
                                                          (7, 1, False)])  # fmt: skip
def test_chunked_kernels_read_sixteen_bytes_where_rows_consist_of_them(size, shift, is_copied, chunked_calls):
    given = make(torch.bfloat16, (B, 40, H, size))
    rwkv_jit.wkv7(*given, decay="sigmoid")
    memory = torch.randn(given[0].numel() + 8).to(torch.bfloat16)
    moved = memory[shift : shift + given[0].numel()].view(given[0].shape)
    rwkv_jit.wkv7(moved, *given[1:], decay="sigmoid")
    assert (addresses(chunked_calls.launches[1], 1) != [moved.data_ptr()]) == is_copied
    wide = torch.randn(B, 40, H, size + shift).to(torch.bfloat16)[..., :size]  # rows that begin at other places
    rwkv_jit.wkv7(wide, *given[1:], decay="sigmoid")
    assert (addresses(chunked_calls.launches[2], 1) != [wide.data_ptr()]) == is_copied


def test_what_the_torch_op_may_do_a_public_call_may_not(chunked_calls):
    given = make(torch.bfloat16, LONG)
    options = (1.0, "sigmoid", "vk", 64, 64, None, "chunked", None, None, False)
    torch.ops.rwkv_jit.wkv7_fwd(*given, None, None, *options, False, False)
    assert len(chunked_calls.launches) == 1
    message = "backend: 'chunked' takes chunk_len 16 or 32, got 64; use 'auto' or 'recurrent'"
    with pytest.raises(UnsupportedConfigError, match=re.escape(message)):
        rwkv_jit.wkv7(*given, decay="sigmoid", backend="chunked", chunk_len=64)
    rwkv_jit.wkv7(*given, decay="sigmoid", backend="chunked", chunk_len=32)
    assert len(chunked_calls.launches) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_fake_of_a_chunked_call_has_the_sizes_of_the_real_one(packed, chunked_calls):
    from torch._subclasses import FakeTensorMode

    given = make(torch.bfloat16, (1, 70, H, 40))
    bounds = torch.tensor([0, 3, 3, 70]) if packed else None
    arguments = (None, bounds, 1.0, "sigmoid", "vk", 64, 32, None, "chunked", None, None, False, True, True)
    real = torch.ops.rwkv_jit.wkv7_fwd(*given, *arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in given]
        fake = torch.ops.rwkv_jit.wkv7_fwd(*fakes, *arguments)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]
    slots = 70 // 32 + 3 if packed else 3
    assert real[2].numel() * 4 == 2 * slots * H * 64 * 64  # states in bfloat16, both sizes rounded up to 64


# ---- the scan ----------------------------------------------------------------------------------------------------


LARGE = (B, 70, H, 200)


SCANS = {"sm_80": "wkv7_scan", "sm_90": "wkv7_group_scan"}


@pytest.fixture(params=SCANS)
def arch(request, calls, monkeypatch):
    """The architecture of the driver's GPU."""
    monkeypatch.setattr(tensors, "_capability", lambda device: request.param)
    return request.param


@pytest.fixture
def scan_calls(calls, arch):
    """The driver knows what the kernels for large heads take."""
    calls.sizes.update(SCAN_SIZES)
    return calls


def strides(*tensors):
    return tuple(struct.pack("3q", *x.stride()[:3]) for x in tensors)


def counts(*numbers):
    return tuple(struct.pack("q", number) for number in numbers)


FROM_START = struct.pack("i", 0)


def end_of_scan(values, of_chunks, arch):
    """What a scan of all chunks takes behind the addresses that all scans have; another launch has a block for each."""
    if arch != "sm_90":
        return (*strides(values), *counts(70, H))
    return (*counts(0), *strides(values), *counts(70, H), struct.pack("2i", 0, of_chunks.grid[0]))


@pytest.mark.parametrize("few_heads", [False, True])
def test_call_with_large_heads_prepares_its_chunks_and_scans_them(few_heads, scan_calls, arch, monkeypatch):
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: B * H * 4 + few_heads)
    state = torch.randn(B, H, 200, 200)
    for _ in range(2):
        given = r, w, k, v, a, b = make(torch.bfloat16, LARGE)
        y, final = rwkv_jit.wkv7(*given, state, True, decay="sigmoid", scale=0.5)
        first, second = scan_calls.launches[-2:]
        assert (first.entry, second.entry) == ("wkv7_prepare", SCANS[arch])
        assert addresses(first, 6) == [*[x.data_ptr() for x in (r, w, k, a, b)], 0]
        passed = addresses(first, 9)[6:]
        assert 0 not in passed
        assert addresses(second, 10) == [v.data_ptr(), state.data_ptr(), 0, *passed, y.data_ptr(), 0, 0,
                                         final.data_ptr()]  # fmt: skip
        assert first.arguments[9:] == (
            *strides(r, w, k, a, b), *counts(70, H, B), struct.pack("f", 0.5), struct.pack("i", 0), FROM_START
        )  # fmt: skip
        assert second.arguments[10:] == end_of_scan(v, first, arch)
        of_scan = scan_geometry.specialize("wkv7", "forward", 200, 200, TYPES, arch, few_heads=few_heads).parameters
        length, rows = of_scan["CHUNK_LEN"], 32 if few_heads and arch == "sm_90" else 64  # no room for others
        (of_chunks,) = (
            each.parameters for each in scan_geometry.companions("wkv7", "forward", 200, 200, TYPES, arch, length)
        )
        assert (first.grid, first.block) == ((B * -(-70 // length), H, 1), (4 * length, 1, 1))
        assert (second.grid, second.block) == ((B * -(-200 // rows), H, 1), (of_scan["NUM_THREADS"], 1, 1))
        assert (first.shared_bytes, second.shared_bytes) == (of_chunks["SHARED_BYTES"], of_scan["SHARED_BYTES"])
        monkeypatch.setattr(boundary, "check_tensors", refuse)


def test_backward_of_a_call_with_large_heads(scan_calls, arch):
    state = torch.randn(B, H, 200, 200, requires_grad=True)
    for _ in range(2):
        given = r, w, k, v, a, b = make(torch.bfloat16, LARGE, grad=True)
        y, final = rwkv_jit.wkv7(*given, state, True, decay="sigmoid")
        prepare, forward = scan_calls.launches[-2:]
        assert prepare.arguments[-2] == struct.pack("i", 1)
        solutions, states = addresses(forward, 9)[7:]
        assert 0 not in (solutions, states)
        dy, d_final = torch.ones_like(y), torch.ones_like(final)
        grads = torch.autograd.grad([y, final], [*given, state], [dy, d_final])
        of = dict(zip(("r", "w", "k", "v", "a", "b"), grads[:6], strict=True))
        back, of_tokens, of_keys = scan_calls.launches[-3:]
        found = addresses(back, 10)
        assert found[:3] == [dy.data_ptr(), d_final.data_ptr(), 0]
        assert found[3:6] == addresses(prepare, 9)[6:]
        dx, e = found[7:9]
        assert found[6:] == [of["v"].data_ptr(), dx, e, grads[6].data_ptr()]
        gradients = addresses(of_tokens, 6)[5]
        assert addresses(of_tokens, 5) == [v.data_ptr(), dy.data_ptr(), 0, solutions, dx]
        assert addresses(of_keys, 18) == [
            *[x.data_ptr() for x in (*given, dy)], 0, solutions, dx, states, e, gradients,
            *[of[name].data_ptr() for name in ("r", "w", "k", "a", "b")],
        ]  # fmt: skip
        passed = {dx, e, solutions, states, gradients}
        assert len(passed) == 5
        assert not any(address % 16 for address in passed)
        assert back.arguments[10:] == end_of_scan(dy, of_tokens, arch)
        assert of_tokens.arguments[6:] == (*strides(v, dy), *counts(70, H, B), FROM_START)
        assert of_keys.arguments[18:] == (*strides(*given, dy), *counts(70, H, B), struct.pack("f", 1.0), FROM_START)
        others = scan_geometry.companions("wkv7", "backward", 200, 200, TYPES, arch, None)
        for launch, request, blocks in zip((of_tokens, of_keys), others, (1, 4), strict=True):  # 4 slabs
            wanted = request.parameters
            assert launch.entry == request.template.name
            assert launch.grid == (B * -(-70 // wanted["CHUNK_LEN"]) * blocks, H, 1)
            assert (launch.block[0], launch.shared_bytes) == (wanted["NUM_THREADS"], wanted["SHARED_BYTES"])
    entries = [launch.entry for launch in scan_calls.launches]
    assert entries == [
        "wkv7_prepare", SCANS[arch], SCANS[arch], "wkv7_token_gradients", "wkv7_key_gradients"
    ] * 2  # fmt: skip


class SideStream:
    """Takes note of who waits for whom, in the driver's list of launches."""

    raw = 8

    def __init__(self, launches):
        self.launches = launches

    def follow(self):
        self.launches.append("follow")

    def join(self):
        self.launches.append("join")


def test_scan_of_few_heads_leaves_room_to_the_other_kernels(calls, monkeypatch):
    calls.sizes.update(SCAN_SIZES)
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_90")
    monkeypatch.setattr(tensors, "side_stream", lambda device: SideStream(calls.launches))
    monkeypatch.setattr(scan_geometry, "_LEAST_CHUNKS", 30)
    tokens, chunks = 64 * 30 - 5, 30
    given = make(torch.bfloat16, (B, tokens, 1, 256), grad=True)
    y, _ = rwkv_jit.wkv7(*given, decay="sigmoid")
    forward, calls.launches[:] = list(calls.launches), []
    y.backward(torch.ones_like(y))
    backward = calls.launches

    def order(launches):
        return [x if isinstance(x, str) else (x.entry, x.stream) for x in launches]

    others = [("wkv7_token_gradients", 7), ("wkv7_key_gradients", 7)]
    assert order(forward) == [("wkv7_prepare", 7), "follow", ("wkv7_group_scan", 8)] * 4 + ["join"]
    assert order(backward) == ["follow", *[("wkv7_group_scan", 8), "join", *others] * 4]
    for launches, ends in ((forward, [0, 7, 15, 22, 30]), (backward, [0, 2, 6, 14, 30])):
        scans = [x for x in launches if not isinstance(x, str) and x.entry == "wkv7_group_scan"]
        walks = [struct.unpack("2i", x.arguments[-1]) for x in scans]
        assert walks == list(itertools.pairwise(ends))
        assert {x.grid for x in scans} == {(B * 256 // 32, 1, 1)}
        assert len({x.arguments[10] for x in scans} - set(counts(0))) == 1  # what passes from part to part
        others = [x for x in launches if not isinstance(x, str) and x not in scans]
        for each in others:
            per_chunk = 4 if each.entry == "wkv7_key_gradients" else 1
            (first,), length = struct.unpack("i", each.arguments[-1]), each.grid[0] // per_chunk
            walk = (first, first + length) if launches is forward else (chunks - first - length, chunks - first)
            assert walk in walks
            assert each.grid == (length * per_chunk, 1, B)
        assert len(others) == len(scans) * (1 if launches is forward else 2)


@pytest.mark.parametrize("first", [False, True])
def test_training_and_inference_of_equal_tensors_are_prepared_apart(first, scan_calls):
    given = make(torch.bfloat16, LARGE, grad=True)
    for training in (first, not first):
        with torch.set_grad_enabled(training):
            rwkv_jit.wkv7(*given, decay="sigmoid")
        prepare, forward = scan_calls.launches[-2:]
        assert prepare.arguments[-2] == struct.pack("i", training)
        assert [address != 0 for address in addresses(forward, 9)[7:]] == [training, training]


def test_training_asks_for_all_kernels_of_large_heads_at_once(scan_calls, arch, monkeypatch):
    asked, get_all = [], kernel.get_all

    def watched(requests):
        asked.append(sorted((request.template.name, request.parameters.get("BACKWARD")) for request in requests))
        return get_all(requests)

    monkeypatch.setattr(kernel, "get_all", watched)
    rwkv_jit.wkv7(*make(torch.bfloat16, LARGE, grad=True), decay="sigmoid")
    others = [("wkv7_key_gradients", None), ("wkv7_prepare", None), ("wkv7_token_gradients", None)]
    assert asked == [sorted([(SCANS[arch], False), (SCANS[arch], True), *others])]


@pytest.mark.parametrize("packed", [False, True])
def test_fake_of_a_call_with_large_heads_has_the_sizes_of_the_real_one(packed, scan_calls):
    from torch._subclasses import FakeTensorMode

    length, size, value_size, tokens = 32, 200, 77, 70
    given = make(torch.bfloat16, (1, tokens, H, size))
    given[3] = torch.randn(1, tokens, H, value_size).to(torch.bfloat16)
    bounds = torch.tensor([0, 3, 3, tokens]) if packed else None
    arguments = (None, bounds, 1.0, "sigmoid", "vk", 64, length, None, "scan", None, None, False, True, True)
    real = torch.ops.rwkv_jit.wkv7_fwd(*given, *arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in given]
        fake = torch.ops.rwkv_jit.wkv7_fwd(*fakes, *arguments)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]
    # As the templates count: tiles of 64 channels, lower triangles of 16 x 16, both frames, states of rounded sizes.
    places, channels, blocks = (tokens // length + 3 if packed else 3) * H, 256, length // 16
    of_a_place = (
        4 * length * channels * 2 + 4 * blocks * (blocks + 1) // 2 * 512 + 2 * channels * 4 + channels * 128 * 2
    )
    assert real[2].numel() * 4 == places * of_a_place + -(-tokens * H * value_size * 2 // 16) * 16


# ---- arguments by name -----------------------------------------------------------------------------------------------

_LETTERS = {"Strides": "3q", "i64": "q", "float": "f"}


def arguments_of(name):
    """The arguments of a template's kernel in their order, and the struct letters of each."""
    (text,) = re.findall(rf" {name}\(\s(.*?)\) {{", template.library(name).body, re.DOTALL)
    words = [argument.split() for argument in text.split(",")]
    return {found[-1]: "Q" if "*" in " ".join(found) else _LETTERS[found[0]] for found in words}


GROUP_ARGUMENTS = {
    name: arguments_of(name) for name in ("gla_prepare", "gla_group_scan", "gla_group_key_gradients")
}  # fmt: skip


def named(launch):
    """What a launch was given, by the names of the template."""
    letters = GROUP_ARGUMENTS[launch.entry]
    found = [struct.unpack(f"={each}", x) for each, x in zip(letters.values(), launch.arguments, strict=True)]
    return {name: x if len(x) > 1 else x[0] for name, x in zip(letters, found, strict=True)}


# ---- decays without a promise --------------------------------------------------------------------------------------

# By template, as kernels of both kinds have one entry.
GUARDED_SIZES = {
    "wkv7_decay_range": [8] * 3 + [24] + [8] * 2 + [4],
    **{f"wkv7_recurrent_{way}": SIZES[f"wkv7_{way}"] for way in ("forward", "backward")},
    **{f"wkv7_chunked_{way}": CHUNKED_SIZES[f"wkv7_{way}"] for way in ("forward", "backward")},
    **SCAN_SIZES,
    "wkv7_segment": [8] * 7 + [24] * 5 + [8] * 2 + [4],
    "wkv7_join": [8] * 5 + [8] * 2,
    **{f"gla_recurrent_{way}": SIZES[f"gla_{way}"] for way in ("forward", "backward")},
    "gla_segment": [8] * 5 + [24] * 3 + [8] * 2 + [4],
    "gla_join": [8] * 5 + [8] * 2,
    "gla_scan": [8] * 11 + [24] * 4 + [8] * 2 + [4],
    "gla_chunked_backward": [8] * 15 + [24] * 5 + [8] * 2 + [4],
    "gla_key_gradients": [8] * 13 + [24] * 5 + [8] * 3 + [4],
    "gla_group_backward": [8] * 15 + [24] * 5 + [8] * 2 + [4],
    **{name: [struct.calcsize(f"={x}") for x in found.values()] for name, found in GROUP_ARGUMENTS.items()},
}


@pytest.fixture
def guarded_calls(calls, monkeypatch):
    """The driver calls functions by their templates, and finds them while their device is the current one."""
    within = []

    class Device:
        def __init__(self, index):
            pass

        def __enter__(self):
            within.append(self)

        def __exit__(self, *_):
            within.pop()

    def get_all(requests):
        made = []
        for request in requests:
            name = request.template.name
            entry = re.sub("_(recurrent|chunked|group(?=_backward))", "", name)
            made.append(calls.make_kernel(entries=(entry,), image=f"sm_80 sm_90 {name}".encode()))
            made[-1].parameters = dict(request.parameters)
        return made

    def function(module, entry):
        assert within
        return calls.function(module, module.image.decode().split()[-1])

    monkeypatch.setattr(kernel, "get_all", get_all)
    monkeypatch.setattr(prepared, "get_kernels", lambda nearest, requests, *chosen: get_all(requests))
    monkeypatch.setattr(cuda, "function", function)
    monkeypatch.setattr(torch.cuda, "device", Device)
    calls.sizes.update(GUARDED_SIZES)
    return calls


def entries(launches):
    return [launch.entry.removeprefix("wkv7_") for launch in launches]


PACKINGS = pytest.mark.parametrize("bounds", [None, [0, 3, 3, 120]], ids=["rows", "packed"])


def packing(bounds):
    return (LONG, B, None) if bounds is None else ((1, 120, H, 16), len(bounds) - 1, torch.tensor(bounds))


@PACKINGS
def test_guarded_call_computes_all_heads_and_then_those_whose_decays_leave(bounds, guarded_calls, monkeypatch):
    shape, sequences, cu_seqlens = packing(bounds)
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    state = torch.randn(sequences, H, 16, 16)
    for _ in range(2):
        given = make(torch.bfloat16, shape)
        y, final = rwkv_jit.wkv7(*given, state, True, cu_seqlens, scale=0.5)
        fast, exact = guarded_calls.launches[-2:]
        assert entries([fast, exact]) == ["chunked_forward", "recurrent_forward"]
        passed = [*[x.data_ptr() for x in given], state.data_ptr(), at_bounds, y.data_ptr(), final.data_ptr()]
        *found, checkpoints, flags = addresses(fast, 12)
        assert (found, checkpoints) == (passed, 0)
        assert flags
        assert addresses(exact, 13) == [*passed, 0, 0, flags]
        assert exact.arguments[13:] == (
            *strides(*given), *counts(shape[1], H), struct.pack("i", min(64, shape[1])), struct.pack("f", 0.5)
        )  # fmt: skip
        monkeypatch.setattr(boundary, "check_tensors", refuse)
    assert len(guarded_calls.launches) == 4


@PACKINGS
def test_backward_of_a_guarded_call(bounds, guarded_calls):
    shape, sequences, cu_seqlens = packing(bounds)
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    state = torch.randn(sequences, H, 16, 16, requires_grad=True)
    for _ in range(2):
        given = make(torch.bfloat16, shape, grad=True)
        y, final = rwkv_jit.wkv7(*given, state, True, cu_seqlens)
        fast, exact = guarded_calls.launches[-2:]
        chunks, flags = addresses(fast, 12)[10:]
        assert addresses(exact, 13)[10:] == [0, 0, flags]
        slots = 120 // 32 + 3 if bounds else B * 2
        assert flags - chunks == 2 * slots * H * 32 * 32  # one behind the other, and nothing else is kept
        dy, d_final = torch.ones_like(y), torch.ones_like(final)
        grads = torch.autograd.grad([y, final], [*given, state], [dy, d_final])
        fast, repeat, exact = guarded_calls.launches[-3:]
        assert entries([fast, repeat, exact]) == ["chunked_backward", "recurrent_forward", "recurrent_backward"]
        inputs, results = [x.data_ptr() for x in (*given, dy)], [grad.data_ptr() for grad in grads]
        assert addresses(fast, 17) == [*inputs, at_bounds, chunks, d_final.data_ptr(), *results]
        *passed, checkpoints, sa, of_repeat = addresses(repeat, 13)
        assert passed == [*inputs[:-1], state.data_ptr(), at_bounds, 0, 0]
        assert of_repeat == flags
        slots = 120 // 64 + 3 if bounds else B
        assert sa - checkpoints == 4 * slots * H * 16 * 16
        found = addresses(exact, 20)
        assert found[:-1] == [*inputs, at_bounds, checkpoints, sa, d_final.data_ptr(), *results, flags]
        assert found[-1]
        assert exact.arguments[27:29] == counts(shape[1], H)
        interval = min(64, shape[1])
        assert exact.arguments[31:] == (struct.pack("i", interval), struct.pack("f", 1.0))
    assert len(guarded_calls.launches) == 10


@pytest.mark.parametrize("arch", SCANS)
@PACKINGS
def test_guarded_call_with_large_heads(bounds, arch, guarded_calls, monkeypatch):
    monkeypatch.setattr(tensors, "_capability", lambda device: arch)
    shape, sequences, cu_seqlens = packing(bounds)
    given = r, w, k, v, a, b = make(torch.bfloat16, (*shape[:3], 200), grad=True)
    state = torch.randn(sequences, H, 200, 200, requires_grad=True)
    y, final = rwkv_jit.wkv7(*given, state, True, cu_seqlens, decay="log")
    look, first, fast, exact = guarded_calls.launches
    of_scan = SCANS[arch].removeprefix("wkv7_")
    assert entries(guarded_calls.launches) == ["decay_range", "prepare", of_scan, "recurrent_forward"]
    w_seen, bounds_seen, flags = addresses(look, 3)
    assert (w_seen, bounds_seen) == (w.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr())
    parts = -(-512 // (sequences * H))
    assert look.arguments[3:] == (*strides(w), *counts(shape[1], H), struct.pack("i", parts))
    assert (look.grid, look.block) == ((sequences * parts, H, 1), (256, 1, 1))
    assert addresses(fast, 10)[6] == addresses(exact, 9)[8] == y.data_ptr()
    assert addresses(fast, 10)[9] == addresses(exact, 10)[9] == final.data_ptr()
    saved = [*addresses(first, 9)[6:], *addresses(fast, 9)[7:]]
    assert 0 not in saved
    assert not any((address - saved[0]) % 16 for address in (*saved, flags))
    assert saved[0] == min(saved) < max(saved) < flags
    assert addresses(exact, 13)[10:] == [0, 0, flags]
    grads = torch.autograd.grad([y, final], [*given, state], [torch.ones_like(y), torch.ones_like(final)])
    back, _, of_keys, repeat, exact = guarded_calls.launches[4:]
    names = [of_scan, "token_gradients", "key_gradients", "recurrent_forward", "recurrent_backward"]
    assert entries(guarded_calls.launches[4:]) == names
    assert addresses(repeat, 7)[6] == state.data_ptr()
    assert addresses(back, 6)[3:] == saved[:3]
    found = addresses(exact, 19)
    assert found[8:10] == addresses(repeat, 12)[10:]
    assert found[11:] == [*[grad.data_ptr() for grad in grads], flags]
    of = dict(zip("rwkvab", found[11:17], strict=True))
    assert addresses(of_keys, 18)[13:] == [of[name] for name in "rwkab"]
    assert (addresses(back, 10)[6], addresses(back, 10)[9]) == (of["v"], found[17])


def test_flags_of_large_heads_are_zeros_before_they_are_looked_for(guarded_calls, monkeypatch):
    made, empty = [], torch.empty

    def filled(*size, **more):
        made.append(empty(*size, **more).fill_(7))
        return made[-1]

    monkeypatch.setattr(torch, "empty", filled)
    rwkv_jit.wkv7(*make(torch.bfloat16, (*LONG[:3], 200)))
    (flags,) = [x for x in made if x.dtype == torch.int32]
    assert not flags.any()


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_guarded_call_in_segments(layout, guarded_calls):
    given = make(torch.bfloat16, (1, 2048, H, 16), grad=True)
    state = torch.randn(1, H, 16, 16, requires_grad=True)
    y, final = rwkv_jit.wkv7(*given, state, True, decay="direct", state_layout=layout)
    names = entries(guarded_calls.launches)
    assert names == ["segment", "join", "chunked_forward", "recurrent_forward"]
    segment, join, fast, exact = guarded_calls.launches
    assert addresses(fast, 9)[8] == y.data_ptr()
    assert addresses(exact, 13)[6:10] == [state.data_ptr(), 0, y.data_ptr(), final.data_ptr()]
    flags = addresses(exact, 13)[12]
    assert 0 not in (addresses(fast, 12)[11], flags)  # of segments, and of sequences
    grads = torch.autograd.grad([y, final], [*given, state], [torch.ones_like(y), torch.ones_like(final)])
    r, w, k, v, a, b = given
    assert addresses(segment, 5) == [x.data_ptr() for x in (k, w, a, b, v)]
    assert addresses(join, 2) == addresses(segment, 7)[:4:-1]
    of_segments = (2048 // 4 * H * 16, H * 16, 16)
    assert segment.arguments[7:] == (
        *[struct.pack("3q", *of_segments)] * 5, *counts(2048 // 4, H), struct.pack("f", 1.0)
    )  # fmt: skip
    assert segment.grid == (4, H, 1)
    names = entries(guarded_calls.launches[4:])
    assert names == ["segment", "join", "chunked_backward", "recurrent_forward", "recurrent_backward"]
    segment, join = guarded_calls.launches[4:6]
    assert addresses(segment, 4) == [x.data_ptr() for x in (r, w, a, b)]
    repeat, back = guarded_calls.launches[-2], addresses(guarded_calls.launches[-1], 19)
    assert addresses(segment, 7)[4:] == [back[6], addresses(join, 2)[1], 0]
    assert addresses(repeat, 10)[6:] == [state.data_ptr(), 0, 0, 0]
    assert back[8:10] == addresses(repeat, 12)[10:]
    assert back[11:] == [*[grad.data_ptr() for grad in grads], flags]
    assert addresses(guarded_calls.launches[-3], 16)[10:] == back[11:17]


def test_call_whose_decays_are_bounded_is_not_guarded(guarded_calls):
    given = make(torch.bfloat16, LONG)
    rwkv_jit.wkv7(*given, decay_bound=-4.0)
    rwkv_jit.wkv7(*given, decay="sigmoid")
    rwkv_jit.wkv7(*given, backend="recurrent")
    rwkv_jit.wkv7(*given, decay_bound=-4.1, chunk_len=32)
    names = ["chunked_forward", "chunked_forward", "recurrent_forward"]
    assert entries(guarded_calls.launches) == [*names, "chunked_forward", "recurrent_forward"]
    assert addresses(guarded_calls.launches[2], 13)[12] == 0


@pytest.mark.parametrize("head_size", [160, 132, 130, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_are_copied_where_they_cannot_be_read(dtype, head_size, guarded_calls):
    """Of a signature that has been seen at an address that can be read."""
    given = make(torch.bfloat16, (B, 40, H, head_size))
    given[1] = given[1].to(dtype)
    rwkv_jit.wkv7(*given)
    memory = torch.randn(given[1].numel() + 8).to(dtype)
    for shift in (1, 8):
        moved = memory[shift : shift + given[1].numel()].view(given[1].shape)
        rwkv_jit.wkv7(given[0], moved, *given[2:])
        look = guarded_calls.launches[-4]
        readable = shift == 8 or head_size % 4
        assert (addresses(look, 1) == [moved.data_ptr()]) == bool(readable)
        assert look.arguments[3:4] == strides(given[1])
    turned = given[1].transpose(1, 2).contiguous().transpose(1, 2)
    rwkv_jit.wkv7(given[0], turned, *given[2:])
    look = guarded_calls.launches[-4]
    assert addresses(look, 1) == [turned.data_ptr()]
    assert look.arguments[3:4] == strides(turned)
    apart = given[1].transpose(2, 3).contiguous().transpose(2, 3)  # channels that are no neighbours
    rwkv_jit.wkv7(given[0], apart, *given[2:])
    look = guarded_calls.launches[-4]
    assert addresses(look, 1) != [apart.data_ptr()]
    assert look.arguments[3:4] == strides(given[1])


def test_guarded_call_without_tokens_or_heads(guarded_calls):
    empty = make(torch.bfloat16, (B, 0, H, 16), grad=True)
    y, final = rwkv_jit.wkv7(*empty, output_final_state=True, backend="chunked")
    assert entries(guarded_calls.launches) == ["chunked_forward", "recurrent_forward"]
    torch.autograd.grad(final.sum() + y.sum(), empty)
    names = ["chunked_backward", "recurrent_forward", "recurrent_backward"]
    assert entries(guarded_calls.launches[2:]) == names
    for shape in ((0, 40, H, 16), (B, 40, 0, 16)):
        given = make(torch.bfloat16, shape, grad=True)
        y, _ = rwkv_jit.wkv7(*given)
        assert y.shape == shape
        torch.autograd.grad(y.sum(), given)
    assert len(guarded_calls.launches) == 5


@pytest.mark.parametrize(
    ("backend", "bounds"),
    [("chunked", None), ("chunked", [0, 3, 3, 120]), ("scan", None), ("scan", [0, 3, 3, 120]), ("split", None)],
)
def test_fake_of_a_guarded_call_has_the_sizes_of_the_real_one(bounds, backend, guarded_calls):
    from torch._subclasses import FakeTensorMode

    shape, _, cu_seqlens = packing(bounds)
    size = {"chunked": 7, "scan": 131, "split": 7}[backend]
    shape = (*shape[:1], 2048 if backend == "split" else shape[1], *shape[2:3], size)
    given = make(torch.bfloat16, shape)
    arguments = (None, cu_seqlens, 1.0, "raw", "vk", 64, 32, None, backend, None, None, True, True, True)
    real = torch.ops.rwkv_jit.wkv7_fwd(*given, *arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in given]
        fake = torch.ops.rwkv_jit.wkv7_fwd(*fakes, *arguments)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


def test_compiler_need_not_know_the_batch_of_a_guarded_call(guarded_calls):
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    given = make(torch.bfloat16, (6, 40, H, 16))
    arguments = (None, None, 1.0, "raw", "vk", 64, 32, None, "chunked", None, None, True, True, True)
    with FakeTensorMode(shape_env=shapes) as mode:
        fakes = [mode.from_tensor(given[0], symbolic_context=context, source=ConstantSource("x"))] * 6
        before = len(shapes.guards)
        fake = torch.ops.rwkv_jit.wkv7_fwd(*fakes, *arguments)
    assert len(shapes.guards) == before
    assert str(fake[2].shape[0]) != str(int(fake[2].shape[0]))  # symbolic


# ---- the tensor cores of the ops that share templates ----------------------------------------------------------------


def make_gated(op, shape, value_size, grad=False):
    """Inputs in bfloat16, all but w, which is in float32."""
    names, with_tokens = SHARED[op]
    *lead, heads, size = shape
    given = {}
    for n in names:
        of_n = (*lead, heads, value_size if n == "v" else size) if n in with_tokens else (heads, size)
        given[n] = torch.randn(of_n).to(torch.float32 if n == "w" else torch.bfloat16).requires_grad_(grad)
    return given


def gated_options(op, **more):
    """Options of a call whose decays are bounded."""
    return more if op == "linear_attention" else {"decay": "sigmoid", **more}


def places(given, names="rkvwu"):
    return [given[n].data_ptr() if n in given else 0 for n in names]


def strides_of_gated(op, given, *more):
    """Of q, k, v or what is in its place, w, and more."""
    q, k, v = (given[n] for n in "rkv")
    of_w = strides(given["w"]) if "w" in SHARED[op][1] else (struct.pack("3q", 0, 0, q.shape[3]),)
    return (*strides(q, k, v), *of_w, *strides(*more))


@PACKINGS
@pytest.mark.parametrize("op", SHARED)
def test_gated_call_is_one_launch_in_each_direction(op, bounds, guarded_calls, monkeypatch):
    shape, sequences, cu_seqlens = packing(bounds)
    shape = (*shape[:3], 40)
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    for _ in range(2):
        given, state = make_gated(op, shape, 56, grad=True), torch.randn(sequences, H, 56, 40, requires_grad=True)
        options = gated_options(op, scale=0.5, state_layout="vk")
        y, final = getattr(rwkv_jit, op)(*given.values(), state, True, cu_seqlens, **options)
        forward = guarded_calls.launches[-1]
        assert forward.entry == "gla_scan"
        found = addresses(forward, 11)
        assert found[:9] == [*places(given), state.data_ptr(), at_bounds, y.data_ptr(), final.data_ptr()]
        assert found[9]
        assert found[10] == 0
        assert forward.arguments[11:] == (
            *strides_of_gated(op, given), *counts(shape[1], H), struct.pack("f", 0.5)
        )  # fmt: skip
        of_forward = gated.specialize(op, "forward", 40, 56, gated_types(op), "sm_80").parameters
        assert (forward.grid, forward.block) == ((sequences, H, 1), (of_forward["NUM_THREADS"], 1, 1))
        assert forward.shared_bytes == of_forward["SHARED_BYTES"]
        dy, d_final = torch.randn_like(y), torch.randn_like(final)
        grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, d_final])
        back = guarded_calls.launches[-1]
        assert back.entry == "gla_chunked_backward"
        made, passed = addresses(back, 15), dict(zip(given, grads, strict=False))
        assert made[:9] == [*places(given), dy.data_ptr(), at_bounds, found[9], d_final.data_ptr()]
        for name, address in zip("rkvwu", made[9:14], strict=True):
            if name in SHARED[op][1]:
                assert address == passed[name].data_ptr()
            else:  # a row for each sequence, or nothing
                assert (address != 0) == (name in given)
        assert made[14] == grads[-1].data_ptr()
        assert back.arguments[15:] == (
            *strides_of_gated(op, given, dy), *counts(shape[1], H), struct.pack("f", 0.5)
        )  # fmt: skip
        of_backward = gated.specialize(op, "backward", 40, 56, gated_types(op), "sm_80").parameters
        assert (back.grid, back.block) == ((sequences, H, 1), (of_backward["NUM_THREADS"], 1, 1))
        assert back.shared_bytes == of_backward["SHARED_BYTES"]
        monkeypatch.setattr(boundary, "check_tensors", refuse)
    assert len(guarded_calls.launches) == 4


def gated_types(op):
    types = {"T_IO": "bf16", "T_W": "fp32", "T_U": "bf16", "T_STATE": "fp32", "STATE_LAYOUT": "vk"}
    return types | {"DECAY": "none" if op == "linear_attention" else "sigmoid"}


@PACKINGS
@pytest.mark.parametrize("op", SHARED)
def test_gated_call_with_large_heads(op, bounds, guarded_calls, monkeypatch):
    shape, sequences, cu_seqlens = packing(bounds)
    shape = (*shape[:3], 200)
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    for _ in range(2):
        given, state = make_gated(op, shape, 300, grad=True), torch.randn(sequences, H, 300, 200, requires_grad=True)
        options = gated_options(op, scale=0.5, state_layout="vk")
        y, final = getattr(rwkv_jit, op)(*given.values(), state, True, cu_seqlens, **options)
        forward = guarded_calls.launches[-1]
        found = addresses(forward, 11)
        assert found[:9] == [*places(given), state.data_ptr(), at_bounds, y.data_ptr(), final.data_ptr()]
        states = found[9]
        assert states
        assert found[10] == 0
        of_scan = gated_scan.specialize(op, "forward", 200, 300, gated_types(op), "sm_80").parameters
        assert (forward.grid, forward.block) == ((sequences, H, 3), (of_scan["NUM_THREADS"], 1, 1))
        dy, d_final = torch.randn_like(y), torch.randn_like(final)
        grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, d_final])
        scan, of_keys = guarded_calls.launches[-2:]
        assert [launch.entry for launch in (forward, scan, of_keys)] == ["gla_scan", "gla_scan", "gla_key_gradients"]
        passed = dict(zip(given, grads, strict=False))
        in_place = {**given, "v": dy}
        back = addresses(scan, 11)
        assert back[:7] == [*places(in_place), d_final.data_ptr(), at_bounds]
        assert back[7:9] == [passed["v"].data_ptr(), grads[-1].data_ptr()]
        e = back[9]
        assert e not in (0, states)
        assert e % 16 == states % 16 == back[10] == 0
        assert scan.arguments[11:] == (
            *strides_of_gated(op, in_place), *counts(shape[1], H), struct.pack("f", 0.5)
        )  # fmt: skip
        assert (scan.grid, scan.block, scan.shared_bytes) == (forward.grid, forward.block, forward.shared_bytes)
        made = addresses(of_keys, 13)
        assert made[:9] == [*places(given), dy.data_ptr(), at_bounds, states, e]
        for name, address in zip("rkwu", made[9:], strict=True):
            if name in SHARED[op][1]:
                assert address == passed[name].data_ptr()
            else:  # a row for each chunk, or nothing
                assert (address != 0) == (name in given)
        assert of_keys.arguments[13:] == (
            *strides_of_gated(op, given, dy), *counts(shape[1], H, sequences), struct.pack("f", 0.5)
        )  # fmt: skip
        (request,) = gated_scan.companions(op, "backward", 200, 300, gated_types(op), "sm_80", None)
        length, threads = (request.parameters[name] for name in ("CHUNK_LEN", "NUM_THREADS"))
        slots = 120 // length + 3 if bounds else B * -(-40 // length)
        assert of_keys.grid == (slots * -(-224 // (threads // 2)), H, 1)
        assert (of_keys.block[0], of_keys.shared_bytes) == (threads, request.parameters["SHARED_BYTES"])
        monkeypatch.setattr(boundary, "check_tensors", refuse)
    assert len(guarded_calls.launches) == 6


def test_gradients_of_large_heads_without_tokens_are_added_over_the_chunks(guarded_calls, monkeypatch):
    zeros = torch.zeros

    def ones(*size, **more):
        return zeros(*size, **more).fill_(1.0)

    for bounds, slots in ((None, B * 2), (torch.tensor([0, 3, 3, 120]), 120 // 32 + 3)):
        shape = (B, 40, H, 200) if bounds is None else (1, 120, H, 200)
        given = make_gated("wkv5", shape, 300, grad=True)
        y, _ = rwkv_jit.wkv5(*given.values(), cu_seqlens=bounds, decay="sigmoid", chunk_len=32)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "zeros", ones)  # the stub writes nothing: results are what they were made with
            *_, dw, du = torch.autograd.grad(y, list(given.values()), torch.ones_like(y))
        assert torch.equal(dw, torch.full((H, 200), float(slots)))
        assert torch.equal(du.float(), dw)
        assert (dw.dtype, du.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("size", "value_size"), [(40, 56), (200, 300)])
def test_training_asks_for_all_kernels_of_a_gated_call_at_once(size, value_size, guarded_calls, monkeypatch):
    asked, get_all, get_kernels = [], kernel.get_all, prepared.get_kernels

    def names(requests):
        asked.append([(request.template.name, request.parameters.get("BACKWARD")) for request in requests])

    monkeypatch.setattr(kernel, "get_all", lambda requests: names(requests) or get_all(requests))
    monkeypatch.setattr(
        prepared,
        "get_kernels",
        lambda nearest, requests, *rest: names(requests) or get_kernels(nearest, requests, *rest),
    )
    rwkv_jit.gla(*make_gated("gla", (B, 40, H, size), value_size, grad=True).values(), decay="sigmoid")
    forward = ("gla_scan", False)
    if size == 40:
        assert asked == [[forward, ("gla_chunked_backward", None)]]
    else:  # the last one is in memory by then
        assert asked == [[forward, ("gla_scan", True), ("gla_key_gradients", None)], [forward]]
    asked.clear()
    with torch.no_grad():
        rwkv_jit.gla(*make_gated("gla", (B, 40, H, size), value_size, grad=True).values(), decay="sigmoid")
    assert asked == [[forward]]


@PACKINGS
@pytest.mark.parametrize(("size", "value_size"), [(40, 56), (200, 300)])
@pytest.mark.parametrize("op", [op for op in SHARED if op != "linear_attention"])
def test_guarded_call_of_the_other_ops(op, size, value_size, bounds, guarded_calls, monkeypatch):
    asked, get_kernels = [], prepared.get_kernels

    def watched(nearest, requests, *rest):
        asked.extend(request.parameters for request in requests if request.template.name == "gla_scan")
        return get_kernels(nearest, requests, *rest)

    monkeypatch.setattr(prepared, "get_kernels", watched)
    shape, sequences, cu_seqlens = packing(bounds)
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    given = make_gated(op, (*shape[:3], size), value_size, grad=True)
    state = torch.randn(sequences, H, value_size, size, requires_grad=True)
    y, final = getattr(rwkv_jit, op)(*given.values(), state, True, cu_seqlens, state_layout="vk")
    (fast,) = guarded_calls.launches  # it is right by itself
    assert fast.entry == "gla_scan"
    assert {each["LARGEST_DECAY"] for each in asked} == {LARGEST_DECAY}
    passed = [*places(given), state.data_ptr(), at_bounds, y.data_ptr(), final.data_ptr()]
    *found, chunks, flags = addresses(fast, 11)
    assert found == passed
    padded = chunked.padded(size) * chunked.padded(value_size)
    length = asked[0]["CHUNK_LEN"]
    slots = shape[1] // length + 3 if bounds else B * -(-shape[1] // length)
    assert flags - chunks == 2 * slots * H * padded
    dy, d_final = torch.ones_like(y), torch.ones_like(final)
    grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, d_final])
    *fast, repeat, exact = guarded_calls.launches[1:]
    names = ["gla_chunked_backward"] if size == 40 else ["gla_scan", "gla_key_gradients"]
    assert [launch.entry for launch in fast] == names
    assert [repeat.entry, exact.entry] == ["gla_recurrent_forward", "gla_recurrent_backward"]
    *found, checkpoints, of_repeat = addresses(repeat, 11)
    assert found == [*places(given), state.data_ptr(), at_bounds, 0, 0]
    assert of_repeat == flags
    back = addresses(exact, 17)
    assert back[:9] == [*places(given), dy.data_ptr(), at_bounds, checkpoints, d_final.data_ptr()]
    for name, address in zip("rkvwu", back[9:14], strict=True):
        if name in SHARED[op][1]:
            assert address == dict(zip(given, grads, strict=False))[name].data_ptr()
        else:
            assert (address != 0) == (name in given)
    assert back[14:16] == [grads[-1].data_ptr(), flags]
    assert back[16]
    if size == 40:  # what all sequences have of their own is corrected in place
        assert addresses(fast[0], 15)[9:14] == back[9:14]
    # Without gradients nobody wants the flags.
    del guarded_calls.launches[:]
    for _ in range(2):
        plain = [x.detach() for x in given.values()]
        y, final = getattr(rwkv_jit, op)(*plain, state.detach(), True, cu_seqlens, state_layout="vk")
        launch = guarded_calls.launches.pop()
        assert (launch.entry, guarded_calls.launches) == ("gla_scan", [])
        assert addresses(launch, 11)[7:] == [y.data_ptr(), final.data_ptr(), 0, 0]


@pytest.mark.parametrize(
    ("arch", "of_large"),
    [
        ("sm_80", ["gla_scan", "gla_scan", "gla_key_gradients"]),
        ("sm_90", ["gla_prepare", "gla_group_scan", "gla_group_scan", "gla_group_key_gradients"]),
    ],
)
def test_normalized_attention_takes_the_tensor_cores_with_its_column_of_ones(
    arch, of_large, guarded_calls, monkeypatch
):
    monkeypatch.setattr(tensors, "_capability", lambda device: arch)
    for value_size, entries in ((120, ["gla_scan", "gla_chunked_backward"]), (128, of_large)):
        del guarded_calls.launches[:]
        given = make_gated("linear_attention", (B, 40, H, 64), value_size, grad=True)
        y, _ = rwkv_jit.linear_attention(*given.values(), normalize=True)
        torch.autograd.grad(y.sum(), list(given.values()))
        assert [launch.entry for launch in guarded_calls.launches] == entries
        assert y.shape == (B, 40, H, value_size)


@PACKINGS
@pytest.mark.parametrize(("arch", "name"), [("sm_80", "gla_chunked_backward"), ("sm_90", "gla_group_backward")])
def test_backward_of_linear_attention_with_warp_groups(arch, name, bounds, guarded_calls, monkeypatch):
    """It takes what the other one does, but for the states: one for every 64 tokens."""
    monkeypatch.setattr(tensors, "_capability", lambda device: arch)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: made.append(empty(*size, **more)) or made[-1])
    shape, sequences, cu_seqlens = packing(bounds)
    given = make_gated("linear_attention", (*shape[:3], 128), 104, grad=True)
    state = torch.randn(sequences, H, 128, 104, requires_grad=True)
    y, final = rwkv_jit.linear_attention(*given.values(), state, True, cu_seqlens, 0.5)
    (forward,) = guarded_calls.launches
    chunks, (saved,) = addresses(forward, 11)[9], [x for x in made if x.data_ptr() == addresses(forward, 11)[9]]
    length = 64 if arch == "sm_90" else 32
    slots = shape[1] // length + sequences if bounds else shape[0] * -(-shape[1] // length)
    assert saved.numel() == slots * H * 128 * 128 // 2
    dy, d_final = torch.randn_like(y), torch.randn_like(final)
    grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, d_final])
    back = guarded_calls.launches[-1]
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    assert back.entry == name
    assert addresses(back, 15) == [
        *places(given), dy.data_ptr(), at_bounds, chunks, d_final.data_ptr(), *(x.data_ptr() for x in grads[:3]), 0, 0,
        grads[3].data_ptr(),
    ]  # fmt: skip
    assert back.arguments[15:] == (
        *strides_of_gated("linear_attention", given, dy), *counts(shape[1], H), struct.pack("f", 0.5)
    )  # fmt: skip
    assert (back.grid, back.block) == ((sequences, H, 1), (256, 1, 1))
    types = gated_types("linear_attention")
    of_backward = gated.specialize("linear_attention", "backward", 128, 104, types, arch).parameters
    assert back.shared_bytes == of_backward["SHARED_BYTES"]


@pytest.mark.parametrize("size", [40, 200])
def test_gated_call_without_tokens_or_heads(size, guarded_calls):
    for shape in ((B, 0, H, size), (0, 40, H, size), (B, 40, 0, size)):
        given = make_gated("wkv5", shape, size, grad=True)
        y, final = rwkv_jit.wkv5(
            *given.values(), output_final_state=True, decay="sigmoid", backend="chunked" if size == 40 else "split"
        )
        assert y.shape == shape
        grads = torch.autograd.grad(y.sum() + final.sum(), list(given.values()))
        assert [grad.shape for grad in grads] == [x.shape for x in given.values()]
    # Without tokens states are copied, and for large heads there is no chunk that could have gradients.
    names = ["gla_scan", "gla_chunked_backward" if size == 40 else "gla_scan"]
    assert [launch.entry for launch in guarded_calls.launches] == names


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("op", SHARED)
def test_gated_call_in_segments(op, layout, guarded_calls):
    batch, tokens, count = 2, 1280, 5
    given = make_gated(op, (batch, tokens, H, 40), 56, grad=True)
    if op == "wkv5":  # rows apart from each other are read in place
        given["w"] = torch.randn(H, 80)[:, :40].detach().requires_grad_()
    state = torch.randn(batch, H, *((56, 40) if layout == "vk" else (40, 56)), requires_grad=True)
    options = gated_options(op, scale=0.5, state_layout=layout, backend="split")
    y, final = getattr(rwkv_jit, op)(*given.values(), state, True, **options)
    segment, join, fast = guarded_calls.launches
    assert [launch.entry for launch in (segment, join, fast)] == ["gla_segment", "gla_join", "gla_scan"]
    rows, of_segments = batch * count, (tokens // count * H * 40, H * 40, 40)
    of_values = (tokens // count * H * 56, H * 56, 56)
    of_w = {"wkv5": (0, 0, 80), "linear_attention": (0, 0, 0)}.get(op, of_segments)
    common = [struct.pack("3q", *each) for each in (of_segments, of_w, of_values)]
    common += [*counts(tokens // count, H), struct.pack("f", 0.5)]
    found = addresses(segment, 5)
    assert found[:3] == places(given, "kwv")
    assert segment.arguments[5:] == tuple(common)
    assert (segment.grid, segment.block, segment.shared_bytes) == ((rows, H, 1), (128, 1, 1), 0)
    joined = addresses(join, 5)
    assert joined[:2] == found[:2:-1]
    assert (joined[2] == state.data_ptr()) == (layout == "vk")
    assert joined[4] == 0
    assert join.arguments[5:] == tuple(counts(H, count))
    assert (join.grid, join.block) == ((batch, H, 19), (128, 1, 1))  # three rows of 40 channels
    scanned = addresses(fast, 11)
    # In place where it can be read so, from the states that were joined.
    assert scanned[:3] == places(given, "rkv")
    assert [scanned[n] for n in (5, 6, 7, 10)] == [joined[3], 0, y.data_ptr(), 0]
    assert fast.grid == (rows, H, 1)

    dy = torch.randn(y.shape).to(y.dtype)
    grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, torch.ones_like(final)])
    assert [grad.shape for grad in grads] == [x.shape for x in (*given.values(), state)]
    segment, back_join, back = guarded_calls.launches[3:]
    assert [launch.entry for launch in (segment, back_join, back)] == [
        "gla_segment", "gla_join", "gla_chunked_backward"
    ]  # fmt: skip
    found = addresses(segment, 5)
    assert found[:3] == [*places(given, "rw"), dy.data_ptr()]
    assert found[4] == 0
    assert segment.arguments[5:] == tuple(common)
    joined_back = addresses(back_join, 5)
    assert joined_back[:2] == [joined[0], found[3]]  # the exponents that the forward has left
    assert 0 not in joined_back
    made = addresses(back, 15)
    assert made[5] == dy.data_ptr()
    assert [made[n] for n in (6, 7, 8, 14)] == [0, scanned[9], joined_back[3], 0]
    assert joined[0] == scanned[9] + 4 * rows * (tokens // count // 32) * H * 64 * 64 // 2  # behind the saved states
    assert made[9:12] == [grads[list(given).index(n)].data_ptr() for n in "rkv"]


@pytest.mark.parametrize("op", ["wkv7", *SHARED])
def test_segments_are_read_in_place_or_from_copies(op, guarded_calls):
    """Of one signature, by where its tensors begin; and of another, between whose sequences there is memory."""
    if op == "wkv7":
        given, names = dict(zip("rwkvab", make(torch.bfloat16, (2, 2048, H, 40)), strict=True)), "kwabv"
    else:
        given, names = make_gated(op, (2, 1280, H, 40), 56), "kwv"

    def copies(now):
        """Those that find what segments do, those that go through them, and the strides of the former."""
        y, _ = getattr(rwkv_jit, op)(*now.values(), **gated_options(op, backend="split"))
        assert y.shape == now["v"].shape
        segment, _, chunks = guarded_calls.launches[-3:]
        found = {n for n, at in zip(names, addresses(segment, len(names)), strict=True) if at not in places(now, n)}
        passed = {n for n, at in zip(now, addresses(chunks, len(now)), strict=False) if at not in places(now, n)}
        return found, passed, segment.arguments[len(names) + 2 :]

    *nothing, strides = copies(given)
    assert nothing == [set(), set()]
    for name, x in given.items():
        shifted = torch.randn(x.numel() + 1).to(x.dtype)[1:].view(x.shape)
        found, passed, again = copies({**given, name: shifted})
        assert (name in found, again) == (name in names, strides)
    assert len(known_calls.forwards) == 1
    apart = torch.cat([given["k"]] * 2, 1)[:, : given["k"].shape[1]]
    assert copies({**given, "k": apart}) == ({"k"}, {"k"}, strides)
    assert len(known_calls.forwards) == 2


@pytest.mark.parametrize("op", ["wkv7", *SHARED])
def test_known_call_in_segments_asks_for_no_kernel_again(op, guarded_calls, monkeypatch):
    if op == "wkv7":
        given = make(torch.bfloat16, (2, 2048, H, 40), grad=True)
    else:
        given = list(make_gated(op, (2, 1280, H, 40), 56, grad=True).values())

    def both():
        guarded_calls.launches.clear()
        y, _ = getattr(rwkv_jit, op)(*given, **gated_options(op, backend="split"))
        torch.autograd.grad(y.sum(), given)
        return entries(guarded_calls.launches)

    first = both()
    monkeypatch.setattr(kernel, "get_all", refuse)
    assert both() == first


@pytest.mark.parametrize("op", ["wkv5", "wkv6"])
def test_gradients_of_segments_are_summed_to_those_of_sequences(op, guarded_calls, monkeypatch):
    given, rows = make_gated(op, (2, 1280, H, 8), 8, grad=True), []

    def backward(*arguments):
        made = list(real(*arguments))
        made[1] = [torch.arange(1.0, 1 + x.numel()).view(x.shape) for x in made[1]]
        rows.extend(made[1])
        return tuple(made)

    real = prepared.backward
    monkeypatch.setattr(prepared, "backward", backward)
    y, _ = getattr(rwkv_jit, op)(*given.values(), decay="sigmoid", backend="split")
    grads = torch.autograd.grad(y.sum(), list(given.values()))
    assert [x.shape for x in rows] == [(10, H, 8)] * len(rows)
    for name, x in zip("wu"[-len(rows) :], rows, strict=True):
        assert torch.equal(grads[list(given).index(name)], x.sum(0).to(given[name].dtype))


@pytest.mark.parametrize("op", ["wkv5", "gla"])
def test_guarded_gated_call_in_segments(op, guarded_calls):
    given = make_gated(op, (2, 1280, H, 40), 40, grad=True)
    y, _ = getattr(rwkv_jit, op)(*given.values(), decay="raw", backend="split")
    torch.autograd.grad(y.sum(), list(given.values()))
    names = [launch.entry for launch in guarded_calls.launches]
    assert names == [
        "gla_segment", "gla_join", "gla_scan",
        "gla_segment", "gla_join", "gla_chunked_backward", "gla_recurrent_forward", "gla_recurrent_backward",
    ]  # fmt: skip
    assert addresses(guarded_calls.launches[2], 11)[10] != 0
    # What is computed once more goes where it was, but for sums over the segments of a sequence.
    fast, exact = addresses(guarded_calls.launches[5], 15)[9:14], addresses(guarded_calls.launches[-1], 17)[9:14]
    assert fast[:3] == exact[:3]
    for n, name in enumerate("wu", 3):
        assert (exact[n] != 0) == (name in given)
        assert (fast[n] == exact[n]) == (name in SHARED[op][1] or name not in given)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("op", SHARED)
def test_fake_of_a_gated_call_in_segments_has_the_sizes_of_the_real_one(op, guarded, guarded_calls):
    from torch._subclasses import FakeTensorMode

    given = make_gated(op, (2, 1280, H, 7), 9).values()
    decay = "none" if op == "linear_attention" else "raw"
    arguments = (None, None, 1.0, decay, "vk", 64, 32, None, "split", None, None, guarded, True, True)
    real = getattr(torch.ops.rwkv_jit, f"{op}_fwd")(*given, *arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in given]
        fake = getattr(torch.ops.rwkv_jit, f"{op}_fwd")(*fakes, *arguments)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


@pytest.mark.parametrize(("backend", "size"), [("chunked", 7), ("scan", 131)])
@pytest.mark.parametrize("guarded", [False, True])
@PACKINGS
def test_fake_of_a_gated_call_has_the_sizes_of_the_real_one(bounds, guarded, backend, size, guarded_calls):
    from torch._subclasses import FakeTensorMode

    shape, _, cu_seqlens = packing(bounds)
    given = make_gated("wkv6", (*shape[:3], size), size + 2).values()
    arguments = (None, cu_seqlens, 1.0, "raw", "vk", 64, 32, None, backend, None, None, guarded, True, True)
    real = torch.ops.rwkv_jit.wkv6_fwd(*given, *arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in given]
        fake = torch.ops.rwkv_jit.wkv6_fwd(*fakes, *arguments)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


@pytest.mark.parametrize("arch", SCANS)
def test_too_many_heads_for_a_grid_are_refused(arch, guarded_calls, monkeypatch):
    monkeypatch.setattr(tensors, "_capability", lambda device: arch)
    for size, backend in ((1, "chunked"), (129, "split")):
        given = make_gated("gla", (1, 1, 65536, size), 1)
        message = f"backend: {backend!r} takes up to 65535 heads, got 65536; use 'recurrent'"
        with pytest.raises(UnsupportedConfigError, match=message):
            rwkv_jit.gla(*given.values(), decay="sigmoid", backend=backend)


# ---- the large heads of these ops with products of warp groups -------------------------------------------------------


@pytest.fixture
def group_calls(guarded_calls, monkeypatch):
    """The driver's GPU is an sm_90."""
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_90")
    return guarded_calls


def test_arguments_of_the_templates_of_warp_groups():
    counts = {name: [*found.values()].count("Q") for name, found in GROUP_ARGUMENTS.items()}
    assert counts == {"gla_prepare": 9, "gla_group_scan": 9, "gla_group_key_gradients": 12}
    assert list(GROUP_ARGUMENTS["gla_group_scan"])[-3:] == ["input_strides", "tokens", "heads"]
    assert GROUP_ARGUMENTS["gla_prepare"]["scale"] == "f"
    assert GROUP_ARGUMENTS["gla_prepare"]["w_strides"] == "3q"


def apart(given):
    """The same tensors, all of them with other strides."""
    return {
        name: torch.cat([x.detach()] * (n + 2), -1)[..., : x.shape[-1]].requires_grad_(x.requires_grad)
        if x.ndim == 4
        else x
        for n, (name, x) in enumerate(given.items())
    }


def steps(x):
    return x.stride()[:3]


def kept_bytes(op, slots, size, value_size):
    """Bytes of what passes from kernel to kernel, as the templates index them: operands, pairs, frames, states.

    Those are [slots, heads, SLABS, 2] tiles of 64 x 64 bf16, [slots, heads] tiles, [slots, heads, 2, CHANNELS] fp32,
    and [slots, heads, SLABS, VALUES] rows of 64 bf16.
    """
    slabs, values, places = -(-size // 64), -(-value_size // 32) * 32, slots * H
    frames = 0 if op == "linear_attention" else 2 * 64 * slabs * 4
    return [places * each for each in (slabs * 2 * 8192, 8192, frames, slabs * values * 128)]


def group_requests(op, size, value_size, few_heads=False, **types):
    """By the order of the launches."""
    types = gated_types(op) | types
    given = [(op, direction, size, value_size, types, "sm_90", 64) for direction in ("forward", "backward")]
    scans = [gated_scan.specialize(*each, few_heads=few_heads) for each in given]
    (prepare,), (keys,) = (gated_scan.companions(*each) for each in given)
    return prepare, *scans, keys


def check_geometry(launch, request, blocks):
    wanted = request.parameters
    assert (launch.entry, launch.grid) == (request.template.name, (blocks, H, 1))
    assert launch.block == (wanted["NUM_THREADS"], 1, 1)
    assert launch.shared_bytes == wanted["SHARED_BYTES"]


@PACKINGS
@pytest.mark.parametrize("few_heads", [False, True])
@pytest.mark.parametrize("op", SHARED)
def test_call_of_warp_groups_prepares_its_chunks_and_walks_over_them(op, few_heads, bounds, group_calls, monkeypatch):
    shape, sequences, cu_seqlens = packing(bounds)
    slots, tokens = 120 // 64 + 3 if bounds else B, shape[1]
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: sequences * H * 5 + few_heads)  # 5 slabs of values
    at_bounds, rows = 0 if cu_seqlens is None else cu_seqlens.data_ptr(), 32 if few_heads else 64
    requests = group_requests(op, 200, 300, few_heads)
    operands, pairs, frames, _ = kept_bytes(op, slots, 200, 300)
    for _ in range(2):
        given = apart(make_gated(op, (*shape[:3], 200), 300, grad=True))
        state = torch.randn(sequences, H, 300, 200, requires_grad=True)
        q, k, v, w, u = (given.get(name) for name in "rkvwu")
        of_w = steps(w) if "w" in SHARED[op][1] else (0, 0, 200)
        assert len({steps(x) for x in (q, k, v)}) == 3
        options = gated_options(op, scale=0.5, state_layout="vk")
        y, final = getattr(rwkv_jit, op)(*given.values(), state, True, cu_seqlens, **options)
        prepare, forward = group_calls.launches[-2:]
        check_geometry(prepare, requests[0], slots)
        check_geometry(forward, requests[1], sequences * -(-300 // rows))
        assert requests[1].parameters["VALUE_ROWS"] == rows
        found = named(prepare)
        passed = {name: found.pop(name) for name in ("operands", "pairs", "frames")}
        at_q, at_k, _, at_w, at_u = places(given)
        of_call = {"tokens": tokens, "heads": H}
        assert found == {
            "q": at_q, "k": at_k, "w": at_w, "u": at_u, "cu_seqlens": at_bounds, "leaves": 0, "q_strides": steps(q),
            "k_strides": steps(k), "w_strides": of_w, **of_call, "sequences": sequences, "scale": 0.5,
        }  # fmt: skip
        found = named(forward)
        states = found.pop("states")
        assert found == {
            "input": v.data_ptr(), "first": state.data_ptr(), "cu_seqlens": at_bounds, **passed,
            "output": y.data_ptr(), "last": final.data_ptr(), "input_strides": steps(v), **of_call,
        }  # fmt: skip
        first = passed["operands"]
        assert [passed["pairs"], passed["frames"], states] == [
            first + operands, first + operands + pairs, first + operands + pairs + frames
        ]  # fmt: skip
        assert not any(address % 16 for address in (*passed.values(), states))
        assert first

        dy = torch.randn(*y.shape[:3], 304).to(y.dtype)[..., :300]
        d_final = torch.randn_like(final)
        grads = torch.autograd.grad([y, final], [*given.values(), state], [dy, d_final])
        made = dict(zip(given, grads, strict=False))
        back, of_keys = group_calls.launches[-2:]
        check_geometry(back, requests[2], sequences * -(-300 // rows))
        check_geometry(of_keys, requests[3], slots * 4)  # slabs of keys
        found = named(back)
        e = found.pop("states")
        assert found == {
            "input": dy.data_ptr(), "first": d_final.data_ptr(), "cu_seqlens": at_bounds, **passed,
            "output": made["v"].data_ptr(), "last": grads[-1].data_ptr(), "input_strides": steps(dy), **of_call,
        }  # fmt: skip
        assert e not in (0, states)
        assert e % 16 == 0
        found = named(of_keys)
        of_fixed = [found.pop(name) for name in ("dw", "du")]
        assert found == {
            "v": v.data_ptr(), "w": at_w, "u": at_u, "dy": dy.data_ptr(), "cu_seqlens": at_bounds, "operands": first,
            "states": states, "e": e, "dq": made["r"].data_ptr(), "dk": made["k"].data_ptr(), "v_strides": steps(v),
            "w_strides": of_w, "dy_strides": steps(dy), **of_call, "sequences": sequences, "scale": 0.5,
        }  # fmt: skip
        for name, address in zip("wu", of_fixed, strict=True):
            if name in SHARED[op][1]:
                assert address == made[name].data_ptr()
            else:  # a row for each chunk, or nothing
                assert (address != 0) == (name in given)
        monkeypatch.setattr(boundary, "check_tensors", refuse)
        monkeypatch.setattr(gated_groups, "_new_plans", refuse)
    assert len(group_calls.launches) == 8
    assert len(gated_groups._plans) == 2


def test_call_of_warp_groups_without_gradients_or_states_keeps_nothing(group_calls):
    given = make_gated("wkv6", (B, 70, H, 200), 300)
    y, final = rwkv_jit.wkv6(*given.values(), decay="sigmoid")
    prepare, forward = map(named, group_calls.launches)
    assert final is None
    assert (forward["states"], forward["first"], forward["last"], prepare["leaves"]) == (0, 0, 0, 0)
    assert forward["output"] == y.data_ptr()
    operands, pairs, _, _ = kept_bytes("wkv6", B * 2, 200, 300)
    assert [prepare[name] - prepare["operands"] for name in ("pairs", "frames")] == [operands, operands + pairs]
    assert [prepare[name] for name in ("operands", "pairs", "frames")] == [
        forward[name] for name in ("operands", "pairs", "frames")
    ]
    assert group_calls.launches[0].grid == (B * 2, H, 1)


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_warp_groups_have_their_layout_and_type(dtype, layout, group_calls, monkeypatch):
    asked, get_all = [], kernel.get_all
    monkeypatch.setattr(kernel, "get_all", lambda requests: asked.extend(requests) or get_all(requests))
    given = make_gated("gla", (B, 40, H, 200), 300, grad=True)
    sizes = (300, 200) if layout == "vk" else (200, 300)
    state = torch.randn(B, H, *sizes).to(dtype).requires_grad_()
    y, final = rwkv_jit.gla(*given.values(), state, True, decay="sigmoid", state_layout=layout)
    assert (final.shape, final.dtype) == (state.shape, dtype)
    d_final, seen = torch.randn_like(final), []

    def note(launch):
        address = named(launch)["first"]
        seen.append(torch.tensor((ctypes.c_float * d_final.numel()).from_address(address)).view(d_final.shape))

    launch_kernel = group_calls.launchKernel

    def launch(*arguments):
        launch_kernel(*arguments)
        if group_calls.launches[-1].entry == "gla_group_scan":
            note(group_calls.launches[-1])

    monkeypatch.setattr(group_calls, "launchKernel", launch)
    *_, d_state = torch.autograd.grad([y, final], [*given.values(), state], [torch.randn_like(y), d_final])
    (of_kernel,) = seen
    assert torch.equal(of_kernel, d_final.float())  # whatever the dtype of states is
    assert (d_state.shape, d_state.dtype) == (state.shape, dtype)
    scans = [each.parameters for each in asked if each.template.name == "gla_group_scan"]
    assert {(each["T_STATE"], each["STATE_LAYOUT"]) for each in scans if not each["BACKWARD"]} == {
        (tensors.STORAGE[dtype], layout)
    }
    assert {(each["T_STATE"], each["STATE_LAYOUT"]) for each in scans if each["BACKWARD"]} == {("fp32", layout)}


@pytest.mark.parametrize("training", [False, True])
def test_kernels_of_warp_groups_are_asked_for_at_once(training, group_calls, monkeypatch):
    asked, get_all = [], kernel.get_all

    def watched(requests):
        asked.append([(request.template.name, request.parameters.get("BACKWARD")) for request in requests])
        return get_all(requests)

    monkeypatch.setattr(kernel, "get_all", watched)
    given = make_gated("gla", (B, 40, H, 200), 300, grad=training)
    y, _ = rwkv_jit.gla(*given.values(), decay="sigmoid")
    forward, backward = [("gla_prepare", None), ("gla_group_scan", False)], [
        ("gla_group_scan", True), ("gla_group_key_gradients", None)
    ]  # fmt: skip
    assert asked == [[*backward, *forward] if training else forward]
    if training:
        torch.autograd.grad(y.sum(), [*given.values()])
        assert asked[1:] == [backward]  # in memory by then


def test_first_use_of_warp_groups_in_a_capture_is_refused(group_calls, monkeypatch):
    monkeypatch.setattr(tensors, "capturing", lambda: True)
    with pytest.raises(RwkvJitError, match="gla: first use inside a CUDA graph capture"):
        rwkv_jit.gla(*make_gated("gla", (B, 40, H, 200), 300).values(), decay="sigmoid")
    assert group_calls.launches == []


def test_plans_of_warp_groups_are_of_a_signature(group_calls, monkeypatch):
    """What decides grids and kernels decides which plan is taken."""
    given = make_gated("gla", (1, 128, H, 200), 300)

    def grid(*arguments, **options):
        rwkv_jit.gla(*given.values(), *arguments, decay="sigmoid", **options)
        return [launch.grid[0] for launch in group_calls.launches[-2:]]

    many = -(-300 // 32)
    assert grid() == [2, many]
    assert grid(cu_seqlens=torch.tensor([0, 128])) == [3, many]
    assert grid(cu_seqlens=torch.tensor([0, 60, 128])) == [4, 2 * many]
    assert grid() == [2, many]
    assert len(gated_groups._plans) == 3
    rwkv_jit.gla(*given.values(), decay="sigmoid", scale=2.0)
    assert named(group_calls.launches[-2])["scale"] == 2.0
    assert len(gated_groups._plans) == 4
    signatures.forget()
    assert gated_groups._plans == {}
    monkeypatch.setattr(signatures, "MOST", 2)
    for tokens in range(40, 46):
        rwkv_jit.gla(*make_gated("gla", (1, tokens, H, 200), 300).values(), decay="sigmoid")
        assert len(gated_groups._plans) <= 2


def test_forked_child_asks_for_no_kernels_of_warp_groups(group_calls, monkeypatch):
    given = make_gated("gla", (B, 40, H, 200), 300)
    rwkv_jit.gla(*given.values(), decay="sigmoid")
    monkeypatch.setattr(kernel, "get_all", refuse)
    assert "forked" in in_fork(lambda: rwkv_jit.gla(*given.values(), decay="sigmoid"))


def test_tensors_that_warp_groups_cannot_read_are_copied(group_calls):
    given = make_gated("wkv5", (B, 40, H, 200), 304, grad=True)
    rwkv_jit.wkv5(*given.values(), decay="sigmoid")
    shifted = {}
    for name, x in given.items():
        memory = torch.randn(x.numel() + 8).to(x.dtype)
        shifted[name] = memory[1 : x.numel() + 1].view(x.shape).requires_grad_()
        assert shifted[name].data_ptr() % 16
    shifted["k"] = given["k"].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    y, _ = rwkv_jit.wkv5(*shifted.values(), decay="sigmoid")
    dy = torch.randn(y.numel() + 8).to(y.dtype)[1 : y.numel() + 1].view(y.shape)
    torch.autograd.grad(y, [*shifted.values()], dy)
    prepare, forward, back, of_keys = map(named, group_calls.launches[-4:])
    own = {x.data_ptr() for x in (*shifted.values(), dy)}
    read = [prepare[name] for name in "qkwu"] + [forward["input"], back["input"]]
    read += [of_keys[name] for name in ("v", "w", "u", "dy")]
    assert not any(address in own or address % 16 for address in read)
    assert (of_keys["dy"], of_keys["dy_strides"]) == (back["input"], back["input_strides"])
    of_keys_alone, of_values = (steps(torch.empty(B, 40, H, size)) for size in (200, 304))
    assert (prepare["q_strides"], prepare["k_strides"]) == (of_keys_alone,) * 2
    assert (forward["input_strides"], back["input_strides"], of_keys["v_strides"]) == (of_values,) * 3


@PACKINGS
def test_gradients_of_warp_groups_without_tokens_are_added_over_the_chunks(bounds, group_calls, monkeypatch):
    """The stub writes row n of the parts as 2^n: sums tell which rows belong to the result."""
    zeros = torch.zeros

    def powers(*size, **more):
        made = zeros(*size, **more)
        return made + 2.0 ** torch.arange(made.shape[0]).view(-1, 1, 1)

    shape, sequences, cu_seqlens = packing(bounds)
    slots = 120 // 64 + sequences if bounds else B
    for op in ("wkv5", "wkv6"):
        given = make_gated(op, (*shape[:3], 200), 300, grad=True)
        y, _ = getattr(rwkv_jit, op)(*given.values(), cu_seqlens=cu_seqlens, decay="sigmoid")
        with monkeypatch.context() as patched:
            patched.setattr(torch, "zeros", powers)
            grads = dict(zip(given, torch.autograd.grad(y, [*given.values()], torch.ones_like(y)), strict=True))
        assert group_calls.launches[-1].entry == "gla_group_key_gradients"
        for name in "wu" if op == "wkv5" else "u":
            assert torch.equal(grads[name].float(), torch.full((H, 200), 2.0**slots - 1))
            assert grads[name].dtype == given[name].dtype


@PACKINGS
@pytest.mark.parametrize("op", [op for op in SHARED if op != "linear_attention"])
def test_guarded_call_of_warp_groups(op, bounds, group_calls, monkeypatch):
    asked, get_all = [], kernel.get_all
    monkeypatch.setattr(kernel, "get_all", lambda requests: asked.extend(requests) or get_all(requests))
    shape, sequences, cu_seqlens = packing(bounds)
    at_bounds = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    given = make_gated(op, (*shape[:3], 200), 300, grad=True)
    state = torch.randn(sequences, H, 300, 200, requires_grad=True)
    y, final = getattr(rwkv_jit, op)(*given.values(), state, True, cu_seqlens, state_layout="vk")
    prepare, fast, exact = group_calls.launches
    assert [prepare.entry, fast.entry, exact.entry] == ["gla_prepare", "gla_group_scan", "gla_recurrent_forward"]
    assert {each.parameters.get("LARGEST_DECAY") for each in asked if each.template.name == "gla_prepare"} == {
        LARGEST_DECAY
    }
    flags = named(prepare)["leaves"]
    slots = 120 // 64 + 3 if bounds else B
    assert flags - named(prepare)["operands"] == sum(kept_bytes(op, slots, 200, 300))  # one behind the other
    passed = [*places(given), state.data_ptr(), at_bounds, y.data_ptr(), final.data_ptr()]
    assert addresses(exact, 11) == [*passed, 0, flags]
    assert (named(fast)["output"], named(fast)["last"]) == (y.data_ptr(), final.data_ptr())
    grads = torch.autograd.grad([y, final], [*given.values(), state], [torch.ones_like(y), torch.ones_like(final)])
    back, of_keys, repeat, exact = group_calls.launches[3:]
    assert [launch.entry for launch in (back, of_keys, repeat, exact)] == [
        "gla_group_scan", "gla_group_key_gradients", "gla_recurrent_forward", "gla_recurrent_backward"
    ]  # fmt: skip
    for name in ("operands", "pairs", "frames"):
        assert named(back)[name] == named(prepare)[name]
    assert named(of_keys)["states"] == named(fast)["states"]
    assert addresses(repeat, 11)[10] == addresses(exact, 16)[15] == flags
    of = dict(zip(given, grads, strict=False))
    found = addresses(exact, 15)
    assert found[9:12] == [of[name].data_ptr() for name in "rkv"]
    assert (named(of_keys)["dq"], named(of_keys)["dk"], named(back)["output"]) == (*found[9:12],)
    assert found[14] == named(back)["last"] == grads[-1].data_ptr()


@pytest.mark.parametrize("training", [False, True])
def test_flags_of_warp_groups_are_zeros_before_they_are_set(training, group_calls, monkeypatch):
    seen, empty, launch_kernel = [], torch.empty, group_calls.launchKernel

    def launch(*arguments):
        launch_kernel(*arguments)
        if group_calls.launches[-1].entry == "gla_prepare":
            address = named(group_calls.launches[-1])["leaves"]
            seen.append(address and [*(ctypes.c_int * (B * H)).from_address(address)])

    monkeypatch.setattr(group_calls, "launchKernel", launch)
    monkeypatch.setattr(torch, "empty", lambda *size, **more: empty(*size, **more).fill_(7))
    given = make_gated("gla", (B, 40, H, 200), 300, grad=training)
    for _ in range(2):
        rwkv_jit.gla(*given.values())
    rwkv_jit.gla(*given.values(), decay_bound=-1.0)  # without a look at the decays there is nothing to set
    assert seen == [[0] * (B * H)] * 2 + [0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("chunk_len", "chunks"), [(64, 2), (None, 3)])
def test_threads_asked_for_take_no_warp_groups_in_both_directions(chunk_len, chunks, training, group_calls):
    given = make_gated("gla", (B, 70, H, 128), 130, grad=training)
    for threads in (128, 256):
        del group_calls.launches[:]
        y, _ = rwkv_jit.gla(*given.values(), decay="sigmoid", num_threads=threads, chunk_len=chunk_len)
        (forward,) = group_calls.launches
        assert (forward.entry, forward.block) == ("gla_scan", (threads, 1, 1))
        if training:
            torch.autograd.grad(y.sum(), [*given.values()])
            _, back, of_keys = group_calls.launches
            assert (back.entry, back.block, of_keys.entry) == ("gla_scan", (threads, 1, 1), "gla_key_gradients")
            assert addresses(of_keys, 8)[7] == addresses(forward, 10)[9] != 0
            assert of_keys.grid == (B * chunks * 2, H, 1)  # and slabs of 64 channels
    del group_calls.launches[:]
    y, _ = rwkv_jit.gla(*given.values(), decay="sigmoid", num_threads=384)
    assert [launch.entry for launch in group_calls.launches] == ["gla_prepare", "gla_group_scan"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("size", "threads"), [(512, 128), (512, 512), (300, 512)])
def test_threads_that_keys_above_256_cannot_have_are_refused(size, threads, training, group_calls):
    given = make_gated("gla", (B, 70, H, size), 300, grad=training)
    message = f"num_threads must be 384 at head sizes {size} and 300, got {threads}"
    with pytest.raises(UnsupportedConfigError) as caught:
        rwkv_jit.gla(*given.values(), decay="sigmoid", num_threads=threads)
    assert str(caught.value) == message
    assert group_calls.launches == []


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("op", SHARED)
@PACKINGS
def test_fake_of_a_call_of_warp_groups_has_the_sizes_of_the_real_one(bounds, op, guarded, group_calls):
    from torch._subclasses import FakeTensorMode

    shape, sequences, cu_seqlens = packing(bounds)
    given = make_gated(op, (*shape[:3], 131), 133).values()
    decay = "none" if op == "linear_attention" else "log"
    arguments = (None, cu_seqlens, 1.0, decay, "vk", 64, 64, None, "scan", None, None, guarded, True, True)
    run = getattr(torch.ops.rwkv_jit, f"{op}_fwd")
    real = run(*given, *arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = run(*[mode.from_tensor(x) for x in given], *arguments)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]
    slots = 120 // 64 + 3 if bounds else B
    assert 4 * real[2].numel() == sum(kept_bytes(op, slots, 131, 133)) + 4 * sequences * H * guarded


def test_call_of_warp_groups_without_tokens_or_heads(group_calls):
    for shape in ((B, 0, H, 200), (0, 40, H, 200), (B, 40, 0, 200)):
        given = make_gated("wkv5", shape, 300, grad=True)
        y, final = rwkv_jit.wkv5(*given.values(), output_final_state=True, decay="sigmoid", backend="split")
        grads = torch.autograd.grad(y.sum() + final.sum(), list(given.values()))
        assert y.shape == (*shape[:3], 300)
        assert [grad.shape for grad in grads] == [x.shape for x in given.values()]
    # Without tokens states are copied, and there are no chunks.
    assert [launch.entry for launch in group_calls.launches] == ["gla_group_scan"] * 2


@pytest.mark.parametrize("op", ["wkv7", *SHARED])
def test_tuner_launches_the_geometry_it_is_asked_for_from_kernels_it_has_compiled(op, guarded_calls, monkeypatch):
    compiled, launched, get_kernels = [], [], prepared.get_kernels

    def get_async(request):
        compiled.append((request.template.name, request.parameters))
        done = Future()
        done.set_result(None)
        return done

    def watched(backend, requests, *chosen):
        asked = [(request.template.name, request.parameters) for request in requests]
        launched.extend(each for each in asked if "recurrent" not in each[0])
        return get_kernels(backend, requests, *chosen)

    def make_inputs(op, shape, dtype):
        given = make(shape=shape, grad=True) if op == "wkv7" else make_gated(op, shape, shape[-1], grad=True).values()
        return [x.to(dtype) for x in given]

    monkeypatch.setattr(kernel, "get_async", get_async)
    monkeypatch.setattr(tensors, "targets", lambda arch: ("sm_80", ()))
    monkeypatch.setattr(prepared, "get_kernels", watched)
    monkeypatch.setattr(bench, "make_inputs", make_inputs)
    guarded_calls.sizes |= {f"wkv7_chunked_{n.split('_')[1]}": sizes for n, sizes in CHUNKED_SIZES.items()}
    forward, backward = CHUNKS[op].templates(op)[:2]
    is_guarded = op in ("wkv5", "wkv6", "gla")  # as these train without a promise
    ahead = [forward]  # right by itself
    back = [backward, *["gla_recurrent_forward", "gla_recurrent_backward"] * is_guarded]

    kernels = tune._Kernels(op, LONG, training=True)
    found = kernels.results(Candidate("forward", 16, 256, 1))
    names = {"wkv7": "rwkvab", "gla": "qkvg", "linear_attention": "qkv"}.get(op, "rkvwu")
    gradients = {f"d{n}": (H, 16) if n in {"wkv5": "wu", "wkv6": "u"}.get(op, "") else LONG for n in names}
    assert {n: tuple(x.shape) for n, x in found.items()} == {"y": LONG, "final_state": (B, H, 16, 16), **gradients}
    found = kernels.results(Candidate("backward", 16, 64, 4))
    assert {n: tuple(x.shape) for n, x in found.items()} == gradients
    assert [launch.entry for launch in guarded_calls.launches] == [*ahead, *back] * 2
    threads = [launch.block[0] for launch in guarded_calls.launches if launch.entry in (forward, backward)]
    assert threads == [256, 64, 64, 64]
    assert [launched[n][1]["BLOCKS_PER_SM"] for n in (0, -1)] == [1, 4]
    of_forwards = {each["LARGEST_DECAY"] for name, each in launched if name == forward}
    assert of_forwards == {LARGEST_DECAY if is_guarded else 0}
    assert {each["DECAY"] for _, each in launched} == {bench.decay_of(op)}
    layouts = {each["STATE_LAYOUT"] for _, each in launched}
    assert layouts == {"kv" if op in ("gla", "linear_attention") else "vk"}
    assert set(tune._Kernels(op, LONG, training=False).results(Candidate("forward", 32, 128, 2))) == {
        "y",
        "final_state",
    }
    several = [each for way in ("forward", "backward") for each in CHUNKS[op].candidates(way, 16, "sm_80")]
    tune._compile(op, several, 16, None)
    assert [each for each in launched if each not in compiled] == []


@pytest.mark.parametrize(("tokens", "stride", "copies"), [(2, 2**26, True), (2, 2**26 - 8, False), (1, 2**26, False)])
def test_tokens_too_far_apart_for_offsets_of_32_bits_are_copied(tokens, stride, copies):
    x = torch.empty_strided((1, tokens, 3, 8), (tokens * stride, stride, 8, 1), dtype=torch.bfloat16, device="meta")
    assert tensors.needs_copy(x, 8) is copies
