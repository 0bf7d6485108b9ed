"""The kernels of a few tokens, over a pool or not: one pass over the state; the geometry is what each thread holds.

`update_states` takes the inputs of recurrences as they are. `update_rules` is for ops that go through one of these, and
makes decays, rates and values of their inputs itself: it is the only launch of their updates, and that of their short
sequences beside prompts in dedicated kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rwkv_jit.kernels.gpu import TENSOR_CORES
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common, through, wkv4
from rwkv_jit.schedules.common import ACCESS_BYTES, OVERLAPS_SINCE, power
from rwkv_jit.schedules.problem import BYTES, STATE, Problem
from rwkv_jit.schedules.schedule import Schedule, Step

FEW_TOKENS = 8  # of a sequence that goes token by token, where an algorithm by chunks takes longer
LARGEST_KEY = 1024  # for whose tokens a block has shared memory, whatever the op is
MOST_ROWS = 65535  # of a grid's second extent
_MOST_KEY_WARPS = 16
# What follows was measured on an H100 and an H200, but for narrow states of recurrences, of which registers alone say
# it: numbers of a state that a thread holds, and threads that a multiprocessor shall have room for then. In some cases
# more numbers are faster than more threads. Code for sm_80 takes more registers than the others, and rules take fewer.
HELD, MOST_HELD = 32, 64
_RESIDENT, _LESS_RESIDENT, _FEWER_RESIDENT = 768, 640, 512
_HEAVY, _HEAVY_RESIDENT = 256, 256  # with more keys threads need registers for these too
# In the vk layout a block is a warp, or as many as load a token's keys for each other.
_KEYS_OF_WARP, _MOST_WARPS = 128, 8
_KV_THREADS = 128
# Blocks of a multiprocessor below which a call has few, whose threads take less each.
FEW_VK, _FEW_KV = 4, 2
SPREAD = ("VECTOR", "KEY_LANES", "KEY_WARPS", "ROWS", "NUM_THREADS")
# What tells rules apart, as the launches around a recurrence have it, and what it is where they do not.
_RULE: dict[str, Parameter] = {
    "GATE": 0, "G_PER_CHANNEL": False, "BETA_MAP": 0, "BETA_PER_CHANNEL": False, "HAS_NORM": False,
    "SOURCE": 0, "HAS_SOFTPLUS": False, "HAS_LIMITS": False,
}  # fmt: skip
_BEHIND: dict[str, Parameter] = {"HAS_SKIP": False, "SKIP_PER_CHANNEL": False, "HAS_GATE": False}
_NUMBERS = {"lower_bound": 0.0, "least": 0.0, "most": math.inf}
_TYPES = {"T_G": "w", "T_BETA": "beta", "T_A_LOG": "a_log", "T_DT_BIAS": "dt_bias", "T_D": "own"}


class Pool(NamedTuple):
    """What tells pools apart for a kernel, and what a step does with one."""

    slots: int
    slot_stride: int  # elements from one slot to the next
    alignment: int = ACCESS_BYTES  # bytes that all addresses of states are a multiple of, up to 16
    index_bytes: int = 4  # of the indices: 4 or 8
    null_index: int = -1  # a slot at or below it is none
    w0_type: str = "fp32"  # the storage type of w0
    is_stochastic: bool = False  # states are rounded at random
    strides: tuple[int, ...] = (0, 0)  # within a slot, where kernels take any


def geometry(p: Problem, pool: Pool, is_packed: bool = False, held: int = 0) -> dict[str, Parameter]:
    """Return VECTOR, KEY_LANES, KEY_WARPS, ROWS, NUM_THREADS and BLOCKS_PER_SM; `held` is a thread's share in vk."""
    row = p.K if p.state_layout == "vk" else p.V
    size = BYTES[p.state_type]
    vector = math.gcd(row, min(ACCESS_BYTES, pool.alignment) // size)
    # One token leaves two numbers of 16 bits in a register, unless they are rounded at random.
    is_narrow = size == 2 and vector > 1 and _has_one_token(p, is_packed) and not pool.is_stochastic
    light, resident = (MOST_HELD, _LESS_RESIDENT) if is_narrow else (HELD, _RESIDENT)
    held = held or light
    spread, few = (_spread_vk, FEW_VK) if p.state_layout == "vk" else (_spread_kv, _FEW_KV)
    cut = spread(p, vector, held, False)
    if p.multiprocessors is not None and p.B * p.H * value_blocks(p, cut) < few * p.multiprocessors:
        cut = spread(p, vector, held, True)
    is_vk, is_rule = p.state_layout == "vk", p.op.through is not None
    if p.K > _HEAVY:
        resident = _HEAVY_RESIDENT
    elif vector * int(cut["ROWS"]) > light or p.gpu.number <= TENSOR_CORES:
        resident = _FEWER_RESIDENT
    elif not _has_one_token(p, is_packed):
        resident = _LESS_RESIDENT if is_packed and is_vk and is_rule else _FEWER_RESIDENT
    elif is_rule and (not is_vk or p.K % (vector * int(cut["KEY_LANES"])) == 0):
        resident = _RESIDENT
    return {**cut, "BLOCKS_PER_SM": max(1, resident // int(cut["NUM_THREADS"]))}


def _has_one_token(p: Problem, is_packed: bool) -> bool:
    return p.T == 1 and not is_packed


def _spread_vk(p: Problem, vector: int, held: int, has_few_blocks: bool) -> dict[str, Parameter]:
    """Return how warps hold separate values: a lane has some keys of several of them."""
    key_lanes = min(power(p.K / vector), 32)
    keys = vector * math.ceil(p.K / (vector * key_lanes))
    most = held // 2 if has_few_blocks and key_lanes == 32 else held
    rows = max(1, min(most // keys, power(p.V * key_lanes / 32)))
    warps = min(power(p.K / _KEYS_OF_WARP), _MOST_WARPS)
    return {"VECTOR": vector, "KEY_LANES": key_lanes, "KEY_WARPS": 1, "ROWS": rows, "NUM_THREADS": 32 * warps}


def _spread_kv(p: Problem, vector: int, held: int, has_few_blocks: bool) -> dict[str, Parameter]:
    """Return how warps share the keys of a block's values: an access of several keys in a lane."""
    access = vector * BYTES[p.state_type]
    value_lanes = min(power(p.V / vector), 32, max(1, (64 if has_few_blocks or p.K > _HEAVY else 128) // access))
    key_lanes = 32 // value_lanes
    if has_few_blocks:
        rows = 8 // BYTES[p.state_type]
    else:
        rows = max(1, min(math.ceil(p.K / (2 * key_lanes)), MOST_HELD // vector))
    key_warps = min(power(p.K / (key_lanes * rows)), _MOST_KEY_WARPS)
    value_warps = min(max(1, _KV_THREADS // (32 * key_warps)), power(p.V / (value_lanes * vector)))
    return {
        "VECTOR": vector, "KEY_LANES": key_lanes, "KEY_WARPS": key_warps,
        "ROWS": math.ceil(p.K / (key_lanes * key_warps)), "NUM_THREADS": 32 * key_warps * value_warps,
    }  # fmt: skip


def value_blocks(p: Problem, cut: Mapping[str, Parameter]) -> Any:
    """Return how many blocks share the values of a head."""
    vector, key_lanes, key_warps, rows, threads = (int(cut[name]) for name in SPREAD)
    values = rows if p.state_layout == "vk" else vector
    return math.ceil(p.V / (values * (32 // key_lanes) * (threads // 32 // key_warps)))


def schedule(p: Problem, pool: Pool) -> Schedule:
    """Return the launch of a step over a pool: the state is bound to its first slot, y to memory of the caller's."""
    if not p.op.has_heads:
        number, channel = pool.strides
        strides = {"slot_stride": pool.slot_stride, "number_stride": number, "channel_stride": channel}
        return wkv4.update(p, {**strides, "slots": pool.slots, "null_index": pool.null_index}, pool.index_bytes)
    return Schedule((step(p, pool),))


def forward(p: Problem) -> Schedule:
    """Return the forward of a call without gradients: its states are pools with a slot for each sequence."""
    (step,) = schedule(p, Pool(p.B, p.H * p.K * p.V)).launches
    there = {"initial_state": p.has_initial_state, "final_state": p.has_final_state}
    states = {name: name if is_there else None for name, is_there in there.items()}
    bind = {**step.bind, **dict.fromkeys(("w0", "state_indices", "write_indices", "seed")), **states}
    step = step._replace(parameters={**step.parameters, "HAS_STATE": p.has_initial_state}, bind=bind)
    return Schedule((step,), common.forward_results(p), vectors={STATE: int(step.parameters["VECTOR"])})


def step(p: Problem, pool: Pool, is_packed: bool = False) -> Step:
    """Return the launch for p.B rows: of as many tokens each, or pieces of packed sequences."""
    if p.op.through is None:
        name, bind = "update_states", dict[str, Any]()
        parameters: dict[str, Parameter] = {
            "BONUS": "u" in p.op.inputs, "DECAY": p.decay, "T_W": p.types.get("w", "fp32"),
            "T_U": p.types.get("u", "fp32"), "T_W0": pool.w0_type,
        }  # fmt: skip
    else:
        name, parameters, bind = of_rule(p)
    parameters |= {"ONE_TOKEN": _has_one_token(p, is_packed), "PACKED": is_packed, "HAS_STATE": True}
    parameters |= geometry(p, pool, is_packed)
    others = ("state_indices", "write_indices") if is_packed else ("bounds", "pieces")
    step = step_of_rows(p, pool, name, parameters, {**bind, "tokens": p.T, **dict.fromkeys(others)})
    # Packed rows read what the launch before has just written, so that nothing could be brought near meanwhile.
    return step._replace(overlaps=step.overlaps and not is_packed)


def of_rule(p: Problem) -> tuple[str, dict[str, Parameter], dict[str, Any]]:
    """Return the kernel, parameters and arguments of an op through another, as the launches around that are told."""
    around = through.forward(p, Schedule(())).launches
    first, last = around[0], around[-1]
    parameters: dict[str, Parameter] = {
        **{name: first.parameters.get(name, absent) for name, absent in _RULE.items()},
        **{name: last.parameters.get(name, absent) for name, absent in _BEHIND.items()},
        **{constant: p.types.get(name, "fp32") for constant, name in _TYPES.items()},
        "HAS_DT_BIAS": "dt_bias" in p.types, "HAS_WRITE_GATE": "write_gate" in p.types,
        "DELTA": p.op.through is not None and p.op.through.family == "delta",
    }  # fmt: skip
    bind: dict[str, Any] = {
        **{name: None for name in ("beta", "a_log", "dt_bias", "write_gate", "own", "z") if name not in p.types},
        **{name: first.bind.get(name, absent) for name, absent in _NUMBERS.items()},
        "group": p.H // p.G if p.G else 1,
    }  # fmt: skip
    return "update_rules", parameters, bind


def step_of_rows(p: Problem, pool: Pool, name: str, own: Mapping[str, Parameter], bind: Mapping[str, Any]) -> Step:
    """Return the launch of a kernel for rows of a pool, with its own parameters and arguments beside those of all."""
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "T_IO": p.types["v"], "T_STATE": p.state_type,
        "STATE_LAYOUT": p.state_layout, "DELTA": p.op.family == "delta", "STOCHASTIC": pool.is_stochastic,
        "INDEX_BYTES": pool.index_bytes, **own,
    }  # fmt: skip
    given = {
        **{input: None for input in ("r", "w", "k", "v", "a", "b", "u") if input not in p.op.inputs},
        "initial_state": "state", "final_state": "state", "slot_stride": pool.slot_stride, "slots": pool.slots,
        "null_index": pool.null_index, "batch": p.B, "heads": p.H, "scale": p.scale, **bind,
    }  # fmt: skip
    rows = min(p.B, MOST_ROWS)
    grid = (p.H * value_blocks(p, own), rows, -(-p.B // max(rows, 1)))
    return Step(name, name, parameters, grid, given, overlaps=p.gpu.number >= OVERLAPS_SINCE)
