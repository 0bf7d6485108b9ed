"""`python -m bench training`, `curves` and `warm-fla`: on the CPU, with stand-ins for FLA and for Triton's tuners."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench import curves, rwkv7_models, training, warm_fla
from bench.__main__ import main
from bench.rwkv7_models import Sizes
from rwkv_jit.desk.bench import timing
from rwkv_jit.plain import reference

SIZES = Sizes(2, 64, 2, 16, 256)
SMALL = ("--layers", "1", "--tokens", "16")
# Of a layer behind the first one, by the official names: what FLA calls it.
ATTENTION = {
    "x_r": "x_r", "x_g": "x_g", "w0": "w_lora.lora.2.bias", "w1": "w_lora.lora.0.weight", "w2": "w_lora.lora.2.weight",
    "a0": "a_lora.lora.2.bias", "v1": "v_lora.lora.0.weight", "g1": "g_lora.lora.0.weight",
    "g2": "g_lora.lora.2.weight", "k_k": "k_k", "k_a": "k_a", "r_k": "r_k", "receptance.weight": "r_proj.weight",
    "key.weight": "k_proj.weight", "value.weight": "v_proj.weight", "output.weight": "o_proj.weight",
    "ln_x.weight": "g_norm.weight", "ln_x.bias": "g_norm.bias",
}  # fmt: skip
ELSEWHERE = {
    "emb.weight": "model.embeddings.weight", "ln_out.bias": "model.norm.bias", "head.weight": "lm_head.weight",
    "blocks.0.ln0.weight": "model.layers.0.pre_norm.weight", "blocks.1.ln1.bias": "model.layers.1.attn_norm.bias",
    "blocks.1.ln2.weight": "model.layers.1.ffn_norm.weight", "blocks.1.ffn.x_k": "model.layers.1.ffn.x_k",
    "blocks.1.ffn.key.weight": "model.layers.1.ffn.key.weight",
    "blocks.1.ffn.value.weight": "model.layers.1.ffn.value.weight",
}  # fmt: skip


@pytest.fixture
def model():
    return rwkv7_models.our_model(SIZES, "cpu", torch.float32)


@pytest.fixture
def program(capsys):
    def program(*arguments):
        code = main(arguments)
        printed, said = capsys.readouterr()
        return code, printed, said

    return program


# ---- FLA's parameters --------------------------------------------------------------------------------------------


def test_parameters_have_the_names_that_fla_gives_them(model):
    for ours, theirs in ATTENTION.items():
        assert rwkv7_models.name_in_fla(f"blocks.1.att.{ours}") == f"model.layers.1.attn.{theirs}"
    for ours, theirs in ELSEWHERE.items():
        assert rwkv7_models.name_in_fla(ours) == theirs
    names = [rwkv7_models.name_in_fla(name) for name in model.state_dict()]
    assert len(set(names)) == len(names)


def test_low_rank_matrices_are_transposed_and_vectors_are_flat(model):
    state = model.state_dict()
    theirs = rwkv7_models.state_in_fla(state)
    assert len(theirs) == len(state)
    begin, there = "blocks.1.att.", "model.layers.1.attn."
    for place, expected in (("w0", state[f"{begin}w0"].flatten()), ("w1", state[f"{begin}w1"].T),
                            ("g2", state[f"{begin}g2"].T), ("v0", state[f"{begin}v0"].flatten()),
                            ("k_a", state[f"{begin}k_a"].flatten()), ("x_r", state[f"{begin}x_r"]),
                            ("receptance.weight", state[f"{begin}receptance.weight"])):  # fmt: skip
        found = theirs[there + ATTENTION.get(place, "v_lora.lora.2.bias")]
        assert torch.equal(found, expected), place
        assert found.is_contiguous()
    assert theirs["model.layers.1.ffn.x_k"].shape == (64,)
    theirs["lm_head.weight"].zero_()
    assert state["head.weight"].any()  # they are copies


class Named(nn.Module):
    """A module that has parameters with given names and shapes alone."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))


@pytest.fixture
def fla(model, monkeypatch):
    """A stand-in for FLA, whose model has the parameters of `shapes`; it keeps what it was configured by."""
    stand_in = SimpleNamespace(
        shapes={name: x.shape for name, x in rwkv7_models.state_in_fla(model.state_dict()).items()}
    )
    stand_in.RWKV7Config = lambda **given: setattr(stand_in, "given", given)
    stand_in.RWKV7ForCausalLM = lambda config: Named(stand_in.shapes)
    monkeypatch.setattr(rwkv7_models, "import_module", lambda name: stand_in)
    return stand_in


