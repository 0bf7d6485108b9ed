"""The benchmark of the package without a GPU: cases, floors, times, rows, and its command."""

import json
import statistics
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rwkv_jit.desk import bench, versions
from rwkv_jit.desk.bench import cases, measure, timing
from rwkv_jit.desk.bench.cases import Case
from rwkv_jit.desk.bench.measure import Contestant, Entry
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.plain import reference
from rwkv_jit.schedules.table import OPS

SMALL = (2, 6, 2, 4, 3)


def small(op, phase="forward", dtype=torch.float32, **more):
    shape = cases.shape_of(op, "2,6,2,4") if op in cases.WITHOUT_HEADS else SMALL
    shape = (5, 1, *SMALL[2:]) if phase == "update" else shape
    return Case(op, shape, dtype, phase, **more)


def updates(op, dtype=torch.float32):
    """An update of each kind of states that the op has."""
    kinds = ["usual", *(kind for kind in cases.KINDS if kind.endswith("states") and op in cases.ops_of(kind))]
    assert len(kinds) == 4
    return [small(op, "update", dtype, kind=kind).check() for kind in kinds]


@pytest.fixture
def on_cpu(monkeypatch):
    """Cases get tensors of the CPU."""
    real = cases.given_for
    monkeypatch.setattr(cases, "given_for", lambda case, device="cpu": real(case, "cpu"))


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


@pytest.mark.parametrize("op", ["wkv5", "wkv6", "wkv7", "gla"])
def test_strong_decays_are_those_of_all_heads_or_of_one(op):
    factors = {}
    for kind in ("strong", "one-strong"):
        case = Case(op, (4, 8, 3, 5, 5), torch.float32, kind=kind).check()
        given = cases.given_for(case, "cpu")
        w = given.inputs[{"wkv6": 3, "wkv5": 3, "wkv7": 1, "gla": 3}[op]]
        factors[kind] = reference.decay_factor(w, case.decay)
        y, _ = cases.REFERENCES[op](*given.inputs, **case.options)
        assert bool(y.isfinite().all())
    assert factors["strong"].max() <= 0.14
    few = factors["one-strong"] < 0.14
    heads = few.all(-1) if op == "wkv5" else few.all(-1).all(1)  # wkv5 has the decays of a head for the whole batch
    assert heads.nonzero().tolist() == [[0] if op == "wkv5" else [0, 0]]


def test_packed_inputs_are_sequences_of_unequal_lengths():
    for tokens in (16, 100, 32768):
        ends = cases.given_for(
            Case("wkv6", (1, tokens, 1, 2, 2), torch.float32, kind="packed").check(), "cpu"
        ).cu_seqlens
        assert (int(ends[0]), int(ends[-1]), len(ends)) == (0, tokens, 17)
        assert bool((ends.diff() > 0).all())
    assert len(set(ends.diff().tolist())) > 10
    with pytest.raises(ValueError, match="^--inputs: packed ones are a batch of 1 .* and no decode$"):
        Case("wkv6", (1, 20, 1, 2, 2), torch.float32, "decode", kind="packed").check()


@pytest.mark.parametrize("op", cases.UPDATES)
def test_an_update_is_given_a_pool(op):
    own, other = ("kv", "vk") if op in ("gla", "linear_attention") else ("vk", "kv")
    sizes = {"vk": (3, 4), "kv": (4, 3)}
    wanted = [(torch.float32, own), (torch.bfloat16, own), (torch.float32, other), (torch.bfloat16, other)]
    for case, (dtype, layout) in zip(updates(op), wanted, strict=True):
        given = cases.given_for(case, "cpu")
        assert (given.state.dtype, given.state.shape) == (dtype, (5, 2, *sizes[layout]))
        assert given.slots.dtype == torch.int32
        assert sorted(given.slots.tolist()) == [0, 1, 2, 3, 4]
        assert (case.state_layout, case.options.get("state_layout", own)) == (layout, layout)
        assert case.options.get("decay") == ("sigmoid" if op == "wkv7" else None)
        wanted_states = torch.stack([given.state[slot] for slot in given.slots.tolist()])
        assert torch.equal(given.states(), wanted_states)
        assert torch.equal(given.states(2), wanted_states[:2])
        inputs, bytes_of_states = (
            sum(x.nbytes for x in given.inputs),
            5 * 2 * 12 * (2 if dtype == torch.bfloat16 else 4),
        )
        assert given.size() == inputs + 5 * 2 * 3 * 4 + bytes_of_states + 5 * 4
    orders = {tuple(cases.given_for(small(op, "update"), "cpu").slots.tolist()) for _ in range(20)}
    assert len(orders) > 1


