"""Times of the ops and of their updates beside plain torch on the same inputs.

The folder `bench` of a checkout measures other inputs, layers, models and other libraries, and keeps what it finds.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rwkv_jit.desk import figures, inputs, terminal, versions
from rwkv_jit.desk.inputs import OPS, OURS, UPDATE, USUAL_PHASES, Case, Given, Who
from rwkv_jit.kernels.errors import UnsupportedConfigError

Row = dict[str, Any]
_BUDGET_MS = 4000.0  # of the rounds of a case
CPU_NOTE = "CPU reference; not the speed of the kernels."
METHODS = (
    "Median and quartiles of the GPU's time by CUDA events, in rounds over everyone, with a cold L2 cache, clocks as "
    "found. Host: until a call has returned; a † marks where it takes longer than the GPU. Peak: memory of a call, a "
    "backward with its forward, and inputs. Error: relative L2 against float64, the largest of all results, on 300 "
    "tokens of a row, or 64 rows of an update."
)
COLUMNS = {
    "by": "{who} {what}", "ms": "{median_ms:.4f}", "quartiles": "{low_ms:.4f} to {high_ms:.4f}",
    "host us": "{host_us:.1f}", "": "{mark}", "peak MiB": "{peak_mib:.1f}", "error": "{error:.1e}",
}  # fmt: skip


def use_one_thread() -> None:
    """Without a GPU, and unless OMP_NUM_THREADS is set, work on one thread: more wait for each other for long."""
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


# ---- rows --------------------------------------------------------------------------------------------------------


def row_of(case: Any, who: Who = (OURS, "-"), skipped: str | None = None) -> Row:
    """Return a row without figures."""
    return dict.fromkeys(("median_ms", "low_ms", "high_ms", "host_us", "peak_mib", "error")) | {
        "op": case.op, "shape": case.shown, "dtype": str(case.dtype).removeprefix("torch."), "phase": case.phase,
        "who": who[0], "what": who[1], "runs": 0, "errors": {}, "skipped": skipped,
    }  # fmt: skip


def one_line(error: BaseException) -> str:
    """Return what is said of an error in a table."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200].removesuffix(": ")


def rows_of(case: Case, named: Sequence[str] | None, device: str) -> list[Row]:
    """Measure a case; return a row for everyone, those who are left out last with what is in the way of them."""
    backends = named or (["auto"] if device == "cpu" else inputs.backends_of(case.op, case.phase))
    errors, given = figures.errors_of(case, backends, device), inputs.given_for(case, backends, device)
    return measured_rows(case, given, errors, device, named is not None)


def measured_rows(
    case: Any, given: Given, errors: dict[Who, dict[str, float]], device: str, is_named: bool
) -> list[Row]:
    """Return the rows of everyone in `given`; a backend that cannot do it has one where somebody named it."""
    rows, turns = dict[Who, Row](), dict[Who, Callable[[], float]]()

    def whole(function: inputs.Function) -> Any:
        return inputs.call_of(function, given, case.phase)()

    for who, function in given.functions.items():
        of = errors.get(who, {})
        rows[who] = row_of(case, who) | {"errors": of, "error": max(of.values(), default=None)}
        try:
            if not all(map(math.isfinite, of.values())):
                raise ValueError("its results are not finite, so it has no speed")
            call = inputs.call_of(function, given, case.phase)
            if device == "cpu":
                rows[who] |= figures.spread(figures.cpu_ms(call))
                continue
            call()
            peak = figures.peak_bytes(call if case.phase == UPDATE else partial(whole, function))
            peak += sum(x.nbytes for x in (*given.inputs, *given.dys))
            host = figures.host_us([call])
            rows[who] |= {"host_us": host, "peak_mib": peak / 2**20}
            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            flush = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")
            turns[who] = partial(figures.gpu_ms, call, min(2 * host + 50, 1e5), flush)
        except Exception as error:
            rows[who] = row_of(case, who, one_line(error))
            if isinstance(error, UnsupportedConfigError) and not is_named:
                del rows[who]
    for who, times in zip(turns, figures.interleaved(list(turns.values()), _BUDGET_MS), strict=True):
        rows[who] = (
            row_of(case, who, one_line(times)) if isinstance(times, Exception) else rows[who] | figures.spread(times)
        )
    return sorted(rows.values(), key=lambda row: row["skipped"] is not None)


def measured(cases: Sequence[Any], rows_of: Callable[[Any], list[Row]], failed: Callable[..., Row]) -> list[Row]:
    """Return the rows of all, each said before it is measured; one that fails hides no other, nor does an interrupt."""
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):
        row = failed(case)
        about = "{op} {phase} {}".format(",".join(map(str, row["shape"])), **row)
        print(f"measuring {number} of {len(cases)}: {about}", file=sys.stderr, flush=True)
        try:
            rows += rows_of(case)
        except KeyboardInterrupt:
            return rows + [failed(other, skipped="interrupted") for other in cases[number - 1 :]]
        except Exception as error:
            rows.append(failed(case, skipped=one_line(error)))
    return rows


