"""The torch ops of a layer's small work that have gradients, in both directions.

They take the inputs of a call, then its eps and its kinds. A backward takes the gradients of the results before these,
and behind them the names of the inputs whose gradients it returns. That of `norm_shift` takes what the forward made for
it too, and the residual in the place of x: what was added to x is not kept, and has the gradient of x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import recording, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.kernels.signatures import BySignature, forget_with
from rwkv_jit.layers import calls, registry
from rwkv_jit.layers.calls import Call
from rwkv_jit.schedules import layer_gradients
from rwkv_jit.schedules.layer_gradients import KEPT, OPTIONAL, RESULTS, Options
from rwkv_jit.schedules.layers import MOST_MIXES, OPS, SHIFTS
from rwkv_jit.schedules.schedule import Result

_plans: BySignature[Plan] = BySignature()


# ---- known calls -------------------------------------------------------------------------------------------------


class _Backward(NamedTuple):
    """A prepared backward, and which gradients it is for."""

    plan: Plan
    missing: tuple[bool, ...]
    are_alike: Callable[..., bool]


class _Recorded:
    """A call with gradients whose forward is prepared, and from its first backward on that too."""

    def __init__(self, call: Call):
        self.name, self.count = call.name, len(call.inputs)
        self._forward = calls.plan(call)
        self._behind = [None] * len(call.written)
        self._empty: list[Tensor | None] = [None] * self.count
        names, used = list(OPS[self.name].inputs), _used(self.name, call.inputs)
        given = dict(zip(names, call.inputs, strict=False))
        self.wanted = tuple([x for x in used if given[x].requires_grad])
        self.made = _made_for(self.wanted)
        self._places = [names.index(x) for x in self.made]
        self.call = call._replace(inputs=(), written=(), lead=call.lead.new_empty(0))  # which holds no memory
        self._latest: _Backward | None = None
        forget_with(self)

    def forget(self) -> None:
        """Drop the prepared backward; a graph may hold this call after a fork."""
        self._latest = None

    def run(self, arrays: Sequence[Any]) -> list[Tensor]:
        """Run the forward, and record it."""
        return list(_run_known(self, *arrays[: self.count]))

    def results(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Run the forward."""
        return self._forward.run([*inputs, *self._behind])

    def differentiate(self, seen: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients in the places of the inputs, from what was kept and the gradients of the results."""
        inputs = seen[len(seen) - self.count :]
        call = self.call._replace(inputs=inputs, lead=inputs[0])
        given = _or_zeros(call, dict(zip(call.made, grads, strict=True)))
        arrays = list(given.values())
        missing, there = tuple([x is None for x in arrays]), [x for x in arrays if x is not None]
        latest = self._latest
        if latest is None or latest.missing != missing or not latest.are_alike(*there):
            plan = _plan(call, _named(self.name, seen, given), self.made)
            latest = self._latest = _Backward(plan, missing, tensors.likeness(there))
        made = list(self._empty)
        for place, grad in zip(self._places, latest.plan.run([*seen, *arrays]), strict=True):
            made[place] = grad
        if "add" in self.wanted:
            made[1] = _of_add(made[0], call.kinds)
        return made


class _KnownCall(torch.autograd.Function):
    """The forward and its backward, for a call that is known."""

    @staticmethod
    def forward(ctx: Any, known: _Recorded, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = known.results(inputs)
        _keep(ctx, known.name, inputs, results)
        ctx.known = known
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        seen, known = ctx.saved_tensors, ctx.known
        if not torch.is_grad_enabled() and tensors.is_eager(grads, seen):
            return None, *known.differentiate(seen, grads)
        call, name = known.call, known.name
        given = dict(zip(call.made, grads, strict=True))
        made = _differentiate(name, [given.get(x) for x in RESULTS[name]], seen, call.eps, call.kinds, known.wanted)
        names = list(OPS[name].inputs)
        return None, *(made.get(x) for x in names), *[None] * (known.count - len(names))


# Function.apply looks for transforms first; a known call has none, and saves that time.
_run_known: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _KnownCall).apply


def record(call: Call) -> calls.Run:
    """Return what runs calls like this one, and records them."""
    return _Recorded(call).run


# ---- forward -----------------------------------------------------------------------------------------------------


def forward_run(name: str, *arguments: Any) -> Any:
    """Run the forward."""
    *inputs, eps, kinds, _ = arguments
    return _in_places(name, inputs, calls.make(name, inputs, eps, kinds))


def forward_fake(name: str, *arguments: Any) -> Any:
    """Return the results without their values."""
    *inputs, eps, kinds, _ = arguments
    call = calls.checked(name, inputs, eps, kinds)
    return _in_places(name, inputs, [call.new(x) for x in call.made])


def forward_record(name: str, keys: Any, *arguments: Any) -> Any:
    """Run the forward, and record it where a gradient is wanted."""
    return _recorder(name)(keys, *arguments)


@cache
def _recorder(name: str) -> Callable[..., Any]:
    def setup(ctx: Any, arguments: Sequence[Any], _: dict[str, Any], results: Any) -> None:
        *inputs, ctx.eps, ctx.kinds, _save = arguments
        ctx.used = _used(name, inputs)
        _keep(ctx, name, inputs, results)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        seen, names = ctx.saved_tensors, list(OPS[name].inputs)
        needs = ctx.needs_input_grad[2:]  # of a Function with two inputs of its own before these
        wanted = [x for x, needs_it in zip(names, needs, strict=False) if needs_it and x in ctx.used]
        made = _differentiate(name, grads[: len(RESULTS[name])], seen, ctx.eps, ctx.kinds, wanted)
        return *(made.get(x) for x in names), *[None] * (len(needs) - len(names))

    def plainly(*arguments: Any) -> Any:
        *inputs, eps, kinds, _ = arguments
        if inputs[0].is_cuda:
            recording.refuse_forward_mode(name)
        return _in_places(name, inputs, calls.in_plain_torch(name, inputs, eps, kinds))

    return recording.forward(registry.find(f"{name}_fwd"), setup, backward, plainly)


def forward_vmap(name: str, info: Any, dims: Sequence[int | None], *arguments: Any) -> Any:
    """Run the forward inside of `torch.vmap`: the mapped dimension is one more of the rows.

    Raises
    ------
    RuntimeError
        What is the same for every row is mapped, or sequences are packed.
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
        mapped.append(x.flatten(place, place + 1) if name in SHIFTS else x)
    if name in SHIFTS and inputs[-1] is not None:
        raise RuntimeError(f"{name}: expected no cu_seqlens inside of torch.vmap; a batch has sequences of one length")
    made = registry.find(f"{name}_fwd")(*mapped, eps, kinds, save)
    place = _mapped_place("NC", kinds) if name == "activate" else 0
    if not isinstance(made, (tuple, list)):
        return made, place
    several = [x.unflatten(0, (count, -1)) if name in SHIFTS and x.dim() > 1 else x for x in made]
    return tuple(several), tuple(0 if x.dim() > 1 else None for x in several)


def _dims(name: str) -> list[tuple[str, str]]:
    """Return the dimensions of all inputs by their names; what says where sequences end has none that may be mapped."""
    return [*OPS[name].inputs.items(), *([("cu_seqlens", "")] if name in SHIFTS else [])]


def _mapped_place(letters: str, kinds: Sequence[str]) -> int:
    """Return where a mapped dimension goes: before the rows, but behind what stands before these."""
    return 1 if letters == "GNC" or (letters == "NC" and len(kinds) > 1) else 0


def _results(name: str, inputs: Sequence[Any]) -> list[str]:
    """Return the results that a call with these inputs has."""
    named = dict(zip(OPS[name].inputs, inputs, strict=False))
    if name in SHIFTS:
        absent = [f"mixed{m}" for m in range(len(named["mixes"]), MOST_MIXES)]
        return [x for x in RESULTS[name] if x not in absent]
    if name == "delta_operands":
        k, g = named["k"], named["g"]
        has_w = g is not None and (named["A_log"] is not None or g.dim() < k.dim())
        is_there = {"r": named["q"] is not None, "w": has_w}
        return [x for x in RESULTS[name] if is_there.get(x, True)]
    needs = {"new_v": "v_first", "bonus": "r"} if name == "prepare_keys" else {}
    return [x for x in RESULTS[name] if x not in needs or named[needs[x]] is not None]


def _used(name: str, inputs: Sequence[Any]) -> list[str]:
    """Return the inputs that the results of a call depend on."""
    names = [x for x, given in zip(OPS[name].inputs, inputs, strict=False) if given is not None]
    has_values = not {"new_v", "bonus"}.isdisjoint(_results(name, inputs))
    return names if has_values or name != "prepare_keys" else [x for x in names if x != "v"]


def _in_places(name: str, inputs: Sequence[Any], made: Sequence[Tensor]) -> Any:
    """Return results in the places of all that there can be, as an op does: alone where that is one."""
    kept = KEPT.get(name, {})
    by_name = dict(zip([*_results(name, inputs), *kept], made, strict=True))
    several = tuple([by_name[x] if x in by_name else inputs[0].new_empty(0) for x in (*RESULTS[name], *kept)])
    return several if len(several) > 1 else several[0]


def _keep(ctx: Any, name: str, inputs: Sequence[Any], results: Any) -> None:
    """Keep what the backward takes: what the forward made for it alone, which has no gradient, and the inputs."""
    if name == "norm_shift":
        residual, *_, stats = results
        ctx.mark_non_differentiable(stats)
        inputs = stats, residual, None, *inputs[2:]
    ctx.save_for_backward(*inputs)


# ---- backward ----------------------------------------------------------------------------------------------------


def _differentiate(
    name: str, grads: Sequence[Tensor | None], seen: Sequence[Any], eps: float, kinds: Sequence[str],
    wanted: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of the inputs by their names, by the torch op."""
    several = _made_for(wanted)
    made = dict(zip(several, _backwards(name)[1](*grads, *seen, eps, kinds, several), strict=True))
    if "add" in wanted:
        made["add"] = _of_add(made["x"], kinds)
    return made


def _made_for(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the gradients that kernels make for those that are wanted: what is added to x has that of x."""
    if "add" not in wanted:
        return tuple(wanted)
    return "x", *[x for x in wanted if x not in ("x", "add")]


def _of_add(dx: Any, kinds: Sequence[str]) -> Tensor:
    """Return the gradient of what was added to x, which has the dtype of the mixes."""
    return dx.to(getattr(torch, kinds[0]))  # type: ignore[no-any-return]


def _parts(
    name: str, arguments: Sequence[Any]
) -> tuple[dict[str, Any], Sequence[Any], Sequence[Any], float, Any, Sequence[str]]:
    """Return the gradients of results by name, what was made for the backward, inputs, eps, kinds, wanted names."""
    *arrays, eps, kinds, wanted = arguments
    of_results, behind = dict(zip(RESULTS[name], arrays, strict=False)), len(RESULTS[name])
    begin = behind + len(KEPT.get(name, ()))
    kept, inputs = arrays[behind:begin], arrays[begin:]
    return {x: of_results[x] for x in _results(name, inputs)}, kept, inputs, eps, kinds, wanted


def backward_run(name: str, *arguments: Any) -> list[Tensor]:
    """Run the backward."""
    grads, kept, inputs, eps, kinds, wanted = _parts(name, arguments)
    call = calls.checked(name, inputs, eps, kinds)
    used = [x for x in wanted if x in _used(name, inputs)]
    if len(used) < len(wanted):
        made = dict(zip(used, backward_run(name, *arguments[:-1], used), strict=True))
        zeros = dict(zip(OPS[name].inputs, inputs, strict=False))
        return [
            made[x] if x in made else torch.zeros_like(zeros[x], memory_format=torch.contiguous_format) for x in wanted
        ]
    if not (call.lead.is_cuda and call.lead.numel()):
        torch_op.say_reference(name, call.lead)
        return _in_plain_torch(call, grads, wanted)
    named = _named(name, [*kept, *call.inputs], _or_zeros(call, grads))
    return _plan(call, named, tuple(wanted)).run(list(named.values()))


def _or_zeros(call: Call, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the gradients of results: zeros of one that nothing was made of, where kernels need a tensor."""
    return {
        x: call.new(x, Tensor.new_zeros) if grad is None and x not in OPTIONAL else grad
        for x, grad in grads.items() if x in RESULTS[call.name]
    }  # fmt: skip


def _named(name: str, seen: Sequence[Any], grads: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return the tensors of a backward by their names, in the order in which plans take them."""
    names = [*KEPT.get(name, ()), *(own for own, _ in _dims(name))]
    return {**dict(zip(names, seen, strict=True)), **{f"grad_{x}": grad for x, grad in grads.items()}}


def _plan(call: Call, named: dict[str, Any], wanted: tuple[str, ...]) -> Plan:
    """Return the plan of a backward."""
    name = call.name
    key = name, call.eps, call.kinds, wanted, tuple(named), tensors.signature(list(named.values()))
    plan = _plans.get(key)
    if plan is None:
        given = calls.given_of(name, call.inputs, len(call.kinds))
        results = {f"d{x}": Result(tuple(named[x].shape), given.types[x]) for x in OPS[name].inputs if x in given.types}
        there = {x: y for x, y in named.items() if x.startswith("grad_") and y is not None}
        grads = {x: tensors.STORAGE[y.dtype] for x, y in there.items()}
        given = given._replace(results=results, types={**given.types, **grads})
        options = Options(call.eps, call.kinds)
        if name in SHIFTS:
            options = options._replace(texts=calls.texts_of(call.lead, named["cu_seqlens"]))
        schedule = layer_gradients.backward(name, given, options, wanted)
        plan = _plans.keep(key, Plan(schedule, layer_gradients.problem(name, given), named))
    return plan


def _in_plain_torch(call: Call, grads: Mapping[str, Tensor | None], wanted: Sequence[str]) -> list[Tensor]:
    names, inputs = list(OPS[call.name].inputs), call.inputs
    with recording.plain_torch(), tensors.exactly(call.lead):
        leaves: dict[str, Any] = {
            own: None if x is None else x.detach().requires_grad_(own in wanted)
            for own, x in zip(names, inputs, strict=False)
        }
        results = calls.in_plain_torch(call.name, [*leaves.values(), *inputs[len(names) :]], call.eps, call.kinds)
        return recording.gradients(results, [grads.get(x) for x in call.made], [leaves[x] for x in wanted])


def backward_fake(name: str, *arguments: Any) -> list[Tensor]:
    """Return the gradients without their values."""
    _, _, inputs, _, _, wanted = _parts(name, arguments)
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
    of_caller = "kda" if name == "delta_operands" else name  # which is a part of what callers call
    return recording.backward(registry.find(f"{name}_bwd"), of_caller)