def test_states_of_updates_are_no_inputs_of_other_phases():
    message = "^--inputs: bf16-states are only for updates, not for decode$"
    with pytest.raises(ValueError, match=message):
        small("wkv7", "decode", kind="bf16-states").check()
    with pytest.raises(ValueError, match="^--inputs: gla has none that are kv-states$"):
        small("gla", "update", kind="kv-states").check()
    for op in ("wkv4", "timex"):
        with pytest.raises(ValueError, match=f"^--phase: expected one of forward, .* for {op}, got update$"):
            Case(op, (1, 1, 2, 4, 4), torch.float32, "update").check()
    assert (cases.shape_of("wkv7", "8,4096,64,64", "update"), small("wkv7").state_dtype) == (
        (8, 1, 64, 64, 64), torch.float32,
    )  # fmt: skip


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
    if phase not in cases.phases_of(op):
        return
    wide = op in ("wkv6", "wkv7")
    case = small(op, phase, torch.bfloat16, wide_decay=wide)
    given = cases.given_for(case, "cpu")
    inputs, y = (sum(x.numel() * x.element_size() for x in some) for some in (given.inputs, [given.dy]))
    state = 0 if op == "timex" else 4 * cases.given_for(case._replace(phase="decode"), "cpu").state.numel()
    wanted = {
        "forward": inputs + y,
        "backward": 2 * inputs + y,
        "forward+backward": 3 * inputs + 2 * y,
        "decode": inputs + y + 2 * state,
        "prefill": inputs + y + state,
        "update": inputs + y + 2 * given.state.nbytes if phase == "update" else None,
    }
    assert cases.least_bytes(case) == wanted[phase]


@pytest.mark.parametrize(("op", "shape", "kind", "size"), [
    ("wkv7", (1024, 1, 64, 64, 64), "usual", 6 * 2**23 + 2**23 + 2 * 2**30),
    ("wkv7", (1024, 1, 64, 64, 64), "bf16-states", 6 * 2**23 + 2**23 + 2 * 2**29),
    ("gla", (64, 1, 32, 128, 128), "vk-states", 4 * 2**19 + 2**19 + 2 * 2**27),
    ("wkv6", (1, 1, 32, 64, 64), "usual", 4 * 2**12 + 2**12 + 2**12 + 2 * 2**19),
])  # fmt: skip
def test_floor_of_an_update_is_its_states_read_and_written(op, shape, kind, size):
    """Inputs, y and the states of float32 or bfloat16, twice."""
    case = Case(op, shape, torch.bfloat16, "update", kind=kind).check()
    assert cases.least_bytes(case) == size
    assert cases.floor_ms(case, 2.5) == pytest.approx(size / 2.5e9)


