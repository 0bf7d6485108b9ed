"""The program `python -m bench`, run from the root of a checkout: its arguments, and what each command does."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import (
    cases,
    curves,
    decode,
    host,
    layers,
    measure,
    plot,
    processes,
    record,
    service,
    suites,
    training,
)
from bench.cases import Case
from rwkv_jit.desk import bench, cli
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.errors import RwkvJitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 where it could not do its work, or as in a shell 130 after an interrupt."""
    try:
        parsed = _parser().parse_args(arguments)
        stats.configure_logging()
        result = parsed.run(parsed)
    except (RwkvJitError, ValueError, OSError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if parsed.json:
        print(json.dumps(result, indent=2, default=str))
    else:
        parsed.show(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    text = "Measure the ops and other libraries, training, and the cost of the service."
    parser = argparse.ArgumentParser(prog="python -m bench", description=text)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, summary: str, run: Any, show: Any, add_options: Any = None) -> None:
        command = commands.add_parser(name, help=summary, description=f"{summary}.")
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.set_defaults(run=run, show=show)
        if add_options is not None:
            add_options(command)

    show = partial(bench.show, columns=measure.SHOWN, methods=measure.METHODS)
    add("ops", "measure the ops, torch, and FLA, Wind and others if they are installed", _ops, show, _add_options)
    for module, name, summary in (
        (layers, "layers", "measure the small operations of a layer and the loss, beside torch"),
        (host, "host", "measure known calls, eager and compiled: the host's time and the GPU's"),
        (service, "service", "measure the cost of the service: imports, first calls, host time of a call"),
        (training, "training", "measure how fast models of RWKV-7 train, and their time mixing, with FLA's"),
        (decode, "decode", "measure how fast models of RWKV-5, 6 and 7 decode tokens and read prompts"),
        (curves, "curves", "compare the loss curves of RWKV-7 and FLA's RWKV-7 from the same parameters"),
    ):
        add(name, summary, module.run, module.show, module.add_options)
    text = "show what differs between two results of --json or --record"
    add("compare", text, lambda parsed: record.compare(*map(record.read, parsed.files)), record.show_comparison)
    commands.choices["compare"].add_argument("files", nargs=2, metavar="FILE", help="the earlier one first")
    text = "fill the pages from bench.json again, and draw their picture"
    add(
        "pages",
        text,
        lambda _: {"written": list(map(str, record.fill_pages()))},
        lambda result: print(*result["written"]),
    )
    text = "list the rows of bench.json that were measured with other sources"
    add("stale", text, lambda _: record.stale(record.read(record.FILE)), record.show_stale)
    return parser


# ---- ops ---------------------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Give `ops` its options."""
    cli.add_cases(parser)
    text = "decays that are out of range in a chunk, in all heads or in one; packed sequences; states of updates"
    parser.add_argument("--inputs", choices=cases.KINDS, help=f"{text} (default: usual)")
    text = "the tables of published studies and more, or one of them (may be repeated)"
    parser.add_argument("--suite", action="append", choices=suites.SUITES, help=text)
    parser.add_argument("--no-peers", action="store_true", help="do not measure other libraries")
    text = "leave out libraries that take longer to compile and tune (default: wait for all)"
    parser.add_argument("--peer-minutes", type=float, metavar="N", help=text)
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows, e.g. out.png")
    parser.add_argument("--record", action="store_true", help="keep the rows of each case in bench.json as it ends")


def _ops(parsed: argparse.Namespace) -> dict[str, Any]:
    _check_outputs(parsed)
    result = _on_gpu(parsed) if torch.cuda.is_available() else _on_cpu(parsed)
    if parsed.csv is not None:
        _write_csv(result, parsed.csv)
    if parsed.plot is not None:
        plot.draw(result, parsed.plot)
    return result


def _on_cpu(parsed: argparse.Namespace) -> dict[str, Any]:
    for name in ("suite", "inputs"):
        if getattr(parsed, name) is not None:
            raise ValueError(f"--{name}: its shapes are for a GPU, and torch sees none; expected --shape")
    measured = bench.run(parsed)
    about = dict.fromkeys(measure.COLUMNS) | {"inputs": "usual", "in_graph": False}
    return record.result_of(measured | {"rows": [about | row for row in measured["rows"]]})


def _on_gpu(parsed: argparse.Namespace) -> dict[str, Any]:
    entries = _entries(parsed)
    bench.check_gpu()
    copy = cases.copy_tb_per_s()
    torch.cuda.empty_cache()  # cases are measured by a process of its own, which needs the memory
    about = {"env": bench.environment(), "copy_tb_per_s": copy, "device": "cuda"}
    known = {} if parsed.no_peers else processes.obstacles(entries, parsed.peer_minutes)

    def rows_of(entry: measure.Entry) -> list[dict[str, Any]]:
        rows = processes.rows_of(helper, entry, copy, not parsed.no_peers, known)
        if parsed.record:  # as each case ends: what comes after it may end everything
            record.write(record.result_of({**about, "rows": rows}))
        return rows

    with processes.helping() as helper:
        return record.result_of({**about, "rows": bench.measured(entries, rows_of, measure.row)})


def _entries(parsed: argparse.Namespace) -> list[measure.Entry]:
    """Return what is measured: of suites, or of a command line, without the ops that cannot where it names none."""
    if parsed.suite is not None:
        for name in ("shape", "dtype", "backend", "phase", "inputs"):
            if (given := getattr(parsed, name)) is not None:
                raise ValueError(f"--{name}: a suite has its own, got {given} beside --suite {' '.join(parsed.suite)}")
        return suites.entries_of(parsed.suite, parsed.op)
    found, refused = dict[Case, None](), None
    kind, backends = parsed.inputs or "usual", parsed.backend and [parsed.backend]
    for op, (batch, tokens, *sizes), dtype, phase in bench.cases_of(parsed, "cuda"):
        is_one_row = kind == "packed" and parsed.shape is None
        shape = (1, batch * tokens, *sizes) if is_one_row else (batch, tokens, *sizes)
        try:
            found[Case(op, shape, dtype, phase, kind=kind).check()] = None
        except ValueError as error:
            refused = error
            if parsed.op:
                raise
    if not found and refused is not None:
        raise refused
    return [measure.Entry(None, case, backends) for case in found]


def _check_outputs(parsed: argparse.Namespace) -> None:
    """Check what would fail after minutes of measuring."""
    if parsed.peer_minutes is not None and not 0 < parsed.peer_minutes < 1e6:
        raise ValueError(f"--peer-minutes: expected a number above 0, got {parsed.peer_minutes:g}")
    for name in ("csv", "plot"):
        path = getattr(parsed, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name}: expected a file in a folder that exists, got {path}")
    if parsed.plot is not None:
        plot.check(parsed.plot)
    if parsed.record and parsed.suite is None:
        raise ValueError("--record: keeps what suites have; expected --suite")
    if parsed.record and not torch.cuda.is_available():
        raise ValueError("--record: keeps what was measured on a GPU, and there is none")


def _write_csv(result: dict[str, Any], path: str) -> None:
    """Write the rows, with sizes separated by x and a column for each error; empty where there is no figure."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["errors"]))
    columns = [name for name in measure.COLUMNS if name != "errors"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *(f"error of {name}" for name in names)], extrasaction="ignore")
        writer.writeheader()
        for row in result["rows"]:
            errors = {f"error of {name}": error for name, error in row["errors"].items()}
            writer.writerow({**row, **errors, "shape": "x".join(map(str, row["shape"]))})


if __name__ == "__main__":
    sys.exit(main())
