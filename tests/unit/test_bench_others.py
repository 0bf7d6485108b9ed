"""The folder `bench`: peers and what they are given, processes of their own, suites, the service, and its program."""

import csv
import functools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock, Timeout

import rwkv_jit
from bench import ROOT, peers, processes, record, service, suites
from bench.__main__ import main
from rwkv_jit.desk import bench, versions
from rwkv_jit.desk.bench import cases, measure, timing
from rwkv_jit.desk.bench.cases import Case
from rwkv_jit.desk.bench.measure import Entry
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.plain import reference

SMALL = (2, 6, 2, 4, 3)


def small(op, phase="forward", dtype=torch.float32, **more):
    shape = cases.shape_of(op, "2,6,2,4") if op in cases.WITHOUT_HEADS else SMALL
    return Case(op, shape, dtype, phase, **more)


def errors_of(case, contestants):
    found = measure._errors(case, contestants, cases.given_for(case, "cpu"), [])
    return [each["error"] for each in found]


# ---- peers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "index", "names"), [
    ("wkv6", 3, ["chunk_rwkv6", "fused_recurrent_rwkv6"]),
    ("wkv7", 1, ["chunk_rwkv7", "fused_recurrent_rwkv7"]),
    ("gla", None, ["chunk_gla", "fused_recurrent_gla"]),
    ("linear_attention", None, ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]),
])  # fmt: skip
def test_peers_of_fla_get_what_they_ask_for(op, index, names, monkeypatch):
    """A stand-in for FLA: the reference in its conventions, which are logarithms of decays and states [K, V]."""
    refer, calls = getattr(reference, f"{op}_ref"), []

    def fla(*inputs, initial_state, output_final_state=False, cu_seqlens=None, **options):
        if "lower_bound" in options:
            assert options["lower_bound"] <= inputs[1].min()
        calls.append(options)
        decay = {} if op == "linear_attention" else {"decay": "log"}
        scale = {name: options[name] for name in ("scale",) if name in options}
        assert initial_state is None or initial_state.dtype == torch.float32
        return refer(*inputs, initial_state, output_final_state, cu_seqlens, **decay, **scale, state_layout="kv")

    monkeypatch.setattr(peers, "_loaded", lambda module, name: fla)
    shape = (1, 20, 2, 4, 3)
    everything = [small(op, "forward+backward"), small(op, "decode"), Case(op, shape, torch.float32, kind="packed")]
    everything += [
        Case(op, (3, 1, 2, 4, 3), torch.float32, "update", kind=kind).check()
        for kind in cases.KINDS
        if op in cases.ops_of(kind) and (kind == "usual" or kind.endswith("states"))
    ]
    if op != "linear_attention":
        everything.append(small(op, "forward+backward", kind="strong"))
    for case in everything:
        found = peers._fla(case)
        kept = ["chunk_rwkv7 disable_recompute"] if op == "wkv7" and case.has_gradients else []
        steps = [name for name in names if name.startswith("fused_recurrent")]
        assert [each.what for each in found] == (steps if case.phase == "update" else [*names, *kept])
        assert all(each.is_foreign and each.who == "fla" for each in found)
        errors = errors_of(case, found)
        assert all(0 < error < 4e-6 for error in errors), errors
        given = cases.given_for(case, "cpu")
        changed = zip(given.inputs, found[0].convert(given.inputs), strict=True)
        assert [place for place, (x, y) in enumerate(changed) if x is not y] == ([] if index is None else [index])
    options = {"gla": {}, "linear_attention": {"normalize": False}, "wkv6": {"scale": 1.0}, "wkv7": {"scale": 1.0}}[op]
    assert options in calls
    bounds = [call for call in calls if "lower_bound" in call]
    assert bool(bounds) == (op == "wkv7")
    assert any("disable_recompute" in call for call in calls) == (op == "wkv7")


def refer_to(op, names):
    """A stand-in for another library's function: our reference, with what the library calls the norm of keys."""

    def run(*inputs, use_qk_l2norm_in_kernel=False, initial_state=None, **more):
        names.append(op)
        for name in ("safe_gate", "lower_bound", "disable_recompute"):
            more.pop(name, None)
        normed = {"qk_norm": True} if use_qk_l2norm_in_kernel else {}
        if op == "ssd":
            return rwkv_jit.ssd_ref(*inputs[:5])[0]
        return getattr(rwkv_jit, f"{op}_ref")(*inputs, initial_state, **normed, **more)

    return run


