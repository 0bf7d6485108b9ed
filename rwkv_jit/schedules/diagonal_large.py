"""wkv5, wkv6, gla and linear_attention on the tensor cores: heads with more rows or channels than a block holds.

The forward is that of `diagonal_chunked`. Backwards the same kernel walks with the gradient of the state, makes dv and
leaves behind what another one makes the other gradients of, for all chunks at once; on sm_90 `diagonal_groups` does.
Callers say "split" for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common, diagonal_chunked, diagonal_groups
from rwkv_jit.schedules.common import Obstacle, padded
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step, Zero, renamed

CHUNK_LENS: tuple[int, ...] = (32, 64, 16)
MOST_ROWS = diagonal_groups.MOST_ROWS
LARGEST_KEY = 256  # without warp groups
_KEY_THREADS = 128  # of the kernel that makes the gradients of all chunks at once: a warp for 16 channels
_MOST_KEY_THREADS = {16: 384, 32: 384, 64: 256}  # of a multiprocessor, by the chunk: what leaves them registers enough

takes_groups = diagonal_groups.takes


def why_not(p: Problem) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is looked at where all else is right."""
    obstacle = common.obstacle(p, diagonal_groups.LARGEST_HEAD, CHUNK_LENS)
    if obstacle is not None:
        return obstacle
    length = p.chunk_len or _legal_chunk_lens(p.K, p.gpu, None)[0]
    in_groups = takes_groups(p.gpu, length, None)
    if p.K > LARGEST_KEY and not in_groups:
        text = "takes keys above {} on sm_90 with chunk_len={} alone, got {} on {} with chunk_len={}"
        return text, LARGEST_KEY, diagonal_groups.CHUNK_LEN, p.K, p.gpu.arch, length
    if not in_groups and not _fits(p.K, length, p.gpu):
        text = "needs more shared memory at head sizes {} and {} and chunk_len={} than the {} bytes of {}"
        return text, p.K, p.V, length, p.gpu.shared_limit, p.gpu.arch
    return None


def default_chunk_len(p: Problem) -> int:
    """Return the chunk length that is fastest on an H200, or one that the bound of the decays asks for."""
    legal = _legal_chunk_lens(p.K, p.gpu, p.num_threads)
    return (common.framed_lengths(p, legal) or legal)[0]


def suits_few_heads(p: Problem) -> bool:
    """Return whether few smaller heads may be faster here: with products of warp groups, that theirs do not have."""
    return takes_groups(p.gpu, default_chunk_len(p), None)


def _legal_chunk_lens(head_size: int, gpu: Gpu, num_threads: int | None) -> list[int]:
    """Return the chunk lengths that shared memory allows, the fastest first; the shortest one where there are none.

    64 tokens where warp groups take so many threads: without these half as much is left behind, but the state spills.
    """
    of_groups = [length for length in CHUNK_LENS if takes_groups(gpu, length, num_threads)]
    others = [length for length in CHUNK_LENS if head_size <= LARGEST_KEY and _fits(head_size, length, gpu)]
    return [*of_groups, *others] or [min(CHUNK_LENS)]


def _fits(head_size: int, chunk_len: int, gpu: Gpu) -> bool:
    """Return whether there is shared memory enough whatever the value size and the threads are."""
    sizes, threads = (head_size, diagonal_groups.LARGEST_HEAD), diagonal_chunked.MOST_THREADS
    scan = diagonal_chunked.forward_shared_bytes(*sizes, chunk_len, threads)
    return max(scan, _key_shared_bytes(chunk_len)) <= gpu.shared_limit


def _key_shared_bytes(chunk_len: int) -> int:
    """Return the size of Smem in gla_key_gradients, whose blocks have half as many channels as threads."""
    slab, segments = _KEY_THREADS // 2, 4
    operands, d_pairs = 2 * 2 * chunk_len * (slab + 8), 2 * chunk_len * (chunk_len + 8)
    raw, pieces = 2 * 2 * chunk_len * slab, 2 * 2 * 2 * chunk_len * (32 + 8)
    totals, growth, diagonal = segments * 4 * slab, 4 * (chunk_len + 1) * (slab + 4), 4 * chunk_len
    return operands + d_pairs + max(raw, pieces) + totals + growth + diagonal


def _is_for_groups(p: Problem) -> bool:
    """Return whether warp groups take a call; UnsupportedConfigError if they do not, and only they take such keys."""
    if takes_groups(p.gpu, p.chunk_len, p.num_threads):
        return True
    if p.K > LARGEST_KEY:
        raise UnsupportedConfigError(
            f"num_threads must be {diagonal_groups.THREADS} at head sizes {p.K} and {p.V}, got {p.num_threads}"
        )
    return False


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: a state per head and chunk, with warp groups the chunks' operands too."""
    if takes_groups(p.gpu, p.chunk_len, p.num_threads):
        return diagonal_groups.kept(p)
    return {"checkpoints": diagonal_chunked.checkpoint_bytes(p, p.chunk_len), **common.kept_frames(p)}


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    common.check_heads(p, "split")
    return diagonal_groups.forward(p) if _is_for_groups(p) else diagonal_chunked.scan_forward(p, kept(p))


def backward(p: Problem) -> Schedule:
    """Return the backward: the walk, the gradients of all chunks, and sums of what has no tokens."""
    common.check_heads(p, "split")
    in_groups = _is_for_groups(p)
    if in_groups:
        kernels = diagonal_groups.backward_steps(p)
    else:
        bind = {"checkpoints": "e", "framed": common.framed(p)}
        kernels = diagonal_chunked.scan_step(p, "backward", bind), _key_step(p)
    # A row for every chunk there can be; those that there are not stay zero.
    slots = p.slots(p.chunk_len)
    rows = common.sequence_gradients(p, slots, "chunks")
    scratch = {"e": kept(p)["states" if in_groups else "checkpoints"], **rows, **common.sequence_gradients(p)}
    sums = common.sum_gradients(p, "chunks", slots // max(p.N, 1), p.chunk_len if p.is_packed else 0, p.T)
    steps: list[Item] = [*map(Zero, rows), *renamed(kernels, common.to_sequence_gradients(p, "chunks")), *sums]
    return Schedule(tuple(steps), common.backward_results(p), scratch=scratch, vectors=common.vectors(p))


def segment_walk(p: Problem, bind: Mapping[str, Any]) -> Step:
    """Return the forward's walk over all chunks, of sequences that are many."""
    if _is_for_groups(p):
        return diagonal_groups.scan_step(p, "forward", bind)
    return diagonal_chunked.scan_step(p, "forward", bind)


def _key_step(p: Problem) -> Step:
    """Return the launch that makes the gradients of all chunks: a block per chunk, some of the channels and head."""
    shared = _key_shared_bytes(p.chunk_len)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": p.chunk_len, "NUM_THREADS": _KEY_THREADS,
        "BLOCKS_PER_SM": p.gpu.resident_blocks(_KEY_THREADS, _MOST_KEY_THREADS[p.chunk_len], shared),
        "SHARED_BYTES": shared, "LARGEST_DECAY": common.largest_decay(p),
        **common.named(common.types(p), "T_IO", "T_W", "T_U", "DECAY", "BONUS"),
        **p.op.backward_constants,
    }  # fmt: skip
    slabs = -(-padded(p.K) * 2 // _KEY_THREADS)
    bind = {**common.given(p), "q": "r", "dq": "dr", "states": "checkpoints", "framed": common.framed(p)}
    grid = (p.slots(p.chunk_len) * slabs, p.H, 1)
    return Step("gla_key_gradients", "gla_key_gradients", parameters, grid, bind)
