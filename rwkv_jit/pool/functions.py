"""The functions over a pool of states: of each op one for a few tokens, one for sequences, and others.

tools/functions.py has written this, from the functions over sequences and their docstrings.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.call.tensors import Array
from rwkv_jit.pool import calls, update, varlen
from rwkv_jit.pool.replay import DRAFT, STEP
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules.legal import BetaMap
from rwkv_jit.schedules.table import ALL

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import (
        DecayUpdateOptions,
        DecayVarlenOptions,
        ReplayOptions,
        UpdateOptions,
        VarlenOptions,
    )


def wkv5_update(
    state: Array, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    r, k : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, the same for every token.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> y = rwkv_jit.wkv5_update(pool, r, k, v, w, u, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["wkv5"], state, (r, k, v, w, u), options)


def wkv6_update(
    state: Array, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    r, k : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 3, 4, 64, device="cuda")
    >>> u = torch.randn(4, 64, device="cuda")
    >>> y = rwkv_jit.wkv6_update(pool, r, k, v, w, u, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["wkv6"], state, (r, k, v, w, u), options)


def wkv7_update(
    state: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-7 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too.
    r, k, a, b : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        Receptance, key, and the two sides of the state's rank-one correction (in the model a = -kk, b = kk * a').
        Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other libraries.
    w : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 64, device="cuda")
    >>> y = rwkv_jit.wkv7_update(pool, r, w, k, v, a, b, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["wkv7"], state, (r, w, k, v, a, b), options)


def gla_update(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[DecayUpdateOptions]) -> Tensor:
    r"""Gated linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayUpdateOptions` say, errors and precision too. By default scale is K^-0.5 and
        state_layout "kv".
    q, k : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value.
    g : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of q or float32
        Decay before the map that `decay` names; by default its logarithm.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> y = rwkv_jit.gla_update(pool, q, k, v, g, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["gla"], state, (q, k, v, g), options)


def linear_attention_update(state: Array, q: Array, k: Array, v: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""Linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> y = rwkv_jit.linear_attention_update(pool, q, k, v, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["linear_attention"], state, (q, k, v), options)


def kda_update(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[UpdateOptions],
) -> Tensor:  # fmt: skip
    r"""Kimi Delta Attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (B, G, K) or (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of q or float32
        Log-decay of each channel; raw with A_log.
    beta : torch.Tensor, shape (B, H) or (B, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    A_log : torch.Tensor, shape (H,), dtype of q or float32, optional
        With it g is raw: the log-decay is -exp(A_log) softplus(g + dt_bias).
    dt_bias : torch.Tensor, shape (H, K) or (H * K,), dtype of q or float32, optional
        Is added to the raw g; goes with A_log.
    lower_bound : float, optional
        Below 0, and goes with A_log: the log-decay is lower_bound sigmoid(exp(A_log) (g + dt_bias)) then. It is the
        `decay_bound` too, where none is given.
    qk_norm : bool, default False
        Whether q and k are first divided by sqrt(|x|^2 + 1e-6), per head.
    beta_map : {"identity", "sigmoid", "twice_sigmoid"}, default "identity"
        The map from beta to the rate; "twice_sigmoid" is 2 sigmoid(beta).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.kda_update(pool, q, k, v, g, beta, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(update.KIND, ALL["kda"], state, arrays, options, traits=traits)


def gated_delta_rule_update(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[UpdateOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (B, G, K) or (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, H) or (B, T, H), dtype of q or float32
        Log-decay of each head; raw with A_log.
    beta : torch.Tensor, shape (B, H) or (B, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    A_log, qk_norm, beta_map
        As `kda` takes them.
    dt_bias : torch.Tensor, shape (H,), dtype of q or float32, optional
        Is added to the raw g; goes with A_log.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.gated_delta_rule_update(pool, q, k, v, g, beta, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(update.KIND, ALL["gated_delta_rule"], state, arrays, options, traits=traits)


def delta_rule_update(
    state: Array, q: Array, k: Array, v: Array, beta: Array, *, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[UpdateOptions],
) -> Tensor:  # fmt: skip
    r"""The delta rule of one or a few tokens, which changes states of a pool in place: for decoding.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (B, G, K) or (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    beta : torch.Tensor, shape (B, H) or (B, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    qk_norm, beta_map
        As `kda` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv:2406.06484.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.delta_rule_update(pool, q, k, v, beta, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, beta
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(update.KIND, ALL["delta_rule"], state, arrays, options, traits=traits)


def gated_delta_rule2_update(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, write_gate: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[UpdateOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule by channels of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (B, G, K) or (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of q or float32
        Log-decay of each channel; raw with A_log.
    beta : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of q or float32
        How much of each channel of the key is erased.
    write_gate : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        How much of each value is written.
    A_log, dt_bias, lower_bound, qk_norm
        As `kda` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, with gates for channels as in
    NVIDIA's GDN-2.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> beta, write_gate = torch.rand(2, 3, 4, 64, device="cuda")
    >>> y = rwkv_jit.gated_delta_rule2_update(pool, q, k, v, g, beta, write_gate, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, write_gate, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm)
    return calls.call(update.KIND, ALL["gated_delta_rule2"], state, arrays, options, traits=traits)


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
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, H), (B, T, H) or (H,), dtype of q or float32
        Logarithm of the decay of each head: of each token, or fixed, as in retention and lightning attention.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.simple_gla_update(pool, q, k, v, g, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["simple_gla"], state, (q, k, v, g), options)


def hgrn2_update(state: Array, q: Array, g: Array, v: Array, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""HGRN2 of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too. By default scale is 1 and state_layout "kv".
    q : torch.Tensor, shape (B, H, K) or (B, T, H, K), float16, bfloat16 or float32
        Query. Any strides; where the last one is not 1, a copy is made.
    g : torch.Tensor, shape (B, H, K) or (B, T, H, K), dtype of q or float32
        Logarithm of the forget gate, at most 0; 1 - e^g is the key.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> y = rwkv_jit.hgrn2_update(pool, q, g, v, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(update.KIND, ALL["hgrn2"], state, (q, g, v), options)


def ssd_update(
    state: Array, x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Unpack[UpdateOptions],
) -> Tensor:  # fmt: skip
    r"""The state space of Mamba-2 of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `UpdateOptions` say, errors and precision too.
    x : torch.Tensor, shape (B, H, V) or (B, T, H, V), float16, bfloat16 or float32
        Input. Any strides; where the last one is not 1, a copy is made.
    dt : torch.Tensor, shape (B, H) or (B, T, H), dtype of x or float32
        Step; raw with `dt_bias` and `dt_softplus`.
    A : torch.Tensor, shape (H,), dtype of x or float32
        Log-decay of a step of 1, which is negative.
    B, C : torch.Tensor, shape (B, G, K) or (B, T, G, K), dtype of x
        Key by which an input is written, and query by which the state is read. Head h has those of group h // (H // G).
    D : torch.Tensor, shape (H,) or (H, V), dtype of x or float32, optional
        How much of the input is added to y.
    z : torch.Tensor, shape and dtype of x, optional
        y is multiplied by silu(z).
    dt_bias : torch.Tensor, shape (H,), dtype of x or float32, optional
        Is added to the raw dt.
    dt_softplus : bool, default False
        Whether the step is the softplus of that sum.
    dt_limit : pair of float, default (0.0, inf)
        The least and the largest step: others are clamped to these.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> x = torch.randn(3, 4, 64, device="cuda")
    >>> dt = torch.rand(3, 4, device="cuda")
    >>> A = -torch.rand(4, device="cuda")
    >>> B, C = torch.randn(2, 3, 2, 64, device="cuda")
    >>> y = rwkv_jit.ssd_update(pool, x, dt, A, B, C, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if dt_softplus is not True and dt_softplus is not False:
        dt_softplus = checks.check_flag("dt_softplus", dt_softplus)
    least_step, most_step = checks.step_limits(dt_limit)
    arrays = x, dt, A, B, C, D, z, dt_bias
    traits = ("dt_softplus", dt_softplus), ("least_step", least_step), ("most_step", most_step)
    return calls.call(update.KIND, ALL["ssd"], state, arrays, options, traits=traits)


def wkv5_varlen(
    state: Array, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[DecayVarlenOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of sequences of any lengths, which changes states of a pool in place.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayVarlenOptions` say, errors and precision too.
    r, k : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, the same for every token.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.wkv5_varlen(pool, r, k, v, w, u, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["wkv5"], state, (r, k, v, w, u), options)


