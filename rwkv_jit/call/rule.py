"""The rule: which algorithm a call takes, and how its blocks are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rwkv_jit.call import tuned
from rwkv_jit.call.tuned import Choice, Geometry
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import common, directions, segments
from rwkv_jit.schedules.common import LARGEST_HEAD, Obstacle
from rwkv_jit.schedules.directions import ALGORITHMS
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.through import DEDICATED, UPDATE
from rwkv_jit.schedules.update import FEW_TOKENS, LARGEST_KEY

# Below it a step of the recurrent kernels ends sooner, and none of its products is rounded.
LEAST_TOKENS = 4
# Up to it a sequence is one of the shortest chunks.
SHORT_TOKENS = 16
_MANY = 1 << 20  # sequences or tokens, more than the rule asks for


# Where few heads are faster in the kernels for large ones: the least and the most tokens, and for an SM sequences times
# heads, of which there are fewer, and tokens of all of them. By family, of heads of up to 64 channels and of larger
# ones. Measured on an H100 without gradients: a walk over chunks that are prepared at once takes half the time of one
# that prepares them on its way, until the GPU is full.
_FEW_HEADS = {
    "delta": ((192, 2560, 3 / 8, 384), (128, 12288, 1 / 2, math.inf)),
    "diagonal": ((192, 1280, 1 / 2, 384), (192, 3072, 1 / 2, 768)),
}


class Known(NamedTuple):
    """What was measured on a call's GPU: the choices, and whether one of them, by its place, can be used."""

    choices: Sequence[Choice]
    is_sound: Callable[[int], bool]


def known(device: int) -> Known:
    """Return what was measured on the GPU at hand."""
    return Known(tuned.on_device(device), lambda place: tuned.is_sound(device, place))


def resolved(p: Problem, known: Callable[[], Known], sees_load: bool = True) -> Problem:
    """Return the problem of a call with its algorithm and geometry; UnsupportedConfigError as of `choose`.

    A few tokens without gradients are for the kernels of updates. Other calls of ops with dedicated kernels take these
    where they can, and `choose` has the rest.

    Where nobody `sees_load`, how many heads and tokens there are for a multiprocessor, heads are many.
    """
    if p.is_chosen:
        return p
    if not p.op.has_heads:  # its schedules choose, by the GPU
        return p._replace(is_chosen=True)
    if p.types["v"] == "fp16":  # as autocast can make them of others
        p = p._replace(is_narrow=False)
    if takes_update(p):
        return p._replace(backend=UPDATE, is_chosen=True)
    if takes_dedicated(p, sees_load):
        length = p.chunk_len or ALGORITHMS[p.op.family][DEDICATED].default_chunk_len(p)
        return p._replace(backend=DEDICATED, is_chosen=True, chunk_len=length)
    looked_at = seen(p, sees_load)
    algorithm, length = choose(looked_at)
    cut = geometry(algorithm, length, looked_at, known)
    return p._replace(backend=algorithm, is_chosen=True, **cut._asdict())


def seen(p: Problem, sees_load: bool = True) -> Problem:
    """Return the problem that `choose` looks at: of the op below if there is one, and of any batch if it must be."""
    p = _of_any_batch(p) if p.is_batch_invariant else p
    p = p if sees_load else p._replace(gpu=p.gpu._replace(multiprocessors=None))
    return directions.running(p)


def _of_any_batch(p: Problem) -> Problem:
    """Return the problem of a call with many long sequences."""
    return p._replace(T=_MANY, N=_MANY if p.N and p.tokens else 0, is_packed=False)


def takes_update(p: Problem) -> bool:
    """Return whether the kernels of updates take a call without a backend: a few tokens, and no gradients.

    A bound of decays does not matter to them; a chunk or a number of threads is one of other kernels.
    """
    if p.backend != "auto" or p.chunk_len or p.num_threads is not None or p.is_batch_invariant:
        return False
    if p.training or p.is_packed or p.is_pooled or UPDATE not in ALGORITHMS.get(p.op.family, {}):
        return False
    return bool(0 < p.T <= FEW_TOKENS and p.B * p.H > 0 and p.K <= LARGEST_KEY)


def takes_dedicated(p: Problem, sees_load: bool = True) -> bool:
    """Return whether the op's dedicated kernels take a call without a backend.

    They have no segments for few heads. Over a pool these take them where nobody has seen the load.
    """
    kernels = ALGORITHMS.get(p.op.family, {}).get(DEDICATED)
    if kernels is None or p.backend != "auto" or p.num_threads is not None or p.is_narrow:
        return False
    p = _of_any_batch(p) if p.is_batch_invariant else p
    if p.tokens < LEAST_TOKENS or p.H > common.MOST_HEADS:
        return False
    if (sees_load or not p.is_pooled) and p.all_heads < kernels.LEAST_BLOCKS * (p.gpu.multiprocessors or 0):
        return False
    return bool(kernels.why_not(p) is None)


