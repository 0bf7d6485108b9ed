"""The benchmark without a GPU: cases, floors, peers, turns, rows, suites, and what its command writes."""

import csv
import json
import statistics
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock, Timeout

from rwkv_jit import bench, reference, runtime
from rwkv_jit.bench import cases, contestants, floors, isolation, measure, peers, result, suites, timing
from rwkv_jit.bench.cases import Case
from rwkv_jit.bench.isolation import Attempt
from rwkv_jit.bench.peers import Contestant
from rwkv_jit.bench.suites import Entry
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError

SMALL = (2, 6, 2, 4, 3)
SIZES = {"wkv4": "2,6,8", "timex": "2,8,6"}


def small(op, phase="forward", dtype=torch.float32, **more):
    shape = cases.shape_of(op, "2,6,2,4") if op in cases.WITHOUT_HEADS else SMALL
    return Case(op, shape, dtype, phase, **more)


# ---- cases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "text", "shape", "shown"),
    [
        ("wkv7", "8,4096,16,256", (8, 4096, 16, 256, 256), [8, 4096, 16, 256, 256]),
        ("gla", "32,2048,4,256,512", (32, 2048, 4, 256, 512), [32, 2048, 4, 256, 512]),
        ("timex", "32,768,100", (32, 100, 1, 768, 768), [32, 768, 100]),
        ("timex", "32,100,12,64", (32, 100, 12, 64, 64), [32, 768, 100]),
        ("wkv4", "8,100,4096", (8, 100, 1, 4096, 4096), [8, 100, 4096]),
        ("wkv4", "8,100,64,64", (8, 100, 64, 64, 64), [8, 100, 4096]),
    ],
)
def test_shapes_of_a_command_line(op, text, shape, shown):
    assert cases.shape_of(op, text) == shape
    assert Case(op, shape, torch.float32).shown == shown


@pytest.mark.parametrize(
    ("op", "text", "forms"),
    [
        ("wkv7", "8,4096,64", "B,T,H,N or B,T,H,K,V for wkv7"),
        ("wkv7", "8,4096,0,64", "B,T,H,N or B,T,H,K,V for wkv7"),
        ("wkv4", "8,4096,64,64,64", "B,T,C or B,T,H,N for wkv4"),
        ("timex", "8,x,64", "B,C,T or B,T,H,N for timex"),
    ],
)
def test_shapes_that_do_not_fit_an_op(op, text, forms):
    with pytest.raises(ValueError, match=f"^--shape: expected positive numbers {forms}, got '{text}'$"):
        cases.shape_of(op, text)


@pytest.mark.parametrize("op", bench.OPS)
def test_inputs_fit_the_op(op):
    case = small(op, "decode" if op != "timex" else "forward")
    given = cases.given_for(case, "cpu")
    assert len(given.inputs) == len(cases.names_of(op))
    assert all(x.requires_grad and x.dtype == torch.float32 for x in given.inputs)
    state = {} if given.state is None else {"initial_state": given.state, "output_final_state": True}
    y, final = cases.REFERENCES[op](*given.inputs, **state, **case.options)
    assert given.dy.shape == y.shape
    assert not given.dy.requires_grad
    if op != "timex":
        assert final.shape == given.state.shape
    sizes = [*given.inputs, given.dy, given.state]
    assert given.size() == sum(4 * x.numel() for x in sizes if x is not None)


def test_keys_and_values_have_sizes_of_their_own():
    q, k, v, g = cases.make_inputs("gla", SMALL, torch.float16, "cpu")
    assert {tuple(x.shape) for x in (q, k, g)} == {(2, 6, 2, 4)}
    assert (v.shape, v.dtype) == ((2, 6, 2, 3), torch.float16)


def test_decays_may_be_wider_than_the_rest():
    given = cases.given_for(small("wkv6", dtype=torch.float16, wide_decay=True), "cpu")
    dtypes = dict(zip(cases.names_of("wkv6"), (x.dtype for x in given.inputs), strict=True))
    assert dtypes == {**dict.fromkeys("rkvu", torch.float16), "w": torch.float32}
    assert given.inputs[3].is_leaf


def test_zeros_are_refused(monkeypatch):
    given = cases.make_inputs("wkv6", SMALL, torch.float32, "cpu")
    cases.refuse_zeros("rkvwu", given)
    monkeypatch.setattr(cases, "make_inputs", lambda *_: [*given[:2], torch.zeros(SMALL[:4]), *given[3:]])
    with pytest.raises(ValueError, match="^v: expected values like a model's, got zeros alone"):
        cases.given_for(small("wkv6"), "cpu")


def test_sets_exceed_twice_the_cache(monkeypatch, on_cpu):
    case = small("wkv6")
    size = cases.given_for(case).size()
    for cache in (0, size // 2 - 1, 3 * size, 10 * size + 1):
        sets = cases.sets_for(case, cache)
        assert cases.are_cold(sets, cache)
        assert len(sets) == 1 or not cases.are_cold(sets[1:], cache)
    monkeypatch.setattr(cases, "MOST_SETS", 4)
    assert len(cases.sets_for(case, 10 * size)) == 4
    assert not cases.are_cold(cases.sets_for(case, 10 * size), 10 * size)
    first, second = cases.sets_for(case, size)[:2]
    assert not torch.equal(first.inputs[0], second.inputs[0])


# ---- floors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", cases.PHASES)
@pytest.mark.parametrize("op", bench.OPS)
def test_floor_is_what_the_tensors_hold(op, phase):
    if op == "timex" and phase in cases.WITH_STATES:
        return
    wide = op in ("wkv6", "wkv7")
    case = small(op, phase, torch.bfloat16, wide_decay=wide)
    given = cases.given_for(case, "cpu")
    inputs, y = (sum(x.numel() * x.element_size() for x in some) for some in (given.inputs, [given.dy]))
    state = 0 if op == "timex" else 4 * cases._state(case, "cpu").numel()
    wanted = {
        "forward": inputs + y,
        "backward": 2 * inputs + y,
        "forward+backward": 3 * inputs + 2 * y,
        "decode": inputs + y + 2 * state,
        "prefill": inputs + y + state,
    }
    assert floors.least_bytes(case) == wanted[phase]


def test_floor_of_rwkv7_in_bytes_and_milliseconds():
    case = Case("wkv7", (8, 4096, 64, 64, 64), torch.bfloat16, "forward+backward")
    assert floors.least_bytes(case) == 40 * 8 * 4096 * 64 * 64  # 14 N forwards and 26 N backwards a token and head
    assert floors.floor_ms(case, 4.0) == pytest.approx(1.342, abs=1e-3)


# ---- peers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward+backward", "decode", "prefill"])
@pytest.mark.parametrize("op", ["wkv5", "wkv6", "timex"])
def test_peers_of_torch_compute_the_same(op, phase, on_cpu):
    if op == "timex" and phase != "forward+backward":
        return
    case = small(op, phase)
    found = peers._torch(case)
    assert [each.what for each in found] == (["conv1d", "fft"] if op == "timex" else ["naive loop"])
    errors = measure._errors(case, found, "cpu")
    assert all(0 < error < 2e-6 for error in errors), errors


def test_loops_are_left_out_where_they_are_long():
    assert peers._torch(Case("wkv6", (1, peers.MOST_LOOPED_TOKENS + 1, 1, 8, 8), torch.float32)) == []
    assert peers._torch(small("wkv7")) == []


@pytest.mark.parametrize(("op", "index", "names"), [
    ("wkv6", 3, ["chunk_rwkv6", "fused_recurrent_rwkv6"]),
    ("wkv7", 1, ["chunk_rwkv7", "fused_recurrent_rwkv7"]),
    ("gla", None, ["chunk_gla", "fused_recurrent_gla"]),
    ("linear_attention", None, ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]),
])  # fmt: skip
def test_peers_of_fla_get_what_they_ask_for(op, index, names, monkeypatch, on_cpu):
    """A stand-in for FLA: the reference in its conventions, which are logarithms of decays and states [K, V]."""
    refer, calls = getattr(reference, f"{op}_ref"), []

    def fla(*inputs, initial_state, output_final_state, scale=None, normalize=None, lower_bound=None):
        if lower_bound is not None:
            assert lower_bound <= inputs[1].min()
        calls.append((scale, normalize, lower_bound is not None))
        decay = {} if op == "linear_attention" else {"decay": "log"}
        scale = {} if scale is None else {"scale": scale}
        return refer(*inputs, initial_state, output_final_state, **decay, **scale, state_layout="kv")

    monkeypatch.setattr(peers, "_loaded", lambda module, name: fla)
    for phase in ("forward+backward", "decode"):
        case = small(op, phase)
        found = peers._fla(case)
        assert [each.what for each in found] == names
        assert all(each.is_foreign and each.who == "fla" for each in found)
        errors = measure._errors(case, found, "cpu")
        assert all(0 < error < 2e-6 for error in errors), errors
        given = cases.given_for(case)
        converted = found[0].convert(given.inputs)
        assert [i for i, (x, y) in enumerate(zip(given.inputs, converted, strict=True)) if x is not y] == (
            [] if index is None else [index]
        )
    assert (
        set(calls)
        == {
            "gla": {(None, None, False)},
            "linear_attention": {(None, False, False)},
            "wkv6": {(1.0, None, False)},
            "wkv7": {(1.0, None, True), (1.0, None, False)},  # in chunks, and token by token
        }[op]
    )


