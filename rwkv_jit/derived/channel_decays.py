"""Kimi Delta Attention in kernels of its own: calls of many heads of 128 on sm_90. Others are for `wkv7`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.derived import arguments, operands, own_kernels
from rwkv_jit.derived.arguments import Result, Sequences
from rwkv_jit.derived.own_kernels import Kernels, Known
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.ops.wkv7 import wkv7
from rwkv_jit.schedules import channel_decay
from rwkv_jit.schedules.common import Case
from rwkv_jit.schedules.derived_table import RATE_MAPS, ChannelCore

LEAST_BLOCKS = 1 / 5  # heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments elsewhere


def is_here(call: Sequences, parameters: Sequence[Tensor | None]) -> bool:
    """Return whether a call that has been checked runs here; `parameters` are those that are no inputs of it."""
    q, _, v, *_ = call.inputs
    if not own_kernels.may_take(call, v, parameters, LEAST_BLOCKS):
        return False
    training = own_kernels.wants_gradients(call, parameters)
    if training and q.shape[-2] != v.shape[-2]:
        return False
    op, sizes = ChannelCore().op, (q.shape[-1], v.shape[-1], v.shape[1])
    case = Case(op, tensors.STORAGE[v.dtype], *sizes, op.decay, None, call.tail.chunk_len, training=training)
    return channel_decay.why_not(case, lambda: tensors.gpu(v.device.index)) is None


def _elsewhere(
    core: ChannelCore, lower_bound: float, arrays: Sequence[Any]
) -> tuple[Callable[..., Result], Sequence[Tensor]]:
    """Return the op that runs a core elsewhere, and what it takes."""
    named = dict(zip(core.op.names, arrays, strict=True))
    return wkv7, operands.of_delta_rule(
        named["r"], named["k"], named["v"], named["w"], named["beta"], named.get("a_log"), named.get("dt_bias"),
        lower_bound if core.gate == "bounded" else None, qk_norm=core.has_norm, beta_map=core.rate_map,
    )  # fmt: skip


_calls: BySignature[Known] = BySignature()


def of_kda(
    call: Sequences, output_final_state: bool, a_log: Any, dt_bias: Any, lower_bound: float | None, qk_norm: Any,
    beta_map: str,
) -> Result | None:  # fmt: skip
    """Run a call whose shapes have been checked; None where it is for other kernels."""
    checks.check_name("beta_map", beta_map, RATE_MAPS)
    if a_log is None and not (dt_bias is None and lower_bound is None):
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
    bound = float(lower_bound or 0.0)
    kernels = Kernels(
        partial(channel_decay.forward, lower_bound=bound), partial(channel_decay.backward, lower_bound=bound),
        channel_decay.kept, partial(_elsewhere, core, bound),
    )  # fmt: skip
    training = own_kernels.wants_gradients(call, parameters)
    return own_kernels.run(
        _calls, kernels, core.op, (*call.inputs, *fixed), call, channel_decay.CHUNK_LEN, training, output_final_state,
        bound,
    )  # fmt: skip
