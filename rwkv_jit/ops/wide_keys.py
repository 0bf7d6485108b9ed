"""Keys longer than a block holds: parts of a head's channels, whose outputs are added.

Without the delta term channels do not need each other: a state is a matrix of value rows and channels, each channel
has a separate decay, and y_t is a sum over channels. So a call whose keys are too long for tensor cores is the sum of
calls with a part of the channels each. Gradients come by autograd: those of q, k and the decays part by part,
and that of v as a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import rule, switches, tensors, torch_op
from rwkv_jit.call.options import DecayOptions
from rwkv_jit.call.torch_op import TorchOp
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.plain import operands
from rwkv_jit.schedules import diagonal_groups, diagonal_large
from rwkv_jit.schedules.problem import Problem

_BEHIND = ("own", "z")  # inputs that stand behind a recurrence


def in_parts(
    wide_op: TorchOp, arrays: Sequence[Tensor], initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, whole: DecayOptions, training: bool, traits: tuple[tuple[str, Any], ...] = (),
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Run a checked call as `torch_op.call` does where its keys are too long and parts are not; else return None."""
    op = wide_op.op
    if not _may_be_in_parts(arrays[op.names.index("r")], whole):
        return None
    options = torch_op.asked_options(whole, arrays[0].dtype, switches.current())
    is_direct, value = tensors.is_eager(), op.names.index("v")
    problem = torch_op.problem_of(
        op, arrays, initial_state, cu_seqlens, options, output_final_state, True, whole["decay_bound"], traits,
        is_direct,
    )  # fmt: skip
    sizes = part_sizes(rule.seen(problem, sees_load=is_direct))
    if len(sizes) == 1 or rule.takes_update(problem._replace(training=training)):
        return None
    # A last part that a block can hold is for other kernels than "split" names.
    asked: dict[str, Any] = {**whole, "backend": "auto"}
    if op.decay == "none":
        del asked["decay"], asked["decay_bound"]
    key_dim = -1 if whole["state_layout"] == "vk" else -2  # of states
    parts = [
        (None if name in _BEHIND else x,) * len(sizes) if x is None or dims[-1] != "K" else x.split(sizes, -1)
        for x, (name, dims) in zip(arrays, op.inputs.items(), strict=True)
    ]  # fmt: skip
    states: list[Tensor | None] = [None] * len(sizes)
    if initial_state is not None:
        states = [x.contiguous() for x in initial_state.split(sizes, key_dim)]
    of_part = replace(wide_op, in_parts=None)
    results = [
        torch_op.call(of_part, part, part_state, output_final_state, cu_seqlens, tuple(asked.items()), traits)
        for *part, part_state in zip(*parts, states, strict=True)
    ]
    dtype = arrays[value].dtype
    y = torch.stack([y for y, _ in results]).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    y = y if op.through is None else operands.behind(op, y, arrays)
    finals = [final for _, final in results if final is not None]
    return y, torch.cat(finals, key_dim) if finals else None


def _may_be_in_parts(q: Tensor, whole: DecayOptions) -> bool:
    """Return whether keys are long, on a GPU, and not for warp groups, which take them whole."""
    if q.shape[3] <= diagonal_large.LARGEST_KEY or not q.is_cuda or whole["backend"] not in ("auto", "split"):
        return False
    return not _in_groups(q.shape[3], tensors.gpu(q.device.index), whole["chunk_len"], whole["num_threads"])


def _in_groups(head_size: int, gpu: Gpu, chunk_len: int | None, num_threads: int | None) -> bool:
    length = chunk_len or diagonal_groups.CHUNK_LEN
    return head_size <= diagonal_groups.LARGEST_HEAD and diagonal_groups.takes(gpu, length, num_threads)


def part_sizes(p: Problem) -> list[int]:
    """Return the channels of every part; all channels where there is no need, or where tensor cores take no part."""
    whole = [p.K]
    count = -(-p.K // diagonal_large.LARGEST_KEY)
    if count < 2 or _in_groups(p.K, p.gpu, p.chunk_len, p.num_threads):
        return whole
    size = -(-p.K // (8 * count)) * 8  # parts begin where kernels can read several channels at once
    try:
        algorithm, _ = rule.choose(p._replace(K=size))
    except UnsupportedConfigError:  # "split" was asked for; the call as a whole says why not
        return whole
    return [size] * (count - 1) + [p.K - (count - 1) * size] if algorithm == "large" else whole
