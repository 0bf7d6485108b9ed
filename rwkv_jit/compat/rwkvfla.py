"""Functions with the names and arguments of those in rwkv-fla, whose module is `rwkvfla`. States are [K, V]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rwkv_jit.compat import buffers
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7


def chunk_rwkv7(
    r: Any, k: Any, v: Any, a: Any, b: Any, w: Any = None, log_w: Any = None, scale: float = 1.0,
    initial_state: Any = None, output_final_state: bool = True, cu_seqlens: Any = None, head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y and the last state of RWKV-7, as `wkv7` with state_layout="kv".

    Parameters
    ----------
    r, k, v, a, b : torch.Tensor, shape (B, T, H, K), v (B, T, H, V)
        As `wkv7` takes them.
    w, log_w : torch.Tensor, shape (B, T, H, K), optional
        The decay, which is exp(-exp(w)) or exp(log_w). One of them is needed, and w is read where both are given.
    scale : float, default 1.0
        Factor of y.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token; zeros by default.
    output_final_state : bool, default True
        Whether to return the last state.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Sequences packed along T, as in `wkv7`.
    head_first : bool, default False
        Whether r, k, v, a, b, w and y are (B, H, T, K).

    Returns
    -------
    o : torch.Tensor, shape of v
    final_state : torch.Tensor, shape (N, H, K, V), float32, or None

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    if w is None and log_w is None:
        raise ValueError("w: expected w or log_w, got neither")
    rows, decay = ((r, log_w, k, v, a, b), "log") if w is None else ((r, w, k, v, a, b), "raw")
    return _run(
        wkv7, rows, head_first, (initial_state, output_final_state, cu_seqlens), scale=scale, decay=decay
    )  # fmt: skip


def chunk_rwkv6(
    r: Any, k: Any, v: Any, w: Any, u: Any, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, cu_seqlens: Any = None, head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y and the last state of RWKV-6, as `wkv6` with decay="log" and state_layout="kv".

    Parameters
    ----------
    r, k, w : torch.Tensor, shape (B, T, H, K)
        As `wkv6` takes them; the decay is exp(w).
    v : torch.Tensor, shape (B, T, H, V)
        As `wkv6` takes it.
    u : torch.Tensor, shape (H, K)
        Bonus of the current token.
    scale : float, optional
        Factor of y; by default K^-0.5.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token; zeros by default.
    output_final_state : bool, default False
        Whether to return the last state.
    cu_seqlens : torch.Tensor, shape (N + 1,), optional
        Sequences packed along T, as in `wkv6`.
    head_first : bool, optional
        Whether r, k, v, w and y are (B, H, T, K), as RWKV-PEFT has them, which does not say so. By default the heads
        of u tell.

    Returns
    -------
    o : torch.Tensor, shape of v
    final_state : torch.Tensor, shape (N, H, K, V), float32, or None

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. With as many tokens as
        heads `head_first` is needed.
    """
    if head_first is None:
        head_first = _heads_are_first(r, u)
    return _run(
        wkv6, (r, k, v, w), head_first, (initial_state, output_final_state, cu_seqlens), u,
        scale=r.shape[-1] ** -0.5 if scale is None else scale, decay="log",
    )  # fmt: skip


def _run(
    op: Any, rows: Sequence[Any], head_first: bool, of_sequences: tuple[Any, bool, Any], *others: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if head_first:
        rows = [x.transpose(1, 2) for x in rows]
    initial_state, output_final_state, cu_seqlens = of_sequences
    o, last = op(
        *rows, *others, buffers.in_float32(initial_state), output_final_state, cu_seqlens, state_layout="kv", **options
    )
    return (o.transpose(1, 2) if head_first else o), last


def _heads_are_first(r: Tensor, u: Tensor) -> bool:
    if r.dim() != 4 or u.dim() != 2:
        return False  # which the op finds out
    if r.shape[1] == r.shape[2] == u.shape[0]:
        raise ValueError(
            f"head_first: expected True or False where there are as many tokens as heads, here {u.shape[0]}, got None"
        )
    return r.shape[1] == u.shape[0]
