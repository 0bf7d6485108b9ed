"""Wrong arguments: the error names the argument, what was expected and what came, before anything runs."""

import dataclasses
import inspect
import pickle
import re
import warnings

import numpy as np
import pytest
import torch

import rwkv_jit
from rwkv_jit import UnsupportedConfigError
from rwkv_jit.call import checks, tensors
from rwkv_jit.compat.fla.functions import chunk_gla
from rwkv_jit.kernels import compiler, identity, kernel
from rwkv_jit.ops import gla, linear_attention, wkv5, wkv6, wkv7
from rwkv_jit.schedules import build_command, table

NAN, INF = float("nan"), float("inf")
ARRAY = "a torch.Tensor or an array with __dlpack__"
FLOATS = "torch.float16 or torch.bfloat16 or torch.float32"
RANK = "4 dimensions [B, T, H, head size]"
X, X_OF_V = (2, 5, 3, 4), (2, 5, 3, 6)


def zeros(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


# Inputs are X in float32, but for v and those without tokens, [3, 4]; each case replaces some of them.
WRONG_TENSORS = {
    "rank of r": ({"r": zeros(5, 3, 4)}, ValueError, f"r: expected {RANK}, got shape (5, 3, 4)"),
    "rank of v": ({"v": zeros(*X_OF_V, 1)}, ValueError, f"v: expected {RANK}, got shape (2, 5, 3, 6, 1)"),
    "no tensor": ({"k": [1.0]}, TypeError, f"k: expected {ARRAY}, got list"),
    "nothing": ({"r": None}, TypeError, f"r: expected {ARRAY}, got NoneType"),
    "integers": (
        {"k": zeros(*X, dtype=torch.int64)}, TypeError, f"k: expected {FLOATS} or torch.float64, got torch.int64",
    ),
    "all integers": ({n: zeros(*X, dtype=torch.int32) for n in "rkvwabu"}, TypeError, "got torch.int32"),
    "two dtypes": (
        {"k": zeros(*X, dtype=torch.float16)}, TypeError, "k: expected torch.float32 like r, got torch.float16",
    ),
    "dtype of w": (
        {"w": zeros(*X, dtype=torch.bfloat16)}, TypeError,
        "w: expected torch.float32 like r, got torch.bfloat16",
    ),
    "device of k": ({"k": zeros(*X, device="meta")}, ValueError, "k: expected device cpu like r, got meta"),
    "batch": ({"k": zeros(1, 5, 3, 4)}, ValueError, "k: expected shape [2, 5, 3, 4] like r, got [1, 5, 3, 4]"),
    "tokens": ({"w": zeros(2, 6, 3, 4)}, ValueError, "w: expected shape [2, 5, 3, 4] like r, got [2, 6, 3, 4]"),
    "heads": ({"k": zeros(2, 5, 1, 4)}, ValueError, "k: expected shape [2, 5, 3, 4] like r, got [2, 5, 1, 4]"),
    "head size": ({"k": zeros(2, 5, 3, 6)}, ValueError, "k: expected shape [2, 5, 3, 4] like r, got [2, 5, 3, 6]"),
    "tokens of v": (
        {"v": zeros(2, 4, 3, 6)}, ValueError, "v: expected shape [2, 5, 3, value size] like r, got [2, 4, 3, 6]",
    ),
    "head size 0": (
        {n: zeros(2, 5, 3, 0) for n in "rkwab"}, ValueError,
        "r: expected a head size of at least 1, got shape [2, 5, 3, 0]",
    ),
    "value size 0": (
        {"v": zeros(2, 5, 3, 0)}, ValueError, "v: expected a head size of at least 1, got shape [2, 5, 3, 0]",
    ),
}  # fmt: skip
STATE_SHAPES = "initial_state: expected shape [2, 3, 6, 4] or [3, 6, 4], got "
WRONG_STATES = {
    "sequences": (zeros(3, 3, 6, 4), ValueError, STATE_SHAPES + "[3, 3, 6, 4]"),
    "one sequence": (zeros(1, 3, 6, 4), ValueError, STATE_SHAPES + "[1, 3, 6, 4]"),
    "layout": (zeros(2, 3, 4, 6), ValueError, STATE_SHAPES + "[2, 3, 4, 6]"),
    "rank": (zeros(6, 4), ValueError, STATE_SHAPES + "[6, 4]"),
    "dtype": (
        zeros(2, 3, 6, 4, dtype=torch.int64), TypeError, f"initial_state: expected {FLOATS}, got torch.int64",
    ),
    "device": (zeros(2, 3, 6, 4, device="meta"), ValueError, "initial_state: expected device cpu, got meta"),
    "kind": (0, TypeError, f"initial_state: expected {ARRAY}, got int"),
}  # fmt: skip
RISING = "cu_seqlens: expected values rising from 0 to 5 (the tokens), got "
PACKING_SHAPE = "cu_seqlens: expected shape [sequences + 1], got "
PACKING_TYPES = "cu_seqlens: expected torch.int32 or torch.int64, got "
WRONG_PACKING = {
    "two dimensions": (torch.tensor([[0, 5]]), ValueError, PACKING_SHAPE + "[1, 2]"),
    "a number": (torch.tensor(5), ValueError, PACKING_SHAPE + "[]"),
    "one value": (torch.tensor([0]), ValueError, PACKING_SHAPE + "[1]"),
    "floats": (torch.tensor([0.0, 5.0]), TypeError, PACKING_TYPES + "torch.float32"),
    "bytes": (torch.tensor([0, 5], dtype=torch.uint8), TypeError, PACKING_TYPES + "torch.uint8"),
    "a list": ([0, 5], TypeError, f"cu_seqlens: expected {ARRAY}, got list"),
    "device": (zeros(2, dtype=torch.int64, device="meta"), ValueError, "cu_seqlens: expected device cpu, got meta"),
    "not from 0": (torch.tensor([1, 5]), ValueError, RISING + "[1, 5]"),
    "below 0": (torch.tensor([-1, 5]), ValueError, RISING + "[-1, 5]"),
    "not to the end": (torch.tensor([0, 2, 4]), ValueError, RISING + "[0, 2, 4]"),
    "past the end": (torch.tensor([0, 6], dtype=torch.int32), ValueError, RISING + "[0, 6]"),
    "falling": (torch.tensor([0, 4, 3, 5]), ValueError, RISING + "[0, 4, 3, 5]"),
}
DECAYS, LAYOUTS = "one of raw, sigmoid, log, direct", "one of vk, kv"
BACKENDS = "one of auto, recurrent, chunked, split, reference"
# The option, the error, what is expected, and values that are something else.
WRONG_VALUES = [
    ("decay", ValueError, DECAYS, ["exp", None, np.array(["raw"] * 2)]),
    ("state_layout", ValueError, LAYOUTS, ["VK", np.ones(2)]),
    ("backend", ValueError, BACKENDS, ["cuda", np.ones(2)]),
    ("scale", ValueError, "a finite number", [NAN, -INF, None, True, np.ones(2)]),
    ("decay_bound", ValueError, "a negative number, the least log-decay of a step", [0.5, 0, NAN, "-5"]),
    ("checkpoint_interval", ValueError, "at least 1", [0]),
    ("checkpoint_interval", TypeError, "an int", [64.0, None, np.ones(2)]),
    ("chunk_len", ValueError, "at least 1", [0]),
    ("chunk_len", TypeError, "an int", [True]),
    ("num_threads", ValueError, "at least 1", [-32]),
    ("num_threads", TypeError, "an int", ["x"]),
]
WRONG_OPTIONS = {
    **{
        f"{name} {value!r}": ({name: value}, error, f"{name}: expected {expected}, got {value!r}")
        for name, error, expected, values in WRONG_VALUES
        for value in values
    },
    "scale too large": ({"scale": 10**400}, ValueError, "scale: expected a finite number, got an integer too large"),
    "bound too large": (
        {"decay_bound": -(10**400)}, ValueError, "decay_bound: expected a finite number, got an integer too large",
    ),
    "flag": ({"output_final_state": np.ones(2)}, TypeError, "output_final_state: expected True or False, got ndarray"),
    "unknown": ({"reverse": True}, TypeError, "unexpected keyword argument 'reverse'"),
    "packing of two rows": (
        {"cu_seqlens": torch.tensor([0, 5])}, ValueError,
        "cu_seqlens: expected a batch of 1 with packed sequences, got a batch of 2",
    ),
    **{
        f"{backend} on the CPU": (
            {"backend": backend}, UnsupportedConfigError,
            f"backend: '{backend}' runs on CUDA tensors, got cpu; use 'auto' or 'reference'",
        )
        for backend in ("recurrent", "chunked")
    },
    **{
        f"{case} of the state": ({"initial_state": state}, error, message)
        for case, (state, error, message) in WRONG_STATES.items()
    },
    "layout kv": (
        {"initial_state": zeros(2, 3, 6, 4), "state_layout": "kv"}, ValueError,
        "initial_state: expected shape [2, 3, 4, 6] or [3, 4, 6], got [2, 3, 6, 4]",
    ),
}  # fmt: skip
FIXED = "u: expected shape [3, 4] [heads, head size], got "
OF_ONE_OP = {
    "batch in u": ("wkv6", {"u": zeros(2, 3, 4)}, ValueError, FIXED + "[2, 3, 4]"),
    "size of u": ("wkv6", {"u": zeros(3, 6)}, ValueError, FIXED + "[3, 6]"),
    "dtype of u": (
        "wkv6", {"u": zeros(3, 4, dtype=torch.float16)}, TypeError,
        "u: expected torch.float32 like r, got torch.float16",
    ),
    "device of u": ("wkv6", {"u": zeros(3, 4, device="meta")}, ValueError, "u: expected device cpu like r, got meta"),
    "tokens in w": (
        "wkv5", {"w": zeros(*X)}, ValueError, "w: expected shape [3, 4] [heads, head size], got [2, 5, 3, 4]",
    ),
    "dtype of k": (
        "gla", {"k": zeros(*X, dtype=torch.float16)}, TypeError, "k: expected torch.float32 like q, got torch.float16",
    ),
    "rank of q": ("gla", {"q": zeros(5, 3, 4)}, ValueError, f"q: expected {RANK}, got shape (5, 3, 4)"),
    "number for q": ("gla", {"q": zeros()}, ValueError, f"q: expected {RANK}, got shape ()"),
    "no q": ("linear_attention", {"q": None}, TypeError, f"q: expected {ARRAY}, got"),
    "tokens of g": (
        "gla", {"g": zeros(2, 6, 3, 4)}, ValueError, "g: expected shape [2, 5, 3, 4] like q, got [2, 6, 3, 4]",
    ),
    "decay": ("gla", {"decay": "none"}, ValueError, f"decay: expected {DECAYS}, got 'none'"),
    "no decay": ("linear_attention", {"decay": "log"}, TypeError, "unexpected keyword argument 'decay'"),
    "layout of the state": (
        "gla", {"initial_state": zeros(2, 3, 6, 4)}, ValueError,
        "initial_state: expected shape [2, 3, 4, 6] or [3, 4, 6], got [2, 3, 6, 4]",
    ),
    "scale": ("gla", {"scale": NAN}, ValueError, "scale: expected a finite number, got nan"),
    "values of a normalized call": (
        "linear_attention", {"v": zeros(2, 4, 3, 6), "normalize": True}, ValueError,
        "v: expected shape [2, 5, 3, value size] like q, got [2, 4, 3, 6]",
    ),
}  # fmt: skip
PAIR = "expected a pair (S, z) with normalize=True, got "
BOTH = "initial_state: expected both S and z, or None for both, got "
S, Z = zeros(2, 3, 4, 6), zeros(2, 3, 4)
NORMALIZED = {
    "one tensor": (S, TypeError, PAIR + "Tensor"),
    "three": ((1, 2, 3), TypeError, PAIR + "tuple"),
    "shape of S": ((zeros(2, 3, 6, 4), Z), ValueError, "initial_state: expected shape [2, 3, 4, 6] or [3, 4, 6], got"),
    "shape of z": ((S, zeros(2, 3, 6)), ValueError, "initial_state[1]: expected shape [2, 3, 4]"),
    "z of every sequence": ((S[0], Z), ValueError, "initial_state[1]: expected shape [3, 4]"),
    "dtype of z": (
        (S, Z.half()), TypeError, "initial_state[1]: expected torch.float32 like the state, got torch.float16",
    ),
    "device of z": ((S, Z.to("meta")), ValueError, "initial_state[1]: expected device cpu, got meta"),
    "z alone": ((None, Z), ValueError, BOTH + "z"),
    "S alone": ((S, None), ValueError, BOTH + "S"),
    "kind of z": ((S, 0), TypeError, "initial_state[1]: expected a torch.Tensor or an array with"),
}  # fmt: skip


def arguments(op, batch=2):
    names = {"wkv5": "rkvwu", "wkv6": "rkvwu", "wkv7": "rwkvab", "gla": "qkvg", "linear_attention": "qkv"}[op]
    without_tokens = {"wkv5": "wu", "wkv6": "u"}.get(op, "")
    shapes = {"v": (batch, *X_OF_V[1:]), **dict.fromkeys(without_tokens, X[2:])}
    return {name: zeros(*shapes.get(name, (batch, *X[1:]))) for name in names}


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

    for module in (gla, linear_attention, wkv5, wkv6, wkv7):
        monkeypatch.setattr(module, "OP", dataclasses.replace(module.OP, forward=ran, by_op=ran))


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "wkv7", "gla", "linear_attention"])
def test_the_unchanged_arguments_are_right(op):
    y, final = call(op, {"output_final_state": True})
    assert y.shape == (2, 5, 3, 6)
    assert final.shape == ((2, 3, 6, 4) if op.startswith("wkv") else (2, 3, 4, 6))


