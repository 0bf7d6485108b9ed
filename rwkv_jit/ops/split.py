"""The split backend: the chunked kernels over segments of a sequence side by side, for few heads and long sequences.

A segment takes the state S at its start to S P + Q. The forward finds both for all segments at once, joins them to the
states at the starts, and runs the chunked kernels from these. The backward does the same with P^T. Segments are rows of
the batch, so what is saved is what the chunked backend saves, and P behind it. Without a delta term P is diagonal, and
what is kept of it are exponents, a row for each head.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, gated, prepared, recurrent
from rwkv_jit.ops.interface import Backend, Inputs, Options, Saved
from rwkv_jit.ops.layout import address
from rwkv_jit.signatures import BySignature
from rwkv_jit.template import Parameter

LEAST_SEGMENTS = 4  # below, two more passes cost what the others gain
_JOIN_THREADS = 128
_JOIN_ROWS = 8  # value rows of a block where P is a matrix
_SEGMENT_ROWS = 128  # the most that a block of `wkv7_segment` holds


class _Family(NamedTuple):
    """Ops that are cut alike."""

    stem: str  # of the templates that find and join segments
    chunks: Backend
    multiple: int  # of tokens: segments end where a chunk does, whichever length is taken
    least: int  # tokens of a segment; shorter ones spend their time on beginning and joining
    others: tuple[str, ...]  # what the kernel that finds segments reads between keys and values


_DELTA = _Family("wkv7", chunked, max(chunked.CHUNK_LENS), 512, ("w", "a", "b"))
_GATED = _Family("gla", gated, max(gated.CHUNK_LENS), 256, ("w",))
_FAMILIES = dict.fromkeys(chunked.OPS, _DELTA) | dict.fromkeys(gated.OPS, _GATED)
_plans: BySignature[Plan] = BySignature()
_joins: BySignature[Plan] = BySignature()

nearest = chunked.nearest  # `gated` has refused what is not legal before


def specialize(op: str, *given: Any, **more: Any) -> kernel.Request:
    """Return the template and parameters of one direction: those of the chunked kernels."""
    return _FAMILIES[op].chunks.specialize(op, *given, **more)


def segments(op: str, blocks: int, tokens: int, multiprocessors: int, least: int = 1) -> int:
    """Return into how many equal segments to cut sequences, so that about two blocks a multiprocessor have work.

    `blocks` are sequences times heads. 1 where it cannot be done; `least` are made even where blocks suffice.
    """
    of = _FAMILIES[op]
    most = min(max(2 * multiprocessors // max(blocks, 1), least), tokens // of.least)
    legal = [n for n in range(LEAST_SEGMENTS, most + 1) if tokens % (n * of.multiple) == 0]
    return max(legal, default=1)


def _count(inputs: Inputs) -> int:
    """Return the segments of a sequence: the same however many others there are, and so are its results."""
    _, tokens, heads, _ = inputs["v"].shape
    return segments(inputs.op, heads, tokens, tensors.multiprocessors(inputs["v"].device.index), LEAST_SEGMENTS)


def _cut(x: Tensor, count: int) -> Tensor:
    """Return the segments of [B, T, ...] as rows of the batch: a view, unless other memory lies between sequences."""
    batch, tokens = x.shape[:2]
    return x.reshape(batch * count, tokens // count, *x.shape[2:])


def _cut_inputs(inputs: Inputs, count: int) -> Inputs:
    streamed = tuple([_cut(x, count) for x in inputs.streamed])
    return Inputs(inputs.op, inputs.names, streamed, inputs.fixed, inputs.sequences * count)


def _transitions(inputs: Inputs) -> int:
    """Return how many numbers P of all segments is, where it is a matrix and where it is diagonal."""
    heads, head_size = inputs["r"].shape[2:]
    of_head = head_size if _FAMILIES[inputs.op] is _GATED else head_size**2
    return inputs.sequences * _count(inputs) * heads * of_head


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: what the chunked backend does, and P of every segment."""
    of_chunks = _FAMILIES[inputs.op].chunks.saved_for(inputs, packed, options)
    return Saved(of_chunks.floats + _transitions(inputs))


