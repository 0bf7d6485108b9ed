"""Which kernels calls of an op will need, and which one `specialize` names: requests, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from rwkv_jit.ahead import layers, stand_ins
from rwkv_jit.call import checks, rule, switches, tensors, tuned
from rwkv_jit.call.rule import Known
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError, brief
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import STORAGE_TYPES, Parameter
from rwkv_jit.ops import timex
from rwkv_jit.pool import arguments
from rwkv_jit.pool.ring import MOST_ENTRIES
from rwkv_jit.schedules import directions, update, wkv4
from rwkv_jit.schedules.build_command import LAYER_OPS, OPS
from rwkv_jit.schedules.layers import LEGAL
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Schedule
from rwkv_jit.schedules.table import ALL
from rwkv_jit.schedules.update import Pool

DIRECTIONS = ("forward", "backward")
UPDATE = "update"  # what stands beside the directions: one or a few tokens over a pool of states


class Calls(NamedTuple):
    """What is told of calls: None is what their op does not have, or its default."""

    op: str
    head_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    arch: str | None = None
    direction: str = DIRECTIONS[0]
    decay: str | None = None
    state_layout: str | None = None
    w_dtype: torch.dtype | None = None
    state_dtype: torch.dtype = torch.float32
    decay_bound: float | None = None
    value_size: int | None = None
    tokens: int | None = None
    batch: int | None = None
    width: int | None = None
    rings: Sequence[tuple[int, int]] = ()
    shards: bool | None = False
    heads: int | None = None
    key_heads: int | None = None
    index_bits: int = 32
    inputs: Mapping[str, torch.dtype | None] = {}
    switches: Mapping[str, Any] = {}


def options_of(name: str) -> tuple[str, ...]:
    """Return the fields of `Calls` that an op has, beside dtypes."""
    op = OPS[name]
    sizes = layers.sizes_of(op) if name in LAYER_OPS else ("tokens", "batch") if name == "timex" else ()
    options = [*sizes, *(["state_dtype"] if name in _OVER_POOLS else [])]
    if name in ALL and op.decays and op.state:
        options += ["decay"]
    if name in ALL and op.has_heads:
        options += ["head_size", "value_size", "decay_bound", "state_layout", "state_dtype", "shards"]
        options += ["heads", "key_heads"] if op.through is not None else []
        options += ["width"] if name in layers.LAYERS else []
    return (*options, "inputs")


_OVER_POOLS = ("shift_mix", "causal_conv1d")
_WIDEST = 2**16  # of layers: kernels of wider ones take minutes to compile
_MANY_HEADS = 64  # where nobody says how many there are
# Of these sizes one stands for each set of kernels that calls of timex take: they differ up to 8 rows, and above 16.
_BATCHES = (*range(1, 9), 16, 32)


# ---- the kernels of all calls ------------------------------------------------------------------------------------


def _schedule(problem: Problem, direction: str) -> Schedule:
    return directions.forward(problem) if direction == "forward" else directions.backward(problem)


def _kernels(schedules: Iterable[Schedule], gpu: Gpu) -> list[kernel.Request]:
    return [request for schedule in schedules for request in schedule.requests(gpu)]


def call_requests(calls: Calls) -> list[kernel.Request]:
    """Return the kernels that calls of an op may need in one direction.

    Long and short ones, with many and few heads, for gradients and not; some of the kernels may be equal.
    """
    op, direction = calls.op, calls.direction
    checks.check_name("op", op, tuple(OPS))
    checks.check_name("direction", direction, (*DIRECTIONS, UPDATE))
    entry = OPS[op]
    types, state_type = _types(entry, calls), _storage("state_dtype", calls.state_dtype)
    _check_counts(calls)
    if not isinstance(calls.index_bits, int) or calls.index_bits not in (32, 64):
        raise ValueError(f"index_bits: expected 32 or 64, got {brief(calls.index_bits)}")
    if direction == UPDATE and not entry.state:
        raise ValueError(f"updates: {op} has no calls over a pool of states")
    _check_width(calls)
    if op in LAYER_OPS:
        return _layer_requests(calls, types, state_type)
    several = _switches(entry, calls.switches)
    if not entry.has_heads:
        return _requests_without_heads(calls, types)
    if calls.head_size is None:
        raise TypeError(f"head_sizes: {op} needs some, got None")
    w_type, requests = types.get("w", "fp32"), list[kernel.Request]()
    for stand_in in [_stand_in(calls, types, state_type, traits) for traits in several]:
        if direction == UPDATE:
            requests += _pool_requests(stand_in, calls, w_type)
        else:
            knowing = _knowing(calls.arch)
            problems = stand_ins.problems(stand_in, direction, knowing)
            problems += stand_ins.shard_problems(stand_in, direction, knowing) if calls.shards else []
            requests += _kernels((_schedule(p, direction) for p in problems), stand_in.gpu)
        if calls.width is not None:
            requests += layers.requests(stand_in, calls.width, w_type, direction)
    return requests


def _pool_requests(stand_in: Problem, calls: Calls, w_type: str) -> list[kernel.Request]:
    """Return the kernels of calls over a pool, and of those over rings."""
    knowing, index_bytes, op = _knowing(calls.arch), calls.index_bits // 8, stand_in.op
    is_through = op.through is not None
    of_w = ["fp32", w_type] if "w" in op.inputs and not is_through else []
    # An input may have one number of a head.
    of_heads = {name: dims for name, dims in op.also.items() if not dims.startswith("(")}
    ops = [op, *([replace(op, inputs={**op.inputs, **of_heads})] if of_heads else [])]
    schedules = list[Schedule]()
    for each in ops:
        p = stand_in._replace(op=each, training=False)
        if is_through:  # a bound of a gate chooses no chunks over a pool
            p = p._replace(decay_bound=None)
        schedules += stand_ins.updates(p, of_w or ["fp32"], index_bytes)
        schedules += stand_ins.varlens(stand_ins.pooled_problems(p, knowing), ["void", *of_w], index_bytes)
        for ring in calls.rings:
            schedules += stand_ins.replays(p, of_w or ["fp32"], index_bytes, *ring)
    return _kernels(schedules, stand_in.gpu)


def _requests_without_heads(calls: Calls, types: Mapping[str, str]) -> list[kernel.Request]:
    """Return the kernels of wkv4 or timex."""
    op, arch, direction = calls.op, calls.arch, calls.direction
    if calls.shards:
        raise ValueError(f"shards: {op} has no calls over parts of sequences")
    if calls.state_dtype != torch.float32:
        whose = "timex has no states" if op == "timex" else f"states of {op} are torch.float32"
        raise TypeError(f"state_dtype: {whose}, got {calls.state_dtype}")
    _refuse(
        op, head_size=calls.head_size, value_size=calls.value_size, state_layout=calls.state_layout,
        decay_bound=calls.decay_bound, rings=tuple(calls.rings) or None,
    )  # fmt: skip
    if op == "timex":
        _refuse(op, decay=calls.decay)
        batches = _BATCHES if calls.batch is None else [calls.batch]
        problems = [_timex_problem(types, arch, direction, "auto", calls.tokens, rows) for rows in batches]
    elif direction == UPDATE:
        steps = [_wkv4_problem(types, arch, "recurrent", calls.decay, tokens=count) for count in (1, 2)]
        return _kernels((update.schedule(p, Pool(1, 0)) for p in steps), steps[0].gpu)
    else:
        problems = [
            _wkv4_problem(types, arch, "auto", calls.decay, multiprocessors, length)
            # Without tokens the state's gradient passes through another kernel.
            for multiprocessors, length in ((None, stand_ins.LONG), (stand_ins.MANY, stand_ins.LONG), (None, 0))
        ]
    return _kernels((_schedule(p, direction) for p in problems if p.backend != "fft"), problems[0].gpu)


def _layer_requests(calls: Calls, types: Mapping[str, str], state_type: str) -> list[kernel.Request]:
    """Return the kernels of one function of a layer's small work."""
    op, entry, names = calls.op, OPS[calls.op], layers.sizes_of(OPS[calls.op])
    _refuse(
        op, value_size=calls.value_size, decay=calls.decay, state_layout=calls.state_layout,
        decay_bound=calls.decay_bound, rings=tuple(calls.rings) or None, shards=calls.shards or None,
        **({"head_size": calls.head_size} if "head_size" not in names else {}),
    )  # fmt: skip
    heads = _MANY_HEADS if calls.heads is None else calls.heads
    sizes = {name: heads if name == "heads" else getattr(calls, name) for name in names}
    for name, size in sizes.items():
        if size is None:
            raise TypeError(f"{name}s: {op} needs some, got None")
    _check_sizes(**sizes)
    gpu = Gpu(*tensors.targets(calls.arch))
    return [
        request
        for traits in _switches(entry, calls.switches)
        for request in layers.requests_of(
            entry, gpu, types, sizes, dict(traits), calls.direction, state_type, calls.index_bits // 8
        )
    ]


