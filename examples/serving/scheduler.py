"""Many sequences at once: who has a slot, which pieces of prompts are read, and one token of each in a step."""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

import rwkv_jit

LEAST = 16  # tokens that are worth a kept state: fewer are read as fast as a state is copied


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
    queued: int = 0  # tokens that are written, or will be by what a GPU has to do
    found: int = 0  # those of them whose state was kept
    cut: int = 0  # where the prompt leaves another one: the state there is kept too
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each token was there
    told: int = 0  # how many of them whoever waits for them knows
    is_finished: bool = False

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("prompt: expected at least one token, got none")

    @cached_property
    def random(self) -> random.Random:
        """Its own, so that a text does not depend on other requests."""
        return random.Random(self.seed)

    @property
    def is_new(self) -> bool:
        """Whether there is something to tell."""
        return self.is_finished or self.told < len(self.tokens)


def moved(values: list, device: torch.device) -> Tensor:
    """Return numbers on a device, for which nobody waits."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def choose(logits: Tensor, requests: list[Request]) -> Tensor:
    """Return the next token of every request, [N]; row i of the logits, [N, vocabulary], is that of request i."""
    best = logits.argmax(-1)
    if all(request.temperature == 0 for request in requests):
        return best
    numbers = [(r.temperature or 1.0, r.top_p, r.random.random() if r.temperature else 0.0) for r in requests]
    temperature, top_p, draw = moved(numbers, logits.device).T.unsqueeze(-1)  # [N, 1] each
    chances = torch.softmax(logits.float() / temperature, dim=-1)  # [N, vocabulary]
    drawn = place(chances, draw)
    if any(request.top_p < 1 for request in requests):  # of each such row alone, as no row depends on others
        ordered, order = chances.sort(descending=True, stable=True)
        kept = ordered.cumsum(-1) - ordered < top_p  # the most likely token always is
        drawn = torch.where(top_p < 1, order.gather(-1, place(ordered * kept, draw)), drawn)
    is_drawn = moved([request.temperature > 0 for request in requests], logits.device)
    return torch.where(is_drawn, drawn.squeeze(-1), best)


def place(chances: Tensor, draw: Tensor) -> Tensor:
    """Return where the sums of chances, [N, vocabulary], pass the part of their total that is drawn, [N, 1]."""
    sums = chances.cumsum(-1)
    total = sums[:, -1:]
    last = (sums < total).sum(-1, keepdim=True)  # the last token that has a chance
    return torch.minimum(torch.searchsorted(sums, draw * total, right=True), last)


def prefill(model: nn.Module, pool: rwkv_jit.StatePool, pieces: list[tuple[int, list[int]]]) -> Tensor:
    """Read the next tokens of several slots, one text behind another, and return the logits behind each."""
    device = model.emb.weight.device
    tokens = moved([[token for _, piece in pieces for token in piece]], device)
    bounds = moved([0, *accumulate(len(piece) for _, piece in pieces)], device)
    return model.prefill(tokens, pool, [slot for slot, _ in pieces], bounds).float()


class Decoder:
    """One more token of many texts: batches are padded to a power of two, each with a CUDA graph of the model's."""

    def __init__(self, model: nn.Module, pool: rwkv_jit.StatePool, slots: int | None = None):
        self.model, self.pool, self.device = model, pool, model.emb.weight.device
        self.last = torch.zeros(len(pool), dtype=torch.int64, device=self.device)  # token of each slot
        most = 1 << ((slots or len(pool) - 1) - 1).bit_length()
        for size in reversed([1 << power for power in range(most.bit_length())]):  # on the padding
            for _ in range(2):  # the first compiles and loads what it needs, the second is captured
                self([0] * size)

    def __call__(self, slots: list[int]) -> Tensor:
        """Return the logits behind the last token of each slot."""
        count, size = len(slots), 1 << (len(slots) - 1).bit_length()
        rows = moved([*slots, *[0] * (size - count)], self.device)
        return self.model.step(self.last[rows], self.pool, rows)[:count]

    def keep(self, slots: list[int], tokens: Tensor) -> None:
        """Let tokens be the last ones of slots."""
        self.last[moved(slots, self.device)] = tokens


