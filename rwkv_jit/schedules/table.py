"""The ops: what each one is."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from rwkv_jit.schedules.legal import TimexBackend, Wkv4Backend, Wkv4Decay
from rwkv_jit.schedules.problem import Op

if TYPE_CHECKING:
    from rwkv_jit.kernels.template import Parameter

_KEY, _VALUE = "BTHK", "BTHV"
# An input that an op does not have still has a type in the templates.
_NO_U: dict[str, Parameter] = {"BONUS": False, "T_U": "fp32"}
_NO_W: dict[str, Parameter] = {"DECAY": "none", "T_W": "fp32"}

OPS = {
    op.name: op
    for op in (
        Op(
            "wkv4", dict(w="C", u="C", k="BTC", v="BTC"), "wkv4", "wkv4", state="SC", state_types=("fp32",),
            sizes={"S": 3}, output="BTC", lead=2, decays=get_args(Wkv4Decay), backends=get_args(Wkv4Backend),
        ),
        Op(
            "wkv5", dict(r=_KEY, k=_KEY, v=_VALUE, w="HK", u="HK"), "diagonal", "gla",
            constants={"BONUS": True}, backward_constants={"CONSTANT_DECAY": True},
        ),
        Op(
            "wkv6", dict(r=_KEY, k=_KEY, v=_VALUE, w=_KEY, u="HK"), "diagonal", "gla",
            constants={"BONUS": True}, backward_constants={"CONSTANT_DECAY": False},
        ),
        Op("wkv7", dict(r=_KEY, w=_KEY, k=_KEY, v=_VALUE, a=_KEY, b=_KEY), "delta", "wkv7"),
        Op(
            "gla", dict(r=_KEY, k=_KEY, v=_VALUE, w=_KEY), "diagonal", "gla", ("q", "k", "v", "g"), "HKV", decay="log",
            scale=None, constants=_NO_U, backward_constants={"CONSTANT_DECAY": False},
        ),
        Op(
            "linear_attention", dict(r=_KEY, k=_KEY, v=_VALUE), "diagonal", "gla", ("q", "k", "v"), "HKV",
            decay="none", scale=None, constants=_NO_U | _NO_W, backward_constants={"CONSTANT_DECAY": False},
        ),
        Op(
            "timex", dict(w="CT", k="BCT"), "timex", "timex", state="", output="BCT", lead=1, decay="none",
            wide=("w",), backends=get_args(TimexBackend),
        ),
    )
}  # fmt: skip

# Ops that may run through one of these. Kernels call q r, g w, A_log a_log; of `ssd` x v, dt beta, A a_log, B k, C r
# and D own.
_QUERY_KEY, _HEADS = "BTGK", "BTH"
_LOGARITHMS = ("log",)  # decays have no map to choose; those of channels may have a bound, which is a hint
_GATE = ("a_log", "dt_bias")
_WIDE = ("w", "beta", *_GATE)
_SWITCHES = {"qk_norm": False, "beta_map": "identity"}

DERIVED = {
    op.name: op
    for op in (
        Op(
            "kda", dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_KEY, beta=_HEADS, a_log="H", dt_bias="HK"),
            "channel_decay", "channel_decay", ("q", "k", "v", "g", "beta", "A_log", "dt_bias"), "HKV", scale=None,
            decay="log", decays=_LOGARITHMS, wide=_WIDE, optional=_GATE, also={"dt_bias": "(HK)"},
            traits={"lower_bound": None, **_SWITCHES}, through=OPS["wkv7"],
        ),
        Op(
            "gated_delta_rule",
            dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_HEADS, beta=_HEADS, a_log="H", dt_bias="H"),
            "head_decay", "head_decay", ("q", "k", "v", "g", "beta", "A_log", "dt_bias"), "HKV", scale=None,
            decay="none", wide=_WIDE, optional=_GATE, traits=_SWITCHES, through=OPS["wkv7"],
        ),
        Op(
            "delta_rule", dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, beta=_HEADS), "head_decay", "head_decay",
            ("q", "k", "v", "beta"), "HKV", scale=None, decay="none", wide=_WIDE, traits=_SWITCHES,
            through=OPS["wkv7"],
        ),
        Op(
            "gated_delta_rule2",
            dict(
                r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_KEY, beta=_KEY, write_gate=_VALUE, a_log="H",
                dt_bias="HK",
            ),
            "", "wkv7", ("q", "k", "v", "g", "beta", "write_gate", "A_log", "dt_bias"), "HKV", scale=None, decay="log",
            decays=_LOGARITHMS, wide=_WIDE, optional=_GATE, also={"dt_bias": "(HK)"},
            traits={"lower_bound": None, "qk_norm": False}, through=OPS["wkv7"],
        ),
        Op(
            "simple_gla", dict(r=_QUERY_KEY, k=_QUERY_KEY, v=_VALUE, w=_HEADS), "head_decay", "head_decay",
            ("q", "k", "v", "g"), "HKV", scale=None, decay="none", wide=_WIDE, also={"w": "H"}, through=OPS["gla"],
        ),
        Op(
            "hgrn2", dict(r=_KEY, w=_KEY, v=_VALUE), "", "gla", ("q", "g", "v"), "HKV", decay="log",
            decays=_LOGARITHMS, wide=_WIDE, through=OPS["gla"],
        ),
        Op(
            "ssd",
            dict(
                v=_VALUE, beta=_HEADS, a_log="H", k=_QUERY_KEY, r=_QUERY_KEY, own=_VALUE[2:], z=_VALUE, dt_bias="H",
            ),
            "head_decay", "head_decay", ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"), "HVK", decay="none",
            wide=(*_WIDE, "own"), optional=("own", "z", "dt_bias"), also={"own": "H"},
            traits={"dt_softplus": False, "least_step": None, "most_step": None}, through=OPS["gla"],
        ),
    )
}  # fmt: skip

ALL = {**OPS, **DERIVED}  # every op over sequences


def takes(op: Op, template: str) -> bool:
    """Return whether calls of an op may take kernels of a template of the library: for it alone, or shared."""
    stems = {other.stem for other in OPS.values()}
    return next((stem for stem in stems if template.startswith(f"{stem}_")), op.stem) == op.stem
