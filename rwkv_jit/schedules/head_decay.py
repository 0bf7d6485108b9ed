"""Ops with one decay for a head on the tensor cores: 16 or 32 tokens at once, a block for a head; for any decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common, diagonal_operands, narrow, operands
from rwkv_jit.schedules.common import Obstacle, padded
from rwkv_jit.schedules.layers import BETA_MAPS
from rwkv_jit.schedules.operands import Behind
from rwkv_jit.schedules.problem import BYTES, Problem
from rwkv_jit.schedules.schedule import Extent, Item, Schedule, Step, Zero, aligned

CHUNK_LENS: tuple[int, ...] = (32, 16)
# Heads of all sequences for a multiprocessor: fewer leave it idle, and go in segments of the op below.
LEAST_BLOCKS = 1 / 5
KEPT_LENS = (64, 32)  # tokens that gradients of keys are made for at a time
_LEAST_ROWS = 32  # of a block
_GROUP_ROWS = 64  # value rows of a warp group in the forward
_GROUP_THREADS = 256  # of the blocks that make the gradients of keys by warp groups
_THREADS = 256  # that registers shall leave room for on a multiprocessor
_BLOCKS = 2  # of a multiprocessor, for which a sequence may be cut
_LEAST_SEGMENT = 1024  # tokens; a block may run through as many others before them
_WALK_THREADS = 256
_FIRST = "first_states"  # of sequences that blocks share, where they come from a pool
_GATE = Behind(z="z")  # behind the recurrence, which these kernels do not know
_OF_HEADS = ("own", "a_log", "dt_bias")  # inputs that are the same for every token
# The dimensions of what launches before and behind pass to the kernels.
_ROWS = {
    **dict.fromkeys(("head_step", "head_decay"), "BTH"),
    **dict.fromkeys((diagonal_operands.INNER_Y, diagonal_operands.INNER_DY), "BTHV"),
}

Constants = Mapping[str, Parameter]  # of a call: what its kernels have and have not


def constants(p: Problem) -> Constants:
    """Return what the kernels of a call have and have not; of steps, raw ones with a softplus and without limits."""
    assert p.op.through is not None
    has_step = bool(p.trait("dt_softplus")) and p.trait("least_step") is None and p.trait("most_step") is None
    is_raw = has_step or not _is_of_steps(p)
    return {
        "HAS_DELTA": p.op.through.family == "delta", "HAS_RATE": "beta" in p.types,
        "HAS_NORM": bool(p.trait("qk_norm")), "HAS_OWN": "own" in p.types,
        "HAS_GATE": is_raw and "a_log" in p.types, "HAS_STEP": has_step,
        "HAS_BIAS": is_raw and "dt_bias" in p.types, "BETA_MAP": BETA_MAPS.index(p.trait("beta_map") or "identity"),
    }  # fmt: skip


def _is_of_steps(p: Problem) -> bool:
    """Return whether decays are steps of a state space times a rate."""
    return "dt_softplus" in p.op.traits


def _computes_steps(p: Problem) -> bool:
    return _is_of_steps(p) and not constants(p)["HAS_STEP"]


def _types(p: Problem, has: Constants) -> dict[str, Parameter]:
    """Return the types of the templates, and what tells calls apart. Raw steps make decays too."""
    storage = {name: "fp32" if _computes_steps(p) else p.types.get(name, "fp32") for name in ("w", "beta")}
    return {
        "T_IO": p.types["v"], "T_STATE": p.state_type, "STATE_LAYOUT": p.state_layout,
        "DECAY": "log" if _has_decays(p) else "none",
        "T_W": storage["beta" if has["HAS_STEP"] else "w"], "T_BETA": storage["beta"], **has,
    }  # fmt: skip


def _has_decays(p: Problem) -> bool:
    return "w" in p.types or _is_of_steps(p)


def why_not(p: Problem) -> Obstacle | None:
    """Return why these kernels cannot do a call; None where they can. The GPU is looked at where all else is right."""
    return common.obstacle_of_blocks(p, CHUNK_LENS, default_chunk_len, partial(most_shared_bytes, p))


def shared_bytes(head_size: int, rows: int, chunk_len: int, has: Constants) -> int:
    """Return the size of the forward's Smem, of a block of value rows. Rows of tiles are 8 elements longer."""
    key_tile, value_tile, token_tile = (2 * chunk_len * (width + 8) for width in (padded(head_size), rows, chunk_len))
    solver = max(token_tile, chunk_len // 16 * 4 * 16 * 20)
    return 3 * (2 * key_tile + value_tile) + 2 * (solver + token_tile + factor_bytes(chunk_len, has))


def group_forward_bytes(head_size: int, rows: int, chunk_len: int, has: Constants) -> int:
    """Return the size of the Smem of the forward by warp groups, of a block of value rows; a multiple of 1 KB."""
    token_tile, pairs = 2 * chunk_len * (chunk_len + 8), 2 * 2 * chunk_len * head_size
    stage = 2 * chunk_len * (rows + 8) + 2 * token_tile + factor_bytes(chunk_len, has)
    ring = 6 if rows == 2 * _GROUP_ROWS else 4
    return -(-ring * (pairs + stage + 2 * 8) // 1024) * 1024


def backward_bytes(head_size: int, rows: int, chunk_len: int, has: Constants) -> int:
    """Return the size of the Smem of the backward from chunk to chunk, of a block of value rows."""
    key_tile, value_tile = (2 * chunk_len * (width + 8) for width in (padded(head_size), rows))
    return 3 * (2 * key_tile + value_tile + matrix_bytes(chunk_len, has) + state_factor_bytes(chunk_len))


def key_gradient_bytes(head_size: int, value_size: int, chunk_len: int, threads: int, has: Constants) -> int:
    """Return the size of the Smem of the kernel that makes the gradients of keys."""
    key_tile, value_tile, token_tile = (
        2 * chunk_len * (padded(width) + 8) for width in (head_size, value_size, chunk_len)
    )
    sides, warps = _sides(has), threads // 32
    floats = (6 + 3 * warps // 2 + 2 * sides * chunk_len // 16 + 2) * chunk_len + warps
    return aligned(2 * key_tile + (1 + sides) * value_tile + sides * token_tile + 4 * floats)


def most_shared_bytes(p: Problem, chunk_len: int) -> int:
    """Return what the largest of a call's kernels takes."""
    sizes, has = (p.K, padded(p.V)), constants(p)
    most = shared_bytes(*sizes, chunk_len, has)
    if p.training:
        threads = key_threads(p.K)
        keys = key_gradient_bytes(p.K, p.V, KEPT_LENS[-1], threads, has)
        most = max(most, backward_bytes(*sizes, chunk_len, has), keys)
    return most


def _sides(has: Constants) -> int:
    """Return how many tiles there are of gradients of rows: of what is read, and with a delta of what is erased."""
    return 1 + bool(has["HAS_DELTA"])


def factor_bytes(chunk_len: int, has: Constants) -> int:
    """Return the size of what multiplies the tokens of a chunk."""
    return pair_factor_bytes(chunk_len, has) + state_factor_bytes(chunk_len)


def pair_factor_bytes(chunk_len: int, has: Constants) -> int:
    """Return the size of those of them that multiply pairs of tokens: decays, and what norms and rates make differ."""
    by_token = 1 + bool(has["HAS_RATE"] or has["HAS_NORM"]) + 3 * bool(has["HAS_NORM"])
    return aligned(4 * (by_token * chunk_len + 5 - by_token))


def state_factor_bytes(chunk_len: int) -> int:
    """Return the size of those that multiply tokens with the state, and with themselves."""
    return aligned(4 * (3 * chunk_len + 2))


def matrix_bytes(chunk_len: int, has: Constants) -> int:
    """Return the size of a chunk's matrices of tokens, M and with a delta Tm: blocks on and below the diagonal."""
    blocks = chunk_len // 16
    return _sides(has) * blocks * (blocks + 1) // 2 * 2 * 16 * 16


def default_chunk_len(p: Problem) -> int:
    """Return the longest chunk that fits."""
    return common.fitting(p, CHUNK_LENS, partial(most_shared_bytes, p))


def rows_of_block(value_size: int, blocks: int, multiprocessors: int | None, least: int = _LEAST_ROWS) -> int:
    """Return the value rows of a block: all of a head's, or fewer where there are few heads."""
    rows = padded(value_size)
    if multiprocessors is not None:
        while rows % (2 * least) == 0 and 2 * blocks * padded(value_size) // rows <= multiprocessors:
            rows //= 2
    return rows


def segments(p: Problem) -> int:
    """Return how many blocks a sequence is cut into where its decays let them: as many as fill the GPU."""
    has = constants(p)
    forgets = _has_decays(p) and (has["HAS_NORM"] or not has["HAS_DELTA"])
    if not forgets or p.multiprocessors is None or p.waves > 1:
        return 1
    count: int = min(_BLOCKS * p.multiprocessors // (p.N * p.H), p.B * p.T // (p.N * _LEAST_SEGMENT))
    return max(count, 1)


def walk_bytes(p: Problem) -> Any:
    """Return the size of what blocks read of which chunks they take, in both directions where there are two."""
    return (1 + p.training) * p.N * segments(p) * p.H * 16


def _kept_len(p: Problem) -> int:
    """Return for how many tokens at a time there are gradients of keys, with a state kept of each: what fits."""
    threads, has = key_threads(p.K), constants(p)
    return common.fitting(p, KEPT_LENS, lambda each: key_gradient_bytes(p.K, p.V, each, threads, has))


def takes_warp_groups(p: Problem) -> bool:
    """Return whether four warps multiply together for the gradients of keys, and in a forward of longer chunks."""
    return p.gpu.has_warp_groups and {p.K, p.V} <= {64, 128}


def group_bytes(head_size: int, value_size: int, chunk_len: int, has: Constants) -> int:
    """Return the size of the Smem of the kernel that makes the gradients of keys by warp groups; a multiple of 1 KB."""
    tile, sides, length = 2 * 64 * 64, _sides(has), 64
    ring = 2 * ((1 + sides) * tile + 2 * 2 * 64 * head_size)
    keys, factors = 2 * 2 * 2 * length * head_size, 2 * (length // chunk_len) * pair_factor_bytes(chunk_len, has)
    warps = _GROUP_THREADS // 32
    rest = 4 * ((15 + sides) * length + warps + warps * (value_size if has["HAS_OWN"] else 1)) + 3 * 72 + 2 * 8
    size = ring + keys + sides * tile + factors + rest
    return -(-size // 1024) * 1024


def key_threads(head_size: int) -> int:
    """Return the threads of a block that makes the gradients of keys: two warps for each 16 channels, of four."""
    return 64 * min(4, padded(head_size) // 16)


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: states, matrices and factors of tokens, and with a delta what it wrote."""
    chunks, has = p.slots(p.chunk_len) * p.H, constants(p)
    sizes = {
        "states": 2 * p.slots(_kept_len(p)) * p.H * padded(p.V) * padded(p.K),
        "matrices": chunks * matrix_bytes(p.chunk_len, has),
        "factors": chunks * factor_bytes(p.chunk_len, has),
    }
    if segments(p) > 1:
        sizes["walks"] = walk_bytes(p)
    sizes |= {"kept_u": aligned(2 * p.B * p.T * p.H * p.V)} if has["HAS_DELTA"] else {}
    return sizes | diagonal_operands.kept(p)


def _of_heads(p: Problem, rows: int, threads: int, shared: int, blocks: int) -> tuple[dict[str, Parameter], Extent]:
    """Return the geometry of a launch with a block for each segment, value head and part of its rows."""
    count = segments(p)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "ROWS": rows, "CHUNK_LEN": p.chunk_len, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": blocks, "SHARED_BYTES": shared, "GROUP": p.H // p.G,
        "KEPT_LEN": _kept_len(p) if p.training else 0, "SEGMENTED": count > 1,
        "AS_MATRICES": p.training and takes_warp_groups(p), **_types(p, constants(p)),
    }  # fmt: skip
    return parameters, (common.launched(p) * count, p.H, -(-p.V // rows))


def _by_warps(
    p: Problem, shared_bytes_of: Callable[[int, int, int, Constants], int]
) -> tuple[dict[str, Parameter], Extent]:
    rows = rows_of_block(p.V, common.launched(p) * p.H * segments(p), p.multiprocessors)
    threads = max(rows, 128 if p.K > 64 else 64)
    shared = shared_bytes_of(p.K, rows, p.chunk_len, constants(p))
    return _of_heads(p, rows, threads, shared, p.gpu.resident_blocks(threads, _THREADS, shared))


def _by_groups(p: Problem) -> tuple[dict[str, Parameter], Extent]:
    """Return the geometry of the forward by warp groups: one for 64 rows each, and as many beside them."""
    rows = rows_of_block(p.V, common.launched(p) * p.H * segments(p), p.multiprocessors, _GROUP_ROWS)
    shared = group_forward_bytes(p.K, rows, p.chunk_len, constants(p))
    return _of_heads(p, rows, 4 * rows, shared, 2 * _GROUP_ROWS // rows)


def forward(p: Problem) -> Schedule:
    """Return the forward, and before it which chunks its blocks take where they share sequences."""
    by_groups = takes_warp_groups(p) and p.chunk_len == 32
    parameters, grid = _by_groups(p) if by_groups else _by_warps(p, shared_bytes)
    name, arch = "head_decay_forward", common.GROUP_ARCH if by_groups else None
    template = "head_decay_group_forward" if by_groups else name
    parameters |= {"POOLED": p.is_pooled, "SKIP_PER_CHANNEL": p.op.inputs.get("own") == "HV"}
    count, left = segments(p), kept(p) if p.training else {}
    absent = {name: None for name in ("states", "matrices", "factors", "kept_u") if name not in left}
    before, wide, scratch = _before(p)
    given = {**_given(p), **wide, **absent, "segments": count}
    if count == 1:
        given["walks"] = None
    else:
        before.append(_walks(p, parameters, given))
        scratch |= {} if p.training else {"walks": walk_bytes(p)}
        if p.is_pooled:  # as the last block of a sequence may write its slot before the first one reads it
            of, layout = p.state_type, p.state_layout
            before.append(common.copy_states(p, "initial_state", _FIRST, of, of, layout, layout))
            given["initial_state"], scratch[_FIRST] = _FIRST, BYTES[of] * prod(p.state_shape)
    several, after = vectors(p), list[Step]()
    if "z" in p.types:
        after, of_gate = diagonal_operands.forward_behind(p, _GATE)
        given["y"], several["z"] = diagonal_operands.INNER_Y, of_gate["z"]
        scratch |= {} if p.training else diagonal_operands.kept(p)
    launches = *before, Step(template, name, parameters, grid, given, arch), *after
    return Schedule(launches, common.forward_results(p), left, scratch, several, len(before), _ROWS)


def _before(p: Problem) -> tuple[list[Step], dict[str, Any], dict[str, Any]]:
    """Return the launches before the kernels, what these take then, and the bytes of that."""
    if not _computes_steps(p):
        return widened(p, _OF_HEADS)
    steps, wide, scratch = widened(p, ("own",))
    rows = 4 * p.B * p.T * p.H
    steps.append(operands.head_steps(p, diagonal_operands.steps_of(p), "head_step", "head_decay"))
    computed = {"w": "head_decay", "beta": "head_step", "a_log": None, "dt_bias": None}
    return steps, {**wide, **computed}, {**scratch, "head_step": rows, "head_decay": rows}


def _given(p: Problem) -> dict[str, Any]:
    absent = {name: None for name in ("beta", *_OF_HEADS) if name not in p.types}
    return common.given(p) | absent | ({"w": "beta"} if _is_of_steps(p) else {})


def widened(p: Problem, names: Sequence[str]) -> tuple[list[Step], dict[str, str], dict[str, Any]]:
    """Return the steps that copy inputs without tokens to float32, what kernels take instead, and the copies' bytes."""
    copies = {name: f"wide_{name}" for name in names if p.types.get(name, "fp32") != "fp32"}
    steps = [narrow.widen(p, name, copy) for name, copy in copies.items()]
    return steps, copies, {copy: 4 * prod(p.shape(name)) for name, copy in copies.items()}


def _walks(p: Problem, parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> Step:
    """Return the launch that finds which chunks blocks take."""
    name, shared = "head_decay_walks", ("CHUNK_LEN", "KEPT_LEN", "SEGMENTED", "T_IO", "T_W", "T_BETA", "DECAY")
    flags = "HAS_DELTA", "HAS_RATE", "HAS_GATE", "HAS_STEP", "HAS_BIAS", "BETA_MAP"
    own = {each: parameters[each] for each in (*shared, *flags, "POOLED")} | {"NUM_THREADS": _WALK_THREADS}
    return Step(name, name, own, (p.N * segments(p), p.H, 1 + p.training), given)


def backward(p: Problem) -> Schedule:
    """Return the backward: from chunk to chunk, then what chunks have for themselves."""
    parameters, grid = _by_warps(p, backward_bytes)
    before, wide, scratch = _before(p)
    given = {**_given(p), **wide, **{f"d{name}": None for name in ("w", "beta") if name not in p.types}}
    after = list[Step]()
    if _computes_steps(p):
        of_steps = operands.head_step_gradients(p, diagonal_operands.steps_of(p), "grad_step", "grad_decay")
        after += of_steps.launches
        scratch |= {**of_steps.scratch, **dict.fromkeys(("grad_step", "grad_decay"), 4 * p.B * p.T * p.H)}
        given |= {"dw": "grad_decay", "dbeta": "grad_step"}
    several = vectors(p)
    if "z" in p.types:
        first, sizes, of_gate = diagonal_operands.backward_behind(p, _GATE)
        before, scratch = [*first, *before], {**scratch, **sizes}
        several |= {"z": of_gate["z"], "dy": max(several["dy"], of_gate["dy"])}
        given["dy"] = diagonal_operands.INNER_DY
    if not p.has_final_state:
        given["grad_final_state"] = None
    length = _kept_len(p)
    slots = p.slots(length)
    # Of inputs that are the same for every token there are sums of chunks first.
    chunks = {f"{name.removeprefix('dt_')}_chunks": (name, p.H * (p.V if name == "own" else 1)) for name in _OF_HEADS}
    left_out = {"a_log", "dt_bias"} if _computes_steps(p) else set()
    summed = {buffer: of for buffer, of in chunks.items() if of[0] in p.types and of[0] not in left_out}
    zeros, bind, rows = rows_of_slots(p, summed, slots)
    given |= dict.fromkeys(chunks) | bind
    count, name = segments(p), "head_decay_backward"
    given |= {"segments": count} | ({} if count > 1 else {"walks": None})
    walk = Step(name, name, parameters, grid, given)
    scratch |= rows
    scratch["slopes"] = 2 * slots * p.H * padded(p.V) * padded(p.K)
    keys = _key_gradients(p, parameters, given, length)
    launches: tuple[Item, ...] = (*zeros, *before, walk, keys, *after)
    return Schedule(
        launches, common.backward_results(p), scratch=scratch, vectors=several, main=len(before), rows=_ROWS
    )  # fmt: skip


def rows_of_slots(
    p: Problem, summed: Mapping[str, tuple[str, int]], slots: int
) -> tuple[list[Zero], dict[str, str], dict[str, int]]:
    """Return zeroed rows for gradients of parts, which `common.with_sums` adds up, what binds them, and their bytes.

    `summed` has inputs and widths by the names that kernels have for the rows.
    """
    bind = {rows: f"d{name}_rows" for rows, (name, _) in summed.items()}
    zeros = [Zero(rows) for rows in bind.values()] if p.is_packed else []  # slots may belong to no chunk
    return zeros, bind, {bind[rows]: 4 * slots * width for rows, (_, width) in summed.items()}


def _key_gradients(
    p: Problem, parameters: Mapping[str, Parameter], given: Mapping[str, Any], chunk_len: int
) -> Step:  # fmt: skip
    name, slots, has = "head_decay_key_gradients", p.slots(chunk_len), constants(p)
    template, grid, threads, arch = name, (slots, p.G, 1), key_threads(p.K), None
    most_threads, shared = 2 * threads, key_gradient_bytes(p.K, p.V, chunk_len, threads, has)
    by_groups = takes_warp_groups(p)
    if by_groups:
        template, grid, arch = "head_decay_group_key_gradients", (slots * p.G, 1, 1), common.GROUP_ARCH
        threads = most_threads = _GROUP_THREADS
        shared = group_bytes(p.K, p.V, p.chunk_len, has)
    own: dict[str, Parameter] = {
        "CHUNK_LEN": chunk_len, "PART_LEN": p.chunk_len, "NUM_THREADS": threads, "SHARED_BYTES": shared,
        "BLOCKS_PER_SM": p.gpu.resident_blocks(threads, most_threads, shared),
    }  # fmt: skip
    left_out = ("ROWS", "KEPT_LEN", "AS_MATRICES", "SEGMENTED", "T_STATE", "STATE_LAYOUT")
    own = {name: value for name, value in parameters.items() if name not in left_out} | own
    of_u: dict[str, Any] = {"u": "v", "dv": None}
    if has["HAS_DELTA"]:
        of_u = {"u": "kept_u", "u_strides": (p.T * p.H * p.V, p.H * p.V, p.V)}
    return Step(template, name, own, grid, {**given, **of_u, "slots": slots}, arch, is_resident=by_groups)


def vectors(p: Problem) -> dict[str, int]:
    """Return how many neighbours of each input are read at once; what heads have one of is read alone."""
    return {**common.vectors(p), "w": 1, "beta": 1, "a_log": 1, "dt_bias": 1}
