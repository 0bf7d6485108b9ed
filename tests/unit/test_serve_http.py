"""The server of the examples over HTTP: clients of `openai` get what each would get alone, or are told why not."""

import asyncio
import contextlib
import gc
import http.client
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))  # where `serving` lies
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from serve import random_model  # noqa: E402
from serving import api, fields  # noqa: E402
from serving.engine import RECENT, Engine, work  # noqa: E402
from serving.scheduler import Request, Server  # noqa: E402
from serving.vocabularies import Vocabulary, vocabulary_of  # noqa: E402

VOCAB, SIZE, MOST = 256, 32, 2000
GAP = 1e-4  # of the logits of two tokens: ten times the rounding between batches, pieces and whole sequences
PLAIN = range(32, 127)  # the only tokens that the model writes: a text tells its tokens
WORDS = "the state of a sequence does not grow with the number of tokens that it has read "


@pytest.fixture(scope="module")
def model():
    model = random_model(2, SIZE, 16, VOCAB, 0, "cpu", torch.float32)
    others = [token for token in range(VOCAB) if token not in PLAIN]
    with torch.no_grad():
        model.ln_out.bias.fill_(1)  # what the head reads then sums up to SIZE
        model.head.weight[others] -= 1
    return model


@contextlib.contextmanager
def started(model, slots=16, prefill_tokens=64, queue=64, prefixes=0, grace=20, is_ahead=False):
    """A scheduler in a thread, and the API in another one, on a free port: what are two processes of the program."""
    server = Server(model, slots, prefill_tokens, None, prefixes)
    server.is_ahead = is_ahead
    ours, others = multiprocessing.Pipe()
    engine = Engine(others, slots + queue)
    host = api.HTTPServer(engine, Vocabulary(None), VOCAB, "tiny", "127.0.0.1", 0, MOST, grace)
    failures = []
    threads = [
        threading.Thread(target=host.run), threading.Thread(target=lambda: failures.append(work(server, ours)))
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: host.started or not threads[0].is_alive())
        client = openai.OpenAI(base_url=host.url, api_key="none", max_retries=0, timeout=60)
        yield types.SimpleNamespace(
            server=server, engine=engine, http=host, threads=threads, client=client, failures=failures
        )
    finally:
        host.stop()
        check_ended(threads)


def check_ended(threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "ahead"])
def tiny(model, request):
    """A server that reads its tokens at once, as on a CPU, or after the next step is queued, as on a GPU."""
    with started(model, is_ahead=request.param) as tiny:
        yield tiny


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def is_idle(served):
    return not (served.engine.open or served.server.is_busy)


def held(served, after=lambda: None):
    """Hold a server's steps back until the returned event is set, and call something after each."""
    step, may_step = served.server.step, threading.Event()

    def wait_and_step():
        may_step.wait(20)
        step()
        after()

    served.server.step = wait_and_step
    return may_step


