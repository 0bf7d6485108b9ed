"""Times of the ops, of their updates and of a layer's work, beside plain torch on the same inputs.

The folder `bench` of a checkout measures other libraries too, and keeps what it finds.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import rwkv_jit
from rwkv_jit.desk import terminal
from rwkv_jit.desk import versions as own_machine
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.plain import derived_references, reference
from rwkv_jit.schedules.derived_table import ALL

Row = dict[str, Any]
Function = Callable[..., Any]
Who = tuple[str, str]  # and by what: a backend, or what torch has
OPS: dict[str, Function] = {op: getattr(rwkv_jit, op) for op in ALL}
REFERENCES: dict[str, Function] = {
    op: getattr(reference if own.through is None else derived_references, f"{op}_ref") for op, own in ALL.items()
}
for _functions in (OPS, REFERENCES):  # timex answers as the others do
    _functions["timex"] = lambda *x, _timex=_functions["timex"], **options: (_timex(*x, **options), None)
WITH_HEADS = tuple(name for name, op in ALL.items() if op.has_heads)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIONS: dict[str, dict[str, Any]] = {  # as in the models, where that is not the default
    "wkv7": {"decay": "sigmoid"},
    **{name: {"qk_norm": True} for name, op in ALL.items() if "qk_norm" in op.traits},
}
OURS, UPDATE, PACKED = "rwkv_jit", "update", 16  # the last one is a number of sequences
PHASES = ("forward", "backward", "forward+backward", "decode", "prefill", UPDATE)
USUAL_PHASES, OF_ONE_TOKEN, WITH_STATES = PHASES[:3:2], ("decode", UPDATE), ("decode", "prefill")
# Kinds of inputs. One head is one of one sequence. States are float32, in the layout that the op takes by itself.
KINDS = {
    "usual": "", "strong": "strong decays", "one-strong": "one head's decays strong", "packed": "16 packed",
    "bf16-states": "bfloat16 states", "kv-states": "states [K, V]", "vk-states": "states [V, K]",
    "bf16-kv-states": "bfloat16 states [K, V]", "bf16-vk-states": "bfloat16 states [V, K]",
}  # fmt: skip
# The works of a layer with their inputs: t has all tokens, h has them by heads, c and digits have channels alone.
WORKS = {
    "token_shift, 6 mixes": "t6", "token_shift, 1 mix": "t1", "prepare_keys": "hhhhhcccc", "gated_norm": "htcchhhc",
    "gated": "tt", "activate": "t", "cross_entropy": "", "linear_cross_entropy": "", "RWKV7TimeMix": "tt",
    "RWKV7TimeMix, products": "", "RWKV7Block": "tt", "RWKV7Block, products": "",
}  # fmt: skip
CPU_NOTE = "CPU reference; not the speed of the kernels."
METHODS = (
    "Median and quartiles of the GPU's time by CUDA events, in rounds over everyone, with a cold L2 cache, clocks as "
    "found. Floor: the fewest bytes at the bandwidth of a copy in the same run. Host: until a call has returned; a † "
    "marks where it takes longer than the GPU. Peak: memory of a call, a backward with its forward, and inputs. Error: "
    "relative L2 against float64, the largest of all results, on 300 tokens of a row, or 64 rows of an update."
)


class Case(NamedTuple):
    """A call that is measured: a decode takes one token and a state, an update one token of each row and a pool."""

    op: str  # or a work of a layer
    shape: tuple[int, ...]  # B, T, H, K, V; of an op without heads its channels are those of all; of a work B, T, C
    dtype: torch.dtype
    phase: str = "forward"
    kind: str = "usual"

    @property
    def shown(self) -> list[int]:
        """The shape as it is written: [B, T, H, K, V]; of wkv4 [B, T, C], and of timex [B, C, T]."""
        batch, tokens, channels = self.shape[0], self.shape[1], self.shape[2] * self.shape[-1]
        return {"wkv4": [batch, tokens, channels], "timex": [batch, channels, tokens]}.get(self.op, list(self.shape))

    def check(self) -> Case:
        """Return the case. Raises ValueError where the op has no such phase, or no such inputs."""
        if self.phase not in phases_of(self.op):
            expected = f"{', '.join(phases_of(self.op))} for {self.op}"
            raise ValueError(f"--phase: expected one of {expected}, got {self.phase}")
        op, is_usual = ALL[self.op], self.kind == "usual"
        has_kind = op.has_heads and f"{op.state_layout}-" not in self.kind
        has_map = op.decay != "none" and op.through is None
        if not is_usual and (not has_kind or ("strong" in self.kind and not has_map)):
            raise ValueError(f"--inputs: {self.op} has none that are {self.kind}")
        if self.kind.endswith("states") and self.phase != UPDATE:
            raise ValueError(f"--inputs: {self.kind} are only for updates, not for {self.phase}")
        if self.kind == "packed" and (self.shape[0] != 1 or self.shape[1] < PACKED or self.phase == "decode"):
            raise ValueError(f"--inputs: packed ones are a batch of 1 with {PACKED} or more tokens, and no decode")
        return self


def phases_of(op: str) -> Sequence[str]:
    """Return the phases that an op has."""
    return PHASES[:3] if op == "timex" else PHASES[:5] if op == "wkv4" else PHASES


def read_shape(text: str, counts: Sequence[int] = (4,), forms: str = "B,T,H,N") -> tuple[int, ...]:
    """Return so many positive numbers from a command line. Raises ValueError."""
    parts = text.split(",")
    if len(parts) not in counts or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ValueError(f"--shape: expected positive numbers {forms}, got {text!r}")
    return tuple(map(int, parts))


def shape_of(op: str, text: str, phase: str = "forward") -> tuple[int, int, int, int, int]:
    """Return B, T, H, K, V from a command line, with T = 1 for a decode and an update. Raises ValueError."""
    forms = {"wkv4": "B,T,C or B,T,H,N", "timex": "B,C,T or B,T,H,N"}
    sizes = read_shape(text, (3, 4) if op in forms else (4, 5), f"{forms.get(op, 'B,T,H,N or B,T,H,K,V')} for {op}")
    if len(sizes) == 3:
        sizes = (sizes[0], sizes[1], 1, sizes[2]) if op == "wkv4" else (sizes[0], sizes[2], 1, sizes[1])
    return sizes[0], 1 if phase in OF_ONE_TOKEN else sizes[1], sizes[2], sizes[3], sizes[-1]


def options_of(op: str, kind: str = "usual") -> dict[str, Any]:
    """Return what calls of an op and of its reference take beside the inputs: strong decays are no sigmoids."""
    layout = re.search("[kv]{2}(?=-)", kind)
    decay = {"decay": "raw"} if op == "wkv7" and "strong" in kind else {}
    return {**OPTIONS.get(op, {}), **decay, **({"state_layout": layout[0]} if layout else {})}


def switches_of(op: str) -> dict[str, Any]:
    """Return the switches of the op in such calls."""
    return {name: value for name, value in options_of(op).items() if name in ALL[op].traits}


def decay_of(op: str, kind: str = "usual") -> str:
    """Return how w is read in such calls; "none" where there is no w of heads."""
    return str(options_of(op, kind).get("decay", ALL[op].decay if op in WITH_HEADS else "none"))


def make_inputs(
    op: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cuda", kind: str = "usual"
) -> list[Tensor]:
    """Return inputs like a model's, in the op's order, all of one dtype, that require gradients.

    The shape is B, T, H and the head size, or B, T, H, K, V. The channels of wkv4 and timex are those of all heads.
    Strong decays are e^-2 to e^-8 a step.
    """
    (batch, tokens, heads, size), random = shape[:4], partial(torch.randn, device=device)
    channels, keys = heads * size, (batch, tokens, heads, size)
    if op == "wkv4":
        w, (k, v) = torch.linspace(-6, 1, channels, device=device), random(2, batch, tokens, channels)
        made = [w, random(channels) * 0.5, k, v]
    elif op == "timex":
        made = [random(channels, tokens), random(batch, channels, tokens)]
    elif ALL[op].through is not None:
        sizes = {"B": batch, "T": tokens, "G": heads, "H": heads, "K": size, "V": shape[-1]}
        made = [
            _like_model(name, random(*(sizes[dim] for dim in dims)))
            for name, dims in ALL[op].inputs.items()
            if name not in ALL[op].optional
        ]
    else:
        values = (batch, tokens, heads, shape[-1])
        r, k, v, kk, w = (random(*sizes) for sizes in (keys, keys, values, keys, keys))
        r, k, w, kk = r * 0.5, k * 0.5, w - 0.6, functional.normalize(kk, dim=-1)
        raw = w - 2.4  # RWKV-5 and 6 begin with -6 to -1; where one of many is above 4, a head leaves a chunk's range
        in_wkv7 = torch.log(reference.SIGMOID_RATE * torch.sigmoid(w)) if "strong" in kind else w
        made = {
            "wkv5": [r, k, v, raw[0, 0], random(heads, size)],
            "wkv6": [r, k, v, raw, random(heads, size)],
            "wkv7": [r, in_wkv7, k, v, -kk, kk * torch.rand_like(kk)],
            "gla": [r, k, v, functional.logsigmoid(w) / 16],
            "linear_attention": [r, k, v],
        }[op]
    if "strong" in kind:
        w = made[ALL[op].names.index("w")]
        rates = 2 + 6 * torch.rand_like(w)
        part = slice(None) if kind == "strong" else (slice(1), slice(None), slice(1)) if w.dim() == 4 else slice(1)
        w[part] = (rates.log() if decay_of(op, kind) == "raw" else -rates)[part]
    return [x.to(dtype).requires_grad_() for x in made]


def _like_model(name: str, x: Tensor) -> Tensor:
    """Return an input of ops such as kda, by the name that kernels have for it, of normal numbers."""
    if name in ("beta", "write_gate"):
        return torch.sigmoid(x)
    return functional.logsigmoid(x) / 16 if name == "w" else -x.abs() / 16 if name == "a_log" else x * 0.5


def state_of(op: str, shape: Sequence[int], kind: str = "usual", device: str = "cuda") -> Tensor:
    """Return states of an op, one for each row."""
    batch, _, heads, keys, values = shape
    if op == "wkv4":  # num, den and max
        num, den, top = torch.randn(3, batch, heads * keys, device=device)
        return torch.stack([num, den.abs() + 0.5, top], 1)
    layout = options_of(op, kind).get("state_layout", ALL[op].state_layout)
    state = torch.randn(batch, heads, *((values, keys) if layout == "vk" else (keys, values)), device=device)
    return state.bfloat16() if "bf16" in kind else state


def ends_of(tokens: int, device: str = "cuda") -> Tensor:
    """Return where packed sequences end, whose lengths grow from a few tokens to a tenth of all."""
    shares = torch.linspace(0, 1, PACKED + 1, dtype=torch.float64).pow(1.5)
    return shares.mul(tokens).ceil().long().maximum(torch.arange(PACKED + 1)).to(device)


class Given(NamedTuple):
    """What a case is measured with: functions, their inputs, and gradients of the first of their results."""

    functions: dict[Who, Function]
    inputs: Sequence[Tensor]
    dys: Sequence[Tensor]
    bytes: int | None  # the fewest that a call reads and writes; None where they do not decide
    options: dict[str, Any]  # those of the reference
    slots: Tensor | None = None  # where an update's states lie in the pool


def least_bytes(phase: str, inputs: Iterable[Tensor], results: Iterable[Tensor], state: int = 0) -> int:
    """Return the fewest bytes: a pass reads inputs and writes results, and a backward reads all inputs again."""
    reads, writes = {"backward": (2, 1), "forward+backward": (3, 2)}.get(phase, (1, 1))
    of_states = {"prefill": 1, "decode": 2, UPDATE: 2}.get(phase, 0) * state
    return reads * sum(x.nbytes for x in inputs) + writes * sum(x.nbytes for x in results) + of_states


def backends_of(op: str, phase: str = "forward") -> list[str]:
    """Return the backends that calls of an op can name, "auto" first, which alone updates have."""
    return ["auto"] if phase == UPDATE else [name for name in ALL[op].backends if name != "reference"]


def given_for(case: Case, backends: Sequence[str] = ("auto",), device: str = "cuda") -> Given:
    """Return what a case is measured with: ours by these backends, and on a GPU what torch alone can do.

    A loop in torch over many tokens takes minutes, and its backward all memory: neither is there. Raises ValueError.
    """
    (name, shape, dtype, phase, kind), on_gpu = case, device == "cuda"
    if name in WORKS:
        return _given_for_work(case, device)
    if wrong := [backend for backend in backends if phase == UPDATE and backend != "auto"]:
        raise ValueError(f"--backend: expected auto for an update, got {wrong[0]}")
    inputs = [x.detach().requires_grad_("backward" in phase) for x in make_inputs(name, shape, dtype, device, kind)]
    own = [each for each in ALL[name].names if each not in ALL[name].optional]
    dys = [torch.randn_like(inputs[own.index("k" if name == "timex" else "v")], requires_grad=False)]
    state = torch.empty(0) if name == "timex" else state_of(name, shape, kind, device)
    least = least_bytes(phase, inputs, dys, state.nbytes * (PACKED if kind == "packed" else 1))
    options, function = options_of(name, kind), OPS[name]
    in_torch: dict[Who, Function] = {}
    if phase == UPDATE:
        slots, (pool, other, source, target) = torch.randperm(len(state), device=device), state.repeat(4, 1, 1, 1, 1)
        update = partial(getattr(rwkv_jit, f"{name}_update"), pool, state_indices=slots.int(), **options)
        with_state = {"output_final_state": True, **options}

        def step(*x: Tensor) -> tuple[Tensor, Tensor]:
            y, final = function(*x, initial_state=other[slots], backend="reference", **with_state)
            return y, other.index_copy_(0, slots, final.to(other.dtype))

        if on_gpu:
            in_torch = {("torch", "step"): step, ("torch", "copy"): lambda *_: (None, target.copy_(source))}
        functions: dict[Who, Function] = {(OURS, "auto"): lambda *x: (update(*x), pool)}
        return Given(functions | in_torch, inputs, dys, least, {"initial_state": state[slots], **with_state}, slots)
    options |= {"cu_seqlens": ends_of(shape[1], device)} if kind == "packed" else {}
    options |= {"output_final_state": True} if phase in WITH_STATES else {}
    options |= {"initial_state": state} if phase == "decode" else {}
    if on_gpu and name == "timex":
        convolved = partial(functional.conv1d, groups=shape[2] * shape[3])
        in_torch["torch", "conv1d"] = lambda w, k: convolved(functional.pad(k, (shape[1] - 1, 0)), w.unsqueeze(1))
    elif on_gpu and shape[1] <= (128 if "backward" in phase else 4096):
        in_torch["torch", "loop"] = partial(function, backend="reference", **options)
    functions = {(OURS, backend): partial(function, backend=backend, **options) for backend in backends}
    return Given(functions | in_torch, inputs, dys, least, options)


def _given_for_work(case: Case, device: str) -> Given:
    """Return what a work of a layer is measured with; a module stands beside the products of its matrices alone."""
    (batch, tokens, width), random = case.shape, partial(torch.randn, device=device, dtype=case.dtype)
    sizes = {"t": (batch, tokens, width), "h": (batch, tokens, width // 64, 64), "c": (width,)}
    inputs = [random(sizes.get(letter) or (int(letter), width)) for letter in WORKS[case.op]]
    name, _, more = case.op.partition(", ")
    ours: Any = getattr(rwkv_jit.nn if name.startswith("RWKV7") else rwkv_jit, name)
    theirs: Any = getattr(rwkv_jit, f"{name}_ref", None)
    if name.startswith("RWKV7"):
        module = ours(width, 1, 24, 64, device=device, dtype=case.dtype)
        ours, inputs = lambda x, first, *_: module(x, first)[0], [*inputs, *module.parameters()]
        if more:  # matrices of linear layers are [out, in], low-rank ones [in, out]; r_k is none
            named = [(own, x) for own, x in module.named_parameters() if x.dim() == 2 and not own.endswith("r_k")]
            weights = [random(x.shape if own.endswith("weight") else x.T.shape) * 0.02 for own, x in named]
            inputs = [*(random(batch, tokens, x.shape[1]) for x in weights), *weights]
            ours, theirs = None, lambda *x: tuple(map(functional.linear, x[: len(named)], x[len(named) :]))
    elif "cross_entropy" in name:
        vocabulary, rows, is_linear = 65536 if device == "cuda" else 100, batch * tokens, name.startswith("linear")
        inputs = [random(rows, width), 0.02 * random(vocabulary, width)] if is_linear else [random(rows, vocabulary)]
        aims = torch.randint(vocabulary, (rows,), device=device)
        ours = partial(lambda function, *x: function(*x, aims), ours)
        theirs = partial(lambda *x: functional.cross_entropy(functional.linear(*x) if is_linear else x[0], aims))
    elif name == "prepare_keys":
        names = ("k", "v", "rate", "v_first", "v_gate", "k_k", "k_a", "a0", "v0")
        ours, theirs = (partial(lambda f, *x: f(**dict(zip(names, x, strict=True))), f) for f in (ours, theirs))
    elif name == "activate":
        ours, theirs = (partial(f, kinds="relu_squared") for f in (ours, theirs))
    everyone: dict[Who, Function | None] = {
        (OURS, "kernels"): ours,
        ("torch", more if ours is None else "plain"): theirs,
    }
    functions = {who: function for who, function in everyone.items() if function is not None}
    inputs = [x.requires_grad_("backward" in case.phase) for x in inputs]
    dys = [torch.randn_like(x) for x in _several((ours or theirs)(*inputs))]
    least = None if name.startswith(("RWKV7", "linear")) else least_bytes(case.phase, inputs, dys)
    return Given(functions, inputs, dys, least, {})


def _several(results: Any) -> list[Any]:
    return [results] if isinstance(results, Tensor) else list(results)


def call_of(function: Function, given: Given, phase: str, grad: Function = torch.autograd.grad) -> Callable[[], Any]:
    """Return the call of a phase, which returns results or gradients; for a backward alone, the forward runs here."""

    def backward(results: Sequence[Tensor], keep: bool = False) -> Any:
        wanted = [x for x in given.inputs if x.requires_grad]
        return grad(results[: len(given.dys)], wanted, given.dys, retain_graph=keep, allow_unused=True)

    if "backward" not in phase:
        return lambda: _several(function(*given.inputs))
    if phase == "forward+backward":
        return lambda: backward(_several(function(*given.inputs)))
    results = _several(function(*given.inputs))
    return lambda: backward(results, True)


def our_call(case: Case, backend: str = "auto", device: str = "cuda") -> Callable[[], Any]:
    """Return our call of a case by a backend. Raises ValueError."""
    given = given_for(case, [backend], device)
    return call_of(given.functions[OURS, backend], given, case.phase)


def gpu_ms(call: Callable[[], Any], sleep_us: float = 0.0, flush: Tensor | None = None) -> float:
    """Return the milliseconds of a call by CUDA events, which the GPU begins behind a flush and a sleep."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if flush is not None:
        flush.zero_()
    if sleep_us:
        torch.cuda._sleep(int(2000 * sleep_us))  # cycles, at least so many as a microsecond has
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def median_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time of a call by CUDA events, behind three that do not count."""
    return statistics.median([gpu_ms(call) for _ in range(3 + repeats)][3:])


def cpu_ms(call: Callable[[], Any], runs: int = 7) -> list[float]:
    """Return the times of a call on the CPU, behind one that does not count."""
    return [1e3 * seconds for seconds in timeit.repeat(call, number=1, repeat=1 + runs)][1:]


def host_us(call: Callable[[], Any], rows: int = 9, row: int = 20) -> float:
    """Return the microseconds that the host takes for a call among others, in the fastest row of calls."""
    times = [timeit.timeit(call, torch.cuda.synchronize, number=row) for _ in range(rows)]  # a full queue would wait
    return 1e6 * min(times) / row


def copy_tb_per_s() -> float:
    """Return the bandwidth of a copy on the GPU in terabytes (10^12) a second, bytes read and written both counted."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 4)  # smaller only where the GPU has no room
    source, target = torch.ones(2, size, dtype=torch.uint8, device="cuda")
    return 2 * size / median_ms(lambda: target.copy_(source)) * 1e-9


