"""What a measurement is kept as: one dict, a table, CSV; and what it was measured with."""

from __future__ import annotations

import csv
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rwkv_jit import report, runtime, template
from rwkv_jit.bench import words
from rwkv_jit.bench.cases import OPS
from rwkv_jit.ops import recurrent

FORMAT = 1
COLUMNS = (
    "suite", "op", "shape", "dtype", "phase", "who", "what", "median_ms", "low_ms", "high_ms", "runs", "in_graph",
    "host_us", "floor_ms", "fraction", "peak_mib", "error", "skipped",
)  # fmt: skip
_OF_THE_MACHINE = ("nvrtc_libraries", "cache", "environment")  # paths
CPU_NOTE = "CPU reference; not the speed of the kernels."
METHODS = (
    "Median and quartiles of the GPU's time by CUDA events, after a warm-up, in rounds over everyone of a case; small "
    "calls in a CUDA graph, the others queued while the GPU waits. Inputs are like a model's, and come round when they "
    "have left the L2 cache. Clocks as found. Floor: the fewest bytes of a call at the bandwidth of a copy in the same "
    "run. Host: until a call has returned, in the fastest row of calls. Peak: memory of one call, of a backward "
    "with its forward, and the inputs. Error: relative L2 against float64, the largest of y and, with a backward, the "
    "gradients, over at most 300 tokens of a row. Peers get the inputs as they want them, made before; they tuned "
    "themselves in processes of their own, which timed their kernels one at a time."
)


def collect(rows: Sequence[dict[str, Any]], copy_tb_per_s: float | None, device: str) -> dict[str, Any]:
    """Return a whole result.

    Parameters
    ----------
    rows : sequence of dict
        What was measured.
    copy_tb_per_s : float or None
        The bandwidth of a copy in the same run.
    device : {"cuda", "cpu"}
        Where.

    Returns
    -------
    dict
        format, env, commit (of a checkout, or None), sources (a digest of each op's templates), copy_tb_per_s, device
        and rows.
    """
    return {
        "format": FORMAT,
        "env": environment(),
        "commit": commit(),
        "sources": sources(),
        "copy_tb_per_s": copy_tb_per_s,
        "device": device,
        "rows": list(rows),
    }


def environment() -> dict[str, Any]:
    """Return what of the environment says something about a time."""
    return {name: x for name, x in runtime.env_report().items() if name not in _OF_THE_MACHINE}


def checkout() -> Path | None:
    """Return the checkout that this is, or None where it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "kernel_templates").is_dir() else None


def commit() -> str | None:
    """Return the commit of the checkout, with a + where files differ from it; None where git does not know."""
    root = checkout()
    if root is None:
        return None
    try:
        head, changes = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changes else head


def sources() -> dict[str, str]:
    """Return the sha256 of the templates, with their headers, that calls of each op can take."""
    found = {}
    for op in sorted(OPS):
        stem = recurrent.OPS[op].stem if op in recurrent.OPS else op
        names = [n for n in template.names() if n.startswith(f"{stem}_") and not n.endswith("_history")]
        texts = [text for name in names for text in _texts(template.library(name))]
        found[op] = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return found


def _texts(each: template.Template) -> list[str]:
    return [each.name, each.body, *(text for header in each.headers for text in header)]


# ---- files -------------------------------------------------------------------------------------------------------


def write_csv(result: dict[str, Any], path: str | Path) -> None:
    """Write the rows, with sizes separated by x; empty where there is no figure."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in result["rows"]:
            writer.writerow({**row, "shape": "x".join(map(str, row["shape"]))})


# ---- printing ----------------------------------------------------------------------------------------------------


def machine(env: dict[str, Any]) -> str:
    """Return what a measurement was taken on, from the environment report."""
    return f"{env['gpus'][0]}, torch {env['torch']}, NVRTC {env['nvrtc'].split()[0]}"


def show(result: dict[str, Any]) -> None:
    """Print a table for each op, shape, dtype and phase."""
    if result["device"] == "cpu":
        report.say(f"{CPU_NOTE} There is no GPU; without --shape each op runs on a small one.")
    else:
        report.say(f"{machine(result['env'])}; a copy moves {result['copy_tb_per_s']:.2f} TB/s")
    tables: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        tables.setdefault((row["op"], tuple(row["shape"]), row["dtype"], row["phase"]), []).append(row)
    for (op, shape, dtype, phase), rows in tables.items():
        floor = next((row["floor_ms"] for row in rows if row["floor_ms"] is not None), None)
        report.say(
            f"\n{op} ({', '.join(map(str, shape))}) {dtype}, {phase}"
            + ("" if floor is None else f"; floor {floor:.4f} ms")
        )
        measured = [row for row in rows if row["skipped"] is None]
        if measured:
            head = ("by", "ms", "quartiles", "of the floor", "in a graph", "host us", "peak MiB", "error")
            report.table(head, [_cells(row) for row in measured], ("in a graph", "quartiles", "of the floor"))
        for row in rows:
            if row["skipped"] is not None:
                report.say(f"  skipped: {words.contestant(row)}: {row['skipped']}")
    if result["device"] == "cpu":
        report.say(f"\n{CPU_NOTE}")
    else:
        report.say(f"\n{METHODS}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def text(name: str, form: str) -> str:
        return "-" if row[name] is None else format(row[name], form)

    return (
        words.contestant(row), f"{row['median_ms']:.4f}", f"{row['low_ms']:.4f} to {row['high_ms']:.4f}",
        text("fraction", ".0%"), "yes" if row["in_graph"] else "no", text("host_us", ".1f"), text("peak_mib", ".1f"),
        text("error", ".1e"),
    )  # fmt: skip
