"""TimeX by tensor cores: the rows as Toeplitz tiles, whose work grows with the square of the tokens."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, timex_launches
from rwkv_jit.ops.timex_launches import Beside, Launches
from rwkv_jit.template import Parameter

LONGEST = 2**24  # tokens of a row are counted in 32 bits
LEAST_ARCH = 80  # m16n8k16 products

_THREADS, _ROWS = 256, 4  # of a block; tiles of a warp
_TILE, _CHUNK = 16, _THREADS // 32 * _ROWS  # tokens of a tile; tiles of a chunk of what is streamed
_BLOCKS = 2  # that a multiprocessor shall have room for
_DIAGONALS = 32  # floats for each tile of lags, of the gradient of w


def obstacle(tokens: int, arch: str) -> str | None:
    """Return what is in the way of such rows, for a sentence that begins with who they are for."""
    if tokens > LONGEST:
        return f"takes at most {LONGEST} tokens, got {tokens}"
    if chunked.arch_number(arch) < LEAST_ARCH:
        return f"needs an architecture from sm_{LEAST_ARCH} on, got {arch}"
    return None


class Geometry(NamedTuple):
    """How blocks are cut."""

    batch: int  # rows of a block
    streamed: bool  # whether what a block reads is more than its shared memory
    tiles: int  # of 16 tokens, with those that fill up
    shared_bytes: int


def geometry(direction: str, batch: int, tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str) -> Geometry:
    """Return how the convolution ("forward") or the gradient of the filter is cut, for the dtypes of w and k.

    As many rows as there are and as let two blocks be on a multiprocessor; of those that are streamed the least always
    fit. Only the convolution of 16-bit rows takes 32 at once: of float32 ones 16 are faster (0.154 ms for 0.161 at
    (32, 768, 768) on an H200).
    """
    largest = 32 if direction == "forward" and types[1].itemsize == 2 else 16
    shared_bytes = _convolution_bytes if direction == "forward" else _gradient_bytes
    cuts = []
    for streamed in (False, True):
        multiple = _CHUNK if streamed else _ROWS
        tiles = -(-tokens // (_TILE * multiple)) * multiple
        for size in (16, 8) if streamed else (32, 16, 8):
            if size <= largest and (size == 8 or batch > size // 2):
                cuts.append(Geometry(size, streamed, tiles, shared_bytes(size, streamed, tiles, types)))
    limit = chunked.shared_per_multiprocessor(arch) // _BLOCKS - 1024
    return next((cut for cut in cuts if cut.shared_bytes <= limit), cuts[-1])


def _convolution_bytes(batch: int, streamed: bool, tiles: int, types: tuple[torch.dtype, torch.dtype]) -> int:
    w_parts, k_parts = (dtype.itemsize // 2 for dtype in types)
    held, before = (_CHUNK, _CHUNK) if streamed else (tiles, _ROWS)
    return 4 * w_parts * _TILE * (before + held) + 2 * k_parts * batch * (_TILE * held + 8) + 2 * batch * (held // 2)


def _gradient_bytes(batch: int, streamed: bool, tiles: int, types: tuple[torch.dtype, torch.dtype]) -> int:
    parts = types[1].itemsize // 2
    held = (_CHUNK, 2 * _CHUNK) if streamed else (tiles, tiles)
    operands = sum(2 * parts * batch * (_TILE * count + 8) + 4 * (count // 2) for count in held)
    return operands + 4 * (_THREADS // 32) * 16 * 17


def requests(
    batch: int, tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str, also: tuple[str, ...] = (),
    vector: int = 4,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels of a call: the convolution, and for gradients the one of k and the one of w."""
    directions = (("forward", False), ("forward", True), ("backward", False))
    return [_request(direction, batch, tokens, types, arch, also, vector, way) for direction, way in directions]


def _request(
    direction: str, batch: int, tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str, also: tuple[str, ...],
    vector: int, is_reversed: bool,
) -> kernel.Request:  # fmt: skip
    cut = geometry(direction, batch, tokens, types, arch)
    parameters: dict[str, Parameter] = {
        "T_W": tensors.STORAGE[types[0]], "T_IO": tensors.STORAGE[types[1]], "BATCH": cut.batch,
        "STREAMED": cut.streamed, "ROWS": _ROWS, "NUM_THREADS": _THREADS, "VECTOR": vector, "BLOCKS_PER_SM": _BLOCKS,
    }  # fmt: skip
    if direction == "forward":
        parameters["REVERSED"] = is_reversed
    name = "timex_convolve" if direction == "forward" else "timex_filter_gradient"
    return kernel.Request(template.library(name), parameters, arch, also)