def test_model_of_fla_begins_with_our_parameters(model, fla):
    theirs = rwkv7_models.fla_model(model, use_l2warp=False)
    for name, x in rwkv7_models.state_in_fla(model.state_dict()).items():
        assert torch.equal(theirs.get_parameter(name), x)
    assert all(x.requires_grad for x in theirs.parameters())
    assert fla.given == {
        "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 256, "intermediate_size": 256,
        "decay_low_rank_dim": 32, "gate_low_rank_dim": 32, "a_low_rank_dim": 32, "v_low_rank_dim": 32,
        "use_cache": False, "use_l2warp": False,
    }  # fmt: skip


def test_parameters_that_do_not_fit_are_an_error(model, fla):
    shapes = fla.shapes
    for changed in (shapes | {"more": (1,)}, dict(list(shapes.items())[1:]), shapes | {"lm_head.weight": (1, 64)}):
        fla.shapes = changed
        with pytest.raises(RuntimeError, match="more|embeddings|lm_head"):
            rwkv7_models.fla_model(model)


def test_groups_of_fla_have_the_same_parameters(model, fla):
    theirs = rwkv7_models.fla_model(model)
    names = {id(x): name for name, x in theirs.named_parameters()}
    own = {id(x): rwkv7_models.name_in_fla(name) for name, x in model.named_parameters()}
    groups = rwkv7_models.groups_in_fla(model, theirs, lr=2.0, weight_decay=3.0)
    for ours, each in zip(model.param_groups(lr=2.0, weight_decay=3.0), groups, strict=True):
        assert (each["lr"], each["weight_decay"]) == (ours["lr"], ours["weight_decay"])
        assert [names[id(x)] for x in each["params"]] == [own[id(x)] for x in ours["params"]]


def test_our_wkv7_takes_the_place_of_flas(monkeypatch):
    layer = SimpleNamespace(chunk_rwkv7="theirs")
    monkeypatch.setattr(rwkv7_models, "import_module", lambda name: layer)
    inputs = [torch.randn(1, 4, 1, 64) for _ in range(6)]
    inputs[1] = -torch.rand(1, 4, 1, 64)
    with rwkv7_models.with_our_wkv7():
        y, state = layer.chunk_rwkv7(**dict(zip("rwkvab", inputs, strict=True)), scale=1.0, output_final_state=False)
    assert layer.chunk_rwkv7 == "theirs"
    assert state is None
    torch.testing.assert_close(y, reference.wkv7_ref(*inputs, decay="log")[0])


# ---- tuners ------------------------------------------------------------------------------------------------------


def test_tuners_time_briefly_what_has_no_times_of_its_own(monkeypatch):
    calls = []
    testing = SimpleNamespace(do_bench=lambda call, *arguments, **options: calls.append((arguments, options)))
    monkeypatch.setattr(rwkv7_models, "import_module", lambda name: testing)
    rwkv7_models.tune_briefly.__wrapped__()
    testing.do_bench(print, quantiles=(0.5,))
    testing.do_bench(print, rep=7)
    testing.do_bench(print, 3, 4)
    brief = rwkv7_models._MILLISECONDS
    assert calls == [((), brief | {"quantiles": (0.5,)}), ((), brief | {"rep": 7}), ((3, 4), {})]


class Choice(tuple):
    """One of a tuner's, by its size."""

    def all_kwargs(self):
        return {"size": self[0]}


def tuned(place, count, choices, failing=()):
    """Return what one process compiles and tries, and the times that its tuner sees."""
    compiled, tried = [], []

    class Tuner:
        fn = SimpleNamespace(run=lambda *given, size, warmup, **more: compiled.append(size))

        def prune_configs(self, more):
            return choices

        def _bench(self, *given, config, **more):
            tried.append(config[0])
            return [float("inf")] * 3 if config[0] in failing else [1.0] * 3

    @contextmanager
    def together(pool, ignore_errors):
        yield

    warm_fla.share_out(Tuner, together, place, count, 1)
    tuner = Tuner()
    return compiled, tried, [tuner._bench(0, config=choice, meta=1)[0] for choice in choices]


