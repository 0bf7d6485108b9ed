"""The history of a kernel: the forms it went through, each timed beside the one before and beside the op's kernels.

The forms are one template with parameters, `<op>_history.cu` beside this file. No call of an op takes them.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import tensors, torch_op
from rwkv_jit.call.prepared import Known
from rwkv_jit.desk import bench, terminal, versions
from rwkv_jit.desk.bench import cases, measure, timing
from rwkv_jit.desk.bench.cases import Case
from rwkv_jit.kernels import kernel, template
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.launch import Launch, Value
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.ops import timex as timex_module
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

Shape = tuple[int, ...]
_OF_KERNEL = {
    "kernel": "name", "parameters": "parameters", "registers": "registers", "spill_bytes": "spill_bytes",
    "shared_bytes": "shared_bytes",
}  # fmt: skip


class Step(NamedTuple):
    """A form of a kernel: the parameters that are other ones than in the step before, or a backend of the op.

    A rival is named as a backend too.
    """

    change: str
    parameters: Mapping[str, Parameter] = {}
    backend: str | None = None


class Form(NamedTuple):
    """A step on some inputs, ready to run."""

    kernel: kernel.Kernel | None  # None where it is torch's
    forward: Callable[[], Tensor]
    both: Callable[[], Any] | None = None  # forward and backward, where there is one


class History(NamedTuple):
    """What an op's history is measured with."""

    shapes: tuple[Shape, ...]
    make_inputs: Callable[[Shape, torch.dtype], list[Tensor]]
    steps: Callable[[Shape, torch.dtype], list[Step]]
    of_template: Callable[[kernel.Kernel, Sequence[Tensor]], Form]
    of_backend: Callable[[str, Sequence[Tensor]], Form]
    reference: Callable[..., Tensor]


def _addresses(arrays: Sequence[Tensor]) -> list[tuple[str, Value]]:
    """Return the first arguments of a kernel: the addresses of these, in their order."""
    return [("Q", Value(index)) for index in range(len(arrays))]


# ---- wkv5 --------------------------------------------------------------------------------------------------------

_LEAST_LOG_DECAY = -1.0  # of a step, which is the bound that the op's calls give


