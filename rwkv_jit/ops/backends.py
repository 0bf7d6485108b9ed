"""The backends, and the rule that picks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rwkv_jit import kernel
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import (
    choices,
    chunked,
    gated,
    gated_scan,
    guarded,
    prepared,
    recurrent,
    scan,
    scan_geometry,
    split,
)
from rwkv_jit.ops.choices import CHUNKS, Choice
from rwkv_jit.ops.interface import Backend, Forward, Geometry, Guardable, Inputs, Kernels, Options, Saved, Several
from rwkv_jit.template import Parameter


class Scan(Protocol):
    """What the rule, and who compiles ahead of calls, ask of kernels for larger heads."""

    def obstacle(
        self,
        op: str,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        arch: Callable[[], str],
        chunk_len: int | None = None,
    ) -> tuple[Any, ...] | None:
        """Return why they cannot do a call, as the end of a sentence and what to format it with."""

    def default_chunk_len(
        self,
        head_size: int,
        arch: str,
        decay: str = "sigmoid",
        decay_bound: float | None = None,
        num_threads: int | None = None,
    ) -> int:
        """Return the chunk length that is fastest and keeps a promise about the decays."""

    def companions(
        self, op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
        chunk_len: int | None, also: tuple[str, ...] = (), guarded: bool = False,
    ) -> list[kernel.Request]:  # fmt: skip
        """Return the other kernels of a direction, for calls that ask for no number of threads.

        Of a guarded forward one of them looks at the decays.
        """


# By op, and by the names that a call's options have once the rule has been asked; callers say "split" for the scan too.
_OF_ONE_KERNEL: dict[str, dict[str, Backend]] = {
    op: {"recurrent": recurrent, "chunked": of} for op, of in CHUNKS.items()
}
_OF_SEVERAL: dict[str, dict[str, Several]] = {
    "wkv7": {"split": split, "scan": scan},
    **dict.fromkeys(gated.OPS, {"split": split, "scan": gated_scan}),
}
KERNELS: dict[str, dict[str, Kernels]] = {op: {**_OF_ONE_KERNEL[op], **_OF_SEVERAL[op]} for op in _OF_ONE_KERNEL}
SCANS: dict[str, Scan] = {"wkv7": scan_geometry, **dict.fromkeys(gated.OPS, gated_scan)}
NAMES = ("auto", "recurrent", "chunked", "split", "reference")
# Below it, most of a chunk would be padding, and a step of the recurrent kernels ends sooner.
LEAST_TOKENS = 32


class Case(NamedTuple):
    """What the rule looks at: a call on CUDA tensors, or the calls that a kernel is compiled for."""

    op: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    tokens: int  # of a sequence, on average
    decay: str
    decay_bound: float | None
    chunk_len: int | None
    num_threads: int | None = None
    training: bool = True  # with gradients
    blocks: int = 1 << 20  # sequences times heads
    packed: bool = False
    multiprocessors: Callable[[], int] | None = None  # of the device; None where a call is traced


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward of a call saves."""
    found = KERNELS[inputs.op][options.backend].saved_for(inputs, packed, options)
    return Saved(guarded.kept_for(found, inputs).floats) if options.guarded else found


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Prepare what a forward launches: one kernel, or where the backend says so several."""
    given = (inputs, state_dtype, packed, options, training)
    if options.guarded:
        saved, fast = KERNELS[inputs.op][options.backend].saved_for(inputs, packed, options), _prepare_forward(*given)
        return guarded.prepare_forward(fast, saved, *given)
    return _prepare_forward(*given)


def _prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Guardable:
    given = (inputs, state_dtype, packed, options, training)
    several = _OF_SEVERAL[inputs.op].get(options.backend)
    if several is not None:
        return several.prepare_forward(*given)
    return prepared.prepare_forward(_OF_ONE_KERNEL[inputs.op][options.backend], *given)


def backward(
    options: Options,
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Run the backward of a call with these options, as `prepared.backward` does; `state` is the initial one."""
    if options.guarded:
        of_fast = KERNELS[inputs.op][options.backend].saved_for(inputs, cu_seqlens is not None, options)
        return guarded.backward(backward, of_fast, inputs, dy, grad_final_state, state, cu_seqlens, saved, options)
    following = (inputs, dy, grad_final_state, cu_seqlens, saved, options, state is not None)
    several = _OF_SEVERAL[inputs.op].get(options.backend)
    if several is not None:
        return several.backward(*following)
    return prepared.backward(_OF_ONE_KERNEL[inputs.op][options.backend], *following)


