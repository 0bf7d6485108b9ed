"""The plugins for vLLM and SGLang: what they make of a batch, what the engines ask of them, and how they are found."""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import math
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import warm
from rwkv7_alone import model_of, random_weights, read_alone
from torch._subclasses.fake_tensor import FakeTensorMode

import rwkv_jit

PACKAGES = {"vllm": "rwkv_jit_vllm", "sglang": "rwkv_jit_sglang"}
HEADS, HEAD_SIZE, LAYERS, VOCAB, SLOTS = 2, 8, 2, 32, 6
WIDTH = HEADS * HEAD_SIZE
RANKS = {"w": 4, "a": 5, "v": 6, "g": 7}
TEXTS = [(7 * i * i + 3 * i + text) % VOCAB for text in range(4) for i in range(24)]


@pytest.fixture(autouse=True)
def _paths(root, monkeypatch):
    """Packages are imported as they lie in the checkout."""
    for name in ("", "engines/rwkv7", "engines/vllm", "engines/sglang"):
        monkeypatch.syspath_prepend(str(root / "examples" / name))
    yield
    for name in [
        n
        for n in sys.modules
        if n.partition(".")[0] in ("rwkv7_slots", "delta_rules", "state_space", *PACKAGES.values())
    ]:
        del sys.modules[name]


@pytest.fixture
def weights():
    return random_weights(LAYERS, HEADS, HEAD_SIZE, VOCAB, RANKS)


@pytest.fixture
def model(weights):
    slots = importlib.import_module("rwkv7_slots")
    made = slots.Rwkv7(slots.sizes_of(weights))
    made.load(weights.items())
    return made


# ---- what an engine has ------------------------------------------------------------------------------------------


class Vllm:
    """Pages of bytes, decodes before prompts, slot 0 for padding."""

    padding = 0

    def __init__(self):
        self.batch = importlib.import_module("rwkv_jit_vllm.batch")
        sizes, kinds = self.batch.shapes(HEADS, HEAD_SIZE, WIDTH), self.batch.dtypes("auto", torch.float32)
        counts = [torch.Size(size).numel() * kind.itemsize for size, kind in zip(sizes, kinds, strict=True)]
        self.states = []
        for _ in range(LAYERS):
            pages = torch.full((SLOTS, sum(counts) + 64), 77, dtype=torch.uint8)  # a page may be longer than its states
            begin, bound = 0, []
            for size, kind, count in zip(sizes, kinds, counts, strict=True):
                bound.append(pages[:, begin : begin + count].view(kind).view(SLOTS, *size))
                begin += count
            self.states.append(self.batch.states_of(bound))

    def step(self, rows):
        """Return the step of (slot, tokens, tokens read before, whether it is a decode) of each sequence."""
        decodes, prompts = ([row for row in rows if row[3] == is_decode] for is_decode in (True, False))
        assert rows == decodes + prompts
        self.buffer = torch.tensor([[row[0]] for row in decodes], dtype=torch.int32).view(-1, 1)
        slots = torch.tensor([row[0] for row in prompts], dtype=torch.int32)
        given = (slots, torch.tensor([row[2] > 0 for row in prompts])) if prompts else (None, None)
        return self.batch.step_of(bounds_of(rows), max(row[1] for row in rows), self.buffer, *given)


class Sglang:
    """A tensor for each kind of state, prompts and decodes in any order, -1 for the padding of CUDA graphs."""

    padding = -1

    def __init__(self):
        self.batch = importlib.import_module("rwkv_jit_sglang.batch")
        conv, temporal = self.batch.shapes(HEADS, HEAD_SIZE, WIDTH)
        conv = [torch.full((LAYERS, SLOTS, *size), 1e3) for size in conv]
        temporal = torch.full((LAYERS, SLOTS, *temporal), 1e3)
        self.states = [self.batch.states_of([x[layer] for x in conv], temporal[layer]) for layer in range(LAYERS)]

    def step(self, rows):
        """Return the step of (slot, tokens, tokens read before, whether it is a decode) of each sequence."""
        self.buffer = torch.tensor([row[0] for row in rows], dtype=torch.int32)
        if all(row[3] for row in rows):
            return self.batch.step_of(self.buffer, bounds_of(rows))
        before = torch.tensor([row[2] for row in rows], dtype=torch.int32)
        return self.batch.step_of(self.buffer, bounds_of(rows), before, max(row[1] for row in rows))


def bounds_of(rows):
    return torch.tensor([0, *(row[1] for row in rows)]).cumsum(0).to(torch.int32)


class Texts:
    """Reads texts through an engine's side, and compares what comes out with each text alone."""

    def __init__(self, engine, model, weights):
        self.engine, self.model, self.weights = engine, model, weights
        self.read = {}  # the tokens behind which a slot is

    def __call__(self, *pieces, padding=0, idle_tokens=0):
        """Read (slot, tokens, whether it is a decode) of some texts, and rows and tokens of none."""
        rows = [(slot, len(new), len(self.read.get(slot, [])), is_decode) for slot, new, is_decode in pieces]
        all_decode = all(is_decode for *_, is_decode in pieces)
        rows += [(self.engine.padding, int(all_decode), 0, all_decode)] * padding
        tokens = [token for _, new, _ in pieces for token in new] + [1] * (padding * all_decode + idle_tokens)
        idle = [state[5].clone() for layer in self.engine.states for state in layer]
        logits = self.run(self.engine.step(rows), tokens)
        begin = 0
        for slot, new, _ in pieces:
            self.read[slot] = [*self.read.get(slot, []), *new]
            self.compare(slot, logits[begin : begin + len(new)])
            begin += len(new)
        assert all(map(torch.equal, idle, [state[5] for layer in self.engine.states for state in layer]))

    def run(self, step, tokens):
        with torch.no_grad():
            return self.model.head(self.model(self.model.embed(torch.tensor(tokens)), self.engine.states, step))

    def compare(self, slot, logits):
        expected, wkv, last = read_alone(self.weights, self.read[slot])
        torch.testing.assert_close(logits.double(), expected[len(expected) - len(logits) :], rtol=1e-4, atol=1e-4)
        for layer, of_layer in enumerate(self.engine.states):
            for given, own in zip((wkv[layer], *last[layer]), of_layer, strict=True):
                torch.testing.assert_close(own[slot].double(), given, rtol=1e-4, atol=1e-4)

    def copy(self, source, target):
        """What the engine does for a hit of its prefix cache."""
        for of_layer in self.engine.states:
            for state in of_layer:
                state[target] = state[source]
        self.read[target] = list(self.read[source])


@pytest.fixture(params=[Vllm, Sglang])
def texts(request, model, weights):
    return Texts(request.param(), model, weights)


# ---- batches -----------------------------------------------------------------------------------------------------


def test_decodes_beside_prompts_are_as_each_text_alone(texts):
    texts((3, TEXTS[:13], False), (1, TEXTS[24:25], False), padding=2)
    texts((3, TEXTS[13:14], True), (1, TEXTS[25:31], False), (4, TEXTS[48:57], False), padding=1, idle_tokens=3)
    texts((3, TEXTS[14:15], True), (4, TEXTS[57:58], True), (1, TEXTS[31:32], False))


def test_a_prompt_in_pieces_goes_on_and_a_new_one_does_not(texts):
    for begin, end in ((0, 9), (9, 10), (10, 21)):
        texts((2, TEXTS[begin:end], False))
    del texts.read[2]  # another text gets the slot, whose states are as they were left
    texts((2, TEXTS[30:41], False))


def test_a_sequence_without_tokens_stays_as_it_is(texts, monkeypatch):
    texts((4, TEXTS[:5], False), (2, TEXTS[24:28], False), (3, TEXTS[48:54], False))
    written, write = [], torch.Tensor.__setitem__

    def watched(x, index, value):
        if isinstance(index, torch.Tensor):
            written.append([row for row in index.tolist() if row not in (0, len(x) - 1)])  # what nobody reads
        write(x, index, value)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__setitem__", watched)
        texts((4, TEXTS[5:8], False), (3, [], False), (2, TEXTS[28:31], False))
    assert written
    assert all(len(set(rows)) == len(rows) for rows in written)  # on a GPU any one of several would win
    texts((4, TEXTS[8:9], True), (3, TEXTS[54:55], True), (2, TEXTS[31:32], True))


def test_a_hit_of_the_prefix_cache_goes_on_from_a_copy(texts):
    texts((3, TEXTS[:14], False))
    texts.copy(3, 2)
    texts((3, TEXTS[14:15], True), (2, TEXTS[50:56], False), padding=1)
    texts((3, TEXTS[15:16], True), (2, TEXTS[56:57], True))


def test_decodes_are_one_update_and_padding_touches_no_text(texts, monkeypatch):
    import rwkv_jit

    texts((3, TEXTS[:5], False), (1, TEXTS[24:27], False))
    monkeypatch.setattr(rwkv_jit, "wkv7_varlen", lambda *_, **__: pytest.fail("it is for prompts"))
    texts((3, TEXTS[5:6], True), (1, TEXTS[27:28], True), padding=2)


def test_more_tokens_than_decodes_are_padding(texts):
    texts((3, TEXTS[:5], False), (1, TEXTS[24:27], False))
    texts((3, TEXTS[5:6], True), (1, TEXTS[27:28], True), idle_tokens=2)


def test_a_graph_of_decodes_replays_with_other_slots(texts):
    """A step is made once, and read again after its buffer has changed, as a CUDA graph does."""
    texts((3, TEXTS[:5], False), (1, TEXTS[24:27], False), (4, TEXTS[48:51], False))
    step = texts.engine.step([(texts.engine.padding, 1, 0, True)] * 2)
    for first, second in ((3, 1), (4, 3), (1, texts.engine.padding)):
        texts.engine.buffer.copy_(torch.tensor([first, second], dtype=torch.int32).view_as(texts.engine.buffer))
        logits = texts.run(step, [9, 11])
        for row, (slot, token) in enumerate(((first, 9), (second, 11))):
            if slot > 0:
                texts.read[slot].append(token)
                texts.compare(slot, logits[row : row + 1])


