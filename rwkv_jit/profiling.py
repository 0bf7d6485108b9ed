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
from functools import partial
from pathlib import Path
from shutil import copyfile
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from rwkv_jit import bench, report, runtime, template
from rwkv_jit.errors import RwkvJitError
from rwkv_jit.ops import recurrent

WARM_UP, RUNS = 3, 10
CHROME = "trace.json"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # of a trace's events


class Call(NamedTuple):
    """A phase of an op, ready to run: what it returns are the tensors that it made."""

    run: Callable[[], Sequence[Tensor]]
    reads: Sequence[Tensor]


# ---- the phases --------------------------------------------------------------------------------------------------


def prepare(op: str, shape: Sequence[int], dtype: torch.dtype, phase: str, backend: str = "auto") -> Call:
    """Return a phase of an op on inputs like a model's.

    Parameters
    ----------
    op : str
        The op.
    shape : sequence of int
        As the bench reads it, B, T, H, N; "decode" takes one token, whatever T is.
    dtype : torch.dtype
        Of the inputs.
    phase : {"forward", "backward", "forward+backward", "decode", "prefill"}
        "prefill" is a forward that returns its state, and "decode" one from a state to the next.
    backend : str, default "auto"
        As the op takes it.

    Returns
    -------
    Call
        Its `run` marks each direction by a range of NVTX and of the trace.

    Raises
    ------
    ValueError
        The op has no such phase.
    """
    with_state = phase in ("decode", "prefill")
    if with_state and op == "timex":
        raise ValueError(f"--phase: timex has no state; expected forward, backward or forward+backward, got {phase}")
    options: dict[str, Any] = {"backend": backend}
    if op in runtime.OPS and bench.decay_of(op) != "none":
        options["decay"] = bench.decay_of(op)
    function = partial(bench.OPS[op], **options)
    if phase == "decode":
        shape = (shape[0], 1, *shape[2:])
    given = bench.make_inputs(op, shape, dtype)
    detached = [x.detach() for x in given]
    if with_state:
        state = function(*detached, output_final_state=True)[1] if phase == "decode" else None

        def stateful() -> Sequence[Tensor]:
            with _range(phase):
                return _tensors(function(*detached, initial_state=state, output_final_state=True))

        return Call(stateful, [*detached, *_tensors(state)])

    def forward(inputs: Sequence[Tensor]) -> Tensor:
        with _range("forward"):
            y: Tensor = function(*inputs)[0]
        return y

    def backward(y: Tensor, keep: bool) -> Sequence[Tensor]:
        with _range("backward"):
            return torch.autograd.grad(y, given, dy, retain_graph=keep)

    if phase == "forward":
        return Call(lambda: [forward(detached)], detached)
    first = forward(given)
    dy = torch.randn_like(first)
    if phase == "backward":
        return Call(lambda: backward(first, True), [*detached, dy])

    def both() -> Sequence[Tensor]:
        y = forward(given)
        return [y, *backward(y, False)]

    return Call(both, [*detached, *detached, dy])


def _tensors(given: Any) -> list[Tensor]:
    """Return the tensors in what an op returns or takes: a state may be a pair."""
    if isinstance(given, Tensor):
        return [given]
    return [] if given is None else [x for each in given for x in _tensors(each)]


@contextmanager
def _range(name: str) -> Iterator[None]:
    """Mark what is inside for Nsight's programs and in the trace."""
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