def _plain(options: Options) -> Options:
    return options._replace(backend="chunked", state_layout="vk")


def _turn(state: Tensor, options: Options) -> Tensor:
    """Return a state in the vk layout from the caller's, or the other way."""
    return state if options.state_layout == "vk" else state.transpose(-1, -2)


def segment_request(
    op: str, like: Mapping[str, Parameter], backward: bool, arch: str, also: tuple[str, ...] = ()
) -> kernel.Request:
    """Return the kernel that finds what segments do to any state; `like` are parameters of the chunked kernels."""
    of, head_size, value_size = _FAMILIES[op], int(like["HEAD_SIZE"]), int(like["VALUE_SIZE"])
    if of is _GATED:
        geometry = _geometry_of_states(head_size, value_size)
    else:
        geometry = _geometry_of_rows(head_size, value_size, int(like["CHUNK_LEN"]), backward, arch)
    sizes = {"HEAD_SIZE": head_size, "VALUE_SIZE": value_size}
    types = {name: like[name] for name in ("T_IO", "T_W", "DECAY") if name in like}
    constants = {name: x for name, x in recurrent.OPS[op].constants.items() if name != "T_U"}
    parameters: dict[str, Parameter] = {**sizes, **geometry, "BACKWARD": backward, **types, **constants}
    return kernel.Request(template.library(f"{of.stem}_segment"), parameters, arch, also)


