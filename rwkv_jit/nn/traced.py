"""Layers under torch.compile: one torch op each, which runs the list that a layer runs without a compiler.

A compiler sees `node`, of the tensors of a call and a key that says what the layer does. Where sizes are numbers it
becomes `node_fwd` and `node_bwd`, which run a list; else the layer's parts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rwkv_jit.call import recording, registry, sharding, switches, tape, tensors
from rwkv_jit.call.lists import Layout
from rwkv_jit.kernels import __version__
from rwkv_jit.nn import common

Function = Callable[..., Sequence[Tensor]]

# ---- what a compiler traces --------------------------------------------------------------------------------------

# The names of attributes that say what a module of a type does, beside its parameters. A trace has a guard on each.
options: dict[type, tuple[str, ...]] = {}
floats: dict[float, None] = {}  # values that they have: a trace may know no others, but whether one is equal to these


def described(module: nn.Module, parameters: list[Tensor]) -> Any:
    """Append the parameters of a module, and return constants that say what it does; None where they cannot."""
    kind = type(module)
    names = _names(kind.__module__, kind.__qualname__)
    if not names or not common.is_plain(module, kind):
        return None
    of_parameters = tuple([(name, x is not None) for name, x in module._parameters.items()])
    parameters += [x for x in module._parameters.values() if x is not None]
    children = []
    for name, child in module._modules.items():
        what = None if child is None else described(child, parameters)
        if child is not None and what is None:
            return None
        children.append((name, what))
    values = []
    for name in names.split():  # what is a module in one layer may be None in another
        value = None if name in module._modules else getattr(module, name, None)
        if isinstance(value, float):
            known = [float(x) for x in _floats().split()]
            value = next((x for x in known if x == value), None)
            if value is None:
                return None
        values.append(value)
    return kind.__module__, kind.__qualname__, tuple(values), of_parameters, tuple(children)


def call(layer: nn.Module, form: Any, arrays: Sequence[Any]) -> Sequence[Any] | None:
    """Return the tensors of what a layer returns, in their order; None where a compiler shall see its parts.

    `arrays` are the tensors of its arguments, or None, and `form` says how these consist of them.
    """
    parameters: list[Tensor] = []
    what = described(layer, parameters)
    if what is None or not all([x is None or x.is_floating_point() for x in arrays]):
        return None
    key = _key(what, form, len(arrays))
    results = torch.ops.rwkv_jit.node([*arrays, *parameters], key)
    places = [int(x) for x in _sources(key).split()]
    return [results[i] if i >= 0 else arrays[~i] for i in places]


# ---- what the key says -------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """What a key stands for: a function of a layer's tensors, and from its first run on where results come from."""

    function: Function
    sources: Callable[[], Sequence[int]]  # for each tensor that the layer returns a place of the results, ~ of arrays


kinds: dict[str, Callable[[nn.Module, Any, Any, int], Layer]] = {}  # by names of classes: what makes a layer of parts
_layers: dict[str, Layer] = {}


def _key(what: Any, form: Any, count: int) -> str:
    """Return the key of layers that do this; the same in every process."""
    key = sha256(repr((__version__, what, form, count)).encode()).hexdigest()
    if key not in _layers:
        own, where = _skeleton(what)
        _layers[key] = kinds[_name(what)](own, where, form, count)
    return key


def _sources(key: str) -> str:
    return " ".join(map(str, _layers[key].sources()))


def is_exporting() -> bool:
    """Return whether a program is exported, which others load; torch 2.6 does not say, and there it counts as one."""
    return bool(getattr(torch.compiler, "is_exporting", lambda: True)())


def _names(module: str, name: str) -> str:
    found = [x for kind, x in options.items() if (kind.__module__, kind.__qualname__) == (module, name)]
    return " ".join(["training", *found[0]]) if found else ""


def _floats() -> str:
    return " ".join(map(repr, floats))


# A trace takes the answers of these, and does not go into how they are found.
_constants: tuple[Any, ...] = _key, _sources, is_exporting, _names, _floats
for _constant in _constants:
    _constant._dynamo_marked_constant = True


def _name(what: Any) -> str:
    module, name, *_ = what
    return f"{module}.{name}"


