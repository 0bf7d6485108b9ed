"""Loss curves of RWKV-7, ours and FLA's, from the same parameters on the same text, beside what noise does to them."""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from bench import models, rwkv7_models, training
from bench.rwkv7_models import Loss, Sizes
from rwkv_jit.desk import bench, terminal
from rwkv_jit.nn import RWKV7

SIZES = Sizes(24, 1024, 8, 512, 256)
_WINDOW = 20  # steps over which curves are smoothed
_WARM_UP = 20  # steps until the learning rate is reached
_TOLD = 50  # steps from line to line
_BYTES = 256


class Run(NamedTuple):
    """A training: whose model, in which precision, on which order of the text."""

    is_ours: bool = True
    is_wide: bool = False  # float32 parameters under autocast, in the place of bfloat16 ones and float32 copies
    order: int = 0


OURS, FLA = "rwkv_jit", "fla"
RUNS = {
    OURS: Run(), FLA: Run(is_ours=False), "rwkv_jit, autocast": Run(is_wide=True),
    "rwkv_jit, another order": Run(order=1),
}  # fmt: skip
METHODS = (
    "Both models begin with the same parameters and read the same batches. Parameters and gradients are bfloat16, with "
    "float32 copies that fused AdamW changes, as in the official trainer. Noise: our model again, with float32 "
    "parameters under autocast, and on another order of the text. Differences are of means over "
    f"{_WINDOW} steps. Logits: FLA's with our trained parameters against ours, by relative L2."
)


def batches(sizes: Sizes, steps: int, order: int) -> Tensor:
    """Return the tokens of all steps [steps, batch, tokens + 1], from places that go by the order.

    They are bytes of the sources of Python's standard library.
    """
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    source = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(order)
    begins = torch.randint(len(source) - sizes.tokens, (steps, sizes.batch, 1), generator=generator)
    return source[begins + torch.arange(sizes.tokens + 1)].long()


class Masters:
    """AdamW on float32 copies of parameters, which it rounds to them after each step; its rates grow at first."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._held: list[Tensor] = [x for group in groups for x in group["params"]]
        self._copies = [x.detach().float().clone() for x in self._held]
        copies = iter(self._copies)
        wide = [{**group, "params": [next(copies) for _ in group["params"]]} for group in groups]
        self._optimizer = torch.optim.AdamW(wide, betas=training.BETAS, eps=training.EPS, fused=True)
        self._rates = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1 / _WARM_UP, total_iters=_WARM_UP - 1)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and forget the gradients."""
        for x, copy in zip(self._held, self._copies, strict=True):
            assert x.grad is not None
            copy.grad, x.grad = x.grad.float(), None
        self._optimizer.step()
        self._rates.step()
        torch._foreach_copy_(self._held, self._copies)


def trained(run: Run, sizes: Sizes, steps: int, device: str) -> tuple[list[float], Any]:
    """Train one model, and return the loss of every step, and the model."""
    ours = rwkv7_models.our_model(sizes, device, torch.float32 if run.is_wide else torch.bfloat16)
    model: Any = ours if run.is_ours else rwkv7_models.fla_model(ours)
    loss: Loss = ours.loss if run.is_ours else rwkv7_models.fla_loss(model)
    groups = ours.param_groups(**training.RATES)
    optimizer = Masters(groups if run.is_ours else rwkv7_models.groups_in_fla(ours, model, **training.RATES))
    tokens = batches(sizes, steps, run.order).to(device)
    losses, begun = [], time.perf_counter()
    for step in range(steps):
        around: AbstractContextManager[Any] = torch.autocast(device, torch.bfloat16) if run.is_wide else nullcontext()
        with around:
            made = loss(tokens[step, :, :-1].contiguous(), tokens[step, :, 1:].contiguous())
        made.backward()
        optimizer.step()
        losses.append(made.detach())
        if (step + 1) % _TOLD == 0:
            training.tell(f"  step {step + 1}: loss {made.item():.4f}, {time.perf_counter() - begun:.1f} s")
    return torch.stack(losses).tolist(), model


@torch.no_grad()
def logits_apart(ours: RWKV7, sizes: Sizes, device: str) -> float:
    """Return how far FLA's logits are from ours, with our parameters, by relative L2."""
    tokens = batches(sizes, 1, 2)[0, :, :-1].to(device)
    theirs: Any = rwkv7_models.fla_model(ours)
    here, there = ours(tokens).float(), theirs(tokens, use_cache=False).logits.float()
    return float((there - here).norm() / here.norm())