def _geometry_of_rows(
    head_size: int, value_size: int, chunk_len: int, backward: bool, arch: str
) -> dict[str, Parameter]:
    """Return that of `wkv7_segment`, a share of whose state a block holds: the rows of Q and, but backwards, of P."""
    in_all = chunked.padded(value_size) + (0 if backward else chunked.padded(head_size))
    rows = chunked.padded(-(-in_all // -(-in_all // _SEGMENT_ROWS)))
    threads = max(rows, chunked.padded(head_size), 64)  # a warp for 32 rows: more blocks hide more waiting
    # What the forward of so many values takes, but for its results.
    shared = chunked.shared_bytes("forward", head_size, rows, chunk_len, threads) - 2 * chunk_len * (rows + 8)
    blocks = min(256 // threads, chunked.shared_per_multiprocessor(arch) // (shared + 1024))
    return {
        "CHUNK_LEN": chunk_len, "NUM_THREADS": threads, "BLOCKS_PER_SM": max(blocks, 1), "SHARED_BYTES": shared,
        "ROWS": rows,
    }  # fmt: skip


def _geometry_of_states(head_size: int, value_size: int) -> dict[str, Parameter]:
    """Return that of `gla_segment`: a warp for 16 value rows, and chunks for which threads have registers enough."""
    keys, values = chunked.padded(head_size), chunked.padded(value_size)
    threads = 2 * values
    return {
        "CHUNK_LEN": 32 if keys <= min(values, 64) else 16, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": (512 if keys <= values else 384) // threads,
    }  # fmt: skip


def chunked_request(like: kernel.Request) -> kernel.Request:
    """Return the chunked kernel that runs over segments, from one that runs over sequences: its states are its own."""
    states: dict[str, Parameter] = {"T_STATE": "fp32", "STATE_LAYOUT": "vk"}
    own = {name: x for name, x in states.items() if name in like.parameters}
    return like._replace(parameters={**like.parameters, **own})


def _segment_request(inputs: Inputs, options: Options, backward: bool) -> kernel.Request:
    """Return that kernel for a call."""
    device, length = inputs["v"].device.index, options.chunk_len
    assert length is not None  # the rule that chose this backend has chosen it too
    sizes = {"HEAD_SIZE": inputs["r"].shape[3], "VALUE_SIZE": inputs["v"].shape[3], "CHUNK_LEN": length}
    like = prepared.types_of(inputs, options, torch.float32) | sizes
    return segment_request(inputs.op, like, backward, tensors.arch(device), tensors.also(device))


def _plan(cut: Inputs, options: Options, given: Sequence[Tensor | None], backward: bool) -> Plan:
    """Return the launch of that kernel on keys, what else it reads, and values."""
    key = (cut.op, backward, options, tensors.signature(given))
    known = _plans.get(key)
    if known is None:
        with torch.cuda.device(cut["v"].device.index):
            known = _plans.keep(key, _new_plan(cut, options, given, backward))
    return known


def _new_plan(cut: Inputs, options: Options, given: Sequence[Tensor | None], backward: bool) -> Plan:
    kernel.check_not_forked()
    request, device = _segment_request(cut, options, backward), cut["v"].device.index
    prepared.check_capture(cut.op, [request], device)
    (found,) = kernel.get_all([request])
    count, tokens, heads, value_size = cut["v"].shape
    rows = value_size if backward else chunked.padded(value_size) + cut["r"].shape[3]
    row_blocks = -(-rows // int(request.parameters["ROWS"])) if "ROWS" in request.parameters else 1
    constants = [struct.pack("3q", *_strides(x)) for x in given]
    constants += [struct.pack("q", tokens), struct.pack("q", heads), struct.pack("f", options.scale)]
    threads, shared = int(request.parameters["NUM_THREADS"]), int(request.parameters.get("SHARED_BYTES", 0))
    grid, addresses = (count, heads, row_blocks), "Q" * (len(given) + 2)
    return Plan(found, request.template.name, device, grid, (threads, 1, 1), addresses, constants, shared)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Return those between segments, tokens and heads, of which a constant decay has the last alone."""
    if x is None:
        return 0, 0, 0
    return x.stride()[:3] if x.dim() == 4 else (0, 0, x.stride(0))


def _names(op: str, backward: bool) -> tuple[str, ...]:
    """Return what that kernel reads before the values, which are v or its gradient; an op has not all of them."""
    return ("r" if backward else "k", *_FAMILIES[op].others)


def _read(cut: Inputs, values: Tensor, backward: bool) -> list[Tensor | None]:
    """Return these tensors."""
    return [*[cut[name] if name in cut.names else None for name in _names(cut.op, backward)], values]


def _run_segments(cut: Inputs, options: Options, values: Tensor, transitions: int | None) -> Tensor:
    """Return Q [segments, H, V, K] of all segments and write P to an address; without it, return Q of gradients."""
    backward = transitions is None
    given = [None if x is None else tensors.readable(x, chunked.vector(x)) for x in _read(cut, values, backward)]
    plan = _plan(cut, options, given, backward)
    count, _, heads, head_size = cut["k"].shape
    additions = torch.empty((count, heads, values.shape[3], head_size), dtype=torch.float32, device=values.device)
    tensors.launch(plan, [*map(address, (*given, additions)), transitions or 0])
    return additions


def _plan_in_place(inputs: Inputs, cut: Inputs, options: Options) -> tuple[Plan | None, int]:
    """Return the launch of that kernel where it reads all segments from the sequences' memory, and its alignment.

    The launch is None where it does not, whatever the addresses are.
    """
    given = _read(cut, cut["v"], backward=False)
    read = [(x, chunked.vector(x)) for x in given if x is not None]
    moves = any(x.data_ptr() != whole.data_ptr() for x, whole in zip(cut.streamed, inputs.streamed, strict=True))
    if moves or any(tensors.needs_copy(*each) for each in read):
        return None, 1
    return _plan(cut, options, given, False), max(tensors.alignment(*each) for each in read)


def join_request(
    op: str, head_size: int, value_size: int, backward: bool, arch: str, also: tuple[str, ...] = ()
) -> kernel.Request:
    """Return the kernel that joins segments, forwards or backwards."""
    of = _FAMILIES[op]
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "NUM_THREADS": _JOIN_THREADS,
        "ROWS": _JOIN_THREADS // head_size if of is _GATED else _JOIN_ROWS, "BACKWARD": backward,
    }  # fmt: skip
    return kernel.Request(template.library(f"{of.stem}_join"), parameters, arch, also)


def _join(
    op: str, head_size: int, value_size: int, sequences: int, heads: int, count: int, device: int, backward: bool
) -> Plan:
    """Return the launch of the kernel that joins the segments."""
    key = (op, head_size, value_size, sequences, heads, count, device, backward)
    known = _joins.get(key)
    if known is None:
        request = join_request(op, head_size, value_size, backward, tensors.arch(device), tensors.also(device))
        prepared.check_capture(op, [request], device)
        (found,) = kernel.get_all([request])
        grid = (sequences, heads, -(-value_size // int(request.parameters["ROWS"])))
        constants = [struct.pack("q", heads), struct.pack("q", count)]
        plan = Plan(found, request.template.name, device, grid, (_JOIN_THREADS, 1, 1), "Q" * 5, constants)
        known = _joins.keep(key, plan)
    return known


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward over segments that can be run with any tensors of its signature."""

    op: str
    segments: int
    names: tuple[str, ...]
    streamed: int  # how many of these have tokens
    transitions: int  # numbers that P of all segments is
    in_place: Plan | None  # of the kernel that finds what segments do, in the sequences' memory; None where not there
    alignment: int  # of all addresses, for that
    reads: tuple[int, ...]  # which inputs that kernel reads; -1 for one that the op does not have
    forward: prepared.Forward  # of a segment; it saves what `saved_for` says
    join: Plan
    state_dtype: torch.dtype
    options: Options

    @property
    def takes_any_decay(self) -> bool:
        """Return whether its results are right for any decay: where those of segments are."""
        return self.forward.takes_any_decay

    def run(
        self,
        inputs: Sequence[Tensor],
        state: Tensor | None,
        bounds: Tensor | None,
        output_final_state: bool,
        save: bool,
        into: Tensor | None = None,
        flags: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run it, as `interface.Forward` says; there are no packed sequences."""
        del bounds
        count, device, states = self.segments, inputs[0].device, self.forward.state_shape
        if save and into is None:
            into = torch.empty(self.forward.saved.floats, dtype=torch.float32, device=device)
        memory = torch.empty(self.transitions, dtype=torch.float32, device=device) if into is None else into
        transitions = memory.data_ptr() + 4 * (memory.numel() - self.transitions)
        places = [x.data_ptr() for x in inputs]
        if self.in_place is not None and math.gcd(*places) % self.alignment == 0:
            cut = inputs  # as they are: a sequence's segments follow each other
            places.append(0)
            additions = torch.empty(states, dtype=torch.float32, device=device)
            read = [places[n] for n in self.reads]
            tensors.launch(self.in_place, [*read, additions.data_ptr(), transitions])
        else:
            streamed, fixed = tuple(inputs[: self.streamed]), tuple(inputs[self.streamed :])
            of_segments = _cut_inputs(Inputs(self.op, self.names, streamed, fixed, states[0] // count), count)
            cut = (*of_segments.streamed, *of_segments.fixed)
            additions = _run_segments(of_segments, self.options, of_segments["v"], transitions)
        starts = torch.empty(states, dtype=torch.float32, device=device)
        first = None if state is None else _turn(state, self.options).to(torch.float32).contiguous()
        tensors.launch(self.join, [transitions, additions.data_ptr(), address(first), starts.data_ptr(), 0])
        of_starts = None if flags is None else flags.new_empty((states[0], flags.shape[1]))
        y, ends, saved = self.forward.run(cut, starts, None, output_final_state, save, into, of_starts)
        if flags is not None and of_starts is not None:
            torch.amax(of_starts.view(flags.shape[0], count, flags.shape[1]), 1, out=flags)
        final = None
        if ends is not None:
            last = ends.view(states[0] // count, count, *states[1:])[:, -1]
            final = _turn(last, self.options).to(self.state_dtype).contiguous()
        return y if cut is inputs else y.view(*inputs[0].shape[:3], y.shape[3]), final, saved


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Prepare what a forward over segments launches; nothing is packed."""
    del packed
    count, device = _count(inputs), inputs["v"].device.index
    cut = _cut_inputs(inputs, count)
    heads, value_size = inputs["v"].shape[2:]
    with torch.cuda.device(device):
        chunks = _FAMILIES[inputs.op].chunks
        of_segment = prepared.prepare_forward(chunks, cut, torch.float32, False, _plain(options), training)
        wanted = [_segment_request(cut, options, backward) for backward in ((False, True) if training else (False,))]
        prepared.check_capture(inputs.op, wanted, device)
        kernel.get_all(wanted)  # side by side
        in_place, alignment = _plan_in_place(inputs, cut, options)
        reads = [*_names(inputs.op, backward=False), "v"]
        return Forward(
            op=inputs.op,
            segments=count,
            forward=replace(of_segment, saved=saved_for(inputs, False, options)),
            names=inputs.names,
            streamed=len(inputs.streamed),
            transitions=_transitions(inputs),
            in_place=in_place,
            alignment=alignment,
            reads=tuple(inputs.names.index(name) if name in inputs.names else -1 for name in reads),
            join=_join(inputs.op, inputs["r"].shape[3], value_size, inputs.sequences, heads, count, device, False),
            state_dtype=state_dtype,
            options=options,
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
    """Run the backward over segments; the arguments and results of `prepared.backward`."""
    del cu_seqlens  # there are none
    count, device = _count(inputs), dy.device.index
    cut, dy, plain = _cut_inputs(inputs, count), _cut(dy, count), _plain(options)
    with torch.cuda.device(device):
        additions = _run_segments(cut, options, dy, None)
        heads, value_size = inputs["v"].shape[2:]
        head_size = inputs["r"].shape[3]
        join = _join(inputs.op, head_size, value_size, inputs.sequences, heads, count, device, True)
    ends, first, initial = torch.empty(additions.shape, dtype=torch.float32, device=dy.device), None, None
    if grad_final_state is not None:
        first = _turn(grad_final_state, options).to(torch.float32).contiguous()
    if want_initial_state:
        initial = torch.empty((inputs.sequences, *additions.shape[1:]), dtype=torch.float32, device=dy.device)
    given = (saved[-_transitions(inputs) :], additions, first, ends, initial)
    tensors.launch(join, [*map(address, given)])
    chunks = _FAMILIES[inputs.op].chunks
    grads, fixed, _ = prepared.backward(chunks, cut, dy, ends, None, saved, plain, False)
    fixed = [x.view(inputs.sequences, count, *x.shape[1:]).sum(1) for x in fixed]
    whole = [grad.view(x.shape) for grad, x in zip(grads, inputs.streamed, strict=True)]
    return whole, fixed, None if initial is None else _turn(initial, options).contiguous()


def obstacle(op: str, blocks: int, tokens: Any, packed: bool, multiprocessors: int | None, least: int) -> str | None:
    """Return why sequences cannot be cut, as the end of a sentence; None where they can."""
    if multiprocessors is None:
        return "runs outside of traces and compiled graphs"
    if packed:
        return "takes no cu_seqlens"
    if segments(op, blocks, tokens, multiprocessors, least) < LEAST_SEGMENTS:
        of = _FAMILIES[op]
        return (
            f"needs tokens for {LEAST_SEGMENTS} equal segments of {of.least} or more, multiples of {of.multiple}, "
            f"got {tokens}"
        )
    return None
