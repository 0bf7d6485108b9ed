"""What calls of derived ops check, and how they hand on what is left to the op below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, tensors, torch_op
from rwkv_jit.pool import arguments
from rwkv_jit.pool.options import UpdateOptions, VarlenOptions
from rwkv_jit.schedules.problem import Op


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