def _knowing(arch: str | None) -> list[stand_ins.Knowing]:
    """Return what calls may know: the choices for this GPU; or of an architecture none, and those for each GPU."""
    if arch is None and torch.cuda.is_available():
        return [partial(rule.known, torch.cuda.current_device())]
    several = [(), *tuned.on_arch(tensors.targets(arch)[0])]
    return [partial(Known, choices, lambda place: True) for choices in several]


# ---- one kernel --------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """The kernel that `specialize` names, and what it is for."""

    problem: Problem
    schedule: Schedule
    request: kernel.Request


def named(
    calls: Calls, backend: str, chunk_len: int | None, num_threads: int | None, parameters: Mapping[str, Parameter]
) -> Named:
    """Check everything and return the kernel of the arguments of `specialize`, before it is found or compiled.

    `parameters` are switches of the op and constants of the template.
    """
    op, arch, direction = calls.op, calls.arch, calls.direction
    checks.check_name("op", op, tuple(ALL))
    checks.check_name("direction", direction, DIRECTIONS)
    entry = ALL[op]
    _check_counts(calls)
    chosen = {name: value for name, value in parameters.items() if name in entry.traits}
    parameters = {name: value for name, value in parameters.items() if name not in entry.traits}
    types, others = _with_parameters(entry, _types(entry, calls), parameters)
    if entry.has_heads:
        layout, state_type = parameters.get("state_layout"), "fp32"
        calls = calls._replace(state_layout=None if layout is None else str(layout))
        traits = _switches(entry, {**entry.traits, **chosen})[0]
        if others.get("T_STATE") in STORAGE_TYPES:
            state_type = str(others.pop("T_STATE"))
        others.pop("STATE_LAYOUT", None)
        stand_in = _stand_in(calls, types, state_type, traits, backend, chunk_len, num_threads)
        stand_in = stand_in._replace(T=stand_ins.LONG, training=True)
        problem = rule.resolved(stand_in, _knowing(arch)[0])
    else:
        _refuse(
            op, head_size=calls.head_size, value_size=calls.value_size, chunk_len=chunk_len, num_threads=num_threads
        )
        if op == "wkv4":
            problem = _wkv4_problem(types, arch, backend, calls.decay)
        else:
            checks.check_name("t_w", parameters.get("t_w", types["w"]), STORAGE_TYPES)
            _refuse(op, decay=calls.decay)
            rows = _BATCHES[-1] if calls.batch is None else calls.batch
            problem = _timex_problem(types, arch, direction, backend, calls.tokens, rows)
            if problem.backend == "fft":
                raise UnsupportedConfigError(
                    f"backend: 'fft' has no kernel, and calls of {calls.tokens} tokens take it"
                )
    schedule = _schedule(problem, direction)
    step = schedule.launches[schedule.main]
    step = step._replace(parameters={**step.parameters, **others})
    return Named(problem, schedule, step.request(problem.gpu))


