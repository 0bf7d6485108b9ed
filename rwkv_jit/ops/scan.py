"""The scan backend: heads of up to 1024 channels taken apart, for wkv7 in 16-bit dtypes with a bounded decay.

What a chunk's tokens do to a state does not depend on the state, so one kernel prepares it for all chunks at once. A
second one walks over the chunks with the state, a block for some of its value rows; backwards, with the gradient of the
state. What the keys' gradients need of both states is theirs to leave behind, and two more kernels make these gradients
for all chunks at once. `backend="split"` is the caller's name for it where heads are larger than the chunked kernels'.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, prepared
from rwkv_jit.ops.prepared import Inputs, Options, Saved
from rwkv_jit.template import Parameter

CHUNK_LENS = (64, 32)
LARGEST_HEAD = 1024
SLAB = 64  # channels that are moved and prepared at once
_ROWS = (64, 32)  # value rows that a block of the scan may hold
_STAGES = (3, 2)
_MATRICES = 4  # token matrices of a chunk that pass from kernel to kernel
_GROUP_CHUNK_LEN, _GROUP_THREADS = 64, 384  # of the scan with products of warp groups
_GROUP_STATE = 512 * 64  # channels times value rows that its registers hold
_MOST_THREADS = 256  # of a multiprocessor, with 255 registers each; twice as many have 128


# ---- what it can do ----------------------------------------------------------------------------------------------


def obstacle(
    op: str,
    dtype: torch.dtype,
    head_size: int,
    value_size: int,
    arch: Callable[[], str],
    chunk_len: int | None = None,
    decay: str = "sigmoid",
    decay_bound: float | None = None,
) -> tuple[Any, ...] | None:
    """Return why these kernels cannot do a call, as `chunked.obstacle` does; None where they can."""
    if op not in chunked.OPS:
        return "has kernels for {}, got {}", ", ".join(chunked.OPS), op
    if dtype not in chunked.DTYPES:
        return "takes float16 and bfloat16, got {}", dtype
    if head_size > LARGEST_HEAD or value_size > LARGEST_HEAD:
        return "takes head sizes up to {}, got {} and {} for v", LARGEST_HEAD, head_size, value_size
    if chunk_len is not None and chunk_len not in CHUNK_LENS:
        return "takes chunk_len 32 or 64 at head sizes above {}, got {}", chunked.LARGEST_HEAD, chunk_len
    length = chunk_len or CHUNK_LENS[-1]
    if not _is_bounded(decay, decay_bound, length):
        text = (
            "needs a bounded decay: decay='sigmoid' or decay_bound of at least {:g} at chunk_len={}, got decay={!r}, "
            "decay_bound={}"
        )
        return text, -2 * chunked.LARGEST_DECAY / length, length, decay, decay_bound
    target = arch()
    if chunked.arch_number(target) < chunked.LEAST_ARCH:
        return "needs an architecture from sm_{} on, got {}", chunked.LEAST_ARCH, target
    if not _fits(head_size, length, target):
        text = "needs more shared memory at head sizes {} and {} and chunk_len={} than the {} bytes of {}"
        return text, head_size, value_size, length, chunked.shared_limit(target), target
    return None


def default_chunk_len(
    head_size: int, value_size: int, arch: str, decay: str = "sigmoid", decay_bound: float | None = None
) -> int:
    """Return the longest chunk whose decay and shared memory allow it: what is left behind goes by the chunk."""
    for length in CHUNK_LENS:
        if _is_bounded(decay, decay_bound, length) and _fits(head_size, length, arch):
            return length
    return CHUNK_LENS[-1]


def _is_bounded(decay: str, decay_bound: float | None, chunk_len: int) -> bool:
    return decay == "sigmoid" or (decay_bound is not None and -decay_bound * chunk_len / 2 <= chunked.LARGEST_DECAY)


def _fits(head_size: int, chunk_len: int, arch: str) -> bool:
    others = max(_prepare_shared_bytes(chunk_len), _keys_shared_bytes(chunk_len))
    if others > chunked.shared_limit(arch):
        return False
    return _has_groups(chunk_len, arch) or bool(_scans(head_size, chunk_len, arch))


# ---- geometry ----------------------------------------------------------------------------------------------------


def channels(head_size: int) -> int:
    """Return a head's channels as the kernels see them, in slabs that the warps of a row can share evenly."""
    slabs = SLAB * (1 if head_size <= 4 * SLAB else 2 if head_size <= 8 * SLAB else 4)
    return -(-head_size // slabs) * slabs


def values(value_size: int) -> int:
    """Return the value rows of a state that is left behind."""
    return -(-value_size // max(_ROWS)) * max(_ROWS)


def _key_warps(head_size: int, few_heads: bool) -> int:
    """Return how many warps share the channels of the same rows: up to 256 channels each."""
    slabs = channels(head_size) // SLAB
    legal = [warps for warps in (1, 2, 4) if slabs % warps == 0 and slabs // warps <= 4]
    return max([warps for warps in legal if warps <= (4 if few_heads else 2)] or legal)


def _triangle(chunk_len: int) -> int:
    """Return the bytes of a lower triangle of 16 x 16 blocks."""
    blocks = chunk_len // 16
    return 512 * (blocks * (blocks + 1) // 2)


def _prepare_shared_bytes(chunk_len: int) -> int:
    tiles, lower, totals = 8 * chunk_len * SLAB * 2, chunk_len // 16 * 4 * 16 * 20, 4 * chunk_len * 8
    return tiles + 6 * _triangle(chunk_len) + lower + totals


def _scan_shared_bytes(
    head_size: int, chunk_len: int, backward: bool, key_warps: int, threads: int, stages: int
) -> int:
    row_warps = threads // 32 // key_warps
    ring = stages * key_warps * 2 * 2 * chunk_len * SLAB
    rows = 3 * 2 * chunk_len * (16 * row_warps + 8)
    matrices = 2 * (3 if backward else 2) * _triangle(chunk_len)
    share = max(chunk_len // key_warps, 16) // 8 if key_warps > 1 else 1
    parts = row_warps * key_warps * max(key_warps - 1, 1) * 2 * share * 512
    solution = row_warps * (chunk_len // 16 if key_warps > 1 else 1) * 512
    return ring + matrices + rows + 4 * channels(head_size) + parts + solution


def _tokens_shared_bytes(chunk_len: int) -> int:
    return 2 * 4 * 2 * chunk_len * SLAB


def _keys_shared_bytes(chunk_len: int) -> int:
    operands = raw = 4 * 2 * chunk_len * SLAB
    stage = max(2 * 2 * chunk_len * SLAB + 2 * 2 * 32 * SLAB, 4 * _triangle(chunk_len))
    products, growth = 2 * 4 * chunk_len * (SLAB + 8), 4 * (chunk_len + 1) * (SLAB + 8)
    sums = 4 * chunk_len * 8 + (chunk_len // 8 + chunk_len // 32) * 4 * SLAB
    return operands + max(stage + raw, 2 * stage, products) + growth + sums


def _has_groups(chunk_len: int, arch: str) -> bool:
    """Return whether warps can multiply in groups of four: where there are such products, and chunks that they fit."""
    return arch in ("sm_90", "sm_90a") and chunk_len == _GROUP_CHUNK_LEN


class GroupScan(NamedTuple):
    """How a block of the scan with products of warp groups is cut."""

    value_rows: int
    cluster: int  # blocks that fetch operands for each other
    stages: int


def _group_scan(head_size: int, value_size: int, chunk_len: int, arch: str, few_heads: bool) -> GroupScan | None:
    """Return what such a block is in both directions; None where the architecture or the chunk has no such products.

    Two blocks of a cluster halve what is read of the operands; more of them, and of small ones two, wait for each other
    longer than that saves.
    """
    if not _has_groups(chunk_len, arch):
        return None
    rows = next(rows for rows in _ROWS if channels(head_size) * rows <= _GROUP_STATE)
    rows = _ROWS[-1] if few_heads else rows
    blocks = -(-value_size // rows)
    cluster = 2 if rows == _ROWS[0] and blocks % 2 == 0 else 1
    fixed = _group_scan_shared_bytes(head_size, rows, 0)
    stage = _group_scan_shared_bytes(head_size, rows, 1) - fixed
    fitting = (chunked.shared_limit(arch) - fixed) // stage
    return GroupScan(rows, cluster, min(fitting, 2 * channels(head_size) // SLAB + 1))


def _group_scan_shared_bytes(head_size: int, value_rows: int, stages: int) -> int:
    tile = 2 * _GROUP_CHUNK_LEN * SLAB
    image, outputs = 2 * channels(head_size) * value_rows, 8 * 16 * 2 * (value_rows + 8)
    return image + 3 * tile + outputs + stages * (2 * tile + 16)


class Scan(NamedTuple):
    """How a block of the scan is cut."""

    key_warps: int
    num_threads: int
    stages: int


def _scans(head_size: int, chunk_len: int, arch: str, few_heads: bool = False) -> list[Scan]:
    """Return what a block of the scan may be in both directions, the fastest on an H200 first.

    Many rows for a block read the operands least often, and few make more blocks; as do more warps for the same rows.
    """
    warps, limit = _key_warps(head_size, few_heads), chunked.shared_limit(arch)
    rows = _ROWS[-1:] if few_heads else _ROWS
    return [
        each
        for each in (Scan(warps, 2 * count * warps, stages) for count in rows for stages in _STAGES)
        if each.num_threads <= _MOST_THREADS and _scan_shared_bytes(head_size, chunk_len, True, *each) <= limit
    ]


def _rows_of(parameters: Mapping[str, Parameter]) -> int:
    """Return the value rows of a block of a scan."""
    if "VALUE_ROWS" in parameters:
        return int(parameters["VALUE_ROWS"])
    return 16 * (int(parameters["NUM_THREADS"]) // 32 // int(parameters["KEY_WARPS"]))


def _requests(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
    chunk_len: int | None, num_threads: int | None, few_heads: bool, chosen: Mapping[str, Parameter] | None = None,
    also: tuple[str, ...] = (),
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels of one direction in the order of their launches; `chosen` overrides the scan's parameters."""
    length = chunk_len or default_chunk_len(head_size, value_size, arch)
    sizes: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHANNELS": channels(head_size), "CHUNK_LEN": length,
    }  # fmt: skip
    of_keys: dict[str, Parameter] = {name: types[name] for name in ("T_IO", "T_W", "DECAY")}
    backward, threads = direction == "backward", 4 * length

    def request(
        name: str, shared: int, threads: int, most_threads: int, more: Mapping[str, Parameter]
    ) -> kernel.Request:
        """With as many blocks at once as shared memory, and registers for so many threads, leave room for."""
        blocks = max(1, min(most_threads // threads, chunked.shared_per_multiprocessor(arch) // (shared + 1024)))
        own: dict[str, Parameter] = {"NUM_THREADS": threads, "BLOCKS_PER_SM": blocks, "SHARED_BYTES": shared}
        return kernel.Request(template.library(f"{op}_{name}"), {**sizes, **own, **more}, arch, also)

    kept: dict[str, Parameter] = {"VALUES": values(value_size)}
    of_scan = {**types, **kept, "BACKWARD": backward}
    groups = None
    if num_threads in (None, _GROUP_THREADS):
        groups = _group_scan(head_size, value_size, length, arch, few_heads and num_threads is None)
    if groups is not None:
        shared = _group_scan_shared_bytes(head_size, groups.value_rows, groups.stages)
        cut: dict[str, Parameter] = {
            "VALUE_ROWS": groups.value_rows, "CLUSTER": groups.cluster, "STAGES": groups.stages,
            "NUM_THREADS": _GROUP_THREADS, "SHARED_BYTES": shared,
        }  # fmt: skip
        # Nothing but an sm_90 runs code for sm_90, and only with the extension has it these products.
        scan = kernel.Request(
            template.library(f"{op}_group_scan"), {**sizes, **of_scan, **cut, **(chosen or {})}, "sm_90a"
        )
    else:
        each = _scan(head_size, length, arch, few_heads, num_threads)
        cut = {"KEY_WARPS": each.key_warps, "STAGES": each.stages}
        shared = _scan_shared_bytes(head_size, length, backward, *each)
        scan = request("scan", shared, each.num_threads, _MOST_THREADS, {**of_scan, **cut, **(chosen or {})})
    if not backward:
        of_keys["BY_LANES"] = groups is not None
        return [request("prepare", _prepare_shared_bytes(length), threads, 2 * _MOST_THREADS, of_keys), scan]
    return [
        scan,
        request("token_gradients", _tokens_shared_bytes(length), threads, 2 * _MOST_THREADS, of_keys),
        request("key_gradients", _keys_shared_bytes(length), threads, 2 * _MOST_THREADS, {**of_keys, **kept}),
    ]


def _scan(head_size: int, chunk_len: int, arch: str, few_heads: bool, num_threads: int | None) -> Scan:
    """Return how a block of the scan is cut, `num_threads` alone deciding where it is given.

    Raises
    ------
    UnsupportedConfigError
        No block has so many threads.
    """
    many = _scans(head_size, chunk_len, arch)
    scans = (_scans(head_size, chunk_len, arch, True) or many) if few_heads and num_threads is None else many
    fitting = [each for each in scans if num_threads in (None, each.num_threads)]
    if not fitting:
        legal = {each.num_threads for each in scans}
        if _group_scan(head_size, head_size, chunk_len, arch, False) is not None:
            legal.add(_GROUP_THREADS)
        raise UnsupportedConfigError(
            f"num_threads must be {' or '.join(map(str, sorted(legal)))} at head size {head_size} and "
            f"chunk_len={chunk_len} on {arch}, got {num_threads}"
        )
    return fitting[0]


def specialize(
    op: str,
    direction: str,
    head_size: int,
    value_size: int,
    types: Mapping[str, Parameter],
    arch: str,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    few_heads: bool = False,
    chosen: Mapping[str, Parameter] | None = None,
    also: tuple[str, ...] = (),
) -> kernel.Request:
    """Return the template and parameters of the scan in one direction; `chosen` overrides the geometry."""
    found = _requests(
        op, direction, head_size, value_size, types, arch, chunk_len, num_threads, few_heads, chosen, also
    )
    return found[direction == "forward"]


def companions(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
    chunk_len: int | None, also: tuple[str, ...] = (), num_threads: int | None = None,
) -> list[kernel.Request]:  # fmt: skip
    """Return the other kernels of a direction."""
    found = _requests(op, direction, head_size, value_size, types, arch, chunk_len, num_threads, False, None, also)
    return [request for request in found if not request.template.name.endswith("_scan")]


def nearest(request: kernel.Request, argument: str, value: int) -> None:
    """Name nothing: `obstacle` and `specialize` have refused what is not legal."""


# ---- what is kept ------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Floats of what passes from kernel to kernel."""

    operands: Any
    matrices: Any
    frames: Any
    states: Any  # of one direction
    solutions: Any  # U, or dX
    gradients: Any  # of the token matrices


def _slots(inputs: Inputs, packed: bool, chunk_len: int) -> Any:
    """Return how many chunks there can be; packed sequences fit whatever their lengths are."""
    batch, tokens = inputs["v"].shape[:2]
    return tokens // chunk_len + inputs.sequences if packed else batch * ((tokens + chunk_len - 1) // chunk_len)


def _sizes(inputs: Inputs, packed: bool, chunk_len: int) -> _Sizes:
    batch, tokens, heads, value_size = inputs["v"].shape
    width, places = channels(inputs["r"].shape[3]), _slots(inputs, packed, chunk_len) * heads
    return _Sizes(
        operands=places * (4 * chunk_len * width // 2),
        matrices=places * (_MATRICES * _triangle(chunk_len) // 4),
        frames=places * (2 * width),
        states=places * (width * values(value_size) // 2),
        solutions=(batch * tokens * heads * value_size + 7) // 8 * 4,  # the next one begins at 16 bytes
        gradients=places * (_MATRICES * _triangle(chunk_len) // 4),
    )


def _addresses(buffer: Tensor, sizes: Iterable[int]) -> list[int]:
    """Return where each of these begins in a buffer of floats."""
    found, address = [], buffer.data_ptr()
    for size in sizes:
        found.append(address)
        address += 4 * size
    return found


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: all that its kernels leave behind."""
    assert options.chunk_len is not None  # the rule that chose this backend has chosen it too
    return Saved(sum(_sizes(inputs, packed, options.chunk_len)[:5]))


def vector(x: Tensor) -> int:
    """Return how many elements of a row are read at once, as in the chunked kernels."""
    return chunked.vector(x)


# ---- launches ----------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """A forward that can be run with any tensors of its signature."""

    op: str
    names: tuple[str, ...]
    sequences: int
    state_dtype: torch.dtype
    options: Options


class _Plans(NamedTuple):
    """The launches of one direction in their order, and what passes between them."""

    launches: tuple[Plan, ...]
    sizes: _Sizes


_plans: dict[Any, _Plans] = {}


def _readable(inputs: Inputs, *more: Tensor) -> tuple[Inputs, list[Tensor]]:
    """Return tensors that kernels can read in place."""
    found = [
        tensors.aligned(x.contiguous() if tensors.needs_copy(x, vector(x)) else x, vector(x))
        for x in (*inputs.streamed, *more)
    ]
    count = len(inputs.streamed)
    return Inputs(inputs.op, inputs.names, tuple(found[:count]), inputs.fixed, inputs.sequences), found[count:]


def _strides(x: Tensor) -> bytes:
    return struct.pack("3q", *x.stride()[:3])


def _prepare(
    inputs: Inputs, direction: str, state_dtype: torch.dtype, packed: bool, options: Options, like: Sequence[Tensor],
    training: bool,
) -> _Plans:  # fmt: skip
    """Find or compile the kernels of one direction and prepare their launches."""
    key = (direction, training, inputs.op, inputs.sequences, packed, state_dtype, options, tensors.signature(like))
    known = _plans.get(key)
    if known is None:
        if len(_plans) >= prepared.MOST_SIGNATURES:
            _plans.clear()
        known = _plans[key] = _new_plans(inputs, direction, state_dtype, packed, options, like, training)
    return known


def _new_plans(
    inputs: Inputs, direction: str, state_dtype: torch.dtype, packed: bool, options: Options, like: Sequence[Tensor],
    training: bool,
) -> _Plans:  # fmt: skip
    kernel.check_not_forked()
    batch, tokens, heads, value_size = inputs["v"].shape
    head_size, device, length = inputs["r"].shape[3], inputs["v"].device.index, options.chunk_len
    assert length is not None
    if heads > chunked.MOST_HEADS:
        raise UnsupportedConfigError(
            f"backend: 'split' takes up to {chunked.MOST_HEADS} heads, got {heads}; use 'recurrent'"
        )
    with torch.cuda.device(device):
        row_blocks = inputs.sequences * heads * (values(value_size) // max(_ROWS))
        few_heads = row_blocks < tensors.multiprocessors(device)
        types = prepared.types_of(inputs, options, state_dtype)
        arch, also = tensors.arch(device), tensors.also(device)

        def requests(direction: str, state: str) -> list[kernel.Request]:
            return _requests(
                inputs.op, direction, head_size, value_size, types | {"T_STATE": state}, arch, length,
                options.num_threads, few_heads, None, also,
            )  # fmt: skip

        wanted = requests(direction, tensors.STORAGE[state_dtype])
        others = requests("backward", "fp32") if training else []  # they compile side by side
        prepared.check_capture(inputs.op, [*wanted, *others], device)
        prepared.validate(inputs)
        found = kernel.get_all([*others, *wanted])[len(others) :]
        slots = _slots(inputs, packed, length)
        counts = [struct.pack("q", count) for count in (tokens, heads, inputs.sequences)]
        keys = [_strides(inputs[name]) for name in ("r", "w", "k", "a", "b")]
        scale = struct.pack("f", options.scale)

        def plan(index: int, blocks: int, addresses: int, constants: Sequence[bytes]) -> Plan:
            of, entry = found[index], wanted[index].template.name
            threads, shared = int(of.parameters["NUM_THREADS"]), int(of.parameters["SHARED_BYTES"])
            return Plan(of, entry, device, (blocks, heads, 1), (threads, 1, 1), "Q" * addresses, constants, shared)

        def scan_plan(index: int, values: Tensor) -> Plan:
            blocks = inputs.sequences * -(-value_size // _rows_of(wanted[index].parameters))
            return plan(index, blocks, 10, [_strides(values), *counts[:2]])

        sizes = _sizes(inputs, packed, length)
        if direction == "forward":
            saves = struct.pack("i", training)
            first = plan(0, slots, 9, [*keys, *counts, scale, saves])
            return _Plans((first, scan_plan(1, inputs["v"])), sizes)
        v, dy = _strides(inputs["v"]), _strides(like[-1])
        of_tokens = plan(1, slots, 6, [v, dy, *counts])
        all_strides, blocks = [*map(_strides, inputs.streamed), dy], slots * (channels(head_size) // SLAB)
        of_keys = plan(2, blocks, 18, [*all_strides, *counts, scale])
        return _Plans((scan_plan(0, like[-1]), of_tokens, of_keys), sizes)


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Find or compile what a forward launches; with `training` the backward's kernels compile beside it."""
    readable, _ = _readable(inputs)
    _prepare(readable, "forward", state_dtype, packed, options, readable.streamed, training)
    return Forward(inputs.op, inputs.names, inputs.sequences, state_dtype, options)


def forward(
    known: Forward,
    given: Sequence[Tensor],
    state: Tensor | None,
    bounds: Tensor | None,
    output_final_state: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run a prepared forward on tensors of its signature, as `prepared.forward` does."""
    inputs, _ = _readable(Inputs(known.op, known.names, tuple(given), (), known.sequences))
    v = inputs["v"]
    state = None if state is None else state.contiguous()
    bounds = None if bounds is None else tensors.packing(bounds, v.shape[1])
    plans = _prepare(inputs, "forward", known.state_dtype, bounds is not None, known.options, inputs.streamed, save)
    y, final = torch.empty_like(v, memory_format=torch.contiguous_format), None
    if output_final_state:
        final = torch.empty(_state_shape(inputs, known.options), dtype=known.state_dtype, device=v.device)
    sizes = plans.sizes[:5] if save else plans.sizes[:3]
    buffer = torch.empty(sum(sizes), dtype=torch.float32, device=v.device)
    operands, matrices, frames, states, solutions = (*_addresses(buffer, sizes), 0, 0)[:5]
    keys = [inputs[name] for name in ("r", "w", "k", "a", "b")]
    prepare, scan = plans.launches
    tensors.launch(prepare, [*map(_address, (*keys, bounds)), operands, matrices, frames])
    tensors.launch(
        scan,
        [*map(_address, (v, state, bounds)), operands, matrices, frames, y.data_ptr(), solutions, states,
         _address(final)],
    )  # fmt: skip
    return y, final, buffer if save else None


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _state_shape(inputs: Inputs, options: Options) -> tuple[int, ...]:
    heads, value_size = inputs["v"].shape[2:]
    head_size = inputs["r"].shape[3]
    sizes = (value_size, head_size) if options.state_layout == "vk" else (head_size, value_size)
    return (inputs.sequences, heads, *sizes)


def backward(
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    options: Options,
    want_initial_state: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Run the backward; the arguments and results of `prepared.backward`."""
    inputs, (dy,) = _readable(inputs, dy)
    bounds = None if cu_seqlens is None else tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    plans = _prepare(inputs, "backward", torch.float32, bounds is not None, options, (*inputs.streamed, dy), False)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.streamed]
    of = dict(zip(inputs.names, grads, strict=True))
    initial = None
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(torch.float32).contiguous()
    if want_initial_state:
        initial = torch.empty(_state_shape(inputs, options), dtype=torch.float32, device=dy.device)
    operands, matrices, frames, states, solutions = _addresses(saved, plans.sizes[:5])
    own = plans.sizes[3:]
    buffer = torch.empty(sum(own), dtype=torch.float32, device=dy.device)
    e, dx, gradients = _addresses(buffer, own)
    scan, of_tokens, of_keys = plans.launches
    tensors.launch(
        scan,
        [*map(_address, (dy, grad_final_state, bounds)), operands, matrices, frames, _address(of["v"]), dx, e,
         _address(initial)],
    )  # fmt: skip
    tensors.launch(of_tokens, [*map(_address, (inputs["v"], dy, bounds)), solutions, dx, gradients])
    keys = [of[name].data_ptr() for name in ("r", "w", "k", "a", "b")]
    given = (*inputs.streamed, dy, bounds)
    tensors.launch(of_keys, [*map(_address, given), solutions, dx, states, e, gradients, *keys])
    return grads, [], initial


def forget() -> None:
    """Drop all prepared launches."""
    _plans.clear()
