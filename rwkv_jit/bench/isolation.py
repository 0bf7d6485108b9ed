"""Foreign kernels are tried in processes of their own first: one that ends its process ends no measurement.

An illegal memory access leaves a process without its GPU, and everyone behind it in a run would be hidden. FLA keeps
what it tuned on disk: it tunes itself there, and the measurement finds it tuned. Processes compile side by side and
time kernels one at a time: what runs beside a kernel would choose its geometry.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from rwkv_jit.bench import cases, peers
from rwkv_jit.bench.cases import Case
from rwkv_jit.bench.peers import Contestant

PATIENCE = 900  # seconds without an answer, after which a process is ended; it waits for its turns meanwhile
_ROOM = 16 << 30  # bytes of a GPU for each that tunes itself beside others
_MOST = 8  # of them
_PAUSE, _LONGEST_TURN = 0.002, 60  # seconds between two looks whether it is one's turn, and to wait for one that hangs
_PROGRAM = "from rwkv_jit.bench import isolation; isolation.answer()"


class Attempt(NamedTuple):
    """A peer on a case."""

    case: Case
    who: str
    what: str


def run_once(case: Case, contestant: Contestant, given: cases.Given) -> Callable[[], Any]:
    """Return the call of a case by a contestant; for a backward alone, the forward runs here."""
    inputs = [x.detach() for x in contestant.convert(given.inputs)]
    state = None if given.state is None else contestant.convert_state(given.state)
    if not case.has_gradients:
        with_state = case.phase in cases.WITH_STATES
        return lambda: contestant.run(inputs, state, with_state)
    leaves = [x.requires_grad_() for x in inputs]
    if case.phase == "forward+backward":
        return lambda: torch.autograd.grad(contestant.run(leaves, None, False)[0], leaves, given.dy)
    y = contestant.run(leaves, None, False)[0]
    return lambda: torch.autograd.grad(y, leaves, given.dy, retain_graph=True)


def one_line(error: BaseException) -> str:
    """Return what is said of an error in a table."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200].removesuffix(": ")


# ---- the process that tries --------------------------------------------------------------------------------------


