"""One sequence over two GPUs: parts agree with the whole."""

import groups
import pytest
import shared_sequences
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def check_parts(rank, size):
    for name in shared_sequences.NAMES:
        for bounds, lengths in shared_sequences.LAYOUTS[2]:
            for scale in (24 * 64, 24 * 10):  # parts of chunks, whose kernels pause, and others
                shared_sequences.check(rank, size, name, bounds, lengths, torch.bfloat16, (64, 64), 1e-2, scale)


def check_family(rank, size):
    for name, how in shared_sequences.FAMILY:  # of float32, as sums over all tokens lose digits that 16 bits have not
        for bounds, lengths in shared_sequences.LAYOUTS[2]:
            shared_sequences.check(rank, size, name, bounds, lengths, torch.float32, (64, 64), 1e-3, 24 * 10, how)


def check_shift(rank, size):
    for bounds, lengths in shared_sequences.LAYOUTS[2]:
        shared_sequences.check_shift(rank, size, bounds, lengths, torch.bfloat16)
        for width in (2, 4, 8):
            shared_sequences.check_convolution(rank, size, bounds, lengths, width, "silu", torch.float32, 1e-4)


@pytest.mark.parametrize("check", [check_parts, check_family, check_shift])
@pytest.mark.parametrize("op", ["parallel"])
def test_parts_are_the_whole(op, check):
    groups.run(check, 2)
