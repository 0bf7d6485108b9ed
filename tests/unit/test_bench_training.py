"""`python -m bench training`, `decode` and `curves`: on the CPU, with stand-ins for FLA and a GPU."""

import json
from types import SimpleNamespace

import fake_graphs
import pytest
import torch
from torch import nn

from bench import decode, models, rwkv7_models, training
from bench.__main__ import main
from bench.rwkv7_models import Sizes
from rwkv_jit.desk import figures, profiling
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.nn import graphs, node

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
        each = training.Training(training.Made(loss, [{"params": [weight], "lr": 0.125}]), sizes, "cpu")
        each.warm_up()
        each.step()
        made.append((each.passes, called[-1], each.loss.item(), weight.item()))
    assert [parts[:2] for parts in made] == [(1, 4), (4, 1)]
    assert made[0][2:] == pytest.approx(made[1][2:], rel=1e-5)
    with pytest.raises(torch.OutOfMemoryError):
        training.Training(training.Made(quadratic(0)[0], [{"params": [weight]}]), sizes, "cpu").warm_up()


def test_models_train_alike_in_every_mode(program):
    """Parts, nodes and graphs, and other models; FLA's and time mixing alone are of RWKV-7."""
    names = "rwkv_jit as parts", "rwkv_jit", "rwkv_jit graphed", "rwkv_jit graphed, float32 parameters"
    asked = [x for name in names for x in ("--who", name)]
    code, printed, _ = program("training", "--json", *SMALL, "--runs", "2", "--model", "RWKV6", *asked)
    assert code == 0
    rows = json.loads(printed)["rows"]
    assert [(row["part"], row["model"], row["by"], row["skipped"]) for row in rows] == [
        ("steps", "RWKV6", name, None) for name in names
    ]
    assert [row["parameters"] for row in rows] == ["bfloat16"] * 3 + ["float32"]
    assert rows[0]["loss"] == rows[1]["loss"] == rows[2]["loss"] != rows[3]["loss"]
    assert all(row["host_ms"] is row["kernel_ms"] is row["peak_mib"] is None for row in rows)


@pytest.mark.parametrize("name", training.OURS)
def test_models_train_as_their_names_say(name):
    made = training.OURS[name](SIZES, "cpu")
    assert made.model.checkpointing == ("checkpointing" in name)
    assert (made.mode == models.GRAPHED, made.mode == models.PARTS) == ("graphed" in name, "as parts" in name)
    assert made.is_cast == ("float32" in name) == (made.model.emb.weight.dtype == torch.float32)


def test_training_from_graphs_counts_passes(monkeypatch):
    """Two passes add up their gradients, as the same steps without graphs; losses and parameters are the same."""
    monkeypatch.setattr(graphs, "devices", {"cpu"})
    monkeypatch.setattr(graphs, "Graph", fake_graphs.TapeGraph)
    monkeypatch.setattr(fake_graphs.TapeGraph, "replayed", 0)
    monkeypatch.setattr(training, "RATES", {"lr": 2**-11, "weight_decay": 0.1})  # graphs round rates to float32
    found = []
    for name in ("rwkv_jit", "rwkv_jit graphed"):
        made = training.WHO[name](SIZES, "cpu", dtype=torch.float32)
        with models.running(made.mode):
            each = training.Training(made, SIZES, "cpu")
            each.passes = 2
            each._pass = each._new_pass()
            for _ in range(6):
                each.step()
            each.short_step()
        found.append([each.loss, *made.model.parameters()])
    assert all(map(torch.equal, *found))
    assert fake_graphs.TapeGraph.replayed > 6


# ---- decoding ----------------------------------------------------------------------------------------------------


def test_tokens_and_prompts_are_measured(program):
    code, printed, said = program(
        "decode", "--json", "--layers", "1", "--runs", "2", "--model", "RWKV5", "--batch", "3"
    )
    assert code == 0
    rows = json.loads(printed)["rows"]
    assert [json.loads(line) for line in said.splitlines() if line.startswith("{")] == rows
    assert [(row["part"], row["by"], row["batch"], row["tokens"], row["skipped"]) for row in rows] == [
        ("token", "rwkv_jit parts, float32", 3, 1, None), ("token", "rwkv_jit graphed, float32", 3, 1, None),
        ("token", "rwkv_jit generate, float32", 3, 1, None),
        ("prompt", "rwkv_jit parts, float32", 1, 16, None), ("prompt", "rwkv_jit nodes, float32", 1, 16, None),
        ("prompt", "rwkv_jit graphed, float32", 1, 16, None),
    ]  # fmt: skip
    for row in rows:
        assert (row["model"], row["parameters"], row["layers"], row["vocabulary"]) == ("RWKV5", "float32", 1, 256)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["tokens"] / row["median_ms"] * 1e3)
    options = "--layers", "1", "--runs", "2", "--batch", "1", "--dtype", "bfloat16"
    code, printed, _ = program("decode", *options, "--prompt", "0", "--model", "RWKV7", "--model", "RWKV6")
    assert code == 0
    assert "a token: 1 layers, width 64, vocabulary 256" in printed
    assert [printed.count(x) for x in ("RWKV7 ", "RWKV6 ", "a prompt: ", "graphed, bfloat16", "skipped")] == [
        3, 3, 0, 2, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("decode", "--batch", "-1"), "--batch: expected at least 1, or 0 for none, got -1"),
        (("decode", "--prompt", "1"), "--prompt: expected at least 2, or 0 for none, got 1"),
        (("decode", "--width", "100"), "--width: expected a multiple of 64, got 100"),
        (("decode", "--runs", "1"), "--runs: expected at least 2, got 1"),
        (("training", "--runs", "1"), "--runs: expected at least 2, got 1"),
        (("training", "--layers", "0"), "--layers: expected at least 1, got 0"),
        (("decode", "--record"), "--record: keeps what was measured on a GPU, and there is none"),
        (("training", "--model", "RWKV5", "--part", "layer", "--who", "rwkv_jit"),
         "--who: nothing of rwkv_jit is measured in layer of these models"),
        (("training", "--record"), "--record: keeps what was measured on a GPU, and there is none"),
    ],
)  # fmt: skip
def test_wrong_options_are_errors(program, arguments, said):
    assert program(*arguments)[0::2] == (2, f"python -m bench: {said}\n")


