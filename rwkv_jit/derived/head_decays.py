"""Ops with one decay for a head, or with none, in a kernel of their own: calls without gradients, of many heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit import modes, tensors
from rwkv_jit.algorithms.parts import MOST_HEADS, Case
from rwkv_jit.derived import arguments, steps
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.derived.table import Core
from rwkv_jit.layers import plain
from rwkv_jit.ops import checks, torch_op
from rwkv_jit.plan import Plan
from rwkv_jit.rule import LEAST_TOKENS
from rwkv_jit.signatures import BySignature

LEAST_BLOCKS = 1 / 5  # heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments elsewhere

_plans: BySignature[Plan] = BySignature()


def chunk_len(call: Sequences, q: Tensor, v: Tensor, *parameters: Any) -> int | None:
    """Return the tokens of a chunk of a call that has been checked; None where it is for other kernels.

    `parameters` are those that are no inputs of the call, and may want a gradient.
    """
    state, cu_seqlens, tail = call.initial_state, call.cu_seqlens, call.tail
    given = (*call.inputs, state, cu_seqlens, *parameters)
    if not (v.is_cuda and v.numel() and tensors.is_eager() and tensors.are_plain(given)):
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return None
    if tail.backend != "auto" or tail.num_threads is not None:
        return None
    narrow, is_batch_invariant = modes.current()
    storage = tensors.STORAGE[v.dtype]
    if storage in narrow:
        return None
    batch, tokens, heads, value_size = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if batch * tokens < LEAST_TOKENS * sequences or heads > MOST_HEADS:
        return None
    device = v.device.index
    if sequences * heads < LEAST_BLOCKS * tensors.multiprocessors(device) and not is_batch_invariant:
        return None
    op, gpu = Core(True).op, tensors.gpu(device)
    case = Case(op, storage, q.shape[-1], value_size, tokens, op.decay, None, tail.chunk_len, training=False)
    if steps.why_not(case, lambda: gpu) is not None:
        return None
    return tail.chunk_len or steps.default_chunk_len(case, gpu)


def run(core: Core, arrays: Sequence[Tensor], call: Sequences, length: int, output_final_state: bool) -> Result:
    """Run a call in chunks of this length; `arrays` are the inputs of the core."""
    op, v, tail = core.op, arrays[2], call.tail
    state, bounds = call.initial_state, call.cu_seqlens
    if bounds is not None:
        bounds = tensors.packing(bounds, v.shape[1])
    if state is not None and state.dim() == 3:
        state = state.expand(v.shape[0] if bounds is None else bounds.shape[0] - 1, *state.shape)
    given = [*arrays, state, bounds]
    is_batch_invariant = modes.is_batch_invariant()
    key = core, is_batch_invariant, tail.scale, tail.state_layout, length, output_final_state, tensors.signature(given)
    plan = _plans.get(key)
    if plan is None:
        options = torch_op.Options(
            tail.scale, op.decay, tail.state_layout, tail.checkpoint_interval, length, None, "chunked",
            is_batch_invariant=is_batch_invariant,
        )  # fmt: skip
        gpu = tensors.gpu(v.device.index)
        problem = torch_op.problem_of(op, arrays, state, bounds, options, output_final_state, False, gpu)
        named = dict(zip((*op.names, "initial_state", "cu_seqlens"), given, strict=True))
        plan = _plans.keep(key, Plan(steps.forward(problem), problem, named))
    y, *finals = plan.run(given)
    return y, finals[0] if output_final_state else None


def of_delta_rule(
    call: Sequences, output_final_state: bool, a_log: Any, dt_bias: Any, qk_norm: Any, beta_map: str
) -> Result | None:
    """Run a delta rule whose shapes have been checked; None where it is for other kernels."""
    q, k, v, *gates = call.inputs
    if beta_map not in plain.RATES or (a_log is None and dt_bias is not None):
        return None  # which the checks there refuse
    heads = v.shape[-2]
    parameters = [
        None if x is None else arguments.check_fixed(name, x, [(heads,)], v)
        for name, x in (("A_log", a_log), ("dt_bias", dt_bias))
    ]
    length = chunk_len(call, q, v, *parameters)
    if length is None:
        return None
    speed, bias = parameters
    if speed is not None:
        logit = gates[0].float()
        gates[0] = -speed.float().exp() * F.softplus(logit if bias is None else logit + bias)
    if beta_map != "identity":
        gates[-1] = plain.RATES[beta_map](gates[-1].float())
    core = Core(True, has_decay=len(gates) > 1, has_norm=checks.check_flag("qk_norm", qk_norm))
    return run(core, (q, k, v, *gates), call, length, output_final_state)
