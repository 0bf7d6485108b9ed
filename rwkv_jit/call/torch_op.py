"""From a public call to a torch op and back: what runs the torch op, and autograd.

`define` builds one per op, of inputs with tokens, inputs without, a state, and one tail of options. A compiler sees the
torch op, which has a fake. What it keeps is what the caller requested; the algorithm is chosen when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, plain, prepared, recording, registry, rule, sharding, tensors
from rwkv_jit.call import switches as modes
from rwkv_jit.call.checks import check_flag, check_options, check_tensors, is_for_kernels
from rwkv_jit.call.options import Tail, complete
from rwkv_jit.call.prepared import Known
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import directions, segments
from rwkv_jit.schedules.common import Case
from rwkv_jit.schedules.problem import STATE, Op, Problem
from rwkv_jit.schedules.schedule import floats

_NO_GPU = Gpu("")  # of kernels that leave the same whatever it is: the recurrent ones, and all without heads


class Options(NamedTuple):
    """What a call chooses beside its tensors, as the torch op takes it.

    The backend is the algorithm that will run if it `is_chosen`. Else all is as the caller has it, by options and by
    the switches of `modes`, and the device of the tensors decides when it runs.
    """

    scale: float
    decay: str
    state_layout: str
    checkpoint_interval: int
    chunk_len: int | None
    num_threads: int | None
    backend: str
    forward_blocks: int | None = None
    backward_blocks: int | None = None
    is_narrow: bool = False
    is_batch_invariant: bool = False
    is_chosen: bool = True


@dataclass(frozen=True)
class TorchOp:
    """An op as torch runs it."""

    op: Op
    forward: Any  # the torch op
    by_op: Callable[..., Sequence[Tensor | None]]  # the gradients of a prepared call by the torch op
    refuse: Callable[[Sequence[Any], Mapping[str, Any]], None]  # raises where inputs and switches do not fit
    behind: Callable[[Tensor, Sequence[Any]], Tensor] | None = None  # what stands behind the recurrence, in plain torch


# ---- the public call ---------------------------------------------------------------------------------------------


def call(
    torch_op: TorchOp,
    arrays: Sequence[Any],
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Any,
    options: tuple[tuple[str, Any], ...],
    in_parts: Callable[..., tuple[Tensor, Tensor | None] | None] | None = None,
    traits: tuple[tuple[str, Any], ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """Run an op with or without gradients: at once where the call is known, else after all checks.

    A call that is not known `in_parts` may run, from the same arguments; None where it does not. `traits` are all
    switches.
    """
    op = torch_op.op
    if output_final_state is not True and output_final_state is not False:
        output_final_state = check_flag("output_final_state", output_final_state)
    switches = modes.current()
    asked = (op.name, output_final_state, options, traits, switches, torch.is_grad_enabled())
    given = *arrays, initial_state, cu_seqlens
    known = prepared.latest(asked, given, op.lead, cu_seqlens) if tensors.is_eager() else None
    if known is None:
        known, training = prepared.find(asked, arrays, initial_state, cu_seqlens, op.lead)
    else:
        training = known.problem.training
    if known is None:
        torch_op.refuse(arrays, dict(traits))
        tail = complete(op, dict(options), arrays[0])
        if tail.decay_bound is None and (bound := dict(traits).get("lower_bound")) is not None:
            tail = tail._replace(decay_bound=bound)
        more = options, in_parts, traits
        if sharding.any_distributed((*arrays, initial_state, cu_seqlens)):
            return _distributed(torch_op, arrays, initial_state, output_final_state, cu_seqlens, more)
        cast = under_autocast(op, arrays)
        if cast is not None:
            with tensors.exactly(cast[0]):
                return call(torch_op, cast, initial_state, output_final_state, cu_seqlens, *more)
        if in_parts is not None:
            result = in_parts(torch_op, arrays, initial_state, output_final_state, cu_seqlens, tail, traits)
            if result is not None:
                return result
        check_options(op, *tail)
        checked = check_tensors(op, arrays, initial_state, cu_seqlens, tail.state_layout, tail.backend)
        arrays, initial_state, cu_seqlens = checked
        decay_bound, to_run = tail.decay_bound, asked_options(tail, arrays[0].dtype, switches)
        if is_for_kernels(tail.backend, arrays[0]):
            is_direct = tensors.is_eager() and tensors.are_plain((*arrays, initial_state, cu_seqlens))
            # A backend that was named is one for this device, but "split", which may be segments or large heads.
            if is_direct or tail.backend not in ("auto", "split"):
                to_run = chosen(op, arrays, cu_seqlens, decay_bound, to_run, training, is_direct, traits=traits)
            if is_direct:
                known = _prepare(
                    torch_op, arrays, initial_state, cu_seqlens, asked, to_run, output_final_state, training, tail,
                    is_public=True, traits=traits,
                )  # fmt: skip
    if initial_state is not None and initial_state.dim() == len(op.state):
        sequences = arrays[op.lead].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = initial_state.expand(sequences, *initial_state.shape)

    if known is None:
        given = (*arrays, initial_state, cu_seqlens, *to_run, output_final_state, False)
        y, final, _ = torch_op.forward(*given, decay_bound=decay_bound, **dict(traits))
        return y, final if output_final_state else None
    if training:
        return prepared.record(known, *arrays, initial_state, cu_seqlens)
    results = known.run(arrays, initial_state, cu_seqlens)
    return results[0], results[1] if output_final_state else None


def _distributed(
    torch_op: TorchOp, arrays: Sequence[Any], initial_state: Any, output_final_state: bool, cu_seqlens: Any,
    more: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    op = torch_op.op

    def role_dims(dims: str) -> dict[str, int]:
        roles = sharding.roles(dims)
        return roles if cu_seqlens is None else {role: dim for role, dim in roles.items() if role != "batch"}

    states = role_dims("B" + op.state)
    given = {
        public: (x, role_dims(dims))
        for public, dims, x in zip(op.public_names, op.inputs.values(), arrays, strict=True)
    }
    is_one_for_all = initial_state is not None and initial_state.dim() == len(op.state)
    given["initial_state"] = initial_state, role_dims(op.state) if is_one_for_all else states
    given["cu_seqlens"] = cu_seqlens, {}

    def run(*local: Any) -> tuple[Tensor, Tensor | None]:
        *inputs, state, bounds = local
        return call(torch_op, inputs, state, output_final_state, bounds, *more)

    lead = op.lead
    if "G" in op.inputs[op.names[lead]]:  # y has as many heads as the first input that has not those of keys
        lead = next(place for place, dims in enumerate(op.inputs.values()) if "H" in dims)
    y, final = sharding.run(run, given, op.public_names[lead], (role_dims(op.output), states))
    return y, final


def under_autocast(op: Op, arrays: Sequence[Any]) -> list[Tensor] | None:
    """Return the inputs as torch casts them under autocast, or None; decays and u may stay float32."""
    dtype = tensors.autocast_dtype(tensors.from_any(op.public_names[0], arrays[0]))
    if dtype is None:
        return None
    given = zip(op.names, checks.as_tensors(op, arrays), strict=True)
    cast: list[Any] = [None if x is None else tensors.under_autocast(x, dtype, name in op.wide) for name, x in given]
    return cast


# ---- the problem of a call ---------------------------------------------------------------------------------------


def chosen(
    op: Op,
    arrays: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    decay_bound: float | None,
    options: Options,
    training: bool,
    is_direct: bool = False,
    is_fake: bool = False,
    traits: tuple[tuple[str, Any], ...] = (),
) -> Options:
    """Return the options of a checked call, with the algorithm that will run.

    Only calls that are `is_direct` look at the lengths of packed sequences. A fake does not tell chunked from segments.
    """
    if options.is_chosen:
        return options
    if not is_for_kernels(options.backend, arrays[0]):
        return options._replace(backend="reference", is_chosen=True)
    if not op.has_heads:  # its schedules choose, by the GPU
        return options._replace(is_chosen=True)
    if arrays[0].dtype == torch.float16:  # as autocast can make them of others
        options = options._replace(is_narrow=False)
    device = arrays[0].device.index
    case = case_of(op, arrays, cu_seqlens, options, decay_bound, training, is_direct, is_fake, traits)
    backend = "auto" if is_fake and options.backend == "split" else options.backend
    made = rule.chosen(backend, case, lambda: tensors.gpu(device), lambda: rule.known(device))
    return options._replace(**made._asdict(), is_chosen=True)


def case_of(
    op: Op, arrays: Sequence[Any], cu_seqlens: Tensor | None, options: Options, decay_bound: float | None,
    training: bool, is_direct: bool, is_fake: bool = False, traits: tuple[tuple[str, Any], ...] = (),
) -> Case:  # fmt: skip
    """Return what the rule looks at, of a call on CUDA tensors that have been checked."""
    sizes = sizes_of(op, arrays)
    batch, tokens = sizes["B"], sizes["T"]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    device = arrays[0].device.index
    storage = "fp16" if options.is_narrow else tensors.STORAGE.get(arrays[0].dtype, "fp64")
    case = Case(
        op, storage, sizes.get("K", 1), sizes.get("V", 1),
        tokens if cu_seqlens is None else tokens // sequences, options.decay, decay_bound, options.chunk_len,
        options.num_threads, training, sequences * sizes["H"], cu_seqlens is not None,
        None if is_fake or (cu_seqlens is not None and not is_direct) else lambda: tensors.multiprocessors(device),
        tensors.longest(cu_seqlens, tokens) if is_direct else 0, sizes["H"],
        sizes["H"] // sizes["G"] if sizes.get("G") else 1, options.is_narrow,
        tuple(name for name, x in zip(op.names, arrays, strict=True) if x is not None), traits,
    )  # fmt: skip
    return case.of_any_batch() if options.is_batch_invariant else case


def asked_options(tail: Tail, dtype: torch.dtype, switches: modes.Modes) -> Options:
    """Return the options of a call as the caller has it; the dtype is that of its rows."""
    narrow, is_batch_invariant = switches
    return Options(
        float(tail.scale), tail.decay, tail.state_layout, tail.checkpoint_interval, tail.chunk_len, tail.num_threads,
        tail.backend, is_narrow=tensors.STORAGE.get(dtype) in narrow, is_batch_invariant=is_batch_invariant,
        is_chosen=False,
    )  # fmt: skip


def sizes_of(op: Op, arrays: Sequence[Any]) -> dict[str, Any]:
    """Return the sizes of the dimensions by their letters."""
    sizes: dict[str, Any] = dict(op.sizes)
    for dims, x in zip(op.inputs.values(), arrays, strict=True):
        if x is not None:
            sizes.update(zip(dims, x.shape, strict=True))
    return sizes


def problem_of(
    op: Op, arrays: Sequence[Any], state: Tensor | None, cu_seqlens: Tensor | None, options: Options,
    output_final_state: bool, training: bool, gpu: Gpu, traits: tuple[tuple[str, Any], ...] = (),
) -> Problem:  # fmt: skip
    """Return the problem of a call whose algorithm is chosen."""
    sizes, given = sizes_of(op, arrays), options._asdict()
    del given["is_chosen"]
    return Problem(
        op, gpu,
        {name: tensors.STORAGE[x.dtype] for name, x in zip(op.names, arrays, strict=True) if x is not None},
        N=sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        state_type="fp32" if state is None else tensors.STORAGE[state.dtype],
        is_packed=cu_seqlens is not None,
        training=training,
        has_initial_state=state is not None,
        has_final_state=output_final_state,
        traits=traits,
        **{**given, "chunk_len": options.chunk_len or 0},
        **sizes,
    )  # fmt: skip


def left_open(p: Problem, asked: Options) -> Problem:
    """Return the problem of a call, or one that keeps as much as its fake has said where that did not know all."""
    is_open = p.training and not asked.is_chosen and segments.may_cut(asked.backend, directions.running(p))
    return p._replace(leaves_cut_open=True) if is_open else p


def _prepare(
    torch_op: TorchOp,
    arrays: Sequence[Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    asked: tuple[Any, ...],
    options: Options,
    output_final_state: bool,
    training: bool,
    asked_geometry: Tail | Options,
    decay_bound: float | None = None,
    is_public: bool = False,
    traits: tuple[tuple[str, Any], ...] = (),
) -> Known:
    """Return the call of checked tensors; `asked` and the caller's `asked_geometry` tell it apart beside `options`."""
    op = torch_op.op

    def prepare() -> Known:
        to_run = chosen(op, arrays, cu_seqlens, decay_bound, options, training, traits=traits)
        gpu = tensors.gpu(arrays[0].device.index)
        problem = problem_of(op, arrays, initial_state, cu_seqlens, to_run, output_final_state, training, gpu, traits)
        problem = left_open(problem, options)
        if cu_seqlens is not None:
            tensors.packing(cu_seqlens, problem.T)  # before anything is compiled
        if is_public and training:
            wants = [x is not None and x.requires_grad for x in (*arrays, initial_state)]
            problem = problem._replace(wanted=prepared.wanted(op, wants, (*arrays, initial_state)))
        geometry = {name: getattr(asked_geometry, name) for name in ("chunk_len", "num_threads")}
        geometry = {name: value for name, value in geometry.items() if value is not None}
        state = initial_state
        if state is not None and state.dim() == len(op.state):
            state = state.expand(problem.N, *state.shape)
        return Known(problem, (*arrays, state, cu_seqlens), geometry, torch_op.by_op)

    return prepared.find_or_keep(asked, training, arrays, initial_state, cu_seqlens, prepare, op.lead, is_public)


