"""What pages show of a result: tables in Markdown, and how many times faster than the best peer it finds us."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench import suites
from bench.cases import KINDS_OF_SUITES, POOLED
from rwkv_jit.desk.inputs import OURS

Row = Mapping[str, Any]
Case = tuple[Any, ...]
RWKV7 = "RWKV7"  # the model of rows that name none, as of earlier versions
CPU = "CPU reference; not the speed of the kernels"
PICTURE = "docs/speedups.png"
FRONT, FLOAT32 = "front", "float32"  # suites
HOST_BOUND = "†"
NAMES = {
    "fla": "FLA", "wind_rwkv": "Wind", "rwkv_lm": "RWKV-LM", "cudnn": "cuDNN", "mamba_ssm": "mamba-ssm",
    "flash_rwkv": "flash-rwkv",
}  # fmt: skip
_MOST_BARS = 6
_NOTHING = "The record has none of these yet.\n"
WITH_GRADIENTS = ("forward+backward", "backward")

# ---- words -------------------------------------------------------------------------------------------------------


def shape_of(row: Row) -> str:
    """Return a row's shape as it is written, one N where K and V are equal, and what is unusual of its inputs."""
    sizes = list(row["shape"])
    if len(sizes) == 5:
        *others, keys, values = sizes
        sizes = [*others, keys] if keys == values else [*others, f"K = {keys}", f"V = {values}"]
    kinds = (KINDS_OF_SUITES[kind] for kind in row["inputs"].split("+"))
    return ", ".join(filter(None, (f"({', '.join(map(str, sizes))})", *kinds)))


def contestant(row: Row) -> str:
    """Return who did it, and by what."""
    return f"{library(row)} {row['what']}"


def library(row: Row) -> str:
    """Return who did it."""
    return NAMES.get(row["who"], str(row["who"]))


def obstacle(row: Row) -> str:
    """Return in one line why a row has no time."""
    return " ".join((row["skipped"] or "no reason is recorded").split())


def milliseconds(value: float) -> str:
    """Return a time with three digits that count."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def percent(fraction: float) -> str:
    """Return a share as it is written."""
    return f"{fraction:.0%}" if fraction >= 0.005 else "<1%"


def machine(result: Mapping[str, Any]) -> str:
    """Return what a result was measured on: GPU and versions, as far as they are known."""
    env = result["env"]
    gpus = [CPU] if result.get("device") == "cpu" else list(env.get("gpus") or ())[:1]
    versions = [
        f"{name} {env[key].split()[0]}"
        for name, key in (("torch", "torch"), ("NVRTC", "nvrtc"))
        if str(env.get(key) or "-")[0].isdigit()  # a sentence stands for an NVRTC that was not found
    ]
    return ", ".join([*gpus, *versions])


def gpu_of(row: Row) -> str:
    """Return the kind of GPU that a row was measured on."""
    return str(row["machine"]).split(",")[0].removeprefix("NVIDIA ")


def origin(rows: Sequence[Row]) -> str:
    """Return dtypes, GPUs and commits of rows in words."""
    dtypes, gpus = (", ".join(dict.fromkeys(names)) for names in ([row["dtype"] for row in rows], map(gpu_of, rows)))
    commits = ", ".join(dict.fromkeys(str(row["commit"])[:10] for row in rows))
    return f"{dtypes}, on one {gpus}, at commit {commits}"


def _origins(result: Mapping[str, Any]) -> str:
    """Return a table of what was measured where and when."""
    measured: dict[Case, dict[str, None]] = {}
    for row in result["rows"]:
        measured.setdefault((row["machine"], row["commit"], row["copy_tb_per_s"]), {})[row["suite"]] = None
    lines = [
        (", ".join(names), name, str(commit)[:10], "" if copy is None else f"{copy:.2f}")
        for (name, commit, copy), names in measured.items()
    ]
    return _table_of(("suites", "measured on", "at commit", "copy TB/s"), lines)


# ---- speedups ----------------------------------------------------------------------------------------------------


class Speedup(NamedTuple):
    """What a call of ours takes by itself, beside the fastest peer of the same case."""

    ours: Row
    peer: Row

    @property
    def times(self) -> float:
        """How many times as long the peer takes."""
        return float(self.peer["median_ms"] / self.ours["median_ms"])

    @property
    def written(self) -> str:
        """That as it is written."""
        return f"{self.times:.1f}×"


def case_of(row: Row) -> Case:
    """Return what rows of one case have in common."""
    return gpu_of(row), row["suite"], row["op"], tuple(row["shape"]), row["dtype"], row["inputs"], row["phase"]


def our_rows(rows: Iterable[Row]) -> dict[Case, Row]:
    """Return the measured row of what our calls take by themselves, the first of a case."""
    first: dict[Case, Row] = {}
    for row in rows:
        if row["who"] == OURS:
            first.setdefault(case_of(row), row)
    return {case: row for case, row in first.items() if row["median_ms"] is not None}


def speedups(rows: Sequence[Row]) -> list[Speedup]:
    """Return the speedup over the best peer of every case that has both, one op after another."""
    best = []
    for case, first in our_rows(rows).items():
        others = [row for row in rows if case_of(row) == case and row["who"] != OURS and row["median_ms"] is not None]
        if others:
            best.append(Speedup(first, min(others, key=lambda row: float(row["median_ms"]))))
    ops = list(dict.fromkeys(speedup.ours["op"] for speedup in best))
    return sorted(best, key=lambda speedup: ops.index(speedup.ours["op"]))


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the first page shows: of a suite of its own."""
    shown = {(entry.case.op, tuple(entry.case.shown), entry.case.kind) for entry in suites.entries_of([FRONT])}
    same = [row for row in rows if (row["op"], tuple(row["shape"]), row["inputs"]) in shown]
    return [row for row in rows if row["suite"] == FRONT] or [row for row in same if row["dtype"] == "bfloat16"]


