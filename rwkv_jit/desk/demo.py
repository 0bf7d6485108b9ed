"""The main job on this machine: compile the ops, run them, compare with float64, and time them."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rwkv_jit.ahead import requests
from rwkv_jit.desk import bench, terminal, versions
from rwkv_jit.kernels import env, identity, kernel
from rwkv_jit.kernels.cache import installed
from rwkv_jit.kernels.errors import NvrtcNotFoundError
from rwkv_jit.schedules.derived_table import ALL as OPS

HEAD_SIZES = (64, 40)  # a usual one and one that nobody ships
WITHOUT_HEADS = {"wkv4": (None,)}  # timex has the channels of as many heads
ERROR_LIMITS = {torch.bfloat16: 8e-3, torch.float32: 5e-6}  # bfloat16 may run on the tensor cores
_CACHE_VARIABLES = ("RWKVJIT_CACHE_DIR", "RWKVJIT_CACHE_PATH", "RWKVJIT_CACHE", "RWKVJIT_ASSERT_CACHED")
CHECKED_SHAPES = {"cuda": (1, 128, 4), "cpu": (1, 48, 2)}
TIMED_SHAPES = {"cuda": (8, 1024, 32), "cpu": (1, 48, 2)}  # B, T, H


def run() -> dict[str, Any]:
    """Compile, run, check and time; the user's kernel cache stays as it was.

    Returns device, compiler, missing (what CUDA kernels lack here, or None), kernels, calls, checked_shape and
    timed_shape (B, T, H), cache (the user's path, entries, bytes), and passed: whether errors are below their limits.
    """
    device, missing, groups = "cuda" if versions.is_available() else "cpu", None, list[list[Any]]()
    try:
        compiled_by: str | None = f"NVRTC {identity.version()}"
        groups = _compiles(default_arch())
    except NvrtcNotFoundError as error:
        compiled_by, missing = None, str(error)
    sizes = [(op, size) for op in OPS for size in WITHOUT_HEADS.get(op, HEAD_SIZES)]
    groups.append([partial(_call, op, size, dtype, device) for op, size in sizes for dtype in ERROR_LIMITS])
    results: list[list[dict[str, Any]]] = []
    with terminal.progress("compiling, then calling") as tell:
        for jobs in groups:
            results.append([])
            with empty_cache():  # wkv5 and wkv6 share a kernel
                for job in jobs:
                    if tell:
                        tell(sum(map(len, results)), sum(map(len, groups)))
                    results[-1].append(job())
    (*of_compiles, calls), cache = results, versions.cache_info()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "on_gpu": device == "cuda", "compiler": compiled_by, "missing": missing, "kernels": sum(of_compiles, []),
        "calls": calls, "checked_shape": CHECKED_SHAPES[device], "timed_shape": TIMED_SHAPES[device],
        "cache": {name: cache[name] for name in ("path", "entries", "bytes")},
        "passed": all(call["passed"] for call in calls),
    }  # fmt: skip


@contextmanager
def empty_cache() -> Iterator[None]:
    """Work in a temporary cache, where kernels are compiled whatever else is stored or remembered."""
    with tempfile.TemporaryDirectory(prefix=env.TEMPORARY) as folder:
        before = {name: os.environ.pop(name, None) for name in _CACHE_VARIABLES}
        os.environ["RWKVJIT_CACHE_DIR"] = folder
        kernel.forget()
        try:
            with installed.left_aside():
                yield
        finally:
            kernel.forget()
            del os.environ["RWKVJIT_CACHE_DIR"]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def default_arch() -> str | None:
    """Return the architecture to name where the user names none: None, which is the GPU's, if there is one."""
    return None if torch.cuda.is_available() or env.arch() else "sm_90a"


def _compiles(arch: str | None) -> list[list[Callable[[], dict[str, Any]]]]:
    """Return what compiles the kernels of each op."""
    of_op, both = {name: HEAD_SIZES if op.has_heads else (None,) for name, op in OPS.items()}, requests.DIRECTIONS
    return [[partial(_compile, op, x, way, arch) for x in sizes for way in both] for op, sizes in of_op.items()]


def _compile(op: str, head_size: int | None, direction: str, arch: str | None) -> dict[str, Any]:
    """Get a kernel three times: it is compiled, read from disk, found in memory. Those of timex are of timed calls."""
    batch, tokens = TIMED_SHAPES["cuda"][:2] if op == "timex" else (None, None)
    decay, found, times = bench.OPTIONS.get(op, {}).get("decay"), [], []
    calls = requests.Calls(op, head_size, torch.bfloat16, arch, direction, decay, tokens=tokens, batch=batch)
    named = requests.named(calls, "auto", None, None, bench.switches_of(op))
    for place in ("compiled", "disk", "memory"):
        if place == "disk":
            kernel.forget()
        started = time.perf_counter()
        found.append(kernel.get(named.request))
        times.append(1e3 * (time.perf_counter() - started))
    return {
        "op": op, "head_size": head_size, "direction": direction, "backend": named.problem.backend,
        "origins": [each.origin for each in found], "compile_ms": times[0], "disk_ms": times[1], "memory_ms": times[2],
        **{name: getattr(found[0], name) for name in ("arch", "target", "registers", "spill_bytes", "shared_bytes")},
    }  # fmt: skip


def _cases(op: str, sizes: tuple[int, ...], size: int | None, dtype: torch.dtype) -> list[bench.Case]:
    return [bench.Case(op, (*sizes, *[size or HEAD_SIZES[0]] * 2), dtype, phase) for phase in bench.USUAL_PHASES]


def check(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return error of y and gradient_error, relative in L2 against float64; limit; passed."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(0)  # the same inputs in every run
        cases = _cases(op, CHECKED_SHAPES[device], head_size, dtype)
        y, gradients = (bench.errors_of(case, ["auto"], device)[bench.OURS, "auto"] for case in cases)
    limit, errors = ERROR_LIMITS[dtype], (y["y"], *gradients.values())
    passed = all(error <= limit for error in errors)  # NaN is not
    return {"error": y["y"], "gradient_error": max(errors[1:]), "limit": limit, "passed": passed}


def _call(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Check an op and time it."""
    about = {"op": op, "head_size": head_size, "dtype": str(dtype).removeprefix("torch.")}
    median_ms = bench.median_ms if device == "cuda" else lambda call: statistics.median(bench.cpu_ms(call, 3))
    calls = [bench.our_call(case, "auto", device) for case in _cases(op, TIMED_SHAPES[device], head_size, dtype)]
    times = dict(zip(("forward_ms", "forward_backward_ms"), map(median_ms, calls), strict=True))
    return about | check(op, head_size, dtype, device) | times


_KERNELS = {
    "op": "{op}", "head size": "{head_size}", "direction": "{direction}", "backend": "{backend}",
    "compile ms": "{compile_ms:.0f}", "disk ms": "{disk_ms:.2f}", "memory ms": "{memory_ms:.3f}",
    "registers": "{registers}", "spill B": "{spill_bytes}", "shared B": "{shared_bytes}",
}  # fmt: skip
_CALLS = {
    "op": "{op}", "head size": "{head_size}", "dtype": "{dtype}", "error y": "{error:.1e}",
    "error grads": "{gradient_error:.1e}", "limit": "{limit:.0e}", "forward ms": "{forward_ms:.3f}",
    "fwd + bwd ms": "{forward_backward_ms:.3f}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    on_gpu, kernels = result["on_gpu"], result["kernels"]
    terminal.say(f"rwkv_jit on {result['device']}, {result['compiler'] or 'no compiler'}\n")
    if kernels:
        arch, target = (kernels[0][name] for name in ("arch", "target"))
        as_ptx = "" if target == arch else f" as PTX {target}, whose registers only the driver knows"
        said = "" if on_gpu else " (compiled, not run: there is no GPU here)"
        terminal.say(f"Kernels for {arch}{as_ptx}, bfloat16, in an empty cache; then found on disk and in memory{said}")
        terminal.records(_KERNELS, kernels, ("shared B", "spill B", "registers"))
    terminal.say("" if kernels else f"No CUDA kernel can be compiled here: {result['missing']}\n")
    ran = "the kernels" if on_gpu else "the reference in plain torch, as the tensors are on the CPU"
    checked, timed = ("(B, T, H) = ({}, {}, {})".format(*result[f"{name}_shape"]) for name in ("checked", "timed"))
    terminal.say(f"Calls run {ran}.\nRelative L2 error against float64 at {checked}; median time of a call at {timed}")
    terminal.records(_CALLS, result["calls"], ("limit",))
    terminal.say(f"\nErrors are {'within' if result['passed'] else 'ABOVE'} the limits.")
    terminal.say(
        "Your kernel cache was not touched: {path}, {entries} kernels, {bytes} bytes.".format(**result["cache"])
    )
