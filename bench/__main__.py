"""The program `python -m bench`, run from the root of a checkout: its arguments, and what each command does."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import cases, curves, layers, measure, plot, processes, record, service, suites, training, warm_fla
from bench.cases import Case
from rwkv_jit.desk import bench, cli
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.errors import RwkvJitError

Outcome = tuple[dict[str, Any], Callable[[dict[str, Any]], None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 where it could not do its work, or as in a shell 130 after an interrupt."""
    try:
        parsed = _parser().parse_args(arguments)
        stats.configure_logging()
        result, show = parsed.run(parsed)
    except (RwkvJitError, ValueError, OSError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if parsed.json:
        print(json.dumps(result, indent=2, default=str))
    else:
        show(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    text = "Measure the ops and other libraries, training, and the cost of the service."
    parser = argparse.ArgumentParser(prog="python -m bench", description=text)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], Outcome], summary: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=f"{summary}.")
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.set_defaults(run=run)
        return command

    ops = add("ops", _ops, "measure the ops, torch, and FLA, Wind and others if they are installed")
    cli.add_cases(ops)
    text = "decays that are out of range in a chunk, in all heads or in one; packed sequences; states of updates"
    ops.add_argument("--inputs", choices=cases.KINDS, help=f"{text} (default: usual)")
    text = "the tables of published studies and more, or one of them (may be repeated)"
    ops.add_argument("--suite", action="append", choices=suites.SUITES, help=text)
    ops.add_argument("--no-peers", action="store_true", help="do not measure other libraries")
    text = "leave out libraries that take longer to compile and tune (default: wait for all)"
    ops.add_argument("--peer-minutes", type=float, metavar="N", help=text)
    ops.add_argument("--csv", metavar="FILE", help="also write the rows to FILE")
    ops.add_argument("--plot", metavar="FILE", help="draw the rows, e.g. out.png")
    ops.add_argument("--record", action="store_true", help="keep the rows of each case in bench.json as it ends")
    of_layer = add("layers", _layers, "measure the small operations of a layer and the loss, beside torch")
    layers.add_options(of_layer)
    costs = add("service", _service, "measure the cost of the service: imports, first calls, host time of a call")
    costs.add_argument("--record", action="store_true", help="keep the result in bench.json")
    train = add("training", _training, "measure how fast models of RWKV-7 train, and their time mixing, with FLA's")
    training.add_options(train)
    losses = add("curves", _curves, "compare the loss curves of RWKV-7 and FLA's RWKV-7 from the same parameters")
    curves.add_options(losses)
    warm = add("warm-fla", _warm_fla, "compile ahead the choices of FLA's tuners for RWKV-7, in many processes")
    warm_fla.add_options(warm)
    two = add("compare", _compare, "show what differs between two results of --json or --record")
    two.add_argument("files", nargs=2, metavar="FILE", help="the earlier one first")
    add("pages", _pages, "fill the pages from bench.json again, and draw their picture")
    add("stale", _stale, "list the rows of bench.json that were measured with other sources")
    return parser


def _ops(parsed: argparse.Namespace) -> Outcome:
    _check_outputs(parsed)
    if not torch.cuda.is_available():
        for name in ("suite", "inputs"):
            if getattr(parsed, name) is not None:
                raise ValueError(f"--{name}: its shapes are for a GPU, and torch sees none; expected --shape")
        measured = bench.run(parsed)
        about = {"inputs": "usual", "in_graph": False}
        measured["rows"] = [dict.fromkeys(measure.COLUMNS) | about | row for row in measured["rows"]]
        result = record.result_of(measured)
    else:
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
            result = record.result_of({**about, "rows": bench.measured(entries, rows_of, measure.row)})
    if parsed.csv is not None:
        _write_csv(result, parsed.csv)
    if parsed.plot is not None:
        plot.draw(result, parsed.plot)
    return result, partial(bench.show, columns=measure.SHOWN, methods=measure.METHODS)


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


def _layers(parsed: argparse.Namespace) -> Outcome:
    return layers.run(parsed), bench.show


def _service(parsed: argparse.Namespace) -> Outcome:
    if parsed.record:
        bench.check_gpu()
    result = service.run()
    if parsed.record:
        record.write_service(result)
    return result, service.show


def _training(parsed: argparse.Namespace) -> Outcome:
    result = training.run(parsed)
    if parsed.record:
        record.write(record.result_of(result), "training")
    return result, training.show


def _curves(parsed: argparse.Namespace) -> Outcome:
    return curves.run(parsed), curves.show


def _warm_fla(parsed: argparse.Namespace) -> Outcome:
    return warm_fla.run(parsed), warm_fla.show


def _compare(parsed: argparse.Namespace) -> Outcome:
    first, second = map(record.read, parsed.files)
    return record.compare(first, second), record.show_comparison


def _pages(parsed: argparse.Namespace) -> Outcome:
    result = record.read(record.FILE)
    return {"written": [str(path) for path in record.fill_pages(result)]}, lambda result: print(*result["written"])


def _stale(parsed: argparse.Namespace) -> Outcome:
    return record.stale(record.read(record.FILE)), record.show_stale


if __name__ == "__main__":
    sys.exit(main())