_OF_KDA = ["chunk_kda safe_gate", "chunk_kda disable_recompute", "chunk_kda safe_gate disable_recompute"]


@pytest.mark.parametrize(("op", "kind"), [
    ("kda", "usual"), ("kda", "strong-gates"), ("kda", "slow-gates"), ("gated_delta_rule", "16-keys"),
    ("delta_rule", "usual"), ("simple_gla", "usual"), ("ssd", "usual"),
])  # fmt: skip
def test_peers_of_ops_made_of_others_compute_the_same(op, kind, monkeypatch):
    asked, called = [], []
    monkeypatch.setattr(peers, "_loaded", lambda *names: asked.append(names) or refer_to(op, called))
    case = Case(op, (2, 20, 32, 4, 3), torch.float32, "forward+backward", kind=kind).check()
    peer, *kept = peers._mamba(case) if op == "ssd" else peers._fla(case)
    assert [each.what for each in kept] == _OF_KDA * (op == "kda")
    errors = errors_of(case, [peer, *kept])
    assert all(0 < error < 4e-6 for error in errors)
    assert called
    module, name = asked[0]
    if op == "ssd":
        assert (peer.who, module, name) == (
            "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined",
        )  # fmt: skip
    else:
        assert (peer.who, module, name) == ("fla", f"fla.ops.{op}", f"chunk_{op}")
    assert peers._mamba(case._replace(op="kda")) == []


@pytest.mark.parametrize("entry", suites.entries_of(["family"]), ids=lambda entry: f"{entry.case}")
def test_the_suite_of_ops_made_of_others_is_measured_as_others_are(entry):
    """On small shapes; the float64 reference judges them, and what they read and write is counted by their inputs."""
    case = entry.case._replace(shape=(1, 16, 32, 8, 4))
    given = cases.given_for(case, "cpu")
    read = sum(x.nbytes for x in given.inputs)
    both = 2 * given.dy.nbytes + 3 * read
    assert cases.least_bytes(case) == (read + given.dy.nbytes if case.phase == "forward" else both)
    (row,) = measure.rows_of_cpu(Entry("family", case, ("auto",)))
    assert 0 < row["error"] < 1e-2
    heads = next(x.shape[2] for name, x in zip(cases.names_of(case.op), given.inputs, strict=True) if name in "kB")
    assert heads == {"gated_delta_rule": 16, "ssd": 1}.get(case.op, 32)
    for phase in ("decode", "update"):
        with pytest.raises(ValueError, match=f"--phase: expected one of forward, backward, .* for {case.op}"):
            case._replace(phase=phase).check()


def test_kinds_of_suites_are_for_ops_that_have_them():
    with pytest.raises(ValueError, match="--inputs: wkv7 has none that are 16-keys"):
        small("wkv7", kind="16-keys").check()
    with pytest.raises(ValueError, match="--inputs: 16-keys are for a multiple of as many heads, and not for 24"):
        Case("kda", (1, 2, 24, 4, 4), torch.float32, kind="16-keys").check()


@pytest.mark.parametrize(("head_size", "kind"), [(128, "usual"), (129, "usual"), (128, "strong")])
def test_fla_has_a_bound_where_it_holds(head_size, kind, monkeypatch):
    given = []
    monkeypatch.setattr(peers, "_loaded", lambda module, name: lambda *_, **options: given.append(options) or (0, 0))
    for peer in peers._fla(Case("wkv7", (1, 2, 1, head_size, head_size), torch.float32, kind=kind)):
        peer.run([], None, {})
    assert [("lower_bound" in options) for options in given] == [head_size == 128 and kind == "usual", False]


@pytest.mark.parametrize("op", ["wkv6", "wkv7", "gla", "linear_attention"])
def test_steps_of_fla_are_left_out_where_they_are_many(op):
    few, many = (Case(op, (1, tokens, 1, 8, 8), torch.bfloat16) for tokens in (1024, 1025))
    left_out = {each.what for each in peers._fla(few)} - {each.what for each in peers._fla(many)}
    assert left_out == {each.what for each in peers._fla(few) if "recurrent" in each.what}
    assert len(left_out) == 1