def use_one_thread() -> None:
    """Without a GPU, and unless OMP_NUM_THREADS is set, work on one thread: more wait for each other for long."""
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def spread(times: Sequence[float]) -> Row:
    """Return median and quartiles, as a row has them, and how many times there are."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": median, "low_ms": low, "high_ms": high, "runs": len(times)}


def errors_of(case: Case, backends: Sequence[str], device: str) -> dict[Who, dict[str, float]]:
    """Return relative L2 errors against float64 of everyone who can do it, on some tokens of a row or some rows."""
    few = min(case.shape[0], 64 if case.phase == UPDATE else 1), max(16, 2**28 // math.prod(case.shape[2:]))
    shape = few[0], min(case.shape[1], few[1], 300), *case.shape[2:]  # so few that the reference has memory
    given = given_for(case._replace(shape=shape), backends, device)
    exact = REFERENCES.get(case.op) or given.functions.get(("torch", "plain"))
    if exact is None:
        return {}
    options = {name: x.double() if name == "initial_state" else x for name, x in given.options.items()}
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in given.inputs]
    wide = given._replace(inputs=inputs, dys=[x.double() for x in given.dys])
    wanted = call_of(partial(exact, **options), wide, case.phase)()
    names = [f"d{name}" for name in (ALL[case.op].public_names if case.op in OPS else range(len(wanted)))]
    if "backward" not in case.phase:
        names = ["y", "state"] if case.op in OPS else [f"y{number}" for number in range(len(wanted))]
    errors: dict[Who, dict[str, float]] = {}
    for who, function in given.functions.items():
        with suppress(Exception):  # one that cannot says so where it is timed
            found = call_of(function, given, case.phase)()
            found = found if given.slots is None else [found[0], found[1][given.slots]]
            each = [pair for pair in zip(names, found, wanted, strict=False) if pair[1] is not None is not pair[2]]
            errors[who] = {name: float((x - want).norm() / want.norm()) for name, x, want in each}
    return errors


def row_of(case: Any, who: Who = (OURS, "-"), skipped: str | None = None) -> Row:
    """Return a row without figures."""
    names = ("median_ms", "low_ms", "high_ms", "host_us", "floor_ms", "fraction", "peak_mib", "error")
    return dict.fromkeys(names) | {
        "op": case.op, "shape": case.shown, "dtype": str(case.dtype).removeprefix("torch."),
        "phase": case.phase, "inputs": case.kind, "who": who[0], "what": who[1], "runs": 0, "errors": {},
        "skipped": skipped,
    }  # fmt: skip


def one_line(error: BaseException) -> str:
    """Return what is said of an error in a table."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200].removesuffix(": ")


