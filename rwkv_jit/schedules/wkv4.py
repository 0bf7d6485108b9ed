"""wkv4: a thread walks over the tokens of a channel, all of them in one go or those of a part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step

CHUNK_LEN = 16  # tokens that a thread loads at once, and between the states that the forward saves
_UPDATE_LEN = 8  # of an update of several tokens
NUM_THREADS = 128

# Threads of a multiprocessor that keep it busy, and the least number of parts and of tokens of a part that are worth
# the second look at every token.
_BUSY_THREADS = 256
_LEAST_PARTS = 4
_LEAST_TOKENS = 64


def part_length(p: Problem) -> Any:
    """Return how many tokens a thread walks over: all, or those of a part, where channels of rows are few."""
    if p.backend == "recurrent":
        return p.T
    count = min(_BUSY_THREADS * (p.multiprocessors or 0) // max(p.B * p.C, 1), p.T // _LEAST_TOKENS)
    if p.backend == "split":
        count = max(count, 2)
    elif count < _LEAST_PARTS:
        return p.T
    return CHUNK_LEN * math.ceil(p.T / (count * CHUNK_LEN))


def backend_of(p: Problem) -> str:
    """Return the backend that runs a call on CUDA tensors."""
    if p.backend != "auto":
        return p.backend
    return "split" if part_length(p) < p.T else "recurrent"


def _parts(p: Problem) -> int:
    length = max(int(part_length(p)), 1)
    return max(-(-int(p.T) // length), 1)


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: the state before every chunk."""
    return {"checkpoints": 4 * p.slots(CHUNK_LEN) * 3 * p.C}


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    left = kept(p) if p.training else {}
    bind = {"checkpoints": "checkpoints" if p.training else None}
    results = {"y": Result((p.B, p.T, p.C), p.types["v"])}
    if p.has_final_state:
        results["final_state"] = Result((p.B, 3, p.C), "fp32")
    return Schedule(_walks(p, "forward", bind), results, left, _summaries(p))


def backward(p: Problem) -> Schedule:
    """Return the backward. Every part leaves its share of the gradients of w and u, as a separate sequence."""
    results = common.backward_results(p)
    rows = _parts(p) * p.B if p.T else 0
    scratch = {f"{name}_rows": 4 * rows * p.C for name in ("dw", "du")}
    if p.T == 0:  # the state passes through, and so does its gradient: as a sum of that row, or of none
        state = "grad_final_state", "grad_initial_state", 1, int(p.has_final_state), p.B * 3 * p.C, "fp32"
        return Schedule((common.sum_rows(*state),) if p.has_initial_state else (), results, scratch=scratch)
    bind = {
        "grad_final": "grad_final_state", "grad_initial": "grad_initial_state" if p.has_initial_state else None,
        **common.to_sequence_gradients(p),
    }  # fmt: skip
    return Schedule(_walks(p, "backward", bind), results, scratch={**scratch, **_summaries(p)})


def update(p: Problem, pool: Mapping[str, int], index_bytes: int = 4) -> Schedule:
    """Return the launch of a few tokens; `pool` has its slots, strides and null_index, and the state is bound to it."""
    parameters = {**_types(p, 1 if p.T == 1 else _UPDATE_LEN), "INDEX_BYTES": index_bytes}
    grid = (-(-p.B * p.C // NUM_THREADS), 1, 1)
    bind = {**common.given(p), "w_raw": "w", "bonus": "u", **pool}
    return Schedule((Step("wkv4_update", "wkv4_update", parameters, grid, bind),))


def _types(p: Problem, chunk_len: int) -> dict[str, Parameter]:
    return {
        "T_IO": p.types["v"], "T_W": p.types["w"], "T_U": p.types["u"], "DECAY": p.decay, "CHUNK_LEN": chunk_len,
        "NUM_THREADS": NUM_THREADS,
    }  # fmt: skip


def _walks(p: Problem, direction: str, bind: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the launches of a direction: where there are parts, first what each does alone."""
    types = _types(p, CHUNK_LEN)
    count, blocks = _parts(p), -(-p.B * p.C // NUM_THREADS)
    given = {
        **common.given(p), "w_raw": "w", "bonus": "u", "part_len": part_length(p),
        "summaries": "summaries" if count > 1 else None, **bind,
    }  # fmt: skip
    name = f"wkv4_{direction}"
    # Of one part at the end of the walk nobody asks what it does on its own.
    alone = [Step(name, name, {**types, "RESULTS": False}, (blocks, count - 1, 1), given)] if count > 1 else []
    own = {**types, "RESULTS": True}
    return *alone, Step(name, name, own, (blocks, count, 1), given, optional=("grad_initial",))


def _summaries(p: Problem) -> dict[str, Any]:
    """Return the bytes of what each part does alone, where there are several."""
    count = _parts(p)
    return {"summaries": 4 * count * p.B * 3 * p.C} if count > 1 else {}