@pytest.mark.parametrize("head_size", [128, 129])
def test_large_heads_of_fla_have_no_bound(head_size, monkeypatch):
    given = []
    monkeypatch.setattr(peers, "_loaded", lambda module, name: lambda *_, **options: given.append(options) or (0, 0))
    for peer in peers._fla(Case("wkv7", (1, 2, 1, head_size, head_size), torch.float32)):
        peer.run([], None, False)
    assert [("lower_bound" in options) for options in given] == [head_size == 128, False]


@pytest.mark.parametrize("op", ["wkv6", "wkv7", "gla", "linear_attention"])
def test_steps_of_fla_are_left_out_where_they_are_many(op):
    few, many = (Case(op, (1, tokens, 1, 8, 8), torch.bfloat16) for tokens in (1024, 1025))
    left_out = {each.what for each in peers._fla(few)} - {each.what for each in peers._fla(many)}
    assert left_out == {each.what for each in peers._fla(few) if "recurrent" in each.what}
    assert len(left_out) == 1


def test_peer_of_wkv4_begins_with_an_empty_state(monkeypatch, on_cpu):
    def fla(w, u, k, v, state):
        assert state.shape == (1, 3, 1, 8)
        y, final = reference.wkv4_ref(w, u, k, v, state.squeeze(2), True)
        return y, final

    monkeypatch.setattr(peers, "_loaded", lambda module, name: fla)
    (peer,) = peers._fla(small("wkv4"))
    for phase in ("forward+backward", "decode"):
        (error,) = measure._errors(small("wkv4", phase), [peer], "cpu")
        assert error < 2e-6


def test_peers_of_wind_get_what_they_ask_for(monkeypatch, on_cpu):
    loads = []

    def loaded(module, name):
        assert module == "wind_rwkv.rwkv7"
        if name.startswith("load_"):
            return lambda *sizes: loads.append((name, *sizes))
        return lambda *given: reference.wkv7_ref(*given, True, decay="raw")

    monkeypatch.setattr(peers, "_loaded", loaded)
    monkeypatch.setattr(peers, "_head_sizes", {})
    case = Case("wkv7", (2, 6, 2, 4, 4), torch.float32, "forward+backward")
    found = peers._wind(case)
    assert all(error < 2e-6 for error in measure._errors(case, found, "cpu"))
    assert loads == [
        ("load_chunked_cuda", 4), ("load_backstepping_longhead", 4, 2), ("load_backstepping_smallhead", 4),
    ]  # fmt: skip
    other = cases.given_for(Case("wkv7", (2, 6, 2, 8, 8), torch.float32))
    with pytest.raises(ValueError, match="one head size in a process, here 4; measure 8 on its own"):
        found[0].run(other.inputs, None, False)
    found[3].run(other.inputs, None, False)  # Triton has them all


def test_peer_of_flash_rwkv_gets_what_it_asks_for(monkeypatch, on_cpu):
    def wkv6(r, k, v, w, u, state):
        given = [x.view(1, 6, 2, 64) for x in (r, k, v, w)]
        return reference.wkv6_ref(*given, u.view(2, 64), state, True)

    monkeypatch.setattr(peers, "_loaded", lambda module, name: wkv6)
    case = Case("wkv6", (2, 6, 2, 64, 64), torch.float32)
    (peer,) = peers._flash_rwkv(case)
    assert measure._errors(case, [peer], "cpu")[0] < 2e-6
    assert peers._flash_rwkv(case._replace(phase="forward+backward")) == []
    with pytest.raises(ValueError, match="head size of 64, got 4"):
        peer.run(cases.given_for(small("wkv6")).inputs, None, False)


