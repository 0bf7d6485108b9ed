"""The main job on this machine: compile the ops, run them, compare with float64, and time them."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.ahead import requests
from rwkv_jit.desk import bench, terminal, versions
from rwkv_jit.desk.bench import cases, timing
from rwkv_jit.kernels import env, identity, kernel
from rwkv_jit.kernels.cache import installed
from rwkv_jit.kernels.errors import NvrtcNotFoundError
from rwkv_jit.schedules import table

Job = Callable[[], dict[str, Any]]  # returns a record
# With the decays of the models. The channels of timex are those of all heads.
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    op: (
        partial(bench.OPS[op], **bench.OPTIONS.get(op, {})),
        partial(bench.REFERENCES[op], **bench.OPTIONS.get(op, {})),
    )
    for op in table.OPS
}
HEAD_SIZES = (64, 40)  # a usual one and one that nobody ships
WITHOUT_HEADS = {"wkv4": (None,)}
DTYPES = (torch.bfloat16, torch.float32)
ERROR_LIMITS = {torch.bfloat16: 8e-3, torch.float32: 5e-6}  # bfloat16 may run on the tensor cores
ARCH_WITHOUT_GPU = "sm_90a"
_CACHE_VARIABLES = ("RWKVJIT_CACHE_DIR", "RWKVJIT_CACHE_PATH", "RWKVJIT_CACHE", "RWKVJIT_ASSERT_CACHED")
# (B, T, H): the float64 reference keeps every state for its backward, so errors are taken on few tokens.
CHECKED_SHAPES = {"cuda": (2, 128, 4), "cpu": (1, 48, 2)}
TIMED_SHAPES = {"cuda": (8, 1024, 32), "cpu": (1, 48, 2)}


def run() -> dict[str, Any]:
    """Compile, run, check and time; the user's kernel cache stays as it was.

    Returns device, compiler, missing (what CUDA kernels lack here, or None); kernels: one record per compiled kernel,
    of timex without a head_size; calls: one record per op, head size and dtype; checked_shape, timed_shape (B, T, H);
    cache: path, entries and bytes of the user's own; passed: whether every error is below its limit.
    """
    device = "cuda" if versions.is_available() else "cpu"
    compiled_by = missing = None
    groups: list[list[Job]] = []
    try:
        compiled_by = f"NVRTC {identity.version()}"
        groups = _compiles(default_arch())
    except NvrtcNotFoundError as error:
        missing = str(error)
    groups.append(
        [partial(_call, op, size, dtype, device) for op in OPS for size in _head_sizes(op) for dtype in DTYPES]
    )
    results: list[list[dict[str, Any]]] = []
    total = sum(map(len, groups))
    with terminal.progress("compiling, then calling") as tell:
        for jobs in groups:
            results.append([])
            with empty_cache():  # wkv5 and wkv6 share a kernel
                for job in jobs:
                    if tell:
                        tell(sum(map(len, results)), total)
                    results[-1].append(job())
    *of_compiles, of_calls = results
    cache = versions.cache_info()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "on_gpu": device == "cuda",
        "compiler": compiled_by,
        "missing": missing,
        "kernels": [record for records in of_compiles for record in records],
        "calls": of_calls,
        "checked_shape": CHECKED_SHAPES[device],
        "timed_shape": TIMED_SHAPES[device],
        "cache": {name: cache[name] for name in ("path", "entries", "bytes")},
        "passed": all(call["passed"] for call in of_calls),
    }


def _head_sizes(op: str) -> Sequence[int | None]:
    return WITHOUT_HEADS.get(op, HEAD_SIZES)


@contextmanager
def empty_cache() -> Iterator[None]:
    """Work in a temporary cache, where kernels are compiled whatever is stored elsewhere or remembered."""
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
    """Return the architecture to ask for where the user names none: None, which is the GPU's, if there is one."""
    return None if torch.cuda.is_available() or env.arch() else ARCH_WITHOUT_GPU


def _compiles(arch: str | None) -> list[list[Job]]:
    """Return what asks for the kernels of each op."""
    return [
        [
            partial(_compile, op, head_size, direction, arch)
            for head_size in (_head_sizes(op) if table.OPS[op].has_heads else (None,))
            for direction in requests.DIRECTIONS
        ]
        for op in table.OPS
    ]


def _compile(op: str, head_size: int | None, direction: str, arch: str | None) -> dict[str, Any]:
    """Ask for the kernel of a direction three times: it is compiled, read from disk, found in memory.

    Those of timex go by batch and tokens, and are those of the timed calls.
    """
    decay = bench.OPTIONS.get(op, {}).get("decay")
    batch, tokens = TIMED_SHAPES["cuda"][:2] if op == "timex" else (None, None)
    named = requests.named(
        op, head_size, None, torch.bfloat16, arch, direction, "auto", decay, None, None, tokens, batch, {}
    )

    def ask() -> tuple[kernel.Kernel, float]:
        started = time.perf_counter()
        made = kernel.get(named.request)
        return made, 1e3 * (time.perf_counter() - started)

    compiled, compile_ms = ask()
    kernel.forget()
    from_disk, disk_ms = ask()
    from_memory, memory_ms = ask()
    return {
        "op": op,
        "head_size": head_size,
        "direction": direction,
        "backend": named.problem.backend,
        "origins": [compiled.origin, from_disk.origin, from_memory.origin],
        "compile_ms": compile_ms,
        "disk_ms": disk_ms,
        "memory_ms": memory_ms,
        **{name: getattr(compiled, name) for name in ("arch", "target", "registers", "spill_bytes", "shared_bytes")},
    }


