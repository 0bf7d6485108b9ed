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
from pathlib import Path
from shutil import copyfile
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from rwkv_jit.desk import bench, terminal, versions
from rwkv_jit.desk.bench import cases, measure
from rwkv_jit.desk.bench.cases import Case
from rwkv_jit.kernels import template
from rwkv_jit.kernels.cache import files
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.schedules import table

WARM_UP, RUNS = 3, 10
CHROME = "trace.json"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # of a trace's events


# ---- the phases --------------------------------------------------------------------------------------------------


def case_of(arguments: argparse.Namespace) -> Case:
    """Return what a command line names; a decode and an update take one token, whatever the shape says.

    Raises ValueError where the shape cannot be read, or the op has no such phase or inputs.
    """
    sizes = cases.shape_of(arguments.op, arguments.shape, arguments.phase)
    dtype, kind = bench.DTYPES[arguments.dtype], arguments.inputs
    return Case(arguments.op, sizes, dtype, arguments.phase, kind=kind).check()


def prepare(case: Case, backend: str = "auto") -> Callable[[], Any]:
    """Return a case ready to run, with each direction in a range of NVTX and of the trace; it returns its tensors."""
    contestant = measure.our_call(case, backend, backend)
    forward = contestant._replace(run=_range("forward" if case.has_gradients else case.phase)(contestant.run))
    return measure.run_once(case, forward, cases.given_for(case), _range("backward")(torch.autograd.grad))


@contextmanager
def _range(name: str) -> Iterator[None]:
    """Mark what is inside for Nsight's programs and in the trace."""
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


# ---- torch.profiler ----------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profile a phase of an op: the command's op, shape, dtype, phase, inputs, backend and trace.

    Returns env, the environment report; op, shape, dtype, phase, inputs, backend, runs; least_bytes, what a run cannot
    do without reading and writing; kernels: one dict per kernel, copy and fill, the longest first, with name, launches
    and self_us a run, median_us of a launch, share of their time, bytes a run (of copies, else None), registers,
    shared_bytes, grid and block (None where they are not known); total_us, their sum; trace, the files that were
    written, chrome and tensorboard, or None.
    Raises ValueError where the shape cannot be read, the op has no such phase, the traces cannot be written, or there
    is no GPU; RwkvJitError where the profiler saw nothing.
    """
    case, folder = case_of(arguments), _folder(arguments.trace)
    call = _warm_call(case, arguments.backend)
    name = f"{arguments.op}_{arguments.phase.replace('+', '_')}"
    with tempfile.TemporaryDirectory() as temporary:
        written = record(call, folder or Path(temporary), name)
        events = json.loads(written.read_text(encoding="utf-8"))["traceEvents"]
    kernels = kernels_of(events, RUNS)
    if not kernels:
        raise RwkvJitError("torch.profiler saw no kernel: another profiler may be watching, or it may not be allowed")
    return {
        "env": versions.env_report(),
        **_about(arguments, case),
        "runs": RUNS,
        "least_bytes": cases.least_bytes(case),
        "kernels": kernels,
        "total_us": sum(kernel["self_us"] for kernel in kernels),
        "trace": None if folder is None else {"chrome": str(folder / CHROME), "tensorboard": str(written)},
    }


def _folder(asked: str | None) -> Path | None:
    if asked is None:
        return None
    folder = Path(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.check_writable(folder)
    except OSError as error:
        raise ValueError(f"--trace: expected a folder that can be written, got {asked} ({error.strerror})") from None
    return folder


def _about(arguments: argparse.Namespace, case: Case) -> dict[str, Any]:
    options = ("op", "dtype", "phase", "inputs", "backend")
    return {"shape": case.shown} | {option: getattr(arguments, option) for option in options}


def _warm_call(case: Case, backend: str) -> Callable[[], Any]:
    """Return a case that has run a few times, so that nothing is compiled or loaded later."""
    if not versions.is_available():
        raise ValueError("kernels need a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")
    call = prepare(case, backend)
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    return call


def record(call: Callable[[], Any], folder: Path, name: str) -> Path:
    """Run a call under torch.profiler, which watches one run more than it keeps; return the trace for TensorBoard.

    The trace is written into `folder`, for TensorBoard, where the run has this name, and as `trace.json` for Chrome's
    and Perfetto's viewers.
    """
    before = set(folder.iterdir())
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=RUNS, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=name),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for _ in range(1 + RUNS):
            call()
            torch.cuda.synchronize()  # no kernel of one run is counted to the next
            profiler.step()
    (written,) = set(folder.glob(f"{name}.*.pt.trace.json")) - before
    copyfile(written, folder / CHROME)  # the profiler writes a trace only once
    return written


def kernels_of(events: Sequence[Mapping[str, Any]], runs: int) -> list[dict[str, Any]]:
    """Return what ran on the GPU, from the events of a trace of so many runs; `run` says what of each."""
    kernels: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _ON_GPU:
            about = event.get("args", {})
            same = (event["name"], about.get("registers per thread"), about.get("shared memory"))
            kernels.setdefault(same, []).append(event)
    total = sum(event["dur"] for several in kernels.values() for event in several)
    rows = [
        {
            "name": name,
            "launches": len(several) / runs,
            "self_us": sum(event["dur"] for event in several) / runs,
            "median_us": median(event["dur"] for event in several),
            "share": sum(event["dur"] for event in several) / total if total else 0.0,
            "bytes": _bytes(several, runs),
            "registers": registers,
            "shared_bytes": shared_bytes,
            "grid": several[0].get("args", {}).get("grid"),
            "block": several[0].get("args", {}).get("block"),
        }
        for (name, registers, shared_bytes), several in kernels.items()
    ]
    return sorted(rows, key=lambda row: -row["self_us"])


def _bytes(events: Sequence[Mapping[str, Any]], runs: int) -> float | None:
    known = [event["args"]["bytes"] for event in events if "bytes" in event.get("args", {})]
    return sum(known) / runs if known else None


_COLUMNS = {
    "kernel": "{name}", "launches": "{launches:g}", "self us": "{self_us:.2f}", "share %": "{percent:.1f}",
    "median us": "{median_us:.2f}", "bytes": "{bytes:.0f}", "registers": "{registers}", "shared B": "{shared_bytes}",
    "grid": "{grid}", "block": "{block}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print a profile."""
    shape = ", ".join(map(str, result["shape"]))
    terminal.say(f"{bench.machine(result['env'])}\n\n{result['op']} ({shape}) {result['dtype']}, {result['phase']}")
    terminal.records(_COLUMNS, [
        kernel
        | {"percent": 100 * kernel["share"]}
        | {name: kernel[name] and "x".join(map(str, kernel[name])) for name in ("grid", "block")}
        for kernel in result["kernels"]
    ])  # fmt: skip
    total, least = result["total_us"], result["least_bytes"]
    terminal.say(
        f"\nPer run, of {result['runs']}: {total:.2f} us of kernels, copies and fills; inputs and results have "
        f"{least / 1e6:.1f} MB, {least / total / 1e6:.2f} TB/s over that time."
    )
    terminal.say("Bytes are known only for copies and fills; `--ncu KERNEL` prints how to count those of a kernel.")
    if result["trace"] is not None:
        terminal.say("{chrome}: for chrome://tracing or ui.perfetto.dev".format(**result["trace"]))
        terminal.say("{tensorboard}: for TensorBoard, with --logdir and its folder".format(**result["trace"]))