def _wkv5_inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Return r, k, v, w and u, with w in float32 and decays as models have them before they are trained."""
    r, k, v, _, u = (x.detach() for x in bench.make_inputs("wkv5", shape, dtype))
    return [r, k, v, torch.linspace(-6, -1, u.numel(), device=u.device).view(u.shape), u]


def _wkv5_steps(shape: Shape, dtype: torch.dtype) -> list[Step]:
    head_size, storage = shape[3], tensors.STORAGE[dtype]
    first: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "T_IO": storage, "T_Y": "fp32", "NUM_THREADS": 32, "VECTOR": 1, "ATOMICS": True,
        "STAGED": False,
    }  # fmt: skip
    vector, threads = math.gcd(head_size, 4), min(head_size, 1024)
    return [
        Step("32 threads a block, one a value row; every product added to y (fp32) by an atomic", first),
        Step("no atomics: sums in registers", {"ATOMICS": False, "T_Y": storage}),
        Step(f"loads of {vector} channels", {"VECTOR": vector}),
        Step(f"{threads} threads a block: one per channel of a head", {"NUM_THREADS": threads}),
        Step("r, k, u, w staged in shared memory", {"STAGED": True}),
        Step("the op's recurrent kernel", backend="recurrent"),
        Step("the op's chunked kernel: tensor cores", backend="chunked"),
    ]


def _wkv5_of_template(compiled: kernel.Kernel, given: Sequence[Tensor]) -> Form:
    """Return a form of the template. It takes the factors of a step, as the kernels did: they are not timed."""
    r, k, v, w, u = given
    batch, tokens, heads, head_size = r.shape
    y = torch.empty(r.shape, dtype=torch.float32 if compiled.parameters["ATOMICS"] else r.dtype, device=r.device)
    arrays, threads = (r, k, v, torch.exp(-torch.exp(w)), u, y), int(compiled.parameters["NUM_THREADS"])
    strides = [("3q", x.stride()[:3]) for x in (r, k, v)]
    launch = Launch(
        compiled, "wkv5_history", r.device.index, (batch * heads, math.ceil(head_size / threads), 1), (threads, 1, 1),
        [*_addresses(arrays), *strides, ("q", tokens), ("q", heads), ("f", 1.0)],
    )  # fmt: skip

    def forward() -> Tensor:
        tensors.launch(launch, [x.data_ptr() for x in arrays])
        return y

    return Form(compiled, forward)


def _wkv5_of_backend(backend: str, given: Sequence[Tensor]) -> Form:
    """Return what calls of the op run: the forward alone as they prepare it, and a call with gradients."""
    op, gpu = OPS["wkv5"], tensors.gpu(given[0].device.index)
    options = torch_op.Options(1.0, op.decay, op.state_layout, 64, None, None, backend, is_chosen=False)
    options = torch_op.chosen(op, given, None, _LEAST_LOG_DECAY, options, training=False)
    problem = torch_op.problem_of(op, given, None, None, options, False, False, gpu)
    known = Known(problem, (*given, None, None), {})
    (compiled,) = kernel.get_all(directions.forward(problem).requests(gpu))  # one kernel, as the decays are bounded
    leaves, dy = [x.detach().requires_grad_() for x in given], torch.randn_like(given[2])

    def both() -> Any:
        y, _ = bench.OPS[op.name](*leaves, backend=backend, decay_bound=_LEAST_LOG_DECAY)
        return torch.autograd.grad(y, leaves, dy)

    return Form(compiled, lambda: known.run(given, None, None)[0], both)


# ---- timex -------------------------------------------------------------------------------------------------------


def _timex_inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Return w and k: the heads' channels are one after another."""
    return [x.detach() for x in bench.make_inputs("timex", shape, dtype)]


def _timex_steps(shape: Shape, dtype: torch.dtype) -> list[Step]:
    first: dict[str, Parameter] = {
        "T_IO": tensors.STORAGE[dtype], "STAGED": False, "OUTPUTS": 1, "BATCHES": 1, "PAIRED": False,
        "NUM_THREADS": 256,
    }  # fmt: skip
    return [
        Step("a thread per output", first),
        Step("w and k staged in shared memory", {"STAGED": True}),
        Step("four outputs a thread, loads of four", {"OUTPUTS": 4, "NUM_THREADS": 192}),
        Step("eight batches a thread", {"BATCHES": 8}),
        Step("equal work per thread: outputs from both ends", {"PAIRED": True, "NUM_THREADS": 96}),
        Step("the op's tiles: tensor cores", backend="tiles"),
        Step("the op's transforms in shared memory", backend="transforms"),
        Step("torch.fft", backend="fft"),
        Step("torch's conv1d, a group for each channel", backend="conv1d"),
    ]


