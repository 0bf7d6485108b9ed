"""Modules for training and decoding, made of the ops: each name loads its module when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "RWKV7": "rwkv_jit.nn.model",
    "RWKV7Block": "rwkv_jit.nn.rwkv7",
    "RWKV7ChannelMix": "rwkv_jit.nn.rwkv7",
    "RWKV7State": "rwkv_jit.nn.rwkv7",
    "RWKV7TimeMix": "rwkv_jit.nn.rwkv7",
}
__all__ = ["RWKV7", "RWKV7Block", "RWKV7ChannelMix", "RWKV7State", "RWKV7TimeMix"]

if TYPE_CHECKING:
    from rwkv_jit.nn.model import RWKV7
    from rwkv_jit.nn.rwkv7 import RWKV7Block, RWKV7ChannelMix, RWKV7State, RWKV7TimeMix


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv_jit.nn' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
