"""FLA's functions, layers and models on these kernels: `install` and nothing else.

`functions` and `family` have FLA's functions with FLA's arguments, also for programs without FLA.
"""

from __future__ import annotations

import sys
from importlib import import_module

from rwkv_jit.compat import replacing
from rwkv_jit.kernels import on_import

__all__ = ["install", "report", "uninstall"]

is_installed = False
_KINDS = {  # of functions, each in a module of its name, by the ops of FLA
    "delta_rule": "chunk fused_recurrent", "gated_delta_rule": "chunk fused_recurrent",
    "gdn2": "chunk fused_recurrent", "gla": "chunk fused_recurrent", "kda": "chunk fused_recurrent",
    "lightning_attn": "chunk fused_recurrent", "linear_attn": "chunk fused_chunk fused_recurrent",
    "retention": "chunk fused_chunk fused_recurrent parallel", "rwkv4": "fused_recurrent",
    "rwkv6": "chunk fused_recurrent", "simple_gla": "chunk fused_chunk fused_recurrent parallel",
}  # fmt: skip
# What is replaced, by the module of FLA that defines it: functions by their own names, layers by their classes.
FUNCTIONS = {
    "fla.ops.rwkv7.chunk": ("chunk_rwkv7",),
    "fla.ops.rwkv7.fused_recurrent": ("fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7"),
    "fla.ops.generalized_delta_rule.dplr.chunk": ("chunk_dplr_delta_rule",),
    "fla.ops.generalized_delta_rule.dplr.fused_recurrent": ("fused_recurrent_dplr_delta_rule",),
    "fla.modules.token_shift": ("token_shift",),
    **{f"fla.ops.{op}.{kind}": (f"{kind}_{op}",) for op, kinds in _KINDS.items() for kind in kinds.split()},
}
LAYERS = {"fla.layers.rwkv7": ("RWKV7Attention",), "fla.models.rwkv7.modeling_rwkv7": ("RWKV7FeedForward",)}
_PATCHES = f"{__name__}.patches"


def install() -> None:
    """Let FLA's functions and layers run on these kernels from now on, also in modules that are already imported.

    Calls that the kernels cannot do run FLA's code; `report` says which, and why. Nothing is imported: FLA's functions
    are replaced as soon as the program imports them. The environment variable RWKVJIT_FLA=1 does the same for a program
    that has no such line.

    A second call does nothing.
    """
    global is_installed
    with replacing.LOCK:
        is_installed = True
    on_import.imported((*FUNCTIONS, *LAYERS), _apply)


def uninstall() -> None:
    """Restore FLA's functions and layers."""
    global is_installed
    with replacing.LOCK:
        is_installed = False
        on_import.forget(_apply)
        getattr(sys.modules.get(_PATCHES), "take_back", lambda: None)()


def report() -> dict[str, dict[str, int]]:
    """Return how often each of FLA's functions and layers was called, by who ran it.

    Returns
    -------
    calls : dict of str to dict of str to int
        By name, "rwkv_jit" with the number of calls that these kernels ran, and "FLA: ..." with those that went to
        FLA's code, and why. Calls inside of compiled code are not counted.

    Examples
    --------
    >>> rwkv_jit.compat.fla.report()
    {'chunk_gla': {'rwkv_jit': 24}, 'fused_recurrent_gla': {'FLA: gv is not supported': 2}}
    """
    return getattr(sys.modules.get(_PATCHES), "counted", dict)()


def _apply(names: list[str]) -> None:
    """Replace what modules define that have been executed."""
    patches = import_module(_PATCHES)
    with replacing.LOCK:
        if is_installed:
            patches.apply(names)
