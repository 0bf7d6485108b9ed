"""Processes of their own: some try peers on cases first, and one measures case after case.

An illegal memory access leaves a process without its GPU, and everyone behind it in a run would be hidden: such a
process ends, and another goes on. FLA keeps what it tuned on disk: it tunes itself where it is tried, and the
measurement finds it tuned. Processes compile side by side and time kernels one at a time: what runs beside a kernel
would choose its geometry.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from bench import ROOT, cases, measure, peers
from bench.cases import Case
from bench.measure import Entry
from rwkv_jit.desk import terminal
from rwkv_jit.desk.bench import one_line

PATIENCE = 900  # seconds, after which a process is ended; it waits for its turns meanwhile
_ROOM, _MOST = 16 << 30, 8  # bytes of a GPU for each that tunes itself beside others, and how many of them
_PAUSE, _LONGEST_TURN = 0.002, 60  # seconds between two looks whether it is one's turn, and to wait for one that hangs
_MILLISECONDS = {"warmup": 5, "rep": 25}  # that a tuner times a choice
_OF_ONE_SIZE = ("wind_rwkv",)  # a process can load their kernels for one head size
# It ends at once: a thread of torch's backward that still waits for the interpreter when that ends aborts the process.
_PROGRAM = "import os; from bench import processes; processes.answer(); os._exit(0)"

Attempt = tuple[Case, str, str]  # a case, and who tries it with what


# ---- the process that is started ---------------------------------------------------------------------------------


def answer() -> None:
    """Do what a line of standard input asks for, and print the answer as a line of JSON, as long as all is well."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print is no answer
    for line in sys.stdin:
        found = _found(json.loads(line))
        goes_on = _is_well()
        print(json.dumps([found, goes_on]), file=answers, flush=True)
        if not goes_on:
            break


def _found(asked: Mapping[str, Any]) -> Any:
    given = asked["case"]
    case = Case(**{**given, "shape": tuple(given["shape"]), "dtype": getattr(torch, given["dtype"])})
    if "turn" in asked:
        _tune_beside_others(asked["turn"])
        return _tried(case, asked["who"], asked["what"])
    known = [peer for peer in peers.peers_of(case) if [peer.who, peer.what] in asked["peers"]]
    return measure.rows_of(Entry(asked["suite"], case, asked["backends"]), asked["copy_tb_per_s"], known)


def _tried(case: Case, who: str, what: str) -> str | None:
    """Run a peer once; return what is in its way."""
    try:
        peer = next(peer for peer in peers.peers_of(case) if (peer.who, peer.what) == (who, what))
        measure.run_once(case, peer, cases.given_for(case))()
        torch.cuda.synchronize()
    except Exception as error:
        return one_line(error)
    return None


def _is_well() -> bool:
    """Return whether the GPU still does something, with the memory of the last case free again."""
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


# ---- tuners ------------------------------------------------------------------------------------------------------


@cache
def _tune_beside_others(turn: str) -> None:
    """Let Triton's tuner leave what others do alone, and do nothing that another has done."""
    with suppress(ImportError, AttributeError):  # another Triton's tuner does as it does
        _time_in_turns(importlib.import_module("triton.testing"), turn)
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        _tune_once(tuner, turn)
        _compile_at_once(tuner, importlib.import_module("triton.runtime._async_compile").AsyncCompileMode)


def _time_in_turns(testing: Any, turn: str) -> None:
    """Let the tuner, which takes `do_bench` from this module, time a kernel briefly while no other process does."""
    timed, lock = testing.do_bench, FileLock(turn)

    def in_turn(call: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        options = options if arguments else {**_MILLISECONDS, **options}
        with suppress(Timeout), lock.acquire(_LONGEST_TURN, poll_interval=_PAUSE):
            return timed(call, *arguments, **options)
        return timed(call, *arguments, **options)

    testing.do_bench = in_turn


def _tune_once(tuner: Any, turn: str) -> None:
    """Let the tuner wait for another process that tunes the same, whose result it then finds on disk."""
    looked_up = tuner.check_disk_cache

    def alone(self: Any, key: Any, choices: Sequence[Any], tune: Callable[[], None]) -> Any:
        what = json.dumps([self.base_fn.__module__, self.base_fn.__name__, key, list(map(str, choices))], default=str)
        with FileLock(f"{turn}-{hashlib.sha256(what.encode()).hexdigest()}"):
            return looked_up(self, key, choices, tune)

    tuner.check_disk_cache = alone


def _compile_at_once(tuner: Any, together: Callable[..., Any]) -> None:
    """Let the tuner compile all its choices side by side before it times the first."""
    timed = tuner._bench

    def compiled(self: Any, *given: Any, config: Any, **more: Any) -> Any:
        choices = self.prune_configs(more)
        if config == choices[0]:
            # What cannot be compiled says so when it is timed.
            with suppress(Exception), ThreadPoolExecutor(os.cpu_count()) as pool, together(pool, ignore_errors=True):
                for choice in choices:
                    self.fn.run(*given, **{**more, **choice.all_kwargs(), "warmup": True})
        return timed(self, *given, config=config, **more)

    tuner._bench = compiled


# ---- the process that starts others ------------------------------------------------------------------------------


class Helper:
    """A process that answers one question after another; where it has ended, the next one starts another."""

    def __init__(self, said: IO[str]) -> None:
        """Let processes write what they say to a file."""
        self._process: subprocess.Popen[str] | None = None
        self._said = said

    def ask(self, case: Case, asked: Mapping[str, Any], seconds: float) -> Any:
        """Return what the process answers.

        Raises ChildProcessError where it ended without an answer, or had none in time.
        """
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        named = {**case._asdict(), "dtype": str(case.dtype).removeprefix("torch.")}
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps({**asked, "case": named}), file=process.stdin, flush=True)
            line = process.stdout.readline()
            code = None if line else process.wait()
        finally:
            timer.cancel()
        found, goes_on = json.loads(line or "[null, false]")
        if not goes_on:
            self.end()
        if code is None:
            return found
        if late.is_set():
            raise ChildProcessError(f"did not end in {seconds:.0f} s")
        self._said.seek(0)
        said = "".join(self._said.read().strip().splitlines()[-1:])
        raise ChildProcessError(f"ended its process with {code}{said and f': {said}'}"[:200])

    def _started(self) -> subprocess.Popen[str]:
        self._said.seek(0)
        self._said.truncate()
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _PROGRAM]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, cwd=ROOT)

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError), process:  # waits for it
                pass