def test_steps_alone_are_beside_updates():
    """They write new states, all of which are held against float64 and against ours."""
    case = Case("wkv7", (3, 1, 2, 4, 4), torch.float32, "update", kind="bf16-states")
    assert peers._wind(case) == []
    assert peers._flash_rwkv(case._replace(op="wkv6")) == []

    def fla(*inputs, initial_state, output_final_state, scale):
        assert initial_state.shape == (3, 2, 4, 4)
        return reference.wkv7_ref(*inputs, initial_state, output_final_state, decay="log", state_layout="kv")

    (peer,) = peers._fla(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_loaded", lambda module, name: fla)
        own = measure.our_call(case, "auto", "update")
        (found,) = measure._errors(case, [peer], cases.given_for(case, "cpu"), [own])
    assert list(found["errors"]) == ["y", "state"]
    assert 0 < found["error"] < 2e-6
    assert 1e-4 < found["other_error"] < 4e-3  # ours rounds its states


def test_peer_of_wkv4_begins_with_an_empty_state(monkeypatch):
    def fla(w, u, k, v, state):
        assert state.shape == (len(k), 3, 1, 8)
        y, final = reference.wkv4_ref(w, u, k, v, state.squeeze(2), True)
        return y, final

    monkeypatch.setattr(peers, "_loaded", lambda module, name: fla)
    for phase in ("forward+backward", "decode"):
        (error,) = errors_of(small("wkv4", phase), peers._fla(small("wkv4")))
        assert error < 2e-6


@pytest.mark.parametrize("kind", ["usual", "strong"])
def test_peers_of_wind_get_what_they_ask_for(kind, monkeypatch, tmp_path):
    loads = []

    def loaded(module, name):
        assert module == "wind_rwkv.rwkv7"
        if name.startswith("load_"):
            return lambda *sizes: loads.append(((name, *sizes), Path(os.environ["TORCH_EXTENSIONS_DIR"]).name))
        return lambda *given: reference.wkv7_ref(*given, True, decay="raw")

    monkeypatch.setattr(peers, "_loaded", loaded)
    monkeypatch.setattr(peers, "_BUILDS", tmp_path)
    monkeypatch.setattr(peers, "_LARGEST_CHUNKED", 3)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "elsewhere")
    peers._load.cache_clear()
    case = Case("wkv7", (2, 6, 2, 4, 4), torch.float32, "forward+backward", kind=kind)
    assert all(error < 2e-6 for error in errors_of(case, peers._wind(case)))
    assert loads == [
        (("load_chunked_cuda", 4), "bench-load_chunked_cuda-4"),
        (("load_backstepping_longhead", 4, 4), "bench-load_backstepping_longhead-4-4"),
        (("load_backstepping_smallhead", 4), "bench-load_backstepping_smallhead-4"),
    ]  # fmt: skip
    monkeypatch.setattr(peers, "_LARGEST_CHUNKED", 4)
    assert [peer.what for peer in peers._wind(case)] == ["chunked_cuda"]
    assert peers._wind(Case("wkv7", (1, 16, 2, 4, 4), torch.float32, kind="packed")) == []


