"""The delta rules of engines' models as calls of rwkv_jit over a pool of states. It imports no engine.

Heads of keys are G, of values H; states are [slots, H, V, K]. Slots at or below 0 are padding, whose tokens get zeros:
vLLM has 0 for it, SGLang -1 in CUDA graphs and 0 otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
from rwkv7_slots import power_of_two
from torch import Tensor

NULL_INDEX = 0
CHUNK = 64  # tokens between two places where an engine may want a state
_OPTIONS: dict[str, Any] = {"state_layout": "vk", "null_index": NULL_INDEX, "qk_norm": True}


def heads_of(mixed: Tensor, heads: int, value_size: int, key_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [B, G, K] and values [B, H, V] of rows [B, 2 G K + H V] that hold them side by side."""
    widths = (mixed.shape[-1] - heads * value_size) // 2
    q, k, v = mixed.split([widths, widths, heads * value_size], dim=-1)
    return q.unflatten(-1, (-1, key_size)), k.unflatten(-1, (-1, key_size)), v.unflatten(-1, (heads, value_size))


def gates_of(a: Tensor, b: Tensor, rows: int, heads: int, key_size: int | None) -> tuple[Tensor, Tensor]:
    """Return raw gates [rows, H], or [rows, H, K] of channels, and raw rates [rows, H], in whatever shape they are."""
    size = (rows, heads) if key_size is None else (rows, heads, key_size)
    return a.reshape(size), b.reshape(rows, heads)


def decode(
    update: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, states: Tensor,
    slots: Tensor, A_log: Tensor, dt_bias: Tensor, **options: Any,
) -> Tensor:  # fmt: skip
    """Return y [1, B, H, V] of one token of each row, and change its state.

    Parameters
    ----------
    update : callable
        `rwkv_jit.gated_delta_rule_update` or `rwkv_jit.kda_update`.
    q, k, v : torch.Tensor, shape (B, G, K), (B, G, K) and (B, H, V)
        Not normed yet.
    a, b : torch.Tensor
        Raw gates and rates, as `gates_of` returns them.
    states, slots : torch.Tensor, shape (slots, H, V, K) and (B,)
        The pool, and where the state of each row is.
    A_log, dt_bias : torch.Tensor, shape (H,) and that of a row of `a`, or (H * K,)
        Of the gate.
    **options
        `scale` and `out`, and of Kimi's layers `lower_bound`.
    """
    named = {"A_log": A_log.reshape(-1), "dt_bias": dt_bias.reshape(-1), "beta_map": "sigmoid", "state_indices": slots}
    return update(states, q, k, v, a, b, **named, **_OPTIONS, **options).unsqueeze(0)


def extend(
    varlen: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
    slots: Tensor, bounds: Tensor, track_state: Tensor | None = None, track_chunk: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return y [1, T, H, V] of sequences of any lengths, which continue from their states and change them.

    Parameters
    ----------
    varlen : callable
        `rwkv_jit.gated_delta_rule_varlen` or `rwkv_jit.kda_varlen`.
    q, k, v, g, beta : torch.Tensor, shape (1, T, heads, size), beta (1, T, H)
        As `varlen` takes them.
    states, slots, bounds : torch.Tensor, shape (slots, H, V, K), (N,) and (N + 1,)
        The pool, the slot of each sequence, and where sequences begin and end.
    track_state : torch.Tensor, shape (N, H, V, K), float32, optional
        Gets the state of a sequence after `track_chunk` chunks of 64 tokens, for a prefix cache.
    track_chunk : torch.Tensor, shape (N,), int32
        Goes with it; -1 for a sequence whose state nobody wants, whose row may have anything.
    **options
        `A_log`, `dt_bias`, `beta_map` and `lower_bound`, if g and beta are raw.
    """
    # As many tokens are the most that a sequence has.
    options = {**_OPTIONS, "max_seqlen": power_of_two(q.shape[1]), **options}
    slots, bounds = slots.to(torch.int32), bounds.to(torch.int32)
    if track_state is None or track_chunk is None:
        return varlen(states, q, k, v, g, beta, cu_seqlens=bounds, state_indices=slots, **options)
    # Each sequence is cut in two at that place: first parts run, then states are copied, then the others run.
    cuts = torch.minimum(bounds[:-1] + CHUNK * track_chunk.clamp(min=0), bounds[1:])  # [N]
    both = torch.cat([torch.stack([bounds[:-1], cuts], 1).flatten(), bounds[-1:]])  # [2 N + 1]
    none = torch.full_like(slots, -1)
    y = None
    for pair in ((slots, none), (none, slots)):
        part = varlen(
            states, q, k, v, g, beta, cu_seqlens=both, state_indices=torch.stack(pair, 1).flatten(), **options
        )
        if y is None:
            track_state.copy_(states[slots.clamp(min=0).long()])
        y = part if y is None else y + part  # tokens of no slot have zeros
    return y
