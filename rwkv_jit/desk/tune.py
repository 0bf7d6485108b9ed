"""The tuner: times the legal geometries of the chunked kernels on this GPU, and keeps what beats the default."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from rwkv_jit.ahead import requests
from rwkv_jit.ahead import warm as ahead
from rwkv_jit.call import torch_op, tuned
from rwkv_jit.call.plan import DTYPES
from rwkv_jit.call.torch_op import Options
from rwkv_jit.call.tuned import CHUNKS, Choice, Geometry
from rwkv_jit.desk import figures, inputs, terminal
from rwkv_jit.kernels import cuda
from rwkv_jit.kernels.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules.common import Candidate, padded
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import ALL, OPS

# As models train, with the decay of `inputs`. What is fastest then serves other dtypes and decays too.
DTYPE = "bf16"
SHAPES = ((8, 4096, 64, 64), (8, 4096, 32, 128))  # batch, tokens, heads, head size
LARGEST_ERROR = 1.6e-2  # relative L2; right results are each within 8e-3 of float64
# A gradient that sums both signs over tokens is held against the size of what is summed: so many times its own.
SUMMED = {("wkv5", "dw"): 4.0}
LEAST_GAIN = 0.02
ROUNDS, REPEATS = 7, 5
_MANY_TOKENS = 1 << 20  # of a call that no rule takes for a short one

Call = tuple[Candidate, ...]  # the kernels of a call: a forward, and with gradients a backward of the same chunk_len


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tune, and store what was chosen unless it is a dry run.

    Returns gpu, arch; path, the file it was stored in, or None; rows: one dict per op, shape and purpose, with op,
    shape, training, default and fastest (what is taken by default and what was fastest, with ms and spread), chosen
    (whether the fastest is stored), measured (one dict per kernel) and dropped (those of other results).
    Raises ValueError where a shape does not fit, UnsupportedConfigError where there are no chunked kernels for a shape
    or none for this GPU, RwkvJitError where there is no GPU or no NVRTC or the default's results are wrong, and
    CacheError where the choices cannot be stored.
    """
    if fixed := [op for op in arguments.op or () if op not in CHUNKS]:
        below = ALL[fixed[0]].through
        instead = "" if below is None else f"; tune {below.name}, which runs its calls without dedicated kernels"
        raise UnsupportedConfigError(f"op: kernels of {fixed[0]} have one geometry{instead}")
    asked = [inputs.read_shape(text) for text in arguments.shape or ()]
    if not torch.cuda.is_available():
        raise RwkvJitError("needs a GPU, and torch sees none; `rwkv-jit doctor` says why")
    cuda.nvrtc()  # where it is missing, its error names the command that installs it
    gpu, arch = tuned.gpu(torch.cuda.current_device())
    cases = _cases(arguments.op or CHUNKS, asked, arch)
    rows, chosen = [], dict[tuned.Key, Choice | None]()
    for (op, shape), training in itertools.product(cases, (True, False)):
        key = tuned.key(gpu, arch, op, shape[3], training)
        default = _default(key, shape[3])
        times, errors = _measure(op, shape, training, arch, default)
        totals = _totals(times, training)
        fastest = min(totals, key=lambda call: median(totals[call]))
        is_chosen = beats(totals[fastest], totals[default])
        choice = Choice(*key, *fastest[0][1:], _geometry(fastest).backward_blocks, tuned.templates_of(op))
        chosen[key] = choice if is_chosen else None
        rows.append({
            "op": op, "shape": list(shape), "training": training, "chosen": is_chosen,
            "default": _geometry(default)._asdict() | _summary(totals[default]),
            "fastest": _geometry(fastest)._asdict() | _summary(totals[fastest]),
            "measured": [candidate._asdict() | _summary(times[candidate]) for candidate in times],
            "dropped": [candidate._asdict() | {"error": errors[candidate]} for candidate in errors],
        })  # fmt: skip
    if not arguments.dry_run:
        tuned.store(chosen)
    path = None if arguments.dry_run else str(tuned.path())
    return {"gpu": gpu, "arch": arch, "path": path, "rows": rows}


