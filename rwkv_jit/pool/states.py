"""What a model keeps of a sequence: what it is, and files of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.kernels.cache import files
from rwkv_jit.kernels.errors import brief
from rwkv_jit.pool import arguments

_DTYPES = (*tensors.STORAGE, torch.float64)
# What a file says of itself: the number of its format, and the specs for whoever looks into it.
_FORMAT_KEY, _SPECS_KEY = "rwkv_jit.format", "rwkv_jit.specs"
_FORMAT = "1"


class StateSpec(NamedTuple):
    """What a model keeps of a sequence under one name, for `StatePool`.

    Attributes
    ----------
    layers : int
        How many of them a sequence has, one for each layer of the model or more.
    shape : tuple of ints
        The shape of one, in one layer, of one sequence.
    dtype : torch.dtype
        float16, bfloat16, float32 or float64.
    fill : float, default 0.0
        What it is filled with before the first token.
    """

    layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0.0

    def __str__(self) -> str:
        filled = f" of {self.fill}" if self.fill else ""
        return f"{self.layers} x {list(self.shape)} {_plain(self.dtype)}{filled}"


def check_spec(name: str, spec: Any) -> None:
    """Check the spec of one name."""
    here = f"specs[{name!r}]"
    if not isinstance(spec, StateSpec):
        raise TypeError(f"{here}: expected a StateSpec, got {brief(spec)}")
    arguments.count(f"{here}.layers", spec.layers, least=1)
    if not isinstance(spec.shape, (tuple, list)):
        raise TypeError(f"{here}.shape: expected a tuple of ints, got {brief(spec.shape)}")
    for size in spec.shape:
        arguments.count(f"{here}.shape", size, least=1)
    check_dtype(f"{here}.dtype", spec.dtype)
    checks.check_number(f"{here}.fill", spec.fill)
    if abs(spec.fill) > torch.finfo(spec.dtype).max:
        raise ValueError(f"{here}.fill: expected a number that fits into {spec.dtype}, got {spec.fill}")


def check_dtype(name: str, dtype: Any) -> None:
    """Check the dtype of states."""
    if dtype not in _DTYPES:
        raise TypeError(f"{name}: expected {' or '.join(map(str, _DTYPES))}, got {brief(dtype)}")


# ---- files -------------------------------------------------------------------------------------------------------


def described(specs: Mapping[str, StateSpec], metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return what a file says of its states, with what the user wants it to say."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: expected a mapping of str to str, got {brief(metadata)}")
    more = {} if metadata is None else dict(metadata)
    for key, value in more.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata: expected str for str, got {brief(value)} for {brief(key)}")
        if key in (_FORMAT_KEY, _SPECS_KEY):
            raise ValueError(f"metadata: expected other keys than {_FORMAT_KEY} and {_SPECS_KEY}, got {key}")
    listed = {name: spec._asdict() | {"dtype": _plain(spec.dtype)} for name, spec in specs.items()}
    return more | {_FORMAT_KEY: _FORMAT, _SPECS_KEY: json.dumps(listed)}


def write(path: str | os.PathLike[str], held: Mapping[str, Tensor], text: dict[str, str]) -> None:
    """Write states, [layers, slots, *shape] by name, and what the file says of them."""
    safetensors = _safetensors("save")
    files.write(files.path_of("path", path), safetensors.torch.save(held, text), mode=0o600)


def read(path: str | os.PathLike[str], specs: Mapping[str, StateSpec]) -> dict[str, Tensor]:
    """Read states of these specs, of any number of slots, but of the same for each name."""
    safetensors = _safetensors("load")
    if not files.path_of("path", path).is_file():
        raise FileNotFoundError(f"path: there is no file {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(_FORMAT_KEY)
            if found != _FORMAT:
                kind = "none" if found is None else brief(found)
                raise ValueError(f"path: expected a file of StatePool.save with format '{_FORMAT}', got {kind}")
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except safetensors.SafetensorError as error:
        raise ValueError(f"path: expected a safetensors file, got {path}, which is damaged: {error}") from error
    _check_held(held, specs)
    return held


def _check_held(held: Mapping[str, Tensor], specs: Mapping[str, StateSpec]) -> None:
    if held.keys() != specs.keys():
        names, came = (", ".join(sorted(each)) or "none" for each in (specs, held))
        raise ValueError(f"path: expected a file with the states {names}, got {came}")
    counts = {name: held[name].shape[1] if held[name].dim() > 1 else 0 for name in specs}
    first = next(iter(counts))
    for name, spec in specs.items():
        x = held[name]
        if x.dtype != spec.dtype or tuple(x.shape) != (spec.layers, counts[name], *spec.shape):
            want = ", ".join(map(str, (spec.layers, "slots", *spec.shape)))
            raise ValueError(
                f"path: expected {name} [{want}] in {_plain(spec.dtype)}, got {list(x.shape)} in {_plain(x.dtype)}"
            )
        if counts[name] != counts[first]:
            raise ValueError(f"path: expected {name} of {counts[first]} slots like {first}, got {counts[name]}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _safetensors(method: str) -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"StatePool.{method} needs safetensors: pip install safetensors") from error
    return safetensors
