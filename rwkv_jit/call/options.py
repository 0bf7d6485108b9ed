"""The options that all ops with heads take behind their tensors, by name: said here once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from rwkv_jit.call import checks, tensors
from rwkv_jit.schedules.legal import Backend, Decay, StateLayout
from rwkv_jit.schedules.problem import Op


class CallOptions(TypedDict, total=False):
    """Options of `wkv5`, `wkv6`, `wkv7`, `gla` and `linear_attention`, by name.

    Attributes
    ----------
    scale : float
        Factor of y: 1 by default, for `gla` and `linear_attention` K^-0.5.
    state_layout : {"vk", "kv"}
        Order of the last two dimensions of the states: "vk" by default, for `gla` and `linear_attention` "kv".
    checkpoint_interval : int, default 64
        Tokens between the states that the recurrent kernels save for the backward. The kernels on the tensor cores save
        one every `chunk_len` tokens, in the inputs' dtype.
    chunk_len : int, optional
        Tokens that a block works on at once: 1, 2, 4, 8 or 16 in the recurrent kernels, 16 or 32 on the tensor cores,
        there 64 too in other ops than wkv7, and 32 or 64 in wkv7 with head sizes above 128. The default depends on the
        head sizes, the GPU, `decay_bound` and whether gradients are needed, or is that of `rwkv-jit tune`.
    num_threads : int, optional
        Threads of a block. The recurrent kernels take 32, 64, 128 or 256. Those on the tensor cores take a multiple of
        32 up to 512 in the forward, and not less than the head sizes require; their backward has one choice. Errors
        list the legal ones. The default depends on the head sizes and on whether there are few heads, or is the tuned
        one if `chunk_len` is None too.
    backend : {"auto", "recurrent", "chunked", "split", "reference"}, default "auto"
        Leave it at "auto". If results must not depend on the batch, call `set_batch_invariant`. "recurrent" are CUDA
        kernels that go token by token in float32. "chunked" uses the tensor cores, for heads that fit into a block.
        "split" shares the work of a head between blocks: segments of the sequences in parallel, or the value rows of a
        head that does not fit into a block. "reference" is plain torch, for tensors that are not on a GPU.

    Notes
    -----
    For up to 8 tokens without gradients, not packed and with K up to 1024, "auto" takes the kernel of updates, such as
    `wkv7_update`, which goes token by token in float32. Calls with `chunk_len` or `num_threads`, and those after
    `set_batch_invariant`, do not.

    For other calls in float16 and bfloat16 from sm_80 on, with 4 tokens a sequence on average or more, "auto" takes
    "chunked" for K and V up to 128 with K at most twice V, where the GPU has the shared memory, and "split" for other
    heads up to 1024. If there are few heads, it takes "split" for the smaller ones too, if T makes 4 segments or more
    of at least 512 tokens in wkv7 and 256 in the other ops; and for packed sequences, 256 tokens or more on average, if
    the longest one has three times the tokens that each block would have with equal shares. Keys of other ops than wkv7
    above 256 (on sm_90 above 1024) are cut into parts, whose y are added. All other calls take "recurrent".

    float32 takes the same kernels as float16 if `torch.set_float32_matmul_precision` is "high" or "medium", and so does
    bfloat16 if `set_bfloat16_precision` is "high". Tensors are then scaled by powers of two.

    Operands of the tensor cores have the inputs' dtype otherwise. The largest float16 number is 65504, and those below
    6e-5 have fewer digits: larger states and their gradients become infinite, and where dy is below 1e-3 gradients lose
    digits, unless the loss is scaled, as `torch.amp.GradScaler` does.
    """

    scale: float
    state_layout: StateLayout
    checkpoint_interval: int
    chunk_len: int | None
    num_threads: int | None
    backend: Backend


class DecayOptions(CallOptions, total=False):
    """Options of the ops that have a decay, beside those of `CallOptions`.

    Attributes
    ----------
    decay : {"raw", "sigmoid", "log", "direct"}
        d(w), the factor of the state in a step: exp(-exp(w)), exp(-e^(-1/2) sigmoid(w)), exp(w), or w itself. "raw" by
        default, for `gla` "log".
    decay_bound : float, optional
        A hint: log d is at least about this negative number. For the decays of an RWKV-7 model in "raw" it is -0.61.
        Results are right for any decay, with a hint and without, also for data below it. The tensor-core kernels are
        slower if half a chunk shrinks a channel by more than e^-64. With a hint they choose chunks that are short
        enough, if there are any.
    """

    decay: Decay
    decay_bound: float | None


def _defaults(op: Op) -> dict[str, Any]:
    return {
        "scale": op.scale, "decay": op.decay, "decay_bound": None, "state_layout": op.state_layout,
        "checkpoint_interval": 64, "chunk_len": None, "num_threads": None, "backend": "auto",
    }  # fmt: skip


def legal_names(op: Op) -> list[str]:
    """Return the names of the options that calls of an op take."""
    return [name for name in _defaults(op) if op.decay != "none" or "decay" not in name]


def complete(op: Op, options: Mapping[str, Any], first: Any) -> DecayOptions:
    """Return all options of a call, with its first input's scale; TypeError for one that the function lacks."""
    checks.check_names(op.name, options, legal_names(op))
    whole = {**_defaults(op), **options}
    if whole["scale"] is None and op.scale is None:
        # An input without a head size is left for the checks to refuse.
        sizes = tensors.from_any(op.public_names[0], first).shape
        whole["scale"] = float(max((1, *sizes[-1:])) ** -0.5)
    return cast("DecayOptions", whole)
