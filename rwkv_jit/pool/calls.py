"""Calls over a pool of states: those that are known run at once, all others after their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rwkv_jit.call import checks, prepared, registry, sharding, switches, tensors, torch_op
from rwkv_jit.call import plan as plans
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Memory
from rwkv_jit.kernels import env
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.update import Pool

ADDRESS_BITS = 15  # of an address that is no multiple of 16
_PLAIN = (str, int, float, type(None))
Traits = tuple[tuple[str, Any], ...]  # the switches of a call by name


class Step(Protocol):
    """A call that has been checked."""

    @property
    def op(self) -> Op:
        """Return the op."""

    @property
    def state(self) -> Tensor:
        """Return the pool."""

    @property
    def y(self) -> Tensor | None:
        """Return where y is written, if anything is."""

    @property
    def given(self) -> tuple[Any, ...]:
        """Return what the torch op takes behind the op's name, but for switches."""

    @property
    def tensors(self) -> list[Tensor | None]:
        """Return the tensors as plans take them: the inputs, the pool, those that are options, y, those of a ring."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to do."""

    @property
    def options(self) -> tuple[Any, ...]:
        """Return what else a plan depends on."""

    def plan(self) -> Plan:
        """Return a new plan."""


class Kind(NamedTuple):
    """What tells the functions over a pool apart."""

    name: str  # of the public function, with {op} for the op's name
    torch_op: str
    tensors: tuple[str, ...]  # the options that are tensors, in the order in which plans take them
    others: tuple[str, ...]  # the options that are none, but for where y is written
    check: Callable[..., Step]  # of the op, the name, the pool, the inputs, the options, and the ring if there is one
    has_tokens: bool = True  # the inputs are those of the op


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
        key = (
            kind.name, op.name, length, tuple(options), tuple(map(get, kind.others)), traits, torch.is_grad_enabled(),
            switches.is_batch_invariant(), state.data_ptr() & ADDRESS_BITS,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no dense tensor, or no ring
        return _checked_call(kind, op, state, arrays, dict(options), ring, traits)
    known: _Known | None = prepared.latest(key, given)
    if known is None:
        return _checked_call(kind, op, state, arrays, dict(options), ring, traits, key, given)
    if y is None and known.y is not None:
        index = known.plan.device.index
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
    named, more = dict(traits), [] if ring is None else [ring]
    if op.traits:
        checks.check_switches(op, arrays, named)
    step = kind.check(op, name, state, arrays, options, *more, *([traits_of(op, named)] if op.traits else []))
    if not (step.state.is_cuda and tensors.is_eager() and tensors.are_plain(step.tensors)):
        registry.find(kind.torch_op)(op.name, *step.given, **named)
        return step.y  # type: ignore[return-value]
    if step.is_empty:
        return step.y  # type: ignore[return-value]
    plan = run(step)
    # Others are looked at anew each time: arrays of another library, seeds that are numbers, slots to check.
    are_tensors = all(x is None or isinstance(x, Tensor) for x in given) and not env.checks_indices()
    if key is not None and are_tensors and all(isinstance(options.get(x), _PLAIN) for x in kind.others):
        made_of = None if step.y is None else tensors.memory(step.y.shape, step.y.dtype)
        prepared.keep_latest(key, given, _Known(plan, made_of))
    return step.y  # type: ignore[return-value]


def run(step: Step) -> Plan:
    """Run a call that has been checked, and return its plan."""
    arrays, alignment = step.tensors, step.state.data_ptr() & ADDRESS_BITS
    key = type(step), step.op.name, step.options, switches.is_batch_invariant(), alignment, tensors.signature(arrays)
    plan = plans.find(key, step.plan)
    plan.run(arrays)
    return plan


# ---- what kernels are made for -----------------------------------------------------------------------------------


def traits_of(op: Op, named: Mapping[str, Any]) -> Traits:
    """Return the switches of a call in the order of the op's; torch passes only those that are not as by default."""
    return tuple([(trait, named.get(trait, default)) for trait, default in op.traits.items()])


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
    sizes: dict[str, Any] = {}
    for name, x in present.items():
        sizes.update(zip(op.inputs[name], x.shape, strict=True))
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
    return Pool(slots, stride, address & -address, index_bytes, null_index, w0_type, seed is not None)


def one_slot(state: Tensor) -> Tensor:
    """Return what kernels are bound to: they take the pool's address, that of its first slot, which has no gaps."""
    return state[0] if state.shape[0] else state
