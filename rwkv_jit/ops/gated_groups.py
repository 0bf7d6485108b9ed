"""What `gated_scan` does on sm_90, with products of warp groups: heads of gated linear attention and its kin that no
block holds.

One kernel makes the operands of all chunks at once. A second one walks over the chunks with the state, a block for some
of its value rows; backwards with the gradient of the state, from the same operands. A third one makes the gradients of
the keys' side for all chunks, from the states that the second has left.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, prepared, recurrent
from rwkv_jit.ops.interface import LARGEST_DECAY, Inputs, Options, Saved
from rwkv_jit.ops.layout import address, addresses, slots, state_shape, strides
from rwkv_jit.signatures import BySignature
from rwkv_jit.template import Parameter

CHUNK_LEN, THREADS = 64, 384
LARGEST_HEAD = 1024
SLAB = 64  # channels that are moved and prepared at once
_ROWS = (64, 32)  # value rows that a block of the scan may hold
_STATE = 512 * 64  # channels times value rows that its registers hold
_MOST_STAGES = 8
_PREPARE_THREADS, _KEY_THREADS = 256, 128
_KEY_BLOCKS, _KEY_STAGES = 2, 3


# ---- geometry ----------------------------------------------------------------------------------------------------


def can(arch: str, chunk_len: int, num_threads: int | None) -> bool:
    """Return whether these kernels take a call: where there are such products, and chunks and blocks that they fit."""
    return arch in ("sm_90", "sm_90a") and chunk_len == CHUNK_LEN and num_threads in (None, THREADS)


def _slabs(size: int) -> int:
    return -(-size // SLAB)


def _tile(rows: int) -> int:
    """Return the bytes of so many rows of a slab."""
    return 2 * rows * SLAB


def rows(head_size: int, few_heads: bool) -> int:
    """Return how many value rows a block of the scan holds."""
    most = next(rows for rows in _ROWS if _slabs(head_size) * SLAB * rows <= _STATE)
    return _ROWS[-1] if few_heads else most


def _scan_shared_bytes(head_size: int, value_rows: int, stages: int) -> int:
    images, outputs = 2 * _slabs(head_size) * _tile(value_rows), 8 * 16 * 2 * (value_rows // 2 + 8)
    return images + 2 * _tile(CHUNK_LEN) + outputs + stages * (2 * _tile(CHUNK_LEN) + 16)


def _key_shared_bytes() -> int:
    growth = -(-4 * (CHUNK_LEN + 1) * (SLAB + 4) // 1024) * 1024  # a tile behind it begins at a multiple of 1024
    pieces, sums = _KEY_STAGES * 2 * _tile(CHUNK_LEN), 4 * 4 * SLAB + 4 * 4 * SLAB + 4 * CHUNK_LEN
    return -(-(2 * _tile(CHUNK_LEN) + max(pieces, growth + _tile(CHUNK_LEN)) + sums) // 1024) * 1024


def _prepare_shared_bytes() -> int:
    return 6 * _tile(CHUNK_LEN) + 8 * 4 * SLAB + 4 * CHUNK_LEN


def scan_request(
    direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], few_heads: bool = False,
    chosen: Mapping[str, Parameter] | None = None,
) -> kernel.Request:  # fmt: skip
    """Return the walk over the chunks in one direction; `chosen` overrides its parameters."""
    value_rows = rows(head_size, few_heads)
    fixed = _scan_shared_bytes(head_size, value_rows, 0)
    fitting = (chunked.shared_limit("sm_90") - fixed) // (_scan_shared_bytes(head_size, value_rows, 1) - fixed)
    stages = min(_MOST_STAGES, fitting)
    # What looks at decays is another kernel, and so is what reads w and u.
    own = {name: x for name, x in {**types, **(chosen or {})}.items() if name not in ("T_W", "T_U", "LARGEST_DECAY")}
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "CHUNK_LEN": CHUNK_LEN, "NUM_THREADS": THREADS,
        "VALUE_ROWS": value_rows, "STAGES": stages, "BACKWARD": direction == "backward",
        "SHARED_BYTES": _scan_shared_bytes(head_size, value_rows, stages), **own,
    }  # fmt: skip
    # Nothing but an sm_90 runs code for sm_90, and only with the extension has it these products.
    return kernel.Request(template.library("gla_group_scan"), parameters, "sm_90a")


def other_request(
    op: str, direction: str, head_size: int, value_size: int, types: Mapping[str, Parameter], guarded: bool
) -> kernel.Request:
    """Return the other kernel of a direction: what prepares the forward, or ends the backward."""
    of = recurrent.OPS[op]
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "CHUNK_LEN": CHUNK_LEN,
        **{n: types[n] for n in ("T_IO", "T_W", "T_U", "DECAY") if n in types}, **of.constants,
    }  # fmt: skip
    if direction == "forward":
        name, shared = "gla_prepare", _prepare_shared_bytes()
        is_light = parameters["T_W"] != "fp32" and not of.constants["BONUS"]  # a third block would spill else
        parameters |= {
            "NUM_THREADS": _PREPARE_THREADS, "BLOCKS_PER_SM": 3 if is_light or parameters["DECAY"] == "none" else 2,
            "LARGEST_DECAY": LARGEST_DECAY if guarded else 0,
        }  # fmt: skip
    else:
        name, shared = "gla_group_key_gradients", _key_shared_bytes()
        parameters |= {
            "VALUE_SIZE": value_size, "NUM_THREADS": _KEY_THREADS, "BLOCKS_PER_SM": _KEY_BLOCKS,
            "STAGES": _KEY_STAGES, **of.of_backward,
        }  # fmt: skip
    return kernel.Request(template.library(name), parameters | {"SHARED_BYTES": shared}, "sm_90a")


# ---- what is kept ------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Floats of what passes from kernel to kernel."""

    operands: Any
    pairs: Any
    frames: Any
    states: Any  # of one direction


