"""The recorded result: its file, what the pages show of it, and how two results differ."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rwkv_jit import report
from rwkv_jit.bench import speedups, words
from rwkv_jit.bench.result import FORMAT, checkout
from rwkv_jit.bench.words import Row
from rwkv_jit.errors import RwkvJitError

NAME, PICTURE = "bench.json", "docs/speedups.svg"
PAGES = ("README.md", "docs/speed.md")  # those that show something of it
_PACKAGE = Path(__file__).resolve().parents[1]
_OPENING = re.compile(r"<!-- bench:(\w+) -->")
_BLOCK = re.compile(r"<!-- bench:(\w+) -->\n((?:(?!<!-- bench:).)*?)<!-- /bench -->", re.DOTALL)
_KEY = ("suite", "op", "shape", "dtype", "phase", "who", "what")
# Quartiles are those of one machine: medians of the same kernels were up to so far apart on another H200, 71 of 72.
_BETWEEN_RUNS = 1.02
_VERSIONS = ("gpus", "torch", "torch_cuda", "cupy", "nvrtc", "rwkv_jit", "python")

# ---- the file ----------------------------------------------------------------------------------------------------


def root() -> Path:
    """Return the checkout that the package runs from, where the record lies.

    Raises
    ------
    RwkvJitError
        The package is installed elsewhere.
    """
    folder = checkout()
    if folder is None:
        raise RwkvJitError(f"--record: expected rwkv_jit in a checkout, got one in {_PACKAGE.parent}")
    return folder


def read(path: Path | str) -> dict[str, Any]:
    """Read a result from a file.

    Raises
    ------
    ValueError
        It is no result of `rwkv-jit bench --json`, or one of another format.
    OSError
        It cannot be read.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of the text's encoding too
        raise ValueError(f"{path}: expected JSON of `rwkv-jit bench --json`, got something else ({error})") from None
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise ValueError(f"{path}: expected a result of `rwkv-jit bench --json`, got JSON without its rows")
    if result.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a result of format {FORMAT}, got {result.get('format')!r}")
    return result


def write(result: dict[str, Any]) -> Path:
    """Write a suite's result to the root of the checkout, and what pages show of it between their markers.

    The picture too, where a page has a `bench:picture`. The result itself is written first, so that no fault of a page
    costs a measurement. What was recorded of the service stays.

    Parameters
    ----------
    result : dict
        As `rwkv-jit bench --json` prints it.

    Returns
    -------
    Path
        The file that was written.

    Raises
    ------
    RwkvJitError
        The package does not run from a checkout.
    ValueError
        The result is not a GPU's, a row is there twice, or a page names a table that the result does not have or does
        not close it.
    OSError
        A file cannot be written.
    """
    folder = root()
    if result["device"] != "cuda":
        raise ValueError(f"--record: expected a result of a GPU, got one of {result['device']!r} ({words.CPU})")
    service = None
    with suppress(OSError, ValueError):  # there is none, or none that can be read
        service = read(folder / NAME).get("service")
    return _keep(folder, {**result, "service": service})


def write_service(costs: dict[str, Any]) -> Path:
    """Write what the service costs, as `rwkv-jit bench --latency --json` prints it on a GPU, to the record there is.

    The pages follow, as in `write`, and it raises the same.

    Raises
    ------
    ValueError
        What is recorded cannot be read.
    OSError
        Nothing is recorded.
    """
    folder = root()
    return _keep(folder, {**read(folder / NAME), "service": costs})


def _keep(folder: Path, result: dict[str, Any]) -> Path:
    path = folder / NAME
    _write(path, json.dumps(result, indent=1, default=str) + "\n")
    result = read(path)  # as the test will see it
    recorded = blocks(result)
    filled = {page: fill(text, recorded, page) for page, text in _pages(folder).items()}
    for page, text in filled.items():
        _write(folder / page, text)
    if any("picture" in _shown(text, page) for page, text in filled.items()):
        _write(folder / PICTURE, speedups.picture(result))
    return path


