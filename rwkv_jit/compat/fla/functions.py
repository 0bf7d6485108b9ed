"""FLA's functions with its arguments: decays are logarithms, states [K, V], and `scale=None` is K^(-1/2).

Each raises `UnsupportedConfigError` where the kernels cannot do what is asked, before anything runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.call import tensors
from rwkv_jit.compat.fla import FUNCTIONS
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
POWERS_OF_TWO = tuple(2**x for x in range(31))


def refuse(*rows: Tensor, **unsupported: Any) -> None:
    """Raise an error where the kernels have not what is asked for, and FLA's code may have it.

    Parameters
    ----------
    *rows : torch.Tensor
        Those that share a device and a dtype here.
    **unsupported
        Options by their names, which must be None or False.

    Raises
    ------
    UnsupportedConfigError
        An option is given, or the tensors are elsewhere or of other dtypes.
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


def check_chunks(more: Mapping[str, Any], *sizes: int | None) -> None:
    """Leave it to FLA to refuse a `chunk_size` that is none of these; the first is its default, and all do the same."""
    if more.get("chunk_size", sizes[0]) not in sizes:
        raise UnsupportedConfigError(f"chunk_size={more['chunk_size']} is not supported")


def layout_of(state_v_first: bool, more: Mapping[str, Any]) -> StateLayout:
    """Return the layout of states, which `more` may have by its older name."""
    refuse(head_first=more.get("head_first"))
    if "transpose_state_layout" in more:
        if state_v_first:
            raise ValueError("transpose_state_layout: is the older name of state_v_first, got both")
        # Behind this function, the one that is called, what names its arguments, and what stands in FLA's module.
        warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=5)
        state_v_first = more["transpose_state_layout"]
    return "vk" if state_v_first else "kv"


def run(
    op: Any, rows: Sequence[Tensor], scale: float | None, state: Any, wants_state: bool, cu_seqlens: Tensor | None,
    *more: Any, every: int = 0, **options: Any,
) -> Result:  # fmt: skip
    """Run an op on the tokens that sequences have: behind the last one o is zeros, and so are all gradients.

    With `every` the states before so many tokens each are a third result.
    """
    if every:
        given = op, rows, scale, state, wants_state, cu_seqlens
        return _run_with_states(every, *given, **options)  # type: ignore[no-any-return]
    scale = rows[0].shape[-1] ** -0.5 if scale is None else scale
    behind = tensors.tokens_behind(cu_seqlens, rows[0])
    if behind:
        rows = [x[:, :-behind] if x.dim() > 2 else x for x in rows]  # u and fixed decays have no tokens
    o, final = op(*rows, state_of(state), wants_state, cu_seqlens, *more, scale=scale, **options)
    return F.pad(o, (0, 0, 0, 0, 0, behind)) if behind else o, final


def _run_with_states(
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
    begins = torch.zeros_like(final) if state is None else state_of(state)
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
    made = torch.stack([before[begin] for begin in sorted(before)]) if before else final[:0]
    return o, final if wants_state else None, made.view(batch, -1, *final.shape[1:]).to(o.dtype)


def state_of(given: Any) -> Any:
    """Return a state that final ones have the dtype of: float32, as FLA's are."""
    return given.float() if isinstance(given, Tensor) and given.dtype.itemsize < 4 else given


def small(q: Tensor, *given: Tensor | None) -> tuple[Any, ...]:
    """Return what kernels take in q's dtype or in float32, in float32 where it has another one."""
    legal = q.dtype, torch.float32
    if torch.is_autocast_enabled(q.device.type):
        return given
    return tuple(x if x is None or x.dtype in legal else x.float() for x in given)


# ---- RWKV-7 ------------------------------------------------------------------------------------------------------


def chunk_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False, chunk_size: int | None = None,
    disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None, **more: Any,
) -> Result:  # fmt: skip
    r"""Run the delta rule with a diagonal plus a low rank, which is RWKV-7's.

        S_t = diag(e^gk_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T;   o_t = scale S_t^T q_t

    Parameters
    ----------
    q, k, a, b : torch.Tensor, shape (B, T, H, K)
        As `wkv7` takes r, k, a and b.
    v : torch.Tensor, shape (B, T, H, V)
        Value.
    gk : torch.Tensor, shape (B, T, H, K)
        Logarithm of the decay.
    scale : float, optional
        Of o; K^(-1/2) by default.
    initial_state : torch.Tensor, shape (N, H, K, V), optional
        State before the first token.
    output_final_state : bool, default False
        Whether to return the state after the last token.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Where packed sequences begin and end; B is 1 then.
    lower_bound : float, optional
        The least value of gk.
    cu_seqlens_cpu, safe_gate, chunk_size, disable_recompute
        Change nothing here: any decay is right, and chunks are chosen by the sizes.
    cp_context
        Must be None; `rwkv_jit.parallel` shares sequences between processes.
    **more
        `head_first` must be False; FLA reads nothing else.

    Returns
    -------
    o : torch.Tensor, shape (B, T, H, V)
    final_state : torch.Tensor, shape (N, H, K, V), float32, or None

    Raises
    ------
    UnsupportedConfigError
        `cp_context` or `head_first` is given, q, k, v, a and b have several dtypes or one that the kernels have not, or
        the sizes are beyond theirs.
    TypeError, ValueError
        As `wkv7`.
    """
    refuse(q, k, v, a, b, cp_context=cp_context, head_first=more.get("head_first"))
    return run(
        wkv7, (q, *small(q, gk), k, v, a, b), scale, initial_state, output_final_state, cu_seqlens, decay="log",
        decay_bound=lower_bound, state_layout="kv",
    )  # fmt: skip


