"""Ops with one decay for a head, or with none, in kernels of their own: calls of many heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.derived import arguments, operands, own_kernels
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.derived.own_kernels import Kernels, Known
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.ops.gla import gla
from rwkv_jit.ops.wkv7 import wkv7
from rwkv_jit.schedules import head_decay
from rwkv_jit.schedules.common import Case
from rwkv_jit.schedules.derived_table import RATE_MAPS, Core

LEAST_BLOCKS = 1 / 5  # heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments elsewhere


class Way(NamedTuple):
    """How a call runs here."""

    chunk_len: int
    training: bool  # gradients are wanted


def way(call: Sequences, q: Tensor, v: Tensor, has_delta: bool, *parameters: Any) -> Way | None:
    """Return how a call that has been checked runs; None where it is for other kernels.

    `parameters` are those that are no inputs of the call, and may want a gradient.
    """
    if not own_kernels.may_take(call, v, parameters, LEAST_BLOCKS):
        return None
    training = own_kernels.wants_gradients(call, parameters)
    op, gpu, chunk_len = Core(has_delta).op, tensors.gpu(v.device.index), call.tail.chunk_len
    sizes = q.shape[-1], v.shape[-1], v.shape[1]
    case = Case(op, tensors.STORAGE[v.dtype], *sizes, op.decay, None, chunk_len, training=training)
    if head_decay.why_not(case, lambda: gpu) is not None:
        return None
    return Way(chunk_len or head_decay.default_chunk_len(case, gpu), training)


def _of_other_kernels(core: Core, arrays: Sequence[Tensor]) -> tuple[Callable[..., Result], Sequence[Tensor]]:
    """Return the op that runs a core elsewhere, and what it takes."""
    q, k, v, *gates = arrays
    if core.has_step:
        step, *others = gates
        step = step.to(torch.promote_types(step.dtype, torch.float32))
        if core.has_bias:
            step = step + others.pop()
        step, rates = F.softplus(step), others.pop()
        made = core._replace(has_step=False, has_bias=False)
        return _of_other_kernels(made, [q, k, v, step * rates, step, *others])
    if core.has_own:
        own = gates.pop()

        def with_own(*taken: Tensor, **options: Any) -> Result:
            y, state = gla(*taken, **options)  # type: ignore[arg-type]
            return (y + v * own).to(y.dtype), state

        return with_own, _of_other_kernels(core._replace(has_own=False), [q, k, v, *gates])[1]
    if core.has_delta:
        named = dict(zip(core.op.names[3:], gates, strict=True))
        return wkv7, operands.of_delta_rule(
            q, k, v, named.get("w"), named["beta"], named.get("a_log"), named.get("dt_bias"), qk_norm=core.has_norm,
            beta_map=core.rate_map,
        )  # fmt: skip
    if core.has_rate:
        v = (v * gates[-1].unsqueeze(-1)).to(v.dtype)
    return gla, operands.for_heads(q, k, v, gates[0])


_calls: BySignature[Known] = BySignature()


def run(core: Core, arrays: Sequence[Tensor], call: Sequences, how: Way, output_final_state: bool) -> Result:
    """Run a call as `way` says; `arrays` are the inputs of the core."""
    kernels = Kernels(head_decay.forward, head_decay.backward, head_decay.kept, partial(_of_other_kernels, core))
    return own_kernels.run(_calls, kernels, core.op, arrays, call, how.chunk_len, how.training, output_final_state)


def of_delta_rule(
    call: Sequences, output_final_state: bool, a_log: Any, dt_bias: Any, qk_norm: Any, beta_map: str
) -> Result | None:
    """Run a delta rule whose shapes have been checked; None where it is for other kernels."""
    q, k, v, *gates = call.inputs
    checks.check_name("beta_map", beta_map, RATE_MAPS)
    if a_log is None and dt_bias is not None:
        return None  # which the checks there refuse
    heads = v.shape[-2]
    parameters = [
        None if x is None else arguments.check_fixed(name, x, [(heads,)], v)
        for name, x in (("A_log", a_log), ("dt_bias", dt_bias))
    ]
    how = way(call, q, v, True, *parameters)
    if how is None:
        return None
    raw = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in parameters if x is not None]
    core = Core(
        True, has_decay=len(gates) > 1, has_norm=checks.check_flag("qk_norm", qk_norm), has_gate=len(raw) > 0,
        has_bias=len(raw) > 1, rate_map=beta_map,
    )  # fmt: skip
    return run(core, (q, k, v, *gates, *raw), call, how, output_final_state)
