"""Sequences of any lengths over a pool of states: each takes the kernels that are fastest for its length.

A first launch reads the lengths on the GPU. A few tokens go one by one; other sequences take the algorithm of the op
beside them, on another stream. Checkpoints cut a sequence into pieces for waves of that algorithm, each from the state
that the one before has written. Few heads and long prompts go in segments, and then all sequences do. An op that goes
through another has launches around all of these, where no dedicated kernels are for its prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rwkv_jit.schedules import directions, through, update
from rwkv_jit.schedules.operands import Slots
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Item, Schedule, Step, Zero, aligned, renamed
from rwkv_jit.schedules.update import FEW_TOKENS, Pool

_ALL_TOKENS = 2**62
_PIECE_BYTES = 16
_THREADS = 128
_BOUNDS = "piece_bounds"
_OF_WAVE = {"cu_seqlens", "wave"}
_NAMES = {"initial_state": "state", "final_state": "state", "cu_seqlens": _BOUNDS}


class Varlen(NamedTuple):
    """What tells calls apart for these launches, beside the problem and the pool."""

    sequences: int
    checkpoints: int = 0  # of each
    bound_bytes: int = 4  # of the numbers in cu_seqlens
    has_few_tokens: bool = False  # no sequence has more than FEW_TOKENS, and none has checkpoints


def schedule(p: Problem, pool: Pool, call: Varlen) -> Schedule:
    """Return the launches for a problem of packed tokens, whose algorithm is chosen."""
    slots = Slots(pool.slots, pool.index_bytes, pool.null_index, call.sequences, call.bound_bytes)
    if through.applies(p) and not call.has_few_tokens:
        inner = schedule(through.below(p), pool, call)
        return through.over_pool(through.forward(p, inner), slots, inner.vectors.get("y", 1))
    pieces = call.sequences * (call.checkpoints + 1)
    scratch: dict[str, Any] = {_BOUNDS: aligned(8 * (pieces + 1)), "pieces": _PIECE_BYTES * pieces}
    if call.has_few_tokens:
        return Schedule((_arrange(p, pool, call, _ALL_TOKENS), _few(p, pool, pieces, "y")), scratch=scratch)
    # Segments have a launch for all sequences, whatever their lengths are.
    is_cut = p.backend == "segments"
    arrange = _arrange(p, pool, call, 0 if is_cut else FEW_TOKENS)
    of_chunks = directions.forward(p._replace(
        N=pieces, is_packed=True, is_pooled=True, waves=call.checkpoints + 1, has_initial_state=True,
        has_final_state=True,
    ))  # fmt: skip
    before, of_wave, behind = _parts(of_chunks.steps)
    waves: list[Item] = []
    for wave in range(call.checkpoints + 1):
        waves += renamed(of_wave, {**_NAMES, "slot_stride": pool.slot_stride, "wave": wave})
    # Waves come one after another anyway, and what is zeroed before each has to wait for the one before.
    if not is_cut and not call.checkpoints:
        waves = _beside(waves)
    if behind:  # a gate of what all launches leave in a buffer
        p = p._replace(types={name: storage for name, storage in p.types.items() if name != "z"})
        behind = [each._replace(waits=True) for each in behind]
    few = _few(p, pool, pieces, of_chunks.launches[of_chunks.main].bind.get("y", "y"))
    whole = Schedule(
        (arrange, *before, *waves, few, *behind), scratch={**scratch, **of_chunks.scratch}, main=1 + of_chunks.main,
        vectors=of_chunks.vectors, rows=of_chunks.rows,
    )  # fmt: skip
    return through.over_pool(whole, slots, of_chunks.vectors.get("v", 1))  # y may lie where a caller wants it


def _few(p: Problem, pool: Pool, pieces: Any, y: str) -> Step:
    """Return the launch for the pieces of a few tokens, which leaves zeros where a sequence has no slot."""
    step = update.step(p._replace(B=pieces), pool, is_packed=True)
    return step._replace(bind={**step.bind, "bounds": _BOUNDS, "y": y})


def _parts(steps: Sequence[Item]) -> tuple[list[Step], Sequence[Item], list[Step]]:
    """Return what comes once before all waves, the launches of each wave, and what comes once behind all.

    Those of a wave take the bounds or the wave of pieces; the others go over all tokens.
    """
    of_wave = [i for i, x in enumerate(steps) if not isinstance(x, Step) or _OF_WAVE & {y.name for y in x.arguments()}]
    before, behind = (
        [x for x in some if isinstance(x, Step)] for some in (steps[: of_wave[0]], steps[of_wave[-1] + 1 :])
    )
    return before, steps[of_wave[0] : of_wave[-1] + 1], behind


def _arrange(p: Problem, pool: Pool, call: Varlen, few_tokens: int) -> Step:
    parameters = {"NUM_THREADS": _THREADS, "BOUND_BYTES": call.bound_bytes, "INDEX_BYTES": pool.index_bytes}
    bind = {
        "tokens": p.T, "sequences": call.sequences, "checkpoints": call.checkpoints, "slots": pool.slots,
        "null_index": pool.null_index, "few_tokens": few_tokens, "bounds": _BOUNDS,
    }  # fmt: skip
    grid = (-(-call.sequences // _THREADS), 1, 1)
    return Step("arrange_sequences", "arrange_sequences", parameters, grid, bind)


def _beside(several: list[Item]) -> list[Item]:
    """Return launches on the stream beside the call's, behind what is filled with zeros before."""
    zeros = [each for each in several if isinstance(each, Zero)]
    launches = [each._replace(is_beside=True) for each in several if isinstance(each, Step)]
    return [*zeros, launches[0]._replace(waits=True), *launches[1:]]
