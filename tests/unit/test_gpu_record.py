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
    assert section["failed"] == 0
    assert section["passed"] > 0
    assert section["digest"] == record.digest(op)


def test_totals_are_the_sums_of_the_sections():
    written = json.loads(record.RECORD.read_text(encoding="utf-8"))
    for name in ("passed", "failed", "skipped"):
        assert written[name] == sum(section[name] for section in written["ops"].values())


@pytest.fixture
def copied_sources(tmp_path, monkeypatch):
    templates = [
        f"kernel_templates/{name}"
        for name in ("shared", "recurrent", "delta", "diagonal", "wkv4", "timex", "inference")
    ]
    for folder in (*templates, "rwkv_jit", "rwkv_jit/ops", "rwkv_jit/algorithms", "rwkv_jit/inference"):
        (tmp_path / folder).mkdir(parents=True)
        for path in (record.ROOT / folder).iterdir():
            if path.is_file():
                (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(record, "ROOT", tmp_path)
    return tmp_path


def _edit(path, change):
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def test_comments_and_docstrings_leave_the_digest(copied_sources):
    before = record.digest("wkv7")
    for path, change in (
        ("kernel_templates/recurrent/wkv7_recurrent_forward.cu", lambda text: "// new words\n\n" + text),
        ("kernel_templates/recurrent/tile.cuh", lambda text: text.replace("    ", "  ") + "/* more\n words */"),
        ("rwkv_jit/algorithms/recurrent.py", lambda text: text.replace('"""The recurrent', '"""Other: the recurrent')),
        ("rwkv_jit/reference.py", lambda text: text + "\nEXTRA = 1\n"),
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
        ("kernel_templates/shared/sum_rows.cu", "next = sum.at[i] + term", "next = sum.at[i] - term"),
        ("rwkv_jit/algorithms/recurrent.py", "SHARED_LIMIT = 48", "SHARED_LIMIT = 47"),
        ("rwkv_jit/algorithms/parts.py", "LARGEST_HEAD = 128", "LARGEST_HEAD = 64"),
        ("rwkv_jit/plan.py", "if x is None else x.data_ptr()", "if x is None else 0"),
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
        ("kernel_templates/recurrent/wkv7_recurrent_forward.cu", {"wkv7", "inference"}),
        ("kernel_templates/recurrent/gla_recurrent_backward.cu", {op for op, x in record.STEMS.items() if "gla" in x}),
        ("kernel_templates/inference/arrange_sequences.cu", {"inference"}),
        ("kernel_templates/wkv4/wkv4_update.cu", {"wkv4"}),
        ("rwkv_jit/inference/wkv4.py", {"wkv4", "inference"}),
        ("rwkv_jit/algorithms/wkv4.py", {"wkv4"}),
        ("rwkv_jit/ops/wkv5.py", {"wkv5"}),
        ("rwkv_jit/algorithms/timex_tiles.py", {"timex"}),
    ],
)
def test_ops_are_stale_by_what_is_theirs_alone(path, ops, copied_sources):
    before = {op: record.digest(op) for op in record.OPS}
    more = "\nEXTRA = 1\n" if path.endswith(".py") else "\nconstexpr int EXTRA = 1;\n"
    _edit(copied_sources / path, lambda text: text + more)
    assert {op for op in record.OPS if record.digest(op) != before[op]} == ops


def test_every_op_is_covered():
    from rwkv_jit.ops.table import OPS

    stems = {name: (op.stem,) for name, op in OPS.items()}
    assert stems | {"inference": ("gla", "wkv7")} == record.STEMS


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("kernel_templates/inference/update.cuh", "count /= 2, index +=", "count /= 2, index -="),
        ("rwkv_jit/inference/steps.py", "_MOST_KEY_WARPS = 16", "_MOST_KEY_WARPS = 8"),
        ("rwkv_jit/plan.py", "if x is None else x.data_ptr()", "if x is None else 0"),
    ],
)
def test_a_change_of_inference_is_seen_there_and_by_no_op(copied_sources, path, old, new):
    before, of_op = record.digest("inference"), record.digest("wkv7")
    assert old in (copied_sources / path).read_text(encoding="utf-8")
    _edit(copied_sources / path, lambda text: text.replace(old, new, 1))
    assert record.digest("inference") != before
    assert (record.digest("wkv7") != of_op) == (path == "rwkv_jit/plan.py")


