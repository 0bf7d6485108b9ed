"""Decoding that reads states and the tokens since they were written, and writes them once in a while.

What a state would be after tokens i = 1 ... n is a sum that can be read without it, with p_i the product of the decays
behind token i, and u_i = S_{i-1} a_i:

    S_n x = S_0 (p_0 x) + sum_i ((b_i . (p_i x)) u_i + (k_i . (p_i x)) v_i)

So a step reads the state and its entries, and adds an entry. Drafts are entries that do not count yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from rwkv_jit import env, modes, tensors
from rwkv_jit.errors import brief
from rwkv_jit.inference import arguments, calls, registry, replay_steps, rounding, update
from rwkv_jit.inference.ring import ReplayRing
from rwkv_jit.ops import checks, sharding, torch_op
from rwkv_jit.ops.table import OPS
from rwkv_jit.plan import Plan
from rwkv_jit.problem import Op, Problem
from rwkv_jit.reference import decay_factor
from rwkv_jit.signatures import BySignature
from rwkv_jit.tensors import Memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_TOKENS = 8
_STEP, _DRAFT, _COMMIT, _FLUSH = "step", "draft", "commit", "flush"
_FIELDS = ("cursors", "arrivals", "entry_d", "entry_b", "entry_k", "entry_v", "entry_u")


class FlushOptions(TypedDict, total=False):
    """Options of `replay_commit` and `replay_flush`, by name.

    Attributes
    ----------
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    null_index : int, default -1
        A slot at or below it is none, as is one past the pool: a row that has none is left alone.
    state_layout : {"vk", "kv"}
        Order of the last two dimensions of a state: as the op has it by default, "vk", or "kv" for gla and
        linear_attention.
    rounding : {"nearest", "stochastic"}, default "nearest"
        How a state of 16 bits is rounded when it is written.
    seed : int or torch.Tensor of one int64 on the device
        For "stochastic", as in `UpdateOptions`.
    """

    state_indices: Any
    null_index: int
    state_layout: str
    rounding: str
    seed: Any


class ReplayOptions(FlushOptions, total=False):
    """Options of `wkv7_replay`, `wkv7_verify` and their like, by name, beside those of `FlushOptions`.

    A row without a slot gets zeros for y. `wkv7_verify` writes no state and has no rounding and seed.

    Attributes
    ----------
    out : torch.Tensor, shape and dtype of v, optional
        Where y is written, without gaps.
    scale : float
        Factor of y: 1 by default, for gla and linear_attention K^-0.5.
    decay : {"raw", "sigmoid", "log", "direct"}
        As in `DecayOptions`: "raw" by default, for gla "log". There is none of linear_attention.
    w0 : torch.Tensor, shape (H, K) or (H * K,), float16, bfloat16 or float32, optional
        Is added to w (g) before the map that `decay` names, in float32.
    """

    out: Any
    scale: float
    decay: str
    w0: Any


# ---- the public calls --------------------------------------------------------------------------------------------


def wkv7_replay(
    state: Any, ring: ReplayRing, r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-7 time mixing of one or a few tokens, which reads states and writes them once in `ring.length` + 1 tokens.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per row and head, token by token, as `wkv7_update`. S [V, K] is the state in the pool with the entries of its slot,
    as `ReplayRing` says. The tokens become entries. Where there would be more than `ring.length`, the state is written
    with all of them, and the slot has none from then on. B is the rows, T the tokens, H the heads, K and V the head
    sizes of keys and values.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv7_update`. In the kv layout the last two sizes are (K, V).
    ring : ReplayRing
        The entries, of as many slots, and of the same op, sizes, dtype and device. A pool has one ring.
    r, k, a, b : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens, float16, bfloat16 or float32
        As `wkv7` takes them, T from 1 to 8. Any strides; where the last one is not 1, a copy is made.
    w : torch.Tensor, shape and dtype of r, or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    **options
        By name, as `ReplayOptions` and `FlushOptions` say: state_indices, null_index, out, scale, decay, w0,
        state_layout, rounding, seed.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. States and entries are as they were.
    RuntimeError
        An input wants a gradient, which states changed in place cannot give: `wkv7` can.
    UnsupportedConfigError
        The entries need more shared memory than a block of this GPU has.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are. Decays are multiplied, newest first: nothing is divided and no
    logarithm is taken, so factors of 0 and any others are as good here as in `wkv7_update`. Relative L2 error of y and
    of float32 states against float64 on the same inputs: below 5e-6, and that of rounding y where it has 16 bits. A
    state of 16 bits is rounded when it is written, not in every token.

    Cursors are moved on the device: rows may have different ones, and a CUDA graph goes on where the last replay ended.
    Whether a row's state is written is decided there, too. No slot may come twice in a call.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456. Entries in the place of a
    state are also what Albatross calls a delta log.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv7", 4, 64, dtype=torch.float32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 64, device="cuda") / 8
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> rwkv_jit.wkv7_replay(pool, ring, r, w, k, v, a, b, state_indices=slots).shape
    torch.Size([3, 4, 64])
    """
    return _call(OPS["wkv7"], _STEP, state, ring, (r, w, k, v, a, b), options)


