"""Calls of a layer's small work: their checks, their kernels, and the torch op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, sharding, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.kernels import env
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.layers import placed, registry
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.pool.calls import ADDRESS_BITS, one_slot
from rwkv_jit.schedules import layers as steps
from rwkv_jit.schedules.layers import GATES, KINDS, MOST_MIXES, MOST_PARTS, NORMS, OPS, SHIFTS, Given, Sequences
from rwkv_jit.schedules.schedule import Result, Schedule

# What calls have beside the inputs of their op, and what they write, in the order of plans.
_BESIDE = {
    "shift_mix": ("state_indices", "cu_seqlens", "has_initial_state", "num_active"),
    **dict.fromkeys(SHIFTS, ("cu_seqlens",)),
}  # fmt: skip
_MIXED = tuple(f"mixed{m}" for m in range(MOST_MIXES))
_WRITTEN = {
    "shift_mix": ("shift", "mixed", "residual"),
    "prepare_keys": ("new_k", "new_v", "a", "b", "bonus", "new_rate", "factors"),
    "delta_operands": ("r", "w", "new_k", "a", "b"), "gated_norm": ("out", "means", "factors"), "activate": ("y",),
    "gated": ("y",), "token_shift": _MIXED,
    "norm_shift": ("residual", *_MIXED, "last", "stats"),
}  # fmt: skip
# The ops whose calls may name the results that they want, and how many kinds stand before these names.
_CHOICES = {"prepare_keys": 1, "gated_norm": 2}


# ---- a call ------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that has been checked."""

    name: str
    inputs: Sequence[Any]  # tensors, or None
    written: Sequence[Any]  # None for what the call makes
    made: dict[str, tuple[int, ...]]  # the shapes of that by name
    lead: Tensor  # which says their device, and the dtype of what is made
    null_index: int = -1
    eps: float = 0.0  # of `delta_operands` the lower bound of the log-decays
    kinds: tuple[str, ...] = ()
    in_place: bool = False
    dtypes: Mapping[str, torch.dtype] = {}  # of what is made in another one

    def new(self, name: str, make: Callable[..., Tensor] = Tensor.new_empty) -> Tensor:
        """Return a tensor like a result."""
        return make(self.lead, self.made[name], dtype=self.dtypes.get(name, self.lead.dtype))

    @property
    def tensors(self) -> list[Any]:
        """Return the tensors in the order in which plans take them."""
        return [*self.inputs, *self.written]


# Runs a call from its tensors in the order of plans.
Run = Callable[[Sequence[Any]], list[Tensor]]


class _Known(NamedTuple):
    """A call that has come before: what tells whether another one is like it, and what runs it."""

    are_alike: Callable[..., bool]
    run: Run


_known: BySignature[_Known] = BySignature()
_plans: BySignature[Plan] = BySignature()


