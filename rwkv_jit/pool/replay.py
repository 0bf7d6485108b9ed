"""Decoding that reads states and the tokens since they were written, and writes them once in a while.

A state after tokens i = 1 ... n is read by a sum, with p_i the product of the decays behind token i, u_i = S_{i-1} a_i:

    S_n x = S_0 (p_0 x) + sum_i ((b_i . (p_i x)) u_i + (k_i . (p_i x)) v_i)

So a step reads the state and its entries, and adds an entry. Speculative tokens are entries that do not count yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call.tensors import Array
from rwkv_jit.pool import calls
from rwkv_jit.pool.replay_calls import COMMIT, DRAFT, FLUSH, STEP, op_of
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules.table import OPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import FlushOptions, ReplayOptions


# ---- the public calls --------------------------------------------------------------------------------------------


def wkv7_replay(
    state: Array, ring: ReplayRing, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array,
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    r"""RWKV-7 time mixing of one or a few tokens, which reads states and writes them once in `ring.length` + 1 tokens.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r        per row and head, S [V, K]

    S is the state in the pool with the entries of its slot, as `ReplayRing` says. The tokens become entries. Where
    there would be more than `ring.length`, the state is written with all of them, and the slot has none from then on.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    r, w, k, v, a, b : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K
        As `wkv7` takes them, T from 1 to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv7`. Entries instead of a state are also what Albatross calls a delta log.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv7", 4, 64, dtype=torch.float32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 64, device="cuda") / 8
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> rwkv_jit.wkv7_replay(pool, ring, r, w, k, v, a, b, state_indices=slots).shape
    torch.Size([3, 4, 64])
    """
    return calls.call(STEP, OPS["wkv7"], state, (r, w, k, v, a, b), options, ring)


def wkv7_verify(
    state: Array, ring: ReplayRing, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array,
    **options: Unpack[ReplayOptions],
) -> Tensor:  # fmt: skip
    """RWKV-7 time mixing of speculative tokens in one pass over the states; none counts until `replay_commit`.

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
    As `wkv7`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv7", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 16, 4, 4, 64, device="cuda") / 8
    >>> y = rwkv_jit.wkv7_verify(pool, ring, r, w, k, v, a, b)
    >>> accepted = torch.randint(5, (16,), device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted)
    """
    return calls.call(DRAFT, OPS["wkv7"], state, (r, w, k, v, a, b), options, ring)


def wkv6_replay(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of one or a few tokens, with few writes of states, as `wkv7_replay`.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T        per row and head, S [V, K]

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    r, k, v, w, u : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K, u (H, K)
        As `wkv6` takes them, T from 1 to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv6`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv6", 4, 64, dtype=torch.float32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> u = torch.zeros(4, 64, device="cuda")
    >>> rwkv_jit.wkv6_replay(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(STEP, OPS["wkv6"], state, (r, k, v, w, u), options, ring)


def wkv6_verify(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of speculative tokens, none of which counts until `replay_commit`, as `wkv7_verify`.

    Parameters
    ----------
    state, ring, r, k, v, w, u, **options
        As in `wkv6_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv6`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv6", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> u = torch.zeros(4, 64, device="cuda")
    >>> rwkv_jit.wkv6_verify(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(DRAFT, OPS["wkv6"], state, (r, k, v, w, u), options, ring)


def wkv5_replay(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of one or a few tokens, with few writes of states, as `wkv7_replay`.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T        per row and head, S [V, K]

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    r, k, v, w, u : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K, w and u (H, K)
        As `wkv5` takes them, T from 1 to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv5`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv5", 4, 64, dtype=torch.float32, device="cuda")
    >>> r, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> rwkv_jit.wkv5_replay(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(STEP, OPS["wkv5"], state, (r, k, v, w, u), options, ring)


def wkv5_verify(
    state: Array, ring: ReplayRing, r: Array, k: Array, v: Array, w: Array, u: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of speculative tokens, none of which counts until `replay_commit`, as `wkv7_verify`.

    Parameters
    ----------
    state, ring, r, k, v, w, u, **options
        As in `wkv5_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `wkv5`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv5", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> r, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> rwkv_jit.wkv5_verify(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(DRAFT, OPS["wkv5"], state, (r, k, v, w, u), options, ring)


def gla_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Gated linear attention of one or a few tokens, with few writes of states, as `wkv7_replay`.

        S <- S diag(d(g)) + v k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    q, k, v, g : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K
        As `gla` takes them, T from 1 to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gla`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gla", 4, 64, dtype=torch.float32, device="cuda")
    >>> q, k, v, x = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> g = torch.nn.functional.logsigmoid(x)
    >>> rwkv_jit.gla_replay(pool, ring, q, k, v, g).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(STEP, OPS["gla"], state, (q, k, v, g), options, ring)


def gla_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, g: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Gated linear attention of speculative tokens, none of which counts until `replay_commit`, as `wkv7_verify`.

    Parameters
    ----------
    state, ring, q, k, v, g, **options
        As in `gla_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `gla`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gla", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> q, k, v, x = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> g = torch.nn.functional.logsigmoid(x)
    >>> rwkv_jit.gla_verify(pool, ring, q, k, v, g).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(DRAFT, OPS["gla"], state, (q, k, v, g), options, ring)


def linear_attention_replay(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Linear attention of one or a few tokens, with few writes of states, as `wkv7_replay`.

        S <- S + v k^T;   y = scale S q        per row and head, S [V, K]

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `ReplayOptions` say, errors and precision too.
    q, k, v : torch.Tensor, shape (B, H, K) or (B, T, H, K), v with V for K
        As `linear_attention` takes them, T from 1 to 8.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `linear_attention`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "linear_attention", 4, 64, dtype=torch.float32, device="cuda")
    >>> q, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> rwkv_jit.linear_attention_replay(pool, ring, q, k, v).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(STEP, OPS["linear_attention"], state, (q, k, v), options, ring)


def linear_attention_verify(
    state: Array, ring: ReplayRing, q: Array, k: Array, v: Array, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Linear attention of speculative tokens, none of which counts until `replay_commit`, as `wkv7_verify`.

    Parameters
    ----------
    state, ring, q, k, v, **options
        As in `linear_attention_replay`, T up to `ring.drafts`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v

    References
    ----------
    As `linear_attention`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "linear_attention", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> q, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> rwkv_jit.linear_attention_verify(pool, ring, q, k, v).shape
    torch.Size([16, 2, 4, 64])
    """
    return calls.call(DRAFT, OPS["linear_attention"], state, (q, k, v), options, ring)


def replay_commit(state: Array, ring: ReplayRing, accept_lens: Array, **options: Unpack[FlushOptions]) -> None:
    """Accept the first speculative tokens of each row, after `wkv7_verify` or that of another op.

    Cursors move on. Where a slot has more than `ring.length` entries then, its state is written with all of them, and
    it has none: so there is always memory for more tokens. Tokens that are not accepted leave no trace.

    Parameters
    ----------
    state, ring, **options
        The pool and the ring that the tokens were verified with; as `PoolOptions` and `FlushOptions` say.
    accept_lens : torch.Tensor, shape (B,), int32 or int64
        How many speculative tokens of each row are accepted: from 0 to the tokens that the last verify of its slot had.

    Notes
    -----
    Nothing waits for the GPU, where `accept_lens` are taken for numbers from 0 to `ring.drafts`; with RWKVJIT_CHECK=1
    they are looked at.

    Examples
    --------
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    calls.call(COMMIT, op_of(ring), state, (accept_lens,), options, ring)


def replay_flush(state: Array, ring: ReplayRing, **options: Unpack[FlushOptions]) -> None:
    """Write the states of slots with all their entries, and leave the slots without any.

    Then the pool alone says what the sequences are: for `StatePool.fork`, `copy` and `save`, and for calls that know of
    no entries.

    Parameters
    ----------
    state, ring, **options
        As `PoolOptions` and `FlushOptions` say. Without `state_indices` all slots are written that have entries.

    Examples
    --------
    >>> rwkv_jit.replay_flush(states.wkv[layer], ring, state_indices=states.indices(slot))
    >>> ring.reset(states.fork(slot, 2))
    """
    calls.call(FLUSH, op_of(ring), state, (), options, ring)
