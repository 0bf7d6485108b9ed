"""How fast whole models of RWKV-7 train, ours and FLA's, on one GPU and on several, and their time mixing alone."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.multiprocessing.spawn import spawn

from bench import record, rwkv7_models, timing, tuners
from bench.rwkv7_models import HEAD_SIZE, Loss, Sizes
from rwkv_jit.desk import bench, figures, terminal
from rwkv_jit.nn import RWKV7, RWKV7TimeMix

LARGE, SMALL = Sizes(24, 1024, 8, 4096, 65536), Sizes(2, 64, 2, 32, 256)  # the small ones without a GPU
LAYER_WIDTH = 2048
RATES = {"lr": 4e-4, "weight_decay": 0.1}
BETAS, EPS = (0.9, 0.99), 1e-18  # those of the official trainer
PARTS = ("steps", "layer")
_WARM_UP, _BUDGET_MS, _DEPTH = 3, 1000.0, 24
_PEAKS = {"H100": 989e12, "H200": 989e12}  # FLOPs a second of dense bfloat16 matrices
_PATIENCE = timedelta(minutes=2)  # for another rank
_TUNED_MS = 2, 10  # that tuners warm a choice up, and time it
METHODS = (
    "Median and quartiles of a step: loss, backward and fused AdamW, no clipping. Gradients and moments have the dtype "
    "of the parameters. Those of float32 are under autocast to bfloat16, where FLA's model would keep the residual and "
    "its elementwise work in float32. "
    "Passes: so many parts of the batch add up their gradients, the fewest that fit. Memory: the peak, with parameters "
    "and moments. FLOPs: six for each weight of a matrix and token, and the recurrence, of dense bfloat16. A layer: "
    "forward and backward, with the peak beside its inputs and parameters."
)


# ---- who trains --------------------------------------------------------------------------------------------------

Made = tuple[Loss, list[dict[str, Any]]]  # a model's loss, and the groups of its optimizer


def _compiled(blocks: Sequence[nn.Module], is_compiled: bool) -> None:
    """Compile layer by layer, however many graphs they are, if that is wanted."""
    if is_compiled:
        _allow_graphs(2 * len(blocks))
        for block in blocks:
            block.compile()


def _allow_graphs(count: int) -> None:
    """Let torch compile so many graphs of one function, or more where it may."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def _ours(sizes: Sizes, device: str, dtype: torch.dtype = torch.bfloat16, is_compiled: bool = False) -> Made:
    model = rwkv7_models.our_model(sizes, device, dtype)
    _compiled(list(model.blocks), is_compiled)
    loss = torch.autocast(device, torch.bfloat16, dtype != torch.bfloat16)(model.loss)
    return loss, model.param_groups(**RATES)


def _theirs(sizes: Sizes, device: str, is_compiled: bool = False, **options: Any) -> Made:
    ours = rwkv7_models.our_model(sizes, device, torch.bfloat16)
    model: Any = rwkv7_models.fla_model(ours, **options)
    _compiled(list(model.model.layers), is_compiled)
    return rwkv7_models.fla_loss(model), rwkv7_models.groups_in_fla(ours, model, **RATES)


WHO: dict[str, Callable[[Sizes, str], Made]] = {
    "rwkv_jit": _ours,
    "rwkv_jit, float32 parameters": partial(_ours, dtype=torch.float32),
    "rwkv_jit compiled": partial(_ours, is_compiled=True),
    "fla": _theirs,
    "fla fused loss": partial(_theirs, fuse_cross_entropy=False, fuse_linear_cross_entropy=True),
    "fla compiled": partial(_theirs, is_compiled=True),
}


def flops_of_token(sizes: Sizes) -> float:
    """Return the FLOPs of a token, forward and backward: six for each weight of a matrix, and the recurrence."""
    model = RWKV7(sizes.vocabulary, sizes.width, sizes.layers, HEAD_SIZE, device="meta")
    matrices = sum(
        x.numel()
        for name, x in model.named_parameters()
        if x.dim() == 2 and name != "emb.weight" and not name.endswith("r_k")
    )
    return 6 * matrices + 3 * sizes.layers * 8 * sizes.width * HEAD_SIZE


