"""Which kernels calls of an op will need, and which one `specialize` names: requests, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from rwkv_jit.ahead import layers
from rwkv_jit.call import checks, rule, switches, tensors, tuned
from rwkv_jit.call.plan import DTYPES
from rwkv_jit.call.rule import Known
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import STORAGE_TYPES, Parameter
from rwkv_jit.ops import timex, wide_keys
from rwkv_jit.schedules import directions, replay, segments, update, varlen, wkv4
from rwkv_jit.schedules.common import Case
from rwkv_jit.schedules.problem import STATE, Op, Problem
from rwkv_jit.schedules.replay import Ring
from rwkv_jit.schedules.schedule import Schedule
from rwkv_jit.schedules.table import OPS
from rwkv_jit.schedules.update import Pool
from rwkv_jit.schedules.varlen import Varlen

# What is told of calls to ops that have it, beside dtypes.
_OF_HEADS = ("head_size", "value_size", "decay", "decay_bound", "state_layout", "state_dtype", "shards")
OPTIONS = {
    **{name: _OF_HEADS for name, op in OPS.items() if op.has_heads},
    **{name: (*_OF_HEADS, "width") for name in layers.LAYERS},
    "wkv4": ("decay",), "timex": ("tokens", "batch"),
}  # fmt: skip
DIRECTIONS = ("forward", "backward")
UPDATE = "update"  # what stands beside the directions: one or a few tokens over a pool of states
# Of all lengths one stands for those that the tensor cores take, in segments too, one for those that few heads take in
# the kernels for large ones, one for those of a few chunks, one for those that are a short chunk, and one for the
# others; of all GPUs one that has too few heads whatever a call has,
# for calls of one length and for those of uneven ones that are packed. Where the number of multiprocessors is not
# known, calls have heads enough.
_LONG = 2**16
_OF_FEW_HEADS = 512
_LENGTHS = (_LONG, _OF_FEW_HEADS, 128, rule.SHORT_TOKENS, 1)
# Of those without initial states, which have kernels of their own; their final states are float32.
_STATELESS_LENGTHS = (32, rule.SHORT_TOKENS)
_MULTIPROCESSORS = 2**16
_WIDEST = 2**16  # of layers: kernels of wider ones take minutes to compile
# Of these sizes one stands for each set of kernels that calls of timex take: they differ up to 8 rows, and above 16.
_BATCHES = (*range(1, 9), 16, 32)


# ---- the kernels of all calls ------------------------------------------------------------------------------------


class _Calls(NamedTuple):
    """Calls of an op that differ in their lengths, in the number of their heads, and in whether they have gradients."""

    asked: Problem  # whose backend and geometry are not chosen yet; states at both ends take the most kernels
    case: Case  # what the rule looks at of a long one with many heads and gradients

    def problem(self, known: Known, case: Case) -> Problem:
        """Return the problem of one of them, by the rule of calls."""
        gpu = self.asked.gpu._replace(multiprocessors=case.multiprocessors and case.multiprocessors())
        made = rule.chosen(self.asked.backend, case, lambda: gpu, lambda: known)._asdict()
        made["chunk_len"] = made["chunk_len"] or 0
        return self.asked._replace(
            gpu=gpu, K=case.head_size, T=case.tokens, training=case.training, is_packed=case.is_packed, **made
        )

    def problems(self, direction: str, several: Sequence[Known]) -> list[Problem]:
        """Return the problems that stand for all of them: calls may know one of several."""
        purposes = (True, False) if direction == "forward" else (True,)  # for gradients, and not
        few_heads: dict[str, Any] = {"blocks": 1, "multiprocessors": lambda: _MULTIPROCESSORS}
        made = [
            self.problem(known, case._replace(training=training, **of_heads))
            for tokens in _LENGTHS
            for case in self.in_parts(self.case._replace(tokens=tokens))
            for of_heads in ({}, few_heads, few_heads | {"is_packed": True, "longest": tokens})
            for training, known in product(purposes, several)
        ]
        made += [
            self.problem(known, case._replace(training=training))._replace(has_initial_state=False)
            for tokens in (_STATELESS_LENGTHS if self.asked.state_type == "fp32" else ())
            for case in self.in_parts(self.case._replace(tokens=tokens))
            for training, known in product(purposes, several)
        ]
        if direction == "backward":
            of_states = [p for p in made if directions.has_state_alone(p)]
            made += [p._replace(wanted=(STATE,)) for p in of_states]
        return made

    def pooled_problems(self, several: Sequence[Known]) -> list[Problem]:
        """Return the problems that stand for sequences of any lengths over a pool, longer ones than updates take."""
        asked = self._replace(asked=self.asked._replace(is_narrow=False))
        case = self.case._replace(dtype=self.asked.types["v"], training=False, is_packed=True)
        few_heads: dict[str, Any] = {"blocks": 1, "multiprocessors": lambda: _MULTIPROCESSORS}
        return [
            asked.problem(known, case._replace(tokens=tokens, **of_heads))
            for tokens in (_LONG, _OF_FEW_HEADS, rule.SHORT_TOKENS)
            for of_heads in ({"multiprocessors": None}, few_heads, few_heads | {"longest": tokens})
            for known in several
        ]

    def shard_problems(self, direction: str, several: Sequence[Known]) -> list[Problem]:
        """Return the problems that stand for calls over parts of sequences, whose kernels pause for other parts."""
        calls = self._replace(asked=self.asked._replace(state_type="fp32", state_layout="vk"))
        made = [
            calls.problem(known, case._replace(training=True))._replace(training=training)
            for case in self.in_parts(self.case)
            for training, known in product((True, False) if direction == "forward" else (True,), several)
        ]
        return [p._replace(backend="segments", is_shard=True) for p in made if segments.takes_shard(p)]

    def in_parts(self, case: Case) -> list[Case]:
        """Return the calls that are made of one of these, where its keys go in parts."""
        if case.op.family != "diagonal":
            return [case]
        sizes = wide_keys.part_sizes(self.asked.backend, case, lambda: self.asked.gpu)
        return [case._replace(head_size=size) for size in dict.fromkeys(sizes)]


def _schedule(problem: Problem, direction: str) -> Schedule:
    return directions.forward(problem) if direction == "forward" else directions.backward(problem)


def call_requests(
    op: str, head_size: int | None, dtype: torch.dtype, arch: str | None, direction: str, decay: str | None,
    state_layout: str | None, w_dtype: torch.dtype | None, state_dtype: torch.dtype, decay_bound: float | None,
    value_size: int | None = None, tokens: int | None = None, batch: int | None = None, width: int | None = None,
    rings: Sequence[tuple[int, int]] = (), shards: bool | None = False,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels that calls of an op may need in one direction.

    Long and short ones, with many and few heads, for gradients and not; some of the kernels may be equal.
    """
    checks.check_name("op", op, tuple(OPS))
    entry, w_dtype = OPS[op], dtype if w_dtype is None else w_dtype
    types = _types(entry, dtype) | dict.fromkeys(_wide(entry), _storage("w_dtype", w_dtype))
    state_type = _storage("state_dtype", state_dtype)
    _refuse_lengths(op, tokens, batch)
    if direction == UPDATE and not entry.state:
        raise ValueError(f"updates: {op} has no calls over a pool of states")
    if width is not None:
        if op not in layers.LAYERS:
            raise ValueError(f"width: is only for {', '.join(layers.LAYERS)}, got {width!r}")
        _check_sizes(width=width)
        if width > _WIDEST:
            raise UnsupportedConfigError(f"width: expected at most {_WIDEST}, got {width}")
    if entry.has_heads:
        if head_size is None:
            raise TypeError(f"head_sizes: {op} needs some, got None")
        way = DIRECTIONS[0] if direction == UPDATE else direction
        calls = _checked(
            op, head_size, value_size, dtype, arch, way, "auto", decay, decay_bound, state_layout, None, None
        )
        calls = calls._replace(asked=calls.asked._replace(types=types, state_type=state_type))
        w_type = _storage("w_dtype", w_dtype)
        of_layer = [] if width is None else layers.requests(calls.asked, width, w_type, direction)
        if direction == UPDATE:
            pooled = calls.pooled_problems(_known(arch))
            of_rings = [request for each in rings for request in _replay_requests(calls.asked, w_type, *each)]
            return [*_update_requests(calls.asked, w_type), *_varlen_requests(pooled, w_type), *of_layer, *of_rings]
        problems = calls.problems(direction, _known(arch))
        if shards:
            problems += calls.shard_problems(direction, _known(arch))
    else:
        of_layer = []
        if shards:
            raise ValueError(f"shards: {op} has no calls over parts of sequences")
        if state_dtype != torch.float32:
            whose = "timex has no states" if op == "timex" else f"states of {op} are torch.float32"
            raise TypeError(f"state_dtype: {whose}, got {state_dtype}")
        _refuse(op, head_size=head_size, value_size=value_size, state_layout=state_layout, decay_bound=decay_bound)
        _refuse(op, rings=tuple(rings) or None)
        if op == "timex":
            _refuse(op, decay=decay)
            batches = _BATCHES if batch is None else [batch]
            problems = [_timex_problem(types, arch, direction, "auto", tokens, rows) for rows in batches]
        elif direction == UPDATE:
            made = [_wkv4_problem(types, arch, DIRECTIONS[0], "recurrent", decay, tokens=count) for count in (1, 2)]
            return [request for p in made for request in wkv4.update(p, {}).requests(p.gpu)]
        else:
            problems = [
                _wkv4_problem(types, arch, direction, "auto", decay, multiprocessors, length)
                # Without tokens the state's gradient passes through another kernel.
                for multiprocessors, length in ((None, _LONG), (_MULTIPROCESSORS, _LONG), (None, 0))
            ]
    of_op = [request for p in problems if p.backend != "fft" for request in _schedule(p, direction).requests(p.gpu)]
    return [*of_op, *of_layer]


