"""The legal values of options that are names: checks read them at run time, type checkers as types."""

from __future__ import annotations

from typing import Literal

Decay = Literal["raw", "sigmoid", "log", "direct"]
Backend = Literal["auto", "recurrent", "chunked", "split", "reference"]
StateLayout = Literal["vk", "kv"]
Wkv4Decay = Literal["raw", "log"]
Wkv4Backend = Literal["auto", "recurrent", "split", "reference"]
TimexBackend = Literal["auto", "tiles", "transforms", "fft", "reference"]
ReplayOp = Literal[
    "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "kda", "gated_delta_rule", "delta_rule", "gated_delta_rule2",
    "simple_gla", "hgrn2", "ssd",
]  # fmt: skip
Rounding = Literal["nearest", "stochastic"]
Precision = Literal["medium", "high"]
# These are in the order of the numbers that kernels have for them.
Kind = Literal["identity", "tanh", "sigmoid", "relu_squared"]
Gate = Literal["identity", "sigmoid", "silu"]
BetaMap = Literal["identity", "sigmoid", "twice_sigmoid"]
RateMap = Literal["sigmoid", "identity"]
Norm = Literal["layer", "rms"]
Activation = Literal["silu"]
Total = Literal["mean", "sum"]
Reduction = Literal[Total, "none"]
