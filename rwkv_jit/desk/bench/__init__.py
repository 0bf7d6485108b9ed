"""Times, errors and memory of the ops on this GPU, beside what torch alone can do.

`cases` says what is measured and makes the inputs, `timing` times, and `measure` makes the rows. The folder `bench` of
a checkout measures other libraries too, and keeps what it finds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rwkv_jit.desk import terminal
from rwkv_jit.desk import versions as own_machine
from rwkv_jit.desk.bench import cases, measure, timing
from rwkv_jit.desk.bench.cases import DTYPES, OPS, OPTIONS, PHASES, REFERENCES, Case, decay_of, make_inputs, read_shape
from rwkv_jit.desk.bench.measure import Entry
from rwkv_jit.desk.bench.timing import median_ms

__all__ = [
    "DTYPES", "OPS", "OPTIONS", "PHASES", "REFERENCES", "asked_for", "check_gpu", "decay_of", "environment", "machine",
    "make_inputs", "measured", "median_ms", "on_cpu", "read_shape", "run", "show",
]  # fmt: skip

SHAPES = ("1,54,32,64", "8,4096,64,64")  # batch, tokens, heads, head size: a short prompt, and training
USUAL_PHASES = ("forward", "forward+backward")
CPU_NOTE = "CPU reference; not the speed of the kernels."
METHODS = (
    "Median and quartiles of the GPU's time by CUDA events, after a warm-up, in rounds over everyone of a case; small "
    "calls in a CUDA graph, the others queued while the GPU waits. Inputs come round when they have left the L2 cache. "
    "Clocks as found. Floor: the fewest bytes of a call at the bandwidth of a copy in the same run. Host: until a call "
    "has returned, in the fastest row of calls; a † marks where it takes longer than the GPU, so that calls one after "
    "another take its time. Peak: memory of one call, of a backward with its forward, and the inputs. Error: relative "
    "L2 of the call that was timed against float64, the largest of y, the gradients and the states of an update, over "
    "at most 300 tokens of a row, or 64 rows. Other: the largest distance, over all tokens, from another backend of "
    "ours, or from our update."
)


def check_gpu() -> None:
    """Check that there is something to measure on. Raises ValueError where there is no GPU, no CuPy or no NVRTC."""
    if not own_machine.is_available():
        raise ValueError("bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; without a GPU what calls run on the CPU, on small shapes unless one is asked for.

    Returns env, copy_tb_per_s, device, and rows: one dict per op, shape, dtype, phase, inputs and contestant (who,
    what) with median_ms, low_ms and high_ms (quartiles), runs, in_graph, host_us, floor_ms, fraction, peak_mib; errors
    of y, each gradient and the states of an update, and error, the largest of them; other_error, the distance from the
    backend `other`. skipped is None, or what is in the way of a contestant, which has no figures then.
    Raises ValueError where options do not go together, a shape cannot be read, there is a GPU without CuPy or NVRTC, or
    what is asked for needs a GPU, and there is none.
    """
    entries = asked_for(arguments)
    if not torch.cuda.is_available():
        return on_cpu(arguments, entries)
    check_gpu()
    copy = timing.copy_tb_per_s()

    def rows_of(entry: Entry, tell: Callable[[int, int], None]) -> list[dict[str, Any]]:
        try:
            return measure.rows_of(entry, copy, measure.torch_peers(entry.case), tell)
        finally:
            torch.cuda.empty_cache()

    return {"env": environment(), "copy_tb_per_s": copy, "device": "cuda", "rows": measured(entries, rows_of)}


def asked_for(arguments: argparse.Namespace) -> list[Entry]:
    """Return what a command line names; a decode and an update take one token, whatever the shape says.

    Raises ValueError where a shape, a backend, a phase or inputs do not fit an op.
    """
    phases, backend, kind = arguments.phase or USUAL_PHASES, arguments.backend, arguments.inputs or "usual"
    ops = arguments.op or [op for op in sorted(OPS) if _has(op, phases, kind, backend)]
    entries: dict[Case, Entry] = {}
    for text in SHAPES if arguments.shape is None else (arguments.shape,):
        for op in ops:
            for phase in phases:
                if backend not in (None, *measure.backends_of(op, phase)):
                    expected = ", ".join(measure.backends_of(op, phase))
                    raise ValueError(f"--backend: expected one of {expected} for {op}, got {backend}")
                sizes = cases.shape_of(op, text, phase)
                if kind == "packed" and arguments.shape is None:
                    sizes = (1, sizes[0] * sizes[1], *sizes[2:])
                case = Case(op, sizes, DTYPES[arguments.dtype or "bf16"], phase, kind=kind).check()
                entries[case] = Entry(None, case, None if backend is None else [backend])
    return list(entries.values())  # two lengths of a prompt are one decode