def _with_parameters(
    op: Op, types: Mapping[str, str], given: Mapping[str, Parameter]
) -> tuple[dict[str, str], dict[str, Parameter]]:
    """Return types with those of inputs that parameters name, and the parameters that are none of these.

    A type that is none is left among the parameters, which the template refuses.
    """
    types, others = dict(types), dict[str, Parameter]()
    constants = {**op.constants, **op.backward_constants}
    for name, value in given.items():
        parameter = name.upper()
        if op.has_heads and isinstance(value, float):  # templates of one's own may take one; an op does not
            raise TypeError(f"parameter {parameter}: expected an int, a bool or an identifier, got {value!r}")
        if parameter in constants:
            raise ValueError(f"parameter {parameter}: is no choice for {op.name}, got {value!r}")
        if value in STORAGE_TYPES and parameter in [f"T_{wide.upper()}" for wide in op.wide if wide in op.inputs]:
            types[parameter[2:].lower()] = str(value)
        else:
            others[parameter] = value
    return types, others


# ---- wkv4 and timex ----------------------------------------------------------------------------------------------


def _wkv4_problem(
    types: Mapping[str, str], arch: str | None, backend: str, decay: str | None, multiprocessors: int | None = None,
    tokens: int = stand_ins.LONG,
) -> Problem:  # fmt: skip
    """Return the problem of calls of wkv4, of one channel."""
    checks.check_name("backend", backend, tuple(name for name in ALL["wkv4"].backends if name != "reference"))
    checks.check_name("decay", decay or "raw", ALL["wkv4"].decays)
    p = Problem(
        ALL["wkv4"], Gpu(*tensors.targets(arch), multiprocessors), types, T=tokens, C=1, training=True,
        has_initial_state=True, has_final_state=True, decay=decay or "raw", backend=backend,
    )  # fmt: skip
    return p._replace(backend=wkv4.backend_of(p))


