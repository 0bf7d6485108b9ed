"""Processes of their own: one tries a peer on a case first, and one measures a case.

An illegal memory access leaves a process without its GPU, and everyone behind it in a run would be hidden. FLA keeps
what it tuned on disk: it tunes itself where it is tried, and the measurement finds it tuned. Processes compile side by
side and time kernels one at a time: what runs beside a kernel would choose its geometry.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from bench import ROOT, peers
from rwkv_jit import report
from rwkv_jit.bench import cases, measure
from rwkv_jit.bench.cases import Case
from rwkv_jit.bench.measure import Entry

PATIENCE = 900  # seconds, after which a process is ended; it waits for its turns meanwhile
_ROOM, _MOST = 16 << 30, 8  # bytes of a GPU for each that tunes itself beside others, and how many of them
_PAUSE, _LONGEST_TURN = 0.002, 60  # seconds between two looks whether it is one's turn, and to wait for one that hangs
# It ends at once: a thread of torch's backward that still waits for the interpreter when that ends aborts the process.
_PROGRAM = "import os; from bench import processes; processes.answer(); os._exit(0)"

Attempt = tuple[Case, str, str]  # a case, and who tries it with what


# ---- the process that is started ---------------------------------------------------------------------------------


def answer() -> None:
    """Do what standard input asks for, and print the answer as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print is no answer
    asked = json.load(sys.stdin)
    given = asked["case"]
    case = Case(**{**given, "shape": tuple(given["shape"]), "dtype": getattr(torch, given["dtype"])})
    if "turn" in asked:
        with suppress(ImportError):
            _time_in_turns(importlib.import_module("triton.testing"), asked["turn"])
        answer: Any = _tried(case, asked["who"], asked["what"])
    else:
        entry = Entry(asked["suite"], case, asked["backends"])
        known = [peer for peer in peers.peers_of(case) if [peer.who, peer.what] in asked["peers"]]
        answer = measure.rows_of(entry, asked["copy_tb_per_s"], known)
    print(json.dumps(answer), file=answers, flush=True)


def _tried(case: Case, who: str, what: str) -> str | None:
    """Run a peer once; return what is in its way."""
    try:
        peer = next(peer for peer in peers.peers_of(case) if (peer.who, peer.what) == (who, what))
        measure.run_once(case, peer, cases.given_for(case))()
        torch.cuda.synchronize()
    except Exception as error:
        return measure.one_line(error)
    return None


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


# ---- the process that starts others ------------------------------------------------------------------------------


def _ask(case: Case, asked: Mapping[str, Any], seconds: float) -> Any:
    """Return what a new process answers.

    Raises
    ------
    ChildProcessError
        It ended without an answer, or had none in time.
    """
    named = {**case._asdict(), "dtype": str(case.dtype).removeprefix("torch.")}
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(
            command, input=json.dumps({**asked, "case": named}), capture_output=True, text=True,
            timeout=seconds, cwd=ROOT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ChildProcessError(f"did not end in {seconds:.0f} s") from None
    if done.returncode or not done.stdout:
        said = "".join(done.stderr.strip().splitlines()[-1:])
        raise ChildProcessError(f"ended its process with {done.returncode}{said and f': {said}'}"[:200])
    return json.loads(done.stdout)


def obstacles(entries: Iterable[Entry], minutes: float | None = None) -> dict[Attempt, str]:
    """Try every foreign peer of the entries in a process of its own; return what is in the way of those that cannot.

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
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    at_once = max(1, min(memory // _ROOM, (os.cpu_count() or 1) // 2, _MOST))
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    known: dict[Attempt, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:

        def attempted(attempt: Attempt) -> str | None:
            case, who, what = attempt
            late = f"was not tried in {minutes or 0:g} min"
            left = min(PATIENCE, end - time.monotonic())
            if left <= 0:
                return late
            try:
                error: str | None = _ask(case, {"who": who, "what": what, "turn": str(Path(folder, "turn"))}, left)
            except ChildProcessError as raised:
                return late if time.monotonic() >= end else str(raised)
            return error

        try:
            with report.progress("trying peers") as tell:
                for done, (attempt, error) in enumerate(zip(attempts, pool.map(attempted, attempts), strict=True), 1):
                    if error is not None:
                        known[attempt] = error
                    if tell:
                        tell(done, len(attempts))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return known


def rows_of(entry: Entry, copy_tb_per_s: float, with_peers: bool, known: Mapping[Attempt, str]) -> list[dict[str, Any]]:
    """Measure a case in a process of its own; those that cannot do it are rows with the reason."""
    everyone = peers.peers_of(entry.case) if with_peers else []
    allowed, skipped = [], []
    for peer in everyone:
        why = known.get((entry.case, peer.who, peer.what))
        if why is None:
            allowed.append([peer.who, peer.what])
        else:
            skipped.append(measure.row(entry, peer.who, peer.what, why))
    asked = {"suite": entry.suite, "backends": entry.backends, "peers": allowed, "copy_tb_per_s": copy_tb_per_s}
    rows: Sequence[dict[str, Any]] = _ask(entry.case, asked, PATIENCE)
    return [*rows, *skipped]
