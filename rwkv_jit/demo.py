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
from torch.nn.functional import logsigmoid, normalize, softplus

from rwkv_jit import ahead, bench, env, identity, kernel, machine, report
from rwkv_jit.cache import installed
from rwkv_jit.errors import NvrtcNotFoundError
from rwkv_jit.ops import table

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

    Returns
    -------
    dict
        device, compiler, missing (what CUDA kernels lack here, or None); kernels: one record per compiled kernel, of
        timex without a head_size;
        calls: one record per op, head size and dtype; checked_shape, timed_shape (B, T, H); cache: path, entries and
        bytes of the user's own; passed: whether every error is below its limit.
    """
    device = "cuda" if machine.is_available() else "cpu"
    compiled_by = missing = None
    compiles: list[list[Job]] = []
    try:
        compiled_by = f"NVRTC {identity.version()}"
        compiles = _compiles(default_arch())
    except NvrtcNotFoundError as error:
        missing = str(error)
    calls: list[Job] = [
        partial(_call, op, size, dtype, device) for op in OPS for size in _head_sizes(op) for dtype in DTYPES
    ]
    results: list[list[dict[str, Any]]] = []
    with report.progress("compiling, then calling") as tell:
        finished, total = 0, sum(map(len, [*compiles, calls]))
        for jobs in [*compiles, calls]:
            results.append([])
            with empty_cache():  # wkv5 and wkv6 share a kernel
                for job in jobs:
                    if tell:
                        tell(finished, total)
                    results[-1].append(job())
                    finished += 1
    *of_compiles, of_calls = results
    cache = machine.cache_info()
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
            for direction in ahead.DIRECTIONS
        ]
        for op in table.OPS
    ]


def _compile(op: str, head_size: int | None, direction: str, arch: str | None) -> dict[str, Any]:
    """Ask for the kernel of a direction; those of timex go by batch and tokens, and are those of the timed calls."""
    decay = bench.OPTIONS.get(op, {}).get("decay")
    batch, tokens = TIMED_SHAPES["cuda"][:2] if op == "timex" else (None, None)
    made = ahead.named(
        op, head_size, None, torch.bfloat16, arch, direction, "auto", decay, None, None, tokens, batch, {}
    )
    return _ask_for(made.request, op=op, head_size=head_size, direction=direction, backend=made.problem.backend)


def _ask_for(request: kernel.Request, **known: Any) -> dict[str, Any]:
    """Ask for one kernel three times: it is compiled, read from disk, found in memory."""

    def ask() -> tuple[kernel.Kernel, float]:
        started = time.perf_counter()
        found = kernel.get(request)
        return found, 1e3 * (time.perf_counter() - started)

    compiled, compile_ms = ask()
    kernel.forget()
    from_disk, disk_ms = ask()
    from_memory, memory_ms = ask()
    return {
        **known,
        "arch": compiled.arch,
        "target": compiled.target,
        "origins": [compiled.origin, from_disk.origin, from_memory.origin],
        "compile_ms": compile_ms,
        "disk_ms": disk_ms,
        "memory_ms": memory_ms,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "shared_bytes": compiled.shared_bytes,
    }


def check(op: str, head_size: int | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Call an op, and compare y and its gradients with float64.

    Returns
    -------
    dict
        first_call_ms; error and gradient_error, relative in L2; limit; passed.
    """
    function, in_torch = OPS[op]
    inputs, dy = _inputs(op, CHECKED_SHAPES[device], head_size, dtype, device)
    started = time.perf_counter()
    results = _run_both_ways(function, inputs, dy)
    if device == "cuda":
        torch.cuda.synchronize()
    first_call_ms = 1e3 * (time.perf_counter() - started)
    exact = _run_both_ways(in_torch, [x.detach().double().requires_grad_() for x in inputs], dy.double())
    errors = [_relative_error(x, y) for x, y in zip(results, exact, strict=True)]
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
    return {
        "op": op,
        "head_size": head_size,
        "dtype": str(dtype).removeprefix("torch."),
        **checked,
        "forward_ms": _median_ms(lambda: function(*constants), device),
        "forward_backward_ms": _median_ms(lambda: _run_both_ways(function, inputs, dy), device),
    }


