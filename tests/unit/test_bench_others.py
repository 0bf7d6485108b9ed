"""The folder `bench`: peers and what they are given, processes of their own, suites, the service, and its program."""

import csv
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest
import torch

import rwkv_jit
from bench import cases, measure, peers, processes, record, service, suites, tuners
from bench.__main__ import main
from bench.cases import Case
from bench.measure import Entry
from rwkv_jit.desk import bench, figures, versions
from rwkv_jit.schedules.table import ALL, OPS

SMALL = (2, 6, 2, 4, 3)


def small(op, phase="forward", dtype=torch.float32, **more):
    return Case(op, SMALL, dtype, phase, **more)


def errors_of(case, contestants):
    found = measure._errors(case, contestants, cases.given_for(case, "cpu"), [])
    return [each["error"] for each in found]


# ---- peers -------------------------------------------------------------------------------------------------------


def refer_to(op, called):
    """A stand-in for another library's function: our reference, with what the library calls the norm of keys.

    What FLA's function does not take is an error.
    """

    def load(module, name):
        real = getattr(importlib.import_module(module), name) if module.startswith("fla") else None

        def run(*inputs, use_qk_l2norm_in_kernel=False, initial_state=None, **more):
            normed = {"use_qk_l2norm_in_kernel": True} if use_qk_l2norm_in_kernel else {}
            if real is not None:
                bound = inspect.signature(real).bind(*inputs, initial_state=initial_state, **normed, **more)
                assert ("beta" in bound.arguments) == ("beta" in ALL[op].public_names and "gdn2" not in name)
            called.append((module, name))
            for each in ("safe_gate", "lower_bound", "disable_recompute"):
                more.pop(each, None)
            inputs = (*inputs, *([more.pop("beta")] if "beta" in more else []))
            reference = getattr(rwkv_jit, f"{'gla' if op == 'hgrn2' else op}_ref")
            return reference(*inputs, initial_state, **({"qk_norm": True} if normed else {}), **more)

        def scan(*inputs, initial_states, return_final_states):
            called.append((module, name))
            y, final = rwkv_jit.ssd_ref(*inputs[:5], initial_states, return_final_states)
            return (y, final) if return_final_states else y

        def step(pool, x, dt, a, b, c, own, dt_bias, state_batch_indices):
            called.append((module, name))
            assert a.stride()[1:] == (0, 0)  # by which it knows that they are the same for a head
            assert dt.stride(-1) == own.stride(-1) == dt_bias.stride(-1) == 0
            assert not own.any()
            assert not dt_bias.any()
            assert a.shape == pool.shape[1:]
            assert own.shape == dt_bias.shape == pool.shape[1:3]
            return rwkv_jit.ssd_update(pool, x, dt[..., 0], a[:, 0, 0], b, c, state_indices=state_batch_indices)

        return {"mamba_chunk_scan_combined": scan, "selective_state_update": step}.get(name, run)

    return load


_OF_KDA = ["chunk_kda safe_gate", "chunk_kda disable_recompute", "chunk_kda safe_gate disable_recompute"]
_TRAINED = "forward+backward"
_OF_FEW = [(phase, tokens) for phase, tokens in (("decode", 1), ("update", 1), ("replay", 1), ("verify", 4))]


