"""Which cases are measured together: the tables of published studies, those of models, and what is hard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.cases import Case
from bench.measure import Entry
from rwkv_jit.desk.inputs import USUAL_PHASES as BOTH
from rwkv_jit.desk.inputs import shape_of

_Sizes = Sequence[tuple[int, ...]]


def _entries(
    suite: str, op: str, sizes: _Sizes, phases: Sequence[str] = BOTH, backends: Sequence[str] = ("auto",),
    dtype: torch.dtype = torch.bfloat16, wide_decay: bool = False, kind: str = "usual",
) -> list[Entry]:  # fmt: skip
    return [
        Entry(suite, Case(op, shape_of(op, ",".join(map(str, size))), dtype, phase, wide_decay, kind).check(), backends)
        for size in sizes
        for phase in phases
    ]


def _studies() -> dict[str, list[Entry]]:
    """Return the tables, by name.

    wind: RWKV-7 at a model dimension of 4096, batches, heads and lengths as Wind RWKV published them. profile: the
    prompt at which RWKV-6 was profiled, naive, token by token and in chunks. chunk_rwkv6: the prefill of a model of 1.6
    billion parameters. gla: gated linear attention with long keys and values, and at head size 128. linear_attention:
    the same without gates. timex: a convolution of 768 channels over 768 tokens, forward and backward apart. wkv4:
    RWKV-4 in training. models: what the studies leave out: RWKV-5 and 6 in training, one long sequence, a prompt as the
    op's caller has it, and a filter of many tokens. strong: decays out of the range of chunks, of one head in 512 and
    of all. decode: one token of one sequence, and of many. packed: 16 sequences of unequal lengths in one row.
    inference: one token of each sequence of a server, whose states lie in a pool and change in place, and one prompt.
    """
    long, training, usual = (1, 32768, 16, 256), (8, 4096, 32, 128), (8, 4096, 64, 64)
    row, steps = (1, 32768, 64, 64), [(1, 1, 32, 64), (64, 1, 32, 64)]
    return {
        "wind": _entries("wind", "wkv7", [usual, training, (8, 4096, 16, 256), long]),
        "profile": _entries(
            "profile", "wkv6", [(1, 54, 32, 64)], ["forward"], ["auto", "recurrent", "chunked"], torch.float16, True
        ),
        "chunk_rwkv6": _entries("chunk_rwkv6", "wkv6", [(1, 4096, 32, 64)], ["prefill"]),
        "gla": _entries("gla", "gla", [(32, 2048, 4, 256, 512), training]),
        "linear_attention": _entries("linear_attention", "linear_attention", [training]),
        "timex": _entries(
            "timex", "timex", [(32, 768, 768)], ["forward", "backward"], ["auto", "tiles", "fft"], torch.float32
        ),
        "wkv4": _entries("wkv4", "wkv4", [(8, 4096, 4096)]),
        "models": [
            *_entries("models", "wkv7", [(1, 32768, 16, 64)]),
            *_entries("models", "wkv6", [usual, (1, 4096, 32, 64)]),
            *_entries("models", "wkv6", [(1, 54, 32, 64)], ["forward"]),
            *_entries("models", "wkv5", [usual]),
            *_entries("models", "timex", [(8, 768, 8192)], ["forward"], ["auto", "fft"], torch.float32),
        ],
        "strong": [
            entry
            for op in ("wkv7", "wkv6", "gla")
            for kind in ("one-strong", "strong")
            for entry in _entries("strong", op, [usual], kind=kind)
        ],
        "decode": [
            *(entry for op in ("wkv7", "wkv6", "wkv5", "gla") for entry in _entries("decode", op, steps, ["decode"])),
            *_entries("decode", "wkv4", [(1, 1, 2048), (64, 1, 2048)], ["decode"]),
        ],
        "packed": [
            entry for op in ("wkv7", "wkv6", "gla") for entry in _entries("packed", op, [row], kind="packed")
        ],
        "inference": [
            *_entries("inference", "wkv7", [(1, tokens, 32, 64) for tokens in (54, 512, 4096, 32768)], ["prefill"]),
            *(
                entry
                for op, batches, heads, kinds in (
                    ("wkv7", (1, 32, 256, 1024), (64, 64), ("usual", "bf16-states")),
                    ("wkv6", (1, 64), (32, 64), ("usual",)),
                    ("gla", (1, 64, 512), (32, 128), ("usual", "vk-states")),
                )
                for kind in kinds
                for entry in _entries("inference", op, [(batch, 1, *heads) for batch in batches], ["update"], kind=kind)
            ),
        ],
    }  # fmt: skip


def _family() -> list[Entry]:
    """Return the ops that are made of others, in training: at the shapes of models, with fewer heads of keys too."""
    usual = (8, 4096, 32, 128)
    grouped = [usual, (8, 4096, 64, 128), (1, 32768, 32, 128)]
    return [
        *_entries("family", "kda", [usual, (2, 8192, 64, 128)]),
        *_entries("family", "gated_delta_rule", grouped, kind="16-keys"),
        *_entries("family", "delta_rule", [usual]),
        *_entries("family", "simple_gla", [usual]),
        *_entries("family", "ssd", [(8, 4096, 32, 128, 64)]),
    ]


def _front() -> list[Entry]:
    """Return what the first page shows, in training, with KDA of few heads too."""
    usual, narrow = (8, 4096, 64, 64), (8, 4096, 32, 128)
    return [
        *_entries("front", "wkv7", [usual, narrow]),
        *_entries("front", "kda", [narrow]),
        *_entries("front", "kda", [(1, 8192, 24, 128)], kind="strong-gates"),
        *_entries("front", "wkv6", [usual]),
        *_entries("front", "gla", [narrow]),
        *_entries("front", "delta_rule", [narrow]),
        *_entries("front", "ssd", [(8, 4096, 32, 128, 64)]),
    ]


def _gates() -> list[Entry]:
    """Return KDA of few heads, whose gates decide how far others look back."""
    few, fewer = (1, 8192, 24, 128), (1, 2048, 12, 128)
    return [
        *_entries("gates", "kda", [fewer], kind="strong-gates"),
        *_entries("gates", "kda", [few, fewer], kind="slow-gates"),
    ]


def _float32() -> list[Entry]:
    """Return calls of the first page in float32, which says what exact kernels cost."""
    usual, narrow = (8, 4096, 64, 64), (8, 4096, 32, 128)
    calls = (("wkv7", [usual, narrow]), ("wkv6", [usual]), ("gla", [narrow]))
    return [entry for op, sizes in calls for entry in _entries("float32", op, sizes, dtype=torch.float32)]


STUDIES = _studies()
TABLES = {**STUDIES, "family": _family(), "front": _front(), "gates": _gates(), "float32": _float32()}
SUITES = ("studies", *TABLES)


def entries_of(names: Sequence[str], ops: Sequence[str] | None = None) -> list[Entry]:
    """Return the entries of suites: of tables, or with "studies" of all; `ops` leaves the others out.

    Raises ValueError where nothing is left.
    """
    tables = dict.fromkeys(table for name in names for table in (STUDIES if name == "studies" else [name]))
    entries = [entry for table in tables for entry in TABLES[table] if not ops or entry.case.op in ops]
    if not entries:
        raise ValueError(f"--op: nothing of {', '.join(ops or ())} is in --suite {' '.join(names)}")
    return entries
