"""From a public call to a torch op and back: checks, `torch.library` ops, autograd.

Every recurrence has the same boundary: streamed inputs [B, T, H, K or V], fixed ones like u [H, K], a state, and one
tail of options. `define` builds it once per op. The torch op is what a compiler sees: it has a fake and runs the
same on CPU tensors, where the reference computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import stats, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import backends, choices, known_calls, plain
from rwkv_jit.ops.interface import Forward, Geometry, Inputs, Options
from rwkv_jit.ops.layout import state_shape

DECAYS = ("raw", "sigmoid", "log", "direct")
STATE_LAYOUTS = ("vk", "kv")
_OPTIONS = (
    "float scale, str decay, str state_layout, int checkpoint_interval, int? chunk_len, int? num_threads, str backend, "
    "int? forward_blocks, int? backward_blocks, bool guarded"
)
_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")


@dataclass(frozen=True)
class Op:
    """One recurrence: its names in argument order, its conventions, and how autograd runs it."""

    name: str
    streamed: tuple[str, ...]
    fixed: tuple[str, ...]
    public: tuple[str, ...]  # what callers call these
    decay: str  # by default; "none" where there is no other
    state_layout: str  # by default
    forward: Any  # the torch op
    traced: Callable[..., tuple[Tensor, Tensor]]  # the same with gradients
    known: Callable[..., tuple[Tensor, Tensor | None]]  # a prepared forward with gradients

    @property
    def names(self) -> tuple[str, ...]:
        """Return what the kernels call the inputs."""
        return (*self.streamed, *self.fixed)

    @property
    def decays(self) -> tuple[str, ...]:
        """Return the legal maps from w to the per-step factor."""
        return ("none",) if self.decay == "none" else DECAYS


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
    in_parts: Callable[..., tuple[Tensor, Tensor | None] | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run an op with or without gradients: at once where the call is known, else after all checks.

    A call that is not known `in_parts` may run, from the same arguments; it returns None where it does not.
    """
    tail = (scale, decay, state_layout, checkpoint_interval, chunk_len, num_threads, backend)
    asked = (op.name, decay_bound, tail, torch.is_grad_enabled())
    known, training = known_calls.find(asked, arrays, initial_state, cu_seqlens)
    if known is None and in_parts is not None:
        given = scale, decay, decay_bound, *tail[2:]
        result = in_parts(op, arrays, initial_state, output_final_state, cu_seqlens, *given)
        if result is not None:
            return result
    if known is None:
        check_options(
            op.decays, scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len, num_threads, backend
        )
        options = Options(float(scale), *tail[1:])
        checked = _check(op, arrays, initial_state, cu_seqlens, decay_bound, options, training)
        arrays, initial_state, cu_seqlens, options = checked
        on_gpu = options.backend != "reference"
        if on_gpu and tensors.is_eager() and tensors.are_plain((*arrays, initial_state, cu_seqlens)):
            known = _prepare(op, arrays, initial_state, cu_seqlens, asked, options, training)
    if initial_state is not None and initial_state.dim() == 3:
        sequences = arrays[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = initial_state.expand(sequences, *initial_state.shape)

    final: Tensor | None
    if known is not None and training:
        y, final = op.known(known, output_final_state, *arrays, initial_state, cu_seqlens)
    elif known is not None:
        y, final, _ = known.run(arrays, initial_state, cu_seqlens, output_final_state, False)
    else:
        arguments = (*arrays, initial_state, cu_seqlens, *options, bool(output_final_state))
        y, final, *_ = op.traced(*arguments) if training else op.forward(*arguments, False)
    return y, final if output_final_state else None


def _check(
    op: Op,
    arrays: Sequence[Any],
    initial_state: Any,
    cu_seqlens: Any,
    decay_bound: float | None,
    options: Options,
    training: bool,
) -> tuple[list[Tensor], Tensor | None, Tensor | None, Options]:
    """Check the arrays of a call; return them as tensors, and the options with the backend that will run."""
    given, initial_state, cu_seqlens = check_tensors(
        op, arrays, initial_state, cu_seqlens, options.state_layout, options.backend
    )
    backend, geometry = "reference", Geometry(options.chunk_len, options.num_threads)
    if _is_for_kernels(options.backend, given[0]):
        device = given[0].device.index
        asked = options.decay, decay_bound, options.chunk_len, options.num_threads
        case = case_of(op, given, cu_seqlens, *asked, training)
        backend, chunk_len = backends.choose(options.backend, case, lambda: tensors.arch(device))
        geometry = backends.geometry(backend, chunk_len, case, lambda: tensors.arch(device), lambda: choices.of(device))
    scale, decay, layout, interval, *_ = options
    found = Options(
        scale, decay, layout, interval, geometry.chunk_len, geometry.num_threads, backend, geometry.forward_blocks,
        geometry.backward_blocks, guarded=backends.is_guarded(backend, geometry.chunk_len, decay, decay_bound),
    )  # fmt: skip
    return given, initial_state, cu_seqlens, found


def case_of(
    op: Op, given: Sequence[Tensor], cu_seqlens: Tensor | None, decay: str, decay_bound: float | None,
    chunk_len: int | None, num_threads: int | None, training: bool,
) -> backends.Case:  # fmt: skip
    """Return what the rule looks at, of a call on CUDA tensors that have been checked."""
    first = given[0]
    batch, tokens, heads, head_size = first.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    device = first.device.index
    return backends.Case(
        op.name, first.dtype, head_size, given[op.streamed.index("v")].shape[3],
        tokens if cu_seqlens is None else tokens // sequences, decay, decay_bound, chunk_len, num_threads,
        training, sequences * heads, cu_seqlens is not None,
        (lambda: tensors.multiprocessors(device)) if tensors.is_eager() else None,
    )  # fmt: skip


def check_tensors(
    op: Op, arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, state_layout: str, backend: str
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Check the arrays of a call whose options are right, and return them as tensors.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    given = [tensors.from_any(name, x) for name, x in zip(op.public, arrays, strict=True)]
    count, public = len(op.streamed), dict(zip(op.names, op.public, strict=True))
    first, v = given[0], given[op.streamed.index("v")]
    on_gpu = _is_for_kernels(backend, first)
    streamed = dict(zip(op.public[:count], given[:count], strict=True))
    tensors.check_inputs(streamed, public["r"], public["v"], public.get("w"), wide=not on_gpu)
    batch, _, heads, head_size = first.shape
    value_size = v.shape[3]
    for name, x in zip(op.public[count:], given[count:], strict=True):
        tensors.check_fixed(name, x, (heads, head_size), first)
    sequences = batch
    if cu_seqlens is not None:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        tensors.check_packing(cu_seqlens, first)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        sizes = (value_size, head_size) if state_layout == "vk" else (head_size, value_size)
        tensors.check_state(initial_state, sequences, heads, sizes, first, wide=not on_gpu)
    return given, initial_state, cu_seqlens


def _is_for_kernels(backend: str, like: Tensor) -> bool:
    """Return whether kernels run a call: CUDA tensors take them, all others plain torch."""
    if backend not in ("auto", "reference") and like.device.type != "cuda":
        raise UnsupportedConfigError(
            f"backend: {backend!r} runs on CUDA tensors, got {like.device}; use 'auto' or 'reference'"
        )
    return backend != "reference" and like.device.type == "cuda"


def _prepare(
    op: Op,
    given: Sequence[Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    asked: tuple[Any, ...],
    options: Options,
    training: bool,
) -> Forward:
    """Return the forward for tensors that have been checked.

    `asked` is what else tells calls apart, as it came: other options may be resolved to the same ones.
    """

    def prepare() -> Forward:
        inputs = _inputs(op, given, cu_seqlens)
        if cu_seqlens is not None:
            tensors.packing(cu_seqlens, inputs["v"].shape[1])  # before anything is compiled
        state_dtype = torch.float32 if initial_state is None else initial_state.dtype
        return backends.prepare_forward(inputs, state_dtype, cu_seqlens is not None, options, training)

    return known_calls.find_or_keep(asked, training, given, initial_state, cu_seqlens, prepare)


def _inputs(op: Op, given: Sequence[Tensor], cu_seqlens: Tensor | None) -> Inputs:
    sequences = given[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = len(op.streamed)
    return Inputs(op.name, op.names, tuple(given[:count]), tuple(given[count:]), sequences)


def key_scale(q: Any) -> float:
    """Return K^-0.5. A `q` without a head size is left for the checks to refuse."""
    return float(max((1, *tensors.from_any("q", q).shape[-1:])) ** -0.5)


def check_options(
    decays: tuple[str, ...],
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
        ("decay", decay, decays),
        ("state_layout", state_layout, STATE_LAYOUTS),
        ("backend", backend, backends.NAMES),
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


# ---- the torch op ------------------------------------------------------------------------------------------------


def autograd_dispatch() -> Any:
    """Record gradients below a torch dispatch mode too: it calls ops with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def define(
    name: str,
    streamed: tuple[str, ...],
    fixed: tuple[str, ...],
    reference: Callable[..., Any],
    public: tuple[str, ...] | None = None,
    decay: str = "raw",
    state_layout: str = "vk",
) -> Op:
    """Register `rwkv_jit::<name>_fwd` and `<name>_bwd` and return the op."""
    public = public or (*streamed, *fixed)
    count = len(public)
    end = count + 2 + len(Options._fields)  # of the options, behind state and cu_seqlens
    given = ", ".join(f"Tensor {argument}" for argument in public)
    results = ", ".join(["Tensor"] * (count + 1))
    _LIBRARY.define(
        f"{name}_fwd({given}, Tensor? initial_state, Tensor? cu_seqlens, {_OPTIONS}, bool output_final_state, "
        "bool save) -> (Tensor, Tensor, Tensor)"
    )
    _LIBRARY.define(
        f"{name}_bwd(Tensor? dy, Tensor? grad_final_state, {given}, Tensor? initial_state, Tensor? cu_seqlens, "
        f"{_OPTIONS}, Tensor saved) -> ({results})"
    )

    def parts(arguments: Sequence[Any]) -> tuple[Any, Any, Options]:
        """Return the inputs; the state and cu_seqlens; the options."""
        return arguments[:count], arguments[count : count + 2], Options(*arguments[count + 2 : end])

    def run_reference(arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
        scale, map_of_w, layout = arguments[count + 2 : count + 5]
        cu_seqlens = arguments[count + 1]
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, arguments[0].shape[1])
        return plain.run(name, reference, arguments[:count], arguments[count], cu_seqlens, scale, map_of_w, layout)

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        output_final_state, save = arguments[end:]
        if options.backend != "reference":
            # The public call has checked these options, so what is known of it is no public call's.
            known = _prepare(op, given, state, cu_seqlens, (f"{name}_fwd", None, options), options, save)
            y, final, saved = known.run(given, state, cu_seqlens, output_final_state, save)
            return y, y.new_empty(0) if final is None else final, y.new_empty(0) if saved is None else saved
        if not arguments[0].is_cuda:
            stats.say_once(f"{name}: CPU tensors run the reference in plain torch", key="cpu")
        y, final = run_reference(arguments)
        return y, final if output_final_state else y.new_empty(0), y.new_empty(0)

    def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        output_final_state, save = arguments[end:]
        inputs = _inputs(op, given, cu_seqlens)
        v = inputs["v"]
        final, saved = v.new_empty(0), v.new_empty(0)
        if output_final_state:
            dtype = state.dtype if state is not None else torch.promote_types(v.dtype, torch.float32)
            final = v.new_empty(state_shape(inputs, options), dtype=dtype)
        if save and options.backend != "reference":
            kept = backends.saved_for(inputs, cu_seqlens is not None, options)
            saved = v.new_empty(kept.floats, dtype=torch.float32)
        return torch.empty_like(v, memory_format=torch.contiguous_format), final, saved

    def backward(dy: Tensor | None, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        given, (state, cu_seqlens), options = parts(arguments)
        if options.backend == "reference":
            return backward_reference(dy, grad_final, arguments)
        inputs = _inputs(op, given, cu_seqlens)
        dy = torch.zeros_like(inputs["v"]) if dy is None else dy
        grads, fixed_grads, grad_initial = backends.backward(
            options, inputs, dy, grad_final, state, cu_seqlens, arguments[-1]
        )
        totals = [g.sum(0).to(x.dtype) for g, x in zip(fixed_grads, inputs.fixed, strict=True)]
        return (*grads, *totals, given[0].new_empty(0) if grad_initial is None else grad_initial.to(state.dtype))

    def backward_reference(
        dy: Tensor | None, grad_final: Tensor | None, arguments: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        state = arguments[count]
        with torch.enable_grad(), autograd_dispatch(), plain.as_written(arguments[0]):
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

    def differentiate(
        saved: Sequence[Tensor], options: Sequence[Any], dy: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, the initial state and cu_seqlens."""
        *given, kept = saved
        run = Gradient.apply if torch.is_grad_enabled() else backward_op
        *grads, grad_initial = run(dy, grad_final, *given, *options, kept)
        return (*grads, None if given[count] is None else grad_initial, None)

    class Traced(torch.autograd.Function):
        """The forward as a torch op, and the backward from what it saves: what compilers and transforms see."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
            y, final, saved = forward_op(*arguments, True)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*arguments[: count + 2], saved)
            ctx.options = arguments[count + 2 : end]
            ctx.has_final_state = bool(arguments[end])
            if not ctx.has_final_state:
                ctx.mark_non_differentiable(final)
            return y, final

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
            # A compiled graph passes zeros for a result that has no gradient, here for the empty final state.
            grad_final = grad_final if ctx.has_final_state else None
            grads = differentiate(ctx.saved_tensors, ctx.options, dy, grad_final)
            return (*grads, *[None] * (len(ctx.options) + 1))

    class Known(torch.autograd.Function):
        """The same for a forward that is prepared."""

        @staticmethod
        def forward(ctx: Any, known: Forward, output_final_state: bool, *given: Any) -> tuple[Tensor, Tensor | None]:
            *inputs, state, cu_seqlens = given
            y, final, saved = known.run(inputs, state, cu_seqlens, output_final_state, True)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*given, saved)
            ctx.options = known.options
            return y, final

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
            return None, None, *differentiate(ctx.saved_tensors, ctx.options, dy, grad_final)

    # Function.apply looks for transforms first; a known call has none, and saves that time.
    apply_known = super(torch.autograd.Function, Known).apply
    op = Op(name, streamed, fixed, public, decay, state_layout, forward_op, Traced.apply, apply_known)
    return op
