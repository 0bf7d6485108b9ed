"""`rwkv-jit bench` without a GPU: shapes, inputs, calls, figures, rows and the command; and turns of the folder's."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import rwkv_jit
from bench import __main__ as program
from bench import cases, layers, measure, timing
from rwkv_jit.call import rule, tensors
from rwkv_jit.desk import bench, figures, inputs, versions
from rwkv_jit.desk.inputs import REFERENCES, Case
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.plain import reference
from rwkv_jit.schedules import table
from rwkv_jit.schedules.table import ALL as OPS
from rwkv_jit.schedules.table import DERIVED

SMALL = (2, 6, 2, 4, 3)
OPTIONAL = ("A_log", "dt_bias", "D", "z")
ALL = [(op, phase) for op in inputs.OPS for phase in inputs.phases_of(op)]


def small(op, phase="forward", dtype=torch.float32, kind=None):
    batch, tokens, *sizes = (1, 40, 2, 4, 4) if kind == "packed" else (5, 6, 2, 4, 3 if OPS[op].has_heads else 4)
    given = op, (batch, 1 if phase in inputs.OF_ONE_TOKEN else tokens, *sizes), dtype, phase
    return (Case(*given) if kind is None else cases.Case(*given, kind=kind)).check()


def errors(case):
    (found,) = figures.errors_of(case, ["auto"], "cpu").values()
    return found


# ---- shapes and inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "text", "shape", "shown"),
    [
        ("wkv7", "8,4096,16,256", (8, 4096, 16, 256, 256), [8, 4096, 16, 256, 256]),
        ("gla", "32,2048,4,256,512", (32, 2048, 4, 256, 512), [32, 2048, 4, 256, 512]),
        ("timex", "32,768,100", (32, 100, 1, 768, 768), [32, 768, 100]),
        ("wkv4", "8,100,4096", (8, 100, 1, 4096, 4096), [8, 100, 4096]),
        ("wkv4", "8,100,64,64", (8, 100, 64, 64, 64), [8, 100, 4096]),
    ],
)
def test_shapes_of_a_command_line(op, text, shape, shown):
    assert inputs.shape_of(op, text) == shape
    assert Case(op, shape, torch.float32).shown == shown
    assert cases.Case(op, shape, torch.float32).shown == shown


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "wkv7", "gla"])
def test_strong_decays_are_those_of_all_heads_or_of_one(op):
    factors = {}
    for kind in ("strong", "one-strong"):
        case = cases.Case(op, (4, 8, 3, 5, 5), torch.float32, kind=kind).check()
        w = cases.given_for(case, "cpu").inputs[OPS[op].names.index("w")]
        factors[kind] = reference.decay_factor(w, case.decay).detach()
    assert factors["strong"].max() <= 0.14
    few = factors["one-strong"] < 0.14
    heads = few.all(-1) if op == "wkv5" else few.all(-1).all(1)  # wkv5 has the decays of a head for the whole batch
    assert heads.nonzero().tolist() == [[0] if op == "wkv5" else [0, 0]]


def test_packed_inputs_are_sequences_of_unequal_lengths():
    for tokens in (16, 100, 32768):
        ends = cases.ends_of(cases.Case("wkv6", (1, tokens, 1, 4, 4), torch.float32, kind="packed"), "cpu")
        assert (int(ends[0]), int(ends[-1]), len(ends)) == (0, tokens, 17)
        assert bool((ends.diff() > 0).all())
    assert len(set(ends.diff().tolist())) > 10


# ---- calls, errors and bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "phase"), ALL)
def test_every_phase_agrees_with_float64(op, phase):
    names = (
        [f"d{name}" for name in OPS[op].public_names if name not in OPTIONAL] if "backward" in phase else ["y", "state"]
    )
    found = errors(small(op, phase))
    assert list(found) == names[: None if phase not in ("forward",) else 1]
    assert all(0 < error < 5e-6 for error in found.values()), found


@pytest.mark.parametrize("kind", [kind for kind in cases.KINDS if kind != "usual"])
def test_every_kind_of_inputs_agrees_with_float64(kind):
    phases = ["update"] if kind.endswith("states") else ["forward", "forward+backward"]
    ops = [op for op in ("wkv7", "gla") if f"{OPS[op].state_layout}-" not in kind]
    for case in (small(op, phase, kind=kind) for op in ops for phase in phases):
        own = [measure.our_call(case, "auto", "auto")]
        found, _ = measure._errors(case, own * 2, cases.given_for(case, "cpu"), [])
        limit = 5e-3 if "bf16" in kind else 5e-6
        assert found["errors"], case
        assert all(0 < error < limit for error in found["errors"].values()), (case, found)


def test_a_wrong_result_is_an_error(monkeypatch):
    real = inputs.OPS["wkv6"]
    monkeypatch.setitem(inputs.OPS, "wkv6", lambda *x, **more: (1.01 * real(*x, **more)[0], None))
    assert errors(small("wkv6")) == {"y": pytest.approx(1e-2, rel=1e-3)}


@pytest.mark.parametrize(("op", "phase"), ALL)
def test_least_bytes_are_what_the_tensors_hold(op, phase):
    if op in DERIVED:  # whose calls have more inputs there
        return
    case = small(op, phase, torch.bfloat16)
    given = inputs.given_for(case, device="cpu")
    x, y = sum(x.nbytes for x in given.inputs), given.dys[0].nbytes
    state = 0 if op == "timex" else inputs.state_of(op, case.shape, device="cpu").nbytes
    wanted = {
        "forward": x + y, "backward": 2 * x + y, "forward+backward": 3 * x + 2 * y, "prefill": x + y + state,
        **dict.fromkeys(("decode", "update"), x + y + 2 * state),
    }  # fmt: skip
    in_folder = cases.Case(op, case.shape, case.dtype, phase)
    assert cases.floor_ms(in_folder, cases.given_for(in_folder, "cpu"), 1e-9) == pytest.approx(wanted[phase])


@pytest.mark.parametrize("work", layers.WORKS)
def test_works_of_a_layer_agree_with_plain_torch(work):
    passes = ("forward+backward",) if work == "linear_cross_entropy" else ("forward", "backward")
    for phase in passes:
        rows = layers.rows_of(layers.Work(work, (2, 3, 128), torch.float32, phase), "cpu")
        assert [row["skipped"] for row in rows] == [None] * len(rows)
        whole = work.startswith("RWKV7")
        who = {"torch"} if "products" in work else {"rwkv_jit"} if whole else {"rwkv_jit", "torch"}
        assert {row["who"] for row in rows} == who
        assert all(row["error"] is None if whole else row["error"] < 1e-5 for row in rows), rows


@pytest.mark.parametrize("name", ["norm_shift", "causal_conv1d", "gated_norm", "activate"])
def test_works_of_a_layer_call_their_function_once(name, monkeypatch):
    function, called = getattr(rwkv_jit, name), []
    monkeypatch.setattr(rwkv_jit, name, lambda *x, **options: called.append(name) or function(*x, **options))
    (work,) = [work for work in layers.WORKS if work.startswith(name)]
    case = layers.Work(work, (2, 3, 128), torch.float32, "forward")
    given = layers.calls_for(case, "cpu")
    called.clear()
    results = inputs.call_of(given.functions["rwkv_jit", "kernels"], given, "forward")()
    assert called == [name]
    assert len(results) == {"norm_shift": 7}.get(name, 1)


# ---- rows on a GPU that is made up -------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors stand in for those of a GPU, whose events count calls."""
    now = SimpleNamespace(ms=0.0)

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = now.ms

        def query(self):
            return False

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    cuda = {
        "Event": Event, "_sleep": lambda cycles: None, "synchronize": lambda: None, "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 1 << 20, "reset_peak_memory_stats": lambda: None, "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=8),
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **more: empty(*sizes, **more))
    monkeypatch.setattr(
        figures, "errors_of", lambda case, *_: {("rwkv_jit", "auto"): {"y": 1e-3}, ("torch", "nan"): {"y": math.nan}}
    )

    def answer(ms, error=None):
        def function(*inputs):
            now.ms += ms
            if error is not None:
                raise error
            return torch.ones(3)

        return function

    who = {
        ("rwkv_jit", "auto"): answer(2.0), ("rwkv_jit", "chunked"): answer(0, UnsupportedConfigError("no chunks")),
        ("torch", "loop"): answer(8.0), ("torch", "large"): answer(0, RuntimeError("no memory\nat all")),
        ("torch", "nan"): answer(1.0),
    }  # fmt: skip
    given = inputs.Given(who, [torch.ones(3)], [torch.ones(3)], {})
    monkeypatch.setattr(inputs, "given_for", lambda *_: given)
    return monkeypatch


