"""The torch ops of layers: registered at once, as an exported program names them, run by modules imported later."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """A torch op.

    Attributes
    ----------
    schema : str
        What it takes and returns.
    module : str
        Which one has what runs it: functions whose names begin with that of the op and end with those below.
    has_gradient : bool
        Whether `..._setup` keeps what `..._backward` takes.
    is_in_place : bool
        Whether it changes tensors, and `..._record` stands at torch's Autograd key.
    """

    schema: str
    module: str
    has_gradient: bool = False
    is_in_place: bool = False


_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")
_OPS = {
    "layer_step": Entry(
        "(str step, Tensor?[] inputs, Tensor(a!)[] written, int null_index, float eps, str[] kinds) -> ()",
        "rwkv_jit.layers.calls", is_in_place=True,
    ),
}  # fmt: skip


def find(name: str) -> Any:
    """Return the torch op of a name."""
    return getattr(torch.ops.rwkv_jit, name).default


def _later(name: str, part: str) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(_OPS[name].module), f"{name}_{part}")(*arguments, **named)

    return run


def _register(name: str, entry: Entry) -> None:
    _LIBRARY.define(name + entry.schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _later(name, "run"), key)
    torch.library.register_fake(f"rwkv_jit::{name}", _later(name, "fake"), lib=_LIBRARY)
    if entry.is_in_place:
        _LIBRARY.impl(name, _later(name, "record"), "Autograd", with_keyset=True)
    elif entry.has_gradient:
        torch.library.register_autograd(
            f"rwkv_jit::{name}", _later(name, "backward"), setup_context=_later(name, "setup"), lib=_LIBRARY
        )


for _name, _entry in _OPS.items():
    _register(_name, _entry)
