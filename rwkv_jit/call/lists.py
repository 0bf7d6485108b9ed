"""Lists: what a tape notes, as the text of a Python function with a line for each step.

No view is noted: a value is a memory, and whoever reads it says how it lies there. Names die where they are read last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.call.plan import Plan

_ATEN = torch.ops.aten
# What torch has a cheaper entry for than the op's own, of the same arguments.
ENTRIES: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: torch.mm, _ATEN.addmm.default: torch.addmm, _ATEN.bmm.default: torch.bmm,
    _ATEN.clone.default: torch.clone, _ATEN.add.Tensor: torch.add, _ATEN.add_.Tensor: Tensor.add_,
}  # fmt: skip


class Layout(NamedTuple):
    """How a tensor lies in a memory; the offset is from where that memory's first tensor begins."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def is_dense(self) -> bool:
        """Whether it has no gaps, and begins where the memory does."""
        return self.offset == 0 and self.strides == tensors.memory(self.shape, self.dtype).strides


def layout_of(x: Tensor, begin: int = 0) -> Layout:
    """Return how a tensor lies in a memory that begins there."""
    return Layout(tuple(x.shape), x.stride(), int(x.storage_offset()) - begin, x.dtype)


class Read(NamedTuple):
    """A tensor that a step reads: which memory of the tape, and how it lies there."""

    memory: int
    layout: Layout


class Step(NamedTuple):
    """What ran: a plan of the engine, or an op of torch, with its arguments, `Read` in the place of tensors."""

    run: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[int | None, ...]  # memories; None for a result that nobody can read
    is_alone: bool  # whether it returns a tensor rather than several


# What code of torch's compiler makes views with: it takes a third of the time of torch's own.
_view: Callable[..., Tensor] = getattr(
    tensors._guards, "_reinterpret_tensor",
    lambda x, shape, strides, offset: torch.as_strided(x, shape, strides, x.storage_offset() + offset),
)  # fmt: skip


