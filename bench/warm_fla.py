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
from functools import partial
from typing import Any

import torch

from bench import curves, models, training, tuners
from bench.rwkv7_models import Sizes
from rwkv_jit.desk import bench, terminal

_LAYERS = 2  # the first one has no mix of values
_VOCABULARY = 512  # the kernel of the loss has no tuner, and a large one takes memory


def _process(place: int, count: int, sizes: Sizes, layer_width: int) -> None:
    """Go through all that is measured of FLA, on models of few layers."""
    begun = time.monotonic()
    try:
        tuners.run_once()
        tuners.compile_together(place, count)
        small = sizes._replace(layers=_LAYERS, vocabulary=_VOCABULARY)
        works: dict[str, Callable[[], Any]] = {
            "the model": _steps("fla", small),
            "the fused loss": _steps("fla fused loss", small),
            "the layer": partial(training.layer_row, "fla fused norm", small, layer_width, "cuda"),
            "curves": _steps("fla", curves.SIZES._replace(layers=_LAYERS, width=sizes.width)),
        }
        turn = place % len(works)  # they need most memory at different times
        for name in [*works, *works][turn : turn + len(works)]:
            skipped = works[name]()["skipped"]
            said = f" with {skipped}" if skipped else ""
            training.tell(f"process {place}: {name} after {time.monotonic() - begun:.0f} s{said}")
    except Exception:
        training.tell(f"process {place}: {traceback.format_exc()}")


def _steps(name: str, sizes: Sizes) -> Callable[[], Any]:
    return partial(training.step_row, name, partial(training.WHO[name], sizes, "cuda"), sizes, "cuda", 2)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    models.add_sizes(parser, training.LARGE, training.SMALL, Sizes._fields)
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
    sizes, _ = models.sizes_of(parsed, training.LARGE, training.SMALL)
    # Their results are those of a share, and nobody's to keep.
    os.environ.update(FLA_CACHE_RESULTS="0", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    begun, start = time.monotonic(), multiprocessing.get_context("spawn").Process
    of_all = parsed.processes, sizes, parsed.layer_width
    processes = [start(target=_process, args=(place, *of_all), daemon=True) for place in range(parsed.processes)]
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
