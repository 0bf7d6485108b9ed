"""`rwkv-jit build --model`: the kernels of a model, as if its op, sizes and dtype had been named."""

import json

import pytest
import torch

from rwkv_jit.kernels import stats

pytestmark = pytest.mark.usefixtures("listed_only")
GLA = {"model_type": "gla", "hidden_size": 64, "num_heads": 2, "expand_k": 0.5, "expand_v": 1, "torch_dtype": "float16"}
MODELS = {
    "wkv7.pth": ("--op", "wkv7", "--head-size", "8", "--dtype", "bf16", "--decay", "raw,sigmoid", "--width", "16"),
    "wkv4.pth": ("--op", "wkv4", "--dtype", "bf16"),
    "config.json": ("--op", "gla", "--head-size", "16", "--value-size", "32", "--dtype", "fp16"),
}


@pytest.fixture
def model(tmp_path):
    """Makes the file of a model."""

    def model(name):
        of = {
            "wkv7.pth": {"r_k": (2, 8), "key.weight": (16, 16)},
            "wkv4.pth": {"time_decay": (16,), "time_first": (16,), "key.weight": (16, 16)},
        }.get(name)
        if of is None:
            (tmp_path / name).write_text(json.dumps(GLA))
        else:
            held = {f"blocks.0.att.{each}": torch.zeros(shape, dtype=torch.bfloat16) for each, shape in of.items()}
            torch.save(held, tmp_path / name)
        return tmp_path / name

    return model


@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_a_model_are_those_of_its_op_and_sizes(name, model, run, tmp_path):
    for file, asked in (("a", ("--model", model(name))), ("b", MODELS[name])):
        code, printed, said = run("build", *asked, "--arch", "compute_80", "-o", tmp_path / file, "--digest", "--json")
        assert code == 0, said
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert len(json.loads(printed)["sha256"]) == 64


def test_command_line_goes_before_the_model_where_it_may(model, run, tmp_path):
    asked = ("--model", model("wkv7.pth"), "--dtype", "fp32", "--decay", "log", "--direction", "forward")
    code, printed, said = run("build", *asked, "--arch", "compute_80", "-o", tmp_path / "a", "--json")
    assert code == 0, said
    several = [each["parameters"] for each in json.loads(printed)["kernels"]]
    found = {(each["T_IO"], each["DECAY"]) for each in several if "DECAY" in each}
    assert found == {("fp32", "log")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-size", "8"), "--head-size: cannot be combined with --model, which sets it"),
        (("--op", "wkv7"), "--op: not allowed with argument --model"),
        (("--digest",), "--digest: is that of a bundle, which --output names"),
    ],
)
def test_what_does_not_go_with_a_model(arguments, message, model, run):
    code, _, said = run("build", "--model", model("wkv7.pth"), "--arch", "compute_80", *arguments)
    assert code == 2
    assert message in said
    assert stats.snapshot()["compiled"] == 0


def test_dtype_that_kernels_lack_must_be_named(run, tmp_path):
    torch.save({"blocks.0.att.r_k": torch.zeros(2, 8, dtype=torch.float64)}, tmp_path / "model.pth")
    code, _, said = run("build", "--model", tmp_path / "model.pth", "--arch", "compute_80")
    assert code == 2
    assert said.endswith("model.pth has no dtype that kernels support; name one of bf16, fp16, fp32\n")
