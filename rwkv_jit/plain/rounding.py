"""Rounding at random, bit for bit as the kernels do it.

Source of the generator: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

OF_ONE_DRAW = 8  # elements for which the 16 bytes of a draw last
_WORD = 2**32 - 1


def _products(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of products of 32 bits, in int64: in parts, as they have 64 without sign."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    middle = (low >> 16) + (high & 0xFFFF)
    return (high >> 16) + (middle >> 16), (middle << 16 & _WORD) | (low & 0xFFFF)


def philox(counters: Tensor, seed: int) -> Tensor:
    """Return four words of 32 bits for each counter, int64 [*, 4]: Philox 4x32 with 10 rounds."""
    x, y = counters & _WORD, counters >> 32 & _WORD
    z, t = torch.zeros_like(x), torch.zeros_like(x)
    key, other_key = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        high, low = _products(x, 0xD2511F53)
        other_high, other_low = _products(z, 0xCD9E8D57)
        x, y, z, t = other_high ^ y ^ key, other_low, high ^ t ^ other_key, low
        key, other_key = key + 0x9E3779B9 & _WORD, other_key + 0xBB67AE85 & _WORD
    return torch.stack((x, y, z, t), -1)


def random_bits(slots: Tensor, heads: int, size: int, seed: int) -> Tensor:
    """Return 16 bits at random for each of the `size` elements of the heads of these slots: int64 [N, H, size]."""
    draws = -(-size // OF_ONE_DRAW)
    first = (slots.to(torch.int64)[:, None] * heads + torch.arange(heads, device=slots.device)) * draws
    words = philox(first[..., None] + torch.arange(draws, device=slots.device), seed)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.flatten(-3)[..., :size]


def round_at_random(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Return float32 numbers as those of 16 bits on either side, the nearer one more often, by 16 bits at random."""
    is_bf16 = dtype == torch.bfloat16
    mask = 0xFFFF if is_bf16 else 0x1FFF
    whole = x.contiguous().view(torch.int32).to(torch.int64) & _WORD
    size = whole & 0x7FFFFFFF
    near = ((whole + (bits & mask)) & ~mask & _WORD).to(torch.uint32).view(torch.float32)
    if not is_bf16:  # below 2^-14 the neighbours are multiples of 2^-24
        steps = torch.floor(x.abs() * 2.0**24 + bits.to(torch.float32) * 2.0**-16)
        near = torch.where(size < 0x38800000, torch.copysign(steps * 2.0**-24, x), near)
    is_last = size >= (0x7F7F0000 if is_bf16 else 0x477FE000)  # what is not finite, or may leave the range
    return torch.where(is_last, x, near).to(dtype)