def wkv6_varlen(
    state: Array, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[DecayVarlenOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of sequences of any lengths, which changes states of a pool in place.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayVarlenOptions` say, errors and precision too.
    r, k : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 102, 4, 64, device="cuda")
    >>> u = torch.randn(4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.wkv6_varlen(pool, r, k, v, w, u, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["wkv6"], state, (r, k, v, w, u), options)


def wkv7_varlen(
    state: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, **options: Unpack[DecayVarlenOptions]
) -> Tensor:
    r"""RWKV-7 time mixing of sequences of any lengths, which changes states of a pool in place.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayVarlenOptions` say, errors and precision too.
    r, k, a, b : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        Receptance, key, and the two sides of the state's rank-one correction (in the model a = -kk, b = kk * a').
        Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other libraries.
    w : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of r
        Value.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 102, 4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.wkv7_varlen(pool, r, w, k, v, a, b, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["wkv7"], state, (r, w, k, v, a, b), options)


def gla_varlen(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[DecayVarlenOptions]) -> Tensor:
    r"""Gated linear attention of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `DecayVarlenOptions` say, errors and precision too. By default scale is K^-0.5 and
        state_layout "kv".
    q, k : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value.
    g : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of q or float32
        Decay before the map that `decay` names; by default its logarithm.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.gla_varlen(pool, q, k, v, g, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["gla"], state, (q, k, v, g), options)


def linear_attention_varlen(state: Array, q: Array, k: Array, v: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""Linear attention of sequences of any lengths, which changes states of a pool in place.

        S <- S + v k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.linear_attention_varlen(pool, q, k, v, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["linear_attention"], state, (q, k, v), options)


def kda_varlen(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[VarlenOptions],
) -> Tensor:  # fmt: skip
    r"""Kimi Delta Attention of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, G, K) or (1, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of q or float32
        Log-decay of each channel; raw with A_log.
    beta : torch.Tensor, shape (T, H) or (1, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    A_log : torch.Tensor, shape (H,), dtype of q or float32, optional
        With it g is raw: the log-decay is -exp(A_log) softplus(g + dt_bias).
    dt_bias : torch.Tensor, shape (H, K) or (H * K,), dtype of q or float32, optional
        Is added to the raw g; goes with A_log.
    lower_bound : float, optional
        Below 0, and goes with A_log: the log-decay is lower_bound sigmoid(exp(A_log) (g + dt_bias)) then. It is the
        `decay_bound` too, where none is given.
    qk_norm : bool, default False
        Whether q and k are first divided by sqrt(|x|^2 + 1e-6), per head.
    beta_map : {"identity", "sigmoid", "twice_sigmoid"}, default "identity"
        The map from beta to the rate; "twice_sigmoid" is 2 sigmoid(beta).

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 102, 2, 64, device="cuda")
    >>> v = torch.randn(102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, 64, device="cuda")
    >>> beta = torch.rand(102, 4, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.kda_varlen(pool, q, k, v, g, beta, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(varlen.KIND, ALL["kda"], state, arrays, options, traits=traits)


def gated_delta_rule_varlen(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[VarlenOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule of sequences of any lengths, which changes states of a pool in place.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, G, K) or (1, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (T, H) or (1, T, H), dtype of q or float32
        Log-decay of each head; raw with A_log.
    beta : torch.Tensor, shape (T, H) or (1, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    A_log, qk_norm, beta_map
        As `kda` takes them.
    dt_bias : torch.Tensor, shape (H,), dtype of q or float32, optional
        Is added to the raw g; goes with A_log.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 102, 2, 64, device="cuda")
    >>> v = torch.randn(102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, device="cuda")
    >>> beta = torch.rand(102, 4, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.gated_delta_rule_varlen(pool, q, k, v, g, beta, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(varlen.KIND, ALL["gated_delta_rule"], state, arrays, options, traits=traits)


def delta_rule_varlen(
    state: Array, q: Array, k: Array, v: Array, beta: Array, *, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[VarlenOptions],
) -> Tensor:  # fmt: skip
    r"""The delta rule of sequences of any lengths, which changes states of a pool in place.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, G, K) or (1, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    beta : torch.Tensor, shape (T, H) or (1, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    qk_norm, beta_map
        As `kda` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv:2406.06484.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 102, 2, 64, device="cuda")
    >>> v = torch.randn(102, 4, 64, device="cuda")
    >>> beta = torch.rand(102, 4, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.delta_rule_varlen(pool, q, k, v, beta, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, beta
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(varlen.KIND, ALL["delta_rule"], state, arrays, options, traits=traits)


def gated_delta_rule2_varlen(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, write_gate: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[VarlenOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule by channels of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, G, K) or (1, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of q or float32
        Log-decay of each channel; raw with A_log.
    beta : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of q or float32
        How much of each channel of the key is erased.
    write_gate : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        How much of each value is written.
    A_log, dt_bias, lower_bound, qk_norm
        As `kda` takes them.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, with gates for channels as in
    NVIDIA's GDN-2.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 102, 2, 64, device="cuda")
    >>> v = torch.randn(102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, 64, device="cuda")
    >>> beta, write_gate = torch.rand(2, 102, 4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.gated_delta_rule2_varlen(pool, q, k, v, g, beta, write_gate, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, write_gate, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm)
    return calls.call(varlen.KIND, ALL["gated_delta_rule2"], state, arrays, options, traits=traits)


def simple_gla_varlen(state: Array, q: Array, k: Array, v: Array, g: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""Scalar-gated linear attention of sequences of any lengths, which changes states of a pool in place.

        S <- e^g S + v k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, G, K) or (1, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (T, H), (1, T, H) or (H,), dtype of q or float32
        Logarithm of the decay of each head: of each token, or fixed, as in retention and lightning attention.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 102, 2, 64, device="cuda")
    >>> v = torch.randn(102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.simple_gla_varlen(pool, q, k, v, g, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["simple_gla"], state, (q, k, v, g), options)


def hgrn2_varlen(state: Array, q: Array, g: Array, v: Array, **options: Unpack[VarlenOptions]) -> Tensor:
    r"""HGRN2 of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is 1 and state_layout "kv".
    q : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        Query. Any strides; where the last one is not 1, a copy is made.
    g : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of q or float32
        Logarithm of the forget gate, at most 0; 1 - e^g is the key.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        Value.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q = torch.randn(102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, 64, device="cuda")
    >>> v = torch.randn(102, 4, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.hgrn2_varlen(pool, q, g, v, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    return calls.call(varlen.KIND, ALL["hgrn2"], state, (q, g, v), options)


def ssd_varlen(
    state: Array, x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Unpack[VarlenOptions],
) -> Tensor:  # fmt: skip
    r"""The state space of Mamba-2 of sequences of any lengths, which changes states of a pool in place.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too.
    x : torch.Tensor, shape (T, H, V) or (1, T, H, V), float16, bfloat16 or float32
        Input. Any strides; where the last one is not 1, a copy is made.
    dt : torch.Tensor, shape (T, H) or (1, T, H), dtype of x or float32
        Step; raw with `dt_bias` and `dt_softplus`.
    A : torch.Tensor, shape (H,), dtype of x or float32
        Log-decay of a step of 1, which is negative.
    B, C : torch.Tensor, shape (T, G, K) or (1, T, G, K), dtype of x
        Key by which an input is written, and query by which the state is read. Head h has those of group h // (H // G).
    D : torch.Tensor, shape (H,) or (H, V), dtype of x or float32, optional
        How much of the input is added to y.
    z : torch.Tensor, shape and dtype of x, optional
        y is multiplied by silu(z).
    dt_bias : torch.Tensor, shape (H,), dtype of x or float32, optional
        Is added to the raw dt.
    dt_softplus : bool, default False
        Whether the step is the softplus of that sum.
    dt_limit : pair of float, default (0.0, inf)
        The least and the largest step: others are clamped to these.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> x = torch.randn(102, 4, 64, device="cuda")
    >>> dt = torch.rand(102, 4, device="cuda")
    >>> A = -torch.rand(4, device="cuda")
    >>> B, C = torch.randn(2, 102, 2, 64, device="cuda")
    >>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> y = rwkv_jit.ssd_varlen(pool, x, dt, A, B, C, cu_seqlens=ends, state_indices=slots)
    >>> y.shape
    torch.Size([102, 4, 64])
    """
    if dt_softplus is not True and dt_softplus is not False:
        dt_softplus = checks.check_flag("dt_softplus", dt_softplus)
    least_step, most_step = checks.step_limits(dt_limit)
    arrays = x, dt, A, B, C, D, z, dt_bias
    traits = ("dt_softplus", dt_softplus), ("least_step", least_step), ("most_step", most_step)
    return calls.call(varlen.KIND, ALL["ssd"], state, arrays, options, traits=traits)


def wkv5_replay(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of one or a few tokens, which reads states and writes them once in a while.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    r, k, v, w, u
        As in `wkv5_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv5", 4, 64, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> y = rwkv_jit.wkv5_replay(pool, ring, r, k, v, w, u, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["wkv5"], state, (r, k, v, w, u), options, ring)


def wkv6_replay(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of one or a few tokens, which reads states and writes them once in a while.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    r, k, v, w, u
        As in `wkv6_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv6", 4, 64, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 3, 4, 64, device="cuda")
    >>> u = torch.randn(4, 64, device="cuda")
    >>> y = rwkv_jit.wkv6_replay(pool, ring, r, k, v, w, u, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["wkv6"], state, (r, k, v, w, u), options, ring)


def wkv7_replay(
    state: Array, ring: ReplayRing, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array,
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""RWKV-7 time mixing of one or a few tokens, which reads states and writes them once in a while.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    r, w, k, v, a, b
        As in `wkv7_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv7", 4, 64, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 64, device="cuda")
    >>> y = rwkv_jit.wkv7_replay(pool, ring, r, w, k, v, a, b, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["wkv7"], state, (r, w, k, v, a, b), options, ring)


def gla_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Gated linear attention of one or a few tokens, which reads states and writes them once in a while.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, g
        As in `gla_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gla", 4, 64, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> y = rwkv_jit.gla_replay(pool, ring, q, k, v, g, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["gla"], state, (q, k, v, g), options, ring)


def linear_attention_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Linear attention of one or a few tokens, which reads states and writes them once in a while.

        S <- S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v
        As in `linear_attention_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "linear_attention", 4, 64, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> y = rwkv_jit.linear_attention_replay(pool, ring, q, k, v, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["linear_attention"], state, (q, k, v), options, ring)


def kda_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""Kimi Delta Attention of one or a few tokens, which reads states and writes them once in a while.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, g, beta, A_log, dt_bias, lower_bound, qk_norm, beta_map
        As in `kda_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "kda", 4, 64, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.kda_replay(pool, ring, q, k, v, g, beta, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(STEP, ALL["kda"], state, arrays, options, ring, traits=traits)


def gated_delta_rule_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule of one or a few tokens, which reads states and writes them once in a while.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, g, beta, A_log, dt_bias, qk_norm, beta_map
        As in `gated_delta_rule_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gated_delta_rule", 4, 64, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.gated_delta_rule_replay(pool, ring, q, k, v, g, beta, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(STEP, ALL["gated_delta_rule"], state, arrays, options, ring, traits=traits)


def delta_rule_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, beta: Array, *, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The delta rule of one or a few tokens, which reads states and writes them once in a while.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, beta, qk_norm, beta_map
        As in `delta_rule_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv:2406.06484.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "delta_rule", 4, 64, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.delta_rule_replay(pool, ring, q, k, v, beta, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, beta
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(STEP, ALL["delta_rule"], state, arrays, options, ring, traits=traits)


def gated_delta_rule2_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, beta: Array, write_gate: Array, *,
    A_log: Array | None = None, dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule by channels of one or a few tokens, which reads states and writes them once in a while.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, g, beta, write_gate, A_log, dt_bias, lower_bound, qk_norm
        As in `gated_delta_rule2_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, with gates for channels as in
    NVIDIA's GDN-2.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gated_delta_rule2", 4, 64, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> beta, write_gate = torch.rand(2, 3, 4, 64, device="cuda")
    >>> y = rwkv_jit.gated_delta_rule2_replay(pool, ring, q, k, v, g, beta, write_gate, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, write_gate, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm)
    return calls.call(STEP, ALL["gated_delta_rule2"], state, arrays, options, ring, traits=traits)


def simple_gla_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Scalar-gated linear attention of one or a few tokens, which reads states and writes them once in a while.

        S <- e^g S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k, v, g
        As in `simple_gla_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "simple_gla", 4, 64, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, device="cuda")
    >>> y = rwkv_jit.simple_gla_replay(pool, ring, q, k, v, g, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["simple_gla"], state, (q, k, v, g), options, ring)


def hgrn2_replay(
    state: Array, ring: ReplayRing, q: Array, g: Array, v: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""HGRN2 of one or a few tokens, which reads states and writes them once in a while.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too. By default scale is 1 and state_layout "kv".
    q, g, v
        As in `hgrn2_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "hgrn2", 4, 64, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q = torch.randn(3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> v = torch.randn(3, 4, 64, device="cuda")
    >>> y = rwkv_jit.hgrn2_replay(pool, ring, q, g, v, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, ALL["hgrn2"], state, (q, g, v), options, ring)


def ssd_replay(
    state: Array, ring: ReplayRing, x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None,
    z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The state space of Mamba-2 of one or a few tokens, which reads states and writes them once in a while.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per row and head, token by token, with S [V, K].

    The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become entries.
    Where there would be more than `ring.length`, the state is written with all of them, and the slot has none from then
    on. Entries in the place of a state are what Albatross calls a delta log.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit
        As in `ssd_update`, T up to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "ssd", 4, 64, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> x = torch.randn(3, 4, 64, device="cuda")
    >>> dt = torch.rand(3, 4, device="cuda")
    >>> A = -torch.rand(4, device="cuda")
    >>> B, C = torch.randn(2, 3, 2, 64, device="cuda")
    >>> y = rwkv_jit.ssd_replay(pool, ring, x, dt, A, B, C, state_indices=slots)
    >>> y.shape
    torch.Size([3, 4, 64])
    """
    if dt_softplus is not True and dt_softplus is not False:
        dt_softplus = checks.check_flag("dt_softplus", dt_softplus)
    least_step, most_step = checks.step_limits(dt_limit)
    arrays = x, dt, A, B, C, D, z, dt_bias
    traits = ("dt_softplus", dt_softplus), ("least_step", least_step), ("most_step", most_step)
    return calls.call(STEP, ALL["ssd"], state, arrays, options, ring, traits=traits)


def wkv5_verify(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of drafted tokens, none of which counts until `replay_commit`.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    y is that of `wkv5_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `wkv5_verify` or `wkv5_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, r, k, v, w, u, **options
        As in `wkv5_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv5", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v = torch.randn(3, 3, 4, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> y = rwkv_jit.wkv5_verify(pool, ring, r, k, v, w, u, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["wkv5"], state, (r, k, v, w, u), options, ring)


def wkv6_verify(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of drafted tokens, none of which counts until `replay_commit`.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    y is that of `wkv6_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `wkv6_verify` or `wkv6_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, r, k, v, w, u, **options
        As in `wkv6_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv6", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 3, 4, 4, 64, device="cuda")
    >>> u = torch.randn(4, 64, device="cuda")
    >>> y = rwkv_jit.wkv6_verify(pool, ring, r, k, v, w, u, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["wkv6"], state, (r, k, v, w, u), options, ring)


def wkv7_verify(
    state: Array, ring: ReplayRing, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array,
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""RWKV-7 time mixing of drafted tokens, none of which counts until `replay_commit`.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per row and head, token by token, with S [V, K].

    y is that of `wkv7_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `wkv7_verify` or `wkv7_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, r, w, k, v, a, b, **options
        As in `wkv7_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv7", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 4, 64, device="cuda")
    >>> y = rwkv_jit.wkv7_verify(pool, ring, r, w, k, v, a, b, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["wkv7"], state, (r, w, k, v, a, b), options, ring)


def gla_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Gated linear attention of drafted tokens, none of which counts until `replay_commit`.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `gla_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `gla_verify` or `gla_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, q, k, v, g, **options
        As in `gla_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gla", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 4, 64, device="cuda")
    >>> y = rwkv_jit.gla_verify(pool, ring, q, k, v, g, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["gla"], state, (q, k, v, g), options, ring)


def linear_attention_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Linear attention of drafted tokens, none of which counts until `replay_commit`.

        S <- S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `linear_attention_replay`. The speculative tokens are written behind the entries of each slot; cursors
    and states stay as they are. The next call of `linear_attention_verify` or `linear_attention_replay` writes over
    what was not committed.

    Parameters
    ----------
    state, ring, q, k, v, **options
        As in `linear_attention_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "linear_attention", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 4, 64, device="cuda")
    >>> y = rwkv_jit.linear_attention_verify(pool, ring, q, k, v, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["linear_attention"], state, (q, k, v), options, ring)


def kda_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""Kimi Delta Attention of drafted tokens, none of which counts until `replay_commit`.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `kda_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `kda_verify` or `kda_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, q, k, v, g, beta, A_log, dt_bias, lower_bound, qk_norm, beta_map, **options
        As in `kda_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "kda", 4, 64, drafts=4, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, 4, device="cuda")
    >>> y = rwkv_jit.kda_verify(pool, ring, q, k, v, g, beta, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(DRAFT, ALL["kda"], state, arrays, options, ring, traits=traits)


def gated_delta_rule_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
    dt_bias: Array | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule of drafted tokens, none of which counts until `replay_commit`.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `gated_delta_rule_replay`. The speculative tokens are written behind the entries of each slot; cursors
    and states stay as they are. The next call of `gated_delta_rule_verify` or `gated_delta_rule_replay` writes over
    what was not committed.

    Parameters
    ----------
    state, ring, q, k, v, g, beta, A_log, dt_bias, qk_norm, beta_map, **options
        As in `gated_delta_rule_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(
    ...     16, "gated_delta_rule", 4, 64, drafts=4, key_heads=2, dtype=torch.float32, device="cuda"
    ... )
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 4, device="cuda")
    >>> beta = torch.rand(3, 4, 4, device="cuda")
    >>> y = rwkv_jit.gated_delta_rule_verify(pool, ring, q, k, v, g, beta, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, A_log, dt_bias
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(DRAFT, ALL["gated_delta_rule"], state, arrays, options, ring, traits=traits)


def delta_rule_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, beta: Array, *, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The delta rule of drafted tokens, none of which counts until `replay_commit`.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `delta_rule_replay`. The speculative tokens are written behind the entries of each slot; cursors and
    states stay as they are. The next call of `delta_rule_verify` or `delta_rule_replay` writes over what was not
    committed.

    Parameters
    ----------
    state, ring, q, k, v, beta, qk_norm, beta_map, **options
        As in `delta_rule_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv:2406.06484.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "delta_rule", 4, 64, drafts=4, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 4, 64, device="cuda")
    >>> beta = torch.rand(3, 4, 4, device="cuda")
    >>> y = rwkv_jit.delta_rule_verify(pool, ring, q, k, v, beta, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, beta
    traits = ("qk_norm", qk_norm), ("beta_map", beta_map)
    return calls.call(DRAFT, ALL["delta_rule"], state, arrays, options, ring, traits=traits)


def gated_delta_rule2_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, beta: Array, write_gate: Array, *,
    A_log: Array | None = None, dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The gated delta rule by channels of drafted tokens, none of which counts until `replay_commit`.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `gated_delta_rule2_replay`. The speculative tokens are written behind the entries of each slot; cursors
    and states stay as they are. The next call of `gated_delta_rule2_verify` or `gated_delta_rule2_replay` writes over
    what was not committed.

    Parameters
    ----------
    state, ring, q, k, v, g, beta, write_gate, A_log, dt_bias, lower_bound, qk_norm, **options
        As in `gated_delta_rule2_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, with gates for channels as in
    NVIDIA's GDN-2.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(
    ...     16, "gated_delta_rule2", 4, 64, drafts=4, key_heads=2, dtype=torch.float32, device="cuda"
    ... )
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 4, 64, device="cuda")
    >>> beta, write_gate = torch.rand(2, 3, 4, 4, 64, device="cuda")
    >>> y = rwkv_jit.gated_delta_rule2_verify(pool, ring, q, k, v, g, beta, write_gate, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    arrays = q, k, v, g, beta, write_gate, A_log, dt_bias
    traits = ("lower_bound", lower_bound), ("qk_norm", qk_norm)
    return calls.call(DRAFT, ALL["gated_delta_rule2"], state, arrays, options, ring, traits=traits)


def simple_gla_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Scalar-gated linear attention of drafted tokens, none of which counts until `replay_commit`.

        S <- e^g S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `simple_gla_replay`. The speculative tokens are written behind the entries of each slot; cursors and
    states stay as they are. The next call of `simple_gla_verify` or `simple_gla_replay` writes over what was not
    committed.

    Parameters
    ----------
    state, ring, q, k, v, g, **options
        As in `simple_gla_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "simple_gla", 4, 64, drafts=4, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 2, 64, device="cuda")
    >>> v = torch.randn(3, 4, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 4, device="cuda")
    >>> y = rwkv_jit.simple_gla_verify(pool, ring, q, k, v, g, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["simple_gla"], state, (q, k, v, g), options, ring)


def hgrn2_verify(
    state: Array, ring: ReplayRing, q: Array, g: Array, v: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""HGRN2 of drafted tokens, none of which counts until `replay_commit`.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    y is that of `hgrn2_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `hgrn2_verify` or `hgrn2_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, q, g, v, **options
        As in `hgrn2_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "hgrn2", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> q = torch.randn(3, 4, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 4, 64, device="cuda")
    >>> v = torch.randn(3, 4, 4, 64, device="cuda")
    >>> y = rwkv_jit.hgrn2_verify(pool, ring, q, g, v, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    return calls.call(DRAFT, ALL["hgrn2"], state, (q, g, v), options, ring)


def ssd_verify(
    state: Array, ring: ReplayRing, x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None,
    z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""The state space of Mamba-2 of drafted tokens, none of which counts until `replay_commit`.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per row and head, token by token, with S [V, K].

    y is that of `ssd_replay`. The speculative tokens are written behind the entries of each slot; cursors and states
    stay as they are. The next call of `ssd_verify` or `ssd_replay` writes over what was not committed.

    Parameters
    ----------
    state, ring, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, **options
        As in `ssd_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "ssd", 4, 64, drafts=4, key_heads=2, dtype=torch.float32, device="cuda")
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> x = torch.randn(3, 4, 4, 64, device="cuda")
    >>> dt = torch.rand(3, 4, 4, device="cuda")
    >>> A = -torch.rand(4, device="cuda")
    >>> B, C = torch.randn(2, 3, 4, 2, 64, device="cuda")
    >>> y = rwkv_jit.ssd_verify(pool, ring, x, dt, A, B, C, state_indices=slots)
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    if dt_softplus is not True and dt_softplus is not False:
        dt_softplus = checks.check_flag("dt_softplus", dt_softplus)
    least_step, most_step = checks.step_limits(dt_limit)
    arrays = x, dt, A, B, C, D, z, dt_bias
    traits = ("dt_softplus", dt_softplus), ("least_step", least_step), ("most_step", most_step)
    return calls.call(DRAFT, ALL["ssd"], state, arrays, options, ring, traits=traits)
