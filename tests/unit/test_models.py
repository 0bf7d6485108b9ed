"""Checkpoints and descriptions: which kernels a model needs, and that reading one runs nothing."""

import argparse
import json
import os
import pickle

import pytest
import torch

from rwkv_jit.ahead import models
from rwkv_jit.ahead.models import Model
from rwkv_jit.kernels.errors import UnsupportedConfigError

C, H, N, V = 12, 3, 4, 8
RWKV = {"receptance.weight": (C, C), "key.weight": (C, C), "value.weight": (C, C), "output.weight": (C, C)}
LN = {"ln_x.weight": (C,), "ln_x.bias": (C,)}
# Names and shapes of one layer, by where they stand in a checkpoint, and what it needs.
LAYERS = {
    "RWKV-4": ("blocks.{}.att.", {"time_decay": (C,), "time_first": (C,), "time_mix_k": (1, 1, C), **RWKV},
               Model("wkv4", None, None, "bf16")),
    "RWKV-4 of transformers": ("rwkv.blocks.{}.attention.", {"time_decay": (C,), "time_first": (C,), **RWKV},
                               Model("wkv4", None, None, "bf16")),
    "RWKV-5.0": ("blocks.{}.att.", {"time_decay": (H,), "time_first": (H,), **RWKV, **LN},
                 Model("wkv5", N, N, "bf16", width=C)),
    "RWKV-5.2": ("blocks.{}.att.", {"time_decay": (H, N), "time_faaaa": (H, N), "gate.weight": (C, C), **RWKV, **LN},
                 Model("wkv5", N, N, "bf16", width=C)),
    "RWKV-5 of transformers": ("rwkv.blocks.{}.attention.", {"time_decay": (H, N), "time_faaaa": (H, N), **RWKV, **LN},
                               Model("wkv5", N, N, "bf16", width=C)),
    "RWKV-6": ("blocks.{}.att.",
               {"time_maa_x": (1, 1, C), "time_decay": (1, 1, C), "time_faaaa": (H, N), **RWKV, **LN},
               Model("wkv6", N, N, "bf16", width=C)),
    "RWKV-6 of FLA": ("model.layers.{}.attn.",
                      {"bonus": (H, N), "k_proj.linear.weight": (C, 5), "v_proj.linear.weight": (H * V, 5)},
                      Model("wkv6", N, V, "bf16", ("log",), "kv")),
    "RWKV-7": ("blocks.{}.att.", {"w0": (1, 1, C), "a0": (1, 1, C), "r_k": (H, N), **RWKV, **LN},
               Model("wkv7", N, N, "bf16", ("raw", "sigmoid"), None, C)),
    "RWKV-7 of FLA": ("model.layers.{}.attn.",
                      {"r_k": (H, N), "k_proj.weight": (C, C), "v_proj.weight": (H * V, C)},
                      Model("wkv7", N, V, "bf16", ("log",), "kv", C)),
}  # fmt: skip


def shapes(kind):
    place, layer, wanted = LAYERS[kind]
    found = {"emb.weight": (5, C), "blocks.0.ffn.key.weight": (C, C)}
    return found | {place.format(at) + name: shape for at in (0, 1) for name, shape in layer.items()}, wanted


@pytest.mark.parametrize("suffix", [".json", ".pth", ".safetensors"])
def test_what_is_no_file_of_data_is_refused_unopened(suffix, tmp_path):
    path = tmp_path / f"model{suffix}"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"^--model: expected a file, got {path}"):
        models.read(path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "config.json")
    with pytest.raises(ValueError, match="^--model: expected a file, got .*config.json"):
        models.read(tmp_path / "folder")


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(path, of, dtype=torch.bfloat16):
    """Write a checkpoint, as a file of the kind that its name says; return its path."""
    if path.suffix == ".safetensors":
        kind = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}[dtype]
        about = {name: {"dtype": kind, "shape": list(shape), "data_offsets": [0, 0]} for name, shape in of.items()}
        path.write_bytes(safetensors({"__metadata__": {"format": "pt"}, **about}))
    else:
        held = {name: torch.zeros(shape, dtype=dtype) for name, shape in of.items()}
        torch.save(held, path, _use_new_zipfile_serialization="before" not in path.stem)
    return path


