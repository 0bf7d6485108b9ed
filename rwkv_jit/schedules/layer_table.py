"""The small ops of a layer: inputs and results by name, of N rows, C channels, H heads, K, G mixes, S sequences."""

from __future__ import annotations

from typing import Any

from rwkv_jit.schedules.problem import Op

MOST_MIXES = 6
_HEAD = "NHK"
OPS = {
    op.name: op
    for op in (
        Op(
            "shift_mix", dict(x="NC", add="NC", weight="C", bias="C", mixes="GC"), wide=("weight", "bias", "mixes"),
            optional=("add",), traits={"mixes": 1},
        ),
        Op(
            "prepare_keys",
            dict(
                k=_HEAD, v=_HEAD, rate=_HEAD, v_first=_HEAD, v_gate=_HEAD, k_k="HK", k_a="HK", a0="HK", v0="HK",
                r=_HEAD, r_k="HK",
            ),
            wide=("rate", "v_gate", "k_k", "k_a", "a0", "v0", "r_k"),
            optional=("v_first", "v_gate", "a0", "v0", "r", "r_k"), traits={"rate_map": "sigmoid"},
        ),
        Op(
            "gated_norm",
            dict(y=_HEAD, g=_HEAD, weight="HK", bias="HK", r=_HEAD, k=_HEAD, v=_HEAD, r_k="HK", bonus=_HEAD),
            wide=("r_k", "weight", "bias"), optional=("bias", "r", "k", "v", "r_k", "bonus"),
            traits={"gate": "identity", "norm": "layer"},
        ),
        Op("activate", dict(x="NC"), wide=()),
        Op("gated", dict(x="N", g="N"), wide=(), traits={"gate": "sigmoid"}),
        Op(
            "token_shift", dict(x="NC", mixes="GC", amounts="GNC", first="SC"), wide=("mixes",),
            optional=("amounts", "first"), traits={"mixes": 1},
        ),
        Op(
            "norm_shift", dict(x="NC", add="NC", weight="C", bias="C", mixes="GC", first="SC"),
            wide=("weight", "bias", "mixes"), optional=("add", "first"), traits={"mixes": 1, "mixed": None},
        ),
    )
}  # fmt: skip
_CONVOLVED = {"x": "BTC", "weight": "CW", "bias": "C"}
_TAPS = ("weight", "bias")
# Those from `state_len` on are of updates; without a length a slot has a token less than there are taps.
_OF_TAPS = {"taps": 4, "activation": "identity", "state_len": None, "channels_last": False, "ring": False}
_OF_TEXTS: dict[str, Any] = {"wide": _TAPS, "optional": ("bias", "initial_state"), "traits": _OF_TAPS}
CONVOLUTION = Op("causal_conv1d", {**_CONVOLVED, "initial_state": "NCS"}, **_OF_TEXTS)
CONVOLUTION_UPDATE = Op("causal_conv1d_update", _CONVOLVED, wide=_TAPS, optional=("bias",), traits=_OF_TAPS)
# Products of a few rows with matrices, up to so many in one launch.
MOST_PRODUCTS = 8
_OF_PRODUCT = {"x": "ND", "weight": "CD", "bias": "C", "gate": "NC", "add": "NC"}
PRODUCTS = Op(
    "products", {f"{x}{p}": dims for p in range(MOST_PRODUCTS) for x, dims in _OF_PRODUCT.items()}, wide=(),
    optional=tuple(f"{x}{p}" for p in range(MOST_PRODUCTS) for x in _OF_PRODUCT if p or x not in ("x", "weight")),
)  # fmt: skip
FUNCTIONS = {**OPS, CONVOLUTION.name: CONVOLUTION}  # all that kernels are compiled for ahead of calls
PACKED = ("token_shift", "norm_shift", "causal_conv1d")  # whose last input says where texts end
# What gradients come of, by the names that forwards have for their results.
RESULTS: dict[str, dict[str, str]] = {
    "prepare_keys": dict.fromkeys(("new_k", "new_v", "a", "b", "bonus"), "NHK"),
    "gated_norm": {"out": "NHK"},
    "activate": {"y": "NC"},
    "gated": {"y": "N"},
    "token_shift": {f"mixed{m}": "NC" for m in range(MOST_MIXES)},
    "norm_shift": {"residual": "NC", **{f"mixed{m}": "NC" for m in range(MOST_MIXES)}, "last": "SC"},
    "causal_conv1d": {"y": "BTC"},
}
# What forwards make for backwards alone.
KEPT: dict[str, dict[str, str]] = {"norm_shift": {"stats": "N"}}
