"""Decoding that reads states and the tokens since they were written, and writes them once in a while.

A state after tokens i = 1 ... n is read by a sum, with p_i the product of the decays behind token i, u_i = S_{i-1} a_i:

    S_n x = S_0 (p_0 x) + sum_i ((b_i . (p_i x)) u_i + (k_i . (p_i x)) v_i)

Of ops that go through another, v_i is all that token i adds, and there are no b and u.

So a step reads the state and its entries, and adds an entry. Speculative tokens are entries that do not count yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import checks, switches, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import brief
from rwkv_jit.pool import arguments, calls, plain, update
from rwkv_jit.pool.calls import Step
from rwkv_jit.pool.options import FlushOptions, ReplayOptions
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules import replay as schedules
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.table import ALL

MOST_TOKENS = 8


def op_of(ring: Any) -> Op:
    """Return the op whose tokens a ring has. Raises TypeError where it is none."""
    if not isinstance(ring, ReplayRing):
        raise TypeError(f"ring: expected a ReplayRing, got {brief(ring)}")
    return ALL[ring.op]


# ---- commits and flushes -----------------------------------------------------------------------------------------


def replay_commit(state: Array, ring: ReplayRing, accept_lens: Array, **options: Unpack[FlushOptions]) -> None:
    """Accept the first speculative tokens of each row, after `wkv7_verify` or that of another op.

    Cursors move on. Where a slot has more than `ring.length` entries then, its state is written with all of them, and
    it has none: so there is always memory for more tokens. Tokens that are not accepted leave no trace.

    Parameters
    ----------
    state, ring, **options
        The pool and the ring that the tokens were verified with; as `PoolOptions` and `FlushOptions` say.
    accept_lens : torch.Tensor, shape (B,), int32 or int64
        How many speculative tokens of each row are accepted: from 0 to the tokens that the last verify of its slot had.

    Notes
    -----
    Nothing waits for the GPU, where `accept_lens` are taken for numbers from 0 to `ring.drafts`; with RWKVJIT_CHECK=1
    they are looked at.

    Examples
    --------
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    calls.call(COMMIT, op_of(ring), state, (accept_lens,), options, ring)


def replay_flush(state: Array, ring: ReplayRing, **options: Unpack[FlushOptions]) -> None:
    """Write the states of slots with all their entries, and leave the slots without any.

    Then the pool alone says what the sequences are: for `StatePool.fork`, `copy` and `save`, and for calls that know of
    no entries.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `FlushOptions` say. Without `state_indices` all slots are written that have entries.

    Examples
    --------
    >>> rwkv_jit.replay_flush(states.wkv[layer], ring, state_indices=states.indices(slot))
    >>> ring.reset(states.fork(slot, 2))
    """
    calls.call(FLUSH, op_of(ring), state, (), options, ring)


# ---- a call ------------------------------------------------------------------------------------------------------


def _kept(step: Step) -> int | None:
    """Return with more than how many entries a state is written; None where none is."""
    return {DRAFT.name: None, FLUSH.name: 0}.get(step.kind.name, step.ring[-1])


def _plan(step: Step) -> Plan:
    *_, k, v, _, length = step.ring
    fields = schedules.entry_fields(ALL[step.op.name])
    state, named, kept, tokens, accept_bytes = step.state, step.named, _kept(step), 0, 0
    if step.y is not None:
        problem, tokens = step.problem()._replace(is_pooled=True), step.inputs[step.op.lead].shape[1]
    else:
        problem = Problem(  # rows have no tokens
            replace(step.op, inputs={"cursors": "N"}), tensors.gpu(state.device.index),
            {"v": tensors.STORAGE[(v if fields["k"][1] else k).dtype]}, B=step.rows, N=step.rows, T=0,
            H=state.shape[1], K=k.shape[-1], V=v.shape[-1], G=k.shape[1], state_type=tensors.STORAGE[state.dtype],
            decay=named["decay"], state_layout=named["state_layout"], is_batch_invariant=switches.is_batch_invariant(),
        )  # fmt: skip
        accept_bytes = sum(x.element_size() for x in step.inputs)
    ring = schedules.Ring(length, k.shape[2], kept or 0, kept is None, accept_bytes)
    return Plan(schedules.schedule(problem, step.pool(), ring, tokens), problem, step.tensors_by_name)


def _given(step: Step) -> tuple[Any, ...]:
    w0, indices, *others = step.values
    (inputs, accepted) = (step.inputs, None) if step.y is not None else ((), next(iter(step.inputs), None))
    return (step.kind.name, step.state, step.y, *step.ring, inputs, w0, indices, accepted, *others)


def _step_of(op: str, phase: str, state: Tensor, y: Tensor | None, *given: Any, **named: Any) -> Step:
    kind = next(kind for kind in (STEP, DRAFT, COMMIT, FLUSH) if kind.name == phase)
    ring, (inputs, w0, indices, accepted, *others) = given[: len(calls.RING) + 1], given[len(calls.RING) + 1 :]
    if y is None:
        return _of_rows(kind, ALL[op], state, accepted, (w0, indices, *others), ring)
    fitted_op, inputs = calls.fitted(ALL[op], inputs)
    return Step(kind, fitted_op, state, y, inputs, (w0, indices, *others), torch_op.traits_of(fitted_op, named), ring)