def bars(rows: Sequence[Row]) -> list[Speedup]:
    """Return what the picture shows: the first calls with gradients of the first page."""
    return [each for each in speedups(front(rows)) if each.ours["phase"] in WITH_GRADIENTS][:_MOST_BARS]


def sentence(rows: Sequence[Row]) -> str:
    """Return in words what the picture shows."""
    shown = (
        f"{each.ours['op']} {shape_of(each.ours)} {each.written} as fast as {library(each.peer)}" for each in bars(rows)
    )
    return f"Forward and backward, beside the fastest other library: {', '.join(shown)}"


def slower(rows: Sequence[Row]) -> str:
    """Return in words in which calls another implementation is faster, what we are slowest at first.

    Calls over a pool are not among them: they stand beside a copy of their states, which is a bound.
    """
    by_call: dict[Case, list[Speedup]] = {}
    for each in speedups(rows):
        if each.times < 1 and each.ours["phase"] not in POOLED:
            by_call.setdefault((*case_of(each.ours)[:-1], library(each.peer)), []).append(each)
    calls, words = [], {"decode": "one token"}  # of each sequence
    for phases in sorted(by_call.values(), key=lambda phases: min(each.times for each in phases)):
        ours, peer = phases[0]
        times = ", ".join(
            f"{words.get(phase, phase.replace('+', ' + '))} {milliseconds(each.ours['median_ms'])} ms where "
            f"{library(peer)} takes {milliseconds(each.peer['median_ms'])}"
            for each in phases
            for phase in [each.ours["phase"]]
        )
        calls.append(f"`{ours['op']}` {shape_of(ours)} on one {gpu_of(ours)} ({times})")
    return f"Slower than another implementation: {'; '.join(calls)}." if calls else "No other implementation is faster."


