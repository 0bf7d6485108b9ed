"""Steps of training that a GPU repeats by itself, from CUDA graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rwkv_jit.call import checks, tensors
from rwkv_jit.kernels import env
from rwkv_jit.kernels.errors import brief
from rwkv_jit.nn import graphs
from rwkv_jit.pool import arguments


class GraphedStep:
    """What `graphed_step` returns: a step of training, whose `norm` is that of the last update's gradients."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None, accumulate: int,
        autocast: torch.dtype | None, loss: Callable[..., Tensor],
    ):  # fmt: skip
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._max_norm, self._accumulate, self._autocast = max_norm, accumulate, autocast
        self._calls, self._turn = graphs.Calls("graphed_step", most=24), 0
        self.norm: Tensor | None = None
        self._held: graphs.Held | None = None
        self._present: list[Tensor] = []  # the parameters and buffers that graphs hold
        self._world: Any = None  # what graphs hold beside the model
        self._kept: Any = ()  # everything whose identity is in the world
        self._why = ""
        self._filled: dict[int, float] = {}
        self._rates: dict[int, Tensor] = {}  # which graphs read, by the groups of the optimizer
        self._grads: list[Tensor | None] | None = None  # where graphs add up those of several calls
        self._has_grad: list[bool] | None = None
        optimizer._warned_capturable_if_run_uncaptured = True

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """Do a step, or with `accumulate` a part of one, and return its loss."""
        is_first, is_last = self._turn == 0, self._turn == self._accumulate - 1
        leaves, spec = pytree.tree_flatten((inputs, options))
        arrays = [x for x in leaves if isinstance(x, Tensor)]
        rest = [(type(x), x) for x in leaves if not isinstance(x, Tensor)]

        def work(*own: Tensor, expected: list[Tensor | None] | None = None) -> list[Tensor | None]:
            values = iter(own)
            whole = [next(values) if isinstance(x, Tensor) else x for x in leaves]
            given, named = pytree.tree_unflatten(whole, spec)
            return self._pass(given, named, is_last, expected)

        found: Any = None
        why = self._look() or self._obstacle_of(arrays, rest)
        if why:
            graphs.say("graphed_step", why)
        elif self._has_own_gradients(is_first, is_last):
            key = repr(spec), tuple(rest), tensors.signature(arrays), is_first, is_last
            if is_last:
                self._fill_rates()
            found = self._calls.run(key, lambda *own: self._capture(work, own, is_first, is_last), arrays)
            if found is not None:
                self._follow(is_first, is_last)
        if found is None:
            with self._at_rates(self._rounded()):
                found = work(*arrays)
        loss: Tensor = found[0]
        self._turn = (self._turn + 1) % self._accumulate
        self.norm = found[1] if is_last else self.norm
        return loss

    def _pass(self, inputs: Any, options: Any, is_last: bool, expected: Any) -> list[Tensor | None]:
        """Return the loss of one call and the norm of an update, after both. Gradients lie as `expected`."""
        lead = next(self._model.parameters())
        dtype = tensors.autocast_dtype(lead) if self._autocast is None else self._autocast
        with tensors.casting(lead, dtype):
            loss = self._loss(*inputs, **options)
        (loss if self._accumulate == 1 else loss / self._accumulate).backward()
        if self._held is not None:
            grads = [x.grad for x in self._held.present]
            self._has_grad = [x is not None for x in grads]
            if expected is not None and not all(map(is_, grads, expected)):
                raise RuntimeError("other parameters have gradients than before")
        norm = None
        if is_last:
            if self._max_norm is not None:
                norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return [loss.detach().to(torch.float32, copy=True), norm]

    # ---- what graphs hold ----------------------------------------------------------------------------------------

    def _look(self) -> str:
        """Return why no graph can hold what there is now. Graphs that hold something that has changed are dropped."""
        if not tensors.is_eager():
            return "a mode, a trace or a compiler looks on"
        if torch.cuda.is_initialized() and tensors.capturing():
            return "the caller captures it"
        held = self._held = graphs.Held.of(self._model, self._held)
        self._present = held.present
        state, groups = self._optimizer.state, self._optimizer.param_groups
        of_groups, of_state = [x for group in groups for x in group["params"]], map(dict.values, state.values())
        kept = [held, state, *of_groups, *chain.from_iterable(of_state)]
        world = [*map(id, kept)], [(x.requires_grad, _has_hooks(x)) for x in held.present], self._settings()
        if world != self._world:
            self._calls.forget()
            self._world, self._kept, self._filled = world, kept, {}
            device = next(self._model.parameters()).device
            self._rates = {i: torch.full((), math.nan, device=device) for i in self._rounded()}
            self._grads = self._has_grad = None
            self._why = held.why or self._obstacle(held, groups)
        return self._why

    def _settings(self) -> list[Any]:
        """Return all numbers and switches that graphs hold: those of the optimizer, but for rates that they read."""
        optimizer, more = self._optimizer, [tensors.autocast_dtype(next(self._model.parameters())), *graphs.modes()]
        rates = self._rounded()
        for i, group in enumerate(optimizer.param_groups):
            held = {"params", "lr"} if i in rates else {"params"}
            more += [(name, id(x) if isinstance(x, Tensor) else x) for name, x in group.items() if name not in held]
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        return [*more, *map(bool, hooks), hasattr(optimizer, "grad_scale"), env.checks_indices()]

    def _obstacle(self, held: graphs.Held, groups: Sequence[dict[str, Any]]) -> str:
        """Return why no graph can hold a step, empty where one can."""
        kind, optimizer = type(self._optimizer).__name__, self._optimizer
        trained = {id(x) for group in groups for x in group["params"] if x.requires_grad}
        values = [x for own in (*optimizer.state.values(), *groups) for name, x in own.items() if name != "params"]
        several = [x for value in values for x in (value if isinstance(value, (tuple, list)) else (value,))]
        numbers = [x for own in optimizer.state.values() for x in own.values() if not isinstance(x, Tensor)]
        outside = [x for x in several if isinstance(x, Tensor) and x.device.type not in graphs.devices]
        for is_there, why in (
            (not all(x.get("capturable") or x.get("fused") for x in groups), f"{kind} is neither capturable nor fused"),
            (any(x.get("differentiable") for x in groups), f"{kind} is differentiable"),
            (hasattr(optimizer, "grad_scale"), f"a GradScaler has changed {kind}"),
            (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks, f"{kind} has hooks"),
            (any(map(_has_hooks, held.present)), "a parameter has hooks"),
            (trained != {id(x) for x in held.present if x.requires_grad}, f"{kind} has not the model's parameters"),
            (numbers or outside, f"{kind} has numbers outside of the GPU"),
            (env.checks_indices(), "RWKVJIT_CHECK=1 looks at values"),
        ):
            if is_there:
                return why
        return ""

    def _obstacle_of(self, arrays: Sequence[Tensor], rest: Sequence[tuple[type, Any]]) -> str:
        """Return why no graph can hold inputs."""
        device = next(self._model.parameters()).device
        if not arrays or not tensors.are_plain(arrays) or any(x.device != device or x.requires_grad for x in arrays):
            return f"expected inputs on {device} without gradients"
        others = [brief(x) for kind, x in rest if kind not in (int, float, bool, str, type(None))]
        return f"expected tensors and numbers, got {others[0]}" if others else ""

    # ---- rates ---------------------------------------------------------------------------------------------------

    def _rounded(self) -> dict[int, float]:
        """Return the rates of fused Adam and AdamW as a graph reads them, so that every step has the same bits."""
        if type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return {}
        several = enumerate(self._optimizer.param_groups)
        return {i: ctypes.c_float(x["lr"]).value for i, x in several if x["fused"] and isinstance(x["lr"], float)}

    def _fill_rates(self) -> None:
        """Write the rates of now where graphs read them."""
        rates = self._rounded()
        for i, now in rates.items() if rates != self._filled else ():
            self._rates[i].fill_(now)
        self._filled = rates

    @contextmanager
    def _at_rates(self, rates: Mapping[int, Any], is_captured: bool = False) -> Iterator[None]:
        """Let the optimizer's groups have other rates; in a capture a fused one has to be capturable too."""
        groups = self._optimizer.param_groups
        names = "lr", "capturable"
        before: list[dict[str, Any]] = [{x: group[x] for x in names if x in group} for group in groups]
        try:
            for i, rate in rates.items():
                groups[i]["lr"] = rate
            for group in groups if is_captured else ():
                group["capturable"] = True
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def _has_own_gradients(self, is_first: bool, is_last: bool) -> bool:
        """Return whether gradients are where graphs expect them: none before an update, then in static memory."""
        grads = [x.grad for x in self._present]
        if not is_first:
            return self._grads is not None and all(map(is_, grads, self._grads))
        if not is_last and self._grads is None and self._has_grad is not None and self._optimizer.state:
            self._grads = [
                torch.empty_like(x) if there else None for x, there in zip(self._present, self._has_grad, strict=True)
            ]
        return all([x is None for x in grads]) and (is_last or self._grads is not None)

    def _capture(
        self, work: Callable[..., Any], own: Sequence[Tensor], is_first: bool, is_last: bool
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the results of a call that is being captured. Gradients and rates stay as they are."""
        before = [x.grad for x in self._present]
        expected = None if is_first and is_last else self._grads
        try:
            if is_first and expected is not None:
                self._give(expected)
                torch._foreach_zero_([x for x in expected if x is not None])
            with self._at_rates(self._rates, is_captured=True):
                results: list[Tensor | None] = work(*own, expected=expected)
                return results
        finally:
            self._give(before)

    def _follow(self, is_first: bool, is_last: bool) -> None:
        """Do what a replay leaves out, as it writes memory alone."""
        if is_first != is_last:
            self._give([None] * len(self._present) if is_last else self._grads or ())
        if is_last:
            torch.autograd.graph.increment_version([x for x in self._present if x.requires_grad])

    def _give(self, grads: Sequence[Tensor | None]) -> None:
        for x, grad in zip(self._present, grads, strict=True):
            x.grad = grad


def _has_hooks(x: Tensor) -> bool:
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


def graphed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, accumulate: int = 1,
    autocast: torch.dtype | None = None, loss: Callable[..., Tensor] | None = None,
) -> GraphedStep:  # fmt: skip
    """Return a function that does a step of training, which a GPU repeats from a CUDA graph.

    Each call does a forward and a backward. Every `accumulate`-th one clips the gradients, does a step of the optimizer
    and sets the gradients to None. The first calls for new shapes run as they are and count; later ones cost the host
    about one launch. Bits are those of the same steps without graphs.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on one GPU.
    optimizer : torch.optim.Optimizer
        Of all parameters of the model that require gradients; with `fused=True` or `capturable=True`. Fused Adam and
        AdamW read rates that schedulers write from memory, as float32 in every step. If any other number changes, or a
        rate of another optimizer, graphs are captured anew once it stays.
    max_norm : float, optional
        To what `torch.nn.utils.clip_grad_norm_` clips.
    accumulate : int, default 1
        How many calls add up their gradients before an update; the loss of each is divided by it for its backward.
    autocast : torch.dtype, optional
        Of `torch.autocast` around the loss, each cast anew. By default that around the call.
    loss : callable, optional
        Returns the loss of the inputs; `model.loss` by default. It has to be a function of tensors and numbers: what it
        does in Python beside that, a graph does not repeat.

    Returns
    -------
    callable
        `step(*inputs, **options)` returns the loss, a new float32 tensor. `step.norm` is the norm of the gradients
        before the last update clipped them, None without `max_norm`.

    Notes
    -----
    Up to 24 kinds of calls have graphs, which share the memory of the largest. Between the calls of an update the
    gradients lie in memory that stays, and `p.grad` shows them; behind an update it is None.

    A call runs without graphs, and a line of the log says why, where a graph cannot hold it: on a CPU, with hooks on
    modules, parameters or the optimizer, under DDP or FSDP, in modes and compilers, with a loss that waits for the GPU.
    Where modules, settings, memory of parameters or states of the optimizer change, also by `load_state_dict`, the
    graphs of what was are dropped. There is no GradScaler: train in bfloat16.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit.

    Examples
    --------
    >>> step = rwkv_jit.nn.graphed_step(model, optimizer, max_norm=1.0, autocast=torch.bfloat16)
    >>> for tokens in batches:
    ...     loss = step(tokens[:, :-1], tokens[:, 1:])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if max_norm is not None:
        checks.check_number("max_norm", max_norm)
    arguments.count("accumulate", accumulate, 1)
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"autocast: expected a torch.dtype, got {brief(autocast)}")
    if loss is None and not hasattr(model, "loss"):
        raise ValueError(f"loss: expected a function, as {type(model).__name__} has no method loss")
    function: Any = model.loss if loss is None else loss
    return GraphedStep(model, optimizer, max_norm, accumulate, autocast, function)
