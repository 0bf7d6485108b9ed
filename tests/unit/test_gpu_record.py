"""The record of the last GPU run covers the kernels and launchers as they are now."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

_path = Path(__file__).resolve().parents[1] / "gpu" / "record.py"
_spec = importlib.util.spec_from_file_location("gpu_record", _path)
record = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(record)


@pytest.mark.parametrize("op", record.OPS)
def test_the_record_is_of_these_sources(op):
    section = json.loads(record.RECORD.read_text(encoding="utf-8"))["ops"].get(op)
    owed = json.loads(record.OWED.read_text(encoding="utf-8"))
    if op in owed:  # nothing is said of it; a run with failures may stand there until these are mended
        return
    # Else: `pytest tests/gpu --record` on a GPU, or list the op in owed.json.
    assert section is not None
    assert "due" not in section
    assert section["passed"] > 0
    assert section["digest"] == record.digest(op)


def test_totals_are_the_sums_of_the_sections():
    written = json.loads(record.RECORD.read_text(encoding="utf-8"))
    for name in ("passed", "skipped"):
        assert written[name] == sum(section[name] for section in written["ops"].values())


def copy_sources(copy):
    templates = [
        f"kernel_templates/{name}"
        for name in ("shared", "recurrent", "delta", "diagonal", "wkv4", "timex", "inference", "layers", "derived")
    ]
    for folder in (
        *templates,
        *(
            f"rwkv_jit/{room}"
            for room in ("call", "kernels", "layers", "nn", "ops", "parallel", "pool", "plain", "schedules")
        ),
    ):
        (copy / folder).mkdir(parents=True)
        for path in (record.ROOT / folder).iterdir():
            if path.is_file():
                (copy / folder / path.name).write_bytes(path.read_bytes())


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """Those of an unchanged copy."""
    copy = tmp_path_factory.mktemp("unchanged")
    copy_sources(copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "ROOT", copy)
        return {op: record.digest(op) for op in record.OPS}


@pytest.fixture
def copied_sources(tmp_path, monkeypatch):
    copy_sources(tmp_path)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    return tmp_path


def _edit(path, change):
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def test_comments_and_docstrings_leave_the_digest(copied_sources):
    before = record.digest("wkv7")
    for path, change in (
        ("kernel_templates/recurrent/wkv7_recurrent_forward.cu", lambda text: "// new words\n\n" + text),
        ("kernel_templates/recurrent/tile.cuh", lambda text: text.replace("    ", "  ") + "/* more\n words */"),
        ("rwkv_jit/schedules/recurrent.py", lambda text: text.replace('"""The recurrent', '"""Other: the recurrent')),
        ("rwkv_jit/plain/reference.py", lambda text: text + "\nEXTRA = 1\n"),
    ):
        _edit(copied_sources / path, change)
    assert record.digest("wkv7") == before


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("kernel_templates/recurrent/wkv7_recurrent_backward.cu", "e[i][c] += dy_t[i]", "e[i][c] -= dy_t[i]"),
        ("kernel_templates/shared/types.cuh", "return expf(w);", "return expf(w) + 1.0f;"),
        ("kernel_templates/recurrent/column_sums.cuh", "int group = 0", "int group = 1"),
        ("kernel_templates/shared/span.cuh", "span.begin / interval", "span.begin % interval"),
        ("kernel_templates/shared/row_sums.cuh", "next = sum.at[i] + term", "next = sum.at[i] - term"),
        ("rwkv_jit/schedules/recurrent.py", "SHARED_LIMIT = 48", "SHARED_LIMIT = 47"),
        ("rwkv_jit/schedules/common.py", "LARGEST_HEAD = 128", "LARGEST_HEAD = 64"),
        ("rwkv_jit/call/plan.py", "values.append(made.data_ptr())", "values.append(0)"),
        ("rwkv_jit/ops/wkv7.py", "output_final_state: bool = False", "output_final_state: bool = True"),
    ],
)
def test_any_other_change_is_seen(copied_sources, path, old, new):
    before = record.digest("wkv7")
    assert old in (copied_sources / path).read_text(encoding="utf-8")
    _edit(copied_sources / path, lambda text: text.replace(old, new, 1))
    assert record.digest("wkv7") != before


@pytest.mark.parametrize(
    ("path", "ops"),
    [
        ("kernel_templates/recurrent/wkv7_recurrent_forward.cu", {"wkv7", "inference", "parallel"}),
        ("kernel_templates/recurrent/gla_recurrent_backward.cu", {op for op, x in record.STEMS.items() if "gla" in x}),
        ("kernel_templates/inference/arrange_sequences.cu", {"inference"}),
        ("kernel_templates/inference/update.cuh", {*record.OPS} - {"wkv4", "timex"}),
        ("kernel_templates/layers/layer_heads.cuh", {"layers", "nn"}),
        ("kernel_templates/layers/layer_products.cu", {"nn"}),
        ("rwkv_jit/schedules/layers.py", {"layers", "nn"}),
        ("rwkv_jit/schedules/products.py", {"nn"}),
        ("rwkv_jit/layers/products.py", {"nn"}),
        ("rwkv_jit/nn/rwkv7.py", {"nn"}),
        ("rwkv_jit/ops/delta.py", {"layers", "nn"}),
        ("rwkv_jit/parallel/shards.py", {"parallel"}),
        ("rwkv_jit/pool/arguments.py", {"wkv4", "inference", "layers", "nn"}),
        ("kernel_templates/wkv4/wkv4_update.cu", {"wkv4"}),
        ("rwkv_jit/pool/wkv4.py", {"wkv4", "inference"}),
        ("rwkv_jit/schedules/wkv4.py", {"wkv4"}),
        ("rwkv_jit/ops/wkv5.py", {"wkv5"}),
        ("rwkv_jit/schedules/timex_tiles.py", {"timex"}),
    ],
)
def test_ops_are_stale_by_what_is_theirs_alone(path, ops, digests, copied_sources):
    more = "\nEXTRA = 1\n" if path.endswith(".py") else "\nconstexpr int EXTRA = 1;\n"
    _edit(copied_sources / path, lambda text: text + more)
    assert {op for op in record.OPS if record.digest(op) != digests[op]} == ops


def test_every_op_is_covered():
    from rwkv_jit.schedules.table import OPS

    stems = {name: (op.stem,) for name, op in OPS.items()}
    assert stems | {"inference": ("gla", "wkv7"), "layers": (), "nn": (), "parallel": ("gla", "wkv7")} == record.STEMS


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("kernel_templates/inference/replay.cuh", "past + TOKENS > kept", "past + TOKENS >= kept"),
        ("rwkv_jit/schedules/varlen.py", "_THREADS = 128", "_THREADS = 64"),
        ("rwkv_jit/call/plan.py", "values.append(made.data_ptr())", "values.append(0)"),
    ],
)
def test_a_change_of_inference_is_seen_there_and_by_no_op(copied_sources, path, old, new):
    before, of_op = record.digest("inference"), record.digest("wkv7")
    assert old in (copied_sources / path).read_text(encoding="utf-8")
    _edit(copied_sources / path, lambda text: text.replace(old, new, 1))
    assert record.digest("inference") != before
    assert (record.digest("wkv7") != of_op) == (path == "rwkv_jit/call/plan.py")


def test_a_section_counts_outcomes_and_names_what_is_due():
    outcomes = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"}
    first = record.section("x", outcomes, {*"abcde"}, None)
    assert first == {"passed": 2, "skipped": 1, "digest": "x", "due": ["b", "e"]}
    whole = record.section("x", {"a": "passed"}, {"a"}, None)
    assert whole == {"passed": 1, "skipped": 0, "digest": "x"}


def test_what_the_record_lacks_is_due():
    whole, broken = ({"digest": "x", **more} for more in ({}, {"due": ["b"]}))
    assert [record.is_due(name, "x", whole) for name in "ab"] == [False, False]
    assert [record.is_due(name, "x", broken) for name in "ab"] == [False, True]
    assert record.is_due("a", "y", broken)
    assert record.is_due("a", "x", None)


def test_runs_of_the_same_sources_add_up():
    tests = {*"abcd"}
    first = record.section("x", {"a": "passed", "b": "failed"}, tests, None)
    assert first == {"passed": 1, "skipped": 0, "digest": "x", "due": ["b", "c", "d"]}
    again = record.section("x", {"b": "passed", "c": "skipped"}, tests, first)
    assert again == {"passed": 2, "skipped": 1, "digest": "x", "due": ["d"]}
    assert record.section("x", {"d": "passed"}, tests, again) == {"passed": 3, "skipped": 1, "digest": "x"}
    worse = record.section("x", {"a": "failed", "d": "passed"}, tests, again)
    assert worse == {"passed": 2, "skipped": 1, "digest": "x", "due": ["a"]}
    assert record.section("x", {"b": "passed"}, {*"ab"}, first) == {"passed": 2, "skipped": 0, "digest": "x"}


def test_a_whole_run_and_one_of_other_sources_begin_anew():
    tests, before = {*"abc"}, {"passed": 1, "skipped": 1, "digest": "x", "due": ["c"]}
    whole = record.section("x", dict.fromkeys("abc", "passed"), tests, before)
    assert whole == {"passed": 3, "skipped": 0, "digest": "x"}
    other = record.section("y", {"a": "passed"}, tests, before)
    assert other == {"passed": 1, "skipped": 0, "digest": "y", "due": ["b", "c"]}


@pytest.mark.parametrize(("chosen", "workers"), [("", 0), ("0", 2), ("wkv4-1", 2), ("ends", 0), ("ends", 2)])
def test_what_a_run_leaves_out_is_due(chosen, workers, root, tmp_path):
    """Because of -k, or because it was cut short; in workers too."""
    import os
    import subprocess
    import sys

    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    for name, pretended in {"conftest.py": "_driver_version = str", "record.py": "digest = str.upper"}.items():
        text = (root / "tests" / "gpu" / name).read_text(encoding="utf-8")
        (folder / name).write_text(f"{text}\n{pretended}\n", encoding="utf-8")
    tests = f"""
