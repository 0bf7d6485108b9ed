"""The example that serves models: its models, its server, its checkpoints and its command line."""

import importlib
import json
import os
import random
import subprocess
import sys

import fake_graphs
import pytest
import torch
import warm
from rwkv7_alone import expected_logits, model_of, random_weights

from rwkv_jit.nn import graphs

HEADS, HEAD_SIZE, LAYERS, VOCAB = 3, 8, 3, 256
WIDTH = HEADS * HEAD_SIZE
RANKS = {"w": 4, "a": 5, "v": 6, "g": 7}
SMALL = ("--cpu", "--layers", "2", "--width", "32", "--head-size", "16", "--prompt-tokens", "8", "--new-tokens", "6")


@pytest.fixture
def serve(root, monkeypatch):
    """The module of the example."""
    monkeypatch.syspath_prepend(str(root / "examples"))
    monkeypatch.delitem(sys.modules, "serve", raising=False)
    yield importlib.import_module("serve")
    sys.modules.pop("serve", None)


@pytest.fixture
def weights():
    return random_weights(LAYERS, HEADS, HEAD_SIZE, VOCAB, RANKS)


@pytest.fixture
def model(weights):
    return model_of(weights, RANKS)


def texts(*lengths, seed=0):
    """Random tokens."""
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in lengths]


def decoded(model, pool, slots, tokens):
    return model.step(torch.tensor(tokens), pool, slots)


def served(serve, model, requests, slots=8, prefill_tokens=1000):
    """Serve requests, which arrive all at once."""
    server = serve.Server(model, slots, prefill_tokens)
    serve.serve(server, requests, lambda: None)
    assert server.pool.allocated == ()
    return server


# ---- the model ---------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_equations(serve, model, weights):
    """Of a prompt as a whole, and of tokens that follow one by one, in two texts of different lengths."""
    first, second = texts(9, 14)
    expected = [expected_logits(weights, text) for text in (first, second)]
    pool = model.new_pool(5, reserved=1)
    slots = pool.allocate(2)
    pieces = list(zip(slots, (first[:4], second[:9]), strict=True))
    found = [serve.prefill(model, pool, pieces)]
    found += [decoded(model, pool, slots, [first[4 + i], second[9 + i]]) for i in range(5)]
    for row, (logits, begin) in enumerate(zip(expected, (3, 8), strict=True)):
        here = torch.stack([each[row] for each in found]).double()
        torch.testing.assert_close(here, logits[begin : begin + 6], rtol=0, atol=2e-4 * float(logits.std()))


def test_decoding_is_prefilling(serve, model):
    (text,) = texts(12)
    pool = model.new_pool(3, reserved=1)
    whole, single = pool.allocate(2)
    for i in range(len(text)):
        pool.reset(whole)
        expected = serve.prefill(model, pool, [(whole, text[: i + 1])])
        torch.testing.assert_close(decoded(model, pool, [single], [text[i]]), expected, rtol=1e-3, atol=1e-3)
    for name in ("wkv", "time_shift", "channel_shift"):
        torch.testing.assert_close(pool[name][:, single], pool[name][:, whole], rtol=1e-3, atol=1e-3)


