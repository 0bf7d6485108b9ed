"""Gradients of the torch ops: what runs at torch's Autograd key, where `torch.func` and dual tensors look too.

torch.autograd.Function refuses tensors of several levels of transforms, but the dispatcher calls a kernel once a level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from rwkv_jit.call import tensors


def forward(
    op: Any, setup: Callable[[Any, Sequence[Any], dict[str, Any], Any], None],
    backward: Callable[..., Sequence[Tensor | None]], plainly: Callable[..., Any],
) -> Callable[..., Any]:  # fmt: skip
    """Return what records a forward op, whose last argument is whether it keeps what the backward needs.

    `setup` keeps this in the context, its first argument, from the arguments and the results; `backward` returns the
    gradients of all arguments, from the context and those of the results. `plainly` does the same as the op in plain
    torch, for forward-mode derivatives, or raises an error.
    """

    class Recorded(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, keys: Any, named: dict[str, Any], *arguments: Any) -> Any:
            with _outer_levels():
                results = below(op, keys, (*arguments[:-1], True), named)
            ctx.set_materialize_grads(False)
            setup(ctx, arguments, named, results)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            if all(grad is None for grad in grads):  # nothing was made of the results
                return (None,) * len(ctx.needs_input_grad)
            return None, None, *backward(ctx, *grads)

    apply = _at_this_level(Recorded)

    def record(keys: Any, *arguments: Any, **named: Any) -> Any:
        if any_tangent(arguments):
            return plainly(*arguments, **named)
        if torch.is_grad_enabled() and any_requires_grad(arguments):
            return apply(keys, named, *arguments)
        return below(op, keys, arguments, named)

    return record


def backward(op: Any, name: str, instead: str = "") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what records a backward op; the error of a second derivative names the reference `instead`."""

    def refuse() -> RuntimeError:
        return RuntimeError(f"{name} has no second derivative; differentiate {instead or f'{name}_ref'} twice instead")

    is_alone = len(op._schema.returns) == 1

    def several(results: Any) -> tuple[Tensor, ...]:
        return (results,) if is_alone else tuple(results)

    class Gradient(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, run: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
            with _outer_levels():
                return several(run(*arguments))

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise refuse()

    apply = _at_this_level(Gradient)

    def record(keys: Any, *arguments: Any, **named: Any) -> Any:
        if any_tangent(arguments):
            raise refuse()
        if _is_transformed() and torch.is_grad_enabled() and any_requires_grad(arguments):
            results = apply(lambda *given: below(op, keys, given, named), *arguments)
            return results[0] if is_alone else results
        return below(op, keys, arguments, named)

    def run(*arguments: Any, **named: Any) -> Sequence[Tensor]:
        batched = [isinstance(x, Tensor) and tensors.is_batched(x) for x in arguments]
        if any(batched):
            return _row_by_row(lambda *given: run(*given, **named), arguments, batched)
        if torch.is_grad_enabled():
            return apply(lambda *given: op(*given, **named), *arguments)  # type: ignore[no-any-return]
        return several(op(*arguments, **named))

    return record, run


def refuse_forward_mode(name: str) -> None:
    """Raise the error for a forward-mode derivative of kernels."""
    raise RuntimeError(
        f"{name}: the kernels have no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors); "
        f"take backend='reference', or {name}_ref"
    )


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Record gradients below a torch dispatch mode too: it calls ops with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


class Leaves(NamedTuple):
    """The inputs of a torch op that may have gradients, by their names: the first of the op's tensors."""

    names: tuple[str, ...]

    def wanted(self, arrays: Sequence[Any], wanted: Sequence[str]) -> list[str]:
        """Return those that are there and want a gradient; no names stand for all."""
        pairs = zip(self.names, arrays, strict=False)
        return [x for x, array in pairs if array is not None and (not wanted or x in wanted)]

    def in_places(self, gradients: Mapping[str, Tensor], wanted: Sequence[str], arrays: Sequence[Any]) -> Any:
        """Return gradients as an op does: zeros where nothing depends on an input, an empty one that nobody wants."""
        several = []
        for x, array in zip(self.names, arrays, strict=False):
            if x in gradients:
                several.append(gradients[x])
            elif x in wanted:
                several.append(torch.zeros_like(array, memory_format=torch.contiguous_format))
            else:
                several.append(arrays[0].new_empty(0))
        return tuple(several) if len(several) > 1 else several[0]

    def without_memory(self, arrays: Sequence[Any], wanted: Sequence[str]) -> Any:
        """Return what the fake of a backward does."""
        names = self.wanted(arrays, wanted)
        pairs = zip(self.names, arrays, strict=False)
        made = {x: torch.empty_like(y, memory_format=torch.contiguous_format) for x, y in pairs if x in names}
        return self.in_places(made, names, arrays)

    def plainly(
        self, run: Callable[[Sequence[Any]], Sequence[Tensor]], arrays: Sequence[Any], grads: Sequence[Tensor | None],
        wanted: Sequence[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return gradients by plain torch, from those of the results that `run` returns for the op's tensors.

        They are as an op returns them: zeros where nothing depends, and in memory that is laid out as the fake says.
        """
        count = len(self.names)
        with plain_torch(), tensors.exactly(arrays[0]):
            pairs = zip(self.names, arrays[:count], strict=True)
            leaves: dict[str, Any] = {x: y if y is None else y.detach().requires_grad_(x in wanted) for x, y in pairs}
            results, sources = run([*leaves.values(), *arrays[count:]]), [leaves[x] for x in wanted]
            graded = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None and x.requires_grad]
            found: Sequence[Any] = [torch.zeros_like(x) for x in sources]
            if graded:
                several, weights = zip(*graded, strict=True)
                found = torch.autograd.grad(several, sources, weights, allow_unused=True, materialize_grads=True)
            copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in found]
        return dict(zip(wanted, copies, strict=True))


def below(op: Any, keys: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Run an op below autograd, with the dispatch keys of its call."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **named)


def _row_by_row(
    run: Callable[..., Sequence[Tensor]], arguments: Sequence[Any], batched: Sequence[bool]
) -> list[Tensor]:  # fmt: skip
    """Run a backward inside of `torch.autograd.grad(is_grads_batched=True)`, whose vmap knows no ops of lists."""
    several, level = _unbatched(arguments, batched)
    made = torch.vmap(run, tuple([0 if is_batched else None for is_batched in batched]))(*several)
    return [torch._add_batch_dim(x, 0, level) for x in made]


def is_one_of_rows(x: Any) -> bool:
    """Return whether a gradient stands for several: under `is_grads_batched=True`, or in a vmap of `torch.func`."""
    return x is not None and (tensors.is_batched(x) or torch._C._functorch.is_batchedtensor(x))


def each_row(run: Callable[..., Sequence[Tensor | None]], arguments: Sequence[Any]) -> Sequence[Tensor | None]:
    """Run a backward that no vmap can look into, once for each row where arguments stand for several."""
    batched = [x is not None and tensors.is_batched(x) for x in arguments]
    if any(batched):
        several, level = _unbatched(arguments, batched)
        return [None if x is None else torch._add_batch_dim(x, 0, level) for x in _stacked(run, several, batched)]
    of_torch, vmap = torch._C._functorch, torch._C._functorch.peek_interpreter_stack()
    if vmap is None or not any(map(is_one_of_rows, arguments)):
        return run(*arguments)
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    level = vmap.level()
    batched = [is_one_of_rows(x) and of_torch.maybe_get_level(x) == level for x in arguments]
    pairs = [*zip(arguments, batched, strict=True)]
    with temporarily_pop_interpreter_stack():
        several = [of_torch.get_unwrapped(x).movedim(of_torch.maybe_get_bdim(x), 0) if y else x for x, y in pairs]
        made = _stacked(lambda *row: each_row(run, row), several, batched) if any(batched) else each_row(run, several)
    if not any(batched):
        return made
    return [None if x is None else of_torch._add_batch_dim(x, 0, level) for x in made]


def _stacked(
    run: Callable[..., Sequence[Tensor | None]], several: Sequence[Any], batched: Sequence[bool]
) -> list[Tensor | None]:  # fmt: skip
    pairs = [*zip(several, batched, strict=True)]
    rows = range(len(several[batched.index(True)]))
    made = [run(*[x[row] if is_batched else x for x, is_batched in pairs]) for row in rows]
    return [None if x[0] is None else torch.stack(x) for x in zip(*made, strict=True)]


def _unbatched(arguments: Sequence[Any], batched: Sequence[bool]) -> tuple[list[Any], int]:
    """Return arguments whose batch is their first dimension, and its level."""
    # The level is what the tensors have: the threads that run backwards of a GPU know of no vmap.
    first = arguments[batched.index(True)]
    level = next(n for n in range(1, 65) if not tensors.is_batched(torch._remove_batch_dim(first, n, 1, 0)))
    pairs = zip(arguments, batched, strict=True)
    return [torch._remove_batch_dim(x, level, 1, 0) if is_batched else x for x, is_batched in pairs], level


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _outer_levels() -> Any:
    """Let outer transforms record too: while a Function's forward runs, gradients are off for them as well."""
    if not _is_transformed():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.enable_grad())
    stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
    return stack


def _at_this_level(function: type[_SingleLevelFunction]) -> Callable[..., Any]:
    """Return a Function's `apply` for a kernel of the dispatcher, which torch.func calls once for each level."""
    apply = function.apply  # type: ignore[attr-defined]

    def run(*arguments: Any) -> Any:
        if not _is_transformed():
            return apply(*arguments)
        before = torch._C._functorch.get_single_level_autograd_function_allowed()
        torch._C._functorch.set_single_level_autograd_function_allowed(True)
        try:
            return apply(*arguments)
        finally:
            torch._C._functorch.set_single_level_autograd_function_allowed(before)

    return run


def any_requires_grad(arguments: Sequence[Any]) -> bool:
    """Return whether one of these is a tensor that wants a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def any_tangent(arguments: Sequence[Any]) -> bool:
    """Return whether one of these is a tensor with a derivative in forward mode."""
    if not tensors.has_dual_level():
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)
