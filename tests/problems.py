"""Problems of calls, and their kernels, from sizes and names alone."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions, table
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

MANY = 1 << 20  # multiprocessors, of which any number of heads leaves some idle


def problem(
    op, dtype="bf16", K=64, V=None, arch="sm_90", B=1, T=4096, H=1, few_heads=False, backend="recurrent", decay=None,
    state_layout=None, types=(), **changes,
):  # fmt: skip
    """Return the problem of a call; `types` are those of inputs that differ from `dtype`."""
    named = OPS[op]
    gpu = Gpu(arch, multiprocessors=MANY if few_heads else None)
    storage = {**dict.fromkeys(named.inputs, dtype), **dict(types)}
    given = Problem(
        named, gpu, storage, B=B, T=T, H=H, K=K, V=V or K, N=B, backend=backend, decay=decay or named.decay,
        state_layout=state_layout or named.state_layout,
    )  # fmt: skip
    return given._replace(**changes)


def problem_of(op, how, arch, sizes, tokens, layout, state, few_heads=True):
    """The problem of calls of bfloat16 inputs with float32 gates."""
    entry, words = table.ALL[op], how.split()
    absent = {
        name for name, word in (("a_log", "raw bounded"), ("dt_bias", "bias"), ("own", "D wide"), ("z", "z"))
        if name in entry.optional and not {*word.split()} & {*words}
    }  # fmt: skip
    dims = {"own": "HV" if "wide" in words else "H", "w": "H" if "fixed" in words else entry.inputs.get("w")}
    shaped = replace(entry, inputs={x: dims.get(x) or each for x, each in entry.inputs.items()})
    types = {x: "fp32" if x in entry.wide else "bf16" for x in entry.inputs if x not in absent}
    traits = {
        "qk_norm": "norm" in words, "lower_bound": -5.0 if "bounded" in words else None,
        "beta_map": next((x for x in ("twice_sigmoid", "sigmoid") if x in words), "identity"),
        "dt_softplus": "softplus" in words, "least_step": 0.1 if "limit" in words else None, "most_step": None,
    }  # fmt: skip
    return Problem(
        shaped, Gpu(arch, multiprocessors=1 << 20 if few_heads else None), types, 4, tokens, 4, *sizes, 4,
        2 if "G" in "".join(entry.inputs.values()) else 0, state_type=state, state_layout=layout, decay=entry.decay,
        traits=tuple((name, traits[name]) for name in entry.traits),
    )  # fmt: skip


class Core(NamedTuple):
    """What a call of an op with one decay for a head has, for its dedicated kernels."""

    has_delta: bool
    has_decay: bool = True
    has_rate: bool = True
    has_norm: bool = False
    has_own: bool = False  # an output has a part of its value itself
    has_gate: bool = False  # decays are raw, and go through the softplus with A_log
    has_bias: bool = False  # .. and dt_bias
    has_step: bool = False  # rates are raw steps, and decays are A times these
    rate_map: str = "identity"

    @property
    def op(self):
        """The op."""
        if self.has_delta:
            return table.DERIVED["gated_delta_rule" if self.has_decay else "delta_rule"]
        return table.DERIVED["ssd" if self.has_rate else "simple_gla"]

    @property
    def names(self):
        """The inputs that are there, as kernels call them."""
        absent = {"z"} if self.has_own else {"z", "own"}
        absent |= set() if self.has_bias else {"dt_bias"}
        absent |= set() if self.has_gate or self.op.name == "ssd" else {"a_log"}
        return [name for name in self.op.inputs if name not in absent]

    @property
    def traits(self):
        """The switches of the op."""
        own = {"qk_norm": self.has_norm, "beta_map": self.rate_map, "dt_softplus": self.has_step}
        return tuple((name, own.get(name, default)) for name, default in self.op.traits.items())


def head_decays(
    core, arch="sm_90", sizes=(128, 128), chunk_len=32, io="bf16", heads=32, layout="kv", state="fp32", **changes
):  # fmt: skip
    """Return the problem of a call with one decay for a head or none, in dedicated kernels; of two states."""
    wide, (head_size, value_size) = ("w", "own", "a_log", "dt_bias"), sizes
    types = {name: "fp32" if name in wide else io for name in core.names}
    given = Problem(
        core.op, Gpu(arch, multiprocessors=132), types, 8, 4096, heads, head_size, value_size, 8, heads // 2,
        state_type=state, state_layout=layout, backend="dedicated", chunk_len=chunk_len, has_initial_state=True,
        has_final_state=True, traits=core.traits,
    )  # fmt: skip
    return given._replace(**changes)


class ChannelCore(NamedTuple):
    """What a call of Kimi Delta Attention has, for its dedicated kernels."""

    gate: str = "given"
    has_norm: bool = False
    has_bias: bool = False
    rate_map: str = "identity"

    @property
    def op(self):
        """The op."""
        return table.DERIVED["kda"]

    @property
    def names(self):
        """The inputs that are there, as kernels call them."""
        absent = {"a_log"} if self.gate == "given" else set()
        return [name for name in self.op.inputs if name not in absent and (self.has_bias or name != "dt_bias")]


def channel_decays(core, io="bf16", wide=None, heads=32, layout="kv", state="fp32", **changes):
    """Return the problem of a call of Kimi Delta Attention in dedicated kernels; of two states."""
    fixed = {"a_log": "fp32", "dt_bias": "fp32", "w": wide or io}
    bound = -5.0 if core.gate == "bounded" else None
    given = Problem(
        core.op, Gpu("sm_90", multiprocessors=132), {name: fixed.get(name, io) for name in core.names}, 8, 4096,
        heads, 128, 128, 8, heads, decay="log", state_type=state, state_layout=layout, backend="dedicated",
        chunk_len=64, has_initial_state=True, has_final_state=True,
        traits=(("lower_bound", bound), ("qk_norm", core.has_norm), ("beta_map", core.rate_map)),
    )  # fmt: skip
    return given._replace(**changes)


def is_by_halves(template, parameters):
    """Return whether a kernel takes what has left its frame, as another launch of the same template does not."""
    return bool(parameters.get("BY_HALVES")) or template.endswith("by_halves")


def requests(direction, given, by_halves=False):
    """Return the kernels of a direction of a problem, in frames or by halves, by the names of their templates."""
    schedule = directions.forward(given) if direction == "forward" else directions.backward(given)
    return {
        request.template.name: request for request in schedule.requests(given.gpu)
        if is_by_halves(request.template.name, request.parameters) == by_halves
    }  # fmt: skip


def by_turns(*axes):
    """Return the rows of a product of axes: in every run one value of the last axis each, by turns; all with --full."""
    rows = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        *others, last = places
        is_shown = sum(others) % len(axes[-1]) == last
        row = (axis[place] for axis, place in zip(axes, places, strict=True))
        rows.append(pytest.param(*row, marks=() if is_shown else pytest.mark.full))
    return rows


def _with_rows_alone(op):
    """An op of the inputs with tokens that every call has, by the names that callers know."""
    named = list(zip(op.public_names, op.names, op.inputs.values(), strict=True))
    inputs = {public: dims for public, name, dims in named if "T" in dims and name not in op.optional}
    wide = tuple(public for public, name, _ in named if name in op.wide)
    return replace(op, inputs=inputs, public=(), wide=wide, optional=())


ROWS = {name: _with_rows_alone(op) for name, op in table.DERIVED.items()}
