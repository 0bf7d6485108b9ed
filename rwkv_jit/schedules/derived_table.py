"""The derived ops. Kernels call q r, g w, A_log a_log; of `ssd` x v, dt beta, A a_log, B k, C r and D own."""

from __future__ import annotations

from dataclasses import replace

from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import OPS as BASE

_QUERY_KEY, _VALUE, _CHANNELS, _HEADS = "BTGK", "BTHV", "BTHK", "BTH"
_LOGARITHMS = ("log",)  # decays have no map to choose; those of channels may have a bound, which is a hint
_GATE = ("a_log", "dt_bias")
_WIDE = ("w", "beta", *_GATE)
_SWITCHES = {"qk_norm": False, "beta_map": "identity"}

OPS = {
    op.name: op
    for op in (
        Op(
            "kda", dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_CHANNELS, beta=_HEADS, a_log="H", dt_bias="HK"),
            "channel_decay", "channel_decay", ("q", "k", "v", "g", "beta", "A_log", "dt_bias"), "HKV", scale=None,
            decay="log", decays=_LOGARITHMS, wide=_WIDE, optional=_GATE, also={"dt_bias": "(HK)"},
            traits={"lower_bound": None, **_SWITCHES}, through=BASE["wkv7"],
        ),
        Op(
            "gated_delta_rule",
            dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_HEADS, beta=_HEADS, a_log="H", dt_bias="H"),
            "head_decay", "head_decay", ("q", "k", "v", "g", "beta", "A_log", "dt_bias"), "HKV", scale=None,
            decay="none", wide=_WIDE, optional=_GATE, traits=_SWITCHES, through=BASE["wkv7"],
        ),
        Op(
            "delta_rule", dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, beta=_HEADS), "head_decay", "head_decay",
            ("q", "k", "v", "beta"), "HKV", scale=None, decay="none", wide=_WIDE, traits=_SWITCHES,
            through=BASE["wkv7"],
        ),
        Op(
            "gated_delta_rule2",
            dict(
                r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_CHANNELS, beta=_CHANNELS, write_gate=_VALUE, a_log="H",
                dt_bias="HK",
            ),
            "", "wkv7", ("q", "k", "v", "g", "beta", "write_gate", "A_log", "dt_bias"), "HKV", scale=None, decay="log",
            decays=_LOGARITHMS, wide=_WIDE, optional=_GATE, also={"dt_bias": "(HK)"},
            traits={"lower_bound": None, "qk_norm": False}, through=BASE["wkv7"],
        ),
        Op(
            "simple_gla", dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_HEADS), "head_decay", "head_decay",
            ("q", "k", "v", "g"), "HKV", scale=None, decay="none", wide=_WIDE, also={"w": "H"}, through=BASE["gla"],
        ),
        Op(
            "hgrn2", dict(r=_CHANNELS, w=_CHANNELS, v=_VALUE), "", "gla", ("q", "g", "v"), "HKV", decay="log",
            decays=_LOGARITHMS, wide=_WIDE, through=BASE["gla"],
        ),
        Op(
            "ssd",
            dict(
                v=_VALUE, beta=_HEADS, a_log="H", k=_QUERY_KEY, r=_QUERY_KEY, own=_VALUE[2:], z=_VALUE, dt_bias="H",
            ),
            "head_decay", "head_decay", ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"), "HVK", decay="none",
            wide=(*_WIDE, "own"), optional=("own", "z", "dt_bias"), also={"own": "H"},
            traits={"dt_softplus": False, "least_step": None, "most_step": None}, through=BASE["gla"],
        ),
    )
}  # fmt: skip

ALL = {**BASE, **OPS}  # every op over sequences


def _with_rows_alone(op: Op) -> Op:
    """Return an op of the inputs with tokens that every call has, by the names that callers know."""
    named = list(zip(op.public_names, op.names, op.inputs.values(), strict=True))
    inputs = {public: dims for public, name, dims in named if "T" in dims and name not in op.optional}
    wide = tuple(public for public, name, _ in named if name in op.wide)
    return replace(op, inputs=inputs, public=(), wide=wide, optional=())


# What benchmarks make.
ROWS = {name: _with_rows_alone(op) for name, op in OPS.items()}
