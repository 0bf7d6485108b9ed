"""The recurrences over sequences that many processes share, each with a part of every one.

tools/functions.py has written this, from the functions over sequences and their docstrings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call.tensors import Array
from rwkv_jit.parallel.recurrences import shared
from rwkv_jit.parallel.shard import Shard

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import CallOptions, DecayOptions


def wkv5(
    r: Array,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    shard: Shard,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""RWKV-5 time mixing over sequences that many processes share, with gradients.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per head and token, with S [V, K]. B is the batch, T the tokens of this process's part, H the heads, K and V the
    head sizes of keys and values.

    Parameters
    ----------
    r, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, the same for every token.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
        B, or the packed sequences of this part.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states.
    **options
        By name, as `rwkv_jit.wkv5` takes them.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, V, K), or None
        State after the last token of each sequence in this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been sent.
    RwkvJitError
        As `rwkv_jit.wkv5`.

    Notes
    -----
    All processes of the group call it, forwards and backwards, in the same order with other calls of theirs: each
    direction has one all-gather. A process tells the others N H (V + 1) K numbers in the forward and N H V K in the
    backward. The part at whose begin all sequences begin does not wait for the forward's, the last one not for the
    backward's.

    A part of one sequence, or of a batch, runs once where `rwkv_jit.wkv5` takes the tensor cores
    for heads that a block holds and T is a multiple of 64. Its kernels find what the part does to any state, wait, and
    go on. Other parts of one sequence run three times in the forward, and twice in the backward. A part with the end of
    a sequence and the beginning of another runs once: what begins there first, and the rest when its state is there.

    Numbers that are exchanged are float32, and joined in float64. Gradients of inputs without tokens are those of this
    part: the sum over the processes is the whole. `torch.compile` leaves the call out of its graphs.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.
    That parts of a sequence are joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their
    Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv5(r, k, v, w, u, shard)  # of this process's tokens
    """
    return shared("wkv5", (r, k, v, w, u), shard, initial_state, output_final_state, dict(options))


