"""Times of the small work of a layer, of whole layers and of the loss, beside a copy and the matrix products."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rwkv_jit
from rwkv_jit.desk import terminal
from rwkv_jit.desk.bench import timing
from rwkv_jit.desk.bench.cases import DTYPES

SHAPE, SMALL = (8, 4096, 2048), (2, 16, 128)  # batch, tokens, channels; the small one without a GPU
VOCABULARY = 65536
_HEAD_SIZE = 64
_BUDGET_MS = 1000.0
_PASSES = ("forward", "backward")
_WHOLE = ("forward", "forward+backward")
METHODS = (
    "Median and quartiles of the GPU's time by CUDA events, after a warm-up. Inputs are larger than the L2 cache, or "
    "it is flushed. MB: inputs and results of a pass once each, and in a backward the gradients of both. Of a copy: "
    "the share of its bandwidth in the same run. Peak: memory of a call beside its inputs. Products: those of a "
    "module's matrices alone."
)


class Sizes(NamedTuple):
    """What inputs are made by."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: str
    vocabulary: int

    def tokens(self, *behind: int) -> Tensor:
        """Return something of every token: channels, or what stands `behind`."""
        batch, tokens, channels = self.shape
        return torch.randn(batch, tokens, *(behind or (channels,)), device=self.device, dtype=self.dtype)

    def heads(self) -> Tensor:
        """Return something of every token, by heads."""
        return self.tokens(self.shape[2] // _HEAD_SIZE, _HEAD_SIZE)

    def channels(self, *before: int) -> Tensor:
        """Return something of every channel."""
        return torch.rand(*before, self.shape[2], device=self.device, dtype=self.dtype)

    def targets(self, count: int) -> Tensor:
        """Return targets of tokens."""
        return torch.randint(self.vocabulary, (count,), device=self.device)

    def module(self, name: str) -> nn.Module:
        """Return a layer behind the first one."""
        make: Any = getattr(rwkv_jit.nn, name)
        made: nn.Module = make(self.shape[2], 1, 24, _HEAD_SIZE, device=self.device, dtype=self.dtype)
        return made


Made = tuple[Callable[..., Any], Sequence[Tensor]]  # a function, and what it is given


class Work(NamedTuple):
    """Something that is measured, of which `make` returns a call."""

    name: str
    make: Callable[[Sizes], Made]
    phases: Sequence[str] = _PASSES
    has_bytes: bool = True  # whether it goes by the bandwidth of the memory


def _keys(s: Sizes) -> Made:
    def keys(k: Tensor, v: Tensor, rate: Tensor, first: Tensor, gate: Tensor, *given: Tensor) -> Any:
        k_k, k_a, a0, v0 = given
        return rwkv_jit.prepare_keys(k, v, rate, k_k, k_a, a0=a0, v_first=first, v_gate=gate, v0=v0)

    return keys, [s.heads() for _ in range(5)] + [s.channels() for _ in range(4)]


def _norm(s: Sizes) -> Made:
    return rwkv_jit.gated_norm, [
        s.heads(), s.tokens(), s.channels(), s.channels(), *(s.heads() for _ in range(3)), s.channels(),
    ]  # fmt: skip


def _loss(s: Sizes) -> Made:
    rows = max(s.shape[0] * s.shape[1] // 8, 1)
    logits = torch.randn(rows, s.vocabulary, device=s.device, dtype=s.dtype)
    return lambda x, aims: rwkv_jit.cross_entropy(x, aims, l2_wrap=1e-4), [logits, s.targets(rows)]


def _linear_loss(s: Sizes) -> Made:
    weight = torch.randn(s.vocabulary, s.shape[2], device=s.device, dtype=s.dtype) * 0.02
    hidden = s.tokens()
    targets = s.targets(s.shape[0] * s.shape[1]).view(hidden.shape[:2])
    return lambda x, w, aims: rwkv_jit.linear_cross_entropy(x, w, aims, l2_wrap=1e-4), [hidden, weight, targets]


def _module(name: str) -> Callable[[Sizes], Made]:
    def make(s: Sizes) -> Made:
        module = s.module(name)
        # Parameters are inputs, so that they have gradients.
        return lambda x, first, *_: module(x, first)[0], [s.tokens(), s.tokens(), *module.parameters()]

    return make


def _products(name: str) -> Callable[[Sizes], Made]:
    """Return what makes the matrix products of a module alone, whose inputs share memory and no gradients."""

    def make(s: Sizes) -> Made:
        # Those of linear layers are [out, in], low-rank ones [in, out]; r_k is no matrix.
        sizes = [
            tuple(x.shape) if own.endswith("weight") else tuple(x.T.shape)
            for own, x in s.module(name).named_parameters()
            if x.dim() == 2 and not own.endswith("r_k")
        ]
        read = {width: s.tokens(width) for _, width in sizes}
        weights = [torch.randn(size, device=s.device, dtype=s.dtype) * 0.02 for size in sizes]

        def products(*given: Tensor) -> tuple[Tensor, ...]:
            return tuple(map(nn.functional.linear, given[: len(sizes)], given[len(sizes) :]))

        return products, [*(read[width].detach() for _, width in sizes), *weights]

    return make


WORKS = (
    Work("token_shift, 6 mixes", lambda s: (rwkv_jit.token_shift, [s.tokens(), s.channels(6)])),
    Work("token_shift, 1 mix", lambda s: (rwkv_jit.token_shift, [s.tokens(), s.channels(1)])),
    Work("prepare_keys", _keys),
    Work("gated_norm", _norm),
    Work("gated", lambda s: (rwkv_jit.gated, [s.tokens(), s.tokens()])),
    Work("activate", lambda s: (lambda x: rwkv_jit.activate(x, "relu_squared"), [s.tokens()])),
    Work("cross_entropy", _loss),
    Work("linear_cross_entropy", _linear_loss, ("forward+backward",), has_bytes=False),
    *(
        Work(f"{name}{more}", make(name), _WHOLE, has_bytes=False)
        for name in ("RWKV7TimeMix", "RWKV7Block")
        for more, make in (("", _module), (", products", _products))
    ),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, on a small shape where there is no GPU.

    Returns env, copy_tb_per_s, device and rows: one dict per work and phase with op, shape, dtype, phase, median_ms,
    low_ms and high_ms (quartiles), runs, bytes, fraction (of the copy's bandwidth), peak_mib and skipped.
    Raises ValueError where another option does not go with this suite, or a shape cannot be read.
    """
    from rwkv_jit.desk import bench

    for name in ("op", "backend", "phase", "inputs"):
        if getattr(arguments, name):
            raise ValueError(f"--{name}: cannot be combined with --suite layers")
    has_gpu = torch.cuda.is_available()
    sizes = _sizes(arguments.shape, DTYPES[arguments.dtype or "bf16"], has_gpu)
    if has_gpu:
        bench.check_gpu()
    copy = timing.copy_tb_per_s() if has_gpu else None
    rows: list[dict[str, Any]] = []
    with terminal.progress("measuring") as tell:
        for number, work in enumerate(WORKS):
            if tell:
                tell(number, len(WORKS))
            rows += [_row(work, phase, sizes, copy) for phase in work.phases]
    return {"env": bench.environment(), "copy_tb_per_s": copy, "device": sizes.device, "rows": rows}


def _sizes(text: str | None, dtype: torch.dtype, has_gpu: bool) -> Sizes:
    if text is None:
        return Sizes(SHAPE, dtype, "cuda", VOCABULARY) if has_gpu else Sizes(SMALL, dtype, "cpu", 100)
    parts = text.split(",")
    shape = tuple(int(part) if part.strip().isdigit() else 0 for part in parts)
    if len(shape) != 3 or min(shape) < 1 or shape[2] % _HEAD_SIZE:
        raise ValueError(f"--shape: expected B,T,C with C a multiple of {_HEAD_SIZE} for --suite layers, got {text!r}")
    return Sizes((shape[0], shape[1], shape[2]), dtype, "cuda" if has_gpu else "cpu", VOCABULARY if has_gpu else 100)


def _row(work: Work, phase: str, sizes: Sizes, copy_tb_per_s: float | None) -> dict[str, Any]:
    """Measure one work in one phase."""
    made: dict[str, Any] = {
        "op": work.name, "shape": list(sizes.shape), "dtype": str(sizes.dtype).removeprefix("torch."), "phase": phase,
        "median_ms": None, "low_ms": None, "high_ms": None, "runs": 0, "bytes": None, "fraction": None,
        "peak_mib": None, "skipped": None,
    }  # fmt: skip
    try:
        call, size = call_of(work, phase, sizes)
        if sizes.device == "cpu":
            return made | timing.spread(timing.cpu_ms(call)) | {"bytes": size if work.has_bytes else None}
        peak = timing.peak_bytes(call)
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        flush = None if size > 2 * cache_bytes else torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
        turns = timing.Turns([call], phase == "forward" and timing.is_small(size), flush)
        (times,) = timing.interleaved([turns.ms], _BUDGET_MS)
        if isinstance(times, Exception):
            raise times
        made |= timing.spread(times) | {"peak_mib": peak / 2**20}
        if work.has_bytes and copy_tb_per_s is not None:
            made |= {"bytes": size, "fraction": size / made["median_ms"] * 1e-9 / copy_tb_per_s}
    except Exception as error:  # one that fails, or for which there is no memory, hides no other
        made["skipped"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        if sizes.device == "cuda":
            torch.cuda.empty_cache()
    return made


def call_of(work: Work, phase: str, sizes: Sizes) -> tuple[Callable[[], Any], int]:
    """Return a call of a phase, and the bytes that it reads and writes once."""
    function, given = work.make(sizes)
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in given]
    wanted = [x for x in leaves if x.requires_grad]

    def forward() -> list[Tensor]:
        made = function(*leaves)
        return [made] if isinstance(made, Tensor) else list(made)

    def without_gradients() -> list[Tensor]:
        with torch.no_grad():
            return forward()

    results = forward()
    grads = [torch.randn_like(x) for x in results]

    def backward(made: Sequence[Tensor], keep: bool) -> Any:
        return torch.autograd.grad(made, wanted, grads, retain_graph=keep, allow_unused=True)

    size = _bytes([*leaves, *results])
    if phase == "forward":
        return without_gradients, size
    if phase == "backward":
        return lambda: backward(results, True), _bytes([*leaves, *grads, *wanted])
    return lambda: backward(forward(), False), size + _bytes([*leaves, *grads, *wanted])


def _bytes(several: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in several)


_COLUMNS = {
    "phase": "{phase}", "by": "{op}", "ms": "{median_ms:.4f}", "quartiles": "{low_ms:.4f} to {high_ms:.4f}",
    "MB": "{mb:.0f}", "of a copy": "{fraction:.0%}", "peak MiB": "{peak_mib:.1f}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print a table of all works."""
    from rwkv_jit.desk import bench

    if result["device"] == "cpu":
        terminal.say(f"{bench.CPU_NOTE} There is no GPU; without --shape a small one is taken.")
    else:
        terminal.say(f"{bench.machine(result['env'])}; a copy moves {result['copy_tb_per_s']:.2f} TB/s")
    done = [row | {"mb": row["bytes"] and row["bytes"] / 1e6} for row in result["rows"] if row["skipped"] is None]
    if done:
        terminal.say(f"\n({', '.join(map(str, done[0]['shape']))}) {done[0]['dtype']}")
        terminal.records(_COLUMNS, done, ("quartiles", "peak MiB"))
    for row in result["rows"]:
        if row["skipped"] is not None:
            terminal.say(f"  skipped: {row['op']}, {row['phase']}: {row['skipped']}")
    terminal.say(f"\n{bench.CPU_NOTE if result['device'] == 'cpu' else METHODS}")
