"""One or a few tokens of many sequences, whose states are in a pool and change in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, registry, switches, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.pool import arguments, calls, plain
from rwkv_jit.pool.options import DecayUpdateOptions
from rwkv_jit.schedules import update
from rwkv_jit.schedules.derived_table import ALL
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import OPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import UpdateOptions


# ---- the public calls --------------------------------------------------------------------------------------------


def wkv7_update(
    state: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-7 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    r, w, k, v, a, b : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K
        As `wkv7` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv7`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 64, device="cuda") / 8
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> rwkv_jit.wkv7_update(pool, r, w, k, v, a, b, state_indices=slots).shape
    torch.Size([3, 4, 64])
    """
    return calls.call(KIND, OPS["wkv7"], state, (r, w, k, v, a, b), options)


def wkv6_update(
    state: Array, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    r, k, v, w, u : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K, u (H, K)
        As `wkv6` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv6`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> r, k, v, w = torch.randn(4, 3, 4, 64, device="cuda")
    >>> rwkv_jit.wkv6_update(pool, r, k, v, w, torch.zeros(4, 64, device="cuda")).shape
    torch.Size([3, 4, 64])
    """
    return calls.call(KIND, OPS["wkv6"], state, (r, k, v, w, u), options)


def wkv5_update(
    state: Array, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    r, k, v, w, u : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K, w and u (H, K)
        As `wkv5` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv5`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> r, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> rwkv_jit.wkv5_update(pool, r, k, v, w, u).shape
    torch.Size([3, 4, 64])
    """
    return calls.call(KIND, OPS["wkv5"], state, (r, k, v, w, u), options)


def gla_update(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[DecayUpdateOptions]) -> Tensor:
    r"""Gated linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(d(g)) + v k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    q, k, v, g : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K
        As `gla` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gla`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 128, device="cuda")
    >>> q, k, x = torch.randn(3, 3, 4, 64, device="cuda")
    >>> v = torch.randn(3, 4, 128, device="cuda")
    >>> rwkv_jit.gla_update(pool, q, k, v, torch.nn.functional.logsigmoid(x)).shape
    torch.Size([3, 4, 128])
    """
    return calls.call(KIND, OPS["gla"], state, (q, k, v, g), options)


def linear_attention_update(state: Array, q: Array, k: Array, v: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""Linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S + v k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too.
    q, k, v : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K
        As `linear_attention` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `linear_attention`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 128, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 64, device="cuda")
    >>> rwkv_jit.linear_attention_update(pool, q, k, torch.randn(3, 4, 128, device="cuda")).shape
    torch.Size([3, 4, 128])
    """
    return calls.call(KIND, OPS["linear_attention"], state, (q, k, v), options)


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

    def run(self) -> Plan:
        alignment = self.state.data_ptr() & calls.ADDRESS_BITS
        key = self.op.name, *self[-5:], switches.is_batch_invariant(), alignment, tensors.signature(self.tensors)
        plan = _plans.get(key)
        if plan is None:
            problem = calls.problem_of(
                self.op, self.inputs, self.state, scale=self.scale, decay=self.decay, state_layout=self.state_layout,
                traits=self.traits,
            )  # fmt: skip
            indices = self.state_indices if self.state_indices is not None else self.write_indices
            index_bytes = 4 if indices is None else indices.element_size()
            pool = calls.pool_of(self.state, index_bytes, self.null_index, self.w0, self.seed)
            names = (*self.op.names, "state", *KIND.tensors, "y")
            named = {**dict(zip(names, self.tensors, strict=True)), "state": calls.one_slot(self.state)}
            schedule = update.schedule(problem, pool, self.state_indices is not None)
            plan = _plans.keep(key, Plan(schedule, problem, named))
        plan.run(self.tensors)
        return plan


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


KIND = calls.Kind("{op}_update", "update_states", ("w0", "state_indices", "write_indices", "seed"), check)
_plans: BySignature[Plan] = BySignature()


# ---- the torch op ------------------------------------------------------------------------------------------------


def run(op: str, state: Tensor, y: Tensor, inputs: Sequence[Any], *given: Any, **named: Any) -> None:
    """Run the torch op with CPU or CUDA tensors."""
    fitted, inputs = calls.fitted(ALL[op], inputs)
    step = _Step(fitted, state, y, inputs, *given)._replace(traits=calls.traits_of(fitted, named))
    if step.is_empty:
        return
    if step.state.is_cuda:
        step.run()
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