def prompt_of(number, length):
    return (f"{number} " + WORDS[number % 17 :] * (1 + length // 60))[:length]


def create(served, prompt, count=8, **more):
    return served.client.completions.create(model="tiny", prompt=prompt, max_tokens=count, **{"temperature": 0, **more})


def check_greedy(model, prompt, text):
    """Each token of a text is the most likely one, by far more than rounding, as the sequence alone is read."""
    tokens = list((prompt + text).encode())
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens[len(prompt) :]
    first, second = logits.topk(2).values.T
    assert float((first - second).min()) > GAP


# ---- what clients get --------------------------------------------------------------------------------------------


def test_64_clients_at_once_get_what_each_gets_alone(tiny, model):
    prompts = [prompt_of(number, 1 + 7 * number % 90) for number in range(64)]

    async def ask(client, number):
        answer = client.completions.create(
            model="tiny", prompt=prompts[number], max_tokens=5 + number % 8, temperature=0, stream=number % 2 == 0
        )
        if number % 2:
            return (await answer).choices[0].text
        return "".join([event.choices[0].text async for event in await answer])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=tiny.http.url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    for number, (prompt, text) in enumerate(zip(prompts, asyncio.run(ask_all()), strict=True)):
        assert len(text) == 5 + number % 8
        check_greedy(model, prompt, text)
    wait_for(lambda: is_idle(tiny))
    assert tiny.server.pool.allocated == ()


def test_streams_are_what_comes_at_once(tiny, model):
    """Drawn ones too, of several prompts, up to a stop string, with the counts of tokens."""
    (text,) = [choice.text for choice in create(tiny, prompt_of(1, 20), 14).choices]
    stop = text[9:12]  # no token is this long
    for more in (
        {}, {"stop": stop}, {"stop": ["\0", text[7:9] + "\0"]}, {"temperature": 1.3, "top_p": 0.9, "seed": 5},
        {"prompt": [prompt_of(1, 20), prompt_of(2, 9)], "temperature": 1.0, "seed": 7},
    ):  # fmt: skip
        body = {"prompt": prompt_of(1, 20), "count": 14, **more}
        whole = create(tiny, **body)
        events = list(create(tiny, **body, stream=True, stream_options={"include_usage": True}))
        *events, last = events
        assert (last.choices, last.usage) == ([], whole.usage)
        assert {event.id for event in events} == {last.id}
        for index, choice in enumerate(whole.choices):
            mine = [event.choices[0] for event in events if event.choices[0].index == index]
            assert "".join(x.text for x in mine) == choice.text
            assert [x.finish_reason for x in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        if more.get("stop") == stop:
            assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
            assert whole.usage.completion_tokens == text.index(stop) + 3
        elif "prompt" not in more:
            assert (choice.finish_reason, len(choice.text)) == ("length", 14)
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (20, 14)
            assert whole.usage.total_tokens == 34
            assert (choice.text == text) == ("seed" not in more)
    wait_for(lambda: is_idle(tiny))


def test_seeds_and_tokens(tiny, model):
    prompt = prompt_of(3, 12)
    drawn = [create(tiny, prompt, temperature=1.5, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = create(tiny, prompt).choices[0].text
    assert create(tiny, list(prompt.encode())).choices[0].text == greedy
    assert create(tiny, prompt, temperature=1.5, top_p=0).choices[0].text == greedy
    assert create(tiny, prompt, top_p=1e-6, temperature=2).choices[0].text == greedy
    check_greedy(model, prompt, greedy)


def test_chats(tiny, model):
    messages = [
        {"role": "system", "content": "Be short. "},
        {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
        {"role": "assistant", "content": " A model."},
        {"role": "user", "content": "And I?"},
    ]
    prompt = "System: Be short.\n\nUser: Who are you?\n\nAssistant: A model.\n\nUser: And I?\n\nAssistant:"
    body = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "temperature": 0}
    whole = tiny.client.chat.completions.create(**body)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, whole.usage.completion_tokens) == ("assistant", "length", 9)
    assert whole.usage.prompt_tokens == len(prompt)
    check_greedy(model, prompt, choice.message.content)
    assert fields.read_fields({"model": "m", "messages": messages}, "m", 9, 256, True).prompts == [prompt]
    first, *events = tiny.client.chat.completions.create(**body, stream=True)
    assert (first.choices[0].delta.role, first.object) == ("assistant", "chat.completion.chunk")
    assert "".join(event.choices[0].delta.content for event in events) == choice.message.content


def test_models(tiny):
    (card,) = tiny.client.models.list().data
    assert (card.id, tiny.client.models.retrieve("tiny").id) == ("tiny", "tiny")
    with pytest.raises(openai.NotFoundError, match='model: expected "tiny", got "other/one"'):
        tiny.client.models.retrieve("other/one")


def test_blocks_of_the_docs(tiny, tmp_path):
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8").partition("## A server")[2]
    text = text.replace("http://127.0.0.1:8000/v1", tiny.http.url).replace("random", "tiny")
    (code,) = re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    printed = []
    exec(compile(code, "docs/examples.md", "exec"), {"print": lambda *what, **_: printed.append(*what)})
    assert len("".join(printed)) >= 16
    (command,) = re.findall(r"^\$ (curl .*?[^\\])$", text, re.DOTALL | re.MULTILINE)
    if shutil.which("curl"):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert len(json.loads(done.stdout)["choices"][0]["text"]) == 16


# ---- who gets a slot ---------------------------------------------------------------------------------------------


def test_clients_that_are_killed_free_their_slots(model):
    """One that reads a stream, one that waits for the whole answer, and one that waits for a slot."""
    with started(model, slots=2) as served:
        stream = create(served, "a", MOST, stream=True)
        next(stream)
        connections = []
        for prompt in ("b", "c"):
            connections.append(http.client.HTTPConnection(served.http.url.split("/")[2]))
            body = {"model": "tiny", "prompt": prompt, "max_tokens": MOST}
            connections[-1].request("POST", "/v1/completions", json.dumps(body))
        wait_for(lambda: len(served.server.running) == 2 and len(served.server.waiting) == 1)
        numbers = list(served.engine.open)
        requests = [*served.server.running, *served.server.waiting]
        assert [request.number for request in requests] == numbers
        for connection in connections:
            connection.close()
        wait_for(lambda: [*served.engine.open] == numbers[:1] and served.server.running == requests[:1])
        stream.close()
        wait_for(lambda: is_idle(served))
        assert served.server.pool.allocated == ()
        assert served.server.finished_count == 0
        assert max(len(request.tokens) for request in requests) < MOST
        assert len(create(served, "d").choices[0].text) == 8


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_stream_that_breaks_frees_its_slot(version):
    """A server of ASGI 2.4 raises what clients do; one of 2.3 says that they are gone."""
    left = []

    async def events():
        while True:
            yield "data"
            await asyncio.sleep(0)

    async def send(message):
        if version == "2.4" and message["type"] == "http.response.body":
            raise OSError

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    answer = types.SimpleNamespace(engine=types.SimpleNamespace(leave=left.append), requests=["request"], events=events)
    scope = {"type": "http", "asgi": {"spec_version": version}}
    with contextlib.suppress(api.ClientDisconnect):
        asyncio.run(api.Stream(answer)(scope, receive, send))
    assert left == [["request"]]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_many_requests_leave_nothing(model):
    """Slots, objects and files are as before, whether clients read to the end, break off or are refused."""

    def left():
        wait_for(lambda: is_idle(served))
        gc.collect()
        return sum(isinstance(x, Request) for x in gc.get_objects()), len(os.listdir("/proc/self/fd"))

    def ask(number):
        if number % 3 == 0:
            stream = create(served, prompt_of(number % 40, 30), 400, stream=True)
            next(stream)
            stream.close()
        elif number % 3 == 1:
            assert len(create(served, prompt_of(number % 40, 20 + number % 9), 2).choices[0].text) == 2
        else:
            with pytest.raises(openai.BadRequestError):
                create(served, "x", n=2)

    with started(model, slots=8, prefixes=4) as served, ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(60)))
        requests, files = left()
        list(threads.map(ask, range(60, 240)))
        assert left()[0] <= requests + RECENT
        wait_for(lambda: left()[1] <= files + 1)
        assert len(served.server.pool.allocated) == len(served.server.prefixes.kept) == 4
        assert (served.engine.open, len(served.server.finished)) == ({}, RECENT)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_who_leaves_is_dropped_before_the_next_step(model, is_ahead):
    server, seen = Server(model, 2, 64), []
    server.is_ahead = is_ahead
    ours, others = multiprocessing.Pipe()
    step = server.step

    def count():
        step()
        seen.append({request.number for request in server.running})
        if len(seen) == 3:
            others.send(("leave", [0, 7]))  # nobody has number 7
        if len(seen) == 5:
            others.send(("end", None))

    server.step = count
    others.send(("submit", [Request(number, [65], 50) for number in range(3)]))
    assert work(server, ours) is None
    assert seen[2:4] == [{0, 1}, {1, 2}]
    assert not any(0 in {number for number, *_ in told} for told in list(iter(lambda: received(others), None))[3:])


def received(connection):
    """What comes next, None at the end."""
    with contextlib.suppress(EOFError):
        return connection.recv()


def test_full_pool_lets_requests_wait(model):
    with started(model, slots=2, queue=4) as served, ThreadPoolExecutor(6) as threads:
        seen, may_step = [], held(served, lambda: seen.append((len(server.running), len(server.waiting))))
        server = served.server
        prompts = [prompt_of(number, 10) for number in range(6)]
        answers = [threads.submit(create, served, prompt, 20) for prompt in prompts]
        wait_for(lambda: len(served.engine.open) == 6)
        with pytest.raises(openai.RateLimitError, match="expected at most 6 requests at once") as refused:
            create(served, "one more")
        assert refused.value.body["code"] == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) > 0
        with pytest.raises(openai.BadRequestError, match="prompt: expected at most 6 prompts, got 7"):
            create(served, ["x"] * 7)
        may_step.set()
        for prompt, answer in zip(prompts, answers, strict=True):
            check_greedy(model, prompt, answer.result().choices[0].text)
        assert max(seen) == (2, 4)


def test_running_sequences_do_not_wait_for_a_long_prompt(model):
    server = Server(model, 3, 8)
    running, long, short = Request(0, [65], 60), Request(1, list(range(32, 112)), 4), Request(2, [66], 4)
    server.waiting.append(running)
    server.step()
    server.waiting += [long, short]
    while not long.tokens:
        before = server.spent["prefill"][0], len(running.tokens)
        server.step()
        assert server.spent["prefill"][0] - before[0] <= 8
        assert len(running.tokens) == before[1] + 1
    assert len(running.tokens) == 2 + 10  # of 8 tokens each


def test_shared_beginnings_are_read_once(model):
    shared, ends = prompt_of(5, 40), ["first", "second", "third"]
    with started(model, prefixes=2, prefill_tokens=16) as served:
        pool, spent = served.server.pool, served.server.spent["prefill"]

        def read(prompt):
            """How many tokens of a prompt are read."""
            before = spent[0]
            answer = create(served, prompt)
            check_greedy(model, prompt, answer.choices[0].text)
            wait_for(lambda: is_idle(served))
            kept = served.server.prefixes.kept
            assert sorted(pool.allocated) == sorted(prefix.slot for prefix in kept)
            assert len(kept) <= 2
            assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) - (spent[0] - before)
            return spent[0] - before

        assert read(shared + ends[0]) == 45
        assert read(shared + ends[1]) == 46  # what both share is found, and kept
        assert read(shared + ends[2]) == 5
        assert read(shared + ends[2]) == 0
        assert read(shared) == 0
        assert read(shared + ends[0]) == 5
        assert read("0" * 15 + ends[0]) == 20
        assert read("1" * 20) == 20
        assert read("2" * 20) == 20  # the states of the others are gone
        assert read(shared + ends[0]) == 45


