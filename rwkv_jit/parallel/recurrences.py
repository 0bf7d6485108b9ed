"""The recurrences over sequences that many processes share, each with a part of every one.

A process finds what its part does to any state, S -> S P + Q. One exchange brings all to every process, which joins
those before its part to the state at its start. Gradients pass backwards in the same manner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rwkv_jit
from rwkv_jit.call import checks, prepared, switches, tensors, torch_op
from rwkv_jit.call.options import legal_names
from rwkv_jit.call.torch_op import TorchOp
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.parallel import paused
from rwkv_jit.parallel import shard as shards
from rwkv_jit.parallel import shards as parts
from rwkv_jit.parallel.paused import Call, Way
from rwkv_jit.parallel.shard import Shard
from rwkv_jit.schedules.table import ALL


class _Prepared(NamedTuple):
    """What the first call of a signature works out for every later one."""

    call: Call
    way: Way | None  # of a part of one text


def _run(
    of: TorchOp, arrays: Sequence[Any], shard: Shard, initial_state: Any, output_final_state: bool,
    options: tuple[tuple[str, Any], ...], traits: tuple[tuple[str, Any], ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    op = of.op
    cast = torch_op.under_autocast(op, arrays)
    if cast is not None:
        with tensors.exactly(cast[0]):
            return _run(of, cast, shard, initial_state, output_final_state, options, traits)
    records = torch.is_grad_enabled()
    wants = tuple([records and getattr(x, "requires_grad", False) for x in (*arrays, initial_state)])
    needs_transition = shard.is_passed or output_final_state or initial_state is not None
    asked = op.name, options, traits, switches.current(), wants, shard.texts, needs_transition
    key = (_run, *asked, tensors.signature((*arrays, initial_state)))
    known: _Prepared | None = None
    with contextlib.suppress(TypeError):  # of an option that cannot be one and has no hash
        known = prepared.calls.get(key) if key[-1] is not None else None
    inputs = arrays
    if known is None:
        given = arrays, shard, initial_state, options, traits, wants, needs_transition
        inputs, initial_state, known = _prepare(of, *given)
        if key[-1] is not None and all(x is y for x, y in zip(inputs, arrays, strict=True)):
            prepared.calls.keep(key, known)
    shard.check(op.public_names[op.lead], inputs[op.lead])
    call, way = known
    sizes = ", ".join(f"{dim} {size}" for dim, size in torch_op.sizes_of(op, inputs).items() if dim != "T")
    named = ", ".join(f"{name} {call.whole[name]}" for name in ("scale", "decay"))
    switched = "".join(f", {name} {value}" for name, value in traits)
    shard.agree(f"{op.name} of {inputs[op.lead].dtype} with {sizes}, {named}{switched}", inputs[op.lead].device)
    is_turned = call.whole["state_layout"] == "kv"
    initial = initial_state
    if initial is not None:
        wide = torch.promote_types(inputs[op.lead].dtype, torch.float32)
        initial = (initial.mT if is_turned else initial).to(wide)
        if initial.dim() == len(op.state):
            initial = initial.expand(inputs[op.lead].shape[0] if shard.bounds is None else shard.texts, *initial.shape)
    if way is not None:
        y, final = parts.of_one_text(way, shard, initial, *inputs)
    else:
        y, final = parts.of_texts(call, shard, wants, initial, *inputs)
    if not output_final_state:
        return y, None
    final = final.mT if is_turned else final
    return y, final if initial_state is None else final.to(initial_state.dtype)


def _prepare(
    of: TorchOp, arrays: Sequence[Any], shard: Shard, initial_state: Any, options: Any, traits: Any,
    wants: tuple[bool, ...], needs_transition: bool,
) -> tuple[list[Tensor], Tensor | None, _Prepared]:  # fmt: skip
    """Check a call, and return its arrays as tensors and what is prepared for it."""
    inputs, call = _checked(of, arrays, options, traits)
    lead, whole = inputs[of.op.lead], call.whole
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        like = call.states(inputs, lead.shape[0] if shard.bounds is None else shard.texts)
        shape = tuple(like.mT.shape if whole["state_layout"] == "kv" else like.shape)
        wide = not checks.is_for_kernels(whole["backend"], lead)
        checks.check_state(of.op, "initial_state", initial_state, (shape, shape[1:]), lead, wide)
    way = paused.way_of(call, inputs, wants, needs_transition) if shard.texts == 1 else None
    return inputs, initial_state, _Prepared(call, way)


def _checked(of: TorchOp, arrays: Sequence[Any], options: Any, traits: Any) -> tuple[list[Tensor], Call]:
    """Check the inputs and the options of a call, and return the inputs as tensors, and the call."""
    whole = torch_op.whole_options(of, arrays, options, traits)
    checks.check_options(of.op, whole)
    inputs, _, _ = checks.check_tensors(of.op, arrays, None, None, whole["state_layout"], whole["backend"])
    return inputs, Call(of.op, whole, traits)


# Compilers do not see messages.
_run_part: Callable[..., tuple[Tensor, Tensor | None]] = torch.compiler.disable(_run)


class Part(NamedTuple):
    """Stands where the bounds of sequences would in a call: others have the tokens around these."""

    shard: Shard

    def run_part(self, of: TorchOp, arrays: Sequence[Any], *call: Any) -> tuple[Tensor, Tensor | None]:
        """Run the call."""
        return _run_part(of, arrays, self.shard, *call)


def _shared(
    op: str, inputs: Sequence[Any], shard: Any, initial_state: Any, output_final_state: bool,
    options: Mapping[str, Any], **named: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    checks.check_names(f"parallel.{op}", options, legal_names(ALL[op]))
    function = getattr(rwkv_jit, op)
    y, final = function(*inputs, initial_state, output_final_state, Part(shards.of(shard)), **named, **options)
    return y, final


shared: Callable[..., tuple[Tensor, Tensor | None]] = torch.compiler.disable(_shared)


class _Summarized:
    """Stands there too, and finds what the tokens do to any state."""

    def run_part(self, of: TorchOp, arrays: Sequence[Any], *call: Any) -> tuple[Tensor, Tensor]:
        """Return Q and P."""
        inputs, checked = _checked(of, arrays, *call[2:])
        way = paused.way_of(checked, inputs, [False] * (len(inputs) + 1))
        with torch.no_grad():
            return way.summary([x if x is None else x.detach() for x in inputs])


def summary(op: str, *inputs: Any, **options: Any) -> Tensor:
    r"""Return what tokens do to any state: S -> S P + Q, per sequence and head.

    B is the batch, H the heads, K and V the head sizes of keys and values.

    Parameters
    ----------
    op, *inputs, **options
        The name of an op with heads, such as "wkv7", and what `rwkv_jit`'s function of this name takes, without
        gradients. Summaries are [V, K] whatever `state_layout` is.

    Returns
    -------
    torch.Tensor, shape (B, H, V + K, K), float32
        The rows of Q, and behind them those of P; float64 for inputs in float64. `merge` puts a state through it, and
        `compose` joins it to others.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.

    Examples
    --------
    >>> inputs = [torch.randn(2, 128, 4, 64, device="cuda") * 0.2 for _ in range(6)]
    >>> rwkv_jit.parallel.summary("wkv7", *inputs).shape
    torch.Size([2, 4, 128, 64])
    """
    checks.check_name("op", op, [name for name, entry in ALL.items() if entry.state and entry.has_heads])
    made = ALL[op]
    needed = [public for public, name in zip(made.public_names, made.names, strict=True) if name not in made.optional]
    if len(inputs) != len(needed):
        raise TypeError(f"inputs: expected {', '.join(needed)} of {op}, got {len(inputs)} of them")
    for name in ("initial_state", "output_final_state", "cu_seqlens"):
        if name in options:
            raise unexpected("parallel.summary", name, legal_names(made))
    bias, transition = getattr(rwkv_jit, op)(*inputs, cu_seqlens=_Summarized(), **options)
    if made.transition[0] == "1":
        transition = torch.diag_embed(transition.squeeze(-2).expand(*bias.shape[:-2], bias.shape[-1]))
    return torch.cat([bias, transition], -2)
