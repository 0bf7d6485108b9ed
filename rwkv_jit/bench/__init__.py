"""Times, errors and memory of the ops on this GPU beside those of others, and what a first call costs.

`cases` says what is measured, `contestants` and `peers` who, `suites` what together; `isolation` tries what may end a
process, `timing` times, `floors` counts bytes, `measure` makes the rows, and `result` what is kept and printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rwkv_jit import report, runtime
from rwkv_jit.bench import contestants, isolation, measure, peers, suites, timing
from rwkv_jit.bench.cases import DTYPES, OPS, OPTIONS, PHASES, REFERENCES, decay_of, make_inputs, read_shape
from rwkv_jit.bench.contestants import BACKENDS
from rwkv_jit.bench.result import checkout, collect, commit, environment, machine, show, write_csv
from rwkv_jit.bench.service import first_calls, one_line_kernels, show_first_calls
from rwkv_jit.bench.suites import SHAPES
from rwkv_jit.bench.timing import call_ms, graph_ms, median_ms

__all__ = [
    "BACKENDS", "DTYPES", "OPS", "OPTIONS", "PHASES", "REFERENCES", "SHAPES", "call_ms",
    "check_gpu", "check_record", "commit", "decay_of", "environment", "first_calls", "graph_ms", "keep", "machine",
    "make_inputs", "median_ms", "one_line_kernels", "read_shape", "run", "show", "show_first_calls",
]  # fmt: skip


def check_gpu() -> None:
    """Check that there is something to measure on.

    Raises
    ------
    ValueError
        There is no GPU, no CuPy or no NVRTC.
    """
    if not runtime.is_available():
        raise ValueError("bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; without a GPU what calls run on the CPU, on small shapes unless one is asked for.

    Parameters
    ----------
    arguments : argparse.Namespace
        The command's.

    Returns
    -------
    dict
        format, env, commit, sources, copy_tb_per_s, device, and rows: one dict per suite, op, shape, dtype, phase and
        contestant (who, what) with median_ms, low_ms and high_ms (quartiles), runs, in_graph, host_us, floor_ms,
        fraction, peak_mib and error; skipped is None, or what is in the way of a contestant, which has no figures then.

    Raises
    ------
    ValueError
        Options do not go together, a file could not be written, a shape cannot be read, there is a GPU without CuPy
        or NVRTC, or what is asked for needs a GPU, and there is none.
    """
    entries = _entries(arguments)
    on_gpu = torch.cuda.is_available()
    _check_outputs(arguments)
    if not on_gpu:
        return collect(
            [row for entry in _on_cpu(arguments, entries) for row in measure.rows_of_cpu(entry)], None, "cpu"
        )
    check_gpu()
    copy = timing.copy_tb_per_s()
    obstacles = {} if arguments.no_peers else _obstacles(entries, arguments.peer_minutes)
    rows = []
    with report.progress("measuring") as tell:
        for number, entry in enumerate(entries):

            def tell_case(done: int, total: int, number: int = number) -> None:
                if tell:
                    tell(100 * number + 100 * done // total, 100 * len(entries))

            tell_case(0, 1)
            try:
                rows += measure.rows_of(entry, copy, not arguments.no_peers, obstacles, tell_case)
            except KeyboardInterrupt:  # what has been measured is shown
                rows += [measure.row(each, contestants.OURS, "-", "interrupted") for each in entries[number:]]
                break
            except Exception as error:
                rows.append(measure.row(entry, contestants.OURS, "-", isolation.one_line(error)))
            measure.give_back_memory()
    return collect(rows, copy, "cuda")


def _entries(arguments: argparse.Namespace) -> list[suites.Entry]:
    """Return what is measured, in the order of the command line."""
    if arguments.suite is not None:
        for name in ("shape", "dtype", "backend", "phase"):
            given = getattr(arguments, name)
            if given is not None:
                raise ValueError(f"--{name}: a suite has its own, got {given} beside --suite {arguments.suite}")
        found = suites.of_suite(arguments.suite, arguments.op)
        if not found:
            raise ValueError(f"--op: nothing of {', '.join(arguments.op)} is in --suite {arguments.suite}")
        return found
    phases = arguments.phase or suites.USUAL_PHASES
    backend = arguments.backend
    ops = arguments.op or [op for op in suites.usual_ops(phases) if backend in (None, *contestants.backends_of(op))]
    for op in ops:
        if backend not in (None, *contestants.backends_of(op)):
            expected = ", ".join(contestants.backends_of(op))
            raise ValueError(f"--backend: expected one of {expected} for {op}, got {backend}")
    dtype = DTYPES[arguments.dtype or "bf16"]
    return suites.asked_for(ops, arguments.shape, dtype, phases, None if backend is None else [backend])


def _on_cpu(arguments: argparse.Namespace, entries: Sequence[suites.Entry]) -> list[suites.Entry]:
    """Return what is measured without a GPU: the shape that was asked for, or a small one for each op and phase."""
    if arguments.suite is not None:
        raise ValueError("--suite: its shapes are for a GPU, and torch sees none; expected --shape")
    backend = arguments.backend or "auto"
    for op in dict.fromkeys(entry.case.op for entry in entries):
        expected = ["auto", "fft"] if op == "timex" else ["auto"]
        if backend not in expected:
            raise ValueError(f"--backend: torch sees no GPU; expected {' or '.join(expected)} for {op}, got {backend}")
    if arguments.shape is not None:
        return list(entries)
    return list({(entry.case.op, entry.case.phase): measure.on_small_shape(entry) for entry in entries}.values())


def _obstacles(entries: Sequence[suites.Entry], minutes: float | None) -> dict[isolation.Attempt, str]:
    attempts = [
        isolation.Attempt(entry.case, each.who, each.what)
        for entry in entries
        for each in peers.of(entry.case)
        if each.is_foreign
    ]
    with report.progress("trying peers") as tell:
        return isolation.obstacles(attempts, tell, minutes=minutes)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Check what would fail after minutes of measuring."""
    if arguments.peer_minutes is not None and not 0 < arguments.peer_minutes < 1e6:
        raise ValueError(f"--peer-minutes: expected a number above 0, got {arguments.peer_minutes:g}")
    for name in ("csv", "plot"):
        if getattr(arguments, name) is not None:
            _check_writable(f"--{name}", Path(getattr(arguments, name)))
    if arguments.plot is not None:
        from rwkv_jit.bench import plot

        plot.check(arguments.plot)
    if arguments.record:
        if arguments.suite is None or arguments.op:
            raise ValueError("--record: keeps a whole suite; expected --suite and no --op")
        check_record()


def _check_writable(option: str, path: Path) -> None:
    """Check that a file can be written, and leave none behind."""
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option}: expected a file that can be written, got {path} ({error.strerror})") from None


def check_record() -> None:
    """Check that a result can be kept.

    Raises
    ------
    ValueError
        There is no GPU, or no checkout.
    """
    if not torch.cuda.is_available():
        raise ValueError("--record: keeps what was measured on a GPU, and there is none")
    if checkout() is None:
        raise ValueError("--record: writes bench.json at the root of a checkout, and this is an installed package")


def keep(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the files that the command line asks for."""
    if arguments.csv is not None:
        write_csv(result, arguments.csv)
    if arguments.record and not any(row["skipped"] == "interrupted" for row in result["rows"]):
        from rwkv_jit.bench import record

        record.write(result)
    if arguments.plot is not None:
        from rwkv_jit.bench import plot

        plot.draw(result, arguments.plot)
