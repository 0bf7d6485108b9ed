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

from rwkv_jit import cuda, kernel, tensors
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
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


class _Prepared(NamedTuple):
    """A signature's launch, and what to do before it."""

    plan: kernel.Plan
    copies: tuple[bool, ...]  # which streamed inputs the kernel cannot read in place
    scratch: int  # floats


_prepared: dict[Any, _Prepared] = {}
_validated: set[Any] = set()  # signatures whose tensors have been seen through DLPack


def checkpoint_slots(batch: Any, tokens: Any, sequences: Any, packed: bool, interval: int) -> Any:
    """Return how many states per head the forward saves; packed sequences fit whatever their lengths are."""
    return tokens // interval + sequences if packed else batch * ((tokens + interval - 1) // interval)


def saves_sa(op: str) -> bool:
    """Return whether the forward saves sa_t = S_{t-1} a_t [B, T, H, V], a sum the backward would have to repeat."""
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
) -> kernel.Request:
    """Return the template and parameters of one direction; `chosen` overrides the geometry."""
    parameters = geometry(op, direction, head_size, value_size, chunk_len, num_threads, few_heads)
    parameters.update({"HEAD_SIZE": head_size, "VALUE_SIZE": value_size, **types, **(chosen or {})})
    if direction == "backward":
        parameters.pop("T_STATE", None)  # states come as fp32 there
    return f"{op}_recurrent_{direction}", parameters, arch


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
        name, parameters, _ = requests[-1]
        op, _, direction = name.split("_")
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
    inputs: Inputs,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    output_final_state: bool,
    save_checkpoints: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward; return y, the final state, and what the backward needs: checkpoints and, for wkv7, sa.

    Whatever is not asked for is empty.
    """
    inputs = _aligned(inputs)
    v = inputs["v"]
    batch, tokens, heads, value_size = v.shape
    head_size = inputs["r"].shape[3]
    state_dtype = torch.float32 if initial_state is None else initial_state.dtype
    packed = cu_seqlens is not None
    if cu_seqlens is not None:
        cu_seqlens = tensors.packing(cu_seqlens, tokens)
    key = ("forward", inputs.op, inputs.sequences, packed, state_dtype, options, _signature(inputs))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _remember(key, _prepare_forward(inputs, state_dtype, options, save_checkpoints))
    streamed = _readable(inputs.streamed, prepared.copies)
    initial_state = None if initial_state is None else initial_state.contiguous()
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    sizes = (value_size, head_size) if options.state_layout == "vk" else (head_size, value_size)
    final = checkpoints = sa = None
    if output_final_state:
        final = torch.empty((inputs.sequences, heads, *sizes), dtype=state_dtype, device=v.device)
    if save_checkpoints:
        slots = checkpoint_slots(batch, tokens, inputs.sequences, packed, options.checkpoint_interval)
        checkpoints = torch.empty((slots, heads, value_size, head_size), dtype=torch.float32, device=v.device)
        sa = torch.empty(v.shape, dtype=torch.float32, device=v.device) if saves_sa(inputs.op) else None
    saved = [checkpoints, sa] if saves_sa(inputs.op) else [checkpoints]
    _launch(prepared, v, [*streamed, *inputs.fixed, initial_state, cu_seqlens, y, final, *saved])
    final, checkpoints, sa = (y.new_empty(0) if x is None else x for x in (final, checkpoints, sa))
    return y, final, checkpoints, sa


def backward(
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    sa: Tensor,
    options: Options,
    want_initial_state: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Launch the backward.

    Return the gradients of the streamed inputs, of the fixed ones per sequence (fp32), and of
    the initial state (fp32, empty unless asked for).
    """
    inputs, dy = _aligned(inputs), tensors.aligned(dy)
    v = inputs["v"]
    tokens, heads, value_size = v.shape[1:]
    head_size = inputs["r"].shape[3]
    packed = cu_seqlens is not None
    if cu_seqlens is not None:
        cu_seqlens = tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    key = ("backward", inputs.op, inputs.sequences, packed, dy.stride(), options, _signature(inputs))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _remember(key, _prepare_backward(inputs, dy, options))
    *streamed, dy = _readable((*inputs.streamed, dy), prepared.copies)
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
    scratch = torch.empty(prepared.scratch, dtype=torch.float32, device=v.device)
    saved = [checkpoints, sa] if saves_sa(inputs.op) else [checkpoints]
    given = [*streamed, *inputs.fixed, dy, cu_seqlens, *saved, grad_final_state]
    _launch(prepared, v, [*given, *grads, *fixed_grads, grad_initial, scratch])
    return grads, fixed_grads, scratch.new_empty(0) if grad_initial is None else grad_initial


