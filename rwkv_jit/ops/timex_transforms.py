"""TimeX by Fourier transforms that a block holds in shared memory, for rows too long for tiles.

`timex_transform.cu` says how. What a filter multiplies spectra by is made first. A gradient of the filter is a sum over
the batch, made in parts where the channels are too few for all blocks.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, timex_launches
from rwkv_jit.ops.timex_launches import Beside, Launches
from rwkv_jit.template import Parameter

# Of transforms, and points of a thread; no shorter one pays, and no block holds a longer one. Lengths between powers of
# two do not pay either: with a first pass of 24 points, 1536 took 0.166 ms where 2048 took 0.138, and 6144 0.87 where
# 8192 took 0.49 (8 rows of 768 channels, float32, H200).
_LENGTHS = {1024: 32, 2048: 16, 4096: 16, 8192: 32, 16384: 32}
_REGISTERS = {1024: 160, 2048: 96, 4096: 80, 8192: 128, 16384: 128}  # of a thread
_GRADIENT_REGISTERS = _REGISTERS | {4096: 128}  # of one that sums spectra: with 80 it has too few
_ALL_REGISTERS = 2**16  # of a multiprocessor
_MOST_BLOCKS = 2**31 - 1  # of a launch
_ROUNDS = 4  # of groups of rows that blocks shall take, so that few of them wait at the end


class _Geometry(NamedTuple):
    """How a transform is cut."""

    length: int
    threads: int
    shared_bytes: int


def length(tokens: int) -> int:
    """Return that of the shortest transform in which nothing comes round; of the longest if there is none.

    A loop, as the compiler of torch 2.6 knows no `next` with a default.
    """
    for each in _LENGTHS:
        if each >= tokens:
            return each
    return max(_LENGTHS)


def _geometry(tokens: int) -> _Geometry:
    found = length(tokens)
    return _Geometry(found, found // _LENGTHS[found], found // 16 * 17 * 8)


def obstacle(tokens: int, arch: str) -> str | None:
    """Return what is in the way of such rows, for a sentence that begins with who they are for."""
    if tokens > max(_LENGTHS):
        return f"takes at most {max(_LENGTHS)} tokens, got {tokens}"
    needed, limit = _geometry(tokens).shared_bytes, chunked.shared_limit(arch)
    return None if needed <= limit else f"needs {needed} bytes of shared memory, {arch} has {limit}"


def request(
    tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str, also: tuple[str, ...] = (), is_paired: bool = True
) -> kernel.Request:
    """Return the kernels, forward and backward, for so many tokens and the dtypes of w and k."""
    cut = _geometry(tokens)
    room = chunked.shared_per_multiprocessor(arch) // (cut.shared_bytes + 1024)
    blocks, of_gradient = (
        min(room, _ALL_REGISTERS // (cut.threads * registers[cut.length]))
        for registers in (_REGISTERS, _GRADIENT_REGISTERS)
    )
    parameters: dict[str, Parameter] = {
        "T_W": tensors.STORAGE[types[0]], "T_IO": tensors.STORAGE[types[1]], "LENGTH": cut.length,
        "NUM_THREADS": cut.threads, "BLOCKS_PER_SM": blocks, "GRADIENT_BLOCKS_PER_SM": of_gradient,
        "SHARED_BYTES": cut.shared_bytes, "PAIRED": is_paired,
    }  # fmt: skip
    return kernel.Request(template.library("timex_transform"), parameters, arch, also)


def backward_requests(w: Tensor, k: Tensor) -> list[kernel.Request]:
    """Return the kernels of a backward whose gradient lies in memory as k does."""
    return [_request_for(w.dtype, k, timex_launches.are_together(2, w, k))]


def _request_for(w_dtype: torch.dtype, k: Tensor, is_paired: bool) -> kernel.Request:
    device = k.device.index
    return request(k.shape[2], (w_dtype, k.dtype), tensors.arch(device), tensors.also(device), is_paired)


def convolve(w: Tensor, k: Tensor, eps: float, is_correlation: bool, beside: Beside | None = None) -> Tensor:
    """Run the kernels of the convolution, or of the correlation that is the gradient of k; compile others beside it."""
    w, k = timex_launches.neighbours(w), timex_launches.neighbours(k)
    out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if out.numel() == 0:
        return out
    is_paired = timex_launches.are_together(2, w, k)

    def prepare() -> Launches:
        (batch, channels, tokens), device = k.shape, k.device.index
        cut = _geometry(tokens)
        if batch * channels > _MOST_BLOCKS:
            raise UnsupportedConfigError(
                f"k: 'transforms' take at most {_MOST_BLOCKS} rows, got {batch * channels}; use 'fft'"
            )
        with torch.cuda.device(device):
            made = timex_launches.load([_request_for(w.dtype, k, is_paired), *(beside(w, k) if beside else ())], device)
            tensors.validate("w", w)
            tensors.validate("k", k)
            block = (cut.threads, 1, 1)
            factors = Plan(
                made, "timex_factors", device, (channels, 1, 1), block, "QQ",
                [struct.pack("q", w.stride(0)), struct.pack("i", tokens)], cut.shared_bytes,
            )  # fmt: skip
            constants = [
                *[struct.pack("q", x) for x in (k.stride(0), k.stride(1))],
                *[struct.pack("i", x) for x in (batch, channels, tokens)],
                struct.pack("f", eps), struct.pack("i", is_correlation),
            ]  # fmt: skip
            grid = (batch * channels, 1, 1)
            rows = Plan(made, "timex_transform", device, grid, block, "QQQ", constants, cut.shared_bytes)
        return Launches((factors, rows), channels * 4 * cut.length)

    key = ("transforms", is_correlation, eps, is_paired, beside, tensors.signature((w, k)))
    known = timex_launches.known(key, prepare)
    factors = torch.empty(known.scratch, dtype=torch.float32, device=k.device)
    tensors.launch(known.plans[0], (w.data_ptr(), factors.data_ptr()))
    tensors.launch(known.plans[1], (k.data_ptr(), factors.data_ptr(), out.data_ptr()))
    return out


def filter_gradient(g: Tensor, k: Tensor, w_dtype: torch.dtype) -> Tensor:
    """Run the kernels of the gradient of w."""
    g, k = timex_launches.neighbours(g), timex_launches.neighbours(k)
    batch, channels, tokens = k.shape
    if k.numel() == 0:
        return torch.zeros((channels, tokens), dtype=w_dtype, device=k.device)
    is_paired = timex_launches.are_together(2, g, k)

    def prepare() -> Launches:
        device, cut = k.device.index, _geometry(tokens)
        with torch.cuda.device(device):
            made = timex_launches.load([_request_for(w_dtype, k, is_paired)], device)
            tensors.validate("g", g)
            tensors.validate("k", k)
            at_once = tensors.multiprocessors(device) * int(made.parameters["GRADIENT_BLOCKS_PER_SM"])
            group_rows = -(-batch // -(-_ROUNDS * at_once // channels))
            groups = -(-batch // group_rows)
            blocks = min(at_once, channels * groups)
            strides = (g.stride(0), g.stride(1), k.stride(0), k.stride(1))
            constants = [
                *[struct.pack("q", x) for x in strides],
                *[struct.pack("i", x) for x in (batch, channels, group_rows, groups, tokens)],
            ]
            grid, block = (blocks, 1, 1), (cut.threads, 1, 1)
            rows = Plan(made, "timex_transform_gradient", device, grid, block, "QQQQ", constants, cut.shared_bytes)
        return Launches((rows,), blocks * 6 * cut.length, groups)

    known = timex_launches.known(("gradient by transforms", w_dtype, is_paired, tensors.signature((g, k))), prepare)
    sums = torch.empty((known.groups, channels, tokens), dtype=torch.float32, device=k.device)
    scratch = torch.empty(known.scratch, dtype=torch.float32, device=k.device)
    tensors.launch(known.plans[0], [x.data_ptr() for x in (g, k, scratch, sums)])
    return (sums[0] if known.groups == 1 else sums.sum(0)).to(w_dtype)
