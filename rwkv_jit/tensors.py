"""The torch side of a launch: arrays in, argument checks, DLPack on first sight, raw addresses and streams after."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rwkv_jit import compiler, cuda, env
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.launch import Plan

# Elements between tokens that offsets of 32 bits within a chunk of 64 allow.
MOST_TOKEN_STRIDE = 2**26 - 1
STORAGE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def from_any(name: str, array: Any, in_place: bool = False) -> Tensor:
    """Return a tensor over `array`: itself, or a view through DLPack of CuPy, NumPy, JAX and other arrays.

    Arrays that torch cannot view are copied: those that are read-only, run backwards or are not aligned. `in_place`
    ones may not be.

    Raises
    ------
    TypeError
        It is no array, or none that torch can take: sparse, nested, or of numbers that torch has not.
    ValueError
        It is to be changed in place and cannot be.
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
    """Return why torch cannot view an array, as the end of a sentence.

    Strides below zero are an exception inside of torch that ends the process.
    """
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
            f"{name}: is changed in place; expected memory of its own for every element, got strides {x.stride()} "
            f"with shape {list(x.shape)}"
        )
    return x


def check_inputs(inputs: Mapping[str, Tensor], like: str, value: str, decay: str | None, wide: bool) -> None:
    """Check the [B, T, H, K] inputs of an op; the one named `value` may have its own last size.

    `wide` admits float64, which only the reference computes.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    first = inputs[like]
    dtypes = [*STORAGE, torch.float64] if wide else list(STORAGE)
    for name, x in inputs.items():
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions [B, T, H, head size], got shape {tuple(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{name}: expected device {first.device} like {like}, got {x.device}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
        if x.dtype != first.dtype and not (name == decay and x.dtype == torch.float32):
            also = " or torch.float32" if name == decay else ""
            raise TypeError(f"{name}: expected {first.dtype} like {like}{also}, got {x.dtype}")
        same = x.shape[:3] == first.shape[:3] and (name == value or x.shape[3] == first.shape[3])
        if not same:
            want = [*first.shape[:3], "value size" if name == value else first.shape[3]]
            raise ValueError(f"{name}: expected shape [{', '.join(map(str, want))}] like {like}, got {list(x.shape)}")
        if x.shape[3] < 1:
            raise ValueError(f"{name}: expected a head size of at least 1, got shape {list(x.shape)}")


def check_state(state: Tensor, sequences: int, heads: int, sizes: tuple[int, int], like: Tensor, wide: bool) -> None:
    """Check an initial state [N, H, *sizes] or [H, *sizes]."""
    want = (sequences, heads, *sizes)
    if tuple(state.shape) not in (want, want[1:]):
        raise ValueError(f"initial_state: expected shape {list(want)} or {list(want[1:])}, got {list(state.shape)}")
    if state.device != like.device:
        raise ValueError(f"initial_state: expected device {like.device}, got {state.device}")
    if state.dtype not in STORAGE and not (wide and state.dtype == torch.float64):
        raise TypeError(f"initial_state: expected {' or '.join(map(str, STORAGE))}, got {state.dtype}")


def check_packing(cu_seqlens: Tensor, like: Tensor) -> None:
    """Check what can be said of cu_seqlens without reading its values."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected torch.int32 or torch.int64, got {cu_seqlens.dtype}")
    if like.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected a batch of 1 with packed sequences, got a batch of {like.shape[0]}")
    if cu_seqlens.device != like.device:
        raise ValueError(f"cu_seqlens: expected device {like.device}, got {cu_seqlens.device}")


_checked_packings: dict[int, tuple[Any, int, int]] = {}