# ---- torch.profiler ----------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profile a phase of an op.

    Parameters
    ----------
    arguments : argparse.Namespace
        op, shape, dtype, phase, backend, trace: the command's.

    Returns
    -------
    dict
        env : the environment report; op, shape, dtype, phase, backend, runs; least_bytes : what a run cannot do without
        reading and writing; kernels : one dict per kernel, copy and fill, the longest first, with name, launches and
        self_us a run, median_us of a launch, share of all their time, bytes a run (of copies and fills, else None),
        registers, shared_bytes, grid and block (None where they are not known); total_us : their sum; trace : the files
        that were written, chrome and tensorboard, or None.

    Raises
    ------
    ValueError
        The shape cannot be read, the op has no such phase, the traces cannot be written, or there is no GPU.
    RwkvJitError
        The profiler saw nothing.
    """
    shape, folder = bench.read_shape(arguments.shape), _folder(arguments.trace)
    _check_gpu()
    call = prepare(arguments.op, shape, bench.DTYPES[arguments.dtype], arguments.phase, arguments.backend)
    least_bytes = sum(x.nbytes for x in (*call.reads, *_warm_up(call)))
    name = f"{arguments.op}_{arguments.phase.replace('+', '_')}"
    with tempfile.TemporaryDirectory() as temporary:
        written = record(call, folder or Path(temporary), name)
        events = json.loads(written.read_text(encoding="utf-8"))["traceEvents"]
    kernels = kernels_of(events, RUNS)
    if not kernels:
        raise RwkvJitError("torch.profiler saw no kernel: another profiler may be watching, or it may not be allowed")
    return {
        "env": runtime.env_report(),
        **{option: getattr(arguments, option) for option in ("op", "dtype", "phase", "backend")},
        "shape": list(shape),
        "runs": RUNS,
        "least_bytes": least_bytes,
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
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--trace: expected a folder that can be written, got {asked} ({error.strerror})") from None
    return folder


def _check_gpu() -> None:
    if not runtime.is_available():
        raise ValueError("kernels run on a GPU, by CuPy and NVRTC; `rwkv-jit info` shows what is missing")


def _warm_up(call: Call) -> Sequence[Tensor]:
    """Run a few times, so that nothing is compiled or loaded later; return what the last run made."""
    for _ in range(WARM_UP):
        made = call.run()
    torch.cuda.synchronize()
    return made


def record(call: Call, folder: Path, name: str) -> Path:
    """Run under torch.profiler, which watches one run more than it keeps.

    Parameters
    ----------
    call : Call
        What runs.
    folder : Path
        Where the trace is written, for TensorBoard and as `trace.json` for Chrome's and Perfetto's viewers.
    name : str
        Of the run in TensorBoard.

    Returns
    -------
    Path
        The trace for TensorBoard.
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
            call.run()
            torch.cuda.synchronize()  # no kernel of one run is counted to the next
            profiler.step()
    (written,) = set(folder.glob(f"{name}.*.pt.trace.json")) - before
    copyfile(written, folder / CHROME)  # the profiler writes a trace only once
    return written


def kernels_of(events: Sequence[Mapping[str, Any]], runs: int) -> list[dict[str, Any]]:
    """Return what ran on the GPU, from the events of a trace of so many runs; `run` says what of each."""
    found: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _ON_GPU:
            about = event.get("args", {})
            same = (event["name"], about.get("registers per thread"), about.get("shared memory"))
            found.setdefault(same, []).append(event)
    total = sum(event["dur"] for several in found.values() for event in several)
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
        for (name, registers, shared_bytes), several in found.items()
    ]
    return sorted(rows, key=lambda row: -row["self_us"])


def _bytes(events: Sequence[Mapping[str, Any]], runs: int) -> float | None:
    known = [event["args"]["bytes"] for event in events if "bytes" in event.get("args", {})]
    return sum(known) / runs if known else None


