"""What is checked of a call before anything is launched."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import rule, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.problem import Op

DECAYS = ("raw", "sigmoid", "log", "direct")
STATE_LAYOUTS = ("vk", "kv")
_LARGEST = sys.float_info.max
# What messages call the dimensions of inputs.
_DIMENSIONS = {"K": "head size", "V": "value size", "G": "key heads"}


# ---- options -----------------------------------------------------------------------------------------------------


def decays_of(op: Op) -> tuple[str, ...]:
    """Return the legal maps from w to the per-step factor."""
    return ("none",) if op.decay == "none" else DECAYS


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
        ("backend", backend, rule.NAMES),
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


def is_for_kernels(backend: str, x: Tensor) -> bool:
    """Return whether kernels run a call: CUDA tensors take them, all others plain torch."""
    if backend not in ("auto", "reference") and x.device.type != "cuda":
        raise UnsupportedConfigError(
            f"backend: {backend!r} runs on CUDA tensors, got {x.device}; use 'auto' or 'reference'"
        )
    return backend != "reference" and x.device.type == "cuda"


# ---- tensors -----------------------------------------------------------------------------------------------------


def check_tensors(
    op: Op, arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, state_layout: str, backend: str
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Check the arrays of a call whose options are right, and return them as tensors.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    given = [tensors.from_any(name, x) for name, x in zip(op.public_names, arrays, strict=True)]
    first = given[0]
    on_gpu = is_for_kernels(backend, first)
    sizes = _check_inputs(op, given, wide=not on_gpu)
    sequences = first.shape[0]
    if cu_seqlens is not None:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        _check_packing(cu_seqlens, first)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        shape = (sequences, *(sizes[dim] for dim in op.state_dims(state_layout)))
        _check_state(initial_state, shape, first, wide=not on_gpu)
    return given, initial_state, cu_seqlens


def _check_inputs(op: Op, given: Sequence[Tensor], wide: bool) -> dict[str, int]:
    """Check the inputs by their dimensions, and return the sizes of these; `wide` admits float64 for plain torch."""
    first, first_name = given[0], op.public_names[0]
    dtypes = [*tensors.STORAGE, torch.float64] if wide else list(tensors.STORAGE)
    rows = list(zip(op.public_names, op.names, given, strict=True))
    sizes: dict[str, int] = {}
    for name, own_name, x in [row for row in rows if row[1] in op.streamed]:
        dims = op.inputs[own_name]
        if x.dim() != len(dims):
            listed = ", ".join("head size" if dim in "KV" else dim for dim in dims)
            raise ValueError(f"{name}: expected {len(dims)} dimensions [{listed}], got shape {tuple(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{name}: expected device {first.device} like {first_name}, got {x.device}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
        may_be_wide = own_name in op.wide
        if x.dtype != first.dtype and not (may_be_wide and x.dtype == torch.float32):
            also = " or torch.float32" if may_be_wide else ""
            raise TypeError(f"{name}: expected {first.dtype} like {first_name}{also}, got {x.dtype}")
        if any(dim in sizes and sizes[dim] != size for dim, size in zip(dims, x.shape, strict=True)):
            want = [str(sizes.get(dim, _DIMENSIONS.get(dim, dim))) for dim in dims]
            raise ValueError(f"{name}: expected shape [{', '.join(want)}] like {first_name}, got {list(x.shape)}")
        sizes.update(zip(dims, x.shape, strict=True))
        if dims[-1] in "KV" and x.shape[-1] < 1:
            raise ValueError(f"{name}: expected a head size of at least 1, got shape {list(x.shape)}")
    for name, own_name, x in [row for row in rows if row[1] in op.fixed]:
        dims = op.inputs[own_name]
        shape = [sizes[dim] for dim in dims]
        if list(x.shape) != shape:
            listed = ", ".join("heads" if dim == "H" else _DIMENSIONS.get(dim, dim) for dim in dims)
            raise ValueError(f"{name}: expected shape {shape} [{listed}], got {list(x.shape)}")
        if x.dtype != first.dtype and not (own_name in op.wide and x.dtype == torch.float32):
            also = " or torch.float32" if own_name in op.wide else ""
            raise TypeError(f"{name}: expected {first.dtype}{also}, got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name}: expected device {first.device}, got {x.device}")
    if "G" in sizes and (sizes["H"] % sizes["G"] if sizes["G"] else sizes["H"]):
        raise ValueError(f"{first_name}: expected key heads that divide the {sizes['H']} heads, got {sizes['G']}")
    return sizes


def _check_state(state: Tensor, shape: tuple[int, ...], first: Tensor, wide: bool) -> None:
    """Check an initial state [N, H, ...] or [H, ...]."""
    if tuple(state.shape) not in (shape, shape[1:]):
        want = f"{list(shape)} or {list(shape[1:])}"
        raise ValueError(f"initial_state: expected shape {want}, got {list(state.shape)}")
    if state.device != first.device:
        raise ValueError(f"initial_state: expected device {first.device}, got {state.device}")
    if state.dtype not in tensors.STORAGE and not (wide and state.dtype == torch.float64):
        raise TypeError(f"initial_state: expected {' or '.join(map(str, tensors.STORAGE))}, got {state.dtype}")


def _check_packing(cu_seqlens: Tensor, first: Tensor) -> None:
    """Check what can be said of cu_seqlens without reading its values."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected torch.int32 or torch.int64, got {cu_seqlens.dtype}")
    if first.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected a batch of 1 with packed sequences, got a batch of {first.shape[0]}")
    if cu_seqlens.device != first.device:
        raise ValueError(f"cu_seqlens: expected device {first.device}, got {cu_seqlens.device}")
