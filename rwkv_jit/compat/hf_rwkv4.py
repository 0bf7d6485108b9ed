"""RWKV-4 of transformers: the kernel that its model looks for, on the op `wkv4`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from torch import Tensor

from rwkv_jit import compat
from rwkv_jit.compat import buffers, recurrences
from rwkv_jit.ops.wkv4 import wkv4


def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
    """Fill y, from no state; w is a log-decay."""
    recurrences.rwkv4_forward({**dict(zip("BTC", k.shape, strict=True)), "w": w, "u": u, "k": k, "v": v, "y": y})


def forward_with_state(w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, state: Tensor) -> None:
    """Fill y and move the states on, which are [B, C, 3]."""
    result, final = buffers.run(wkv4, (w, u, k, v), state.transpose(1, 2), decay="log")
    buffers.fill(y, result)
    buffers.fill(state, final.transpose(1, 2))


def backward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, gy: Tensor, gw: Tensor, gu: Tensor, gk: Tensor, gv: Tensor
) -> None:
    """Fill the gradients; that of w is of the model's own w, and that of a batch for w and u is added up."""
    grads = {"gy": gy, "gw": gw, "gu": gu, "gk": gk, "gv": gv}
    recurrences.rwkv4_backward({**dict(zip("BTC", k.shape, strict=True)), "w": w, "u": u, "k": k, "v": v, **grads})


KERNEL = SimpleNamespace(
    max_seq_length=sys.maxsize,  # the model asks for no more than that
    forward=forward,
    forward_bf16=forward,
    forward_with_state=forward_with_state,
    forward_with_state_bf16=forward_with_state,
    backward=backward,
    backward_bf16=backward,
)


def load_wkv_cuda_kernel(context_length: int) -> None:
    """Load nothing: `KERNEL` is there, for any length."""


def take_over(model: ModuleType) -> None:
    """Give the model our kernel."""
    compat.put(model, "rwkv_cuda_kernel", KERNEL)
    compat.put(model, "load_wkv_cuda_kernel", load_wkv_cuda_kernel)