def _timex_problem(
    types: Mapping[str, str], arch: str | None, direction: str, backend: str, tokens: int | None, batch: int
) -> Problem:
    """Return the problem of calls of timex with contiguous inputs, of one channel."""
    if tokens is None:
        raise TypeError("tokens: expected a number for timex, got None")
    _check_sizes(tokens=tokens, batch=batch)
    checks.check_name("backend", backend, ALL["timex"].backends)
    gpu = Gpu(*tensors.targets(arch))
    p = Problem(ALL["timex"], gpu, types, B=batch, T=tokens, C=1, N=batch, training=True, backend=backend)
    return p._replace(backend=timex.choose(p, direction))


# ---- checks ------------------------------------------------------------------------------------------------------


def _stand_in(
    calls: Calls, types: Mapping[str, str], state_type: str, traits: tuple[tuple[str, Any], ...],
    backend: str = "auto", chunk_len: int | None = None, num_threads: int | None = None,
) -> Problem:  # fmt: skip
    """Check everything and return the problem of calls of an op with heads, before the rule has chosen."""
    entry, head_size, value_size = ALL[calls.op], calls.head_size, calls.value_size
    decay = entry.decay if calls.decay is None else calls.decay
    state_layout = entry.state_layout if calls.state_layout is None else calls.state_layout
    bound = dict(traits).get("lower_bound") if calls.decay_bound is None else calls.decay_bound
    options: dict[str, Any] = {
        "decay": decay, "decay_bound": bound, "state_layout": state_layout, "backend": backend,
        "num_threads": num_threads,
    }  # fmt: skip
    checks.check_options(entry, {**options, "scale": 1.0, "checkpoint_interval": 1, "chunk_len": chunk_len})
    if backend == "reference":
        raise UnsupportedConfigError("backend: the reference is plain torch and has no kernel")
    if head_size is None:
        raise TypeError(f"head_size: {calls.op} needs one, got None")
    value_size = head_size if value_size is None else value_size
    _check_sizes(head_size=head_size, value_size=value_size)
    heads, key_heads = 1, 1
    if entry.through is not None:
        heads = _MANY_HEADS if calls.heads is None else calls.heads
        key_heads = heads if calls.key_heads is None else calls.key_heads
    if "a_log" in entry.optional and "a_log" not in types:
        for name, is_there in (("dt_bias", "dt_bias" in types), ("lower_bound", dict(traits).get("lower_bound"))):
            if is_there:
                raise ValueError(f"{name}: needs A_log among the inputs too")
    storage, (narrow, _) = _storage("dtype", calls.dtype), switches.current()
    return Problem(  # with states at both ends, which take the most kernels
        entry, Gpu(*tensors.targets(calls.arch)), types, H=heads, K=head_size, V=value_size, G=key_heads,
        state_type=state_type, is_chosen=False, chunk_len=chunk_len or 0, has_initial_state=True, has_final_state=True,
        is_narrow=storage in narrow, traits=traits, **options,
    )  # fmt: skip