def test_rows_have_the_figures_of_everyone_who_can(gpu):
    rows = bench.rows_of(small("wkv6"), None, "cuda")
    assert [(row["who"], row["what"], row["median_ms"], row["skipped"]) for row in rows] == [
        ("rwkv_jit", "auto", 2.0, None), ("torch", "loop", 8.0, None),
        ("torch", "large", None, "RuntimeError: no memory"),
        ("torch", "nan", None, "ValueError: its results are not finite, so it has no speed"),
    ]  # fmt: skip
    ours = rows[0]
    assert ours["error"] == 1e-3
    assert ours["peak_mib"] > 1
    assert ours["host_us"] > 0
    assert ours["runs"] >= 7
    named = bench.rows_of(small("wkv6"), ["auto", "chunked"], "cuda")  # what is named says why it is left out
    assert ("chunked", "UnsupportedConfigError: no chunks") in [(row["what"], row["skipped"]) for row in named]


def test_turns_take_the_sets_one_after_another(gpu):
    seen = []
    turns = timing.Turns([lambda n=n: seen.append(n) for n in range(3)], in_graph=False)
    seen.clear()
    for _ in range(5):
        turns.ms()
    assert seen == [0, 1, 2, 0, 1]
    assert not turns.in_graph
    assert turns.calls_us is None