def answer() -> None:
    """Try what standard input lists and print a line of JSON for each; ends with the first that breaks the GPU."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print is no answer
    given = json.load(sys.stdin)
    with suppress(ImportError):
        _time_in_turns(importlib.import_module("triton.testing"), given["turn"])
    for fields in given["attempts"]:
        attempt = _read(fields)
        error = None
        try:
            contestant = next(
                peer for peer in peers.of(attempt.case) if (peer.who, peer.what) == (attempt.who, attempt.what)
            )
            run_once(attempt.case, contestant, cases.given_for(attempt.case))()
            torch.cuda.synchronize()
        except Exception as raised:
            error = one_line(raised)
        print(json.dumps(error), file=answers, flush=True)
        if error is not None:
            torch.cuda.synchronize()  # raises, and ends the process, where the GPU is lost
        torch.cuda.empty_cache()


def _time_in_turns(testing: Any, turn: str) -> None:
    """Let Triton's tuner, which takes `do_bench` from this module, time a kernel while no other process does.

    A first call comes before: it compiles, which all may do at once.
    """
    timed, lock = testing.do_bench, FileLock(turn)

    def in_turn(call: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        call()
        with suppress(Timeout), lock.acquire(_LONGEST_TURN, poll_interval=_PAUSE):
            return timed(call, *arguments, **options)
        return timed(call, *arguments, **options)

    testing.do_bench = in_turn


def _read(fields: dict[str, Any]) -> Attempt:
    given = fields["case"]
    case = Case(**{**given, "shape": tuple(given["shape"]), "dtype": getattr(torch, given["dtype"])})
    return Attempt(case, fields["who"], fields["what"])


def _written(attempt: Attempt) -> dict[str, Any]:
    case = {**attempt.case._asdict(), "dtype": str(attempt.case.dtype).removeprefix("torch.")}
    return {**attempt._asdict(), "case": case}


# ---- the process that asks ---------------------------------------------------------------------------------------


def obstacles(
    attempts: Sequence[Attempt],
    tell: Callable[[int, int], None] | None = None,
    at_once: int | None = None,
    minutes: float | None = None,
) -> dict[Attempt, str]:
    """Return what is in the way of those that cannot be measured.

    Parameters
    ----------
    attempts : sequence of Attempt
        What to try.
    tell : callable, optional
        Gets the attempts that have been answered and all.
    at_once : int, optional
        Processes; by default as many as the GPU has memory and the host cores for, up to eight. Those of an op and a
        shape are tried by one process, in their order.
    minutes : float, optional
        After which the rest is not tried.

    Returns
    -------
    dict
        By attempt, one line.
    """
    if not attempts:
        return {}
    if at_once is None:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        at_once = max(1, min(memory // _ROOM, (os.cpu_count() or 1) // 2, _MOST))
    groups: dict[tuple[str, str, tuple[int, ...]], list[Attempt]] = {}
    for attempt in dict.fromkeys(attempts):
        groups.setdefault((attempt.case.op, attempt.who, attempt.case.shape), []).append(attempt)
    found: dict[Attempt, str | None] = {}
    lock = threading.Lock()

    def note(attempt: Attempt, error: str | None) -> None:
        with lock:
            found[attempt] = error
            if tell:
                tell(len(found), len(set(attempts)))

    running = _Running()
    timer = threading.Timer(threading.TIMEOUT_MAX if minutes is None else 60 * minutes, running.end)
    timer.daemon = True
    timer.start()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        turn = str(Path(folder, "turn"))
        try:
            list(pool.map(lambda group: _ask(group, turn, note, running), groups.values()))
        except KeyboardInterrupt:
            running.end()
            raise
        finally:
            timer.cancel()
    untried = {attempt: f"was not tried in {minutes:g} min" for attempt in attempts if attempt not in found}
    return {attempt: error for attempt, error in found.items() if error is not None} | untried


class _Running:
    """The processes that run, all of which an interrupt or the end of the time ends; none starts after it."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[str]] = set()
        self._lock, self.is_over = threading.Lock(), False

    def add(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._processes.add(process)
            if self.is_over:
                process.kill()

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            for process in self._processes:
                process.kill()


def _ask(
    attempts: Sequence[Attempt], turn: str, note: Callable[[Attempt, str | None], None], running: _Running
) -> None:
    """Try them, in a new process after each that one of them ends."""
    pending = list(attempts)
    while pending and not running.is_over:
        answers, silent, end = _child(pending, turn, lambda error: note(pending.pop(0), error), running)
        # After an answer, it may have ended by what was answered.
        if pending and not running.is_over and (silent or not answers):
            note(pending.pop(0), end)


def _child(
    attempts: Sequence[Attempt], turn: str, take: Callable[[str | None], None], running: _Running
) -> tuple[int, bool, str]:
    """Run a process; return how many it answered, whether it was ended for its silence, and how it ended."""
    command = [sys.executable, "-c", _PROGRAM]
    pipe, given = subprocess.PIPE, json.dumps({"turn": turn, "attempts": [_written(each) for each in attempts]})
    silent = False
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        running.add(process)
        assert process.stdin is not None
        assert process.stdout is not None

        def give_up() -> None:
            nonlocal silent
            silent = True
            process.kill()

        timer = threading.Timer(PATIENCE, give_up)
        timer.start()
        count = 0
        try:
            process.stdin.write(given)
            process.stdin.close()
            for line in process.stdout:
                timer.cancel()
                count += 1
                take(json.loads(line))
                timer = threading.Timer(PATIENCE, give_up)
                timer.start()
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
    end = f"did not end in {PATIENCE} s" if silent else f"ended its process with {process.returncode}"
    return count, silent, end
