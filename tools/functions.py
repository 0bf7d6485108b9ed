"""Write the functions that are variations of those over sequences: over a pool of states, and over many processes.

    python tools/functions.py

The arguments of an op, what is said of them, its recurrence and its references are those of its function over
sequences. What a verb does, and its call, stand here. A unit test fails while a file is not what this would write.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import ALL

ROOT = Path(__file__).resolve().parents[1] / "rwkv_jit"
WIDTH = 120
OVER_POOL = '''"""The functions over a pool of states: of each op one for a few tokens, one for sequences, and others.

tools/functions.py has written this, from the functions over sequences and their docstrings.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call import checks
from rwkv_jit.call.tensors import Array
from rwkv_jit.pool import calls, update, varlen
from rwkv_jit.pool.replay import DRAFT, STEP
from rwkv_jit.pool.ring import ReplayRing
from rwkv_jit.schedules.legal import BetaMap
from rwkv_jit.schedules.table import ALL

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.pool.options import (
        DecayUpdateOptions,
        DecayVarlenOptions,
        ReplayOptions,
        UpdateOptions,
        VarlenOptions,
    )
'''
OVER_PROCESSES = '''"""The recurrences over sequences that many processes share, each with a part of every one.

tools/functions.py has written this, from the functions over sequences and their docstrings.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call.tensors import Array
from rwkv_jit.parallel.recurrences import shared
from rwkv_jit.parallel.shard import Shard
from rwkv_jit.schedules.legal import BetaMap

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import CallOptions, DecayOptions
'''


class Verb(NamedTuple):
    """What a function over a pool does, with {op} for its op in texts."""

    name: str
    kind: str  # in rwkv_jit.pool
    ops: tuple[str, ...]
    does: str  # behind the title of the op
    of_each: str  # what the recurrence is of
    options: str  # the type of the options, behind "Decay" where the op has decays to choose
    shapes: tuple[str, ...]  # the first dimensions of inputs with tokens
    example: tuple[int, ...]  # what they are in the example
    notes: str = ""
    has_ring: bool = False
    same_as: str = ""  # the verb whose arguments it takes
    inputs_as: str = ""  # the verb of whose inputs it is said what they are


WITH_STATES = tuple(name for name, op in ALL.items() if "H" in op.state)
VERBS = (
    Verb(
        "update", "update.KIND", WITH_STATES,
        "of one or a few tokens, which changes states of a pool in place: for decoding", "row", "UpdateOptions",
        ("B", "B, T"), (3,),
    ),
    Verb(
        "varlen", "varlen.KIND", WITH_STATES, "of sequences of any lengths, which changes states of a pool in place",
        "sequence", "VarlenOptions", ("T", "1, T"), (102,),
    ),
    Verb(
        "replay", "STEP", WITH_STATES, "of one or a few tokens, which reads states and writes them once in a while",
        "row", "ReplayOptions", ("B", "B, T"), (3,),
        "The state is that in the pool with the entries of its slot, as `ReplayRing` says. The 1 to 8 tokens become "
        "entries. Where there would be more than `ring.length`, the state is written with all of them, and the slot "
        "has none from then on. Entries in the place of a state are what Albatross calls a delta log.", has_ring=True,
        inputs_as="update",
    ),
    Verb(
        "verify", "DRAFT", WITH_STATES, "of drafted tokens, none of which counts until `replay_commit`",
        "row", "ReplayOptions", ("B", "B, T"), (3, 4),
        "y is that of `{op}_replay`. The speculative tokens are written behind the entries of each slot; cursors and "
        "states stay as they are. The next call of `{op}_verify` or `{op}_replay` writes over what was not committed.",
        has_ring=True, same_as="replay",
    ),
)  # fmt: skip
# Of examples: sizes, slots of rows, and how random inputs come about that are no normal numbers.
SIZES = {"H": 4, "G": 2, "K": 64, "V": 64}
SLOTS = 'torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")'
RANDOM = {"g": "-torch.rand", "A": "-torch.rand", **dict.fromkeys(("beta", "dt", "write_gate"), "torch.rand")}

# What a function over many processes says behind the inputs, which are those of one part: the first one, and others.
OF_PART = """shard : Shard, ProcessGroup or DeviceMesh
    Which part of the sequences this process has, and whether sequences are packed. N sequences have tokens in it:
    B, or the packed sequences of this part.
initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
    State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
    state does not count and has no gradient.
output_final_state : bool, default False
    Whether to return the states after the last token of each sequence in this part."""
AS_FIRST = """shard, initial_state, output_final_state
    As `rwkv_jit.parallel.{first}` takes them; states are those of `rwkv_jit.{op}`."""
RETURNS = """
Returns
-------
y, final_state
    As `rwkv_jit.{op}` returns them, of this part.

Raises
------
TypeError, ValueError, RuntimeError, RwkvJitError
    As `rwkv_jit.{op}`, and where the processes do not make the same call. Nothing has been sent."""
STATES = ["shard: Shard", "initial_state: Array | None = None", "output_final_state: bool = False"]


class Entry(NamedTuple):
    """What a docstring says of arguments."""

    names: list[str]
    head: str  # behind the names
    text: str


# ---- what the function over sequences says -----------------------------------------------------------------------


class Source:
    """The function over sequences of an op: its arguments and the sections of its docstring."""

    def __init__(self, op: Op):
        function: Callable[..., Any] = getattr(importlib.import_module("rwkv_jit"), op.name)
        of_a_call = {"initial_state", "output_final_state", "cu_seqlens", "options", "normalize"}
        several = inspect.signature(function).parameters.values()
        self.arguments = [x for x in several if x.name not in of_a_call]  # inputs and switches, which verbs take too
        self.options = next(str(x.annotation) for x in several if x.name == "options")
        self.names = [x.name for x in self.arguments]
        first, *parts = re.split(r"^(\w+)\n-{3,}\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
        sections = dict(zip(parts[::2], (part.strip("\n") for part in parts[1::2]), strict=True))
        found = re.search(r"^    \S.*(?:\n    .*)*", first, flags=re.MULTILINE)
        assert found is not None, op.name
        self.title, self.recurrence = first.partition(" over sequences")[0], found[0]
        self.references = sections["References"]
        entries = re.findall(r"^(\S.*)\n((?:    .*\n?)+)", sections["Parameters"] + "\n", flags=re.MULTILINE)
        heads = [(*line.partition(" : "), text.rstrip("\n")) for line, text in entries]
        self.entries = [Entry(names.split(", "), colon + head, text) for names, colon, head, text in heads]

    def described(self, head: Callable[[str], str]) -> Iterator[str]:
        """Yield what is said of arguments that verbs take, whose `head` has other shapes."""
        for entry in self.entries:
            there = ", ".join(name for name in entry.names if name in self.names)
            if there:
                yield from (there + head(entry.head), entry.text)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a text in a docstring."""
    return textwrap.wrap(text, WIDTH - 4, initial_indent=indent, subsequent_indent=indent)


def word(x: Parameter) -> str:
    """Return an argument as a definition has it."""
    default = "" if x.default is Parameter.empty else f" = {x.default!r}"
    return f"{x.name}: {x.annotation}{default}".replace("'", '"').replace("inf", "math.inf")


def function(name: str, words: list[str], result: str, doc: list[str], body: list[str]) -> str:
    """Return the source of a function."""
    line = f"def {name}({', '.join(words)}) -> {result}:"
    head = [line]
    if len(line) > WIDTH:
        whole = [each.replace(" ", "\N{NO-BREAK SPACE}") for each in words]  # no line ends within an argument
        inside = f"    {', '.join(words)}"
        is_short = len(inside) <= WIDTH and "*" not in words
        several = [inside] if is_short else textwrap.wrap(
            ", ".join(whole) + ",", WIDTH, initial_indent="    ", subsequent_indent="    "
        )  # fmt: skip
        head = [f"def {name}(", *(each.replace("\N{NO-BREAK SPACE}", " ") for each in several)]
        head.append(f") -> {result}:{'' if is_short else '  # fmt: skip'}")
    said = textwrap.indent("\n".join(['r"""' + doc[0], *doc[1:], '"""']), "    ")
    return "\n".join([*head, said, *(f"    {statement}" for statement in body)])


# ---- over a pool -------------------------------------------------------------------------------------------------