def test_peers_are_those_of_installed_packages(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    assert {each.who for each in peers.of(small("wkv6"))} == {"torch"}
    monkeypatch.setattr(peers, "find_spec", lambda package: package == "fla" or None)
    assert {each.who for each in peers.of(small("wkv6"))} == {"torch", "fla"}
    monkeypatch.setattr(peers, "find_spec", lambda package: package)
    assert [each.who for each in peers.of(small("wkv6"))] == ["fla", "fla", "flash_rwkv", "torch"]


# ---- contestants -------------------------------------------------------------------------------------------------


def test_backends_that_come_to_the_same_are_one_contestant(monkeypatch):
    taken = {"auto": "scan", "recurrent": "recurrent", "split": "scan"}

    def backend_of(case, asked):
        if asked not in taken:
            raise UnsupportedConfigError(f"backend: {asked!r} takes smaller heads")
        return taken[asked]

    monkeypatch.setattr(contestants, "backend_of", backend_of)
    found, obstacles = contestants.of(small("wkv7"), with_peers=False)
    assert [(each.who, each.what) for each in found] == [("rwkv_jit", "scan"), ("rwkv_jit", "recurrent")]
    assert obstacles == {}
    found, obstacles = contestants.of(small("wkv7"), ["chunked"], with_peers=False)
    assert (found, obstacles) == ([], {"chunked": "backend: 'chunked' takes smaller heads"})


def test_ours_are_called_as_asked(monkeypatch):
    calls = []
    monkeypatch.setitem(cases.OPS, "wkv7", lambda *given, **options: calls.append(options) or ("y", "final"))
    monkeypatch.setattr(contestants, "backend_of", lambda case, asked: asked)
    found, _ = contestants.of(small("wkv7"), ["split"], with_peers=False)
    assert found[0].run([1, 2], None, False) == ("y", "final")
    assert found[0].run([1, 2], "before", True) == ("y", "final")
    assert calls == [
        {"backend": "split", "decay": "sigmoid"},
        {"backend": "split", "decay": "sigmoid", "initial_state": "before", "output_final_state": True},
    ]


def test_rule_is_asked_about_the_case(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(contestants.tensors, "arch", lambda device: "sm_90")
    monkeypatch.setattr(contestants.tensors, "multiprocessors", lambda device: 132)
    choose = contestants.backends.choose
    monkeypatch.setattr(contestants.backends, "choose", lambda *given: asked.append(given[1]) or choose(*given))
    big = Case("wkv7", (8, 4096, 16, 256, 256), torch.bfloat16)
    assert [contestants.backend_of(big, name) for name in ("auto", "recurrent", "split")] == [
        "scan",
        "recurrent",
        "scan",
    ]
    assert (asked[0].op, asked[0].head_size, asked[0].tokens, asked[0].blocks) == ("wkv7", 256, 4096, 128)
    assert not asked[0].training
    contestants.backend_of(big._replace(phase="backward"), "auto")
    assert asked[-1].training
    timex = Case("timex", (32, 768, 1, 768, 768), torch.float32)
    assert [contestants.backend_of(timex, name) for name in ("auto", "fft")] == ["transforms", "fft"]
    assert contestants.backend_of(timex._replace(phase="backward"), "auto") == "tiles"
    assert contestants.backend_of(timex._replace(phase="forward+backward"), "auto") == "transforms, tiles"
    wkv4 = Case("wkv4", (1, 65536, 1, 64, 64), torch.float32)
    assert [contestants.backend_of(wkv4, name) for name in ("auto", "recurrent")] == ["split", "recurrent"]


# ---- tries in processes of their own -----------------------------------------------------------------------------


def child_that_answers(monkeypatch, answers, program):
    """Let the processes that try run another program."""
    monkeypatch.setattr(isolation, "_PROGRAM", program)
    attempts = [Attempt(small(op), "fla", what) for op, what in answers]
    return attempts, isolation.obstacles(attempts, at_once=2)


CHILD = """
import json, os, sys
for fields in json.load(sys.stdin)["attempts"]:
    what = fields["what"]
    if what == "dies":
        os._exit(7)
    print(json.dumps(None if what == "works" else "ValueError: " + what), flush=True)
    if what == "loses the GPU":
        os._exit(1)
"""


def test_what_ends_a_process_hides_nobody(monkeypatch):
    names = ["works", "dies", "cannot", "loses the GPU", "works "]
    attempts, found = child_that_answers(
        monkeypatch, [*[("wkv7", name) for name in names[:4]], ("wkv6", "works"), ("wkv7", "late")], CHILD
    )
    assert found == {
        attempts[1]: "ended its process with 7",
        attempts[2]: "ValueError: cannot",
        attempts[3]: "ValueError: loses the GPU",
        attempts[5]: "ValueError: late",
    }


def test_silence_ends_a_process(monkeypatch):
    monkeypatch.setattr(isolation, "PATIENCE", 3)
    program = CHILD.replace("os._exit(7)", "import time; time.sleep(600)")
    attempts, found = child_that_answers(monkeypatch, [("wkv7", "dies"), ("wkv7", "works")], program)
    assert found == {attempts[0]: "did not end in 3 s"}


def test_what_is_not_tried_in_time_is_left_out(monkeypatch):
    monkeypatch.setattr(isolation, "_PROGRAM", CHILD.replace("os._exit(7)", "import time; time.sleep(600)"))
    attempts = [Attempt(small("wkv7"), "fla", what) for what in ("works", "dies", "works too")]
    said = "was not tried in 0.05 min"
    assert isolation.obstacles(attempts, at_once=1, minutes=0.05) == dict.fromkeys(attempts[1:], said)


def test_attempts_are_the_same_behind_the_pipe():
    attempt = Attempt(small("wkv6", "backward", torch.float16, wide_decay=True), "fla", "chunk_rwkv6")
    assert isolation._read(json.loads(json.dumps(isolation._written(attempt)))) == attempt


@pytest.mark.parametrize("has_tuner", [False, True])
def test_process_that_tries_answers_a_line_each(tmp_path, has_tuner):
    """The real program, on the CPU."""
    program = """
import sys, types, torch
tuner = sys.modules["triton.testing"] = types.SimpleNamespace(do_bench=print)
from rwkv_jit.bench import cases, isolation, peers
torch.cuda.synchronize = torch.cuda.empty_cache = lambda: print("noise")
real = cases.given_for
cases.given_for = lambda case: real(case, "cpu")
isolation.answer()
assert tuner.do_bench is not print
"""
    attempts = [
        Attempt(small("wkv6", "forward+backward"), "torch", "naive loop"), Attempt(small("timex"), "torch", "missing"),
        Attempt(small("timex", "backward"), "torch", "fft"),
    ]  # fmt: skip
    if not has_tuner:
        program = program.replace("types.SimpleNamespace(do_bench=print)", "None").replace("assert tuner", "# ")
    given = json.dumps({"turn": str(tmp_path / "turn"), "attempts": [isolation._written(each) for each in attempts]})
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [None, "StopIteration", None]


def test_tuners_time_in_turns_and_compile_beside_each_other(monkeypatch, tmp_path):
    turn, seen = str(tmp_path / "turn"), []

    def is_free():
        try:
            FileLock(turn).acquire(timeout=0).lock.release()
        except Timeout:
            return False
        return True

    def do_bench(call, quantiles):
        call()
        return quantiles

    testing = SimpleNamespace(do_bench=do_bench)
    isolation._time_in_turns(testing, turn)
    assert testing.do_bench(lambda: seen.append(is_free()), quantiles=(0.5, 0.2)) == (0.5, 0.2)
    assert seen == [True, False]
    assert is_free()
    with pytest.raises(ZeroDivisionError):
        testing.do_bench(lambda: 1 / 0, quantiles=())
    monkeypatch.setattr(isolation, "_LONGEST_TURN", 0.01)
    with FileLock(turn):  # of one that hangs
        assert testing.do_bench(lambda: seen.append(is_free()), quantiles=(1,)) == (1,)
    assert seen == [True, False, False, False]


def test_children_of_one_run_share_a_turn(monkeypatch):
    program = CHILD.replace("json.load(sys.stdin)", "(given := json.load(sys.stdin))").replace(
        '"ValueError: " + what', 'given["turn"]'
    )
    attempts, found = child_that_answers(monkeypatch, [("wkv7", "a"), ("gla", "b")], program)
    assert found[attempts[0]] == found[attempts[1]]
    assert Path(found[attempts[0]]).name == "turn"
    assert not Path(found[attempts[0]]).parent.exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("\n  CUDA error: x\nmore\n"), "RuntimeError: CUDA error: x"),
        (NotImplementedError(), "NotImplementedError"),
        (ValueError("y" * 500), ("ValueError: " + "y" * 500)[:200]),
    ],
)
def test_errors_are_one_line(error, line):
    assert isolation.one_line(error) == line


# ---- timing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Cases get tensors of the CPU."""
    real = cases.given_for
    monkeypatch.setattr(cases, "given_for", lambda case, device="cpu": real(case, "cpu"))


