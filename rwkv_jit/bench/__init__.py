"""Times, errors and memory of the ops on this GPU, and what a first call costs."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import reference, report, runtime, tensors
from rwkv_jit.ops import backends
from rwkv_jit.ops import timex as timex_module
from rwkv_jit.ops.gla import gla
from rwkv_jit.ops.linear_attention import linear_attention
from rwkv_jit.ops.wkv4 import BACKENDS as WKV4_BACKENDS
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.ops.wkv4_walk import backend_of as backend_of_wkv4
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7


def _with_state(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return what answers as the other ops do."""
    return lambda *given, **options: (function(*given, **options), None)


OPS: dict[str, Callable[..., Any]] = {
    "wkv4": wkv4,
    "wkv5": wkv5,
    "wkv6": wkv6,
    "wkv7": wkv7,
    "gla": gla,
    "linear_attention": linear_attention,
    "timex": _with_state(timex_module.timex),  # the channels of its w [C, T] and k [B, C, T] are those of all heads
}
REFERENCES: dict[str, Callable[..., Any]] = {op: getattr(reference, f"{op}_ref") for op in runtime.OPS}
REFERENCES["timex"] = _with_state(reference.timex_ref)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIONS = {"wkv7": {"decay": "sigmoid"}}  # as in the models, where that is not the default
BACKENDS = [name for name in backends.NAMES if name != "reference"]
# Batch, tokens, heads, head size: a short prompt, and training.
SHAPES = ((1, 54, 32, 64), (8, 4096, 64, 64))
_SMALL = 10_000_000  # elements; below, a call is timed in a CUDA graph, as the host would take longer than the GPU

# A process of its own, timed from where imports, the CUDA context and torch's own first uses are done.
_FIRST_CALL = """
import time, platformdirs, torch, rwkv_jit
from rwkv_jit import cuda
from rwkv_jit.bench import make_inputs
cuda.cupy()
given = make_inputs("wkv7", (1, 64, 4, 64), torch.bfloat16)
torch.cuda.current_stream().synchronize()
x = torch.ones(8, 8, device="cuda", requires_grad=True)
(x @ x).backward(torch.ones(8, 8, device="cuda"))
torch.cuda.synchronize()
rwkv_jit.wkv7
started = time.perf_counter()
y, _ = rwkv_jit.wkv7(*given)
y.backward(torch.ones_like(y))
torch.cuda.synchronize()
print((time.perf_counter() - started) * 1e3)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="only this op (may be repeated)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    parser.add_argument("--shape", help="B,T,H,N instead of the usual shapes")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--latency", action="store_true", help="measure what the service costs instead of the kernels")
    text = "measure the forms that a kernel went through instead (wkv5, timex)"
    instead.add_argument("--history", action="store_true", help=text)


def decay_of(op: str) -> str:
    """Return how w is read in the models of an op."""
    return OPTIONS.get(op, {}).get("decay", runtime.OPS[op].decay)


def make_inputs(op: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return inputs like a model's, in the op's order, that require gradients."""
    batch, tokens, heads, head_size = shape
    if op == "wkv4":  # channels of all heads
        channels = heads * head_size
        k, v = (torch.randn(batch, tokens, channels, device="cuda") for _ in range(2))
        given = [torch.linspace(-6, 1, channels, device="cuda"), torch.randn(channels, device="cuda") * 0.5, k, v]
        return [x.to(dtype).requires_grad_() for x in given]
    if op == "timex":
        sizes = ((heads * head_size, tokens), (batch, heads * head_size, tokens))
        return [torch.randn(size, device="cuda").to(dtype).requires_grad_() for size in sizes]
    r, k, v, kk, w = (torch.randn(batch, tokens, heads, head_size, device="cuda") for _ in range(5))
    kk = torch.nn.functional.normalize(kk, dim=-1)
    r, k, w = r * 0.5, k * 0.5, w - 0.6
    raw = w - 2.4  # RWKV-5 and 6 begin with -6 to -1; where one of many is above 4, a head leaves the range of chunks
    bonus = torch.randn(heads, head_size, device="cuda")
    made = {
        "wkv5": [r, k, v, raw[0, 0], bonus],
        "wkv6": [r, k, v, raw, bonus],
        "wkv7": [r, w, k, v, -kk, kk * torch.rand_like(kk)],
        "gla": [r, k, v, torch.nn.functional.logsigmoid(w) / 16],
        "linear_attention": [r, k, v],
    }[op]
    return [x.to(dtype).requires_grad_() for x in made]