WRONG_CALLS = {
    **{
        f"{op}, {name}": (op, *case)
        for op in ("wkv6", "wkv7")
        for name, case in (WRONG_TENSORS | WRONG_OPTIONS).items()
    },
    **{f"{case[0]}, {name}": case for name, case in OF_ONE_OP.items()},
    **{
        f"normalized, {name}": ("linear_attention", {"initial_state": state, "normalize": True}, error, message)
        for name, (state, error, message) in NORMALIZED.items()
    },
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_tensor_or_option(case, nothing_runs):
    """In the names and conventions of each op."""
    op, changes, error, message = WRONG_CALLS[case]
    with pytest.raises(error, match=re.escape(message)):
        call(op, changes)


@pytest.mark.parametrize("case", WRONG_PACKING)
@pytest.mark.parametrize("op", ["wkv6", "wkv7"])
def test_wrong_packing(op, case):
    cu_seqlens, error, message = WRONG_PACKING[case]
    with pytest.raises(error, match=re.escape(message)):
        call(op, {"cu_seqlens": cu_seqlens}, batch=1)


def test_packing_decides_how_many_states_there_are(nothing_runs):
    with pytest.raises(ValueError, match=re.escape("initial_state: expected shape [3, 3, 6, 4]")):
        call("wkv7", {"cu_seqlens": torch.tensor([0, 1, 2, 5]), "initial_state": zeros(1, 3, 6, 4)}, batch=1)


def test_missing_argument():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rwkv_jit.wkv7(*list(arguments("wkv7").values())[:-1])


# ---- specialize --------------------------------------------------------------------------------------------------

OP_NAMES = f"one of {', '.join(table.ALL)}"
BUILT_NAMES = f"one of {', '.join(build_command.OPS)}"
SIZE, ARCH = "an int of at least 1", "sm_NN, sm_NNa or compute_NN"
NO_ARCHS = [
    "90", "sm_9.0", "sm_90 -G", "../sm_90", "sm_9٠", "sm_00090", "sm_9", "sm_9999", "sm_90A", "sm_90\n", "SM_90",
    "sm_90af", "",
]  # fmt: skip
# What `compile_async` refuses at once too.
WRONG_CHOICES = {
    **{
        f"{name} {ascii(value)}": ({name: value}, error, f"{name}: expected {expected}, got {value!r}")
        for name, error, expected, values in (
            ("op", ValueError, OP_NAMES, ["wkv9"]),
            ("head_size", ValueError, SIZE, [0, True, 64.0]),
            ("value_size", ValueError, SIZE, [0]),
            ("arch", ValueError, ARCH, NO_ARCHS),
            ("direction", ValueError, "one of forward, backward", ["both"]),
            ("decay", ValueError, DECAYS, ["exp"]),
        )
        for value in values
    },
    **{
        f"arch {arch}": ({"arch": arch}, ValueError, f"arch: expected sm_{first} or newer before '{arch[-1]}', got")
        for arch, first in {"sm_75a": 90, "compute_89a": 90, "sm_90f": 100, "compute_90f": 100}.items()
    },
    "no head size": ({"head_size": None}, TypeError, "head_size: wkv7 needs one, got None"),
    "dtype": ({"dtype": torch.float64}, TypeError, f"dtype: expected {FLOATS}, got torch.float64"),
    "dtype text": ({"dtype": "bf16"}, TypeError, f"dtype: expected {FLOATS}, got bf16"),
    "arch long": ({"arch": "x" * 10**5}, ValueError, "got 'xxx" + 196 * "x" + "... (100002 characters)"),
    "arch None": ({"arch": None}, ValueError, "arch: there is no GPU; pass an architecture, e.g. arch='sm_90'"),
}  # fmt: skip
WRONG_SPECIALIZATIONS = {
    **WRONG_CHOICES,
    "backend": ({"backend": "tensor"}, ValueError, f"backend: expected {BACKENDS}, got 'tensor'"),
    "reference": (
        {"backend": "reference"}, UnsupportedConfigError, "backend: the reference is plain torch and has no kernel",
    ),
    "threads of gla": (
        {"op": "gla", "head_size": 128, "num_threads": 96}, UnsupportedConfigError,
        "num_threads must be a multiple of 32 from 128 to 512 at head sizes 128 and 128, got 96",
    ),
    "chunks in float32": (
        {"dtype": torch.float32, "backend": "chunked"}, UnsupportedConfigError,
        "backend: 'chunked' takes float16 and bfloat16, got torch.float32; use 'auto' or 'recurrent'",
    ),
    "layout": ({"state_layout": "kk"}, ValueError, f"state_layout: expected {LAYOUTS}, got 'kk'"),
    "chunk 0": ({"chunk_len": 0}, ValueError, "chunk_len: expected at least 1, got 0"),
    "threads text": ({"num_threads": "x"}, TypeError, "num_threads: expected an int, got 'x'"),
    "storage type": (
        {"t_state": "fp64"}, ValueError, "parameter T_STATE: expected one of fp16, bf16, fp32, got 'fp64'",
    ),
    "lanes float": (
        {"lanes_per_row": 2.5}, TypeError, "parameter LANES_PER_ROW: expected an int, a bool or an identifier, got 2.5",
    ),
    "parameter of no template": (
        {"warp_len": 4}, ValueError, "template wkv7_chunked_forward has no parameter WARP_LEN",
    ),
    "parameter of another template": (
        {"dtype": torch.float32, "blocks_per_sm": 4}, ValueError,
        "template wkv7_recurrent_forward has no parameter BLOCKS_PER_SM",
    ),
}  # fmt: skip


@pytest.fixture
def nothing_compiles(monkeypatch):
    """Fails where a kernel is compiled; and there is no GPU."""

    def compiled(*_):
        raise AssertionError("it compiled")

    monkeypatch.setattr(compiler, "compile", compiled)
    monkeypatch.setattr(identity, "identity", lambda: "12.9 0123abcd")  # the cache is asked before a template is
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


WRONG_WARMINGS = {
    "unknown op": ({"op": "wkv9"}, ValueError, f"op: expected {BUILT_NAMES}, got 'wkv9'"),
    "one of the head sizes": ({"head_sizes": [4, 0]}, ValueError, f"head_size: expected {SIZE}, got 0"),
    "one of the dtypes": (
        {"dtypes": [torch.float32, torch.float64]}, TypeError, f"dtype: expected {FLOATS}, got torch.float64",
    ),
    "one of the architectures": ({"arch": ["sm_90", "90"]}, ValueError, f"arch: expected {ARCH}, got '90'"),
    "no architecture": ({"arch": None}, ValueError, "arch: there is no GPU; pass an architecture"),
    "bound": ({"decay_bound": 1.0}, ValueError, "decay_bound: expected a negative number"),
    "dtype of w": ({"w_dtype": torch.int8}, TypeError, f"w_dtype: expected {FLOATS}, got torch.int8"),
    "dtype of the state": (
        {"state_dtype": torch.float64}, TypeError, f"state_dtype: expected {FLOATS}, got torch.float64",
    ),
    "decay": ({"decay": "exp"}, ValueError, f"decay: expected {DECAYS}, got 'exp'"),
    "layout": ({"state_layout": "kk"}, ValueError, f"state_layout: expected {LAYOUTS}, got 'kk'"),
}  # fmt: skip


REFUSED = {
    **{f"specialize, {name}": ({"head_size": 64}, *case) for name, case in WRONG_SPECIALIZATIONS.items()},
    **{f"compile_async, {name}": ({"head_size": 64}, *case) for name, case in WRONG_CHOICES.items()},
    **{f"warm, {name}": ({"head_sizes": 4}, *case) for name, case in WRONG_WARMINGS.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused_at_once(case, monkeypatch, nothing_compiles):
    sizes, changes, error, message = REFUSED[case]
    compile = getattr(rwkv_jit, case.split(",")[0])
    if compile is rwkv_jit.warm:
        monkeypatch.setattr(kernel, "get_async", lambda _: pytest.fail("it compiled"))
    with pytest.raises(error, match=re.escape(message)):
        compile(**{"op": "wkv7", "arch": "sm_90", **sizes, **changes})


def test_architecture_of_the_environment_is_checked_too(monkeypatch):
    monkeypatch.setenv("RWKVJIT_ARCH", "hopper")
    with pytest.raises(ValueError, match=f"RWKVJIT_ARCH: expected {ARCH}, got 'hopper'"):
        rwkv_jit.specialize("wkv7", 64)


@pytest.mark.parametrize("arch", ["nonsense", "90", "sm90", "sm_", "sm_9x"])
def test_architecture_of_the_environment_is_checked_by_calls(arch, on_gpu, monkeypatch):
    monkeypatch.setenv("RWKVJIT_ARCH", arch)
    monkeypatch.setattr(tensors, "_capability", lambda device: pytest.fail("the variable is not read"))
    x, pool = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 8, 8)
    for call in (
        lambda: rwkv_jit.gla(x, x, x, x), lambda: rwkv_jit.wkv7_update(pool, *[x[0, :1]] * 6),
        lambda: rwkv_jit.causal_conv1d(x[0], torch.zeros(8, 4)), lambda: rwkv_jit.gated(x, x),
        lambda: rwkv_jit.timex(x[0, 0], x[0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^RWKVJIT_ARCH: expected {ARCH}, got '{arch}'$"):
            call()


# ---- unknown names -----------------------------------------------------------------------------------------------

ZEROS = torch.zeros(1, 4, 2, 8)
HEADS, POOL = torch.zeros(1, 4, 2), torch.zeros(2, 2, 8, 8)
OF_SEQUENCES = "initial_state, output_final_state, cu_seqlens"
TAIL = "state_layout, checkpoint_interval, chunk_len, num_threads, backend"
# A call, what it has by a name that is not there, the hint, and the names that are there.
UNKNOWN = {
    "like one": ("wkv7", [ZEROS] * 6, "cu_seqlen", "did you mean 'cu_seqlens'?", f"r, w, k, v, a, b, {OF_SEQUENCES}, "),
    "like an option": ("gla", [ZEROS] * 4, "scales", "did you mean 'scale'?", f", scale, decay, decay_bound, {TAIL}"),
    "like none": ("wkv7", [ZEROS] * 6, "zz", "", f"{OF_SEQUENCES}, scale, decay, decay_bound, {TAIL}"),
    "FLA's": ("wkv7", [ZEROS] * 6, "head_first", "leave it out, tensors are [B, T, H, K]", "r, w, "),
    "FLA's option": (
        "simple_gla", [*[ZEROS] * 3, HEADS], "chunk_size", "here it is chunk_len=", f"cu_seqlens, scale, {TAIL}",
    ),
    "FLA's norm": (
        "kda", [*[ZEROS] * 4, HEADS], "use_qk_l2norm_in_kernel", "here it is qk_norm=True",
        f"q, k, v, g, beta, {OF_SEQUENCES}, A_log, dt_bias, lower_bound, qk_norm, beta_map, scale, ",
    ),
    "FLA's norm, of no use": ("wkv7", [ZEROS] * 6, "use_qk_l2norm_in_kernel", "", "r, w, "),
    "FLA's bounds": ("delta_rule", [*[ZEROS] * 3, HEADS], "offsets", "here it is cu_seqlens=", "q, k, v, beta, "),
    "vLLM's": (
        "wkv6_update", [POOL, *[ZEROS] * 4, ZEROS[0, 0]], "slot_mapping", "here it is state_indices=", "state, r, ",
    ),
    "of a derived pool": (
        "kda_varlen", [POOL, *[ZEROS] * 4, HEADS], "qknorm", "did you mean 'qk_norm'?",
        ", qk_norm, beta_map, state_indices, ",
    ),
    "of a pool": ("StatePool", [2], "spec", "did you mean 'specs'?", "slots, specs, device, reserved"),
    "of a ring": ("ReplayRing", [2], "draft", "did you mean 'drafts'?", "slots, op, heads, "),
    "of a model": ("nn.RWKV7", [], "vocab", "did you mean 'vocabulary'?", "vocabulary, width, layers, head_size, "),
    "of a layer": ("nn.Mamba2", [64], "d_state", "", "width, "),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_name_is_answered_with_the_names_that_are_there(case):
    function, given, name, hint, listed = UNKNOWN[case]
    public = rwkv_jit
    for part in function.split("."):
        public = getattr(public, part)
    with pytest.raises(TypeError) as caught:
        public(*given, **{name: 1})
    said = f"{function}() got an unexpected keyword argument {name!r}" + (f" ({hint})" if hint else "") + "; there are "
    assert str(caught.value).startswith(said)
    assert listed in str(caught.value)[len(said) - 2 :]


def names_of_functions(package):
    for name in package.__all__:
        public = getattr(package, name)
        if inspect.isfunction(public) and not {"options", "parameters"} & {*inspect.signature(public).parameters}:
            yield f"{package.__name__}.{name}".removeprefix("rwkv_jit.")


@pytest.mark.parametrize("name", [*names_of_functions(rwkv_jit), *names_of_functions(rwkv_jit.parallel)])
def test_every_function_answers_an_unknown_name_so(name):
    public = rwkv_jit
    for part in name.split("."):
        public = getattr(public, part)
    parameters = inspect.signature(public).parameters.values()
    required = [None for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    there = ", ".join(x.name for x in parameters if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL))
    with pytest.raises(TypeError) as caught:
        public(*required, zzzz=1)
    assert str(caught.value) == f"{name}() got an unexpected keyword argument 'zzzz'; there are {there}"
    assert pickle.loads(pickle.dumps(public)) is public


# ---- heads before tokens -----------------------------------------------------------------------------------------


def gla_of(tokens, heads, **options):
    x = torch.zeros(1, tokens, heads, 4)
    return rwkv_jit.gla(x, x, x, x, **options)


def kda_of(tokens, heads):
    x = torch.zeros(1, tokens, heads, 4)
    return rwkv_jit.kda(x, x, x, x, x[..., 0])


def normalized_of(tokens, heads):
    x = torch.zeros(1, tokens, heads, 4)
    return rwkv_jit.linear_attention(x, x, x, normalize=True)


def fla_of(tokens, heads):
    x = torch.zeros(1, tokens, heads, 4)
    return chunk_gla(x, x, x, x)


@pytest.fixture
def warned(monkeypatch):
    """Calls a function, and returns what it warned of, after nothing was warned of before."""

    def run(call, *given, **named):
        monkeypatch.setattr(checks, "_has_warned", False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(*given, **named)
            call(*given, **named)
        return [(str(x.message), x.filename) for x in caught if "is read as" in str(x.message)]

    return run


@pytest.mark.parametrize("call", [gla_of, kda_of, normalized_of, fla_of])
@pytest.mark.parametrize(
    ("tokens", "heads", "is_odd"),
    [
        (16, 32, True),
        (31, 32, True),
        (32, 32, False),
        (15, 32, False),
        (8, 128, False),
        (8, 129, True),
        (1, 129, False),
    ],
)
def test_more_heads_than_tokens_are_warned_of_once(call, tokens, heads, is_odd, warned):
    said = warned(call, tokens, heads)
    assert len(said) == is_odd
    if is_odd:
        message, file = said[0]
        assert f"q of shape [1, {tokens}, {heads}, 4] is read as [batch, tokens, heads, head size]" in message
        assert f"as {tokens} tokens of {heads} heads. If it is [batch, heads, tokens, head size], call trans" in message
        assert file == __file__


def test_more_heads_than_tokens_of_who_knows_the_order_are_no_warning(warned):
    """Packed sequences, states in a pool, layers, and a compiler's trace."""
    x, pool = torch.zeros(1, 16, 32, 4), torch.zeros(1, 32, 4, 4)
    layer = rwkv_jit.nn.LinearAttention(64, 32)
    assert layer(torch.zeros(1, 16, 64))[0].shape == (1, 16, 64)
    assert warned(gla_of, 16, 32, cu_seqlens=torch.tensor([0, 16])) == []
    assert warned(rwkv_jit.gla_update, pool, x, x, x, x) == []
    assert warned(rwkv_jit.gla_varlen, pool, *[x[0]] * 4, cu_seqlens=torch.tensor([0, 16])) == []
    assert warned(layer, torch.zeros(1, 16, 64)) == []
    assert warned(torch.compile(gla_of, backend="eager", fullgraph=True), 16, 32) == []
