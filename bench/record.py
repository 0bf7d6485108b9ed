"""The recorded result: its file, the pages that show something of it, and how two results differ."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import ROOT, plot
from bench.tables import PICTURE, Row, blocks, contestant, milliseconds, shape_of
from rwkv_jit import report, template
from rwkv_jit.bench.cases import OPS
from rwkv_jit.ops import table

FORMAT = 2
FILE = ROOT / "bench.json"
PAGES = ("README.md", "docs/speed.md")  # those that show something of it
_WRITTEN = ("bench.json", *PAGES, PICTURE)
_OPENING = re.compile(r"<!-- bench:(\w+) -->")
_BLOCK = re.compile(r"<!-- bench:(\w+) -->\n((?:(?!<!-- bench:).)*?)<!-- /bench -->", re.DOTALL)
_KEY = ("suite", "op", "shape", "dtype", "phase", "inputs", "who", "what")
# Quartiles are those of one machine: medians of the same kernels were up to so far apart on another H200, 71 of 72.
_BETWEEN_RUNS = 1.02
_VERSIONS = ("gpus", "torch", "torch_cuda", "cupy", "nvrtc", "rwkv_jit", "python")

# ---- the file ----------------------------------------------------------------------------------------------------


def result_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured with its format, the checkout's commit, and a digest of each op's templates."""
    return {"format": FORMAT, "commit": commit(), "sources": sources(), **measured}


def commit() -> str | None:
    """Return the commit of the checkout, with a + where files differ from it; None where git does not know.

    What recording writes is no difference: a record may be made in parts.
    """
    status = ("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in _WRITTEN))
    try:
        head, changes = (
            subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), status)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changes else head


def sources() -> dict[str, str]:
    """Return the sha256 of the templates, with their headers, that calls of each op can take."""
    digests = {}
    for op in sorted(OPS):
        stem = table.OPS[op].stem
        templates = [template.library(name) for name in template.names() if name.startswith(f"{stem}_")]
        texts = [text for source in templates for text in (source.name, source.body, *sum(source.headers, ()))]
        digests[op] = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return digests


