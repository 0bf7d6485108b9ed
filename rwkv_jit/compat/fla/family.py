"""FLA's functions of the delta rules and of decays for heads, with its arguments, on the ops of this family.

Options that change nothing here are taken: `safe_gate`, `chunk_size`, `disable_recompute`, `cu_seqlens_cpu`,
`chunk_indices`, `max_num_seqs` and whatever else FLA itself would not read. States are [K, V], or [V, K] with
`state_v_first`, and what comes back is float32 as there. `scale=None` is K^(-1/2).

Each raises `UnsupportedConfigError` where the kernels cannot do what is asked, before anything runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_jit.compat.fla.functions import (
    POWERS_OF_TWO,
    Result,
    check_chunks,
    layout_of,
    name_arguments,
    refuse,
    run,
    small,
)
from rwkv_jit.derived.delta import delta_rule, gated_delta_rule, gated_delta_rule2, kda
from rwkv_jit.derived.diagonal import simple_gla
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.ops.linear_attention import linear_attention
from rwkv_jit.schedules.legal import BetaMap

# ---- delta rules -------------------------------------------------------------------------------------------------


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    r"""Run Kimi Delta Attention as `kda` does.

        S <- diag(e^g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q

    H is the key heads, HV the value heads, a multiple of H.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, H, K)
        Query and key.
    v : torch.Tensor, shape (B, T, HV, V)
        Value.
    g : torch.Tensor, shape (B, T, HV, K)
        Logarithm of the decay, or what it is made of.
    beta : torch.Tensor, shape (B, T, HV)
        Rate of writing, or its logit.
    scale : float, optional
        Of o; K^(-1/2) by default.
    initial_state : torch.Tensor, shape (N, HV, K, V), optional
        State before the first token.
    output_final_state : bool, default False
        Whether to return the state after the last token.
    use_qk_l2norm_in_kernel : bool, default False
        Whether q and k are divided by sqrt(|x|^2 + 1e-6) first.
    use_gate_in_kernel : bool, default False
        Whether the log-decay is -exp(A_log) softplus(g + dt_bias), with `lower_bound` lower_bound sigmoid(exp(A_log)
        (g + dt_bias)).
    use_beta_sigmoid_in_kernel, allow_neg_eigval : bool, default False
        Whether the rate is the sigmoid of beta; and twice that.
    lower_bound : float, optional
        See `use_gate_in_kernel`; A_log may be None with it. Where g is the log-decay and `safe_gate` is given, its
        least value.
    state_v_first : bool, default False
        Whether states are [V, K].
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Where packed sequences begin and end; B is 1 then.
    A_log : torch.Tensor, HV elements, optional
        See `use_gate_in_kernel`; else not read.
    dt_bias : torch.Tensor, HV * K elements, optional
        See `use_gate_in_kernel`; else not read.
    return_intermediate_states : bool, default False
        Whether to return the state before each chunk of `chunk_size` tokens too, 64 by default. A call for each power
        of two of their number makes these.
    cp_context
        Must be None.
    safe_gate : bool, default False
        Whether `lower_bound` must lie in [-5, 0) with `use_gate_in_kernel`, and is read without. It changes nothing
        else: any decay is right.
    disable_recompute, cu_seqlens_cpu, max_num_seqs, **more
        Change nothing: chunks are chosen by the sizes. Of a `chunk_size` that FLA does not have, it says so itself.
    use_graph : bool, default False
        Must be False with `cu_seqlens`: graphs of packed sequences whose number changes are FLA's own.

    Returns
    -------
    o : torch.Tensor, shape (B, T, HV, V)
    final_state : torch.Tensor, shape (N, HV, K, V), float32, or None
    h : torch.Tensor, shape (B, chunks, HV, K, V), dtype of v
        With `return_intermediate_states` alone; those of packed sequences stand one behind another.

    Raises
    ------
    UnsupportedConfigError
        Something is asked for that must not be, or dtypes or sizes are beyond the kernels.
    TypeError, ValueError
        As `kda`; A_log is missing, `allow_neg_eigval` is given without `use_beta_sigmoid_in_kernel`, or `lower_bound`
        is not what `safe_gate` asks for.
    """
    refuse(q, k, v, cp_context=cp_context, use_graph=use_graph and cu_seqlens is not None)
    check_chunks(more, 64, 32)
    _refuse_each(q, beta)
    g, beta, A_log, dt_bias = small(q, g, beta, A_log, dt_bias)
    return run(
        kda, (q, k, v, g, beta), scale, initial_state, output_final_state, cu_seqlens,
        state_layout=layout_of(state_v_first, more), qk_norm=use_qk_l2norm_in_kernel,
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        **_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, v),
        every=more.get("chunk_size", 64) if return_intermediate_states else 0,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run `chunk_kda`; beta is one number for each head."""
    return chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound,
        state_v_first=layout_of(state_v_first, more) == "vk", cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: Any = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run the gated delta rule as `gated_delta_rule` does: `chunk_kda` with g of (B, T, HV) and dt_bias of (HV,)."""
    refuse(q, k, v, cp_context=cp_context)
    check_chunks(more, 64, 32, 16)
    _refuse_each(q, beta)
    g, beta, A_log, dt_bias = small(q, g, beta, A_log, dt_bias)
    return run(
        gated_delta_rule, (q, k, v, g, beta), scale, initial_state, output_final_state, cu_seqlens,
        state_layout=layout_of(state_v_first, more), qk_norm=use_qk_l2norm_in_kernel,
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval), **_gate(use_gate_in_kernel, A_log, dt_bias),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run `chunk_gated_delta_rule`, with gk for decays of channels, without decays where neither is given.

    beta is 1 by default, and one number for each head. `gv` must be None, and gk too with `use_gate_in_kernel`.
    """
    refuse(gv=gv, gk=gk if use_gate_in_kernel else None)
    if g is None and use_gate_in_kernel:
        raise ValueError("g: expected a tensor with use_gate_in_kernel, got None")
    if beta is None:
        beta = v.new_ones(v.shape[:-1])
    state_v_first = layout_of(state_v_first, more) == "vk"
    rest: dict[str, Any] = {
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    state = initial_state, output_final_state
    if gk is not None:
        decay = gk if g is None else gk + g.unsqueeze(-1)
        return chunk_kda(q, k, v, decay, beta, scale, *state, use_qk_l2norm_in_kernel, **rest)
    if g is None:
        return _delta_rule(q, k, v, beta, scale, *state, use_qk_l2norm_in_kernel, **rest)
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, *state, use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log,
        dt_bias=dt_bias, **rest,
    )  # fmt: skip


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run the delta rule as `delta_rule` does, float32 too."""
    refuse(head_first=more.get("head_first"))
    check_chunks(more, 64, 32, 16)
    return _delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens
    )


def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_delta_rule`; beta is 1 by default, and one number for each head."""
    return chunk_delta_rule(
        q, k, v, v.new_ones(v.shape[:-1]) if beta is None else beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens,
    )  # fmt: skip


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None, initial_state: Tensor | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    refuse(q, k, v)
    _refuse_each(q, beta)
    (beta,) = small(q, beta)
    return run(
        delta_rule, (q, k, v, beta), scale, initial_state, output_final_state, cu_seqlens,
        state_layout="vk" if state_v_first else "kv", qk_norm=use_qk_l2norm_in_kernel,
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval),
    )  # fmt: skip