def rows_of(case: Case, named: Sequence[str] | None, device: str, copy: float | None) -> list[Row]:
    """Measure a case; return a row for everyone, those who are left out last with what is in the way of them."""
    backends = named or (["auto"] if device == "cpu" or case.op in WORKS else backends_of(case.op, case.phase))
    errors, given = errors_of(case, backends, device), given_for(case, backends, device)
    rows, turns = dict[Who, Row](), dict[Who, Callable[[], float]]()
    for who, function in given.functions.items():
        of = errors.get(who, {})
        rows[who] = row_of(case, who) | {"errors": of, "error": max(of.values(), default=None)}
        try:
            if not all(map(math.isfinite, of.values())):
                raise ValueError("its results are not finite, so it has no speed")
            call = call_of(function, given, case.phase)
            if device == "cpu":
                rows[who] |= spread(cpu_ms(call))
                continue
            call()
            size = sum(x.nbytes for x in (*given.inputs, *given.dys)) - torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            _ = call() if case.phase == UPDATE else call_of(function, given, case.phase)()
            host, size = host_us(call), size + torch.cuda.max_memory_allocated()
            rows[who] |= {"host_us": host, "peak_mib": size / 2**20}
            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            flush = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")
            turns[who] = partial(gpu_ms, call, min(2 * host + 50, 1e5), flush)
        except Exception as error:
            rows[who] = row_of(case, who, one_line(error))
            if isinstance(error, UnsupportedConfigError) and named is None:
                del rows[who]  # a backend that nobody named
    times, started = {who: [turn()] for who, turn in turns.items()}, time.perf_counter()
    for done in range(21):  # in rounds, so that clocks drift alike for all
        if done < 8 or time.perf_counter() < started + 4:
            for who, turn in turns.items():
                times[who].append(turn())
    floor = None if given.bytes is None or copy is None else given.bytes / copy * 1e-9
    for who, taken in times.items():
        rows[who] |= spread(taken[2:]) | {"floor_ms": floor}
        rows[who]["fraction"] = floor and floor / rows[who]["median_ms"]
    return sorted(rows.values(), key=lambda row: row["skipped"] is not None)


