"""Every public function and class names the argument whose type is wrong, before anything is changed.

A function that is not listed here fails a test.
"""

import inspect

import numpy as np
import pytest
import torch
from problems import ROWS

import rwkv_jit
from rwkv_jit import ReplayRing, StatePool, StateSpec, nn
from rwkv_jit.kernels import kernel
from rwkv_jit.schedules.table import OPS

SIZES = {"B": 1, "T": 4, "H": 2, "G": 2, "K": 8, "V": 8, "C": 16}


class Thing:
    """Nothing that any argument may be."""

    def __repr__(self):
        return "Thing"


WRONG = {
    "None": None, "str": "x", "bytes": b"x", "list": [1.0], "tuple": (1, 2), "dict": {}, "int": 3, "negative": -7,
    "float": 0.5, "NaN": float("nan"), "bool": True, "thing": Thing(), "objects": np.array([None]),
    "strings": np.array(["a"]), "NumPy's": np.float32(1), "number": torch.tensor(1.0), "empty": torch.zeros(0),
    "complex": torch.zeros(1, dtype=torch.complex64), "sparse": torch.zeros(2, 2).to_sparse(),
}  # fmt: skip


def inputs_of(op):
    shapes = {
        name: [SIZES[dim] for dim in dims] for name, dims in zip(op.public_names, op.inputs.values(), strict=True)
    }
    return {name: -0.1 * torch.rand(shape) for name, shape in shapes.items()}


def ring_of(op):
    return ReplayRing(3, op, 2, 8, drafts=4, dtype=torch.float32, device="cpu")


