"""Wind RWKV: its functions, and the ops of its extensions. States are [V, K], decays exp(-exp(w))."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.compat import buffers, rows
from rwkv_jit.compat.naming import named
from rwkv_jit.ops.wkv7 import wkv7

# ---- functions ---------------------------------------------------------------------------------------------------


def attn_triton_bighead(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any = None, dot_prec: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-7, as `wkv7` does. All the `attn` functions of whole batches are this one.

    Parameters
    ----------
    r, w, k, v, a, b : torch.Tensor, shape (B, T, H, N)
        As `wkv7` takes them, of any head size and any number of tokens.
    s0 : torch.Tensor, shape (B, H, N, N) or (H, N, N), optional
        State before the first token; by default zeros in the dtype of v.
    dot_prec : str, default "fp32"
        Taken for the sake of Wind RWKV, and of no effect: `set_bfloat16_precision` says what products are worth.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, N), dtype of v
    sT : torch.Tensor, shape (B, H, N, N), dtype of s0
        State after the last token; gradients go through it.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    return _attend((r, w, k, v, a, b), s0)


def attn_chunked_cuda(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `attn_triton_bighead` does, from the same arguments."""
    return _attend((r, w, k, v, a, b), s0)


attn_backstepping_smallhead = attn_backstepping_longhead = attn_chunked_cuda
attn_triton_bighead_bf16 = attn_triton_bighead_fp16 = attn_triton_bighead_fp32 = attn_triton_bighead


def attn_chunked_cuda_varlen(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any, cu_seqlens: Any
) -> tuple[Tensor, Tensor]:
    """Return y and the last states of packed sequences of RWKV-7, as `wkv7` does.

    Parameters
    ----------
    r, w, k, v, a, b : torch.Tensor, shape (T, H, N)
        As `wkv7` takes them, without a batch.
    s0 : torch.Tensor, shape (S, H, N, N) or (H, N, N), or None
        States before the first tokens of S sequences; zeros in the dtype of v for None.
    cu_seqlens : torch.Tensor, shape (S + 1,), int32 or int64
        Sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1], of any number.

    Returns
    -------
    y : torch.Tensor, shape (T, H, N), dtype of v
    sT : torch.Tensor, shape (S, H, N, N), dtype of s0

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    y, last = _attend([x[None] for x in (r, w, k, v, a, b)], s0, cu_seqlens)
    return y[0], last


def attn_chunked_cuda_wrap(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, head_size: int) -> Tensor:
    """Return y of `attn_chunked_cuda` from no state, for rows of channels.

    Parameters
    ----------
    r, w, k, v, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, in rows of channels.
    head_size : int
        N, any divisor of C.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    return buffers.y_of(wkv7, rows.by_size(head_size, r=r, w=w, k=k, v=v, a=a, b=b)).flatten(2)


attn_backstepping_smallhead_wrap = attn_backstepping_longhead_wrap = attn_chunked_cuda_wrap


def attn_triton_bighead_wrap(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any = None, return_state: bool = False, head_size: int = 64,
    dot_prec: str = "fp32",
) -> Any:  # fmt: skip
    """Return y of `attn_triton_bighead` for rows of channels, and the last state if requested.

    Parameters
    ----------
    r, w, k, v, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, in rows of channels.
    s0 : torch.Tensor, optional
        As in `attn_triton_bighead`. Wind RWKV itself takes zeros whatever it is.
    return_state : bool, default False
        Whether to return the last state too. Wind RWKV itself never does.
    head_size : int, default 64
        N, any divisor of C.
    dot_prec : str, default "fp32"
        As in `attn_triton_bighead`.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v
    sT : torch.Tensor, shape (B, H, N, N), dtype of s0
        With `return_state` alone.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    y, last = _attend(rows.by_size(head_size, r=r, w=w, k=k, v=v, a=a, b=b), s0)
    return (y.flatten(2), last) if return_state else y.flatten(2)


def load_chunked_cuda(head_size: int) -> None:
    """Do nothing, as kernels of every head size are compiled when they are called. So do the other `load` functions.

    Parameters
    ----------
    head_size : int
        Of no effect.
    """


load_chunked_cuda_varlen = load_backstepping_smallhead = load_chunked_cuda


def load_backstepping_longhead(head_size: int, batchsz_times_heads_estimate: int = 512) -> None:
    """Do nothing, as `load_chunked_cuda`.

    Parameters
    ----------
    head_size : int
        Of no effect.
    batchsz_times_heads_estimate : int, default 512
        Of no effect.
    """


@named(initial_state="s0")
def _attend(inputs: Sequence[Any], s0: Any, cu_seqlens: Any = None) -> tuple[Tensor, Tensor]:
    return buffers.with_final(wkv7, inputs, buffers.or_zeros(s0, inputs[3]), cu_seqlens=cu_seqlens)


# ---- extensions --------------------------------------------------------------------------------------------------


def chunked_forward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor, y: Tensor, s: Tensor | None,
    last: Tensor, cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill y and the last state. The initial one is kept in s for a backward, where there will be one."""
    inputs, packing = _packed((q, w, k, v, a, b), cu_seqlens)
    result, final = buffers.run(wkv7, inputs, s0, **packing)
    if s is not None:
        buffers.kept(s, s0.numel()).copy_(s0.reshape(-1))
    buffers.fill(y, result)
    buffers.fill(last, final)


