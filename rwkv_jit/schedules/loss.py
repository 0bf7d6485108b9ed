"""The kernels of the training loss, where a row has the same result in any batch: how rows are cut, and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules.common import ACCESS_BYTES
from rwkv_jit.schedules.problem import BYTES, Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step

_LEAST_THREADS, _MOST_THREADS = 32, 512
_MOST_IN_PLACE = 1024  # so that the rows that are read twice, one or two of a multiprocessor, are near by
_SCALE_THREADS = 256
MOST_COLUMNS = 2**31 - 1  # as kernels count them
OPS = {
    "forward": Op("cross_entropy", dict(logits="NC", targets="N")),
    "backward": Op("cross_entropy", dict(logits="NC", targets="N", lse="N", argmax="N", scale="N")),
    "in_place": Op("cross_entropy", dict(logits="NC", targets="N")),
    "scale": Op("linear_cross_entropy", dict(x="N", scale="N")),
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


def backward(given: Given) -> Schedule:
    """Return the launch that makes the gradient of the logits."""
    results = {"dlogits": Result((given.rows, given.columns), given.storage)}
    return _schedule("backward", given, results, {"l2_wrap": given.l2_wrap})


def in_place(given: Given) -> Schedule:
    """Return the launch for losses of rows that leaves the gradient of their sum in the place of the logits."""
    results = {"loss": Result((given.rows,), "fp32")}
    return _schedule("in_place", given, results, {"l2_wrap": given.l2_wrap}, _MOST_IN_PLACE)


DIRECTIONS = {"forward": forward, "backward": backward, "in_place": in_place}


def scale(gpu: Gpu, storage: str, shape: Sequence[int], made: str) -> tuple[Schedule, Problem]:
    """Return the launch that multiplies elements of a type by a number, and makes those of another; and its problem."""
    count = prod(shape)
    vector = next(x for x in (8, 4, 2, 1) if count % x == 0 and x * BYTES[made] <= ACCESS_BYTES)
    parameters: dict[str, Parameter] = {
        "T_X": storage, "T_IO": made, "VECTOR": vector, "NUM_THREADS": _SCALE_THREADS,
    }  # fmt: skip
    grid = ceil(count / (vector * _SCALE_THREADS)), 1, 1
    step = Step("layer_loss_gradients", "layer_loss_gradients", parameters, grid, {"count": count})
    vectors = {"x": min(vector, ACCESS_BYTES // BYTES[storage])}
    schedule = Schedule((step,), {"y": Result(tuple(shape), made)}, vectors=vectors)
    return schedule, Problem(OPS["scale"], gpu, {"x": storage})


def _schedule(
    direction: str, given: Given, results: Mapping[str, Result], bind: Mapping[str, Any], most: int = _MOST_THREADS
) -> Schedule:
    vector = ACCESS_BYTES // BYTES[given.storage]
    pieces = ceil(given.columns / vector)
    threads = min(max(1 << (pieces - 1).bit_length(), _LEAST_THREADS), most)
    parameters: dict[str, Parameter] = {
        "T_IO": given.storage, "VECTOR": vector, "NUM_THREADS": threads, "TARGET_BYTES": given.target_bytes,
        "HAS_ARGMAX": bool(given.l2_wrap),
    }  # fmt: skip
    name = f"layer_loss_{direction}"
    bound = {"columns": given.columns, "ignore_index": given.ignore_index, **bind}
    step = Step(name, name, parameters, (given.rows, 1, 1), bound)
    return Schedule((step,), results, vectors={"logits": vector})