def _pages(folder: Path) -> dict[str, str]:
    """Return the texts of the pages that a checkout has."""
    return {page: (folder / page).read_text(encoding="utf-8") for page in PAGES if (folder / page).is_file()}


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# ---- the pages ---------------------------------------------------------------------------------------------------


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of a result, by the names of their markers.

    Parameters
    ----------
    result : dict
        As `rwkv-jit bench --json` prints it.

    Returns
    -------
    dict
        machine : what it was measured on, and how its tables read; picture : the picture's line; speedups : a table of
        how many times faster than the best peer; service : a table of what the service costs; and a table for each op,
        by its name.

    Raises
    ------
    ValueError
        A row is there twice.
    """
    _by_key(result)
    floor = "" if result["copy_tb_per_s"] is None else (
        " A percentage is the floor over the median: the time that a copy, measured in the same run, takes for the "
        "fewest bytes of the case."
    )  # fmt: skip
    found = {
        "machine": f"{words.machine(result)}. Medians, with quartiles behind them, of one run in which contestants "
        f"take turns.{floor} Host is the host's part of a call, the smallest of a line; error is relative L2 against "
        "float64, and memory the peak, each the largest of a line.\n",
        "picture": f"![{speedups.sentence(result['rows'])}]({PICTURE})\n",
        "speedups": _lines(speedups.lines(result["rows"])),
    }
    found["service"] = _service(result.get("service"))
    for op in dict.fromkeys(row["op"] for row in result["rows"]):
        found[op] = _table([row for row in result["rows"] if row["op"] == op])
    return found


def _service(costs: Mapping[str, Any] | None) -> str:
    """Return a table of what the service costs, beside what others take for the same, and where it was measured."""
    if costs is None:
        return "Not measured: `rwkv-jit bench --latency --record` does it.\n"
    together = costs["together"]
    one_line = {f"one line, {name}": times for name, times in costs["one_line"].items()}
    calls = {"wkv7, forward and backward": costs["first_call"], **one_line}
    lines = [
        *[("host time of a call", name, f"{us:.1f} us") for name, us in costs["host_us"].items()],
        *[("host time of a call", name, f"{times['call_us']:.1f} us") for name, times in calls.items()],
        *[
            ("a kernel from disk in a new process, the first, each other", name, _first_and_others(times))
            for name, times in {"rwkv_jit": costs["from_disk_us"], **costs["peers_from_disk_us"]}.items()
        ],
        *[
            ("first call in a new process, nothing compiled, from disk", name, _first_call(times))
            for name, times in calls.items()
        ],
        (
            f"{together['processes']} processes want a kernel that is nowhere", f"{together['compiled']} compiled",
            f"the slowest has it after {together['slowest_s']:.2f} s, a process alone {together['alone_s']:.2f} s",
        ),
        ("import", "rwkv_jit, after torch", f"{costs['import_ms']:.1f} ms"),
        ("import", "its first op", f"{costs['op_import_ms']:.1f} ms"),
    ]  # fmt: skip
    machine = words.machine({**costs, "device": "cuda"})
    return f"{machine}.\n\n{_lines([('', 'of', 'measured'), ('---',) * 3, *lines])}"


def _first_and_others(times_us: Sequence[float]) -> str:
    first, others = times_us[0] / 1e3, statistics.median(times_us[1:]) / 1e3
    return f"{words.milliseconds(first)}, {words.milliseconds(others)} ms"


def _first_call(times: Mapping[str, float]) -> str:
    return f"{words.milliseconds(times['compiled_ms'])}, {words.milliseconds(times['from_disk_ms'])} ms"


def _lines(table: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in table)


def _table(rows: list[Row]) -> str:
    """Return a table with a line for each shape and contestant, and a column for each phase."""
    of_ours = speedups.ours(rows)
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    lines: dict[tuple[str | None, str, str, str], dict[str, Row]] = {}
    for row in rows:
        line = (row["suite"], words.shape(row), row["dtype"], words.contestant(row))
        lines.setdefault(line, {})[row["phase"]] = row
    times = [f"{phase.replace('+', ' + ')} ms" for phase in phases]
    head = ["shape", "dtype", "by", *times, "rwkv_jit is faster", "host us", "error", "memory MiB"]
    table = [head, ["---"] * len(head)]
    for (_, shape, dtype, contestant), found in lines.items():
        times = [_time(found.get(phase)) for phase in phases]
        factors = [speedups.times(found[phase], of_ours) for phase in phases if phase in found]
        faster = ", ".join(speedups.written(factor) for factor in factors if factor is not None)
        host = _of_line(found.values(), "host_us", min, lambda value: f"{value:.1f}")
        error = _of_line(found.values(), "error", max, lambda value: f"{value:.1e}")
        memory = _of_line(found.values(), "peak_mib", max, lambda value: f"{value:.0f}")
        table.append([shape, dtype, contestant, *times, faster, host, error, memory])
    text = _lines(table)
    left_out: dict[str, dict[str, None]] = {}  # by what was in the way
    for row in rows:
        if row["median_ms"] is None:
            case = f"{words.contestant(row)} {words.shape(row)} {row['dtype']} {row['phase']}"
            left_out.setdefault(words.obstacle(row), {})[case] = None
    if left_out:
        text += "\nLeft out:\n\n" + "".join(f"- {why}: {'; '.join(cases)}\n" for why, cases in left_out.items())
    return text


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if row["median_ms"] is None:
        return "left out"
    text = words.milliseconds(row["median_ms"])
    if row["low_ms"] is not None and row["high_ms"] is not None:
        text += f" ({words.milliseconds(row['low_ms'])} to {words.milliseconds(row['high_ms'])})"
    return text if row["fraction"] is None else f"{text} {words.percent(row['fraction'])}"


def _of_line(
    rows: Iterable[Row], name: str, choose: Callable[[list[float]], float], written: Callable[[float], str]
) -> str:
    known = [row[name] for row in rows if row[name] is not None]
    return written(choose(known)) if known else ""


def fill(text: str, blocks: Mapping[str, str], page: str) -> str:
    """Return a page's text with what is between its markers replaced.

    Raises
    ------
    ValueError
        A marker is not closed, or names what there is not.
    """
    for name in _shown(text, page):
        if name not in blocks:
            raise ValueError(f"{page}: expected bench:{' or bench:'.join(blocks)}, got bench:{name}")
    return _BLOCK.sub(lambda match: f"<!-- bench:{match[1]} -->\n{blocks[match[1]]}<!-- /bench -->", text)


def _shown(text: str, page: str) -> dict[str, str]:
    """Return what is between the markers of a page."""
    found = {match[1]: match[2] for match in _BLOCK.finditer(text)}
    for name in _OPENING.findall(text):
        if name not in found:
            raise ValueError(f"{page}: expected <!-- /bench --> behind <!-- bench:{name} --> and its line, got none")
    return found


def disagreements(folder: Path) -> list[str]:
    """Return in what a folder's pages and its record disagree; nothing where neither is there.

    Parameters
    ----------
    folder : Path
        The root of a checkout.

    Returns
    -------
    list of str
        A sentence for each.
    """
    shown = {(page, name): part for page, text in _pages(folder).items() for name, part in _shown(text, page).items()}
    if not (folder / NAME).is_file():
        return [f"{page} shows bench:{name}, and there is no {NAME}" for page, name in shown]
    result = read(folder / NAME)
    recorded = blocks(result)
    if not shown:
        return [
            f"{' and '.join(PAGES)} show nothing of {NAME}: no <!-- bench:{' --> or <!-- bench:'.join(recorded)} -->"
        ]
    found = [
        f"bench:{name} of {page} is not that of {NAME}" for (page, name), part in shown.items()
        if part != recorded.get(name)
    ]  # fmt: skip
    shows_picture = any(name == "picture" for _, name in shown)
    picture, drawn = folder / PICTURE, speedups.picture(result)
    if shows_picture and not (picture.is_file() and picture.read_text(encoding="utf-8") == drawn):
        found.append(f"{PICTURE} is not that of {NAME}")
    return found


# ---- two results -------------------------------------------------------------------------------------------------


def _by_key(result: Mapping[str, Any]) -> dict[tuple[object, ...], Row]:
    found: dict[tuple[object, ...], Row] = {}
    for row in result["rows"]:
        key = tuple(tuple(row[name]) if name == "shape" else row[name] for name in _KEY)
        if key in found:
            raise ValueError(f"rows: expected each once, got two of {_name(row)}")
        found[key] = row
    return found


def _name(row: Row) -> str:
    suite = "" if row["suite"] is None else f"{row['suite']}: "
    return f"{suite}{row['op']} {words.shape(row)} {row['dtype']} {row['phase']}, {words.contestant(row)}"


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Compare two results, row by row.

    Parameters
    ----------
    a, b : dict
        As `rwkv-jit bench --json` prints them, the earlier one first.

    Returns
    -------
    dict
        rows : one dict per row that both have, with suite, op, shape, dtype, phase, who, what; a_ms and b_ms, the
        medians; ratio, b_ms / a_ms; verdict on b: "faster" or "slower" where the quartiles of the two do not overlap
        and the medians differ by more than 2%, as far as those of the same kernels do from one machine to another; "the
        same" where not, "unknown" where a time or a quartile is missing. only_a, only_b : names of rows that
        one of the two has. differs : what else is not equal, with what, a and b: device, GPUs, versions, commit, copy
        bandwidth, sources of ops.

    Raises
    ------
    ValueError
        A row is there twice in one of them.
    """
    rows_a, rows_b = _by_key(a), _by_key(b)
    return {
        "rows": [_compare_rows(rows_a[key], rows_b[key]) for key in rows_a if key in rows_b],
        "only_a": [_name(row) for key, row in rows_a.items() if key not in rows_b],
        "only_b": [_name(row) for key, row in rows_b.items() if key not in rows_a],
        "differs": [
            {"what": what, "a": in_a, "b": in_b}
            for what, (in_a, in_b) in _conditions(a, b).items()
            if in_a != in_b
        ],
    }  # fmt: skip