class Chosen:
    """The next tokens of requests, on their way from the GPU, and how long it works on those before them."""

    def __init__(self, work: str, device: torch.device):
        self.work, self.is_cuda = work, device.type == "cuda"
        self.requests: list[Request] = []
        self.count, self.begin = 0, self.mark()

    def mark(self):
        """Return the time, on a GPU that at which it comes here."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def send(self, requests: list[Request], count: int, tokens: Tensor | None) -> None:
        """Begin to copy the tokens of requests, behind work on so many tokens."""
        self.requests, self.count = requests, count
        self.tokens = None if tokens is None else tokens.to("cpu", non_blocking=True)
        self.end = self.mark()

    def wait(self) -> tuple[list[int], float]:
        """Return the tokens, and the seconds that they took."""
        if self.is_cuda:
            self.end.synchronize()
        seconds = self.begin.elapsed_time(self.end) / 1e3 if self.is_cuda else self.end - self.begin
        return [] if self.tokens is None else self.tokens.tolist(), seconds


@dataclass(eq=False)
class Prefix:
    """The beginning of a prompt: its tokens, the slot of the state behind them, and the logits there."""

    tokens: np.ndarray
    slot: int
    logits: Tensor


class Prefixes:
    """States behind beginnings of prompts. The one whose last use is longest ago leaves first."""

    def __init__(self, pool: rwkv_jit.StatePool, most: int):
        self.pool, self.most = pool, most
        self.kept: list[Prefix] = []  # the last one was used last

    def find(self, prompt: list[int]) -> tuple[Prefix | None, int]:
        """Return the longest kept beginning of a prompt, and how many tokens it shares with any kept one."""
        tokens = np.array(prompt)
        shared = [count_shared(prefix.tokens, tokens) for prefix in self.kept]
        whole = [prefix for prefix, count in zip(self.kept, shared, strict=True) if count == len(prefix.tokens)]
        found = max(whole, key=lambda prefix: len(prefix.tokens), default=None)
        if found:
            self.kept.remove(found)
            self.kept.append(found)
        return found, max(shared, default=0)

    def keep(self, prompt: list[int], slot: int, logits: Tensor) -> None:
        """Copy the state of a slot that has read these tokens."""
        tokens = np.array(prompt)
        if not self.most or len(tokens) < LEAST or any(np.array_equal(x.tokens, tokens) for x in self.kept):
            return
        if len(self.kept) == self.most:
            self.pool.free(self.kept.pop(0).slot)
        (copy,) = self.pool.fork(slot)
        self.kept.append(Prefix(tokens, copy, logits.clone()))


def count_shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many tokens two prompts have in common, from the first one on."""
    least = min(len(first), len(second))
    (differ,) = np.nonzero(first[:least] != second[:least])
    return int(differ[0]) if len(differ) else least


