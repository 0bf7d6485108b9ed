"""wkv7 for heads above 128: up to 1024 channels, taken apart into kernels for the chunks and a scan over them.

What a chunk does to a state does not depend on it, so one kernel prepares it for all chunks at once. A second one walks
over the chunks with the state, or backwards with its gradient, a block for some value rows. Two more make the keys'
gradients for all chunks at once, from what the walks leave behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common as parts
from rwkv_jit.schedules.common import Obstacle
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule, Step, Zero, aligned

CHUNK_LENS = (64, 32)
LARGEST_HEAD = 1024
_SLAB = 64  # channels that are moved and prepared at once
_ROWS = (64, 32)  # value rows that a block of the scan may hold
MOST_ROWS = max(_ROWS)
_STAGES = (3, 2)
_GROUP_CHUNK_LEN, _GROUP_THREADS = 64, 384  # of the scan with products of warp groups
_GROUP_STATE = 512 * 64  # channels times value rows that its registers hold
_MOST_THREADS = 256  # of a multiprocessor, with 255 registers each; twice as many have 128
_PARTS, _LEAST_CHUNKS = 4, 128  # of a scan beside which other kernels run
_MATRICES = 4  # token matrices of a chunk that pass from kernel to kernel


def why_not(p: Problem) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is looked at where all else is right."""
    obstacle = parts.obstacle(p, LARGEST_HEAD, CHUNK_LENS, behind=f" at head sizes above {parts.LARGEST_HEAD}")
    if obstacle is not None:
        return obstacle
    length = p.chunk_len or CHUNK_LENS[-1]
    if not _fits(p.K, length, p.gpu):
        text = "needs more shared memory at head sizes {} and {} and chunk_len={} than the {} bytes of {}"
        return text, p.K, p.V, length, p.gpu.shared_limit, p.gpu.arch
    return None


# ---- geometry ----------------------------------------------------------------------------------------------------


def default_chunk_len(p: Problem) -> int:
    """Return the longest chunk that shared memory allows, whatever the threads.

    A shorter one where the decays' bound asks for it, and the shortest for sequences that it holds; in float16 also
    where nothing is known of the decays, as usual ones leave the frames of longer chunks.
    """
    fitting = [length for length in CHUNK_LENS if _fits(p.K, length, p.gpu)]
    if p.tokens <= min(CHUNK_LENS):
        return min(CHUNK_LENS)
    unknown = fitting[::-1] if p.storage == "fp16" else fitting
    return (parts.framed_lengths(p, fitting) or unknown or CHUNK_LENS[-1:])[0]


def suits_few_heads(p: Problem) -> bool:
    """Return whether few smaller heads may be faster here: where that was measured, with chunks of either length."""
    return p.gpu.has_warp_groups


def _fits(head_size: int, chunk_len: int, gpu: Gpu) -> bool:
    sizes = _prepare_shared_bytes(chunk_len), _keys_shared_bytes(chunk_len), _halves_shared_bytes(chunk_len)
    if max(sizes) > gpu.shared_limit:
        return False
    return _has_groups(chunk_len, gpu) or bool(_cuts(head_size, chunk_len, gpu))


