"""Calls over a pool of states: those that are known run at once, all others after their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, prepared, registry, sharding, switches, tensors, torch_op
from rwkv_jit.call import plan as plans
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Memory
from rwkv_jit.kernels import env
from rwkv_jit.pool import arguments
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.table import ALL
from rwkv_jit.schedules.update import Pool

RING = ("cursors", "arrivals", "entry_d", "entry_b", "entry_k", "entry_v", "entry_u")  # as `ReplayRing.fields`
ADDRESS_BITS = 15  # of an address that is no multiple of 16
_PLAIN = (str, int, float, type(None))
Traits = tuple[tuple[str, Any], ...]  # the switches of a call by name


class Kind(NamedTuple):
    """What tells the functions over a pool apart."""

    name: str  # of the public function, with {op} for the op's name
    torch_op: str
    tensors: tuple[str, ...]  # the options that are tensors, in the order of the torch op and of plans
    others: tuple[str, ...]  # behind them those that are none, but for where y is written; "rounding" last
    check: Callable[..., Step]  # of the op, the name, the pool, the inputs, the options, and the ring if there is one
    plan: Callable[[Any], Plan]  # of a `Step`
    has_tokens: bool = True  # the inputs are those of the op
    given: Callable[[Any], tuple[Any, ...]] | None = None  # what the torch op takes of a step with a ring


class Step(NamedTuple):
    """A call that has been checked."""

    kind: Kind
    op: Op
    state: Tensor
    y: Tensor | None  # where it is written, if anything is
    inputs: Sequence[Any]  # None for those that are absent
    values: tuple[Any, ...]  # of the options, in the order of their kind
    traits: Traits = ()
    ring: tuple[Any, ...] = ()  # the fields of a `ReplayRing`, and its length

    @property
    def named(self) -> dict[str, Any]:
        """Return the options by name."""
        return dict(zip((*self.kind.tensors, *self.kind.others), self.values, strict=False))

    @property
    def given(self) -> tuple[Any, ...]:
        """Return what the torch op takes behind the op's name, but for switches."""
        if self.kind.given is not None:
            return self.kind.given(self)
        return (self.state, self.y, self.inputs, *self.values)

    @property
    def tensors(self) -> list[Tensor | None]:
        """Return the tensors as plans take them: the inputs, the pool, those that are options, y, those of a ring."""
        return [*self.inputs, self.state, *self.values[: len(self.kind.tensors)], self.y, *self.ring[:-1]]

    @property
    def tensors_by_name(self) -> dict[str, Tensor | None]:
        """Return these as plans bind them."""
        names = (*self.op.names, "state", *self.kind.tensors, "y", *(RING if self.ring else ()))
        # Kernels take the address of the pool: of its first number, which is never copied.
        first = self.state[(slice(1),) * self.state.dim()]
        return {**dict(zip(names, self.tensors, strict=True)), "state": first}

    @property
    def options(self) -> tuple[Any, ...]:
        """Return what else a plan depends on."""
        return (*self.values[len(self.kind.tensors) :], self.traits, *self.ring[-1:])

    @property
    def rows(self) -> int:
        """Return how many rows there are; without inputs and indices, slots."""
        several = (*self.inputs[self.op.lead :][:1], self.named["state_indices"], self.state)
        return len(next(x for x in several if x is not None))

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to do."""
        has_nothing = self.y is not None and self.y.numel() == 0
        return has_nothing or (bool(self.ring) and not (self.rows and self.state.numel()))

    def problem(self) -> Problem:
        """Return the problem of the call on a GPU."""
        options = {name: x for name, x in self.named.items() if name in ("scale", "decay", "state_layout")}
        return problem_of(self.op, self.inputs, self.state, **options, traits=self.traits)

    @property
    def index_bytes(self) -> int:
        """Return the bytes of an index of a slot; 4 where there are none."""
        several = [x.element_size() for name, x in self.named.items() if name.endswith("_indices") and x is not None]
        return several[0] if several else 4

    def pool(self) -> Pool:
        """Return what kernels know of the pool."""
        named = self.named
        return pool_of(self.state, self.index_bytes, named["null_index"], named["w0"], named["seed"])


class _Known(NamedTuple):
    """A call that has come before: its plan, and what its y is made of."""

    plan: Plan
    y: Memory | None


def call(
    kind: Kind, op: Op, state: Any, arrays: Sequence[Any], options: Mapping[str, Any], ring: ReplayRing | None = None,
    traits: Traits = (),
) -> Tensor:  # fmt: skip
    """Run a call, at once if it is known; return y, or None. Optional inputs may be None, `traits` are all switches."""
    if "out" in options:
        out = tensors.apart(options["out"], arrays)
        if out is not options["out"]:
            return options["out"].copy_(call(kind, op, state, arrays, {**options, "out": out}, ring, traits))  # type: ignore[no-any-return]
    if not tensors.is_eager():
        return _checked_call(kind, op, state, arrays, dict(options), ring, traits)
    get = options.get
    y = get("out")
    try:
        length, fields = (0, ()) if ring is None else (ring.length, ring.fields)
        given = [*arrays, state, *map(get, kind.tensors), y, *fields]
        # One tuple: those within it would be built and hashed in each call.
        key = (
            kind.name, op.name, length, *options, *map(get, kind.others), *traits, torch.is_grad_enabled(),
            switches.is_batch_invariant(), state.data_ptr() & ADDRESS_BITS,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no dense tensor, or no ring
        return _checked_call(kind, op, state, arrays, dict(options), ring, traits)
    known: _Known | None = prepared.latest(key, given, op.lead)
    if known is None:
        return _checked_call(kind, op, state, arrays, dict(options), ring, traits, key, given)
    if y is None and known.y is not None:
        index = known.plan.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return call(kind, op, state, arrays, options, ring, traits)
        y = given[len(arrays) + 1 + len(kind.tensors)] = tensors.new(*known.y)
    known.plan.run(given)
    return y  # type: ignore[return-value]


def _checked_call(
    kind: Kind, op: Op, state: Any, arrays: Sequence[Any], options: dict[str, Any], ring: ReplayRing | None,
    traits: Traits, key: tuple[Any, ...] | None = None, given: Sequence[Any] = (),
) -> Tensor:  # fmt: skip
    """Run a call after all checks; one with a key is known from then on by that and the tensors that were passed."""
    name = kind.name.format(op=op.name)
    if sharding.any_distributed((state, *arrays, *options.values())):
        raise TypeError(f"state: {name} changes it in place and takes no DTensors; pass to_local() of each")
    cast = torch_op.under_autocast(op, arrays) if kind.has_tokens else None
    if cast is not None:
        with tensors.exactly(cast[0]):
            return call(kind, op, state, cast, options, ring, traits)
    named = dict(traits)
    more: list[Any] = [] if kind.given is None else [ring]  # which a compiler traces
    if op.traits and kind.has_tokens:
        checks.check_switches(op, arrays, named)
        more = [*more, torch_op.traits_of(op, named)]
    step = kind.check(op, name, state, arrays, options, *more)
    y: Tensor = step.y  # type: ignore[assignment]  # or None
    if not (step.state.is_cuda and tensors.is_eager() and tensors.are_plain(step.tensors)):
        registry.find(kind.torch_op)(op.name, *step.given, **named)
        return y
    if step.is_empty:
        return y
    plan = run(step)
    # Others are looked at anew each time: arrays of another library, seeds that are numbers, slots to check.
    are_tensors = all(x is None or isinstance(x, Tensor) for x in given) and not env.checks_indices()
    if key is not None and are_tensors and all(isinstance(options.get(x), _PLAIN) for x in kind.others):
        made_of = None if y is None else tensors.memory(y.shape, y.dtype)
        prepared.keep_latest(key, given, _Known(plan, made_of), op.lead)
    return y


def run(step: Step) -> Plan:
    """Run a call that has been checked, and return its plan."""
    arrays, alignment = step.tensors, step.state.data_ptr() & ADDRESS_BITS
    key = (
        step.kind.name, step.op.name, step.options, switches.is_batch_invariant(), alignment, tensors.signature(arrays),
    )  # fmt: skip
    plan = plans.find(key, lambda: step.kind.plan(step))
    plan.run(arrays)
    return plan


# ---- torch ops ---------------------------------------------------------------------------------------------------


def implement(kind: Kind, on_cpu: Callable[..., None]) -> None:
    """Say who runs the torch op of a kind: the plan of its call, and with CPU tensors `on_cpu`, as plain torch."""

    def step_of(op: str, state: Tensor, y: Tensor, inputs: Sequence[Any], *values: Any, **named: Any) -> Step:
        fitted_op, inputs = fitted(ALL[op], inputs)
        return Step(kind, fitted_op, state, y, inputs, values, torch_op.traits_of(fitted_op, named))

    def plainly(step: Step) -> None:
        on_cpu(step.op, step.state, step.y, step.inputs, **step.named, traits=step.traits)

    implement_steps(kind.torch_op, step_of, plainly, lambda op, *_: kind.name.format(op=op))


def implement_steps(
    torch_op_name: str, step_of: Callable[..., Step], on_cpu: Callable[[Step], None], name_of: Callable[..., str]
) -> None:
    """Say who runs a torch op, from its arguments to a checked call and to the name of the public function."""

    def run_op(*given: Any, **named: Any) -> None:
        step = step_of(*given, **named)
        if step.is_empty:
            return
        if step.state.is_cuda:
            run(step)
            return
        torch_op.say_reference(name_of(*given), step.state)
        with tensors.exactly(step.state), torch.no_grad():
            on_cpu(step)

    def refuse(keys: Any, op: str, *given: Any, **named: Any) -> None:
        arguments.refuse_gradients(ALL[op], name_of(op, *given), given)
        with torch._C._AutoDispatchBelowAutograd():
            registry.find(torch_op_name).redispatch(keys & torch._C._after_autograd_keyset, op, *given, **named)

    registry.implement(torch_op_name, run_op, lambda *_, **__: None, refuse)


# ---- what kernels are made for -----------------------------------------------------------------------------------


def fitted(op: Op, arrays: Sequence[Any]) -> tuple[Op, list[Any]]:
    """Return an op with dimensions of the inputs that `Op.also` allows, and the inputs, split if two are in one."""
    inputs = list(arrays)
    for name, dims in op.also.items():
        place = op.names.index(name)
        x = inputs[place]
        if x is not None and x.dim() == len(dims.strip("()")) - dims.count("("):
            if not dims.startswith("("):
                op = _with_dims(op, name, dims)
                continue
            several = zip(inputs, op.inputs.values(), strict=True)
            whole = next(y for y, each in several if each.endswith(dims[1:-1]))
            sizes = whole.shape[-x.dim() - 1 :]
            inputs[place] = x.reshape(sizes) if prod(sizes) == x.numel() else x
    return op, inputs


@cache
def _with_dims(op: Op, name: str, dims: str) -> Op:
    return replace(op, inputs={**op.inputs, name: dims}, also={**op.also, name: op.inputs[name]})


class Checked(NamedTuple):
    """A call whose inputs and options have been checked, but for those that are tensors."""

    op: Op
    inputs: list[Any]
    sizes: dict[str, int]
    lead: Tensor
    scale: float
    decay: str
    layout: str
    rounds: str
    null_index: int
    callers_v: tuple[Tensor, str]  # the caller's v, and its name


def checked_inputs(
    op: Op, name: str, arrays: Sequence[Any], options: Mapping[str, Any], kind: type, place: int
) -> Checked:  # fmt: skip
    """Check the options of a type and the inputs of a call, whose dimension at a `place` may be absent."""
    has_decay = op.decay != "none" and op.through is None
    of_decay = ("decay", "decay_bound", "w0")
    checks.check_names(name, options, [x for x in kind.__annotations__ if has_decay or x not in of_decay])
    decay, layout, rounds = arguments.names(op, options)
    null_index = arguments.null_index(options.get("null_index", -1))
    op, inputs = fitted(op, checks.as_tensors(op, arrays))
    inputs = with_all_dimensions(op, inputs, place)
    lead, v = inputs[op.lead], op.names.index("v")
    sizes = checks.check_inputs(op, inputs, not lead.is_cuda)
    callers_v = tensors.from_any("v", arrays[v]), op.public_names[v]
    scale = arguments.scale(op, options, sizes)
    return Checked(op, inputs, sizes, lead, scale, decay, layout, rounds, null_index, callers_v)


def checked_pool(call: Checked, state: Any, options: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the pool of a call and what is added to w, once both are checked."""
    op, sizes, lead = call.op, call.sizes, call.lead
    state = tensors.from_any("state", state, in_place=True)
    arguments.check_pool(op, state, tuple(sizes[dim] for dim in op.state_dims(call.layout)), lead, not lead.is_cuda)
    return state, arguments.w0(options.get("w0"), sizes, lead)


