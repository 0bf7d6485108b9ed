"""From a public call to a torch op and back: checks, `torch.library` ops, autograd.

Every recurrence has the same boundary: streamed inputs [B, T, H, K or V], fixed ones like u [H, K], a state, and one
tail of options. `define` builds it once per op. The torch op is what a compiler sees: it has a fake and runs the
same on CPU tensors, where the reference computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import stats, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import recurrent

BACKENDS = ("auto", "recurrent", "reference")
DECAYS = ("raw", "sigmoid", "log", "direct")
STATE_LAYOUTS = ("vk", "kv")
_OPTIONS = (
    "float scale, str decay, str state_layout, int checkpoint_interval, int? chunk_len, int? num_threads, str backend"
)
_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")


class Op(NamedTuple):
    """One recurrence: its names in argument order, and how autograd runs it."""

    name: str
    streamed: tuple[str, ...]
    fixed: tuple[str, ...]
    forward: Any  # the torch op
    apply: Callable[..., tuple[Tensor, Tensor]]  # the same with gradients


# ---- the public call ---------------------------------------------------------------------------------------------


def call(
    op: Op,
    arrays: Sequence[Any],
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Any,
    scale: float,
    decay: str,
    decay_bound: float | None,
    state_layout: str,
    checkpoint_interval: int,
    chunk_len: int | None,
    num_threads: int | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Check everything, then run the op with or without gradients."""
    check_options(scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len, num_threads, backend)
    names = (*op.streamed, *op.fixed)
    given = [tensors.from_any(name, x) for name, x in zip(names, arrays, strict=True)]
    streamed = dict(zip(op.streamed, given, strict=False))
    first, v = streamed["r"], streamed["v"]
    backend = _resolve(backend, first)
    wide = backend == "reference"
    tensors.check_inputs(streamed, like="r", value="v", decay="w", wide=wide)
    batch, _, heads, head_size = first.shape
    for name, x in zip(op.fixed, given[len(op.streamed) :], strict=True):
        tensors.check_fixed(name, x, (heads, head_size), first)
    sequences = batch
    if cu_seqlens is not None:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        tensors.check_packing(cu_seqlens, first)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        sizes = (v.shape[3], head_size) if state_layout == "vk" else (head_size, v.shape[3])
        tensors.check_state(initial_state, sequences, heads, sizes, first, wide)
        initial_state = initial_state.expand(sequences, heads, *sizes)

    options = (float(scale), decay, state_layout, checkpoint_interval, chunk_len, num_threads, backend)
    arguments = (*given, initial_state, cu_seqlens, *options, bool(output_final_state))
    differentiable = [*given, initial_state] if initial_state is not None else given
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiable):
        y, final = op.apply(*arguments)
    else:
        y, final, _, _ = op.forward(*arguments, False)
    return y, final if output_final_state else None


