"""One or a few tokens of RWKV-4 of many rows, whose states are in a pool and change in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.pool import arguments, calls, plain
from rwkv_jit.pool.calls import Step
from rwkv_jit.schedules import wkv4 as schedules
from rwkv_jit.schedules.legal import Wkv4Decay
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import OPS

# What has rows and tokens comes first: known calls are found by the first input's shape.
_OP = replace(OPS["wkv4"], inputs=dict(k="BTC", v="BTC", w="C", u="C"), lead=0)


def wkv4_update(
    state: Array,
    w: Array,
    u: Array,
    k: Array,
    v: Array,
    decay: Wkv4Decay = "raw",
    *,
    state_indices: Array | None = None,
    write_indices: Array | None = None,
    null_index: int = -1,
    out: Array | None = None,
    **_unknown: NoReturn,
) -> Tensor:
    """RWKV-4 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = (num + e^(u + k) v) / (den + e^(u + k));   num <- e^d num + e^k v;   den <- e^d den + e^k

    per row and channel, token by token. B is the rows, T the tokens, C the channels.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, 3, C), float32
        The pool: num, den and max of each slot, as `wkv4` takes and returns them; begin with 0, 0 and -1e38. Any
        strides. It changes in place, so every element needs separate memory, and an array of another library
        must be one that torch can write.
    w, u : torch.Tensor, shape (C,), dtype of k or float32
        Decay and bonus.
    k, v : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        Key and value. Any strides; if the last one is not 1, the input is copied.
    decay : {"raw", "log"}, default "raw"
        Whether the log-decay d is -exp(w) or w.
    state_indices, write_indices, null_index, out
        As `PoolOptions` and `UpdateOptions` say, errors too.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    Notes
    -----
    The arithmetic, its precision and what autocast does are those of `wkv4`. Long prompts are for `wkv4`: tokens go one
    after another here.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> pool = torch.tensor([0.0, 0.0, -1e38], device="cuda").view(1, 3, 1).repeat(16, 1, 96)
    >>> w, u = torch.linspace(-5, 1, 96, device="cuda"), torch.zeros(96, device="cuda")
    >>> k, v = torch.randn(2, 3, 96, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> rwkv_jit.wkv4_update(pool, w, u, k, v, state_indices=slots).shape
    torch.Size([3, 96])
    """
    if _unknown:
        raise unexpected("wkv4_update", next(iter(_unknown)))
    options: dict[str, Any] = {"decay": decay, "null_index": null_index}
    for name, x in (("state_indices", state_indices), ("write_indices", write_indices), ("out", out)):
        if x is not None:
            options[name] = x
    return calls.call(_KIND, _OP, state, (k, v, w, u), options)


def _plan(step: Step) -> Plan:
    state, problem = step.state, step.problem()
    strides = dict(zip(("slot_stride", "number_stride", "channel_stride"), state.stride(), strict=True))
    sizes = {**strides, "slots": state.shape[0], "null_index": step.named["null_index"]}
    schedule = schedules.update(problem, sizes, step.index_bytes)
    # The kernel takes the pool's address and strides: no copy, whatever these are.
    return Plan(schedule, problem, {**step.tensors_by_name, "state": state[:1, :1, :1]})


def check(op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Step:
    """Check a call as `update.check` does, and return it with all options."""
    decay, null_index = options["decay"], arguments.null_index(options["null_index"])
    checks.check_name("decay", decay, op.decays)
    k, asked_v, w, u = checks.as_tensors(op, arrays)
    v = asked_v
    if k.dim() == 2:  # one token
        k, v = (x.unsqueeze(1) if x.dim() == 2 else x for x in (k, v))
    wide = not k.is_cuda
    sizes = checks.check_inputs(op, (k, v, w, u), wide)
    batch, channels = sizes["B"], sizes["C"]

    state = tensors.from_any("state", state, in_place=True)
    if state.dim() != 3 or tuple(state.shape[1:]) != (3, channels):
        raise ValueError(f"state: expected shape [slots, 3, {channels}], got {list(state.shape)}")
    checks.check_state(op, "state", state, [tuple(state.shape)], k, wide)
    _check_memory(state)
    slots = {x: arguments.indices(x, options.get(x), batch, k) for x in _KIND.tensors}
    arguments.check_alike(slots)
    read, written = slots.values()
    arguments.check_room("state", state, read, batch)
    if arguments.may_look_at(slots.values()):
        arguments.check_slots(slots, state.shape[0], null_index)
    y = arguments.y_of(options.get("out"), v, asked_v)
    arguments.refuse_gradients(op, name, (state, y, k, v, w, u))
    return Step(_KIND, op, state, y, (k, v, w, u), (read, written, null_index, decay))


def _check_memory(state: Tensor) -> None:
    """Check that no two numbers of a pool lie in one place."""
    end = 1  # of what the dimensions so far reach
    for stride, size in sorted(zip(state.stride(), state.shape, strict=True)):
        if size > 1 and stride < end:
            raise ValueError(f"state: expected slots that do not overlap, got strides {state.stride()}")
        end += stride * (size - 1)


_KIND = calls.Kind(
    "{op}_update", "wkv4_states", ("state_indices", "write_indices"), ("null_index", "decay"), check, _plan,
    lists_inputs=False,
)  # fmt: skip


calls.implement(_KIND, plain.update, {"wkv4": _OP})
