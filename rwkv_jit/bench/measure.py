"""The rows of a case: everyone on the same inputs, in turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.bench import cases, contestants, floors, timing
from rwkv_jit.bench.cases import REFERENCES, Case, Given
from rwkv_jit.bench.isolation import Attempt, one_line, run_once
from rwkv_jit.bench.peers import Contestant
from rwkv_jit.bench.suites import Entry

BUDGET_MS = 4000.0  # of the rounds of a case
_MOST_TOKENS = 300  # of a row, where errors are taken: the reference walks over them in float64
_MOST_STATES = 2**28  # elements that the reference keeps for its backward
CPU_SHAPE = (1, 32, 2, 16, 16)  # where none is asked for


def row(entry: Entry, who: str, what: str, skipped: str | None = None) -> dict[str, Any]:
    """Return a row without figures."""
    case = entry.case
    return {
        "suite": entry.suite,
        "op": case.op,
        "shape": case.shown,
        "dtype": str(case.dtype).removeprefix("torch."),
        "phase": case.phase,
        "who": who,
        "what": what,
        **dict.fromkeys(("median_ms", "low_ms", "high_ms")),
        "runs": 0,
        "in_graph": False,
        **dict.fromkeys(("host_us", "floor_ms", "fraction", "peak_mib", "error")),
        "skipped": skipped,
    }


def rows_of(
    entry: Entry,
    copy_tb_per_s: float,
    with_peers: bool = True,
    obstacles: Mapping[Attempt, str] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure a case on a GPU.

    Parameters
    ----------
    entry : Entry
        The case, and the backends of ours.
    copy_tb_per_s : float
        The bandwidth of a copy.
    with_peers : bool, default True
        Whether others are measured too.
    obstacles : mapping, optional
        What is known to be in the way of peers.
    tell : callable, optional
        Gets the rounds that are done and all.

    Returns
    -------
    list of dict
        One for each contestant, skipped ones last.
    """
    case, known = entry.case, obstacles or {}
    everyone, refused = contestants.of(case, entry.backends, with_peers)
    rows = [row(entry, contestants.OURS, name, why) for name, why in refused.items()]
    ready: list[tuple[Contestant, _Ready]] = []
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sets = cases.sets_for(case, properties.L2_cache_size)
    flush = None
    if not cases.are_cold(sets, properties.L2_cache_size):
        flush = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")
    for each in everyone:
        why = known.get(Attempt(case, each.who, each.what))
        if why is None:
            try:
                ready.append((each, _ready(case, each, sets, flush)))
            except Exception as error:
                why = one_line(error)
        if why is not None:
            rows.append(row(entry, each.who, each.what, why))
    timed = timing.interleaved([each.turns.ms for _, each in ready], BUDGET_MS, tell)
    errors = _errors(case, [each for each, _ in ready])
    floor = floors.floor_ms(case, copy_tb_per_s)
    measured = []
    for (each, found), times, distance in zip(ready, timed, errors, strict=True):
        if isinstance(times, Exception):
            rows.append(row(entry, each.who, each.what, one_line(times)))
            continue
        if distance is not None and not math.isfinite(distance):
            rows.append(row(entry, each.who, each.what, "its results are not finite, so it has no speed"))
            continue
        spread = timing.spread(times)
        measured.append(
            row(entry, each.who, each.what)
            | {"median_ms": spread.median, "low_ms": spread.low, "high_ms": spread.high, "runs": spread.runs}
            | {"in_graph": found.turns.in_graph, "host_us": found.turns.host_us, "floor_ms": floor}
            | {"fraction": floor / spread.median, "peak_mib": found.peak_bytes / 2**20, "error": distance}
        )
    return measured + rows


class _Ready(NamedTuple):
    turns: timing.Turns
    peak_bytes: int


