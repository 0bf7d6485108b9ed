"""Kimi Delta Attention in a kernel of its own: calls without gradients, of many heads of 128 on sm_90.

Others are for `wkv7`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rwkv_jit import modes, tensors
from rwkv_jit.algorithms.parts import Case
from rwkv_jit.derived import arguments, channel_steps, own_kernels
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.derived.table import RATE_MAPS, ChannelCore
from rwkv_jit.ops import checks
from rwkv_jit.plan import Plan
from rwkv_jit.signatures import BySignature

LEAST_BLOCKS = 1 / 5  # heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments elsewhere


def is_here(call: Sequences, parameters: Sequence[Tensor | None]) -> bool:
    """Return whether a call that has been checked runs here; `parameters` are those that are no inputs of it."""
    q, _, v, *_ = call.inputs
    if not own_kernels.may_take(call, v, parameters, LEAST_BLOCKS) or own_kernels.wants_gradients(call, parameters):
        return False
    op, sizes = ChannelCore().op, (q.shape[-1], v.shape[-1], v.shape[1])
    case = Case(op, tensors.STORAGE[v.dtype], *sizes, op.decay, None, call.tail.chunk_len, training=False)
    return channel_steps.why_not(case, lambda: tensors.gpu(v.device.index)) is None


_plans: BySignature[Plan] = BySignature()


def run(
    core: ChannelCore, arrays: Sequence[Tensor], call: Sequences, lower_bound: float, output_final_state: bool
) -> Result:
    """Run a call that `is_here`; `arrays` are the inputs of the core."""
    given = own_kernels.given_to(call, arrays)
    key = core, modes.is_batch_invariant(), call.tail, lower_bound, output_final_state, tensors.signature(given)
    plan = _plans.get(key)
    if plan is None:
        problem = own_kernels.problem_of(core.op, given, call, channel_steps.CHUNK_LEN, output_final_state, False)
        named = dict(zip((*core.op.names, "initial_state", "cu_seqlens"), given, strict=True))
        plan = _plans.keep(key, Plan(channel_steps.forward(problem, lower_bound), problem, named))
    y, *finals = plan.run(given)
    return y, finals[0] if output_final_state else None


def of_kda(
    call: Sequences, output_final_state: bool, a_log: Any, dt_bias: Any, lower_bound: float | None, qk_norm: Any,
    beta_map: str,
) -> Result | None:  # fmt: skip
    """Run a call whose shapes have been checked; None where it is for other kernels."""
    if beta_map not in RATE_MAPS or (a_log is None and not (dt_bias is None and lower_bound is None)):
        return None  # which the checks there refuse
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
    gate = "given" if a_log is None else "softplus" if lower_bound is None else "bounded"
    core = ChannelCore(gate, checks.check_flag("qk_norm", qk_norm), dt_bias is not None, beta_map)
    fixed = [x.float() for x in parameters]
    fixed[1:] = (x.reshape(heads, head_size) for x in fixed[1:])
    return run(core, (*call.inputs, *fixed), call, float(lower_bound or 0.0), output_final_state)
