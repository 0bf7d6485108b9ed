"""Keys longer than a block holds: parts of a head's channels, whose outputs are added.

Without the delta term channels do not need each other: a state is a matrix of value rows and channels, each channel
has its own decay, and y_t is a sum over channels. So a call whose keys are too long for tensor cores is the sum of
calls with a part of the channels each. Gradients come by way of autograd: those of q, k and the decays part by part,
and that of v as a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import backends, boundary, gated_groups, gated_scan
from rwkv_jit.ops.backends import Case
from rwkv_jit.ops.boundary import Op


def in_parts(
    op: Op,
    arrays: Sequence[Any],
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Any,
    scale: float,
    decay: str,
    decay_bound: float | None,
    state_layout: str,
    checkpoint_interval: int,
    chunk_len: int | None,
    num_threads: int | None,
    backend: str,
) -> tuple[Tensor, Tensor | None] | None:
    """Run an op as `boundary.call` does where its keys are too long and parts are not; else return None."""
    options = scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len, num_threads, backend
    if not _may_be_in_parts(arrays[0], chunk_len, num_threads, backend):
        return None
    boundary.check_options(op.decays, *options)
    given, state, cu_seqlens = boundary.check_tensors(op, arrays, initial_state, cu_seqlens, state_layout, backend)
    asked = decay, decay_bound, chunk_len, num_threads
    case = boundary.case_of(op, given, cu_seqlens, *asked, training=True, is_direct=tensors.is_eager())
    device, v = given[0].device.index, op.streamed.index("v")
    sizes = part_sizes(backend, case, lambda: tensors.arch(device))
    if len(sizes) == 1:
        return None
    options = (*options[:-1], "auto")  # a last part that a block can hold is for other kernels than "split" names
    of_keys = -1 if state_layout == "vk" else -2  # the dimension of states
    parts = [(x,) * len(sizes) if i == v else x.split(sizes, -1) for i, x in enumerate(given)]
    states = [None] * len(sizes) if state is None else [x.contiguous() for x in state.split(sizes, of_keys)]
    results = [
        boundary.call(op, of_part, of_state, output_final_state, cu_seqlens, *options)
        for *of_part, of_state in zip(*parts, states, strict=True)
    ]
    dtype = given[v].dtype
    y = torch.stack([y for y, _ in results]).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    finals = [final for _, final in results if final is not None]
    return y, torch.cat(finals, of_keys) if finals else None


def _may_be_in_parts(q: Any, chunk_len: int | None, num_threads: int | None, backend: str) -> bool:
    """Return whether keys are long, on a GPU, and not for warp groups, which take them whole."""
    if not isinstance(q, Tensor) or q.dim() != 4 or q.shape[3] <= gated_scan.LARGEST_KEY or not q.is_cuda:
        return False
    return backend in ("auto", "split") and not _in_groups(
        q.shape[3], tensors.arch(q.device.index), chunk_len, num_threads
    )


def _in_groups(head_size: int, arch: str, chunk_len: int | None, num_threads: int | None) -> bool:
    length = chunk_len or gated_groups.CHUNK_LEN
    return head_size <= gated_groups.LARGEST_HEAD and gated_groups.can(arch, length, num_threads)


def part_sizes(backend: str, case: Case, arch: Callable[[], str]) -> list[int]:
    """Return the channels of every part; all channels where there is no need, or where tensor cores take no part."""
    whole = [case.head_size]
    count = -(-case.head_size // gated_scan.LARGEST_KEY)
    if count < 2 or _in_groups(case.head_size, arch(), case.chunk_len, case.num_threads):
        return whole
    size = -(-case.head_size // (8 * count)) * 8  # parts begin where kernels can read several channels at once
    try:
        found, _ = backends.choose(backend, case._replace(head_size=size), arch)
    except UnsupportedConfigError:  # "split" was asked for; the call as a whole says why not
        return whole
    return [size] * (count - 1) + [case.head_size - (count - 1) * size] if found == "scan" else whole
