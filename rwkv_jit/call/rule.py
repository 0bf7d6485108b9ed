"""The rule: which algorithm a call takes, and how its blocks are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rwkv_jit.call import tuned
from rwkv_jit.call.tuned import Choice, Geometry
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import common, segments
from rwkv_jit.schedules.common import LARGEST_HEAD, Case, Obstacle
from rwkv_jit.schedules.directions import ALGORITHMS
from rwkv_jit.schedules.through import DEDICATED

# Below it a step of the recurrent kernels ends sooner, and none of its products is rounded.
LEAST_TOKENS = 4
# Up to it a sequence is one of the shortest chunks.
SHORT_TOKENS = 16


class _FewHeads(NamedTuple):
    """Where few heads are faster in the kernels for large ones; sizes that depend on the GPU are for an SM."""

    least: int  # tokens
    most: int
    blocks: float  # sequences times heads, of which there are fewer
    work: float  # tokens of all of them


# By family, of heads of up to 64 channels and of larger ones. Measured on an H100 without gradients: a walk over chunks
# that are prepared at once takes half the time of one that prepares them on its way, until the GPU is full.
_FEW_HEADS = {
    "delta": (_FewHeads(192, 2560, 3 / 8, 384), _FewHeads(128, 12288, 1 / 2, math.inf)),
    "diagonal": (_FewHeads(192, 1280, 1 / 2, 384), _FewHeads(192, 3072, 1 / 2, 768)),
}


class Known(NamedTuple):
    """What was measured on a call's GPU: the choices, and whether one of them, by its place, can be used."""

    choices: Sequence[Choice]
    is_sound: Callable[[int], bool]


def known(device: int) -> Known:
    """Return what was measured on the GPU at hand."""
    return Known(tuned.on_device(device), lambda place: tuned.is_sound(device, place))


class Chosen(NamedTuple):
    """What the rule says of a call: fields of its problem."""

    backend: str
    chunk_len: int | None
    num_threads: int | None
    forward_blocks: int | None
    backward_blocks: int | None


def chosen(backend: str, case: Case, gpu: Callable[[], Gpu], known: Callable[[], Known]) -> Chosen:
    """Return the algorithm of a call on CUDA tensors, and its geometry; UnsupportedConfigError as of `choose`."""
    if case.op.through is not None:
        if backend == "auto" and takes_dedicated(case, gpu):
            length = case.chunk_len or ALGORITHMS[case.op.family][DEDICATED].default_chunk_len(case, gpu())
            return Chosen(DEDICATED, length, None, None, None)
        case = case.below()
    algorithm, chunk_len = choose(backend, case, gpu)
    cut = geometry(algorithm, chunk_len, case, gpu, known)
    return Chosen(algorithm, *cut)


def takes_dedicated(case: Case, gpu: Callable[[], Gpu]) -> bool:
    """Return whether the op's dedicated kernels take a call without a backend: they have no segments."""
    kernels = ALGORITHMS.get(case.op.family, {}).get(DEDICATED)
    if kernels is None or case.num_threads is not None or case.is_narrow:
        return False
    if case.tokens < LEAST_TOKENS or case.heads > common.MOST_HEADS:
        return False
    if case.blocks < kernels.LEAST_BLOCKS * (gpu().multiprocessors or 0):
        return False
    return bool(kernels.why_not(case, gpu) is None)


