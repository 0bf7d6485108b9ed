"""RWKV-7 as its extensions have it: (B, T, H, N) or (B, T, C), states [V, K], decays raw or by a sigmoid ("clampw").

Functions take the tensors and sizes of a call by name, and fill what the extension fills.
"""

from __future__ import annotations

from typing import Any

from rwkv_jit.compat import buffers
from rwkv_jit.compat.buffers import Call, Run
from rwkv_jit.ops.wkv7 import wkv7


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


def forward(t: Call) -> None:
    """Fill y, from no state."""
    buffers.fill(t["y"], buffers.run(wkv7, _rows(t), decay="raw")[0])


def forward_in_place(t: Call) -> None:
    """Fill y and move the states on."""
    buffers.fill_each((t["y"], t["state"]), buffers.run(wkv7, _rows(t), buffers.states(t, "state"), decay="raw"))


def _rows(t: Call) -> list[Any]:
    return buffers.heads(t, "r w k v a b")
