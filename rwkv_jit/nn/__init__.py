"""Modules for training and decoding, built on the ops: each name loads its module when it is used.

Where an argument does not fit, all of them raise TypeError or ValueError: the message has its name, what was expected
and what came.
"""

from __future__ import annotations

from rwkv_jit.kernels import lazy

_MODULES = lazy.modules({
    "nn.delta": "GatedDeltaNet KimiDeltaAttention",
    "nn.graphed_training": "graphed_step",
    "nn.graphs": "graphed_decode",
    "nn.attention": "GatedLinearAttention LinearAttention",
    "nn.mamba2": "Mamba2",
    "nn.rwkv4": "RWKV4ChannelMix RWKV4TimeMix",
    "nn.model": "RWKV5 RWKV6 RWKV7",
    "nn.rwkv5": "RWKV5Block RWKV5ChannelMix RWKV5State RWKV5TimeMix",
    "nn.rwkv6": "RWKV6Block RWKV6ChannelMix RWKV6State RWKV6TimeMix",
    "nn.rwkv7": "RWKV7Block RWKV7ChannelMix RWKV7State RWKV7TimeMix",
    "nn.convolution": "TimeX",
})  # fmt: skip
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy.members(globals())