# ---- the torch op ------------------------------------------------------------------------------------------------


def define(
    op: Op,
    reference: Callable[..., Any],
    operands: Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Tensor]] | None = None,
    behind: Callable[[Tensor, Sequence[Any]], Tensor] | None = None,
    refuse: Callable[[Sequence[Any], Mapping[str, Any]], None] = lambda arrays, traits: None,
) -> TorchOp:
    """Say who runs `rwkv_jit::<name>_fwd` and `<name>_bwd`, which `registry` knows, and return the op.

    `reference` is the op in plain torch, or the op below it; it takes the inputs, the initial state, whether the final
    one is needed, cu_seqlens and the scale, and by name state_layout and decay. `operands` returns its inputs from
    those of a call and the switches; `behind` returns y of its y and of the inputs. `refuse` raises an error where
    switches do not fit the inputs that are there.
    """
    name, count = op.name, len(op.inputs)
    below = op.through or op
    all_names = (*op.names, STATE)  # of what has a gradient
    end = count + 2 + len(Options._fields)  # of the options, behind state and cu_seqlens
    forward_op, backward_op = registry.find(f"{name}_fwd"), registry.find(f"{name}_bwd")

    def parts(arguments: Sequence[Any]) -> tuple[Any, Any, Options]:
        """Return the inputs; the state and cu_seqlens; the options."""
        return arguments[:count], arguments[count : count + 2], Options(*arguments[count + 2 : end])

    def traits_of(named: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Return the switches of a call, of which torch passes those that are not as by default."""
        return tuple([(trait, named.get(trait, default)) for trait, default in op.traits.items()])

    def run_plainly(arguments: Sequence[Any], named: Mapping[str, Any], by_blocks: bool) -> tuple[Tensor, Tensor]:
        """Compute a call in plain torch: `by_blocks` differentiable once backwards, else any number of times."""
        given, (state, cu_seqlens), options = parts(arguments)
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, given[0].shape[1])
        decay = options.decay
        if operands is not None:
            decay = "log"
            with tensors.exactly(given[0]):
                given = operands(given, dict(traits_of(named)))
        rest = state, cu_seqlens, options.scale, decay, options.state_layout
        if by_blocks and below.family in plain.FAMILIES:
            y, final = plain.run(below.name, reference, given, *rest)
        else:
            y, final = plain.loop(reference, given, *rest)
        return y if behind is None else behind(y, arguments[:count]), final

    def forward(*arguments: Any, decay_bound: float | None = None, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        traits = traits_of(named)
        output_final_state, save = arguments[end:]
        if is_for_kernels(options.backend, given[0]):
            # The public call has checked these options, so what is known of it is no public call's.
            asked = f"{name}_fwd", output_final_state, save, decay_bound, options, traits
            known = prepared.latest(asked, arguments[: count + 2], op.lead, cu_seqlens)
            if known is None:
                known = _prepare(
                    torch_op, given, state, cu_seqlens, asked, options, output_final_state, save, options, decay_bound,
                    traits=traits,
                )  # fmt: skip
            results = known.run(given, state, cu_seqlens)
            y = results[0]
            final = results[1] if output_final_state else y.new_empty(0)
            return y, final, results[-1] if save else y.new_empty(0)
        say_reference(name, given[0])
        y, final = run_plainly(arguments, named, by_blocks=True)
        return y, final if output_final_state else y.new_empty(0), y.new_empty(0)

    def forward_fake(*arguments: Any, decay_bound: float | None = None, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        output_final_state, save = arguments[end:]
        first, sizes = given[op.lead], sizes_of(op, given)
        y = first.new_empty([sizes[dim] for dim in op.output])
        final, saved = first.new_empty(0), first.new_empty(0)
        if output_final_state:
            sequences = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            dtype = state.dtype if state is not None else torch.promote_types(first.dtype, torch.float32)
            dims = op.state_dims(options.state_layout)
            final = first.new_empty([sequences, *(sizes[dim] for dim in dims)], dtype=dtype)
        if save and is_for_kernels(options.backend, first):
            kept = directions.kept(
                training_problem(given, state, cu_seqlens, options, decay_bound, named, is_fake=True)
            )
            saved = first.new_empty(floats(kept), dtype=torch.float32)  # symbolic while a compiler traces
        return y, final, saved

    def training_problem(
        given: Sequence[Any], state: Tensor | None, cu_seqlens: Tensor | None, options: Options,
        decay_bound: float | None, named: Mapping[str, Any], is_fake: bool = False,
    ) -> Problem:  # fmt: skip
        traits = traits_of(named)
        to_run = chosen(op, given, cu_seqlens, decay_bound, options, training=True, is_fake=is_fake, traits=traits)
        leaves_the_same = to_run.backend == "recurrent" or not op.has_heads
        gpu = _NO_GPU if leaves_the_same else tensors.gpu(given[0].device.index)
        return left_open(problem_of(op, given, state, cu_seqlens, to_run, False, True, gpu, traits), options)

    def are_wanted(arguments: Sequence[Any], wanted: str) -> list[bool]:
        """Return whether a gradient is computed of each input and of the initial state; no names stand for all."""
        asked = wanted.split() or all_names
        there = (x is not None for x in arguments[: count + 1])
        return [is_there and name in asked for name, is_there in zip(all_names, there, strict=True)]

    def with_empty(grads: Iterable[Tensor], wants: Sequence[bool], like: Tensor) -> tuple[Tensor, ...]:
        """Return gradients as the op does: an empty one where there is none."""
        several = iter(grads)
        return tuple([next(several) if is_wanted else like.new_empty(0) for is_wanted in wants])

    def backward(
        dy: Tensor | None, grad_final: Tensor | None, *arguments: Any, decay_bound: float | None = None,
        wanted: str = "", **named: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        given, (state, cu_seqlens), options = parts(arguments)
        if not is_for_kernels(options.backend, given[0]):
            return backward_plainly(dy, grad_final, arguments, named, are_wanted(arguments, wanted))
        saved = arguments[-1]
        key = f"{name}_bwd", options, decay_bound, wanted, tuple(named.items())
        arrays = *given, state, cu_seqlens, saved, dy, grad_final
        found = prepared.latest(key, arrays, op.lead)
        if found is None:
            wants = are_wanted(arguments, wanted)
            problem = training_problem(given, state, cu_seqlens, options, decay_bound, named)
            problem = problem._replace(gpu=tensors.gpu(given[0].device.index))
            if not options.is_chosen:
                expected = floats(directions.kept(problem))
                if saved.numel() != expected:
                    raise RwkvJitError(
                        f"{name}: the backward takes {expected} numbers of what the forward saved, got {saved.numel()}"
                    )
            problem = problem._replace(wanted=prepared.wanted(op, wants, (*given, state)))
            found = prepared.Backward(problem, arrays), wants
            prepared.keep_latest(key, arrays, found, op.lead)
        prepared_backward, wants = found
        return with_empty(prepared_backward.run(arrays), wants, given[0])

    def backward_plainly(
        dy: Tensor | None, grad_final: Tensor | None, arguments: Sequence[Any], named: Mapping[str, Any],
        wants: Sequence[bool],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with recording.plain_torch(), tensors.exactly(arguments[0]):
            leaves = [
                None if x is None else x.detach().requires_grad_(is_wanted)
                for x, is_wanted in zip(arguments[: count + 1], wants, strict=True)
            ]
            outputs = run_plainly((*leaves, *arguments[count + 1 :]), named, by_blocks=True)
            asked = [x for x in leaves if x is not None and x.requires_grad]
            return with_empty(recording.gradients(outputs, (dy, grad_final), asked), wants, arguments[0])

    def backward_fake(
        dy: Tensor | None, grad_final: Tensor | None, *arguments: Any, decay_bound: float | None = None,
        wanted: str = "", **named: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        wants = are_wanted(arguments, wanted)
        made = [x for x, is_wanted in zip(arguments[: count + 1], wants, strict=True) if is_wanted]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in made]
        return with_empty(grads, wants, arguments[0])

    def setup(ctx: Any, arguments: Sequence[Any], named: dict[str, Any], results: tuple[Tensor, ...]) -> None:
        _, final, saved = results
        ctx.save_for_backward(*arguments[: count + 2], saved)
        ctx.options, ctx.named = arguments[count + 2 : end], named
        ctx.has_final_state = bool(arguments[end])
        ctx.mark_non_differentiable(*([saved] if ctx.has_final_state else [final, saved]))

    def differentiate(
        saved: Sequence[Tensor], options: Sequence[Any], wanted: tuple[str, ...], dy: Tensor | None,
        grad_final: Tensor | None, **named: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return the gradients of the inputs and the initial state, by the torch op; None where nobody wants one."""
        *given, kept = saved
        names = " ".join(wanted)
        grads = run_backward(dy, grad_final, *given, *options, kept, wanted=names, **named)
        return tuple([x if want else None for x, want in zip(grads, are_wanted(given, names), strict=True)])

    def in_context(ctx: Any, dy: Tensor | None, grad_final: Tensor | None, _: Any) -> tuple[Any, ...]:
        # A compiled graph passes zeros for a result that has no gradient, here for the empty final state.
        grad_final = grad_final if ctx.has_final_state else None
        saved = ctx.saved_tensors
        wants = ctx.needs_input_grad[2 : count + 3]  # of a Function with two inputs of its own before these
        wanted = prepared.wanted(op, wants, saved[: count + 1])
        grads = differentiate(saved, ctx.options, wanted, dy, grad_final, **ctx.named)
        return (*grads, None, *[None] * (len(ctx.options) + 2))

    def plainly(*arguments: Any, decay_bound: float | None = None, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, _, options = parts(arguments)
        if is_for_kernels(options.backend, given[0]):
            recording.refuse_forward_mode(name)
        y, final = run_plainly(arguments, named, by_blocks=False)
        return y, final if arguments[end] else y.new_empty(0), y.new_empty(0)

    def cast(*arguments: Any) -> Sequence[Any]:
        inputs = arguments[:count]
        return *(under_autocast(op, inputs) or inputs), *arguments[count:]

    def differentiate_known(
        problem: Problem, saved: Sequence[Tensor], dy: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, and of the initial state where there is one, by the torch op."""
        *given, kept = saved
        saved = (*given, given[0].new_empty(0) if kept is None else kept)
        grads = differentiate(saved, _options_of(problem), problem.wanted, dy, grad_final, **dict(problem.traits))
        return grads[: count + problem.has_initial_state]

    record = recording.forward(forward_op, setup, in_context, plainly)
    record_backward, run_backward = recording.backward(backward_op, name)
    registry.implement(f"{name}_fwd", forward, forward_fake, record, cast)
    registry.implement(f"{name}_bwd", backward, backward_fake, record_backward)
    torch_op = TorchOp(op, forward_op, differentiate_known, refuse, behind)
    return torch_op


def say_reference(name: str, x: Tensor) -> None:
    """Say once that a call on CPU tensors runs no kernel."""
    if not x.is_cuda:
        stats.say_once(f"{name}: CPU tensors run the reference in plain torch", key="cpu")


def _options_of(p: Problem) -> Options:
    fields = {name: getattr(p, name) for name in Options._fields if name != "is_chosen"}
    return Options(**fields)._replace(chunk_len=p.chunk_len or None)
