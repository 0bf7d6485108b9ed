"""How fast whole models of RWKV-7 train, ours and FLA's, on one GPU and on several, and their time mixing alone."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.multiprocessing.spawn import spawn

from bench import models, record, rwkv7_models, timing, tuners
from bench.models import GRAPHED, MODELS, NODES, PARTS, free, survived
from bench.rwkv7_models import HEAD_SIZE, Loss, Sizes
from rwkv_jit.desk import bench, figures
from rwkv_jit.nn import RWKV7TimeMix, graphed_step

LARGE, SMALL = Sizes(24, 1024, 8, 4096, 65536), Sizes(2, 64, 2, 32, 256)  # the small ones without a GPU
LAYER_WIDTH = 2048
RATES = {"lr": 4e-4, "weight_decay": 0.1}
BETAS, EPS = (0.9, 0.99), 1e-18  # those of the official trainer
MEASURED = ("steps", "layer")
_BUDGET_MS, _DEPTH, _FEW = 1000.0, 24, 64
_PATIENCE = timedelta(minutes=2)  # for another rank
_TUNED_MS = 2, 10  # that tuners warm a choice up, and time it
METHODS = (
    "Median and quartiles of a step: loss, backward and fused AdamW, no clipping. Gradients and moments have the dtype "
    "of the parameters. Those of float32 are under autocast to bfloat16, where FLA's model would keep the residual and "
    "its elementwise work in float32. "
    f"The host's time is that of a step of one sequence of at most {_FEW} tokens, for which it never waits. "
    "Passes: so many parts of the batch add up their gradients, the fewest that fit. Memory: the peak, with parameters "
    "and moments. FLOPs: six for each weight of a matrix and token, and the recurrence, of dense bfloat16. A layer: "
    "forward and backward, with the peak beside its inputs and parameters. "
)


# ---- who trains --------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A model's loss, the groups of its optimizer, and how it trains."""

    loss: Loss
    groups: list[dict[str, Any]]
    model: Any = None  # for steps from graphs
    mode: str = NODES
    is_cast: bool = False  # under autocast to bfloat16