@pytest.fixture
def clock(monkeypatch, on_cpu):
    """A GPU that takes notes: events read a clock which calls of `spend` move, and which sleeps do not."""
    state = SimpleNamespace(now=0.0, sleeps=[], tried=0, captures=0, capturable=True, memory=0, peak=0, host_us=0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = state.now

        def query(self):
            return state.sleeps[-1] / timing._CYCLES_PER_US < state.host_us

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    class Graph:
        def replay(self):
            state.now += self.ms

    @contextmanager
    def capture(graph, capture_error_mode):
        before = state.now
        state.tried += 1
        if not state.capturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield
        graph.ms, state.now = state.now - before, before
        state.captures += 1

    properties = SimpleNamespace(L2_cache_size=3000, total_memory=1 << 30)
    for name, value in {
        "Event": Event, "CUDAGraph": Graph, "graph": capture, "_sleep": state.sleeps.append,
        "synchronize": lambda: None, "current_stream": lambda: None, "stream": lambda _: nullcontext(),
        "current_device": lambda: 0, "get_device_properties": lambda _: properties,
        "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: state.memory,
        "max_memory_allocated": lambda: state.peak, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    def spend(ms):
        state.now += ms

    state.spend = spend
    return state


def test_spread_is_median_and_quartiles():
    assert timing.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0, 5)
    assert timing.spread([2.0]) == (2.0, 2.0, 2.0, 1)


def test_turns_take_the_sets_one_after_another(clock):
    seen = []
    calls = [lambda n=n: (seen.append(n), clock.spend(n + 1)) for n in range(3)]
    turns = timing.Turns(calls, in_graph=False)
    seen.clear()
    assert [turns.ms() for _ in range(5)] == [1, 2, 3, 1, 2]
    assert seen == [0, 1, 2, 0, 1]
    assert not turns.in_graph
    assert len(clock.sleeps) == 5
    assert all(cycles >= 50 * timing._CYCLES_PER_US for cycles in clock.sleeps)


def test_a_gpu_that_wakes_up_before_all_is_queued_sleeps_longer(clock):
    """The time of the host would be in that of the call."""
    seen = []
    turns = timing.Turns([lambda n=n: (seen.append(n), clock.spend(n)) for n in range(4)], in_graph=False)
    seen.clear()
    clock.host_us = 1e-6 * timing._CYCLES_PER_US + 4 * turns._sleep_us
    assert turns.ms() == 2
    assert seen == [0, 1, 2]  # what is in the cache is not timed again
    assert [round(b / a) for a, b in zip(clock.sleeps, clock.sleeps[1:], strict=False)] == [4, 4]
    assert turns.ms() == 3
    assert len(clock.sleeps) == 4  # it has learnt
    clock.host_us = float("inf")  # a call that waits for the GPU
    assert turns.ms() in range(4)
    assert clock.sleeps[-1] == timing._CYCLES_PER_US * timing._LONGEST_SLEEP_US


def test_graphs_take_every_set_equally_often(clock):
    seen = []
    calls = [lambda n=n: (seen.append(n), clock.spend(n)) for n in (1, 2, 6)]
    turns = timing.Turns(calls, in_graph=True)
    assert clock.captures == 1
    assert seen[-21:] == [1, 2, 6] * 7
    seen.clear()
    assert turns.ms() == pytest.approx(3.0)
    assert turns.in_graph
    assert seen == []


def test_what_cannot_be_captured_is_timed_without_a_graph(clock):
    clock.capturable = False
    turns = timing.Turns([lambda: clock.spend(2)], in_graph=True)
    assert not turns.in_graph
    assert clock.tried == 2  # the second one clears up behind the first
    assert turns.ms() == 2


def test_cache_is_flushed_where_the_sets_are_small(clock):
    flush = torch.ones(4)
    turns = timing.Turns([lambda: clock.spend(int(flush.sum()) + 1)], False, flush)
    assert turns.ms() == 1  # flushed before


@pytest.mark.parametrize(("seconds", "row", "calls"), [(10e-6, 50, 25001), (4e-4, 13, 742), (0.2, 1, 4)])
@pytest.mark.parametrize("slow_until", [0, 0.1])
def test_host_time_is_that_of_calls_in_a_row(monkeypatch, seconds, row, calls, slow_until):
    """The first call after a pause takes longer, and so do all in a slow phase of the host.

    A call that takes long is made a few times.
    """
    state = SimpleNamespace(now=0.0, sleeps=True, called=[])

    def call():
        slow = 1.5 if state.now < slow_until and state.called else 1
        if row > 1:  # a call that is faster than the others of its row, and one that is slower
            slow *= {5: 0.5, 6: 1.5}.get(len(state.called) % row, 1)
        state.now += slow * (10 * seconds if state.sleeps and row > 1 else seconds)
        state.called.append(state.sleeps)
        state.sleeps = False

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: state.now))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(state, "sleeps", True))
    assert timing.host_us([call]) == pytest.approx(1e6 * seconds)
    assert len(state.called) == calls if slow_until == 0 else row < len(state.called) <= calls
    assert state.called.count(True) == 1 + (len(state.called) - 1) // row


def test_everyone_has_a_turn_in_every_round():
    order, told = [], []

    def make(name, fails_at=None):
        def run():
            order.append(name)
            if order.count(name) == fails_at:
                raise RuntimeError("lost")
            return float(order.count(name))

        return run

    found = timing.interleaved(
        [make("a"), make("b", fails_at=4), make("c")], 1e9, lambda done, total: told.append((done, total))
    )
    rounds = timing.WARM_UP_ROUNDS + timing.MOST_ROUNDS
    assert order[:9] == ["a", "b", "c"] * 3
    assert order.count("b") == 4
    assert found[0] == found[2] == [float(n) for n in range(timing.WARM_UP_ROUNDS + 1, rounds + 1)]
    assert isinstance(found[1], RuntimeError)
    assert told[-1] == (rounds, rounds)


def test_slow_cases_have_fewer_rounds():
    (times,) = timing.interleaved([lambda: 1.0], 0.0)
    assert len(times) == timing.LEAST_ROUNDS


def test_rounds_go_by_the_time_of_the_last_one_of_the_warm_up(monkeypatch):
    seconds, now = iter([9.0, *[0.001] * (timing.WARM_UP_ROUNDS - 2), 0.1, *[0.001] * 100]), [0.0]

    def run():
        now[0] += next(seconds)
        return now[0]

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    (times,) = timing.interleaved([run], 1000.0)
    assert len(times) == 10


def test_times_on_the_cpu_are_those_after_the_first(monkeypatch):
    seconds, now = iter([5.0, *[0.25] * 7]), [100.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call():
        now[0] += next(seconds)

    assert timing.cpu_ms(call) == [250.0] * 7


def test_copy_counts_bytes_read_and_written(clock, monkeypatch):
    made = []
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (400, 400))
    monkeypatch.setattr(torch, "ones", lambda size, dtype, device: made.append(size) or ones(size, dtype=dtype))
    monkeypatch.setattr(timing, "median_ms", lambda function: function() is not None and 5e-7)
    assert timing.copy_tb_per_s() == pytest.approx(2 * 100 / 5e-10 * 1e-12)
    assert made == [100]


# ---- rows --------------------------------------------------------------------------------------------------------


def contestant(clock, name, ms, who="rwkv_jit", fails=None, factor=1.0):
    """What computes wkv6 as the reference does, times `factor`, in `ms` of the clock, which its backward takes too."""

    def run(inputs, state, with_state):
        clock.spend(ms)
        if fails is not None:
            raise fails
        y, final = reference.wkv6_ref(*inputs, state, with_state)
        y = y * factor
        if y.requires_grad:
            y.register_hook(lambda _: clock.spend(ms))
        return y, final

    return Contestant(who, name, run)


