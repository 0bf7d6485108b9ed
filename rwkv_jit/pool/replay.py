"""Decoding that reads states and the tokens since they were written, and writes them once in a while.

A state after tokens i = 1 ... n is read by a sum, with p_i the product of the decays behind token i, u_i = S_{i-1} a_i:

    S_n x = S_0 (p_0 x) + sum_i ((b_i . (p_i x)) u_i + (k_i . (p_i x)) v_i)

So a step reads the state and its entries, and adds an entry. Speculative tokens are entries that do not count yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rwkv_jit.call.tensors import Array
from rwkv_jit.pool import calls
from rwkv_jit.pool.replay_calls import COMMIT, FLUSH, op_of
from rwkv_jit.pool.ring import ReplayRing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import FlushOptions


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
