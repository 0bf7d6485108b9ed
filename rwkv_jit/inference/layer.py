"""The small work of an RWKV-7 layer beside its matrix products and its recurrence, for inference: a launch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import env, tensors
from rwkv_jit.inference import arguments, calls, layer_plain, layer_steps, registry
from rwkv_jit.inference.layer_steps import KINDS, MOST_MIXES, MOST_PARTS, OPS, Given, Sequences
from rwkv_jit.ops import checks, sharding, torch_op
from rwkv_jit.plan import Plan
from rwkv_jit.schedule import Result, Schedule
from rwkv_jit.signatures import BySignature

_EPS, _EPS_OF_HEADS = 1e-5, 64e-5
# What calls have beside the inputs of their op, and what they write, in the order of plans.
_BESIDE = {"shift_mix": ("state_indices", "cu_seqlens", "has_initial_state", "num_active")}
_WRITTEN = {
    "shift_mix": ("shift", "mixed", "residual"), "prepare_keys": ("new_k", "new_v", "a", "b"), "gated_norm": ("out",),
    "activate": ("y",),
}  # fmt: skip


# ---- the public calls --------------------------------------------------------------------------------------------


def shift_mix(
    x: Any,
    weight: Any,
    bias: Any,
    mixes: Any,
    shift: Any,
    *,
    add: Any = None,
    state_indices: Any = None,
    cu_seqlens: Any = None,
    has_initial_state: Any = None,
    null_index: int = -1,
    num_active: Any = None,
    eps: float = _EPS,
    out: Any = None,
) -> tuple[Tensor, Tensor]:
    r"""Add to the residual, norm it, and mix every token with the one before it: how time and channel mixing begin.

        z_t = x_t + add_t;   n_t = (z_t - mean) / sqrt(variance + eps) weight + bias
        mixed_m = n_t + (n_{t-1} - n_t) mixes_m

    with the mean and the variance over the channels. n before a text's first token lies in a pool, where the last
    token's takes its place. C is the channels, B the rows, T the tokens, M the mixes.

    Parameters
    ----------
    x : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        The residual.
    weight, bias : torch.Tensor, shape (C,), dtype of x or float32
        Of the layer norm.
    mixes : torch.Tensor, shape (M, C) with M up to 6, or (C,), dtype of x or float32
        How much of the token before is in each mix: x_r, x_w, x_k, x_v, x_a and x_g of time mixing in any order, or x_k
        of channel mixing.
    shift : torch.Tensor, shape (slots, C), float16, bfloat16 or float32
        The pool of the last tokens, which is changed. A slot has no gaps; between slots there may be some.
    add : torch.Tensor, shape and dtype of x, optional
        What is added to the residual first, such as the branch before.
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Where each of N texts begins and ends in x, which is [T, C] or [1, T, C] then; `state_indices` has N. Tokens
        behind the last text are texts without a slot.
    has_initial_state : torch.Tensor, shape (B,) or (N,), bool or uint8, optional
        Where it is false, a row or text begins as with zeros in the pool, whatever its slot holds; its last token is
        written there all the same. Without it all begin with their slot.
    null_index : int, default -1
        A slot at or below it is none. A row that has none begins as with zeros in the pool, and no slot is read or
        written. So it is with a slot past the pool.
    num_active : torch.Tensor of one int32, optional
        How many rows or texts there are: of those behind them no slot is read or written, so that a CUDA graph serves
        any number of them. With it, tokens of none of these get zeros for all results.
    eps : float, default 1e-05
        Of the layer norm.
    out : torch.Tensor, shape and dtype of the mixed tokens, optional
        Where these are written, without gaps.

    Returns
    -------
    residual : torch.Tensor, shape and dtype of x
        z; x itself where nothing is added.
    mixed : torch.Tensor, shape (M, *x.shape), or that of x for mixes of shape (C,), dtype of x
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. The pool is as it was.
    RuntimeError
        An input wants a gradient.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are, and z is rounded only where it is written. Relative L2 error against
    float64 on the same inputs: below 5e-6, and that of rounding to 16 bits. n of the token before is rounded as the
    pool has it within a call too, so that a text may be cut into calls anywhere. A row's result does not depend on the
    others.

    The first call with new C, M, dtypes and addresses compiles for this GPU and stores the result on disk; in a CUDA
    graph it must have come before. On a GPU nobody looks at the values of slots and of `cu_seqlens` unless
    RWKVJIT_CHECK=1; kernels touch no other memory whatever they are. CPU tensors run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool, x = torch.zeros(16, 256, device="cuda"), torch.randn(3, 256, device="cuda")
    >>> weight, bias, mixes = torch.ones(256), torch.zeros(256), torch.rand(6, 256)
    >>> weight, bias, mixes = (p.to(x.device) for p in (weight, bias, mixes))
    >>> residual, mixed = rwkv_jit.shift_mix(x, weight, bias, mixes, pool, add=x)
    >>> residual.shape, mixed.shape
    (torch.Size([3, 256]), torch.Size([6, 3, 256]))
    """
    inputs = x, add, weight, bias, mixes, state_indices, cu_seqlens, has_initial_state, num_active
    made = _run("shift_mix", inputs, (shift, out, None), (null_index, eps))
    return x if add is None else made[-1], made[0] if out is None else out


def prepare_keys(
    k: Any,
    v: Any,
    rate: Any,
    k_k: Any,
    k_a: Any,
    *,
    a0: Any = None,
    v_first: Any = None,
    v_gate: Any = None,
    v0: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Make k, v, a and b of `wkv7` and `wkv7_update` from an RWKV-7 layer's keys, values and gates.

        kk = k k_k / |k k_k|;   rate <- sigmoid(rate + a0);   a = -kk;   b = kk rate
        k <- k (1 + (rate - 1) k_a);   v <- v + (v_first - v) sigmoid(v_gate + v0)

    per token and head, with the norm over a head. H is the heads, N the head size.

    Parameters
    ----------
    k : torch.Tensor, shape (..., H, N), float16, bfloat16 or float32
        Key, of any number of tokens.
    v : torch.Tensor, shape of k or (..., H * N), dtype of k
        Value.
    rate : torch.Tensor, shape of k or (..., H * N), dtype of k or float32
        What the low-rank matrices make of the in-context learning rate, before a0 and the sigmoid.
    k_k, k_a : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32
        Factor of the removal key, and how much the rate is in the key.
    a0 : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        Is added to `rate`.
    v_first : torch.Tensor, shape of k or (..., H * N), dtype of k, optional
        The first layer's value. Without it, as in that layer, v is returned as it is.
    v_gate : torch.Tensor, shape of k or (..., H * N), dtype of k or float32, optional
        What the low-rank matrices make of the value's gate; goes with `v_first`.
    v0 : torch.Tensor, shape (H, N) or (H * N,), dtype of k or float32, optional
        Is added to `v_gate`.

    Returns
    -------
    k, v, a, b : torch.Tensor, shape and dtype of k
        v itself where there is no `v_first`.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came.
    RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are. Relative L2 error against float64 on the same inputs: below 5e-6, and
    that of rounding to 16 bits. Where k k_k is zero, so are a and b. w of the layer goes to `wkv7_update` as it is,
    with `w0` and `decay="sigmoid"`. First calls are those of `shift_mix`. CPU tensors run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> k, v, rate = torch.randn(3, 5, 4, 64, device="cuda")
    >>> k_k, k_a = torch.rand(2, 256, device="cuda")
    >>> k, v, a, b = rwkv_jit.prepare_keys(k, v, rate, k_k, k_a)
    >>> a.shape
    torch.Size([5, 4, 64])
    """
    inputs = k, v, rate, v_first, v_gate, k_k, k_a, a0, v0
    made = _run("prepare_keys", inputs, (None, None, None, None), ())
    return made[0], v if v_first is None else made[1], made[-2], made[-1]


def gated_norm(
    y: Any, r: Any, k: Any, v: Any, g: Any, r_k: Any, weight: Any, bias: Any, *, eps: float = _EPS_OF_HEADS,
    out: Any = None,
) -> Tensor:  # fmt: skip
    r"""Norm the heads of y, add the bonus and gate all of it: what the output matrix of RWKV-7's time mixing reads.

        out = ((y - mean) / sqrt(variance + eps) weight + bias + (sum_j r_j k_j r_k_j) v) g

    per token and head, with the mean and the variance over a head. H is the heads, N the head size.

    Parameters
    ----------
    y : torch.Tensor, shape (..., H, N), float16, bfloat16 or float32
        What `wkv7` or `wkv7_update` return, of any number of tokens.
    r, k, v : torch.Tensor, shape of y or (..., H * N), dtype of y
        Receptance, key and value as the recurrence had them.
    g : torch.Tensor, shape of y or (..., H * N), dtype of y
        Gate.
    r_k : torch.Tensor, shape (H, N) or (H * N,), dtype of y or float32
        Bonus.
    weight, bias : torch.Tensor, shape (H * N,) or (H, N), dtype of y or float32
        Of the group norm.
    eps : float, default 0.00064
        Of the group norm.
    out : torch.Tensor, shape (..., H * N), dtype of y, optional
        Where the result is written, without gaps.

    Returns
    -------
    out : torch.Tensor, shape (..., H * N), dtype of y

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came.
    RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are. Relative L2 error against float64 on the same inputs: below 5e-6, and
    that of rounding to 16 bits. First calls are those of `shift_mix`. CPU tensors run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> y, r, k, v, g = torch.randn(5, 3, 4, 64, device="cuda")
    >>> r_k, weight, bias = torch.randn(3, 256, device="cuda")
    >>> rwkv_jit.gated_norm(y, r, k, v, g, r_k, weight, bias).shape
    torch.Size([3, 256])
    """
    made = _run("gated_norm", (y, r, k, v, g, r_k, weight, bias), (out,), (eps,))
    return made[0] if out is None else out


def activate(x: Any, kinds: str | Sequence[str], *, out: Any = None) -> Tensor:
    r"""Apply a function to every element, or one to each part: what stands between the matrices of a layer.

    The functions are tanh(x), sigmoid(x) = 1 / (1 + e^-x), relu_squared(x) = max(x, 0)^2 and identity(x) = x.

    Parameters
    ----------
    x : torch.Tensor, any shape, float16, bfloat16 or float32
        What the first matrix made. Low-rank results of several gates, [gates, ..., R], take one launch together.
    kinds : str or sequence of str
        "tanh", "sigmoid", "relu_squared" or "identity"; or one of these for each of up to 31 x[i].
    out : torch.Tensor, shape and dtype of x, optional
        Where the result is written, without gaps. It may be x, whose parts of kind "identity" are not touched then.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came.
    RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are. Relative L2 error against float64 on the same inputs: below 5e-6, and
    that of rounding to 16 bits. First calls are those of `shift_mix`. CPU tensors run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> low_rank = torch.randn(3, 5, 64, device="cuda")  # of w, a and g
    >>> y = rwkv_jit.activate(low_rank, ("tanh", "identity", "sigmoid"), out=low_rank)
    >>> y is low_rank
    True
    """
    in_place = out is x
    given = kinds if isinstance(kinds, str) or not isinstance(kinds, Sequence) else tuple(kinds)
    made = _run("activate", (x,), (None if in_place else out,), (given, in_place))
    return made[0] if out is None else out


# ---- a call ------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call that has been checked."""

    name: str
    inputs: Sequence[Any]  # tensors, or None
    written: Sequence[Any]  # None for what the call makes
    made: dict[str, tuple[int, ...]]  # the shapes of that by name
    lead: Tensor  # which says their dtype and device
    null_index: int = -1
    eps: float = 0.0
    kinds: tuple[str, ...] = ()
    in_place: bool = False

    @property
    def tensors(self) -> list[Any]:
        """Return the tensors in the order in which plans take them."""
        return [*self.inputs, *self.written]


class _Known(NamedTuple):
    """A call that has come before: what tells whether another one is like it, and its plan."""

    are_alike: Callable[..., bool]
    plan: Plan


_known: BySignature[_Known] = BySignature()
_plans: BySignature[Plan] = BySignature()


def _run(name: str, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...]) -> list[Tensor]:
    """Run a call, at once where it is known, else after all checks; return what it makes."""
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
            asked = name, inputs[0].shape, options, missing, torch.is_grad_enabled(), address & calls.ADDRESS_BITS
            known = _known.get(asked)
            if known is not None and not known.are_alike(*[x for x in arrays if x is not None]):
                known = None
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or an option that cannot be one
        asked = known = None
    if known is None:
        return _checked_run(name, inputs, written, options, asked)
    return known.plan.run(arrays)


