"""The recurrences of RWKV, TimeX and the products of the `rwkv` package as their extensions have them.

Functions take the tensors and sizes of a call by name, and fill what the extension fills. Rows are (B, T, C) or
(B, T, H, N), states [V, K], and gradients of what all sequences share have a part for each sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rwkv_jit.compat import buffers
from rwkv_jit.compat.buffers import Call, Run
from rwkv_jit.ops.timex import timex
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7

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
        rows = [t[name].reshape(t["B"], t["T"], t["H"], -1) for name in self.rows.split()]
        return [*rows, *(t[name].reshape(t["H"], -1) for name in self.heads.split())]

    def options(self, t: Call) -> dict[str, Any]:
        """Return how the op reads w."""
        return {"decay": self.decay or ("log" if t["w"].dtype.itemsize == 4 else "raw")}

    def forward(self, t: Call) -> None:
        """Fill y, from no state, from one of each sequence or from one for all."""
        buffers.fill(t["y"], buffers.run(self.op, self.inputs(t), _state(t, t.get("s")), **self.options(t))[0])

    def backward(self, t: Call, s: Tensor | None = None) -> None:
        """Fill the gradients, that of w of the model's own w, whatever w is, and that of a state last; `s` is for s."""
        inputs, options, state = self.inputs(t), self.options(t), _state(t, t.get("s") if s is None else s)
        grads = buffers.gradients(self.op, inputs, state, t["gy"], **options)
        names, rows = [*self.rows.split(), *self.heads.split()], len(self.rows.split())
        for number, (name, x, grad) in enumerate(zip(names, inputs, grads, strict=False)):
            # w -> -exp(w), of which the op gets the logarithm, is its own derivative.
            grad = grad * x if name[0] == "w" and options["decay"] == "log" else grad
            fill = buffers.fill if number < rows else buffers.fill_sum
            fill(t["g" + name.replace("ww", "w")], grad)
        if state is not None:
            fill = buffers.fill if grads[-1].numel() == t["gs"].numel() else buffers.fill_sum
            fill(t["gs"], grads[-1])

    def in_place(self, t: Call) -> None:
        """Fill y and move the states on."""
        size = t["C"] // t["H"]
        state = t["state"].reshape(t["B"], t["H"], size, size)
        buffers.fill_each((t["y"], t["state"]), buffers.run(self.op, self.inputs(t), state, **self.options(t)))


RWKV6, RWKV6_DIRECT, RWKV6_LOG = (Recurrence(wkv6, "r k v w", "u", decay) for decay in ("", "direct", "log"))
RWKV5, RWKV5_LOG = Recurrence(wkv5, "r k v", "w u", "direct"), Recurrence(wkv5, "r k v", "ww u", "log")
RWKV5A = Recurrence(_rwkv5a, "r k v", "w1 u1 w2 u2", "direct")
RWKV5A_LOG = Recurrence(_rwkv5a, "r k v", "ww1 u1 ww2 u2", "log")
RWKV7 = Recurrence(wkv7, "r w k v a b", "", "raw")


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
    RWKV6.backward(t, _overwritten.get(t["s"], t["s"]))


def _state(t: Call, s: Tensor | None) -> Tensor | None:
    if s is None:
        return None
    B, C, H = (t[name] for name in "BCH")
    size = C // H
    return s.reshape(H, size, size) if s.numel() == C * size else s.reshape(B, H, size, size)


# ---- RWKV-7 in training ------------------------------------------------------------------------------------------


def trained(names: str, decay: str, state: str = "", last: str = "") -> tuple[Run, Run]:
    """Return the forward and the backward of an extension for training.

    `names` are its rows in the order of `wkv7`, `state` and `last` its states, if any. The scratch s begins with the
    first one, as a backward is not given it; else s and sa stay as they are.
    """
    of_rows, grads = names.split(), [f"d{name}" for name in (*names.split(), *state.split())]

    def forward(t: Call) -> None:
        s0 = t[state] if state else None
        place = None if s0 is None else buffers.kept(t["s"], s0.numel())
        rows = [t[name] for name in of_rows]
        buffers.fill_recorded(wkv7, rows, s0, t["s"], t["y"], t.get(last), decay=decay)
        if place is not None and s0 is not None:
            place.copy_(s0.detach().reshape(-1))

    def backward(t: Call) -> None:
        into, rows = [t[name] for name in grads], [t[name] for name in of_rows]
        s0 = buffers.kept(t["s"], into[-1].numel()).view(into[-1].shape) if state else None
        buffers.fill_each(into, buffers.gradients(wkv7, rows, s0, t["dy"], t.get(f"d{last}"), t["s"], decay=decay))

    return forward, backward


# ---- RWKV-4, TimeX, and products ---------------------------------------------------------------------------------


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


def _timex(w: Tensor, k: Tensor, **_: Any) -> tuple[Tensor, None]:
    return timex(w, k), None


def timex_forward(t: Call) -> None:
    """Fill the result of B sequences, each of which is added up with the same weights."""
    with torch.no_grad():
        buffers.fill(t["out"], timex(*_filter(t), t["eps"]))


def timex_backward(t: Call) -> None:
    """Fill the gradients."""
    of_w, of_k = buffers.gradients(_timex, _filter(t), None, t["gy"])
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