@pytest.mark.parametrize(("op", "kind", "phase", "tokens"), [
    ("kda", "usual", _TRAINED, 20), ("kda", "strong-gates", _TRAINED, 20), ("kda", "slow-gates", _TRAINED, 20),
    ("gated_delta_rule", "16-keys", _TRAINED, 20), ("delta_rule", "usual", _TRAINED, 20),
    ("simple_gla", "usual", _TRAINED, 20), ("ssd", "usual", _TRAINED, 20), ("hgrn2", "usual", _TRAINED, 20),
    ("gated_delta_rule2", "usual", _TRAINED, 20),
    *[(op, "usual", *few) for op in cases.DERIVED for few in _OF_FEW if op != "ssd"],
    ("ssd", "usual", "update", 1), ("ssd", "usual", "replay", 1), ("ssd", "usual", "varlen", 20),
    ("gated_delta_rule", "16-keys+bf16-states", "update", 1), ("kda", "usual", "varlen", 1030),
    ("gated_delta_rule", "16-keys+served", "varlen", 256 + 4 * 20), ("gated_delta_rule2", "usual", "prefill", 20),
])  # fmt: skip
def test_peers_of_ops_made_of_others_compute_the_same(op, kind, phase, tokens, monkeypatch):
    called = []
    monkeypatch.setattr(peers, "_loaded", refer_to(op, called))
    case = Case(op, (1 if "served" in kind else 3, tokens, 32, 4, 3), torch.float32, phase, kind=kind).check()
    found = peers._mamba(case) if op == "ssd" else peers._fla(case)
    own = measure.ours(case, cases.given_for(case, "cpu"))[0] if case.is_pooled else []
    judged = measure._errors(case, found, cases.given_for(case, "cpu"), own)
    for each in judged:
        assert 0 < each["error"] < 4e-6, each
        assert not own or (each["other"], each["other_error"] < 5e-3) == (phase, True), each
    module, whose = {"hgrn2": ("gla", "gla"), "gated_delta_rule2": ("gdn2", "gdn2")}.get(op, (op, op))
    chunks, steps = f"chunk_{whose}", f"fused_recurrent_{whose}"
    if op == "ssd":
        few = phase in cases.OF_FEW
        module, *names = ("selective_state_update" if few else "ssd_combined",) * 2
        names = names if few else ["mamba_chunk_scan_combined"]
        assert {*called} == {(f"mamba_ssm.ops.triton.{module}", name) for name in names}
    else:
        names = [chunks, *(["chunk_kda safe_gate"] if op == "kda" else [])] * (tokens > 8)
        names += [steps] * (tokens <= 1024 and phase != _TRAINED)
        names += _OF_KDA[1:] * (op == "kda" and phase == _TRAINED)
        assert {*called} == {(f"fla.ops.{module}", name.split()[0]) for name in names}
    assert [each.what for each in found] == names
    assert {each.who for each in found} == {"mamba_ssm" if op == "ssd" else "fla"}
    assert peers._mamba(case._replace(op="kda")) == []


@pytest.mark.parametrize(("op", "phase", "tokens", "kind"), [
    ("ssd", "verify", 4, "usual"), ("ssd", "decode", 1, "usual"), ("ssd", "varlen", 256 + 4 * 20, "served"),
    ("wkv7", "update", 1, "usual"), ("kda", "decode", 1, "usual"), ("kda", "varlen", 20, "usual"),
])  # fmt: skip
def test_what_a_library_does_not_have_is_no_peer(op, phase, tokens, kind):
    case = Case(op, (1 if kind == "served" else 3, tokens, 4, 4, 4), torch.bfloat16, phase, kind=kind).check()
    assert [each for make in (peers._mamba, peers._cudnn, peers._wind, peers._flash_rwkv) for each in make(case)] == []


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "phase", "kind", "names"),
    [
        ("wkv6", "forward", "usual", ["y"]), ("wkv7", "forward", "packed", ["y"]),
        ("wkv6", "forward+backward", "usual", ["y", "dr", "dk", "dv", "dw", "du"]), ("wkv5", "prefill", "usual", ["y"]),
        ("gla", "backward", "one-strong", ["y", "dq", "dk", "dv", "dg"]), ("wkv5", "decode", "usual", ["y"]),
        ("ssd", "forward+backward", "usual", ["y", "dx", "ddt", "dB", "dC"]),
        ("timex", "backward", "usual", ["y", "dw", "dk"]),
        ("wkv7", "update", "usual", ["y", "state"]), ("wkv6", "update", "bf16-kv-states", ["y", "state"]),
        ("kda", "update", "bf16-states", ["y", "state"]), ("wkv7", "replay", "usual", ["y", "state"]),
        *[(op, phase, "usual", ["y", "state"]) for op in cases.DERIVED for phase in ("replay", "verify")],
        ("ssd", "varlen", "usual", ["y"]), ("gated_delta_rule2", "varlen", "served", ["y"]),
        ("gla", "varlen", "vk-states", ["y"]), ("hgrn2", "decode", "usual", ["y"]),
    ],
)  # fmt: skip
def test_everyone_of_a_case_has_figures_and_errors(op, phase, kind, names, monkeypatch):
    """CPU tensors stand in for those of a GPU, whose times are made up: ours, torch's, and what cannot do it."""
    torch.manual_seed(0)
    given_for, one_row = cases.given_for, {"packed": (1, 40, 1), "served": (1, 256 + 4 * 5, 2)}
    few = {"decode": 1, "update": 1, "replay": 1, "verify": 3}
    batch, tokens, heads = one_row.get(kind, (3, few.get(phase, 6), 2))
    case = Case(op, (batch, tokens, heads, 4, 4), torch.float32, phase, kind=kind).check()
    monkeypatch.setattr(cases, "given_for", lambda case: given_for(case, "cpu"))
    monkeypatch.setattr(measure, "backend_of", lambda case, given, asked: asked)
    properties = SimpleNamespace(L2_cache_size=1000)
    for name in ("synchronize", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: properties)
    monkeypatch.setattr(figures, "peak_bytes", lambda call: call() and 0)

    def turns(calls, small, flush):
        us = {"host_us": 1.0, "calls_us": 3.0}
        return SimpleNamespace(ms=lambda: [call() for call in calls] and 2.0, calls=calls, in_graph=small, **us)

    monkeypatch.setattr(measure.timing, "Turns", turns)
    broken = measure.Contestant("fla", "broken", lambda *_: {}["no"])
    own = None if case.is_pooled else ["auto", "reference"]
    rows = measure.rows_of(Entry("gla", case, own), 1.0, [*measure.torch_peers(case), broken])
    *measured, last = rows
    assert (last["who"], last["skipped"], last["median_ms"]) == ("fla", "KeyError: 'no'", None)
    assert [row["skipped"] for row in measured] == [None] * len(measured)
    by = [row["what"] for row in measured]
    if case.is_pooled:
        beside = {"update": ["copy"], "varlen": ["forward"]}.get(phase, ["update", "copy"])
        steps = ["step in place"] * (phase == "update" and op in OPS)
        assert by == [phase, *beside, *steps]
    else:
        others = {"timex": ["conv1d", "fft"], "wkv5": ["naive loop"], "wkv6": ["naive loop"]}
        assert by == ["auto", "reference", *others.get(op, [])]
    for row in measured:
        assert list(row) == list(measure.COLUMNS)
        assert (row["suite"], row["median_ms"], row["host_us"], row["calls_us"]) == ("gla", 2.0, 1.0, 3.0)
        assert row["fraction"] == pytest.approx(row["floor_ms"] / 2)
        if row["what"] != "copy":
            assert list(row["errors"]) == names
            assert 0 < row["error"] < (5e-2 if "bf16" in kind else 5e-5), row
            assert row["other_error"] is None or row["other_error"] < 5e-2, row