def _update_requests(p: Problem, w_type: str) -> list[kernel.Request]:
    """Return the kernels of updates: of one token and of several, with few blocks and many."""
    asked = product(
        (1, 2), (_MULTIPROCESSORS, None), dict.fromkeys(("fp32", w_type) if "w" in p.op.inputs else ("fp32",)),
        (False,) if p.state_type == "fp32" else (False, True),
    )  # fmt: skip
    return [
        request
        for tokens, multiprocessors, w0_type, is_stochastic in asked
        for own in [p._replace(T=tokens, gpu=p.gpu._replace(multiprocessors=multiprocessors))]
        for request in update.schedule(own, Pool(1, 0, w0_type=w0_type, is_stochastic=is_stochastic)).requests(p.gpu)
    ]


def _replay_requests(p: Problem, w_type: str, length: int, drafts: int) -> list[kernel.Request]:
    """Return the kernels of a ring: of steps, of drafts, of commits and of flushes, with few blocks and many."""
    checks.check_count("rings", length)
    step, ring = (1, False), Ring(length, length + drafts, length)
    phases = [step, *dict.fromkeys([(1, True), (drafts, True)] if drafts else []), (0, False)]
    asked = product(
        phases, (_MULTIPROCESSORS, None), dict.fromkeys(("fp32", w_type) if "w" in p.op.inputs else ("fp32",)),
        (False,) if p.state_type == "fp32" else (False, True),
    )  # fmt: skip
    return [
        request
        for (tokens, is_draft), multiprocessors, w0_type, is_stochastic in asked
        for own in [p._replace(T=tokens, gpu=p.gpu._replace(multiprocessors=multiprocessors))]
        for pool in [Pool(1, 0, w0_type=w0_type, is_stochastic=is_stochastic and not is_draft)]
        for request in replay.schedule(own, pool, ring._replace(is_draft=is_draft), tokens).requests(p.gpu)
    ]


