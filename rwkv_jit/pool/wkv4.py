"""One or a few tokens of RWKV-4 of many rows, whose states are in a pool and change in place."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.pool import calls, update
from rwkv_jit.schedules.legal import Wkv4Decay
from rwkv_jit.schedules.table import OPS


def wkv4_update(
    state: Array, w: Array, u: Array, k: Array, v: Array, decay: Wkv4Decay = "raw", *,
    state_indices: Array | None = None, write_indices: Array | None = None, null_index: int = -1,
    out: Array | None = None, **_unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """RWKV-4 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = (num + e^(u + k) v) / (den + e^(u + k));   num <- e^d num + e^k v;   den <- e^d den + e^k

    per row and channel, token by token. B is the rows, T the tokens, C the channels.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, 3, C), float32
        The pool: num, den and max of each slot, as `wkv4` takes and returns them; begin with 0, 0 and -1e38. Any
        strides. It changes in place, so every element needs separate memory, and an array of another library
        must be one that torch can write.
    w, u : torch.Tensor, shape (C,), dtype of k or float32
        Decay and bonus.
    k, v : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        Key and value. Any strides; if the last one is not 1, the input is copied.
    decay : {"raw", "log"}, default "raw"
        Whether the log-decay d is -exp(w) or w.
    state_indices, write_indices, null_index, out
        As `PoolOptions` and `UpdateOptions` say, errors too.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    Notes
    -----
    The arithmetic, its precision and what autocast does are those of `wkv4`. Long prompts are for `wkv4`: tokens go one
    after another here.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> pool = torch.tensor([0.0, 0.0, -1e38], device="cuda").view(1, 3, 1).repeat(16, 1, 96)
    >>> w, u = torch.linspace(-5, 1, 96, device="cuda"), torch.zeros(96, device="cuda")
    >>> k, v = torch.randn(2, 3, 96, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> rwkv_jit.wkv4_update(pool, w, u, k, v, state_indices=slots).shape
    torch.Size([3, 96])
    """
    if _unknown:
        raise unexpected("wkv4_update", next(iter(_unknown)))
    options: dict[str, Any] = {"decay": decay, "null_index": null_index}
    for name, x in (("state_indices", state_indices), ("write_indices", write_indices), ("out", out)):
        if x is not None:
            options[name] = x
    return calls.call(update.KIND, OPS["wkv4"], state, (w, u, k, v), options)
