"""Serve a model with continuous batching: requests come and go while others are being written.

    python examples/serve.py [--checkpoint FILE] [--vocabulary NAME] [--end-token TEXT] [--prompt TEXT] [--model KIND]
                             [--layers N] [--width N] [--head-size N] [--vocab N] [--requests N] [--rate R]
                             [--prompt-tokens N] [--new-tokens N] [--slots N] [--prefill-tokens N] [--temperature X]
                             [--top-p X] [--seed N] [--dtype TYPE] [--cpu] [--check] [--quiet] [--json]
    python examples/serve.py --http [HOST:]PORT [--queue N] [--prefixes N] [--max-tokens N] [--grace SECONDS] ...

Requests arrive at random times. In each step the server gives free slots to those that wait, reads pieces of all
prompts that are not read yet in one call, and writes one token of every running sequence in another one. On a GPU the
model does the writing from CUDA graphs, and the host reads tokens while the next step runs. A live table shows tokens
per second and latencies, and below it one sequence as it grows. --check then decodes every request again alone, and
exits with 1 if a token differs. The model is RWKV-7, that of arXiv:2503.14456. Without --checkpoint its weights are
random and so is what it writes; --model can then be kimi, gated_delta_net or mamba2 too, with layers of these. --layers
24 --width 2048 --vocab 65536 is a model of 1.5 billion parameters. With --http requests come from clients of OpenAI's
API: http://HOST:PORT/v1 has completions, chats and the model, until SIGINT or SIGTERM. The folder `serving` beside this
file has the scheduler and the API.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from serving import engine, models
from serving.scheduler import Request, Server, choose, prefill
from serving.vocabularies import TokenizerFile, Vocabulary, vocabulary_of
from torch import nn

import rwkv_jit
from rwkv_jit.nn import RWKV7

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL = {"layers": 4, "width": 256, "head_size": 64, "vocab": 256}  # of random weights
SMALL = 256  # the width up to which threads of a CPU wait for each other longer than they compute
# Where random vectors lie, by the end of their names; matrices have a variance of one over their inputs.
RANGES = {"w0": (-6, 1), "a0": (-1, 1), "v0": (-1, 1), "k_k": (0.7, 1), "k_a": (0.7, 1)}
RANGES |= {"weight": (1, 1), "bias": (0, 0)}
HTTP = {"queue": 256, "prefixes": 16, "max_tokens": 4096, "grace": 30}  # options of --http
PREFILL = {"cpu": 256, "cuda": 4096}  # tokens of prompts in a step: fewer would not fill a GPU
TIE = 0.3  # in 16 bits, how far a token may be from the best one, in standard deviations of the logits


def random_model(
    layers: int, width: int, head_size: int, vocab: int, seed: int, device: str, dtype, kind: str = "rwkv7"
) -> nn.Module:
    """Return a model with random parameters; with those that training begins with, layers would return zeros."""
    torch.manual_seed(seed)
    model, generator = models.make(kind, vocab, width, layers, head_size, device=device), torch.Generator(device)
    generator.manual_seed(seed)
    for name, x in model.state_dict().items():
        if x.dim() == 2:
            inputs = x.shape[1] if name.endswith("weight") else x.shape[0]
            x.normal_(std=inputs**-0.5, generator=generator)
        elif kind == "rwkv7":
            x.uniform_(*RANGES.get(name.rpartition(".")[2], (0, 1)), generator=generator)
    return model.to(dtype)


def check(model: nn.Module, requests: list[Request]) -> tuple[list[str], int]:
    """Decode requests again, each alone and by `prefill`; return what differs, and how many were near ties.

    In 16 bits the size of a batch changes the rounding, so that a token may win that is the second best alone. That is
    a near tie if the two logits are close. Drawn texts are left out there.
    """
    problems, ties, is_exact = [], 0, model.emb.weight.dtype == torch.float32
    pool = model.new_pool(1)
    for request in requests:
        if request.temperature and not is_exact:
            continue
        alone = Request(request.number, request.prompt, 0, 0, request.temperature, request.top_p, request.seed)
        (slot,) = pool.allocate()
        piece = request.prompt
        for place, token in enumerate(request.tokens):
            logits = prefill(model, pool, [(slot, piece)])
            (expected,) = choose(logits, [alone]).tolist()
            if token != expected:
                if is_exact or (logits[0, expected] - logits[0, token]) > TIE * logits.std():
                    problems.append(f"request {request.number}, token {place}: {token} served, {expected} alone")
                    break
                ties += 1
            piece = [token]
        pool.free(slot)
    return problems, ties


# ---- the program -------------------------------------------------------------------------------------------------


def make_requests(options: argparse.Namespace, vocabulary: Vocabulary | TokenizerFile) -> list[Request]:
    """Return requests for pieces of Python's help texts, with random lengths and random gaps between arrivals."""
    source, now, requests = random.Random(options.seed), 0.0, []
    text = vocabulary.encode("\n\n".join(topics[name] for name in sorted(topics))[:20_000].encode())
    for number in range(options.requests):
        now += source.expovariate(options.rate)
        count, new = (source.randint((n + 1) // 2, n + n // 2) for n in (options.prompt_tokens, options.new_tokens))
        begin = source.randrange(len(text))
        prompt = [text[(begin + i) % len(text)] for i in range(count)]
        if number == 0 and options.prompt is not None:
            prompt = vocabulary.encode(options.prompt.encode())
        if vocabulary.end is not None:
            prompt = [vocabulary.end, *prompt]
        sampling = options.temperature, options.top_p, f"{options.seed} {number}"
        requests.append(Request(number, prompt, new, now, *sampling))
    return requests


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Return the 50th, 90th and 99th percentile of seconds, in milliseconds."""
    ordered = sorted(values)
    places = {f"p{p}": max(0, math.ceil(len(ordered) * p / 100) - 1) for p in (50, 90, 99)}
    return {name: round(ordered[place] * 1e3, 3) if ordered else None for name, place in places.items()}


def measured(server: Server) -> dict:
    """Return tokens per second, and percentiles of the latencies."""
    begun = [request for request in [*server.finished, *server.running] if request.times]
    gaps = [after - before for r in begun for before, after in zip(r.times, r.times[1:], strict=False)]
    speeds = {f"{name}_tokens_per_s": round(n / s, 1) if s else None for name, (n, s) in server.spent.items()}
    first = percentiles([request.times[0] - request.arrival for request in begun])
    return {**speeds, "first_token_ms": first, "next_token_ms": percentiles(gaps)}


def view(server: Server, title: str, vocabulary: Vocabulary | TokenizerFile) -> Group:
    """Return the table, and the end of the oldest text that is still growing."""
    said = measured(server)
    counts = [f"{len(getattr(server, name))} {name}" for name in ("waiting", "reading", "running")]
    counts.append(f"{server.finished_count} finished")
    table = Table("work", "tokens/s", "time, ms", "p50", "p90", "p99", title=title, caption=", ".join(counts))
    for work, what in (("prefill", "first token"), ("decode", "next token")):
        numbers = said[f"{work}_tokens_per_s"], *said[f"{what.replace(' ', '_')}_ms"].values()
        speed, *times = ("-" if x is None else f"{x:,.1f}" for x in numbers)
        table.add_row(work, speed, what, *times)
    shown = min(server.running or server.finished[-1:], key=lambda request: request.number, default=None)
    if shown is None:
        return Group(table)
    prompt, text = vocabulary.decode(shown.prompt)[-200:], vocabulary.decode(shown.tokens)[-600:]
    return Group(table, Panel(Text.assemble((prompt, "dim"), text), title=f"request {shown.number}"))


def serve(server: Server, requests: list[Request], show) -> float:
    """Serve requests, each from its arrival on, and return the seconds that it took."""
    coming, begin = deque(requests), time.perf_counter()
    for request in requests:
        request.arrival += begin
    while coming or server.is_busy:
        while coming and coming[0].arrival <= time.perf_counter():
            server.waiting.append(coming.popleft())
        if server.is_busy:
            server.step()
        else:
            time.sleep(max(0.0, coming[0].arrival - time.perf_counter()))
        show()
    return time.perf_counter() - begin


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, or a host and a port as 127.0.0.1:8000, got {text}")
    return host.strip("[]") or "127.0.0.1", int(port)


def limited(kind: type, least: float, most: float = math.inf, above: bool = False):
    """Return a reader of a number from `least`, or above it, to `most`."""

    def read(text: str):
        value = kind(text)
        if not (least < value if above else least <= value) or value > most:
            lower = f"{'more than' if above else 'at least'} {least:g}"
            upper = "" if most == math.inf else f", at most {most:g}"
            raise argparse.ArgumentTypeError(f"expected {lower}{upper}, got {text}")
        return value

    read.__name__ = kind.__name__
    return read


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    count, counts = limited(int, 1), {"requests": 64, "prompt_tokens": 64, "new_tokens": 64, "slots": 16}
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help="an RWKV-7 model, .pth or .safetensors")
    said = f"of random weights: {', '.join(models.MODELS)}, by default {models.MODELS[0]}"
    parser.add_argument("--model", choices=models.MODELS, metavar="KIND", help=said)
    said = "its tokens: a list like RWKV's, a tokenizer.json, or rwkv for that of the package; else bytes"
    parser.add_argument("--vocabulary", metavar="NAME", type=Path, help=said)
    parser.add_argument("--end-token", metavar="TEXT", help="the token of a tokenizer.json that ends a sequence")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt of the first request")
    for name, default in MODEL.items():
        kind = limited(int, 256) if name == "vocab" else count
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"of random weights, by default {default}")
    for name, default in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=default, help=f"by default {default}")
    said = f"of prompts, read in a step; by default {PREFILL['cuda']} on a GPU, else {PREFILL['cpu']}"
    parser.add_argument("--prefill-tokens", type=count, metavar="N", help=said)
    parser.add_argument("--rate", type=limited(float, 0, above=True), default=8.0, help="requests per second, or inf")
    parser.add_argument("--temperature", type=limited(float, 0), default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-p", type=limited(float, 0, 1, above=True), default=1.0, help="by default 1")
    parser.add_argument("--seed", type=int, default=0, help="of weights, requests and sequences")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--check", action="store_true", help="decode every request again alone, and compare")
    parser.add_argument("--quiet", action="store_true", help="no live table")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON, and nothing else")
    parser.add_argument("--http", metavar="ADDRESS", type=address, help="serve OpenAI's API at [HOST:]PORT")
    for name, what in (
        ("queue", "requests that may wait for a slot"), ("prefixes", "beginnings of prompts whose states are kept"),
        ("max_tokens", "the longest answer, in tokens"), ("grace", "seconds that requests have to end after a signal"),
    ):  # fmt: skip
        kind, said = limited(int, 1 if name == "max_tokens" else 0), f"with --http: {what}; by default {HTTP[name]}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=said)
    options = parser.parse_args()
    refused = ("prompt", "check") if options.http else HTTP
    for name in refused:
        if getattr(options, name) not in (None, False):
            parser.error(f"--{name.replace('_', '-')} is for runs {'without' if options.http else 'with'} --http")
    for name, default in HTTP.items():
        setattr(options, name, default if getattr(options, name) is None else getattr(options, name))
    for name, default in {**MODEL, "model": models.MODELS[0]}.items():
        if options.checkpoint and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} is for random weights; the checkpoint has its own")
        setattr(options, name, getattr(options, name) or default)
    if options.width % options.head_size:
        parser.error(f"--width {options.width} is not a multiple of --head-size {options.head_size}")
    options.device = "cpu" if options.cpu or not rwkv_jit.is_available() else "cuda"
    if options.device == "cpu" and options.width <= SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.prefill_tokens = options.prefill_tokens or PREFILL[options.device]
    return options


def main() -> int | str:
    options = read_options()
    kind = options.device, DTYPES[options.dtype]
    if options.http:
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            return f"--http needs {error.name}: pip install starlette uvicorn"
    try:
        vocabulary = vocabulary_of(options.vocabulary, options.end_token)
        if options.http:
            connection, process = engine.start(options)
        if options.checkpoint:
            model = RWKV7.from_checkpoint(options.checkpoint, device=kind[0], dtype=kind[1])
        else:
            model = random_model(*[getattr(options, name) for name in MODEL], options.seed, *kind, options.model)
    except ImportError:
        return "a .safetensors file needs safetensors: pip install safetensors"
    except (OSError, ValueError) as error:
        return str(error)
    known = len(model.emb.weight)
    if vocabulary.largest >= known:
        return f"the vocabulary goes to token {vocabulary.largest}, the model to {known - 1}"
    try:
        requests = [] if options.http else make_requests(options, vocabulary)
    except ValueError as error:
        return f"--{error}"
    prefixes = options.prefixes if options.http else 0
    server = Server(model, options.slots, options.prefill_tokens, vocabulary.end, prefixes)
    count = sum(x.numel() for x in model.parameters())
    title = f"{options.model}, {count / 1e6:,.1f} M parameters, {options.device} {options.dtype}"
    pause = 0.5 if options.http else 0.1
    is_shown, last, failure = not (options.quiet or options.json), 0.0, None

    with Live(auto_refresh=False) if is_shown else nullcontext() as live:

        def show() -> None:
            nonlocal last
            if is_shown and (time.perf_counter() - last > pause or not server.is_busy):
                live.update(view(server, title, vocabulary), refresh=True)
                last = time.perf_counter()

        if options.http:
            begin = time.perf_counter()
            failure = engine.serve(server, connection, process, show)
            seconds = time.perf_counter() - begin
        else:
            seconds = serve(server, requests, show)
    said = {"model": title} | ({} if options.http else {"requests": len(requests)})
    said |= {"finished": server.finished_count, "seconds": round(seconds, 3)}
    said |= {f"{name}_tokens": spent[0] for name, spent in server.spent.items()} | measured(server)
    if failure:
        return failure
    problems = []
    if options.check:
        problems, ties = check(model, server.finished)
        said |= {"differ": len(problems), "near_ties": ties}
    if options.json:
        print(json.dumps(said))
    elif options.check and not problems:
        print(f"all {len(server.finished)} sequences are those of one-by-one decoding; near ties: {said['near_ties']}")
    return "\n".join(["not what one-by-one decoding writes:", *problems]) if problems else 0


if __name__ == "__main__":
    sys.exit(main())
