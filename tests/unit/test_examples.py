"""The examples: their help, what they say without their extra, and the pictures that they save."""

import os
import re
import runpy
import subprocess
import sys
import types

import pytest
import torch


@pytest.fixture
def example(root, monkeypatch):
    """Runs an example as a program, on the CPU; returns what it exits with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(root / "examples"))  # as for a program that is run from there

    def example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            runpy.run_path(str(root / "examples" / f"{name}.py"), run_name="__main__")
        except SystemExit as ended:
            return ended.code
        return None

    return example


@pytest.mark.parametrize(
    "name",
    [
        "wkv4",
        "wkv6_forward",
        "wkv7_forward",
        "timex",
        "own_kernel",
        "unusual_head_sizes",
        "train_lm",
        "serve",
        "run_rwkv_pip",
        "fla_layer",
        "state_tuning",
    ],
)
def test_help_runs_nothing(name, example, monkeypatch, capsys, root):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it ran"))
    assert example(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
    assert (root / "examples" / f"{name}.py").is_file()


@pytest.mark.parametrize(
    ("name", "missing", "arguments", "said"),
    [
        ("train_lm", "tqdm", [], "this example needs tqdm: pip install matplotlib tqdm"),
        ("unusual_head_sizes", "tqdm", [], "this example needs tqdm: pip install matplotlib tqdm"),
        ("unusual_head_sizes", "matplotlib", [], "this example needs matplotlib: pip install matplotlib tqdm"),
        ("timex", "matplotlib.figure", ["--plot", "x.png"], "--plot needs matplotlib: pip install matplotlib tqdm"),
    ],
)
def test_what_is_missing_is_named_with_a_command(name, missing, arguments, said, example, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert example(name, *arguments) == said


def test_pictures_are_saved_where_they_are_asked_for(example, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    assert example("timex", "--steps", 1, "--plot", tmp_path / "filters.png") is None
    small = ("--cpu", "--steps", 2, "--batch", 1, "--length", 8, "--width", 16, "--layers", 1, "--head-size", 8)
    assert example("train_lm", *small, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    for name, what in (("filters.png", "filters"), ("loss.png", "loss curve")):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"{what}: {tmp_path / name}\n" in printed


def test_the_trainer_reads_every_window_once_an_epoch(root, tmp_path):
    numpy, names = pytest.importorskip("numpy"), runpy.run_path(str(root / "examples" / "train_lm.py"))
    tokens = numpy.arange(70_000, 70_107, dtype="uint32")
    numpy.save(tmp_path / "tokens.npy", tokens)
    tokens.astype("uint16").tofile(tmp_path / "tokens.bin")
    options = types.SimpleNamespace(vocabulary=80_000, bin_dtype="uint16", length=8)
    for name, want in (("tokens.npy", tokens), ("tokens.bin", tokens.astype("uint16"))):
        options.data = tmp_path / name
        learned, held_back, vocabulary = names["load"](options)
        assert [*learned, *held_back] == [*want]
        assert (len(held_back), vocabulary) == (11, 80_000)
    windows = 11  # of 96 tokens: 8 each, and one more to predict
    inputs, targets = names["rows"](tokens[:96], 8, 0, windows, "cpu")
    assert sorted(inputs.flatten().tolist()) == list(range(70_000, 70_000 + 8 * windows))
    assert torch.equal(targets, inputs + 1)
    again, _ = names["rows"](tokens[:96], 8, windows, windows, "cpu")
    assert not torch.equal(again, inputs)  # the next epoch has an order of its own
    assert torch.equal(again.flatten().sort().values, inputs.flatten().sort().values)
    some, _ = names["rows"](tokens[:96], 8, 3, 10, "cpu")  # over the end of the epoch
    assert torch.equal(some, torch.cat([inputs, again])[3:13])
    options.length = 11
    with pytest.raises(SystemExit, match="^--data has 107 tokens: more than 110 are needed for --length$"):
        names["load"](options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", 3, "--accumulate", 2], "--batch 3 is no multiple of 2 passes of 1 ranks"),
        (["--tp", 2], "1 ranks are no multiple of --tp 2 times --cp 1"),
        (["--dp", "--fsdp"], 2),  # an error of the parser, as the next
        (["--length", 9, "--cp", 2], 2),
    ],
)
def test_what_the_trainer_cannot_do(options, said, example):
    pytest.importorskip("tqdm")
    try:
        assert example("train_lm", "--cpu", *options) == said
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_learned_states_write_a_word_that_was_never_read(example, capsys):
    assert example("state_tuning", "--quick", "--word", "mouse") is None
    _, _, gradients, first, *_, last = capsys.readouterr().out.splitlines()
    assert float(gradients.split()[6]) < 1e-4
    assert "mouse" not in first
    assert last.endswith("'mouse mouse mouse mouse '")


def test_programs_of_others_run_on_these_kernels(root, tmp_path):
    """In processes of their own, as both put something into other modules."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(root)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    for name, wanted in (
        ("run_rwkv_pip", r"tokens: \d+ ms, then [\d.]+; \d+ tokens a second"),
        ("fla_layer", r"RWKV7Attention: rwkv_jit 5"),
    ):
        command = [sys.executable, "-W", "ignore", str(root / "examples" / f"{name}.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert re.search(wanted, done.stdout), done.stdout
