"""Training over ranks: each has what one rank would have, a run goes on to the bit, and a rank that fails ends all."""

import os
import shlex
import subprocess
import sys
import time

import pytest
import warm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks meet by gloo")
SECONDS = 300  # of a group of ranks; they take a tenth of it on two cores


PYTHON = warm.python("torch", "torch._dynamo")


def start(*command, **options):
    command = [*PYTHON, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, ["of_layers", "of_derived", "bad_input", "of_copies", "of_shards", "of_small_shards", "of_heads",
             "of_families", "of_parts", "resumes_copies", "resumes_shards", "resumes_parts"]),
        (4, ["of_heads", "of_heads_and_shards", "of_parts", "resumes_heads_and_shards"]),
        pytest.param(4, ["resumes_parts"], marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_ranks_have_what_one_has(world, cases, root):
    done = start(root / "tests" / "ranks.py", "cpu", "float64", world, *cases)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == cases, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


FAILING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("the second rank has no data")
dist.all_reduce(torch.ones(3))  # waits for the other one
print("never")
"""


def test_a_rank_that_fails_ends_the_others_with_its_message(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    started = time.monotonic()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    python.chmod(0o755)
    ranks = {"env": os.environ | {"PYTHON_EXEC": str(python)}}
    done = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, **ranks)
    assert done.returncode != 0
    assert "ValueError: the second rank has no data" in done.stderr
    assert "never" not in done.stdout
    assert time.monotonic() - started < SECONDS