def test_calls_of_a_graph_are_timed_without_it_too(gpu):
    """A whole number of rounds over the sets, at least as many calls as are wanted."""
    seen, captured = [], []
    graph = SimpleNamespace(replay=lambda: None)
    gpu.setattr(timing, "_captured", lambda calls, count: captured.append(count) or graph)
    gpu.setattr(timing.timeit, "repeat", lambda row, number, repeat: [row() or 6.0, row() or 3.0])
    gpu.setattr(timing, "host_us", lambda *_: 1.0)
    turns = timing.Turns([lambda n=n: seen.append(n) for n in range(3)], timing.FEW)
    assert (captured, turns.in_graph, turns.calls_us) == ([6], True, 5e5)
    assert seen == [0, 1, 2] * 4


def test_the_folder_judges_the_call_that_was_timed():
    """Its first tokens by float64, and all of them by another backend of ours."""
    case = cases.Case("wkv6", (2, 20, 2, 4, 4), torch.float32, "forward+backward")

    def contestant(what, change=lambda y: y):
        def run(inputs, state, more):
            y, final = REFERENCES["wkv6"](*inputs, **more)
            return change(y), final

        return measure.Contestant("rwkv_jit", what, run)

    late = contestant("late", lambda y: torch.cat([y[:, :16], 2 * y[:, 16:]], 1))
    own = [late, contestant("recurrent")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "MOST_TOKENS", 16)
        found, _ = measure._errors(case, own, cases.given_for(case, "cpu"), own)
    assert list(found["errors"]) == ["y", "dr", "dk", "dv", "dw", "du"]
    assert 0 < found["error"] < 5e-6
    assert found["other"] == "recurrent"
    assert found["other_error"] > 0.1


