"""Layers that run as one node of autograd, where nothing looks on and no module was changed; else as their parts."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from rwkv_jit.call import switches, tape, tensors
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.errors import printable
from rwkv_jit.kernels.signatures import forget_with
from rwkv_jit.nn import common, traced

_Kind = TypeVar("_Kind", bound=type[nn.Module])
_OF_TORCH = nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Conv1d, nn.Sequential
_OF_BEGINNING = "layer", "layers", "height"  # attributes on which only initial values depend
_MOST = 16  # signatures of a layer with lists; calls of others run as parts
_MEMO = "_node"  # an attribute of a layer
_OF_MODULE = {*nn.Module().__dict__, _MEMO}
_PLAIN = int, float, str, tuple, dict, torch.dtype, torch.device, type(None)  # whose text says all of them
_layers: set[type] = set()
devices = {"cuda"}  # on others a layer runs as its parts: what the host does matters on a GPU alone


class _Found(NamedTuple):
    """What a call runs: a list, what puts its results together, and which of them are inputs, ~ their places."""

    recorded: tape.Recorded
    build: Callable[[Sequence[Any]], Any]
    sources: Sequence[int]


class _Calls:
    """The lists of all layers that do the same, by signature; None for calls that run as parts."""

    def __init__(self) -> None:
        self.by_key: dict[Any, list[tuple[Callable[..., bool], _Found | None]]] = {}
        forget_with(self)

    def forget(self) -> None:
        self.by_key.clear()


class Memo:
    """What a module keeps of itself among its attributes; a copy of the module has none yet. All of them are equal."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memo)

    __hash__ = None  # type: ignore[assignment]


class Snapshot(NamedTuple):
    """What a layer was when it was looked at. It holds no layer, so that one that is dropped is gone at once."""

    layer: weakref.ref[nn.Module]
    others: tuple[nn.Module, ...]  # those in the layer
    types: list[type]
    attributes: list[dict[str, Any]]  # of each module, with copies of what may be changed in place
    where: list[tuple[dict[str, Any], str]]  # of all parameters
    gaps: list[tuple[dict[str, Any], str]]  # where None stands in the place of one, as of a bias
    names: list[tuple[str, ...]]  # of the parameters of each module
    calls: _Calls | None  # None for a layer that runs as its parts

    @classmethod
    def of(cls, layer: nn.Module) -> Snapshot:
        """Return what a layer is now."""
        modules = tuple(layer.modules())
        for module in modules:
            if _kind(module) in _layers:  # so that its first call as a node changes nothing
                module.__dict__.setdefault(_MEMO, _Memo())
        attributes = [{name: _kept(name, x) for name, x in m.__dict__.items()} for m in modules]
        places = [(m._parameters, name) for m in modules for name in m._parameters]
        where = [(own, name) for own, name in places if own[name] is not None]
        gaps = [(own, name) for own, name in places if own[name] is None]
        names = [tuple(m._parameters) for m in modules]
        calls = None
        if _are_known(modules):
            calls = _shared.setdefault(tuple(map(_described, modules)), _Calls())
        return cls(weakref.ref(layer), modules[1:], [*map(type, modules)], attributes, where, gaps, names, calls)

    def is_same(self, layer: nn.Module) -> bool:
        """Return whether this is of a layer in which nothing has changed but parameters, which have their names."""
        return (
            self.is_alike(layer)
            and [tuple(m._parameters) for m in (layer, *self.others)] == self.names
            and all([own[name] is None for own, name in self.gaps])
            and all([own[name] is not None for own, name in self.where])
        )

    def is_alike(self, layer: nn.Module) -> bool:
        """Return whether this is of a layer whose types and attributes have not changed."""
        modules = layer, *self.others
        try:
            is_alike = [*map(type, modules)] == self.types and [m.__dict__ for m in modules] == self.attributes
            return is_alike and self.layer() is layer
        except Exception:  # of an attribute that is an array now
            return False


class _Memo(Memo):
    """The snapshots of a layer, of training and not."""

    def __init__(self) -> None:
        self.snapshots: dict[bool, Snapshot] = {}


