"""The scan backend of gated linear attention and its kin: heads with more value rows or channels than a block holds.

The forward is that of `gated`, a block for some value rows of a head. Backwards the same kernel walks over the chunks
with the gradient of the state, makes dv and leaves behind what another one needs, which makes the other gradients for
all chunks at once. On sm_90 `gated_groups` has kernels of its own for this. `backend="split"` is the caller's name for
it, as for wkv7's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, gated, gated_groups, prepared, recurrent
from rwkv_jit.ops.interface import Inputs, Options, Saved
from rwkv_jit.ops.layout import address, slots, state_shape, strides
from rwkv_jit.signatures import BySignature
from rwkv_jit.template import Parameter

CHUNK_LENS: tuple[int, ...] = (32, 64, 16)
LARGEST_KEY = 256  # without warp groups
_KEY_THREADS = 128  # of the kernel that makes the gradients of all chunks at once: a warp for 16 channels
_MOST_KEY_THREADS = {16: 384, 32: 384, 64: 256}  # of a multiprocessor, by the chunk: what leaves them registers enough

nearest = gated.nearest


# ---- what it can do ----------------------------------------------------------------------------------------------


def obstacle(
    op: str,
    dtype: torch.dtype,
    head_size: int,
    value_size: int,
    arch: Callable[[], str],
    chunk_len: int | None = None,
) -> tuple[Any, ...] | None:
    """Return why these kernels cannot do a call, as `chunked.obstacle` does; None where they can."""
    if dtype not in chunked.DTYPES:
        return "takes float16 and bfloat16, got {}", dtype
    largest = gated_groups.LARGEST_HEAD
    if head_size > largest or value_size > largest:
        return "takes head sizes up to {}, got {} and {} for v", largest, head_size, value_size
    if chunk_len is not None and chunk_len not in CHUNK_LENS:
        return "takes chunk_len 16, 32 or 64, got {}", chunk_len
    target = arch()
    if chunked.arch_number(target) < chunked.LEAST_ARCH:
        return "needs an architecture from sm_{} on, got {}", chunked.LEAST_ARCH, target
    length = chunk_len or default_chunk_len(head_size, target)
    in_groups = gated_groups.can(target, length, None)
    if head_size > LARGEST_KEY and not in_groups:
        text = "takes keys above {} on sm_90 with chunk_len={} alone, got {} on {} with chunk_len={}"
        return text, LARGEST_KEY, gated_groups.CHUNK_LEN, head_size, target, length
    if not in_groups and not _fits(head_size, length, target):
        text = "needs more shared memory at head sizes {} and {} and chunk_len={} than the {} bytes of {}"
        return text, head_size, value_size, length, chunked.shared_limit(target), target
    return None


def default_chunk_len(
    head_size: int,
    arch: str,
    decay: str = "sigmoid",
    decay_bound: float | None = None,
    num_threads: int | None = None,
) -> int:
    """Return the chunk that is fastest on an H200, of those that shared memory allows.

    64 tokens where warp groups take so many threads. Without these what is left behind would be half as much, but the
    state spills. A shorter one where that keeps a promise about the decays.
    """
    of_groups = [length for length in CHUNK_LENS if gated_groups.can(arch, length, num_threads)]
    others = [length for length in CHUNK_LENS if head_size <= LARGEST_KEY and _fits(head_size, length, arch)]
    fitting = [*of_groups, *others]
    bounded = [length for length in fitting if chunked.is_bounded(decay, decay_bound, length)]
    return (bounded or fitting or CHUNK_LENS[-1:])[0]


def _fits(head_size: int, chunk_len: int, arch: str) -> bool:
    """Return whether there is shared memory enough whatever the value size and the threads are."""
    scan = gated.shared_bytes("forward", head_size, gated_groups.LARGEST_HEAD, chunk_len, gated.MOST_THREADS)
    return max(scan, _key_shared_bytes(chunk_len)) <= chunked.shared_limit(arch)


# ---- geometry ----------------------------------------------------------------------------------------------------


def _key_shared_bytes(chunk_len: int) -> int:
    """Return the size of Smem in gla_key_gradients, whose blocks have half as many channels as threads."""
    slab, segments = _KEY_THREADS // 2, 4
    operands, d_pairs = 2 * 2 * chunk_len * (slab + 8), 2 * chunk_len * (chunk_len + 8)
    raw, pieces = 2 * 2 * chunk_len * slab, 2 * 2 * 2 * chunk_len * (32 + 8)
    totals, growth, diagonal = segments * 4 * slab, 4 * (chunk_len + 1) * (slab + 4), 4 * chunk_len
    return operands + d_pairs + max(raw, pieces) + totals + growth + diagonal


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
    """Return the scan of one direction; `chosen` overrides the geometry. Few heads differ with warp groups alone."""
    length = chunk_len or default_chunk_len(head_size, arch, num_threads=num_threads)
    backward = direction == "backward"
    if backward:
        types = {**types, "T_STATE": "fp32"}
    if gated_groups.can(arch, length, num_threads):
        return gated_groups.scan_request(direction, head_size, value_size, types, few_heads, chosen)
    _check_threads(head_size, value_size, num_threads)
    return gated.scan_request(
        op, backward, head_size, value_size, types, arch, length, num_threads, chosen, also
    )  # fmt: skip


def _check_threads(head_size: int, value_size: int, num_threads: int | None) -> None:
    """Check that keys which warp groups alone take leave them their threads."""
    if head_size > LARGEST_KEY:
        raise UnsupportedConfigError(
            f"num_threads must be {gated_groups.THREADS} at head sizes {head_size} and {value_size}, got {num_threads}"
        )


def companions(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
    chunk_len: int | None, also: tuple[str, ...] = (), guarded: bool = False,
) -> list[kernel.Request]:  # fmt: skip
    """Return the other kernels of a direction: for the backward the one that makes the gradients of all chunks.

    With warp groups also what prepares the forward.
    """
    length = chunk_len or default_chunk_len(head_size, arch)
    if gated_groups.can(arch, length, None):
        return [gated_groups.other_request(op, direction, head_size, value_size, types, guarded)]
    given = (op, head_size, value_size, types, arch, length, also)
    return [] if direction == "forward" else [_key_request(*given)]


def _key_request(
    op: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str, chunk_len: int,
    also: tuple[str, ...],
) -> kernel.Request:  # fmt: skip
    """Return the kernel that makes the gradients of all chunks."""
    of, shared = recurrent.OPS[op], _key_shared_bytes(chunk_len)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHUNK_LEN": chunk_len, "NUM_THREADS": _KEY_THREADS,
        "BLOCKS_PER_SM": gated.resident_blocks(_KEY_THREADS, _MOST_KEY_THREADS[chunk_len], shared, arch),
        "SHARED_BYTES": shared, **{n: types[n] for n in ("T_IO", "T_W", "T_U", "DECAY") if n in types},
        **of.constants, **of.of_backward,
    }  # fmt: skip
    return kernel.Request(template.library("gla_key_gradients"), parameters, arch, also)


# ---- launches ----------------------------------------------------------------------------------------------------


class _Plans(NamedTuple):
    """The launches of a backward in their order."""

    scan: Plan
    keys: Plan


_plans: BySignature[_Plans] = BySignature()


def _backward_requests(inputs: Inputs, options: Options) -> list[kernel.Request]:
    """Return the kernels of the backward in the order of their launches."""
    head_size, value_size, device = inputs["r"].shape[3], inputs["v"].shape[3], inputs["v"].device.index
    types, also = prepared.types_of(inputs, options, torch.float32), tensors.also(device)
    assert options.chunk_len is not None  # the rule that chose this backend has chosen it too
    given = (head_size, value_size, types, tensors.arch(device), options.chunk_len)
    of_scan = gated.scan_request(inputs.op, True, *given, options.num_threads, None, also)
    return [of_scan, _key_request(inputs.op, *given, also)]


def _in_groups(inputs: Inputs, options: Options) -> bool:
    """Return whether warp groups take a call."""
    assert options.chunk_len is not None  # the rule that chose this backend has chosen it too
    return gated_groups.can(tensors.arch(inputs["v"].device.index), options.chunk_len, options.num_threads)


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: a state per head and chunk, with warp groups the chunks' operands too."""
    if _in_groups(inputs, options):
        return gated_groups.saved_for(inputs, packed)
    return chunked.saved_for(inputs, packed, options)


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> prepared.Forward | gated_groups.Forward:
    """Find or compile what a forward launches; with `training` the backward's kernels compile beside it."""
    if _in_groups(inputs, options):
        return gated_groups.prepare_forward(inputs, state_dtype, packed, options, training)
    _check_threads(inputs["r"].shape[3], inputs["v"].shape[3], options.num_threads)
    if training:
        with torch.cuda.device(inputs["v"].device.index):
            wanted = [prepared.request(gated, inputs, "forward", options, state_dtype)]
            wanted += _backward_requests(inputs, options)
            prepared.check_capture(inputs.op, wanted, inputs["v"].device.index)
            kernel.get_all(wanted)
    return prepared.prepare_forward(gated, inputs, state_dtype, packed, options, False)