def test_nothing_is_read_back_from_the_gpu(texts):
    """Neither values nor shapes that depend on them: a fake tensor has none."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for rows in ([(3, 1, 4, True)] * 2, [(3, 1, 4, True), (1, 5, 0, False)]):
            x = torch.zeros(sum(row[1] for row in rows), WIDTH)
            states = [type(own)(*map(torch.empty_like, own)) for own in texts.engine.states]
            assert texts.model(x, states, texts.engine.step(rows)).shape == x.shape


def test_layers_are_those_of_the_model_of_rwkv_jit(model):
    from rwkv_jit.nn import RWKV7, RWKV7Block

    assert isinstance(model, RWKV7)
    assert {type(block) for block in model.blocks} == {RWKV7Block}


def test_memory_is_measured_as_for_one_text_that_nobody_keeps(model, weights):
    batch = importlib.import_module("rwkv_jit_vllm.batch")
    sizes, kinds = batch.shapes(HEADS, HEAD_SIZE, WIDTH), batch.dtypes("auto", torch.float32)
    step, states = batch.nothing_read(11, sizes, kinds, LAYERS, "cpu")
    with torch.no_grad():
        found = model.head(model(model.embed(torch.tensor(TEXTS[:11])), states, step))
    assert found.shape == (11, VOCAB)
    assert found.isfinite().all()


def test_prompts_need_to_say_whether_they_go_on():
    batch = importlib.import_module("rwkv_jit_vllm.batch")
    with pytest.raises(ValueError, match="has_state: expected a bool for each prompt, got None"):
        batch.step_of(torch.tensor([0, 3]), 3, None, torch.tensor([1]), None)


def test_states_that_the_kernels_do_not_have_are_refused():
    batch = importlib.import_module("rwkv_jit_vllm.batch")
    assert batch.dtypes("bfloat16", torch.float16) == (torch.bfloat16, torch.float16, torch.float16)
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype: expected one of auto, float32.*got fp8"):
        batch.dtypes("fp8", torch.float16)


# ---- checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_becomes_a_folder(root, tmp_path, weights, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    official = {name: x.view(1, 1, -1) if x.dim() == 1 else x for name, x in weights.items()}
    official["blocks.0.att.v0"] = torch.zeros(1, 1, WIDTH)  # which nothing uses
    torch.save(official, tmp_path / "model.pth")
    program = [*warm.python("torch"), str(root / "examples/engines/rwkv7/rwkv7_slots.py")]
    done = subprocess.run(
        [*program, str(tmp_path / "model.pth"), str(tmp_path / "made")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    slots = importlib.import_module("rwkv7_slots")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["architectures"] == [slots.ARCHITECTURE]
    read = slots.sizes_in(type("Config", (), config))
    assert read == slots.sizes_of(weights) == slots.Sizes(LAYERS, WIDTH, HEADS, VOCAB, 4 * WIDTH, 4, 5, 6, 7)
    found = safetensors.load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == weights.keys()
    model = slots.Rwkv7(read)
    assert model.load(found.items()) == weights.keys()
    assert all(torch.equal(x, weights[name].view_as(x)) for name, x in model.state_dict().items())

    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    monkeypatch.setattr(sys, "argv", ["rwkv7_slots", str(tmp_path / "other.pth"), str(tmp_path / "no")])
    assert slots.main().endswith("other.pth: this is no RWKV-7 model: it lacks blocks.0.att.w1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("head.weight"), "the checkpoint lacks head.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra: the model has no such parameter"),
        (lambda w: w.update({"ln_out.bias": torch.zeros(3)}), r"ln_out.bias: expected shape \[16\], got \[3\]"),
    ],
)
def test_parameters_that_do_not_fit_are_named(model, weights, change, said):
    change(weights)
    with pytest.raises(ValueError, match=said):
        model.load(weights.items())


def test_the_check_tells_a_wrong_token(root, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(root / "examples" / "engines"))
    check = importlib.import_module("check")
    monkeypatch.delitem(sys.modules, "check")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "alone", lambda weights, prompt, count: prompt[:1] * count)
    wrong = []

    def engine(folder, options):
        assert (folder / "model.safetensors").is_file()
        return lambda prompts, counts: ([p[:1] * c + wrong for p, c in zip(prompts, counts, strict=True)], 5)

    monkeypatch.setattr(check, "with_vllm", engine)
    monkeypatch.setattr(sys, "argv", ["check.py", "vllm", "--folder", str(tmp_path)])
    assert check.main() == 0
    assert "round 2: 11 of 11 sequences as alone, 5 tokens from the prefix cache\n" in capsys.readouterr().out
    wrong = [1]
    assert check.main() == 1
    assert "round 1: 0 of 11 sequences" in capsys.readouterr().out


def test_the_check_reads_each_text_alone(root, monkeypatch, weights):
    monkeypatch.syspath_prepend(str(root / "examples" / "engines"))
    check = importlib.import_module("check")
    monkeypatch.delitem(sys.modules, "check")
    found = check.alone(model_of(weights, RANKS), TEXTS[:5], 3)
    assert found == read_alone(weights, TEXTS[:5] + found[:2])[0][4:].argmax(-1).tolist()


# ---- kernels for the layers of SGLang's models -------------------------------------------------------------------

GROUPS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 8, 6
RULES = {"gated_delta_rule": "GatedDeltaRuleKernel", "kda": "KimiKernel"}


@pytest.fixture
def kernels(monkeypatch):
    """The module of the kernels, with stand-ins for what it imports of SGLang, and what it has told them."""
    options = {f"linear_attn_{phase}_backend": None for phase in ("decode", "prefill")}
    options = SimpleNamespace(linear_attn_backend="rwkv_jit", **options)
    told = SimpleNamespace(choices=["triton"], hooks={}, options=options)
    backends = SimpleNamespace(TRITON=Backend("triton"))
    hooks = SimpleNamespace(register=lambda target, hook, kind: told.hooks.update({target: (hook, kind)}))
    modules = {
        "layers.attention.linear.kernels.kernel_backend": {"LinearAttnKernelBase": object},
        "layers.attention.linear.utils": {"LinearAttnKernelBackend": backends},
        "runtime_context": {"get_exec": lambda: SimpleNamespace(mamba=options)},
        "plugins.hook_registry": {"HookRegistry": hooks, "HookType": SimpleNamespace(AROUND="around")},
        "server_args": {
            "LINEAR_ATTN_KERNEL_BACKEND_CHOICES": told.choices,
            "add_linear_attn_kernel_backend_choices": told.choices.extend,
        },
    }
    names = {f"sglang.srt.{name}": members for name, members in modules.items()}
    stand_in(monkeypatch, names)
    module = importlib.import_module("rwkv_jit_sglang.kernels")
    return SimpleNamespace(module=module, told=told)


def stand_in(monkeypatch, modules):
    """Put modules with these members into the place of an engine's, and those above them."""
    names = dict(modules)
    for name in modules:
        parts = name.split(".")
        names.update({".".join(parts[:end]): {} for end in range(1, len(parts)) if ".".join(parts[:end]) not in names})
    for name, members in names.items():
        module = ModuleType(name)
        module.__dict__.update({**members, "__path__": []})
        monkeypatch.setitem(sys.modules, name, module)


class Backend(str):
    """A choice of SGLang's: names that it does not know are custom."""

    def is_custom(self):
        return self != "triton"


def rule_inputs(op, rows):
    """Return q, k and v of some tokens, their raw gates and rates, A_log and dt_bias."""
    of_gate = (VALUE_HEADS, KEY_SIZE) if op == "kda" else (VALUE_HEADS,)
    q, k = torch.randn(2, rows, GROUPS, KEY_SIZE)
    v, a, b = torch.randn(rows, VALUE_HEADS, VALUE_SIZE), torch.randn(rows, *of_gate), torch.randn(rows, VALUE_HEADS)
    return (q, k, v, a, b), torch.randn(VALUE_HEADS), torch.randn(of_gate)


def by_reference(op, inputs, A_log, dt_bias, state, bound=None):
    """Return y and the state after one sequence."""
    options = {"lower_bound": bound} if bound is not None else {}
    y, final = getattr(rwkv_jit, f"{op}_ref")(
        *(x.unsqueeze(0) for x in inputs), state.unsqueeze(0), True, A_log=A_log, dt_bias=dt_bias, qk_norm=True,
        beta_map="sigmoid", state_layout="vk", **options,
    )  # fmt: skip
    return y[0], final[0]


def check_rows(op, inputs, A_log, dt_bias, before, states, slots, y, bound=None):
    """Compare one token of each row, and the pool."""
    changed = {slot for slot in slots.tolist() if slot > 0}
    for row, slot in enumerate(slots.tolist()):
        if slot <= 0:
            assert not y[row].any()
            continue
        want, final = by_reference(op, [x[row : row + 1] for x in inputs], A_log, dt_bias, before[slot], bound)
        torch.testing.assert_close(y[row], want[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot], final, rtol=1e-4, atol=1e-5)
    untouched = sorted(set(range(len(states))) - changed)
    assert torch.equal(states[untouched], before[untouched])