import os, time, pytest, signal
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("op", ["wkv4", "timex"])
def test(op, number):
    if {chosen == "ends"} and (op, number) == ("wkv4", 1):
        for _ in range(300):  # until the process that is cut short knows of a test that passed
            if os.path.exists("reported"):
                break
            time.sleep(0.1)
        os.kill({"os.getppid()" if workers else "os.getpid()"}, signal.SIGINT)
        time.sleep(5)
"""
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    # A machine that seems to have a GPU. What conftest.py asks of torch is said in its place, as torch takes longer to
    # import than all else here.
    pretends = f"""
import os
import signal
import sys
import time
from types import ModuleType, SimpleNamespace
if "PYTEST_XDIST_WORKER" not in os.environ:  # what this process was started by may ignore interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
WORKERS = {workers}
if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
    time.sleep(1)  # so a single test runs in the other worker
torch, rwkv_jit = sys.modules["torch"], sys.modules["rwkv_jit"] = ModuleType("torch"), ModuleType("rwkv_jit")
torch.cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a GPU")
torch.manual_seed = lambda seed: None
versions = {{"torch": "2", "torch_cuda": "13", "cupy": [], "nvrtc": "13"}}
desk = sys.modules["rwkv_jit.desk"] = ModuleType("rwkv_jit.desk")
desk.versions = SimpleNamespace(env_report=lambda: {{"gpus": ["a GPU"], **versions}})
def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=1)
has_tests = []  # workers say which there are with a report, and not with each
def pytest_runtest_logreport(report):
    has_tests.extend(name for name, _ in report.user_properties if name == "tests")
    if "PYTEST_XDIST_WORKER" not in os.environ and report.when == "call" and (has_tests or not WORKERS):
        open("reported", "w").close()