def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False, chunk_size: int | None = None,
    disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None,
) -> Result:  # fmt: skip
    """Run RWKV-7 time mixing: `chunk_dplr_delta_rule` with r for q and w for gk, and a scale of 1 by default."""
    return chunk_dplr_delta_rule(
        r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cp_context=cp_context,
        lower_bound=lower_bound,
    )  # fmt: skip


def fused_recurrent_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_dplr_delta_rule`; `reverse` must be False."""
    refuse(reverse=reverse)
    return chunk_dplr_delta_rule(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_rwkv7`, with a scale of K^(-1/2) and the final state by default."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, scale: float | None = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_rwkv7` with -kk for a and kk a for b; `reverse` must be False."""
    refuse(reverse=reverse)
    return chunk_dplr_delta_rule(r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, cu_seqlens)


# ---- without a delta term ----------------------------------------------------------------------------------------


def chunk_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run RWKV-6 time mixing as `wkv6` does; w is the logarithm of the decay, and scale K^(-1/2) by default."""
    refuse(r, k, v, head_first=more.get("head_first"))
    check_chunks(more, None, *POWERS_OF_TWO)
    return run(
        wkv6, (r, k, v, *small(r, w, u)), scale, initial_state, output_final_state, cu_seqlens, decay="log",
        state_layout="kv",
    )  # fmt: skip


def fused_recurrent_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_rwkv6`; `reverse` must be False."""
    refuse(reverse=reverse)
    return chunk_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens)


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run gated linear attention as `gla` does; states are [V, K] with `state_v_first`."""
    refuse(q, k, v)
    return run(
        gla, (q, k, v, *small(q, g)), scale, initial_state, output_final_state, cu_seqlens,
        state_layout="vk" if state_v_first else "kv",
    )  # fmt: skip


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run `chunk_gla`, without a gate `linear_attention`; `gv` must be None and `reverse` False."""
    refuse(q, k, v, gv=gv, reverse=reverse)
    layout = layout_of(state_v_first, more)
    if gk is not None:
        return chunk_gla(q, k, v, gk, scale, initial_state, output_final_state, layout == "vk", cu_seqlens)
    state = initial_state, output_final_state
    return run(linear_attention, (q, k, v), scale, *state, cu_seqlens, state_layout=layout)


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run linear attention as `linear_attention` does, normalized by default.

    Normalized states are pairs (S, z) with z of shape (N, 1, H, K); S alone begins with a z of zeros.
    """
    refuse(q, k, v)
    if not normalize:
        initial_state = state_of(initial_state)
    elif initial_state is not None:
        state, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
        state, z = (x if x is None else state_of(tensors.from_any("initial_state", x)) for x in (state, z))
        texts = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        heads, head_size, value_size = *k.shape[2:], v.shape[-1]
        if state is None:
            state = q.new_zeros(texts, heads, head_size, value_size, dtype=torch.float32)
        z = q.new_zeros(texts, heads, head_size, dtype=state.dtype) if z is None else z.squeeze(1).to(state.dtype)
        initial_state = state, z
    o, final = run(
        linear_attention, (q, k, v), scale, initial_state, output_final_state, cu_seqlens, normalize, state_layout="kv"
    )
    return o, (final[0], final[1].unsqueeze(1)) if normalize and final is not None else final


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run `chunk_linear_attn`, not normalized by default; `reverse` must be False."""
    refuse(reverse=reverse)
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_rwkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run RWKV-4 time mixing as `wkv4` does, with w before -exp(w) and states of shape (B, 3, 1, C)."""
    refuse(k, v)
    w, u = small(k, w, u)
    y, final = wkv4(w, u, k, v, state.squeeze(2), True, decay="raw")
    assert final is not None
    return y, final.unsqueeze(2)


def token_shift(
    x: Tensor, cu_seqlens: Tensor | None = None, cache: Tensor | None = None, output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return the token before minus each token, and with `output_cache` the last token of each text, (N, C).

    On a GPU it is left to FLA, whose kernel writes the difference at once.
    """
    if x.device.type != "cpu":
        raise UnsupportedConfigError("the difference alone is FLA's own")
    first = None if cache is None else cache.reshape(-1, x.shape[-1])
    (before,) = layer.token_shift(x, x.new_ones(1, x.shape[-1]), first=first, cu_seqlens=cu_seqlens)
    return (before - x, last_tokens(x, first, cu_seqlens)) if output_cache else before - x


_OF_RWKV7 = {"q": "r", "gk": "w"}
_NAMES = {  # what arguments are called, by what they are below
    "chunk_dplr_delta_rule": {"r": "q", "w": "gk"}, "chunk_rwkv7": _OF_RWKV7, "fused_recurrent_rwkv7": _OF_RWKV7,
    "fused_mul_recurrent_rwkv7": {**_OF_RWKV7, "a": "kk", "b": "a"}, "fused_recurrent_gla": {"g": "gk"},
    "fused_recurrent_rwkv4": {"initial_state": "state"}, "token_shift": {"first": "cache"},
    "chunk_gdn2": {"beta": "b", "write_gate": "w"},
}  # fmt: skip


def name_arguments(module: dict[str, Any]) -> None:
    """Let the functions of a module that FLA has too name arguments as it does."""
    for name in {*chain(*FUNCTIONS.values())} & module.keys():
        module[name] = named(**_NAMES.get(name, {}))(module[name])


name_arguments(globals())