def _allow_graphs(count: int) -> None:
    """Let torch compile so many graphs of one function, or more where it may."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def _ours(
    sizes: Sizes, device: str, dtype: torch.dtype = torch.bfloat16, is_compiled: bool = False, mode: str = NODES,
    kind: str = "RWKV7", checkpointing: bool = False,
) -> Made:  # fmt: skip
    model = rwkv7_models.our_model(sizes, device, dtype, MODELS[kind])
    model.checkpointing = checkpointing
    # Each length is a graph: where lengths are symbols a layer runs as its parts.
    loss = torch.compile(model.loss, fullgraph=True, dynamic=False) if is_compiled else model.loss
    return Made(loss, model.param_groups(**RATES), model, mode, dtype != torch.bfloat16)


def _theirs(sizes: Sizes, device: str, is_compiled: bool = False, **options: Any) -> Made:
    ours = rwkv7_models.our_model(sizes, device, torch.bfloat16)
    model: Any = rwkv7_models.fla_model(ours, **options)
    if is_compiled:  # layer by layer, however many graphs they are
        _allow_graphs(2 * len(model.model.layers))
        for block in model.model.layers:
            block.compile()
    return Made(rwkv7_models.fla_loss(model), rwkv7_models.groups_in_fla(ours, model, **RATES))


_OF_MODES: dict[str, dict[str, Any]] = {
    "rwkv_jit": {}, "rwkv_jit as parts": {"mode": PARTS}, "rwkv_jit graphed": {"mode": GRAPHED},
    "rwkv_jit checkpointing": {"checkpointing": True},
}  # fmt: skip
OURS: dict[str, Callable[..., Made]] = {
    f"{name}{of_dtype}": partial(_ours, dtype=dtype, **options)
    for of_dtype, dtype in (("", torch.bfloat16), (", float32 parameters", torch.float32))
    for name, options in _OF_MODES.items()
}
OURS["rwkv_jit compiled"] = partial(_ours, is_compiled=True)
WHO: dict[str, Callable[[Sizes, str], Made]] = {
    **OURS, "fla": _theirs,
    "fla fused loss": partial(_theirs, fuse_cross_entropy=False, fuse_linear_cross_entropy=True),
    "fla compiled": partial(_theirs, is_compiled=True),
}  # fmt: skip


def flops_of_token(sizes: Sizes, kind: str = "RWKV7") -> float:
    """Return the FLOPs of a token, forward and backward: six for each weight of a matrix, and the recurrence."""
    return 6 * models.matrices_of(sizes, MODELS[kind]) + 3 * models.flops_of_recurrence(sizes)


# ---- steps -------------------------------------------------------------------------------------------------------


class Training:
    """A model that takes steps on one batch of random tokens, in as many passes as it must."""

    def __init__(self, made: Made, sizes: Sizes, device: str) -> None:
        self._made, self.device, self.passes = made, device, 1
        self.dtype = str(made.groups[0]["params"][0].dtype).removeprefix("torch.")  # of the parameters
        self.optimizer = torch.optim.AdamW(made.groups, betas=BETAS, eps=EPS, fused=True)
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1), device=device)
        self._batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self._few = [x[:1, :_FEW].contiguous() for x in self._batch]
        self.loss = torch.zeros((), device=device)  # of the last step
        self._cast = partial(torch.autocast, device, torch.bfloat16, made.is_cast)
        self._pass = self._new_pass()

    def _eager(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._cast():
            loss = self._made.loss(tokens, targets)
        (loss / self.passes).backward()
        return loss.detach()

    def _new_pass(self) -> Any:
        made, dtype = self._made, torch.bfloat16 if self._made.is_cast else None
        if made.mode != GRAPHED:
            return self._eager
        return graphed_step(made.model, self.optimizer, loss=made.loss, accumulate=self.passes, autocast=dtype)

    def step(self) -> None:
        """Take a step."""
        self._step(*(x.chunk(self.passes) for x in self._batch))

    def short_step(self) -> None:
        """Take a step of as many passes of few tokens, which the host queues as a whole."""
        self._step(*([x] * self.passes for x in self._few))

    def _step(self, tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        losses = [self._pass(*pair) for pair in zip(tokens, targets, strict=True)]
        self.loss = torch.stack(losses).mean()
        if self._made.mode != GRAPHED:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """Take some steps that are not timed, in more passes where there is no memory for fewer."""
        while True:
            try:
                for _ in range(models.WARM_UP):
                    self.step()
                break
            except torch.OutOfMemoryError:
                if self.passes >= len(self._batch[0]):
                    raise
            self.passes *= 2
            self.optimizer.zero_grad()
            self._pass = self._new_pass()
            free()
        if self._made.mode == GRAPHED and self.device == "cuda" and not self._pass._calls.graphs:
            raise ValueError("no graph holds the step")


_EMPTY = dict[str, Any](median_ms=None, low_ms=None, high_ms=None, runs=0, peak_mib=None, skipped=None)
_EMPTY_STEP = {**dict.fromkeys(("parameters", "passes", "first_s", "loss")), **models.EMPTY}


def step_row(
    name: str, make: Callable[[], Made], sizes: Sizes, device: str, runs: int, ranks: int = 1,
    meet: Callable[[], None] = lambda: None, kind: str = "RWKV7",
) -> dict[str, Any]:  # fmt: skip
    """Measure the steps of one model; `ranks` of them take steps together once all `meet`."""
    row = {"part": "steps", "model": kind, "by": name, "ranks": ranks, **sizes._asdict(), **_EMPTY_STEP}
    with survived(row):
        begun = time.perf_counter()
        made = make()
        with models.running(made.mode):
            training = Training(made, sizes, device)
            training.warm_up()
            models.wait(device)
            row |= {"parameters": training.dtype, "passes": training.passes, "first_s": time.perf_counter() - begun}
            meet()
            row |= models.figures_of(training.step, device, runs, training.short_step)
            training.step()
        row["loss"] = loss = training.loss.item()
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss}")
        row["tokens_per_s"] = speed = ranks * sizes.batch * sizes.tokens / row["median_ms"] * 1e3
        if device == "cuda":
            row["flops_use"] = models.flops_use(flops_of_token(sizes, kind) * speed / ranks)
    return row


# ---- time mixing alone -------------------------------------------------------------------------------------------

_FUSED_NORM = {"fuse_norm": True}
LAYERS: dict[str, tuple[dict[str, Any] | None, Callable[[], AbstractContextManager[None]]]] = {
    "rwkv_jit": (None, nullcontext),
    "fla": ({}, nullcontext),
    "fla fused norm": (_FUSED_NORM, nullcontext),
    "fla fused norm, our wkv7": (_FUSED_NORM, rwkv7_models.with_our_wkv7),
}


def layer_row(name: str, sizes: Sizes, width: int, device: str) -> dict[str, Any]:
    """Measure time mixing of a layer behind the first one, forward and backward."""
    row = {"part": "layer", "by": name, "batch": sizes.batch, "tokens": sizes.tokens, "width": width, **_EMPTY}
    options, around = LAYERS[name]
    with survived(row), around():
        torch.manual_seed(0)
        ours = RWKV7TimeMix(width, 1, _DEPTH, HEAD_SIZE, device=device, dtype=torch.bfloat16)
        nn.init.normal_(ours.output.weight, std=0.02)  # zeros are faster
        random = partial(torch.randn, sizes.batch, sizes.tokens, width, device=device, dtype=torch.bfloat16)
        x, v_first, dy = random(requires_grad=True), random(requires_grad=True), random()  # [B, T, width]
        module: nn.Module = ours if options is None else rwkv7_models.fla_time_mix(ours, **options)
        wanted = [x, v_first, *module.parameters()]

        def call() -> Any:
            return torch.autograd.grad(module(x, v_first=v_first)[0], wanted, dy)

        if device == "cpu":
            return row | figures.spread(figures.cpu_ms(call))
        for _ in range(2):
            call()
        row["peak_mib"] = figures.peak_bytes(call) / 2**20
        (times,) = figures.interleaved([timing.Turns([call], in_graph=False).ms], _BUDGET_MS)
        if isinstance(times, Exception):
            raise times
        row |= figures.spread(times)
    return row


# ---- several GPUs ------------------------------------------------------------------------------------------------


class Sharding(NamedTuple):
    """How a model is spread: so many blocks are gathered at once, and may be freed after the forward."""

    blocks: int = 1
    frees: bool = True
    is_compiled: bool = False


SHARDED = {
    "fully_shard": Sharding(),
    "fully_shard, 8 blocks at once": Sharding(8),
    "fully_shard, 8 blocks at once, kept for the backward": Sharding(8, frees=False),
    "compiled, fully_shard, 8 blocks at once, kept for the backward": Sharding(8, frees=False, is_compiled=True),
}


def _one_rank(rank: int, ranks: int, sizes: Sizes, device: str, runs: int, folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=_PATIENCE)
    rows = []
    if rank == 0:
        rows.append(told(step_row("rwkv_jit", partial(WHO["rwkv_jit"], sizes, device), sizes, device, runs)))
    dist.barrier()
    for name, spread in SHARDED.items():
        if device == "cuda" or not spread.is_compiled:
            make = partial(_sharded, spread, sizes, device)
            rows.append(step_row(f"rwkv_jit {name}", make, sizes, device, runs, ranks, dist.barrier))
            if rank == 0:
                told(rows[-1])
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()
    os._exit(0)  # torch keeps the mesh, so threads of the group outlive it and may abort an interpreter that ends


def _sharded(spread: Sharding, sizes: Sizes, device: str) -> Made:
    model = rwkv7_models.our_model(sizes, device, torch.bfloat16)
    blocks = list(model.blocks)
    if spread.is_compiled:
        _allow_graphs(2 * len(blocks))
        for block in blocks:  # and not what gathers its parameters
            block.forward = torch.compile(block.forward)
    for begin in range(0, len(blocks), spread.blocks):
        fully_shard(blocks[begin : begin + spread.blocks], reshard_after_forward=spread.frees)
    fully_shard(model, reshard_after_forward=spread.frees)
    register_fsdp_forward_method(model, "loss")
    torch.manual_seed(dist.get_rank())  # of the tokens
    return Made(model.loss, model.param_groups(**RATES))


# ---- the command -------------------------------------------------------------------------------------------------


def has_fla(device: str) -> bool:
    """Return whether FLA's models can be measured, whose tuners then compile side by side and time a choice briefly."""
    is_there = device == "cuda" and find_spec("fla") is not None
    if is_there:
        tuners.time_briefly(*_TUNED_MS)
        with suppress(ImportError, AttributeError):  # another Triton's tuner compiles one by one
            tuners.compile_together()
    return is_there


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    models.add_sizes(parser, LARGE, SMALL, Sizes._fields)
    text = "instead of RWKV7, of rwkv_jit alone (may be repeated)"
    parser.add_argument("--model", action="append", choices=MODELS, help=text)
    parser.add_argument("--part", action="append", choices=MEASURED, help="only this one (default: both)")
    text = "only this one (may be repeated; default: rwkv_jit, and FLA where it is installed)"
    parser.add_argument("--who", action="append", choices=dict.fromkeys([*WHO, *LAYERS]), help=text)
    parser.add_argument("--layer-width", type=int, metavar="N", help=f"of the layer; default: {LAYER_WIDTH} on a GPU")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="timed steps (default: 10)")
    parser.add_argument("--record", action="store_true", help="keep the rows in bench.json")
    parser.add_argument("--ranks", type=int, metavar="N", help="instead: the model of rwkv_jit on N GPUs, with FSDP2")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for, and return the rows with where that was."""
    sizes, device = models.sizes_of(parsed, LARGE, SMALL)
    bench.use_one_thread()
    layer_width = parsed.layer_width or (LAYER_WIDTH if device == "cuda" else sizes.width)
    if layer_width < 1 or layer_width % HEAD_SIZE:
        raise ValueError(f"--layer-width: expected a multiple of {HEAD_SIZE}, got {layer_width}")
    is_there = has_fla(device)
    known = [name for name in dict.fromkeys([*WHO, *LAYERS]) if is_there or not name.startswith("fla")]
    for name in parsed.who or ():
        if name not in known:
            raise ValueError(f"--who: {name} needs a GPU and an installed FLA")
    if parsed.ranks is not None:
        available = torch.cuda.device_count() if device == "cuda" else parsed.ranks
        if not 1 < parsed.ranks <= available:
            raise ValueError(f"--ranks: expected from 2 to the {available} GPUs there are, got {parsed.ranks}")
        with tempfile.TemporaryDirectory() as folder:  # one rank alone, then all of them, each with its own batch
            spawn(_one_rank, (parsed.ranks, sizes, device, parsed.runs, folder), parsed.ranks)
            rows = json.loads(Path(folder, "rows").read_text())
    else:
        names, parts = parsed.who or known, parsed.part or MEASURED
        calls = [
            partial(step_row, name, partial(WHO[name], sizes, device, **more), sizes, device, parsed.runs, kind=kind)
            for kind in parsed.model or ["RWKV7"]
            for name in names if "steps" in parts and name in (WHO if kind == "RWKV7" else OURS)
            for more in [{} if name not in OURS else {"kind": kind}]
        ]  # fmt: skip
        if parsed.model is None or "RWKV7" in parsed.model:
            of_layer = [name for name in names if "layer" in parts and name in LAYERS]
            calls += [partial(layer_row, name, sizes, layer_width, device) for name in of_layer]
        if not calls:
            raise ValueError(f"--who: nothing of {', '.join(names)} is measured in {', '.join(parts)} of these models")
        rows = [told(call()) for call in calls]
    result = {"env": bench.environment(), "device": device, "rows": rows}
    if parsed.record:
        record.write(record.result_of(result), "training")
    return result


def told(row: dict[str, Any]) -> dict[str, Any]:
    """Say a row at once, and return it."""
    tell(json.dumps(row))
    return row


def tell(text: str) -> None:
    """Say at once how far it is."""
    print(text, file=sys.stderr, flush=True)


_STEPS = {
    "model": "{model}", "by": "{by}", "ranks": "{ranks}", "passes": "{passes}", **models.COLUMNS,
    "loss": "{loss:.3f}", "first s": "{first_s:.0f}",
}  # fmt: skip
_LAYER = {
    "by": "{by}", "ms": "{median_ms:.2f}", "quartiles": "{low_ms:.2f} to {high_ms:.2f}", "peak GiB": "{peak_gib:.2f}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print a table of each part, and what was left out."""
    tokens = "width {width}, ({batch}, {tokens}) tokens"
    steps = f"steps: {{layers}} layers, vocabulary {{vocabulary}}, {tokens}"
    models.show(result, [("steps", _STEPS, steps), ("layer", _LAYER, f"layer: {tokens}")], "{part}", METHODS)
