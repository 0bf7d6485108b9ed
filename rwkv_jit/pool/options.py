"""The options that calls over a pool of states take by name, and what else these calls share: said here once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from rwkv_jit.schedules.legal import Decay, Rounding, StateLayout

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Required

    from rwkv_jit.call.tensors import Array


class PoolOptions(TypedDict, total=False):
    """The pool, options, errors and precision that all calls over a pool of states share.

    B is the number of rows, T the tokens, H the heads, K and V the head sizes of keys and values. The argument `state`
    is the pool: a torch.Tensor, shape (slots, H, V, K), or (slots, H, K, V) in the kv layout, float16, bfloat16 or
    float32. A slot has no gaps; between slots there may be some. The pool changes in place, so every element needs
    separate memory. Other inputs may have any strides; if the last one is not 1, the input is copied.

    Attributes
    ----------
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    null_index : int, default -1
        Slots at or below it are padding: SGLang and FlashInfer use -1, vLLM 0. Such a row gets zeros for y, and no
        state is read or written. The same holds for a slot beyond the pool.
    out : torch.Tensor, shape and dtype of v, optional
        Memory for y, without gaps; the call then returns `out`. It may be that of an input, which costs a copy.
    scale : float
        Factor of y: 1 by default, for gla and linear attention K^-0.5.
    state_layout : {"vk", "kv"}
        Order of the last two dimensions of a state: "vk" by default, for gla and linear attention "kv".
    rounding : {"nearest", "stochastic"}, default "nearest"
        How a 16-bit state is rounded when it is written, once per call. "stochastic" chooses one of the two neighbours,
        the nearer one more often, so that many small changes are not lost.
    seed : int or torch.Tensor of one int64 on the device
        Required for "stochastic"; use another one in each step. Results are the same for the same seed, slots
        and states, whatever the batch. In a CUDA graph it must be a tensor, which replays read.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The states are unchanged.
    RuntimeError
        An input requires a gradient, which calls that change states in place do not have; ops such as `wkv7` do.
    RwkvJitError
        The first call of this kind is in the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 for all dtypes; a 16-bit state is rounded once when it is written. Relative L2 error of y and
    of float32 states against float64 on the same inputs: below 5e-6, and that of rounding y where it has 16 bits.

    Indices on the CPU are checked. On a GPU kernels never read or write outside of the pool. With RWKVJIT_CHECK=1 from
    the start every call checks them, and waits for the GPU: an index beyond the pool, two rows that write to one slot,
    and a row that reads a slot that another writes are then errors.

    The first call with a head size, dtype and decay compiles for this GPU and stores the result on disk; for a CUDA
    graph make it before the capture. CPU tensors run plain torch, with one notice.
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
        The slot that each row's state is written to, if it is not the one that it is read from. Two rows must not write
        to one slot, and no row may read a slot that another row writes. A row without a slot here gets y, and writes no
        state.

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

    T is the number of tokens of all sequences, which follow each other.

    Attributes
    ----------
    cu_seqlens : torch.Tensor, shape (sequences + 1,), int32 or int64
        Required. The bounds of sequences: sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1]. It must not
        decrease. Tokens outside of all sequences get zeros for y.
    has_initial_state : torch.Tensor, shape (sequences,), bool or uint8, optional
        If false, the sequence begins with zeros, whatever its slot holds. Without it all begin with the states in their
        slots.
    num_active : torch.Tensor of one int32, optional
        How many sequences are computed: all later ones count as empty, so that one CUDA graph serves any number.
    max_seqlen : int, optional
        A hint: the most tokens of a sequence. Up to 8 saves kernels; a large one lets few long sequences be cut, so
        that they use the whole GPU. Results are right for any lengths.
    checkpoint_offsets : torch.Tensor, shape (sequences, checkpoints), dtype of `cu_seqlens`, optional
        Numbers of tokens after which the state of a sequence is also written, to `checkpoint_indices`: for prefix
        caches. They must ascend in a row; others, 0, and numbers beyond the sequence are ignored.
    checkpoint_indices : torch.Tensor, shape (sequences, checkpoints), dtype of `state_indices`, optional
        The slots of these states; those at or below `null_index` are ignored.

    Notes
    -----
    Sequences of up to 8 tokens are computed as by `wkv7_update`, and have its precision. Longer ones are computed as by
    `wkv7` with packed sequences. If a prompt is cut, into several calls or by checkpoints, results differ by no more
    than that, and by the rounding of 16-bit states. `rounding` is for sequences of up to 8 tokens without checkpoints;
    after longer ones states are rounded to the nearest, which loses nothing once in so many tokens. If few sequences
    are cut, as `max_seqlen` allows, those of up to 8 tokens take the kernels of longer ones. Only the GPU reads the
    lengths: nothing waits for it, and a CUDA graph can be replayed with other lengths. No values of cu_seqlens and
    indices cause an access outside of the tensors.
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
        As in `DecayUpdateOptions`. There are none of linear attention, and of ops such as `kda`.

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