def check_options(
    scale: float,
    decay: str,
    decay_bound: float | None,
    state_layout: str,
    checkpoint_interval: int,
    chunk_len: int | None,
    num_threads: int | None,
    backend: str,
) -> None:
    """Check the tail of a call.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    for name, value, legal in (
        ("decay", decay, DECAYS),
        ("state_layout", state_layout, STATE_LAYOUTS),
        ("backend", backend, BACKENDS),
    ):
        if value not in legal:
            raise ValueError(f"{name}: expected one of {', '.join(legal)}, got {value!r}")
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not -math.inf < scale < math.inf:
        raise ValueError(f"scale: expected a finite number, got {scale!r}")
    if decay_bound is not None and not (isinstance(decay_bound, (int, float)) and decay_bound < 0):
        raise ValueError(f"decay_bound: expected a negative number, the least log-decay of a step, got {decay_bound!r}")
    for name, count in (
        ("checkpoint_interval", checkpoint_interval),
        ("chunk_len", chunk_len),
        ("num_threads", num_threads),
    ):
        if count is None and name != "checkpoint_interval":
            continue
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name}: expected an int, got {count!r}")
        if not 1 <= count < 2**31:
            raise ValueError(f"{name}: expected at least 1, got {count}")


def _resolve(backend: str, like: Tensor) -> str:
    """The rule that picks a backend: kernels for CUDA tensors, plain torch for all others."""
    if backend == "auto":
        return "recurrent" if like.device.type == "cuda" else "reference"
    if backend != "reference" and like.device.type != "cuda":
        raise UnsupportedConfigError(
            f"backend: {backend!r} runs on CUDA tensors, got {like.device}; use 'auto' or 'reference'"
        )
    return backend


# ---- the torch op ------------------------------------------------------------------------------------------------


def _autograd_dispatch() -> Any:
    """Record gradients below a torch dispatch mode too: it calls ops with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def define(name: str, streamed: tuple[str, ...], fixed: tuple[str, ...], reference: Callable[..., Any]) -> Op:
    """Register `rwkv_jit::<name>_fwd` and `<name>_bwd` and return the op."""
    names = (*streamed, *fixed)
    count = len(names)
    given = ", ".join(f"Tensor {argument}" for argument in names)
    results = ", ".join(["Tensor"] * (count + 1))
    _LIBRARY.define(
        f"{name}_fwd({given}, Tensor? initial_state, Tensor? cu_seqlens, {_OPTIONS}, bool output_final_state, "
        "bool save_checkpoints) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    _LIBRARY.define(
        f"{name}_bwd(Tensor? dy, Tensor? grad_final_state, {given}, Tensor? initial_state, Tensor? cu_seqlens, "
        f"{_OPTIONS}, Tensor checkpoints, Tensor sa) -> ({results})"
    )

    def split(
        arguments: Sequence[Any],
    ) -> tuple[recurrent.Inputs, Tensor | None, Tensor | None, recurrent.Options, str]:
        tensors_given, (state, cu_seqlens, *options, backend) = arguments[:count], arguments[count : count + 9]
        sequences = arguments[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        inputs = recurrent.Inputs(
            name, streamed, tuple(tensors_given[: len(streamed)]), tuple(tensors_given[len(streamed) :]), sequences
        )
        return inputs, state, cu_seqlens, recurrent.Options(*options), backend

    def run_reference(arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
        scale, decay, layout = arguments[count + 2 : count + 5]
        cu_seqlens = arguments[count + 1]
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, arguments[0].shape[1])
        result: tuple[Tensor, Tensor] = reference(
            *arguments[:count], arguments[count], True, cu_seqlens, scale, decay, None, layout
        )
        return result

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, state, cu_seqlens, options, backend = split(arguments)
        output_final_state, save_checkpoints = arguments[count + 9 :]
        if backend == "recurrent":
            return recurrent.forward(inputs, state, cu_seqlens, options, output_final_state, save_checkpoints)
        if not arguments[0].is_cuda:
            stats.say_once(f"{name}: CPU tensors run the reference in plain torch", key="cpu")
        y, final = run_reference(arguments)
        return y, final if output_final_state else y.new_empty(0), y.new_empty(0), y.new_empty(0)

    def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, state, cu_seqlens, options, backend = split(arguments)
        output_final_state, save_checkpoints = arguments[count + 9 :]
        first, v = inputs["r"], inputs["v"]
        batch, tokens, heads, value_size = v.shape
        final, checkpoints, sa = (v.new_empty(0) for _ in range(3))
        if output_final_state:
            sizes = (value_size, first.shape[3]) if options.state_layout == "vk" else (first.shape[3], value_size)
            dtype = state.dtype if state is not None else torch.promote_types(v.dtype, torch.float32)
            final = v.new_empty((inputs.sequences, heads, *sizes), dtype=dtype)
        if save_checkpoints and backend == "recurrent":
            packed = cu_seqlens is not None
            slots = recurrent.checkpoint_slots(batch, tokens, inputs.sequences, packed, options.checkpoint_interval)
            checkpoints = v.new_empty((slots, heads, value_size, first.shape[3]), dtype=torch.float32)
            sa = v.new_empty(v.shape, dtype=torch.float32) if recurrent.saves_sa(name) else sa
        return torch.empty_like(v, memory_format=torch.contiguous_format), final, checkpoints, sa

    def backward(dy: Tensor | None, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, state, cu_seqlens, options, backend = split(arguments)
        if backend == "reference":
            return backward_reference(dy, grad_final, arguments)
        dy = torch.zeros_like(inputs["v"]) if dy is None else dy
        checkpoints, sa = arguments[-2:]
        grads, fixed_grads, grad_initial = recurrent.backward(
            inputs, dy, grad_final, cu_seqlens, checkpoints, sa, options, state is not None
        )
        totals = [g.sum(0).to(x.dtype) for g, x in zip(fixed_grads, inputs.fixed, strict=True)]
        return (*grads, *totals, grad_initial if state is None else grad_initial.to(state.dtype))

    def backward_reference(
        dy: Tensor | None, grad_final: Tensor | None, arguments: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        state = arguments[count]
        with torch.enable_grad(), _autograd_dispatch():
            leaves = [None if x is None else x.detach().requires_grad_() for x in (*arguments[:count], state)]
            outputs = run_reference((*leaves, *arguments[count + 1 :]))
            pairs = [(y, g) for y, g in zip(outputs, (dy, grad_final), strict=True) if g is not None]
            wanted = [x for x in leaves if x is not None]
            grads = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]
        # An op's results own their memory, in the layout its fake promises.
        owned = [g.detach().clone(memory_format=torch.contiguous_format) for g in found]
        return (*owned, *([] if state is not None else [arguments[0].new_empty(0)]))

    def backward_fake(dy: Tensor | None, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        state = arguments[count]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:count]]
        initial = (
            arguments[0].new_empty(0)
            if state is None
            else torch.empty_like(state, memory_format=torch.contiguous_format)
        )
        return (*grads, initial)

    for suffix, run, fake in (("fwd", forward, forward_fake), ("bwd", backward, backward_fake)):
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(f"{name}_{suffix}", run, key)
        torch.library.register_fake(f"rwkv_jit::{name}_{suffix}", fake, lib=_LIBRARY)
    forward_op = getattr(torch.ops.rwkv_jit, f"{name}_fwd").default
    backward_op = getattr(torch.ops.rwkv_jit, f"{name}_bwd").default

    class Gradient(torch.autograd.Function):
        """The backward as a function of its own, so that a second derivative is a clear error and not a wrong zero."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            return tuple(backward_op(*arguments))

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise RuntimeError(f"{name} has no second derivative; differentiate {name}_ref twice instead")

    class Recurrence(torch.autograd.Function):
        """The forward with checkpoints saved, and the backward from them."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
            y, final, checkpoints, sa = forward_op(*arguments, True)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*arguments[: count + 2], checkpoints, sa)
            ctx.options = arguments[count + 2 : count + 9]
            ctx.has_final_state = bool(arguments[count + 9])
            if not ctx.has_final_state:
                ctx.mark_non_differentiable(final)
            return y, final

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
            *saved, checkpoints, sa = ctx.saved_tensors
            # A compiled graph passes zeros for a result that has no gradient, here for the empty final state.
            grad_final = grad_final if ctx.has_final_state else None
            run = Gradient.apply if torch.is_grad_enabled() else backward_op
            *grads, grad_initial = run(dy, grad_final, *saved, *ctx.options, checkpoints, sa)
            state = saved[count]
            return (*grads, None if state is None else grad_initial, None, *[None] * (len(ctx.options) + 1))

    return Op(name, streamed, fixed, forward_op, Recurrence.apply)
