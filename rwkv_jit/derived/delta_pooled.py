"""The delta rules of `delta`, over a pool of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.call.tensors import Array
from rwkv_jit.pool import calls, update, varlen
from rwkv_jit.schedules.derived_table import OPS
from rwkv_jit.schedules.legal import BetaMap

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import UpdateOptions, VarlenOptions


# ---- one or a few tokens -----------------------------------------------------------------------------------------


def kda_update(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    qk_norm: bool = False,
    beta_map: BetaMap = "identity",
    **options: Unpack[UpdateOptions],
) -> Tensor:
    r"""Kimi Delta Attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g, beta, A_log, dt_bias, lower_bound, qk_norm, beta_map
        As `kda` takes them: q and k (B, G, K), v (B, H, V), g (B, H, K), beta (B, H); of T tokens (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `kda`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g, beta = -torch.rand(3, 4, 64, device="cuda"), torch.rand(3, 4, device="cuda")
    >>> rwkv_jit.kda_update(pool, q, k, v, g, beta, qk_norm=True).shape
    torch.Size([3, 4, 64])
    """
    arrays, traits = (q, k, v, g, beta, A_log, dt_bias), (("beta_map", beta_map), ("lower_bound", lower_bound))
    return _call(update.KIND, "kda", state, arrays, qk_norm, options, *traits)


def gated_delta_rule_update(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    qk_norm: bool = False,
    beta_map: BetaMap = "identity",
    **options: Unpack[UpdateOptions],
) -> Tensor:
    r"""The gated delta rule of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g, beta, A_log, dt_bias, qk_norm, beta_map
        As `gated_delta_rule` takes them: q and k (B, G, K), v (B, H, V), g and beta (B, H); of T tokens (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gated_delta_rule`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g, beta = -torch.rand(3, 4, device="cuda"), torch.rand(3, 4, device="cuda")
    >>> rwkv_jit.gated_delta_rule_update(pool, q, k, v, g, beta, qk_norm=True).shape
    torch.Size([3, 4, 64])
    """
    arrays = q, k, v, g, beta, A_log, dt_bias
    return _call(update.KIND, "gated_delta_rule", state, arrays, qk_norm, options, ("beta_map", beta_map))


def delta_rule_update(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    qk_norm: bool = False,
    beta_map: BetaMap = "identity",
    **options: Unpack[UpdateOptions],
) -> Tensor:
    r"""The delta rule of one or a few tokens, which changes states of a pool in place: for decoding.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, beta, qk_norm, beta_map
        As `delta_rule` takes them: q and k (B, G, K), v (B, H, V), beta (B, H); of T tokens (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `delta_rule`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> rwkv_jit.delta_rule_update(pool, q, k, v, beta, qk_norm=True).shape
    torch.Size([3, 4, 64])
    """
    return _call(update.KIND, "delta_rule", state, (q, k, v, beta), qk_norm, options, ("beta_map", beta_map))


def gated_delta_rule2_update(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    write_gate: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    qk_norm: bool = False,
    **options: Unpack[UpdateOptions],
) -> Tensor:
    r"""The gated delta rule by channels of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per row and head, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g, beta, write_gate, A_log, dt_bias, lower_bound, qk_norm
        As `gated_delta_rule2` takes them: q and k (B, G, K), v and write_gate (B, H, V), g and beta (B, H, K); of T
        tokens (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gated_delta_rule2`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g, beta, write_gate = -torch.rand(3, 4, 64, device="cuda"), *torch.rand(2, 3, 4, 64, device="cuda")
    >>> rwkv_jit.gated_delta_rule2_update(pool, q, k, v, g, beta, write_gate, qk_norm=True).shape
    torch.Size([3, 4, 64])
    """
    arrays = q, k, v, g, beta, write_gate, A_log, dt_bias
    return _call(update.KIND, "gated_delta_rule2", state, arrays, qk_norm, options, ("lower_bound", lower_bound))


# ---- sequences of any lengths -------------------------------------------------------------------------------------


def kda_varlen(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    qk_norm: bool = False,
    beta_map: BetaMap = "identity",
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""Kimi Delta Attention of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q        per sequence and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g, beta, A_log, dt_bias, lower_bound, qk_norm, beta_map
        As in `kda_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `kda`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> g, beta = -torch.rand(102, 4, 64, device="cuda"), torch.rand(102, 4, device="cuda")
    >>> rwkv_jit.kda_varlen(pool, q, k, v, g, beta, qk_norm=True, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    arrays, traits = (q, k, v, g, beta, A_log, dt_bias), (("beta_map", beta_map), ("lower_bound", lower_bound))
    return _call(varlen.KIND, "kda", state, arrays, qk_norm, options, *traits)


def gated_delta_rule_varlen(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    qk_norm: bool = False,
    beta_map: BetaMap = "identity",
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""The gated delta rule of sequences of any lengths, which changes states of a pool in place.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q        per sequence and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g, beta, A_log, dt_bias, qk_norm, beta_map
        As in `gated_delta_rule_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gated_delta_rule`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> g, beta = -torch.rand(102, 4, device="cuda"), torch.rand(102, 4, device="cuda")
    >>> rwkv_jit.gated_delta_rule_varlen(pool, q, k, v, g, beta, qk_norm=True, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    arrays = q, k, v, g, beta, A_log, dt_bias
    return _call(varlen.KIND, "gated_delta_rule", state, arrays, qk_norm, options, ("beta_map", beta_map))


def delta_rule_varlen(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    qk_norm: bool = False,
    beta_map: BetaMap = "identity",
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""The delta rule of sequences of any lengths, which changes states of a pool in place.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q        per sequence and head, S [V, K]

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, beta, qk_norm, beta_map
        As in `delta_rule_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `delta_rule`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> beta = torch.rand(102, 4, device="cuda")
    >>> rwkv_jit.delta_rule_varlen(pool, q, k, v, beta, qk_norm=True, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    return _call(varlen.KIND, "delta_rule", state, (q, k, v, beta), qk_norm, options, ("beta_map", beta_map))


def gated_delta_rule2_varlen(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    write_gate: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    qk_norm: bool = False,
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""The gated delta rule by channels of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per sequence and head, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors too; by default scale is K^-0.5 and state_layout "kv".
    q, k, v, g, beta, write_gate, A_log, dt_bias, lower_bound, qk_norm
        As in `gated_delta_rule2_update`, with (T, ...) or (1, T, ...) for the shapes (B, ...) or (B, T, ...).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gated_delta_rule2`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> g, beta, write_gate = -torch.rand(102, 4, 64, device="cuda"), *torch.rand(2, 102, 4, 64, device="cuda")
    >>> rwkv_jit.gated_delta_rule2_varlen(pool, q, k, v, g, beta, write_gate, qk_norm=True, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    arrays = q, k, v, g, beta, write_gate, A_log, dt_bias
    return _call(varlen.KIND, "gated_delta_rule2", state, arrays, qk_norm, options, ("lower_bound", lower_bound))


# ---- a call ------------------------------------------------------------------------------------------------------


def _call(
    kind: calls.Kind, op: str, state: Any, arrays: tuple[Any, ...], qk_norm: Any, options: Mapping[str, Any],
    *traits: tuple[str, Any],
) -> Tensor:  # fmt: skip
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    return calls.call(kind, OPS[op], state, arrays, options, traits=(("qk_norm", qk_norm), *traits))