def test_kernels_of_trainers_are_built_for_a_head_size(monkeypatch, tmp_path):
    """By a name each, for the sources that a variable tells; they compute y and all gradients."""
    folder = tmp_path / "RWKV-v7" / "train_temp" / "cuda"
    folder.mkdir(parents=True)
    (folder / "rwkv7_clampw_v3.cpp").write_text("TORCH_LIBRARY(rwkv7_clampw_v3, m) {}")
    (folder / "rwkv7_clampw.cpp").write_text("TORCH_LIBRARY(rwkv7_clampw, m) {}")
    built = {}

    class Kernels:
        def forward(self, *given):
            *inputs, y, states, kept = given
            assert (states.shape, states.dtype, kept.dtype) == ((1, 2, 2, 64, 64), torch.float32, torch.float32)
            y.copy_(reference.wkv7_ref(*inputs, decay="sigmoid")[0])

        def backward(self, *given):
            inputs, dy, grads = given[:6], given[6], given[9:]
            leaves = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                y, _ = reference.wkv7_ref(*leaves, decay="sigmoid")
            for grad, found in zip(grads, torch.autograd.grad(y, leaves, dy), strict=True):
                grad.copy_(found)

    def load(name, sources, build_directory, is_python_module, extra_cuda_cflags):
        built[name] = Path(sources[0]).name, Path(sources[1]).read_text()
        assert {"-D_N_=64", "-D_CHUNK_LEN_=16"} < set(extra_cuda_cflags)
        assert (Path(build_directory), is_python_module) == (tmp_path / f"bench-{name}-64", False)
        monkeypatch.setattr(torch.ops, name, Kernels(), raising=False)

    monkeypatch.setattr(peers, "_loaded", lambda module, name: load)
    monkeypatch.setattr(peers, "_BUILDS", tmp_path)
    monkeypatch.setenv("RWKV_LM", str(tmp_path))
    peers._of_trainer.cache_clear()
    case = Case("wkv7", (1, 32, 2, 64, 64), torch.bfloat16, "forward+backward")
    found = [peer for peer in peers.peers_of(case) if peer.who == "rwkv_lm"]
    assert all(error < 6e-3 for error in errors_of(case, found))
    v3 = "rwkv7_clampw_v3_for_h100"
    assert built == {
        name: (f"{name}.cu", f"TORCH_LIBRARY({name}, m) {{}}") for name in ("rwkv7_clampw", v3, f"{v3}_alt")
    }  # fmt: skip
    for other in (
        case._replace(dtype=torch.float16), case._replace(phase="decode"), case._replace(kind="strong"),
        case._replace(op="wkv6"), case._replace(shape=(1, 32, 2, 96, 96)), case._replace(shape=(1, 32, 2, 64, 128)),
    ):  # fmt: skip
        assert peers._rwkv_lm(other) == []
    assert [peer.what for peer in peers._rwkv_lm(case._replace(shape=(1, 16, 2, 128, 128)))] == ["rwkv7_clampw128_v2"]
    peers._of_trainer.cache_clear()


@pytest.mark.parametrize("kind", ["usual", "strong-gates", "slow-gates"])
def test_cudnn_gets_what_its_kernels_take(kind, monkeypatch):
    """All sequences in one row, with where they begin; q and k of length 1, and gates in float32."""
    case = Case("kda", (2, 20, 3, 8, 8), torch.bfloat16, "forward+backward", kind=kind).check()

    def kda(q, k, v, g, beta, ends):
        assert (g.dtype, beta.dtype, ends.dtype, ends.tolist()) == (
            torch.float32,
            torch.float32,
            torch.int32,
            [0, 20, 40],
        )
        assert bool((torch.cat([q, k]).float().norm(dim=-1) - 1).abs().max() < 0.01)
        given = [x.unflatten(0, (2, 20)) for x in (q, k, v, g, beta)]
        return rwkv_jit.kda_ref(*given)[0].flatten(0, 1), None

    monkeypatch.setattr(peers, "_loaded", lambda module, name: kda)
    (peer,) = peers._cudnn(case)
    assert (peer.who, peer.what) == ("cudnn", "kimi_delta_attention")
    (error,) = errors_of(case, [peer])
    assert 0 < error < 2e-2
    assert peers._cudnn(case._replace(op="delta_rule")) == []


def test_gates_forget_within_tokens_or_remember():
    """Strong ones leave 2^-20 of a state after 20 tokens, slow ones a third of most channels after 16."""
    logs = {
        kind: cases.given_for(Case("kda", (1, 64, 8, 64, 64), torch.float32, kind=kind).check(), "cpu").inputs[3]
        for kind in ("strong-gates", "slow-gates")
    }
    assert all(bool((x.detach() < 0).all()) for x in logs.values())
    assert float(logs["strong-gates"].detach()[:, :20].sum(1).max()) < -14
    assert float(logs["slow-gates"].detach()[:, :16].sum(1).median()) > -2


def test_peer_of_flash_rwkv_gets_what_it_asks_for(monkeypatch):
    def wkv6(r, k, v, w, u, state):
        given = [x.view(2, 6, 2, 64) for x in (r, k, v, w)]
        return reference.wkv6_ref(*given, u.view(2, 64), state, True)

    monkeypatch.setattr(peers, "_loaded", lambda module, name: wkv6)
    case = Case("wkv6", (2, 6, 2, 64, 64), torch.float32)
    (peer,) = peers._flash_rwkv(case)
    assert errors_of(case, [peer])[0] < 2e-6
    assert peers._flash_rwkv(case._replace(phase="forward+backward")) == []
    with pytest.raises(ValueError, match="head size of 64, got 4"):
        peer.run(cases.given_for(small("wkv6"), "cpu").inputs, None, {})


