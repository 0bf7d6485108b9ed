"""Modules for training and decoding, made of the ops: each name loads its module when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "GatedDeltaNet": "rwkv_jit.nn.delta",
    "GatedLinearAttention": "rwkv_jit.nn.attention",
    "KimiDeltaAttention": "rwkv_jit.nn.delta",
    "LinearAttention": "rwkv_jit.nn.attention",
    "Mamba2": "rwkv_jit.nn.mamba2",
    "RWKV4ChannelMix": "rwkv_jit.nn.rwkv4",
    "RWKV4TimeMix": "rwkv_jit.nn.rwkv4",
    "RWKV5": "rwkv_jit.nn.model",
    "RWKV5Block": "rwkv_jit.nn.rwkv5",
    "RWKV5ChannelMix": "rwkv_jit.nn.rwkv5",
    "RWKV5State": "rwkv_jit.nn.rwkv5",
    "RWKV5TimeMix": "rwkv_jit.nn.rwkv5",
    "RWKV6": "rwkv_jit.nn.model",
    "RWKV6Block": "rwkv_jit.nn.rwkv6",
    "RWKV6ChannelMix": "rwkv_jit.nn.rwkv6",
    "RWKV6State": "rwkv_jit.nn.rwkv6",
    "RWKV6TimeMix": "rwkv_jit.nn.rwkv6",
    "RWKV7": "rwkv_jit.nn.model",
    "RWKV7Block": "rwkv_jit.nn.rwkv7",
    "RWKV7ChannelMix": "rwkv_jit.nn.rwkv7",
    "RWKV7State": "rwkv_jit.nn.rwkv7",
    "RWKV7TimeMix": "rwkv_jit.nn.rwkv7",
    "TimeX": "rwkv_jit.nn.convolution",
}
__all__ = [
    "RWKV5",
    "RWKV6",
    "RWKV7",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "Mamba2",
    "RWKV4ChannelMix",
    "RWKV4TimeMix",
    "RWKV5Block",
    "RWKV5ChannelMix",
    "RWKV5State",
    "RWKV5TimeMix",
    "RWKV6Block",
    "RWKV6ChannelMix",
    "RWKV6State",
    "RWKV6TimeMix",
    "RWKV7Block",
    "RWKV7ChannelMix",
    "RWKV7State",
    "RWKV7TimeMix",
    "TimeX",
]

if TYPE_CHECKING:
    from rwkv_jit.nn.attention import GatedLinearAttention, LinearAttention
    from rwkv_jit.nn.convolution import TimeX
    from rwkv_jit.nn.delta import GatedDeltaNet, KimiDeltaAttention
    from rwkv_jit.nn.mamba2 import Mamba2
    from rwkv_jit.nn.model import RWKV5, RWKV6, RWKV7
    from rwkv_jit.nn.rwkv4 import RWKV4ChannelMix, RWKV4TimeMix
    from rwkv_jit.nn.rwkv5 import RWKV5Block, RWKV5ChannelMix, RWKV5State, RWKV5TimeMix
    from rwkv_jit.nn.rwkv6 import RWKV6Block, RWKV6ChannelMix, RWKV6State, RWKV6TimeMix
    from rwkv_jit.nn.rwkv7 import RWKV7Block, RWKV7ChannelMix, RWKV7State, RWKV7TimeMix


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv_jit.nn' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
