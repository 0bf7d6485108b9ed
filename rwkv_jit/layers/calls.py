"""Calls of the small ops of layers: one engine for all, which reads what a `Kind` says of an op.

A known call runs at once; any other is checked first. Compilers, modes, `torch.func` and CPU tensors take the torch ops
of a kind: `<name>_fwd` and `<name>_bwd`, or `layer_step` where a call writes into tensors of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import differentiable, prepared, recording, registry, sharding, tensors, torch_op
from rwkv_jit.call import plan as plans
from rwkv_jit.call.differentiable import Differentiable, Named, Values
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.prepared import Gradients, Prepared
from rwkv_jit.kernels import env
from rwkv_jit.pool.calls import ADDRESS_BITS, one_slot
from rwkv_jit.schedules import common
from rwkv_jit.schedules.layer_gradients import BACKWARDS, OPTIONAL
from rwkv_jit.schedules.layer_table import KEPT, RESULTS
from rwkv_jit.schedules.layers import Given, Options, Sequences, problem_of
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.schedule import Result, Schedule


class Call(NamedTuple):
    """A call that has been checked."""

    kind: Kind
    inputs: Sequence[Any]  # tensors, or None
    written: Sequence[Any]  # tensors of the caller that the call writes into, in the order of `Kind.written`, or None
    results: dict[str, tuple[int, ...]]  # the shapes of new tensors by name
    lead: Tensor  # which says their device, and the dtype of results
    null_index: int = -1
    eps: float = 0.0
    kinds: tuple[str, ...] = ()
    in_place: bool = False
    dtypes: Mapping[str, torch.dtype] = {}  # of results in another one
    spared: tuple[str, ...] = ()  # results that kernels do not write, as nobody reads them

    def new(self, name: str) -> Tensor:
        """Return memory for a result."""
        return self.lead.new_empty(self.results[name], dtype=self.dtypes.get(name, self.lead.dtype))

    @property
    def made(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the new tensors that there will be."""
        return {name: shape for name, shape in self.results.items() if name not in self.spared}

    @property
    def tensors(self) -> list[Any]:
        """Return the tensors in the order in which plans take them."""
        return [*self.inputs, *self.written]