# ---- what is refused ---------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "x"}], "prompt": None}
PROMPT = "a string, a list of tokens, or a list of either, none of them empty"
STOP = "a string, or up to 4 of them, none of them empty"
ROLE = "a message with a role of system, developer, user, assistant"
ONLY = "as this server supports no other value"


@pytest.mark.parametrize(
    ("field", "value", "expected", "got"),
    [
        ("prompt", None, PROMPT, "nothing"),
        ("prompt", "", "at least one character in each", '""'),
        ("prompt", [], PROMPT, "[]"),
        ("prompt", [1, "x"], PROMPT, '[1, "x"]'),
        ("prompt", [1, 256], "tokens from 0 to 255", "256"),
        ("prompt", "a\ud800", "text of UTF-8", '"\\ud800"'),
        ("max_tokens", 0, "an integer from 1 to 2000", "0"),
        ("max_tokens", True, "an integer from 1 to 2000", "true"),
        ("max_tokens", 10**90, "an integer from 1 to 2000", f"1{'0' * 76}..."),
        ("temperature", 2.5, "a number from 0 to 2", "2.5"),
        ("temperature", "warm", "a number from 0 to 2", '"warm"'),
        ("temperature", float("nan"), "a number from 0 to 2", "NaN"),
        ("top_p", -1, "a number from 0 to 1", "-1"),
        ("seed", 1.5, f"an integer from {-(2**63)} to {2**63 - 1}", "1.5"),
        ("stop", ["a"] * 5, STOP, '["a", "a", "a", "a", "a"]'),
        ("stop", "", STOP, '""'),
        ("stream", 1, "true or false", "1"),
        ("stream_options", {"x": 1}, '{"include_usage": true or false}', '{"x": 1}'),
        ("n", 2, f"1, {ONLY}", "2"),
        ("echo", True, f"false, {ONLY}", "true"),
        ("logprobs", 0, f"nothing, {ONLY}", "0"),
        ("presence_penalty", 1, f"0, {ONLY}", "1"),
        ("model", 7, "the name of a model", "7"),
        ("model", "gpt", '"tiny"', '"gpt"'),
        ("messages", [], "a list of at least one message", "[]"),
        ("messages[0]", [{"role": "tool"}], ROLE, '{"role": "tool"}'),
        ("messages[0].content", [{"role": "user", "content": [{"type": "image"}]}], "a text", '[{"type": "image"}]'),
    ],
)
def test_bad_fields_are_named(tiny, field, value, expected, got):
    name, is_chat = field.partition("[")[0], field.startswith("messages")
    body = {"model": "tiny", **({} if is_chat else {"prompt": "x"}), name: value}
    status, error = post(tiny, body, "chat/" if is_chat else "")
    assert (status, error["code"]) == ((404, "model_not_found") if value == "gpt" else (400, None))
    assert (error["message"], error["param"]) == (f"{field}: expected {expected}, got {got}", field)
    assert error["type"] == "invalid_request_error"