# ---- backends ----------------------------------------------------------------------------------------------------

BOTH = "forward+backward"


@pytest.mark.parametrize(
    ("op", "shape", "phase", "arch", "backends"),
    [
        ("wkv7", (8, 4096, 64, 64, 64), BOTH, "sm_90", ("chunked", "recurrent", "chunked", "split")),
        ("wkv7", (1, 32768, 16, 64, 64), BOTH, "sm_90", ("split", "recurrent", "chunked", "split")),
        ("wkv7", (1, 1, 32, 64, 64), "decode", "sm_90", ("update", "recurrent", "chunked", None)),
        ("wkv7", (1, 1, 32, 64, 64), "update", "sm_90", ("update",) * 4),
        ("kda", (1, 1, 32, 128, 128), "decode", "sm_90", ("update", "recurrent", "chunked", None)),
        *[("kda", (8, 4, 32, 128, 128), phase, "sm_90", (phase,) * 4) for phase in ("replay", "verify", "varlen")],
        ("gla", (8, 4096, 4, 512, 512), "forward", "sm_80", ("split", "recurrent", None, "split")),
        ("kda", (8, 4096, 32, 128, 128), BOTH, "sm_90", ("dedicated", "recurrent", "chunked", "split")),
        ("kda", (8, 4096, 32, 128, 128), BOTH, "sm_80", ("chunked", "recurrent", "chunked", "split")),
        ("kda", (1, 4096, 4, 128, 128), BOTH, "sm_90", ("split", "recurrent", "chunked", "split")),
        ("ssd", (8, 4096, 32, 128, 64), "forward", "sm_90", ("dedicated", "recurrent", "chunked", "split")),
        ("hgrn2", (8, 4096, 32, 128, 128), "forward", "sm_90", ("chunked", "recurrent", "chunked", "split")),
        ("gated_delta_rule2", (8, 4096, 32, 128, 128), BOTH, "sm_90", ("chunked", "recurrent", "chunked", "split")),
        ("wkv4", (1, 4096, 1, 2048, 2048), "forward", "sm_90", ("split", "recurrent", None, "split")),
        ("timex", (32, 768, 1, 768, 768), BOTH, "sm_90", ("tiles", None, None, None)),
    ],
)
def test_backends_are_those_that_the_rule_of_the_call_chooses(op, shape, phase, arch, backends, monkeypatch):
    monkeypatch.setattr(tensors, "gpu", lambda device: Gpu(arch, (), 132))
    monkeypatch.setattr(rule, "known", lambda device: rule.Known((), lambda place: True))
    case = cases.Case(op, shape, torch.bfloat16, phase)
    given = cases.given_for(case, "meta")
    for asked, backend in zip(("auto", "recurrent", "chunked", "split"), backends, strict=True):
        if case.is_pooled or asked in OPS[op].backends:
            try:
                found = measure.backend_of(case, given, asked)
            except UnsupportedConfigError:
                found = None
            assert found == backend, asked


# ---- the command -------------------------------------------------------------------------------------------------

ENVIRONMENT = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}