def pool_of_states():
    return torch.randn(7, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("op", RULES)
def test_one_token_of_a_delta_rule(kernels, op, is_packed, bound):
    kernel = getattr(kernels.module, RULES[op])(None)
    inputs, A_log, dt_bias = rule_inputs(op, 4)
    q, k, v, a, b = inputs
    states, slots = pool_of_states(), torch.tensor([3, -1, 6, 0], dtype=torch.int32)
    before = states.clone()
    more = {"A_log": A_log.view(1, 1, -1, 1), "dt_bias": dt_bias.flatten(), "lower_bound": bound}
    more |= {"ssm_states": states, "cache_indices": slots}
    if is_packed:
        mixed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
        sizes = {"scale": KEY_SIZE**-0.5, "num_v_heads": VALUE_HEADS, "head_v_dim": VALUE_SIZE}
        y = kernel.packed_decode(mixed, a.flatten(1), b.unsqueeze(1), **more, **sizes, replayssm_d=None)
    else:
        y = kernel.decode(*(x.unsqueeze(0) for x in (q, k, v)), a.unsqueeze(0), b, **more, query_start_loc=None)
    assert y.shape == (1, 4, VALUE_HEADS, VALUE_SIZE)
    check_rows(op, inputs, A_log, dt_bias, before, states, slots, y[0], bound if op == "kda" else None)


@pytest.mark.parametrize("is_tracked", [False, True])
@pytest.mark.parametrize("op", RULES)
def test_prompts_of_a_delta_rule(kernels, op, is_tracked):
    """A sequence begins with its slot's state; that after some chunks of 64 tokens is handed over if it is wanted."""
    kernel = getattr(kernels.module, RULES[op])(None)
    bounds, chunks = [0, 3, 140, 141, 270], [-1, 2, 0, 1]
    inputs, A_log, dt_bias = rule_inputs(op, bounds[-1])
    q, k, v, a, b = (x.unsqueeze(0) for x in inputs)
    states, slots = pool_of_states(), torch.tensor([5, 2, 6, 1])
    before, track = states.clone(), torch.full((4, VALUE_HEADS, VALUE_SIZE, KEY_SIZE), float("nan"))
    more = {"ssm_states": states, "cache_indices": slots, "query_start_loc": torch.tensor(bounds, dtype=torch.int32)}
    more |= {"track_state": track, "track_chunk_idx": torch.tensor(chunks, dtype=torch.int32)} if is_tracked else {}
    if op == "kda":
        more |= {"A_log": A_log.view(1, 1, -1, 1), "dt_bias": dt_bias.flatten(), "beta_is_raw": True}
        y = kernel.extend(q, k, v, a, b, **more, return_intermediate_states=is_tracked, layer_id=3)
        y, *rest = y if is_tracked else (y,)
        assert rest == [None] * is_tracked
    else:
        g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        y, *rest = kernel.extend(q, k, v, g, b.sigmoid(), **more, output=None)
        assert rest == [None, None]
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        slot, one = int(slots[row]), [x[begin:end] for x in inputs]
        want, final = by_reference(op, one, A_log, dt_bias, before[slot])
        torch.testing.assert_close(y[0, begin:end], want, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(states[slot], final, rtol=1e-3, atol=1e-4)
        if is_tracked and chunks[row] > 0:
            _, there = by_reference(op, [x[: 64 * chunks[row]] for x in one], A_log, dt_bias, before[slot])
            torch.testing.assert_close(track[row], there, rtol=1e-3, atol=1e-4)
    untouched = [0, 3, 4]
    assert torch.equal(states[untouched], before[untouched])


def test_what_the_kernels_do_not_do_is_said(kernels):
    inputs, A_log, dt_bias = rule_inputs("gated_delta_rule", 2)
    q, k, v, a, b = (x.unsqueeze(0) for x in inputs)
    kernel, pool = kernels.module.GatedDeltaRuleKernel(None), {"ssm_states": pool_of_states()}
    pool["cache_indices"] = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="--enable-linear-replayssm: "):
        kernel.packed_decode(
            q[0], a[0], b[0], A_log=A_log, dt_bias=dt_bias, scale=1.0, num_v_heads=4, head_v_dim=6, **pool,
            replayssm_d=q,
        )  # fmt: skip
    with pytest.raises(ValueError, match="--enable-mis: "):
        kernel.extend(q, k, v, a, b, **pool, query_start_loc=torch.tensor([0, 2]), inplace_update=False)
    taken = []
    own = SimpleNamespace(extend=lambda *arrays, **options: taken.append((arrays, options)) or "theirs")
    kimi = kernels.module.KimiKernel(own)
    assert kimi.extend(q, k, v, a, b, **pool, query_start_loc=None, is_spec_decode=True, layer_id=1) == "theirs"
    assert [x is y for x, y in zip(taken[0][0], (q, k, v, a, b), strict=True)] == [True] * 5
    assert taken[0][1]["layer_id"] == 1


# ---- kernels for the layers of vLLM's models ---------------------------------------------------------------------


@pytest.fixture
def first_layer():
    """Which layer begins first, one of a delta rule or one of Mamba-2."""
    return 0


@pytest.fixture
def of_vllm(monkeypatch, first_layer):
    """The modules of vLLM whose functions ours take the place of, once a layer is made: each returns its arguments."""
    module = importlib.import_module("rwkv_jit_vllm.kernels")

    def theirs(name):
        return lambda *arrays, **named: (name, arrays, named)

    mamba, kimi = "vllm.model_executor.layers.mamba", "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
    layers, context = f"{mamba}.gdn", SimpleNamespace(attn_metadata=None)
    modules = {
        **{f"{layers}.{name}_gdn_linear_attn": {} for name in ("qwen", "olmo", "kimi")},
        **{name: {x: theirs(x) for x in functions} for name, functions in module.PLACES.items()},
        f"{layers}.base": {"GatedDeltaNetAttention": type("Layer", (), {"__init__": lambda self, x: None})},
        "vllm.forward_context": {"get_forward_context": lambda: context},
    }
    modules[f"{mamba}.mamba_mixer2"]["MambaMixer2"] = type("Mixer", (), {"__init__": lambda self, x: None})
    stand_in(monkeypatch, modules)
    module.register()
    kinds = [sys.modules[f"{layers}.base"].GatedDeltaNetAttention, sys.modules[f"{mamba}.mamba_mixer2"].MambaMixer2]
    begins = [kind.__init__ for kind in kinds]
    module.register()  # as vLLM does in a process more than once
    assert [kind.__init__ for kind in kinds] == begins == module._ours
    qwen, mixer = sys.modules[f"{layers}.qwen_gdn_linear_attn"], sys.modules[f"{mamba}.mamba_mixer2"]
    assert qwen.fla_chunk_gated_delta_rule()[0] == "fla_chunk_gated_delta_rule"
    for _ in range(2):
        kinds[first_layer]("a layer")
    assert all(x.__wrapped__()[0] for x in module._ours if x not in begins)  # once
    olmo, kimi = sys.modules[f"{layers}.olmo_gdn_linear_attn"], sys.modules[kimi]
    decodes = sys.modules[f"{mamba}.ops.mamba_ssm"]
    return SimpleNamespace(qwen=qwen, olmo=olmo, kimi=kimi, mixer=mixer, decodes=decodes, context=context)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_one_token_of_kimi_in_vllm(of_vllm, bound):
    (q, k, v, a, b), A_log, dt_bias = rule_inputs("kda", 3)
    q, k = (x.repeat_interleave(VALUE_HEADS // GROUPS, 1) for x in (q, k))  # as many heads as of values
    states, slots = pool_of_states(), torch.tensor([4, 0, 2], dtype=torch.int32)
    before, mixed = states.clone(), torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    gates = a.unsqueeze(0), b.unsqueeze(0), A_log, dt_bias.flatten()
    options = {"mixed_qkv": mixed, "lower_bound": bound, "initial_state": states, "state_indices": slots}
    named = dict(zip(("raw_g", "raw_beta", "A_log", "dt_bias"), gates, strict=True))
    y, pool = of_vllm.kimi.fused_recurrent_kda_packed_decode(**options, **named)
    assert pool is states
    check_rows("kda", (q, k, v, a, b), A_log, dt_bias, before, states, slots, y[0], bound)


@pytest.mark.parametrize("is_packed", [False, True])
def test_one_token_of_the_gated_delta_rule_in_vllm(of_vllm, is_packed):
    inputs, A_log, dt_bias = rule_inputs("gated_delta_rule", 3)
    q, k, v, a, b = inputs
    states, slots = pool_of_states(), torch.tensor([4, 0, 2], dtype=torch.int32)
    before = states.clone()
    if is_packed:
        out, mixed = (
            torch.full((3, 1, VALUE_HEADS, VALUE_SIZE), float("nan")),
            torch.cat([x.flatten(1) for x in inputs[:3]], 1),
        )
        y, pool = of_vllm.qwen.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=KEY_SIZE**-0.5, initial_state=states,
            out=out, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert y is out
        y = y.transpose(0, 1)
    else:
        options = {"initial_state": states, "inplace_final_state": True, "use_qk_l2norm_in_kernel": True}
        options |= {"cu_seqlens": torch.arange(4, dtype=torch.int32), "ssm_state_indices": slots}
        named = {"A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias}
        rows = {name: x.unsqueeze(0) for name, x in zip("qkv", (q, k, v), strict=True)}
        run = of_vllm.qwen.fused_sigmoid_gating_delta_rule_update
        for other in (
            {"num_accepted_tokens": slots}, {"ssm_state_indices": slots.view(3, 1)}, {"beta": 2.0},
            {"use_qk_l2norm_in_kernel": False}, {"cu_seqlens": torch.tensor([0, 3])}, {"inplace_final_state": False},
        ):  # fmt: skip
            name, _, passed = run(**named, **rows, **{**options, **other})
            assert name == "fused_sigmoid_gating_delta_rule_update"
            assert all(passed[x] is y for x, y in {**named, **rows, **options, **other}.items())
        assert torch.equal(states, before)
        y, pool = run(**named, **rows, **options)
    assert pool is states
    check_rows("gated_delta_rule", inputs, A_log, dt_bias, before, states, slots, y[0])


@pytest.mark.parametrize("op", RULES)
def test_prompts_in_vllm(of_vllm, op):
    inputs, A_log, dt_bias = rule_inputs(op, 90)
    bounds, states = torch.tensor([0, 70, 90], dtype=torch.int32), pool_of_states()[:2]
    q, k, v, a, b = (x.unsqueeze(0) for x in inputs)
    options = {"initial_state": states.clone(), "output_final_state": True, "cu_seqlens": bounds}
    options |= {"use_qk_l2norm_in_kernel": True}
    if op == "kda":
        gates = {"raw_g": a, "raw_beta": b, "A_log": A_log, "g_bias": dt_bias.flatten(), "lower_bound": None}
        y, final = of_vllm.kimi.chunk_kda_with_fused_gate(q=q, k=k, v=v, **gates, **options)
        assert of_vllm.kimi.chunk_kda_with_fused_gate(q=q, k=k, v=v, **gates, **options, x=1)[2] == {"x": 1}
    else:
        g, out = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), torch.full((100, *v.shape[2:]), float("nan"))
        for module, name in ((of_vllm.olmo, "chunk_gated_delta_rule"), (of_vllm.qwen, "fla_chunk_gated_delta_rule")):
            run = getattr(module, name)
            y, final = run(q=q, k=k, v=v, g=g, beta=b.sigmoid(), **options, chunk_indices=None, core_attn_out=out)
            assert torch.equal(out[:90], y[0])
    for row, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        want, state = by_reference(op, [x[begin:end] for x in inputs], A_log, dt_bias, states[row])
        torch.testing.assert_close(y[0, begin:end], want, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(final[row], state, rtol=1e-3, atol=1e-4)


# ---- Mamba-2 of both engines' models -----------------------------------------------------------------------------

STEP = {"dt_softplus": True}
FUNCTIONS = "sglang.kernels.ops.mamba.triton_ops"


def space_inputs(tokens, dtype=torch.float32):
    """Return x, dt, B and C of some tokens, as parts of the rows that a layer projects, and A, D and dt_bias."""
    sizes = [VALUE_HEADS * VALUE_SIZE, GROUPS * KEY_SIZE, GROUPS * KEY_SIZE, VALUE_HEADS]
    x, B, C, dt = torch.randn(tokens, sum(sizes)).to(dtype).split(sizes, dim=-1)
    B, C = (each.view(tokens, GROUPS, KEY_SIZE) for each in (B, C))
    A, D, dt_bias = -torch.rand(VALUE_HEADS) - 0.1, torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    return (x.view(tokens, VALUE_HEADS, VALUE_SIZE), dt, B, C), (A, D.to(dtype), dt_bias.to(dtype))


def channels(A, D, dt_bias):
    """Return what heads have as layers pass it for decodes: views with all channels."""
    return (
        A.view(-1, 1, 1).expand(-1, VALUE_SIZE, KEY_SIZE), D.view(-1, 1).expand(-1, VALUE_SIZE),
        dt_bias.view(-1, 1).expand(-1, VALUE_SIZE),
    )  # fmt: skip


def space_alone(inputs, of_heads, state, z=None):
    """Return y and the state after one sequence, in float64."""
    x, dt, B, C = (each.double().unsqueeze(0) for each in inputs)
    A, D, dt_bias = (each.double() for each in of_heads)
    state = None if state is None else state.double().unsqueeze(0)
    more = {} if z is None else {"z": z.double().unsqueeze(0)}
    y, final = rwkv_jit.ssd_ref(x, dt, A, B, C, state, True, D=D, dt_bias=dt_bias, **STEP, **more)
    return y[0], final[0]


def close(found, want, limit=1e-5):
    torch.testing.assert_close(found.double(), want, rtol=limit, atol=limit)


def paged_states(slots=9, dtype=torch.float32):
    """A pool whose slots lie in longer pages, [slots, H, V, K]."""
    size = VALUE_HEADS * VALUE_SIZE * KEY_SIZE
    return torch.randn(slots, size + 24).to(dtype)[:, 8 : size + 8].unflatten(1, (VALUE_HEADS, VALUE_SIZE, KEY_SIZE))


def update_in_vllm(of_vllm, **changed):
    """Call what Triton's backend of vLLM calls in a step of decodes, and return its result, y and all arguments."""
    (x, dt, B, C), of_heads = space_inputs(3)
    A, D, dt_bias = channels(*of_heads)
    out, slots = torch.full_like(x, float("nan")), torch.tensor([[4], [0], [2], [7]], dtype=torch.int32)
    named = {
        "state": paged_states(), "x": x, "dt": dt.unsqueeze(-1).expand(-1, -1, VALUE_SIZE), "A": A, "B": B, "C": C,
        "D": D, "dt_bias": dt_bias, "z": None, **STEP, "state_batch_indices": slots, "dst_state_batch_indices": slots,
        "null_block_id": 0, "out": out, "num_accepted_tokens": None, "cu_seqlens": None, "is_blackwell": False,
        "enable_stochastic_rounding": False, "cache_philox_rounds": 0,
    }  # fmt: skip
    named |= changed
    arrays = [named.pop(name) for name in ("state", "x", "dt", "A", "B", "C")]
    before = arrays[0].clone()
    result = of_vllm.decodes.selective_state_update(*arrays, **named)
    return SimpleNamespace(
        result=result, y=named["out"], states=arrays[0], before=before, inputs=(x, dt, B, C), of_heads=of_heads,
        arguments={**dict(zip(("state", "x", "dt", "A", "B", "C"), arrays, strict=True)), **named},
    )  # fmt: skip


@pytest.mark.parametrize("first_layer", [0, 1])
def test_either_layer_brings_all_kernels_of_vllm(of_vllm, first_layer):
    for functions in (of_vllm.qwen, of_vllm.mixer, of_vllm.decodes):
        assert all(hasattr(each, "__wrapped__") for name, each in vars(functions).items() if name.islower()
                   and not name.startswith("__"))  # fmt: skip


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("targets", [None, [[5], [8], [3]]])
def test_one_token_of_mamba_in_vllm(of_vllm, targets, has_gate):
    """Rows read their slots and write to others where these are named; row 1 is padding, the last slot has no row."""
    changed = {} if targets is None else {"dst_state_batch_indices": torch.tensor(targets, dtype=torch.int32)}
    z = torch.randn(3, VALUE_HEADS, VALUE_SIZE) if has_gate else None
    done = update_in_vllm(of_vllm, z=z, **changed)
    assert done.result is None
    reads, writes = (4, 2), (4, 2) if targets is None else (5, 3)
    for row, read, write in zip((0, 2), reads, writes, strict=True):
        one = [each[row : row + 1] for each in done.inputs]
        y, final = space_alone(one, done.of_heads, done.before[read], None if z is None else z[row : row + 1])
        close(done.y[row], y[0])
        close(done.states[write], final)
    assert not done.y[1].any()
    untouched = sorted({*range(9)} - {*writes})
    assert torch.equal(done.states[untouched], done.before[untouched])


def test_16_bits_of_mamba_in_vllm(of_vllm):
    """Parameters and activations have one dtype and states another; memory for y may have gaps.

    Inputs times their steps are rounded to the dtype of inputs.
    """
    (x, dt, B, C), of_heads = space_inputs(3, torch.bfloat16)
    A, D, dt_bias = channels(*of_heads)
    room = torch.full((3, VALUE_HEADS, VALUE_SIZE + 2), float("nan"), dtype=torch.bfloat16)
    named = {"x": x, "dt": dt.unsqueeze(-1).expand(-1, -1, VALUE_SIZE), "A": A, "B": B, "C": C, "D": D}
    named |= {"dt_bias": dt_bias, "out": room[..., :VALUE_SIZE]}
    done = update_in_vllm(of_vllm, **named, state=paged_states(dtype=torch.float16))
    for row, slot in ((0, 4), (2, 2)):
        y, final = space_alone([each[row : row + 1] for each in (x, dt, B, C)], of_heads, done.before[slot])
        close(done.y[row], y[0], 2e-2)
        close(done.states[slot], final, 2e-2)
    assert room[..., VALUE_SIZE:].isnan().all()


def test_states_of_mamba_are_rounded_at_random_where_vllm_says_so(of_vllm):
    found = {}
    for is_random in (False, True):
        torch.manual_seed(3)
        state = paged_states(dtype=torch.float16)
        slots = torch.tensor([4, 6, 2], dtype=torch.int32)
        options = {"state_batch_indices": slots, "dst_state_batch_indices": slots}
        done = update_in_vllm(of_vllm, state=state, enable_stochastic_rounding=is_random, **options)
        want = [space_alone([x[row : row + 1] for x in done.inputs], done.of_heads, done.before[slot])[1]
                for row, slot in enumerate(slots.tolist())]  # fmt: skip
        found[is_random] = (done.states[slots.long()].double() - torch.stack(want)).abs()
    spacing = 2.0 ** (torch.stack(want).abs().clamp(min=2.0**-14).log2().floor() - 10)
    assert (found[False] <= 0.501 * spacing).all()
    assert (found[True] <= 1.001 * spacing).all()
    assert 0.15 < (found[True] > 0.501 * spacing).double().mean() < 0.35  # a quarter take the neighbour that is farther


OTHER_DECODES = {
    "tokens that are verified": {"num_accepted_tokens": torch.ones(3), "cu_seqlens": torch.tensor([0, 1, 2, 3])},
    "tokens that were verified": {"num_accepted_tokens": torch.ones(3)},
    "lengths": {"cu_seqlens": torch.tensor([0, 3])},
    "steps of channels": {"dt": torch.randn(3, VALUE_HEADS, VALUE_SIZE)},
    "rates of channels": {"A": -torch.rand(VALUE_HEADS, VALUE_SIZE, KEY_SIZE)},
    "a bias of channels": {"dt_bias": torch.randn(VALUE_HEADS, VALUE_SIZE)},
    "padding above slot 0": {"null_block_id": 3},
    "states of 8 bits": {"state": torch.zeros(9, VALUE_HEADS, VALUE_SIZE, KEY_SIZE).to(torch.float8_e4m3fn)},
    "several dtypes": {"B": torch.randn(3, GROUPS, KEY_SIZE).half()},
    "a bias of another dtype": {"dt_bias": torch.randn(VALUE_HEADS, 1).half().expand(-1, VALUE_SIZE)},
    "gaps in a slot": {"state": torch.zeros(9, VALUE_HEADS, VALUE_SIZE, KEY_SIZE + 1)[..., :KEY_SIZE]},
    "states without heads": {"state": torch.zeros(9, VALUE_SIZE, KEY_SIZE)},
}


@pytest.fixture
def said(monkeypatch, caplog):
    """What is logged, as in a new process."""
    monkeypatch.setattr(importlib.import_module("rwkv_jit.compat.falling_back"), "_said", set())
    with caplog.at_level(logging.INFO, "rwkv_jit"):
        yield caplog


@pytest.mark.parametrize("other", OTHER_DECODES)
def test_vllm_does_other_decodes_of_mamba(of_vllm, said, other):
    for _ in range(2):
        done = update_in_vllm(of_vllm, **OTHER_DECODES[other])
        name, arrays, named = done.result
        passed = {**dict(zip(("state", "x", "dt", "A", "B", "C"), arrays, strict=True)), **named}
        assert name == "selective_state_update"
        assert passed.keys() == done.arguments.keys()
        assert all(passed[each] is done.arguments[each] for each in passed)
        assert done.y.isnan().all()
        assert torch.equal(done.states.float(), done.before.float())
    (line,) = said.messages
    assert line.startswith("vLLM's selective_state_update stays as it was: ")


CHUNK = 16


def chunks_of(lengths, before, cuts):
    """Return where chunks begin and end, the sequence and the last chunk of each, and the chunk that ends at its cut.

    A chunk ends at multiples of its size within a sequence, of which some tokens were read before, and at the cut.
    """
    ends, owners, last, cut_chunks = [0], [], [], []
    for row, (length, read, cut) in enumerate(zip(lengths, before, cuts, strict=True)):
        begin, places = ends[-1], {length, *([cut] if cut else [])}
        places |= {at for at in range(1, length) if (read + at - (cut if at > cut else 0)) % CHUNK == 0}
        for at in sorted(places):
            ends.append(begin + at)
            owners.append(row)
            if at == cut:
                cut_chunks.append(len(owners) - 1)
        cut_chunks += [0] * (not cut)
        last.append(len(owners) - 1)
    return [torch.tensor(each, dtype=torch.int32) for each in (ends, owners, last, cut_chunks)]


def prompts_in_vllm(of_vllm, lengths, states, slots, initial, cuts=None, is_known=True, **changed):
    """Call what vLLM's layer calls for prompts, and return the result, y, its chunks and arguments."""
    cuts = cuts or [0] * len(lengths)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    (x, dt, B, C), of_heads = space_inputs(sum(lengths))
    A, D, dt_bias = of_heads
    ends, owners, last, cut_chunks = chunks_of(lengths, [3 if initial is not None else 0] * len(lengths), cuts)
    metadata = SimpleNamespace(last_chunk_indices_p=last, checkpoint_chunk_idx=cut_chunks if any(cuts) else None)
    other = SimpleNamespace(last_chunk_indices_p=last.clone(), checkpoint_chunk_idx=torch.zeros_like(last))
    of_layers = {"attention": SimpleNamespace(), "other": other, "mamba": metadata}
    of_vllm.context.attn_metadata = of_layers if is_known else None
    out = torch.full_like(x, float("nan"))
    named = {
        "chunk_size": CHUNK, "D": D, "z": None, "dt_bias": dt_bias, "seq_idx": owners, "cu_seqlens": bounds,
        "cu_chunk_seqlens": ends, "last_chunk_indices": last, "initial_states": initial,
        "return_intermediate_states": any(cuts), **STEP, "dt_limit": (0.0, math.inf), "out": out,
        "state_dtype": torch.float32, "final_states_out": states, "final_state_indices": slots, **changed,
    }  # fmt: skip
    result = of_vllm.mixer.mamba_chunk_scan_combined_varlen(x, dt, A, B, C, **named)
    return SimpleNamespace(
        result=result, y=out, last=last, cut_chunks=cut_chunks, inputs=(x, dt, B, C), of_heads=of_heads,
        bounds=bounds.tolist(), arguments=named,
    )  # fmt: skip


def check_prompts(done, initial, y, finals, limit=1e-4):
    for row, (begin, end) in enumerate(itertools.pairwise(done.bounds)):
        state = None if initial is None else initial[row]
        want, final = space_alone([each[begin:end] for each in done.inputs], done.of_heads, state)
        close(y[begin:end], want, limit)
        close(finals[row], final, limit)


LENGTHS = [40, 5, 33]


@pytest.mark.parametrize("is_new", [False, True])
def test_prompts_of_mamba_over_the_pool_of_vllm(of_vllm, is_new):
    states, slots = paged_states(), torch.tensor([5, 2, 8], dtype=torch.int32)
    initial = None if is_new else torch.randn(3, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)
    if not is_new:
        initial[1] = 0  # that of a new prompt beside others that go on
    before, kept = states.clone(), None if is_new else initial.clone()
    done = prompts_in_vllm(of_vllm, LENGTHS, states, slots, initial)
    assert done.result is None
    check_prompts(done, kept, done.y, states[slots.long()])
    assert is_new or torch.equal(initial, kept)
    untouched = [0, 1, 3, 4, 6, 7]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("is_new", [False, True])
def test_prompts_of_mamba_whose_states_vllm_wants_back(of_vllm, is_new):
    initial = None if is_new else torch.randn(3, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)
    done = prompts_in_vllm(of_vllm, LENGTHS, None, None, initial, state_dtype=torch.float16)
    assert done.result.dtype == torch.float16
    check_prompts(done, initial, done.y, done.result, 1e-2)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("cuts", [[32, 0, 16], [0, 3, 21]])
def test_states_for_the_prefix_cache_of_vllm(of_vllm, cuts, is_new):
    initial = None if is_new else torch.randn(3, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)
    done = prompts_in_vllm(of_vllm, LENGTHS, None, None, initial, cuts)
    assert len(done.result) == len(done.arguments["seq_idx"])
    check_prompts(done, initial, done.y, done.result[done.last.long()])
    for row, cut in enumerate(cuts):
        if cut:
            begin = done.bounds[row]
            one = [each[begin : begin + cut] for each in done.inputs]
            _, there = space_alone(one, done.of_heads, None if is_new else initial[row])
            close(done.result[done.cut_chunks[row]], there, 1e-4)


@pytest.mark.parametrize("changed", [{}, {"dt_bias": torch.randn(VALUE_HEADS).half()}], ids=["chunks", "dtypes"])
def test_vllm_does_other_prompts_of_mamba(of_vllm, said, changed):
    """The states of all chunks, and dtypes that do not go together."""
    cuts, states = (None, paged_states()) if changed else ([32, 0, 16], None)
    slots, before = torch.tensor([5, 2, 8], dtype=torch.int32), None if states is None else states.clone()
    for _ in range(2):
        done = prompts_in_vllm(of_vllm, LENGTHS, states, slots, None, cuts, is_known=False, **changed)
        name, arrays, named = done.result
        assert name == "mamba_chunk_scan_combined_varlen"
        assert len(arrays) == 5
        assert all(named[each] is done.arguments[each] for each in done.arguments.keys() | named.keys())
        assert done.y.isnan().all()
        assert states is None or torch.equal(states, before)
    (line,) = said.messages
    assert line.startswith("vLLM's mamba_chunk_scan_combined_varlen stays as it was: ")


class VllmMixer:
    """What a layer of vLLM does in a step: decodes come first, and a prompt's first states are gathered before."""

    padding = 0

    def __init__(self, request):
        self.engine, self.states = request.getfixturevalue("of_vllm"), paged_states()

    def __call__(self, inputs, of_heads, decodes, prompts):
        y, count = torch.full_like(inputs[0], float("nan")), len(decodes)
        x, dt, B, C = (each[:count] for each in inputs)
        A, D, dt_bias = channels(*of_heads)
        slots = torch.tensor(decodes, dtype=torch.int32).view(-1, 1)
        if decodes:
            self.engine.decodes.selective_state_update(
                self.states, x, dt.unsqueeze(-1).expand(-1, -1, VALUE_SIZE), A, B, C, D=D, z=None, dt_bias=dt_bias,
                **STEP, state_batch_indices=slots, dst_state_batch_indices=slots, null_block_id=0, out=y[:count],
                num_accepted_tokens=None, cu_seqlens=None, is_blackwell=False, enable_stochastic_rounding=False,
                cache_philox_rounds=0,
            )  # fmt: skip
        if prompts:
            slots = torch.tensor([slot for slot, *_ in prompts], dtype=torch.int32)
            goes_on = torch.tensor([read > 0 for *_, read in prompts])
            initial = torch.where(goes_on.view(-1, 1, 1, 1), self.states[slots], 0) if goes_on.any() else None
            bounds = torch.tensor([0, *itertools.accumulate(length for _, length, _ in prompts)], dtype=torch.int32)
            x, dt, B, C = (each[count:] for each in inputs)
            A, D, dt_bias = of_heads
            self.engine.mixer.mamba_chunk_scan_combined_varlen(
                x, dt, A, B, C, chunk_size=CHUNK, D=D, z=None, dt_bias=dt_bias, seq_idx=bounds[1:], cu_seqlens=bounds,
                cu_chunk_seqlens=bounds, last_chunk_indices=bounds[1:], initial_states=initial, **STEP,
                return_intermediate_states=False, dt_limit=(0.0, math.inf), out=y[count:],
                state_dtype=self.states.dtype, final_states_out=self.states, final_state_indices=slots,
            )  # fmt: skip
        return y


class SglangMixer:
    """What a layer of SGLang does in a step: prompts come first, and their last states are written after."""

    padding = -1

    def __init__(self, request):
        engine = request.getfixturevalue("kernels")
        engine.module.register()
        self.hooks, self.states = {target: hook for target, (hook, _) in engine.told.hooks.items()}, paged_states()
        self.passed = []

    def around(self, name):
        (hook,) = [hook for target, hook in self.hooks.items() if target.endswith(f".{name}")]
        return lambda *arrays, **named: hook(self.theirs, *arrays, **named)

    def theirs(self, *arrays, **named):
        self.passed.append((arrays, named))
        return "theirs"

    def metadata(self, slots, prompts, **tracked):
        mixed = SimpleNamespace(has_initial_states=torch.tensor([read > 0 for *_, read in prompts]))
        named = {"mamba_cache_indices": slots, "mixed_metadata": mixed, "has_mamba_track_mask": bool(tracked)}
        return SimpleNamespace(**named, **tracked)

    def __call__(self, inputs, of_heads, decodes, prompts, **tracked):
        y, count = torch.full_like(inputs[0], float("nan")), sum(length for _, length, _ in prompts)
        slots = torch.tensor([*(slot for slot, *_ in prompts), *decodes], dtype=torch.int32)
        metadata = self.metadata(slots, prompts, **tracked)

        def forward(mixer, *, hidden_states, output, layer_cache, metadata):
            if prompts:
                A, D, dt_bias = of_heads
                x, dt, B, C = (each[:count].unsqueeze(0) for each in inputs)
                bounds = torch.tensor([0, *itertools.accumulate(length for _, length, _ in prompts)])
                found = self.around("mamba_chunk_scan_combined")(
                    x, dt, A, B, C, chunk_size=CHUNK, D=D, z=None, dt_bias=dt_bias, seq_idx=None, chunk_indices=None,
                    chunk_offsets=None, cu_seqlens=bounds.to(torch.int32), initial_states=None, **STEP,
                    return_varlen_states=True, return_final_states=False, return_track_states=True,
                    track_seq_idx=tracked.get("track_ssm_seq_idx"), track_end_locs=tracked.get("track_ssm_end_locs"),
                    dt_limit=(0.0, math.inf), out=y[:count].unsqueeze(0), state_dtype=self.states.dtype,
                )  # fmt: skip
                assert found == (None, None, None)  # the layer and its backend write nothing then
            if decodes:
                x, dt, B, C = (each[count:] for each in inputs)
                A, D, dt_bias = channels(*of_heads)
                self.around("selective_state_update")(
                    self.states, x, dt.unsqueeze(-1).expand(-1, -1, VALUE_SIZE), A, B, C, D=D, z=None, dt_bias=dt_bias,
                    **STEP, state_batch_indices=slots[len(prompts) :], pad_slot_id=-1, out=y[count:],
                    disable_state_update=False, intermediate_states_buffer=None, cache_steps=None,
                    retrieve_parent_token=None, intermediate_state_indices=None, enable_stochastic_rounding=False,
                    cache_philox_rounds=0,
                )  # fmt: skip
            return y

        hook = self.hooks["sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward"]
        cache = SimpleNamespace(temporal=self.states)
        return hook(forward, "mixer", hidden_states=None, output=None, layer_cache=cache, metadata=metadata)


@pytest.mark.parametrize("kind", [VllmMixer, SglangMixer])
def test_decodes_beside_prompts_of_mamba_are_as_each_sequence_alone(kind, request):
    mixer, read = kind(request), {}
    _, of_heads = space_inputs(1)
    idle = mixer.states[[0, 1, 7]].clone()
    padding = mixer.padding
    for decodes, prompts in (
        ([], [(5, 40), (2, 5)]), ([5], [(2, 19), (8, 33)]), ([8, 5], [(3, 1)]), ([padding, 8, 2, padding], []),
        ([5, padding], [(2, 7)]),
    ):  # fmt: skip
        prompts = [(slot, length, len(read[slot][0]) if slot in read else 0) for slot, length in prompts]
        sizes = [(slot, 1) for slot in decodes], [(slot, length) for slot, length, _ in prompts]
        sequences = sizes[0] + sizes[1] if kind is VllmMixer else sizes[1] + sizes[0]
        inputs, _ = space_inputs(sum(length for _, length in sequences))
        y, begin = mixer(inputs, of_heads, decodes, prompts), 0
        for slot, length in sequences:
            one = [each[begin : begin + length] for each in inputs]
            if slot == padding:
                assert not y[begin].any()
            else:
                before = read.get(slot, [each[:0] for each in one])
                read[slot] = [torch.cat(pair) for pair in zip(before, one, strict=True)]
                want, final = space_alone(read[slot], of_heads, None)
                close(y[begin : begin + length], want[len(want) - length :], 1e-4)
                close(mixer.states[slot], final, 1e-4)
            begin += length
    assert torch.equal(mixer.states[[0, 1, 7]], idle)
    assert kind is VllmMixer or not mixer.passed


def test_states_for_the_prefix_cache_of_sglang(request):
    """Those after all tokens, after chunks of a sequence that begins with one, and of one that does not."""
    mixer, lengths, read = SglangMixer(request), [32, 40, 25, 20], [0, 16, 0, 5]
    slots, inputs, of_heads = [5, 2, 8, 3], *space_inputs(sum(lengths))
    tracked = {
        "track_ssm_final_src": torch.tensor([5]), "track_ssm_final_dst": torch.tensor([1]),
        "track_ssm_h_src": torch.tensor([4]), "track_ssm_h_dst": torch.tensor([4]),
        "track_ssm_seq_idx": torch.tensor([2]), "track_ssm_end_locs": torch.tensor([32 + 40 + 16]),
        "track_ssm_recompute_dst": torch.tensor([7]),
    }  # fmt: skip
    before = mixer.states.clone()
    y = mixer(inputs, of_heads, [], list(zip(slots, lengths, read, strict=True)), **tracked)
    begin, kept = 0, {0: (32, 1), 1: (32, 4), 2: (16, 7)}
    for row, length in enumerate(lengths):
        state = before[slots[row]] if read[row] else None
        one = [each[begin : begin + length] for each in inputs]
        want, final = space_alone(one, of_heads, state)
        close(y[begin : begin + length], want, 1e-4)
        close(mixer.states[slots[row]], final, 1e-4)
        if row in kept:
            tokens, slot = kept[row]
            close(mixer.states[slot], space_alone([each[:tokens] for each in one], of_heads, state)[1], 1e-4)
        begin += length
    assert torch.equal(mixer.states[[0, 6]], before[[0, 6]])

    nothing = {name: x[:0] for name, x in tracked.items() if name not in ("track_ssm_final_src", "track_ssm_final_dst")}
    nothing |= {name: None for name in ("track_ssm_seq_idx", "track_ssm_end_locs", "track_ssm_recompute_dst")}
    finals = {name: tracked[name] for name in ("track_ssm_final_src", "track_ssm_final_dst")}
    mixer(inputs, of_heads, [], list(zip(slots, lengths, read, strict=True)), **nothing, **finals)
    assert torch.equal(mixer.states[1], mixer.states[5])
    at_end = {"track_ssm_h_src": torch.tensor([2]), "track_ssm_h_dst": torch.tensor([6])}  # of the first sequence
    finals = {name: x[:0] for name, x in finals.items()}
    mixer(inputs, of_heads, [], list(zip(slots, lengths, read, strict=True)), **{**nothing, **at_end}, **finals)
    close(mixer.states[6], mixer.states[5].double(), 1e-4)


def test_places_of_the_prefix_cache_are_computed_once_in_a_step_of_sglang(kernels, request, monkeypatch):
    mixer, steps = SglangMixer(request), []
    monkeypatch.setattr(kernels.module, "_kept", lambda metadata, *_: steps.append(metadata))
    inputs, of_heads = space_inputs(4)
    seen = []
    monkeypatch.setattr(mixer, "metadata", lambda *_, **__: seen[-1])
    for _ in range(2):
        seen.append(SglangMixer.metadata(mixer, torch.tensor([1], dtype=torch.int32), [(1, 4, 0)]))
        for _ in range(3):
            mixer(inputs, of_heads, [], [(1, 4, 0)])
    assert [x is y for x, y in zip(steps, seen, strict=True)] == [True, True]


def decode_arguments(states):
    (x, dt, B, C), of_heads = space_inputs(2)
    A, D, dt_bias = channels(*of_heads)
    arrays = states, x, dt.unsqueeze(-1).expand(-1, -1, VALUE_SIZE), A, B, C
    named = {"D": D, "dt_bias": dt_bias, "state_batch_indices": torch.tensor([1, 2], dtype=torch.int32)}
    return arrays, {**named, **STEP, "out": torch.full_like(x, float("nan"))}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"disable_state_update": True}, "tokens that are verified"),
        ({"intermediate_states_buffer": torch.zeros(1)}, "tokens that are verified"),
        ({"retrieve_parent_token": torch.zeros(2, 1)}, "tokens that are verified"),
        ({"dt_bias": torch.randn(VALUE_HEADS, VALUE_SIZE)}, "steps or rates of each channel"),
        ({"x": torch.randn(2, 3, VALUE_HEADS, VALUE_SIZE)}, "several tokens of a row"),
    ],
)
def test_sglang_does_other_decodes_of_mamba(request, said, changed, line):
    mixer = SglangMixer(request)
    before = mixer.states.clone()
    arrays, named = decode_arguments(mixer.states)
    arrays = (arrays[0], changed.pop("x", arrays[1]), *arrays[2:])
    for _ in range(2):
        assert mixer.around("selective_state_update")(*arrays, **{**named, **changed}) == "theirs"
    for passed, more in mixer.passed:
        assert all(x is y for x, y in zip(passed, arrays, strict=True))
        assert all(more[name] is x for name, x in {**named, **changed}.items())
    assert torch.equal(mixer.states, before)
    (logged,) = said.messages
    assert logged.startswith(f"SGLang's selective_state_update stays as it was: {line}")


