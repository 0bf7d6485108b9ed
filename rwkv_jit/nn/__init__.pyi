"""Modules for training and decoding, built on the ops: each name loads its module when it is used."""

# tools/stubs.py has written this.
# ruff: noqa
# fmt: off

from rwkv_jit.nn.attention import GatedLinearAttention as GatedLinearAttention
from rwkv_jit.nn.attention import LinearAttention as LinearAttention
from rwkv_jit.nn.convolution import TimeX as TimeX
from rwkv_jit.nn.delta import GatedDeltaNet as GatedDeltaNet
from rwkv_jit.nn.delta import KimiDeltaAttention as KimiDeltaAttention
from rwkv_jit.nn.graphed_training import graphed_step as graphed_step
from rwkv_jit.nn.graphs import graphed_decode as graphed_decode
from rwkv_jit.nn.mamba2 import Mamba2 as Mamba2
from rwkv_jit.nn.model import RWKV5 as RWKV5
from rwkv_jit.nn.model import RWKV6 as RWKV6
from rwkv_jit.nn.model import RWKV7 as RWKV7
from rwkv_jit.nn.rwkv4 import RWKV4ChannelMix as RWKV4ChannelMix
from rwkv_jit.nn.rwkv4 import RWKV4TimeMix as RWKV4TimeMix
from rwkv_jit.nn.rwkv5 import RWKV5Block as RWKV5Block
from rwkv_jit.nn.rwkv5 import RWKV5ChannelMix as RWKV5ChannelMix
from rwkv_jit.nn.rwkv5 import RWKV5State as RWKV5State
from rwkv_jit.nn.rwkv5 import RWKV5TimeMix as RWKV5TimeMix
from rwkv_jit.nn.rwkv6 import RWKV6Block as RWKV6Block
from rwkv_jit.nn.rwkv6 import RWKV6ChannelMix as RWKV6ChannelMix
from rwkv_jit.nn.rwkv6 import RWKV6State as RWKV6State
from rwkv_jit.nn.rwkv6 import RWKV6TimeMix as RWKV6TimeMix
from rwkv_jit.nn.rwkv7 import RWKV7Block as RWKV7Block
from rwkv_jit.nn.rwkv7 import RWKV7ChannelMix as RWKV7ChannelMix
from rwkv_jit.nn.rwkv7 import RWKV7State as RWKV7State
from rwkv_jit.nn.rwkv7 import RWKV7TimeMix as RWKV7TimeMix

__all__ = [
    "GatedDeltaNet", "GatedLinearAttention", "KimiDeltaAttention", "LinearAttention", "Mamba2", "RWKV4ChannelMix",
    "RWKV4TimeMix", "RWKV5", "RWKV5Block", "RWKV5ChannelMix", "RWKV5State", "RWKV5TimeMix", "RWKV6", "RWKV6Block",
    "RWKV6ChannelMix", "RWKV6State", "RWKV6TimeMix", "RWKV7", "RWKV7Block", "RWKV7ChannelMix", "RWKV7State",
    "RWKV7TimeMix", "TimeX", "graphed_decode", "graphed_step"
]