def _skeleton(what: Any) -> tuple[nn.Module, list[tuple[dict[str, Any], str]]]:
    """Return a module without parameters that does this, and the places of these."""
    where: list[tuple[dict[str, Any], str]] = []
    by_name = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in options}

    def module_of(what: Any) -> nn.Module:
        _, _, values, of_parameters, children = what
        kind: Any = by_name[_name(what)]
        module = kind.__new__(kind)
        parameters: dict[str, Any] = dict.fromkeys([name for name, _ in of_parameters])
        where.extend([(parameters, name) for name, is_there in of_parameters if is_there])
        there = {name for name, _ in children}
        names = _names(kind.__module__, kind.__qualname__).split()
        named = {x: y for x, y in zip(names, values, strict=True) if x not in there}
        module.__dict__.update({**nn.Module().__dict__, **named, "_parameters": parameters})
        module.__dict__["_modules"] = {x: None if y is None else module_of(y) for x, y in children}
        return module  # type: ignore[no-any-return]

    return module_of(what), where


# ---- ops ---------------------------------------------------------------------------------------------------------


class _List(NamedTuple):
    """A list, and where what its backward takes comes from."""

    recorded: tape.Recorded
    results: Sequence[Layout]  # of the layer, and behind them what is kept for the backward alone
    kept: Sequence[int]  # the places of the last ones among what the list keeps
    sources: Sequence[int]  # of what it keeps: places of the results, ~ of the arrays


_lists: dict[str, _List | None] = {}  # by key, sizes and all else; None where no list can be written
_lock = threading.Lock()


def run(arrays: Sequence[Tensor | None], key: str) -> Sequence[Tensor]:
    """Return the results of a layer: a compiler records its parts, or the ops of its list."""
    layer = _layers[key]
    name = _name_of_list(layer, arrays, key)
    if name is None:
        return layer.function(*arrays)
    found = _list(name)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
        return list(_Node.apply(name, *arrays))  # type: ignore[no-untyped-call]
    made: list[Tensor] = registry.find("node_fwd")(arrays, name)
    return made[: len(found.recorded.outputs)]


def _list(name: str) -> _List:
    found = _lists[name]
    assert found is not None
    return found


def _name_of_list(layer: Layer, arrays: Sequence[Any], key: str) -> str | None:
    """Return the name of a list, which is written the first time; None for calls that run as parts."""
    there = [x for x in arrays if x is not None]
    sizes = [s for x in there for s in (*x.shape, *x.stride(), x.storage_offset())]
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if is_transformed or sharding.any_distributed(there) or not all(type(s) is int for s in sizes):
        return None
    is_graded = torch.is_grad_enabled()
    forms = [
        None if x is None else (tuple(x.shape), x.stride(), x.dtype, str(x.device), is_graded and x.requires_grad)
        for x in arrays
    ]
    cast, modes = tensors.autocast_dtype(there[0]), switches.current()
    name = sha256(repr((key, forms, cast, modes)).encode()).hexdigest()
    with _lock:
        if name not in _lists:
            _lists[name] = _alone(lambda: _written(layer, forms, cast, modes))
    return None if _lists[name] is None else name


def _alone(function: Callable[[], Any]) -> Any:
    """Return what a function does where nothing looks on: in another thread, which no mode and no trace is in."""
    results = list[Any]()
    was_compiling = getattr(torch.compiler, "_is_compiling_flag", False)
    thread = threading.Thread(target=lambda: results.append(function()))
    torch.compiler._is_compiling_flag = False
    try:
        thread.start()
        thread.join()
    finally:
        torch.compiler._is_compiling_flag = was_compiling
    return results[0]