def call(
    name: str, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...],
    record: Callable[[Call], Run] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run a call, at once where it is known, else after all checks; return what it makes.

    `record` returns what runs it where a gradient is wanted; ops without gradients have none.
    """
    asked: Any = None
    known: _Known | None = None
    arrays = [*inputs, *written]
    try:
        if tensors.is_eager():
            address = 0
            for x in written:
                if x is not None:
                    address |= x.data_ptr()
            missing = tuple([x is None for x in arrays])
            asked = name, inputs[0].shape, options, missing, torch.is_grad_enabled(), address & ADDRESS_BITS
            known = _known.get(asked)
            if known is not None and not known.are_alike(*[x for x in arrays if x is not None]):
                known = None
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or an option that cannot be one
        asked = known = None
    if known is None:
        return _checked_call(name, inputs, written, options, asked, record)
    return known.run(arrays)


def call_for(asked: Sequence[str], name: str, inputs: Mapping[str, Any], options: tuple[Any, ...]) -> list[Tensor]:
    """Run a call for some of its results, which it names in the order of what it writes; it has no gradient."""
    arrays = [inputs.get(x) for x in OPS[name].inputs]
    return call(name, arrays, [None] * len(_WRITTEN[name]), (*options, *asked))


def _checked_call(
    name: str, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...], asked: Any,
    record: Callable[[Call], Run] | None,
) -> list[Tensor]:  # fmt: skip
    """Run a call after all checks; one that was `asked` for so is known from then on."""
    arrays = [x for x in (*inputs, *written) if x is not None]
    if sharding.any_distributed(arrays):
        return _distributed(name, inputs, written, options, record)
    call = _CHECKS[name](inputs, written, *options)
    is_recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.tensors)
    if is_recorded:
        _check_gradient(call, record is not None)
    is_direct = call.lead.is_cuda and tensors.is_eager() and tensors.are_plain(call.tensors)
    if is_direct and call.lead.numel():
        run = record(call) if record is not None and is_recorded else plan(call).run
        if name in SHIFTS and call.inputs[-1] is not None:
            run = _with_bounds(run, len(OPS[name].inputs), call.lead.shape[1])
        made = run(call.tensors)
        if asked is not None and all(isinstance(x, Tensor) for x in arrays) and not env.checks_indices():
            _known.keep(asked, _Known(tensors.likeness(arrays), run))
        return made
    if record is not None and not _is_in_place(call):
        results = registry.find(f"{name}_fwd")(*call.inputs, call.eps, call.kinds, True)
        several = results if isinstance(results, (tuple, list)) else (results,)
        return [x for x, place in zip(several, _WRITTEN[name], strict=False) if place in call.made]
    new = {x: call.new(x) for x in call.made}
    if call.lead.numel():
        places = zip(_WRITTEN[name], call.written, strict=True)
        targets = [new.get(place, x) for place, x in places if x is not None or place in new]
        given = [] if call.in_place else call.inputs
        targets = [call.lead] if call.in_place else targets
        registry.find("layer_step")(name, given, targets, call.null_index, call.eps, call.kinds)
    return list(new.values())


def _distributed(
    name: str, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...],
    record: Callable[[Call], Run] | None,
) -> list[Tensor]:  # fmt: skip
    """Run a call of DTensors, which is one of plain tensors on each rank."""
    is_in_place = any(x is True for x in options)  # of `activate`
    if record is None or is_in_place or any(x is not None for x in written):
        raise TypeError(f"{name} takes no DTensors if it writes to its arguments; pass to_local() of each")
    named = dict(zip([*OPS[name].inputs, *_BESIDE.get(name, ())], inputs, strict=True))
    return placed.run(name, named, options, lambda own: call(name, own, written, options, record))


def _with_bounds(run: Run, place: int, tokens: int) -> Run:
    """Return what runs a call whose bounds are looked at each time, and read as plans read them."""

    def with_bounds(arrays: Sequence[Any]) -> list[Tensor]:
        given = list(arrays)
        given[place] = tensors.packing(given[place], tokens)
        return run(given)

    return with_bounds


def _check_gradient(call: Call, has_gradient: bool) -> None:
    """Check that a call can be differentiated."""
    if not has_gradient:
        raise RuntimeError(_no_gradient(call.name))
    if _is_in_place(call):
        raise RuntimeError(f"{call.name}: results in out have no gradient; omit out, or use torch.no_grad()")


def _is_in_place(call: Call) -> bool:
    """Return whether a call writes to tensors of the caller's."""
    return call.in_place or any(x is not None for x in call.written)


def _no_gradient(name: str) -> str:
    return f"{name}: is for inference and has no gradient; call it in torch.no_grad()"