# ---- the command -------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; without a GPU what calls run on the CPU, on small shapes unless one is named.

    Returns env, device, and rows, one for each op, shape, dtype, phase and who with what: median_ms, low_ms and high_ms
    (quartiles), runs, host_us, peak_mib; errors of each result or gradient, and error, the largest of them. skipped is
    None, or what is in the way, and then there are no figures.
    Raises ValueError where options do not go together, a shape cannot be read, or the machine cannot do it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases, named = cases_of(arguments, device), arguments.backend and [arguments.backend]
    if device == "cuda":
        check_gpu()
    return {
        "env": environment(), "device": device,
        "rows": measured(cases, lambda case: rows_of(case, named, device), row_of),
    }  # fmt: skip


def check_gpu() -> None:
    """Raise ValueError where there is no GPU, no CuPy or no NVRTC."""
    if not versions.is_available():
        raise ValueError("bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")


def cases_of(arguments: argparse.Namespace, device: str) -> list[Case]:
    """Return the cases of ops that a command line names, or of those that can; small on a CPU. Raises ValueError.

    Two lengths of a prompt are one decode.
    """
    cases, refused = dict[Case, None](), ValueError()
    for text in (arguments.shape,) if arguments.shape else ("1,54,32,64", "8,4096,64,64"):  # a prompt, and training
        for op in arguments.op or sorted(OPS):
            try:
                named = [_case(arguments, op, text, phase, device) for phase in arguments.phase or USUAL_PHASES]
            except ValueError as error:
                if arguments.op:
                    raise
                refused = error
            else:
                cases |= dict.fromkeys(named)
    if not cases:
        raise refused
    return list(cases)


def _case(arguments: argparse.Namespace, op: str, text: str, phase: str, device: str) -> Case:
    """Return a case that the machine can do. Raises ValueError."""
    known, where = inputs.backends_of(op, phase), ""
    if device == "cpu":
        known, where = [x for x in known if x in ("auto", "fft")], "torch sees no GPU; "
    if arguments.backend not in (None, *known):
        raise ValueError(f"--backend: {where}expected one of {', '.join(known)} for {op}, got {arguments.backend}")
    shape = inputs.shape_of(op, text, phase)
    case = Case(op, shape, inputs.DTYPES[arguments.dtype or "bf16"], phase).check()
    is_small = device == "cpu" and arguments.shape is None
    return case._replace(shape=tuple(map(min, shape, (1, 32, 2, 16, 16)))) if is_small else case


def environment() -> dict[str, Any]:
    """Return what of the environment says something about a time, and no paths."""
    paths = ("nvrtc_libraries", "cache", "environment")
    return {name: x for name, x in versions.env_report().items() if name not in paths}


def machine(env: dict[str, Any]) -> str:
    """Return what a measurement was taken on, from the environment report."""
    return f"{env['gpus'][0]}, torch {env['torch']}, NVRTC {env['nvrtc'].split()[0]}"


def show(result: dict[str, Any], columns: dict[str, str] = COLUMNS, methods: str = METHODS) -> None:
    """Print a table for each op, shape, dtype, phase and kind of inputs, if rows have some."""
    on_gpu, small = result["device"] == "cuda", f"{CPU_NOTE} There is no GPU; without --shape a small one is taken."
    copy = f"; a copy moves {result['copy_tb_per_s']:.2f} TB/s" if result.get("copy_tb_per_s") else ""
    terminal.say(f"{machine(result['env'])}{copy}" if on_gpu else small)
    tables: dict[str, list[Row]] = {}
    for row in result["rows"]:
        title = f"{row['op']} ({', '.join(map(str, row['shape']))}) {row['dtype']}, {row['phase']}"
        kind = row.get("inputs") or "usual"
        tables.setdefault(title if kind == "usual" else f"{title}, {kind.replace('-', ' ')}", []).append(row)
    for title, rows in tables.items():
        floors = [f"; floor {row['floor_ms']:.4f} ms" for row in rows if row.get("floor_ms") is not None]
        terminal.say(f"\n{title}{floors[0] if floors else ''}")
        done = [row for row in rows if row["skipped"] is None]
        done = [row | {"mark": "†" if (row["host_us"] or 0) > 1e3 * row["median_ms"] else ""} for row in done]
        if done:
            terminal.records(columns, done, ("in a graph", "quartiles", "of the floor", "other"))
        for row in rows:
            if row["skipped"] is not None:
                terminal.say(f"  skipped: {row['who']} {row['what']}: {row['skipped']}")
            elif len(row["errors"]) > 1:
                errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
                terminal.say(f"  errors of {row['who']} {row['what']}: {errors}")
    terminal.say(f"\n{methods if on_gpu else CPU_NOTE}")
