"""Sequences of any lengths, whose states are in a pool and change in place: prompts beside decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, registry, rule, switches, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.pool import arguments, calls, plain
from rwkv_jit.pool.options import DecayVarlenOptions
from rwkv_jit.schedules import common, directions, varlen
from rwkv_jit.schedules.common import Case
from rwkv_jit.schedules.derived_table import ALL
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.varlen import FEW_TOKENS, Varlen

# ---- a call ------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A call that has been checked. Its inputs are [1, T, ..]."""

    op: Op
    state: Tensor
    y: Tensor
    inputs: Sequence[Any]  # None for those that are absent
    w0: Tensor | None
    cu_seqlens: Tensor
    state_indices: Tensor | None
    write_indices: Tensor | None
    has_initial_state: Tensor | None
    num_active: Tensor | None
    checkpoint_offsets: Tensor | None
    checkpoint_indices: Tensor | None
    seed: Tensor | None
    null_index: int
    max_seqlen: int | None
    scale: float
    decay: str
    decay_bound: float | None
    state_layout: str
    traits: calls.Traits = ()

    @property
    def given(self) -> tuple[Any, ...]:
        return self[1:-1]

    @property
    def has_few_tokens(self) -> bool:
        """Return whether no sequence has more tokens than go one by one."""
        tokens: int = self.inputs[self.op.lead].shape[1]
        return min(tokens, self.max_seqlen or tokens) <= FEW_TOKENS and self.checkpoint_offsets is None

    @property
    def is_empty(self) -> bool:
        return self.y.numel() == 0

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.inputs, self.state, *self[4:13], self.y]

    @property
    def options(self) -> tuple[Any, ...]:
        return self[13:]

    def plan(self) -> Plan:
        named = dict(zip((*self.op.names, "state", *KIND.tensors, "y"), self.tensors, strict=True))
        named["state"] = calls.one_slot(self.state)
        options: dict[str, Any] = {"scale": self.scale, "decay": self.decay, "state_layout": self.state_layout}
        options["traits"] = self.traits
        p = calls.problem_of(self.op, self.inputs, self.state, **options)
        if self.w0 is not None:
            p = p._replace(w0_type=tensors.STORAGE[self.w0.dtype])
        several = [x for x in (self.state_indices, self.write_indices, self.checkpoint_indices) if x is not None]
        index_bytes = several[0].element_size() if several else 4
        pool = calls.pool_of(self.state, index_bytes, self.null_index, self.w0, self.seed)
        sequences = self.cu_seqlens.shape[0] - 1
        checkpoints = 0 if self.checkpoint_offsets is None else self.checkpoint_offsets.shape[1]
        call = Varlen(
            sequences, checkpoints, self.cu_seqlens.element_size(), self.has_few_tokens, self.state_indices is not None
        )
        if not call.has_few_tokens:
            p = p._replace(**self._algorithm(directions.running(p), sequences))
        return Plan(varlen.schedule(p, pool, call), p, named)

    def _algorithm(self, p: Problem, sequences: int) -> dict[str, Any]:
        """Return what the rule says of sequences that are no short ones, as fields of the problem."""
        device = self.state.device.index

        def chosen(case: Case) -> dict[str, Any]:
            case = case.of_any_batch() if switches.is_batch_invariant() else case
            made = rule.chosen(backend, case, lambda: tensors.gpu(device), lambda: rule.known(device))
            return {**made._asdict(), "chunk_len": made.chunk_len or 0}

        # What has a sequence in the second extent of a grid has no room for more of them.
        pieces = sequences * (1 if self.checkpoint_offsets is None else self.checkpoint_offsets.shape[1] + 1)
        backend = "auto" if pieces <= common.MOST_HEADS else "recurrent"
        tokens = max(p.T, rule.LEAST_TOKENS)  # where there are fewer, they go one by one whatever is chosen
        case = Case(
            p.op, p.types["v"], p.K, p.V, tokens, p.decay, self.decay_bound, None, training=False,
            blocks=sequences * p.H, is_packed=True,
        )  # fmt: skip
        longest, multiprocessors = self.max_seqlen or (p.T if sequences == 1 else 0), tensors.multiprocessors(device)
        if longest and sequences * p.H <= multiprocessors and self.checkpoint_offsets is None:
            cut = case._replace(tokens=p.T // sequences, multiprocessors=lambda: multiprocessors, longest=longest)
            made = chosen(cut)
            if made["backend"] in ("segments", "large"):
                return made
        return chosen(case)


def _check(
    op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], traits: calls.Traits = ()
) -> _Step:
    """Check a call as `update.check` does, and return it with all options."""
    has_decay = op.decay != "none" and op.through is None
    legal = [x for x in DecayVarlenOptions.__annotations__ if has_decay or x not in ("decay", "decay_bound", "w0")]
    arguments.check_names(name, options, legal)
    decay, layout, rounds = arguments.names(op, options)
    null_index = arguments.null_index(options.get("null_index", -1))

    op, inputs = calls.fitted(op, checks.as_tensors(op, arrays))
    inputs = calls.with_all_dimensions(op, inputs, 0)
    wide = not inputs[op.lead].is_cuda
    sizes = checks.check_inputs(op, inputs, wide)
    lead = inputs[op.lead]
    scale = arguments.scale(op, options, sizes)
    decay_bound, most = options.get("decay_bound"), options.get("max_seqlen")
    checks.check_decay_bound(decay_bound)
    if most is not None:
        checks.check_count("max_seqlen", most)

    if options.get("cu_seqlens") is None:
        raise TypeError("cu_seqlens: expected where each sequence begins and ends, got None")
    bounds = tensors.from_any("cu_seqlens", options["cu_seqlens"])
    checks.check_packing(bounds, lead)
    count = bounds.shape[0] - 1
    state = tensors.from_any("state", state, in_place=True)
    arguments.check_pool(op, state, tuple(sizes[dim] for dim in op.state_dims(layout)), lead, wide)
    w0 = arguments.w0(options.get("w0"), sizes["H"], sizes["K"], lead)
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
    place = op.names.index("v")
    y = arguments.y_of(options.get("out"), inputs[place], tensors.from_any("v", arrays[place]), op.public_names[place])
    arguments.refuse_gradients(op, name, (state, y, w0, inputs))
    seed = arguments.seed_tensor(options.get("seed"), rounds, state, lead)
    step = _Step(
        op, state, y, inputs, w0, bounds, read, written, has_state, active, offsets, places, seed, null_index, most,
        scale, decay, decay_bound, layout, traits,
    )  # fmt: skip
    _check_values(step)
    return step