@pytest.fixture
def measured(monkeypatch):
    """What is named is noted; nothing is measured."""
    asked = []

    def rows_of(case, named, device):
        asked.append((case, named, device))
        if case.op == "gla":
            raise RuntimeError("CUDA out of memory")
        if len(asked) == 4:
            raise KeyboardInterrupt
        figures = {"median_ms": 0.5, "low_ms": 0.25, "high_ms": 0.75, "host_us": 612.3, "error": 2e-3}
        return [bench.row_of(case) | figures | {"errors": {"y": 1e-3, "dr": 2e-3}}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(versions, "is_available", lambda: True)
    monkeypatch.setattr(versions, "env_report", lambda: ENVIRONMENT | {"cache": "/a/cache"})
    monkeypatch.setattr(bench, "rows_of", rows_of)
    return asked


def test_command_measures_what_it_names_and_shows_it(measured, run):
    options = ("--op", "wkv6", "--shape", "2,32,4,16", "--dtype", "fp16", "--phase", "backward", "--backend", "auto")
    code, printed, said = run("bench", *options)
    assert (code, said) == (0, "measuring 1 of 1: wkv6 backward 2,32,4,16,16\n")
    assert measured == [(Case("wkv6", (2, 32, 4, 16, 16), torch.float16, "backward"), ["auto"], "cuda")]
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[:6] == [
        "a GPU, torch 2.13, NVRTC 12.9", "", "wkv6 (2, 32, 4, 16, 16) float16, backward",
        "by ms quartiles host us peak MiB error", "rwkv_jit - 0.5000 0.2500 to 0.7500 612.3 † - 2.0e-03",
        "errors of rwkv_jit -: y 1.0e-03, dr 2.0e-03",
    ]  # fmt: skip
    found = json.loads(run("bench", *options, "--json")[1])
    assert (found["device"], found["env"]) == ("cuda", ENVIRONMENT)


def test_a_case_that_fails_hides_no_other_and_an_interrupt_none_before_it(measured, run):
    ops = [word for op in ("gla", "wkv6", "wkv7", "wkv5", "timex") for word in ("--op", op)]
    code, printed, _ = run("bench", *ops, "--shape", "1,32,1,8", "--phase", "forward", "--json")
    assert code == 0
    skipped = [row["skipped"] for row in json.loads(printed)["rows"]]
    assert skipped == ["RuntimeError: CUDA out of memory", None, None, "interrupted", "interrupted"]


@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        (["--backend", "tiles"], {"timex"}),
        (["--inputs", "one-strong", "--phase", "forward"], {"wkv5", "wkv6", "wkv7", "gla"}),
        (["--inputs", "packed"], {"wkv5", "wkv6", "wkv7", "gla", "linear_attention"}),
        (["--phase", "decode"], {*table.OPS} - {"timex"}),
        (["--phase", "update", "--inputs", "vk-states"], {"gla", "linear_attention"}),
    ],
)
def test_ops_are_those_that_can(arguments, ops):
    asked = program._parser().parse_args(["ops", *arguments])
    assert {entry.case.op for entry in program._entries(asked)} & {*table.OPS} == ops


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "timex", "--phase", "decode"], "one of forward, backward, forward+backward for timex, got decode"),
        (["--op", "wkv6", "--phase", "update", "--backend", "recurrent"], "one of auto for wkv6, got recurrent"),
        (["--op", "wkv6", "--backend", "tiles"], "one of auto, recurrent, chunked, split for wkv6, got tiles"),
        (["--op", "wkv7", "--shape", "1,2"], "positive numbers B,T,H,N or B,T,H,K,V for wkv7, got '1,2'"),
        (["--op", "wkv4", "--shape", "8,4096,0"], "numbers B,T,C or B,T,H,N for wkv4, got '8,4096,0'"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(measured, run, arguments, message):
    code, printed, said = run("bench", *arguments)
    assert (code, printed) == (2, "")
    assert message in said
    assert measured == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--op", "wkv6", "--inputs", "bf16-states"], "bf16-states are only for updates, not for forward"),
        (["ops", "--op", "timex", "--inputs", "strong"], "--inputs: timex has none that are strong"),
        (["ops", "--op", "wkv6", "--inputs", "packed", "--shape", "2,32,1,8"], "packed ones are a batch of 1 with 16"),
        (["layers", "--shape", "1,2,3"], "B,T,C with C a multiple of 64, got '1,2,3'"),
        (["layers", "--shape", "a,b,64"], "B,T,C with C a multiple of 64, got 'a,b,64'"),
        (["host", "--shape", "1,2,3"], "expected positive numbers B,T,H,N, got '1,2,3'"),
    ],
)
def test_arguments_of_the_folder_that_do_not_go_together(measured, capsys, arguments, message):
    assert program.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert measured == []


