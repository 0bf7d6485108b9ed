"""The options that calls over a pool of states take by name, and what else these calls share: said here once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from rwkv_jit.legal import Decay, Rounding, StateLayout

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Required

    from rwkv_jit.tensors import Array


class PoolOptions(TypedDict, total=False):
    """What calls over a pool of states share: the pool, these options by name, their errors and their precision.

    B is the rows, T the tokens, H the heads, K and V the head sizes of keys and values. The argument `state` is the
    pool: a torch.Tensor, shape (slots, H, V, K), or (slots, H, K, V) in the kv layout, float16, bfloat16 or float32. A
    slot has no gaps; between slots there may be some. The pool changes in place, so every element needs separate
    memory. Other inputs may have any strides; where the last one is not 1, a copy is made.

    Attributes
    ----------
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    null_index : int, default -1
        A slot at or below it is none: SGLang and FlashInfer have -1, vLLM has 0. A row that has none gets zeros for y,
        and no state of it is read or written. So it is with a slot past the pool.
    out : torch.Tensor, shape and dtype of v, optional
        Where y is written, without gaps; y is `out` then.
    scale : float
        Factor of y: 1 by default, for gla and linear attention K^-0.5.
    state_layout : {"vk", "kv"}
        Order of the last two dimensions of a state: "vk" by default, for gla and linear attention "kv".
    rounding : {"nearest", "stochastic"}, default "nearest"
        How a state of 16 bits is rounded when it is written, once in a call. "stochastic" takes one of the two
        neighbours, the nearer one more often, so that many small changes are not lost.
    seed : int or torch.Tensor of one int64 on the device
        For "stochastic", which needs one; give another one in each step. Results are the same for the same seed, slots
        and states, whatever the batch. In a CUDA graph it must be a tensor, which replays read.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. The states are as they were.
    RuntimeError
        An input wants a gradient, which states changed in place cannot give: ops such as `wkv7` can.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are; a state of 16 bits is rounded once where it is written. Relative L2
    error of y and of float32 states against float64 on the same inputs: below 5e-6, and that of rounding y where it has
    16 bits.

    Indices on the CPU are checked. On a GPU kernels read and write no slot that is not in the pool. With
    RWKVJIT_CHECK=1 from the start every call looks at them, which waits for the GPU: an index past the pool, two rows
    that write to one slot, and a row that reads what another writes are errors then.

    The first call with a head size, dtype and decay compiles for this GPU and stores the result on disk; in a CUDA
    graph it must have come before. CPU tensors run plain torch, with one notice.
    """

    state_indices: Array | None
    null_index: int
    out: Array | None
    scale: float
    state_layout: StateLayout
    rounding: Rounding
    seed: int | Tensor | None


class UpdateOptions(PoolOptions, total=False):
    """Options of `wkv7_update` and other updates, by name, beside those of `PoolOptions`.

    Attributes
    ----------
    write_indices : torch.Tensor, shape (B,), dtype of `state_indices`, optional
        The slot that each row's state is written to, where that is another one than it is read from. Two rows must not
        write to one slot, nor one read what another writes. Where it has none, y is right and no state is written.

    Notes
    -----
    Read long prompts with `wkv7` or `wkv7_varlen`: updates go token by token.
    """

    write_indices: Array | None


class DecayUpdateOptions(UpdateOptions, total=False):
    """Options of the updates that have a decay, beside those of `UpdateOptions`.

    Attributes
    ----------
    decay : {"raw", "sigmoid", "log", "direct"}
        As in `DecayOptions`: "raw" by default, for gla "log".
    w0 : torch.Tensor, shape (H, K) or (H * K,), float16, bfloat16 or float32, optional
        Is added to w (g) before the map that `decay` names, in float32.
    """

    decay: Decay
    w0: Array | None


class VarlenOptions(UpdateOptions, total=False):
    """Options of `wkv7_varlen` and the same functions of other ops, by name, beside those of `UpdateOptions`, whose
    rows are sequences here.

    T is the tokens of all sequences, one sequence behind another.

    Attributes
    ----------
    cu_seqlens : torch.Tensor, shape (sequences + 1,), int32 or int64
        Must be given. Where sequences begin and end: sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1]. It
        never falls. Tokens of no sequence get zeros for y.
    has_initial_state : torch.Tensor, shape (sequences,), bool or uint8, optional
        Where it is false, a sequence begins with zeros, whatever its slot holds. Without it all begin with their slot.
    num_active : torch.Tensor of one int32, optional
        How many sequences there are: those behind them count as empty, so that a CUDA graph serves any number of them.
    max_seqlen : int, optional
        About the most tokens that a sequence has: up to 8 fewer kernels are needed, and many of few sequences are cut,
        so that the whole GPU works on them. Any lengths are right, whatever it says.
    checkpoint_offsets : torch.Tensor, shape (sequences, checkpoints), dtype of `cu_seqlens`, optional
        Numbers of tokens after which the state of a sequence is written too, to `checkpoint_indices`: for prefix
        caches. They ascend in a row; one that does not, that is 0 or behind the sequence counts as none.
    checkpoint_indices : torch.Tensor, shape (sequences, checkpoints), dtype of `state_indices`, optional
        The slots of these states; one at or below `null_index` is none.

    Notes
    -----
    Sequences of up to 8 tokens are computed as by `wkv7_update`, and have its precision. Longer ones are computed as by
    `wkv7` with packed sequences. Where a prompt is cut, into several calls or by checkpoints, results differ by no more
    than that, and by what rounding a state of 16 bits does. `rounding` is for sequences of up to 8 tokens without
    checkpoints; after longer ones states are rounded to the nearest: once in so many tokens loses nothing. Where few
    sequences are cut, as `max_seqlen` allows, those of up to 8 tokens take the kernels of longer ones. Only the GPU
    reads the lengths: nothing waits for it, and a CUDA graph replays with others. The kernels take any values of
    cu_seqlens and indices without a stray access.
    """

    cu_seqlens: Required[Array]
    has_initial_state: Array | None
    num_active: Array | None
    max_seqlen: int | None
    checkpoint_offsets: Array | None
    checkpoint_indices: Array | None


class DecayVarlenOptions(VarlenOptions, total=False):
    """Options of the functions that have a decay, beside those of `VarlenOptions`.

    Attributes
    ----------
    decay, w0
        As in `DecayUpdateOptions`.
    decay_bound : float, optional
        A hint, as in `DecayOptions`.
    """

    decay: Decay
    decay_bound: float | None
    w0: Array | None


class ReplayOptions(PoolOptions, total=False):
    """Options of the functions `_replay` and `_verify`, by name, beside those of `PoolOptions`.

    `ring` is the `ReplayRing` of the pool: of as many slots, and of the same op, sizes, dtype and device. A pool has
    one ring. `wkv7_verify` writes no state and has no rounding and seed. T is 1 to 8.

    Attributes
    ----------
    decay, w0
        As in `DecayUpdateOptions`. There are none of linear attention.

    Raises
    ------
    UnsupportedConfigError
        The entries need more shared memory than a block of this GPU has.

    Notes
    -----
    Decays are multiplied, newest first: nothing is divided and no logarithm is taken, so factors of 0 and any others
    are as good here as in `wkv7_update`. A state of 16 bits is rounded when it is written, not in every token. Where an
    argument does not fit, the entries are as they were, too.

    Cursors are moved on the device: rows may have different ones, and a CUDA graph goes on where the last replay ended.
    Whether a row's state is written is decided there, too. No slot may come twice in a call.
    """

    decay: Decay
    w0: Array | None


class FlushOptions(TypedDict, total=False):
    """Options of `replay_commit` and `replay_flush`, by name: those of `PoolOptions` but for `out` and `scale`.

    `ring` is the `ReplayRing` of the pool, as `ReplayOptions` says. A row without a slot is left alone.
    """

    state_indices: Array | None
    null_index: int
    state_layout: StateLayout
    rounding: Rounding
    seed: int | Tensor | None
