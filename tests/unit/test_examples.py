"""The examples: their help, what they say without their extra, and the pictures that they save."""

import functools
import io
import json
import os
import pickle
import re
import runpy
import shlex
import subprocess
import sys
import types

import pytest
import torch
import warm

from rwkv_jit.nn import RWKV7


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
        "sample",
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
        ("serve", "uvicorn", ["--http", "0"], "--http needs uvicorn: pip install starlette uvicorn"),
        ("serve", "starlette", ["--http", "0"], "--http needs starlette: pip install starlette uvicorn"),
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


TINY = ("--cpu", "--steps", 2, "--batch", 1, "--length", 8, "--width", 16, "--layers", 1, "--head-size", 8)


@pytest.fixture
def trained(example, tmp_path, capsys):
    """A folder of the trainer, and what it printed; starts it again with `again`."""
    pytest.importorskip("tqdm")

    def train(*more):
        try:
            ended = example("train_lm", *TINY, "--out", tmp_path / "run", *more)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return ended, capsys.readouterr().out

    ended, printed = train()
    assert ended == 0
    return types.SimpleNamespace(folder=tmp_path / "run", printed=printed, again=train)


def test_what_the_trainer_made_is_sampled_and_served_by_the_commands_that_it_prints(trained):
    commands = re.findall("^(sample|serve): python (.*)$", trained.printed, re.MULTILINE)
    assert [what for what, _ in commands] == ["sample", "serve"]
    more = {
        "sample": ["--tokens", "9", "--temperature", "0", "--prompt", "The cat"],
        "serve": ["--requests", "2", "--rate", "inf", "--new-tokens", "4", "--json"],
    }
    said = {}
    for what, command in commands:
        whole = [*warm.python("torch"), *shlex.split(command), *more[what]]
        said[what] = subprocess.run(whole, capture_output=True, text=True, check=True, timeout=300).stdout
    model = RWKV7.from_checkpoint(trained.folder / "model.pth")
    written = model.generate(torch.tensor([list(b"The cat")]), 9, temperature=0)[0].tolist()
    text = bytes(written).decode(errors="replace")
    assert said["sample"] == f"The cat{''.join(x if x.isprintable() or x == chr(10) else '·' for x in text)}\n"
    assert json.loads(said["serve"])["finished"] == 2


@pytest.mark.parametrize(("accumulate", "compiled"), [(1, "--compile --dp"), (2, "--compile")])
def test_steps_that_are_graphed_or_compiled_are_those_that_are_not(
    accumulate, compiled, example, tmp_path, monkeypatch
):
    pytest.importorskip("tqdm")
    graphs, run = [], torch._dynamo.lookup_backend("aot_eager")
    compiler = functools.partial(torch.compile, backend=lambda graph, x: (graphs.append(graph), run(graph, x))[1])
    monkeypatch.setattr(torch, "compile", compiler)
    small = (*TINY, "--batch", 2, "--steps", 4, "--log-every", 1, "--accumulate", accumulate)
    said = {}
    for how in ("--graph=off", "--graph=on", compiled):
        torch._dynamo.reset()
        graphs.clear()
        try:
            assert example("train_lm", *small, *how.split(), "--out", tmp_path / how) == 0
        finally:
            torch.distributed.destroy_process_group() if torch.distributed.is_initialized() else None
        lines = [json.loads(line) for line in (tmp_path / how / "log.jsonl").read_text().splitlines()]
        said[how] = [(x.get("loss", 0), x.get("gradient_norm", 0), x.get("held_back", 0)) for x in lines]
        torch.testing.assert_close(torch.tensor(said[how]), torch.tensor(said["--graph=off"]), rtol=1e-4, atol=1e-4)
        assert bool(graphs) == ("compile" in how)
        assert all(sum("wkv7" in str(x.target) for x in graph.graph.nodes) == 1 for graph in graphs)  # of the layer
    assert len({x for x, *_ in said["--graph=off"]}) == 5


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("is_all", [True, False], ids=["all", "a part"])
def test_planted_metadata_of_a_checkpoint_run_nothing(is_all, trained, tmp_path):
    path, planted = trained.folder / "checkpoints" / "2" / ".metadata", Planted(tmp_path / "ran")
    held = pickle.loads(path.read_bytes())
    held.planner_data = {"step": planted}
    path.write_bytes(pickle.dumps(planted if is_all else held))
    ended, _ = trained.again()
    assert re.search(r"checkpoints/2 is no checkpoint of this program, and is not read: it names \w+\.mkdir$", ended)
    assert not (tmp_path / "ran").exists()


def test_planted_data_of_a_checkpoint_run_nothing(root, tmp_path):
    names, item = runpy.run_path(str(root / "examples" / "train_lm.py")), types.SimpleNamespace()
    item.storage_index = item.dest_index = types.SimpleNamespace(fqn="step")
    for held in (Planted(tmp_path / "ran"), 7):
        data = io.BytesIO()
        torch.save(held, data)
        data.seek(0)
        planner = names["Planner"](flatten_state_dict=False)
        planner.state_dict = {}
        if held == 7:
            planner.load_bytes(item, data)
            assert planner.state_dict == {"step": 7}
        else:
            with pytest.raises(ValueError, match="^step holds more than numbers and tensors$"):
                planner.load_bytes(item, data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["os.system", "FileSystemWriter", "os", "Any"])
