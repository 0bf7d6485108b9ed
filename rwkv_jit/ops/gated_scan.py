"""The scan backend of gated linear attention and its kin: heads with more value rows or channels than a block holds.

The forward is that of `gated`, a block for some value rows of a head. Backwards the same kernel walks over the chunks
with the gradient of the state, makes dv and leaves behind what another one needs, which makes the other gradients for
all chunks at once. `backend="split"` is the caller's name for it, as for wkv7's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, gated, prepared, recurrent
from rwkv_jit.ops.prepared import Inputs, Options
from rwkv_jit.template import Parameter

CHUNK_LENS: tuple[int, ...] = (32, 64, 16)
LARGEST_KEY, LARGEST_VALUE = 256, 1024
_KEY_THREADS = 128  # of the kernel that makes the gradients of all chunks at once: a warp for 16 channels
_MOST_KEY_THREADS = {16: 384, 32: 384, 64: 256}  # of a multiprocessor, by the chunk: what leaves them registers enough

nearest, saved_for = gated.nearest, gated.saved_for


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
    if head_size > LARGEST_KEY or value_size > LARGEST_VALUE:
        text = "takes keys up to {} and values up to {}, got {} and {} for v"
        return text, LARGEST_KEY, LARGEST_VALUE, head_size, value_size
    if chunk_len is not None and chunk_len not in CHUNK_LENS:
        return "takes chunk_len 16, 32 or 64, got {}", chunk_len
    target = arch()
    if chunked.arch_number(target) < chunked.LEAST_ARCH:
        return "needs an architecture from sm_{} on, got {}", chunked.LEAST_ARCH, target
    length = chunk_len or default_chunk_len(head_size, target)
    if not _fits(head_size, length, target):
        text = "needs more shared memory at head sizes {} and {} and chunk_len={} than the {} bytes of {}"
        return text, head_size, value_size, length, chunked.shared_limit(target), target
    return None


def default_chunk_len(head_size: int, arch: str, decay: str = "sigmoid", decay_bound: float | None = None) -> int:
    """Return the chunk that is fastest on an H200, of those that shared memory allows.

    Of 64 tokens what is left behind is half as much, but the state spills. A shorter one where that keeps a promise
    about the decays.
    """
    fitting = [length for length in CHUNK_LENS if _fits(head_size, length, arch)]
    bounded = [length for length in fitting if chunked.is_bounded(decay, decay_bound, length)]
    return (bounded or fitting or CHUNK_LENS[-1:])[0]


def _fits(head_size: int, chunk_len: int, arch: str) -> bool:
    """Return whether there is shared memory enough whatever the value size and the threads are."""
    scan = gated.shared_bytes("forward", head_size, LARGEST_VALUE, chunk_len, gated.MOST_THREADS)
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
    """Return the scan of one direction; `chosen` overrides the geometry, the same for few heads."""
    length, backward = chunk_len or default_chunk_len(head_size, arch), direction == "backward"
    if backward:
        types = {**types, "T_STATE": "fp32"}
    return gated.scan_request(
        op, backward, head_size, value_size, types, arch, length, num_threads, chosen, also
    )  # fmt: skip


def companions(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], arch: str,
    chunk_len: int | None, also: tuple[str, ...] = (),
) -> list[kernel.Request]:  # fmt: skip
    """Return the other kernels of a direction: for the backward the one that makes the gradients of all chunks."""
    if direction == "forward":
        return []
    of, length = recurrent.OPS[op], chunk_len or default_chunk_len(head_size, arch)
    shared = _key_shared_bytes(length)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHUNK_LEN": length, "NUM_THREADS": _KEY_THREADS,
        "BLOCKS_PER_SM": gated.resident_blocks(_KEY_THREADS, _MOST_KEY_THREADS[length], shared, arch),
        "SHARED_BYTES": shared, **{n: types[n] for n in ("T_IO", "T_W", "T_U", "DECAY") if n in types},
        **of.constants, **of.of_backward,
    }  # fmt: skip
    return [kernel.Request(template.library("gla_key_gradients"), parameters, arch, also)]


# ---- launches ----------------------------------------------------------------------------------------------------


class _Plans(NamedTuple):
    """The launches of a backward in their order."""

    scan: Plan
    keys: Plan


_plans: dict[Any, _Plans] = {}


def _backward_requests(inputs: Inputs, options: Options) -> list[kernel.Request]:
    """Return the kernels of the backward in the order of their launches."""
    head_size, value_size, device = inputs["r"].shape[3], inputs["v"].shape[3], inputs["v"].device.index
    types = prepared.types_of(inputs, options, torch.float32)
    given = (inputs.op, "backward", head_size, value_size, types, tensors.arch(device), options.chunk_len)
    also = tensors.also(device)
    return [specialize(*given, options.num_threads, also=also), *companions(*given, also)]


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> prepared.Forward:
    """Find or compile what a forward launches; with `training` the backward's kernels compile beside it."""
    if training:
        with torch.cuda.device(inputs["v"].device.index):
            wanted = [prepared.request(gated, inputs, "forward", options, state_dtype)]
            wanted += _backward_requests(inputs, options)
            prepared.check_capture(inputs.op, wanted, inputs["v"].device.index)
            kernel.get_all(wanted)
    return prepared.prepare_forward(gated, inputs, state_dtype, packed, options, False)


def _slots(inputs: Inputs, packed: bool, chunk_len: int) -> int:
    """Return how many chunks there can be; packed sequences fit whatever their lengths are."""
    batch, tokens = inputs["v"].shape[:2]
    return tokens // chunk_len + inputs.sequences if packed else batch * ((tokens + chunk_len - 1) // chunk_len)