@pytest.mark.parametrize("phase", ["replay", "verify"])
def test_slots_of_a_ring_are_in_all_phases_of_it(phase):
    """So that a call takes the average of a cycle, before and behind it."""
    case = Case("ssd", (26, {"replay": 1, "verify": 4}[phase], 2, 8, 4), torch.float32, phase).check()
    given = cases.given_for(case, "cpu")
    step, _ = measure.ours(case, given)[0]
    pool, more = measure.beside(case, step, given)
    ring = more["ring"]
    assert ring.drafts == {"replay": 0, "verify": 4}[phase]
    for _ in range(3):
        counts = ring.cursors.bincount(minlength=ring.length + 1)
        assert len(counts) == ring.length + 1 <= 13
        assert counts.max() - counts.min() <= 1
        with torch.no_grad():
            step.run(given.inputs, pool, more)


@pytest.mark.parametrize("phase", ["decode", *cases.OF_FEW, "varlen"])
@pytest.mark.parametrize("op", [*cases.DERIVED, "gla", "wkv7"])
def test_calls_over_a_pool_take_the_kernels_of_their_verbs(op, phase, on_gpu):
    on_gpu.archs = ("sm_90",)
    case = Case(op, (8, {"verify": 4, "varlen": 200}.get(phase, 1), 4, 64, 64), torch.bfloat16, phase).check()
    given = cases.given_for(case, "cpu")
    own = measure.ours(case, given)[0] if case.is_pooled else [measure.our_call(case, "auto", "auto")]
    launches = []
    for each in own:
        call = measure.run_once(case, each, given)
        on_gpu.take()
        call()
        launches.append([launch.template for launch in on_gpu.take()])
    if phase == "varlen":
        assert all(launches), launches
        assert launches[0] != launches[1]  # which has no slots
        return
    assert [len(each) for each in launches] == [1] * len(own)
    templates = [each[0] for each in launches]
    assert "replay" in templates[0] if len(own) == 2 else "update" in templates[0], templates
    assert len(own) == 1 or "update" in templates[1]


