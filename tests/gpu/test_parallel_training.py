"""Training over two GPUs by NCCL: each rank has what one GPU would have. It needs two of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.parametrize("op", ["nn"]),  # the section of the record
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS = Path(__file__).resolve().parents[1] / "ranks.py"
SECONDS = 580  # of a group of ranks, which may compile their kernels first


def check(dtype, *cases):
    command = [sys.executable, str(RANKS), "cuda", dtype, "2", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == [*cases], done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


def test_ops_of_layers_and_bad_input(op):
    check("float32", "of_layers", "of_derived", "bad_input")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_have_what_one_has(op, dtype):
    check(dtype, "of_copies", "of_shards", "of_small_shards", "of_heads", "of_parts")


def test_other_families(op):
    check("float32", "of_families")


def test_the_example_goes_on_to_the_bit(op):
    check("float32", "resumes_copies", "resumes_shards", "resumes_parts")
