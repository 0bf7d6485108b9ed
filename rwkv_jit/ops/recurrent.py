"""The recurrent backend: fp32 kernels that walk over the tokens with the state in registers, on every GPU.

An op is two templates, `<op>_recurrent_forward.cu` and `<op>_recurrent_backward.cu`. Their arguments are addresses
in the order of `forward` and `backward` below, then strides, sizes, checkpoint interval and scale.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import cuda, kernel, template, tensors
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops.geometry import block_rows, geometry, nearest
from rwkv_jit.template import Parameter


class Options(NamedTuple):
    """What a call chooses beside its tensors."""

    scale: float
    decay: str
    state_layout: str
    checkpoint_interval: int
    chunk_len: int | None
    num_threads: int | None


@dataclass(slots=True)
class Inputs:
    """The tensors of a call, in the order of the kernels' arguments."""

    op: str
    names: tuple[str, ...]
    streamed: tuple[Tensor, ...]  # [B, T, H, K], and v [B, T, H, V]
    fixed: tuple[Tensor, ...]  # the same for every token
    sequences: int

    def __getitem__(self, name: str) -> Tensor:
        return self.streamed[self.names.index(name)]


class Saved(NamedTuple):
    """What the forward keeps for the backward, in one tensor of floats: states at checkpoints and, for wkv7, sa."""

    floats: Any  # in all; symbolic while a compiler traces
    sa: Any  # where sa begins; -1 where there is none

    def addresses(self, saved: Tensor | None) -> list[int]:
        """Return the kernel's arguments."""
        first = 0 if saved is None else saved.data_ptr()
        return [first] if self.sa < 0 else [first, first and first + 4 * self.sa]


class Forward(NamedTuple):
    """A forward that can be launched with any tensors of its signature, and what it returns."""

    plan: Plan
    plan_of_copies: Plan  # where an input starts at an address the kernel cannot read
    copies: tuple[bool, ...]  # which inputs it cannot read in place; empty where it can read them all
    alignments: tuple[int, ...]  # what their addresses must be multiples of
    alignment: int  # the largest of these
    value: int  # which of them is v
    state_dtype: torch.dtype
    state_shape: tuple[int, ...]
    saved: Saved
    options: Options


class _Backward(NamedTuple):
    """A backward that can be launched with any tensors of its signature."""

    plan: Plan
    copies: tuple[bool, ...]
    saved: Saved
    scratch: int  # floats


MOST_SIGNATURES = 4096  # a server that meets every length there is must not grow without end
_backwards: dict[Any, _Backward] = {}
_validated: set[Any] = set()  # signatures whose tensors have been seen through DLPack


def saved_for(inputs: Inputs, packed: bool, interval: int) -> Saved:
    """Return what the forward saves: a state per head and interval, and for wkv7 sa_t = S_{t-1} a_t [B, T, H, V].

    Packed sequences fit whatever their lengths are. The backward would have to repeat the sums of sa.
    """
    batch, tokens, heads, value_size = inputs["v"].shape
    states = tokens // interval + inputs.sequences if packed else batch * ((tokens + interval - 1) // interval)
    checkpoints = states * heads * value_size * inputs["r"].shape[3]
    if not _saves_sa(inputs.op):
        return Saved(checkpoints, -1)
    return Saved(checkpoints + batch * tokens * heads * value_size, checkpoints)


def _saves_sa(op: str) -> bool:
    return op == "wkv7"


def specialize(
    op: str,
    direction: str,
    head_size: int,
    value_size: int,
    types: Mapping[str, Parameter],
    arch: str,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    few_heads: bool = False,
    chosen: Mapping[str, Parameter] | None = None,
    also: tuple[str, ...] = (),
) -> kernel.Request:
    """Return the template and parameters of one direction; `chosen` overrides the geometry."""
    parameters = geometry(op, direction, head_size, value_size, chunk_len, num_threads, few_heads)
    parameters.update({"HEAD_SIZE": head_size, "VALUE_SIZE": value_size, **types, **(chosen or {})})
    if direction == "backward":
        parameters.pop("T_STATE", None)  # states come as fp32 there
    return kernel.Request(template.library(f"{op}_recurrent_{direction}"), parameters, arch, also)