def _prepare(inputs: Inputs, dy: Tensor, packed: bool, options: Options) -> _Plans:
    """Find or compile the kernels of the backward and prepare their launches."""
    signature = tensors.signature((*inputs.streamed, *inputs.fixed, dy))
    key = (inputs.op, inputs.sequences, packed, options, signature)
    known = _plans.get(key)
    if known is None:
        with torch.cuda.device(dy.device.index):
            known = _plans.keep(key, _new_plans(inputs, dy, packed, options))
    return known


def _new_plans(inputs: Inputs, dy: Tensor, packed: bool, options: Options) -> _Plans:
    kernel.check_not_forked()
    requests, device = _backward_requests(inputs, options), dy.device.index
    prepared.check_capture(inputs.op, requests, device)
    of_scan, of_keys = kernel.get_all(requests)
    (_, tokens, heads, value_size), head_size = dy.shape, inputs["r"].shape[3]
    sizes = [struct.pack("q", tokens), struct.pack("q", heads)]
    sequences, scale = struct.pack("q", inputs.sequences), struct.pack("f", options.scale)

    missing = recurrent.strides_of_missing(inputs)
    of_w = struct.pack("3q", *missing[0]) if missing else strides(inputs["w"])

    def all_strides(values: Tensor, *dy: Tensor) -> list[bytes]:
        """In the order of the templates: q, k, what has value rows, and w before a dy of its own."""
        return [*map(strides, (inputs["r"], inputs["k"], values)), of_w, *map(strides, dy)]

    def plan(of: kernel.Kernel, grid: tuple[int, int, int], addresses: int, constants: Sequence[bytes]) -> Plan:
        threads, shared = int(of.parameters["NUM_THREADS"]), int(of.parameters["SHARED_BYTES"])
        return Plan(of, of.name, device, grid, (threads, 1, 1), "Q" * addresses, constants, shared)

    row_blocks = -(-value_size // int(of_scan.parameters["ROWS"]))
    places = slots(inputs, packed, int(of_scan.parameters["CHUNK_LEN"]))
    slabs = -(-chunked.padded(head_size) * 2 // _KEY_THREADS)
    return _Plans(
        scan=plan(of_scan, (inputs.sequences, heads, row_blocks), 11, [*all_strides(dy), *sizes, scale]),
        keys=plan(of_keys, (places * slabs, heads, 1), 13, [*all_strides(inputs["v"], dy), *sizes, sequences, scale]),
    )


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
    inputs = chunked.readable(inputs)
    dy = tensors.readable(dy, chunked.vector(dy))
    bounds = None if cu_seqlens is None else tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    length, device = options.chunk_len, dy.device
    assert length is not None  # the rule that chose this backend has chosen it too
    initial = None
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(torch.float32).contiguous()
    if want_initial_state:
        initial = torch.empty(state_shape(inputs, options), dtype=torch.float32, device=device)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs.streamed]
    # A row for every chunk there can be; those that there are not stay zero.
    rows = slots(inputs, bounds is not None, length)
    parts = [torch.zeros((rows, *x.shape), dtype=torch.float32, device=device) for x in inputs.fixed]
    run = gated_groups.backward if _in_groups(inputs, options) else _backward
    made = dict(zip(inputs.names, (*grads, *parts), strict=True))
    run(inputs, dy, grad_final_state, bounds, saved, options, initial, made)
    return grads, [_of_sequences(x, bounds, inputs.sequences, dy.shape[1], length) for x in parts], initial


def _backward(
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    bounds: Tensor | None,
    saved: Tensor,
    options: Options,
    initial: Tensor | None,
    grads: Mapping[str, Tensor],
) -> None:
    """Run the backward without warp groups, as `gated_groups.backward` does."""
    plans = _prepare(inputs, dy, bounds is not None, options)
    e = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
    given = dict(zip(inputs.names, (*inputs.streamed, *inputs.fixed), strict=True))
    q, k, v, w, u = (address(given.get(name)) for name in ("r", "k", "v", "w", "u"))
    dq, dk, dv, dw, du = (address(grads.get(name)) for name in ("r", "k", "v", "w", "u"))
    at_dy, at_final, at_bounds, at_initial = map(address, (dy, grad_final_state, bounds, initial))
    tensors.launch(plans.scan, [q, k, at_dy, w, u, at_final, at_bounds, dv, at_initial, e.data_ptr(), 0])
    tensors.launch(
        plans.keys, [q, k, v, w, u, at_dy, at_bounds, saved.data_ptr(), e.data_ptr(), dq, dk, dw, du]
    )  # fmt: skip


def _of_sequences(parts: Tensor, bounds: Tensor | None, sequences: int, tokens: int, chunk_len: int) -> Tensor:
    """Return the sums of chunks over each sequence, in a fixed order."""
    if bounds is None:
        return parts.view(sequences, parts.shape[0] // max(sequences, 1), *parts.shape[1:]).sum(1)
    # The first slot of a sequence, as sequence.cuh counts; a wrong bound gives wrong values but never a stray access.
    first = bounds.clamp(0, tokens) // chunk_len + torch.arange(sequences + 1, device=bounds.device)
    return torch.segment_reduce(parts, "sum", offsets=first, axis=0)