class Ends:  # as what waits for workers, registered late
    def pytest_sessionfinish(self):
        if "PYTEST_XDIST_WORKER" not in os.environ:
            with open("recorded", "w") as file:
                file.write(str(os.path.exists("tests/gpu/record.json")))
def pytest_sessionstart(session):
    session.config.pluginmanager.register(Ends())
"""
    (tmp_path / "pretends.py").write_text(pretends, encoding="utf-8")
    more = ["-k", chosen] if chosen not in ("", "ends") else []
    # Without what says that this is a worker, and without plugins that take their time to import.
    around = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    around["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "--record", "-p", "xdist.plugin", "-p", "pretends",
         "-p", "no:cacheprovider", "-n", str(workers), *more],
        cwd=tmp_path, env={**around, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    ops = json.loads((folder / "record.json").read_text(encoding="utf-8"))["ops"]
    assert (tmp_path / "recorded").read_text() == "True"
    due = [len(section.get("due", ())) for section in ops.values()]
    assert {name: section["digest"] for name, section in ops.items()} == {name: name.upper() for name in ops}
    assert [section["passed"] for section in ops.values()] == [3 - left for left in due]
    if chosen == "ends":
        assert 0 < sum(due) < 3 * len(due)
    else:
        assert due == {"": [0, 0], "0": [2, 2], "wkv4-1": [2]}[chosen]


# ---- what a run says of this tier --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "has_gpu", "line"),
    [
        (["tests/gpu/test_timex.py::test[1]", "tests/gpu/test_timex.py::test[2]"], True, "2 tests ran on a GPU"),
        (["tests/unit/test_timex.py::test"], False, "not run, no GPU"),
        ([], True, "not run, none was chosen"),
    ],
)
def test_end_of_a_run_says_whether_kernels_ran(ran, has_gpu, line, request, root, monkeypatch):
    import torch

    conftest = request.config.pluginmanager.get_plugin(str(root / "tests" / "conftest.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    lines, reports = [], {"passed": [SimpleNamespace(nodeid=name) for name in ran]}
    reporter = SimpleNamespace(getreports=lambda outcome: reports.get(outcome, []), write_line=lines.append)
    conftest.pytest_terminal_summary(reporter)
    assert lines == [f"tests/gpu: {line}"]


def test_a_warning_of_ours_is_an_error():
    import warnings

    with pytest.raises(UserWarning, match="ours"):
        warnings.warn("ours", UserWarning, stacklevel=1)
