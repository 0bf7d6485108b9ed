"""Problems of calls, and their kernels, from sizes and names alone."""

import itertools

import pytest

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions
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


def head_decays(
    core, arch="sm_90", sizes=(128, 128), chunk_len=32, io="bf16", heads=32, layout="kv", state="fp32", **changes
):  # fmt: skip
    """Return the problem of a call with one decay for a head or none, in kernels of its own; of two states."""
    op, (head_size, value_size) = core.op, sizes
    types = {name: "fp32" if name in ("w", "own") else io for name in op.inputs}
    given = Problem(
        op, Gpu(arch, multiprocessors=132), types, 8, 4096, heads, head_size, value_size, 8, heads // 2, decay=op.decay,
        state_type=state, state_layout=layout, backend="chunked", chunk_len=chunk_len, has_initial_state=True,
        has_final_state=True,
    )  # fmt: skip
    return given._replace(**changes)


def channel_decays(core, io="bf16", wide=None, heads=32, layout="kv", state="fp32", **changes):
    """Return the problem of a call of Kimi Delta Attention in a kernel of its own; of two states."""
    fixed = {"a_log": "fp32", "dt_bias": "fp32", "w": wide or io}
    given = Problem(
        core.op, Gpu("sm_90", multiprocessors=132), {name: fixed.get(name, io) for name in core.op.inputs}, 8, 4096,
        heads, 128, 128, 8, heads, decay="log", state_type=state, state_layout=layout, backend="chunked", chunk_len=64,
        has_initial_state=True, has_final_state=True,
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
