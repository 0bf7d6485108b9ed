"""Where the time of a call goes: its kernels by torch.profiler, or a run that NVIDIA's own profilers can watch."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler

from rwkv_jit.desk import bench, terminal, versions
from rwkv_jit.desk.bench import Row
from rwkv_jit.kernels import template
from rwkv_jit.kernels.cache import files
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.plain import reference
from rwkv_jit.schedules.derived_table import ALL as OPS

RUNS, WARM_UP, CHROME, _OPTIONS = 10, 3, "trace.json", ("shape", "dtype", "phase", "inputs", "backend")


@contextmanager
def _range(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


def prepare(case: bench.Case, backend: str = "auto", beside: str | None = None) -> tuple[Callable[[], Any], int | None]:
    """Return our call of a case, or that of another library's function, which takes logarithms of decays; its bytes."""
    given = bench.given_for(case, [backend])
    function = given.functions[bench.OURS, backend]
    if beside is not None:
        try:
            function = getattr(import_module(beside.rpartition(".")[0]), beside.rpartition(".")[2])
        except (ImportError, AttributeError, ValueError) as error:
            known = f"expected a function such as fla.ops.rwkv7.chunk_rwkv7, got {beside!r}"
            raise ValueError(f"--beside: {known} ({error})") from None
        decay, inputs = bench.decay_of(case.op, case.kind), list(given.inputs)
        if decay not in ("none", "log"):
            w = inputs[place := OPS[case.op].names.index("w")].detach()
            factor = reference.decay_factor(w.float(), decay)
            inputs[place] = factor.log().to(w.dtype).requires_grad_("backward" in case.phase)
        given = given._replace(inputs=inputs)
    forward = _range("forward" if "backward" in case.phase else case.phase)(function)
    call = bench.call_of(forward, given, case.phase, _range("backward")(torch.autograd.grad))
    for _ in range(WARM_UP):  # so that nothing is compiled or loaded later
        call()
    torch.cuda.synchronize()
    return call, given.bytes


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profile a phase of an op, run it once for another profiler, or return the command line of Nsight Compute.

    Returns op, shape, dtype, phase, inputs, backend; of a profile also env; runs; least_bytes, what a run must read and
    write; kernels, and beside, those of another function: name, launches and self_us a run, median_us of a launch,
    share of their time, bytes a run (of copies), registers, shared_bytes, grid and block of each kernel, copy and fill;
    total_us, the sum of ours; trace, the files that were written, or None.
    Raises ValueError for wrong options or without a GPU, RwkvJitError where the profiler saw nothing.
    """
    op, phase = arguments.op, arguments.phase
    shape = bench.shape_of(op, arguments.shape, phase)
    case = bench.Case(op, shape, bench.DTYPES[arguments.dtype], phase, arguments.inputs).check()
    if arguments.ncu is not None:
        return {"command": _ncu_command(arguments)}
    folder = arguments.trace and Path(arguments.trace)
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            files.check_writable(folder)
    except OSError as error:
        raise ValueError(f"--trace: expected a folder that can be written, got {folder} ({error.strerror})") from None
    if not versions.is_available():
        raise ValueError("kernels need a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")
    about = {"op": op, **{name: getattr(arguments, name) for name in _OPTIONS}, "shape": case.shown}
    (call, least), name = prepare(case, arguments.backend), f"{op}_{phase.replace('+', '_')}"
    if arguments.bare:
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()
        return about
    kernels, trace = record(call, folder, name)
    beside = arguments.beside and record(prepare(case, beside=arguments.beside)[0], None, "beside")[0]
    if not kernels:
        raise RwkvJitError("torch.profiler saw no kernel: another profiler may be watching, or it may not be allowed")
    about |= {"env": versions.env_report(), "runs": RUNS, "least_bytes": least, "kernels": kernels, "beside": beside}
    return about | {"total_us": sum(kernel["self_us"] for kernel in kernels), "trace": trace}


def record(call: Callable[[], Any], asked: Path | None, name: str) -> tuple[list[Row], dict[str, str] | None]:
    """Return the kernels of some runs, and the traces that were written into a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked or Path(temporary)
        before, planned = set(folder.iterdir()), schedule(wait=0, warmup=1, active=RUNS, repeat=1)
        handler = tensorboard_trace_handler(str(folder), worker_name=name)
        with profile(schedule=planned, on_trace_ready=handler, record_shapes=True, profile_memory=True) as profiler:
            for _ in range(1 + RUNS):
                call()
                torch.cuda.synchronize()  # no kernel of one run is counted to the next
                profiler.step()
        (written,) = set(folder.glob(f"{name}.*.pt.trace.json")) - before
        text = written.read_text(encoding="utf-8")
        (folder / CHROME).write_text(text, encoding="utf-8")  # the profiler writes a trace only once
    files_of = {"chrome": str(folder / CHROME), "tensorboard": str(written)}
    return kernels_of(json.loads(text)["traceEvents"]), files_of if asked else None


