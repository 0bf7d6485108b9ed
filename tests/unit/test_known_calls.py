"""Whole calls on a driver that takes notes: what they launch, and that they are known by their signature."""

import contextlib
import ctypes
import itertools
import re
import sys
import weakref
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._decomp.decompositions_for_jvp  # noqa: F401, as it compiles functions of torch that `on_gpu` replaces
from problems import is_by_halves
from stub_driver import called, in_fork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rwkv_jit
from rwkv_jit.call import plan, prepared, tensors, torch_op
from rwkv_jit.call.tuned import CHUNKS
from rwkv_jit.kernels import kernel, signatures
from rwkv_jit.kernels.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import STORAGE_TYPES
from rwkv_jit.schedules import delta_large
from rwkv_jit.schedules.common import Candidate
from rwkv_jit.schedules.problem import LARGEST_DECAY
from rwkv_jit.schedules.table import OPS

B, T, H, N = 2, 5, 3, 8
LONG = (B, 40, H, 16)
RECURRENCES = ("wkv7", "wkv6", "wkv5", "gla", "linear_attention")
GATED = RECURRENCES[1:]
PACKINGS = pytest.mark.parametrize("bounds", [None, [0, 3, 3, 120]], ids=["rows", "packed"])
HALF = torch.bfloat16


def make(op="wkv7", shape=(B, T, H, N), dtype=torch.float32, grad=False, value_size=None, wide=()):
    """The inputs of a call by the names that kernels give them; `wide` ones are float32."""
    sizes = {**dict(zip("BTHK", shape, strict=True)), "V": value_size or shape[-1]}
    return {
        name: torch.randn([sizes[dim] for dim in dims])
        .to(torch.float32 if name in wide else dtype)
        .requires_grad_(grad)
        for name, dims in OPS[op].inputs.items()
    }


def make_long(op, shape=LONG, value_size=None, grad=False):
    return make(op, shape, HALF, grad, value_size, wide=() if op == "wkv7" else ("w",))


def make_state(op, shape, sequences=None, value_size=None, grad=False, layout=None):
    sizes = {"H": shape[2], "K": shape[3], "V": value_size or shape[3]}
    dims = OPS[op].state if layout is None else "H" + layout.upper()
    return torch.randn(sequences or shape[0], *(sizes[dim] for dim in dims)).requires_grad_(grad)


def run(op, given, *more, **options):
    return getattr(rwkv_jit, op)(*given.values(), *more, **options)


def wkv7(given, *more, **options):
    return run("wkv7", given, *more, **options)


def bounded(op, **options):
    """Options of a call whose decays stay in the range of all kernels."""
    return options if op == "linear_attention" else {"decay": "sigmoid", **options}


def places(tensors):
    return {name: x.data_ptr() for name, x in tensors.items()}


def of_tensors(launch, tensors):
    """What a launch has been given by these names."""
    return {name: launch.named[name] for name in tensors}


def in_frames(launches):
    """Leave out those for what has left its frame."""
    return [launch for launch in launches if not is_by_halves(launch.template, launch.parameters)]


def names(launches):
    return [launch.template for launch in in_frames(launches)]


def refuse(*_):
    raise AssertionError("it was done again")


def packing(bounds):
    """Shape, sequences and cu_seqlens of a long call."""
    return (LONG, B, None) if bounds is None else ((1, 120, H, 16), len(bounds) - 1, torch.tensor(bounds))


# ---- calls that are known ----------------------------------------------------------------------------------------


def test_known_call_is_not_checked_again_and_launches_its_own_tensors(on_gpu, monkeypatch):
    first, second = make(), make()
    wkv7(first)
    monkeypatch.setattr(torch_op, "check_tensors", refuse)
    y, final = wkv7(second)
    one, other = on_gpu.launches
    assert final is None
    assert (y.shape, y.dtype) == ((B, T, H, N), torch.float32)
    assert of_tensors(one, first) == places(first)
    assert {name: x for name, x in other.addresses.items() if x} == {**places(second), "y": y.data_ptr()}
    assert (one.grid, one.block, one.stream) == (other.grid, other.block, other.stream)
    assert one.numbers == other.numbers


@pytest.mark.parametrize("backend", ["recurrent", "chunked", "split"])
def test_one_state_for_all_sequences_is_repeated(backend, on_gpu):
    seen, given = [], make(shape=(B, 2048, H, N), dtype=HALF)

    def read(launch):
        at = launch.named.get("initial_state" if backend != "split" else "first")
        if at:
            memory = (ctypes.c_float * (B * H * N * N)).from_address(at)
            seen.append(torch.frombuffer(bytearray(memory), dtype=torch.float32).view(B, H, N, N))

    on_gpu.while_running = read
    for _ in range(2):
        state = torch.randn(H, N, N)
        _, final = wkv7(given, state, True, backend=backend, decay="sigmoid")
        assert final.shape == (B, H, N, N)
        assert torch.equal(seen[-1], state.expand(B, H, N, N))
    assert len(seen) == 2