@pytest.mark.parametrize(("kind", "dtype", "size"), [
    ("usual", torch.float32, 1540), ("bf16-states", torch.bfloat16, 1300),
])  # fmt: skip
def test_sets_of_an_update_have_a_pool_each(on_cpu, kind, dtype, size):
    """Of wkv7, 5 rows, 2 heads, K 4 and V 3: 800 bytes have r, w, k, a and b, 240 v and y, 20 slots, and 480 states."""
    sets = cases.sets_for(small("wkv7", "update", kind=kind), 3000)
    assert [given.size() for given in sets] == [size] * (6000 // size + 1)
    assert {given.state.dtype for given in sets} == {dtype}
    assert len({given.state.data_ptr() for given in sets}) == len(sets)


# ---- timing ------------------------------------------------------------------------------------------------------


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


def test_inputs_live_as_long_as_the_graph_that_reads_them(clock):
    inputs = torch.zeros(4)
    alive = weakref.ref(inputs)
    turns = timing.Turns([partial(lambda x: clock.spend(len(x)), inputs)], in_graph=True)
    del inputs
    assert alive() is not None
    assert turns.in_graph


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


# ---- who is measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", cases.UPDATES)
def test_updates_of_ours_and_of_torch_are_those_of_float64(op, monkeypatch):
    monkeypatch.setattr(measure, "MOST_ROWS", 3)
    for case in updates(op):
        given = cases.given_for(case, "cpu")
        before, own = given.state.clone(), measure.our_call(case, "auto", "update")
        everyone = [own, *measure.torch_peers(case)]
        assert [(each.who, each.what) for each in everyone] == [
            ("rwkv_jit", "update"), ("torch", "copy"), ("torch", "step in place"),
        ]  # fmt: skip
        ours, copy, step = measure._errors(case, everyone, given, [own])
        assert torch.equal(given.state, before)
        narrow = case.state_dtype == torch.bfloat16
        for errors, of_y, of_states in ((ours, 2e-6, 4e-3), (step, 3e-2, 2e-2)):
            assert list(errors["errors"]) == ["y", "state"]
            assert 0 < errors["errors"]["y"] < (of_y if narrow else 2e-6)
            assert 0 < errors["errors"]["state"] < (of_states if narrow else 2e-6)
            assert errors["error"] == max(errors["errors"].values())
        assert (ours["errors"]["state"] > 1e-4) == narrow  # it is the state as it was written
        assert (ours["other"], ours["other_error"]) == (None, None)
        assert step["other"] == "update"
        assert 0 <= step["other_error"] < (3e-2 if narrow else 3e-6)
        assert copy == {"error": None, "errors": {}, "other": None, "other_error": None}


@pytest.mark.parametrize("op", cases.UPDATES)
def test_updates_go_on_from_states_of_their_own(op):
    for case in updates(op):
        if case.state_dtype == torch.bfloat16:
            continue
        given = cases.given_for(case, "cpu")
        before = given.state.clone()
        own, _, step = everyone = [measure.our_call(case, "auto", "update"), *measure.torch_peers(case)]
        calls = [measure.run_once(case, each, given) for each in everyone]
        states = torch.stack([before[slot] for slot in given.slots.tolist()])
        inputs = [x.detach() for x in given.inputs]
        memory = set()
        for _ in range(3):
            y, states = cases.REFERENCES[op](*inputs, states, True, **case.options)
            for each, call in zip((own, step), (calls[0], calls[2]), strict=True):
                found, final = call()
                memory |= {(each.what, found.data_ptr() if each is own else 0, final.data_ptr())}
                torch.testing.assert_close(found, y)
                torch.testing.assert_close(final[given.slots] if each is own else final, states)
        assert len(memory) == 2  # ours writes y where it is told, and both the states where they were
        assert torch.equal(given.state, before)


def test_a_copy_reads_and_writes_the_states(on_cpu):
    case = small("gla", "update", kind="bf16-vk-states")
    given, copy = cases.given_for(case), measure.torch_peers(case)[0]
    both, _ = measure.beside(case, copy, given)
    both[1].zero_()
    y, written = copy.run(given.inputs, both, {})
    assert y is None
    assert written.data_ptr() == both[1].data_ptr() != both.data_ptr()
    assert torch.equal(written, given.states())
    assert written.nbytes == given.state.nbytes == 5 * 2 * 3 * 4 * 2


def test_new_states_stay_until_their_set_comes_round(on_cpu):
    """Else all sets would write into one memory, which a cache holds."""
    case = small("wkv6", "update")
    new = Contestant("fla", "x", lambda inputs, state, more: reference.wkv6_ref(*inputs, state, **more))
    calls = [measure.run_once(case, new, given) for given in (cases.given_for(case), cases.given_for(case))]
    alive = [weakref.ref(call()[1]) for call in calls]
    assert [each() is not None for each in alive] == [True, True]
    calls[0]()
    assert [each() is not None for each in alive] == [False, True]


@pytest.mark.parametrize("phase", ["forward+backward", "decode", "prefill"])
@pytest.mark.parametrize("op", ["wkv5", "wkv6", "timex"])
def test_torch_computes_the_same(op, phase):
    if op == "timex" and phase != "forward+backward":
        return
    case = small(op, phase)
    peers = measure.torch_peers(case)
    assert [each.what for each in peers] == (["conv1d", "fft"] if op == "timex" else ["naive loop"])
    found = measure._errors(case, peers, cases.given_for(case, "cpu"), [])
    assert all(0 < each["error"] < 2e-6 for each in found), found


def test_loops_are_left_out_where_they_are_long():
    assert measure.torch_peers(Case("wkv6", (1, measure.MOST_LOOPED_TOKENS + 1, 1, 8, 8), torch.float32)) == []
    assert measure.torch_peers(small("wkv7")) == []


def test_backends_that_come_to_the_same_are_one_contestant(monkeypatch):
    taken = {"auto": "scan", "recurrent": "recurrent", "split": "scan"}

    def backend_of(case, asked):
        if asked not in taken:
            raise UnsupportedConfigError(f"backend: {asked!r} takes smaller heads")
        return taken[asked]

    monkeypatch.setattr(measure, "backend_of", backend_of)
    found, obstacles = measure.ours(small("wkv7"))
    assert [(each.who, each.what) for each in found] == [("rwkv_jit", "scan"), ("rwkv_jit", "recurrent")]
    assert obstacles == {}
    assert measure.ours(small("wkv7"), ["chunked"]) == ([], {"chunked": "backend: 'chunked' takes smaller heads"})


def test_ours_are_called_as_asked(monkeypatch):
    calls = []
    monkeypatch.setitem(cases.OPS, "wkv7", lambda *given, **options: calls.append(options) or ("y", "final"))
    monkeypatch.setattr(measure, "backend_of", lambda case, asked: asked)
    ((usual,), _), ((strong,), _) = (measure.ours(small("wkv7", kind=kind), ["split"]) for kind in ("usual", "strong"))
    assert usual.run([1, 2], None, {}) == ("y", "final")
    assert strong.run([1, 2], "before", {"output_final_state": True}) == ("y", "final")
    assert calls == [
        {"backend": "split", "decay": "sigmoid"},
        {"backend": "split", "decay": "raw", "initial_state": "before", "output_final_state": True},
    ]


def test_rule_is_asked_about_the_case(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure.tensors, "_capability", lambda device: "sm_90")
    monkeypatch.setattr(measure.tensors, "multiprocessors", lambda device: 132)
    big = Case("wkv7", (8, 4096, 16, 256, 256), torch.bfloat16)
    assert [measure.backend_of(big, name) for name in ("auto", "recurrent")] == ["split", "recurrent"]
    timex = Case("timex", (32, 768, 1, 768, 768), torch.float32)
    assert [measure.backend_of(timex, name) for name in ("auto", "fft")] == ["transforms", "fft"]
    assert measure.backend_of(timex._replace(phase="backward"), "auto") == "tiles"
    assert measure.backend_of(timex._replace(phase="forward+backward"), "auto") == "transforms, tiles"
    wkv4 = Case("wkv4", (1, 65536, 1, 64, 64), torch.float32)
    assert [measure.backend_of(wkv4, name) for name in ("auto", "recurrent")] == ["split", "recurrent"]
    monkeypatch.setattr(measure, "ends_of", lambda case: cases.ends_of(case, "cpu"))
    monkeypatch.setattr(measure.tensors, "longest", lambda ends, _: 0 if ends is None else int(ends.diff().max()))
    for heads, backend in ((64, "chunked"), (6, "split")):  # by the lengths and the number of packed sequences
        packed = Case("wkv7", (1, 32768, heads, 64, 64), torch.bfloat16, kind="packed")
        assert measure.backend_of(packed, "auto") == backend


# ---- rows --------------------------------------------------------------------------------------------------------


def contestant(clock, name, ms, who="rwkv_jit", fails=None, change=lambda y: y):
    """What computes wkv6 as the reference does, but for a change, in `ms` of the clock, as does its backward."""

    def run(inputs, state, more):
        clock.spend(ms)
        if fails is not None:
            raise fails
        y, final = reference.wkv6_ref(*inputs, state, **more)
        y = change(y)
        if y.requires_grad:
            y.register_hook(lambda _: clock.spend(ms))
        return y, final

    return Contestant(who, name, run)


@pytest.fixture
def own(clock, monkeypatch):
    """Our backends: chunks, and the recurrence."""
    found = [contestant(clock, "chunked", 2.0), contestant(clock, "recurrent", 8.0)]
    monkeypatch.setattr(measure, "ours", lambda case, asked=None: (found[: len(asked) if asked else 2], {}))
    return found


@pytest.fixture
def short_looks_at_the_host(monkeypatch):
    """The host's clock is a real one; rows of calls are made for a hundredth of a second."""
    host_us = timing.host_us
    monkeypatch.setattr(timing, "host_us", lambda calls, seconds=None: host_us(calls, 0.01))


@pytest.mark.usefixtures("short_looks_at_the_host")
@pytest.mark.parametrize("phase", cases.PHASES)
def test_rows_of_a_case(clock, own, phase):
    case = small("wkv6", phase)
    clock.peak = 3 << 20
    peers = [contestant(clock, "broken", 1.0, "fla", ValueError("no such shape\nx")),
             contestant(clock, "off", 4.0, "fla", change=lambda y: 1.5 * y),
             contestant(clock, "nan", 1.0, "fla", change=lambda y: y * float("nan"))]  # fmt: skip
    rows = measure.rows_of(Entry("made up", case, ["auto"]), 1e-6, peers)
    skipped = {row["what"]: row["skipped"] for row in rows if row["skipped"]}
    assert skipped == {
        "broken": "ValueError: no such shape",
        "nan": "its results are not finite, so it has no speed",
    }
    ours, off = (row for row in rows if not row["skipped"])
    assert [ours["what"], off["what"]] == ["chunked", "off"]
    assert list(ours) == list(measure.COLUMNS)
    assert (ours["suite"], ours["op"], ours["shape"], ours["dtype"]) == ("made up", "wkv6", list(case.shape), "float32")
    assert {(row["phase"], row["inputs"]) for row in rows} == {(phase, "usual")}
    passes = 2 if phase == "forward+backward" else 1
    assert (ours["median_ms"], off["median_ms"]) == (2.0 * passes, 4.0 * passes)
    assert ours["low_ms"] == ours["high_ms"] == ours["median_ms"]
    assert ours["runs"] == off["runs"] == timing.MOST_ROUNDS
    assert ours["in_graph"] == (phase in ("forward", "decode", "prefill", "update"))
    assert ours["host_us"] > 0
    assert ours["floor_ms"] == pytest.approx(cases.least_bytes(case) * 1e-3)
    assert ours["fraction"] == pytest.approx(ours["floor_ms"] / ours["median_ms"])
    assert ours["peak_mib"] == pytest.approx(3 + cases.given_for(case).size() / 2**20)
    gradients = ["dr", "dk", "dv", "dw", "du"] if "backward" in phase else []
    assert list(ours["errors"]) == ["y", *gradients, *(["state"] if phase == "update" else [])]
    assert ours["error"] == max(ours["errors"].values()) < 2e-6
    assert (off["error"], off["other_error"]) == (pytest.approx(0.5, abs=1e-5), pytest.approx(0.5, abs=1e-5))
    assert (ours["other"], ours["other_error"]) == ("recurrent", 0.0)
    assert {row["median_ms"] for row in rows if row["skipped"]} == {None}


@pytest.mark.usefixtures("short_looks_at_the_host")
def test_a_copy_and_a_step_have_rows_beside_an_update(clock, monkeypatch):
    def timed(contestant, ms):
        return contestant._replace(run=lambda *given: (clock.spend(ms), contestant.run(*given))[1])

    case = small("wkv7", "update", kind="kv-states")
    own, copy, step = measure.our_call(case, "auto", "update"), *measure.torch_peers(case)
    monkeypatch.setattr(measure, "ours", lambda case, asked=None: ([timed(own, 2.0)], {}))
    copies, around, beside = [], [], measure.beside

    def counted(*given):
        copies.append(given)
        return beside(*given)

    def peak_bytes(call):
        around.append(len(copies))
        call()
        around.append(len(copies))
        return 0

    monkeypatch.setattr(measure, "beside", counted)
    monkeypatch.setattr(timing, "peak_bytes", peak_bytes)
    rows = measure.rows_of(Entry("made up", case, ["auto"]), 1e-6, [timed(copy, 1.0), timed(step, 8.0)])
    assert [(row["who"], row["what"], row["median_ms"], row["skipped"]) for row in rows] == [
        ("rwkv_jit", "update", 2.0, None), ("torch", "copy", 1.0, None), ("torch", "step in place", 8.0, None),
    ]  # fmt: skip
    assert [list(row["errors"]) for row in rows] == [["y", "state"], [], ["y", "state"]]
    assert [row["error"] is None for row in rows] == [False, True, False]
    assert {row["in_graph"] for row in rows} == {True}
    assert {(row["phase"], row["inputs"]) for row in rows} == {("update", "kv-states")}
    assert [row["floor_ms"] for row in rows] == [pytest.approx((5 * 160 + 2 * 120 + 2 * 480) * 1e-3)] * 3
    assert around[::2] == around[1::2]  # a call that is made ready copies states, which are no part of its memory


def test_states_that_grow_without_bound_have_no_speed(clock, monkeypatch):
    """One step from the states that are given is finite."""
    case = small("wkv6", "update")
    states = {}

    def grows(inputs, state, more):
        clock.spend(1.0)
        y, final = reference.wkv6_ref(*inputs, state, **more)
        grown = states.setdefault(id(state), [state, 1.0])
        grown[1] *= 1e10
        return y, final * (grown[1] / 1e10)

    monkeypatch.setattr(measure, "ours", lambda *_: ([contestant(clock, "update", 2.0)], {}))
    ours, grown = measure.rows_of(Entry(None, case), 1.0, [Contestant("fla", "x", grows)])
    assert (ours["skipped"], ours["median_ms"]) == (None, 2.0)
    assert grown["skipped"] == "its states did not stay finite, so it has no speed"
    assert grown["median_ms"] is None


def test_backends_that_cannot_are_rows_too(clock, monkeypatch):
    monkeypatch.setattr(measure, "ours", lambda *_: ([], {"split": "backend: 'split' has no segments"}))
    (row,) = measure.rows_of(Entry(None, small("wkv6"), ["split"]), 1.0)
    assert (row["who"], row["what"], row["skipped"]) == ("rwkv_jit", "split", "backend: 'split' has no segments")


@pytest.mark.parametrize("kind", [kind for kind in cases.KINDS if not kind.endswith("states")])
@pytest.mark.parametrize("op", bench.OPS)
def test_errors_are_those_of_the_first_tokens_of_the_whole_call(op, kind, monkeypatch):
    """What is judged has seen all tokens: of the reference over all of them, some, float64 finds no fault with."""
    shape = (1, 40, 2, 4, 4) if kind == "packed" else (2, 40, 2, 4, 4)
    case = Case(op, shape, torch.float32, "forward+backward", kind=kind)
    if op not in cases.ops_of(kind):
        return
    monkeypatch.setattr(measure, "MOST_TOKENS", 17)
    shapes = []

    def run(inputs, state, more):
        shapes.append(inputs[-1].shape)
        return cases.REFERENCES[op](*inputs, **more, **case.options)

    given = cases.given_for(case, "cpu")
    (found,) = measure._errors(case, [Contestant("rwkv_jit", "x", run)], given, [])
    assert set(shapes) == {given.inputs[-1].shape}
    assert list(found["errors"]) == ["y", *(f"d{name}" for name in cases.names_of(op))]
    assert 0 < found["error"] < 5e-6
    assert (found["other"], found["other_error"]) == (None, None)


def test_faults_behind_the_first_tokens_are_seen_by_the_other_backend(clock, own, monkeypatch):
    monkeypatch.setattr(measure, "MOST_TOKENS", 4)
    late = contestant(clock, "late", 1.0, change=lambda y: torch.cat([y[:, :4], 2 * y[:, 4:]], 1))
    case = small("wkv6")
    found = measure._errors(case, [late, own[1]], cases.given_for(case), own)
    assert found[0]["error"] < 2e-6
    assert found[0]["other_error"] > 0.1
    assert [each["other"] for each in found] == ["recurrent", "chunked"]


def test_errors_are_none_where_nothing_can_be_done(clock):
    cannot = contestant(clock, "x", 1.0, fails=ValueError("too few"))
    (found,) = measure._errors(small("wkv6"), [cannot], cases.given_for(small("wkv6")), [])
    assert found == {"error": None, "errors": {}, "other": None, "other_error": None}


# ---- the command -------------------------------------------------------------------------------------------------

ENVIRONMENT = {"gpus": ["a GPU"], "torch": "2.13", "nvrtc": "12.9 0123abcd"}


def made_up_row(**other):
    return measure.row(Entry(None, small("wkv6")), "rwkv_jit", "chunked") | {
        "median_ms": 0.5, "low_ms": 0.25, "high_ms": 0.75, "runs": 20, "in_graph": True, "host_us": 612.34,
        "floor_ms": 0.25, "fraction": 0.5, "peak_mib": 3.5, "error": 1.7e-3, "errors": {"y": 1e-3, "dr": 1.7e-3},
        "other": "recurrent", "other_error": 2e-3,
    } | other  # fmt: skip


def test_table(capsys):
    skipped = measure.row(Entry(None, small("wkv6")), "fla", "chunk_rwkv6", "ValueError: no")
    rows = [made_up_row(), made_up_row(what="split", host_us=9.0), skipped, made_up_row(inputs="packed")]
    bench.show({"device": "cuda", "env": ENVIRONMENT, "copy_tb_per_s": 4.25, "rows": rows})
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[:9] == [
        "a GPU, torch 2.13, NVRTC 12.9; a copy moves 4.25 TB/s",
        "",
        "wkv6 (2, 6, 2, 4, 3) float32, forward; floor 0.2500 ms",
        "by ms quartiles of the floor in a graph host us peak MiB error other",
        "rwkv_jit chunked 0.5000 0.2500 to 0.7500 50% yes 612.3 † 3.5 1.7e-03 2.0e-03",
        "rwkv_jit split 0.5000 0.2500 to 0.7500 50% yes 9.0 3.5 1.7e-03 2.0e-03",
        "errors of rwkv_jit chunked: y 1.0e-03, dr 1.7e-03",
        "errors of rwkv_jit split: y 1.0e-03, dr 1.7e-03",
        "skipped: fla chunk_rwkv6: ValueError: no",
    ]
    assert "\nwkv6 (2, 6, 2, 4, 3) float32, forward, 16 packed; floor 0.2500 ms\n" in printed
    assert "a † marks where it takes longer than the GPU" in printed


def test_table_of_every_kind_of_inputs(capsys):
    rows = [made_up_row(inputs=kind) for kind in cases.KINDS_OF_SUITES]
    bench.show({"device": "cuda", "env": ENVIRONMENT, "copy_tb_per_s": 4.25, "rows": rows})
    printed = capsys.readouterr().out
    for text in cases.KINDS_OF_SUITES.values():
        assert f"float32, forward{text and f', {text}'}; floor" in printed


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, where nothing is measured: what is asked for is noted."""
    asked = []

    def rows_of(entry, copy, peers, tell):
        asked.append(entry)
        tell(1, 2)
        if entry.case.op == "gla":
            raise RuntimeError("CUDA out of memory")
        if len(asked) == 4:
            raise KeyboardInterrupt
        return [made_up_row(op=entry.case.op)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(versions, "is_available", lambda: True)
    paths = {"nvrtc_libraries": ["/a/library"], "cache": "/a/cache", "environment": {}}
    monkeypatch.setattr(versions, "env_report", lambda: ENVIRONMENT | paths)
    monkeypatch.setattr(timing, "copy_tb_per_s", lambda: 4.25)
    monkeypatch.setattr(measure, "rows_of", rows_of)
    return asked


def test_command_measures_what_it_is_asked_for(gpu, run):
    options = ("--shape", "2,32,4,16", "--dtype", "fp16", "--phase", "backward", "--json")
    code, printed, said = run("bench", "--op", "wkv6", "--op", "timex", *options)
    assert code == 0
    assert said == "measuring 1 of 2: wkv6 backward 2,32,4,16,16\nmeasuring 2 of 2: timex backward 2,64,32\n"
    found = json.loads(printed)
    assert [entry.case for entry in gpu] == [
        Case(op, (2, 32, 4, 16, 16), torch.float16, "backward") for op in ("wkv6", "timex")
    ]
    assert {entry.backends for entry in gpu} == {None}
    assert (found["device"], found["copy_tb_per_s"], found["env"]) == ("cuda", 4.25, ENVIRONMENT)
    assert [row["op"] for row in found["rows"]] == ["wkv6", "timex"]


@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        (["--backend", "tiles"], {"timex"}),
        (["--inputs", "one-strong", "--phase", "forward"], {"wkv5", "wkv6", "wkv7", "gla"}),
        (["--inputs", "packed"], {"wkv5", "wkv6", "wkv7", "gla", "linear_attention"}),
        (["--phase", "decode"], {*bench.OPS} - {"timex"}),
        (["--phase", "update"], {*bench.OPS} - {"timex", "wkv4"}),
        (["--phase", "update", "--inputs", "vk-states"], {"gla", "linear_attention"}),
    ],
)
def test_ops_are_those_that_can(arguments, ops):
    from rwkv_jit.desk import cli

    entries = bench.asked_for(cli._parser().parse_args(["bench", *arguments]))
    assert {entry.case.op for entry in entries} == ops
    if {"decode", "update"} & {*arguments}:
        assert {entry.case.shape[1] for entry in entries} == {1}
    if "packed" in arguments:
        assert {entry.case.shape[0] for entry in entries} == {1}


def test_a_case_that_fails_hides_no_other_and_an_interrupt_none_before_it(gpu, run):
    ops = [word for op in ("gla", "wkv6", "wkv7", "wkv5", "timex") for word in ("--op", op)]
    code, printed, _ = run("bench", *ops, "--shape", "1,32,1,8", "--phase", "forward", "--json")
    assert code == 0
    skipped = [row["skipped"] for row in json.loads(printed)["rows"]]
    assert skipped == ["RuntimeError: CUDA out of memory", None, None, "interrupted", "interrupted"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "timex", "--phase", "decode"], "one of forward, backward, forward+backward for timex, got decode"),
        (["--op", "wkv4", "--phase", "update"], "forward+backward, decode, prefill for wkv4, got update"),
        (["--op", "wkv6", "--phase", "update", "--backend", "recurrent"], "one of auto for wkv6, got recurrent"),
        (["--op", "wkv6", "--inputs", "bf16-states"], "bf16-states are only for updates, not for forward"),
        (["--op", "wkv6", "--backend", "tiles"], "one of auto, recurrent, chunked, split for wkv6, got tiles"),
        (["--op", "timex", "--backend", "split"], "one of auto, tiles, transforms, fft for timex, got split"),
        (["--op", "wkv7", "--shape", "1,2"], "positive numbers B,T,H,N or B,T,H,K,V for wkv7, got '1,2'"),
        (["--op", "timex", "--inputs", "strong"], "--inputs: timex has none that are strong"),
        (["--op", "wkv4", "--inputs", "strong"], "--inputs: wkv4 has none that are strong"),
        (["--op", "wkv6", "--inputs", "packed", "--shape", "1,6,1,8"], "packed ones are a batch of 1 with 16 or more"),
        (["--op", "wkv6", "--inputs", "packed", "--shape", "2,32,1,8"], "packed ones are a batch of 1 with 16 or more"),
    ],
)
def test_arguments_that_do_not_go_together(gpu, run, arguments, message):
    code, printed, said = run("bench", *arguments)
    assert (code, printed) == (2, "")
    assert message in said
    assert gpu == []


@pytest.fixture
def no_gpu(monkeypatch):
    """Times are made up; what is called, is."""
    torch.manual_seed(0)  # so few channels that sums over the tokens of wkv4 nearly cancel once in 200 draws
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "cpu_ms", lambda function: [3.0, 1.0, 2.0] if function() is not None else [])


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "message"),
    [
        (False, ["--backend", "chunked", "--op", "wkv6"],
         "--backend: torch sees no GPU; expected auto for wkv6, got chunked"),
        (False, ["--backend", "tiles"], "--backend: torch sees no GPU; expected auto or fft for timex, got tiles"),
        (True, ["--op", "wkv6"], "bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing"),
    ],
)  # fmt: skip
def test_what_the_machine_cannot_do_is_said(no_gpu, run, has_gpu, arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(versions, "is_available", lambda: False)
    assert run("bench", *arguments) == (2, "", f"rwkv-jit bench: {message}\n")


def test_calls_on_the_cpu_are_no_kernels(no_gpu, run):
    code, printed, said = run("bench", "--json")
    assert (code, said.count("\nmeasuring ")) == (0, 2 * len(bench.OPS) - 1)
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


def test_the_cpu_measures_what_it_is_asked_for(no_gpu, run):
    options = ("--op", "timex", "--dtype", "fp32", "--phase", "forward", "--json")
    code, printed, _ = run("bench", *options, "--shape", "2,3,20", "--backend", "fft")
    (row,) = json.loads(printed)["rows"]
    assert (code, row["what"], row["shape"], row["dtype"]) == (0, "fft", [2, 3, 20], "float32")
    text = run("bench", "--op", "wkv6", "--shape", "2,3,2,4", "--phase", "decode")[1]
    assert "wkv6 (2, 1, 2, 4, 4) bfloat16, decode\n" in text
    assert text.startswith("CPU reference; not the speed of the kernels.")


def test_the_cpu_measures_updates(no_gpu, run):
    options = ("--op", "wkv7", "--shape", "3,8,2,16", "--phase", "update")
    (row,) = json.loads(run("bench", *options, "--json")[1])["rows"]
    assert (row["shape"], row["phase"], row["what"], row["median_ms"]) == ([3, 1, 2, 16, 16], "update", "auto", 2.0)
    assert 1e-4 < row["errors"]["y"] < 3e-3  # y is bfloat16, and the states are not
    assert 0 < row["errors"]["state"] < 1e-6
    text = run("bench", *options, "--inputs", "bf16-kv-states")[1]
    assert "\nwkv7 (3, 1, 2, 16, 16) bfloat16, update, bfloat16 states [K, V]\n" in text
    assert "errors of rwkv_jit auto: y " in text
    found = json.loads(run("bench", "--phase", "update", "--json")[1])
    assert [row["op"] for row in found["rows"]] == ["gla", "linear_attention", "wkv5", "wkv6", "wkv7"]


def test_names_of_the_command_line_are_those_of_the_bench():
    """They are listed apart, so that --help need not load torch."""
    from rwkv_jit.desk import cli

    assert sorted(cli._OPS) == sorted(bench.OPS) == sorted(OPS)
    assert cli._PHASES == bench.PHASES
    assert list(cli._KINDS) == list(cases.KINDS)
    assert list(cli._DTYPES) == list(bench.DTYPES)
    assert list(cli._BACKENDS) == list(dict.fromkeys(
        name for op in ("wkv6", "wkv4", "timex") for name in measure.backends_of(op)
    ))  # fmt: skip