def _compare_rows(a: Row, b: Row) -> dict[str, Any]:
    a_ms, b_ms = a["median_ms"], b["median_ms"]
    if any(row[name] is None for row in (a, b) for name in ("median_ms", "low_ms", "high_ms")):
        verdict = "unknown"
    elif b["high_ms"] < a["low_ms"] and b_ms * _BETWEEN_RUNS < a_ms:
        verdict = "faster"
    else:
        verdict = "slower" if b["low_ms"] > a["high_ms"] and b_ms > a_ms * _BETWEEN_RUNS else "the same"
    ratio = b_ms / a_ms if a_ms and b_ms is not None else None
    return {**{name: a[name] for name in _KEY}, "a_ms": a_ms, "b_ms": b_ms, "ratio": ratio, "verdict": verdict}


def _conditions(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    found = {name: (a.get(name), b.get(name)) for name in ("device", "commit", "copy_tb_per_s")}
    found |= {name: (a["env"].get(name), b["env"].get(name)) for name in _VERSIONS}
    sources_a, sources_b = a.get("sources") or {}, b.get("sources") or {}
    return found | {f"sources of {op}": (sources_a.get(op), sources_b.get(op)) for op in {**sources_a, **sources_b}}


def show_comparison(result: dict[str, Any]) -> None:
    """Print a comparison."""
    for each in result["differs"]:
        report.say(f"{each['what'].replace('_', ' ')}: {_brief(each['a'])} before, {_brief(each['b'])} now")
    if result["differs"]:
        print()
    if result["rows"]:
        report.table(
            ("case", "by", "before ms", "now ms", "now / before", "verdict"),
            [
                (
                    f"{row['op']} {words.shape(row)} {row['dtype']} {row['phase']}", words.contestant(row),
                    *("-" if row[name] is None else words.milliseconds(row[name]) for name in ("a_ms", "b_ms")),
                    "-" if row["ratio"] is None else f"{row['ratio']:.3f}", row["verdict"],
                )
                for row in result["rows"]
            ],
        )  # fmt: skip
    for title, names in (("Only before", result["only_a"]), ("Only now", result["only_b"])):
        for name in names:
            report.say(f"{title}: {name}")
    verdicts = [row["verdict"] for row in result["rows"]]
    counts = [f"{verdicts.count(each)} {each}" for each in ("faster", "slower", "the same", "unknown")]
    apart = f"medians over {_BETWEEN_RUNS - 1:.0%} apart"
    report.say(f"\n{', '.join(counts)}. Faster and slower: no overlap of quartiles, and {apart}.")


def _brief(value: object) -> str:
    """Return a value for a line; of a digest or a commit its beginning."""
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    text = "unknown" if value is None else str(value)
    return text[:10] if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else text