# ---- steps -------------------------------------------------------------------------------------------------------


class Training:
    """A model that takes steps on one batch of random tokens, in as many passes as it must."""

    def __init__(self, loss: Loss, groups: list[dict[str, Any]], sizes: Sizes, device: str) -> None:
        self._loss, self.device, self.passes = loss, device, 1
        self.dtype = str(groups[0]["params"][0].dtype).removeprefix("torch.")  # of the parameters
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, fused=True)
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1), device=device)
        self._tokens, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self) -> Tensor:
        """Take a step, and return its loss."""
        total = torch.zeros((), device=self.device)
        parts = zip(self._tokens.chunk(self.passes), self._targets.chunk(self.passes), strict=True)
        for tokens, targets in parts:
            loss = self._loss(tokens, targets) / self.passes
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def warm_up(self) -> None:
        """Take some steps that are not timed, in more passes where there is no memory for fewer."""
        most = len(self._tokens)
        while True:
            try:
                for _ in range(_WARM_UP):
                    self.step()
                return
            except torch.OutOfMemoryError:
                if self.passes >= most:
                    raise
            self.passes *= 2
            self.optimizer.zero_grad()
            free()

    def timed(self, runs: int) -> tuple[list[float], float]:
        """Return the milliseconds of each of some steps, one behind the other, and the last loss."""
        stamps, loss = [_stamp(self.device)], torch.zeros(())
        for _ in range(runs):
            loss = self.step()
            stamps.append(_stamp(self.device))
        if self.device == "cpu":
            return [1e3 * (after - before) for before, after in pairwise(stamps)], loss.item()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(stamps)], loss.item()


