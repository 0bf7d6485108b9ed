"""The recorded result: its file, the pages that show something of it, what is stale, and how two results differ."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bench import ROOT, plot
from bench.cases import DERIVED, POOLED
from bench.tables import PICTURE, RWKV7, Row, blocks, contestant, gpu_of, machine, milliseconds, shape_of
from rwkv_jit.desk import terminal

FORMAT = 3
FILE = ROOT / "bench.json"
PAGES = ("README.md", "docs/speed.md", "docs/guides/precision.md")  # those that show something of it
_WRITTEN = ("bench.json", *PAGES, PICTURE)
_OPENING = re.compile(r"<!-- bench:(\w+) -->")
_BLOCK = re.compile(r"<!-- bench:(\w+) -->\n((?:(?!<!-- bench:).)*?)<!-- /bench -->", re.DOTALL)
_PARTS = ("rows", "training", "decode")
_KEY = ("suite", "op", "shape", "dtype", "phase", "inputs", "who", "what")
_KEY_OF_MODEL = ("part", "model", "by", "ranks", "layers", "width", "batch", "tokens", "vocabulary")
# Quartiles are those of one machine: medians of the same kernels were up to so far apart on another H200, 71 of 72.
_BETWEEN_RUNS = 1.02
_VERSIONS = ("gpus", "torch", "torch_cuda", "cupy", "nvrtc", "rwkv_jit", "python")
_DIGESTS = ROOT / "tests" / "gpu" / "record.py"  # which says what results of an op go by

# ---- the file ----------------------------------------------------------------------------------------------------


def result_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured with its format and machine; every row names its machine, commit and sources."""
    name, copy = machine(measured), measured.get("copy_tb_per_s")
    origin = {"machine": name, "copy_tb_per_s": copy, "commit": commit()}
    rows = [{**row, **origin, "sources": sources_of(row)} for row in measured["rows"]]
    return {"format": FORMAT, **measured, "machines": {name: measured["env"]}, "rows": rows}


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


def sources_of(row: Row) -> str:
    """Return the digest of all that runs for a row: templates, and the modules between a call and the driver.

    Those of ops that are made of others are of layers too, those of whole models of nn, and calls over a pool of
    inference.
    """
    op = str(row.get("op", row.get("model", RWKV7).replace("RWKV", "wkv")))
    parts = {DERIVED.get(op, op)}
    if "op" not in row:
        parts.add("nn")
    elif op in DERIVED:
        parts.add("layers")
    if row.get("phase") in POOLED or row.get("part") == "token":
        parts.add("inference")
    return _digest(*sorted(parts))