def make(name: str, inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return the results of a call as a torch op, of CPU or CUDA tensors."""
    call = checked(name, inputs, eps, kinds)
    if call.lead.is_cuda and call.lead.numel():
        return plan(call).run(call.tensors)
    torch_op.say_reference(name, call.lead)
    with tensors.exactly(call.lead), torch.no_grad():
        return in_plain_torch(name, call.inputs, call.eps, call.kinds)


def checked(name: str, inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> Call:
    """Return the call that a torch op has been given."""
    one = kinds[0] if len(kinds) == 1 else tuple(kinds)
    options: dict[str, tuple[Any, ...]] = {
        "prepare_keys": tuple(kinds), "gated_norm": (eps, *kinds), "delta_operands": (eps, *kinds),
        "activate": (one, False), "gated": tuple(kinds),
        "norm_shift": (eps, getattr(torch, kinds[0], None) if kinds else None),
    }  # fmt: skip
    return _CHECKS[name](inputs, [None] * len(_WRITTEN[name]), *options.get(name, ()))


def in_plain_torch(name: str, inputs: Sequence[Any], eps: float, kinds: Sequence[str]) -> list[Tensor]:
    """Return the results of a call, which plain torch can differentiate."""
    made: list[Tensor] = getattr(plain, name)(inputs, eps, kinds)
    return made if name in ("norm_shift", "delta_operands") else [x.to(inputs[0].dtype) for x in made]


# ---- checks ------------------------------------------------------------------------------------------------------


def _check_shift_mix(inputs: Sequence[Any], written: Sequence[Any], null_index: int, eps: float) -> Call:
    x = tensors.from_any("x", inputs[0])
    *arrays, state_indices, cu_seqlens, has_initial_state, num_active = inputs
    _, add, weight, bias, mixes = _as_tensors("shift_mix", arrays)
    if x.dim() not in (2, 3) or not x.shape[-1]:
        raise ValueError(f"x: expected shape [rows, channels] or [rows, tokens, channels], got {list(x.shape)}")
    _check_lead("x", x)
    arguments.null_index(null_index)
    checks.check_number("eps", eps)
    channels, leading = x.shape[-1], x.shape[:-1]
    for name, given in (("weight", weight), ("bias", bias)):
        _check("shift_mix", name, given, [(channels,)], x)
    if mixes is None or mixes.shape not in [(channels,), *((count, channels) for count in range(1, MOST_MIXES + 1))]:
        got = None if mixes is None else list(mixes.shape)
        raise ValueError(f"mixes: expected shape [{channels}] or [1 to {MOST_MIXES}, {channels}], got {got}")
    _check("shift_mix", "mixes", mixes, [tuple(mixes.shape)], x)
    if add is not None:
        _check("shift_mix", "add", add, [tuple(x.shape)], x)

    sequences = leading[0]
    if cu_seqlens is not None:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        checks.check_packing(cu_seqlens, x if x.dim() == 3 else x.unsqueeze(0))
        sequences = cu_seqlens.shape[0] - 1
    shift = tensors.from_any("shift", written[0], in_place=True)
    _check_pool(shift, channels, x)
    indices = arguments.indices("state_indices", state_indices, sequences, x)
    has_state = arguments.has_initial_state(has_initial_state, sequences, x)
    active = arguments.num_active(num_active, x)
    arguments.check_room("shift", shift, indices, sequences)
    if arguments.may_look_at([cu_seqlens, indices, active]):
        if cu_seqlens is not None:
            arguments.check_bounds(cu_seqlens.tolist(), leading[-1])
        there = arguments.check_active(active, sequences)
        slots = {"state_indices": None if indices is None else indices[:there]}
        arguments.check_slots(slots, shift.shape[0], null_index)
    shape = (*mixes.shape[:-1], *x.shape)
    made = {} if written[1] is not None else {"mixed": shape}
    out = None if written[1] is None else arguments.out(written[1], shape, x)
    made |= {} if add is None else {"residual": tuple(x.shape)}
    given = [x, add, weight, bias, mixes, indices, cu_seqlens, has_state, active]
    return Call("shift_mix", given, [shift, out, None], made, x, null_index, float(eps))


def _check_prepare_keys(inputs: Sequence[Any], written: Sequence[Any], rate_map: Any, *asked: str) -> Call:
    given = _as_tensors("prepare_keys", inputs)
    named = dict(zip(OPS["prepare_keys"].inputs, given, strict=True))
    k = _check_heads("prepare_keys", "k", named, ("v", "rate", "k_k", "k_a"))
    if (named["v_first"] is None) != (named["v_gate"] is None):
        missing, other = ("v_first", "v_gate") if named["v_first"] is None else ("v_gate", "v_first")
        raise ValueError(f"{missing}: expected a tensor beside {other}, got None")
    if named["v0"] is not None and named["v_first"] is None:
        raise ValueError("v0: needs v_first and v_gate too")
    if (named["r"] is None) != (named["r_k"] is None):
        missing, other = ("r", "r_k") if named["r"] is None else ("r_k", "r")
        raise ValueError(f"{missing}: expected a tensor beside {other}, got None")
    checks.check_name("rate_map", rate_map, steps.RATE_MAPS)
    absent = {"new_v": named["v_first"] is None, "bonus": named["r"] is None, "new_rate": True, "factors": True}
    shapes = {**dict.fromkeys(_WRITTEN["prepare_keys"], tuple(k.shape)), "factors": tuple(k.shape[:-1])}
    made = {x: shapes[x] for x in asked or shapes if asked or not absent.get(x)}
    dtypes = {"factors": torch.promote_types(k.dtype, torch.float32)}
    return Call("prepare_keys", given, written, made, k, kinds=(rate_map, *asked), dtypes=dtypes)


def _check_gated_norm(
    inputs: Sequence[Any], written: Sequence[Any], eps: float, gate: Any, norm: Any, *asked: str
) -> Call:
    given = _as_tensors("gated_norm", inputs)
    named = dict(zip(OPS["gated_norm"].inputs, given, strict=True))
    y = _check_heads("gated_norm", "y", named, ("y", "g", "weight"))
    absent = [name for name in ("r", "k", "v", "r_k") if named[name] is None]
    if 0 < len(absent) < 4:
        raise ValueError(f"{absent[0]}: the bonus needs r, k, v and r_k, got None")
    if not absent and named["bonus"] is not None:
        raise ValueError("bonus: expected None together with r, k, v and r_k")
    checks.check_number("eps", eps)
    checks.check_name("gate", gate, GATES)
    checks.check_name("norm", norm, NORMS)
    shape = (*y.shape[:-2], y.shape[-2] * y.shape[-1])
    out = None if written[0] is None else arguments.out(written[0], shape, y)
    shapes = {"out": shape, **dict.fromkeys(("means", "factors"), tuple(y.shape[:-1]))}
    made = {} if out is not None else {x: shapes[x] for x in asked or ("out",)}
    dtypes = dict.fromkeys(("means", "factors"), torch.promote_types(y.dtype, torch.float32))
    kinds = (gate, norm, *asked)
    return Call("gated_norm", given, [out, None, None], made, y, eps=float(eps), kinds=kinds, dtypes=dtypes)


def _check_delta_operands(
    inputs: Sequence[Any], written: Sequence[Any], lower_bound: float, gate: str, gate_of: str, rate_map: str,
    rate_of: str, norm: str,
) -> Call:  # fmt: skip
    """Check a call whose options are right: those that are no tensors are the public functions' to check."""
    k, q, beta, g, a_log, dt_bias = given = _as_tensors("delta_operands", inputs)
    if k is None or k.dim() < 2 or not k.shape[-1]:
        raise ValueError(f"k: expected shape [..., heads, head size], got {None if k is None else list(k.shape)}")
    _check_lead("k", k)
    heads = beta.shape[k.dim() - 2] if beta is not None and beta.dim() >= k.dim() - 1 else 0
    if not k.shape[-2] or heads % k.shape[-2] or not heads:
        got = None if beta is None else list(beta.shape)
        raise ValueError(f"beta: expected heads that are a multiple of the {k.shape[-2]} of k, got shape {got}")
    rows, size = tuple(k.shape[:-2]), k.shape[-1]
    if q is not None:
        _check("delta_operands", "q", q, [tuple(k.shape)], k)
    of = {"head": (heads,), "channel": (heads, size)}
    _check("delta_operands", "beta", beta, [(*rows, *of[rate_of])], k)
    if gate != "none":
        _check("delta_operands", "g", g, [(*rows, *of[gate_of])], k)
    if gate in ("softplus", "bounded"):
        _check("delta_operands", "A_log", a_log, [(heads,)], k)
    if dt_bias is not None:
        _check("delta_operands", "dt_bias", dt_bias, [of[gate_of], (math.prod(of[gate_of]),)], k)
    absent = {"r": q is None, "w": not steps.makes_decays(gate, gate_of)}
    made = {x: (*rows, heads, size) for x in _WRITTEN["delta_operands"] if not absent.get(x)}
    dtypes = {"w": torch.promote_types(k.dtype, torch.float32)}
    kinds = gate, gate_of, rate_map, rate_of, norm
    return Call("delta_operands", given, written, made, k, eps=float(lower_bound), kinds=kinds, dtypes=dtypes)


def _check_gated(inputs: Sequence[Any], written: Sequence[Any], gate: Any) -> Call:
    x, g = _as_tensors("gated", inputs)
    _check_lead("x", x)
    _check("gated", "g", g, [tuple(x.shape)], x)
    checks.check_name("gate", gate, GATES)
    return Call("gated", [x, g], [None], {"y": tuple(x.shape)}, x, kinds=(gate,))


def _check_token_shift(inputs: Sequence[Any], written: Sequence[Any]) -> Call:
    *arrays, cu_seqlens = inputs
    x, mixes, amounts, first = given = _as_tensors("token_shift", arrays)
    cu_seqlens, texts = _check_shifted("token_shift", x, mixes, cu_seqlens)
    if amounts is not None:
        _check("token_shift", "amounts", amounts, [(mixes.shape[0], *x.shape)], x)
    if first is not None:
        _check("token_shift", "first", first, [(texts, x.shape[-1])], x)
    made = {f"mixed{m}": tuple(x.shape) for m in range(mixes.shape[0])}
    return Call("token_shift", [*given, cu_seqlens], written, made, x)


def _check_norm_shift(inputs: Sequence[Any], written: Sequence[Any], eps: float, dtype: Any) -> Call:
    *arrays, cu_seqlens = inputs
    x, add, weight, bias, mixes, first = given = _as_tensors("norm_shift", arrays)
    cu_seqlens, texts = _check_shifted("norm_shift", x, mixes, cu_seqlens)
    checks.check_number("eps", eps)
    channels, dtype = x.shape[-1], x.dtype if dtype is None else dtype
    if dtype not in (legal := [x.dtype, *tensors.STORAGE]):
        raise TypeError(f"dtype: expected {' or '.join(map(str, dict.fromkeys(legal)))}, got {dtype}")
    for name, own in (("weight", weight), ("bias", bias)):
        _check("norm_shift", name, own, [(channels,)], x)
    for name, own, shape in (("add", add, tuple(x.shape)), ("first", first, (texts, channels))):
        if own is not None:
            _check_shape(name, own, [shape])
            arguments.check_dtype(name, own, (dtype,), x)
    mixed = {f"mixed{m}": tuple(x.shape) for m in range(mixes.shape[0])}
    made = {"residual": tuple(x.shape), **mixed, "last": (texts, channels), "stats": (*x.shape[:2], 2)}
    dtypes = {**dict.fromkeys((*mixed, "last"), dtype), "stats": torch.promote_types(x.dtype, torch.float32)}
    kinds = (str(dtype).removeprefix("torch."),)
    return Call("norm_shift", [*given, cu_seqlens], written, made, x, eps=float(eps), kinds=kinds, dtypes=dtypes)


def _check_shifted(op: str, x: Any, mixes: Any, cu_seqlens: Any) -> tuple[Any, int]:
    """Check what ops have that mix tokens with those before them, and return the bounds and the number of sequences."""
    if x is None or x.dim() != 3 or not x.shape[-1]:
        got = None if x is None else list(x.shape)
        raise ValueError(f"x: expected shape [batch, tokens, channels], got {got}")
    _check_lead("x", x)
    channels = x.shape[-1]
    if mixes is None or mixes.shape not in [(count, channels) for count in range(1, MOST_MIXES + 1)]:
        got = None if mixes is None else list(mixes.shape)
        raise ValueError(f"mixes: expected shape [1 to {MOST_MIXES}, {channels}], got {got}")
    _check(op, "mixes", mixes, [tuple(mixes.shape)], x)
    if cu_seqlens is None:
        return None, x.shape[0]
    cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
    checks.check_packing(cu_seqlens, x)
    if tensors.is_eager() and tensors.are_plain([cu_seqlens]):
        cu_seqlens = tensors.packing(cu_seqlens, x.shape[1])
    return cu_seqlens, cu_seqlens.shape[0] - 1


def _check_activate(inputs: Sequence[Any], written: Sequence[Any], kinds: Any, in_place: bool) -> Call:
    x = tensors.from_any("x", inputs[0], in_place)
    _check_lead("x", x)
    if isinstance(kinds, str):
        each: tuple[str, ...] = (kinds,)
    elif not isinstance(kinds, tuple):
        raise TypeError(f"kinds: expected a str or a sequence of them, got {type(kinds).__name__}")
    else:
        each = kinds
        if not x.dim() or not 1 <= len(kinds) <= MOST_PARTS or len(kinds) != x.shape[0]:
            parts = x.shape[0] if x.dim() else 0
            raise ValueError(
                f"kinds: expected one for each of the {parts} parts of x, up to {MOST_PARTS}, got {len(kinds)}"
            )
    for kind in each:
        checks.check_name("kinds", kind, KINDS)
    if in_place and not x.is_contiguous():
        raise ValueError(f"out: expected memory without gaps, got strides {x.stride()}")
    out = None if written[0] is None else arguments.out(written[0], tuple(x.shape), x)
    made = {} if in_place or out is not None else {"y": tuple(x.shape)}
    return Call("activate", [x], [out], made, x, kinds=each, in_place=in_place)


_CHECKS: dict[str, Callable[..., Call]] = {
    "shift_mix": _check_shift_mix, "prepare_keys": _check_prepare_keys, "gated_norm": _check_gated_norm,
    "delta_operands": _check_delta_operands,
    "activate": _check_activate, "gated": _check_gated, "token_shift": _check_token_shift,
    "norm_shift": _check_norm_shift,
}  # fmt: skip


def _as_tensors(op: str, arrays: Sequence[Any]) -> list[Any]:
    names = OPS[op].inputs
    return [None if x is None else tensors.from_any(name, x) for name, x in zip(names, arrays, strict=True)]


def _check_lead(name: str, given: Any) -> None:
    x = tensors.from_any(name, given)
    dtypes = [*tensors.STORAGE] if x.is_cuda else [*tensors.STORAGE, torch.float64]
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")


def _check(op: str, name: str, x: Tensor | None, shapes: Sequence[tuple[int, ...]], lead: Tensor) -> None:
    """Check an input that may have any of these shapes."""
    if x is None:
        raise TypeError(f"{name}: expected a torch.Tensor or an array with __dlpack__, got NoneType")
    _check_shape(name, x, shapes)
    may_be_float32 = name in OPS[op].wide and lead.dtype != torch.float32
    arguments.check_dtype(name, x, (lead.dtype, torch.float32) if may_be_float32 else (lead.dtype,), lead)


def _check_shape(name: str, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(str(list(n)) for n in shapes)}, got {list(x.shape)}")


def _check_heads(op: str, lead_name: str, named: dict[str, Any], needed: Sequence[str]) -> Tensor:
    """Check the inputs of an op over heads, and return the one that says their sizes."""
    lead: Tensor | None = named[lead_name]
    if lead is None or lead.dim() < 2 or not lead.shape[-1]:
        got = None if lead is None else list(lead.shape)
        raise ValueError(f"{lead_name}: expected shape [..., heads, head size], got {got}")
    _check_lead(lead_name, lead)
    for name, dims in OPS[op].inputs.items():
        if named[name] is not None or name in needed:
            own = tuple(lead.shape if "N" in dims else lead.shape[-2:])
            _check(op, name, named[name], [own, (*own[:-2], own[-2] * own[-1])], lead)
    return lead


def _check_pool(shift: Tensor, channels: int, lead: Tensor) -> None:
    if shift.dim() != 2 or shift.shape[1] != channels:
        raise ValueError(f"shift: expected shape [slots, {channels}], got {list(shift.shape)}")
    arguments.check_dtype("shift", shift, [*tensors.STORAGE] + ([] if lead.is_cuda else [torch.float64]), lead)
    arguments.check_memory("shift", shift)


# ---- kernels -----------------------------------------------------------------------------------------------------


def plan(call: Call) -> Plan:
    """Return the plan of a call."""
    address = 16
    for x in call.written:
        if x is not None:
            address |= x.data_ptr()
    alignment = address & -address
    key = call.name, alignment, call.null_index, call.eps, call.kinds, call.in_place, tensors.signature(call.tensors)
    known = _plans.get(key)
    if known is None:
        schedule, given = _described(call, alignment)
        names = (*OPS[call.name].inputs, *_BESIDE.get(call.name, ()), *_WRITTEN[call.name])
        named = dict(zip(names, call.tensors, strict=True))
        if call.name == "shift_mix":
            named["shift"] = one_slot(named["shift"])
        known = _plans.keep(key, Plan(schedule, steps.problem(call.name, given), named))
    return known


def _described(call: Call, alignment: int) -> tuple[Schedule, Given]:
    dtypes = dict.fromkeys(call.made, call.lead.dtype) | dict(call.dtypes)
    results = {name: Result(shape, tensors.STORAGE[dtypes[name]]) for name, shape in call.made.items()}
    given = given_of(call.name, call.inputs, len(call.kinds))._replace(alignment=alignment, results=results)
    if call.name == "shift_mix":
        return _described_shift_mix(call, given)
    if call.name == "activate":
        return steps.activate(given, call.kinds, call.in_place), given
    if call.name == "prepare_keys":
        return steps.prepare_keys(given, *call.kinds), given
    if call.name == "delta_operands":
        return steps.delta_operands(given, call.eps, call.kinds), given
    if call.name == "gated":
        return steps.gated(given, *call.kinds), given
    if call.name == "token_shift":
        return steps.token_shift(given, texts_of(call.lead, call.inputs[-1])), given
    if call.name == "norm_shift":
        return steps.norm_shift(given, texts_of(call.lead, call.inputs[-1]), call.eps), given
    return steps.gated_norm(given, call.eps, *call.kinds), given


def given_of(name: str, inputs: Sequence[Tensor | None], parts: int = 1) -> Given:
    """Return what the steps of a call go by; `activate` has parts."""
    named = dict(zip(OPS[name].inputs, inputs, strict=False))
    types = {name: tensors.STORAGE[x.dtype] for name, x in named.items() if x is not None}
    lead = next(x for x in inputs if x is not None)
    given = Given(tensors.gpu(lead.device.index), types, 0, ())
    if "mixes" in named:
        mixes = named["mixes"]
        assert mixes is not None
        channels = lead.shape[-1]
        return given._replace(rows=lead.numel() // channels, sizes=(channels, mixes.numel() // channels))
    if name in ("activate", "gated"):
        return given._replace(rows=parts, sizes=(lead.numel() // parts,))
    heads, head_size = lead.shape[-2:]
    sizes: tuple[int, ...] = heads, head_size
    if "beta" in named:
        sizes = heads, head_size, named["beta"].shape[lead.dim() - 2]  # type: ignore[union-attr]
    return given._replace(rows=lead.numel() // (heads * head_size), sizes=sizes)


def texts_of(x: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    """Return the sequences of a token shift."""
    if cu_seqlens is None:
        return Sequences(*x.shape[:2])
    return Sequences(cu_seqlens.shape[0] - 1, bound_bytes=cu_seqlens.element_size())


def _described_shift_mix(call: Call, given: Given) -> tuple[Schedule, Given]:
    x, _, _, _, _, indices, cu_seqlens, *_ = call.inputs
    shift = call.written[0]
    slots = shift.shape[0]
    stride = shift.stride(0) if slots > 1 else 0
    places = given.alignment | (stride * shift.element_size())
    given = given._replace(types={**given.types, "shift": tensors.STORAGE[shift.dtype]}, alignment=places & -places)
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tokens = x.shape[1] if x.dim() == 3 and cu_seqlens is None else 1
    bound_bytes = 0 if cu_seqlens is None else cu_seqlens.element_size()
    index_bytes = 4 if indices is None else indices.element_size()
    sequences = Sequences(count, tokens, bound_bytes, slots, stride, index_bytes, call.null_index)
    return steps.shift_mix(given, sequences, call.eps), given


# ---- the torch op ------------------------------------------------------------------------------------------------


def layer_step_run(
    name: str, inputs: Sequence[Any], written: Sequence[Tensor], null_index: int, eps: float, kinds: Sequence[str]
) -> None:  # fmt: skip
    """Run the torch op with CPU or CUDA tensors."""
    if not written[0].is_cuda:
        torch_op.say_reference(name, written[0])
        with tensors.exactly(written[0]), torch.no_grad():
            if name == "shift_mix":
                plain.shift_mix(inputs, written, null_index, eps)
                return
            for target, x in zip(written, getattr(plain, name)(inputs or written, eps, kinds), strict=True):
                target.copy_(x)
        return
    in_place = not inputs
    if in_place:
        inputs, written = list(written), []
    lead = inputs[0]
    named = dict(zip(OPS[name].inputs, inputs, strict=False))
    absent = {"residual": named.get("add") is None, "new_v": named.get("v_first") is None}
    absent["bonus"] = named.get("r") is None
    if asked := kinds[_CHOICES.get(name, len(kinds)) :]:
        absent = {place: place not in asked for place in _WRITTEN[name]}
    rest = iter(written)
    targets = [None if absent.get(place) or in_place else next(rest, None) for place in _WRITTEN[name]]
    call = Call(name, list(inputs), targets, {}, lead, null_index, eps, tuple(kinds), in_place)
    plan(call).run(call.tensors)


def layer_step_fake(*_: Any) -> None:
    """Do nothing with tensors that have no memory."""


def layer_step_record(
    keys: Any, name: str, inputs: Sequence[Tensor | None], written: Sequence[Tensor], *rest: Any
) -> None:
    """Refuse to record gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *written)):
        raise RuntimeError(_no_gradient(name))
    with torch._C._AutoDispatchBelowAutograd():
        step = registry.find("layer_step")
        step.redispatch(keys & torch._C._after_autograd_keyset, name, inputs, written, *rest)