def test_peers_are_those_of_installed_packages(monkeypatch):
    for installed, everyone in (
        ((), ["torch"]), (("fla",), ["fla", "fla", "torch"]),
        (("fla", "wind_rwkv", "flash_rwkv"), ["fla", "fla", "flash_rwkv", "torch"]),
    ):  # fmt: skip
        monkeypatch.setattr(peers, "find_spec", lambda package, installed=installed: package in installed or None)
        assert [each.who for each in peers.peers_of(small("wkv6"))] == everyone


# ---- processes ---------------------------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    what = asked.get("what")
    if what == "dies":
        os._exit(7)
    if what == "hangs":
        time.sleep(600)
    known = {"cannot": "ValueError: no", "counts": str(number), "breaks": None, "finds no memory": MEMORY}
    answer = known.get(what) if "peers" not in asked else [{"peers": asked["peers"], "copy": asked["copy_tb_per_s"]}]
    print(json.dumps([answer, what != "breaks"]), flush=True)
""".replace("MEMORY", "None if number else 'OutOfMemoryError: CUDA out of memory'")


@pytest.fixture
def children(monkeypatch):
    """Lets processes run another program, for peers of made-up names."""

    command = subprocess.Popen

    def use(*names, program=CHILD, op="wkv6", memory=64 << 30, who="fla"):
        monkeypatch.setattr(
            processes.subprocess, "Popen",
            lambda given, **more: command([sys.executable, "-c", program], **more),
        )  # fmt: skip
        found = [measure.Contestant(who, name, None, is_foreign=name != "of torch") for name in names]
        monkeypatch.setattr(peers, "peers_of", lambda case: found)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return Entry(None, small(op))

    return use


def test_what_ends_a_process_hides_nobody(children):
    entry = children("works", "dies", "cannot", "of torch", "works too")
    known = processes.obstacles([entry, entry])
    assert {what: why for (_, _, what), why in known.items()} == {
        "dies": "ended its process with 7", "cannot": "ValueError: no",
    }  # fmt: skip


def test_silence_ends_a_process(children, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 2)
    assert set(processes.obstacles([children("hangs", "works")]).values()) == {"did not end in 2 s"}


def test_what_is_not_tried_in_time_is_left_out(children, monkeypatch):
    monkeypatch.setattr(processes, "_MOST", 1)
    known = processes.obstacles([children("hangs", "works")], minutes=0.02)
    assert list(known.values()) == ["was not tried in 0.02 min"] * 2


def test_one_process_answers_until_it_ends(children):
    """Numbers are those of the questions that a process was asked before."""
    case = children().case

    def said(*names):
        found = []
        with processes.helping() as helper:
            for name in names:
                try:
                    found.append(helper.ask(case, {"what": name}, 60))
                except ChildProcessError as error:
                    found.append(str(error))
        return found

    died = "ended its process with 7"
    assert said("counts", "counts", "dies", "counts", "counts") == ["0", "1", died, "0", "1"]
    assert said("counts", "breaks", "counts") == ["0", None, "0"]  # it answered, and its GPU is lost


def test_answers_end_where_the_gpu_is_lost(monkeypatch):
    program = """
