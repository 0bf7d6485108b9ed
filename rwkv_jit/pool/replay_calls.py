"""Steps, commits and flushes of a pool with its ring: their checks, their kernel, and the torch op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import registry, switches, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.kernels.errors import brief
from rwkv_jit.pool import arguments, calls, plain, update
from rwkv_jit.pool.options import FlushOptions, ReplayOptions
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules import replay
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.table import OPS

MOST_TOKENS = 8
_FIELDS = ("cursors", "arrivals", "entry_d", "entry_b", "entry_k", "entry_v", "entry_u")  # as `ReplayRing.fields`


def op_of(ring: Any) -> Op:
    """Return the op whose tokens a ring has. Raises TypeError where it is none."""
    if not isinstance(ring, ReplayRing):
        raise TypeError(f"ring: expected a ReplayRing, got {brief(ring)}")
    return OPS[ring.op]


# ---- a call ------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A call that has been checked, as the torch op takes it behind the name of the op."""

    op: Op
    phase: str
    state: Tensor
    y: Tensor | None
    cursors: Tensor
    arrivals: Tensor
    d: Tensor | None
    b: Tensor | None
    k: Tensor
    v: Tensor
    u: Tensor | None
    length: int
    inputs: Sequence[Tensor]
    w0: Tensor | None
    state_indices: Tensor | None
    accept_lens: Tensor | None
    seed: Tensor | None
    null_index: int
    scale: float
    decay: str
    state_layout: str

    @property
    def given(self) -> tuple[Any, ...]:
        return self[1:]

    @property
    def fields(self) -> tuple[Tensor | None, ...]:
        return self[4:11]

    @property
    def arrays(self) -> list[Tensor]:
        """Return the arguments that are no options, behind the pool and the ring."""
        return [*self.inputs] if self.accept_lens is None else [self.accept_lens]

    @property
    def rows(self) -> int:
        rows = next((x for x in (*self.inputs[:1], self.accept_lens, self.state_indices) if x is not None), self.state)
        return rows.shape[0]

    @property
    def tokens(self) -> int:
        """Return the tokens of a row; none of a commit."""
        return self.inputs[0].shape[1] if self.inputs else 0

    @property
    def kept(self) -> int | None:
        """Return with more than how many entries a state is written; None where none is."""
        return None if self.phase == DRAFT.name else 0 if self.phase == FLUSH.name else self.length

    @property
    def is_empty(self) -> bool:
        return self.rows == 0 or self.state.numel() == 0 or (self.y is not None and self.y.numel() == 0)

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.arrays, self.state, self.w0, self.state_indices, self.seed, self.y, *self.fields]

    @property
    def options(self) -> tuple[Any, ...]:
        return self.phase, self.length, *self[-4:]

    def plan(self) -> Plan:
        state = self.state
        index_bytes = 4 if self.state_indices is None else self.state_indices.element_size()
        pool = calls.pool_of(state, index_bytes, self.null_index, self.w0, self.seed)
        if self.inputs:
            options = {"scale": self.scale, "decay": self.decay, "state_layout": self.state_layout}
            problem, names = calls.problem_of(self.op, self.inputs, state, **options), self.op.names
        else:
            names = () if self.accept_lens is None else ("accept_lens",)
            problem = Problem(  # rows have no tokens
                replace(self.op, inputs={"cursors": "N"}), tensors.gpu(state.device.index),
                {"v": tensors.STORAGE[self.k.dtype]}, B=self.rows, N=self.rows, T=0, H=state.shape[1],
                K=self.k.shape[-1], V=self.v.shape[-1], state_type=tensors.STORAGE[state.dtype], decay=self.decay,
                state_layout=self.state_layout, is_batch_invariant=switches.is_batch_invariant(),
            )  # fmt: skip
        ring = replay.Ring(
            self.length, self.k.shape[2], self.kept or 0, self.kept is None,
            0 if self.accept_lens is None else self.accept_lens.element_size(),
        )  # fmt: skip
        all_names = (*names, "state", *_TENSORS, "y", *_FIELDS)
        named = {**dict(zip(all_names, self.tensors, strict=True)), "state": calls.one_slot(state)}
        return Plan(replay.schedule(problem, pool, ring, self.tokens), problem, named)