def calls():
    """Yield the name of every function, and arguments that it takes, all that it has."""
    inputs = {name: inputs_of(op) for name, op in (OPS | ROWS).items()}
    inputs["ssd"] = {**inputs["ssd"], "A": -torch.rand(2), "D": torch.rand(2), "z": inputs["ssd"]["x"].clone(),
                     "dt_bias": torch.rand(2), "dt_softplus": True, "dt_limit": (0.0, 1.0)}  # fmt: skip
    for name in ("kda", "gated_delta_rule", "gated_delta_rule2"):
        bias = torch.rand(2) if name == "gated_delta_rule" else torch.rand(2, 8)
        inputs[name] |= {"A_log": torch.rand(2), "dt_bias": bias, "qk_norm": True}
        inputs[name] |= {} if name == "gated_delta_rule" else {"lower_bound": -5.0}
    for name in ("kda", "gated_delta_rule", "delta_rule"):
        inputs[name] |= {"beta_map": "identity", "qk_norm": True}

    bounds, slots = torch.tensor([0, 4]), torch.tensor([1])
    of_sequence = {
        "initial_state": torch.zeros(1, 2, 8, 8), "output_final_state": True, "cu_seqlens": bounds, "scale": 1.0,
        "state_layout": "vk", "checkpoint_interval": 64, "chunk_len": None, "num_threads": None, "backend": "auto",
    }  # fmt: skip
    flush = {"state_indices": slots, "null_index": -1, "state_layout": "vk", "rounding": "nearest", "seed": None}
    of_pool = {**flush, "out": torch.zeros(1, 4, 2, 8), "scale": 1.0}
    of_varlen = {
        **of_pool, "out": torch.zeros(4, 2, 8), "cu_seqlens": bounds, "max_seqlen": 4,
        "has_initial_state": torch.ones(1, dtype=torch.bool), "num_active": torch.ones(1, dtype=torch.int32),
        "checkpoint_offsets": torch.tensor([[2]]), "checkpoint_indices": torch.tensor([[0]]),
    }  # fmt: skip
    pool = torch.zeros(3, 2, 8, 8)
    for name in (*ROWS, "wkv5", "wkv6", "wkv7", "gla", "linear_attention"):
        own, has_decay = inputs[name], name in OPS and name != "linear_attention"
        decay = {"decay": "log"} if has_decay else {}
        own_varlen = {x: y[0] if isinstance(y, torch.Tensor) and y.dim() > 2 else y for x, y in own.items()}
        more = {"normalize": False} if name == "linear_attention" else {"decay_bound": -1.0} if has_decay else {}
        w0 = {"w0": torch.zeros(2, 8)} if has_decay else {}
        bound = {"decay_bound": -1.0} if has_decay else {}
        yield name, own | of_sequence | decay | more
        yield f"{name}_update", {"state": pool, **own, **of_pool, "write_indices": torch.tensor([2]), **decay, **w0}
        yield f"{name}_varlen", {"state": pool, **own_varlen, **of_varlen, **decay, **w0, **bound}
        yield f"{name}_replay", {"state": pool, "ring": ring_of(name), **own, **of_pool, **decay, **w0}
        drafted = {x: y for x, y in of_pool.items() if x not in ("rounding", "seed")}
        yield f"{name}_verify", {"state": pool, "ring": ring_of(name), **own, **drafted, **decay, **w0}
    yield "replay_commit", {"state": pool, "ring": ring_of("wkv7"), "accept_lens": slots, **flush}
    yield "replay_flush", {"state": pool, "ring": ring_of("wkv7"), **flush}

    of_wkv4 = {"initial_state": torch.zeros(1, 3, 16), "output_final_state": True}
    yield "wkv4", inputs["wkv4"] | of_wkv4 | {"decay": "raw", "backend": "auto"}
    yield "wkv4_update", {
        "state": torch.zeros(3, 3, 16), **inputs["wkv4"], "decay": "raw", "state_indices": slots,
        "write_indices": torch.tensor([2]), "null_index": -1, "out": torch.zeros(1, 4, 16),
    }  # fmt: skip
    yield "timex", {"w": torch.rand(3, 5), "k": torch.rand(2, 3, 5), "eps": 0.0, "backend": "auto"}

    x, ones, mixes = torch.rand(1, 4, 16), torch.ones(16), torch.rand(3, 16)
    yield "shift_mix", {
        "x": x, "weight": ones, "bias": ones, "mixes": mixes, "shift": torch.zeros(4, 16), "add": x,
        "state_indices": slots, "has_initial_state": torch.ones(1, dtype=torch.bool), "null_index": -1,
        "num_active": torch.ones(1, dtype=torch.int32), "eps": 1e-5, "out": torch.zeros(3, 1, 4, 16),
    }  # fmt: skip
    h, p = torch.rand(5, 2, 8), torch.rand(2, 8)
    yield "prepare_keys", {
        "k": h, "v": h, "rate": h, "k_k": p, "k_a": p, "a0": p, "v_first": h, "v_gate": h, "v0": p, "r": h, "r_k": p,
        "rate_map": "sigmoid",
    }  # fmt: skip
    bonus = {"r": h, "k": h, "v": h, "r_k": p, "out": torch.zeros(5, 16)}
    for more in (bonus, {"bonus": h}):
        yield (
            "gated_norm",
            {"y": h, "g": h, "weight": p, "bias": p, "gate": "identity", "norm": "rms", "eps": 0.1} | more,
        )
    yield "gated", {"x": x, "g": x, "gate": "sigmoid"}
    yield "activate", {"x": x, "kinds": "tanh", "out": torch.zeros_like(x)}
    shifted = {"x": x, "mixes": mixes, "first": torch.zeros(1, 16), "cu_seqlens": bounds}
    yield "token_shift", {**shifted, "amounts": torch.rand(3, 1, 4, 16)}
    yield "norm_shift", {**shifted, "weight": ones, "bias": ones, "add": x, "eps": 1e-5, "dtype": None}
    targets = torch.tensor([0, 1, 2])
    loss = {"targets": targets, "l2_wrap": 0.1, "ignore_index": -100, "reduction": "mean"}
    yield "cross_entropy", {"logits": torch.rand(3, 7), **loss}
    matrix = {"weight": torch.rand(7, 8), "bias": torch.rand(7), "chunk_rows": None}
    yield "linear_cross_entropy", {"hidden": torch.rand(3, 8), **matrix, **loss}
    taps = {"weight": torch.rand(16, 4), "bias": torch.rand(16), "activation": "silu"}
    yield "causal_conv1d", {
        "x": x, **taps, "initial_state": torch.zeros(1, 16, 3), "output_final_state": True, "cu_seqlens": bounds,
    }  # fmt: skip
    yield "causal_conv1d_update", {
        "x": torch.rand(1, 16), "conv_state": torch.zeros(3, 16, 5), **taps, "state_indices": slots, "null_index": -1,
        "cache_seqlens": torch.zeros(1, dtype=torch.int32), "num_active": torch.ones(1, dtype=torch.int32),
        "out": torch.zeros(1, 16),
    }  # fmt: skip
    yield "set_bfloat16_precision", {"precision": "medium"}
    yield "set_batch_invariant", {"enabled": False}


