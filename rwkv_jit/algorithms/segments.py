"""Segments of a sequence side by side in the chunked kernels, for few heads and long sequences.

A segment takes the state S at its start to S P + Q. The forward finds both for all segments at once, joins them to the
states at the starts, and runs the chunked kernels from these. The backward does the same with P^T. Segments are rows of
the batch, so what is kept is what the chunked kernels keep, and P behind it. Without a delta term P is diagonal, and
what is kept of it is its diagonal, a row for each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rwkv_jit.algorithms import delta_chunked, diagonal_chunked, parts
from rwkv_jit.algorithms.parts import Case, Obstacle, padded
from rwkv_jit.problem import Problem
from rwkv_jit.schedule import Schedule, Step, Zero, renamed
from rwkv_jit.template import Parameter

LEAST_SEGMENTS = 4  # below, two more passes cost what the others gain
_JOIN_THREADS = 128
_JOIN_ROWS = 8  # value rows of a block where P is a matrix
_SEGMENT_ROWS = 128  # the most that a block of `wkv7_segment` holds


class _Lengths(NamedTuple):
    """How the sequences of a family may be cut."""

    multiple: int  # of tokens: segments end where a chunk does, whichever length is taken
    least: int  # tokens of a segment; shorter ones spend their time on beginning and joining


_CHUNKED: dict[str, Any] = {"delta": delta_chunked, "diagonal": diagonal_chunked}
_LENGTHS = {
    "delta": _Lengths(max(delta_chunked.CHUNK_LENS), 512),
    "diagonal": _Lengths(max(diagonal_chunked.CHUNK_LENS), 256),
}


# ---- the rule ----------------------------------------------------------------------------------------------------


def segments(family: str, blocks: int, tokens: int, multiprocessors: int, least: int = 1) -> int:
    """Return into how many equal segments to cut sequences, so that about two blocks a multiprocessor have work.

    `blocks` are sequences times heads. 1 where it cannot be done; `least` are made even where blocks suffice.
    """
    lengths = _LENGTHS[family]
    most = min(max(2 * multiprocessors // max(blocks, 1), least), tokens // lengths.least)
    legal = [n for n in range(LEAST_SEGMENTS, most + 1) if tokens % (n * lengths.multiple) == 0]
    return max(legal, default=1)


def why_not(case: Case, least: int = 1) -> Obstacle | None:
    """Return why sequences cannot be cut, of a call that the chunked kernels take; None where they can."""
    multiprocessors = case.multiprocessors and case.multiprocessors()
    if multiprocessors is None:
        return ("runs outside of traces and compiled graphs, and without `set_batch_invariant`",)
    if case.is_packed:
        return ("takes no cu_seqlens",)
    if segments(case.op.family, case.blocks, case.tokens, multiprocessors, least) < LEAST_SEGMENTS:
        lengths = _LENGTHS[case.op.family]
        text = "needs tokens for {} equal segments of {} or more, multiples of {}, got {}"
        return text, LEAST_SEGMENTS, lengths.least, lengths.multiple, case.tokens
    return None


def _count(p: Problem) -> int:
    """Return the segments of a sequence: the same however many others there are, and so are its results.

    Kernels that are compiled ahead of calls do not depend on it.
    """
    if p.multiprocessors is None:
        return LEAST_SEGMENTS
    return segments(p.op.family, p.H, p.T, p.multiprocessors, LEAST_SEGMENTS)


def _cut(p: Problem, count: int) -> Problem:
    """Return the problem of the segments, whose states are their own."""
    return p._replace(
        B=p.B * count, T=p.T // count, N=p.N * count, state_type="fp32", state_layout="vk", has_initial_state=True,
        backend="chunked",
    )  # fmt: skip


# ---- kernels -----------------------------------------------------------------------------------------------------


def _transitions(p: Problem, count: int) -> Any:
    """Return the bytes of P of all segments, where it is a matrix and where it is diagonal."""
    return 4 * p.N * count * p.H * (p.K if p.op.family == "diagonal" else p.K**2)


def _states(p: Problem, count: int) -> Any:
    return 4 * p.N * count * p.H * p.V * p.K


def _segment_step(p: Problem, cut: Problem, count: int, backward: bool) -> Step:
    """Return the launch that finds what segments do to any state; backwards to its gradient."""
    stem = p.op.stem
    geometry = _diagonal_geometry(p) if p.op.family == "diagonal" else _delta_geometry(p, backward)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, **geometry, "BACKWARD": backward,
        **parts.named({**parts.types(p), **p.op.constants}, "T_IO", "T_W", "DECAY", "BONUS"),
    }  # fmt: skip
    if p.op.family == "delta":
        parameters["LARGEST_DECAY"] = parts.largest_decay(p)
    # In the forward a block may hold rows of Q and rows of P.
    rows = p.V if backward else padded(p.V) + p.K
    row_blocks = -(-rows // int(geometry["ROWS"])) if "ROWS" in geometry else 1
    bind = {
        **parts.given(cut), "keys": "r" if backward else "k", "key_strides": "r" if backward else "k",
        "values": "dy" if backward else "v", "value_strides": "dy" if backward else "v", "additions": "additions",
        "transitions": None if backward else "transitions", "decays": None if backward else "transitions",
    }  # fmt: skip
    name = f"{stem}_segment"
    return Step(name, name, parameters, (cut.N, p.H, row_blocks), bind, segments=count)


def _delta_geometry(p: Problem, backward: bool) -> dict[str, Parameter]:
    """Return that of `wkv7_segment`, a share of whose state a block holds: the rows of Q and, but backwards, of P."""
    in_all = padded(p.V) + (0 if backward else padded(p.K))
    rows = padded(-(-in_all // -(-in_all // _SEGMENT_ROWS)))
    threads = max(rows, padded(p.K), 64)  # a warp for 32 rows: more blocks hide more waiting
    # What the forward of so many values takes, but for its results.
    shared = delta_chunked.shared_bytes("forward", p.K, rows, p.chunk_len, threads) - 2 * p.chunk_len * (rows + 8)
    return {
        "CHUNK_LEN": p.chunk_len, "NUM_THREADS": threads, "BLOCKS_PER_SM": p.gpu.resident_blocks(threads, 256, shared),
        "SHARED_BYTES": shared, "ROWS": rows,
    }  # fmt: skip


def _diagonal_geometry(p: Problem) -> dict[str, Parameter]:
    """Return that of `gla_segment`: a warp for 16 value rows, and chunks for which threads have registers enough."""
    keys, values = padded(p.K), padded(p.V)
    threads = 2 * values
    return {
        "CHUNK_LEN": 32 if keys <= min(values, 64) else 16, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": (512 if keys <= values else 384) // threads,
    }  # fmt: skip


def _join_step(p: Problem, count: int, backward: bool, first: str | None, states: str, last: str | None) -> Step:
    """Return the launch that joins the segments, from the first state to those at all starts, or backwards."""
    is_diagonal = p.op.family == "diagonal"
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "NUM_THREADS": _JOIN_THREADS,
        "ROWS": _JOIN_THREADS // p.K if is_diagonal else _JOIN_ROWS, "BACKWARD": backward,
    }  # fmt: skip
    bind = {
        "transitions": "transitions", "decays": "transitions", "additions": "additions", "first": first,
        "states": states, "last": last, "heads": p.H, "segments": count,
    }  # fmt: skip
    name = f"{p.op.stem}_join"
    return Step(name, name, parameters, (p.N, p.H, -(-p.V // int(parameters["ROWS"]))), bind)


# ---- schedules ---------------------------------------------------------------------------------------------------


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: what the chunked kernels do, and P of every segment."""
    count = _count(p)
    return {**_CHUNKED[p.op.family].kept(_cut(p, count)), "transitions": _transitions(p, count)}


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    count = _count(p)
    cut = _cut(p, count)
    chunked = _CHUNKED[p.op.family].forward(cut)
    scratch = {"additions": _states(p, count), "starts": _states(p, count), **chunked.scratch}
    steps: list[Step | Zero] = []
    first = None
    if p.has_initial_state:
        first = "initial_state"
        if (p.state_type, p.state_layout) != ("fp32", "vk"):
            steps.append(parts.copy_states(p, "initial_state", "first", p.state_type, "fp32", p.state_layout, "vk"))
            first, scratch["first"] = "first", 4 * p.N * p.H * p.V * p.K
    steps.append(_segment_step(p, cut, count, backward=False))
    steps.append(_join_step(p, count, False, first, "starts", None))
    names = {"initial_state": "starts", "final_state": "ends"}
    main = len(steps)
    steps += [
        step._replace(segments=count) if isinstance(step, Step) else step for step in renamed(chunked.steps, names)
    ]
    if p.has_final_state:
        scratch["ends"] = _states(p, count)
        steps.append(
            parts.copy_states(p, "ends", "final_state", "fp32", p.state_type, "vk", p.state_layout, count, count - 1)
        )
    left: dict[str, Any] = {}
    if p.training:
        left = {**chunked.kept, "transitions": _transitions(p, count)}
    else:
        scratch["transitions"] = _transitions(p, count)
    return Schedule(tuple(steps), parts.forward_results(p), left, scratch, chunked.vectors, main + chunked.main)


