"""TimeX by Fourier transforms in shared memory: a form that `rwkv-jit bench --op timex --history` compares.

Up to 16384 tokens, whose transforms a block holds; `timex_transform_history.cu` says how. What the filters multiply
spectra by is made first. A gradient of the filter is a sum over the batch, made in parts where the channels are too few
blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked
from rwkv_jit.template import Parameter

# Of transforms, and points of a thread; no shorter one pays, and no block holds a longer one.
_LENGTHS = {768: 24, 1024: 32, 1536: 24, 2048: 16, 3072: 24, 4096: 16, 6144: 24, 8192: 32, 12288: 24, 16384: 32}
_REGISTERS = 2**16  # of a multiprocessor
_MOST_ROWS = 2**16 - 1  # blocks in y


def request(
    tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str, also: tuple[str, ...] = ()
) -> kernel.Request:
    """Return the kernels for so many tokens and the dtypes of w and k.

    Raises
    ------
    UnsupportedConfigError
        No block holds such a transform, by its length or on this architecture.
    """
    length = next((length for length in _LENGTHS if length >= tokens), None)
    if length is None:
        raise UnsupportedConfigError(f"takes at most {max(_LENGTHS)} tokens, got {tokens}")
    threads, shared_bytes = length // _LENGTHS[length], length // 16 * 17 * 8
    if shared_bytes > chunked.shared_limit(arch):
        limit = chunked.shared_limit(arch)
        raise UnsupportedConfigError(f"needs {shared_bytes} bytes of shared memory, {arch} has {limit}")
    registers = {16: 96, 24: 128, 32: 128 if threads > 32 else 160}[_LENGTHS[length]]
    room = chunked.shared_per_multiprocessor(arch) // (shared_bytes + 1024)
    parameters: dict[str, Parameter] = {
        "T_W": tensors.STORAGE[types[0]], "T_IO": tensors.STORAGE[types[1]], "LENGTH": length,
        "NUM_THREADS": threads, "BLOCKS_PER_SM": min(_REGISTERS // (threads * registers), room),
        "SHARED_BYTES": shared_bytes,
    }  # fmt: skip
    return kernel.Request(template.library("timex_transform_history"), parameters, arch, also)


class Transforms:
    """The launches for a w [C, T] and rows like k [B, C, T], all contiguous."""

    def __init__(self, w: Tensor, k: Tensor):
        (batch, channels, tokens), device = k.shape, k.device.index
        if batch > _MOST_ROWS:
            raise UnsupportedConfigError(f"takes at most {_MOST_ROWS} rows of a channel, got {batch}")
        made = request(tokens, (w.dtype, k.dtype), tensors.arch(device), tensors.also(device))
        self.kernel = kernel.get(made)
        of = made.parameters
        group_rows = -(-batch // min(-(-2 * tensors.multiprocessors(device) // channels), batch))
        groups = -(-batch // group_rows)
        self._factors = (channels, 2, int(of["LENGTH"]), 2)
        self._sums = (groups, channels, tokens)

        def plan(entry: str, blocks: int, arrays: int, constants: Sequence[bytes]) -> Plan:
            grid, block = (channels, blocks, 1), (int(of["NUM_THREADS"]), 1, 1)
            return Plan(self.kernel, entry, device, grid, block, "Q" * arrays, constants, int(of["SHARED_BYTES"]))

        def counts(*numbers: int) -> list[bytes]:
            return [struct.pack("q", number) for number in numbers]

        strides, length = (channels * tokens, tokens), struct.pack("i", tokens)
        self._of_filter = plan("timex_factors", 1, 2, [*counts(tokens), length])
        self._forward, self._backward = (
            plan(
                "timex_transform", batch, 3,
                [*counts(*strides, channels), length, struct.pack("f", 0.0), struct.pack("i", conjugates)],
            )
            for conjugates in (False, True)
        )  # fmt: skip
        sizes = counts(*strides, *strides, batch, channels, group_rows)
        self._gradient = plan("timex_transform_gradient", groups, 4, [*sizes, length])

    def forward(self, w: Tensor, k: Tensor) -> Tensor:
        """Return the convolution of k."""
        return self._convolve(self._forward, w, k)

    def gradients(self, g: Tensor, w: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of w and k, from that of the result."""
        sums = torch.empty(self._sums, dtype=torch.float32, device=k.device)
        own = torch.empty((self._sums[0], *self._factors), dtype=torch.float32, device=k.device)
        tensors.launch(self._gradient, [x.data_ptr() for x in (g, k, own, sums)])
        return sums.sum(0).to(w.dtype), self._convolve(self._backward, w, g)

    def _convolve(self, plan: Plan, w: Tensor, k: Tensor) -> Tensor:
        factors = torch.empty(self._factors, dtype=torch.float32, device=k.device)
        out = torch.empty_like(k)
        tensors.launch(self._of_filter, [w.data_ptr(), factors.data_ptr()])
        tensors.launch(plan, [x.data_ptr() for x in (k, factors, out)])
        return out
