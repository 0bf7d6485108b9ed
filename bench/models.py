"""What is measured of whole models, in training and in decoding alike: how they run, and the figures of a step."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from bench.rwkv7_models import HEAD_SIZE, Sizes
from rwkv_jit.desk import bench, figures, profiling, terminal
from rwkv_jit.nn import RWKV5, RWKV6, RWKV7, graphs, node

MODELS: dict[str, Any] = {"RWKV5": RWKV5, "RWKV6": RWKV6, "RWKV7": RWKV7}
# How a model runs: every call of torch and of ours by itself; layers as nodes; steps from CUDA graphs.
PARTS, NODES, GRAPHED = MODES = "parts", "nodes", "graphed"
WARM_UP = 3
PEAKS = {"H100": 989e12, "H200": 989e12}  # FLOPs a second of dense 16-bit matrices
_HOST_RUNS, _PROFILED = 10, 3  # steps
EMPTY = dict[str, Any](
    median_ms=None, low_ms=None, high_ms=None, runs=0, host_ms=None, kernel_ms=None, tokens_per_s=None, flops_use=None,
    peak_mib=None, skipped=None,
)  # fmt: skip
# Of tables: what all rows have.
COLUMNS = {
    "parameters": "{parameters}", "ms a step": "{median_ms:.2f}", "quartiles": "{low_ms:.2f} to {high_ms:.2f}",
    "host alone ms": "{host_ms:.2f}", "GPU busy": "{busy:.0%}", "tokens a second": "{tokens_per_s:,.0f}",
    "of the FLOPs": "{flops_use:.1%}", "peak GiB": "{peak_gib:.2f}",
}  # fmt: skip
METHODS = (
    "Host alone: until a step has been queued. GPU busy: the time in which its kernels run, by torch.profiler, over "
    "that of the step. Parts: each call of torch and of rwkv_jit by itself; nodes: layers as single nodes of autograd, "
    "as on every GPU; graphed: steps from CUDA graphs."
)


@contextmanager
def running(mode: str) -> Iterator[None]:
    """Let models run in one of the modes inside the block."""
    before = node.devices, graphs.devices
    node.devices = set() if mode == PARTS else before[0]
    graphs.devices = before[1] if mode == GRAPHED else set()
    try:
        yield
    finally:
        node.devices, graphs.devices = before


def add_sizes(parser: argparse.ArgumentParser, large: Sizes, small: Sizes, names: Sequence[str]) -> None:
    """Give a command the options of sizes."""
    for name in names:
        text = f"default: {getattr(large, name)} on a GPU, {getattr(small, name)} without one"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)


def sizes_of(parsed: argparse.Namespace, large: Sizes, small: Sizes) -> tuple[Sizes, str]:
    """Return what the options say of sizes, once they are checked, and the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: getattr(parsed, name, None) for name in Sizes._fields}
    sizes = (large if device == "cuda" else small)._replace(**{x: n for x, n in given.items() if isinstance(n, int)})
    for name, value in sizes._asdict().items():
        if value < 1:
            raise ValueError(f"--{name}: expected at least 1, got {value}")
    if sizes.width % HEAD_SIZE:
        raise ValueError(f"--width: expected a multiple of {HEAD_SIZE}, got {sizes.width}")
    if device == "cuda":
        bench.check_gpu()
    if getattr(parsed, "runs", 2) < 2:
        raise ValueError(f"--runs: expected at least 2, got {parsed.runs}")
    if getattr(parsed, "record", False) and device == "cpu":
        raise ValueError("--record: keeps what was measured on a GPU, and there is none")
    return sizes, device


def matrices_of(sizes: Sizes, kind: Any = RWKV7) -> int:
    """Return how many weights of matrices a token goes through, the head's among them."""
    model = kind(sizes.vocabulary, sizes.width, sizes.layers, HEAD_SIZE, device="meta")
    per_head = "emb.weight", "r_k", "time_faaaa", "time_decay"
    return sum(x.numel() for name, x in model.named_parameters() if x.dim() == 2 and not name.endswith(per_head))


def flops_of_recurrence(sizes: Sizes) -> int:
    """Return the FLOPs of a token in the recurrences of all layers, forward."""
    return sizes.layers * 8 * sizes.width * HEAD_SIZE


def flops_use(flops_per_s: float) -> float | None:
    """Return the share of the GPU's FLOPs, where these are known."""
    known = [peak for gpu, peak in PEAKS.items() if gpu in torch.cuda.get_device_name()]
    return flops_per_s / known[0] if known else None


# ---- steps -------------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Wait for all that was queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Give memory back that nobody holds any more."""
    torch.compiler.reset()  # compiled code holds models
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def survived(row: dict[str, Any]) -> Iterator[None]:
    """Let what fails inside be a row that says why, and hide no other."""
    free()  # what the row before has left
    try:
        yield
    except Exception as error:
        row["skipped"] = bench.one_line(error)


def step_times(step: Callable[[], Any], device: str, runs: int) -> list[float]:
    """Return the milliseconds of each of some steps, one behind the other."""
    stamps = [_stamp(device)]
    for _ in range(runs):
        step()
        stamps.append(_stamp(device))
    wait(device)
    if device == "cpu":
        return [1e3 * (after - before) for before, after in pairwise(stamps)]
    return [before.elapsed_time(after) for before, after in pairwise(stamps)]


def _stamp(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def host_ms(step: Callable[[], Any]) -> float:
    """Return the milliseconds until a step has been queued, where the GPU has nothing else to do."""
    times = []
    for _ in range(WARM_UP + _HOST_RUNS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begun))
    torch.cuda.synchronize()
    return statistics.median(times[WARM_UP:])


def figures_of(
    step: Callable[[], Any], device: str, runs: int, queued: Callable[[], Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return what a row says of a step that has run before; `queued` is one that the host queues as a whole."""
    if device == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats()
    found = figures.spread(step_times(step, device, runs))
    if device == "cpu":  # which has no queue and no kernels
        return found
    peak = torch.cuda.max_memory_allocated() / 2**20
    busy = profiling.busy_us(step, _PROFILED) / 1e3
    return found | {"peak_mib": peak, "host_ms": host_ms(queued or step), "kernel_ms": busy}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what its line of a table has beside."""
    kernels, ms, peak = row.get("kernel_ms"), row["median_ms"], row["peak_mib"]
    return row | {"busy": kernels and ms and kernels / ms, "peak_gib": peak and peak / 1024}


def show(result: dict[str, Any], tables: Sequence[tuple[str, dict[str, str], str]], skipped: str, methods: str) -> None:
    """Print a table for each part with its columns, below what its title says of a row, and what was left out."""
    terminal.say(bench.machine(result["env"]) if result["device"] == "cuda" else bench.CPU_NOTE)
    for part, columns, title in tables:
        rows = [shown(row) for row in result["rows"] if row["part"] == part and row["skipped"] is None]
        if rows:
            terminal.say(f"\n{title.format(**rows[0])}")
            terminal.records(columns, rows, ("quartiles",))
    for row in result["rows"]:
        if row["skipped"] is not None:
            terminal.say(f"  skipped: {skipped}, {{by}}: {{skipped}}".format(**row))
    terminal.say(f"\n{methods}{METHODS}")


def fill_zeros(model: nn.Module) -> None:
    """Fill matrices of zeros, with which training begins, with small numbers: zeros are faster."""
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 2 and not x.any():
                nn.init.normal_(x, std=0.02)