def _vector(*arrays: Tensor) -> int:
    """Return how many neighbours [B, C, T] tensors let a thread read at once."""
    return 4 if timex_launches.are_together(4, *arrays) else 1


def backward_requests(w: Tensor, k: Tensor) -> list[kernel.Request]:
    """Return the kernels of a backward whose gradient lies in memory as k does."""
    (batch, _, tokens), device = k.shape, k.device.index
    arch, also = tensors.arch(device), tensors.also(device)
    return requests(batch, tokens, (w.dtype, k.dtype), arch, also, _vector(k))[1:]


def convolve(w: Tensor, k: Tensor, eps: float, is_correlation: bool, beside: Beside | None = None) -> Tensor:
    """Run the kernel of the convolution, or of the correlation that is the gradient of k; compile others beside it."""
    w, k = timex_launches.neighbours(w), timex_launches.neighbours(k)
    out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if out.numel() == 0:
        return out
    vector = _vector(k)

    def prepare() -> Launches:
        (batch, channels, tokens), types, device = k.shape, (w.dtype, k.dtype), k.device.index
        arch, also = tensors.arch(device), tensors.also(device)
        cut = geometry("forward", batch, tokens, types, arch)
        own = _request("forward", batch, tokens, types, arch, also, vector, is_correlation)
        with torch.cuda.device(device):
            found = timex_launches.load([own, *(beside(w, k) if beside else ())], device)
            tensors.validate("w", w)
            tensors.validate("k", k)
            blocks = cut.tiles // _CHUNK if cut.streamed else 1
            constants = [
                *[struct.pack("q", x) for x in (w.stride(0), k.stride(0), k.stride(1), batch, channels)],
                struct.pack("i", tokens), struct.pack("i", cut.tiles), struct.pack("f", eps),
            ]  # fmt: skip
            grid = (channels, -(-batch // cut.batch), blocks)
            plan = Plan(found, "timex_convolve", device, grid, (_THREADS, 1, 1), "QQQ", constants, cut.shared_bytes)
        return Launches((plan,))

    key = ("convolve", is_correlation, eps, vector, beside, tensors.signature((w, k)))
    tensors.launch(timex_launches.known(key, prepare).plans[0], (w.data_ptr(), k.data_ptr(), out.data_ptr()))
    return out


def filter_gradient(g: Tensor, k: Tensor, w_dtype: torch.dtype) -> Tensor:
    """Run the kernels of the gradient of w."""
    g, k = timex_launches.neighbours(g), timex_launches.neighbours(k)
    batch, channels, tokens = k.shape
    gw = torch.zeros if k.numel() == 0 else torch.empty
    found = gw((channels, tokens), dtype=w_dtype, device=k.device)
    if k.numel() == 0:
        return found
    vector = _vector(g, k)

    def prepare() -> Launches:
        device, types = k.device.index, (w_dtype, k.dtype)
        arch, also = tensors.arch(device), tensors.also(device)
        cut = geometry("backward", batch, tokens, types, arch)
        with torch.cuda.device(device):
            made = timex_launches.load([_request("backward", batch, tokens, types, arch, also, vector, False)], device)
            tensors.validate("g", g)
            tensors.validate("k", k)
            groups, blocks = -(-batch // cut.batch), cut.tiles // _CHUNK if cut.streamed else 1
            strides = (g.stride(0), g.stride(1), k.stride(0), k.stride(1))
            sizes = [struct.pack("i", tokens), struct.pack("i", cut.tiles)]
            matrices = Plan(
                made, "timex_filter_gradient", device, (channels, groups, blocks), (_THREADS, 1, 1), "QQQ",
                [*[struct.pack("q", x) for x in (*strides, batch, channels)], *sizes], cut.shared_bytes,
            )  # fmt: skip
            counts = [struct.pack("q", groups), struct.pack("q", channels), *sizes]
            sums = Plan(
                made, "timex_filter_gradient_sum", device, (channels, -(-tokens // _THREADS), 1), (_THREADS, 1, 1),
                "QQ", counts,
            )  # fmt: skip
        return Launches((matrices, sums), groups * channels * cut.tiles * _DIAGONALS)

    known = timex_launches.known(("gradient", w_dtype, vector, tensors.signature((g, k))), prepare)
    scratch = torch.empty(known.scratch, dtype=torch.float32, device=k.device)
    tensors.launch(known.plans[0], (g.data_ptr(), k.data_ptr(), scratch.data_ptr()))
    tensors.launch(known.plans[1], (scratch.data_ptr(), found.data_ptr()))
    return found