def _varlen_requests(several: Sequence[Problem], w_type: str) -> list[kernel.Request]:
    """Return the kernels of sequences of any lengths, without w0 and with one."""
    w0_types = dict.fromkeys(("void", "fp32", w_type) if "w" in several[0].op.inputs else ("void",))
    asked = product(
        several, w0_types, (4, 8), (False,) if several[0].state_type == "fp32" else (False, True), (False, True)
    )
    return [
        request
        for p, w0_type, bound_bytes, is_stochastic, has_few_tokens in asked
        for pool in [Pool(1, 0, w0_type="fp32" if w0_type == "void" else w0_type, is_stochastic=is_stochastic)]
        for request in varlen.schedule(
            p._replace(w0_type=w0_type), pool, Varlen(1, 0, bound_bytes, has_few_tokens)
        ).requests(p.gpu)
    ]


def _known(arch: str | None) -> list[Known]:
    """Return what calls may know: the choices for this GPU; or of an architecture none, and those for each GPU."""
    if arch is None and torch.cuda.is_available():
        return [rule.known(torch.cuda.current_device())]
    several = [(), *tuned.on_arch(tensors.targets(arch)[0])]
    return [Known(choices, lambda place: True) for choices in several]


# ---- one kernel --------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """The kernel that `specialize` names, and what it is for."""

    problem: Problem
    schedule: Schedule
    request: kernel.Request