def _prepare(inputs: Inputs, dy: Tensor, packed: bool, options: Options) -> _Plans:
    """Find or compile the kernels of the backward and prepare their launches."""
    signature = tensors.signature((*inputs.streamed, *inputs.fixed, dy))
    key = (inputs.op, inputs.sequences, packed, options, signature)
    known = _plans.get(key)
    if known is None:
        if len(_plans) >= prepared.MOST_SIGNATURES:
            _plans.clear()
        with torch.cuda.device(dy.device.index):
            known = _plans[key] = _new_plans(inputs, dy, packed, options)
    return known


def _new_plans(inputs: Inputs, dy: Tensor, packed: bool, options: Options) -> _Plans:
    kernel.check_not_forked()
    requests, device = _backward_requests(inputs, options), dy.device.index
    prepared.check_capture(inputs.op, requests, device)
    of_scan, of_keys = kernel.get_all(requests)
    (_, tokens, heads, value_size), head_size = dy.shape, inputs["r"].shape[3]
    sizes = [struct.pack("q", tokens), struct.pack("q", heads)]
    sequences, scale = struct.pack("q", inputs.sequences), struct.pack("f", options.scale)

    def strides(*values: Tensor) -> list[bytes]:
        """In the order of the templates: q, k, what has value rows, and w before a dy of its own."""
        missing = gated.strides_of_missing(inputs)
        of_w = missing[0] if missing else inputs["w"].stride()[:3]
        first = [x.stride()[:3] for x in (inputs["r"], inputs["k"], values[0])]
        return [struct.pack("3q", *each) for each in (*first, of_w, *[x.stride()[:3] for x in values[1:]])]

    def plan(of: kernel.Kernel, grid: tuple[int, int, int], addresses: int, constants: Sequence[bytes]) -> Plan:
        threads, shared = int(of.parameters["NUM_THREADS"]), int(of.parameters["SHARED_BYTES"])
        return Plan(of, of.name, device, grid, (threads, 1, 1), "Q" * addresses, constants, shared)

    row_blocks = -(-value_size // int(of_scan.parameters["ROWS"]))
    slots = _slots(inputs, packed, int(of_scan.parameters["CHUNK_LEN"]))
    slabs = -(-chunked.padded(head_size) * 2 // _KEY_THREADS)
    return _Plans(
        scan=plan(of_scan, (inputs.sequences, heads, row_blocks), 11, [*strides(dy), *sizes, scale]),
        keys=plan(of_keys, (slots * slabs, heads, 1), 13, [*strides(inputs["v"], dy), *sizes, sequences, scale]),
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
    streamed = [tensors.readable(x, chunked.vector(x)) for x in inputs.streamed]
    fixed = [tensors.readable(x, chunked.vector(x)) for x in inputs.fixed]
    inputs = Inputs(inputs.op, inputs.names, tuple(streamed), tuple(fixed), inputs.sequences)
    dy = tensors.readable(dy, chunked.vector(dy))
    bounds = None if cu_seqlens is None else tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    plans = _prepare(inputs, dy, bounds is not None, options)
    heads, value_size = dy.shape[2:]
    head_size, length = inputs["r"].shape[3], options.chunk_len
    assert length is not None  # the rule that chose this backend has chosen it too
    initial = None
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(torch.float32).contiguous()
    if want_initial_state:
        sizes = (value_size, head_size) if options.state_layout == "vk" else (head_size, value_size)
        initial = torch.empty((inputs.sequences, heads, *sizes), dtype=torch.float32, device=dy.device)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in streamed]
    # A row for every chunk there can be; those that there are not stay zero.
    slots = _slots(inputs, bounds is not None, length)
    parts = [torch.zeros((slots, *x.shape), dtype=torch.float32, device=x.device) for x in fixed]
    e = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
    given = dict(zip(inputs.names, (*streamed, *fixed), strict=True))
    made = dict(zip(inputs.names, (*grads, *parts), strict=True))
    q, k, v, w, u = (_address(given.get(name)) for name in ("r", "k", "v", "w", "u"))
    dq, dk, dv, dw, du = (_address(made.get(name)) for name in ("r", "k", "v", "w", "u"))
    at_dy, at_final, at_bounds, at_initial = map(_address, (dy, grad_final_state, bounds, initial))
    tensors.launch(plans.scan, [q, k, at_dy, w, u, at_final, at_bounds, dv, at_initial, e.data_ptr(), 0])
    tensors.launch(
        plans.keys, [q, k, v, w, u, at_dy, at_bounds, saved.data_ptr(), e.data_ptr(), dq, dk, dw, du]
    )  # fmt: skip
    return grads, [_of_sequences(x, bounds, inputs.sequences, dy.shape[1], length) for x in parts], initial


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _of_sequences(parts: Tensor, bounds: Tensor | None, sequences: int, tokens: int, chunk_len: int) -> Tensor:
    """Return the sums of chunks over each sequence, in a fixed order."""
    if bounds is None:
        return parts.view(sequences, parts.shape[0] // max(sequences, 1), *parts.shape[1:]).sum(1)
    # The first slot of a sequence, as sequence.cuh counts; a wrong bound gives wrong values but never a stray access.
    first = bounds.clamp(0, tokens) // chunk_len + torch.arange(sequences + 1, device=bounds.device)
    return torch.segment_reduce(parts, "sum", offsets=first, axis=0)


def forget() -> None:
    """Drop all prepared launches."""
    _plans.clear()
