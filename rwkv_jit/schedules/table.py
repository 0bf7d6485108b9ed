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


def takes(op: Op, template: str) -> bool:
    """Return whether calls of an op may take kernels of a template of the library: for it alone, or shared."""
    stems = {other.stem for other in OPS.values()}
    return next((stem for stem in stems if template.startswith(f"{stem}_")), op.stem) == op.stem
