"""From a public call to a torch op and back: checks, what runs the torch op, autograd.

Every recurrence has the same boundary: streamed inputs [B, T, H, K or V], fixed ones like u [H, K], a state, and one
tail of options. `define` builds it once per op. The torch op is what a compiler sees: it has a fake and runs the
same on CPU tensors, where the reference computes it. What a compiler or `torch.export` keeps of a call is what the
caller asked for; the backend is chosen when it runs, by the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import stats, tensors
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.ops import backends, choices, known_calls, plain, recording, registry, sharding
from rwkv_jit.ops.interface import Forward, Inputs, Options
from rwkv_jit.ops.layout import state_shape

DECAYS = ("raw", "sigmoid", "log", "direct")
STATE_LAYOUTS = ("vk", "kv")
_LARGEST = sys.float_info.max


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
    if output_final_state is not True and output_final_state is not False:
        output_final_state = check_flag("output_final_state", output_final_state)
    tail = (scale, decay, state_layout, checkpoint_interval, chunk_len, num_threads, backend)
    asked = (op.name, decay_bound, tail, torch.is_grad_enabled())
    known, training = known_calls.find(asked, arrays, initial_state, cu_seqlens)
    if known is None:
        given = scale, decay, decay_bound, *tail[2:]
        if sharding.any_distributed((*arrays, initial_state, cu_seqlens)):
            return _distributed(op, arrays, initial_state, output_final_state, cu_seqlens, *given, in_parts)
        cast = under_autocast(op, arrays)
        if cast is not None:
            with tensors.exactly(cast[0]):
                return call(op, cast, initial_state, output_final_state, cu_seqlens, *given, in_parts)
        if in_parts is not None:
            result = in_parts(op, arrays, initial_state, output_final_state, cu_seqlens, *given)
            if result is not None:
                return result
        check_options(op.decays, *given)
        options = Options(float(scale), *tail[1:], guarded=None)
        checked = check_tensors(op, arrays, initial_state, cu_seqlens, state_layout, backend)
        arrays, initial_state, cu_seqlens = checked
        if _is_for_kernels(backend, arrays[0]):
            is_direct = tensors.is_eager() and tensors.are_plain((*arrays, initial_state, cu_seqlens))
            if is_direct or backend != "auto":  # a backend that was named is one for this device
                options = chosen(op, arrays, cu_seqlens, decay_bound, options, training, is_direct)
            if is_direct:
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
        given = (*arrays, initial_state, cu_seqlens, *options, output_final_state, False)
        y, final, _ = op.forward(*given, decay_bound=decay_bound)
    return y, final if output_final_state else None


def _distributed(
    op: Op, arrays: Sequence[Any], initial_state: Any, output_final_state: bool, cu_seqlens: Any, *options: Any
) -> tuple[Tensor, Tensor | None]:
    """Run a call of DTensors."""
    batch = {"batch": 0} if cu_seqlens is None else {}  # packed sequences are cut along the heads alone
    streamed, states = {**batch, "heads": 2}, {**batch, "heads": 1}
    given = {
        public: (x, {"heads": 0} if name in op.fixed else streamed)
        for name, public, x in zip(op.names, op.public, arrays, strict=True)
    }
    is_one_for_all = initial_state is not None and initial_state.dim() == 3
    given["initial_state"] = initial_state, {"heads": 0} if is_one_for_all else states
    given["cu_seqlens"] = cu_seqlens, {}

    def of_local(*local: Any) -> tuple[Tensor, Tensor | None]:
        *inputs, state, bounds = local
        return call(op, inputs, state, output_final_state, bounds, *options)

    y, final = sharding.run(of_local, given, (streamed, states))
    return y, final


def under_autocast(op: Op, arrays: Sequence[Any]) -> list[Tensor] | None:
    """Return the inputs as torch's own ops take them under autocast; None where that is off.

    Decays and u stay float32 where they are: the kernels take them so.
    """
    dtype = tensors.autocast_dtype(tensors.from_any(op.public[0], arrays[0]))
    return None if dtype is None else _cast(op, arrays, dtype)


def _cast(op: Op, arrays: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    given = zip(op.names, op.public, arrays, strict=True)
    return [tensors.under_autocast(tensors.from_any(public, x), dtype, name in "wu") for name, public, x in given]


def chosen(
    op: Op,
    given: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    decay_bound: float | None,
    options: Options,
    training: bool,
    is_direct: bool = False,
) -> Options:
    """Return the options of a call that has been checked, with the backend that will run.

    Calls that are not `is_direct` choose without a look at what the GPU has room for: what a fake says of them must
    hold when they run.
    """
    if options.guarded is not None:
        return options
    if not _is_for_kernels(options.backend, given[0]):
        return options._replace(backend="reference", guarded=False)
    device = given[0].device.index
    asked = options.decay, decay_bound, options.chunk_len, options.num_threads
    case = case_of(op, given, cu_seqlens, *asked, training, is_direct)
    backend, chunk_len = backends.choose(options.backend, case, lambda: tensors.arch(device))
    geometry = backends.geometry(backend, chunk_len, case, lambda: tensors.arch(device), lambda: choices.of(device))
    scale, decay, layout, interval, *_ = options
    return Options(
        scale, decay, layout, interval, geometry.chunk_len, geometry.num_threads, backend, geometry.forward_blocks,
        geometry.backward_blocks, guarded=backends.is_guarded(backend, geometry.chunk_len, decay, decay_bound),
    )  # fmt: skip


def case_of(
    op: Op, given: Sequence[Tensor], cu_seqlens: Tensor | None, decay: str, decay_bound: float | None,
    chunk_len: int | None, num_threads: int | None, training: bool, is_direct: bool,
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
        (lambda: tensors.multiprocessors(device)) if is_direct else None,
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
    decay_bound: float | None = None,
) -> Forward:
    """Return the forward for tensors that have been checked.

    `asked` is what else tells calls apart, as it came: other options may be resolved to the same ones.
    """

    def prepare() -> Forward:
        inputs = _inputs(op, given, cu_seqlens)
        if cu_seqlens is not None:
            tensors.packing(cu_seqlens, inputs["v"].shape[1])  # before anything is compiled
        state_dtype = torch.float32 if initial_state is None else initial_state.dtype
        to_run = chosen(op, given, cu_seqlens, decay_bound, options, training)
        return backends.prepare_forward(inputs, state_dtype, cu_seqlens is not None, to_run, training)

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
        check_name(name, value, legal)
    check_number("scale", scale)
    if decay_bound is not None:
        if not (isinstance(decay_bound, (int, float)) and decay_bound < 0):
            raise ValueError(
                f"decay_bound: expected a negative number, the least log-decay of a step, got {decay_bound!r}"
            )
        if isinstance(decay_bound, int):
            check_number("decay_bound", decay_bound)
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


def check_name(name: str, value: Any, legal: Sequence[str]) -> None:
    """Check that an option is one of these."""
    if not isinstance(value, str) or value not in legal:
        raise ValueError(f"{name}: expected one of {', '.join(legal)}, got {value!r}")


def check_number(name: str, value: Any) -> None:
    """Check that an option is a number that a kernel can take."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return
    got = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "an integer too large for a float"
    raise ValueError(f"{name}: expected a finite number, got {got}")