def _check_values(step: _Step) -> None:
    """Check the values of bounds and indices where that costs nothing, or where the user has asked for it."""
    given = [step.cu_seqlens, step.state_indices, step.write_indices, step.num_active, step.checkpoint_indices]
    if not arguments.may_look_at(given):
        return
    tokens, slots = step.inputs[step.op.lead].shape[1], step.state.shape[0]
    bounds = step.cu_seqlens.tolist()
    arguments.check_bounds(bounds, tokens)
    active = arguments.check_active(step.num_active, len(bounds) - 1)
    read, written = (None if x is None else x[:active] for x in (step.state_indices, step.write_indices))
    arguments.check_slots(
        {"state_indices": read, "write_indices": written}, slots, step.null_index,
        None if step.checkpoint_indices is None else step.checkpoint_indices[:active], step.has_initial_state,
    )  # fmt: skip


KIND = calls.Kind(
    "{op}_varlen",
    "varlen_states",
    ("w0", "cu_seqlens", "state_indices", "write_indices", "has_initial_state", "num_active", "checkpoint_offsets",
     "checkpoint_indices", "seed"),
    ("max_seqlen", "scale", "decay", "decay_bound", "state_layout", "null_index", "rounding"),
    _check,
)  # fmt: skip


# ---- the torch op ------------------------------------------------------------------------------------------------


def run(op: str, state: Tensor, y: Tensor, inputs: Sequence[Any], *given: Any, **named: Any) -> None:
    """Run the torch op with CPU or CUDA tensors."""
    fitted, inputs = calls.fitted(ALL[op], inputs)
    step = _Step(fitted, state, y, inputs, *given)._replace(traits=calls.traits_of(fitted, named))
    if step.is_empty:
        return
    if step.state.is_cuda:
        calls.run(step)
        return
    torch_op.say_reference(f"{op}_varlen", step.state)
    with tensors.exactly(step.state), torch.no_grad():
        options = step.null_index, step.scale, step.decay, step.state_layout, step.traits
        plain.varlen(*step[:13], *options, FEW_TOKENS)


def fake(*_: Any, **__: Any) -> None:
    """Do nothing with tensors that have no memory."""


def record(keys: Any, op: str, *given: Any, **named: Any) -> None:
    """Refuse to record gradients."""
    arguments.refuse_gradients(ALL[op], f"{op}_varlen", given)
    with torch._C._AutoDispatchBelowAutograd():
        registry.find(KIND.torch_op).redispatch(keys & torch._C._after_autograd_keyset, op, *given, **named)


registry.implement("varlen_states", run, fake, record)
