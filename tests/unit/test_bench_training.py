"""`python -m bench training`, `curves` and `warm-fla`: on the CPU, with stand-ins for FLA and for Triton's tuners."""

import json

import pytest
import torch
from torch import nn

from bench import rwkv7_models, training
from bench.__main__ import main
from bench.rwkv7_models import Sizes
from rwkv_jit.desk import figures

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


# ---- training ----------------------------------------------------------------------------------------------------


def test_steps_and_the_layer_are_measured(program, monkeypatch):
    monkeypatch.setattr(figures, "cpu_ms", lambda call: [call() and 1.0, 2.0, 3.0])
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


# ---- curves ------------------------------------------------------------------------------------------------------


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