@pytest.fixture
def everyone(clock, monkeypatch):
    found = [
        contestant(clock, "chunked", 2.0), contestant(clock, "broken", 1.0, "fla", ValueError("no such shape\nx")),
        contestant(clock, "off", 4.0, "fla", factor=1.5), contestant(clock, "fatal", 1.0, "fla"),
    ]  # fmt: skip
    monkeypatch.setattr(contestants, "of", lambda case, asked, with_peers: (found[: 4 if with_peers else 1], {}))
    return found


@pytest.mark.parametrize("phase", cases.PHASES)
def test_rows_of_a_case(clock, everyone, phase):
    case = small("wkv6", phase)
    clock.peak = 3 << 20
    known = {Attempt(case, "fla", "fatal"): "ended its process with -6"}
    rows = measure.rows_of(Entry("made up", case, ["auto"]), 1e-6, obstacles=known)
    ours, off, broken, fatal = rows
    assert [row["what"] for row in rows] == ["chunked", "off", "broken", "fatal"]
    assert list(ours) == list(result.COLUMNS)
    assert (ours["suite"], ours["op"], ours["shape"], ours["dtype"]) == ("made up", "wkv6", list(SMALL), "float32")
    assert {row["phase"] for row in rows} == {phase}
    passes = 2 if phase == "forward+backward" else 1
    assert (ours["median_ms"], off["median_ms"]) == (2.0 * passes, 4.0 * passes)
    assert ours["low_ms"] == ours["high_ms"] == ours["median_ms"]
    assert ours["runs"] == off["runs"] == timing.MOST_ROUNDS
    assert ours["in_graph"] == (phase in ("forward", "decode", "prefill"))
    assert ours["host_us"] > 0
    assert ours["floor_ms"] == pytest.approx(floors.least_bytes(case) * 1e-3)
    assert ours["peak_mib"] == pytest.approx(3 + cases.given_for(case).size() / 2**20)
    assert ours["error"] < 2e-6
    assert off["error"] == pytest.approx(0.5, abs=1e-5)
    assert (broken["skipped"], fatal["skipped"]) == ("ValueError: no such shape", "ended its process with -6")
    assert broken["median_ms"] is fatal["median_ms"] is None
    assert ours["skipped"] is None


def test_fraction_is_the_floor_over_the_median(clock, everyone):
    rows = measure.rows_of(Entry(None, small("wkv6"), None), 1e-6, with_peers=False)
    assert [row["what"] for row in rows] == ["chunked"]
    assert rows[0]["fraction"] == pytest.approx(floors.least_bytes(small("wkv6")) * 1e-3 / 2)


def test_what_is_not_finite_has_no_speed(clock, monkeypatch):
    wrong = contestant(clock, "nan", 1.0, factor=float("nan"))
    monkeypatch.setattr(contestants, "of", lambda *_: ([wrong, contestant(clock, "right", 1.0)], {}))
    right, skipped = measure.rows_of(Entry(None, small("wkv6", "forward+backward"), None), 1.0)
    assert (right["what"], skipped["what"]) == ("right", "nan")
    assert skipped["skipped"] == "its results are not finite, so it has no speed"
    assert skipped["median_ms"] is None


def test_backends_that_cannot_are_rows_too(clock, monkeypatch):
    monkeypatch.setattr(contestants, "of", lambda *_: ([], {"split": "backend: 'split' has no segments"}))
    (row,) = measure.rows_of(Entry(None, small("wkv6"), ["split"]), 1.0)
    assert (row["who"], row["what"], row["skipped"]) == ("rwkv_jit", "split", "backend: 'split' has no segments")


def test_error_is_none_where_few_tokens_cannot_be_done(clock):
    case = small("wkv6")
    cannot = contestant(clock, "x", 1.0, fails=ValueError("too few"))
    assert measure._errors(case, [cannot, contestant(clock, "y", 1.0)], "cpu")[0] is None


def test_tokens_of_the_reference_fit_its_memory():
    assert measure._tokens_to_check(Case("wkv7", (8, 4096, 64, 64, 64), torch.bfloat16)) == 300
    assert measure._tokens_to_check(Case("wkv7", (8, 4096, 16, 256, 256), torch.bfloat16)) == 256
    assert measure._tokens_to_check(Case("wkv4", (8, 4096, 1, 4096, 4096), torch.bfloat16)) == 300


# ---- suites ------------------------------------------------------------------------------------------------------


def test_studies_are_the_published_shapes_and_those_of_models():
    found = {(e.suite, e.case.op, tuple(e.case.shown), e.case.phase) for e in suites.of_suite("studies")}
    both = ("forward", "forward+backward")
    training = (8, 4096, 32, 128, 128)
    prompts = [(8, 4096, 64, 64, 64), (1, 4096, 32, 64, 64)]
    wind = [(8, 4096, 64, 64, 64), training, (8, 4096, 16, 256, 256), (1, 32768, 16, 256, 256)]
    assert found == {
        *(("wind", "wkv7", shape, phase) for shape in wind for phase in both),
        ("profile", "wkv6", (1, 54, 32, 64, 64), "forward"),
        ("chunk_rwkv6", "wkv6", (1, 4096, 32, 64, 64), "prefill"),
        *(("gla", "gla", shape, phase) for shape in ((32, 2048, 4, 256, 512), training) for phase in both),
        *(("linear_attention", "linear_attention", training, phase) for phase in both),
        *(("timex", "timex", (32, 768, 768), phase) for phase in ("forward", "backward")),
        *(("wkv4", "wkv4", (8, 4096, 4096), phase) for phase in both),
        *(("models", "wkv7", (1, 32768, 16, 64, 64), phase) for phase in both),
        *(("models", "wkv6", shape, phase) for shape in prompts for phase in both),
        ("models", "wkv6", (1, 54, 32, 64, 64), "forward"),
        *(("models", "wkv5", (8, 4096, 64, 64, 64), phase) for phase in both),
        ("models", "timex", (8, 768, 8192), "forward"),
    }
    profile = suites.of_suite("profile")
    assert [(e.case.dtype, e.case.wide_decay) for e in profile] == [(torch.float16, True)]
    assert set(profile[0].backends) == {"auto", "recurrent", "chunked"}
    assert {e.case.op for e in suites.of_suite("studies", ["gla", "timex"])} == {"gla", "timex"}


def test_decodes_of_usual_shapes_take_one_token():
    found = suites.asked_for(["wkv6"], None, torch.bfloat16, ["decode", "forward"], None)
    assert {e.case.shape[1] for e in found if e.case.phase == "decode"} == {1}
    assert {e.case.shape[1] for e in found if e.case.phase == "forward"} == {54, 4096}
    assert "timex" not in suites.usual_ops(["decode"])


# ---- results -----------------------------------------------------------------------------------------------------

ENVIRONMENT = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}
PATHS = {"nvrtc_libraries": ["/a/library"], "cache": "/a/cache", "environment": {}}


def made_up_row(**other):
    return measure.row(Entry(None, small("wkv6")), "rwkv_jit", "chunked") | {
        "median_ms": 0.5, "low_ms": 0.25, "high_ms": 0.75, "runs": 20, "in_graph": True, "host_us": 12.34,
        "floor_ms": 0.25, "fraction": 0.5, "peak_mib": 3.5, "error": 1.7e-3,
    } | other  # fmt: skip


