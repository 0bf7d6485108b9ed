"""OpenAI's API over HTTP, by starlette and uvicorn: models, completions and chats, streamed or whole."""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.engine import Engine
from serving.fields import CHAT_STOP, Options, Refused, read_fields, shown
from serving.scheduler import Request
from serving.vocabularies import TokenizerFile, Vocabulary

MOST_BYTES = 8 << 20  # of a body


class Writer:
    """The text of a sequence, token by token: whole characters, up to a stop string, which is left out."""

    def __init__(self, vocabulary: Vocabulary | TokenizerFile, stops: list[str]):
        self.characters, self.end, self.stops = vocabulary.characters(), vocabulary.end, stops
        self.held, self.count, self.reason = "", 0, None  # text that may begin a stop string; tokens; why it ended

    def add(self, token: int, is_last: bool) -> str:
        """Return the text that a token brings, and set the reason of an end."""
        self.count += 1
        if token == self.end:
            self.reason = "stop"
        else:
            self.held += self.characters.add(token)
            self.reason = "length" if is_last else None
        if self.reason:
            self.held += self.characters.end()
        found = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.reason, self.held = "stop", self.held[: min(found)]
        begun = [n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])]
        kept = 0 if self.reason else max(begun, default=0)
        text, self.held = self.held[: len(self.held) - kept], self.held[len(self.held) - kept :]
        return text