import json
from bench import processes
processes._found = lambda asked: print("noise") or asked["n"] + 1
processes._is_well = iter([True, False]).__next__
processes.answer()
"""
    asked = "".join(json.dumps({"n": n}) + "\n" for n in range(3))
    done = subprocess.run([sys.executable, "-c", program], input=asked, capture_output=True, text=True, cwd=ROOT)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[1, True], [2, False]]
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert processes._is_well()
    assert freed == [True]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: 1 / 0)
    assert not processes._is_well()


def test_who_finds_no_memory_beside_others_is_tried_alone(children, monkeypatch):
    monkeypatch.setattr(processes, "_MOST", 1)  # of one process: the second question is another one
    assert processes.obstacles([children("finds no memory")]) == {}
    known = processes.obstacles([children("finds no memory", program=CHILD.replace("None if number else ", ""))])
    assert list(known.values()) == ["OutOfMemoryError: CUDA out of memory"]


def test_those_with_gradients_are_tried_first(children, monkeypatch):
    """They tune what a forward alone takes, too, which is not tried again where that went well."""
    asked, entry = [], children("works")
    monkeypatch.setattr(processes.Helper, "ask", lambda self, case, *_: asked.append(case.phase))
    monkeypatch.setattr(processes, "_MOST", 1)
    case = entry.case
    processes.obstacles(
        [Entry(None, case._replace(phase=phase)) for phase in ("forward", "forward+backward", "decode")]
    )
    assert asked == ["forward+backward", "decode"]
    asked.clear()
    monkeypatch.setattr(processes.Helper, "ask", lambda self, case, *_: asked.append(case.phase) or "no backward")
    known = processes.obstacles([Entry(None, case._replace(phase=phase)) for phase in ("forward", "forward+backward")])
    assert asked == ["forward+backward", "forward"]
    assert list(known.values()) == ["no backward"] * 2


def test_a_case_is_measured_with_those_that_can(children):
    entry = children("works", "dies")
    with processes.helping() as helper:
        measured, skipped = processes.rows_of(helper, entry, 4.0, True, {(entry.case, "fla", "dies"): "ended"})
        assert measured == {"peers": [["fla", "works"]], "copy": 4.0}
        assert (skipped["what"], skipped["skipped"]) == ("dies", "ended")
        assert processes.rows_of(helper, entry, 4.0, False, {}) == [{"peers": [], "copy": 4.0}]
        helper.end()
        dying = CHILD.replace("if what", "if asked.get('peers')").replace('== "dies"', "")
        entry = children("works", program=dying)
        measured, skipped = processes.rows_of(helper, entry, 4.0, True, {})  # ours stays
        assert measured == {"peers": [], "copy": 4.0}
        assert (skipped["what"], skipped["skipped"]) == ("works", "one of these peers: ended its process with 7")
        helper.end()
        children(program="import sys; print('x', file=sys.stderr); sys.exit('CUDA error: lost')")
        with pytest.raises(ChildProcessError, match="^ended its process with 1: CUDA error: lost$"):
            processes.rows_of(helper, entry, 4.0, False, {})


@pytest.mark.parametrize(("who", "goes_on"), [("fla", True), ("wind_rwkv", False)])
def test_kernels_of_one_head_size_have_a_process_of_their_own(who, goes_on, children):
    entry = children("works", who=who)
    with processes.helping() as helper:
        processes.rows_of(helper, entry, 4.0, True, {})
        assert (helper._process is not None) == goes_on
    known = processes.obstacles([children("counts", "counts too", who=who, memory=1)])
    assert list(known.values()) == ["0"]


def test_tuners_time_in_turns_and_briefly(monkeypatch, tmp_path):
    turn, seen = str(tmp_path / "turn"), []

    def is_free():
        try:
            FileLock(turn).acquire(timeout=0).lock.release()
        except Timeout:
            return False
        return True

    def do_bench(call, warmup, rep, quantiles):
        call()
        return warmup, rep, quantiles

    testing = SimpleNamespace(do_bench=do_bench)
    processes._time_in_turns(testing, turn)
    assert testing.do_bench(lambda: seen.append(is_free()), quantiles=(0.5, 0.2)) == (5, 25, (0.5, 0.2))
    assert testing.do_bench(lambda: None, rep=7, quantiles=()) == (5, 7, ())
    assert seen == [False]
    assert is_free()
    with pytest.raises(ZeroDivisionError):
        testing.do_bench(lambda: 1 / 0, quantiles=())
    monkeypatch.setattr(processes, "_LONGEST_TURN", 0.01)
    with FileLock(turn):  # of one that hangs
        assert testing.do_bench(lambda: seen.append(is_free()), quantiles=(1,)) == (5, 25, (1,))
    assert seen == [False, False]


def test_what_another_process_tunes_is_waited_for(tmp_path):
    known, running, most = {}, [], []

    class Tuner:
        def __init__(self, name):
            self.base_fn = SimpleNamespace(__module__="fla", __name__=name)

        def check_disk_cache(self, key, choices, tune):
            if (self.base_fn.__name__, key) in known:
                return True
            tune()
            known[self.base_fn.__name__, key] = True
            return False

    def tune():
        running.append(True)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()

    processes._tune_once(Tuner, str(tmp_path / "turn"))
    with ThreadPoolExecutor(6) as pool:
        same = [pool.submit(Tuner("a").check_disk_cache, (64, torch.float32), ["x"], tune) for _ in range(3)]
        others = [pool.submit(Tuner(name).check_disk_cache, (64, torch.float32), ["x"], tune) for name in "bcd"]
    assert sorted(each.result() for each in same) == [False, True, True]
    assert [each.result() for each in others] == [False] * 3
    assert len(most) == 4
    assert max(most) > 1


def test_choices_are_compiled_together_before_the_first_is_timed():
    done, together = [], []

    class Tuner:
        def __init__(self, broken=None):
            self.fn = SimpleNamespace(run=self.run)
            self.broken = broken

        def prune_configs(self, given):
            assert given == {"grid": (1,), "warmup": False}
            return choices

        def run(self, *given, grid, warmup, size):
            if size == self.broken:
                raise ValueError
            done.append(("compiled" if warmup else "run", size, bool(together)))

        def _bench(self, *given, config, **more):
            done.append(("timed", config.all_kwargs()["size"], given))
            return [0.5]

    @contextmanager
    def mode(pool, ignore_errors):
        assert ignore_errors
        together.append(pool)
        yield
        together.pop()

    choices = [SimpleNamespace(all_kwargs=lambda size=size: {"size": size}) for size in (1, 2)]
    processes._compile_at_once(Tuner, mode)
    tuner = Tuner()
    assert [tuner._bench("x", config=choice, grid=(1,), warmup=False) for choice in choices] == [[0.5], [0.5]]
    timed = [("timed", 1, ("x",)), ("timed", 2, ("x",))]
    assert done == [("compiled", 1, True), ("compiled", 2, True), *timed]
    done.clear()
    assert Tuner(broken=1)._bench("x", config=choices[0], grid=(1,), warmup=False) == [0.5]
    assert done == timed[:1]


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
    monkeypatch.setattr(timing, "copy_tb_per_s", lambda: 4.25)
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


def test_a_case_is_kept_as_it_ends(gpu, program, tmp_path):
    """An interrupt, or what ends the whole process, costs the others alone."""
    gpu.interrupted = "wkv4"
    code, printed, _ = program("ops", *(f"--suite={name}" for name in ("gla", "wkv4", "timex")), "--record", "--json")
    assert code == 0
    rows = json.loads(printed)["rows"]
    stopped = {(name, "interrupted") for name in ("wkv4", "timex")}
    assert {(row["suite"], row["skipped"]) for row in rows} == {("gla", None), *stopped}
    assert {row["suite"] for row in record.read(tmp_path / "bench.json")["rows"]} == {"gla"}
    gpu.interrupted = ...
    assert program("ops", "--suite", "wkv4", "--suite", "timex", "--record")[0] == 0
    assert {row["suite"] for row in record.read(tmp_path / "bench.json")["rows"]} == {"gla", "wkv4", "timex"}


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
        (["history", "--op", "gla"], "argument --op: invalid choice: 'gla' (choose from 'wkv5', 'timex')"),
        (["compare", "/nowhere/a.json", "b"], "No such file or directory: '/nowhere/a.json'"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(gpu, program, arguments, message):
    code, printed, said = program(*arguments)
    assert (code, printed) == (2, "")
    assert message in said.replace("choose from wkv5, timex", "choose from 'wkv5', 'timex'")
    assert gpu.entries == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--suite", "gla"], "--suite: its shapes are for a GPU, and torch sees none; expected --shape"),
        (["ops", "--suite", "gla", "--record"], "--record: keeps what was measured on a GPU, and there is none"),
        (["service", "--record"], "needs a GPU, CuPy and NVRTC"),
        (["history"], "needs a GPU, CuPy and NVRTC"),
    ],
)
def test_what_needs_a_gpu_says_so(program, arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(service, "run", lambda: pytest.fail("it was measured"))
    code, printed, said = program(*arguments)
    assert (code, printed) == (2, "")
    assert message in said


def test_what_is_stale_is_told(program):
    code, printed, said = program("stale", "--json")
    assert (code, said) == (0, "")
    found = json.loads(printed)["suites"]
    recorded = record.read(record.FILE)
    assert sum(each["rows"] for each in found) == len(recorded["rows"]) + len(recorded["training"])


# ---- the service -------------------------------------------------------------------------------------------------


@pytest.fixture
def costs(gpu, monkeypatch):
    """What the service costs where there is a GPU, but measured in no time."""

    def child(program, *arguments, environment=None):
        return [0.5, 31.25] if program == service._IMPORT else [500.0, *[150.0] * 7]

    wkv7 = {"compiled_ms": 1000.4, "from_disk_ms": 4.5, "call_us": 80.2}
    triton = {"compiled_ms": 41000.4, "from_disk_ms": 77.2, "call_us": 12.3}
    for name, found in {
        "_child": child, "_start_together": lambda count: [("compiled", 0.625)] + [("disk", 0.75)] * (count - 1),
        "host_us": lambda: {"wkv7": 10.5}, "first_calls": lambda: wkv7, "one_line_kernels": lambda: {"Triton": triton},
    }.items():  # fmt: skip
        monkeypatch.setattr(service, name, found)
    times = [500.0, *[150.0] * 7]
    return {
        "env": ENVIRONMENT, "commit": record.commit(), "import_ms": 0.5, "op_import_ms": 31.25, "from_disk_us": times,
        "peers_from_disk_us": {"CuPy RawModule": times, "Triton": times},
        "together": {"processes": 16, "compiled": 1, "alone_s": 0.625, "slowest_s": 0.75}, "host_us": {"wkv7": 10.5},
        "first_call": wkv7, "one_line": {"Triton": triton},
    }  # fmt: skip


def test_service_is_measured_shown_and_kept(costs, program, tmp_path):
    code, printed, said = program("service")
    assert (code, said) == (0, "")
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    assert ["rwkv_jit", "500", "150"] in lines
    assert ["wkv7", "10.5"] in lines
    assert lines[-2:] == [
        ["wkv7,", "forward", "and", "backward", "1000", "4.5", "80.2"],
        ["a", "kernel", "of", "one", "line,", "Triton", "41000", "77.2", "12.3"],
    ]
    assert program("ops", "--suite", "wkv4", "--record")[0] == 0
    assert json.loads(program("service", "--record", "--json")[1]) == costs
    assert record.read(tmp_path / "bench.json")["service"] == costs


def test_first_calls_are_one_that_compiles_and_some_from_disk(monkeypatch):
    program = """
