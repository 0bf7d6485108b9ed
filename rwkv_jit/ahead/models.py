"""What kernels a model calls: read from its checkpoint, of which only names and shapes, or from its description.

Nothing that a file holds is run: a pickle is read by torch with `weights_only`, safetensors' header is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rwkv_jit.kernels.errors import UnsupportedConfigError, reason

_MOST_JSON = 100 << 20  # bytes, as safetensors has it
_NAMES_SHOWN = 12
# What a checkpoint may call the dtypes that kernels have: torch's repr, safetensors, and descriptions.
_DTYPES = {
    "bf16": ("torch.bfloat16", "BF16", "bfloat16"),
    "fp16": ("torch.float16", "F16", "float16"),
    "fp32": ("torch.float32", "F32", "float32"),
}


class Model(NamedTuple):
    """What decides which kernels a model's calls take. wkv4 has no heads; a dtype that kernels lack is None."""

    op: str
    head_size: int | None
    value_size: int | None
    dtype: str | None
    decays: tuple[str | None, ...] = (None,)  # None is the op's own
    state_layout: str | None = None
    width: int | None = None  # of RWKV-5, 6 and 7, where the file says it


class _Tensor(NamedTuple):
    """What a checkpoint says of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def fill(asked: argparse.Namespace) -> None:
    """Fill in what a command line asks for by `--model` alone; what it says of the calls goes before the model.

    Raises TypeError or ValueError where it says twice what the model is, or the model's dtype is none that kernels
    have; UnsupportedConfigError as `read`.
    """
    for name in ("head_size", "value_size", "width"):
        if getattr(asked, name):
            raise ValueError(f"--{name.replace('_', '-')}: cannot be combined with --model, which sets it")
    model = read(Path(asked.model))
    if not asked.dtype and model.dtype is None:
        raise TypeError(f"--dtype: {asked.model} has no dtype that kernels support; name one of {', '.join(_DTYPES)}")
    asked.op = [model.op]
    asked.head_size = None if model.head_size is None else [model.head_size]
    asked.value_size = None if model.value_size is None else [model.value_size]
    # FLA trains its models with layers of its own.
    is_fla = model.state_layout is not None
    asked.width = None if is_fla and asked.direction != "update" else [model.width]
    asked.dtype = asked.dtype or [model.dtype]
    asked.decay = asked.decay or list(model.decays)
    asked.state_layout = asked.state_layout or [model.state_layout]


def read(path: Path) -> Model:
    """Read what a model needs.

    `path` is a checkpoint (.pth, .pt, .bin or .safetensors), a description (.json), or the folder of one (config.json).
    Raises ValueError where the file cannot be read, is damaged, or of another kind; UnsupportedConfigError where it is
    no model that these ops serve: what was looked for, and what there is.
    """
    try:
        return _read(path / "config.json" if path.is_dir() else path)
    except OSError as error:
        raise ValueError(f"--model: {path} cannot be read: {reason(error)}") from error


def _read(path: Path) -> Model:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"--model: expected a file, got {path}, which is none of data")
    if path.suffix == ".json":
        if path.stat().st_size > _MOST_JSON:
            raise ValueError(f"--model: {path} is not a description: it has {path.stat().st_size} bytes")
        return _described(path, _json(path, path.read_bytes()))
    if path.suffix == ".safetensors":
        return _of_tensors(path, _safetensors(path))
    if path.suffix in (".pth", ".pt", ".bin"):
        return _of_tensors(path, _pickled(path))
    raise ValueError(f"--model: expected a .pth, .pt, .bin, .safetensors or .json file or a folder, got {path}")


# ---- reading -----------------------------------------------------------------------------------------------------


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        held = json.loads(data)
        if not isinstance(held, dict):
            raise ValueError(f"expected a JSON object, got {type(held).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model: {path} is damaged: {error}") from error
    return held


def _safetensors(path: Path) -> dict[str, _Tensor]:
    """Read the header: its length in eight bytes, then JSON."""
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        rest = path.stat().st_size - 8
        if len(head) < 8 or length > min(rest, _MOST_JSON):
            raise ValueError(f"--model: {path} is damaged: its header has {length} bytes, of the file {rest} are left")
        header = _json(path, file.read(length))
    try:
        return {
            name: _Tensor(tuple(map(int, about["shape"])), str(about["dtype"]))
            for name, about in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--model: {path} is damaged: {error!r} in its header") from error


def _pickled(path: Path) -> dict[str, _Tensor]:
    """Read names and shapes; the tensors' data stay on disk, where the file is one of torch 1.6 or later."""
    import torch

    with path.open("rb") as file:
        can_be_mapped = file.read(4) == b"PK\3\4"
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped)
    except OSError:
        raise
    except Exception as error:  # the unpickler raises a dozen kinds, and its texts ask to trust the file
        raise ValueError(
            f"--model: {path} is damaged, or holds more than tensors: torch.load(weights_only=True) refuses it"
        ) from error
    if isinstance(held, Mapping) and isinstance(held.get("state_dict"), Mapping):
        held = held["state_dict"]
    if not isinstance(held, Mapping):
        raise ValueError(f"--model: {path}: expected tensors by their names, got {type(held).__name__}")
    return {str(name): _Tensor(tuple(x.shape), str(x.dtype)) for name, x in held.items() if isinstance(x, torch.Tensor)}