def _of_rows(
    kind: calls.Kind, op: Op, state: Tensor, accepted: Tensor | None, values: tuple[Any, ...], ring: tuple[Any, ...]
) -> Step:
    """Return the step of a commit or a flush, whose rows have no tokens."""
    inputs = {} if accepted is None else {"accept_lens": accepted}
    op = replace(op, inputs=dict.fromkeys(inputs, "N"))
    return Step(kind, op, state, None, [*inputs.values()], values, ring=ring)


# ---- checks ------------------------------------------------------------------------------------------------------


def _check_step(
    op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], ring: Any = None,
    traits: calls.Traits = (),
) -> Step:  # fmt: skip
    """Check a step as `update.check` does, and return it with all options."""
    is_draft = name.endswith("_verify")
    unfit = ("decay", "w0") * (op.decay == "none" or op.through is not None) + ("rounding", "seed") * is_draft
    checks.check_names(name, options, [option for option in ReplayOptions.__annotations__ if option not in unfit])
    if op_of(ring) != op:
        raise ValueError(f"ring: expected one of {op.name}, got one of {ring.op}")
    given = update.check(op, name, state, arrays, options, traits)
    lead = given.inputs[op.lead]
    _check_sizes(ring, given.state, given.named["state_layout"], lead.dtype)
    key_heads = torch_op.sizes_of(given.op, given.inputs).get("G", ring.heads)
    if key_heads != ring.key_heads:
        raise ValueError(f"ring: expected one of {key_heads} key heads, got one of {ring.key_heads}")
    tokens, most = lead.shape[1], min(MOST_TOKENS, ring.drafts) if is_draft else MOST_TOKENS
    if tokens > most:
        whose = f", as the ring was created for {ring.drafts} speculative tokens" if is_draft else ""
        raise ValueError(f"{op.public_names[0]}: expected at most {most} tokens{whose}, got {tokens}")
    w0, read, _, *others = given.values
    kind = DRAFT if is_draft else STEP
    return given._replace(kind=kind, values=(w0, read, *others), ring=(*ring.fields, ring.length))


def _check_sizes(ring: ReplayRing, state: Tensor, layout: str, dtype: torch.dtype) -> None:
    last = (ring.value_size, ring.head_size) if layout == "vk" else (ring.head_size, ring.value_size)
    own = (ring.slots, ring.heads, *last)
    if tuple(state.shape) != own:
        raise ValueError(f"ring: expected one of states {list(state.shape)}, got one of {list(own)}")
    if dtype != ring.dtype:
        raise TypeError(f"ring: expected entries of {dtype} like the inputs, got {ring.dtype}")
    if ring.device != state.device:
        raise ValueError(f"ring: expected device {state.device}, got {ring.device}")


def _check_commit(op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], ring: Any) -> Step:
    """Check a commit, or a flush where there are no arrays, and return it with all options."""
    checks.check_names(name, options, [*FlushOptions.__annotations__])
    _, layout, rounds = arguments.names(op, options)
    null_index = arguments.null_index(options.get("null_index", -1))
    pool = tensors.from_any("state", state, in_place=True)
    sizes = {"H": ring.heads, "K": ring.head_size, "V": ring.value_size}
    arguments.check_pool(op, pool, tuple(sizes[dim] for dim in op.state_dims(layout)), pool, not pool.is_cuda)
    _check_sizes(ring, pool, layout, ring.dtype)
    counts = tensors.from_any("accept_lens", arrays[0]) if arrays else None
    if counts is not None:
        if counts.dim() != 1:
            raise ValueError(f"accept_lens: expected shape [rows], a number for each row, got {list(counts.shape)}")
        arguments.check_dtype("accept_lens", counts, arguments.INDEX_TYPES, pool)
    indices = options.get("state_indices")
    if indices is not None:
        indices = tensors.from_any("state_indices", indices)
        rows = indices.numel() if counts is None else len(counts)
        indices = arguments.indices("state_indices", indices, rows, pool)
    elif counts is not None:
        arguments.check_room("state", pool, None, len(counts))
    if arguments.may_look_at([indices]):
        arguments.check_slots({"state_indices": indices}, len(pool), null_index)
    if counts is not None and arguments.may_look_at([counts]):
        outside = [number for number in counts.tolist() if not 0 <= number <= ring.drafts]
        if outside:
            raise ValueError(
                f"accept_lens: expected 0 to {ring.drafts}, the ring's speculative tokens, got {outside[:8]}"
            )
    arguments.refuse_gradients(op, name, [pool])
    seed = arguments.seed_tensor(options.get("seed"), rounds, pool, pool)
    values = (None, indices, seed, null_index, 1.0, op.decay, layout)
    return _of_rows(FLUSH if counts is None else COMMIT, op, pool, counts, values, (*ring.fields, ring.length))


_TENSORS, _OTHERS = ("w0", "state_indices", "seed"), ("null_index", "scale", "decay", "state_layout", "rounding")
STEP, DRAFT = (
    calls.Kind(name, "replay_states", _TENSORS, _OTHERS, _check_step, _plan, given=_given)
    for name in ("{op}_replay", "{op}_verify")
)
COMMIT, FLUSH = (
    calls.Kind(name, "replay_states", _TENSORS, _OTHERS, _check_commit, _plan, has_tokens=False, given=_given)
    for name in ("replay_commit", "replay_flush")
)


def _plainly(step: Step) -> None:
    plain.replay(step.op, *[*_given(step)[1:], _kept(step), step.traits])


calls.implement_steps(STEP.torch_op, _step_of, _plainly, lambda op, phase, *_: phase.format(op=op))
