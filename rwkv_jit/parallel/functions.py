"""The recurrences over sequences that many processes share, each with a part of every one.

tools/functions.py has written this, from the functions over sequences and their docstrings.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call.tensors import Array
from rwkv_jit.parallel.recurrences import shared
from rwkv_jit.parallel.shard import Shard
from rwkv_jit.schedules.legal import BetaMap

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import CallOptions, DecayOptions


def wkv5(
    r: Array, k: Array, v: Array, w: Array, u: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-5 time mixing over sequences that many processes share, with gradients.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per head and token, with S [V, K].

    Parameters
    ----------
    r, k, v, w, u, **options
        As `rwkv_jit.wkv5` takes them, of this process's tokens.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
        B, or the packed sequences of this part.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states after the last token of each sequence in this part.

    Returns
    -------
    y, final_state
        As `rwkv_jit.wkv5` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.wkv5`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv5(r, k, v, w, u, shard)  # of this process's tokens
    """
    return shared("wkv5", (r, k, v, w, u), shard, initial_state, output_final_state, options)


def wkv6(
    r: Array, k: Array, v: Array, w: Array, u: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-6 time mixing over sequences that many processes share, with gradients.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per head and token, with S [V, K].

    Parameters
    ----------
    r, k, v, w, u, **options
        As `rwkv_jit.wkv6` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.wkv6`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.wkv6` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.wkv6`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv6(r, k, v, w, u, shard)  # of this process's tokens
    """
    return shared("wkv6", (r, k, v, w, u), shard, initial_state, output_final_state, options)


def wkv7(
    r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-7 time mixing over sequences that many processes share, with gradients.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per head and token, with S [V, K].

    Parameters
    ----------
    r, w, k, v, a, b, **options
        As `rwkv_jit.wkv7` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.wkv7`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.wkv7` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.wkv7`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv7(r, w, k, v, a, b, shard)  # of this process's tokens
    """
    return shared("wkv7", (r, w, k, v, a, b), shard, initial_state, output_final_state, options)


def gla(
    q: Array, k: Array, v: Array, g: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Gated linear attention over sequences that many processes share, with gradients.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, g, **options
        As `rwkv_jit.gla` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.gla`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.gla` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.gla`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.gla(q, k, v, g, shard)  # of this process's tokens
    """
    return shared("gla", (q, k, v, g), shard, initial_state, output_final_state, options)


def linear_attention(
    q: Array, k: Array, v: Array, shard: Shard, initial_state: Array | None = None, output_final_state: bool = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Linear attention over sequences that many processes share, with gradients.

        S <- S + v k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, **options
        As `rwkv_jit.linear_attention` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.linear_attention`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.linear_attention` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.linear_attention`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.linear_attention(q, k, v, shard)  # of this process's tokens
    """
    return shared("linear_attention", (q, k, v), shard, initial_state, output_final_state, options)


def kda(
    q: Array, k: Array, v: Array, g: Array, beta: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, *, A_log: Array | None = None, dt_bias: Array | None = None,
    lower_bound: float | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Kimi Delta Attention over sequences that many processes share, with gradients.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, g, beta, A_log, dt_bias, lower_bound, qk_norm, beta_map, **options
        As `rwkv_jit.kda` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.kda`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.kda` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.kda`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.kda(q, k, v, g, beta, shard)  # of this process's tokens
    """
    return shared(
        "kda", (q, k, v, g, beta), shard, initial_state, output_final_state, options, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, qk_norm=qk_norm, beta_map=beta_map,
    )  # fmt: skip


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, *, A_log: Array | None = None, dt_bias: Array | None = None,
    qk_norm: bool = False, beta_map: BetaMap = "identity", **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The gated delta rule over sequences that many processes share, with gradients.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, g, beta, A_log, dt_bias, qk_norm, beta_map, **options
        As `rwkv_jit.gated_delta_rule` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.gated_delta_rule`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.gated_delta_rule` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.gated_delta_rule`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.gated_delta_rule(q, k, v, g, beta, shard)  # of this process's tokens
    """
    return shared(
        "gated_delta_rule", (q, k, v, g, beta), shard, initial_state, output_final_state, options, A_log=A_log,
        dt_bias=dt_bias, qk_norm=qk_norm, beta_map=beta_map,
    )  # fmt: skip


def delta_rule(
    q: Array, k: Array, v: Array, beta: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, *, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The delta rule over sequences that many processes share, with gradients.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, beta, qk_norm, beta_map, **options
        As `rwkv_jit.delta_rule` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.delta_rule`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.delta_rule` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.delta_rule`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv:2406.06484.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.delta_rule(q, k, v, beta, shard)  # of this process's tokens
    """
    return shared(
        "delta_rule", (q, k, v, beta), shard, initial_state, output_final_state, options, qk_norm=qk_norm,
        beta_map=beta_map,
    )  # fmt: skip


def gated_delta_rule2(
    q: Array, k: Array, v: Array, g: Array, beta: Array, write_gate: Array, shard: Shard,
    initial_state: Array | None = None, output_final_state: bool = False, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The gated delta rule by channels over sequences that many processes share, with gradients.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, g, beta, write_gate, A_log, dt_bias, lower_bound, qk_norm, **options
        As `rwkv_jit.gated_delta_rule2` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.gated_delta_rule2`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.gated_delta_rule2` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.gated_delta_rule2`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, with gates for channels as in
    NVIDIA's GDN-2.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.gated_delta_rule2(q, k, v, g, beta, write_gate, shard)  # of this process's tokens
    """
    return shared(
        "gated_delta_rule2", (q, k, v, g, beta, write_gate), shard, initial_state, output_final_state, options,
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, qk_norm=qk_norm,
    )  # fmt: skip


def simple_gla(
    q: Array, k: Array, v: Array, g: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Scalar-gated linear attention over sequences that many processes share, with gradients.

        S <- e^g S + v k^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, k, v, g, **options
        As `rwkv_jit.simple_gla` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.simple_gla`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.simple_gla` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.simple_gla`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.simple_gla(q, k, v, g, shard)  # of this process's tokens
    """
    return shared("simple_gla", (q, k, v, g), shard, initial_state, output_final_state, options)


def hgrn2(
    q: Array, g: Array, v: Array, shard: Shard, initial_state: Array | None = None, output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""HGRN2 over sequences that many processes share, with gradients.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per head and token, with S [V, K].

    Parameters
    ----------
    q, g, v, **options
        As `rwkv_jit.hgrn2` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.hgrn2`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.hgrn2` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.hgrn2`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.hgrn2(q, g, v, shard)  # of this process's tokens
    """
    return shared("hgrn2", (q, g, v), shard, initial_state, output_final_state, options)


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, *, D: Array | None = None, z: Array | None = None, dt_bias: Array | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The state space of Mamba-2 over sequences that many processes share, with gradients.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per head and token, with S [V, K].

    Parameters
    ----------
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, **options
        As `rwkv_jit.ssd` takes them, of this process's tokens.
    shard, initial_state, output_final_state
        As `rwkv_jit.parallel.wkv5` takes them; states are those of `rwkv_jit.ssd`.

    Returns
    -------
    y, final_state
        As `rwkv_jit.ssd` returns them, of this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.ssd`, and where the processes do not make the same call. Nothing has been sent.

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.ssd(x, dt, A, B, C, shard)  # of this process's tokens
    """
    return shared(
        "ssd", (x, dt, A, B, C), shard, initial_state, output_final_state, options, D=D, z=z, dt_bias=dt_bias,
        dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip
