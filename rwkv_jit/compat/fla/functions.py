"""FLA's functions with its arguments: decays are logarithms, states [K, V], and `scale=None` is K^(-1/2).

Source: github.com/fla-org/flash-linear-attention. Each function is a row: its arguments as FLA writes them, and what
runs it. Options that change nothing here are taken: `safe_gate`, `chunk_size`, `disable_recompute`, `cu_seqlens_cpu`,
`chunk_indices`, `max_num_seqs`, and whatever FLA itself would not read. `state_v_first` makes states [V, K]. A function
returns o and the final state, (N, H, K, V) in float32, or None.

A `cp_context` of `fla.ops.cp.build_cp_context` says that other ranks have the other tokens of the sequences: calls are
those of `rwkv_jit.parallel`, and its `cu_seqlens` count. States before and behind the rank's tokens are allowed too.

Each raises `UnsupportedConfigError` where the kernels cannot do a call, before anything runs: `head_first`, `reverse`,
`output_attentions` or `gv` is given, `cp_context` is of parts in another order, dtypes are several, or sizes are beyond
the kernels.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.call import tensors
from rwkv_jit.compat.buffers import in_float32
from rwkv_jit.compat.naming import named
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.layers import token_shift as layer
from rwkv_jit.ops.gla import gla
from rwkv_jit.ops.linear_attention import linear_attention
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7
from rwkv_jit.plain.layers import last_tokens
from rwkv_jit.schedules.legal import StateLayout

Result = tuple[Tensor, Tensor | None]
POWERS_OF_TWO = (None, *(2**x for x in range(31)))
_REFUSED = ("reverse", "output_attentions", "gv")
_TENSORS = (
    *("q", "k", "v", "r", "w", "a", "b", "u", "g", "beta", "x", "kk", "gk", "gv", "g_gamma", "state", "initial_state"),
    *("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "A_log", "dt_bias", "cache"),
)

# ---- rows --------------------------------------------------------------------------------------------------------


def function(
    name: str, run: Callable[..., Any], arguments: str, says: str, chunks: Sequence[int | None] = (),
    reads_older_name: bool = True, any_state: bool = False, **names: str,
) -> Callable[..., Any]:  # fmt: skip
    """Return the function that FLA calls so.

    Parameters
    ----------
    name : str
        FLA's.
    run : callable
        Takes the arguments, by the names of the op below.
    arguments : str
        As in its definition, "q, k, scale=None, **more"; what `more` has is not read.
    says : str
        Its docstring.
    chunks : sequence of int or None
        The `chunk_size` that FLA has, its default first: others are FLA's to refuse, and all of them do the same.
    reads_older_name : bool, default True
        Whether `transpose_state_layout` is `state_v_first` by another name.
    any_state : bool, default False
        Whether an initial state may be no tensor.
    **names
        What FLA calls an argument, by what the op below calls it.
    """
    listed = [each.partition("=")[0] for each in arguments.split(", ") if each[0] != "*"]
    more = "more" if "**more" in arguments else "{}"
    bind = eval(f"lambda {arguments}: ({{{', '.join(f'{x!r}: {x}' for x in listed)}}}, {more})")  # as Python binds them
    bind.__name__ = bind.__qualname__ = name
    below = {theirs: ours for ours, theirs in names.items()}
    parameters = inspect.signature(bind).parameters.values()

    def call(*arguments: Any, **options: Any) -> Any:
        by_name, more = bind(*arguments, **options)
        refuse(head_first=more.get("head_first"), **{x: by_name[x] for x in _REFUSED if x in by_name})
        if by_name.get("cp_context") is not None:
            by_name["cu_seqlens"] = _part(by_name["cp_context"])
        if chunks:
            size = more.get("chunk_size", chunks[0])
            if size not in chunks:
                raise UnsupportedConfigError(f"chunk_size={size} is not supported")
            by_name["chunk_size"] = size
        if "state_v_first" in by_name:
            by_name["state_layout"] = _layout(by_name["state_v_first"], more if reads_older_name else {})
        return run(**{below.get(x, x): value for x, value in by_name.items()})

    def shown(x: inspect.Parameter) -> inspect.Parameter:
        is_tensor = x.name in _TENSORS and not (any_state and x.name == "initial_state")
        kind = f"Tensor{'' if x.default is x.empty else ' | None'}" if is_tensor else "Any"
        return x.replace(annotation=kind)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = says
    call.__signature__ = inspect.Signature(list(map(shown, parameters)))  # type: ignore[attr-defined]
    return named(**names)(call)


def refuse(*rows: Tensor, **unsupported: Any) -> None:
    """Raise UnsupportedConfigError where the kernels lack what FLA's code may have.

    That is options that are neither None nor False, and `rows` of a device or dtype that is none here, or of several.
    """
    for name, value in unsupported.items():
        if value is not None and value is not False:
            raise UnsupportedConfigError(f"{name} is not supported")
    for x in rows:
        if x.device.type not in ("cuda", "cpu"):
            raise UnsupportedConfigError(f"device {x.device} is not supported")
        if x.is_cuda and x.dtype not in tensors.STORAGE:
            raise UnsupportedConfigError(f"{x.dtype} is not supported")
    dtypes = sorted({str(x.dtype) for x in rows})
    if len(dtypes) > 1 and not torch.is_autocast_enabled(rows[0].device.type):  # which makes them one
        raise UnsupportedConfigError(f"{' beside '.join(dtypes)} is not supported")


def _part(context: Any) -> Any:
    """Return what a context says of this rank's tokens: its bounds are those of the rank."""
    from rwkv_jit.parallel.recurrences import Part
    from rwkv_jit.parallel.shard import Shard

    bounds = getattr(context, "cu_seqlens_cpu", None)
    bounds = getattr(context, "cu_seqlens", None) if bounds is None else bounds
    if not isinstance(bounds, Tensor) or getattr(context, "layout", "contiguous") != "contiguous":
        raise UnsupportedConfigError(f"cp_context of {type(context).__name__} is not supported")
    return Part(Shard.of_bounds(context.group, bounds, not context.is_first_rank, not context.is_last_rank))


