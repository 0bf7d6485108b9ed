"""One or a few tokens of many sequences, whose states are in a pool and change in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, registry, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.pool import arguments, calls, plain
from rwkv_jit.pool.options import DecayUpdateOptions
from rwkv_jit.schedules import update
from rwkv_jit.schedules.derived_table import ALL
from rwkv_jit.schedules.problem import Op

# ---- a call ------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    op: Op
    state: Tensor
    y: Tensor
    inputs: Sequence[Any]  # None for those that are absent
    w0: Tensor | None
    state_indices: Tensor | None
    write_indices: Tensor | None
    seed: Tensor | None
    null_index: int
    scale: float
    decay: str
    state_layout: str
    traits: calls.Traits = ()

    @property
    def given(self) -> tuple[Any, ...]:
        return self[1:-1]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.inputs, self.state, self.w0, self.state_indices, self.write_indices, self.seed, self.y]

    @property
    def is_empty(self) -> bool:
        return self.y.numel() == 0

    @property
    def options(self) -> tuple[Any, ...]:
        return self[-5:]

    def plan(self) -> Plan:
        problem = calls.problem_of(
            self.op, self.inputs, self.state, scale=self.scale, decay=self.decay, state_layout=self.state_layout,
            traits=self.traits,
        )  # fmt: skip
        indices = self.state_indices if self.state_indices is not None else self.write_indices
        index_bytes = 4 if indices is None else indices.element_size()
        pool = calls.pool_of(self.state, index_bytes, self.null_index, self.w0, self.seed)
        names = (*self.op.names, "state", *KIND.tensors, "y")
        named = {**dict(zip(names, self.tensors, strict=True)), "state": calls.one_slot(self.state)}
        return Plan(update.schedule(problem, pool, self.state_indices is not None), problem, named)


def check(
    op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any], traits: calls.Traits = ()
) -> _Step:
    """Check a call, and return it with all options; errors name the argument, what was expected and what came."""
    has_decay = op.decay != "none" and op.through is None
    legal = [x for x in DecayUpdateOptions.__annotations__ if has_decay or x not in ("decay", "w0")]
    arguments.check_names(name, options, legal)
    decay, layout, rounds = arguments.names(op, options)
    null_index = arguments.null_index(options.get("null_index", -1))

    op, inputs = calls.fitted(op, checks.as_tensors(op, arrays))
    inputs = calls.with_all_dimensions(op, inputs, 1)
    lead = inputs[op.lead]
    wide = not lead.is_cuda
    sizes = checks.check_inputs(op, inputs, wide)
    scale = arguments.scale(op, options, sizes)

    state = tensors.from_any("state", state, in_place=True)
    arguments.check_pool(op, state, tuple(sizes[dim] for dim in op.state_dims(layout)), lead, wide)
    batch, heads, head_size = sizes["B"], sizes["H"], sizes["K"]
    w0 = arguments.w0(options.get("w0"), heads, head_size, lead)
    read, written = (arguments.indices(x, options.get(x), batch, lead) for x in ("state_indices", "write_indices"))
    slots = {"state_indices": read, "write_indices": written}
    arguments.check_alike(slots)
    arguments.check_room("state", state, read, batch)
    if arguments.may_look_at(slots.values()):
        arguments.check_slots(slots, state.shape[0], null_index)
    place = op.names.index("v")
    y = arguments.y_of(options.get("out"), inputs[place], tensors.from_any("v", arrays[place]), op.public_names[place])
    arguments.refuse_gradients(op, name, (state, y, w0, inputs))
    seed = arguments.seed_tensor(options.get("seed"), rounds, state, lead)
    return _Step(op, state, y, inputs, w0, read, written, seed, null_index, scale, decay, layout, traits)


KIND = calls.Kind(
    "{op}_update", "update_states", ("w0", "state_indices", "write_indices", "seed"),
    ("scale", "decay", "state_layout", "null_index", "rounding"), check,
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
    torch_op.say_reference(f"{op}_update", step.state)
    with tensors.exactly(step.state), torch.no_grad():
        plain.update(*step)


def fake(*_: Any, **__: Any) -> None:
    """Do nothing with tensors that have no memory."""


def record(keys: Any, op: str, *given: Any, **named: Any) -> None:
    """Refuse to record gradients."""
    arguments.refuse_gradients(ALL[op], f"{op}_update", given)
    with torch._C._AutoDispatchBelowAutograd():
        registry.find(KIND.torch_op).redispatch(keys & torch._C._after_autograd_keyset, op, *given, **named)


registry.implement("update_states", run, fake, record)