def _stamp(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def free() -> None:
    """Give memory back that nobody holds any more."""
    torch.compiler.reset()  # compiled code holds models
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_EMPTY = dict[str, Any](median_ms=None, low_ms=None, high_ms=None, runs=0, peak_mib=None, skipped=None)
_OF_STEPS = ("parameters", "passes", "first_s", *_EMPTY, "tokens_per_s", "flops_use", "loss")
_EMPTY_STEP = dict.fromkeys(_OF_STEPS) | _EMPTY


def step_row(
    name: str, make: Callable[[], Made], sizes: Sizes, device: str, runs: int, ranks: int = 1,
    meet: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the steps of one model; `ranks` of them take steps together once all `meet`."""
    row = {"part": "steps", "by": name, "ranks": ranks, **sizes._asdict(), **_EMPTY_STEP}
    with _survived(row):
        begun = time.perf_counter()
        training = Training(*make(), sizes, device)
        training.warm_up()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        row |= {"parameters": training.dtype, "passes": training.passes, "first_s": time.perf_counter() - begun}
        meet()
        times, loss = training.timed(runs)
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss}")
        row |= figures.spread(times) | {"loss": loss}
        row["tokens_per_s"] = speed = ranks * sizes.batch * sizes.tokens / row["median_ms"] * 1e3
        if device == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
            known = [peak for gpu, peak in _PEAKS.items() if gpu in torch.cuda.get_device_name()]
            if known:
                row["flops_use"] = flops_of_token(sizes) * speed / known[0] / ranks
    return row


@contextmanager
def _survived(row: dict[str, Any]) -> Iterator[None]:
    """Let what fails inside be a row that says why, and hide no other."""
    free()  # what the row before has left
    try:
        yield
    except Exception as error:
        row["skipped"] = bench.one_line(error)


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
    with _survived(row), around():
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
    return model.loss, model.param_groups(**RATES)


# ---- the command -------------------------------------------------------------------------------------------------


def has_fla(device: str) -> bool:
    """Return whether FLA's models can be measured, whose tuners time a choice briefly then."""
    is_there = device == "cuda" and find_spec("fla") is not None
    if is_there:
        tuners.time_briefly(*_TUNED_MS)
    return is_there


def add_sizes(parser: argparse.ArgumentParser, large: Sizes) -> None:
    """Give a command the options of sizes."""
    for name, value in large._asdict().items():
        text = f"default: {value} on a GPU, {getattr(SMALL, name)} without one"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    add_sizes(parser, LARGE)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one (default: both)")
    text = "only this one (may be repeated; default: rwkv_jit, and FLA where it is installed)"
    parser.add_argument("--who", action="append", choices=dict.fromkeys([*WHO, *LAYERS]), help=text)
    parser.add_argument("--layer-width", type=int, metavar="N", help=f"of the layer; default: {LAYER_WIDTH} on a GPU")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="timed steps (default: 10)")
    parser.add_argument("--record", action="store_true", help="keep the rows in bench.json")
    parser.add_argument("--ranks", type=int, metavar="N", help="instead: the model of rwkv_jit on N GPUs, with FSDP2")


def sizes_of(parsed: argparse.Namespace, large: Sizes) -> tuple[Sizes, str]:
    """Return what the options say of sizes, once they are checked, and the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = large if device == "cuda" else SMALL
    given = [getattr(parsed, name) for name in Sizes._fields]
    sizes = Sizes(*(own if asked is None else asked for asked, own in zip(given, default, strict=True)))
    for name, value in sizes._asdict().items():
        if value < 1:
            raise ValueError(f"--{name}: expected at least 1, got {value}")
    if sizes.width % HEAD_SIZE:
        raise ValueError(f"--width: expected a multiple of {HEAD_SIZE}, got {sizes.width}")
    if device == "cuda":
        bench.check_gpu()
    return sizes, device


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for, and return the rows with where that was."""
    sizes, device = sizes_of(parsed, LARGE)
    layer_width = parsed.layer_width or (LAYER_WIDTH if device == "cuda" else sizes.width)
    if layer_width < 1 or layer_width % HEAD_SIZE:
        raise ValueError(f"--layer-width: expected a multiple of {HEAD_SIZE}, got {layer_width}")
    if parsed.runs < 2:
        raise ValueError(f"--runs: expected at least 2, got {parsed.runs}")
    if parsed.record and device == "cpu":
        raise ValueError("--record: keeps what was measured on a GPU, and there is none")
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
        names, parts = parsed.who or known, parsed.part or PARTS
        calls = {
            "steps": {
                name: partial(step_row, name, partial(make, sizes, device), sizes, device, parsed.runs)
                for name, make in WHO.items()
            },
            "layer": {name: partial(layer_row, name, sizes, layer_width, device) for name in LAYERS},
        }
        rows = [told(calls[part][name]()) for part in PARTS if part in parts for name in names if name in calls[part]]
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
    "by": "{by}", "ranks": "{ranks}", "parameters": "{parameters}", "passes": "{passes}",
    "ms a step": "{median_ms:.1f}", "quartiles": "{low_ms:.1f} to {high_ms:.1f}",
    "tokens a second": "{tokens_per_s:,.0f}", "of the FLOPs": "{flops_use:.1%}",
    "peak GiB": "{peak_gib:.1f}", "loss": "{loss:.3f}", "first s": "{first_s:.0f}",
}  # fmt: skip
_LAYER = {
    "by": "{by}", "ms": "{median_ms:.2f}", "quartiles": "{low_ms:.2f} to {high_ms:.2f}", "peak GiB": "{peak_gib:.2f}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print a table of each part, and what was left out."""
    terminal.say(bench.machine(result["env"]) if result["device"] == "cuda" else bench.CPU_NOTE)
    rows = [row | {"peak_gib": row["peak_mib"] and row["peak_mib"] / 1024} for row in result["rows"]]
    for part, columns in (("steps", _STEPS), ("layer", _LAYER)):
        done = [row for row in rows if row["part"] == part and row["skipped"] is None]
        if done:
            first = done[0]
            of_model = f"{first['layers']} layers, vocabulary {first['vocabulary']}, " if part == "steps" else ""
            terminal.say(f"\n{part}: {of_model}width {first['width']}, ({first['batch']}, {first['tokens']}) tokens")
            terminal.records(columns, done, ("quartiles",))
    for row in rows:
        if row["skipped"] is not None:
            terminal.say(f"  skipped: {row['part']}, {row['by']}: {row['skipped']}")
    terminal.say(f"\n{METHODS}")