def test_sglang_does_prompts_of_others_than_mamba(request, said):
    """Of what is no layer of Mamba-2, and where other states are wanted."""
    mixer, run = SglangMixer(request), SglangMixer.around
    (x, dt, B, C), (A, _, _) = space_inputs(4)
    arrays = [x[None], dt[None], A, B[None], C[None], CHUNK]
    named = {"cu_seqlens": torch.tensor([0, 4]), "return_varlen_states": True, "return_track_states": True}
    assert run(mixer, "mamba_chunk_scan_combined")(*arrays, **named) == "theirs"
    named["return_track_states"] = False

    def forward(_, **__):
        return run(mixer, "mamba_chunk_scan_combined")(*arrays, **named)

    hook = mixer.hooks["sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward"]
    cache, metadata = SimpleNamespace(temporal=mixer.states), mixer.metadata(torch.tensor([1]), [(1, 4, 0)])
    assert hook(forward, "mixer", layer_cache=cache, metadata=metadata) == "theirs"
    named["return_track_states"] = True
    assert run(mixer, "mamba_chunk_scan_combined")(*arrays, **named) == "theirs"  # the layer has ended
    (line,) = said.messages
    assert line.startswith("SGLang's mamba_chunk_scan_combined stays as it was: ")


def test_slot_0_of_sglang_has_a_state_and_may_be_rounded_at_random(request):
    mixer = SglangMixer(request)
    mixer.states, found = paged_states(dtype=torch.float16), []
    before = mixer.states.clone()
    arrays, named = decode_arguments(mixer.states)
    named["state_batch_indices"] = torch.tensor([0, -1], dtype=torch.int32)
    for is_random in (False, False, True):
        mixer.states.copy_(before)
        mixer.around("selective_state_update")(*arrays, **named, enable_stochastic_rounding=is_random)
        found.append(mixer.states.clone())
        assert named["out"][0].any()
        assert not named["out"][1].any()
        assert torch.equal(found[-1][1:], before[1:])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], before)
    assert not torch.equal(found[0], found[2])


