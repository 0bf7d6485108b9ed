"""RWKV-5 and 6 as their extensions have them: rows of C channels, states [V, K], gradients in parts by sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.compat import buffers
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6

# What states held that a forward has overwritten, by the tensor. Its caller has no other place for it.
_overwritten: Any = WeakTensorKeyDictionary()
_VALUES = 8  # of a head of RWKV-5a that run at once


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


def _rwkv5a(r: Any, k: Any, v: Any, w1: Any, u1: Any, w2: Any, u2: Any, decay: Any, **_: Any) -> tuple[Tensor, None]:
    """Return y of RWKV-5 with decays and bonuses of values (w2, u2) beside those of keys, both [H, N].

    Each value then has separate decays and a separate bonus, as a head of `wkv5` with one value. A few run at a time,
    as each has copies of r and k.
    """
    N, y = r.shape[3], []
    for i in range(0, N, _VALUES):
        size = min(_VALUES, N - i)
        rows = [x.unsqueeze(3).expand(-1, -1, -1, size, -1).flatten(2, 3) for x in (r, k)]  # (B, T, H size, N)
        w, u = w2[:, i : i + size, None], u2[:, i : i + size, None]
        w = (w1[:, None] * w if decay == "direct" else w1[:, None] + w).flatten(0, 1)  # (H size, N)
        values = v[..., i : i + size].flatten(2).unsqueeze(3)  # (B, T, H size, 1)
        inputs = (*rows, values, w, (u1[:, None] + u).flatten(0, 1))
        y.append(buffers.y_of(wkv5, inputs, decay=decay).reshape(*r.shape[:3], size))
    return torch.cat(y, 3), None


def rwkv5a_forward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, eew1: Tensor, u1: Tensor, eew2: Tensor,
    u2: Tensor, y: Tensor,
) -> None:  # fmt: skip
    """Fill y; eew1 and eew2 are the decays of a token."""
    inputs = [*buffers.heads(B, T, H, r, k, v), *(x.reshape(H, -1) for x in (eew1, u1, eew2, u2))]
    buffers.fill(y, buffers.run(_rwkv5a, inputs, decay="direct")[0])


def rwkv5a_backward(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, eew1: Tensor, ew1: Tensor, u1: Tensor,
    eew2: Tensor, ew2: Tensor, u2: Tensor, gy: Tensor, gr: Tensor, gk: Tensor, gv: Tensor, gw1: Tensor, gu1: Tensor,
    gw2: Tensor, gu2: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients; ew1 and ew2 are logarithms of the decays, gw1 and gw2 are of the model's own."""
    inputs = [*buffers.heads(B, T, H, r, k, v), *(x.reshape(H, -1) for x in (ew1, u1, ew2, u2))]
    grads = buffers.gradients(_rwkv5a, inputs, None, gy, decay="log")
    for buffer, grad in zip((gr, gk, gv), grads[:3], strict=True):
        buffers.fill(buffer, grad)
    grads[3:] = grads[3] * inputs[3], grads[4], grads[5] * inputs[5], grads[6]
    for buffer, grad in zip((gw1, gu1, gw2, gu2), grads[3:], strict=True):
        buffers.fill_sum(buffer, grad)


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