def _layout(state_v_first: bool, more: Mapping[str, Any]) -> StateLayout:
    """Return the layout of states, which `more` may have by its older name."""
    if "transpose_state_layout" in more:
        if state_v_first:
            raise ValueError("transpose_state_layout: is the older name of state_v_first, got both")
        # Behind this function, what reads arguments, what names them, and what stands in FLA's module.
        warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=5)
        state_v_first = more["transpose_state_layout"]
    return "vk" if state_v_first else "kv"


def run(
    op: Any, rows: Sequence[Tensor], scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, *more: Any, **options: Any,
) -> Result:  # fmt: skip
    """Run an op on the tokens that sequences have: behind the last one o is zeros, and so are all gradients."""
    scale = rows[0].shape[-1] ** -0.5 if scale is None else scale
    behind = tensors.tokens_behind(cu_seqlens, rows[0])
    if behind:
        rows = [x[:, :-behind] if x.dim() > 2 else x for x in rows]  # u and fixed decays have no tokens
    o, final = op(*rows, in_float32(initial_state), output_final_state, cu_seqlens, *more, scale=scale, **options)
    return F.pad(o, (0, 0, 0, 0, 0, behind)) if behind else o, final


def run_with_states(
    size: int, op: Any, rows: Sequence[Tensor], scale: float | None, state: Any, wants_state: bool,
    cu_seqlens: Tensor | None, **options: Any,
) -> Any:  # fmt: skip
    """Return the state before each `size` tokens too: [B, chunks, heads, ...] in the dtype of o.

    The state in the middle of a part is the final one of its first half. A call halves all parts there are.
    """
    o, final = run(op, rows, scale, state, True, cu_seqlens, **options)
    assert final is not None
    batch, tokens = o.shape[:2]
    bounds = [tokens * n for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [x.flatten(0, 1).unsqueeze(0) for x in rows]  # [1, B T, ...]
    parts = [*zip(bounds, bounds[1:], strict=False)]
    begins = torch.zeros_like(final) if state is None else in_float32(state)
    before = {begin: x for (begin, end), x in zip(parts, begins, strict=True) if begin < end}
    while parts := [(begin, end) for begin, end in parts if end - begin > size]:
        halves = [(begin, begin + (1 - (begin - end) // size) // 2 * size) for begin, end in parts]
        places = torch.cat([torch.arange(*half, device=o.device) for half in halves])
        packed = torch.tensor([0, *accumulate(end - begin for begin, end in halves)], device=o.device)
        firsts = torch.stack([before[begin] for begin, _ in halves])
        _, finals = run(op, [x[:, places] for x in rows], scale, firsts, True, packed, **options)
        assert finals is not None
        before |= {middle: x for (_, middle), x in zip(halves, finals, strict=True)}
        parts = halves + [(middle, end) for (_, middle), (_, end) in zip(halves, parts, strict=True)]
    states = torch.stack([before[begin] for begin in sorted(before)]) if before else final[:0]
    return o, final if wants_state else None, states.view(batch, -1, *final.shape[1:]).to(o.dtype)


def small(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return what kernels take in q's dtype or in float32, in float32 where it has another one."""
    legal = q.dtype, torch.float32
    if torch.is_autocast_enabled(q.device.type):
        return others
    return tuple(x if x is None or x.dtype in legal else x.float() for x in others)


def call_of(
    scale: float | None = None, initial_state: Any = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, **_: Any,
) -> tuple[float | None, Any, bool, Tensor | None]:  # fmt: skip
    """Return what all functions have beside their rows, of a call's arguments."""
    return scale, initial_state, output_final_state, cu_seqlens


# ---- RWKV-7 ------------------------------------------------------------------------------------------------------


def _rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, lower_bound: float | None = None, **call: Any
) -> Result:
    refuse(r, k, v, a, b)
    rows = (r, *small(r, w), k, v, a, b)
    return run(wkv7, rows, *call_of(**call), decay="log", decay_bound=lower_bound, state_layout="kv")


_STATE = "scale=None, initial_state=None, output_final_state=False"
_ROWS_OF_RWKV7, _SCALE_OF_1 = "r, w, k, v, a, b", _STATE.replace("None", "1.0", 1)
_CHUNKED = (
    "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None, "
    "lower_bound=None"
)
chunk_dplr_delta_rule = function(
    "chunk_dplr_delta_rule", _rwkv7, f"q, k, v, a, b, gk, {_STATE}, {_CHUNKED}, **more",
    "Run the delta rule with a diagonal plus a low rank: `wkv7` with log-decays gk, `lower_bound` the least of them.",
    r="q", w="gk",
)  # fmt: skip
fused_recurrent_dplr_delta_rule = function(
    "fused_recurrent_dplr_delta_rule", _rwkv7, f"q, k, v, a, b, gk, {_STATE}, reverse=False, cu_seqlens=None",
    "Run `chunk_dplr_delta_rule`.", r="q", w="gk",
)  # fmt: skip
chunk_rwkv7 = function(
    "chunk_rwkv7", _rwkv7, f"{_ROWS_OF_RWKV7}, {_SCALE_OF_1}, {_CHUNKED}", "Run `wkv7` with log-decays w."
)
fused_recurrent_rwkv7 = function(
    "fused_recurrent_rwkv7", _rwkv7, f"{_ROWS_OF_RWKV7}, {_STATE.replace('False', 'True')}, cu_seqlens=None",
    "Run `chunk_rwkv7`.",
)  # fmt: skip
fused_mul_recurrent_rwkv7 = function(
    "fused_mul_recurrent_rwkv7", lambda a, b, **call: _rwkv7(a=-a, b=a * b, **call),
    f"r, w, k, v, kk, a, {_SCALE_OF_1}, reverse=False, cu_seqlens=None",
    "Run `chunk_rwkv7` with -kk for a and kk a for b.", a="kk", b="a",
)  # fmt: skip

# ---- without a delta term ----------------------------------------------------------------------------------------


def _rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **call: Any) -> Result:
    refuse(r, k, v)
    return run(wkv6, (r, k, v, *small(r, w, u)), *call_of(**call), decay="log", state_layout="kv")


def _gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state_layout: StateLayout, **call: Any) -> Result:
    refuse(q, k, v)
    op: Any = linear_attention if g is None else gla
    return run(op, (q, k, v, *(() if g is None else small(q, g))), *call_of(**call), state_layout=state_layout)


def _linear(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: Any, output_final_state: bool, normalize: bool,
    cu_seqlens: Tensor | None, **_: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run `linear_attention`. Normalized states are pairs (S, z), z (N, 1, H, K); S alone begins with a z of zeros."""
    refuse(q, k, v)
    if normalize and initial_state is not None:
        state, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
        state, z = (x if x is None else in_float32(tensors.from_any("initial_state", x)) for x in (state, z))
        sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        heads, head_size, value_size = *k.shape[2:], v.shape[-1]
        if state is None:
            state = q.new_zeros(sequences, heads, head_size, value_size, dtype=torch.float32)
        z = q.new_zeros(sequences, heads, head_size, dtype=state.dtype) if z is None else z.squeeze(1).to(state.dtype)
        initial_state = state, z
    call = scale, initial_state, output_final_state, cu_seqlens
    o, final = run(linear_attention, (q, k, v), *call, normalize, state_layout="kv")
    return o, (final[0], final[1].unsqueeze(1)) if normalize and final is not None else final


def _rwkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    refuse(k, v)
    w, u = small(k, w, u)
    y, final = wkv4(w, u, k, v, initial_state.squeeze(2), True, decay="raw")
    assert final is not None
    return y, final.unsqueeze(2)


def _shifted(
    x: Tensor, cu_seqlens: Tensor | None, first: Tensor | None, output_cache: bool, chunk_indices: Tensor | None
) -> Any:
    if x.device.type != "cpu":
        raise UnsupportedConfigError("the difference alone is FLA's own")
    first = None if first is None else first.reshape(-1, x.shape[-1])
    (before,) = layer.token_shift(x, x.new_ones(1, x.shape[-1]), first=first, cu_seqlens=cu_seqlens)
    return (before - x, last_tokens(x, first, cu_seqlens)) if output_cache else before - x


_PACKED = "cu_seqlens=None, cu_seqlens_cpu=None"
chunk_rwkv6 = function(
    "chunk_rwkv6", _rwkv6, f"r, k, v, w, u, {_STATE}, {_PACKED}, **more", "Run `wkv6` with log-decays w.", POWERS_OF_TWO
)
fused_recurrent_rwkv6 = function(
    "fused_recurrent_rwkv6", _rwkv6, f"r, k, v, w, u, {_STATE}, reverse=False, cu_seqlens=None", "Run `chunk_rwkv6`."
)
chunk_gla = function("chunk_gla", _gla, f"q, k, v, g, {_STATE}, state_v_first=False, {_PACKED}", "Run `gla`.")
fused_recurrent_gla = function(
    "fused_recurrent_gla", _gla,
    f"q, k, v, gk=None, gv=None, {_STATE}, reverse=False, state_v_first=False, cu_seqlens=None, **more",
    "Run `chunk_gla`; without gk `linear_attention`.", g="gk",
)  # fmt: skip
chunk_linear_attn = fused_chunk_linear_attn = function(
    "chunk_linear_attn", _linear, f"q, k, v, {_STATE}, normalize=True, cu_seqlens=None", str(_linear.__doc__),
    any_state=True,
)  # fmt: skip
fused_recurrent_linear_attn = function(
    "fused_recurrent_linear_attn", _linear, f"q, k, v, {_STATE}, reverse=False, normalize=False, cu_seqlens=None",
    "Run `chunk_linear_attn`, not normalized by default.", any_state=True,
)  # fmt: skip
fused_recurrent_rwkv4 = function(
    "fused_recurrent_rwkv4", _rwkv4, "w, u, k, v, state",
    "Run `wkv4` with w before -exp(w); states are (B, 3, 1, C).", initial_state="state",
)  # fmt: skip
token_shift = function(
    "token_shift", _shifted, "x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None",
    "Return the token before minus each token, with `output_cache` also the last of each sequence, (N, C); on a CPU.",
    first="cache",
)  # fmt: skip
