"""What calls of derived ops check, and how they hand on what is left to the op below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, sharding, tensors, torch_op
from rwkv_jit.call.options import Tail, complete
from rwkv_jit.pool import arguments
from rwkv_jit.pool.options import UpdateOptions, VarlenOptions
from rwkv_jit.schedules.problem import Op

Result = tuple[Tensor, Tensor | None]


class Sequences(NamedTuple):
    """A call over sequences that has been checked."""

    inputs: list[Tensor]
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    tail: Tail

    def run(self, op: Callable[..., Result], operands: Sequence[Tensor], output_final_state: bool) -> Result:
        """Run the op below, whose decays are logarithms if it has any, with these operands."""
        options = self.tail._asdict()
        if options["decay"] == "none":
            options["decay"] = "log"
        return op(*operands, self.initial_state, output_final_state, self.cu_seqlens, **options)


def sequences(
    op: Op, arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, options: Mapping[str, Any],
    lower_bound: float | None = None,
) -> Sequences:  # fmt: skip
    """Check a call over sequences, whose log-decays may have a bound of their own.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    if lower_bound is not None:
        check_bound(lower_bound)
        options = {"decay_bound": lower_bound, **options}
    tail = complete(op, options, arrays[0])
    if sharding.any_distributed((*arrays, initial_state, cu_seqlens)):  # whose parts the op below checks
        return Sequences(list(arrays), initial_state, cu_seqlens, tail)
    checks.check_options(op, *tail)
    inputs = torch_op.under_autocast(op, arrays) or arrays
    given = checks.check_tensors(op, inputs, initial_state, cu_seqlens, tail.state_layout, tail.backend)
    return Sequences(*given, tail)


class Pooled(NamedTuple):
    """A call over a pool that has been checked as far as the op below does not."""

    inputs: list[Tensor]
    options: dict[str, Any]

    def run(self, op: Callable[..., Tensor], state: Any, operands: Sequence[Tensor]) -> Tensor:
        """Run the op below with these operands."""
        return op(state, *operands, **self.options)


def pooled(
    op: Op, verb: str, arrays: Sequence[Any], options: Mapping[str, Any], parameters: Sequence[Any] = ()
) -> Pooled:
    """Check the inputs of an update or of a varlen, of rows of one or several tokens.

    `parameters` are tensors beside the inputs, which cannot have gradients either.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        Naming the argument, what was expected and what came.
    """
    name, legal = f"{op.name}_{verb}", UpdateOptions if verb == "update" else VarlenOptions
    arguments.check_names(name, options, list(legal.__annotations__))
    arguments.refuse_gradients(op, name, (*arrays, *parameters))
    inputs = torch_op.under_autocast(op, arrays) or checks.as_tensors(op, arrays)
    lead = inputs[op.lead]
    has_batch = lead.dim() == len(op.inputs[op.names[op.lead]])
    sizes = checks.check_inputs(op, inputs if has_batch else [x.unsqueeze(0) for x in inputs], wide=not lead.is_cuda)
    scale = arguments.scale(op, options, sizes)
    layout = options.get("state_layout", op.state_layout)
    return Pooled(inputs, {**options, "scale": scale, "state_layout": layout, "decay": "log"})


def of_value_heads(x: Tensor, heads: int) -> Tensor:
    """Return what key heads have, for the value heads that each is for; without a copy where there is one key head."""
    if x.shape[-2] == heads:
        return x
    if x.shape[-2] == 1:
        return x.expand(*x.shape[:-2], heads, x.shape[-1])
    return x.repeat_interleave(heads // x.shape[-2], -2)


def check_bound(lower_bound: Any) -> None:
    """Check the least log-decay that a gate makes."""
    checks.check_number("lower_bound", lower_bound)
    if lower_bound >= 0:
        raise ValueError(f"lower_bound: expected a negative number, got {lower_bound!r}")


def check_fixed(name: str, x: Any, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Tensor:
    """Check a parameter of the heads, which may be float32 beside inputs of 16 bits."""
    given = tensors.from_any(name, x)
    if tuple(given.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(str(list(n)) for n in shapes)}, got {list(given.shape)}")
    arguments.check_dtype(name, given, tuple(dict.fromkeys((like.dtype, torch.float32))), like)
    return given
