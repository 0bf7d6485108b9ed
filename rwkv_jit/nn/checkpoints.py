"""Files of parameters: what is in one, whether it is all of a model, and how one is written."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from types import ModuleType

import torch
from torch import Tensor

from rwkv_jit.kernels.cache.files import path_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that weights may have


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU.

    Raise ValueError if torch or safetensors cannot read it, or if it has other things than weights: each with its name
    and dtype; ImportError if safetensors is not installed; OSError if the file cannot be read.
    """
    path = path_of("path", path)
    if path.exists() and not path.is_file():
        raise ValueError(f"path: expected a file, got {path}")
    try:
        found = (
            _safetensors().load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (ImportError, OSError):
        raise
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"path: expected a checkpoint that torch or safetensors can read, got {path}") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) and isinstance(n, str) for n, x in found.items()):
        raise ValueError(f"path: expected a dict of tensors, got another thing in {path}")
    others = [
        f"{name} of {x.layout if x.dtype in DTYPES else x.dtype}"
        for name, x in found.items() if x.dtype not in DTYPES or x.layout != torch.strided
    ]  # fmt: skip
    if others:
        raise ValueError(f"path: expected weights of {', '.join(map(str, DTYPES))} in {path}, got {', '.join(others)}")
    return _apart(found)


def _apart(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory: those that share it with one before are copied."""
    places = [x.untyped_storage().data_ptr() for x in held.values()]
    return {name: x.clone() if places[i] in places[:i] else x for i, (name, x) in enumerate(held.items())}


def write(path: str | os.PathLike[str], held: Mapping[str, Tensor]) -> None:
    """Write tensors by name; whoever reads the file meanwhile sees all of the old one or of the new one."""
    path = path_of("path", path)
    own = {name: x.detach().cpu().contiguous() for name, x in held.items()}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    os.close(handle)
    try:
        if path.suffix == ".safetensors":
            _safetensors().save_file(_apart(own), temporary)
        else:
            torch.save(own, temporary)
        mask = os.umask(0o077)  # which one cannot read without setting it
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def layers(path: str | os.PathLike[str], found: Iterable[str]) -> int:
    """Return the number of layers, once a file has as many tensors; raise ValueError if it has fewer."""
    names = [*found]
    places = [int(match[1]) for match in (re.match(r"blocks\.(\d{1,9})\.", name) for name in names) if match]
    count = 1 + max(places, default=0)
    if count > len(names):
        raise ValueError(f"path: expected tensors of {count} layers in {path}, got {len(names)} in all")
    return count


def check_names(path: str | os.PathLike[str], found: Iterable[str], expected: Iterable[str]) -> None:
    """Check that a file has all that a model has and nothing else; a ValueError has every missing or unknown name."""
    found, expected = list(found), list(expected)
    missing = [name for name in expected if name not in found]
    foreign = [name for name in found if name not in expected]
    listed = [("it lacks", missing), ("it also has", foreign)]
    problems = [f"{what} {', '.join(map(str, names))}" for what, names in listed if names]
    if problems:
        raise ValueError(f"path: expected the parameters of the model in {path}: {'; '.join(problems)}")


def matrix(path: str | os.PathLike[str], found: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """Return the sizes of a matrix of a file; raise ValueError if it is none."""
    shape = found[name].shape
    if len(shape) != 2:
        raise ValueError(f"path: expected a matrix for {name} in {path}, got shape {list(shape)}")
    return shape[0], shape[1]


def in_shape(
    path: str | os.PathLike[str], found: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a file's tensors in the shapes of a model but for dimensions of one; ValueError names all that differ."""
    others = [
        f"{name} {list(x.shape)} and not {list(like[name].shape)}"
        for name, x in found.items() if _longer(x) != _longer(like[name])
    ]  # fmt: skip
    if others:
        raise ValueError(f"path: expected the shapes of one model in {path}, got {', '.join(others)}")
    return {name: x.reshape(like[name].shape) for name, x in found.items()}


def _longer(x: Tensor) -> list[int]:
    return [size for size in x.shape if size > 1]


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of safetensors need it: pip install safetensors") from error
    return safetensors.torch