# ---- NVIDIA's profilers ------------------------------------------------------------------------------------------


def run_bare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a phase once between cudaProfilerStart and cudaProfilerStop, after a warm-up, without torch.profiler.

    Returns op, shape, dtype, phase, inputs and backend. Raises ValueError as `run`.
    """
    case = case_of(arguments)
    call = _warm_call(case, arguments.backend)
    with torch.cuda.profiler.profile():
        call()
        torch.cuda.synchronize()
    return _about(arguments, case)


def show_bare(result: dict[str, Any]) -> None:
    """Print what was run."""
    text = "{op} {shape} {dtype}, {phase}: ran once between cudaProfilerStart and cudaProfilerStop"
    terminal.say(text.format(**result))


_ENTRY = re.compile(r"__global__ void .*\b(\w+)\($", re.MULTILINE)


def _names_of(op: str, phase: str) -> list[str]:
    """Return the names of the kernels that calls of an op can launch, but for those that all ops share.

    Updates of all ops have one of their own.
    """
    stem = phase if phase == cases.UPDATE else table.OPS[op].stem
    names = [name for name in template.names() if name.startswith(f"{stem}_")]
    return sorted({entry for name in names for entry in _ENTRY.findall(template.library(name).body)})


def _is_expression(kernel: str) -> bool:
    """Return whether this is a regular expression, by which kernels of torch are named too."""
    try:
        return kernel.startswith("regex:") and bool(re.compile(kernel.removeprefix("regex:")).pattern)
    except re.error:
        return False


def ncu_command(arguments: argparse.Namespace) -> str:
    """Return the command line by which Nsight Compute measures the first launch of a kernel in a phase.

    Clocks stay as they are found, the code carries line numbers, and what runs before the phase is not counted.
    Raises ValueError where the shape cannot be read, or there is no such kernel.
    """
    case_of(arguments)
    kernel, known = arguments.ncu.strip(), _names_of(arguments.op, arguments.phase)
    if kernel not in known and not _is_expression(kernel):
        names = ", ".join(known)
        raise ValueError(f"--ncu: expected one of {names}, or regex: and an expression, got {arguments.ncu!r}")
    file = re.sub(r"\W+", "_", f"{arguments.op}_{arguments.phase}_{kernel.removeprefix('regex:')}").strip("_")
    own = [sys.executable, "-m", "rwkv_jit", "profile", arguments.op, "--bare"]
    for option in ("shape", "dtype", "phase", "inputs", "backend"):
        own += [f"--{option}", getattr(arguments, option)]
    ncu = ["ncu", "--profile-from-start", "off", "--kernel-name", kernel, "--launch-count", "1", "--set", "full"]
    ncu += ["--clock-control", "none", "--nvtx", "--force-overwrite", "--export", file]
    return f"RWKVJIT_LINEINFO=1 {shlex.join([*ncu, *own])}"
