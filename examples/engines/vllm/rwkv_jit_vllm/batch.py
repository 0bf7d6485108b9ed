"""From what vLLM says of a batch to the arguments of one call of rwkv_jit. It imports no engine."""

from collections.abc import Sequence

import torch
from rwkv7_slots import States, Step, power_of_two
from torch import Tensor


def step_of(
    bounds: Tensor, longest: int, decode_slots: Tensor | None, prompt_slots: Tensor | None, has_state: Tensor | None
) -> Step:
    """Return the sequences of a batch, decodes before prompts as vLLM orders them.

    Parameters
    ----------
    bounds : torch.Tensor, shape (decodes + prompts + 1,), int32
        `query_start_loc` of the whole batch.
    longest : int
        `max_query_len`.
    decode_slots : torch.Tensor, shape (decodes, 1) or (decodes,), int32, optional
        `state_indices_tensor_d`. In a batch of decodes that is padded for a CUDA graph, it is the buffer that replays
        read, with 0 for the padding.
    prompt_slots : torch.Tensor, shape (prompts,), int32, optional
        `state_indices_tensor_p`.
    has_state : torch.Tensor, shape (prompts,), bool, optional
        `has_initial_states_p`: whether a prompt goes on, after a piece of it or after a hit of the prefix cache.

    Returns
    -------
    Step
        Where there are decodes alone, its slots share memory with `decode_slots`.
    """
    some = [slots.view(len(slots)) for slots in (decode_slots, prompt_slots) if slots is not None and len(slots)]
    if prompt_slots is None or not len(prompt_slots):
        return Step(some[0], bounds[: len(some[0]) + 1])
    slots = torch.cat(some)
    if has_state is None:
        raise ValueError("has_state: expected a bool for each prompt, got None")
    is_old = has_state.new_ones(len(slots) - len(prompt_slots))
    return Step(slots, bounds[: len(slots) + 1], torch.cat([is_old, has_state]), power_of_two(longest))


def states_of(kv_cache: Sequence[Tensor]) -> States:
    """Return a layer's states from those that vLLM has bound to it, in the order of `shapes`.

    The states of a slot lie one behind another in a page, so that slots are further apart than a state is long.
    """
    return States(*kv_cache)


def shapes(heads: int, head_size: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the states in a page: that with the largest numbers first, so that all are aligned."""
    return (heads, head_size, head_size), (width,), (width,)


def dtypes(state_dtype: str, model_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the states in a page; `state_dtype` is `--mamba-ssm-cache-dtype`.

    Raises
    ------
    ValueError
        The kernels have no such states.
    """
    known = {"auto": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if state_dtype not in known:
        raise ValueError(f"mamba_ssm_cache_dtype: expected one of {', '.join(known)}, got {state_dtype}")
    return known[state_dtype], model_dtype, model_dtype


def nothing_read(tokens: int, sizes: Sequence[tuple[int, ...]], kinds: Sequence[torch.dtype], layers: int, device):
    """Return a step and states for one text that nobody keeps: vLLM measures its memory so, before there is a pool."""
    slots = torch.ones(1, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    states = States(
        *(torch.zeros(2, *size, dtype=kind, device=device) for size, kind in zip(sizes, kinds, strict=True))
    )
    return Step(slots, bounds, torch.zeros_like(slots, dtype=torch.bool), power_of_two(tokens)), [states] * layers