def read(path: Path | str) -> dict[str, Any]:
    """Read a result from a file.

    Raises
    ------
    ValueError
        It is no result of `python -m bench ops --json`, or one of another format.
    OSError
        It cannot be read.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of the text's encoding too
        raise ValueError(f"{path}: expected JSON of `python -m bench ops --json` ({error})") from None
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise ValueError(f"{path}: expected a result of `python -m bench ops --json`, got JSON without its rows")
    if result.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a result of format {FORMAT}, got {result.get('format')!r}")
    _by_key(result)
    return result


def write(result: dict[str, Any]) -> None:
    """Write the result of a suite to bench.json, and what pages show of it.

    The file is written first, so that no fault of a page costs a measurement. What was recorded of the service stays,
    and so do rows of other suites where they were measured on the same kind of GPU with the same versions: a record may
    be made in parts. Rows of another commit say so.

    Raises
    ------
    ValueError
        Markers of a page do not fit.
    """
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # there is none, or none that can be read
        before = read(FILE)
    rows, names = list(result["rows"]), {row["suite"] for row in result["rows"]}
    if before and _measured_on(before) == _measured_on(result):
        rows = [_of_commit(row, before, result) for row in before["rows"] if row["suite"] not in names] + rows
    _keep({**result, "rows": rows, "service": before.get("service")})


def _measured_on(result: Mapping[str, Any]) -> list[Any]:
    return [result["device"], *(result["env"].get(name) for name in _VERSIONS)]


def _of_commit(row: Row, before: Mapping[str, Any], result: Mapping[str, Any]) -> Row:
    """Return a row of an earlier result, which names its commit where that is another one now."""
    commit = row.get("commit", before.get("commit"))
    own = {name: value for name, value in row.items() if name != "commit"}
    return own if commit == result.get("commit") else {**own, "commit": commit}


def write_service(costs: dict[str, Any]) -> None:
    """Write what the service costs to the record there is, and to the pages.

    Raises
    ------
    ValueError, OSError
        What is recorded cannot be read, or there is none.
    """
    _keep({**read(FILE), "service": costs})


def _keep(result: dict[str, Any]) -> None:
    _write(FILE, json.dumps(result, indent=1, default=str) + "\n")
    fill_pages(read(FILE))  # as the test will see it


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# ---- the pages ---------------------------------------------------------------------------------------------------


def fill_pages(result: Mapping[str, Any]) -> list[Path]:
    """Write what pages show of a result between their markers, and the picture; return the files."""
    recorded, folder = blocks(result), FILE.parent
    pages = [folder / page for page in PAGES if (folder / page).is_file()]
    filled = {page: fill(page.read_text(encoding="utf-8"), recorded, page.name) for page in pages}
    for page, text in filled.items():
        _write(page, text)
    return [*filled, plot.draw_speedups(result, folder)]


def fill(text: str, recorded: Mapping[str, str], page: str) -> str:
    """Return a page's text with what is between its markers replaced.

    Raises
    ------
    ValueError
        A marker is not closed, or names what there is not.
    """
    closed = {match[1] for match in _BLOCK.finditer(text)}
    for name in _OPENING.findall(text):
        if name not in closed:
            raise ValueError(f"{page}: expected <!-- /bench --> behind <!-- bench:{name} --> and its line, got none")
        if name not in recorded:
            raise ValueError(f"{page}: expected bench:{' or bench:'.join(recorded)}, got bench:{name}")
    return _BLOCK.sub(lambda match: f"<!-- bench:{match[1]} -->\n{recorded[match[1]]}<!-- /bench -->", text)


# ---- two results -------------------------------------------------------------------------------------------------


def _by_key(result: Mapping[str, Any]) -> dict[tuple[object, ...], Row]:
    rows: dict[tuple[object, ...], Row] = {}
    for row in result["rows"]:
        key = (*(tuple(row[name]) if name == "shape" else row[name] for name in _KEY[:-2]), contestant(row))
        if key in rows:
            raise ValueError(f"rows: expected each once, got two of {_name(row)}")
        rows[key] = row
    return rows


def _name(row: Row) -> str:
    suite = "" if row["suite"] is None else f"{row['suite']}: "
    return f"{suite}{row['op']} {shape_of(row)} {row['dtype']} {row['phase']}, {contestant(row)}"


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Compare two results, row by row.

    Parameters
    ----------
    a, b : dict
        As `python -m bench ops --json` prints them, the earlier one first.

    Returns
    -------
    dict
        rows : one dict per row that both have, with what names it; a_ms and b_ms, the medians; ratio, b_ms / a_ms;
        verdict on b: "faster" or "slower" where the quartiles of the two do not overlap and the medians differ by more
        than 2%, as far as those of the same kernels do from one machine to another; "the same" where not, "unknown"
        where a time or a quartile is missing. only_a, only_b : names of rows that one of the two has. differs : what
        else is not equal, with what, a and b: device, GPUs, versions, commit, copy bandwidth, sources of ops.
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
    conditions = {name: (a.get(name), b.get(name)) for name in ("device", "commit", "copy_tb_per_s")}
    conditions |= {name: (a["env"].get(name), b["env"].get(name)) for name in _VERSIONS}
    sources_a, sources_b = a.get("sources") or {}, b.get("sources") or {}
    return conditions | {
        f"sources of {op}": (sources_a.get(op), sources_b.get(op)) for op in {**sources_a, **sources_b}
    }


def show_comparison(result: dict[str, Any]) -> None:
    """Print a comparison."""
    for condition in result["differs"]:
        what, before, now = condition["what"].replace("_", " "), _brief(condition["a"]), _brief(condition["b"])
        report.say(f"{what}: {before} before, {now} now")
    if result["rows"]:
        report.table(
            ("case", "by", "before ms", "now ms", "now / before", "verdict"),
            [
                (
                    f"{row['op']} {shape_of(row)} {row['dtype']} {row['phase']}", contestant(row),
                    *("-" if row[name] is None else milliseconds(row[name]) for name in ("a_ms", "b_ms")),
                    "-" if row["ratio"] is None else f"{row['ratio']:.3f}", row["verdict"],
                )
                for row in result["rows"]
            ],
        )  # fmt: skip
    for title, names in (("Only before", result["only_a"]), ("Only now", result["only_b"])):
        for name in names:
            report.say(f"{title}: {name}")
    verdicts = [row["verdict"] for row in result["rows"]]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("faster", "slower", "the same", "unknown")]
    apart = f"medians over {_BETWEEN_RUNS - 1:.0%} apart"
    report.say(f"\n{', '.join(counts)}. Faster and slower: no overlap of quartiles, and {apart}.")


def _brief(value: object) -> str:
    """Return a value for a line; of a digest or a commit its beginning."""
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    text = "unknown" if value is None else str(value)
    return text[:10] if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else text
