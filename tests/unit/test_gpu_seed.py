"""Random inputs of the GPU tier: a run draws a seed and says it, and with that seed each test draws the same again."""

import os
import re
import shutil
import subprocess

import pytest
import warm

MADE_UP = """
import random

import numpy
import pytest
import torch


@pytest.mark.parametrize("number", range(4))
def test_fails(number):
    assert False, f"number {number} drew {random.random()} {numpy.random.rand()} {torch.rand(()).item()}"


def test_passes():
    pass


@pytest.fixture
def broken():
    raise ValueError(f"setup drew {random.random()} {numpy.random.rand()} {torch.rand(()).item()}")


def test_never_starts(broken):
    pass
"""
NAMES = {"setup", *(f"number {number}" for number in range(4))}


@pytest.fixture
def run_made_up(root, tmp_path):
    """Runs tests that fail under the conftest.py of this tier; returns the seed, and by test what was drawn."""
    gpu = tmp_path / "gpu"
    gpu.mkdir()
    for name in ("conftest.py", "images.py", "ledger.py", "warm.py"):
        shutil.copy(root / "tests" / name, tmp_path)
    for name in ("conftest.py", "record.py"):
        shutil.copy(root / "tests" / "gpu" / name, gpu)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\npython_files = made_up.py\n")
    (gpu / "made_up.py").write_text(MADE_UP)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def run_made_up(*arguments, failures=5):
        # pytest imports hypothesis to report on it, which takes as long as some of these runs.
        without = [option for plugin in ("cacheprovider", "hypothesispytest") for option in ("-p", f"no:{plugin}")]
        command = [*warm.python("torch"), "-m", "pytest", "--tb=short", *without, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1, done.stdout + done.stderr
        (seed,) = re.findall(r"^tests/gpu: random inputs of --seed (\d+)$", done.stdout, flags=re.MULTILINE)
        assert re.findall(r"^rerun with --seed (\d+)$", done.stdout, flags=re.MULTILINE) == [seed] * failures
        drawn = dict(re.findall(r"^E .*?((?:number \d|setup)) drew (.*)$", done.stdout, flags=re.MULTILINE))
        assert len(drawn) == failures
        for numbers in zip(*(text.split() for text in drawn.values()), strict=True):  # of one generator
            assert len(set(numbers)) == failures  # no two tests have the same inputs
        return seed, drawn

    return run_made_up


def test_failures_say_the_seed_that_repeats_their_inputs_and_runs_without_one_differ(run_made_up):
    seed, drawn = run_made_up()
    assert drawn.keys() == NAMES
    again, alone = run_made_up("gpu/made_up.py::test_fails[2]", "--seed", seed, failures=1)
    assert again == seed
    assert alone == {"number 2": drawn["number 2"]}
    other, others = run_made_up("-k", "never", failures=1)  # without a seed
    assert other != seed
    assert not set(others["setup"].split()) & set(drawn["setup"].split())


def test_workers_have_the_seed_of_the_run(run_made_up):
    seed, drawn = run_made_up("-n", "2")
    assert drawn.keys() == NAMES
    again, alone = run_made_up("--seed", seed)  # one process, which has all of them
    assert again == seed
    assert alone == drawn