OTHERS = {
    "tokens": lambda: (make(shape=(B, T + 1, H, N)), {}),
    "dtype": lambda: (make(dtype=HALF), {}),
    "strides": lambda: ({n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in make().items()}, {}),
    "scale": lambda: (make(), {"scale": 0.5}),
    "decay": lambda: (make(), {"decay": "log"}),
    "bound": lambda: (make(), {"decay_bound": -1.0}),
    "state": lambda: (make(), {"initial_state": torch.zeros(B, H, N, N)}),
    "state's dtype": lambda: (make(), {"initial_state": torch.zeros(B, H, N, N, dtype=HALF)}),
    "class": lambda: ({n: x.as_subclass(torch.nn.Parameter) if n == "b" else x for n, x in make().items()}, {}),
    "gradients": lambda: (make(grad=True), {}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("can_compare", [True, False])
def test_everything_that_a_check_looks_at_is_a_signature_of_its_own(other, can_compare, on_gpu, monkeypatch):
    """And calls in turn launch what is theirs, also where torch has nothing to compare tensors with."""
    if not can_compare:
        monkeypatch.setattr(tensors, "_Guards", None)
    given, options = other()
    for _ in range(2):
        wkv7(make(), backend="recurrent")
        wkv7(given, backend="recurrent", **options)
    assert len(prepared.calls) == 2
    one, another, *again = [(launch.grid, launch.numbers, launch.parameters) for launch in on_gpu.launches]
    assert again == [one, another]
    saves = [bool(launch.named["checkpoints"] and launch.named["sa"]) for launch in on_gpu.launches]
    assert saves == [False, given["r"].requires_grad] * 2
    monkeypatch.setattr(torch_op, "check_tensors", refuse)
    wkv7(make(), backend="recurrent")
    wkv7(given, backend="recurrent", **options)


@pytest.mark.parametrize(
    ("grad", "more"),
    [(False, {}), (True, {}), (False, {"initial_state": torch.zeros(B, H, N, N)}), (True, {"cu_seqlens": [0, 2, T]})],
)
def test_tensors_like_those_of_the_last_preparation_are_not_asked_one_by_one(grad, more, on_gpu, monkeypatch):
    options = {name: torch.tensor(x) if name == "cu_seqlens" else x for name, x in more.items()}
    shape = (1 if "cu_seqlens" in options else B, T, H, N)
    wkv7(make(shape=shape, grad=grad), **options)
    monkeypatch.setattr(tensors, "signature", refuse)
    y, _ = wkv7(make(shape=shape, grad=grad), **options)
    assert y.requires_grad == grad
    assert len(on_gpu.launches) == 2


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


CHANGES = {
    "dtype": lambda x: x.bfloat16(),
    "shape": lambda x: x[:, :-1],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "gradient": lambda x: x.detach().requires_grad_(),
    "class": lambda x: x.as_subclass(Watched),
    "device": lambda x: x.to("meta"),
    "library": lambda x: x.numpy(),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("changed", range(6))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_likeness_sees_every_change_of_every_tensor(change, changed):
    check, others = tensors.likeness([*make().values()]), [*make().values()]
    assert check(*others)
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


def test_known_call_keeps_no_tensor(on_gpu):
    given = make()
    wkv7(given)
    alive = [weakref.ref(x) for x in given.values()]
    del given
    assert not any(x() is not None for x in alive)


def test_wrong_call_after_a_known_one_is_an_error(on_gpu):
    given = make()
    wkv7(given)
    with pytest.raises(ValueError, match="k: expected shape"):
        wkv7({**given, "k": given["k"][:, :4]})
    with pytest.raises(TypeError, match="v: expected torch.float16 or torch.bfloat16 or torch.float32"):
        wkv7({**given, "v": given["v"].double()})
    with pytest.raises(TypeError, match="chunk_len: expected an int, got \\[8\\]"):
        wkv7(given, chunk_len=[8])
    assert len(on_gpu.launches) == 1


def test_without_gradients_nothing_is_saved(on_gpu):
    with torch.no_grad():
        y, _ = wkv7(make(grad=True), backend="recurrent")
    assert not y.requires_grad
    assert (on_gpu.launches[0].named["checkpoints"], on_gpu.launches[0].named["sa"]) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*jit.trace.* is deprecated")
def test_whoever_watches_torch_sees_the_op(on_gpu):
    class Recorder(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(function))
            return function(*args, **(kwargs or {}))

    given = make()
    wkv7(given)
    assert tensors.is_eager()
    with Recorder() as recorder:
        assert not tensors.is_eager()
        wkv7(given)
    assert recorder.seen[0] == "rwkv_jit.wkv7_fwd.default"
    seen = []
    torch.func.vmap(lambda x: seen.append(tensors.is_eager()) or x)(torch.ones(2))
    torch.jit.trace(lambda x: seen.append(tensors.is_eager()) or x + 1, torch.ones(2), check_trace=False)
    assert seen == [False, False]


def test_tensor_that_watches_sees_the_op_every_time(on_gpu):
    given = make()
    wkv7(given)
    watched = {name: x.as_subclass(Watched) for name, x in given.items()}
    for _ in range(2):
        Watched.seen = ()
        wkv7(watched)
        assert "rwkv_jit.wkv7_fwd.default" in Watched.seen


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("op", "size"), [("wkv7", 16), ("gla", 200)])
def test_forked_child_forgets_what_is_known(op, size, on_gpu):
    given = make_long(op, (B, 40, H, size))
    run(op, given)
    assert kernel._process.has_used_cuda
    assert "forked" in in_fork(lambda: run(op, given))
    again = len(on_gpu.take())
    run(op, given)
    assert len(on_gpu.launches) == again


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_cannot_differentiate_what_its_parent_ran(on_gpu):
    given = make_long("wkv7", (B, 40, H, 64), grad=True)
    for _ in range(2):
        y, _ = wkv7(given)
        dy = torch.ones_like(y)
        torch.autograd.grad(y, list(given.values()), dy, retain_graph=True)  # the backward is prepared
    node = y.grad_fn
    assert "forked" in in_fork(lambda: node.call.differentiate(node.saved_tensors, (dy, None)))


def test_signatures_are_not_kept_without_end(on_gpu, monkeypatch):
    monkeypatch.setattr(signatures, "MOST", 3)
    for tokens in range(1, 9):
        wkv7(make(shape=(1, tokens, 1, N)))
        assert len(prepared.calls) <= 3
        assert len(prepared._latest) <= 3


def test_backwards_of_a_call_are_not_kept_without_end(on_gpu, monkeypatch):
    monkeypatch.setattr(signatures, "MOST", 3)
    given = make(grad=True)
    for wider in range(8):
        y, _ = wkv7(given)
        dy = torch.randn(B, T, H, N + 4 * wider)[..., :N]
        torch.autograd.grad(y, [*given.values()], dy)
        assert on_gpu.launches[-1].named["dy_strides"] == dy.stride()[:3]
    assert len(prepared.calls) == 1
    assert len(plan._plans) <= 3


# ---- autocast, derivatives, and ops that have chosen nothing yet -------------------------------------------------


@contextlib.contextmanager
def autocast(dtype, enabled=True):
    """Autocast of a GPU, and of this machine's memory: torch compares tensors by where they really are."""
    with torch.autocast("cuda", dtype, enabled), torch.autocast("cpu", dtype, enabled):
        yield


def test_known_call_is_another_under_another_autocast(on_gpu, monkeypatch):
    """The same tensors each time; what is launched is read from the dtype of y."""
    given = make()

    def dtype(*contexts):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return wkv7(given)[0].dtype

    def results():
        return [
            dtype(),
            dtype(autocast(HALF)),
            dtype(autocast(torch.float16)),
            dtype(autocast(HALF), autocast(HALF, False)),
            dtype(autocast(HALF), autocast(torch.float16)),
            dtype(),
        ]

    wanted = [torch.float32, HALF, torch.float16, torch.float32, torch.float16, torch.float32]
    for can_compare in (True, False):
        monkeypatch.setattr(tensors, "_Guards", tensors._Guards if can_compare else None)
        signatures.forget()
        assert results() == wanted
        assert len(prepared.calls) == 3
        with monkeypatch.context() as patched:
            patched.setattr(torch_op, "check_tensors", refuse)
            assert results() == wanted


def test_half_a_call_that_is_known_without_autocast_is_cast_under_it(on_gpu):
    """bfloat16 inputs are what the kernels of autocast take, and still another dtype may be in force."""
    given = make(dtype=HALF)
    assert wkv7(given)[0].dtype == HALF
    with autocast(torch.float16):
        assert wkv7(given)[0].dtype == torch.float16
    given["w"] = given["w"].float()
    with autocast(HALF):
        assert wkv7(given)[0].dtype == HALF
    assert of_tensors(on_gpu.launches[-1], given) == places(given)  # nothing was copied


def test_kernels_have_no_forward_mode(on_gpu):
    given = make()
    wkv7(given)
    v = given["v"]
    message = "wkv7: the kernels have no forward-mode derivative .* take backend='reference', or wkv7_ref"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(lambda v: wkv7({**given, "v": v})[0], (v,), (v,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        wkv7({**given, "v": forward_ad.make_dual(v, v)})
    assert len(on_gpu.launches) == 1


def test_torch_func_takes_the_kernels_backwards(on_gpu):
    given = make()
    grad = torch.func.grad(lambda v: wkv7({**given, "v": v})[0].sum())(given["v"])
    assert grad.shape == given["v"].shape
    forward, backward = on_gpu.launches
    assert names([forward, backward]) == ["wkv7_recurrent_forward", "wkv7_recurrent_backward"]
    assert forward.named["checkpoints"] == backward.named["checkpoints"] != 0
    assert forward.named["sa"] == backward.named["sa_all"] != 0


@pytest.mark.parametrize(("dtype", "tokens", "algorithm"), [(torch.float32, T, "recurrent"), (HALF, 64, "chunked")])
def test_op_that_has_chosen_nothing_chooses_when_it_runs(dtype, tokens, algorithm, on_gpu):
    """As an exported program calls it: the fake, the forward and the backward choose the same."""
    options = (1.0, "raw", "vk", 64, None, None, "auto", None, None, False, False, False)
    run, back = torch.ops.rwkv_jit.wkv7_fwd, torch.ops.rwkv_jit.wkv7_bwd
    given, bound = [*make(shape=(B, tokens, H, 16), dtype=dtype).values()], {"decay_bound": -3.0}
    y, _, saved = run(*given, None, None, *options, False, True, **bound)
    with FakeTensorMode() as mode:
        fake = run(*[mode.from_tensor(x) for x in given], None, None, *options, False, True, **bound)
    assert fake[2].shape == saved.shape
    assert saved.numel() > 0
    back(*given, None, None, saved, torch.ones_like(y), None, *options, **bound)
    wanted = [f"wkv7_{algorithm}_{direction}" for direction in ("forward", "backward")]
    assert names(on_gpu.take()) == wanted
    with pytest.raises(RwkvJitError, match=r"wkv7: the backward takes \d+ numbers of what the forward saved, got 1"):
        back(*given, None, None, saved[:1], torch.ones_like(y), None, *options, **bound)
    leaves = [x.requires_grad_() for x in given]
    torch.autograd.grad(run(*leaves, None, None, *options, False, False, **bound)[0].sum(), leaves)
    assert names(on_gpu.launches) == wanted


# Sequences and tokens; whether "auto" and "split" cut them on 132 multiprocessors, with 3 heads.
CUTS = [(1, 4096, True, True), (2, 2500, True, True), (22, 2048, True, True), (23, 2048, False, True)]


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["bf16", "narrow"])
@pytest.mark.parametrize(("sequences", "tokens", "auto", "split"), CUTS)
@pytest.mark.parametrize("op", ["wkv7", "linear_attention"])
def test_sequences_of_a_compiled_graph_are_cut(op, sequences, tokens, auto, split, dtype, on_gpu):
    """What its fake promises to save is what the forward saves, and the backward takes it."""
    run, back = getattr(torch.ops.rwkv_jit, f"{op}_fwd"), getattr(torch.ops.rwkv_jit, f"{op}_bwd")
    given = [*make(op, (sequences, tokens, H, 8), dtype).values()]
    for backend, is_cut in (("auto", auto), ("split", split)):
        options = (1.0, OPS[op].decay, "vk", 64, None, None, backend, None, None, dtype != HALF, False, False)
        y, _, saved = run(*given, None, None, *options, False, True)
        with FakeTensorMode() as mode:
            fake = run(*[mode.from_tensor(x) for x in given], None, None, *options, False, True)
        assert fake[2].shape == saved.shape
        of_forward = on_gpu.take()
        back(*given, None, None, saved, torch.ones_like(y), None, *options)
        for launches in (of_forward, on_gpu.take()):
            assert (f"{OPS[op].stem}_segment" in names(launches)) == is_cut


@pytest.mark.parametrize("sizes", [(256, 256), (200, 136)], ids=str)
@pytest.mark.parametrize("tokens", [32768, 32800])
def test_few_large_heads_are_cut(tokens, sizes, on_gpu):
    """A walk from zero, one from the identity, and one from what they are joined to; the graph's fake agrees."""
    head_size, value_size = sizes
    given = [*make(shape=(2, tokens, 1, head_size), dtype=HALF, value_size=value_size).values()]
    options = (1.0, "sigmoid", "vk", 64, None, None, "auto", None, None, False, False, False)
    run, back = torch.ops.rwkv_jit.wkv7_fwd, torch.ops.rwkv_jit.wkv7_bwd
    y, final, saved = run(*given, None, None, *options, True, True)
    with FakeTensorMode() as mode:
        fake = run(*[mode.from_tensor(x) for x in given], None, None, *options, True, True)
    assert fake[2].shape == saved.shape
    launches = on_gpu.take()
    assert names(launches) == [
        "cut_sequences", "wkv7_prepare", "wkv7_scan", "unit_states", "wkv7_scan", "wkv7_join", "wkv7_scan",
        "copy_states",
    ]  # fmt: skip
    from_zero, unit, from_unit, join, scan = launches[2:-1]
    assert (from_zero.named["first"], from_zero.named["solved"], from_zero.named["states"]) == (0, 0, 0)
    assert unit.named["states"] == from_unit.named["first"] == from_unit.named["last"] == join.named["transitions"] != 0
    assert from_zero.named["last"] == join.named["additions"] != 0
    assert scan.named["first"] == join.named["states"] != 0
    assert (from_unit.parameters["VALUE_SIZE"], from_unit.named["input_strides"]) == (head_size, (0, 0, 0))
    assert (from_unit.named["output"] == scan.named["output"]) == (head_size <= value_size)
    assert scan.named["solved"] * scan.named["states"] != 0
    back(*given, None, None, saved, torch.ones_like(y), torch.ones_like(final), *options)
    backwards = on_gpu.take()
    assert names(backwards)[:3] == ["wkv7_scan", "wkv7_join", "wkv7_scan"]
    from_zero, of_gradients, scan = backwards[:3]
    assert of_gradients.named["transitions"] == join.named["transitions"]
    assert from_zero.named["last"] == of_gradients.named["additions"] != 0
    assert scan.named["first"] == of_gradients.named["states"] != 0
    assert (from_zero.named["first"], of_gradients.named["first"] != 0) == (0, True)


def test_graph_of_a_call_that_cannot_be_split_says_so_when_it_runs(on_gpu):
    given = [*make(shape=(1, 2047, H, 8), dtype=HALF).values()]
    with pytest.raises(UnsupportedConfigError, match="'split' needs tokens for 4 segments of 512 or more, got 2047"):
        torch.ops.rwkv_jit.wkv7_fwd(
            *given, None, None, 1.0, "raw", "vk", 64, None, None, "split", None, None, False, False, False, False, True
        )
    assert on_gpu.take() == []


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


def packed_on_a_gpu(*lengths):
    bounds = [0, *itertools.accumulate(lengths)]
    return torch.tensor(bounds).as_subclass(OnGpu), bounds[-1]


def test_longest_packed_sequence_is_read_with_the_values_once(gpus, monkeypatch):
    monkeypatch.setattr(tensors, "Tensor", OnGpu)  # for the type of a plain one
    OnGpu.reads = 0
    bounds, tokens = packed_on_a_gpu(3, 0, 1000, 2)
    assert [tensors.longest(bounds, tokens) for _ in range(3)] == [896] * 3  # three bits of it
    tensors.packing(bounds, tokens)
    assert OnGpu.reads == 1
    assert tensors.longest(bounds, tokens + 1) == -1  # which is an error of the call
    bounds[1] = 1
    gpus.capturing = True
    assert tensors.longest(bounds, tokens) == 896
    assert tensors.longest(packed_on_a_gpu(3, 2, 998, 2)[0], tokens) == 896  # that of the last one of its shape
    assert tensors.longest(packed_on_a_gpu(3, 74)[0], 77) == 0
    assert tensors.longest(None, 5) == 0
    assert tensors.longest(torch.tensor([0, 5]), 5) == 0  # on a CPU


def test_values_that_torch_does_not_count_are_read_in_every_call(gpus, monkeypatch):
    monkeypatch.setattr(tensors, "Tensor", OnGpu)
    monkeypatch.setattr(OnGpu, "is_inference", lambda _: True, raising=False)
    bounds, tokens = packed_on_a_gpu(3, 1000)
    OnGpu.reads = 0
    for _ in range(2):  # what asks for the longest one has checked them for the launch
        assert tensors.longest(bounds, tokens) == 896
        tensors.packing(bounds, tokens)
    assert OnGpu.reads == 2


def test_tokens_behind_the_last_sequence_are_looked_up_once(gpus, monkeypatch):
    monkeypatch.setattr(tensors, "Tensor", OnGpu)
    bounds, tokens = packed_on_a_gpu(3, 2)
    lead = torch.empty(1, tokens + 4, 2)
    assert tensors.tokens_behind(bounds, lead) == 4
    tensors.packing(bounds, tokens)
    with monkeypatch.context() as patch:
        patch.setattr(OnGpu, "__int__", lambda _: pytest.fail("read again"), raising=False)
        assert tensors.tokens_behind(bounds, lead) == 4
    bounds[2] = 4
    assert tensors.tokens_behind(bounds, lead) == 5
    gpus.capturing = True
    bounds[2] = 3
    assert tensors.tokens_behind(bounds, lead) == 0  # nobody knows
    for other in (None, torch.tensor(5), torch.tensor([]), torch.tensor([0, tokens + 5])):
        assert tensors.tokens_behind(None if other is None else other.as_subclass(OnGpu), lead) == 0


# ---- what every algorithm launches -------------------------------------------------------------------------------

# By what is in its way: the architecture, tokens, head size, value size, options; the kernels of the forward and of the
# backward.
ALGORITHMS = {
    "wkv7": [
        ("sm_80", 40, 16, 24, {"backend": "recurrent"}, "recurrent_forward", "recurrent_backward"),
        ("sm_80", 40, 16, 24, {}, "chunked_forward", "chunked_backward"),
        ("sm_90", 40, 64, 128, {}, "chunked_forward", "group_backward"),
        ("sm_80", 70, 200, 136, {}, "prepare scan", "scan token_gradients key_gradients"),
        ("sm_90", 70, 200, 136, {}, "prepare group_scan", "group_scan token_gradients key_gradients"),
        (
            "sm_80", 2048, 16, 24, {"backend": "split"}, "segment join chunked_forward",
            "segment join chunked_backward",
        ),
    ],
    "gla": [
        ("sm_80", 40, 16, 24, {"backend": "recurrent"}, "recurrent_forward", "recurrent_backward"),
        ("sm_80", 40, 40, 56, {}, "scan", "chunked_backward"),
        ("sm_90", 40, 128, 104, {}, "scan", "chunked_backward"),
        ("sm_80", 70, 200, 304, {}, "scan", "scan key_gradients"),
        ("sm_90", 70, 200, 304, {}, "prepare group_scan", "group_scan group_key_gradients"),
        ("sm_80", 1280, 40, 56, {"backend": "split"}, "segment join scan", "segment join chunked_backward"),
    ],
}  # fmt: skip
CASES = [
    pytest.param(op, *case, packed, id=f"{op}-{'-'.join(map(str, (*case[:4], packed)))}")
    for op in RECURRENCES
    for case in ALGORITHMS[OPS[op].stem]
    for packed in (False, *([True] if case[4].get("backend") != "split" else []))
]
HOUSEKEEPING = ("sum_rows", "sum_buffers", "copy_states")  # before and after the kernels of an algorithm
# What kernels call the tensors of a call in both directions, where they have names of their own.
ALIASES = {
    True: {"q": "r", "dq": "dr", "input": "v", "output": "y", "keys": "k", "values": "v"},
    False: {"q": "r", "dq": "dr", "input": "dy", "output": "dv", "keys": "r", "values": "dy"},
}


def templates(op, text):
    return [f"{OPS[op].stem}_{name}" for name in text.split()]


def as_of_call(launch, is_forward):
    """The arguments of a launch, by the names of the tensors of its call."""
    aliases, arguments = {**ALIASES[is_forward], "key": ALIASES[is_forward]["keys"], "": "w"}, {}
    for name, x in launch.named.items():
        owner, suffix = re.fullmatch(r"(\w*?)(_?strides)?", name).groups("")
        owner = aliases.get(owner, owner.removesuffix("_all")) if owner != "value" else aliases["values"]
        arguments[f"{owner}{suffix and '_strides'}"] = x
    return arguments


def strides_of(x, segments=1):
    """Strides between sequences or segments, tokens and heads; 0 where there is nothing to step over."""
    if x is None:
        return (0, 0, 0)
    if x.ndim == 2:
        return (0, 0, x.stride(0))
    return (x.stride(0) if segments == 1 else x.shape[1] // segments * x.stride(1), *x.stride()[1:3])


class Directions(NamedTuple):
    """A call with gradients, and what its two directions have launched."""

    y: torch.Tensor
    final: torch.Tensor
    dy: torch.Tensor
    grad_final: torch.Tensor
    grads: list  # of the inputs, and of the state
    forwards: list
    backwards: list


def both_directions(on_gpu, op, given, state, cu_seqlens=None, **options):
    """Run a call and its backward."""
    leaves = [*given.values(), state]
    y, final = run(op, given, state, True, cu_seqlens, **options)
    forwards, asked = on_gpu.take(), len(on_gpu.asked)
    dy = torch.randn(*y.shape[:3], y.shape[3] + 16).to(y.dtype)[..., : y.shape[3]]  # with strides of its own
    grad_final = torch.randn_like(final)
    grads = torch.autograd.grad([y, final], leaves, [dy, grad_final])
    assert len(on_gpu.asked) == asked  # the forward has asked for all kernels
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in leaves]
    backwards = on_gpu.take()
    for launches, taken in ((forwards, (*leaves, cu_seqlens, y, final)), (backwards, (dy, grad_final, *grads))):
        addresses = {address for launch in launches for address in launch.addresses.values()}
        assert {x.data_ptr() for x in taken if x is not None} <= addresses
    return Directions(y, final, dy, grad_final, grads, forwards, backwards)


def check_named(launch, given, is_forward, segments=1, bounds=None):
    """Check that a launch was given the tensors of its names, with their strides, and the numbers of the call."""
    arguments, op_has = as_of_call(launch, is_forward), {**dict.fromkeys("wu"), **given}
    if launch.template.startswith(("wkv7_token_gradients", "wkv7_key_gradients")):
        del op_has["u"]  # the solutions of a triangular system there
    for name, x in op_has.items():
        if name in arguments:
            assert arguments[name] == (0 if x is None else x.data_ptr()), (launch.template, name)
        strides = arguments.get(f"{name}_strides", ())
        assert strides in ((), strides_of(x, segments)), (launch.template, name)
    assert arguments.get("cu_seqlens", 0) == (0 if bounds is None else bounds.data_ptr())
    sequences = given["r"].shape[0] if bounds is None else len(bounds) - 1
    wanted = {"tokens": given["r"].shape[1] // segments, "heads": H, "scale": 0.5, "sequences": sequences * segments}
    assert [name for name, x in wanted.items() if arguments.get(name, x) != x] == []
    assert launch.block == (launch.parameters["NUM_THREADS"], 1, 1)
    assert launch.shared_bytes == launch.parameters.get("SHARED_BYTES", 0)
    assert launch.stream == 100


def make_apart(op, shape, value_size):
    """Leaves of a long call, whose tensors with tokens all have strides of their own."""
    given = make_long(op, shape, value_size)
    return {
        name: torch.cat([x] * (n + 1 if x.ndim == 4 else 1), -1)[..., : x.shape[-1]].requires_grad_()
        for n, (name, x) in enumerate(given.items())
    }


@pytest.mark.parametrize(
    ("op", "arch", "tokens", "size", "value_size", "options", "forward", "backward", "packed"), CASES
)
def test_both_directions_of_every_algorithm(
    op, arch, tokens, size, value_size, options, forward, backward, packed, on_gpu, monkeypatch
):
    in_segments, is_recurrent = options.get("backend") == "split", options.get("backend") == "recurrent"
    on_gpu.use(arch)
    if op == "linear_attention" and (arch, size) == ("sm_90", 128):
        backward = "group_backward"
    batch, sequences, tokens = (1, 3, 3 * tokens) if packed else (B, B, tokens)
    options = {**options, "scale": 0.5, "state_layout": "vk"}
    if op != "linear_attention":
        options |= {"decay": "log"}
    cu_seqlens = torch.tensor([0, 3, 3, tokens]) if packed else None
    for _ in range(2):
        given = make_apart(op, (batch, tokens, H, size), value_size)
        state = make_state(op, (batch, tokens, H, size), sequences, value_size, grad=True, layout="vk")
        done = both_directions(on_gpu, op, given, state, cu_seqlens, **options)
        forwards, backwards = (
            [launch for launch in launches if launch.template not in HOUSEKEEPING]
            for launches in (done.forwards, done.backwards)
        )
        assert names(forwards) == templates(op, forward)
        assert names(backwards) == templates(op, backward)
        segments = forwards[0].grid[0] // B if in_segments else 1
        assert (segments >= 4) == in_segments
        for launch in forwards:
            check_named(launch, given, True, segments, cu_seqlens)
            ends = {"initial_state": state, "y": done.y, "final_state": done.final}
            assert not is_recurrent or of_tensors(launch, ends) == places(ends)
            assert launch.named.get("saves", 1) == 1
        grads = dict(zip(given, done.grads, strict=False))
        of_tokens = {f"d{name}": x for name, x in grads.items() if name in OPS[op].streamed}
        for launch in backwards:
            check_named(launch, {**given, "dy": done.dy}, False, segments, cu_seqlens)
            arguments = as_of_call(launch, False)
            assert [name for name, x in of_tokens.items() if arguments.get(name, x.data_ptr()) != x.data_ptr()] == []
            if is_recurrent:
                ends = {"grad_final_state": done.grad_final, "grad_initial_state": done.grads[-1]}
                assert of_tensors(launch, ends) == places(ends)
        for name in ("framed", "halved"):  # all kernels of both directions that tell and are told have the same
            told = {launch.named[name] for launch in (*forwards, *backwards) if name in launch.named}
            assert told <= {0} if op == "linear_attention" else 0 not in told
            assert len(told) <= 1
        monkeypatch.setattr(torch_op, "check_tensors", refuse)
        monkeypatch.setattr(kernel, "get_most", refuse)


@pytest.mark.parametrize("op", ["wkv7", "wkv5", "gla"])
@pytest.mark.parametrize("bounds", [[0, 7, 7, 3000, 3100], None])
def test_both_directions_of_ragged_segments(op, bounds, on_gpu, monkeypatch):
    """Of packed sequences and of lengths that have no equal segments: all kernels have the same bounds."""
    monkeypatch.setattr(tensors, "longest", lambda cu_seqlens, tokens: 0 if cu_seqlens is None else 2993)
    on_gpu.use("sm_90")
    batch, tokens, sequences = (2, 3001, 2) if bounds is None else (1, 3100, 4)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    given = make_long(op, (batch, tokens, H, 64), grad=True)
    state = make_state(op, (batch, tokens, H, 64), sequences, grad=True, layout="kv")
    done = both_directions(on_gpu, op, given, state, cu_seqlens, state_layout="kv", backend="split")
    stem = OPS[op].stem
    assert [launch.template for launch in in_frames(done.forwards)][:4] == [
        "cut_sequences", "copy_states", f"{stem}_segment", f"{stem}_join"
    ]  # fmt: skip
    length = done.forwards[0].named["segment_len"]
    places = tokens // length + sequences if bounds else batch * -(-tokens // length)
    by_template = {launch.template: launch for launch in (*done.forwards, *done.backwards)}
    where = done.forwards[0].named["bounds"]
    for launch in (*done.forwards, *done.backwards):
        name, named = launch.template, launch.named
        if name.endswith(("_segment", "_scan", "_chunked_forward", "_chunked_backward", "_group_backward")):
            assert launch.grid[0] == places, name
            assert (named["bounds"] if name.endswith("_segment") else named["cu_seqlens"]) == where, name
            assert named["tokens"] == batch * tokens, name
        if name.endswith("_join") or (name == "copy_states" and launch.parameters["RAGGED"]):
            assert named["cu_seqlens"] == (0 if bounds is None else cu_seqlens.data_ptr()), name
            assert (named["tokens"], named["segment_len"]) == (tokens, length), name
    assert by_template[f"{stem}_join"].grid[0] == sequences
    purposes = [x.named["purpose"] for x in (*done.forwards, *done.backwards) if "purpose" in x.named]
    assert purposes == [3, 2]
    run(op, given, state.detach(), True, cu_seqlens, state_layout="kv", backend="split")


def test_packed_calls_are_told_apart_by_their_longest_sequence(on_gpu, monkeypatch):
    on_gpu.use("sm_90")
    given, seen = make_long("wkv7", (1, 4000, 1, 64)), []
    for longest in (3500, 100, 1000) * 2:
        monkeypatch.setattr(tensors, "longest", lambda *_, longest=longest: longest)
        if len(seen) == 3:  # from here on they are known
            monkeypatch.setattr(torch_op, "check_tensors", refuse)
        run("wkv7", given, cu_seqlens=torch.tensor([0, 500, 4000]))
        seen.append(on_gpu.take()[0].template)
    assert seen == ["cut_sequences", "wkv7_chunked_forward", "wkv7_prepare"] * 2


@pytest.mark.parametrize("op", ["wkv7", "wkv5", "linear_attention"])
@pytest.mark.parametrize(("bounds", "tokens", "segments"), [(None, 70, 1), ([0, 3, 3, 120], 120, 1), (None, 4096, 8)])
def test_where_the_state_alone_wants_a_gradient_nothing_is_kept(op, bounds, tokens, segments, on_gpu, monkeypatch):
    """Its gradient is what segments do to that of their ends; a call with other wishes is another one."""
    on_gpu.use("sm_90")
    sequences = B if bounds is None else len(bounds) - 1
    batch, cu_seqlens = (B, None) if bounds is None else (1, torch.tensor(bounds))
    given, stem = make_long(op, (batch, tokens, H, 64)), OPS[op].stem
    state = make_state(op, (batch, tokens, H, 64), sequences, grad=True, layout="vk")
    backend = {"backend": "split"} if segments > 1 else {}
    for uses_final in (False, True, False):
        y, final = run(op, given, state, True, cu_seqlens, state_layout="vk", **backend)
        forwards = on_gpu.take()
        assert not any(launch.named.get("checkpoints") for launch in forwards)
        assert y.grad_fn.saved_tensors[-1] is None
        loss = y.float().sum() + (final.sum() if uses_final else 0)
        (grad,) = torch.autograd.grad(loss, [state])
        backwards = on_gpu.take()
        joins = uses_final or segments > 1
        walks = [f"{stem}_segment"] * 2 + [f"{stem}_join"] if joins else [f"{stem}_segment"]
        assert [launch.template for launch in backwards] == walks
        assert backwards[-1].named["last" if joins else "additions"] == grad.data_ptr()
        assert backwards[0].grid[0] % sequences == 0
        assert (backwards[0].grid[0] > sequences) == (segments > 1)
        assert backwards[0].named["bounds"] == (0 if bounds is None else cu_seqlens.data_ptr())
    given["v"].requires_grad_()
    y, _ = run(op, given, state, True, cu_seqlens, state_layout="vk", **backend)
    assert any(launch.named.get("checkpoints") for launch in on_gpu.take())
    assert all(x is not None for x in torch.autograd.grad(y.float().sum(), [given["v"], state]))
    monkeypatch.setattr(torch_op, "check_tensors", refuse)  # both are known
    monkeypatch.setattr(prepared._latest, "get", lambda _: None)  # by their signature too
    for given["v"].requires_grad in (False, True):
        on_gpu.take()
        run(op, given, state, True, cu_seqlens, state_layout="vk", **backend)
        assert any(launch.named.get("checkpoints") for launch in on_gpu.take()) == given["v"].requires_grad


def test_gradient_of_the_state_alone_by_way_of_the_torch_op(on_gpu):
    """As where a graph of them is wanted: it makes no other gradient either."""
    on_gpu.use("sm_90")
    given, state = make_long("wkv7", (B, 70, H, 64)), make_state("wkv7", (B, 70, H, 64), grad=True)
    y, _ = run("wkv7", given, state)
    on_gpu.take()
    (grad,) = torch.autograd.grad(y.float().sum(), [state], create_graph=True)
    assert grad.shape == state.shape
    assert names(on_gpu.take()) == ["wkv7_segment"]


EACH = pytest.mark.parametrize(
    ("op", "arch", "tokens", "size", "value_size", "options"),
    [pytest.param(*case.values[:6], id=case.id) for case in CASES if not case.values[-1]],
)


@EACH
def test_states_have_any_type_and_layout(op, arch, tokens, size, value_size, options, on_gpu):
    on_gpu.use(arch)
    for dtype, layout in itertools.product((torch.float32, HALF), ("vk", "kv")):
        given = make_long(op, (B, tokens, H, size), value_size, grad=True)
        state = make_state(op, (B, tokens, H, size), None, value_size, layout=layout).to(dtype).requires_grad_()
        done = both_directions(on_gpu, op, given, state, None, **bounded(op, state_layout=layout, **options))
        assert (done.final.shape, done.final.dtype) == (state.shape, dtype)
        # The kernels that take the call's states see their type and layout, or a copy that is float32.
        of_forward, of_backward = (state, done.final), (done.grad_final, done.grads[-1])
        for launches, states in ((done.forwards, of_forward), (done.backwards, of_backward)):
            ends = {x.data_ptr() for x in states}
            for launch in launches:
                if launch.template != "copy_states" and ends & set(launch.addresses.values()):
                    seen = launch.parameters.get("T_STATE", "fp32"), launch.parameters.get("STATE_LAYOUT", "vk")
                    assert seen == (tensors.STORAGE[dtype], layout)


@EACH
def test_nothing_that_is_not_wanted_is_written(op, arch, tokens, size, value_size, options, on_gpu):
    """No states or gradients."""
    on_gpu.use(arch)
    for _ in range(2):
        y, final = run(op, make_long(op, (B, tokens, H, size), value_size), **options)
        assert final is None
        launches = on_gpu.take()
        ends = {"cu_seqlens", "final_state", "checkpoints", "solved", "sa", "saves"}
        ends |= set() if options.get("backend") == "split" else {"initial_state", "states", "first", "last"}
        assert [n for launch in launches for n, x in launch.named.items() if x and n in ends] == []
        assert launches[-1].named.get("y", launches[-1].named.get("output")) == y.data_ptr()


@EACH
def test_call_without_tokens_or_heads(op, arch, tokens, size, value_size, options, on_gpu):
    on_gpu.use(arch)
    backend = options.get("backend", "split" if size > 128 else "chunked")
    for shape in ((B, 0, H, size), (0, 40, H, size), (B, 40, 0, size)):
        if backend == "split" and size < 128:
            continue  # there are no segments
        given = make_long(op, shape, value_size, grad=True)
        y, final = run(op, given, None, True, backend=backend)
        grads = torch.autograd.grad(y.sum() + final.sum(), [*given.values()])
        assert y.shape == (*shape[:3], value_size)
        assert [x.shape for x in grads] == [x.shape for x in given.values()]
        # Without tokens there are states to copy; without sequences or heads there is no work at all.
        of_op = [launch.template for launch in on_gpu.take() if launch.template not in HOUSEKEEPING]
        assert bool(of_op) == (shape[1] == 0)


# ---- which kernels, and what they read ---------------------------------------------------------------------------


@pytest.mark.parametrize("op", RECURRENCES)
@pytest.mark.parametrize(
    ("size", "shift", "is_copied"), [(16, 4, True), (16, 8, False), (12, 4, False), (12, 2, True), (7, 1, False)]
)
def test_chunked_kernels_read_sixteen_bytes_where_rows_consist_of_them(size, shift, is_copied, op, on_gpu):
    """Of inputs, and backwards of the gradient of y."""
    shape, options = (B, 40, H, size), bounded(op)
    given = make_long(op, shape, grad=True)
    y, _ = run(op, given, **options)
    count = given["v"].numel()
    moved = torch.randn(count + 8).to(HALF)[shift : shift + count].view(shape)
    wide = torch.randn(B, 40, H, size + shift).to(HALF)[..., :size]  # rows that begin at other places
    for x in (moved, wide):
        on_gpu.take()
        run(op, {**given, "v": x}, **options)
        torch.autograd.grad(y, [*given.values()], x, retain_graph=True)
        forward, backward = (as_of_call(on_gpu.launches[place], place == 0) for place in (0, 1))
        for address in (forward["v"], backward["dy"]):
            assert address % (16 if size % 8 == 0 else 8 if size % 4 == 0 else 2) == 0
            assert (address != x.data_ptr()) == is_copied


@pytest.mark.parametrize(("tokens", "stride", "copies"), [(2, 2**26, True), (2, 2**26 - 8, False), (1, 2**26, False)])
def test_tokens_too_far_apart_for_offsets_of_32_bits_are_copied(tokens, stride, copies):
    x = torch.empty_strided((1, tokens, 3, 8), (tokens * stride, stride, 8, 1), dtype=HALF, device="meta")
    assert tensors.needs_copy(x, 8) is copies


# ---- grids, and memory between the kernels -----------------------------------------------------------------------


KEPT = [
    ("wkv7", "sm_80", 40, 40, {}, 32, lambda slots: 2 * slots * H * 64 * 64),
    ("gla", "sm_80", 40, 104, {}, 32, lambda slots: 2 * slots * H * 64 * 128),
    ("linear_attention", "sm_80", 128, 104, {}, 32, lambda slots: 2 * slots * H * 128 * 128),
    ("linear_attention", "sm_90", 128, 104, {}, 64, lambda slots: 2 * slots * H * 128 * 128),
    (
        "wkv7", "sm_80", 200, 77, {"chunk_len": 32}, 32,
        lambda slots: slots * H * (4 * 32 * 256 * 2 + 4 * 3 * 512 + 2 * 256 * 4 + 256 * 128 * 2) + 120 * H * 77 * 2,
    ),
    ("gla", "sm_90", 200, 300, {}, 64, lambda slots: slots * H * (4 * 2 * 8192 + 8192 + 2 * 256 * 4 + 4 * 320 * 128)),
    ("linear_attention", "sm_90", 200, 300, {}, 64, lambda slots: slots * H * (4 * 2 * 8192 + 8192 + 4 * 320 * 128)),
]  # fmt: skip


@PACKINGS
@pytest.mark.parametrize(("op", "arch", "size", "value_size", "options", "length", "wanted"), KEPT)
def test_forward_keeps_no_more_than_the_backward_needs(
    op, arch, size, value_size, options, length, wanted, bounds, on_gpu
):
    on_gpu.use(arch)
    (_, tokens, *_), sequences, cu_seqlens = packing(bounds or [0, 120])
    given = make_long(op, (1, tokens, H, size), value_size, grad=True)
    y, _ = run(op, given, cu_seqlens=cu_seqlens if bounds else None, **bounded(op, **options))
    slots = 120 // length + sequences if bounds else -(-120 // length)
    kept = y.grad_fn.saved_tensors[-1]
    assert 4 * kept.numel() - wanted(slots) in range(16)  # the last piece may be rounded up


def test_compiler_need_not_know_the_batch_of_a_call_with_gradients(on_gpu):
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    x = torch.randn(6, 40, H, 16).bfloat16()
    arguments = (None, None, 1.0, "raw", "vk", 64, 32, None, "chunked", None, None, False, False, True, True, True)
    with FakeTensorMode(shape_env=shapes) as mode:
        fakes = [mode.from_tensor(x, symbolic_context=context, source=ConstantSource("x"))] * 6
        before = len(shapes.guards)
        fake = torch.ops.rwkv_jit.wkv7_fwd(*fakes, *arguments)
    assert len(shapes.guards) == before
    assert str(fake[2].shape[0]) != str(int(fake[2].shape[0]))  # symbolic


# Rows of gradients that are added up: for each chunk that there can be, for each segment, and for each sequence.
SUMS = [
    ("wkv5", "sm_80", 40, 8, {"backend": "recurrent"}, ["sequences"]),
    ("wkv5", "sm_80", 40, 40, {}, ["sequences"]),
    ("wkv6", "sm_80", 70, 200, {"chunk_len": 32}, ["chunks", "sequences"]),
    ("wkv5", "sm_90", 70, 200, {}, ["chunks", "sequences"]),
    ("wkv5", "sm_80", 1280, 8, {"backend": "split"}, ["segments", "sequences"]),
]


@pytest.mark.parametrize(
    ("op", "arch", "tokens", "size", "options", "rows", "bounds"),
    [(*case, bounds) for case in SUMS for bounds in (None, [0, 3, 3, 120]) if not (bounds and "segments" in case[-1])],
)
def test_gradients_of_inputs_without_tokens_are_added_up(op, arch, tokens, size, options, rows, bounds, on_gpu):
    on_gpu.use(arch)
    batch, tokens, sequences = (1, 120, 3) if bounds else (B, tokens, B)
    given = make_long(op, (batch, tokens, H, size), grad=True)
    cu_seqlens = torch.tensor(bounds) if bounds else None
    y, _ = run(op, given, cu_seqlens=cu_seqlens, decay="sigmoid", **options)
    grads = dict(zip(given, torch.autograd.grad(y.sum(), [*given.values()]), strict=True))
    launches, zeros = on_gpu.launches, {x[1] for x in on_gpu.order if x[0] == "zero"}
    for name in OPS[op].fixed:
        address = grads[name].data_ptr()
        for piece in reversed(rows):
            if piece == "sequences":
                sums = launches[-1].named
                (place,) = (place for place in range(5) if sums[f"sums{place}"] == address)
                assert (sums[f"group_rows{place}"], sums[f"width{place}"]) == (sequences, H * size)
                assert STORAGE_TYPES[sums[f"storage{place}"]] == tensors.STORAGE[given[name].dtype]
                address = sums[f"rows{place}"]
                continue
            (step,) = (launch for launch in launches if launch.addresses.get("sums") == address)
            length = tokens // 5 if piece == "segments" else options.get("chunk_len", 64)
            wanted = {"width": H * size, "chunk_len": 0}
            if bounds:
                wanted |= {"chunk_len": length, "cu_seqlens": cu_seqlens.data_ptr(), "tokens": tokens}
            else:
                wanted |= {"group_rows": -(-tokens // length)}
            assert of_tensors(step, wanted) == wanted
            assert step.grid[1] == sequences
            assert step.parameters["T_OUT"] == "fp32"
            address = step.named["rows"]
        assert address in [as_of_call(launch, False).get(f"d{name}") for launch in launches]
        assert (address in zeros) == ("chunks" in rows)


# ---- calls of their own kind -------------------------------------------------------------------------------------


def test_scan_of_few_heads_leaves_room_to_the_other_kernels(on_gpu, monkeypatch):
    on_gpu.use("sm_90")
    monkeypatch.setattr(delta_large, "_LEAST_CHUNKS", 30)
    main, side = 100, 1001
    given = make_long("wkv7", (B, 64 * 30 - 5, 1, 256), grad=True)
    y, _ = wkv7(given, decay="sigmoid")
    forward, on_gpu.order = on_gpu.order, []
    y.backward(torch.ones_like(y))
    follow, join = ("wait", side, main), ("wait", main, side)

    def steps(order):
        return [x if x[0] == "wait" else (x.template, x.stream) for x in order]

    scan = ("wkv7_group_scan", side)
    others = [("wkv7_token_gradients", main), ("wkv7_key_gradients", main)]
    assert steps(forward) == [("wkv7_prepare", main), follow, scan] * 4 + [join]
    assert steps(on_gpu.order) == [follow, *[scan, join, *others] * 4]
    assert len(on_gpu.events) == 1  # of this thread, for every wait
    for order, ends in ((forward, [0, 7, 15, 22, 30]), (on_gpu.order, [0, 2, 6, 14, 30])):
        scans = [x for x in order if x[0] != "wait" and x.template == "wkv7_group_scan"]
        assert [x.named["walk"] for x in scans] == [*itertools.pairwise(ends)]
        (carried,) = {x.named["carried"] for x in scans}
        assert carried != 0  # what passes from part to part


@pytest.mark.parametrize(
    ("arch", "tokens", "is_beside"), [("sm_90", 1024, True), ("sm_90", 1000, False), ("sm_80", 1024, False)]
)
@pytest.mark.parametrize("decay", ["raw", "sigmoid"])
def test_launches_by_halves_are_beside_those_in_frames(arch, tokens, is_beside, decay, on_gpu):
    """The second of both may begin early, where the GPU can; forwards only with a board, that is zeros before."""
    on_gpu.use(arch)
    given = make_long("wkv7", (B, tokens, H, 64), grad=True)
    y, _ = wkv7(given, decay=decay, backend="chunked", chunk_len=32)
    forward, on_gpu.order = on_gpu.order, []
    y.backward(torch.ones_like(y))
    halves = decay == "raw"

    def launches(order):
        return [(is_by_halves(x.template, x.request.parameters), x.overlaps) for x in order if x[0] != "zero"]

    assert launches(forward) == [(False, False), (True, is_beside)][: 1 + halves]
    assert launches(on_gpu.order) == [(True, False), (False, halves and arch == "sm_90")][1 - halves :]
    boards = {x.named["board"] for x in forward if x[0] != "zero"}
    zeros = [(address, size) for what, address, size, _ in (x for x in forward if x[0] == "zero")]
    if halves and is_beside:
        assert zeros == [(*boards, 4 * (2 + B * H) + -4 * (2 + B * H) % 16)]
        assert forward[0][0] == "zero"
    else:
        assert (boards, zeros) == ({0}, [])


@pytest.mark.parametrize(
    ("heads", "tokens", "wanted"), [(32, 54, 256), (66, 54, 256), (67, 54, 128), (32, 32, 256), (32, 900, 256)]
)
@pytest.mark.parametrize("op", ["wkv5", "wkv6", "gla", "linear_attention"])
def test_few_heads_have_twice_as_many_threads(op, heads, tokens, wanted, on_gpu):
    """Those that have a multiprocessor each; under `set_batch_invariant` none has."""
    assert on_gpu.multiprocessors == 132
    given = make_long(op, (2, tokens, heads, 64))
    try:
        for is_invariant, threads in ((False, wanted), (True, 128)):
            rwkv_jit.set_batch_invariant(is_invariant)
            run(op, given, backend="chunked")
            (launch,) = [x for x in on_gpu.take() if x.template == "gla_scan"]
            assert launch.block[0] == launch.parameters["NUM_THREADS"] == threads
    finally:
        rwkv_jit.set_batch_invariant(False)


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "gla", "linear_attention"])
def test_segments_have_the_threads_of_many_heads(op, on_gpu):
    """They fill the GPU, even one on which every segment has a multiprocessor."""
    on_gpu.multiprocessors = 16
    run(op, make_long(op, (1, 2048, 2, 64)), backend="split")
    launches = on_gpu.take()
    assert "gla_segment" in names(launches)
    (scan,) = [x for x in launches if x.template == "gla_scan"]
    assert scan.grid[0] * scan.grid[1] <= on_gpu.multiprocessors
    assert scan.block[0] == 128


@pytest.mark.parametrize(
    ("arch", "value_size", "wanted"),
    [
        ("sm_80", 120, ["gla_scan", "gla_chunked_backward"]),
        ("sm_80", 128, ["gla_scan", "gla_scan", "gla_key_gradients"]),
        ("sm_90", 120, ["gla_scan", "gla_chunked_backward"]),
        ("sm_90", 128, ["gla_prepare", "gla_group_scan", "gla_group_scan", "gla_group_key_gradients"]),
    ],
)
def test_normalized_attention_takes_the_tensor_cores_with_its_column_of_ones(arch, value_size, wanted, on_gpu):
    on_gpu.use(arch)
    given = make_long("linear_attention", (B, 40, H, 64), value_size, grad=True)
    y, _ = run("linear_attention", given, normalize=True)
    torch.autograd.grad(y.sum(), [*given.values()])
    assert names(on_gpu.launches) == wanted
    assert y.shape == (B, 40, H, value_size)
    sizes = {launch.parameters.get("VALUE_SIZE", value_size + 8) for launch in on_gpu.launches}
    assert sizes == {value_size + 8}  # kernels read several values at once


@pytest.mark.parametrize("op", GATED)
def test_keys_too_long_for_a_block_run_in_parts(op, on_gpu):
    given = make_long(op, (B, 40, H, 300), 64, grad=True)
    y, _ = run(op, given, **bounded(op))
    assert names(on_gpu.launches) == ["gla_scan"] * 2
    assert [launch.parameters["HEAD_SIZE"] for launch in on_gpu.launches] == [152, 148]
    grads = torch.autograd.grad(y.sum(), [*given.values()])
    assert [x.shape for x in grads] == [x.shape for x in given.values()]


def test_what_the_torch_op_may_do_a_public_call_may_not(on_gpu):
    given = make_long("wkv7")
    options = (1.0, "sigmoid", "vk", 64, 64, None, "chunked", None, None, False, False, True)
    torch.ops.rwkv_jit.wkv7_fwd(*given.values(), None, None, *options, False, False)
    assert len(on_gpu.launches) == 1
    message = "backend: 'chunked' takes chunk_len 16 or 32, got 64; use 'auto' or 'recurrent'"
    with pytest.raises(UnsupportedConfigError, match=re.escape(message)):
        wkv7(given, decay="sigmoid", backend="chunked", chunk_len=64)
    wkv7(given, decay="sigmoid", backend="chunked", chunk_len=32)
    assert len(on_gpu.launches) == 2


@pytest.mark.parametrize("op", RECURRENCES)
def test_tuner_launches_the_geometry_it_is_asked_for_from_kernels_it_has_compiled(op, on_gpu, monkeypatch):
    from rwkv_jit.desk import inputs, tune

    compiled = []

    def get_async(request):
        compiled.append((request.template.name, request.parameters))
        done = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(kernel, "get_async", get_async)
    monkeypatch.setattr(inputs, "make_inputs", lambda op, shape, dtype: [*make(op, shape, dtype, grad=True).values()])
    algorithm = CHUNKS[op]
    forward, backward = algorithm.TEMPLATES[:2]

    def results(*candidate, training=True):
        made = tune._Kernels(op, LONG, training).results(Candidate(*candidate))
        return {name: tuple(x.shape) for name, x in made.items()}

    fixed = OPS[op].fixed
    gradients = {
        f"d{public}": (H, 16) if own in fixed else LONG
        for own, public in zip(OPS[op].names, OPS[op].public_names, strict=True)
    }
    both = {"y": LONG, "final_state": (B, H, 16, 16)}
    assert results("forward", 16, 256, 1) == {**both, **gradients}
    assert results("backward", 16, 64, 4) == gradients
    launches = [launch for launch in in_frames(on_gpu.take()) if launch.template not in HOUSEKEEPING]
    assert names(launches) == [forward, backward] * 2
    tuned = [launch for launch in launches if launch.template in (forward, backward)]
    by_rule = 64 if op == "wkv7" else 128  # of few heads
    assert [launch.block[0] for launch in tuned] == [256, 64, by_rule, 64]
    assert [tuned[n].parameters["BLOCKS_PER_SM"] for n in (0, -1)] == [1, 4]
    limits = {launch.parameters["LARGEST_DECAY"] for launch in tuned}
    assert limits == {LARGEST_DECAY["bf16"] if op in ("wkv5", "wkv6", "gla") else 0}  # wkv7 trains with sigmoids
    assert {launch.parameters["DECAY"] for launch in launches} == {inputs.decay_of(op)}
    assert {launch.parameters["STATE_LAYOUT"] for launch in launches} == {OPS[op].state_layout}
    assert results("forward", 32, 128, 2, training=False) == both
    several = [x for way in ("forward", "backward") for x in algorithm.candidates(way, 16, Gpu("sm_80"))]
    tune._compile(op, several, 16, None)
    assert [launch.template for launch in tuned if (launch.template, launch.parameters) not in compiled] == []


# ---- what a known call costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bounded", [True, False])
@EACH
def test_known_call_runs_little_python(op, arch, tokens, size, value_size, options, is_bounded, on_gpu):
    """These are facts, not timings: a frame takes a good part of what a launch takes."""
    on_gpu.use(arch)
    given = make_long(op, (B, tokens, H, size), value_size, grad=True)
    options = bounded(op, **options) if is_bounded else options

    def forward():
        with torch.no_grad():
            run(op, given, **options)

    def training():
        return run(op, given, **options)[0]

    y = training()
    dy = torch.ones_like(y)

    def backward():
        torch.autograd.grad(y, [*given.values()], dy, retain_graph=True)

    for direction, most, of_one_kernel in ((forward, 9, 10), (training, 10, 12), (backward, 8, 20)):
        direction()
        on_gpu.order = []
        count = len(called(direction))
        zeros = sum(x[0] == "zero" for x in on_gpu.order)
        assert count - len(on_gpu.order) - zeros <= most  # a launch has one, and to write zeros takes two
        assert count <= of_one_kernel or (len(on_gpu.order) > 1 and direction != backward)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("op", RECURRENCES)
def test_a_first_call_without_rows(op, grad, on_gpu, monkeypatch):
    """Its kernels for strong decays still compile."""
    monkeypatch.setattr(kernel, "get_async", lambda request: Future())
    stored = kernel._stored

    def is_for_mild_decays(request, *more):
        return None if is_by_halves(request.template.name, request.parameters) else stored(request, *more)

    monkeypatch.setattr(kernel, "_stored", is_for_mild_decays)
    on_gpu.use("sm_90")
    given = make(op, (0, 64, 4, 64), torch.bfloat16, grad=grad)
    y, _ = run(op, given)
    assert y.shape == (0, 64, 4, 64)
    if grad:
        grads = torch.autograd.grad(y.sum(), list(given.values()))
        assert [x.shape for x in grads] == [x.shape for x in given.values()]


def test_kernels_that_may_not_be_needed_compile_last(on_gpu, monkeypatch):
    """Those of both directions for strong decays, of which a first call with mild ones waits for none."""
    asked = []
    monkeypatch.setattr(kernel, "_stored", lambda *_: None)
    monkeypatch.setattr(kernel, "get_async", lambda request: asked.append(request) or Future())
    monkeypatch.setattr(kernel, "_wait", lambda requests, served: 1 / 0)
    on_gpu.use("sm_90")
    given = make("wkv7", (1, 64, 4, 64), torch.bfloat16, grad=True)
    with pytest.raises(ZeroDivisionError):
        rwkv_jit.wkv7(*given.values())
    assert [(x.template.name, x.parameters.get("BY_HALVES", False)) for x in asked] == [
        ("wkv7_chunked_forward", False), ("wkv7_group_backward", False), ("wkv7_chunked_backward", True),
        ("wkv7_chunked_forward", True),
    ]  # fmt: skip
