"""Kimi Delta Attention in a kernel of its own: calls with raw gates and no gradients, of many heads of 128 on sm_90.

Log-decays that are given go to `wkv7`, whose chunks are faster where decays are weak; so do calls with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import modes, tensors
from rwkv_jit.algorithms.parts import MOST_HEADS, Case
from rwkv_jit.derived import arguments, channel_steps
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.derived.table import RATE_MAPS, ChannelCore
from rwkv_jit.ops import checks, torch_op
from rwkv_jit.plan import Plan
from rwkv_jit.rule import LEAST_TOKENS
from rwkv_jit.signatures import BySignature

LEAST_BLOCKS = 1 / 5  # heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments elsewhere


def is_here(call: Sequences, parameters: Sequence[Tensor | None]) -> bool:
    """Return whether a call that has been checked runs here; `parameters` are those that are no inputs of it."""
    q, _, v, *_ = call.inputs
    state, cu_seqlens, tail = call.initial_state, call.cu_seqlens, call.tail
    given = (*call.inputs, state, cu_seqlens, *parameters)
    if not (v.is_cuda and v.numel() and tensors.is_eager() and tensors.are_plain(given)):
        return False
    if tail.backend != "auto" or tail.num_threads is not None:
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return False
    narrow, is_batch_invariant = modes.current()
    storage = tensors.STORAGE[v.dtype]
    if storage in narrow:
        return False
    batch, tokens, heads, value_size = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if batch * tokens < LEAST_TOKENS * sequences or heads > MOST_HEADS:
        return False
    device = v.device.index
    if sequences * heads < LEAST_BLOCKS * tensors.multiprocessors(device) and not is_batch_invariant:
        return False
    op = ChannelCore().op
    case = Case(op, storage, q.shape[-1], value_size, tokens, op.decay, None, tail.chunk_len, training=False)
    return channel_steps.why_not(case, lambda: tensors.gpu(device)) is None


_plans: BySignature[Plan] = BySignature()


def run(
    core: ChannelCore, arrays: Sequence[Tensor], call: Sequences, lower_bound: float, output_final_state: bool
) -> Result:
    """Run a call that `is_here`; `arrays` are the inputs of the core."""
    op, v, tail = core.op, arrays[2], call.tail
    state, bounds = call.initial_state, call.cu_seqlens
    if bounds is not None:
        bounds = tensors.packing(bounds, v.shape[1])
    if state is not None and state.dim() == 3:
        state = state.expand(v.shape[0] if bounds is None else bounds.shape[0] - 1, *state.shape)
    given = [*arrays, state, bounds]
    is_batch_invariant = modes.is_batch_invariant()
    key = core, is_batch_invariant, tail, lower_bound, output_final_state, tensors.signature(given)
    plan = _plans.get(key)
    if plan is None:
        options = torch_op.Options(
            tail.scale, op.decay, tail.state_layout, tail.checkpoint_interval, channel_steps.CHUNK_LEN, None, "chunked",
            is_batch_invariant=is_batch_invariant,
        )  # fmt: skip
        gpu = tensors.gpu(v.device.index)
        problem = torch_op.problem_of(op, arrays, state, bounds, options, output_final_state, False, gpu)
        named = dict(zip((*op.names, "initial_state", "cu_seqlens"), given, strict=True))
        plan = _plans.keep(key, Plan(channel_steps.forward(problem, lower_bound), problem, named))
    y, *finals = plan.run(given)
    return y, finals[0] if output_final_state else None


def of_kda(
    call: Sequences, output_final_state: bool, a_log: Any, dt_bias: Any, lower_bound: float | None, qk_norm: Any,
    beta_map: str,
) -> Result | None:  # fmt: skip
    """Run a call whose shapes have been checked; None where it is for other kernels."""
    if beta_map not in RATE_MAPS or a_log is None:
        return None  # which the checks there refuse, or go on with
    v, head_size = call.inputs[2], call.inputs[1].shape[-1]
    heads = v.shape[-2]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "A_log": [(heads,)], "dt_bias": [(heads, head_size), (heads * head_size,)],
    }  # fmt: skip
    parameters = [
        arguments.check_fixed(name, x, shapes[name], v)
        for name, x in (("A_log", a_log), ("dt_bias", dt_bias)) if x is not None
    ]  # fmt: skip
    if not is_here(call, parameters):
        return None
    core = ChannelCore(lower_bound is not None, checks.check_flag("qk_norm", qk_norm), dt_bias is not None, beta_map)
    speed, *bias = (x.float() for x in parameters)
    fixed = [speed, *(x.reshape(heads, head_size) for x in bias)]
    return run(core, (*call.inputs, *fixed), call, float(lower_bound or 0.0), output_final_state)