def test_metadata_name_only_what_describes_tensors(name, root):
    unpickler = runpy.run_path(str(root / "examples" / "train_lm.py"))["Metadata"](io.BytesIO())
    with pytest.raises(pickle.UnpicklingError, match=f"it names torch.distributed.checkpoint.filesystem.{name}"):
        unpickler.find_class("torch.distributed.checkpoint.filesystem", name)
    assert unpickler.find_class("torch", "float32") is torch.float32


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


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--lr", "-1", "expected more than 0, got -1"),
        ("--lr", "nan", "expected more than 0, got nan"),
        ("--steps", "0", "expected at least 1, got 0"),
        ("--batch", "0", "expected at least 1, got 0"),
        ("--layers", "0", "expected at least 1, got 0"),
        ("--head-size", "0", "expected at least 1, got 0"),
        ("--warmup", "-1", "expected at least 0, got -1"),
        ("--width", "100", "--width 100 is no multiple of --head-size 64"),
    ],
)
def test_the_trainer_refuses_such_numbers(option, value, said, example, capsys):
    pytest.importorskip("tqdm")
    assert example("train_lm", "--cpu", option, value) == 2
    assert capsys.readouterr().err.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("floats.npy", "floats.npy: expected integers in a row, got float64 of shape (500,)"),
        ("table.npy", "table.npy: expected integers in a row, got int32 of shape (250, 2)"),
        ("large.npy", "tokens of --data: expected 0 to 99, got up to 499 (--vocabulary sets the limit)"),
        ("negative.npy", "tokens of --data: expected 0 to 99, got -1 to 98 (--vocabulary sets the limit)"),
        ("damaged.npy", "damaged.npy is not an intact .npy: "),
        ("odd.bin", "odd.bin is not a .bin of uint16 tokens: "),
        ("missing.npy", "No such file or directory"),
        ("folder", "Is a directory"),
    ],
)
def test_the_trainer_says_in_a_line_why_data_are_no_tokens(name, said, root, tmp_path):
    numpy, load = pytest.importorskip("numpy"), runpy.run_path(str(root / "examples" / "train_lm.py"))["load"]
    numbers = numpy.arange(500)
    given = {"floats": numbers / 500, "table": numpy.zeros((250, 2), "int32"), "large": numbers}
    for stem, tokens in (given | {"negative": numbers % 100 - 1}).items():
        numpy.save(tmp_path / f"{stem}.npy", tokens)
    (tmp_path / "damaged.npy").write_bytes((tmp_path / "large.npy").read_bytes()[:200])
    (tmp_path / "odd.bin").write_bytes(bytes(1001))
    (tmp_path / "folder").mkdir()
    options = types.SimpleNamespace(data=tmp_path / name, vocabulary=100, bin_dtype="uint16", length=8)
    with pytest.raises((OSError, ValueError)) as raised:
        load(options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    numpy.save(tmp_path / "right.npy", numbers % 100)  # of 64 bits
    options.data = tmp_path / "right.npy"
    assert load(options)[2] == 100


def test_the_trainer_says_what_is_wrong_with_a_folder(trained, tmp_path):
    assert "is already at step 2: --steps 2 trains no further\n" in trained.again()[1]
    checkpoint = trained.folder / "checkpoints" / "2"
    for option, said in (("--width", "Size mismatch"), ("--layers", "Missing key")):
        ended, _ = trained.again(option, 32 if option == "--width" else 2)
        assert ended.startswith(f"{checkpoint} is damaged or of another model: {said}")
        assert "\n" not in ended
    (part,) = checkpoint.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:300])
    assert trained.again()[0].startswith(f"{checkpoint} is damaged or of another model: ")
    (tmp_path / "file").touch()
    assert "File exists" in trained.again("--out", tmp_path / "file")[0]


def test_learned_states_lower_the_loss(root, monkeypatch, capsys):
    """Of a model that has learned for two steps, and of texts of two chunks."""
    names = runpy.run_path(str(root / "examples" / "state_tuning.py"))
    two_steps = {"train": lambda model, steps, device: names["train"](model, 2, device)}
    names["main"].__globals__.update(two_steps, TOKENS=2 * names["CHUNK"])
    monkeypatch.setattr(sys, "argv", ["state_tuning.py", "--quick"])
    names["main"]()
    _, _, gradients, first, *_, last = capsys.readouterr().out.splitlines()
    assert float(gradients.split()[6]) < 1e-4
    assert float(last.split()[3].strip(",")) < float(first.split()[3].strip(","))


@pytest.mark.full
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
        command = [*warm.python("torch"), "-W", "ignore", str(root / "examples" / f"{name}.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert re.search(wanted, done.stdout), done.stdout
