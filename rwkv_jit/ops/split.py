"""The split backend: the chunked kernels over segments of a sequence side by side, for few heads and long sequences.

A segment takes the state S at its start to S P + Q. The forward finds both for all segments at once, Q from zero states
and P from the identity without values, joins them to the states at the starts, and runs once more from these. The
backward does the same with P^T. Segments are rows of the batch, so what is saved is what the chunked backend saves,
and P behind it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, template, tensors
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked, prepared
from rwkv_jit.ops.prepared import Inputs, Options, Saved

LEAST_SEGMENTS = 4  # below, two more passes cost what the others gain
SEGMENT_TOKENS = 512  # the least; shorter ones spend their time on beginning and joining
_LONGEST_CHUNK = max(chunked.CHUNK_LENS)  # segments end where a chunk does, whichever length is taken
_JOIN_THREADS = 256
_JOIN_ROWS = 16  # value rows of a block, as in the template

specialize, nearest = chunked.specialize, chunked.nearest


class Forward(NamedTuple):
    """A forward over segments that can be run with any tensors of its signature."""

    segments: int
    forward: prepared.Forward  # of a segment; it saves what `saved_for` says
    transition: prepared.Forward  # the same without values
    join: Plan
    state_dtype: torch.dtype
    options: Options


def segments(blocks: int, tokens: int, multiprocessors: int, least: int = 1) -> int:
    """Return into how many equal segments to cut sequences, so that about two blocks a multiprocessor have work.

    `blocks` are sequences times heads. 1 where it cannot be done; `least` are made even where blocks suffice.
    """
    most = min(max(2 * multiprocessors // max(blocks, 1), least), tokens // SEGMENT_TOKENS)
    legal = [n for n in range(LEAST_SEGMENTS, most + 1) if tokens % (n * _LONGEST_CHUNK) == 0]
    return max(legal, default=1)


def _count(inputs: Inputs) -> int:
    """Return the segments of a sequence: the same however many others there are, and so are its results."""
    _, tokens, heads, _ = inputs["v"].shape
    return segments(heads, tokens, tensors.multiprocessors(inputs["v"].device.index), LEAST_SEGMENTS)


def _cut(x: Tensor, count: int) -> Tensor:
    """Return the segments of [B, T, ...] as rows of the batch: a view, unless other memory lies between sequences."""
    batch, tokens = x.shape[:2]
    return x.reshape(batch * count, tokens // count, *x.shape[2:])


def _cut_inputs(inputs: Inputs, count: int) -> Inputs:
    streamed = tuple([_cut(x, count) for x in inputs.streamed])
    return Inputs(inputs.op, inputs.names, streamed, inputs.fixed, inputs.sequences * count)


def _without_values(streamed: Sequence[Tensor], value: int, head_size: int) -> list[Tensor]:
    """Return the inputs with zeros for v, as many as there are keys: they move the identity on."""
    v = streamed[value]
    zeros = torch.zeros((*v.shape[:3], head_size), dtype=v.dtype, device=v.device)
    return [zeros if index == value else x for index, x in enumerate(streamed)]


def _shape_of_transitions(inputs: Inputs) -> tuple[int, ...]:
    heads, head_size = inputs["r"].shape[2:]
    return inputs.sequences * _count(inputs), heads, head_size, head_size


def saved_for(inputs: Inputs, packed: bool, options: Options) -> Saved:
    """Return what the forward saves: what the chunked backend does, and P of every segment."""
    return Saved(chunked.saved_for(inputs, packed, options).floats + math.prod(_shape_of_transitions(inputs)))


def _transitions(known: prepared.Forward, cut: Sequence[Tensor]) -> Tensor:
    """Return P [segments of all sequences, H, K, K] of every segment."""
    keys = cut[0]
    count, _, heads, head_size = keys.shape
    identity = torch.eye(head_size, device=keys.device).expand(count, heads, head_size, head_size).contiguous()
    without = _without_values(cut, known.value, head_size)
    _, found, _ = prepared.forward(known, without, identity, None, True, False)
    assert found is not None
    return found


def _plain(options: Options) -> Options:
    return options._replace(backend="chunked", state_layout="vk")


def _prepare_transition(cut: Inputs, options: Options) -> prepared.Forward:
    """Return the forward without values."""
    value, head_size = cut.names.index("v"), cut["r"].shape[3]
    without = tuple(_without_values(cut.streamed, value, head_size))
    inputs = Inputs(cut.op, cut.names, without, cut.fixed, cut.sequences)
    return prepared.prepare_forward(chunked, inputs, torch.float32, False, _plain(options), training=False)


def _turn(state: Tensor, options: Options) -> Tensor:
    """Return a state in the vk layout from the caller's, or the other way."""
    return state if options.state_layout == "vk" else state.transpose(-1, -2)


