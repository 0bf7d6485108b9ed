"""The torch side of a launch: arrays in, argument checks, DLPack on first sight, raw addresses and streams after."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rwkv_jit.kernels import compiler, dlpack, env
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.launch import Launches

# Elements between tokens that offsets of 32 bits within a chunk of 64 allow.
MOST_TOKEN_STRIDE = 2**26 - 1
_MOST_SHAPES = 1024  # of packings to remember
STORAGE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class SupportsDLPack(Protocol):
    """An array of another library that shows its memory through DLPack: of CuPy, NumPy, JAX and others."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule of its memory."""


Array = Tensor | SupportsDLPack  # what calls take for tensors


def from_any(name: str, array: Any, in_place: bool = False) -> Tensor:
    """Return a tensor over `array`: itself, or a view through DLPack of CuPy, NumPy, JAX and other arrays.

    Arrays that torch cannot view are copied, if they need not be `in_place`: read-only ones, and those that run
    backwards or are not aligned. Raise TypeError for no array, or none that torch can take, and ValueError for one that
    is to be changed in place and cannot be.
    """
    if isinstance(array, Tensor):
        return _dense(name, array, in_place)
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name}: expected a torch.Tensor or an array with __dlpack__, got {type(array).__name__}")
    try:
        obstacle = _obstacle_to_view(array)
        if obstacle is None:
            return torch.from_dlpack(array)  # type: ignore[attr-defined]
        if not in_place:
            return torch.from_dlpack(array.copy())  # type: ignore[attr-defined]
    except Exception as error:  # whatever a library raises where it exports its memory
        what = getattr(array, "dtype", "")
        raise TypeError(
            f"{name}: expected an array of numbers that torch can take through DLPack, got {type(array).__name__} "
            f"{what}: {error}"
        ) from error
    raise ValueError(f"{name}: is changed in place; expected an array that torch can view, got one that {obstacle}")


def _obstacle_to_view(array: Any) -> str | None:
    """Return why torch cannot view an array, as the end of a sentence; strides below zero would end the process."""
    flags, strides = getattr(array, "flags", None), getattr(array, "strides", None)
    if getattr(flags, "writeable", True) is False:
        return "is read-only"  # DLPack has no such arrays
    if isinstance(strides, tuple):
        if min(strides, default=0) < 0:
            return f"runs backwards, with strides {strides}"
        if any(step % array.itemsize for step in strides) or getattr(flags, "aligned", True) is False:
            return f"is not aligned, with strides {strides}"
    return None


def _dense(name: str, x: Tensor, in_place: bool) -> Tensor:
    if x.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested one; "
            "pass its values().unsqueeze(0), and its offsets() as cu_seqlens"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {x.layout}")
    if in_place and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{name}: is changed in place; expected separate memory for every element, got strides {x.stride()} "
            f"with shape {list(x.shape)}"
        )
    return x


class _Packing(NamedTuple):
    tensor: Callable[[], Tensor | None]
    version: int  # as torch counts changes; -1 where it does not
    tokens: int
    longest: int

    def is_of(self, cu_seqlens: Any, tokens: int) -> bool:
        """Return whether it is what was found of this packing, which has not changed since."""
        is_same = cu_seqlens is not None and self.tensor() is cu_seqlens and self.tokens == tokens
        return is_same and self.version == (-1 if cu_seqlens.is_inference() else cu_seqlens._version)


_checked_packings: dict[int, _Packing] = {}
_longest_of_shape: dict[tuple[int, int], int] = {}  # by sequences and tokens, of the last one