def packing(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return cu_seqlens as the kernels read it, with its values checked.

    On a GPU they are checked once per tensor, as that takes a copy to the host: again where torch has counted a change.
    What it cannot count, as through `.data` or another library, is read all the same, and kernels clamp every bound.

    Raises
    ------
    ValueError
        It does not start at 0, end at `tokens` and never fall.
    """
    bounds = readable_packing(cu_seqlens)
    if not cu_seqlens.is_cuda:
        _check_bounds(bounds, tokens)
        return bounds
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _checked_packings.get(id(cu_seqlens))
    if known and known[0]() is cu_seqlens and known[1:] == (version, tokens):
        return bounds
    if torch.cuda.is_current_stream_capturing():
        return bounds  # no copy to the host in a capture
    _check_bounds(bounds.cpu(), tokens)
    if version >= 0:
        index = id(cu_seqlens)
        gone = weakref.ref(cu_seqlens, lambda _: _checked_packings.pop(index, None))
        _checked_packings[index] = (gone, version, tokens)
    return bounds


def _check_bounds(values: Tensor, tokens: int) -> None:
    found = values.tolist()
    if found[0] != 0 or found[-1] != tokens or any(b < a for a, b in zip(found, found[1:], strict=False)):
        raise ValueError(f"cu_seqlens: expected values rising from 0 to {tokens} (the tokens), got {found[:20]}")


def readable_packing(cu_seqlens: Tensor) -> Tensor:
    """Return cu_seqlens as neighbouring int64: itself where it is, else a copy of what it holds now."""
    if cu_seqlens.dtype == torch.int64 and cu_seqlens.is_contiguous():
        return cu_seqlens
    return cu_seqlens.to(torch.int64).contiguous()


# ---- known calls -------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)
# Every call asks these: found once.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transforms = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled


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


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Return what autocast casts tensors of a device to; None where it is off."""
    if not (_any_autocast() or torch.compiler.is_compiling()):
        return None
    kind = like.device.type
    try:
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    except RuntimeError:  # a device that has no autocast, like meta
        return None


def exactly(like: Tensor) -> torch.autocast:
    """Do what follows without autocast, in the dtypes that are there."""
    return torch.autocast(like.device.type, enabled=False)


def under_autocast(x: Tensor, dtype: torch.dtype, keep: bool = False) -> Tensor:
    """Return `x` as torch's own ops take it under autocast: floating, but float64, in its dtype; or `keep` float32."""
    if not x.is_floating_point() or x.dtype == torch.float64 or (keep and x.dtype == torch.float32):
        return x
    return x.to(dtype)


def are_plain(arrays: Iterable[Any]) -> bool:
    """Return whether these are torch's own tensors or None, and no subclass that wants to see what is done to it."""
    return all(x is None or type(x) in _PLAIN for x in arrays)


def signature(arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return all that decides whether and how a call can be done, but the addresses; None for other arrays.

    The strides of a contiguous tensor are those of its shape, where they mean anything.
    """
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
    """Return a check whether others are like these: of the same signature, and gradients are wanted of the same ones.

    It is one call where `signature` asks dozens, and says no more often: where strides differ that mean nothing, and
    where two of the others are one tensor.
    """
    if _Guards is None:
        return lambda *_: False
    check: Callable[..., bool] = _Guards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


# ---- devices and addresses ---------------------------------------------------------------------------------------


@cache
def _capability(device: int) -> str:
    if not torch.cuda.is_available():  # for tensors without memory, as of FakeTensorMode
        raise UnsupportedConfigError(
            "arch: there is no GPU to take it from, which decides about the kernels; set RWKVJIT_ARCH, e.g. to sm_90"
        )
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


def targets(given: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the architecture to compile for, by default that of the current device, and those that will do too.

    Raises
    ------
    ValueError
        It is not written like one, or there is no GPU to take it from.
    """
    chosen = given if given is not None else env.arch()
    if chosen is not None:
        return compiler.check_arch(chosen), ()
    if not torch.cuda.is_available():
        raise ValueError("arch: there is no GPU to take it from; pass one, e.g. arch='sm_90'")
    device = torch.cuda.current_device()
    return arch(device), also(device)


@cache
def multiprocessors(device: int) -> int:
    """Return the number of streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(plan: Plan, values: Sequence[Any], side: cuda.SideStream | None = None) -> None:
    """Launch a plan on torch's current stream of its device, or the one beside it, whichever device is current."""
    device = plan.device
    stream = torch._C._cuda_getCurrentRawStream(device) if side is None else side.raw
    if torch._C._cuda_getDevice() == device:
        plan.launch(stream, values)
    else:
        with torch.cuda.device(device):
            plan.launch(stream, values)


_sides: dict[tuple[int, int], cuda.SideStream] = {}


def side_stream(device: int) -> cuda.SideStream:
    """Return the stream beside torch's current one of a device: one for each, so that a capture of one ends there."""
    key = device, torch._C._cuda_getCurrentRawStream(device)
    if key not in _sides:
        with torch.cuda.device(device):
            _sides.setdefault(key, cuda.SideStream(key[1]))
    return _sides[key]


def capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return bool(torch.cuda.is_current_stream_capturing())


def needs_copy(x: Tensor, vector: int) -> bool:
    """Return whether a kernel cannot read `x` in place.

    Kernels take any stride but need neighbouring channels, and read `vector` of them at once. Offsets within a chunk
    have 32 bits.
    """
    if x.ndim == 4 and x.shape[1] > 1 and x.stride(1) > MOST_TOKEN_STRIDE:
        return True
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return True
    return vector > 1 and any(s % vector for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)


def alignment(x: Tensor, vector: int) -> int:
    """Return what the address of `x` must be a multiple of where a kernel reads `vector` channels at once."""
    return vector * x.element_size() if vector > 1 else 1


def aligned(x: Tensor, vector: int) -> Tensor:
    """Return `x`, or a copy where it starts at an address that a kernel cannot read."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % alignment(x, vector) else x


def readable(x: Tensor, vector: int) -> Tensor:
    """Return `x`, or a copy where a kernel cannot read it in place."""
    return aligned(x.contiguous() if needs_copy(x, vector) else x, vector)


class _Capsule:
    """A tensor's DLPack capsule without the stream handshake, which would wait for CuPy's stream."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return self.tensor.__dlpack__(stream=-1)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def validate(name: str, x: Tensor) -> None:
    """Check through DLPack that a kernel will see the tensor that torch sees: done once per signature.

    16-bit tensors travel as int16, since CuPy reads bfloat16 only with another package.
    """
    seen = x.detach()
    seen = seen.view(torch.int16) if seen.element_size() == 2 else seen
    array = cuda.from_dlpack(_Capsule(seen))
    strides = tuple(s * seen.element_size() for s in seen.stride())
    wrong = array.shape != tuple(seen.shape) or array.device.id != seen.device.index
    wrong = wrong or (seen.numel() > 0 and (array.data.ptr != seen.data_ptr() or not _same_strides(array, strides)))
    if wrong:
        raise ValueError(
            f"{name}: DLPack shows shape {array.shape}, strides {array.strides} at {array.data.ptr:#x} on device "
            f"{array.device.id}; torch shows {tuple(seen.shape)}, {strides} at {seen.data_ptr():#x} on {seen.device}"
        )


def _same_strides(array: Any, strides: tuple[int, ...]) -> bool:
    """Strides of a dimension of size 1 have no meaning."""
    return all(a == b or n == 1 for a, b, n in zip(array.strides, strides, array.shape, strict=True))


def check_fixed(name: str, x: Tensor, shape: tuple[int, int], like: Tensor) -> None:
    """Check an input that is the same for every token, [H, K], in the dtype of the streamed ones or float32."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)} [heads, head size], got {list(x.shape)}")
    if x.dtype not in (like.dtype, torch.float32):
        raise TypeError(f"{name}: expected {like.dtype} or torch.float32, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {x.device}")