def check(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return first_call_ms; error of y and gradient_error, relative in L2 against float64; limit; passed."""
    function, in_torch = OPS[op]
    inputs, dy = _inputs(op, CHECKED_SHAPES[device], head_size, dtype, device)
    started = time.perf_counter()
    results = _run_both_ways(function, inputs, dy)
    if device == "cuda":
        torch.cuda.synchronize()
    first_call_ms = 1e3 * (time.perf_counter() - started)
    exact = _run_both_ways(in_torch, [x.detach().double().requires_grad_() for x in inputs], dy.double())
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True)]
    return {
        "first_call_ms": first_call_ms,
        "error": errors[0],
        "gradient_error": max(errors[1:]),
        "limit": ERROR_LIMITS[dtype],
        "passed": max(errors) <= ERROR_LIMITS[dtype],
    }


def _call(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Check an op and time it."""
    checked = check(op, head_size, dtype, device)
    function, _ = OPS[op]
    inputs, dy = _inputs(op, TIMED_SHAPES[device], head_size, dtype, device)
    constants = [x.detach() for x in inputs]
    median_ms = timing.median_ms if device == "cuda" else lambda call: statistics.median(timing.cpu_ms(call, 3))
    return {
        "op": op,
        "head_size": head_size,
        "dtype": str(dtype).removeprefix("torch."),
        **checked,
        "forward_ms": median_ms(lambda: function(*constants)),
        "forward_backward_ms": median_ms(lambda: _run_both_ways(function, inputs, dy)),
    }


def _inputs(
    op: str, sizes: tuple[int, int, int], head_size: int | None, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """Return the arguments of an op as leaves, and dy: like a model's, and the same in every run on any machine."""
    size = head_size or HEAD_SIZES[0]  # of an op without heads, the channels of as many
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        given = cases.given_for(cases.Case(op, (*sizes, size, size), dtype), "cpu")
    return [x.detach().to(device).requires_grad_() for x in given.inputs], given.dy.to(device)


def _run_both_ways(function: Callable[..., Any], inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """Return y and the gradients of the inputs."""
    y, _ = function(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


_KERNELS = {
    "op": "{op}", "head size": "{head_size}", "direction": "{direction}", "backend": "{backend}",
    "compile ms": "{compile_ms:.0f}", "disk ms": "{disk_ms:.2f}", "memory ms": "{memory_ms:.3f}",
    "registers": "{registers}", "spill B": "{spill_bytes}", "shared B": "{shared_bytes}",
}  # fmt: skip
_CALLS = {
    "op": "{op}", "head size": "{head_size}", "dtype": "{dtype}", "error y": "{error:.1e}",
    "error grads": "{gradient_error:.1e}", "limit": "{limit:.0e}", "first call ms": "{first_call_ms:.0f}",
    "forward ms": "{forward_ms:.3f}", "fwd + bwd ms": "{forward_backward_ms:.3f}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    terminal.say(f"rwkv_jit on {result['device']}, {result['compiler'] or 'no compiler'}\n")
    if result["kernels"]:
        first = result["kernels"][0]
        target = first["arch"] if first["target"] == first["arch"] else f"{first['arch']} as PTX {first['target']}"
        terminal.say(f"Kernels compiled for {target}, bfloat16, in an empty cache; then found on disk and in memory")
        if target != first["arch"]:
            terminal.say("(the driver makes the machine code from PTX, so its registers are not known here)")
        if not result["on_gpu"]:
            terminal.say("(there is no GPU here: they are compiled, not run)")
        terminal.records(_KERNELS, result["kernels"], ("shared B", "spill B", "registers"))
        print()
    else:
        terminal.say(f"No CUDA kernel can be compiled here: {result['missing']}\n")

    ran = "the kernels" if result["on_gpu"] else "the reference in plain torch, as the tensors are on the CPU"
    checked, timed = ("(B, T, H) = ({}, {}, {})".format(*result[f"{name}_shape"]) for name in ("checked", "timed"))
    terminal.say(f"Calls run {ran}.")
    terminal.say(f"Relative L2 error against float64 at {checked}; median time of a call at {timed}")
    # On the CPU a first call compiles nothing, so its time would say nothing.
    columns = {title: form for title, form in _CALLS.items() if result["on_gpu"] or title != "first call ms"}
    terminal.records(columns, result["calls"], ("limit",))
    print()
    if result["on_gpu"]:
        terminal.say("A first call compiles forward and backward in parallel, loads them and runs both.")
    terminal.say(f"Errors are {'within' if result['passed'] else 'ABOVE'} the limits.")
    terminal.say(
        "Your kernel cache was not touched: {path}, {entries} kernels, {bytes} bytes.".format(**result["cache"])
    )