def test_table(capsys):
    skipped = measure.row(Entry(None, small("wkv6")), "fla", "chunk_rwkv6", "ValueError: no")
    result.show({
        "device": "cuda", "env": ENVIRONMENT, "copy_tb_per_s": 4.25, "rows": [made_up_row(), skipped],
    })  # fmt: skip
    assert capsys.readouterr().out.startswith(
        "a GPU, torch 2.13, NVRTC 12.9; a copy moves 4.25 TB/s\n\n"
        "wkv6 (2, 6, 2, 4, 3) float32, forward; floor 0.2500 ms\n"
        "  by                    ms  quartiles         of the floor  in a graph  host us  peak MiB    error\n"
        "  rwkv_jit chunked  0.5000  0.2500 to 0.7500  50%           yes            12.3       3.5  1.7e-03\n"
        "  skipped: fla chunk_rwkv6: ValueError: no\n"
        "\nMedian and quartiles"
    )


def test_csv(tmp_path):
    skipped = measure.row(Entry("gla", small("wkv6")), "fla", "chunk_rwkv6", "ValueError: a, b")
    result.write_csv({"rows": [made_up_row(), skipped]}, tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == result.COLUMNS
    assert (first["shape"], first["median_ms"], first["suite"], first["skipped"]) == ("2x6x2x4x3", "0.5", "", "")
    assert (second["suite"], second["median_ms"], second["skipped"]) == ("gla", "", "ValueError: a, b")


def test_result_names_its_sources(own_templates, monkeypatch):
    before = result.sources()
    assert set(before) == set(bench.OPS)
    assert before["wkv5"] == before["gla"] != before["wkv7"]
    path = own_templates / "wkv7_history.cu"
    path.write_text("// no op takes it")
    path = result.template.path_of("wkv7_recurrent_forward.cu")
    path.write_text(path.read_text() + "\n// changed\n")
    result.template.library.cache_clear()
    after = result.sources()
    assert {op for op in before if before[op] != after[op]} == {"wkv7"}


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, where nothing is measured: what is asked for is noted."""
    asked = []

    def rows_of(entry, copy, with_peers, obstacles, tell):
        asked.append((entry, with_peers, obstacles))
        tell(1, 2)
        if entry.case.op == "gla":
            raise RuntimeError("CUDA out of memory")
        return [made_up_row(op=entry.case.op)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "env_report", lambda: ENVIRONMENT | PATHS)
    monkeypatch.setattr(timing, "copy_tb_per_s", lambda: 4.25)
    monkeypatch.setattr(measure, "rows_of", rows_of)
    monkeypatch.setattr(measure, "give_back_memory", lambda: None)
    monkeypatch.setattr(isolation, "obstacles", lambda attempts, tell, minutes: dict.fromkeys(attempts, "dies"))
    monkeypatch.setattr(peers, "find_spec", lambda package: package == "fla" or None)
    return asked


def test_command_measures_what_it_is_asked_for(gpu, run):
    code, printed, said = run(
        "bench",
        "--op",
        "wkv6",
        "--op",
        "timex",
        "--shape",
        "2,32,4,16",
        "--dtype",
        "fp16",
        "--phase",
        "backward",
        "--json",
    )
    assert (code, said) == (0, "")
    found = json.loads(printed)
    assert [(entry.case.op, entry.case.phase, entry.case.dtype) for entry, _, _ in gpu] == [
        ("wkv6", "backward", torch.float16), ("timex", "backward", torch.float16),
    ]  # fmt: skip
    assert {entry.case.shape for entry, _, _ in gpu} == {(2, 32, 4, 16, 16)}
    assert {entry.backends for entry, _, _ in gpu} == {None}
    assert {(each.who, each.what) for _, _, obstacles in gpu for each in obstacles} == {
        ("fla", "chunk_rwkv6"), ("fla", "fused_recurrent_rwkv6"),
    }  # fmt: skip
    assert (found["format"], found["device"], found["copy_tb_per_s"]) == (1, "cuda", 4.25)
    assert set(found) == {"format", "env", "commit", "sources", "copy_tb_per_s", "device", "rows"}
    assert [row["op"] for row in found["rows"]] == ["wkv6", "timex"]


def test_a_backend_is_measured_of_the_ops_that_have_it(gpu, run):
    assert run("bench", "--backend", "tiles")[0] == 0
    assert {entry.case.op for entry, _, _ in gpu} == {"timex"}
    gpu.clear()
    assert run("bench", "--backend", "split", "--phase", "forward")[0] == 0
    assert {entry.case.op for entry, _, _ in gpu} == {*bench.OPS} - {"timex"}


def test_peers_are_left_out_on_demand(gpu, run):
    assert run("bench", "--suite", "chunk_rwkv6", "--no-peers")[0] == 0
    assert [(with_peers, obstacles) for _, with_peers, obstacles in gpu] == [(False, {})]


def test_case_that_fails_hides_no_other(gpu, run):
    code, printed, _ = run(
        "bench", "--op", "gla", "--op", "wkv6", "--shape", "1,32,1,8", "--phase", "forward", "--json"
    )
    first, second = json.loads(printed)["rows"]
    assert code == 0
    assert (first["op"], first["skipped"]) == ("gla", "RuntimeError: CUDA out of memory")
    assert (second["op"], second["skipped"]) == ("wkv6", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "gla", "--shape", "1,2,3,4"], "--shape: a suite has its own, got 1,2,3,4 beside --suite gla"),
        (["--suite", "gla", "--op", "wkv7"], "--op: nothing of wkv7 is in --suite gla"),
        (["--op", "timex", "--phase", "decode"], "one of forward, backward, forward+backward for timex, got decode"),
        (["--op", "wkv6", "--backend", "tiles"], "one of auto, recurrent, chunked, split for wkv6, got tiles"),
        (["--op", "timex", "--backend", "split"], "one of auto, tiles, transforms, fft for timex, got split"),
        (["--op", "wkv7", "--shape", "1,2"], "positive numbers B,T,H,N or B,T,H,K,V for wkv7, got '1,2'"),
        (["--csv", "/nowhere/x.csv"], "file that can be written, got /nowhere/x.csv (No such file or directory)"),
        (["--peer-minutes", "nan"], "--peer-minutes: expected a number above 0, got nan"),
        (["--record"], "--record: keeps a whole suite; expected --suite and no --op"),
        (["--suite", "gla", "--op", "gla", "--record"], "--record: keeps a whole suite; expected --suite and no --op"),
        (["--latency", "--csv", "x.csv"], "--csv: does not go with --latency"),
        (["--history", "--record"], "--record: does not go with --history"),
        (["--compare", "a", "b", "--no-peers"], "--no-peers: does not go with --compare"),
        (["--compare", "a", "b", "--suite", "gla"], "argument --suite: not allowed with argument --compare"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(gpu, run, arguments, message):
    code, printed, said = run("bench", *arguments)
    assert (code, printed) == (2, "")
    assert said.endswith(f"{message}\n")
    assert gpu == []


def test_gpu_without_a_compiler_is_one_sentence(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "is_available", lambda: False)
    sentence = "rwkv-jit bench: bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing\n"
    assert run("bench", "--op", "wkv6") == (2, "", sentence)


def test_record_needs_a_gpu_and_a_checkout(run, monkeypatch, gpu):
    monkeypatch.setattr(bench, "checkout", lambda: None)
    assert "root of a checkout" in run("bench", "--suite", "gla", "--record")[2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "on a GPU, and there is none" in run("bench", "--suite", "gla", "--record")[2]


@pytest.fixture
def other_modules(monkeypatch, root):
    """In a checkout, where nothing is drawn or recorded; the calls are noted."""
    from rwkv_jit.bench import plot, record

    calls = []
    monkeypatch.setattr(bench, "checkout", lambda: root)
    monkeypatch.setattr(record, "write", lambda found: calls.append(("write", found["format"])))
    monkeypatch.setattr(record, "write_service", lambda costs: calls.append(("write_service", costs)))
    monkeypatch.setattr(
        record, "compare", lambda first, second: calls.append(("compare", first["n"], second["n"])) or {"rows": []}
    )
    monkeypatch.setattr(record, "show_comparison", lambda found: print("compared"))
    monkeypatch.setattr(plot, "draw", lambda found, path: calls.append(("draw", found["format"], path)))
    return calls


def test_command_writes_the_files_it_is_asked_for(gpu, run, other_modules, tmp_path):
    files = ["--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png"]
    assert run("bench", "--suite", "timex", "--record", *files)[0] == 0
    assert (tmp_path / "x.csv").read_text().startswith("suite,op,shape")
    assert other_modules == [("write", 1), ("draw", 1, str(tmp_path / "x.png"))]


def test_command_compares_two_results(run, other_modules, tmp_path):
    for n in (1, 2):
        (tmp_path / f"{n}.json").write_text(json.dumps({"format": 1, "rows": [], "n": n}))
    assert run("bench", "--compare", tmp_path / "1.json", tmp_path / "2.json") == (0, "compared\n", "")
    assert other_modules == [("compare", 1, 2)]


@pytest.fixture
def service_of_a_gpu(gpu, monkeypatch):
    """What `--latency` measures where there is a GPU, but in no time."""
    from rwkv_jit import latency

    def child(program, *arguments, environment=None):
        if program == latency._IMPORT:
            return [0.5, 31.25]
        return [500.0, *[150.0] * 7]

    monkeypatch.setattr(latency, "_child", child)
    monkeypatch.setattr(latency, "_peers_from_disk", lambda: {"Triton": [358000.0, *[690.0] * 7]})
    monkeypatch.setattr(
        latency, "_start_together", lambda count: [("compiled", 0.625)] + [("disk", 0.75)] * (count - 1)
    )
    monkeypatch.setattr(latency, "_host_us", lambda: {"wkv7": 10.5})
    wkv7 = {"compiled_ms": 1000.4, "from_disk_ms": 4.5, "call_us": 80.2}
    triton = {"compiled_ms": 41000.4, "from_disk_ms": 77.2, "call_us": 12.3}
    monkeypatch.setattr(bench, "first_calls", lambda: wkv7)
    monkeypatch.setattr(bench, "one_line_kernels", lambda: {"Triton": triton})
    return {
        "env": ENVIRONMENT, "commit": bench.commit(), "import_ms": 0.5, "op_import_ms": 31.25,
        "from_disk_us": [500.0, *[150.0] * 7], "peers_from_disk_us": {"Triton": [358000.0, *[690.0] * 7]},
        "together": {"processes": 16, "compiled": 1, "alone_s": 0.625, "slowest_s": 0.75}, "host_us": {"wkv7": 10.5},
        "first_call": wkv7, "one_line": {"Triton": triton},
    }  # fmt: skip


def test_service_is_measured_instead_of_the_kernels(service_of_a_gpu, gpu, run, other_modules):
    code, printed, said = run("bench", "--latency")
    assert (code, said) == (0, "")
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    assert ["rwkv_jit", "500", "150"] in lines
    assert ["wkv7", "10.5"] in lines
    assert lines[-2:] == [
        ["wkv7,", "forward", "and", "backward", "1000", "4.5", "80.2"],
        ["a", "kernel", "of", "one", "line,", "Triton", "41000", "77.2", "12.3"],
    ]
    assert json.loads(run("bench", "--latency", "--json")[1]) == service_of_a_gpu
    assert gpu == other_modules == []


def test_service_is_kept_on_demand(service_of_a_gpu, run, other_modules, monkeypatch):
    assert run("bench", "--latency", "--record")[0] == 0
    assert other_modules == [("write_service", service_of_a_gpu)]


@pytest.mark.parametrize(
    ("what", "missing", "said"),
    [
        ((bench, "checkout"), lambda: None, "root of a checkout"),
        ((torch.cuda, "is_available"), lambda: False, "on a GPU, and there is none"),
        ((runtime, "is_available"), lambda: False, "needs a GPU, CuPy and NVRTC"),
    ],
    ids=["checkout", "GPU", "compiler"],
)
def test_service_that_cannot_be_kept_is_not_measured(what, missing, said, run, other_modules, gpu, monkeypatch):
    from rwkv_jit import latency

    monkeypatch.setattr(latency, "run", lambda: pytest.fail("it was measured"))
    monkeypatch.setattr(*what, missing)
    code, printed, error = run("bench", "--latency", "--record")
    assert (code, printed) == (2, "")
    assert said in error


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
    monkeypatch.setattr(bench.service, "_PROGRAM", program)
    lines = "times = [(700, 1), (4.5, 30), (3.5, 10), (9, 20)]", "print(*times[seen])"
    want = {"compiled_ms": 700.0, "from_disk_ms": 4.5, "call_us": 20.0}
    assert bench.service._times("it", "SOME_DIRECTORY", *lines) == want
    monkeypatch.setattr(bench.service, "_WKV7", ("SOME_DIRECTORY", *lines))
    assert bench.first_calls() == want


def test_process_of_first_calls_that_dies_is_told_with_its_last_words(monkeypatch):
    monkeypatch.setattr(
        bench.service, "_PROGRAM", "import os, sys\nprint('out of threads', file=sys.stderr)\nos.abort()"
    )
    with pytest.raises(RwkvJitError, match="calls it ended with exit code -6: out of threads"):
        bench.service._times("it", "SOME_DIRECTORY", "", "")


def test_kernels_of_one_line_are_called_by_everyone_who_is_there(monkeypatch):
    """The program that measures, on the CPU."""
    on_cpu = "torch.cuda.synchronize = lambda: None\n"
    there, wrong, missing = (
        ("SOME_DIRECTORY", on_cpu + line, f"def call():\n    x.add_({n})\n")
        for line, n in (("", 1), ("", 2), ("import of_nobody\n", 1))
    )
    monkeypatch.setattr(bench.service, "REPEATS", 1)
    monkeypatch.setattr(bench.service, "_ADD_ONE", bench.service._ADD_ONE.replace("cuda", "cpu"))
    monkeypatch.setattr(bench.service, "_LOADERS", {"there": there, "wrong": wrong, "missing": missing})
    found = bench.one_line_kernels()
    assert list(found) == ["there"]
    assert 0.1 < found["there"]["call_us"] < 1e3 * found["there"]["from_disk_ms"]  # the first of them is slower


def test_calls_of_wkv7_are_those_of_a_model_that_learns(monkeypatch):
    """The program that measures, on the CPU."""
    variable, prepare, load = bench.service._WKV7
    prepare = prepare.replace("cuda.cupy()", "torch.cuda.synchronize = lambda: None").replace('"cuda"', '"cpu"')
    prepare = prepare.replace("(1, 64, 4, 64), torch.bfloat16", '(1, 2, 1, 4), torch.bfloat16, "cpu"')
    monkeypatch.setattr(bench.service, "_WKV7", (variable, prepare, load))
    monkeypatch.setattr(bench.service, "REPEATS", 1)
    assert all(time > 0 for time in bench.first_calls().values())


def test_programs_of_all_loaders_are_python():
    parts = [bench.service._WKV7, *bench.service._LOADERS.values()]
    assert [variable for variable, _, _ in parts] == [
        "RWKVJIT_CACHE_DIR", "RWKVJIT_CACHE_DIR", "CUPY_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    ]  # fmt: skip
    for _, prepare, load in parts:
        names = compile(prepare + load, "a program", "exec").co_names
        assert "call" in names
    compile(bench.service._PROGRAM, "the program", "exec")


def test_interrupt_keeps_what_was_measured(gpu, run, monkeypatch, other_modules):
    measured = measure.rows_of

    def rows_of(entry, *given):
        if len(gpu) == 2:
            raise KeyboardInterrupt
        return measured(entry, *given)

    monkeypatch.setattr(measure, "rows_of", rows_of)
    code, printed, _ = run("bench", "--suite", "wkv4", "--record", "--json")
    assert [row["skipped"] for row in json.loads(printed)["rows"]] == [None, None]
    assert other_modules == [("write", 1)]
    gpu.clear()
    code, printed, _ = run("bench", "--suite", "wind", "--record", "--json")
    assert code == 0
    assert [row["skipped"] for row in json.loads(printed)["rows"]] == [None] * 2 + ["interrupted"] * 6
    assert other_modules == [("write", 1)]


def test_interrupt_ends_the_processes_that_try(monkeypatch):
    """The first answer interrupts; the other process sleeps, and would for minutes."""
    monkeypatch.setattr(isolation, "_PROGRAM", CHILD.replace("os._exit(7)", "import time; time.sleep(600)"))
    running = isolation._Running()
    monkeypatch.setattr(isolation, "_Running", lambda: running)
    started = []
    add = running.add
    monkeypatch.setattr(running, "add", lambda process: (add(process), started.append(process)))

    def tell(done, total):
        while len(started) < 2:
            pass
        raise KeyboardInterrupt

    attempts = [Attempt(small("wkv7"), "fla", "works"), Attempt(small("gla"), "fla", "dies")]
    with pytest.raises(KeyboardInterrupt):
        isolation.obstacles(attempts, tell, at_once=2)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.fixture
def no_gpu(monkeypatch):
    """Times are made up; what is called, is."""
    torch.manual_seed(0)  # so few channels that sums over the tokens of wkv4 nearly cancel once in 200 draws
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "cpu_ms", lambda function: [3.0, 1.0, 2.0] if function() is not None else [])


def test_calls_on_the_cpu_are_no_kernels(no_gpu, run):
    code, printed, said = run("bench", "--json")
    assert (code, said) == (0, "")
    found = json.loads(printed)
    assert (found["device"], found["copy_tb_per_s"]) == ("cpu", None)
    assert [(row["op"], row["phase"]) for row in found["rows"]] == [
        (op, phase) for op in sorted(bench.OPS) for phase in ("forward", "forward+backward")
    ]
    assert {(row["who"], row["what"]) for row in found["rows"]} == {("rwkv_jit", "auto")}
    assert {row["shape"][0] for row in found["rows"]} == {1}
    assert {row["median_ms"] for row in found["rows"]} == {statistics.median([1.0, 2.0, 3.0])}
    assert all(row["floor_ms"] is row["fraction"] is row["peak_mib"] is None for row in found["rows"])
    assert all(0 < row["error"] < 3e-3 for row in found["rows"])


def test_the_cpu_measures_what_it_is_asked_for(no_gpu, run, monkeypatch):
    calls = []
    monkeypatch.setitem(
        bench.OPS, "timex", lambda *given, **more: calls.append((given[1].shape, more)) or (given[1], 0)
    )
    options = ("--op", "timex", "--dtype", "fp32", "--phase", "forward", "--json")
    code, printed, _ = run("bench", *options, "--shape", "2,3,20", "--backend", "fft")
    assert code == 0
    (row,) = json.loads(printed)["rows"]
    assert (row["what"], row["shape"], row["dtype"]) == ("fft", [2, 3, 20], "float32")
    assert calls[0] == (torch.Size([2, 3, 20]), {"backend": "fft"})
    text = run("bench", "--op", "wkv6", "--shape", "2,3,2,4", "--phase", "decode")[1]
    assert "wkv6 (2, 1, 2, 4, 4) bfloat16, decode\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "gla"], "--suite: its shapes are for a GPU, and torch sees none; expected --shape"),
        (["--backend", "chunked", "--op", "wkv6"], "--backend: torch sees no GPU; expected auto for wkv6, got chunked"),
        (["--backend", "tiles"], "--backend: torch sees no GPU; expected auto or fft for timex, got tiles"),
        (["--csv", "/proc/x.csv"], "--csv: expected a file that can be written, got /proc/x.csv (No such file or "),
        (["--plot", "/proc/x.png"], "--plot: expected a file that can be written, got /proc/x.png (No such file or "),
    ],
)
def test_what_cannot_be_done_is_said(no_gpu, run, arguments, message, monkeypatch):
    monkeypatch.setattr(measure, "rows_of_cpu", lambda entry: pytest.fail("it was measured"))
    code, printed, said = run("bench", *arguments)
    assert (code, printed) == (2, "")
    assert said.startswith(f"rwkv-jit bench: {message}")


def test_files_that_are_checked_stay_as_they_are(tmp_path):
    (tmp_path / "there.csv").write_text("a")
    for name in ("there.csv", "new.csv"):
        bench._check_writable("--csv", tmp_path / name)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.csv", "a")]


def test_a_result_that_is_not_there_is_named(run, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"format": 1, "rows": []}))
    missing = tmp_path / "missing.json"
    sentence = f"rwkv-jit bench: --compare: {missing} cannot be read (No such file or directory)\n"
    assert run("bench", "--compare", tmp_path / "a.json", missing) == (2, "", sentence)


def test_names_of_the_command_line_are_those_of_the_bench():
    """They are listed apart, so that --help need not load torch."""
    from rwkv_jit import cli

    assert sorted(cli._OPS) == sorted(bench.OPS) == sorted(runtime.NAMES)
    assert cli._PHASES == bench.PHASES
    assert cli._SUITES == suites.SUITES
    assert list(cli._DTYPES) == list(bench.DTYPES)
    assert list(cli._BACKENDS) == list(dict.fromkeys(
        name for op in ("wkv6", "wkv4", "timex") for name in contestants.backends_of(op)
    ))  # fmt: skip


def test_children_of_the_service_say_nothing_of_their_caches(monkeypatch):
    """Their caches are temporary: what they would say of them is wrong a second later."""
    from rwkv_jit import latency

    log = "import json, os\nprint('ready', flush=True)\ninput()\nprint(json.dumps([os.environ['RWKVJIT_LOG'], 0.0]))"
    monkeypatch.setattr(latency, "_TOGETHER", log)
    assert latency._start_together(2) == [("error", 0.0)] * 2
    assert latency._child("import json, os\nprint(json.dumps(os.environ['RWKVJIT_LOG']))") == "error"