def named(
    op: str, head_size: int | None, value_size: int | None, dtype: torch.dtype, arch: str | None, direction: str,
    backend: str, decay: str | None, chunk_len: int | None, num_threads: int | None, tokens: int | None,
    batch: int | None, parameters: Mapping[str, Parameter],
) -> Named:  # fmt: skip
    """Check everything and return the kernel of the arguments of `specialize`, before it is found or compiled."""
    checks.check_name("op", op, tuple(OPS))
    entry = OPS[op]
    _refuse_lengths(op, tokens, batch)
    if entry.has_heads:
        layout = parameters.get("state_layout")
        calls = _checked(
            op, head_size, value_size, dtype, arch, direction, backend, decay, None,
            None if layout is None else str(layout), chunk_len, num_threads,
        )  # fmt: skip
        asked = calls.asked
        types, others = _with_parameters(entry, asked.types, parameters)
        asked = asked._replace(types=types)
        if others.get("T_STATE") in STORAGE_TYPES:
            asked = asked._replace(state_type=str(others.pop("T_STATE")))
        others.pop("STATE_LAYOUT", None)
        calls = calls._replace(asked=asked)
        if backend == "split" and rule.is_held_by_blocks(calls.case, lambda: asked.gpu):
            calls = calls._replace(asked=asked._replace(backend="chunked"))  # the same kernels
        problem = calls.problem(_known(arch)[0], calls.case)
    else:
        _refuse(op, head_size=head_size, value_size=value_size, chunk_len=chunk_len, num_threads=num_threads)
        types, others = _with_parameters(entry, _types(entry, dtype), parameters)
        if op == "wkv4":
            problem = _wkv4_problem(types, arch, direction, backend, decay)
        else:
            checks.check_name("t_w", parameters.get("t_w", types["w"]), STORAGE_TYPES)
            _refuse(op, decay=decay)
            problem = _timex_problem(types, arch, direction, backend, tokens, _BATCHES[-1] if batch is None else batch)
            if problem.backend == "fft":
                raise UnsupportedConfigError(f"backend: 'fft' has no kernel, and calls of {tokens} tokens take it")
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
        if value in STORAGE_TYPES and parameter in [f"T_{wide.upper()}" for wide in _wide(op)]:
            types[parameter[2:].lower()] = str(value)
        else:
            others[parameter] = value
    return types, others


# ---- wkv4 and timex ----------------------------------------------------------------------------------------------


def _wkv4_problem(
    types: Mapping[str, str], arch: str | None, direction: str, backend: str, decay: str | None,
    multiprocessors: int | None = None, tokens: int = _LONG,
) -> Problem:  # fmt: skip
    """Return the problem of calls of wkv4, of one channel."""
    checks.check_name("direction", direction, DIRECTIONS)
    checks.check_name("backend", backend, tuple(name for name in OPS["wkv4"].backends if name != "reference"))
    checks.check_name("decay", decay or "raw", OPS["wkv4"].decays)
    gpu = Gpu(*tensors.targets(arch), multiprocessors)
    return Problem(
        OPS["wkv4"], gpu, types, T=tokens, C=1, training=True, has_initial_state=True, has_final_state=True,
        decay=decay or "raw", backend=wkv4.backend_of(backend, 1, tokens, multiprocessors or 0),
    )  # fmt: skip


