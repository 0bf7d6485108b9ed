"""From what SGLang says of a batch to the arguments of one call of rwkv_jit. It imports no engine."""

from collections.abc import Sequence

import torch
from rwkv7_slots import States, Step, power_of_two
from torch import Tensor


def step_of(slots: Tensor, bounds: Tensor, prefix_lens: Tensor | None = None, longest: int = 1) -> Step:
    """Return the sequences of a batch.

    Parameters
    ----------
    slots : torch.Tensor, shape (N,), int32 or int64
        `mamba_cache_indices`. Padding has -1 in a CUDA graph, and slot 0 otherwise, which SGLang gives to no text.
    bounds : torch.Tensor, shape (N + 1,), int32
        `query_start_loc`.
    prefix_lens : torch.Tensor, shape (N,), int32, optional
        `extend_prefix_lens`: how many tokens of each sequence were read before, as pieces of its prompt, from the radix
        cache or as decodes in a mixed batch. Without it the batch is one of decodes.
    longest : int, default 1
        The most tokens of a sequence.

    Returns
    -------
    Step
        Its tensors share memory with the given ones where these are int32, so that a CUDA graph replays with others.
    """
    slots = slots.to(torch.int32)
    if prefix_lens is None:
        return Step(slots, bounds)
    return Step(slots, bounds, prefix_lens[: len(slots)] > 0, power_of_two(longest))


def states_of(conv: Sequence[Tensor], temporal: Tensor) -> States:
    """Return a layer's states from its part of the pool: two windows of one token, and the states of its heads."""
    time_shift, channel_shift = (window.squeeze(-1) for window in conv)
    return States(temporal, time_shift, channel_shift)


def shapes(heads: int, head_size: int, width: int) -> tuple[list[tuple[int, int]], tuple[int, int, int]]:
    """Return the shapes of `conv` and `temporal` of a slot."""
    return [(width, 1), (width, 1)], (heads, head_size, head_size)
