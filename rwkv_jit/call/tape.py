"""Functions of tensors as one node of autograd: what one did below autograd is noted once, and run again as a list.

A tape notes the forward of a function and the backward that autograd runs behind it: plans of the engine, products of
torch, sums of gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rwkv_jit.call import plan as plans
from rwkv_jit.call import recording, switches, tensors
from rwkv_jit.call.lists import Layout, Read, Step, Writer, as_read, in_place, layout_of, reads_of
from rwkv_jit.call.plan import Plan

# Off while a list runs: a tape lies below them, so what they do is in the list.
_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
for _name, _key in torch._C.DispatchKey.__members__.items():
    if _name.startswith(("Autograd", "Autocast", "ADInplaceOrView")) and "Functionality" not in _name:
        _ABOVE = _ABOVE.add(_key)


class CannotRecord(Exception):
    """A function that does what a list cannot repeat."""


class Tape(TorchDispatchMode):
    """A mode that notes what runs below autograd. It keeps all tensors, so that no two memories have one address."""

    def __init__(self, inputs: Sequence[Tensor | None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, int] = {}  # by the storage: the place of what was noted of it
        self.layouts: list[Layout] = []  # of the tensor that each memory began with
        self.steps: list[Step] = []
        self._kept: list[Tensor] = []
        self.inputs = self.begin_with(inputs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, which takes seconds, to keep it out of here: a tape is only used without."""
        return False

    def begin_with(self, inputs: Sequence[Tensor | None]) -> list[Read | None]:
        """Begin a direction, and return what stands for its inputs."""
        reads = [None if x is None else Read(self.add(x), layout_of(x)) for x in inputs]
        self.begin = len(self.layouts)  # of what this direction makes
        return reads

    def add(self, x: Tensor) -> int:
        """Note the memory of a tensor, and return its place."""
        if self.place(x) is not None:
            raise CannotRecord("two values in one memory")
        self._memories[x.untyped_storage()._cdata] = place = len(self.layouts)
        self.layouts.append(layout_of(x))
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
        return Read(place, layout_of(x))

    def is_whole(self, x: Tensor, others: Sequence[Tensor]) -> bool:
        """Return whether a tensor is all of a memory that was made here, in which none of the others lies."""
        place = self.place(x)
        if place is None or place < self.begin or any(self.place(y) == place for y in others):
            return False
        layout = self.layouts[place]
        return layout.is_dense and layout_of(x).is_dense and layout.dtype == x.dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags or not self._changes_what_it_made(func, args, named):
            raise CannotRecord(f"{func}, which changes a tensor or draws numbers")
        arguments, more = tuple(map(self._noted, args)), {name: self._noted(x) for name, x in named.items()}
        with plans.watched() as runs:
            results = func(*args, **named)
        if isinstance(results, (int, torch.dtype)) and not any(isinstance(x, Tensor) for x in args):
            return results  # what dtypes are promoted to, which the key of a call decides
        is_alone = isinstance(results, Tensor)
        several = () if results is None else [results] if is_alone else results
        # A backward returns None for a gradient that nobody wants.
        if not (isinstance(several, (tuple, list)) and all(x is None or isinstance(x, Tensor) for x in several)):
            raise CannotRecord(f"{func}, which returns no tensors")
        there = [x for x in several if x is not None]
        if any(x.device != self._kept[0].device for x in there):
            raise CannotRecord(f"{func}, which returns what is on another device")  # and whoever reads it is not seen
        self._kept.extend(there)
        new = [x for x in there if x.numel() and self.place(x) is None]
        if func._schema.is_mutable and results is None and len(runs) == 1 and self._note_plan(*runs[0], []):
            pass
        elif func._schema.is_mutable:
            self.steps.append(Step(func, arguments, more, (None,) * len(several), is_alone))
        elif new and not (len(runs) == 1 and self._note_plan(*runs[0], new)):
            places = tuple([self.add(x) if any(x is y for y in new) else None for x in several])
            self.steps.append(Step(func, arguments, more, places, is_alone))
        return results

    def _changes_what_it_made(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
        if not func._schema.is_mutable:
            return True
        if named or len(func._schema.returns) > 1:
            return False
        pairs = zip(args, func._schema.arguments, strict=False)
        written = [x for x, y in pairs if y.alias_info is not None and y.alias_info.is_write]
        changed = [y for x in written for y in (x if isinstance(x, (list, tuple)) else [x])]
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
        return cls(layout_of(x, int(x.storage_offset())), x.device, x.requires_grad, integers)

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
        self._function, self.forms, self.name = function, [*map(_Form.of, arrays)], name
        self._lead = next(x for x in arrays if x is not None).new_empty(0)
        self._cast, self._switches = tensors.autocast_dtype(self._lead), switches.current()
        self._is_graded = torch.is_grad_enabled()
        self.outputs, self.saved, self.ungraded, self._length = list[Read](), list[Read](), list[int](), 0
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
        cast = tensors.casting(self._lead, self._cast)
        with recording.plain_torch(), cast, hooks, torch.set_grad_enabled(self._is_graded):
            leaves = [None if x is None else x.new(self._is_graded) for x in self.forms]
            tape = Tape(leaves)
            with tape:
                outputs = list[Tensor]()
                for x in self._function(*leaves):  # else a caller that changes one would change others
                    outputs.append(x if tape.is_whole(x, outputs) else x.clone())
            if not all(x.numel() for x in (*leaves, *outputs) if x is not None):
                raise CannotRecord("a tensor without elements")
            length, graded = len(tape.steps), [x.requires_grad for x in outputs]
            reads, found = list[Read | None](), list[Tensor | None]()
            if any(graded):
                usual = tuple([x.stride() if each else None for x, each in zip(outputs, graded, strict=True)])
                strides, wants = key or (usual, tuple([x is not None and x.requires_grad for x in leaves]))
                reads, found = self._differentiate(tape, leaves, outputs, strides, wants)
        steps, of_outputs = tape.steps[length:], [tape.read(x) for x in outputs]
        if key is None:
            self.ungraded = [i for i, each in enumerate(graded) if not each]
            self._write_forward(tape, tape.steps[:length], of_outputs, [*reads_of(steps), *_read(tape, found)])
        elif self._length != length:
            raise CannotRecord("a function that is not the same each time")
        self._length = length
        if not any(graded):
            return None
        writer, begin_as = Writer([*self.saved, *reads]), as_read(tape.layouts, steps)
        for step in in_place(steps, tape.layouts, {x.memory for x in _read(tape, found)}):
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
        grads = [
            None if y is None else torch.empty_strided(x.shape, y, dtype=x.dtype, device=x.device).zero_()
            for x, y in zip(outputs, strides, strict=True)
        ]  # fmt: skip
        reads = tape.begin_with(grads)
        sources = [x for x, is_wanted in zip(leaves, wants, strict=True) if is_wanted]
        there = [i for i, x in enumerate(grads) if x is not None]
        results, weights = [outputs[i] for i in there], [grads[i] for i in there]
        with tape, tensors.casting(self._lead, None):
            found = iter(torch.autograd.grad(results, sources, weights, allow_unused=True))
        return reads, [next(found) if is_wanted else None for is_wanted in wants]

    def _write_forward(
        self, tape: Tape, steps: Sequence[Step], outputs: Sequence[Read], behind: Sequence[Read]
    ) -> None:  # fmt: skip
        """Write the list of the forward, with all that is read `behind` it."""
        writer, begin_as = Writer(tape.inputs), as_read(tape.layouts, tape.steps)
        for step in steps:
            writer.write(step, tape.layouts, begin_as)
        self.outputs = [*outputs]
        # An output is saved as itself, so that torch sees whether it was changed.
        whole = {x.memory: x for x in outputs}
        needed = sorted({x.memory for x in behind} & writer.roots.keys())
        self.saved = [whole.get(memory, Read(memory, writer.roots[memory][1])) for memory in needed]
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
