"""RWKV-4 and TimeX as their extensions have them, and the products of the `rwkv` package.

Functions take the tensors and sizes of a call by name, and fill what the extension fills.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_jit.compat import buffers
from rwkv_jit.compat.buffers import Call
from rwkv_jit.ops.timex import timex
from rwkv_jit.ops.wkv4 import wkv4


def rwkv4_forward(t: Call) -> None:
    """Fill y; w is a log-decay."""
    buffers.fill(t["y"], buffers.run(wkv4, _rwkv4(t), decay="log")[0])


def rwkv4_backward(t: Call) -> None:
    """Fill the gradients; that of w is of the model's own w, of which the log-decay is -exp(w)."""
    of_w, of_u, of_k, of_v = buffers.gradients(wkv4, _rwkv4(t), None, t["gy"], decay="log")
    buffers.fill_sum(t["gw"], of_w * t["w"])
    buffers.fill_sum(t["gu"], of_u)
    buffers.fill_each((t["gk"], t["gv"]), (of_k, of_v))


def rwkv4_in_place(t: Call) -> None:
    """Fill y and move the three parts of the states on."""
    parts = [t[name] for name in ("aa", "bb", "pp")]
    state = torch.stack([x.reshape(t["B"], t["C"]) for x in parts], 1)  # (B, 3, C)
    result, final = buffers.run(wkv4, _rwkv4(t), state, decay="log")
    buffers.fill_each((t["y"], *parts), (result, *final.unbind(1)))


def _rwkv4(t: Call) -> list[Tensor]:
    return [t["w"], t["u"], *(t[name].reshape(t["B"], t["T"], t["C"]) for name in "kv")]


def _filter(t: Call) -> tuple[Tensor, Tensor]:
    return t["w"].reshape(t["C"], t["T"]), t["k"].reshape(t["B"], t["C"], t["T"])


def timex_forward(t: Call) -> None:
    """Fill the result of B sequences, each of which is added up with the same weights."""
    with torch.no_grad():
        buffers.fill(t["out"], timex(*_filter(t), t["eps"]))


def timex_backward(t: Call) -> None:
    """Fill the gradients."""

    def weigh(w: Tensor, k: Tensor, initial_state: None, output_final_state: bool) -> tuple[Tensor, None]:
        return timex(w, k), None

    of_w, of_k = buffers.gradients(weigh, _filter(t), None, t["gy"])
    buffers.fill_sum(t["gw"], of_w)
    buffers.fill(t["gk"], of_k)


def mm8(t: Call) -> None:
    """Fill y with rows, or in float32 with one row, times weights of 8 bits."""
    weights = (t["w"].to(t["x"].dtype) + 0.5) * t["ry"] * t["rx"] + t["my"] + t["mx"]
    buffers.fill(t["y"], t["x"] @ weights)


def gemm_fp16_cublas(t: Call) -> None:
    """Fill c, in float16 or float32, with a product of float16."""
    a, b, c = (t[name] for name in "abc")
    if c.dtype == a.dtype:
        buffers.fill(c, a @ b)
    elif a.is_cuda and a.dim() == b.dim() == 2 and hasattr(torch.ops.aten.mm, "dtype"):  # from torch 2.8 on
        buffers.fill(c, torch.mm(a, b, out_dtype=c.dtype))
    else:
        buffers.fill(c, a.to(c.dtype) @ b.to(c.dtype))