# ---- checkpoints -------------------------------------------------------------------------------------------------

_OF_LAYER = re.compile(r"(?:^|\.)(?:blocks|layers)\.\d+\.(?:att|attn|attention)\.(.+)")


class _Kind(NamedTuple):
    """What attention is known by: a tensor [heads, head size], and another one whose name begins so."""

    op: str
    sizes: str
    other: str
    keys: str  # the projection, which has the dtype
    values: str = ""  # where values can have another size
    decays: tuple[str | None, ...] = (None,)
    state_layout: str | None = None


_KINDS = (
    _Kind("wkv7", "r_k", "k_proj.weight", "k_proj.weight", "v_proj.weight", ("log",), "kv"),  # FLA's
    _Kind("wkv7", "r_k", "", "key.weight", decays=("raw", "sigmoid")),
    _Kind("wkv6", "time_faaaa", "time_maa_", "key.weight"),
    _Kind("wkv6", "bonus", "", "k_proj.linear.weight", "v_proj.linear.weight", ("log",), "kv"),  # FLA's
)


def _of_tensors(path: Path, tensors: Mapping[str, _Tensor]) -> Model:
    """Return what the attention of the first layer that has one says: RWKV's names, or those of FLA."""
    layer: dict[str, _Tensor] = {}
    for name, tensor in tensors.items():
        if match := _OF_LAYER.search(name):
            layer.setdefault(match[1], tensor)
    model = _of_layer(layer)
    if model is not None:
        return model
    names = list(layer) or list(tensors)
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    raise UnsupportedConfigError(
        f"--model: {path} is not an RWKV model: its layers have neither r_k (RWKV-7), time_maa_x or bonus (6), "
        f"time_faaaa (5) nor time_first (4), but {shown or 'no tensors'}; for other models name the config.json"
    )


