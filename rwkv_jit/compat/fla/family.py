"""FLA's functions of the delta rules and of decays for heads; `functions` says what all of them share.

`use_qk_l2norm_in_kernel` divides q and k by sqrt(|x|^2 + 1e-6). `use_gate_in_kernel` makes the log-decay
-exp(A_log) softplus(g + dt_bias), and with `lower_bound` lower_bound sigmoid(exp(A_log) (g + dt_bias)), where A_log may
be None. `use_beta_sigmoid_in_kernel` takes the sigmoid of beta, `allow_neg_eigval` twice that. `safe_gate` needs
`lower_bound` in [-5, 0) beside a gate; without one `lower_bound` is the least log-decay. `return_intermediate_states`
returns the state before each chunk of `chunk_size` tokens, 64 by default, too: (B, chunks, HV, K, V), dtype of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_jit.compat.fla.functions import POWERS_OF_TWO, Result, call_of, function, refuse, run, run_with_states, small
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.ops.delta import delta_rule, gated_delta_rule, gated_delta_rule2, kda
from rwkv_jit.ops.diagonal import simple_gla
from rwkv_jit.ops.linear_attention import linear_attention

# ---- delta rules -------------------------------------------------------------------------------------------------


def _kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, use_graph: bool = False, **call: Any,
) -> Result:  # fmt: skip
    refuse(q, k, v, use_graph=use_graph and call["cu_seqlens"] is not None)  # graphs of changing sequences are FLA's
    _refuse_each(q, beta)
    g, beta, A_log, dt_bias = small(q, g, beta, A_log, dt_bias)
    return _run(kda, (q, k, v, g, beta), call, **_beta_map(**call), **_gate(A_log, dt_bias, v, **call))


def _gated(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, gk: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_gate_in_kernel: bool = False, **call: Any,
) -> Result:  # fmt: skip
    beta = v.new_ones(v.shape[:-1]) if beta is None else beta
    refuse(gk=gk if use_gate_in_kernel else None)
    if gk is not None:  # decays of channels
        return _kda(q, k, v, gk if g is None else gk + g.unsqueeze(-1), beta, **call)
    if g is None and use_gate_in_kernel:
        raise ValueError("g: expected a tensor with use_gate_in_kernel, got None")
    if g is None:
        return _delta(q, k, v, beta, **call)
    refuse(q, k, v)
    _refuse_each(q, beta)
    g, beta, A_log, dt_bias = small(q, g, beta, A_log, dt_bias)
    gate = _gate(A_log, dt_bias, use_gate_in_kernel=use_gate_in_kernel)
    return _run(gated_delta_rule, (q, k, v, g, beta), call, **_beta_map(**call), **gate)


def _delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, **call: Any) -> Result:
    beta = v.new_ones(v.shape[:-1]) if beta is None else beta
    refuse(q, k, v)
    _refuse_each(q, beta)
    return _run(delta_rule, (q, k, v, *small(q, beta)), call, **_beta_map(**call))


def _gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, write_gate: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, **call: Any,
) -> Result:  # fmt: skip
    refuse(q, k, v, write_gate)
    g, beta, A_log, dt_bias = small(q, g, beta, A_log, dt_bias)
    return _run(gated_delta_rule2, (q, k, v, g, beta, write_gate), call, **_gate(A_log, dt_bias, v, **call))


def _run(op: Any, rows: tuple[Tensor, ...], call: dict[str, Any], **options: Any) -> Result:
    options |= {"state_layout": call.get("state_layout", "kv"), "qk_norm": call["use_qk_l2norm_in_kernel"]}
    if call.get("return_intermediate_states"):
        refuse(cp_context=call.get("cp_context"))
        return run_with_states(call["chunk_size"], op, rows, *call_of(**call), **options)  # type: ignore[no-any-return]
    return run(op, rows, *call_of(**call), **options)


def _beta_map(use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, **_: Any) -> dict[str, str]:
    """Return what makes rates of beta."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: needs use_beta_sigmoid_in_kernel")
    is_logit = "sigmoid" if use_beta_sigmoid_in_kernel else "identity"
    return {"beta_map": "twice_sigmoid" if allow_neg_eigval else is_logit}