def _cases(ops: Iterable[str], asked: Sequence[tuple[int, ...]], arch: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return each op with each shape that was asked for, or with those of SHAPES that this GPU has kernels for."""
    cases: list[tuple[str, tuple[int, ...]]] = []
    for op, shape in itertools.product(dict.fromkeys(ops), asked or SHAPES):
        obstacle = CHUNKS[op].why_not(_problem(op, shape[3], True, arch))
        if obstacle is None:
            cases.append((op, shape))
        elif asked or not cases:
            text, *values = obstacle
            raise UnsupportedConfigError(f"shape: the chunked backend of {op} {text.format(*values)}")
    seen: dict[int, tuple[int, ...]] = {}
    for shape in asked:
        size = padded(shape[3])
        if size in seen:
            both = f"{seen[size]} and {shape}"
            raise ValueError(f"shape: expected one for each head size in steps of 32, got {both}")
        seen[size] = shape
    return cases


def _problem(op: str, size: int, training: bool, arch: str) -> Problem:
    """Return the problem of long calls without a bound of their decays."""
    return Problem(
        OPS[op], Gpu(arch), dict.fromkeys(OPS[op].names, DTYPE), T=_MANY_TOKENS, K=size, V=size,
        decay=inputs.decay_of(op), state_layout=OPS[op].state_layout, backend="chunked", training=training,
    )  # fmt: skip


def _default(key: tuned.Key, size: int) -> Call:
    """Return what calls take without the user's file: what is shipped, else what the rule says."""
    _, arch, op, _, training = key
    chunked, shipped, problem = CHUNKS[op], tuned.shipped(key), _problem(op, size, training, arch)
    cut = shipped.geometry if shipped else Geometry(chunked.default_chunk_len(problem))
    problem = problem._replace(**cut._asdict())
    schedules = {"forward": chunked.forward(problem), **({"backward": chunked.backward(problem)} if training else {})}
    names = ("CHUNK_LEN", "NUM_THREADS", "BLOCKS_PER_SM")
    return tuple(
        Candidate(direction, *(int(step.parameters[name]) for name in names))
        for direction, schedule in schedules.items()
        for step in schedule.launches
    )


def _geometry(call: Call) -> Geometry:
    forward, *backward = call
    return Geometry(*forward[1:], backward[0].blocks if backward else None)


# ---- measuring ---------------------------------------------------------------------------------------------------


def _measure(
    op: str, shape: tuple[int, ...], training: bool, arch: str, default: Call
) -> tuple[dict[Candidate, list[float]], dict[Candidate, float]]:
    """Return a median per round of every kernel that agrees with the default, and the errors of the others.

    Raises RwkvJitError where the default's results are no numbers: there is nothing to compare with.
    """
    candidates = [
        candidate for kernel in default for candidate in CHUNKS[op].candidates(kernel.direction, shape[3], Gpu(arch))
    ]
    what = f"{op} {shape}, {_purpose(training)}"
    with terminal.progress(f"{what}: compiling") as progress:
        _compile(op, candidates, shape[3], progress)
    kernels = _Kernels(op, shape, training)
    wanted = {kernel.direction: kernels.results(kernel) for kernel in default}
    errors = {
        candidate: _error(op, kernels.results(candidate), wanted[candidate.direction]) for candidate in candidates
    }
    wrong = {candidate: error for candidate, error in errors.items() if not error <= LARGEST_ERROR}  # NaN is wrong too
    if not wrong.keys().isdisjoint(default):
        raise RwkvJitError(f"the default's results of {op} are not finite at {shape}: {default}")
    times: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates if candidate not in wrong}
    with terminal.progress(f"{what}: measuring") as progress:
        for done in range(ROUNDS):  # over all of them, as what slows the GPU down shall slow all down
            for candidate, medians in times.items():
                medians.append(figures.median_ms(functools.partial(kernels.launch, candidate), REPEATS))
            if progress:
                progress(done + 1, ROUNDS)
    return times, wrong


def _compile(op: str, candidates: Sequence[Candidate], size: int, progress: Callable[[int, int], None] | None) -> None:
    """Compile side by side what would be compiled one after another when it is launched."""
    dtype, decay = DTYPES[DTYPE], inputs.decay_of(op)
    asked = [
        requests.named(
            requests.Calls(op, size, dtype, None, direction, decay), "chunked", chunk_len, num_threads,
            {"blocks_per_sm": blocks},
        )
        for direction, chunk_len, num_threads, blocks in candidates
    ]  # fmt: skip
    ahead.compile_all([named.request for named in asked], progress)


class _Kernels:
    """Kernels on inputs like a model's, launched through the torch ops, which take a geometry as it is."""

    def __init__(self, op: str, shape: tuple[int, ...], training: bool):
        self._op, self._training = op, training
        self._problem = _problem(op, shape[3], training, "")
        self._inputs = [x.detach() for x in inputs.make_inputs(op, shape, DTYPES[DTYPE])]
        self._dy = torch.randn_like(self._inputs[0])
        self._saved: dict[int, Tensor] = {}  # by chunk_len

    def launch(self, kernel: Candidate) -> Sequence[Tensor]:
        """Launch one kernel; return y, the final state and what is saved, or the gradients of the inputs."""
        if kernel.direction == "forward":
            return self._forward(Geometry(kernel.chunk_len, kernel.num_threads, kernel.blocks))
        if kernel.chunk_len not in self._saved:
            self._saved[kernel.chunk_len] = self._forward(Geometry(kernel.chunk_len))[2]
        return self._backward(Geometry(kernel.chunk_len, backward_blocks=kernel.blocks), self._saved[kernel.chunk_len])

    def results(self, kernel: Candidate) -> dict[str, Tensor]:
        """Return what a kernel finds: for what it saves, the gradients that the rule's backward finds with it."""
        if kernel.direction == "backward":
            return self._named(self.launch(kernel))
        y, final, saved = self.launch(kernel)
        gradients = self._backward(Geometry(kernel.chunk_len), saved) if self._training else ()
        return {"y": y, "final_state": final, **self._named(gradients)}

    def _named(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"d{name}": x for name, x in zip(OPS[self._op].public_names, gradients, strict=False)}

    def _forward(self, geometry: Geometry) -> Sequence[Tensor]:
        run: Any = getattr(torch.ops.rwkv_jit, f"{self._op}_fwd")
        results = run(*self._inputs, None, None, *self._options(geometry), True, self._training)
        return cast("Sequence[Tensor]", results)

    def _backward(self, geometry: Geometry, saved: Tensor) -> Sequence[Tensor]:
        run: Any = getattr(torch.ops.rwkv_jit, f"{self._op}_bwd")
        results = run(*self._inputs, None, None, saved, self._dy, None, *self._options(geometry))
        return cast("Sequence[Tensor]", results[: len(self._inputs)])

    def _options(self, geometry: Geometry) -> Options:
        return torch_op.options_of(self._problem._replace(**geometry._asdict()))