def measured(cases: Sequence[Any], rows_of: Callable[[Any], list[Row]], failed: Callable[..., Row]) -> list[Row]:
    """Return the rows of all, each said before it is measured; one that fails hides no other, nor does an interrupt."""
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):
        row = failed(case)
        about = "{op} {phase} {}".format(",".join(map(str, row["shape"])), **row)
        print(f"measuring {number} of {len(cases)}: {about}", file=sys.stderr, flush=True)
        try:
            rows += rows_of(case)
        except KeyboardInterrupt:
            return rows + [failed(other, skipped="interrupted") for other in cases[number - 1 :]]
        except Exception as error:
            rows.append(failed(case, skipped=one_line(error)))
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; without a GPU what calls run on the CPU, on small shapes unless one is named.

    Returns env, copy_tb_per_s, device, and rows, one for each op, shape, dtype, phase, inputs and who with what:
    median_ms, low_ms and high_ms (quartiles), runs, host_us, floor_ms, fraction, peak_mib; errors of each result or
    gradient, and error, the largest of them. skipped is None, or what is in the way, and then there are no figures.
    Raises ValueError where options do not go together, a shape cannot be read, or the machine cannot do it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = (cases_of_layers if arguments.suite == "layers" else cases_of)(arguments, device)
    copy = check_gpu() if device == "cuda" else None
    named = arguments.backend and [arguments.backend]
    rows = measured(cases, lambda case: rows_of(case, named, device, copy), row_of)
    return {"env": environment(), "copy_tb_per_s": copy, "device": device, "rows": rows}


