"""The scan backend: heads of up to 1024 channels taken apart, for wkv7 in 16-bit dtypes.

What a chunk's tokens do to a state does not depend on the state, so one kernel prepares it for all chunks at once. A
second one walks over the chunks with the state, a block for some of its value rows; backwards, with the gradient of the
state. What the keys' gradients need of both states is theirs to leave behind, and two more kernels make these gradients
for all chunks at once. `backend="split"` is the caller's name for it where heads are larger than the chunked kernels'.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Extent, Plan
from rwkv_jit.ops import chunked, prepared, scan_geometry
from rwkv_jit.ops.interface import Inputs, Options, Saved
from rwkv_jit.ops.layout import address, addresses, slots, state_shape, strides
from rwkv_jit.signatures import BySignature

_MATRICES = 4  # token matrices of a chunk that pass from kernel to kernel

specialize, nearest = scan_geometry.specialize, scan_geometry.nearest


# ---- what is kept ------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Floats of what passes from kernel to kernel."""

    operands: Any
    matrices: Any
    frames: Any
    states: Any  # of one direction
    solutions: Any  # U, or dX
    gradients: Any  # of the token matrices


def _sizes(inputs: Inputs, packed: bool, chunk_len: int) -> _Sizes:
    batch, tokens, heads, value_size = inputs["v"].shape
    width, places = scan_geometry.channels(inputs["r"].shape[3]), slots(inputs, packed, chunk_len) * heads
    return _Sizes(
        operands=places * (4 * chunk_len * width // 2),
        matrices=places * (_MATRICES * scan_geometry.triangle_bytes(chunk_len) // 4),
        frames=places * (2 * width),
        states=places * (width * scan_geometry.values(value_size) // 2),
        solutions=(batch * tokens * heads * value_size + 7) // 8 * 4,  # the next one begins at 16 bytes
        gradients=places * (_MATRICES * scan_geometry.triangle_bytes(chunk_len) // 4),
    )


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: all that its kernels leave behind."""
    assert options.chunk_len is not None  # the rule that chose this backend has chosen it too
    return Saved(sum(_sizes(inputs, packed, options.chunk_len)[:5]))


# ---- launches ----------------------------------------------------------------------------------------------------


_LOOKS = 512  # blocks that look at decays, where sequences and heads are few


class _Plans(NamedTuple):
    """The launches of one direction in their order, and what passes between them."""

    parts: Sequence[tuple[Plan, ...]]  # of the chunks; a scan in several parts runs beside the other kernels
    sizes: _Sizes
    carried: int | None  # floats that the scan hands from part to part; None where it has no room for them
    look: Plan | None = None  # at the decays of a guarded call

    def carried_state(self, like: Tensor) -> list[Tensor | None]:
        """Return what the scan takes for it behind its other addresses."""
        if self.carried is None:
            return []
        return [torch.empty(self.carried, dtype=torch.float32, device=like.device) if self.carried else None]


class _Part(NamedTuple):
    """Some chunks of every sequence, as one launch of each kernel takes them."""

    begin: int  # where the scan begins and ends, in the order in which it meets chunks
    end: int
    first: int  # of them in a sequence
    chunks: int  # of each of so many sequences; where one launch takes all there are, they count as one
    sequences: int = 1


def _parts(count: int, chunks: int, places: int, sequences: int, backward: bool) -> list[_Part]:
    """Return the parts of a walk over `chunks` of each sequence, which have `places` in all.

    Forwards they are equal. Backwards, where what follows a part takes longer than the next one, they double.
    """
    if count == 1:
        return [_Part(0, places, 0, places)]
    shares = [2**i - 1 if backward else i for i in range(count + 1)]
    ends = [chunks * share // shares[-1] for share in shares]
    return [
        _Part(begin, end, chunks - end if backward else begin, end - begin, sequences) for begin, end in pairwise(ends)
    ]


_plans: BySignature[_Plans] = BySignature()


def _prepare(
    inputs: Inputs, direction: str, state_dtype: torch.dtype, packed: bool, options: Options, like: Sequence[Tensor],
    training: bool,
) -> _Plans:  # fmt: skip
    """Find or compile the kernels of one direction and prepare their launches."""
    key = (direction, training, inputs.op, inputs.sequences, packed, state_dtype, options, tensors.signature(like))
    known = _plans.get(key)
    if known is None:
        known = _plans.keep(key, _new_plans(inputs, direction, state_dtype, packed, options, like, training))
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
        types = prepared.types_of(inputs, options, state_dtype)
        arch, also = tensors.arch(device), tensors.also(device)
        chunks = 0 if packed else -(-tokens // length)

        def walk_of(direction: str) -> scan_geometry.Walk:
            return scan_geometry.walk(
                head_size, value_size, arch, length, options.num_threads, direction == "backward",
                inputs.sequences * heads, chunks, tensors.multiprocessors(device),
            )  # fmt: skip

        def requests(direction: str, state: str) -> list[kernel.Request]:
            return scan_geometry.requests(
                inputs.op, direction, head_size, value_size, types | {"T_STATE": state}, arch, length,
                options.num_threads, walk_of(direction).few_heads, also=also,
            )  # fmt: skip

        wanted = requests(direction, tensors.STORAGE[state_dtype])
        others = requests("backward", "fp32") if training else []  # they compile side by side
        if direction == "forward" and options.guarded:
            wanted.append(scan_geometry.look_request(inputs.op, head_size, types, length, arch, also))
        prepared.check_capture(inputs.op, [*wanted, *others], device)
        prepared.validate(inputs)
        found = kernel.get_all([*others, *wanted])[len(others) :]
        places = slots(inputs, packed, length)
        counts = [struct.pack("q", count) for count in (tokens, heads, inputs.sequences)]
        keys = [strides(inputs[name]) for name in ("r", "w", "k", "a", "b")]
        scale = struct.pack("f", options.scale)

        def plan(index: int, grid: Extent, addresses: int, constants: Sequence[bytes]) -> Plan:
            of, entry = found[index], wanted[index].template.name
            threads, shared = int(of.parameters["NUM_THREADS"]), int(of.parameters["SHARED_BYTES"])
            return Plan(of, entry, device, grid, (threads, 1, 1), "Q" * addresses, constants, shared)

        def part_plan(index: int, part: _Part, of_chunk: int, addresses: int, constants: Sequence[bytes]) -> Plan:
            """Return the launch of a kernel with so many blocks for each chunk of a part."""
            grid = (part.chunks * of_chunk, heads, part.sequences)
            return plan(index, grid, addresses, [*constants, struct.pack("i", part.first)])

        def look() -> Plan:
            threads, parts = int(wanted[2].parameters["NUM_THREADS"]), -(-_LOOKS // max(inputs.sequences * heads, 1))
            constants = [strides(inputs["w"]), *counts[:2], struct.pack("i", parts)]
            grid, entry = (inputs.sequences * parts, heads, 1), wanted[2].template.name
            return Plan(found[2], entry, device, grid, (threads, 1, 1), "QQQ", constants)

        scan = wanted[direction == "forward"]
        row_blocks = inputs.sequences * -(-value_size // scan_geometry.rows_of(scan.parameters))
        in_groups = scan.template.name.endswith("group_scan")
        parts = _parts(walk_of(direction).parts, chunks, places, inputs.sequences, direction == "backward")

        def scan_plan(values: Tensor, part: _Part) -> Plan:
            of_parts = [struct.pack("2i", part.begin, part.end)] if in_groups else []
            constants = [strides(values), *counts[:2], *of_parts]
            return plan(wanted.index(scan), (row_blocks, heads, 1), 10 + len(of_parts), constants)

        sizes, carried = _sizes(inputs, packed, length), None
        if in_groups:
            carried = heads * row_blocks * scan_geometry.block_state(scan.parameters) if len(parts) > 1 else 0
        if direction == "forward":
            constants = [*keys, *counts, scale, struct.pack("i", training)]
            forward = [(part_plan(0, part, 1, 9, constants), scan_plan(inputs["v"], part)) for part in parts]
            return _Plans(forward, sizes, carried, look() if options.guarded else None)
        of_tokens = [strides(inputs["v"]), strides(like[-1]), *counts]
        of_keys = [*map(strides, inputs.streamed), strides(like[-1]), *counts, scale]
        slabs = scan_geometry.channels(head_size) // scan_geometry.SLAB
        backward = [
            (scan_plan(like[-1], part), part_plan(1, part, 1, 6, of_tokens), part_plan(2, part, slabs, 18, of_keys))
            for part in parts
        ]
        return _Plans(backward, sizes, carried)


class Forward(NamedTuple):
    """A forward that can be run with any tensors of its signature."""

    op: str
    names: tuple[str, ...]
    sequences: int
    state_dtype: torch.dtype
    options: Options

    @property
    def takes_any_decay(self) -> bool:
        """Return whether its results are right for any decay."""
        return False

    def run(
        self,
        given: Sequence[Tensor],
        state: Tensor | None,
        bounds: Tensor | None,
        output_final_state: bool,
        save: bool,
        into: Tensor | None = None,
        flags: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run it, as `interface.Forward` says."""
        inputs = chunked.readable(Inputs(self.op, self.names, tuple(given), (), self.sequences))
        v = inputs["v"]
        state = None if state is None else state.contiguous()
        bounds = None if bounds is None else tensors.packing(bounds, v.shape[1])
        plans = _prepare(inputs, "forward", self.state_dtype, bounds is not None, self.options, inputs.streamed, save)
        y, final = torch.empty_like(v, memory_format=torch.contiguous_format), None
        if output_final_state:
            final = torch.empty(state_shape(inputs, self.options), dtype=self.state_dtype, device=v.device)
        sizes = plans.sizes[:5] if save else plans.sizes[:3]
        buffer = torch.empty(sum(sizes), dtype=torch.float32, device=v.device) if into is None else into
        operands, matrices, frames, states, solutions = (*addresses(buffer, sizes), 0, 0)[:5]
        keys = [inputs[name] for name in ("r", "w", "k", "a", "b")]
        if plans.look is not None:
            assert flags is not None
            tensors.launch(plans.look, [*map(address, (inputs["w"], bounds, flags.zero_()))])
        of_prepare = [*map(address, (*keys, bounds)), operands, matrices, frames]
        carried = plans.carried_state(v)
        of_scan = [
            *map(address, (v, state, bounds)), operands, matrices, frames, y.data_ptr(), solutions, states,
            address(final), *map(address, carried),
        ]  # fmt: skip
        side = tensors.side_stream(v.device.index) if len(plans.parts) > 1 else None
        for prepare, scan in plans.parts:
            tensors.launch(prepare, of_prepare)
            if side is not None:
                side.follow()
            tensors.launch(scan, of_scan, side)
        if side is not None:
            side.join()
        return y, final, buffer if save else None


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Find or compile what a forward launches; with `training` the backward's kernels compile beside it."""
    readable = chunked.readable(inputs)
    _prepare(readable, "forward", state_dtype, packed, options, readable.streamed, training)
    return Forward(inputs.op, inputs.names, inputs.sequences, state_dtype, options)


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
    plans = _prepare(inputs, "backward", torch.float32, bounds is not None, options, (*inputs.streamed, dy), False)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.streamed]
    of = dict(zip(inputs.names, grads, strict=True))
    initial = None
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(torch.float32).contiguous()
    if want_initial_state:
        initial = torch.empty(state_shape(inputs, options), dtype=torch.float32, device=dy.device)
    operands, matrices, frames, states, solutions = addresses(saved, plans.sizes[:5])
    own = plans.sizes[3:]
    buffer = torch.empty(sum(own), dtype=torch.float32, device=dy.device)
    e, dx, gradients = addresses(buffer, own)
    carried = plans.carried_state(dy)
    of_scan = [
        *map(address, (dy, grad_final_state, bounds)), operands, matrices, frames, address(of["v"]), dx, e,
        address(initial), *map(address, carried),
    ]  # fmt: skip
    of_tokens = [*map(address, (inputs["v"], dy, bounds)), solutions, dx, gradients]
    keys = [of[name].data_ptr() for name in ("r", "w", "k", "a", "b")]
    of_keys = [*map(address, (*inputs.streamed, dy, bounds)), solutions, dx, states, e, gradients, *keys]
    side = tensors.side_stream(dy.device.index) if len(plans.parts) > 1 else None
    if side is not None:
        side.follow()
    for scan, token_gradients, key_gradients in plans.parts:
        tensors.launch(scan, of_scan, side)
        if side is not None:
            side.join()
        tensors.launch(token_gradients, of_tokens)
        tensors.launch(key_gradients, of_keys)
    return grads, [], initial
