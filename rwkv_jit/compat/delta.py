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
    buffers.fill_recorded(wkv7, (r, w, k, v, a, b), None, s, y, decay="sigmoid")


def clampw_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, sa: Tensor,
    *grads: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of r, w, k, v, a and b."""
    _fill_gradients(grads, (r, w, k, v, a, b), None, s, dy, None, "sigmoid")


def backstepping_forward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, y: Tensor, s: Tensor, sa: Tensor
) -> None:
    """Fill y. Here z and a are what other extensions call a and b."""
    buffers.fill_recorded(wkv7, (q, w, k, v, z, a), None, s, y, decay="raw")


def backstepping_backward(
    w: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, dy: Tensor, s: Tensor, sa: Tensor, dw: Tensor,
    dq: Tensor, *others: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of w, q, k, v, z and a."""
    _fill_gradients((dq, dw, *others), (q, w, k, v, z, a), None, s, dy, None, "raw")


def _fill_gradients(
    into: tuple[Tensor, ...], inputs: tuple[Tensor, ...], s0: Tensor | None, s: Tensor, dy: Tensor,
    dlast: Tensor | None, decay: str,
) -> None:  # fmt: skip
    """Fill the gradients of the inputs, and of the initial state last where there is one."""
    grads = buffers.gradients(wkv7, inputs, s0, dy, dlast, s, decay=decay)
    for buffer, grad in zip(into, grads, strict=True):
        buffers.fill(buffer, grad)


# ---- the same from a state ---------------------------------------------------------------------------------------


def state_forward(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, y: Tensor, s: Tensor, sa: Tensor
) -> None:
    """Fill y, and keep the state for the backward, which is not given it, at the begin of s."""
    place = buffers.kept(s, s0.numel())
    buffers.fill_recorded(wkv7, (r, w, k, v, a, b), s0, s, y, decay="sigmoid")
    place.copy_(s0.detach().reshape(-1))


def state_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, s: Tensor, sa: Tensor, ds0: Tensor,
    *grads: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients, that of the state first."""
    s0 = buffers.kept(s, ds0.numel()).view(ds0.shape)
    _fill_gradients((*grads, ds0), (r, w, k, v, a, b), s0, s, dy, None, "sigmoid")


def passing_forward(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, y: Tensor, last: Tensor, s: Tensor,
    sa: Tensor,
) -> None:  # fmt: skip
    """Fill y and the state behind the last token."""
    place = buffers.kept(s, s0.numel())
    buffers.fill_recorded(wkv7, (r, w, k, v, a, b), s0, s, y, last, decay="sigmoid")
    place.copy_(s0.detach().reshape(-1))


def passing_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, dlast: Tensor, s: Tensor, sa: Tensor,
    ds0: Tensor, *grads: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of a call whose last state is used."""
    s0 = buffers.kept(s, ds0.numel()).view(ds0.shape)
    _fill_gradients((*grads, ds0), (r, w, k, v, a, b), s0, s, dy, dlast, "sigmoid")


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
