"""Compiles ahead what the tuners of FLA's RWKV-7 choose among, by many processes on one GPU.

A tuner compiles its choices one by one, which takes minutes. Here each process goes through the same training and
compiles its share of every tuner's choices into Triton's cache, TRITON_CACHE_DIR. Whoever trains behind them finds all
compiled, and only has to time the choices: their times beside other processes would mean nothing and are not kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from bench import curves, training
from bench.rwkv7_models import Sizes
from rwkv_jit.desk import bench, terminal

_LAYERS = 2  # the first one has no mix of values
_NEVER = [float("inf")] * 3
_VOCABULARY = 512  # the kernel of the loss has no tuner, and a large one takes memory


# ---- a process ---------------------------------------------------------------------------------------------------


def share_out(tuner: Any, together: Callable[..., Any], place: int, count: int, threads: int) -> None:
    """Let a tuner compile and try every `count`-th choice, beginning with that at `place`, and take one of them."""
    tried = tuner._bench

    def shared(self: Any, *given: Any, config: Any, **more: Any) -> Any:
        choices = list(self.prune_configs(more))
        if config == choices[0]:
            own = choices[place % len(choices) :: count]  # of fewer choices than processes too
            # What cannot be compiled says so when it is tried.
            with suppress(Exception), ThreadPoolExecutor(threads) as pool, together(pool, ignore_errors=True):
                for choice in own:
                    self.fn.run(*given, **{**more, **choice.all_kwargs(), "warmup": True})
            self.tried = {}
            for choice in dict.fromkeys([*own, *choices]):  # another one where none of its own can run
                if choice in own or all(times == _NEVER for times in self.tried.values()):
                    self.tried[choice] = tried(self, *given, config=choice, **more)
        return self.tried.get(config, _NEVER)

    tuner._bench = shared


def _once(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    """Run a choice once, in the place of timing it."""
    call()
    return [1.0] * 3


def _warm(place: int, count: int, sizes: Sizes, layer_width: int) -> None:
    """Go through all that is measured of FLA, on models of few layers."""
    begun = time.monotonic()
    tuner = import_module("triton.runtime.autotuner").Autotuner
    tuner.do_bench = property(lambda self: _once)
    threads = max((os.cpu_count() or 1) // count, 1)
    share_out(tuner, import_module("triton.runtime._async_compile").AsyncCompileMode, place, count, threads)
    small = sizes._replace(layers=_LAYERS, vocabulary=_VOCABULARY)
    of_curves = small._replace(batch=curves.SIZES.batch, tokens=curves.SIZES.tokens, vocabulary=curves.SIZES.vocabulary)
    works: dict[str, Callable[[], Any]] = {
        "the model": lambda: training.step_row("fla", lambda: training.WHO["fla"](small, "cuda"), small, "cuda", 2),
        "the fused loss": lambda: training.step_row(
            "fla fused loss", lambda: training.WHO["fla fused loss"](small, "cuda"), small, "cuda", 2
        ),
        "the layer": lambda: training.layer_row("fla fused norm", small, layer_width, "cuda"),
        "curves": lambda: training.step_row(
            "fla", lambda: training.WHO["fla"](of_curves, "cuda"), of_curves, "cuda", 2
        ),
    }
    turn = place % len(works)  # they need most memory at different times
    for name in [*works, *works][turn : turn + len(works)]:
        skipped = works[name]()["skipped"]
        said = f" with {skipped}" if skipped else ""
        training.tell(f"process {place}: {name} after {time.monotonic() - begun:.0f} s{said}")


def _process(place: int, *given: Any) -> None:
    try:
        _warm(place, *given)
    except Exception:
        training.tell(f"process {place}: {traceback.format_exc()}")


# ---- the command -------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    training.add_sizes(parser, training.LARGE)
    width = training.LAYER_WIDTH
    parser.add_argument("--layer-width", type=int, default=width, metavar="N", help=f"of the layer; default: {width}")
    parser.add_argument("--processes", type=int, default=8, metavar="N", help="at once (default: 8)")
    parser.add_argument("--seconds", type=float, default=600, metavar="N", help="time limit (default: 600)")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Start the processes, and wait for them."""
    if not torch.cuda.is_available():
        raise ValueError("warm-fla: needs a GPU, and torch sees none")
    bench.check_gpu()
    if parsed.processes < 1:
        raise ValueError(f"--processes: expected at least 1, got {parsed.processes}")
    sizes, _ = training.sizes_of(parsed, training.LARGE)
    # Their results are those of a share, and nobody's to keep.
    os.environ.update(FLA_CACHE_RESULTS="0", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    given = parsed.processes, sizes, parsed.layer_width
    processes = [
        context.Process(target=_process, args=(place, *given), daemon=True) for place in range(parsed.processes)
    ]
    for process in processes:
        process.start()
    late = 0
    for process in processes:
        process.join(max(begun + parsed.seconds - time.monotonic(), 0))
        if process.is_alive():
            late += 1
            process.kill()
    return {"processes": parsed.processes, "seconds": time.monotonic() - begun, "late": late}


def show(result: dict[str, Any]) -> None:
    """Print how long it took."""
    late = f"; {result['late']} of them did not end in time" if result["late"] else ""
    terminal.say(f"{result['processes']} processes took {result['seconds']:.0f} s{late}")
