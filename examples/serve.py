"""Serve an RWKV-7 model with continuous batching: requests come and go while others are being written.

    python examples/serve.py [--checkpoint FILE] [--vocabulary FILE] [--prompt TEXT] [--layers N] [--width N]
                             [--head-size N] [--vocab N] [--requests N] [--rate R] [--prompt-tokens N]
                             [--new-tokens N] [--slots N] [--prefill-tokens N] [--temperature X] [--top-p X]
                             [--seed N] [--dtype TYPE] [--cpu] [--check] [--quiet] [--json]

Requests arrive at random times. In each step the server gives free slots to those that wait, reads a piece of the
prompts that are not read yet, and writes one token of every running sequence. On a GPU the model does the writing from
CUDA graphs. A live table shows tokens per second and latencies, and below it one sequence as it grows. --check then
decodes every request again alone, and exits with 1 if a token differs. The model is that of arXiv:2503.14456. Without
--checkpoint its weights are random and so is what it writes. --layers 24 --width 2048 --vocab 65536 is a model of 1.5
billion parameters.
"""

import argparse
import ast
import json
import math
import os
import random
import sys
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

import rwkv_jit
from rwkv_jit.nn import RWKV7

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL = {"layers": 4, "width": 256, "head_size": 64, "vocab": 256}  # of random weights
SMALL = 256  # the width up to which threads of a CPU wait for each other longer than they compute
# Where random vectors lie, by the end of their names; matrices have a variance of one over their inputs.
RANGES = {"w0": (-6, 1), "a0": (-1, 1), "v0": (-1, 1), "k_k": (0.7, 1), "k_a": (0.7, 1)}
RANGES |= {"weight": (1, 1), "bias": (0, 0)}
TIE = 0.3  # in 16 bits, how far a token may be from the best one, in standard deviations of the logits


class Vocabulary:
    """The bytes of every token: one byte each, or those of a file like rwkv_vocab_v20230424.txt."""

    def __init__(self, path: Path | None):
        self.pieces = {byte: bytes([byte]) for byte in range(256)}
        self.end = None if path is None else 0  # the token between texts
        if path is not None:
            self.pieces = {self.end: b"", **self.read(path)}
        self.tokens = {piece: token for token, piece in self.pieces.items()}
        if any(bytes([byte]) not in self.tokens for byte in range(256)):
            raise ValueError(f"{path} is no vocabulary: expected a token for each single byte")
        self.longest = max(map(len, self.tokens))

    @staticmethod
    def read(path: Path) -> dict[int, bytes]:
        """Return the tokens of a file, whose lines are: number, the text as Python writes it, length."""
        pieces = {}
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                token, _, rest = line.partition(" ")
                try:
                    piece = ast.literal_eval(rest.rpartition(" ")[0])
                    pieces[int(token)] = piece.encode() if isinstance(piece, str) else bytes(piece)
                except (ValueError, SyntaxError, TypeError):
                    raise ValueError(f"{path} is no vocabulary: expected number, text, length; got {line!r}") from None
        return pieces

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text: the longest one that fits, again and again."""
        tokens, place = [], 0
        while place < len(text):
            ends = range(min(place + self.longest, len(text)), place, -1)
            end = next(end for end in ends if text[place:end] in self.tokens)
            tokens.append(self.tokens[text[place:end]])
            place = end
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return a text that a terminal can show."""
        text = b"".join(self.pieces.get(token, b"?") for token in tokens).decode(errors="replace")
        return "".join(x if x.isprintable() or x == "\n" else "\N{MIDDLE DOT}" for x in text)


# ---- requests ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt, and what became of it. Times are in seconds."""

    number: int
    prompt: list[int]
    new_tokens: int
    arrival: float = 0.0
    temperature: float = 0.0  # 0 takes the most likely token
    top_p: float = 1.0
    seed: str = ""
    slot: int = 0
    read: int = 0  # tokens of the prompt
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each token was there

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("prompt: expected at least one token, got none")
        self.random = random.Random(self.seed)  # its own, so that a text does not depend on other requests


def choose(logits: Tensor, requests: list[Request]) -> list[int]:
    """Return the next token of every request; row i of the logits is that of request i."""
    best = logits.argmax(-1)
    if all(request.temperature == 0 for request in requests):
        return best.tolist()
    numbers = [(r.temperature or 1.0, r.top_p, r.random.random() if r.temperature else 0.0) for r in requests]
    temperature, top_p, draw = torch.tensor(numbers, device=logits.device).T.unsqueeze(-1)
    chances, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True, stable=True)
    kept = chances.cumsum(-1) - chances < top_p  # the most likely token always is
    sums = (chances * kept).cumsum(-1)
    place = torch.searchsorted(sums, draw * sums[:, -1:], right=True)
    place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)
    drawn = order.gather(-1, place).squeeze(-1).tolist()
    return [x if r.temperature else y for r, x, y in zip(requests, drawn, best.tolist(), strict=True)]