def test_layers_are_measured_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(figures, "cpu_ms", lambda call: [3.0, 1.0, 2.0] if call() is not None else [])
    assert program.main(["layers", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["op"] for row in rows} == {*layers.WORKS}
    assert all(row["median_ms"] == 2.0 for row in rows)


def test_known_calls_are_measured_on_the_cpu(capsys, monkeypatch):
    compiled = []  # those that were, and each call of them

    def compile(function):
        place = len(compiled)
        compiled.append(0)

        def run(*x):
            compiled[place] += 1
            return function(*x)

        return run

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(figures, "cpu_ms", lambda call: [3.0, 1.0, 2.0] if call() is not None else [])
    assert program.main(["host", "--json", "--eager"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    every = {(op, phase) for op in OPS for phase in ("forward", "forward+backward", "update")}
    every -= {("wkv4", "update"), *((op, phase) for op, phase in every if op == "timex")}
    assert every < {(row["call"], row["phase"]) for row in rows}
    assert {"norm_shift, 6 mixes", "causal_conv1d", "gated_norm", "prepare_keys"} < {row["call"] for row in rows}
    assert all(row["eager_ms"] == 2.0 and row["compiled_ms"] is row["skipped"] is None for row in rows)
    assert program.main(["host", "--json", "--op", "kda", "--op", "activate", "--shape", "2,3,2,32"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"][2:]  # behind those of torch
    assert [row["call"] for row in rows] == ["kda"] * 3 + ["activate"] * 2
    assert [row["compiled_ms"] for row in rows] == [2.0] * 5
    assert compiled == [3] * 5  # twice before the timed one


def test_what_the_machine_cannot_do_is_said(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, said = run("bench", "--backend", "chunked", "--op", "wkv6")
    assert (code, said) == (
        2,
        "rwkv-jit bench: --backend: torch sees no GPU; expected one of auto for wkv6, got chunked\n",
    )
    assert run("bench", "--backend", "tiles")[0] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(versions, "is_available", lambda: False)
    message = "needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing"
    assert run("bench", "--op", "wkv6") == (2, "", f"rwkv-jit bench: bench: {message}\n")


def test_without_a_gpu_small_shapes_are_measured_on_the_cpu(run, monkeypatch):
    torch.manual_seed(0)  # what tokens give A of ssd cancels by chance, and its gradient is nearly nothing
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(figures, "cpu_ms", lambda call: [3.0, 1.0, 2.0] if call() is not None else [])
    code, printed, said = run("bench", "--json")
    assert (code, said.count("measuring ")) == (0, 2 * len(inputs.OPS))
    found = json.loads(printed)
    assert found["device"] == "cpu"
    assert [(row["op"], row["phase"]) for row in found["rows"]] == [
        (op, phase) for op in sorted(inputs.OPS) for phase in inputs.USUAL_PHASES
    ]
    assert all((row["median_ms"], row["shape"][0], row["skipped"]) == (2.0, 1, None) for row in found["rows"])
    assert all(0 < row["error"] < 6e-3 for row in found["rows"])
    text = run("bench", "--op", "timex", "--shape", "2,3,20", "--backend", "fft", "--phase", "forward")[1]
    assert text.startswith(bench.CPU_NOTE)
    assert "\ntimex (2, 3, 20) bfloat16, forward\n" in text


def test_names_of_the_command_line_are_those_of_the_bench():
    """They are listed apart, so that --help need not load torch."""
    from rwkv_jit.desk import cli

    assert sorted(cli._OPS) == sorted(inputs.OPS) == sorted(OPS)
    assert (cli._PHASES, list(cli._DTYPES)) == (inputs.PHASES, list(inputs.DTYPES))
    named = dict.fromkeys(name for op in ("wkv6", "wkv4", "timex") for name in inputs.backends_of(op))
    assert list(cli._BACKENDS) == list(named)
