"""Sequences of any lengths, whose states are in a pool and change in place: prompts beside decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rwkv_jit.call import checks, rule, tensors
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tuned import Geometry
from rwkv_jit.pool import arguments, calls, plain
from rwkv_jit.pool.calls import Step
from rwkv_jit.pool.options import DecayVarlenOptions
from rwkv_jit.schedules import common, varlen
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.update import FEW_TOKENS
from rwkv_jit.schedules.varlen import Varlen


def _plan(step: Step) -> Plan:
    """Return the plan of a call, whose inputs are [1, T, ..]."""
    named, p = step.named, step.problem()
    if named["w0"] is not None:
        p = p._replace(w0_type=tensors.STORAGE[named["w0"].dtype])
    bounds, offsets = named["cu_seqlens"], named["checkpoint_offsets"]
    sequences, checkpoints = bounds.shape[0] - 1, 0 if offsets is None else offsets.shape[1]
    tokens: int = step.inputs[step.op.lead].shape[1]
    has_few_tokens = min(tokens, named["max_seqlen"] or tokens) <= FEW_TOKENS and offsets is None
    call = Varlen(sequences, checkpoints, bounds.element_size(), has_few_tokens)
    if not has_few_tokens:
        p = _resolved(step, p, sequences, checkpoints)
    return Plan(varlen.schedule(p, step.pool(), call), p, step.tensors_by_name)


def _resolved(step: Step, p: Problem, sequences: int, checkpoints: int) -> Problem:
    """Return a problem with the algorithm that the rule has for sequences that are no short ones."""
    named = step.named

    def known() -> rule.Known:
        return rule.known(step.state.device.index)

    # What has a sequence in the second extent of a grid has no room for more of them.
    backend = "auto" if sequences * (checkpoints + 1) <= common.MOST_HEADS else "recurrent"
    call = p._replace(
        N=sequences, is_pooled=True, decay_bound=named["decay_bound"], is_chosen=False, backend=backend
    )  # fmt: skip
    resolved, longest = None, named["max_seqlen"] or (p.T if sequences == 1 else 0)
    if longest and call.all_heads <= (p.gpu.multiprocessors or 0) and not checkpoints:
        resolved = rule.resolved(call._replace(is_packed=True, longest=longest), known)
    if resolved is None or resolved.backend not in ("segments", "large"):
        # Where there are fewer tokens, they go one by one whatever is chosen.
        resolved = rule.resolved(call._replace(T=max(p.T, rule.LEAST_TOKENS)), known, sees_load=False)
    return p._replace(backend=resolved.backend, **{name: getattr(resolved, name) for name in Geometry._fields})


def _check(
    op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], traits: calls.Traits = ()
) -> Step:
    """Check a call as `update.check` does, and return it with all options."""
    checked = calls.checked_inputs(op, name, arrays, options, DecayVarlenOptions, 0)
    lead, null_index = checked.lead, checked.null_index
    decay_bound, most = options.get("decay_bound"), options.get("max_seqlen")
    checks.check_decay_bound(decay_bound)
    if most is not None:
        checks.check_count("max_seqlen", most)

    if options.get("cu_seqlens") is None:
        raise TypeError("cu_seqlens: expected where each sequence begins and ends, got None")
    bounds = tensors.from_any("cu_seqlens", options["cu_seqlens"])
    checks.check_packing(bounds, lead)
    count = bounds.shape[0] - 1
    state, w0 = calls.checked_pool(checked, state, options)
    read, written = (arguments.indices(x, options.get(x), count, lead) for x in ("state_indices", "write_indices"))
    arguments.check_room("state", state, read, count, "sequences")
    has_state = arguments.has_initial_state(options.get("has_initial_state"), count, lead)
    active = arguments.num_active(options.get("num_active"), lead)
    offsets, places = (options.get(x) for x in ("checkpoint_offsets", "checkpoint_indices"))
    if (offsets is None) != (places is None):
        raise ValueError("checkpoint_offsets: expected together with checkpoint_indices, got one of the two")
    if offsets is not None:
        offsets, places = (tensors.from_any(x, options[x]) for x in ("checkpoint_offsets", "checkpoint_indices"))
        if offsets.dim() != 2 or offsets.shape[0] != count or not offsets.shape[1]:
            raise ValueError(f"checkpoint_offsets: expected shape [{count}, checkpoints], got {list(offsets.shape)}")
        arguments.check_shape("checkpoint_indices", places, tuple(offsets.shape))
        arguments.check_dtype("checkpoint_offsets", offsets, (bounds.dtype,), lead)
        arguments.check_dtype("checkpoint_indices", places, arguments.INDEX_TYPES, lead)
    arguments.check_alike({"state_indices": read, "write_indices": written, "checkpoint_indices": places})
    y, seed = calls.checked_results(checked, name, state, w0, options)
    values = (
        w0, bounds, read, written, has_state, active, offsets, places, seed, null_index, most, checked.scale,
        checked.decay, decay_bound, checked.layout,
    )  # fmt: skip
    if arguments.may_look_at([bounds, read, written, active, places]):
        _check_values(lead.shape[1], state.shape[0], null_index, bounds, read, written, has_state, active, places)
    return Step(KIND, checked.op, state, y, checked.inputs, values, traits)


def _check_values(
    tokens: int, slots: int, null_index: int, cu_seqlens: Tensor, read: Tensor | None, written: Tensor | None,
    has_state: Tensor | None, num_active: Tensor | None, places: Tensor | None,
) -> None:  # fmt: skip
    bounds = cu_seqlens.tolist()
    arguments.check_bounds(bounds, tokens)
    active = arguments.check_active(num_active, len(bounds) - 1)
    read, written, places = (None if x is None else x[:active] for x in (read, written, places))
    arguments.check_slots({"state_indices": read, "write_indices": written}, slots, null_index, places, has_state)


KIND = calls.Kind(
    "{op}_varlen",
    "varlen_states",
    ("w0", "cu_seqlens", "state_indices", "write_indices", "has_initial_state", "num_active", "checkpoint_offsets",
     "checkpoint_indices", "seed"),
    ("null_index", "max_seqlen", "scale", "decay", "decay_bound", "state_layout", "rounding"),
    _check, _plan,
)  # fmt: skip
calls.implement(KIND, plain.varlen)