def check_flag(name: str, value: Any) -> bool:
    """Return a switch, which may be any object that is true or false."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}: {error}") from error


# ---- the torch op ------------------------------------------------------------------------------------------------


def define(
    name: str,
    streamed: tuple[str, ...],
    fixed: tuple[str, ...],
    reference: Callable[..., Any],
    public: tuple[str, ...] | None = None,
    decay: str = "raw",
    state_layout: str = "vk",
) -> Op:
    """Say who runs `rwkv_jit::<name>_fwd` and `<name>_bwd` and return the op."""
    public = public or (*streamed, *fixed)
    count = len(public)
    end = count + 2 + len(Options._fields)  # of the options, behind state and cu_seqlens
    forward_op, backward_op = registry.find(f"{name}_fwd"), registry.find(f"{name}_bwd")

    def parts(arguments: Sequence[Any]) -> tuple[Any, Any, Options]:
        """Return the inputs; the state and cu_seqlens; the options."""
        return arguments[:count], arguments[count : count + 2], Options(*arguments[count + 2 : end])

    def loop(arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Run the reference, which derivatives of every kind go through."""
        scale, map_of_w, layout = arguments[count + 2 : count + 5]
        cu_seqlens = arguments[count + 1]
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, arguments[0].shape[1])
        has_decay = {} if map_of_w == "none" else {"decay": map_of_w}
        with tensors.exactly(arguments[0]):
            result: tuple[Tensor, Tensor] = reference(
                *arguments[:count], arguments[count], True, cu_seqlens, scale, state_layout=layout, **has_decay
            )
        return result

    def run_reference(arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Compute a call in plain torch, differentiable once backwards."""
        scale, map_of_w, layout = arguments[count + 2 : count + 5]
        cu_seqlens = arguments[count + 1]
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, arguments[0].shape[1])
        return plain.run(name, reference, arguments[:count], arguments[count], cu_seqlens, scale, map_of_w, layout)

    def forward(*arguments: Any, decay_bound: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        output_final_state, save = arguments[end:]
        if _is_for_kernels(options.backend, given[0]):
            # The public call has checked these options, so what is known of it is no public call's.
            asked = f"{name}_fwd", decay_bound, options
            known = _prepare(op, given, state, cu_seqlens, asked, options, save, decay_bound)
            y, final, saved = known.run(given, state, cu_seqlens, output_final_state, save)
            return y, y.new_empty(0) if final is None else final, y.new_empty(0) if saved is None else saved
        if not arguments[0].is_cuda:
            stats.say_once(f"{name}: CPU tensors run the reference in plain torch", key="cpu")
        y, final = run_reference(arguments)
        return y, final if output_final_state else y.new_empty(0), y.new_empty(0)

    def forward_fake(*arguments: Any, decay_bound: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        output_final_state, save = arguments[end:]
        inputs = _inputs(op, given, cu_seqlens)
        v = inputs["v"]
        final, saved = v.new_empty(0), v.new_empty(0)
        if output_final_state:
            dtype = state.dtype if state is not None else torch.promote_types(v.dtype, torch.float32)
            final = v.new_empty(state_shape(inputs, options), dtype=dtype)
        if save and _is_for_kernels(options.backend, v):
            options = chosen(op, given, cu_seqlens, decay_bound, options, training=True)
            kept = backends.saved_for(inputs, cu_seqlens is not None, options)
            saved = v.new_empty(kept.floats, dtype=torch.float32)
        return torch.empty_like(v, memory_format=torch.contiguous_format), final, saved

    def backward(
        dy: Tensor | None, grad_final: Tensor | None, *arguments: Any, decay_bound: float | None = None
    ) -> tuple[Tensor, ...]:
        given, (state, cu_seqlens), options = parts(arguments)
        if not _is_for_kernels(options.backend, given[0]):
            return backward_reference(dy, grad_final, arguments)
        inputs, saved = _inputs(op, given, cu_seqlens), arguments[-1]
        if options.guarded is None:
            options = chosen(op, given, cu_seqlens, decay_bound, options, training=True)
            expected = backends.saved_for(inputs, cu_seqlens is not None, options).floats
            if saved.numel() != expected:
                raise RwkvJitError(
                    f"{name}: the backward takes {expected} numbers of what the forward saved, got {saved.numel()}"
                )
        dy = torch.zeros_like(inputs["v"]) if dy is None else dy
        grads, fixed_grads, grad_initial = backends.backward(options, inputs, dy, grad_final, state, cu_seqlens, saved)
        totals = [g.sum(0).to(x.dtype) for g, x in zip(fixed_grads, inputs.fixed, strict=True)]
        return (*grads, *totals, given[0].new_empty(0) if grad_initial is None else grad_initial.to(state.dtype))

    def backward_reference(
        dy: Tensor | None, grad_final: Tensor | None, arguments: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        state = arguments[count]
        with recording.plain_torch(), tensors.exactly(arguments[0]):
            leaves = [None if x is None else x.detach().requires_grad_() for x in (*arguments[:count], state)]
            outputs = run_reference((*leaves, *arguments[count + 1 :]))
            found = recording.gradients(outputs, (dy, grad_final), [x for x in leaves if x is not None])
        return (*found, *([] if state is not None else [arguments[0].new_empty(0)]))

    def backward_fake(
        dy: Tensor | None, grad_final: Tensor | None, *arguments: Any, decay_bound: float | None = None
    ) -> tuple[Tensor, ...]:
        state = arguments[count]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:count]]
        initial = (
            arguments[0].new_empty(0)
            if state is None
            else torch.empty_like(state, memory_format=torch.contiguous_format)
        )
        return (*grads, initial)

    def differentiate(
        saved: Sequence[Tensor],
        options: Sequence[Any],
        dy: Tensor | None,
        grad_final: Tensor | None,
        run: Callable[..., Sequence[Tensor]],
        **named: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, the initial state and cu_seqlens."""
        *given, kept = saved
        *grads, grad_initial = run(dy, grad_final, *given, *options, kept, **named)
        return (*grads, None if given[count] is None else grad_initial, None)

    def saving(arguments: Sequence[Any]) -> Sequence[Any]:
        return (*arguments[:-1], True)

    def setup(ctx: Any, arguments: Sequence[Any], named: dict[str, Any], results: tuple[Tensor, ...]) -> None:
        _, final, saved = results
        ctx.save_for_backward(*arguments[: count + 2], saved)
        ctx.options, ctx.named = arguments[count + 2 : end], named
        ctx.has_final_state = bool(arguments[end])
        ctx.mark_non_differentiable(*([saved] if ctx.has_final_state else [final, saved]))

    def of_context(ctx: Any, dy: Tensor | None, grad_final: Tensor | None, _: Any) -> tuple[Any, ...]:
        # A compiled graph passes zeros for a result that has no gradient, here for the empty final state.
        grad_final = grad_final if ctx.has_final_state else None
        grads = differentiate(ctx.saved_tensors, ctx.options, dy, grad_final, run_backward, **ctx.named)
        return (*grads, *[None] * (len(ctx.options) + 2))

    def plainly(*arguments: Any, decay_bound: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if _is_for_kernels(arguments[count + 2 + Options._fields.index("backend")], arguments[0]):
            recording.refuse_forward_mode(name)
        y, final = loop(arguments)
        return y, final if arguments[end] else y.new_empty(0), y.new_empty(0)

    def cast(*arguments: Any) -> Sequence[Any]:
        dtype = tensors.autocast_dtype(arguments[0])
        return arguments if dtype is None else (*_cast(op, arguments[:count], dtype), *arguments[count:])

    class Known(torch.autograd.Function):
        """The forward and its backward, for a forward that is prepared."""

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
            saved = ctx.saved_tensors
            is_direct = not torch.is_grad_enabled() and tensors.is_eager()
            is_direct = is_direct and tensors.are_plain((dy, grad_final, *saved))
            run = backward if is_direct else run_backward
            return None, None, *differentiate(saved, ctx.options, dy, grad_final, run)

    record = recording.forward(forward_op, saving, setup, of_context, plainly)
    record_backward, run_backward = recording.backward(backward_op, name)
    registry.implement(f"{name}_fwd", forward, forward_fake, record, cast)
    registry.implement(f"{name}_bwd", backward, backward_fake, record_backward)
    # Function.apply looks for transforms first; a known call has none, and saves that time.
    apply_known = super(torch.autograd.Function, Known).apply
    op = Op(name, streamed, fixed, public, decay, state_layout, forward_op, apply_known)
    return op
