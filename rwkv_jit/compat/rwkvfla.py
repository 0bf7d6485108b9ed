"""Functions with the names and arguments of those in rwkv-fla, whose module is `rwkvfla`. States are [K, V]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.compat import buffers
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7


def chunk_rwkv7(
    r: Any, k: Any, v: Any, a: Any, b: Any, w: Any = None, log_w: Any = None, scale: float = 1.0,
    initial_state: Any = None, output_final_state: bool = True, cu_seqlens: Any = None, head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y and the last state of RWKV-7, as `wkv7` with state_layout="kv".

    The decay is exp(-exp(w)) or exp(log_w): one of them is needed, and w is read where both are given. With
    `head_first` the rows and y are (B, H, T, K). The last state is float32. Errors are those of `wkv7`.
    """
    if w is None and log_w is None:
        raise ValueError("w: expected w or log_w, got neither")
    given, decay = ({"log_w": log_w}, "log") if w is None else ({"w": w}, "raw")
    r, w, k, v, a, b = (tensors.from_any(*x) for x in {"r": r, **given, "k": k, "v": v, "a": a, "b": b}.items())
    return _run(
        wkv7, (r, w, k, v, a, b), head_first, (initial_state, output_final_state, cu_seqlens), scale=scale, decay=decay
    )


def chunk_rwkv6(
    r: Any, k: Any, v: Any, w: Any, u: Any, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, cu_seqlens: Any = None, head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y and the last state of RWKV-6, as `wkv6` with decay="log" and state_layout="kv"; scale=None is K^-0.5.

    With `head_first` the rows and y are (B, H, T, K), as RWKV-PEFT has them, which does not say so: by default the
    heads of u tell. With as many tokens as heads it is needed (ValueError). The last state is float32. Other errors are
    those of `wkv6`.
    """
    r, k, v, w, u = (tensors.from_any(*x) for x in {"r": r, "k": k, "v": v, "w": w, "u": u}.items())
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