def _checked_run(
    name: str, inputs: Sequence[Any], written: Sequence[Any], options: tuple[Any, ...], asked: Any
) -> list[Tensor]:
    """Run a call after all checks; one that was `asked` for so is known from then on."""
    arrays = [x for x in (*inputs, *written) if x is not None]
    if sharding.any_distributed(arrays):
        raise TypeError(f"{name} takes no DTensors; pass to_local() of each")
    call = _CHECKS[name](inputs, written, *options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.tensors):
        raise RuntimeError(_no_gradient(name))
    is_direct = call.lead.is_cuda and tensors.is_eager() and tensors.are_plain(call.tensors)
    if is_direct and call.lead.numel():
        plan = _plan(call)
        made = plan.run(call.tensors)
        if asked is not None and all(isinstance(x, Tensor) for x in arrays) and not env.checks_indices():
            _known.keep(asked, _Known(tensors.likeness(arrays), plan))
        return made
    new = {x: torch.empty(shape, dtype=call.lead.dtype, device=call.lead.device) for x, shape in call.made.items()}
    if call.lead.numel():
        places = zip(_WRITTEN[name], call.written, strict=True)
        targets = [new.get(place, x) for place, x in places if x is not None or place in new]
        given = [] if call.in_place else call.inputs
        targets = [call.lead] if call.in_place else targets
        registry.find("layer_step")(name, given, targets, call.null_index, call.eps, call.kinds)
    return list(new.values())


def _no_gradient(name: str) -> str:
    return f"{name}: is for inference and has no gradient; call it in torch.no_grad()"


# ---- checks ------------------------------------------------------------------------------------------------------


def _check_shift_mix(inputs: Sequence[Any], written: Sequence[Any], null_index: int, eps: float) -> _Call:
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
    if indices is None and sequences > shift.shape[0]:
        raise ValueError(
            f"shift: expected a slot for each of the {sequences} rows, or state_indices; got {shift.shape[0]}"
        )
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
    return _Call("shift_mix", given, [shift, out, None], made, x, null_index, float(eps))


def _check_prepare_keys(inputs: Sequence[Any], written: Sequence[Any]) -> _Call:
    given = _as_tensors("prepare_keys", inputs)
    named = dict(zip(OPS["prepare_keys"].inputs, given, strict=True))
    k = _check_heads("prepare_keys", "k", named, ("v", "rate", "k_k", "k_a"))
    if (named["v_first"] is None) != (named["v_gate"] is None):
        missing, other = ("v_first", "v_gate") if named["v_first"] is None else ("v_gate", "v_first")
        raise ValueError(f"{missing}: expected a tensor beside {other}, got None")
    if named["v0"] is not None and named["v_first"] is None:
        raise ValueError("v0: goes with v_first and v_gate, got it alone")
    shape = tuple(k.shape)
    made = {x: shape for x in _WRITTEN["prepare_keys"] if x != "new_v" or named["v_first"] is not None}
    return _Call("prepare_keys", given, [None] * 4, made, k)


def _check_gated_norm(inputs: Sequence[Any], written: Sequence[Any], eps: float) -> _Call:
    given = _as_tensors("gated_norm", inputs)
    named = dict(zip(OPS["gated_norm"].inputs, given, strict=True))
    y = _check_heads("gated_norm", "y", named, tuple(OPS["gated_norm"].inputs))
    checks.check_number("eps", eps)
    shape = (*y.shape[:-2], y.shape[-2] * y.shape[-1])
    out = None if written[0] is None else arguments.out(written[0], shape, y)
    return _Call("gated_norm", given, [out], {} if out is not None else {"out": shape}, y, eps=float(eps))


def _check_activate(inputs: Sequence[Any], written: Sequence[Any], kinds: Any, in_place: bool) -> _Call:
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
    return _Call("activate", [x], [out], made, x, kinds=each, in_place=in_place)


_CHECKS: dict[str, Callable[..., _Call]] = {
    "shift_mix": _check_shift_mix, "prepare_keys": _check_prepare_keys, "gated_norm": _check_gated_norm,
    "activate": _check_activate,
}  # fmt: skip


def _as_tensors(op: str, arrays: Sequence[Any]) -> list[Any]:
    names = OPS[op].inputs
    return [None if x is None else tensors.from_any(name, x) for name, x in zip(names, arrays, strict=True)]


def _check_lead(name: str, x: Tensor) -> None:
    dtypes = [*tensors.STORAGE] if x.is_cuda else [*tensors.STORAGE, torch.float64]
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")


def _check(op: str, name: str, x: Tensor | None, shapes: Sequence[tuple[int, ...]], lead: Tensor) -> None:
    """Check an input that may have any of these shapes."""
    if x is None:
        raise TypeError(f"{name}: expected a torch.Tensor or an array with __dlpack__, got NoneType")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(str(list(n)) for n in shapes)}, got {list(x.shape)}")
    may_be_float32 = name in OPS[op].wide and lead.dtype != torch.float32
    arguments.check_dtype(name, x, (lead.dtype, torch.float32) if may_be_float32 else (lead.dtype,), lead)


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