def backward(p: Problem) -> Schedule:
    """Return the backward."""
    count = _count(p)
    cut = _cut(p, count)._replace(has_initial_state=False, has_final_state=True)
    chunked = _CHUNKED[p.op.family].backward(cut)
    scratch = {"additions": _states(p, count), "ends": _states(p, count), **chunked.scratch}
    scratch |= parts.sequence_gradients(p)
    scratch |= {f"d{name}_segments": size for name, size in _segment_gradients(cut).items()}
    steps: list[Step | Zero] = []
    turned = 4 * p.N * p.H * p.V * p.K
    first, last = None, None
    if p.has_final_state:
        first = "grad_final_state"
        if p.state_layout != "vk":
            steps.append(parts.copy_states(p, "grad_final_state", "first", "fp32", "fp32", p.state_layout, "vk"))
            first, scratch["first"] = "first", turned
    if p.has_initial_state:
        last = "grad_initial_state"
        if p.state_layout != "vk":
            last, scratch["last"] = "last", turned
    steps.append(_segment_step(p, cut, count, backward=True))
    steps.append(_join_step(p, count, True, first, "ends", last))
    names = {f"d{name}_sequences": f"d{name}_segments" for name in p.op.fixed} | {"grad_final_state": "ends"}
    main = len(steps)
    steps += [
        step._replace(segments=count) if isinstance(step, Step) else step for step in renamed(chunked.steps, names)
    ]
    steps += parts.sum_segments(p, count)
    if last == "last":
        steps.append(parts.copy_states(p, "last", "grad_initial_state", "fp32", "fp32", "vk", p.state_layout))
    return Schedule(tuple(steps), parts.backward_results(p), {}, scratch, chunked.vectors, main + chunked.main)


def _segment_gradients(cut: Problem) -> dict[str, Any]:
    """Return the bytes of a gradient for each segment, of inputs that are the same for every token."""
    sizes = parts.sequence_gradients(cut)
    return {name: sizes[f"d{name}_sequences"] for name in cut.op.fixed}