def _of_layer(layer: Mapping[str, _Tensor]) -> Model | None:
    def shape_of(name: str) -> tuple[int, ...]:
        return layer[name].shape if name in layer else ()

    def dtype_of(name: str) -> str | None:
        return _kernels_dtype(layer[name].dtype) if name in layer else None

    for kind in _KINDS:
        sizes = shape_of(kind.sizes)
        if len(sizes) == 2 and min(sizes) > 0 and any(name.startswith(kind.other) for name in layer):
            heads, head_size = sizes
            values = shape_of(kind.values)
            value_size = values[0] // heads if len(values) == 2 and values[0] % heads == 0 else 0
            keys = shape_of(kind.keys)
            return Model(
                kind.op, head_size, value_size or head_size, dtype_of(kind.keys), kind.decays, kind.state_layout,
                keys[1] if len(keys) == 2 and (kind.op == "wkv7" or not kind.state_layout) else None,
            )  # fmt: skip
    decay, first, keys = map(shape_of, ("time_decay", "time_first", "key.weight"))
    # RWKV-5.2 has a decay of each channel, [heads, head size]; 5.0 and 5.1 one of each head.
    if decay and keys and "ln_x.weight" in layer and decay[0] > 0 and keys[0] % decay[0] == 0:
        return Model("wkv5", keys[0] // decay[0], keys[0] // decay[0], dtype_of("key.weight"), width=keys[-1])
    if "time_decay" in layer and "time_first" in layer and math.prod(decay) == math.prod(first):
        return Model("wkv4", None, None, dtype_of("key.weight"))
    return None


def _kernels_dtype(name: object) -> str | None:
    return next((dtype for dtype, names in _DTYPES.items() if name in names), None)


# ---- descriptions ------------------------------------------------------------------------------------------------

_OPS = {
    "rwkv": "wkv4", "rwkv5": "wkv5", "rwkv6": "wkv6", "rwkv7": "wkv7", "gla": "gla", "linear_attn": "linear_attention",
}  # fmt: skip


def _described(path: Path, config: Mapping[str, Any]) -> Model:
    kind = config.get("model_type")
    op = _OPS.get(kind) if isinstance(kind, str) else None
    if op is None:
        names = ", ".join(sorted(config)[:_NAMES_SHOWN]) or "nothing"
        raise UnsupportedConfigError(
            f"--model: {path}: expected a model_type of {', '.join(_OPS)}, got {kind!r} among {names}"
        )
    dtype = _kernels_dtype(str(config.get("torch_dtype", config.get("dtype"))).removeprefix("torch."))
    if op == "wkv4":
        return Model(op, None, None, dtype)
    if "head_size" in config:  # RWKV's own; FLA's descriptions have none
        size = _number(path, config, "head_size")
        width = _number(path, config, "hidden_size") if "hidden_size" in config else None
        return Model(op, size, size, dtype, ("raw", "sigmoid") if op == "wkv7" else (None,), width=width)
    of_fla: dict[str, Any] = {"decays": ("log",), "state_layout": "kv"} if op in ("wkv6", "wkv7") else {}
    of_op = ("head_dim",) if op == "wkv7" else ("num_heads", "expand_k", "expand_v")
    missing = [name for name in ("hidden_size", *of_op) if config.get(name) is None]
    if missing:
        raise UnsupportedConfigError(
            f"--model: {path}: expected head_size, or hidden_size, {', '.join(of_op)}, which FLA's {kind} have; there "
            f"is no {', '.join(missing)} among {', '.join(sorted(config))}"
        )
    hidden = _number(path, config, "hidden_size")
    if op == "wkv7":
        keys = _number(path, config, "head_dim")
        of_layers = config.get("value_dim")  # of all heads, and of each layer where it is a list
        value_dim = (of_layers[0] if isinstance(of_layers, list) and of_layers else of_layers) or hidden
        values = _number(path, {"value_dim": value_dim}, "value_dim") // max(hidden // keys, 1)
        of_fla["width"] = hidden
    else:
        heads = _number(path, config, "num_heads")
        factors = (_number(path, config, name, is_whole=False) for name in ("expand_k", "expand_v"))
        keys, values = (int(hidden * factor) // heads for factor in factors)
    if min(keys, values) < 1:
        raise ValueError(f"--model: {path}: its heads have a size of {keys} and, for v, of {values}")
    return Model(op, keys, values, dtype, **of_fla)


def _number(path: Path, config: Mapping[str, Any], name: str, is_whole: bool = True) -> Any:
    value: Any = config.get(name)
    is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
    if is_number and 0 < value < math.inf:
        return value
    expected = "a whole number of at least 1" if is_whole else "a number above 0"
    raise ValueError(f"--model: {path}: expected {expected} as {name}, got {value!r}")