CALLS = [(f"{name} {number}", name, given) for number, (name, given) in enumerate(calls())]


def copied(given):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def error_of(call, given):
    """What a call says of arguments that it does not take; None where it takes them. Other errors are faults."""
    try:
        call(**given)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return None


def held_by(given):
    plain = [x for x in given.values() if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta]
    return [x.clone() for x in plain]


def refuses(call, given, name, what, value):
    """Check that a call takes a value, or names an argument of its own where it does not."""
    arguments = copied(given)
    arguments[name] = value
    before = held_by(arguments)
    said = error_of(call, arguments)
    if said is None:
        return
    own = said.startswith((f"{name}:", f"{name}[", f"{name}."))
    # A shape can be at odds with another one's, and options go together.
    assert own or any(said.startswith(f"{other}:") for other in given), f"{name} as {what}: {said}"
    assert all(torch.equal(*pair) for pair in zip(before, held_by(arguments), strict=True)), f"{name} as {what}"


@pytest.mark.parametrize(("name", "given"), [each[1:] for each in CALLS], ids=[each[0] for each in CALLS])
def test_a_function_names_the_argument_that_has_a_wrong_type(name, given):
    function = getattr(rwkv_jit, name)
    function(**copied(given))
    for argument in given:
        metas = {"meta": given[argument].to("meta")} if isinstance(given[argument], torch.Tensor) else {}
        for what, value in (WRONG | metas).items():
            refuses(function, given, argument, what, value)
    rwkv_jit.set_batch_invariant(False)


def test_all_functions_that_take_tensors_are_tried():
    tried = {name for _, name, _ in CALLS}
    tried |= {"specialize", "compile_async", "warm"}
    others = {"add_hook", "cache_info", "clear_cache", "env_report", "get_bfloat16_precision", "is_available",
              "is_batch_invariant"}  # fmt: skip
    public = {name for name in rwkv_jit.__all__ if inspect.isfunction(getattr(rwkv_jit, name))}
    assert {name for name in public - tried - others if not name.endswith("_ref")} == set()


@pytest.mark.parametrize("name", ["specialize", "compile_async", "warm"])
def test_compiling_ahead_names_the_argument_that_has_a_wrong_type(name, monkeypatch):
    """Of sizes, of which there may be several, the errors of one name one."""

    def compiles(*_):
        raise NotImplementedError

    monkeypatch.setattr(kernel, "get", compiles)
    monkeypatch.setattr(kernel, "get_async", compiles)
    function = getattr(rwkv_jit, name)
    given = {"op": "wkv7", "head_sizes" if name == "warm" else "head_size": 64, "arch": "sm_90"}
    parameters = [x for x in inspect.signature(function).parameters.values() if x.kind is not x.VAR_KEYWORD]
    for argument in [x.name for x in parameters if x.name != "progress"]:
        for what, value in WRONG.items():
            said = error_of(function, given | {argument: value})
            assert said is None or said.startswith(argument[:5]) or not said, (argument, what, said)


