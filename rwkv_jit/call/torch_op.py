"""From a public call to a torch op and back: what runs the torch op, and autograd.

`define` builds one per op, of inputs with tokens, inputs without, a state, and one tail of options. A compiler sees the
torch op, which has a fake. What it keeps is what the caller requested; the algorithm is chosen when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, differentiable, plain, prepared, recording, registry, rule, sharding, tape, tensors
from rwkv_jit.call import switches as modes
from rwkv_jit.call.checks import check_flag, check_options, check_tensors, is_for_kernels
from rwkv_jit.call.differentiable import Differentiable, Named, Values
from rwkv_jit.call.options import DecayOptions, complete
from rwkv_jit.call.prepared import Gradients, Prepared
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.schedules import directions, segments
from rwkv_jit.schedules.problem import STATE, Op, Problem
from rwkv_jit.schedules.schedule import floats


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
    # Runs a checked call in parts, of what `call` takes but for all options and switches; None where it does not.
    in_parts: Callable[..., tuple[Tensor, Tensor | None] | None] | None = None


# ---- the public call ---------------------------------------------------------------------------------------------


def call(
    torch_op: TorchOp, arrays: Sequence[Any], initial_state: Any, output_final_state: bool, cu_seqlens: Any,
    options: tuple[tuple[str, Any], ...], traits: tuple[tuple[str, Any], ...] = (),
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run an op: at once where the call is known, else after all checks; `traits` are all switches."""
    op = torch_op.op
    if output_final_state is not True and output_final_state is not False:
        output_final_state = check_flag("output_final_state", output_final_state)
    switches = modes.current()
    asked = (op.name, output_final_state, options, traits, switches, torch.is_grad_enabled())
    given = *arrays, initial_state, cu_seqlens
    known = prepared.latest(asked, given, op.lead, cu_seqlens) if tensors.is_eager() else None
    if known is None and hasattr(cu_seqlens, "run_part"):  # a shard: other processes have the tokens around these
        of_part: tuple[Tensor, Tensor | None] = cu_seqlens.run_part(
            torch_op, arrays, initial_state, output_final_state, options, traits
        )  # fmt: skip
        return of_part
    if known is None:
        known, training = prepared.find(asked, arrays, initial_state, cu_seqlens, op.lead)
    else:
        training = known.problem.training
    if known is None:
        whole = whole_options(torch_op, arrays, options, traits)
        if sharding.any_distributed((*arrays, initial_state, cu_seqlens)):
            return _distributed(torch_op, arrays, initial_state, output_final_state, cu_seqlens, options, traits)
        cast = under_autocast(op, arrays)
        if cast is not None:
            with tensors.exactly(cast[0]):
                return call(torch_op, cast, initial_state, output_final_state, cu_seqlens, options, traits)
        check_options(op, whole)
        layout, backend, decay_bound = whole["state_layout"], whole["backend"], whole["decay_bound"]
        arrays, initial_state, cu_seqlens = check_tensors(op, arrays, initial_state, cu_seqlens, layout, backend)
        if torch_op.in_parts is not None:
            given = arrays, initial_state, output_final_state, cu_seqlens, whole, training, traits
            result = torch_op.in_parts(torch_op, *given)
            if result is not None:
                return result
        to_run = asked_options(whole, arrays[0].dtype, switches)
        if is_for_kernels(backend, arrays[0]):
            is_direct = tensors.is_eager() and tensors.are_plain((*arrays, initial_state, cu_seqlens))
            is_real = is_direct or tape.is_recording()  # tensors with values, which a compiler's have not
            # A backend that was named is one for this device, but "split", which may be segments or large heads.
            if is_real or backend not in ("auto", "split"):
                problem = problem_of(
                    op, arrays, initial_state, cu_seqlens, to_run, output_final_state, training, decay_bound, traits,
                    is_real,
                )  # fmt: skip
                if is_direct:
                    known = _prepare(torch_op, problem, arrays, initial_state, cu_seqlens, asked, is_public=True)
                else:
                    to_run = options_of(resolved(problem, arrays, is_real))
    if initial_state is not None and initial_state.dim() == len(op.state):
        sequences = arrays[op.lead].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = initial_state.expand(sequences, *initial_state.shape)

    if known is None:
        given = (*arrays, initial_state, cu_seqlens, *to_run, output_final_state, False)
        y, final, _ = torch_op.forward(*given, decay_bound=decay_bound, **dict(traits))
        return y, final if output_final_state else None
    if training:
        return prepared.record(known, *arrays, initial_state, cu_seqlens)
    results = known.run((*arrays, initial_state, cu_seqlens))
    return results[0], results[1] if output_final_state else None