# ---- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pth", "before.pth", "model.safetensors"])
@pytest.mark.parametrize("kind", LAYERS)
def test_checkpoint_says_which_kernels_its_model_needs(kind, name, tmp_path):
    of, wanted = shapes(kind)
    assert models.read(write(tmp_path / name, of)) == wanted


def test_checkpoint_may_lie_in_a_training_state(tmp_path):
    of, wanted = shapes("RWKV-7")
    held = {"epoch": 3, "state_dict": {f"module.{name}": torch.zeros(shape) for name, shape in of.items()}}
    torch.save(held, tmp_path / "last.pt")
    assert models.read(tmp_path / "last.pt") == wanted._replace(dtype="fp32")


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors"])
def test_dtype_that_kernels_lack_is_none(name, tmp_path):
    of, wanted = shapes("RWKV-6")
    assert models.read(write(tmp_path / name, of, torch.float64)) == wanted._replace(dtype=None)


def test_tensors_of_a_checkpoint_stay_on_disk(tmp_path):
    """A sparse file of 64 GiB, most of it one tensor, is read at once."""
    of, wanted = shapes("RWKV-7")
    path = write(tmp_path / "model.safetensors", of)
    os.truncate(path, 64 << 30)
    assert models.read(path) == wanted


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors"])
def test_unknown_model_is_an_error_that_says_what_there_is(name, tmp_path):
    of = {f"model.layers.0.attn.{each}_proj.weight": (C, C) for each in "qkv"}
    with pytest.raises(UnsupportedConfigError, match=r"r_k \(RWKV-7\).*but q_proj.weight, k_proj.weight, v_proj"):
        models.read(write(tmp_path / name, of))
    with pytest.raises(UnsupportedConfigError, match="but no tensors; for other models name the config.json"):
        models.read(write(tmp_path / name, {}))


class Hostile:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [False, True])
def test_hostile_checkpoint_runs_no_code(plain, tmp_path):
    path, proof = tmp_path / "model.pth", tmp_path / "proof"
    held = {"blocks.0.att.r_k": Hostile(proof)}
    path.write_bytes(pickle.dumps(held, protocol=2)) if plain else torch.save(held, path)
    with pytest.raises(ValueError, match=f"^--model: {path} is damaged, or holds more than tensors: .* refuses it$"):
        models.read(path)
    assert not proof.exists()


DAMAGED = {
    "empty.pth": b"",
    "text.pth": b"no checkpoint",
    "zip.pth": b"PK\3\4 and nothing",
    "list.pt": None,
    "empty.safetensors": b"",
    "short.safetensors": b"\5\0\0",
    "long header.safetensors": (1 << 62).to_bytes(8, "little") + b"{}",
    "longer than the file.safetensors": (100).to_bytes(8, "little") + b"{}",
    "no json.safetensors": safetensors(b"{"),
    "deep json.safetensors": safetensors(b"[" * 100_000),
    "list.safetensors": safetensors([]),
    "no shape.safetensors": safetensors({"a": {"dtype": "F16"}}),
    "no numbers.safetensors": safetensors({"a": {"dtype": "F16", "shape": ["x"]}}),
    "no table.safetensors": safetensors({"a": 7}),
    "no json.json": b"{",
    "list.json": b"[]",
    "other.gguf": b"GGUF",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_one_sentence(name, tmp_path):
    path = tmp_path / name
    if DAMAGED[name] is None:
        torch.save([torch.zeros(2)], path)
    else:
        path.write_bytes(DAMAGED[name])
    with pytest.raises(ValueError, match="^--model: ") as caught:
        models.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "config.json"])
