"""Processes of their own: some try peers on cases first, and one measures case after case.

An illegal memory access leaves a process without its GPU, and everyone behind it in a run would be hidden: such a
process ends, and another goes on. FLA keeps what it tuned on disk: it tunes itself where it is tried, and the
measurement finds it tuned. Processes compile side by side and time kernels one at a time: what runs beside a kernel
would choose its geometry.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from bench import cases, measure, peers, tuners
from bench.cases import Case
from bench.measure import Entry
from rwkv_jit.desk import terminal
from rwkv_jit.desk.bench import one_line

PATIENCE = 900  # seconds, after which a process is ended; it waits for its turns meanwhile
_ROOM, _MOST = 16 << 30, 8  # bytes of a GPU for each that tunes itself beside others, and how many of them
_WARM_UP, _TIMED = 5, 25  # milliseconds that a tuner times a choice
_OF_ONE_SIZE = ("wind_rwkv",)  # a process can load their kernels for one head size
_CONTEXT: Any = multiprocessing.get_context("spawn")  # a process that is forked has no GPU

Attempt = tuple[Case, str, str]  # a case, and who tries it with what


# ---- the process that is started ---------------------------------------------------------------------------------


def _answer(pipe: Connection, said: str) -> None:
    """Answer what comes through a pipe, as long as all is well; a file gets what peers print.

    It ends at once: a thread of torch's backward that still waits for the interpreter when that ends aborts the
    process.
    """
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)
    goes_on = True
    while goes_on:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        found = function(*arguments)
        goes_on = _is_well()
        pipe.send((found, goes_on))
    os._exit(0)


def _measured(entry: Entry, copy_tb_per_s: float, allowed: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    known = [peer for peer in peers.peers_of(entry.case) if (peer.who, peer.what) in allowed]
    return measure.rows_of(entry, copy_tb_per_s, known)


def _tried(case: Case, who: str, what: str, turn: str) -> str | None:
    """Run a peer once; return what is in its way."""
    with suppress(ImportError, AttributeError):  # another Triton's tuner does as it does
        tuners.time_briefly(_WARM_UP, _TIMED, turn)
        tuners.tune_once(turn)
        tuners.compile_together()
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


# ---- the process that starts others ------------------------------------------------------------------------------


class Helper:
    """A process that answers one question after another; where it has ended, the next one starts another.

    What it prints goes to a file.
    """

    def __init__(self, said: Path) -> None:
        self._said = said
        self._running: tuple[BaseProcess, Connection] | None = None

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns there.

        Raises ChildProcessError where the process ended without an answer, or had none in time.
        """
        process, pipe = self._running = self._running or self._started()
        goes_on = False
        try:
            pipe.send((function, arguments))
            if not (ready := wait([pipe, process.sentinel], seconds)):
                raise ChildProcessError(f"did not end in {seconds:.0f} s")
            if pipe in ready:
                found, goes_on = pipe.recv()
                return found
        except (EOFError, BrokenPipeError, ConnectionResetError):
            process.join()  # it ends by itself
        finally:
            if not goes_on:
                self.end()
        said = "".join(self._said.read_text("utf-8", "replace").strip().splitlines()[-1:])
        raise ChildProcessError(f"ended its process with {process.exitcode}{said and f': {said}'}"[:200])

    def _started(self) -> tuple[BaseProcess, Connection]:
        self._said.write_bytes(b"")
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_answer, args=(theirs, str(self._said)))
        process.start()
        theirs.close()  # so that its end is seen here
        return process, ours

    def end(self) -> None:
        """End the process, if there is one."""
        if self._running is not None:
            (process, pipe), self._running = self._running, None
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def helping() -> Iterator[Helper]:
    """Give a helper that ends behind the block."""
    with tempfile.TemporaryDirectory() as folder:
        helper = Helper(Path(folder, "said"))
        try:
            yield helper
        finally:
            helper.end()


def obstacles(entries: Iterable[Entry], minutes: float | None = None) -> dict[Attempt, str]:
    """Try every foreign peer of the entries in a process beside this one; return what is in the way of some.

    After so many `minutes` no other is tried, and those that run are ended. A forward is not tried alone where it has
    run below its backward, with all that it has to tune.
    """
    attempts = [
        (case, peer.who, peer.what)
        for case in dict.fromkeys(entry.case for entry in entries)
        for peer in peers.peers_of(case)
        if peer.is_foreign
    ]
    if not attempts:
        return {}
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    at_once = max(1, min(memory // _ROOM, (os.cpu_count() or 1) // 2, _MOST))
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    known: dict[Attempt, str | None] = {}
    idle: SimpleQueue[Helper] = SimpleQueue()

    def has_run(attempt: Attempt) -> bool:
        case, *who = attempt
        trained = (case._replace(phase="forward+backward"), *who)
        return case.phase == "forward" and trained in known and known[trained] is None

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool, ExitStack() as helpers:
        for _ in range(at_once):
            idle.put(helpers.enter_context(helping()))

        def attempted(attempt: Attempt) -> str | None:
            helper = idle.get()
            try:
                if (left := min(PATIENCE, end - time.monotonic())) <= 0:
                    raise ChildProcessError
                error: str | None = helper.ask(left, _tried, *attempt, str(Path(folder, "turn")))
            except ChildProcessError as raised:
                return f"was not tried in {minutes:g} min" if time.monotonic() >= end else str(raised)
            finally:
                if attempt[1] in _OF_ONE_SIZE:
                    helper.end()
                idle.put(helper)
            return error

        try:
            with terminal.progress("trying peers") as tell:
                for has_gradients in (True, False):
                    asked = [each for each in attempts if each[0].has_gradients == has_gradients and not has_run(each)]
                    for done, (attempt, error) in enumerate(zip(asked, pool.map(attempted, asked), strict=True), 1):
                        known[attempt] = error
                        about = f"{attempt[0].op} {attempt[0].phase} by {' '.join(attempt[1:])}"
                        print(f"tried {done} of {len(asked)}: {about}", file=sys.stderr, flush=True)
                        if tell:
                            tell(done, len(asked))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for attempt in [each for each, error in known.items() if (error or "").startswith("OutOfMemoryError")]:
            known[attempt] = attempted(attempt)  # alone
    return {attempt: error for attempt, error in known.items() if error is not None}


def rows_of(
    helper: Helper, entry: Entry, copy_tb_per_s: float, with_peers: bool, known: Mapping[Attempt, str]
) -> list[dict[str, Any]]:
    """Measure a case in the helper's process; those that cannot do it are rows with the reason."""
    everyone = [(peer.who, peer.what) for peer in (peers.peers_of(entry.case) if with_peers else ())]
    obstacle = {who: known.get((entry.case, *who)) for who in everyone}
    allowed = [who for who in everyone if obstacle[who] is None]
    try:
        rows = helper.ask(PATIENCE, _measured, entry, copy_tb_per_s, allowed)
    except ChildProcessError as error:
        if not allowed:
            raise
        obstacle |= dict.fromkeys(allowed, f"one of these peers: {error}")
        rows = helper.ask(PATIENCE, _measured, entry, copy_tb_per_s, [])  # ours stays
    if any(who in _OF_ONE_SIZE for who, _ in allowed):
        helper.end()
    return [*rows, *(measure.row(entry, *who, why) for who, why in obstacle.items() if why is not None)]