def choose(backend: str, case: Case, gpu: Callable[[], Gpu]) -> tuple[str, int | None]:
    """Return the algorithm of a call on CUDA tensors, and its chunk_len.

    "auto" takes the first of these rows that holds. Any other `backend` is taken at its word, where "split" names both
    segments and large heads.

    ========= ==========================================================================================
    large     what chunked takes, without gradients and on sm_90, where few heads have not too many tokens
              (`_FEW_HEADS`)
    segments  what chunked takes, where sequences times heads are at most half the multiprocessors and the tokens
              make 4 segments or more, of at least 512 in wkv7 and of at least 256 in the other ops; packed
              sequences outside of graphs, of 256 tokens or more on average, where the longest one makes two
              segments or more, and has three times the tokens that each block would have if all had as many
    chunked   float16 or bfloat16 from sm_80 on, both head sizes up to 128 and the keys no longer than twice
              the values, in chunks whose shared memory this architecture has; LEAST_TOKENS per sequence on
              average; no chunk_len, or one of these
    large     the same as chunked for a head size or value size above 128 and up to 1024, with other chunk lengths,
              and for smaller heads that chunked does not take; in other ops than wkv7 keys above 256 on
              sm_90 alone (`wide_keys` calls with parts of these)
              Few of them go in segments too, of wkv7 up to 256 (`segments.takes_large`)
    recurrent everything else
    ========= ==========================================================================================

    All of them take any decay. The chunks of the tensor cores are fastest where half a chunk decays by e^-64 at most:
    with no decay, with decay="sigmoid", or above a `decay_bound` of -2, -4 or -8 at 64, 32 or 16. In float16 that is
    e^-7: with no decay, with decay="sigmoid" at 16, or above -0.21, -0.43 or -0.87.

    Raises
    ------
    UnsupportedConfigError
        The `backend` cannot do it: why, what is expected and what came.
    """
    algorithms = ALGORITHMS[case.op.family]
    if backend == "recurrent" or (backend == "auto" and (case.tokens < LEAST_TOKENS or "chunked" not in algorithms)):
        return "recurrent", case.chunk_len
    if "chunked" not in algorithms:
        raise UnsupportedConfigError(f"backend: {case.op.name} has none but 'auto' and 'recurrent', got {backend!r}")
    chunked = algorithms["chunked"]
    obstacle: Obstacle | None = chunked.why_not(case, gpu)
    if obstacle is None:
        length = case.chunk_len or _chunk_len(case, gpu())
        if backend == "chunked":
            return "chunked", length
        if backend == "auto" and _takes_large(case, gpu):
            return "large", algorithms["large"].default_chunk_len(case, gpu())
        cannot = segments.why_not(case, segments.LEAST_SEGMENTS if backend == "split" else 1)
        if cannot is None:
            return "segments", length
        if backend == "split":
            raise UnsupportedConfigError(f"backend: 'split' {_sentence(cannot)}; use 'auto' or 'chunked'")
        return "chunked", length
    if backend != "chunked":
        of_large = algorithms["large"].why_not(case, gpu)
        if of_large is None:
            length = case.chunk_len or algorithms["large"].default_chunk_len(case, gpu())
            return "large_segments" if segments.takes_large(case) else "large", length
        if max(case.head_size, case.value_size) > LARGEST_HEAD or case.op.family == "diagonal":
            obstacle = of_large
    if backend == "auto":
        return "recurrent", case.chunk_len
    raise UnsupportedConfigError(f"backend: {backend!r} {_sentence(obstacle)}; use 'auto' or 'recurrent'")


def _takes_large(case: Case, gpu: Callable[[], Gpu]) -> bool:
    """Return whether heads blocks can hold are faster in kernels for large ones; not with gradients: they keep more."""
    multiprocessors = case.multiprocessors and case.multiprocessors()
    if case.training or multiprocessors is None or not (case.chunk_len is None and case.num_threads is None):
        return False
    few = _FEW_HEADS[case.op.family][max(case.head_size, case.value_size) > 64]
    longest = case.longest if case.is_packed else case.tokens
    if not few.least <= longest <= few.most or case.blocks >= few.blocks * multiprocessors:
        return False
    if case.blocks * case.tokens > few.work * multiprocessors:
        return False
    large = ALGORITHMS[case.op.family]["large"]
    return large.why_not(case, gpu) is None and large.suits_few_heads(case, gpu())


def _sentence(obstacle: Obstacle | None) -> str:
    assert obstacle is not None
    text, *values = obstacle
    return str(text).format(*values)


def is_held_by_blocks(case: Case, gpu: Callable[[], Gpu]) -> bool:
    """Return whether there are kernels for a call that hold a head in a block."""
    chunked = ALGORITHMS[case.op.family].get("chunked")
    return chunked is not None and chunked.why_not(case, gpu) is None


def _chunk_len(case: Case, gpu: Gpu) -> int:
    """Return the rule's chunk, or a shorter one where the bound of the decays asks for it."""
    chunked = ALGORITHMS[case.op.family]["chunked"]
    if case.tokens <= SHORT_TOKENS:
        return SHORT_TOKENS
    length: int = chunked.default_chunk_len(case, gpu)
    return next(iter(common.framed_lengths(case, (length, *chunked.CHUNK_LENS))), length)


def geometry(
    backend: str, chunk_len: int | None, case: Case, gpu: Callable[[], Gpu], known: Callable[[], Known]
) -> Geometry:
    """Return the geometry of a call whose algorithm and chunk_len `choose` has named.

    A measured choice is whole and of long sequences: a call that names a part of it, or is short, takes none. Where its
    chunks are too long for the decay of a call, the rule's are taken.
    """
    is_open = case.chunk_len is None and case.num_threads is None and case.tokens > SHORT_TOKENS
    if is_open and backend in ("chunked", "segments"):
        assert chunk_len is not None  # `choose` has named it
        measured = known()
        for place in tuned.find(measured.choices, case.op.name, case.head_size, case.value_size, case.training):
            choice = measured.choices[place]
            framed = common.framed_lengths(case, (chunk_len, choice.chunk_len))
            if choice.chunk_len not in framed and framed:
                continue
            obstacle = ALGORITHMS[case.op.family]["chunked"].why_not(case._replace(chunk_len=choice.chunk_len), gpu)
            if obstacle is None and measured.is_sound(place):
                return choice.geometry
    return Geometry(chunk_len, case.num_threads)