def test_batch_is_each_text_alone(serve, model):
    """Five texts in a batch of eight, whose padding is nobody's."""
    prompts, pool = texts(3, 1, 8, 5, 2), model.new_pool(7, reserved=1)
    slots = pool.allocate(6)[1:]
    slots.reverse()
    untouched = pool.wkv[:, 1].fill_(7).clone()
    decoder = sys.modules["serving.scheduler"].Decoder(model, pool)
    found = [serve.prefill(model, pool, list(zip(slots, prompts, strict=True)))]
    for token in (65, 66):
        decoder.keep(slots, torch.full((5,), token))
        found.append(decoder(slots).clone())
    assert torch.equal(pool.wkv[:, 1], untouched)
    for row, prompt in enumerate(prompts):
        alone = model.new_pool(1)
        (slot,) = alone.allocate()
        expected = [serve.prefill(model, alone, [(slot, piece)]) for piece in (prompt, [65], [66])]
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here[row], there[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_near_float32(serve, weights, dtype):
    rounded = {name: x.to(dtype) for name, x in weights.items()}
    (text,) = texts(6)
    expected = expected_logits(rounded, text)
    model = model_of(rounded, RANKS)
    pool = model.new_pool(1)
    slots = pool.allocate()
    assert (pool.wkv.dtype, pool.time_shift.dtype) == (torch.float32, dtype)
    found = [serve.prefill(model, pool, [(slots[0], text[:3])])]
    found += [decoded(model, pool, slots, [token]) for token in text[3:]]
    error = torch.cat(found).double() - expected[2:]
    assert float(error.abs().max() / expected.std()) < (0.3 if dtype == torch.bfloat16 else 0.05)


# ---- the server --------------------------------------------------------------------------------------------------


KINDS = pytest.mark.parametrize("kind", ["kimi", "gated_delta_net", "mamba2"])


@KINDS
def test_models_of_other_layers(serve, kind):
    """Prompts in pieces, packed beside others, and tokens in a batch with padding, are each text as a whole."""
    model = serve.random_model(2, WIDTH, HEAD_SIZE, VOCAB, 0, "cpu", torch.float32, kind)
    several, pool = texts(9, 4, 13), model.new_pool(6, reserved=1)
    slots = pool.allocate(5)[1:4]
    other = [x[:, 1].fill_(7).clone() for x in (pool["taps"], pool["recurrence"])]
    pieces = [(slot, text[:cut]) for slot, text, cut in zip(slots, several, (5, 1, 8), strict=True)]
    serve.prefill(model, pool, pieces)
    found = serve.prefill(model, pool, [(slots[0], several[0][5:7]), (slots[2], several[2][8:11])])[[0, 1, 1]]
    found[1] = serve.prefill(model, pool, [(slots[1], several[1][1:2])])[0]
    rows = [found]
    decoder = sys.modules["serving.scheduler"].Decoder(model, pool)
    for place in range(2):
        last = [text[cut + place] for text, cut in zip(several, (7, 2, 11), strict=True)]
        decoder.keep(slots, torch.tensor(last))
        rows.append(decoder(slots).clone())
    for row, (text, cut) in enumerate(zip(several, (7, 2, 11), strict=True)):
        for place, logits in enumerate(rows):
            alone = model.new_pool(1)
            want = serve.prefill(model, alone, [(0, text[: cut + place])])[0]
            torch.testing.assert_close(logits[row], want, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(x[:, 1], y) for x, y in zip((pool["taps"], pool["recurrence"]), other, strict=True))


@KINDS
def test_models_of_other_layers_have_graphs(serve, kind, monkeypatch):
    class Graph(fake_graphs.TapeGraph):
        pass

    def logits(devices):
        monkeypatch.setattr(graphs, "devices", devices)
        model = serve.random_model(2, WIDTH, HEAD_SIZE, VOCAB, 0, "cpu", torch.float32, kind)
        pool = model.new_pool(5, reserved=1)
        slots = [torch.tensor(each) for each in ([1, 2], [3, 1], [0, 4])]
        return [model.step(torch.tensor([place, 7]), pool, slots[place % 3]) for place in range(9)]

    monkeypatch.setattr(graphs, "Graph", Graph)
    want = logits(set())
    assert all(map(torch.equal, logits({"cpu"}), want))
    assert (Graph.captured, Graph.replayed) == (1, 8)


@KINDS
def test_other_models_are_served(program, kind, capsys):
    some = ("--model", kind, "--requests", 5, "--rate", "inf", "--slots", 2, "--prefill-tokens", 6, "--json", "--check")
    assert program(*SMALL, *some) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"].startswith(f"{kind}, ")
    assert (said["finished"], said["differ"]) == (5, 0)


def test_prompt_without_tokens_is_refused(serve):
    """The server would wait for ever for its last token."""
    with pytest.raises(ValueError, match="^prompt: expected at least one token, got none$"):
        serve.Request(0, [], 3)


def test_prompts_in_pieces_are_prompts_as_a_whole(serve, model, monkeypatch):
    prompts, sizes, read = texts(11, 2, 7), [], model.prefill
    monkeypatch.setattr(model, "prefill", lambda tokens, *more: sizes.append(tokens.shape[1]) or read(tokens, *more))
    whole, pieces = ([serve.Request(i, prompt, 6) for i, prompt in enumerate(prompts)] for _ in range(2))
    expected = served(serve, model, whole).pool
    sizes.clear()
    server = served(serve, model, pieces, prefill_tokens=4)
    assert [request.tokens for request in pieces] == [request.tokens for request in whole]
    for name in ("wkv", "time_shift", "channel_shift"):  # the states stay there when their slots are freed
        torch.testing.assert_close(server.pool[name][:, 1:4], expected[name][:, 1:4], rtol=1e-3, atol=1e-3)
    assert sizes[2:] == [4, 4, 4, 4, 4]  # behind those that warm up
    assert server.spent["prefill"][0] == sum(sizes[2:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_requests_than_slots(serve, model, temperature):
    prompts = texts(5, 9, 1, 14, 3, 6, 2, 8, 4)
    requests = [serve.Request(i, prompt, 1 + i, i * 1e-3, temperature, 0.9, f"{i}") for i, prompt in enumerate(prompts)]
    server = served(serve, model, requests, slots=3, prefill_tokens=6)
    assert sorted(request.number for request in server.finished) == list(range(9))
    assert [len(request.tokens) for request in requests] == [1 + i for i in range(9)]
    assert all(sorted(r.times) == r.times and r.times[0] >= r.arrival for r in requests)
    assert server.spent["decode"][0] == sum(range(9))
    assert server.spent["prefill"][0] == sum(map(len, prompts))
    assert serve.check(model, server.finished) == ([], 0)


def test_slots_are_taken_by_who_waits_longest(serve, model):
    requests = [serve.Request(i, prompt, 3) for i, prompt in enumerate(texts(4, 4, 4))]
    server = serve.Server(model, 1, 100)
    server.waiting.extend(requests)
    server.step()
    assert (len(server.waiting), len(server.running), len(requests[0].tokens)) == (2, 1, 2)
    server.step()
    assert server.finished == requests[:1]
    assert len(server.waiting) == 2
    server.step()
    assert server.running == requests[1:2]
    assert server.pool.free_count == 0


def test_end_of_a_text_ends_its_request(serve, model):
    def run(end):
        server = serve.Server(model, 2, 100, end)
        request = serve.Request(0, texts(5)[0], 8)
        serve.serve(server, [request], lambda: None)
        return request.tokens

    tokens = run(None)
    end = tokens[3]
    assert run(end) == tokens[: tokens.index(end) + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ahead_of_a_gpu_texts_are_the_same(serve, model, temperature):
    """What is queued before the tokens of the step before are read, as on a GPU: slots change hands, texts do not."""
    prompts = texts(5, 9, 1, 14, 3, 6, 2, 8, 4)

    def run(is_ahead, end=None):
        requests = [serve.Request(i, p, 1 + 2 * i, 0, temperature, 0.9, f"{i}") for i, p in enumerate(prompts)]
        server = serve.Server(model, 3, 6, end, prefixes=2)
        server.is_ahead = is_ahead
        serve.serve(server, requests, lambda: None)
        assert sorted(server.pool.allocated) == sorted(prefix.slot for prefix in server.prefixes.kept)
        return [request.tokens for request in requests], server.spent["decode"][0]

    want, count = run(False)
    assert run(True) == (want, count)  # no more work: the last token of each is known before
    end = want[-1][5]
    cut, count = run(False, end)
    assert [x[-1] == end for x in cut].count(True) >= 1
    ahead, more = run(True, end)
    assert ahead == cut
    assert count < more <= count + 2 * len(prompts)  # tokens for nobody


def test_ahead_of_a_gpu_tokens_are_read_after_the_next_step_is_queued(serve, model, monkeypatch):
    server, seen = serve.Server(model, 2, 100), []
    server.is_ahead = True
    for name in ("read", "write", "collect"):
        own = getattr(server, name)
        monkeypatch.setattr(server, name, lambda *given, own=own, name=name: seen.append(name) or own(*given))
    server.waiting.append(serve.Request(0, texts(4)[0], 3))
    server.step()
    assert (seen, server.finished, len(server.running[0].tokens)) == (["read", "write", "collect"], [], 0)
    server.step()
    assert (server.running, server.pool.allocated, server.finished) == ([], (), [])  # its last token is queued
    (request,) = server.queued[-1].requests
    assert (len(request.tokens), request.is_finished) == (2, False)
    assert server.is_busy
    server.step()
    assert (len(request.tokens), request.is_finished, server.is_busy) == (3, True, False)
    assert [len(request.times), server.finished_count] == [3, 1]


def test_prompts_beside_decodes_are_few_calls(serve, model, monkeypatch):
    """A step is one call for pieces of all prompts, and one for all tokens."""
    calls, read, step = [], model.prefill, model.step
    monkeypatch.setattr(model, "prefill", lambda *given: calls.append(("prefill", given[0].shape[1])) or read(*given))
    server = serve.Server(model, 5, 12)
    monkeypatch.setattr(model, "step", lambda *given: calls.append(("step", len(given[0]))) or step(*given))
    server.waiting += [serve.Request(i, prompt, 20) for i, prompt in enumerate(texts(3, 4, 9, 8, 2))]
    calls.clear()
    for _ in range(3):
        server.step()
    assert calls == [("prefill", 12), ("step", 2), ("prefill", 12), ("step", 4), ("prefill", 2), ("step", 8)]


def test_check_finds_a_wrong_token(serve, model):
    request = serve.Request(3, texts(5)[0], 5)
    served(serve, model, [request])
    right = request.tokens[2]
    request.tokens[2] = (right + 1) % VOCAB
    assert serve.check(model, [request])[0] == [f"request 3, token 2: {right + 1} served, {right} alone"]


def test_check_lets_only_near_ties_pass_in_16_bits(serve, weights, monkeypatch):
    model = model_of({name: x.bfloat16() for name, x in weights.items()}, RANKS)
    request = serve.Request(0, texts(5)[0], 1)
    served(serve, model, [request])
    pool = model.new_pool(1)
    logits = serve.prefill(model, pool, [(pool.allocate()[0], request.prompt)])[0]
    first, second = (int(token) for token in logits.argsort(descending=True)[:2])
    assert request.tokens == [first]
    request.tokens = [second]
    gap = float((logits[first] - logits[second]) / logits.std())
    monkeypatch.setattr(serve, "TIE", 1.1 * gap)
    assert serve.check(model, [request]) == ([], 1)
    monkeypatch.setattr(serve, "TIE", 0.9 * gap)
    assert serve.check(model, [request]) == ([f"request 0, token 0: {second} served, {first} alone"], 0)
    request.temperature = 1.0  # drawn texts are left out
    assert serve.check(model, [request]) == ([], 0)


def test_texts_are_written_from_graphs_of_the_model(serve, model, monkeypatch):
    """Those of all sizes are captured before the first request: 1, 2 and 4 texts."""
    prompts = texts(5, 9, 1)

    def written():
        requests = [serve.Request(i, prompt, 3 + 2 * i) for i, prompt in enumerate(prompts)]
        served(serve, model, requests, slots=3)
        return [request.tokens for request in requests]

    want = written()
    monkeypatch.setattr(graphs, "devices", {"cpu"})
    monkeypatch.setattr(graphs, "Graph", fake_graphs.TapeGraph)
    monkeypatch.setattr(fake_graphs.TapeGraph, "captured", 0)
    monkeypatch.setattr(fake_graphs.TapeGraph, "replayed", 0)
    assert written() == want
    assert (fake_graphs.TapeGraph.captured, fake_graphs.TapeGraph.replayed) == (3, 3 + 6)


# ---- drawing -----------------------------------------------------------------------------------------------------


def test_drawn_text_does_not_depend_on_the_others(serve, model):
    def tokens(count, seed="a"):
        requests = [serve.Request(i, p, 12, 0, 1.5, 0.95, seed) for i, p in enumerate(texts(*[4] * count))]
        requests += [serve.Request(9, texts(3, seed=1)[0], 12)] if count > 1 else []
        served(serve, model, requests, slots=4)
        return requests[0].tokens

    assert tokens(1) == tokens(3)
    assert tokens(1) != tokens(1, "b")


def test_draws_have_the_chances_that_they_should(serve):
    chances = torch.tensor([0.1, 0.5, 0.05, 0.35])
    request = serve.Request(0, [0], 1, 0, 1.0, 0.8, "seed")
    drawn = [int(serve.choose(chances.log()[None], [request])) for _ in range(800)]
    assert set(drawn) == {1, 3}
    assert drawn.count(1) / 800 == pytest.approx(0.5 / 0.85, abs=0.05)
    cold = serve.Request(0, [0], 1, 0, 0.5, 1.0, "seed")  # squares the chances
    drawn = [int(serve.choose(chances.log()[None], [cold])) for _ in range(800)]
    assert drawn.count(1) / 800 == pytest.approx(0.25 / 0.385, abs=0.05)


def test_rows_with_top_p_do_not_change_others(serve):
    """A row without top_p is drawn from all tokens in their order, whoever stands beside it."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))

    def drawn(seed, *others):
        return serve.choose(logits, [serve.Request(0, [0], 1, 0, 1.5, 1.0, seed), *others]).tolist()

    found = []
    for seed in map(str, range(40)):
        alone = drawn(seed, serve.Request(1, [0], 1))[0]
        assert drawn(seed, serve.Request(1, [0], 1, 0, 1.5, 0.3, "y"))[0] == alone
        found.append(alone)
    assert len(set(found)) > 20


def test_draws_at_the_end_take_the_last_token_that_has_a_chance(serve):
    place = sys.modules["serving.scheduler"].place
    chances = torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0]] * 4)
    assert place(chances, torch.tensor([[0.0], [0.49], [0.5], [1.0]])).tolist() == [[0], [0], [2], [2]]


def test_greedy_and_drawn_texts_share_a_batch(serve):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    greedy, drawn = serve.Request(0, [0], 1), serve.Request(1, [0], 1, 0, 2.0, 1.0, "x")
    narrow = serve.Request(2, [0], 1, 0, 2.0, 1e-6, "y")
    found = serve.choose(logits, [greedy, drawn, narrow]).tolist()
    assert found[0] == int(logits[0].argmax())
    assert found[2] == int(logits[2].argmax())
    assert greedy.random.random() == random.Random("").random()  # none was taken


# ---- checkpoints -------------------------------------------------------------------------------------------------


def official(weights):
    """Parameters as official files have them: vectors that mix are [1, 1, width], and the first layer has a v0."""
    shaped = {}
    for name, x in weights.items():
        is_vector = x.dim() == 1 and not name.endswith(("weight", "bias"))
        shaped[name] = x.view(1, 1, -1) if is_vector else x
    unused = {"v0": torch.ones(1, 1, WIDTH), "v1": torch.ones(WIDTH, 6), "v2": torch.ones(6, WIDTH)}
    return shaped | {f"blocks.0.att.{name}": x for name, x in unused.items()}


# ---- vocabularies ------------------------------------------------------------------------------------------------


def write_vocabulary(path, more=("257 '\\t\\t' 2", "258 'the' 3", "259 ' the' 4", "260 'é' 2")):
    pieces = [chr(byte) if byte < 128 else bytes([byte]) for byte in range(256)]
    lines = [f"{token} {piece!r} 1" for token, piece in enumerate(pieces, 1)]
    path.write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")
    return path


def test_vocabulary_of_a_file(serve, tmp_path):
    vocabulary = serve.Vocabulary(write_vocabulary(tmp_path / "vocabulary.txt"))
    assert vocabulary.encode("in the th\té".encode()) == [106, 111, 259, 33, 117, 105, 10, 260]
    assert vocabulary.decode([0, 259, 260, 28, 999]) == " theé\N{MIDDLE DOT}?"
    assert vocabulary.end == 0
    for text, said in (("1 'a' 1\n", "expected a token for each single byte"), ("1 a\n", "got '1 a\\\\n'")):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(ValueError, match=f"bad.txt is no vocabulary: .*{said}"):
            serve.Vocabulary(tmp_path / "bad.txt")


# ---- the program -------------------------------------------------------------------------------------------------


@pytest.fixture
def program(serve, monkeypatch):
    """Runs it in this process; returns what it exits with."""

    def program(*arguments):
        monkeypatch.setattr(sys, "argv", ["serve.py", *map(str, arguments)])
        return serve.main()

    return program


def test_command_line(root, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [*warm.python("torch"), str(root / "examples" / "serve.py"), *SMALL]
    done = subprocess.run(
        [*command, "--requests", "6", "--rate", "inf", "--slots", "2", "--json", "--check"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["requests"], said["finished"], said["differ"], said["near_ties"]) == (6, 6, 0, 0)
    assert said["decode_tokens"] > 0
    assert said["prefill_tokens"] >= 6 * 4
    assert said["decode_tokens_per_s"] > 0
    for name in ("first_token_ms", "next_token_ms"):
        assert 0 < said[name]["p50"] <= said[name]["p90"] <= said[name]["p99"]


def test_table_and_text_are_shown(program, capsys):
    assert program(*SMALL, "--requests", 3, "--rate", 1000, "--prompt", "Once upon a time", "--slots", 1) == 0
    printed = capsys.readouterr().out
    for said in ("cpu float32", "prefill", "decode", "first token", "next token", "3 finished", "request 2", "p99"):
        assert said in printed
    assert program(*SMALL, "--requests", 1, "--prompt", "Once upon a time", "--check") == 0
    assert program(*SMALL, "--prompt", "") == "--prompt: expected at least one token, got none"
    printed = capsys.readouterr().out
    assert "Once upon a time" in printed
    assert "all 1 sequences are those of one-by-one decoding" in printed
    assert program(*SMALL, "--requests", 1, "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_wrong_decoding_is_found(serve, program, monkeypatch, capsys):
    decoder = sys.modules["serving.scheduler"].Decoder
    call = decoder.__call__
    monkeypatch.setattr(decoder, "__call__", lambda self, *what: call(self, *what).roll(1, -1))
    said = program(*SMALL, "--requests", 2, "--rate", "inf", "--check", "--json")
    assert said.startswith("not what one-by-one decoding writes:\nrequest ")
    assert json.loads(capsys.readouterr().out)["differ"] == 2


def test_checkpoint_is_served(serve, program, weights, tmp_path, capsys):
    torch.save(official(weights), tmp_path / "model.pth")
    some = ("--cpu", "--requests", 2, "--rate", "inf", "--json", "--check", "--new-tokens", 4)
    assert program("--checkpoint", tmp_path / "model.pth", *some) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 2
    vocabulary = write_vocabulary(tmp_path / "vocabulary.txt")
    said = program("--checkpoint", tmp_path / "model.pth", "--vocabulary", vocabulary, *some)
    assert said == "the vocabulary goes to token 260, the model to 255"
    assert program(*SMALL, "--vocab", 300, "--vocabulary", vocabulary, *some) == 0
    assert "nowhere.pth" in program("--checkpoint", tmp_path / "nowhere.pth", *some)
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    said = program("--checkpoint", tmp_path / "other.pth", *some)
    assert said == f"path: expected a dict of tensors, got another thing in {tmp_path / 'other.pth'}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "0"], "argument --requests: expected at least 1, got 0"),
        (["--slots", "many"], "argument --slots: invalid int value: 'many'"),
        (["--rate", "0"], "argument --rate: expected more than 0, got 0"),
        (["--rate", "nan"], "argument --rate: expected more than 0, got nan"),
        (["--top-p", "1.5"], "argument --top-p: expected more than 0, at most 1, got 1.5"),
        (["--temperature", "-1"], "argument --temperature: expected at least 0, got -1"),
        (["--vocab", "100"], "argument --vocab: expected at least 256, got 100"),
        (["--width", "100"], "--width 100 is not a multiple of --head-size 64"),
        (["--checkpoint", "x.pth", "--layers", "2"], "--layers is for random weights; the checkpoint has its own"),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["--model", "gpt"], "argument --model: invalid choice: 'gpt'"),
        (["--checkpoint", "x.pth", "--model", "kimi"], "--model is for random weights; the checkpoint has its own"),
    ],
    ids=str,
)
def test_bad_arguments(program, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        program(*arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_percentiles(serve):
    assert serve.percentiles([i / 1000 for i in range(100, 0, -1)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert serve.percentiles([]) == {"p50": None, "p90": None, "p99": None}