def test_phases_of_sglang_are_chosen_one_by_one(kernels):
    options = kernels.told.options
    options.linear_attn_backend, options.linear_attn_decode_backend = "triton", "rwkv_jit"
    assert [kernels.module._is_chosen(phase) for phase in ("decode", "prefill")] == [True, False]
    options.linear_attn_decode_backend, options.linear_attn_prefill_backend = None, "rwkv_jit"
    assert [kernels.module._is_chosen(phase) for phase in ("decode", "prefill")] == [False, True]


@pytest.mark.parametrize(("decode", "prefill", "every"), [(None, None, "triton"), ("triton", "triton", "rwkv_jit")])
def test_sglang_keeps_mamba_where_others_are_chosen(kernels, request, said, decode, prefill, every):
    mixer, options = SglangMixer(request), kernels.told.options
    options.linear_attn_backend, options.linear_attn_decode_backend = every, decode
    options.linear_attn_prefill_backend = prefill
    arrays, named = decode_arguments(mixer.states)
    assert mixer.around("selective_state_update")(*arrays, **named) == "theirs"
    assert mixer.around("mamba_chunk_scan_combined")(1, x=2) == "theirs"
    assert mixer.passed[1] == ((1,), {"x": 2})
    assert not said.messages


# ---- how engines take the kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["triton", "rwkv_jit"])
@pytest.mark.parametrize("decode", ["triton", "rwkv_jit"])
def test_sglang_takes_the_kernels_by_name(kernels, decode, prefill):
    for _ in range(2):  # as in each of its processes, and again
        kernels.module.register()
    assert kernels.told.choices == ["triton", "rwkv_jit"]
    assert {kind for _, kind in kernels.told.hooks.values()} == {"around"}
    assert {*kernels.told.hooks} == {
        "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher.__init__",
        "sglang.srt.layers.attention.linear.kda_backend.KDAKernelDispatcher.__init__",
        f"{FUNCTIONS}.mamba_ssm.selective_state_update",
        f"{FUNCTIONS}.ssd_combined.mamba_chunk_scan_combined",
        "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward",
    }
    begins = {target.split(".")[-2]: hook for target, (hook, _) in kernels.told.hooks.items()}
    for name, kind in (("GDNKernelDispatcher", "GatedDeltaRuleKernel"), ("KDAKernelDispatcher", "KimiKernel")):
        dispatcher, seen = SimpleNamespace(), []

        def original(self, *backends, seen=seen):
            seen += backends
            self.decode_kernel = self.extend_kernel = "theirs"
            self.supports_packed_decode = False

        begins[name](original, dispatcher, Backend(decode), Backend(prefill), Backend("triton"))
        assert seen == ["triton"] * 3
        kind = getattr(kernels.module, kind)
        assert isinstance(dispatcher.decode_kernel, kind) == (decode == "rwkv_jit") == dispatcher.supports_packed_decode
        assert isinstance(dispatcher.extend_kernel, kind) == (prefill == "rwkv_jit")
        if prefill == "rwkv_jit":
            assert dispatcher.extend_kernel._own == "theirs"