class Server:
    """Gives slots to requests, reads their prompts piece by piece, and writes all texts side by side.

    On a GPU a step queues its work before the tokens of the step before are read: the GPU does not wait for the host.
    So a text that has ended by its last token is written once or twice more, for nobody.
    """

    def __init__(self, model: nn.Module, slots: int, prefill_tokens: int, end: int | None = None, prefixes: int = 0):
        self.model, self.slots, self.prefill_tokens, self.end = model, slots, prefill_tokens, end
        self.pool = model.new_pool(slots + prefixes + 1, reserved=1)
        self.prefixes = Prefixes(self.pool, prefixes)
        self.decoder = Decoder(model, self.pool, slots)
        self.is_ahead = self.pool.device.type == "cuda"
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        self.running: list[Request] = []
        self.queued: list[Chosen] = []  # on a GPU, whose tokens nobody has read
        self.finished: list[Request] = []
        self.finished_count = 0  # whoever serves for ever shortens the list
        self.spent = {"prefill": [0, 0.0], "decode": [0, 0.0]}  # tokens and seconds
        for count in {1, prefill_tokens}:  # on the padding: kernels are there before the first request
            prefill(model, self.pool, [(0, [0] * count)])

    @property
    def is_busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.reading or self.running or self.queued)

    def step(self) -> None:
        """Let requests in, read up to `prefill_tokens` of prompts, and write a token of every running text."""
        queued, self.queued = self.queued, []
        for work in (self.enter, self.read, self.write):
            work()
            if not self.is_ahead:
                self.collect(self.queued)
                self.queued = []
        self.collect(queued)

    def enter(self) -> None:
        """Give free slots to those that wait longest, with the state of what they share with earlier prompts."""
        free = self.slots - len(self.reading) - len(self.running)
        for slot in self.pool.allocate(min(len(self.waiting), free)):
            request = self.waiting.popleft()
            request.slot = slot
            prefix, shared = self.prefixes.find(request.prompt)
            if prefix:
                self.pool.copy(prefix.slot, slot)
                request.read = request.found = len(prefix.tokens)
            if shared - request.read >= LEAST:
                request.cut = shared
            if request.read < len(request.prompt):
                self.reading.append(request)
            else:
                self.append(Chosen("prefill", self.pool.device), [request], 0, prefix.logits.unsqueeze(0))

    def read(self) -> None:
        """Read the next pieces of prompts in one call, oldest first."""
        chosen, left, taken, pieces = Chosen("prefill", self.pool.device), self.prefill_tokens, [], []
        for request in self.reading:
            end = request.cut if request.read < request.cut else len(request.prompt)
            piece = request.prompt[request.read : min(request.read + left, end)]
            if not piece:  # nothing is left for it
                break
            taken.append(request)
            pieces.append((request.slot, piece))
            request.read += len(piece)
            left -= len(piece)
        if not pieces:
            return
        logits = prefill(self.model, self.pool, pieces)
        for request, row in zip(taken, logits, strict=True):
            if request.read in (request.cut, len(request.prompt)):
                self.prefixes.keep(request.prompt[: request.read], request.slot, row)
        done = [row for row, request in enumerate(taken) if request.read == len(request.prompt)]
        ready = [taken[row] for row in done]
        self.reading = [request for request in self.reading if request.read < len(request.prompt)]
        if len(done) < len(taken):
            logits = logits[moved(done, logits.device)] if done else None
        self.append(chosen, ready, self.prefill_tokens - left, logits)

    def write(self) -> None:
        """Write one token of every running text."""
        if self.running:
            chosen, texts = Chosen("decode", self.pool.device), list(self.running)
            self.append(chosen, texts, len(texts), self.decoder([text.slot for text in texts]))

    def append(self, chosen: Chosen, requests: list[Request], count: int, logits: Tensor | None) -> None:
        """Queue the choice of the next tokens of texts. Those that get their last one free their slots."""
        tokens = None
        if requests:
            tokens = choose(logits, requests)
            self.decoder.keep([request.slot for request in requests], tokens)
        chosen.send(requests, count, tokens)
        self.queued.append(chosen)
        for request in requests:
            request.queued += 1
            if request.queued == 1:
                self.running.append(request)
            if request.queued == request.new_tokens:
                self.release(request)

    def release(self, request: Request) -> None:
        """Free the slot of a request: what is queued before the slot is read again comes first on a GPU too."""
        for line in (self.reading, self.running):
            if request in line:
                line.remove(request)
                self.pool.free(request.slot)

    def collect(self, queued: list[Chosen]) -> None:
        """Add tokens to texts as they come from the GPU."""
        for chosen in queued:
            tokens, seconds = chosen.wait()
            now = time.perf_counter()
            self.spent[chosen.work][0] += chosen.count
            self.spent[chosen.work][1] += seconds if chosen.count else 0.0
            for request, token in zip(chosen.requests, tokens, strict=True):
                if request.is_finished:  # by the token before
                    continue
                request.tokens.append(token)
                request.times.append(now)
                if len(request.tokens) == request.new_tokens or token == self.end:
                    request.is_finished = True
                    self.release(request)
                    self.finished.append(request)
                    self.finished_count += 1

    def drop(self, requests: Iterable[Request]) -> None:
        """Forget requests that nobody waits for any more, and free their slots."""
        for request in requests:
            if request in self.waiting:
                self.waiting.remove(request)
            self.release(request)
            request.is_finished = True
