"""The whole of a direction: an algorithm's schedule, with what all of them have around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rwkv_jit.schedules import (
    channel_decay,
    common,
    delta_chunked,
    delta_large,
    diagonal_chunked,
    diagonal_large,
    narrow,
    recurrent,
    segments,
    through,
    timex_tiles,
    timex_transforms,
    update,
    wkv4,
)
from rwkv_jit.schedules import head_decay as head_steps
from rwkv_jit.schedules.problem import STATE, Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step, renamed

# The modules of the algorithms by family and name. An op of your own has a family of its own here.
_BOTH = {"recurrent": recurrent, "segments": segments, "large_segments": segments, through.UPDATE: update}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "delta": {**_BOTH, "chunked": delta_chunked, "large": delta_large},
    "diagonal": {**_BOTH, "chunked": diagonal_chunked, "large": diagonal_large},
    "wkv4": {"auto": wkv4, "recurrent": wkv4, "split": wkv4},
    "timex": {"tiles": timex_tiles, "transforms": timex_transforms},
    # The op that they go through runs calls for which these are not. Some have no kernels of theirs by chunks.
    "head_decay": {through.DEDICATED: head_steps, through.UPDATE: update},
    "channel_decay": {through.DEDICATED: channel_decay, through.UPDATE: update},
    "": {through.UPDATE: update},
}


def kept(p: Problem) -> dict[str, Any]:
    """Return the bytes of what the forward keeps, by name."""
    if through.applies(p):
        return through.kept(p, kept(through.below(p)))
    if _is_of_state_alone(p):
        return {}
    if narrow.applies(p):
        return narrow.kept(p, _kept(narrow.narrowed(p)))
    return _kept(p)


def _kept(p: Problem) -> dict[str, Any]:
    """Return what an algorithm keeps, with as much behind it as sequences may need that are cut differently."""
    left: dict[str, Any] = algorithm(p).kept(p)
    if p.leaves_cut_open:
        left["room"] = segments.most_kept(p) - sum(left.values())
    return left


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    if through.applies(p):
        return through.forward(p, forward(through.below(p)))
    if _is_of_state_alone(p):
        p = p._replace(training=False)
    schedule: Schedule = narrow.forward(p, algorithm(p)) if narrow.applies(p) else algorithm(p).forward(p)
    if not p.leaves_cut_open:
        return schedule
    mark = {"mark": segments.MARKS[p.backend]} if p.is_packed else {}
    return replace(schedule, kept={**kept(p), **mark})


def backward(p: Problem) -> Schedule:
    """Return the backward, of the gradients that are needed: those of states have the states' type."""
    if through.applies(p):
        schedule = through.backward(p, backward(through.below(p)))
    elif p.backend == through.DEDICATED:  # whose kernels sum, and take states of any type
        schedule = algorithm(p).backward(p)
    else:
        schedule = _backward(p)
    gradients = {name: f"d{name}" for name in p.op.inputs} | {STATE: "grad_initial_state"}
    unwanted = [gradient for name, gradient in gradients.items() if p.wanted and name not in p.wanted]
    return common.with_sums(schedule, [name for name in schedule.results if name not in unwanted])


def _backward(p: Problem) -> Schedule:
    """Return an algorithm's backward with copies of states of other types."""
    if _is_of_state_alone(p):
        schedule = segments.backward_of_state(p)
    elif narrow.applies(p):
        schedule = narrow.backward(p, algorithm(p))
    else:
        schedule = algorithm(p).backward(p)
    before, after = list[Step](), list[Step]()
    names, scratch = {}, dict(schedule.scratch)
    if p.state_type != "fp32":
        size, layout = p.state_bytes, p.state_layout
        if p.has_final_state:
            name = names["grad_final_state"] = "wide_grad_final_state"
            before.append(common.copy_states(p, "grad_final_state", name, p.state_type, "fp32", layout, layout))
            scratch[name] = size
        if p.has_initial_state:
            name = names["grad_initial_state"] = "wide_grad_initial_state"
            after.append(common.copy_states(p, name, "grad_initial_state", "fp32", p.state_type, layout, layout))
            scratch[name] = size
    steps: list[Item] = [*before, *renamed(schedule.steps, names), *after]
    return replace(schedule, steps=tuple(steps), scratch=scratch, main=schedule.main + len(before))


def has_state_alone(p: Problem) -> bool:
    """Return whether there is another backward for the initial state alone, which needs nothing that is kept."""
    return p.backend in ("chunked", "segments") and p.has_initial_state and not p.is_narrow


def _is_of_state_alone(p: Problem) -> bool:
    return p.wanted == (STATE,) and has_state_alone(p) and not p.is_shard


def algorithm(p: Problem) -> Any:
    """Return the module of the algorithm of a problem."""
    p = running(p)
    return ALGORITHMS[p.op.family][p.backend]


def running(p: Problem) -> Problem:
    """Return the problem that kernels of recurrences run: this one, or that of the op below."""
    return through.below(p) if through.applies(p) else p
