"""Lets a scheduler work beside an event loop."""

import asyncio
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from serving.fields import Refused
from serving.scheduler import Request, Server

RECENT = 32  # finished requests that the table of latencies is about


class Engine:
    """Runs the steps of a `Server` in a thread, and hands each new token to whoever waits for it.

    While a step runs, nothing else touches the server: who comes and who leaves is noted, and told between two steps.
    """

    def __init__(self, server: Server, queue: int, show: Callable[[], None] = lambda: None):
        self.server, self.most, self.show = server, server.slots + queue, show
        self.open: dict[Request, tuple[asyncio.Queue, int, int]] = {}  # its queue, its index there, tokens in it
        self.coming: list[Request] = []
        self.leaving: list[Request] = []
        self.refusal: Refused | None = None  # what new requests are told: the engine stops, or has failed
        self.has_ended = False
        self.failure: str | None = None
        self.woken = asyncio.Event()

    async def run(self) -> None:
        """Work until `end`, and tell everybody if a step fails."""
        with ThreadPoolExecutor(1) as thread:
            try:
                await self.work(thread)
            except Exception as error:
                traceback.print_exc()
                self.failure = f"the server has failed: {type(error).__name__}: {error}"
                self.close(Refused(500, "the server has failed"))
                self.abandon()

    async def work(self, thread: ThreadPoolExecutor) -> None:
        """Take steps as long as there is something to do, and wait for it else."""
        loop, server = asyncio.get_running_loop(), self.server
        while not self.has_ended:
            self.woken.clear()
            server.waiting.extend(self.coming)
            server.drop(self.leaving)
            self.coming, self.leaving = [], []
            if server.is_busy:
                await loop.run_in_executor(thread, server.step)
                self.deliver()
                del server.finished[:-RECENT]
            else:
                await self.woken.wait()
            self.show()

    def submit(self, requests: list[Request]) -> asyncio.Queue:
        """Let requests in; return where their tokens will come, as index of the request, token, and whether it ends."""
        if self.refusal:
            raise self.refusal
        if len(requests) > self.most:
            raise Refused(400, f"prompt: expected at most {self.most} prompts, got {len(requests)}", "prompt")
        if len(self.open) + len(requests) > self.most:
            message = f"expected at most {self.most} requests at once, and these are open: try again later"
            raise Refused(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
        queue = asyncio.Queue()
        self.open |= {request: (queue, index, 0) for index, request in enumerate(requests)}
        self.coming += requests
        self.woken.set()
        return queue

    def leave(self, requests: Iterable[Request]) -> None:
        """Forget requests: those that are not finished free their slots before the next step."""
        self.leaving += [request for request in requests if self.open.pop(request, None)]
        self.woken.set()

    def deliver(self) -> None:
        """Hand out what the last step has written."""
        for request, (queue, index, told) in list(self.open.items()):
            for count, token in enumerate(request.tokens[told:], told + 1):
                queue.put_nowait((index, token, request.is_finished and count == len(request.tokens)))
            self.open[request] = queue, index, len(request.tokens)
            if request.is_finished:
                del self.open[request]

    def close(self, refusal: Refused) -> None:
        """Let nobody in any more."""
        self.refusal = self.refusal or refusal

    def abandon(self) -> None:
        """Tell all who still wait that they get no more, and free their slots."""
        for queue in {queue for queue, _, _ in self.open.values()}:
            queue.put_nowait(self.refusal)
        self.leave(list(self.open))

    def end(self) -> None:
        """Let `run` return after its step."""
        self.has_ended = True
        self.woken.set()
