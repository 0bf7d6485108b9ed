"""Figures of calls: their times, and their errors against float64."""

from __future__ import annotations

import math
import statistics
import timeit
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.desk import inputs
from rwkv_jit.desk.inputs import OURS, REFERENCES, UPDATE, Case, Given, Who
from rwkv_jit.schedules.derived_table import ALL


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


def host_us(call: Callable[[], Any], rows: int = 9, row: int = 20) -> float:
    """Return the microseconds that the host takes for a call among others, in the fastest row of calls."""
    times = [timeit.timeit(call, torch.cuda.synchronize, number=row) for _ in range(rows)]  # a full queue would wait
    return 1e6 * min(times) / row


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