def test_processes_share_the_choices_of_a_tuner():
    choices = [Choice((n,)) for n in range(10)]
    shares = [tuned(place, 4, choices) for place in range(4)]
    assert sorted(n for compiled, _, _ in shares for n in compiled) == list(range(10))
    for compiled, tried, times in shares:
        assert tried == compiled
        assert [n for n, time in enumerate(times) if time == 1.0] == compiled
    assert tuned(6, 8, choices[:4])[0] == [2]  # of fewer choices than processes


def test_a_process_whose_share_cannot_run_takes_another_choice():
    choices = [Choice((n,)) for n in range(4)]
    compiled, tried, times = tuned(1, 4, choices, failing=(0, 1))
    assert (compiled, tried) == ([1], [1, 0, 2])
    assert times == [float("inf"), float("inf"), 1.0, float("inf")]


def test_warming_needs_a_gpu(program):
    code, _, said = program("warm-fla")
    assert (code, said) == (2, "python -m bench: warm-fla: needs a GPU, and torch sees none\n")


# ---- training ----------------------------------------------------------------------------------------------------


def test_steps_and_the_layer_are_measured(program, monkeypatch):
    monkeypatch.setattr(timing, "cpu_ms", lambda call: [call() and 1.0, 2.0, 3.0])
    code, printed, said = program("training", "--json", *SMALL, "--runs", "3", "--who", "rwkv_jit")
    assert code == 0
    steps, layer = json.loads(printed)["rows"]
    assert [json.loads(line) for line in said.splitlines() if line.startswith("{")] == [steps, layer]
    assert (steps["by"], steps["passes"], steps["runs"], steps["skipped"]) == ("rwkv_jit", 1, 3, None)
    assert steps["tokens_per_s"] == pytest.approx(2 * 16 / steps["median_ms"] * 1e3)
    assert 0 < steps["loss"] < 6
    assert (layer["by"], layer["median_ms"], layer["width"], layer["skipped"]) == ("rwkv_jit", 2.0, 64, None)
    code, printed, _ = program("training", *SMALL, "--runs", "2", "--part", "steps", "--who", "rwkv_jit")
    assert code == 0
    assert "steps: 1 layers, vocabulary 256, width 64, (2, 16) tokens" in printed
    assert "skipped" not in printed
    assert "layer: width" not in printed