def _gate(
    A_log: Tensor | None, dt_bias: Tensor | None, v: Tensor | None = None, use_gate_in_kernel: bool = False,
    lower_bound: float | None = None, safe_gate: bool = False, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of the gate; v says how many heads there are where A_log is none."""
    if not use_gate_in_kernel:
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
    if beta.dim() == q.dim():
        raise UnsupportedConfigError("a beta of each value is not supported")


_STATE, _GATE = "scale=None, initial_state=None, output_final_state=False", "A_log=None, dt_bias=None"
_NORM, _IN_KERNEL = "use_qk_l2norm_in_kernel=False", "use_gate_in_kernel=False"
_RATE = "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
_ENDS, _PACKED = "state_v_first=False, cu_seqlens=None", "cu_seqlens=None, cu_seqlens_cpu=None"
_SAFE = "safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False"
chunk_kda = function(
    "chunk_kda", _kda,
    f"q, k, v, g, beta, {_STATE}, {_NORM}, {_IN_KERNEL}, {_RATE}, {_SAFE}, {_ENDS}, cu_seqlens_cpu=None, "
    f"cp_context=None, use_graph=False, max_num_seqs=None, *, {_GATE}, **more",
    "Run `kda`; graphs of packed sequences whose number changes, `use_graph`, are FLA's.", (64, 32),
)  # fmt: skip
fused_recurrent_kda = function(
    "fused_recurrent_kda", _kda,
    f"q, k, v, g, beta, {_GATE}, {_STATE}, {_NORM}, {_IN_KERNEL}, {_RATE}, lower_bound=None, {_ENDS}, **more",
    "Run `chunk_kda`; beta is one number for each head.",
)  # fmt: skip
chunk_gated_delta_rule = function(
    "chunk_gated_delta_rule", _gated,
    f"q, k, v, g, beta, {_STATE}, {_NORM}, {_RATE}, {_ENDS}, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
    f"*, {_IN_KERNEL}, {_GATE}, **more",
    "Run `gated_delta_rule`.", (64, 32, 16),
)  # fmt: skip
fused_recurrent_gated_delta_rule = function(
    "fused_recurrent_gated_delta_rule", _gated,
    f"q, k, v, g=None, gk=None, gv=None, beta=None, {_STATE}, {_NORM}, {_IN_KERNEL}, {_GATE}, {_RATE}, {_ENDS}, **more",
    "Run `chunk_gated_delta_rule`; gk decays channels, without g and gk nothing decays, and beta is 1 by default.",
)  # fmt: skip
chunk_delta_rule = function(
    "chunk_delta_rule", _delta, f"q, k, v, beta, {_STATE}, {_NORM}, {_PACKED}, **more",
    "Run `delta_rule`, float32 too.", (64, 32, 16),
)  # fmt: skip
fused_recurrent_delta_rule = function(
    "fused_recurrent_delta_rule", _delta, f"q, k, v, beta=None, {_STATE}, {_NORM}, cu_seqlens=None",
    "Run `chunk_delta_rule`; beta is 1 by default, and one number for each head.",
)  # fmt: skip
chunk_gdn2 = function(
    "chunk_gdn2", _gdn2,
    f"q, k, v, g, b, w, {_STATE}, {_NORM}, {_IN_KERNEL}, {_PACKED}, {_SAFE}, state_v_first=False, cp_context=None, *, "
    f"{_GATE}, **more",
    "Run `gated_delta_rule2`: b erases, w writes.", (64,), beta="b", write_gate="w",
)  # fmt: skip
fused_recurrent_gdn2 = function(
    "fused_recurrent_gdn2", _gdn2,
    f"q, k, v, g, b, w, {_GATE}, {_STATE}, {_NORM}, {_IN_KERNEL}, lower_bound=None, {_ENDS}, **more",
    "Run `chunk_gdn2`.", beta="b", write_gate="w",
)  # fmt: skip

# ---- decays for heads --------------------------------------------------------------------------------------------


def _simple(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, **call: Any
) -> Result:
    """Run `simple_gla` with g (B, T, H), g_gamma (H,) for all tokens, or their sum; else `linear_attention`."""
    refuse(q, k, v)
    decay = g_gamma if g is None else g if g_gamma is None else g + g_gamma
    op: Any = linear_attention if decay is None else simple_gla
    rows = (q, k, v, *(() if decay is None else small(q, decay)))
    return run(op, rows, *call_of(**call), state_layout=call.get("state_layout", "kv"))


def _retention(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Result:
    """Run `chunk_simple_gla` whose decay of head h is 1 - 2^(-5 - h)."""
    return _simple(q, k, v, None, torch.log1p(-(2.0 ** (-5.0 - _heads(q)))), **call)


def _lightning(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **call: Any) -> Result:
    """Run `chunk_simple_gla` whose g of head h of H is -8 h / H (1 - layer_idx / num_layers)."""
    return _simple(q, k, v, None, -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * _heads(q), **call)


def _heads(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], dtype=torch.float, device=q.device)


_DECAYS, _LAYERS = "g=None, g_gamma=None", "layer_idx, num_layers"
chunk_simple_gla = function(
    "chunk_simple_gla", _simple, f"q, k, v, {_DECAYS}, {_STATE}, state_v_first=False, {_PACKED}, **more",
    str(_simple.__doc__), POWERS_OF_TWO, reads_older_name=False,
)  # fmt: skip
fused_chunk_simple_gla = function(
    "fused_chunk_simple_gla", _simple, f"q, k, v, {_DECAYS}, {_STATE}, cu_seqlens=None", "Run `chunk_simple_gla`."
)
fused_recurrent_simple_gla = function(
    "fused_recurrent_simple_gla", _simple, f"q, k, v, {_DECAYS}, {_STATE}, reverse=False, {_ENDS}, **more",
    "Run `chunk_simple_gla`.",
)  # fmt: skip
parallel_simple_gla = function(
    "parallel_simple_gla", _simple, f"q, k, v, g=None, scale=None, output_attentions=False, {_PACKED}",
    "Run `chunk_simple_gla` from no state; the second result is None.",
)  # fmt: skip
chunk_retention = function(
    "chunk_retention", _retention, f"q, k, v, {_STATE}, cu_seqlens=None, **more", str(_retention.__doc__), POWERS_OF_TWO
)
fused_chunk_retention = function(
    "fused_chunk_retention", _retention, f"q, k, v, {_STATE}, cu_seqlens=None", "Run `chunk_retention`."
)
fused_recurrent_retention = function(
    "fused_recurrent_retention", _retention, f"q, k, v, {_STATE}, reverse=False, {_ENDS}, **more",
    "Run `chunk_retention`.",
)  # fmt: skip
parallel_retention = function(
    "parallel_retention", _retention, "q, k, v, scale=None, output_attentions=False, cu_seqlens=None",
    "Run `chunk_retention` from no state; the second result is None.",
)  # fmt: skip
chunk_lightning_attn = function(
    "chunk_lightning_attn", _lightning, f"q, k, v, {_LAYERS}, {_STATE}, cu_seqlens=None, **more",
    str(_lightning.__doc__), POWERS_OF_TWO,
)  # fmt: skip
fused_recurrent_lightning_attn = function(
    "fused_recurrent_lightning_attn", _lightning, f"q, k, v, {_LAYERS}, {_STATE}, reverse=False, cu_seqlens=None",
    "Run `chunk_lightning_attn`.",
)  # fmt: skip