def _written(layer: Layer, forms: Sequence[Any], cast: torch.dtype | None, modes: switches.Modes) -> _List | None:
    """Return the list of a layer for arrays of some forms, None where none can be written."""
    there = [x for x in forms if x is not None]
    device, is_graded = torch.device(there[0][3]), any(x[4] for x in there)
    on_device: Any = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device, switches.at(modes), torch.set_grad_enabled(is_graded):
            arrays = [
                None if x is None else torch.empty_strided(*x[:2], dtype=x[2], device=device).requires_grad_(x[4])
                for x in forms
            ]  # fmt: skip
            with tensors.casting(next(x for x in arrays if x is not None), cast):
                recorded = tape.Recorded(layer.function, arrays, "a layer")
    except Exception:  # the parts say what is wrong, as to those who call them
        return None
    places = [i for i, x in enumerate(forms) if x is not None]  # of the first memories of a tape
    outputs = [x.memory for x in recorded.outputs]
    kept = [i for i, x in enumerate(recorded.saved) if x.memory >= len(places) and x.memory not in outputs]
    results = [x.layout for x in (*recorded.outputs, *[recorded.saved[i] for i in kept])]
    memories = [*outputs, *[recorded.saved[i].memory for i in kept]]
    sources = [~places[x.memory] if x.memory < len(places) else memories.index(x.memory) for x in recorded.saved]
    return _List(recorded, results, kept, sources)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *arrays: Any) -> tuple[Tensor, ...]:
        found, made = _list(name), registry.find("node_fwd")(arrays, name)
        outputs = made[: len(found.recorded.outputs)]
        ctx.name = name
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[arrays[~i] if i < 0 else made[i] for i in found.sources])
        ctx.mark_non_differentiable(*[outputs[i] for i in found.recorded.ungraded])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wants = [*ctx.needs_input_grad[1:]]
        if all(x is None for x in grads):
            return None, *[None] * len(wants)
        made = iter(registry.find("node_bwd")(ctx.saved_tensors, grads, ctx.name, wants))
        return None, *[next(made) if is_wanted else None for is_wanted in wants]


def _forward(arrays: Sequence[Tensor | None], name: str) -> list[Tensor]:
    found = _list(name)
    # A compiler may have laid an array out in another order.
    laid = [
        x if x is None or form is None or x.stride() == form.layout.strides else _like(form.layout, x).copy_(x)
        for x, form in zip(arrays, found.recorded.forms, strict=True)
    ]
    outputs, saved = found.recorded.forward(laid)
    return [*outputs, *[saved[i] for i in found.kept]]


def _like(layout: Layout, x: Tensor) -> Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=x.device)


def _forward_fake(arrays: Sequence[Tensor | None], name: str) -> list[Tensor]:
    lead = next(x for x in arrays if x is not None)
    return [lead.new_empty_strided(x.shape, x.strides, dtype=x.dtype) for x in _list(name).results]


def _backward(
    values: Sequence[Tensor], grads: Sequence[Tensor | None], name: str, wants: Sequence[bool]
) -> list[Tensor]:  # fmt: skip
    found = _list(name).recorded.backward([*values], grads, tuple(wants))
    # No result of an op may share memory with others, and one launch copies all that do.
    seen = {x.untyped_storage()._cdata for x in (*values, *grads) if x is not None}
    several, sharing = list[Tensor](), list[tuple[Tensor, Tensor]]()
    for x, form, is_wanted in zip(found, _list(name).recorded.forms, wants, strict=True):
        if is_wanted:
            assert form is not None
            x = _like(form.layout, values[0]).zero_() if x is None else x.contiguous()
            if x.untyped_storage()._cdata in seen:
                sharing.append((torch.empty_like(x), x))
                x = sharing[-1][0]
            seen.add(x.untyped_storage()._cdata)
            several.append(x)
    if sharing:
        copies, originals = zip(*sharing, strict=True)
        torch._foreach_copy_(copies, originals)
    return several


def _backward_fake(
    values: Sequence[Tensor], grads: Sequence[Tensor | None], name: str, wants: Sequence[bool]
) -> list[Tensor]:  # fmt: skip
    forms = zip(_list(name).recorded.forms, wants, strict=True)
    several = [form.layout for form, is_wanted in forms if is_wanted and form is not None]
    lead = next(x for x in (*values, *grads) if x is not None)
    return [lead.new_empty(x.shape, dtype=x.dtype) for x in several]


def _below(op: str) -> Callable[..., Any]:
    return lambda keys, *arguments: recording.below(registry.find(op), keys, arguments, {})


registry.implement("node_fwd", _forward, _forward_fake, _below("node_fwd"))
registry.implement("node_bwd", _backward, _backward_fake, _below("node_bwd"))
registry.implement("node", run, run, run)