def _plan(call: _Call) -> Plan:
    """Return the plan of a call."""
    places = [x for x in call.written if x is not None]
    address = 16
    for x in places:
        address |= x.data_ptr()
    alignment = address & -address
    key = call.name, alignment, call.null_index, call.eps, call.kinds, call.in_place, tensors.signature(call.tensors)
    plan = _plans.get(key)
    if plan is None:
        schedule, given = _described(call, alignment)
        names = (*OPS[call.name].inputs, *_BESIDE.get(call.name, ()), *_WRITTEN[call.name])
        named = dict(zip(names, call.tensors, strict=True))
        if call.name == "shift_mix":
            named["shift"] = calls.one_slot(named["shift"])
        plan = _plans.keep(key, Plan(schedule, layer_steps.problem(call.name, given), named))
    return plan


def _described(call: _Call, alignment: int) -> tuple[Schedule, Given]:
    named = dict(zip(OPS[call.name].inputs, call.inputs, strict=False))
    types = {name: tensors.STORAGE[x.dtype] for name, x in named.items() if x is not None}
    lead = call.lead
    storage = tensors.STORAGE[lead.dtype]
    given = Given(
        tensors.gpu(lead.device.index), types, 0, (), alignment,
        {name: Result(shape, storage) for name, shape in call.made.items()},
    )  # fmt: skip
    if call.name == "shift_mix":
        return _described_shift_mix(call, given)
    if call.name == "activate":
        parts = len(call.kinds)
        given = given._replace(rows=parts, sizes=(lead.numel() // parts,))
        return layer_steps.activate(given, call.kinds, call.in_place), given
    heads, head_size = lead.shape[-2:]
    given = given._replace(rows=lead.numel() // (heads * head_size), sizes=(heads, head_size))
    if call.name == "prepare_keys":
        return layer_steps.prepare_keys(given), given
    return layer_steps.gated_norm(given, call.eps), given


def _described_shift_mix(call: _Call, given: Given) -> tuple[Schedule, Given]:
    x, _, _, _, mixes, indices, cu_seqlens, *_ = call.inputs
    shift = call.written[0]
    channels, slots = x.shape[-1], shift.shape[0]
    stride = shift.stride(0) if slots > 1 else 0
    places = given.alignment | (stride * shift.element_size())
    given = given._replace(
        types={**given.types, "shift": tensors.STORAGE[shift.dtype]}, rows=x.numel() // channels,
        sizes=(channels, mixes.numel() // channels), alignment=places & -places,
    )  # fmt: skip
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tokens = x.shape[1] if x.dim() == 3 and cu_seqlens is None else 1
    bound_bytes = 0 if cu_seqlens is None else cu_seqlens.element_size()
    index_bytes = 4 if indices is None else indices.element_size()
    sequences = Sequences(count, tokens, bound_bytes, slots, stride, index_bytes, call.null_index)
    return layer_steps.shift_mix(given, sequences, call.eps), given


# ---- the torch op ------------------------------------------------------------------------------------------------


def run(
    name: str, inputs: Sequence[Any], written: Sequence[Tensor], null_index: int, eps: float, kinds: Sequence[str]
) -> None:  # fmt: skip
    """Run the torch op with CPU or CUDA tensors."""
    if not written[0].is_cuda:
        torch_op.say_reference(name, written[0])
        with tensors.exactly(written[0]), torch.no_grad():
            getattr(layer_plain, name)(inputs, written, null_index, eps, kinds)
        return
    in_place = not inputs
    if in_place:
        inputs, written = list(written), []
    lead = inputs[0]
    named = dict(zip(OPS[name].inputs, inputs, strict=False))
    absent = {"residual": named.get("add") is None, "new_v": named.get("v_first") is None}
    rest = iter(written)
    targets = [None if absent.get(place) or in_place else next(rest) for place in _WRITTEN[name]]
    call = _Call(name, list(inputs), targets, {}, lead, null_index, eps, tuple(kinds), in_place)
    _plan(call).run(call.tensors)


def fake(*_: Any) -> None:
    """Do nothing with tensors that have no memory."""


def record(keys: Any, name: str, inputs: Sequence[Tensor | None], written: Sequence[Tensor], *rest: Any) -> None:
    """Refuse to record gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *written)):
        raise RuntimeError(_no_gradient(name))
    with torch._C._AutoDispatchBelowAutograd():
        step = registry.find("layer_step")
        step.redispatch(keys & torch._C._after_autograd_keyset, name, inputs, written, *rest)