def over_pool(verb: Verb, op: Op) -> str:
    """Return the source of a function over a pool."""
    source = Source(op)
    has_decay = verb.options != "ReplayOptions" and op.decay != "none" and op.through is None
    options = f"{'Decay' * has_decay}{verb.options}"
    words, is_named = ["state: Array", *["ring: ReplayRing"] * verb.has_ring], False
    for x in source.arguments:
        if x.kind is Parameter.KEYWORD_ONLY and not is_named:
            words.append("*")
            is_named = True
        words.append(word(x))
    words.append(f"**options: Unpack[{options}]")
    doc = list(docstring_over_pool(verb, op, source, options))
    return function(f"{op.name}_{verb.name}", words, "Tensor", doc, list(body(verb, op, source)))


def docstring_over_pool(verb: Verb, op: Op, source: Source, options: str) -> Iterator[str]:
    """Yield the lines of a docstring."""
    yield from (f"{source.title} {verb.does}.", "", source.recurrence, "")
    yield f"per {verb.of_each} and head, token by token, with S [V, K]."
    if verb.notes:
        yield from ("", *wrapped(verb.notes.format(op=op.name)))
    yield from ("", "Parameters", "----------")
    shared = ", ".join(["state", *["ring"] * verb.has_ring])
    if verb.same_as:
        yield f"{shared}, {', '.join(source.names)}, **options"
        yield f"    As in `{op.name}_{verb.same_as}`, T up to `ring.drafts`."
    else:
        yield f"{shared}, **options"
        scale, layout = "K^-0.5" if op.scale is None else "1", op.state_layout
        is_usual = (scale, layout) == ("1", "vk")
        defaults = "" if is_usual else f' By default scale is {scale} and state_layout "{layout}".'
        yield from wrapped(f"As `PoolOptions` and `{options}` say, errors and precision too.{defaults}", "    ")
        if verb.inputs_as:
            yield from (", ".join(source.names), f"    As in `{op.name}_{verb.inputs_as}`, T up to 8.")
        else:
            yield from source.described(lambda head: shapes_over_pool(head, verb))
    place = op.public_names[op.names.index("v")]
    yield from ("", "Returns", "-------", f"y : torch.Tensor, shape and dtype of {place}")
    yield from ("", "References", "----------", source.references)
    yield from ("", "Examples", "--------", *example(verb, op, source))


def shapes_over_pool(head: str, verb: Verb) -> str:
    """Return what is said behind names of arguments, with the shapes that the verb takes."""

    def shapes(found: re.Match[str]) -> str:
        several = [f"({first}, {found[1]})" for first in verb.shapes]
        return f"{', '.join(several)} or (" if found[2] else " or ".join(several)

    return re.sub(r"\(B, T, ([^)]*)\)( or \()?", shapes, head)


def example(verb: Verb, op: Op, source: Source) -> Iterator[str]:
    """Yield an example that makes random inputs and calls the function."""
    yield '>>> pool = torch.zeros(16, 4, 64, 64, device="cuda")'
    if verb.has_ring:
        of_ring = ["drafts=4"] * bool(verb.same_as) + ["key_heads=2"] * ("G" in "".join(op.inputs.values()))
        of_ring += ["dtype=torch.float32", 'device="cuda"']
        arguments = f'16, "{op.name}", 4, 64, {", ".join(of_ring)}'
        line = f">>> ring = rwkv_jit.ReplayRing({arguments})"
        is_short = len(line) + 4 <= WIDTH
        yield from [line] if is_short else [">>> ring = rwkv_jit.ReplayRing(", f"...     {arguments}", "... )"]
    yield f">>> slots = {SLOTS}"
    names = [x.name for x in source.arguments if x.default is Parameter.empty]
    groups: list[tuple[str, str, list[str]]] = []  # neighbours of one kind and shape come from one tensor
    for name in names:
        dims = op.inputs[op.names[op.public_names.index(name)]]
        sizes = (*(verb.example if "T" in dims else ()), *(SIZES[dim] for dim in dims if dim not in "BT"))
        kind, shape = RANDOM.get(name, "torch.randn"), ", ".join(map(str, sizes))
        if groups and groups[-1][:2] == (kind, shape):
            groups[-1][2].append(name)
        else:
            groups.append((kind, shape, [name]))
    for kind, shape, several in groups:
        count = f"{len(several)}, " if len(several) > 1 else ""
        yield f'>>> {", ".join(several)} = {kind}({count}{shape}, device="cuda")'
    ends = ["cu_seqlens=ends"] if verb.name == "varlen" else []
    if ends:
        yield '>>> ends = torch.tensor([0, 1, 2, 102], dtype=torch.int32, device="cuda")  # two decodes and a prompt'
    given = ", ".join(["pool", *["ring"] * verb.has_ring, *names, *ends, "state_indices=slots"])
    yield f">>> y = rwkv_jit.{op.name}_{verb.name}({given})"
    if verb.same_as:
        yield '>>> accepted = torch.tensor([4, 0, 2], device="cuda")  # as the model\'s head says'
        yield ">>> rwkv_jit.replay_commit(pool, ring, accepted, state_indices=slots)"
    else:
        yield from (">>> y.shape", f"torch.Size([{', '.join(map(str, (*verb.example, 4, 64)))}])")