class Answer:
    """What is said to one request over HTTP, which may have several prompts."""

    def __init__(
        self, engine: Engine, vocabulary, model: str, options: Options, requests: list[Request], is_chat: bool
    ):
        self.engine, self.options, self.requests, self.is_chat = engine, options, requests, is_chat
        stops = [*options.stops, *([CHAT_STOP] if is_chat else [])]
        self.writers = [Writer(vocabulary, stops) for _ in requests]
        self.head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
            "model": model, "object": "chat.completion" if is_chat else "text_completion",
        }  # fmt: skip
        self.queue = engine.submit(requests)

    async def texts(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield the index of a prompt, what is written behind it, and why it ended: all that has come meanwhile."""
        left = len(self.writers)
        while left:
            items = [await self.queue.get()]
            while not self.queue.empty():
                items.append(self.queue.get_nowait())
            said: dict[int, str] = {}
            for item in items:
                if isinstance(item, Refused):
                    raise item
                index, tokens, is_finished = item
                for place, token in enumerate(tokens, 1):
                    if self.writers[index].reason is None:
                        text = self.writers[index].add(token, is_finished and place == len(tokens))
                        said[index] = said.get(index, "") + text
            for index, text in said.items():
                reason = self.writers[index].reason
                if reason:
                    left -= 1
                    self.engine.leave([self.requests[index]])
                if text or reason:
                    yield index, text, reason

    def usage(self) -> dict:
        """Return how many tokens were read and written."""
        read, written = sum(len(x.prompt) for x in self.requests), sum(x.count for x in self.writers)
        counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return counts | {"prompt_tokens_details": {"cached_tokens": sum(x.found for x in self.requests)}}

    def choice(self, index: int, content: dict, reason: str | None) -> dict:
        """Return a choice, or a part of one."""
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    async def whole(self) -> Response:
        """Return all at once."""
        said, reasons = [""] * len(self.writers), [None] * len(self.writers)
        async for index, text, reason in self.texts():
            said[index] += text
            reasons[index] = reason
        contents = [{"message": {"role": "assistant", "content": x}} if self.is_chat else {"text": x} for x in said]
        choices = [self.choice(i, x, why) for i, (x, why) in enumerate(zip(contents, reasons, strict=True))]
        return JSONResponse({**self.head, "choices": choices, "usage": self.usage()})

    async def events(self) -> AsyncIterator[str]:
        """Yield events of a stream."""
        head = self.head | ({"object": "chat.completion.chunk"} if self.is_chat else {})
        usage = {"usage": None} if self.options.has_usage else {}

        def event(choices: list[dict]) -> str:
            return f"data: {json.dumps({**head, 'choices': choices, **usage})}\n\n"

        try:
            if self.is_chat:
                yield event([self.choice(0, {"delta": {"role": "assistant", "content": ""}}, None)])
            async for index, text, reason in self.texts():
                content = {"delta": {"content": text}} if self.is_chat else {"text": text}
                yield event([self.choice(index, content, reason)])
            if self.options.has_usage:
                usage = {"usage": self.usage()}
                yield event([])
            yield "data: [DONE]\n\n"
        except Refused as refused:
            yield f"data: {json.dumps(refused.body)}\n\n"


class Stream(StreamingResponse):
    """The events of an answer. Its requests leave at the end, whatever that is: the client may be gone."""

    def __init__(self, answer: Answer):
        super().__init__(answer.events(), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope, receive, send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.engine.leave(self.answer.requests)


async def body_of(http: HTTPRequest):
    """Return the JSON of a request. One that is too long is read to its end, before which clients read no answer."""
    body, size = bytearray(), 0
    async for piece in http.stream():
        size += len(piece)
        if size <= MOST_BYTES:
            body += piece
    if size > MOST_BYTES:
        raise Refused(413, f"body: expected at most {MOST_BYTES} bytes, got {size}", code="request_too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"body: expected JSON, got {str(error) or type(error).__name__}") from None


async def until_gone(http: HTTPRequest) -> None:
    """Return when a client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def application(engine: Engine, vocabulary, known: int, model: str, most_tokens: int, ended) -> Starlette:
    """Return the routes of a model of so many known tokens; `ended` is called when the engine has ended."""
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "rwkv_jit"}
    numbers = count()

    def tokens_of(prompt: str | list[int], name: str) -> list[int]:
        try:
            tokens = vocabulary.prompt(prompt.encode()) if isinstance(prompt, str) else prompt
        except UnicodeEncodeError as error:
            wrong = shown(error.object[error.start])
            raise Refused(400, f"{name}: expected text of UTF-8, got {wrong}", name) from None
        if not tokens:  # a tokenizer may strip spaces
            raise Refused(400, f"{name}: expected at least one token, got none in {shown(prompt)}", name)
        return tokens

    async def complete(http: HTTPRequest, is_chat: bool) -> Response:
        options = read_fields(await body_of(http), model, most_tokens, known, is_chat)
        name = "messages" if is_chat else "prompt"
        prompts = [await asyncio.to_thread(tokens_of, prompt, name) for prompt in options.prompts]
        # top_p=0 is greedy, as temperature=0 is.
        sampling = options.temperature if options.top_p else 0.0, options.top_p or 1.0
        requests = [
            Request(next(numbers), prompt, options.new_tokens, 0.0, *sampling, f"{options.seed} {index}")
            for index, prompt in enumerate(prompts)
        ]
        answer = Answer(engine, vocabulary, model, options, requests, is_chat)
        if options.is_stream:
            return Stream(answer)
        whole, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(until_gone(http))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return whole.result()
        finally:
            whole.cancel()
            gone.cancel()
            engine.leave(requests)

    async def completions(http: HTTPRequest) -> Response:
        return await complete(http, is_chat=False)

    async def chats(http: HTTPRequest) -> Response:
        return await complete(http, is_chat=True)

    async def models(http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def one_model(http: HTTPRequest) -> Response:
        name = http.path_params["name"]
        if name != model:
            raise Refused(404, f"model: expected {shown(model)}, got {shown(name)}", "model", "model_not_found")
        return JSONResponse(card)

    async def refuse(http: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):
            message = f"{error.detail}: {http.method} {http.url.path}"
            codes = {404: "unknown_url", 405: "method_not_supported"}
            error = Refused(error.status_code, message, code=codes.get(error.status_code))
        elif not isinstance(error, Refused):
            error = Refused(500, "the server has failed at this request")
        return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status in (429, 503) else None)

    @asynccontextmanager
    async def lifespan(app: Starlette):
        task = asyncio.create_task(engine.run())
        task.add_done_callback(lambda _: ended())
        yield
        engine.end()
        await task

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
    ]
    handlers = {kind: refuse for kind in (Refused, HTTPException, ClientDisconnect, Exception)}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


class HTTPServer(uvicorn.Server):
    """uvicorn's server, which tells the engine that it stops, and where it listens."""

    def __init__(
        self, engine: Engine, vocabulary, known: int, model: str, host: str, port: int, most_tokens: int, grace: float
    ):
        app = application(engine, vocabulary, known, model, most_tokens, self.stop)
        limit = int(grace) + 5  # for clients that do not read
        super().__init__(uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=limit))
        self.engine, self.grace = engine, grace

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def stop(self) -> None:
        """Begin to stop, as a signal does."""
        self.should_exit = True

    async def startup(self, sockets=None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        if self.started:
            print(f"listening on {self.url}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets=None) -> None:
        """Let requests end for a while, and tell those that have not by then."""
        self.engine.close(Refused(503, "the server stops", code="service_unavailable"))
        late = asyncio.get_running_loop().call_later(self.grace, self.engine.abandon)
        await super().shutdown(sockets)
        late.cancel()
