"""Where the time of a call goes: its kernels by torch.profiler, or a run that NVIDIA's own profilers can watch."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from rwkv_jit.desk import bench, inputs, terminal, versions
from rwkv_jit.kernels import template
from rwkv_jit.kernels.cache import files
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.plain import reference
from rwkv_jit.schedules.table import ALL as OPS

RUNS, WARM_UP, _OPTIONS = 10, 3, ("shape", "dtype", "phase", "backend")


@contextmanager
def _range(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


def prepare(case: inputs.Case, backend: str = "auto", beside: str | None = None) -> Callable[[], Any]:
    """Return our call of a case, or that of another library's function, which takes logarithms of decays."""
    given = inputs.given_for(case, [backend])
    function = given.functions[inputs.OURS, backend]
    if beside is not None:
        try:
            function = getattr(import_module(beside.rpartition(".")[0]), beside.rpartition(".")[2])
        except (ImportError, AttributeError, ValueError) as error:
            known = f"expected a function such as fla.ops.rwkv7.chunk_rwkv7, got {beside!r}"
            raise ValueError(f"--beside: {known} ({error})") from None
        if (decay := inputs.decay_of(case.op)) not in ("none", "log"):
            w = given.inputs[place := OPS[case.op].names.index("w")].detach()
            of_log = reference.decay_factor(w.float(), decay).log().to(w.dtype)
            own = [*given.inputs[:place], of_log.requires_grad_("backward" in case.phase), *given.inputs[place + 1 :]]
            given = given._replace(inputs=own)
    forward = _range("forward" if "backward" in case.phase else case.phase)(function)
    call = inputs.call_of(forward, given, case.phase, _range("backward")(torch.autograd.grad))
    for _ in range(WARM_UP):  # so that nothing is compiled or loaded later
        call()
    torch.cuda.synchronize()
    return call


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profile a phase of an op, run it once for another profiler, or return the command line of Nsight Compute.

    Returns op, shape, dtype, phase, backend; of a profile also env, runs, trace (the file, or None), kernels, and
    beside, those of another function, as `kernels_of`. Raises ValueError for wrong options or without a GPU.
    """
    op, phase = arguments.op, arguments.phase
    case = inputs.Case(op, inputs.shape_of(op, arguments.shape, phase), inputs.DTYPES[arguments.dtype], phase).check()
    if arguments.ncu is not None:
        return {"command": _ncu_command(arguments)}
    folder, has_gpu = Path(arguments.trace) if arguments.trace else None, versions.is_available()
    try:
        if folder and (has_gpu or folder.exists()):  # a call that cannot run leaves no folder
            folder.mkdir(parents=True, exist_ok=True)
            files.check_writable(folder)
    except OSError as error:
        expected = f"expected a folder that can be written, got {folder}"
        raise ValueError(f"--trace: {expected} ({error.strerror})") from error
    if not has_gpu:
        raise ValueError("kernels need a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")
    about = {name: getattr(arguments, name) for name in ("op", *_OPTIONS)} | {"shape": list(case.shape)}
    call = prepare(case, arguments.backend)
    if arguments.bare:
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()
        return about
    trace = str(folder / f"{op}_{phase.replace('+', '_')}.pt.trace.json") if folder else None
    about |= {"env": versions.env_report(), "runs": RUNS, "trace": trace, "kernels": kernels_of(call, trace)}
    beside = kernels_of(prepare(case, beside=arguments.beside)) if arguments.beside else None
    return about | {"beside": beside}


def kernels_of(call: Callable[[], Any], trace: str | None = None) -> list[dict[str, Any]]:
    """Return the kernels, copies and fills of some runs, and write their trace into a file.

    Of each name, launches and self_us of a run, and share of the time of all.
    """
    profiler = _profiled(call, RUNS)
    if trace:
        profiler.export_chrome_trace(trace)
    found = _on_gpu(profiler.key_averages())
    total = _seen(sum(x.self_device_time_total for x in found))
    times = sorted(((x.self_device_time_total, x) for x in found), key=lambda each: -each[0])
    return [{"name": x.key, "launches": x.count / RUNS, "self_us": us / RUNS, "share": us / total} for us, x in times]


def busy_us(call: Callable[[], Any], runs: int) -> float:
    """Return how long a run keeps the GPU busy: the time of kernels, copies and fills, of several at once only once.

    A kernel that begins before the one before it has ended waits for that, and this is no work.
    """
    total, end = 0.0, 0.0
    for span in sorted((x.time_range.start, x.time_range.end) for x in _on_gpu(_profiled(call, runs).events())):
        total += max(span[1] - max(span[0], end), 0.0)
        end = max(end, span[1])
    return _seen(total) / runs


def _profiled(call: Callable[[], Any], runs: int) -> Any:
    """Return what torch.profiler saw of some runs."""
    with profile(record_shapes=True, profile_memory=True) as profiler:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    return profiler


def _on_gpu(events: Iterable[Any]) -> list[Any]:
    """Return what of a profile ran on a GPU."""
    return [x for x in events if x.device_type.name == "CUDA" and not x.is_user_annotation]


def _seen(total: float) -> float:
    """Return a time of kernels, of which there has to be some."""
    if not total:
        raise RwkvJitError("torch.profiler saw no kernel: another profiler may be watching, or it may not be allowed")
    return total


def _ncu_command(arguments: argparse.Namespace) -> str:
    """Return the command line of Nsight Compute, which leaves clocks as they are. Raises ValueError."""
    op, phase, kernel = arguments.op, arguments.phase, arguments.ncu.strip()
    stem = OPS[op].stem
    if phase == inputs.UPDATE:  # of which ops share one
        stem = "update_states" if OPS[op].through is None else "update_rules"
    text = "\n".join(template.library(name).body for name in template.names() if f"{name}_".startswith(f"{stem}_"))
    known = sorted(set(re.findall(r"^.*__global__ void .*\b(\w+)\($", text, re.MULTILINE)))
    is_known = kernel in known
    with suppress(re.error):
        is_known = is_known or (kernel.startswith("regex:") and re.compile(kernel[6:]).pattern != "")
    if not is_known:
        expected = f"expected one of {', '.join(known)}, or regex: and an expression"
        raise ValueError(f"--ncu: {expected}, got {arguments.ncu!r}")
    file = re.sub(r"\W+", "_", f"{op}_{phase}_{kernel.removeprefix('regex:')}").strip("_")
    own = [x for name in _OPTIONS for x in (f"--{name}", getattr(arguments, name))]
    ncu = "ncu --profile-from-start off --launch-count 1 --set full --clock-control none --nvtx --force-overwrite"
    words = ["--export", file, "--kernel-name", kernel, sys.executable, "-m", "rwkv_jit", "profile", op, "--bare", *own]
    return f"RWKVJIT_LINEINFO=1 {ncu} {shlex.join(words)}"


def show(result: dict[str, Any]) -> None:
    """Print a profile, what was run, or a command line."""
    if "command" in result:
        print(result["command"])
        return
    what = "{op} ({}) {dtype}, {phase}".format(", ".join(map(str, result["shape"])), **result)
    if "kernels" not in result:
        terminal.say(f"{what}: ran once between cudaProfilerStart and cudaProfilerStop")
        return
    terminal.say(f"{bench.machine(result['env'])}\n\n{what}, per run, of {result['runs']}")
    columns = {"kernel": "{name}", "launches": "{launches:g}", "self us": "{self_us:.2f}", "share": "{share:.1%}"}
    for rows in filter(None, (result["kernels"], result["beside"])):
        terminal.records(columns, rows)
        print()
    if result["trace"] is not None:
        terminal.say(f"{result['trace']}: for chrome://tracing, ui.perfetto.dev and TensorBoard")