def choose(backend: str, case: Case, arch: Callable[[], str]) -> tuple[str, int | None]:
    """Return the backend of a call on CUDA tensors, and its chunk_len.

    "auto" takes the first of these rows that holds; any other `backend` is taken at its word.

    ========= ==========================================================================================
    split     what chunked takes, eagerly and without cu_seqlens, where sequences times heads are at most half
              the multiprocessors and the tokens make 4 equal segments or more, of at least 512 in wkv7 and of
              at least 256 in the other ops
    chunked   float16 or bfloat16 from sm_80 on, both head sizes up to 128 and the keys no longer than twice
              the values, in chunks whose shared memory this architecture has; LEAST_TOKENS per sequence on
              average; chunk_len not given, or one of its own
    scan      the same as chunked for a head size or value size above 128 and up to 1024, with chunk lengths of
              its own; in other ops than wkv7 smaller heads that chunked does not take, and keys above 256 on
              sm_90 alone (`wide_keys` calls with parts of these); "split" asks for it too
    recurrent everything else
    ========= ==========================================================================================

    All but the recurrent kernels need decays whose size times chunk_len / 2 is at most 64: none, decay="sigmoid", or
    a `decay_bound` of -2, -4 or -8 at 64, 32 or 16. Any others are `guarded`.

    Raises
    ------
    UnsupportedConfigError
        "chunked" was asked for and cannot do it: what is in the way, what is expected and what came.
    """
    if backend == "recurrent" or (backend == "auto" and case.tokens < LEAST_TOKENS):
        return "recurrent", case.chunk_len
    sizes = case.op, case.dtype, case.head_size, case.value_size
    reason = CHUNKS[case.op].obstacle(*sizes, arch, case.chunk_len, case.training)
    if reason is None:
        length = case.chunk_len or _chunk_len(case, arch())
        if backend == "chunked":
            return "chunked", length
        multiprocessors = case.multiprocessors and case.multiprocessors()
        least = split.LEAST_SEGMENTS if backend == "split" else 1
        cannot = split.obstacle(case.op, case.blocks, case.tokens, case.packed, multiprocessors, least)
        if cannot is None:
            return "split", length
        if backend == "split":
            raise UnsupportedConfigError(f"backend: 'split' {cannot}; use 'auto' or 'chunked'")
        return "chunked", length
    is_large = max(case.head_size, case.value_size) > chunked.LARGEST_HEAD
    if backend != "chunked" and (is_large or case.op in gated.OPS):
        reason = SCANS[case.op].obstacle(*sizes, arch, case.chunk_len)
        if reason is None:
            asked = case.decay, case.decay_bound, case.num_threads
            return "scan", case.chunk_len or SCANS[case.op].default_chunk_len(case.head_size, arch(), *asked)
    if backend == "auto":
        return "recurrent", case.chunk_len
    text, *values = reason
    raise UnsupportedConfigError(f"backend: {backend!r} {text.format(*values)}; use 'auto' or 'recurrent'")


def holds_heads(case: Case, arch: Callable[[], str]) -> bool:
    """Return whether there are kernels for a call that hold a head in a block."""
    sizes = case.op, case.dtype, case.head_size, case.value_size
    return CHUNKS[case.op].obstacle(*sizes, arch, case.chunk_len, case.training) is None


def _chunk_len(case: Case, arch: str) -> int:
    """Return the rule's chunk, or a shorter one where that keeps a promise about the decays."""
    of = CHUNKS[case.op]
    length = of.default_chunk_len(case.head_size, case.value_size, arch, case.training)
    kept = [n for n in (length, *of.CHUNK_LENS) if chunked.is_bounded(case.decay, case.decay_bound, n)]
    return (kept or [length])[0]


def is_guarded(backend: str, chunk_len: int | None, decay: str, decay_bound: float | None) -> bool:
    """Return whether a call's decays may leave the range of its kernels."""
    if backend in ("recurrent", "reference") or chunk_len is None:
        return False
    # A compiler may trace the bound as a symbol; a branch makes a plain answer of it, which the torch op needs.
    if chunked.is_bounded(decay, decay_bound, chunk_len):  # noqa: SIM103
        return False
    return True


def geometry(
    backend: str,
    chunk_len: int | None,
    case: Case,
    arch: Callable[[], str],
    known: Callable[[], Sequence[Choice]],
) -> Geometry:
    """Return the geometry of a call whose backend and chunk_len `choose` has found, with `known` choices on its GPU.

    A choice was measured as a whole, so a call that names a part of the geometry takes none. It never decides about
    the backend: where its chunks are too long for the decay of a call, the rule's are taken.
    """
    if backend in ("chunked", "split") and case.chunk_len is None and case.num_threads is None:
        assert chunk_len is not None  # `choose` has found it
        found = choices.find(known(), case.op, case.head_size, case.value_size, case.training)
        if found is not None:
            reason = CHUNKS[case.op].obstacle(
                case.op, case.dtype, case.head_size, case.value_size, arch, found.chunk_len, case.training
            )
            bounded = [n for n in (chunk_len, found.chunk_len) if chunked.is_bounded(case.decay, case.decay_bound, n)]
            if reason is None and (found.chunk_len in bounded or not bounded):
                return found.geometry
    return Geometry(chunk_len, case.num_threads)
