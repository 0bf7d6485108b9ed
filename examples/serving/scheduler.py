"""Many sequences at once: who has a slot, which pieces of prompts are read, and one token of each in a step."""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    found: int = 0  # those of them whose state was kept
    cut: int = 0  # where the prompt leaves another one: the state there is kept too
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each token was there
    is_finished: bool = False

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


def prefill(model: nn.Module, pool: rwkv_jit.StatePool, pieces: list[tuple[int, list[int]]]) -> Tensor:
    """Read the next tokens of several slots, one text behind another, and return the logits behind each."""
    device, slots = model.emb.weight.device, [slot for slot, _ in pieces]
    tokens = torch.tensor([[token for _, piece in pieces for token in piece]], device=device)
    bounds = torch.tensor([0, *accumulate(len(piece) for _, piece in pieces)], device=device)
    return model.prefill(tokens, pool, slots, bounds).float()


class Decoder:
    """One more token of many texts: batches are padded to a power of two, each with a CUDA graph of the model's."""

    def __init__(self, model: nn.Module, pool: rwkv_jit.StatePool, slots: int | None = None):
        self.model, self.pool = model, pool
        most = 1 << ((slots or len(pool) - 1) - 1).bit_length()
        for size in reversed([1 << power for power in range(most.bit_length())]):  # on the padding
            for _ in range(2):  # the first compiles and loads what it needs, the second is captured
                self([0] * size, [0] * size)

    def __call__(self, tokens: list[int], slots: list[int]) -> Tensor:
        """Return the logits behind a token of each slot."""
        count, size = len(tokens), 1 << (len(tokens) - 1).bit_length()
        both = torch.tensor([[*given, *[0] * (size - count)] for given in (tokens, slots)])
        both = both.to(self.model.emb.weight.device)
        return self.model.step(both[0], self.pool, both[1])[:count].float()


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
    """Gives slots to requests, reads their prompts piece by piece, and writes all texts side by side."""

    def __init__(self, model: nn.Module, slots: int, prefill_tokens: int, end: int | None = None, prefixes: int = 0):
        self.model, self.slots, self.prefill_tokens, self.end = model, slots, prefill_tokens, end
        self.pool = model.new_pool(slots + prefixes + 1, reserved=1)
        self.prefixes = Prefixes(self.pool, prefixes)
        self.decoder = Decoder(model, self.pool, slots)
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.finished_count = 0  # whoever serves for ever shortens the list
        self.spent = {"prefill": [0, 0.0], "decode": [0, 0.0]}  # tokens and seconds
        for count in {1, prefill_tokens}:  # on the padding: kernels are there before the first request
            prefill(model, self.pool, [(0, [0] * count)])

    @property
    def is_busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.reading or self.running)

    def step(self) -> None:
        """Let requests in, read up to `prefill_tokens` of prompts, and write a token of every running text."""
        self.enter()
        for name, work in (("prefill", self.read), ("decode", self.write)):
            begin = time.perf_counter()
            count = work()
            if self.pool.device.type == "cuda":
                torch.cuda.synchronize()
            self.spent[name][0] += count
            self.spent[name][1] += (time.perf_counter() - begin) if count else 0.0

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
                self.running.append(request)
                self.append([request], prefix.logits.unsqueeze(0))

    def read(self) -> int:
        """Read the next piece of the prompts, oldest first; return how many tokens that were."""
        left, taken, pieces = self.prefill_tokens, [], []
        for request in self.reading:
            end = request.cut if request.read < request.cut else len(request.prompt)
            piece = request.prompt[request.read : min(request.read + left, end)]
            if piece:
                taken.append(request)
                pieces.append((request.slot, piece))
                request.read += len(piece)
                left -= len(piece)
        if not pieces:
            return 0
        logits = prefill(self.model, self.pool, pieces)
        for request, row in zip(taken, logits, strict=True):
            if request.read in (request.cut, len(request.prompt)):
                self.prefixes.keep(request.prompt[: request.read], request.slot, row)
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
                request.is_finished = True
                self.pool.free(request.slot)
                self.running.remove(request)
                self.finished.append(request)
                self.finished_count += 1

    def drop(self, requests: Iterable[Request]) -> None:
        """Forget requests that nobody waits for any more, and free their slots."""
        for request in requests:
            if request in self.waiting:
                self.waiting.remove(request)
            for line in (self.reading, self.running):
                if request in line:
                    line.remove(request)
                    self.pool.free(request.slot)