def _inputs(
    op: str, shape: tuple[int, int, int], head_size: int | None, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """Return the arguments of an op as leaves, with decays and a correction like a trained model's, and dy."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    if head_size is None:  # channels of as many heads
        batch, tokens, channels = *shape[:2], shape[2] * HEAD_SIZES[0]
        k, v, dy = (normal(batch, tokens, channels) for _ in range(3))
        without_heads = (torch.linspace(-6, 1, channels), normal(channels), k, v)
        return [x.to(device, dtype).requires_grad_() for x in without_heads], dy.to(device, dtype)
    if op == "timex":
        batch, tokens, heads = shape
        sizes = (heads * head_size, tokens), (batch, heads * head_size, tokens)
        w, k, dy = normal(*sizes[0]), normal(*sizes[1]), normal(*sizes[1])
        return [x.to(device, dtype).requires_grad_() for x in (w, k)], dy.to(device, dtype)
    r, k, v, x, direction, rate, dy = (normal(*shape, head_size) for _ in range(7))
    kk = normalize(direction, dim=-1)
    given = {
        "wkv5": (r, k, v, -softplus(-x[0, 0]) - 0.5, normal(shape[2], head_size)),
        "wkv6": (r, k, v, -softplus(-x) - 0.5, normal(shape[2], head_size)),
        "wkv7": (r, x, k, v, -kk, kk * torch.sigmoid(rate)),
        "gla": (r, k, v, logsigmoid(x) / 16),
        "linear_attention": (r, k, v),
    }[op]
    return [x.to(device, dtype).requires_grad_() for x in given], dy.to(device, dtype)


def _run_both_ways(function: Callable[..., Any], inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """Return y and the gradients of the inputs."""
    y, _ = function(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


def _relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def _median_ms(function: Callable[[], object], device: str) -> float:
    if device == "cpu":
        return statistics.median(_wall_ms(function) for _ in range(3))
    for _ in range(3):
        function()
    spans = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in spans]
    return statistics.median(times)


def _wall_ms(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


def show(result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    report.say(f"rwkv_jit on {result['device']}, {result['compiler'] or 'no compiler'}\n")
    if result["kernels"]:
        first = result["kernels"][0]
        target = first["arch"] if first["target"] == first["arch"] else f"{first['arch']} as PTX {first['target']}"
        report.say(f"Kernels compiled for {target}, bfloat16, in an empty cache; then found on disk and in memory")
        if target != first["arch"]:
            report.say("(the driver makes the machine code from PTX, so its registers are not known here)")
        if not result["on_gpu"]:
            report.say("(there is no GPU here: they are compiled, not run)")
        report.table(
            (
                "op", "head size", "direction", "backend", "compile ms", "disk ms", "memory ms", "registers", "spill B",
                "shared B",
            ),
            [
                (
                    record["op"], record["head_size"] or "-", record["direction"], record["backend"],
                    f"{record['compile_ms']:.0f}", f"{record['disk_ms']:.2f}", f"{record['memory_ms']:.3f}",
                    record["registers"], record["spill_bytes"], record["shared_bytes"],
                )
                for record in result["kernels"]
            ],
            ("shared B", "spill B", "registers"),
        )  # fmt: skip
        print()
    else:
        report.say(f"No CUDA kernel can be compiled here: {result['missing']}\n")

    ran = "the kernels" if result["on_gpu"] else "the reference in plain torch, as the tensors are on the CPU"
    checked, timed = ("(B, T, H) = ({}, {}, {})".format(*result[f"{name}_shape"]) for name in ("checked", "timed"))
    report.say(f"Calls run {ran}.")
    report.say(f"Relative L2 error against float64 at {checked}; median time of a call at {timed}")
    # On the CPU a first call compiles nothing, so its time would say nothing.
    first_call = ("first call ms",) if result["on_gpu"] else ()
    report.table(
        ("op", "head size", "dtype", "error y", "error grads", "limit", *first_call, "forward ms", "fwd + bwd ms"),
        [
            (
                call["op"], call["head_size"] or "-", call["dtype"], f"{call['error']:.1e}",
                f"{call['gradient_error']:.1e}", f"{call['limit']:.0e}",
                *[f"{call['first_call_ms']:.0f}" for _ in first_call], f"{call['forward_ms']:.3f}",
                f"{call['forward_backward_ms']:.3f}",
            )
            for call in result["calls"]
        ],
        ("limit",),
    )  # fmt: skip
    print()
    if first_call:
        report.say("A first call compiles forward and backward side by side, loads them and runs both.")
    report.say(f"Errors are {'within' if result['passed'] else 'ABOVE'} the limits.")
    cache = result["cache"]
    report.say(
        f"Your kernel cache was not touched: {cache['path']}, {cache['entries']} kernels, {cache['bytes']} bytes."
    )