def _speedup_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each call that was measured with gradients, beside the fastest others."""
    by_call: dict[Case, dict[str, Speedup]] = {}
    for speedup in speedups(rows):
        *call, phase = case_of(speedup.ours)
        by_call.setdefault(tuple(call), {})[phase] = speedup
    lines: list[tuple[str, ...]] = []
    for phases in by_call.values():
        trained = next((phases[phase] for phase in WITH_GRADIENTS if phase in phases), None)
        if trained is None:
            continue
        shown = [phases.get("forward"), trained]
        hosts = _hosts(each and each.ours for each in shown)
        cells = (cell for each in shown for cell in _speedup_cells(each))
        where = f"{trained.ours['dtype']}, {gpu_of(trained.ours)}"
        lines.append((trained.ours["op"], shape_of(trained.ours), where, *cells, hosts))
    other = "fastest other"
    head = ("op", "shape", "dtype, GPU", "forward ms", other, "forward + backward ms", other, "host us")
    return _table_of(head, lines)


def _speedup_cells(speedup: Speedup | None) -> tuple[str, str]:
    if speedup is None:
        return "", ""
    ours, peer = (milliseconds(row["median_ms"]) for row in speedup)
    times = f"**{speedup.written}**" if speedup.times >= 1 else f"{speedup.written}, slower"
    return ours, f"{peer} {contestant(speedup.peer)} ({times})"


def _first_page(rows: Sequence[Row]) -> str:
    """Return the table of the first page, and in lines below it what was measured, and what was left out."""
    if not rows:
        return _NOTHING
    others = ", ".join(dict.fromkeys(library(row) for row in rows if row["who"] != OURS))
    about = (
        f"{origin(rows)}, beside {others}. {HOST_BOUND}: the host takes longer than the GPU, so calls one after "
        "another take the host's time."
    )
    return f"{_speedup_table(rows)}\n{about}\n{_left_out(rows)}"


# ---- the blocks of pages -----------------------------------------------------------------------------------------

_METHOD = (
    "A percentage is the floor over the median: the time that a copy, measured in the same run, takes for the fewest "
    f"bytes of the case. Host is the host's part of a call, phase by phase; where a {HOST_BOUND} stands behind it, the "
    "host takes longer than the GPU, and calls one after another take the host's time. Error is relative L2 against "
    "float64, and memory the peak, each the largest of a line."
)


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of a result, by the names of their markers.

    Returns machine : how its tables read, and what was measured where; picture : the picture's line, and which calls
    are slower; speedups : the table of the first page; float32 : how much slower float32 is; training, decode : steps
    of whole models; service : a table of what the service costs; errors : a table of errors by result; inference : a
    table of calls over a pool, whose functions are ops with a verb; and a table of all else for each op, by its name.
    """
    rows = result["rows"]
    shown = {
        "machine": f"Medians, with quartiles behind them, of runs in which contestants take turns. {_METHOD}\n\n"
        f"{_origins(result)}",
        "picture": f"![{sentence(rows)}]({PICTURE})\n\n{slower(rows)}\n",
        "speedups": _first_page(front(rows)),
        "float32": _float32(rows),
        "training": _models(result.get("training", ()), _FLOPS),
        "decode": _models(result.get("decode", ()), {"of a copy": "copy_use", **_FLOPS}),
        "service": _service(result.get("service")),
        "errors": _errors(rows),
        "inference": _table(
            [{**row, "op": f"{row['op']}_{row['phase']}", "phase": "call"} for row in rows if row["phase"] in POOLED],
            "call",
            lambda row: f"{row['op']} {shape_of(row)}",
            _OF_POOLS,
        ),
    }
    for op in dict.fromkeys(entry.case.op for entries in suites.TABLES.values() for entry in entries):
        of_op = [row for row in rows if row["op"] == op and row["phase"] not in POOLED]
        shown[op] = _table(of_op, "shape", shape_of, _OF_PASSES)
    return shown


def _float32(rows: Sequence[Row]) -> str:
    """Return a table of calls in float32 beside the same in bfloat16 on the same GPU."""
    ours, lines = our_rows(rows), []
    for case, row in ours.items():
        gpu, suite, op, shape, _, *others = case
        narrow = ours.get((gpu, FRONT, op, shape, "bfloat16", *others))
        if suite == FLOAT32 and narrow is not None:
            times = [each["median_ms"] for each in (row, narrow)]
            call = f"{op} {shape_of(row)}, {row['phase'].replace('+', ' + ')}"
            lines.append(
                (call, *map(milliseconds, times), f"{times[0] / times[1]:.0f}×", f"{gpu}, {row['commit'][:10]}")
            )
    return _table_of(("call", "float32 ms", "bfloat16 ms", "float32 takes", "GPU, commit"), lines)