def checked_results(
    call: Checked, name: str, state: Tensor, w0: Tensor | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return where y of a call is written, and its seed, once both are checked and nothing needs a gradient."""
    v = call.inputs[call.op.names.index("v")]
    y = arguments.y_of(options.get("out"), v, *call.callers_v)
    arguments.refuse_gradients(call.op, name, (state, y, w0, call.inputs))
    return y, arguments.seed_tensor(options.get("seed"), call.rounds, state, call.lead)


def with_all_dimensions(op: Op, inputs: Sequence[Any], place: int) -> list[Any]:
    """Return inputs that all have tokens and rows: of those without one of them it is put in its `place`, and is 1."""
    if inputs[op.lead].dim() == len(op.inputs[op.names[op.lead]]):
        return list(inputs)
    return [
        x.unsqueeze(place) if x is not None and "T" in dims and x.dim() == len(dims) - 1 else x
        for x, dims in zip(inputs, op.inputs.values(), strict=True)
    ]


def problem_of(op: Op, inputs: Sequence[Tensor | None], state: Tensor, **more: Any) -> Problem:
    """Return the problem of a call on a GPU."""
    present = {name: x for name, x in zip(op.names, inputs, strict=True) if x is not None}
    sizes = torch_op.sizes_of(op, inputs)
    return Problem(
        op, tensors.gpu(state.device.index), {name: tensors.STORAGE[x.dtype] for name, x in present.items()},
        **{"N": sizes["B"], "state_type": tensors.STORAGE[state.dtype],
           "is_batch_invariant": switches.is_batch_invariant(), **sizes, **more},
    )  # fmt: skip


def pool_of(state: Tensor, index_bytes: int, null_index: int, w0: Tensor | None, seed: Tensor | None) -> Pool:
    """Return what kernels know of a pool."""
    slots = state.shape[0]
    stride = state.stride(0) if slots > 1 else 0
    address = state.data_ptr() | 16 | (stride * state.element_size() if slots > 1 else 0)
    w0_type = "fp32" if w0 is None else tensors.STORAGE[w0.dtype]
    return Pool(
        slots, stride, address & -address, index_bytes, null_index, w0_type, seed is not None, state.stride()[1:]
    )


def one_slot(state: Tensor) -> Tensor:
    """Return what kernels are bound to: they take the pool's address, that of its first slot, which has no gaps."""
    return state[0] if state.shape[0] else state
