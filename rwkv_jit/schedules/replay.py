"""The kernel of steps that read a state and the entries since it was written, and write it once in a while.

The geometry is that of updates, but few values of a head are in one block, so that its entries are read once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import update
from rwkv_jit.schedules.common import power
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Schedule
from rwkv_jit.schedules.table import ALL
from rwkv_jit.schedules.update import Pool

_MOST_WARPS = 8
# Warps that a head shall have at least where heads are few, and GPUs whose code takes more registers.
_LEAST_WARPS, _NEEDS_MORE_REGISTERS = 4, 100
# Threads that a multiprocessor shall have room for: of a step of few tokens, and of one of more or with more keys.
# Measured on an H100, as what follows.
_RESIDENT, _MOST_LIGHT_TOKENS, _HEAVY, _HEAVY_RESIDENT = 512, 4, 256, 256
# The time that a byte of an entry takes, beside one of a state.
_TIME_OF_ENTRIES = 1.5


class Ring(NamedTuple):
    """What tells rings apart for a kernel, and what a launch does with one."""

    length: int  # the most entries that are kept
    entries: int  # how many there is memory for
    kept: int  # with more than so many a state is written
    is_draft: bool = False  # the tokens are speculative: cursors and states stay
    accept_bytes: int = 0  # of the numbers of accepted tokens, of a commit alone: 4 or 8


def entry_fields(op: Op) -> dict[str, tuple[str, bool]]:
    """Return what an entry of an op has: the dimensions of each field, and whether it is float32 beside any inputs.

    With the recurrence of `kernel_templates/inference/replay_states.cu`, or of `replay_rules.cu` where there is an op
    below: then v is what the token adds to the state, and a key that is a gate says the decay.
    """
    has_delta, is_rule = (op.through or op).family == "delta", op.through is not None
    has_key = "k" in op.inputs
    decay = op.inputs.get("w", "BTH" if "a_log" in op.inputs else "")[2:] if is_rule else "HK" * (op.decay != "none")
    several = {
        "d": (decay * has_key, True), "b": ("HK" * (has_delta and not is_rule), False),
        "k": (op.inputs["k"][2:] if has_key else "HK", not has_key),
        "v": ("HV", is_rule and (has_delta or "beta" in op.inputs)), "u": ("HV" * (has_delta and not is_rule), True),
    }  # fmt: skip
    return {name: field for name, field in several.items() if field[0]}


def entry_bytes(op: Op, sizes: Mapping[str, int], size: int) -> int:
    """Return the bytes of an entry of all heads, with inputs of `size` bytes."""
    return sum(
        math.prod(sizes[dim] for dim in dims) * (4 if is_wide else size) for dims, is_wide in entry_fields(op).values()
    )


def best_length(state_bytes: int, bytes_of_entry: int) -> int:
    """Return how many entries, 1 to 15, make a token fastest: it reads half of them, and writes once in one more."""
    of_entry = _TIME_OF_ENTRIES * bytes_of_entry / 2
    return min(range(1, 16), key=lambda length: state_bytes / (length + 1) + of_entry * length)


def geometry(p: Problem, pool: Pool, ring: Ring, tokens: int) -> dict[str, Parameter]:
    """Return what `steps.geometry` does, and SHARED_BYTES."""
    cut = update.geometry(p, pool, held=_held(p, pool, ring, tokens))
    if p.state_layout == "vk":
        of_warp = int(cut["ROWS"]) * 32 // int(cut["KEY_LANES"])
        warps = max(int(cut["NUM_THREADS"]) // 32, min(power(p.V / of_warp), _MOST_WARPS))
        cut["NUM_THREADS"] = 32 * warps
    threads = int(cut["NUM_THREADS"])
    shared = shared_bytes(p, cut, ring, tokens)
    if shared > p.gpu.shared_limit:
        raise UnsupportedConfigError(
            f"length: {ring.entries} entries of head sizes {p.K}, {p.V} and {tokens} tokens need {shared} bytes of "
            f"shared memory in a block, and {p.gpu.arch} has {p.gpu.shared_limit}"
        )
    is_heavy = p.K > _HEAVY or tokens > _MOST_LIGHT_TOKENS
    resident = _HEAVY_RESIDENT if is_heavy else _RESIDENT
    return {**cut, "BLOCKS_PER_SM": p.gpu.resident_blocks(threads, resident, shared), "SHARED_BYTES": shared}


def _held(p: Problem, pool: Pool, ring: Ring, tokens: int) -> int:
    """Return how many numbers of a state in the vk layout a thread has."""
    # Tokens with a flush behind them and bits at random need the registers, on newer GPUs several tokens at all, and
    # what makes a token of other inputs.
    is_newer = p.gpu.number >= _NEEDS_MORE_REGISTERS
    has_room = tokens == 1 and p.op.through is None if is_newer else tokens == 1 or ring.is_draft
    # Where heads are few, more warps for each of them are faster.
    has_few_heads = p.multiprocessors is not None and update.FEW_VK * p.multiprocessors > p.B * p.H
    has_few_warps = p.K * p.V < _LEAST_WARPS * 32 * update.MOST_HELD
    if pool.is_stochastic or not has_room or (has_few_heads and has_few_warps):
        return update.HELD
    return update.MOST_HELD


def shared_bytes(p: Problem, cut: dict[str, Parameter], ring: Ring, tokens: int) -> int:
    """Return the bytes of shared memory of a block: at least what the template's struct takes."""
    vector, key_lanes, key_warps, rows, threads = (int(cut[name]) for name in update.SPREAD)
    is_vk, op = p.state_layout == "vk", ALL[p.op.name]
    fields, has_delta = entry_fields(op), (op.through or op).family == "delta"
    has_decay, has_pairs = _has_decay(op), "u" in fields
    keys = (vector * math.ceil(p.K / (vector * key_lanes)) if is_vk else rows) * key_lanes * key_warps
    values = (rows if is_vk else vector) * (32 // key_lanes) * (threads // 32 // key_warps)
    decays = 4 if fields.get("d") == ("H", True) else keys
    past = ring.length if tokens else ring.entries
    most, step, folded = past + tokens, max(tokens, 1), 1 if ring.is_draft else past + tokens
    token = 2 * keys + (keys if has_decay else 4) + 2 * (keys if has_pairs else 4)
    token += (keys if tokens and "u" in op.inputs else 4) + -(-values // 4) * 4
    if op.through is not None:
        token += (keys if op.inputs.get("beta") == "BTHK" else 4) + (-(-values // 4) * 4 if "z" in p.types else 4)
    floats = step * token + (decays * (past + 1) if has_decay else 4)
    floats += folded * keys + (folded * keys if has_pairs else 4)
    floats = -(-floats // 4) * 4 + most * step * (1 + has_delta) * (1 + has_pairs)
    floats += step * (1 + has_delta) * key_warps * values + (folded * values if has_pairs else 1)
    floats += values * (folded if op.through is None else most)
    return -(-4 * floats // 16) * 16


def schedule(p: Problem, pool: Pool, ring: Ring, tokens: int) -> Schedule:
    """Return the launch of a step of so many tokens, or of none: the state is bound to its first slot."""
    cut, op = geometry(p, pool, ring, tokens), ALL[p.op.name]
    fields, storage = entry_fields(op), p.types["v"]
    name, bind = "replay_states", {"group": p.H // p.G if p.G else 1, "kept": ring.kept}
    if tokens and op.through is not None:
        name, parameters, of_rule = update.of_rule(p)
        name, bind = "replay_rules", {**of_rule, **bind}
    else:
        # Entries hold decays as they are.
        decay = p.decay if tokens else "raw" if _has_decay(op) else "none"
        types = {**p.types, "w0": pool.w0_type} if tokens else {}
        parameters = {
            "BONUS": tokens > 0 and "u" in op.inputs, "DECAY": decay, "DECAY_OF_HEAD": fields.get("d") == ("H", True),
            "T_W": types.get("w", "fp32"), "T_U": types.get("u", "fp32"), "T_W0": types.get("w0", "fp32"),
        }  # fmt: skip
        bind |= {} if ring.accept_bytes else {"accept_lens": None}
    parameters |= {
        "T_KEY": "fp32" if fields["k"][1] else storage, "T_VALUE": "fp32" if fields["v"][1] else storage,
        "KEYS_SAY_DECAYS": fields["k"][1], "ACCEPT_BYTES": ring.accept_bytes or 4, "ONE_TOKEN": tokens == 1,
        "TOKENS": tokens, "DRAFT": ring.is_draft, "LENGTH": ring.length, "ENTRIES": ring.entries, **cut,
    }  # fmt: skip
    return Schedule((update.step_of_rows(p, pool, name, parameters, bind),))


def _has_decay(op: Op) -> bool:
    """Return whether a token of an op makes a state forget: by factors, or as its key says."""
    fields = entry_fields(op)
    return "d" in fields or fields["k"][1]