MADE = {
    "width": 16, "heads": 2, "layers": 2, "layer": 0, "vocabulary": 32, "channels": 8, "length": 8, "head_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in nn.__all__ if name[0].isupper() and not name.endswith("State")])
def test_a_module_names_the_argument_that_has_a_wrong_type(name):
    module = getattr(nn, name)
    parameters = inspect.signature(module).parameters.values()
    given = {x.name: MADE.get(x.name, x.default) for x in parameters if x.name not in ("device", "dtype")}
    module(**given)
    for argument in given:
        for what, value in WRONG.items():
            said = error_of(module, given | {argument: value})
            assert said is None or argument in said.replace("head size", "head_size"), (argument, what, said)


@pytest.mark.parametrize(
    "name", [name for name in nn.__all__ if name[0].isupper() and not name.endswith(("State", "Block"))]
)
def test_a_forward_names_the_argument_that_has_a_wrong_type(name):
    parameters = inspect.signature(getattr(nn, name)).parameters
    module = getattr(nn, name)(**{x: value for x, value in MADE.items() if x in parameters})
    is_model = "tokens" in inspect.signature(module.forward).parameters
    taken = {"TimeX": (1, 8, 8)}.get(name, (1, 4, 16))
    first = {"tokens": torch.zeros(1, 4, dtype=torch.int64)} if is_model else {"x": torch.rand(taken)}
    module(**first)
    for argument in inspect.signature(module.forward).parameters:
        for what, value in WRONG.items():
            said = error_of(module, first | {argument: value})
            # A channel mixing's state is the token before the first one.
            assert said is None or argument in said or said.startswith(f"{'first'}: expected shape"), (
                argument,
                what,
                said,
            )


def of_a_pool(method):
    def run(**given):
        pool = StatePool(8, {"a": StateSpec(2, (3,), torch.float32)}, device="cpu")
        pool.allocate(3)
        return getattr(pool, method)(**given)

    return run


def made(**given):
    return StatePool(2, {"a": StateSpec(**given)}, device="cpu")


def test_pools_and_rings_name_the_argument_that_has_a_wrong_type(tmp_path):
    path = tmp_path / "states"
    ring = ring_of("wkv7")
    several = {
        StatePool: {"slots": 4, "specs": {"a": StateSpec(2, (3,), torch.float32)}, "reserved": 1},
        made: {"layers": 1, "shape": (3,), "dtype": torch.float32, "fill": 0.0},
        of_a_pool("allocate"): {"count": 1}, of_a_pool("fork"): {"slot": 0, "count": 1},
        of_a_pool("copy"): {"source": 0, "target": 1}, of_a_pool("reset"): {"slots": 0},
        of_a_pool("free"): {"slots": 0}, of_a_pool("indices"): {"slots": 0},
        of_a_pool("save"): {"path": path, "slots": 0, "metadata": {"a": "b"}}, of_a_pool("load"): {"path": path},
        ReplayRing: {
            "slots": 4, "op": "wkv7", "heads": 2, "head_size": 8, "value_size": None, "length": None, "drafts": 0,
            "dtype": torch.float32, "state_dtype": torch.float32,
        },
        ring.reset: {"slots": 0}, ring.pays: {"rows": 1},
        rwkv_jit.Template: {"path": "none.cu"},
    }  # fmt: skip
    for call, given in several.items():
        fixed = {"device": "cpu"} if call in (StatePool, ReplayRing) else {}
        for argument in given:
            for what, value in WRONG.items():
                if argument == "path" and isinstance(value, str):
                    continue
                said = error_of(call, given | fixed | {argument: value})
                assert said is None or argument in said or "free slots" in said, (argument, what, said)