def packing(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return cu_seqlens as the kernels read it; ValueError unless it starts at 0, ends at `tokens` and never falls.

    On a GPU values are checked once per tensor, as that takes a copy to the host, and again where torch has counted a
    change. What it cannot count, as through `.data` or another library, is read all the same, and kernels clamp bounds.
    """
    if cu_seqlens.is_cuda:
        _checked(cu_seqlens, tokens)
    else:
        _longest(cu_seqlens, tokens)
    return readable_packing(cu_seqlens)


def tokens_behind(cu_seqlens: Tensor | None, lead: Tensor) -> int:
    """Return how many tokens lie behind the last sequence, as far as the values may be looked at: else 0."""
    if type(cu_seqlens) is not Tensor or cu_seqlens.dim() != 1 or not len(cu_seqlens) or not is_eager():
        return 0
    known = _checked_packings.get(id(cu_seqlens))
    known = known if known is not None and known.is_of(cu_seqlens, known.tokens) else None
    if known is None and cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return 0
    end = int(cu_seqlens[-1]) if known is None else known.tokens
    return lead.shape[1] - end if lead.dim() > 1 and 0 <= end <= lead.shape[1] else 0


def longest(cu_seqlens: Tensor | None, tokens: int) -> int:
    """Return about the tokens of the longest sequence of a call: the first 3 bits of the number.

    0 without a packing on a GPU that can be read, -1 if its values are wrong; in a capture that of the last call.
    """
    found = _checked_packings.get(id(cu_seqlens))
    if found is not None and found.is_of(cu_seqlens, tokens):
        return found.longest
    if type(cu_seqlens) is not Tensor or not cu_seqlens.is_cuda or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        return 0
    if cu_seqlens.is_floating_point():
        return 0
    try:
        known = _checked(cu_seqlens, tokens)
    except ValueError:  # which the checks of the call will raise
        return -1
    if known is None:
        return _longest_of_shape.get((len(cu_seqlens), tokens), 0)
    return known.longest


def _checked(cu_seqlens: Tensor, tokens: int) -> _Packing | None:
    """Return what is known of a packing on a GPU, after a look if need be; None in a capture, where there is none."""
    index = id(cu_seqlens)
    known = _checked_packings.get(index)
    if known is not None and known.is_of(cu_seqlens, tokens):
        return known
    if torch.cuda.is_current_stream_capturing():
        return None
    with torch._C._DisableTorchDispatch():  # what notes a layer is not to see a check
        most = _longest(cu_seqlens.cpu(), tokens)
    spare = max(most.bit_length() - 3, 0)
    most = most >> spare << spare
    gone = weakref.ref(cu_seqlens, lambda _: _checked_packings.pop(index, None))
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _checked_packings[index] = _Packing(gone, version, tokens, most)
    if len(_longest_of_shape) >= _MOST_SHAPES:
        _longest_of_shape.clear()
    _longest_of_shape[len(cu_seqlens), tokens] = most
    return known


def _longest(values: Tensor, tokens: int) -> int:
    """Check the bounds of packed sequences, and return the tokens of the longest one."""
    bounds = values.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    if bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens: expected values rising from 0 to {tokens} (the tokens), got {bounds[:20]}")
    return max(lengths, default=0)


def readable_packing(cu_seqlens: Tensor) -> Tensor:
    """Return cu_seqlens as neighbouring int64: itself where it is, else a copy of what it holds now."""
    if cu_seqlens.is_inference():  # whose changes torch does not count: the next call has to look again
        _checked_packings.pop(id(cu_seqlens), None)
    if cu_seqlens.dtype == torch.int64 and cu_seqlens.is_contiguous():
        return cu_seqlens
    return cu_seqlens.to(torch.int64).contiguous()


# ---- known calls -------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)  # what nobody else looks at
# Every call asks these: found once.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transforms = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled
is_batched = torch._C._functorch.is_legacy_batchedtensor  # by `torch.autograd.grad(is_grads_batched=True)`


def is_eager() -> bool:
    """Return whether an op may be run without torch's dispatcher: no compiler, mode, transform or trace looks on."""
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_transforms() is not None
        or _trace() is not None
        or forward_ad._current_level >= 0
    )


def has_dual_level() -> bool:
    """Return whether tensors may have tangents, for derivatives in forward mode."""
    return forward_ad._current_level >= 0


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast casts tensors of the device of `x` to; None where it is off."""
    if not (_any_autocast() or torch.compiler.is_compiling()):
        return None
    kind = x.device.type
    try:
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    except RuntimeError:  # a device that has no autocast, like meta
        return None


def casting(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Do what follows on the device of `x` under autocast to a dtype, None for without; each cast is new."""
    return torch.autocast(x.device.type, dtype, dtype is not None, cache_enabled=False)


def exactly(x: Tensor) -> torch.autocast:
    """Do what follows on the device of `x` without autocast, in the dtypes that are there."""
    return torch.autocast(x.device.type, enabled=False)


def under_autocast(x: Tensor, dtype: torch.dtype, keep: bool = False) -> Tensor:
    """Return `x` as torch's ops take it under autocast: floating, but float64, in its dtype; or `keep` float32."""
    if not x.is_floating_point() or x.dtype == torch.float64 or (keep and x.dtype == torch.float32):
        return x
    return x.to(dtype)


def are_plain(arrays: Iterable[Any]) -> bool:
    """Return whether these are tensors of torch or None, and no subclass that sees every op."""
    # A tuple, as the compiler of torch 2.6 does not know sets.
    return all(x is None or type(x) in _PLAIN for x in arrays)


