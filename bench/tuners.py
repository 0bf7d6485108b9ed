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
def compile_together() -> None:
    """Let a tuner compile side by side, before it times the first, all its choices."""
    tuner, together = _tuner(), import_module("triton.runtime._async_compile").AsyncCompileMode
    timed = tuner._bench

    def behind_all(self: Any, *given: Any, config: Any, **more: Any) -> Any:
        choices = list(self.prune_configs(more))
        if config == choices[0]:
            # What cannot be compiled says so when it is timed.
            with suppress(Exception), ThreadPoolExecutor(os.cpu_count()) as pool, together(pool, ignore_errors=True):
                for choice in choices:
                    self.fn.run(*given, **{**more, **choice.all_kwargs(), "warmup": True})
        return timed(self, *given, config=config, **more)

    tuner._bench = behind_all
