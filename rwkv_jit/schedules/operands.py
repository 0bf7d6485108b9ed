"""Launches around a recurrence: what it reads for other inputs, and what its output becomes; in both directions.

Inputs are read by their strides, and buffers have no gaps. Arguments and buffers have the same names, but for `names`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.common import ACCESS_BYTES, MOST_BLOCKS, MULTIPROCESSORS
from rwkv_jit.schedules.layers import GATES
from rwkv_jit.schedules.problem import BYTES, Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step

SOURCES = "none", "heads", "steps", "gates"  # of decays, as templates count them
_THREADS = 256  # of a block
# Of a multiprocessor, so that each has 64 or 80 registers.
_RESIDENT_THREADS, _FEW_RESIDENT_THREADS = 1024, 768
_MOST_PART = 4  # value heads for which a thread reads a piece of their key head once
_LEAST_ROWS = 16  # of a block with sums, so that these do not weigh
_STEP_THREADS, _STEP_BLOCKS = 128, 8


class Operands(NamedTuple):
    """What the operands of `gla` come from: names of inputs, and "" where there is none or the operand is the input."""

    source: str = "none"  # of decays: those of heads, steps of a state space, forget gates that are keys too
    q: str = ""  # is repeated for the value heads of a key head
    k: str = ""
    v: str = ""  # is multiplied by steps
    g: str = ""  # log-decays of heads, raw steps, or log-decays of channels
    A: str = ""  # of a state space: the log-decay of a step of 1
    dt_bias: str = ""
    has_softplus: bool = False
    limits: tuple[float, float] | None = None  # the least and the largest step


class Behind(NamedTuple):
    """What stands behind a recurrence, by the names of inputs; "" for what does not."""

    x: str = ""  # with D, the input that outputs have a part of
    D: str = ""
    z: str = ""
    gate: str = "silu"  # what z goes through, of GATES


class Slots(NamedTuple):
    """What says which packed tokens have a slot of a pool."""

    slots: int
    index_bytes: int  # of the numbers in state_indices: 4 or 8
    null_index: int  # a slot at or below it is none
    sequences: int
    bound_bytes: int = 4  # of the numbers in cu_seqlens


class Around(NamedTuple):
    """What stands around the launches of the op below in a direction."""

    before: Sequence[Item]
    after: Sequence[Item]
    names: Mapping[str, Any]  # what the op below reads and writes instead of its inputs and results
    vectors: Mapping[str, int]  # how many neighbours of each input are read at once, by these launches or those
    scratch: Mapping[str, Any]  # bytes of what passes between launches
    rows: Mapping[str, str]  # the dimensions of that
    dense: tuple[str, ...] = ()


# ---- operands ----------------------------------------------------------------------------------------------------


def operands(p: Problem, how: Operands, names: Mapping[str, str | None] = {}) -> Step:
    """Return the launch that writes operands: those of r, new_k, w and new_v that `names` has a name for."""
    vector, sizes = _vector_of_operands(p, how), _operand_sizes(p, how)
    part = _part(p, how)
    keys = p.H // part * (p.K // vector) if how.q or how.k or how.source != "none" else 0
    values = p.H * (p.V // vector) if how.source == "steps" else 0
    parameters, slices, block_rows = _cut(p, vector, keys, values)
    parameters |= {**_operand_parameters(p, how), "PART": part}
    absent = {name: None for name in ("r", "new_k", "w", "new_v") if name not in sizes}
    inputs = {name: getattr(how, name) or None for name in ("q", "k", "v", "g", "A", "dt_bias")}
    bind = {**inputs, **{name: name for name in sizes}, **names, **absent}
    bind |= _strides(p, {name: inputs[name] for name in ("q", "k", "v", "g")})
    return _step(p, "diagonal_operands", parameters, slices, block_rows, bind | _operand_numbers(p, how, slices[0]))


def operand_bytes(p: Problem, how: Operands) -> dict[str, Any]:
    """Return the bytes of the operands that `operands` writes, by its names."""
    return {name: BYTES[storage] * math.prod(shape) for name, (shape, storage) in _operand_sizes(p, how).items()}


def operand_gradients(
    p: Problem, how: Operands, behind: Behind | None = None, dy: str = "dy", names: Mapping[str, str | None] = {}
) -> Schedule:
    """Return the launches of the gradients "d..." of inputs, from grad_r, grad_new_k, grad_w and grad_new_v.

    With a D `behind`, the gradient of v has D dy as well, of the `dy` that the recurrence has.
    """
    vector, entry = _vector_of_operands(p, how, behind, dy), "diagonal_operands_backward"
    is_by_heads = how.source in ("heads", "steps")
    keys = (p.H if how.source == "gates" else _key_heads(p)) * (p.K // vector)
    keys = keys if how.source == "gates" or how.q or how.k else 0
    longest = max([p.K // vector, *([p.V // vector] if how.source == "steps" else [])])
    lanes = min(32, 1 << (longest - 1).bit_length())
    skip = behind.D if behind is not None and how.source == "steps" else ""
    resident = _FEW_RESIDENT_THREADS if skip else _RESIDENT_THREADS
    parameters, slices, block_rows = _cut(p, vector, keys, p.H * lanes if is_by_heads else 0, _LEAST_ROWS, resident)
    parameters |= {
        **_operand_parameters(p, how), "LANES": lanes, "HAS_SKIP": bool(skip), "T_D": p.types.get(skip, "fp32"),
        "SKIP_PER_CHANNEL": bool(skip) and p.op.inputs[skip] == "HV",
    }  # fmt: skip
    targets = {"dq": how.q, "dk": how.k, "dv": how.v, "dg": how.g, "dA_rows": how.A, "ddt_bias_rows": how.dt_bias}
    if how.source == "heads" and "T" not in p.op.inputs[how.g]:
        targets = {**targets, "dg": "", "dg_rows": how.g}
    summed = {buffer: name for buffer, name in targets.items() if name and buffer.endswith("_rows")}
    bind: dict[str, Any] = {"dg_rows": None}
    bind |= {x: None if not name else x if x in summed else f"d{name}" for x, name in targets.items()}
    inputs: dict[str, Any] = {name: getattr(how, name) or None for name in ("v", "g", "A", "dt_bias")}
    inputs |= {"D": skip or None, "dy": dy if skip else None}
    written = {f"grad_{name}" for name in _operand_sizes(p, how)}
    written |= {"grad_w"} if how.source == "gates" else set()  # g is w itself
    bind |= {name: name if name in written else None for name in ("grad_r", "grad_new_k", "grad_w", "grad_new_v")}
    bind |= {**inputs, **names, **_strides(p, {name: inputs[name] for name in ("v", "g", "dy")})}
    bind |= _operand_numbers(p, how, slices[0])
    step = _step(p, entry, parameters, slices, block_rows, bind, ("dg_rows", *targets))
    return _summed(p, step, block_rows, {buffer: (name, p.H) for buffer, name in summed.items()})


def operand_vectors(p: Problem, how: Operands, behind: Behind | None = None, dy: str = "dy") -> dict[str, int]:
    """Return how many neighbours of each input the launches of `operands` read at once, of dy with D `behind`."""
    names = [how.q, how.k, how.v, *([how.g] if how.source == "gates" else [])]
    names += [behind.D, dy] if behind is not None and behind.D and how.source == "steps" else []
    vectors = _vectors(p, names, _vector_of_operands(p, how, behind, dy))
    return {**({how.g: 1} if how.g else {}), **vectors}


def _operand_sizes(p: Problem, how: Operands) -> dict[str, tuple[tuple[Any, ...], str]]:
    keys, values = (p.B, p.T, p.H, p.K), (p.B, p.T, p.H, p.V)
    sizes = {"r": (keys, _io(p))} if how.q else {}
    sizes |= {"new_k": (keys, _io(p))} if how.k or how.source == "gates" else {}
    sizes |= {"w": (keys, _decay_type(p, how))} if how.source in ("heads", "steps") else {}
    return sizes | ({"new_v": (values, _io(p))} if how.source == "steps" else {})


def _operand_parameters(p: Problem, how: Operands) -> dict[str, Parameter]:
    has_values = how.source == "steps"
    return {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V if has_values else p.K, "SOURCE": SOURCES.index(how.source),
        "REPEATS": bool(how.q or how.k),
        "T_IO": _io(p), "T_W": _decay_type(p, how), **_step_parameters(p, how),
    }  # fmt: skip


def _step_parameters(p: Problem, how: Operands) -> dict[str, Parameter]:
    types = {f"T_{name.upper()}": p.types.get(getattr(how, name), "fp32") for name in ("g", "A", "dt_bias")}
    return {
        "HAS_SOFTPLUS": how.has_softplus, "HAS_BIAS": bool(how.dt_bias), "HAS_LIMITS": how.limits is not None, **types,
    }  # fmt: skip


def _operand_numbers(p: Problem, how: Operands, key_slices: Any) -> dict[str, Any]:
    key_heads = max(p.H, 1) if how.source == "gates" else _key_heads(p)
    return {"key_heads": key_heads, "key_slices": key_slices, **_limits(how)}


def _decay_type(p: Problem, how: Operands) -> str:
    return "fp32" if how.source == "steps" else p.types.get(how.g, "fp32")


def _vector_of_operands(p: Problem, how: Operands, behind: Behind | None = None, dy: str = "dy") -> int:
    sizes, names = [p.K], [how.q, how.k]
    if how.source == "steps":
        sizes, names = [*sizes, p.V], [*names, how.v]
        names += [behind.D, dy] if behind is not None and behind.D else []
    if how.source == "gates":
        names.append(how.g)
    return _vector(p, sizes, names)


def _key_heads(p: Problem) -> Any:
    return p.G or max(p.H, 1)


def _part(p: Problem, how: Operands) -> int:
    """Return for how many value heads, which share a key head, a thread writes operands."""
    if how.source == "gates":
        return 1
    heads = p.H // _key_heads(p) if how.q or how.k else p.H
    return next(n for n in range(_MOST_PART, 0, -1) if heads % n == 0)


# ---- behind a recurrence -----------------------------------------------------------------------------------------


def skip_gate(p: Problem, behind: Behind, y: str, out: str = "y") -> Step:
    """Return the launch that makes `out` of `y`: a buffer, or an input."""
    vector = _vector_behind(p, behind, y)
    parameters, slices, block_rows = _cut(p, vector, 0, p.H * (p.V // vector))
    bind = {"y": y, "x": behind.x or None, "D": behind.D or None, "z": behind.z or None, "out": out}
    bind |= _strides(p, {name: bind[name] for name in ("y", "x", "z")})
    return _step(p, "skip_gate", parameters | _behind_parameters(p, behind), slices, block_rows, bind)


def is_behind(step: Step) -> bool:
    """Return whether a launch is that of `skip_gate`."""
    return step.template == "skip_gate"


def over_slots(step: Step, slots: Slots) -> Step:
    """Return a launch of `skip_gate` as one that leaves zeros in tokens without a slot; others as they are."""
    if not is_behind(step):
        return step
    parameters = {**step.parameters, "BOUND_BYTES": slots.bound_bytes, "INDEX_BYTES": slots.index_bytes}
    bind = {**step.bind, "sequences": slots.sequences, "slots": slots.slots, "null_index": slots.null_index}
    return step._replace(template="skip_gate_slots", entry="skip_gate_slots", parameters=parameters, bind=bind)


def skip_gate_gradients(p: Problem, behind: Behind, y: str, names: Mapping[str, str | None] = {}) -> Schedule:
    """Return the launches that make the gradients of y, x, D and z from "dy", which is that of the output.

    Those of inputs are results, "d" and their names. That of y is "dy_inner", or "dy" itself without a gate. `names`
    may have another name for dy, dx or dz, and None for one that is not needed.
    """
    vector, width = _vector_behind(p, behind, y, "dy"), p.H * p.V
    resident = _FEW_RESIDENT_THREADS if behind.D and behind.z else _RESIDENT_THREADS
    parameters, slices, block_rows = _cut(p, vector, 0, p.H * (p.V // vector), _LEAST_ROWS, resident)
    inputs = {"y": y, "x": behind.x or None, "D": behind.D or None, "z": behind.z or None, "grad": "dy"}
    bind: dict[str, Any] = {**inputs, "dy": "dy_inner" if behind.z else None}
    bind |= {f"d{x}": f"d{name}" if name else None for x, name in (("x", behind.D and behind.x), ("z", behind.z))}
    bind |= {"dD_rows": "dD_rows" if behind.D else None, **names}
    bind |= _strides(p, {name: inputs[name] for name in ("y", "x", "z", "grad")})
    parameters |= _behind_parameters(p, behind)
    step = _step(p, "skip_gate_backward", parameters, slices, block_rows, bind, ("dy", "dx", "dz", "dD_rows"))
    return _summed(p, step, block_rows, {"dD_rows": (behind.D, width)} if behind.D else {})


def behind_vectors(p: Problem, behind: Behind, y: str, grad: str = "") -> dict[str, int]:
    """Return how many neighbours of each input the launches behind a recurrence read at once; of `grad` too."""
    return _vectors(p, [y, behind.x, behind.z, behind.D, grad], _vector_behind(p, behind, y, grad))


def _behind_parameters(p: Problem, behind: Behind) -> dict[str, Parameter]:
    return {
        "VALUE_SIZE": p.V, "HAS_SKIP": bool(behind.D), "HAS_GATE": bool(behind.z), "GATE": GATES.index(behind.gate),
        "SKIP_PER_CHANNEL": bool(behind.D) and p.op.inputs[behind.D] == "HV", "T_IO": _io(p),
        "T_D": p.types.get(behind.D, "fp32"),
    }  # fmt: skip


def _vector_behind(p: Problem, behind: Behind, y: str, grad: str = "") -> int:
    return _vector(p, [p.V], [y, behind.x, behind.z, behind.D, grad])


# ---- beside kernels that take steps and decays of heads ------------------------------------------------------------


def head_steps(p: Problem, how: Operands, step: str = "step", w: str = "w") -> Step:
    """Return the launch that writes steps and log-decays of heads, [B, T, H] in float32."""
    parameters, slices, block_rows = _cut_steps(p)
    bind = {"dt": how.g, "A": how.A, "dt_bias": how.dt_bias or None, "step": step, "w": w, **_strides(p, {"dt": how.g})}
    parameters |= _step_parameters(p, how)
    return _step(p, "head_steps", parameters, slices, block_rows, bind | _limits(how))


def head_step_gradients(p: Problem, how: Operands, grad_step: str = "grad_step", grad_w: str = "grad_w") -> Schedule:
    """Return the launches that make the gradients of dt, A and the bias from those of steps and log-decays."""
    parameters, slices, block_rows = _cut_steps(p)
    summed = {"dA_rows": how.A, "ddt_bias_rows": how.dt_bias}
    bind: dict[str, Any] = {
        "dt": how.g, "A": how.A, "dt_bias": how.dt_bias or None, "grad_step": grad_step, "grad_w": grad_w,
        "ddt": f"d{how.g}", **{buffer: buffer if name else None for buffer, name in summed.items()},
        **_strides(p, {"dt": how.g}), **_limits(how),
    }  # fmt: skip
    parameters |= _step_parameters(p, how)
    step = _step(
        p, "head_steps_backward", parameters, slices, block_rows, bind, ("ddt", *summed), template="head_steps"
    )
    return _summed(p, step, block_rows, {buffer: (name, p.H) for buffer, name in summed.items() if name})


def _cut_steps(p: Problem) -> tuple[dict[str, Parameter], tuple[Any, Any], Any]:
    """Return how the kernels of `head_steps` are cut: a thread has a head, and many blocks share the rows."""
    slices = -(-p.H // _STEP_THREADS)
    return {"NUM_THREADS": _STEP_THREADS, "VECTOR": 1}, (0, slices), _rows_of_block(p, slices, _STEP_BLOCKS, 1)


def _limits(how: Operands) -> dict[str, float]:
    least, most = how.limits or (0.0, math.inf)
    return {"least": least, "most": most}


# ---- what all of them share --------------------------------------------------------------------------------------


def _io(p: Problem) -> str:
    return p.types[p.op.names[p.op.lead]]


def _vector(p: Problem, sizes: Iterable[Any], names: Iterable[str]) -> int:
    """Return how many neighbours a thread takes at once: as many as divide heads, and inputs can be read by."""
    known = dict(zip((*p.op.names, "dy"), p.vectors, strict=False))
    most = ACCESS_BYTES // BYTES[_io(p)]
    return math.gcd(most, *sizes, *(known.get(name, most) for name in names))


def _vectors(p: Problem, names: Iterable[str], vector: int) -> dict[str, int]:
    types = {**p.types, "dy": _io(p)}
    known = [name for name in names if name == "dy" or {*"KV"} & {*p.op.inputs.get(name, "")}]
    return {name: min(vector, ACCESS_BYTES // BYTES[types[name]]) for name in known}


def _cut(
    p: Problem, vector: int, first: Any, others: Any, least_rows: int = 1, resident: int = _RESIDENT_THREADS
) -> tuple[dict[str, Parameter], tuple[Any, Any], Any]:
    """Return the parameters of a kernel with blocks of two kinds, how many there are of each, and their rows."""
    threads = min(_THREADS, 32 * -(-max(first, others, 1) // 32))
    slices = -(-first // threads), -(-others // threads)
    blocks = min(resident // threads, MOST_BLOCKS)
    parameters: dict[str, Parameter] = {"VECTOR": vector, "NUM_THREADS": threads, "BLOCKS_PER_SM": blocks}
    return parameters, slices, _rows_of_block(p, sum(slices), blocks, least_rows)


def _rows_of_block(p: Problem, slices: Any, blocks: int, least: int) -> Any:
    """Return how many rows a block has where a multiprocessor has `blocks`; as few as `least` where rows are few."""
    most = blocks * (p.multiprocessors or MULTIPROCESSORS) // max(slices, 1)
    return max(-(-p.B * p.T // max(most, 1)), min(least, p.B * p.T), 1)


def _strides(p: Problem, sources: Mapping[str, str | None]) -> dict[str, Any]:
    """Return what arguments of strides are bound to: those of inputs and of dy, and of buffers that have no gaps."""
    row = p.T * p.H * p.V, p.H * p.V, p.V
    return {
        f"{argument}_strides": name if name is None or name == "dy" or name in p.op.inputs else row
        for argument, name in sources.items()
    }


def _step(
    p: Problem, entry: str, parameters: Mapping[str, Parameter], slices: tuple[Any, Any], block_rows: Any,
    bind: Mapping[str, Any], optional: tuple[str, ...] = (), template: str = "",
) -> Step:  # fmt: skip
    rows = p.B * p.T
    numbers = {"rows": rows, "tokens": p.T, "heads": p.H, "block_rows": block_rows}
    grid = -(-rows // block_rows), sum(slices), 1
    return Step(template or entry, entry, parameters, grid, {**bind, **numbers}, optional=optional)


def _summed(p: Problem, step: Step, block_rows: Any, summed: Mapping[str, tuple[str, Any]]) -> Schedule:
    """Return a launch whose blocks leave rows, which `common.with_sums` adds up: `summed` has inputs and widths.

    Where D is one for a head, channels of rows are added up here, and then heads.
    """
    blocks, sums, bind, scratch = -(-p.B * p.T // block_rows), list[Step](), dict[str, str](), dict[str, Any]()
    for buffer, (name, width) in summed.items():
        is_of_channels = p.op.inputs[name] == "H" and buffer == "dD_rows"
        rows = bind[buffer] = "dD_blocks" if is_of_channels else f"d{name}_rows"
        if is_of_channels:
            scratch["dD_channels"] = 4 * width
            sums.append(common.sum_rows(rows, "dD_channels", 1, blocks, width, "fp32"))
            sums.append(common.sum_rows("dD_channels", f"d{name}", p.H, p.V, 1, p.types[name]))
        scratch[rows] = 4 * blocks * width
    return Schedule((step._replace(bind={**step.bind, **bind}), *sums), scratch=scratch)