def test_fields_that_nobody_knows(tiny):
    status, error = post(tiny, {"model": "tiny", "prompt": "x", "colour": "red"})
    assert (status, error["param"]) == (400, "colour")
    assert error["message"] == 'Unrecognized request argument supplied: "colour"'
    status, error = post(tiny, {"model": "tiny", **CHAT, "logprobs": True}, "chat/")
    assert (status, error["message"]) == (400, f"logprobs: expected false, {ONLY}, got true")


def post(served, body, before="", method="POST"):
    """The status and the error of a request whose body is JSON or bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.http.url}/{before}completions", data, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    error = json.loads(refused.value.read())
    assert [*error] == ["error"]
    assert [*error["error"]] == ["message", "type", "param", "code"]
    return refused.value.code, error["error"]


def test_bad_bodies(tiny, monkeypatch):
    for body, said in (
        (b"{", "body: expected JSON, got Expecting property name"), (b"[1]", "body: expected a JSON object, got [1]"),
        (b"\xff", "body: expected JSON, got 'utf-8' codec"), (b"[" * 100_000, "body: expected JSON, got "),
    ):  # fmt: skip
        status, error = post(tiny, body)
        assert (status, error["param"]) == (400, None)
        assert error["message"].startswith(said)
    monkeypatch.setattr(api, "MOST_BYTES", 1000)
    status, error = post(tiny, b" " * 1_000_000)
    assert (status, error["code"]) == (413, "request_too_large")
    assert error["message"] == "body: expected at most 1000 bytes, got 1000000"
    assert post(tiny, {}, "chat/nothing/")[0] == 404
    status, error = post(tiny, None, method="GET")
    assert (status, error["message"]) == (405, "Method Not Allowed: GET /v1/completions")


def test_prompts_without_tokens(tiny, monkeypatch):
    monkeypatch.setattr(Vocabulary, "prompt", lambda self, text: [])
    status, error = post(tiny, {"model": "tiny", "prompt": " "})
    assert (status, error["message"]) == (400, 'prompt: expected at least one token, got none in " "')


def test_openai_raises_its_errors(tiny):
    with pytest.raises(openai.BadRequestError, match="n: expected 1") as refused:
        create(tiny, "x", n=3)
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as refused:
        tiny.client.completions.create(model="other", prompt="x")
    assert refused.value.code == "model_not_found"


def test_fields_that_are_absent_have_defaults():
    plain = fields.read_fields({"model": "m", "prompt": "x", "stop": None, "n": 1, "user": "me"}, "m", 99, 256, False)
    assert (plain.prompts, plain.new_tokens, plain.temperature, plain.top_p) == (["x"], 16, 1.0, 1.0)
    assert (plain.stops, plain.is_stream, plain.has_usage) == ([], False, False)
    chat = fields.read_fields({"model": "m", **CHAT}, "m", 99, 256, True)
    assert (chat.prompts, chat.new_tokens) == (["User: x\n\nAssistant:"], 99)
    assert chat.seed != plain.seed


# ---- the end -----------------------------------------------------------------------------------------------------


def test_a_signal_lets_requests_end(tmp_path):
    """The program, with the command of the docs on a free port: one request runs, one waits, and both get all."""
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ python (examples/serve\.py --http 8000)$", text, re.MULTILINE)
    small = ["--cpu", "--layers", "1", "--width", "16", "--head-size", "16", "--slots", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command.replace("8000", "0")), *small], env=environment, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            url = next(line for line in process.stderr if line.startswith("listening on ")).split()[-1]
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            body = {"model": "random", "prompt": "x", "temperature": 0, "max_tokens": 40, "stream": True}
            streams = [client.completions.create(**body) for _ in range(2)]  # each returns when its request is in
            process.send_signal(signal.SIGTERM)
            first, second = ([event.choices[0] for event in stream] for stream in streams)
            assert first[-1].finish_reason == second[-1].finish_reason == "length"
            assert "".join(x.text for x in first) == "".join(x.text for x in second)
            assert process.wait(30) == 0
        finally:
            process.kill()
        said = json.loads(process.stdout.read())
        assert (said["finished"], said["decode_tokens"]) == (2, 2 * 39)
        assert "Traceback" not in process.stderr.read()
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_stop_lets_requests_end(model):
    with started(model, slots=1) as served, ThreadPoolExecutor(2) as threads:
        may_step = held(served)
        answers = [threads.submit(create, served, prompt, 20) for prompt in "ab"]
        wait_for(lambda: len(served.engine.open) == 2)
        served.http.stop()
        may_step.set()
        for prompt, answer in zip("ab", answers, strict=True):
            text = answer.result().choices[0].text
            assert len(text) == 20
            check_greedy(model, prompt, text)
        check_ended(served.threads)
        assert served.server.pool.allocated == ()


def test_requests_that_take_too_long_are_told(model):
    with started(model, slots=1, grace=0.3) as served, ThreadPoolExecutor(2) as threads:
        stream = create(served, "a", MOST, stream=True)
        next(stream)
        whole = threads.submit(create, served, "b", MOST)
        wait_for(lambda: len(served.engine.open) == 2)
        served.http.stop()
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server stops") as refused:
            whole.result()
        assert (refused.value.status_code, refused.value.code) == (503, "service_unavailable")
        check_ended(served.threads)
        with pytest.raises(fields.Refused, match="the server stops"):
            served.engine.submit([Request(0, [1], 1)])


def test_a_step_that_fails_is_told_to_all_and_ends_the_server(model, capsys):
    with started(model, slots=1, grace=30) as served, ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(create, served, prompt, MOST) for prompt in "ab"]
        wait_for(lambda: len(served.engine.open) == 2)

        def fail():
            raise RuntimeError("out of memory")

        begin, served.server.step = time.monotonic(), fail
        for each in answers:
            with pytest.raises(openai.InternalServerError, match="the server has failed") as refused:
                each.result()
            assert refused.value.status_code == 500
        check_ended(served.threads)
        assert time.monotonic() - begin < 20  # nobody waits for the grace
        assert [served.engine.failure] == served.failures == ["the server has failed: RuntimeError: out of memory"]
    assert "RuntimeError: out of memory" in capsys.readouterr().err


# ---- vocabularies and texts --------------------------------------------------------------------------------------

TEXT = "Grüße, 世界 🙂!"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: number for number, piece in enumerate([*alphabet, "st", "the"])}
    merges = [("s", "t"), ("t", "h"), ("th", "e")]
    pieces |= {"th": len(pieces), "</s>": len(pieces) + 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def written(vocabulary, tokens, stops=()):
    """What comes of each token, and why the text ended."""
    writer, pieces = api.Writer(vocabulary, list(stops)), []
    for count, token in enumerate(tokens, 1):
        if writer.reason is None:
            pieces.append(writer.add(token, count == len(tokens)))
    return pieces, writer.reason


def check_text(vocabulary):
    tokens = vocabulary.encode(f"the state: {TEXT}".encode())
    pieces, reason = written(vocabulary, tokens)
    assert ("".join(pieces), reason) == (f"the state: {TEXT}", "length")
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert vocabulary.largest >= max(tokens)
    assert vocabulary.decode(tokens) == f"the state: {TEXT}"


@pytest.mark.parametrize("kind", ["bytes", "tokenizers"])
def test_streams_hold_back_parts_of_characters(kind, request):
    vocabulary = vocabulary_of(None if kind == "bytes" else request.getfixturevalue("tokenizer_file"))
    check_text(vocabulary)
    smile = vocabulary.encode("🙂".encode())
    assert [*map(bool, written(vocabulary, smile)[0])] == [False, False, False, True]
    cut, _ = written(vocabulary, smile[:-1])  # it ends within a character
    assert [*map(bool, cut)] == [False, False, True]
    assert set("".join(cut)) == {"\N{REPLACEMENT CHARACTER}"}


def test_tokens_of_the_package_rwkv():
    """The numbers are those of its tokenizer, which takes longer to read the file."""
    pytest.importorskip("rwkv")
    vocabulary = vocabulary_of(Path("rwkv"))
    check_text(vocabulary)
    assert vocabulary.prompt(b"\n\nUser: x") == [0, 261, 24281, 59, 355]
    assert vocabulary.largest == 65529


def test_tokens_of_files(tokenizer_file):
    vocabulary = vocabulary_of(tokenizer_file)
    assert len(vocabulary.prompt(b"the state")) == 1 + 1 + 1 + 3
    assert vocabulary.end == vocabulary.largest == 259
    assert written(vocabulary, [*vocabulary.encode(b"the"), vocabulary.end, 5])[1] == "stop"
    with pytest.raises(ValueError, match=r"^--end-token: .*tokenizer.json has no token '<end>'$"):
        vocabulary_of(tokenizer_file, "<end>")
    with pytest.raises(ValueError, match="^--end-token is for a tokenizer.json$"):
        vocabulary_of(None, "</s>")
    with pytest.raises(ValueError, match="nowhere.json is no file of tokenizers: "):
        vocabulary_of(tokenizer_file.with_name("nowhere.json"))


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("tokenizers", "x.json", "x.json needs tokenizers: pip install tokenizers"),
        ("rwkv", "rwkv", "--vocabulary rwkv needs the package rwkv: pip install rwkv"),
    ],
)
def test_absent_packages_of_vocabularies(module, name, said, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"^{said}$"):
        vocabulary_of(Path(name))


def test_stop_strings_are_left_out_and_held_back():
    def pieces(text, *stops):
        return written(Vocabulary(None), text.encode(), stops)

    assert pieces("abcdef", "cd") == (["a", "b", "", ""], "stop")
    assert pieces("abcxef", "cd") == (["a", "b", "", "cx", "e", "f"], "length")
    assert pieces("aab", "ab") == (["", "a", ""], "stop")
    assert pieces("abc", "bcd") == (["a", "", "bc"], "length")  # the text ends before it comes
    assert pieces("abcd", "bcx", "cd") == (["a", "", "", "b"], "stop")
    assert pieces("a🙂b", "🙂") == (["a", "", "", "", ""], "stop")
