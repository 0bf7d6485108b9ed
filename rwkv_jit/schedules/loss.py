"""The kernels of the training loss, where a row has the same result in any batch: how rows are cut, and launches."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules.problem import BYTES, Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step

_ACCESS_BYTES = 16
_LEAST_THREADS, _MOST_THREADS = 32, 512
MOST_COLUMNS = 2**31 - 1  # as kernels count them
OPS = {
    "forward": Op("cross_entropy", dict(logits="NC", targets="N")),
    "backward": Op("cross_entropy", dict(logits="NC", targets="N", lse="N", argmax="N", scale="N")),
}


class Given(NamedTuple):
    """What a call has."""

    gpu: Gpu  # what kernels are chosen and compiled for
    storage: str  # the type of the logits
    rows: int  # of the logits
    columns: int
    target_bytes: int = 8  # of a target: 4 or 8
    ignore_index: int = -100  # the target of rows that do not count
    l2_wrap: float = 0.0  # the factor of the largest logit in its gradient; 0 for none


def problem(direction: str, given: Given) -> Problem:
    """Return the problem of a call, as plans want one."""
    return Problem(OPS[direction], given.gpu, {"logits": given.storage})


def forward(given: Given) -> Schedule:
    """Return the launch for losses of rows, and lse and argmax (bits of int32 in float32) for their gradient."""
    names = ("loss", "lse", "argmax") if given.l2_wrap else ("loss", "lse")
    results = {name: Result((given.rows,), "fp32") for name in names}
    return _schedule("forward", given, results, {} if given.l2_wrap else {"argmax": None})


def backward(given: Given, in_place: bool) -> Schedule:
    """Return the launch that makes the gradient of the logits, in their place or beside them."""
    results = {} if in_place else {"dlogits": Result((given.rows, given.columns), given.storage)}
    bind = {"l2_wrap": given.l2_wrap, "dlogits": "logits" if in_place else "dlogits"}
    return _schedule("backward", given, results, bind)


def _schedule(direction: str, given: Given, results: Mapping[str, Result], bind: Mapping[str, Any]) -> Schedule:
    vector = _ACCESS_BYTES // BYTES[given.storage]
    pieces = ceil(given.columns / vector)
    threads = min(max(1 << (pieces - 1).bit_length(), _LEAST_THREADS), _MOST_THREADS)
    parameters: dict[str, Parameter] = {
        "T_IO": given.storage, "VECTOR": vector, "NUM_THREADS": threads, "TARGET_BYTES": given.target_bytes,
        "HAS_ARGMAX": bool(given.l2_wrap),
    }  # fmt: skip
    name = f"layer_loss_{direction}"
    bound = {"columns": given.columns, "ignore_index": given.ignore_index, **bind}
    step = Step(name, name, parameters, (given.rows, 1, 1), bound)
    return Schedule((step,), results, vectors={"logits": vector})