def whole_options(torch_op: TorchOp, arrays: Sequence[Any], options: Any, traits: Any) -> DecayOptions:
    """Return all options of a call, once its switches are checked."""
    checks.check_switches(torch_op.op, arrays, dict(traits))
    whole = complete(torch_op.op, dict(options), arrays[0])
    if whole["decay_bound"] is None and (bound := dict(traits).get("lower_bound")) is not None:
        whole["decay_bound"] = bound
    return whole


def _distributed(
    torch_op: TorchOp, arrays: Sequence[Any], initial_state: Any, output_final_state: bool, cu_seqlens: Any,
    options: Any, traits: Any,
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
        return call(torch_op, inputs, state, output_final_state, bounds, options, traits)

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


def resolved(p: Problem, arrays: Sequence[Tensor], is_direct: bool = False, is_fake: bool = False) -> Problem:
    """Return the problem of a checked call on CUDA tensors, with the algorithm that will run.

    Only calls that are `is_direct` look at the lengths of packed sequences. A fake does not tell chunked from segments.
    """
    sees_load = not is_fake and (is_direct or not p.is_packed)
    return rule.resolved(p, lambda: rule.known(arrays[0].device.index), sees_load)


def asked_options(whole: DecayOptions, dtype: torch.dtype, switches: modes.Modes) -> Options:
    """Return the options of a call as the caller has it; the dtype is that of its rows."""
    narrow, is_batch_invariant = switches
    fields: Any = {name: value for name, value in whole.items() if name != "decay_bound"}
    fields |= {"scale": float(whole["scale"]), "is_narrow": tensors.STORAGE.get(dtype) in narrow}
    return Options(**fields, is_batch_invariant=is_batch_invariant, is_chosen=False)


def options_of(p: Problem) -> Options:
    """Return the options with which the torch op runs a problem."""
    fields = {name: getattr(p, name) for name in Options._fields}
    return Options(**{**fields, "chunk_len": p.chunk_len or None})


def sizes_of(op: Op, arrays: Sequence[Any]) -> dict[str, Any]:
    """Return the sizes of the dimensions by their letters."""
    sizes: dict[str, Any] = dict(op.sizes)
    for dims, x in zip(op.inputs.values(), arrays, strict=True):
        if x is not None:
            sizes.update(zip(dims, x.shape, strict=True))
    return sizes


def traits_of(op: Op, named: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the switches of a call in the order of the op's; torch passes only those that are not as by default."""
    return tuple([(trait, named.get(trait, default)) for trait, default in op.traits.items()])


def problem_of(
    op: Op, arrays: Sequence[Any], state: Tensor | None, cu_seqlens: Tensor | None, options: Options,
    output_final_state: bool, training: bool, decay_bound: float | None = None,
    traits: tuple[tuple[str, Any], ...] = (), is_direct: bool = False,
) -> Problem:  # fmt: skip
    """Return the problem of a call on CUDA tensors; of one that `is_direct` the longest sequence is known."""
    sizes, device = sizes_of(op, arrays), arrays[0].device.index
    return Problem(
        op, tensors.gpu(device),
        {name: _storage(x) for name, x in zip(op.names, arrays, strict=True) if x is not None},
        N=sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        state_type="fp32" if state is None else _storage(state), is_packed=cu_seqlens is not None, training=training,
        has_initial_state=state is not None, has_final_state=output_final_state, decay_bound=decay_bound,
        longest=tensors.longest(cu_seqlens, sizes["T"]) if is_direct else 0, traits=traits,
        **{**options._asdict(), "chunk_len": options.chunk_len or 0}, **sizes,
    )  # fmt: skip


def _storage(x: Tensor) -> str:
    return tensors.STORAGE.get(x.dtype, "fp64")


def left_open(p: Problem, before: Problem) -> Problem:
    """Return a problem that was chosen for one `before`, with what it keeps as its fake has said, which knew less."""
    is_open = p.training and not before.is_chosen and segments.may_cut(before.backend, directions.running(p))
    return p._replace(leaves_cut_open=True) if is_open else p


def _prepare(
    torch_op: TorchOp, problem: Problem, arrays: Sequence[Tensor], initial_state: Tensor | None,
    cu_seqlens: Tensor | None, asked: tuple[Any, ...], is_public: bool = False,
) -> Prepared:  # fmt: skip
    """Return the call of checked tensors; `asked` is what tells its problem apart."""
    op, training = torch_op.op, problem.training

    def prepare() -> Prepared:
        p = resolved(problem, arrays, is_direct=True)
        p = p if is_public else left_open(p, problem)
        if cu_seqlens is not None:
            tensors.packing(cu_seqlens, p.T)  # before anything is compiled
        if is_public and training:
            wants = [x is not None and x.requires_grad for x in (*arrays, initial_state)]
            p = p._replace(wanted=prepared.wanted(op, wants, (*arrays, initial_state)))
        named = {"chunk_len": problem.chunk_len or None, "num_threads": problem.num_threads}
        geometry = {name: value for name, value in named.items() if value is not None}
        state = initial_state
        if state is not None and state.dim() == len(op.state):
            state = state.expand(p.N, *state.shape)
        return prepared.of_problem(p, (*arrays, state, cu_seqlens), geometry, torch_op.by_op)

    return prepared.find_or_keep(asked, training, arrays, initial_state, cu_seqlens, prepare, op.lead, is_public)


# ---- the torch op ------------------------------------------------------------------------------------------------


def define(op: Op, in_parts: Callable[..., tuple[Tensor, Tensor | None] | None] | None = None) -> TorchOp:
    """Say who runs `rwkv_jit::<name>_fwd` and `<name>_bwd`, which `registry` knows, and return the op."""
    name, count = op.name, len(op.inputs)
    leaves = recording.Leaves((*op.names, STATE))
    end = count + 2 + len(Options._fields)  # of the options, behind state and cu_seqlens

    def parts(arguments: Sequence[Any]) -> tuple[Any, Any, Options]:
        """Return the inputs; the state and cu_seqlens; the options."""
        return arguments[:count], arguments[count : count + 2], Options(*arguments[count + 2 : end])

    def run_plainly(
        arrays: Sequence[Any], options: Options, named: Mapping[str, Any], by_blocks: bool
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given, (state, cu_seqlens) = arrays[:count], arrays[count : count + 2]
        if cu_seqlens is not None:
            cu_seqlens = tensors.packing(cu_seqlens, given[0].shape[1])
        rest = options.scale, options.decay, options.state_layout, by_blocks
        return plain.call(op, given, dict(traits_of(op, named)), state, cu_seqlens, *rest)

    def forward(*arguments: Any, decay_bound: float | None = None, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, (state, cu_seqlens), options = parts(arguments)
        traits = traits_of(op, named)
        output_final_state, save = arguments[end:]
        if is_for_kernels(options.backend, given[0]):
            # The public call has checked these options, so what is known of it is no public call's.
            asked = f"{name}_fwd", output_final_state, save, decay_bound, options, traits
            known = prepared.latest(asked, arguments[: count + 2], op.lead, cu_seqlens)
            if known is None:
                problem = problem_of(
                    op, given, state, cu_seqlens, options, output_final_state, save, decay_bound, traits, True
                )  # fmt: skip
                known = _prepare(torch_op, problem, given, state, cu_seqlens, asked)
            results = known.run(arguments[: count + 2])
            y = results[0]
            final = results[1] if output_final_state else y.new_empty(0)
            return y, final, _unmarked(known.problem, results[-1]) if save else y.new_empty(0)
        say_reference(name, given[0])
        y, final = run_plainly(arguments, options, named, by_blocks=True)
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
            p = training_problem(arguments, options, {**named, "decay_bound": decay_bound}, is_fake=True)
            # Symbolic while a compiler traces.
            saved = first.new_empty(floats(directions.kept(p)), dtype=torch.float32)
        return y, final, saved

    def training_problem(
        arrays: Sequence[Any], options: Options, named: Mapping[str, Any], is_fake: bool = False
    ) -> Problem:  # fmt: skip
        given, (state, cu_seqlens), bound = arrays[:count], arrays[count : count + 2], named.get("decay_bound")
        p = problem_of(op, given, state, cu_seqlens, options, False, True, bound, traits_of(op, named), not is_fake)
        return left_open(resolved(p, given, not is_fake, is_fake), p)

    def told(arrays: Sequence[Any], options: Sequence[Any]) -> tuple[str | None, Tensor | None]:
        """Return the algorithm that the forward ran, if it says so; else the bounds by whose lengths it is chosen."""
        cu_seqlens, saved, is_chosen = arrays[count + 1], arrays[count + 2], Options(*options).is_chosen
        ran = None if cu_seqlens is None or is_chosen else _marked(saved)
        return ran, cu_seqlens if ran is None and not is_chosen else None

    def gradients(arrays: Values, options: Values, named: Named, names: Sequence[str]) -> Gradients | None:
        asked, saved = Options(*options), arrays[count + 2]
        if not is_for_kernels(asked.backend, arrays[0]):
            return None
        problem, ran = training_problem(arrays, asked, named), told(arrays, options)[0]
        if ran is not None and problem.leaves_cut_open:
            problem = problem._replace(backend=ran)
        if not asked.is_chosen:
            expected = floats(directions.kept(problem))
            if saved.numel() != expected:
                raise RwkvJitError(
                    f"{name}: the backward takes {expected} numbers of what the forward saved, got {saved.numel()}"
                )
        wants = [x in names for x in leaves.names]
        return prepared.gradients_of(problem._replace(wanted=prepared.wanted(op, wants, arrays[: count + 1])), by_op)

    def by_hand(arrays: Values, options: Values, named: Named, names: Sequence[str]) -> dict[str, Tensor]:
        def run(several: Sequence[Any]) -> Sequence[Tensor]:
            return run_plainly(several, Options(*options), named, by_blocks=True)

        return leaves.plainly(run, arrays[: count + 2], arrays[count + 3 :], names)

    def plainly(*arguments: Any, decay_bound: float | None = None, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        given, _, options = parts(arguments)
        if is_for_kernels(options.backend, given[0]):
            recording.refuse_forward_mode(name)
        y, final = run_plainly(arguments, options, named, by_blocks=False)
        return y, final if arguments[end] else y.new_empty(0), y.new_empty(0)

    def cast(*arguments: Any) -> Sequence[Any]:
        inputs = arguments[:count]
        return *(under_autocast(op, inputs) or inputs), *arguments[count:]

    def by_op(p: Problem, saved: Sequence[Any], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return differentiate(saved, grads, options_of(p), p.wanted, **dict(p.traits))

    differentiate = differentiable.define(
        Differentiable(
            name, leaves, count + 2, 2, forward, forward_fake, plainly, gradients, by_hand, cast, flags=2, lead=op.lead,
            bounds=count + 1, told=told, present=lambda arguments: (True, bool(arguments[end])),
        )
    )  # fmt: skip
    torch_op = TorchOp(op, registry.find(f"{name}_fwd"), by_op, in_parts)
    return torch_op


def say_reference(name: str, x: Tensor) -> None:
    """Say once that a call on CPU tensors runs no kernel."""
    if not x.is_cuda:
        stats.say_once(f"{name}: CPU tensors run the reference in plain torch", key="cpu")


def _unmarked(p: Problem, kept: Tensor) -> Tensor:
    """Return what a forward has kept, as large as its fake says; the memory behind it says what ran."""
    is_marked = p.leaves_cut_open and p.is_packed
    return kept[: -segments.MARKS[p.backend] // 4] if is_marked else kept


def _marked(kept: Tensor) -> str | None:
    """Return the algorithm that the forward ran, from the memory behind what it has kept; None if nothing says so."""
    if kept.storage_offset():
        return None
    behind = kept.untyped_storage().nbytes() - kept.nbytes
    return next((backend for backend, mark in segments.MARKS.items() if mark == behind), None)
