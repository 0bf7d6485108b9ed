"""One or a few tokens of many sequences, whose states are in a pool and change in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rwkv_jit.call.plan import Plan
from rwkv_jit.pool import arguments, calls, plain
from rwkv_jit.pool.calls import Step
from rwkv_jit.pool.options import DecayUpdateOptions
from rwkv_jit.schedules import update
from rwkv_jit.schedules.problem import Op


def check(
    op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], traits: calls.Traits = ()
) -> Step:
    """Check a call, and return it with all options; errors name the argument, what was expected and what came."""
    checked = calls.checked_inputs(op, name, arrays, options, DecayUpdateOptions, 1)
    state, w0 = calls.checked_pool(checked, state, options)
    rows, null_index = checked.sizes["B"], checked.null_index
    slots = {x: arguments.indices(x, options.get(x), rows, checked.lead) for x in ("state_indices", "write_indices")}
    arguments.check_alike(slots)
    arguments.check_room("state", state, slots["state_indices"], rows)
    if arguments.may_look_at(slots.values()):
        arguments.check_slots(slots, state.shape[0], null_index)
    y, seed = calls.checked_results(checked, name, state, w0, options)
    values = (w0, *slots.values(), seed, null_index, checked.scale, checked.decay, checked.layout)
    return Step(KIND, checked.op, state, y, checked.inputs, values, traits)


def _plan(step: Step) -> Plan:
    problem = step.problem()._replace(is_pooled=True)
    return Plan(update.schedule(problem, step.pool()), problem, step.tensors_by_name)


KIND = calls.Kind(
    "{op}_update", "update_states", ("w0", "state_indices", "write_indices", "seed"),
    ("null_index", "scale", "decay", "state_layout", "rounding"), check, _plan,
)  # fmt: skip
calls.implement(KIND, plain.update)