def check_gpu() -> float:
    """Return the bandwidth of a copy. Raises ValueError where there is no GPU, no CuPy or no NVRTC."""
    if not own_machine.is_available():
        raise ValueError("bench: needs a GPU, CuPy and NVRTC; `rwkv-jit info` shows what is missing")
    return copy_tb_per_s()


def cases_of_layers(arguments: argparse.Namespace, device: str) -> list[Case]:
    """Return the works of a layer that a command line names. Raises ValueError."""
    if wrong := [name for name in ("op", "backend", "phase", "inputs") if getattr(arguments, name)]:
        raise ValueError(f"--{wrong[0]}: cannot be combined with --suite layers")
    text, dtype = arguments.shape or ("8,4096,2048" if device == "cuda" else "2,16,128"), arguments.dtype or "bf16"
    forms = "B,T,C with C a multiple of 64 for --suite layers"
    if (shape := read_shape(text, (3,), forms))[2] % 64:
        raise ValueError(f"--shape: expected positive numbers {forms}, got {text!r}")
    passes = {"linear_cross_entropy": USUAL_PHASES[1:]} | dict.fromkeys(list(WORKS)[-4:], USUAL_PHASES)
    return [Case(work, shape, DTYPES[dtype], phase) for work in WORKS for phase in passes.get(work, PHASES[:2])]


