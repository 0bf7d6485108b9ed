"""Which cases are measured together: the tables of published studies, those of models, and what is hard."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch

from bench.cases import DECODES, PROMPTS, REPLAY, VARLEN, VERIFY, Case
from bench.measure import Entry
from rwkv_jit.desk.inputs import UPDATE, shape_of
from rwkv_jit.desk.inputs import USUAL_PHASES as BOTH


class Rows(NamedTuple):
    """Cases of a suite: every op with every kind of inputs, size and phase."""

    ops: str  # their names
    sizes: Sequence[tuple[int, ...]]
    phases: Sequence[str] = BOTH
    backends: Sequence[str] = ("auto",)
    dtype: torch.dtype = torch.bfloat16
    wide_decay: bool = False
    kinds: Sequence[str] = ("usual",)

    def entries(self, suite: str) -> list[Entry]:
        """Return the entries of these cases."""
        cases = [
            Case(op, shape_of(op, ",".join(map(str, size))), self.dtype, phase, self.wide_decay, kind)
            for op, kind, size, phase in product(self.ops.split(), self.kinds, self.sizes, self.phases)
        ]
        return [Entry(suite, case.check(), self.backends) for case in cases]


_LONG, _TRAINING, _USUAL, _PROMPT = (1, 32768, 16, 256), (8, 4096, 32, 128), (8, 4096, 64, 64), (1, 54, 32, 64)
_ROW, _STEPS = (1, 32768, 64, 64), [(1, 1, 32, 64), (64, 1, 32, 64)]
_FEW, _FEWER, _OF_STATES = (1, 8192, 24, 128), (1, 2048, 12, 128), (8, 4096, 32, 128, 64)
# wind: RWKV-7 at a model dimension of 4096, batches, heads and lengths as Wind RWKV published them. profile: the prompt
# at which RWKV-6 was profiled, naive, token by token and in chunks. chunk_rwkv6: the prefill of a model of 1.6 billion
# parameters. gla: gated linear attention with long keys and values, and at head size 128. linear_attention: the same
# without gates. timex: a convolution of 768 channels over 768 tokens, forward and backward apart. wkv4: RWKV-4 in
# training. models: what the studies leave out: RWKV-5 and 6 in training, one long sequence, a prompt as the op's caller
# has it, and a filter of many tokens. strong: decays out of the range of chunks, of one head in 512 and of all. decode:
# one token of one sequence, and of many. packed: 16 sequences of unequal lengths in one row. inference: one token of
# each sequence of a server, whose states lie in a pool and change in place, and one prompt.
_STUDIES = {
    "wind": [Rows("wkv7", [_USUAL, _TRAINING, (8, 4096, 16, 256), _LONG])],
    "profile": [Rows("wkv6", [_PROMPT], ["forward"], ["auto", "recurrent", "chunked"], torch.float16, True)],
    "chunk_rwkv6": [Rows("wkv6", [(1, 4096, 32, 64)], ["prefill"])],
    "gla": [Rows("gla", [(32, 2048, 4, 256, 512), _TRAINING])],
    "linear_attention": [Rows("linear_attention", [_TRAINING])],
    "timex": [Rows("timex", [(32, 768, 768)], ["forward", "backward"], ["auto", "tiles", "fft"], torch.float32)],
    "wkv4": [Rows("wkv4", [(8, 4096, 4096)])],
    "models": [
        Rows("wkv7", [(1, 32768, 16, 64)]), Rows("wkv6", [_USUAL, (1, 4096, 32, 64)]),
        Rows("wkv6", [_PROMPT], ["forward"]), Rows("wkv5", [_USUAL]),
        Rows("timex", [(8, 768, 8192)], ["forward"], ["auto", "fft"], torch.float32),
    ],
    "strong": [Rows("wkv7 wkv6 gla", [_USUAL], kinds=["one-strong", "strong"])],
    "decode": [
        Rows("wkv7 wkv6 wkv5 gla", _STEPS, ["decode"]), Rows("wkv4", [(1, 1, 2048), (64, 1, 2048)], ["decode"]),
    ],
    "packed": [Rows("wkv7 wkv6 gla", [_ROW], kinds=["packed"])],
    "inference": [
        Rows("wkv7", [(1, tokens, 32, 64) for tokens in (54, 512, 4096, 32768)], ["prefill"]),
        Rows("wkv7", [(n, 1, 64, 64) for n in (1, 32, 256, 1024)], ["update"], kinds=["usual", "bf16-states"]),
        Rows("wkv6", [(n, 1, 32, 64) for n in (1, 64)], ["update"]),
        Rows("gla", [(n, 1, 32, 128) for n in (1, 64, 512)], ["update"], kinds=["usual", "vk-states"]),
    ],
}  # fmt: skip
# served: the ops that are made of others, and gla, in inference: one token of each sequence over a pool, and by the op
# itself; prompts, also behind decodes; replay, and speculative tokens.
_SERVED: Sequence[tuple[str, Sequence[str], tuple[int, ...]]] = (
    ("kda", ["usual", "bf16-states"], (32, 128)), ("ssd", ["usual", "bf16-states"], (32, 128, 64)),
    ("gated_delta_rule", ["16-keys", "16-keys+bf16-states"], (32, 128)),
)  # fmt: skip
_OF_A_POOL = {UPDATE: (256, 1), REPLAY: (256, 1), VERIFY: (256, 4), VARLEN: (8, 4096)}
# family: the ops that are made of others, in training, at the shapes of models, with fewer heads of keys too. front:
# what the first page shows, in training, with KDA of few heads too. gates: KDA of few heads, whose gates decide how far
# others look back. float32: calls of the first page in float32, which says what exact kernels cost.
_OTHERS = {
    "served": [
        *[
            Rows(op, [(n, 1, *sizes) for n in (1, 32, 128, 256)], [UPDATE], kinds=kinds)
            for op, kinds, sizes in _SERVED
        ],
        Rows("kda", [(1024, 1, 8, 128)], [UPDATE], kinds=["bf16-states"]),
        Rows("gated_delta_rule", [(1024, 1, 8, 128)], [UPDATE], kinds=["4-keys+bf16-states"]),
        *[
            Rows(op, [(*size, *sizes)], [phase], kinds=kinds[:1])
            for op, kinds, sizes in _SERVED
            for phase, size in (("decode", (1, 1)), ("decode", (64, 1)), *[*_OF_A_POOL.items()][1:])
        ],
        Rows("gated_delta_rule", [(PROMPTS, 2048, 32, 128)], [VARLEN], kinds=["16-keys"]),
        Rows("gated_delta_rule", [(1, DECODES + PROMPTS * 2048, 32, 128)], [VARLEN], kinds=["16-keys+served"]),
        *[
            Rows("delta_rule simple_gla hgrn2 gated_delta_rule2", [(*size, 32, 128)], [phase])
            for phase, size in _OF_A_POOL.items()
        ],
        Rows("gla delta_rule simple_gla hgrn2 gated_delta_rule2", [(n, 1, 32, 128) for n in (1, 64)], ["decode"]),
        Rows("gla", [(512, 1, 32, 128)], ["decode"]),
    ],
    "family": [
        Rows("kda", [_TRAINING, (2, 8192, 64, 128)]),
        Rows("gated_delta_rule", [_TRAINING, (8, 4096, 64, 128), (1, 32768, 32, 128)], kinds=["16-keys"]),
        Rows("delta_rule simple_gla", [_TRAINING]), Rows("ssd", [_OF_STATES]),
    ],
    "front": [
        Rows("wkv7", [_USUAL, _TRAINING]), Rows("kda", [_TRAINING]), Rows("kda", [_FEW], kinds=["strong-gates"]),
        Rows("wkv6", [_USUAL]), Rows("gla delta_rule", [_TRAINING]), Rows("ssd", [_OF_STATES]),
    ],
    "gates": [Rows("kda", [_FEWER], kinds=["strong-gates"]), Rows("kda", [_FEW, _FEWER], kinds=["slow-gates"])],
    "float32": [
        Rows(op, sizes, dtype=torch.float32)
        for op, sizes in (("wkv7", [_USUAL, _TRAINING]), ("wkv6", [_USUAL]), ("gla", [_TRAINING]))
    ],
}  # fmt: skip
TABLES = {
    name: [entry for rows in several for entry in rows.entries(name)] for name, several in (_STUDIES | _OTHERS).items()
}
STUDIES = {name: TABLES[name] for name in _STUDIES}
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