def _timex_of_template(compiled: kernel.Kernel, given: Sequence[Tensor]) -> Form:
    w, k = given
    (batch, channels, tokens), out = k.shape, torch.empty_like(k, memory_format=torch.contiguous_format)
    batches, threads = int(compiled.parameters["BATCHES"]), int(compiled.parameters["NUM_THREADS"])
    pitch = -(-tokens // 4) * 4
    shared_bytes = 4 * (pitch + 4 + batches * pitch) if compiled.parameters["STAGED"] else 0
    limit = Gpu(compiled.arch).shared_limit
    if shared_bytes > limit:
        raise UnsupportedConfigError(f"needs {shared_bytes} bytes of shared memory, {compiled.arch} has {limit}")
    launch = Launch(
        compiled, "timex_history", k.device.index, (channels, -(-batch // batches), 1), (threads, 1, 1),
        [*_addresses((w, k, out)), ("q", batch), ("q", channels), ("i", tokens)], shared_bytes,
    )  # fmt: skip

    def forward() -> Tensor:
        tensors.launch(launch, (w.data_ptr(), k.data_ptr(), out.data_ptr()))
        return out

    return Form(compiled, forward)


def _timex_of_backend(backend: Any, given: Sequence[Tensor]) -> Form:
    """Return what calls of the op run, or of torch's convolution."""

    def run(w: Tensor, k: Tensor) -> Tensor:
        if backend == "conv1d":
            return torch.nn.functional.conv1d(
                torch.nn.functional.pad(k, (k.shape[2] - 1, 0)), w.unsqueeze(1), groups=k.shape[1]
            )
        return timex_module.timex(w, k, backend=backend)

    w, k = given
    compiled = None
    if backend in ("tiles", "transforms"):
        gpu = tensors.gpu(k.device.index)
        batch, channels, tokens = k.shape
        timex_module.choose(backend, k.dtype, batch, tokens, lambda: gpu)
        types = {"w": tensors.STORAGE[w.dtype], "k": tensors.STORAGE[k.dtype]}
        problem = Problem(OPS["timex"], gpu, types, B=batch, T=tokens, C=channels, backend=backend)
        compiled = kernel.get_all(directions.forward(problem).requests(gpu))[0]
    leaves, dy = [x.detach().requires_grad_() for x in given], torch.randn_like(k)

    def both() -> Any:
        return torch.autograd.grad(run(*leaves), leaves, dy)

    return Form(compiled, lambda: run(w, k), both)


HISTORIES = {
    "wkv5": History(
        # A prompt, as it was profiled, and training.
        ((1, 54, 32, 64), (8, 4096, 32, 64)),
        _wkv5_inputs,
        _wkv5_steps,
        _wkv5_of_template,
        _wkv5_of_backend,
        lambda *given: bench.REFERENCES["wkv5"](*given)[0],
    ),
    "timex": History(
        ((32, 768, 12, 64),),  # 768 tokens, and as many channels
        _timex_inputs,
        _timex_steps,
        _timex_of_template,
        _timex_of_backend,
        lambda *given: bench.REFERENCES["timex"](*given)[0],
    ),
}


# ---- measuring ---------------------------------------------------------------------------------------------------


@cache
def _template(op: str) -> template.Template:
    return template.read(Path(__file__).with_name(f"{op}_history.cu"))


def requests(op: str, shape: Shape, dtype: torch.dtype, arch: str, also: tuple[str, ...] = ()) -> list[kernel.Request]:
    """Return the kernels of the steps that are forms of the op's history template, in their order."""
    kernels: list[kernel.Request] = []
    parameters: dict[str, Parameter] = {}
    for step in HISTORIES[op].steps(shape, dtype):
        if step.backend is None:
            parameters = {**parameters, **step.parameters}
            kernels.append(kernel.Request(_template(op), parameters, arch, also))
    return kernels


def prepare(op: str, given: Sequence[Tensor]) -> list[tuple[Step, Form | UnsupportedConfigError]]:
    """Return every step with its form for these inputs, or with what is in the way of it."""
    history, first = HISTORIES[op], given[0]
    shape, device = tuple(first.shape), first.device.index
    compiled = iter(kernel.get_all(requests(op, shape, first.dtype, tensors.arch(device), tensors.also(device))))

    def form(step: Step) -> Form | UnsupportedConfigError:
        try:
            if step.backend is None:
                return history.of_template(next(compiled), given)
            return history.of_backend(step.backend, given)
        except UnsupportedConfigError as error:
            return error

    return [(step, form(step)) for step in history.steps(shape, first.dtype)]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure.

    Returns
    -------
    dict
        env : the environment report; rows : one dict per op, shape and step, with op, shape, dtype, step (from 1),
        change, kernel (its template), parameters, registers, spill_bytes and shared_bytes (None where it is torch's),
        forward_ms, in_graph, speedup (of the forward, to the step before) and speedup_to_first, forward_backward_ms
        (None where the form has no backward), error (of y, over at most 300 tokens of a row); obstacle is None, or what
        is in the way of a step, which has nothing else of these then.

    Raises
    ------
    ValueError
        There is no GPU, or the shape cannot be read.
    """
    ops = list(dict.fromkeys(arguments.op or HISTORIES))
    shape = None if arguments.shape is None else bench.read_shape(arguments.shape)
    bench.check_gpu()
    dtype = bench.DTYPES[arguments.dtype]
    measured = [(op, sizes) for op in ops for sizes in ([shape] if shape else HISTORIES[op].shapes)]
    rows = [row for op, sizes in measured for row in _measure(op, sizes, dtype)]
    return {"env": versions.env_report(), "rows": rows}


def _measure(op: str, shape: Shape, dtype: torch.dtype) -> list[dict[str, Any]]:
    history, case = HISTORIES[op], Case(op, (*shape[:4], shape[3]), dtype)  # type: ignore[arg-type]
    given = history.make_inputs(shape, dtype)

    def beginning(name: str, x: Tensor) -> Tensor:
        return measure.beginning(case, name, x, min(shape[1], measure.MOST_TOKENS)).double()

    exact = history.reference(*map(beginning, cases.names_of(op), given))
    rows: list[dict[str, Any]] = []
    times: list[float] = []
    for number, (step, form) in enumerate(prepare(op, given), 1):
        rows.append({
            "op": op, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "step": number,
            "change": step.change, "obstacle": None,
        })  # fmt: skip
        if not isinstance(form, Form):
            rows[-1]["obstacle"] = str(form)
            continue
        forward_ms, in_graph = _time(form.forward, timing.is_small(math.prod(shape)))
        times.append(forward_ms)
        rows[-1] |= {
            **{
                column: None if form.kernel is None else getattr(form.kernel, attribute)
                for column, attribute in _OF_KERNEL.items()
            },
            "forward_ms": forward_ms,
            "in_graph": in_graph,
            "speedup": times[-2:][0] / forward_ms,
            "speedup_to_first": times[0] / forward_ms,
            "forward_backward_ms": None if form.both is None else _time(form.both, False)[0],
            "error": float((beginning("y", form.forward()) - exact).norm() / exact.norm()),
        }
    return rows


def _time(call: Callable[[], Any], in_graph: bool) -> tuple[float, bool]:
    """Return the median time of a call, and whether it was taken in a CUDA graph."""
    call()
    turns = timing.Turns([call], in_graph)
    return statistics.median(turns.ms() for _ in range(20)), turns.in_graph


# ---- printing ----------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Print a measurement."""
    terminal.say(bench.machine(result["env"]))
    head = (
        "step", "what is new", "forward ms", "in a graph", "speedup", "to the first", "fwd + bwd ms", "error",
        "registers", "spill B", "shared B",
    )  # fmt: skip
    cases = dict.fromkeys((row["op"], tuple(row["shape"]), row["dtype"]) for row in result["rows"])
    for op, shape, dtype in cases:
        rows = [row for row in result["rows"] if (row["op"], tuple(row["shape"]), row["dtype"]) == (op, shape, dtype)]
        terminal.say(f"\n{op} ({', '.join(map(str, shape))}) {dtype}")
        terminal.table(head, [(row["step"], row["change"], *_cells(row)) for row in rows if row["obstacle"] is None])
        for row in rows:
            if row["obstacle"] is not None:
                terminal.say(f"Left out: {row['step']}, {row['change']}: {row['obstacle']}")
    terminal.say(
        "\nSpeedup of the forward to the step before, and to the first. Error of y: relative L2 against float64."
    )


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    both = row["forward_backward_ms"]
    return (
        f"{row['forward_ms']:.4f}", "yes" if row["in_graph"] else "no", f"{row['speedup']:.2f}",
        f"{row['speedup_to_first']:.2f}", "-" if both is None else f"{both:.4f}", f"{row['error']:.1e}",
        *["-" if row[name] is None else row[name] for name in ("registers", "spill_bytes", "shared_bytes")],
    )  # fmt: skip
