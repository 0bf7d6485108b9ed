"""Wind RWKV: its functions, and the ops of its extensions. States are [V, K], decays exp(-exp(w)).

Each function raises TypeError or ValueError where an argument does not fit; the message has its name, what was expected
and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.compat import buffers, rows
from rwkv_jit.compat.buffers import Call
from rwkv_jit.compat.naming import named
from rwkv_jit.ops.wkv7 import wkv7

# ---- functions ---------------------------------------------------------------------------------------------------


def attn_triton_bighead(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any = None, dot_prec: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-7, as `wkv7` does. All the `attn` functions of whole batches are this one.

    Rows are (B, T, H, N) of any sizes, s0 (B, H, N, N) or (H, N, N), by default zeros in the dtype of v; the last state
    has its dtype, and gradients go through it. `dot_prec` has no effect: `set_bfloat16_precision` says what products
    are worth.
    """
    return _attend((r, w, k, v, a, b), s0)


def attn_chunked_cuda(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any = None) -> tuple[Tensor, Tensor]:
    """Return what `attn_triton_bighead` does, from the same arguments."""
    return _attend((r, w, k, v, a, b), s0)


attn_backstepping_smallhead = attn_backstepping_longhead = attn_chunked_cuda
attn_triton_bighead_bf16 = attn_triton_bighead_fp16 = attn_triton_bighead_fp32 = attn_triton_bighead


def attn_chunked_cuda_varlen(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any, cu_seqlens: Any
) -> tuple[Tensor, Tensor]:
    """Return y and the last states of packed sequences of RWKV-7, as `wkv7` does.

    Rows are (T, H, N), s0 (S, H, N, N), (H, N, N) or None. Sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1],
    of any number.
    """
    y, last = _attend(rows.of_batch_1(r=r, w=w, k=k, v=v, a=a, b=b), s0, cu_seqlens)
    return y[0], last


def attn_chunked_cuda_wrap(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, head_size: int) -> Tensor:
    """Return y of `attn_chunked_cuda` from no state, for rows (B, T, C) with heads of any divisor of C."""
    return buffers.y_of(wkv7, rows.by_size(head_size, r=r, w=w, k=k, v=v, a=a, b=b)).flatten(2)


attn_backstepping_smallhead_wrap = attn_backstepping_longhead_wrap = attn_chunked_cuda_wrap


def attn_triton_bighead_wrap(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, s0: Any = None, return_state: bool = False, head_size: int = 64,
    dot_prec: str = "fp32",
) -> Any:  # fmt: skip
    """Return y of `attn_triton_bighead` for rows (B, T, C), and the last state if requested.

    Wind RWKV itself takes zeros whatever s0 is, and never returns the state.
    """
    y, last = _attend(rows.by_size(head_size, r=r, w=w, k=k, v=v, a=a, b=b), s0)
    return (y.flatten(2), last) if return_state else y.flatten(2)


def load_chunked_cuda(head_size: int) -> None:
    """Do nothing: kernels of every head size are compiled when they are called. So do the other `load` functions."""


load_chunked_cuda_varlen = load_backstepping_smallhead = load_chunked_cuda


def load_backstepping_longhead(head_size: int, batchsz_times_heads_estimate: int = 512) -> None:
    """Do nothing, as `load_chunked_cuda`."""


@named(initial_state="s0")
def _attend(inputs: Sequence[Any], s0: Any, cu_seqlens: Any = None) -> tuple[Tensor, Tensor]:
    return buffers.with_final(wkv7, inputs, buffers.or_zeros(s0, "v", inputs[3]), cu_seqlens=cu_seqlens)


# ---- extensions --------------------------------------------------------------------------------------------------


def forward(t: Call) -> None:
    """Fill y and the last state. The initial one is kept in s for a backward, where there will be one."""
    inputs, packing = _packed(t)
    results = buffers.run(wkv7, inputs, t["s0"], **packing)
    if t["s"] is not None:
        buffers.kept(t["s"], t["s0"].numel()).copy_(t["s0"].reshape(-1))
    buffers.fill_each((t["y"], t["sT"]), results)


def backward(t: Call) -> None:
    """Fill the gradients."""
    inputs, packing = _packed(t)
    s0 = buffers.kept(t["s"], t["ds0"].numel()).view(t["ds0"].shape)
    grads = buffers.gradients(wkv7, inputs, s0, t["dy"], t["dsT"], **packing)
    buffers.fill_each([t[name] for name in _GRADIENTS], grads)


def routed_forward(t: Call) -> None:
    """Fill y and the last states of heads with several states. The initial ones are kept as long as there is s."""
    results = buffers.run(_routed, [t[name] for name in _ROWS], t["s0"], statei=t["statei"])
    _begun[t["s"]] = t["s0"].detach().clone()
    buffers.fill_each((t["y"], t["sT"]), results)


def routed_backward(t: Call) -> None:
    """Fill the gradients."""
    if t["s"] not in _begun:
        raise ValueError("s: expected the tensor that a forward was called with, got another one")
    rows = [t[name] for name in _ROWS]
    grads = buffers.gradients(_routed, rows, _begun[t["s"]], t["dy"], t["dsT"], statei=t["statei"])
    buffers.fill_each([t[name] for name in _GRADIENTS], grads)


_ROWS, _GRADIENTS = "qwkvab", ("dq", "dw", "dk", "dv", "da", "db", "ds0")  # in the order of wkv7
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


def _packed(t: Call) -> tuple[list[Tensor], dict[str, Any]]:
    """Return inputs that have a batch, and what says the sequences that are packed in it."""
    rows = [t[name] for name in _ROWS]
    return ([x[None] for x in rows], {"cu_seqlens": t["cu_seqlens"]}) if "cu_seqlens" in t else (rows, {})