def test_file_that_is_not_there_is_one_sentence(name, tmp_path):
    with pytest.raises(ValueError, match=f"^--model: {tmp_path}/{name} cannot be read: No such file or directory$"):
        models.read(tmp_path / name)


# ---- descriptions ------------------------------------------------------------------------------------------------

FLA = {"hidden_size": 2048, "num_heads": 4, "expand_k": 0.5, "expand_v": 1, "torch_dtype": "float16"}
DESCRIBED = {
    "rwkv": ({"hidden_size": 768, "attention_hidden_size": 768, "torch_dtype": "float32"},
             Model("wkv4", None, None, "fp32")),
    "rwkv5": ({"hidden_size": 2048, "head_size": 64, "torch_dtype": "bfloat16"},
              Model("wkv5", 64, 64, "bf16", width=2048)),
    "rwkv6": ({"hidden_size": 2048, "head_size": 64, "dtype": "bfloat16"},
              Model("wkv6", 64, 64, "bf16", width=2048)),
    "rwkv6 of FLA": (FLA, Model("wkv6", 256, 512, "fp16", ("log",), "kv")),
    "rwkv7": ({"hidden_size": 768, "head_dim": 64, "num_heads": None},
              Model("wkv7", 64, 64, None, ("log",), "kv", 768)),
    "rwkv7 with values": ({"hidden_size": 768, "head_dim": 64, "value_dim": [1536, 1536], "dtype": "torch.bfloat16"},
                          Model("wkv7", 64, 128, "bf16", ("log",), "kv", 768)),
    "gla": (FLA, Model("gla", 256, 512, "fp16")),
    "linear_attn": (FLA | {"expand_k": 1.0}, Model("linear_attention", 512, 512, "fp16")),
}  # fmt: skip


@pytest.mark.parametrize("direction", ["both", "forward", "update"])
@pytest.mark.parametrize("kind", ["RWKV-6", "RWKV-7", "RWKV-7 of FLA"])
def test_layers_are_asked_for_where_they_are_called(kind, direction, tmp_path):
    """FLA trains with layers of its own; its states may be served by ours."""
    of, wanted = shapes(kind)
    asked = argparse.Namespace(model=write(tmp_path / "model.pth", of), direction=direction)
    for name in ("head_size", "value_size", "width", "dtype", "decay", "state_layout"):
        setattr(asked, name, None)
    models.fill(asked)
    assert asked.width == (None if "FLA" in kind and direction != "update" else [wanted.width])


@pytest.mark.parametrize("kind", DESCRIBED)
def test_description_says_which_kernels_its_model_needs(kind, tmp_path):
    config, wanted = DESCRIBED[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind.split()[0], **config}))
    assert models.read(path) == models.read(tmp_path) == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "expected a model_type of rwkv, rwkv5, .*, got 'llama' among model_type"),
        ({"hidden_size": 8}, "got None among hidden_size"),
        ({"model_type": ["gla"]}, r"got \['gla'\] among"),
        ({"model_type": "gla", "hidden_size": 8}, "there is no num_heads, expand_k, expand_v among hidden_size, model"),
        ({"model_type": "rwkv6", "head_size": "64"}, "expected a whole number of at least 1 as head_size, got '64'"),
        ({"model_type": "rwkv5", "head_size": True}, "as head_size, got True"),
        ({"model_type": "rwkv7", "hidden_size": 8, "head_dim": 0}, "as head_dim, got 0"),
        ({"model_type": "gla", **FLA, "expand_k": float("nan")}, "expected a number above 0 as expand_k, got nan"),
        ({"model_type": "gla", **FLA, "num_heads": 4096}, "its heads have a size of 0 and, for v, of 0"),
    ],
)
def test_description_of_another_kind_is_an_error_that_says_what_there_is(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^--model: {tmp_path}/config.json: .*{message}"):
        models.read(tmp_path)