def kernels_of(events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return what ran on the GPU, from the events of a trace; `run` says what of each."""
    kernels: dict[tuple[Any, ...], list[tuple[float, Mapping[str, Any]]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            about = event.get("args", {})
            same = event["name"], about.get("registers per thread"), about.get("shared memory")
            kernels.setdefault(same, []).append((event["dur"], about))
    total, rows = sum(dur for several in kernels.values() for dur, _ in several), []
    for (name, registers, shared_bytes), several in kernels.items():
        times, of_copies = [dur for dur, _ in several], [about["bytes"] for _, about in several if "bytes" in about]
        rows.append({
            "name": name, "launches": len(several) / RUNS, "self_us": sum(times) / RUNS, "median_us": median(times),
            "share": sum(times) / total if total else 0.0, "bytes": sum(of_copies) / RUNS if of_copies else None,
            "registers": registers, "shared_bytes": shared_bytes,
            **{size: several[0][1].get(size) for size in ("grid", "block")},
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["self_us"])


def _ncu_command(arguments: argparse.Namespace) -> str:
    """Return the command line of Nsight Compute, which leaves clocks as they are. Raises ValueError."""
    op, phase, kernel = arguments.op, arguments.phase, arguments.ncu.strip()
    stem = phase if phase == bench.UPDATE else OPS[op].stem  # updates of all ops have one of their own
    text = "\n".join(template.library(name).body for name in template.names() if name.startswith(f"{stem}_"))
    known = sorted(set(re.findall(r"^.*__global__ void .*\b(\w+)\($", text, re.MULTILINE)))
    try:
        is_known = kernel in known or (kernel.startswith("regex:") and re.compile(kernel[6:]).pattern != "")
    except re.error:
        is_known = False
    if not is_known:
        names = f"{', '.join(known)}, or regex: and an expression"
        raise ValueError(f"--ncu: expected one of {names}, got {arguments.ncu!r}")
    file = re.sub(r"\W+", "_", f"{op}_{phase}_{kernel.removeprefix('regex:')}").strip("_")
    own = [x for name in _OPTIONS for x in (f"--{name}", getattr(arguments, name))]
    ncu = "ncu --profile-from-start off --launch-count 1 --set full --clock-control none --nvtx --force-overwrite"
    words = ["--export", file, "--kernel-name", kernel, sys.executable, "-m", "rwkv_jit", "profile", op, "--bare", *own]
    return f"RWKVJIT_LINEINFO=1 {ncu} {shlex.join(words)}"


_COLUMNS = {
    "kernel": "{name}", "launches": "{launches:g}", "self us": "{self_us:.2f}", "share %": "{percent:.1f}",
    "median us": "{median_us:.2f}", "bytes": "{bytes:.0f}", "registers": "{registers}", "shared B": "{shared_bytes}",
    "grid": "{grid}", "block": "{block}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print a profile, what was run, or a command line."""
    if "command" in result:
        print(result["command"])
        return
    what = "{op} ({}) {dtype}, {phase}".format(", ".join(map(str, result["shape"])), **result)
    if "kernels" not in result:
        terminal.say(f"{what}: ran once between cudaProfilerStart and cudaProfilerStop")
        return
    terminal.say(f"{bench.machine(result['env'])}\n\n{what}")
    for rows in filter(None, (result["kernels"], result["beside"])):
        sizes = [{x: row[x] and "x".join(map(str, row[x])) for x in ("grid", "block")} for row in rows]
        terminal.records(_COLUMNS, [a | b | {"percent": 100 * a["share"]} for a, b in zip(rows, sizes, strict=True)])
        print()
    total, least = result["total_us"], result["least_bytes"]
    terminal.say(
        f"Per run, of {result['runs']}: {total:.2f} us of kernels, copies and fills; inputs and results have "
        f"{least / 1e6:.1f} MB, {least / total / 1e6:.2f} TB/s over that time.\n"
        "Bytes are known only for copies and fills; `--ncu KERNEL` prints how to count those of a kernel."
    )
    if result["trace"] is not None:
        terminal.say("{chrome}: for chrome://tracing or ui.perfetto.dev".format(**result["trace"]))
        terminal.say("{tensorboard}: for TensorBoard, with --logdir and its folder".format(**result["trace"]))
