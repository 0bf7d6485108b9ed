"""The derived ops: what each one is.

Key heads, G, are those of q and k; H are those of v, and a multiple of them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, get_args

from rwkv_jit.schedules.legal import BetaMap
from rwkv_jit.schedules.problem import Op

if TYPE_CHECKING:
    from rwkv_jit.kernels.template import Parameter

_QUERY_KEY, _VALUE, _CHANNELS, _HEADS = "BTGK", "BTHV", "BTHK", "BTH"
# As the templates count them.
RATE_MAPS: tuple[str, ...] = get_args(BetaMap)
GATES = ("given", "softplus", "bounded")
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


class Core(NamedTuple):
    """What kernels of their own know of ops with one decay for a head."""

    has_delta: bool
    has_decay: bool = True
    has_rate: bool = True
    has_norm: bool = False
    has_own: bool = False  # an output has a part of its value itself
    has_gate: bool = False  # decays are raw, and go through the softplus with A_log
    has_bias: bool = False  # .. and dt_bias
    has_step: bool = False  # rates are raw steps, behind the softplus and dt_bias, and decays are A times these
    rate_map: str = "identity"

    @property
    def op(self) -> Op:
        """Return it as an op."""
        return _as_op(self)


@cache
def _as_op(core: Core) -> Op:
    gates = {"w": _HEADS} if core.has_decay and not core.has_step else {}
    rates = {"beta": _HEADS} if core.has_rate else {}
    absent: dict[str, Parameter] = {} if core.has_decay else {"T_W": "fp32"}
    absent |= {} if core.has_rate else {"T_BETA": "fp32"}
    more = {"own": "HV"} if core.has_own else {}
    is_raw = core.has_gate or core.has_step
    more |= {name: "H" for name, has_it in (("a_log", is_raw), ("dt_bias", core.has_bias)) if has_it}
    return Op(
        "_".join(["head_decay", *(name for name, has_it in core._asdict().items() if has_it is True), core.rate_map]),
        {"r": _QUERY_KEY, "k": _QUERY_KEY, "v": _VALUE, **gates, **rates, **more}, "head_decay", "head_decay",
        ("q", "k", "v", *(["g"] if gates else []), *rates, *more), "HKV", decay="log" if core.has_decay else "none",
        decays=_LOGARITHMS, scale=None, wide=(*gates, *rates),
        constants={
            "HAS_DELTA": core.has_delta, "HAS_RATE": core.has_rate, "HAS_NORM": core.has_norm,
            "HAS_OWN": core.has_own, "HAS_GATE": is_raw, "HAS_STEP": core.has_step,
            "HAS_BIAS": core.has_bias, "BETA_MAP": RATE_MAPS.index(core.rate_map), **absent,
        },
    )  # fmt: skip


class ChannelCore(NamedTuple):
    """What kernels of their own know of Kimi Delta Attention, whose decays are of channels."""

    gate: str = "given"  # what log-decays are made with, of GATES
    has_norm: bool = False
    has_bias: bool = False
    rate_map: str = "identity"

    @property
    def op(self) -> Op:
        """Return it as an op."""
        return _as_channel_op(self)


@cache
def _as_channel_op(core: ChannelCore) -> Op:
    fixed = {} if core.gate == "given" else {"a_log": "H"}
    fixed |= {"dt_bias": "HK"} if core.has_bias else {}
    words = [core.gate, *(name for name, has_it in core._asdict().items() if has_it is True)]
    return Op(
        "_".join(["channel_decay", *words, core.rate_map]),
        {"r": _QUERY_KEY, "k": _QUERY_KEY, "v": _VALUE, "w": _CHANNELS, "beta": _HEADS, **fixed}, "channel_decay",
        "channel_decay", ("q", "k", "v", "g", "beta", *fixed), "HKV", decay="log", decays=_LOGARITHMS, scale=None,
        wide=("w", "beta"),
        constants={
            "GATE": GATES.index(core.gate), "HAS_NORM": core.has_norm, "HAS_BIAS": core.has_bias,
            "BETA_MAP": RATE_MAPS.index(core.rate_map),
        },
    )  # fmt: skip
