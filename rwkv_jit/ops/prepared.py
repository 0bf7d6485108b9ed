"""Prepared launches: what the first call of a signature works out, every later one finds.

An op is two templates per backend, `<stem>_<backend>_forward.cu` and `<stem>_<backend>_backward.cu`; its name is the
stem, or ops share templates. Their arguments are addresses in the order of `Forward.run` and `backward` below, then
strides, then what the backend adds. Everything that differs between backends is asked of its module, a `Backend`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, tensors
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops.interface import LARGEST_DECAY, Backend, Geometry, Inputs, Kernels, Launch, Options, Saved
from rwkv_jit.ops.layout import state_shape
from rwkv_jit.signatures import BySignature
from rwkv_jit.template import Parameter


@dataclass(frozen=True, slots=True)  # whose fields take a third of the time of a named tuple's
class Forward:
    """A forward of one kernel, and what it returns."""

    plan: Plan
    plan_of_copies: Plan  # where an input starts at an address the kernel cannot read
    copies: tuple[bool, ...]  # which inputs it cannot read in place; empty where it can read them all
    alignments: tuple[int, ...]  # what their addresses must be multiples of
    alignment: int  # the largest of these
    value: int  # which of them is v
    is_dense: bool  # whether a tensor like v is contiguous without being asked to
    state_dtype: torch.dtype
    state_shape: tuple[int, ...]
    saved: Saved
    options: Options
    takes_flags: bool
    takes_any_decay: bool
    nulls: tuple[int, ...]

    def run(
        self,
        inputs: Sequence[Tensor],
        state: Tensor | None,
        bounds: Tensor | None,
        output_final_state: bool,
        save: bool,
        into: Tensor | None = None,
        flags: Tensor | None = None,
        results: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Launch it, as `interface.Guardable` says.

        `results` are y, empty where it is not wanted, and the final state, where they are there already and only heads
        with `flags` are computed; bounds have been checked then.
        """
        plan = self.plan
        if self.copies:
            inputs = [x.contiguous() if copy else x for x, copy in zip(inputs, self.copies, strict=True)]
        values = [x.data_ptr() for x in inputs]
        if math.gcd(*values) % self.alignment and _is_unaligned(values, self.alignments):
            plan, inputs = self.plan_of_copies, [x.clone(memory_format=torch.contiguous_format) for x in inputs]
            values = [x.data_ptr() for x in inputs]
        v = inputs[self.value]
        if results is not None:
            y, final = results
        elif self.is_dense:
            y, final = torch.empty_like(v), None  # as it is: to ask takes time
        else:
            y, final = torch.empty_like(v, memory_format=torch.contiguous_format), None
        saved = None
        if state is not None:
            state = state.contiguous()
        if bounds is not None and results is None:
            bounds = tensors.packing(bounds, v.shape[1])
        if output_final_state and results is None:
            final = torch.empty(self.state_shape, dtype=self.state_dtype, device=v.device)
        if save:
            saved = torch.empty(self.saved.floats, dtype=torch.float32, device=v.device) if into is None else into
        values += (
            *self.nulls,
            0 if state is None else state.data_ptr(),
            0 if bounds is None else bounds.data_ptr(),
            y.data_ptr(),
            0 if final is None else final.data_ptr(),
            *self.saved.addresses(saved),
        )
        if self.takes_flags:
            values.append(0 if flags is None else flags.data_ptr())
        tensors.launch(plan, values)
        return y, final, saved


class Backward(NamedTuple):
    """A backward that can be launched with any tensors of its signature."""

    plan: Plan
    copies: tuple[bool, ...]
    saved: Saved
    scratch: int | None
    takes_flags: bool
    nulls: tuple[None, ...]


_backwards: BySignature[Backward] = BySignature()
_validated: BySignature[None] = BySignature()  # those whose tensors have been seen through DLPack


def _is_unaligned(addresses: Sequence[int], alignments: Sequence[int]) -> bool:
    return any(address % multiple for address, multiple in zip(addresses, alignments, strict=True))