_TOKENS = {"steps": "{batch} x {tokens}", "token": "{batch} x 1", "prompt": "a prompt of {tokens}"}  # by parts
_FLOPS = {"of the FLOPs": "flops_use"}


def _models(rows: Sequence[Row], uses: Mapping[str, str]) -> str:
    """Return a table of steps of whole models, with shares as `uses` names them; earlier results lack some figures."""
    times = "ms a step", "host alone ms", "GPU busy", "tokens a second"
    head = ("model", "tokens", "by", "parameters", *times, *uses, "peak GiB", "GPU, commit")
    lines = []
    for row in rows:
        if row["part"] in _TOKENS and row["skipped"] is None:
            model = f"{row.get('model', RWKV7).replace('RWKV', 'RWKV-')} {row['layers']} x {row['width']}"
            busy = {"busy": row["kernel_ms"] / row["median_ms"]} if row.get("kernel_ms") is not None else {}
            lines.append((
                model, _TOKENS[row["part"]].format(**row), row["by"], row["parameters"],
                milliseconds(row["median_ms"]), _cell(row, "host_ms", milliseconds), _cell(busy, "busy", percent),
                f"{row['tokens_per_s']:,.0f}", *(_cell(row, use, percent) for use in uses.values()),
                _cell(row, "peak_mib", lambda mib: f"{mib / 1024:.0f}"), f"{gpu_of(row)}, {row['commit'][:10]}",
            ))  # fmt: skip
    return _table_of(head, lines)


def _cell(row: Row, name: str, form: Callable[[float], str]) -> str:
    value = row.get(name)
    return "" if value is None else form(value)


def _service(costs: Mapping[str, Any] | None) -> str:
    """Return a table of what the service costs, beside what others take for the same, and where it was measured."""
    if costs is None:
        return "Not measured: `python -m bench service --record` does it.\n"
    where = f"{machine(costs)}, commit {str(costs['commit'])[:10]}"
    return f"{where}.\n\n{_table_of(('', 'of', 'measured'), costs_of_service(costs))}"


def costs_of_service(costs: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what costs how much, whose it is, and the figures; without a GPU there are no calls."""
    together = costs["together"]
    one_line = {f"one line, {name}": times for name, times in (costs["one_line"] or {}).items()}
    calls = ({"wkv7, forward and backward": costs["first_call"]} if costs["first_call"] else {}) | one_line
    host_us = {**(costs["host_us"] or {}), **{name: times["call_us"] for name, times in calls.items()}}
    from_disk = {
        name: [milliseconds(us / 1e3) for us in (times[0], statistics.median(times[1:]))]
        for name, times in {"rwkv_jit": costs["from_disk_us"], **costs["peers_from_disk_us"]}.items()
    }
    return [
        *[("host time of a call", name, f"{us:.1f} us") for name, us in host_us.items()],
        *[
            ("a kernel from disk in a new process, the first, each other", name, f"{first}, {others} ms")
            for name, (first, others) in from_disk.items()
        ],
        *[
            (
                "first call in a new process, nothing compiled, from disk", name,
                f"{milliseconds(times['compiled_ms'])}, {milliseconds(times['from_disk_ms'])} ms",
            )
            for name, times in calls.items()
        ],
        (
            f"{together['processes']} processes want a kernel that is nowhere", f"{together['compiled']} compiled",
            f"the slowest has it after {together['slowest_s']:.2f} s, a process alone {together['alone_s']:.2f} s",
        ),
        ("import", "rwkv_jit, after torch", f"{costs['import_ms']:.1f} ms"),
        ("import", "its first op", f"{costs['op_import_ms']:.1f} ms"),
    ]  # fmt: skip


def _table_of(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, or that there is nothing."""
    table = [head, ("---",) * len(head), *lines]
    whole = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in table)
    return whole if len(table) > 2 else _NOTHING


