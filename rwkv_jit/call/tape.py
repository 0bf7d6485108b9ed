"""Functions of tensors as one node of autograd: what one did below autograd is noted once, and run again as a list.

A tape notes the forward of a function and the backward that autograd runs behind it: plans of the engine, products of
torch, sums of gradients. No view is noted: a value is a memory, and whoever reads it says how it lies there. A list is
the text of a Python function with a line for each step, whose names die where they are read last.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rwkv_jit.call import plan as plans
from rwkv_jit.call import recording, switches, tensors
from rwkv_jit.call.plan import Plan

_ATEN = torch.ops.aten
# What torch has a cheaper entry for than the op's own, of the same arguments.
_ENTRIES: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: torch.mm,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.clone.default: torch.clone,
    _ATEN.add.Tensor: torch.add,
    _ATEN.add_.Tensor: Tensor.add_,
}
# Off while a list runs: a tape lies below them, so what they do is in the list.
_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
for _name, _key in torch._C.DispatchKey.__members__.items():
    if _name.startswith(("Autograd", "Autocast", "ADInplaceOrView")) and "Functionality" not in _name:
        _ABOVE = _ABOVE.add(_key)


class CannotRecord(Exception):
    """A function that does what a list cannot repeat."""


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


def _layout(x: Tensor, begin: int = 0) -> Layout:
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


class Tape(TorchDispatchMode):
    """A mode that notes what runs below autograd. It keeps all tensors, so that no two memories have one address."""

    def __init__(self, inputs: Sequence[Tensor | None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, int] = {}  # by the storage: the place of what was noted of it
        self.layouts: list[Layout] = []  # of the tensor that each memory began with
        self.steps: list[Step] = []
        self._kept: list[Tensor] = []
        self.begin_with(inputs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, which takes seconds, to keep it out of here: a tape is only used without."""
        return False

    def begin_with(self, inputs: Sequence[Tensor | None]) -> list[int | None]:
        """Begin a direction, and return the places of what it reads."""
        places = [None if x is None else self.add(x) for x in inputs]
        self.begin = len(self.layouts)  # of what this direction makes
        return places

    def add(self, x: Tensor) -> int:
        """Note the memory of a tensor, and return its place."""
        if self.place(x) is not None:
            raise CannotRecord("two values in one memory")
        self._memories[x.untyped_storage()._cdata] = place = len(self.layouts)
        self.layouts.append(_layout(x))
        self._kept.append(x)
        return place

    def place(self, x: Tensor) -> int | None:
        """Return the place of a tensor's memory, None if it is no memory of the tape."""
        return self._memories.get(x.untyped_storage()._cdata)

    def read(self, x: Tensor) -> Any:
        """Return what stands for a tensor: itself where it has no elements."""
        if not x.numel():
            return x.detach()
        place = self.place(x)
        if place is None:
            raise CannotRecord("a tensor that is no input, as a buffer or a constant")
        if x.dtype != self.layouts[place].dtype:
            raise CannotRecord("a memory read as two dtypes")
        return Read(place, _layout(x))

    def is_whole(self, x: Tensor, others: Sequence[Tensor]) -> bool:
        """Return whether a tensor is all of a memory that was made here, in which none of the others lies."""
        place = self.place(x)
        if place is None or place < self.begin or any(self.place(y) == place for y in others):
            return False
        layout = self.layouts[place]
        return layout.is_dense and _layout(x).is_dense and layout.dtype == x.dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and note it."""
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags or not self._changes_what_it_made(func, args, named):
            raise CannotRecord(f"{func}, which changes a tensor or draws numbers")
        arguments, more = tuple(map(self._noted, args)), {name: self._noted(x) for name, x in named.items()}
        with plans.watched() as runs:
            results = func(*args, **named)
        if isinstance(results, (int, torch.dtype)) and not any(isinstance(x, Tensor) for x in args):
            return results  # what dtypes are promoted to, which the key of a call decides
        is_alone = isinstance(results, Tensor)
        several = [results] if is_alone else results
        # A backward returns None for a gradient that nobody wants.
        if not (isinstance(several, (tuple, list)) and all(x is None or isinstance(x, Tensor) for x in several)):
            raise CannotRecord(f"{func}, which returns no tensors")
        there = [x for x in several if x is not None]
        if any(x.device != self._kept[0].device for x in there):
            raise CannotRecord(f"{func}, which returns what is on another device")  # and whoever reads it is not seen
        self._kept.extend(there)
        new = [x for x in there if x.numel() and self.place(x) is None]
        if func._schema.is_mutable:
            self.steps.append(Step(func, arguments, more, (None,) * len(several), is_alone))
        elif new and not (len(runs) == 1 and self._note_plan(*runs[0], new)):
            places = tuple([self.add(x) if any(x is y for y in new) else None for x in several])
            self.steps.append(Step(func, arguments, more, places, is_alone))
        return results

    def _changes_what_it_made(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
        """Return whether all that an op changes was made here, in this direction."""
        if not func._schema.is_mutable:
            return True
        if named or len(func._schema.returns) != 1:
            return False
        pairs = zip(args, func._schema.arguments, strict=False)
        changed = [x for x, y in pairs if y.alias_info is not None and y.alias_info.is_write]
        places = [self.place(x) if isinstance(x, Tensor) else None for x in changed]
        return all(place is not None and place >= self.begin for place in places)

    def _noted(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.read(x)
        if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
            return tuple(map(self._noted, x))
        return x

    def _note_plan(self, plan: Plan, arrays: Sequence[Any], results: Sequence[Tensor], new: list[Tensor]) -> bool:
        """Note a plan in the place of the op that ran it, where it reads and makes just what the op does."""
        if any(x is not None and (not x.numel() or self.place(x) is None) for x in arrays):
            return False
        made = {x.untyped_storage()._cdata for x in results}
        if not all(x.untyped_storage()._cdata in made for x in new):
            return False
        arguments = tuple(map(self._noted, arrays))
        self._kept.extend(results)
        self.steps.append(Step(plan, arguments, {}, tuple(map(self.add, results)), False))
        return True


def is_recording() -> bool:
    """Return whether a tape notes what runs."""
    return not torch.compiler.is_compiling() and isinstance(_get_current_dispatch_mode(), Tape)


# ---- lists -------------------------------------------------------------------------------------------------------


def _as_strided(x: Tensor, shape: Any, strides: Any, offset: int) -> Tensor:
    return torch.as_strided(x, shape, strides, x.storage_offset() + offset)


# What code of torch's compiler makes views with: it takes a third of the time of torch's own.
_view: Callable[..., Tensor] = getattr(tensors._guards, "_reinterpret_tensor", _as_strided)


class _Writer:
    """A list while it is written: lines, and what their names stand for."""

    def __init__(self, inputs: Sequence[Read | None]):
        self._constants: dict[str, Any] = {"view": _view}
        self._names: dict[Read, str] = {}
        self._roots: dict[int, tuple[str, Layout]] = {}  # by memory: what it began with
        self._lines: list[tuple[str, list[str]]] = []  # each with the names that it reads or writes
        self._inputs = [f"x{i}" for i in range(len(inputs))]
        for name, read in zip(self._inputs, inputs, strict=True):
            if read is not None:
                self._roots[read.memory] = name, read.layout
                self._names[read] = name

    @property
    def memories(self) -> set[int]:
        """What has a name here."""
        return {*self._roots}

    def root(self, memory: int) -> Read:
        """Return what a memory begins with here."""
        return Read(memory, self._roots[memory][1])

    def write(self, step: Step, layouts: Sequence[Layout], begin_as: dict[int, Layout]) -> None:
        """Append a step of the tape; results of plans `begin_as` others read them."""
        used: list[str] = []
        if isinstance(step.run, Plan):
            several = ", ".join([self._text(x, used, takes_addresses=True) for x in step.arguments])
            made = [begin_as.get(x, layouts[x]) for x in step.results if x is not None]
            run, text = step.run.with_results([(x.shape, x.strides, x.dtype) for x in made]).run, f"[{several}]"
        else:
            run = _ENTRIES.get(step.run, step.run._op)
            parts = [self._text(x, used) for x in step.arguments]
            text = ", ".join([*parts, *(f"{name}={self._text(x, used)}" for name, x in step.named.items())])
        names = [f"y{len(self._lines)}_{i}" for i in range(len(step.results))]
        for memory, name in zip(step.results, names, strict=True):
            if memory is not None:
                layout = begin_as.get(memory, layouts[memory])
                self._roots[memory] = name, layout
                self._names[Read(memory, layout)] = name
        target = names[0] if step.is_alone else "".join([f"{name}, " for name in names])
        self._lines.append((f"{target} = {self._constant(run)}({text})", [*used, *names]))

    def name(self, read: Read, takes_addresses: bool = False) -> str:
        """Return the name of what a step reads, after a line that makes a view of it if need be."""
        root, layout = self._roots[read.memory]
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


def _as_read(tape: Tape, steps: Sequence[Step]) -> dict[int, Layout]:
    """Return how results of plans lie for the first op of torch that reads them, where they have no gaps there."""
    found: dict[int, Layout] = {}
    made = {x for step in steps if isinstance(step.run, Plan) for x in step.results}
    for x in _reads_of([step for step in steps if not isinstance(step.run, Plan)]):
        if x.memory in made and x.layout.is_dense and tape.layouts[x.memory].is_dense:
            found.setdefault(x.memory, x.layout)
    return found


def _in_place(steps: Sequence[Step], layouts: Sequence[Layout], kept: set[int]) -> list[Step]:
    """Return steps whose sums take the memory of a term that was made here and is read no more, as autograd's do."""
    last = {x.memory: number for number, step in enumerate(steps) for x in _reads_of([step])}
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