def show(result: dict[str, Any]) -> None:
    """Print a profile."""
    shape = ", ".join(map(str, result["shape"]))
    report.say(f"{bench.machine(result['env'])}\n\n{result['op']} ({shape}) {result['dtype']}, {result['phase']}")
    report.table(
        ("kernel", "launches", "self us", "share %", "median us", "bytes", "registers", "shared B", "grid", "block"),
        [
            (
                kernel["name"], f"{kernel['launches']:g}", f"{kernel['self_us']:.2f}", f"{100 * kernel['share']:.1f}",
                f"{kernel['median_us']:.2f}", "-" if kernel["bytes"] is None else f"{kernel['bytes']:.0f}",
                *("-" if kernel[name] is None else kernel[name] for name in ("registers", "shared_bytes")),
                *(_sizes(kernel[name]) for name in ("grid", "block")),
            )
            for kernel in result["kernels"]
        ],
    )  # fmt: skip
    total, least = result["total_us"], result["least_bytes"]
    report.say(
        f"\nPer run, of {result['runs']}: {total:.2f} us of kernels, copies and fills; inputs and results have "
        f"{least / 1e6:.1f} MB, {least / total / 1e6:.2f} TB/s over that time."
    )
    report.say("Bytes are known of copies and fills; `--ncu KERNEL` says how to count those of a kernel.")
    if result["trace"] is not None:
        report.say(f"{result['trace']['chrome']}: for chrome://tracing or ui.perfetto.dev")
        report.say(f"{result['trace']['tensorboard']}: for TensorBoard, with --logdir and its folder")


def _sizes(given: Sequence[int] | None) -> str:
    return "-" if given is None else "x".join(map(str, given))


# ---- NVIDIA's profilers ------------------------------------------------------------------------------------------


def run_bare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a phase once between cudaProfilerStart and cudaProfilerStop, after a warm-up, without torch.profiler.

    Returns
    -------
    dict
        op, shape, dtype, phase and backend.

    Raises
    ------
    ValueError
        As `run`.
    """
    shape = bench.read_shape(arguments.shape)
    _check_gpu()
    call = prepare(arguments.op, shape, bench.DTYPES[arguments.dtype], arguments.phase, arguments.backend)
    _warm_up(call)
    with torch.cuda.profiler.profile():
        call.run()
        torch.cuda.synchronize()
    about = {option: getattr(arguments, option) for option in ("op", "dtype", "phase", "backend")}
    return {**about, "shape": list(shape)}


def show_bare(result: dict[str, Any]) -> None:
    """Print what was run."""
    report.say(
        "{op} {shape} {dtype}, {phase}: ran once between cudaProfilerStart and cudaProfilerStop".format(**result)
    )


_ENTRY = re.compile(r"__global__ void .*\b(\w+)\($", re.MULTILINE)


def _names_of(op: str) -> list[str]:
    """Return the names of the kernels that calls of an op can launch."""
    stem = recurrent.OPS[op].stem if op in recurrent.OPS else op
    names = [name for name in template.names() if name.startswith(f"{stem}_")]
    return sorted({found for name in names for found in _ENTRY.findall(template.library(name).body)})


def _is_expression(kernel: str) -> bool:
    """Return whether this is a regular expression, by which kernels of torch are named too."""
    try:
        return kernel.startswith("regex:") and bool(re.compile(kernel.removeprefix("regex:")).pattern)
    except re.error:
        return False


def ncu_command(arguments: argparse.Namespace) -> str:
    """Return the command line by which Nsight Compute measures the first launch of a kernel in a phase.

    Clocks stay as they are found, the code carries line numbers, and what runs before the phase is not counted.

    Raises
    ------
    ValueError
        The shape cannot be read, or there is no such kernel.
    """
    bench.read_shape(arguments.shape)
    kernel, known = arguments.ncu.strip(), _names_of(arguments.op)
    if kernel not in known and not _is_expression(kernel):
        names = ", ".join(known)
        raise ValueError(f"--ncu: expected one of {names}, or regex: and an expression, got {arguments.ncu!r}")
    file = re.sub(r"\W+", "_", f"{arguments.op}_{arguments.phase}_{kernel.removeprefix('regex:')}").strip("_")
    own = [sys.executable, "-m", "rwkv_jit", "profile", arguments.op, "--bare"]
    for option in ("shape", "dtype", "phase", "backend"):
        own += [f"--{option}", getattr(arguments, option)]
    ncu = ["ncu", "--profile-from-start", "off", "--kernel-name", kernel, "--launch-count", "1", "--set", "full"]
    ncu += ["--clock-control", "none", "--nvtx", "--force-overwrite", "--export", file]
    return f"RWKVJIT_LINEINFO=1 {shlex.join([*ncu, *own])}"
