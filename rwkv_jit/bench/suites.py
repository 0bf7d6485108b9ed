"""Which cases are measured together: those that a command line names, and the tables of published studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rwkv_jit.bench.cases import OPS, PHASES, WITH_STATES, Case, shape_of

# Batch, tokens, heads, head size: a short prompt, and training.
SHAPES = ((1, 54, 32, 64), (8, 4096, 64, 64))
USUAL_PHASES = ("forward", "forward+backward")
_BOTH = USUAL_PHASES


class Entry(NamedTuple):
    """A case, and the backends of ours that are measured on it."""

    suite: str | None
    case: Case
    backends: Sequence[str] | None = None  # all that can do it


def _entries(
    suite: str, op: str, sizes: Sequence[tuple[int, ...]], phases: Sequence[str], backends: Sequence[str] = ("auto",),
    dtype: torch.dtype = torch.bfloat16, wide_decay: bool = False,
) -> list[Entry]:  # fmt: skip
    return [
        Entry(suite, Case(op, shape_of(op, ",".join(map(str, size))), dtype, phase, wide_decay), backends)
        for size in sizes
        for phase in phases
    ]


def studies() -> dict[str, list[Entry]]:
    """Return the tables of the studies, by name.

    Returns
    -------
    dict
        wind: RWKV-7 at a model dimension of 4096, batches, heads and lengths as Wind RWKV published them. profile: the
        prompt at which RWKV-6 was profiled, naive, token by token and in chunks. chunk_rwkv6: the prefill of a model of
        1.6 billion parameters. gla: gated linear attention with long keys and values, and at head size 128.
        linear_attention: the same without gates. timex: a convolution of 768 channels over 768 tokens, forward and
        backward apart. wkv4: RWKV-4 in training. models: what the studies leave out: RWKV-5 and 6 in training, one long
        sequence, a prompt as the op's caller has it, and a filter of many tokens.
    """
    long, training = (1, 32768, 16, 256), (8, 4096, 32, 128)
    return {
        "wind": _entries("wind", "wkv7", [(8, 4096, 64, 64), training, (8, 4096, 16, 256), long], _BOTH),
        "profile": _entries(
            "profile", "wkv6", [(1, 54, 32, 64)], ["forward"], ["auto", "recurrent", "chunked"], torch.float16, True
        ),
        "chunk_rwkv6": _entries("chunk_rwkv6", "wkv6", [(1, 4096, 32, 64)], ["prefill"]),
        "gla": _entries("gla", "gla", [(32, 2048, 4, 256, 512), training], _BOTH),
        "linear_attention": _entries("linear_attention", "linear_attention", [training], _BOTH),
        "timex": _entries(
            "timex", "timex", [(32, 768, 768)], ["forward", "backward"], ["auto", "tiles", "fft"], torch.float32
        ),
        "wkv4": _entries("wkv4", "wkv4", [(8, 4096, 4096)], _BOTH),
        "models": [
            *_entries("models", "wkv7", [(1, 32768, 16, 64)], _BOTH),
            *_entries("models", "wkv6", [(8, 4096, 64, 64), (1, 4096, 32, 64)], _BOTH),
            *_entries("models", "wkv6", [(1, 54, 32, 64)], ["forward"]),
            *_entries("models", "wkv5", [(8, 4096, 64, 64)], _BOTH),
            *_entries("models", "timex", [(8, 768, 8192)], ["forward"], ["auto", "fft"], torch.float32),
        ],
    }  # fmt: skip


SUITES = ("studies", *studies())


def of_suite(name: str, ops: Sequence[str] | None = None) -> list[Entry]:
    """Return the entries of a suite: of one table, or with "studies" of all; `ops` leaves the others out."""
    tables = studies()
    found = [entry for table in (tables if name == "studies" else [name]) for entry in tables[table]]
    return [entry for entry in found if not ops or entry.case.op in ops]


def asked_for(
    ops: Sequence[str], shape: str | None, dtype: torch.dtype, phases: Sequence[str], backends: Sequence[str] | None
) -> list[Entry]:
    """Return what a command line names; a decode takes one token, whatever the shape says.

    Raises
    ------
    ValueError
        A shape does not fit an op, or a phase asks for states of an op that has none.
    """
    texts = [shape] if shape is not None else [",".join(map(str, size)) for size in SHAPES]
    found = []
    for text in texts:
        for op in ops:
            for phase in phases:
                if op == "timex" and phase in WITH_STATES:
                    raise ValueError(f"--phase: expected one of {', '.join(PHASES[:3])} for timex, got {phase}")
                sizes = shape_of(op, text)
                if phase == "decode":
                    sizes = (sizes[0], 1, *sizes[2:])
                found.append(Entry(None, Case(op, sizes, dtype, phase), backends))
    return list({entry.case: entry for entry in found}.values())  # two lengths of a prompt are one decode


def usual_ops(phases: Sequence[str]) -> list[str]:
    """Return the ops that have all of these phases."""
    return [op for op in sorted(OPS) if op != "timex" or not set(phases) & set(WITH_STATES)]
