"""The main job on this machine: compile the ops, run them, compare with float64, and time them."""

from __future__ import annotations

import platform
import statistics
import time
from itertools import product
from typing import Any

import torch

from rwkv_jit.ahead import requests, warm
from rwkv_jit.desk import figures, inputs, terminal, versions
from rwkv_jit.desk.versions import default_arch, empty_cache
from rwkv_jit.kernels import identity, kernel
from rwkv_jit.kernels.errors import NvrtcNotFoundError
from rwkv_jit.schedules.table import ALL as OPS

HEAD_SIZE, ODD = 64, {"wkv7": 40}  # a usual one, and one that nobody ships
ERROR_LIMITS = {torch.bfloat16: 8e-3, torch.float32: 5e-6}  # bfloat16 may run on the tensor cores
CHECKED_SHAPES = {"cuda": (1, 128, 4), "cpu": (1, 48, 4)}  # with two heads, what they give A of ssd may cancel
TIMED_SHAPES = {"cuda": (8, 1024, 32), "cpu": (1, 48, 2)}  # B, T, H


def run(_: object = None) -> dict[str, Any]:
    """Compile, run, check and time; the user's kernel cache stays as it was.

    Returns device, compiler, missing (what CUDA kernels lack here, or None), kernels, calls, checked_shape and
    timed_shape (B, T, H), cache (the user's path, entries, bytes), and passed: whether errors are below their limits.
    """
    device, missing, kernels = "cuda" if versions.is_available() else "cpu", None, list[dict[str, Any]]()
    try:
        compiled_by: str | None = f"NVRTC {identity.version()}"
        kernels = compiled(default_arch())
    except NvrtcNotFoundError as error:
        compiled_by, missing = None, str(error)
    calls = list[dict[str, Any]]()
    every = [(op, size, dtype) for op in OPS for size in sizes_of(op) for dtype in ERROR_LIMITS]
    with empty_cache(), terminal.progress("calling") as tell:
        for call in every:
            if tell:
                tell(len(calls), len(every))
            calls.append(_call(*call, device))
    cache = versions.cache_info()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "on_gpu": device == "cuda", "compiler": compiled_by, "missing": missing, "kernels": kernels, "calls": calls,
        "checked_shape": CHECKED_SHAPES[device], "timed_shape": TIMED_SHAPES[device],
        "cache": {name: cache[name] for name in ("path", "entries", "bytes")},
        "passed": all(call["passed"] for call in calls),
    }  # fmt: skip


def sizes_of(op: str) -> tuple[int | None, ...]:
    """Return the head sizes that an op is shown with."""
    return (HEAD_SIZE, *([ODD[op]] if op in ODD else [])) if OPS[op].has_heads else (None,)


def compiled(arch: str | None) -> list[dict[str, Any]]:
    """Compile the kernels of each op side by side, equal ones once; then find each on disk and in memory."""
    named = {}
    for op, direction in product(OPS, requests.DIRECTIONS):
        batch, tokens = TIMED_SHAPES["cuda"][:2] if op == "timex" else (None, None)  # as its timed calls have
        for size in sizes_of(op):
            decay = inputs.OPTIONS.get(op, {}).get("decay")
            calls = requests.Calls(op, size, torch.bfloat16, arch, direction, decay, tokens=tokens, batch=batch)
            named[op, size, direction] = requests.named(calls, "auto", None, None, inputs.switches_of(op))
    different = {kernel.memory_key(each.request): each.request._replace(also=()) for each in named.values()}
    with empty_cache(), terminal.progress("compiling") as tell:
        first = dict(zip(different, warm.compile_all(list(different.values()), tell), strict=True))
        return [_found(about, each, first[kernel.memory_key(each.request)]) for about, each in named.items()]


def _found(about: tuple[str, int | None, str], named: requests.Named, first: kernel.Kernel) -> dict[str, Any]:
    """Return the row of a kernel that has been compiled, and is read from disk and found in memory now."""
    found, times = [first], [1e3 * first.compile_seconds]
    kernel.forget()
    for _ in ("disk", "memory"):
        started = time.perf_counter()
        found.append(kernel.get(named.request))
        times.append(1e3 * (time.perf_counter() - started))
    return {
        **dict(zip(("op", "head_size", "direction"), about, strict=True)), "backend": named.problem.backend,
        "origins": [each.origin for each in found],
        **dict(zip(("compile_ms", "disk_ms", "memory_ms"), times, strict=True)),
        **{name: getattr(first, name) for name in ("arch", "target", "registers", "spill_bytes", "shared_bytes")},
    }  # fmt: skip


def _cases(op: str, sizes: tuple[int, ...], size: int | None, dtype: torch.dtype) -> list[inputs.Case]:
    return [inputs.Case(op, (*sizes, *[size or HEAD_SIZE] * 2), dtype, phase) for phase in inputs.USUAL_PHASES]


def check(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return error of y and gradient_error, relative in L2 against float64; limit; passed."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(0)  # the same inputs in every run
        cases = _cases(op, CHECKED_SHAPES[device], head_size, dtype)
        y, gradients = (figures.errors_of(case, ["auto"], device)[inputs.OURS, "auto"] for case in cases)
    limit, errors = ERROR_LIMITS[dtype], (y["y"], *gradients.values())
    passed = all(error <= limit for error in errors)  # NaN is not
    return {"error": y["y"], "gradient_error": max(errors[1:]), "limit": limit, "passed": passed}


def _call(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Check an op and time it."""
    about = {"op": op, "head_size": head_size, "dtype": str(dtype).removeprefix("torch.")}
    median_ms = figures.median_ms if device == "cuda" else lambda call: statistics.median(figures.cpu_ms(call, 3))
    calls = [figures.our_call(case, "auto", device) for case in _cases(op, TIMED_SHAPES[device], head_size, dtype)]
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
