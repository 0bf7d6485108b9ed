"""Kimi Delta Attention on the tensor cores: 64 tokens at once, a block for a head of values; any decay is right."""

from __future__ import annotations

from typing import Any

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common, head_decay
from rwkv_jit.schedules.common import Obstacle
from rwkv_jit.schedules.layers import BETA_MAPS
from rwkv_jit.schedules.problem import BYTES, LARGEST_DECAY, Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step, aligned

CHUNK_LEN = 64
HEAD_SIZE = 128
# Heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments of the op below.
LEAST_BLOCKS = 1 / 5
_THREADS = 512
_TILE = 2 * 64 * 64  # bytes
_FIXED = ("a_log", "dt_bias")  # inputs that are the same for every token


def why_not(p: Problem) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is looked at where all else is right."""
    obstacle = common.obstacle(p, HEAD_SIZE, (CHUNK_LEN,), holds_heads=True)
    if obstacle is not None:
        return obstacle
    if p.training and p.G != p.H:
        return "takes as many key heads as value heads with gradients, got {} value heads for each", p.H // p.G
    if (p.K, p.V) != (HEAD_SIZE, HEAD_SIZE):
        return "takes head sizes of 128, got {} and {} for v", p.K, p.V
    return None if p.gpu.has_warp_groups else ("needs sm_90, got {}", p.gpu.arch)


def shared_bytes(storage: str) -> int:
    """Return the size of the forward's Smem where g has this type; a multiple of 1 KB."""
    wide = BYTES[storage]
    rows, matrices, values = 2 * 6 * _TILE, ((2 if wide == 2 else 1) + 2) * _TILE, 4 * _TILE
    solver = _TILE + 4 * 4 * 16 * 20
    work = max(2 * _TILE + solver, 4 * CHUNK_LEN * HEAD_SIZE)
    factors = 2 * (4 * CHUNK_LEN + HEAD_SIZE) + (2 * 4 + 3 + 2 + 2) * HEAD_SIZE // 2
    rest = 4 * (2 * 3 * CHUNK_LEN + 4 * HEAD_SIZE + factors + 2 * 8) + 7 * 8
    size = rows + matrices + values + wide * CHUNK_LEN * HEAD_SIZE + work + rest
    return -(-size // 1024) * 1024


def default_chunk_len(p: Problem) -> int:
    """Return the one length of a chunk."""
    return CHUNK_LEN


def _types(p: Problem) -> dict[str, Parameter]:
    gate = 0 if "a_log" not in p.types else 1 if p.trait("lower_bound") is None else 2  # as the templates count them
    return {
        "T_IO": p.types["v"], "T_STATE": p.state_type, "STATE_LAYOUT": p.state_layout, "DECAY": "log",
        "T_W": p.types["w"], "T_BETA": p.types["beta"], "GATE": gate, "HAS_NORM": bool(p.trait("qk_norm")),
        "HAS_BIAS": "dt_bias" in p.types, "BETA_MAP": BETA_MAPS.index(p.trait("beta_map")),
    }  # fmt: skip


def _given(p: Problem) -> dict[str, Any]:
    return {**common.given(p), "lower_bound": float(p.trait("lower_bound") or 0.0)}


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: a state and the token matrices of each chunk, and what it wrote."""
    chunks = p.slots(CHUNK_LEN) * p.H
    return {
        "states": 2 * chunks * p.V * p.K, "matrices": chunks * 2 * _TILE,
        "kept_u": aligned(2 * p.B * p.T * p.H * p.V),
    }  # fmt: skip


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": _THREADS, "GROUP": p.H // p.G,
        "SHARED_BYTES": shared_bytes(p.types["w"]), "LARGEST_DECAY": LARGEST_DECAY[p.types["v"]],
        "KEEPS": p.training, "POOLED": p.is_pooled, **_types(p),
    }  # fmt: skip
    left = kept(p) if p.training else {}
    absent = {name: None for name in ("states", "matrices", "kept_u") if name not in left}
    before, wide, scratch = head_decay.widened(p, _FIXED)
    given = {**_given(p), **wide, **absent}
    grid = common.launched(p), p.H, 1
    step = Step("channel_decay_group_forward", "channel_decay_forward", parameters, grid, given, common.GROUP_ARCH)
    return Schedule((*before, step), common.forward_results(p), left, scratch, vectors(p), main=len(before))


def backward_bytes(storage: str) -> int:
    """Return the size of the Smem of the walk back where g has this type; a multiple of 1 KB."""
    wide = BYTES[storage]
    rows, written = (3 if wide == 2 else 2) * 4 * _TILE, 4 * _TILE
    matrices, values, gates = 4 * _TILE, 4 * _TILE, wide * CHUNK_LEN * HEAD_SIZE
    factors = 2 * (4 * CHUNK_LEN + HEAD_SIZE)
    rest = 4 * (2 * 3 * CHUNK_LEN + 4 * HEAD_SIZE + factors) + 4 * 8
    return -(-(rows + written + matrices + values + gates + rest) // 1024) * 1024


def key_gradient_bytes(storage: str) -> int:
    """Return the size of the Smem of the gradients of keys where g has this type; a multiple of 1 KB."""
    states, values, operands, pairs = 2 * 4 * _TILE, 6 * _TILE, 6 * _TILE, 2 * _TILE
    gates = BYTES[storage] * CHUNK_LEN * HEAD_SIZE
    rest = 4 * (8 * 128 + 4 * 64 + 3 * 64 + 8 * 3 * 64 + 2 * 64 + 8) + 2 * 64 + 8
    return -(-(states + values + operands + pairs + gates + rest) // 1024) * 1024


def backward(p: Problem) -> Schedule:
    """Return the backward: the walk from the last chunk to the first, then what chunks have for themselves."""
    before, wide, scratch = head_decay.widened(p, _FIXED)
    shared: dict[str, Parameter] = {"HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "CHUNK_LEN": CHUNK_LEN, **_types(p)}
    given = {**_given(p), **wide, **({} if p.has_final_state else {"grad_final_state": None})}
    walk = Step(
        "channel_decay_group_backward", "channel_decay_backward",
        {**shared, "NUM_THREADS": _THREADS, "GROUP": p.H // p.G, "SHARED_BYTES": backward_bytes(p.types["w"])},
        (p.N, p.H, 1), given, common.GROUP_ARCH,
    )  # fmt: skip
    slots = p.slots(CHUNK_LEN)
    widths = {"a_log": ("a_log_chunks", p.H), "dt_bias": ("bias_chunks", p.H * p.K)}
    summed = {buffer: (name, width) for name, (buffer, width) in widths.items() if name in p.types}
    zeros, bind, rows = head_decay.rows_of_slots(p, summed, slots)
    bound = {**given, **{buffer: None for buffer, _ in widths.values()}, **bind, "slots": slots}
    left_out = ("T_STATE", "STATE_LAYOUT")
    parameters: dict[str, Parameter] = {
        **{name: value for name, value in shared.items() if name not in left_out}, "NUM_THREADS": 256,
        "SHARED_BYTES": key_gradient_bytes(p.types["w"]), "LARGEST_DECAY": LARGEST_DECAY[p.types["v"]],
        "BLOCKS_PER_SM": 1,
    }  # fmt: skip
    keys = Step(
        "channel_decay_group_key_gradients", "channel_decay_key_gradients", parameters, (slots * p.H, 1, 1),
        bound, common.GROUP_ARCH, is_resident=True,
    )  # fmt: skip
    scratch = {**scratch, **rows, "slopes": 2 * slots * p.H * p.V * p.K}
    launches: tuple[Item, ...] = (*zeros, *before, walk, keys)
    return Schedule(launches, common.backward_results(p), scratch=scratch, vectors=vectors(p), main=len(before))


def vectors(p: Problem) -> dict[str, int]:
    """Return how many neighbours of each input are read at once; what heads have one of is read alone."""
    streamed = {name: 16 // BYTES[p.types[name]] for name in ("r", "k", "v", "w")}
    return {**dict.fromkeys(p.present, 1), **streamed}