def _timex_problem(
    types: Mapping[str, str], arch: str | None, direction: str, backend: str, tokens: int | None, batch: int
) -> Problem:
    """Return the problem of calls of timex with contiguous inputs, of one channel."""
    if tokens is None:
        raise TypeError("tokens: expected a number for timex, got None")
    _check_sizes(tokens=tokens, batch=batch)
    checks.check_name("direction", direction, DIRECTIONS)
    checks.check_name("backend", backend, OPS["timex"].backends)
    gpu = Gpu(*tensors.targets(arch))
    taken = timex.choose(backend, DTYPES[types["k"]], batch, tokens, lambda: gpu, direction)
    return Problem(OPS["timex"], gpu, types, B=batch, T=tokens, C=1, N=batch, training=True, backend=taken)


# ---- checks ------------------------------------------------------------------------------------------------------


def _checked(
    op: str, head_size: int | None, value_size: int | None, dtype: torch.dtype, arch: str | None, direction: str,
    backend: str, decay: str | None, decay_bound: float | None, state_layout: str | None, chunk_len: int | None,
    num_threads: int | None,
) -> _Calls:  # fmt: skip
    """Check everything and return calls whose inputs are all of one type."""
    entry = OPS[op]
    checks.check_name("direction", direction, DIRECTIONS)
    decay = entry.decay if decay is None else decay
    state_layout = entry.state_layout if state_layout is None else state_layout
    checks.check_options(entry, 1.0, decay, decay_bound, state_layout, 1, chunk_len, num_threads, backend)
    if backend == "reference":
        raise UnsupportedConfigError("backend: the reference is plain torch and has no kernel")
    if head_size is None:
        raise TypeError(f"head_size: {op} needs one, got None")
    value_size = head_size if value_size is None else value_size
    _check_sizes(head_size=head_size, value_size=value_size)
    storage, (narrow, _) = _storage("dtype", dtype), switches.current()
    asked = Problem(
        entry, Gpu(*tensors.targets(arch)), _types(entry, dtype), K=head_size, V=value_size, G=1, decay=decay,
        state_layout=state_layout, backend=backend, num_threads=num_threads, has_initial_state=True,
        has_final_state=True, is_narrow=storage in narrow,
    )  # fmt: skip
    of_products = "fp16" if asked.is_narrow else storage
    case = Case(entry, of_products, head_size, value_size, _LONG, decay, decay_bound, chunk_len, num_threads)
    return _Calls(asked, case)


def _types(op: Op, dtype: torch.dtype) -> dict[str, str]:
    """Return the storage types of inputs that are all of one dtype."""
    return dict.fromkeys(op.names, _storage("dtype", dtype))


def _storage(name: str, dtype: torch.dtype) -> str:
    if not isinstance(dtype, torch.dtype) or dtype not in tensors.STORAGE:
        raise TypeError(f"{name}: expected {' or '.join(map(str, tensors.STORAGE))}, got {dtype}")
    return tensors.STORAGE[dtype]


def _wide(op: Op) -> list[str]:
    """Return the inputs that may be float32 beside others of 16 bits."""
    return [name for name in op.wide if name in op.inputs]


def _refuse(op: str, **unwanted: Any) -> None:
    for name, value in unwanted.items():
        if value is not None:
            raise ValueError(f"{name}: {op} has none, got {value!r}")


def _refuse_lengths(op: str, tokens: int | None, batch: int | None) -> None:
    for name, value in (("tokens", tokens), ("batch", batch)):
        if op != "timex" and value is not None:
            raise ValueError(f"{name}: is only for timex, the kernels of {op} take any; got {value!r}")


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")
