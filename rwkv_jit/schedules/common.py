"""What schedules of several algorithms have in common: types, numbers, results, and sums over rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import TENSOR_CORES, Gpu
from rwkv_jit.kernels.template import STORAGE_TYPES, Parameter
from rwkv_jit.schedules.problem import BYTES, LARGEST_DECAY, Problem, is_framed
from rwkv_jit.schedules.schedule import Result, Schedule, Step, without

DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32", "fp64": "torch.float64"}
MOST_HEADS = 65535  # of a grid's second extent
LARGEST_HEAD = 128  # that a block holds
ACCESS_BYTES = 16
MULTIPROCESSORS = 132  # where it is not known how many there are
MOST_BLOCKS = 16  # of a multiprocessor, of the smallest GPUs
# Of kernels with products of warp groups: nothing but an sm_90 runs code for sm_90, and only with the extension has it
# these products.
GROUP_ARCH = "sm_90a"
_SUM_THREADS, _SUM_COLUMNS = 256, 32  # of a block that sums rows
_MOST_BUFFERS = 5  # buffers whose rows one launch adds up
_COPY_THREADS, _COPY_TILE = 256, 32


# ---- the rule ----------------------------------------------------------------------------------------------------

# Why an algorithm cannot do a call: the end of a sentence, and the values to format it with. A compiler that traces a
# call can compare sizes, but not print them.
Obstacle = tuple[Any, ...]


def obstacle(
    p: Problem, largest_head: int, chunk_lens: Sequence[int], holds_heads: bool = False, behind: str = ""
) -> Obstacle | None:
    """Return why no kernels on the tensor cores can do a call; the GPU is looked at where all else is right.

    Where blocks hold a head, keys may not be too long beside the values. `behind` says when chunks have these lengths.
    """
    if p.storage not in ("fp16", "bf16"):
        return "takes float16 and bfloat16, got {}", DTYPES[p.storage]
    if max(p.K, p.V) > largest_head:
        return "takes head sizes up to {}, got {} and {} for v", largest_head, p.K, p.V
    if holds_heads and padded(p.K) > 2 * padded(p.V):
        return "takes keys up to twice as long as values (in steps of 32), got {} and {} for v", p.K, p.V
    if p.chunk_len and p.chunk_len not in chunk_lens:
        *others, last = map(str, sorted(chunk_lens))
        lengths = f"{', '.join(others)} or {last}" if others else last
        return "takes chunk_len {}, got {}", lengths + behind, p.chunk_len
    if not p.gpu.has_tensor_cores:
        return "needs an architecture from sm_{} on, got {}", TENSOR_CORES, p.gpu.arch
    return None


def obstacle_of_blocks(
    p: Problem, chunk_lens: Sequence[int], default: Callable[[Problem], int], shared_bytes: Callable[[int], int]
) -> Obstacle | None:
    """Return why no blocks that hold a head can do a call, with the shared memory that one needs by its chunk."""
    found = obstacle(p, LARGEST_HEAD, chunk_lens, holds_heads=True)
    if found is not None:
        return found
    chunk_len, limit = p.chunk_len or default(p), p.gpu.shared_limit
    if shared_bytes(chunk_len) <= limit:
        return None
    text = "needs {} bytes of shared memory at head sizes {} and {} and chunk_len={}, {} has {}"
    return text, shared_bytes(chunk_len), p.K, p.V, chunk_len, p.gpu.arch, limit


def fitting(p: Problem, chunk_lens: Sequence[int], shared_bytes: Callable[[int], int]) -> int:
    """Return the first of these chunks for which a block has shared memory, or the shortest."""
    return next((each for each in chunk_lens if shared_bytes(each) <= p.gpu.shared_limit), min(chunk_lens))


def framed_lengths(p: Problem, lengths: Sequence[int]) -> list[int]:
    """Return the chunk lengths whose frames no decay leaves, if the bound holds."""
    return [each for each in lengths if is_framed(p.storage, p.decay, p.decay_bound, each)]


def check_heads(p: Problem, backend: str) -> None:
    """Raise UnsupportedConfigError if a grid has no room for all heads."""
    if p.H > MOST_HEADS:
        raise UnsupportedConfigError(f"backend: {backend!r} takes up to {MOST_HEADS} heads, got {p.H}; use 'recurrent'")


def sequences_and_heads(p: Problem) -> tuple[Any, Any]:
    """Return two extents of a grid that has a block for each sequence and head, in the order that kernels take."""
    return (p.H, launched(p)) if p.is_pooled else (p.N, p.H)


def launched(p: Problem) -> Any:
    """Return how many sequences a launch is for."""
    return p.N // p.waves if p.is_pooled else p.N


# ---- sizes -------------------------------------------------------------------------------------------------------


def padded(size: int) -> int:
    """Return a head size as the chunked kernels see it: the next multiple of 32."""
    return -(-size // 32) * 32


def power(value: float) -> int:
    """Return the least power of two that is not below."""
    return 1 << (max(math.ceil(value), 1) - 1).bit_length()


def vector(size: int, storage: str) -> int:
    """Return how many elements of a row are read at once: 16 bytes or four elements, where rows consist of them."""
    return 16 // BYTES[storage] if size % 8 == 0 else 4 if size % 4 == 0 else 1


def vectors(p: Problem) -> dict[str, int]:
    """Return how many neighbours of each input the kernels in chunks read at once; of dy as many as of v."""
    widths = {name: vector(getattr(p, p.op.inputs[name][-1]), p.types[name]) for name in p.present}
    return {**widths, "dy": widths["v"]}


def together(p: Problem, *names: str) -> int:
    """Return how many neighbours of each of these inputs (or of dy) can be read at once: 4, 2 or 1."""
    vectors = dict(zip((*p.op.names, "dy"), p.vectors, strict=False))
    return math.gcd(4, p.T, *(vectors.get(name, 4) for name in names))


# ---- what kernels take -------------------------------------------------------------------------------------------


def given(p: Problem) -> dict[str, Any]:
    """Return what the arguments of all kernels are bound to: numbers by name, and null where a call has nothing."""
    bind: dict[str, Any] = {
        "tokens": p.T, "heads": p.H, "key_heads": p.G, "sequences": p.N, "batch": p.B, "channels": p.C,
        "scale": p.scale,
    }  # fmt: skip
    for name in ("w", "u"):
        if name not in p.types:
            bind |= {name: None, f"d{name}": None}
    if not p.has_final_state:
        bind["final_state"] = None
    if not p.has_initial_state:
        bind["grad_initial_state"] = None
    return bind | _of_pool(p)


def _of_pool(p: Problem) -> dict[str, Any]:
    return {"waves": p.waves} if p.is_pooled else {"pieces": None, "slot_stride": 0, "wave": 0, "waves": 1}


def types(p: Problem, *without: str) -> dict[str, Parameter]:
    """Return the types of the templates, and what tells the op from others that take the same templates."""
    chosen: dict[str, Parameter] = {
        "T_IO": p.types["v"], "T_STATE": p.state_type, "DECAY": p.decay, "STATE_LAYOUT": p.state_layout,
        **{f"T_{name.upper()}": p.types[name] for name in p.op.wide if name in p.types}, **p.op.constants,
    }  # fmt: skip
    return {name: value for name, value in chosen.items() if name not in without}


def forward_results(p: Problem) -> dict[str, Result]:
    """Return y, and the final state where it is needed."""
    y = Result((p.B, p.T, p.H, p.V), p.types["v"])
    return {"y": y, "final_state": Result(p.state_shape, p.state_type)} if p.has_final_state else {"y": y}


def backward_results(p: Problem) -> dict[str, Result]:
    """Return the gradients of all inputs, and of the initial state where there is one."""
    gradients = {f"d{name}": Result(p.shape(name), p.types[name]) for name in p.present}
    if p.has_initial_state:
        gradients["grad_initial_state"] = Result(p.state_shape, p.state_type)
    return gradients


# ---- sums, and copies of states ----------------------------------------------------------------------------------


# Of inputs that are the same for every token, kernels leave a gradient for each sequence: "rows". Those of "chunks" and
# "segments" are added up to these.


def sequence_gradients(p: Problem, count: Any = None, of: str = "rows") -> dict[str, Any]:
    """Return the bytes of these gradients, one for each sequence by default."""
    count = p.N if count is None else count
    return {f"d{name}_{of}": 4 * count * math.prod(p.shape(name)) for name in p.op.fixed}


def to_sequence_gradients(p: Problem, of: str = "rows") -> dict[str, str]:
    """Return the names for kernels that leave them."""
    return {f"d{name}": f"d{name}_{of}" for name in p.op.fixed}


def sum_gradients(p: Problem, of: str, count: Any, packed_chunk_len: int = 0, tokens: Any = 0) -> list[Step]:
    """Return the steps that add up so many of a sequence, or one for each chunk that a packed one has."""
    return [
        sum_rows(
            f"d{name}_{of}", f"d{name}_rows", p.N, count, math.prod(p.shape(name)), "fp32", packed_chunk_len, tokens
        )
        for name in p.op.fixed
    ]  # fmt: skip


def largest_decay(p: Problem) -> int:
    """Return what half a chunk may decay in its frame, for kernels that halve the others; else 0."""
    return LARGEST_DECAY[p.types["v"]] if p.has_halves else 0


def level_tiles(p: Problem, tile_bytes: int, shared_bytes: int, blocks: int) -> dict[str, Parameter]:
    """Return the parameters of a kernel that halves chunks: the tiles for rows of levels, and shared memory.

    One for each level, so that all are multiplied at once, where an SM has room for as many blocks then; else two, as
    levels take turns in those of the operands.
    """
    levels = p.chunk_len.bit_length() - 1
    most = shared_bytes + (levels - 2) * tile_bytes
    if p.has_halves and p.gpu.has_room(blocks, most):
        return {"LEVEL_TILES": levels, "SHARED_BYTES": most}
    return {"LEVEL_TILES": 2, "SHARED_BYTES": shared_bytes}


def kept_frames(p: Problem) -> dict[str, Any]:
    """Return the bytes of what tells the backward how many chunks of a head the forward had in frames."""
    return {"framed": 4 * p.N * p.H} if p.has_halves else {}


def framed(p: Problem) -> str | None:
    """Return what a kernel's argument of that name is bound to."""
    return "framed" if p.has_halves and p.training else None


