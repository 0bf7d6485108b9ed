"""The derived ops: what each one is.

Key heads, G, are those of q and k; H are those of v, and a multiple of them.
"""

from __future__ import annotations

from rwkv_jit.problem import Op

_QUERY_KEY, _VALUE, _CHANNELS, _HEADS = "BTGK", "BTHV", "BTHK", "BTH"
_LOGARITHMS = ("log",)  # decays have no map to choose; those of channels may have a bound, which is a hint

OPS = {
    op.name: op
    for op in (
        Op(
            "kda", dict(q=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, g=_CHANNELS, beta=_HEADS), state="HKV", scale=None,
            wide=("g", "beta"), decay="log", decays=_LOGARITHMS,
        ),
        Op(
            "gated_delta_rule", dict(q=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, g=_HEADS, beta=_HEADS), state="HKV",
            scale=None, decay="none", wide=("g", "beta"),
        ),
        Op(
            "delta_rule", dict(q=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, beta=_HEADS), state="HKV", scale=None,
            decay="none", wide=("beta",),
        ),
        Op(
            "gated_delta_rule2",
            dict(q=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, g=_CHANNELS, beta=_CHANNELS, write_gate=_VALUE), state="HKV",
            scale=None, wide=("g", "beta"), decay="log", decays=_LOGARITHMS,
        ),
        Op(
            "simple_gla", dict(q=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, g=_HEADS), state="HKV", scale=None, decay="none",
            wide=("g",),
        ),
        Op(
            "hgrn2", dict(q=_CHANNELS, g=_CHANNELS, v=_VALUE), state="HKV", wide=("g",), decay="log",
            decays=_LOGARITHMS,
        ),
        Op(
            "ssd", dict(x=_VALUE, dt=_HEADS, B=_QUERY_KEY, C=_QUERY_KEY), state="HVK", decay="none", wide=("dt",),
        ),
    )
}  # fmt: skip
