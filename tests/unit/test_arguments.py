"""Wrong arguments: the error names the argument, what was expected and what came, before anything runs."""

import dataclasses
import re

import numpy as np
import pytest
import torch

import rwkv_jit

OPS = ("wkv6", "wkv7")
NAN, INF = float("nan"), float("inf")


def zeros(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


# Inputs are [2, 5, 3, 4] (v [2, 5, 3, 6], u [3, 4]) in float32; each case replaces some of them.
X = (2, 5, 3, 4)
WRONG_TENSORS = {
    "rank of r": (
        {"r": zeros(5, 3, 4)},
        ValueError,
        "r: expected 4 dimensions [B, T, H, head size], got shape (5, 3, 4)",
    ),
    "rank of v": (
        {"v": zeros(2, 5, 3, 6, 1)},
        ValueError,
        "v: expected 4 dimensions [B, T, H, head size], got shape (2, 5, 3, 6, 1)",
    ),
    "no tensor": ({"k": [1.0]}, TypeError, "k: expected a torch.Tensor or an array with __dlpack__, got list"),
    "nothing": ({"r": None}, TypeError, "r: expected a torch.Tensor or an array with __dlpack__, got NoneType"),
    "integers": (
        {"k": zeros(*X, dtype=torch.int64)},
        TypeError,
        "k: expected torch.float16 or torch.bfloat16 or torch.float32 or torch.float64, got torch.int64",
    ),
    "all integers": ({n: zeros(*X, dtype=torch.int32) for n in "rkvwabu"}, TypeError, "got torch.int32"),
    "two dtypes": (
        {"k": zeros(*X, dtype=torch.float16)},
        TypeError,
        "k: expected torch.float32 like r, got torch.float16",
    ),
    "dtype of v": (
        {"v": zeros(2, 5, 3, 6, dtype=torch.float64)},
        TypeError,
        "v: expected torch.float32 like r, got torch.float64",
    ),
    "dtype of w": (
        {"w": zeros(*X, dtype=torch.bfloat16)},
        TypeError,
        "w: expected torch.float32 like r, got torch.bfloat16",
    ),
    "device of k": ({"k": zeros(*X, device="meta")}, ValueError, "k: expected device cpu like r, got meta"),
    "device of v": ({"v": zeros(2, 5, 3, 6, device="meta")}, ValueError, "v: expected device cpu like r, got meta"),
    "batch": ({"k": zeros(1, 5, 3, 4)}, ValueError, "k: expected shape [2, 5, 3, 4] like r, got [1, 5, 3, 4]"),
    "tokens": ({"w": zeros(2, 6, 3, 4)}, ValueError, "w: expected shape [2, 5, 3, 4] like r, got [2, 6, 3, 4]"),
    "heads": ({"k": zeros(2, 5, 1, 4)}, ValueError, "k: expected shape [2, 5, 3, 4] like r, got [2, 5, 1, 4]"),
    "head size": ({"k": zeros(2, 5, 3, 6)}, ValueError, "k: expected shape [2, 5, 3, 4] like r, got [2, 5, 3, 6]"),
    "tokens of v": (
        {"v": zeros(2, 4, 3, 6)},
        ValueError,
        "v: expected shape [2, 5, 3, value size] like r, got [2, 4, 3, 6]",
    ),
    "head size 0": (
        {n: zeros(2, 5, 3, 0) for n in "rkwab"},
        ValueError,
        "r: expected a head size of at least 1, got shape [2, 5, 3, 0]",
    ),
    "value size 0": (
        {"v": zeros(2, 5, 3, 0)},
        ValueError,
        "v: expected a head size of at least 1, got shape [2, 5, 3, 0]",
    ),
}
WRONG_FIXED = {
    "batch in u": ({"u": zeros(2, 3, 4)}, ValueError, "u: expected shape [3, 4] [heads, head size], got [2, 3, 4]"),
    "heads of u": ({"u": zeros(1, 4)}, ValueError, "u: expected shape [3, 4] [heads, head size], got [1, 4]"),
    "size of u": ({"u": zeros(3, 6)}, ValueError, "u: expected shape [3, 4] [heads, head size], got [3, 6]"),
    "dtype of u": (
        {"u": zeros(3, 4, dtype=torch.float16)},
        TypeError,
        "u: expected torch.float32 like r, got torch.float16",
    ),
    "device of u": ({"u": zeros(3, 4, device="meta")}, ValueError, "u: expected device cpu like r, got meta"),
}
STATE_SHAPES = "initial_state: expected shape [2, 3, 6, 4] or [3, 6, 4], got "
WRONG_OPTIONS = {
    "sequences of the state": ({"initial_state": zeros(3, 3, 6, 4)}, ValueError, STATE_SHAPES + "[3, 3, 6, 4]"),
    "one sequence in the state": ({"initial_state": zeros(1, 3, 6, 4)}, ValueError, STATE_SHAPES + "[1, 3, 6, 4]"),
    "state in the other layout": ({"initial_state": zeros(2, 3, 4, 6)}, ValueError, STATE_SHAPES + "[2, 3, 4, 6]"),
    "layout kv": (
        {"initial_state": zeros(2, 3, 6, 4), "state_layout": "kv"},
        ValueError,
        "initial_state: expected shape [2, 3, 4, 6] or [3, 4, 6], got [2, 3, 6, 4]",
    ),
    "rank of the state": ({"initial_state": zeros(6, 4)}, ValueError, STATE_SHAPES + "[6, 4]"),
    "dtype of the state": (
        {"initial_state": zeros(2, 3, 6, 4, dtype=torch.int64)},
        TypeError,
        "initial_state: expected torch.float16 or torch.bfloat16 or torch.float32, got torch.int64",
    ),
    "device of the state": (
        {"initial_state": zeros(2, 3, 6, 4, device="meta")},
        ValueError,
        "initial_state: expected device cpu, got meta",
    ),
    "kind of the state": (
        {"initial_state": 0},
        TypeError,
        "initial_state: expected a torch.Tensor or an array with __dlpack__, got int",
    ),
    "decay": ({"decay": "exp"}, ValueError, "decay: expected one of raw, sigmoid, log, direct, got 'exp'"),
    "decay None": ({"decay": None}, ValueError, "decay: expected one of raw, sigmoid, log, direct, got None"),
    "layout": ({"state_layout": "VK"}, ValueError, "state_layout: expected one of vk, kv, got 'VK'"),
    "unknown backend": (
        {"backend": "cuda"},
        ValueError,
        "backend: expected one of auto, recurrent, chunked, split, reference, got 'cuda'",
    ),
    "kernels on the CPU": (
        {"backend": "recurrent"},
        rwkv_jit.UnsupportedConfigError,
        "backend: 'recurrent' runs on CUDA tensors, got cpu; use 'auto' or 'reference'",
    ),
    "chunks on the CPU": (
        {"backend": "chunked"},
        rwkv_jit.UnsupportedConfigError,
        "backend: 'chunked' runs on CUDA tensors, got cpu; use 'auto' or 'reference'",
    ),
    "scale nan": ({"scale": NAN}, ValueError, "scale: expected a finite number, got nan"),
    "scale inf": ({"scale": -INF}, ValueError, "scale: expected a finite number, got -inf"),
    "scale None": ({"scale": None}, ValueError, "scale: expected a finite number, got None"),
    "scale True": ({"scale": True}, ValueError, "scale: expected a finite number, got True"),
    "bound positive": (
        {"decay_bound": 0.5},
        ValueError,
        "decay_bound: expected a negative number, the least log-decay of a step, got 0.5",
    ),
    "bound zero": (
        {"decay_bound": 0},
        ValueError,
        "decay_bound: expected a negative number, the least log-decay of a step, got 0",
    ),
    "bound nan": (
        {"decay_bound": NAN},
        ValueError,
        "decay_bound: expected a negative number, the least log-decay of a step, got nan",
    ),
    "bound text": (
        {"decay_bound": "-5"},
        ValueError,
        "decay_bound: expected a negative number, the least log-decay of a step, got '-5'",
    ),
    "scale too large": (
        {"scale": 10**400},
        ValueError,
        "scale: expected a finite number, got an integer too large for a float",
    ),
    "scale array": ({"scale": np.ones(2)}, ValueError, "scale: expected a finite number, got array([1., 1.])"),
    "bound too large": (
        {"decay_bound": -(10**400)},
        ValueError,
        "decay_bound: expected a finite number, got an integer too large",
    ),
    "layout array": ({"state_layout": np.ones(2)}, ValueError, "state_layout: expected one of vk, kv, got array("),
    "decay array": ({"decay": np.array(["raw"] * 2)}, ValueError, "decay: expected one of raw, sigmoid, log, direct"),
    "backend array": ({"backend": np.ones(2)}, ValueError, "backend: expected one of auto, recurrent, chunked"),
    "flag array": (
        {"output_final_state": np.ones(2)},
        TypeError,
        "output_final_state: expected True or False, got ndarray",
    ),
    "interval array": ({"checkpoint_interval": np.ones(2)}, TypeError, "checkpoint_interval: expected an int, got"),
    "interval 0": ({"checkpoint_interval": 0}, ValueError, "checkpoint_interval: expected at least 1, got 0"),
    "interval float": ({"checkpoint_interval": 64.0}, TypeError, "checkpoint_interval: expected an int, got 64.0"),
    "interval None": ({"checkpoint_interval": None}, TypeError, "checkpoint_interval: expected an int, got None"),
    "chunk 0": ({"chunk_len": 0}, ValueError, "chunk_len: expected at least 1, got 0"),
    "chunk True": ({"chunk_len": True}, TypeError, "chunk_len: expected an int, got True"),
    "threads text": ({"num_threads": "x"}, TypeError, "num_threads: expected an int, got 'x'"),
    "threads negative": ({"num_threads": -32}, ValueError, "num_threads: expected at least 1, got -32"),
}
RISING = "cu_seqlens: expected values rising from 0 to 5 (the tokens), got "
WRONG_PACKING = {
    "two dimensions": (torch.tensor([[0, 5]]), ValueError, "cu_seqlens: expected shape [sequences + 1], got [1, 2]"),
    "a number": (torch.tensor(5), ValueError, "cu_seqlens: expected shape [sequences + 1], got []"),
    "one value": (torch.tensor([0]), ValueError, "cu_seqlens: expected shape [sequences + 1], got [1]"),
    "no value": (
        torch.tensor([], dtype=torch.int64),
        ValueError,
        "cu_seqlens: expected shape [sequences + 1], got [0]",
    ),
    "floats": (
        torch.tensor([0.0, 5.0]),
        TypeError,
        "cu_seqlens: expected torch.int32 or torch.int64, got torch.float32",
    ),
    "bytes": (
        torch.tensor([0, 5], dtype=torch.uint8),
        TypeError,
        "cu_seqlens: expected torch.int32 or torch.int64, got torch.uint8",
    ),
    "a list": ([0, 5], TypeError, "cu_seqlens: expected a torch.Tensor or an array with __dlpack__, got list"),
    "another device": (
        torch.zeros(2, dtype=torch.int64, device="meta"),
        ValueError,
        "cu_seqlens: expected device cpu, got meta",
    ),
    "not from 0": (torch.tensor([1, 5]), ValueError, RISING + "[1, 5]"),
    "below 0": (torch.tensor([-1, 5]), ValueError, RISING + "[-1, 5]"),
    "not to the end": (torch.tensor([0, 2, 4]), ValueError, RISING + "[0, 2, 4]"),
    "past the end": (torch.tensor([0, 6], dtype=torch.int32), ValueError, RISING + "[0, 6]"),
    "falling": (torch.tensor([0, 4, 3, 5]), ValueError, RISING + "[0, 4, 3, 5]"),
}


OF_OTHERS = {
    "dtype of q": (
        "gla", {"k": zeros(*X, dtype=torch.float16)}, TypeError, "k: expected torch.float32 like q, got torch.float16",
    ),
    "rank of q": ("gla", {"q": zeros(5, 3, 4)}, ValueError, "q: expected 4 dimensions [B, T, H, head size], got shape"),
    "number for q": ("gla", {"q": zeros()}, ValueError, "q: expected 4 dimensions [B, T, H, head size], got shape ()"),
    "no q": ("linear_attention", {"q": None}, TypeError, "q: expected a torch.Tensor or an array with __dlpack__, got"),
    "head size 0": (
        "linear_attention", {n: zeros(2, 5, 3, 0) for n in "qk"}, ValueError,
        "q: expected a head size of at least 1, got shape [2, 5, 3, 0]",
    ),
    "dtype of g": (
        "gla", {"g": zeros(*X, dtype=torch.bfloat16)}, TypeError,
        "g: expected torch.float32 like q, got torch.bfloat16",
    ),
    "tokens of g": (
        "gla", {"g": zeros(2, 6, 3, 4)}, ValueError, "g: expected shape [2, 5, 3, 4] like q, got [2, 6, 3, 4]",
    ),
    "tokens in w": (
        "wkv5", {"w": zeros(*X)}, ValueError, "w: expected shape [3, 4] [heads, head size], got [2, 5, 3, 4]",
    ),
    "dtype of w": (
        "wkv5", {"w": zeros(3, 4, dtype=torch.float16)}, TypeError,
        "w: expected torch.float32 like r, got torch.float16",
    ),
    "none for gla": (
        "gla", {"decay": "none"}, ValueError, "decay: expected one of raw, sigmoid, log, direct, got 'none'",
    ),
    "state in the layout of RWKV": (
        "gla", {"initial_state": zeros(2, 3, 6, 4)}, ValueError,
        "initial_state: expected shape [2, 3, 4, 6] or [3, 4, 6], got [2, 3, 6, 4]",
    ),
    "scale": ("gla", {"scale": NAN}, ValueError, "scale: expected a finite number, got nan"),
    "chunks": (
        "linear_attention", {"backend": "chunked"}, rwkv_jit.UnsupportedConfigError,
        "backend: 'chunked' runs on CUDA tensors, got cpu; use 'auto' or 'reference'",
    ),
}  # fmt: skip
NORMALIZED = {
    "one tensor": (zeros(2, 3, 4, 6), TypeError, "expected a pair (S, z) with normalize=True, got Tensor"),
    "three": ((1, 2, 3), TypeError, "expected a pair (S, z) with normalize=True, got tuple"),
    "shape of S": (
        (zeros(2, 3, 6, 4), zeros(2, 3, 4)), ValueError,
        "initial_state: expected shape [2, 3, 4, 6] or [3, 4, 6], got [2, 3, 6, 4]",
    ),
    "shape of z": (
        (zeros(2, 3, 4, 6), zeros(2, 3, 6)), ValueError, "initial_state[1]: expected shape [2, 3, 4]",
    ),
    "z of every sequence": (
        (zeros(3, 4, 6), zeros(2, 3, 4)), ValueError, "initial_state[1]: expected shape [3, 4]",
    ),
    "dtype of z": (
        (zeros(2, 3, 4, 6), zeros(2, 3, 4, dtype=torch.float16)), TypeError,
        "initial_state[1]: expected torch.float32 like the state, got torch.float16",
    ),
    "device of z": (
        (zeros(2, 3, 4, 6), zeros(2, 3, 4, device="meta")), ValueError,
        "initial_state[1]: expected device cpu, got meta",
    ),
    "z alone": ((None, zeros(2, 3, 4)), ValueError, "initial_state: expected both S and z, or None for both, got z"),
    "S alone": ((zeros(2, 3, 4, 6), None), ValueError, "initial_state: expected both S and z, or None for both, got S"),
    "kind of z": ((zeros(2, 3, 4, 6), 0), TypeError, "initial_state[1]: expected a torch.Tensor or an array with"),
}  # fmt: skip


def arguments(op, batch=2):
    if op in ("gla", "linear_attention"):
        given = {name: zeros(batch, 5, 3, 4) for name in "qkvg"} | {"v": zeros(batch, 5, 3, 6)}
        return {name: given[name] for name in ("qkvg" if op == "gla" else "qkv")}
    given = {name: zeros(batch, 5, 3, 4) for name in "rkwab"}
    given |= {"v": zeros(batch, 5, 3, 6), "u": zeros(3, 4)}
    if op == "wkv5":
        given["w"] = zeros(3, 4)
    return {name: given[name] for name in ("rwkvab" if op == "wkv7" else "rkvwu")}


def call(op, changes, batch=2):
    """Call with some arguments changed; names that the op does not have are left out where they are tensors."""
    given = arguments(op, batch)
    options = {name: value for name, value in changes.items() if len(name) > 1}
    return getattr(rwkv_jit, op)(**{name: changes.get(name, x) for name, x in given.items()}, **options)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fails where an op gets as far as computing."""

    def ran(*_, **__):
        raise AssertionError("the op ran")

    from rwkv_jit.ops import gla, linear_attention, wkv5, wkv6, wkv7

    for module in (gla, linear_attention, wkv5, wkv6, wkv7):
        monkeypatch.setattr(module, "OP", dataclasses.replace(module.OP, forward=ran, known=ran))


def test_the_unchanged_arguments_are_right(make_state):
    for op in OPS:
        y, final = call(op, {"output_final_state": True})
        assert y.shape == (2, 5, 3, 6)
        assert final.shape == (2, 3, 6, 4)


@pytest.mark.parametrize("case", WRONG_TENSORS)
@pytest.mark.parametrize("op", OPS)
def test_wrong_tensor(op, case, nothing_runs):
    changes, error, message = WRONG_TENSORS[case]
    with pytest.raises(error, match=re.escape(message)):
        call(op, changes)


@pytest.mark.parametrize("case", WRONG_FIXED)
def test_wrong_bonus(case, nothing_runs):
    changes, error, message = WRONG_FIXED[case]
    with pytest.raises(error, match=re.escape(message)):
        call("wkv6", changes)


@pytest.mark.parametrize("case", OF_OTHERS)
def test_errors_have_the_names_and_conventions_of_the_op(case, nothing_runs):
    op, changes, error, message = OF_OTHERS[case]
    with pytest.raises(error, match=re.escape(message)):
        call(op, changes)


@pytest.mark.parametrize("op", ["wkv5", "gla", "linear_attention"])
def test_arguments_of_the_other_ops_are_right(op):
    y, final = call(op, {"output_final_state": True})
    assert y.shape == (2, 5, 3, 6)
    assert final.shape == ((2, 3, 6, 4) if op == "wkv5" else (2, 3, 4, 6))


@pytest.mark.parametrize("case", NORMALIZED)
def test_wrong_state_of_a_normalized_call(case, nothing_runs):
    state, error, message = NORMALIZED[case]
    with pytest.raises(error, match=re.escape(message)):
        call("linear_attention", {"initial_state": state, "normalize": True})


def test_wrong_values_of_a_normalized_call_are_named_as_they_came(nothing_runs):
    with pytest.raises(ValueError, match=re.escape("v: expected shape [2, 5, 3, value size] like q, got [2, 4, 3, 6]")):
        call("linear_attention", {"v": zeros(2, 4, 3, 6), "normalize": True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'decay'"):
        call("linear_attention", {"decay": "log"})


@pytest.mark.parametrize("case", WRONG_OPTIONS)
@pytest.mark.parametrize("op", OPS)
def test_wrong_option(op, case, nothing_runs):
    changes, error, message = WRONG_OPTIONS[case]
    with pytest.raises(error, match=re.escape(message)):
        call(op, changes)


@pytest.mark.parametrize("case", WRONG_PACKING)
@pytest.mark.parametrize("op", OPS)
def test_wrong_packing(op, case):
    cu_seqlens, error, message = WRONG_PACKING[case]
    with pytest.raises(error, match=re.escape(message)):
        call(op, {"cu_seqlens": cu_seqlens}, batch=1)


@pytest.mark.parametrize("op", OPS)
def test_packing_wants_a_batch_of_one(op, nothing_runs):
    message = "cu_seqlens: expected a batch of 1 with packed sequences, got a batch of 2"
    with pytest.raises(ValueError, match=message):
        call(op, {"cu_seqlens": torch.tensor([0, 5])})


@pytest.mark.parametrize("op", OPS)
def test_packing_decides_how_many_states_there_are(op, nothing_runs):
    with pytest.raises(ValueError, match=re.escape("initial_state: expected shape [3, 3, 6, 4]")):
        call(op, {"cu_seqlens": torch.tensor([0, 1, 2, 5]), "initial_state": zeros(1, 3, 6, 4)}, batch=1)


@pytest.mark.parametrize("op", OPS)
def test_unknown_or_missing_argument(op):
    with pytest.raises(TypeError, match="unexpected keyword argument 'reverse'"):
        call(op, {"reverse": True})
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        getattr(rwkv_jit, op)(*list(arguments(op).values())[:-1])


# ---- specialize --------------------------------------------------------------------------------------------------

WRONG_SPECIALIZATIONS = {
    "unknown op": (
        {"op": "wkv9"},
        ValueError,
        "op: expected one of wkv4, wkv5, wkv6, wkv7, gla, linear_attention, timex, got 'wkv9'",
    ),
    "no head size": ({"head_size": None}, TypeError, "head_size: wkv7 needs one, got None"),
    "head size 0": ({"head_size": 0}, ValueError, "head_size: expected an int of at least 1, got 0"),
    "head size True": ({"head_size": True}, ValueError, "head_size: expected an int of at least 1, got True"),
    "head size float": ({"head_size": 64.0}, ValueError, "head_size: expected an int of at least 1, got 64.0"),
    "value size 0": ({"value_size": 0}, ValueError, "value_size: expected an int of at least 1, got 0"),
    "dtype": (
        {"dtype": torch.float64},
        TypeError,
        "dtype: expected torch.float16 or torch.bfloat16 or torch.float32, got torch.float64",
    ),
    "dtype text": (
        {"dtype": "bf16"},
        TypeError,
        "dtype: expected torch.float16 or torch.bfloat16 or torch.float32, got bf16",
    ),
    "arch without sm": ({"arch": "90"}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN, got '90'"),
    "arch with a dot": ({"arch": "sm_9.0"}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN, got 'sm_9.0'"),
    "arch with more": ({"arch": "sm_90 -G"}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN, got 'sm_90 -G'"),
    "arch path": ({"arch": "../sm_90"}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN, got '../sm_90'"),
    **{
        f"arch {ascii(arch)}": ({"arch": arch}, ValueError, f"arch: expected sm_NN, sm_NNa or compute_NN, got {arch!r}")
        for arch in ("sm_9٠", "sm_00090", "sm_9", "sm_9999", "sm_90A", "sm_90\n", "SM_90", "sm_90af", "")
    },
    **{
        f"arch {arch}": ({"arch": arch}, ValueError, f"arch: expected sm_{first} or newer before '{arch[-1]}', got")
        for arch, first in {"sm_75a": 90, "compute_89a": 90, "sm_90f": 100, "compute_90f": 100}.items()
    },
    "arch long": ({"arch": "x" * 10**5}, ValueError, "got 'xxx" + 196 * "x" + "... (100002 characters)"),
    "arch None": ({"arch": None}, ValueError, "arch: there is no GPU to take it from; pass one, e.g. arch='sm_90'"),
    "direction": ({"direction": "both"}, ValueError, "direction: expected one of forward, backward, got 'both'"),
    "backend": (
        {"backend": "tensor"},
        ValueError,
        "backend: expected one of auto, recurrent, chunked, split, reference, got 'tensor'",
    ),
    "reference": (
        {"backend": "reference"},
        rwkv_jit.UnsupportedConfigError,
        "backend: the reference is plain torch and has no kernel",
    ),
    "chunk of wkv6": (
        {"op": "wkv6", "backend": "chunked", "chunk_len": 8},
        rwkv_jit.UnsupportedConfigError,
        "backend: 'chunked' takes chunk_len 16, 32 or 64, got 8; use 'auto' or 'recurrent'",
    ),
    "keys of wkv6": (
        {"op": "wkv6", "head_size": 1025, "value_size": 96, "backend": "split"},
        rwkv_jit.UnsupportedConfigError,
        "backend: 'split' takes head sizes up to 1024, got 1025 and 96 for v; use 'auto' or 'recurrent'",
    ),
    "threads of gla": (
        {"op": "gla", "head_size": 128, "num_threads": 96},
        rwkv_jit.UnsupportedConfigError,
        "num_threads must be a multiple of 32 from 128 to 512 at head sizes 128 and 128, got 96",
    ),
    "chunks in float32": (
        {"dtype": torch.float32, "backend": "chunked"},
        rwkv_jit.UnsupportedConfigError,
        "backend: 'chunked' takes float16 and bfloat16, got torch.float32; use 'auto' or 'recurrent'",
    ),
    "decay": ({"decay": "exp"}, ValueError, "decay: expected one of raw, sigmoid, log, direct, got 'exp'"),
    "layout": ({"state_layout": "kk"}, ValueError, "state_layout: expected one of vk, kv, got 'kk'"),
    "chunk 0": ({"chunk_len": 0}, ValueError, "chunk_len: expected at least 1, got 0"),
    "threads text": ({"num_threads": "x"}, TypeError, "num_threads: expected an int, got 'x'"),
    "storage type": (
        {"t_state": "fp64"},
        ValueError,
        "parameter T_STATE: expected one of fp16, bf16, fp32, got 'fp64'",
    ),
    "lanes float": (
        {"lanes_per_row": 2.5},
        TypeError,
        "parameter LANES_PER_ROW: expected an int, a bool or an identifier, got 2.5",
    ),
    "lanes as a tuple": (
        {"lanes_per_row": (2,)},
        TypeError,
        "parameter LANES_PER_ROW: expected an int, a float, a bool or an identifier, got (2,)",
    ),
    "unknown parameter": ({"warp_len": 4}, ValueError, "template wkv7_chunked_forward has no parameter WARP_LEN"),
    "lanes of chunks": (
        {"backend": "chunked", "lanes_per_row": 4},
        ValueError,
        "template wkv7_chunked_forward has no parameter LANES_PER_ROW",
    ),
    "blocks of the recurrent kernels": (
        {"dtype": torch.float32, "blocks_per_sm": 4},
        ValueError,
        "template wkv7_recurrent_forward has no parameter BLOCKS_PER_SM",
    ),
    "bonus of wkv6": ({"t_u": "fp32"}, ValueError, "template wkv7_chunked_forward has no parameter T_U"),
}


@pytest.mark.parametrize("case", WRONG_SPECIALIZATIONS)
def test_wrong_specialization(case, monkeypatch):
    from rwkv_jit import compiler, identity

    def compiled(*_):
        raise AssertionError("it compiled")

    monkeypatch.setattr(compiler, "compile", compiled)
    monkeypatch.setattr(identity, "identity", lambda: "12.9 0123abcd")  # the cache is asked before a template is
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    changes, error, message = WRONG_SPECIALIZATIONS[case]
    with pytest.raises(error, match=re.escape(message)):
        rwkv_jit.specialize(**{"op": "wkv7", "head_size": 64, "arch": "sm_90", **changes})


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in WRONG_SPECIALIZATIONS
        if WRONG_SPECIALIZATIONS[case][0].keys()
        <= {"op", "head_size", "value_size", "dtype", "arch", "direction", "decay"}
    ],
)
def test_wrong_background_specialization_is_refused_at_once(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    changes, error, message = WRONG_SPECIALIZATIONS[case]
    with pytest.raises(error, match=re.escape(message)):
        rwkv_jit.compile_async(**{"op": "wkv7", "head_size": 64, "arch": "sm_90", **changes})


WRONG_WARMINGS = {
    "unknown op": (
        {"op": "wkv9"},
        ValueError,
        "op: expected one of wkv4, wkv5, wkv6, wkv7, gla, linear_attention, timex, got 'wkv9'",
    ),
    "one of the head sizes": ({"head_sizes": [4, 0]}, ValueError, "head_size: expected an int of at least 1, got 0"),
    "one of the dtypes": (
        {"dtypes": [torch.float32, torch.float64]},
        TypeError,
        "dtype: expected torch.float16 or torch.bfloat16 or torch.float32, got torch.float64",
    ),
    "one of the architectures": ({"arch": ["sm_90", "90"]}, ValueError, "arch: expected sm_NN, sm_NNa or compute_NN"),
    "no architecture": ({"arch": None}, ValueError, "arch: there is no GPU to take it from; pass one"),
    "bound": ({"decay_bound": 1.0}, ValueError, "decay_bound: expected a negative number"),
    "dtype of w": ({"w_dtype": torch.int8}, TypeError, "w_dtype: expected torch.float16 or torch.bfloat16 or"),
    "dtype of the state": ({"state_dtype": torch.float64}, TypeError, "state_dtype: expected torch.float16 or"),
    "decay": ({"decay": "exp"}, ValueError, "decay: expected one of raw, sigmoid, log, direct, got 'exp'"),
    "layout": ({"state_layout": "kk"}, ValueError, "state_layout: expected one of vk, kv, got 'kk'"),
}


@pytest.mark.parametrize("case", WRONG_WARMINGS)
def test_wrong_warming_is_refused_before_anything_is_compiled(case, monkeypatch):
    from rwkv_jit import kernel

    monkeypatch.setattr(kernel, "get_async", lambda _: pytest.fail("it compiled"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    changes, error, message = WRONG_WARMINGS[case]
    with pytest.raises(error, match=re.escape(message)):
        rwkv_jit.warm(**{"op": "wkv7", "head_sizes": 4, "arch": "sm_90", **changes})


def test_architecture_of_the_environment_is_checked_too(monkeypatch):
    monkeypatch.setenv("RWKVJIT_ARCH", "hopper")
    with pytest.raises(ValueError, match="arch: expected sm_NN, sm_NNa or compute_NN, got 'hopper'"):
        rwkv_jit.specialize("wkv7", 64)