_shared: weakref.WeakValueDictionary[Any, _Calls] = weakref.WeakValueDictionary()


def _kept(name: str, x: Any) -> Any:
    """Return what may be changed in place as a copy: hooks, submodules, lists. Parameters are read in every call."""
    if isinstance(x, Memo):
        return Memo()
    is_held = name.endswith("hooks") or name in ("_modules", "_buffers") or type(x) in (dict, list, set)
    return type(x)(x) if is_held and name != "_parameters" else x


def _are_known(modules: Sequence[nn.Module]) -> bool:
    """Return whether modules do what their types do: ours, the first one, and torch's. Hooks of the first run apart."""
    first, *rest = modules
    if any(isinstance(x, Tensor) for m in modules for x in (*m.__dict__.values(), *m._buffers.values())):
        return False  # as in a replica of `nn.DataParallel`
    if len([*first.named_modules(remove_duplicate=False)]) > len(modules):
        return False  # one has two names
    methods = [(m, name) for m in modules for name in m.__dict__ if callable(getattr(type(m), name, None))]
    if any(m is not first or name != "forward" for m, name in methods):
        return False  # of one instance, as a wrapper that counts calls
    return _kind(first) in _layers and all(
        common.is_plain(m, type(m)) and (type(m) in _OF_TORCH or type(m) in _layers) for m in rest
    )


def _kind(layer: nn.Module) -> type:
    """Return the class of a layer: FSDP2 puts one before it, whose hooks run around the forward."""
    kind = type(layer)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def _described(module: nn.Module) -> Any:
    """Return what a module does, beside its parameters: the same for those that share lists."""
    own = {name: x for name, x in module.__dict__.items() if name not in _OF_MODULE and name not in _OF_BEGINNING}
    if not all(isinstance(x, _PLAIN) for x in own.values()):
        return weakref.ref(module)
    there = tuple([(name, x is not None) for name, x in (*module._parameters.items(), *module._modules.items())])
    return type(module), module.training, repr(own), there