def cases_of(arguments: argparse.Namespace, device: str) -> list[Case]:
    """Return the cases of ops that a command line names, or of those that can; small on a CPU. Raises ValueError.

    Two lengths of a prompt are one decode.
    """
    cases, refused = dict[Case, None](), ValueError()
    for text in (arguments.shape,) if arguments.shape else ("1,54,32,64", "8,4096,64,64"):  # a prompt, and training
        for op in arguments.op or sorted(OPS):
            try:
                named = [_case(arguments, op, text, phase, device) for phase in arguments.phase or USUAL_PHASES]
            except ValueError as error:
                if arguments.op:
                    raise
                refused = error
            else:
                cases |= dict.fromkeys(named)
    if not cases:
        raise refused
    return list(cases)


def _case(arguments: argparse.Namespace, op: str, text: str, phase: str, device: str) -> Case:
    """Return a case that the machine can do. Raises ValueError."""
    is_free, kind, known = arguments.shape is None, arguments.inputs or "usual", backends_of(op, phase)
    known, where = (
        (known, "") if device == "cuda" else ([x for x in known if x in ("auto", "fft")], "torch sees no GPU; ")
    )
    if arguments.backend not in (None, *known):
        raise ValueError(f"--backend: {where}expected one of {', '.join(known)} for {op}, got {arguments.backend}")
    shape: tuple[int, ...] = shape_of(op, text, phase)
    shape = (1, shape[0] * shape[1], *shape[2:]) if kind == "packed" and is_free else shape
    case = Case(op, shape, DTYPES[arguments.dtype or "bf16"], phase, kind).check()
    return case._replace(shape=tuple(map(min, shape, (1, 32, 2, 16, 16)))) if device == "cpu" and is_free else case


