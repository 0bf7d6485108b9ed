"""How calls are timed: by CUDA events, in turns, with the queue kept full so that the host is not in it."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

import torch

from rwkv_jit.desk.figures import HOST_SECONDS, host_us

SMALL = 10_000_000  # elements; below, a call is timed in a CUDA graph, as the host would take longer than the GPU
_CYCLES_PER_US = 2000  # at least those of a GPU
_LONGEST_SLEEP_US = 100_000.0
MANY, FEW = 20, 4  # calls of a graph at least, of small ones and of others
_HOST_SECONDS = 0.25  # for the host's time of what is in a graph, whose calls are short
_ROWS = 10  # of calls until the GPU has ended
_SLEEP_SECONDS = 0.05  # for the host's time where a sleep of the GPU goes by it, which grows where it is too short


class Turns:
    """Calls on sets of inputs that are taken in turn; `ms` times the next one, or a graph of some of them.

    They are the same call on every set, and have run before. A graph has at least `in_graph` of them; where that is 0,
    or they cannot be captured, they are timed one by one. `flush` is written before each run where the sets alone do
    not fill the cache.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], in_graph: int, flush: torch.Tensor | None = None) -> None:
        self.calls, self._flush = calls, flush  # a graph reads the inputs of its calls, and does not hold them
        torch.cuda.synchronize()
        self.host_us = host_us(calls, _HOST_SECONDS if in_graph else HOST_SECONDS)
        count = -(-in_graph // len(calls)) * len(calls)  # a whole number of rounds over the sets
        graph = _captured(calls, count) if in_graph else None
        self.in_graph = graph is not None
        self._calls_at_once = 1 if graph is None else count
        self.calls_us = None if graph is None else _calls_us(calls, count)
        self._turns = cycle(calls if graph is None else [graph.replay])
        queued_us = self.host_us if graph is None else host_us([graph.replay], _SLEEP_SECONDS)
        self._sleep_us = min(2 * queued_us + 50, _LONGEST_SLEEP_US)  # of the GPU, while the host queues what is timed

    def ms(self) -> float:
        """Return the milliseconds of a call, all of which was queued before the GPU began with it.

        The host is slower among other contestants than when it was timed alone: where the GPU woke up too early, the
        next call is timed behind a longer sleep. A call that waits for the GPU is never queued as a whole; behind the
        longest sleep its time counts as it is.
        """
        while True:
            call = next(self._turns)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self._flush is not None:
                self._flush.zero_()
            torch.cuda._sleep(int(_CYCLES_PER_US * self._sleep_us))
            begin.record()
            call()
            end.record()
            is_queued = not begin.query()
            end.synchronize()
            if is_queued or self._sleep_us >= _LONGEST_SLEEP_US:
                return float(begin.elapsed_time(end)) / self._calls_at_once
            self._sleep_us = min(4 * self._sleep_us, _LONGEST_SLEEP_US)


def _calls_us(calls: Sequence[Callable[[], Any]], count: int) -> float:
    """Return the microseconds of a call among so many one after another, until the GPU has ended: the fastest row."""

    def row() -> None:
        for turn in range(count):
            calls[turn % len(calls)]()
        torch.cuda.synchronize()

    return 1e6 * min(timeit.repeat(row, number=1, repeat=_ROWS)) / count


def _captured(calls: Sequence[Callable[[], Any]], count: int) -> torch.cuda.CUDAGraph | None:
    """Return a graph of so many calls, or None where something in them cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with _capture(graph):
            for turn in range(count):
                calls[turn % len(calls)]()
        graph.replay()
    except Exception:
        torch.cuda.synchronize()
        # A capture that broke off leaves torch's random numbers waiting for its end; one that ends sets them free.
        with suppress(Exception), _capture(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        return None
    torch.cuda.synchronize()
    return graph


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what is done inside; the outer stream is the current one again where that breaks off."""
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="relaxed"):
        yield