def median_ms(function: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time of a call by CUDA events."""
    times = []
    for run in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def graph_ms(function: Callable[[], Any], calls: int = 50) -> float:
    """Return the time of a call inside a CUDA graph: `calls` of them captured, replayed, and divided."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return median_ms(graph.replay) / calls


def call_ms(function: Callable[[], Any], elements: int) -> tuple[float, bool]:
    """Return the time of a call on so many elements, and whether it was taken in a CUDA graph, as of few."""
    in_graph = elements < _SMALL
    return (graph_ms if in_graph else median_ms)(function), in_graph


def check_gpu() -> None:
    """Check that there is something to measure on.

    Raises
    ------
    ValueError
        There is no GPU, no CuPy or no NVRTC.
    """
    if not runtime.is_available():
        raise ValueError("bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure.

    Returns
    -------
    dict
        env : the environment report; rows : one dict per op and shape, with op, shape, dtype, backend, forward_ms,
        forward_backward_ms, in_graph, saved_mib, error; first_call : milliseconds of a first call with gradients from
        an empty cache and from disk, each in a process of its own.

    Raises
    ------
    ValueError
        There is no GPU, or the shape cannot be read.
    UnsupportedConfigError
        The backend that was asked for cannot do it.
    """
    check_gpu()
    shapes = SHAPES if arguments.shape is None else (read_shape(arguments.shape),)
    dtype = DTYPES[arguments.dtype]
    ops = arguments.op or [op for op in sorted(OPS) if op != "wkv4" or arguments.backend in WKV4_BACKENDS]
    rows = [_measure(op, shape, dtype, arguments.backend) for shape in shapes for op in ops]
    return {"env": runtime.env_report(), "rows": rows, "first_call": _first_calls()}


def read_shape(text: str) -> tuple[int, ...]:
    """Return B, T, H, N from a command line.

    Raises
    ------
    ValueError
        These are not four positive numbers.
    """
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shape: expected four positive numbers B,T,H,N, got {text!r}")
    return tuple(map(int, parts))


def _measure(op: str, shape: Sequence[int], dtype: torch.dtype, asked: str) -> dict[str, Any]:
    options = OPTIONS.get(op, {})
    backend = _backend(op, shape, dtype, asked)
    function = partial(OPS[op], backend=backend, **options)
    given = make_inputs(op, shape, dtype)
    detached = [x.detach() for x in given]
    weight = torch.randn_like(function(*detached)[0])
    forward, in_graph = call_ms(lambda: function(*detached), weight.numel())
    both = median_ms(lambda: torch.autograd.grad(function(*given)[0], given, weight))
    before = torch.cuda.memory_allocated()
    y, _ = function(*given)
    saved = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    del y
    return {
        "op": op,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "forward_ms": forward,
        "forward_backward_ms": both,
        "in_graph": in_graph,
        "saved_mib": saved / 2**20,
        "error": _error(op, shape, dtype, function),
    }


def _backend(op: str, shape: Sequence[int], dtype: torch.dtype, asked: str) -> str:
    """Return the backend that calls of this shape take."""
    batch, tokens, heads, head_size = shape
    device = torch.cuda.current_device()
    if op == "timex":
        return timex_module.choose(asked, dtype, tokens, lambda: tensors.arch(device))
    if op == "wkv4":
        return backend_of_wkv4(asked, batch * heads * head_size, tokens, tensors.multiprocessors(device))
    case = backends.Case(
        op, dtype, head_size, head_size, tokens, decay_of(op), None, None, blocks=batch * heads,
        multiprocessors=lambda: tensors.multiprocessors(device),
    )  # fmt: skip
    return backends.choose(asked, case, lambda: tensors.arch(device))[0]


def _error(op: str, shape: Sequence[int], dtype: torch.dtype, function: Callable[..., Any]) -> float:
    """Return the largest relative L2 error of y and the gradients against float64, over at most 300 tokens of a row."""
    given = make_inputs(op, (1, min(shape[1], 300), *shape[2:]), dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    y, want = function(*given)[0], REFERENCES[op](*exact, **OPTIONS.get(op, {}))[0]
    weight = torch.randn_like(y)
    grads = torch.autograd.grad(y, given, weight)
    want_grads = torch.autograd.grad(want, exact, weight.double())
    pairs = zip((y, *grads), (want, *want_grads), strict=True)
    return max(float(((x.double() - ref).norm() / ref.norm()).item()) for x, ref in pairs)


def _first_calls() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        child = {**os.environ, "RWKVJIT_CACHE_DIR": cache}
        times = [float(_run_child(child)) for _ in range(6)]
    return {"compiled_ms": times[0], "from_disk_ms": statistics.median(times[1:])}


def _run_child(environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", _FIRST_CALL]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def machine(env: dict[str, Any]) -> str:
    """Return what a measurement was taken on, from the environment report."""
    return f"{env['gpus'][0]}, torch {env['torch']}, NVRTC {env['nvrtc'].split()[0]}"


def show(result: dict[str, Any]) -> None:
    """Print a measurement."""
    print(f"{machine(result['env'])}\n")
    report.table(
        ("op", "(B, T, H, N)", "dtype", "backend", "forward ms", "in a graph", "fwd + bwd ms", "saved MiB", "error"),
        [
            (
                row["op"], f"({', '.join(map(str, row['shape']))})", row["dtype"], row["backend"],
                f"{row['forward_ms']:.4f}", "yes" if row["in_graph"] else "no", f"{row['forward_backward_ms']:.4f}",
                f"{row['saved_mib']:.1f}", f"{row['error']:.1e}",
            )
            for row in result["rows"]
        ],
    )  # fmt: skip
    first = result["first_call"]
    print("\nError: relative L2 against float64, the largest of y and the gradients.")
    print(
        f"First call of wkv7 with gradients: {first['compiled_ms']:.0f} ms from an empty cache, "
        f"{first['from_disk_ms']:.1f} ms from disk in a new process (imports and CUDA context not counted)."
    )
