"""Mamba-2 of engines' models as calls of rwkv_jit over a pool of states. It imports no engine.

Heads are H, groups of them G; states are [slots, H, V, K]. A call that these functions do not have is an
`UnsupportedConfigError`, before anything changes: `with_fallback` passes it to the function of the engine, and logs why
once.
"""

import math
from typing import Any

import torch
from rwkv7_slots import power_of_two
from torch import Tensor

import rwkv_jit
from rwkv_jit import UnsupportedConfigError
from rwkv_jit.compat.falling_back import with_fallback as with_fallback

NO_SLOT = -1  # where nothing is written
_WIDE = torch.float32
_ROWS = (torch.float16, torch.bfloat16, _WIDE)


def decode(
    states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, slots: Tensor | None, null_index: int, out: Tensor | None,
    written: Tensor | None = None, is_random: bool = False,
) -> Tensor:  # fmt: skip
    """Write y of one token of each row to `out`, and change its state.

    What heads have lies in views with all of their channels, as mamba_ssm's `selective_state_update` takes it.

    Parameters
    ----------
    states : torch.Tensor, shape (slots, H, V, K)
        The pool.
    x, dt, z, out : torch.Tensor, shape (B, H, V)
        Input, raw steps, gate and memory for y.
    A : torch.Tensor, shape (H, V, K)
        Log-decays of a step of 1.
    B, C : torch.Tensor, shape (B, G, K)
        Keys and queries.
    D, dt_bias : torch.Tensor, shape (H, V)
        How much of the input is added to y, and what is added to the steps.
    dt_softplus : bool
        Whether a step is the softplus of the sum.
    slots, written : torch.Tensor, shape (rows or more,) or (rows or more, any), optional
        Where the state of each row is, and where the new one goes. Without slots row i has slot i.
    null_index : int
        Slots at or below it are padding, whose rows get zeros.
    is_random : bool
        Whether states are rounded to one of the two neighbours at random.
    """
    if states.dim() != 4 or x.dim() != 3:
        raise UnsupportedConfigError("several tokens of a row, or states without heads, are not supported")
    if not all(_is_of_heads(t, dims) for t, dims in ((dt, 1), (A, 2), (dt_bias, 1))):
        raise UnsupportedConfigError("steps or rates of each channel are not supported")
    if slots is not None and null_index > 0:
        raise UnsupportedConfigError("padding above slot 0 is not supported")
    dt, A, dt_bias = dt[..., 0], A[..., 0, 0], None if dt_bias is None else dt_bias[..., 0]
    D = D[..., 0] if D is not None and _is_of_heads(D, 1) else D
    _check(states, x, dt, A, B, C, D, z, dt_bias)
    options: dict[str, Any] = {"null_index": NO_SLOT}
    if slots is not None:
        options = {"null_index": null_index, "state_indices": _first(slots, len(x))}
        if written is not None and written is not slots:
            options["write_indices"] = _first(written, len(x)).to(options["state_indices"].dtype)
    if is_random:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=x.device)  # a graph draws another in each replay
        options |= {"rounding": "stochastic", "seed": seed}
    least = 0.0 if dt_softplus else -math.inf  # steps as they are
    y = rwkv_jit.ssd_update(
        states, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=(least, math.inf),
        out=_memory(out, x), **options,
    )  # fmt: skip
    return y if out is None or y is out else out.copy_(y)


def extend(
    states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], bounds: Tensor, slots: Tensor,
    has_state: Tensor | None, out: Tensor | None, kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Write y of sequences of any lengths to `out`, and change their states.

    Parameters
    ----------
    states : torch.Tensor, shape (slots, H, V, K)
        The pool.
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit
        As `rwkv_jit.ssd_varlen` takes them.
    bounds, slots : torch.Tensor, shape (N + 1,) and (N,)
        Where sequences begin and end, and the slot of each one. Slots below 0 are none.
    has_state : torch.Tensor, shape (N,), bool, optional
        Whether a sequence begins with the state in its slot, and not with zeros. Without it all do.
    out : torch.Tensor, shape (T, H, V), optional
        Memory for y.
    kept : pair of torch.Tensor, shape (N,), optional
        A number of tokens of each sequence, and the slot that gets the state after as many. Nothing is written for the
        number 0 or a slot below 0.
    """
    _check(states, x, dt, A, B, C, D, z, dt_bias)
    options: dict[str, Any] = {}
    if kept is not None:
        offsets, places = (each.to(torch.int32).unsqueeze(1) for each in kept)  # [N, 1]
        options = {"checkpoint_offsets": offsets, "checkpoint_indices": places}
    # As many tokens are the most that a sequence has.
    y = rwkv_jit.ssd_varlen(
        states, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        cu_seqlens=bounds.to(torch.int32), state_indices=slots.to(torch.int32), has_initial_state=has_state,
        null_index=NO_SLOT, max_seqlen=power_of_two(len(x)), out=_memory(out, x), **options,
    )  # fmt: skip
    return y if out is None or y is out else out.copy_(y)


def _check(states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *others: Tensor | None) -> None:
    """Check dtypes, and that a slot has no gaps; `others` are D, z and dt_bias."""
    D, z, dt_bias = others
    is_alike = all(each is None or each.dtype == x.dtype for each in (B, C, z))
    is_small = all(each is None or each.dtype in (x.dtype, _WIDE) for each in (dt, A, D, dt_bias))
    if x.dtype not in _ROWS or states.dtype not in _ROWS or not is_alike or not is_small:
        raise UnsupportedConfigError("these dtypes are not supported together")
    if not states[:1].is_contiguous():
        raise UnsupportedConfigError("states with gaps in a slot are not supported")


def _is_of_heads(x: Tensor | None, dims: int) -> bool:
    """Return whether the last dimensions of a tensor are those of a view that has each number for all of them."""
    return x is None or all(n == 1 or step == 0 for n, step in zip(x.shape[-dims:], x.stride()[-dims:], strict=True))


def _first(slots: Tensor, rows: int) -> Tensor:
    """Return a slot of each row [rows]: those of later tokens and of rows that are not there do not count."""
    return (slots if slots.dim() == 1 else slots[:, 0])[:rows]


def _memory(out: Tensor | None, x: Tensor) -> Tensor | None:
    """Return memory that a call can write to, or None."""
    return out if out is not None and out.is_contiguous() and out.dtype == x.dtype else None