def _reads_of(steps: Sequence[Step]) -> Iterator[Read]:
    """Return all that steps read, in their order."""
    stack = [x for step in reversed(steps) for x in reversed((*step.arguments, *step.named.values()))]
    while stack:
        x = stack.pop()
        if isinstance(x, Read):
            yield x
        elif isinstance(x, tuple):
            stack.extend(reversed(x))


# ---- what was recorded -------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """What a tensor is, but for its numbers; those of integers count, and are kept."""

    layout: Layout
    device: torch.device
    is_graded: bool
    integers: Tensor | None

    @classmethod
    def of(cls, x: Tensor | None) -> _Form | None:
        if x is None:
            return None
        integers = None if x.is_floating_point() else x.detach().clone()
        return cls(_layout(x, int(x.storage_offset())), x.device, x.requires_grad, integers)

    def new(self, is_graded: bool) -> Tensor:
        """Return such a tensor of zeros, or of these integers."""
        if self.integers is not None:
            return self.integers.clone()
        shape, strides, _, dtype = self.layout
        x = torch.empty_strided(shape, strides, dtype=dtype, device=self.device).zero_()
        return x.requires_grad_(is_graded and self.is_graded)


_Key = tuple[tuple[Any, ...], tuple[bool, ...]]  # strides of each output's gradient or None; which arrays want one
_lock = threading.RLock()