def halved(p: Problem) -> str | None:
    """Return what a kernel's argument of that name is bound to."""
    return "halved" if p.has_halves else None


OVERLAPS_SINCE = 90  # of the architectures, on which a launch may begin beside the one before it


def ways(p: Problem) -> tuple[bool, ...]:
    """Return the launches of a kernel that meets decays: in frames and, where decays may leave these, halved."""
    return (False, True) if p.has_halves else (False,)


def step_of_places(
    name: str, parameters: Mapping[str, Parameter], grid: tuple[Any, Any, Any], bind: Mapping[str, Any],
    by_halves: bool, arch: str | None = None,
) -> Step:  # fmt: skip
    """Return the launch of a kernel for all places at once, or for halved ones, which blocks look for."""
    if by_halves:
        grid = (math.prod(grid), 1, 1)
    return Step(name, name, parameters, grid, bind, arch, is_resident=by_halves)


def sum_rows(
    rows: str, sums: str, groups: Any, group_rows: Any, width: Any, storage: str, packed_chunk_len: int = 0,
    tokens: Any = 0, thread_columns: int = 0,
) -> Step:  # fmt: skip
    """Return the step that adds up rows of floats, group by group in a fixed order.

    Groups have `group_rows`, or where sequences are packed a row for each chunk that there can be. Threads share a
    column; but where rows are few and long, a thread has `thread_columns`, which divide the width.
    """
    columns, vector = (_SUM_THREADS, thread_columns) if thread_columns else (_SUM_COLUMNS, 1)
    parameters: dict[str, Parameter] = {
        "T_OUT": storage, "NUM_THREADS": _SUM_THREADS, "COLUMNS": columns, "VECTOR": vector,
    }  # fmt: skip
    bind = {
        "rows": rows, "sums": sums, "cu_seqlens": "cu_seqlens" if packed_chunk_len else None, "group_rows": group_rows,
        "width": width, "chunk_len": packed_chunk_len, "tokens": tokens,
    }  # fmt: skip
    return Step("sum_rows", "sum_rows", parameters, (-(-width // (columns * vector)), groups, 1), bind)


def with_sums(schedule: Schedule, wanted: Collection[str]) -> Schedule:
    """Return a schedule of these results alone, which also adds up what blocks leave of some: one launch for all.

    A result has floats of as many rows as blocks in scratch, `<name>_rows`. Each column is added up as by `sum_rows`.
    """
    several = [(name, result) for name, result in schedule.results.items() if f"{name}_rows" in schedule.scratch]
    several = [each for each in several if each[0] in wanted]
    sums = [_sum_buffers(several[i : i + _MOST_BUFFERS], schedule) for i in range(0, len(several), _MOST_BUFFERS)]
    schedule = replace(schedule, steps=(*schedule.steps, *sums))
    unwanted = [name for name in schedule.results if name not in wanted]
    return without(schedule, unwanted) if unwanted else schedule


def _sum_buffers(several: Sequence[tuple[str, Result]], schedule: Schedule) -> Step:
    bind: dict[str, Any] = {}
    blocks: Any = 0
    for place in range(_MOST_BUFFERS):
        name, result = several[place] if place < len(several) else (None, Result((0,), "fp32"))
        width = math.prod(result.shape)
        rows = None if name is None else f"{name}_rows"
        group_rows = 0 if rows is None else schedule.scratch[rows] // (4 * max(width, 1))
        blocks = blocks + -(-width // _SUM_COLUMNS)
        bind |= {
            f"rows{place}": rows, f"sums{place}": name, f"group_rows{place}": group_rows, f"width{place}": width,
            f"storage{place}": STORAGE_TYPES.index(result.dtype),
        }  # fmt: skip
    parameters: dict[str, Parameter] = {"NUM_THREADS": _SUM_THREADS, "COLUMNS": _SUM_COLUMNS}
    return Step("sum_buffers", "sum_buffers", parameters, (blocks, 1, 1), bind)


def copy_states(
    p: Problem, source: str, target: str, source_type: str, target_type: str, source_layout: str, target_layout: str,
    row_step: Any = 1, first_row: Any = 0,
) -> Step:  # fmt: skip
    """Return the step that copies states to another type or layout: of a sequence row i * row_step + first_row."""
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "T_FROM": source_type, "T_TO": target_type, "NUM_THREADS": _COPY_THREADS,
        "FROM_VK": source_layout == "vk", "TO_VK": target_layout == "vk", "RAGGED": False,
        "FROM_POOL": p.is_pooled and source == "initial_state", "TO_POOL": p.is_pooled and target == "final_state",
    }  # fmt: skip
    grid = (p.N * p.H, -(-p.V // _COPY_TILE), -(-p.K // _COPY_TILE))
    bind = {
        "from": source, "to": target, "cu_seqlens": None, "heads": p.H, "row_step": row_step, "first_row": first_row,
        "tokens": 0, "segment_len": 0, **_of_pool(p),
    }  # fmt: skip
    return Step("copy_states", "copy_states", parameters, grid, bind)


# ---- geometry ----------------------------------------------------------------------------------------------------

# Threads that a multiprocessor shall have room for, which leaves them 255, 168 and 128 registers each.
_RESIDENT_THREADS = (256, 384, 512)


class Candidate(NamedTuple):
    """A geometry of one direction that can be measured."""

    direction: str
    chunk_len: int
    num_threads: int
    blocks: int  # that a multiprocessor shall have room for


def candidates_of_blocks(direction: str, chunk_len: int, threads: int, shared_bytes: int, gpu: Gpu) -> list[Candidate]:
    """Return blocks of so many threads, with each number of them on an SM: it matters by the registers of a thread."""
    several = {gpu.resident_blocks(threads, resident, shared_bytes) for resident in _RESIDENT_THREADS}
    return [Candidate(direction, chunk_len, threads, blocks) for blocks in sorted(several)]


def blocks_of(p: Problem, direction: str, by_rule: int) -> int:
    """Return how many blocks fit on an SM: as tuned, or by the rule."""
    return (p.forward_blocks if direction == "forward" else p.backward_blocks) or by_rule


def named(parameters: Mapping[str, Parameter], *names: str) -> dict[str, Parameter]:
    """Return some of the parameters, those that are there."""
    return {name: parameters[name] for name in names if name in parameters}
