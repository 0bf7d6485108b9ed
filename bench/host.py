"""Known calls, eager and compiled: what they take of the host, and what of the GPU."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench import layers, models, timing
from bench.training import told
from rwkv_jit.desk import bench, figures, inputs, terminal
from rwkv_jit.desk.inputs import OPS, OURS, UPDATE, USUAL_PHASES, Case

Call = Callable[[], Any]
_BUDGET_MS = 400.0  # of the rounds of a call
_WORKS = [work for work in layers.WORKS if not work.startswith("RWKV7") and "cross_entropy" not in work]
METHODS = (
    "Host: until a known call has returned, the fastest of rows of calls. GPU: medians by CUDA events, eager and "
    "compiled in turns, with a cold L2 cache. Compiled: torch.compile of the function alone, as torch sets it."
)
_COLUMNS = {
    "call": "{call}", "phase": "{phase}", "host us": "{eager_us:.1f}", "compiled host us": "{compiled_us:.1f}",
    "ms": "{eager_ms:.4f}", "compiled ms": "{compiled_ms:.4f}", "compiled / eager": "{ratio:.3f}",
}  # fmt: skip


class _Empty(torch.autograd.Function):
    """What torch itself takes for a function of six inputs, which saves them and returns a gradient of each."""

    @staticmethod
    def forward(ctx: Any, *several: Tensor) -> Tensor:
        ctx.save_for_backward(*several)
        return torch.empty_like(several[0])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    names = [*OPS, *_WORKS]
    parser.add_argument("--op", action="append", choices=names, help="only this one (may be repeated; default: all)")
    parser.add_argument("--shape", metavar="B,T,H,N", help="instead of 8,4096,32,128; layers have H N channels")
    parser.add_argument("--eager", action="store_true", help="compile nothing")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure and return a row for each call and phase. Raises ValueError where a shape cannot be read."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench.use_one_thread()
    cases = _cases(parsed.op, parsed.shape or ("8,4096,32,128" if device == "cuda" else "1,4,1,64"))
    rows = [told(_row(*each, device)) for each in _calls(cases, device, not parsed.eager)]
    return {"env": bench.environment(), "device": device, "rows": rows}


def _cases(named: list[str] | None, text: str) -> list[Any]:
    """Return the ops and the works of a layer in their phases; timex, whose shape is another one, where it is named."""
    batch, tokens, heads, size = inputs.read_shape(text)
    cases: list[Any] = [
        Case(op, inputs.shape_of(op, text, phase), torch.bfloat16, phase)
        for op in named or OPS if op in OPS and (named or op != "timex")
        for phase in (*USUAL_PHASES, UPDATE) if phase in inputs.phases_of(op)
    ]  # fmt: skip
    shape = batch, tokens, heads * size
    works = [work for work in named or _WORKS if work in _WORKS]
    return cases + [layers.Work(work, shape, torch.bfloat16, phase) for work in works for phase in USUAL_PHASES]


def _calls(cases: list[Any], device: str, is_compiled: bool) -> Iterator[tuple[str, str, Call, Call | None]]:
    """Yield calls with their names and phases, one after another, as memory is for one: eager, and compiled."""
    x = torch.ones(64, device=device)
    several = [torch.ones(64, device=device, requires_grad=True) for _ in range(6)]
    yield "torch.add(x, x, out=x)", "forward", lambda: torch.add(x, x, out=x), None
    function: Any = _Empty.apply
    yield "empty", USUAL_PHASES[1], lambda: torch.autograd.grad(function(*several), several, x), None
    for case in cases:
        is_op = isinstance(case, Case)
        measured = inputs.given_for(case, device=device) if is_op else layers.calls_for(case, device)
        ours = measured.functions[OURS, "auto" if is_op else "kernels"]
        by = [ours, torch.compile(ours)] if is_compiled else [ours]
        calls = [inputs.call_of(each, measured, case.phase) for each in by]
        yield case.op, case.phase, calls[0], calls[1] if is_compiled else None


def _row(name: str, phase: str, eager: Call, compiled: Call | None, device: str) -> dict[str, Any]:
    figures_of = dict.fromkeys(("eager_us", "compiled_us", "eager_ms", "compiled_ms", "ratio", "skipped"))
    row: dict[str, Any] = {"call": name, "phase": phase, **figures_of}
    calls = {"eager": eager} | ({} if compiled is None else {"compiled": compiled})
    with models.survived(row):
        for call in calls.values():
            call(), call()
        if device == "cpu":
            return row | {f"{by}_ms": statistics.median(figures.cpu_ms(call)) for by, call in calls.items()}
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        turns = {by: timing.Turns([call], in_graph=False, flush=flush) for by, call in calls.items()}
        times = figures.interleaved([each.ms for each in turns.values()], _BUDGET_MS)
        for (by, each), taken in zip(turns.items(), times, strict=True):
            if isinstance(taken, Exception):
                raise taken
            row |= {f"{by}_us": each.host_us, f"{by}_ms": statistics.median(taken)}
        if compiled is not None:
            row["ratio"] = row["compiled_ms"] / row["eager_ms"]
    return row


def show(result: dict[str, Any]) -> None:
    """Print a table, and what was left out."""
    terminal.say(bench.machine(result["env"]) if result["device"] == "cuda" else bench.CPU_NOTE)
    terminal.records(_COLUMNS, [row for row in result["rows"] if row["skipped"] is None])
    for row in result["rows"]:
        if row["skipped"] is not None:
            terminal.say(f"  skipped: {row['call']}, {row['phase']}: {row['skipped']}")
    terminal.say(f"\n{METHODS}")
