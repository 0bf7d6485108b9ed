"""Decoding that reads states and the tokens since they were written, and writes them once in a while.

What a state would be after tokens i = 1 ... n is a sum that can be read without it, with p_i the product of the decays
behind token i, and u_i = S_{i-1} a_i:

    S_n x = S_0 (p_0 x) + sum_i ((b_i . (p_i x)) u_i + (k_i . (p_i x)) v_i)

So a step reads the state and its entries, and adds an entry. Drafts are entries that do not count yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from rwkv_jit.inference import replay_calls
from rwkv_jit.inference.ring import ReplayRing

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    return replay_calls.step("wkv7", state, ring, (r, w, k, v, a, b), options)


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
    return replay_calls.draft("wkv7", state, ring, (r, w, k, v, a, b), options)


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
    return replay_calls.step("wkv6", state, ring, (r, k, v, w, u), options)


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
    return replay_calls.draft("wkv6", state, ring, (r, k, v, w, u), options)


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
    return replay_calls.step("wkv5", state, ring, (r, k, v, w, u), options)


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
    return replay_calls.draft("wkv5", state, ring, (r, k, v, w, u), options)


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
    return replay_calls.step("gla", state, ring, (q, k, v, g), options)


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
    return replay_calls.draft("gla", state, ring, (q, k, v, g), options)


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
    return replay_calls.step("linear_attention", state, ring, (q, k, v), options)


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
    return replay_calls.draft("linear_attention", state, ring, (q, k, v), options)


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
    replay_calls.commit(state, ring, accept_lens, options)


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
    replay_calls.flush(state, ring, options)