# ---- checks ------------------------------------------------------------------------------------------------------


def _check_step(
    op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], ring: Any = None
) -> _Step:
    """Check a step as `update.check` does, and return it with all options."""
    is_draft = name.endswith("_verify")
    unfit = ("decay", "w0") * (op.decay == "none") + ("rounding", "seed") * is_draft
    arguments.check_names(name, options, [option for option in ReplayOptions.__annotations__ if option not in unfit])
    if op_of(ring) != op:
        raise ValueError(f"ring: expected one of {op.name}, got one of {ring.op}")
    given = update.check(op, name, state, arrays, options)
    _check_sizes(ring, given.state, given.state_layout, given.inputs[0].dtype)
    tokens, most = given.inputs[0].shape[1], min(MOST_TOKENS, ring.drafts) if is_draft else MOST_TOKENS
    if tokens > most:
        whose = f", as the ring was created for {ring.drafts} speculative tokens" if is_draft else ""
        raise ValueError(f"{op.public_names[0]}: expected at most {most} tokens{whose}, got {tokens}")
    return _Step(
        op, (DRAFT if is_draft else STEP).name, given.state, given.y, *ring.fields, ring.length, given.inputs,
        given.w0, given.state_indices, None, given.seed, given.null_index, given.scale, given.decay,
        given.state_layout,
    )  # type: ignore[call-arg]  # fmt: skip


def _check_sizes(ring: ReplayRing, state: Tensor, layout: str, dtype: torch.dtype) -> None:
    last = (ring.value_size, ring.head_size) if layout == "vk" else (ring.head_size, ring.value_size)
    own = (ring.slots, ring.heads, *last)
    if tuple(state.shape) != own:
        raise ValueError(f"ring: expected one of states {list(state.shape)}, got one of {list(own)}")
    if dtype != ring.dtype:
        raise TypeError(f"ring: expected entries of {dtype} like the inputs, got {ring.dtype}")
    if ring.device != state.device:
        raise ValueError(f"ring: expected device {state.device}, got {ring.device}")


def _check_commit(op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], ring: Any) -> _Step:
    """Check a commit, or a flush where there are no arrays, and return it with all options."""
    arguments.check_names(name, options, [*FlushOptions.__annotations__])
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
    return _Step(
        op, (FLUSH if counts is None else COMMIT).name, pool, None, *ring.fields, ring.length, (), None, indices,
        counts, seed, null_index, 1.0, op.decay, layout,
    )  # type: ignore[call-arg]  # fmt: skip


_TENSORS, _OTHERS = ("w0", "state_indices", "seed"), ("scale", "decay", "state_layout", "null_index", "rounding")
STEP = calls.Kind("{op}_replay", "replay_states", _TENSORS, _OTHERS, _check_step)
DRAFT = calls.Kind("{op}_verify", "replay_states", _TENSORS, _OTHERS, _check_step)
COMMIT = calls.Kind("replay_commit", "replay_states", _TENSORS, _OTHERS, _check_commit, has_tokens=False)
FLUSH = calls.Kind("replay_flush", "replay_states", _TENSORS, _OTHERS, _check_commit, has_tokens=False)


# ---- the torch op ------------------------------------------------------------------------------------------------


def run(op: str, *given: Any) -> None:
    """Run the torch op with CPU or CUDA tensors."""
    step = _Step(OPS[op], *given)
    if step.is_empty:
        return
    if step.state.is_cuda:
        calls.run(step)
        return
    torch_op.say_reference(step.phase.format(op=op), step.state)
    with tensors.exactly(step.state), torch.no_grad():
        plain.replay(step.op, *step[2:], step.kept)


def fake(op: str, *given: Any) -> None:
    """Do nothing with tensors that have no memory."""


def record(keys: Any, op: str, *given: Any) -> None:
    """Refuse to record gradients."""
    arguments.refuse_gradients(OPS[op], _Step(OPS[op], *given).phase.format(op=op), given)
    with torch._C._AutoDispatchBelowAutograd():
        registry.find(STEP.torch_op).redispatch(keys & torch._C._after_autograd_keyset, op, *given)


registry.implement("replay_states", run, fake, record)
