"""Segments of a sequence side by side in the chunked kernels, for few heads and long sequences.

A segment takes the state S at its start to S P + Q. The forward finds both for all segments at once, joins them to the
states at the starts, and runs the chunked kernels from these; the backward does the same with P^T. Segments are rows of
the batch; P is kept beside what the chunked kernels keep, and without a delta term it is a diagonal, a row for each
head.

Strides say where equal segments are. Ragged ones, of packed sequences and of lengths that cannot be shared equally, are
packed sequences to the chunked kernels; a kernel finds their bounds.

Large heads do so with their kernels. Their walk from zero leaves Q; without values, from the identity, it leaves P, and
from a row of ones the diagonal of one. If only the gradient of the initial state is needed, what segments do is all
that the backward takes: a sequence is then one of them.

Of a sequence that several processes share each has a shard, to whose effect on any state the segments' are joined. From
these the processes find the states at the starts of all shards; from there a shard is a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common, delta_chunked, delta_large, diagonal_chunked, diagonal_large
from rwkv_jit.schedules.common import Obstacle, padded
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Item, Pause, Result, Schedule, Step, Zero, aligned, renamed

LEAST_SEGMENTS = 4  # below, two more passes cost what the others gain
_LARGEST_DELTA = 256  # of large heads of wkv7, whose rows a join has in registers
_MULTIPLE = 64  # of tokens of ragged segments: they end where a chunk does, whichever length is taken
# A segment of packed sequences has an eighth of a multiprocessor's share of all tokens, so that the last one to end is
# not much later than the others. A multiprocessor works on two blocks at once. Sequences are cut where the longest one
# has three times a block's share, and where they have so many tokens on average.
_SHARES, _UNEVEN, _LEAST_MEAN = 8, 3, 256
_CUT_THREADS, _JOIN_THREADS, _UNIT_THREADS = 128, 128, 256
_JOIN_ROWS = 8  # value rows of a block where P is a matrix
_SEGMENT_ROWS = 128  # the most that a block of `wkv7_segment` holds
# Whom it is known for what a segment does: those behind it, those before it.
_FOR_LATER, _FOR_EARLIER = 1, 2


class _Lengths(NamedTuple):
    """How sequences may be cut, of a family or of large heads."""

    multiple: int  # of tokens of equal segments: they end where a chunk does, whichever length is taken; 0 without any
    least: int  # tokens of a segment; shorter ones spend their time on beginning and joining
    fewest: int = LEAST_SEGMENTS  # segments of a sequence


_CHUNKED: dict[str, Any] = {"delta": delta_chunked, "diagonal": diagonal_chunked}
_LARGE: dict[str, Any] = {"delta": delta_large, "diagonal": diagonal_large}
_LENGTHS = {
    "delta": _Lengths(max(delta_chunked.CHUNK_LENS), 512),
    "diagonal": _Lengths(max(diagonal_chunked.CHUNK_LENS), 256),
    "large": _Lengths(0, 4096, 8),  # as each of the two passes is a walk, beside which what is ragged costs nothing
}


def _kind(p: Problem) -> str:
    """Return whose segments they are: those of a family, or of large heads."""
    return "large" if p.backend in ("large", "large_segments") else p.op.family


def _kernels(p: Problem) -> Any:
    return (_LARGE if _kind(p) == "large" else _CHUNKED)[p.op.family]


# ---- the rule ----------------------------------------------------------------------------------------------------


def segments(kind: str, blocks: int, tokens: int, multiprocessors: int, least: int = 1) -> int:
    """Return into how many segments to cut equal sequences, so that about two blocks an SM have work.

    `blocks` are sequences times heads. Fewer than the fewest that are worth it where it cannot be done; at least
    `least`.
    """
    lengths = _LENGTHS[kind]
    most = min(max(2 * multiprocessors // max(blocks, 1), least), tokens // lengths.least)
    counts = range(lengths.fewest, most + 1) if lengths.multiple else ()
    return max([n for n in counts if tokens % (n * lengths.multiple) == 0], default=most)


def why_not(p: Problem, least: int = 1) -> Obstacle | None:
    """Return why sequences cannot be cut, of a call that the chunked kernels take; None where they can."""
    multiprocessors = p.multiprocessors
    if multiprocessors is None:
        return ("cuts nothing under `set_batch_invariant`",)
    family, shortest = p.op.family, _LENGTHS[p.op.family].least
    if p.is_packed:
        if p.tokens < _LEAST_MEAN:  # states of short ones take more memory than their rows
            return "needs {} tokens a sequence on average, got {}", _LEAST_MEAN, p.tokens
        length = _packed_length(family, p.tokens * p.all_heads, multiprocessors)
        share = p.tokens * p.all_heads // (2 * multiprocessors)
        longest = length + 1 if least > 1 else max(2 * length, _UNEVEN * share)
        return None if p.longest >= longest else ("needs a sequence of {} tokens, got {}", longest, p.longest)
    if segments(family, p.all_heads, p.tokens, multiprocessors, least) < LEAST_SEGMENTS:
        return "needs tokens for {} segments of {} or more, got {}", LEAST_SEGMENTS, shortest, p.tokens
    return None


def takes_large(p: Problem) -> bool:
    """Return whether few sequences of large heads are so long that three walks side by side end sooner."""
    if p.is_packed or p.multiprocessors is None or not _has_large_segments(p):
        return False
    blocks = 2 * p.all_heads * _row_blocks(p)
    return segments("large", blocks, p.tokens, p.multiprocessors) >= _LENGTHS["large"].fewest


def _has_large_segments(p: Problem) -> bool:
    return p.op.family == "diagonal" or max(p.K, p.V) <= _LARGEST_DELTA


def _row_blocks(p: Problem) -> int:
    """Return the blocks that a walk has for the value rows of a large head."""
    blocks: int = -(-p.V // _LARGE[p.op.family].MOST_ROWS)
    return blocks


def takes_shard(p: Problem) -> bool:
    """Return whether a shard can be cut: into equal segments, one of them if need be."""
    is_held = p.backend in ("chunked", "segments") and not p.is_packed and not p.is_narrow
    return is_held and min(p.B, p.T, p.H) > 0 and p.T % _LENGTHS[p.op.family].multiple == 0


def may_cut(backend: str, p: Problem) -> bool:
    """Return whether sequences of any lengths may be cut, for a backend as the caller has named it."""
    if p.multiprocessors is None or backend not in ("auto", "split"):
        return False
    if p.backend in ("large", "large_segments"):
        blocks = p.B * p.H * _row_blocks(p)
        has_segments = not p.is_packed and _has_large_segments(p)
        return has_segments and p.multiprocessors >= _LENGTHS["large"].fewest * blocks
    if p.backend not in ("chunked", "segments") or (p.is_packed and p.tokens < _LEAST_MEAN):
        return False
    if p.is_packed:  # the longest one may have all tokens; a share is rounded down
        return backend == "split" or 2 * p.multiprocessors >= _UNEVEN * (p.H - 1)
    return backend == "split" or 2 * p.multiprocessors >= LEAST_SEGMENTS * p.B * p.H


def _packed_length(family: str, blocks_tokens: Any, multiprocessors: int) -> Any:
    """Return the tokens of a segment of packed sequences, from the tokens of all heads."""
    share = blocks_tokens // (_SHARES * multiprocessors)
    return max(_LENGTHS[family].least, -(-share // _MULTIPLE) * _MULTIPLE)


# Whether packed sequences are cut depends on their lengths, and a backward cannot always look at these: in a capture
# the values may lie in a tensor that is new to it. So the memory of what a forward keeps is longer by so many bytes
# than the tensor, which tells the backward what ran. No memory that was rounded up to 512 bytes is so much longer.
MARKS = {"chunked": 1028, "segments": 1052}


class _Cut(NamedTuple):
    problem: Problem  # of the segments, whose states are their own
    count: Any  # segments of a sequence, where these are equal
    length: Any = 0  # tokens of the longest ones, where they are ragged
    is_whole: bool = False  # they are the sequences, of any lengths

    @property
    def is_ragged(self) -> bool:
        return bool(self.count == 0)


def _cut(p: Problem) -> _Cut:
    """Return how sequences are cut: the same whatever the number of others, so that results are the same."""
    kind, multiprocessors = _kind(p), p.multiprocessors
    if p.is_packed:
        shortest = _LENGTHS[kind].least
        length = shortest if multiprocessors is None else _packed_length(kind, p.T * p.H, multiprocessors)
    elif p.is_shard:
        multiple, least, _ = _LENGTHS[kind]
        most = max(min(2 * (multiprocessors or 0) // p.H, p.T // least), 1)
        count = max(n for n in range(1, most + 1) if p.T % (n * multiple) == 0)
        return _Cut(_of_segments(p, B=p.B * count, T=p.T // count, N=p.N * count), count)
    else:
        count = _LENGTHS[kind].fewest
        if multiprocessors is not None:
            blocks = 2 * p.H * _row_blocks(p) if kind == "large" else p.H
            count = segments(kind, blocks, p.T, multiprocessors, count)
        if _LENGTHS[kind].multiple and p.T % (count * _LENGTHS[kind].multiple) == 0:
            return _Cut(_of_segments(p, B=p.B * count, T=p.T // count, N=p.N * count), count)
        length = -(-p.T // (count * _MULTIPLE)) * _MULTIPLE
    return _ragged(p, p.slots(length), length)


def _ragged(p: Problem, count: Any, length: Any) -> _Cut:
    """Return all segments as packed sequences, whose lengths a kernel finds."""
    return _Cut(_of_segments(p, B=1, T=p.B * p.T, N=count, is_packed=True), 0, length)


def _of_segments(p: Problem, **sizes: Any) -> Problem:
    """Return the problem that the kernels of segments have: they choose as for many heads, as segments fill the GPU."""
    gpu, backend = p.gpu._replace(multiprocessors=None), "large" if _kind(p) == "large" else "chunked"
    return p._replace(
        state_type="fp32", state_layout="vk", has_initial_state=True, backend=backend, gpu=gpu, is_pooled=False,
        **sizes,
    )  # fmt: skip


# ---- kernels -----------------------------------------------------------------------------------------------------


def _transitions(cut: _Cut) -> Any:
    """Return the bytes of P of all segments, where it is a matrix and where it is diagonal."""
    p = cut.problem
    return aligned(4 * p.N * p.H * (p.K if p.op.family == "diagonal" else p.K**2))


def _places(p: Problem, cut: _Cut) -> dict[str, Any]:
    """Return what arguments are bound to that say where the segments of a sequence are."""
    bounds, tokens = "cu_seqlens" if p.is_packed else None, p.T if cut.is_ragged else cut.problem.T
    return {"cu_seqlens": bounds, "tokens": tokens, "segments": cut.count, "segment_len": cut.length}


def _segment_step(p: Problem, cut: _Cut, backward: bool) -> Step:
    """Return the launch that finds what segments do to any state; backwards to its gradient."""
    stem = p.op.stem
    geometry = _diagonal_geometry(p) if p.op.family == "diagonal" else _delta_geometry(p, backward)
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, **geometry, "BACKWARD": backward,
        "RAGGED": cut.is_ragged or cut.is_whole,
        **common.named({**common.types(p), **p.op.constants}, "T_IO", "T_W", "DECAY", "BONUS"), "T_W0": p.w0_type,
    }  # fmt: skip
    if p.op.family == "delta":
        parameters["LARGEST_DECAY"] = common.largest_decay(p)
    # In the forward a block may hold rows of Q and rows of P.
    rows = p.V if backward else padded(p.V) + p.K
    row_blocks = -(-rows // int(geometry["ROWS"])) if "ROWS" in geometry else 1
    bind = {
        **common.given(cut.problem), "keys": "r" if backward else "k", "key_strides": "r" if backward else "k",
        "values": "dy" if backward else "v", "value_strides": "dy" if backward else "v", "additions": "additions",
        "transitions": None if backward else "transitions", "decays": None if backward else "transitions",
        "bounds": "bounds" if cut.is_ragged else "cu_seqlens" if p.is_packed else None,
        "neighbours": "neighbours" if cut.is_ragged else None,
        # The backward takes P of the forward.
        "purpose": _FOR_EARLIER if backward else _FOR_LATER | (_FOR_EARLIER if p.training else 0),
    }  # fmt: skip
    name = f"{stem}_segment"
    return Step(name, name, parameters, (cut.problem.N, p.H, row_blocks), bind)


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


def _join_step(p: Problem, cut: _Cut, backward: bool, first: str | None, states: str | None, last: str | None) -> Step:
    """Return the launch that joins the segments, from the first state to those at all starts, or backwards."""
    is_diagonal = p.op.family == "diagonal"
    threads = max(_JOIN_THREADS, padded(p.K)) if is_diagonal else _JOIN_THREADS
    parameters: dict[str, Parameter] = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "NUM_THREADS": threads,
        "ROWS": threads // p.K if is_diagonal else _JOIN_ROWS, "BACKWARD": backward,
        "RAGGED": cut.is_ragged,
    }  # fmt: skip
    bind = {
        "transitions": "transitions", "decays": "transitions", "additions": "additions", "first": first,
        "states": states, "last": last, "heads": p.H, **_places(p, cut),
    }  # fmt: skip
    name, grid = f"{p.op.stem}_join", (p.N, p.H, -(-p.V // int(parameters["ROWS"])))
    return Step(name, name, parameters, grid, bind, optional=("last",))


def _shard_transition(p: Problem, cut: _Cut, results: dict[str, Result], scratch: dict[str, Any]) -> list[Item]:
    """Return the launches that join P of the segments to that of the shard: what becomes of unit states."""
    of_units = p._replace(V=p.K if p.op.family == "delta" else 1)
    results["transition"] = Result((p.N, p.H, of_units.V, p.K), "fp32")
    scratch["units"] = of_units.state_bytes
    scratch["no_additions"] = cut.problem._replace(V=of_units.V).state_bytes
    join = _join_step(of_units, cut, False, "units", None, "transition")
    return [
        _unit_step(of_units, "units"), Zero("no_additions"),
        join._replace(bind={**join.bind, "additions": "no_additions"}),
    ]  # fmt: skip


def _unit_step(p: Problem, states: str) -> Step:
    parameters: dict[str, Parameter] = {"HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "NUM_THREADS": _UNIT_THREADS}
    return Step("unit_states", "unit_states", parameters, (p.N * p.H, p.V, 1), {"states": states})


def _copy_states(p: Problem, cut: _Cut, source: str, target: str, target_type: str, of_last: bool) -> Step:
    """Return the launch that copies the states of the first ragged segments of all sequences, or of the last ones."""
    step = common.copy_states(p, source, target, "fp32", target_type, "vk", p.state_layout, 0, int(of_last))
    return step._replace(
        parameters={**step.parameters, "RAGGED": True}, bind={**step.bind, **_places(p, cut)}
    )  # fmt: skip


# ---- schedules ---------------------------------------------------------------------------------------------------


def kept(p: Problem) -> dict[str, Any]:
    """Return what the forward keeps: where ragged segments are, P of every one, and what the chunked kernels keep."""
    return _kept(_cut(p))


def _kept(cut: _Cut) -> dict[str, Any]:
    p = cut.problem
    places = {"bounds": aligned(8 * (p.N + 1)), "neighbours": aligned(4 * p.N)} if cut.is_ragged else {}
    return {**places, "transitions": _transitions(cut), **_kernels(p).kept(p)}


def most_kept(p: Problem) -> Any:
    """Return the most bytes that are kept of sequences of any lengths, however they are cut, or not at all."""
    least = _LENGTHS[_kind(p)].least
    return sum(_kept(_ragged(p, p.B * (p.T // least) + p.N, least)).values())


def forward(p: Problem) -> Schedule:
    """Return the forward."""
    cut = _cut(p)
    # Of equal segments the join gives the final state, as it knows what the last one does.
    gives_last = cut.is_ragged and p.has_final_state
    chunked = _kernels(p).forward(cut.problem._replace(has_final_state=gives_last))
    scratch = {"additions": cut.problem.state_bytes, "starts": cut.problem.state_bytes, **chunked.scratch}
    steps = list[Item]()
    if cut.is_ragged:  # a launch finds where they are
        bind = {**_places(p, cut), "sequences": p.N}
        steps.append(Step("cut_sequences", "cut_sequences", {"NUM_THREADS": _CUT_THREADS}, (p.N, 1, 1), bind))
    first = _first(p, "initial_state", p.state_type, steps, scratch) if p.has_initial_state else None
    last, behind = None, list[Step]()
    if p.has_final_state and not gives_last:
        last, behind = _last(p, "final_state", p.state_type, scratch)
    before, after = _in_two(p, cut, chunked, False, scratch)
    steps += before
    results = common.forward_results(p)
    if p.is_shard:  # what the segments leave of no state is joined to what the shard leaves of it
        results["bias"] = Result((p.N, p.H, p.V, p.K), "fp32")
        of_none = _join_step(p, cut, False, None, None, "bias")
        steps += [of_none, *_shard_transition(p, cut, results, scratch), Pause()]
    steps.append(_join_step(p, cut, False, first, "starts", last))
    main = sum(isinstance(step, Step) for step in steps) + chunked.main - (len(chunked.steps) - len(after))
    steps += renamed(after, {"initial_state": "starts", "final_state": "ends"})
    if gives_last:
        scratch["ends"] = cut.problem.state_bytes
        steps.append(_copy_states(p, cut, "ends", "final_state", p.state_type, of_last=True))
    steps += behind
    left = kept(p)
    if not p.training:
        of_chunks = _kernels(p).kept(cut.problem)
        scratch |= {name: size for name, size in left.items() if name not in of_chunks}
        left = {}
    return Schedule(_side_by_side(p, cut, steps), results, left, scratch, chunked.vectors, main)


def backward(p: Problem) -> Schedule:
    """Return the backward."""
    cut = _cut(p)
    # Of equal segments the join gives the gradient of the initial state, as it knows what the first one does.
    gives_first = cut.is_ragged and p.has_initial_state
    of_segments = cut.problem._replace(has_initial_state=gives_first, has_final_state=True)
    chunked = _kernels(p).backward(of_segments)
    scratch = {"additions": cut.problem.state_bytes, "ends": cut.problem.state_bytes, **chunked.scratch}
    steps: list[Item] = []
    first = _first(p, "grad_final_state", "fp32", steps, scratch) if p.has_final_state else None
    last, behind = None, list[Step]()
    if p.has_initial_state and not cut.is_ragged:
        last, behind = _last(p, "grad_initial_state", "fp32", scratch)
    before, after = _in_two(p, cut, chunked, True, scratch)
    steps += before
    results = common.backward_results(p)
    if p.is_shard:
        results["bias"] = Result((p.N, p.H, p.V, p.K), "fp32")
        steps += [_join_step(p, cut, True, None, None, "bias"), Pause()]
    steps.append(_join_step(p, cut, True, first, "ends", last))
    main = sum(isinstance(step, Step) for step in steps)
    names = {"grad_final_state": "ends"} | ({"grad_initial_state": "begins"} if gives_first else {})
    if not cut.is_ragged:
        names |= {f"d{name}_rows": f"d{name}_segments" for name in p.op.fixed}
        scratch |= {**common.sequence_gradients(p), **common.sequence_gradients(p, cut.problem.N, "segments")}
    steps += renamed(after, names)
    if not cut.is_ragged:
        steps += common.sum_gradients(p, "segments", cut.count)
    if gives_first:
        scratch["begins"] = cut.problem.state_bytes
        steps.append(_copy_states(p, cut, "begins", "grad_initial_state", "fp32", of_last=False))
    steps += behind
    return Schedule(_side_by_side(p, cut, steps), results, {}, scratch, chunked.vectors, main + chunked.main)


def backward_of_state(p: Problem) -> Schedule:
    """Return the backward that makes the gradient of the initial state alone; it takes nothing that a forward keeps."""
    cut = _cut(p) if p.backend == "segments" else None
    if cut is None or cut.is_ragged:
        cut = _Cut(p, 1, is_whole=True)
    steps, scratch = list[Item](), dict[str, Any]()
    target, behind = _last(p, "grad_initial_state", "fp32", scratch)
    walk = _segment_step(p, cut, backward=True)
    if cut.count == 1 and not p.has_final_state:
        steps.append(walk._replace(bind={**walk.bind, "additions": target}))
    else:
        first = _first(p, "grad_final_state", "fp32", steps, scratch) if p.has_final_state else None
        scratch |= {"transitions": _transitions(cut), "additions": cut.problem.state_bytes}
        forwards = _segment_step(p, cut, backward=False)
        join = _join_step(p, cut, True, first, None, target)
        # Q of the forward is of no use, and its place is taken by that of the backward.
        steps += [forwards, walk, join]
    steps += behind
    return Schedule(_side_by_side(p, cut, steps), common.backward_results(p), {}, scratch, common.vectors(p))


def _first(p: Problem, states: str, storage: str, steps: list[Item], scratch: dict[str, Any]) -> str:
    """Return where states of a type are as a join takes them, with a step that brings them there."""
    if (storage, p.state_layout, p.is_pooled) == ("fp32", "vk", False):
        return states
    steps.append(common.copy_states(p, states, "first", storage, "fp32", p.state_layout, "vk"))
    scratch["first"] = p.state_bytes
    return "first"


def _last(p: Problem, states: str, storage: str, scratch: dict[str, Any]) -> tuple[str, list[Step]]:
    """Return where a join leaves states of a type, and the step that brings them to where they belong."""
    if (storage, p.state_layout) == ("fp32", "vk"):
        return states, []
    scratch["last"] = p.state_bytes
    return "last", [common.copy_states(p, "last", states, "fp32", storage, "vk", p.state_layout)]


def _in_two(
    p: Problem, cut: _Cut, chunked: Schedule, backward: bool, scratch: dict[str, Any]
) -> tuple[list[Item], list[Item]]:
    """Return the steps that find what segments do to any state, and those that know the states at their starts.

    Large heads do so by their own steps. From no state a walk leaves "additions". Forwards another one, without values
    from unit states, leaves "transitions", which the backward takes too. What either writes meanwhile nobody reads.
    """
    names = {"cu_seqlens": "bounds"} if cut.is_ragged else {}
    if _kind(p) != "large":
        return [_segment_step(p, cut, backward)], renamed(chunked.steps, names)
    if backward:
        scan = chunked.launches[0]
        from_zero = scan._replace(bind={**scan.bind, "first": None, "last": "additions"})
        return renamed([from_zero], names), renamed(chunked.steps, names)
    p, (*prepares, scan) = cut.problem, chunked.launches
    bind = {**scan.bind, "solved": None, "states": None, "checkpoints": None, "framed": None}
    from_zero = scan._replace(bind={**bind, "first": None, "last": "additions"})
    of_units = p._replace(V=p.K if p.op.family == "delta" else 1)
    unit = _unit_step(of_units, "transitions")
    scratch["no_values"] = aligned(2 * of_units.V)
    if of_units.V > p.V:
        scratch["unread"] = aligned(2 * p.B * p.T * p.H * of_units.V)
    from_unit = _kernels(p).segment_walk(of_units, {
        **bind, "input": "no_values", "output": "unread" if of_units.V > p.V else "y", "first": "transitions",
        "last": "transitions",
    })  # fmt: skip
    before = [*prepares, Zero("no_values"), from_zero, unit, from_unit]
    return renamed(before, names), renamed([scan], names)


def _side_by_side(p: Problem, cut: _Cut, steps: list[Item]) -> tuple[Item, ...]:
    """Return steps that read the rows of a batch as one: a number above 1 says that they must follow each other."""
    rows = 1 if p.is_packed else p.T if cut.is_ragged else cut.count
    return tuple(step._replace(segments=rows) if isinstance(step, Step) else step for step in steps)