def _remember(key: Any, prepared: _Prepared) -> _Prepared:
    """Keep a signature's launch; a server that meets every length there is must not grow without end."""
    if len(_prepared) >= 4096:
        _prepared.clear()
        _validated.clear()
    _prepared[key] = prepared
    return prepared


def _signature(inputs: Inputs) -> tuple[Any, ...]:
    streamed = [(x.shape, x.stride(), x.dtype) for x in inputs.streamed]
    return (inputs.streamed[0].device.index, *streamed, *[x.dtype for x in inputs.fixed])


def _aligned(inputs: Inputs) -> Inputs:
    """Return the inputs at addresses a kernel can read; before the signature is taken, as a copy has other strides."""
    streamed = tuple(map(tensors.aligned, inputs.streamed))
    fixed = tuple(x.contiguous() for x in inputs.fixed)
    return Inputs(inputs.op, inputs.names, streamed, fixed, inputs.sequences)


def _readable(streamed: Sequence[Tensor], copies: Sequence[bool]) -> list[Tensor]:
    """Return what the kernel reads: copies of what it cannot read in place."""
    return [x.contiguous() if copy else x for x, copy in zip(streamed, copies, strict=True)]


def _launch(prepared: _Prepared, on: Tensor, arguments: Sequence[Tensor | None]) -> None:
    device = on.device.index
    addresses = [0 if x is None else x.data_ptr() for x in arguments]
    if torch.cuda.current_device() == device:
        prepared.plan.launch(tensors.stream(device), addresses)
    else:
        with torch.cuda.device(device):
            prepared.plan.launch(tensors.stream(device), addresses)


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
    if tensors.capturing():
        raise RwkvJitError(
            f"{inputs.op}: first use inside a CUDA graph capture, where nothing can be compiled or loaded; "
            "call it once with these shapes before the capture"
        )
    signature = _signature(inputs)
    if signature not in _validated:  # the backward sees what the forward saw
        for name, x in zip(inputs.names, inputs.streamed, strict=True):
            tensors.validate(name, x)
        _validated.add(signature)
    first, value_size = inputs["r"], inputs["v"].shape[3]
    device = first.device.index
    # Measured on an H200: below one state of 64 x 64 per multiprocessor, more and smaller blocks are faster.
    states = inputs.sequences * first.shape[2] * first.shape[3] * value_size / 64**2
    few_heads = states < tensors.multiprocessors(device)
    chunk_len, num_threads = options.chunk_len, options.num_threads
    types = _types(inputs, options, state_dtype)
    arch = tensors.arch(device)
    requests = [
        specialize(inputs.op, direction, first.shape[3], value_size, types, arch, chunk_len, num_threads, few_heads)
        for direction in directions
    ]
    return get_kernels(requests, chunk_len, num_threads)


def _prepare_forward(inputs: Inputs, state_dtype: torch.dtype, options: Options, training: bool) -> _Prepared:
    device, (tokens, heads, value_size) = inputs["v"].device.index, inputs["v"].shape[1:]
    with torch.cuda.device(device):
        # Training needs both directions: the backward compiles beside the forward, not after it.
        found = _find(inputs, ["forward", "backward"] if training else ["forward"], options, state_dtype)[0]
        copies = tuple(map(tensors.needs_copy, inputs.streamed))
        grid = (inputs.sequences * heads, math.ceil(value_size / block_rows(found.parameters)))
        constants = _constants(inputs.streamed, copies, [tokens, heads], options)
        pointers = len(inputs.streamed) + len(inputs.fixed) + 5 + saves_sa(inputs.op)
        threads = int(found.parameters["NUM_THREADS"])
        plan = kernel.Plan(found, f"{inputs.op}_forward", device, grid, threads, pointers, constants)
    return _Prepared(plan, copies, 0)


def _prepare_backward(inputs: Inputs, dy: Tensor, options: Options) -> _Prepared:
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
        pointers = 2 * (len(inputs.streamed) + len(inputs.fixed)) + 6 + saves_sa(inputs.op)
        plan = kernel.Plan(found, entry, device, (blocks, 1), threads, pointers, constants)
    return _Prepared(plan, copies, blocks * scratch)


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
    strides = [x.contiguous().stride() if copy else x.stride() for x, copy in zip(streamed, copies, strict=True)]
    return [
        *[struct.pack("3q", *stride[:3]) for stride in strides],
        *[struct.pack("q", size) for size in sizes],
        struct.pack("i", _interval(options, sizes[0])),
        struct.pack("f", options.scale),
    ]