def _ready(case: Case, contestant: Contestant, sets: Sequence[Given], flush: Tensor | None) -> _Ready:
    """Compile, tune and warm a contestant up, and see how much memory it takes: with its inputs, in one call."""
    first = run_once(case, contestant, sets[0])
    first()
    torch.cuda.synchronize()
    peak = timing.peak_bytes(lambda: run_once(case, contestant, sets[0])()) + sets[0].size()
    calls = [first, *(run_once(case, contestant, each) for each in sets[1:])]
    for call in calls:
        call()
    small = not case.has_gradients and timing.is_small(sets[0].dy.numel())
    return _Ready(timing.Turns(calls, small, flush), peak)


def give_back_memory() -> None:
    """Let go of what a case has had."""
    gc.collect()
    torch.cuda.empty_cache()


# ---- errors ------------------------------------------------------------------------------------------------------


def _errors(case: Case, everyone: Sequence[Contestant], device: str = "cuda") -> list[float | None]:
    """Return the largest relative L2 error of y, and of the gradients where there are some, against float64.

    Over at most 300 tokens of a row; None where a contestant cannot do so few, or the reference has no memory.
    """
    try:
        few, given, wanted = _exact(case, device)
    except Exception:
        return [None] * len(everyone)
    return [_error(few, each, given, wanted) for each in everyone]


def _exact(case: Case, device: str) -> tuple[Case, Given, list[Tensor]]:
    """Return a shorter case, what it is given, and its results in float64."""
    batch_of_one = (1, min(case.shape[1], _tokens_to_check(case)), *case.shape[2:])
    few = case._replace(shape=batch_of_one)
    given = cases.given_for(few, device)
    exact = [x.detach().double().requires_grad_() for x in given.inputs]
    state = {} if given.state is None else {"initial_state": given.state.double()}
    wanted = [REFERENCES[case.op](*exact, **state, **case.options)[0]]
    if case.has_gradients:
        wanted += torch.autograd.grad(wanted[0], exact, given.dy.double())
    return few, given, [x.detach() for x in wanted]


def _tokens_to_check(case: Case) -> int:
    _, _, heads, head_size, value_size = case.shape
    if case.op in cases.WITHOUT_HEADS:
        return _MOST_TOKENS
    return min(_MOST_TOKENS, max(16, _MOST_STATES // (heads * head_size * value_size)))


def _error(case: Case, contestant: Contestant, given: Given, wanted: Sequence[Tensor]) -> float | None:
    try:
        inputs = contestant.convert(given.inputs if case.has_gradients else [x.detach() for x in given.inputs])
        state = None if given.state is None else contestant.convert_state(given.state)
        found = [contestant.run(inputs, state, case.phase in cases.WITH_STATES)[0]]
        if case.has_gradients:
            found += torch.autograd.grad(found[0], given.inputs, given.dy)
    except Exception:
        return None
    pairs = zip(found, wanted, strict=True)
    distances = [(x.detach().double() - want).norm() / want.norm() for x, want in pairs]
    return float(torch.stack(distances).max())  # NaN where one of them is


# ---- without a GPU -----------------------------------------------------------------------------------------------


def rows_of_cpu(entry: Entry) -> list[dict[str, Any]]:
    """Measure what a call runs on CPU tensors, in plain torch: it says nothing about the speed of the kernels."""
    case, (backend,) = entry.case, entry.backends or ("auto",)
    contestant = Contestant(contestants.OURS, backend, contestants.call_of(case, backend))
    spread = timing.spread(timing.cpu_ms(run_once(case, contestant, cases.given_for(case, "cpu"))))
    (error,) = _errors(case, [contestant], "cpu")
    return [
        row(entry, contestants.OURS, backend)
        | {"median_ms": spread.median, "low_ms": spread.low, "high_ms": spread.high, "runs": spread.runs}
        | {"error": error}
    ]


def on_small_shape(entry: Entry) -> Entry:
    """Return an entry as small as a CPU does in no time."""
    sizes = tuple(map(min, entry.case.shape, CPU_SHAPE))
    return entry._replace(case=entry.case._replace(shape=sizes))  # type: ignore[arg-type]
