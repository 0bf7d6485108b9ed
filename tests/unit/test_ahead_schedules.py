"""What is compiled ahead of calls: every kernel of every call is among what `warm` lists for calls like it."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit
from rwkv_jit import ahead, kernel, signatures, tensors, tuned
from rwkv_jit.algorithms import whole
from rwkv_jit.gpu import Gpu
from rwkv_jit.ops import checks, torch_op, wide_keys
from rwkv_jit.ops.table import OPS

DTYPES = {name: dtype for dtype, name in tensors.STORAGE.items()}
WITH_HEADS = [name for name, op in OPS.items() if op.has_heads]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Sizes around those where another algorithm begins, or a last part of the keys is of another one.
SIZES = (1, 8, 30, 32, 40, 64, 72, 96, 104, 128, 136, 200, 256, 257, 264, 300)
MULTIPROCESSORS = (1, 8, 132, 2**20)


def keys(requests):
    """What tells kernels apart, with their names."""
    return {(request.template.name, kernel.memory_key(request)[1], request.arch) for request in requests}


def warmed(op, **options):
    """The kernels that are compiled ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "compile_all", lambda requests, progress: requests)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return keys(rwkv_jit.warm(op, **options))


class Recorder:
    """A known call that launches nothing; `asked` are the kernels of all of them, of each backward too."""

    asked = []

    def __init__(self, problem, arrays, asked):
        self.problem = problem
        Recorder.asked += whole.forward(problem).requests(problem.gpu)
        if problem.training:
            for has_final_state in {False, problem.has_final_state}:
                own = problem._replace(has_final_state=has_final_state)
                Recorder.asked += whole.backward(own).requests(own.gpu)

    def run(self, arrays, state, cu_seqlens):
        made = [
            torch.empty(result.shape, dtype=DTYPES[result.dtype])
            for result in whole.forward(self.problem).results.values()
        ]
        return [*made, torch.empty(0)] if self.problem.training else made


def called(arch, multiprocessors, choices, is_eager, call):
    """The kernels that a call asks for on such a GPU: its tensors are taken for those of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "asked", [])
        patch.setattr(tensors, "gpu", lambda device: Gpu(arch, (), multiprocessors))
        patch.setattr(tensors, "multiprocessors", lambda device: multiprocessors)
        patch.setattr(tuned, "on_device", lambda device: choices)
        patch.setattr(tuned, "is_sound", lambda device, place: True)
        for module in (checks, torch_op):
            patch.setattr(module, "is_for_kernels", lambda backend, x: backend != "reference")
        patch.setattr(wide_keys, "_may_be_in_parts", lambda *_: True)
        patch.setattr(torch_op, "Known", Recorder)
        if not is_eager:
            patch.setattr(tensors, "is_eager", lambda: False)
        signatures.forget()  # no call has come before
        call()
        signatures.forget()
        return keys(Recorder.asked)


def make(shape, dtype, requires_grad=False):
    """A tensor without memory."""
    return torch.empty((), dtype=dtype).expand(shape).detach().requires_grad_(requires_grad)


# ---- ops with heads ----------------------------------------------------------------------------------------------

CALLS = st.fixed_dictionaries({
    "op": st.sampled_from(WITH_HEADS),
    "arch": st.sampled_from(ARCHS),
    "dtype": st.sampled_from(["bf16", "bf16", "fp16", "fp32"]),
    "K": st.sampled_from(SIZES) | st.integers(1, 300),
    "V": st.sampled_from(SIZES) | st.integers(1, 300),
    "B": st.integers(1, 2),
    "H": st.integers(1, 3),
    "T": st.sampled_from([0, 1, 31, 32, 100, 1024, 2048]),
    "multiprocessors": st.sampled_from(MULTIPROCESSORS),
    "training": st.booleans(),
    "is_eager": st.booleans(),
    "is_packed": st.booleans(),
    "has_wide_decay": st.booleans(),
    "state": st.sampled_from([None, "fp32", "bf16", "fp16"]),
    "has_final_state": st.booleans(),
    "layout": st.sampled_from(["vk", "kv"]),
    "decay": st.sampled_from(["raw", "sigmoid", "log", "direct"]),
    "decay_bound": st.sampled_from([None, -1.0, -3.0, -100.0]),
    "is_tuned": st.booleans(),
})  # fmt: skip


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=pytest.mark.full)])
def test_calls_ask_for_no_kernel_that_warm_does_not_list(examples):
    settings(max_examples=examples, deadline=None)(given(call=CALLS)(check))()


def check(call):
    op, dtype = OPS[call["op"]], DTYPES[call["dtype"]]
    sizes = {dim: call[dim] for dim in "BTHKV"} | ({"B": 1} if call["is_packed"] else {})
    wide = torch.float32 if call["has_wide_decay"] else dtype
    arrays = [
        make([sizes[dim] for dim in dims], wide if name in op.wide else dtype, call["training"])
        for name, dims in op.inputs.items()
    ]
    sequences = 2 if call["is_packed"] else sizes["B"]
    ends = torch.tensor([0, sizes["T"] // 3, sizes["T"]]) if call["is_packed"] else None
    state = None
    if call["state"] is not None:
        shape = [sequences, sizes["H"], *(sizes[dim] for dim in call["layout"].upper())]
        state = make(shape, DTYPES[call["state"]])
    decays = {} if op.decay == "none" else {name: call[name] for name in ("decay", "decay_bound")}
    several = tuned.on_arch(call["arch"])
    asked = called(
        call["arch"], call["multiprocessors"], several[0] if several and call["is_tuned"] else (), call["is_eager"],
        lambda: getattr(rwkv_jit, op.name)(
            *arrays, state, call["has_final_state"], ends, state_layout=call["layout"], **decays
        ),
    )  # fmt: skip
    assert asked
    assert asked <= warmed(
        op.name, head_sizes=sizes["K"], value_sizes=sizes["V"], dtypes=dtype, arch=call["arch"], w_dtype=wide,
        state_dtype=DTYPES[call["state"] or "fp32"], state_layout=call["layout"], backward=call["training"], **decays,
    )  # fmt: skip


# ---- wkv4 and timex ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_calls_of_wkv4_ask_for_no_kernel_that_warm_does_not_list(dtype, wide):
    several = itertools.product(
        ((1, 1, 1), (2, 0, 3), (2, 100, 3), (1, 4096, 8)), MULTIPROCESSORS, ("raw", "log"), (False, True),
        (False, True), (False, True),
    )  # fmt: skip
    for (batch, tokens, channels), multiprocessors, decay, training, has_state, is_eager in several:
        w, u = (make((channels,), DTYPES[wide], training) for _ in range(2))
        k, v = (make((batch, tokens, channels), DTYPES[dtype], training) for _ in range(2))
        state = torch.zeros(batch, 3, channels) if has_state else None
        with torch.no_grad() if not training else contextlib.nullcontext():
            asked = called(
                "sm_90", multiprocessors, (), is_eager,
                lambda given=(w, u, k, v, state, True, decay): rwkv_jit.wkv4(*given),
            )  # fmt: skip
        assert asked
        assert asked <= warmed(
            "wkv4", dtypes=DTYPES[dtype], w_dtype=DTYPES[wide], decay=decay, arch="sm_90", backward=training
        )
