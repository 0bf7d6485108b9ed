"""Between an event loop, which talks with clients, and a scheduler in another process, whose steps wait for nobody."""

import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from serving.fields import Refused
from serving.scheduler import Request, Server

RECENT = 32  # finished requests that the table of latencies is about


# ---- the side of the scheduler -----------------------------------------------------------------------------------


def work(server: Server, connection: Connection, show: Callable[[], None] = lambda: None) -> str | None:
    """Take the steps of a server as long as there is something to do, until the other side ends it.

    Returns what has failed. Who comes and who leaves is told between two steps, and so is each new token.
    """
    requests: dict[int, Request] = {}
    with connection:
        try:
            while True:
                while connection.poll(0 if server.is_busy else None):
                    kind, what = connection.recv()
                    if kind == "end":
                        return None
                    if kind == "leave":
                        server.drop([requests.pop(number) for number in what if number in requests])
                        continue
                    for request in what:
                        request.arrival = time.perf_counter()
                        requests[request.number] = request
                        server.waiting.append(request)
                server.step()
                del server.finished[:-RECENT]
                told = [(x.number, x.tokens[x.told :], x.is_finished, x.found) for x in requests.values() if x.is_new]
                if told:
                    for number, *_ in told:
                        requests[number].told = len(requests[number].tokens)
                    connection.send(told)
                    requests = {number: x for number, x in requests.items() if not x.is_finished}
                show()
        except (EOFError, ConnectionError):
            return "the HTTP server has ended"
        except Exception as error:
            traceback.print_exc()
            failure = f"the server has failed: {type(error).__name__}: {error}"
            with suppress(OSError):
                connection.send(failure)
            return failure


def start(options: Any) -> tuple[Connection, Any]:
    """Start the process of the API, which waits for what `work` and `Engine` need: `tell` says it."""
    context = get_context("spawn")  # a fork would share what threads of torch hold
    ours, others = context.Pipe()
    process = context.Process(target=listen, args=(others, options), daemon=True)
    process.start()
    others.close()
    return ours, process


def serve(server: Server, connection: Connection, process: Any, show: Callable[[], None]) -> str | None:
    """Work for the process of the API until it ends, and return what has failed. Signals are for that process."""

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        connection.send((server.slots, len(server.model.emb.weight)))
        failure = work(server, connection, show)
        process.join()
        return failure
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(connection: Connection, options: Any) -> None:
    """Serve the API: what the process of `start` does."""
    with suppress(AttributeError):
        os.setsid()  # a signal of the terminal comes from the scheduler's process, once
    from serving.api import HTTPServer
    from serving.vocabularies import vocabulary_of

    vocabulary = vocabulary_of(options.vocabulary, options.end_token)
    try:
        slots, known = connection.recv()
    except (EOFError, ConnectionError):  # there is no model to serve
        return
    engine = Engine(connection, slots + options.queue)
    name = options.checkpoint.stem if options.checkpoint else "random"
    http = HTTPServer(engine, vocabulary, known, name, *options.http, options.max_tokens, options.grace)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises its signals again when it has ended
        signal.signal(number, http.handle_exit)
    http.run()
    sys.stderr.flush()


# ---- the side of the clients -------------------------------------------------------------------------------------


class Engine:
    """Sends requests to the scheduler, and hands each new token to whoever waits for it."""

    def __init__(self, connection: Connection, most: int):
        self.connection, self.most = connection, most
        self.open: dict[int, tuple[asyncio.Queue, int, Request]] = {}  # by number: its queue, and its index there
        self.refusal: Refused | None = None  # what new requests are told: the engine stops, or has failed
        self.failure: str | None = None
        self.sending = ThreadPoolExecutor(1)  # as the scheduler may be within a step

    async def run(self) -> None:
        """Hand out tokens until `end`, and tell everybody if the scheduler fails."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            while news := await loop.run_in_executor(thread, self.receive):
                for told in news:
                    self.deliver(told)
        self.sending.shutdown()
        if self.open:
            self.close(Refused(500, "the server has failed"))
            self.abandon()

    def receive(self) -> list[Any]:
        """Return what the scheduler has said since the last time, nothing at its end."""
        news = []
        with suppress(EOFError, OSError):
            while not news or self.connection.poll():
                news.append(self.connection.recv())
        return news

    def send(self, kind: str, what: Any = None) -> None:
        """Tell the scheduler something, in order."""

        def send() -> None:
            with suppress(OSError):  # it has ended
                self.connection.send((kind, what))

        with suppress(RuntimeError):
            self.sending.submit(send)

    def submit(self, requests: list[Request]) -> asyncio.Queue:
        """Let requests in; return where their tokens will come: index of the request, tokens, and whether it ends."""
        if self.refusal:
            raise self.refusal
        if len(requests) > self.most:
            raise Refused(400, f"prompt: expected at most {self.most} prompts, got {len(requests)}", "prompt")
        if len(self.open) + len(requests) > self.most:
            message = f"expected at most {self.most} requests at once, and these are open: try again later"
            raise Refused(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
        queue = asyncio.Queue()
        self.open |= {request.number: (queue, index, request) for index, request in enumerate(requests)}
        self.send("submit", requests)
        return queue

    def leave(self, requests: Iterable[Request]) -> None:
        """Forget requests: those that are not finished free their slots before the next step."""
        numbers = [request.number for request in requests if self.open.pop(request.number, None)]
        if numbers:
            self.send("leave", numbers)

    def deliver(self, told: Any) -> None:
        """Hand out what a step has written, or what has failed."""
        if isinstance(told, str):
            self.failure = told
            self.close(Refused(500, "the server has failed"))
            self.abandon()
            return
        for number, tokens, is_finished, found in told:
            if number in self.open:
                queue, index, request = self.open[number]
                request.found = found
                queue.put_nowait((index, tokens, is_finished))
                if is_finished:
                    del self.open[number]

    def close(self, refusal: Refused) -> None:
        """Let nobody in any more."""
        self.refusal = self.refusal or refusal

    def abandon(self) -> None:
        """Tell all who still wait that they get no more, and free their slots."""
        for queue in {queue for queue, _, _ in self.open.values()}:
            queue.put_nowait(self.refusal)
        self.leave([request for _, _, request in self.open.values()])

    def end(self) -> None:
        """Let the scheduler end after its step, and `run` return."""
        self.send("end")
