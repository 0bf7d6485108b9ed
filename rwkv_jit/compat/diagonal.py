"""RWKV-5 and 6 as their extensions have them: rows of C channels, states [V, K], gradients in parts by sequence.

Functions take the tensors and sizes of a call by name, and fill what the extension fills.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.compat import buffers
from rwkv_jit.compat.buffers import Call, Run
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6

# What states held that a forward has overwritten, by the tensor. Its caller has no other place for it.
_overwritten: Any = WeakTensorKeyDictionary()
_VALUES = 8  # of a head of RWKV-5a that run at once


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


class Recurrence(NamedTuple):
    """An op, and what extensions call its inputs: rows of tokens, and then what has heads alone.

    Without a `decay` it is that of RWKV-6: in float32 its log-decay already, in 16 bits the model's own.
    """

    op: Any
    rows: str
    heads: str
    decay: str = ""

    def inputs(self, t: Call) -> list[Tensor]:
        """Return the inputs of the op."""
        return [*buffers.heads(t, self.rows), *(t[name].reshape(t["H"], -1) for name in self.heads.split())]

    def options(self, t: Call) -> dict[str, Any]:
        """Return how the op reads w."""
        return {"decay": self.decay or ("log" if t["w"].dtype.itemsize == 4 else "raw")}


RWKV6, RWKV6_DIRECT, RWKV6_LOG = (Recurrence(wkv6, "r k v w", "u", decay) for decay in ("", "direct", "log"))
RWKV5, RWKV5_LOG = Recurrence(wkv5, "r k v", "w u", "direct"), Recurrence(wkv5, "r k v", "ww u", "log")
RWKV5A = Recurrence(_rwkv5a, "r k v", "w1 u1 w2 u2", "direct")
RWKV5A_LOG = Recurrence(_rwkv5a, "r k v", "ww1 u1 ww2 u2", "log")


def forward(of: Recurrence) -> Run:
    """Return what fills y, from no state, from one of each sequence or from one for all."""

    def run(t: Call) -> None:
        s = _state(t, t["s"]) if "s" in t else None
        buffers.fill(t["y"], buffers.run(of.op, of.inputs(t), s, **of.options(t))[0])

    return run


def backward(of: Recurrence) -> Run:
    """Return what fills the gradients, that of w of the model's own w, whatever w is, and that of a state last."""

    def run(t: Call) -> None:
        _differentiate(of, t, _state(t, t["s"]) if "s" in t else None)

    return run


def _differentiate(of: Recurrence, t: Call, state: Tensor | None) -> None:
    inputs, options = of.inputs(t), of.options(t)
    grads = buffers.gradients(of.op, inputs, state, t["gy"], **options)
    names = [*of.rows.split(), *of.heads.split()]
    for number, (name, x, grad) in enumerate(zip(names, inputs, grads, strict=False)):
        # w -> -exp(w), of which the op gets the logarithm, is its own derivative.
        grad = grad * x if name[0] == "w" and options["decay"] == "log" else grad
        fill = buffers.fill if number < len(of.rows.split()) else buffers.fill_sum
        fill(t["g" + name.replace("ww", "w")], grad)
    if state is not None:
        fill = buffers.fill if grads[-1].numel() == t["gs"].numel() else buffers.fill_sum
        fill(t["gs"], grads[-1])


def in_place(of: Recurrence) -> Run:
    """Return what fills y and moves the states on."""

    def run(t: Call) -> None:
        state = buffers.states(t, "state")
        buffers.fill_each((t["y"], t["state"]), buffers.run(of.op, of.inputs(t), state, **of.options(t)))

    return run


def overwriting_forward(t: Call) -> None:
    """Fill y and move the states of RWKV-6 on, in the tensor that the caller has saved for a backward.

    What it held is kept for as long as there is that tensor.
    """
    s, (B, C, H) = t["s"], (t[name] for name in "BCH")
    if s.numel() != B * C * (C // H):
        raise ValueError(f"s: expected shape {[B, H, C // H, C // H]}, got {list(s.shape)}")
    initial = s.detach().clone()
    state = initial.reshape(B, H, C // H, C // H)
    buffers.fill_each((t["y"], s), buffers.run(wkv6, RWKV6.inputs(t), state, **RWKV6.options(t)))
    _overwritten[s] = initial


def overwriting_backward(t: Call) -> None:
    """Fill the gradients from the states before a forward overwrote them.

    A tensor that no forward overwrote is taken as it is. So is a copy that hooks of saved tensors made of one.
    """
    _differentiate(RWKV6, t, _state(t, _overwritten.get(t["s"], t["s"])))


def _state(t: Call, s: Tensor) -> Tensor:
    B, C, H = (t[name] for name in "BCH")
    size = C // H
    return s.reshape(H, size, size) if s.numel() == C * size else s.reshape(B, H, size, size)