# ---- what the engines ask for ------------------------------------------------------------------------------------

# Where the engines declare what ours answers: our method, theirs, and the names that theirs takes.
RECORDED = {
    "vllm": {
        "model.Rwkv7MetadataBuilder.build": (
            "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder.build",
            "self common_prefix_len common_attn_metadata fast_build num_accepted_tokens num_decode_draft_tokens_cpu",
        ),
        "model.Rwkv7Backend.get_name": ("vllm.v1.attention.backend:AttentionBackend.get_name", ""),
        "model.Rwkv7Backend.get_builder_cls": ("vllm.v1.attention.backend:AttentionBackend.get_builder_cls", ""),
        "model.Rwkv7Backend.is_ssm": ("vllm.v1.attention.backend:AttentionBackend.is_ssm", "cls"),
        "model.Rwkv7States.get_state_shape": (
            "vllm.model_executor.layers.mamba.abstract:MambaBase.get_state_shape", "self",
        ),
        "model.Rwkv7States.get_state_dtype": (
            "vllm.model_executor.layers.mamba.abstract:MambaBase.get_state_dtype", "self",
        ),
        "model.Rwkv7ForCausalLM.embed_input_ids": (
            "vllm.model_executor.models.interfaces_base:VllmModel.embed_input_ids", "self input_ids",
        ),
        "model.Rwkv7ForCausalLM.forward": (
            "vllm.model_executor.models.interfaces_base:VllmModel.forward", "self input_ids positions",
        ),
        "model.Rwkv7ForCausalLM.compute_logits": (
            "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration.compute_logits",
            "self hidden_states",
        ),
        "model.Rwkv7ForCausalLM.get_mamba_state_shape_from_config": (
            "vllm.model_executor.models.interfaces:IsHybrid.get_mamba_state_shape_from_config", "cls vllm_config",
        ),
        "model.Rwkv7ForCausalLM.get_mamba_state_copy_func": (
            "vllm.model_executor.models.interfaces:SupportsMambaPrefixCaching.get_mamba_state_copy_func", "cls",
        ),
    },
    "sglang": {
        "backend.Rwkv7Backend.__init__": (
            "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase.__init__",
            "self model_runner",
        ),
        "backend.Rwkv7Backend.init_forward_metadata": (
            "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase.init_forward_metadata",
            "self forward_batch",
        ),
        "backend.Rwkv7Backend.init_forward_metadata_out_graph": (
            "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase"
            ".init_forward_metadata_out_graph",
            "self forward_batch in_capture",
        ),
        "model.RwkvJitRwkv7ForCausalLM.forward": (
            "sglang.srt.models.lfm2:Lfm2ForCausalLM.forward",
            "self input_ids positions forward_batch input_embeds",
        ),
        **{
            f"kernels.{kind}.{method}": (
                f"sglang.srt.layers.attention.linear.kernels.kernel_backend:LinearAttnKernelBase.{method}",
                f"self q k v {names} ssm_states cache_indices query_start_loc",
            )
            for kind, method, names in (
                ("_Kernel", "decode", "a b A_log dt_bias"), ("GatedDeltaRuleKernel", "extend", "g beta"),
                ("KimiKernel", "extend", "g beta"),
            )
        },
        "model.RwkvJitRwkv7ForCausalLM.__init__": (
            "sglang.srt.models.lfm2:Lfm2ForCausalLM.__init__", "self config quant_config prefix",
        ),
    },
}  # fmt: skip
# What the plugins read of the engines' objects, or pass to their functions.
USED = {
    "vllm": {
        "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata": (
            "state_indices_tensor_d state_indices_tensor_p has_initial_states_p"
        ),
        "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc max_query_len",
        "vllm.v1.attention.backends.registry:register_backend": "backend class_path is_mamba",
        "vllm.model_executor.models.registry:_ModelRegistry.register_model": "self model_arch model_cls",
        "vllm.third_party.flash_linear_attention.ops.chunk:chunk_gated_delta_rule": (
            "q k v g beta scale initial_state output_final_state cu_seqlens chunk_indices chunk_offsets "
            "use_qk_l2norm_in_kernel core_attn_out"
        ),
        "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update": (
            "A_log a b dt_bias q k v beta threshold scale initial_state inplace_final_state cu_seqlens "
            "ssm_state_indices num_accepted_tokens use_qk_l2norm_in_kernel is_kda"
        ),
        "vllm.third_party.flash_linear_attention.ops.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode": (
            "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices use_qk_l2norm_in_kernel"
        ),
        "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent:fused_recurrent_kda_packed_decode": (
            "mixed_qkv raw_g raw_beta A_log dt_bias lower_bound initial_state state_indices scale out"
        ),
        "vllm.model_executor.layers.mamba.ops.mamba_ssm:selective_state_update": (
            "state x dt A B C D dt_bias z dt_softplus state_batch_indices dst_state_batch_indices null_block_id out "
            "num_accepted_tokens cu_seqlens is_blackwell enable_stochastic_rounding cache_philox_rounds"
        ),
        "vllm.model_executor.layers.mamba.ops.ssd_combined:mamba_chunk_scan_combined_varlen": (
            "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices seq_idx out D z dt_bias "
            "initial_states dt_softplus dt_limit return_intermediate_states state_dtype final_states_out "
            "final_state_indices"
        ),
        "vllm.forward_context:get_forward_context": "",
        "vllm.forward_context:ForwardContext": "attn_metadata",
        "vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadata": "last_chunk_indices_p checkpoint_chunk_idx",
    },
    "sglang": {
        "sglang.srt.layers.attention.mamba.mamba2_metadata:ForwardMetadata": "query_start_loc mamba_cache_indices",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
            "extend_prefix_lens extend_seq_lens_cpu input_ids forward_mode"
        ),
        "sglang.srt.configs.linear_attn_model_registry:LinearAttnModelSpec": (
            "config_class backend_class_name arch_names"
        ),
        "sglang.srt.configs.mamba_utils:Mamba2StateShape": (
            "conv temporal intermediate_size conv_dim ssm_state_size num_heads head_dim state_size conv_kernel"
        ),
        "sglang.srt.configs.mamba_utils:Mamba2CacheParams": "dtype layers shape",
        "sglang.srt.plugins.hook_registry:HookRegistry.register": "target hook hook_type source",
        "sglang.srt.layers.attention.linear.gdn_backend:GDNKernelDispatcher": (
            "decode_backend prefill_backend verify_backend"
        ),
        "sglang.srt.layers.attention.linear.kda_backend:KDAKernelDispatcher": (
            "decode_backend prefill_backend verify_backend"
        ),
        "sglang.kernels.ops.mamba.triton_ops.mamba_ssm:selective_state_update": (
            "state x dt A B C D z dt_bias dt_softplus state_batch_indices pad_slot_id out disable_state_update "
            "intermediate_states_buffer cache_steps retrieve_parent_token intermediate_state_indices "
            "enable_stochastic_rounding cache_philox_rounds"
        ),
        "sglang.kernels.ops.mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined": (
            "x dt A B C chunk_size D z dt_bias initial_states seq_idx chunk_indices chunk_offsets cu_seqlens "
            "dt_softplus dt_limit out return_final_states return_varlen_states return_intermediate_states state_dtype "
            "return_track_states track_seq_idx track_end_locs"
        ),
        "sglang.srt.layers.attention.mamba.mamba:MambaMixer2.forward": (
            "self hidden_states output layer_cache metadata mup_vector use_triton_causal_conv"
        ),
        "sglang.srt.layers.attention.mamba.mamba2_metadata:Mamba2Metadata": (
            "mamba_cache_indices mixed_metadata has_mamba_track_mask track_ssm_h_src track_ssm_h_dst "
            "track_ssm_final_src track_ssm_final_dst track_ssm_seq_idx track_ssm_end_locs track_ssm_recompute_dst"
        ),
        "sglang.srt.layers.attention.mamba.mamba2_metadata:Mamba2Metadata.MixedMetadata": "has_initial_states",
        "sglang.srt.runtime_context:get_exec": "",
    },
}
# Our functions of Mamba-2, by who returns them, and those of the engines whose arguments they take.
OF_STATE_SPACE = {
    ("vllm", "state_space_decodes"): "vllm.model_executor.layers.mamba.ops.mamba_ssm:selective_state_update",
    ("vllm", "state_space_prompts"): (
        "vllm.model_executor.layers.mamba.ops.ssd_combined:mamba_chunk_scan_combined_varlen"
    ),
    ("sglang", "_decodes"): "sglang.kernels.ops.mamba.triton_ops.mamba_ssm:selective_state_update",
    ("sglang", "_prompts"): "sglang.kernels.ops.mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined",
}
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in RECORDED for name in RECORDED[engine]])
def test_methods_take_what_was_recorded(root, engine, name):
    module, kind, method = name.split(".")
    tree = ast.parse((root / "examples/engines" / engine / PACKAGES[engine] / f"{module}.py").read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    (own,) = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == method]
    names = [each.arg for each in (*own.posonlyargs, *own.args)]
    asked = RECORDED[engine][name][1].split()
    assert names[: len(asked)] == asked[: len(names)]
    assert len(asked) <= len(names) or own.kwarg is not None