def _errors(rows: Sequence[Row]) -> str:
    """Return a table of the errors of each result, of every call of ours that has gradients."""
    lines = []
    for row in rows:
        if row["who"] == OURS and row["phase"] in WITH_GRADIENTS and row["errors"]:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
            other = "" if row["other"] is None else f"{row['other_error']:.1e} from {row['other']}"
            call = f"{row['op']} {shape_of(row)} {row['dtype']}"
            lines.append((call, contestant(row), row["phase"], errors, other))
    return _table_of(("call", "by", "phase", "against float64, first tokens", "all tokens, largest"), lines)


# What tables show at the end of a line: the largest number of its rows, and the form of it.
Judged = Mapping[str, tuple[Callable[[Row], float | None], str]]
_OF_PASSES: Judged = {
    "error": (lambda row: row["error"], "{:.1e}"), "memory MiB": (lambda row: row["peak_mib"], "{:.0f}"),
}  # fmt: skip
_OF_POOLS: Judged = {
    "calls us": (lambda row: row.get("calls_us"), "{:.1f}"),
    "error of y": (lambda row: row["errors"].get("y"), "{:.1e}"),
    "of the states": (lambda row: row["errors"].get("state"), "{:.1e}"),
}


def _table(rows: list[Row], name: str, call: Callable[[Row], str], judged: Judged) -> str:
    """Return a table with a line for each call and contestant, and a column for each phase."""
    first, lines = our_rows(rows), dict[Case, dict[str, Row]]()
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    for row in rows:
        by = gpu_of(row), row["suite"], call(row), row["dtype"], contestant(row)
        lines.setdefault(by, {})[row["phase"]] = row
    times = [f"{phase.replace('+', ' + ')} ms" for phase in phases]
    table = []
    for (gpu, _, *written), by_phase in lines.items():
        done = [by_phase[phase] for phase in phases if phase in by_phase]
        others = [row for row in done if row["median_ms"] is not None and row["who"] != OURS and case_of(row) in first]
        faster = ", ".join(Speedup(first[case_of(row)], row).written for row in others)
        cells = [gpu, *written, *(_time(by_phase.get(phase)) for phase in phases), faster, _hosts(done)]
        for number, form in judged.values():
            known = [x for x in map(number, done) if x is not None]
            cells.append(form.format(max(known)) if known else "")
        table.append(cells)
    head = ["GPU", name, "dtype", "by", *times, "rwkv_jit is faster", "host us", *judged]
    return _table_of(head, table) + _left_out(rows)


def _left_out(rows: Iterable[Row]) -> str:
    """Return a list of what was not measured, and why; nothing where all was."""
    left_out: dict[str, dict[str, None]] = {}  # by what was in the way
    for row in rows:
        if row["median_ms"] is None:
            case = f"{contestant(row)} {shape_of(row)} {row['dtype']} {row['phase']}"
            left_out.setdefault(obstacle(row), {})[case] = None
    items = "".join(f"- {why}: {'; '.join(cases)}\n" for why, cases in left_out.items())
    return f"\nLeft out:\n\n{items}" if items else ""


def _hosts(rows: Iterable[Row | None]) -> str:
    """Return the host's times, as far as they are known, with a mark where the host takes longer than the GPU."""
    known = [row for row in rows if row is not None and row["host_us"] is not None]
    longer = [row["median_ms"] and row["host_us"] > 1e3 * row["median_ms"] for row in known]
    marks = (f" {HOST_BOUND}" if is_longer else "" for is_longer in longer)
    return ", ".join(f"{row['host_us']:.1f}{mark}" for row, mark in zip(known, marks, strict=True))


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if row["median_ms"] is None:
        return "left out"
    text = milliseconds(row["median_ms"])
    if row["low_ms"] is not None and row["high_ms"] is not None:
        text += f" ({milliseconds(row['low_ms'])} to {milliseconds(row['high_ms'])})"
    return text if row["fraction"] is None else f"{text} {percent(row['fraction'])}"