def signature(arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return all that decides whether and how a call can be done, but the addresses; None for other arrays."""
    try:
        return tuple([
            None if x is None else (type(x), x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device())
            for x in arrays
        ])  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):  # torch's own without strides raise the last
        return None


# What torch's compiler checks the inputs of its graphs with; a torch without it finds no call alike.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_Guards = getattr(_guards, "TensorGuards", None)


def likeness(arrays: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a check whether others have the same signature and the same gradients; cheaper than `signature`.

    It says no more often: where strides differ that mean nothing, and where two of the others are one tensor.
    """
    if _Guards is None:
        return lambda *_: False
    check: Callable[..., bool] = _Guards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


class Memory(NamedTuple):
    """Shape, strides and type of a new tensor without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def memory(shape: Sequence[int], dtype: torch.dtype) -> Memory:
    """Return the `Memory` of a tensor of this shape."""
    strides = (math.prod(n or 1 for n in shape[index + 1 :]) for index in range(len(shape)))
    return Memory(tuple(shape), tuple(strides), dtype)


# What code of torch's compiler makes tensors with: it takes half the time of torch's own.
new: Callable[..., Tensor] = getattr(
    _guards, "_empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)  # fmt: skip


def apart(out: Any, others: Iterable[Any]) -> Any:
    """Return memory for results that a caller wants in `out`: new memory where one of the others has some of that."""
    if type(out) is Tensor and not torch.compiler.is_compiling():
        with contextlib.suppress(RuntimeError):  # of tensors without memory
            begin = out.data_ptr()
            end, storage = begin + out.nbytes, out.untyped_storage().data_ptr()
            for x in others:
                if not isinstance(x, Tensor) or x.data_ptr() >= end or x.untyped_storage().data_ptr() != storage:
                    continue
                reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
                if x.numel() and begin < x.data_ptr() + x.element_size() * (reach + 1):
                    return torch.empty_like(out)
    return out


# ---- devices and addresses ---------------------------------------------------------------------------------------


@cache
def _capability(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def arch(device: int) -> str:
    """Return the architecture to compile for on a device."""
    return env.arch() or _capability(device)


# What torch.compiler.assume_constant_result does, without the compiler that it imports: a trace takes the answer.
arch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def also(device: int) -> tuple[str, ...]:
    """Return architectures whose stored kernels serve a device too: those for its kind alone, like sm_90a."""
    return () if env.arch() else (f"{_capability(device)}a",)


def gpu(device: int) -> Gpu:
    """Return what kernels for a device are chosen and compiled for."""
    return Gpu(*_gpu(device))


def _gpu(device: int) -> tuple[str, tuple[str, ...], int | None]:
    if torch.cuda.is_available():
        return arch(device), also(device), multiprocessors(device)
    return env.arch() or "", (), None


# A plain tuple: a trace cannot compare its symbols with properties of a constant.
_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]


def targets(given: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the architecture to compile for, of the current device by default, and those that will do."""
    chosen = given if given is not None else env.arch()
    if chosen is not None:
        return compiler.check_arch(chosen), ()
    if not torch.cuda.is_available():
        raise ValueError("arch: there is no GPU; pass an architecture, e.g. arch='sm_90'")
    device = torch.cuda.current_device()
    return arch(device), also(device)


@cache
def multiprocessors(device: int) -> int:
    """Return the number of streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(kernel: Launches, values: Sequence[Any]) -> None:
    """Launch a kernel on torch's current stream of its device, whichever device is current."""
    device = kernel.device
    stream = torch._C._cuda_getCurrentRawStream(device)
    if torch._C._cuda_getDevice() == device:
        kernel.launch(stream, values)
    else:
        with torch.cuda.device(device):
            kernel.launch(stream, values)


def capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return bool(torch.cuda.is_current_stream_capturing())


def needs_copy(x: Tensor, vector: int) -> bool:
    """Return whether a kernel cannot read `x` in place: channels apart, no `vector` at once, offsets above 32 bits."""
    if x.ndim == 4 and x.shape[1] > 1 and x.stride(1) > MOST_TOKEN_STRIDE:
        return True
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return True
    return vector > 1 and any(s % vector for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)


def alignment(x: Tensor, vector: int) -> int:
    """Return what the address of `x` must be a multiple of where a kernel reads `vector` channels at once."""
    return vector * x.element_size() if vector > 1 else 1


def validate(name: str, x: Tensor) -> None:
    """Check through DLPack that a kernel will see the tensor that torch sees: done once per signature."""
    address, shape, strides, device, element_bytes = dlpack.view(x)
    wrong = shape != tuple(x.shape) or device != x.device.index or element_bytes != x.element_size()
    # Strides of a dimension of size 1 have no meaning.
    differ = any(a != b and n != 1 for a, b, n in zip(strides, x.stride(), shape, strict=True))
    if wrong or (x.numel() > 0 and (address != x.data_ptr() or differ)):
        raise ValueError(
            f"{name}: DLPack shows shape {shape}, strides {strides} at {address:#x} on device "
            f"{device}; torch shows {tuple(x.shape)}, {x.stride()} at {x.data_ptr():#x} on {x.device}"
        )