# ---- processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def children(monkeypatch):
    """Lets processes do what peers of made-up names say, without a GPU."""
    tried = {
        "dies": lambda: os._exit(7), "hangs": lambda: time.sleep(600), "cannot": lambda: {}["no"],
        "says why": lambda: os.write(2, b"no such kernel\n") and os._exit(3),
    }  # fmt: skip

    def use(*names, op="wkv6", who="fla"):
        found = [measure.Contestant(who, name, None, is_foreign=name != "of torch") for name in names]
        monkeypatch.setattr(processes, "_CONTEXT", multiprocessing.get_context("fork"))
        monkeypatch.setattr(peers, "peers_of", lambda case: found)
        monkeypatch.setattr(tuners, "time_briefly", lambda *_: (_ for _ in ()).throw(ImportError))
        monkeypatch.setattr(cases, "given_for", lambda case: None)
        monkeypatch.setattr(measure, "run_once", lambda case, peer, given: tried.get(peer.what, lambda: None))
        properties = SimpleNamespace(total_memory=16 << 30)
        for name in ("synchronize", "empty_cache", "current_device", "get_device_properties"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: properties)
        return Entry(None, small(op))

    return use


def test_what_ends_a_process_hides_nobody(children):
    entry = children("works", "dies", "cannot", "of torch", "says why", "works too")
    known = processes.obstacles([entry, entry])
    assert {what: why for (_, _, what), why in known.items()} == {
        "dies": "ended its process with 7", "cannot": "KeyError: 'no'",
        "says why": "ended its process with 3: no such kernel",
    }  # fmt: skip


def test_a_case_without_its_peers_is_measured_where_one_of_them_ends_the_process(children, monkeypatch):
    entry = children("works", "dies", "of torch")
    row = functools.partial(measure.row, entry)
    measured = {"dies": lambda: os._exit(7)}
    monkeypatch.setattr(
        measure, "rows_of", lambda entry, copy, known: [measured.get(x.what, dict)() for x in known] + [row()]
    )
    with processes.helping() as helper:
        rows = processes.rows_of(helper, entry, 1.0, True, {(entry.case, "fla", "of torch"): "no"})
        assert [(each["what"], each["skipped"]) for each in rows] == [
            ("-", None), ("works", "one of these peers: ended its process with 7"),
            ("dies", "one of these peers: ended its process with 7"), ("of torch", "no"),
        ]  # fmt: skip
        known = {(entry.case, "fla", "dies"): "it dies"}
        assert len(processes.rows_of(helper, entry, 1.0, True, known)) == 4


def test_silence_ends_a_process(children, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 2)
    assert set(processes.obstacles([children("hangs", "works")]).values()) == {"did not end in 2 s"}
    late = processes.obstacles([children("hangs", "works")], 0.02)
    assert {what: why for (_, _, what), why in late.items()} == dict.fromkeys(
        ("hangs", "works"), "was not tried in 0.02 min"
    )


# ---- suites ------------------------------------------------------------------------------------------------------


def test_all_suites_are_recorded_and_nothing_else():
    everything = {
        (entry.suite, entry.case.op, tuple(entry.case.shown), entry.case.phase, entry.case.kind)
        for entry in suites.entries_of(["studies"])
    }
    recorded = {
        (row["suite"], row["op"], tuple(row["shape"]), row["phase"], row["inputs"])
        for row in record.read(record.FILE)["rows"]
        if row["suite"] in suites.STUDIES  # others are recorded by themselves
    }
    assert recorded == everything
    assert len(everything) == 78
    assert len(suites.entries_of(["inference"])) == 20
    served = [entry.case for entry in suites.entries_of(["served"])]
    assert {case.op for case in served} == {*cases.DERIVED, "gla"}
    phases = {"decode", "update", "replay", "verify", "varlen"}
    assert all({case.phase for case in served if case.op == op} == phases for op in cases.DERIVED)
    (profile,) = suites.entries_of(["profile"])
    assert (profile.case.dtype, profile.case.wide_decay) == (torch.float16, True)
    assert set(profile.backends) == {"auto", "recurrent", "chunked"}
    assert {entry.case.op for entry in suites.entries_of(["studies"], ["gla", "timex"])} == {"gla", "timex"}


# ---- the program -------------------------------------------------------------------------------------------------

ENVIRONMENT = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}


