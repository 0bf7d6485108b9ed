"""The ops of `diagonal`, over a pool of states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

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
from rwkv_jit.derived.table import OPS
from rwkv_jit.inference.options import UpdateOptions, VarlenOptions
from rwkv_jit.inference.update import gla_update
from rwkv_jit.inference.varlen import gla_varlen

if TYPE_CHECKING:
    from typing_extensions import Unpack


# ---- one or a few tokens -----------------------------------------------------------------------------------------


def simple_gla_update(
    state: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    **options: Unpack[UpdateOptions],
) -> Tensor:
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
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, device="cuda")
    >>> rwkv_jit.simple_gla_update(pool, q, k, v, g).shape
    torch.Size([3, 4, 64])
    """
    g = of_tokens(g, v)
    call = arguments.pooled(OPS["simple_gla"], "simple_gla_update", (q, k, v, g), UpdateOptions, options)
    return call.run(gla_update, state, for_heads(*call.inputs))


def hgrn2_update(
    state: Any,
    q: Any,
    g: Any,
    v: Any,
    **options: Unpack[UpdateOptions],
) -> Tensor:
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
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> q, v = torch.randn(2, 3, 4, 64, device="cuda")
    >>> g = -torch.rand(3, 4, 64, device="cuda")
    >>> rwkv_jit.hgrn2_update(pool, q, g, v).shape
    torch.Size([3, 4, 64])
    """
    call = arguments.pooled(OPS["hgrn2"], "hgrn2_update", (q, g, v), UpdateOptions, options)
    return call.run(gla_update, state, with_keys(*call.inputs))


def ssd_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
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
    D, dt_bias, z : torch.Tensor, optional
        As `ssd` takes them.
    dt_softplus : bool, default False
        As `ssd` takes it.
    dt_limit : pair of float, default (0.0, inf)
        As `ssd` takes it.

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
    >>> x, dt = torch.randn(3, 4, 64, device="cuda"), torch.rand(3, 4, device="cuda")
    >>> A, (B, C) = -torch.rand(4, device="cuda"), torch.randn(2, 3, 1, 64, device="cuda")
    >>> rwkv_jit.ssd_update(pool, x, dt, A, B, C).shape
    torch.Size([3, 4, 64])
    """
    call = arguments.pooled(OPS["ssd"], "ssd_update", (x, dt, B, C), UpdateOptions, options, (A, D, z, dt_bias))
    x, dt, B, C = call.inputs
    own, gate = check_behind(x, D, z)
    steps, decays = steps_of(x, dt, A, dt_bias, dt_softplus, dt_limit)
    operands = of_states(x, steps, decays, B, C)
    y = call.run(gla_update, state, operands)
    made = behind(y, x, own, gate)
    return made if "out" not in options or made is y else y.copy_(made)


# ---- sequences of any lengths -------------------------------------------------------------------------------------


def simple_gla_varlen(
    state: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""Scalar-gated linear attention of sequences of any lengths, which changes states of a pool in place.

        S <- e^g S + v k^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is K^-0.5 and state_layout
        "kv".
    q, k : torch.Tensor, shape (T, G, K) or (1, T, G, K), float16, bfloat16 or float32
        As `simple_gla` takes them.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        As `simple_gla` takes it.
    g : torch.Tensor, shape (T, H) or (1, T, H), or (H,), dtype of q or float32
        As `simple_gla` takes it.

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
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, k, v = torch.randn(3, 102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, device="cuda")
    >>> rwkv_jit.simple_gla_varlen(pool, q, k, v, g, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    g = of_tokens(g, v)
    call = arguments.pooled(OPS["simple_gla"], "simple_gla_varlen", (q, k, v, g), VarlenOptions, options)
    return call.run(gla_varlen, state, for_heads(*call.inputs))


def hgrn2_varlen(
    state: Any,
    q: Any,
    g: Any,
    v: Any,
    **options: Unpack[VarlenOptions],
) -> Tensor:
    r"""HGRN2 of sequences of any lengths, which changes states of a pool in place.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per sequence and head, token by token, with S [V, K].

    Parameters
    ----------
    state, **options
        As `PoolOptions` and `VarlenOptions` say, errors and precision too. By default scale is 1 and state_layout "kv".
    q : torch.Tensor, shape (T, H, K) or (1, T, H, K), float16, bfloat16 or float32
        As `hgrn2` takes it.
    g : torch.Tensor, shape (T, H, K) or (1, T, H, K), dtype of q or float32
        As `hgrn2` takes it.
    v : torch.Tensor, shape (T, H, V) or (1, T, H, V), dtype of q
        As `hgrn2` takes it.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> q, v = torch.randn(2, 102, 4, 64, device="cuda")
    >>> g = -torch.rand(102, 4, 64, device="cuda")
    >>> rwkv_jit.hgrn2_varlen(pool, q, g, v, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    call = arguments.pooled(OPS["hgrn2"], "hgrn2_varlen", (q, g, v), VarlenOptions, options)
    return call.run(gla_varlen, state, with_keys(*call.inputs))


def ssd_varlen(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
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
    x : torch.Tensor, shape (T, H, V) or (1, T, H, V), float16, bfloat16 or float32
        As `ssd` takes it.
    dt : torch.Tensor, shape (T, H) or (1, T, H), dtype of x or float32
        As `ssd` takes it.
    A : torch.Tensor, shape (H,), dtype of x or float32
        As `ssd` takes it.
    B, C : torch.Tensor, shape (T, G, K) or (1, T, G, K), dtype of x
        As `ssd` takes them.
    D, dt_bias, z : torch.Tensor, optional
        As `ssd` takes them.
    dt_softplus : bool, default False
        As `ssd` takes it.
    dt_limit : pair of float, default (0.0, inf)
        As `ssd` takes it.

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
    >>> bounds = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt
    >>> x, dt = torch.randn(102, 4, 64, device="cuda"), torch.rand(102, 4, device="cuda")
    >>> A, (B, C) = -torch.rand(4, device="cuda"), torch.randn(2, 102, 1, 64, device="cuda")
    >>> rwkv_jit.ssd_varlen(pool, x, dt, A, B, C, cu_seqlens=bounds).shape
    torch.Size([102, 4, 64])
    """
    call = arguments.pooled(OPS["ssd"], "ssd_varlen", (x, dt, B, C), VarlenOptions, options, (A, D, z, dt_bias))
    x, dt, B, C = call.inputs
    own, gate = check_behind(x, D, z)
    steps, decays = steps_of(x, dt, A, dt_bias, dt_softplus, dt_limit)
    operands = of_states(x, steps, decays, B, C)
    y = call.run(gla_varlen, state, operands)
    made = behind(y, x, own, gate)
    return made if "out" not in options or made is y else y.copy_(made)
