"""RWKV-5 and 6 as their extensions have them: rows of C channels, states [V, K], gradients in parts by sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.compat import buffers
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6

# What states held that a forward has overwritten, by the tensor. Its caller has no other place for it.
_overwritten: Any = WeakTensorKeyDictionary()


def _rwkv6(B: int, T: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[list[Tensor], str]:
    """Return the inputs, and what w is: in float32 its log-decay already, in 16 bits the model's own."""
    decay = "log" if w.dtype.itemsize == 4 else "raw"
    return [*buffers.heads(B, T, H, r, k, v, w), u.reshape(H, -1)], decay


def rwkv6_forward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, y: Tensor
) -> None:
    """Fill y, from no state."""
    inputs, decay = _rwkv6(B, T, H, r, k, v, w, u)
    buffers.fill(y, buffers.run(wkv6, inputs, decay=decay)[0])


def rwkv6_backward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor, gr: Tensor,
    gk: Tensor, gv: Tensor, gw: Tensor, gu: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients; that of w is of the model's own w, whatever w is."""
    _fill_rwkv6(B, T, H, (r, k, v, w, u), None, gy, (gr, gk, gv, gw, gu))


def rwkv6_state_forward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor, y: Tensor
) -> None:
    """Fill y from a state of each sequence, or from one for all."""
    inputs, decay = _rwkv6(B, T, H, r, k, v, w, u)
    buffers.fill(y, buffers.run(wkv6, inputs, _state(s, B, C, H), decay=decay)[0])


def rwkv6_state_backward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor, gy: Tensor,
    gr: Tensor, gk: Tensor, gv: Tensor, gw: Tensor, gu: Tensor, gs: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients, that of the state last."""
    of_state = _fill_rwkv6(B, T, H, (r, k, v, w, u), _state(s, B, C, H), gy, (gr, gk, gv, gw, gu))
    if of_state.numel() == gs.numel():
        buffers.fill(gs, of_state)
    else:
        buffers.fill_sum(gs, of_state)


def rwkv6_overwriting_forward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor, y: Tensor
) -> None:
    """Fill y and move the states on, in the tensor that the caller has saved for a backward.

    What it held is kept for as long as there is that tensor.
    """
    inputs, decay = _rwkv6(B, T, H, r, k, v, w, u)
    if s.numel() != B * C * (C // H):
        raise ValueError(f"s: expected shape {[B, H, C // H, C // H]}, got {list(s.shape)}")
    initial = s.detach().clone()
    result, final = buffers.run(wkv6, inputs, _state(initial, B, C, H).reshape(B, H, C // H, C // H), decay=decay)
    buffers.fill(y, result)
    buffers.fill(s, final)
    _overwritten[s] = initial


def rwkv6_overwriting_backward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor, gy: Tensor,
    gr: Tensor, gk: Tensor, gv: Tensor, gw: Tensor, gu: Tensor, gs: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients from the states before a forward overwrote them.

    A tensor that no forward overwrote is taken as it is. So is a copy that hooks of saved tensors made of one.
    """
    rwkv6_state_backward(B, T, C, H, r, k, v, w, u, _overwritten.get(s, s), gy, gr, gk, gv, gw, gu, gs)


def _fill_rwkv6(
    B: int, T: int, H: int, rows: tuple[Tensor, ...], state: Tensor | None, gy: Tensor, into: tuple[Tensor, ...]
) -> Tensor:
    inputs, decay = _rwkv6(B, T, H, *rows)
    grads = buffers.gradients(wkv6, inputs, state, gy, decay=decay)
    gr, gk, gv, gw, gu = into
    for buffer, grad in zip((gr, gk, gv), grads[:3], strict=True):
        buffers.fill(buffer, grad)
    buffers.fill(gw, grads[3] * inputs[3] if decay == "log" else grads[3])  # w -> -exp(w) is its own derivative
    buffers.fill_sum(gu, grads[4])
    return grads[-1]


def _state(s: Tensor, B: int, C: int, H: int) -> Tensor:
    size = C // H
    return s.reshape(H, size, size) if s.numel() == C * size else s.reshape(B, H, size, size)


def rwkv5_forward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, eew: Tensor, u: Tensor, y: Tensor
) -> None:
    """Fill y; eew is the decay of a token."""
    inputs = [*buffers.heads(B, T, H, r, k, v), eew.reshape(H, -1), u.reshape(H, -1)]
    buffers.fill(y, buffers.run(wkv5, inputs, decay="direct")[0])


def rwkv5_backward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, eew: Tensor, ew: Tensor, u: Tensor, gy: Tensor,
    gr: Tensor, gk: Tensor, gv: Tensor, gw: Tensor, gu: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients; ew is the logarithm of the decay, and gw of the model's own w."""
    inputs = [*buffers.heads(B, T, H, r, k, v), ew.reshape(H, -1), u.reshape(H, -1)]
    grads = buffers.gradients(wkv5, inputs, None, gy, decay="log")
    for buffer, grad in zip((gr, gk, gv), grads[:3], strict=True):
        buffers.fill(buffer, grad)
    buffers.fill_sum(gw, grads[3] * inputs[3])
    buffers.fill_sum(gu, grads[4])


def rwkv5_in_place(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, y: Tensor
) -> None:
    """Fill y and move the states on; w is the decay of a token."""
    inputs = [*buffers.heads(B, T, H, r, k, v), w.reshape(H, -1), u.reshape(H, -1)]
    result, final = buffers.run(wkv5, inputs, _state(state, B, C, H).reshape(B, H, C // H, C // H), decay="direct")
    buffers.fill(y, result)
    buffers.fill(state, final)


def rwkv6_in_place(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, y: Tensor,
    decay: str = "direct",
) -> None:  # fmt: skip
    """Fill y and move the states on; w is the decay of every token, or its logarithm."""
    inputs = [*buffers.heads(B, T, H, r, k, v, w), u.reshape(H, -1)]
    result, final = buffers.run(wkv6, inputs, _state(state, B, C, H).reshape(B, H, C // H, C // H), decay=decay)
    buffers.fill(y, result)
    buffers.fill(state, final)


def rwkv6_log_in_place(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, y: Tensor
) -> None:
    """Fill y and move the states on; w is the logarithm of the decay of every token."""
    rwkv6_in_place(B, T, C, H, state, r, k, v, w, u, y, "log")
