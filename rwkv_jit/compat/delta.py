"""RWKV-7 as its extensions have it: (B, T, H, N) or (B, T, C), states [V, K], decays raw or by a sigmoid ("clampw")."""

from __future__ import annotations

from torch import Tensor

from rwkv_jit.compat import buffers
from rwkv_jit.ops.wkv7 import wkv7

# ---- pairs of forward and backward for training ------------------------------------------------------------------


def clampw_forward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, y: Tensor, s: Tensor, sa: Tensor
) -> None:
    """Fill y. The scratch s and sa stays as it is."""
    buffers.fill(y, buffers.run(wkv7, (r, w, k, v, a, b), decay="sigmoid")[0])


def clampw_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, sa: Tensor,
    dr: Tensor, dw: Tensor, dk: Tensor, dv: Tensor, da: Tensor, db: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients."""
    grads = buffers.gradients(wkv7, (r, w, k, v, a, b), None, dy, decay="sigmoid")
    for buffer, grad in zip((dr, dw, dk, dv, da, db), grads, strict=True):
        buffers.fill(buffer, grad)


def backstepping_forward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, y: Tensor, s: Tensor, sa: Tensor
) -> None:
    """Fill y. Here z and a are what other extensions call a and b."""
    buffers.fill(y, buffers.run(wkv7, (q, w, k, v, z, a), decay="raw")[0])


def backstepping_backward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, dy: Tensor, s: Tensor, sa: Tensor,
    dw: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dz: Tensor, da: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients."""
    grads = buffers.gradients(wkv7, (q, w, k, v, z, a), None, dy, decay="raw")
    for buffer, grad in zip((dq, dw, dk, dv, dz, da), grads, strict=True):
        buffers.fill(buffer, grad)


# ---- the same from a state ---------------------------------------------------------------------------------------


def state_forward(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, y: Tensor, s: Tensor, sa: Tensor
) -> None:
    """Fill y, and keep the state for the backward, which is not given it, at the begin of s."""
    result = buffers.run(wkv7, (r, w, k, v, a, b), s0, decay="sigmoid")[0]
    _kept(s, s0.numel()).copy_(s0.reshape(-1))
    buffers.fill(y, result)


def state_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, sa: Tensor,
    ds0: Tensor, dr: Tensor, dw: Tensor, dk: Tensor, dv: Tensor, da: Tensor, db: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients, that of the state first."""
    _fill_with_state((r, w, k, v, a, b), dy, None, s, (ds0, dr, dw, dk, dv, da, db))


def passing_forward(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, y: Tensor, last: Tensor, s: Tensor,
    sa: Tensor,
) -> None:  # fmt: skip
    """Fill y and the state behind the last token."""
    result, final = buffers.run(wkv7, (r, w, k, v, a, b), s0, decay="sigmoid")
    _kept(s, s0.numel()).copy_(s0.reshape(-1))
    buffers.fill(y, result)
    buffers.fill(last, final)


def passing_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, dlast: Tensor, s: Tensor, sa: Tensor,
    ds0: Tensor, dr: Tensor, dw: Tensor, dk: Tensor, dv: Tensor, da: Tensor, db: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of a call whose last state is used."""
    _fill_with_state((r, w, k, v, a, b), dy, dlast, s, (ds0, dr, dw, dk, dv, da, db))


def _fill_with_state(
    inputs: tuple[Tensor, ...], dy: Tensor, dlast: Tensor | None, s: Tensor, into: tuple[Tensor, ...]
) -> None:
    s0 = _kept(s, into[0].numel()).view(into[0].shape)
    *grads, of_state = buffers.gradients(wkv7, inputs, s0, dy, dlast, decay="sigmoid")
    for buffer, grad in zip(into, (of_state, *grads), strict=True):
        buffers.fill(buffer, grad)


def _kept(s: Tensor, count: int) -> Tensor:
    """Return where the scratch holds the initial state."""
    if s.numel() < count or not s.is_contiguous():
        raise ValueError(
            f"s: expected a contiguous tensor of at least {count} elements, as of 16 tokens and more, "
            f"got shape {tuple(s.shape)}"
        )
    return s.view(-1)[:count]


# ---- forward alone -----------------------------------------------------------------------------------------------


def forward(
    B: int, T: int, C: int, H: int, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, y: Tensor
) -> None:
    """Fill y, from no state."""
    buffers.fill(y, buffers.run(wkv7, buffers.heads(B, T, H, r, w, k, v, a, b), decay="raw")[0])


def forward_in_place(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    y: Tensor,
) -> None:  # fmt: skip
    """Fill y and move the states on."""
    size = C // H
    rows = buffers.heads(B, T, H, r, w, k, v, a, b)
    result, final = buffers.run(wkv7, rows, state.reshape(B, H, size, size), decay="raw")
    buffers.fill(y, result)
    buffers.fill(state, final)
