"""The torch ops of a layer's small work that have gradients, in both directions.

They take the inputs of a call, then its eps and its kinds. A backward takes the gradients of the results before these,
and behind them the names of the inputs whose gradients it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import tensors
from rwkv_jit.layers import calls, gradient_steps, registry
from rwkv_jit.layers.calls import Call
from rwkv_jit.layers.gradient_steps import RESULTS, Options
from rwkv_jit.layers.steps import OPS
from rwkv_jit.ops import recording, torch_op
from rwkv_jit.plan import Plan
from rwkv_jit.schedule import Result
from rwkv_jit.signatures import BySignature, forget_with

_plans: BySignature[Plan] = BySignature()


# ---- known calls -------------------------------------------------------------------------------------------------


class _Backward(NamedTuple):
    """A prepared backward, and which gradients it is for."""

    plan: Plan
    are_alike: Callable[..., bool]


class _Recorded:
    """A call with gradients whose forward is prepared, and from its first backward on that too."""

    def __init__(self, call: Call):
        self.name, self._count = call.name, len(call.inputs)
        self._forward = calls.plan(call)
        self._behind = [None] * len(call.written)
        self._empty: list[Tensor | None] = [None] * self._count
        names, used = list(OPS[self.name].inputs), _used(self.name, call.inputs)
        given = dict(zip(names, call.inputs, strict=False))
        self.wanted = tuple([x for x in used if given[x].requires_grad])
        self._places = [names.index(x) for x in self.wanted]
        self.call = call._replace(inputs=(), written=(), lead=call.lead.new_empty(0))  # which holds no memory
        self._latest: _Backward | None = None
        forget_with(self)

    def forget(self) -> None:
        """Drop the prepared backward; a graph may hold this call after a fork."""
        self._latest = None

    def run(self, arrays: Sequence[Any]) -> list[Tensor]:
        """Run the forward, and record it."""
        return list(_run_known(self, *arrays[: self._count]))

    def results(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Run the forward."""
        return self._forward.run([*inputs, *self._behind])

    def differentiate(self, inputs: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients in the places of the inputs."""
        shapes = self.call.made.values()
        given = [inputs[0].new_zeros(n) if grad is None else grad for grad, n in zip(grads, shapes, strict=True)]
        latest = self._latest
        if latest is None or not latest.are_alike(*given):
            call = self.call._replace(inputs=inputs, lead=inputs[0])
            named = _named(call, dict(zip(self.call.made, given, strict=True)))
            latest = self._latest = _Backward(_plan(call, named, self.wanted), tensors.likeness(given))
        made = list(self._empty)
        for place, grad in zip(self._places, latest.plan.run([*inputs, *given]), strict=True):
            made[place] = grad
        return made


class _KnownCall(torch.autograd.Function):
    """The forward and its backward, for a call that is known."""

    @staticmethod
    def forward(ctx: Any, known: _Recorded, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.known = known
        return tuple(known.results(inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs, known = ctx.saved_tensors, ctx.known
        is_direct = not torch.is_grad_enabled() and tensors.is_eager()
        if is_direct and tensors.PLAIN.issuperset(map(type, (*grads, *inputs))):
            return None, *known.differentiate(inputs, grads)
        call, name = known.call, known.name
        given = dict(zip(call.made, grads, strict=True))
        places = [given.get(result) for result in RESULTS[name]]
        made = dict(
            zip(known.wanted, _backwards(name)[1](*places, *inputs, call.eps, call.kinds, known.wanted), strict=True)
        )
        others = [None] * (len(inputs) - len(OPS[name].inputs))
        return None, *(made.get(x) for x in OPS[name].inputs), *others


# Function.apply looks for transforms first; a known call has none, and saves that time.
_run_known: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _KnownCall).apply


def record(call: Call) -> calls.Run:
    """Return what runs calls like this one, and records them."""
    return _Recorded(call).run


# ---- forward -----------------------------------------------------------------------------------------------------


def forward_run(name: str, *arguments: Any) -> Any:
    """Run the forward."""
    *inputs, eps, kinds, _ = arguments
    return _in_places(calls.make(name, inputs, eps, kinds), _results(name, inputs), RESULTS[name], inputs[0])


def forward_fake(name: str, *arguments: Any) -> Any:
    """Return the results without their values."""
    *inputs, eps, kinds, _ = arguments
    call = calls.checked(name, inputs, eps, kinds)
    made = [call.lead.new_empty(shape) for shape in call.made.values()]
    return _in_places(made, list(call.made), RESULTS[name], inputs[0])


def forward_record(name: str, keys: Any, *arguments: Any) -> Any:
    """Run the forward, and record it where a gradient is wanted."""
    return _recorder(name)(keys, *arguments)


@cache
def _recorder(name: str) -> Callable[..., Any]:
    def setup(ctx: Any, arguments: Sequence[Any], _: dict[str, Any], results: Any) -> None:
        *inputs, ctx.eps, ctx.kinds, _save = arguments
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs, names = ctx.saved_tensors, list(OPS[name].inputs)
        needs = ctx.needs_input_grad[2:]  # of a Function with two inputs of its own before these
        wanted = [x for x, needs_it in zip(names, needs, strict=False) if needs_it and x in _used(name, inputs)]
        made = dict(zip(wanted, _backwards(name)[1](*grads, *inputs, ctx.eps, ctx.kinds, wanted), strict=True))
        return *(made.get(x) for x in names), *[None] * (len(inputs) - len(names) + 3)

    def plainly(*arguments: Any) -> Any:
        *inputs, eps, kinds, _ = arguments
        if inputs[0].is_cuda:
            recording.refuse_forward_mode(name)
        made = calls.in_plain_torch(name, inputs, eps, kinds)
        return _in_places(made, _results(name, inputs), RESULTS[name], inputs[0])

    return recording.forward(registry.find(f"{name}_fwd"), setup, backward, plainly)


def forward_vmap(name: str, info: Any, dims: Sequence[int | None], *arguments: Any) -> Any:
    """Run the forward inside of `torch.vmap`: the mapped dimension is one more of the rows.

    Raises
    ------
    RuntimeError
        What is the same for every row is mapped, or texts are packed.
    """
    *inputs, eps, kinds, save = arguments
    mapped, count = [], info.batch_size
    for (own, letters), x, dim in zip(_dims(name), inputs, dims, strict=False):
        if dim is not None and "N" not in letters and "S" not in letters:
            raise RuntimeError(f"{name}: expected rows alone inside of torch.vmap, got {own} with a mapped dimension")
        if x is None or ("N" not in letters and "S" not in letters):
            mapped.append(x)
            continue
        place = _mapped_place(letters, kinds)
        x = x.movedim(dim, place) if dim is not None else torch.stack([x] * count, place)
        mapped.append(x.flatten(place, place + 1) if name == "token_shift" else x)
    if name == "token_shift" and inputs[-1] is not None:
        raise RuntimeError(f"{name}: expected no cu_seqlens inside of torch.vmap; a batch has texts of one length")
    made = registry.find(f"{name}_fwd")(*mapped, eps, kinds, save)
    place = _mapped_place("NC", kinds) if name == "activate" else 0
    if not isinstance(made, (tuple, list)):
        return made, place
    several = [x.unflatten(0, (count, -1)) if name == "token_shift" and x.dim() > 1 else x for x in made]
    return tuple(several), tuple(0 if x.dim() > 1 else None for x in several)


def _dims(name: str) -> list[tuple[str, str]]:
    """Return the dimensions of all inputs by their names; what says where texts end has none that may be mapped."""
    return [*OPS[name].inputs.items(), *([("cu_seqlens", "")] if name == "token_shift" else [])]


def _mapped_place(letters: str, kinds: Sequence[str]) -> int:
    """Return where a mapped dimension goes: before the rows, but behind what stands before these."""
    return 1 if letters == "GNC" or (letters == "NC" and len(kinds) > 1) else 0


def _results(name: str, inputs: Sequence[Any]) -> list[str]:
    """Return the results that a call with these inputs has."""
    named = dict(zip(OPS[name].inputs, inputs, strict=False))
    if name == "token_shift":
        return list(RESULTS[name])[: len(named["mixes"])]
    return [x for x in RESULTS[name] if x != "new_v" or named["v_first"] is not None]


def _used(name: str, inputs: Sequence[Any]) -> list[str]:
    """Return the inputs that the results of a call depend on."""
    names = [x for x, given in zip(OPS[name].inputs, inputs, strict=False) if given is not None]
    return names if "new_v" in _results(name, inputs) else [x for x in names if (name, x) != ("prepare_keys", "v")]


def _in_places(made: Sequence[Tensor], names: Sequence[str], places: Iterable[str], like: Tensor) -> Any:
    """Return tensors in the places of all that there can be, as an op does: alone where that is one."""
    by_name = dict(zip(names, made, strict=True))
    several = tuple([by_name[x] if x in by_name else like.new_empty(0) for x in places])
    return several if len(several) > 1 else several[0]


# ---- backward ----------------------------------------------------------------------------------------------------


def _parts(name: str, arguments: Sequence[Any]) -> tuple[dict[str, Any], list[Any], float, Any, Sequence[str]]:
    """Return the gradients of the results by their names, the inputs, eps, the kinds, and what is wanted."""
    *arrays, eps, kinds, wanted = arguments
    count = len(RESULTS[name])
    inputs = arrays[count:]
    of_results = dict(zip(RESULTS[name], arrays, strict=False))
    return {x: of_results[x] for x in _results(name, inputs)}, inputs, eps, kinds, wanted


def backward_run(name: str, *arguments: Any) -> list[Tensor]:
    """Run the backward."""
    grads, inputs, eps, kinds, wanted = _parts(name, arguments)
    call = calls.checked(name, inputs, eps, kinds)
    used = [x for x in wanted if x in _used(name, inputs)]
    if len(used) < len(wanted):
        made = dict(zip(used, backward_run(name, *arguments[:-1], used), strict=True))
        zeros = dict(zip(OPS[name].inputs, inputs, strict=False))
        return [
            made[x] if x in made else torch.zeros_like(zeros[x], memory_format=torch.contiguous_format) for x in wanted
        ]
    if not call.lead.is_cuda:
        torch_op.say_reference(name, call.lead)
        return _in_plain_torch(call, list(grads.values()), wanted)
    # Of a result that nothing was made of there is no gradient.
    given = {x: call.lead.new_zeros(call.made[x]) if grad is None else grad for x, grad in grads.items()}
    named = _named(call, given)
    if not call.lead.numel():
        return [torch.zeros_like(named[x], memory_format=torch.contiguous_format) for x in wanted]
    return _plan(call, named, tuple(wanted)).run(list(named.values()))


def _named(call: Call, grads: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors of a backward by their names, in the order in which plans take them."""
    beside = {"cu_seqlens": call.inputs[-1]} if call.name == "token_shift" else {}
    own = dict(zip(OPS[call.name].inputs, call.inputs, strict=False))
    return {**own, **beside, **{f"grad_{x}": grad for x, grad in grads.items()}}


def _plan(call: Call, named: dict[str, Any], wanted: tuple[str, ...]) -> Plan:
    """Return the plan of a backward."""
    name = call.name
    key = name, call.eps, call.kinds, wanted, tuple(named), tensors.signature(list(named.values()))
    plan = _plans.get(key)
    if plan is None:
        given = calls.given_of(name, call.inputs, len(call.kinds))
        results = {f"d{x}": Result(tuple(named[x].shape), given.types[x]) for x in OPS[name].inputs if x in given.types}
        grads = {x: tensors.STORAGE[y.dtype] for x, y in named.items() if x.startswith("grad_")}
        given = given._replace(results=results, types={**given.types, **grads})
        options = Options(call.eps, call.kinds)
        if name == "token_shift":
            options = Options(texts=calls.texts_of(call.lead, named["cu_seqlens"]))
        schedule = gradient_steps.backward(name, given, options, wanted)
        plan = _plans.keep(key, Plan(schedule, gradient_steps.problem(name, given), named))
    return plan


def _in_plain_torch(call: Call, grads: Sequence[Tensor | None], wanted: Sequence[str]) -> list[Tensor]:
    names, inputs = list(OPS[call.name].inputs), call.inputs
    with recording.plain_torch(), tensors.exactly(call.lead):
        leaves: dict[str, Any] = {
            own: None if x is None else x.detach().requires_grad_(own in wanted)
            for own, x in zip(names, inputs, strict=False)
        }
        results = calls.in_plain_torch(call.name, [*leaves.values(), *inputs[len(names) :]], call.eps, call.kinds)
        return recording.gradients(results, grads, [leaves[x] for x in wanted])


def backward_fake(name: str, *arguments: Any) -> list[Tensor]:
    """Return the gradients without their values."""
    _, inputs, _, _, wanted = _parts(name, arguments)
    named: dict[str, Any] = dict(zip(OPS[name].inputs, inputs, strict=False))
    return [torch.empty_like(named[x], memory_format=torch.contiguous_format) for x in wanted]


def backward_vmap(name: str, info: Any, dims: Sequence[int | None], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    """Run the backward inside of `torch.vmap`: one by one, as parameters have a gradient for each."""
    run, several = registry.find(f"{name}_bwd"), []
    for i in range(info.batch_size):
        given = [x if not isinstance(dim, int) else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)]
        several.append(run(*given))
    made = [torch.stack(each) for each in zip(*several, strict=True)]
    return made, [0] * len(made)


def backward_record(name: str, keys: Any, *arguments: Any) -> Any:
    """Run the backward; a second derivative is an error."""
    return _backwards(name)[0](keys, *arguments)


@cache
def _backwards(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return recording.backward(registry.find(f"{name}_bwd"), name)