class Recorded:
    """What a function of tensors does with arrays of these shapes, strides and dtypes; CannotRecord where no list can.

    It runs with zeros, so that nothing of the caller's is seen or changed. The list of a backward is written at the
    first one that has such gradients, but for the usual one, whose reads are what the forward saves.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], arrays: Sequence[Tensor | None], name: str):
        self._function, self._forms, self.name = function, [*map(_Form.of, arrays)], name
        self._lead = next(x for x in arrays if x is not None).new_empty(0)
        self._cast, self._switches = tensors.autocast_dtype(self._lead), switches.current()
        self._is_graded = torch.is_grad_enabled()
        self.saved, self.ungraded, self._length = list[Read](), list[int](), 0
        self._backwards: dict[_Key, Callable[[list[Any]], Sequence[Tensor | None]]] = {}
        self._record(None)

    def prepare(self, there: Sequence[int]) -> None:
        """Write the list of a backward that gets gradients of these outputs alone, before anybody else has this.

        In the first backward of a model there may be no memory for another layer.
        """
        for strides, wants in [*self._backwards]:
            key = tuple([x if i in there else None for i, x in enumerate(strides)]), wants
            if any(x is not None for x in key[0]) and key not in self._backwards:
                self._record(key)

    def run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs, as those of a node where gradients were recorded."""
        if self._backwards:
            return _apply(self, *arrays)
        return self.forward(arrays)[0]

    def forward(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the outputs, and what a backward takes."""
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE):
            return self._forward([*arrays])  # type: ignore[no-any-return]

    def backward(self, values: list[Any], grads: Sequence[Any], wants: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Return the gradients of all arrays, None where nobody wants one; `values` are what the forward saved."""
        # A hook may have returned other tensors. No name here holds a value, which is gone when the list has read it.
        for i, (_, layout) in enumerate(self.saved):
            if values[i].stride() != layout.strides or values[i].shape != layout.shape:
                like = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=values[i].device)
                values[i] = like.copy_(values[i])
        key = tuple([None if x is None else x.stride() for x in grads]), wants
        run = self._backwards.get(key)
        if run is None:
            # No forward takes the lock: who holds it waits for nobody but the thread it is in.
            with _lock, switches.at(self._switches):
                run = self._record(key)
        values += grads
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE):
            return run(values)

    def _record(self, key: _Key | None) -> Any:
        """Write the lists of a first time, or that of a backward with such gradients."""
        hooks: Any = contextlib.nullcontext()
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with tensors.casting(self._lead, self._cast), hooks, torch.set_grad_enabled(self._is_graded):
            leaves = [None if x is None else x.new(self._is_graded) for x in self._forms]
            tape = Tape(leaves)
            inputs = [None if x is None else tape.read(x) for x in leaves]
            with tape:
                outputs = list[Tensor]()
                for x in self._function(*leaves):  # else a caller that changes one would change others
                    outputs.append(x if tape.is_whole(x, outputs) else x.clone())
            if not all(x.numel() for x in (*leaves, *outputs) if x is not None):
                raise CannotRecord("a tensor without elements")
            length, graded = len(tape.steps), [x.requires_grad for x in outputs]
            reads, found = list[Read | None](), list[Tensor | None]()
            if any(graded):
                wants = tuple([x is not None and x.requires_grad for x in leaves])
                strides, wants = key or (
                    tuple([x.stride() if each else None for x, each in zip(outputs, graded, strict=True)]), wants
                )  # fmt: skip
                reads, found = self._differentiate(tape, leaves, outputs, strides, wants)
        steps, of_outputs = tape.steps[length:], [tape.read(x) for x in outputs]
        if key is None:
            self.ungraded = [i for i, each in enumerate(graded) if not each]
            self._write_forward(tape, inputs, tape.steps[:length], of_outputs, [*_reads_of(steps), *_read(tape, found)])
        elif self._length != length:
            raise CannotRecord("a function that is not the same each time")
        self._length = length
        if not any(graded):
            return None
        writer, begin_as = _Writer([*self.saved, *reads]), _as_read(tape, steps)
        for step in _in_place(steps, tape.layouts, {x.memory for x in _read(tape, found)}):
            writer.write(step, tape.layouts, begin_as)
        names = iter([writer.name(x) for x in _read(tape, found)])
        run = writer.function(["None" if x is None else next(names) for x in found])
        self._backwards[strides, wants] = run
        return run

    def _differentiate(
        self, tape: Tape, leaves: Sequence[Any], outputs: Sequence[Tensor], strides: Sequence[Any],
        wants: Sequence[bool],
    ) -> tuple[list[Read | None], list[Tensor | None]]:  # fmt: skip
        """Note the backward; return the gradients that come in, and those of the leaves."""
        pairs = zip(outputs, strides, strict=True)
        grads = [
            None if y is None else torch.empty_strided(x.shape, y, dtype=x.dtype, device=x.device).zero_()
            for x, y in pairs
        ]  # fmt: skip
        tape.begin_with(grads)
        reads = [None if x is None else tape.read(x) for x in grads]
        sources = [x for x, is_wanted in zip(leaves, wants, strict=True) if is_wanted]
        there = [i for i, x in enumerate(grads) if x is not None]
        with tape, tensors.casting(self._lead, None):
            found = iter(
                torch.autograd.grad(
                    [outputs[i] for i in there], sources, [grads[i] for i in there], allow_unused=True
                )
            )  # fmt: skip
        return reads, [next(found) if is_wanted else None for is_wanted in wants]

    def _write_forward(
        self, tape: Tape, inputs: Sequence[Read | None], steps: Sequence[Step], outputs: Sequence[Read],
        behind: Sequence[Read],
    ) -> None:  # fmt: skip
        """Write the list of the forward, with all that is read `behind` it."""
        writer, begin_as = _Writer(inputs), _as_read(tape, tape.steps)
        for step in steps:
            writer.write(step, tape.layouts, begin_as)
        # An output is saved as itself, so that torch sees whether it was changed.
        whole = {x.memory: x for x in outputs}
        needed = sorted({x.memory for x in behind} & writer.memories)
        self.saved = [whole.get(memory, writer.root(memory)) for memory in needed]
        self._forward = writer.function([writer.name(x) for x in outputs], [writer.name(x) for x in self.saved])


