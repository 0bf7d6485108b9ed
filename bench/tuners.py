"""Triton's tuners beside other processes: they compile side by side, and time their choices briefly and in turns."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from typing import Any

from filelock import FileLock, Timeout

_PAUSE, _LONGEST_TURN = 0.002, 60  # seconds between two looks whether it is one's turn, and to wait for one that hangs
_NEVER = [float("inf")] * 3


def _tuner() -> Any:
    return import_module("triton.runtime.autotuner").Autotuner


@cache
def time_briefly(warmup: int, rep: int, turn: str | None = None) -> None:
    """Let tuners time a choice for some milliseconds in the place of 125, while no process that knows the turn does.

    A tuner takes `do_bench` from triton.testing.
    """
    testing: Any = import_module("triton.testing")
    timed = testing.do_bench

    def briefly(call: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        options = options if arguments else {"warmup": warmup, "rep": rep, **options}
        with ExitStack() as in_turn:
            if turn is not None:
                with suppress(Timeout):
                    in_turn.enter_context(FileLock(turn).acquire(_LONGEST_TURN, poll_interval=_PAUSE))
            return timed(call, *arguments, **options)

    testing.do_bench = briefly


def run_once() -> None:
    """Let tuners run a choice once, in the place of timing it."""

    def once(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        call()
        return [1.0] * 3

    _tuner().do_bench = property(lambda self: once)


@cache
def tune_once(turn: str) -> None:
    """Let a tuner wait for another process that tunes the same, whose result it then finds on disk."""
    tuner = _tuner()
    looked_up = tuner.check_disk_cache

    def alone(self: Any, key: Any, choices: Sequence[Any], tune: Callable[[], None]) -> Any:
        what = json.dumps([self.base_fn.__module__, self.base_fn.__name__, key, list(map(str, choices))], default=str)
        with FileLock(f"{turn}-{hashlib.sha256(what.encode()).hexdigest()}"):
            return looked_up(self, key, choices, tune)

    tuner.check_disk_cache = alone


@cache
def compile_together(place: int = 0, count: int = 1) -> None:
    """Let a tuner compile side by side, before it times the first, all its choices that it then times.

    Of `count` processes each has every `count`-th of them, beginning with that at its `place`, and of the others one
    where none of its own can run.
    """
    tuner, together = _tuner(), import_module("triton.runtime._async_compile").AsyncCompileMode
    timed, threads = tuner._bench, max((os.cpu_count() or 1) // count, 1)

    def shared(self: Any, *given: Any, config: Any, **more: Any) -> Any:
        choices = list(self.prune_configs(more))
        if config == choices[0]:
            own = choices[place % len(choices) :: count]  # of fewer choices than processes too
            # What cannot be compiled says so when it is timed.
            with suppress(Exception), ThreadPoolExecutor(threads) as pool, together(pool, ignore_errors=True):
                for choice in own:
                    self.fn.run(*given, **{**more, **choice.all_kwargs(), "warmup": True})
            self.tried = {}
            for choice in dict.fromkeys([*own, *choices]):
                if choice in own or all(times == _NEVER for times in self.tried.values()):
                    self.tried[choice] = timed(self, *given, config=choice, **more)
        return self.tried.get(config, _NEVER)

    tuner._bench = shared