def smoothed(losses: Sequence[float]) -> numpy.ndarray[Any, Any]:
    """Return the means over so many steps behind one another."""
    window = min(_WINDOW, len(losses))
    return numpy.convolve(losses, numpy.full(window, 1 / window), "valid")


def differences(curves: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return how far each smoothed curve is from ours: at most, and on the average of its last quarter."""
    others = {name: smoothed(losses) - smoothed(curves[OURS]) for name, losses in curves.items() if name != OURS}
    return {
        name: {"largest": float(abs(apart).max()), "end": float(apart[-max(len(apart) // 4, 1) :].mean())}
        for name, apart in others.items()
    }


def draw(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the smoothed curves, and how far they are from ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="tight")
    above, below = figure.subplots(2, sharex=True)
    for name, losses in curves.items():
        steps = range(min(_WINDOW, len(losses)) - 1, len(losses))
        above.plot(steps, smoothed(losses), label=name, linewidth=1)
        if name != OURS:
            below.plot(steps, smoothed(losses) - smoothed(curves[OURS]), label=name, linewidth=1)
    above.set(ylabel="loss, nats per byte")
    below.set(xlabel="step", ylabel=f"difference from {OURS}")
    for axis in (above, below):
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    models.add_sizes(parser, SIZES, training.SMALL, Sizes._fields)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="default: 300")
    parser.add_argument("--out", metavar="FOLDER", help="write curves.json, after each training, and curves.png there")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Train all that can be, and return curves, differences and what was left out."""
    sizes, device = models.sizes_of(parsed, SIZES, training.SMALL)
    if sizes.vocabulary < _BYTES:
        raise ValueError(f"--vocabulary: bytes are the tokens, expected at least {_BYTES}, got {sizes.vocabulary}")
    if parsed.steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {parsed.steps}")
    out = None if parsed.out is None else Path(parsed.out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    has_fla = training.has_fla(device)
    result: dict[str, Any] = {
        "env": bench.environment(), "device": device, "sizes": sizes._asdict(), "curves": {}, "differences": {},
        "logits_apart": None, "skipped": {},
    }  # fmt: skip
    for name, each in RUNS.items():
        models.free()
        if not each.is_ours and not has_fla:
            result["skipped"][name] = "needs a GPU and an installed FLA"
            continue
        training.tell(name)
        try:
            result["curves"][name], model = trained(each, sizes, parsed.steps, device)
            if name == OURS and has_fla:
                result["logits_apart"] = logits_apart(model, sizes, device)
                training.tell(f"  FLA's logits with our trained parameters: {result['logits_apart']:.2e} apart")
        except Exception as error:  # one that fails hides no other
            result["skipped"][name] = bench.one_line(error)
            training.tell(f"  {result['skipped'][name]}")
        model = None
        if OURS in result["curves"]:
            result["differences"] = differences(result["curves"])
        if out is not None:
            (out / "curves.json").write_text(json.dumps(result, indent=1, default=str))
            if OURS in result["curves"] and find_spec("matplotlib") is not None:
                draw(result["curves"], out / "curves.png")
    return result


_COLUMNS = {
    "by": "{by}", "first loss": "{first:.4f}", f"last {_WINDOW}": "{last:.4f}",
    "largest difference": "{largest:.4f}", "in the last quarter": "{end:+.4f}",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print where curves end, and how far they are apart."""
    terminal.say(bench.machine(result["env"]) if result["device"] == "cuda" else bench.CPU_NOTE)
    apart = {OURS: {"largest": None, "end": None}, **result["differences"]}
    rows = [
        {"by": name, "first": losses[0], "last": float(smoothed(losses)[-1]), **apart.get(name, apart[OURS])}
        for name, losses in result["curves"].items()
    ]
    if rows:
        terminal.records(_COLUMNS, rows)
    if result["logits_apart"] is not None:
        terminal.say(f"logits of FLA's model with our trained parameters: {result['logits_apart']:.2e} from ours")
    for name, why in result["skipped"].items():
        terminal.say(f"  skipped: {name}: {why}")
    terminal.say(f"\n{METHODS}")