def wkv6(
    r: Array,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    shard: Shard,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""RWKV-6 time mixing over sequences that many processes share, with gradients.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per head and token, with S [V, K]. B is the batch, T the tokens of this process's part, H the heads, K and V the
    head sizes of keys and values.

    Parameters
    ----------
    r, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (B, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
        B, or the packed sequences of this part.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states.
    **options
        By name, as `rwkv_jit.wkv6` takes them.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, V, K), or None
        State after the last token of each sequence in this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been sent.
    RwkvJitError
        As `rwkv_jit.wkv6`.

    Notes
    -----
    All processes of the group call it, forwards and backwards, in the same order with other calls of theirs: each
    direction has one all-gather. A process tells the others N H (V + 1) K numbers in the forward and N H V K in the
    backward. The part at whose begin all sequences begin does not wait for the forward's, the last one not for the
    backward's.

    A part of one sequence, or of a batch, runs once where `rwkv_jit.wkv6` takes the tensor cores
    for heads that a block holds and T is a multiple of 64. Its kernels find what the part does to any state, wait, and
    go on. Other parts of one sequence run three times in the forward, and twice in the backward. A part with the end of
    a sequence and the beginning of another runs once: what begins there first, and the rest when its state is there.

    Numbers that are exchanged are float32, and joined in float64. Gradients of inputs without tokens are those of this
    part: the sum over the processes is the whole. `torch.compile` leaves the call out of its graphs.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.
    That parts of a sequence are joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their
    Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv6(r, k, v, w, u, shard)  # of this process's tokens
    """
    return shared("wkv6", (r, k, v, w, u), shard, initial_state, output_final_state, dict(options))


def wkv7(
    r: Array,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    shard: Shard,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""RWKV-7 time mixing over sequences that many processes share, with gradients.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per head and token, with S [V, K]. B is the batch, T the tokens of this process's part, H the heads, K and V the
    head sizes of keys and values.

    Parameters
    ----------
    r, k, a, b : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Receptance, key, and the two sides of the state's rank-one correction (in the model a = -kk, b = kk * a').
        Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other libraries.
    w : torch.Tensor, shape (B, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (B, T, H, V), dtype of r
        Value.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
        B, or the packed sequences of this part.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states.
    **options
        By name, as `rwkv_jit.wkv7` takes them.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, V, K), or None
        State after the last token of each sequence in this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been sent.
    RwkvJitError
        As `rwkv_jit.wkv7`.

    Notes
    -----
    All processes of the group call it, forwards and backwards, in the same order with other calls of theirs: each
    direction has one all-gather. A process tells the others N H (V + K) K numbers in the forward and N H V K in the
    backward. The part at whose begin all sequences begin does not wait for the forward's, the last one not for the
    backward's.

    A part of one sequence, or of a batch, runs once where `rwkv_jit.wkv7` takes the tensor cores
    for heads that a block holds and T is a multiple of 64. Its kernels find what the part does to any state, wait, and
    go on. Other parts of one sequence run three times in the forward, and twice in the backward. A part with the end of
    a sequence and the beginning of another runs once: what begins there first, and the rest when its state is there.

    Numbers that are exchanged are float32, and joined in float64. Gradients of inputs without tokens are those of this
    part: the sum over the processes is the whole. `torch.compile` leaves the call out of its graphs.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.
    That parts of a sequence are joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their
    Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv7(r, w, k, v, a, b, shard)  # of this process's tokens
    """
    return shared("wkv7", (r, w, k, v, a, b), shard, initial_state, output_final_state, dict(options))


def gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    shard: Shard,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""Gated linear attention over sequences that many processes share, with gradients.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per head and token, with S [V, K]. B is the batch, T the tokens of this process's part, H the heads, K and V the
    head sizes of keys and values.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value.
    g : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        Decay before the map that `decay` names; by default its logarithm.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
        B, or the packed sequences of this part.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states.
    **options
        By name, as `rwkv_jit.gla` takes them.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, K, V), or None
        State after the last token of each sequence in this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been sent.
    RwkvJitError
        As `rwkv_jit.gla`.

    Notes
    -----
    All processes of the group call it, forwards and backwards, in the same order with other calls of theirs: each
    direction has one all-gather. A process tells the others N H (V + 1) K numbers in the forward and N H V K in the
    backward. The part at whose begin all sequences begin does not wait for the forward's, the last one not for the
    backward's.

    A part of one sequence, or of a batch, runs once where `rwkv_jit.gla` takes the tensor cores
    for heads that a block holds and T is a multiple of 64. Its kernels find what the part does to any state, wait, and
    go on. Other parts of one sequence run three times in the forward, and twice in the backward. A part with the end of
    a sequence and the beginning of another runs once: what begins there first, and the rest when its state is there.

    Numbers that are exchanged are float32, and joined in float64. Gradients of inputs without tokens are those of this
    part: the sum over the processes is the whole. `torch.compile` leaves the call out of its graphs.

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.
    That parts of a sequence are joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their
    Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.gla(q, k, v, g, shard)  # of this process's tokens
    """
    return shared("gla", (q, k, v, g), shard, initial_state, output_final_state, dict(options))


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    shard: Shard,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""Linear attention over sequences that many processes share, with gradients.

        S <- S + v k^T;   y = scale S q

    per head and token, with S [V, K]. B is the batch, T the tokens of this process's part, H the heads, K and V the
    head sizes of keys and values.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
        B, or the packed sequences of this part.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states.
    **options
        By name, as `rwkv_jit.linear_attention` takes them.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, K, V), or None
        State after the last token of each sequence in this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been sent.
    RwkvJitError
        As `rwkv_jit.linear_attention`.

    Notes
    -----
    All processes of the group call it, forwards and backwards, in the same order with other calls of theirs: each
    direction has one all-gather. A process tells the others N H (V + 1) K numbers in the forward and N H V K in the
    backward. The part at whose begin all sequences begin does not wait for the forward's, the last one not for the
    backward's.

    A part of one sequence, or of a batch, runs once where `rwkv_jit.linear_attention` takes the tensor cores
    for heads that a block holds and T is a multiple of 64. Its kernels find what the part does to any state, wait, and
    go on. Other parts of one sequence run three times in the forward, and twice in the backward. A part with the end of
    a sequence and the beginning of another runs once: what begins there first, and the rest when its state is there.

    Numbers that are exchanged are float32, and joined in float64. Gradients of inputs without tokens are those of this
    part: the sum over the processes is the whole. `torch.compile` leaves the call out of its graphs.

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.
    That parts of a sequence are joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their
    Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.linear_attention(q, k, v, shard)  # of this process's tokens
    """
    return shared("linear_attention", (q, k, v), shard, initial_state, output_final_state, dict(options))