@contextmanager
def helping() -> Iterator[Helper]:
    """Give a helper that ends behind the block."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        helper = Helper(said)
        try:
            yield helper
        finally:
            helper.end()


def obstacles(entries: Iterable[Entry], minutes: float | None = None) -> dict[Attempt, str]:
    """Try every foreign peer of the entries in a process beside this one; return what is in the way of some.

    Parameters
    ----------
    entries : iterable of Entry
        What is measured.
    minutes : float, optional
        After which no other is tried, and those that run are ended.

    Returns
    -------
    dict
        By attempt, one line.
    """
    attempts = [
        (case, peer.who, peer.what)
        for case in dict.fromkeys(entry.case for entry in entries)
        for peer in peers.peers_of(case)
        if peer.is_foreign
    ]
    if not attempts:
        return {}
    first = [attempt for attempt in attempts if attempt[0].has_gradients]  # these tune what a forward alone takes
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    at_once = max(1, min(memory // _ROOM, (os.cpu_count() or 1) // 2, _MOST))
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    known: dict[Attempt, str] = {}
    idle: SimpleQueue[Helper] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool, ExitStack() as helpers:
        for _ in range(at_once):
            idle.put(helpers.enter_context(helping()))

        def attempted(attempt: Attempt) -> str | None:
            case, who, what = attempt
            late = f"was not tried in {minutes or 0:g} min"
            left = min(PATIENCE, end - time.monotonic())
            if left <= 0:
                return late
            helper = idle.get()
            try:
                asked = {"who": who, "what": what, "turn": str(Path(folder, "turn"))}
                error: str | None = helper.ask(case, asked, left)
            except ChildProcessError as raised:
                return late if time.monotonic() >= end else str(raised)
            finally:
                if who in _OF_ONE_SIZE:
                    helper.end()
                idle.put(helper)
            return error

        try:
            with terminal.progress("trying peers") as tell:
                for some in (first, [attempt for attempt in attempts if attempt not in first]):
                    asked = [attempt for attempt in some if attempt in first or not _ran(attempt, first, known)]
                    for done, (attempt, error) in enumerate(zip(asked, pool.map(attempted, asked), strict=True), 1):
                        if error is not None:
                            known[attempt] = error
                        case, *by = attempt
                        print(
                            f"tried {done} of {len(asked)}: {case.op} {case.phase} by {' '.join(by)}",
                            file=sys.stderr,
                            flush=True,
                        )
                        if tell:
                            tell(done, len(asked))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for attempt in [attempt for attempt, error in known.items() if error.startswith("OutOfMemoryError")]:
            error = attempted(attempt)  # alone
            known.pop(attempt) if error is None else known.update({attempt: error})
    return known


def _ran(attempt: Attempt, tried: Sequence[Attempt], known: Mapping[Attempt, str]) -> bool:
    """Return whether a forward has run below its backward, with all that it has to tune."""
    case, *who = attempt
    trained = (case._replace(phase="forward+backward"), *who)
    return case.phase == "forward" and trained in tried and trained not in known


def rows_of(
    helper: Helper, entry: Entry, copy_tb_per_s: float, with_peers: bool, known: Mapping[Attempt, str]
) -> list[dict[str, Any]]:
    """Measure a case in the helper's process; those that cannot do it are rows with the reason."""
    everyone = peers.peers_of(entry.case) if with_peers else []
    allowed, skipped = [], []
    for peer in everyone:
        why = known.get((entry.case, peer.who, peer.what))
        if why is None:
            allowed.append([peer.who, peer.what])
        else:
            skipped.append(measure.row(entry, peer.who, peer.what, why))
    asked = {"suite": entry.suite, "backends": entry.backends, "peers": allowed, "copy_tb_per_s": copy_tb_per_s}
    try:
        rows: Sequence[dict[str, Any]] = helper.ask(entry.case, asked, PATIENCE)
    except ChildProcessError as error:
        if not allowed:
            raise
        skipped += [measure.row(entry, who, what, f"one of these peers: {error}") for who, what in allowed]
        rows = helper.ask(entry.case, {**asked, "peers": []}, PATIENCE)  # ours stays
    if any(who in _OF_ONE_SIZE for who, _ in allowed):
        helper.end()
    return [*rows, *skipped]
