"""The commands that measure: every phase of every op on small shapes, beside torch's own, and their kernels."""

import json

import pytest

from rwkv_jit import bench, latency
from rwkv_jit.bench import cases, peers, service

PHASES = ("forward", "backward", "forward+backward", "decode", "prefill")
SHAPE = "1,70,4,64"


OF_OPS = [(name, phase) for name in ("wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention") for phase in PHASES]


@pytest.mark.parametrize(("name", "phase"), [*OF_OPS, *(("timex", phase) for phase in PHASES[:3])])  # it has no state
def test_every_phase_has_its_figures(run, name, phase, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)  # torch alone, as others tune themselves for minutes
    monkeypatch.setattr(cases, "MOST_SETS", 8)
    code, printed, said = run("bench", "--op", name, "--shape", SHAPE, "--phase", phase, "--json")
    assert (code, said) == (0, "")
    result = json.loads(printed)
    assert result["device"] == "cuda"
    assert 0.05 < result["copy_tb_per_s"] < 50
    ours = [row for row in result["rows"] if row["who"] == "rwkv_jit"]
    assert ours
    for row in ours:
        assert row["skipped"] is None, row
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["runs"] >= 7
        assert row["in_graph"] == ("backward" not in phase)
        assert row["floor_ms"] == pytest.approx(row["fraction"] * row["median_ms"])
        assert row["peak_mib"] > 0
        assert row["host_us"] > 0
        assert row["error"] is None or row["error"] < 1e-2
    torches = [row for row in result["rows"] if row["who"] == "torch"]
    assert bool(torches) == (name in ("wkv5", "wkv6", "timex"))
    assert all(row["skipped"] is None and row["error"] < 1e-2 for row in torches), torches


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["wkv4", "wkv7"])
def test_profile_names_the_kernels(run, name, phase, tmp_path):
    options = ("--shape", SHAPE, "--phase", phase, "--trace", tmp_path, "--json")
    code, printed, said = run("profile", name, *options)
    assert (code, said) == (0, "")
    result = json.loads(printed)
    own = [kernel for kernel in result["kernels"] if kernel["name"].startswith(name)]
    assert own
    assert all(kernel["launches"] >= 1 and kernel["self_us"] > 0 and kernel["registers"] > 0 for kernel in own)
    assert sum(kernel["share"] for kernel in result["kernels"]) == pytest.approx(1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event.get("name") for event in events}
    assert {"forward", "backward"} & named if "backward" in phase else phase in named


def test_host_times_of_calls():
    found = latency._host_us()
    assert {"its prepared forward", "wkv7"} <= set(found)
    assert all(us > 0 for us in found.values())


def test_first_calls_find_on_disk_what_they_compiled(monkeypatch):
    monkeypatch.setattr(service, "REPEATS", 1)  # each is a process that imports torch
    found = {"wkv7": bench.first_calls(), **bench.one_line_kernels()}
    assert {"rwkv_jit", "CuPy's RawModule", "Triton"} <= set(found)
    assert all(0 < each["from_disk_ms"] < each["compiled_ms"] for each in found.values()), found