def test_modes_are_of_nodes_and_of_graphs():
    before = node.devices, graphs.devices
    found = {}
    for mode in models.MODES:
        with models.running(mode):
            found[mode] = "cuda" in node.devices, "cuda" in graphs.devices
    assert found == {"parts": (False, False), "nodes": (True, False), "graphed": (True, True)}
    assert (node.devices, graphs.devices) == before


def test_a_gpu_says_what_the_host_and_the_kernels_take(monkeypatch):
    """With stand-ins for clock, profiler and the GPU: the median of the host's steps, and the shares."""
    calls, now = [], [0.0]
    monkeypatch.setattr(models.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 5))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(models, "step_times", lambda step, device, runs: [8.0] * runs)
    monkeypatch.setattr(profiling, "busy_us", lambda step, runs: 2000.0)

    def step():
        calls.append(1)
        now[0] += len(calls) / 1e3

    row = models.shown(models.EMPTY | models.figures_of(step, "cuda", 4))
    assert (row["median_ms"], row["runs"], row["kernel_ms"], row["busy"], row["peak_gib"]) == (8.0, 4, 2.0, 0.25, 3.0)
    assert row["host_ms"] == pytest.approx(8.5)  # of the calls behind three
    assert len(calls) == 13
    assert models.flops_use(989e12 / 4) == 0.25
    model = rwkv7_models.our_model(SIZES, "cpu", torch.float16)
    pool = model.new_pool(2)
    weights = 2 * (sum(x.numel() for x in model.parameters()) - model.emb.weight.numel())
    states = SIZES.layers * 2 * (64 * 64 * 4 + 2 * 64 * 2)
    assert decode._bytes_of(model, pool) == weights + 2 * states


def test_weights_of_matrices_are_those_of_products():
    """The head once, and of a layer those of linear layers and of low rank; not the embedding, and none by the head."""
    width, hidden = 128, {"RWKV5": 448, "RWKV7": 512}
    ranks = rwkv7_models.RWKV7(300, width, 2, device="meta").blocks[1].att.ranks
    for kind, of_time in (("RWKV5", 5 * width**2), ("RWKV7", 4 * width**2 + 2 * width * sum(ranks.values()))):
        one, two = (models.matrices_of(Sizes(n, width, 1, 1, 300), models.MODELS[kind]) for n in (1, 2))
        of_channels = 2 * width * hidden[kind] + (width**2 if kind == "RWKV5" else 0)
        assert two - one == of_time + of_channels
        first = 2 * width * ranks["v"] if kind == "RWKV7" else 0  # which the first layer lacks
        assert one == of_time + of_channels - first + 300 * width


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


def test_kernels_that_wait_for_each_other_keep_the_gpu_busy_once(monkeypatch):
    """As with programmatic launches, which begin before the kernel before them has ended."""
    spans = [(4, 9), (0, 5), (1, 3), (20, 21)], [(0, 40)], [(30, 90)]
    places = ("CUDA", False), ("CPU", False), ("CUDA", True)  # an annotation of a user is no work
    events = [
        SimpleNamespace(
            time_range=SimpleNamespace(start=begin, end=end), is_user_annotation=is_annotation,
            device_type=SimpleNamespace(name=device),
        )
        for several, (device, is_annotation) in zip(spans, places, strict=True) for begin, end in several
    ]  # fmt: skip
    monkeypatch.setattr(profiling, "_profiled", lambda call, runs: SimpleNamespace(events=lambda: events))
    assert profiling.busy_us(None, runs=2) == 5.0
    del events[:4]
    with pytest.raises(RwkvJitError, match="saw no kernel"):
        profiling.busy_us(None, runs=2)