import os, pathlib
cache = pathlib.Path(os.environ["SOME_DIRECTORY"])
cache.mkdir(exist_ok=True)
seen = len(list(cache.iterdir()))
(cache / str(seen)).touch()
print("noise")
PREPARE
LOAD
"""
    monkeypatch.setattr(service, "_FIRST_CALL", program)
    lines = "times = [[700, 1], [4.5, 30], [3.5, 10], [9, 20]]", "print(times[seen])"
    monkeypatch.setattr(service, "_WKV7", ("SOME_DIRECTORY", *lines))
    assert service.first_calls() == {"compiled_ms": 700.0, "from_disk_ms": 4.5, "call_us": 20.0}
    monkeypatch.setattr(service, "_FIRST_CALL", "import os, sys\nprint('no room', file=sys.stderr)\nos.abort()")
    with pytest.raises(RwkvJitError, match="ended with exit code -6: no room"):
        service.first_calls()


def test_kernels_of_one_line_are_called_by_everyone_who_is_there(monkeypatch):
    """The program that measures, on the CPU."""
    on_cpu = "torch.cuda.synchronize = lambda: None\n"
    there, wrong, missing = (
        ("SOME_DIRECTORY", on_cpu + line, f"def call():\n    x.add_({n})\n")
        for line, n in (("", 1), ("", 2), ("import of_nobody\n", 1))
    )
    monkeypatch.setattr(service, "REPEATS", 1)
    monkeypatch.setattr(service, "_ADD_ONE", service._ADD_ONE.replace("cuda", "cpu"))
    monkeypatch.setattr(service, "_LOADERS", {"there": there, "wrong": wrong, "missing": missing})
    found = service.one_line_kernels()
    assert list(found) == ["there"]
    assert 0.1 < found["there"]["call_us"] < 1e3 * found["there"]["from_disk_ms"]  # the first of them is slower


def test_processes_of_the_service_say_nothing_of_their_caches(monkeypatch):
    """Their caches are temporary: what they would say of them is wrong a second later."""
    log = "import json, os\nprint('ready', flush=True)\ninput()\nprint(json.dumps([os.environ['RWKVJIT_LOG'], 0.0]))"
    monkeypatch.setattr(service, "_TOGETHER", log)
    assert service._start_together(2) == [("error", 0.0)] * 2
    assert service._child("import json, os\nprint(json.dumps(os.environ['RWKVJIT_LOG']))") == "error"
