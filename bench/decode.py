"""How fast whole language models decode: a token of each of several sequences, and prompts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import cases, models, record
from bench.models import GRAPHED, MODELS, NODES, PARTS
from bench.rwkv7_models import HEAD_SIZE, Sizes
from bench.training import tell, told
from rwkv_jit.desk import bench, figures
from rwkv_jit.nn.language_model import MOST_READ

LARGE, SMALL = Sizes(24, 2048, 1, 1, 65536), Sizes(2, 64, 1, 1, 256)  # the small ones without a GPU
BATCHES, PROMPTS = {"cuda": [1, 32, 256], "cpu": [1, 2]}, {"cuda": [512, 4096], "cpu": [16]}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_READ, _WRITTEN = 8, 64  # tokens
METHODS = (
    "Median and quartiles of a step. A token: `step` of so many sequences, whose states lie in a pool; of the bytes: "
    "weights and states, read and written, at the speed of a copy in the same run. A prompt: `prefill` of one "
    "sequence; of the FLOPs: two for each weight of a matrix and token, and the recurrence, of dense 16-bit matrices. "
    f"generate: a token of it, of {_WRITTEN} that continue prompts of {_READ}, drawn with its defaults, in a quarter "
    "as many runs. "
)
GENERATE = "generate"


def row_of(
    name: str, model: Any, mode: str, sizes: Sizes, device: str, runs: int, copy_tb_per_s: float | None
) -> dict[str, Any]:  # fmt: skip
    """Measure the steps of a model in one mode: those of a token each, or of a prompt where it has more tokens."""
    is_prompt = sizes.tokens > 1
    dtype = str(model.emb.weight.dtype).removeprefix("torch.")
    row = {
        "part": "prompt" if is_prompt else "token", "model": name, "by": f"rwkv_jit {mode}, {dtype}", "ranks": 1,
        **sizes._asdict(), "parameters": dtype, **models.EMPTY, "copy_use": None,
    }  # fmt: skip
    with models.survived(row), models.running(GRAPHED if mode == GENERATE else mode):
        model._decoder.steps.forget()
        model._decoder.prompts.forget()
        if mode == GENERATE:
            return row | generated(model, sizes, device, max(2, runs // 4))
        pool = model.new_pool(sizes.batch)
        step = _step_of(model, pool, sizes, device)
        for _ in range(models.WARM_UP):
            step()
        calls = model._decoder.prompts if is_prompt else model._decoder.steps
        if mode == GRAPHED and device == "cuda" and not calls.graphs:
            raise ValueError("no graph holds the step")
        row |= models.figures_of(step, device, runs)
        seconds = row["median_ms"] / 1e3
        row["tokens_per_s"] = sizes.batch * sizes.tokens / seconds
        if device == "cuda" and is_prompt:
            head = sizes.vocabulary * sizes.width * sizes.batch
            products = 2 * ((models.matrices_of(sizes, MODELS[name]) - head) * sizes.tokens + head)
            flops = sizes.batch * (products + sizes.tokens * models.flops_of_recurrence(sizes))
            row["flops_use"] = models.flops_use(flops / seconds)
        elif copy_tb_per_s is not None:
            row["copy_use"] = _bytes_of(model, pool) / (1e12 * copy_tb_per_s) / seconds
    return row


def generated(model: Any, sizes: Sizes, device: str, runs: int) -> dict[str, Any]:
    """Return what a row says of a token of `generate`, by the clock: prompts and the host's work are within."""
    prompts = torch.randint(sizes.vocabulary, (sizes.batch, _READ), device=device)  # [B, T]
    times = []  # of a token each, in milliseconds
    for _ in range(models.WARM_UP + runs):
        begun = time.perf_counter()
        model.generate(prompts, _WRITTEN).sum().item()
        times.append(1e3 * (time.perf_counter() - begun) / _WRITTEN)
    found = figures.spread(times[models.WARM_UP :])
    return found | {"tokens_per_s": sizes.batch / found["median_ms"] * 1e3}