@pytest.fixture
def program(run_main):
    """Runs a command of `python -m bench` in this process; returns its exit code, what it printed and what it said."""
    return functools.partial(run_main, main)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, where nothing is measured and the record is elsewhere: what is asked for is noted."""
    asked = SimpleNamespace(entries=[], tried=None, minutes=None, interrupted=...)

    def rows_of(helper, entry, copy, with_peers, known):
        if entry.suite == asked.interrupted:
            raise KeyboardInterrupt
        asked.entries.append((entry, with_peers))
        times = {"median_ms": 0.5, "low_ms": 0.4, "high_ms": 0.6, "errors": {"y": 1e-3}, "error": 1e-3}
        return [measure.row(entry, "rwkv_jit", "chunked") | times]

    def obstacles(entries, minutes):
        asked.tried, asked.minutes = list(entries), minutes
        return {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(versions, "is_available", lambda: True)
    monkeypatch.setattr(bench, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(cases, "copy_tb_per_s", lambda: 4.25)
    monkeypatch.setattr(processes, "rows_of", rows_of)
    monkeypatch.setattr(processes, "obstacles", obstacles)
    monkeypatch.setattr(record, "FILE", tmp_path / "bench.json")
    return asked


def test_command_measures_what_it_is_asked_for(gpu, program):
    options = ("--op", "wkv6", "--shape", "2,32,4,16", "--phase", "backward", "--peer-minutes", "3", "--json")
    code, printed, said = program("ops", *options)
    assert (code, said) == (0, "measuring 1 of 1: wkv6 backward 2,32,4,16,16\n")
    found = json.loads(printed)
    ((entry, with_peers),) = gpu.entries
    assert (entry.case, with_peers) == (Case("wkv6", (2, 32, 4, 16, 16), torch.bfloat16, "backward"), True)
    assert (gpu.tried, gpu.minutes) == ([entry], 3)
    assert set(found) == {"format", "env", "copy_tb_per_s", "device", "machines", "rows"}
    assert (found["format"], found["device"], found["copy_tb_per_s"]) == (3, "cuda", 4.25)
    (row,) = found["rows"]
    assert (row["machine"], row["commit"], row["copy_tb_per_s"]) == (*found["machines"], record.commit(), 4.25)
    assert row["sources"] == record.sources_of(row)
    gpu.entries.clear()
    gpu.tried = None
    assert program("ops", "--suite", "chunk_rwkv6", "--no-peers")[0] == 0
    assert [with_peers for _, with_peers in gpu.entries] == [False]
    assert gpu.tried is None


def test_files_are_written(gpu, program, tmp_path):
    files = ["--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png"]
    assert program("ops", "--suite", "timex", "--record", *files)[0] == 0
    with open(tmp_path / "x.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["shape"], first["median_ms"], first["suite"], first["host_us"]) == ("32x768x768", "0.5", "timex", "")
    assert (second["phase"], second["error of y"]) == ("backward", "0.001")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert {row["suite"] for row in record.read(tmp_path / "bench.json")["rows"]} == {"timex"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--suite", "gla", "--shape", "1,2,3,4"], "--shape: a suite has its own, got 1,2,3,4 beside"),
        (["ops", "--suite", "gla", "--inputs", "strong"], "--inputs: a suite has its own, got strong beside"),
        (["ops", "--suite", "gla", "--op", "wkv7"], "--op: nothing of wkv7 is in --suite gla"),
        (["ops", "--csv", "/nowhere/x.csv"], "--csv: expected a file in a folder that exists, got /nowhere/x.csv"),
        (["ops", "--plot", "/nowhere/x.png"], "--plot: expected a file in a folder that exists, got /nowhere/x.png"),
        (["ops", "--plot", "x.doc"], ", got x.doc"),
        (["ops", "--peer-minutes", "nan"], "--peer-minutes: expected a number above 0, got nan"),
        (["ops", "--record"], "--record: keeps what suites have; expected --suite"),
        (["compare", "/nowhere/a.json", "b"], "No such file or directory: '/nowhere/a.json'"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(gpu, program, arguments, message):
    code, printed, said = program(*arguments)
    assert (code, printed) == (2, "")
    assert message in said
    assert gpu.entries == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--suite", "gla"], "--suite: its shapes are for a GPU, and torch sees none; expected --shape"),
        (["ops", "--suite", "gla", "--record"], "--record: keeps what was measured on a GPU, and there is none"),
        (["service", "--record"], "needs a GPU, CuPy and NVRTC"),
    ],
)
def test_what_needs_a_gpu_says_so(program, arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(service, "measured", lambda: pytest.fail("it was measured"))
    code, printed, said = program(*arguments)
    assert (code, printed) == (2, "")
    assert message in said
