"""How wkv4 walks over the tokens: in one go or in parts, and what is launched for it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.launch import Plan
from rwkv_jit.ops import prepared
from rwkv_jit.signatures import BySignature
from rwkv_jit.template import Parameter

CHUNK_LEN = 16  # tokens that a thread loads at once, and between the states that the forward saves
NUM_THREADS = 128

# ---- how a sequence is split -------------------------------------------------------------------------------------

# Threads of a multiprocessor that keep it busy, and the least number of parts and of tokens of a part that are worth
# the second look at every token.
_BUSY_THREADS = 256
_LEAST_PARTS = 4
_LEAST_TOKENS = 64


def part_length(backend: str, walks: int, tokens: int, multiprocessors: int) -> int:
    """Return how many tokens a thread walks over: all, or those of a part, where `walks` channels of rows are few."""
    if backend == "recurrent":
        return tokens
    parts = min(_BUSY_THREADS * multiprocessors // max(walks, 1), tokens // _LEAST_TOKENS)
    if backend == "split":
        parts = max(parts, 2)
    elif parts < _LEAST_PARTS:
        return tokens
    return CHUNK_LEN * math.ceil(tokens / (parts * CHUNK_LEN))


def backend_of(backend: str, walks: int, tokens: int, multiprocessors: int) -> str:
    """Return the backend that runs a call on CUDA tensors."""
    if backend != "auto":
        return backend
    return "split" if part_length(backend, walks, tokens, multiprocessors) < tokens else "recurrent"


# ---- launches ----------------------------------------------------------------------------------------------------


class _Walk(NamedTuple):
    """A direction, ready to be launched on any tensors of a signature."""

    plans: tuple[Plan, ...]  # where there are parts, first what each does on its own
    parts: int

    def launch(self, values: Sequence[Tensor | None]) -> None:
        """Launch it on tensors in the order of the kernel's arguments."""
        addresses = [0 if x is None else x.data_ptr() for x in values]
        for plan in self.plans:
            tensors.launch(plan, addresses)


_ADDRESSES = {"forward": 9, "backward": 13}
_walks: BySignature[_Walk] = BySignature()


def requests(
    direction: str, types: dict[str, Parameter], arch: str, also: tuple[str, ...] = ()
) -> tuple[kernel.Request, kernel.Request]:
    """Return the kernels of a direction: of a part on its own, and of the results."""
    source = template.library(f"wkv4_{direction}")
    given = {**types, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": NUM_THREADS}
    of_part, of_results = (kernel.Request(source, {**given, "RESULTS": flag}, arch, also) for flag in (False, True))
    return of_part, of_results


def _walk(
    direction: str, w: Tensor, u: Tensor, streamed: Sequence[Tensor], decay: str, backend: str, training: bool = True
) -> _Walk:
    """Find or compile what a direction launches; with `training` the backward compiles beside it, not after."""
    key = (direction, training, decay, backend, tensors.signature((w, u, *streamed)))
    known = _walks.get(key)
    if known is not None:
        return known
    kernel.check_not_forked()
    (batch, tokens, channels), device = streamed[0].shape, streamed[0].device.index
    length = part_length(backend, batch * channels, tokens, tensors.multiprocessors(device))
    parts = max(math.ceil(tokens / max(length, 1)), 1)
    types: dict[str, Parameter] = {
        "T_IO": tensors.STORAGE[streamed[0].dtype],
        "T_W": tensors.STORAGE[w.dtype],
        "T_U": tensors.STORAGE[u.dtype],
        "DECAY": decay,
    }
    directions = [direction, "backward"] if direction == "forward" and training else [direction]
    wanted = [
        request
        for each in directions
        for request in requests(each, types, tensors.arch(device), tensors.also(device))[0 if parts > 1 else 1 :]
    ]
    with torch.cuda.device(device):
        prepared.check_capture("wkv4", wanted, device)
        for name, x in zip(("k", "v"), streamed, strict=False):
            tensors.validate(name, x)
        found = kernel.get_all(wanted)[: len(wanted) // len(directions)]
        strides = [struct.pack("2q", *x.stride()[:2]) for x in streamed]
        constants = [*strides, *[struct.pack("q", size) for size in (tokens, batch, channels, length)]]
        blocks = math.ceil(batch * channels / NUM_THREADS)
        known = _Walk(
            tuple(
                Plan(each, f"wkv4_{direction}", device, (blocks, rows, 1), (NUM_THREADS, 1, 1),
                     "Q" * _ADDRESSES[direction], constants)
                for each, rows in zip(found, (parts - 1, parts)[-len(found) :], strict=True)
            ),
            parts,
        )  # fmt: skip
    return _walks.keep(key, known)


def _readable(x: Tensor) -> Tensor:
    """Return `x` with neighbouring channels: a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _summaries(walk: _Walk, batch: int, channels: int, like: Tensor) -> Tensor | None:
    if walk.parts == 1:
        return None
    return torch.empty(walk.parts, batch, 3, channels, dtype=torch.float32, device=like.device)


def forward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None, decay: str, backend: str,
    output_final_state: bool, save: bool, final: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y, the final state (`final` where that is given) and the states the backward needs."""
    w, u, k, v = map(_readable, (w, u, k, v))
    batch, tokens, channels = k.shape
    walk = _walk("forward", w, u, (k, v), decay, backend, training=save)
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = None if state is None else state.contiguous()
    saved = None
    if output_final_state and final is None:
        final = torch.empty(batch, 3, channels, dtype=torch.float32, device=k.device)
    if save:
        chunks = math.ceil(tokens / CHUNK_LEN)
        saved = torch.empty(batch, chunks, 3, channels, dtype=torch.float32, device=k.device)
    walk.launch((w, u, k, v, state, y, final, saved, _summaries(walk, batch, channels, k)))
    return y, final, saved


def backward(
    dy: Tensor | None, grad_final: Tensor | None, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None,
    decay: str, backend: str, saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of w, u, k, v and the initial state."""
    batch, tokens, channels = k.shape
    grad_final = None if grad_final is None else grad_final.contiguous()
    grad_state = None if state is None else torch.empty(batch, 3, channels, dtype=torch.float32, device=k.device)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    if tokens == 0:
        if grad_state is not None:
            grad_state.zero_() if grad_final is None else grad_state.copy_(grad_final)
        return torch.zeros_like(w), torch.zeros_like(u), dk, dv, grad_state
    own_w, own_u, k, v, dy = map(_readable, (w, u, k, v, torch.zeros_like(v) if dy is None else dy))
    walk = _walk("backward", own_w, own_u, (k, v, dy), decay, backend)
    dw, du = (torch.empty(walk.parts, batch, channels, dtype=torch.float32, device=k.device) for _ in range(2))
    walk.launch(
        (own_w, own_u, k, v, dy, saved, grad_final, grad_state, dk, dv, dw, du, _summaries(walk, batch, channels, k))
    )
    return dw.sum((0, 1)).to(w.dtype), du.sum((0, 1)).to(u.dtype), dk, dv, grad_state