def body(verb: Verb, op: Op, source: Source) -> Iterator[str]:
    """Yield the statements of a function over a pool."""
    for flag in (x.name for x in source.arguments if x.annotation == "bool"):
        yield f"if {flag} is not True and {flag} is not False:"
        yield f'    {flag} = checks.check_flag("{flag}", {flag})'
    if "least_step" in op.traits:
        yield "least_step, most_step = checks.step_limits(dt_limit)"
    arrays, ring = ", ".join(op.public_names), ", ring" if verb.has_ring else ""
    if not op.traits:
        yield f'return calls.call({verb.kind}, ALL["{op.name}"], state, ({arrays}), options{ring})'
        return
    traits = [f'("{trait}", {trait}),' for trait in op.traits]
    yield f"arrays = {arrays}"
    yield f"traits = {' '.join(traits).rstrip(',')}{',' * (len(traits) == 1)}"
    yield f'return calls.call({verb.kind}, ALL["{op.name}"], state, arrays, options{ring}, traits=traits)'


# ---- over many processes -----------------------------------------------------------------------------------------


def over_processes(op: Op) -> str:
    """Return the source of a function over sequences that many processes share."""
    source = Source(op)
    inputs, words, named, is_named = list[str](), list[str](), list[str](), False
    for x in source.arguments:
        if x.kind is Parameter.KEYWORD_ONLY and not is_named:
            words += [*STATES, "*"]
            is_named = True
        (named if is_named else inputs).append(x.name)
        words.append(word(x))
    words += [*([] if is_named else STATES), f"**options: {source.options}"]
    doc = list(docstring_over_processes(op, source))
    call = ["shard", "initial_state", "output_final_state", "options", *(f"{name}={name}" for name in named)]
    arrays = f'return shared("{op.name}", ({", ".join(inputs)}), '
    line = f"{arrays}{', '.join(call)})"
    body = [line]
    if len(line) > WIDTH - 4:
        body = ["return shared(", *wrapped(f"{line.partition('(')[2][:-1]},", "    "), ")  # fmt: skip"]
    return function(op.name, words, "tuple[Tensor, Tensor | None]", doc, body)


def docstring_over_processes(op: Op, source: Source) -> Iterator[str]:
    """Yield the lines of a docstring."""
    yield from (f"{source.title} over sequences that many processes share, with gradients.", "", source.recurrence, "")
    yield "per head and token, with S [V, K]."
    yield from ("", "Parameters", "----------")
    yield from wrapped(", ".join([*source.names, "**options"]))
    yield f"    As `rwkv_jit.{op.name}` takes them, of this process's tokens."
    for text in (OF_PART if op.name == WITH_STATES[0] else AS_FIRST, RETURNS):
        yield from text.format(op=op.name, first=WITH_STATES[0]).splitlines()
    yield from ("", "References", "----------", source.references)
    yield from ("", "Examples", "--------")
    required = ", ".join(x.name for x in source.arguments if x.default is Parameter.empty)
    yield ">>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started"
    yield f">>> y, _ = rwkv_jit.parallel.{op.name}({required}, shard)  # of this process's tokens"


# ---- the files ---------------------------------------------------------------------------------------------------


def files() -> dict[Path, str]:
    """Return what each file is."""
    several = {
        ROOT / "pool" / "functions.py": [OVER_POOL, *(over_pool(verb, ALL[op]) for verb in VERBS for op in verb.ops)],
        ROOT / "parallel" / "functions.py": [OVER_PROCESSES, *(over_processes(ALL[op]) for op in WITH_STATES)],
    }
    return {path: "\n\n\n".join(part.rstrip("\n") for part in parts) + "\n" for path, parts in several.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
