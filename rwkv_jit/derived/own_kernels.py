"""What calls of derived ops in kernels of their own have in common: which may go there, and what they are bound to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_jit import modes, tensors
from rwkv_jit.algorithms.parts import MOST_HEADS
from rwkv_jit.derived.arguments import Sequences
from rwkv_jit.ops import torch_op
from rwkv_jit.problem import Op, Problem
from rwkv_jit.rule import LEAST_TOKENS


def may_take(call: Sequences, v: Tensor, parameters: Sequence[Tensor | None], least_blocks: float) -> bool:
    """Return whether a call that has been checked may go to such kernels at all; the kernels know the rest.

    `parameters` are those that are no inputs of the call. Fewer than `least_blocks` heads of all sequences for a
    multiprocessor would leave it idle.
    """
    state, cu_seqlens, tail = call.initial_state, call.cu_seqlens, call.tail
    given = (*call.inputs, state, cu_seqlens, *parameters)
    if not (v.is_cuda and v.numel() and tensors.is_eager() and tensors.are_plain(given)):
        return False
    if tail.backend != "auto" or tail.num_threads is not None:
        return False
    narrow, is_batch_invariant = modes.current()
    if tensors.STORAGE[v.dtype] in narrow:
        return False
    batch, tokens, heads, _ = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if batch * tokens < LEAST_TOKENS * sequences or heads > MOST_HEADS:
        return False
    return is_batch_invariant or sequences * heads >= least_blocks * tensors.multiprocessors(v.device.index)


def wants_gradients(call: Sequences, parameters: Sequence[Tensor | None]) -> bool:
    """Return whether a call wants gradients of its inputs, its state or its parameters."""
    given = (*call.inputs, call.initial_state, *parameters)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def given_to(call: Sequences, arrays: Sequence[Tensor]) -> list[Tensor | None]:
    """Return what a plan is given: inputs, a state for each sequence, and bounds that have been looked at."""
    v, state, bounds = arrays[2], call.initial_state, call.cu_seqlens
    if bounds is not None:
        bounds = tensors.packing(bounds, v.shape[1])
    if state is not None and state.dim() == 3:
        state = state.expand(v.shape[0] if bounds is None else bounds.shape[0] - 1, *state.shape)
    return [*arrays, state, bounds]


def problem_of(
    op: Op, given: Sequence[Tensor | None], call: Sequences, chunk_len: int, output_final_state: bool, training: bool
) -> Problem:
    """Return the problem of a call whose plan is `given` these."""
    *arrays, state, bounds = given
    tail, v = call.tail, arrays[2]
    assert v is not None
    options = torch_op.Options(
        tail.scale, op.decay, tail.state_layout, tail.checkpoint_interval, chunk_len, None, "chunked",
        is_batch_invariant=modes.is_batch_invariant(),
    )  # fmt: skip
    gpu = tensors.gpu(v.device.index)
    inputs = [x for x in arrays if x is not None]
    return torch_op.problem_of(op, inputs, state, bounds, options, output_final_state, training, gpu)