def _step_of(model: Any, pool: Any, sizes: Sizes, device: str) -> Callable[[], Any]:
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens), device=device)
    if sizes.tokens > 1:
        return lambda: model.prefill(tokens, pool)
    last = tokens[:, 0].contiguous()
    return lambda: model.step(last, pool)


def _bytes_of(model: Any, pool: Any) -> int:
    """Return the bytes that a step of a token must read and write: weights but the embedding, and states both ways."""
    weights = [x for name, x in model.named_parameters() if name != "emb.weight"]
    states = [pool[name] for name in model._State._fields]
    return sum(int(x.nbytes) for x in weights) + 2 * sum(int(x.nbytes) for x in states)


# ---- the command -------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    text = "only this one (may be repeated; default: all)"
    parser.add_argument("--model", action="append", choices=MODELS, help=text)
    for name, values in (("batch", BATCHES), ("prompt", PROMPTS)):
        text = f"instead of {', '.join(map(str, values['cuda']))} (may be repeated; 0 leaves them out)"
        parser.add_argument(f"--{name}", action="append", type=int, metavar="N", dest=f"{name}_sizes", help=text)
    models.add_sizes(parser, LARGE, SMALL, ["layers", "width", "vocabulary"])
    text = "of the parameters; default: float16 on a GPU, float32 without one"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="timed steps (default: 20)")
    parser.add_argument("--record", action="store_true", help="keep the rows in bench.json")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for, and return the rows with where that was."""
    sizes, device = models.sizes_of(parsed, LARGE, SMALL)
    bench.use_one_thread()
    batches = _numbers("batch", parsed.batch_sizes, BATCHES[device], 1)
    prompts = _numbers("prompt", parsed.prompt_sizes, PROMPTS[device], 2)
    dtype, copy = DTYPES[parsed.dtype or ("float32" if device == "cpu" else "float16")], None
    if device == "cuda":
        copy = cases.copy_tb_per_s()
    calls = [(sizes._replace(batch=batch), mode) for batch in batches for mode in (PARTS, GRAPHED, GENERATE)]
    for tokens in prompts:
        modes = (PARTS, NODES, GRAPHED) if tokens <= MOST_READ else (PARTS, NODES)
        calls += [(sizes._replace(tokens=tokens), mode) for mode in modes]
    rows, model = list[dict[str, Any]](), None
    for name in parsed.model or MODELS:
        model = None  # before there is another
        models.free()
        tell(name)
        torch.manual_seed(0)
        model = MODELS[name](sizes.vocabulary, sizes.width, sizes.layers, HEAD_SIZE, device=device, dtype=dtype)
        models.fill_zeros(model)
        rows += [told(row_of(name, model, mode, each, device, parsed.runs, copy)) for each, mode in calls]
    result = {"env": bench.environment(), "device": device, "copy_tb_per_s": copy, "rows": rows}
    if parsed.record:
        record.write(record.result_of(result), "decode")
    return result


def _numbers(name: str, given: Sequence[int] | None, default: Sequence[int], least: int) -> list[int]:
    for value in given or ():
        if value != 0 and value < least:
            raise ValueError(f"--{name}: expected at least {least}, or 0 for none, got {value}")
    return [value for value in given or default if value]


_TOKENS = {"model": "{model}", "sequences": "{batch}", "by": "{by}", **models.COLUMNS, "of the bytes": "{copy_use:.0%}"}
_PROMPTS = {"model": "{model}", "tokens": "{tokens}", "by": "{by}", **models.COLUMNS}


def show(result: dict[str, Any]) -> None:
    """Print a table of tokens and one of prompts, and what was left out."""
    title = "a {part}: {layers} layers, width {width}, vocabulary {vocabulary}"
    models.show(result, [("token", _TOKENS, title), ("prompt", _PROMPTS, title)], "{model}, {part}", METHODS)