@pytest.mark.parametrize(("engine", "name"), OF_STATE_SPACE)
def test_functions_of_mamba_take_what_was_recorded(root, engine, name):
    tree = ast.parse((root / "examples/engines" / engine / PACKAGES[engine] / "kernels.py").read_text())
    (outer,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    (ours,) = [node.args for node in outer.body if isinstance(node, ast.FunctionDef) and node.name == "ours"]
    assert [each.arg for each in ours.args] == USED[engine][OF_STATE_SPACE[engine, name]].split()


def installed(engine):
    """Return what imports a name of an engine, as MODULE:NAME; without the engine the test is skipped."""
    try:
        version = importlib.metadata.version(engine)
        importlib.import_module("transformers.configuration_utils")
    except (importlib.metadata.PackageNotFoundError, ImportError):
        pytest.skip(f"{engine} is not installed: only the record of {VERSIONS[engine]} is compared")

    def named(path):
        module, _, names = path.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found

    print(f"{engine} {version}; the record is of {VERSIONS[engine]}")
    return named


@pytest.mark.parametrize("engine", RECORDED)
def test_the_record_is_what_the_engine_has(engine):
    named = installed(engine)
    for name, (theirs, recorded) in RECORDED[engine].items():
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        own = inspect.getattr_static(named(theirs.rpartition(".")[0]), theirs.rpartition(".")[2])
        parameters = inspect.signature(getattr(own, "__func__", own)).parameters.values()
        assert [each.name for each in parameters if each.kind not in several] == recorded.split(), name
    for theirs, recorded in USED[engine].items():
        found = named(theirs)
        if dataclasses.is_dataclass(found):
            assert set(recorded.split()) <= {each.name for each in dataclasses.fields(found)}, theirs
        else:
            assert recorded.split() == list(inspect.signature(found).parameters), theirs


def test_vllm_knows_the_model_after_registration(tmp_path, weights):
    named = installed("vllm")
    slots = importlib.import_module("rwkv7_slots")
    for _ in range(2):  # as in each of its processes, and again
        importlib.import_module("rwkv_jit_vllm").register()
    slots.write_folder(weights, tmp_path)
    config = named("transformers:AutoConfig").from_pretrained(tmp_path)
    assert slots.sizes_in(config) == slots.sizes_of(weights)
    registered = named("vllm:ModelRegistry").models[slots.ARCHITECTURE].load_model_cls()
    of_model = importlib.import_module("rwkv_jit_vllm.model")
    assert registered is of_model.Rwkv7ForCausalLM
    for protocol in ("is_attention_free", "has_inner_state", "is_text_generation_model"):
        module = "interfaces_base" if protocol.startswith("is_text") else "interfaces"
        assert named(f"vllm.model_executor.models.{module}:{protocol}")(registered)
    backends = named("vllm.v1.attention.backends.registry:MambaAttentionBackendEnum")
    assert backends["RWKV_JIT_RWKV7"].get_class() is of_model.Rwkv7Backend
    assert not inspect.isabstract(of_model.Rwkv7States)
    assert not inspect.isabstract(of_model.Rwkv7MetadataBuilder)


def test_sglang_knows_the_model_after_registration(tmp_path, weights):
    named = installed("sglang")
    slots = importlib.import_module("rwkv7_slots")
    for _ in range(2):
        importlib.import_module("rwkv_jit_sglang").register()
    slots.write_folder(weights, tmp_path)
    config = named("transformers:AutoConfig").from_pretrained(tmp_path)
    assert slots.sizes_in(config) == slots.sizes_of(weights)
    model_class, _ = named("sglang.srt.models.registry:ModelRegistry").resolve_model_cls([slots.ARCHITECTURE])
    assert model_class.__module__ == "rwkv_jit_sglang.model"
    spec, found = named("sglang.srt.configs.linear_attn_model_registry:get_linear_attn_config")(config)
    assert found is config
    backend = named("sglang.srt.configs.linear_attn_model_registry:import_backend_class")(spec.backend_class_name)
    assert issubclass(backend, named("sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase"))
    shape = config.mamba2_cache_params.shape
    assert (shape.conv, shape.temporal) == ([(WIDTH, 1)] * 2, (HEADS, HEAD_SIZE, HEAD_SIZE))
    assert config.mamba2_cache_params.dtype.conv == torch.float32


# ---- how they are found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "group"), [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")])
def test_entry_points_resolve(root, engine, group):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML; the engines need 3.11")
    said = tomllib.loads((root / "examples/engines" / engine / "pyproject.toml").read_text())
    assert said["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [PACKAGES[engine]]
    points = said["project"]["entry-points"][group]
    assert [*points] == (["rwkv_jit", "rwkv_jit_kernels"] if engine == "vllm" else ["rwkv_jit"])
    registers = [importlib.metadata.EntryPoint(name, path, group).load() for name, path in points.items()]
    assert not any(inspect.signature(register).parameters for register in registers)
    source = inspect.getsource(registers[0])
    for path in [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]:
        if isinstance(path, str) and path.startswith(f"{PACKAGES[engine]}."):  # what the engine imports later
            module, _, kind = path.replace(":", ".").rpartition(".")
            file = root / "examples/engines" / engine / f"{module.replace('.', '/')}.py"
            assert kind in [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def test_what_is_tested_here_imports_no_engine(root):
    imported = ", ".join(f"{package}.batch" for package in PACKAGES.values())
    program = f"import sys, {imported}; sys.exit(len({{'vllm', 'sglang', 'transformers'}} & set(sys.modules)))"
    paths = [str(root), *(str(root / "examples/engines" / name) for name in ("rwkv7", *PACKAGES))]
    code = f"import sys; sys.path[:0] = {paths!r}; {program}"
    assert subprocess.run([*warm.python("torch"), "-c", code]).returncode == 0
