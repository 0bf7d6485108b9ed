"""Figures of calls: their times, and their errors against float64."""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.desk import inputs
from rwkv_jit.desk.inputs import OURS, REFERENCES, UPDATE, Case, Given, Who
from rwkv_jit.schedules.table import ALL

HOST_SECONDS = 0.5  # that runs for the host's time may take
_LEAST_ROWS, _MOST_ROWS, _MOST_IN_ROW = 9, 500, 50  # of calls; so few in a row wait for no place in the GPU's queue
WARM_UP_ROUNDS, MOST_ROUNDS, LEAST_ROUNDS = 2, 20, 7


def gpu_ms(call: Callable[[], Any], sleep_us: float = 0.0, flush: Tensor | None = None) -> float:
    """Return the milliseconds of a call by CUDA events, which the GPU begins behind a flush and a sleep."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if flush is not None:
        flush.zero_()
    if sleep_us:
        torch.cuda._sleep(int(2000 * sleep_us))  # cycles, at least so many as a microsecond has
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def median_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time of a call by CUDA events, behind three that do not count."""
    return statistics.median([gpu_ms(call) for _ in range(3 + repeats)][3:])


def cpu_ms(call: Callable[[], Any], runs: int = 7) -> list[float]:
    """Return the times of a call on the CPU, behind one that does not count."""
    return [1e3 * seconds for seconds in timeit.repeat(call, number=1, repeat=1 + runs)][1:]


def host_us(calls: Sequence[Callable[[], Any]], seconds: float = HOST_SECONDS) -> float:
    """Return the microseconds that the host takes for a call among others, which need not have ended on the GPU.

    Rows of calls, as a model makes them, as many as keep to the `seconds` that there are: the median of the fastest
    row. A virtual machine has phases in which all that a host does is slower, and they are longer than a row. The first
    call of a row is left out where there are more: it finds a GPU that sleeps.
    """
    started = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    taken = time.perf_counter() - started
    row = max(1, min(_MOST_IN_ROW, int(seconds / (_LEAST_ROWS * taken))))
    fastest = math.inf
    for _ in range(_MOST_ROWS):
        stamps = [time.perf_counter()]
        for turn in range(row):
            calls[turn % len(calls)]()
            stamps.append(time.perf_counter())
        torch.cuda.synchronize()  # a full queue would make the host wait
        times = [1e6 * (after - before) for before, after in pairwise(stamps)][row > 1 :]
        fastest = min(fastest, statistics.median(times))
        if time.perf_counter() > started + seconds + taken:
            break
    return fastest


def interleaved(runs: Sequence[Callable[[], float]], budget_ms: float) -> list[list[float] | Exception]:
    """Time several things in rounds, one after another, so that clocks drift alike for all.

    Each of `runs` times itself once and returns milliseconds. All rounds shall take `budget_ms`; there are at least
    LEAST_ROUNDS and at most MOST_ROUNDS. Returns the times of each without those of the warm-up, or what it raised; the
    others go on without it.
    """
    times: list[list[float]] = [[] for _ in runs]
    raised: dict[int, Exception] = {}
    rounds, done = WARM_UP_ROUNDS + MOST_ROUNDS, 0
    while done < rounds:
        started = time.perf_counter()
        for index in [index for index in range(len(runs)) if index not in raised]:
            try:
                times[index].append(runs[index]())
            except Exception as error:
                raised[index] = error
        done += 1
        if done == WARM_UP_ROUNDS:
            round_ms = 1e3 * (time.perf_counter() - started)
            rounds = WARM_UP_ROUNDS + min(max(int(budget_ms / max(round_ms, 1e-3)), LEAST_ROUNDS), MOST_ROUNDS)
    return [raised.get(index, taken[WARM_UP_ROUNDS:]) for index, taken in enumerate(times)]


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most memory that a call has at once beside what there was."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return int(torch.cuda.max_memory_allocated() - before)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles, as a row has them, and how many times there are."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": median, "low_ms": low, "high_ms": high, "runs": len(times)}


def our_call(case: Case, backend: str = "auto", device: str = "cuda") -> Callable[[], Any]:
    """Return our call of a case by a backend. Raises ValueError."""
    given = inputs.given_for(case, [backend], device)
    return inputs.call_of(given.functions[OURS, backend], given, case.phase)


def errors_of(case: Case, backends: Sequence[str], device: str) -> dict[Who, dict[str, float]]:
    """Return relative L2 errors against float64 of everyone who can do it, on some tokens of a row or some rows."""
    few = min(case.shape[0], 64 if case.phase == UPDATE else 1), max(16, 2**28 // math.prod(case.shape[2:]))
    shape = few[0], min(case.shape[1], few[1], 300), *case.shape[2:]  # so few that the reference has memory
    given = inputs.given_for(case._replace(shape=shape), backends, device)
    names = [f"d{name}" for name in ALL[case.op].public_names] if "backward" in case.phase else ["y", "state"]
    return distances(given, case.phase, partial(REFERENCES[case.op], **wide(given.options)), names)


def wide(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a reference with the state in float64."""
    return {name: x.double() if name == "initial_state" else x for name, x in options.items()}


def distances(given: Given, phase: str, exact: inputs.Function, names: Sequence[str]) -> dict[Who, dict[str, float]]:
    """Return the relative L2 distance of everyone's results, by these names, from those of `exact` in float64."""
    leaves = [x.detach().double().requires_grad_(x.requires_grad) for x in given.inputs]
    wanted = inputs.call_of(exact, given._replace(inputs=leaves, dys=[x.double() for x in given.dys]), phase)()
    errors: dict[Who, dict[str, float]] = {}
    for who, function in given.functions.items():
        with suppress(Exception):  # one that cannot says so where it is timed
            found = inputs.call_of(function, given, phase)()
            found = found if given.slots is None else [found[0], found[1][given.slots]]
            each = [pair for pair in zip(names, found, wanted, strict=False) if pair[1] is not None is not pair[2]]
            errors[who] = {name: float((x - want).norm() / want.norm()) for name, x, want in each}
    return errors