def _has(op: str, phases: Sequence[str], kind: str, backend: str | None) -> bool:
    """Return whether an op is meant where none is named."""
    has_phases = set(phases) <= set(cases.phases_of(op))
    can = has_phases and op in cases.ops_of(kind)
    return can and all(backend in (None, *measure.backends_of(op, phase)) for phase in phases)


def on_cpu(arguments: argparse.Namespace, entries: Sequence[Entry]) -> dict[str, Any]:
    """Measure without a GPU: on the shape that was asked for, or on a small one for each op and phase."""
    backend = arguments.backend or "auto"
    for op in dict.fromkeys(entry.case.op for entry in entries):
        expected = ["auto", "fft"] if op == "timex" else ["auto"]
        if backend not in expected:
            raise ValueError(f"--backend: torch sees no GPU; expected {' or '.join(expected)} for {op}, got {backend}")
    if arguments.shape is None:
        entries = list({(entry.case.op, entry.case.phase): measure.on_small_shape(entry) for entry in entries}.values())
    rows = [row for number, entry in _announced(entries) for row in measure.rows_of_cpu(entry)]
    return {"env": environment(), "copy_tb_per_s": None, "device": "cpu", "rows": rows}


def _announced(entries: Sequence[Entry]) -> Iterator[tuple[int, Entry]]:
    """Yield entries and their numbers, each said before it is measured."""
    for number, entry in enumerate(entries):
        case, shape = entry.case, ",".join(map(str, entry.case.shown))
        terminal.note(f"measuring {number + 1} of {len(entries)}: {case.op} {case.phase} {shape}")
        yield number, entry


def measured(
    entries: Sequence[Entry], rows_of: Callable[[Entry, Callable[[int, int], None]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the rows of all entries; one that fails hides no other, and an interrupt none before it."""
    rows: list[dict[str, Any]] = []
    with terminal.progress("measuring") as tell:
        for number, entry in _announced(entries):

            def tell_case(done: int, total: int, number: int = number) -> None:
                if tell:
                    tell(100 * number + 100 * done // total, 100 * len(entries))

            tell_case(0, 1)
            try:
                rows += rows_of(entry, tell_case)
            except KeyboardInterrupt:
                rows += [measure.row(entry, measure.OURS, "-", "interrupted") for entry in entries[number:]]
                break
            except Exception as error:
                rows.append(measure.row(entry, measure.OURS, "-", measure.one_line(error)))
    return rows


# ---- printing ----------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Return what of the environment says something about a time, and no paths."""
    paths = ("nvrtc_libraries", "cache", "environment")
    return {name: x for name, x in own_machine.env_report().items() if name not in paths}


def machine(env: dict[str, Any]) -> str:
    """Return what a measurement was taken on, from the environment report."""
    return f"{env['gpus'][0]}, torch {env['torch']}, NVRTC {env['nvrtc'].split()[0]}"


_COLUMNS = {
    "by": "{who} {what}", "ms": "{median_ms:.4f}", "quartiles": "{low_ms:.4f} to {high_ms:.4f}",
    "of the floor": "{fraction:.0%}", "in a graph": "{graph}", "host us": "{host_us:.1f}", "": "{mark}",
    "peak MiB": "{peak_mib:.1f}", "error": "{error:.1e}", "other": "{other_error:.1e}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print a table for each op, shape, dtype, phase and kind of inputs."""
    if result["device"] == "cpu":
        terminal.say(f"{CPU_NOTE} There is no GPU; without --shape each op runs on a small one.")
    else:
        terminal.say(f"{machine(result['env'])}; a copy moves {result['copy_tb_per_s']:.2f} TB/s")
    tables: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        case = (row["op"], tuple(row["shape"]), row["dtype"], row["phase"], row["inputs"])
        tables.setdefault(case, []).append(row)
    for (op, shape, dtype, phase, kind), rows in tables.items():
        floor = next((f"; floor {row['floor_ms']:.4f} ms" for row in rows if row["floor_ms"] is not None), "")
        what = ", ".join(filter(None, (phase, cases.KINDS_OF_SUITES[kind])))
        terminal.say(f"\n{op} ({', '.join(map(str, shape))}) {dtype}, {what}{floor}")
        done = [row for row in rows if row["skipped"] is None]
        if done:
            shown = [
                row | {"graph": "yes" if row["in_graph"] else "no", "mark": "†" if measure.is_host_bound(row) else ""}
                for row in done
            ]
            terminal.records(_COLUMNS, shown, ("in a graph", "quartiles", "of the floor", "other"))
            for row in done:
                if len(row["errors"]) > 1:
                    errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
                    terminal.say(f"  errors of {_name(row)}: {errors}")
        for row in rows:
            if row["skipped"] is not None:
                terminal.say(f"  skipped: {_name(row)}: {row['skipped']}")
    terminal.say(f"\n{CPU_NOTE if result['device'] == 'cpu' else METHODS}")


def _name(row: dict[str, Any]) -> str:
    return f"{row['who']} {row['what']}"