def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cp_context: Any = None, *,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run the gated delta rule by channels as `gated_delta_rule2` does: b erases, w writes, the rest as `chunk_kda`."""
    refuse(q, k, v, w, cp_context=cp_context)
    check_chunks(more, 64)
    g, b, A_log, dt_bias = small(q, g, b, A_log, dt_bias)
    return run(
        gated_delta_rule2, (q, k, v, g, b, w), scale, initial_state, output_final_state, cu_seqlens,
        state_layout=layout_of(state_v_first, more), qk_norm=use_qk_l2norm_in_kernel,
        **_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, v),
        every=more.get("chunk_size", 64) if return_intermediate_states else 0,
    )  # fmt: skip


def fused_recurrent_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run `chunk_gdn2`."""
    return chunk_gdn2(
        q, k, v, g, b, w, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        cu_seqlens, lower_bound=lower_bound, state_v_first=layout_of(state_v_first, more) == "vk", A_log=A_log,
        dt_bias=dt_bias,
    )  # fmt: skip


# ---- decays for heads --------------------------------------------------------------------------------------------


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run linear attention with decays for heads as `simple_gla` does.

        S <- e^g S + k v^T;   o = scale S^T q

    g is (B, T, H), or `g_gamma` (H,) for all tokens, and both add up; without either it is `linear_attention`.
    """
    refuse(q, k, v, head_first=more.get("head_first"))
    check_chunks(more, None, *POWERS_OF_TWO)
    decay = g_gamma if g is None else g if g_gamma is None else g + g_gamma
    op: Any = linear_attention if decay is None else simple_gla
    return run(
        op, (q, k, v, *(() if decay is None else small(q, decay))), scale, initial_state, output_final_state,
        cu_seqlens, state_layout="vk" if state_v_first else "kv",
    )  # fmt: skip


def fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_simple_gla`."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run `chunk_simple_gla`; `reverse` must be False."""
    refuse(reverse=reverse)
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, layout_of(state_v_first, more) == "vk",
        cu_seqlens,
    )  # fmt: skip