def get_kernels(
    requests: Sequence[kernel.Request], chunk_len: int | None, num_threads: int | None
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
        parameters = requests[-1].parameters
        op, _, direction = requests[-1].template.name.split("_")
        default = geometry(op, direction, int(parameters["HEAD_SIZE"]), int(parameters["VALUE_SIZE"]))
        near = [
            f"{argument}={nearest(argument, value, int(default[argument.upper()]))}"
            for argument, value in (("chunk_len", chunk_len), ("num_threads", num_threads))
            if value is not None
        ]
        if not near:
            raise
        raise UnsupportedConfigError(f"{error}; nearest legal: {', '.join(near)}") from error


def forward(
    known: Forward,
    inputs: Sequence[Tensor],
    state: Tensor | None,
    bounds: Tensor | None,
    output_final_state: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch a prepared forward on tensors of its signature; `bounds` are those of packed sequences.

    Return y, the final state, and what the backward needs; None for what is not wanted.
    """
    plan = known.plan
    if known.copies:
        inputs = [x.contiguous() if copy else x for x, copy in zip(inputs, known.copies, strict=True)]
    values = [x.data_ptr() for x in inputs]
    if math.gcd(*values) % known.alignment and _is_unaligned(values, known.alignments):
        plan, inputs = known.plan_of_copies, [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        values = [x.data_ptr() for x in inputs]
    v = inputs[known.value]
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    final = saved = None
    if state is not None:
        state = state.contiguous()
    if bounds is not None:
        bounds = tensors.packing(bounds, v.shape[1])
    if output_final_state:
        final = torch.empty(known.state_shape, dtype=known.state_dtype, device=v.device)
    if save:
        saved = torch.empty(known.saved.floats, dtype=torch.float32, device=v.device)
    values += (
        0 if state is None else state.data_ptr(),
        0 if bounds is None else bounds.data_ptr(),
        y.data_ptr(),
        0 if final is None else final.data_ptr(),
        *known.saved.addresses(saved),
    )
    tensors.launch(plan, values)
    return y, final, saved


def _is_unaligned(addresses: Sequence[int], alignments: Sequence[int]) -> bool:
    return any(address % multiple for address, multiple in zip(addresses, alignments, strict=True))


def backward(
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    options: Options,
    want_initial_state: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Launch the backward.

    Return the gradients of the streamed inputs, of the fixed ones per sequence (fp32), and of
    the initial state (fp32, empty unless asked for).
    """
    inputs, dy = _aligned(inputs), tensors.aligned(dy)
    v = inputs["v"]
    heads, value_size = v.shape[2:]
    head_size = inputs["r"].shape[3]
    packed = cu_seqlens is not None
    if cu_seqlens is not None:
        cu_seqlens = tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    signature = tensors.signature((*inputs.streamed, *inputs.fixed, dy))
    key = (inputs.op, inputs.sequences, packed, options, signature)
    known = _backwards.get(key)
    if known is None:
        if len(_backwards) >= MOST_SIGNATURES:
            _backwards.clear()
        known = _backwards[key] = _prepare_backward(inputs, dy, packed, options)
    readable = zip((*inputs.streamed, dy), known.copies, strict=True)
    *streamed, dy = [x.contiguous() if copy else x for x, copy in readable]
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(torch.float32).contiguous()
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.streamed]
    fixed_grads = [
        torch.empty((inputs.sequences, *x.shape), dtype=torch.float32, device=x.device) for x in inputs.fixed
    ]
    sizes = (value_size, head_size) if options.state_layout == "vk" else (head_size, value_size)
    grad_initial = None
    if want_initial_state:
        grad_initial = torch.empty((inputs.sequences, heads, *sizes), dtype=torch.float32, device=v.device)
    scratch = torch.empty(known.scratch, dtype=torch.float32, device=v.device)
    values = [0 if x is None else x.data_ptr() for x in (*streamed, *inputs.fixed, dy, cu_seqlens)]
    values += known.saved.addresses(saved)
    results = (grad_final_state, *grads, *fixed_grads, grad_initial, scratch)
    tensors.launch(known.plan, values + [0 if x is None else x.data_ptr() for x in results])
    return grads, fixed_grads, scratch.new_empty(0) if grad_initial is None else grad_initial


def _aligned(inputs: Inputs) -> Inputs:
    """Return the inputs at addresses a kernel can read; before the signature is taken, as a copy has other strides."""
    streamed = tuple(map(tensors.aligned, inputs.streamed))
    fixed = tuple(x.contiguous() for x in inputs.fixed)
    return Inputs(inputs.op, inputs.names, streamed, fixed, inputs.sequences)


# ---- the first call of a signature -------------------------------------------------------------------------------


def _types(inputs: Inputs, options: Options, state_dtype: torch.dtype) -> dict[str, Parameter]:
    types: dict[str, Parameter] = {
        "T_IO": tensors.STORAGE[inputs["r"].dtype],
        "T_W": tensors.STORAGE[inputs["w"].dtype],
        "T_STATE": tensors.STORAGE[state_dtype],
        "DECAY": options.decay,
        "STATE_LAYOUT": options.state_layout,
    }
    return types | ({"T_U": tensors.STORAGE[inputs.fixed[0].dtype]} if inputs.fixed else {})


def _find(inputs: Inputs, directions: Sequence[str], options: Options, state_dtype: torch.dtype) -> list[kernel.Kernel]:
    """Validate the tensors and return the kernels of `directions`."""
    first, value_size = inputs["r"], inputs["v"].shape[3]
    device = first.device.index
    # Measured on an H200: below one state of 64 x 64 per multiprocessor, more and smaller blocks are faster.
    states = inputs.sequences * first.shape[2] * first.shape[3] * value_size / 64**2
    few_heads = states < tensors.multiprocessors(device)
    types, arch, also = _types(inputs, options, state_dtype), tensors.arch(device), tensors.also(device)
    requests = [
        specialize(
            inputs.op, direction, first.shape[3], value_size, types, arch, options.chunk_len, options.num_threads,
            few_heads, also=also,
        )
        for direction in directions
    ]  # fmt: skip
    if tensors.capturing() and not all(kernel.is_loaded(request, device) for request in requests):
        raise RwkvJitError(
            f"{inputs.op}: first use inside a CUDA graph capture, where nothing can be compiled or loaded; "
            "call it once with these head sizes, dtypes and options before the capture"
        )
    signature = tensors.signature(inputs.streamed)
    if signature not in _validated:  # the backward sees what the forward saw
        for name, x in zip(inputs.names, inputs.streamed, strict=True):
            tensors.validate(name, x)
        if len(_validated) >= MOST_SIGNATURES:
            _validated.clear()
        _validated.add(signature)
    return get_kernels(requests, options.chunk_len, options.num_threads)


def prepare_forward(
    inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
) -> Forward:
    """Find or compile the kernel and prepare its launch; with `training` the backward compiles beside it, not after."""
    kernel.check_not_forked()
    v = inputs["v"]
    device, (tokens, heads, value_size), head_size = v.device.index, v.shape[1:], inputs["r"].shape[3]
    given = (*inputs.streamed, *inputs.fixed)
    with torch.cuda.device(device):
        found = _find(inputs, ["forward", "backward"] if training else ["forward"], options, state_dtype)[0]
        grid = (inputs.sequences * heads, math.ceil(value_size / block_rows(found.parameters)), 1)
        block = (int(found.parameters["NUM_THREADS"]), 1, 1)
        addresses = "Q" * (len(given) + 5 + _saves_sa(inputs.op))

        def plan(copies: Sequence[bool]) -> Plan:
            constants = _constants(inputs.streamed, copies, [tokens, heads], options)
            return Plan(found, f"{inputs.op}_forward", device, grid, block, addresses, constants)

        needs_copy = [tensors.needs_copy(x) for x in inputs.streamed]
        copies = (*needs_copy, *(not x.is_contiguous() for x in inputs.fixed))
        sizes = (value_size, head_size) if options.state_layout == "vk" else (head_size, value_size)
        alignments = (*map(tensors.alignment, inputs.streamed), *(1 for _ in inputs.fixed))
        return Forward(
            plan=plan(needs_copy),
            plan_of_copies=plan([True] * len(needs_copy)),
            copies=copies if any(copies) else (),
            alignments=alignments,
            alignment=max(alignments),
            value=inputs.names.index("v"),
            state_dtype=state_dtype,
            state_shape=(inputs.sequences, heads, *sizes),
            saved=saved_for(inputs, packed, options.checkpoint_interval),
            options=options,
        )


def _prepare_backward(inputs: Inputs, dy: Tensor, packed: bool, options: Options) -> _Backward:
    kernel.check_not_forked()
    device, (tokens, heads, _) = inputs["v"].device.index, inputs["v"].shape[1:]
    entry = f"{inputs.op}_backward"
    with torch.cuda.device(device):
        (found,) = _find(inputs, ["backward"], options, torch.float32)
        streamed = (*inputs.streamed, dy)
        copies = tuple(map(tensors.needs_copy, streamed))
        threads = int(found.parameters["NUM_THREADS"])
        # A resident block owns a piece of scratch, so there are no more blocks than fit on the device at once.
        per_multiprocessor = cuda.driver().occupancyMaxActiveBlocksPerMultiprocessor(
            found.function(device, entry), threads, 0
        )
        blocks = min(inputs.sequences * heads, per_multiprocessor * tensors.multiprocessors(device))
        scratch = _scratch_per_block(inputs, found.parameters, _interval(options, tokens))
        sizes = [tokens, heads, inputs.sequences, scratch]
        constants = _constants(streamed, copies, sizes, options)
        addresses = "Q" * (2 * (len(inputs.streamed) + len(inputs.fixed)) + 6 + _saves_sa(inputs.op))
        plan = Plan(found, entry, device, (blocks, 1, 1), (threads, 1, 1), addresses, constants)
    return _Backward(plan, copies, saved_for(inputs, packed, options.checkpoint_interval), blocks * scratch)


def _scratch_per_block(inputs: Inputs, parameters: Mapping[str, Parameter], interval: int) -> int:
    """Floats for E of every row block, the states at piece starts and the running sums over row blocks."""
    chunk_len, lanes = int(parameters["CHUNK_LEN"]), int(parameters["LANES_PER_ROW"])
    rows = block_rows(parameters)
    padded_head = 4 * lanes * math.ceil(inputs["r"].shape[3] / (4 * lanes))
    chunks = math.ceil(interval / chunk_len)
    pieces = chunks * (chunk_len // int(parameters["HELD_STATES"]))
    row_blocks = math.ceil(inputs["v"].shape[3] / rows)
    sums = len(inputs.streamed) - 1 if row_blocks > 1 else 0
    return (row_blocks + pieces) * rows * padded_head + chunks * chunk_len * sums * padded_head


def _interval(options: Options, tokens: int) -> int:
    """No interval is longer than the sequence: scratch is sized by it."""
    return min(options.checkpoint_interval, max(tokens, 1))


def _constants(
    streamed: Sequence[Tensor], copies: Sequence[bool], sizes: Sequence[int], options: Options
) -> list[bytes]:
    strides = [_strides_of_copy(x) if copy else x.stride()[:3] for x, copy in zip(streamed, copies, strict=True)]
    return [
        *[struct.pack("3q", *stride) for stride in strides],
        *[struct.pack("q", size) for size in sizes],
        struct.pack("i", _interval(options, sizes[0])),
        struct.pack("f", options.scale),
    ]


def _strides_of_copy(x: Tensor) -> tuple[int, ...]:
    _, tokens, heads, size = x.shape
    return tokens * heads * size, heads * size, size


def forget() -> None:
    """Drop all prepared launches."""
    _backwards.clear()
    _validated.clear()
