"""The commands that measure: every phase of every op on small shapes, beside torch's own, and their kernels."""

import json

import pytest
import torch

from bench import __main__ as program
from bench import processes, service
from bench.cases import POOLED, Case
from bench.measure import Entry
from rwkv_jit.schedules.table import OPS

PHASES = ("forward", "backward", "forward+backward", "decode", "prefill")
UPDATED = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
SHAPE = "1,70,4,64"


OF_OPS = [(name, phase) for name in ("wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention") for phase in PHASES]


@pytest.mark.parametrize(("name", "phase"), [*OF_OPS, *(("timex", phase) for phase in PHASES[:3])])  # it has no state
def test_every_phase_has_its_figures(run, name, phase):
    code, printed, said = run("bench", "--op", name, "--shape", SHAPE, "--phase", phase, "--json")
    assert (code, said.count("measuring 1 of 1: "), said.count("\n")) == (0, 1, 1), said
    result = json.loads(printed)
    assert result["device"] == "cuda"
    ours = [row for row in result["rows"] if row["who"] == "rwkv_jit"]
    assert ours
    for row in ours:
        assert row["skipped"] is None, row
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["runs"] >= 7
        assert row["peak_mib"] > 0
        assert row["host_us"] > 0
        assert row["error"] < 1e-2
        assert len(row["errors"]) == (len(OPS[name].names) if "backward" in phase else 1 + (phase != "forward"))
    torches = [row for row in result["rows"] if row["who"] == "torch"]
    assert [row["what"] for row in torches] == ["conv1d" if name == "timex" else "loop"]
    assert all(row["skipped"] is None and row["error"] < 1e-2 for row in torches), torches


@pytest.mark.parametrize("name", UPDATED)
def test_updates_have_their_figures(run, name):
    options = ("--shape", "70,1,4,64", "--phase", "update", "--json")
    code, printed, said = run("bench", "--op", name, *options)
    assert (code, said) == (0, f"measuring 1 of 1: {name} update 70,1,4,64,64\n"), said
    rows = json.loads(printed)["rows"]
    assert [(row["who"], row["what"]) for row in rows] == [("rwkv_jit", "auto"), ("torch", "step")]
    for row in rows:
        assert row["skipped"] is None, row
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["host_us"] > 0
        assert row["peak_mib"] > 0
    ours, step = rows
    assert list(ours["errors"]) == list(step["errors"]) == ["y", "state"]
    assert ours["error"] < 1e-2
    assert ours["errors"]["state"] < 5e-6
    assert step["error"] < 1e-2


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["wkv4", "wkv7"])
def test_profile_names_the_kernels(run, name, phase, tmp_path):
    options = ("--shape", SHAPE, "--phase", phase, "--trace", tmp_path, "--json")
    code, printed, said = run("profile", name, *options)
    assert (code, said) == (0, "")
    result = json.loads(printed)
    own = [kernel for kernel in result["kernels"] if kernel["name"].startswith(name)]
    assert own
    assert all(kernel["launches"] >= 1 and kernel["self_us"] > 0 for kernel in own)
    assert sum(kernel["share"] for kernel in result["kernels"]) == pytest.approx(1)
    events = json.loads(next(tmp_path.glob(f"{name}_*.pt.trace.json")).read_text())["traceEvents"]
    named = {event.get("name") for event in events}
    assert {"forward", "backward"} & named if "backward" in phase else phase in named


@pytest.mark.parametrize("kind", ["strong", "one-strong", "packed"])
@pytest.mark.parametrize("name", ["wkv6", "wkv7", "gla"])
def test_a_process_measures_hard_inputs(name, kind):
    shape = (1, 200, 4, 64, 64) if kind == "packed" else (4, 200, 4, 64, 64)
    case = Case(name, shape, torch.bfloat16, "forward+backward", kind=kind)
    with processes.helping() as helper:
        rows = processes.rows_of(helper, Entry(None, case), 1.0, False, {})
    for row in rows:
        assert row["skipped"] is None, row
        assert row["error"] < 1e-2
        assert row["other_error"] < 2e-2


@pytest.mark.parametrize("phase", POOLED)
@pytest.mark.parametrize("name", ["kda", "gated_delta_rule", "ssd", "wkv7"])
def test_a_process_measures_calls_over_a_pool(name, phase):
    """In a graph and without it, beside what a caller would take in their place."""
    tokens = {"verify": 4, "varlen": 200}.get(phase, 1)
    case = Case(name, (8, tokens, 4, 64, 64), torch.bfloat16, phase)
    with processes.helping() as helper:
        rows = processes.rows_of(helper, Entry(None, case), 1.0, False, {})
    beside = {"update": [], "varlen": ["forward"]}.get(phase, ["update"])
    assert [row["what"] for row in rows] == [phase, *beside]
    for row in rows:
        assert row["skipped"] is None, row
        assert row["in_graph"]
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["calls_us"] > 0.5e3 * row["low_ms"]
        assert set(row["errors"]) == ({"y"} if phase == "varlen" else {"y", "state"})
        assert row["error"] < 1e-2
        assert row["other_error"] is None or row["other_error"] < 2e-2


def test_host_times_of_calls():
    found = service.host_us()
    assert {"its prepared forward", "wkv7"} <= set(found)
    assert all(us > 0 for us in found.values())


def test_first_calls_find_on_disk_what_they_compiled(monkeypatch):
    monkeypatch.setattr(service, "REPEATS", 1)  # each is a process that imports torch
    found = {"wkv7": service.first_calls(), **service.one_line_kernels()}
    assert {"rwkv_jit", "CuPy's RawModule", "Triton"} <= set(found)
    assert all(0 < each["from_disk_ms"] < each["compiled_ms"] for each in found.values()), found


def test_layers_have_their_figures(capsys):
    assert program.main(["layers", "--shape", "2,300,256", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "cuda"
    for row in result["rows"]:
        assert row["skipped"] is None, row
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["runs"] >= 7
        assert row["peak_mib"] > 0
