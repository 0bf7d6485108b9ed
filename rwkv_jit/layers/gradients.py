"""The torch ops of a layer's small work that have gradients, in both directions.

They take the inputs of a call, then its eps and its kinds. A backward takes the gradients of the results before these,
and behind them the names of the inputs whose gradients it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import tensors
from rwkv_jit.layers import calls, gradient_steps, registry
from rwkv_jit.layers.gradient_steps import RESULTS, Options
from rwkv_jit.layers.steps import OPS
from rwkv_jit.ops import recording, torch_op
from rwkv_jit.plan import Plan
from rwkv_jit.schedule import Result
from rwkv_jit.signatures import BySignature

_plans: BySignature[Plan] = BySignature()


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
    named: dict[str, Any] = dict(zip(OPS[name].inputs, call.inputs, strict=False))
    if not call.lead.numel():
        return [torch.zeros_like(named[x], memory_format=torch.contiguous_format) for x in wanted]
    if name == "token_shift":
        named["cu_seqlens"] = call.inputs[-1]
    for result, grad in grads.items():  # of one that nothing was made of there is none
        named[f"grad_{result}"] = call.lead.new_zeros(call.made[result]) if grad is None else grad
    return _plan(call, named, tuple(wanted)).run(list(named.values()))


def _plan(call: Any, named: dict[str, Any], wanted: tuple[str, ...]) -> Plan:
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


def _in_plain_torch(call: Any, grads: Sequence[Tensor | None], wanted: Sequence[str]) -> list[Tensor]:
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


def backward_record(name: str, keys: Any, *arguments: Any) -> Any:
    """Run the backward; a second derivative is an error."""
    return _backwards(name)[0](keys, *arguments)


@cache
def _backwards(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return recording.backward(registry.find(f"{name}_bwd"), name)
