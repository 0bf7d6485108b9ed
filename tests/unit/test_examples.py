"""The examples: their help, what they say without their extra, and the pictures that they save."""

import runpy
import sys

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
    ["wkv4", "wkv6_forward", "wkv7_forward", "timex", "own_kernel", "unusual_head_sizes", "train_lm", "serve"],
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