@dataclass(frozen=True, eq=False)
class Kind:
    """An op of a layer: all that the engine must know of it."""

    op: Op  # with the inputs that may have gradients
    written: tuple[str, ...]  # what calls write, in the order of plans
    check: Callable[..., Call]  # of the inputs, the tensors of the caller to write into, and the options
    given: Callable[[Call], Given]  # what schedules depend on, but the results
    forward: Callable[[Given, Options], Schedule]
    plain: Callable[..., list[Tensor]] = lambda *_: []  # the results in plain torch, of the inputs, eps and the kinds
    beside: tuple[str, ...] = ()  # inputs behind those of the op
    # With gradients: the schedule of the backward but its sums, and the options of `check`, of eps and the kinds.
    backward: Callable[[Given, Options], Schedule] | None = None
    options: Callable[[float, Sequence[str]], tuple[Any, ...]] = lambda eps, kinds: tuple(kinds)
    texts: Callable[[Call], Sequences] = lambda call: Sequences(0)  # of ops that mix tokens
    stand_ins: tuple[Sequences, ...] = (Sequences(1),)  # one for each kernel that such calls take, ahead of them
    # Of DTensors: which dimensions of the inputs by name ranks may share, and how many results there are.
    roles: Callable[[Mapping[str, Any], Sequence[Any]], tuple[dict[str, dict[str, int]], int]] | None = None
    has_flat_heads: bool = False  # results have heads side by side, as channels
    # Of the inputs by name: the results that a call without gradients has no need of, the kept ones among them.
    spared: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda named: ()
    replaced: Mapping[str, str] = field(default_factory=dict)  # inputs that the backward takes a result instead of
    shared: Mapping[str, str] = field(default_factory=dict)  # inputs whose gradient is that of another, but its dtype
    unused: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda named: ()  # inputs that no result depends on
    choices: tuple[str, ...] = ()  # what the kinds say, by the names of options
    names_results: bool = False  # calls may name the results that they want, in kinds behind these
    placed: tuple[int, ...] = ()  # places of inputs that kernels know the alignment of, beside what is written
    plain_in_place: Callable[..., None] | None = None  # a call that writes, in plain torch
    instead: str = ""  # of a call without gradients, what has some
    is_function: bool = False  # a call without gradients that writes into nothing is a torch op that returns results

    @property
    def name(self) -> str:
        """Return the name of the op."""
        return self.op.name

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return *self.op.names, *self.beside

    @property
    def results(self) -> tuple[str, ...]:
        """Return the results of the torch op that returns some; those that a call does not have are empty there."""
        return *RESULTS.get(self.name, self.written if self.is_function else ()), *self.kept

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the last results: what the backward alone takes, and no public call returns."""
        return tuple(KEPT.get(self.name, ()))

    def gradients(self, given: Given, options: Options, wanted: Sequence[str]) -> Schedule:
        """Return the schedule of the backward for the inputs of some names."""
        assert self.backward is not None
        return common.with_sums(self.backward(given, options), [f"d{x}" for x in wanted])

    @property
    def packed(self) -> int | None:
        """Return the place of the bounds of packed sequences, where they are read without a pool."""
        is_there = self.backward is not None and "cu_seqlens" in self.beside
        return self.names.index("cu_seqlens") if is_there else None


_KINDS: dict[str, Kind] = {}


def kind_of(name: str) -> Kind:
    """Return the kind of a name, whose module defines it."""
    if name not in _KINDS:
        import_module(f"rwkv_jit.layers.{name.removesuffix('_update')}")
    return _KINDS[name]


# ---- a call ------------------------------------------------------------------------------------------------------


def call(kind: Kind, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...]) -> Sequence[Tensor]:
    """Run a call, at once where it came before, else after all checks; return its new tensors.

    `written` are tensors of the caller's, or None; none at all where it writes into nothing of the caller's.
    """
    if not tensors.is_eager():
        return _checked_call(kind, inputs, written, options, None)
    address = 0
    try:
        for x in (*written, *map(inputs.__getitem__, kind.placed)):
            if x is not None:
                address |= x.data_ptr()
    except (AttributeError, RuntimeError):  # no dense tensors
        return _checked_call(kind, inputs, written, options, None)
    key = kind, options, torch.is_grad_enabled(), address & ADDRESS_BITS
    arrays = *inputs, *written
    known: Prepared | None = prepared.latest(key, arrays)
    if known is None:
        return _checked_call(kind, inputs, written, options, key)
    return prepared.record(known, *arrays) if known.is_recorded else known.run(arrays)


def call_for(names: Sequence[str], name: str, inputs: Mapping[str, Any], options: tuple[Any, ...]) -> list[Tensor]:
    """Run a call for some of its results by name, in the order of `Kind.written`; it has no gradient."""
    kind = kind_of(name)
    return [*call(kind, [inputs.get(x) for x in kind.names], (), (*options, *names))]


def _checked_call(
    kind: Kind, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...], key: tuple[Any, ...] | None
) -> Sequence[Tensor]:
    arrays = *inputs, *written
    present = [x for x in arrays if x is not None]
    if sharding.any_distributed(present):
        return _distributed(kind, inputs, written, options)
    call = kind.check(inputs, written or [None] * len(kind.written), *options)
    is_recorded = torch.is_grad_enabled() and _want_gradients(call.tensors)
    if is_recorded and not _has_gradient(call):
        raise RuntimeError(_no_gradient(kind))
    if is_recorded and _writes_in_place(call):
        raise RuntimeError(f"{kind.name}: results in out have no gradient; omit out, or use torch.no_grad()")
    call = call if is_recorded else _spared(call)
    if _is_for_kernels(call) and tensors.is_eager() and tensors.are_plain(call.tensors):
        known = _prepared(call, is_recorded)
        checked = call.tensors if written else call.inputs
        results = prepared.record(known, *checked) if is_recorded else known.run(checked)
        if key is not None and all(isinstance(x, Tensor) for x in present) and not env.checks_indices():
            prepared.keep_latest(key, arrays, known)
        return results
    if (_has_gradient(call) or kind.is_function) and not _writes_in_place(call):
        results = registry.find(f"{kind.name}_fwd")(*call.inputs, call.eps, call.kinds, is_recorded)
        by_name = dict(zip(kind.results, results if isinstance(results, (tuple, list)) else (results,), strict=True))
        return [by_name[x] for x in call.made if x not in kind.kept]
    new = {x: call.new(x) for x in call.results}
    if call.lead.numel():
        places = zip(kind.written, call.written, strict=True)
        targets = [new.get(place, x) for place, x in places if x is not None or place in new]
        sources = [] if call.in_place else call.inputs
        targets = [call.lead] if call.in_place else targets
        registry.find("layer_step")(kind.name, sources, targets, call.null_index, call.eps, call.kinds)
    return list(new.values())


def _distributed(
    kind: Kind, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...]
) -> list[Tensor]:  # fmt: skip
    is_in_place = any(x is True for x in options)  # of `activate`
    if kind.roles is None or is_in_place or any(x is not None for x in written):
        only = "" if kind.roles is None else " if it writes to its arguments"
        raise TypeError(f"{kind.name} takes no DTensors{only}; pass to_local() of each")
    named = dict(zip(kind.names, inputs, strict=True))
    lead = kind.names[0]
    if not isinstance(named[lead], Tensor):
        raise TypeError(f"{lead}: expected a DTensor like another argument, got {type(named[lead]).__name__}")
    roles, count = kind.roles(named, options)
    if not (torch.is_grad_enabled() and _want_gradients(inputs)):
        count -= len({*kind.spared(named)}.difference(kind.kept))

    def of_rank(*local: Any) -> Sequence[Tensor]:
        results = call(kind, local, written, options)
        # Flat heads would be as many as there are channels.
        return [x.unflatten(-1, local[0].shape[-2:]) for x in results] if kind.has_flat_heads else results

    placed = {name: (x, roles[name]) for name, x in named.items()}
    results: list[Tensor] = sharding.run(of_rank, placed, lead, [roles[lead]] * count)
    return [x.flatten(-2) for x in results] if kind.has_flat_heads else results


def _in_plain_torch(call: Call) -> list[Tensor]:
    results = dict(zip(call.results, call.kind.plain(call.inputs, call.eps, call.kinds), strict=True))
    return [results[name].to(call.dtypes.get(name, call.lead.dtype)) for name in call.made]


def _spared(call: Call) -> Call:
    """Return a call without the results that nobody reads without gradients."""
    return call._replace(spared=call.kind.spared(dict(zip(call.kind.names, call.inputs, strict=True))))


def _want_gradients(arrays: Sequence[Any]) -> bool:
    return any(x is not None and x.requires_grad for x in arrays)


def _has_gradient(call: Call) -> bool:
    """Return whether a call has a gradient: not one that names its results."""
    kind = call.kind
    return kind.backward is not None and not (kind.names_results and call.kinds[len(kind.choices) :])


def _writes_in_place(call: Call) -> bool:
    return call.in_place or any(x is not None for x in call.written)


def _no_gradient(kind: Kind) -> str:
    instead = f"use {kind.instead}, or" if kind.instead else "call it in"
    return f"{kind.name}: is for inference and has no gradient; {instead} torch.no_grad()"


# ---- plans -------------------------------------------------------------------------------------------------------


def _plan(call: Call) -> Plan:
    kind, address = call.kind, 16
    for x in (*call.written, *(call.inputs[place] for place in kind.placed)):
        if x is not None:
            address |= x.data_ptr()
    alignment = address & -address

    def prepare() -> Plan:
        dtypes = dict.fromkeys(call.results, call.lead.dtype) | dict(call.dtypes)
        results = {name: Result(shape, tensors.STORAGE[dtypes[name]]) for name, shape in call.made.items()}
        given = kind.given(call)._replace(results=results)
        given = given._replace(alignment=min(alignment, given.alignment))
        named = dict(zip((*kind.names, *kind.written), call.tensors, strict=True))
        named |= {name: slots_of(x) for name, x in named.items() if name in POOLS and x is not None}
        return Plan(kind.forward(given, _options(call)), problem_of(kind.op, given), named)

    asked = kind.name, alignment, call.null_index, call.eps, call.kinds, call.in_place, call.spared
    key = *asked, tensors.signature(call.tensors)
    return plans.find(key, prepare)


def _options(call: Call) -> Options:
    return Options(call.eps, call.kinds, call.kind.texts(call), call.in_place)


POOLS = ("shift", "conv_state")  # what kernels take the address of a slot of


def slots_of(pool: Tensor) -> Tensor:
    """Return what kernels are bound to of a pool whose slots have no gaps, or channels side by side."""
    slot = one_slot(pool)
    return slot if slot.is_contiguous() or slot.dim() < 2 else slot.t()


def _plan_of_backward(call: Call, named: Mapping[str, Any], wanted: tuple[str, ...]) -> Plan:
    kind, op = call.kind, BACKWARDS[call.kind.name]

    def prepare() -> Plan:
        given = kind.given(call)
        present = [x for x in kind.op.names if x in given.types]
        results = {f"d{x}": Result(tuple(named[x].shape), given.types[x]) for x in present}
        grads = {x: tensors.STORAGE[y.dtype] for x, y in named.items() if x.startswith("grad_") and y is not None}
        given = given._replace(results=results, types={**given.types, **grads})
        return Plan(kind.gradients(given, _options(call), wanted), problem_of(op, given), named)

    key = f"{kind.name}_bwd", call.eps, call.kinds, wanted, tuple(named), tensors.signature(list(named.values()))
    return plans.find(key, prepare)


def _prepared(call: Call, is_recorded: bool) -> Prepared:
    kind, forward, bounds = call.kind, _plan(call), None
    if kind.packed is not None and call.inputs[kind.packed] is not None:
        bounds = kind.packed, partial(tensors.packing, tokens=call.lead.shape[1])
    behind = 0 if any(x is not None for x in call.written) else len(kind.written)
    if not is_recorded:
        return Prepared(forward, None, behind, bounds)
    unused = kind.unused(dict(zip(kind.names, call.inputs, strict=True)))
    pairs = zip(kind.op.names, call.inputs, strict=False)
    wanted = [x for x, y in pairs if y is not None and y.requires_grad and x not in unused]
    graded = [x for x in call.results if x not in kind.kept]
    return Prepared(forward, _gradients(call, wanted, graded), behind, bounds)


def _gradients(call: Call, wanted: Sequence[str], graded: Sequence[str]) -> Gradients:
    """Return how a call is differentiated; what a backward takes has gradients of all `graded` results."""
    kind, names, results = call.kind, call.kind.names, [*call.results]
    shared = _shared(kind, call.kinds)
    needed = {kind.shared.get(x, x) for x in wanted}
    makes = tuple([x for x in kind.op.names if x in needed])  # by kernels
    call = call._replace(inputs=(), written=(), lead=call.lead.new_empty(0))  # which holds no memory

    def plan(arrays: Sequence[Any]) -> Plan:
        named = dict(zip((*names, *kind.kept, *(f"grad_{x}" for x in graded)), arrays, strict=True))
        return _plan_of_backward(call._replace(inputs=arrays[: len(names)], lead=arrays[0]), named, makes)

    def by_op(saved: Sequence[Any], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        of_results = dict(zip(graded, grads, strict=True))
        several = [of_results.get(x) for x in kind.results if x not in kind.kept]
        return _differentiate[kind.name](saved, several, (call.eps, call.kinds), wanted)

    behind = len(names) + len(kind.kept)
    return Gradients(
        len(graded), plan, by_op, [names.index(x) for x in makes], len(names),
        needed=[
            (behind + place, call.results[x], call.dtypes.get(x, call.lead.dtype))
            for place, x in enumerate(graded) if x in call.results and x not in OPTIONAL
        ],
        replaced=[(names.index(x), results.index(y)) for x, y in kind.replaced.items()]
        + [(names.index(x), None) for x in shared],
        shared=[(names.index(x), names.index(y), dtype) for x, (y, dtype) in shared.items() if x in wanted],
    )  # fmt: skip


def _shared(kind: Kind, kinds: Sequence[str]) -> dict[str, tuple[str, torch.dtype]]:
    """Return the inputs whose gradient is that of another, and the dtype of the mixes, which it has."""
    return {x: (other, getattr(torch, kinds[0])) for x, other in kind.shared.items()}


# ---- torch ops ---------------------------------------------------------------------------------------------------


def define(kind: Kind) -> Kind:
    """Say who runs the torch ops of a kind, which `registry` knows, and return it."""
    _KINDS[kind.name] = kind
    name, count = kind.name, len(kind.names)

    def checked(inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> Call:
        return kind.check(inputs, [None] * len(kind.written), *kind.options(eps, kinds))

    def in_places(names: Sequence[str], results: Sequence[Tensor], lead: Tensor) -> Any:
        """Return results as the op does: an empty one where a call does not have it."""
        by_name = dict(zip(names, results, strict=True))
        several = tuple([by_name[x] if x in by_name else lead.new_empty(0) for x in kind.results])
        return several if len(several) > 1 else several[0]

    def forward(*arguments: Any) -> Any:
        *inputs, eps, kinds, save = arguments
        key = f"{name}_fwd", eps, tuple(kinds), save
        found = prepared.latest(key, inputs)
        if found is None:
            call = checked(inputs, eps, kinds) if save else _spared(checked(inputs, eps, kinds))
            if not _is_for_kernels(call):
                torch_op.say_reference(name, call.lead)
                with tensors.exactly(call.lead), torch.no_grad():
                    return in_places([*call.made], _in_plain_torch(call), call.lead)
            found = [*call.made], _prepared(call, is_recorded=False).run
            prepared.keep_latest(key, inputs, found)
        names, run = found
        return in_places(names, run(inputs), inputs[0])

    def forward_fake(*arguments: Any) -> Any:
        *inputs, eps, kinds, save = arguments
        call = checked(inputs, eps, kinds) if save else _spared(checked(inputs, eps, kinds))
        return in_places([*call.made], [call.new(x) for x in call.made], call.lead)

    if kind.is_function:

        def record(keys: Any, *arguments: Any) -> Any:
            return _without_gradients(f"{name}_fwd", kind, arguments[:count], keys, arguments)

        registry.implement(f"{name}_fwd", forward, forward_fake, record)
    if kind.backward is None:
        return kind
    leaves, graded = recording.Leaves(kind.op.names), [x for x in kind.results if x not in kind.kept]

    def unused(arrays: Sequence[Any]) -> tuple[str, ...]:
        return kind.unused(dict(zip(kind.names, arrays, strict=False)))

    def seen(inputs: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
        replaced = {x: results[kind.results.index(y)] for x, y in kind.replaced.items()} | dict.fromkeys(kind.shared)
        return [replaced.get(x, y) for x, y in zip(kind.names, inputs, strict=True)]

    def plainly(*arguments: Any) -> Any:
        *inputs, eps, kinds, _ = arguments
        if inputs[0].is_cuda:
            recording.refuse_forward_mode(name)
        call = checked(inputs, eps, kinds)
        return in_places([*call.results], _in_plain_torch(call), call.lead)

    def gradients(arrays: Values, options: Values, _: Named, names: Sequence[str]) -> Gradients | None:
        call, in_vain = checked(arrays[:count], *options), unused(arrays)
        return _gradients(call, [x for x in names if x not in in_vain], graded) if _is_for_kernels(call) else None

    def by_hand(arrays: Values, options: Values, _: Named, names: Sequence[str]) -> dict[str, Tensor]:
        call, in_vain = checked(arrays[:count], *options), unused(arrays)
        torch_op.say_reference(name, call.lead)
        grads = dict(zip(graded, arrays[count + len(kind.kept) :], strict=True))
        return leaves.plainly(
            lambda inputs: _in_plain_torch(call._replace(inputs=inputs)), call.inputs,
            [grads.get(x) for x in call.results], [x for x in names if x not in in_vain],
        )  # fmt: skip

    _differentiate[name] = differentiable.define(
        Differentiable(
            name, leaves, count, len(graded), forward, forward_fake, plainly, gradients, by_hand, unused=unused,
            seen=seen, shared=lambda options: _shared(kind, options[1]),
        )
    )  # fmt: skip
    return kind


def _without_gradients(op: str, kind: Kind, arrays: Sequence[Any], keys: Any, arguments: Sequence[Any]) -> Any:
    """Run a torch op that has no gradient, and of which these arrays may need none."""
    if torch.is_grad_enabled() and _want_gradients(arrays):
        raise RuntimeError(_no_gradient(kind))
    with torch._C._AutoDispatchBelowAutograd():
        return registry.find(op).redispatch(keys & torch._C._after_autograd_keyset, *arguments)


_differentiate: dict[str, Callable[..., list[Tensor | None]]] = {}  # by the name of the op, as `differentiable.define`


def _is_for_kernels(call: Call) -> bool:
    return bool(call.lead.is_cuda and call.lead.numel())


def _step(
    name: str, inputs: Sequence[Any], written: Sequence[Tensor], null_index: int, eps: float, kinds: Sequence[str]
) -> None:  # fmt: skip
    """Run a call that writes into these tensors; where no inputs are passed, they are the input too."""
    kind = kind_of(name)
    if not written[0].is_cuda:
        torch_op.say_reference(name, written[0])
        with tensors.exactly(written[0]), torch.no_grad():
            if kind.plain_in_place is not None:
                kind.plain_in_place(inputs, written, null_index, eps, kinds)
                return
            for target, x in zip(written, kind.plain(inputs or written, eps, kinds), strict=True):
                target.copy_(x)
        return
    in_place = not inputs
    if in_place:
        inputs, written = list(written), []
    call = Call(kind, inputs, [None] * len(kind.written), {}, inputs[0], null_index, eps, tuple(kinds), in_place)
    names: Any = kind.written
    if kind.backward is not None:
        names = kind.check(inputs, call.written, *kind.options(eps, kinds)).results
    rest = iter(written)
    targets = [None if in_place or place not in names else next(rest, None) for place in kind.written]
    call = call._replace(written=targets)
    _plan(call).run(call.tensors)


def _step_record(keys: Any, *arguments: Any) -> None:
    name, inputs, written, *_ = arguments
    _without_gradients("layer_step", kind_of(name), (*inputs, *written), keys, arguments)


registry.implement("layer_step", _step, lambda *_: None, _step_record)