def random_model(layers: int, width: int, head_size: int, vocab: int, seed: int, device: str, dtype) -> RWKV7:
    """Return a model with random parameters; with those that training begins with, all layers would return zeros."""
    model, generator = RWKV7(vocab, width, layers, head_size, device=device), torch.Generator(device).manual_seed(seed)
    for name, x in model.state_dict().items():
        if x.dim() == 2:
            inputs = x.shape[1] if name.endswith("weight") else x.shape[0]
            x.normal_(std=inputs**-0.5, generator=generator)
        else:
            x.uniform_(*RANGES.get(name.rpartition(".")[2], (0, 1)), generator=generator)
    return model.to(dtype)


def prefill(model: RWKV7, pool: rwkv_jit.StatePool, pieces: list[tuple[int, list[int]]]) -> Tensor:
    """Read the next tokens of several slots, one text behind another, and return the logits behind each."""
    device, slots = model.emb.weight.device, [slot for slot, _ in pieces]
    tokens = torch.tensor([[token for _, piece in pieces for token in piece]], device=device)
    bounds = torch.tensor([0, *accumulate(len(piece) for _, piece in pieces)], device=device)
    return model.prefill(tokens, pool, slots, bounds).float()


class Decoder:
    """One more token of many texts: batches are padded to a power of two, each with a CUDA graph of the model's."""

    def __init__(self, model: RWKV7, pool: rwkv_jit.StatePool):
        self.model, self.pool = model, pool
        most = 1 << (len(pool) - 2).bit_length()
        for size in reversed([1 << power for power in range(most.bit_length())]):  # on the padding
            for _ in range(2):  # the first compiles and loads what it needs, the second is captured
                self([0] * size, [0] * size)

    def __call__(self, tokens: list[int], slots: list[int]) -> Tensor:
        """Return the logits behind a token of each slot."""
        count, size = len(tokens), 1 << (len(tokens) - 1).bit_length()
        both = torch.tensor([[*given, *[0] * (size - count)] for given in (tokens, slots)])
        both = both.to(self.model.emb.weight.device)
        return self.model.step(both[0], self.pool, both[1])[:count].float()


class Server:
    """Gives slots to requests, reads their prompts piece by piece, and writes all texts side by side."""

    def __init__(self, model: RWKV7, slots: int, prefill_tokens: int, end: int | None = None):
        self.model, self.prefill_tokens, self.end = model, prefill_tokens, end
        self.pool = model.new_pool(slots + 1, reserved=1)
        self.decoder = Decoder(model, self.pool)
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.spent = {"prefill": [0, 0.0], "decode": [0, 0.0]}  # tokens and seconds
        for count in {1, prefill_tokens}:  # on the padding: kernels are there before the first request
            prefill(model, self.pool, [(0, [0] * count)])

    @property
    def is_busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.reading or self.running)

    def step(self) -> None:
        """Let requests in, read up to `prefill_tokens` of prompts, and write a token of every running text."""
        entering = min(len(self.waiting), self.pool.free_count)
        for slot in self.pool.allocate(entering):
            request = self.waiting.popleft()
            request.slot = slot
            self.reading.append(request)
        for name, work in (("prefill", self.read), ("decode", self.write)):
            begin = time.perf_counter()
            count = work()
            if self.pool.wkv.is_cuda:
                torch.cuda.synchronize()
            self.spent[name][0] += count
            self.spent[name][1] += (time.perf_counter() - begin) if count else 0.0

    def read(self) -> int:
        """Read the next piece of the prompts, oldest first; return how many tokens that were."""
        left, taken, pieces = self.prefill_tokens, [], []
        for request in self.reading:
            piece = request.prompt[request.read : request.read + left]
            if piece:
                taken.append(request)
                pieces.append((request.slot, piece))
                request.read += len(piece)
                left -= len(piece)
        if not pieces:
            return 0
        logits = prefill(self.model, self.pool, pieces)
        done = [row for row, request in enumerate(taken) if request.read == len(request.prompt)]
        if done:
            ready = [taken[row] for row in done]
            self.reading = [request for request in self.reading if request not in ready]
            self.running += ready
            self.append(ready, logits[done])
        return self.prefill_tokens - left

    def write(self) -> int:
        """Write one token of every running text; return how many they are."""
        texts = list(self.running)
        if texts:
            logits = self.decoder([text.tokens[-1] for text in texts], [text.slot for text in texts])
            self.append(texts, logits)
        return len(texts)

    def append(self, requests: list[Request], logits: Tensor) -> None:
        """Add the next token to texts, and free the slots of those that are finished."""
        chosen = choose(logits, requests)
        now = time.perf_counter()
        for request, token in zip(requests, chosen, strict=True):
            request.tokens.append(token)
            request.times.append(now)
            if len(request.tokens) == request.new_tokens or token == self.end:
                self.pool.free(request.slot)
                self.running.remove(request)
                self.finished.append(request)