def test_layers_are_compiled_one_by_one_without_a_limit(model, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    with torch._dynamo.config.patch(recompile_limit=1):  # which undoes what monkeypatch could not
        training.compile_each(list(model.blocks))
        assert torch._dynamo.config.recompile_limit == 4
    assert compiled == list(model.blocks)


def test_one_that_fails_hides_no_other(monkeypatch):
    for name in {"fla", *(name for name in sys.modules if name.startswith("fla."))}:
        monkeypatch.setitem(sys.modules, name, None)

    def fail():
        raise RuntimeError("no kernel\nat all")

    row = training.step_row("fla", fail, SIZES, "cpu", 2)
    assert (row["skipped"], row["median_ms"]) == ("RuntimeError: no kernel", None)
    row = training.layer_row("fla", SIZES, 64, "cpu")
    assert row["skipped"].startswith("ModuleNotFoundError")


def quadratic(most):
    """Return a loss that has memory for so many rows, its parameter, and the batches that it was called with."""
    weight, called = nn.Parameter(torch.tensor([2.0])), []

    def loss(tokens, targets):
        if len(tokens) > most:
            raise torch.OutOfMemoryError("too large")
        called.append(len(tokens))
        return ((weight * tokens - targets) ** 2).mean()

    return loss, weight, called


def test_a_batch_without_room_is_read_in_parts_with_the_same_gradient():
    sizes = Sizes(1, 64, 4, 8, 50)
    made = []
    for most in (4, 1):
        torch.manual_seed(0)
        loss, weight, called = quadratic(most)
        each = training.Training(loss, [{"params": [weight], "lr": 0.125}], sizes, "cpu")
        each.warm_up()
        made.append((each.passes, called[-1], each.step().item(), weight.item()))
    assert [parts[:2] for parts in made] == [(1, 4), (4, 1)]
    assert made[0][2:] == pytest.approx(made[1][2:], rel=1e-5)
    with pytest.raises(torch.OutOfMemoryError):
        training.Training(quadratic(0)[0], [{"params": [weight]}], sizes, "cpu").warm_up()


def test_flops_are_six_for_each_weight_of_a_matrix_and_the_recurrence():
    width, hidden, rank = 64, 256, 32
    time_mix = 4 * width**2 + 2 * width * rank * 4
    first = time_mix - 2 * width * rank  # it has no mix of values
    matrices = first + time_mix + 2 * 2 * width * hidden + width * 256
    assert training.flops_of_token(SIZES) == 6 * matrices + 3 * 2 * 8 * width * 64


@pytest.mark.skipif(sys.platform == "win32", reason="ranks meet by gloo")
def test_ranks_share_a_model(program):
    code, printed, _ = program("training", "--json", *SMALL, "--runs", "2", "--ranks", "2")
    assert code == 0
    rows = json.loads(printed)["rows"]
    assert [(row["ranks"], row["skipped"]) for row in rows] == [(1, None), *[(2, None)] * 3]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["ranks"] * 2 * 16 / row["median_ms"] * 1e3)
    assert rows[1]["loss"] == pytest.approx(rows[2]["loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("training", "--width", "100"), "--width: expected a multiple of 64, got 100"),
        (("training", "--layers", "0"), "--layers: expected at least 1, got 0"),
        (("training", "--layer-width", "65"), "--layer-width: expected a multiple of 64, got 65"),
        (("training", "--runs", "1"), "--runs: expected at least 2, got 1"),
        (("training", "--who", "fla"), "--who: fla needs a GPU and an installed FLA"),
        (("training", "--ranks", "1"), "--ranks: expected from 2 to the 1 GPUs there are, got 1"),
        (("curves", "--vocabulary", "255"), "--vocabulary: bytes are the tokens, expected at least 256, got 255"),
        (("curves", "--steps", "0"), "--steps: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_an_error(program, arguments, message):
    code, _, said = program(*arguments)
    assert (code, said) == (2, f"python -m bench: {message}\n")


# ---- curves ------------------------------------------------------------------------------------------------------


def test_batches_are_texts_that_go_by_the_order():
    first, again, other = (curves.batches(SIZES, 3, order) for order in (0, 0, 1))
    assert first.shape == (3, 2, 17)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    source = bytes(curves.text().tolist())
    assert bytes(first[2, 1].tolist()) in source


def test_a_step_is_one_of_float32_copies():
    torch.manual_seed(0)
    begin, grads = torch.randn(50).bfloat16(), torch.randn(3, 50).bfloat16()
    narrow, wide = nn.Parameter(begin.clone()), nn.Parameter(begin.float())
    masters = curves.Masters([{"params": [narrow], "lr": 0.5, "weight_decay": 0.25}])
    reference = torch.optim.AdamW([wide], lr=0.5, weight_decay=0.25, betas=training.BETAS, eps=training.EPS)
    for factor, grad in zip((0.5, 1.0, 1.0), grads, strict=True):
        narrow.grad, wide.grad = grad.clone(), grad.float()
        masters.step(factor)
        reference.param_groups[0]["lr"] = 0.5 * factor
        reference.step()
        assert narrow.grad is None
        assert torch.equal(narrow, wide.bfloat16())


def test_differences_are_those_of_means_over_steps():
    ours = [float(n) for n in range(60)]
    theirs = [x + (4.0 if n % 20 == 0 else 0.0) for n, x in enumerate(ours)]
    found = curves.differences({"rwkv_jit": ours, "fla": theirs, "late": [*ours[:-1], 59.0 + 20]})
    assert found["fla"] == pytest.approx({"largest": 0.2, "end": 0.2})
    assert found["late"]["largest"] == pytest.approx(1.0)
    assert curves.smoothed([1.0, 3.0]).tolist() == [2.0]


def test_curves_are_kept_and_shown(program, tmp_path):
    arguments = "curves", *SMALL, "--steps", "30", "--out", str(tmp_path / "new")
    code, printed, _ = program(*arguments)
    assert code == 0
    kept = json.loads((tmp_path / "new" / "curves.json").read_text())
    assert list(kept["curves"]) == ["rwkv_jit", "rwkv_jit, autocast", "rwkv_jit, another order"]
    for losses in kept["curves"].values():
        assert len(losses) == 30
        assert losses[0] == pytest.approx(5.6, abs=0.3)
        assert losses[-1] < losses[0] - 0.5
    assert 0 < kept["differences"]["rwkv_jit, autocast"]["largest"] < 0.02
    assert kept["skipped"] == {"fla": "needs a GPU and an installed FLA"}
    assert (tmp_path / "new" / "curves.png").stat().st_size > 1000
    assert "skipped: fla: needs a GPU and an installed FLA" in printed
