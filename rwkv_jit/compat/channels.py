"""RWKV-4 and TimeX as their extensions have them, and the products of the `rwkv` package."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_jit.compat import buffers
from rwkv_jit.ops.timex import timex
from rwkv_jit.ops.wkv4 import wkv4


def rwkv4_forward(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
    """Fill y; w is a log-decay."""
    buffers.fill(y, buffers.run(wkv4, (w, u, *_rows(B, T, C, k, v)), decay="log")[0])


def rwkv4_backward(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
    """Fill the gradients, behind y, which one of the two extensions leaves out, and its gradient.

    That of w is of the model's own w, of which the log-decay is -exp(w).
    """
    gy, gw, gu, gk, gv = rest[-5:]
    grads = buffers.gradients(wkv4, (w, u, *_rows(B, T, C, k, v)), None, gy, decay="log")
    buffers.fill_sum(gw, grads[0] * w)
    buffers.fill_sum(gu, grads[1])
    buffers.fill(gk, grads[2])
    buffers.fill(gv, grads[3])


def rwkv4_in_place(
    B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, aa: Tensor, bb: Tensor, pp: Tensor
) -> None:
    """Fill y and move the three parts of the states on."""
    state = torch.stack([x.reshape(B, C) for x in (aa, bb, pp)], 1)
    result, final = buffers.run(wkv4, (w, u, *_rows(B, T, C, k, v)), state, decay="log")
    buffers.fill(y, result)
    for part, x in zip((aa, bb, pp), final.unbind(1), strict=True):
        buffers.fill(part, x)


def _rows(B: int, T: int, C: int, *rows: Tensor) -> list[Tensor]:
    return [x.reshape(B, T, C) for x in rows]


def timex_forward(w: Tensor, k: Tensor, out: Tensor, eps: float, B: int, C: int, T: int) -> None:
    """Fill the result of B sequences, each of which is added up with the same weights."""
    with torch.no_grad():
        buffers.fill(out, timex(w.reshape(C, T), k.reshape(B, C, T), eps))


def timex_backward(w: Tensor, k: Tensor, gy: Tensor, gw: Tensor, gk: Tensor, B: int, C: int, T: int) -> None:
    """Fill the gradients."""

    def weigh(w: Tensor, k: Tensor, initial_state: None, output_final_state: bool) -> tuple[Tensor, None]:
        return timex(w, k), None

    of_w, of_k = buffers.gradients(weigh, (w.reshape(C, T), k.reshape(B, C, T)), None, gy)
    buffers.fill_sum(gw, of_w)
    buffers.fill(gk, of_k)


def mm8_seq(
    B: int, N: int, M: int, x: Tensor, w: Tensor, mx: Tensor, rx: Tensor, my: Tensor, ry: Tensor, y: Tensor
) -> None:
    """Fill y with rows times weights of 8 bits."""
    buffers.fill(y, x @ _weights(x.dtype, w, mx, rx, my, ry))


def mm8_one(N: int, M: int, x: Tensor, w: Tensor, mx: Tensor, rx: Tensor, my: Tensor, ry: Tensor, y: Tensor) -> None:
    """Fill y, in float32, with one row times weights of 8 bits."""
    buffers.fill(y, x @ _weights(x.dtype, w, mx, rx, my, ry))


def _weights(dtype: torch.dtype, w: Tensor, mx: Tensor, rx: Tensor, my: Tensor, ry: Tensor) -> Tensor:
    return (w.to(dtype) + 0.5) * ry * rx + my + mx


def gemm_fp16_cublas(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Fill c, in float16 or float32, with a product of float16."""
    if c.dtype == a.dtype:
        buffers.fill(c, a @ b)
    elif a.is_cuda and a.dim() == b.dim() == 2 and hasattr(torch.ops.aten.mm, "dtype"):  # from torch 2.8 on
        buffers.fill(c, torch.mm(a, b, out_dtype=c.dtype))
    else:
        buffers.fill(c, a.to(c.dtype) @ b.to(c.dtype))
