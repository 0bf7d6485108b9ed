"""What stands for all calls of an op, of any lengths and any batch: problems, and schedules of calls over a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from rwkv_jit.call import rule
from rwkv_jit.call.rule import Known
from rwkv_jit.ops import wide_keys
from rwkv_jit.schedules import directions, replay, segments, update, varlen
from rwkv_jit.schedules.problem import STATE, Problem
from rwkv_jit.schedules.replay import Ring
from rwkv_jit.schedules.schedule import Schedule
from rwkv_jit.schedules.update import Pool
from rwkv_jit.schedules.varlen import Varlen

Knowing = Callable[[], Known]
MANY = 2**16  # multiprocessors of a GPU that has too few heads whatever a call has
# Of all lengths one stands for those that the tensor cores take, in segments too, one for those that few heads take in
# the kernels for large ones, one for those of a few chunks, one for those that are a short chunk, and two for the
# others, of several tokens and of one; of all GPUs one that has too few heads whatever a call has, for calls of one
# length and for packed ones of uneven lengths. Where the number of multiprocessors is not known, calls have heads
# enough.
LONG = 2**16
_OF_FEW_HEADS = 512
_LENGTHS = (LONG, _OF_FEW_HEADS, 128, rule.SHORT_TOKENS, 2, 1)
# Of those without initial states, which have kernels of their own; their final states are float32.
_STATELESS_LENGTHS = (32, rule.SHORT_TOKENS, 2, 1)
# Of ops with dedicated kernels: multiprocessors for each head of all sequences. These cut a sequence from so many
# tokens for a block on, and values where there are fewer blocks than multiprocessors.
_SHARES = (1, 2, 4)
_LEAST_CUT = 2048


# ---- problems ----------------------------------------------------------------------------------------------------


def _resolved(
    several: Sequence[Problem], knowing: Sequence[Knowing], *purposes: bool, sees_load: bool = True
) -> list[Problem]:
    """Return the problems of calls by the rule: for gradients or not, of calls that know one thing or another."""
    return [
        rule.resolved(p._replace(training=training), known, sees_load)
        for p in several
        for training, known in product(purposes, knowing)
    ]


def _in_dedicated_kernels(p: Problem) -> list[Problem]:
    """Return what stands for calls in dedicated kernels, if the op has some: of many blocks and fewer."""
    if p.op.through is None:
        return []
    gpus = [p.gpu._replace(multiprocessors=share * p.H) for share in _SHARES]
    return [p._replace(T=tokens, gpu=gpu) for tokens, gpu in product((LONG, _LEAST_CUT, 1024), gpus)]


def _few_heads(p: Problem) -> Problem:
    return p._replace(gpu=p.gpu._replace(multiprocessors=MANY))


def problems(stand_in: Problem, direction: str, knowing: Sequence[Knowing]) -> list[Problem]:
    """Return the problems of the calls that one stands for: of any lengths, and of any batch."""
    several = [
        each
        for tokens in _LENGTHS
        for p in _in_parts(stand_in._replace(T=tokens))
        for each in (p, _few_heads(p), _few_heads(p)._replace(is_packed=True, longest=tokens))
    ]
    several += _in_dedicated_kernels(stand_in)
    for tokens in _STATELESS_LENGTHS if stand_in.state_type == "fp32" else ():
        parts = _in_parts(stand_in._replace(T=tokens, has_initial_state=False))
        several += [each for p in parts for each in (p, _few_heads(p))]
    resolved = _resolved(several, knowing, True, *([False] if direction == "forward" else []))
    if direction == "backward":
        of_states = [p for p in resolved if directions.has_state_alone(p)]
        resolved += [p._replace(wanted=(STATE,)) for p in of_states]
    return resolved


def pooled_problems(stand_in: Problem, knowing: Sequence[Knowing]) -> list[Problem]:
    """Return the problems that stand for sequences of any lengths over a pool, longer ones than updates take."""
    several = []
    for tokens in (LONG, _OF_FEW_HEADS, rule.SHORT_TOKENS):
        p = stand_in._replace(T=tokens, is_packed=True, is_narrow=False)
        several += [p, _few_heads(p), _few_heads(p)._replace(longest=tokens)]
    dedicated = [p._replace(is_packed=True, is_pooled=True) for p in _in_dedicated_kernels(stand_in)]
    dedicated += [_few_heads(p) for p in dedicated[:: len(_SHARES)]]
    return _resolved(several, knowing, False) + _resolved(dedicated, knowing, False, sees_load=False)


def shard_problems(stand_in: Problem, direction: str, knowing: Sequence[Knowing]) -> list[Problem]:
    """Return the problems that stand for calls over parts of sequences, whose kernels pause for other parts."""
    stand_in = stand_in._replace(state_type="fp32", state_layout="vk")
    several = _in_parts(stand_in._replace(T=LONG))
    resolved = [p for p in _resolved(several, knowing, True) if segments.takes_shard(directions.running(p))]
    purposes = (True, False) if direction == "forward" else (True,)
    pausing = [
        p._replace(backend="segments", is_shard=True, training=training) for p, training in product(resolved, purposes)
    ]
    # Others have states in this layout too, and of a delta term what becomes of unit states.
    values = (stand_in.V, *((stand_in.K,) if stand_in.op.transition[0] == "K" else ())) if stand_in.op.through else ()
    others = [p for V in dict.fromkeys(values) for p in problems(stand_in._replace(V=V), direction, knowing)]
    if direction == "forward":
        others += [p._replace(training=False) for p in others]
    return pausing + others


def _in_parts(p: Problem) -> list[Problem]:
    """Return the calls that are made of one of these, where its keys go in parts."""
    running = rule.seen(p)
    sizes = wide_keys.part_sizes(running) if running.op.family == "diagonal" else [p.K]
    return [p._replace(K=size) for size in dict.fromkeys(sizes)]


# ---- schedules of calls over a pool ------------------------------------------------------------------------------


def _calls(
    p: Problem, tokens: int, w0_types: Sequence[str], index_bytes: int, is_draft: bool = False
) -> Iterator[tuple[Problem, Pool]]:
    """Yield what stands for calls of so many tokens over a pool: with few blocks and many, and both roundings."""
    few_or_many, roundings = (MANY, None), (False,) if p.state_type == "fp32" else (False, True)
    for multiprocessors, w0_type, is_stochastic in product(few_or_many, dict.fromkeys(w0_types), roundings):
        pool = Pool(1, 0, index_bytes=index_bytes, w0_type=w0_type, is_stochastic=is_stochastic and not is_draft)
        yield p._replace(T=tokens, gpu=p.gpu._replace(multiprocessors=multiprocessors)), pool


def updates(p: Problem, w0_types: Sequence[str], index_bytes: int) -> Iterator[Schedule]:
    """Yield the schedules of updates: of one token and of several."""
    for tokens in (1, 2):
        yield from (update.schedule(own, pool) for own, pool in _calls(p, tokens, w0_types, index_bytes))


def replays(p: Problem, w0_types: Sequence[str], index_bytes: int, length: int, drafts: int) -> Iterator[Schedule]:
    """Yield the schedules of a ring: of steps, of drafts, of commits and of flushes."""
    of_drafts = [(1, True), (drafts, True)] if drafts else []
    for tokens, is_draft in dict.fromkeys([(1, False), *of_drafts, (0, False)]):
        ring = Ring(length, length + drafts, length, is_draft)
        for own, pool in _calls(p, tokens, w0_types, index_bytes, is_draft):
            yield replay.schedule(own, pool, ring, tokens)


def varlens(several: Sequence[Problem], w0_types: Sequence[str], index_bytes: int) -> Iterator[Schedule]:
    """Yield the schedules of sequences of any lengths, whose w0 has these types: "void" is none."""
    roundings = (False,) if several[0].state_type == "fp32" else (False, True)
    choices = product(several, dict.fromkeys(w0_types), (4, 8), roundings, (False, True))
    for p, w0_type, bound_bytes, is_stochastic, has_few_tokens in choices:
        pool = Pool(1, 0, 16, index_bytes, -1, "fp32" if w0_type == "void" else w0_type, is_stochastic)
        yield varlen.schedule(p._replace(w0_type=w0_type), pool, Varlen(1, 0, bound_bytes, has_few_tokens))