def backward(
    backend: Backend,
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    options: Options,
    want_initial_state: bool,
    flags: Tensor | None = None,
    results: tuple[list[Tensor], list[Tensor], Tensor | None] | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Launch the backward. With `flags` only heads with them are computed, into `results` that are there already.

    Return the gradients of the streamed inputs, of the fixed ones per sequence (fp32), and of
    the initial state (fp32, None unless asked for).
    """
    inputs, dy = _aligned(backend, inputs), tensors.aligned(dy, backend.vector(dy))
    packed = cu_seqlens is not None
    if cu_seqlens is not None:
        cu_seqlens = tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    signature = tensors.signature((*inputs.streamed, *inputs.fixed, dy))
    key = (inputs.op, inputs.sequences, packed, options, signature)
    known = _backwards.get(key)
    if known is None:
        known = _backwards.keep(key, _prepare_backward(backend, inputs, dy, packed, options))
    readable = zip((*inputs.streamed, dy), known.copies, strict=True)
    *streamed, dy = [x.contiguous() if copy else x for x, copy in readable]
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(torch.float32).contiguous()
    if results is None:
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.streamed]
        fixed_grads = [
            torch.empty((inputs.sequences, *x.shape), dtype=torch.float32, device=x.device) for x in inputs.fixed
        ]
        grad_initial = None
        if want_initial_state:
            grad_initial = torch.empty(state_shape(inputs, options), dtype=torch.float32, device=dy.device)
    else:
        grads, fixed_grads, grad_initial = results
    values = [0 if x is None else x.data_ptr() for x in (*streamed, *inputs.fixed, *known.nulls, dy, cu_seqlens)]
    values += known.saved.addresses(saved)
    outputs = (grad_final_state, *grads, *fixed_grads, *known.nulls, grad_initial)
    values += [0 if x is None else x.data_ptr() for x in outputs]
    if known.takes_flags:
        values.append(0 if flags is None else flags.data_ptr())
    if known.scratch is not None:
        scratch = torch.empty(known.scratch, dtype=torch.float32, device=dy.device)
        values.append(scratch.data_ptr())
    tensors.launch(known.plan, values)
    return grads, fixed_grads, grad_initial


def _aligned(backend: Backend, inputs: Inputs) -> Inputs:
    """Return the inputs at addresses a kernel can read; before the signature is taken, as a copy has other strides."""
    streamed = tuple([tensors.aligned(x, backend.vector(x)) for x in inputs.streamed])
    fixed = tuple([tensors.aligned(x.contiguous(), backend.vector(x)) for x in inputs.fixed])
    return Inputs(inputs.op, inputs.names, streamed, fixed, inputs.sequences)


# ---- the first call of a signature -------------------------------------------------------------------------------


def get_kernels(
    nearest: Callable[[kernel.Request, str, int], int | None],
    requests: Sequence[kernel.Request],
    chunk_len: int | None,
    num_threads: int | None,
) -> list[kernel.Kernel]:
    """Compile or find kernels side by side.

    Raises
    ------
    UnsupportedConfigError
        With the template's rule and, for what the caller chose, the nearest legal value.
    """
    try:
        return kernel.get_all(requests)
    except UnsupportedConfigError as error:
        legal = {
            argument: nearest(requests[-1], argument, value)
            for argument, value in (("chunk_len", chunk_len), ("num_threads", num_threads))
            if value is not None
        }
        near = [f"{argument}={value}" for argument, value in legal.items() if value is not None]
        if not near:
            raise
        raise UnsupportedConfigError(f"{error}; nearest legal: {', '.join(near)}") from error


def check_capture(op: str, requests: Sequence[kernel.Request], device: int) -> None:
    """Check that a capture that may be going on has no need to compile or load.

    Raises
    ------
    RwkvJitError
        It would have to.
    """
    if tensors.capturing() and not all(kernel.is_loaded(request, device) for request in requests):
        raise RwkvJitError(
            f"{op}: first use inside a CUDA graph capture, where nothing can be compiled or loaded; "
            "call it once with these sizes, dtypes and options before the capture"
        )


def chosen(direction: str, geometry: Geometry | Options, guarded: bool = False) -> dict[str, Parameter]:
    """Return the parameters that override a rule: of blocks, where they were chosen, and that decays be looked at."""
    blocks = geometry.forward_blocks if direction == "forward" else geometry.backward_blocks
    found: dict[str, Parameter] = {} if blocks is None else {"BLOCKS_PER_SM": blocks}
    return found | {"LARGEST_DECAY": LARGEST_DECAY} if guarded and direction == "forward" else found


def validate(inputs: Inputs) -> None:
    """Check once per signature that kernels will see the tensors that torch sees."""
    signature = tensors.signature(inputs.streamed)
    if signature not in _validated:  # the backward sees what the forward saw
        for name, x in zip(inputs.names, inputs.streamed, strict=False):
            tensors.validate(name, x)
        _validated.keep(signature, None)


def types_of(inputs: Inputs, options: Options, state_dtype: torch.dtype) -> dict[str, Parameter]:
    """Return the types that a call's templates are made for."""
    types: dict[str, Parameter] = {
        "T_IO": tensors.STORAGE[inputs["r"].dtype],
        "T_STATE": tensors.STORAGE[state_dtype],
        "DECAY": options.decay,
        "STATE_LAYOUT": options.state_layout,
    }
    return types | {f"T_{n.upper()}": tensors.STORAGE[inputs[n].dtype] for n in ("w", "u") if n in inputs.names}


def request(
    backend: Kernels, inputs: Inputs, direction: str, options: Options, state_dtype: torch.dtype
) -> kernel.Request:
    """Return the kernel of a direction that a call takes."""
    first, value_size = inputs["r"], inputs["v"].shape[3]
    device = first.device.index
    # Measured on an H200: below one state of 64 x 64 per multiprocessor, more and smaller blocks are faster.
    states = inputs.sequences * first.shape[2] * first.shape[3] * value_size / 64**2
    few_heads = states < tensors.multiprocessors(device)
    return backend.specialize(
        inputs.op, direction, first.shape[3], value_size, types_of(inputs, options, state_dtype), tensors.arch(device),
        options.chunk_len, options.num_threads, few_heads, chosen(direction, options, bool(options.guarded)),
        tensors.also(device),
    )  # fmt: skip


def _find(
    backend: Backend, inputs: Inputs, directions: Sequence[str], options: Options, state_dtype: torch.dtype
) -> list[kernel.Kernel]:
    """Validate the tensors and return the kernels of `directions`."""
    requests = [request(backend, inputs, direction, options, state_dtype) for direction in directions]
    check_capture(inputs.op, requests, inputs["r"].device.index)
    validate(inputs)
    return get_kernels(backend.nearest, requests, options.chunk_len, options.num_threads)


def prepare_forward(
    backend: Backend, inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Find or compile the kernel and prepare its launch; with `training` the backward compiles beside it, not after."""
    kernel.check_not_forked()
    directions = ["forward", "backward"] if training else ["forward"]
    with torch.cuda.device(inputs["v"].device.index):
        found = _find(backend, inputs, directions, options, state_dtype)[0]
        launch, saved = backend.launch(found, "forward", inputs, options), backend.saved_for(inputs, packed, options)
        # Inputs; initial state, cu_seqlens, y, final state; what is saved.
        given, nulls = (*inputs.streamed, *inputs.fixed), (0,) * launch.nulls
        addresses = len(given) + len(nulls) + 4 + len(saved.addresses(None)) + launch.takes_flags
        vectors = [backend.vector(x) for x in given]
        needs_copy = [*map(tensors.needs_copy, inputs.streamed, vectors)]
        copies = (*needs_copy, *(not x.is_contiguous() for x in inputs.fixed))
        alignments = (*map(tensors.alignment, given, vectors),)
        return Forward(
            plan=_plan(found, launch, inputs, inputs.streamed, needs_copy, addresses),
            plan_of_copies=_plan(found, launch, inputs, inputs.streamed, [True] * len(needs_copy), addresses),
            copies=copies if any(copies) else (),
            alignments=alignments,
            alignment=max(alignments),
            value=inputs.names.index("v"),
            is_dense=inputs["v"].is_contiguous(),
            state_dtype=state_dtype,
            state_shape=state_shape(inputs, options),
            saved=saved,
            options=options,
            takes_flags=launch.takes_flags,
            takes_any_decay=launch.takes_any_decay,
            nulls=nulls,
        )


def _prepare_backward(backend: Backend, inputs: Inputs, dy: Tensor, packed: bool, options: Options) -> Backward:
    kernel.check_not_forked()
    with torch.cuda.device(dy.device.index):
        (found,) = _find(backend, inputs, ["backward"], options, torch.float32)
        launch, saved = backend.launch(found, "backward", inputs, options), backend.saved_for(inputs, packed, options)
        streamed = (*inputs.streamed, dy)
        copies = tuple([tensors.needs_copy(x, backend.vector(x)) for x in streamed])
        # Inputs and their gradients; dy, cu_seqlens, gradients of the final and initial state; what is saved; scratch.
        addresses = 2 * (len(inputs.streamed) + len(inputs.fixed) + launch.nulls) + 4 + len(saved.addresses(None))
        more = launch.takes_flags + (launch.scratch is not None)
        plan = _plan(found, launch, inputs, streamed, copies, addresses + more)
    return Backward(plan, copies, saved, launch.scratch, launch.takes_flags, (None,) * launch.nulls)


def _plan(
    found: kernel.Kernel, launch: Launch, inputs: Inputs, streamed: Sequence[Tensor], copies: Sequence[bool],
    addresses: int,
) -> Plan:  # fmt: skip
    strides = [_strides_of_copy(x) if copy else x.stride()[:3] for x, copy in zip(streamed, copies, strict=True)]
    strides[len(inputs.streamed) : len(inputs.streamed)] = launch.strides
    constants = [*[struct.pack("3q", *stride) for stride in strides], *launch.constants]
    block, device = (int(found.parameters["NUM_THREADS"]), 1, 1), inputs["v"].device.index
    return Plan(found, launch.entry, device, launch.grid, block, "Q" * addresses, constants, launch.shared_bytes)


def _strides_of_copy(x: Tensor) -> tuple[int, ...]:
    _, tokens, heads, size = x.shape
    return tokens * heads * size, heads * size, size