def _check_counts(calls: Calls) -> None:
    """Check how many tokens and rows there are, how many heads of keys and of values, and entries of rings."""
    op, (heads, key_heads) = calls.op, (calls.heads, calls.key_heads)
    for name, value in (("tokens", calls.tokens), ("batch", calls.batch)):
        if op != "timex" and value is not None:
            raise ValueError(f"{name}: is only for timex, the kernels of {op} take any; got {value!r}")
    for name, count in (("heads", heads), ("key_heads", key_heads)):
        if count is not None:
            if name not in options_of(op):
                raise ValueError(f"{name}: kernels of {op} do not depend on how many there are, got {count!r}")
            _check_sizes(**{name: count})
    for ring in calls.rings:
        if not isinstance(ring, (tuple, list)) or len(ring) != 2:
            raise TypeError(f"rings: expected a length and a number of speculative tokens for each, got {brief(ring)}")
        length = arguments.count("rings", ring[0], 1, MOST_ENTRIES)
        arguments.count("rings", ring[1], most=MOST_ENTRIES - length)
    if key_heads is not None and heads is None:
        raise TypeError(f"heads: expected a number where key_heads is given, got None and {key_heads}")
    if key_heads is not None and heads is not None and heads % key_heads:
        raise ValueError(f"key_heads: expected a divisor of the {heads} heads, got {key_heads}")


def _check_width(calls: Calls) -> None:
    """Check the channels of a layer."""
    width, several = calls.width, list(layers.LAYERS)
    if calls.op in LAYER_OPS:
        several = [name for name in LAYER_OPS if "width" in options_of(name)]
    if width is not None:
        if calls.op not in several:
            raise ValueError(f"width: is only for {', '.join(several)}, got {width!r}")
        _check_sizes(width=width)
        if width > _WIDEST:
            raise UnsupportedConfigError(f"width: expected at most {_WIDEST}, got {width}")


def _switches(op: Op, given: Mapping[str, Any]) -> list[tuple[tuple[str, Any], ...]]:
    """Check switches and return all of them by name: one that is on or off and not named stands for both."""
    for name, value in given.items():
        default = op.traits[name]
        if isinstance(default, bool):
            given = {**given, name: checks.check_flag(name, value)}
        elif name in LEGAL:
            if value is not None or default is not None:
                checks.check_name(name, value, tuple(LEGAL[name]))
        elif isinstance(default, int) or name == "state_len":
            if value is not None or default is not None:
                checks.check_count(name, value)
        elif value is not None:
            checks.check_number(name, value)
    several = [
        [given[name]] if name in given else [False, True] if isinstance(default, bool) else [default]
        for name, default in op.traits.items()
    ]
    return [tuple(zip(op.traits, values, strict=True)) for values in product(*several)]


def _types(op: Op, calls: Calls) -> dict[str, str]:
    """Return the storage types of the inputs of calls."""
    storage = _storage("dtype", calls.dtype)
    wide = storage if calls.w_dtype is None else _storage("w_dtype", calls.w_dtype)
    legal = [x for x, name in zip(op.public_names, op.names, strict=True) if name in op.wide or name in op.optional]
    for name in calls.inputs:
        checks.check_name("inputs", name, tuple(legal) or ("nothing",))
    several = {
        name: None if dtype is None else _storage(f"inputs[{name!r}]", dtype) for name, dtype in calls.inputs.items()
    }
    return op.types_of(storage, wide, several)


def _storage(name: str, dtype: torch.dtype) -> str:
    if not isinstance(dtype, torch.dtype) or dtype not in tensors.STORAGE:
        raise TypeError(f"{name}: expected {' or '.join(map(str, tensors.STORAGE))}, got {dtype}")
    return tensors.STORAGE[dtype]


def _refuse(op: str, **unwanted: Any) -> None:
    for name, value in unwanted.items():
        if value is not None:
            raise ValueError(f"{name}: {op} has none, got {value!r}")


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")