def join_request(
    op: str, head_size: int, value_size: int, backward: bool, arch: str, also: tuple[str, ...] = ()
) -> kernel.Request:
    """Return the kernel that joins segments, forwards or backwards."""
    parameters: dict[str, template.Parameter] = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": value_size, "NUM_THREADS": _JOIN_THREADS, "BACKWARD": backward,
    }  # fmt: skip
    return kernel.Request(template.library(f"{op}_join"), parameters, arch, also)


@lru_cache(prepared.MOST_SIGNATURES)
def _join(
    op: str, head_size: int, value_size: int, sequences: int, heads: int, count: int, device: int, backward: bool
) -> Plan:
    """Return the launch of the kernel that joins the segments."""
    request = join_request(op, head_size, value_size, backward, tensors.arch(device), tensors.also(device))
    prepared.check_capture(op, [request], device)
    (found,) = kernel.get_all([request])
    grid = (sequences, heads, -(-value_size // _JOIN_ROWS))
    constants = [struct.pack("q", heads), struct.pack("q", count)]
    return Plan(found, f"{op}_join", device, grid, (_JOIN_THREADS, 1, 1), "Q" * 5, constants)


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Prepare what a forward over segments launches; nothing is packed."""
    del packed
    count, device = _count(inputs), inputs["v"].device.index
    cut = _cut_inputs(inputs, count)
    heads, value_size = inputs["v"].shape[2:]
    with torch.cuda.device(device):
        of_segment = prepared.prepare_forward(chunked, cut, torch.float32, False, _plain(options), training)
        return Forward(
            segments=count,
            forward=of_segment._replace(saved=saved_for(inputs, False, options)),
            transition=_prepare_transition(cut, options),
            join=_join(inputs.op, inputs["r"].shape[3], value_size, inputs.sequences, heads, count, device, False),
            state_dtype=state_dtype,
            options=options,
        )


def forward(
    known: Forward,
    inputs: Sequence[Tensor],
    state: Tensor | None,
    bounds: Tensor | None,
    output_final_state: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run a prepared forward on tensors of its signature, as `prepared.forward` does; there are no packed sequences."""
    del bounds
    count = known.segments
    cut = [_cut(x, count) for x in inputs]
    _, additions, _ = prepared.forward(known.forward, cut, None, None, True, False)
    assert additions is not None
    transitions = _transitions(known.transition, cut)
    starts = torch.empty(additions.shape, dtype=torch.float32, device=additions.device)
    first = None if state is None else _turn(state, known.options).to(torch.float32).contiguous()
    given = (transitions, additions, first, starts, None)
    tensors.launch(known.join, [0 if x is None else x.data_ptr() for x in given])
    y, ends, saved = prepared.forward(known.forward, cut, starts, None, output_final_state, save)
    if saved is not None:
        saved[-transitions.numel() :].view(transitions.shape).copy_(transitions)
    batch, tokens = inputs[0].shape[:2]
    final = None
    if ends is not None:
        last = ends.view(batch, count, *ends.shape[1:])[:, -1]
        final = _turn(last, known.options).to(known.state_dtype).contiguous()
    return y.view(batch, tokens, *y.shape[2:]), final, saved


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
        _, _, additions = prepared.backward(chunked, cut, dy, None, None, saved, plain, True)
        assert additions is not None
        heads, value_size = inputs["v"].shape[2:]
        head_size = inputs["r"].shape[3]
        join = _join(inputs.op, head_size, value_size, inputs.sequences, heads, count, device, True)
    ends, first, initial = torch.empty(additions.shape, dtype=torch.float32, device=dy.device), None, None
    if grad_final_state is not None:
        first = _turn(grad_final_state, options).to(torch.float32).contiguous()
    if want_initial_state:
        initial = torch.empty((inputs.sequences, *additions.shape[1:]), dtype=torch.float32, device=dy.device)
    transitions = saved[-math.prod(_shape_of_transitions(inputs)) :]
    given = (transitions, additions, first, ends, initial)
    tensors.launch(join, [0 if x is None else x.data_ptr() for x in given])
    grads, fixed, _ = prepared.backward(chunked, cut, dy, ends, None, saved, plain, False)
    whole = [grad.view(x.shape) for grad, x in zip(grads, inputs.streamed, strict=True)]
    return whole, fixed, None if initial is None else _turn(initial, options).contiguous()


def forget() -> None:
    """Drop all prepared launches."""
    _join.cache_clear()


def obstacle(blocks: int, tokens: Any, packed: bool, multiprocessors: int | None, least: int) -> str | None:
    """Return why sequences cannot be cut, as the end of a sentence; None where they can."""
    if multiprocessors is None:
        return "runs outside of traces and compiled graphs"
    if packed:
        return "takes no cu_seqlens"
    if segments(blocks, tokens, multiprocessors, least) < LEAST_SEGMENTS:
        return (
            f"needs tokens for {LEAST_SEGMENTS} equal segments of {SEGMENT_TOKENS} or more, multiples of "
            f"{_LONGEST_CHUNK}, got {tokens}"
        )
    return None