def _read(tape: Tape, several: Sequence[Tensor | None]) -> list[Read]:
    return [tape.read(x) for x in several if x is not None]


class _Gradients(torch.autograd.Function):
    """Gradients that are in a graph themselves, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, wants: tuple[bool, ...], count: int, *several: Any) -> tuple[Any, ...]:
        ctx.name = recorded.name
        return tuple(recorded.backward([*several[count:]], several[:count], wants))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.name} has no second derivative: its kernels have none")


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: Recorded, *arrays: Any) -> tuple[Any, ...]:
        outputs, saved = recorded.forward(arrays)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if recorded.ungraded:
            ctx.mark_non_differentiable(*[outputs[i] for i in recorded.ungraded])
        ctx.recorded = recorded
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        recorded, wants, values = ctx.recorded, ctx.needs_input_grad[1:], [*ctx.saved_tensors]

        def run(*several: Any) -> Any:
            if torch.is_grad_enabled():
                return _Gradients.apply(recorded, wants, len(several), *several, *values)  # type: ignore[no-untyped-call]
            return recorded.backward([*values], several, wants)

        if torch.is_grad_enabled() or any(recording.is_one_of_rows(x) for x in grads):
            return None, *recording.each_row(run, grads)
        release = getattr(ctx, "maybe_clear_saved_tensors", None)
        if release is not None:
            release()  # the list holds them from here on, and drops each where it is read last
        return None, *recorded.backward(values, grads, wants)


_apply: Callable[..., tuple[Any, ...]] = super(torch.autograd.Function, _Node).apply