def chunked_backward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, dlast: Tensor, dw: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, da: Tensor, db: Tensor, ds0: Tensor, cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill the gradients."""
    inputs, packing = _packed((q, w, k, v, a, b), cu_seqlens)
    s0 = buffers.kept(s, ds0.numel()).view(ds0.shape)
    grads = buffers.gradients(wkv7, inputs, s0, dy, dlast, **packing)
    for buffer, grad in zip((dq, dw, dk, dv, da, db, ds0), grads, strict=True):
        buffers.fill(buffer, grad)


def backstepping_forward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor, y: Tensor, s: Tensor | None,
    sa: Tensor | None, last: Tensor,
) -> None:  # fmt: skip
    """Fill what `chunked_forward` does."""
    chunked_forward(w, q, k, v, a, b, s0, y, s, last)


def backstepping_backward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, sa: Tensor, dlast: Tensor,
    *grads: Tensor,
) -> None:  # fmt: skip
    """Fill what `chunked_backward` does."""
    chunked_backward(w, q, k, v, a, b, dy, s, dlast, *grads)


def routed_forward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor, y: Tensor, s: Tensor, sa: Tensor,
    last: Tensor, statei: Tensor, s_offset: Tensor,
) -> None:  # fmt: skip
    """Fill y and the last states of heads with several states. The initial ones are kept as long as there is s."""
    result, final = buffers.run(_routed, (q, w, k, v, a, b), s0, statei=statei)
    _begun[s] = s0.detach().clone()
    buffers.fill(y, result)
    buffers.fill(last, final)


def routed_backward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, sa: Tensor, dlast: Tensor,
    dw: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, da: Tensor, db: Tensor, ds0: Tensor, last: Tensor, statei: Tensor,
    s_offset: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients."""
    if s not in _begun:
        raise ValueError("s: expected the tensor that a forward was called with, got another one")
    grads = buffers.gradients(_routed, (q, w, k, v, a, b), _begun[s], dy, dlast, statei=statei)
    for buffer, grad in zip((dq, dw, dk, dv, da, db, ds0), grads, strict=True):
        buffers.fill(buffer, grad)


_begun: Any = WeakTensorKeyDictionary()  # the initial states of a forward, by its scratch


def _routed(*rows: Tensor, initial_state: Tensor, output_final_state: bool, statei: Tensor) -> tuple[Tensor, Any]:
    """Return y and the last states where a head has several states (B, H, states, N, N), and each token one of them.

    The tokens of each state, one after another, are a sequence.
    """
    (B, T, H, N), states = rows[0].shape, initial_state.shape[2]
    if statei.shape != (B, T, H) or not bool(((statei >= 0) & (statei < states)).all()):
        raise ValueError(f"statei: expected shape {[B, T, H]} and numbers from 0 to {states - 1}")
    mine = statei.transpose(1, 2)  # (B, H, T)
    places = mine.argsort(dim=2, stable=True).unsqueeze(3).expand(-1, -1, -1, N)
    lengths = [(mine == i).sum(2) for i in range(states)]
    cu_seqlens = torch.nn.functional.pad(torch.stack(lengths, 2).flatten().cumsum(0), (1, 0))  # (B H states + 1,)
    packed = [x.transpose(1, 2).gather(2, places).reshape(1, B * H * T, 1, N) for x in rows]
    y, last = buffers.with_final(wkv7, packed, initial_state.reshape(-1, 1, N, N), cu_seqlens=cu_seqlens)
    y = y.view(B, H, T, N)
    return torch.zeros_like(y).scatter(2, places, y).transpose(1, 2), last.view(initial_state.shape)


def _packed(inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> tuple[list[Tensor], dict[str, Any]]:
    """Return inputs that have a batch, and what says the sequences that are packed in it."""
    if cu_seqlens is None:
        return list(inputs), {}
    return [x[None] for x in inputs], {"cu_seqlens": cu_seqlens}