def check(model: RWKV7, requests: list[Request]) -> tuple[list[str], int]:
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
            (expected,) = choose(logits, [alone])
            if token != expected:
                if is_exact or (logits[0, expected] - logits[0, token]) > TIE * logits.std():
                    problems.append(f"request {request.number}, token {place}: {token} served, {expected} alone")
                    break
                ties += 1
            piece = [token]
        pool.free(slot)
    return problems, ties


# ---- the program -------------------------------------------------------------------------------------------------


def make_requests(options: argparse.Namespace, vocabulary: Vocabulary) -> list[Request]:
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


def view(server: Server, title: str, vocabulary: Vocabulary) -> Group:
    """Return the table, and the end of the oldest text that is still growing."""
    said = measured(server)
    counts = [f"{len(getattr(server, name))} {name}" for name in ("waiting", "reading", "running", "finished")]
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
    count, counts = limited(int, 1), {"requests": 64, "prompt_tokens": 64, "new_tokens": 64, "prefill_tokens": 256}
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help="an RWKV-7 model, .pth or .safetensors")
    parser.add_argument("--vocabulary", metavar="FILE", type=Path, help="its tokens; without it a byte is a token")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt of the first request")
    for name, default in MODEL.items():
        kind = limited(int, 256) if name == "vocab" else count
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"of random weights, by default {default}")
    for name, default in (counts | {"slots": 16}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=default, help=f"by default {default}")
    parser.add_argument("--rate", type=limited(float, 0, above=True), default=8.0, help="requests per second, or inf")
    parser.add_argument("--temperature", type=limited(float, 0), default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-p", type=limited(float, 0, 1, above=True), default=1.0, help="by default 1")
    parser.add_argument("--seed", type=int, default=0, help="of weights, requests and sequences")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--check", action="store_true", help="decode every request again alone, and compare")
    parser.add_argument("--quiet", action="store_true", help="no live table")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON, and nothing else")
    options = parser.parse_args()
    for name, default in MODEL.items():
        if options.checkpoint and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} is for random weights; the checkpoint has its own")
        setattr(options, name, getattr(options, name) or default)
    if options.width % options.head_size:
        parser.error(f"--width {options.width} is not a multiple of --head-size {options.head_size}")
    options.device = "cpu" if options.cpu or not rwkv_jit.is_available() else "cuda"
    if options.device == "cpu" and options.width <= SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def main() -> int | str:
    options = read_options()
    kind = options.device, DTYPES[options.dtype]
    try:
        vocabulary = Vocabulary(options.vocabulary)
        if options.checkpoint:
            model = RWKV7.from_checkpoint(options.checkpoint, device=kind[0], dtype=kind[1])
        else:
            model = random_model(*[getattr(options, name) for name in MODEL], options.seed, *kind)
    except ImportError:
        return "a .safetensors file needs safetensors: pip install safetensors"
    except (OSError, ValueError) as error:
        return str(error)
    known = len(model.emb.weight)
    if max(vocabulary.pieces) >= known:
        return f"the vocabulary goes to token {max(vocabulary.pieces)}, the model to {known - 1}"
    try:
        requests = make_requests(options, vocabulary)
    except ValueError as error:
        return f"--{error}"
    server = Server(model, options.slots, options.prefill_tokens, vocabulary.end)
    count = sum(x.numel() for x in model.parameters())
    title = f"RWKV-7, {count / 1e6:,.1f} M parameters, {options.device} {options.dtype}"
    is_shown, last = not (options.quiet or options.json), 0.0

    with Live(auto_refresh=False) if is_shown else nullcontext() as live:

        def show() -> None:
            nonlocal last
            if is_shown and (time.perf_counter() - last > 0.1 or not server.is_busy):
                live.update(view(server, title, vocabulary), refresh=True)
                last = time.perf_counter()

        seconds = serve(server, requests, show)
    said = {"model": title, "requests": len(requests), "finished": len(server.finished), "seconds": round(seconds, 3)}
    said |= {f"{name}_tokens": spent[0] for name, spent in server.spent.items()} | measured(server)
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
