"""The ops of `diagonal`, over a pool of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.call.tensors import Array
from rwkv_jit.derived.diagonal import NO_LIMIT, steps_between
from rwkv_jit.pool import calls, update, varlen
from rwkv_jit.schedules.derived_table import OPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import UpdateOptions, VarlenOptions


# ---- one or a few tokens -----------------------------------------------------------------------------------------


def simple_gla_update(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""Scalar-gated linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^g S + v k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g
        As `simple_gla` takes them: q and k (B, G, K), v (B, H, V), g (B, H) or (H,); of T tokens (B, T, ...).

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
    return calls.call(update.KIND, OPS["simple_gla"], state, (q, k, v, g), options)


def hgrn2_update(state: Array, q: Array, g: Array, v: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""HGRN2 of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is 1 and state_layout "kv".
    q, g, v
        As `hgrn2` takes them: q and g (B, H, K), v (B, H, V); of T tokens (B, T, ...).

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
    return calls.call(update.KIND, OPS["hgrn2"], state, (q, g, v), options)


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
    dt_limit: tuple[float, float] = NO_LIMIT,
    **options: Unpack[UpdateOptions],
) -> Tensor:
    r"""The state space of Mamba-2 of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is 1 and state_layout "vk".
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit
        As `ssd` takes them: x (B, H, V), dt (B, H), A (H,), B and C (B, G, K); of T tokens (B, T, ...).

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
    return _ssd(update.KIND, state, (x, dt, A, B, C, D, z, dt_bias), dt_softplus, dt_limit, options)


# ---- sequences of any lengths -------------------------------------------------------------------------------------


def simple_gla_varlen(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""Scalar-gated linear attention of sequences of any lengths, which changes states of a pool in place.

        S <- e^g S + v k^T;   y = scale S q        per sequence and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
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
    return calls.call(varlen.KIND, OPS["simple_gla"], state, (q, k, v, g), options)


def hgrn2_varlen(state: Array, q: Array, g: Array, v: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""HGRN2 of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q        per sequence and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is 1 and state_layout "kv".
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
    return calls.call(varlen.KIND, OPS["hgrn2"], state, (q, g, v), options)


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
    dt_limit: tuple[float, float] = NO_LIMIT,
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""The state space of Mamba-2 of sequences of any lengths, which changes states of a pool in place.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)        per sequence and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is 1 and state_layout "vk".
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit
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
    return _ssd(varlen.KIND, state, (x, dt, A, B, C, D, z, dt_bias), dt_softplus, dt_limit, options)


# ---- a call of Mamba-2 -------------------------------------------------------------------------------------------


def _ssd(
    kind: calls.Kind, state: Any, arrays: tuple[Any, ...], dt_softplus: Any, dt_limit: Any, options: Mapping[str, Any]
) -> Tensor:
    if dt_softplus is not True and dt_softplus is not False:
        dt_softplus = checks.check_flag("dt_softplus", dt_softplus)
    least, most = steps_between(dt_limit)
    traits = ("dt_softplus", dt_softplus), ("least_step", least), ("most_step", most)
    return calls.call(kind, OPS["ssd"], state, arrays, options, traits=traits)