def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
    output_attentions: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_simple_gla` from no state; `output_attentions` must be False, and the second result is None."""
    refuse(output_attentions=output_attentions)
    return chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens)


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run retention: `chunk_simple_gla` whose decay of head h is 1 - 2^(-5 - h)."""
    refuse(head_first=more.get("head_first"))
    check_chunks(more, None, *POWERS_OF_TWO)
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **more: Any,
) -> Result:  # fmt: skip
    """Run `chunk_retention`; `reverse` must be False."""
    refuse(reverse=reverse)
    g = torch.log1p(-(2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))))
    return chunk_simple_gla(
        q, k, v, None, g, scale, initial_state, output_final_state, layout_of(state_v_first, more) == "vk", cu_seqlens
    )


def parallel_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_retention` from no state; `output_attentions` must be False, and the second result is None."""
    refuse(output_attentions=output_attentions)
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens)


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    **more: Any,
) -> Result:  # fmt: skip
    """Run lightning attention: `chunk_simple_gla` whose g of head h of H is -8 h / H (1 - layer_idx / num_layers)."""
    refuse(head_first=more.get("head_first"))
    check_chunks(more, None, *POWERS_OF_TWO)
    heads = q.shape[2]
    g = -(8 / heads * (1 - layer_idx / num_layers)) * torch.arange(heads, dtype=torch.float, device=q.device)
    return chunk_simple_gla(q, k, v, None, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Run `chunk_lightning_attn`; `reverse` must be False."""
    refuse(reverse=reverse)
    return chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens)


# ---- what the arguments mean -------------------------------------------------------------------------------------


def _beta_map(is_logit: bool, allow_neg_eigval: bool) -> BetaMap:
    """Return what makes rates of beta."""
    if allow_neg_eigval and not is_logit:
        raise ValueError("allow_neg_eigval: needs use_beta_sigmoid_in_kernel")
    return "twice_sigmoid" if allow_neg_eigval else "sigmoid" if is_logit else "identity"


def _gate(
    is_raw: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None,
    safe_gate: bool = False, v: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of the gate; v says how many heads there are where A_log is none."""
    if not is_raw:
        return {"decay_bound": lower_bound} if safe_gate and lower_bound is not None else {}
    if A_log is None and lower_bound is not None and v is not None:
        A_log = v.new_zeros(v.shape[2], dtype=torch.promote_types(v.dtype, torch.float32))
    if A_log is None:
        raise ValueError("A_log: expected a tensor with use_gate_in_kernel, got None")
    if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {lower_bound!r}")
    # Models keep them as [1, 1, HV, 1] and the like, which FLA's kernels do not look at.
    A_log, dt_bias = A_log.reshape(-1), None if dt_bias is None else dt_bias.reshape(-1)
    return {"A_log": A_log, "dt_bias": dt_bias} | ({} if lower_bound is None else {"lower_bound": lower_bound})


def _refuse_each(q: Tensor, beta: Tensor) -> None:
    """Refuse a beta of each value."""
    if beta.dim() == q.dim():
        raise UnsupportedConfigError("a beta of each value is not supported")


name_arguments(globals())