def _error(op: str, results: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest relative L2 error; NaN where one of them is."""
    errors = [
        (results[name].float() - want.float()).norm() / (SUMMED.get((op, name), 1.0) * want.float().norm())
        for name, want in wanted.items()
    ]
    return float(torch.stack(errors).max())


# ---- choosing ----------------------------------------------------------------------------------------------------


def _totals(times: Mapping[Candidate, list[float]], training: bool) -> dict[Call, list[float]]:
    """Return the times of whole calls: with gradients a forward and a backward of one chunk_len, in the same round."""
    forwards = [kernel for kernel in times if kernel.direction == "forward"]
    if not training:
        return {(kernel,): times[kernel] for kernel in forwards}
    backwards = [kernel for kernel in times if kernel.direction == "backward"]
    return {
        (ahead, back): [sum(pair) for pair in zip(times[ahead], times[back], strict=True)]
        for ahead, back in itertools.product(forwards, backwards)
        if ahead.chunk_len == back.chunk_len
    }


def beats(times: Sequence[float], default: Sequence[float]) -> bool:
    """Return whether times are better than the default's by LEAST_GAIN, and each of them than any of the default's."""
    return median(times) < (1 - LEAST_GAIN) * median(default) and max(times) < min(default)


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {"ms": median(times), "spread": (max(times) - min(times)) / median(times)}


# ---- printing ----------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Print what was measured and chosen."""
    terminal.say(f"{result['gpu']}, {result['arch']}\n")
    terminal.table(
        ("op", "(B, T, H, N)", "for", "default", "ms", "spread", "fastest", "ms", "spread", "taken"),
        [
            (
                row["op"], f"({', '.join(map(str, row['shape']))})", _purpose(row["training"]),
                *_shown(row["default"]), *_shown(row["fastest"]), "fastest" if row["chosen"] else "default",
            )
            for row in result["rows"]
        ],
    )  # fmt: skip
    terminal.say("\nA geometry is chunk_len, threads of the forward, blocks per SM (forward, backward).")
    for row in result["rows"]:
        for candidate in row["dropped"]:
            geometry = f"{candidate['chunk_len']}, {candidate['num_threads']}, {candidate['blocks']}"
            kernel = f"{row['op']} at {row['shape']}: {candidate['direction']} {geometry}"
            terminal.say(f"Dropped: {kernel}, {candidate['error']:.1e} from the default.")
    where = "not stored" if result["path"] is None else f"stored in {result['path']}, for processes that start from now"
    terminal.say(f"{sum(row['chosen'] for row in result['rows'])} choices, {where}.")


def _purpose(training: bool) -> str:
    return "gradients" if training else "forward alone"


def _shown(timed: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a geometry, its time and its spread."""
    return _listed(timed[name] for name in Geometry._fields), f"{timed['ms']:.4f}", f"{timed['spread']:.1%}"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values if value is not None)


def listed() -> dict[str, Any]:
    """Return the choices for all GPUs, tuned and shipped, and the user's file."""
    choices = [row.choice._asdict() | {"origin": row.origin, "state": row.fault or "ok"} for row in tuned.listed()]
    return {"path": str(tuned.path()), "choices": choices}


def show_listed(result: dict[str, Any]) -> None:
    """Print the choices."""
    if not result["choices"]:
        print("no choices: every call takes the default")
        return
    terminal.records(_CHOICES, [
        choice
        | {"purpose": _purpose(choice["training"])}
        | {"blocks": _listed(choice[name] for name in ("forward_blocks", "backward_blocks"))}
        for choice in result["choices"]
    ])  # fmt: skip


_CHOICES = {
    "GPU": "{gpu}", "arch": "{arch}", "op": "{op}", "head size": "{head_size}", "for": "{purpose}",
    "chunk_len": "{chunk_len}", "threads": "{num_threads}", "blocks": "{blocks}", "origin": "{origin}",
    "state": "{state}",
}  # fmt: skip