def environment() -> dict[str, Any]:
    """Return what of the environment says something about a time, and no paths."""
    paths = ("nvrtc_libraries", "cache", "environment")
    return {name: x for name, x in own_machine.env_report().items() if name not in paths}


def machine(env: dict[str, Any]) -> str:
    """Return what a measurement was taken on, from the environment report."""
    return f"{env['gpus'][0]}, torch {env['torch']}, NVRTC {env['nvrtc'].split()[0]}"


COLUMNS = {
    "by": "{who} {what}", "ms": "{median_ms:.4f}", "quartiles": "{low_ms:.4f} to {high_ms:.4f}",
    "of the floor": "{fraction:.0%}", "host us": "{host_us:.1f}", "": "{mark}", "peak MiB": "{peak_mib:.1f}",
    "error": "{error:.1e}",
}  # fmt: skip


def show(result: dict[str, Any], columns: dict[str, str] = COLUMNS, methods: str = METHODS) -> None:
    """Print a table for each op, shape, dtype, phase and kind of inputs."""
    on_gpu, small = result["device"] == "cuda", f"{CPU_NOTE} There is no GPU; without --shape a small one is taken."
    terminal.say(f"{machine(result['env'])}; a copy moves {result['copy_tb_per_s']:.2f} TB/s" if on_gpu else small)
    tables: dict[str, list[Row]] = {}
    for row in result["rows"]:
        kind = KINDS.get(row["inputs"], row["inputs"].replace("-", " "))
        title = f"{row['op']} ({', '.join(map(str, row['shape']))}) {row['dtype']}, {row['phase']}"
        tables.setdefault(f"{title}, {kind}" if kind else title, []).append(row)
    for title, rows in tables.items():
        floors = [f"; floor {row['floor_ms']:.4f} ms" for row in rows if row["floor_ms"] is not None]
        terminal.say(f"\n{title}{floors[0] if floors else ''}")
        done = [row for row in rows if row["skipped"] is None]
        done = [row | {"mark": "†" if (row["host_us"] or 0) > 1e3 * row["median_ms"] else ""} for row in done]
        if done:
            terminal.records(columns, done, ("in a graph", "quartiles", "of the floor", "other"))
        for row in rows:
            if row["skipped"] is not None:
                terminal.say(f"  skipped: {row['who']} {row['what']}: {row['skipped']}")
            elif len(row["errors"]) > 1:
                errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
                terminal.say(f"  errors of {row['who']} {row['what']}: {errors}")
    terminal.say(f"\n{methods if on_gpu else CPU_NOTE}")