def _channels(head_size: int) -> int:
    """Return a head's channels as the kernels see them, in slabs that the warps of a row can share evenly."""
    slabs = _SLAB * (1 if head_size <= 4 * _SLAB else 2 if head_size <= 8 * _SLAB else 4)
    return -(-head_size // slabs) * slabs


def _values(value_size: int) -> int:
    """Return the value rows of a state that is left behind."""
    return -(-value_size // max(_ROWS)) * max(_ROWS)


def _triangle_bytes(chunk_len: int) -> int:
    """Return the bytes of a lower triangle of 16 x 16 blocks."""
    blocks = chunk_len // 16
    return 512 * (blocks * (blocks + 1) // 2)


def _prepare_shared_bytes(chunk_len: int) -> int:
    tiles, lower, totals = 8 * chunk_len * _SLAB * 2, chunk_len // 16 * 4 * 16 * 20, 4 * chunk_len * 8
    return tiles + 6 * _triangle_bytes(chunk_len) + lower + totals


def _keys_shared_bytes(chunk_len: int) -> int:
    operands = raw = 4 * 2 * chunk_len * _SLAB
    stage = max(2 * 2 * chunk_len * _SLAB + 2 * 2 * 32 * _SLAB, 4 * _triangle_bytes(chunk_len))
    sums, shares = 4 * 4 * chunk_len * (_SLAB + 8), 4 * chunk_len * 8 + (chunk_len // 8 + chunk_len // 32) * 4 * _SLAB
    return operands + max(stage + raw, 3 * stage, sums) + shares


def _halves_shared_bytes(chunk_len: int) -> int:
    piece = 2 * 2 * _SLAB * _SLAB + 4 * 2 * chunk_len * _SLAB
    blocks = chunk_len // 16
    rows = 2 * 4 * 2 * chunk_len * (_SLAB + 8) + 4 * chunk_len * (_SLAB + 4)
    rows += 4 * blocks**2 * _SLAB + max(blocks // 2, 1) * blocks * 4 * 32 * 32
    return max(piece, rows) + 4 * _triangle_bytes(chunk_len)


# ---- geometry of the scan ----------------------------------------------------------------------------------------


class _GroupCut(NamedTuple):
    value_rows: int
    cluster: int  # blocks that fetch operands for each other
    stages: int


def _has_groups(chunk_len: int, gpu: Gpu) -> bool:
    """Return whether warps can multiply in groups of four: where there are such products, and chunks that they fit."""
    return gpu.has_warp_groups and chunk_len == _GROUP_CHUNK_LEN


def _group_cut(head_size: int, value_size: int, gpu: Gpu, has_few_rows: bool) -> _GroupCut:
    """Return such a block of both directions: two of a cluster halve the reads, more wait for each other too long."""
    largest = next(rows for rows in _ROWS if _channels(head_size) * rows <= _GROUP_STATE)
    rows = _ROWS[-1] if has_few_rows else largest
    cluster = 2 if rows == _ROWS[0] and -(-value_size // rows) % 2 == 0 else 1
    fixed = _group_shared_bytes(head_size, rows, 0)
    stage = _group_shared_bytes(head_size, rows, 1) - fixed
    fitting = (gpu.shared_limit - fixed) // stage
    return _GroupCut(rows, cluster, min(fitting, 2 * _channels(head_size) // _SLAB + 1))


def _group_shared_bytes(head_size: int, value_rows: int, stages: int) -> int:
    tile = 2 * _GROUP_CHUNK_LEN * _SLAB
    image, outputs = 2 * _channels(head_size) * value_rows, 8 * 16 * 2 * (value_rows + 8)
    return image + 3 * tile + outputs + stages * (2 * tile + 16)


class _Cut(NamedTuple):
    key_warps: int  # that share the channels of the same rows
    num_threads: int
    stages: int

    @property
    def value_rows(self) -> int:
        return 16 * (self.num_threads // 32 // self.key_warps)


def _cuts(head_size: int, chunk_len: int, gpu: Gpu, few_heads: bool = False) -> list[_Cut]:
    """Return the blocks of the scan, the fastest on an H200 first: many rows read less often, few make more blocks."""
    slabs = _channels(head_size) // _SLAB
    # Warps that share the channels of the same rows: up to 256 channels each.
    legal = [warps for warps in (1, 2, 4) if slabs % warps == 0 and slabs // warps <= 4]
    warps = max([each for each in legal if each <= (4 if few_heads else 2)] or legal)
    several = [
        _Cut(warps, 2 * rows * warps, stages) for rows in (_ROWS[-1:] if few_heads else _ROWS) for stages in _STAGES
    ]
    return [
        cut for cut in several
        if cut.num_threads <= _MOST_THREADS and _scan_shared_bytes(head_size, chunk_len, True, cut) <= gpu.shared_limit
    ]  # fmt: skip


def _scan_shared_bytes(head_size: int, chunk_len: int, is_backward: bool, cut: _Cut) -> int:
    key_warps, row_warps = cut.key_warps, cut.value_rows // 16
    ring = cut.stages * key_warps * 2 * 2 * chunk_len * _SLAB
    rows = 3 * 2 * chunk_len * (cut.value_rows + 8)
    matrices = 2 * (3 if is_backward else 2) * _triangle_bytes(chunk_len)
    share = max(chunk_len // key_warps, 16) // 8 if key_warps > 1 else 1
    sums = row_warps * key_warps * max(key_warps - 1, 1) * 2 * share * 512
    solution = row_warps * (chunk_len // 16 if key_warps > 1 else 1) * 512
    return ring + matrices + rows + 4 * _channels(head_size) + sums + solution


def _cut(p: Problem, few_heads: bool) -> _Cut:
    """Return how a block of the scan is cut, by `num_threads` if it is set; UnsupportedConfigError if no block fits."""
    cuts = _cuts(p.K, p.chunk_len, p.gpu)
    if few_heads and p.num_threads is None:
        cuts = _cuts(p.K, p.chunk_len, p.gpu, True) or cuts
    fitting = [cut for cut in cuts if p.num_threads in (None, cut.num_threads)]
    if not fitting:
        legal = {cut.num_threads for cut in cuts}
        if _has_groups(p.chunk_len, p.gpu):
            legal.add(_GROUP_THREADS)
        raise UnsupportedConfigError(
            f"num_threads must be {' or '.join(map(str, sorted(legal)))} at head size {p.K} and "
            f"chunk_len={p.chunk_len} on {p.gpu.arch}, got {p.num_threads}"
        )
    return fitting[0]


# ---- parts of a walk ---------------------------------------------------------------------------------------------


class _Walk(NamedTuple):
    """How the scan of a call goes over its chunks."""

    few_heads: bool  # blocks of few rows, so that there are more of them
    parts: int  # launches, beside which the other kernels run


def _walk(p: Problem, direction: str) -> _Walk:
    """Return how to go over the chunks of all sequences; how many a packed one has is not known.

    A scan that leaves half of the GPU free goes on in parts, while other kernels take the other half: results are the
    same. Forwards that is worth it only where its blocks have few rows anyway.
    """
    heads, multiprocessors = p.N * p.H, p.multiprocessors
    if multiprocessors is None:
        return _Walk(False, 1)
    few_heads = heads * (_values(p.V) // max(_ROWS)) < multiprocessors
    in_groups = _has_groups(p.chunk_len, p.gpu) and p.num_threads is None
    if few_heads and in_groups and not p.is_packed and _chunks(p) >= _LEAST_CHUNKS:
        for has_few_rows in (True, False) if direction == "backward" else (True,):
            rows = _group_cut(p.K, p.V, p.gpu, has_few_rows).value_rows
            if 2 * heads * -(-p.V // rows) <= multiprocessors:
                return _Walk(has_few_rows, _PARTS)
    return _Walk(few_heads, 1)


def _chunks(p: Problem) -> int:
    """Return the chunks of a sequence that is not packed."""
    return int(-(-p.T // p.chunk_len))


class _Part(NamedTuple):
    """Some chunks of every sequence, as one launch of each kernel takes them."""

    begin: int  # where the scan begins and ends, in the order in which it meets chunks
    end: int
    first: int  # of them in a sequence
    chunks: int  # of each of so many sequences; where one launch takes all there are, they count as one
    sequences: int = 1


def _parts(p: Problem, direction: str, count: int) -> list[_Part]:
    """Return the parts of a walk: equal, or backwards doubling, as what follows one takes longer than the next."""
    if count == 1:
        places = p.slots(p.chunk_len)
        return [_Part(0, places, 0, places)]
    chunks, is_backward = _chunks(p), direction == "backward"
    shares = [2**i - 1 if is_backward else i for i in range(count + 1)]
    ends = [chunks * share // shares[-1] for share in shares]
    return [
        _Part(begin, end, chunks - end if is_backward else begin, end - begin, p.N) for begin, end in pairwise(ends)
    ]


# ---- schedules ---------------------------------------------------------------------------------------------------


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: what it has prepared, and a state S' per head and chunk, and U [B, T, H, V]."""
    channels, places = _channels(p.K), p.slots(p.chunk_len) * p.H
    return {
        "operands": 8 * places * p.chunk_len * channels,
        "matrices": places * _MATRICES * _triangle_bytes(p.chunk_len),
        "frames": 8 * places * channels,
        "states": 2 * places * channels * _values(p.V),
        "solutions": aligned(2 * p.B * p.T * p.H * p.V),
        **({"halved": 4 * places * channels // _SLAB} if p.has_halves else {}),
    }


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    parts.check_heads(p, "split")
    walk = _walk(p, "forward")
    given = {**parts.given(p), "halved": parts.halved(p)}
    scan = _scan(p, "forward", walk, {
        **given, "input": "v", "output": "y", "first": "initial_state", "last": given.get("final_state", "final_state"),
        "solved": "solutions" if p.training else None, "states": "states" if p.training else None,
    })  # fmt: skip
    # The products of warp groups take operands in the order of lanes.
    own = {
        **_key_types(p), "T_W0": p.w0_type, "BY_LANES": scan.template == "wkv7_group_scan",
        "LARGEST_DECAY": parts.largest_decay(p),
    }  # fmt: skip
    prepares = [
        _chunk_step(
            p, "prepare", _prepare_shared_bytes(p.chunk_len), {**own, "BY_HALVES": by_halves},
            {**given, "saves": int(p.training)}, _MOST_THREADS if by_halves else 2 * _MOST_THREADS,
        )._replace(is_resident=by_halves)
        for by_halves in parts.ways(p)
    ]  # fmt: skip
    steps: list[Step | Zero] = []
    is_beside = walk.parts > 1
    for part in _parts(p, "forward", walk.parts):
        steps += [_of_part(prepare, part) for prepare in prepares]
        steps.append(_scan_of_part(scan, part, is_beside, is_beside))
    pieces = kept(p)
    scratch = _carried(scan, walk)
    if not p.training:
        scratch |= {name: pieces[name] for name in ("operands", "matrices", "frames", "halved") if name in pieces}
    return Schedule(
        tuple(steps), parts.forward_results(p), pieces if p.training else {}, scratch, parts.vectors(p),
        main=len(prepares),
    )  # fmt: skip


def backward(p: Problem) -> Schedule:
    """Return the backward: E' and dX take as much memory as S' and U, and the token matrices' gradients as these."""
    parts.check_heads(p, "split")
    walk = _walk(p, "backward")
    given = {**parts.given(p), "halved": parts.halved(p)}
    scan = _scan(p, "backward", walk, {
        **given, "input": "dy", "output": "dv", "first": "grad_final_state",
        "last": given.get("grad_initial_state", "grad_initial_state"), "solved": "dx", "states": "e",
    })  # fmt: skip
    types, bind = _key_types(p), {**given, "u": "solutions"}
    token_gradients = _chunk_step(p, "token_gradients", 2 * 4 * 2 * p.chunk_len * _SLAB, types, bind)
    of_keys = {**types, "VALUES": _values(p.V), "LARGEST_DECAY": parts.largest_decay(p)}
    key_gradients = [_chunk_step(p, "key_gradients", _keys_shared_bytes(p.chunk_len), of_keys, bind)]
    if p.has_halves:
        key_gradients.append(_halves_step(p, bind))
    steps, is_beside = [], walk.parts > 1
    for part in _parts(p, "backward", walk.parts):
        steps += [
            _scan_of_part(scan, part, is_beside, is_beside and part.begin == 0),
            _of_part(token_gradients, part)._replace(waits=is_beside),
            *(_of_part(step, part, _channels(p.K) // _SLAB) for step in key_gradients),
        ]
    pieces = kept(p)
    scratch = {
        "e": pieces["states"], "dx": pieces["solutions"], "gradients": pieces["matrices"], **_carried(scan, walk)
    }  # fmt: skip
    return Schedule(tuple(steps), parts.backward_results(p), scratch=scratch, vectors=parts.vectors(p))


def segment_walk(p: Problem, bind: Mapping[str, Any]) -> Step:
    """Return the forward's walk over all chunks, of sequences that are many."""
    return _scan(p, "forward", _Walk(False, 1), bind)


def _of_part(step: Step, part: _Part, chunk_blocks: int = 1) -> Step:
    """Return the launch of a kernel with so many blocks for each chunk of a part."""
    grid = (part.chunks * chunk_blocks, step.grid[1], part.sequences)
    numbers = {"first_chunk": part.first, "part_chunks": part.chunks, "part_slots": part.chunks * part.sequences}
    if step.is_resident:
        grid = (math.prod(grid), 1, 1)
    return step._replace(grid=grid, bind={**step.bind, **numbers})


def _scan_of_part(scan: Step, part: _Part, is_beside: bool, waits: bool) -> Step:
    bind = {**scan.bind, "walk": (part.begin, part.end)}
    return scan._replace(bind=bind, is_beside=is_beside, waits=waits)


def _carried(scan: Step, walk: _Walk) -> dict[str, Any]:
    """Return the bytes that the scan hands from part to part, if there are several: what blocks have in registers."""
    if walk.parts == 1:
        return {}
    slabs = -(-int(scan.parameters["CHANNELS"]) // (2 * _SLAB)) * 2  # two groups with equally many
    return {"carried": scan.grid[0] * scan.grid[1] * 4 * slabs * _SLAB * int(scan.parameters["VALUE_ROWS"])}


def _scan(p: Problem, direction: str, walk: _Walk, bind: Mapping[str, Any]) -> Step:
    """Return the launch of the scan over all chunks: blocks of value rows, of every sequence and head."""
    is_backward = direction == "backward"
    state_type = "fp32" if is_backward else p.state_type
    optional: tuple[str, ...] = ("last", "states")
    own: dict[str, Parameter] = {
        **_sizes(p), **parts.types(p), "T_STATE": state_type, "VALUES": _values(p.V), "BACKWARD": is_backward,
        "LARGEST_DECAY": parts.largest_decay(p), "POOLED": p.is_pooled,
    }  # fmt: skip
    if _has_groups(p.chunk_len, p.gpu) and p.num_threads in (None, _GROUP_THREADS):
        group = _group_cut(p.K, p.V, p.gpu, walk.few_heads and p.num_threads is None)
        rows, shared = group.value_rows, _group_shared_bytes(p.K, group.value_rows, group.stages)
        template, arch = "wkv7_group_scan", parts.GROUP_ARCH
        own |= {
            "VALUE_ROWS": rows, "CLUSTER": group.cluster, "STAGES": group.stages, "NUM_THREADS": _GROUP_THREADS,
            "SHARED_BYTES": shared,
        }  # fmt: skip
    else:
        cut = _cut(p, walk.few_heads)
        rows, shared = cut.value_rows, _scan_shared_bytes(p.K, p.chunk_len, is_backward, cut)
        template, arch, optional = "wkv7_scan", None, (*optional, "solved")
        own |= _block(p.gpu, cut.num_threads, _MOST_THREADS, shared)
        own |= {"KEY_WARPS": cut.key_warps, "STAGES": cut.stages}
    passed = {"carried": "carried" if walk.parts > 1 else None}
    grid = (parts.launched(p) * -(-p.V // rows), p.H, 1)
    return Step(template, template, own, grid, {**bind, **passed}, arch, optional=optional)


def _chunk_step(
    p: Problem, name: str, shared_bytes: int, own: Mapping[str, Parameter], bind: Mapping[str, Any],
    most_threads: int = 2 * _MOST_THREADS,
) -> Step:  # fmt: skip
    """Return the launch of a kernel for all chunks at once, before it is known for which of them."""
    block = _block(p.gpu, 4 * p.chunk_len, most_threads, shared_bytes)
    return Step(f"wkv7_{name}", f"wkv7_{name}", {**_sizes(p), **block, **own}, (0, p.H, 1), bind)


def _halves_step(p: Problem, bind: Mapping[str, Any]) -> Step:
    """Return the launch for the gradients of the keys' side of halved slabs: a warp for 32 channels of 16 tokens."""
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": p.chunk_len, "SLABS": _channels(p.K) // _SLAB,
        "STATE_ROWS": _values(p.V), **_key_types(p),
        **_block(p.gpu, 4 * p.chunk_len, _MOST_THREADS, _halves_shared_bytes(p.chunk_len)),
    }  # fmt: skip
    name = "wkv7_key_gradients_by_halves"
    return Step(name, name, parameters, (0, p.H, 1), bind, is_resident=True)


def _sizes(p: Problem) -> dict[str, Parameter]:
    return {"HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHANNELS": _channels(p.K), "CHUNK_LEN": p.chunk_len}


def _block(gpu: Gpu, threads: int, most_threads: int, shared_bytes: int) -> dict[str, Parameter]:
    """Return what a block is, with as many at once as shared memory, and registers for so many threads, allow."""
    blocks = gpu.resident_blocks(threads, most_threads, shared_bytes)
    return {"NUM_THREADS": threads, "BLOCKS_PER_SM": blocks, "SHARED_BYTES": shared_bytes}


def _key_types(p: Problem) -> dict[str, Parameter]:
    return parts.named(parts.types(p), "T_IO", "T_W", "DECAY")
