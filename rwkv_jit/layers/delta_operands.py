"""What `wkv7` takes for the delta rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rwkv_jit.layers import calls
from rwkv_jit.layers.calls import Call
from rwkv_jit.layers.inputs import Roles, as_tensors, check, check_lead, given_of, roles_of_heads
from rwkv_jit.plain import layers as plain
from rwkv_jit.schedules import layer_gradients, layers
from rwkv_jit.schedules.layer_gradients import BACKWARDS, Options
from rwkv_jit.schedules.layer_table import OPS, RESULTS
from rwkv_jit.schedules.layers import Given, makes_decays

_OP = OPS["delta_operands"]


def _check(
    inputs: Sequence[Any], written: Sequence[Any], lower_bound: float, gate: str, gate_of: str, rate_map: str,
    rate_of: str, norm: str,
) -> Call:  # fmt: skip
    """Check a call whose options are right: those that are no tensors are the public functions' to check."""
    k, q, beta, g, a_log, dt_bias = given = as_tensors("delta_operands", inputs)
    if k is None or k.dim() < 2 or not k.shape[-1]:
        raise ValueError(f"k: expected shape [..., heads, head size], got {None if k is None else list(k.shape)}")
    check_lead("k", k)
    heads = beta.shape[k.dim() - 2] if beta is not None and beta.dim() >= k.dim() - 1 else 0
    if not k.shape[-2] or heads % k.shape[-2] or not heads:
        got = None if beta is None else list(beta.shape)
        raise ValueError(f"beta: expected heads that are a multiple of the {k.shape[-2]} of k, got shape {got}")
    rows, size = tuple(k.shape[:-2]), k.shape[-1]
    if q is not None:
        check("delta_operands", "q", q, [tuple(k.shape)], k)
    of = {"head": (heads,), "channel": (heads, size)}
    check("delta_operands", "beta", beta, [(*rows, *of[rate_of])], k)
    if gate != "none":
        check("delta_operands", "g", g, [(*rows, *of[gate_of])], k)
    if gate in ("softplus", "bounded"):
        check("delta_operands", "A_log", a_log, [(heads,)], k)
    if dt_bias is not None:
        check("delta_operands", "dt_bias", dt_bias, [of[gate_of], (math.prod(of[gate_of]),)], k)
    absent = {"r": q is None, "w": not makes_decays(gate, gate_of)}
    made = {x: (*rows, heads, size) for x in RESULTS["delta_operands"] if not absent.get(x)}
    dtypes = {"w": torch.promote_types(k.dtype, torch.float32)}
    kinds = gate, gate_of, rate_map, rate_of, norm
    return Call(KIND, given, written, made, k, eps=float(lower_bound), kinds=kinds, dtypes=dtypes)


def _given(call: Call) -> Given:
    k, beta = call.inputs[0], call.inputs[2]
    heads, head_size = k.shape[-2:]
    return given_of(
        _OP.names, call.inputs, k.numel() // (heads * head_size), (heads, head_size, beta.shape[k.dim() - 2])
    )  # fmt: skip


def _roles(named: Mapping[str, Any], options: Sequence[Any]) -> tuple[Roles, int]:
    """Return what ranks may share, and the number of results."""
    return roles_of_heads(named, _OP.inputs), 3 + (named["q"] is not None) + makes_decays(*options[1:3])


KIND = calls.define(
    calls.Kind(
        _OP,
        tuple(RESULTS["delta_operands"]),
        _check,
        given=_given,
        forward=lambda call, given: layers.delta_operands(given, call.eps, call.kinds),
        plain=plain.delta_operands,
        backward=lambda call, given, wanted: layer_gradients.backward(
            "delta_operands", given, Options(call.eps, call.kinds), wanted
        ),
        backward_op=BACKWARDS["delta_operands"],
        options=lambda eps, kinds: (eps, *kinds),
        roles=_roles,
        lead="beta",
        results=tuple(RESULTS["delta_operands"]),
    )
)
