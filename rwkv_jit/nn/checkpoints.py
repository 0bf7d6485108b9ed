"""Files of parameters: what is in one, whether it is all of a model, and how one is written."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from rwkv_jit.kernels.cache.files import path_of
from rwkv_jit.kernels.errors import brief

Model = TypeVar("Model", bound="InFiles")
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


class InFiles(nn.Module):
    """A model that is read from official checkpoints, and written to files like these."""

    _by_head: ClassVar[str]  # a parameter of time mixing [heads, head size]
    _unused: ClassVar[frozenset[str]] = frozenset()  # what files of the official trainer may have, and nobody reads

    @classmethod
    def from_checkpoint(
        cls: type[Model], path: str | os.PathLike[str], *, device: Any = None, dtype: torch.dtype | None = None
    ) -> Model:
        """Return the model of an official checkpoint, whose sizes are read from the shapes in it.

        Parameters
        ----------
        path : str or path
            A file of `torch.save`, or of safetensors if its name ends so.
        device : torch.device or str, optional
            Device of the parameters; by default the CPU.
        dtype : torch.dtype, optional
            Of the parameters; by default as in the file.

        Returns
        -------
        a model of this class

        Raises
        ------
        TypeError
            `dtype` is none of float32, bfloat16, float16 and float64.
        ValueError
            The file has other parameters than this model: every name that is missing or unknown, every tensor that has
            another shape, or every one of another dtype than these four. v0, v1 and v2 of the first layer of RWKV-7,
            which are not used, may be there.
        ImportError, OSError
            safetensors is not installed; or the file cannot be read.
        """
        if dtype not in (None, *DTYPES):
            raise TypeError(f"dtype: expected {' or '.join(map(str, DTYPES))}, got {brief(dtype)}")
        found = {name: x for name, x in read(path).items() if name not in cls._unused}
        height, make = layers(path, found), cast("Callable[..., Model]", cls)  # whose arguments differ
        check_names(path, found, make(1, 1, height, 1, hidden=1, device="meta").state_dict())
        vocabulary, width = matrix(path, found, "emb.weight")
        _, head_size = matrix(path, found, f"blocks.0.att.{cls._by_head}")
        hidden, _ = matrix(path, found, "blocks.0.ffn.key.weight")
        more = cls._sizes_in(path, found)
        model = make(vocabulary, width, height, head_size, hidden=hidden, **more, device="meta")
        held = in_shape(path, found, model.state_dict())
        model.load_state_dict({name: x.to(device, dtype) for name, x in held.items()}, assign=True)
        return model

    @staticmethod
    def _sizes_in(path: str | os.PathLike[str], found: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the sizes that only models of this class have, as arguments of it, from the tensors of a file."""
        return {}

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters to a file that official programs read.

        Parameters
        ----------
        path : str or path
            The file; in the format of safetensors if its name ends in .safetensors, and otherwise of `torch.save`. Tied
            weights are written under each name, and are separate in a model read from it.

        Raises
        ------
        ImportError, OSError
            safetensors is not installed; or the file cannot be written. An older file stays.
        """
        write(path, self.state_dict())