def test_a_section_counts_outcomes_and_names_failures():
    outcomes = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"}
    first = record.section("x", outcomes, None)
    assert first == {"passed": 2, "failed": 1, "skipped": 1, "digest": "x", "failures": ["b"]}
    assert record.section("x", {"a": "passed"}, None) == {"passed": 1, "failed": 0, "skipped": 0, "digest": "x"}


def test_what_the_record_lacks_is_due():
    whole, broken = ({"digest": "x", **more} for more in ({}, {"failures": ["b"]}))
    assert [record.is_due(name, "x", whole) for name in "ab"] == [False, False]
    assert [record.is_due(name, "x", broken) for name in "ab"] == [False, True]
    assert record.is_due("a", "y", broken)
    assert record.is_due("a", "x", None)


def test_a_run_of_the_same_sources_mends_the_failures_alone():
    first = {"passed": 9, "failed": 2, "skipped": 0, "digest": "x", "failures": ["a", "b"]}
    again = record.section("x", {"a": "passed", "c": "passed"}, first)
    assert again == {"passed": 10, "failed": 1, "skipped": 0, "digest": "x", "failures": ["b"]}
    assert record.section("x", {"b": "passed"}, again) == {"passed": 11, "failed": 0, "skipped": 0, "digest": "x"}
    worse = record.section("x", {"b": "passed", "c": "failed"}, again)
    assert worse == {"passed": 10, "failed": 1, "skipped": 0, "digest": "x", "failures": ["c"]}
    other = record.section("y", {"a": "passed"}, first)
    assert other == {"passed": 1, "failed": 0, "skipped": 0, "digest": "y"}


def test_some_tests_of_the_same_sources_take_the_place_of_no_whole_run():
    """What fails among them has not passed."""
    whole = {"passed": 2, "failed": 0, "skipped": 1, "digest": "x"}
    assert record.section("x", {"a": "passed", "b": "passed"}, whole) == whole
    assert record.section("x", dict.fromkeys("abc", "passed"), whole) == {**whole, "passed": 3, "skipped": 0}
    failed = record.section("x", {"a": "passed", "b": "failed"}, whole)
    assert failed == {"passed": 1, "failed": 1, "skipped": 1, "digest": "x", "failures": ["b"]}


@pytest.mark.parametrize(
    ("ended", "is_written"),
    [(pytest.ExitCode.OK, True), (pytest.ExitCode.TESTS_FAILED, True), (pytest.ExitCode.INTERRUPTED, False)],
)
def test_a_run_that_was_interrupted_writes_no_record(ended, is_written, root, tmp_path, monkeypatch):
    from rwkv_jit import machine

    spec = importlib.util.spec_from_file_location("gpu_conftest", root / "tests" / "gpu" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    known = {"gpus": ["a GPU"], "torch": "2", "torch_cuda": "13", "cupy": [], "nvrtc": "13"}
    monkeypatch.setattr(machine, "env_report", lambda: known)
    monkeypatch.setattr(conftest, "_driver_version", lambda: "1")
    monkeypatch.setattr(conftest, "HAS_GPU", True)
    monkeypatch.setattr(conftest.record, "RECORD", tmp_path / "record.json")
    conftest._outcomes["wkv4"]["a"] = "passed"
    conftest.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(getoption=lambda name: True)), ended)
    assert conftest.record.RECORD.exists() == is_written
    if is_written:
        assert json.loads(conftest.record.RECORD.read_text(encoding="utf-8"))["ops"]["wkv4"]["passed"] == 1


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