def _sizes(inputs: Inputs, packed: bool) -> _Sizes:
    heads, value_size = inputs["v"].shape[2:]
    places, slabs = slots(inputs, packed, CHUNK_LEN) * heads, _slabs(inputs["r"].shape[3])
    tile = _tile(CHUNK_LEN) // 4
    return _Sizes(
        operands=places * (slabs * 2 * tile),
        pairs=places * tile,
        frames=places * (2 * slabs * SLAB) if "w" in inputs.names else 0,
        states=places * (slabs * _tile(chunked.padded(value_size)) // 4),
    )


def saved_for(inputs: Inputs, packed: bool) -> Saved:
    """Return what the forward saves: all that its kernels leave behind."""
    return Saved(sum(_sizes(inputs, packed)))


# ---- launches ----------------------------------------------------------------------------------------------------


class _Plans(NamedTuple):
    """The launches of one direction in their order, and what passes between them."""

    first: Plan
    second: Plan
    sizes: _Sizes


_plans: BySignature[_Plans] = BySignature()


def _prepare(
    inputs: Inputs, dy: Tensor | None, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> _Plans:
    """Find or compile the kernels of one direction, the backward with `dy`, and prepare their launches."""
    like = (*inputs.streamed, *inputs.fixed, *([] if dy is None else [dy]))
    key = (inputs.op, dy is None, training, inputs.sequences, packed, state_dtype, options, tensors.signature(like))
    known = _plans.get(key)
    if known is None:
        with torch.cuda.device(inputs["v"].device.index):
            known = _plans.keep(key, _new_plans(inputs, dy, state_dtype, packed, options, training))
    return known


def _new_plans(
    inputs: Inputs, dy: Tensor | None, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> _Plans:
    kernel.check_not_forked()
    _, tokens, heads, value_size = inputs["v"].shape
    head_size, device = inputs["r"].shape[3], inputs["v"].device.index
    if heads > chunked.MOST_HEADS:
        raise UnsupportedConfigError(
            f"backend: 'split' takes up to {chunked.MOST_HEADS} heads, got {heads}; use 'recurrent'"
        )
    types, sizes = prepared.types_of(inputs, options, state_dtype), (head_size, value_size)
    few_heads = inputs.sequences * heads * _slabs(value_size) < tensors.multiprocessors(device)

    def requests(direction: str, state: str) -> list[kernel.Request]:
        """In the order of their launches."""
        scan = scan_request(direction, *sizes, {**types, "T_STATE": state}, few_heads)
        other = other_request(inputs.op, direction, *sizes, types, bool(options.guarded))
        return [other, scan] if direction == "forward" else [scan, other]

    wanted = requests("forward", tensors.STORAGE[state_dtype]) if dy is None else requests("backward", "fp32")
    others = requests("backward", "fp32") if training else []  # they compile side by side
    prepared.check_capture(inputs.op, [*wanted, *others], device)
    prepared.validate(inputs)
    found = kernel.get_all([*others, *wanted])[len(others) :]

    missing = recurrent.strides_of_missing(inputs)
    of_w = struct.pack("3q", *missing[0]) if missing else strides(inputs["w"])
    counts = [struct.pack("q", count) for count in (tokens, heads, inputs.sequences)]
    scale, places = struct.pack("f", options.scale), slots(inputs, packed, CHUNK_LEN)

    def plan(index: int, blocks: int, addresses: int, constants: Sequence[bytes]) -> Plan:
        of = found[index]
        threads, shared = int(of.parameters["NUM_THREADS"]), int(of.parameters["SHARED_BYTES"])
        return Plan(of, of.name, device, (blocks, heads, 1), (threads, 1, 1), "Q" * addresses, constants, shared)

    def scan_plan(index: int, values: Tensor) -> Plan:
        blocks = inputs.sequences * -(-value_size // int(found[index].parameters["VALUE_ROWS"]))
        return plan(index, blocks, 9, [strides(values), *counts[:2]])

    kept = _sizes(inputs, packed)
    if dy is None:
        first = plan(0, places, 9, [strides(inputs["r"]), strides(inputs["k"]), of_w, *counts, scale])
        return _Plans(first, scan_plan(1, inputs["v"]), kept)
    of_keys = plan(1, places * _slabs(head_size), 12, [strides(inputs["v"]), of_w, strides(dy), *counts, scale])
    return _Plans(scan_plan(0, dy), of_keys, kept)


class Forward(NamedTuple):
    """A forward that can be run with any tensors of its signature."""

    op: str
    names: tuple[str, ...]
    streamed: int  # how many of the inputs are
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
        streamed, fixed = tuple(given[: self.streamed]), tuple(given[self.streamed :])
        inputs = chunked.readable(Inputs(self.op, self.names, streamed, fixed, self.sequences))
        v = inputs["v"]
        state = None if state is None else state.contiguous()
        bounds = None if bounds is None else tensors.packing(bounds, v.shape[1])
        plans = _prepare(inputs, None, self.state_dtype, bounds is not None, self.options, save)
        y, final = torch.empty_like(v, memory_format=torch.contiguous_format), None
        if output_final_state:
            final = torch.empty(state_shape(inputs, self.options), dtype=self.state_dtype, device=v.device)
        sizes = plans.sizes if save else plans.sizes[:3]
        buffer = torch.empty(sum(sizes), dtype=torch.float32, device=v.device) if into is None else into
        operands, pairs, frames, states = (*addresses(buffer, sizes), 0)[:4]
        if flags is not None:
            flags.zero_()  # the chunks' blocks set it
        of = dict(zip(inputs.names, (*inputs.streamed, *inputs.fixed), strict=True))
        q, k, w, u = (address(of.get(name)) for name in ("r", "k", "w", "u"))
        tensors.launch(plans.first, [q, k, w, u, address(bounds), operands, pairs, frames, address(flags)])
        ends = address(state), address(bounds)
        tensors.launch(
            plans.second, [v.data_ptr(), *ends, operands, pairs, frames, y.data_ptr(), states, address(final)]
        )  # fmt: skip
        return y, final, buffer if save else None


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Find or compile what a forward launches; with `training` the backward's kernels compile beside it."""
    _prepare(chunked.readable(inputs), None, state_dtype, packed, options, training)
    return Forward(inputs.op, inputs.names, len(inputs.streamed), inputs.sequences, state_dtype, options)


def backward(
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    bounds: Tensor | None,
    saved: Tensor,
    options: Options,
    initial: Tensor | None,
    grads: Mapping[str, Tensor],
) -> None:
    """Run the backward into `initial`, where it is wanted, and `grads`, with a row a chunk for what has no tokens.

    All tensors can be read in place.
    """
    plans = _prepare(inputs, dy, torch.float32, bounds is not None, options, False)
    operands, pairs, frames, states = addresses(saved, plans.sizes)
    e = torch.empty(plans.sizes.states, dtype=torch.float32, device=dy.device)
    of = dict(zip(inputs.names, (*inputs.streamed, *inputs.fixed), strict=True))
    dq, dk, dv, dw, du = (address(grads.get(name)) for name in ("r", "k", "v", "w", "u"))
    at_dy, at_bounds = dy.data_ptr(), address(bounds)
    ends = address(grad_final_state), at_bounds
    tensors.launch(plans.first, [at_dy, *ends, operands, pairs, frames, dv, e.data_ptr(), address(initial)])
    v, w, u = (address(of.get(name)) for name in ("v", "w", "u"))
    given = v, w, u, at_dy, at_bounds
    tensors.launch(plans.second, [*given, operands, states, e.data_ptr(), dq, dk, dw, du])