@cache
def _digest(*parts: str) -> str:
    """Return one digest of those by which a record of the GPU tests goes stale; comments are not in them."""
    spec = importlib.util.spec_from_file_location("gpu_record", _DIGESTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return hashlib.sha256("\0".join(map(module.digest, parts)).encode()).hexdigest()


def read(path: Path | str) -> dict[str, Any]:
    """Read a result from a file.

    Raises ValueError where it is no result of `python -m bench ops --json`, or one of another format; OSError where it
    cannot be read.
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


def write(result: Mapping[str, Any], part: str = "rows") -> None:
    """Write rows of cases to bench.json, or those of "training" or "decode", and what pages show of them.

    The file is written first, so that no fault of a page costs a measurement. Rows of other cases stay as they are, and
    so do those of the same cases on another kind of GPU: a record may be made in parts.

    Raises ValueError where markers of a page do not fit.
    """
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # there is none, or none that can be read
        before = read(FILE)
    again = set(map(_case, result["rows"]))
    parts = {name: before.get(name, []) for name in _PARTS}
    parts[part] = [row for row in parts[part] if _case(row) not in again] + result["rows"]
    named = {row["machine"] for rows in parts.values() for row in rows}
    machines = {**before.get("machines", {}), **result["machines"]}
    machines = {name: env for name, env in machines.items() if name in named}
    keep({"format": FORMAT, "machines": machines, **parts, "service": before.get("service")})


def _case(row: Row) -> tuple[object, ...]:
    """Return what a row is measured on; who does it is another row."""
    names, row = _KEY[:-2] if "op" in row else _KEY_OF_MODEL, {"model": RWKV7, **row}
    return gpu_of(row), *(json.dumps(row.get(name)) for name in names)


def keep(result: dict[str, Any]) -> None:
    """Write a whole record, and what pages show of it."""
    _write(FILE, json.dumps(result, indent=1, default=str) + "\n")
    fill_pages()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# ---- what is stale -----------------------------------------------------------------------------------------------


def stale(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many rows there are of each suite, GPU and commit, and how many are of other sources than today's."""
    groups: dict[tuple[str, str, str | None], list[bool]] = {}
    for part, row in ((name, row) for name in _PARTS for row in result.get(name, ())):
        group = row.get("suite", part), gpu_of(row), row["commit"]
        groups.setdefault(group, []).append(row["sources"] != sources_of(row))
    names = ("suite", "gpu", "commit", "rows", "stale")
    return {"suites": [dict(zip(names, (*group, len(x), sum(x)), strict=True)) for group, x in groups.items()]}


def show_stale(result: dict[str, Any]) -> None:
    """Print what is stale, a line for each suite, GPU and commit."""
    columns = {"suite": "{suite}", "GPU": "{gpu}", "commit": "{commit}", "rows": "{rows}", "stale": "{stale}"}
    short = [each | {"commit": _brief(each["commit"]), "stale": each["stale"] or ""} for each in result["suites"]]
    terminal.records(columns, short)


# ---- the pages ---------------------------------------------------------------------------------------------------


def fill_pages() -> list[Path]:
    """Write what pages show of the record between their markers, and the picture; return the files."""
    result, folder = read(FILE), FILE.parent
    recorded = blocks(result)
    pages = [folder / page for page in PAGES if (folder / page).is_file()]
    filled = {page: fill(page.read_text(encoding="utf-8"), recorded, page.name) for page in pages}
    for page, text in filled.items():
        _write(page, text)
    return [*filled, plot.draw_speedups(result["rows"], folder)]


def fill(text: str, recorded: Mapping[str, str], page: str) -> str:
    """Return a page's text with what is between its markers replaced.

    Raises ValueError where a marker is not closed, or names what there is not.
    """
    closed = {match[1] for match in _BLOCK.finditer(text)}
    for name in _OPENING.findall(text):
        if name not in closed:
            raise ValueError(f"{page}: expected <!-- /bench --> behind <!-- bench:{name} --> and its line, got none")
        if name not in recorded:
            raise ValueError(f"{page}: expected bench:{' or bench:'.join(recorded)}, got bench:{name}")
    return _BLOCK.sub(lambda match: f"<!-- bench:{match[1]} -->\n{recorded[match[1]]}<!-- /bench -->", text)


# ---- two results -------------------------------------------------------------------------------------------------


def _by_key(result: Mapping[str, Any], with_gpu: bool = True) -> dict[tuple[object, ...], Row]:
    rows: dict[tuple[object, ...], Row] = {}
    for row in result["rows"]:
        names = (gpu_of(row), contestant(row)) if with_gpu else (contestant(row),)
        key = (*(tuple(row[name]) if name == "shape" else row[name] for name in _KEY[:-2]), *names)
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
        else is not equal, with what, a and b: GPUs, versions, commit, copy bandwidth, sources of ops.
    """
    with_gpu = bool(set(map(gpu_of, a["rows"])) & set(map(gpu_of, b["rows"])))  # else one is held against another
    rows_a, rows_b = _by_key(a, with_gpu), _by_key(b, with_gpu)
    ops = [op for op in dict.fromkeys(row["op"] for row in a["rows"]) if any(row["op"] == op for row in b["rows"])]
    in_a, in_b = _conditions(a, ops), _conditions(b, ops)
    return {
        "rows": [_compare_rows(rows_a[key], rows_b[key]) for key in rows_a if key in rows_b],
        "only_a": [_name(row) for key, row in rows_a.items() if key not in rows_b],
        "only_b": [_name(row) for key, row in rows_b.items() if key not in rows_a],
        "differs": [{"what": x, "a": in_a[x], "b": in_b[x]} for x in in_a if in_a[x] != in_b[x]],
    }


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


def _conditions(result: Mapping[str, Any], ops: Sequence[str]) -> dict[str, Any]:
    """Return commit, bandwidth, versions and sources of ops, lists where a result has several."""
    rows, machines = result["rows"], result["machines"].values()
    return {
        **{name: _one(row[name] for row in rows) for name in ("commit", "copy_tb_per_s")},
        **{name: _one(env.get(name) for env in machines) for name in _VERSIONS},
        **{f"sources of {op}": _one(row["sources"] for row in rows if row["op"] == op) for op in ops},
    }


def _one(values: Iterable[Any]) -> Any:
    """Return the only one of some values, a list of several ones, and None where there is none."""
    different = [json.loads(text) for text in dict.fromkeys(map(json.dumps, values))]
    return different if len(different) > 1 else next(iter(different), None)


_COMPARED = {
    "case": "{op} {shape} {dtype} {phase}", "by": "{by}", "before ms": "{a_ms}", "now ms": "{b_ms}",
    "now / before": "{ratio:.3f}", "verdict": "{verdict}",
}  # fmt: skip


def show_comparison(result: dict[str, Any]) -> None:
    """Print a comparison."""
    for condition in result["differs"]:
        what, before, now = condition["what"].replace("_", " "), _brief(condition["a"]), _brief(condition["b"])
        terminal.say(f"{what}: {before} before, {now} now")
    if result["rows"]:
        terminal.records(_COMPARED, [
            row | {"shape": shape_of(row), "by": contestant(row)}
            | {name: None if row[name] is None else milliseconds(row[name]) for name in ("a_ms", "b_ms")}
            for row in result["rows"]
        ])  # fmt: skip
    for title, names in (("Only before", result["only_a"]), ("Only now", result["only_b"])):
        for name in names:
            terminal.say(f"{title}: {name}")
    verdicts = [row["verdict"] for row in result["rows"]]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("faster", "slower", "the same", "unknown")]
    apart = f"medians over {_BETWEEN_RUNS - 1:.0%} apart"
    terminal.say(f"\n{', '.join(counts)}. Faster and slower: no overlap of quartiles, and {apart}.")


def _brief(value: object) -> str:
    """Return a value for a line; of a digest or a commit its beginning."""
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    text = "unknown" if value is None else str(value)
    return text[:10] if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else text
