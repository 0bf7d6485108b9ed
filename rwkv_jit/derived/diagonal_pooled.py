"""The ops of `diagonal`, over a pool of states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.derived import arguments
from rwkv_jit.derived.diagonal import (
    behind,
    check_behind,
    of_states,
    of_tokens,
    steps_of,
    with_keys,
)
from rwkv_jit.derived.operands import for_heads
from rwkv_jit.pool.options import UpdateOptions, VarlenOptions
from rwkv_jit.pool.update import gla_update
from rwkv_jit.pool.varlen import gla_varlen
from rwkv_jit.schedules.derived_table import ROWS

if TYPE_CHECKING:
    from typing_extensions import Unpack


# ---- one or a few tokens -----------------------------------------------------------------------------------------


def simple_gla_update(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""Scalar-gated linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^g S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (B, G, K) or (B, T, G, K), float16, bfloat16 or float32
        As `simple_gla` takes them.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        As `simple_gla` takes it.
    g : torch.Tensor, shape (B, H) or (B, T, H), or (H,), dtype of q or float32
        As `simple_gla` takes it.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `simple_gla`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, device="cuda")
    >>> rwkv_jit.simple_gla_update(pool, q, k, v, g).shape
    torch.Size([3, 4, 64])
    """
    g = of_tokens(g, v)
    call = arguments.pooled(ROWS["simple_gla"], "update", (q, k, v, g), options)
    return call.run(gla_update, state, for_heads(*call.inputs))


def hgrn2_update(state: Array, q: Array, g: Array, v: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""HGRN2 of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is 1 and state_layout "kv".
    q : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        As `hgrn2` takes it.
    g : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of q or float32
        As `hgrn2` takes it.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        As `hgrn2` takes it.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `hgrn2`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, v = torch.randn(2, 3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> rwkv_jit.hgrn2_update(pool, q, g, v).shape
    torch.Size([3, 4, 64])
    """
    call = arguments.pooled(ROWS["hgrn2"], "update", (q, g, v), options)
    return call.run(gla_update, state, with_keys(*call.inputs))


def ssd_update(
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Unpack[UpdateOptions],
) -> Tensor:
    r"""The state space of Mamba-2 of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is 1 and state_layout "vk".
    x : torch.Tensor, shape (B, H, V) or (B, T, H, V), float16, bfloat16 or float32
        As `ssd` takes it.
    dt : torch.Tensor, shape (B, H) or (B, T, H), dtype of x or float32
        As `ssd` takes it.
    A : torch.Tensor, shape (H,), dtype of x or float32
        As `ssd` takes it.
    B, C : torch.Tensor, shape (B, G, K) or (B, T, G, K), dtype of x
        As `ssd` takes them.
    D, dt_bias, z, dt_softplus, dt_limit : optional
        As `ssd` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    References
    ----------
    As `ssd`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> x, dt = torch.randn(3, 4, 64, device="cuda"), torch.rand(3, 4, device="cuda")
    >>> A, (B, C) = -torch.rand(4, device="cuda"), torch.randn(2, 3, 1, 64, device="cuda")
    >>> rwkv_jit.ssd_update(pool, x, dt, A, B, C).shape
    torch.Size([3, 4, 64])
    """
    return _ssd("update", state, (x, dt, B, C), A, D, z, dt_bias, dt_softplus, dt_limit, options)


# ---- sequences of any lengths -------------------------------------------------------------------------------------


def simple_gla_varlen(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""Scalar-gated linear attention of sequences of any lengths, which changes states of a pool in place.

        S <- e^g S + v k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, g
        As in `simple_gla_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `simple_gla`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, device="cuda")
    >>> rwkv_jit.simple_gla_varlen(pool, q, k, v, g, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    g = of_tokens(g, v)
    call = arguments.pooled(ROWS["simple_gla"], "varlen", (q, k, v, g), options)
    return call.run(gla_varlen, state, for_heads(*call.inputs))


def hgrn2_varlen(state: Array, q: Array, g: Array, v: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""HGRN2 of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is 1 and state_layout "kv".
    q, g, v
        As in `hgrn2_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `hgrn2`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, v = torch.randn(2, 102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, 64, device="cuda")
    >>> rwkv_jit.hgrn2_varlen(pool, q, g, v, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    call = arguments.pooled(ROWS["hgrn2"], "varlen", (q, g, v), options)
    return call.run(gla_varlen, state, with_keys(*call.inputs))


def ssd_varlen(
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""The state space of Mamba-2 of sequences of any lengths, which changes states of a pool in place.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is 1 and state_layout "vk".
    x, dt, A, B, C, D, dt_bias, z, dt_softplus, dt_limit
        As in `ssd_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    References
    ----------
    As `ssd`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> x, dt = torch.randn(102, 4, 64, device="cuda"), torch.rand(102, 4, device="cuda")
    >>> A, (B, C) = -torch.rand(4, device="cuda"), torch.randn(2, 102, 1, 64, device="cuda")
    >>> rwkv_jit.ssd_varlen(pool, x, dt, A, B, C, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    return _ssd("varlen", state, (x, dt, B, C), A, D, z, dt_bias, dt_softplus, dt_limit, options)


# ---- a call of Mamba-2 -------------------------------------------------------------------------------------------


def _ssd(
    verb: str, state: Any, arrays: Sequence[Any], A: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: Any, dt_limit: Any,
    options: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    out = options.get("out")
    options = {**options, "out": tensors.apart(out, (*arrays, D, z))}
    call = arguments.pooled(ROWS["ssd"], verb, arrays, options, (A, D, z, dt_bias))
    x, dt, B, C = call.inputs
    own, gate = check_behind(x, D, z)
    operands = of_states(x, *steps_of(x, dt, A, dt_bias, dt_softplus, dt_limit), B, C)
    y = call.run(gla_update if verb == "update" else gla_varlen, state, operands)
    y = with_own(y, x, own, gate, state, options)
    return y if out is None or options["out"] is out else out.copy_(y)


def with_own(
    y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, state: Any, options: Mapping[str, Any]
) -> Tensor:
    """Return outputs with what they have of the input itself, behind their gate; zeros where there is no slot."""
    made = behind(y, x, D, z)
    if made is y:
        return y
    there = _are_there(y, tensors.from_any("state", state).shape[0], options)
    if there is not None:
        made = made.masked_fill_(~there, 0)
    return made if options.get("out") is None else y.copy_(made)


def _are_there(y: Tensor, slots: int, options: Mapping[str, Any]) -> Tensor | None:
    """Return which rows of an update have a slot, or which tokens of sequences, beside y; None where all rows have."""
    indices, active, there = options.get("state_indices"), options.get("num_active"), None
    if indices is not None:
        indices = tensors.from_any("state_indices", indices)
        there = (indices > max(options.get("null_index", -1), -1)) & (indices < slots)  # [B], or [sequences]
    if options.get("cu_seqlens") is None:
        return there if there is None else there.view(-1, *[1] * (y.dim() - 1))
    bounds = tensors.from_any("cu_seqlens", options["cu_seqlens"])
    places = torch.arange(y.shape[-3], dtype=bounds.dtype, device=y.device)
    owner = torch.searchsorted(bounds.contiguous(), places, right=True) - 1  # the sequence of each token [T]
    inside = (owner >= 0) & (owner < bounds.shape[0] - 1)
    if active is not None:
        inside &= owner < tensors.from_any("num_active", active)
    if there is not None:
        inside &= there[owner.clamp(0, there.shape[0] - 1)]
    return inside[:, None, None]  # [T, 1, 1]