def wkv7_verify(
    state: Any, ring: ReplayRing, r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    """RWKV-7 time mixing of drafted tokens in one pass over the states, none of which counts until `replay_commit`.

    y is that of `wkv7_replay`. The drafts are written behind the entries of each slot; cursors and states stay as they
    are. The next call of `wkv7_verify` or `wkv7_replay` writes over what was not committed.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv7_update`. In the kv layout the last two sizes are (K, V).
    ring : ReplayRing
        The entries, with room for T drafts, as in `wkv7_replay`.
    r, k, a, b : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens, float16, bfloat16 or float32
        As `wkv7` takes them, T from 1 to 8 and to `ring.drafts`.
    w : torch.Tensor, shape and dtype of r, or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    **options
        By name, as `ReplayOptions` and `FlushOptions` say: state_indices, null_index, out, scale, decay, w0,
        state_layout.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `wkv7_replay`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv7", 4, 64, drafts=4, dtype=torch.float32, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 16, 4, 4, 64, device="cuda") / 8
    >>> y = rwkv_jit.wkv7_verify(pool, ring, r, w, k, v, a, b)
    >>> accepted = torch.randint(5, (16,), device="cuda")  # as the model's head says
    >>> rwkv_jit.replay_commit(pool, ring, accepted)
    """
    return _call(OPS["wkv7"], _DRAFT, state, ring, (r, w, k, v, a, b), options)


def wkv6_replay(
    state: Any, ring: ReplayRing, r: Any, k: Any, v: Any, w: Any, u: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of one or a few tokens, which reads states and writes them once in a while.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K] the state in the pool with the entries of its slot.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv6_update`.
    ring : ReplayRing
        The entries, as in `wkv7_replay`.
    r, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `wkv6` takes them, T from 1 to 8.
    w : torch.Tensor, shape and dtype of r, or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    **options
        As in `wkv7_replay`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `wkv6_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv6", 4, 64, dtype=torch.float32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> u = torch.zeros(4, 64, device="cuda")
    >>> rwkv_jit.wkv6_replay(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["wkv6"], _STEP, state, ring, (r, k, v, w, u), options)


def wkv6_verify(
    state: Any, ring: ReplayRing, r: Any, k: Any, v: Any, w: Any, u: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-6 time mixing of drafted tokens, none of which counts until `replay_commit`.

    It is to `wkv6_replay` what `wkv7_verify` is to `wkv7_replay`.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv6_update`.
    ring : ReplayRing
        The entries, as in `wkv7_verify`.
    r, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `wkv6` takes them, T from 1 to 8 and to `ring.drafts`.
    w : torch.Tensor, shape and dtype of r, or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    **options
        As in `wkv7_verify`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `wkv6_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv6", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> r, k, v, w = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> u = torch.zeros(4, 64, device="cuda")
    >>> rwkv_jit.wkv6_verify(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["wkv6"], _DRAFT, state, ring, (r, k, v, w, u), options)


def wkv5_replay(
    state: Any, ring: ReplayRing, r: Any, k: Any, v: Any, w: Any, u: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of one or a few tokens, which reads states and writes them once in a while.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K] the state in the pool with the entries of its slot.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv5_update`.
    ring : ReplayRing
        The entries, as in `wkv7_replay`.
    r, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `wkv5` takes them, T from 1 to 8.
    w, u : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, and bonus of the current token.
    **options
        As in `wkv7_replay`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `wkv5_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv5", 4, 64, dtype=torch.float32, device="cuda")
    >>> r, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> rwkv_jit.wkv5_replay(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["wkv5"], _STEP, state, ring, (r, k, v, w, u), options)


def wkv5_verify(
    state: Any, ring: ReplayRing, r: Any, k: Any, v: Any, w: Any, u: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""RWKV-5 time mixing of drafted tokens, none of which counts until `replay_commit`.

    It is to `wkv5_replay` what `wkv7_verify` is to `wkv7_replay`.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv5_update`.
    ring : ReplayRing
        The entries, as in `wkv7_verify`.
    r, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `wkv5` takes them, T from 1 to 8 and to `ring.drafts`.
    w, u : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, and bonus of the current token.
    **options
        As in `wkv7_verify`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `wkv5_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "wkv5", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> r, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> rwkv_jit.wkv5_verify(pool, ring, r, k, v, w, u).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["wkv5"], _DRAFT, state, ring, (r, k, v, w, u), options)


def gla_replay(
    state: Any, ring: ReplayRing, q: Any, k: Any, v: Any, g: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Gated linear attention of one or a few tokens, which reads states and writes them once in a while.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K] the state in the pool with the entries of its slot.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, K, V), float16, bfloat16 or float32
        The pool, as in `gla_update`.
    ring : ReplayRing
        The entries, as in `wkv7_replay`.
    q, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `gla` takes them, T from 1 to 8.
    g : torch.Tensor, shape and dtype of q, or float32
        Decay before the map that `decay` names; by default its logarithm.
    **options
        As in `wkv7_replay`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `gla_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gla", 4, 64, dtype=torch.float32, device="cuda")
    >>> q, k, v, x = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> g = torch.nn.functional.logsigmoid(x)
    >>> rwkv_jit.gla_replay(pool, ring, q, k, v, g).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["gla"], _STEP, state, ring, (q, k, v, g), options)


def gla_verify(
    state: Any, ring: ReplayRing, q: Any, k: Any, v: Any, g: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Gated linear attention of drafted tokens, none of which counts until `replay_commit`.

    It is to `gla_replay` what `wkv7_verify` is to `wkv7_replay`.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, K, V), float16, bfloat16 or float32
        The pool, as in `gla_update`.
    ring : ReplayRing
        The entries, as in `wkv7_verify`.
    q, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `gla` takes them, T from 1 to 8 and to `ring.drafts`.
    g : torch.Tensor, shape and dtype of q, or float32
        Decay before the map that `decay` names; by default its logarithm.
    **options
        As in `wkv7_verify`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `gla_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "gla", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> q, k, v, x = torch.randn(4, 16, 2, 4, 64, device="cuda")
    >>> g = torch.nn.functional.logsigmoid(x)
    >>> rwkv_jit.gla_verify(pool, ring, q, k, v, g).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["gla"], _DRAFT, state, ring, (q, k, v, g), options)


