"""What `diagonal_large` does on sm_90, with products of warp groups.

One kernel makes the operands of all chunks at once. A second one walks over the chunks with the state, or its gradient,
a block for some value rows. A third one makes the gradients of the keys' side, from the states that the second left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.common import padded
from rwkv_jit.schedules.diagonal_chunked import scan_ends
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Schedule, Step

CHUNK_LEN, THREADS = 64, 384
LARGEST_HEAD = 1024
_SLAB = 64  # channels that are moved and prepared at once
_ROWS = (64, 32)  # value rows that a block of the scan may hold
MOST_ROWS = max(_ROWS)
_STATE = 512 * 64  # channels times value rows that its registers hold
_MOST_STAGES = 8
_PREPARE_THREADS, _KEY_THREADS = 256, 128
_KEY_BLOCKS, _KEY_STAGES = 2, 3


def takes(gpu: Gpu, chunk_len: int, num_threads: int | None) -> bool:
    """Return whether these kernels take a call: where there are such products, and chunks and blocks that they fit."""
    return gpu.has_warp_groups and chunk_len == CHUNK_LEN and num_threads in (None, THREADS)


def _slabs(size: int) -> int:
    return -(-size // _SLAB)


def _tile(rows: int) -> int:
    """Return the bytes of so many rows of a slab."""
    return 2 * rows * _SLAB


def _value_rows(p: Problem) -> int:
    """Return how many value rows a block of the scan holds; with few heads as few as it can."""
    most = next(rows for rows in _ROWS if _slabs(p.K) * _SLAB * rows <= _STATE)
    multiprocessors = p.multiprocessors
    few_heads = multiprocessors is not None and p.N * p.H * _slabs(p.V) < multiprocessors
    return _ROWS[-1] if few_heads else most


def _scan_shared_bytes(head_size: int, value_rows: int, stages: int) -> int:
    images, outputs = 2 * _slabs(head_size) * _tile(value_rows), 8 * 16 * 2 * (value_rows // 2 + 8)
    return images + 2 * _tile(CHUNK_LEN) + outputs + stages * (2 * _tile(CHUNK_LEN) + 16)


def _key_shared_bytes() -> int:
    growth = -(-4 * (CHUNK_LEN + 1) * (_SLAB + 4) // 1024) * 1024  # a tile behind it begins at a multiple of 1024
    pieces, sums = _KEY_STAGES * 2 * _tile(CHUNK_LEN), 4 * 4 * _SLAB + 4 * 4 * _SLAB + 4 * CHUNK_LEN
    return -(-(2 * _tile(CHUNK_LEN) + max(pieces, growth + _tile(CHUNK_LEN)) + sums) // 1024) * 1024


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: all that its kernels leave behind. Without a decay there are no frames."""
    places, slabs, tile = p.slots(CHUNK_LEN) * p.H, _slabs(p.K), _tile(CHUNK_LEN)
    frames = {"frames": places * (4 * 2 * slabs * _SLAB)} if "w" in p.op.inputs else {}
    return {
        "operands": places * (slabs * 2 * tile), "pairs": places * tile, **frames,
        "states": places * (slabs * _tile(padded(p.V))),
        **({"halved": 4 * places * slabs} if p.has_halves else {}),
    }  # fmt: skip


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    pieces = kept(p)
    left = pieces if p.training else {}
    scratch = {} if p.training else {name: size for name, size in pieces.items() if name != "states"}
    scan = scan_step(p, "forward", {"states": "states" if p.training else None})
    steps = (*(_prepare_step(p, by_halves) for by_halves in common.ways(p)), scan)
    return Schedule(steps, common.forward_results(p), left, scratch, common.vectors(p), main=len(steps) - 1)


def backward_steps(p: Problem) -> tuple[Step, ...]:
    """Return the launches of the backward, which pass "e" from one to the others."""
    return scan_step(p, "backward", {"states": "e"}), *(_key_step(p, by_halves) for by_halves in common.ways(p))


def _prepare_step(p: Problem, by_halves: bool) -> Step:
    """Return the launch that makes the operands: a block per chunk and head."""
    types = common.named(common.types(p), "T_IO", "T_W", "T_U", "DECAY", "BONUS")
    # A third block would spill else.
    is_light = not by_halves and (p.decay == "none" or types["T_W"] != "fp32" and not types["BONUS"])
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": _PREPARE_THREADS,
        "BLOCKS_PER_SM": 3 if is_light else 2, "SHARED_BYTES": 6 * _tile(CHUNK_LEN) + 8 * 4 * _SLAB + 4 * CHUNK_LEN,
        "LARGEST_DECAY": common.largest_decay(p), "BY_HALVES": by_halves, **types, "T_W0": p.w0_type,
    }  # fmt: skip
    slots = p.slots(CHUNK_LEN)
    bind = {**_given(p), "q": "r", "halved": common.halved(p), "slots": slots}
    return common.step_of_places("gla_prepare", parameters, (slots, p.H, 1), bind, by_halves, common.GROUP_ARCH)


def scan_step(p: Problem, direction: str, bind: Mapping[str, Any]) -> Step:
    """Return the walk over the chunks in one direction: a block per sequence, head and block of value rows."""
    value_rows = _value_rows(p)
    fixed = _scan_shared_bytes(p.K, value_rows, 0)
    fitting = (p.gpu.shared_limit - fixed) // (_scan_shared_bytes(p.K, value_rows, 1) - fixed)
    stages = min(_MOST_STAGES, fitting)
    backward = direction == "backward"
    # What looks at decays is another kernel, and so is what reads w and u.
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": THREADS, "VALUE_ROWS": value_rows,
        "STAGES": stages, "BACKWARD": backward, "SHARED_BYTES": _scan_shared_bytes(p.K, value_rows, stages),
        "LARGEST_DECAY": common.largest_decay(p), "POOLED": p.is_pooled,
        **common.named(common.types(p), "T_IO", "T_STATE", "DECAY", "STATE_LAYOUT"),
    }  # fmt: skip
    if backward:
        parameters["T_STATE"] = "fp32"
    grid = (common.launched(p) * -(-p.V // value_rows), p.H, 1)
    given = {**_given(p), **scan_ends(p, direction), "halved": common.halved(p)}
    name, optional = "gla_group_scan", ("last", "states")
    return Step(name, name, parameters, grid, {**given, **bind}, common.GROUP_ARCH, optional=optional)


def _key_step(p: Problem, by_halves: bool) -> Step:
    """Return the launch that makes the gradients of the keys' side: a block per chunk, slab of channels and head."""
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": _KEY_THREADS,
        "BLOCKS_PER_SM": _KEY_BLOCKS, "STAGES": _KEY_STAGES, "SHARED_BYTES": _key_shared_bytes(),
        "LARGEST_DECAY": common.largest_decay(p), "BY_HALVES": by_halves,
        **common.named(common.types(p), "T_IO", "T_W", "T_U", "DECAY", "BONUS"), **p.op.backward_constants,
    }  # fmt: skip
    slots = p.slots(CHUNK_LEN)
    bind = {**_given(p), "q": "r", "dq": "dr", "halved": common.halved(p), "slots": slots}
    grid = (slots * _slabs(p.K), p.H, 1)
    return common.step_of_places("gla_group_key_gradients", parameters, grid, bind, by_halves, common.GROUP_ARCH)


def _given(p: Problem) -> dict[str, Any]:
    given = common.given(p)
    return given if "w" in p.op.inputs else {**given, "frames": None}