def choose(p: Problem) -> tuple[str, int]:
    """Return the algorithm of a call on CUDA tensors, and its chunk_len, or 0; the problem is one that was `seen`.

    "auto" takes the first of these rows that holds. Any other backend is taken at its word, where "split" names both
    segments and large heads. Where nobody has seen the load, chunked stands for segments too.

    ========= ==========================================================================================
    large     what chunked takes, without gradients and on sm_90, where few heads have not too many tokens
              (`_FEW_HEADS`)
    segments  what chunked takes, where sequences times heads are at most half the multiprocessors and the tokens
              make 4 segments or more, of at least 512 in wkv7 and of at least 256 in the other ops; packed
              sequences of 256 tokens or more on average, where the longest one makes two segments or more, and
              has three times the tokens that each block would have if all had as many
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
    algorithms, backend = ALGORITHMS[p.op.family], p.backend
    if backend == "recurrent" or (backend == "auto" and (p.tokens < LEAST_TOKENS or "chunked" not in algorithms)):
        return "recurrent", p.chunk_len
    if "chunked" not in algorithms:
        raise UnsupportedConfigError(f"backend: {p.op.name} has none but 'auto' and 'recurrent', got {backend!r}")
    chunked = algorithms["chunked"]
    obstacle: Obstacle | None = chunked.why_not(p)
    if obstacle is None:
        length = p.chunk_len or _chunk_len(p)
        if backend == "chunked":
            return "chunked", length
        if backend == "auto" and _takes_large(p):
            return "large", algorithms["large"].default_chunk_len(p)
        cannot = segments.why_not(p, segments.LEAST_SEGMENTS if backend == "split" else 1)
        if cannot is None:
            return "segments", length
        if backend == "split" and p.gpu.multiprocessors is not None:
            raise UnsupportedConfigError(f"backend: 'split' {_sentence(cannot)}; use 'auto' or 'chunked'")
        return "chunked", length
    if backend != "chunked":
        of_large = algorithms["large"].why_not(p)
        if of_large is None:
            length = p.chunk_len or algorithms["large"].default_chunk_len(p)
            return "large_segments" if segments.takes_large(p) else "large", length
        if max(p.K, p.V) > LARGEST_HEAD or p.op.family == "diagonal":
            obstacle = of_large
    if backend == "auto":
        return "recurrent", p.chunk_len
    raise UnsupportedConfigError(f"backend: {backend!r} {_sentence(obstacle)}; use 'auto' or 'recurrent'")


def _takes_large(p: Problem) -> bool:
    """Return whether heads blocks can hold are faster in kernels for large ones; not with gradients: they keep more."""
    multiprocessors = p.multiprocessors
    if p.training or multiprocessors is None or p.chunk_len or p.num_threads is not None:
        return False
    least, most, blocks, work = _FEW_HEADS[p.op.family][max(p.K, p.V) > 64]
    longest = p.longest if p.is_packed else p.tokens
    if not least <= longest <= most or p.all_heads >= blocks * multiprocessors:
        return False
    if p.all_heads * p.tokens > work * multiprocessors:
        return False
    large = ALGORITHMS[p.op.family]["large"]
    return large.why_not(p) is None and large.suits_few_heads(p)


def _sentence(obstacle: Obstacle | None) -> str:
    assert obstacle is not None
    text, *values = obstacle
    return str(text).format(*values)


def _chunk_len(p: Problem) -> int:
    """Return the rule's chunk, or a shorter one where the bound of the decays asks for it."""
    chunked = ALGORITHMS[p.op.family]["chunked"]
    if p.tokens <= SHORT_TOKENS:
        return SHORT_TOKENS
    length: int = chunked.default_chunk_len(p)
    return next(iter(common.framed_lengths(p, (length, *chunked.CHUNK_LENS))), length)


def geometry(backend: str, chunk_len: int, p: Problem, known: Callable[[], Known]) -> Geometry:
    """Return the geometry of a call whose algorithm and chunk_len `choose` has named.

    A measured choice is whole and of long sequences: a call that names a part of it, or is short, takes none. Where its
    chunks are too long for the decay of a call, the rule's are taken.
    """
    is_open = not p.chunk_len and p.num_threads is None and p.tokens > SHORT_TOKENS
    if is_open and backend in ("chunked", "segments"):
        measured = known()
        for place in tuned.find(measured.choices, p.op.name, p.K, p.V, p.training):
            choice = measured.choices[place]
            framed = common.framed_lengths(p, (chunk_len, choice.chunk_len))
            if choice.chunk_len not in framed and framed:
                continue
            obstacle = ALGORITHMS[p.op.family]["chunked"].why_not(p._replace(chunk_len=choice.chunk_len))
            if obstacle is None and measured.is_sound(place):
                return choice.geometry
    return Geometry(chunk_len, p.num_threads)