def linear_attention_replay(
    state: Any, ring: ReplayRing, q: Any, k: Any, v: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Linear attention of one or a few tokens, which reads states and writes them once in a while.

        S <- S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K] the state in the pool with the entries of its slot.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, K, V), float16, bfloat16 or float32
        The pool, as in `linear_attention_update`.
    ring : ReplayRing
        The entries, as in `wkv7_replay`.
    q, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `linear_attention` takes them, T from 1 to 8.
    **options
        As in `wkv7_replay`; there is no decay and no w0.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `linear_attention_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "linear_attention", 4, 64, dtype=torch.float32, device="cuda")
    >>> q, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> rwkv_jit.linear_attention_replay(pool, ring, q, k, v).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["linear_attention"], _STEP, state, ring, (q, k, v), options)


def linear_attention_verify(
    state: Any, ring: ReplayRing, q: Any, k: Any, v: Any, **options: Unpack[ReplayOptions]
) -> Tensor:
    r"""Linear attention of drafted tokens, none of which counts until `replay_commit`.

    It is to `linear_attention_replay` what `wkv7_verify` is to `wkv7_replay`.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, K, V), float16, bfloat16 or float32
        The pool, as in `linear_attention_update`.
    ring : ReplayRing
        The entries, as in `wkv7_verify`.
    q, k, v : torch.Tensor, shape (B, H, K) and (B, H, V), or (B, T, H, K) and (B, T, H, V) for T tokens
        As `linear_attention` takes them, T from 1 to 8 and to `ring.drafts`.
    **options
        As in `wkv7_verify`; there is no decay and no w0.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, UnsupportedConfigError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_replay`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_replay`.

    References
    ----------
    As `linear_attention_update`.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> ring = rwkv_jit.ReplayRing(16, "linear_attention", 4, 64, drafts=2, dtype=torch.float32, device="cuda")
    >>> q, k, v = torch.randn(3, 16, 2, 4, 64, device="cuda")
    >>> rwkv_jit.linear_attention_verify(pool, ring, q, k, v).shape
    torch.Size([16, 2, 4, 64])
    """
    return _call(OPS["linear_attention"], _DRAFT, state, ring, (q, k, v), options)


def replay_commit(state: Any, ring: ReplayRing, accept_lens: Any, **options: Unpack[FlushOptions]) -> None:
    """Let the first drafts of each row count, as many as were accepted, after `wkv7_verify` or its like.

    Cursors move on. Where a slot has more than `ring.length` entries then, its state is written with all of them, and
    it has none: so there is always room for more drafts. What was not accepted is as if it had never come.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K) or (slots, H, K, V)
        The pool that the drafts were verified with.
    ring : ReplayRing
        Its entries.
    accept_lens : torch.Tensor, shape (B,), int32 or int64
        How many drafts of each row count: from 0 to the tokens that the last verify of its slot had.
    **options
        By name, as `FlushOptions` says: state_indices, null_index, state_layout, rounding, seed.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came.
    RuntimeError
        The state wants a gradient.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Nothing is copied beforehand, and nothing waits for the GPU. On a GPU `accept_lens` are taken for numbers from 0 to
    `ring.drafts`; with RWKVJIT_CHECK=1 they are looked at.

    Examples
    --------
    >>> accepted = torch.tensor([4, 0, 2], device="cuda")
    >>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)
    """
    _commit(_COMMIT, state, ring, accept_lens, options)


def replay_flush(state: Any, ring: ReplayRing, **options: Unpack[FlushOptions]) -> None:
    """Write the states of slots with all their entries, and leave the slots without any.

    Then the pool alone says what the texts are: for `StatePool.fork`, `copy` and `save`, and for calls that know of no
    entries.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K) or (slots, H, K, V)
        The pool.
    ring : ReplayRing
        Its entries.
    **options
        By name, as `FlushOptions` says: state_indices, null_index, state_layout, rounding, seed. Without
        `state_indices` all slots are written that have entries.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `replay_commit`.

    Examples
    --------
    >>> rwkv_jit.replay_flush(states.wkv[layer], ring, state_indices=states.indices(slot))
    >>> ring.reset(states.fork(slot, 2))
    """
    _commit(_FLUSH, state, ring, None, options)


# ---- a call ------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A call that has been checked, as the torch op takes it behind the name of the op."""

    op: Op
    mode: str
    state: Tensor
    y: Tensor | None
    cursors: Tensor
    arrivals: Tensor
    d: Tensor | None
    b: Tensor | None
    k: Tensor
    v: Tensor
    u: Tensor | None
    length: int
    inputs: Sequence[Tensor]
    w0: Tensor | None
    state_indices: Tensor | None
    accept_lens: Tensor | None
    seed: Tensor | None
    null_index: int
    scale: float
    decay: str
    state_layout: str

    @property
    def fields(self) -> tuple[Tensor | None, ...]:
        """Return the tensors of the ring."""
        return self[4:11]

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        rows = self.inputs[self.op.lead] if self.inputs else self.state_indices
        rows = self.accept_lens if rows is None else rows
        return self.state.shape[0] if rows is None else rows.shape[0]

    @property
    def tokens(self) -> int:
        """Return the tokens of a row; none of a commit."""
        return self.inputs[self.op.lead].shape[1] if self.inputs else 0

    @property
    def tensors(self) -> list[Tensor | None]:
        """Return the tensors in the order in which plans take them."""
        more = (self.w0, self.state, self.state_indices, self.accept_lens, self.seed, self.y)
        return [*self.inputs, *more, *self.fields]


class _Known(NamedTuple):
    """A call that has come before: what tells whether another one is like it, its plan, and what its y is made of."""

    options: list[tuple[str, Any]]  # that are no tensors
    tensors: list[str]  # those that are
    are_alike: Callable[..., bool]  # the pool, the ring, the inputs and these
    plan: Plan
    y: Memory | None


_known: BySignature[_Known] = BySignature()
_plans: BySignature[Plan] = BySignature()
_PLAIN = (str, int, float, type(None))


def _find(
    op_name: str, mode: str, state: Any, ring: Any, arrays: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Any, _Known | None]:
    """Return what a call is asked for by, and what is known of it; None for one that has to be checked."""
    asked: Any = None
    try:
        if tensors.is_eager():
            asked = (
                op_name, mode, ring.length, arrays[0].shape if arrays else None, tuple(options),
                torch.is_grad_enabled(), modes.is_batch_invariant(), state.data_ptr() & calls.ADDRESS_BITS,
            )  # fmt: skip
            known = _known.get(asked)
            if known is not None and all(options[name] == value for name, value in known.options):
                own = [options[name] for name in known.tensors]
                if known.are_alike(state, *ring.tensors, *arrays, *own):
                    return asked, known
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or an option that cannot be one
        return None, None
    return asked, None


def _call(op: Op, mode: str, state: Any, ring: Any, arrays: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Run a step: at once where the call is known, else after all checks."""
    asked, known = _find(op.name, mode, state, ring, arrays, options)
    if known is None:
        return _checked_call(op, mode, state, ring, arrays, dict(options), asked)
    get = options.get
    y = get("out")
    if y is None:
        assert known.y is not None
        y = tensors.new_on(known.plan.device.index, known.y)
    known.plan.run([*arrays, get("w0"), state, get("state_indices"), None, get("seed"), y, *ring.fields])
    return y


def _checked_call(
    op: Op, mode: str, state: Any, ring: Any, arrays: Sequence[Any], options: dict[str, Any], asked: Any
) -> Tensor:
    name = f"{op.name}_{'replay' if mode == _STEP else 'verify'}"
    if sharding.any_distributed((state, *arrays, *options.values())):
        raise TypeError(f"state: {name} changes it in place and takes no DTensors; pass to_local() of each")
    cast = torch_op.under_autocast(op, arrays)
    if cast is not None:
        with tensors.exactly(cast[0]):
            return _call(op, mode, state, ring, cast, options)
    step = _check_step(op, name, mode, state, ring, arrays, options)
    assert step.y is not None
    _run(step, [state, *arrays], options, asked, ring)
    return step.y


def _run(step: Step, given: Sequence[Any], options: Mapping[str, Any], asked: Any, ring: ReplayRing) -> None:
    """Run what has been checked; a call that was `asked` for so is known from then on."""
    if not (step.state.is_cuda and tensors.is_eager() and tensors.are_plain(step.tensors)):
        registry.find("replay_states")(step.op.name, *step[1:])
        return
    if _is_empty(step):
        return
    plan = _run_kernel(step)
    own = [option for option, value in options.items() if isinstance(value, Tensor)]
    others = [(option, value) for option, value in options.items() if option not in own]
    # Others are looked at anew each time: arrays of another library, seeds that are numbers, slots to check.
    are_the_same = all(isinstance(x, Tensor) for x in given) and not env.checks_indices()
    are_the_same = are_the_same and all(isinstance(x, _PLAIN) and option != "seed" for option, x in others)
    if asked is not None and are_the_same:
        state, *arrays = given
        are_alike = tensors.likeness([state, *ring.tensors, *arrays, *(options[option] for option in own)])
        made_of = None if step.y is None else tensors.memory(step.y.shape, step.y.dtype)
        _known.keep(asked, _Known(others, own, are_alike, plan, made_of))


def _is_empty(step: Step) -> bool:
    return step.rows == 0 or step.state.numel() == 0 or (step.y is not None and step.y.numel() == 0)


def _check_step(
    op: Op, name: str, mode: str, state: Any, ring: Any, arrays: Sequence[Any], options: dict[str, Any]
) -> Step:
    """Check a step, and return it with all options.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        Naming the argument, what was expected and what came.
    """
    unfit = ["decay", "w0"] * (op.decay == "none") + ["rounding", "seed"] * (mode == _DRAFT)
    every = dict.fromkeys([*FlushOptions.__annotations__, *ReplayOptions.__annotations__])
    arguments.check_names(name, options, [x for x in every if x not in unfit])
    _check_ring(op, ring)
    step = update.check(op, name, state, arrays, options)
    _check_sizes(ring, step.state, step.state_layout, step.inputs[op.lead].dtype)
    tokens, most = step.inputs[op.lead].shape[1], MOST_TOKENS if mode == _STEP else min(MOST_TOKENS, ring.drafts)
    if tokens > most:
        whose = "" if mode == _STEP else f", as the ring has room for {ring.drafts} drafts"
        raise ValueError(f"{op.public_names[op.lead]}: expected at most {most} tokens{whose}, got {tokens}")
    return Step(
        op, mode, step.state, step.y, *ring.fields, ring.length, step.inputs, step.w0, step.state_indices, None,
        step.seed, step.null_index, step.scale, step.decay, step.state_layout,
    )  # type: ignore[call-arg]  # fmt: skip


def _check_ring(op: Op | None, ring: Any) -> None:
    if not isinstance(ring, ReplayRing):
        raise TypeError(f"ring: expected a ReplayRing, got {brief(ring)}")
    if op is not None and ring.op != op.name:
        raise ValueError(f"ring: expected one of {op.name}, got one of {ring.op}")


def _check_sizes(ring: ReplayRing, state: Tensor, layout: str, dtype: torch.dtype) -> None:
    last = (ring.value_size, ring.head_size) if layout == "vk" else (ring.head_size, ring.value_size)
    own = (ring.slots, ring.heads, *last)
    if tuple(state.shape) != own:
        raise ValueError(f"ring: expected one of states {list(state.shape)}, got one of {list(own)}")
    if dtype != ring.dtype:
        raise TypeError(f"ring: expected entries of {dtype} like the inputs, got {ring.dtype}")
    if ring.device != state.device:
        raise ValueError(f"ring: expected device {state.device}, got {ring.device}")


def _commit(mode: str, state: Any, ring: Any, accept_lens: Any, options: Mapping[str, Any]) -> None:
    """Run a commit or a flush."""
    given = [] if accept_lens is None else [accept_lens]
    asked, known = _find(getattr(ring, "op", ""), mode, state, ring, given, options)
    if known is not None:
        get = options.get
        known.plan.run([None, state, get("state_indices"), accept_lens, get("seed"), None, *ring.fields])
        return
    name = f"replay_{mode}"
    arguments.check_names(name, options, list(FlushOptions.__annotations__))
    _check_ring(None, ring)
    op = OPS[ring.op]
    if sharding.any_distributed((state, *given, *options.values())):
        raise TypeError(f"state: {name} changes it in place and takes no DTensors; pass to_local() of each")
    layout, rounds = options.get("state_layout", op.state_layout), options.get("rounding", "nearest")
    checks.check_name("state_layout", layout, checks.STATE_LAYOUTS)
    checks.check_name("rounding", rounds, arguments.ROUNDINGS)
    null_index = arguments.null_index(options.get("null_index", -1))
    pool = tensors.from_any("state", state, in_place=True)
    sizes = {"H": ring.heads, "K": ring.head_size, "V": ring.value_size}
    arguments.check_pool(op, pool, tuple(sizes[dim] for dim in op.state_dims(layout)), pool, not pool.is_cuda)
    _check_sizes(ring, pool, layout, ring.dtype)
    indices = options.get("state_indices")
    counts = None if accept_lens is None else tensors.from_any("accept_lens", accept_lens)
    rows = len(pool) if counts is None else counts.numel()
    if indices is not None:
        indices = tensors.from_any("state_indices", indices)
        rows = indices.numel()
        indices = arguments.indices("state_indices", indices, rows, pool)
    elif rows > len(pool):
        raise ValueError(f"state: expected a slot for each of the {rows} rows, or state_indices; got {len(pool)}")
    if arguments.may_look_at([indices]):
        arguments.check_slots({"state_indices": indices}, len(pool), null_index)
    if mode == _COMMIT:
        if counts is None:
            raise TypeError("accept_lens: expected a torch.Tensor, got None")
        if tuple(counts.shape) != (rows,):
            raise ValueError(f"accept_lens: expected shape [{rows}], a number for each row, got {list(counts.shape)}")
        arguments.check_dtype("accept_lens", counts, arguments.INDEX_TYPES, pool)
        _check_counts(counts, ring)
    arguments.refuse_gradients(op, name, [pool])
    seed = arguments.seed_tensor(options.get("seed"), rounds, pool, pool)
    step = Step(
        op, mode, pool, None, *ring.fields, ring.length, (), None, indices, counts, seed, null_index, 1.0, op.decay,
        layout,
    )  # type: ignore[call-arg]  # fmt: skip
    _run(step, [state, *given], options, asked, ring)


def _check_counts(counts: Tensor, ring: ReplayRing) -> None:
    """Check the values of `accept_lens` where that costs nothing, on the CPU, or where the user has asked for it."""
    if torch.compiler.is_compiling() or not tensors.are_plain([counts]):
        return
    if counts.is_cuda and (not env.checks_indices() or tensors.capturing()):
        return
    outside = [number for number in counts.tolist() if not 0 <= number <= ring.drafts]
    if outside:
        raise ValueError(f"accept_lens: expected numbers from 0 to the ring's {ring.drafts} drafts, got {outside[:8]}")


# ---- kernels -----------------------------------------------------------------------------------------------------


def _run_kernel(step: Step) -> Plan:
    """Run a step by its kernel, and return its plan."""
    alignment = step.state.data_ptr() & calls.ADDRESS_BITS
    key = (
        step.op.name, step.mode, step.length, *step[-4:], modes.is_batch_invariant(), alignment,
        tensors.signature(step.tensors),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _plan(step))
    plan.run(step.tensors)
    return plan


def _plan(step: Step) -> Plan:
    op, state = step.op, step.state
    index_bytes = 4 if step.state_indices is None else step.state_indices.element_size()
    pool = calls.pool_of(state, index_bytes, step.null_index, step.w0, step.seed)
    if step.inputs:
        options = {"scale": step.scale, "decay": step.decay, "state_layout": step.state_layout}
        problem = calls.problem_of(op, step.inputs, state, **options)
    else:  # a plan has to have an input
        problem = Problem(
            replace(op, inputs={"cursors": "N"}), tensors.gpu(state.device.index), {"v": tensors.STORAGE[step.k.dtype]},
            B=step.rows, N=step.rows, T=0, H=state.shape[1], K=step.k.shape[-1], V=step.v.shape[-1],
            state_type=tensors.STORAGE[state.dtype], decay=step.decay, state_layout=step.state_layout,
            is_batch_invariant=modes.is_batch_invariant(),
        )  # fmt: skip
    ring = replay_steps.Ring(
        step.length, step.k.shape[2], 0 if step.mode == _FLUSH else step.length, step.mode == _DRAFT,
        4 if step.accept_lens is None else step.accept_lens.element_size(),
    )  # fmt: skip
    inputs = op.names if step.inputs else ()
    names = (*inputs, "w0", "state", "state_indices", "accept_lens", "seed", "y", *_FIELDS)
    named = dict(zip(names, step.tensors, strict=True))
    named["state"] = calls.one_slot(state)
    return Plan(replay_steps.schedule(problem, pool, ring, step.tokens), problem, named)


# ---- plain torch, and the torch op -------------------------------------------------------------------------------


def _run_plainly(step: Step) -> None:
    """Run a step in plain torch: the states as they are with their entries, and the tokens on them."""
    op, state, slots = step.op, step.state, step.state.shape[0]
    wide = torch.promote_types(state.dtype, torch.promote_types(step.k.dtype, torch.float32))
    read = torch.arange(step.rows, device=state.device)
    read = read if step.state_indices is None else step.state_indices.to(torch.int64)
    null_index = -1 if step.state_indices is None else step.null_index
    there = (read > null_index) & (read >= 0) & (read < slots)
    places = read[there]
    entries, tokens = step.k.shape[2], step.tokens

    past = step.cursors[places].to(torch.int64).clamp(0, step.length)
    if step.accept_lens is not None:
        past = past + step.accept_lens[there].to(torch.int64).clamp(0, entries - step.length)
    is_vk = step.state_layout == "vk"
    now = state[places].to(wide)
    now = now if is_vk else now.transpose(-1, -2)

    def add(now: Tensor, d: Tensor | None, u: Tensor | None, b: Tensor | None, v: Tensor, k: Tensor) -> Tensor:
        now = now if d is None else now * d.unsqueeze(-2)
        now = now + v.unsqueeze(-1) * k.unsqueeze(-2)
        return now if u is None or b is None else now + u.unsqueeze(-1) * b.unsqueeze(-2)

    for i in range(entries):
        own = [None if x is None else x[places, :, i].to(wide) for x in (step.d, step.u, step.b, step.v, step.k)]
        now = torch.where((i < past)[:, None, None, None], add(now, *own), now)  # type: ignore[arg-type]
    is_flush = past + tokens > (0 if step.mode == _FLUSH else step.length)
    if step.mode == _DRAFT:
        is_flush = torch.zeros_like(is_flush)

    if tokens:
        assert step.y is not None
        given = {name: x[there] if "B" in op.inputs[name] else x for name, x in zip(op.names, step.inputs, strict=True)}
        given = {name: x.to(wide) for name, x in given.items()}
        if step.w0 is not None:
            given["w"] = given["w"] + step.w0.view(given["w"].shape[-2:]).to(wide)
        if "w" in given:
            given["w"] = decay_factor(given["w"], step.decay)
        shown = step.y.view(step.inputs[op.names.index("v")].shape)
        shown.zero_()
        ys = []
        for t in range(tokens):
            x = {
                name: z[:, t] if "T" in op.inputs[name] else z.expand_as(given["k"][:, t]) for name, z in given.items()
            }
            u = None if "a" not in x else (now @ x["a"].unsqueeze(-1)).squeeze(-1)
            before = now
            now = add(now, x.get("w"), u, x.get("b"), x["v"], x["k"])
            seen = before if "u" in x else now
            y = (seen @ x["r"].unsqueeze(-1)).squeeze(-1)
            if "u" in x:
                y = y + (x["u"] * x["r"] * x["k"]).sum(-1, keepdim=True) * x["v"]
            ys.append(step.scale * y)
            keeps = ~is_flush
            for field, value in ((step.d, x.get("w")), (step.b, x.get("b")), (step.k, x["k"]), (step.v, x["v"]),
                                 (step.u, u)):  # fmt: skip
                if field is not None and value is not None:
                    field[places[keeps], :, (past + t)[keeps]] = value[keeps].to(field.dtype)
        shown[there] = torch.stack(ys, 1).to(shown.dtype)
    if step.mode == _DRAFT:
        return
    final = (now if is_vk else now.transpose(-1, -2))[is_flush].contiguous()
    written = places[is_flush]
    if step.seed is not None and len(written):
        size = final[0].numel() // final.shape[1]
        bits = rounding.random_bits(written, final.shape[1], size, int(step.seed))
        final = rounding.round_at_random(final.float(), state.dtype, bits.view(final.shape))
    state[written] = final.to(state.dtype)
    step.cursors[places] = torch.where(is_flush, 0, past + tokens).to(torch.int32)


def run(op: str, *given: Any) -> None:
    """Run the torch op with CPU or CUDA tensors."""
    step = Step(OPS[op], *given)
    if _is_empty(step):
        return
    if step.state.is_cuda:
        _run_kernel(step)
        return
    torch_op.say_reference(f"{op}_replay", step.state)
    with tensors.exactly(step.state), torch.no_grad():
        _run_plainly(step)


def fake(op: str, *given: Any) -> None:
    """Do nothing with tensors that have no memory."""


def record(keys: Any, op: str, *given: Any) -> None:
    """Refuse to record gradients."""
    arguments.refuse_gradients(OPS[op], f"{op}_replay", given)
    with torch._C._AutoDispatchBelowAutograd():
        registry.find("replay_states").redispatch(keys & torch._C._after_autograd_keyset, op, *given)