def _is_seen() -> bool:
    """Return whether a mode sees torch's functions, but for the one that says where new tensors lie."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def as_node(kind: _Kind) -> _Kind:
    """Let the forward of a class of layers run as one node, where it can."""
    parts = inspect.unwrap(kind.forward)
    names = [*inspect.signature(parts).parameters][1:]  # all but the first are None by default
    _layers.add(kind)

    @wraps(parts)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if tensors.is_eager() and not (torch._C._len_torch_function_stack() and _is_seen()):
            arrays, rest = list[Any](), names[len(given) :]
            if named.keys() <= {*rest} and not any(common._GLOBAL_HOOKS):
                found = _find(self, parts, (*given, *map(named.get, rest)), arrays)
                if found is not None:
                    results = found.recorded.run(arrays)
                    return found.build([results[i] if i >= 0 else arrays[~i] for i in found.sources])
        elif torch.compiler.is_compiling() and not traced.is_exporting():
            results = _under_compiler(self, structure, names, given, named)
            if results is not None:
                return results
        return parts(self, *given, **named)

    kind.forward = forward
    kind.__init__ = _registering(kind, kind.__init__)  # type: ignore[method-assign]
    structure = _structure(kind, get_type_hints(parts)["return"])
    traced.kinds[f"{kind.__module__}.{kind.__qualname__}"] = partial(_traced, parts)
    return kind


def _under_compiler(
    layer: nn.Module, structure: Any, names: Sequence[str], given: Sequence[Any], named: dict[str, Any]
) -> Any:  # fmt: skip
    """Return what a layer returns, of one op; None where a compiler shall see its parts."""
    rest, arrays = names[len(given) :], []  # type: ignore[var-annotated]  # which a compiler traces
    if not named.keys() <= {*rest}:
        return None
    form = tuple([_taken(x, arrays) for x in (*given, *[named.get(x) for x in rest])])
    lead = arrays[0] if arrays else None
    if lead is None or lead.device.type not in devices or lead.dim() < 2 or any([x is None for x in form]):
        return None
    values = traced.call(layer, form, arrays)
    return None if values is None else _put(structure, iter(values))


def _registering(kind: type[nn.Module], begin: Callable[..., None]) -> Callable[..., None]:
    """Return what begins a layer, and says which attributes its modules have."""

    @wraps(begin)
    def begin_and_register(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        if type(self) is kind:
            for module in self.modules():
                own = {x: y for x, y in module.__dict__.items() if x not in _OF_MODULE and x not in _OF_BEGINNING}
                is_known = type(module) in _OF_TORCH or type(module) in _layers
                if is_known and all(isinstance(x, (*_PLAIN, list)) for x in own.values()):
                    names = traced.options.get(type(module), ())
                    traced.options[type(module)] = tuple(dict.fromkeys((*names, *own)))
                    traced.floats.update(dict.fromkeys([x for x in own.values() if isinstance(x, float)]))

    return begin_and_register


def _structure(kind: Any, hint: Any) -> Any:
    """Return what results of an annotation consist of: None for a tensor, else a type and what is in it."""
    if hint is Tensor:
        return None
    if get_origin(hint) is tuple:
        return tuple, [_structure(kind, x) for x in get_args(hint)]
    state = kind._State if hint is Any else hint
    return state, [_structure(kind, x) for x in get_type_hints(state).values()]


def _put(structure: Any, values: Iterator[Any]) -> Any:
    """Return results that consist of these tensors."""
    if structure is None:
        return next(values)
    kind, parts = structure
    several = [_put(x, values) for x in parts]
    return tuple(several) if kind is tuple else kind(*several)


def _traced(
    parts: Callable[..., Any], own: nn.Module, where: Sequence[tuple[dict[str, Any], str]], form: Any, count: int
) -> traced.Layer:  # fmt: skip
    """Return what a compiler has of layers that do what one does: their parts as a function of tensors."""
    function, known = _function(parts, own, where, form, count)
    return traced.Layer(function, lambda: known[1])


def _find(layer: Any, parts: Callable[..., Any], given: Sequence[Any], arrays: list[Any]) -> _Found | None:
    """Return what a call of a layer runs, with the `arrays` that it takes, None where it runs as parts."""
    form = tuple([_taken(x, arrays) for x in given])
    lead = arrays[0] if arrays else None
    if None in form or not isinstance(lead, Tensor) or lead.device.type not in devices or lead.dim() < 2:
        return None
    memo = layer.__dict__.get(_MEMO)
    if memo is None:
        memo = layer.__dict__[_MEMO] = _Memo()
    snapshot = memo.snapshots.get(layer.training)
    if snapshot is None or not snapshot.is_same(layer):
        snapshot = memo.snapshots[layer.training] = Snapshot.of(layer)
    if snapshot.calls is None:
        return None
    longest = tuple([tensors.longest(x, lead.shape[1]) for x in arrays if x is not None and not x.is_floating_point()])
    arrays += [own[name] for own, name in snapshot.where]
    there = [x for x in arrays if x is not None]
    key = form, longest, torch.is_grad_enabled(), tensors.autocast_dtype(lead), switches.current()
    known: list[tuple[Callable[..., bool], _Found | None]] = snapshot.calls.by_key.setdefault(key, [])
    for are_alike, found in known:
        if are_alike(*there):
            return found
    # A check of likeness knows no tensor that is there twice.
    if len(known) >= _MOST or len({*map(id, there)}) < len(there) or not tensors.are_plain(arrays):
        return None
    if any(x.is_nested or x.layout is not torch.strided for x in there):
        return None
    # On the CPU torch does not tell a tape who looks at integers.
    if tensors._Guards is None or -1 in longest or (tensors.capturing() if lead.is_cuda else longest):
        return None
    try:
        found = _recorded(layer, parts, form, arrays)
    except Exception:  # the parts say what is wrong, as to those who call them
        return None
    known.append((tensors.likeness(there), found))
    return found


def _taken(x: Any, arrays: list[Any]) -> Any:
    """Append the tensors of an argument to others, and return its form: None for what a node does not take."""
    if x is None or isinstance(x, Tensor):
        arrays.append(x)
        return x is not None
    if isinstance(x, tuple):
        parts = tuple([_taken(y, arrays) for y in x])
        return None if None in parts else (type(x), parts)
    return None


def _recorded(layer: nn.Module, parts: Callable[..., Any], form: Any, arrays: Sequence[Any]) -> _Found | None:
    """Return what a layer does with arguments of this form; None, and the reason once, where a list cannot do it."""
    own, of_parameters = _skeleton(layer)
    function, known = _function(parts, own, of_parameters, form, len(arrays) - len(of_parameters))
    name = _kind(layer).__name__
    try:
        recorded = tape.Recorded(function, arrays, name)
        build, sources, usual = known
        recorded.prepare(usual)
        return _Found(recorded, build, sources)
    except (tape.CannotRecord, torch.OutOfMemoryError) as error:
        stats.logger.info(printable(f"{name} runs as its parts: {error}"))
        return None


def _function(
    parts: Callable[..., Any],
    own: nn.Module,
    of_parameters: Sequence[tuple[dict[str, Any], str]],
    form: Any,
    count: int,
) -> tuple[Callable[..., list[Tensor]], list[Any]]:
    """Return the parts of a layer as a function of `count` tensors of a form and the parameters behind them.

    Beside it is what its last run knew: what puts results together, where these come from, and which are in no state.
    """
    known = list[Any]()

    def function(*leaves: Any) -> list[Tensor]:
        values = iter(leaves[:count])
        for (several, name), x in zip(of_parameters, leaves[count:], strict=True):
            several[name] = x
        results = parts(own, *[_rebuilt(x, values) for x in form])
        for several, name in of_parameters:
            several[name] = None  # of which only the name counts
        made: list[Tensor] = []
        build = _builder(results, made)
        # An input that is passed on is no result.
        places = [next((i for i, y in enumerate(leaves) if x is y), None) for x in made]
        new = [x for x, place in zip(made, places, strict=True) if place is None]
        order = iter(range(len(new)))
        first = results if type(results) is tuple else (results,)
        usual = [i for i, x in enumerate(new) if any(x is y for y in first)]  # those that are in no state
        known[:] = build, [next(order) if place is None else ~place for place in places], usual
        return new

    return function, known


def _skeleton(layer: nn.Module) -> tuple[nn.Module, list[tuple[dict[str, Any], str]]]:
    """Return a layer without parameters, which nobody else runs, and the places of these."""
    where: list[tuple[dict[str, Any], str]] = []

    def copied(module: nn.Module) -> Any:
        kind: Any = _kind(module)
        own = kind.__new__(kind)
        parameters: dict[str, Any] = dict.fromkeys(module._parameters)
        # Nothing of the layer itself, which other layers that share the list outlive.
        more = {name: x for name, x in module.__dict__.items() if name not in _OF_MODULE}
        own.__dict__.update(nn.Module().__dict__, **more, training=module.training, _parameters=parameters)
        where.extend([(parameters, name) for name, x in module._parameters.items() if x is not None])
        own.__dict__["_modules"] = {
            name: None if x is None else copied(x) for name, x in module._modules.items()
        }  # fmt: skip
        return own

    return copied(layer), where


def _rebuilt(form: Any, values: Iterator[Any]) -> Any:
    if isinstance(form, tuple):
        kind, parts = form
        several = [_rebuilt(x, values) for x in parts]
        return kind(*several) if hasattr(kind, "_fields") else kind(several)
    return next(values)


def _builder(results: Any, several: list[Tensor]) -> Callable[[Sequence[Any]], Any]:
    """Append the tensors of what a layer returns, and return what puts others in their places."""
    if isinstance(results, Tensor):
        several.append(results)
        place = len(several) - 1
        return lambda values: values[place]
    parts = [_builder(x, several) for x in results]
    return partial(_built, type(results)._make if hasattr(results, "_fields") else type(results), parts)


def _built(make: Any, parts: Sequence[Callable[..., Any]], values: Sequence[Any]) -> Any:
    return make([part(values) for part in parts])