class Writer:
    """A list while it is written: lines, and what their names stand for."""

    def __init__(self, inputs: Sequence[Read | None]):
        self._constants: dict[str, Any] = {"view": _view}
        self._names: dict[Read, str] = {}
        self.roots: dict[int, tuple[str, Layout]] = {}  # by memory: what it begins with here
        self._lines: list[tuple[str, list[str]]] = []  # each with the names that it reads or writes
        self._inputs = [f"x{i}" for i in range(len(inputs))]
        for name, read in zip(self._inputs, inputs, strict=True):
            if read is not None:
                self.roots[read.memory] = name, read.layout
                self._names[read] = name

    def write(self, step: Step, layouts: Sequence[Layout], begin_as: dict[int, Layout]) -> None:
        """Append a step of the tape; results of plans `begin_as` others read them."""
        used: list[str] = []
        if isinstance(step.run, Plan):
            several = ", ".join([self._text(x, used, takes_addresses=True) for x in step.arguments])
            made = [begin_as.get(x, layouts[x]) for x in step.results if x is not None]
            run, text = step.run.with_results([(x.shape, x.strides, x.dtype) for x in made]).run, f"[{several}]"
        else:
            run = ENTRIES.get(step.run, step.run._op)
            parts = [self._text(x, used) for x in step.arguments]
            text = ", ".join([*parts, *(f"{name}={self._text(x, used)}" for name, x in step.named.items())])
        names = [f"y{len(self._lines)}_{i}" for i in range(len(step.results))]
        for memory, name in zip(step.results, names, strict=True):
            if memory is not None:
                layout = begin_as.get(memory, layouts[memory])
                self.roots[memory] = name, layout
                self._names[Read(memory, layout)] = name
        target = names[0] if step.is_alone else "".join([f"{name}, " for name in names])
        begin = f"{target} = " if names else ""
        self._lines.append((f"{begin}{self._constant(run)}({text})", [*used, *names]))

    def name(self, read: Read, takes_addresses: bool = False) -> str:
        """Return the name of what a step reads, after a line that makes a view of it if need be."""
        root, layout = self.roots[read.memory]
        if takes_addresses and layout.is_dense and read.layout.is_dense:
            return root  # of the same elements, however many dimensions it has
        if read not in self._names:
            self._names[read] = name = f"v{len(self._names)}"
            place = read.layout.offset - layout.offset
            text = f"{name} = view({root}, {read.layout.shape!r}, {read.layout.strides!r}, {place})"
            self._lines.append((text, [root, name]))
        return self._names[read]

    def _text(self, x: Any, used: list[str], takes_addresses: bool = False) -> str:
        if isinstance(x, Read):
            used.append(self.name(x, takes_addresses))
            return used[-1]
        if isinstance(x, tuple) and any(isinstance(y, Read) for y in x):
            return f"[{', '.join([self._text(y, used) for y in x])}]"
        return "None" if x is None else self._constant(x)

    def _constant(self, x: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name

    def function(self, *results: Sequence[str]) -> Callable[[list[Any]], Any]:
        """Return the list as a function of the values that it begins with, which it takes out of their list."""
        last = {name: number for number, (_, names) in enumerate(self._lines) for name in names}
        for name in {name for several in results for name in several}:
            last.pop(name, None)
        lines = ["def run(values):", f"    {', '.join(self._inputs)}, = values", "    values.clear()"]
        for number, (text, names) in enumerate(self._lines):
            lines.append(f"    {text}")
            dead = [name for name in dict.fromkeys(names) if last.get(name) == number]
            lines += [f"    del {', '.join(dead)}"] if dead else []
        tuples = [f"({''.join([f'{name}, ' for name in several])})" for several in results]
        lines.append(f"    return {', '.join(tuples)}")
        exec(compile("\n".join(lines), "<a list of steps>", "exec"), self._constants)
        return self._constants["run"]  # type: ignore[no-any-return]


def as_read(layouts: Sequence[Layout], steps: Sequence[Step]) -> dict[int, Layout]:
    """Return how results of plans lie for the first op of torch that reads them, where they have no gaps there."""
    found: dict[int, Layout] = {}
    made = {x for step in steps if isinstance(step.run, Plan) for x in step.results}
    for x in reads_of([step for step in steps if not isinstance(step.run, Plan)]):
        if x.memory in made and x.layout.is_dense and layouts[x.memory].is_dense:
            found.setdefault(x.memory, x.layout)
    return found


def in_place(steps: Sequence[Step], layouts: Sequence[Layout], kept: set[int]) -> list[Step]:
    """Return steps whose sums take the memory of a term that was made here and is read no more, as autograd's do."""
    last = {x.memory: number for number, step in enumerate(steps) for x in reads_of([step])}
    made, several = set[int](), list[Step]()
    for number, step in enumerate(steps):
        if step.run is _ATEN.add.Tensor and not step.named and all(isinstance(x, Read) for x in step.arguments):
            (result,), (x, y) = step.results, step.arguments
            for term, other in ((x, y), (y, x)):
                is_free = term.memory in made - kept and last[term.memory] == number and term.memory != other.memory
                is_whole = term.layout.is_dense and layouts[term.memory].is_dense
                if is_free and is_whole and result is not None and term.layout == layouts[result]:
                    step = step._replace(run=_ATEN.add_.Tensor, arguments=(term, other))
                    break
        made.update([x for x in step.results if x is not None])
        several.append(step)
    return several


def reads_of(steps: Sequence[Step]) -> Iterator[Read]:
    """Return all that steps read, in their order."""
    stack = [x for step in reversed(steps) for x in reversed((*step.arguments, *step.named.values()))]
    while stack:
        x = stack.pop()
        if isinstance(x, Read):
            yield x
        elif isinstance(x, tuple):
            stack.extend(reversed(x))
